"""What is known of each model: one row per transformer class, one per released size. No torch, no copied model code.

A class says where its video self-attention is, where text stands in the sequence and how its tokens lie on the grid; a
size says how large the released model is. Hosts, doctor and benchmarks read the same rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

Grid = tuple[int, int, int]  # (frames, height, width) in tokens


def grid_of_latents(arguments: Mapping[str, Any], config: Any) -> Grid | None:
    """hidden_states [b c f h w], cut into patches that the config names."""
    return _patched(arguments, config, channels=1)


def grid_of_frames_first(arguments: Mapping[str, Any], config: Any) -> Grid | None:
    """hidden_states [b f c h w]."""
    return _patched(arguments, config, channels=2)


def grid_of_channels_last(arguments: Mapping[str, Any], config: Any) -> Grid | None:
    """hidden_states [b f h w c]."""
    return _patched(arguments, config, channels=4)


def grid_by_name(arguments: Mapping[str, Any], config: Any) -> Grid | None:
    """hidden_states [b n c] are tokens already, and num_frames, height and width say how they lie."""
    named = [arguments.get(name) for name in ("num_frames", "height", "width")]
    frames, height, width = (int(size) if size is not None else 0 for size in named)
    return (frames, height, width) if frames and height and width else None


def grid_of_packed_rows(arguments: Mapping[str, Any], config: Any) -> Grid | None:
    """One sequence of text, frames that are given, audio and the video, which comes last; places (t, h, w) are an
    argument.

    It reads device values.
    """
    places, tags, times = _packed_rows(arguments)
    first = len(places)
    while first and tags[first - 1] == _VIDEO_TAG and times[first - 1] == times[-1]:
        first -= 1
    video = places[first:]
    frame = _run_of_equals([t for t, _, _ in video])
    width = _run_of_equals([h for _, h, _ in video[:frame]])
    if not video or len(video) % frame or frame % width:
        return None
    return len(video) // frame, frame // width, width


def references_of_packed_rows(arguments: Mapping[str, Any]) -> tuple[range, ...]:
    """Rows before the video that hold frames which are given, two or more in one place: references that are videos, or
    pictures next to each other. It reads device values.
    """
    places, tags, times = _packed_rows(arguments)
    found, first = [], 0
    for key, rows in itertools.groupby(zip(tags, times, places, strict=True), key=lambda row: row[:2]):
        frames = [place[0] for _, _, place in rows]
        last, frame = first + len(frames), _run_of_equals(frames)
        # words about a picture are tagged as video, one row for each time
        if key[0] == _VIDEO_TAG and last < len(tags) and 1 < frame < len(frames):
            found.append(range(first, last))
        first = last
    return tuple(found)


def no_references(arguments: Mapping[str, Any]) -> tuple[range, ...]:
    return ()


def grid_of_vision(arguments: Mapping[str, Any], config: Any) -> Grid | None:
    """vision_token_shapes, where there is one video."""
    shapes: list[Grid] = arguments.get("vision_token_shapes") or []
    return shapes[0] if len(shapes) == 1 else None


def grid_of_image_shapes(arguments: Mapping[str, Any], config: Any) -> Grid | None:
    """img_shapes: (1, height, width) of each image in the batch, or a list where images are given beside it."""
    shape = (arguments.get("img_shapes") or [None])[0]
    return tuple(shape) if isinstance(shape, tuple) else None


def grid_of_image_places(arguments: Mapping[str, Any], config: Any) -> Grid | None:
    """img_ids [b n 4] or [n 4]: (t, h, w, l) of each token; None where images are given beside it. It reads values."""
    places = arguments.get("img_ids")
    if places is None:
        return None
    rows = (places[0] if places.ndim == 3 else places).tolist()
    width = _run_of_equals([row[1] for row in rows])
    if not rows or len(rows) % width or any(row[0] != rows[0][0] for row in rows):
        return None
    return 1, len(rows) // width, width


def as_given(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    return arguments


def with_timestep_of_last_row(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """timestep holds those of all modalities, and the video comes last."""
    return {**arguments, "timestep": arguments["timestep"][arguments["timestep_indices"][-1]]}


def with_vision_by_usual_names(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    timestep, latents, words = (arguments[name] for name in ("vision_timesteps", "vision_tokens", "input_ids"))
    return {**arguments, "timestep": timestep, "hidden_states": latents[0], "encoder_hidden_states": words}


_VIDEO_TAG = 0  # of MiniMax-H3


def _run_of_equals(values: list[float]) -> int:
    return next((i for i, value in enumerate(values) if value != values[0]), len(values))


def _packed_rows(arguments: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Places, tags and times of the rows; empty where one of them is not given."""
    given = [arguments.get(name) for name in ("position_ids", "token_tags", "timestep_indices")]
    whole = all(rows is not None for rows in given)
    return (rows.tolist() if rows is not None and whole else [] for rows in given)


