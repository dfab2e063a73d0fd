"""Charts of the page hold what an independent computation finds: means, intervals, bands and events."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sharpscope.analysis import curves
from sharpscope.analysis.curves import study_charts
from sharpscope.analysis.events import events_of
from sharpscope.analysis.study import Setting, Study
from sharpscope.analysis.summary import verdict
from sharpscope.rules.table import RULES
from sharpscope.traces import Runs, TraceWriter, load_run
from tests.traces.synthetic import new_run, rows


def charts_of(study: Study) -> dict:
    made = study_charts(study, study.settings, Runs(".", dict(study.runs), {}))
    return made | {"charts": {chart["title"]: chart for chart in made["charts"]}}


def test_a_curve_is_the_mean_over_seeds_with_its_t_interval(study):
    made = charts_of(study)
    chart, labels = made["charts"]["reward"], [one["label"] for one in made["settings"]]
    (setting,) = [s for s in study.settings if s.label == "grpo"]
    # (seeds, steps)
    each = np.array([run.steps.sort_values("step")["reward_mean"] for run in setting.runs.values()])
    one = chart["series"][labels.index("grpo")]
    np.testing.assert_allclose(one["y"], each.mean(axis=0), rtol=1e-4)
    half = 2.57058183661 * each.std(axis=0, ddof=1) / math.sqrt(6)  # t, five degrees of freedom
    np.testing.assert_allclose(one["low"], each.mean(axis=0) - half, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(one["high"], each.mean(axis=0) + half, rtol=1e-3, atol=1e-4)
    assert next(iter(made["charts"])) == "reward" and "seeds" not in one
    names = {name for one in made["settings"] for name in one["runs"]}
    assert names == set(study.runs)


def test_of_few_seeds_each_is_drawn_and_of_one_the_interval_over_prompts(study):
    few = study.only(["grpo"])
    runs = list(few.settings[0].runs.items())
    few.settings = (Setting("grpo", "grpo", dict(runs[:2])),)
    one = charts_of(few)["charts"]["reward"]["series"][0]
    assert len(one["seeds"]) == 2 and "low" not in one
    np.testing.assert_allclose(np.mean(one["seeds"], axis=0), one["y"], rtol=1e-3)
    few.settings = (Setting("grpo", "grpo", dict(runs[:1])),)
    titles, name = charts_of(few)["charts"], "held-out accuracy, greedy [%]"
    evaluated = titles[name]["series"][0]
    assert all(
        low < y < high
        for low, y, high in zip(evaluated["low"], evaluated["y"], evaluated["high"], strict=True)
    )


def write(path, steps: int, **columns):
    """A run whose `steps` have these columns, each a function of the step."""
    folder = new_run(path)
    with TraceWriter(folder) as writer:
        for step in range(1, steps + 1):
            writer.append(
                "steps", rows("steps", step, 1) | {name: of(step) for name, of in columns.items()}
            )
    return folder


def test_what_never_varies_is_named_and_one_point_is_not_drawn(tmp_path):
    write(
        tmp_path / "a",
        4,
        truncated_fraction=lambda s: 0.0,
        update_norm=lambda s: 1.0 if s == 2 else None,
    )
    run = load_run(tmp_path / "a")
    made = charts_of(Study({"a": run}))
    assert "completions cut at the limit [%]" in made["still"]
    assert not {"completions cut at the limit [%]", "norm of the update"} & set(made["charts"])


def test_a_long_run_is_averaged_in_blocks_and_spikes_are_marked(tmp_path):
    norms = {step: 50.0 if step == 60 else 1 + 0.01 * (step % 7) for step in range(1, 91)}
    write(tmp_path / "a", 90, grad_norm=norms.get, reward_mean=float, kl_step=lambda step: 0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "POINTS", 40)
        made = charts_of(Study({"a": load_run(tmp_path / "a")}))
    chart = made["charts"]["reward"]
    assert chart["x"] == [2.0 + 3 * k for k in range(30)] == chart["series"][0]["y"]
    ((step, text, kind),) = made["events"]
    assert (step, kind) == (60, "spike") and text.startswith("gradient spike, 4")


def test_events_of_the_training_come_before_those_of_the_machine(tmp_path):
    norms = {step: 50.0 if step == 20 else 1 + 0.01 * (step % 7) for step in range(1, 31)}
    write(tmp_path / "a", 30, grad_norm=norms.get, reward_mean=float, kl_step=lambda step: 0.01)
    one = {"severity": "warning", "value": 1.0, "threshold": 0.5, "action": "warn", "message": ""}
    with TraceWriter(tmp_path / "a") as writer:
        for rule, step in (
            *(("memory", 20), ("memory", 9), ("kl_drift", 20), ("gradient_spike", 20)),
            *(("entropy_collapse", 20), ("entropy_collapse", 25)),
        ):
            writer.append("events", one | {"rule": rule, "step": step})
    study = Study({"a": load_run(tmp_path / "a")})
    machine, spike = events_of(study)
    assert machine == (9, "Memory is nearly full, first of 2 times", "machine")
    assert (spike.step, spike.kind) == (20, "spike")
    size, *others = spike.text.split(" · ")
    assert size.startswith("gradient spike, 4")
    assert others == [RULES["kl_drift"].title, "Entropy collapsed, first of 2 times"]
    assert "emory" not in verdict(study.runs["a"])
