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

from restated.problem import Restated, attend_keys, cells, empty, tokens_by_role


def restate(q, k, v, *, grid, text, key_valid, scale, tile=(6, 8, 8), window=(3, 3, 3)) -> Restated:
    b, h, n, d = q.shape
    m = k.shape[2]
    scale = d**-0.5 if scale is None else scale
    windows = [tuple(window)] * h if isinstance(window[0], int) else [tuple(w) for w in window]
    cell = cells(n, m, text, grid)
    result = empty(q, k)
    tiles = [-(-size // edge) for size, edge in zip(grid, tile, strict=True)]
    result.notes = {"tiles": tuple(tiles), "tile_of": {token: _tile(at, grid, tile) for token, at in cell.items()}}
    for i in range(b):
        tokens = tokens_by_role(n, m, text, key_valid, i)
        video = set(tokens.video_queries)
        for j in range(h):
            queries, keys, values = q[i, j].tolist(), k[i, j].tolist(), v[i, j].tolist()
            for row in range(n):
                seen = tokens.valid_keys
                if row in video:
                    mine = _tile(cell[row], grid, tile)
                    seen = list(tokens.text_keys)
                    for column in tokens.video_keys:
                        other = _tile(cell[column], grid, tile)
                        if all(_sees(mine[a], other[a], tiles[a], windows[j][a]) for a in range(3)):
                            seen.append(column)
                result.allowed[i, j, row, seen] = True
                result.out[i, j, row] = q.new_tensor(attend_keys(queries[row], keys, values, seen, scale))
    return result


def _tile(cell: int, grid, tile) -> tuple[int, int, int]:
    _, height, width = grid
    return cell // (height * width) // tile[0], cell // width % height // tile[1], cell % width // tile[2]


def _sees(mine: int, other: int, count: int, window: int) -> bool:
    window = min(window, count)
    first = min(max(mine - window // 2, 0), count - window)
    return first <= other < first + window
