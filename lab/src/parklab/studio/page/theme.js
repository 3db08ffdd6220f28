"use strict";
/* theme: the reader's own choice is remembered, the system's is the default; browsers may refuse to store */
const root = document.documentElement,
  THEME = "parkattn.theme",
  themeButton = document.getElementById("theme");
function remembered() {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null;
  }
}
function showTheme(theme) {
  root.dataset.theme = theme;
  themeButton.setAttribute("aria-pressed", theme === "dark");
}
showTheme(remembered() || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
themeButton.onclick = () => {
  showTheme(root.dataset.theme === "dark" ? "light" : "dark");
  try {
    localStorage.setItem(THEME, root.dataset.theme);
  } catch {
    /* shown all the same */
  }
};
