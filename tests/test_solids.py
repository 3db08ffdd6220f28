"""The renderer of solids: sentences, shapes, motions, light, and the same clip from the same seed."""

import math
import random
import zlib

import pytest
import torch

from parklab.solids import grammar, renderer, shapes
from parklab.solids.grammar import SHAPES, Scene, Thing
from parklab.solids.motion import DRAWN, Clip, any_clip, clip_of, happening, training_clip
from parklab.solids.renderer import HALF_WIDTH, render
from parklab.solids.surroundings import surroundings
from parklab.sprites.data import ClipSize

SMALL = ClipSize(5, 48, 64)


def scene_of(motion: str, shape: str = "sphere", second: str | None = None, camera: str = "stays") -> Scene:
    other = Thing("blue", "matte", second) if second else None
    return Scene(Thing("red", "matte", shape), motion, other, camera)


# --- sentences
def test_sentences_parse_to_their_own_scene_and_fit_the_longest():
    drawn = random.Random(0)
    scenes = [grammar.draw_scene(drawn) for _ in range(300)]
    assert all(grammar.parse(scene.sentence) == scene for scene in scenes)
    longest = max(len(scene.sentence.replace(",", " ,").split()) + 1 for scene in scenes)
    assert longest == grammar.LONGEST
    assert grammar.parse(" A RED metal sphere rolls left , the camera stays. ").second is None


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("a red metal cat rolls left, the camera stays", "'cat'"),
        ("a red metal sphere rolls left", "for example"),
        ("a red metal sphere collides, the camera stays", "for example"),
        ("a red metal sphere rolls left beside a blue matte cube, the camera stays", "for example"),
        ("", "for example"),
    ],
)
def test_a_wrong_prompt_is_named_in_one_line(prompt, name):
    with pytest.raises(ValueError, match="prompt:") as error:
        grammar.parse(prompt)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_training_and_held_out_sentences_are_disjoint_by_the_stated_rule():
    training = {training_clip(0, i, stream).scene for i in range(400) for stream in ("train", "library 0")}
    held = grammar.held_out_scenes(90)
    assert len(set(held)) == 90 and not training & set(held)
    assert [scene.held_out for scene in held] == [*grammar.KINDS] * 30
    for scene in training:  # the rule, stated again
        pairs = [(grammar.COLOURS.index(t.colour), SHAPES.index(t.shape)) for t in scene.things]
        assert all(colour != shape + 1 for colour, shape in pairs)
        assert zlib.crc32(f"{scene.first} {scene.motion}".encode()) % 10
        assert zlib.crc32(scene.sentence.encode()) % 10
    assert any(any_clip(0, i, "train").scene.held_out for i in range(50))


