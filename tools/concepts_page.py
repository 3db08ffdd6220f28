"""Pictures of docs/concepts.md, computed from one video of the small model in the package: docs/pictures/*.svg.

python tools/concepts_page.py                  all of them (minutes on a CPU)
python tools/concepts_page.py reuse anchors    some of them
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from diffusers import WanPipeline
from page_svg import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PURPLE, RED, Axes, Picture, hues

import parkattn
from parkattn import ParkConfig, build_plan, park_attention
from parkattn.anchors import anchor_steps, log_signal_to_noise
from parkattn.ops import REFERENCE, attend, residual
from parkattn.ops.attend.definition import dense_attention
from parkattn.ops.cluster.definition import cluster_keys, kmeans
from parkattn.ops.importance.definition import ESTIMATORS
from parkattn.plan import Plan
from parkattn.reuse import History, Schedule
from parkattn.site import CallSite
from parklab.experiments.captures import Capture, CapturedCall, Selection
from parklab.metrics.retrieval import score_error
from parklab.sprites import CHECKPOINT, grammar

PICTURES = Path(__file__).parents[1] / "docs/pictures"
LAYER, STEPS, STEP = 3, 16, 8  # a middle layer, at a middle step
SIZE = {"height": 128, "width": 128, "num_frames": 33}
CONFIG = ParkConfig(query_clusters=12, key_clusters=36, top_p=0.9)


@functools.cache
def captured() -> dict[int, CapturedCall]:
    """q, k and v of one layer of the small model, by step; a few seconds on a CPU."""
    pipe = WanPipeline.from_pretrained(CHECKPOINT)
    pipe.set_progress_bar_config(disable=True)
    method = Capture(Selection(layers=(LAYER,), values=True), layers=len(pipe.transformer.blocks), steps=STEPS)
    options = {"num_inference_steps": STEPS, "guidance_scale": 1.0, "max_sequence_length": 32, "output_type": "latent"}
    with parkattn.enable(pipe, method=method):
        pipe(grammar.EXAMPLE, generator=torch.Generator().manual_seed(0), **SIZE, **options)
    return {call.site.step: call for call in method.kept.values()}


def one_head(step: int = STEP) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = captured()[step]
    assert call.site.values is not None
    return call.q[:, :1], call.k[:, :1], call.site.values[:, :1]


def plan_of(step: int = STEP) -> Plan:
    return build_plan(*one_head(step)[:2], CONFIG)


def clusters() -> Picture:
    plan, grid = plan_of(), captured()[STEP].site.grid
    assert grid is not None
    shown, side = (0, 2, 4, 6, 8), 108
    counts = f"{CONFIG.query_clusters} query blocks, {CONFIG.key_clusters} key blocks"
    said = f"Frames of a small video, each token coloured by its block: {counts}."
    picture = Picture(660, 284, "Query and key blocks of one head", said)
    for row, (name, blocks) in enumerate((("query blocks", plan.queries), ("key blocks", plan.keys))):
        labels = blocks.labels[0, 0].reshape(grid).numpy()
        picture.text(12, 30 + row * 130 + side / 2, name.split()[0], size=13)
        picture.text(12, 46 + row * 130 + side / 2, name.split()[1], size=13)
        for column, frame in enumerate(shown):
            picture.raster(84 + column * 114, 26 + row * 128, side, side, hues(labels[frame]))
    for column, frame in enumerate(shown):
        picture.text(84 + column * 114 + side / 2, 18, f"latent frame {frame}", anchor="middle", size=11)
    return picture


def qrkc() -> Picture:
    """Keys in two dimensions that vary most where queries do not look."""
    random = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 300, 2, generator=random) * torch.tensor([1.0, 3.0])
    q = torch.randn(1, 1, 300, 2, generator=random) * torch.tensor([3.0, 0.3])
    found = {"Euclidean k-means": kmeans(k, 4), "QRKC": cluster_keys(k, q, 4)}
    errors = {name: score_error(q, k, c.labels, c.clusters).mean().item() for name, c in found.items()}
    said = ", ".join(f"{name}: score error {error:.2f}" for name, error in errors.items())
    picture = Picture(660, 330, "Four clusters of the same keys by two metrics", said)
    for column, (name, clustering) in enumerate(found.items()):
        axes = Axes(
            picture, (40 + column * 325, 50, 270, 220), (-4.5, 4.5), (-12, 12), ("queries vary along this axis", "")
        )
        picture.text(40 + column * 325, 28, f"{name}: score error {errors[name]:.2f}", size=13)
        for (x, y), label in zip(k[0, 0].tolist(), clustering.labels[0, 0].tolist(), strict=True):
            picture.dot(*axes.at(x, y), 3, (BLUE, ORANGE, GREEN, PURPLE)[label])
    picture.text(
        40, 320, "dots: keys, coloured by cluster; score error: mean square of what a centroid gets wrong", size=11
    )
    return picture


def pama() -> Picture:
    """The query block of the small model whose mean query misleads most."""
    q, k, _ = one_head()
    plan = plan_of()
    sides = (plan.queries.labels, plan.query_clusters, plan.keys.labels, plan.key_clusters)
    found = {
        name: ESTIMATORS[kind](q, k, *sides)[0, 0]
        for name, kind in (("exact", "exact"), ("PAMA", "pama"), ("mean query", "query-centroid"))
    }
    worst = int((found["mean query"] - found["exact"]).abs().sum(-1).argmax())
    rows = {name: weights[worst] for name, weights in found.items()}
    order = rows["exact"].argsort(descending=True)[:14].tolist()
    off = {name: (row - rows["exact"]).abs().sum().item() / 2 for name, row in rows.items()}
    wrong = f"PAMA {off['PAMA']:.2f}, mean query {off['mean query']:.2f}"
    said = f"Attention of one query block to its 14 most important key blocks; wrong share of mass: {wrong}."
    picture = Picture(660, 290, "Two estimates of what a query block attends to", said)
    top = max(float(row.max()) for row in rows.values()) * 1.08
    axes = Axes(
        picture,
        (50, 60, 590, 180),
        (0, len(order)),
        (0, top),
        ("key blocks, by exact importance", "share of attention"),
    )
    colours = {"exact": GREY, "PAMA": BLUE, "mean query": ORANGE}
    for place, block in enumerate(order):
        for number, (name, row) in enumerate(rows.items()):
            x, y = axes.at(place + 0.14 + 0.25 * number, float(row[block]))
            picture.rect(x, y, 590 / len(order) * 0.23, 240 - y, colours[name])
    axes.ticks([], [round(top * part, 2) for part in (0.25, 0.5, 0.75)])
    legend = [("exact", GREY)] + [
        (f"{n}: {off[n]:.0%} of the mass misplaced", colours[n]) for n in ("PAMA", "mean query")
    ]
    picture.legend(50, 24, legend)
    return picture


def top_p() -> Picture:
    q, k, _ = one_head()
    plan = plan_of()
    importance = ESTIMATORS["pama"](
        q, k, plan.queries.labels, plan.query_clusters, plan.keys.labels, plan.key_clusters
    )[0, 0]
    kept = plan.mask[0, 0, : plan.query_clusters, : plan.key_clusters].sum(-1)
    order = kept.argsort()
    chosen = [int(order[0]), int(order[len(order) // 2]), int(order[-1])]
    said = "; ".join(f"a query block keeps {int(kept[u])} of {plan.key_clusters} key blocks" for u in chosen)
    picture = Picture(660, 310, "Top-p keeps as many blocks as a query block needs", said)
    axes = Axes(
        picture,
        (50, 50, 590, 210),
        (0, plan.key_clusters),
        (0, 1),
        ("key blocks, by falling importance", "share of the estimated attention"),
    )
    axes.ticks(range(0, plan.key_clusters + 1, 6), (0, 0.25, 0.5, 0.75, 1))
    share = CONFIG.shares.at_anchors or 0
    left, right = axes.at(0, share), axes.at(plan.key_clusters, share)
    picture.line([left, right], RED, width=1, dash="5 4")
    picture.text(right[0] - 4, right[1] - 5, f"p = {share:g}", anchor="end", fill=RED)
    for u, colour in zip(chosen, (BLUE, GREEN, ORANGE), strict=True):
        mass = [0.0, *importance[u].sort(descending=True).values.cumsum(0).tolist()]
        axes.curve(enumerate(mass), colour)
        picture.dot(*axes.at(int(kept[u]), mass[int(kept[u])]), 5, colour)
        x, y = axes.at(int(kept[u]), mass[int(kept[u])])
        picture.text(x + 8, y + 18, f"{int(kept[u])}", anchor="middle", fill=colour)
    return picture


def reuse() -> Picture:
    """What each of 50 steps does, asked of the schedule itself."""
    steps, colours = 50, {"dense": INK, "anchor": PURPLE, "refresh": ORANGE, "reuse": "#b3d4e8"}
    picture = Picture(660, 190, "What the steps of a run do", "")
    counts = []
    for row, profile in enumerate(ParkConfig.long_run_profiles()):
        schedule, last, phases = Schedule(ParkConfig.profile(profile)), None, []
        for step in range(steps):
            name = schedule.phase(CallSite(step=step, total_steps=steps), History(last)).name
            last = step if name in ("anchor", "refresh") else last
            phases.append(name)
        picture.text(12, 48 + row * 40, profile, size=13)
        for step, name in enumerate(phases):
            picture.rect(72 + step * 11.5, 32 + row * 40, 10.5, 26, colours[name])
        counts.append(f"{profile}: " + ", ".join(f"{phases.count(n)} {n}" for n in colours if n in phases))
    for step in range(0, steps, 10):
        picture.text(77 + step * 11.5, 162, f"{step}", size=10, anchor="middle")
    picture.text(72, 20, "anchors, too, compute all pairs", size=12)
    picture.legend(330, 20, list(colours.items()), gap=12)
    picture.description = "; ".join(counts)
    picture.text(72, 180, picture.description, size=11)
    return picture


def corrections() -> Picture:
    """Error of one layer's output at the steps after an anchor, by what stands in for skipped blocks."""
    anchor, last = 4, 13
    q, k, v = one_head(anchor)
    config = CONFIG.replace(top_p=0.6)
    plan, backend = build_plan(q, k, config), REFERENCE
    ways = {"nothing": (False, 0), "compensation": (True, 0), "residual": (False, 12), "both": (True, 12)}
    lines: dict[str, list[float]] = {}
    for name, (compensate, rank) in ways.items():
        _, rest = attend.over_both(backend, q, k, v, plan, compensate=compensate)
        added = residual.factor(backend, rest, rank) if rank else None
        lines[name] = []
        for step in range(anchor + 1, last + 1):
            at = one_head(step)
            out = park_attention(*at, config.replace(compensate=compensate), plan=plan)
            out = out if added is None else residual.add_residual(backend, out, added)
            exact = dense_attention(*at)
            lines[name].append(((out - exact).norm() / exact.norm()).item())
    said = "; ".join(
        f"{name}: {errors[0]:.3f} after one step, {errors[-1]:.3f} at step {last}" for name, errors in lines.items()
    )
    picture = Picture(660, 320, "What stands in for skipped blocks", f"Relative error of the output. {said}.")
    top = max(map(max, lines.values())) * 1.1
    axes = Axes(
        picture,
        (60, 60, 580, 200),
        (anchor, last),
        (0, top),
        (f"step; the plan and the residual are of step {anchor}", "relative error of the output"),
    )
    axes.ticks(range(anchor, last + 1), [round(top * part, 3) for part in (0, 0.25, 0.5, 0.75, 1)])
    colours = dict(zip(ways, (GREY, ORANGE, BLUE, GREEN), strict=True))
    for name, errors in lines.items():
        axes.curve(zip(range(anchor + 1, last + 1), errors, strict=True), colours[name])
    picture.legend(60, 24, list(colours.items()))
    return picture


