"""`park bench e2e` with --profile, --precision and --float8 at tiny size on the CPU: the runs that are composed of their forwards."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("diffusers")
import torch

from parkattn.anchors import anchor_steps
from parkattn.hosts.diffusers.session import session_of
from parkattn.models import row_for
from parkattn.park import ParkConfig
from parklab.bench import e2e, e2e_float8, e2e_profile, e2e_turns, whole_models
from parklab.research import ResearchConfig
from test_bench_e2e import CPU, TINY

# numpy's complaint about schedulers of diffusers
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
# blocks of the paper preset and of a profile are the same in long videos, and here by saying so
ALIKE = {
    name: replace(model, settings={**model.settings, "query_multiple": 1, "key_multiple": 1})
    for name, model in TINY.items()
}
FAST = e2e.SectionOptions(full=True, rehearse=True, profile="fast")


@pytest.fixture(scope="module", params=["wan2.1-1.3b", "hunyuanvideo"])
def fast(request):
    # text, which is always kept, is a tenth of all pairs here
    return e2e_profile.prepare_profile(ALIKE[request.param], CPU, "fast", 0.25)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_profile_is_timed_dense_in_our_kernel_at_anchors_and_corrected(fast):
    parts = []
    found = e2e_profile.measure_profile(fast, parts.append)
    phases = [
        "dense",
        "anchor",
        "reuse",
        "reuse",
        "anchor",
        "refresh",
        "reuse",
        "refresh",
        "reuse",
        "dense, compiled",
        "dense",
    ]
    assert [part["phase"] for part in parts] == phases
    each = [part["seconds"] for part in parts]
    assert found["baselines"] == {"own kernel": each[0], "compiled": each[9], "stock": each[10]}
    assert (found["anchor_cold_s"], found["anchor_warm_s"], found["reuse_s"]) == (
        each[1],
        each[4],
        (each[2] + each[3]) / 2,
    )
    assert (found["refresh_cold_s"], found["refresh_warm_s"], found["plain_reuse_s"]) == (
        each[5],
        each[7],
        (each[6] + each[8]) / 2,
    )
    # 16 blocks come in steps of a sixteenth
    assert (found["density"], found["plain_density"]) == (pytest.approx(0.25, abs=0.5 / 16),) * 2
    assert len(fast.compiled_calls) >= found["layers"]
    assert (
        found["attention_s"]["reuse"] > 0
        and found["attention_s"]["anchor"] > 0
        and found["plain_attention_s"]["reuse"] > 0
    )
    assert found["config"]["compensate"] and found["config"]["own_dense"] and found["finite"]
    assert session_of(fast.ready.transformer) is None, "stock again"
    assert all(module._compiled_call_impl is None for module in fast.ready.transformer.modules()), "stock again"
    json.dumps(found)


def test_state_is_plans_and_residuals_of_both_branches(fast):
    found = e2e_profile.measure_profile(fast)
    memory, model, config = found["memory"], fast.ready.model, fast.ready.transformer.config
    rank, tokens = 32, model.tokens + (model.text_tokens if "hunyuan" in model.name else 0)
    per_head = rank * (tokens + 4 + 4 * 128)  # codes, their step, directions
    assert memory["residual_rank"] == rank
    assert memory["residual_with_guidance_gb"] == pytest.approx(
        2 * found["layers"] * config.num_attention_heads * per_head / 1e9
    )
    # a profile's branches share their plans and have a residual each
    assert memory["state_with_guidance_gb"] == pytest.approx(
        memory["state_gb"] + memory["residual_with_guidance_gb"] / 2
    )
    assert memory["state_gb"] > memory["residual_with_guidance_gb"] / 2 + memory["plans_with_guidance_gb"] / 2, (
        "tiles have more rows"
    )
    assert "of at most 4 GB" in e2e_profile.state_sentence({**memory, "state_bar_gb": 4.0})


def test_a_run_of_a_profile_is_composed_of_its_anchors(fast):
    found = e2e_profile.measure_profile(fast)
    assert list(found["runs"]) == ["fast", "quality", "paper"], (
        "forwards of fast and quality are the same at a fixed density"
    )
    for name in ("fast", "quality"):
        planned = anchor_steps(ParkConfig.PROFILES[name]["anchors"], e2e.RUN_STEPS)
        dense = sum(step + 1 in planned for step in planned)  # an anchor before an anchor builds no plan
        anchors, reuse = len(planned) - dense, e2e.RUN_STEPS - len(planned)
        run = found["runs"][name]
        assert run["steps"] == {"dense": dense, "anchor": anchors, "reuse": reuse}
        park_s = (
            dense * found["own_dense_s"]
            + found["anchor_cold_s"]
            + (anchors - 1) * found["anchor_warm_s"]
            + reuse * found["reuse_s"]
        )
        assert run["park_s"] == pytest.approx(park_s)
        assert run["speedup"] == {
            way: pytest.approx(50 * dense_s / park_s) for way, dense_s in found["baselines"].items()
        }
    assert found["runs"]["paper"]["steps"] == {"dense": 10, "refresh": 4, "reuse": 36}


def test_the_settings_that_profiles_are_timed_with_are_those_of_enable():
    for model in whole_models.MODELS.values():
        asked = ParkConfig.named("fast", model=model.name)
        timed = e2e_profile.profile_config(model, "fast", 0.1)
        assert timed == ResearchConfig.of(asked.replace(top_p=None, top_k=0.1))
        # top-k is searched with the preset's blocks
        assert timed.counts(model.tokens, model.tokens) == model.config().counts(model.tokens, model.tokens)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_section_of_a_profile_keeps_its_lines_and_a_whole_run_beside_the_composed_one(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(e2e, "bench_device", lambda: CPU)
    monkeypatch.setitem(whole_models.SMALL, "wan2.1-1.3b", ALIKE["wan2.1-1.3b"])
    e2e.run_section("wan2.1-1.3b", tmp_path / "r.jsonl", FAST, turn=lambda: 60.0)
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    whole = ["e2e profile run", "e2e profile run", "e2e decode"]
    prepared = [line.get("part") for line in lines if line["benchmark"] == "e2e preparation"]
    assert prepared[0] == "weights" and prepared[-1] == "compiled blocks" and "kernels of step 1: anchor" in prepared
    assert {line["profile"] for line in lines} == {"fast"}
    lines = lines[len(prepared) :]
    assert [line["benchmark"] for line in lines] == ["e2e forward"] * 11 + ["e2e profile", *whole]
    assert lines[12]["calls"] == lines[12]["expected_calls"] == {"dense": 2, "refresh": 0, "reuse": 86, "anchor": 12}
    assert lines[12]["composed_s"] == lines[11]["runs"]["fast"]["park_s"]
    assert set(lines[12]["median_step_s"]) == {"dense", "anchor", "reuse"}
    rows = e2e_turns.profile_rows(lines)
    assert [row[:2] for row in rows] == [["wan2.1-1.3b", name] for name in ("fast", "paper", "quality")]
    assert {len(row) for row in rows} == {len(e2e_turns.columns_of(FAST))}
    assert rows[0][10].endswith("x, bar 3.0") and rows[1][10].endswith("x")
    assert [row[9] for row in rows] == ["6", "", "8"]
    assert e2e_turns.table_rows(lines) == [], "the figures of the paper preset stay those of its own call"
    assert "a lower residual_rank takes" in capfd.readouterr().out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_whole_run_leaves_out_the_forwards_of_given_steps_and_is_composed_of_the_others(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(e2e, "bench_device", lambda: CPU)
    monkeypatch.setitem(whole_models.SMALL, "wan2.1-1.3b", ALIKE["wan2.1-1.3b"])
    e2e.run_section(
        "wan2.1-1.3b", tmp_path / "r.jsonl", replace(FAST, forecast=(6, 8, 10, 11, 12, 47)), turn=lambda: 60.0
    )
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    (forwards,) = (line for line in lines if line["benchmark"] == "e2e profile")
    (run,) = (line for line in lines if line["benchmark"] == "e2e profile run" and line["method"] == "park")
    assert run["steps_by_phase"]["forecast"] == [6, 8, 10, 11, 12, 47]
    assert run["calls"] == {"dense": 2, "refresh": 0, "reuse": 74, "anchor": 12}
    assert run["composed_s"] == pytest.approx(forwards["runs"]["fast"]["park_s"] - 6 * forwards["reuse_s"])
    assert sum(run["composed"]["steps"].values()) == 50
    stock = forwards["baselines"]["stock"]
    assert run["composed"]["speedup"]["stock"] == pytest.approx(50 * stock / run["composed_s"])
    with pytest.raises(RuntimeError, match=r"forecast steps \[\], expected \[16\].*so nothing was recorded"):
        e2e.run_section(
            "wan2.1-1.3b", tmp_path / "s.jsonl", replace(FAST, forecast=(16,)), turn=lambda: 60.0
        )  # an anchor


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_profile_on_compiled_blocks_has_no_stock_to_compare_with():
    prepared = e2e_profile.prepare_profile(ALIKE["wan2.1-1.3b"], CPU, "quality", 0.25, compiled=True)
    found = e2e_profile.measure_profile(prepared)
    assert found["compiled"] and list(found["baselines"]) == ["compiled", "own kernel"]
    assert list(found["runs"]) == ["quality", "fast", "paper"]
    memory = {**found["memory"], "state_bar_gb": None}
    rows = e2e_turns.profile_rows([{"model": "m", "speed_bar": 3.0, **found, "memory": memory}])
    assert rows[0][:2] == ["m, compiled", "fast"] and rows[0][10] == "" != rows[0][11]


def test_what_no_profile_or_density_is_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="profile: expected"):
        e2e.SectionOptions(profile="fastest")
    with pytest.raises(ValueError, match="density: expected"):
        e2e.SectionOptions(density=0.0)
    for chosen in ({}, {"profile": "fast"}, {"full": True}, {"profile": "fast", "precision": "int8"}):
        with pytest.raises(ValueError, match="forecast: expected --full and --profile"):
            e2e.SectionOptions(forecast=(6,), **chosen)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_both_precisions_and_float8_linears_are_timed_beside_the_same_stock_forward(tmp_path, monkeypatch):
    monkeypatch.setattr(e2e, "bench_device", lambda: CPU)
    monkeypatch.setitem(e2e.SMALL, "wan2.1-1.3b", ALIKE["wan2.1-1.3b"])
    monkeypatch.setattr(e2e_profile, "whole_run", lambda ready, *, benchmark, **how: iter([{"benchmark": benchmark}]))
    record = tmp_path / "r.jsonl"
    how = {"full": True, "rehearse": True, "profile": "fast", "precision": "int8", "float8": True}
    e2e.run_section("wan2.1-1.3b", record, e2e.SectionOptions(**how), turn=lambda: 60.0)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    found = [line for line in lines if line["benchmark"] == "e2e bits"]
    kinds = [("bfloat16", "bf16"), ("bfloat16", "int8"), ("float8", "int8")]
    assert [(line["linears"], line["precision"]) for line in found] == kinds
    assert [line["config"]["precision"] for line in found] == ["bf16", "int8", "int8"]
    assert len({line["baselines"]["stock"] for line in found}) == 1, "all are compared with one stock forward"
    assert found[2]["memory"]["weights_gb"] < found[1]["memory"]["weights_gb"]
    for line in found:
        run = line["runs"]["fast"]
        assert run["speedup"]["stock"] == pytest.approx(50 * line["baselines"]["stock"] / run["park_s"])
        assert line["quality_reuse_s"] > 0 and line["finite"]
    assert [len(row) for row in e2e_turns.bits_rows(lines)] == [len(e2e_turns.BITS_COLUMNS)] * 3
    (whole,) = (line for line in lines if line["benchmark"] == "e2e bits run")
    one_branch = {name: value for name, value in found[1].items() if name != "anchor_second_s"}
    run = e2e_profile.anchored_run(one_branch, Counter(found[1]["runs"]["fast"]["steps"]), found[1]["baselines"])
    assert whole["composed_s"] == run["park_s"] != found[1]["runs"]["fast"]["park_s"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_precision_alone_is_compared_with_the_stock_forward_of_the_same_record(tmp_path, monkeypatch):
    monkeypatch.setattr(e2e, "bench_device", lambda: CPU)
    monkeypatch.setitem(e2e.SMALL, "wan2.1-1.3b", ALIKE["wan2.1-1.3b"])
    record = tmp_path / "r.jsonl"
    how = {"rehearse": True, "profile": "fast", "precision": "int8", "alone": True, "top_k": 0.25}
    for more in ({"full": True, "forecast": (6, 8, 10)}, {"float8": True}):
        e2e.run_section("wan2.1-1.3b", record, e2e.SectionOptions(**how, **more), turn=lambda: 60.0)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    found = [line for line in lines if line["benchmark"] == "e2e bits"]
    assert [(line["linears"], line["precision"]) for line in found] == [("bfloat16", "int8"), ("float8", "int8")]
    (stock,) = (line["seconds"] for line in lines if line.get("phase") == "dense" and "precision" not in line)
    for line in found:
        assert line["baselines"]["stock"] == stock and line["config"]["top_k"] == 0.25
        assert line["runs"]["fast"]["speedup"]["stock"] == pytest.approx(50 * stock / line["runs"]["fast"]["park_s"])
    (run,) = (line for line in lines if line["benchmark"] == "e2e bits run")
    assert run["steps_by_phase"]["forecast"] == [6, 8, 10] and run["config"]["precision"] == "int8"
    # without guidance there is no second branch, which takes the plans of the first at its anchors
    anchors = found[0]["runs"]["fast"]["steps"]["anchor"]
    first = found[0]["anchor_cold_s"] + (anchors - 1) * found[0]["anchor_warm_s"]
    saved = (first - anchors * found[0]["anchor_second_s"]) / 2
    assert run["composed_s"] == pytest.approx(found[0]["runs"]["fast"]["park_s"] + saved - 3 * found[0]["reuse_s"])
    rows = e2e_turns.bits_rows(lines)
    assert [len(row) for row in rows] == [len(e2e_turns.BITS_COLUMNS)] * 2 and rows[0][5] == rows[0][-3] == ""


def test_int8_without_a_profile_that_has_it_is_refused():
    with pytest.raises(ValueError, match="precision: expected --profile fast or quality"):
        e2e.SectionOptions(precision="int8")
    for chosen in ({"alone": True}, {"top_k": 0.1, "profile": "fast"}):
        with pytest.raises(ValueError, match="alone, top_k: expected --precision int8"):
            e2e.SectionOptions(**chosen)
    with pytest.raises(ValueError, match="guidance: expected --full and --precision int8"):
        e2e.SectionOptions(guidance=5.0, profile="fast")


# float8 linears: what is rounded, what is timed, and where the seconds are ------------------------------


def linear(ins: int = 64, outs: int = 48, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(ins, outs, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


def test_rows_of_float8_values_are_rounded_to_themselves():
    """Times a power of two per row, which a scale per row takes out; zeros stay zeros."""
    values = torch.arange(126, dtype=torch.uint8).view(e2e_float8.FLOAT8).float()
    x = torch.stack([values, -values, torch.zeros_like(values)])
    x[:, -1] = torch.tensor([448.0, -448.0, 0.0])
    x *= torch.tensor([[1.0], [2**-9], [1.0]])
    rounded, scale = e2e_float8.by_row(x)
    assert torch.equal(rounded.float() * scale, x)


@pytest.mark.parametrize("bias", [True, False])
def test_a_float8_linear_errs_by_rounding_only(bias):
    plain = linear(bias=bias)
    made = e2e_float8.ScaledLinear(plain)
    assert 0 < e2e_float8.error_of(made, plain) <= e2e_float8.LARGEST_ERROR
    assert made(torch.zeros(2, 3, 64, dtype=torch.bfloat16)).shape == (2, 3, 48)


def test_linears_that_err_more_are_refused(monkeypatch):
    transformer = whole_models.random_transformer(TINY["wan2.1-1.3b"], CPU)
    monkeypatch.setattr(e2e_float8, "by_row", lambda x: (x.to(e2e_float8.FLOAT8), 2 * torch.ones(len(x), 1)))
    with pytest.raises(RuntimeError, match=r"float8 linear attn1\.to_q errs by"):
        e2e_float8.make_float8(transformer, CPU)


@pytest.fixture(scope="module", params=["wan2.1-14b"])
def lines(request):
    kept: list = []
    e2e_float8.run_float8(request.param, TINY[request.param], CPU, kept.append, density=e2e.DENSITY, turn=lambda: 60.0)
    return json.loads(json.dumps(kept))


def test_each_kind_of_linears_has_every_forward_at_the_same_density(lines):
    forwards = [(line["linears"], line["phase"]) for line in lines if line["benchmark"] == "e2e forward"]
    each = ["refresh", "reuse", "refresh", "reuse", "refresh", "dense, compiled", "dense"]
    assert forwards == [(linears, phase) for linears in ("bfloat16", "float8") for phase in each]
    plain, rounded = (line for line in lines if line["benchmark"] == "e2e float8")
    assert (plain["linears"], rounded["linears"]) == ("bfloat16", "float8")
    assert "_scaled_mm" in rounded["made_by"]
    assert plain["finite"] and rounded["finite"]
    (change,) = (line for line in lines if line["benchmark"] == "e2e preparation")
    assert change["part"] == "float8 linears" and "linears" not in change, "it is of neither kind"
    assert plain["config"] == rounded["config"]
    # 16 key blocks come in steps of a sixteenth
    assert rounded["density"] == pytest.approx(plain["density"], abs=0.5 / 16)
    assert rounded["of_bfloat16"]["reuse_s"] == rounded["reuse_s"] / plain["reuse_s"]
    assert rounded["bar"]["met"] == (rounded["of_bfloat16"]["reuse_s"] <= 0.8)


def test_the_parts_of_a_forward_add_up(lines):
    for line in lines:
        if line["benchmark"] == "e2e float8":
            assert set(line["split"]) == {"reuse", "dense, compiled"}
            for part in line["split"].values():
                assert part["attention_s"] > 0 and part["linears_s"] > 0
                parts = [part[name] for name in ("attention_s", "linears_s", "rest_s")]
                assert sum(parts) == pytest.approx(part["kernels_s"])


def test_float8_weights_take_half_the_memory_of_those_in_blocks(lines):
    plain, rounded = (line["memory"]["weights_gb"] for line in lines if line["benchmark"] == "e2e float8")
    model = whole_models.random_transformer(TINY[lines[0]["model"]], CPU)
    in_blocks = [x for block in row_for(model).all_blocks(model) for x in e2e_float8.linears_of(block).values()]
    # one byte of two, less a float32 scale per row
    saved = sum(x.weight.numel() - 4 * x.out_features for x in in_blocks)
    assert plain - rounded == pytest.approx(saved / 1e9)


def test_every_linear_of_a_forward_is_timed_alone(lines):
    products = [line for line in lines if line["benchmark"] == "e2e float8 product"]
    sizes = {(line["rows"], line["in"], line["out"]): line["calls_per_forward"] for line in products}
    model = whole_models.random_transformer(TINY[lines[0]["model"]], CPU)
    in_blocks = [x for block in row_for(model).all_blocks(model) for x in e2e_float8.linears_of(block).values()]
    assert sum(sizes.values()) == len(in_blocks)
    assert {size[1:] for size in sizes} == {(x.in_features, x.out_features) for x in in_blocks}


def test_the_table_has_a_row_for_each_kind_of_linears(lines):
    rows = e2e_turns.float8_rows(lines)
    assert [row[1] for row in rows] == ["bfloat16", "float8"]
    assert all(len(row) == len(e2e_turns.columns_of(e2e.SectionOptions(float8=True))) for row in rows)
    assert rows[1][7].endswith("bar 0.8")


@pytest.mark.parametrize("option", [{"compiled": True}, {"full": True}, {"profile": "fast"}])
def test_float8_is_measured_by_itself(option):
    with pytest.raises(ValueError, match="float8: expected it alone, got --"):
        e2e.SectionOptions(float8=True, **option)


@pytest.mark.filterwarnings("ignore")  # torchao's own, on import
def test_torchaos_linears_are_made_and_checked(monkeypatch):
    missing = "torchao is not installed: pip install -e '.[quant]'"
    quant_api = pytest.importorskip("torchao.quantization.quant_api", reason=missing)
    # it asks for a GPU; its arithmetic does not
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    model = TINY["wan2.1-14b"]
    transformer = whole_models.random_transformer(model, CPU)
    before = e2e_float8.weights_bytes(transformer)
    made = e2e_float8.make_float8(transformer, torch.device("cuda"))  # the linears stay where they are
    assert made.startswith("torchao ")
    assert type(transformer.blocks[1].ffn.net[2].weight).__name__ == "Float8Tensor"
    assert e2e_float8.weights_bytes(transformer) < before
    assert session_of(transformer) is None
    assert (
        whole_models.run_forward(transformer, whole_models.forward_inputs(model, transformer, CPU), 999.0)
        .isfinite()
        .all()
    )
