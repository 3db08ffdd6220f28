"""Radial Attention (arXiv 2506.19852), restated: a static band per pair of frames, half as wide at twice the distance.

S = height * width tokens per frame, bits(x) = number of binary digits of x (bits(0) = 0), D = |frame_i - frame_j|.
Token rule for query at place r of frame i and key at place c of frame j (places 0..S-1):
    seen  iff  |r - c| <= width(D)  and  D mod split(D) = 0,
    width(D) = S for D <= 1, else max(2^bits(S) / 2^bits(D) * decay, block),
    split(D) = 1 if reach >= block else floor(block / reach),  reach = 2^bits(S) / 2^bits(D).
The band halves whenever D doubles; once it is as narrow as a block, frame distances are left out instead: every second
one stays, then every fourth, and so on.
Block rule: blocks are `block` consecutive video tokens; see decisions 4 to 7.

Decisions
 1. Defaults: block 128; decay 1.0 (the authors' command line default; their scripts use 0.2 for Wan2.1-14B, 0.8 for
    Wan2.2, 0.95 for HunyuanVideo); sink True (frame 0 is seen by every query: what they do for Wan; False for
    HunyuanVideo).
 2. The published code, not the paper's token formula, is followed: the paper's narrowest band is the diagonal k =
    l, the code's is one block wide, and D = 1 is full.
 3. The split threshold is `block` (the code has the literal 128 and calls it the block size) and does not use
    `decay`.
 4. The token rule becomes blocks one frame pair at a time: of the query block u and the key block v only the rows
    in frame i and the columns in frame j count. A column is used if at least one of those rows sees it, and dense
    if the number of those rows that see it is more than 1/3 of the tokens in query block u (all of them, not only
    those in frame i).
 5. Block (u, v) is kept iff for some pair of frames more than 3/5 of its used columns are dense (integers: 3 * rows
    > tokens of u, 5 * dense > 3 * used, used > 0).
 6. Every block that a frame touches takes part (the code looks at ceil(S / block) blocks from the frame's first one
    and so drops the last one where a frame straddles one block more).
 7. The diagonal block (u, u) is always kept, so that no query is left without keys when a frame is smaller than a
    block (with S >= block rules 4 and 5 always keep it).
 8. Sink: for j = 0 and sink=True every row of every frame sees every column of frame 0 in the token rule (before
    rules 4 and 5).
 9. The trailing block may be shorter than `block` (the authors need a multiple); nothing is padded or dropped.
10. The c-th token outside the text is cell c of the grid in frame-major order; blocks are cut over these cells.
    Padding inside the grid counts in rules 4 and 5 (the plan depends on the grid only), and is then seen by nobody.
    Self-attention only.
11. Text and padding queries see every valid key, text keys are seen by every query, padding keys by nobody (our
    convention).
12. All heads and batch entries share the plan. Output: softmax attention over the seen keys; nothing replaces the
    others. A query whose kept blocks hold no valid key cannot occur: its own key is in its own block.
"""

from __future__ import annotations

from restated.problem import Restated, cells, static


def restate(q, k, v, *, grid, text, key_valid, scale, block=128, decay=1.0, sink=True) -> Restated:
    cell = cells(q.shape[2], k.shape[2], text, grid)
    kept = kept_blocks(grid, block, decay, sink)

    def sees(head: int, row: int, column: int) -> bool:
        return (cell[row] // block, cell[column] // block) in kept

    return static(q, k, v, text=text, key_valid=key_valid, scale=scale, sees=sees)


def band(grid, distance: int, block: int, decay: float) -> float | None:
    """width(D), or None where the split leaves the distance out."""
    places = grid[1] * grid[2]
    reach = 2 ** places.bit_length() / 2 ** distance.bit_length()
    if reach < block and distance % int(block / reach) != 0:
        return None
    return float(places) if distance <= 1 else max(reach * decay, float(block))


def kept_blocks(grid, block: int, decay: float, sink: bool) -> set[tuple[int, int]]:
    frames, places = grid[0], grid[1] * grid[2]
    total = frames * places
    count = -(-total // block)
    cells_of = [range(u * block, min((u + 1) * block, total)) for u in range(count)]
    kept = {(u, u) for u in range(count)}
    for i in range(frames):
        for j in range(frames):
            width = float(places) if sink and j == 0 else band(grid, abs(i - j), block, decay)
            if width is None:
                continue
            for u in range(i * places // block, ((i + 1) * places - 1) // block + 1):
                rows = [c % places for c in cells_of[u] if c // places == i]
                for t in range(j * places // block, ((j + 1) * places - 1) // block + 1):
                    used = dense = 0
                    for column in (c % places for c in cells_of[t] if c // places == j):
                        hits = sum(abs(row - column) <= width for row in rows)
                        used += hits > 0
                        dense += 3 * hits > len(cells_of[u])
                    if 5 * dense > 3 * used:
                        kept.add((u, t))
    return kept
