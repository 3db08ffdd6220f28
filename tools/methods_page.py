"""Writes docs/profiles.md, docs/methods.md and, for every method, a page and a picture in docs/methods. PARK's
ablations share a page.

No figure is typed in: settings come from the configs, costs from benchmarks/results, masks from the methods.

python tools/methods_page.py             texts and pictures (minutes on a CPU)
python tools/methods_page.py texts       texts alone
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parkattn import METHODS, CallSite, PlannedMethod, dense, make_method, park
from parkattn.planned import make_plan
from parkattn.registry import MethodEntry
from parkattn.settings import PlannedConfig
from parklab import baselines
from parklab.baselines.settings import StudiedConfig
from parklab.bench.frontier import changed_since, read_records
from parklab.experiments.frontier import tabulate
from parklab.experiments.tables import text_table, to_markdown
from parklab.files import write_atomically
from parklab.research import studied_entry

sys.path.insert(0, str(Path(__file__).parent))
import records
from records import RESULTS, Columns, table_of

if TYPE_CHECKING:
    from page_svg import Picture
    from torch import Tensor

    from parkattn.plan import Blocks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# a later line replaces an earlier one
FRONTIER = ("frontier.jsonl", "run_75600.jsonl", "run_7168.jsonl")
FEW_STEPS = ("few_steps.jsonl",)
PLACE = ("frames", "height", "width", "steps", "guidance", "prompt", "seed", "setting")
INDEX = """# Methods

