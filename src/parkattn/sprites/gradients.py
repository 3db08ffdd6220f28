"""One optimisation step: mixed precision, AdamW, clipping, and replay of a forward and backward pass as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def adam(parameters: dict[str, nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(list(parameters.values()), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01, foreach=True)


def autocast(device: torch.device, cache: bool = True) -> torch.autocast:
    """bfloat16 on a GPU; without the cache of cast weights where a CUDA graph is captured."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=cache)


def descend(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()


class GraphedGradients:
    """Replays `compute(clips) -> (loss, report)` and the backward pass; the gradients then lie in the parameters."""

    def __init__(self, compute: Callable[[Tensor], tuple[Tensor, Tensor]], clips: Tensor, parameters: list[nn.Parameter]) -> None:
        self.clips, self.parameters, self.graph = clips.clone(), parameters, torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._clear()
                compute(self.clips)[0].backward()
        torch.cuda.current_stream().wait_stream(aside)
        self._clear()
        with torch.cuda.graph(self.graph):
            loss, self.report = compute(self.clips)
            loss.backward()
        self.gradients = [p.grad for p in parameters]

    def _clear(self) -> None:
        for p in self.parameters:
            p.grad = None

    def __call__(self, clips: Tensor) -> Tensor:
        self.clips.copy_(clips)
        self.graph.replay()
        for p, gradient in zip(self.parameters, self.gradients, strict=True):
            p.grad = gradient
        return self.report.clone()
