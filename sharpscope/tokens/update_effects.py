"""Effects: what each token of an update does to an outcome, through clipping and the optimizer.

With the gradient g = Σ_t c_t ∇log π_t, the step Δ(g) and an outcome Q of the weights, the effect of token t is the first-order change of
Q(θ + Δ) by its part of the gradient, with the token less without it:

    E_t(Q) = c_t·⟨∇log π_t, Jᵀq⟩,    J = ∂Δ/∂g,    q = ∇Q(θ + Δ).

Effects are of one step: what a token does to later steps through the optimizer's moments is not in them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sharpscope.config.run import Check
from sharpscope.errors import CheckError, UserError
from sharpscope.policy.directions import inner
from sharpscope.policy.guard import guarded, moved_by, working_precision
from sharpscope.policy.sharding import is_sharded
from sharpscope.tokens.attribution import _counting, _gradient
from sharpscope.tokens.forward_mode import logp_derivative
from sharpscope.tokens.optimizer_steps import Clip, ComingStep, step_of_copy
from sharpscope.tokens.outcomes import Function, Outcome, Prepared, gradients
from sharpscope.tokens.rows import Rows, make_rows
from sharpscope.tokens.self_check import check_derivative
from sharpscope.tokens.structure import Structure, structure_of

Outcomes = str | Outcome | Function | Sequence[str | Outcome] | Mapping[str, Outcome | Function]
LEFT_OUT = 2
"""Tokens that the self-check leaves out."""
LIMIT = 0.25
"""Largest relative difference of predicted and measured change in the self-check.

