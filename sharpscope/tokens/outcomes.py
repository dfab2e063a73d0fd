"""Outcomes of an update: numbers that depend on the weights after it, with their gradients in the weights.

What an outcome compares with (the policy before the update, a reference, anchors of importance weights) is taken at the weights
before the update. Means are over tokens of fixed rows, sums over the vocabulary are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from sharpscope.errors import UserError, nearest
from sharpscope.policy import Head, check_head, output_head
from sharpscope.policy.directions import inner
from sharpscope.policy.guard import attention_implementation, moved_by
from sharpscope.policy.token_stats import flat_entropy, flat_kl, flat_logp
from sharpscope.tokens.rows import Rows
from sharpscope.tokens.structure import FORWARD, Structure, hidden_states, read_before

Kind = Literal["kl", "entropy", "heldout", "sharpness", "gradient_norm", "kl_base"]
KINDS: tuple[str, ...] = get_args(Kind)
Function = Callable[[nn.Module], Tensor]
"""A function of the user's own: a model to a scalar with its graph."""
ROUNDING = 8.0
"""Rounding of a token's value in units of the last place."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """A number that an update changes.

    - `kl`: KL(π‖π′) of the policy before and after the update, mean over the tokens [nats].
    - `entropy`: mean over the tokens [nats].
    - `heldout`: −mean log π of the tokens [nats], or with `reward` R the expected failure mean_i[1 − R_i·exp(Σ_t log r_it)] of rows that
      the policy before the update has drawn, r_it = π′/π.
    - `sharpness`: rise L(θ + ρ·∇L/‖∇L‖) − L(θ) of that loss (SAM, arXiv 2010.01412) at the radius ρ.
    - `gradient_norm`: ‖∇L‖ of that loss.
    - `kl_base`: KL(π′‖π_ref) to a reference, mean over the tokens [nats].

    Attributes:
        kind: one of them.
        input_ids: (N, S) tokens; None for those of the update.
        mask: (N, S), 1 on the tokens that count.
        attention_mask: (N, S), 0 on padding.
        reward: (N,) in [0, 1], for the expected failure.
        radius: ρ, in the norm of all trainable parameters.
        turn: whether the direction ∇L/‖∇L‖ of `sharpness` turns with the weights; without it a Hessian product less is made.
        reference: the policy π_ref, of the same vocabulary; a model with adapters stands for itself without them.

    Examples:
        >>> from sharpscope import Outcome
        >>> flat = Outcome(kind="sharpness", radius=0.1)  # of the update's own tokens
        >>> flat.kind, flat.radius, flat.turn
        ('sharpness', 0.1, True)
    """

    kind: Kind
    input_ids: Tensor | None = None
    mask: Tensor | None = None
    attention_mask: Tensor | None = None
    reward: Tensor | None = None
    radius: float = 0.05
    turn: bool = True
    reference: nn.Module | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"outcome, '{self.kind}': unknown{nearest(str(self.kind), KINDS)}")
        if (self.input_ids is None) != (self.mask is None):
            raise UserError(
                "outcome, input_ids and mask: give both, or neither for the update's rows"
            )
        if self.kind == "heldout" and self.input_ids is None and self.reward is None:
            raise UserError(
                "outcome, heldout: needs input_ids and mask of stored solutions, or a reward; use Outcome(kind='heldout', …)"
            )
        if self.kind == "kl_base" and self.reference is None:
            raise UserError(
                "outcome, kl_base: needs a reference; use Outcome(kind='kl_base', reference=…)"
            )
        if not self.radius > 0:
            raise UserError(f"outcome, radius {self.radius}: must be positive")
        reward = self.reward
        if reward is not None and not bool(((reward >= 0) & (reward <= 1)).all()):
            raise UserError("outcome, reward: must be in [0, 1], the success of each row")


@dataclass(frozen=True)
class Pass:
    """A pass over a chunk of rows."""

    states: Tensor  # (M, d), those that predict the chosen tokens
    chunk: Rows
    number: int
    twice: bool = False  # whether it is to be differentiated twice


Term = Callable[[Pass], Tensor]
"""The part of a mean that a chunk of rows has."""


@dataclass(frozen=True)
class FixedPolicy:
    """What KL with a policy needs of it: states (M, d) for each chunk of rows, and its output layer."""

    states: list[Tensor]
    head: Head


@dataclass(frozen=True)
class TokenMean:
    """A sum over chunks of rows of a function of the states that predict the chosen tokens."""

    model: nn.Module
    structure: Structure
    rows: Rows
    term: Term
    constant: float = 0.0

    def chunks(self) -> Iterator[tuple[int, Rows]]:
        """The chunks of the rows."""
        yield from enumerate(self.rows.chunks(share=self.structure.shares))

    def run(self, number: int, chunk: Rows, *, twice: bool = False) -> Pass:
        """A pass over a chunk."""
        return Pass(chosen_states(self.model, self.structure, chunk), chunk, number, twice)

    @torch.no_grad()
    def value(self) -> float:
        """The value at the present weights."""
        return self.constant + sum(
            float(self.term(self.run(n, chunk))) for n, chunk in self.chunks()
        )

    def gradient(self) -> tuple[float, list[Tensor]]:
        """The value and its gradient at the present weights."""
        (found,) = gradients([self])
        return found

    def curvature(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """The Hessian's product with a vector, by a second reverse pass."""
        parameters = list(self.structure.named.values())
        total = [torch.zeros_like(p) for p in parameters]
        attention = "math" if self.structure.own_attention else FORWARD
        for number, chunk in self.chunks():
            with torch.enable_grad(), attention_implementation(self.model, attention):
                part = self.term(self.run(number, chunk, twice=True))
                first = torch.autograd.grad(part, parameters, create_graph=True, allow_unused=True)
                along = sum(
                    (g * v).sum() for g, v in zip(first, vector, strict=True) if g is not None
                )
            if isinstance(along, Tensor) and along.requires_grad:
                _add(total, torch.autograd.grad(along, parameters, allow_unused=True))
        return total


