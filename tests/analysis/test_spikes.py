"""Spikes: the rule and its reasons; shares have one denominator, the step's update."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpscope.analysis.headline import largest_update, moved_sections
from sharpscope.analysis.report import page_of
from sharpscope.analysis.spikes import (
    concentration,
    explain_spikes,
    gradient_scores,
    prompt_shares,
    range_shares,
    step_shares,
)
from sharpscope.rules.judging import robust_z
from sharpscope.traces import Runs, load_run
from tests.analysis.conftest import SPIKE, STEPS, write_report_run
from tests.loops import some


def test_a_planted_spike_is_found_by_the_rule():
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(0, 0.1, 60))
    norms[40] = 10.0
    steps, updates = (
        pd.DataFrame({"step": range(1, 61), "grad_norm": norms}),
        pd.DataFrame({"step": [], "grad_norm": []}),
    )
    tables = {"updates": updates}
    run = SimpleNamespace(steps=steps, columns=lambda table, names: tables[table][names])
    scores = gradient_scores(run)
    found = scores[scores["z"] >= 4]
    assert found["step"].tolist() == [41]
    logs = np.log(norms[:40])
    mad = 1.4826 * np.median(np.abs(logs - np.median(logs)))
    assert found["z"].iloc[0] == pytest.approx((math.log(10) - np.median(logs)) / mad)
    assert found["typical"].iloc[0] == pytest.approx(math.exp(np.median(logs)))
    assert math.isnan(robust_z([0.0] * 9, 1.0)) and robust_z([0.0] * 10, 0.0) == 0.0
    assert robust_z([0.0] * 10, 1.0) == math.inf


def _tokens(seed: int, updates: int, chance: float = 1.0) -> pd.DataFrame:
    """Tokens of a step with `updates` updates, whose shares sum to 1 each."""
    rng = np.random.default_rng(seed)
    count = 40 * updates
    update = np.arange(count) % updates
    share = rng.normal(0.2, 1.0, count)
    share = share / pd.Series(share).groupby(update).transform("sum").to_numpy()
    frame = pd.DataFrame(
        {"rollout": rng.integers(0, 8, count), "update": update, "attribution": share}
    )
    logp = -rng.exponential(1.0, count)
    return frame.assign(
        share=share / updates,
        probability=np.exp(logp),
        logp=logp,
        inclusion_probability=np.float32(chance),
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from([1.0, 0.25]))
def test_tokens_sum_to_their_prompt_and_prompts_and_ranges_to_the_update(
    seed: int, updates: int, chance: float
):
    tokens = _tokens(seed, updates, chance)
    rollouts = {"step": 1, "rollout": range(8), "group": np.arange(8) // 2, "prompt": "p"}
    run = SimpleNamespace(frame=lambda table, step, columns: pd.DataFrame(rollouts)[columns])
    prompts = prompt_shares(run, 1, tokens)
    group = tokens["rollout"] // 2
    for row in some(prompts.to_dict("records")):
        assert row["share"] == pytest.approx(tokens.loc[group == row["group"], "share"].sum())
    assert prompts["share"].sum() == pytest.approx(1.0)
    ranges = range_shares(tokens)
    assert ranges["share"].sum() == pytest.approx(1.0) and ranges["tokens"].sum() == pytest.approx(
        1.0
    )
    largest, sure, carried = concentration(tokens)
    assert 0 <= largest <= 1 and 0 <= carried <= 1 and 0 <= sure <= 1


def test_a_spike_of_one_update_is_found_and_named(tmp_path: Path):
    """Not lost in the mean over the updates of its step; shares and norm are of that update."""
    run = load_run(write_report_run(tmp_path / "a"))
    steps, tokens = run.steps, run.tokens
    updates = pd.DataFrame({"step": np.repeat(steps["step"], 2), "update": [0, 1] * len(steps)})
    norms = np.random.default_rng(0).uniform(0.9, 1.1, len(updates))
    norms[2 * int(np.flatnonzero(steps["step"] == SPIKE)[0]) + 1] = 2.5
    updates["grad_norm"] = norms
    run.__dict__["updates"] = updates
    run.__dict__["steps"] = steps.assign(
        grad_norm=updates.groupby("step")["grad_norm"].mean().to_numpy()
    )
    run.tokens = lambda steps=None, columns=None: tokens(steps, columns).assign(
        update=lambda f: np.arange(len(f)) % 2
    )
    (spike,) = [one for one in explain_spikes(run) if one.z > 10]
    assert (spike.step, spike.grad_norm, spike.update) == (SPIKE, 2.5, "update 2 of 2")
    every = run.tokens([SPIKE], ["attribution", "update"]).dropna()
    np.testing.assert_allclose(
        step_shares(run, SPIKE)["share"], every.loc[every["update"] == 1, "attribution"]
    )


def test_of_two_spikes_that_of_more_times_the_typical_gradient_leads(tmp_path: Path):
    """At step 12 half of the earlier norms are alike, so that twice the typical one has z = 47; at step 14 148 times has 4.9."""
    logs = [0.7, -0.7, 0.7, -0.7, 0.7, -0.01, 0.0, 0.01, -0.01, 0.0, 0.01, math.log(2), -0.7, 5.0]
    run = load_run(write_report_run(tmp_path / "a"))
    run.steps = run.steps.assign(grad_norm=np.exp(logs))
    first, second = explain_spikes(run)
    assert (first.step, second.step) == (SPIKE, STEPS)
    assert (first.z, first.times) == pytest.approx((math.log(2) / 0.014826, 2))
    assert (second.z, second.times) == pytest.approx((5 / (1.4826 * math.log(2)), math.exp(5)))
    assert largest_update(run).step == STEPS and f"step {STEPS}" in moved_sections([run])[0].title
    titles = [
        section.title
        for section in page_of(Runs(tmp_path, {"a": run}, {})).sections
        if section.part == "Tokens"
    ]
    assert f"step {STEPS}: " in titles[0] and any(
        f"step {SPIKE}: " in title for title in titles[1:]
    )


def test_concentration_is_that_of_a_plain_loop():
    tokens = pd.DataFrame(
        {"share": [0.5, -0.3] + [0.001] * 198, "inclusion_probability": np.float32(1)}
    )
    tokens["probability"] = [0.1, 0.2] + [0.999] * 198
    total = 0.8 + 0.198
    assert concentration(tokens) == pytest.approx((0.8 / total, 0.99, 0.198 / total))
