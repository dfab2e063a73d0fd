"""What lists of effects say about their prediction, against the leaderboard's measurements."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sharpscope.analysis.effects import OUTCOMES, REMOVAL, removal_text

LEADERBOARD = Path(__file__).parents[2] / "experiments" / "attribution"


def test_what_is_said_of_the_prediction_is_what_the_leaderboard_measured():
    """Means over updates, then over sets of tokens, prompts and completions, counted here by hand."""
    assert REMOVAL
    for policy, said in REMOVAL.items():
        lines = (LEADERBOARD / f"{policy.removeprefix('embedded:')}.jsonl").read_text().splitlines()
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
