"""Directional derivatives of log-probabilities by central differences: two forward passes and a short trial.

If the model makes discrete choices (experts of a mixture), an unperturbed pass comes first and the others repeat its choices.

The truncation error grows with the square of the step, rounding with its inverse. They balance if the step changes the most
sensitive log-probability by about 2·eps^(1/3), for any model and direction; a step proportional to the norm of the weights can
be off by a factor of 16. So a trial on a few tokens scales the step, and rows that change far more are repeated with a smaller
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from sharpscope.errors import UserError
from sharpscope.policy import bare
from sharpscope.probes.token_gradients.choices import Choices
from sharpscope.probes.token_gradients.forward_mode import forward_attention, input_direction, substituted
from sharpscope.probes.token_gradients.head import head_logp
from sharpscope.probes.token_gradients.rows import Rows
from sharpscope.probes.token_gradients.structure import Structure, hidden_states, read_before

MOVE = 2.0
"""Largest |Δ log π| that a step aims at, over eps^(1/3); errors stay small from a quarter to three times that. Half as much
again was seen to be wrong by 2e-4 of Σ|share| in float32 on a tiny Gemma-2.
"""
FIRST = 0.0025  # ‖h·u‖ of the trial, over ‖θ‖·eps^(1/3)
SEVERED = 5e-4
"""Of Σ|derivative|: how far differences may be from autograd where a model hides parts of itself from autograd."""
TRIAL = 32  # tokens of one row that the trial differences


@torch.no_grad()
def central_derivative(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    direction: Sequence[Tensor],
    temperature: float,
    values: Tensor,
    error: Tensor | None = None,
) -> None:
    """Fill `values` (N, S) with (log π(θ + h·u) − log π(θ − h·u))/(2h), h chosen as above, row by row where needed.

    Args:
        error: (N, S) or None; where given, it gets the distance to the derivative at twice the step.

    Raises:
        UserError: weights or activations of less than 32 bits, or a model that hides from autograd what a step moves.
    """
    target, step = _target(structure), _first_step(structure, direction)
    if step == 0.0 or not bool(rows.chosen.any()):
        return
    if error is not None:
        error.zero_()

    def difference(some: Rows, h: float, out: Tensor) -> None:
        _difference(model, structure, some, direction, temperature, h, out)

    short = _trial(rows)
    difference(short, step, values)
    step *= _factor(target, step * float(values.abs().max()))
    difference(rows, step, values)
    moved = _per_row(rows, values) * step
    plan = [(rows, step)]
    if float(moved.max()) < target / 4:
        plan = [(rows, step * _factor(target, float(moved.max())))]
    elif bool((far := moved > 3 * target).any()):
        plan = [(rows.take((~far).nonzero()[:, 0]), step)] if not bool(far.all()) else []
        plan.append((rows.take(far.nonzero()[:, 0]), step * target / float(moved.max())))
    for some, h in plan:
        if h != step:
            difference(some, h, values)
    if structure.severed:
        _check_severed(model, structure, short, direction, temperature, values)
    if error is not None:
        for some, h in plan:
            difference(some, 2 * h, error)
        error.sub_(values).abs_()


def _check_severed(
    model: nn.Module, structure: Structure, row: Rows, direction: Sequence[Tensor], temperature: float, values: Tensor
) -> None:
    """Compare the differences of a row's tokens with autograd, since a step also changes parts outside of the graph."""
    with torch.enable_grad():
        z = structure.head.logits(hidden_states(model, row.ids)[row.predicts]) / temperature
        logp = torch.log_softmax(z, 1).gather(1, row.targets[:, None])[:, 0]
    gathered = row.gathered(values)
    parameters = list(structure.named.values())
    for signs in (torch.ones_like(gathered), (-1.0) ** torch.arange(len(gathered)).to(gathered)):
        pull = signs.to(logp)
        gradients = torch.autograd.grad(logp, parameters, pull, retain_graph=True, allow_unused=True)
        expected = math.fsum(float((g * u).sum()) for g, u in zip(gradients, direction, strict=True) if g is not None)
        if abs(float(gathered @ signs) - expected) > SEVERED * float(gathered.abs().sum()):
            raise UserError(
                f"method, 'central': {type(bare(model)).__name__} hides a part of itself from autograd "
                f"({structure.severed}), which a finite step moves all the same; use method='forward'"
            )


