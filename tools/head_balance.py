"""How even ranks are under Ulysses: the slowest over the mean, heads in the model's order and assigned by density.

    python tools/head_balance.py --capture 29x96x160 --steps 8       densities of every head of the small model's plans
    python tools/head_balance.py                                     what ranks would have had to do, from the record

The small model has 3 heads in each of its 6 layers, too few to spread over ranks. Layers of real models are simulated:
their heads are drawn, in a random order, from the small model's at one step. "all layers": of every layer and prompt,
whose densities differ more than those of one layer may. "one layer": of one layer and every prompt, which is 3 heads
seen many times. Attention is taken to last as its density says, and ranks to wait for the slowest in every layer. The
step that makes a plan has the assignment of the plan before, which in this record is a quarter of the run older.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from records import RESULTS, argument_reader
from torch import Tensor

from parkattn.balance import assign_heads, imbalance
from parkattn.models import SIZES
from parkattn.park import Park, ParkConfig
from parklab.experiments.reproduce import held_out_prompts, parse_size
from parklab.record import append_records, environment, read_records
from parklab.sprites import CHECKPOINT

RECORD = RESULTS / "head_density.jsonl"
FORMAT = "parkattn.head-density.1"
PROFILES = ("paper", "quality", "fast")
PROMPTS = 8
HEADS = {name: SIZES[name].heads for name in ("wan2.1-1.3b", "hunyuanvideo", "wan2.1-14b")}
RANKS = (2, 4, 8)
DRAWS = 16  # layers that are drawn from each step's heads


class Evenness(NamedTuple):
    """The slowest rank over the mean: means over simulated layers and plans, and the worst of them."""

    plain: float  # the model's order
    refresh: float  # in the step that makes a plan, by the densities of the plan before
    reuse: float  # in the steps after it, by its own
    worst_plain: float
    worst_reuse: float


def capture(size: str, steps: int, device: str, out: Path) -> None:
    from parkattn.hosts.diffusers import Session
    from parklab.studio.checkpoints import load_pipeline

    pipe = load_pipeline(CHECKPOINT, device=device, dtype="bfloat16" if device.startswith("cuda") else "float32")
    video, facts = parse_size(size), environment()
    sides = {"height": video["height"], "width": video["width"], "num_frames": video["frames"]}
    known = {(r["profile"], r["prompt"], r["size"], r["steps"]) for r in read_records(out)}
    for profile, prompt in itertools.product(PROFILES, held_out_prompts(PROMPTS)[0]):
        if (profile, prompt, size, steps) not in known:
            method = Park(ParkConfig.profile(profile))
            with Session(pipe, method) as session:
                run = {"num_inference_steps": steps, "guidance_scale": 1.0, "output_type": "latent"}
                pipe(prompt, generator=torch.Generator("cpu").manual_seed(0), **sides, **run)
                plans = list(plans_of(session.engine.log.calls))
            about = {"format": FORMAT, "profile": profile, "prompt": prompt, "size": size, "steps": steps}
            append_records(out, [{**about, "plans": plans, "config": method.config.to_dict(), "environment": facts}])
            print(profile, len(plans), "plans:", prompt, flush=True)


def plans_of(calls: Any) -> Iterator[dict[str, Any]]:
    """Densities [layer, head] that sparse steps had, each plan's once, with the number of steps that used it."""
    steps: dict[int, list[list[float]]] = {}
    for call in calls:
        if call.stats.phase in ("refresh", "reuse"):
            density = [round(value, 5) for value in call.stats.density[0].tolist()]
            steps.setdefault(call.site.step, []).append(density)
    for density, uses in itertools.groupby(sorted(steps.items()), key=lambda item: item[1]):
        step, *others = (at for at, _ in uses)
        yield {"step": step, "steps": 1 + len(others), "density": density}


def newest(path: Path = RECORD) -> list[dict[str, Any]]:
    """Of the longest video that was recorded, the last of each profile and prompt."""
    found = [record for record in read_records(path) if record.get("format") == FORMAT]
    tokens = {record["size"]: torch.tensor([*parse_size(record["size"]).values()]).prod().item() for record in found}
    size = max(tokens, key=lambda size: tokens[size])
    return list({(r["profile"], r["prompt"]): r for r in found if r["size"] == size}.values())


def layers(records: list[dict[str, Any]], profile: str, scope: str, heads: int) -> Iterator[Tensor]:
    """Simulated layers: the densities [plans, heads] of what a run made in them."""
    runs = [{plan["step"]: plan for plan in record["plans"]} for record in records if record["profile"] == profile]
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    density = torch.tensor([[run[step]["density"] for run in runs] for step in steps], dtype=torch.float64)
    pools = [density.flatten(1)] if scope == "all layers" else [layer.flatten(1) for layer in density.unbind(2)]
    made = torch.Generator().manual_seed(0)
    for pool in pools:
        for _ in range(DRAWS):
            yield pool[:, torch.randperm(pool.shape[1], generator=made)[:heads]]


def evenness(records: list[dict[str, Any]], profile: str, scope: str, heads: int, ranks: int) -> Evenness:
    in_order = torch.arange(heads).view(ranks, -1)
    plain, refresh, reuse = [], [], []
    for plans in layers(records, profile, scope, heads):
        before = None
        for cost in plans:
            given = assign_heads(cost, ranks)
            plain.append(imbalance(cost, in_order).item())
            reuse.append(imbalance(cost, given).item())
            if before is not None:
                refresh.append(imbalance(cost, before).item())
            before = given
    means = [statistics.fmean(ratios) for ratios in (plain, refresh, reuse)]
    return Evenness(means[0], means[1], means[2], max(plain), max(reuse))


def cases() -> Iterator[tuple[str, int, int]]:
    """Scope, heads and ranks that are simulated; one layer's pool is 3 heads of PROMPTS prompts."""
    for scope, counts in (("one layer", (3 * PROMPTS,)), ("all layers", HEADS.values())):
        yield from ((scope, heads, ranks) for heads in counts for ranks in RANKS if heads % ranks == 0)


def main() -> None:
    parser = argument_reader(__doc__)
    parser.add_argument("--capture", metavar="FRAMESxHEIGHTxWIDTH")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RECORD)
    asked = parser.parse_args()
    if asked.capture is not None:
        capture(asked.capture, asked.steps, asked.device, asked.out)
    records = newest(asked.out)
    print(f"{records[0]['size']}, {records[0]['steps']} steps; slowest rank over mean:")
    print(" " * 39, "plain  refresh  reuse  worst plain  worst reuse")
    for profile in PROFILES:
        for scope, heads, ranks in cases():
            found = evenness(records, profile, scope, heads, ranks)
            at = f"{profile:8} {scope:10} {heads:3} heads {ranks} ranks"
            print(f"{at:38}", *(f"{ratio:8.3f}" for ratio in found))


if __name__ == "__main__":
    main()
