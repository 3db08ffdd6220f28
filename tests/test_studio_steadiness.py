"""When the seconds of a comparison cannot be trusted, the reader is told beside the speed-up, and otherwise is not."""

import json
from pathlib import Path

import pytest

from parklab.studio.steadiness import steadiness, timing_warning

RECORDED = Path(__file__).parents[1] / "benchmarks" / "results" / "demo.json"


def run(dense: list[float], around: list[float] = (), attention: list[float] | None = None) -> list[dict]:
    """Steps: dense ones with their seconds, then sparse ones with the seconds outside of attention and in it."""
    attention = [0.5] * len(around) if attention is None else attention
    rows = [{"phase": "dense", "seconds": s, "attention_seconds": s / 2} for s in dense]
    return rows + [
        {"phase": "reuse", "seconds": a + b, "attention_seconds": b} for a, b in zip(around, attention, strict=True)
    ]


def compared(dense: list[dict], park: list[dict], speedup: float | None = 1.3) -> list[dict]:
    return [
        {"method": "dense", "label": "dense", "speedup": 1.0, "steadiness": steadiness(dense, dense)},
        {"method": "park", "label": "PARK, fast", "speedup": speedup, "steadiness": steadiness(park, dense)},
    ]


QUIET = run([2.0] * 8), run([2.0] * 2, [1.0] * 6)


def test_equal_steps_have_no_spread_and_no_warning():
    rows = compared(*QUIET)
    assert [row["steadiness"] for row in rows] == [{"step_spread": 0.0, "dense_apart": 0.0}] * 2
    assert timing_warning(rows) is None


def test_density_that_changes_from_step_to_step_is_no_unsteadiness():
    park = run([2.0] * 2, [1.0] * 6, [0.25, 0.5, 0.75, 1.0, 1.25, 1.5])
    assert steadiness(park, QUIET[0])["step_spread"] == 0.0


@pytest.mark.parametrize(
    ("dense", "park", "share", "said"),
    [
        # one step of eight that hung: 12 s too much of 28
        (
            run([2.0] * 7 + [14.0]),
            QUIET[1],
            12 / 28,
            "in the run of dense, steps of equal work differed by 43% on average",
        ),
        # another job during half of the sparse steps: 3 s too much of 3 + 6 + 4
        (
            QUIET[0],
            run([2.0] * 2, [1.0] * 3 + [2.0] * 3),
            3 / 13,
            "in the run of PARK, fast, steps of equal work differed by 23% on average",
        ),
        # another job all through one run: nothing differs inside of it
        (
            QUIET[0],
            run([3.0] * 2, [1.5] * 6),
            0.5,
            "dense steps in the run of PARK, fast and in that of dense differed by 50%",
        ),
    ],
)
def test_each_kind_of_disturbance_is_seen_and_named(dense, park, share, said):
    rows = compared(dense, park)
    assert max(value for row in rows for value in row["steadiness"].values()) == pytest.approx(share)
    assert said in timing_warning(rows) and "--overwrite" in timing_warning(rows)


def test_a_tenth_is_the_limit():
    for slow, warned in ((1.09, False), (1.11, True)):
        assert (timing_warning(compared(QUIET[0], run([2.0 * slow] * 2, [1.0] * 6))) is not None) == warned


def test_without_a_speed_up_there_is_nothing_to_warn_of():
    dense, park = run([2.0] * 7 + [14.0]), QUIET[1]
    assert timing_warning(compared(dense, park, speedup=None)) is None
    assert timing_warning(compared(dense, park)[:1]) is None
    assert steadiness(park, None)["dense_apart"] is None and steadiness([], dense) == {
        "step_spread": None,
        "dense_apart": None,
    }


def test_the_demo_on_record_was_measured_on_a_quiet_machine():
    rows = json.loads(RECORDED.read_text())["methods"]
    assert timing_warning([row | {"steadiness": steadiness(row["steps"], rows[0]["steps"])} for row in rows]) is None
