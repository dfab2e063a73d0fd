"""Health rules by value: when each applies, relative to a run's own steps where it is, and what it says."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpscope.config.run import HealthSpec
from sharpscope.errors import UserError
from sharpscope.recording.health import Quantities
from sharpscope.rules.judging import EARLY, OfLastStep, judge, trend_p
from sharpscope.rules.table import RULES
from sharpscope.traces.rules import robust_z, sampler_values

LIVE = [name for name, rule in RULES.items() if rule.known != "log"]
OF_ONE_STEP = [
    name
    for name in LIVE
    if len(RULES[name].quantities) == 1 and RULES[name].measure.__qualname__.split(".")[0] in ("value", "mean")
]


@pytest.mark.parametrize("name", OF_ONE_STEP)
@pytest.mark.parametrize("action", ["off", "warn", "stop"])
def test_a_rule_applies_from_its_threshold_on(name, action):
    rule, spec = RULES[name], HealthSpec.model_validate({name: {"action": action}})
    assert getattr(HealthSpec(), name).threshold == rule.threshold
    (quantity,) = rule.quantities
    for value in (rule.threshold * 0.9, math.nan, None):
        assert judge(7, {quantity: value}, spec.limits) == []
    for value in (rule.threshold, rule.threshold * 1.1):
        found = judge(7, {quantity: value}, spec.limits)
        if action == "off":
            assert found == []
            continue
        (event,) = found
        assert (event.step, event.rule, event.action) == (7, name, action)
        assert event.value == pytest.approx(value)
        assert event.severity == ("error" if action == "stop" else rule.level(value))
        assert event.message and not set("{}\n") & set(event.message)


def test_a_rule_known_after_the_updates_cannot_skip_them():
    from sharpscope.config import build_config

    with pytest.raises(UserError, match="policy_destroyed"):
        build_config(values={"health.policy_destroyed.action": "skip_step"})


@st.composite
def histories(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Values of each quantity, some of which are missing or not finite."""
    steps, seed = draw(st.integers(1, 150)), draw(st.integers(0, 2**31))
    odd, scale = draw(st.sampled_from([0.0, 0.1, 0.6])), draw(st.sampled_from([0.02, 1.0]))
    random = np.random.default_rng(seed)
    history = {}
    for name in sorted({name for rule in RULES.values() for name in rule.quantities}):
        values = np.abs(50 + scale * random.normal(0, 20, steps).cumsum()) * random.choice([1.0, -1.0], p=[0.9, 0.1])
        others = random.choice([math.nan, math.inf, 0.0], steps)
        history[name] = np.where(random.random(steps) < odd, others, values)
    return history


@given(histories(), st.integers(0, 149))
@settings(max_examples=100, deadline=None)
def test_no_measure_looks_ahead(history, at):
    """A rule says the same of a step in a running training and in its log. (Two judge whole runs; one is three steps late.)"""
    at = min(at, len(history["reward"]) - 1)
    cut = {name: values[: at + 1] for name, values in history.items()}
    for name, rule in RULES.items():
        now = rule.measure(cut)
        np.testing.assert_array_equal(rule.measure(OfLastStep(cut))[-1], now[-1], err_msg=name)
        if name not in ("reward_plateau", "no_motion", "policy_destroyed"):
            np.testing.assert_allclose(now, rule.measure(history)[: at + 1], err_msg=name)


def test_judging_a_step_takes_the_same_time_after_ten_thousand_steps():
    names, random, seconds = {name for rule in RULES.values() for name in rule.quantities}, np.random.default_rng(0), []
    quantities, limits = Quantities(), HealthSpec().limits
    for step in range(10_000):
        row = dict(zip(names, random.uniform(1, 2, len(names)), strict=True))
        history = quantities.history(row)
        if step % 50 == 0:
            started = time.process_time()
            judge(step, history, limits)
            seconds.append(time.process_time() - started)
        quantities.rows.append(row)
    assert history["reward"].tolist() == [row["reward"] for row in quantities.rows]
    assert np.median(seconds[-20:]) < 3 * np.median(seconds[2:22])


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=120))
@settings(max_examples=50, deadline=None)
def test_spikes_are_those_of_the_robust_z_score(norms):
    """Against the score that the recorders compute step by step."""
    found = RULES["gradient_spike"].measure({"grad_norm": np.array(norms)})
    logs = [math.log(norm) for norm in norms]
    for at in range(len(norms)):
        z = robust_z(logs[:at], logs[at])
        if math.isnan(z):
            assert math.isnan(found[at])
        elif abs(z - 4) > 1e-9:
            assert found[at] == pytest.approx(
                math.exp(logs[at] - np.median(logs[max(0, at - 50) : at])) if z > 4 else 0
            )


