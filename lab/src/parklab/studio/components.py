"""One component of a pipeline: its class, of its library's public namespace, and weights that all came from its
files.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from parklab.extras import package
from parklab.studio.model_files import LARGEST_CONFIG, read_json
from parklab.studio.model_folder import Component
from parklab.studio.placement import GGUF, from_gguf, rounding

# what a component must be, in the library's own words
BASES = {
    "diffusers": ("ModelMixin", "SchedulerMixin", "BaseGuidance"),
    "transformers": (
        "PreTrainedModel", "PreTrainedTokenizerBase", "ImageProcessingMixin", "FeatureExtractionMixin",
        "ProcessorMixin",
    ),
    "ltx2": ("ModelMixin",),
}  # fmt: skip
# parts that a pipeline brings, by the name that model_index.json gives its module
HOMES = {"ltx2": "diffusers.pipelines.ltx2"}
NAMED = 3  # tensors that an error names
OBSOLETE = ("position_ids", "rotary_emb.inv_freq")  # constants that older releases saved as weights


def public_class(library: str, name: str, *bases: str) -> Any:
    """A class of the library's own public namespace."""
    module = package(HOMES.get(library, library), "video pipelines")
    whole = package(module.__name__.partition(".")[0], "video pipelines")
    found = getattr(module, name, None)
    kinds = tuple(getattr(whole, base) for base in bases if hasattr(whole, base))
    if not (
        isinstance(found, type) and found.__module__.startswith(f"{module.__name__}.") and issubclass(found, kinds)
    ):
        raise ValueError(
            f"model: expected a class that {whole.__name__} {whole.__version__} has, got {name}; "
            f"install a newer {whole.__name__}."
        )
    return found


def component_class(part: Component) -> Any:
    return public_class(part.role.library, part.class_name, *BASES[part.role.library])


def expect_kinds(part: Component, cls: Any) -> None:
    """No text and no object in a config where diffusers' class takes numbers: it would fail in the middle of a run."""
    if part.role.library != "diffusers" or part.role.config is None:
        return
    config = read_json(part.folder / part.role.config, LARGEST_CONFIG, "it was there")
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        value, kind = config.get(name), str(parameter.annotation).lower()
        if parameter.annotation is inspect.Parameter.empty:
            continue
        if (isinstance(value, str) and not re.search("str|literal|any", kind)) or (
            isinstance(value, dict) and not re.search("dict|any", kind)
        ):
            raise ValueError(
                f"model: expected {name} in {part.folder / part.role.config} as {cls.__name__} takes it, got "
                f"{value!r}; correct it."
            )


def load_weights(part: Component, dtype: torch.dtype, quantise: tuple[str, str | None] | None) -> Any:
    """A model whose weights all came from its files: loaders fill what is missing with random numbers, in silence."""
    cls = component_class(part)
    rounded: dict[str, Any] = {}
    if quantise is not None and part.name.startswith("transformer"):
        scheme, known = quantise
        if scheme.endswith(GGUF):
            return from_gguf(cls, part.folder, scheme, known, dtype)
        rounded = rounding(scheme)
    with _no_larger_than(part):
        # newer releases call it dtype and warn; the older name works in all of them
        model, found = cls.from_pretrained(
            part.folder,
            torch_dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **rounded,
        )
    unexpected = [name for name in found["unexpected_keys"] if not name.endswith(OBSOLETE)]
    for what, names in (
        ("missing", found["missing_keys"]),
        ("unexpected", unexpected),
        ("of another shape", found["mismatched_keys"]),
    ):
        _expect_none(part, what, [str(name) for name in names])
    values = model.state_dict()
    _expect_none(part, "missing", [name for name, value in values.items() if value.is_meta])
    # aminmax passes NaN on and makes no copy of the weights
    plain = {name: value for name, value in values.items() if type(value) is torch.Tensor}
    floats = {name: value for name, value in plain.items() if value.is_floating_point() and value.numel()}
    _expect_none(part, "with NaN or Inf", [name for name, value in floats.items() if not _finite(value)])
    return model.eval()


def _finite(value: torch.Tensor) -> bool:
    least, largest = torch.aminmax(value)
    return bool(torch.isfinite(least) & torch.isfinite(largest))


def _expect_none(part: Component, what: str, names: list[str]) -> None:
    if names:
        named = ", ".join(sorted(names)[:NAMED]) + (", ..." if len(names) > NAMED else "")
        raise ValueError(
            f"model: expected the weights of {part.class_name} in {part.folder}, got {len(names)} {what} ({named}); "
            "download or save it again."
        )


@contextlib.contextmanager
def _no_larger_than(part: Component) -> Iterator[None]:
    """A config that describes a model far larger than its weights is refused while it is built,
    before it fills memory.
    """
    # loaders register a parameter when they build it and again when they fill it
    left = {
        "parameters": 8 * len(part.tensors) + 1000,
        "weights": 8 * sum(map(math.prod, part.tensors.values())) + 10**7,
    }

    def count(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is None:
            return
        left["parameters"] -= 1
        left["weights"] -= parameter.numel()
        if min(left.values()) < 0:
            raise ValueError(
                f"model: expected a config of the weights beside it in {part.folder}, got one of a far larger model; "
                "download it again."
            )

    handle = torch.nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
