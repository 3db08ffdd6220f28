"""Every method computes what it computed before the laboratory moved out of the library: two source trees, the same
bits.

Hashes of one machine mean nothing on another, so the tree of that commit is taken out of git and run beside this one.
Plans and outputs are hashed through the public names alone, by this file as a program:

PYTHONPATH=src python tests/test_golden.py reference video
TRITON_INTERPRET=1 PYTHONPATH=src python tests/test_golden.py triton
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from interpreted import hasten_the_interpreter
from parkattn import METHODS, CallSite, ParkConfig, build_plan, enable, make_method, park_attention

try:
    from parklab.research import ResearchConfig, studied_entry
except ImportError:  # the tree before, where every setting is the library's
    ResearchConfig, studied_entry = ParkConfig, str

HERE = Path(__file__).parent
KINDS = ("reference", "video", "triton")
BEFORE = "3741f5478675bdcd0fe3261aee7084a9854da8c1"  # the last commit before the laboratory moved out
OURS = ("dense", "park", "park-no-pama", "park-no-qrkc", "centroid")
PRESETS = ("wan2.1-1.3b", "wan2.1-14b", "wan2.2-14b", "hunyuanvideo")
SMALL = {"query_clusters": 4, "key_clusters": 9, "kmeans_iterations": 3}


@pytest.fixture(scope="module")
def tree_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    packed = subprocess.run(["git", "archive", BEFORE, "src"], cwd=HERE.parent, capture_output=True)
    if packed.returncode:
        pytest.skip(f"commit {BEFORE} is not in this checkout; fetch the whole history")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder / "src"


def hashes(*trees: Path) -> dict[str, dict[str, object]]:
    """{kind: {case: hash}} of source trees, in a process of its own; the definitions and videos know nothing of the
    interpreter.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, trees)),
        "TRITON_INTERPRET": "1",
        "HF_HUB_OFFLINE": "1",
    }
    run = subprocess.run([sys.executable, __file__, *KINDS], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


def test_plans_outputs_and_videos_are_bit_equal_to_before(tree_before: Path) -> None:
    trees = (tree_before,), (HERE.parent / "src", HERE.parent / "lab/src")
    with ThreadPoolExecutor() as both:
        before, now = both.map(lambda each: hashes(*each), trees)
    for kind in KINDS:
        different = [case for case, found in before[kind].items() if now[kind].get(case) != found]
        assert len(before[kind]) >= 5 and not different


# What is hashed, in a process of its own ------------------------------------------------------------------------


def digest(*tensors: torch.Tensor | None) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            found.update(str(tensor.dtype).encode() + str(tuple(tensor.shape)).encode())
            found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:24]


def plan_digest(plan) -> str:
    sides = (part for side in (plan.queries, plan.keys) for part in (side.labels, side.order, side.offsets))
    return digest(*sides, plan.mask, plan.estimated_mass)


def tokens(seed: int, n: int, heads: int, dim: int, dtype: torch.dtype):
    random = torch.Generator().manual_seed(seed)
    centers = 2 * torch.randn(3, heads, 6, dim, generator=random)
    owner = torch.randint(6, (n,), generator=random)
    noise = torch.randn(3, heads, n, dim, generator=random)
    return (centers[:, :, owner] + noise).to(dtype).unsqueeze(1).unbind(0)


def settings():
    yield "top-p", {}
    yield "top-k", {"top_p": None, "top_k": 0.3}
    yield "floor", {"top_p": 0.4, "floor": 0.5}
    yield "borders", {"query_multiple": 16, "key_multiple": 8}
    yield "compensate", {"top_p": 0.5, "compensate": True}
    yield "sqrt", {"metric_root": "sqrt", "alpha": 0.2}


def roles(n: int):
    valid = torch.ones(1, n, dtype=torch.bool)
    valid[:, n - 5 :] = False
    yield "plain", None, None
    yield "text", slice(n - 20, n), None
    yield "padding", slice(n - 20, n), valid


