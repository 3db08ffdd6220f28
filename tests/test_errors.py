"""Bad input gets one line that names the argument, what was expected, what came and what to do."""

import re

import pytest
import torch

import strategies
from parkattn.methods import make_method
from parkattn.ops.cluster.definition import cluster_keys, kmeans, metric_root, stabilise
from parkattn.ops.importance.definition import select_top_k, select_top_p
from parkattn.park import ParkConfig, build_plan, park_attention
from parkattn.plan import Plan
from parkattn.settings import KeyMetric
from parklab.research import ResearchConfig

SMALL = ResearchConfig(query_clusters=2, key_clusters=3, kmeans_iterations=2)
CHECKED = SMALL.replace(check_finite=True)
ADVICE = re.compile(
    r"\b(add|build|call|cast|check|choose|convert|correct|count|drop|give|look|lower|make|move|pass|pick|raise|remove"
    r"|repeat|reshape|set|skip|squeeze|transpose|use|write|did you mean)\b"
)


def tensors(queries=7, keys=7, dim=16, batch=2, heads=2):
    return strategies.gaussian_qkv(0, batch, heads, queries, keys, dim)


def refused(call, *arguments, named, came, error=ValueError, **options):
    """The call raises `error` with a message that holds all four parts on one line."""
    with pytest.raises(error) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(rf"\b{re.escape(named)}\b", message), message
    assert "expected" in message, message
    assert came in message, message
    assert ADVICE.search(message), message


# Tensors --------------------------------------------------------------------------------------------------

q, k, v = tensors()
MISFITS = {
    "k with fewer heads": ((q, k[:, :1], v[:, :1]), "k", "[2, 1, 7, 16]"),
    "k of another batch": ((q, k[:1], v[:1]), "k", "[1, 2, 7, 16]"),
    "k of another head dim": ((q, k[..., :8], v), "k", "[2, 2, 7, 8]"),
    "v with fewer tokens": ((q, k, v[:, :, :5]), "v", "5"),
    "v with fewer heads": ((q, k, v[:, :1]), "v", "[2, 1, 7, 16]"),
    "q without a batch": ((q[0], k, v), "q", "[2, 7, 16]"),
    "k without a batch": ((q, k[0], v), "k", "[2, 7, 16]"),
    "v without a batch": ((q, k, v[0]), "v", "[2, 7, 16]"),
    "q with one axis too many": ((q[None], k, v), "q", "[1, 2, 2, 7, 16]"),
    "q without tokens": ((q[:, :, :0], k, v), "q", "[2, 2, 0, 16]"),
    "k without tokens": ((q, k[:, :, :0], v[:, :, :0]), "k", "[2, 2, 0, 16]"),
    "k on another device": ((q, k.to("meta"), v), "k", "meta"),
    "v on another device": ((q, k, v.to("meta")), "v", "meta"),
}
WRONG_TYPES = {
    "k of another dtype": ((q, k.float(), v), "k", "float32"),
    "v of another dtype": ((q, k, v.half()), "v", "float16"),
    "whole-number q": ((q.int(), k.int(), v.int()), "q", "int32"),
    "complex q": ((q.to(torch.complex128), k, v), "q", "complex128"),
    "a list for q": ((q.tolist(), k, v), "q", "list"),
    "None for v": ((q, k, None), "v", "None"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_tensors_that_do_not_fit_are_refused_by_name(case):
    arguments, named, came = MISFITS[case]
    refused(park_attention, *arguments, SMALL, named=named, came=came)
    if named != "v":
        refused(build_plan, *arguments[:2], SMALL, named=named, came=came)


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_tensors_of_the_wrong_type_are_refused_by_name(case):
    arguments, named, came = WRONG_TYPES[case]
    refused(park_attention, *arguments, SMALL, named=named, came=came, error=TypeError)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("named", ["q", "k"])
@pytest.mark.parametrize("reused", [False, True])
def test_checked_mode_refuses_nan_and_inf(named, bad, reused):
    q, k, v = tensors()
    plan = build_plan(q, k, CHECKED) if reused else None
    {"q": q, "k": k}[named][1, 0, 3, 2] = bad
    refused(park_attention, q, k, v, CHECKED, plan=plan, named=named, came="1 ")
    refused(build_plan, q, k, CHECKED, named=named, came="1 ")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("metric", ["query-response", "euclidean"])
@pytest.mark.parametrize("root", ["cholesky", "sqrt"])
@pytest.mark.parametrize("side", ["q", "k", "both"])
def test_unchecked_nan_and_inf_finish_with_labels_in_range(bad, metric, root, side):
    q, k, v = tensors()
    if side != "k":
        q[0, 0, 3, 2] = bad
    if side != "q":
        k[1, 1] = bad
    config = SMALL.replace(key_metric=metric, metric_root=root)
    plan = build_plan(q, k, config)
    for blocks in (plan.queries, plan.keys):
        assert blocks.labels.min() >= 0
        assert blocks.labels.max() < blocks.count
        assert blocks.sizes.sum(-1).eq(7).all()
        assert torch.equal(blocks.order.sort(-1).values, torch.arange(7).expand_as(blocks.order).int())
    out = park_attention(q, k, v, config, plan=plan)
    assert out.shape == q.shape
    assert out[1, 0].isfinite().all()


@pytest.mark.parametrize("root", ["cholesky", "sqrt"])
def test_nan_in_one_head_leaves_the_plans_of_the_others(root):
    q, k, _ = tensors()
    config = SMALL.replace(metric_root=root)
    clean = build_plan(q, k, config)
    q[0, 0, 3, 2] = torch.nan
    spoilt = build_plan(q, k, config)
    for head in ((0, 1), (1, 0), (1, 1)):
        assert torch.equal(spoilt.keys.labels[head], clean.keys.labels[head])
        assert torch.equal(spoilt.mask[head], clean.mask[head])


def test_a_singular_metric_is_refused_also_beside_a_nan():
    metric = torch.stack([torch.zeros(2, 2), torch.full((2, 2), torch.nan)])
    refused(metric_root, metric, named="metric", came="singular")


# Configuration --------------------------------------------------------------------------------------------

BAD_FIELDS = {
    "top_p": [0, 0.0, -0.1, 1.5, float("nan")], "alpha": [-0.01, 1.01, float("nan")], "floor": [-0.1, 1.1],
    "dense_fraction": [-0.2, 1.2], "epsilon": [0.0, -1e-6], "s_min": [0.0, -1.0], "query_clusters": [0, -1],
    "key_clusters": [0, -512], "kmeans_iterations": [0, -3], "refresh_interval": [0, -10], "reference_steps": [0],
    "dense_steps": [-1], "dense_last_steps": [-1], "seed": [-1], "importance": ["centroid"], "key_metric": ["cosine"],
    "metric_root": ["lu"],
}  # fmt: skip
WRONG_FIELD_TYPES = {
    "query_clusters": [2.5, "128", True], "top_p": ["0.9", True], "alpha": [None, "0.05"], "check_finite": [1, "yes"],
    "dense_layers": [3],
}  # fmt: skip


@pytest.mark.parametrize("field,value", [(f, x) for f, values in BAD_FIELDS.items() for x in values])
def test_config_values_out_of_range_are_refused_by_field(field, value):
    refused(ResearchConfig, **{field: value}, named=field, came=str(value))
    refused(ResearchConfig().replace, **{field: value}, named=field, came=str(value))


@pytest.mark.parametrize("field,value", [(f, x) for f, values in WRONG_FIELD_TYPES.items() for x in values])
def test_config_values_of_the_wrong_type_are_refused_by_field(field, value):
    refused(ResearchConfig, **{field: value}, named=field, came=str(value), error=TypeError)


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01])
def test_top_k_ratio_out_of_range_is_refused(ratio):
    refused(ParkConfig, top_p=None, top_k=ratio, named="top_k", came=str(ratio))


