"""What each token of an update does to sharpness, and what weights on the tokens do to it, predicted and measured (design D3).

Everything is at one state of a run: the update's gradient, AdamW's moments, and outcomes on fixed texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sharpscope.policy.directions import inner
from sharpscope.policy.guard import moved_by
from sharpscope.tokens.attribution import _gradient
from sharpscope.tokens.optimizer_steps import ComingStep
from sharpscope.tokens.outcomes import Prepared
from sharpscope.tokens.update_effects import UpdateEffects

REGRESSORS = ("unlikely", "logit norm", "coefficient", "entropy")
"""1 − π, ‖p − e‖, |c| and the entropy at the token's position [nats]."""
JOINT = ("unlikely", "coefficient", "entropy")
"""Without ‖p − e‖, which is nearly a function of 1 − π."""
SIDES = ("all", "right", "wrong")
"""Tokens of all completions, of those with A > 0, and of those with A < 0."""
BINS = 10
"""Classes of π with equal mass, from the least likely tokens to the most likely ones."""
TOLERANCE = 2e-4
"""Relative difference of two KL that count as equal."""
Row = dict[str, float | str]
Moves = Sequence[Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of an update with a coefficient, flat (M,) and in float64."""

    live: Tensor  # (N, S) bool: which they are
    coef: Tensor  # c = ∂L/∂log π
    values: Mapping[str, Tensor]  # of the regressors
    mass: Tensor  # |c|·‖p − e‖

    @classmethod
    def of(cls, coef: Tensor, probability: Tensor, logit_norm: Tensor, entropy: Tensor) -> Tokens:
        """From (N, S) tensors."""
        live = coef != 0
        c, pi, norm, h = (v[live].double() for v in (coef, probability, logit_norm, entropy))
        values = dict(zip(REGRESSORS, (1 - pi, norm, c.abs(), h), strict=True))
        return cls(live=live, coef=c, values=values, mass=c.abs() * norm)

    def side(self, name: str) -> Tensor:
        """(M,) bool: the tokens of a side; a positive advantage makes the coefficient negative."""
        if name == "all":
            return torch.ones_like(self.coef, dtype=torch.bool)
        return self.coef < 0 if name == "right" else self.coef > 0

    def mean_one(self, weight: Tensor) -> Tensor:
        """Weights (M,) divided by their mean over the mass."""
        return weight * (self.mass.sum() / (self.mass * weight).sum())

    def spread(self, weight: Tensor) -> float:
        """Standard deviation over the mass of weights with mean 1."""
        share = self.mass / self.mass.sum()
        return float((share * (weight - 1).square()).sum().sqrt())


@dataclass(frozen=True, kw_only=True)
class Step:
    """The step of one optimizer at a state, with the gradients of outcomes after it.

    Effects at equal KL are E_t(Q) − E_t(KL)·⟨∇Q, Δ⟩/⟨∇KL, Δ⟩: a change of the gradient moves the step, and the step is then scaled
    such that its KL stays what it was.
    """

    coming: ComingStep
    moves: Moves
    after: Mapping[str, float]  # outcomes after the step
    effects: Mapping[str, Tensor]  # (M,) E_t of each outcome
    along: Mapping[str, float]  # ⟨∇Q, Δ⟩ of each outcome

    def at_equal_kl(self, name: str) -> Tensor:
        """(M,) effects on an outcome when the step keeps its KL."""
        share = self.along[name] / self.along["kl"]
        return self.effects[name] - share * self.effects["kl"]


def make_step(
    one: UpdateEffects,
    tokens: Tokens,
    optimizer: torch.optim.Optimizer,
    outcomes: Sequence[Prepared],
) -> Step:
    """The step that an optimizer makes with the gradient of `one`."""
    coming = ComingStep(optimizer, one.parameters, one.gradient)
    moves = coming.steps()
    plain = [outcome for outcome in outcomes if outcome.is_plain]
    after, effects, along = {}, {}, {}
    with moved_by(one.parameters, moves):
        found = {
            outcome.name: outcome.gradient() for outcome in [*plain, *(set(outcomes) - set(plain))]
        }
    for name, (value, q) in found.items():
        after[name] = value
        effects[name] = one.along(coming.pull(q))[tokens.live].double()
        along[name] = inner(q, moves)
    return Step(coming=coming, moves=moves, after=after, effects=effects, along=along)


def sgd_of_equal_kl(
    one: UpdateEffects, kl: Prepared, wanted: float, rate: float
) -> torch.optim.SGD:
    """Plain SGD at the learning rate whose step has this KL."""
    made = torch.optim.SGD(one.parameters, lr=rate)
    moves = ComingStep(made, one.parameters, one.gradient).steps()
    scale, _ = scaled_to(one, kl, moves, wanted)
    made.param_groups[0]["lr"] = rate * scale
    return made


def scaled_to(one: UpdateEffects, kl: Prepared, moves: Moves, wanted: float) -> tuple[float, float]:
    """What a step is multiplied by to have this KL, and the KL that it then has."""
    scale, power = 1.0, 2.0
    last: tuple[float, float] | None = None
    for _ in range(12):
        with moved_by(one.parameters, scaled(moves, scale)):
            found = kl.value()
        if abs(found / wanted - 1) < TOLERANCE:
            return scale, found
        if last is not None and found != last[1]:
            power = math.log(found / last[1]) / math.log(scale / last[0])
        last = (scale, found)
        scale *= (wanted / found) ** (1 / min(max(power, 1.0), 4.0))
    return scale, found


def scaled(moves: Moves, scale: float) -> Moves:
    """A step times a number."""
    return [None if part is None else part * scale for part in moves]


def slopes(tokens: Tokens, step: Step, outcome: str, where: Mapping[str, str]) -> Iterator[Row]:
    """What the effects say about each regressor, in units of the outcome.

    `alone` is Σ z_t·E_t over the tokens of a side, z the regressor with mean 0 and standard deviation 1 over their mass: the change
    by weights 1 + z_t. `joint` is the coefficient of z among `JOINT` in the regression of E_t/m_t, weighted by the mass m_t, times
    the mass, so that it is what `alone` is where the regressors do not depend on each other.
    """
    for kind, effect in (
        ("equal KL", step.at_equal_kl(outcome)),
        ("as it is", step.effects[outcome]),
    ):
        for side in SIDES:
            chosen = tokens.side(side)
            mass = tokens.mass[chosen]
            if len(mass) < 2 * len(REGRESSORS):
                continue
            share = mass / mass.sum()
            columns = []
            for name in REGRESSORS:
                x = tokens.values[name][chosen]
                x = x - (share * x).sum()
                columns.append(x / (share * x * x).sum().sqrt().clamp(min=1e-12))
            z, e = torch.stack(columns, 1), effect[chosen]
            alone = z.T @ e
            kept = [REGRESSORS.index(name) for name in JOINT]
            gram = z[:, kept].T @ (share[:, None] * z[:, kept])
            joint = torch.full_like(alone, math.nan)
            joint[kept] = torch.linalg.lstsq(gram, alone[kept, None]).solution[:, 0]
            names = {"outcome": outcome, "kind": kind, "side": side, **where}
            for at, name in enumerate(REGRESSORS):
                yield {
                    **names,
                    "regressor": name,
                    "alone": float(alone[at]),
                    "joint": float(joint[at]),
                }


def bins(tokens: Tokens, step: Step, outcome: str, where: Mapping[str, str]) -> Iterator[Row]:
    """Sums of the effects at equal KL over classes of π with equal mass."""
    order = tokens.values["unlikely"].argsort(descending=True)
    share = tokens.mass[order].cumsum(0) / tokens.mass.sum()
    place = (share * BINS - 1e-9).floor().clamp(0, BINS - 1).long()
    effect = step.at_equal_kl(outcome)[order]
    for side in SIDES:
        chosen = tokens.side(side)[order]
        sums = torch.zeros(BINS, dtype=torch.float64).index_add(0, place[chosen], effect[chosen])
        masses = torch.zeros(BINS, dtype=torch.float64).index_add(
            0, place[chosen], (tokens.mass[order] / tokens.mass.sum())[chosen]
        )
        for at in range(BINS):
            yield {
                **where,
                "outcome": outcome,
                "side": side,
                "bin": at,
                "effect": float(sums[at]),
                "mass": float(masses[at]),
            }


def weightings(
    one: UpdateEffects,
    tokens: Tokens,
    steps: Mapping[str, Step],
    outcomes: Mapping[str, Prepared],
    weights: Mapping[str, Tensor],
) -> Iterator[Row]:
    """Each weighting's change of outcomes: predicted by the effects, and measured with the update made again, at equal KL.

    `weights` are (M,), divided here by their mean over the mass.
    """
    for name, given in weights.items():
        weight = tokens.mean_one(given)
        coef = torch.zeros_like(one.coef)
        coef[tokens.live] = (tokens.coef * weight).to(coef)
        gradient = _gradient(one.model, one.structure, one.rows, coef, one.temperature)
        for label, step in steps.items():
            moves = ComingStep(step.coming.optimizer, one.parameters, gradient).steps()
            scale, kl = scaled_to(one, outcomes["kl"], moves, step.after["kl"])
            with moved_by(one.parameters, scaled(moves, scale)):
                found = {key: outcome.value() for key, outcome in outcomes.items() if key != "kl"}
            turned = inner(moves, step.moves) / math.sqrt(
                inner(moves, moves) * inner(step.moves, step.moves)
            )
            common = {
                "optimizer": label,
                "weighting": name,
                "spread": tokens.spread(weight),
                "angle": math.degrees(math.acos(min(1.0, max(-1.0, turned)))),
                "scale": scale,
                "kl": kl,
            }
            for key, value in found.items():
                effect = (weight - 1) * step.at_equal_kl(key)
                parts = {
                    f"predicted {side}": float(effect[tokens.side(side)].sum())
                    for side in ("right", "wrong")
                }
                yield {
                    **common,
                    "outcome": key,
                    "plain": step.after[key],
                    "predicted": float(effect.sum()),
                    "measured": value - step.after[key],
                    **parts,
                }
