"""Every forward of a dense run, measured beside the one before it in its branch; and densities of plans on the way.

residual         output of the last block less the input of the first one
ratio            of its norm to that of the step before: mean over tokens; ratio_std: spread over tokens
cosine_distance  of both: mean over tokens
output_change    norm of the output less that of the step before, over its norm
densities        [layer][head] at chosen steps, in the first branch: of PARK's plans that keep top_p of the attention

The first three are MagCache's (arXiv 2506.09045). Wan2.2's two transformers have a first step each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from parkattn.dense import Dense
from parkattn.hosts.diffusers.session import transformers_of
from parkattn.methods import make_method
from parkattn.models import ModelRow, row_for
from parkattn.planned import make_plan
from parkattn.site import AttentionOutput, CallSite
from parklab.experiments.calibration import captured_steps
from parklab.research import ResearchConfig, studied_entry

TOKENS_AT_ONCE = 8192
Branch = tuple[str, str]  # transformer and branch of guidance


class WatchedForwards(Dense):
    """Dense attention that says where a forward stands. config: of the plans whose density is taken at `steps`."""

    def __init__(self, config: ResearchConfig, steps: Iterable[int]) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self.densities: dict[str, list[list[float]]] = {}  # by step
        self.noise_levels: tuple[float, ...] | None = None
        self._planner: Any = make_method(studied_entry("park"), config)
        self._steps = frozenset(steps)
        self._site: CallSite | None = None
        self._first: dict[int, Branch] = {}  # by step
        self._begun: Tensor | None = None
        self._ended: Tensor | None = None
        self._before: dict[Branch, tuple[Tensor, Tensor]] = {}  # residual and output

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        self._site, self.noise_levels = site, site.noise_levels
        branch = site.transformer, site.branch
        if site.step in self._steps and branch == self._first.setdefault(site.step, branch) and not site.video:
            plan = make_plan(q, k, self._planner.planner, site, None)
            self.densities.setdefault(str(site.step), []).append([float(value) for value in plan.density()[0]])
        return super().__call__(q, k, v, site)

    def record(self) -> dict[str, Any]:
        levels = None if self.noise_levels is None else [float(level) for level in self.noise_levels]
        return {"forwards": self.rows, "densities": self.densities, "noise_levels": levels}

    @contextlib.contextmanager
    def on(self, pipe: Any) -> Iterator[None]:
        """While the pipeline runs. Blocks must run as they are: compiled ones are not seen."""
        hooks: list[Any] = []
        try:
            for transformer in transformers_of(pipe).values():
                hooks += self._hooks(transformer, row_for(transformer))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._begun = self._ended = None
            self._before.clear()

    def _hooks(self, transformer: torch.nn.Module, row: ModelRow) -> list[Any]:
        lists = [getattr(transformer, blocks) for blocks in dict.fromkeys(blocks for blocks, _ in row.blocks)]
        return [
            lists[0][0].register_forward_pre_hook(self._begin, with_kwargs=True),
            # of several lists the one that runs last counts
            *(blocks[-1].register_forward_hook(self._end) for blocks in lists),
            transformer.register_forward_hook(self._measure),
        ]

    def _begin(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begun = args[0] if args else kwargs["hidden_states"]

    def _end(self, block: Any, args: tuple[Any, ...], found: Any) -> None:
        self._ended = found[0] if isinstance(found, tuple) else found

    def _measure(self, transformer: Any, args: tuple[Any, ...], found: Any) -> None:
        site, begun, ended = self._site, self._begun, self._ended
        assert site is not None and begun is not None and ended is not None
        if begun.shape != ended.shape:
            raise ValueError(
                f"model: expected blocks that return tokens as they take them, got {list(ended.shape)} for "
                f"{list(begun.shape)}; likeness has no residual of {type(transformer).__name__}."
            )
        branch, residual = (site.transformer, site.branch), ended - begun
        output = found[0][0] if isinstance(found[0], list) else found[0]
        row: dict[str, Any] = {"transformer": site.transformer, "branch": site.branch, "step": site.step}
        row |= {"batch": len(begun)} if len(begun) > 1 else {}
        if branch in self._before:
            row |= compared(residual, self._before[branch][0])
            row["output_change"] = _change(output, self._before[branch][1])
        self.rows.append(row)
        self._before[branch] = residual, output
        self._begun = self._ended = None


def plan_steps(steps: int | None) -> tuple[int, ...]:
    """The paper's first sparse step, the last one and the one in the middle."""
    ends = captured_steps("spread", steps)
    return tuple(sorted({*ends, sum(ends) // len(ends)}))


def compared(residual: Tensor, before: Tensor) -> dict[str, float]:
    """MagCache's three numbers of two residuals [b n d], in float32."""
    ratios, apart = [], []
    for now, then in zip(
        residual.flatten(0, -2).split(TOKENS_AT_ONCE), before.flatten(0, -2).split(TOKENS_AT_ONCE), strict=True
    ):
        one, other = now.float(), then.float()
        ratios.append(one.norm(dim=-1) / other.norm(dim=-1))
        apart.append(1 - functional.cosine_similarity(one, other, dim=-1, eps=1e-8))
    ratio, cosine = torch.cat(ratios).double(), torch.cat(apart).double()
    return {"ratio": float(ratio.mean()), "ratio_std": float(ratio.std()), "cosine_distance": float(cosine.mean())}


def _change(output: Tensor, before: Tensor) -> float:
    now, then = output.double(), before.double()
    return float((now - then).norm() / now.norm())
