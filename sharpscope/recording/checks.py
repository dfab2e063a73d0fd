"""Checks of a recorded step that measurements of its tokens make possible, and what is measured of the whole step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sharpscope.methods.loss import k3
from sharpscope.policy import Rollouts
from sharpscope.recording.capture import widened
from sharpscope.recording.measurements import StepValues
from sharpscope.recording.recorded_model import dropout_of
from sharpscope.rules.judging import Event

SHARES_GAP, SHARES_WITHHELD = 0.02, 0.1
"""How far the tokens' shares of an update may sum from 1 before an event says so, and before they are left out."""
KL_PART, KL_FEWEST = 16, 4
"""One in KL_PART completions of a step, at least about KL_FEWEST, are scored again after its last update."""


def measured_columns(found: Sequence[StepValues], like: Tensor) -> dict[str, Tensor]:
    """The columns, of the shape of `like` (N, T), that were measured at the updates of a step."""
    columns: dict[str, Tensor] = {}
    for values in found:
        for name, column in values.columns.items():
            whole = torch.full(like.shape, math.nan)
            whole[: len(column)] = widened(column, like.shape[1], math.nan)
            columns[name] = torch.where(whole.isnan(), columns.get(name, whole), whole)
    return columns


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What tells apart why the shares of an update do not sum to 1."""

    model: nn.Module
    norms: Sequence[float]  # of the gradient, of each update of the step
    before: float = math.nan  # that of the update before the step
    unheld: bool = False  # whether parameters are in no optimizer
    first: bool = True  # whether the step is the first


LIMITS = (0.1, 0.2, 0.25, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Usual limits of clipping."""


def reason_of_sum(shares: Tensor, index: int, known: Circumstances) -> str:
    """Why the shares of the tokens (n,) of an update do not sum to 1, by a check of each reason.

    Dropout; gradients that nothing clears; a norm that is a limit of clipping, or that of the update before (the gradient was clipped
    before the recorder saw it); a sum that is a power of 2 (a scaled loss); what rounding each token's share allows.
    """
    if dropout := dropout_of(known.model):
        return dropout
    if known.unheld and not known.first:
        return "parameters that no optimizer holds have the gradients of earlier updates too; clear them"
    total = float(shares.double().nansum())
    norm = known.norms[index]
    others = [*LIMITS, known.before if index == 0 else known.norms[index - 1]]
    if total > 1 and any(abs(norm / other - 1) < 1e-3 for other in others):
        return f"the gradient was clipped before the recorder saw it (its norm is {norm:.4g}); call step before clipping"
    power = math.log2(total) if total > 1 else 0.0
    if power > 0.9 and abs(power - round(power)) < 0.03:
        text = f"the loss was multiplied by {2 ** round(power)} in backward, and the gradient divided again (GradScaler.unscale_)"
        return f"{text}: loss_coef is so many times too large; call step before unscale_"
    precision = torch.finfo(next(known.model.parameters()).dtype).eps
    if abs(total - 1) <= precision * float(shares.double().abs().nansum()):
        return f"it is what rounding of {precision:.2g} in each token's gradient makes of shares of both signs"
    return "the loss has terms that no token's log-probability has (a penalty, an auxiliary loss, noise on embeddings)"


def check_shares(
    step: int,
    columns: dict[str, Tensor],
    update: Tensor,
    again: set[int],
    known: Circumstances,
) -> list[Event]:
    """Check that the tokens' shares of each update's squared gradient norm sum to 1; where they are far off, leave them out.

    `update` (N, T) is the update that a token belongs to. Not checked where only some groups were measured, or an update also
    used tokens of an earlier one (`again`).
    """
    if "attribution" not in columns or bool((columns["inclusion_probability"] < 1).any()):
        return []
    events = []
    for index in range(len(known.norms)):
        used = update == index
        shares = columns["attribution"][used]
        total = float(shares.double().nansum())
        if index in again or bool(shares.isnan().all()) or abs(total - 1) <= SHARES_GAP:
            continue
        cause = reason_of_sum(shares, index, known)
        text = f"the tokens' shares of update {index} sum to {total:.3g}, not 1: {cause}"
        action = "warn"
        if abs(total - 1) > SHARES_WITHHELD:
            columns["attribution"][used] = math.nan
            text = f"{text}; they are left out"
            action = "left out"
        event = Event(step, "attribution_sum", "warning", total, SHARES_GAP, action, text)
        events.append(event)
    if bool(columns["attribution"].isnan().all()):
        del columns["attribution"]
    return events


def kl_of_step(
    rollouts: Rollouts, before: Tensor, score: Callable[[Rollouts], Tensor]
) -> float | None:
    """Mean k3 of KL(π_old‖π) over the tokens of a part of a step's completions, after its last update [nats / token].

    `before` (N, T) is ln π_old, `score` gives ln π (n, T) of some completions at the present weights. None without a token.
    """
    rows = torch.arange(0, len(rollouts), max(1, min(len(rollouts) // KL_FEWEST, KL_PART)))
    mask = rollouts.completion_mask.bool().cpu()[rows]
    if not bool(mask.any()):
        return None
    after = score(rollouts.rows(rows.to(rollouts.group.device))).double().cpu()
    width = after.shape[1]
    was = before[rows].double().cpu()[:, :width]
    return float(k3(was, after)[mask[:, :width]].mean())


def written_rows(
    found: Sequence[StepValues], rollouts: int, spiked: bool, sample: tuple[Tensor, float]
) -> tuple[Tensor, float] | None:
    """The `sample` of rollouts whose tokens are written; None: all, as at a spike.

    All too where an update was measured before the step's last completions came: its sample was one of the others.
    """
    earlier = any(values.columns and len(values.rollouts) < rollouts for values in found)
    return None if spiked or earlier else sample


def by_layer(found: Sequence[StepValues]) -> Mapping[tuple[int, int], dict[str, float]]:
    """Norms by layer of the leading tokens of all updates of a step."""
    return {at: values for one in found for at, values in one.by_layer.items()}
