"""The nouns of every method: blocks of tokens, the plan that says which block attends to which, and the roles of text
and padding.

Letters used everywhere: b batch, h heads, n query tokens, m key tokens, d head dimension, c clusters, qb query blocks,
kb key blocks. A plan is a value: it can be saved, moved to another device and reused on later steps.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parkattn.checks import expect_choice, expect_device, expect_key_valid, expect_path, expect_text
from parkattn.files import write_atomically
from parkattn.segments import aligned, segment_sizes


@dataclass(frozen=True)
class Blocks:
    """A partition of one side's tokens into contiguous blocks of a permuted order."""

    labels: Tensor
    """[b h n] int32: the block of each token."""
    order: Tensor | None
    """[b h n] int32: the token at each position of the permuted order; None: tokens are in that order already."""
    offsets: Tensor
    """[b h blocks+1] int32: where each block begins in the permuted order."""

    @property
    def count(self) -> int:
        """Number of blocks, empty ones included."""
        return self.offsets.shape[-1] - 1

    @property
    def tokens(self) -> int:
        """Number of tokens in all of them."""
        return self.labels.shape[-1]

    @property
    def sizes(self) -> Tensor:
        """[b h blocks] int32"""
        return self.offsets.diff(dim=-1)

    def permutation(self) -> Tensor:
        """order [b h n], also where tokens are in it already."""
        if self.order is not None:
            return self.order
        return torch.arange(self.tokens, dtype=torch.int32, device=self.labels.device).expand(self.labels.shape)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Blocks:
        """The same blocks on another device or of other heads: `move` brings each tensor there."""
        return Blocks(move(self.labels), None if self.order is None else move(self.order), move(self.offsets))


def arrange(labels: Tensor, count: int) -> Blocks:
    """Blocks from labels [b h n] in [0, count): stable, so tokens keep their order inside a block."""
    ranked, order = labels.sort(dim=-1, stable=True)
    edges = torch.arange(count + 1, dtype=torch.int32, device=labels.device).expand(*labels.shape[:-1], count + 1)
    offsets = torch.searchsorted(ranked.to(torch.int32), edges.contiguous(), out_int32=True)
    return Blocks(labels.to(torch.int32), order.to(torch.int32), offsets)


