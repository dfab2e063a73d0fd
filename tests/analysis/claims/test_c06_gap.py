"""C6: sharpness and the generalization gap over a grid."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.analysis.claims.frames import frame_run, study
from tests.analysis.claims.planted import grid
from tests.analysis.claims.verdicts import NOT_SUPPORTED, verdict


def test_learning_rate_as_hidden_cause_of_sharpness_and_gap():
    rng = np.random.default_rng(5)
    result = verdict(grid("none", rng, 2, "normal"), "C6")
    assert result.verdict in NOT_SUPPORTED
    plain = next(e for e in result.others if e.name == "plain Kendall τ over all runs")
    assert plain.value > 0.3  # what a test that does not hold the learning rate would report
    assert abs(result.effect.value) < 0.4


def test_a_grid_of_learning_rates_alone_is_untestable():
    runs = [
        frame_run(seed=s, config={"optimizer": {"lr": lr}}, sharpness=lr, train=0.7, tag=f"-{lr}")
        for s in range(6)
        for lr in (1e-4, 2e-4)
    ]
    assert "learning rate" in verdict(study(*runs), "C6").reason


def test_runs_that_have_nothing_to_be_compared_with_are_none_of_the_grid():
    """More seeds of one setting, other learning rates, and a second run of a setting change neither n nor any number."""
    rng = np.random.default_rng(5)
    runs = grid("effect", rng, 2, "normal")
    before = verdict(runs, "C6")
    assert before.n == 24
    sizes = {"rollout": {"group_size": 8, "prompts_per_step": 24}}
    more = [
        frame_run(
            m, s, config={**sizes, "optimizer": {"lr": lr}}, heldout=0.3, train=0.7, sharpness=9.0, tag=f"-x{lr:g}"
        )
        for m in ("grpo", "grpo-sg")
        for s in (5, 6)
        for lr in (1e-4, 8e-4)
    ]
    first = next(iter(runs.by_name.values()))
    again = replace(first, name=f"{first.name}-again")
    after = verdict(study(*runs.by_name.values(), *more, again), "C6")
    assert (after.n, after.effect, after.others, after.p_value) == (24, before.effect, before.others, before.p_value)
