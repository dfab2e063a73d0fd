"""Local versions of claims, from counterfactual updates."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis.claims import claim_pictures, local, study_of
from tests.analysis.claims.frames import frame_run, study
from tests.analysis.claims.planted import MAKERS, fork_frame
from tests.analysis.claims.verdicts import verdict

ARMS = {
    "C4": ("sam_sharpness", {"grpo-sg": -0.1}, {"grpo-sg": 0.05}),
    "C7": ("heldout_failure", {"grpo-sg": 0.5}, {"grpo-sg": -0.5}),
    "C10": (
        "heldout_failure",
        {"grpo-sg": 0.5, "grpo-sg-reverse": 0.0, "grpo-sg-shuffled": 0.0},
        {"grpo-sg": 0.5, "grpo-sg-reverse": 0.0, "grpo-sg-shuffled": 0.9},
    ),
    "C12": ("entropy", {"cov-grpo": -0.5}, {"cov-grpo": 0.5}),
}
"""Claim → outcome, effects of the arms that support it, effects that refute it."""


def with_forks(effects, outcome, **options):
    run = frame_run(seed=0)
    run.forks = fork_frame(np.random.default_rng(0), effects, outcome, noise=0.02, **options)
    return study(run)


@pytest.mark.parametrize("claim", ARMS)
def test_planted_differences_between_arms_are_found(claim):
    outcome, there, absent = ARMS[claim]
    assert verdict(with_forks(there, outcome), claim).beside.verdict == "supported"
    assert verdict(with_forks(absent, outcome), claim).beside.verdict == "refuted"


def test_one_update_never_decides_the_claim_between_runs():
    found = verdict(with_forks({"grpo-sg": 0.5}, "heldout_failure"), "C7")
    assert found.verdict == "untestable" and found.version == "between runs"
    assert found.beside.verdict == "supported" and found.beside.version == "one update"


def test_an_arm_that_hardly_turns_the_update_is_untestable():
    runs = with_forks({"grpo-sg": 0.5}, "heldout_failure")
    forks = runs.by_name["grpo-0"].forks
    forks.loc[(forks["outcome"] == "update_rotation") & (forks["arm"] == "grpo-sg"), "value"] = 2.0
    found = verdict(runs, "C7").beside
    assert found.verdict == "untestable" and "turned the update by 2°" in found.reason and "needs 5°" in found.reason


def test_values_are_the_differences_of_the_batches():
    runs = with_forks({"grpo-sg": 0.5}, "heldout_failure")
    forks = runs.by_name["grpo-0"].forks.query("outcome == 'heldout_failure'")
    change = (forks["value"] - forks["start"]).groupby([forks["arm"], forks["batch"]]).first()
    expected = ((change["grpo-sg"] - change["grpo"]) / abs(change["grpo"].mean())).mean()
    assert verdict(runs, "C7").beside.effect.value == pytest.approx(expected)
    # a batch whose row is not valid is left out
    place = forks[(forks["arm"] == "grpo-sg") & (forks["batch"] == 3)].index
    runs.by_name["grpo-0"].forks.loc[place, "valid"] = False
    assert verdict(runs, "C7").beside.n == 11


def test_states_are_the_clusters_where_there_are_enough():
    runs = with_forks({"grpo-sg": 0.5}, "heldout_failure")
    run = runs.by_name["grpo-0"]
    run.forks["step"] = run.forks["batch"] // 2  # six states of two batches
    frame = local.paired(study_of(runs), "grpo-sg", "grpo", "heldout_failure")
    values, places = local.clusters(frame, "change")
    assert len(values) == 6 and set(map(len, places)) == {2}
    assert values[0] == pytest.approx(frame.loc[frame["step"] == 0, "change"].mean())


def test_a_batch_of_two_forks_is_one_cluster():
    """Forks of one state draw the same rollouts for the same batch: another fork of it is no new sample."""
    runs = with_forks({"grpo-sg": 0.5}, "heldout_failure")
    run = runs.by_name["grpo-0"]
    run.forks = pd.concat([run.forks, run.forks.assign(fork="b")], ignore_index=True)
    found = verdict(runs, "C7").beside
    assert found.n == 12 and found.effect.value == pytest.approx(
        verdict(with_forks({"grpo-sg": 0.5}, "heldout_failure"), "C7").beside.effect.value
    )


@pytest.mark.parametrize("claim", ["C4", "C9", "C10"])
def test_each_cluster_is_a_dot_of_the_figure(claim):
    """The figure's values are those that the test read; without counterfactual updates there is no figure."""
    if claim == "C9":
        runs = MAKERS["C9"]("effect", np.random.default_rng(0), 3, "normal")
    else:
        outcome, there, _ = ARMS[claim]
        runs = with_forks(there, outcome)
    found = verdict(runs, claim)
    own = found if claim == "C9" else found.beside
    (shown,) = [p for p in claim_pictures([found], study_of(runs)) if p.name == f"one_update_{claim.lower()}"]
    (axis,) = shown.figure.axes
    dots = np.concatenate([dots.get_offsets()[:, 0] for dots in axis.collections if len(dots.get_offsets())])
    assert sorted(dots) == pytest.approx(sorted(np.concatenate([sample.values for sample in own.samples])))
    assert [label.get_text() for label in axis.get_yticklabels()] == list(
        dict.fromkeys(own.frames["one update"]["name"])
    )
    empty = study(frame_run(seed=0))
    assert not [p for p in claim_pictures([verdict(empty, claim)], study_of(empty)) if "one_update" in p.name]
