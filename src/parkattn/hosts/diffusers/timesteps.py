"""Steps of forwards that nobody counts: those of a bare transformer, or of one that another pipeline drives.

What such a forward shows is its timestep, its latents and its prompt:
- a timestep that changes is the next step; one that turns back begins a run;
- within a step every branch denoises the same latents, so other latents begin a run;
- a prompt that no branch of the run has had begins a run; padding is part of the prompt and compared by its values;
- a training step is a run of its own, because its neighbours are other videos.
All of it reads device values, a few synchronisations per forward, which pipelines are spared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_BRANCHES = 8  # forwards of one step; guidance has 2 or 3, and each keeps plans of its own
_PROMPT = ("encoder_", "pooled_", "image_embeds")  # how the names of those arguments begin that hold the prompt


class StepCount(NamedTuple):
    step: int
    branch: str | None  # None where the timestep, out of a schedule, tells nothing of it
    begins: bool  # a run


class TimestepCounter:
    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Whatever comes next begins a run."""
        self._step = 0
        self._last: float | None = None
        self._rising: bool | None = None  # whether timesteps rise, as Mochi's do; not known before they change
        self._latents: Tensor | None = None  # of the step
        self._prompts: dict[str, dict[str, Tensor]] = {}  # branch -> its prompt
        self._seen: list[str] = []  # branches of the step

    def count(
        self, arguments: Mapping[str, Any], name: str | None, schedule: Sequence[float], training: bool
    ) -> StepCount:
        """arguments: of a forward, its timestep included; name: of the branch, where a cache context gives one."""
        timestep = arguments["timestep"]
        # the largest, because image-to-video gives the tokens of its clean first frame the timestep 0
        value = float(timestep.max()) if isinstance(timestep, Tensor) else float(timestep)
        last, latents = self._last, arguments.get("hidden_states")
        if value in schedule:
            self._last = value
            return StepCount(schedule.index(value), None, False)
        prompt = {key: x for key, x in arguments.items() if key.startswith(_PROMPT) and isinstance(x, Tensor)}
        one_video = value != last or _equal(latents, self._latents)
        begins = training or last is None or not one_video or self._turns(value, last)
        branch = None if begins else self._branch_of(prompt, name, [] if value != last else self._seen)
        if branch is None:
            self.forget()
            branch, begins, last = name or "forward 0", True, None
        if value != last:
            if last is not None:
                self._rising = value > last
                self._step += 1
            self._latents, self._seen = _kept(latents), []
        self._last = value
        self._seen.append(branch)
        self._prompts.setdefault(branch, {key: x.detach().clone() for key, x in prompt.items()})
        return StepCount(self._step, branch, begins)

    def _turns(self, value: float, last: float) -> bool:
        return self._rising is not None and value != last and (value > last) != self._rising

    def _branch_of(self, prompt: dict[str, Tensor], name: str | None, seen: list[str]) -> str | None:
        """By its name, else by its prompt; None where this run has no such branch. seen: what this step has had."""
        if name is not None:
            return name if name not in self._prompts or _same(prompt, self._prompts[name]) else None
        free = [branch for branch in self._prompts if branch not in seen]
        found = next((branch for branch in free if _same(prompt, self._prompts[branch])), None)
        if found is None and not free and len(seen) < MOST_BRANCHES:
            return f"forward {len(self._prompts)}"
        return found


def _same(prompt: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return prompt.keys() == other.keys() and all(_equal(x, other[key]) for key, x in prompt.items())


def _equal(x: Tensor | None, other: Tensor | None) -> bool:
    if x is None or other is None:
        return x is other
    alike = (x.shape, x.dtype, x.device) == (other.shape, other.dtype, other.device)
    return alike and (x.is_meta or torch.equal(x, other))


def _kept(x: Tensor | None) -> Tensor | None:
    """A copy, because loops write their latents in place."""
    return x.detach().clone() if isinstance(x, Tensor) else None
