"""Errors that tables and claims rest on, against what repeated draws scatter by, or a plain computation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from sharpscope.analysis.claims.entropy import partial_correlation
from sharpscope.analysis.measures import answer_noise
from sharpscope.analysis.statistics import series_mean, to_halve


def evaluated(level: str, share: np.ndarray, k: int) -> dict[str, object]:
    n = len(share)
    row = {"split": "heldout", "step": 5, "temperature": 1.0, "level": level, "n": n, "k": k}
    return row | {"accuracy": share.mean(), "std_error": share.std(ddof=1) / np.sqrt(n)}


def test_the_noise_of_answers_is_that_of_asking_the_same_prompts_again():
    """Two levels whose prompts have probabilities of their own; only the answers are drawn again."""
    rng, k, found = np.random.default_rng(0), 4, []
    levels = {"2": rng.beta(1, 1, 200), "3": rng.beta(0.3, 1, 100)}
    for _ in range(200):
        rows = [evaluated(name, rng.binomial(k, q) / k, k) for name, q in levels.items()]
        found.append(answer_noise(SimpleNamespace(eval=pd.DataFrame(rows)), "heldout", 5))
    q = np.concatenate(list(levels.values()))
    assert np.mean(found) == pytest.approx((q * (1 - q)).sum() / len(q) ** 2 / k, rel=0.03)
    single = pd.DataFrame([evaluated("all", (np.arange(50) < 20).astype(float), 1)])
    assert answer_noise(SimpleNamespace(eval=single), "heldout", 5) == pytest.approx(0.4 * 0.6 / 50)  # an upper bound
    assert answer_noise(SimpleNamespace(eval=single), "heldout", 6) is None


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_the_error_of_a_series_is_the_scatter_of_its_mean(rho):
    rng, x = np.random.default_rng(1), np.zeros((400, 300))
    for t in range(1, 300):
        x[:, t] = rho * x[:, t - 1] + rng.normal(size=400)
    means, errors = np.transpose([series_mean(row[50:]) for row in x])
    assert np.sqrt((errors**2).mean()) == pytest.approx(means.std(), rel=0.12)
    assert means[0] == x[0, 50:].mean() and np.isnan(series_mean(np.ones(3))[1]) and series_mean(np.ones(9))[1] == 0


def test_the_seeds_that_halve_an_interval():
    def width(n: int) -> float:
        return scipy.stats.t.ppf(0.975, n - 1) / np.sqrt(n)

    for n in (2, 3, 8, 30):
        assert width(to_halve(n)) <= width(n) / 2 < width(to_halve(n) - 1)


def test_partial_correlation_leaves_out_a_parabola():
    rng, step = np.random.default_rng(2), np.arange(3.0, 43.0)
    noise = rng.normal(size=(2, 40))
    values = noise + np.array([[1.0], [-2.0]]) * (0.1 * step + 0.01 * step**2)
    left = [v - np.polyval(np.polyfit(step, v, 2), step) for v in values]
    assert partial_correlation(*values, step) == pytest.approx(np.corrcoef(left)[0, 1])
    assert partial_correlation(values[0], 3 * values[0] + step, step) == pytest.approx(1)
    assert partial_correlation(values[0][:14], values[1][:14], step[:14]) is None
