"""`park bench models`: transformers of newer models at real width and length, cut to two blocks of random weights.

Gate first, on the weights that are then timed: with every block kept, each attention and the model give the output of
stock. The rule: they are at most twice as far from it as stock with another kernel of PyTorch, and two roundings to
bfloat16. Queries are scaled, so that attention is not uniform; a forward that leaves blocks out has to break the rule.

Densities are fixed by top-k, as in `e2e`. Seconds are those of one block, between its two hooks; nothing is fused.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from parkattn.checks import first_line
from parkattn.hosts.diffusers import Session, enable
from parkattn.models import row_for
from parklab.bench.e2e import expect_phases, first_blocks, random_transformer
from parklab.bench.e2e_run import sparse_density
from parklab.bench.gates import Case, verdict
from parklab.bench.real_models import REAL, TINY, RealModel
from parklab.bench.timing import free_memory, watched
from parklab.metrics.budget import solve_budget
from parklab.research import ResearchConfig

BLOCKS = 2
DENSITIES = {"paper": 0.25, "quality": 0.10}  # of reuse forwards
# the last forward of each kind is the figure: the first compiles kernels
PHASES = {
    "paper": ("refresh", "reuse", "refresh", "reuse"),
    "quality": ("dense", "dense", "anchor", "reuse", "anchor", "reuse"),
}
STEPS = 50
SHARPER = (
    4.0  # normalised queries are scaled by it: scores of random weights have a deviation of 1, which is nearly uniform
)
WHOLE = "minimax-h3"
RESERVE = 4e9  # bytes that are left free beside what a forward was measured to take
Keep = Callable[[dict[str, Any]], None]


class Ready(NamedTuple):
    model: RealModel
    device: torch.device
    transformer: Any
    inputs: dict[str, Any]
    rehearse: bool

    def forward(self, step: int) -> Tensor:
        times = self.model.times(999.0 - step, self.device)
        with torch.no_grad():
            return self.transformer(**self.inputs, **times, return_dict=False)[0]

    def config(self, profile: str, top_k: float) -> ResearchConfig:
        """The phases of PHASES, at a fixed density; dense steps in our own kernel."""
        phases = PHASES[profile]
        when = {"dense_steps": phases.count("dense"), "refresh_steps": (len(phases) - 2,), "anchors": None}
        fixed = {"top_p": None, "top_k": top_k, "budget": "row", "own_dense": True, **when}
        return self.profile(profile, **fixed)

    def profile(self, name: str, **changes: Any) -> ResearchConfig:
        kernels = {"backend": "triton"} if self.rehearse else {}
        return ResearchConfig.profile(
            name, model=row_for(self.transformer).preset, **{**self.model.settings, **kernels, **changes}
        )

    def enabled(self, config: ResearchConfig) -> Session:
        return enable(self.transformer, config, total_steps=STEPS, fuse=False)


def prepare(model: RealModel, blocks: int, device: torch.device, *, rehearse: bool) -> Ready:
    sized: Any = model.with_blocks(blocks)  # its class and sizes are read
    transformer = random_transformer(sized, device)
    for attention in row_for(transformer).attentions(transformer):
        norm = getattr(attention, "norm_q", None) or attention.query_norm
        norm.weight.data.mul_(SHARPER)
    return Ready(model, device, transformer, model.arguments(transformer, device), rehearse)


def run_models(only: list[str], device: torch.device, keep: Keep, *, budget_s: float, rehearse: bool = False) -> bool:
    """Every record goes to keep as soon as it is there; a model that fails says why, and the others go on."""
    ends, passed = time.monotonic() + budget_s, True
    for name in only:
        model = (TINY if rehearse else REAL)[name]
        try:
            for record in of_model(name, model, device, ends, rehearse=rehearse):
                passed &= record.get("ok", True)
                keep({"model": name, **record})
        except (RuntimeError, ValueError, TypeError, AssertionError) as failure:
            passed = False
            keep({"model": name, "ok": False, "failure": f"{type(failure).__name__}: {first_line(failure)}"})
        free_memory()
    return passed


def of_model(
    name: str, model: RealModel, device: torch.device, ends: float, *, rehearse: bool
) -> Iterator[dict[str, Any]]:
    began = time.monotonic()
    ready = prepare(model, BLOCKS, device, rehearse=rehearse)
    cases = list(gate(ready))
    yield from ({"benchmark": "models gate", **case} for case in cases)
    if not all(case["ok"] for case in cases):
        return  # a fast wrong answer is not a result
    found = measure(ready)
    yield {**found, "spent_s": time.monotonic() - began}
    if name == WHOLE:
        del ready
        free_memory()
        yield whole(model, found, device, ends, rehearse=rehearse)


def gate(ready: Ready) -> Iterator[Case]:
    """At real size, on the weights that are timed."""
    stock = _outputs(ready)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION if ready.device.type == "cuda" else SDPBackend.MATH):
        other = _outputs(ready)
    plain = {"dense_steps": 0, "refresh_steps": ()}
    with ready.enabled(ready.profile("paper", top_p=1.0, **plain)) as session:
        every, calls = _outputs(ready), session.summary().calls
    yield verdict("every block kept is stock", _share(every, stock, other), 1, of="what is allowed")
    yield verdict("every block kept ran planned, not dense", calls.get("dense", 0), 0, calls=calls)
    with ready.enabled(ready.profile("paper", top_p=None, top_k=DENSITIES["paper"], **plain)):
        fewer = _share(_outputs(ready), stock, other)
    yield verdict("blocks left out are noticed", 0 if fewer > 1 else 1, 0, share=fewer)


def _outputs(ready: Ready) -> list[Tensor]:
    """What every video attention and the model give: the rounding of a whole model would hide a wrong attention."""
    found: list[Tensor] = []
    attentions = row_for(ready.transformer).attentions(ready.transformer)
    hooks = [
        attention.register_forward_hook(lambda _, args, out: found.append(out[0] if isinstance(out, tuple) else out))
        for attention in attentions
    ]
    try:
        last = ready.forward(0)
    finally:
        for hook in hooks:
            hook.remove()
    return [*found, last]


def _share(ours: list[Tensor], stock: list[Tensor], other: list[Tensor]) -> float:
    shares = []
    for mine, theirs, again in zip(ours, stock, other, strict=True):
        rounding = 2 * torch.finfo(torch.bfloat16).eps * theirs.abs().max().float()
        allowed = 2 * (again - theirs).abs().max().float() + rounding
        shares.append((mine - theirs).abs().max().float() / allowed)
    return torch.stack(shares).max().item()


class TimedForward(NamedTuple):
    seconds: float
    block_s: float  # the mean of its blocks
    peak_gb: float | None
    finite: bool


def timed(ready: Ready, step: int) -> TimedForward:
    with _stopwatches(ready) as marks:
        run = watched(lambda: ready.forward(step), ready.device)
    blocks = [_between(begin, end) for begin, end in zip(marks[::2], marks[1::2], strict=True)]
    return TimedForward(run.seconds, statistics.fmean(blocks), run.peak_gb, run.finite)


@contextlib.contextmanager
def _stopwatches(ready: Ready) -> Iterator[list[Any]]:
    """Marks before and after each block that has video attention, in turn."""
    marks: list[Any] = []

    def mark(*_: Any) -> None:
        if ready.device.type != "cuda":
            marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)

    blocks = row_for(ready.transformer).all_blocks(ready.transformer)
    hooks = [
        hook for block in blocks for hook in (block.register_forward_pre_hook(mark), block.register_forward_hook(mark))
    ]
    try:
        yield marks
    finally:
        for hook in hooks:
            hook.remove()


def _between(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def measure(ready: Ready) -> dict[str, Any]:
    """Stock, then each profile: what a block takes in each phase."""
    timed(ready, 0)
    stock = timed(ready, 1)
    profiles = {profile: of_profile(ready, profile) for profile in PHASES}
    runs = [stock, *(run for found in profiles.values() for run in found["last"].values())]
    dense = stock.block_s
    own = profiles["quality"]["last"]["dense"].block_s
    block = row_for(ready.transformer).all_blocks(ready.transformer)[0]
    return {
        "benchmark": "models", **_facts(ready), "blocks": BLOCKS, "fused": False,
        "block_dense_s": dense, "block_own_dense_s": own, "dense_peak_gb": stock.peak_gb,
        "weights_gb": _gb(ready.transformer), "block_gb": _gb(block),
        **{profile: _profile_record(found, dense) for profile, found in profiles.items()},
        "finite": all(run.finite for run in runs), "ok": all(run.finite for run in runs),
    }  # fmt: skip


def of_profile(ready: Ready, profile: str) -> dict[str, Any]:
    """last: the last forward in each phase."""
    top_k = find_top_k(ready, DENSITIES[profile])
    with ready.enabled(ready.config(profile, top_k)) as session:
        runs = [timed(ready, step) for step in range(len(PHASES[profile]))]
        report = session.summary()
    expect_phases(report.steps, PHASES[profile])
    free_memory()
    return {
        "top_k": top_k, "density": sparse_density(report.layers), "state_gb": report.peak_state_bytes / 1e9,
        "last": dict(zip(PHASES[profile], runs, strict=True)),
    }  # fmt: skip


def _profile_record(found: dict[str, Any], dense: float) -> dict[str, Any]:
    last: dict[str, TimedForward] = found["last"]
    return {
        **{name: found[name] for name in ("top_k", "density", "state_gb")},
        "block_s": {phase: run.block_s for phase, run in last.items()},
        "peak_gb": {phase: run.peak_gb for phase, run in last.items()},
        "reuse_speedup": dense / last["reuse"].block_s,
    }  # fmt: skip


def find_top_k(ready: Ready, density: float) -> float:
    """The share of key blocks that computes `density` of the token pairs of the first block's attention."""

    def reached(top_k: float) -> float:
        config = ready.profile("paper", top_p=None, top_k=top_k, dense_steps=0, refresh_steps=())
        with ready.enabled(config) as session:
            ready.forward(0)
            found = session.summary().density
        assert found is not None
        return found

    with first_blocks(ready.transformer, 1):
        return solve_budget(reached, density, evaluations=4, close=0.02 * density)[0]


