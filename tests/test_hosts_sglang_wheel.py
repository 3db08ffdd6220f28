"""PARK as a plug-in of SGLang diffusion, with its own transformers, tiny, where SGLang is installed."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import types
import warnings
import weakref
from typing import Any

import pytest
import torch

import host_stand_ins as hosts
from host_stand_ins import GRID, HEADS, KEEP_ALL, LAYERS, SPARSE, STEPS, VIDEO
from parkattn.hosts import sglang
from test_hosts_sglang import DIM, ROOT, Request, arguments

INSTALLED = importlib.util.find_spec("sglang") is not None


@pytest.fixture(scope="module")
def wheel():
    """SGLang on a CPU, one process. Its kernels need a GPU: norms take their native forms, and flash attention is never
    reached.
    """
    if not INSTALLED:
        pytest.skip("needs the package sglang")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its many packages
        hosts.be_alone(patch, port=29581)
        patch.setenv("SGLANG_DIFFUSION_TARGET_DEVICE", "cpu")
        hosts.without_torchvision(patch)
        found = types.SimpleNamespace(args=None)
        # finds the entry point of the installed parkattn
        importlib.import_module(f"{ROOT}.platforms.plugins").apply_plugin_hooks()
        state = importlib.import_module(f"{ROOT}.distributed.parallel_state")
        state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
        state.initialize_model_parallel(sequence_parallel_degree=1, backend="gloo")
        found.set_args = importlib.import_module(f"{ROOT}.server_args").set_global_server_args
        found.context = importlib.import_module(f"{ROOT}.managers.forward_context")
        operations = importlib.import_module(f"{ROOT}.layers.custom_op")
        patch.setattr(operations.CustomOp, "forward", lambda self, *a, **k: self.forward_native(*a, **k))
        found.wan = importlib.import_module(f"{ROOT}.models.dits.wanvideo")
        found.wan_config = importlib.import_module("sglang.multimodal_gen.configs.models.dits.wanvideo")
        found.hunyuan = importlib.import_module(f"{ROOT}.models.dits.hunyuanvideo")
        found.hunyuan_config = importlib.import_module("sglang.multimodal_gen.configs.models.dits.hunyuanvideo")
        for module in (found.wan, found.hunyuan, importlib.import_module(f"{ROOT}.layers.layernorm")):
            if hasattr(module, "fuse_scale_shift_kernel"):
                patch.setattr(
                    module, "fuse_scale_shift_kernel", lambda x, scale, shift, *a, **k: x * (1 + scale) + shift
                )
        found.h3 = importlib.import_module(f"{ROOT}.models.dits.minimax_h3")
        found.h3_config = importlib.import_module("sglang.multimodal_gen.configs.models.dits.minimax_h3")
        stages = f"{ROOT}.pipelines_core.stages.model_specific_stages.minimax_h3"
        found.h3_loop = importlib.import_module(f"{stages}.denoise_loop")
        found.h3_packed = importlib.import_module(f"{stages}.packed_sequence").minimax_h3_packed_sequence
        found.stage = importlib.import_module(f"{ROOT}.pipelines_core.stages.denoising").DenoisingStage
        yield found


class Arguments(types.SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


HEADS_OF = {"num_attention_heads": HEADS, "attention_head_dim": DIM}
SIZE = {**HEADS_OF, "in_channels": 4, "out_channels": 4, "num_layers": LAYERS}


def tell(wheel: Any, park: Any, prefix: str) -> None:
    names = ("kv_gather_degree", "ulysses_degree", "ring_degree", "sp_degree", "tp_size", "num_gpus")
    chosen = "sparge_attn" if park else "torch_sdpa"
    wheel.set_args(Arguments(**vars(arguments(park, prefix, attention_backend=chosen, **dict.fromkeys(names, 1)))))


def wan(wheel: Any, park: Any) -> Any:
    """SGLang's own Wan transformer, tiny and random, with PARK or with its torch_sdpa."""
    tell(wheel, park, "Wan")
    arch = wheel.wan_config.WanVideoArchConfig(text_dim=16, freq_dim=32, ffn_dim=64, **SIZE)
    config = wheel.wan_config.WanVideoConfig(arch_config=arch)
    return hosts.randomised(wheel.wan.WanTransformer3DModel(config, {}).float().eval(), 0.2)


