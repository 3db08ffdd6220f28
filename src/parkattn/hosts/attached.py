"""An engine that is attached to a program: the calls that its host keeps from it, and the order in which calls come."""

from __future__ import annotations

import collections

from parkattn.engine import Engine
from parkattn.engine.summary import Summary
from parkattn.site import AttentionMethod


class AttachedEngine:
    """An engine, and why calls do not reach it or stay dense in it."""

    def __init__(self, method: AttentionMethod, min_tokens: int, unknown_step: str) -> None:
        self.engine = Engine(method, unknown_step=unknown_step)
        self.min_tokens = min_tokens
        self.declined = collections.Counter[str]()  # reason -> calls that are not self-attention of the video

    def summary(self) -> Summary:
        """Summary of the last video, per layer and in all."""
        return Summary.of(self.engine.method.name, self.engine.log, self.engine.state_bytes, missed=self.declined)

    def reset(self) -> None:
        """Forget plans and statistics."""
        self.engine.reset()
        self.declined.clear()

    def end_run(self) -> None:
        """Plans are released; what was done stays for the summary."""
        self.engine.end_run()

    def why_short(self, tokens: int) -> str | None:
        return f"{tokens} tokens are fewer than min_tokens={self.min_tokens}" if tokens < self.min_tokens else None


class CountingEngine(AttachedEngine):
    """For programs whose layers are objects: it tells transformers apart, and the calls of one layer in one step."""

    def __init__(self, method: AttentionMethod, min_tokens: int, unknown_step: str) -> None:
        super().__init__(method, min_tokens, unknown_step)
        self._objects: dict[int, list[int]] = {}  # layer -> numbers of the objects that have answered for it
        self._calls: dict[int | None, collections.Counter[tuple[str, int, int]]] = {}  # step -> calls

    def reset(self) -> None:
        super().reset()
        self._objects.clear()
        self._calls.clear()

    def summary(self) -> Summary:
        """Summary of the last video, per layer and in all."""
        self.engine.note_unseen_forwards("this host runs every forward")
        return super().summary()

    def enter(self, number: int, layer: int) -> tuple[str, int]:
        """A name for the transformer of the object with this number, and its calls so far in this step and branch."""
        # Wan2.2's two transformers have layers of the same numbers, and objects of their own
        numbers = self._objects.setdefault(layer, [])
        if number not in numbers:
            numbers.append(number)
        place, clock = numbers.index(number), self.engine.clock
        calls = self._calls.setdefault(clock.step, collections.Counter())
        before = calls[clock.branch, layer, number]
        calls[clock.branch, layer, number] += 1
        return "transformer" if place == 0 else f"transformer_{place + 1}", before

    def leave(self) -> None:
        """The run is over, and plans are released, when its last step has had as many calls as any step before it."""
        clock, calls = self.engine.clock, self._calls
        if clock.step is None or clock.total_steps is None or clock.step != clock.total_steps - 1:
            return
        before = [counter.total() for step, counter in calls.items() if step != clock.step]
        if before and calls[clock.step].total() == max(before):
            self.end_run()
