/* words and figures of the case in view, the gallery, copying and downloads; then everything starts */
const called = (name) => (name === "dense" ? "dense attention" : titled(name)),
  capital = (text) => text[0].toUpperCase() + text.slice(1);
function showWords() {
  const row = rowOf(compared());
  /* the pair that the stage shows */
  document.title = $("title").textContent =
    state.a === state.b ? capital(called(state.b)) : `${capital(called(state.b))} against ${called(state.a)}`;
  $("verdict").textContent =
    row.verdict || "Dense attention is the reference of every figure: choose another method to compare.";
  $("prompt").textContent = current().prompt;
  const where =
    data.environment.gpu && settings.device.startsWith("cuda") ? data.environment.gpu : data.environment.cpu;
  const size = `${settings.frames} frames of ${settings.width} × ${settings.height} · ${settings.steps} steps`;
  const changes = Object.entries(row.changes || {}).map(([name, value]) => ` · ${name}=${JSON.stringify(value)}`);
  $("seed").textContent =
    ` seed ${current().seed} · ${current().tokens.toLocaleString("en")} tokens · ${size} · ${where}${changes.join("")}`;
  $("rough").hidden = !current().timing_warning;
  $("rough").textContent = current().timing_warning || "";
  const fourth = row.recall
    ? [percent(row.recall.mean), "of attention weight kept"]
    : [fixed(row.ssim.mean, 3), "SSIM against dense"];
  const figures = [
    [quality(row), "PSNR against dense"],
    [times(row.speedup, current().timing_warning), "speed of denoising"],
    [percent(row.density), "of attention computed"],
    fourth,
  ];
  $("figures").replaceChildren(
    ...figures.map(([value, name]) => make("div", { class: "card" }, make("b", {}, value), make("small", {}, name))),
  );
  $("copy-method").textContent = `Copy command for ${titled(state.b)}`;
  const link = $("save-video");
  link.textContent = `Download ${titled(state.b)} (mp4)`;
  link.download = current().videos[state.b];
  link.href = sources[names.indexOf(state.b)] || "#";
}

/* tables; what is no faster than dense attention is no best of anything */
const gained = (m, value) => (m.speedup > 1 ? value : null);
const COLUMNS = [
  ["method", (m) => m.label],
  ["PSNR dB", (m) => (isEqual(m) ? "equal" : fixed(m.psnr.mean, 2)), (m) => m.psnr.mean],
  ["speed-up", (m) => times(m.speedup, current().timing_warning), (m) => gained(m, m.speedup)],
  ["worst frame", (m) => (isEqual(m) ? "equal" : fixed(m.psnr.worst, 2)), (m) => m.psnr.worst],
  ["SSIM", (m) => fixed(m.ssim.mean, 4), (m) => m.ssim.mean],
  ...(cases[0].methods.some((m) => m.lpips)
    ? [["LPIPS", (m) => fixed(m.lpips && m.lpips.mean, 4), (m) => -m.lpips.mean]]
    : []),
  ["density", (m) => percent(m.density)],
  ["sparse steps", (m) => percent(m.density_sparse_steps)],
  ["recall", (m) => fixed(m.recall && m.recall.mean, 3), (m) => m.recall && m.recall.mean],
  ["recall P05", (m) => fixed(m.recall && m.recall.p05, 3), (m) => m.recall && m.recall.p05],
  ["worst head", (m) => fixed(m.recall && m.recall.worst, 3), (m) => m.recall && m.recall.worst],
  ["denoise s", (m) => fixed(m.seconds.denoise, 1), (m) => gained(m, -m.seconds.denoise)],
  ["dense s", (m) => fixed(m.phase_seconds.dense, 1)],
  ...(cases[0].methods.some((m) => m.phase_seconds.anchor)
    ? [["anchor s", (m) => fixed(m.phase_seconds.anchor, 1)]]
    : []),
  ["refresh s", (m) => fixed(m.phase_seconds.refresh, 1)],
  ["reuse s", (m) => fixed(m.phase_seconds.reuse, 1)],
  ["attention s", (m) => fixed(m.seconds.attention, 1)],
  ["decode s", (m) => fixed(m.seconds.decode, 1)],
];
const OVERALL = [
  ["method", (m) => m.label],
  ["PSNR dB, mean", (m) => (m.psnr.mean >= 100 ? "equal" : fixed(m.psnr.mean, 2)), (m) => m.psnr.mean],
  ["speed-up", (m) => times(m.speedup, data.timing_warning), (m) => gained(m, m.speedup)],
  ["worst frame of all", (m) => (m.psnr.worst >= 100 ? "equal" : fixed(m.psnr.worst, 2)), (m) => m.psnr.worst],
  ["SSIM", (m) => fixed(m.ssim.mean, 4), (m) => m.ssim.mean],
  ["density", (m) => percent(m.density)],
  ["recall", (m) => fixed(m.recall && m.recall.mean, 3), (m) => m.recall && m.recall.mean],
  ["denoise s, sum", (m) => fixed(m.seconds.denoise, 1), (m) => gained(m, -m.seconds.denoise)],
];
function showTable(table, columns, rows) {
  const sparse = rows.filter((m) => m.method !== "dense");
  const best = columns.map(([, , rank]) => {
    const ranks = rank ? sparse.map((m) => rank(m) ?? -Infinity) : [];
    return Math.max(...ranks) > Math.min(...ranks) ? Math.max(...ranks) : NaN;
  });
  const head = make("thead", {}, make("tr", {}, ...columns.map(([name]) => make("th", { scope: "col" }, name))));
  table.replaceChildren(
    head,
    make(
      "tbody",
      {},
      ...rows.map((m) =>
        make(
          "tr",
          {},
          ...columns.map(([, show, rank], i) => {
            if (i === 0) return make("th", { scope: "row" }, dot(m.name), show(m));
            return make("td", rank && m.method !== "dense" && rank(m) === best[i] ? { class: "best" } : {}, show(m));
          }),
        ),
      ),
    ),
  );
}

