"""Settings that were read wrongly: a model's own task, booleans within lists, one checkpoint that is not in a list."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from sharpscope import distributed
from sharpscope.config import build_config
from sharpscope.config.run import EvaluationSpec
from sharpscope.errors import CheckError, UserError
from sharpscope.forks.start import saved_states
from sharpscope.policy import RolloutSpec, load_policy
from sharpscope.tasks import make_task
from sharpscope.tokens.sharded import ShardedProbes
from sharpscope.training.evaluate import evaluate


@pytest.mark.parametrize("name", ["knights_knaves", "math", "tool_qa"])
def test_an_embedded_policy_trains_on_its_own_task(name: str):
    assert build_config(values={"policy.model": f"embedded:{name}"}).task.kind == name
    both = {"policy.model": f"embedded:{name}", "task": {"kind": "math"}}
    assert build_config(values=both).task.kind == "math"
    assert build_config(values={"task": {"kind": name}}).policy.model == f"embedded:{name}"


def test_another_model_has_the_default_task(tiny_policy: Path):
    assert build_config(values={"policy.model": str(tiny_policy)}).task.kind == "knights_knaves"


@pytest.mark.parametrize("value", [[True], [2, False]])
def test_a_boolean_in_a_list_of_numbers_is_refused(value: list):
    with pytest.raises(UserError, match="must be a number, not true or false"):
        build_config(values={"task": {"kind": "math", "levels": value}})
    with pytest.raises(UserError, match="must be a number, not true or false"):
        build_config(values={"evaluation.temperatures": value})


def test_a_checkpoint_may_be_given_alone():
    with pytest.raises(UserError, match="--checkpoint 50: goes with the folder of a run"):
        saved_states(None, 50)
    assert saved_states(None, 0) == saved_states(None, [0]) == saved_states(None, "0") == [None]


def test_pass_at_8_of_one_greedy_completion_is_not_written(toy_config):
    config = toy_config()
    policy, task = load_policy(config.policy), make_task(config.task)
    asked = EvaluationSpec(prompts=3, samples=8, temperatures=(0.0, 1.0), splits=("heldout",))
    rows = evaluate(
        policy, task, asked, RolloutSpec(max_new_tokens=4), step=0, seed=0, pass_at=(1, 8)
    )
    greedy = [row for row in rows if row["temperature"] == 0]
    sampled = [row for row in rows if row["temperature"] == 1]
    assert greedy and sampled
    assert all(row["pass_at_8"] is None and row["pass_at_1"] is not None for row in greedy)
    assert all(0 <= row["pass_at_8"] <= 1 for row in sampled)


@pytest.mark.parametrize("errors", [[0.0, math.nan], [math.nan, 0.0], [0.0, 9.0]])
def test_a_failed_check_of_a_sharded_model_fails_each_time(errors: list, monkeypatch):
    """With the errors of two processes: NaN is no small error wherever it stands, and what failed is not checked."""
    monkeypatch.setattr(distributed, "gather", lambda _: errors)
    probes = ShardedProbes.__new__(ShardedProbes)
    probes._dtype, probes.checked = np.float32, {}
    for _ in range(2):
        with pytest.raises(CheckError):
            probes._check("along", 1.0, 1.0, 1.0)
        assert "along" not in probes.checked
