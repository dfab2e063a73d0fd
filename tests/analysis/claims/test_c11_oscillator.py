"""C11: the oscillator and its rival."""

from __future__ import annotations

import numpy as np

from sharpscope.analysis.claims.c11_oscillator import prediction_errors


def test_a_curve_whose_start_is_fast_is_not_judged_by_its_extrapolation():
    """The drop lies in the first steps: without them any drop fits, and a prediction of the first step can be off by thousands."""
    rng = np.random.default_rng(0)
    t = np.arange(1, 151.0)
    for _ in range(5):
        reward = 2 - 3 * np.exp(-1.5 * (t - 1)) + rng.normal(0, 0.4, 150)
        ours, rival = prediction_errors(t, reward)
        assert 0.1 < ours < 0.4 and 0.1 < rival < 0.4
