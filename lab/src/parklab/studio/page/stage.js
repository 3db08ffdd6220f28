/* the large view: it draws the very videos of the page, so it cannot fall out of step with them */
const canvas = $("canvas"),
  pen = canvas.getContext("2d"),
  frameBox = $("frame");
const spare = document.createElement("canvas"),
  sparePen = spare.getContext("2d", { willReadFrequently: true });
let videos = [],
  dirty = true,
  blinked = false;
const videoOf = (name) => videos[names.indexOf(name)];

/* black, violet, orange, white: the brighter, the further apart */
const GLOW = [
  [0, 0, 4],
  [87, 16, 110],
  [188, 55, 84],
  [249, 142, 9],
  [252, 255, 220],
];
function between(stops, t) {
  const at = clamp(t, 0, 0.9999) * (stops.length - 1),
    i = Math.floor(at),
    f = at - i;
  return stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * f));
}
const GLOW_TABLE = Uint8ClampedArray.from(Array.from({ length: 256 }, (_, i) => between(GLOW, i / 255)).flat());
function luma(video) {
  sparePen.drawImage(video, 0, 0);
  return sparePen.getImageData(0, 0, spare.width, spare.height).data;
}
function drawHeat(a, b) {
  spare.width = canvas.width;
  spare.height = canvas.height;
  const one = luma(a),
    other = luma(b),
    picture = pen.createImageData(canvas.width, canvas.height),
    out = picture.data;
  for (let i = 0; i < out.length; i += 4) {
    /* BT.709 */
    const apart =
      0.2126 * (one[i] - other[i]) + 0.7152 * (one[i + 1] - other[i + 1]) + 0.0722 * (one[i + 2] - other[i + 2]);
    const place = 3 * Math.min(255, Math.round(Math.abs(apart) * state.gain));
    out[i] = GLOW_TABLE[place];
    out[i + 1] = GLOW_TABLE[place + 1];
    out[i + 2] = GLOW_TABLE[place + 2];
    out[i + 3] = 255;
  }
  pen.putImageData(picture, 0, 0);
}
function draw() {
  const a = videoOf(state.a),
    b = videoOf(state.b);
  if (!a.videoWidth || a.readyState < 2 || b.readyState < 2) return false;
  if (canvas.width !== a.videoWidth || canvas.height !== a.videoHeight) {
    canvas.width = a.videoWidth;
    canvas.height = a.videoHeight;
  }
  const w = canvas.width,
    h = canvas.height;
  if (state.mode === "heat") drawHeat(a, b);
  else if (state.mode === "blink") pen.drawImage(blinked ? b : a, 0, 0);
  else {
    /* the line stands still in the view while zoom and drag move the picture under it */
    const x = Math.round(clamp(state.x + (state.split - 0.5) / state.zoom, 0, 1) * w);
    pen.drawImage(b, 0, 0);
    if (x > 0) pen.drawImage(a, 0, 0, x, h, 0, 0, x, h);
  }
  return true;
}
function showTags() {
  const heat = state.mode === "heat",
    blink = state.mode === "blink";
  $("tag-a").textContent = heat
    ? `luma difference × ${+state.gain.toFixed(1)}: white from ${(255 / state.gain).toFixed(0)} of 255 levels on`
    : blink
      ? blinked
        ? titled(state.b)
        : titled(state.a)
      : titled(state.a);
  $("tag-a").style.maxWidth = heat ? "90%" : "";
  $("tag-b").hidden = heat || blink;
  $("tag-b").textContent = titled(state.b);
  const what = {
    wipe: `${titled(state.a)} left of the line, ${titled(state.b)} right of it`,
    blink: `${titled(state.a)} and ${titled(state.b)} in turn`,
    heat: `luma difference of ${titled(state.a)} and ${titled(state.b)}`,
  };
  canvas.setAttribute("aria-label", what[state.mode]);
}
function showView() {
  const edge = 0.5 / state.zoom;
  state.x = clamp(state.x, edge, 1 - edge);
  state.y = clamp(state.y, edge, 1 - edge);
  canvas.style.transform =
    state.zoom > 1 ? `scale(${state.zoom}) translate(${50 - 100 * state.x}%, ${50 - 100 * state.y}%)` : "";
  frameBox.classList.toggle("zoomed", state.zoom > 1);
  frameBox.dataset.view = state.mode;
  $("wipe").hidden = state.mode !== "wipe";
  $("wipe").style.left = 100 * state.split + "%";
  each("[data-mode]").forEach((b) => b.setAttribute("aria-pressed", b.dataset.mode === state.mode));
  each("[data-for]").forEach((label) => {
    label.hidden = label.dataset.for !== state.mode;
  });
  const dials = {
    split: [100 * state.split, Math.round(100 * state.split) + " %"],
    every: [state.every, state.every.toFixed(1) + " s"],
    gain: [Math.log2(state.gain), "× " + +state.gain.toFixed(1)],
    zoom: [state.zoom, +state.zoom.toFixed(1) + "×"],
  };
  for (const [id, [value, told]] of Object.entries(dials)) {
    $(id).value = value;
    $(id).setAttribute("aria-valuetext", told);
    $(id + "-told").textContent = told;
  }
  for (const id of ["a", "b"]) $(id).value = state[id];
  showTags();
  dirty = true;
}
when("a b mode split every gain zoom x y case", showView);
for (const id of ["a", "b"]) {
  $(id).append(...names.map((name) => make("option", { value: name }, titled(name))));
  $(id).onchange = () => set({ [id]: $(id).value });
}
each("[data-mode]").forEach((button) => {
  button.onclick = () => set({ mode: button.dataset.mode });
});
$("split").oninput = () => set({ split: $("split").value / 100 });
$("every").oninput = () => set({ every: +$("every").value });
$("gain").oninput = () => set({ gain: 2 ** $("gain").value });
$("zoom").oninput = () => set({ zoom: +$("zoom").value });
let blinkTimer = 0;
function blinkOn() {
  clearInterval(blinkTimer);
  if (state.mode === "blink")
    blinkTimer = setInterval(() => {
      blinked = !blinked;
      showTags();
      dirty = true;
    }, 1000 * state.every);
}
when("mode every", blinkOn);