def anchors() -> Picture:
    steps, count = 50, ParkConfig.profile("fast").anchors or 0
    found, reached = anchor_steps(count, steps), log_signal_to_noise(steps)
    said = f"{count} anchors of {steps} steps: " + ", ".join(map(str, found))
    picture = Picture(660, 310, "Anchors lie at equal distances of log signal to noise", said)
    axes = Axes(
        picture, (60, 50, 580, 210), (0, steps - 1), (reached[0], reached[-1]), ("step", "log of signal to noise")
    )
    axes.ticks(range(0, steps, 10), [round(reached[step], 1) for step in found])
    axes.curve(zip(range(steps), reached, strict=True), BLUE)
    for step in found:
        picture.line([axes.at(step, reached[0]), axes.at(step, reached[step])], FAINT, width=1)
        picture.dot(*axes.at(step, reached[step]), 5, PURPLE)
        picture.text(*(axes.at(step, reached[step])[0] + 7, axes.at(step, reached[step])[1] + 12), str(step), size=10)
    picture.text(60, 24, f"profile fast: {said}")
    return picture


DRAWN = {
    "clusters": clusters, "qrkc": qrkc, "pama": pama, "top_p": top_p, "reuse": reuse, "corrections": corrections,
    "anchors": anchors,
}  # fmt: skip


if __name__ == "__main__":
    names = sys.argv[1:] or list(DRAWN)
    for name in names:
        DRAWN[name]().write(PICTURES / f"{name}.svg")
    sys.stdout.write(f"wrote {', '.join(names)} to docs/pictures\n")