def attention(backend: str):
    n, heads, dim, dtype = (300, 2, 32, torch.float32) if backend == "reference" else (64, 1, 64, torch.float16)
    q, k, v = tokens(0, n, heads, dim, dtype)
    for label, changes in settings():
        config = ResearchConfig(**{**SMALL, **changes}, backend=backend)
        for role, text, key_valid in roles(n):
            if backend == "triton" and (role == "text" or label in ("floor", "sqrt", "top-k")):  # interpreted: slow
                continue
            plan = build_plan(q, k, config, text=text, key_valid=key_valid)
            yield f"{label}, {role}", [plan_digest(plan), digest(park_attention(q, k, v, config, plan=plan))]
            if backend == "triton" and label != "top-p":
                continue
            warm = build_plan(k, q, config, text=text, key_valid=key_valid, start=plan)
            yield f"{label}, {role}, warm", plan_digest(warm)
    if backend == "reference":
        for name in PRESETS:
            config = ResearchConfig.preset(name, backend=backend, kmeans_iterations=2)
            plan = build_plan(*tokens(1, 1200, 1, 32, dtype)[:2], config)
            yield f"preset {name}", plan_digest(plan)
        yield from every_method()
    yield from methods(backend, n, heads, dim, dtype)


def every_method():
    """Every method at its authors' settings, and every profile of PARK, through a run of steps."""
    grid = (4, 12, 12)
    made = {name: make_method(name) for name in sorted(METHODS)}
    made |= {f"profile {name}": make_method("park", ParkConfig.profile(name)) for name in ParkConfig.PROFILES}
    for name, method in made.items():
        for step in range(8):
            q, k, v = (x + 0.03 * step for x in tokens(3, 4 * 12 * 12, 2, 32, torch.float32))
            out, stats = method(q, k, v, CallSite(layer=1, step=step, total_steps=8, grid=grid))
            yield f"{name}, step {step}", [stats.phase, stats.reason, digest(out, stats.density)]


def methods(backend: str, n: int, heads: int, dim: int, dtype: torch.dtype):
    for name in OURS if backend == "reference" else OURS[:2]:
        config = ResearchConfig(**SMALL, backend=backend, dense_steps=1, refresh_interval=2, reference_steps=6)
        method = make_method(studied_entry(name), config)
        for step in range(6 if backend == "reference" else 2):
            q, k, v = tokens(2, n, heads, dim, dtype)
            q = q + 0.05 * step
            for role, text, key_valid in list(roles(n))[:: 1 if backend == "reference" else 3]:
                site = {"layer": 1, "step": step, "total_steps": 6, "branch": role, "text": text}
                made = method(q, k, v, CallSite(**site, scale=0.2, key_valid=key_valid))
                yield (
                    f"{name}, step {step}, {role}",
                    [made.stats.phase, made.stats.reason, digest(made.out, made.stats.density)],
                )


def video():
    from diffusers import WanPipeline

    try:
        from parklab.sprites import CHECKPOINT
    except ImportError:  # the tree before
        from parkattn.sprites import CHECKPOINT

    pipe = WanPipeline.from_pretrained(str(CHECKPOINT), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    blocks = {"query_clusters": 3, "key_clusters": 12}
    for name in OURS:
        with enable(pipe, ParkConfig(**blocks), method=name) if name != "dense" else enable(pipe, method="dense"):
            options = {"height": 64, "width": 96, "num_frames": 5, "num_inference_steps": 4, "guidance_scale": 3.0}
            generator = torch.Generator("cpu").manual_seed(3)
            # what stock code decodes from the same latents is the same
            latents = pipe(
                "a red circle moves right over blue waves", **options, generator=generator, output_type="latent"
            )
        yield f"video {name}", digest(latents.frames)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        hasten_the_interpreter()
    torch.set_num_threads(1)
    found = {kind: dict(video() if kind == "video" else attention(kind)) for kind in sys.argv[1:]}
    json.dump(found, sys.stdout, indent=1)
