"""docs/support.md from the record of the matrix: versions, GPUs, models, hosts, and what is refused and why."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))  # any Python will do: models.py needs no torch
from parkattn.models import MODELS as ROWS
from parkattn.models import ModelRow

COLUMNS = ("torch", "triton", "diffusers", "transformers", "accelerate", "typer", "rich", "av", "safetensors", "numpy")

# measured by `park bench`, whose records are in benchmarks/results; the matrix compiles for all of them
GPUS = (
    ("sm_90: H100, H200", "H200 measured (`gpu_*.jsonl`, `e2e.jsonl`), with Triton 3.6; H100 compiled only"),
    ("sm_80: A100, A800", "compiled only"),
    ("sm_89: L40S, RTX 4090", "compiled only"),
    ("sm_100: B200", "compiled only"),
    ("sm_120: RTX 5090, RTX PRO 6000", "compiled only"),
    (
        "older than sm_80; AMD, Intel, Apple",
        "not tried; the backend refuses what is older than sm_80, and the PyTorch definitions run anywhere",
    ),
)
SMALL = "in small sizes on a CPU, in its own pipeline"
ALONE = "in small sizes on a CPU, the transformer alone"  # images: tests have no pipelines of them
BLOCKS = f"two blocks at real size with random weights on a GPU (`gpu_models.jsonl`); {SMALL}"
HOW_FAR = {
    "WanTransformer3DModel": f"Wan2.1 in full size with random weights on a GPU; all {SMALL}",
    "HunyuanVideoTransformer3DModel": f"in full size with random weights on a GPU; T2V and I2V {SMALL}",
    "MiniMaxH3Transformer3DModel": f"one forward of its 50 blocks and {BLOCKS}",
    "LTX2VideoTransformer3DModel": f"2.5: {BLOCKS}",
    "Kandinsky5Transformer3DModel": f"Pro: {BLOCKS}",
    "CosmosTransformer3DModel": f"2.5: {BLOCKS}",
}
TRAINED = (
    "the small trained model in the package",
    "its own",
    "trained weights, on a CPU, in every environment above that has a video",
)
REFUSED = (
    ("torch < 2.8", "no `torch.Tag.cudagraph_unsafe`: the package does not import"),
    ("transformers < 5.0", "no `TokenizersBackend`, which the tokenizer of the package's model names"),
    ("diffusers < 0.38", "runs Python files that lie in a model folder, without asking"),
    ("diffusers without accelerate", "loads no model; the extras bring it"),
    ("typer < 0.16", "fails with the click that pip installs today"),
    (
        "triton < 3.6",
        "no Gluon as the Hopper kernels need it, so the plain kernels are taken, with that reason; built with 3.4 for "
        "sm_80, PAMA spills registers, and no GPU has run them; "
        "torch 2.8 and 2.9 come with such a triton, torch 2.10 with 3.6",
    ),
    (
        "torchvision of the index beside a CPU build of torch",
        "does not load, and no text encoder of transformers with it: `parklab[metrics]` wants both from one index",
    ),
    (
        "torch 2.8 with HunyuanVideo-1.5 or Mochi",
        "attention is sparse, but `torch.compile` refuses their blocks (`fuse=True`), and the summary says so",
    ),
    (
        "diffusers 0.38 with `enable_cache` after a first video",
        "stock code raises that no context is set; enable the cache before the first video",
    ),
    (
        "triton 3.9",
        "the kernels build; those of attention keep a few words on the stack outside the loops over keys, those of "
        "rounding more than with 3.7; no GPU has timed it",
    ),
    ("triton 3.6 with numpy >= 2.4", "the kernels run; only Triton's interpreter, which tests use, fails"),
)


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def models() -> list[tuple[str, ...]]:
    """One line for each class: its settings are those of a preset, made for it or borrowed."""

    def settings(row: ModelRow) -> str:
        return f"borrowed from {row.preset}" if row.borrows else row.preset

    def how_far(name: str, row: ModelRow) -> str:
        return HOW_FAR.get(name, ALONE if row.image else SMALL)

    return [*((row.released, settings(row), how_far(name, row)) for name, row in ROWS.items()), TRAINED]


def verdict(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "not run"
    failed = [name for name, result in entry["checks"].items() if not result["passed"]]
    return "failed: " + ", ".join(failed) if failed else "passed: " + ", ".join(entry["checks"])


def skipped_everywhere(record: dict[str, Any]) -> dict[str, str]:
    """Tests that a command collected and ran in no environment, with the reason; a pytest of its own is no skip."""
    results = [
        result
        for entry in record["environments"].values()
        for result in entry["checks"].values()
        if "skipped" in result
    ]
    return {
        name: why
        for result in results
        for name, why in result["skipped"].items()
        if "own pytest" not in why
        and all(name in other["skipped"] for other in results if other["command"] == result["command"])
    }


def support_page(record: dict[str, Any], environments: list[tuple[str, str]]) -> str:
    found = record["environments"]
    versions = [
        (name, *((found[name]["versions"].get(package, "") if name in found else "") for package in COLUMNS))
        for name, _ in environments
    ]
    outcomes = [(name, what, verdict(found.get(name))) for name, what in environments]
    extras = [(name or "(none)", verdict(entry)) for name, entry in sorted(record["extras"].items())]
    skipped = skipped_everywhere(record)
    silent = "\n".join(f"- `{name}`: {why}" for name, why in sorted(skipped.items())) or (
        "None." if found else "No environment has been recorded yet."
    )
    return f"""# What is supported, and what was tried

Written by `make matrix` (`tools/matrix.py`) from `benchmarks/results/matrix.json`. Each row is an environment of its
own, on Linux x86-64 without a GPU. "kernels compiled" means ahead of time for sm_80, 89, 90, 100 and 120, with
shared memory and spills checked.

## Versions

{table(("environment", *COLUMNS), versions)}

{table(("environment", "what it is", "outcome"), outcomes)}

Python 3.11 or newer; the environments above have the versions in the record. Tests that no environment ran:

{silent}

## Extras, each alone from the wheel (`make extras`)

{table(("extra", "outcome"), extras)}

## Refused, and why

{table(("version", "why"), REFUSED)}

## GPUs

{table(("GPU", "how far"), GPUS)}

## Models and hosts

{table(("model", "settings", "how far"), models())}

Hosts: diffusers pipelines, cache-dit and xDiT (xfuser), see their environments above.
[diffusers](integrate.md) says how each is used. ComfyUI 0.33.0 (783545f689a0af730065994b46b382ae24844c99) and 0.7.0
(acbf08cd60fade74b2e9e5009fa0dcad9538356b): their Wan and HunyuanVideo classes, tested on a CPU against the source
([ComfyUI](comfyui.md)); an install beside torch 2.9.1 is an environment above. LightX2V (f8aee98b5462cca8d7288888146ebd95592bf266): its Wan class, in the same way
([Hosts](hosts.md#lightx2v)). SGLang diffusion and vLLM-Omni: see their environments above and
[Hosts](hosts.md#sglang-diffusion).
"""