def tiles(like: Tensor, size: int) -> Blocks:
    """Contiguous tiles of `size` tokens of like [b h n d], the last one shorter: nothing is gathered."""
    b, h, n = like.shape[:3]
    count = -(-n // size)
    labels = torch.arange(n, dtype=torch.int32, device=like.device) // size
    offsets = (torch.arange(count + 1, dtype=torch.int32, device=like.device) * size).clamp(max=n)
    return Blocks(labels.expand(b, h, n), None, offsets.expand(b, h, count + 1))


def cut_blocks(blocks: Blocks, own: int, size: int) -> tuple[Blocks, Tensor]:
    """The first `own` blocks in tiles of `size` tokens, a block's last one shorter, and each tile's block [b h tiles].

    There are n // size + own tiles whatever the blocks hold, so that nobody waits for a GPU to count them; the last may
    be empty. Other blocks follow them as they are. No token changes its place.
    """
    count = blocks.tokens // size + own
    starts, labels = blocks.offsets[..., :own].long(), blocks.labels.long()
    tiles_of = (blocks.sizes[..., :own].long() + size - 1) // size
    ends = tiles_of.cumsum(-1)
    first = ends - tiles_of
    tile = torch.arange(count, device=labels.device).expand(*labels.shape[:2], count).contiguous()
    owner = torch.searchsorted(ends, tile, right=True).clamp(max=own - 1)
    begin = starts.gather(-1, owner) + (tile - first.gather(-1, owner)) * size
    begin = begin.to(torch.int32).minimum(blocks.offsets[..., own : own + 1])
    offsets = torch.cat([begin, blocks.offsets[..., own:]], -1)
    order = blocks.permutation().long()
    place = torch.empty_like(order)
    place.scatter_(-1, order, torch.arange(blocks.tokens, device=order.device).expand_as(order))
    home = labels.clamp(max=own - 1)
    inside = first.gather(-1, home) + (place - starts.gather(-1, home)) // size
    cut = torch.where(labels < own, inside, labels - own + count)
    return Blocks(cut.to(torch.int32), blocks.order, offsets), owner.to(torch.int32)


@dataclass(frozen=True)
class Plan:
    """Which block pairs are computed.

    Query blocks: the method's own, then one block that sees every attendable key if there are text (or padding)
    queries. Key blocks: the method's own, then one block that every query sees if there is text, then one that no query
    sees if there is padding (`padding` is True then).
    """

    queries: Blocks
    """Blocks of queries."""
    keys: Blocks
    """Blocks of keys."""
    mask: Tensor
    """[b h qb kb] bool: which query block attends to which key block."""
    query_clusters: int
    """Query blocks of the method's own."""
    key_clusters: int
    """Key blocks of the method's own."""
    padding: bool = False
    """Whether the last key block is padding, which no query sees."""
    estimated_mass: Tensor | None = None
    """[b h] fp32: share of the estimated importance that is kept, mean over queries."""
    bias: Tensor | None = None
    """[b h qb kb] fp32: log weight of a skipped block's stand-in; None: log of its size."""
    memory: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Tensors that the planner wants back with `earlier`."""

    def density(self) -> Tensor:
        """[b h]: token pairs computed / token pairs dense attention computes (padding keys count in neither)."""
        rows, columns = self.queries.sizes, self.keys.sizes
        computed = (torch.where(self.mask, columns.unsqueeze(-2), 0).sum(-1) * rows).sum(-1)  # int64, exact
        attendable = columns[..., :-1] if self.padding else columns
        return (computed.double() / (rows.sum(-1) * attendable.sum(-1))).float()

    def compensable(self) -> Tensor:
        """[b h kb] bool: key blocks that may contribute through their centroid where they are skipped."""
        clusters = torch.arange(self.keys.count, device=self.mask.device) < self.key_clusters
        return clusters & (self.keys.sizes > 0)

    def fits(self, q: Tensor, k: Tensor) -> bool:
        """Whether the plan was built for tensors of these shapes on this device."""
        return (
            self.queries.labels.shape == q.shape[:3]
            and self.keys.labels.shape == k.shape[:3]
            and self.mask.device == q.device
        )

    def expect_fit(self, q: Tensor, k: Tensor) -> None:
        """Raises where the plan was built for other tensors."""
        if not self.fits(q, k):
            sides = f"queries {list(self.queries.labels.shape)} and keys {list(self.keys.labels.shape)}"
            raise ValueError(
                f"plan: expected one built for q {list(q.shape)} and k {list(k.shape)} on {q.device}, "
                f"got one for {sides} on {self.mask.device}; make another plan."
            )

    def moved(self, move: Callable[[Tensor], Tensor]) -> Plan:
        """The same plan on another device or of other heads: `move` brings each tensor there."""
        mass, bias = (None if x is None else move(x) for x in (self.estimated_mass, self.bias))
        queries, keys, mask = self.queries.moved(move), self.keys.moved(move), move(self.mask)
        memory = {name: move(x) for name, x in self.memory.items()}
        return dataclasses.replace(
            self, queries=queries, keys=keys, mask=mask, estimated_mass=mass, bias=bias, memory=memory
        )

    def to(self, device: torch.device | str) -> Plan:
        """The same plan on another device."""
        return self.moved(lambda x: x.to(device))

    def save(self, path: str | os.PathLike[str]) -> None:
        """One safetensors file, complete or absent."""
        from safetensors.torch import save

        expect_path("path", path)
        sides = {"queries": self.queries, "keys": self.keys}
        tensors = {f"{name}.{part}": getattr(side, part) for name, side in sides.items() for part in _PARTS}
        tensors |= {"mask": self.mask, "estimated_mass": self.estimated_mass, "bias": self.bias}
        counts = {name: str(int(getattr(self, name))) for name in ("query_clusters", "key_clusters", "padding")}
        given = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        write_atomically(Path(path), save(given, metadata={"format": _FORMAT, **counts}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Plan:
        """A plan that was saved; a file that holds anything else is refused."""
        from safetensors import SafetensorError, safe_open

        expect_path("path", path)
        expect_device("device", device)
        try:
            if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 (a pipe would block)
                raise OSError
            with safe_open(str(path), framework="pt", device=str(device)) as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except OSError:
            raise OSError(
                f"{path}: expected a plan written by Plan.save, got no file that can be read; check the path."
            ) from None
        except SafetensorError as error:
            raise ValueError(
                f"{path}: expected a plan written by Plan.save, got a file that does not parse ({error}); "
                "save it again."
            ) from None
        expect_choice(f"format of {path}", facts.get("format"), [_FORMAT])
        try:
            queries, keys = (
                Blocks(tensors[f"{side}.labels"], tensors.get(f"{side}.order"), tensors[f"{side}.offsets"])
                for side in ("queries", "keys")
            )
            counts = int(facts["query_clusters"]), int(facts["key_clusters"]), facts["padding"] == "1"
            plan = cls(queries, keys, tensors["mask"], *counts, tensors.get("estimated_mass"), tensors.get("bias"))
            wrong = _inconsistency(plan)
        except (KeyError, ValueError, RuntimeError, IndexError) as error:
            wrong = f"no whole plan ({type(error).__name__}: {error})"
        if wrong:
            raise ValueError(f"{path}: expected a plan written by Plan.save, got {wrong}; save it again.")
        return plan


_FORMAT = "parkattn.plan.1"
_PARTS = ("labels", "order", "offsets")


def expect_whole_plan(plan: Plan, q: Tensor, k: Tensor) -> None:
    """Raises where a planner's result is no plan for q and k, as far as that is known without waiting for a GPU."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan: expected a Plan from the planner, got {type(plan).__name__}; return Plan(queries, keys, mask, ...)."
        )
    wrong = None
    if not plan.fits(q, k):
        wrong = f"labels {list(plan.queries.labels.shape)} and {list(plan.keys.labels.shape)}"
    elif other := [x.dtype for x in _numbers(plan) if x.dtype != torch.int32]:
        wrong = f"numbers of {other[0]}"
    elif plan.mask.dtype != torch.bool:
        wrong = f"a mask of {plan.mask.dtype}"
    elif tuple(plan.mask.shape) != (*q.shape[:2], plan.queries.count, plan.keys.count):
        wrong = f"a mask {list(plan.mask.shape)} for {plan.queries.count} query blocks and {plan.keys.count} key blocks"
    if wrong is not None:
        raise ValueError(
            "plan: expected int32 labels of every token and a bool mask [batch, heads, query blocks, key blocks] for "
            f"q {list(q.shape)} and k {list(k.shape)}, got {wrong}; "
            "make blocks with arrange, and pass the mask, expanded to all heads, through Roles.extend."
        )


