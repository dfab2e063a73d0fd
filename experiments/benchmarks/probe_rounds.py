"""What a round of surface probes costs while training: wall-clock seconds of each preset on the embedded policy."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch

from sharpscope.config import RunConfig, build_config
from sharpscope.policy import Policy, load_policy
from sharpscope.policy.sharding import ModelView
from sharpscope.probes import Objective, ProbeSet, measured_cost, probe_set_objectives
from sharpscope.probes.hessian.causal_lm import lm_surface
from sharpscope.probes.surface import unflatten
from sharpscope.recording.probe_sets import Drawer, run_probe_set
from sharpscope.recording.surface import SurfaceProbes
from sharpscope.tasks import make_task
from sharpscope.training.setup import build_optimizer

RUN = ("light", "cheap", "standard")  # `full` is estimated: it is meant for a GPU


def probe_rounds(task: str = "knights_knaves", overrides: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Seconds of one round of each preset as a training run makes it: completions drawn, every objective, both splits.

    Of `full` one product, gradient and loss are measured on its smallest objective, and the cost that a budget would reckon
    with is given: at most so many products over its three functionals.

    Args:
        task: with its embedded policy.
        overrides: of the run, as `path=value`.
    """
    found: dict[str, dict[str, Any]] = {}
    for preset in (*RUN, "full"):
        with tempfile.TemporaryDirectory(prefix="sharpscope-bench-") as folder:
            config = build_config(
                None, [f"task.kind={task}", f"out={folder}", "name=bench", f"probes.preset={preset}", *overrides]
            )
            found[preset] = _round(config) if preset in RUN else _estimated(config)
    return found


def _round(config: RunConfig) -> dict[str, Any]:
    task, policy = make_task(config.task), load_policy(config.policy)
    drawer = Drawer(config, policy, task)
    probe_set = run_probe_set(config, task)
    view = _view(config, policy, probe_set)
    probes = SurfaceProbes(config, lambda: view, drawer)
    probes.probe_set = probe_set
    began = time.perf_counter(), time.process_time()
    rows, events = probes.rows(1)
    return _described(config) | {
        "seconds": time.perf_counter() - began[0],
        "processor_seconds": time.process_time() - began[1],
        "estimates": len(rows["probes"]["quantity"]),
        "not_converged": len(events),
    }


def _estimated(config: RunConfig) -> dict[str, Any]:
    task, policy = make_task(config.task), load_policy(config.policy)
    # Held-out prompts cost what training prompts cost; only the latter are drawn.
    train = config.probes.model_copy(update={"heldout_prompts": 0, "functionals": ("nll",)})
    probe_set = run_probe_set(config.model_copy(update={"probes": train}), task)
    objective = probe_set_objectives(probe_set, "train", train, Drawer(config, policy, task))["nll"]
    cost = measured_cost(policy.model, objective, config.probes)
    products = config.probes.cost(
        gradient=cost["gradient_s"] / cost["product_s"], value=cost["value_s"] / cost["product_s"]
    )
    return _described(config) | cost | {"products_at_most": products, "seconds_at_most": products * cost["product_s"]}


def _described(config: RunConfig) -> dict[str, Any]:
    spec = config.probes
    return {
        "prompts": spec.prompts,
        "heldout_prompts": spec.heldout_prompts,
        "samples": spec.samples,
        "functionals": list(spec.functionals),
        "threads": torch.get_num_threads(),
    }


def _view(config: RunConfig, policy: Policy, probe_set: ProbeSet) -> ModelView:
    """The policy with an AdamW that has made one update at learning rate 0, along the gradient of the solutions' `nll`."""
    optimizer = build_optimizer(policy.model, config.optimizer.model_copy(update={"lr": 0.0}))
    with lm_surface(policy.model, Objective("nll", probe_set.solutions("train"))) as surface:
        _, gradient = surface.gradient()
        parts = unflatten(gradient, surface.parameters)
    for parameter, part in zip(surface.parameters, parts, strict=True):
        parameter.grad = part.clone()
    optimizer.step()
    optimizer.zero_grad()
    return ModelView(policy.model, list(policy.model.parameters()), optimizer)
