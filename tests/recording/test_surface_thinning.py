"""Which steps are probed is fixed by a recorded cost, not by the clock; an estimate that is not reliable gives an event."""

from __future__ import annotations

import math

import pytest
import torch

from sharpscope.policy import load_policy
from sharpscope.policy.sharding import ModelView
from sharpscope.recording.probe_sets import Drawer, run_probe_set
from sharpscope.recording.surface import SurfaceProbes
from sharpscope.tasks import make_task

SMALL = {
    "probes__preset": "cheap",
    "probes__every": 2,
    "probes__prompts": 3,
    "probes__heldout_prompts": 0,
    "probes__functionals": ["expected_failure"],
    "probes__gradient_samples": 0,
    "steps": 20,
}


def probes_of(config):
    task, policy = make_task(config.task), load_policy(config.policy)
    optimizer = torch.optim.AdamW(policy.model.parameters())
    view = ModelView(policy.model, list(policy.model.parameters()), optimizer)
    probes = SurfaceProbes(config, lambda: view, Drawer(config, policy, task))
    return probes, run_probe_set(config, task), policy.model


def test_a_budget_thins_to_the_steps_that_a_recorded_cost_gives_and_says_so(toy_config):
    config = toy_config(**SMALL, probes__budget=3.0)
    recorded = {"probe_cost": {"product_s": 2.0, "gradient_s": 1.0, "value_s": 0.5}}
    products = config.probes.cost(gradient=0.5, value=0.25)
    every = 2 * math.ceil(products / 3 / 2)
    for _ in range(2):  # a resumed run reads the same cost and probes the same steps
        probes, probe_set, _ = probes_of(config)
        (event,) = probes.start(probe_set, recorded)
        assert (event.rule, event.action, event.value, event.threshold) == ("probe_budget", "thinned", products, 3.0)
        assert f"every {every} steps instead of 2" in event.message
        assert [step for step in range(21) if probes.due(step)] == sorted({*range(0, 20, every), 20})
    plain, probe_set, _ = probes_of(toy_config(**SMALL))
    assert plain.start(probe_set, recorded) == [] and plain.due(2) and not plain.due(3)


@pytest.mark.parametrize("broken", [False, True])
def test_every_estimate_that_is_not_to_be_believed_has_its_event(toy_config, broken):
    config = toy_config(**SMALL, probes__max_products=4, probes__tolerance=1e-9)
    probes, probes.probe_set, model = probes_of(config)
    if broken:
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if "down_proj" in name)[0, 0] = math.nan
    tables, events = probes.rows(2)
    rows = tables["probes"]
    named = list(zip(rows["quantity"], rows["value"], rows["converged"], strict=True))
    bad = [
        q for q, value, ok in named if not q.endswith("_ratio") and (ok is False or value is None or math.isnan(value))
    ]
    assert {"largest"} <= set(bad) and (not broken or {"gradient_norm", "sam", "asam"} <= set(bad))
    assert len(events) == len(bad) and all(event.rule == "probe" and event.step == 2 for event in events)
    for quantity, event in zip(bad, events, strict=True):
        assert f" {quantity} " in event.message and event.message.split(": ", 1)[1]