def _numbers(plan: Plan) -> list[Tensor]:
    """The tensors that kernels read as int32."""
    return [x for side in (plan.queries, plan.keys) for x in (side.labels, side.order, side.offsets) if x is not None]


def _inconsistency(plan: Plan) -> str | None:
    """Why a plan out of a file cannot be computed with; None: it can."""
    b, h, query_blocks, key_blocks = plan.mask.shape
    if any(x.dtype != torch.int32 for x in _numbers(plan)):
        return "numbers that are not int32"
    for name, side, count, own in (
        ("queries", plan.queries, query_blocks, plan.query_clusters),
        ("keys", plan.keys, key_blocks, plan.key_clusters),
    ):
        n = side.labels.shape[-1]
        if side.labels.shape != (b, h, n) or side.offsets.shape != (b, h, count + 1):
            return f"{name} of other shapes than its mask"
        if not 0 < own <= count:
            return f"{own} of {count} {name} blocks as the method's own"
        if not torch.equal(side.sizes, segment_sizes(side.labels, count)) or bool(
            (side.labels >= count).any() or (side.labels < 0).any()
        ):
            return f"{name} whose labels and offsets disagree"
        if not torch.equal(
            side.permutation().sort(-1).values.long(), torch.arange(n, device=side.labels.device).expand(b, h, n)
        ):
            return f"an order of {name} that is no permutation"
        if not torch.equal(side.labels.gather(-1, side.permutation().long()), side.labels.sort(-1).values):
            return f"an order of {name} that does not sort its labels"
    if plan.mask.dtype != torch.bool:
        return f"a mask of {plan.mask.dtype}"
    return None


