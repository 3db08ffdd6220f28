"""What defines SVG-EAR, SparsePR, Sol-Attn, STA, Radial Attention, MC-Sparse and Chipmunk, checked on their slow
restatements.
"""

import math

import pytest
import torch

from restated import chipmunk, mc_sparse, radial, sol, sparsepr, sta, svg_ear
from restated.problem import Problem, dense, expect_roles, lloyd, masked, tokens_by_role

# float64 softmax over at most 100 keys, two ways: a few hundred roundings of 1.1e-16
ROUNDING = 1e-12

SMALL = {
    "svg_ear": (svg_ear.restate, {"query_clusters": 4, "key_clusters": 7, "iterations": 4, "top_p": 0.6, "floor": 0.1}),
    "sparsepr": (sparsepr.restate, {"query_clusters": 5, "key_clusters": 8, "density": 0.5, "probes": 3}),
    "sol": (sol.restate, {"block": 4}),
    "sta": (sta.restate, {"tile": (2, 2, 2), "window": (1, 3, 1)}),
    "radial": (radial.restate, {"block": 4, "decay": 0.5, "sink": False}),
    "mc_sparse": (mc_sparse.restate, {"group": 4, "multiple": 2}),
    "chipmunk": (chipmunk.restate, {"voxel": (1, 2, 2), "multiple": 2, "top_k": 0.2}),
}
UNCORRECTED = {"svg_ear": {"compensate": False}, "sparsepr": {"repair": False}, "sta": {}, "radial": {"block": 2}}
PROBLEMS = [
    Problem((3, 3, 5)),
    Problem((5, 2, 3), text_tokens=4, seed=1),
    Problem((2, 5, 3), text_tokens=3, text_at="start", heads=2, seed=2),
    Problem((3, 2, 5), text_tokens=5, padding="text", batch=2, seed=3),
    Problem((4, 3, 3), text_tokens=2, text_at="middle", padding="video", batch=2, dim=5, seed=4),
    Problem((1, 7, 5), padding="video", seed=5),
]


def close(x, y):
    return torch.allclose(x, y, rtol=0, atol=ROUNDING)


def run(name, problem, **changes):
    restate, settings = SMALL[name]
    q, k, v, common = problem.inputs()
    return restate(q, k, v, **common, **settings | changes)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", SMALL)
def test_text_and_padding_follow_the_convention_of_the_package(name, problem):
    common = problem.inputs()[3]
    expect_roles(run(name, problem).allowed, common["text"], common["key_valid"])


@pytest.mark.parametrize("problem", PROBLEMS[3:])
@pytest.mark.parametrize("name", SMALL)
def test_what_padding_holds_changes_nothing(name, problem):
    restate, settings = SMALL[name]
    q, k, v, common = problem.inputs()
    before, padding = restate(q, k, v, **common, **settings), ~common["key_valid"][:, None, :, None]
    after = restate(q, k.masked_fill(padding, 50.0), v.masked_fill(padding, -50.0), **common, **settings)
    assert torch.equal(before.allowed, after.allowed)
    assert torch.equal(before.out, after.out)


@pytest.mark.parametrize("name", ["mc_sparse", "chipmunk"])
def test_a_residual_is_what_the_allowed_keys_miss_and_the_next_step_adds_it(name):
    q, k, v, _ = PROBLEMS[1].inputs()
    result = run(name, PROBLEMS[1], later=(k, q, v))
    assert not result.allowed.all()
    assert close(result.notes["residual"], dense(q, k, v) - masked(q, k, v, result.allowed))
    assert close(result.notes["later"], masked(k, q, v, result.allowed) + result.notes["residual"])


@pytest.mark.parametrize("name", ["sta", "radial"])
def test_static_windows_ignore_what_the_tokens_hold(name):
    restate, settings = SMALL[name]
    q, k, v, common = PROBLEMS[2].inputs()
    before, after = (restate(*tokens, **common, **settings) for tokens in ((q, k, v), (k, v, q)))
    assert torch.equal(before.allowed, after.allowed)


