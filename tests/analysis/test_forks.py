"""Differences between arms: pairing, intervals, what is left out, and the number of batches."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from sharpscope.analysis.forks import fork_differences


def rows(steps=(0,), batches=6, seed=0, run="r", noise=0.001, **arms) -> pd.DataFrame:
    """A table `forks`: arm -> its change of the failure; batches share a large effect that pairing must remove."""
    random, result = np.random.default_rng(seed), []
    for step in steps:
        for batch in range(batches):
            start, shared = 0.5 + random.normal() / 10, random.normal()
            for arm, change in arms.items():
                value = start + change + shared + noise * random.normal() * (arm != "grpo")
                place = {
                    "run": run,
                    "step": step,
                    "fork": "f",
                    "batch": batch,
                    "arm": arm,
                    "reference": "grpo",
                }
                place |= {
                    "updates": 1,
                    "comparison": "step",
                    "outcome": "heldout_failure",
                    "scale": 1.0,
                }
                result.append(place | {"value": value, "start": start, "valid": True})
    return pd.DataFrame(result)


def one(frame, arm="ar", state="step 0", **where) -> pd.Series:
    chosen = frame[(frame["arm"] == arm) & (frame["state"] == state)]
    assert len(chosen) == 1
    return chosen.iloc[0]


def test_within_a_state_the_batches_are_the_sample():
    table = rows(grpo=-0.02, ar=-0.01)
    result = one(fork_differences(table))
    change = (table["value"] - table["start"]).to_numpy().reshape(-1, 2)
    difference = change[:, 1] - change[:, 0]
    test = stats.ttest_1samp(difference, 0)
    interval = test.confidence_interval()
    assert (result["difference"], result["change"]) == pytest.approx(
        (difference.mean(), change[:, 1].mean())
    )
    assert (result["low"], result["high"]) == pytest.approx((interval.low, interval.high))
    assert result["p"] == pytest.approx(test.pvalue) and result["sd"] == pytest.approx(
        difference.std(ddof=1)
    )
    assert (result["batches"], result["states"], result["invalid"]) == (6, 1, 0)
    reference = one(fork_differences(table), "grpo")
    assert (
        reference["difference"] == reference["low"] == reference["high"] == 0
        and reference["p"] == 1
    )


def test_over_states_the_sample_is_their_means():
    table = pd.concat(
        [rows((0, 50), grpo=0.0, ar=0.01), rows((0,), 4, seed=1, run="s", grpo=0.0, ar=0.03)]
    )
    result = fork_differences(table)
    assert set(result["state"]) == {"r, step 0", "r, step 50", "s, step 0", "all states"}
    means = [
        one(result, state=state)["difference"] for state in ("r, step 0", "r, step 50", "s, step 0")
    ]
    pooled = one(result, state="all states")
    interval = stats.ttest_1samp(means, 0).confidence_interval()
    assert pooled["difference"] == pytest.approx(np.mean(means)) and (
        pooled["states"],
        pooled["batches"],
    ) == (3, 16)
    assert (pooled["low"], pooled["high"]) == pytest.approx((interval.low, interval.high))


def test_a_single_state_with_valid_batches_says_nothing_about_all_states():
    table = rows((0, 50), grpo=0.0, ar=0.01)
    table.loc[table["step"] == 50, "valid"] = False
    pooled, alone = one(fork_differences(table), state="all states"), one(fork_differences(table))
    assert (pooled["states"], pooled["batches"], pooled["invalid"]) == (1, 6, 6)
    assert pooled["difference"] == pytest.approx(alone["difference"]) and alone["p"] < 0.05
    assert all(math.isnan(pooled[name]) for name in ("low", "high", "p", "change_low"))


@pytest.mark.parametrize("arm", ["grpo", "ar"])
def test_a_batch_that_is_not_valid_for_both_is_left_out_and_counted(arm):
    table = rows(grpo=0.0, ar=0.01)
    bad = (table["arm"] == arm) & (table["batch"] == 2)
    table.loc[bad, "valid"] = False
    table.loc[bad, "value"] = 99.0
    result = one(fork_differences(table))
    assert (result["batches"], result["invalid"]) == (5, 1) and result[
        "difference"
    ] == pytest.approx(0.01, abs=0.003)
    table["valid"] = False
    nothing = one(fork_differences(table))
    assert nothing["batches"] == 0 and nothing["invalid"] == 6 and pd.isna(nothing["difference"])


def test_a_change_from_an_unknown_start_is_left_out_and_without_any_start_the_value_is_compared():
    table = rows(grpo=0.0, ar=0.01)
    table.loc[table["batch"] == 2, "start"] = None  # measured after the update only
    result, rest = one(fork_differences(table)), one(fork_differences(table[table["batch"] != 2]))
    assert (result["batches"], result["invalid"]) == (5, 1)
    assert (result["change"], result["p"]) == pytest.approx((rest["change"], rest["p"]))
    table = table.assign(
        outcome="update_rotation", start=None, value=np.where(table["arm"] == "ar", 20.0, 0.0)
    )
    result = one(fork_differences(table))
    assert result["change"] == result["difference"] == 20
