"""Figures of tokens and probes draw what an independent computation finds: the data of lines and bands, not pixels."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from sharpscope.analysis.claims import c01_logit_bounds, c02_score_norm, c03_dominance, c09_influence
from sharpscope.analysis.figures import surface as figures_probes
from sharpscope.analysis.figures import tokens as figures_tokens
from sharpscope.analysis.figures.style import lines
from sharpscope.analysis.figures.tokens import quantile_bins
from sharpscope.analysis.frames import density_nodes, probe_values
from sharpscope.analysis.statistics import lorenz
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import decile_sums, sample_tokens, scan
from sharpscope.analysis.weight_curve import weight_at, weight_input, weight_inputs
from sharpscope.traces import TraceWriter, load_run, update_run_info
from tests.analysis.claims.frames import frame_run, tokens_frame
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

    from sharpscope.config.token_weights import TokenWeight
    from sharpscope.objective import StepTensors, token_weights

    values = {field: torch.zeros(1, len(u), dtype=torch.float64) for field in ("logp", "logit", "entropy")}
    values[name] = torch.tensor(u, dtype=torch.float64)[None]
    blank = torch.zeros(1, len(u), dtype=torch.float64)
    step = StepTensors(
        mask=torch.ones(1, len(u)), group=torch.zeros(1, dtype=torch.long), advantage=torch.ones(1),
        behavior_logp=values["logp"], collision=blank, polarity=blank, progress=0.0, **values,
    )  # fmt: skip
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
)  # fmt: skip
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


def _counts(run):
    found = scan({"a": run}, [c01_logit_bounds.REDUCER])["C1"]
    return [sum(result.values[key] for result in found) for key in ("tokens", "above", "below")]


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
    assert axis.get_title() == f"{tokens:,} tokens checked, 0 outside beyond rounding" and picture.claim == "C1"
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


def test_score_norms_follow_the_law_that_made_them(study):
    local, exact = c02_score_norm.figure(study, lines(study.labels)).figure.axes
    for axis, label, noise in ((local, "grpo", 0.15), (exact, "token, exact norm", 0.3)):
        x, y = line(axis, label)
        assert len(x) and np.median(np.abs(np.log(y / (5 * x)))) < noise  # the generator's constant is 5, its noise 0.3


def test_lorenz_curves_are_means_of_the_steps_largest_first(study):
    axis, _ = c03_dominance.figure(study, lines(study.labels)).figure.axes
    x, y = line(axis, "grpo")
    masses = []
    for run in runs_of(study, "grpo"):
        for step in run.token_steps:
            tokens = run.tokens([step], ["loss_coef", "score_norm_local"]).dropna()
            mass = (tokens["loss_coef"].abs() * tokens["score_norm_local"]).to_numpy(dtype=float)
            if (mass > 0).sum() >= c03_dominance.FEWEST:
                masses.append(mass[tokens["loss_coef"] != 0].tolist())
    assert masses
    for share in (0.125, 0.25, 0.5):
        want = np.mean([oracle.lorenz_share(mass, share) for mass in masses])
        assert np.interp(share, x, y) == pytest.approx(want, abs=1e-2)  # the curve has 101 points
    np.testing.assert_allclose(lorenz(np.array([8.0, 1.0, 1.0, 0.0]), 5), [0, 0, 0.1, 0.2, 1], atol=1e-12)


def test_deciles_sum_what_the_tokens_hold(study):
    run = runs_of(study, "grpo-sg")[0]
    found = scan({"a": run}, [decile_sums("heldout_influence")])["deciles heldout_influence"]
    sums = pd.concat([pd.DataFrame(result.values) for result in found])
    tokens = run.tokens(columns=["step", "logp", "advantage", "heldout_influence"]).dropna().to_dict("records")
    want = oracle.decile_sums(tokens, "heldout_influence")
    got = sums.groupby(["decile", "sign"])["value"].sum()
    assert set(got.index) == set(want)
    for key, value in want.items():
        assert got[key] == pytest.approx(value, abs=1e-5)


def test_a_step_written_in_two_parts_has_one_set_of_deciles(tmp_path):
    run = new_run(tmp_path / "a")
    tokens = rows("tokens", 1, 400) | {"attribution": np.ones(400, dtype=np.float32)}
    for half in (slice(0, 200), slice(200, 400)):
        with TraceWriter(run) as writer:
            part = {k: v if v is None or np.ndim(v) == 0 else v[half] for k, v in tokens.items()}
            writer.append("tokens", part)
    (result,) = scan({"a": load_run(run)}, [decile_sums("attribution")])["deciles attribution"]
    sums = pd.DataFrame(result.values)
    assert sums.groupby("decile")["value"].sum().tolist() == [40.0] * 10


def test_attribution_of_an_update_sums_to_one(study):
    (setting,) = [s for s in study.settings if s.label == "grpo"]
    for result in study.results_of("deciles attribution", setting):
        np.testing.assert_allclose(pd.DataFrame(result.values).groupby("update")["value"].sum(), 1.0, rtol=1e-5)


def test_influence_is_drawn_as_the_claim_reads_it():
    rng = np.random.default_rng(0)
    runs = {str(s): frame_run("grpo-sg", s, tokens=tokens_frame(rng, 3, 200, low_influence=-2.0)) for s in range(4)}
    study = Study(runs)
    study.read_tokens([c09_influence.REDUCER])
    up, down = c09_influence.figure(study, lines(study.labels)).figure.axes
    (setting,) = study.settings
    cells = c09_influence.cells_frame(study.results_of("C9", setting))
    for axis, sign in ((up, "positive"), (down, "negative")):
        per_seed = cells[cells["advantage"] == sign].groupby(["decile", "seed"])["influence"].mean().unstack()
        data = axis.containers[0].lines[0]
        np.testing.assert_allclose(np.asarray(data.get_ydata(), dtype=float), per_seed.mean(axis=1), rtol=1e-9)


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
    from sharpscope.analysis.study import studies
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
