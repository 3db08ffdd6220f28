"""Is what `park bench e2e` times right? Small models of the same classes in bfloat16, on the device that is about to be
measured.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from parkattn.hosts.diffusers import disable, enable, summary
from parkattn.hosts.diffusers.fused import AS_ASKED
from parkattn.models import row_for
from parkattn.park import ParkConfig
from parklab.bench.e2e_run import generate, pipeline
from parklab.bench.gates import Case, verdict
from parklab.bench.whole_models import (
    SMALL_HUNYUAN,
    SMALL_WAN,
    WholeModel,
    forward_inputs,
    random_transformer,
    run_forward,
)

TIMESTEPS = (999.0, 700.0, 400.0)  # dense, refresh, reuse
STEPS = 5
_BACKENDS = ("triton", "reference")
_EVERY_BLOCK = 1.0


def gate(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """Before anything is timed: models, stock pipeline, one compiled graph."""
    for name, model in {"wan": SMALL_WAN, "hunyuanvideo": SMALL_HUNYUAN}.items():
        yield from _gate_model(name, _fitted(model, rehearse), device)
    yield from _gate_pipeline(_fitted(SMALL_WAN, rehearse), device)
    # this compiler only traces, so that its result must be that of eager mode
    yield from _gate_compile(_fitted(SMALL_WAN, rehearse), device, "aot_eager")


def gate_corrected(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """Before profiles with anchors are timed: a dense step of our kernel, an anchor and a corrected reuse, with every
    block kept.
    """
    for name, model in {"wan": SMALL_WAN, "hunyuanvideo": SMALL_HUNYUAN}.items():
        yield from _gate_anchored(name, _fitted(model, rehearse), device)


def gate_around(device: torch.device, *, rehearse: bool = False) -> Iterator[Case]:
    """What else users put around a model: a compiler that generates code, and weights that wait in CPU memory."""
    if device.type == "cuda":
        yield from _gate_offload(_fitted(SMALL_WAN, rehearse), device)
    yield from _gate_compile(_fitted(SMALL_WAN, rehearse), device, "inductor" if device.type == "cuda" else "aot_eager")
    for name, model in {"wan": SMALL_WAN, "hunyuanvideo": SMALL_HUNYUAN}.items() if device.type == "cuda" else ():
        yield from _gate_fused(name, _fitted(model, rehearse), device)


def _fitted(model: WholeModel, rehearse: bool) -> WholeModel:
    """On a GPU large enough for several tiles; the rehearsal is for the interpreter."""
    larger: dict[str, Any] = {"video": (33, 256, 256), "settings": {"query_clusters": 16, "key_clusters": 32}}
    return model if rehearse else WholeModel(**{**vars(model), **larger})


def _config(model: WholeModel, backend: str, top_k: float = 0.25) -> ParkConfig:
    """One dense step, one refresh, then reuse."""
    return model.config(top_p=None, top_k=top_k, dense_steps=1, refresh_steps=(), backend=backend)


def _outputs(transformer: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """What every attention and the whole model give at every timestep: rounding of a whole model would hide a wrong
    attention.
    """
    found: list[Tensor] = []
    hooks = [
        attention.register_forward_hook(
            lambda module, args, out: found.append(out[0] if isinstance(out, tuple) else out)
        )
        for attention in row_for(transformer).attentions(transformer)
    ]
    try:
        found += [run_forward(transformer, inputs, timestep) for timestep in TIMESTEPS]
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _of_model(transformer: Any, inputs: dict[str, Any]) -> list[Tensor]:
    return [run_forward(transformer, inputs, timestep) for timestep in TIMESTEPS]


def _exact(
    transformer: Any, inputs: dict[str, Any], outputs: Callable[[Any, dict[str, Any]], list[Tensor]] = _outputs
) -> list[Tensor]:
    return outputs(
        copy.deepcopy(transformer).float(), {n: x.float() if x.is_floating_point() else x for n, x in inputs.items()}
    )


def _apart(some: list[Tensor], others: list[Tensor]) -> Tensor:
    return torch.stack([(a.float() - b.float()).abs().max() for a, b in zip(some, others, strict=True)]).max()


def _share_of_allowed(ours: list[Tensor], stock: list[Tensor], exact: list[Tensor]) -> float:
    """The rule of every gate: at most twice the error that stock bfloat16 makes against float32, output by output."""
    shares = []
    for some, other, right in zip(ours, stock, exact, strict=True):
        allowed = 2 * (other.float() - right).abs().max() + 2 * torch.finfo(torch.bfloat16).eps * right.abs().max()
        shares.append((some.float() - right).abs().max() / allowed)
    return torch.stack(shares).max().item()


def _gate_model(name: str, model: WholeModel, device: torch.device) -> Iterator[Case]:
    """Every block kept is stock dense, padding is never seen, and the kernels' plans are as dense as those of the
    definitions.
    """
    transformer = random_transformer(model, device)
    inputs = forward_inputs(model, transformer, device)
    stock = _outputs(transformer, inputs)
    exact, density = _exact(transformer, inputs), {}
    for backend in _BACKENDS:
        with enable(transformer, _config(model, backend, top_k=_EVERY_BLOCK), total_steps=len(TIMESTEPS)):
            share = _share_of_allowed(_outputs(transformer, inputs), stock, exact)
            yield verdict(f"{name}, {backend}: every block kept is stock dense", share, 1, of="what is allowed")
        with enable(transformer, _config(model, backend), total_steps=len(TIMESTEPS)):
            begin = time.perf_counter()
            sparse = _outputs(transformer, inputs)
            report = summary(transformer)
            wall = time.perf_counter() - begin
            density[backend] = report.density or 0.0
            layers = len(report.layers)
            yield verdict(
                f"{name}, {backend}: phases",
                sum(abs(report.calls[p] - layers) for p in ("dense", "refresh", "reuse")),
                0,
            )
            spent = sum(report.attention_seconds.values())
            # the stopwatch of summary: each phase took some time, all together less than the wall clock
            yield verdict(
                f"{name}, {backend}: stopwatch",
                0 if min(report.attention_seconds.values()) > 0 and spent <= wall else 1, 0,
                attention_s=report.attention_seconds, wall_s=wall, saved_s=report.seconds_saved,
            )  # fmt: skip
        with enable(transformer, _config(model, backend), total_steps=len(TIMESTEPS)):
            yield verdict(f"{name}, {backend}: a second run is equal", _apart(_outputs(transformer, inputs), sparse), 0)
        if "encoder_attention_mask" in inputs:
            padding = ~inputs["encoder_attention_mask"][..., None]
            changed = {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"].masked_fill(padding, 3.0)}
            # with every block kept: plans may differ, since the kernels' rounding depends on all tokens
            with enable(transformer, _config(model, backend, top_k=_EVERY_BLOCK), total_steps=len(TIMESTEPS)):
                share = _share_of_allowed(_outputs(transformer, changed), stock, exact)
                yield verdict(f"{name}, {backend}: padding is not seen", share, 1, of="what is allowed")
    # k-means of two roundings ends in two partitions
    yield verdict(
        f"{name}: density of all backends", max(density.values()) - min(density.values()), 0.1, density=density
    )
    disable(transformer)
    yield verdict(f"{name}: stock again after disable", _apart(_outputs(transformer, inputs), stock), 0)


def _gate_anchored(name: str, model: WholeModel, device: torch.device) -> Iterator[Case]:
    """Dense in our own kernel, anchor, reuse: each is stock dense where nothing is skipped, so that nothing is to be
    corrected.
    """
    transformer = random_transformer(model, device)
    inputs = forward_inputs(model, transformer, device)
    stock, exact = _outputs(transformer, inputs), _exact(transformer, inputs)
    for backend in _BACKENDS:
        config = _config(model, backend, top_k=_EVERY_BLOCK).replace(own_dense=True, compensate=True, residual_rank=8)
        with enable(transformer, config, total_steps=len(TIMESTEPS)):
            share = _share_of_allowed(_outputs(transformer, inputs), stock, exact)
            report = summary(transformer)
        yield verdict(
            f"{name}, {backend}: own dense, anchor and corrected reuse are stock dense", share, 1, of="what is allowed"
        )
        layers = len(report.layers)
        wrong = sum(abs(report.calls.get(phase, 0) - layers) for phase in ("dense", "anchor", "reuse"))
        yield verdict(f"{name}, {backend}: phases with anchors", wrong, 0)


def _gate_compile(model: WholeModel, device: torch.device, compiler: str) -> Iterator[Case]:
    """One full graph for all layers, steps and phases."""
    counters = torch._dynamo.utils.counters
    transformer = random_transformer(model, device)
    inputs = forward_inputs(model, transformer, device)
    every = _config(model, "triton", top_k=_EVERY_BLOCK)
    exact = _exact(transformer, inputs, _of_model)
    with enable(transformer, every, total_steps=len(TIMESTEPS)):
        eager = _of_model(transformer, inputs)
    torch._dynamo.reset()
    counters.clear()
    with enable(transformer, every, total_steps=len(TIMESTEPS)):
        transformer.compile_repeated_blocks(fullgraph=True, backend=compiler)
        compiled = _of_model(transformer, inputs)
        calls = summary(transformer).calls
    layers = len(transformer.blocks)
    yield verdict(f"compiled, {compiler}: one graph", abs(counters["stats"]["unique_graphs"] - 1), 0)
    yield verdict(f"compiled, {compiler}: phases", sum(abs(count - layers) for count in calls.values()), 0)
    if compiler == "aot_eager":
        yield verdict(f"compiled, {compiler}: output", _apart(compiled, eager), 0)
    else:
        yield verdict(
            f"compiled, {compiler}: output", _share_of_allowed(compiled, eager, exact), 1, of="what is allowed"
        )


def _gate_fused(name: str, model: WholeModel, device: torch.device) -> Iterator[Case]:
    """Blocks compiled by enable: every block kept is stock dense, and a second session compiles nothing more."""
    transformer = random_transformer(model, device)
    inputs = forward_inputs(model, transformer, device)
    # hooks on attention would keep a block from being compiled
    stock, exact = _of_model(transformer, inputs), _exact(transformer, inputs, _of_model)
    torch._dynamo.reset()
    counts, found = torch._dynamo.utils.counters["stats"], []
    for _ in range(2):
        with enable(transformer, _config(model, "triton", top_k=_EVERY_BLOCK), total_steps=len(TIMESTEPS), fuse=True):
            found.append(_of_model(transformer, inputs))
            report = summary(transformer)
        if len(found) == 1:
            graphs = counts["unique_graphs"]
    yield verdict(f"{name}, fused: every block kept is stock dense", _share_of_allowed(found[0], stock, exact), 1)
    yield verdict(f"{name}, fused: a second run is equal", _apart(*found), 0)
    missed = len(TIMESTEPS) * len(report.layers) - report.fused.get(AS_ASKED, 0)
    yield verdict(f"{name}, fused: every block was", missed, 0, fused=report.fused)
    yield verdict(f"{name}, fused: nothing is compiled in the second session", counts["unique_graphs"] - graphs, 0)


def _gate_pipeline(model: WholeModel, device: torch.device) -> Iterator[Case]:
    """The stock pipeline, repeated and with guidance."""
    pipe = pipeline(random_transformer(model, device), device)
    config = _config(model, "triton")

    def run() -> tuple[Tensor, Any]:
        latents = generate(pipe, model, STEPS)["latents"]
        return latents, summary(pipe)

    with enable(pipe, config):
        latents, report = run()
        again, _ = run()
        yield verdict("pipeline: a second run is equal", _apart([again], [latents]), 0)
        layers = len(report.layers)
        counts = {"dense": layers, "refresh": layers, "reuse": (STEPS - 2) * layers}
        yield verdict(
            "pipeline: phases",
            sum(abs(report.calls[phase] - count) for phase, count in counts.items()),
            0,
            calls=report.calls,
        )
        yield verdict(
            "pipeline: plans are released at the end", report.state_bytes, 0, peak_state_bytes=report.peak_state_bytes
        )
        yield verdict("pipeline: finite", int((~latents.isfinite()).sum()), 0)
        generate(pipe, model, STEPS, guidance=5.0)
        both = summary(pipe).peak_state_bytes
        yield verdict("pipeline: guidance keeps twice the plans", abs(both - 2 * report.peak_state_bytes), 0)


def _gate_offload(model: WholeModel, device: torch.device) -> Iterator[Case]:
    config = _config(model, "triton")
    resident = pipeline(random_transformer(model, device), device)
    with enable(resident, config):
        latents = generate(resident, model, STEPS)["latents"]
    for way in ("model offload", "group offload with a stream"):
        moved = pipeline(random_transformer(model, device), torch.device("cpu"))
        if way == "model offload":
            moved.enable_model_cpu_offload(device=device)
        else:
            moved.transformer.enable_group_offload(
                onload_device=device, offload_device=torch.device("cpu"), offload_type="leaf_level", use_stream=True
            )
        with enable(moved, config):
            offloaded = generate(moved, model, STEPS, device=device)["latents"]
            held = summary(moved)
        yield verdict(f"pipeline, {way}: the same latents", _apart([offloaded], [latents]), 0, calls=held.calls)
        yield verdict(f"pipeline, {way}: plans are released at the end", held.state_bytes, 0)
    yield from _gate_offloaded_blocks(model, device)


def _gate_offloaded_blocks(model: WholeModel, device: torch.device) -> Iterator[Case]:
    """Weights come and go by another stream around blocks that enable compiles."""
    found: list[list[Tensor]] = []
    for offloaded in (False, True):
        transformer = random_transformer(model, device)
        inputs = forward_inputs(model, transformer, device)
        if offloaded:
            transformer.enable_group_offload(
                onload_device=device,
                offload_device=torch.device("cpu"),
                offload_type="block_level",
                num_blocks_per_group=1,
                use_stream=True,
            )
        with enable(transformer, _config(model, "triton"), total_steps=len(TIMESTEPS), fuse=True):
            found.append(_of_model(transformer, inputs))
            report = summary(transformer)
    name = "group offload by blocks, compiled"
    yield verdict(f"{name}: the same output", _apart(*found), 0, calls=report.calls)
    missed = len(TIMESTEPS) * len(report.layers) - report.fused.get(AS_ASKED, 0)
    yield verdict(f"{name}: every block", missed, 0, fused=report.fused)
