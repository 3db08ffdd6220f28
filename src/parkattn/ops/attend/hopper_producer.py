"""The producer warp of `hopper`: hands out query tiles and keeps the rings of query, key and value tiles full."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# as in `worklist`, which writes these records: a kernel sees the globals of its own module alone
from ..records import (
    COUNT,
    NEXT,
    TILE_FIELDS,
    TILE_HEAD,
    TILE_KEYS,
    TILE_LIST,
    TILE_PLAIN,
    TILE_ROW,
    TILE_ROWS,
    TILE_WIDE,
)
from ..triton_versions import copy_to_shared, reinterpret


@gluon.jit
def _copy(
    desc, row, at: gl.constexpr, G: gl.constexpr, full, tile, KEYS: gl.constexpr, D: gl.constexpr, BYTES: gl.constexpr
):
    """Granule of G rows to rows [at*G, at*G+G) of a tile. A [KEYS, D] tile with 128-byte swizzle lies in shared memory
    as column slabs of 128 bytes (COLUMNS elements), so a granule arrives as D / COLUMNS boxes; rows of 64 bytes are a
    slab of their own.
    """
    PER: gl.constexpr = KEYS // G
    COLUMNS: gl.constexpr = 64 if BYTES == 2 else D
    slabs = reinterpret(tile, desc.dtype, [(D // COLUMNS) * PER, G, COLUMNS], desc.layout)
    for c in gl.static_range(D // COLUMNS):
        copy_to_shared(desc, [row, c * COLUMNS], full, slabs.index(c * PER + at))


@gluon.jit
def _fill(j, at, wide_tiles, all_tiles, wide, tails, row0, comp_row0, descs, slots, bias, bias_desc, bias_ring,
          KEYS: gl.constexpr, WIDE: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
          COMPENSATE: gl.constexpr, BYTES: gl.constexpr, BIASED: gl.constexpr):  # fmt: skip
    """Tile j of the list into ring slot at % STAGES. Rows are read before the wait for the slot, which hides their
    latency.

    descs: of wide granules, of tails, of stand-ins, of BYTES per element; slots: the ring and its barriers. BIASED:
    with its bias, where it has one. bias: the tiles before the first that has one, row of the bias of stand-ins, of
    that of tails.
    """
    desc_wide, desc_tail, desc_comp = descs
    ring, full_ring, empty_ring = slots
    plain_tiles, stand_in_bias, tail_bias = bias
    PER: gl.constexpr = KEYS // WIDE
    PER_T: gl.constexpr = KEYS // TAIL
    COLUMNS: gl.constexpr = 64 if BYTES == 2 else D
    slot = at % STAGES
    phase = ((at // STAGES) & 1) ^ 1
    full = full_ring.index(slot)
    tile = ring.index(slot)
    if j < wide_tiles:
        rows = (gl.load(wide + j * PER) + row0,)
        for g in gl.static_range(1, PER):
            rows = rows + (gl.load(wide + j * PER + g) + row0,)  # noqa: RUF005
        mbarrier.wait(empty_ring.index(slot), phase)
        mbarrier.expect(full, KEYS * D * BYTES)
        for g in gl.static_range(PER):
            _copy(desc_wide, rows[g], g, WIDE, full, tile, KEYS, D, BYTES)
    elif j < all_tiles:
        # four granules at a time keep the producer inside its registers
        pieces = tails + (j - wide_tiles) * PER_T
        mbarrier.wait(empty_ring.index(slot), phase)
        if BIASED & (j >= plain_tiles):
            mbarrier.expect(full, KEYS * D * BYTES + KEYS * 4)
            copy_to_shared(bias_desc, [tail_bias + j - plain_tiles, 0], full, bias_ring.index(slot))
        else:
            mbarrier.expect(full, KEYS * D * BYTES)
        slabs = reinterpret(tile, desc_tail.dtype, [(D // COLUMNS) * PER_T, TAIL, COLUMNS], desc_tail.layout)
        for g in range(0, PER_T, 4):
            for i in gl.static_range(4):
                piece = (gl.load(pieces + g + i) >> 5) + row0
                for c in gl.static_range(D // COLUMNS):
                    copy_to_shared(desc_tail, [piece, c * COLUMNS], full, slabs.index(c * PER_T + g + i))
    elif COMPENSATE:
        stand_in = comp_row0 + (j - all_tiles) * KEYS
        mbarrier.wait(empty_ring.index(slot), phase)
        if BIASED:
            mbarrier.expect(full, KEYS * D * BYTES + KEYS * 4)
            copy_to_shared(bias_desc, [stand_in_bias + j - all_tiles, 0], full, bias_ring.index(slot))
        else:
            mbarrier.expect(full, KEYS * D * BYTES)
        _copy(desc_comp, stand_in, 0, KEYS, full, tile, KEYS, D, BYTES)


@gluon.jit
def produce(descs, lists, shape, rings, bars, KEYS: gl.constexpr, WIDE: gl.constexpr, TAIL: gl.constexpr,
            STAGES: gl.constexpr,
              D: gl.constexpr, COMPENSATE: gl.constexpr, GROUPS: gl.constexpr, BYTES: gl.constexpr):  # fmt: skip
    """BYTES: of an element of q and k; values have two."""
    q_desc, k_wide, k_tail, v_wide, v_tail, c_desc, u_desc, bias_desc = descs
    wide_lists, tail_lists, tiles, count, record_buffers, _lost_tiles = lists
    n, m, kb, wide_width, tails_width, bias_row, bias_tiles = shape
    q_ring, k_ring, v_ring, bias_ring = rings
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    copies = record_buffers + gl.program_id(0) * (2 * TILE_FIELDS)
    last = gl.load(count + COUNT)
    done = 0
    r = 0
    tile = gl.atomic_add(count + NEXT, 1, sem="relaxed")
    while tile < last:
        record = tiles + tile * TILE_FIELDS
        copy = copies + (r & 1) * TILE_FIELDS
        head = gl.load(record + TILE_HEAD)
        list_id = gl.load(record + TILE_LIST)
        wide_tiles = gl.load(record + TILE_WIDE)
        all_tiles = gl.load(record + TILE_KEYS)
        total = all_tiles
        if COMPENSATE:
            total = all_tiles + bias_tiles
        bias = (gl.load(record + TILE_PLAIN), list_id * bias_row, list_id * bias_row + bias_tiles)
        wide = wide_lists + list_id.to(gl.int64) * wide_width
        tails = tail_lists + list_id.to(gl.int64) * tails_width
        # keys run one tile ahead of values, the order in which the consumers free the slots, and the first ones ahead
        # of the queries
        for j in range(total + 1):
            if j < total:
                _fill(j, done + j, wide_tiles, all_tiles, wide, tails, head * m, head * kb, (k_wide, k_tail, c_desc),
                      (k_ring, k_full, k_empty), bias, bias_desc, bias_ring, KEYS, WIDE, TAIL, STAGES, D, COMPENSATE,
                      BYTES, True)  # fmt: skip
            if j == 0:
                for w in gl.static_range(GROUPS):
                    mbarrier.wait(q_empty.index(w), (r & 1) ^ 1)
                for f in gl.static_range(TILE_FIELDS):
                    gl.store(copy + f, gl.load(record + f))
                for w in gl.static_range(GROUPS):
                    mbarrier.expect(q_full.index(w), 64 * D * BYTES)
                    # a tile of at most 64 rows goes to both warpgroups
                    q_from = (
                        head * n + gl.load(record + TILE_ROW) + gl.where(gl.load(record + TILE_ROWS) <= 64, 0, w * 64)
                    )
                    copy_to_shared(q_desc, [q_from, 0], q_full.index(w), q_ring.index(w))
            else:
                _fill(j - 1, done + j - 1, wide_tiles, all_tiles, wide, tails, head * m, head * kb,
                      (v_wide, v_tail, u_desc), (v_ring, v_full, v_empty), bias, bias_desc, bias_ring, KEYS, WIDE, TAIL,
                      STAGES, D, COMPENSATE, 2, False)  # fmt: skip
        done += total
        r += 1
        tile = gl.atomic_add(count + NEXT, 1, sem="relaxed")
    for w in gl.static_range(GROUPS):
        mbarrier.wait(q_empty.index(w), (r & 1) ^ 1)
    gl.store(copies + (r & 1) * TILE_FIELDS + TILE_ROWS, 0)
    for w in gl.static_range(GROUPS):
        mbarrier.arrive(q_full.index(w), count=1)
