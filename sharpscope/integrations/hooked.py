"""The recorder of any trainer whose loss is a function of tokens' log-probabilities, which it need not know.

A hook on the log-probabilities or the logits that the model gives takes the coefficients c = ∂L/∂log π. The logits z of a place have
∂L/∂z_v = −c·π_v/T for every token v but the one that follows, which gives c and tells whether the loss is such a function. Rows and
positions are those of the calls of the model, also where one row has several sequences (packing, padding-free). A step is one update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from sharpscope.errors import UserError
from sharpscope.integrations.trainer import Trainer
from sharpscope.integrations.trainers import (
    IGNORED,
    Loss,
    TrainerOptions,
    TrainerRecorder,
    rows_of_update,
)
from sharpscope.recording.capture import sequences_of
from sharpscope.recording.schedule import StepCost
from sharpscope.rules.table import OF_ROLLOUTS

Inputs = Sequence[Tensor]
CHUNK = 2**24
"""Logits that are read at once."""
UNEXPLAINED = {torch.float32: 1e-3, torch.float64: 1e-6}
"""By the logits' type: largest part of their gradient's norm that the tokens' coefficients may leave over; of others, `COARSE`."""
COARSE = 0.05
_AGAIN = ("SFTTrainer", "DPOTrainer")


@dataclass
class ModelCall:
    """A forward pass of the model in the loss: n rows of L tokens."""

    ids: Tensor  # (n, L)
    present: Tensor  # (n, L), 0 on padding
    positions: Tensor | None  # (n, L) where the trainer gives them
    labels: Tensor | None = None  # (n, L) of log-probabilities, `IGNORED` where they lead nowhere
    logp: Tensor | None = (
        None  # (n, L) ln π of each token, given the ones before it; 0 of the first
    )
    coef: Tensor | None = None  # (n, L) ∂L/∂ln π, once the gradient has come