/* fingers and mouse: one moves the line or, zoomed in and away from the line, the picture; two zoom */
const pointers = new Map();
let dragging = "",
  apartBefore = 0;
const placeIn = (event) => {
  const box = frameBox.getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height, box.width];
};
frameBox.addEventListener("pointerdown", (event) => {
  pointers.set(event.pointerId, event);
  if (pointers.size === 2) {
    dragging = "pinch";
    apartBefore = spread();
    return;
  }
  const [x, , width] = placeIn(event),
    near = Math.abs(x - state.split) * width < 28;
  dragging = state.mode === "wipe" && (state.zoom === 1 || near) ? "line" : state.zoom > 1 ? "picture" : "";
  if (dragging) frameBox.setPointerCapture(event.pointerId);
  if (dragging === "line") set({ split: clamp(x, 0, 1) });
});
frameBox.addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId);
  if (!before) return;
  pointers.set(event.pointerId, event);
  if (dragging === "pinch") {
    const apart = spread();
    set({ zoom: clamp((state.zoom * apart) / apartBefore, 1, 8) });
    apartBefore = apart;
  } else if (dragging === "line") set({ split: clamp(placeIn(event)[0], 0, 1) });
  else if (dragging === "picture") {
    const [x, y] = placeIn(event),
      [u, v] = placeIn(before);
    pan((u - x) / state.zoom, (v - y) / state.zoom);
  }
});
for (const name of ["pointerup", "pointercancel"])
  addEventListener(name, (event) => {
    pointers.delete(event.pointerId);
    if (!pointers.size) dragging = "";
  });
function spread() {
  const [p, q] = pointers.values();
  return Math.max(1, Math.hypot(p.clientX - q.clientX, p.clientY - q.clientY));
}
function pan(dx, dy) {
  const edge = 0.5 / state.zoom;
  set({ x: clamp(state.x + dx, edge, 1 - edge), y: clamp(state.y + dy, edge, 1 - edge) });
}
frameBox.addEventListener("dblclick", (event) => {
  const [x, y] = placeIn(event);
  set(state.zoom > 1 ? { zoom: 1, x: 0.5, y: 0.5 } : { zoom: 3, x: clamp(x, 1 / 6, 5 / 6), y: clamp(y, 1 / 6, 5 / 6) });
});
frameBox.addEventListener(
  "wheel",
  (event) => {
    if (!event.ctrlKey && !event.metaKey) return; /* the wheel alone scrolls the page */
    event.preventDefault();
    set({ zoom: clamp(state.zoom * (event.deltaY < 0 ? 1.15 : 1 / 1.15), 1, 8) });
  },
  { passive: false },
);
