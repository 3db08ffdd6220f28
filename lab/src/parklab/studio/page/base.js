/* data, words for figures, and the settings of the view, which stand in the address */
const data = JSON.parse(document.getElementById("data").textContent),
  settings = data.settings,
  cases = data.cases;
const names = cases[0].methods.map((m) => m.name),
  titles = Object.fromEntries(cases[0].methods.map((m) => [m.name, m.label])),
  titled = (name) => titles[name],
  $ = (id) => document.getElementById(id),
  each = (selector) => [...document.querySelectorAll(selector)];
const PALETTE = ["#8a93a6", "#7c5cff", "#e8912d", "#1fa97c", "#e2557b", "#2f8fdd", "#b0a000", "#9c6b4e"];
const colour = (name) => PALETTE[names.indexOf(name) % PALETTE.length],
  clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const percent = (x) => (x == null ? "–" : (100 * x).toFixed(0) + " %"),
  fixed = (x, n) => (x == null ? "–" : x.toFixed(n));
const times = (x, warning) => (x == null ? "–" : (warning ? "≈\u00a0" : "") + x.toFixed(2) + "×");
const decibel = (x) => (x == null ? "–" : x >= 100 ? "≥ 100 dB" : x.toFixed(1) + " dB");
const isEqual = (m) => m.equal_frames === m.psnr.per_frame.length,
  quality = (m) => (isEqual(m) ? "equal" : decibel(m.psnr.mean));
const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes))
    if (key === "class") node.className = value;
    else node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function shape(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text != null) node.textContent = text;
  return node;
}
const dot = (name) => {
  const d = make("span", { class: "dot" });
  d.style.background = colour(name);
  return d;
};

/* one setting each: its first value, and how a word of the address becomes one (undefined: not one of its values) */
const main = data.main;
const choice = (values) => (word) => values.find((value) => String(value) === word);
const number = (low, high) => (word) => (word !== "" && isFinite(word) ? clamp(+word, low, high) : undefined);
const SETTINGS = {
  case: [0, (word) => choice(cases.map((_, i) => i))(word)],
  a: [names[0], choice(names)],
  b: [main, choice(names)],
  mode: ["wipe", choice(["wipe", "blink", "heat"])],
  split: [0.5, number(0, 1)],
  every: [0.6, number(0.4, 2)],
  gain: [8, number(1, 64)],
  zoom: [1, number(1, 8)],
  x: [0.5, number(0, 1)],
  y: [0.5, number(0, 1)],
  speed: [1, choice([1, 0.5, 0.25])],
  axis: ["step", choice(["step", "head"])],
  heat: ["recall", choice(["recall", "density"])],
  frame: [null, number(1, settings.frames)],
};
const state = {},
  changed = {};
function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1)),
    found = {};
  for (const [name, [first, read]] of Object.entries(SETTINGS))
    found[name] = (words.has(name) ? read(words.get(name)) : undefined) ?? first;
  return found;
}
function address() {
  const words = new URLSearchParams();
  for (const [name, [first]] of Object.entries(SETTINGS)) {
    if (state[name] !== first && state[name] != null)
      words.set(name, typeof state[name] === "number" ? +state[name].toFixed(3) : state[name]);
  }
  return String(words) ? "#" + words : location.pathname + location.search;
}
let writing = 0;
/* change some settings: what shows them is told, and the address follows a moment later */
function set(changes) {
  const fresh = Object.keys(changes).filter((name) => state[name] !== changes[name]);
  Object.assign(state, changes);
  for (const name of fresh) (changed[name] || []).forEach((tell) => tell(state[name]));
  clearTimeout(writing);
  writing = setTimeout(() => {
    try {
      history.replaceState(null, "", address());
    } catch {
      /* browsers limit how often */
    }
  }, 200);
}
function when(wanted, tell) {
  for (const name of wanted.split(" ")) (changed[name] ||= []).push(tell);
}
Object.assign(state, readAddress());
addEventListener("hashchange", () => set(readAddress()));
const current = () => cases[state.case],
  rowOf = (name) => current().methods.find((m) => m.name === name);
const compared = () => (state.b !== "dense" ? state.b : state.a);
