"""What was asked of a video: every option, checked, filled in from the model, and the command that repeats it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parkattn.checks import LARGEST_COUNT, did_you_mean, shown
from parkattn.hosts.diffusers import expect_layers
from parkattn.methods import METHODS, configured_method
from parkattn.models import row_for
from parkattn.settings import LARGEST_SEED, Clusters, MethodConfig
from parklab.extras import package
from parklab.files import sha256_of
from parklab.research import studied_entry
from parklab.sprites import grammar
from parklab.studio import checkpoints
from parklab.studio.lora import judge_lora
from parklab.studio.placement import expect_together, judge_quantise
from parklab.studio.video import picture_hash

# what the shipped model was trained for, in the size of the demo; other models bring their own defaults
SHIPPED = {"steps": 16, "height": 160, "width": 256, "frames": 33, "guidance": 1.0, "text_tokens": 32}
# schedulers are trained on 1000 steps; encoders read up to 1000 tokens;
# players show up to a few hundred frames a second
MOST = {"seed": LARGEST_SEED, "steps": 1000, "text_tokens": 4096, "fps": 1000}
LARGEST_GUIDANCE = 1000.0
# fields of a request that are no option of a command
UNASKED = ("prompt", "changes", "weights", "image_hash", "lora_hash", "quantise_hash", "file_hashes")
# in records of before there were any
UNSAID = dict.fromkeys(("image", "image_hash", "lora", "lora_hash", "quantise", "quantise_hash"))
# ours: what a pipeline calls it, and may not have
OPTIONAL = {"guidance": "guidance_scale", "text_tokens": "max_sequence_length", "negative": "negative_prompt"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked: equal requests give equal videos on one machine. None: the model's own value."""

    prompt: str
    model: str | None = None
    weights: str = ""  # fingerprint of the folder, filled in by `prepare`
    method: str = "park"
    preset: str | None = None
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)  # single fields of its config
    seed: int = 0
    steps: int | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    fps: int = 16
    guidance: float | None = None
    negative: str | None = None
    text_tokens: int | None = None  # the pipeline's max_sequence_length
    device: str = "auto"
    dtype: str = "auto"
    offload: str = "none"
    image: str | None = None  # first picture of an image-to-video run
    image_hash: str | None = None  # filled in by `prepare`, as is the next hash
    lora: str | None = None
    lora_hash: str | None = None
    quantise: str | None = None  # form of the transformer's weights: float8, int8, or a GGUF file in their place
    quantise_hash: str | None = None
    file_hashes: dict[str, str] = dataclasses.field(default_factory=dict)  # of the files that changes name

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "file_hashes" or value}


def prepare(request: Request) -> tuple[Request, Path]:
    """The request with everything filled in that can be known without loading the model, and the model's folder."""
    folder = checkpoints.find_model(request.model)
    expect_settings(request)
    device = checkpoints.choose_device(request.device)
    filled: dict[str, Any] = {
        "device": device,
        "dtype": checkpoints.choose_dtype(request.dtype, device),
        "weights": checkpoints.fingerprint(folder),
    }
    filled["prompt"] = understood(request.prompt, folder)
    if request.image is not None:
        filled["image_hash"] = picture_hash(request.image)
    if request.lora is not None:
        package("peft", "LoRA files", "lora")
        filled["lora_hash"] = judge_lora(request.lora)
    expect_together(request.offload, request.quantise)
    if request.quantise is not None:
        filled["quantise_hash"] = judge_quantise(request.quantise, device, folder)
    if checkpoints.is_shipped(folder):
        filled |= {name: value for name, value in SHIPPED.items() if getattr(request, name) is None}
    return dataclasses.replace(request, **filled, file_hashes=named_files(request.changes)), folder


