"""C12: polarity, entropy and covariance-aware weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sharpscope.analysis.claims import c12_entropy, study_of
from tests.analysis.claims.planted import entropy
from tests.analysis.claims.verdicts import verdict


def test_half_of_the_entropy_claim_is_not_the_whole():
    runs = entropy("effect", np.random.default_rng(2), 7, "normal", stable=False)
    result = verdict(runs, "C12")
    assert result.verdict == "untestable" and "cov-grpo" in result.reason


def test_entropy_of_rollouts_decides_nothing():
    """Without entropy at fixed tokens the claim is untestable, and says how to record it."""
    runs = entropy("effect", np.random.default_rng(2), 7, "normal")
    for run in runs.by_name.values():
        run.probes = run.probes.iloc[:0]
    result = verdict(runs, "C12")
    assert result.verdict == "untestable" and "recording.probe_entropy_every=1" in result.reason


def test_the_prediction_of_a_change_is_the_sum_over_the_steps_between():
    """Entropy measured at every third step alone: lr·updates·mean(c·polarity) of three steps against their change."""
    runs = entropy("effect", np.random.default_rng(3), 7, "normal")
    run = runs.by_name["grpo-0"]
    run.probes = run.probes[run.probes["step"] % 3 == 0]
    laid_out = study_of(runs)
    laid_out.read_tokens(c12_entropy.CLAIM.reducers)
    frame = c12_entropy.prediction_frame(laid_out)
    row = frame[(frame["run"] == "grpo-0") & (frame["step"] == 12)].iloc[0]
    tokens = run.token_frame[run.token_frame["step"].isin([10, 11, 12])]
    push = (tokens["loss_coef"] * tokens["polarity"]).groupby(tokens["step"]).mean().sum()
    entropies = run.probes.set_index("step")["value"]
    assert row["predicted"] == pytest.approx(1e-4 * push)
    assert row["measured"] == pytest.approx(entropies[12] - entropies[9])
    assert c12_entropy.drift(run) == pytest.approx(math.log(entropies[60] / entropies[3]))
