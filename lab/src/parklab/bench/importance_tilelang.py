"""PAMA in TileLang, both algorithms as the paper's Appendix D has them: an optional extra (parklab[tilelang]) to be
measured beside the Triton kernels.

One program per query block and head (per query tile where log-sum-exps are made), no list of work and no partial rows:
what the Triton kernels add to the paper is not here.
Sizes are compiled in except heads, tokens and query blocks.  TileLang compiles with nvcc: set CUDA_HOME where it is not
found.
"""

import functools
import importlib
import math

import torch

# formatted by hand: one argument per line would double the length of every kernel
# fmt: off

HEAD_DIMS = (64, 128)
FULL_KEY_LIMIT = 1024


def _tilelang():
    try:
        return importlib.import_module("tilelang"), importlib.import_module("tilelang.language")
    except ModuleNotFoundError as missing:
        if missing.name != "tilelang":
            raise
        raise ModuleNotFoundError(
            "PAMA in TileLang: the package tilelang is not installed; "
            "pip install 'parklab[tilelang]', or use parkattn.ops.importance.triton."
        ) from None


def full_key_program(T, dim, width, dtype, *, BM, BN, threads, stages):
    """Full-K: every product once; a query tile's exponentials [BM, width] wait in shared memory, in fp16, for their
    row's sum.

    The paper keeps them in registers, where on Hopper 64 rows (the least a warpgroup's GEMM takes) of 1,024 do not fit.
    """
    heads, n, blocks, edges, keys = (T.dynamic(name) for name in ("heads", "n", "blocks", "edges", "keys"))

    @T.prim_func
    def full_key(q: T.Tensor((heads, n, dim), dtype), offsets: T.Tensor((heads, edges), "int32"),
                 centroids: T.Tensor((heads, keys, dim), dtype), log_sizes: T.Tensor((heads, width), "float32"),
                 out: T.Tensor((heads, blocks, width), "float32"), scale: T.float32):
        with T.Kernel(blocks, heads, threads=threads) as (u, h):
            q_s = T.alloc_shared((BM, dim), dtype)
            c_s = T.alloc_shared((BN, dim), dtype)
            e_s = T.alloc_shared((BM, width + 8), "float16")  # 8 more, so that rows start in different banks
            tops = T.alloc_shared((width // BN, BM), "float32")
            bias_s, total = T.alloc_shared((width,), "float32"), T.alloc_shared((width,), "float32")
            s = T.alloc_fragment((BM, BN), "float32")
            part = T.alloc_fragment((BN,), "float32")
            top, before, z, more = (T.alloc_fragment((BM,), "float32") for _ in range(4))
            first = offsets[h, u]
            length = offsets[h, u + 1] - first
            T.copy(log_sizes[h, 0:width], bias_s)
            T.fill(total, 0)
            for t in T.serial(T.ceildiv(length, BM)):
                # TileLang 0.1.15 puts none here: the loading warps would overwrite q_s under the products of tile t - 1
                T.sync_threads()
                T.copy(q[h, first + t * BM : first + (t + 1) * BM, 0:dim], q_s)
                T.fill(top, -1e30)
                T.fill(z, 0)
                for j in T.Pipelined(width // BN, num_stages=stages):
                    T.copy(centroids[h, j * BN : (j + 1) * BN, 0:dim], c_s)
                    T.clear(s)
                    T.gemm(q_s, c_s, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for i, v in T.Parallel(BM, BN):
                        s[i, v] = s[i, v] * scale + bias_s[j * BN + v]
                    T.copy(top, before)
                    T.reduce_max(s, top, dim=1, clear=False)
                    for i, v in T.Parallel(BM, BN):
                        s[i, v] = T.exp2(s[i, v] - top[i])
                    T.reduce_sum(s, more, dim=1, clear=True)
                    for i in T.Parallel(BM):
                        z[i] = z[i] * T.exp2(before[i] - top[i]) + more[i]
                    T.copy(s, e_s[0:BM, j * BN : (j + 1) * BN])
                    T.copy(top, tops[j, 0:BM])
                for i in T.Parallel(BM):
                    z[i] = T.if_then_else((t * BM + i < length) & (z[i] > 0), 1.0 / z[i], 0.0)
                for j in T.serial(width // BN):
                    for i in T.Parallel(BM):
                        more[i] = T.exp2(tops[j, i] - top[i]) * z[i]
                    for i, v in T.Parallel(BM, BN):
                        s[i, v] = e_s[i, j * BN + v] * more[i]
                    T.reduce_sum(s, part, dim=0, clear=True, batch=8)
                    for v in T.Parallel(BN):
                        total[j * BN + v] = total[j * BN + v] + part[v]
            for v in T.Parallel(width):
                total[v] = total[v] / T.max(length, 1)
            T.copy(total, out[h, u, 0:width])

    return full_key


def two_pass_program(T, dim, width, dtype, *, BM, BN, threads, stages):
    """Two-pass: tiles [BM, BN]; first the log-sum-exp of every query, then the logits again and column sums in shared
    memory.

    A launch for each pass: of two pipelined loops in one launch TileLang 0.1.15 gives only the first a loading
    warpgroup.
    """
    heads, n, blocks, edges, keys = (T.dynamic(name) for name in ("heads", "n", "blocks", "edges", "keys"))

    @T.prim_func
    def two_pass(q: T.Tensor((heads, n, dim), dtype), offsets: T.Tensor((heads, edges), "int32"),
                 centroids: T.Tensor((heads, keys, dim), dtype), log_sizes: T.Tensor((heads, width), "float32"),
                 lse: T.Tensor((heads, n), "float32"), out: T.Tensor((heads, blocks, width), "float32"),
                 scale: T.float32):
        with T.Kernel(T.ceildiv(n, BM), heads, threads=threads) as (u, h):
            T.disable_warp_group_reg_alloc()  # it would leave room for one program per multiprocessor
            q_s, c_s = T.alloc_shared((BM, dim), dtype), T.alloc_shared((BN, dim), dtype)
            bias_s = T.alloc_shared((width,), "float32")
            s = T.alloc_fragment((BM, BN), "float32")
            top, before, z, more = (T.alloc_fragment((BM,), "float32") for _ in range(4))
            T.copy(log_sizes[h, 0:width], bias_s)
            T.copy(q[h, u * BM : (u + 1) * BM, 0:dim], q_s)
            T.fill(top, -1e30)
            T.fill(z, 0)
            # again as in full_key, which also keeps the exponentials: TileLang compiles a prim_func from its own text
            for j in T.Pipelined(width // BN, num_stages=stages):
                T.copy(centroids[h, j * BN : (j + 1) * BN, 0:dim], c_s)
                T.clear(s)
                T.gemm(q_s, c_s, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, v in T.Parallel(BM, BN):
                    s[i, v] = s[i, v] * scale + bias_s[j * BN + v]
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i, v in T.Parallel(BM, BN):
                    s[i, v] = T.exp2(s[i, v] - top[i])
                T.reduce_sum(s, more, dim=1, clear=True)
                for i in T.Parallel(BM):
                    z[i] = z[i] * T.exp2(before[i] - top[i]) + more[i]
            for i in T.Parallel(BM):
                # a query without keys gives no weight
                top[i] = T.if_then_else(z[i] > 0, top[i] + T.log2(z[i]), T.infinity("float32"))
            T.copy(top, lse[h, u * BM : (u + 1) * BM])
        with T.Kernel(blocks, heads, threads=threads) as (u, h):
            q_s, c_s = T.alloc_shared((BM, dim), dtype), T.alloc_shared((BN, dim), dtype)
            bias_s, total = T.alloc_shared((width,), "float32"), T.alloc_shared((width,), "float32")
            s = T.alloc_fragment((BM, BN), "float32")
            part = T.alloc_fragment((BN,), "float32")
            top = T.alloc_fragment((BM,), "float32")
            first = offsets[h, u]
            length = offsets[h, u + 1] - first
            T.copy(log_sizes[h, 0:width], bias_s)
            T.fill(total, 0)
            for t in T.serial(T.ceildiv(length, BM)):
                T.sync_threads()  # as in full_key
                T.copy(q[h, first + t * BM : first + (t + 1) * BM, 0:dim], q_s)
                for i in T.Parallel(BM):
                    # rows past the block get no weight
                    top[i] = T.if_then_else(t * BM + i < length, lse[h, first + t * BM + i], T.infinity("float32"))
                for j in T.Pipelined(width // BN, num_stages=stages):
                    T.copy(centroids[h, j * BN : (j + 1) * BN, 0:dim], c_s)
                    T.clear(s)
                    T.gemm(q_s, c_s, s, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    for i, v in T.Parallel(BM, BN):
                        s[i, v] = T.exp2(s[i, v] * scale + bias_s[j * BN + v] - top[i])
                    T.reduce_sum(s, part, dim=0, clear=True, batch=8)
                    for v in T.Parallel(BN):
                        total[j * BN + v] = total[j * BN + v] + part[v]
            for v in T.Parallel(width):
                total[v] = total[v] / T.max(length, 1)
            T.copy(total, out[h, u, 0:width])

    return two_pass


# one H200, (24, 115,200, 1,024), ms.  Full-K: 6.71; one stage 6.67, 64 keys 7.55.  Two-pass: 5.97; 3 stages 8.72, 64
# keys 5.66, 256 keys 7.85.
TILES = {
    "full-k": {"BM": 64, "BN": 128, "threads": 128, "stages": 2},
    "two-pass": {"BM": 64, "BN": 128, "threads": 128, "stages": 2},
}


@functools.cache
def build(kind: str, dim: int, width: int, dtype: str, **tile):
    """The compiled kernel; the first call takes seconds, later processes find it in TileLang's cache."""
    tilelang, T = _tilelang()
    program = {"full-k": full_key_program, "two-pass": two_pass_program}[kind]
    return tilelang.compile(program(T, dim, width, dtype, **(tile or TILES[kind])))


def _run(kind, q, offsets, centroids, sizes, scale, tile):
    _tilelang()
    if q.shape[-1] not in HEAD_DIMS or q.numel() >= 2**31:
        raise ValueError("q: expected a head dim of 64 or 128 and fewer than 2^31 elements in TileLang, got "
                         f"{list(q.shape)}; use parkattn.ops.importance.triton")
    bh, d = q.shape[0], q.shape[-1]
    key_blocks, width = centroids.shape[1], -(-centroids.shape[1] // 128) * 128
    log_sizes = torch.nn.functional.pad(sizes.float().log2(), (0, width - key_blocks), value=-math.inf)
    out = torch.empty(bh, offsets.shape[1] - 1, width, device=q.device, dtype=torch.float32)
    scale = (1 / math.sqrt(d) if scale is None else scale) * math.log2(math.e)
    scratch = () if kind == "full-k" else (torch.empty(q.shape[:2], device=q.device, dtype=torch.float32),)
    build(kind, d, width, str(q.dtype)[6:], **(tile or {}))(q, offsets, centroids, log_sizes, *scratch, out, scale)
    return out[..., :key_blocks]


def pama_full_key(q, offsets, centroids, sizes, *, scale=None, tile=None) -> torch.Tensor:
    """q [bh n d] in block order, offsets int32 [bh qb+1], centroids [bh kb d] in q's dtype, sizes int32 [bh kb] -> fp32
    [bh qb kb]; kb <= 1024.
    """
    if centroids.shape[1] > FULL_KEY_LIMIT:
        raise ValueError(f"centroids: Full-K holds at most {FULL_KEY_LIMIT} key blocks, got {centroids.shape[1]}; "
                         "use pama_two_pass")
    return _run("full-k", q, offsets, centroids, sizes, scale, tile)


def pama_two_pass(q, offsets, centroids, sizes, *, scale=None, tile=None) -> torch.Tensor:
    """The same function for any number of key blocks."""
    return _run("two-pass", q, offsets, centroids, sizes, scale, tile)
