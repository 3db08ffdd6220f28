"""Captures: q, k and, where asked for, v of chosen attention calls of any pipeline, in one safetensors file of bounded
size.

Tensors are named CALL.q, CALL.k, CALL.v and CALL.key_valid with CALL = TRANSFORMER/LAYER/STEP/BRANCH, followed by
/VIDEO from the second video of a batch on where a model attends to one after the other. The metadata hold what else a
method may know about each call, under one name: safetensors writes several in no fixed order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parkattn.checks import (
    expect_attention_inputs,
    expect_call_site,
    expect_finite,
    expect_indices,
    expect_key_valid,
    expect_text,
    shown,
)
from parkattn.dense import Dense
from parkattn.hosts.diffusers.session import transformers_of
from parkattn.models import MODELS, row_for
from parkattn.settings import MethodConfig
from parkattn.site import AttentionOutput, CallSite
from parklab.files import expect_file
from parklab.research import ResearchConfig
from parklab.studio.generate import generate_frames
from parklab.studio.model_folder import judge_index
from parklab.studio.request import Request

FORMAT = "parkattn.capture.2"
ABOUT = "parkattn"  # the one name of the metadata
MODEL = "model_preset"  # in what a file says about itself: whose settings suit the model
CALIBRATION_LAYERS = 6
COUNTS = {"query_clusters", "key_clusters"}
LIMIT = 2**31  # bytes of tensors
LARGEST_FILE = 2**36  # bytes that are read
LARGEST_SCALE = 1e3  # of scores: models divide by the root of the head dimension


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which calls are kept; None: all of them."""

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    branches: tuple[str, ...] | None = None
    first_branch: bool = False  # of each step only: guidance adds no layer and no head
    values: bool = False
    limit: int = LIMIT
    # where the limit would be passed: as many heads as fit, evenly spread, instead of an error
    thin_heads: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "steps"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, expect_indices(name, getattr(self, name)))
        if self.limit < 1:
            raise ValueError(f"limit: expected at least 1 byte, got {self.limit}; raise it.")

    def takes(self, site: CallSite) -> bool:
        asked = ((self.layers, site.layer), (self.steps, site.step), (self.branches, site.branch))
        return all(wanted is None or value in wanted for wanted, value in asked)


@dataclass(frozen=True)
class CapturedCall:
    """One call: q [b h n d], k and v [b h m d], and its site, whose values are v."""

    q: Tensor
    k: Tensor
    site: CallSite

    @property
    def name(self) -> str:
        site = self.site
        return f"{site.transformer}/{site.layer}/{site.step}/{site.branch}" + (f"/{site.video}" if site.video else "")

    def to(self, device: str) -> CapturedCall:
        valid, values = (None if x is None else x.to(device) for x in (self.site.key_valid, self.site.values))
        site = dataclasses.replace(self.site, key_valid=valid, values=values)
        return CapturedCall(self.q.to(device), self.k.to(device), site)

    def video_tokens(self) -> tuple[Tensor, Tensor]:
        """q and k without text and padding, which no method clusters; padding may differ along the batch, so b must be
        1 then.
        """
        q, k, site = self.q, self.k, self.site
        keep = torch.ones(k.shape[2], dtype=torch.bool, device=k.device)
        if site.text is not None:
            keep[site.text] = False
        if site.key_valid is not None:
            if site.key_valid.shape[0] != 1:
                raise ValueError(
                    "capture: expected a batch of 1 beside padding, got more; capture one prompt at a time."
                )
            keep &= site.key_valid[0]
        return (q[:, :, keep] if q.shape[2] == k.shape[2] else q), k[:, :, keep]