def hunyuan(wheel: Any, park: Any) -> Any:
    """SGLang's own HunyuanVideo transformer: LAYERS dual blocks and one single block."""
    tell(wheel, park, "Hunyuan")
    text = {"text_embed_dim": 16, "pooled_projection_dim": 16, "num_refiner_layers": 1}
    arch = wheel.hunyuan_config.HunyuanVideoArchConfig(**SIZE, **text, num_single_layers=1, rope_axes_dim=(8, 12, 12))
    config = wheel.hunyuan_config.HunyuanVideoConfig(arch_config=arch)
    config.dtype = torch.float32
    return hosts.randomised(wheel.hunyuan.HunyuanVideoTransformer3DModel(config, {}).float().eval(), 0.2)


def denoised(wheel: Any, model: Any, request: Request, number: int) -> torch.Tensor:
    """What its denoising stage does for one step: both branches, each in a context of its own."""
    latents = torch.randn(1, 4, 5, 16, 16, generator=torch.Generator().manual_seed(100 * request.seed + number))
    found = []
    for branch, request.is_cfg_negative in enumerate((False, True)):
        words = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(9 + branch))
        with (
            wheel.context.set_forward_context(current_timestep=number, attn_metadata=None, forward_batch=request),
            torch.no_grad(),
        ):
            found.append(
                model(hidden_states=latents, encoder_hidden_states=words, timestep=torch.tensor([500.0 - number]))
            )
    return torch.cat(found)


def minimax_h3(wheel: Any, park: Any) -> Any:
    """SGLang's own MiniMax-H3 transformer, whose blocks are in bfloat16."""
    tell(wheel, park, "")
    wide = HEADS * DIM
    arch = wheel.h3_config.MiniMaxH3DiTArchConfig(
        **HEADS_OF, num_layers=LAYERS, token_refiner_num_layers=1, hidden_size=wide, ffn_hidden_size=64,
        text_dim=16, timestep_input_dim=32, time_embed_hidden_size=32, time_embed_dim=16, adaln_out_features=18 * wide,
        final_adaln_out_features=2 * wide, rope_inv_freq_len=4,
    )  # fmt: skip
    config = wheel.h3_config.MiniMaxH3DiTConfig(arch_config=arch)
    importlib.import_module(f"{ROOT}.server_args").get_global_server_args().pipeline_config.dit_config = config
    return hosts.randomised(wheel.h3.MiniMaxH3DiTModel(config=config, hf_config={}, quant_config=None).eval(), 0.1)


def looped(wheel: Any, model: Any, request: Request) -> torch.Tensor:
    """Its own denoising loop, over its own packed layout, as its stage calls it."""
    packed = wheel.h3_packed(text_len=7, latent_t=5, latent_h=16, latent_w=16, audio_t=4, include_keyframe_cond=False)
    generator = torch.Generator().manual_seed(request.seed)
    words = torch.randn(7, 16, generator=generator).to(torch.bfloat16)
    branch = wheel.h3_loop.MiniMaxH3DenoiseBranch(
        packed=packed, text_embeddings=words, token_tags=packed["token_tags"], device=torch.device("cpu")
    )
    levels = [1.0, 0.75, 0.5, 0.25, 0.0]
    request.extra["minimax_h3_sigmas"] = {"video": levels, "audio": levels}

    def forward(transformer: Any, given: dict[str, Any], number: int) -> Any:
        with wheel.context.set_forward_context(current_timestep=number, attn_metadata=None, forward_batch=request):
            return transformer(**given)

    rows = {"video": torch.randn(VIDEO, 96, generator=generator), "audio": torch.randn(8, 32, generator=generator)}
    return wheel.h3_loop.minimax_h3_denoise_loop(
        model=model, model_forward=forward, positive=branch, initial_video_rows=rows["video"], initial_audio_rows=rows["audio"],
        keyframe_cond_rows=None, sigmas_video=levels, sigmas_audio=levels, device=torch.device("cpu"),
    )[0]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
