"""Small random problems for every method: odd grids, text at either end, padding, clustered and unclustered values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from restated import Restated, scale_of, video_tokens

Grid = tuple[int, int, int]
KINDS = ("gaussian", "clustered", "runs", "frames", "places")
PADDINGS = ("none", "none", "text", "tail", "scattered")


@dataclass(frozen=True)
class Case:
    """Inputs shared by all methods; a method's own settings are drawn by `settings_for`."""

    q: Tensor
    k: Tensor
    v: Tensor
    grid: Grid
    text: slice | None
    key_valid: Tensor | None
    scale: float | None
    kind: str
    seed: int

    @property
    def inputs(self) -> dict[str, Any]:
        """Everything but q, k, v that `restate` takes in each method."""
        return {"grid": self.grid, "text": self.text, "key_valid": self.key_valid, "scale": self.scale}

    @property
    def video(self) -> list[list[int]]:
        return video_tokens(self.q, self.text, self.key_valid)

    def first_element(self) -> Case:
        valid = None if self.key_valid is None else self.key_valid[:1]
        return replace(self, q=self.q[:1], k=self.k[:1], v=self.v[:1], key_valid=valid)

    def video_logits(self, b: int, h: int) -> Tensor:
        """[N N] scaled dot products of the video tokens."""
        q, k = self.q[b, h, self.video[b]], self.k[b, h, self.video[b]]
        return q @ k.T * scale_of(self.q, self.scale)

    def between_video(self, allowed: Tensor, b: int) -> Tensor:
        """[b h n n] -> [h N N] of batch element b."""
        return allowed[b][:, self.video[b]][:, :, self.video[b]]

    def heads(self, result: Restated) -> Iterator[tuple[int, int, dict[str, Any], Tensor]]:
        """(b, h, notes of that head, allowed [N N] between its video tokens)."""
        for b, row in enumerate(result.notes["heads"]):
            for h, head in enumerate(row):
                yield b, h, head, self.between_video(result.allowed, b)[h]


def normal(rng: Random, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rng.getrandbits(48)), dtype=torch.float64)


