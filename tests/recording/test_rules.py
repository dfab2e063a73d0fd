"""Health rules by value: when each applies, relative to a run's own steps where it is, and what it says."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from sharpscope.config.training import HealthSpec
from sharpscope.errors import UserError
from sharpscope.rules import EARLY, FIELDS, RULES, judge, relative_quantities
from sharpscope.traces.rules import sampler_values


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("action", ["off", "warn", "stop"])
def test_a_rule_applies_from_its_threshold_on(name, action):
    rule, spec = RULES[name], HealthSpec.model_validate({name: {"action": action}})
    assert getattr(HealthSpec(), name).threshold == rule.threshold
    beyond = rule.threshold * (1 + (-0.1 if rule.below else 0.1))
    within = rule.threshold * (1 - (-0.1 if rule.below else 0.1))
    for value in (within, math.nan, None):
        assert judge(7, {rule.quantity: value}, spec.limits) == []
    for value in (rule.threshold, beyond):
        found = judge(7, {rule.quantity: value}, spec.limits)
        if action == "off":
            assert found == []
            continue
        (event,) = found
        assert (event.step, event.rule, event.value, event.action) == (7, name, value, action)
        assert event.severity == ("error" if action == "stop" else "warning")
        assert event.message and not set("{}\n") & set(event.message)


def test_messages_use_the_trainers_names_and_say_where_to_go_on():
    limits = HealthSpec().limits
    (ours,) = judge(3, {"kl_step": 2.0}, limits, lr=1e-4, checkpoint="step-000002")
    assert "optimizer.lr = 0.0001" in ours.message and "step-000002" in ours.message
    for trainer, word in (("trl", "max_completion_length"), ("verl", "data.max_response_length")):
        (event,) = judge(3, {"truncated": 1.0}, limits, trainer)
        assert word in event.message
    assert {frozenset(names) for names in FIELDS.values()} == {frozenset(FIELDS["sharpscope"])}


def test_a_rule_known_after_the_updates_cannot_skip_them():
    from sharpscope.config import build_config

    with pytest.raises(UserError, match="policy_destroyed"):
        build_config(values={"health.policy_destroyed.action": "skip_step"})


def test_quantities_relative_to_the_runs_own_steps():
    rows = [{"entropy_mean": 2.0, "grad_norm": 1.0, "grad_clipped": 0.0, "idle_groups": 0.25} for _ in range(EARLY)]
    assert "relative_entropy" not in relative_quantities(rows)  # the early steps themselves
    rows += [{"entropy_mean": 0.5, "grad_norm": 0.0, "grad_clipped": 1.0, "idle_groups": 1.0}]
    values = relative_quantities(rows)
    assert values["relative_entropy"] == 0.25 and "drift" not in values
    assert values["idle_groups"] == pytest.approx((EARLY * 0.25 + 1) / (EARLY + 1))
    assert values["clipped_updates"] == pytest.approx(1 / (EARLY + 1))
    rows += [{"entropy_mean": 0.75, "idle_groups": None}]
    assert relative_quantities(rows)["drift"] == 0.25  # after a step without a gradient


def test_the_samplers_values():
    logp = -np.linspace(0.5, 3, 100)
    off = logp.copy()
    off[:3] += 0.2
    assert sampler_values(logp, np.full(100, np.nan)) == {}
    assert sampler_values(logp, logp) == {"sampler_impossible": 0.0, "sampler_outside": 0.0, "logp_mismatch": 0.0}
    assert sampler_values(logp, off)["sampler_outside"] == 0.03
    assert sampler_values(logp, np.zeros(100))["sampler_impossible"] == 1.0
    half = np.where(np.arange(100) < 50, off, np.nan)  # the server gave half of them
    assert sampler_values(logp, half)["sampler_outside"] == 0.06
    healthy = {"sampler_outside": 0.08, "logp_mismatch": 0.02}  # bfloat16 in chunks of 1 and of 8, without any sampler
    assert judge(1, healthy, HealthSpec().limits) == []


def test_the_table_is_importable_without_torch():
    code = "import sys, sharpscope.rules, sharpscope.config.training; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
