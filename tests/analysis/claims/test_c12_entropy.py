"""C12: polarity, entropy and covariance-aware weights."""

from __future__ import annotations

import numpy as np

from tests.analysis.claims.planted import entropy
from tests.analysis.claims.verdicts import verdict


def test_half_of_the_entropy_claim_is_not_the_whole():
    runs = entropy("effect", np.random.default_rng(2), 7, "normal", stable=False)
    result = verdict(runs, "C12")
    assert result.verdict == "untestable" and "cov-grpo" in result.reason