def centres_of(rng: Random, kind: str, grid: Grid) -> list[int]:
    """Which centre every grid position belongs to."""
    frames, per_frame = grid[0], grid[1] * grid[2]
    count = frames * per_frame
    if kind == "clustered":
        return [rng.randrange(5) for _ in range(count)]
    if kind == "runs":
        length = rng.choice((4, 8))
        return [position // length for position in range(count)]
    if kind == "frames":
        return [position // per_frame for position in range(count)]
    return [position % per_frame for position in range(count)]


def values(rng: Random, kind: str, shape: tuple[int, ...], grid: Grid, outside: list[int]) -> tuple[Tensor, ...]:
    """q, k, v; tokens of one centre are alike in q and in k, so that attention has the kind's own pattern."""
    q, k, v = (normal(rng, *shape) for _ in range(3))
    if kind != "gaussian":
        centre = torch.tensor(centres_of(rng, kind, grid))
        centres = 2 * normal(rng, shape[0], shape[1], int(centre.max()) + 1, shape[3])
        for x in (q, k):
            x *= rng.choice((0.1, 0.4))
            x[:, :, outside] += centres[:, :, centre]
    return q, k + 0.5 * normal(rng, *shape[:2], 1, shape[3]), v


def padding_of(rng: Random, kind: str, batch: int, n: int, text: slice | None, outside: list[int]) -> Tensor | None:
    """`text`: the prompt's unused tail; `tail`: the last video tokens; `scattered`: a few video tokens anywhere."""
    if kind == "none" or (kind == "text" and text is None):
        return None
    valid = torch.ones(batch, n, dtype=torch.bool)
    for b in range(batch):
        if kind == "text":
            used = rng.randrange(1, text.stop - text.start + 1)
            valid[b, text.start + used : text.stop] = False
        elif kind == "tail":
            valid[b, outside[len(outside) - rng.randrange(len(outside) // 3) :]] = False
        else:
            valid[b, rng.sample(outside, rng.randrange(len(outside) // 4))] = False
    return valid


def case(seed: int) -> Case:
    rng = Random(seed)
    grid = (rng.randint(2, 4), rng.randint(3, 5), rng.randint(2, 5))
    video = grid[0] * grid[1] * grid[2]
    words = rng.choice((0, 0, rng.randint(2, 9), rng.randint(2, 9)))
    n = video + words
    text = None if words == 0 else rng.choice((slice(0, words), slice(video, n)))
    outside = [i for i in range(n) if text is None or not text.start <= i < text.stop]
    kind = rng.choice(KINDS)
    batch = rng.randint(1, 2)
    shape = (batch, rng.randint(1, 3), n, rng.choice((8, 12, 16, 24, 32)))
    q, k, v = values(rng, kind, shape, grid, outside)
    key_valid = padding_of(rng, rng.choice(PADDINGS), batch, n, text, outside)
    scale = rng.choice((None, None, 0.1, 0.4))
    return Case(q, k, v, grid, text, key_valid, scale, kind, seed)


def cases(count: int, seed: int = 0) -> Iterator[Case]:
    """The same `count` problems for the same seed; one problem is `case(number)`."""
    first = Random(seed)
    for _ in range(count):
        yield case(first.getrandbits(40))


def initial_tokens(rng: Random, case: Case, clusters: int) -> Tensor:
    """[b h clusters] positions of video tokens, at least two distinct; sometimes with repeats, as the authors draw."""
    repeats = clusters > 2 and rng.random() < 0.25

    def draw(video: list[int]) -> list[int]:
        chosen = rng.sample(video, k=clusters)
        return [*chosen[:2], *rng.choices(chosen, k=clusters - 2)] if repeats else chosen

    return torch.tensor([[draw(video) for _ in range(case.q.shape[1])] for video in case.video])


def initial_clusters(rng: Random, case: Case) -> dict[str, Tensor]:
    least = min(len(video) for video in case.video)
    return {
        "initial_queries": initial_tokens(rng, case, rng.randint(2, min(6, least))),
        "initial_keys": initial_tokens(rng, case, rng.randint(2, min(12, least))),
    }


def sparge_settings(rng: Random, case: Any) -> dict[str, Any]:
    selection = {"topk": rng.choice((0.1, 0.3, 0.5, 0.7, 1.0))}
    if rng.random() < 0.5:
        selection = {"cdfthreshd": rng.choice((0.3, 0.6, 0.98, 1.0))}
    return {
        "block_q": rng.choice((2, 3, 5, 8, 16)), "block_k": rng.choice((2, 3, 4, 8)), "smooth_k": rng.random() < 0.7,
        "attention_sink": rng.random() < 0.3, "simthreshd1": rng.choice((None, None, 0.3, 0.5, -0.1, 1.1)), **selection,
    }  # fmt: skip


def xattention_settings(rng: Random, case: Any) -> dict[str, Any]:
    stride = rng.choice((1, 2, 3, 4))
    return {
        "stride": stride, "block": stride * rng.choice((1, 2, 3)), "threshold": rng.choice((0.3, 0.6, 0.9, 1.0)),
        "norm": rng.choice((0.5, 1.0)), "keep_sink": rng.random() < 0.5, "keep_recent": rng.random() < 0.3,
    }  # fmt: skip


def svg_settings(rng: Random, case: Any) -> dict[str, Any]:
    """Rows are the restatement's; the method draws its own."""
    tokens = case.grid[0] * case.grid[1] * case.grid[2]
    return {
        "rows": [rng.randrange(tokens) for _ in range(rng.choice((1, 3, 8)))], "sparsity": rng.choice((None, 0.1, 0.3, 0.5, 0.8, 1.0)),
        "layout": rng.choice((None, "wan", "hunyuan")), "block": rng.choice((1, 2, 3, 4, 8)),
    }  # fmt: skip


def svg2_settings(rng: Random, case: Case) -> dict[str, Any]:
    return {
        **initial_clusters(rng, case),
        "p": rng.choice((0.5, 0.9, rng.random())),
        "min_kc_ratio": rng.choice((0.0, 0.10, 0.3)),
        "iters": rng.choice((1, 2, 3, 10)),
    }


def svoo_settings(rng: Random, case: Case) -> dict[str, Any]:
    heads = case.q.shape[1]
    profile = [rng.random() for _ in range(heads)]
    if rng.random() < 0.2:
        profile[rng.randrange(heads)] = float("nan")
    return {
        **initial_clusters(rng, case),
        "p": rng.choice((0.5, 0.88, 0.90, rng.random())),
        "profile": rng.choice((None, profile, profile)),
        "floor_clip": rng.choice(((0.15, 0.20), (0.05, 0.10), (0.1, 0.6))),
        "min_kc_ratio": rng.choice((0.10, 0.3)),
        "iters": rng.choice((1, 2, 2, 3)),
    }


SETTINGS: dict[str, Callable[[Random, Case], dict[str, Any]]] = {
    "sparge": sparge_settings, "xattention": xattention_settings, "svg": svg_settings, "svg2": svg2_settings,
    "svoo": svoo_settings,
}  # fmt: skip


def settings_for(method: str, case: Case) -> dict[str, Any]:
    """The method's settings for this case: always the same ones for the same case."""
    return SETTINGS[method](Random(f"{method} {case.seed}"), case)