def expect_settings(request: Request) -> None:
    """What needs no file of the model to be judged is judged before its gigabytes are read."""
    for name in ("steps", "fps", "frames", "height", "width", "text_tokens", "seed"):
        value, least = getattr(request, name), 0 if name == "seed" else 1
        if value is not None and value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}; raise it.")
        if value is not None and value > MOST.get(name, LARGEST_COUNT):
            raise ValueError(f"{name}: expected at most {MOST.get(name, LARGEST_COUNT)}, got {shown(value)}; lower it.")
    if request.guidance is not None:
        expect_guidance(request.guidance)
    if request.preset is not None:
        expect_profile(request.method, request.preset)
    configured_method(studied_entry(request.method), request.preset, **request.changes)


def named_files(changes: Mapping[str, Any]) -> dict[str, str]:
    """Hashes of the files that settings name: a request asks for their content, not for their names alone."""
    texts = {name: Path(value) for name, value in changes.items() if isinstance(value, str)}
    known = {name for entry in METHODS.values() for name in entry.config.FILES} if texts else set()
    found = {name: sha256_of(path) for name, path in texts.items() if name in known}
    return {name: sha256[:16] for name, sha256 in found.items() if sha256 is not None}


def expect_guidance(value: float) -> None:
    if not 0 <= value <= LARGEST_GUIDANCE:  # not so for NaN
        raise ValueError(
            f"guidance: expected a number from 0 to {LARGEST_GUIDANCE:g}, got {value}; 1 is none, 3 to 6 are usual."
        )


def expect_profile(method: str, name: str) -> None:
    """name: what --profile (or --preset, another word for it) was given."""
    config = studied_entry(method).config
    known = [*config.PROFILES, *sorted(config.PRESETS)]
    if not known:
        raise ValueError(
            f"profile: expected none, since {method} has no profiles, got {shown(name)}; leave out --profile."
        )
    if name not in known:
        advice = did_you_mean(name, known, "pick one of these.")
        raise ValueError(f"profile: expected one of {', '.join(known)}, got {shown(name)}; {advice}")


def understood(prompt: str, folder: Path) -> str:
    """The prompt as the model gets it: in the words of its grammar for the shipped one, as it is for others."""
    if not prompt.strip():
        raise ValueError("prompt: expected some words, got an empty one; describe the video.")
    return grammar.parse(prompt).sentence if checkpoints.is_shipped(folder) else prompt


def fit_to_pipeline(request: Request, pipe: Any) -> Request:
    """Sizes and steps that were left to the pipeline, and a check that the model can make them."""
    accepted = inspect.signature(pipe.__call__).parameters
    if "num_frames" not in accepted:
        raise ValueError(
            f"model: expected a video pipeline, got {type(pipe).__name__}; pass a Wan, HunyuanVideo or similar model."
        )
    takes = "image" in accepted
    if (
        takes
        and request.image is None
        and (accepted["image"].default is inspect.Parameter.empty or "ImageToVideo" in type(pipe).__name__)
    ):
        raise ValueError(
            f"image: expected a picture, which {type(pipe).__name__} begins with, got none; pass --image FILE."
        )
    if request.image is not None and not takes:
        raise ValueError(
            f"image: expected none, since {type(pipe).__name__} takes no picture, got {request.image!r}; "
            "leave out --image."
        )
    names = {"steps": "num_inference_steps", "height": "height", "width": "width", "frames": "num_frames"}
    filled = {ours: accepted[theirs].default for ours, theirs in names.items() if getattr(request, ours) is None}
    absent = [name for name, value in filled.items() if not isinstance(value, int)]
    if absent:
        raise ValueError(
            f"{absent[0]}: expected a value, since {type(pipe).__name__} has none of its own, got nothing; "
            f"pass --{absent[0]}."
        )
    # a record must not depend on what another version of diffusers would take
    for ours, theirs in OPTIONAL.items():
        if theirs not in accepted and getattr(request, ours) is not None:
            option = ours.replace("_", "-")
            raise ValueError(
                f"{ours}: expected none, since {type(pipe).__name__} takes no {theirs}, got "
                f"{getattr(request, ours)!r}; leave out --{option}."
            )
        if getattr(request, ours) is None and theirs in accepted and isinstance(accepted[theirs].default, (int, float)):
            filled[ours] = accepted[theirs].default
    request = dataclasses.replace(request, **filled)
    if request.negative is not None and request.guidance is not None and request.guidance <= 1:
        raise ValueError(
            f"negative: expected guidance above 1 beside it, got {request.guidance}; "
            "pass --guidance 3, or leave it out."
        )
    assert request.frames and request.height and request.width
    checkpoints.expect_size(pipe, request.frames, request.height, request.width)
    if request.text_tokens is not None:
        for name, text in (("prompt", request.prompt), ("negative", request.negative or "")):
            checkpoints.expect_whole_text(pipe, name, text, request.text_tokens)
    return request


