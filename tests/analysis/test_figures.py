"""Figures draw what an independent computation finds: the data of lines and bands, not pixels."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.collections import PolyCollection
from matplotlib.ticker import LogLocator

from sharpscope.analysis import figures_probes, figures_steps, figures_tokens
from sharpscope.analysis.frames import density_nodes, eval_values, probe_values, step_values
from sharpscope.analysis.pictures import Pictures
from sharpscope.analysis.style import DASHES, finish, lines, panels, plain, save, styled
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
from sharpscope.objective import method_names
from sharpscope.traces import TraceWriter, load_run
from tests.oracles import analysis as oracle
from tests.traces.rows import new_run, rows
from tests.traces.synthetic import SIGMOID, softmax_tokens


def _line(axis, label):
    (found,) = [line for line in axis.lines if line.get_label() == label]
    return np.asarray(found.get_xdata(), float), np.asarray(found.get_ydata(), float)


def _bands(axis):
    return [c for c in axis.collections if isinstance(c, PolyCollection)]


def _check_band(axis, label, expected, *, index=0):
    """Line = mean over seeds, band = mean ± t-interval, at every x of `expected` (x -> values over seeds)."""
    x, y = _line(axis, label)
    want = {k: oracle.mean_and_half(v) for k, v in expected.items()}
    assert x.tolist() == list(want)
    np.testing.assert_allclose(y, [mean for mean, _ in want.values()], rtol=1e-6)
    vertices = _bands(axis)[index].get_paths()[0].vertices
    for place, (mean, half) in want.items():
        column = vertices[vertices[:, 0] == place, 1]
        assert column.min() == pytest.approx(mean - half, rel=1e-5, abs=1e-9)
        assert column.max() == pytest.approx(mean + half, rel=1e-5, abs=1e-9)


def _runs(study, label):
    (setting,) = [s for s in study.settings if s.label == label]
    return list(setting.runs.values())


def test_reward_lines_and_bands(study):
    figure = figures_steps.reward(step_values(study, ["reward_mean", "accuracy"]), lines(study.labels))
    for axis, column in zip(figure.axes, ("reward_mean", "accuracy"), strict=True):
        for index, label in enumerate(("grpo", "grpo-sg")):
            _check_band(axis, label, oracle.by_step(_runs(study, label), column), index=index)
        assert axis.get_xlabel() == "step" and "[" in axis.get_ylabel()


def test_few_seeds_are_drawn_each_in_place_of_a_band(study):
    values = step_values(study, ["reward_mean"])
    few = values[values["seed"].isin([0, 1])]
    (axis,) = figures_steps.trajectories(few, lines(study.labels), ["reward_mean"]).axes
    assert not _bands(axis)
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
    crowd = replace(study, settings=(fewer, *(replace(second, label=f"s{i}") for i in range(8)), first))
    assert [s.label for s in crowd.largest(9).settings] == [f"s{i}" for i in range(8)] + [first.label]
    assert crowd.largest(10) is crowd
    pictures = {picture.name: picture for picture in Pictures(crowd)}
    assert len(pictures["settings"].figure.axes[0].get_yticklabels()) == 10
    assert "8 settings with the most seeds, 2 are here alone" in pictures["settings"].caption
    assert "settings" not in {picture.name for picture in Pictures(study)}


def test_gradient_norm_is_a_geometric_mean(study):
    figure = figures_steps.gradient_norm(step_values(study, ["grad_norm", "update_norm"]), lines(study.labels))
    x, y = _line(figure.axes[0], "grpo")
    values = oracle.by_step(_runs(study, "grpo"), "grad_norm")
    np.testing.assert_allclose(y, [math.exp(sum(map(math.log, v)) / len(v)) for v in values.values()], rtol=1e-9)
    assert figure.axes[0].get_yscale() == "log" and x.tolist() == list(values)


def test_evaluations_pool_levels_by_their_size_and_show_each_level(study):
    values = eval_values(study)
    figure = figures_steps.evaluations(values, lines(study.labels))
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["heldout, greedy", "heldout, temperature 1", "unseen, greedy", "unseen, temperature 1"]
    _check_band(figure.axes[1], "grpo", oracle.eval_by_step(_runs(study, "grpo"), "heldout", 1.0))
    figure = figures_steps.evaluations_by_level(values, lines(study.labels), 0.0)
    (axis,) = [a for a in figure.axes if a.get_title() == "unseen, level 3, greedy"]
    _check_band(axis, "grpo-sg", oracle.eval_by_step(_runs(study, "grpo-sg"), "unseen", 0.0, "3"), index=1)


def test_a_pooled_level_is_made_where_the_trace_has_none(study):
    from sharpscope.analysis.frames import with_pooled

    rows_ = _runs(study, "grpo")[0].eval
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
    assert not _bands(axis)
    np.testing.assert_array_equal(_line(axis, "grpo")[1], [1.0, math.nan, 3.0])


def _sampled(study, columns):
    return {s.label: pd.concat([sample_tokens(r, columns) for r in s.runs.values()]) for s in study.settings}


def test_weight_function_is_the_objectives_and_observations_are_quantiles(study):
    samples = _sampled(study, ["logp", "logit", "entropy", "weight"])
    figure = figures_tokens.weights({"grpo-sg": samples["grpo-sg"]}, {"grpo-sg": SIGMOID}, lines(study.labels))
    u, w = _line(figure.axes[0], "grpo-sg")
    np.testing.assert_allclose(w, _objective_weights(SIGMOID, u), atol=1e-6)
    x, y = _line(figure.axes[1], "grpo-sg")
    tokens = samples["grpo-sg"]
    rest = np.maximum(-np.expm1(tokens["logp"].astype(float).to_numpy()), 1e-8)
    edges = np.exp(np.linspace(np.log(rest.min()), np.log(rest.max()), 25))
    inside = [(rest >= a) & (rest < b) for a, b in zip(edges, [*edges[1:-1], np.inf], strict=False)]
    medians = [np.median(tokens["weight"].to_numpy()[i]) for i in inside if i.sum() >= 5]
    np.testing.assert_allclose(y, medians, rtol=1e-6)
    assert len(x) == len(y)


def _objective_weights(shaping, u, name="logit"):
    from pydantic import TypeAdapter

    from sharpscope.objective import StepTensors, token_weights
    from sharpscope.objective.shaping_spec import Shaping

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
        x, y = _line(axis, label)
        np.testing.assert_allclose(y, factor * x, rtol=1e-12)
        assert _line(ratio, label)[1].tolist() == [factor, factor]


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
    x, y = _line(axis, "grpo")
    assert np.median(np.abs(np.log(y / (5 * x)))) < 0.15  # the generator's constant is 5, its noise 0.3
    assert score_column(_runs(study, "grpo")[0]) == "score_norm"


def test_labels_of_a_narrow_logarithmic_axis_stand_apart():
    rest = np.linspace(0.97, 0.999, 400)
    sample = pd.DataFrame({"logp": np.log1p(-rest), "score_norm_local": 40 * rest})
    figure = figures_tokens.score_norm({"model": sample}, lines(["model"]), "score_norm_local")
    figure.canvas.draw()
    (axis,) = figure.axes
    ticks = [*axis.xaxis.get_major_ticks(), *axis.xaxis.get_minor_ticks()]
    boxes = sorted(
        (tick.label1.get_window_extent() for tick in ticks if tick.label1.get_text()), key=lambda box: box.x0
    )
    assert len(boxes) >= 2 and all(b.x0 - a.x1 > 10 for a, b in itertools.pairwise(boxes))  # pixels; five are no gap


def test_an_inverted_logarithmic_axis_keeps_its_decades():
    with styled():
        figure, (axis,) = panels(1)
        axis.set(xscale="log", xlim=(1.0, 1e-8))
        finish(figure, [axis])
    figure.canvas.draw()
    assert isinstance(axis.xaxis.get_major_locator(), LogLocator)


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
    x, y = _line(axis, "grpo")
    for share in (0.125, 0.25, 0.5):
        assert np.interp(share, x, y) == pytest.approx(oracle.lorenz_share(masses, share), abs=2e-3)
    curve = lorenz(np.array([8.0, -1.0, 1.0, 0.0]))
    assert np.interp([0.25, 0.5, 0.75], curve["tokens"], curve["mass"]) == pytest.approx([0.8, 0.9, 1.0], abs=1e-3)


def test_deciles_sum_what_the_tokens_hold(study):
    run = _runs(study, "grpo-sg")[0]
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
    sums = decile_sums(_runs(study, "grpo")[0], "attribution")
    np.testing.assert_allclose(sums.groupby(["step", "update"])["value"].sum(), 1.0, rtol=1e-5)


def test_sampling_keeps_every_token_or_a_seeded_even_share(study):
    run = _runs(study, "grpo")[0]
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
    for run in _runs(study, "grpo"):
        for row in run.probes.itertuples():
            if row.quantity == "largest":
                want.setdefault(row.step, []).append(row.value)
    _check_band(axis, "grpo", want)
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
    x, y = _line(axis, "grpo")
    want = [
        np.mean([
            r.value for run in _runs(study, "grpo") for r in run.probes.itertuples()
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
    grid, density = _line(axis, "grpo")
    assert np.trapezoid(density, grid) == pytest.approx(1.0, abs=0.01)
    width = 0.01 * (nodes["node"].max() - nodes["node"].min())
    mine = nodes[nodes["setting"] == "grpo"]
    for place in (50, 300):
        want = np.mean(
            [oracle.smoothed(one["node"], one["weight"], grid[place], width) for _, one in mine.groupby("seed")]
        )
        assert density[place] == pytest.approx(want, rel=1e-9, abs=1e-300)


def test_every_method_has_its_own_line_in_every_company():
    names = [*method_names(), "grpo-sg-shuffled", "grpo-sg-reverse", "grpo (optimizer.lr=0.001)", "mine"]
    all_lines = lines(names)
    assert len({(line.color, line.dash) for line in all_lines.values()}) == len(names)
    for name in method_names():
        assert lines([name])[name] == all_lines[name] == lines([name, "grpo", "other"])[name]
    compared = [
        "grpo",
        "grpo-sg",
        *(f"grpo-sg-{control}" for control in ("shuffled", "reverse", "constant", "entropy")),
    ]
    assert (
        len({line.color for line in lines(compared).values()}) == 6
    )  # curves that cross: dashes alone do not tell them
    assert lines(["ar", "ar-shuffled"])["ar-shuffled"].color == lines(["ar"])["ar"].color
    assert len({str(dash) for dash in DASHES}) == len(DASHES)


def test_hostile_labels_are_text_and_equal_figures_give_equal_files(tmp_path):
    assert plain("_hidden") == "\u200b_hidden" and plain("a\x1b[31m\n") == "a?[31m?" and plain("$x$") == r"\$x\$"
    name = "$\\frac{ <script> \x1b_a"
    values = pd.DataFrame({"setting": name, "seed": 0, "step": [1, 2], "quantity": "reward_mean", "value": [1.0, 2.0]})
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths = save(figures_steps.reward(values, lines([name])), tmp_path / folder, "figure")
    assert [p.name for p in paths] == ["figure.png", "figure.svg"]
    for path in paths:
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    assert b"<script>" not in paths[1].read_bytes()


def test_panels_are_filled_row_by_row():
    figure, axes = panels(3)
    assert len(axes) == 3 == len(figure.axes)
