"""paper, quality, fast and turbo, for every model."""

import pytest
import torch

import tiny_pipelines as tiny
from parkattn import ParkConfig, build_plan, disable, enable, make_method, park_attention
from parkattn.anchors import anchor_count, anchor_steps
from parkattn.methods import configured_method, method_entry
from parkattn.models import SIZES, row_for
from parkattn.ops.attend.definition import dense_attention
from parkattn.settings import MODEL_NAMES, KeyMetric
from parklab.research import ResearchConfig, studied_entry

MODELS = [None, *ParkConfig.PRESETS]


@pytest.mark.parametrize("model", MODELS)
def test_paper_is_the_preset_of_the_model_alone(model):
    assert ParkConfig.profile("paper", model=model) == ParkConfig.for_model(model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["quality", "fast", "turbo"])
def test_a_profile_changes_what_is_kept_and_when_but_no_blocks(name, model):
    profile, paper = ParkConfig.profile(name, model=model), ParkConfig.profile("paper", model=model)
    changed = {field for field, value in profile.to_dict().items() if value != paper.to_dict()[field]}
    assert {"compensate", "residual_rank", "anchors", "top_p"} <= changed
    assert profile.counts(75_600, 75_600) == paper.counts(75_600, 75_600)


def test_fast_has_fewer_anchors_and_keeps_less_than_quality():
    fast, quality, turbo = (ParkConfig.profile(name) for name in ("fast", "quality", "turbo"))
    assert fast.anchors < quality.anchors and fast.top_p < quality.top_p
    assert turbo == fast.replace(top_p=(*fast.top_p, fast.top_p[0]))


@pytest.mark.parametrize("name", list(ParkConfig.PROFILES))
def test_a_profile_is_accepted_where_a_presets_name_is(name):
    made = configured_method("park", name, model="hunyuanvideo", top_p=0.45)
    assert made.config == ParkConfig.profile(name, model="hunyuanvideo", top_p=0.45)
    assert made.config.counts(115_200, 115_200)[:2] == (128, 1024)


def test_a_presets_name_still_is_the_preset():
    assert configured_method("park", "hunyuanvideo").config == ParkConfig.preset("hunyuanvideo")


def test_an_unknown_name_is_answered_with_profiles_and_presets():
    with pytest.raises(
        ValueError, match=r"profile: expected one of fast, hunyuanvideo, paper, quality, .*did you mean fast"
    ):
        configured_method("park", "fats")


def test_ablations_have_the_profiles_of_park():
    made, park = configured_method("park-no-qrkc", "fast").config, ParkConfig.profile("fast", model=None)
    assert (made.to_dict(), made.metric) == (park.to_dict(), KeyMetric(key_metric="euclidean"))
    studied = configured_method(studied_entry("park-no-qrkc"), "fast").config
    assert studied == ResearchConfig.profile("fast", key_metric="euclidean")


def test_a_profile_survives_a_record():
    config = ParkConfig.profile("quality", model="wan2.1-14b")
    assert ParkConfig.from_dict(config.to_dict()) == config == make_method("park", config.to_dict()).config


@pytest.mark.parametrize("experts", [1, 2])
def test_a_pipeline_runs_a_profile_with_guidance_and_says_what_was_an_anchor(experts):
    """Two experts: the second begins with an anchor of its own, because it has no plan."""
    pipe = tiny.wan(experts=experts)
    stock = tiny.run_wan(pipe, steps=8, guidance_scale=3.0)
    with enable(pipe, "quality", query_clusters=2, key_clusters=4) as session:
        out, report = tiny.run_wan(pipe, steps=8, guidance_scale=3.0), session.summary()
        wanted = set(anchor_steps(anchor_count(ParkConfig.profile("quality"), 8), 8))
        assert wanted <= set(report.steps["anchor"]) and len(report.steps["anchor"]) <= len(wanted) + experts - 1
        # in 8 steps plans do not reach from anchor to anchor
        assert report.calls["dense"] == 0 < report.calls["refresh"]
        assert report.peak_state_bytes > 0 and report.state_bytes == 0
    assert out.isfinite().all() and not torch.equal(out, stock)


