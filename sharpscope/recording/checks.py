"""Checks of a recorded step that measurements of its tokens make possible, and what is measured of the whole step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

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


def check_shares(
    step: int,
    columns: dict[str, Tensor],
    update: Tensor,
    updates: int,
    again: set[int],
    model: nn.Module,
) -> list[Event]:
    """Check that the tokens' shares of each update's squared gradient norm sum to 1; where they are far off, leave them out.

    `update` (N, T) is the update that a token belongs to. Not checked where only some groups were measured, or an update also
    used tokens of an earlier one (`again`).
    """
    if "attribution" not in columns or bool((columns["inclusion_probability"] < 1).any()):
        return []
    events = []
    for index in range(updates):
        used = update == index
        shares = columns["attribution"][used]
        total = float(shares.double().nansum())
        if index in again or bool(shares.isnan().all()) or abs(total - 1) <= SHARES_GAP:
            continue
        terms = "terms that no token's log-probability has (a penalty, an auxiliary loss, noise on embeddings)"
        cause = dropout_of(model) or f"the loss has {terms}"
        text = f"the tokens' shares of update {index} sum to {total:.3g}, not 1: {cause}"
        action = "warn"
        if abs(total - 1) > SHARES_WITHHELD:
            columns["attribution"][used] = math.nan
            text, action = f"{text}; they are left out", "left out"
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
