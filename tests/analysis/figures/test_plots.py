"""Figures draw what an independent computation finds: the data of lines, bands and bars, not pixels."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis.curves import chart_of
from sharpscope.analysis.figures import COLORS, plain, plots, save, setting_text
from sharpscope.analysis.frames import step_values
from tests.analysis.drawn import bands, line


def test_a_curve_is_the_chart_with_its_interval_as_bars_or_as_a_band(study, monkeypatch):
    """The numbers of a chart are tested in test_curves."""
    values = step_values(study, ["reward_mean"])
    chart = chart_of(values, study.labels)
    one = chart["series"][study.labels.index("grpo")]
    (axis,) = plots.curves(chart, study.labels).axes
    x, y = line(axis, "grpo")
    assert x.tolist() == chart["x"] and y.tolist() == one["y"]
    arms = axis.collections[study.labels.index("grpo")].get_segments()
    np.testing.assert_allclose([ends[:, 1] for ends in arms], list(zip(one["low"], one["high"], strict=True)))
    monkeypatch.setattr(plots, "FEW", 3)
    (axis,) = plots.curves(chart, study.labels).axes
    vertices = bands(axis, COLORS[0])[0].get_paths()[0].vertices
    for at, low, high in zip(x, one["low"], one["high"], strict=True):
        column = vertices[np.isclose(vertices[:, 0], at), 1]
        assert column.min() == pytest.approx(low) and column.max() == pytest.approx(high)


def test_saturated_points_are_hollow_and_few_seeds_are_thin_lines():
    frame = pd.DataFrame({"setting": "grpo", "seed": [0, 0, 1, 1], "step": [0, 5] * 2, "quantity": "q"})
    frame = frame.assign(value=[1.0, 2.0, 3.0, 6.0], saturated=[False, True, False, False])
    (axis,) = plots.curves(chart_of(frame, ["grpo"]), ["grpo"]).axes
    assert line(axis, "saturated")[1].tolist() == [4.0] and line(axis, "grpo")[1].tolist() == [2.0, 4.0]
    assert [each.get_ydata().tolist() for each in axis.lines[:2]] == [[1.0, 2.0], [3.0, 6.0]]


def test_differences_have_their_intervals():
    table = pd.DataFrame({"quantity": "accuracy [points]", "contrast": ["b − a", "c − a"]})
    (axis,) = plots.differences(table.assign(difference=[10, -20], low=[0, -30], high=[20, -10])).axes
    assert [text.get_text() for text in axis.get_yticklabels()] == ["c − a", "b − a"]
    segments = [segment[:, 0] for segment in axis.collections[0].get_segments()]
    np.testing.assert_allclose(segments, [[-30, -10], [0, 20]])


def test_hostile_labels_are_text_and_equal_figures_give_equal_files(tmp_path):
    assert plain("_hidden") == "\u200b_hidden" and plain("a\x1b[31m\n") == "a�[31m⏎" and plain("$x$") == r"\$x\$"
    assert setting_text("grpo (optimizer.lr=1e-4, rollout.group_size=4)") == "grpo (lr=1e-4, group_size=4)"
    name = "$\\frac{ <script> \x1b_a"
    values = pd.DataFrame({"setting": name, "seed": 0, "step": [1, 2], "quantity": "reward_mean", "value": [1.0, 2.0]})
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths = save(plots.curves(chart_of(values, [name]), [name]), tmp_path / folder, "figure")
    for path in paths:
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    assert b"<script>" not in paths[1].read_bytes()
