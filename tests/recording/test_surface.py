"""A run with the standard probes: what is recorded, and what the analysis draws of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

import sharpscope
from sharpscope.analysis.claims.c08_smoothness import _noise_share
from sharpscope.analysis.figures import surface as figures_probes
from sharpscope.analysis.figures.study import study_pictures
from sharpscope.analysis.frames import slice_values, stability_values
from sharpscope.analysis.study import studies
from sharpscope.training import train

STANDARD = {
    "probes__preset": "standard",
    "probes__every": 2,
    "probes__prompts": 4,
    "probes__heldout_prompts": 2,
    "probes__gradient_samples": 4,
    "probes__functionals": ["surrogate"],
    "probes__max_products": 16,
    "probes__density_steps": 6,
    "probes__trace_probes": 2,
    "probes__tolerance": 0.3,
    "evaluation__every": 0,
    "steps": 2,
    "recording__token_gradients_every": 0,
    "optimizer__schedule": "linear",
}


@pytest.fixture(scope="module")
def study(tiny_policy, tmp_path_factory):
    from sharpscope.config import build_config
    from tests.conftest import TOY

    out = tmp_path_factory.mktemp("surface")
    for seed in (0, 1):
        values = {path.replace("__", "."): value for path, value in STANDARD.items()}
        place = {"policy.model": str(tiny_policy), "out": str(out), "name": f"s{seed}", "seed": seed}
        train(build_config(values=TOY | values | place))
    return studies(sharpscope.load_runs(out))[0]


def probes_of(study):
    return [run.probes for setting in study.settings for run in setting.runs.values()]


def test_slices_the_preconditioned_eigenvalue_and_the_two_batch_norm_are_recorded(study):
    for probes in probes_of(study):
        surface = probes[~probes["probe"].isin(["critical"])]
        assert sorted(surface["step"].unique()) == [0, 2]
        critical = probes[probes["quantity"] == "critical_sharpness"]
        assert {1, 2} == set(critical["step"])
        found = critical[critical["converged"].astype(bool)]
        assert found["prompt_std_error"].notna().all() and (found["prompts"] == 4).all()
        curved = surface[surface["quantity"].isin(["largest", "smallest", "preconditioned_largest", "trace"])]
        assert curved["prompt_std_error"].notna().mean() > 0.5 and curved["prompts"].notna().all()
        slices = probes[probes["probe"] == "slice"]
        assert slices["probe_set"].str.contains("train").all() and set(slices["functional"]) == {"surrogate"}
        assert {"slice_gradient", "slice_random_0", "slice_random_1"} <= set(slices["quantity"])
        assert slices["prompt_std_error"].notna().all()
        # AdamW has moments after the first update only.
        assert sorted(probes.loc[probes["quantity"] == "preconditioned_largest", "step"].unique()) == [2]
        pairs = probes[probes["quantity"] == "squared_gradient_norm"]
        assert len(pairs) == 4 and (pairs["samples"] == 16).all() and pairs["std_error"].notna().all()
        assert pairs["probe_set"].str.contains("train").all() and set(pairs["functional"]) == {
            "surrogate",
            "expected_failure",
        }


def test_claim_8_reads_both_norms_of_the_two_batches(study):
    run = next(iter(study.settings[0].runs.values()))
    rows = run.probes[run.probes["functional"] == "surrogate"].set_index("quantity")["value"]
    unbiased, naive = (rows[[name]].sum() for name in ("squared_gradient_norm", "squared_gradient_norm_naive"))
    assert naive > 0 and _noise_share(run) == pytest.approx(1 - unbiased / naive)


def test_the_threshold_is_adamws_at_each_steps_rate_and_slices_are_differences(study):
    values = stability_values(study)
    runs = {seed: run for setting in study.settings for seed, run in setting.runs.items()}
    assert len(values)
    for row in values.to_dict("records"):
        steps = runs[row["seed"]].steps
        lr = float(steps.loc[steps["step"] == row["step"], "lr"].iloc[0])
        if lr == 0:  # the last step's
            assert math.isnan(row["threshold"])
            continue
        own = 2 / lr if row["quantity"] == "critical_sharpness" else (2 + 2 * 0.9) / ((1 - 0.9) * lr)
        assert row["threshold"] == pytest.approx(own)
        name = "critical_threshold" if row["quantity"] == "critical_sharpness" else "preconditioned_threshold"
        probes = runs[row["seed"]].probes
        recorded = probes.loc[(probes["quantity"] == name) & (probes["step"] == row["step"]), "value"]
        assert len(recorded) and recorded.to_numpy() == pytest.approx(own)
    assert set(values["quantity"]) == {"critical_sharpness", "preconditioned_largest"}
    slices = slice_values(study)
    assert (slices["step"] == 2).all()
    centre = slices[slices["point"] == 5]
    assert (centre["distance"] == 0).all() and (centre["value"] == 0).all()
    uphill = slices[slices["direction"] == "gradient"].pivot_table(
        index=["seed", "functional"], columns="point", values="value"
    )
    assert (uphill[6] > uphill[4]).all()


def test_every_figure_of_the_surface_is_drawn_with_its_values(study):
    pictures = {picture.name: picture for picture in study_pictures(study)}
    surface = ("sharpness", "spectrum", "rho_curves", "slices", "stability")
    assert not any(picture.missing for name, picture in pictures.items() if name.startswith(surface))
    assert {"slices", "stability", "spectrum"} <= set(pictures)
    assert any(name.startswith("sharpness") for name in pictures) and any(
        name.startswith("rho_curves") for name in pictures
    )
    values = stability_values(study)
    for axis in pictures["stability"].figure.axes:
        drawn = {y for line in axis.lines if line.get_linestyle() == ":" for y in line.get_ydata()}
        functional, _, split = axis.get_title("left").partition(", ")
        place = values["probe_set"].str.contains(f"/{split}@") if split else values["probe_set"] == ""
        rows = values[(values["functional"] == functional) & place]
        np.testing.assert_allclose(sorted(drawn), sorted(set(rows["threshold"].dropna())))
    titles = [axis.get_title() for axis in pictures["slices"].figure.axes]
    assert len(titles) == len(set(titles)) and any(figures_probes.DIRECTIONS["random"] in title for title in titles)