def whole(
    model: RealModel, found: dict[str, Any], device: torch.device, ends: float, *, rehearse: bool
) -> dict[str, Any]:
    """One forward of as many blocks as fit: dense in stock code, a first plan, and its reuse,
    by the paper's profile.
    """
    record = {"benchmark": "models whole", "released_blocks": model.blocks, "profile": "paper"}
    fit = blocks_that_fit(model, found, device)
    per_block = found["block_dense_s"] + sum(found["paper"]["block_s"][phase] for phase in ("refresh", "reuse"))
    expected = 1.1 * fit["blocks"] * per_block
    if expected > ends - time.monotonic():
        return {**record, **fit, "ok": False, "failure": f"out of time: {expected:.0f} s are needed."}
    ready = prepare(model, fit["blocks"], device, rehearse=rehearse)
    dense = timed(ready, 0)
    config = ready.config("paper", found["paper"]["top_k"])
    with ready.enabled(config) as session:
        refresh, reuse = timed(ready, 0), timed(ready, 1)
        report = session.summary()
    expect_phases(report.steps, ("refresh", "reuse"))
    runs = {"dense": dense, "refresh": refresh, "reuse": reuse}
    finite = all(run.finite for run in runs.values())
    return {
        **record, **_facts(ready), **fit, "weights_gb": _gb(ready.transformer),
        "state_gb": report.peak_state_bytes / 1e9, "density": report.density,
        "seconds": {phase: run.seconds for phase, run in runs.items()},
        "block_s": {phase: run.block_s for phase, run in runs.items()},
        "peak_gb": {phase: run.peak_gb for phase, run in runs.items()}, "reuse_speedup": dense.seconds / reuse.seconds,
        "finite": finite, "ok": finite,
    }  # fmt: skip