def for_method(request: Request, method: str) -> Request:
    """The request for one of several methods: a preset and settings that only others have are left out, and dense stays
    the reference.
    """
    config = studied_entry(method).config
    known = {field.name for field in dataclasses.fields(config)} if method != "dense" else set()
    preset = request.preset if request.preset in (*config.PROFILES, *config.PRESETS) else None
    changes = {name: value for name, value in request.changes.items() if name in known}
    hashes = {name: value for name, value in request.file_hashes.items() if name in changes}
    return dataclasses.replace(request, method=method, preset=preset, changes=changes, file_hashes=hashes)


def expect_settings_used(request: Request, methods: Sequence[str]) -> None:
    """Every setting must be one of some method's: a misspelt one would be left out of all."""
    used = {name for method in methods for name in for_method(request, method).changes}
    configured = [
        method for method in methods if method != "dense" and dataclasses.fields(studied_entry(method).config)
    ]
    for name, value in request.changes.items():
        if name not in used and configured:
            configured_method(studied_entry(configured[0]), **{name: value})  # says which names there are
            raise AssertionError(name)


def config_for(request: Request, pipe: Any) -> MethodConfig:
    """The profile or preset asked for, or the model's; a short video keeps the paper's tokens per block, not its block
    counts.
    """
    model = row_for(pipe.transformer).preset
    entry = studied_entry(request.method)
    config = entry.config.named(request.preset, model=model) if request.preset else entry.config.for_model(model)
    config = config.replace(**request.changes)
    shipped = request.model is None or checkpoints.is_shipped(Path(request.model))
    if shipped and "density_profile" in config.to_dict().keys() - request.changes.keys():
        config = config.replace(density_profile="sprites")  # the model in the box has been measured
    expect_layers(pipe, config)
    if not isinstance(config, Clusters):
        return config
    tokens = tokens_of(request, pipe)
    # every number written out that `counts` would choose for a field
    names = ("query_clusters", "key_clusters", "query_multiple", "key_multiple")
    chosen = dict(zip(names, config.counts(tokens, tokens), strict=True))
    fields = {field.name for field in dataclasses.fields(config)}
    return config.replace(**{name: value for name, value in chosen.items() if name in fields})


def tokens_of(request: Request, pipe: Any) -> int:
    """Of a request that was fitted to the pipeline."""
    assert request.frames and request.height and request.width
    return checkpoints.token_count(pipe, request.frames, request.height, request.width)


def repeat_command(request: Request, video: Path) -> str:
    # the model's own settings; left out, the command would take another profile
    paper = {"preset": "paper"} if request.method == "park" and request.preset is None else {}
    asked = {name: value for name, value in request.to_dict().items() if value is not None}
    words = ["park", "generate", request.prompt, "--out", str(video)]
    return shlex.join([*words, *option_words(asked | paper, request.changes)])


def option_words(fields: Mapping[str, Any], changes: Mapping[str, Any], *left_out: str) -> Iterator[str]:
    """The options of a command that ask for these fields of a request."""
    for name, value in fields.items():
        if name not in (*UNASKED, *left_out) and value is not None:
            yield from (f"--{name.replace('_', '-')}", str(value))
    for name, value in changes.items():
        yield from ("--set", f"{name}={json.dumps(value)}")
