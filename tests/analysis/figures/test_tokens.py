"""Figures of tokens and probes draw what an independent computation finds: the data of lines and bands, not pixels."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from sharpscope.analysis.figures import tokens as figures_tokens
from sharpscope.analysis.figures.style import lines
from sharpscope.analysis.figures.tokens import log_bins
from sharpscope.analysis.tokens import sample_tokens
from sharpscope.analysis.weight_curve import weight_at, weight_input, weight_inputs
from tests.analysis.drawn import line
from tests.traces.synthetic import SIGMOID


def _sampled(study, columns):
    return {s.label: pd.concat([sample_tokens(r, columns) for r in s.runs.values()]) for s in study.settings}


def test_weight_function_is_the_objectives_and_observations_are_quantiles(study):
    samples = _sampled(study, ["logp", "logit", "entropy", "weight"])
    figure = figures_tokens.weights({"grpo-sg": samples["grpo-sg"]}, {"grpo-sg": SIGMOID}, lines(study.labels))
    u, w = line(figure.axes[0], "grpo-sg")
    np.testing.assert_allclose(w, _objective_weights(SIGMOID, u), atol=1e-6)
    x, y = line(figure.axes[1], "grpo-sg")
    tokens = samples["grpo-sg"]
    rest = np.maximum(-np.expm1(tokens["logp"].astype(float).to_numpy()), 1e-8)
    edges = np.exp(np.linspace(np.log(rest.min()), np.log(rest.max()), 25))
    inside = [(rest >= a) & (rest < b) for a, b in zip(edges, [*edges[1:-1], np.inf], strict=False)]
    medians = [np.median(tokens["weight"].to_numpy()[i]) for i in inside if i.sum() >= 5]
    np.testing.assert_allclose(y, medians, rtol=1e-6)
    assert len(x) == len(y)


def test_where_the_gradient_is_that_weights_multiply(study):
    tokens = pd.DataFrame(
        {
            "logp": np.log([0.5, 0.9, 0.999]),
            "loss_coef": [-0.2, 0.1, 0.3],
            "weight": [1.0, 2.0, 1.5],
            "score_norm_local": [1.0, 0.4, 0.01],
            "inclusion_probability": 1.0,
        }
    )
    samples = _sampled(study, ["logp", "logit", "entropy", "weight"])
    axis = figures_tokens.weights(samples, {"grpo-sg": SIGMOID}, lines(study.labels), tokens).axes[-1]
    carried = np.array([0.2, 0.02, 0.002])
    x, y = line(axis, "gradient carried without weights")
    np.testing.assert_allclose(x, [0.5, 0.1, 0.001], rtol=1e-4)
    np.testing.assert_allclose(y, carried.cumsum() / carried.sum())
    np.testing.assert_allclose(line(axis, "tokens")[1], [1 / 3, 2 / 3, 1])


def _objective_weights(shaping, u, name="logit"):
    from pydantic import TypeAdapter

    from sharpscope.config.token_weights import TokenWeight
    from sharpscope.objective import StepTensors, token_weights

    values = {field: torch.zeros(1, len(u), dtype=torch.float64) for field in ("logp", "logit", "entropy")}
    values[name] = torch.tensor(u, dtype=torch.float64)[None]
    blank = torch.zeros(1, len(u), dtype=torch.float64)
    step = StepTensors(
        mask=torch.ones(1, len(u)),
        group=torch.zeros(1, dtype=torch.long),
        advantage=torch.ones(1),
        behavior_logp=values["logp"],
        collision=blank,
        polarity=blank,
        progress=0.0,
        **values,
    )
    return token_weights(TypeAdapter(TokenWeight).validate_python(shaping), step)[0].numpy()


BOUNDS = {"alpha": 2.0, "mu": 0.25, "L": 1.0, "U": 1.4}


@pytest.mark.parametrize(
    ("shaping", "name"),
    [
        (SIGMOID, "logit"),
        (SIGMOID | {"input": "logp"}, "logp"),
        ({"kind": "reverse", "of": SIGMOID}, "logit"),
        ({"kind": "entropy", "direction": "low", "tau": 0.5, "u0": -1.0} | BOUNDS, "entropy"),
        ({"kind": "entropy", "direction": "high", "tau": 0.5, "u0": 1.0} | BOUNDS, "entropy"),
    ],
)
def test_weight_curves_agree_with_the_objective(shaping, name):
    u = np.linspace(-4, 0, 50) if name == "logp" else np.linspace(0, 4, 50)
    np.testing.assert_allclose(weight_at(shaping, u), _objective_weights(shaping, u, name), atol=1e-6)


LINEAR = {"kind": "linear", "alpha": 0.3}
POWER = {"kind": "power", "gamma": 2.0, "L": 0.1, "U": 1.0}


@pytest.mark.parametrize("shaping", [LINEAR, {"kind": "reverse", "of": LINEAR}])
def test_weight_curves_of_the_probability_agree_with_the_objective(shaping):
    p = np.linspace(0.01, 1, 50)
    np.testing.assert_allclose(weight_at(shaping, p), _objective_weights(shaping, np.log(p), "logp"), atol=1e-6)


def test_weight_curves_of_ln_probability_and_log_odds_agree_with_the_objective():
    logp = np.log(np.linspace(0.01, 0.99, 50))
    np.testing.assert_allclose(weight_at(POWER, logp), _objective_weights(POWER, logp, "logp"), atol=1e-6)
    shaping = SIGMOID | {"input": "log_odds"}
    tokens = pd.DataFrame({"logp": logp, "logit": 0.0, "entropy": 0.0})
    odds = weight_inputs(shaping, tokens)
    np.testing.assert_allclose(odds, logp - np.log(-np.expm1(logp)), rtol=1e-12)
    np.testing.assert_allclose(weight_at(shaping, odds), _objective_weights(shaping, logp, "logp"), atol=1e-6)


def test_a_weight_that_is_annealed_or_of_another_kind_has_no_curve():
    assert weight_at(SIGMOID | {"alpha": {"kind": "linear", "start": 1.0, "end": 2.0}}, np.ones(3)) is None
    assert weight_input({"kind": "polarity"}) is None and weight_at({"kind": "polarity"}, np.ones(3)) is None


def test_logarithmic_bins_leave_thin_bins_out():
    x = np.concatenate([np.full(20, 1.0), np.full(3, 10.0), np.full(20, 100.0)])
    binned = log_bins(x, np.arange(43.0), bins=3)
    assert binned["x"].round(9).value_counts().to_dict() == {1.0: 20, 100.0: 20}
    assert binned["y"].tolist() == [*range(20), *range(23, 43)]
