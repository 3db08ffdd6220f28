"""SVG (Sparse VideoGen): each head is spatial or temporal, chosen on sampled rows, and attends a static band in its
own order.

F frames of S tokens. Frame-major position f * S + s (spatial order), token-major position s * F + f (temporal order).
    s' = sparsity - 2 ctx / L,  width = L (1 - sqrt(1 - s')),  L = ctx + F S
    wan:      |i - j| <= block * ceil(width / block)  or  j < S          (positions in the head's own order)
    hunyuan:  |i - j| <  block * floor(width / block)

Decisions
- V1 Positions are grid positions: the tokens outside `text`, numbered in sequence order, fill the grid frame-major,
  so F * H * W equals n minus the text. Padding inside the video keeps its position (not A5) but is not seen and not
  sampled.
- V2 `sparsity` is the authors' name for a DENSITY: 0.30 for the wan layout, 0.25 for hunyuan (None picks these).
- V3 layout None: "hunyuan" if there is text, else "wan". The same formulas serve either layout with or without text.
- V4 ctx = number of tokens in `text`, valid or not. s' is clipped to [0, 1]. width is used as it comes in double
  precision, L * (1 - math.sqrt(1 - s')), with no detour over frames.
- V5 block = 128 rounds the width (up in wan with <=, down in hunyuan with <). The hunyuan width is at least 1, so
  that a token always sees itself.
- V6 The wan sink is the first S positions of the head's own order (temporal: the first S / F places in all frames).
- V7 Profiling, per batch element and head: for each sampled row (a grid position, the same list for all heads and
  elements; given as `rows`, the authors draw 64 uniformly with replacement below min(10000, F * S)) exact attention
  over all video keys and attention under the two profile masks, mean squared error over rows and d each. Temporal iff
  spatial_error - temporal_error > 1e-9 * mean square of the exact rows (less is rounding, e.g. both masks full), else
  spatial. Rows given twice count twice; sampled padding is left out, and if no row is left the head is spatial.
- V8 Profile masks are bands of blocks in the head's own order, |i // block - j // block| < max(1, int(frames * S /
  block)), with frames = 2.0 and the first S positions as sink (wan) or frames = 1.5 and no sink (hunyuan), whatever
  the sparsity. The temporal mask is the same band and sink in token-major order.
- V9 Text takes no part in profiling (A4; the authors keep text columns in it), and text and padding are seen by A3
  (the authors let padding attend padding).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from restated import Restated, from_heads, scale_of, text_tokens, video_tokens

SPARSITY = {"wan": 0.30, "hunyuan": 0.25}
PROFILE_FRAMES = {"wan": 2.0, "hunyuan": 1.5}


def band_width(sparsity: float, context: int, tokens: int) -> float:
    """Half-width in tokens of the band that keeps `sparsity` of all pairs, text rows and columns paid for first."""
    length = context + tokens
    kept = min(1.0, max(0.0, sparsity - 2 * context / length))
    return length * (1 - math.sqrt(1 - kept))


def own_order(position: int, frames: int, per_frame: int, temporal: bool) -> int:
    return position % per_frame * frames + position // per_frame if temporal else position


def in_band(i: int, j: int, *, width: float, block: int, per_frame: int, layout: str) -> bool:
    if layout == "wan":
        return abs(i - j) <= block * math.ceil(width / block) or j < per_frame
    return abs(i - j) < max(1, block * math.floor(width / block))


def in_profile(i: int, j: int, *, block: int, per_frame: int, layout: str) -> bool:
    half = max(1, int(PROFILE_FRAMES[layout] * per_frame / block))
    return abs(i // block - j // block) < half or (layout == "wan" and j < per_frame)


def attend_row(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    return torch.softmax(keys @ query * scale, 0) @ values


def restate(q, k, v, *, grid, text, key_valid, scale, rows, sparsity=None, layout=None, block=128) -> Restated:
    in_text = text_tokens(q.shape[2], text)
    frames, per_frame = grid[0], grid[1] * grid[2]
    outside = [i for i in range(q.shape[2]) if i not in in_text]
    assert len(outside) == frames * per_frame
    position = {token: p for p, token in enumerate(outside)}
    video = video_tokens(q, text, key_valid)
    layout = layout if layout is not None else ("hunyuan" if in_text else "wan")
    width = band_width(SPARSITY[layout] if sparsity is None else sparsity, len(in_text), len(outside))

    def profile_error(b: int, h: int, temporal: bool) -> tuple[float, float]:
        """Mean squared error under the profile mask, and mean square of the exact rows."""
        own = {token: own_order(position[token], frames, per_frame, temporal) for token in video[b]}
        error, size, count = 0.0, 0.0, 0
        for row in rows:
            token = outside[row]
            if token not in own:
                continue
            near = [j for j in own if in_profile(own[token], own[j], block=block, per_frame=per_frame, layout=layout)]
            exact = attend_row(q[b, h, token], k[b, h, video[b]], v[b, h, video[b]], scale_of(q, scale))
            masked = attend_row(q[b, h, token], k[b, h, near], v[b, h, near], scale_of(q, scale))
            error += float((exact - masked).square().mean())
            size += float(exact.square().mean())
            count += 1
        return error / max(1, count), size / max(1, count)

    def of_head(b: int, h: int) -> dict:
        (spatial_error, size), (temporal_error, _) = profile_error(b, h, False), profile_error(b, h, True)
        temporal = spatial_error - temporal_error > 1e-9 * size
        own = [own_order(position[token], frames, per_frame, temporal) for token in video[b]]
        sees = [[in_band(i, j, width=width, block=block, per_frame=per_frame, layout=layout) for j in own] for i in own]
        return {"spatial_error": spatial_error, "temporal_error": temporal_error, "temporal": temporal, "sees": sees}

    return from_heads(q, k, v, text=text, key_valid=key_valid, scale=scale, of_head=of_head, width=width)
