"""One update of a step: its gradient in microbatches, what a method does to it, and the optimizer's step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.methods import Method, reference_method
from sharpscope.methods.loss import entropy_bonus, policy_loss, token_normalizer
from sharpscope.methods.plan import Plan, prepare
from sharpscope.policy import Rollouts, TokenStats
from sharpscope.policy.directions import noise_rotation, rotation
from sharpscope.policy.forward import Scored, shortest
from sharpscope.policy.guard import moved_by
from sharpscope.policy.token_stats import flat_entropy
from sharpscope.recording.capture import StepCapture
from sharpscope.recording.norms import Norms, gradient_norms, norms, total_norm, update_norms
from sharpscope.recording.step import (
    UpdateResult,
    UpdateRotation,
    step_tensors,
)
from sharpscope.tokens import coming_step
from sharpscope.tokens.optimizer_steps import batch_share
from sharpscope.training.rollouts import step_advantages

if TYPE_CHECKING:
    from sharpscope.training.learner import Learner

Gradient = list[Tensor | None]
"""`.grad` of the trainable parameters."""


BeforeOptimizer = Callable[[Callable[[], Tensor], float | None], None]
"""Sees a step's first update between clipping and the optimizer's step; changes nothing.

It gets a function for the loss at the present weights by prompt, (k,) with mean L, with π_old, advantages and token weights as they
are, which every process must call, and what clipping has multiplied the gradient by; None if a method has reshaped it.
"""

BROKEN = "an update made model weights that are not finite, and no later update can repair them"


@dataclass(frozen=True, kw_only=True)
class _Gradient:
    """The gradient of one update's loss, which is in `.grad`."""

    index: int
    rows: Tensor  # (n,)
    pass_index: int
    loss: float
    norms: Norms
    coef: Tensor  # (n, T) ∂L/∂log π
    summary: dict[str, float]  # of what its tokens do
    entropy: float | None  # mean over its tokens [nats]; None without a bonus

    @property
    def norm(self) -> float:
        """L2 norm over all parameters."""
        return self.norms.total

    @property
    def finite(self) -> bool:
        """Whether loss and norm are."""
        return math.isfinite(self.loss + self.norm)


