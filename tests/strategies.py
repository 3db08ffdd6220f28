"""Named inputs and hypothesis strategies: odd lengths, degenerate data, views, dtypes, text spans, padding."""

import os
from dataclasses import dataclass, replace

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

DIMS = (16, 64, 80, 128, 256)
LENGTHS = (1, 2, 3, 5, 7, 8, 11, 13, 17, 23, 29, 31)
LAYOUTS = ("contiguous", "transposed", "strided", "offset")
LABELLINGS = ("random", "giant", "gaps", "cyclic")

torch.set_num_threads(1)
# of kernels in the interpreter, a few each: `settings(reproducible, max_examples=8)`
reproducible = settings(
    deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None, phases=[Phase.generate]
)


def cases(count):
    """`count` generated cases, the same ones in every run unless PARK_EXPLORE is set."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize="PARK_EXPLORE" not in os.environ,
        suppress_health_check=[HealthCheck.too_slow],
    )


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(seed, *shape):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def clustered(seed, batch, heads, tokens, dim, *, draw, groups=4, spread=0.2):
    """Tokens scattered around a few centres, in shuffled order: `seed` makes the centres, `draw` the tokens."""
    centres = normal(seed, batch, heads, groups, dim)
    group = torch.randint(groups, (batch, heads, tokens, 1), generator=generator(draw))
    return centres.gather(2, group.expand(-1, -1, -1, dim)) + spread * normal(draw + 1, batch, heads, tokens, dim)


def gaussian_qkv(seed, batch, heads, queries, keys, dim):
    return normal(seed, batch, heads, queries, dim), *(normal(seed + i, batch, heads, keys, dim) for i in (1, 2))


def clustered_qkv(seed, batch, heads, queries, keys, dim):
    """Queries and keys share centres, so that attention is concentrated."""
    q = clustered(seed, batch, heads, queries, dim, draw=seed + 11)
    k = clustered(seed, batch, heads, keys, dim, draw=seed + 13)
    return 2 * q, k, normal(seed + 17, batch, heads, keys, dim)


def identical_keys(seed, batch, heads, queries, keys, dim):
    q, k, v = gaussian_qkv(seed, batch, heads, queries, keys, dim)
    return q, k[:, :, :1].expand_as(k).clone(), v


def zero_queries(seed, batch, heads, queries, keys, dim):
    q, k, v = gaussian_qkv(seed, batch, heads, queries, keys, dim)
    return torch.zeros_like(q), k, v


def far_outlier(seed, batch, heads, queries, keys, dim):
    """One key and one query far away from all the others: k-means makes one giant cluster."""
    q, k, v = gaussian_qkv(seed, batch, heads, queries, keys, dim)
    q[:, :, -1] *= 8
    k[:, :, -1] *= 8
    return q, k, v


def peaked(seed, batch, heads, queries, keys, dim):
    """Scores of about +-30: softmax without a maximum subtracted would lose everything."""
    q, k, v = gaussian_qkv(seed, batch, heads, queries, keys, dim)
    return 6 * q, 5 * k, v


KINDS = {
    "gaussian": gaussian_qkv, "clustered": clustered_qkv, "identical keys": identical_keys,
    "zero queries": zero_queries, "far outlier": far_outlier, "peaked": peaked,
}  # fmt: skip


def laid_out(x, layout):
    """The same [b h n d] values behind another memory layout."""
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, 7.0)], dim=-1).flatten(-2)[..., ::2]
    if layout == "offset":
        return torch.nn.functional.pad(x, (3, 2, 1, 1), value=-5.0)[:, :, 1:-1, 3:-2]
    return x.contiguous()


def labels_of(labelling, seed, batch, heads, tokens, count):
    """Block labels in [0, count): `giant` uses one block, `gaps` leaves about half of the blocks empty."""
    if labelling == "cyclic":
        one = torch.arange(tokens) % count
        return one[torch.randperm(tokens, generator=generator(seed))].expand(batch, heads, tokens).to(torch.int32)
    drawn = torch.randint(count, (batch, heads, tokens), generator=generator(seed))
    if labelling == "giant":
        drawn = torch.full_like(drawn, seed % count)
    if labelling == "gaps":
        drawn = drawn // 2 * 2
    return drawn.to(torch.int32)


@dataclass(frozen=True)
class Case:
    """One generated problem; everything follows from these few numbers, so a failure shrinks and prints well."""

    batch: int = 1
    heads: int = 1
    queries: int = 13
    keys: int = 13
    dim: int = 16
    kind: str = "gaussian"
    seed: int = 0
    dtype: torch.dtype = torch.float64
    layout: str = "contiguous"
    query_blocks: int = 3
    key_blocks: int = 4
    labelling: str = "random"
    scale: float | None = None

    def qkv(self):
        made = KINDS[self.kind](self.seed, self.batch, self.heads, self.queries, self.keys, self.dim)
        return tuple(laid_out(x.to(self.dtype), self.layout) for x in made)

    def labels(self):
        """(query labels, key labels)"""
        shape = self.batch, self.heads
        return (
            labels_of(self.labelling, self.seed + 3, *shape, self.queries, self.query_blocks),
            labels_of(self.labelling, self.seed + 4, *shape, self.keys, self.key_blocks),
        )

    def block_mask(self, key_labels):
        """A random mask in which every query block sees at least one key."""
        shape = self.batch, self.heads, self.query_blocks, self.key_blocks
        mask = torch.rand(shape, generator=generator(self.seed + 5)) < 0.4
        one = key_labels[:, :, :1, None].long().expand(-1, -1, self.query_blocks, -1)
        return mask.scatter(3, one, True)

    def key_padding(self):
        """key_valid [b m] with at least one valid key per row."""
        valid = torch.rand(self.batch, self.keys, generator=generator(self.seed + 6)) < 0.7
        valid[:, self.seed % self.keys] = True
        return valid

    def with_(self, **changes):
        return replace(self, **changes)


def attention_cases(**fixed):
    """Cases over all odd shapes; a keyword fixes a field to a value or to a strategy."""
    fields = {
        "batch": st.integers(1, 2), "heads": st.integers(1, 2), "queries": st.sampled_from(LENGTHS),
        "keys": st.sampled_from(LENGTHS), "dim": st.sampled_from(DIMS), "kind": st.sampled_from(sorted(KINDS)),
        "seed": st.integers(0, 2**31), "dtype": st.sampled_from([torch.float64, torch.float32]),
        "layout": st.sampled_from(LAYOUTS), "query_blocks": st.sampled_from([1, 2, 3, 5, 9]),
        "key_blocks": st.sampled_from([1, 2, 4, 7, 12]), "labelling": st.sampled_from(LABELLINGS),
        "scale": st.sampled_from([None, 0.125, 0.4]),
    }  # fmt: skip
    for name, value in fixed.items():
        fields[name] = value if isinstance(value, st.SearchStrategy) else st.just(value)
    return st.builds(Case, **fields)


def self_attention_cases(**fixed):
    """As many queries as keys and at least two, for text spans."""
    fixed = {"queries": st.sampled_from(LENGTHS[1:])} | fixed
    return attention_cases(**fixed).map(lambda case: case.with_(keys=case.queries))


def half_cases():
    return attention_cases(
        dtype=st.sampled_from([torch.bfloat16, torch.float16]),
        kind=st.sampled_from(["gaussian", "clustered", "far outlier", "peaked"]),
        queries=st.sampled_from([5, 17, 31, 61]),
        keys=st.sampled_from([7, 23, 67]),
    )


@st.composite
def text_spans(draw, tokens):
    """A non-empty span inside [0, tokens), at either end or in the middle, that leaves something to cluster."""
    start = draw(st.integers(0, tokens - 1))
    return slice(start, draw(st.integers(start + 1, tokens - (start == 0))))


@st.composite
def dyadic_rows(draw):
    """(importance [1 1 1 kb], sizes [1 1 kb]): weights are multiples of 1/64, so that every fp32 sum is exact."""
    count = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count).filter(any))
    filled = [j for j in range(count) if sizes[j] > 0]
    cuts = sorted(draw(st.lists(st.integers(0, 64), min_size=len(filled) - 1, max_size=len(filled) - 1)))
    shares = [b - a for a, b in zip([0, *cuts], [*cuts, 64], strict=True)]
    weights = torch.zeros(count)
    for j, share in zip(filled, shares, strict=True):
        weights[j] = share / 64
    return weights[None, None, None], torch.tensor(sizes, dtype=torch.int32)[None, None]
