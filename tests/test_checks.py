"""Whatever is passed, the answer is one short line that names the argument."""

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

import strategies
from parkattn.methods import configured_method, make_method
from parkattn.park import ParkConfig, build_plan, park_attention
from parkattn.plan import Plan
from parkattn.site import CallSite
from parklab.research import ResearchConfig
from test_errors import SMALL, refused

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
    "video": [(-1, ValueError), ("0", TypeError)],
    "paired": [(1, TypeError)],
    "layer": [(-1, ValueError), ("x", TypeError)],
    "step": [(-1, ValueError), (2.5, TypeError), (None, TypeError)],
    "total_steps": [(0, ValueError), (-1, ValueError), (2.5, TypeError), ("x", TypeError)],
    "branch": [(None, TypeError), ("", TypeError), ({}, TypeError)],
    "grid": [((1, 2), TypeError), ([1, 2, 3], TypeError), ((1, 0, 2), ValueError), ((1.5, 2, 2), TypeError)],
    "scale": BAD_SCALES,
    "noise_levels": [(5, TypeError)],
    "dense": [(5, TypeError)],
}


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
    refused(park_attention, x, x, x, SMALL, named="q", came=came, error=error)
    refused(make_method("park", SMALL), x, x, x, CallSite(step=20, total_steps=50), named="q", came=came, error=error)


def test_seeds_that_no_generator_takes_are_refused():
    refused(ResearchConfig, seed=2**64, named="seed", came=str(2**64))
    assert build_plan(q, k, SMALL.replace(seed=2**63 - 1)).density().isfinite().all()


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
    refused(park_attention, q, k, v, SMALL, scale=scale, **named)
    refused(build_plan, q, k, SMALL, scale=scale, **named)
    refused(park_attention, q, k, v, SMALL, plan=build_plan(q, k, SMALL), scale=scale, **named)


def test_the_advice_for_a_singular_metric_names_the_config_field():
    one_direction = torch.ones_like(q)
    with pytest.raises(ValueError, match="set metric_root='sqrt'"):
        build_plan(one_direction, k, SMALL.replace(alpha=0.0, epsilon=1e-30))


@pytest.mark.parametrize("path", ["", None, 5, "a\0b"])
def test_a_path_that_is_none_is_refused(path):
    refused(Plan.load, path, named="path", came=repr(path), error=TypeError)
    refused(build_plan(q, k, SMALL).save, path, named="path", came=repr(path), error=TypeError)


@pytest.mark.parametrize(
    "device,error", [("meta", TypeError), ("x", TypeError), (None, TypeError), ("cuda:99", ValueError)]
)
def test_a_device_that_is_not_here_is_refused(tmp_path, device, error):
    build_plan(q, k, SMALL).save(tmp_path / "plan")
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
    build_plan(q, k, SMALL).save(path)
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


@pytest.mark.parametrize("wrong", ["dense", 5, {}, SMALL], ids=["text", "number", "mapping", "config"])
def test_a_plan_or_start_that_is_none_is_refused(wrong):
    refused(park_attention, q, k, v, SMALL, plan=wrong, named="plan", came="", error=TypeError)
    refused(build_plan, q, k, SMALL, start=wrong, named="start", came="", error=TypeError)


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
