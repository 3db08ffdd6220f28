"""Sliding Tile Attention (STA, arXiv 2502.04507), restated: a window of whole tiles around the query's tile.

The video grid (frames, height, width) is cut into tiles; a query sees every key of the window[a] tiles per axis a
around its own tile. At the grid's border the window moves inwards instead of shrinking, so that every tile sees
equally many tiles. No score is computed; the plan depends on the grid only.

Decisions
 1. Defaults: tile (6, 8, 8), window (3, 3, 3) tiles: the kernel's tile, and its documentation's (18, 24, 24) tokens.
 2. `window` is one triple for all heads or one triple per head (the authors search one per head; the search is no
    part of this).
 3. Tiles are cut from the grid's origin and end at its border: ceil(size / tile) tiles per axis, the last one
    smaller; nothing is padded or dropped (the authors' kernel accepts only grids that the tile divides).
 4. With T tiles on an axis and w = min(window, T), the tile t sees tiles first..first + w - 1, first = min(max(t -
    w // 2, 0), T - w). For odd w this is the authors' clamped centre. For even w < T the extra tile is on the lower
    side and exactly w tiles are seen (the authors' reference mask would show w + 1).
 5. A tile is seen if it is in the window on all three axes.
 6. The c-th token outside the text is cell c of the grid in frame-major order; self-attention only; the number of
    tokens outside the text must be frames * height * width. Padding inside the grid keeps its cell, and is then
    seen by nobody.
 7. Text and padding queries see every valid key, text keys are seen by every query, padding keys by nobody (our
    package's convention; the authors do the same for text and have no padding inside the video).
 8. Output: softmax attention over the seen keys, scale d**-0.5 unless given; nothing replaces the unseen keys.
"""

from __future__ import annotations

from restated.problem import Restated, cells, static


def restate(q, k, v, *, grid, text, key_valid, scale, tile=(6, 8, 8), window=(3, 3, 3)) -> Restated:
    windows = [tuple(window)] * q.shape[1] if isinstance(window[0], int) else [tuple(w) for w in window]
    tile_of = {token: _tile(at, grid, tile) for token, at in cells(q.shape[2], k.shape[2], text, grid).items()}
    tiles = [-(-size // edge) for size, edge in zip(grid, tile, strict=True)]

    def sees(head: int, row: int, column: int) -> bool:
        mine, other = tile_of[row], tile_of[column]
        return all(_sees(mine[a], other[a], tiles[a], windows[head][a]) for a in range(3))

    return static(q, k, v, text=text, key_valid=key_valid, scale=scale, sees=sees)


def _tile(cell: int, grid, tile) -> tuple[int, int, int]:
    _, height, width = grid
    return cell // (height * width) // tile[0], cell // width % height // tile[1], cell % width // tile[2]


def _sees(mine: int, other: int, count: int, window: int) -> bool:
    window = min(window, count)
    first = min(max(mine - window // 2, 0), count - window)
    return first <= other < first + window
