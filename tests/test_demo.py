"""The training with a planted bug that the demo ends with."""

from __future__ import annotations

import re

import pytest

from sharpscope.causes import verdict
from sharpscope.demo import SAMPLED_AT, STEPS, train_with_a_bug
from sharpscope.traces import load_run


@pytest.mark.parametrize("seed", [0, 1])
def test_the_planted_bug_is_named_first_with_its_temperature(tmp_path, seed):
    seen = []
    train_with_a_bug(tmp_path / "bug", seed, seen.append)
    assert seen == list(range(1, STEPS + 1))
    first = verdict(load_run(tmp_path / "bug")).causes[0]
    assert first.name == "sampling_temperature"
    told = re.search(r"about (\S+) times", first.sentence)
    assert told is not None and float(told[1]) == pytest.approx(SAMPLED_AT, abs=0.06)