def blocks_that_fit(model: RealModel, found: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """By the bytes of a block's weights and plans, and of all else that a forward of two blocks took. No weights are
    shared.
    """
    if device.type != "cuda":
        return {"blocks": model.blocks}
    peak = max(value for value in (found["dense_peak_gb"], *found["paper"]["peak_gb"].values()) if value is not None)
    per_block = found["block_gb"] + found["paper"]["state_gb"] / BLOCKS
    beside = peak - BLOCKS * found["block_gb"]
    free = torch.cuda.mem_get_info(device)[0] / 1e9 - RESERVE / 1e9
    return {
        "blocks": max(BLOCKS, min(model.blocks, int((free - beside) / per_block))),
        "free_gb": free, "beside_blocks_gb": beside, "per_block_gb": per_block,
    }  # fmt: skip


def _facts(ready: Ready) -> dict[str, Any]:
    attention = row_for(ready.transformer).attentions(ready.transformer)[0]
    heads = getattr(attention, "heads", None) or attention.num_heads
    return {
        "transformer": ready.model.transformer, "video": ready.model.video, "tokens": ready.model.tokens,
        "heads": heads, "preset": row_for(ready.transformer).preset,
    }  # fmt: skip


def _gb(module: torch.nn.Module) -> float:
    return sum(weights.nbytes for weights in module.parameters()) / 1e9
