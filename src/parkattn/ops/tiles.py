"""Tile choices of the retrieval kernels (PAMA, k-means, sort, permutation): pure functions of (head_dim, dtype, arch).

Every choice fits 99 KB of shared memory (sm_86, sm_89, sm_120) unless it is for sm_90 alone.  "Measured" means one
H200, bf16, d = 128, medians in milliseconds within one run; everything else is what compiles without spills.
"""

import torch

from .triton_versions import why_no_gluon

# formatted by hand: a table
# fmt: off

HEAD_DIMS = (64, 128, 256)


def arch_of(x: torch.Tensor) -> int:
    """90 for sm_90; 0 on the CPU, where the interpreter runs."""
    if x.device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(x.device)
    return major * 10 + minor


def check_rows(x: torch.Tensor, name: str) -> None:
    """The kernels read whole rows: the last dimension must be dense and as wide as one of HEAD_DIMS."""
    if x.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"{name}: head dim must be one of {HEAD_DIMS}, got {x.shape[-1]}; use backend='reference'")
    if x.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension must have stride 1, got {x.stride(-1)}; call .contiguous()")


def expect_dense_rows(**tensors: torch.Tensor) -> None:
    """The same of what users pass in."""
    for name, x in tensors.items():
        if x.stride(-1) != 1:
            raise ValueError(
                f"{name}: expected a last dimension of stride 1 with backend='triton', got stride {x.stride(-1)}; "
                f"call {name}.contiguous(), or use backend='reference'."
            )


def permute_tile(head_dim: int, dtype: torch.dtype, arch: int) -> dict:
    """Measured at (40, 75,600): 0.42 to 0.45."""
    return {"ROWS": 4096 // head_dim, "num_warps": 4, "num_stages": 1}


def rounding_tile(head_dim: int) -> dict:
    """Rounding to INT8; the matrix of signs is made once for TURNS * ROWS rows.  Not timed."""
    return {"ROWS": 16384 // head_dim, "TURNS": 8, "num_warps": 8, "num_stages": 3}


def key_range_tile(head_dim: int) -> dict:
    """The range of keys beside their mean: three sums for every element of a tile.  Not timed."""
    return {"ROWS": 4096 // head_dim, "TURNS": 16, "num_warps": 4, "num_stages": 4}


def residual_tile(head_dim: int) -> dict:
    """Merging parts: 16 elements a thread.  Not timed."""
    return {"ROWS": 4096 // head_dim, "num_warps": 8, "num_stages": 1}


def low_rank_tile(head_dim: int) -> dict:
    """Measured at (40, 75,600), rank 12: 0.42; 64 rows, 4 steps 0.43; 64 rows, 1 step 0.48; 128 rows, 8 warps 0.64. 
    The bytes alone take 0.38; a sum of products of vectors 0.62 to 0.82.
    """
    return {"ROWS": max(16, 4096 // head_dim), "STEPS": 16, "num_warps": 4, "num_stages": 3}


def product_width(rank: int) -> int:
    """The least inner dimension of a matrix product that holds a rank."""
    return max(16, 1 << (rank - 1).bit_length())


def assign_tile(head_dim: int, dtype: torch.dtype, arch: int) -> dict:
    """Measured at (40, 75,600) with 128 / 512 / 1,024 clusters: 0.40 / 1.05 / 1.95.  Next best: 128x128, 8 warps 0.45 /
    1.10 / 2.09; 256x64, 8 warps 0.48 / 1.10 / 2.08.  Keeping the best of every column until the end (no reduction per
    chunk) is slower: 0.60 / 1.33 / 2.33.
    """
    if head_dim == 256:
        return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2}
    return {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 2}


def segment_tile(head_dim: int, dtype: torch.dtype, arch: int) -> dict:
    """Measured at (40, 75,600), 512 segments: 32 rows 0.30, 64 rows 0.30, 16 rows 0.32; 8 warps 0.41.
     The bytes alone take 0.19.
    """
    return {"ROWS": 4096 // head_dim, "num_warps": 4, "num_stages": 1}


def segment_splits(segments: int, arch: int) -> int:
    """Programs per segment: enough in all to fill a GPU, and to keep one long segment from being the tail.

    Measured at (40, 75,600) with 128 uneven segments: 4 programs each 0.28, one each 0.66.
    """
    return next(s for s in (1, 2, 4, 8, 16) if s * segments >= 16_384 or s == (16 if arch else 2))


def sort_tile(arch: int) -> dict:
    """Measured at (40, 75,600), 512 labels: 1,024 tokens, 4 warps 0.23; 8 warps 0.24; 512 tokens 0.23; 2,048 tokens
    0.33 to 0.41.
    """
    # the interpreter takes 2 s to sort 1,024 keys
    return {"TOKENS": 1024 if arch else 64, "num_warps": 4, "num_stages": 1}


def metric_tile(head_dim: int, dtype: torch.dtype, arch: int) -> dict:
    """Measured at (40, 75,600): 0.31; 4 warps and 4 stages 0.31; BK 128 0.48."""
    return {"BK": 64, "num_warps": 8, "num_stages": 2 if head_dim == 256 else 3}


def transform_tile(head_dim: int, dtype: torch.dtype, arch: int) -> dict:
    """Measured at (40, 75,600): 0.39; 16 steps 0.40, with 2 stages 0.42; 128 rows, 8 warps and 3 stages 0.42.
     The bytes alone take 0.37.
    """
    return {"BM": 32 if head_dim == 256 else 64, "STEPS": 8, "num_warps": 4,
            "num_stages": 1 if head_dim == 256 else 4 if arch == 90 else 2}


def has_gluon_kernel(head_dim: int, arch: int) -> bool:
    """Whether Full-K PAMA runs as the Hopper kernel."""
    return arch == 90 and head_dim == 128 and why_no_gluon() is None


def full_key_tile(head_dim: int, dtype: torch.dtype, arch: int, width: int) -> dict:
    """Full-K PAMA; width: key blocks rounded up to a power of two.

    sm_90, d = 128: the Gluon kernel, as many 32 KB stages as fit beside the probabilities.  Measured at (24, 115,200,
    1,024) 2.60 ms, at (40, 75,600, 1,024) 3.07, at (40, 75,600, 512) 1.56; earlier, each call waited for, there 2.02 (3
    stages 2.26). Elsewhere plain Triton: BM * width fp32 logits live in the registers of 8 warps.
    """
    if has_gluon_kernel(head_dim, arch):
        return {"GLUON": True, "stages": 2 if width == 1024 else 4}
    return {"BM": 16 if width >= 512 else 32, "BD": 32 if width == 1024 or (width == 256 and arch < 90) else 64,
            "num_warps": 8, "num_stages": 1 if width == 1024 else 2}


def two_pass_tiles(head_dim: int, dtype: torch.dtype, arch: int) -> tuple[dict, dict]:
    """Two-pass PAMA: (pass 1, pass 2).  Measured at (24, 115,200, 1,024): 3.79; pass 1 with 128x128 3.71, both with 3
    stages 4.05, pass 1 with 4 warps too 4.16; earlier, pass 2 with 64x128 and with 128x64 were 10 and 23 % slower. 
    Both passes in one persistent kernel: 6.5.
    """
    if head_dim == 256:
        return ({"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2},
                {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2})
    return ({"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 2},
            {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2})


def prefers_full_key(head_dim: int, dtype: torch.dtype, arch: int, width: int) -> bool:
    """Measured on sm_90 at d = 128: Full-K wins up to 1,024 (2.8 against 3.8). Elsewhere: short rows only."""
    return width <= (1024 if has_gluon_kernel(head_dim, arch) else 256)