class HookRecorder(TrainerRecorder):
    """What `record` returns for a trainer whose loss it does not know."""

    wrapped: ClassVar[Mapping[str, str]] = {**TrainerRecorder.wrapped, "compute_loss": "_loss"}
    given = frozenset({"loss", "timing"})
    rules: Mapping[str, object] = {rule: {"action": "off"} for rule in OF_ROLLOUTS}

    def __init__(
        self, trainer: Trainer, out: str | Path, **options: Unpack[TrainerOptions]
    ) -> None:
        self.cost = StepCost(rows=rows_of_update(trainer.args))
        self._calls: list[ModelCall] = []
        # TRL's other trainers generate, or keep a state, in it
        again = any(kind.__name__ in _AGAIN for kind in type(trainer).__mro__) or not any(
            kind.__module__.startswith("trl.") for kind in type(trainer).__mro__
        )
        notes = [
            "the loss is not known: coefficients are from hooks; advantages, ratios and groups are null",
        ]
        if not again:
            notes.append("critical sharpness is not measured: it would need the loss again")
            options["critical"] = 0
        options["temperature"] = float(getattr(trainer, "temperature", 1.0))
        label = type(trainer).__name__.removesuffix("Trainer").lower() or "own"
        super().__init__(trainer, out, label, notes, **options)

    def _loss(
        self, model: nn.Module, inputs: dict[str, Tensor], *args: object, **kwargs: object
    ) -> Loss:
        compute = self._original["compute_loss"]
        if not self.recording or not self.model.training or not torch.is_grad_enabled():
            return compute(model, inputs, *args, **kwargs)
        given = dict(inputs)  # some trainers take entries out
        with self._watched():
            loss = compute(model, inputs, *args, **kwargs)
        self._keep_loss(loss, lambda: compute(self.model, dict(given), *args, **kwargs))
        return loss

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Context in which the model's calls are noted, and what they give is hooked."""

        def see(_: object, args: Inputs, given: Mapping[str, Tensor], output: object) -> None:
            """Note a call that the loss differentiates."""
            self.safely(lambda: self._see(args, given, output))

        handle = self.model.register_forward_hook(see, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _see(self, args: Inputs, given: Mapping[str, Tensor], output: object) -> None:
        logp = getattr(output, "log_probs", None)
        logits = getattr(output, "logits", None)
        values = logits if logp is None else logp
        if not isinstance(values, Tensor) or not values.requires_grad:
            return
        ids = given.get("input_ids", args[0] if args else None)
        if ids is None:
            raise UserError(
                "record: the model is called without input_ids, so its tokens are unknown"
            )
        present = given.get("attention_mask")
        positions = given.get("position_ids")
        if present is None or present.shape != ids.shape:
            present = torch.ones_like(ids)
        call = ModelCall(ids, present, positions, None if logp is None else given.get("labels"))
        self._calls.append(call)
        start = ids.shape[1] - values.shape[1]  # the first column that has a value

        def keep_logp(gradient: Tensor) -> None:
            """Take the coefficients of log-probabilities: column j is of token j + start."""
            if call.labels is not None:
                gradient = torch.where(call.labels[:, start:] == IGNORED, 0.0, gradient)
            call.logp, call.coef = _at_tokens(ids, values, start), _at_tokens(ids, gradient, start)

        def keep_logits(gradient: Tensor) -> None:
            """Take the coefficients of tokens from their logits: column j is of token j + start + 1."""
            found = explained_coefficients(
                values.detach()[:, :-1],
                gradient.detach()[:, :-1],
                ids[:, start + 1 :],
                self.temperature,
                type(self.trainer).__name__,
            )
            call.logp = _at_tokens(ids, found.logp, start + 1)
            call.coef = _at_tokens(ids, found.coef, start + 1)

        keep = keep_logits if logp is None else keep_logp
        values.register_hook(lambda gradient: self.safely(lambda: keep(gradient)))

    def _micro_step_done(self, loss: Tensor, started: float, before: float) -> None:
        """Add the micro-batch, whose backward pass is done, to the step."""
        calls, self._calls = self._calls, []
        if not any(call.coef is not None for call in calls):
            name = type(self.trainer).__name__
            raise UserError(
                f"record: the loss of {name} is no function of the log-probabilities or logits that the model returns"
            )
        for call in calls:
            if call.coef is not None:
                self._add(separated(call))
        super()._micro_step_done(loss, started, before)

    def _add(self, call: ModelCall) -> None:
        """Add the rows of a call to the step, with their coefficients; a token without one is in no loss."""
        assert call.coef is not None and call.logp is not None
        counted = (call.coef != 0) & call.present.bool()
        sequences = sequences_of(call.ids, call.present, counted, self.policy.tokenizer)
        rollouts = sequences.rollouts
        n = len(call.ids)
        made = self.open_batch(rollouts, torch.zeros(n, dtype=torch.float64))
        ours = made.tokens.stats.logp
        mask = rollouts.completion_mask.bool()
        theirs = sequences.gather(call.logp, 0)
        self.capture.gaps.append((theirs.to(ours) - ours).abs()[mask].cpu())
        keep = self.capture.use(made.serial, torch.arange(n))
        keep(sequences.gather(call.coef, 0))


@dataclass(frozen=True)
class TokenCoefficients:
    """What the gradient with respect to logits (n, K, V) says of the tokens that follow."""

    coef: Tensor  # (n, K) ∂L/∂ln π
    logp: Tensor  # (n, K) ln π
    unexplained: float  # part of the gradient's norm that no such coefficients explain
    heat: float  # temperature at which they would, from the two likeliest other tokens; NaN: not known


@torch.no_grad()
def token_coefficients(
    logits: Tensor, gradient: Tensor, targets: Tensor, temperature: float
) -> TokenCoefficients:
    """C = −T·⟨∂L/∂z, π⟩/⟨π, π⟩ over the tokens other than the target, in whose part nothing cancels.

    Args:
        logits: (n, K, V) z.
        gradient: (n, K, V) ∂L/∂z.
        targets: (n, K) the tokens y whose log-probabilities the loss is made of.
        temperature: T of ln π = log_softmax(z / T).
    """
    width = logits.shape[-1]
    z = logits.reshape(-1, width)
    g = gradient.reshape(-1, width)
    y = targets.reshape(-1)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    coef = torch.zeros(len(y), dtype=dtype)
    logp = torch.zeros(len(y), dtype=dtype)
    left = whole = 0.0
    heats = []
    for start in range(0, len(y), max(1, CHUNK // width)):
        rows = slice(start, start + max(1, CHUNK // width))
        pull = g[rows].to(dtype)
        given = z[rows].to(dtype)
        likely = (given / temperature).log_softmax(-1)
        logp[rows] = likely.gather(1, y[rows, None])[:, 0].cpu()
        others = likely.exp().scatter_(1, y[rows, None], 0.0)
        without = pull.scatter(1, y[rows, None], 0.0)
        size = torch.linalg.vecdot(others, others).clamp_min(torch.finfo(dtype).tiny)
        c = -temperature * torch.linalg.vecdot(without, others) / size
        rest = without + c[:, None] * others / temperature
        at = pull.gather(1, y[rows, None])[:, 0] - c * others.sum(1) / temperature
        left += float(rest.double().square().sum() + at.double().square().sum())
        whole += float(pull.double().square().sum())
        coef[rows] = c.cpu()
        top = others.topk(2).indices
        moved = without.gather(1, top)
        apart = given.gather(1, top)
        heats.append((apart[:, 0] - apart[:, 1]) / (moved[:, 0] / moved[:, 1]).log())
    heat = torch.cat(heats)
    heat = heat[heat.isfinite() & (heat > 0)]
    return TokenCoefficients(
        coef=coef.view(targets.shape),
        logp=logp.view(targets.shape),
        unexplained=math.sqrt(left / whole) if whole else 0.0,
        heat=float(heat.median()) if len(heat) else math.nan,
    )


def explained_coefficients(
    logits: Tensor, gradient: Tensor, targets: Tensor, temperature: float, name: str
) -> TokenCoefficients:
    """`token_coefficients` of a trainer by name.

    Raises:
        UserError: the loss is no function of the tokens' log-probabilities at this temperature.
    """
    found = token_coefficients(logits, gradient, targets, temperature)
    limit = UNEXPLAINED.get(logits.dtype, COARSE)
    if found.unexplained <= limit:
        return found
    if math.isfinite(found.heat):
        other = token_coefficients(logits, gradient, targets, found.heat)
        if other.unexplained <= limit:
            text = f"the logits at temperature {found.heat:.3g}, not {temperature:g}"
            raise UserError(
                f"record: {name}'s loss takes {text}; give the trainer an attribute temperature"
            )
    part = f"{found.unexplained:.0%} of the gradient with respect to its logits"
    raise UserError(
        f"record: {name}'s loss is no function of the log-probabilities of its tokens alone ({part} is of other tokens: "
        "distillation, an entropy bonus, label smoothing)"
    )


def _at_tokens(ids: Tensor, values: Tensor, start: int) -> Tensor:
    """(n, L) from values (n, W) of the tokens from column `start` on; 0 of the others."""
    whole = torch.zeros(ids.shape, dtype=values.dtype, device=ids.device)
    whole[:, start : start + values.shape[1]] = values.detach().to(ids.device)
    return whole


def separated(call: ModelCall) -> ModelCall:
    """The call with a row for each sequence: a row that has several begins a new one where its positions do."""
    if call.positions is None:
        return call
    positions = call.positions.expand_as(call.ids)
    begins = torch.ones_like(call.ids, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] <= positions[:, :-1]
    begins &= call.present.bool() | (torch.arange(call.ids.shape[1], device=begins.device) == 0)
    if int(begins.sum()) == len(call.ids):
        return call
    assert call.coef is not None and call.logp is not None
    parts: dict[str, list[Tensor]] = {"ids": [], "present": [], "logp": [], "coef": []}
    for row, starts in enumerate(begins):
        edges = [*starts.nonzero()[:, 0].tolist(), call.ids.shape[1]]
        for first, end in pairwise(edges):
            for name, of in parts.items():
                of.append(getattr(call, name)[row, first:end])
    joined = {
        name: torch.nn.utils.rnn.pad_sequence(of, batch_first=True) for name, of in parts.items()
    }
    return ModelCall(positions=None, **joined)
