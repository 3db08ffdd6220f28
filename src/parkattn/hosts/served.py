"""Attention of a model that a server runs: requests with plans of their own, layers that graphs find by a number.

A server's forward context says which request a call belongs to. The request's state hangs on an object that the server
drops with the request: one that ends, fails or is cancelled takes its plans along.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parkattn.checks import expect_choice, expect_count, expect_flag, expect_string, shown
from parkattn.hosts.attached import CountingEngine
from parkattn.hosts.packed import attend_packed
from parkattn.methods import configured_method
from parkattn.models import SIZES, Grid
from parkattn.site import AttentionMethod


@dataclass(frozen=True)
class ServedSettings:
    """What a server's operator said. model: whose preset the profile builds on; references: those that are videos are
    sparse too, where the server says which they are; changes: single fields of the profile, such as top_p.
    """

    profile: str = "quality"
    model: str = "wan2.1-14b"
    min_tokens: int = 8192
    references: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        expect_string("profile", self.profile)
        expect_choice("model", self.model, SIZES)
        expect_count("min_tokens", self.min_tokens, least=0)
        expect_flag("references", self.references)
        self.make_method()  # what it does not know is said when the server starts, not in the first request

    @classmethod
    def read(cls, where: str, told: Any, model: str = "wan2.1-14b") -> ServedSettings:
        """told: a profile, or a mapping of our fields and the profile's. model: where told has none."""
        if isinstance(told, str):
            return cls(told, model)
        if not isinstance(told, Mapping):
            raise TypeError(
                f'{where}: expected a profile or a mapping, got {shown(told)}; write for example {{"profile": '
                f'"quality"}}.'
            )
        own = {name: told[name] for name in ("profile", "model", "min_tokens", "references") if name in told}
        changes = {
            name: tuple(value) if isinstance(value, list) else value for name, value in told.items() if name not in own
        }
        return cls(**{"model": model, **own}, changes=changes)

    def make_method(self) -> AttentionMethod:
        return configured_method("park", self.profile, model=self.model, **self.changes)


class ServedRequest(CountingEngine):
    """Plans and log of one request, or of several that run as one batch, each an element of it."""

    def __init__(self, settings: ServedSettings, logger: str) -> None:
        super().__init__(settings.make_method(), settings.min_tokens, unknown_step="the server does not say the step")
        self._logger, self._ended, self._references = logging.getLogger(logger), False, settings.references

    def reset(self) -> None:
        super().reset()
        self._ended = False

    def end_run(self) -> None:
        """Also logs what was done, once."""
        super().end_run()
        if not self._ended and self._logger.isEnabledFor(logging.INFO):
            report = self.summary()
            share = "no video" if report.density is None else f"{report.density:.0%} of dense attention"
            self._logger.info("parkattn computed %s; dense calls: %s", share, report.dense_because or "none")
            self._logger.debug("%s", report)
        self._ended = True

    def stand_at(
        self, step: int | None, total_steps: int | None, noise_levels: tuple[float, ...] | None, branch: str, grid: Grid
    ) -> None:
        """Sets the clock. A request that goes back to an earlier step makes its next clip."""
        clock = self.engine.clock
        if step is not None and clock.step is not None and step < clock.step:
            self.reset()
        clock.step, clock.total_steps, clock.branch, clock.grid = step, total_steps, branch, grid
        clock.noise_levels = noise_levels if noise_levels is not None and len(noise_levels) == total_steps else None

    def attend(
        self,
        layer: ServedLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dense: Callable[[], Tensor],
        *,
        before: int = 0,
        after: int = 0,
        references: Sequence[range] = (),
        counted_branches: bool = False,
    ) -> Tensor:
        """[b n h d] in and out, as dense gives it. before, after: tokens around the video, which are always seen;
        references: those before it that are videos too. counted_branches: a layer is called once for each branch of
        guidance, unnamed.
        """
        assert layer.index is not None
        name, part = self.enter(layer.number, layer.index)
        if counted_branches and part:
            self.engine.clock.branch, part = "uncond" if part == 1 else f"branch {part}", 0
        training = torch.is_grad_enabled() and q.requires_grad
        site: dict[str, Any] = {
            "layer": layer.index,
            "dense": lambda: dense().transpose(1, 2),
            "transformer": name,
            "scale": layer.scale,
            "part": part,
            "reason": "gradients are on, as in training" if training else self.why_short(q.shape[1]),
        }
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        if after:
            out = self.engine.attend(*heads_first, text=slice(q.shape[1] - after, q.shape[1]), **site)
        else:
            sparse = references if self._references else ()
            out = attend_packed(self.engine, *heads_first, before=before, references=sparse, **site)
        self.leave()
        return out.transpose(1, 2).contiguous()  # blocks take views of it


class ServedLayer:
    """One attention layer of a served model. index: its number; None: it is not self-attention of a video."""

    index: int | None
    scale: float

    def number_for_graphs(self) -> None:
        """From now on graphs find the layer by its handle: a graph input, so that one graph serves every layer."""
        self.number = next(_NUMBERS)
        self.handle = torch.tensor(self.number, dtype=torch.int64, device="cpu")
        _LAYERS[self.number] = self

    def answer(self, q: Tensor, k: Tensor, v: Tensor, place: list[int]) -> Tensor:
        """The call, by what the server's context says now. place: what the call's own arguments say of its tokens."""
        raise NotImplementedError

    def ask(self, q: Tensor, k: Tensor, v: Tensor, place: list[int]) -> Tensor:
        """answer, or in a compiled graph the operator that calls it."""
        if torch.compiler.is_compiling():
            return served_attention(q, k, v, self.handle, place)
        return self.answer(q, k, v, place)


_LAYERS: weakref.WeakValueDictionary[int, ServedLayer] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


@torch.library.custom_op("parkattn::served_attention", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def served_attention(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, place: list[int]) -> Tensor:
    layer = _LAYERS.get(int(handle))
    if layer is None:
        raise RuntimeError(
            "parkattn::served_attention: expected a layer of a loaded model, got one that is gone; "
            "compile the model again."
        )
    return layer.answer(q, k, v, place).contiguous()


@served_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))