def test_top_p_and_top_k_together_are_refused():
    refused(ParkConfig, top_p=0.9, top_k=0.1, named="top_p", came="0.1")
    refused(ParkConfig, top_k=0.1, named="top_k", came="0.9")


def test_neither_top_p_nor_top_k_is_refused():
    refused(ParkConfig, top_p=None, named="top_k", came="None")


def test_unknown_field_is_refused_by_name():
    refused(ParkConfig.from_dict, {"top_q": 0.9}, named="top_q", came="top_q")
    refused(ParkConfig().replace, top_q=0.9, named="top_q", came="top_q")
    refused(ParkConfig.preset, "wan2.1-14b", top_q=0.9, named="top_q", came="top_q")
    with pytest.raises(TypeError, match="top_q"):
        ParkConfig(top_q=0.9)


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        SMALL.top_p = 0.5


def test_unknown_preset_is_refused_with_the_known_ones():
    refused(ParkConfig.preset, "wan3", named="preset", came="wan3")
    with pytest.raises(ValueError, match=r"hunyuanvideo.*wan2\.1-1\.3b"):
        ParkConfig.preset("wan3")


def test_unknown_method_is_refused_with_the_known_ones():
    refused(make_method, "prak", named="method", came="prak")
    with pytest.raises(ValueError, match=r"dense.*park.*did you mean park"):
        make_method("prak")


# Text, padding and plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("span", [slice(0, 8), slice(-2, 3), slice(5, 2), slice(8, 9), slice(0, 7)])
def test_text_outside_the_sequence_or_covering_all_of_it_is_refused(span):
    q, k, v = tensors()
    refused(park_attention, q, k, v, SMALL, text=span, named="text", came=str(span.stop))