def test_padded_text_keeps_its_residual():
    pipe = tiny.hunyuan()
    stock = tiny.run_hunyuan(pipe, steps=6)
    with enable(pipe, "fast", query_clusters=2, key_clusters=4, top_p=1.0) as session:
        out, report = tiny.run_hunyuan(pipe, steps=6), session.summary()
    # everything is kept: anchors, plans and residuals of zero change nothing but rounding
    torch.testing.assert_close(out, stock, rtol=1e-3, atol=1e-3)
    assert report.calls["anchor"] > 0 and report.calls["reuse"] > 0


def test_a_budget_of_ones_own_holds_for_every_plan():
    for config in (ParkConfig, ResearchConfig):
        shipped, turbo = config.profile("fast"), config.profile("turbo")
        assert shipped.shares == (0.3, 0.7, None) and turbo.shares == (0.3, 0.7, 0.3)
        for own in (config.profile("fast", top_p=0.6), shipped.replace(top_p=0.6), turbo.replace(top_p=0.6)):
            assert own.shares == (0.6, None, None) and own.budget == "error"
        for own in (config.profile("turbo", anchors=None), turbo.replace(anchors=None)):
            assert own.shares == (0.3, None, None)
    with pytest.raises(ValueError, match="refresh_falls: expected False without refresh_top_p"):
        ResearchConfig(refresh_falls=True)
    with pytest.raises(ValueError, match="refresh_top_p: expected None beside top_k"):
        ResearchConfig(top_p=None, top_k=0.1, refresh_top_p=0.5)


@pytest.mark.parametrize("share", [(0.5,), (0.5, 0.6, 0.7, 0.8), (0.5, 0.0), (0.5, "0.6"), ()])
def test_shares_of_a_run_are_two_or_three_numbers(share):
    with pytest.raises((TypeError, ValueError), match=r"^top_p: expected"):
        ParkConfig(top_p=share, anchors=4)


