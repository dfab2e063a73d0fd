"""Two processes and one give the same loss, gradients, weights and trace on the same global batch."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

import sharpscope
from sharpscope.policy.forward import Scorer
from sharpscope.traces import TABLES, timing_columns, update_run_info
from sharpscope.training import train, updates
from sharpscope.training.checkpoint import checkpoints
from tests.launched import keep_gradient, launch

RECORDED = {
    "policy.dtype": "float64",
    "steps": 2,
    "update.microbatch_tokens": 64,
    "recording.token_gradients_every": 1,
    "recording.exact_tokens": 2,
    "recording.heldout_influence_every": 2,
    "probes.prompts": 2,
    "probes.heldout_prompts": 2,
    "rollout.prompts_per_step": 5,
    "evaluation.prompts": 3,
    "evaluation.temperatures": [1.0],
}
CASES = {
    "plain": {},
    "calibrated": {
        "method": "grpo-sg",
        "method.weight.preset": "calibrated",
        "method.kl.coef": 0.02,
        "update.mini_batches": 2,
        "update.inner_epochs": 2,
    },
    "shuffled": {
        "method": "grpo-sg-shuffled",
        "method.weight.of.preset": "calibrated",
        "rollout.temperature": 0.8,
    },
    "covariance": {
        "method": "clip-cov",
        "method.tokens.share": 0.1,
        "method.weight": {"kind": "covariance_gaussian"},
    },
    "dynamic": {"method": "dapo", "task.factory": "tests.toy_task:half_flat"},
    "sam": {"method": "grpo-sam"},
    "token_baseline": {"method": "otb", "update.mini_batches": 2},
    "averaged": {
        "method": "cov-grpo",
        "method.proximal": {"kind": "average", "decay": 0.5, "every": "update"},
        "update.mini_batches": 2,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("launched")


def values(toy_config, folder, name, **changes):
    from tests.conftest import TOY

    model = toy_config().policy.model
    return {**TOY, "policy.model": model, "out": str(folder / name), **RECORDED, **changes}


def alone(folder, values, resume=False):
    from sharpscope.config import build_config

    original = keep_gradient(folder / f"{Path(values['out']).name}.gradient")
    try:
        return train(build_config(values=values), resume=resume)
    finally:
        updates._scale_gradients = original


def assert_same_frame(first, second, tolerance, label):
    """Equal, numbers up to `tolerance` of the largest in their column, or rounding: an on-policy loss or angle may be zero."""
    assert list(first.columns) == list(second.columns), label
    for name in first.columns:
        one, other = first[name], second[name]
        if pd.api.types.is_float_dtype(one):
            one, other = (column.to_numpy(float, na_value=np.nan) for column in (one, other))
            largest = np.nanmax(np.abs(one)) if np.isfinite(one).any() else 0.0
            rounding = 1e-12 if name.endswith("_rotation") else 1e-15  # degrees
            # also a difference of two step sizes
            allowed = 2 * tolerance if name == "residual" else tolerance
            np.testing.assert_allclose(
                one, other, rtol=0, atol=allowed * largest + rounding, err_msg=f"{label} {name}"
            )
        else:
            pd.testing.assert_series_equal(one, other, obj=f"{label} {name}")


def assert_same_run(folder, one, two, tolerance=1e-5, without=()):
    runs = [sharpscope.load_run(folder / name) for name in (one, two)]
    assert [run.info["status"] for run in runs] == ["finished", "finished"]
    for table in TABLES:
        first, second = (run.tokens() if table == "tokens" else getattr(run, table) for run in runs)
        if first is second is None:
            continue
        if without and table == "events":
            first, second = (
                frame[~frame["message"].str.contains("effect")].reset_index(drop=True)
                for frame in (first, second)
            )
        drop = [*timing_columns(table), *(without if table == "tokens" else ())]
        assert_same_frame(
            first.drop(columns=drop), second.drop(columns=drop), tolerance, f"{two} {table}"
        )
    assert len(runs[0].tokens()) > 100
    gradients = [torch.load(folder / f"{name}.gradient") for name in (one, two)]
    assert len(gradients[0]) == len(gradients[1])
    scale = max(float(g.abs().max()) for g in gradients[0] if g is not None)
    for first, second in zip(*gradients, strict=True):
        assert (first is None) == (second is None)
        assert first is None or float((first - second).abs().max()) < tolerance * scale
    saved = [checkpoints(folder / name)[-1] for name in (one, two)]
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in saved]
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        np.testing.assert_allclose(first.detach(), second.detach(), rtol=tolerance, atol=tolerance)


def check(toy_config, folder, cases, others=()):
    """Runs of `cases`, pairs of a name and whether weights are sharded, in two processes and in one.

    Sharded weights read every prompt for itself, so one process must too: transformers' norms round to float32 inside.
    """
    suffix = {False: "two", True: "sharded"}
    launched = [
        [values(toy_config, folder, f"{n}-{suffix[s]}", **CASES[n]), False, s] for n, s in cases
    ]
    launch(folder, [*launched, *others])
    for name, sharded in cases:
        one, two = f"{name}-not-{suffix[sharded]}", f"{name}-{suffix[sharded]}"
        with mock.patch.object(Scorer, "_shares", False) if sharded else nullcontext():
            alone(folder, values(toy_config, folder, one, **CASES[name]))
        info = sharpscope.load_run(folder / two).info
        assert (info["processes"], info["sharded"]) == (2, sharded)
        effects = [f"effect_{name}" for name in ("kl", "entropy", "heldout", "sharpness")]
        # sharded weights have no effects, and say so in an event
        assert_same_run(folder, one, two, without=effects if sharded else ())


def test_two_processes_do_what_one_does(toy_config, folder):
    plain = {
        "steps": 1,
        "recording.token_gradients_every": 0,
        "recording.heldout_influence_every": 0,
        "evaluation.every": 0,
    }
    frugal = plain | {"policy.dtype": "bfloat16", "update.gradient_checkpointing": True}
    single = plain | {"policy.dtype": "float32"}
    adapted = plain | {"policy.lora": {"r": 2}, "method.kl.coef": 0.1}
    others = [
        [values(toy_config, folder, "frugal", **frugal), False, True],
        [values(toy_config, folder, "adapted", **adapted), False, False],
    ]
    check(
        toy_config,
        folder,
        [("calibrated", False), ("dynamic", False), ("calibrated", True)],
        others,
    )
    for name, changes, tolerance in (("frugal", single, 0.05), ("adapted", adapted, 1e-9)):
        alone(folder, values(toy_config, folder, f"{name}-alone", **changes))
        one, two = (
            sharpscope.load_run(folder / run).steps["grad_norm"] for run in (f"{name}-alone", name)
        )
        np.testing.assert_allclose(two, one, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_every_case_is_the_same_in_two_processes(toy_config, folder, sharded):
    names = [
        "plain",
        "shuffled",
        "covariance",
        "sam",
        "token_baseline",
        "dynamic" if sharded else "averaged",  # an average of the weights is not sharded
    ]
    check(toy_config, folder, [(name, sharded) for name in names])


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_processes_resume_exactly_from_one_whole_checkpoint(toy_config, folder, sharded):
    name = f"resumed-{sharded}"
    config = values(toy_config, folder, name, **CASES["calibrated"]) | {
        "checkpoint.every": 2,
        "steps": 4,
    }
    launch(folder, [[config, False, sharded]])
    before = sharpscope.load_run(folder / name)
    drop = timing_columns("steps")
    tokens, steps = before.tokens(), before.steps.drop(columns=drop)
    last = checkpoints(folder / name)[-1]
    assert last.name == "step-000004"
    shutil.rmtree(last)
    update_run_info(folder / name, status="interrupted")
    launch(folder, [[config, True, sharded]])
    after = sharpscope.load_run(folder / name)
    assert_same_frame(tokens, after.tokens(), 1e-9, "tokens")
    assert_same_frame(steps, after.steps.drop(columns=drop), 1e-9, "steps")
    # What several processes saved, one goes on with.
    shutil.rmtree(checkpoints(folder / name)[-1])
    update_run_info(folder / name, status="interrupted")
    alone(folder, config, resume=True)
    assert_same_frame(
        steps, sharpscope.load_run(folder / name).steps.drop(columns=drop), 1e-4, "alone"
    )
