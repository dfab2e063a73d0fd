"""Which runs may be pooled or compared; paired comparisons: values by hand, a run with itself, saturation, a rare collapse."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from sharpscope.analysis.pairs import compare_runs
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import Study, studies
from tests.analysis.claims.planted import FrameRun, frame_run, paired_study

HELDOUT = "held-out accuracy, greedy"
SHARPNESS = "SAM sharpness of expected_failure per unit of 1 − loss"


def row(frame: pd.DataFrame, quantity: str) -> pd.Series:
    (found,) = [rows for _, rows in frame[frame["quantity"] == quantity].iterrows()]
    return found


def probed(rises: dict[float, float], ceiling: float | None = 0.5, **options: object) -> FrameRun:
    probes = [
        {"step": 40, "quantity": "sam", "rho": rho, "value": rise, "ceiling": ceiling} for rho, rise in rises.items()
    ]
    return frame_run(probes=probes, **options)


def test_intervals_over_seeds_by_hand() -> None:
    for seeds in (3, 8):
        runs = paired_study(seeds, 0.05, noise=0.02).by_name
        found = row(compare_runs(runs), HELDOUT)
        greedy = {
            name: run.eval[(run.eval["temperature"] == 0) & (run.eval["step"] == 40)]["accuracy"].iloc[0]
            for name, run in runs.items()
        }
        values = np.array([greedy[f"grpo-sg-{seed}"] - greedy[f"grpo-{seed}"] for seed in range(seeds)])
        ends = stats.t.interval(0.95, seeds - 1, values.mean(), stats.sem(values))
        assert (found["low"], found["high"]) == pytest.approx(ends)
        assert found["n"] == seeds and found["paired_by"] == "seed" and found["median"] == np.median(values)
        assert found["worst"] == pytest.approx(values.min())
        assert found["worst_pair"] == f"seed {values.argmin()}"
        assert found["p"] == sign_flip_p(values) if seeds == 8 else math.isnan(found["p"])


def test_one_pair_is_paired_by_step() -> None:
    columns = {"reward_mean": np.linspace(0, 1, 40)}
    first, second = (probed({0.05: 0.1}, method=method, columns=columns) for method in ("grpo", "gspo"))
    second.steps["reward_mean"] += 0.25
    frame = compare_runs([first, second])
    assert {HELDOUT, "reward", "entropy", "update norm", SHARPNESS} <= set(frame["quantity"])
    found = row(frame, "reward")
    assert (found["n"], found["paired_by"]) == (1, "step")
    assert found["difference"] == pytest.approx(0.25) == pytest.approx(found["high"])  # no noise between the steps


def test_saturated_sharpness_is_marked_and_not_compared() -> None:
    pair = [probed({0.05: 0.1, 0.5: 0.49}), probed({0.05: 0.12, 0.5: 0.45}, method="gspo")]
    found = row(compare_runs(pair), SHARPNESS)
    assert found["difference"] == pytest.approx(0.04) and "radius 0.05" in found["note"]
    pair = [probed({0.5: 0.49}), probed({0.5: 0.45}, method="gspo")]
    found = row(compare_runs(pair), SHARPNESS)
    assert found["n"] == 0 and math.isnan(found["difference"]) and "saturated" in found["note"]
    assert found["baseline_value"] == pytest.approx(0.98)
    runs = [probed({0.5: (0.1, 0.49)[s]}, method=method, seed=s) for s in (0, 1) for method in ("grpo", "gspo")]
    found = row(compare_runs(runs), SHARPNESS)
    assert (found["n"], found["baseline_value"]) == (1, pytest.approx(0.2))  # the mean of the pair that is compared


def test_ceiling_of_an_old_run_is_its_training_accuracy() -> None:
    pair = [probed({0.5: 0.1}, None, train=0.5), probed({0.5: 0.05}, None, train=0.25, method="gspo")]
    found = row(compare_runs(pair), SHARPNESS)
    assert found["difference"] == pytest.approx(0.0) and "training accuracy" in found["note"]


def test_clipping_is_read_from_updates_of_older_runs() -> None:
    updates = pd.DataFrame({"step": [39, 39, 40, 40], "skipped": False, "clip_factor": [0.5, 1.0, 1.0, 1.0]})
    runs = [frame_run(), frame_run("gspo")]
    runs[0].updates, runs[1].updates = updates.assign(clip_factor=1.0), updates
    assert row(compare_runs(runs), "updates with a clipped gradient")["difference"] == pytest.approx(0.25)


# -- Studies and settings


def laid_out(*runs: FrameRun) -> list[Study]:
    return studies(Study({run.name: run for run in runs}))


def test_seeds_are_one_setting_and_other_settings_are_told_apart() -> None:
    hot = {"optimizer": {"lr": 3e-4}}
    runs = [frame_run("grpo", seed) for seed in (0, 1)] + [frame_run("grpo-sg", seed) for seed in (0, 1)]
    runs += [frame_run("grpo", seed, config=hot, tag="-hot") for seed in (0, 1)]
    (study,) = laid_out(*runs)
    assert study.labels == ["grpo (optimizer.lr=0.0001)", "grpo (optimizer.lr=0.0003)", "grpo-sg"]
    assert [list(s.runs) for s in study.settings] == [[0, 1]] * 3
    assert study.slug == "" and study.notes == ()
    # the setting with the most seeds has the method's name, and the others are told from it
    (study,) = laid_out(
        *runs, frame_run("grpo", 2), frame_run("grpo", 0, config={"rollout": {"group_size": 4}}, tag="-4")
    )
    assert study.labels == ["grpo", "grpo (optimizer.lr=0.0003)", "grpo (rollout.group_size=4)", "grpo-sg"]
    (note,) = study.notes
    assert note.startswith("grpo alone stands for") and "optimizer.lr=0.0001, rollout.group_size=" in note


def test_tasks_task_settings_and_policies_are_never_one_study() -> None:
    people = frame_run(config={"task": {"people": 5}}, tag="-people")
    other = frame_run(config={"policy": {"model": "other"}}, tag="-other")
    result = laid_out(frame_run(), replace(frame_run(tag="-math"), task="math"), people, other)
    assert len(result) == 4 and len({s.slug for s in result}) == 4
    names = [s.name for s in result]
    assert names[1] == "math" and "task.people=5" in names[2] and "policy.model=other" in names[3]


def test_finished_runs_come_before_others_and_a_seed_counts_once() -> None:
    stopped = replace(frame_run(seed=1), name="stopped", status="interrupted")
    (study,) = laid_out(replace(frame_run(), name="again"), replace(frame_run(), name="done"), stopped)
    assert list(study.settings[0].runs) == [0]
    assert any("stopped (interrupted, 40 steps) is left out" in note for note in study.notes)
    assert any("done repeats seed 0 of again" in note for note in study.notes)