class Capture(Dense):
    """Dense attention that keeps chosen calls on the CPU. layers, steps: how many the run has, to foresee the size."""

    def __init__(self, selection: Selection, layers: int, steps: int) -> None:
        self.selection = selection
        self.expected = len(_within(selection.layers, layers, "layers")) * len(_within(selection.steps, steps, "steps"))
        self.kept: dict[str, CapturedCall] = {}
        self.bytes = 0
        self._heads: Tensor | None = None
        self._first: dict[tuple[str, int], str] = {}  # transformer and step: the branch that came first

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, site: CallSite) -> AttentionOutput:
        first = self._first.setdefault((site.transformer, site.step), site.branch)
        if self.selection.takes(site) and (site.branch == first or not self.selection.first_branch):
            heads = self._choose_heads(q, k, v)
            parts = [
                x[:, heads].detach().to("cpu", copy=True) for x in (q, k, *((v,) if self.selection.values else ()))
            ]
            self.bytes += sum(x.nbytes for x in parts)
            if self.bytes > self.selection.limit:
                self._refuse(self.bytes)
            valid = None if site.key_valid is None else site.key_valid.detach().to("cpu", copy=True)
            plain = dataclasses.replace(
                site, dense=None, key_valid=valid, values=parts[2] if self.selection.values else None
            )
            found = CapturedCall(parts[0], parts[1], plain)
            self.kept[found.name] = found
        return super().__call__(q, k, v, site)

    def _choose_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same heads in every call, chosen at the first so that all calls of one branch fit."""
        if self._heads is None:
            chosen = _within(self.selection.heads, q.shape[1], "heads")
            sides = (q, k, v) if self.selection.values else (q, k)
            branches = len(self.selection.branches or ("",))
            one = self.expected * branches * sum(x[:, :1].nbytes for x in sides)
            room = self.selection.limit // max(1, one)
            if room < len(chosen):
                if not self.selection.thin_heads or room == 0:
                    self._refuse(one * len(chosen))
                chosen = [chosen[i * len(chosen) // room] for i in range(room)]
            self._heads = torch.tensor(chosen)
        return self._heads.to(q.device)

    def _refuse(self, size: int) -> None:
        limit = self.selection.limit / 2**20
        raise ValueError(
            f"limit: expected captures of at most {limit:.1f} MiB, got {size / 2**20:.1f} MiB or more; "
            "choose fewer layers, heads or steps."
        )


def _within(asked: Sequence[int] | None, count: int, name: str) -> list[int]:
    chosen = list(range(count)) if asked is None else list(asked)
    if not chosen or max(chosen) >= count:
        raise ValueError(f"{name}: expected some of 0 to {count - 1}, got {chosen}; choose others.")
    return chosen


def layer_count(pipe: Any) -> int:
    return max(len(row_for(transformer).attentions(transformer)) for transformer in transformers_of(pipe).values())


def spread_layers(pipe: Any) -> list[int]:
    """Those that a density is calibrated on."""
    count = layer_count(pipe)
    chosen = min(count, CALIBRATION_LAYERS)
    return [round(i * (count - 1) / max(1, chosen - 1)) for i in range(chosen)]


def capture_calls(pipe: Any, request: Request, selection: Selection) -> list[CapturedCall]:
    """The chosen calls of a dense run of a request that fits the pipeline; the run ends with the last of them."""
    assert request.steps
    capture = Capture(selection, layer_count(pipe), request.steps)
    last = None if selection.steps is None else max(selection.steps)
    generate_frames(pipe, request, MethodConfig(), method=capture, recall_rows=0, decode=False, last_step=last)
    return list(capture.kept.values())


def pack_captures(calls: Sequence[CapturedCall], about: dict[str, Any]) -> bytes:
    """The file's bytes. about: plain JSON on where the calls come from."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    sites: dict[str, Any] = {}
    for call in calls:
        parts = {"q": call.q, "k": call.k, "v": call.site.values, "key_valid": call.site.key_valid}
        tensors |= {f"{call.name}.{part}": tensor.contiguous() for part, tensor in parts.items() if tensor is not None}
        site = call.site
        sites[call.name] = {
            "transformer": site.transformer, "layer": site.layer, "step": site.step, "branch": site.branch,
            "total_steps": site.total_steps, "video": site.video, "paired": site.paired,
            "grid": site.grid, "text": None if site.text is None else [site.text.start, site.text.stop],
            "scale": site.scale, "noise_levels": site.noise_levels,
        }  # fmt: skip
    if not sites:
        raise ValueError(
            "captures: expected at least one call, got none; choose layers, steps and branches that the run has."
        )
    return save(tensors, metadata={ABOUT: json.dumps({"format": FORMAT, "sites": sites, "about": about})})


def read_captures(path: Path) -> tuple[list[CapturedCall], dict[str, Any]]:
    """The calls of a file and where they come from; a file that holds anything else is refused."""
    with _opened(path) as (file, facts):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return [_call(path, name, site, tensors) for name, site in facts["sites"].items()], dict(facts["about"])