@pytest.mark.parametrize("span", [3, (0, 2), "text", slice(0, 6, 2), slice(None, 3), slice("a", 3), slice(0, 2.5)])
def test_text_that_is_no_plain_slice_is_refused(span):
    q, k, v = tensors()
    refused(park_attention, q, k, v, SMALL, text=span, named="text", came=repr(span), error=TypeError)


def test_text_must_fit_the_shorter_of_queries_and_keys():
    q, k, v = tensors(queries=9, keys=5)
    refused(park_attention, q, k, v, SMALL, text=slice(4, 7), named="text", came="7")


BAD_MASKS = {
    "too many keys": (torch.ones(2, 8, dtype=torch.bool), ValueError, "[2, 8]"),
    "another batch": (torch.ones(1, 7, dtype=torch.bool), ValueError, "[1, 7]"),
    "a head axis": (torch.ones(2, 2, 7, dtype=torch.bool), ValueError, "[2, 2, 7]"),
    "numbers": (torch.ones(2, 7), TypeError, "float32"),
    "a list": ([[True] * 7] * 2, TypeError, "list"),
    "another device": (torch.ones(2, 7, dtype=torch.bool, device="meta"), ValueError, "meta"),
    "a row without a valid key": (torch.arange(2)[:, None].expand(2, 7) == 0, ValueError, "1"),
}


@pytest.mark.parametrize("case", BAD_MASKS)
def test_key_valid_that_does_not_fit_is_refused(case):
    mask, error, came = BAD_MASKS[case]
    q, k, v = tensors()
    refused(park_attention, q, k, v, SMALL, key_valid=mask, named="key_valid", came=came, error=error)


@pytest.mark.parametrize("shape", [{"queries": 6}, {"keys": 6}, {"heads": 1}, {"batch": 1}])
def test_a_plan_made_for_other_tensors_is_refused(shape):
    q, k, v = tensors()
    plan = build_plan(*tensors(**shape)[:2], SMALL)
    refused(park_attention, q, k, v, SMALL, plan=plan, named="plan", came=str(next(iter(shape.values()))))


# Operations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1])
def test_clustering_counts_below_one_are_refused(count):
    q, k, _ = tensors()
    refused(kmeans, k, count, named="clusters", came=str(count))
    refused(kmeans, k, 3, iterations=count, named="iterations", came=str(count))
    refused(cluster_keys, k, q, count, named="clusters", came=str(count))


def test_clustering_of_three_axes_is_refused():
    refused(kmeans, tensors()[1][0], 3, named="x", came="[2, 7, 16]")


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_shrinkage_outside_the_unit_interval_is_refused(alpha):
    refused(KeyMetric, alpha=alpha, named="alpha", came=str(alpha))
    refused(stabilise, torch.eye(16)[None, None], alpha=alpha, named="alpha", came=str(alpha))


def test_unknown_root_is_refused():
    refused(metric_root, torch.eye(16)[None, None], "lu", named="root", came="lu")


@pytest.mark.parametrize("bad", [0.0, -0.5, 1.01, float("nan")])
def test_selection_shares_outside_the_unit_interval_are_refused(bad):
    importance = torch.full((1, 1, 2, 4), 0.25)
    refused(select_top_p, importance, bad, named="p", came=str(bad))
    refused(select_top_k, importance, bad, named="ratio", came=str(bad))


def test_unknown_crossing_rule_is_refused():
    refused(select_top_p, torch.full((1, 1, 2, 4), 0.25), 0.5, crossing="maybe", named="crossing", came="maybe")


# Files ----------------------------------------------------------------------------------------------------


def listing(folder):
    return sorted((path.relative_to(folder), path.is_dir()) for path in folder.rglob("*"))


@pytest.mark.parametrize("target", ["missing/plan.safetensors", "file/plan.safetensors", "folder"])
def test_a_plan_that_cannot_be_written_leaves_nothing_behind(tmp_path, target):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").write_text("kept")
    before = listing(tmp_path)
    plan = build_plan(*tensors()[:2], SMALL)
    with pytest.raises(OSError):
        plan.save(tmp_path / target)
    assert listing(tmp_path) == before
    assert (tmp_path / "folder" / "inside").read_text() == "kept"


def test_saving_replaces_a_file_and_leaves_only_that_file(tmp_path):
    path = tmp_path / "plan.safetensors"
    path.write_text("old")
    plan = build_plan(*tensors()[:2], SMALL)
    plan.save(path)
    assert torch.equal(Plan.load(path).mask, plan.mask)
    assert torch.equal(Plan.load(path, plan.mask.device).mask, plan.mask)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.safetensors"]


@pytest.mark.parametrize("content", [b"", b"not a plan"])
def test_loading_what_is_no_plan_names_the_file(tmp_path, content):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.safetensors"):
        Plan.load(path)