def _target(structure: Structure) -> float:
    coarsest = max(
        (structure.computes_in, *(p.dtype for p in structure.named.values())), key=lambda dtype: torch.finfo(dtype).eps
    )
    eps = torch.finfo(coarsest).eps
    if eps > 1e-6:
        raise UserError(
            f"method, 'central': weights or activations are {coarsest}; a small step vanishes in them, use "
            "method='forward' or float32 weights"
        )
    return MOVE * eps ** (1 / 3)


def _first_step(structure: Structure, direction: Sequence[Tensor]) -> float:
    """H such that ‖h·u‖ is a fixed small part of ‖θ‖; 0 if u = 0."""
    length = math.sqrt(squared_length(direction))
    weights = math.sqrt(squared_length([parameter.detach() for parameter in structure.named.values()]))
    return FIRST / MOVE * _target(structure) * weights / length if length > 0 else 0.0


def squared_length(parts: Sequence[Tensor]) -> float:
    """Sum of the squared norms of the tensors, in float64."""
    return math.fsum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts)


def _factor(target: float, moved: float) -> float:
    """What to multiply a step by that moved log π by `moved`: rounding may be all of a very small move."""
    return min(max(target / moved, 1 / 64), 64.0) if moved > 0 else 1.0


def _trial(rows: Rows) -> Rows:
    """The row with the most chosen tokens, truncated after its first `TRIAL` chosen tokens."""
    row = rows.take(rows.chosen.sum(1).argmax()[None])
    end = int(row.chosen[0].nonzero()[:, 0][:TRIAL][-1]) + 1
    return replace(
        row,
        ids=row.ids[:, :end],
        lengths=row.lengths.clamp_max(end),
        chosen=row.chosen[:, :end],
        place=row.place[:, :end],
    )


def _per_row(rows: Rows, values: Tensor) -> Tensor:
    """The largest absolute value over the chosen tokens of each row, (R,); 0 if there are none."""
    each = values[rows.source].gather(1, rows.place) * rows.chosen
    return each.abs().amax(1)


def _difference(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    direction: Sequence[Tensor],
    temperature: float,
    step: float,
    out: Tensor,
) -> None:
    chunks = list(rows.chunks(share=structure.shares))
    modes: list[Callable[[], AbstractContextManager]] = [nullcontext] * len(chunks)
    if structure.chooses:
        modes = [_held(model, structure, chunk) for chunk in chunks]
    logp: list[list[Tensor]] = []
    inner = input_direction(model, structure.named, direction)
    for sign in (1.0, -1.0):
        moved, inside, part = [], [], []
        for parameter, u, v in zip(structure.named.values(), direction, inner, strict=True):
            moved.append(parameter.detach().add(u.to(parameter), alpha=sign * step))
            inside.append(moved[-1] if u is v else parameter.detach().add(v.to(parameter), alpha=sign * step))
        with substituted(model, structure.named, inside), _attention(model, structure):
            for chunk, mode in zip(chunks, modes, strict=True):
                with mode():
                    hidden = _hidden(model, chunk)
                part.append(_logp(structure, chunk, hidden, temperature, moved))
        logp.append(part)
    for chunk, above, below in zip(chunks, *logp, strict=True):
        chunk.write(out, (above - below) / (2 * step))


def _attention(model: nn.Module, structure: Structure) -> AbstractContextManager[None]:
    """Use the model's own attention if it is fused; eager attention may hide casts to float32."""
    if getattr(bare(model).config, "_attn_implementation", None) == "sdpa":
        return nullcontext()
    return forward_attention(model, structure)


def _held(model: nn.Module, structure: Structure, chunk: Rows) -> Callable[[], Choices]:
    """A function that returns contexts in which a pass over the chunk repeats the choices of the unperturbed model."""
    with Choices() as choices, _attention(model, structure):
        _hidden(model, chunk)
    return lambda: Choices(choices.made)


def _hidden(model: nn.Module, chunk: Rows) -> Tensor:
    """Hidden states (M, d) that predict the chosen tokens."""
    return hidden_states(model, chunk.ids, read_before(model, chunk.before))[chunk.predicts]


def _logp(structure: Structure, chunk: Rows, hidden: Tensor, temperature: float, values: Sequence[Tensor]) -> Tensor:
    """Log π (M,) for hidden states (M, d) and other parameters of the output layer."""
    by_name = dict(zip(structure.named, values, strict=True))
    head = structure.head
    weight = by_name.get(structure.tied or structure.head_weight or "", head.weight)
    bias = by_name.get(structure.head_bias or "", head.bias)
    moved = type(head)(weight, bias, head.soft_cap, head.scale)
    return head_logp(hidden, moved, chunk.targets, temperature)
