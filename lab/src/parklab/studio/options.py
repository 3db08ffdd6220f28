"""Options that several commands have: each is said once, with its help."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

Model = Annotated[str | None, typer.Option(help="Diffusers folder or hub id; the shipped model when not given.")]
Preset = Annotated[
    str | None,
    typer.Option(
        "--profile",
        "--preset",
        help="paper, quality or fast, or a model's settings by name (park presets); quality when not given.",
    ),
]
Profiles = Annotated[
    str | None,
    typer.Option(
        "--profile",
        "--preset",
        help="As in park generate, quality when not given; several separated by commas, as in paper,fast: "
        "a video of each.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="One setting of the method, e.g. top_p=0.8; repeatable."),
]
Seed = Annotated[int, typer.Option(help="Seed of the noise.")]
Steps = Annotated[
    int | None, typer.Option(help="Denoising steps; the model's number (16 with the small model) when not given.")
]
Height = Annotated[int | None, typer.Option(help="Pixels, a multiple of 16; the model's (160) when not given.")]
Width = Annotated[int | None, typer.Option(help="Pixels, a multiple of 16; the model's (256) when not given.")]
Frames = Annotated[int | None, typer.Option(help="4n + 1 frames; the model's (33) when not given.")]
Guidance = Annotated[float | None, typer.Option(help="Guidance scale.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Offload = Annotated[str, typer.Option(help="none, model, group or sequential: keep weights in CPU memory.")]
Methods = Annotated[
    str | None,
    typer.Option(
        help="Names separated by commas, or all; dense is always among them. When not given: "
        "PARK and its ablations, with several profiles PARK alone."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


@dataclass(frozen=True, kw_only=True)
class VideoOptions:
    """Of every command that makes videos; fields of a `Request` by the same names. None: the model's own."""

    model: Model = None
    seed: Seed = 0
    steps: Steps = None
    height: Height = None
    width: Width = None
    frames: Frames = None
    fps: Annotated[int, typer.Option(help="Frames per second of the mp4.")] = 16
    guidance: Guidance = None
    negative: Annotated[str | None, typer.Option(help="What the video must not show.")] = None
    text_tokens: Annotated[
        int | None,
        typer.Option(help="Room for the prompt in tokens (max_sequence_length); a longer prompt is refused."),
    ] = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    offload: Offload = "none"
    quantise: Annotated[
        str | None,
        typer.Option(
            help="The transformer's weights: float8 or int8, rounded by torchao, or FILE.gguf in their place; "
            "needs pip install 'parklab\\[quant]'."
        ),
    ] = None
    image: Annotated[
        str | None,
        typer.Option(help="First picture of an image-to-video model: PNG, JPEG or WebP, cropped to the video's shape."),
    ] = None
    lora: Annotated[
        str | None,
        typer.Option(
            help="A LoRA of this model, .safetensors only, or few-steps: the shipped model's for --steps 4 to 8; "
            "needs pip install 'parklab\\[lora]'."
        ),
    ] = None


def with_video_options(command: Callable[..., None]) -> Callable[..., None]:
    """The fields of `video: VideoOptions`, an argument by keyword, as options of the command."""
    names = [part.name for part in fields(VideoOptions)]
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name == "video":
            parameters += [
                inspect.Parameter(part.name, parameter.kind, default=part.default, annotation=part.type)
                for part in fields(VideoOptions)
            ]
        else:
            parameters.append(parameter)

    @functools.wraps(command)
    def spread(*arguments: Any, **given: Any) -> None:
        video = VideoOptions(**{name: given.pop(name) for name in names if name in given})
        command(*arguments, **given, video=video)

    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return spread
