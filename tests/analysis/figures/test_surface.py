"""Figures of the loss surface draw what an independent computation finds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sharpscope.analysis.figures import surface
from sharpscope.analysis.figures.style import lines
from sharpscope.analysis.frames import probe_values
from sharpscope.traces import TraceWriter
from tests.analysis.drawn import check_band, runs_of
from tests.traces.rows import new_run, rows


def test_sharpness_leaves_out_what_did_not_converge(study, tmp_path):
    values, unconverged = probe_values(study, ["largest"])
    assert unconverged == 0
    (axis,) = surface.sharpness(values, lines(study.labels)).axes
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
    rises, beside = rises[rises["step"] == last], beside[beside["step"] == last]
    (axis,) = surface.rho_curves(rises, beside, lines(study.labels)).axes
    want = {}
    for run in runs_of(study, "grpo"):
        for row in run.probes.itertuples():
            if row.quantity == "sam" and row.step == last:
                want.setdefault(row.rho, []).append(row.value)
    check_band(axis, "grpo", dict(sorted(want.items())))
    dotted = [line for line in axis.lines if line.get_linestyle() == ":" and len(line.get_xdata())]
    np.testing.assert_allclose(dotted[0].get_ydata(), 1.5 * np.asarray(dotted[0].get_xdata()), rtol=1e-9)
    assert axis.get_xscale() == axis.get_yscale() == "log"


def test_spectrum_shows_ritz_values_and_counts_outliers():
    rng = np.random.default_rng(0)
    rows = [
        ("grpo", seed, "nll", "t/train@p", node, weight)
        for seed in range(3)
        for node, weight in zip(rng.normal(0, 1, 20), [1 / 20] * 20, strict=True)
    ]
    rows += [
        ("grpo", seed, "nll", "t/train@p", node, 1e-6) for seed in range(3) for node in (40.0, 70.0, -30.0)[: seed + 1]
    ]
    nodes = pd.DataFrame(rows, columns=["setting", "seed", "functional", "probe_set", "node", "weight"])
    assert surface.outliers(nodes)[["negative", "positive", "ritz"]].to_numpy().tolist() == [
        [0, 1, 21],
        [0, 2, 22],
        [1, 2, 23],
    ]
    (axis,) = surface.spectrum(nodes, lines(["grpo"])).axes
    (points,) = [c for c in axis.collections if len(c.get_offsets())]
    np.testing.assert_allclose(np.asarray(points.get_offsets()), nodes[["node", "weight"]].to_numpy())
    assert "grpo: 0 / 2" in axis.texts[0].get_text()
    assert (axis.get_xscale(), axis.get_yscale()) == ("symlog", "log")


def test_stability_has_the_threshold_of_each_quantity(study):
    values = pd.DataFrame(
        [
            ("grpo", seed, step, quantity, "surrogate", "t/train@p", factor * (1 + seed), 38.0 if factor == 1 else 2.0)
            for seed in range(6)
            for step in (1, 2)
            for quantity, factor in (("preconditioned_largest", 1.0), ("critical_sharpness", 3.0))
        ],
        columns=["setting", "seed", "step", "quantity", "functional", "probe_set", "value", "threshold"],
    )
    axes = surface.stability(values, lines(["grpo"])).axes
    for axis, factor, threshold in zip(axes, (3.0, 1.0), (2.0, 38.0), strict=True):
        check_band(axis, "grpo", {step: [factor * (1 + seed) for seed in range(6)] for step in (1, 2)})
        (dotted,) = [line for line in axis.lines if line.get_linestyle() == ":" and len(line.get_xdata())]
        assert list(dotted.get_ydata()) == [threshold] * 2