This page lists PARK and its baselines. `park methods` prints the list, `enable(pipe, method=name)` runs a method, and
`park compare --methods dense,NAME` shows it beside dense attention. All methods run at their authors' settings and use
the same attention kernels, except MC-Sparse and Chipmunk, whose single keys PyTorch gathers.
[Corrections](corrections.md#relatives) compares these two, QuantSparse and iCATS with PARK's profiles. Every page has the
mask of the method; methods that depend on tokens run on the small model of the package. [Measured](measured.md) compares
all methods at their authors' settings, at equal density, with one schedule, and at equal cost.
[Kernels](kernels.md#the-authors-own-kernels) compares the authors' own kernels with ours. `tools/methods_page.py` writes
these pages.
"""
PROFILES = """# Profiles

A profile sets the balance of speed and quality: `parkattn.enable(pipe, "fast")`, `park generate --profile fast`.
[Tuning](tuning.md) helps to choose one. `tools/methods_page.py` writes this page.
"""
MEASURED = """## Cost and fidelity

PSNR is against the video of dense attention, in the small model (`python -m parklab.bench.frontier`,
`frontier.jsonl`, `run_75600.jsonl` and `run_7168.jsonl` in `benchmarks/results`). A video of 720p has 75,600 tokens.
"Attention computed" is that of the whole run, dense steps included; "gain" is the PSNR above `paper` on the same
prompts. "Other settings" are those of the record if the profile has changed since.
"""
MEASURED_FEW_STEPS = """## Cost and fidelity in few steps

These runs use the small model's LoRA for few steps (`--lora few-steps`, model card in `parklab/sprites/few_steps`),
which needs no guidance (`benchmarks/results/few_steps.jsonl`).
"""
ABOUT = {
    "dense": "Dense attention computes every pair of tokens. It has no plan and is the reference of the other methods.",
    "park": "PARK clusters queries and keys into blocks. Keys with similar scores under the current queries share a"
    " block (QRKC). Each query distributes its attention over the key blocks, and the mean over a query block is"
    " the importance of each key block (PAMA). Top-p keeps the important blocks. The plan is reused for several steps.",
    "park-no-pama": "This is an ablation of PARK. One softmax of the mean query represents the whole query"
    " block, so different queries are averaged before the softmax instead of after it.",
    "park-no-qrkc": "This is an ablation of PARK. Keys are clustered by plain Euclidean distance, so a block"
    " may hold keys that queries score differently.",
    "centroid": "This is an ablation of PARK without QRKC and without PAMA: Euclidean clusters of keys, ranked"
    " by the mean query.",
    "sparge": "SpargeAttn cuts the sequence into tiles and pools each tile to its mean. Products of the"
    " means rank the pairs. The mean does not represent a tile with tokens in different directions, so such a"
    " tile stays dense.",
    "xattention": "XAttention scores a tile of the attention matrix by the sum along its antidiagonals, which"
    " touches every row and every column. It keeps tiles up to a share of the estimated attention.",
    "svg": "Sparse VideoGen assumes that a head attends either within a frame or to one position across time. It"
    " classifies each head on a few sampled rows, and applies a band in the corresponding order of the"
    " tokens. The authors' formula counts text as a part of the requested density (`sparsity` in their code),"
    " so with text even `sparsity=1` skips some pairs of video tokens; without text it is dense.",
    "svg2": "Sparse VideoGen2 clusters queries and keys by k-means and ranks pairs of clusters by their"
    " centroids, weighted by the size of the key cluster. It clusters again at every step, from the centroids"
    " of the step before.",
    "svoo": "SVOO alternately clusters queries by the responses of keys and keys by the responses of queries. An"
    " optional offline profile sets the minimum number of blocks of each head.",
    "svg-ear": "SVG-EAR uses the clusters and the budget of Sparse VideoGen2. It keeps the blocks that their mean"
    " would approximate worst, and replaces skipped blocks by their means.",
    "sparsepr": "SparsePR clusters each side in the metric of the other; its key metric is the same matrix as"
    " QRKC's. It keeps a fixed share of the keys. A few exact rows then correct the output of all the others.",
    "sol": "Sol-Attn computes a block exactly if its pooled score is an outlier of its row or the block is next to"
    " the diagonal. All other blocks enter as their means.",
    "sta": "Sliding tile attention shows each tile of the video a fixed window of neighbouring tiles in time,"
    " height and width. The mask depends on the grid alone.",
    "radial": "Radial Attention narrows the band between two frames as their distance grows. The mask"
    " depends on the grid alone.",
    "mc-sparse": "MC-Sparse sorts similar queries into groups of equal size. At one dense step it computes the keys"
    " that each group attends to most, and the contribution of the other keys. Later steps attend to those keys alone"
    " and add this residual. PARK's residual does the same with blocks and a low rank;"
    " [Corrections](../corrections.md#relatives) compares them.",
    "chipmunk": "Chipmunk cuts the video into voxels of queries. At full steps each voxel chooses the keys with the"
    " largest sum of its attention, and some keys at random. Steps between attend to those keys and add the part "
    "that these missed at the full step: the residual of [Corrections](../corrections.md#relatives) at full rank.",
}
DOTS = """Each dot is a group of query tokens (rows) by a group of key tokens (columns), in the order of the video. \
Darker dots have more computed pairs.
"""
ABLATIONS = "ablations.md"
# pictures at other settings or sizes than a method's defaults in the small model, where that would show every pair
DRAWN_WITH: dict[str, dict[str, Any]] = {"sparge": {"topk": 0.5}}
OF_THE_GRID, GRID = ("sta", "radial"), (30, 32, 32)
SHAPES = {"wan-14b": "Wan2.1-14B, 720p", "hunyuan": "HunyuanVideo, 720p"}


def pages() -> dict[str, str]:
    """Path below docs -> text."""
    costs = records.lines("gpu_methods.jsonl", "methods")
    rows = []
    texts = {}
    for module in (dense, park, *baselines.MODULES):
        first, *ablations = module.ENTRIES
        texts[f"methods/{first.name}.md"] = _page(first, module, costs)
        if ablations:
            texts[f"methods/{ABLATIONS}"] = _ablations(first, ablations, costs)
        for entry in module.ENTRIES:
            budgets = ", ".join(f"`{budget}`" for budget in entry.budgets)
            page = f"{entry.name}.md" if entry is first else f"{ABLATIONS}#{entry.name}"
            rows.append((f"[{entry.name}](methods/{page})", _line(entry), budgets, _paper(entry)))
    table = _table("method | description | density set by | reference", rows)
    return {"profiles.md": _profiles(), "methods.md": f"{INDEX}\n{table}", **texts}


def _profiles() -> str:
    config = METHODS["park"].config
    paper = "the paper settings of [the model](methods/park.md#settings)"
    sets = _table("profile | sets", ((name, _told(changes) or paper) for name, changes in config.PROFILES.items()))
    return "\n".join([PROFILES, sets, MEASURED, _measured(FRONTIER), MEASURED_FEW_STEPS, _measured(FEW_STEPS)])


def _table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    return to_markdown(text_table(columns.split(" | "), list(rows)))


def _told(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"`{field}={value!r}`" for field, value in changes.items())


def _measured(names: tuple[str, ...]) -> str:
    """A row for each profile, size, number of steps and guidance that the files have records of."""
    profiles = METHODS["park"].config.PROFILES
    lines = [line for name in names for line in read_records(RESULTS / name) if line["setting"] in profiles]
    records = list({tuple(line[name] for name in PLACE): line for line in lines}.values())
    order = [name for name in profiles if any(r["setting"] == name for r in records)]
    columns: Columns = {
        "tokens": lambda row: f"{_tokens(row):,}", "steps": "{steps}", "guidance": "{guidance:g}",
        "profile": "{setting}", "videos": "{runs}", "attention computed": "{cost:.1%}", "PSNR": "{psnr:.1f} dB",
        "gain": "{gain_db:+.1f} dB", "worst video": "{worst_psnr:.1f} dB",
        "other settings": lambda row: _told(changed_since(row["config"], row["setting"])),
    }  # fmt: skip
    rows = tabulate(_complete(records, order))
    rows.sort(key=lambda row: (-_tokens(row), -row["steps"], row["guidance"], order.index(row["setting"])))
    return table_of(columns, rows, _table)


def _complete(records: list[dict[str, Any]], settings: list[str]) -> list[dict[str, Any]]:
    """Those of prompts that every setting has, so that means are over the same videos."""

    def video(record: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(record[name] for name in ("frames", "height", "width", "steps", "guidance", "prompt", "seed"))

    shared = set.intersection(
        *({video(record) for record in records if record["setting"] == setting} for setting in settings)
    )
    return [record for record in records if video(record) in shared]


def _tokens(row: dict[str, Any]) -> int:
    """Of the small model, which has one token for 4 frames and 8 x 8 pixels."""
    frames, height, width = map(int, row["size"].split("x"))
    return ((frames - 1) // 4 + 1) * (height // 8) * (width // 8)


def _page(entry: MethodEntry, module: Any, costs: list[dict[str, Any]]) -> str:
    parts = [f"# {entry.name}\n", *_shown(entry), DOTS, _run(entry), "## Cost of planning\n", _cost(entry, costs)]
    parts += ["## Settings\n", _settings(entry), _presets(entry), "## Definition\n"]
    parts.append(f"```text\n{inspect.getdoc(module) or ''}\n```\n")
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _ablations(first: MethodEntry, ablations: list[MethodEntry], costs: list[dict[str, Any]]) -> str:
    """One page of all entries that change settings of the first."""
    parts = [f"# Ablations of {first.name}\n", DOTS]
    for entry in ablations:
        settings = f"Settings are those of [{first.name}]({first.name}.md), with {_changes(entry)}.\n"
        parts += [f"## {entry.name}\n", *_shown(entry), settings, _run(entry), _cost(entry, costs)]
    return "\n".join(parts).rstrip() + "\n"


def _shown(entry: MethodEntry) -> list[str]:
    paper = f" It is described in {_paper(entry)}." if entry.paper else ""
    return [f"{ABOUT[entry.name]}{paper}\n", f"![Mask of {entry.name} in one head]({entry.name}.svg)\n"]


def _line(entry: MethodEntry) -> str:
    return f"{entry.line[0].upper()}{entry.line[1:]}."


def _paper(entry: MethodEntry) -> str:
    """The name that an entry gives, with a link where it is a number of arXiv."""
    name, found, number = entry.paper.partition("arXiv ")
    return f"{name}[arXiv {number}](https://arxiv.org/abs/{number})" if found else ("the PARK paper" if name else "")


def _run(entry: MethodEntry) -> str:
    budget = f", {entry.budgets[0]}=0.5" if entry.budgets else ""
    named = f'method="{entry.name}"' if entry.name != "park" else '"paper"'
    if entry.name == "radial":  # its budget narrows bands instead of counting blocks
        budget = ", decay=0.5"
    return (
        "```python\nfrom parkattn import CallSite, make_method\nfrom parklab.scene import clustered_scene\n\n"
        f'q, k, v, grid, _ = clustered_scene(grid=(4, 16, 16))\nmethod = make_method("{entry.name}")\n'
        "out, stats = method(q, k, v, CallSite(step=25, total_steps=50, grid=grid))\n"
        "print(stats.phase, stats.density.mean())\n```\n\n"
        f"In a pipeline: `parkattn.enable(pipe, {named}{budget})`.\n"
    )


def _cost(entry: MethodEntry, costs: list[dict[str, Any]]) -> str:
    rows = [row for row in costs if row["method"] == entry.name]
    if not issubclass(entry.config, PlannedConfig):
        return "None: the method has no plan.\n"
    if not rows:
        return "Not measured on a GPU: `benchmarks/results/gpu_methods.jsonl` has no record of it.\n"
    repair = {"repair ms": "{repair_ms:.1f}"} if "repair_ms" in rows[0] else {}
    columns: Columns = {
        "shape": lambda row: SHAPES[row["shape"]], "plan ms": "{plan_ms:.1f}", "later plan ms": "{later_plan_ms:.1f}",
        "memory of planning MB": "{plan_mb:.0f}", "attention ms": "{attend_ms:.1f}", **repair,
        "density": "{density:.2f}",
    }  # fmt: skip
    gpus = ", ".join(sorted({row["environment"]["gpu"] for row in rows}))
    return (
        f"One layer on one {gpus}, at the defaults, on Gaussian mixtures (`benchmarks/results/gpu_methods.jsonl`,"
        " `park bench methods`). A later plan may start from the previous one. Density depends on the data "
        f"and differs in real videos.\n\n{table_of(columns, rows, _table)}"
    )


def _changes(entry: MethodEntry) -> str:
    """What an ablation sets, asked of the method that it makes."""
    studied = studied_entry(entry.name)
    plain, made = studied.config().to_dict(), make_method(studied).config.to_dict()  # type: ignore[attr-defined]
    return " and ".join(f"`{name}={made[name]!r}`" for name in plain if plain[name] != made[name])


def _settings(entry: MethodEntry) -> str:
    shared = {field.name: field.default for field in dataclasses.fields(StudiedConfig)}
    explained = {name: text for kind in reversed(entry.config.__mro__) for name, text in field_docstrings(kind).items()}
    rows = [
        (f"`{field.name}`", f"`{field.default!r}`", explained[field.name])
        for field in dataclasses.fields(entry.config)
        if shared.get(field.name, dataclasses.MISSING) != field.default
    ]
    if not rows:
        return "None.\n"
    shared_by_all = "Schedule, corrections and backend are [those of every method](../api.md#settings)"
    return f"{_table('setting | default | meaning', rows)}\n{shared_by_all} unless they are listed here.\n"


def _presets(entry: MethodEntry) -> str:
    if not entry.config.PRESETS:
        return ""
    rows = ((name, _told(changes) or "the defaults") for name, changes in entry.config.PRESETS.items())
    return _table("preset | sets", rows)


def field_docstrings(kind: type) -> dict[str, str]:
    """Field of a class -> the string below it."""
    if not kind.__module__.startswith(("parkattn", "parklab")):
        return {}
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]
    return {
        ast.unparse(field.target): " ".join(str(below.value.value).split())
        for field, below in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def picture(name: str) -> Picture:
    """The mask of a method in one head, in token order: of the small model, or of a grid where that alone decides."""
    import torch
    from concepts_page import LAYER, STEP, captured, one_head
    from page_svg import Picture, shades

    cells, side = 128, 300
    changes = DRAWN_WITH.get(name, {})
    method = make_method(name, METHODS[name].config(**changes))
    grid: tuple[int, int, int] | None
    if name in OF_THE_GRID:
        grid, q, k, v = GRID, *(torch.zeros(1, 1, math.prod(GRID), 16) for _ in range(3))
    else:
        grid, (q, k, v) = captured()[STEP].site.grid, one_head()
    assert grid is not None
    if isinstance(method, PlannedMethod):
        site = CallSite(layer=LAYER, step=25, total_steps=50, grid=grid, values=v)
        plan = make_plan(q, k, method.planner, site, None)
        rows, columns = _shares(plan.queries, cells), _shares(plan.keys, cells)
        share, density = rows @ plan.mask[0, 0].float() @ columns.mT, f"{plan.density().item():.2f}"
    else:
        share, density = torch.ones(cells, cells), "1.00"
    set_to = "".join(f", {field}={value!r}" for field, value in changes.items())
    frames, height, width = grid
    said = f"{name}{set_to}: one head, {frames} latent frames of {height} x {width} tokens, density {density}"
    drawn = Picture(side + 40, side + 76, f"Mask of {name}", said)
    drawn.text(20, 20, f"{name}{set_to}: density {density}", size=13)
    drawn.text(20, 36, f"{frames} latent frames of {height} x {width} tokens", size=11)
    drawn.raster(20, 46, side, side, shades(share.numpy()))
    drawn.text(20 + side / 2, side + 64, "keys, in the order of the video", size=11, anchor="middle")
    return drawn


def _shares(blocks: Blocks, cells: int) -> Tensor:
    """[cells, blocks]: of the tokens in each of `cells` equal stretches of the sequence, the share in each block."""
    import torch

    labels = blocks.labels[0, 0].long()
    place = torch.arange(len(labels)) * cells // len(labels)
    counts = torch.zeros(cells, blocks.count).index_put_((place, labels), torch.ones(len(labels)), accumulate=True)
    return counts / counts.sum(-1, keepdim=True)


if __name__ == "__main__":
    for path, text in pages().items():
        write_atomically(DOCS / path, text.encode())
    if sys.argv[1:] != ["texts"]:
        for method in METHODS:
            picture(method).write(DOCS / f"methods/{method}.svg")
    sys.stdout.write("wrote docs/profiles.md, docs/methods.md and docs/methods/\n")
