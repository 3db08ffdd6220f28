/* the PSNR curve under the transport: one click, one frame */
let curveCursor = null;
function showCurve() {
  const box = $("curve"),
    rows = current().methods.filter((m) => m.method !== "dense" && !isEqual(m)),
    shownRow = rowOf(compared());
  box.replaceChildren();
  box.setAttribute("aria-valuemax", frames);
  curveCursor = make("i");
  if (!rows.length) {
    box.append(make("span", { class: "all" }, "Every frame is equal to dense attention's: no PSNR to draw."));
    return;
  }
  /* equal frames have no finite PSNR: they are drawn at the upper edge */
  const finite = rows.flatMap((m) => m.psnr.per_frame).filter((y) => y < 100),
    high = finite.length ? Math.max(...finite) : 100,
    low = finite.length ? Math.min(...finite) : 99;
  const span = high - low || 1,
    px = (x) => (1000 * (x + 0.5)) / frames,
    py = (y) => 100 * (1 - (Math.min(y, high) - low) / span);
  const svg = shape("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  const drawn = [...rows.filter((m) => m !== shownRow), ...rows.filter((m) => m === shownRow)];
  for (const m of drawn)
    svg.append(
      shape("polyline", {
        points: m.psnr.per_frame.map((y, x) => px(x) + "," + py(y)).join(" "),
        fill: "none",
        stroke: colour(m.name),
        "stroke-width": m === shownRow ? 2.5 : 1.2,
        "vector-effect": "non-scaling-stroke",
        "stroke-linejoin": "round",
        opacity: m === shownRow ? 1 : 0.6,
      }),
    );
  curveCursor = shape("line", {
    y1: -5,
    y2: 105,
    stroke: "var(--ink)",
    "stroke-width": 1.5,
    "vector-effect": "non-scaling-stroke",
  });
  svg.append(curveCursor);
  const plot = make("div", { class: "plot" }, svg),
    key = make("div", { class: "key" });
  /* words stand above the plot, where neither a curve nor the playhead crosses them */
  for (const m of rows) key.append(make("span", m === shownRow ? { class: "shown" } : {}, dot(m.name), m.label));
  key.append(make("span", {}, `${low.toFixed(1)} to ${high.toFixed(1)} dB`));
  if (shownRow && !isEqual(shownRow)) {
    const frame = shownRow.worst_frame.frame,
      point = make("i");
    point.style.background = colour(shownRow.name);
    point.style.left = (100 * (frame + 0.5)) / frames + "%";
    point.style.top = py(shownRow.psnr.per_frame[frame]) + "%";
    plot.append(point);
    key.append(make("span", {}, dot(shownRow.name), `worst, ${decibel(shownRow.worst_frame.psnr)}`));
  }
  box.append(key, plot);
}
function showCurveAt(frame) {
  const row = rowOf(compared()),
    x = (1000 * (frame + 0.5)) / frames;
  if (curveCursor) {
    curveCursor.setAttribute("x1", x);
    curveCursor.setAttribute("x2", x);
  }
  const value = row && row.psnr.per_frame[frame];
  $("curve").setAttribute("aria-valuenow", frame + 1);
  $("curve").setAttribute(
    "aria-valuetext",
    `frame ${frame + 1} of ${frames}` + (value == null ? "" : value >= 100 ? ", equal" : `, ${value.toFixed(1)} dB`),
  );
}
const frameAt = (event) => {
  const box = $("curve").getBoundingClientRect();
  return clamp(Math.floor(((event.clientX - box.left) / box.width) * frames), 0, last);
};
$("curve").addEventListener("pointerdown", (event) => {
  $("curve").setPointerCapture(event.pointerId);
  stop(frameAt(event));
});
$("curve").addEventListener("pointermove", (event) => {
  if (event.buttons) stop(frameAt(event));
});

/* curves over the steps */
function nice(low, high) {
  if (low === high) low -= Math.abs(low) / 2 || 1; // a flat curve has a scale, too
  const gap = high - low,
    raw = gap / 4,
    power = 10 ** Math.floor(Math.log10(raw)),
    step = [1, 2, 2.5, 5, 10].find((s) => s * power >= raw) * power;
  const from = Math.floor(low / step + 1e-9) * step,
    ticks = [];
  for (let y = from; y < high + step * 0.999; y += step) ticks.push(+y.toFixed(10));
  return ticks;
}
function chart(title, key, show, top) {
  const points = (m) =>
    m.method === "dense" && key !== "seconds" ? [] : m.steps.map((s) => [s.step, s[key], s.phase]);
  const series = current()
    .methods.map((m) => ({ name: m.name, points: points(m).filter((p) => p[1] != null && isFinite(p[1])) }))
    .filter((s) => s.points.length);
  if (!series.length) return [];
  const all = series.flatMap((s) => s.points),
    xs = all.map((p) => p[0]),
    ys = all.map((p) => p[1]),
    W = 380,
    H = 210,
    L = 44,
    R = 10,
    T = 8,
    B = 34;
  const ticks = nice(Math.min(...ys), top ?? Math.max(...ys)),
    digits = Math.max(...ticks.map((y) => (String(y).split(".")[1] || "").length)), // no two labels alike
    low = ticks[0],
    high = Math.max(ticks[ticks.length - 1], low + 1e-9),
    x0 = Math.min(...xs),
    x1 = Math.max(...xs, x0 + 1);
  const px = (x) => L + ((x - x0) / (x1 - x0)) * (W - L - R),
    py = (y) => T + ((high - y) / (high - low)) * (H - T - B);
  const svg = shape("svg", {
    viewBox: `0 0 ${W} ${H}`,
    role: "img",
    "aria-label":
      title +
      " by step: " +
      series
        .map((s) => `${titled(s.name)} from ${show(s.points[0][1])} to ${show(s.points[s.points.length - 1][1])}`)
        .join(", "),
  });
  for (const y of ticks)
    svg.append(
      shape("line", { x1: L, x2: W - R, y1: py(y), y2: py(y), stroke: "var(--line)" }),
      shape("text", { x: L - 7, y: py(y) + 4, "text-anchor": "end", class: "tick" }, show(y, digits)),
    );
  const every = Math.max(1, Math.ceil((x1 - x0) / 8));
  for (let x = x0; x <= x1; x += every)
    svg.append(shape("text", { x: px(x), y: H - 16, "text-anchor": "middle" }, x + 1));
  svg.append(shape("text", { x: (W + L) / 2, y: H - 1, "text-anchor": "middle" }, "step"));
  for (const s of series) {
    svg.append(
      shape("polyline", {
        points: s.points.map((p) => px(p[0]) + "," + py(p[1])).join(" "),
        fill: "none",
        stroke: colour(s.name),
        "stroke-width": s.name === main ? 3 : 1.8,
        "stroke-linejoin": "round",
      }),
    );
    for (const p of s.points)
      if (p[2] === "refresh" || p[2] === "anchor")
        svg.append(shape("circle", { cx: px(p[0]), cy: py(p[1]), r: 3.6, fill: colour(s.name) }));
  }
  const cursor = shape("line", {
      y1: T,
      y2: H - B,
      stroke: "var(--soft)",
      "stroke-dasharray": "3 3",
      visibility: "hidden",
    }),
    tip = make("div", { class: "tip" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(),
      x = Math.round(x0 + ((((event.clientX - box.left) / box.width) * W - L) / (W - L - R)) * (x1 - x0));
    if (x < x0 || x > x1) return;
    cursor.setAttribute("x1", px(x));
    cursor.setAttribute("x2", px(x));
    cursor.setAttribute("visibility", "visible");
    tip.style.display = "block";
    tip.replaceChildren(
      make("b", {}, "step " + (x + 1)),
      ...series.map((s) => {
        const p = s.points.find((q) => q[0] === x);
        return make("div", {}, dot(s.name), titled(s.name) + "  " + (p ? show(p[1]) + (p[2] ? " · " + p[2] : "") : "–"));
      }),
    );
    tip.style.left = event.clientX - box.left > box.width / 2 ? "58px" : "auto";
    tip.style.right = tip.style.left === "auto" ? "14px" : "auto";
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    tip.style.display = "none";
  });
  return [make("div", { class: "card chart" }, make("h3", {}, title), svg, tip)];
}
function showCharts() {
  $("charts").replaceChildren(
    ...chart("Density", "density", (y, n = 2) => (100 * y).toFixed(Math.max(0, n - 2)) + "%", 1),
    ...chart("Attention recall", "recall", (y, n = 2) => y.toFixed(Math.max(2, n)), 1),
    ...chart("Seconds per step", "seconds", (y) => +y.toFixed(2)),
  );
}

/* maps: rows are layers, columns steps or heads */
const STOPS = [
  [68, 1, 84],
  [59, 82, 139],
  [33, 145, 140],
  [94, 201, 98],
  [253, 231, 37],
];
const gridOf = (m) => (state.axis === "step" ? m.map && m.map[state.heat] : m.heat[state.heat]);
const layerName = (m, row) => {
  if (state.axis === "head") return String(row);
  const [transformer, layer] = m.map.layers[row];
  return m.map.layers.some((other) => other[0] !== transformer) ? `${transformer} ${layer}` : String(layer);
};
function oneMap(m, low, high) {
  const grid = gridOf(m),
    rows = grid.length,
    count = grid[0].length,
    numbers = count <= 8,
    cw = numbers ? Math.max(30, 200 / count) : Math.max(5, 320 / count),
    ch = numbers ? 24 : clamp(240 / rows, 5, 24);
  const known = grid.flat().filter((v) => v != null),
    mean = known.reduce((s, v) => s + v, 0) / known.length;
  const ends = [Math.min(...known), Math.max(...known)].map((v) => v.toFixed(2)).join(" to ");
  const about = `${state.heat} of ${m.label} by layer and ${state.axis}: mean ${mean.toFixed(2)}, from ${ends}`;
  const left = 12 + 7 * Math.max(...grid.map((_, row) => layerName(m, row).length)),
    width = cw * count + left + 4;
  const svg = shape("svg", {
    viewBox: `${-left} -16 ${width} ${ch * rows + 32}`,
    role: "img",
    "aria-label": about,
  });
  svg.style.maxWidth = 1.4 * width + "px";
  for (let i = 0; i < count; i += Math.ceil(count / 10))
    svg.append(shape("text", { x: (i + 0.5) * cw, y: -5, "text-anchor": "middle" }, state.axis === "step" ? i + 1 : i));
  svg.append(shape("text", { x: (cw * count) / 2, y: ch * rows + 13, "text-anchor": "middle" }, state.axis));
  grid.forEach((row, layer) => {
    if (layer % Math.ceil(rows / 12) === 0)
      svg.append(shape("text", { x: -6, y: (layer + 0.5) * ch + 4, "text-anchor": "end" }, layerName(m, layer)));
    row.forEach((value, i) => {
      const t = value == null ? 0 : (value - low) / (high - low),
        gap = cw > 8 ? 1 : 0;
      const cell = shape("rect", {
        x: i * cw + gap / 2,
        y: layer * ch + gap / 2,
        width: cw - gap,
        height: ch - gap,
        rx: gap * 2,
        fill: value == null ? "var(--line)" : `rgb(${between(STOPS, t)})`,
      });
      cell.append(
        shape(
          "title",
          {},
          `layer ${layerName(m, layer)}, ${state.axis} ${state.axis === "step" ? i + 1 : i}: ` +
            (value == null ? "not measured" : value.toFixed(3)),
        ),
      );
      svg.append(cell);
      if (numbers && value != null) {
        const label = shape(
          "text",
          { x: (i + 0.5) * cw, y: (layer + 0.5) * ch + 4, "text-anchor": "middle", "pointer-events": "none" },
          value.toFixed(2),
        );
        label.style.fill = t > 0.55 ? "#111" : "#fff";
        svg.append(label);
      }
    });
  });
  return make("div", { class: "card heat" }, make("h3", {}, dot(m.name), m.label), svg);
}
function showMaps() {
  for (const kind of ["heat", "axis"])
    each(`[data-${kind}]`).forEach((b) => b.setAttribute("aria-pressed", b.dataset[kind] === state[kind]));
  const shown = current().methods.filter((m) => m.method !== "dense" && gridOf(m)),
    all = shown.flatMap((m) => gridOf(m).flat()),
    values = all.filter((v) => v != null);
  const grey = state.heat === "recall" ? "not measured, as in dense steps" : "the layer did not run in that step";
  $("map-told").textContent =
    state.axis === "step"
      ? "Rows are layers, columns are denoising steps; mean over heads." +
        (values.length < all.length ? ` Grey: ${grey}.` : "")
      : "Rows are layers, columns are heads; mean over the sparse steps.";
  $("scale").replaceChildren();
  if (!values.length) {
    $("heats").replaceChildren(
      make(
        "p",
        { class: "soft" },
        "Nothing of it in these records: run park compare again with --overwrite, and without --recall-rows 0.",
      ),
    );
    return;
  }
  const low = Math.floor(20 * Math.min(...values)) / 20,
    high = Math.max(Math.ceil(20 * Math.max(...values)) / 20, low + 0.05),
    bar = make("i");
  bar.style.background = "linear-gradient(90deg," + STOPS.map((s) => `rgb(${s})`) + ")";
  $("scale").append(low.toFixed(2), bar, high.toFixed(2));
  $("heats").replaceChildren(...shown.map((m) => oneMap(m, low, high)));
}
each("[data-heat]").forEach((b) => {
  b.onclick = () => set({ heat: b.dataset.heat });
});
each("[data-axis]").forEach((b) => {
  b.onclick = () => set({ axis: b.dataset.axis });
});
when("heat axis", showMaps);
