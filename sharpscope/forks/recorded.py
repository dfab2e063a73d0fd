"""A step of a run that was recorded in another trainer, made again at the trainer's checkpoint with its AdamW state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sharpscope.config import ForkSpec, RunConfig
from sharpscope.config.probes import ProbesSpec
from sharpscope.config.run import PolicySpec
from sharpscope.errors import UserError
from sharpscope.forks.outcomes import FixedRollouts
from sharpscope.forks.start import Snapshot, Tell
from sharpscope.forks.without import Observe, StepAgain, drawn_by
from sharpscope.policy import load_policy
from sharpscope.recording.from_checkpoint import WRONG
from sharpscope.recording.norms import clip_factor, gradient_norms, layer_groups, update_norms
from sharpscope.recording.replay import step_rows
from sharpscope.recording.step import PendingUpdate, UpdateResult
from sharpscope.seeds import derive
from sharpscope.tasks import make_task
from sharpscope.traces import Run

STATES = ("optimizer.pt", "optimizer.bin")
"""Files in which transformers' Trainer keeps the optimizer's state."""
NORM_GAP = 0.05
"""Relative difference of the first gradient's norm from the recorded one from which a line says so."""


class TrainerStep(StepAgain):
    """Step `step` of a recorded run from the checkpoint before it: gradients are Σ c·∇log π with the recorded coefficients.

    The coefficients of a token in later updates of the step are those that were recorded, also where earlier updates differ.
    """

    def __init__(
        self, run: Run, step: int, checkpoint: str, config: RunConfig | None, spec: ForkSpec, tell: Tell
    ) -> None:
        policy = load_policy(PolicySpec(model=checkpoint))
        if step not in run.token_steps or run.rollouts["token_ids"].isna().all():
            raise UserError(
                f"--step {step}: the run has no tokens with IDs there; record it again with recording.tokens_every=1"
            )
        rows = self.rows = step_rows(run, step, run.arrow("tokens", [step]), policy)
        if rows.frame["row_probability"].notna().any():
            raise UserError(
                f"--step {step}: the run has a sample of its tokens; record it again with more recording.token_rows"
            )
        gap = float(np.nanmean(np.abs(rows.column(rows.stats.logp) - rows.frame["logp"].to_numpy(dtype=float))))
        if gap > WRONG:
            raise UserError(
                f"--model {checkpoint}: its log-probabilities differ from those recorded before step {step} by {gap:.2g} nats a token "
                f"(limit {WRONG:g}); give the checkpoint that was saved after step {step - 1}"
            )
        draw = None
        if config is not None:
            draw = drawn_by(config, policy, make_task(config.task), spec, derive(config.seed, "fork heldout", step))
        fixed = FixedRollouts(rows.rollouts, torch.zeros(len(rows.rollouts)), rows.stats)
        options: dict[str, Any] = {"held_out": draw, "fixed": fixed, "probes": ProbesSpec(), "rho": None}
        super().__init__(step, rows.scorer, rows.rollouts, rows.temperature, int(run.seed or 0), **options)
        self.tell, self.parameters = tell, [p for p in policy.model.parameters() if p.requires_grad]
        self.groups, self.optimizer = layer_groups(policy.model), load_adamw(Path(checkpoint), policy.model)
        self.updates = run.updates[run.updates["step"] == step].sort_values("update").to_dict("records")
        self.coef = self._coefficients(run)
        self.snapshot = Snapshot(policy.model, self.optimizer)

    def _coefficients(self, run: Run) -> list[tuple[Tensor, Tensor]]:
        """(coefficients (N, T), first use (N, T)) of each update of the step."""
        first, coef = self.rows.tensor("update"), torch.nan_to_num(self.rows.tensor("loss_coef"))
        again = run.uses[run.uses["step"] == self.step]
        row_of = {
            int(self.rows.frame["rollout"].iloc[i]): int(r)
            for i, r in zip(np.flatnonzero(self.rows.known), self.rows.at[0], strict=True)
        }
        made = []
        for update in self.updates:
            of_update = first == update["update"]
            values = torch.where(of_update, coef, 0.0)
            for use in again[again["update"] == update["update"]].to_dict("records"):
                values[row_of[int(use["rollout"])], int(use["position"])] += float(use["loss_coef"])
            made.append((values, of_update))
        return made

    def restore(self) -> None:
        """See `StepAgain`."""
        self.snapshot.restore()

    def update(self, without: Tensor | None = None, observe: Observe | None = None) -> Sequence[UpdateResult]:
        """See `StepAgain`."""
        self.snapshot.restore()
        made: list[UpdateResult] = []
        for recorded, (values, first) in zip(self.updates, self.coef, strict=True):
            coef = values if without is None else values.masked_fill(without, 0.0)
            for parameter, part in zip(self.parameters, self.rows.gradient(coef), strict=True):
                parameter.grad = part
            norm = gradient_norms(self.parameters, self.groups)
            if observe is not None:
                if not made and abs(norm.total / recorded["grad_norm"] - 1) > NORM_GAP:
                    was = f"{norm.total:.3g}, the recorded one {recorded['grad_norm']:.3g}"
                    self.tell(f"the gradient's norm at the checkpoint is {was}")
                every = torch.arange(len(values))
                observe(PendingUpdate(int(recorded["update"]), every, first, coef, norm.total))
            clipped = float(recorded["clip_factor"])
            factor = clip_factor(norm.total, recorded["grad_norm"] * clipped if clipped < 1 else None)
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)
            for group in self.optimizer.param_groups:
                group["lr"] = float(recorded["lr"])
            self.optimizer.step()
            moved = update_norms(self.optimizer, self.groups)
            norms = (norm.total, norm.total, moved.total, factor)
            made.append(UpdateResult(math.nan, *norms, False, layers=(norm.layers, moved.layers)))
        return made


def load_adamw(folder: Path, model: nn.Module) -> torch.optim.AdamW:
    """AdamW over a model's trainable parameters with the state that a trainer saved.

    Trainers order parameters by groups (with and without weight decay); each parameter, in the model's order, is the next of the
    one group whose next moment has its shape.

    Raises:
        UserError: there is no such file, or its moments are not those of the model's parameters.
    """
    path = next((folder / name for name in STATES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(
            f"--model {folder}: has no {STATES[0]}, the optimizer's state; give a checkpoint folder of the trainer"
        )
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    groups, moments = state["param_groups"], state["state"]
    waiting = [list(group["params"]) for group in groups]
    chosen: list[list[Tensor]] = [[] for _ in groups]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        fits = [
            at
            for at, left in enumerate(waiting)
            if left and getattr(moments.get(left[0], {}).get("exp_avg"), "shape", None) == parameter.shape
        ]
        if len(fits) != 1:
            raise UserError(
                f"--model {path}: its moments do not fit the parameter {name}; it must be AdamW's state of this model"
            )
        waiting[fits[0]].pop(0)
        chosen[fits[0]].append(parameter)
    if any(waiting):
        raise UserError(f"--model {path}: has moments of more parameters than the model trains")
    first = groups[0]
    optimizer = torch.optim.AdamW(
        [
            {"params": params, "weight_decay": group["weight_decay"]}
            for params, group in zip(chosen, groups, strict=True)
        ],
        lr=first["lr"],
        betas=tuple(first["betas"]),
        eps=first["eps"],
    )
    optimizer.load_state_dict({"state": moments, "param_groups": [{**g, "fused": None} for g in groups]})
    return optimizer
