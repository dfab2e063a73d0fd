"""Which steps are measured: within a share of the time, at steps that runs share, and the same again on resume."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

import sharpscope
from sharpscope.analysis.tokens import DECILE_SUMS, INCLUSION, inverse_inclusion
from sharpscope.config import build_config
from sharpscope.recording import budget as budgets
from sharpscope.recording import observers
from sharpscope.recording.budget import Budget
from sharpscope.recording.observers import sample_groups
from sharpscope.training import train
from sharpscope.training.checkpoint import checkpoints
from tests.training.test_loop import assert_same, tables

FREE = {
    "recording__budget": 0.05,
    "recording__token_gradients_every": None,
    "recording__rotation_every": None,
    "recording__heldout_influence_every": None,
    "recording__exact_top": 2,
    "recording__exact_random": 2,
    "evaluation__every": 0,
    "probes__heldout_prompts": 2,
}
COSTS = {"shares": 1.0, "norms": 2.0, "rotation": 1.0, "influence": 4.0, "surface": 1.5}


def simulate(budget: Budget, steps: int, costs: dict[str, float], step_s: float = 2.0) -> dict[str, list[int]]:
    """Steps at which each measure is made, with these costs [s]."""
    made: dict[str, list[int]] = {name: [] for name in budgets.MEASURES}
    for step in range(steps + 1):
        for name in budgets.MEASURES:
            if (step or name == "surface") and budget.due(name, step):
                made[name].append(step)
                budget.spend(name, step, costs[name])
        if step:
            budget.end_step(step, step_s, 0.01)
    return made


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_measures_share_the_budget_and_the_ends_are_always_measured(share):
    config = build_config(None, ["steps=1000", f"recording.budget={share}"])
    budget = Budget(config)
    made = simulate(budget, 1000, COSTS)
    spent = sum(len(steps) * COSTS[name] for name, steps in made.items())
    took = (spent + 10) / (spent + 2010)
    assert 0.5 * share < took <= share
    assert budget.spent.summary()["share"] == pytest.approx(took, abs=1e-4)
    for name in ("shares", "norms", "rotation"):
        assert made[name][0] == 1 and made[name][-1] == 1000
        assert all(step % 10 == 0 for step in made[name][1:])
    assert made["surface"][0] == 0 and made["surface"][-1] == 1000
    assert all(made.values()) and len(made["shares"]) >= len(made["norms"]) >= 5


def test_a_default_run_has_ten_rounds_of_sharpness_within_the_budget():
    """With costs in proportion to those of the embedded policy (experiments/benchmarks/speed.md)."""
    costs = {"surface": 1.5, "shares": 0.35, "norms": 1.6, "rotation": 1.0, "influence": 11.0}
    budget = Budget(build_config(None, []))
    made = simulate(budget, 100, costs, step_s=4.1)
    assert made["surface"] == [*range(0, 100, 12), 100]
    assert 10 * costs["surface"] < 0.05 * 410 and budget.spent.summary()["share"] < 0.075
    assert made["shares"] == [1, *range(10, 101, 10)] and not made["influence"]
    budget = Budget(build_config(None, []))
    for step in range(61):
        made = [name for name in budgets.MEASURES if (step or name == "surface") and budget.due(name, step)]
        for name in made:
            budget.spend(name, step, 0.8 if name == "surface" else costs[name])
        if "surface" in made or step == 1:
            budget.spend(budgets.CRITICAL, step, 3.0 if step == 48 else 0.7)  # a long line search
        if step:
            budget.end_step(step, 4.1, 0.01)
    assert "surface" in made  # by its mean cost, not its newest
    costs["surface"] = 3.4  # too expensive: at every second multiple of the interval, until time is left at the end
    assert simulate(Budget(build_config(None, [])), 100, costs, step_s=4.1)["surface"][:4] == [0, 24, 48, 72]


@pytest.mark.parametrize("spikes", [(), (58, 79), (30, 60)])
def test_late_spikes_are_paid_from_what_the_other_measures_leave(spikes):
    """Costs of the embedded policy on a quiet machine (experiments/benchmarks/speed.md)."""
    costs = {"surface": 1.6, "shares": 0.7, "norms": 2.2, "rotation": 1.45, "influence": 9.0}
    budget = Budget(build_config(None, []))
    made = {name: [] for name in budgets.MEASURES}
    for step in range(101):
        for name in budgets.MEASURES:
            if (step or name == "surface") and budget.due(name, step):
                made[name].append(step)
                budget.spend(name, step, costs[name])
        if step in spikes:
            for name, seconds in (("norms", 1.8), ("shares", 0.8)):
                budget.spend(name, step, seconds, spike=True)
        if step:
            budget.end_step(step, 2.8, 0.009)
    assert made["norms"][0] == 1 and made["norms"][-1] == 100
    assert 0.065 < budget.spent.summary()["share"] <= 0.076
    assert len(made["surface"]) >= 6 - len(spikes)


def test_a_short_run_measures_its_ends_only_and_a_cheap_measure_every_time():
    config = build_config(None, ["steps=30"])
    assert simulate(Budget(config), 30, COSTS)["norms"] == [1, 30]
    cheap = dict.fromkeys(COSTS, 1e-6)
    made = simulate(Budget(config), 30, cheap)
    assert made["norms"] == made["shares"] == made["rotation"] == [1, 10, 20, 30]
    assert made["surface"] == [*range(0, 30, 4), 30]


def test_steps_of_a_small_budget_are_among_those_of_a_large_one():
    def measured(share: float) -> set[int]:
        return set(
            simulate(Budget(build_config(None, ["steps=400", f"recording.budget={share}"])), 400, COSTS)["shares"]
        )

    assert measured(0.02) <= measured(0.05) <= measured(0.3)


def test_set_intervals_win_and_no_budget_means_default_intervals():
    fixed = ["steps=40", "recording.token_gradients_every=3", "recording.rotation_every=0", "probes.every=20"]
    made = simulate(Budget(build_config(None, fixed)), 40, COSTS)
    assert made["norms"] == made["shares"] == [1, *range(3, 40, 3), 40]
    assert (made["rotation"], made["surface"]) == ([], [0, 20, 40])
    unlimited = Budget(build_config(None, ["steps=100", "recording.budget=null"]))
    made = simulate(unlimited, 100, COSTS)
    assert made["norms"] == made["rotation"] == [1, *range(10, 101, 10)] and made["influence"] == [50, 100]
    assert unlimited.scheduled(10) is None


def test_state_goes_through_a_checkpoint():
    config = build_config(None, ["steps=100"])
    whole, first = Budget(config), Budget(config)
    for budget in (whole, first):
        for step in range(51):
            for name in budgets.MEASURES:
                if budget.due(name, step):
                    budget.spend(name, step, COSTS[name])
            if step:
                budget.end_step(step, 2.0, 0.01)
    second = Budget(config)
    second.restore(first.state())
    for step in range(51, 101):
        assert whole.scheduled(step) == second.scheduled(step)


def test_observers_continue_from_checkpoints_of_every_version():
    """From the state as JSON; version 0.1 had none, and earlier ones of 0.2 no critical learning rate."""
    config = build_config(None, ["steps=100"])
    first, *others = (observers.Observers(config, None, None) for _ in range(4))
    first.budget.spend("surface", 0, 3.0)
    first.budget.end_step(1, 2.0, 0.01)
    first.critical_lr = 0.25
    state = json.loads(json.dumps(first.state()))
    without = {name: value for name, value in state.items() if name != "critical_lr"}
    for other, given in zip(others, (state, without, {}), strict=True):
        other.restore(given)
        assert other.critical_lr == given.get("critical_lr")
        assert other.budget.spent == (first.budget.spent if given else budgets.Spent())


@pytest.mark.parametrize("spike", [False, True])
def test_a_spike_which_measures_all_groups_does_not_change_the_expected_cost(toy_config, monkeypatch, spike):
    spent: list[tuple[str, bool]] = []
    spend = Budget.spend

    def noted(self: Budget, measure: str, step: int, seconds: float, *, spike: bool = False) -> None:
        spent.append((measure, spike))
        spend(self, measure, step, seconds, spike=spike)

    monkeypatch.setattr(Budget, "spend", noted)
    monkeypatch.setattr(observers, "robust_z", lambda recent, value: 9.0 if spike else 0.0)
    config = toy_config(**FREE, name="spike" if spike else "none", steps=1, rollout__prompts_per_step=4)
    train(config)
    assert {at for measure, at in spent if measure in ("shares", "norms")} == {spike}
    assert {at for measure, at in spent if measure not in ("shares", "norms")} == {False}
    budget = Budget(config)
    budget.spend("shares", 1, 2.0)
    budget.spend("norms", 2, 5.0, spike=True)
    budget.spend("shares", 2, 3.0, spike=True)
    assert budget.spent.cost == {"shares": (1, 2.0), budgets.SPIKE: (2, 8.0)}
    assert budget.spent.measuring == {"shares": 5.0, "norms": 5.0}


class Clock:
    """Every call takes as long as this says [s]."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def test_a_resumed_run_repeats_recorded_decisions_and_trains_the_same(toy_config, monkeypatch, tmp_path):
    changes = FREE | {"steps": 12, "checkpoint__every": 4, "name": "whole"}
    monkeypatch.setattr(budgets, "DEFAULT_INTERVALS", dict.fromkeys(budgets.DEFAULT_INTERVALS, 2))
    monkeypatch.setattr(
        Budget, "_choose", lambda self, step: frozenset({"norms"} if step % 3 else {"shares", "rotation"})
    )
    whole = toy_config(**changes)
    train(whole)
    expected = tables(whole.run_dir)
    assert expected["steps"]["scheduled"].tolist() == ["norms", "norms", "shares rotation"] * 4
    # killed after step 12, before its checkpoint; and now the clock would decide otherwise
    shutil.rmtree(checkpoints(whole.run_dir)[-1])
    sharpscope.traces.update_run_info(whole.run_dir, status="running")
    monkeypatch.undo()
    monkeypatch.setattr(Budget, "_choose", decide_otherwise(Budget._choose))
    assert train(whole, resume=True).status == "finished"
    assert_same(expected, tables(whole.run_dir))