It was at most 0.03 in 72 checks of updates of `math`, and 0.11 at the second step of AdamW of a toy, where denominators still change much.
"""
PARTS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Multiples of the tokens that the self-check leaves out and adds; the least one is taken whose change is above rounding."""
ABOVE = 30.0
"""Changes that are compared, in units of the outcome's rounding."""


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Effects of the tokens of an update on outcomes, by the outcomes' names.

    Attributes:
        values: (N, S) E_t in the outcome's unit, 0 where the mask or the coefficient is 0.
        after: Q(θ + Δ).
        total: ⟨g, Jᵀq⟩, what the whole gradient does; the sum of `values`, if the gradient is Σ c_t ∇log π_t.
        checked: relative error that the self-check found; NaN where the effects are too small to be seen by leaving tokens out.
        withheld: why an outcome has no values.
    """

    values: dict[str, Tensor]
    after: dict[str, float]
    total: dict[str, float]
    checked: dict[str, float]
    withheld: dict[str, str]

    def __getitem__(self, name: str) -> Tensor:
        """The effects on an outcome (N, S); a CheckError if they are withheld."""
        if name in self.withheld:
            raise CheckError(self.withheld[name], name, self.checked.get(name, math.nan), LIMIT)
        return self.values[name]


def effects(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    coef: Tensor,
    optimizer: torch.optim.Optimizer,
    outcome: Outcomes,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    *,
    max_grad_norm: float | Sequence[Clip] | None = None,
    gradient: Sequence[Tensor | None] | None = None,
    check: Check = "first",
) -> Effects:
    """What each token of the coming update does to outcomes of it, to first order, through clipping and the optimizer.

    E_t(Q) = c_t⟨∇log π_t, Jᵀ∇Q(θ + Δ)⟩ with the step Δ(g) of the optimizer and its Jacobian J. If Q rises by the token, E_t > 0.

    Args:
        model: see `score_norms`; not in shards. Half-precision weights are read as float32, and the step is not rounded to them.
        input_ids: (N, S) tokens of the update, of all its micro-batches.
        mask: (N, S), 1 on the tokens of the update; outcomes without rows of their own are means over them.
        coef: (N, S) c_t = ∂L/∂log π_t of the update's loss at the present weights.
        optimizer: about to make the step, over the trainable parameters: AdamW, Adam, SGD or another elementwise one of
            `torch.optim`. Weights and state stay as they are.
        outcome: `kl`, `entropy`, `sharpness`, `gradient_norm` of the update's rows, an `Outcome`, a function from the model to a scalar, or
            several of them: a sequence, or a mapping from names. They share the passes that can be shared.
        attention_mask: (N, S), 0 on padding; None for no padding.
        temperature: softmax temperature of all log-probabilities.
        max_grad_norm: the limit of clipping by the global norm, or `Clip`s of groups, in their order.
        gradient: ∇L of the whole loss, not clipped, where it has terms beside the tokens' log-probabilities; None: Σ c_t ∇log π_t.
        check: when to leave the two leading tokens out, make the update again and compare: the `first` time for this model, `always` or
            `off`. Effects that do not predict the change are withheld.

    Returns:
        `Effects`, by the outcomes' names.

    Raises:
        UserError: arguments that do not fit together, a model in shards, an optimizer that cannot be differentiated.
        CheckError: derivatives of log-probabilities differ from autograd's on this model.

    Examples:
        >>> import torch
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> import sharpscope
        >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=16, num_key_value_heads=2, **sizes)).eval()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> input_ids = torch.tensor([[3, 1, 4, 1, 5]])
        >>> mask = torch.tensor([[0, 0, 1, 1, 1]])  # the completion
        >>> coef = -1.0 * mask  # L = -Σ log π
        >>> found = sharpscope.effects(model, input_ids, mask, coef, optimizer, ["kl", "entropy"])
        >>> found["kl"].shape, bool(found["kl"].sum() > 0)
        (torch.Size([1, 5]), True)
    """
    if is_sharded(model):
        raise UserError(
            "model: is in shards (FSDP2), whose effects cannot be computed; gather a copy"
        )
    if coef.shape != input_ids.shape:
        raise UserError(
            f"coef, shape {tuple(coef.shape)}: must be that of input_ids, {tuple(input_ids.shape)}"
        )
    clips = [Clip(limit=max_grad_norm)] if isinstance(max_grad_norm, int | float) else max_grad_norm
    named = _named(outcome)
    with guarded(model), working_precision([*model.parameters(), *model.buffers()]):
        update = UpdateEffects(
            model,
            make_rows(model, input_ids, mask, attention_mask, temperature),
            coef,
            optimizer,
            clips or (),
            temperature,
            gradient=gradient,
        )
        check_derivative(model, update.structure, update.counted, temperature, check)
        prepared = [update.prepare(name, what) for name, what in named.items()]
        pulled = dict(zip(named, update.outcome_gradients(prepared), strict=True))
        found = Effects(values={}, after={}, total={}, checked={}, withheld={})
        for one in prepared:
            found.after[one.name], q = pulled.pop(one.name)
            u = update.step.pull(q)
            values = update.along(u)
            found.total[one.name] = inner(update.gradient, u)
            update.judge(one, values, check, found)
        return found


def _named(outcome: Outcomes) -> dict[str, Outcome | Function]:
    """Outcomes by their names."""
    if isinstance(outcome, Mapping):
        given = dict(outcome)
    elif isinstance(outcome, str | Outcome) or callable(outcome):
        given = _named([outcome])  # type: ignore[list-item]
    else:
        given = {}
        for one in outcome:
            name = one if isinstance(one, str) else getattr(one, "kind", None) or "function"
            if name in given:
                raise UserError(
                    f"outcome, {name}: is there twice; give a mapping from names to outcomes"
                )
            given[name] = Outcome(kind=one) if isinstance(one, str) else one  # type: ignore[arg-type]
    if not given:
        raise UserError("outcome, none: give at least one")
    return given


class UpdateEffects:
    """One coming update of a guarded model: its gradient and step, gradients of outcomes after it, derivatives along a direction.

    Attributes:
        gradient: g, a tensor or None for each trainable parameter in the model's order, not clipped.
        step: Δ(g) and its transposed Jacobian.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Rows,
        coef: Tensor,
        optimizer: torch.optim.Optimizer,
        clips: Sequence[Clip],
        temperature: float,
        *,
        gradient: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.model = model
        self.rows = rows
        self.temperature = temperature
        self.structure: Structure = structure_of(model)
        self.parameters = list(self.structure.named.values())
        self.counted, self.coef = _counting(rows, coef), coef.to(rows.ids.device)
        self._kept: list[list[Tensor]] = []
        if gradient is None:
            gradient = _gradient(model, self.structure, rows, coef, temperature, self._kept)
        self.gradient: list[Tensor | None] = list(gradient)
        if len(self.gradient) != len(self.parameters):
            raise UserError(
                f"gradient, {len(self.gradient)} tensors: must be like the {len(self.parameters)} trainable parameters in the model's order"
            )
        self.step = ComingStep(optimizer, self.parameters, self.gradient, clips)

    def prepare(self, name: str, outcome: Outcome | Function) -> Prepared:
        """An outcome at the present weights."""
        rows = self.rows
        if isinstance(outcome, Outcome) and outcome.input_ids is not None:
            assert outcome.mask is not None
            given = (outcome.input_ids, outcome.mask, outcome.attention_mask)
            rows = make_rows(self.model, *given, self.temperature)
        return Prepared(name, outcome, self.model, self.structure, rows, self.temperature)

    def outcome_gradients(
        self,
        prepared: Sequence[Prepared],
        *,
        after: bool = True,
    ) -> list[tuple[float, list[Tensor]]]:
        """Q and q of each outcome, after the step or before it; means over the same rows share the forward passes."""
        found: dict[str, tuple[float, list[Tensor]]] = {}
        steps: Sequence[Tensor | None] = (
            self.step.steps() if after else [None] * len(self.parameters)
        )
        with moved_by(self.parameters, steps):
            together: dict[int, list[Prepared]] = {}
            for one in prepared:
                if one.is_plain and one.mean is not None:
                    together.setdefault(id(one.mean.rows), []).append(one)
                else:
                    found[one.name] = one.gradient()
            for group in together.values():
                means = [one.mean for one in group if one.mean is not None]
                names = [one.name for one in group]
                found |= dict(zip(names, gradients(means), strict=True))
        return [found[one.name] for one in prepared]

    def along(self, direction: Sequence[Tensor]) -> Tensor:
        """c_t⟨∇log π_t, direction⟩ (N, S)."""
        values = logp_derivative(
            self.model,
            self.structure,
            self.counted,
            direction,
            self.temperature,
            self._kept,
        )
        return self.coef.to(values) * values

    def value_without(self, outcome: Prepared, part: Sequence[Tensor], scale: float) -> float:
        """The outcome after the update made again, by the optimizer's own step, with g − scale·part."""
        less = [
            None if g is None else g - scale * p for g, p in zip(self.gradient, part, strict=True)
        ]
        clipped = ComingStep(self.step.optimizer, self.parameters, less, self.step.clips).stages[-1]
        with moved_by(self.parameters, step_of_copy(self.step.optimizer, self.parameters, clipped)):
            return outcome.value()

    def judge(
        self,
        outcome: Prepared,
        values: Tensor,
        check: Check,
        found: Effects,
    ) -> None:
        """Keep an outcome's effects, unless they do not predict what leaving out two tokens does."""
        name = outcome.name
        key = f"effect on {outcome.name}"
        if check == "off" or self.step.is_first:
            found.values[name] = values
            return
        error = self.structure.checked.get(key) if check == "first" else None
        if error is None:
            error = self._error(outcome, values)
        found.checked[name] = error
        if error > LIMIT:
            found.withheld[name] = (
                f"effect on {name}: the change when two tokens are left out and the update is made again differs from the predicted one "
                f"by {error:.0%} of it (limit {LIMIT:.0%})"
            )
            return
        found.values[name] = values
        if not math.isnan(error):
            self.structure.checked[key] = error

    def _error(self, outcome: Prepared, values: Tensor) -> float:
        """The relative difference of predicted and measured change if the two leading tokens are left out."""
        flat = values.flatten().double()
        # of one sign, so that they do not cancel
        sign = flat[flat.abs().argmax()].sign()
        chosen = torch.zeros_like(values).flatten()
        chosen[(flat * sign).topk(min(LEFT_OUT, len(flat))).indices] = 1.0
        predicted = float((flat * chosen).sum())
        part = _gradient(
            self.model,
            self.structure,
            self.rows,
            self.coef * chosen.view_as(values).to(self.coef),
            self.temperature,
        )
        noise = outcome.precision * max(1.0, abs(outcome.value()))
        for scale in PARTS:
            if 2 * scale * abs(predicted) > ABOVE * noise:
                less, more = (self.value_without(outcome, part, s * scale) for s in (1, -1))
                return abs((more - less) / (2 * scale * predicted) - 1)
        return math.nan
