"""Figures over steps and settings draw what an independent computation finds: the data of lines and bands, not pixels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis.figures import steps
from sharpscope.analysis.figures.draw import set_scale, with_groups
from sharpscope.analysis.figures.study import setting_groups, study_pictures
from sharpscope.analysis.figures.style import Picture, lines, panels, styled
from sharpscope.analysis.frames import eval_values, step_values
from sharpscope.analysis.study import Study
from tests.analysis.drawn import bands, check_band, line, runs_of, thin
from tests.oracles import analysis as oracle


def test_reward_lines_and_bands(study):
    figure = steps.trajectories(
        step_values(study, ["reward_mean", "accuracy"]), lines(study.labels), ["reward_mean", "accuracy"]
    )
    for axis, column in zip(figure.axes, ("reward_mean", "accuracy"), strict=True):
        for label in ("grpo", "grpo-sg"):
            check_band(axis, label, oracle.by_step(runs_of(study, label), column))
        assert "[" in axis.get_ylabel()
    assert figure.get_supxlabel() == "step"


def test_few_seeds_are_drawn_each_in_place_of_a_band(study):
    values = step_values(study, ["reward_mean"])
    few = values[values["seed"].isin([0, 1])]
    (axis,) = steps.trajectories(few, lines(study.labels), ["reward_mean"]).axes
    assert not bands(axis)
    wanted = [rows["value"].to_numpy() for _, rows in few.groupby(["setting", "seed"])]
    assert len(thin(axis)) == 4 and all(np.array_equal(*pair) for pair in zip(thin(axis), wanted, strict=True))


def test_groups_of_settings_have_columns_and_the_reference_in_gray(study):
    values = step_values(study, ["reward_mean", "accuracy"])
    values = with_groups(values, {"methods": ["grpo"], "controls": ["grpo-sg"]})
    figure = steps.trajectories(values, lines(study.labels), ["reward_mean", "accuracy"], "grpo")
    assert len(figure.axes) == 4
    first, second = figure.axes[:2]
    assert [axis.get_legend().get_title().get_text() for axis in (first, second)] == ["methods", "controls"]
    want = oracle.by_step(runs_of(study, "grpo"), "reward_mean")
    np.testing.assert_allclose(line(second, "grpo")[1], [np.median(v) for v in want.values()], rtol=1e-6)
    assert len(bands(second)) == 1 and first.get_ylim() == second.get_ylim() and not second.get_ylabel()
    check_band(second, "grpo-sg", oracle.by_step(runs_of(study, "grpo-sg"), "reward_mean"))


def test_every_setting_has_a_row_with_its_seeds_mean_and_interval():
    rng = np.random.default_rng(0)
    values = pd.DataFrame(
        [(label, value) for label, n in (("grpo", 6), ("grpo (lr=1)", 5), ("ar", 2)) for value in rng.random(n)],
        columns=["setting", "value"],
    )
    (axis,) = steps.every_setting(values, lines(values["setting"])).axes
    names = [tick.get_text() for tick in axis.get_yticklabels()]
    assert names == ["ar  n = 2", "grpo  n = 6", "grpo (lr=1)  n = 5"]
    dots = np.concatenate([c.get_offsets() for c in axis.collections])
    for at, name in enumerate(names):
        seen = values.loc[values["setting"] == name.split("  ")[0], "value"].to_numpy()
        mean, half = oracle.mean_and_half(list(seen))
        np.testing.assert_array_equal(np.sort(dots[dots[:, 1] == at, 0]), np.sort(seen))
        diamonds, bars = (_points(axis, marker, at) for marker in ("D", "None"))
        assert diamonds == pytest.approx([mean])
        if len(seen) < 4:
            assert not len(bars)
        else:
            np.testing.assert_allclose([bars.min(), bars.max()], [mean - half, mean + half], rtol=1e-5)
    assert float(axis.lines[-1].get_xdata()[0]) == pytest.approx(
        values.loc[values["setting"] == "grpo", "value"].mean()
    )


def _points(axis, marker, at):
    """x of what lines with a marker draw at y = at."""
    points = np.concatenate([line.get_xydata() for line in axis.lines[:-1] if line.get_marker() == marker])
    return points[np.isfinite(points[:, 0]) & np.isclose(points[:, 1], at), 0]


def test_legends_fit_their_figure_and_leave_the_panel_its_height():
    labels = [f"grpo (optimizer.learning_rate={i}, rollout.group_size=8)" for i in range(8)]
    values = pd.DataFrame(
        [(label, 0, step, "reward_mean", float(step)) for label in labels for step in range(3)],
        columns=["setting", "seed", "step", "quantity", "value"],
    )
    figure = steps.trajectories(values, lines(labels), ["reward_mean"])
    figure.canvas.draw()
    (axis,) = figure.axes
    drawn = axis.get_legend().get_window_extent().transformed(figure.transFigure.inverted())
    assert drawn.x0 >= 0 and drawn.x1 <= 1 and drawn.y1 <= 1
    assert axis.get_window_extent().height / figure.dpi > 1


def first_pictures(study: Study) -> dict[str, Picture]:
    """The pictures of steps and evaluations, by name; the others are not drawn."""
    found: dict[str, Picture] = {}
    for picture in study_pictures(study):
        found[picture.name] = picture
        if picture.name == "heldout_reward":
            break
    return found


def test_a_column_has_the_four_settings_with_most_seeds_and_controls_have_their_own(study):
    (first, second) = study.settings
    fewer = replace(first, label="aa", runs=dict(list(first.runs.items())[:2]))
    crowd = replace(study)
    controls = [replace(second, label=f"grpo-sg-{name}") for name in ("shuffled", "reverse")]
    others = [replace(second, label=f"grpo (lr={i})") for i in range(5)]
    crowd.settings = (fewer, *(replace(second, label=f"s{i}") for i in range(3)), *others, *controls, first, second)
    assert setting_groups(crowd) == {
        "methods": ["grpo", "grpo-sg", "s0", "s1"],
        "other settings": [f"grpo (lr={i})" for i in range(4)],
        "controls": ["grpo-sg-reverse", "grpo-sg-shuffled"],
    }
    crowd.settings = (fewer, *(replace(second, label=f"s{i}") for i in range(3)), first)
    assert setting_groups(crowd) == {"methods": ["grpo", "s0", "s1", "s2"], "methods (2)": ["aa"]}
    pictures = first_pictures(crowd)
    assert len(pictures["settings"].figure.axes[0].get_yticklabels()) == 5
    assert [axis.get_legend().get_title().get_text() for axis in pictures["reward"].figure.axes[:2]] == [
        "methods",
        "methods (2)",
    ]
    assert "settings" not in first_pictures(study)


def test_positive_quantities_have_a_logarithmic_axis(study):
    names = ["grad_norm", "update_norm"]
    figure = steps.trajectories(step_values(study, names), lines(study.labels), names)
    assert [axis.get_yscale() for axis in figure.axes] == ["log", "log"]
    check_band(figure.axes[0], "grpo", oracle.by_step(runs_of(study, "grpo"), "grad_norm"))


def test_rotation_is_drawn_in_degrees():
    values = pd.DataFrame(
        [
            ("grpo-sg", seed, step, name, value + seed)
            for seed in range(6)
            for step in (1, 2)
            for name, value in (("gradient_rotation", 1.0), ("noise_rotation", 80.0))
        ],
        columns=["setting", "seed", "step", "quantity", "value"],
    )
    _, quantities = steps.FIGURES["rotation"]
    ours, noise = steps.trajectories(values, lines(["grpo-sg"]), quantities).axes
    check_band(ours, "grpo-sg", {step: [1.0 + seed for seed in range(6)] for step in (1, 2)})
    check_band(noise, "grpo-sg", {step: [80.0 + seed for seed in range(6)] for step in (1, 2)})
    assert "[degrees]" in ours.get_ylabel().replace("\n", " ") and "[degrees]" in noise.get_ylabel().replace("\n", " ")


def test_evaluations_pool_levels_by_their_size_and_show_each_level(study):
    values = eval_values(study)
    figure = steps.evaluations(values, lines(study.labels))
    titles = [axis.get_title("left") for axis in figure.axes]
    assert titles == ["heldout, greedy", "heldout, temperature 1", "unseen, greedy", "unseen, temperature 1"]
    check_band(figure.axes[1], "grpo", oracle.eval_by_step(runs_of(study, "grpo"), "heldout", 1.0))
    figure = steps.evaluations_by_level(values[values["temperature"] == 0], lines(study.labels))
    (axis,) = [a for a in figure.axes if a.get_title("left") == "unseen, level 3"]
    check_band(axis, "grpo-sg", oracle.eval_by_step(runs_of(study, "grpo-sg"), "unseen", 0.0, "3"))


def test_a_pooled_level_is_made_where_the_trace_has_none(study):
    from sharpscope.analysis.frames import with_pooled

    rows_ = runs_of(study, "grpo")[0].eval
    with_all = with_pooled(rows_, "accuracy").sort_values(["step", "split", "temperature", "level"])
    without = with_pooled(rows_[rows_["level"] != "all"], "accuracy").sort_values(
        ["step", "split", "temperature", "level"]
    )
    np.testing.assert_allclose(with_all["value"], without["value"], rtol=1e-12)
    assert with_all["level"].tolist() == without["level"].tolist()


def test_one_seed_has_no_band_and_a_missing_number_is_left_out():
    values = pd.DataFrame(
        {"setting": "grpo", "seed": 0, "step": [1, 2, 3], "quantity": "reward_mean", "value": [1.0, math.nan, 3.0]}
    )
    (axis,) = steps.trajectories(values, lines(["grpo"]), ["reward_mean"]).axes
    assert not bands(axis) and not thin(axis)
    assert [array.tolist() for array in line(axis, "grpo")] == [[1, 3], [1, 3]]


def test_a_long_run_is_drawn_as_medians_of_blocks_and_says_so():
    rng = np.random.default_rng(0)
    values = pd.DataFrame(
        [("ar", seed, step, rng.random() + 0.1) for seed in range(7) for step in range(1, 101)],
        columns=["setting", "seed", "step", "value"],
    ).assign(quantity="reward_mean")
    figure = steps.trajectories(values, lines(["ar"]), ["reward_mean"])
    assert figure.get_supxlabel() == "step (a point: median of 2 steps)"
    table = dict(zip(zip(values["seed"], values["step"], strict=True), values["value"], strict=True))
    expected = {
        first + 0.5: [(table[seed, first] + table[seed, first + 1]) / 2 for seed in range(7)]
        for first in range(1, 101, 2)
    }
    check_band(figure.axes[0], "ar", expected)
    short = steps.trajectories(values[values["step"] <= 50], lines(["ar"]), ["reward_mean"])
    assert short.get_supxlabel() == "step" and len(line(short.axes[0], "ar")[0]) == 50


def test_scales_follow_the_sign_of_the_values():
    with styled():
        _, axes = panels(3)
    for axis, values in zip(axes, ([1.0, 1e4], [-1e-3, 2.0, 1e4], [3.0, math.nan]), strict=True):
        set_scale(axis, pd.Series(values), "auto")
    assert [axis.get_yscale() for axis in axes] == ["log", "symlog", "log"]
    assert axes[1].yaxis.get_transform().linthresh == pytest.approx(0.1)  # the decade of 0.4, the lowest decile
