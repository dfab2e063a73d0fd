"""A step that was recorded in another trainer, made again from the checkpoint before it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from sharpscope.config import ForkSpec, RunConfig
from sharpscope.config.run import PolicySpec, ProbesSpec
from sharpscope.errors import UserError
from sharpscope.forks.experiment import FixedRollouts
from sharpscope.forks.start import Snapshot, Tell
from sharpscope.forks.step_again import Observe, StepAgain, drawn_by
from sharpscope.forks.token_sets import TokenSet
from sharpscope.policy import load_policy
from sharpscope.recording.from_checkpoint import WRONG, StepRows, step_rows
from sharpscope.recording.norms import clip_factor, gradient_norms, layer_groups, update_norms
from sharpscope.recording.saved_optimizer import load_adamw
from sharpscope.recording.step import PendingUpdate, UpdateResult
from sharpscope.seeds import derive
from sharpscope.tasks import make_task
from sharpscope.tokens import Clip
from sharpscope.traces import Run

NORM_GAP = 0.05
"""Relative difference of the first gradient's norm from the recorded one from which a line says so."""


class RecordedStep:
    """The updates of a recorded step with the recorded coefficients, clip factors and learning rates."""

    def __init__(
        self,
        run: Run,
        rows: StepRows,
        optimizer: torch.optim.Optimizer,
        tell: Tell,
    ) -> None:
        self.rows = rows
        self.optimizer = optimizer
        self.tell = tell
        model = rows.policy.model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.groups = layer_groups(model)
        self.snapshot = Snapshot(model, optimizer)
        of_step = run.updates[run.updates["step"] == rows.step]
        self.recorded = of_step.sort_values("update", ignore_index=True)
        self.first_use = rows.tensor("update")
        uses = run.frame("uses", rows.step)
        self.coefs = [
            self._coefficients(uses[uses["update"] == number], number)
            for number in self.recorded["update"]
        ]

    def _coefficients(self, uses: pd.DataFrame, update: int) -> Tensor:
        """(N, T) of an update: of the tokens that it is the first to use, and of further `uses`."""
        rows = self.rows
        coef = torch.nan_to_num(rows.tensor("loss_coef"))
        values = torch.where(self.first_use == update, coef, 0.0)
        rollouts = rows.frame["rollout"][rows.known].astype(int)
        row_of = dict(zip(rollouts, rows.at[0].tolist(), strict=True))
        for rollout, position, more in uses[["rollout", "position", "loss_coef"]].to_numpy(float):
            values[row_of[int(rollout)], int(position)] += more
        return values

    def update(
        self,
        without: Tensor | TokenSet | None,
        observe: Observe | None,
    ) -> Sequence[UpdateResult]:
        """Make the step without the tokens (N, T) marked; see `StepAgain`."""
        assert not isinstance(without, TokenSet)
        self.snapshot.restore()
        made = []
        for number, values in enumerate(self.coefs):
            coef = values if without is None else values.masked_fill(without, 0.0)
            made.append(self._make(number, coef, observe))
        return made

    def _make(self, number: int, coef: Tensor, observe: Observe | None) -> UpdateResult:
        """An update with these coefficients."""
        recorded = self.recorded.iloc[number]
        for parameter, part in zip(self.parameters, self.rows.gradient(coef), strict=True):
            parameter.grad = part
        norm = gradient_norms(self.parameters, self.groups)
        clipped = float(recorded["clip_factor"])
        limit = float(recorded["grad_norm"]) * clipped if clipped < 1 else None
        if observe is not None:
            if number == 0:
                self._compare(norm.total)
            index = int(recorded["update"])
            every = torch.arange(len(coef))
            clips = () if limit is None else (Clip(limit=limit),)
            first = self.first_use == index
            observe(PendingUpdate(index, every, first, coef, norm.total, clips))
        factor = clip_factor(norm.total, limit)
        torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)
        for group in self.optimizer.param_groups:
            group["lr"] = float(recorded["lr"])
        self.optimizer.step()
        moved = update_norms(self.optimizer, self.groups)
        return UpdateResult(
            grad_norm=norm.total,
            plain_norm=norm.total,
            update_norm=moved.total,
            clip_factor=factor,
            layers=(norm.layers, moved.layers),
        )

    def _compare(self, norm: float) -> None:
        """Say where the gradient at the checkpoint is not the recorded one."""
        was = float(self.recorded["grad_norm"].iloc[0])
        if abs(norm / was - 1) > NORM_GAP:
            self.tell(
                f"the gradient's norm at the checkpoint is {norm:.3g}, the recorded one {was:.3g}"
            )


def trainer_step(
    run: Run,
    step: int,
    checkpoint: str,
    config: RunConfig | None,
    spec: ForkSpec,
    tell: Tell,
) -> StepAgain:
    """Step `step` of a recorded run from the checkpoint before it: gradients are Σ c·∇log π with the recorded coefficients."""
    policy = load_policy(PolicySpec(model=checkpoint))
    if step not in run.token_steps or run.rollouts["token_ids"].isna().all():
        raise UserError(
            f"--step {step}: has no tokens with IDs; record the run again with recording.tokens_every=1"
        )
    rows = step_rows(run, step, run.arrow("tokens", [step]), policy)
    if rows.frame["row_probability"].notna().any():
        raise UserError(
            f"--step {step}: has a sample of its tokens; record the run with more recording.token_rows"
        )
    if rows.gap > WRONG:
        raise UserError(
            f"--model {checkpoint}: its log-probabilities differ from those recorded before step {step} by {rows.gap:.2g} nats a token "
            f"(limit {WRONG:g}); give the checkpoint that was saved after step {step - 1}"
        )
    optimizer = load_adamw(Path(checkpoint), policy.model)
    again = RecordedStep(run, rows, optimizer, tell)
    draw = None
    if config is not None:
        seed = derive(config.seed, "fork heldout", step)
        draw = drawn_by(config, policy, make_task(config.task), spec, seed)
    return StepAgain(
        step=step,
        scorer=rows.scorer,
        rollouts=rows.rollouts,
        temperature=rows.temperature,
        seed=int(run.seed or 0),
        optimizer=optimizer,
        update=again.update,
        restore=again.snapshot.restore,
        held_out=draw,
        probes=ProbesSpec(),
        to=step,
        fixed=FixedRollouts(rows.rollouts, torch.zeros(len(rows.rollouts)), rows.stats),
    )
