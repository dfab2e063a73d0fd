"""`show`, `tokens` and their sections: each number is that of a plain loop over the tables, and what cannot be told is said."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from sharpscope.analysis import show_headline, token_sections, watch
from sharpscope.analysis.forks import predictions_table
from sharpscope.analysis.headline import moved_sections, moved_tokens
from sharpscope.analysis.measures import Z, sharpness_rows
from sharpscope.analysis.pairs import compare_runs
from sharpscope.analysis.report import (
    cost_table,
    curve_table,
    difference_table,
    sharpness_sections,
    sparkline,
    verdict_of,
)
from sharpscope.analysis.sections import Section, to_terminal
from sharpscope.analysis.statistics import accuracy_interval
from sharpscope.analysis.study import Study, studies
from sharpscope.analysis.text import UNSURE, change_text, ends_text, interval_text, value_text
from sharpscope.errors import UserError
from sharpscope.traces import RunLock, TraceWriter, load_run, load_runs, update_run_info
from tests.analysis import conftest as small
from tests.analysis.conftest import SPIKE, values_of, write_report_run, write_small
from tests.traces.synthetic import new_run, rows


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


STEPS = f"steps 0 and {small.SMALL_STEPS}"


def test_sharpness_is_paired_by_prompt_and_named_by_its_functional(pair: Study):
    for setting in ("grpo", "grpo-sg"):
        row = _row(
            sharpness_sections(pair.settings),
            measure=f"SAM sharpness of nll, radius 0.5, {small.SMALL_PROMPTS} prompts; {STEPS}",
            setting=setting,
        )
        first, last = values_of(setting, 0), values_of(setting, small.SMALL_STEPS)
        change = last - first
        errors = [each.std(ddof=1) / math.sqrt(small.SMALL_PROMPTS) for each in (first, change)]
        assert row["at the first"] == interval_text(first.mean(), Z * errors[0])
        assert row["change"] == change_text(change.mean(), Z * errors[1])
    # of the updates' own prompts: no interval
    row = _row(
        sharpness_sections(pair.settings[:1]),
        measure=f"critical sharpness; steps 1 and {small.SMALL_STEPS}",
    )
    change = interval_text(100.0 * (small.SMALL_STEPS - 1), math.nan, sign=True)
    assert row["change"] == change


def test_a_relative_critical_sharpness_has_its_interval(tmp_path: Path):
    """The ends of `probes`, only these where the interval is wider than the value, and no change."""
    ends = {0: (50.0, 30.0, 70.0), small.SMALL_STEPS: (50.0, 20.0, math.inf)}
    for (value, low, high), text in zip(
        ends.values(), ("50 [30 to 70]", "at least 20"), strict=True
    ):
        assert ends_text(value, low, high) == text
    assert ends_text(50.0, 10.0, 200.0) == "10 to 200"
    folder = write_small(tmp_path / "a", "grpo")
    row = {"quantity": "relative_critical_sharpness", "functional": "nll", "probe_set": "s/train@1"}
    row |= {"parameters": "all", "prompts": 5, "converged": True, "seed": None, "rho": None}
    with TraceWriter(folder) as writer:
        for step, (value, low, high) in ends.items():
            known = row | {"value": value, "low": low, "high": high, "prompt_std_error": None}
            writer.append("probes", rows("probes", step, 1) | known)
    (study,) = studies(load_runs(folder))
    found = _row(
        sharpness_sections(study.settings),
        measure=f"relative critical sharpness of nll, 5 prompts; {STEPS}",
    )
    assert found["at the first"] == "50 [30 to 70]" and found["at the last"] == "at least 20"
    assert found["change"] == "–"
    frame = sharpness_rows(study.settings[0].runs[0])
    known = frame[frame["quantity"] == "relative_critical_sharpness"]
    assert known[["low", "high"]].to_numpy().tolist() == [[30.0, 70.0], [20.0, math.inf]]


def test_estimates_of_different_numbers_of_prompts_are_different_measures(tmp_path: Path):
    place = {"quantity": "sam", "functional": "nll", "probe_set": "set/train@1", "rho": 0.5}
    place |= {"parameters": "all", "seed": 0, "converged": None, "saturation": None}
    folder = write_small(tmp_path / "a", "grpo", prompts=24)
    with TraceWriter(folder) as writer:
        more = {"prompts": 200, "value": 1.0, "prompt_std_error": 0.1}
        writer.append("probes", rows("probes", 3, 1) | place | more)
    (study,) = studies(load_runs(folder))
    (section,) = sharpness_sections(study.settings)
    table = section.content.set_index("measure")
    many = table.loc["SAM sharpness of nll, radius 0.5, 200 prompts; step 3"]
    few = table.loc[f"SAM sharpness of nll, radius 0.5, 24 prompts; {STEPS}"]
    assert many["change"] == "–" != few["change"]


def test_values_and_changes_that_cannot_be_told_from_zero_are_words(tmp_path: Path):
    assert value_text(2144.0, 9691.0) == UNSURE and value_text(-3.0, 2.9) == "−3.0 ± 2.9"
    assert value_text(0.0, 0.0) == "0" and value_text(2.0, math.nan) == "2"
    assert (
        change_text(-0.5, 0.6) == "not distinguishable" and change_text(0.5, 0.1) == "+0.50 ± 0.10"
    )


def test_a_change_without_tokens_smaller_than_its_error_is_words():
    row = {"arm": "top 12", "outcome": "kl", "step_change": 2.0, "predicted": -0.1}
    rows = [row | {"measured": value, "std_error": 0.06} for value in (0.2, 0.05)]
    found = predictions_table(pd.DataFrame([*rows, row | {"measured": 0.05}]))
    assert found["measured"].tolist() == ["+10 % ± 3", "not distinguishable", "+2 %"]


@pytest.mark.parametrize(("saturation", "marked"), [(0.5, True), (0.2, False)])
def test_saturated_sharpness_is_marked_in_show_and_on_the_page(
    tmp_path: Path, saturation: float, marked: bool
):
    value = float(values_of("grpo", small.SMALL_STEPS).mean())
    estimate = {
        "functional": "expected_failure",
        "ceiling": value / saturation,
        "saturation": saturation,
    }
    (study,) = studies(load_runs(write_small(tmp_path / "a", "grpo", **estimate)))
    row = _row(
        sharpness_sections(study.settings),
        measure=f"SAM sharpness of expected failure, radius 0.5, {small.SMALL_PROMPTS} prompts; {STEPS}",
    )
    assert ("(saturated)" in row["of possible"]) == marked


def test_rotation_from_rounding_is_not_shown(pair: Study):
    """grpo's angles are 1e-4°: no row, no sparkline, no finding; grpo-sg's are, of the three steps that have them."""
    runs = {setting.label: next(iter(setting.runs.values())) for setting in pair.settings}
    assert not curve_table(runs["grpo"])["by step"].str.contains("rotation").any()
    table = curve_table(runs["grpo-sg"]).set_index("by step")
    assert table.loc["rotation of the gradient [°]", ""] == sparkline(
        np.array(list(small.ROTATION.values()))
    )


def test_rewards_that_are_not_numbers_are_shown_as_such(tmp_path: Path):
    folder = new_run(tmp_path / "a")
    with TraceWriter(folder) as writer:
        for step, reward in enumerate([1.0, 2.0, math.nan], 1):
            writer.append("steps", rows("steps", step, 1) | {"reward_mean": reward})
    table = curve_table(load_run(folder)).set_index("by step")
    assert table.loc["reward", "last"] == "not a number" and table.loc["reward", ""] == "▁█·"


def test_costs_are_those_of_the_tables(tmp_path: Path):
    folder = new_run(
        tmp_path / "a", measuring={"share": 0.4, "seconds": {"norms": 0.25, "surface": 0.25}}
    )
    with TraceWriter(folder) as writer:
        seconds = {"generation_s": 0.5, "training_s": 0.25, "recording_s": 0.25}
        writer.append("steps", rows("steps", 1, 1) | seconds)
    # with what is measured between steps
    (cost,) = cost_table(load_runs(tmp_path)).to_dict("records")
    assert (cost["a step [s]"], cost["generation"], cost["recording"]) == ("1.25", "40 %", "40 %")


def printed(renderable, width=140):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


@pytest.mark.parametrize("terminal", [True, False])
def test_watch_refreshes_until_the_run_ends(tmp_path: Path, terminal: bool):
    """The run is at step 1, and each look lets it go on by one step until it ends after 4."""
    folder, waits = new_run(tmp_path / "run"), []

    def go_on(seconds):
        with TraceWriter(folder) as writer:
            writer.append("steps", rows("steps", len(waits) + 2, 1))
        waits.append(seconds)
        if len(waits) == 3:
            update_run_info(folder, status="finished", steps_done=4)

    with TraceWriter(folder) as writer:
        writer.append("steps", rows("steps", 1, 1))
    console = Console(width=120, file=io.StringIO(), force_terminal=terminal, color_system=None)
    with RunLock(folder):
        assert watch(folder, console, every=0.5, sleep=go_on) == "finished"
    text = console.file.getvalue()
    assert waits == [0.5] * 3 and "finished after 4 steps" in text
    assert (text.count("by step") == 1) != terminal  # on a pipe the view comes once


def test_the_default_step_of_tokens_has_the_largest_gradient_norm_among_the_recorded(
    tmp_path: Path,
):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step, norm in ((1, 2.0), (2, 5.0), (3, 9.0)):
            writer.append("steps", rows("steps", step, 1) | {"grad_norm": [norm]})
            if step < 3:
                share = np.full(4, 0.25) if step == 1 else None
                place = {
                    "rollout": 0,
                    "position": np.arange(4),
                    "heldout_influence": None,
                    "attribution": share,
                }
                writer.append("tokens", rows("tokens", step, 4) | place)
    loaded = load_run(run)
    assert "step 2" in token_sections(loaded, by="probability")[0].title
    assert "step 1" in token_sections(loaded)[0].title
    with pytest.raises(UserError, match="--by heldout_influence: never recorded"):
        token_sections(loaded, by="heldout_influence")
    with pytest.raises(UserError, match="no such column; did you mean"):
        token_sections(loaded, by="atribution")
    with pytest.raises(UserError, match="not recorded at step 2; recorded at steps 1"):
        token_sections(loaded, 2)


# -- The headline: its tokens and shares are those of a plain loop over the tables, and it says what is not known


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    return load_run(write_report_run(tmp_path_factory.mktemp("headline") / "a"))


def test_equal_tokens_are_merged_with_their_shares_summed(run):
    """Equal: the same text, direction and outcome, to the same prompt."""
    tokens = run.tokens(steps=[SPIKE]).merge(
        run.rollouts[run.rollouts["step"] == SPIKE], on="rollout", suffixes=("", "_r")
    )
    wanted: dict[tuple, list[float]] = {}
    for row in tokens.to_dict("records"):
        word = small.WORDS[small.ids_of(SPIKE, row["rollout"])[row["position"]]][:60]
        key = (word, -np.sign(row["loss_coef"]), row["correct"], row["group"])
        wanted.setdefault(key, []).append(row["attribution"])
    largest = sorted(wanted.items(), key=lambda item: -abs(sum(item[1])))[:5]
    found = moved_tokens(run, SPIKE, top=5)
    assert sorted(one.share for one in found) == pytest.approx(
        sorted(sum(shares) for _, shares in largest)
    )
    assert {
        (one.sentence.token, one.sentence.direction, one.correct, one.count) for one in found
    } == {
        (word, direction, correct, len(shares)) for (word, direction, correct, _), shares in largest
    }
    signs = [one.share < 0 for one in found]
    assert signs == sorted(signs)  # those against the rest come last


def test_a_sample_without_an_advantage_is_said_to_be_one(tmp_path: Path):
    """A random quarter of the groups was measured at the only recorded step, and none of them has an advantage."""
    folder = new_run(tmp_path / "a")
    place = {
        "rollout": 0,
        "position": np.arange(4),
        "attribution": 0.0,
        "advantage": 0.0,
        "update": 0,
    }
    with TraceWriter(folder) as writer:
        writer.append("steps", rows("steps", 2, 1) | {"grad_norm": 1.0})
        writer.append("tokens", rows("tokens", 2, 4) | place | {"inclusion_probability": 0.25})
    for section in (moved_sections([load_run(folder)])[0], token_sections(load_run(folder))[0]):
        assert (
            "none of the measured groups (a random 25 % of each update's groups) has a gradient"
            in section.content
        )


def test_the_headline_of_two_methods_in_the_demos_ending(pair: Study):
    """Accuracy before and after, pooled over levels, the difference with its interval, and how far the method turns the gradient."""
    shown = printed(show_headline([run.path for run in pair.runs.values()]))
    text = " ".join(shown.split())
    for heat, start, end in (("greedy", 0.45, 0.7), ("T = 1", 0.35, 0.6)):
        ends = accuracy_interval(end, 0.07 / math.sqrt(2), 80, 1)
        after = interval_text(100 * end, 100 * max(end - ends.low, ends.high - end))
        said = f"({heat}, 80 prompts): {100 * start:.0f} % before, {after} % (grpo), {after} % (grpo-sg) after."
        assert f"Accuracy on held-out prompts {said}" in text
    assert (
        "Did grpo-sg change anything, compared with grpo?" in text
        and "It turns the gradient by 21°." in text
    )
    assert "about 45°" in text and "no difference shown" in text and "One pair of runs" in text
    assert len(shown.splitlines()) <= 20


def test_seeds_that_all_agree_and_few_counts_have_no_verdict():
    assert verdict_of(-0.01, -0.01, 2, counted=True) == "too few seeds to tell"  # both at −1 point
    assert verdict_of(0.5, 0.5, 5, counted=False) == "too few seeds to tell"
    assert verdict_of(0.02, 0.05, 3, counted=True) == "too few seeds to tell"
    assert verdict_of(0.02, 0.05, 4, counted=True) == "a difference"
    assert verdict_of(0.02, 0.05, 3, counted=False) == "a difference"
    assert verdict_of(-0.02, 0.05, 1, counted=True) == "no difference shown"
    assert verdict_of(math.nan, math.nan, 3, counted=False) == ""


def test_the_page_has_the_causes_and_every_identity_of_a_run_and_a_row_for_each_of_several():
    from sharpscope.analysis.cause_sections import identity_sections
    from sharpscope.analysis.summary import verdict as summary
    from sharpscope.causes import verdict
    from sharpscope.traces import load_runs

    runs = load_runs("tests/data/pair")
    found = verdict(runs[0])
    alone = load_runs("tests/data/pair/grpo-s0")
    *_, table = identity_sections(alone)
    assert table.title == found.count and len(table.content) == len(found.results) > 5
    assert dict(zip(table.content["identity"], table.content["holds"], strict=True)) == {
        one.identity.statement: "yes" if one.holds else "no" for one in found.results
    }
    (several,) = identity_sections(runs)
    assert list(several.content["identities"]) == [verdict(run).count for run in runs]
    assert summary(alone[0]) != verdict(alone[0])  # functions of one name are remembered apart
    assert isinstance(summary(alone[0]), str)


def test_two_runs_of_one_name_and_method_are_told_apart_by_their_folders(tmp_path):
    for folder, seed in (("a", 0), ("b", 1)):
        write_report_run(tmp_path / folder / "run", seed=seed, tokens=False)
    runs = load_runs(tmp_path)
    first, second = runs.by_name
    assert len({run.name for run in runs}) == 1
    rows = compare_runs(runs.by_name)
    assert set(rows["baseline"]) == {first} and set(rows["treatment"]) == {second}
    shown = difference_table(rows)
    assert {first, second} <= set(shown) and len(shown) > 4


def test_names_of_rows_stay_whole_and_sparklines_on_one_line_in_80_columns():
    console = Console(width=80, record=True, file=io.StringIO())
    names = ["grpo-sg-constant", "grpo"]
    row = {"method": names, "task": "knights_knaves", "finished": 40, "steps": "150"}
    row |= {"runs": 7, "seeds": 7, "reward ± SD": "0.594 ± 0.017"}
    console.print(to_terminal([Section("Runs", pd.DataFrame(row).astype(str))]))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("grpo-sg-constant  knights_knaves ") for line in lines) == 1
    assert sum("0.594 ± 0.017" in line for line in lines) == 2