def read_about(path: Path) -> dict[str, Any]:
    """Where the calls of a file come from, without reading them."""
    with _opened(path) as (_, facts):
        return dict(facts["about"])


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The open file and its metadata; what goes wrong while it is open is told in one line."""
    from safetensors import SafetensorError, safe_open

    kind = "a file written by park capture"
    expect_file("captures", path, kind, most=LARGEST_FILE)
    wanted = f"captures: expected {kind}, got {path}"
    try:
        with safe_open(str(path), framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get(ABOUT, "{}"))
            if facts.get("format") != FORMAT:
                raise ValueError(f"{wanted} of format {shown(facts.get('format'))}; capture again.")
            if not (facts["sites"] and isinstance(facts["sites"], dict) and isinstance(facts["about"], dict)):
                raise TypeError
            yield file, facts
    except OSError:
        raise ValueError(f"{wanted}, which cannot be read; check the path.") from None
    except (SafetensorError, KeyError, TypeError, AttributeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{wanted}, which is not whole ({type(error).__name__}); capture again.") from None


def _call(path: Path, name: str, facts: dict[str, Any], tensors: dict[str, Tensor]) -> CapturedCall:
    text, grid, levels = facts["text"], facts["grid"], facts["noise_levels"]
    plain = {part: facts[part] for part in ("layer", "step", "total_steps", "branch", "transformer", "scale")}
    plain |= {part: facts[part] for part in ("video", "paired") if part in facts}  # older files have neither
    site = CallSite(
        **plain,
        grid=None if grid is None else tuple(grid),
        text=None if text is None else slice(*text),
        noise_levels=None if levels is None else tuple(levels),
        key_valid=tensors.get(f"{name}.key_valid"),
        values=tensors.get(f"{name}.v"),
    )
    call = CapturedCall(tensors[f"{name}.q"], tensors[f"{name}.k"], site)
    values = [] if site.values is None else [site.values]
    try:
        expect_call_site(site)
        expect_attention_inputs(call.q, call.k, *values)
        for part, tensor in zip("qkv", (call.q, call.k, *values), strict=False):
            expect_finite(part, tensor)
        if site.key_valid is not None:
            expect_key_valid(site.key_valid, call.k)
        if site.text is not None:
            expect_text(site.text, call.q.shape[2], call.k.shape[2])
        if not all(isinstance(level, (int, float)) for level in site.noise_levels or ()):
            raise TypeError("noise_levels: expected numbers, got others; capture again.")
        if site.scale is not None and not 0 < site.scale <= LARGEST_SCALE:
            raise ValueError(
                f"scale: expected a positive number up to {LARGEST_SCALE}, got {site.scale}; capture again."
            )
    except (TypeError, ValueError) as error:
        raise ValueError(f"captures: expected whole calls in {path}, got {shown(name)} with {error}") from None
    return call


# Numbers of blocks that retrieval is measured with: those that are asked for, or those of the model that attends ------


def preset_in(folder: Path) -> str | None:
    """The preset of the model in a diffusers folder, by its transformer's class."""
    row = MODELS.get(judge_index(folder)["transformer"][1])
    return None if row is None else row.preset


def preset_of_capture(path: Path, changes: Mapping[str, Any]) -> str | None:
    """As the capture says it; None where numbers of blocks are asked for and nothing else depends on it."""
    named: str | None = read_about(path).get(MODEL)
    if named is None and not changes.keys() >= COUNTS:
        wanted = f"model: expected the model of {path.name}, which does not say it, got none"
        raise ValueError(f"{wanted}; pass --model FOLDER, or --set query_clusters=N --set key_clusters=N.")
    return named


def blocks_for(preset: str | None, changes: Mapping[str, Any]) -> ResearchConfig:
    """What measuring retrieval depends on, and no other setting of the preset: equal measurements have equal cells."""
    known = {field.name for field in dataclasses.fields(ResearchConfig)}
    counts = ResearchConfig.for_model(preset).long_video_blocks
    return ResearchConfig(long_video_blocks=counts).replace(
        **{name: value for name, value in changes.items() if name in known}
    )


def settings_of_plans(config: ResearchConfig) -> dict[str, Any]:
    """What a cell about retrieval asks for: a plan by itself depends neither on the precision of attention nor on what
    the steps of a run do; anchors by error were a setting once.
    """
    left_out = ("precision", "tolerance", "refresh_falls", "sage_dense", "noise_tau", "exact_anchors")
    asked = {name: value for name, value in config.to_dict().items() if name not in left_out}
    return {**asked, "anchor_error": None}