def test_a_pair_is_for_a_long_and_for_a_short_video():
    config = ParkConfig(residual_rank=(12, 32), query_clusters=(40, 10), key_clusters=[90, None])
    assert (config.rank_for(16_384), config.rank_for(16_383)) == (12, 32)
    assert config.counts(16_384, 16_384)[:2] == (40, 90)
    assert config.counts(1_300, 1_300)[:2] == (10, 1_300 // 130)
    assert ParkConfig.from_dict(config.to_dict()) == config
    for wrong in ((12,), (1, 2, 3), (12, None), (12, -1)):
        with pytest.raises((TypeError, ValueError), match=r"^residual_rank: expected"):
            ParkConfig(residual_rank=wrong)


@pytest.mark.parametrize("rank", [0, 8, (8, 16), (0, 0), (4, 0)])
@pytest.mark.parametrize("config", [ParkConfig, ResearchConfig])
def test_a_rank_set_on_a_profile_holds_in_short_videos_too(config, rank):
    long, short = rank if isinstance(rank, tuple) else (rank, rank)
    for made in (config.profile("fast", residual_rank=rank), config.profile("fast").replace(residual_rank=rank)):
        assert (made.rank_for(16_384), made.rank_for(16_383)) == (long, short)


@pytest.mark.parametrize("pair", [(None, None), (1_024, None), (None, 8), (20, 8)])
def test_the_laboratory_means_the_same_by_every_pair_of_blocks(pair):
    asked = ParkConfig(query_clusters=pair, key_clusters=pair)
    for tokens in (16_383, 16_384):
        assert ResearchConfig.of(asked).counts(tokens, tokens) == asked.counts(tokens, tokens)


def test_one_number_under_two_names_is_refused():
    for twice in (
        {"residual_rank": (8, 16), "short_residual_rank": 4},
        {"top_p": (0.3, 0.7), "refresh_top_p": 0.5, "anchors": 7},
    ):
        with pytest.raises(ValueError, match=rf"^{list(twice)[1]}: expected None beside {next(iter(twice))}=\(.*got"):
            ResearchConfig(**twice)
    with pytest.raises(ValueError, match="noise_tau: expected top_p"):
        ResearchConfig(top_p=(0.3, 0.7, 0.3), anchors=7, noise_tau=0.9)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", list(ParkConfig.PROFILES))
def test_the_laboratory_writes_every_number_of_a_profile_out_and_means_the_same(name, model):
    asked, studied = ParkConfig.profile(name, model=model), ResearchConfig.profile(name, model=model)
    assert ResearchConfig.of(asked) == studied
    same = ("shares", "own_dense", "share_branches", "compensate", "anchors", "budget", "query_tile")
    assert [getattr(asked, field) for field in same] == [getattr(studied, field) for field in same]
    for tokens in (1_000, 75_600):
        assert asked.rank_for(tokens) == studied.rank_for(tokens)
        assert asked.counts(tokens, tokens) == studied.counts(tokens, tokens)


def test_top_k_in_a_profile_is_a_share_of_each_rows_blocks():
    shipped = ParkConfig.profile("fast")
    for own in (ParkConfig.profile("fast", top_p=None, top_k=0.1), shipped.replace(top_p=None, top_k=0.1)):
        assert own.budget == "row" and own.shares == (None, None, None) and own.query_tile == shipped.query_tile
    with pytest.raises(ValueError, match="budget: expected row beside top_k"):
        shipped.replace(top_p=None, top_k=0.1, budget="error")


def test_a_short_video_has_fewer_blocks_however_the_config_is_given():
    for tokens in (1_920, 75_600):
        assert ParkConfig(top_p=0.8).counts(tokens, tokens) == ParkConfig.for_model("wan2.1-14b", top_p=0.8).counts(
            tokens, tokens
        )
    assert ParkConfig.for_model("wan2.1-14b").counts(1_920, 1_920)[:2] < (128, 512)


def test_enable_takes_quality_and_leaves_other_methods_alone():
    pipe = tiny.wan()
    model = row_for(pipe.transformer).preset
    with enable(pipe) as session:
        assert session.method.config == ParkConfig.profile("quality", model=model)
    with enable(pipe, top_p=0.8) as session:
        assert session.method.config == ParkConfig.profile("quality", model=model, top_p=0.8)
    with enable(pipe, method="park-no-pama") as session:
        assert session.method.config.anchors is None
    with pytest.raises(ValueError, match="dense_fraction: expected none with the profile quality"):
        enable(pipe, dense_fraction=0.4)
    enable(pipe, "paper", dense_fraction=0.4)
    disable(pipe)


@pytest.mark.parametrize("field", ["dense_fraction", "dense_steps", "refresh_interval", "refresh_steps"])
def test_a_dense_prefix_beside_spread_anchors_is_refused_and_not_dropped(field):
    value = {"dense_fraction": 0.3, "dense_steps": 2, "refresh_interval": 5, "refresh_steps": (3,)}[field]
    for name in ("quality", "fast"):
        with pytest.raises(ValueError, match=f"{field}: expected none with the profile {name}"):
            ResearchConfig.profile(name, **{field: value})
        assert getattr(ResearchConfig.profile(name, anchors=None, **{field: value}), field) == value
    assert getattr(ResearchConfig.profile("paper", **{field: value}), field) == value


@pytest.mark.parametrize("name", list(ParkConfig.PROFILES))
@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.3])
def test_with_p_of_one_every_block_is_kept_whatever_the_sign_of_the_scale(name, scale):
    q, k, v = torch.randn(3, 1, 2, 700, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    config = ParkConfig.profile(name, top_p=1.0)
    assert (build_plan(q, k, config, scale=scale).density() == 1).all()
    torch.testing.assert_close(park_attention(q, k, v, config, scale=scale), dense_attention(q, k, v, scale=scale))
    if name != "paper":
        # a spread of scores is that of their magnitudes: -q and -scale are q and scale
        less = ParkConfig.profile(name)
        assert torch.equal(build_plan(-q, k, less, scale=-scale).mask, build_plan(q, k, less, scale=scale).mask)


@pytest.mark.parametrize(
    "given,named",
    [
        ({"anchors": 6, "dense_fraction": 0.9}, "dense_fraction"),
        ({"anchors": 6, "refresh_interval": 1}, "refresh_interval"),
        ({"top_p": (0.3, 0.5)}, "top_p"),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused_however_it_is_given(given, named):
    pipe = tiny.wan()
    quality = ParkConfig.profile("quality")
    told = {"anchors": None, **given} if named == "top_p" else given
    for give in (
        lambda: ParkConfig(**given),
        lambda: enable(pipe, given),
        lambda: quality.replace(**told),
        lambda: enable(pipe, quality, **told),
    ):
        with pytest.raises(ValueError, match=f"^{named}: expected"):
            give()
    disable(pipe)


def test_without_stand_ins_the_budget_by_error_is_that_by_mass():
    q, k, _ = torch.randn(3, 1, 2, 700, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    plans = [
        build_plan(q, k, ResearchConfig.profile("fast", compensate=False, budget=name)) for name in ("error", "mass")
    ]
    assert torch.equal(plans[0].mask, plans[1].mask)


def test_a_floor_beside_top_k_is_refused():
    with pytest.raises(ValueError, match=r"floor: expected 0 beside top_k=0\.2"):
        ResearchConfig(top_p=None, top_k=0.2, floor=0.5)


@pytest.mark.parametrize("name", ["hunyuan-video", "Hunyuan_Video", "HUNYUANVIDEO"])
def test_a_models_name_may_be_cased_and_joined_as_one_likes(name):
    assert ParkConfig.for_model(name) == ParkConfig.for_model("hunyuanvideo") != ParkConfig.for_model("wan2.1-14b")
    assert ParkConfig.profile("quality", model=name).counts(115_200, 115_200)[:2] == (128, 1024)


@pytest.mark.parametrize("method", ["park", "svg2", "dense"])
@pytest.mark.parametrize("name", ["hunyuan", "", [], {}, 5])
def test_a_model_that_nobody_knows_is_refused_and_not_taken_for_another(method, name):
    with pytest.raises(ValueError, match=r"^model: expected one of hunyuanvideo, wan2.1-1.3b"):
        method_entry(method).config.for_model(name)
    assert set(MODEL_NAMES) == set(SIZES)


@pytest.mark.parametrize("method", ["park", "svg2", "dense"])
@pytest.mark.parametrize("name", [[], {}, None, 5, "swift"])
def test_a_profile_that_nobody_knows_is_refused_by_that_word(method, name):
    config = method_entry(method).config
    for give in (config.named, config.profile):
        with pytest.raises(ValueError, match=r"^profile: expected"):
            give(name)


@pytest.mark.parametrize("word", ["profile", "preset"])
def test_a_profile_that_is_given_by_that_word_is_answered_with_where_it_goes(word):
    for give in (lambda: enable(tiny.wan(), **{word: "fast"}), lambda: make_method("park", **{word: "fast"})):
        with pytest.raises(ValueError, match=rf"got {word}; pass the name of a profile or preset as config"):
            give()


def test_a_method_takes_fields_by_name_as_enable_does():
    assert make_method("park", compensate=True).config == ParkConfig(compensate=True)
    assert make_method("park", {"top_p": 0.5}, compensate=True).config == ParkConfig(top_p=0.5, compensate=True)
    for give in (lambda: make_method("dense", top_p=0.5), lambda: enable(tiny.wan(), method="dense", top_p=0.5)):
        with pytest.raises(ValueError, match="expected fields out of tolerance, got top_p; correct or remove"):
            give()
