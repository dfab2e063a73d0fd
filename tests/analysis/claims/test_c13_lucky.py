"""C13: gradient shares of lucky and of confident tokens."""

from __future__ import annotations

import pandas as pd
import pytest

from sharpscope.analysis.claims.c13_lucky import lucky_spikes
from sharpscope.analysis.figures.style import lines
from tests.analysis.drawn import line


@pytest.mark.parametrize("seeds", [2, 4])
def test_a_step_that_one_run_recorded_out_of_turn_is_no_point_of_a_curve_over_seeds(seeds):
    regular = [(step, seed, 0.1) for step in (10, 20, 30) for seed in range(seeds)]
    rows = pd.DataFrame([*regular, (25, 1, 0.9)], columns=["step", "seed", "lucky"]).assign(method="grpo-sg")
    shares = rows.assign(confident=0.2, lucky_unweighted=rows["lucky"] + 0.05, confident_unweighted=0.2)
    left, _ = lucky_spikes(shares, lines(["grpo-sg"])).axes
    for label, y in (("grpo-sg", 0.1), ("grpo-sg, weights taken out", 0.15)):
        assert [array.tolist() for array in line(left, label)] == [[10, 20, 30], pytest.approx([y] * 3)]