def chosen_states(model: nn.Module, structure: Structure, chunk: Rows) -> Tensor:
    """States (M, d) that predict the chosen tokens of a chunk."""
    hidden = hidden_states(model, chunk.ids, read_before(model, chunk.before, len(chunk.ids)))
    return hidden[chunk.predicts].to(structure.dtype)


def _add(total: list[Tensor], parts: Sequence[Tensor | None]) -> None:
    for target, part in zip(total, parts, strict=True):
        if part is not None:
            target.add_(part)


def gradients(means: Sequence[TokenMean]) -> list[tuple[float, list[Tensor]]]:
    """Values and gradients of means over the same rows, which share the forward passes."""
    first = means[0]
    parameters = list(first.structure.named.values())
    totals = [[torch.zeros_like(p) for p in parameters] for _ in means]
    values = [mean.constant for mean in means]
    for number, chunk in first.chunks():
        with torch.enable_grad():
            run = first.run(number, chunk)
            parts = [mean.term(run) for mean in means]
        for at, part in enumerate(parts):
            values[at] += float(part.detach())
            if part.requires_grad:
                again = at + 1 < len(parts)
                found = torch.autograd.grad(part, parameters, retain_graph=again, allow_unused=True)
                _add(totals[at], found)
    return list(zip(values, totals, strict=True))


class Prepared:
    """An outcome whose fixed parts are taken at the present weights, those before the update.

    Attributes:
        name: of the outcome.
        mean: what it is, or what its loss is, as a mean over tokens; None for a function of the user's own.
    """

    def __init__(
        self,
        name: str,
        outcome: Outcome | Function,
        model: nn.Module,
        structure: Structure,
        rows: Rows,
        temperature: float,
    ) -> None:
        self.name = name
        self.outcome = outcome
        self.model = model
        self.parameters = list(structure.named.values())
        self.mean: TokenMean | None = None
        if isinstance(outcome, Outcome):
            term, constant = _term(outcome, model, structure, rows, temperature)
            self.mean = TokenMean(model, structure, rows, term, constant)

    @property
    def is_plain(self) -> bool:
        """Whether it is itself a mean over tokens, so that it shares a pass with others of the same rows."""
        return isinstance(self.outcome, Outcome) and self.outcome.kind not in (
            "sharpness",
            "gradient_norm",
        )

    @property
    def precision(self) -> float:
        """The resolution of its values, relative to the larger of itself and 1; errors of tokens average out."""
        tokens = 1 if self.mean is None else max(int(self.mean.rows.chosen.sum()), 1)
        return ROUNDING * torch.finfo(self.parameters[0].dtype).eps / math.sqrt(tokens)

    def value(self) -> float:
        """The outcome at the present weights."""
        if self.mean is None:
            with torch.no_grad():
                return float(self._own())
        if self.is_plain:
            return self.mean.value()
        loss, gradient = self.mean.gradient()
        size = math.sqrt(inner(gradient, gradient))
        if self._kind == "gradient_norm" or size == 0.0:
            return size
        with self._at_radius(gradient, size):
            return self.mean.value() - loss

    def gradient(self) -> tuple[float, list[Tensor]]:
        """The outcome and its gradient at the present weights."""
        if self.mean is None:
            with torch.enable_grad():
                value = self._own()
                if not value.requires_grad:
                    raise UserError(
                        f"outcome, {self.name}: does not depend on the weights; does it run under no_grad or detach?"
                    )
                found = torch.autograd.grad(
                    value,
                    self.parameters,
                    allow_unused=True,
                    materialize_grads=True,
                )
            return float(value.detach()), list(found)
        if self.is_plain:
            return self.mean.gradient()
        loss, gradient = self.mean.gradient()
        size = math.sqrt(inner(gradient, gradient))
        if size == 0.0:
            return 0.0, [torch.zeros_like(p) for p in self.parameters]
        unit = [part / size for part in gradient]
        if self._kind == "gradient_norm":
            return size, self.mean.curvature(unit)
        assert isinstance(self.outcome, Outcome)
        with self._at_radius(gradient, size):
            risen, above = self.mean.gradient()
        q = [high - low for high, low in zip(above, gradient, strict=True)]
        if self.outcome.turn:
            # d(ρĝ) = ρ/‖g‖·(I − ĝĝᵀ)·H dθ
            along = inner(above, unit)
            across = [high - along * one for high, one in zip(above, unit, strict=True)]
            turned = self.mean.curvature(across)
            scale = self.outcome.radius / size
            q = [part + scale * more for part, more in zip(q, turned, strict=True)]
        return risen - loss, q

    @property
    def _kind(self) -> str:
        return self.outcome.kind if isinstance(self.outcome, Outcome) else "function"

    @contextmanager
    def _at_radius(self, gradient: Sequence[Tensor], size: float) -> Iterator[None]:
        """Within it the weights are θ + ρ·∇L/‖∇L‖."""
        assert isinstance(self.outcome, Outcome)
        with moved_by(self.parameters, [g * (self.outcome.radius / size) for g in gradient]):
            yield

    def _own(self) -> Tensor:
        """The value of a function of the user's own."""
        assert not isinstance(self.outcome, Outcome)
        value = self.outcome(self.model)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UserError(
                f"outcome, {self.name}: must return a scalar tensor, here {type(value).__name__}"
            )
        return value.reshape(())