@dataclass(frozen=True)
class Roles:
    """None stands for "every token" so that the common case costs nothing."""

    clustered_queries: Tensor | None  # [b n] bool
    clustered_keys: Tensor | None  # [b m] bool
    key_valid: Tensor | None  # [b m] bool
    has_text: bool

    def query_blocks(self, labels: Tensor, clusters: int) -> tuple[Tensor, int]:
        """Labels with every query that is not clustered in one last block, and the number of blocks."""
        return labels, clusters + (self.clustered_queries is not None)

    def key_blocks(self, labels: Tensor, clusters: int) -> tuple[Tensor, int]:
        """Labels with text keys in a block after the clusters, padding keys in the last, and the number of blocks."""
        padding = clusters + self.has_text
        if self.key_valid is None:
            return labels, padding
        return torch.where(self.key_valid.unsqueeze(1), labels, padding).to(labels.dtype), padding + 1

    def extend(self, mask: Tensor) -> Tensor:
        """[b h c_q c_k] over clusters -> [b h qb kb]: text rows and columns on, padding column off."""
        text = mask.new_ones(*mask.shape[:-1], int(self.has_text))
        padding = mask.new_zeros(*mask.shape[:-1], int(self.key_valid is not None))
        mask = torch.cat([mask, text, padding], -1)
        if self.clustered_queries is not None:
            row = torch.ones_like(mask[..., :1, :])
            if self.key_valid is not None:
                row[..., -1] = False
            mask = torch.cat([mask, row], -2)
        return mask


def assign_roles(q: Tensor, k: Tensor, text: slice | None, key_valid: Tensor | None) -> Roles:
    """text: the same span in q and k. In self-attention a padding key's query is padding too, outside the clusters."""
    b, n, m = q.shape[0], q.shape[2], k.shape[2]
    if text is not None:
        expect_text(text, n, m)
        text = None if text.start == text.stop else text
    if key_valid is not None:
        expect_key_valid(key_valid, k)
    if text is None and key_valid is None:
        return Roles(None, None, None, has_text=False)

    keys = torch.ones(b, m, dtype=torch.bool, device=k.device) if key_valid is None else aligned(key_valid)
    queries = keys.clone() if n == m else torch.ones(b, n, dtype=torch.bool, device=q.device)
    if text is not None:
        queries[:, text] = False
        keys[:, text] = False
    for name, clustered in (("q", queries), ("k", keys)):
        # text alone always leaves a token to cluster; reading values would wait for the GPU
        if key_valid is not None and not key_valid.is_cuda and not bool(clustered.any(dim=1).all()):
            raise ValueError(
                f"key_valid, text: expected at least one valid token of {name} outside the text, got none; "
                "use dense attention for this call."
            )
    only_clusters = n != m and text is None
    return Roles(None if only_clusters else queries, keys, key_valid, has_text=text is not None)
