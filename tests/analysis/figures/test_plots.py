"""Figures draw what an independent computation finds: the data of lines, bands and bars, not pixels."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis.curves import chart_of
from sharpscope.analysis.figures import plots, rotation_figure
from sharpscope.analysis.figures.style import COLORS, lines, plain, save, setting_text
from sharpscope.analysis.frames import step_values
from sharpscope.analysis.tokens import sample_tokens
from sharpscope.traces import Runs
from tests.analysis.drawn import bands, line


def test_a_curve_is_the_chart_with_its_interval_as_bars_or_as_a_band(study, monkeypatch):
    """The numbers of a chart are tested in test_curves."""
    values = step_values(study, ["reward_mean"])
    chart = chart_of(values, study.labels)
    one = chart["series"][study.labels.index("grpo")]
    (axis,) = plots.curves([chart], study.labels).axes
    x, y = line(axis, "grpo")
    assert x.tolist() == chart["x"] and y.tolist() == one["y"]
    arms = axis.collections[study.labels.index("grpo")].get_segments()
    np.testing.assert_allclose([ends[:, 1] for ends in arms], list(zip(one["low"], one["high"], strict=True)))
    monkeypatch.setattr(plots, "FEW", 3)
    (axis,) = plots.curves([chart], study.labels).axes
    vertices = bands(axis, COLORS[0])[0].get_paths()[0].vertices
    for at, low, high in zip(x, one["low"], one["high"], strict=True):
        column = vertices[np.isclose(vertices[:, 0], at), 1]
        assert column.min() == pytest.approx(low) and column.max() == pytest.approx(high)


def test_saturated_points_are_hollow_and_few_seeds_are_thin_lines():
    frame = pd.DataFrame({"setting": "grpo", "seed": [0, 0, 1, 1], "step": [0, 5] * 2, "quantity": "q"})
    frame = frame.assign(value=[1.0, 2.0, 3.0, 6.0], saturated=[False, True, False, False])
    (axis,) = plots.curves([chart_of(frame, ["grpo"])], ["grpo"]).axes
    assert line(axis, "saturated")[1].tolist() == [4.0] and line(axis, "grpo")[1].tolist() == [2.0, 4.0]
    assert [each.get_ydata().tolist() for each in axis.lines[:2]] == [[1.0, 2.0], [3.0, 6.0]]


def test_every_figure_of_a_study_is_drawn(study):
    pictures = dict(plots.run_pictures(Runs(".", dict(study.runs), {})))
    wanted = {"reward", "held_out_accuracy_greedy", "gradient_norm_before_clipping", "weights", "differences"}
    assert wanted <= set(pictures)
    for figure in pictures.values():
        labels = "".join(axis.get_ylabel() for axis in figure.axes)
        assert "_" not in labels and "L2" not in labels  # units in words
        assert not any(axis.get_legend() for axis in figure.axes)  # never over the data


def test_differences_have_their_intervals():
    table = pd.DataFrame({"quantity": "accuracy [points]", "contrast": ["b − a", "c − a"]})
    (axis,) = plots.differences(table.assign(difference=[10, -20], low=[0, -30], high=[20, -10])).axes
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
    (setting,) = [one for one in study.settings if one.label == "grpo-sg"]
    sample = pd.concat([sample_tokens(run, ["logp", "weight"]) for run in setting.runs.values()])
    tokens = pd.DataFrame({"logp": np.log([0.5, 0.9, 0.999]), "loss_coef": [-0.2, 0.1, 0.3], "weight": [1.0, 2.0, 1.5]})
    tokens = tokens.assign(score_norm_local=[1.0, 0.4, 0.01], inclusion_probability=1.0)
    observed, where = plots.weights({"grpo-sg": sample}, tokens, lines(study.labels)).axes
    rest = np.maximum(-np.expm1(sample["logp"].astype(float).to_numpy()), 1e-8)
    edges = np.exp(np.linspace(np.log(rest.min()), np.log(rest.max()), 25))
    inside = [(rest >= a) & (rest < b) for a, b in zip(edges, [*edges[1:-1], np.inf], strict=False)]
    medians = [np.median(sample["weight"].to_numpy()[i]) for i in inside if i.sum() >= 5]
    np.testing.assert_allclose(line(observed, "grpo-sg")[1], medians, rtol=1e-6)
    carried = np.array([0.2, 0.02, 0.002])
    x, y = line(where, "gradient without weights")
    np.testing.assert_allclose(x, [0.5, 0.1, 0.001], rtol=1e-4)
    np.testing.assert_allclose(y, 100 * carried.cumsum() / carried.sum())
    np.testing.assert_allclose(line(where, "tokens")[1], [100 / 3, 200 / 3, 100])


def test_pictures_of_probes_and_tokens_are_drawn(study):
    run = next(iter(study.settings[0].runs.values()))
    assert {"sharpness"} == set(dict(plots.probe_pictures(run.probes)))
    rest = np.linspace(0.01, 0.9, 400)
    (axis,) = plots.score_norms(pd.DataFrame({"logp": np.log1p(-rest), "score_norm_local": 40 * rest})).axes
    x, y = line(axis, "∝ (1 − π)")
    np.testing.assert_allclose(y / x, 40, rtol=1e-6)


def test_every_setting_has_its_own_line_and_grpo_the_first():
    names = ["grpo", "grpo-sg", *(f"grpo (lr={i})" for i in range(20))]
    every = lines(names)
    assert len({str(one) for one in every.values()}) == len(names)
    assert every["grpo"]["color"] == COLORS[0] == lines(["ar", "grpo"])["grpo"]["color"]


def test_hostile_labels_are_text_and_equal_figures_give_equal_files(tmp_path):
    assert plain("_hidden") == "\u200b_hidden" and plain("a\x1b[31m\n") == "a�[31m⏎" and plain("$x$") == r"\$x\$"
    assert setting_text("grpo (optimizer.lr=1e-4, rollout.group_size=4)") == "grpo (lr=1e-4, group_size=4)"
    name = "$\\frac{ <script> \x1b_a"
    values = pd.DataFrame({"setting": name, "seed": 0, "step": [1, 2], "quantity": "reward_mean", "value": [1.0, 2.0]})
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths = save(plots.curves([chart_of(values, [name])], [name]), tmp_path / folder, "figure")
    for path in paths:
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    assert b"<script>" not in paths[1].read_bytes()
