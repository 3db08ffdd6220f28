"""One optimisation step: mixed precision, Muon and AdamW, clipping, and replay of a forward and backward pass as a CUDA
graph.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parkattn.checks import first_line

from .training_state import say


def autocast(device: torch.device, cache: bool = True) -> torch.autocast:
    """bfloat16 on a GPU; without the cache of cast weights where a CUDA graph is captured."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=cache)


@contextmanager
def untried_kernels() -> Iterator[None]:
    """Convolutions of sizes that are met once: trying every kernel takes longer than the slowest of them."""
    tried = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = tried


def orthogonalised(matrices: Tensor, iterations: int = 5) -> Tensor:
    """About U Vᵀ of each matrix U S Vᵀ in [n, rows, columns]: Newton-Schulz with Muon's quintic, singular values near
    1.
    """
    x = matrices / (matrices.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(iterations):  # sums inside the products: passes over the matrices of their own take as long as these
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; matrices of one shape go together, which `torch.optim.Muon` does not do (hundreds of
    launches).

    A convolution is a matrix [out, everything else]. Updates are scaled to the size of AdamW's, so both share one rate.
    """

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(parameters, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            gradients, momenta = [p.grad for p in parameters], [self.state[p]["momentum"] for p in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            by_shape = defaultdict(list)
            for p, update in zip(parameters, ahead, strict=True):
                by_shape[p.shape[0], p[0].numel()].append((p, update))
            for shape, members in by_shape.items():
                stacked = torch.stack([update.reshape(shape) for _, update in members])
                stacked = orthogonalised(stacked.bfloat16() if stacked.is_cuda else stacked).to(stacked.dtype)
                updates = [u.reshape(p.shape) for (p, _), u in zip(members, stacked.unbind(0), strict=True)]
                torch._foreach_add_([p for p, _ in members], updates, alpha=-0.2 * max(shape) ** 0.5 * group["lr"])


Compute = Callable[..., tuple[Tensor, Tensor]]  # of a batch: the loss, and what is reported of it
ADAM_SHARE = 0.5  # AdamW's rate where Muon leads: embeddings and norms want smaller steps than orthogonalised matrices


class Descent:
    """Muon for the matrices inside a network, AdamW for the rest (`matrices` empty: for everything)."""

    def __init__(self, parameters: dict[str, nn.Parameter], matrices: set[str]) -> None:
        inside = [p for name, p in parameters.items() if name in matrices]
        rest = [p for name, p in parameters.items() if name not in matrices]
        self.parameters = parameters
        self.graphs: dict[Hashable, GraphedGradients | None] = {}  # None: not captured, so that pass is computed anew
        self.pool: Any = None  # of memory, one for all graphs
        self.optimizers: list[torch.optim.Optimizer] = [Muon(inside)] if inside else []
        fused = next(iter(parameters.values())).is_cuda
        self.optimizers.append(torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.01, fused=fused))

    def clear(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    def forget_graphs(self) -> None:
        self.graphs.clear()
        self.pool = None

    def gradients(self, compute: Compute, batch: tuple[Tensor, ...], graph: Hashable | None) -> Tensor:
        """Of compute's loss, left in the parameters; returns its report. graph: what passes are replayed under, None
        where they are not.
        """
        if graph is not None:
            if graph not in self.graphs:
                self.graphs[graph] = self._captured(compute, batch, graph)
            if captured := self.graphs[graph]:
                return captured(*batch)
        self.clear()
        loss, report = compute(*batch)
        loss.backward()
        return report

    def _captured(self, compute: Compute, batch: tuple[Tensor, ...], graph: Hashable) -> GraphedGradients | None:
        """A run goes on without a graph that does not fit in memory, or whose pass cannot be captured."""
        began = time.monotonic()
        try:
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            made = GraphedGradients(compute, batch, self.parameters, self.pool)
        except Exception as error:  # of the compiler too, which has its own
            say(f"no graph for {graph}, its passes are launched one by one: {first_line(error)}")
            return None
        say(f"graph for {graph} in {time.monotonic() - began:.0f} s")
        return made

    def step(self, rate: float) -> None:
        nn.utils.clip_grad_norm_(list(self.parameters.values()), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate if optimizer is self.optimizers[0] else ADAM_SHARE * rate
            optimizer.step()

    def state(self, p: nn.Parameter) -> dict[str, Tensor]:
        return next((optimizer.state[p] for optimizer in self.optimizers if p in optimizer.state), {})

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}/{part}": value for name, p in self.parameters.items() for part, value in self.state(p).items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        owner = {
            p: optimizer for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
        }
        for name, p in self.parameters.items():
            parts = {
                key.removeprefix(name + "/"): value for key, value in tensors.items() if key.startswith(name + "/")
            }
            # fused AdamW wants the moments in the memory layout of the parameter
            owner[p].state[p] = {
                part: torch.empty_like(p).copy_(value) if value.shape == p.shape else value.to(p.device)
                for part, value in parts.items()
            }


class GraphedGradients:
    """Replays `compute(*inputs) -> (loss, report)` and the backward pass; the gradients then lie in the parameters.

    Graphs of one pool hold their activations in the same memory: only one runs at a time, and its gradients are used
    before the next one begins.
    """

    def __init__(
        self, compute: Compute, inputs: tuple[Tensor, ...], parameters: dict[str, nn.Parameter], pool: Any
    ) -> None:
        self.inputs, self.parameters, self.graph = (
            tuple(x.clone() for x in inputs),
            list(parameters.values()),
            torch.cuda.CUDAGraph(),
        )
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._clear()
                compute(*self.inputs)[0].backward()
        torch.cuda.current_stream().wait_stream(aside)
        self._clear()
        with torch.cuda.graph(self.graph, pool=pool):
            loss, self.report = compute(*self.inputs)
            loss.backward()
        self.gradients = [p.grad for p in self.parameters]

    def _clear(self) -> None:
        for p in self.parameters:
            p.grad = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        for held, given in zip(self.inputs, inputs, strict=True):
            held.copy_(given)
        self.graph.replay()
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient
        return self.report.clone()
