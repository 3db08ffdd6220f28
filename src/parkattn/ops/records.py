"""The int32 records that one kernel writes and another reads: the place of each field."""

import triton.language as tl

# a query tile of attention: `worklist` writes it, the attention kernels read it
TILE_FIELDS = tl.constexpr(8)
TILE_HEAD = tl.constexpr(0)
TILE_LIST = tl.constexpr(1)  # its query block, of all heads: the row of the lists
TILE_ROW = tl.constexpr(2)  # first query row, from the start of the head
TILE_ROWS = tl.constexpr(3)  # 0 ends the work of a program
TILE_WIDE = tl.constexpr(4)  # key tiles made of wide granules; they come first
TILE_PLAIN = tl.constexpr(5)  # key tiles that need no bias; the wide ones are among them
TILE_KEYS = tl.constexpr(6)  # key tiles without stand-ins

# counters of one attention call: query tiles, the next one to hand out; the same for tiles computed a second time
COUNTERS = tl.constexpr(4)
COUNT = tl.constexpr(0)
NEXT = tl.constexpr(1)
LOST = tl.constexpr(2)

# what `worklist` knows of a list before its query tiles exist
SUMMARY_FIELDS = tl.constexpr(4)
SUMMARY_WIDE = tl.constexpr(0)
SUMMARY_PLAIN = tl.constexpr(1)
SUMMARY_KEYS = tl.constexpr(2)

# rows of one query block, as a program of PAMA takes them
ITEM_FIELDS = tl.constexpr(8)
ITEM_HEAD = tl.constexpr(0)
ITEM_ROW = tl.constexpr(1)  # first row, from the start of the head
ITEM_ROWS = tl.constexpr(2)  # rows here
ITEM_BLOCK_ROWS = tl.constexpr(3)  # rows of the whole block
ITEM_SLOT = tl.constexpr(4)  # partial row that receives the sum, or -1 for the output row
ITEM_BLOCK = tl.constexpr(5)  # the query block, of all heads, or -1 where nothing is left to do
