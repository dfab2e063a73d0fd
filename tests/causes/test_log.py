"""Causes that a log shows by itself."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from sharpscope.causes.log import causes_of_log
from sharpscope.diagnose import diagnose

STEPS = 20
INDEX = pd.RangeIndex(1, STEPS + 1, name="step")
NOISE = np.random.default_rng(0)


def log(**columns) -> pd.DataFrame:
    """A healthy log of GRPO with changed columns."""
    healthy = {
        "reward": 0.3 + 0.1 * NOISE.random(STEPS),
        "reward_std": 0.3 + 0.1 * NOISE.random(STEPS),
        "grad_norm": 0.2 + 0.1 * NOISE.random(STEPS),
        "entropy": 0.5 + 0.05 * NOISE.random(STEPS),
        "dead_groups": 0.3 + 0.1 * NOISE.random(STEPS),
        "truncated": 0.1 * NOISE.random(STEPS),
        "kl": np.linspace(0, 0.05, STEPS),
        "loss": 0.01 * NOISE.random(STEPS),
        "mismatch": 1e-4 * NOISE.random(STEPS),
        "lr": 1e-6,
    }
    return pd.DataFrame(healthy | columns, index=INDEX)


def named(frame):
    return [cause.name for cause in causes_of_log(frame)]


def test_a_healthy_log_names_nothing():
    assert named(log()) == []
    assert (
        named(
            log(
                **{
                    "rewards/a": np.linspace(0.2, 0.5, STEPS),
                    "rewards/b": np.linspace(-0.1, -0.3, STEPS),
                }
            )
        )
        == []
    )
    assert named(log().iloc[:3]) == []


GROWING = np.linspace(0, 2, STEPS)
SPIKES = np.where(np.arange(STEPS) % 4 == 2, 12.0, 0.3 + 0.01 * np.arange(STEPS))
CASES = {
    "reward_not_finite": log(reward=[*[0.3] * 6, -math.inf, *[0.3] * 13]),
    "zero_learning_rate": log(lr=0.0),
    "reward_constant": log(reward=0.0, reward_std=0.0, dead_groups=1.0),
    "wrong_end_token": log(truncated=1.0),
    "stale_sampler": log(mismatch=np.linspace(0, 0.5, STEPS)),
    "reference_differs": log(kl=0.1),
    "reference_moves": log(kl=1e-12),
    "kl_sign": log(kl=GROWING, loss=-0.3 * GROWING),
    "update_too_large": log(lr=1e-2, entropy=[0.3, 0.8, 1.2, *[2.0] * 17]),
    "prompt_scale": log(reward_std=SPIKES),
    "reward_feature": log(
        **{"rewards/steps": GROWING + 0.1, "rewards/right": np.linspace(0.5, 0.1, STEPS)}
    ),
}


@pytest.mark.parametrize("cause", CASES)
def test_a_planted_cause_is_named(cause):
    assert named(CASES[cause])[:1] == [cause]


def test_the_sentence_has_the_numbers():
    (cause,) = causes_of_log(CASES["kl_sign"])
    assert "-0.3 for each nat" in cause.sentence and "grows to 2" in cause.sentence
    (cause,) = causes_of_log(CASES["reward_not_finite"])
    assert cause.step == 7 and "-inf" in cause.sentence


def judged(frame, tmp_path):
    """The sentences that `diagnose` begins with for a log."""
    path = tmp_path / "log.jsonl"
    rows = frame.rename(columns={"truncated": "completions/clipped_ratio"}).reset_index()
    path.write_text("\n".join(json.dumps(row) for row in rows.to_dict("records")))
    return [cause.sentence for cause in diagnose(path).causes]


@pytest.mark.parametrize(
    ("cause", "first", "second"),
    [
        ("wrong_end_token", "the end token of tokenizer and sampler", "the length limit"),
        ("reference_moves", "the reference is the policy itself", "the KL is not computed"),
    ],
)
def test_where_two_causes_fit_both_are_named_unless_something_graver_is_seen(
    cause, first, second, tmp_path
):
    (sentence,) = judged(CASES[cause], tmp_path)
    assert f"either {first}" in sentence and f", or {second}" in sentence
    assert judged(log(), tmp_path) == []
    collapsed = np.where(np.arange(STEPS) < 10, 0.5, 1e-4)
    assert judged(CASES[cause].assign(entropy=collapsed), tmp_path) == []


def test_a_component_named_accuracy_makes_no_training_on_preferences(tmp_path):
    """TRL logs a reward function `accuracy` as rewards/accuracy/mean, and DPO its share of pairs as rewards/accuracies."""
    rows = [
        {
            "step": step,
            "loss": 0.1,
            "reward": 0.5 * step,
            "reward_std": 0.2,
            "rewards/accuracy/mean": 0.4 / step,
            "rewards/steps/mean": 0.5 * step - 0.4 / step,
            "rewards/accuracy/std": 0.1,
        }
        for step in range(1, 25)
    ]
    log = tmp_path / "trainer_state.json"
    log.write_text(json.dumps({"log_history": rows}))
    found = diagnose(log)
    assert found.log.training == "rewards"
    assert [cause.sentence for cause in found.causes] == [
        "The policy is paid for steps, not for accuracy."
    ]
