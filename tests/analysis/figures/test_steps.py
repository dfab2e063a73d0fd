"""Figures over steps and settings draw what an independent computation finds: the data of lines and bands, not pixels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis.figures import steps as figures_steps
from sharpscope.analysis.figures.study import study_pictures
from sharpscope.analysis.figures.style import lines
from sharpscope.analysis.frames import eval_values, step_values
from tests.analysis.drawn import bands, check_band, line, runs_of
from tests.oracles import analysis as oracle


def test_reward_lines_and_bands(study):
    figure = figures_steps.reward(step_values(study, ["reward_mean", "accuracy"]), lines(study.labels))
    for axis, column in zip(figure.axes, ("reward_mean", "accuracy"), strict=True):
        for index, label in enumerate(("grpo", "grpo-sg")):
            check_band(axis, label, oracle.by_step(runs_of(study, label), column), index=index)
        assert axis.get_xlabel() == "step" and "[" in axis.get_ylabel()


def test_few_seeds_are_drawn_each_in_place_of_a_band(study):
    values = step_values(study, ["reward_mean"])
    few = values[values["seed"].isin([0, 1])]
    (axis,) = figures_steps.trajectories(few, lines(study.labels), ["reward_mean"]).axes
    assert not bands(axis)
    thin = [np.asarray(line.get_ydata(), float) for line in axis.lines if line.get_linewidth() < 1]
    wanted = [rows["value"].to_numpy() for _, rows in few.groupby(["setting", "seed"])]
    assert len(thin) == 4 and all(np.array_equal(seen, want) for seen, want in zip(thin, wanted, strict=True))


def test_every_setting_has_a_row_with_its_seeds_mean_and_interval():
    rng = np.random.default_rng(0)
    values = pd.DataFrame(
        [(label, value) for label, n in (("grpo", 6), ("grpo (lr=1)", 5), ("ar", 2)) for value in rng.random(n)],
        columns=["setting", "value"],
    )
    (axis,) = figures_steps.every_setting(values, lines(values["setting"])).axes
    names = [tick.get_text() for tick in axis.get_yticklabels()]
    assert names == ["grpo (lr=1)  n = 5", "grpo  n = 6", "ar  n = 2"]
    for place, name in enumerate(names):
        seen = values.loc[values["setting"] == name.split("  ")[0], "value"].to_numpy()
        mean, half = oracle.mean_and_half(list(seen))
        dots, diamond = [
            line for line in axis.lines if list(line.get_ydata())[:1] == [place] and len(line.get_xdata())
        ][:2]
        np.testing.assert_array_equal(np.asarray(dots.get_xdata()), seen)
        assert float(diamond.get_xdata()[0]) == pytest.approx(mean)
        ends = [c.get_segments()[0][:, 0] for c in axis.collections if c.get_segments()[0][0, 1] == place]
        if len(seen) < 4:
            assert not ends
        else:
            np.testing.assert_allclose(ends[0], [mean - half, mean + half], rtol=1e-5)
    assert float(axis.lines[-1].get_xdata()[0]) == pytest.approx(
        values.loc[values["setting"] == "grpo", "value"].mean()
    )


def test_legends_fit_their_figure_and_leave_the_panel_its_height():
    labels = [f"grpo (optimizer.learning_rate={i}, rollout.group_size=8)" for i in range(8)]
    values = pd.DataFrame(
        [(label, 0, step, "reward_mean", float(step)) for label in labels for step in range(3)],
        columns=["setting", "seed", "step", "quantity", "value"],
    )
    figure = figures_steps.trajectories(values, lines(labels), ["reward_mean"])
    figure.canvas.draw()
    drawn = figure.legends[0].get_window_extent().transformed(figure.transFigure.inverted())
    assert drawn.x0 >= 0 and drawn.x1 <= 1 and drawn.y1 <= 1
    assert figure.axes[0].get_window_extent().height / figure.dpi > 1.5


def test_of_many_settings_those_with_most_seeds_are_drawn(study):
    (first, second) = study.settings
    fewer = replace(first, label="aa", runs=dict(list(first.runs.items())[:2]))
    crowd = replace(study)
    crowd.settings = (fewer, *(replace(second, label=f"s{i}") for i in range(8)), first)
    assert [s.label for s in crowd.largest(9).settings] == [f"s{i}" for i in range(8)] + [first.label]
    assert crowd.largest(10) is crowd
    pictures = {picture.name: picture for picture in study_pictures(crowd)}
    assert len(pictures["settings"].figure.axes[0].get_yticklabels()) == 10
    assert "8 settings with the most seeds, 2 are here alone" in pictures["settings"].caption
    assert "settings" not in {picture.name for picture in study_pictures(study)}


def test_gradient_norm_is_a_geometric_mean(study):
    figure = figures_steps.gradient_norm(step_values(study, ["grad_norm", "update_norm"]), lines(study.labels))
    x, y = line(figure.axes[0], "grpo")
    values = oracle.by_step(runs_of(study, "grpo"), "grad_norm")
    np.testing.assert_allclose(y, [math.exp(sum(map(math.log, v)) / len(v)) for v in values.values()], rtol=1e-9)
    assert figure.axes[0].get_yscale() == "log" and x.tolist() == list(values)


def test_evaluations_pool_levels_by_their_size_and_show_each_level(study):
    values = eval_values(study)
    figure = figures_steps.evaluations(values, lines(study.labels))
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["heldout, greedy", "heldout, temperature 1", "unseen, greedy", "unseen, temperature 1"]
    check_band(figure.axes[1], "grpo", oracle.eval_by_step(runs_of(study, "grpo"), "heldout", 1.0))
    figure = figures_steps.evaluations_by_level(values, lines(study.labels), 0.0)
    (axis,) = [a for a in figure.axes if a.get_title() == "unseen, level 3, greedy"]
    check_band(axis, "grpo-sg", oracle.eval_by_step(runs_of(study, "grpo-sg"), "unseen", 0.0, "3"), index=1)


def test_a_pooled_level_is_made_where_the_trace_has_none(study):
    from sharpscope.analysis.frames import with_pooled

    rows_ = runs_of(study, "grpo")[0].eval
    with_all = with_pooled(rows_, "accuracy").sort_values(["step", "split", "temperature", "level"])
    without = with_pooled(rows_[rows_["level"] != "all"], "accuracy").sort_values(
        ["step", "split", "temperature", "level"]
    )
    np.testing.assert_allclose(with_all["value"], without["value"], rtol=1e-12)
    assert with_all["level"].tolist() == without["level"].tolist()


def test_one_seed_has_no_band_and_a_missing_number_is_a_gap():
    values = pd.DataFrame({
        "setting": "grpo", "seed": 0, "step": [1, 2, 3], "quantity": "reward_mean", "value": [1.0, math.nan, 3.0]
    })  # fmt: skip
    figure = figures_steps.reward(values, lines(["grpo"]))
    (axis,) = figure.axes
    assert not bands(axis)
    np.testing.assert_array_equal(line(axis, "grpo")[1], [1.0, math.nan, 3.0])


@pytest.mark.parametrize("log", [False, True])
def test_a_crowded_figure_shows_means_of_blocks_and_says_so(log):
    rng = np.random.default_rng(0)
    labels, steps = ["grpo", "grpo-sg", "ar", "gspo"], 100
    values = pd.DataFrame(
        [
            (label, seed, step, rng.random() + 0.1)
            for label in labels
            for seed in range(5)
            for step in range(1, steps + 1)
        ],
        columns=["setting", "seed", "step", "value"],
    ).assign(quantity="reward_mean")
    (axis,) = figures_steps.trajectories(values, lines(labels), ["reward_mean"], log=log).axes
    assert axis.get_xlabel() == "step (a point: the mean of 3 steps)"
    own = values[values["setting"] == "ar"]
    expected = {}
    for first in range(1, steps + 1, 3):
        inside = range(first, min(first + 3, steps + 1))
        here = [own[(own["seed"] == seed) & own["step"].isin(inside)]["value"].tolist() for seed in range(5)]
        means = [math.exp(sum(map(math.log, v)) / len(v)) if log else sum(v) / len(v) for v in here]
        expected[sum(inside) / len(inside)] = means
    if log:
        x, y = line(axis, "ar")
        wanted = [math.exp(sum(map(math.log, means)) / 5) for means in expected.values()]
        assert x.tolist() == list(expected)
        np.testing.assert_allclose(y, wanted, rtol=1e-6)
    else:
        check_band(axis, "ar", expected, index=0)  # bands stand in the order of the labels
    few = values[values["setting"].isin(labels[:3])]
    (axis,) = figures_steps.trajectories(few, lines(labels), ["reward_mean"], log=log).axes
    assert axis.get_xlabel() == "step" and len(line(axis, "ar")[0]) == steps


def test_a_block_with_a_missing_number_is_a_gap():
    values = pd.DataFrame(
        {"setting": "ar", "seed": 0, "step": range(1, 7), "value": [1.0, math.nan, 3.0, 5.0, 0.0, 4.0]}
    )
    made = figures_steps.in_blocks(values, 2)
    np.testing.assert_array_equal(made["value"], [math.nan, 4.0, 2.0])
    assert made["step"].tolist() == [1.5, 3.5, 5.5]
    np.testing.assert_allclose(
        figures_steps.in_blocks(values, 2, log=True)["value"], [math.nan, math.sqrt(15), math.nan]
    )