# --- shapes
def test_distances_are_those_of_geometry():
    at = lambda *point: torch.tensor(point)[:, None]  # noqa: E731
    sphere, cube, cone, torus, capsule = shapes.DISTANCES
    cases = [
        (sphere, at(0.0, 0.0, 2.0), 2 - shapes.SPHERE),
        (sphere, at(0.0, 0.0, 0.0), -shapes.SPHERE),
        (cube, at(2.0, 0.0, 0.0), 2 - shapes.CUBE - shapes.CUBE_ROUNDING),
        (cube, at(1.0, 1.0, 1.0), math.sqrt(3) * (1 - shapes.CUBE) - shapes.CUBE_ROUNDING),
        (cube, at(0.0, 0.0, 0.0), -shapes.CUBE - shapes.CUBE_ROUNDING),
        (cone, at(0.0, 2.0, 0.0), 2 - shapes.CONE - shapes.CONE_ROUNDING),
        (cone, at(0.0, -2.0, 0.0), 2 - shapes.CONE - shapes.CONE_ROUNDING),
        (cone, at(3.0, -shapes.CONE, 0.0), 3 - shapes.CONE_BASE - shapes.CONE_ROUNDING),
        (torus, at(0.0, 0.0, 0.0), shapes.TORUS - shapes.TORUS_TUBE),
        (torus, at(shapes.TORUS, 1.0, 0.0), 1 - shapes.TORUS_TUBE),
        (capsule, at(0.0, 2.0, 0.0), 2 - shapes.CAPSULE - shapes.CAPSULE_RADIUS),
        (capsule, at(1.0, 0.3, 0.0), 1 - shapes.CAPSULE_RADIUS),
    ]
    for distance, point, expected in cases:
        assert distance(point).item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_distances_are_those_to_the_nearest_point_of_the_surface(shape):
    """A step of the distance against the normal ends on the surface; no solid leaves its bounding sphere."""
    points = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1.5
    distance = shapes.DISTANCES[shape]
    points = points[:, distance(points) > 0.05]
    on = points - distance(points) * shapes.normals(shape, points, 1e-5)
    assert distance(on).abs().max() < 2e-3
    assert shapes.dot(on, on).sqrt().max() <= shapes.BOUNDS[shape] + 2e-3
    steps = torch.randn(points.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moved = (distance(points + steps) - distance(points)).abs()
    assert (moved <= shapes.dot(steps, steps).sqrt() + 1e-9).all()


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_solids_reach_as_far_as_their_surface(shape):
    ways = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ways = ways / ways.norm(dim=1, keepdim=True)
    grid = torch.linspace(-1.3, 1.3, 53, dtype=torch.float64)
    solid = torch.stack(torch.meshgrid(grid, grid, grid, indexing="ij")).flatten(1)
    solid = solid[:, shapes.DISTANCES[shape](solid) <= 0]
    sampled = (ways @ solid).amax(1)
    stated = shapes.reaches(torch.tensor(shape), ways)
    assert (stated >= sampled - 1e-9).all()
    assert (stated - sampled).max() < 0.08  # a little more than the grid's spacing


def test_normals_of_a_sphere_point_outwards():
    """Differences over a step are wrong by about the step over the radius."""
    drawn = torch.randn(3, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = torch.nn.functional.normalize(drawn, dim=0)
    for step in (2e-3, 1e-6):
        found = shapes.normals(0, points * shapes.SPHERE, step)
        torch.testing.assert_close(found, points, atol=step / shapes.SPHERE, rtol=0)


# --- pictures
def marched(clip: Clip, size: ClipSize, samples: int = 1):
    scene = happening([clip], size.frames)
    bodies = renderer._bodies(scene, size.frames, "cpu")
    eye, way = renderer._rays(scene, size, samples, "cpu")
    return scene, bodies, eye, way, renderer._march(bodies, 0, eye, way)


def test_a_sphere_has_the_silhouette_and_the_depth_of_geometry():
    size = ClipSize(1, 96, 144)
    scene, _, eye, way, hits = marched(clip_of(scene_of("slides left"), 3), size)
    centre, radius = scene.centre[0, 0, 0], shapes.SPHERE * scene.size[0, 0]
    away = eye[:, 0] - centre
    along = (away[:, None] * way[:, 0]).sum(0)
    inside = along**2 - (away @ away - radius**2)
    analytic = inside > 0
    found = torch.zeros_like(analytic)
    found[hits.ray] = True
    assert analytic.sum() > 300
    assert (found != analytic).sum() <= 0.02 * analytic.sum()  # rays that graze
    both = analytic[hits.ray]
    depth = (-along - inside.clamp(min=0).sqrt())[hits.ray]
    clear = both & (inside[hits.ray] > 0.05)
    torch.testing.assert_close(hits.distance[clear], depth[clear], atol=0.02, rtol=0)


def test_the_camera_looks_where_its_axes_say():
    size = ClipSize(1, 96, 144)
    scene = happening([clip_of(scene_of("bounces"), 0)], 1)
    _, way = renderer._rays(scene, size, 1, "cpu")
    axes = scene.axes[0, 0]
    torch.testing.assert_close(axes @ axes.T, torch.eye(3), atol=1e-5, rtol=0)
    middle = way[:, 0].view(3, 96, 144)[:, 47:49, 71:73].mean((1, 2))
    torch.testing.assert_close(middle / middle.norm(), axes[2], atol=1e-4, rtol=0)
    left, right = way[:, 0].view(3, 96, 144)[:, 48, [0, -1]].T
    spread = math.degrees(math.acos((left @ right).clamp(-1, 1).item()))
    assert spread == pytest.approx(2 * math.degrees(math.atan(HALF_WIDTH)), abs=0.5)


def test_a_point_under_an_object_is_darker_and_one_in_its_shadow_too():
    clip = clip_of(scene_of("slides left"), 3)
    scene = happening([clip], 1)
    bodies, around = renderer._bodies(scene, 1, "cpu"), surroundings(scene, 1, "cpu")
    centre, light = scene.centre[0, 0, 0], around.light[0, 0]
    in_shadow = centre - light * (centre[1] / light[1])  # on the floor, along the light through the centre
    beside = in_shadow + torch.tensor([6.0, 0.0, 0.0])
    under = torch.stack([centre[0], torch.tensor(0.0), centre[2]])
    points = torch.stack([in_shadow, beside, under], 1)
    frame = torch.zeros(3, dtype=torch.long)
    strength = renderer._lights(bodies, around, frame, points, None)[0]
    assert strength[0] == 0 and strength[1] == 1
    sky = renderer._nearness(bodies, 0, frame, points)
    assert sky[2] < 0.5 and sky[1] == 1


def test_the_picture_is_darker_where_the_shadow_falls():
    size, looked = ClipSize(1, 96, 144), 0
    for index in range(8):
        clip = clip_of(scene_of("slides left"), 3, index)
        scene = happening([clip], 1)
        around = surroundings(scene, 1, "cpu")
        centre, light = scene.centre[0, 0, 0], around.light[0, 0]
        shaded = centre - light * (centre[1] / light[1]) - scene.eye[0, 0]
        x, y, z = (scene.axes[0, 0] @ shaded).tolist()
        column = round((x / z / HALF_WIDTH + 1) / 2 * 144 - 0.5)
        row = round((1 - y / z / HALF_WIDTH * 144 / 96) / 2 * 96 - 0.5)
        solid = torch.zeros(96 * 144, dtype=torch.bool)
        solid[marched(clip, size)[4].ray] = True
        if (
            not (1 <= row < 95 and 1 <= column < 143)
            or solid.view(96, 144)[row - 1 : row + 2, column - 1 : column + 2].any()
        ):
            continue  # the object hides its shadow
        scene.present[:] = 0  # the same floor with nothing on it
        eye, way = renderer._rays(scene, size, 1, "cpu")
        bare = renderer._tone(renderer._picture(renderer._bodies(scene, 1, "cpu"), around, eye, way)).view(3, 96, 144)
        shown = render([clip], size, samples=1)[0, :, 0] / 2 + 0.5
        near = (slice(None), slice(row - 1, row + 2), slice(column - 1, column + 2))
        assert shown[near].mean() < 0.85 * bare[near].mean()
        looked += 1
    assert looked >= 2


# --- motions
def centres(motion: str, shape: str = "sphere", second: str | None = None, seed: int = 0, frames: int = 33):
    made = happening([clip_of(scene_of(motion, shape, second), seed, index) for index in range(12)], frames)
    return made, made.centre[:, 0], made.centre[:, 1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("motion", ["rolls left", "rolls right", "slides left", "slides right"])
def test_left_and_right_are_the_viewers(motion, shape):
    made, first, _ = centres(motion, shape)
    sign = -1 if motion.endswith("left") else 1
    steps = sign * first[:, :, 0].diff(dim=1)
    assert (steps >= -1e-6).all()
    seen = torch.einsum("bfij,bfj->bfi", made.axes, first - made.eye)
    across = seen[..., 0] / seen[..., 2]
    assert (sign * (across[:, -1] - across[:, 0]) > 0.25).all()  # in the picture, not only in the world
    turned = (made.turn[:, 0, 1:] - made.turn[:, 0, :-1]).abs().amax((1, 2, 3))
    assert ((turned > 1e-2) if motion.startswith("rolls") else (turned < 1e-6)).all()


def test_nothing_sinks_into_the_floor():
    clips = [any_clip(0, i, "floor") for i in range(80)]
    made = happening(clips, 9)
    low = shapes.reaches(made.shape[..., None], -made.turn[..., 1, :]) * made.size[..., None]
    assert (made.centre[..., 1] - low > -1e-5).all()


def test_bouncing_leaves_the_floor_and_comes_back():
    made, first, _ = centres("bounces", frames=129)
    height = first[..., 1] - shapes.SPHERE * made.size[:, :1]
    assert (height.amax(1) > 0.5).all()
    landings = ((height[:, 1:-1] < height[:, :-2]) & (height[:, 1:-1] <= height[:, 2:]) & (height[:, 1:-1] < 0.1)).sum(
        1
    )
    assert (landings >= 2).all()


def test_a_collision_moves_the_second_only_once_it_is_touched():
    made, first, second = centres("collides", second="cube", frames=65)
    moved = (second[..., 0] - second[:, :1, 0]).abs() > 1e-4
    begins = moved.float().argmax(1)
    assert moved.any(1).all() and (begins > 15).all()
    reach = shapes.reaches(made.shape[..., None], made.turn[..., 0, :]) * made.size[..., None]
    back = shapes.reaches(made.shape[..., None], -made.turn[..., 0, :]) * made.size[..., None]
    right = (second[:, 0, 0] > first[:, 0, 0])[:, None]
    gap = torch.where(right, reach[:, 0] + back[:, 1], back[:, 0] + reach[:, 1])
    apart = (second[..., 0] - first[..., 0]).abs() - gap
    assert (apart > -1e-4).all()  # they never overlap
    touched = apart.gather(1, begins[:, None] - 1)[:, 0]
    assert (touched < 0.12).all()  # within a frame of the touch
    assert (apart[:, 0] > 0.2).all()


def test_an_orbit_keeps_its_distance_and_goes_around():
    _, first, second = centres("orbits", second="cone", frames=65)
    away = (first - second)[..., [0, 2]]
    radius = away.norm(dim=-1)
    assert ((radius.amax(1) - radius.amin(1)) < 1e-4).all() and (radius > 1).all()
    angle = torch.atan2(away[..., 1], away[..., 0])
    step = (angle.diff(dim=1) + math.pi) % (2 * math.pi) - math.pi
    assert (step.sum(1).abs() > 0.75 * 2 * math.pi).all()


@pytest.mark.parametrize("camera", grammar.CAMERAS)
def test_cameras_do_as_they_are_called(camera):
    made = happening([clip_of(scene_of("bounces", camera=camera), 0, i) for i in range(6)], 9)
    travelled = (made.eye[:, -1] - made.eye[:, 0]).norm(dim=1)
    turned = (made.axes[:, -1, 2] - made.axes[:, 0, 2]).norm(dim=1)
    assert ((travelled > 2) if camera == "orbits" else (travelled == 0)).all()
    assert ((turned == 0) if camera == "stays" else (turned > 0.05)).all()


# --- the same clip
def test_clips_depend_on_their_seed_and_index_alone():
    torch.manual_seed(1)
    first = render([training_clip(0, 5)], SMALL)
    torch.manual_seed(2)
    assert torch.equal(first, render([training_clip(0, 5)], SMALL))
    assert not torch.equal(first, render([training_clip(1, 5)], SMALL))
    assert training_clip(0, 5) != training_clip(0, 6)
    assert first.shape == (1, 3, 5, 48, 64) and first.abs().max() <= 1 and first.isfinite().all()


def test_a_clip_is_the_same_in_any_batch(monkeypatch):
    clips = [training_clip(7, i) for i in range(5)]
    together = render(clips, SMALL)
    assert torch.equal(together, torch.cat([render([clip], SMALL) for clip in clips]))
    monkeypatch.setitem(renderer.RAYS_AT_ONCE, "cpu", 2 * SMALL.frames * SMALL.height * SMALL.width * 4)
    assert torch.equal(together, render(clips, SMALL))


def test_more_frames_show_the_same_motion():
    few, many = (happening([training_clip(0, 1)], frames) for frames in (5, 17))
    torch.testing.assert_close(few.centre, many.centre[:, :, ::4], atol=1e-5, rtol=0)
    assert len(DRAWN) == len(training_clip(0, 1).draws)


def test_a_metal_cube_has_highlights_that_a_matte_one_lacks():
    """On a floor without a pattern to mirror: the brightest of its pixels against the middle one."""
    contrast = {}
    for material in ("metal", "matte"):
        found = []
        for index in range(6):
            scene = Scene(Thing("red", material, "cube"), "rolls left", None, "stays")
            clip = clip_of(scene, 7, index)
            size = ClipSize(5, 64, 96)
            hits = marched(clip, size)[4]
            pixels = render([clip], size, samples=1)[0].flatten(1)[:, hits.ray].mean(0) / 2 + 0.5
            found.append((pixels.quantile(0.98) - pixels.median()).item())
        contrast[material] = sum(found) / len(found)
    assert contrast["metal"] > 1.5 * contrast["matte"]
