"""Figures of the loss surface draw what an independent computation finds."""

from __future__ import annotations

import numpy as np
import pytest

from sharpscope.analysis.figures import surface as figures_probes
from sharpscope.analysis.figures.style import lines
from sharpscope.analysis.frames import density_nodes, probe_values
from sharpscope.traces import TraceWriter
from tests.analysis.drawn import check_band, line, runs_of
from tests.oracles import analysis as oracle
from tests.traces.rows import new_run, rows


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
