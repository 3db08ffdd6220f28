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
/* videos come out of this file, so nothing is requested from anywhere; the first one leads, the others follow it */
const fps = settings.fps,
  frames = settings.frames,
  last = frames - 1;
let playing = false,
  autoplay = !calm && state.frame == null,
  sources = [];
const leader = () => videos[0],
  middle = (frame) => (clamp(frame, 0, last) + 0.5) / fps;
const now = () => Math.min(last, Math.floor(leader().currentTime * fps + 1e-3));
function loadVideos() {
  const held = JSON.parse($("videos-" + state.case).textContent),
    wanted = videos.length ? now() : state.frame == null ? 0 : state.frame - 1;
  sources.forEach((url) => URL.revokeObjectURL(url));
  sources = [];
  $("players").replaceChildren();
  videos = current().methods.map((m) => {
    const bytes = Uint8Array.from(atob(held[m.name]), (c) => c.charCodeAt(0));
    const video = make("video", { playsinline: "", preload: "auto", "aria-label": "video of " + m.label });
    sources.push(URL.createObjectURL(new Blob([bytes], { type: "video/mp4" })));
    video.muted = true;
    video.src = sources[sources.length - 1];
    video.playbackRate = state.speed;
    for (const event of ["seeked", "loadeddata"])
      video.addEventListener(event, () => {
        dirty = true;
      });
    const facts = m.method === "dense" ? "reference" : quality(m) + " · " + times(m.speedup, current().timing_warning);
    $("players").append(
      make(
        "figure",
        { class: "card" },
        video,
        make("figcaption", {}, make("b", {}, dot(m.name), m.label), make("span", {}, facts)),
      ),
    );
    return video;
  });
  videos[0].addEventListener("ended", () => {
    if (playing) {
      seek(0);
      play();
    }
  });
  videos[0].addEventListener("loadedmetadata", (event) => {
    frameBox.style.setProperty("--ratio", event.target.videoWidth / event.target.videoHeight);
  });
  if (wanted) seek(wanted);
  if (playing) play();
  dirty = true;
}
function showPlaying(on) {
  playing = on;
  $("play").textContent = on ? "❚❚" : "▶";
  $("play").setAttribute("aria-label", on ? "Pause" : "Play");
}
async function play() {
  showPlaying(true);
  const those = videos;
  try {
    await Promise.all(those.map((v) => v.play()));
  } catch {
    if (those === videos) pause();
  }
}
function pause() {
  showPlaying(false);
  videos.forEach((v) => v.pause());
}
function seek(frame) {
  videos.forEach((v) => {
    v.currentTime = middle(frame);
  });
  dirty = true;
}
function stop(frame) {
  pause();
  seek(frame);
  set({ frame: clamp(frame, 0, last) + 1 });
}
$("play").onclick = () => {
  if (playing) stop(now());
  else {
    if (now() >= last) seek(0);
    set({ frame: null });
    play();
  }
};
$("back").onclick = () => stop(now() - 1);
$("forward").onclick = () => stop(now() + 1);
$("scrub").max = last;
$("scrub").oninput = (event) => stop(+event.target.value);
$("speed").onchange = (event) => set({ speed: +event.target.value });
when("speed", () => {
  $("speed").value = state.speed;
  videos.forEach((v) => {
    v.playbackRate = state.speed;
  });
});
when("frame", (frame) => {
  if (frame != null && Math.abs(frame - 1 - now()) > 0 && !playing) seek(frame - 1);
});
function showFrame() {
  const frame = now(),
    told = `${frame + 1} of ${frames}`;
  $("scrub").value = frame;
  $("scrub").setAttribute("aria-valuetext", "frame " + told);
  $("clock").textContent = "frame " + told;
  showCurveAt(frame);
}
function tick() {
  const first = leader(),
    those = videos;
  if (playing)
    for (const v of those.slice(1))
      if (Math.abs(v.currentTime - first.currentTime) > 0.6 / fps && !v.seeking && !first.ended)
        v.currentTime = first.currentTime;
  if ((playing || dirty) && draw()) {
    dirty = false;
    showFrame();
  }
  if (autoplay && those.every((v) => v.readyState >= 3)) {
    autoplay = false;
    play();
  }
  requestAnimationFrame(tick);
}

/* keys: the same as the controls, wherever the focus is, except where a control has its own use for them */
const nudge = (by) =>
  state.mode === "wipe"
    ? set({ split: clamp(state.split + 0.02 * by, 0, 1) })
    : state.mode === "heat"
      ? set({ gain: clamp(state.gain * 2 ** (by / 2), 1, 64) })
      : set({ every: clamp(state.every + 0.1 * by, 0.4, 2) });
const KEYS = [
  ["Space", "play or pause"],
  ["← →", "one frame back, forward"],
  ["Home End", "first, last frame"],
  ["1 2 3", "wipe, blink, heat-map"],
  ["[ ]", "move the line, change the gain or the blink"],
  ["+ − 0", "zoom in, out, off"],
  ["Shift and arrows", "move the zoomed picture"],
  ["S", "swap the two videos"],
  ["W", "go to the worst frame"],
  ["P N", "previous, next prompt or seed"],
  ["T", "light or dark"],
];
const ON_KEY = {
  " ": () => $("play").click(),
  ArrowLeft: () => stop(now() - 1),
  ArrowRight: () => stop(now() + 1),
  Home: () => stop(0),
  End: () => stop(last),
  1: () => set({ mode: "wipe" }),
  2: () => set({ mode: "blink" }),
  3: () => set({ mode: "heat" }),
  "[": () => nudge(-1),
  "]": () => nudge(1),
  "+": () => set({ zoom: clamp(state.zoom + 0.5, 1, 8) }),
  "=": () => set({ zoom: clamp(state.zoom + 0.5, 1, 8) }),
  "-": () => set({ zoom: clamp(state.zoom - 0.5, 1, 8) }),
  0: () => set({ zoom: 1, x: 0.5, y: 0.5 }),
  s: () => set({ a: state.b, b: state.a }),
  w: () => stop(rowOf(compared()).worst_frame.frame),
  p: () => turn(-1),
  n: () => turn(1),
  t: () => $("theme").click(),
};
const ON_SHIFT = { ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, -0.1], ArrowDown: [0, 0.1] };
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const at = event.target,
    moves = /^(Arrow|Home|End)/.test(event.key);
  if (at.tagName === "SELECT" || (moves && (at.tagName === "INPUT" || at.closest(".scroll, pre")))) return;
  if (event.key === " " && /BUTTON|A|SUMMARY/.test(at.tagName)) return;
  const shift = event.shiftKey && ON_SHIFT[event.key];
  const act = shift
    ? () => pan(shift[0] / state.zoom, shift[1] / state.zoom)
    : ON_KEY[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});
$("keys").append(...KEYS.flatMap(([key, what]) => [make("dt", {}, key), make("dd", {}, what)]));