@pytest.mark.parametrize("name", UNCORRECTED)
def test_without_a_correction_the_output_is_attention_over_the_allowed_keys(name):
    q, k, v, _ = PROBLEMS[1].inputs()
    result = run(name, PROBLEMS[1], **UNCORRECTED[name])
    assert not result.allowed.all()
    assert close(result.out, masked(q, k, v, result.allowed))


@pytest.mark.parametrize(
    "size, tile, window, first, last",
    [
        (7, 1, 3, [0, 0, 1, 2, 3, 4, 4], [2, 2, 3, 4, 5, 6, 6]),  # centred, and moved inwards at the border
        (6, 1, 4, [0, 0, 0, 1, 2, 2], [3, 3, 3, 4, 5, 5]),  # even: the extra tile on the lower side
        (7, 3, 1, [0, 0, 0, 3, 3, 3, 6], [2, 2, 2, 5, 5, 5, 6]),  # the last tile is cut at the border
    ],
)
def test_sta_window_along_one_axis(size, tile, window, first, last):
    q, k, v, common = Problem((1, 1, size)).inputs()
    allowed = sta.restate(q, k, v, **common, tile=(1, 1, tile), window=(1, 1, window)).allowed[0, 0]
    keys = torch.arange(size)
    assert torch.equal(allowed, (keys >= torch.tensor(first)[:, None]) & (keys <= torch.tensor(last)[:, None]))


