"""Figures draw what an independent computation finds: the data of lines, bands and bars, not pixels."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.ticker import LogLocator

from sharpscope.analysis.figures import plots, rotation_figure
from sharpscope.analysis.figures.style import COLORS, finish, lines, panels, plain, save, setting_text, styled
from sharpscope.analysis.frames import step_values
from sharpscope.analysis.tokens import sample_tokens
from tests.analysis.drawn import bands, line


def test_a_curve_is_the_mean_over_seeds_with_its_t_interval(study):
    values = step_values(study, ["reward_mean", "grad_norm"])
    figure = plots.curves(values, lines(study.labels))
    (setting,) = [s for s in study.settings if s.label == "grpo"]
    each = np.array([run.steps.sort_values("step")["reward_mean"] for run in setting.runs.values()])  # (seeds, steps)
    x, y = line(figure.axes[0], "grpo")
    np.testing.assert_allclose(y, each.mean(axis=0))
    half = 2.57058183661 * each.std(axis=0, ddof=1) / math.sqrt(6)  # t, five degrees of freedom
    vertices = bands(figure.axes[0], COLORS[0])[0].get_paths()[0].vertices
    for at, low, high in zip(x, y - half, y + half, strict=True):
        column = vertices[np.isclose(vertices[:, 0], at), 1]
        assert column.min() == pytest.approx(low) and column.max() == pytest.approx(high)
    assert figure.axes[1].get_ylabel().replace("\n", " ") == "gradient norm before clipping"


def test_a_run_alone_has_bars_over_prompts_and_saturated_points_are_hollow(study):
    one = study.only(["grpo"])
    frame = pd.DataFrame({"setting": "grpo", "seed": 0, "step": [0, 5], "quantity": "q", "value": [1.0, 2.0]})
    frame = frame.assign(low=[0.5, 1.0], high=[2.0, 2.5], saturated=[False, True])
    (axis,) = plots.curves(frame, lines(one.labels)).axes
    (bars,) = axis.collections
    np.testing.assert_allclose([segment[:, 1] for segment in bars.get_segments()], [[0.5, 2.0], [1.0, 2.5]])
    assert line(axis, "saturated")[1].tolist() == [2.0]


def test_what_never_varies_has_one_point_or_is_rounding_is_left_out(study):
    run = next(iter(study.settings[0].runs.values()))
    steps = run.steps.copy()
    assert set(step_values(study, ["reward_mean"])["quantity"]) == {"reward_mean"}
    run.steps = steps.assign(gradient_rotation=1e-4 * np.arange(len(steps)), truncated_fraction=0.0)
    try:
        alone = study.only([study.settings[0].label])
        alone.settings = (type(study.settings[0])("grpo", "grpo", {0: run}),)
        assert step_values(alone, ["gradient_rotation", "truncated_fraction"]).empty
    finally:
        run.steps = steps


def test_every_figure_of_a_study_is_drawn(study):
    pictures = {picture.name: picture for picture in plots.study_pictures(study)}
    assert {"reward", "accuracy", "policy", "gradient_norm", "sharpness", "weights"} <= set(pictures)
    for picture in pictures.values():
        labels = [axis.get_ylabel() for axis in picture.figure.axes]
        assert all(labels) and "_" not in "".join(labels) and "L2" not in "".join(labels)  # units in words
        for legend in [*picture.figure.legends, *(axis.get_legend() for axis in picture.figure.axes)]:
            assert legend is None or legend in picture.figure.legends  # never over the data


def test_differences_have_their_intervals():
    table = pd.DataFrame({"quantity": "accuracy", "unit": "share", "contrast": ["b − a", "c − a"]})
    table = table.assign(difference=[0.1, -0.2], low=[0.0, -0.3], high=[0.2, -0.1])
    (axis,) = plots.differences(table).axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["c − a", "b − a"]
    segments = [segment[:, 0] for segment in axis.collections[0].get_segments()]
    np.testing.assert_allclose(segments, [[-30, -10], [0, 20]])


def test_rotation_is_in_degrees_from_zero():
    table = pd.DataFrame({"method": ["grpo-sg", "ar", "x"], "gradient_rotation": [7.0, 20.0, math.nan]})
    (axis,) = rotation_figure(table.assign(update_rotation=[3.0, 30.0, math.nan]), 58.0).axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["ar", "grpo-sg"]
    assert line(axis, "gradient")[0].tolist() == [20.0, 7.0] and axis.get_xlim()[0] == 0
    assert line(axis, "noise of the batch, 58°")[0].tolist() == [58.0, 58.0]


def test_weights_are_quantiles_and_the_gradient_is_a_cumulative_share(study):
    samples = {
        s.label: pd.concat([sample_tokens(r, ["logp", "weight"]) for r in s.runs.values()]) for s in study.settings
    }
    tokens = pd.DataFrame({"logp": np.log([0.5, 0.9, 0.999]), "loss_coef": [-0.2, 0.1, 0.3], "weight": [1.0, 2.0, 1.5]})
    tokens = tokens.assign(score_norm_local=[1.0, 0.4, 0.01], inclusion_probability=1.0)
    observed, where = plots.weights({"grpo-sg": samples["grpo-sg"]}, [tokens], lines(study.labels)).axes
    rest = np.maximum(-np.expm1(samples["grpo-sg"]["logp"].astype(float).to_numpy()), 1e-8)
    edges = np.exp(np.linspace(np.log(rest.min()), np.log(rest.max()), 25))
    inside = [(rest >= a) & (rest < b) for a, b in zip(edges, [*edges[1:-1], np.inf], strict=False)]
    medians = [np.median(samples["grpo-sg"]["weight"].to_numpy()[i]) for i in inside if i.sum() >= 5]
    np.testing.assert_allclose(line(observed, "grpo-sg")[1], medians, rtol=1e-6)
    carried = np.array([0.2, 0.02, 0.002])
    x, y = line(where, "gradient without weights")
    np.testing.assert_allclose(x, [0.5, 0.1, 0.001], rtol=1e-4)
    np.testing.assert_allclose(y, 100 * carried.cumsum() / carried.sum())
    np.testing.assert_allclose(line(where, "tokens")[1], [100 / 3, 200 / 3, 100])


def test_probe_pictures_and_token_picture_are_drawn(study):
    run = next(iter(study.settings[0].runs.values()))
    names = {picture.name for picture in plots.probe_pictures(run.probes)}
    assert "sharpness" in names
    rest = np.linspace(0.01, 0.9, 400)
    frame = pd.DataFrame({"logp": np.log1p(-rest), "score_norm_local": 40 * rest})
    (axis,) = plots.token_picture(frame).figure.axes
    x, y = line(axis, "∝ (1 − π)")
    np.testing.assert_allclose(y / x, 40, rtol=1e-6)


def test_every_setting_has_its_own_line_and_grpo_the_first():
    names = ["grpo", "grpo-sg", *(f"grpo (lr={i})" for i in range(20))]
    every = lines(names)
    assert len({(line_.color, str(line_.dash)) for line_ in every.values()}) == len(names)
    assert every["grpo"].color == COLORS[0] == lines(["ar", "grpo"])["grpo"].color


def test_hostile_labels_are_text_and_equal_figures_give_equal_files(tmp_path):
    assert plain("_hidden") == "\u200b_hidden" and plain("a\x1b[31m\n") == "a?[31m?" and plain("$x$") == r"\$x\$"
    assert setting_text("grpo (optimizer.lr=1e-4, rollout.group_size=4)") == "grpo (lr=1e-4, group_size=4)"
    name = "$\\frac{ <script> \x1b_a"
    values = pd.DataFrame({"setting": name, "seed": 0, "step": [1, 2], "quantity": "reward_mean", "value": [1.0, 2.0]})
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths = save(plots.curves(values, lines([name])), tmp_path / folder, "figure")
    for path in paths:
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    assert b"<script>" not in paths[1].read_bytes()


def test_an_inverted_logarithmic_axis_keeps_its_decades():
    with styled():
        figure, (axis,) = panels(1)
        axis.set(xscale="log", xlim=(1.0, 1e-8))
        finish(figure, [axis])
    figure.canvas.draw()
    assert isinstance(axis.xaxis.get_major_locator(), LogLocator)