/* several prompts and seeds */
function turn(by) {
  set({ case: (state.case + by + cases.length) % cases.length });
}
if (cases.length > 1) {
  $("case-tools").hidden = $("gallery-part").hidden = false;
  $("case").append(
    ...cases.map((c, i) => make("option", { value: i }, `${i + 1} / ${cases.length}  seed ${c.seed}, ${c.prompt}`)),
  );
  $("case").onchange = () => set({ case: +$("case").value });
  $("case-back").onclick = () => turn(-1);
  $("case-forward").onclick = () => turn(1);
  $("gallery-told").textContent =
    `${cases.length} prompts and seeds; the figures are those of ${titled(main)}. Choose one to look at it above.`;
  $("gallery").append(
    ...cases.map((c, i) => {
      const m = c.methods.find((x) => x.name === main),
        picture = make("img", { alt: "", src: data.stills[i] || "data:," });
      const button = make(
        "button",
        { "data-case": i },
        picture,
        make("b", {}, c.prompt),
        make("small", {}, `seed ${c.seed} · ${quality(m)} · ${times(m.speedup, c.timing_warning)}`),
      );
      button.onclick = () => {
        set({ case: i });
        $("stage").scrollIntoView({ behavior: calm ? "auto" : "smooth" });
      };
      return button;
    }),
  );
  showTable($("overall"), OVERALL, data.methods);
}

/* copying and downloads */
async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  $("told").textContent = what + " copied.";
}
function save(blob, name) {
  const link = make("a", { download: name, href: URL.createObjectURL(blob) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1e4);
  $("told").textContent = name + " saved.";
}
$("copy-compare").onclick = () => copy(data.command, "Command of the comparison");
$("copy-method").onclick = () => copy(rowOf(state.b).command, `Command of ${titled(state.b)}`);
$("copy-link").onclick = () => {
  const link = location.href.split("#")[0] + (address().startsWith("#") ? address() : "");
  copy(link, "Link");
};
$("save-frame").onclick = () =>
  canvas.toBlob((blob) => save(blob, `${current().name || "compare"}-${state.mode}-frame-${now() + 1}.png`));
$("save-metrics").onclick = () => {
  const { stills, ...rest } = data;
  save(new Blob([JSON.stringify(rest, null, 1)], { type: "application/json" }), "metrics.json");
};

function showCase() {
  loadVideos();
  $("case").value = state.case;
  each("[data-case]").forEach((b) => b.setAttribute("aria-current", +b.dataset.case === state.case));
  showWords();
  showTable($("table"), COLUMNS, current().methods);
  $("best-told").hidden = !$("table").querySelector(".best");
  showCurve();
  showCharts();
  showMaps();
}
$("legend").append(
  ...names.map((name) => make("span", {}, dot(name), titled(name))),
  make("span", { class: "soft" }, "● blocks chosen anew"),
);
const record = {
  settings,
  command: data.command,
  lpips: data.lpips,
  configs: Object.fromEntries(cases[0].methods.map((m) => [m.name, m.config])),
  environment: data.environment,
};
$("record").textContent = data.protocol + "\n\n" + JSON.stringify(record, null, 1);
when("case", showCase);
when("a b", () => {
  showWords();
  showCurve();
  dirty = true;
});
if (
  !cases.some((c) => c.methods.some((m) => m.map && m.map[state.heat])) &&
  cases.some((c) => c.methods.some((m) => m.heat[state.heat]))
)
  state.axis = "head";
showCase();
showView();
blinkOn();
$("speed").value = state.speed;
tick();