def test_sta_takes_one_window_per_head():
    q, k, v, common = Problem((3, 3, 3), heads=2).inputs()
    both = sta.restate(q, k, v, **common, tile=(1, 1, 1), window=[(1, 1, 1), (3, 3, 3)]).allowed[0].sum(-1)
    assert both.tolist() == [[1] * 27, [27] * 27]


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_radial_with_blocks_of_one_token_is_the_token_rule(decay, sink):
    q, k, v, common = Problem((6, 2, 3)).inputs()
    allowed = radial.restate(q, k, v, **common, block=1, decay=decay, sink=sink).allowed[0, 0]
    for i in range(36):
        for j in range(36):
            far, apart = abs(i // 6 - j // 6), abs(i % 6 - j % 6)
            width = 6 if far <= 1 else max(8 / 2 ** far.bit_length() * decay, 1)
            assert bool(allowed[i, j]) == (apart <= width or (sink and j < 6))


@pytest.mark.parametrize("grid, block", [((5, 3, 3), 4), ((4, 2, 5), 3), ((6, 1, 7), 5), ((7, 1, 3), 8)])
@pytest.mark.parametrize("decay", [0.4, 1.0])
def test_radial_blocks_are_the_densely_seen_ones_of_each_pair_of_frames(grid, block, decay):
    """The same rule in tensors: rows that see a column, columns that are dense, share of these above 3/5."""
    frames, places = grid[0], grid[1] * grid[2]
    cell = torch.arange(frames * places)
    count = -(-len(cell) // block)
    one_hot = torch.nn.functional.one_hot(cell // block, count).double()
    expected = torch.eye(count, dtype=torch.bool)
    for i in range(frames):
        for j in range(frames):
            width = radial.band(grid, abs(i - j), block, decay)
            seen = (cell[:, None] % places - cell % places).abs() <= (-1 if width is None else width)
            seen &= (cell[:, None] // places == i) & (cell // places == j)
            rows = one_hot.T @ seen.double()
            dense_columns = (rows > one_hot.sum(0)[:, None] / 3).double() @ one_hot
            expected |= dense_columns > 0.6 * ((rows > 0).double() @ one_hot) + 1e-9
    found = radial.kept_blocks(grid, block, decay, sink=False)
    assert found == {(u, t) for u, t in expected.nonzero().tolist()}


def test_radial_density_falls_with_distance_and_rises_with_decay():
    narrow, wide = (radial.kept_blocks((16, 4, 4), 4, decay, sink=False) for decay in (0.5, 1.0))
    assert narrow < wide
    share = [sum((u, t) in wide for u in range(4) for t in range(4 * far, 4 * far + 4)) / 16 for far in range(16)]
    groups = [share[0], share[1], max(share[2:4]), max(share[4:8]), sum(share[8:16]) / 8]
    assert groups == sorted(groups, reverse=True)
    assert groups[4] <= groups[3] / 2 <= 1 / 2


def test_radial_sink_shows_the_first_frame_to_everyone():
    sink, plain = (radial.kept_blocks((16, 4, 4), 4, 0.5, sink=sink) for sink in (True, False))
    assert sink == plain | {(u, t) for u in range(64) for t in range(4)}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sol_normaliser_covers_every_valid_key(problem):
    q, _k, _v, common = problem.inputs()
    result = run("sol", problem, tau=1.0)
    for (entry, _head, _row), count in result.notes["covered"].items():
        assert count == (q.shape[2] if common["key_valid"] is None else int(common["key_valid"][entry].sum()))


def test_sol_threshold_leaves_the_neighbours_and_the_sink():
    problem = Problem((4, 3, 3))
    blocks = torch.arange(36) // 4
    expected = (blocks[:, None] - blocks).abs() <= 1
    assert torch.equal(run("sol", problem, tau=1e6).allowed[0, 0], expected)
    q, k, v, common = problem.inputs()
    equal = sol.restate(q, k[:, :, :1].expand_as(k), v, **common, block=4)  # no block stands out, whatever the rounding
    assert torch.equal(equal.allowed[0, 0], expected)
    expected |= (blocks == 2) | (blocks == 3)
    assert torch.equal(run("sol", problem, tau=1e6, sink_start=10, sink_tokens=3).allowed[0, 0], expected)


@pytest.mark.parametrize("threshold", ["diag", "exact"])
def test_sol_routes_by_mean_and_deviation_of_the_pooled_scores(threshold):
    problem, tau = Problem((5, 4, 2), dim=6, seed=6), 0.5
    q, k, _v, _ = problem.inputs()
    pooled_q, pooled_k = (x[0, 0].unflatten(0, (10, 4)).mean(1) for x in (q, k))
    scores = pooled_q @ pooled_k.T * 6**-0.5 / math.log(2)
    variance = scores.var(1, correction=0)
    if threshold == "diag":
        variance = (pooled_q * 6**-0.5 / math.log(2)).square() @ pooled_k.var(0, correction=0)
    chosen = scores > (scores.mean(1) + tau * (variance + 1e-6).sqrt())[:, None]
    near = (torch.arange(10)[:, None] - torch.arange(10)).abs() <= 1
    assert (chosen & ~near).any()
    found = run("sol", problem, tau=tau, threshold=threshold).notes["exact"][0, 0]
    assert found == {(u, t) for u, t in (chosen | near).nonzero().tolist()}


def test_sol_top_k_keeps_that_share_of_blocks():
    result = run("sol", Problem((6, 4, 4), seed=8), topk=0.25)
    exact = result.notes["exact"][0, 0]
    for u in range(24):
        assert 6 <= sum((u, t) in exact for t in range(24)) <= 6 + 3
    assert run("sol", Problem((6, 4, 4), seed=8), topk=1.0).allowed.all()


@pytest.mark.parametrize("problem", PROBLEMS)
def test_svg_ear_spends_its_budget_and_crosses_it_by_one_block_at_most(problem):
    notes = run("svg_ear", problem).notes
    for (entry, head, u), kept in notes["kept"].items():
        sizes = {t: len(members) for t, members in enumerate(notes["key_blocks"][entry, head])}
        rows = len(notes["query_blocks"][entry, head][u])
        guaranteed, score = set(notes["guaranteed"][entry, head, u]), notes["score"][entry, head, u]
        spent, budget = rows * sum(sizes[t] for t in kept), notes["budget"][entry, head, u]
        assert guaranteed <= kept
        assert spent >= budget
        filled = kept - guaranteed
        if filled:
            last = min(filled, key=lambda t: (score[t], -t))
            assert spent - rows * sizes[last] < budget
            assert all(score[t] <= score[last] for t in score if t not in kept)


@pytest.mark.parametrize("top_p, floor", [(0.6, 0.0), (0.3, 0.2), (0.9, 0.1)])
def test_svg_ear_budget_is_top_p_with_a_floor_of_twice_the_guarantee(top_p, floor):
    problem = Problem((3, 3, 5), seed=12)
    q, k, _v, _ = problem.inputs()
    settings = {"top_p": top_p, "floor": floor, "key_clusters": 10}
    notes, free = (run("svg_ear", problem, **settings, gamma=gamma).notes for gamma in (1.0, 0.0))
    blocks = notes["key_blocks"][0, 0]
    sizes = torch.tensor([len(members) for members in blocks])
    pooled = torch.stack([k[0, 0, members].mean(0) for members in blocks])
    for u, rows in enumerate(notes["query_blocks"][0, 0]):
        mass = (q[0, 0, rows].mean(0) @ pooled.T / 2 + sizes.log()).softmax(0)
        ranked, order = mass.sort(descending=True)
        keep = (ranked.cumsum(0) - ranked <= top_p) | (torch.arange(10) < round(20 * floor))
        assert notes["budget"][0, 0, u] == len(rows) * int(sizes[order[keep]].sum())
        assert notes["guaranteed"][0, 0, u] == order[: max(1, round(10 * floor))].tolist()
        cost = {t: free["score"][0, 0, u][t] - score for t, score in notes["score"][0, 0, u].items()}
        assert cost == pytest.approx({t: math.log(len(rows) * len(blocks[t])) for t in cost}, abs=1e-12)


def test_svg_ear_prefers_the_block_whose_centroid_fails():
    """Two equally heavy key clusters: identical tokens need no exact attention, tokens that differ do."""
    k = torch.zeros(1, 1, 12, 4, dtype=torch.float64)
    k[0, 0, :4, 0], k[0, 0, 4:8, 0], k[0, 0, 8:, 0] = 9.0, -1.0, -3.0
    k[0, 0, 8:, 1] = torch.tensor([0.5, -0.5, 0.5, -0.5])
    v = k.flip(-1) + torch.arange(12.0, dtype=torch.float64)[:, None] * (torch.arange(12) >= 8)[:, None]
    common = {"grid": (1, 1, 12), "text": None, "key_valid": None, "scale": None}
    start = {"initial_queries": [[[0]]], "initial_keys": [[[0, 4, 8]]]}
    q = torch.ones(1, 1, 12, 4, dtype=torch.float64) * 0.1
    notes = svg_ear.restate(q, k, v, **common, **start, iterations=3, top_p=0.7, floor=0.0).notes
    assert notes["mass"][0, 0, 0][1] > notes["mass"][0, 0, 0][2]
    assert notes["kept"][0, 0, 0] == {0, 2}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sparsepr_keeps_the_best_blocks_up_to_its_budget(problem):
    for score in ("value_error", "attention_mass"):
        notes = run("sparsepr", problem, score=score).notes
        for (entry, head, u), kept in notes["kept"].items():
            sizes, scores = [len(t) for t in notes["key_blocks"][entry, head]], notes["score"][entry, head, u]
            last = min(kept, key=lambda t: (scores[t], -t))
            spent, budget = sum(sizes[t] for t in kept), notes["budget"][entry, head]
            assert spent - sizes[last] < budget <= spent
            assert all(scores[t] <= scores[last] for t in scores if t not in kept)


def test_sparsepr_budget_counts_text_and_probes_into_the_density():
    # ceil((0.5 - 3 / 45) 45) and ceil((0.5 - 3 / 30) (30 + 4)) - 4
    assert run("sparsepr", PROBLEMS[0]).notes["budget"] == {(0, 0): 20}
    assert run("sparsepr", PROBLEMS[1]).notes["budget"] == {(0, 0): 10}
    assert run("sparsepr", PROBLEMS[0], repair=False).notes["budget"] == {(0, 0): 23}


def test_sparsepr_keys_are_apart_as_the_queries_tell_them_apart():
    """At full rank the squared distance of two key features is the mean of (q . (k - k'))^2, up to a factor."""
    q, k, _v, common = Problem((3, 3, 3), seed=13).inputs()
    tokens = tokens_by_role(27, 27, common["text"], None, 0)
    features = sparsepr._key_features(q[0, 0].tolist(), k[0, 0].tolist(), tokens, 2048, 4)
    found = torch.tensor([features[t] for t in range(27)], dtype=torch.float64)
    apart = (found[:, None] - found).square().sum(-1)
    responses = ((k[0, 0][:, None] - k[0, 0]) @ q[0, 0].T).square().mean(-1)
    assert torch.allclose(apart / apart.sum(), responses / responses.sum(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sparsepr_probes_are_dense_rows_of_the_largest_clusters(problem):
    q, k, v, common = problem.inputs()
    result, expected = run("sparsepr", problem), dense(q, k, v, common["key_valid"])
    for (entry, head), probes in result.notes["probes"].items():
        blocks = result.notes["query_blocks"][entry, head]
        sizes = [next(len(members) for members in blocks if row in members) for row in probes]
        assert sizes == sorted(map(len, blocks), reverse=True)[: len(probes)]
        assert sum(result.notes["weights"][entry, head]) == pytest.approx(len(probes))
        assert close(result.out[entry, head, probes], expected[entry, head, probes])


def test_sparsepr_probe_is_the_token_nearest_to_the_mean():
    features = {0: [0.0], 1: [1.0], 2: [5.0], 3: [0.1], 4: [0.7]}
    picked, weights = sparsepr._probes(features, [[3, 4], [], [0, 1, 2]], 2)
    assert picked == [1, 3]  # in a block of two both are equally far: the first
    assert weights == pytest.approx([1.2, 0.8])


def test_sparsepr_query_features_do_not_depend_on_the_length_of_a_query():
    q, k, _v, common = Problem((1, 3, 3), seed=14).inputs()
    tokens = tokens_by_role(9, 9, common["text"], None, 0)
    short, long = (sparsepr._query_features((x * q[0, 0]).tolist(), tokens, k[0, 0].tolist(), 4) for x in (1, 3))
    assert all(short[t] == pytest.approx(long[t], abs=1e-12) for t in range(9))


def test_sparsepr_plan_does_not_change_when_queries_and_keys_turn_together():
    q, k, v, common = PROBLEMS[4].inputs()
    turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    _, settings = SMALL["sparsepr"]
    before = sparsepr.restate(q, k, v, **common, **settings)
    after = sparsepr.restate(q @ turn, k @ turn, v, **common, **settings)
    assert torch.equal(before.allowed, after.allowed)
    assert torch.allclose(before.out, after.out, rtol=0, atol=1e-9)


def test_clusters_start_where_they_are_told():
    """Ties go to the lower index: the second of two equal first tokens wins nothing in the first assignment."""
    problem = Problem((1, 1, 12), seed=11)
    start = {"initial_queries": [[[3, 3, 8]]], "initial_keys": [[[1, 5, 1, 9]]]}
    notes = run("svg_ear", problem, **start, iterations=1).notes
    assert [bool(members) for members in notes["query_blocks"][0, 0]] == [True, False, True]
    assert not notes["key_blocks"][0, 0][2]
    # -> [0 | 1 2 9 10], means 0 and 5.5 -> [0 1 2 | 9 10]
    points = [[0.0], [1.0], [2.0], [9.0], [10.0]]
    assert [lloyd(points, [0, 1], count) for count in (1, 2)] == [[0, 1, 1, 1, 1], [0, 0, 0, 1, 1]]
