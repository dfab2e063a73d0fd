"""What recording costs: the share of a default run's time, and a round of light probes in forward and backward passes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sharpscope.config import build_config
from sharpscope.errors import UserError
from sharpscope.policy import backbone, load_policy
from sharpscope.probes import Objective
from sharpscope.probes.runner import limited_surface, measure
from sharpscope.recording.probe_sets import run_probe_set
from sharpscope.recording.schedule import CRITICAL
from sharpscope.tasks import make_task
from sharpscope.traces import load_run
from sharpscope.training import train


def default_share(steps: int = 100, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train with the default configuration, without evaluation, and return what `run.json` says of the time of measuring.

    Returns:
        `steps`, `tokens` (mean of a step), `step_s` (generation and training), `share` of the run's time that recording took,
        `light_share`, that of the light probes, their `rounds`, the mean number of `evaluations` of a line search for the
        critical sharpness, and `seconds` by measure.
    """
    with tempfile.TemporaryDirectory(prefix="sharpscope-bench-") as folder:
        own = [f"steps={steps}", f"out={folder}", "name=bench", "evaluation.every=0", "checkpoint.every=0"]
        run = load_run(train(build_config(None, [*own, *overrides])).run_dir)
        times = run.steps["generation_s"] + run.steps["training_s"]
        measuring, probes = run.info["measuring"], run.probes
        light = sum(measuring["seconds"].get(name, 0.0) for name in ("surface", CRITICAL))
        return {
            "steps": steps,
            "tokens": float(run.steps["tokens"].mean()),
            "step_s": float(times.mean()),
            "rounds": int(probes.loc[probes["quantity"] == "sam", "step"].nunique()),
            "evaluations": float(probes.loc[probes["quantity"] == "critical_sharpness", "samples"].mean()),
            "light_share": light / (float(times.sum()) + sum(measuring["seconds"].values())),
            **measuring,
        }


def light_passes(prompts: int = 256, repeats: int = 3, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The light probes' measures on stored solutions, in forward and backward passes over the same rows.

    Both sides alternate in one process. Critical sharpness is left out: its passes are over the update's completions.

    Returns:
        `prompts` with a solution, `rows`, `tokens`, `gradients` (forward and backward passes) and `losses` (forward passes alone)
        counted in tokens, `pass_s`, `probes_s` and `ratios` of each repeat, of processor time.

    Raises:
        UserError: the task has no prompt with a solution.
    """
    with tempfile.TemporaryDirectory(prefix="sharpscope-bench-") as folder:
        own = [
            f"probes.prompts={prompts}",
            "probes.heldout_prompts=0",
            "probes.check=off",
            f"out={folder}",
            "name=bench",
        ]
        config = build_config(None, [*own, *overrides])
        config.run_dir.mkdir(parents=True)
        policy, probe_set = load_policy(config.policy), run_probe_set(config, make_task(config.task))
    solutions = probe_set.solutions("train")
    if not len(solutions):
        raise UserError("bench recording: no prompt has a stored solution; choose another task")
    objective, spec = Objective("nll", solutions), config.probes
    seconds: dict[str, list[float]] = {"pass": [], "probes": []}

    def once() -> None:
        with limited_surface(policy.model, objective, spec, "off") as surface:
            surface.gradient()

    tokens = {True: 0, False: 0}  # with and without a gradient; padding included

    def count(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens[torch.is_grad_enabled()] += kwargs["input_ids"].numel()

    with backbone(policy.model).register_forward_pre_hook(count, with_kwargs=True):
        measure(policy.model, objective, spec)
    sides: dict[str, Callable[[], object]] = {"pass": once, "probes": lambda: measure(policy.model, objective, spec)}
    for repeat in range(repeats + 1):
        for name, call in sides.items():
            began = time.process_time()
            call()
            if repeat:  # the first warms up
                seconds[name].append(time.process_time() - began)
    return {
        "prompts": len(objective.prompt_weight),
        "rows": len(solutions),
        "tokens": int(solutions.lengths.sum()),
        "gradients": 1,
        "losses": round(tokens[False] / tokens[True], 1),
        "pass_s": statistics.median(seconds["pass"]),
        "probes_s": statistics.median(seconds["probes"]),
        "ratios": [probes / one for probes, one in zip(seconds["probes"], seconds["pass"], strict=True)],
        "threads": torch.get_num_threads(),
    }