def decide_otherwise(choose):
    """Where nothing was recorded, choose everything."""

    def chosen(self, step):
        return self._recorded.get(step, frozenset(budgets.MEASURES))

    return chosen


def test_decisions_change_nothing_in_training(toy_config, monkeypatch):
    runs = []
    for name, plan in (("all", frozenset({"norms", "shares", "rotation"})), ("none", frozenset())):
        monkeypatch.setattr(Budget, "_choose", lambda self, step, plan=plan: plan)
        runs.append(toy_config(**FREE, name=name, steps=3).run_dir)
        train(toy_config(**FREE, name=name, steps=3))
    one, two = (AutoModelForCausalLM.from_pretrained(checkpoints(folder)[-1]) for folder in runs)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert "score_norm_local" in tables(runs[0])["tokens"].dropna(axis=1, how="all")
    assert tables(runs[1])["tokens"]["score_norm_local"].isna().all()


def measured(toy_config, name: str, **changes) -> pd.DataFrame:
    config = toy_config(
        name=name, steps=1, method="grpo", rollout__prompts_per_step=4, recording__token_gradients_every=1, **changes
    )
    train(config)
    return sharpscope.load_run(config.run_dir).tokens()


def test_sums_over_a_sample_of_groups_are_unbiased_over_all_samples(toy_config, monkeypatch):
    """Every sample that can be drawn is drawn: the mean of each estimate is the sum over all tokens."""
    full = measured(toy_config, "full", evaluation__every=0)
    assert (full[INCLUSION] == 1).all()
    found = []
    for number, drawn in enumerate(itertools.combinations(range(4), 2)):

        def fixed(group, share, seeded, drawn=drawn):
            rows, probability = sample_groups(group, share, seeded)
            assert (len(rows), probability) == (8, 0.5)
            return torch.isin(group, torch.tensor(drawn)).nonzero()[:, 0], probability

        monkeypatch.setattr(observers, "sample_groups", fixed)
        sample = measured(toy_config, f"sample-{number}", evaluation__every=0, recording__group_share=0.5)
        inside = sample["rollout"] // 4
        assert set(inside[sample[INCLUSION].notna()]) == set(drawn)
        np.testing.assert_allclose(sample[INCLUSION].dropna(), 0.5, rtol=1e-6)
        for column in ("score_norm_local", "attribution"):  # what is measured is the same
            known = sample[column].notna()
            assert known.equals(sample[INCLUSION].notna())
            np.testing.assert_allclose(sample[column][known], full[column][known], rtol=1e-5, atol=1e-7)
        found.append(sample)
    for column in ("score_norm_local", "attribution"):
        sums = [float(np.nansum(inverse_inclusion(sample) * sample[column])) for sample in found]
        assert np.std(sums) > 1e-3  # the samples differ
        assert np.mean(sums) == pytest.approx(float(full[column].sum()), rel=1e-5)
    reducer = DECILE_SUMS[0]
    whole = decile_table(reducer, full)
    mean = sum(decile_table(reducer, sample).reindex(whole.index, fill_value=0.0) for sample in found) / len(found)
    np.testing.assert_allclose(mean, whole, rtol=1e-4, atol=1e-6)


def test_every_sample_of_groups_is_as_likely_as_any_other():
    group = torch.tensor([7, 7, 3, 3, 9, 9, 4, 4])
    counts = dict.fromkeys(itertools.combinations((3, 4, 7, 9), 2), 0)
    for seed in range(1200):
        rows, probability = sample_groups(group, 0.5, torch.Generator().manual_seed(seed))
        assert probability == 0.5 and rows.tolist() == sorted(rows.tolist()) and len(rows) == 4
        counts[tuple(sorted(set(group[rows].tolist())))] += 1
    assert all(abs(count - 200) < 60 for count in counts.values())  # 4.6 standard deviations
    rows, probability = sample_groups(group, 0.01, torch.Generator())
    assert (len(rows), probability) == (4, 0.5)  # at least two groups


def decile_table(reducer, tokens: pd.DataFrame) -> pd.Series:
    values = reducer.reduce({name: tokens[name].to_numpy() for name in reducer.columns}, None)
    return pd.DataFrame(values).set_index(["update", "decile", "sign"])["value"]
