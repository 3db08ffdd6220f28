"""The short form of tests/fuzz_calls.py: wrong values are answered in the one-line form, and nothing hangs."""

import pytest

pytest.importorskip("diffusers")

from fuzz_calls import fuzz_api
from fuzz_commands import fuzz_commands


def test_fuzzed_calls_succeed_or_are_refused_in_one_line():
    tally = fuzz_api(400, seed=11)
    assert not tally.raw, "\n".join(tally.raw)
    assert tally.refused > 200  # most of what is drawn is wrong


def test_fuzzed_command_lines_succeed_or_are_refused_in_one_line():
    tally = fuzz_commands(60, seed=5)
    assert not tally.raw, "\n".join(tally.raw)
    assert tally.refused > 30
