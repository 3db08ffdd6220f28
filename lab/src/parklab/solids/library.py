"""The clips the model learns from: rendered once, encoded once, and kept as latents on the device of training.

Clip i of the library is a function of the seed and i. Step s draws from its first `library_at(s)` clips, so a run that
was stopped and resumed draws the same. Encoded clips are also files, which a resumed run reads instead of rendering.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from parklab.sprites.data import ClipSize
from parklab.sprites.flow import Pool
from parklab.sprites.recipe import Mixture
from parklab.sprites.training_state import load_state, save_state, say

from .grammar import LONGEST, WORDS
from .motion import Clip, training_clip
from .recipe import SolidsTrainConfig, library_at
from .renderer import render

PIXELS_AT_ONCE = 24_000_000  # encoded in one go: enough to fill a GPU
REPORT_EVERY = 20  # chunks
LONG_SHARE = 16  # the longest clips cost this many times as much, so there are fewer of them


def shrunk(clips: Tensor, size: ClipSize) -> Tensor:
    """Clips [b, 3, frames, h, w] as they would be seen at a smaller size: each pixel the mean of its area."""
    if clips.shape[-2:] == (size.height, size.width):
        return clips
    frames = clips.transpose(1, 2).flatten(0, 1)
    small = F.interpolate(frames, (size.height, size.width), mode="area")
    return small.unflatten(0, (clips.shape[0], clips.shape[2])).transpose(1, 2)


@dataclass
class Shelf:
    """Clips that are rendered at one size and kept at several."""

    name: str
    rendered: ClipSize
    sizes: tuple[ClipSize, ...]
    clips: list[Clip]
    first_row: int  # of its sentences in the corpus
    chunk: int  # clips rendered together
    latents: dict[ClipSize, Tensor] = field(default_factory=dict)
    made: int = 0
    rendered_clips: int = 0  # by this process, and how long it took
    seconds: float = 0.0


class Library:
    """A corpus (see parklab.sprites.flow) of rendered solids.

    encode: clips to normalised latents; version: names the encoder's weights.
    """

    words, longest = WORDS, LONGEST

    def __init__(
        self,
        config: SolidsTrainConfig,
        device: torch.device,
        shelves: tuple[tuple[ClipSize, tuple[ClipSize, ...]], ...],
        mixture: Mixture,
        encode: Callable[[Tensor], Tensor],
        version: Callable[[], str],
        folder: Path,
    ) -> None:
        self.config, self.device, self.mixture, self.folder = config, device, mixture, folder
        self.encode, self.version = encode, version
        self.writer = ThreadPoolExecutor(1, "clips")  # a disk that is slow must not hold up training
        self.writing: Future[None] | None = None
        self.keeping = True
        self.allowed: Callable[[], float] = lambda: float("inf")  # seconds of rendering by now
        self.shelves, self.sentences = list[Shelf](), list[str]()
        for index, (rendered, sizes) in enumerate(shelves):
            count = config.library // LONG_SHARE**index
            clips = [training_clip(config.seed, i, f"library {index}") for i in range(count)]
            chunk = (
                2 if config.small else max(4, 48_000_000 // (4 * rendered.frames * rendered.height * rendered.width))
            )
            self.shelves.append(Shelf(f"shelf{index}", rendered, sizes, clips, len(self.sentences), chunk))
            self.sentences += [clip.scene.sentence for clip in clips]

    def pool(self, size: ClipSize, count: int, step: int) -> Pool:
        index, shelf = next((i, shelf) for i, shelf in enumerate(self.shelves) if size in shelf.sizes)
        wanted = min(len(shelf.clips), max(count, library_at(self.config, step) // LONG_SHARE**index))
        while shelf.made < wanted and (shelf.made < count or self._in_time(shelf)):
            self._add(shelf)
        rows = torch.arange(shelf.first_row, shelf.first_row + len(shelf.clips), device=self.device)
        return Pool(shelf.latents[size], rows, min(wanted, shelf.made))

    def _in_time(self, shelf: Shelf) -> bool:
        """A renderer slower than planned makes fewer clips of each size, and takes no more of the time."""
        work = {each.name: len(each.clips) * each.rendered.tokens for each in self.shelves}
        return shelf.seconds * sum(work.values()) < self.allowed() * work[shelf.name]

    def _add(self, shelf: Shelf) -> None:
        """The shelf's next clips, from their file where there is one."""
        start, end = shelf.made, min(len(shelf.clips), shelf.made + shelf.chunk)
        path = self.folder / f"{shelf.name}-{start:06}.safetensors"
        names = {size: f"{size.frames}x{size.height}x{size.width}" for size in shelf.sizes}
        found: dict[str, Tensor] = {}
        if path.exists():
            tensors, record = load_state(path)
            found = tensors if record == self._kind(shelf, end) else {}
        if not found:
            began = time.monotonic()
            clips = render(shelf.clips[start:end], shelf.rendered, self.device)
            found = {names[size]: self._encoded(shrunk(clips, size)) for size in shelf.sizes}
            self._keep(path, {name: part.cpu() for name, part in found.items()}, self._kind(shelf, end))
            self._report(shelf, end - start, time.monotonic() - began)
        for size, name in names.items():
            part = found[name]
            if size not in shelf.latents:
                shelf.latents[size] = torch.empty(
                    (len(shelf.clips), *part.shape[1:]), dtype=part.dtype, device=self.device
                )
            shelf.latents[size][start:end] = part.to(self.device)
        shelf.made = end

    def _keep(self, path: Path, latents: dict[str, Tensor], kind: dict[str, object]) -> None:
        self.close()
        if self.keeping:
            self.writing = self.writer.submit(self._write, path, latents, kind)

    def _write(self, path: Path, latents: dict[str, Tensor], kind: dict[str, object]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        save_state(path, latents, kind)

    def close(self) -> None:
        """Waits for the last file. Without files, a full disk say, a resumed run renders again."""
        if self.writing is None:
            return
        try:
            self.writing.result()
        except OSError as error:
            self.keeping = False
            say(f"library: {error}; a resumed run will render its clips again")
        self.writing = None

    def _report(self, shelf: Shelf, count: int, seconds: float) -> None:
        shelf.rendered_clips, shelf.seconds = shelf.rendered_clips + count, shelf.seconds + seconds
        if shelf.rendered_clips % (REPORT_EVERY * shelf.chunk) == 0:
            rate = 60 * shelf.rendered_clips / shelf.seconds
            say(f"{shelf.name}: {shelf.rendered_clips} clips rendered, encoded and kept, {rate:.0f} a minute")

    def _kind(self, shelf: Shelf, end: int) -> dict[str, object]:
        """What encoded clips depend on."""
        sizes = [[size.frames, size.height, size.width] for size in (shelf.rendered, *shelf.sizes)]
        return {"seed": self.config.seed, "sizes": sizes, "end": end, "encoder": self.version()}

    def _encoded(self, clips: Tensor) -> Tensor:
        at_once = max(1, PIXELS_AT_ONCE // clips[0, 0].numel())
        return torch.cat([self.encode(part) for part in clips.split(at_once)])


class Bank:
    """Rendered clips, cut to the sizes that the autoencoder asks for."""

    def __init__(self, sizes: tuple[tuple[ClipSize, int], ...], seed: int, device: torch.device) -> None:
        self.sizes, self.seed, self.device = sizes, seed, device
        self.clips: dict[ClipSize, Tensor] = {}

    def cut(self, count: int, size: ClipSize, seed: int) -> Tensor:
        """Parts of a size, of clips as large or larger; which ones depends on the seed alone."""
        drawn = random.Random(f"cut {seed}")
        large = [
            s for s, _ in self.sizes if s.frames >= size.frames and s.height >= size.height and s.width >= size.width
        ]
        source = drawn.choice(large)
        held = self._rendered(source)
        parts = []
        for _ in range(count):
            room = (source.frames - size.frames, source.height - size.height, source.width - size.width)
            t, y, x = (drawn.randint(0, most) for most in room)
            clip = held[drawn.randrange(len(held))]
            parts.append(clip[:, t : t + size.frames, y : y + size.height, x : x + size.width])
        return torch.stack(parts).float()

    def _rendered(self, size: ClipSize) -> Tensor:
        if size not in self.clips:
            clips = [training_clip(self.seed, i, f"bank {size.width}") for i in range(dict(self.sizes)[size])]
            self.clips[size] = torch.cat(
                [render(clips[i : i + 16], size, self.device).half() for i in range(0, len(clips), 16)]
            )
        return self.clips[size]

    def clear(self) -> None:
        self.clips.clear()


def fresh_clips(count: int, size: ClipSize, seed: int, device: torch.device) -> Tensor:
    """Clips that are in no bank and no library."""
    return render([training_clip(seed, i, "fresh") for i in range(count)], size, device)