def _term(
    outcome: Outcome,
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
) -> tuple[Term, float]:
    """The chunk's part of an outcome's mean, or of that of its loss, and a constant of the whole."""
    tokens = int(rows.chosen.sum())
    if tokens == 0:
        raise UserError(f"outcome, {outcome.kind}: no token of the mask counts")
    pieces = list(rows.chunks(share=structure.shares))
    head = structure.head

    def logp(part: Pass) -> Tensor:
        """Log-probabilities of the pass's tokens."""
        # the chunks that a long pass is computed in have no second derivative
        keep = True if part.twice else None
        given = (part.states, head, part.chunk.targets, temperature)
        return flat_logp(*given, stats=False, keep_logits=keep)[0]

    def entropy(part: Pass) -> Tensor:
        """The pass's part of the mean entropy."""
        return flat_entropy(part.states, head, part.chunk.targets, temperature).sum() / tokens

    def nll(part: Pass) -> Tensor:
        """The pass's part of the mean negative log-likelihood."""
        return -logp(part).sum() / tokens

    if outcome.kind == "entropy":
        return entropy, 0.0
    if outcome.kind in ("kl", "kl_base"):
        fixed = (
            FixedPolicy(_states(model, structure, pieces), _copy(head))
            if outcome.kind == "kl"
            else _reference(outcome.reference, model, structure, pieces)
        )

        def kl(part: Pass) -> Tensor:
            """The part of the mean KL that a chunk of rows has."""
            other = (fixed.states[part.number], fixed.head)
            if outcome.kind == "kl":
                return flat_kl(*other, part.states, head, temperature=temperature).sum() / tokens
            return flat_kl(part.states, head, *other, temperature=temperature).sum() / tokens

        return kl, 0.0
    if outcome.reward is None:
        return nll, 0.0
    reward = outcome.reward.to(rows.ids.device, structure.dtype)
    if reward.shape != (rows.shape[0],):
        raise UserError(
            f"outcome, reward of shape {tuple(reward.shape)}: must be ({rows.shape[0]},), one for each row"
        )
    anchors: list[Tensor] = []

    def failure(part: Pass) -> Tensor:
        """The pass's part of the expected failure, importance-weighted."""
        ratio = logp(part) - anchors[part.number]
        row = part.chunk.chosen.nonzero()[:, 0]
        sums = ratio.new_zeros(len(part.chunk.ids)).index_add(0, row, ratio)
        return (1 - reward[part.chunk.source] * sums.exp()).sum() / len(reward)

    with torch.no_grad():
        for number, states in enumerate(_states(model, structure, pieces)):
            anchors.append(logp(Pass(states, pieces[number], number)))
    # rows without a token that counts keep their failure
    empty = ~rows.chosen.any(1)
    return failure, float((1 - reward[rows.source[empty]]).sum()) / rows.shape[0]


@torch.no_grad()
def _states(model: nn.Module, structure: Structure, pieces: Sequence[Rows]) -> list[Tensor]:
    return [chosen_states(model, structure, chunk) for chunk in pieces]


def _copy(head: Head) -> Head:
    """The output layer with weights of its own."""
    bias = None if head.bias is None else head.bias.detach().clone()
    return Head(head.weight.detach().clone(), bias, head.soft_cap, head.scale)


@torch.no_grad()
def _reference(
    reference: nn.Module | None,
    model: nn.Module,
    structure: Structure,
    pieces: Sequence[Rows],
) -> FixedPolicy:
    """A reference policy."""
    assert reference is not None
    disabled = getattr(reference, "disable_adapter", None)
    itself = reference is model
    if itself and disabled is None:
        raise UserError(
            "outcome, reference: is the policy itself, which has no adapters to leave out"
        )
    with disabled() if itself and disabled is not None else nullcontext():
        head = output_head(reference)
        check_head(reference, head)
        return FixedPolicy(_states(reference, structure, pieces), _copy(head))
