"""A run with the standard probes: what is recorded, and what the analysis draws of it."""

from __future__ import annotations

import pytest

import sharpscope
from sharpscope.analysis.claims.c08_smoothness import _noise_share
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
