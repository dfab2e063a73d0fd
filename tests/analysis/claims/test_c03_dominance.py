"""C3: few tokens dominate the gradient."""

from __future__ import annotations

import numpy as np
import pytest

from sharpscope.analysis.claims import c03_dominance
from sharpscope.analysis.figures.style import lines
from sharpscope.analysis.statistics import lorenz
from tests.analysis.claims.frames import frame_run, study, tokens_frame
from tests.analysis.claims.verdicts import verdict
from tests.analysis.drawn import line, runs_of
from tests.oracles import analysis as oracle


def test_dominance_says_where_its_margin_cannot_be_reached():
    """Nearly all tokens certain: the null's top hundredth holds everything, and no norm could hold more."""
    rng = np.random.default_rng(0)
    runs = []
    for seed in range(2):
        tokens = tokens_frame(rng, 8, 200, concentration=1.5)
        rare = np.arange(len(tokens)) % 200 == 0
        tokens["logp"] = np.where(rare, np.log(0.5), np.log1p(-1e-6))
        runs.append(frame_run(seed=seed, tokens=tokens))
    result = verdict(study(*runs), "C3")
    assert result.verdict == "untestable" and "no room for 5 points more" in result.reason
    assert any(other.name == "share of the top hundredth beyond the null's" for other in result.others)


def test_lorenz_curves_are_means_of_the_steps_largest_first(study):
    axis, _ = c03_dominance.figure(study, lines(study.labels)).figure.axes
    x, y = line(axis, "grpo")
    masses = []
    for run in runs_of(study, "grpo"):
        for step in run.token_steps:
            tokens = run.tokens([step], ["loss_coef", "score_norm_local"]).dropna()
            mass = (tokens["loss_coef"].abs() * tokens["score_norm_local"]).to_numpy(dtype=float)
            if (mass > 0).sum() >= c03_dominance.FEWEST:
                masses.append(mass[tokens["loss_coef"] != 0].tolist())
    assert masses
    for share in (0.125, 0.25, 0.5):
        want = np.mean([oracle.lorenz_share(mass, share) for mass in masses])
        assert np.interp(share, x, y) == pytest.approx(want, abs=1e-2)  # the curve has 101 points
    np.testing.assert_allclose(lorenz(np.array([8.0, 1.0, 1.0, 0.0]), 5), [0, 0, 0.1, 0.2, 1], atol=1e-12)