class TestWithWheel:
    @pytest.mark.parametrize(("make", "count"), [(wan, LAYERS), (hunyuan, LAYERS + 1)])
    def test_every_block_kept_is_its_own_transformer_and_half_of_the_mass_is_sparse(self, wheel, make, count):
        stock = make(wheel, None)
        theirs = [denoised(wheel, stock, Request(), number) for number in range(STEPS)]
        kept, keeper = Request(), make(wheel, KEEP_ALL)
        # sums of VIDEO terms in another order, through so many layers
        rounding = count * VIDEO * torch.finfo(torch.float32).eps
        assert all(hosts.relative_error(denoised(wheel, keeper, kept, n), theirs[n]) < rounding for n in range(STEPS))
        report = kept.extra[sglang.KEY].summary()
        assert hosts.calls_by_layer(report) == dict.fromkeys(range(count), 2 * STEPS)
        fewer, sparse = Request(), make(wheel, SPARSE)
        assert all(
            hosts.relative_error(denoised(wheel, sparse, fewer, n), theirs[n]) > 10 * rounding for n in range(STEPS)
        )
        assert fewer.extra[sglang.KEY].summary().density < 0.9

    def test_its_packed_sequence_runs_in_its_own_loop(self, wheel):
        theirs, kept, fewer = looped(wheel, minimax_h3(wheel, None), Request()), Request(), Request()
        found = looped(wheel, minimax_h3(wheel, KEEP_ALL), kept)
        # blocks are in bfloat16: sums in another order may round to the neighbour
        rounding = torch.finfo(torch.bfloat16).eps
        assert hosts.relative_error(found, theirs) < rounding
        report, clock = kept.extra[sglang.KEY].summary(), kept.extra[sglang.KEY].engine.clock
        assert hosts.calls_by_layer(report) == dict.fromkeys(range(LAYERS), STEPS)
        assert (clock.grid, clock.total_steps) == (GRID, STEPS)
        assert hosts.relative_error(looped(wheel, minimax_h3(wheel, SPARSE), fewer), theirs) > hosts.relative_error(
            found, theirs
        )
        assert fewer.extra[sglang.KEY].summary().density < 0.9

    def test_two_requests_interleaved_equal_two_alone(self, wheel):
        model = wan(wheel, SPARSE)
        hosts.expect_apart(Request, lambda request, number: denoised(wheel, model, request, number))

    def test_compiled_attention_equals_that_which_is_not(self, wheel):
        eager, compiled, model = Request(), Request(), wan(wheel, SPARSE)
        theirs = [denoised(wheel, model, eager, number) for number in range(2)]
        for block in model.blocks:
            block.attn1.compile(backend="eager")  # whole blocks have operations of its own that need a GPU
        assert all(torch.equal(denoised(wheel, model, compiled, number), theirs[number]) for number in range(2))
        assert [row["layer"] for row in compiled.extra[sglang.KEY].summary().layers] == list(range(LAYERS))

    def test_a_cancelled_request_leaves_no_state(self, wheel):
        model, request, kept = wan(wheel, SPARSE), Request(), []
        stage = wheel.stage.__new__(wheel.stage)
        stage._offloaded_dit_modules_for_compile = []

        def cancelled(batch, args):
            denoised(wheel, model, batch, 0)
            kept.append(weakref.ref(batch.extra[sglang.KEY]))
            raise RuntimeError("cancelled")

        stage._denoise = cancelled
        with pytest.raises(RuntimeError, match="cancelled"):
            stage.forward(request, None)
        gc.collect()
        assert sglang.KEY not in request.extra and kept[0]() is None
