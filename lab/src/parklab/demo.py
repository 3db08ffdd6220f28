"""What PARK does, on one page: every ablation on the built-in scene, a picture, and a JSON record."""

from __future__ import annotations

import dataclasses
import io
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parkattn.ops.attend.definition import dense_attention
from parkattn.ops.importance.definition import ESTIMATORS, exact, kept_mass, select_top_k
from parkattn.park import build_plan, park_attention
from parkattn.plan import Plan
from parklab.extras import pyplot
from parklab.metrics.retrieval import recall_summary
from parklab.record import environment
from parklab.research import ResearchConfig, studied_entry
from parklab.scene import Scene, clustered_scene
from parklab.store import Cell, Say, Store

# blocks of about the paper's 590 queries and 148 keys
CONFIG = ResearchConfig(query_clusters=16, key_clusters=64, top_p=0.9)
VARIANTS = ("park", "park-no-qrkc", "park-no-pama", "centroid")
METHOD_ORDER = ("dense", *VARIANTS)
FORMAT = "parklab.scene.1"
BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4)


@dataclass(frozen=True)
class SceneResult:
    method: str
    density: float
    recall: dict[str, float]
    error: float  # |out - dense| / |dense|
    plan_ms: float
    attention_ms: float
    recall_at_budget: dict[str, float]  # top-k ratio -> mean recall
    mask: Tensor | None  # [qb kb] of the first head


def scene_for(seed: int) -> Scene:
    return clustered_scene(seed=seed)


class Truth:
    """Of a scene: dense attention and its time, and exact importance, which methods with the same blocks share."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        begin = time.perf_counter()
        self.dense = dense_attention(scene.q, scene.k, scene.v)
        self.dense_ms = (time.perf_counter() - begin) * 1e3
        self._importance: list[tuple[Plan, Tensor]] = []

    def importance(self, plan: Plan) -> Tensor:
        for held, found in self._importance:
            sides = ((held.queries, plan.queries), (held.keys, plan.keys))
            if all(torch.equal(one.labels, other.labels) for one, other in sides):
                return found
        made = exact(self.scene.q, self.scene.k, *_blocks_of(plan))
        self._importance.append((plan, made))
        return made


def _blocks_of(plan: Plan) -> tuple[Tensor, int, Tensor, int]:
    return plan.queries.labels, plan.query_clusters, plan.keys.labels, plan.key_clusters


def run_method(method: str, truth: Truth) -> SceneResult:
    q, k, v = truth.scene.q, truth.scene.k, truth.scene.v
    if method == "dense":
        return SceneResult("dense", 1.0, {"mean": 1.0, "p05": 1.0, "worst": 1.0}, 0.0, 0.0, truth.dense_ms, {}, None)
    config = studied_entry(method).make(CONFIG).config  # type: ignore[attr-defined]
    begin = time.perf_counter()
    plan = build_plan(q, k, config)
    planned = time.perf_counter()
    out = park_attention(q, k, v, config, plan=plan)
    done = time.perf_counter()
    true, estimate = truth.importance(plan), ESTIMATORS[config.importance](q, k, *_blocks_of(plan))
    # recall is the exact importance that a mask keeps, so one pass over all scores serves every budget
    masks = {str(ratio): select_top_k(estimate, ratio, sizes=plan.keys.sizes) for ratio in BUDGETS}
    budgets = {ratio: kept_mass(true, mask, plan.queries.sizes).mean().item() for ratio, mask in masks.items()}
    return SceneResult(
        method,
        plan.density().mean().item(),
        recall_summary(kept_mass(true, plan.mask, plan.queries.sizes)),
        ((out - truth.dense).norm() / truth.dense.norm()).item(),
        (planned - begin) * 1e3,
        (done - planned) * 1e3,
        budgets,
        plan.mask[0, 0],
    )


def save_report(results: list[SceneResult], scene: Scene, out: Path, say: Say = lambda line: None) -> list[Path]:
    """result.json and scene.png in `out`."""
    rows = [{name: value for name, value in dataclasses.asdict(r).items() if name != "mask"} for r in results]
    record = {
        "format": FORMAT, "config": CONFIG.to_dict(), "grid": scene.grid, "results": rows, "environment": environment(),
    }  # fmt: skip
    Store(out, say).put(
        Cell(name="result", format=FORMAT, files=("scene.png",)), record, {"scene.png": _picture(results, scene)}
    )
    return [out / "result.json", out / "scene.png"]


def _picture(results: list[SceneResult], scene: Scene) -> bytes:
    plt = pyplot("pictures")
    by_name = {r.method: r for r in results}
    figure, (film, blocks, curve) = plt.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    frames, height, width = scene.grid
    shown = [0, frames // 2, frames - 1]
    film.imshow(
        torch.cat([scene.objects.view(frames, height, width)[f] for f in shown], 1).numpy(),
        cmap="tab20",
        interpolation="nearest",
    )
    film.set(title="the scene: first, middle and last frame", xticks=[], yticks=[])
    park = by_name["park"]
    assert park.mask is not None
    blocks.imshow(park.mask.float().numpy(), cmap="Purples", interpolation="nearest", aspect="auto")
    blocks.set(
        title=f"blocks PARK computes (head 0), density {park.density:.0%}", xlabel="key block", ylabel="query block"
    )
    for name in VARIANTS:
        points = by_name[name].recall_at_budget
        curve.plot([float(r) for r in points], list(points.values()), marker="o", markersize=3, label=name)
    curve.set(title="attention recall at a fixed share of key blocks", xlabel="share of key blocks", ylabel="recall")
    curve.legend(frameon=False)
    data = io.BytesIO()
    figure.savefig(data, dpi=110, format="png")
    plt.close(figure)
    return data.getvalue()