def _patched(arguments: Mapping[str, Any], config: Any, channels: int) -> Grid | None:
    shape = getattr(arguments.get("hidden_states"), "shape", ())
    patch = getattr(config, "patch_size", None)
    if isinstance(patch, int):
        patch = (getattr(config, "patch_size_t", None) or 1, patch, patch)
    if len(shape) != 5 or not isinstance(patch, (tuple, list)) or len(patch) != 3:
        return None
    sizes = [*shape[1:channels], *shape[channels + 1 :]]
    frames, height, width = (size // p for size, p in zip(sizes, patch, strict=True))
    return frames, height, width


@dataclass(frozen=True)
class ModelRow:
    """One transformer class.

    blocks: (attribute of the transformer that lists blocks, attribute of a block that is its video self-attention, dots
        allowed).
    released: the models that it is the class of.
    text: where text tokens stand in the attention sequence: "none", "last" or "first"; "packed": whatever is before the
        video that grid finds is treated as text, and stays exact: other modalities, and frames that are given.
        "keys": text is keys without queries, before the video's, and what follows the video that grid finds is treated
        as text too.
    preset: the name of the settings that methods know. borrows: they were made for another model, and nobody has tuned
        them for this one.
    grid: (arguments of forward, config) -> the grid of the video tokens, None where they do not say it.
    read_once: the argument that says the grid by device values; hosts ask once for each, because that waits for the
        GPU.
    references: arguments of forward -> tokens before the video that are videos too, which a host may leave sparse if it
        is asked to.
    image: it makes images, whose attention is long enough to gain at 4k alone; hosts want to be asked.
    named: arguments of forward -> the same, with timestep, hidden_states and encoder_... under these names, by which
        steps are counted.
    pair_mask: the stock processor expands its key padding to a [tokens, tokens] mask, which hosts keep from being
        built.
    sequence_parallel: the host has to bring a plan for splitting the sequence, because the model brings none.
    two_streams: in some layers the place of text holds a second stream of the same video, as long as the first.
    text_apart: where ranks hold a part of the sequence each, a rank has a share of what is before the video and one of
        the video.
    """

    blocks: tuple[tuple[str, str], ...]
    released: str
    text: Literal["none", "first", "last", "packed", "keys"] = "none"
    preset: str = "wan2.1-14b"
    borrows: bool = False
    grid: Callable[[Mapping[str, Any], Any], Grid | None] = grid_of_latents
    read_once: str = ""
    references: Callable[[Mapping[str, Any]], tuple[range, ...]] = no_references
    image: bool = False
    named: Callable[[Mapping[str, Any]], Mapping[str, Any]] = as_given
    pair_mask: bool = False
    sequence_parallel: bool = False
    two_streams: bool = False
    text_apart: bool = False

    def attentions(self, transformer: Any) -> list[Any]:
        """The attention modules; their place in this list is their layer number."""
        return [
            attrgetter(attention)(block) for blocks, attention in self.blocks for block in getattr(transformer, blocks)
        ]

    @property
    def by_grid(self) -> bool:
        """Only the grid of a forward says which tokens are the video."""
        return self.text in ("packed", "keys")

    def text_tokens(self, tokens: int, video_tokens: int) -> int:
        """How many of an attention call's tokens are text, where the stock processor was handed video_tokens."""
        text = 0 if self.text == "none" or self.by_grid else tokens - video_tokens
        return 0 if self.two_streams and text == video_tokens else text

    def all_blocks(self, transformer: Any) -> list[Any]:
        return [block for blocks, _ in self.blocks for block in getattr(transformer, blocks)]


_WAN = (("blocks", "attn1"),)
_ATTN1 = (("transformer_blocks", "attn1"),)
_DUAL = (("transformer_blocks", "attn"),)
_DUAL_AND_SINGLE = (*_DUAL, ("single_transformer_blocks", "attn"))
_LIKE_HUNYUAN: dict[str, Any] = {"text": "last", "preset": "hunyuanvideo", "borrows": True}

MODELS: dict[str, ModelRow] = {
    "WanTransformer3DModel": ModelRow(_WAN, "Wan2.1, Wan2.2 (T2V, I2V, TI2V)"),
    # control blocks come after the main ones, so that layer numbers mean the same as in Wan
    "WanVACETransformer3DModel": ModelRow((*_WAN, ("vace_blocks", "attn1")), "Wan VACE"),
    "SkyReelsV2Transformer3DModel": ModelRow(_WAN, "SkyReels-V2"),
    "WanAnimateTransformer3DModel": ModelRow(_WAN, "Wan-Animate", borrows=True),
    "ChronoEditTransformer3DModel": ModelRow(_WAN, "ChronoEdit", borrows=True),
    "AnyFlowTransformer3DModel": ModelRow(_WAN, "AnyFlow", borrows=True, grid=grid_of_frames_first),
    # history comes first in the sequence and is clustered with the video: it is video
    "HeliosTransformer3DModel": ModelRow(_WAN, "Helios", borrows=True),
    "HunyuanVideoTransformer3DModel": ModelRow(
        _DUAL_AND_SINGLE, "HunyuanVideo (T2V, I2V)", text="last", preset="hunyuanvideo", sequence_parallel=True
    ),
    "HunyuanVideo15Transformer3DModel": ModelRow(_DUAL, "HunyuanVideo-1.5", **_LIKE_HUNYUAN, pair_mask=True),
    "HunyuanVideoFramepackTransformer3DModel": ModelRow(_DUAL_AND_SINGLE, "HunyuanVideo-FramePack", **_LIKE_HUNYUAN),
    # its decoder blocks attend to their own stream and to the encoder's, both of the whole video
    "MotifVideoTransformer3DModel": ModelRow(_DUAL_AND_SINGLE, "Motif-Video", **_LIKE_HUNYUAN, two_streams=True),
    "MiniMaxH3Transformer3DModel": ModelRow(
        _DUAL, "MiniMax-H3", text="packed", preset="hunyuanvideo", borrows=True, grid=grid_of_packed_rows,
        read_once="position_ids", references=references_of_packed_rows, named=with_timestep_of_last_row,
    ),
    "CogVideoXTransformer3DModel": ModelRow(_ATTN1, "CogVideoX", text="first", borrows=True, grid=grid_of_frames_first),
    "ConsisIDTransformer3DModel": ModelRow(_ATTN1, "ConsisID", text="first", borrows=True, grid=grid_of_frames_first),
    "EasyAnimateTransformer3DModel": ModelRow(_ATTN1, "EasyAnimate", text="first", borrows=True),
    "AllegroTransformer3DModel": ModelRow(_ATTN1, "Allegro", borrows=True),
    "CosmosTransformer3DModel": ModelRow(_ATTN1, "Cosmos 1, 2, 2.5", borrows=True),
    "Cosmos3OmniTransformer": ModelRow(
        (("layers", "self_attn"),), "Cosmos 3", text="keys", borrows=True, grid=grid_of_vision,
        named=with_vision_by_usual_names,
    ),
    "LTXVideoTransformer3DModel": ModelRow(_ATTN1, "LTX-Video", borrows=True, grid=grid_by_name),
    # attn1 is the video's; audio, and both ways between them, have attention modules of their own
    "LTX2VideoTransformer3DModel": ModelRow(_ATTN1, "LTX-2, 2.3, 2.5", borrows=True, grid=grid_by_name),
    "MochiTransformer3DModel": ModelRow(_ATTN1, "Mochi", text="last", borrows=True),
    "Kandinsky5Transformer3DModel": ModelRow(
        (("visual_transformer_blocks", "self_attention"),), "Kandinsky 5", borrows=True, grid=grid_of_channels_last
    ),
    "Kandinsky6Transformer3DModel": ModelRow(
        (("visual_transformer_blocks", "video_dec_block.self_attention"),), "Kandinsky 6", borrows=True,
        grid=grid_of_channels_last,
    ),
    "QwenImageTransformer2DModel": ModelRow(
        _DUAL, "Qwen-Image", text="first", preset="hunyuanvideo", borrows=True, grid=grid_of_image_shapes, image=True
    ),
    # single blocks are handed text and image in one sequence
    "Flux2Transformer2DModel": ModelRow(
        _DUAL_AND_SINGLE, "FLUX.2", text="packed", preset="hunyuanvideo", borrows=True, grid=grid_of_image_places,
        read_once="img_ids", image=True, text_apart=True,
    ),
}  # fmt: skip

_LINEAR = "its attention is linear: no block of it can be left out"
_TRAINED = "its checkpoints are trained with a sparse mask of their own (a flex BlockMask)"
_IMAGES, _AUDIO = "it makes images", "it makes audio"
# classes of diffusers that have no row, and why; those named 1D and 2D, audio and images, need no entry
STAY_DENSE: dict[str, str] = {
    "AnyFlowFARTransformer3DModel": "it makes a video chunk by chunk, with a block-causal mask and a cache of keys",
    "Kandinsky6SRTransformer3DModel": _TRAINED,
    "WanAnimate2Transformer3DModel": _TRAINED,
    "SanaVideoTransformer3DModel": _LINEAR,
    "SanaWMTransformer3DModel": "most of its attention is linear, and the rest is no attention module",
    "SanaWMLTX2RefinerTransformer3DModel": "it refines a video chunk by chunk, with a cache of keys",
    "LatteTransformer3DModel": "it attends within a frame or along time, never over the whole video",
    "TransformerTemporalModel": "it attends along time, never over the whole video",
    "JoyImageEditTransformer3DModel": _IMAGES,
    "JoyImageEditPlusTransformer3DModel": _IMAGES,
    "PriorTransformer": _IMAGES,
    "LongCatAudioDiTTransformer": _AUDIO,
    "MiniMaxMusic3RVQDepthDecoder": _AUDIO,
    "StableAudio3DiTModel": _AUDIO,
    "StableAudioDiTModel": _AUDIO,
    "T5FilmDecoder": _AUDIO,
    "RFD4ProteinaTransformer": "it makes proteins",
}


def row_for(transformer: Any) -> ModelRow:
    """The row of the transformer's class, or of the class that it extends, as xDiT's do."""
    names = [cls.__name__ for cls in type(transformer).__mro__]
    for name in names:
        if name in MODELS:
            return MODELS[name]
    supported, why = ", ".join(sorted(MODELS)), next((STAY_DENSE[name] for name in names if name in STAY_DENSE), None)
    advice = "this model stays dense, or add its row to MODELS" if why is None else f"this model stays dense: {why}"
    raise ValueError(f"transformer: expected one of {supported}, got {names[0]}; {advice}.")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """One released model. layers: blocks with video self-attention; text: places for text; passes: forwards per step.

    frames, pixels: how many make one token in each direction, after the first frame, which makes one by itself.
    made_with: arguments by which the class makes it, where they are not its defaults. video: the paper's, in frames and
    pixels. key_blocks: of PARK in a long video, by the section "Implementations" of the paper.
    """

    transformer: str
    layers: int
    heads: int
    ffn: int
    text: int
    head_dim: int = 128
    cross_attention: bool = True
    passes: int = 2  # with classifier-free guidance
    frames: int = 4
    pixels: int = 16
    latent_pixels: int = 8
    video: tuple[int, int, int] = (81, 720, 1280)
    key_blocks: int = 512
    made_with: Mapping[str, int] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def latents(self, frames: int, height: int, width: int) -> Grid:
        return (frames - 1) // self.frames + 1, height // self.latent_pixels, width // self.latent_pixels

    def tokens(self, frames: int, height: int, width: int) -> int:
        return ((frames - 1) // self.frames + 1) * (height // self.pixels) * (width // self.pixels)


_WAN_14B = ModelSize(transformer="WanTransformer3DModel", layers=40, heads=40, ffn=13824, text=512)

SIZES: dict[str, ModelSize] = {
    "wan2.1-1.3b": ModelSize(
        transformer="WanTransformer3DModel", layers=30, heads=12, ffn=8960, text=512,
        made_with={"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    ),
    "wan2.1-14b": _WAN_14B,
    "wan2.2-14b": _WAN_14B,
    # 20 dual and 40 single blocks; guidance is distilled into the model; 125 frames are 32 latent frames
    "hunyuanvideo": ModelSize(
        transformer="HunyuanVideoTransformer3DModel", layers=60, heads=24, ffn=12288, text=256, cross_attention=False,
        passes=1, video=(125, 720, 1280), key_blocks=1024,
    ),
}  # fmt: skip
