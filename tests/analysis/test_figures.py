"""Figures of tokens and probes draw what an independent computation finds: the data of lines and bands, not pixels."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from sharpscope.analysis.figures import surface as figures_probes
from sharpscope.analysis.figures import tokens as figures_tokens
from sharpscope.analysis.figures.style import lines
from sharpscope.analysis.frames import density_nodes, probe_values
from sharpscope.analysis.token_frames import (
    bound_violations,
    decile_sums,
    lorenz,
    quantile_bins,
    recorded,
    sample_tokens,
    score_column,
)
from sharpscope.analysis.weight_curve import weight_at
from sharpscope.traces import TraceWriter, load_run
from tests.analysis.drawn import check_band, line, runs_of
from tests.oracles import analysis as oracle
from tests.traces.rows import new_run, rows
from tests.traces.synthetic import SIGMOID, softmax_tokens


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
    tokens = pd.DataFrame({
        "logp": np.log([0.5, 0.9, 0.999]), "loss_coef": [-0.2, 0.1, 0.3], "weight": [1.0, 2.0, 1.5],
        "score_norm_local": [1.0, 0.4, 0.01],
    })  # fmt: skip
    samples = _sampled(study, ["logp", "logit", "entropy", "weight"])
    axis = figures_tokens.weights(samples, {"grpo-sg": SIGMOID}, lines(study.labels), tokens).axes[-1]
    carried = np.array([0.2, 0.02, 0.002])
    x, y = line(axis, "gradient carried without weights")
    np.testing.assert_allclose(x, [0.5, 0.1, 0.001], rtol=1e-4)
    np.testing.assert_allclose(y, carried.cumsum() / carried.sum())
    np.testing.assert_allclose(line(axis, "tokens")[1], [1 / 3, 2 / 3, 1])


def _objective_weights(shaping, u, name="logit"):
    from pydantic import TypeAdapter

    from sharpscope.config.token_weights import Shaping
    from sharpscope.objective import StepTensors, token_weights

    values = {field: torch.zeros(1, len(u), dtype=torch.float64) for field in ("logp", "logit", "entropy")}
    values[name] = torch.tensor(u, dtype=torch.float64)[None]
    blank = torch.zeros(1, len(u), dtype=torch.float64)
    step = StepTensors(
        mask=torch.ones(1, len(u)), group=torch.zeros(1, dtype=torch.long), advantage=torch.ones(1),
        behavior_logp=values["logp"], collision=blank, polarity=blank, progress=0.0, **values,
    )  # fmt: skip
    return token_weights(TypeAdapter(Shaping).validate_python(shaping), step)[0].numpy()


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
)  # fmt: skip
def test_weight_curves_agree_with_the_objective(shaping, name):
    u = np.linspace(-4, 0, 50) if name == "logp" else np.linspace(0, 4, 50)
    np.testing.assert_allclose(weight_at(shaping, u), _objective_weights(shaping, u, name), atol=1e-6)


LINEAR = {"kind": "linear", "alpha": 0.3}
POWER = {"kind": "power", "gamma": 2.0, "L": 0.1, "U": 1.0}


@pytest.mark.parametrize("shaping", [LINEAR, POWER, {"kind": "reverse", "of": LINEAR}])
def test_weight_curves_of_the_probability_agree_with_the_objective(shaping):
    p = np.linspace(0.01, 1, 50)
    np.testing.assert_allclose(weight_at(shaping, p), _objective_weights(shaping, np.log(p), "logp"), atol=1e-6)


def test_bounds_are_drawn_and_every_violation_is_counted(tmp_path):
    run = new_run(tmp_path / "a")
    tokens = rows("tokens", 1, 500) | softmax_tokens(np.random.default_rng(0), 500, 30, sharpness=6.0)
    with TraceWriter(run) as writer:
        writer.append("tokens", tokens)
        broken = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in tokens.items()} | {"step": 2}
        likely = np.flatnonzero(tokens["logp"] < -1e-3)
        broken["logit_grad_norm"][likely[:3]] *= 2.0
        broken["logit_grad_norm"][likely[3:5]] *= 0.4
        writer.append("tokens", broken)
    loaded = load_run(run)
    found = bound_violations(loaded, 30)
    assert (found["tokens"], found["above"], found["below"]) == (1000, 3, 2)
    samples = {"grpo": sample_tokens(loaded, ["logp", "logit_grad_norm"])}
    axis, ratio = figures_tokens.logit_gradient(samples, lines(["grpo"]), 30, {"grpo": found}).axes
    assert axis.get_title() == "1,000 tokens checked, 5 outside beyond rounding"
    for label, factor in (("lower bound", math.sqrt(30 / 29)), ("upper bound", math.sqrt(2))):
        x, y = line(axis, label)
        np.testing.assert_allclose(y, factor * x, rtol=1e-12)
        assert line(ratio, label)[1].tolist() == [factor, factor]


def test_bounds_hold_to_float32_rounding_on_sharp_distributions(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step, sharpness in enumerate((0.1, 3.0, 10.0, 30.0), 1):
            stats = softmax_tokens(np.random.default_rng(step), 2000, 50, sharpness)
            writer.append("tokens", rows("tokens", step, 2000) | stats)
    found = bound_violations(load_run(run), 50)
    assert found["tokens"] == 8000 and found["below"] == found["above"] == 0


def test_score_norms_follow_the_law_that_made_them(study):
    samples = _sampled(study, ["logp", "loss_coef", "score_norm"])
    (axis,) = figures_tokens.score_norm(samples, lines(study.labels), "score_norm").axes
    x, y = line(axis, "grpo")
    assert np.median(np.abs(np.log(y / (5 * x)))) < 0.15  # the generator's constant is 5, its noise 0.3
    assert score_column(runs_of(study, "grpo")[0]) == "score_norm"


def test_exact_norms_of_a_few_large_tokens_are_no_sample_of_all(tmp_path):
    run = new_run(tmp_path / "a")
    few = np.ma.masked_array(np.ones(50), mask=np.arange(50) > 4)
    with TraceWriter(run) as writer:
        writer.append("tokens", rows("tokens", 1, 50) | {"score_norm": few})
    assert score_column(load_run(run)) == "score_norm_local"


def test_lorenz_curve_and_its_null(study):
    samples = _sampled(study, ["logp", "loss_coef", "score_norm"])
    axis, _ = figures_tokens.concentration(samples, lines(study.labels), "score_norm").axes
    tokens = samples["grpo"]
    masses = (tokens["loss_coef"].abs() * tokens["score_norm"]).tolist()
    x, y = line(axis, "grpo")
    for share in (0.125, 0.25, 0.5):
        assert np.interp(share, x, y) == pytest.approx(oracle.lorenz_share(masses, share), abs=2e-3)
    curve = lorenz(np.array([8.0, -1.0, 1.0, 0.0]))
    assert np.interp([0.25, 0.5, 0.75], curve["tokens"], curve["mass"]) == pytest.approx([0.8, 0.9, 1.0], abs=1e-3)


def test_deciles_sum_what_the_tokens_hold(study):
    run = runs_of(study, "grpo-sg")[0]
    sums = decile_sums(run, "heldout_influence")
    steps = sums["step"].nunique()
    tokens = pd.concat(recorded(run, ["step", "logp", "advantage", "heldout_influence"])).to_dict("records")
    want = oracle.decile_sums(tokens, "heldout_influence")
    got = sums.groupby(["decile", "sign"])["value"].sum()
    assert set(got.index) == set(want)
    for key, value in want.items():
        assert got[key] == pytest.approx(value, abs=1e-5)
    each = sums.groupby(["decile", "sign"], as_index=False)["value"].sum()
    frame = each.assign(value=each["value"] / steps, setting="grpo-sg", seed=0)
    up, down = figures_tokens.deciles(frame, lines(["grpo-sg"]), "x", by_sign=True).axes
    for axis, sign in ((up, 1), (down, -1)):
        data = np.asarray(axis.containers[0].lines[0].get_ydata(), dtype=float)
        np.testing.assert_allclose(
            data, [want.get((d, sign), 0.0) / steps for d in range(1, 11) if (d, sign) in want], rtol=1e-5
        )


def test_attribution_of_an_update_sums_to_one(study):
    sums = decile_sums(runs_of(study, "grpo")[0], "attribution")
    np.testing.assert_allclose(sums.groupby(["step", "update"])["value"].sum(), 1.0, rtol=1e-5)


def test_sampling_keeps_every_token_or_a_seeded_even_share(study):
    run = runs_of(study, "grpo")[0]
    assert len(sample_tokens(run, ["logp"])) == run.rows("tokens")
    small = sample_tokens(run, ["step"], limit=60)
    assert len(small) == 60 and small.equals(sample_tokens(run, ["step"], limit=60))
    assert set(small["step"]) == set(run.token_steps)


def test_quantile_bins_leave_thin_bins_out():
    x = np.concatenate([np.full(20, 1.0), np.full(3, 10.0), np.full(20, 100.0)])
    found = quantile_bins(x, np.arange(43.0), bins=3)
    assert found["n"].tolist() == [20, 20] and found["q50"].tolist() == [9.5, 32.5]


def test_sharpness_leaves_out_what_did_not_converge(study, tmp_path):
    values, unconverged = probe_values(study, ["largest"])
    assert unconverged == 0
    (axis,) = figures_probes.sharpness(values, lines(study.labels)).axes
    want = {}
    for run in runs_of(study, "grpo"):
        for row in run.probes.itertuples():
            if row.quantity == "largest":
                want.setdefault(row.step, []).append(row.value)
    check_band(axis, "grpo", want)
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        writer.append("steps", rows("steps", 1, 1))
        writer.append("probes", rows("probes", 1, 4) | {"quantity": "largest", "converged": [True, False, None, True]})
    from sharpscope.analysis.studies import studies
    from sharpscope.traces import load_runs

    (one,) = studies(load_runs(run))
    assert len(probe_values(one, ["largest"])[0]) == 3 and probe_values(one, ["largest"])[1] == 1


def test_rho_curves_have_the_first_order_beside_them(study):
    rises, _ = probe_values(study, ["sam"])
    beside, _ = probe_values(study, ["sam_first_order"])
    beside["quantity"] = "sam"
    last = rises["step"].max()
    figure = figures_probes.rho_curves(
        rises[rises["step"] == last], beside[beside["step"] == last], lines(study.labels)
    )
    (axis,) = figure.axes
    x, y = line(axis, "grpo")
    want = [
        np.mean([
            r.value for run in runs_of(study, "grpo") for r in run.probes.itertuples()
            if r.quantity == "sam" and r.step == last and r.rho == rho
        ])
        for rho in x
    ]  # fmt: skip
    np.testing.assert_allclose(y, want, rtol=1e-9)
    dotted = [line for line in axis.lines if line.get_label().startswith("first order")]
    np.testing.assert_allclose(dotted[0].get_ydata(), 1.5 * np.asarray(dotted[0].get_xdata()), rtol=1e-9)


def test_spectrum_is_the_smoothed_measure(study):
    nodes = density_nodes(study)
    (axis,) = figures_probes.spectrum(nodes, lines(study.labels)).axes
    grid, density = line(axis, "grpo")
    assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=0.01)
    width = 0.01 * (nodes["node"].max() - nodes["node"].min())
    mine = nodes[nodes["setting"] == "grpo"]
    for place in (50, 300):
        want = np.mean(
            [oracle.smoothed(one["node"], one["weight"], grid[place], width) for _, one in mine.groupby("seed")]
        )
        assert density[place] == pytest.approx(want, rel=1e-9, abs=1e-300)
