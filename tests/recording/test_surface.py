"""Probes of the loss surface in a run: what is recorded, the radius of the run, and an event for what is not reliable."""

from __future__ import annotations

import json
import math

import pytest
import torch

import sharpscope
from sharpscope.policy import load_policy
from sharpscope.policy.sharding import ModelView
from sharpscope.recording.probe_sets import Drawer, run_probe_set
from sharpscope.recording.schedule import Schedule
from sharpscope.recording.surface import SurfaceProbes
from sharpscope.tasks import make_task
from sharpscope.training import train

SMALL = {
    "probes__preset": "light",
    "probes__every": 2,
    "probes__prompts": 3,
    "probes__heldout_prompts": 2,
    "probes__curvature_prompts": 3,
    "probes__max_products": 8,
    "probes__trace_probes": 2,
    "evaluation__every": 0,
    "recording__token_gradients_every": 0,
    "recording__heldout_influence_every": 0,
    "steps": 2,
}


def probes_of(config):
    task, policy = make_task(config.task), load_policy(config.policy)
    optimizer = torch.optim.AdamW(policy.model.parameters())
    view = ModelView(policy.model, list(policy.model.parameters()), optimizer)
    probes = SurfaceProbes(config, lambda: view, Drawer(config, policy, task), Schedule(config))
    return probes, run_probe_set(config, task), policy.model


def test_a_run_records_curvature_with_adamws_threshold_and_the_two_batch_norm(toy_config):
    config = toy_config(**SMALL, probes__functionals=["surrogate"], probes__rho=0.05, probes__gradient_samples=4)
    train(config)
    probes = sharpscope.load_run(config.run_dir).probes
    surface = probes[~probes["probe"].isin(["critical", "update"])]
    assert sorted(surface["step"].unique()) == [0, 2]
    critical = probes[probes["quantity"] == "critical_sharpness"]
    assert {1, 2} == set(critical["step"])
    # AdamW has moments after the first update only.
    assert sorted(probes.loc[probes["quantity"] == "preconditioned_largest", "step"].unique()) == [2]
    threshold = probes.loc[probes["quantity"] == "preconditioned_threshold", "value"].iloc[0]
    lr = float(sharpscope.load_run(config.run_dir).steps["lr"].iloc[-1])
    beta = config.optimizer.beta1
    assert threshold == pytest.approx((2 + 2 * beta) / ((1 - beta) * lr))
    pairs = probes[probes["quantity"] == "squared_gradient_norm"]
    assert set(pairs["functional"]) == {"surrogate", "expected_failure"} and pairs["std_error"].notna().all()


def test_the_radius_of_a_run_is_found_once_and_kept(toy_config):
    config = toy_config(**SMALL, probes__functionals=["expected_failure"], probes__kinds=["sam"], probes__samples=4)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "run.json").write_text('{"status": "running"}')
    probes, probe_set, _ = probes_of(config)
    assert probes.start(probe_set, {}) == []
    tables, _ = probes.rows(0)
    rows = dict(zip(tables["probes"]["quantity"], tables["probes"]["value"], strict=True))
    kept = json.loads((config.run_dir / "run.json").read_text())["probe_radius"]
    if probes.radius is None:  # no completion of this draw is correct
        assert rows["radius"] is None
        pytest.skip("the tiny policy drew no correct completion")
    assert kept["rho"] == probes.radius.rho == rows["radius"] and 0.05 <= kept["saturation"] <= 0.3
    again, probe_set, _ = probes_of(config)  # as a resumed run
    again.start(probe_set, {"probe_radius": kept})
    tables, _ = again.rows(2)
    assert "radius" not in tables["probes"]["quantity"] and again.radius == probes.radius
    assert {
        rho for q, rho in zip(tables["probes"]["quantity"], tables["probes"]["rho"], strict=True) if q == "sam"
    } == {probes.radius.rho}


@pytest.mark.parametrize("broken", [False, True])
def test_every_estimate_that_is_not_to_be_believed_has_its_event(toy_config, broken):
    config = toy_config(**SMALL | {"probes__max_products": 4}, probes__functionals=["surrogate"], probes__rho=0.05)
    probes, probes.probe_set, model = probes_of(config)
    if broken:
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if "down_proj" in name)[0, 0] = math.nan
    tables, events = probes.rows(2)
    rows = tables["probes"]
    named = zip(rows["quantity"], rows["value"], rows["converged"], strict=True)
    bad = [quantity for quantity, value, converged in named if converged is False or value is None]
    assert "largest" in bad and (not broken or {"gradient_norm", "sam", "asam"} <= set(bad))
    assert len(events) == len(bad) and all(event.rule == "probe" and event.step == 2 for event in events)
    for quantity, event in zip(bad, events, strict=True):
        assert f" {quantity}" in event.message and event.message.split(": ", 1)[1]


def test_without_solutions_the_expected_failure_is_probed(toy_config):
    """No completion of the policy ends by itself within four tokens, so none is a solution."""
    config = toy_config(**SMALL, probes__rho=0.05, rollout__max_new_tokens=4, probes__critical_sharpness=False)
    train(config)
    run = sharpscope.load_run(config.run_dir)
    assert set(run.probes["functional"]) == {"expected_failure"} and set(run.probes["step"]) == {0, 2}
    assert "info" in set(run.events.loc[run.events["step"] == 0, "severity"])