@given(st.lists(st.integers(0, 20), min_size=10, max_size=60).filter(lambda y: len(set(y)) > 1))
@settings(max_examples=50, deadline=None)
def test_the_test_for_a_trend_is_kendalls(y):
    from scipy.stats import kendalltau

    expected = kendalltau(np.arange(len(y)), y, method="asymptotic").pvalue
    assert trend_p(np.array(y, dtype=float)) == pytest.approx(expected, abs=1e-9)


def last(name: str, **values: list[float]) -> float:
    return float(RULES[name].measure({quantity: np.array(of, dtype=float) for quantity, of in values.items()})[-1])


def test_measures_by_value():
    """Worked out by hand."""
    assert last("entropy_collapse", entropy=[2, 2, 4, 2, 2, 0.5]) == 0.25
    assert math.isnan(last("entropy_collapse", entropy=[2.0] * EARLY))  # the early steps themselves
    assert last("gradient_growth", grad_norm=[1.0] * 5 + [3.0] * 10) == 3
    assert last("dead_groups", dead_groups=[0] + [1] * 5 + [0.5] * 5) == pytest.approx(0.75)  # of the last ten
    # Two steps without a gradient.
    assert last("drift", entropy=[2, 1, 1.25, 1.5], grad_norm=[1, 0, 0, math.nan]) == 0.5
    assert math.isnan(last("drift", entropy=[2, 1], grad_norm=[1, 1]))
    assert last("entropy_rise", entropy=[1.0] * 10 + [0.5] * 10 + [1.0] * 10) == 0.5
    assert last("entropy_rise", entropy=[1.0] * 10 + [1.4] * 10) == 0  # less than 1.5 times
    assert last("zero_gradient", grad_norm=[1, 1, 1, 0, 0, 0, 0]) == pytest.approx(4 / 7)
    assert last("reward_constant", reward=[0.5] * 3 + [0.1] * 6 + [0.2]) == 0.1
    assert last("kl_sign", kl=[0.1] * 8 + [-0.1] * 2) == 0.2
    assert last("ratio_tail", ratio_max=[2.0], ratio_min=[0.05]) == 20
    assert last("non_finite", loss=[math.inf], reward=[math.nan]) == 1
    # noise of 0.1 a step; five steps at 0 after means of 1: 10 standard deviations over sqrt(1/5 + 1/10)
    reward = [1 + 0.1 / 1.4826 * np.sqrt(2) * (-1) ** k / 2 for k in range(20)] + [0.0] * 5
    best = 1 + 0.1 / 1.4826 / np.sqrt(2) / 3  # the mean of the first three
    assert last("reward_collapse", reward=reward) == pytest.approx(best * 10 / math.sqrt(0.3), rel=1e-6)
    assert last("reward_collapse", reward=[0.9, 1.1] * 10 + [0.9] * 5) == 0  # a tenth is no collapse


def test_the_samplers_values():
    logp = -np.linspace(0.5, 3, 100)
    off = logp.copy()
    off[:3] += 0.2
    assert sampler_values(logp, np.full(100, np.nan)) == {}
    equal = {"sampler_impossible": 0.0, "sampler_outside": 0.0, "mismatch": 0.0, "ratio_max": 1.0}
    assert sampler_values(logp, logp) == equal
    assert sampler_values(logp, off)["sampler_outside"] == 0.03
    assert sampler_values(logp, np.zeros(100))["sampler_impossible"] == 1.0
    half = np.where(np.arange(100) < 50, off, np.nan)  # the server gave half of them
    assert sampler_values(logp, half)["sampler_outside"] == 0.06
    healthy = {"sampler_outside": 0.08, "mismatch": 0.04}  # bfloat16 in chunks of 1 and of 8, without any sampler
    assert judge(1, healthy, HealthSpec().limits) == []
