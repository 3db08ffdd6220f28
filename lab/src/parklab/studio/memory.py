"""How much GPU memory a model takes, by arithmetic: weights, activations of one forward, plans, the decoder.

A bound, not a measurement. Activations are counted in copies of the hidden states [n d] in bf16 that are alive at once
in the widest place of a block; how many is taken from the peaks of whole models (`park bench e2e`), rounded up.
"""

from __future__ import annotations

from typing import Any

from parkattn.models import ModelSize
from parkattn.park import ParkConfig
from parklab.studio.gain import GPUS

# GB as they are sold; that these are GiB leaves 7 % for the driver and for gaps between tensors
CARDS = (12, 16, 24, 32, 48, 80, 141)
# parameters in billions: of one transformer, of the text encoders, of the autoencoder; how many transformers there are
PARAMETERS: dict[str, tuple[float, float, float, int]] = {
    "wan2.1-1.3b": (1.419, 5.68, 0.127, 1),
    "wan2.1-14b": (14.289, 5.68, 0.127, 1),
    "wan2.2-14b": (14.289, 5.68, 0.127, 2),
    "hunyuanvideo": (12.821, 7.63, 0.246, 1),
}
FLOAT8_SHARE = 0.53  # of bf16: linears of blocks in one byte, a scale per row, the rest as it was
OUTSIDE_BLOCKS = 0.05  # of the weights at most: embeddings and the last projection
BLOCKS_AT_ONCE = 2  # under group offload: the one that runs, and the next one on its way
# copies of [n d] beside one of [n ffn]: in attention, in the feed-forward part; joint blocks hold both at once
STOCK = {"attention": 11.4, "feed_forward": 4.7, "joint": 10.4, "ffn": 2.0}
COMPILED = {"attention": 8.8, "feed_forward": 3.7, "joint": 7.4, "ffn": 1.0}
# Wan's decoder works on one latent frame at a time: bytes per pixel of a frame, and of the whole video
DECODER_BYTES, VIDEO_BYTES = 11_600, 12


def memory(
    model: str, size: ModelSize, *, frames: int, height: int, width: int, profile: str = ParkConfig.DEFAULT_PROFILE
) -> dict[str, Any] | None:
    """Of one video of this size, in GB of 1e9 bytes; None for a model whose parameters are not in the table.

    profile: whose state the peaks of whole videos hold.
    """
    if model not in PARAMETERS:
        return None
    billions, encoders, autoencoder, transformers = PARAMETERS[model]
    n = size.tokens(frames, height, width)
    weights = {"bfloat16": 2 * billions, "float8": 2 * billions * FLOAT8_SHARE}
    kinds = {"stock": STOCK, "compiled": COMPILED}
    found: dict[str, Any] = {
        "weights_gb": weights,
        "transformers": transformers,
        "activations_gb": {kind: activations_gb(size, n, copies) for kind, copies in kinds.items()},
        "plans_gb": {name: state_gb(ParkConfig.profile(name, model=model), size, n) for name in ParkConfig.PROFILES},
        "text_encoders_gb": 2 * encoders,
        "autoencoder_gb": 2 * autoencoder,
        "decode_gb": decode_gb(size, frames, height, width),
    }
    # what `park bench e2e` measures, with random weights: nothing else is on the GPU there
    found["transformer_forward_gb"] = weights["bfloat16"] + found["activations_gb"]["stock"]
    found["profile"] = profile
    found["peaks_gb"] = peaks_gb(size, found)
    found["fits"] = {str(card): [way for way, peak in found["peaks_gb"].items() if peak <= card] for card in CARDS}
    return found


def on_gpu(found: dict[str, Any] | None, gpu: str | None) -> dict[str, Any] | None:
    """What `memory` found, with the ways that fit this GPU, for each size in which it is sold."""
    if found is None or gpu is None:
        return found
    card = GPUS[gpu]
    ways = [way for way in found["peaks_gb"] if card.float8 or not way.startswith("float8")]
    fits = {str(size): [way for way in ways if found["peaks_gb"][way] <= size] for size in card.memory}
    return found | {"on_gpu": {"gpu": gpu, "float8": card.float8, "fits": fits}}


def activations_gb(size: ModelSize, tokens: int, copies: dict[str, float]) -> float:
    n, wide = (tokens if size.cross_attention else tokens + size.text), copies["ffn"] * size.ffn / size.width
    parts = (copies["attention"], copies["feed_forward"] + wide) if size.cross_attention else (copies["joint"] + wide,)
    return max(parts) * 2 * n * size.width / 1e9


def state_gb(config: ParkConfig, size: ModelSize, tokens: int) -> float:
    """What `PlanStore` holds for all layers and passes: labels, a bit per pair of blocks, the residual.

    Passes may share their plans; residuals they do not.
    """
    n = tokens if size.cross_attention else tokens + size.text
    queries, keys = config.counts(tokens, tokens)[:2]
    tiles = 0 if config.query_tile is None else n // config.query_tile + queries
    # a block for text and one for padding
    queries, keys = (tiles or queries) + 2, keys + 2
    labels = n * sum(1 if blocks <= 256 else 2 for blocks in (queries, keys))
    plan = labels + queries * keys / 8 + 4 * tiles
    rank = config.rank_for(tokens)
    residual = rank * (n + 4 + 4 * size.head_dim)
    plans = 1 if config.share_branches else size.passes
    return size.layers * size.heads * (plans * plan + size.passes * residual) / 1e9


def decode_gb(size: ModelSize, frames: int, height: int, width: int) -> float | None:
    """None where no decoder of this kind was measured: HunyuanVideo's takes all frames at once without tiling."""
    if size.transformer != "WanTransformer3DModel":
        return None
    return height * width * (DECODER_BYTES + VIDEO_BYTES * frames) / 1e9


def peaks_gb(size: ModelSize, parts: dict[str, Any]) -> dict[str, float]:
    """Largest use over a whole video. Offloaded: one model, or two blocks, at a time on the GPU."""
    run = max(parts["activations_gb"].values()) + parts["plans_gb"][parts["profile"]]
    decoding = parts["decode_gb"] or 0.0
    found = {}
    for kind, weights in parts["weights_gb"].items():
        resident = parts["transformers"] * weights + parts["text_encoders_gb"] + parts["autoencoder_gb"]
        found[kind] = resident + max(run, decoding)
        others = max(parts["text_encoders_gb"], parts["autoencoder_gb"] + decoding)
        found[f"{kind}, model offload"] = max(others, weights + run)
        blocks = weights * (OUTSIDE_BLOCKS + BLOCKS_AT_ONCE / size.layers)
        found[f"{kind}, group offload"] = max(parts["autoencoder_gb"] + decoding, blocks + run)
    return found
