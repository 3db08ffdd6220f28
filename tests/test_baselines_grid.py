"""SVG, STA and Radial Attention: masks that follow the grid of the video."""

import itertools
from dataclasses import replace
from random import Random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from definitions import output_rounding
from parkattn.plan import Roles, assign_roles
from parklab.baselines import radial, sol, sparge, sta, svg, video, xattention
from plans import RESTATED, attend, problem, token_mask
from restated.cases import svg_settings

CASES = 240
GRIDS = ((4, 3, 4), (12, 2, 2), (9, 1, 5))


def grid_problem(seed):
    return problem(seed, largest=GRIDS[seed // 48 % 3])


def triple(draw, most):
    return tuple(draw.randint(1, most) for _ in range(3))


def sta_settings(draw, given):
    windows = tuple(triple(draw, 4) for _ in range(given.q.shape[1]))
    return {"tile": triple(draw, 3), "window": draw.choice((windows, windows[0]))}


def radial_settings(draw, given):
    return {
        "block": draw.choice((1, 2, 3, 4, 5, 8)),
        "decay": draw.choice((0.2, 0.5, 0.8, 1.0)),
        "sink": draw.random() < 0.5,
    }


def planned(module, given, settings, seed):
    """The call, and what the restatement is told beside the settings."""
    if module is not svg:
        return attend(module, given, **settings), {}
    settings.pop("rows")
    own = {"tile": 1, "num_sampled_rows": 1 + seed % 9, "seed": seed}
    cells = given.grid[0] * given.grid[1] * given.grid[2]
    rows = svg.SvgPlanner(svg.SvgConfig(**settings, **own)).sampled_rows(given.site(), cells)
    return attend(svg, given, **settings, **own), {"rows": rows.tolist()}


METHODS = {"svg": (svg, svg_settings), "sta": (sta, sta_settings), "radial": (radial, radial_settings)}


@pytest.mark.parametrize("name", METHODS)
def test_mask_and_output_are_those_of_the_independent_restatement(name):
    module, settings_for = METHODS[name]
    for seed in range(CASES):
        given = grid_problem(seed)
        settings = settings_for(Random(seed), given)
        got, more = planned(module, given, settings, seed)
        want = RESTATED[name](*given.tensors, **given.inputs, **settings, **more)
        assert torch.equal(token_mask(got.stats.plan), want.allowed), (seed, settings)
        bound = output_rounding(*given.tensors, given.scale, torch.float64)
        torch.testing.assert_close(got.out, want.out, rtol=0, atol=bound, msg=lambda text, seed=seed: f"{seed}: {text}")


def numbered(frames, per_frame):
    """q = k of two heads: one that looks for its own frame and one that looks for its own place."""
    cell = torch.arange(frames * per_frame)
    own_frame = torch.nn.functional.one_hot(cell // per_frame, frames + per_frame).double()
    own_place = torch.nn.functional.one_hot(frames + cell % per_frame, frames + per_frame).double()
    return 6 * torch.stack([own_frame, own_place]).unsqueeze(0)


@pytest.mark.parametrize("layout", ["wan", "hunyuan"])
def test_svg_tells_spatial_heads_from_temporal_ones(layout):
    frames, height, width = 8, 3, 4
    tokens = numbered(frames, height * width)
    values = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = replace(problem(0), q=tokens, k=tokens, v=values, grid=(frames, height, width), scale=1.0)
    plan = attend(svg, given, layout=layout, block=2, tile=1).stats.plan
    cell = torch.arange(frames * height * width)
    assert torch.equal(plan.queries.labels[0, 0].long(), cell)
    assert torch.equal(plan.queries.labels[0, 1].long(), cell % 12 * frames + cell // 12)


def test_svg_draws_other_rows_at_every_step_and_layer_and_the_same_ones_again():
    planner = svg.SvgPlanner(svg.SvgConfig())
    sites = [problem(0).site(step=step, layer=layer) for step, layer in itertools.product(range(3), range(3))]
    drawn = [tuple(planner.sampled_rows(site, 20_000).tolist()) for site in sites]
    assert len(set(drawn)) == 9 and all(len(rows) == 64 and max(rows) < 10_000 for rows in drawn)
    assert drawn == [tuple(planner.sampled_rows(site, 20_000).tolist()) for site in sites]


@pytest.mark.parametrize("tile", [2, 3, 4])
def test_svg_in_tiles_computes_the_band_and_about_a_tile_more(tile):
    """A query sees what the first and the last of its tile see, tile - 1 keys more than it alone, up to ends of tiles:
    at most one key further on either side where tiles divide the width, else tile - 1.
    """
    for seed in range(0, 240, 5):
        given = replace(grid_problem(seed), key_valid=None)
        settings = svg_settings(Random(seed), given)
        settings.pop("rows")
        exact, tiled = (token_mask(attend(svg, given, tile=size, **settings).stats.plan) for size in (1, tile))
        assert bool((tiled | ~exact).all()), seed
        aligned = settings["block"] % tile == 0
        assert int((tiled & ~exact).sum(-1).max()) <= (tile + 1 if aligned else 3 * (tile - 1)), seed


def test_svg_keeps_everything_at_a_density_of_one():
    given = grid_problem(0)
    for layout in ("wan", "hunyuan"):
        assert attend(svg, given, layout=layout, sparsity=1.0, block=1, tile=1).stats.plan.mask.all()


def test_svg_at_a_real_size_keeps_about_the_density_that_is_asked_for():
    """The band of width L (1 - sqrt(1 - s)) covers s of all pairs; a rounding to 128 and tiles of 128 add below 128 / L
    each on either side, and wan's sink at most one frame."""
    per_frame, frames = 3600, 21
    cells = frames * per_frame
    for layout, sink in (("wan", 1 / frames), ("hunyuan", 0.0)):
        for share in (0.1, 0.3):
            reach = svg.band_reach(share, 0, cells, 128, layout)
            bands = svg.Bands(layout, frames, per_frame, reach, tile=128)
            of_query, of_key, seen = svg.band_blocks(bands, torch.device("cpu"))
            rows, columns = of_query[0].bincount().double(), of_key[0].bincount().double()
            density = float(rows @ seen.double() @ columns) / cells**2
            assert share - 2 * 128 / cells < density < share + 4 * 128 / cells + sink, (layout, share)


def test_sta_sees_as_many_whole_tiles_at_the_border_as_inside():
    given = problem(0)
    q = torch.randn(1, 1, 6 * 6 * 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = replace(given, q=q, k=q, v=q, grid=(6, 6, 8))
    for window in ((1, 1, 1), (1, 2, 3), (3, 3, 3), (3, 2, 4)):
        seen = token_mask(attend(sta, given, tile=(2, 3, 2), window=window).stats.plan).sum(-1)
        tiles = min(window[0], 3) * min(window[1], 2) * min(window[2], 4)
        assert seen.unique().tolist() == [tiles * 12], window


def test_sta_with_a_window_over_the_grid_is_dense():
    for seed in range(0, 48, 4):
        given = replace(grid_problem(seed), key_valid=None)
        assert attend(sta, given, tile=(2, 2, 2), window=(9, 9, 9)).stats.plan.mask.all()


def test_radial_band_halves_as_the_distance_doubles_and_then_leaves_frames_out():
    bands = [radial.band(distance, 3600, 128, 1.0) for distance in range(130)]
    assert bands[:2] == [3600, 3600]
    assert [bands[2**i] for i in range(1, 5)] == [1024, 512, 256, 128]
    assert [distance for distance in range(32, 64) if bands[distance] >= 0] == list(range(32, 64, 2))
    assert [distance for distance in range(64, 128) if bands[distance] >= 0] == list(range(64, 128, 4))


def test_radial_drops_a_block_of_which_exactly_three_fifths_are_dense():
    """Five frames of 13 tokens in blocks of 10 hold such a block: 3 of the 5 columns that are used."""
    q = torch.randn(1, 1, 65, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = replace(problem(0), q=q, k=q, v=q, grid=(5, 1, 13))
    for sink in (True, False):
        mask = token_mask(attend(radial, given, block=10, sink=sink).stats.plan)
        assert torch.equal(mask, RESTATED["radial"](*given.tensors, **given.inputs, block=10, sink=sink).allowed)


def test_radial_is_dense_where_one_block_holds_the_video():
    given = replace(grid_problem(5), key_valid=None)
    assert attend(radial, given, block=1000).stats.plan.mask.all()


def test_radial_moves_no_token_without_roles():
    plan = attend(radial, grid_problem(0), block=3).stats.plan
    assert plan.queries.order is None and plan.keys.order is None


@pytest.mark.parametrize("name", ["sta", "radial"])
def test_a_static_plan_is_made_once_after_the_authors_dense_steps(name):
    module = METHODS[name][0]
    entry = module.ENTRIES[0]
    for seed in range(12):
        given = grid_problem(seed)
        method = entry.make(entry.config(backend="reference"))
        calls = [method(*given.tensors, given.site(step=step, total_steps=50)) for step in range(14)]
        assert [call.stats.phase for call in calls] == ["dense"] * 12 + ["refresh", "reuse"]
        assert torch.equal(calls[12].out, calls[13].out)


def test_svg_profiles_at_every_step_after_the_dense_ones():
    method = svg.ENTRIES[0].make(svg.SvgConfig(backend="reference"))
    given = grid_problem(7)
    phases = [method(*given.tensors, given.site(step=step, total_steps=10)).stats.phase for step in range(4)]
    assert phases == ["dense", "dense", "refresh", "refresh"]


@pytest.mark.parametrize("name", METHODS)
def test_a_call_without_a_fitting_grid_is_refused(name):
    given, module = problem(0), METHODS[name][0]
    with pytest.raises(ValueError, match=r"grid: expected \(frames, height, width\) of the video"):
        attend(module, replace(given, grid=None))
    with pytest.raises(ValueError, match=r"grid: expected \d+ cells, .* got 50"):
        attend(module, replace(given, grid=(50, 1, 1)))


def test_sta_wants_a_window_for_each_head():
    given = next(given for given in map(grid_problem, range(99)) if given.q.shape[1] == 2)
    with pytest.raises(ValueError, match="window: expected one triple for each of 2 heads, got 3"):
        attend(sta, given, window=((1, 1, 1),) * 3)


def test_svg_without_values_is_refused():
    given = problem(0)
    with pytest.raises(ValueError, match="values: expected the values"):
        svg.SvgPlanner(svg.SvgConfig()).plan(given.q, given.k, given.site(), None)


@pytest.mark.parametrize("module", [svg, sta, radial, sparge, xattention, sol])
def test_planning_never_asks_a_tensor_for_a_value(module, monkeypatch):
    """Fake tensors have shapes and no values: what would wait for a GPU raises. Roles are made before, with values."""
    for seed in range(12):  # every combination of text and padding
        given = problem(seed)
        attend(module, given)  # what depends on the grid alone is made on the CPU, once
        roles = vars(assign_roles(given.q, given.k, given.text, given.key_valid))
        planner = module.ENTRIES[0].make(module.ENTRIES[0].config(backend="reference")).planner
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, monkeypatch.context() as patch:
            fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in roles.items()}
            patch.setattr(
                module if hasattr(module, "assign_roles") else video,
                "assign_roles",
                lambda *_, fake=fake: Roles(**fake),
            )
            q, k, v = (mode.from_tensor(x) for x in given.tensors)
            assert planner.plan(q, k, given.site(values=v), None).mask.shape[:2] == q.shape[:2]


@pytest.mark.parametrize("module", [svg, sta, radial, sparge, xattention, sol])
def test_settings_survive_plain_types_and_every_preset_is_valid(module):
    entry = module.ENTRIES[0]
    configs = [entry.config(), *(entry.config.preset(name) for name in entry.config.PRESETS)]
    if module is sta:
        configs.append(sta.StaConfig(window=((1, 2, 3), (3, 2, 1))))
    assert all(entry.config.from_dict(config.to_dict()) == config for config in configs)
    assert all(hasattr(configs[0], field) for field in entry.budgets)
