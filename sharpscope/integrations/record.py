"""`sharpscope.record`: record a trainer, or any training loop in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import lt
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sharpscope.config.methods import parse_method
from sharpscope.config.token_weights import UniformWeight
from sharpscope.errors import UserError
from sharpscope.integrations.loop import LoopRecorder
from sharpscope.objective import Method


def record(
    model: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    out: str | Path = "runs/recorded",
    tokenizer: Any = None,
    weights: str | Method | None = None,
    rotation: str | Method | None = None,
    task: str | None = None,
    correct: float | Callable[[float], bool] | None = None,
    recording: Mapping[str, Any] | None = None,
    critical_sharpness: bool | int = True,
    steps: int = 0,
    updates_per_step: int = 1,
    temperature: float = 1.0,
    max_grad_norm: float | None = None,
) -> Any:
    """Record a trainer, or the updates of a model in a training loop of your own.

    A trainer (TRL's GRPOTrainer, SFTTrainer, DPOTrainer or a transformers Trainer): call it once, before
    `trainer.train()`. A loop: give the model and its optimizer, call `tokens` before `backward` and `step` before
    `optimizer.step()` on what this function returns. Without `weights` the training is bitwise the same, and an error of the recorder ends
    the recording, not the training. `sharpscope show`, `tokens` and `analyze` read the folder, also while it trains.

    Args:
        model: the trainer; or a causal language model of transformers, also wrapped in DDP or sharded by FSDP2.
        optimizer: of the loop.
        out: folder of the run; where there is something already, `out`-2, -3, …. A trainer that resumes from a
            checkpoint continues the trace in it.
        tokenizer: of the loop.
        weights: for GRPOTrainer: a method, the name of one (`grpo-sg`, `ar`, `grpo-sg+weight.preset=calibrated`) or
            `module:function`, whose token weights multiply TRL's surrogate, through per-token advantages; None changes nothing.
        rotation: token weights, as a method, the name of one (`grpo-sg`) or `module:function`: at the measured steps, how far they
            would turn the gradient of this training (columns gradient_rotation, gradient_scale), which does not use them. For
            GRPOTrainer and loops.
        task: the task's name in the trace.
        correct: which total rewards count as correct: those above a number, or a function. None: there is no accuracy, only the
            reward.
        recording: fields of the run configuration's part `recording`, such as {"token_gradients_every": 5}.
        critical_sharpness: whether to measure the critical sharpness of updates; or the interval [steps]. A loop gives `step` its
            loss as a function. By default it, norms and shares are measured at up to ten steps of the training, and at fewer where
            they would cost more than 12 % of its passes (`integrations.price`).
        steps: number of steps of the loop, if known: the last one is measured like the first.
        updates_per_step: optimizer updates of the loop that use one batch of completions.
        temperature: at which the loop's log-probabilities are taken.
        max_grad_norm: to which the loop clips; None: measured from the gradient.

    Returns:
        The recorder: of a trainer, `recorder.detach()` restores the trainer; of a loop, a `LoopRecorder`.

    Raises:
        UserError: the trainer, an option or the folder cannot be used; the message names it.
    """
    judge = correct if correct is None or callable(correct) else partial(lt, float(correct))
    options: dict[str, Any] = {"recording": recording, "correct": judge, "critical": critical_sharpness}
    if rotation is not None:
        options["rotate"] = method = _weighting(rotation)
        if weights is not None:
            raise UserError("rotation: the training uses weights already; give one of the two")
        if method.tokens is None and isinstance(method.weight, UniformWeight):
            raise UserError(f"rotation = {method.name!r}: has no token weights; give one such as grpo-sg")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"record: {optimizer!r} is no optimizer; name the folder: record(trainer, out={str(optimizer)!r})"
        )
    if not isinstance(model, nn.Module):
        return _record_trainer(model, out, task, weights, options)
    if optimizer is None or tokenizer is None:
        raise UserError("record: a model needs its optimizer and tokenizer; record(model, optimizer, tokenizer=…)")
    if weights is not None:
        raise UserError("weights: a loop of your own applies its own; leave them out")
    options |= {"temperature": temperature, "max_grad_norm": max_grad_norm, "task": task or "loop"}
    return LoopRecorder(model, optimizer, tokenizer, out, steps=steps, updates=updates_per_step, **options)


def _record_trainer(
    trainer: Any, out: str | Path, task: str | None, weights: str | Method | None, options: dict[str, Any]
) -> Any:
    """The recorder of a trainer, after its checks."""
    from transformers import Trainer

    from sharpscope.integrations.trainers import SupervisedRecorder, check_supervised

    kinds, name = type(trainer).__mro__, type(trainer).__name__
    if not isinstance(trainer, Trainer):
        raise UserError(f"record: {name} is no trainer and no torch module; give one of them")
    grpo = "GRPOTrainer" in (kind.__name__ for kind in kinds)
    if (weights is not None or "rotate" in options) and not grpo:
        raise UserError(f"weights, rotation: {name} has no surrogate that they multiply; leave them out")
    if any(kind.__module__.startswith("trl.") for kind in kinds):
        from sharpscope.integrations.trl import GrpoRecorder, check_grpo, check_version, token_weights_of

        check_version()
        if grpo:
            check_grpo(trainer)
            if weights is not None:
                options["weights"] = token_weights_of(trainer, _weighting(weights))
            return GrpoRecorder(trainer, out, task=task or "trl", **options)
    kind = check_supervised(trainer)
    return SupervisedRecorder(trainer, out, kind, task=task or kind, **options)


def _weighting(given: str | Method) -> Method:
    """A method as given, or by its name or token weights."""
    if isinstance(given, Method):
        return given
    return parse_method(given).with_preset("auto", "paper").model_copy(update={"name": given})
