"""Values computed from token columns: against finite differences of the distributions themselves, and planted bins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis.token_values import entropy_bins, with_values
from sharpscope.traces import TraceWriter, load_run
from tests.traces.rows import new_run


def _softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max())
    return p / p.sum()


def _entropy(p: np.ndarray) -> float:
    return float(-(p * np.log(p)).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_change_is_that_of_a_small_step_on_the_tokens_logits(temperature):
    """δ(z/T) = −η·c·(e_y − p) changes H by η·c·polarity, by central differences in float64; so does Σπ² by 2·(…)."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        z, y, c, eta = 3 * rng.normal(size=40) / temperature, int(rng.integers(40)), float(rng.normal()), 1e-6
        p = _softmax(z)
        push = -c * (np.eye(40)[y] - p)
        measured = (_entropy(_softmax(z + eta * push)) - _entropy(_softmax(z - eta * push))) / (2 * eta)
        h = _entropy(p)
        polarity = p[y] * (np.log(p[y]) + h) - (p**2 * (np.log(p) + h)).sum()
        tokens = pd.DataFrame({"loss_coef": [c], "polarity": [polarity]})
        assert with_values(tokens)["entropy_change"].iloc[0] == pytest.approx(measured, rel=1e-5, abs=1e-9)


def test_raising_a_peak_token_raises_the_collision_probability_and_a_valley_token_lowers_it():
    """The bins' test is exact for Σπ² when one logit is raised."""
    rng = np.random.default_rng(1)
    signs = []
    for _ in range(300):
        z, y = 2 * rng.normal(size=20), int(rng.integers(20))
        y = int(z.argmax()) if rng.random() < 0.3 else y
        p, higher = _softmax(z), _softmax(z + 1e-6 * np.eye(20)[y])
        signs.append(p[y] >= (p**2).sum())
        assert ((higher**2).sum() > (p**2).sum()) == signs[-1]
    assert 20 < sum(signs) < 280


def test_kl_mismatch_and_the_policy_term_follow_from_their_columns():
    tokens = pd.DataFrame(
        {"logp": [-1.0, -2.0], "behavior_logp": [-1.5, np.nan], "ref_logp": [-1.0, -3.0], "loss_coef": [0.5, 1.0]}
    ).assign(kl_coef=[0.2, np.nan])
    made = with_values(tokens)
    np.testing.assert_allclose(made["mismatch"], [0.5, np.nan])
    np.testing.assert_allclose(made["kl"], [0.0, np.exp(-1.0) + 1 - 1])
    np.testing.assert_allclose(made["policy_coef"], [0.3, np.nan])
    assert "entropy_change" not in made  # no polarity


def test_bins_hold_the_shares_that_were_planted(tmp_path: Path):
    """Four tokens of each kind with known c·polarity and shares; the fifth kind has no advantage."""
    run = new_run(tmp_path / "a")
    peak = np.array([True, False, True, False, True])
    advantage = np.array([1.0, 1.0, -1.0, -1.0, 0.0])
    share = np.array([0.4, 0.3, 0.2, 0.1, 0.0])
    columns = {"step": 1, "rollout": 0, "update": 0, "position": np.arange(5), "token_id": np.arange(5)}
    columns |= {"logp": np.log(np.where(peak, 0.6, 0.05)), "collision": 0.4, "polarity": np.where(peak, 0.2, -0.1)}
    columns |= {"advantage": advantage, "loss_coef": -advantage / 4, "attribution": share}
    columns |= {"inclusion_probability": 0.25}
    with TraceWriter(run) as writer:
        writer.append("tokens", columns)
    found = entropy_bins(load_run(run))
    np.testing.assert_allclose(found["tokens"], 0.2)
    np.testing.assert_allclose(found["gradient"], share, atol=1e-7)
    np.testing.assert_allclose(found["entropy"], np.array([-2, 1, 2, -1, 0]) / 6, atol=1e-6)
