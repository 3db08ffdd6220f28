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
