"""`compare`: settings that differ, and results with intervals."""

from __future__ import annotations

import math

import pytest

from sharpscope.analysis import compare
from sharpscope.analysis.comparison import mean_over_steps
from sharpscope.analysis.statistics import accuracy_interval
from sharpscope.traces import load_run
from tests.analysis.conftest import PAIR_SHAPE
from tests.analysis.drawn import printed
from tests.oracles.analysis import eval_by_step
from tests.traces.synthetic import Shape, write_run


def test_compare_lists_differing_settings_and_results_with_intervals(two_runs):
    a, b = two_runs
    result = compare(a, b)
    settings = result.settings.set_index("setting")
    assert settings.loc["method"].tolist() == ["grpo", "grpo-sg"] and settings.loc["seed"].tolist() == [0, 1]
    assert "steps" not in settings.index and "calibration.tau" not in settings.index
    results = result.results.set_index("quantity")
    row = results.loc["reward, last third"]
    for side, run in (("a", a), ("b", b)):
        late = run.steps["reward_mean"].to_numpy()[8:]
        assert row[side] == pytest.approx(late.mean())
        assert row[f"{side}_half"] == pytest.approx(1.959964 * mean_over_steps(late)[1])
    assert row["difference"] == pytest.approx(row["b"] - row["a"])
    row = results.loc["accuracy heldout, T = 1, step 12"]
    for side, run in (("a", a), ("b", b)):
        (pooled,) = eval_by_step([run], "heldout", 1.0)[12]
        assert row[side] == pytest.approx(pooled)
        rows_ = run.eval[(run.eval["step"] == 12) & (run.eval["split"] == "heldout") & (run.eval["temperature"] == 1.0)]
        error = math.sqrt(sum(r.std_error**2 / 4 for r in rows_.itertuples() if r.level != "all"))
        (n, k) = rows_["n"].iloc[0] * (rows_["level"] != "all").sum(), rows_["k"].iloc[0]
        ends = accuracy_interval(pooled, error, n, k)
        assert row[f"{side}_half"] == pytest.approx(max(pooled - ends.low, ends.high - pooled))
    assert row["difference_half"] == pytest.approx(math.hypot(row["a_half"], row["b_half"]))
    text = printed(result)
    assert "accuracy heldout, T = 1, step 12" in text and "says nothing about other seeds" in text


def test_compare_refuses_results_of_different_tasks(two_runs, tmp_path):
    other = load_run(write_run(tmp_path / "c", task="math", shape=PAIR_SHAPE, tokens=False, probes=False))
    result = compare(two_runs[0], other)
    assert result.results.empty and any("are not compared" in note for note in result.notes)
    assert result.settings.set_index("setting").loc["task.kind"].tolist() == ["knights_knaves", "math"]
    printed(result)


def test_compare_of_a_run_with_itself_and_with_one_that_has_no_steps(two_runs, tmp_path):
    result = compare(two_runs[0], two_runs[0])
    assert result.settings.empty and (result.results["difference"] == 0).all()
    assert "Their settings are equal" in printed(result)
    empty = load_run(write_run(tmp_path / "d", shape=Shape(steps=0), status="running"))
    assert any("no step yet" in note for note in compare(two_runs[0], empty).notes)
    assert any("not finished (died)" in note for note in compare(two_runs[0], empty).notes)
