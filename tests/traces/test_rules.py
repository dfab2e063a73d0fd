"""Rules on the sampler's log-probabilities by value."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sharpscope.traces.rules import impossible, mismatch


def test_estimates_of_one_token_at_a_time():
    rng = np.random.default_rng(0)
    logp, sampler = -rng.uniform(0, 3, 50), -rng.uniform(0, 3, 50)
    found = mismatch(logp, sampler)
    for i, (p, q) in enumerate(zip(logp.tolist(), sampler.tolist(), strict=True)):
        r = math.exp(p - q)
        assert found["outside"][i] == (not 0.9 <= r <= 1.1)
        assert found["k1"][i] == pytest.approx(-math.log(r))
        assert found["k2"][i] == pytest.approx(math.log(r) ** 2 / 2)
        assert found["k3"][i] == pytest.approx(r - 1 - math.log(r), abs=1e-12)


def test_the_estimates_are_of_the_divergence_from_sampler_to_trainer():
    """Weighted by the sampler's probabilities, k1 and k3 sum to KL(μ‖π) exactly."""
    mu, pi = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    found = mismatch(np.log(pi), np.log(mu))
    kl = float((mu * np.log(mu / pi)).sum())
    assert (mu * found["k1"]).sum() == pytest.approx(kl) and (mu * found["k3"]).sum() == pytest.approx(kl)


TRAINER = -np.linspace(0.2, 2, 20)


@pytest.mark.parametrize(
    ("sampler", "share", "why"),
    [
        (TRAINER, 0.0, ""),
        (np.zeros(20), 1.0, "all are 0"),
        (np.full(20, -1.5), 1.0, "all are -1.5"),
        (np.where(np.arange(20) < 5, 0.0, TRAINER), 0.25, "exactly 0"),
        (np.where(np.arange(20) < 2, 0.5, TRAINER), 0.1, "above 0"),
        (np.where(np.arange(20) < 2, 1e-5, TRAINER), 0.0, ""),  # rounding
        (np.select([np.arange(20) < 1, np.arange(20) < 2], [0.5, 0.0], TRAINER), 0.1, "above 0, exactly 0"),
    ],
)
def test_what_cannot_be(sampler, share, why):
    assert impossible(TRAINER, sampler) == (share, why)


def test_what_may_be():
    assert impossible(np.full(20, -0.01), np.zeros(20)) == (0.0, "")  # nearly certain tokens round to 0
    assert impossible(np.full(20, -1.0), np.full(20, -1.0)) == (0.0, "")  # the trainer's are one value too
    assert impossible(TRAINER[:5], np.full(5, -1.0)) == (0.0, "")  # too few to tell
    assert impossible(np.array([]), np.array([])) == (0.0, "")
