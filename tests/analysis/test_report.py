"""Sections: each number is that of a plain loop over the tables, and what cannot be told is said."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from sharpscope.analysis.frames import Z
from sharpscope.analysis.pairs import compare_runs
from sharpscope.analysis.report import (
    accuracy_sections,
    cost_table,
    curve_table,
    difference_table,
    found_sections,
    messages,
    problem_sections,
    sharpness_sections,
    sparkline,
)
from sharpscope.analysis.statistics import accuracy_interval
from sharpscope.analysis.study import Study, studies
from sharpscope.analysis.text import interval_text
from sharpscope.traces import TraceWriter, load_run, load_runs
from tests.analysis.small import PROMPTS, ROTATION, STEPS, values_of, write_small
from tests.traces.rows import new_run, rows


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Study:
    root = tmp_path_factory.mktemp("pair")
    for method in ("grpo", "grpo-sg"):
        write_small(root / method, method)
    (study,) = studies(load_runs(root))
    return study


def _row(sections, **wanted: str) -> dict[str, str]:
    (section,) = sections
    frame = section.content
    for name, value in wanted.items():
        frame = frame[frame[name] == value]
    (row,) = frame.to_dict("records")
    return row


def test_sharpness_is_paired_by_prompt_and_named_by_its_functional(pair: Study):
    for setting in ("grpo", "grpo-sg"):
        row = _row(sharpness_sections(pair.settings), measure="SAM sharpness of nll, radius 0.5", setting=setting)
        first, last = values_of(setting, 0), values_of(setting, STEPS)
        change = [b - a for a, b in zip(first, last, strict=True)]
        error = math.sqrt(sum((c - sum(change) / PROMPTS) ** 2 for c in change) / (PROMPTS - 1) / PROMPTS)
        assert row["steps"] == f"0 and {STEPS}"
        assert row["at the first"] == interval_text(first.mean(), Z * first.std(ddof=1) / math.sqrt(PROMPTS))
        assert row["change"] == interval_text(sum(change) / PROMPTS, Z * error, sign=True)
    row = _row(sharpness_sections(pair.settings[:1]), measure="critical sharpness")  # updates' prompts are independent
    assert row["steps"] == f"1 and {STEPS}" and row["change"] == interval_text(
        100.0 * (STEPS - 1), Z * math.hypot(10, 10), sign=True
    )


@pytest.mark.parametrize(("saturation", "marked"), [(0.5, True), (0.2, False)])
def test_saturated_sharpness_is_marked_in_show_and_on_the_page(tmp_path: Path, saturation: float, marked: bool):
    value = float(values_of("grpo", STEPS).mean())
    estimate = {"functional": "expected_failure", "ceiling": value / saturation, "saturation": saturation}
    (study,) = studies(load_runs(write_small(tmp_path / "a", "grpo", **estimate)))
    row = _row(sharpness_sections(study.settings), measure="SAM sharpness of expected_failure, radius 0.5")
    assert ("(saturated)" in row["of the possible rise"]) == marked
    assert ("saturated" in found_sections(study, study.settings)[0].content) == marked


def test_accuracy_is_pooled_greedy_and_sampled_with_wilson_intervals(pair: Study):
    for heat, start, end in (("greedy", 0.45, 0.7), ("T = 1", 0.35, 0.6)):
        row = _row(accuracy_sections(pair.settings), sampling=heat, setting="grpo")
        error = 0.07 / math.sqrt(2)
        ends = accuracy_interval(end, error, 80, 1)
        assert row["before [%]"].startswith(f"{100 * start:.0f} ±")
        assert row["after [%]"] == interval_text(100 * end, 100 * max(end - ends.low, ends.high - end))
        assert row["change [points]"].startswith(f"+{100 * (end - start):.0f} ±")


def test_a_run_compared_with_itself_shows_nothing_but_zeros(pair: Study):
    run = next(iter(pair.runs.values()))
    table = difference_table(compare_runs([run, run]))
    assert len(table) > 3 and set(table["difference"]) <= {"0", "–", "+0 ± 0"}
    assert "a difference" not in set(table["shows"])


def test_rotation_from_rounding_is_not_shown(pair: Study):
    """grpo's angles are 1e-4°: no row, no sparkline, no finding; grpo-sg's are, of the three steps that have them."""
    runs = {setting.label: next(iter(setting.runs.values())) for setting in pair.settings}
    assert not curve_table(runs["grpo"])["by step"].str.contains("rotation").any()
    table = curve_table(runs["grpo-sg"]).set_index("by step")
    assert table.loc["rotation of the gradient [°]", ""] == sparkline(np.array(list(ROTATION.values())))
    said = " ".join(section.note for section in found_sections(pair, pair.settings))
    assert "It turns the gradient by 21°. The noise of one batch turns it by about 45°." in said
    alone = Study({"grpo": runs["grpo"]})
    assert "turns" not in " ".join(section.note for section in found_sections(alone, alone.settings))


def test_rewards_that_are_not_numbers_are_shown_as_such(tmp_path: Path):
    folder = new_run(tmp_path / "a")
    with TraceWriter(folder) as writer:
        for step, reward in enumerate([1.0, 2.0, math.nan], 1):
            writer.append("steps", rows("steps", step, 1) | {"reward_mean": reward})
    table = curve_table(load_run(folder)).set_index("by step")
    assert table.loc["reward", "last"] == "not a number" and table.loc["reward", ""] == "▁█·"
    assert any("reward is not a number in 1 of 3 steps (first: 3)" in text for text in messages(load_runs(tmp_path)))


def test_costs_are_those_of_the_tables_and_name_the_setting_to_change(tmp_path: Path):
    folder = new_run(tmp_path / "a", measuring={"share": 0.4, "seconds": {"norms": 0.25, "surface": 0.25}})
    seconds = {"generation_s": 0.5, "training_s": 0.25, "recording_s": 0.25}
    with TraceWriter(folder) as writer:
        writer.append("steps", rows("steps", 1, 1) | seconds)
    (cost,) = cost_table(load_runs(tmp_path)).to_dict("records")
    # with what is measured between steps
    assert (cost["a step [s]"], cost["generation"], cost["recording"], cost["mostly"]) == (
        "1.25",
        "40 %",
        "40 %",
        "norms",
    )
    (section,) = [one for one in problem_sections(load_runs(tmp_path)) if one.title == "Cost"]
    assert "To record less, change recording.token_gradients_every." in section.note
