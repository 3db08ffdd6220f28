"""The properties that define each method, checked on its slow restatement, so that the restatements can be trusted."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cosine_similarity, pad, scaled_dot_product_attention

from parklab.baselines.svg import band_reach
from restated import cases as problems
from restated import sparge, svg, svg2, svoo, xattention
from restated.cases import Case, cases, settings_for
from restated.problem import expect_roles

METHODS = {"sparge": sparge, "xattention": xattention, "svg": svg, "svg2": svg2, "svoo": svoo}
every_method = pytest.mark.parametrize("name", METHODS)


def run(name, case, **settings):
    return METHODS[name].restate(case.q, case.k, case.v, **case.inputs, **settings)


def generated(name, count, seed):
    for case in cases(count, seed):
        yield case, settings_for(name, case)


def top_p(mass, p, crossing):
    """Keys by descending mass while the sum stays within p: before each key (crossing key in) or after it (out)."""
    ordered, order = mass.sort(dim=-1, descending=True)
    running = ordered.cumsum(-1)
    kept = running - ordered <= p if crossing else running <= p
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter(-1, order, kept)


@every_method
def test_text_sees_and_is_seen_by_all_and_padding_by_nobody(name):
    for case, settings in generated(name, 8, seed=1):
        expect_roles(run(name, case, **settings).allowed, case.text, case.key_valid)


@every_method
def test_output_is_attention_over_the_allowed_keys(name):
    for case, settings in generated(name, 8, seed=2):
        result = run(name, case, **settings)
        expected = scaled_dot_product_attention(case.q, case.k, case.v, attn_mask=result.allowed, scale=case.scale)
        # a convex combination of values: rounding of a few hundred additions in float64
        torch.testing.assert_close(result.out, expected, rtol=0, atol=1e-12 * float(case.v.abs().max()))


@every_method
def test_text_and_padding_values_change_nothing_between_video_tokens(name):
    for case, settings in generated(name, 7, seed=3):
        other = {part: getattr(case, part).clone() for part in "qkv"}
        for b, video in enumerate(case.video):
            rest = [i for i in range(case.q.shape[2]) if i not in video]
            for x in other.values():
                x[b, :, rest] = 7 - 3 * x[b, :, rest]
        changed = replace(case, **other)
        before, after = run(name, case, **settings), run(name, changed, **settings)
        assert torch.equal(before.allowed, after.allowed)


@every_method
def test_batch_elements_and_heads_do_not_know_each_other(name):
    for case, settings in generated(name, 7, seed=4):
        whole = run(name, case, **settings)
        b, h = case.q.shape[0] - 1, case.q.shape[1] - 1
        alone = {part: getattr(case, part)[b : b + 1, h : h + 1] for part in "qkv"}
        of_head = {key: value[b : b + 1, h : h + 1] for key, value in settings.items() if key.startswith("initial")}
        if isinstance(settings.get("profile"), list):
            missing = any(map(math.isnan, settings["profile"]))
            of_head["profile"] = None if missing else settings["profile"][h : h + 1]
        valid = None if case.key_valid is None else case.key_valid[b : b + 1]
        one = run(name, replace(case, **alone, key_valid=valid), **{**settings, **of_head})
        assert torch.equal(one.allowed[0, 0], whole.allowed[b, h])


@every_method
def test_cases_are_decided_by_more_than_rounding(name):
    for case, settings in generated(name, 7, seed=5):
        noise = 1 + 1e-9 * problems.normal(problems.Random(0), *case.q.shape)
        moved = {part: getattr(case, part) * noise for part in "qkv"}
        assert torch.equal(run(name, case, **settings).allowed, run(name, replace(case, **moved), **settings).allowed)


ONE_TOKEN_EACH = {
    "sparge": {"block_q": 1, "block_k": 1, "cdfthreshd": 0.8},
    "xattention": {"block": 1, "stride": 1, "threshold": 0.8, "keep_sink": False},
    "svg2": {"p": 0.8, "min_kc_ratio": 0.0},
    "svoo": {"p": 0.8, "min_kc_ratio": 0.0, "iters": 1},
}


@pytest.mark.parametrize("name", ONE_TOKEN_EACH)
def test_with_one_token_per_block_or_cluster_it_is_exact_top_p(name):
    for case in map(Case.first_element, cases(6, seed=7)):
        tokens = torch.tensor(case.video[0]).expand(1, case.q.shape[1], -1)
        initial = {"initial_queries": tokens, "initial_keys": tokens} if name in ("svg2", "svoo") else {}
        result = run(name, case, **ONE_TOKEN_EACH[name], **initial)
        for b, h, _, allowed in case.heads(result):
            mass = case.video_logits(b, h).softmax(-1)
            assert torch.equal(allowed, top_p(mass, 0.8, crossing=name != "sparge"))


def test_cases_cover_what_they_promise():
    drawn = list(cases(200, seed=16))
    assert {case.kind for case in drawn} == set(problems.KINDS)
    assert {case.q.shape[0] for case in drawn} == {1, 2}
    assert {case.q.shape[1] for case in drawn} == {1, 2, 3}
    assert len({(case.text is None, case.key_valid is None) for case in drawn}) == 4
    assert any(case.text is not None and case.text.start == 0 for case in drawn)
    assert any(case.text is not None and case.text.start > 0 for case in drawn)
    assert any(len({len(video) for video in case.video}) == 2 for case in drawn), "no batch with unequal padding"
    again = list(cases(200, seed=16))
    assert all(torch.equal(a.q, b.q) for a, b in zip(drawn, again, strict=True))


def test_sparge_top_k_keeps_the_stated_number_of_best_blocks():
    for case in cases(6, seed=8):
        result = run("sparge", case, block_q=8, block_k=4, topk=0.5, simthreshd1=-1.1)
        for _, _, head, _ in case.heads(result):
            count = head["scores"].shape[1]
            assert (head["mask"].sum(1) == max(1, count // 2)).all()
            least_kept = head["scores"].masked_fill(~head["mask"], 2).amin(1)
            best_left = head["scores"].masked_fill(head["mask"], -1).amax(1)
            assert (least_kept >= best_left).all()


def test_sparge_computes_incoherent_rows_and_columns_whole():
    a, b = torch.eye(8, dtype=torch.float64)[:2]
    # key blocks of 2: coherent and far, incoherent (opposite directions), coherent and near, coherent and far
    k = torch.stack([-9 * a, -9 * a, 9 * b, -9 * b, 9 * a, 9 * a, -9 * a, -9 * a])
    q = torch.stack([a, a, a, a, a, -a, a, a])  # the third query block is incoherent
    x = {"q": q[None, None], "k": k[None, None], "v": k[None, None]}
    x |= {"grid": (2, 2, 2), "text": None, "key_valid": None, "scale": 1.0}
    result = sparge.restate(**x, block_q=2, block_k=2, smooth_k=False, simthreshd1=0.5, cdfthreshd=0.9)
    expected = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 0]], dtype=torch.bool)
    assert torch.equal(result.notes["heads"][0][0]["mask"], expected)
    scores = result.notes["heads"][0][0]["scores"]
    assert (scores[:, 1] == 0).all() and torch.allclose(scores.sum(1), torch.ones(4, dtype=torch.float64))


def test_sparge_with_smoothing_ignores_a_constant_added_to_the_keys():
    for case, settings in generated("sparge", 6, seed=10):
        moved = replace(case, k=case.k + 2.5)
        settings["smooth_k"] = True
        assert torch.equal(run("sparge", case, **settings).allowed, run("sparge", moved, **settings).allowed)


def test_sparge_sink_is_the_first_video_block():
    for case, settings in generated("sparge", 6, seed=11):
        result = run("sparge", case, **{**settings, "attention_sink": True})
        for _, _, _, allowed in case.heads(result):
            assert allowed[:, : settings["block_k"]].all()


def test_xattention_scores_are_antidiagonals_of_the_logits():
    for case, settings in generated("xattention", 6, seed=14):
        stride = settings["stride"]
        result = run("xattention", case, **settings)
        for b, h, head, _ in case.heads(result):
            missing = -len(case.video[b]) % stride
            logits = pad(case.video_logits(b, h), (0, missing, 0, missing))
            tiles = logits.unflatten(1, (-1, stride)).unflatten(0, (-1, stride))
            expected = tiles.flip(1).diagonal(dim1=1, dim2=3).sum(-1) / (stride * settings["norm"])
            torch.testing.assert_close(head["logits"], expected, rtol=1e-12, atol=1e-12)


def test_xattention_block_scores_of_a_row_sum_to_its_number_of_query_groups():
    for case, settings in generated("xattention", 6, seed=15):
        result = run("xattention", case, **settings)
        for b, _, head, _ in case.heads(result):
            tokens = torch.arange(len(case.video[b]))
            groups = torch.bincount(tokens[:: settings["stride"]] // settings["block"]).double()
            torch.testing.assert_close(head["scores"].sum(1), groups, rtol=1e-12, atol=0)
            kept = (head["scores"] * head["mask"]).sum(1)
            assert (kept >= settings["threshold"] * groups - 1e-12).all()


def test_xattention_always_keeps_the_best_block_and_by_default_the_first():
    for case in cases(4, seed=17):
        alone = run("xattention", case, block=8, stride=4, threshold=0.0, keep_sink=False)
        both = run("xattention", case, block=8, stride=4, threshold=0.0)
        for (_, _, head, _), (_, _, default, _) in zip(case.heads(alone), case.heads(both), strict=True):
            assert (head["mask"].sum(1) == 1).all()
            assert default["mask"][:, 0].all()
            assert torch.equal(default["mask"][:, 1:], head["mask"][:, 1:])


def test_svg_width_is_the_published_one_and_pays_for_text_first():
    assert round(svg.band_width(0.30, 0, 75_600) / 3_600, 2) == 3.43
    for density, text, tokens in ((0.25, 256, 118_800), (0.4, 9, 60), (1.0, 9, 60)):
        length = text + tokens
        band = length**2 - (length - svg.band_width(density, text, tokens)) ** 2
        assert math.isclose(band + 2 * length * text, density * length**2)
    # so with text a density of 1 leaves pairs out, here as in the package
    assert math.ceil(svg.band_width(1.0, 9, 60)) == band_reach(1.0, 9, 60, 1, "wan") < 59


@pytest.mark.parametrize(("layout", "half"), [("wan", 56), ("hunyuan", 42)])
def test_svg_profile_band_is_the_published_number_of_blocks_wide(layout, half):
    near, far = 4_000 + 128 * (half - 1), 4_000 + 128 * half
    assert svg.in_profile(4_000, near, block=128, per_frame=3_600, layout=layout)
    assert not svg.in_profile(4_000, far, block=128, per_frame=3_600, layout=layout)
    assert svg.in_profile(400_000, 0, block=128, per_frame=3_600, layout=layout) == (layout == "wan")


def test_svg_temporal_heads_attend_the_spatial_band_of_the_reordered_video():
    for case in cases(12, seed=19):
        case = replace(case, key_valid=None)
        frames, places = case.grid[0], case.grid[1] * case.grid[2]
        outside = torch.tensor(case.video[0])
        settings = {"sparsity": 0.2, "block": 2, "rows": range(0, frames * places, 5)}
        reordered = torch.arange(frames * places).view(frames, places).T.flatten()
        result = run("svg", case, **settings)
        for _, _, head, allowed in case.heads(result):
            own = reordered if head["temporal"] else torch.arange(len(outside))
            width = result.notes["width"]
            distance = (torch.arange(len(own))[:, None] - torch.arange(len(own))).abs()
            if case.text is None:
                band = (distance <= 2 * math.ceil(width / 2)) | (torch.arange(len(own)) < places)
            else:
                band = distance < max(1, 2 * math.floor(width / 2))
            assert torch.equal(allowed[own][:, own], band)


def test_svg_profile_that_sees_everything_in_both_orders_is_spatial():
    for case in cases(6, seed=20):
        result = run("svg", case, rows=[0, 7], block=128)
        assert not any(head["temporal"] for _, _, head, _ in case.heads(result))


def test_svg2_centroids_are_means_and_iterations_never_raise_the_distance():
    for case, settings in generated("svg2", 6, seed=22):
        last = None
        for iterations in (1, 2, 4):
            distances = []
            for b, h, head, _ in case.heads(run("svg2", case, **{**settings, "iters": iterations})):
                tokens, labels = case.k[b, h, case.video[b]], torch.tensor(head["key_labels"])
                for j in labels.unique():
                    mean = tokens[labels == j].mean(0)
                    torch.testing.assert_close(head["key_centroids"][j], mean, rtol=1e-12, atol=1e-12)
                distances.append((tokens - head["key_centroids"][labels]).square().sum())
            assert last is None or (torch.stack(distances) <= last * (1 + 1e-12)).all()
            last = torch.stack(distances)


def test_svg2_empty_clusters_keep_their_centroid_and_weigh_nothing():
    for case in map(Case.first_element, cases(4, seed=23)):
        twice = torch.tensor(case.video[0][:3] + case.video[0][:1]).expand(1, case.q.shape[1], -1)
        result = run("svg2", case, initial_queries=twice, initial_keys=twice, iters=1)
        for _, h, head, _ in case.heads(result):
            assert head["sizes"][3] == 0
            assert torch.equal(head["key_centroids"][3], case.k[0, h, case.video[0][0]])
            assert (head["scores"][:, 3] == 0).all()


def test_svg2_scores_are_the_softmax_with_log_sizes():
    for case, settings in generated("svg2", 6, seed=24):
        scale = case.q.shape[-1] ** -0.5 if case.scale is None else case.scale
        for _, _, head, _ in case.heads(run("svg2", case, **settings)):
            logits = head["query_centroids"] @ head["key_centroids"].T * scale
            expected = (logits + torch.tensor(head["sizes"]).double().log()).softmax(-1)
            torch.testing.assert_close(head["scores"], expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["svg2", "svoo"])
def test_cluster_maps_keep_the_crossing_block_and_the_floor(name):
    for case, settings in generated(name, 8, seed=25):
        result = run(name, case, **settings)
        for _, h, head, _ in case.heads(result):
            count = head["scores"].shape[1]
            ratio = settings["min_kc_ratio"]
            profile = settings.get("profile")
            if profile is not None and not any(map(math.isnan, profile)):
                low, high = settings["floor_clip"]
                ratio = sorted((low, profile[h], high))[1]
            by_mass = top_p(head["scores"], settings["p"], crossing=True)
            by_rank = head["scores"].argsort(dim=1, descending=True, stable=True).argsort(dim=1) < int(ratio * count)
            assert torch.equal(head["mask"], by_mass | by_rank)


def test_svoo_labels_are_nearest_by_cosine_of_the_responses():
    for case, settings in generated("svoo", 8, seed=29):
        result = run("svoo", case, **{**settings, "iters": 1})
        for b, h, head, _ in case.heads(result):
            q, k = case.q[b, h], case.k[b, h]
            queries, keys = q[settings["initial_queries"][b, h]], k[settings["initial_keys"][b, h]]
            updated = head["key_centroids"]
            for x, start, others, labels in ((k, keys, queries, "key_labels"), (q, queries, updated, "query_labels")):
                cosine = cosine_similarity((x[case.video[b]] @ others.T)[:, None], (start @ others.T)[None], dim=-1)
                chosen = cosine.gather(1, torch.tensor(head[labels])[:, None])[:, 0]
                assert (chosen >= cosine.amax(1) - 1e-12).all()


def test_svoo_reuse_keeps_the_clusters_and_only_the_floor_can_change_the_map():
    for case, settings in generated("svoo", 6, seed=30):
        first = run("svoo", case, **settings)
        later = replace(case, q=-case.q.flip(2), k=0.3 * case.k.flip(2))
        rest = {key: value for key, value in settings.items() if not key.startswith("initial")}
        assert torch.equal(run("svoo", later, earlier=first, **rest).allowed, first.allowed)
        rest |= {"profile": [1.0] * case.q.shape[1], "floor_clip": (0.0, 1.0)}
        higher = run("svoo", later, earlier=first, **rest)
        assert all(case.between_video(higher.allowed, b).all() for b in range(len(case.q)))


def test_svoo_reclusters_at_the_published_steps():
    assert [step for step in range(1, 51) if svoo.reclusters(step, 11, 20)] == [11, 31]
    assert [step for step in range(1, 51) if svoo.reclusters(step, 6, 50)] == [6]


def test_svoo_required_density_is_the_smallest_share_of_keys_with_the_mass():
    for case in cases(5, seed=31):
        density = svoo.required_density(case.q, case.k, text=case.text, key_valid=case.key_valid, scale=case.scale)
        for b in range(len(case.q)):
            for h in range(case.q.shape[1]):
                counts = (case.video_logits(b, h).softmax(-1).sort(descending=True)[0].cumsum(-1) < 0.95).sum(-1) + 1
                expected = counts.double().mean() / len(case.video[b])
                assert math.isclose(float(density[b, h]), float(expected), rel_tol=1e-12)
