"""Blocks cut into tiles."""

import pytest
import torch

from parkattn.plan import arrange, cut_blocks


@pytest.mark.parametrize("size", [1, 3, 8, 100])
@pytest.mark.parametrize("others", [0, 2])
def test_tiles_cover_each_block_in_order_and_move_no_token(size, others):
    labels = torch.randint(0, 5 + others, (2, 3, 40), generator=torch.Generator().manual_seed(size), dtype=torch.int32)
    labels[labels == 2] = 3  # an empty block
    blocks = arrange(labels, 5 + others)
    cut, owner = cut_blocks(blocks, 5, size)
    tiles = owner.shape[-1]
    assert tiles == 40 // size + 5
    assert torch.equal(cut.order, blocks.order)
    again = arrange(cut.labels, tiles + others)
    assert torch.equal(again.order, cut.order)
    assert torch.equal(again.offsets, cut.offsets)
    own = labels < 5
    assert torch.equal(owner.gather(-1, cut.labels.long().clamp(max=tiles - 1))[own], labels[own])
    assert torch.equal((cut.labels - tiles)[~own], (labels - 5)[~own])
    # as few tiles as hold a block, all of them full but the last
    full = (cut.sizes[..., :tiles] == size).long()
    of_each = torch.zeros(2, 3, 5, dtype=torch.long).scatter_add_(-1, owner.long(), full)
    assert torch.equal(of_each, blocks.sizes[..., :5].long() // size)
