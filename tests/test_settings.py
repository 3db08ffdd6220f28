"""Configs say what every field means, and what only research changes; and whatever is passed, the answer is one short
line that names the argument.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

import parkattn
import parklab
import strategies
from parkattn.anchors import anchor_count, anchor_steps, log_signal_to_noise
from parkattn.methods import METHODS, configured_method, make_method
from parkattn.park import ParkConfig, build_plan, park_attention
from parkattn.plan import Plan
from parkattn.site import CallSite
from parklab.bench.frontier import Setting
from parklab.research import GivenForecasts, ResearchConfig, StudiedPark, share_by_noise, studied_entry
from parklab.scene import clustered_scene
from plans import flow_levels
from test_errors import SMALL as FEW_BLOCKS
from test_errors import refused

SOURCES = sorted(path for package in (parkattn, parklab) for path in Path(package.__file__).parent.rglob("*.py"))


def classes():
    return [
        node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]


def bases(config):
    return {getattr(base, "id", getattr(base, "attr", "")) for base in config.bases}


def config_classes():
    """MethodConfig and whatever inherits from it, by the names in the source."""
    every, found = classes(), {"MethodConfig": None}
    while True:
        new = {config.name: config for config in every if config.name in found or bases(config) & found.keys()}
        if new.keys() == found.keys():
            return new
        found = new


CONFIGS = config_classes()


def fields(config):
    """name -> whether a string follows."""
    following = zip(config.body, [*config.body[1:], None], strict=True)
    return {
        node.target.id: isinstance(then, ast.Expr)
        and isinstance(then.value, ast.Constant)
        and bool(str(then.value.value).strip())
        for node, then in following
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
    }


def explained(config):
    """Fields with a string of their own, or of the class that they change the default of."""
    inherited = {field for base in bases(config) & CONFIGS.keys() for field in explained(CONFIGS[base])}
    return inherited | {field for field, has_string in fields(config).items() if has_string}


def test_the_configs_of_all_methods_are_looked_at():
    assert {entry.config.__name__ for entry in METHODS.values()} <= CONFIGS.keys()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_config_field_is_explained_where_it_is_defined(name):
    assert fields(CONFIGS[name]).keys() <= explained(CONFIGS[name])


def test_every_field_of_park_is_a_profiles_a_models_or_named_in_a_page_for_users():
    """What only research changes is a field of parklab.research.ResearchConfig."""
    config, root = parkattn.ParkConfig, Path(__file__).parents[1]
    set_by_us = {name for changes in (*config.PROFILES.values(), *config.PRESETS.values()) for name in changes}
    pages = [*root.glob("docs/*.md"), root / "README.md"]
    text = " ".join(path.read_text() for path in pages if path.name not in ("diary.md", "measured.md", "reproduce.md"))
    fields = {field.name for field in dataclasses.fields(config)}
    assert not {name for name in fields - set_by_us if not re.search(rf"\b{name}\b", text)}
    assert len(fields) <= 20


@pytest.mark.parametrize(
    ("old", "advice"),
    [
        ({"refresh_top_p": 0.9}, r"write top_p=\(0.7, 0.9\)"),
        ({"short_residual_rank": 32}, r"write residual_rank=\(12, 32\)"),
        ({"query_multiple": 1}, "a field of parklab.research.ResearchConfig"),
    ],
)
def test_a_field_of_an_earlier_version_says_where_it_went(old, advice):
    with pytest.raises(ValueError, match=f"expected other fields, got {next(iter(old))}; .*{advice}"):
        ParkConfig.profile("quality", **old)


def test_every_setting_of_research_alone_is_named_where_the_library_refuses_it():
    newer = {"noise_tau", "exact_anchors", "s_min"}  # never in the library
    ours, theirs = ({field.name for field in dataclasses.fields(kind)} for kind in (ParkConfig, ResearchConfig))
    assert set(ParkConfig.MOVED) == theirs - ours - newer


# Settings of research -----------------------------------------------------------------------------------


STEPS = 50
SMALL = {"query_clusters": 4, "key_clusters": 12}


def share(step: int, least: float = 0.2, tau: float = 0.99, shift: float = 3.0) -> float:
    return share_by_noise(least, tau, CallSite(step=step, total_steps=STEPS, noise_levels=flow_levels(STEPS, shift)))


def test_a_share_falls_with_the_noise_from_one_to_its_least():
    found = [share(step) for step in range(STEPS)]
    assert 0.99 < found[0] <= 1 and all(before >= after for before, after in itertools.pairwise(found))
    last = STEPS - 1 - STEPS // 9  # of those with anchors, and as the steps after it
    assert found[last] == pytest.approx(0.2 + 0.8 * 0.01) and found[last:] == [found[last]] * (STEPS - last)
    strides = [b - a for a, b in itertools.pairwise(log_signal_to_noise(STEPS, flow_levels(STEPS, 3.0))[: last + 1])]
    assert found[strides.index(min(strides)) + 1] == pytest.approx(0.2 + 0.8 / 2)


def test_a_flows_shift_leaves_shares_as_they_are():
    for step in range(1, STEPS - STEPS // 9):  # the first is pure noise, and what ends a run is cut at a hundredth
        assert share(step, shift=1.0) == pytest.approx(share(step, shift=5.0))


def test_a_least_share_of_one_and_a_run_of_one_step_keep_it():
    assert {share(step, least=1.0) for step in range(STEPS)} == {1.0}
    assert share_by_noise(0.3, 0.99, CallSite(step=0, total_steps=1)) == 0.3


def plans(config: ResearchConfig, steps: int = STEPS):
    """The plan of each anchor and refresh, by step; tokens are the same at all of them."""
    q, k, v, grid, _ = clustered_scene(grid=(4, 12, 12))
    method, found = studied_entry("park").make(config), {}
    for step in range(steps):
        out = method(
            q, k, v, CallSite(step=step, total_steps=steps, noise_levels=flow_levels(STEPS, 3.0)[:steps], grid=grid)
        )
        if out.stats.phase in ("anchor", "refresh"):
            found[step] = out.stats.phase, next(iter(method.plans._held.values())).packed
    return found


def test_plans_keep_less_as_noise_falls_and_what_is_kept_at_the_end_is_top_p():
    following = plans(ResearchConfig.profile("fast", **SMALL, noise_tau=0.99, warm_start=False))
    same = plans(ResearchConfig.profile("fast", **SMALL, warm_start=False))
    kept = [packed.density.mean().item() for _, packed in following.values()]
    assert kept[0] > 0.9 and kept == sorted(kept, reverse=True) and kept[-1] < kept[0]
    assert all(
        one.density.mean() >= other.density.mean()
        for (_, one), (_, other) in zip(following.values(), same.values(), strict=True)
    )


def test_anchors_go_by_exact_attention_and_plans_between_them_by_the_estimate():
    short = {**SMALL, "top_p": 0.5, "warm_start": False}
    mixed, exact, usual = (
        plans(ResearchConfig.profile("fast", **short, **changes), steps=16)
        for changes in ({"exact_anchors": True}, {"importance": "exact"}, {})
    )
    phases = {step: phase for step, (phase, _) in mixed.items()}
    assert set(phases.values()) == {"anchor", "refresh"}
    for step, phase in phases.items():
        wanted = exact if phase == "anchor" else usual
        assert torch.equal(mixed[step][1].bits, wanted[step][1].bits), step
    assert any(not torch.equal(exact[step][1].bits, usual[step][1].bits) for step in phases)


def test_settings_that_have_no_effect_or_no_meaning_are_refused():
    with pytest.raises(ValueError, match="exact_anchors: expected False without anchors"):
        ResearchConfig(exact_anchors=True)
    for tau in (0.5, 1.0):
        with pytest.raises(ValueError, match="noise_tau: expected a number between"):
            ResearchConfig(noise_tau=tau)
    with pytest.raises(ValueError, match="noise_tau: expected top_p"):
        ResearchConfig(noise_tau=0.9, top_p=None, top_k=0.2)
    with pytest.raises(ValueError, match="noise_tau: expected top_p"):
        ResearchConfig.profile("turbo", noise_tau=0.9)


def test_a_row_of_the_frontier_names_them():
    asked = Setting.parse("fast noise_tau=0.99 top_p=0.1 exact_anchors=true")
    made = studied_entry(asked.method).make(ResearchConfig.profile(asked.config, **asked.changes))
    assert isinstance(made, StudiedPark) and made.planner.config.importance == "exact"
    assert (made.between.config.importance, made.between.config.noise_tau) == ("pama", 0.99)


def test_forwards_at_given_steps_are_forecast_unless_they_are_anchors():
    config = ResearchConfig.profile("fast")
    made = GivenForecasts(config, range(STEPS))
    left_out = [step for step in range(STEPS) if not made.computes(CallSite(step=step, total_steps=STEPS))]
    anchors = anchor_steps(anchor_count(config, STEPS), STEPS)
    assert sorted({*left_out, *anchors}) == list(range(STEPS)) and not {*left_out} & {*anchors}


# Wrong values -----------------------------------------------------------------------------------------


q, k, v = strategies.gaussian_qkv(0, 2, 2, 7, 7, 16)
KINDS = {"sparse": (q.to_sparse(), TypeError, "sparse"), "meta": (q.to("meta"), ValueError, "meta")}
BAD_SCALES = [
    (float("nan"), ValueError),
    (float("inf"), ValueError),
    ("x", TypeError),
    (2**64, ValueError),
    (1e39, ValueError),
]
BAD_SITES = {
    "video": [(-1, ValueError), ("0", TypeError)], "paired": [(1, TypeError)],
    "layer": [(-1, ValueError), ("x", TypeError)], "step": [(-1, ValueError), (2.5, TypeError), (None, TypeError)],
    "total_steps": [(0, ValueError), (-1, ValueError), (2.5, TypeError), ("x", TypeError)],
    "branch": [(None, TypeError), ("", TypeError), ({}, TypeError)],
    "grid": [((1, 2), TypeError), ([1, 2, 3], TypeError), ((1, 0, 2), ValueError), ((1.5, 2, 2), TypeError)],
    "scale": BAD_SCALES, "noise_levels": [(5, TypeError)], "dense": [(5, TypeError)],
}  # fmt: skip


@pytest.mark.parametrize(
    "field", ["query_clusters", "top_p", "alpha", "check_finite", "dense_layers", "seed", "top_k", "backend"]
)
@pytest.mark.parametrize(
    "value", [torch.randn(3, 4), 10**5000, np.ones((3, 4))], ids=["tensor", "huge number", "array"]
)
def test_messages_are_one_short_line_whatever_came(field, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        ResearchConfig(**{field: value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 and "expected" in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_without_plain_values_are_refused(kind):
    x, error, came = KINDS[kind]
    refused(park_attention, x, x, x, FEW_BLOCKS, named="q", came=came, error=error)
    refused(
        make_method("park", FEW_BLOCKS), x, x, x, CallSite(step=20, total_steps=50), named="q", came=came, error=error
    )


def test_seeds_that_no_generator_takes_are_refused():
    refused(ResearchConfig, seed=2**64, named="seed", came=str(2**64))
    assert build_plan(q, k, FEW_BLOCKS.replace(seed=2**63 - 1)).density().isfinite().all()


@pytest.mark.parametrize("config", ["wan2.1-14b", {"top_p": 0.5}, 5, 0, "", {}])
def test_a_config_of_another_type_is_refused_also_where_it_is_false(config):
    refused(park_attention, q, k, v, config, named="config", came=repr(config), error=TypeError)
    refused(build_plan, q, k, config, named="config", came=repr(config), error=TypeError)


@pytest.mark.parametrize("method", [None, [], 5])
def test_a_method_that_is_no_name_is_refused(method):
    refused(configured_method, method, named="method", came=repr(method), error=TypeError)
    refused(make_method, method, named="method", came=repr(method), error=TypeError)


@pytest.mark.parametrize("field,value,error", [(f, x, e) for f, values in BAD_SITES.items() for x, e in values])
def test_a_call_site_refuses_wrong_values_by_name(field, value, error):
    x = torch.randn(1, 1, 8, 4)
    for name in ("dense", "park"):
        refused(
            make_method(name),
            x,
            x,
            x,
            CallSite(**{field: value}),
            named=field,
            came="" if field == "grid" else str(value),
            error=error,
        )


@pytest.mark.parametrize("scale,error", BAD_SCALES)
def test_a_scale_that_is_no_finite_number_is_refused(scale, error):
    named = {"named": "scale", "came": str(scale), "error": error}
    refused(park_attention, q, k, v, FEW_BLOCKS, scale=scale, **named)
    refused(build_plan, q, k, FEW_BLOCKS, scale=scale, **named)
    refused(park_attention, q, k, v, FEW_BLOCKS, plan=build_plan(q, k, FEW_BLOCKS), scale=scale, **named)


def test_the_advice_for_a_singular_metric_names_the_config_field():
    one_direction = torch.ones_like(q)
    with pytest.raises(ValueError, match="set metric_root='sqrt'"):
        build_plan(one_direction, k, FEW_BLOCKS.replace(alpha=0.0, epsilon=1e-30))


@pytest.mark.parametrize("path", ["", None, 5, "a\0b"])
def test_a_path_that_is_none_is_refused(path):
    refused(Plan.load, path, named="path", came=repr(path), error=TypeError)
    refused(build_plan(q, k, FEW_BLOCKS).save, path, named="path", came=repr(path), error=TypeError)


@pytest.mark.parametrize(
    "device,error", [("meta", TypeError), ("x", TypeError), (None, TypeError), ("cuda:99", ValueError)]
)
def test_a_device_that_is_not_here_is_refused(tmp_path, device, error):
    build_plan(q, k, FEW_BLOCKS).save(tmp_path / "plan")
    refused(Plan.load, tmp_path / "plan", device, named="device", came=repr(device), error=error)


def test_a_plan_that_is_not_there_is_one_line(tmp_path):
    refused(Plan.load, tmp_path / "absent", named="absent", came="no file", error=OSError)
    refused(Plan.load, tmp_path, named=tmp_path.name, came="no file", error=OSError)


PLAN_PARTS = [f"{side}.{part}" for side in ("queries", "keys") for part in ("labels", "order", "offsets")]


@pytest.mark.parametrize(
    "part,how", [*((part, how) for part in PLAN_PARTS for how in ("gone", "flipped")), ("mask", "gone")]
)
def test_a_plan_file_with_a_part_missing_or_inconsistent_is_refused(tmp_path, part, how):
    path = tmp_path / "plan.safetensors"
    build_plan(q, k, FEW_BLOCKS).save(path)
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    tensors = load_file(path)
    if how == "gone":
        del tensors[part]
    else:
        tensors[part] = tensors[part].flip(-1).contiguous()
    path.write_bytes(save(tensors, metadata=facts))
    with pytest.raises(ValueError, match=r"expected a plan written by Plan\.save"):
        Plan.load(path)


@pytest.mark.parametrize("wrong", ["dense", 5, {}, FEW_BLOCKS], ids=["text", "number", "mapping", "config"])
def test_a_plan_or_start_that_is_none_is_refused(wrong):
    refused(park_attention, q, k, v, FEW_BLOCKS, plan=wrong, named="plan", came="", error=TypeError)
    refused(build_plan, q, k, FEW_BLOCKS, start=wrong, named="start", came="", error=TypeError)


@pytest.mark.parametrize("wrong", [None, 5, "top_p", [1]])
def test_fields_that_are_no_mapping_are_refused(wrong):
    refused(ParkConfig.from_dict, wrong, named="ParkConfig", came="", error=TypeError)


@pytest.mark.parametrize("swapped", ["q", "k"])
def test_tokens_before_heads_are_answered_with_the_layout(swapped):
    given = {"q": torch.randn(1, 3, 50, 16), "k": torch.randn(1, 3, 60, 16), "v": torch.randn(1, 3, 60, 16)}
    given[swapped] = given[swapped].transpose(1, 2)
    with pytest.raises(ValueError, match=r"q, k and v are \[batch, heads, tokens, dim\]: transpose\(1, 2\) what is"):
        park_attention(**given)
    with pytest.raises(ValueError, match="repeat k and v to the query heads"):
        park_attention(given["q"], *(torch.randn(1, 7, 60, 16) for _ in range(2)))
