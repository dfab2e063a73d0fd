"""The summary over seeds."""

from __future__ import annotations

import numpy as np
import pytest

from sharpscope.analysis.tables.summary import interval_text, method_table, run_metrics, summary
from sharpscope.traces import load_run
from tests.analysis.test_output import write_tiny
from tests.oracles.analysis import mean_and_half
from tests.traces.synthetic import Shape


def test_summary_is_mean_and_interval_over_seeds(study):
    table = summary(study).set_index(["setting", "metric"])
    (setting,) = [s for s in study.settings if s.label == "grpo"]
    late = [run.steps[run.steps["step"] > 4]["reward_mean"].mean() for run in setting.runs.values()]
    row = table.loc[("grpo", "reward, last third")]
    mean, half = mean_and_half(late)
    assert [row["mean"], row["low"], row["high"]] == pytest.approx([mean, mean - half, mean + half], rel=1e-5)
    assert row["runs"] == 6 and row["step"] == 6 and row["unit"] == "reward"
    hits = []
    for run in setting.runs.values():
        last = run.eval[(run.eval["step"] == 6) & (run.eval["split"] == "heldout") & (run.eval["temperature"] == 1.0)]
        parts = last[last["level"] != "all"]
        hits.append((parts["accuracy"] * parts["n"]).sum() / parts["n"].sum())
    assert table.loc[("grpo", "accuracy heldout, T = 1"), "mean"] == pytest.approx(np.mean(hits))
    cells = method_table(table.reset_index()).set_index("setting")
    assert cells.loc["grpo", "reward, last third"] == interval_text(mean, half) and cells.loc["grpo", "runs"] == "6"


def test_summary_compares_at_the_last_step_that_all_have(tmp_path):
    from sharpscope.analysis.study import studies
    from sharpscope.traces import load_runs

    write_tiny(
        tmp_path / "long", shape=Shape(steps=6, prompts=2, group_size=2, length=4, eval_every=3, eval_prompts=10)
    )
    write_tiny(tmp_path / "short", method="grpo-sg")
    (study,) = studies(load_runs(tmp_path))
    table = summary(study).set_index(["setting", "metric"])
    assert study.horizon == 3 and set(table["step"]) == {3}
    long = load_run(tmp_path / "long")
    assert table.loc[("grpo", "reward, last third"), "mean"] == long.steps.set_index("step").loc[3, "reward_mean"]
    assert run_metrics(long, 6)["reward, last third", "reward"] == long.steps["reward_mean"].iloc[4:].mean()
