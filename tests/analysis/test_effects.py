"""What lists of effects say about their prediction, against the leaderboard's measurements."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sharpscope.analysis.effects import OUTCOMES, REMOVAL, effect_sections, removal_text
from sharpscope.traces import TraceWriter, load_run
from tests.analysis.test_tokens import append
from tests.traces.synthetic import new_run

LEADERBOARD = Path(__file__).parents[2] / "experiments" / "attribution"


def test_what_is_said_of_the_prediction_is_what_the_leaderboard_measured():
    """Means over updates, then over sets of tokens, prompts and completions, counted here by hand."""
    assert REMOVAL
    for policy, said in REMOVAL.items():
        task = {"smollm2": "sums"}.get(policy, policy.removeprefix("embedded:"))
        lines = (LEADERBOARD / f"{task}.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row["setting"] == "plain"]
        assert said["updates"] == len(rows) and set(OUTCOMES) < set(said["outcomes"])
        values = defaultdict(list)
        for row in rows:
            for kind, outcome, score, rank, _ in row["ranks"]:
                values[kind, outcome, score].append(rank)
        for outcome, numbers in said["outcomes"].items():
            keys = {"rank": (outcome, "effect"), "fresh": (f"{outcome} 2", "effect")}
            keys["ceiling"] = (f"{outcome} 2", "ceiling")
            for name, value in numbers.items():
                kinds = ("tokens", "prompts", "completions")
                means = [np.nanmean(values[kind, *keys[name]]) for kind in kinds]
                assert value == pytest.approx(np.mean(means), abs=0.0051), (policy, outcome, name)


def test_a_policy_that_was_not_measured_says_so():
    """The numbers are then named as those of another policy."""
    own = SimpleNamespace(config={"policy": {"model": "embedded:math"}})
    other = SimpleNamespace(config={"policy": {"model": "someone/else"}})
    number = f"{REMOVAL['embedded:math']['outcomes']['kl']['rank']:.2f} on embedded:math"
    assert removal_text(own, "kl").startswith("Measured: ") and number in removal_text(own, "kl")
    for run in (other, SimpleNamespace(config={})):
        said = removal_text(run, "kl")
        assert said.startswith("Not measured on this model: ") and number in said
    assert "two measurements agree to" in removal_text(own, "failure")
    assert "agree" not in removal_text(own, "heldout")


def test_equal_tokens_are_one_row_with_the_sum_of_their_effects(tmp_path):
    """Two completions of one prompt push the same token up; the third pushes it down, and is another row."""
    folder = new_run(tmp_path / "run")
    with TraceWriter(folder) as writer:
        tokens = {
            "rollout": [0, 1, 2, 3],
            "position": [0] * 4,
            "token_id": [7, 7, 7, 9],
            "loss_coef": [-1.0, -1.0, 1.0, -1.0],
            "logp": [-1.0] * 4,
            "effect_kl": [0.3, 0.2, -0.1, 0.4],
        }
        append(writer, "tokens", 3, 4, **tokens)
        groups = {"rollout": [0, 1, 2, 3], "group": [0, 0, 0, 0], "correct": [True] * 4}
        append(writer, "rollouts", 3, 4, **groups)
    section = effect_sections(load_run(folder), 3)[0]
    table = section.content
    shown = [(one.token, one.direction) for one in table["token"]]
    assert shown == [("⟨7⟩", 1), ("⟨9⟩", 1), ("⟨7⟩", -1)]
    assert list(table["effect"]) == [
        "+50.0 % (×2)",
        "+40.0 %",
        "−10.0 %",
    ]  # of 0.3 + 0.2 + 0.1 + 0.4
    assert [row["effect"] for row in section.records] == pytest.approx([0.5, 0.4, -0.1])
    assert [row["count"] for row in section.records] == [2, 1, 1]