@dataclass(frozen=True)
class Updates:
    """The updates of one step, which `capture` records."""

    learner: Learner
    rollouts: Rollouts
    advantage: Tensor  # (N,) or (N, T)
    progress: float
    method: Method
    plan: Plan
    capture: StepCapture
    rotations: bool = False
    before_optimizer: BeforeOptimizer | None = None
    # halves of reference gradients of all rows, by their objective
    references: dict[str, list[Gradient]] | None = None
    without: Tensor | None = None  # (N, T) bool, tokens whose coefficients are set to 0

    def gradient(self, index: int, rows: Tensor, pass_index: int) -> _Gradient:
        """Compute the gradient of update `index` and record what its tokens do."""
        loss, entropy = self._backward(rows, pass_index, record=True)
        self.capture.keep_first_use()
        tokens = self.capture.pending_tokens()
        used = int(tokens.used.sum())
        has_bonus = self.method.entropy is not None and used > 0
        return _Gradient(
            index=index,
            rows=rows,
            pass_index=pass_index,
            loss=loss,
            norms=gradient_norms(self.learner.parameters, self.learner.groups),
            coef=tokens.coef,
            summary=tokens.summary(),
            entropy=entropy / used if has_bonus else None,
        )

    @property
    def _entropy_coef(self) -> float:
        """Coefficient of the entropy bonus in the present update."""
        entropy = self.method.at(self.progress).entropy
        return 0.0 if entropy is None else float(entropy)  # type: ignore[arg-type]  # schedules are resolved

    def skip(self, gradient: _Gradient, norm: float) -> UpdateResult:
        """Leave the update out."""
        self.learner.optimizer.zero_grad(set_to_none=True)
        problem = "" if math.isfinite(norm) else "the gradient is not finite"
        problem = problem if math.isfinite(gradient.loss) else "the loss is not finite"
        nothing = Norms(0.0, dict.fromkeys(gradient.norms.layers, 0.0))
        return self._result(
            gradient,
            replace(gradient.norms, total=norm),
            nothing,
            0.0,
            skipped=True,
            problem=problem,
        )

    def _result(
        self,
        gradient: _Gradient,
        norms: Norms,
        moved: Norms,
        clip_factor: float,
        **rest: Any,
    ) -> UpdateResult:
        """An update with the norms of the gradient that the optimizer gets and of its step, which is recorded."""
        result = UpdateResult(
            loss=gradient.loss,
            grad_norm=norms.total,
            plain_norm=gradient.norm,
            update_norm=moved.total,
            clip_factor=clip_factor,
            lr=float(self.learner.optimizer.param_groups[0]["lr"]),
            summary=gradient.summary,
            entropy=gradient.entropy,
            layers=(norms.layers, moved.layers),
            **rest,
        )
        self.capture.record_update(result)
        return result

    def reshape(self, gradient: _Gradient) -> Norms:
        """Let the method's `Sharpness` replace the gradient in `.grad`; returns its norms."""
        spec = self.method.sharpness
        norm = gradient.norm
        parameters = self.learner.parameters
        if spec is None or not (math.isfinite(norm) and norm > 0):
            return gradient.norms
        first = [None if p.grad is None else p.grad.clone() for p in parameters]
        with moved_by(parameters, first, spec.ascent(norm)):
            self._backward(gradient.rows, gradient.pass_index)
        if spec.kind != "sam":
            for parameter, value in zip(parameters, first, strict=True):
                if value is not None and parameter.grad is not None:
                    parameter.grad.sub_(value).mul_(spec.share).add_(value)
        return gradient_norms(parameters, self.learner.groups)

    def apply(self, gradient: _Gradient) -> UpdateResult:
        """Let the method reshape the gradient, clip it, and make the optimizer's step."""
        learner = self.learner
        norms = self.reshape(gradient)
        norm = norms.total
        if not (math.isfinite(gradient.loss) and math.isfinite(norm)):
            return self.skip(gradient, norm)
        clip = learner.clipping(
            self.method,
            [p.grad for p in learner.parameters],
            norm,
            self.progress,
        )
        rotation = self.rotation(gradient.rows, norm) if self.rotations else None
        _scale_gradients(learner.parameters, clip.factors)
        learner.state.norms = clip.averages
        if self.before_optimizer is not None and gradient.index == 0:
            plain = (
                clip.share
                if self.method.sharpness is None and self.method.module_clip is None
                else None
            )
            self.before_optimizer(partial(self._loss, gradient.rows, gradient.pass_index), plain)
        adamw = isinstance(learner.optimizer, torch.optim.AdamW)
        coming = None if adamw else self._coming_norms()
        learner.optimizer.step()
        moved = update_norms(learner.optimizer, learner.groups) if coming is None else coming
        own = batch_share(learner.optimizer)
        learner.optimizer.zero_grad(set_to_none=True)
        broken = not math.isfinite(moved.total)
        end: dict[str, object] = {
            "skipped": False,
            "batch_share": own,
            "problem": BROKEN if broken else "",
            "broken": broken,
        }
        return self._result(gradient, norms, moved, clip.share, rotation=rotation, **end)

    @property
    def _stats(self) -> TokenStats:
        """(N, T) of the policy at the start of the step."""
        return self.capture.batches[0].tokens.stats

    def _coming_norms(self) -> Norms:
        """Norms of the step that an optimizer other than AdamW is about to make with the gradient in `.grad`."""
        learner = self.learner
        steps = coming_step(
            learner.optimizer,
            learner.parameters,
            [p.grad for p in learner.parameters],
        )
        return norms(zip(learner.parameters, steps, strict=True), learner.groups)

    def _moving(self, rows: Tensor) -> Tensor:
        """(n,) bool on the CPU: whether the loss of `rows` (n,) has a gradient, or is 0 at all weights."""
        if self.method.entropy is not None or self.method.kl.coef > 0:
            return torch.ones(len(rows), dtype=torch.bool)
        return ((self.plan.advantage[rows] != 0) | (self.plan.penalty[rows] != 0)).any(1).cpu()

    def _normalizer(self, rows: Tensor) -> tuple[Tensor, int]:
        """(n, T) factors of the terms of an update's loss, and the number of its tokens."""
        method = self.method
        group = self.rollouts.group[rows]
        mask = self.rollouts.completion_mask[rows]
        normalizer = token_normalizer(
            method,
            mask,
            self.learner.max_new_tokens,
            keep=self.plan.keep[rows],
            group=group,
            dtype=self._stats.logp.dtype,
        )
        return normalizer, int(mask.sum())

    def _scored(self, micro: Tensor, with_grad: bool = False) -> tuple[Scored, Tensor | None]:
        """A microbatch, with entropies where the loss has a bonus, and its (n, T) log-probabilities under the reference."""
        rows = self.rollouts.rows(micro)
        scorer = self.learner.scorer
        model = self.learner.reference
        entropies = None if self.method.entropy is None else flat_entropy
        scored = scorer.score(rows, with_grad=with_grad, function=entropies)
        return scored, None if model is None else scorer.score(rows, model=model).logp

    @torch.no_grad()
    def _loss(self, rows: Tensor, pass_index: int) -> Tensor:
        """k·(part of L) of each of the k prompts of some rows at the present weights, (k,) float64 with mean L.

        Rows without advantage and penalty, whose part is 0 at all weights unless the loss has further terms, are not run.
        """
        rollouts = self.rollouts
        scorer = self.learner.scorer
        normalizer, tokens = self._normalizer(rows)
        prompts = rollouts.group[rows].unique().cpu()
        moving = rows[self._moving(rows)]
        total = torch.zeros(len(prompts), dtype=torch.float64)
        if not len(moving):
            return total
        _, batches = scorer.split(rollouts, moving)
        idle = scorer.idle_passes(batches)
        for micro in batches:
            scored, reference = self._scored(micro)
            for index, prompt in enumerate(prompts.tolist()):
                of = (rollouts.group.cpu()[micro] == prompt).nonzero()[:, 0]
                if not len(of):
                    continue
                plan = self.plan.rows(micro[of])
                theirs = None if reference is None else reference[of]
                scale = normalizer[torch.searchsorted(rows, micro[of])]
                loss = policy_loss(
                    self.method,
                    plan,
                    scored.logp[of],
                    scale,
                    reference_logp=theirs,
                    pass_index=pass_index,
                ).loss
                if scored.values is not None:
                    loss -= entropy_bonus(
                        self._entropy_coef,
                        plan,
                        scored.values[of],
                        tokens,
                        pass_index=pass_index,
                    )
                total[index] += float(loss) * len(prompts)
        for _ in range(idle):
            self._scored(shortest(rollouts))
        return torch.stack(distributed.gather(total)).sum(0)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _backward(
        self,
        rows: Tensor,
        pass_index: int,
        *,
        part: Tensor | None = None,
        record: bool = False,
    ) -> tuple[float, float]:
        """∇L of some rows, in ascending order, into `.grad`, summed over microbatches and processes.

        Returns L and the sum of the entropies in its bonus [nats]. With `record` the capture gets what the rows' tokens do. With
        `part`, some of the rows, only their terms of L are computed. Groups without an advantage, whose terms are 0, have no
        backward pass.
        """
        learner = self.learner
        rollouts = self.rollouts
        scorer = self.learner.scorer
        learner.optimizer.zero_grad(set_to_none=True)
        normalizer, loss_tokens = self._normalizer(rows)
        total, entropy = 0.0, 0.0
        part = rows if part is None else part
        groups = rollouts.group.cpu()[part]
        moving = torch.isin(groups, groups[self._moving(part)])
        # all processes run the same passes; gradients are zeros, not None
        if scorer.sharded or not bool(moving.any()):
            moving = torch.ones_like(moving)
        _, batches = scorer.split(rollouts, part[moving])
        still = scorer.split(rollouts, part[~moving])[1] if record else []
        idle = scorer.idle_passes(batches)
        for number, micro in enumerate([*batches, *still]):
            scale = normalizer[torch.searchsorted(rows, micro)]
            loss, bonus = self._microbatch(
                micro,
                scale,
                pass_index,
                loss_tokens,
                moves=number < len(batches),
                record=record,
            )
            total = total + loss
            entropy = entropy + bonus
        for _ in range(idle):
            (self._scored(shortest(rollouts), True)[0].logp.sum() * 0.0).backward()
        distributed.sum_gradients(learner.parameters)
        if record:
            self.capture.collect(rows.device)
            self.capture.merge_uses()
        return distributed.sum_values(total), distributed.sum_values(entropy)

    def _microbatch(
        self,
        micro: Tensor,
        normalizer: Tensor,
        pass_index: int,
        loss_tokens: int,
        *,
        moves: bool,
        record: bool,
    ) -> tuple[float, float]:
        """Add the gradient of the rows `micro` (n,) to `.grad` if it `moves`, else it is 0; their part of L and of the entropies."""
        plan = self.plan.rows(micro)
        mask = plan.pass_mask(pass_index)
        entropy, by_entropy = 0.0, 0.0
        with torch.set_grad_enabled(moves):
            scored, reference = self._scored(micro, moves)
            logp = scored.logp  # (n, T)
            out = policy_loss(
                self.method,
                plan,
                logp,
                normalizer,
                reference_logp=reference,
                pass_index=pass_index,
            )
            loss = out.loss
            # a term of its own: the coefficients do not have it
            if scored.values is not None:
                coef = self._entropy_coef
                loss = loss - entropy_bonus(
                    coef,
                    plan,
                    scored.values,
                    loss_tokens,
                    pass_index=pass_index,
                )
                inside = torch.where(mask, scored.values.detach(), 0.0)
                entropy = float(inside.sum(dtype=torch.float64))
                by_entropy = -coef / max(loss_tokens, 1)
        kl_coef = torch.zeros_like(logp)
        if moves and out.divergence is not None:
            (kl_coef,) = torch.autograd.grad(out.divergence, logp, retain_graph=True)
        if moves and self.without is not None:
            left_out = self.without[micro].to(logp.device)[:, : logp.shape[1]]
            logp.register_hook(partial(torch.masked_fill, mask=left_out, value=0.0))
        if record:
            known = {
                "ratio": out.ratio,
                "log_ratio": logp.detach() - plan.behavior_logp,
                "clipped": out.clipped,
                "kl": out.kl,
                "weight": plan.weight,
                "correction": plan.correction,
                "advantage": plan.advantage,
                "kl_coef": kl_coef,
                "entropy_coef": torch.full_like(logp, by_entropy),
            }
            if reference is not None:
                known["ref_logp"] = reference
            keep = self.capture.use(0, micro, known, used=mask)
            if moves:
                logp.register_hook(keep)
            else:
                keep(torch.zeros_like(logp))
        if moves:
            loss.backward()
        return float(loss.detach()), entropy

    # -- rotation ----------------------------------------------------------------------------------------------------

    @cached_property
    def _reference(self) -> Updates:
        """The updates of the reference objective on the same rollouts."""
        method = reference_method(self.method)
        advantage, stats = self.advantage, self._stats
        if method.advantage != self.method.advantage:
            advantage = step_advantages(method, self.rollouts)
        tensors = step_tensors(self.rollouts, advantage, stats, stats.logp, self.progress, method)
        return replace(self, advantage=advantage, method=method, plan=prepare(method, tensors))

    def _reference_halves(self, rows: Tensor) -> list[Gradient]:
        """The reference gradient of the rows, as the sum over every other group and the sum over the rest."""
        key = self._reference.method.model_copy(update={"name": ""}).model_dump_json()
        if self.references is not None and key in self.references:
            return self.references[key]
        parameters = self.learner.parameters
        gradients = [p.grad for p in parameters]
        groups = self.rollouts.group.cpu()[rows]
        halves: list[Gradient] = []
        try:
            for half in (groups.unique()[::2], groups.unique()[1::2]):
                if len(half):
                    self._reference._backward(rows, 0, part=rows[torch.isin(groups, half)])
                    halves.append([p.grad for p in parameters])
        finally:
            for parameter, value in zip(parameters, gradients, strict=True):
                parameter.grad = value
        if self.references is not None:
            self.references.clear()  # a model's size each: one is enough where methods come in order
            self.references[key] = halves
        return halves

    def rotation(self, rows: Tensor, norm: float) -> UpdateRotation:
        """Compare the unclipped gradient in `.grad`, of length `norm`, and the step that it makes with the reference's."""
        started = time.perf_counter()
        learner = self.learner
        parameters = self.learner.parameters
        halves = self._reference_halves(rows)
        groups = self.rollouts.group.cpu()[rows].unique()
        noise = (
            noise_rotation(halves[0], halves[1], len(groups[::2]) / len(groups))
            if len(halves) == 2
            else math.nan
        )
        gradients = [p.grad for p in parameters]
        reference = _added(halves)
        steps = [
            coming_step(
                learner.optimizer,
                parameters,
                gradient,
                learner.clipping(*one, self.progress).factors,
            )
            for gradient, one in (
                (gradients, (self.method, gradients, norm)),
                (reference, (self._reference.method, reference, total_norm(reference))),
            )
        ]
        return UpdateRotation(
            rotation(gradients, reference),
            rotation(*steps),
            noise,
            time.perf_counter() - started,
        )

    def rotations_by_half(self, rows: Tensor) -> list[float]:
        """Angle to the reference's gradient on every other prompt of the rows, and on the rest [degrees]; `.grad` is lost."""
        groups = self.rollouts.group.cpu()[rows]
        found = []
        for number, reference in enumerate(self._reference_halves(rows)):
            part = rows[torch.isin(groups, groups.unique()[number::2])]
            self._backward(rows, 0, part=part)
            gradients = [p.grad for p in self.learner.parameters]
            found.append(rotation(gradients, reference).angle)
        return found

    @torch.no_grad()
    def visit(self, norm: float, call: Callable[[], None]) -> None:
        """Call with the weights moved by the step of the gradient in `.grad`, of length `norm`, and put them back."""
        learner = self.learner
        parameters = self.learner.parameters
        gradients = [p.grad for p in parameters]
        factors = learner.clipping(self.method, gradients, norm, self.progress).factors
        with moved_by(parameters, coming_step(learner.optimizer, parameters, gradients, factors)):
            call()


def _added(gradients: Sequence[Gradient]) -> Gradient:
    """The sum of gradients; None counts as zeros."""
    present = [
        [part for part in parts if part is not None] for parts in zip(*gradients, strict=True)
    ]
    return [reduce(torch.add, parts) if parts else None for parts in present]


def _scale_gradients(parameters: Sequence[nn.Parameter], factors: Sequence[float]) -> None:
    for parameter, factor in zip(parameters, factors, strict=True):
        if parameter.grad is not None and factor != 1.0:
            parameter.grad.mul_(factor)
