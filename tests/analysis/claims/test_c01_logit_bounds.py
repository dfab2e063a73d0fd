"""C1: bounds of the logit gradient, counted on every token and drawn."""

from __future__ import annotations

import math

import numpy as np

from sharpscope.analysis.claims import c01_logit_bounds
from sharpscope.analysis.figures.style import lines
from sharpscope.analysis.tokens import scan
from sharpscope.traces import TraceWriter, load_run, update_run_info
from tests.analysis.drawn import line
from tests.traces.rows import new_run, rows
from tests.traces.synthetic import softmax_tokens


def _counts(run):
    results = scan({"a": run}, [c01_logit_bounds.REDUCER])["C1"]
    return [sum(result.values[key] for result in results) for key in ("tokens", "above", "below")]


def test_every_violation_of_the_bounds_is_counted(tmp_path):
    run = new_run(tmp_path / "a")
    update_run_info(run, vocabulary=30)
    tokens = rows("tokens", 1, 500) | softmax_tokens(np.random.default_rng(0), 500, 30, sharpness=6.0)
    with TraceWriter(run) as writer:
        writer.append("tokens", tokens)
        broken = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in tokens.items()} | {"step": 2}
        likely = np.flatnonzero(tokens["logp"] < -1e-3)
        broken["logit_grad_norm"][likely[:3]] *= 2.0
        broken["logit_grad_norm"][likely[3:5]] *= 0.4
        writer.append("tokens", broken)
    assert _counts(load_run(run)) == [1000, 3, 2]


def test_bounds_are_drawn_with_the_counts_of_every_token(study):
    picture = c01_logit_bounds.figure(study, lines(study.labels))
    axis, ratio = picture.figure.axes
    tokens = sum(run.rows("tokens") for _, _, run in study.each())
    assert axis.get_title() == f"{tokens:,} tokens checked,\n0 outside beyond rounding" and picture.claim == "C1"
    vocabulary = study.settings[0].runs[0].info["vocabulary"]
    for label, factor in (("lower bound", math.sqrt(vocabulary / (vocabulary - 1))), ("upper bound", math.sqrt(2))):
        x, y = line(axis, label)
        np.testing.assert_allclose(y, factor * x, rtol=1e-12)
        assert line(ratio, label)[1].tolist() == [factor, factor]


def test_bounds_hold_to_float32_rounding_on_sharp_distributions(tmp_path):
    run = new_run(tmp_path / "a")
    update_run_info(run, vocabulary=50)
    with TraceWriter(run) as writer:
        for step, sharpness in enumerate((0.1, 3.0, 10.0, 30.0), 1):
            stats = softmax_tokens(np.random.default_rng(step), 2000, 50, sharpness)
            writer.append("tokens", rows("tokens", step, 2000) | stats)
    assert _counts(load_run(run)) == [8000, 0, 0]
