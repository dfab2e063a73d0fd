"""What is learnt from one round of rollouts: updates, microbatches, and what every token contributed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.config.method import EwmaProximal, GradientNormPenalty, Sam
from sharpscope.errors import NonFiniteError
from sharpscope.objective import (
    LossOutput,
    Method,
    Plan,
    StepTensors,
    passes_of,
    policy_loss,
    prepare,
    token_normalizer,
)
from sharpscope.policy import Rollouts, Scored, TokenStats, microbatches, score_completions
from sharpscope.policy.adapters import without_adapters
from sharpscope.policy.sharding import Seen, is_sharded, whole_copy
from sharpscope.recording.norms import gradient_norm, update_norm
from sharpscope.recording.step import (
    Learned,
    TokenRecord,
    UpdateBatch,
    UpdateRecord,
    UpdateTokens,
    blank_stats,
    step_tensors,
    write_stats,
)
from sharpscope.seeds import generator
from sharpscope.training.optimizer import scale_gradients, updates_done

NO_GRADIENT = "the gradient is not finite"
BROKEN = "an update made model weights that are not finite, and nothing later can mend them"


BeforeStep = Callable[[UpdateBatch], None]
Allow = Callable[[TokenStats, Tensor], bool]
"""Asked once a step, before its first update changes anything, with π_old's statistics and the token weights (N, T)."""


@dataclass
class Learner:
    """Runs the updates of a step. `before_step` observes each update's gradient; it must change nothing.

    `allow` may leave the updates of a step out: then its tokens are recorded, and weights and optimizer stay as they are.
    """

    model: torch.nn.Module
    optimizer: torch.optim.AdamW
    method: Method
    temperature: float
    max_new_tokens: int
    mini_batches: int
    inner_epochs: int
    microbatch_tokens: int
    share_prompt: bool
    max_grad_norm: float | None
    seed: int
    reference: torch.nn.Module | None = None  # the model itself: its adapters are switched off
    proximal: torch.nn.Module | None = None
    compute: torch.dtype | None = None
    recompute: bool = False
    before_step: BeforeStep | None = None
    allow: Allow | None = None
    parameters: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.warnings: tuple[str, ...] = ()
        # Every process must run the layers equally often where they are divided: one pass a microbatch, prompts included.
        self.sharded = is_sharded(self.model)
        self.share_prompt = self.share_prompt and not self.sharded
        self._seen: Seen | None = None

    @property
    def seen(self) -> Seen:
        """The present model, gradients and optimizer as probes see them; of a sharded model a whole copy, until the next update.

        Every process must ask, in the same order.
        """
        if not self.sharded:
            return Seen(self.model, self.parameters, self.optimizer)  # type: ignore[arg-type]
        if self._seen is None:
            self._seen = whole_copy(self.model, self.optimizer, next(self.model.parameters()).device)
        return self._seen

    def forget_seen(self) -> None:
        """Free the copy that probes saw: it is no longer the present model."""
        self._seen = None

    # -- statistics of the policy at the start of the step ---------------------------------------------------------

    @property
    def fused(self) -> bool:
        """True where the first backward pass can compute π_old's statistics on the way (same numbers, one pass less)."""
        return (
            self.method.pointwise
            and self.mini_batches == self.inner_epochs == 1
            and passes_of(self.method) == 1
            and self.proximal is None
            and self.method.sharpness.kind == "none"  # the second gradient, at shifted weights, needs π_old as it was
            and not self.sharded  # a plan that fails in one process alone would leave the others waiting
        )

    @torch.no_grad()
    def statistics(self, rollouts: Rollouts) -> TokenStats:
        """TokenStats (N, T) of the current policy over all rows, in microbatches."""
        found = blank_stats(rollouts.completion_mask, self.model)
        mine, batches = self._mine(rollouts, torch.arange(len(rollouts)))
        idle = self._idle(batches)
        for rows in batches:
            write_stats(found, rows, self._score(self.model, rollouts.rows(rows), stats=True).stats)
        for _ in range(idle):
            self._score(self.model, self._least(rollouts), stats=True)
        distributed.exchange_rows(mine, [getattr(found, stat.name) for stat in fields(TokenStats)])
        return found

    def _score(self, model: torch.nn.Module, rows: Rollouts, *, with_grad: bool = False, stats: bool = False) -> Scored:
        return score_completions(
            model, rows, self.temperature, share_prompt=self.share_prompt, with_grad=with_grad, stats=stats,
            compute=self.compute, recompute=self.recompute, one_pass=self.sharded,
        )  # fmt: skip

    def _frozen_logp(self, model: torch.nn.Module | None, micro: Rollouts) -> Tensor | None:
        """(n, T) log-probabilities of a frozen model; None without one."""
        if model is None:
            return None
        with without_adapters(model) if model is self.model else nullcontext():
            return self._score(model, micro).logp

    # -- the step --------------------------------------------------------------------------------------------------

    def learn(self, rollouts: Rollouts, advantage: Tensor, step: int, progress: float) -> Learned:
        """All updates of one step. `advantage` (N,) is the group advantage; `progress` in [0, 1] drives schedules."""
        self._rollouts, self._advantage, self._progress = rollouts, advantage, progress
        stats = None if self.fused else self.statistics(rollouts)
        blank = blank_stats(rollouts.completion_mask, self.model) if stats is None else stats
        self._tokens = TokenRecord.blank(blank)
        self._plan, self.warnings, self._vetoed = None, (), False
        updates: list[UpdateRecord] = []
        try:
            if stats is not None:
                tensors = self._tensors(torch.arange(len(rollouts)), stats, stats.logp)
                self._plan = prepare(self.method, tensors, generator(self.seed, "plan", step))
                self.warnings = self._plan.warnings
            for index, (rows, pass_index) in enumerate(self._updates(rollouts, step)):
                updates.append(self._update(index, rows, pass_index))
                if self._vetoed:
                    break
        except NonFiniteError as error:  # a token weight
            self.optimizer.zero_grad(set_to_none=True)
            updates.append(UpdateRecord(math.nan, math.nan, math.nan, 0.0, 0.0, skipped=True, problem=str(error)))
        return Learned(updates, self._tokens)

    def _updates(self, rollouts: Rollouts, step: int) -> Iterator[tuple[Tensor, int]]:
        """Rows and pass of each update: groups are kept whole and dealt to mini-batches in a seeded order."""
        groups = torch.unique(rollouts.group.cpu())
        for epoch in range(self.inner_epochs):
            order = groups
            if self.mini_batches > 1:
                order = groups[torch.randperm(len(groups), generator=generator(self.seed, "mini_batches", step, epoch))]
            # Passes are the outer loop (Lopti): all mini-batches with the first pass's tokens, then all with the rest.
            for pass_index in range(passes_of(self.method)):
                for chosen in torch.tensor_split(order, self.mini_batches):
                    yield torch.nonzero(torch.isin(rollouts.group.cpu(), chosen)).flatten(), pass_index

    def _update(self, index: int, rows: Tensor, pass_index: int) -> UpdateRecord:
        """One gradient, what the method does to it, and the optimizer's step."""
        self.forget_seen()
        loss = self._gradient(index, rows, pass_index, record=True)
        plain = norm = gradient_norm(self.parameters)
        if index == 0 and self.allow is not None:
            self._vetoed = not self.allow(
                self._tokens.stats, self._tokens.weight if self._plan is None else self._plan.weight
            )
            if self._vetoed:
                self.optimizer.zero_grad(set_to_none=True)
                return UpdateRecord(loss, norm, plain, 0.0, 0.0, skipped=True, problem=_problem(loss, norm))
        if self.before_step is not None and math.isfinite(loss) and math.isfinite(norm):
            # Before the gradient is reshaped: the tokens' coefficients are those of the plain one.
            first = self._tokens.update[rows] == index
            self.before_step(UpdateBatch(index, rows, first, self._now.coef, norm, self._clip_factor(norm)))
        self.forget_seen()
        sharpness = self.method.sharpness
        if isinstance(sharpness, Sam | GradientNormPenalty) and math.isfinite(norm) and norm > 0:
            self._sharpen(sharpness, index, rows, pass_index, norm)
            norm = gradient_norm(self.parameters)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            return UpdateRecord(loss, norm, plain, 0.0, 0.0, skipped=True, problem=_problem(loss, norm))
        factor = self._clip_factor(norm)
        scale_gradients(self.parameters, factor)
        self.optimizer.step()
        size = update_norm(self.optimizer)
        self._move_proximal()
        self._tokens.count(rows, self._now)
        self.optimizer.zero_grad(set_to_none=True)
        problem = "" if math.isfinite(size) else BROKEN
        return UpdateRecord(loss, norm, plain, size, factor, skipped=False, problem=problem)

    def _clip_factor(self, norm: float) -> float:
        """What a gradient of this norm is multiplied by."""
        return 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))

    def _gradient(self, index: int, rows: Tensor, pass_index: int, record: bool) -> float:
        """∇L of one update into `.grad`, summed over microbatches; returns L."""
        rollouts = self._rollouts
        self.optimizer.zero_grad(set_to_none=True)
        dtype = self._tokens.stats.logp.dtype
        mask = rollouts.completion_mask[rows]
        normalizer = token_normalizer(self.method, mask, self.max_new_tokens, dtype=dtype)  # (n, T)
        place = {int(row): position for position, row in enumerate(rows)}
        if record:
            self._now = UpdateTokens.blank(mask.shape, dtype)
        total, problem = 0.0, None
        mine, batches = self._mine(rollouts, rows)
        idle = self._idle(batches)
        try:
            for micro in batches:
                local = torch.tensor([place[int(row)] for row in micro])
                total += self._microbatch(index, micro, local, normalizer[local], pass_index, record)
        except NonFiniteError as error:  # a token weight, which every process must hear of
            problem = str(error)
        for _ in range(idle):
            self._idle_microbatch(rollouts)
        problem = distributed.first_not_none([problem])
        if problem is not None:
            raise NonFiniteError(problem)
        distributed.sum_gradients(self.parameters)
        if record:
            own = torch.tensor([place[int(row)] for row in mine], dtype=torch.long)
            distributed.exchange_rows(own, self._now.tensors())
            distributed.exchange_rows(mine, self._tokens.tensors(stats=self._plan is None))
        return distributed.sum_values(total)

    def _microbatch(
        self, index: int, micro: Tensor, local: Tensor, normalizer: Tensor, pass_index: int, record: bool
    ) -> float:
        rows = self._rollouts.rows(micro)
        scored = self._score(self.model, rows, with_grad=True, stats=self._plan is None)
        logp = scored.logp  # (n, T)
        if scored.stats is None:
            assert self._plan is not None
            plan = self._plan.rows(micro)
        else:
            # π_old is the present policy, so its statistics are those of this very pass and the ratio is exactly 1.
            plan = prepare(self.method, self._tensors(micro, scored.stats, logp.detach()))
        logp.retain_grad()
        out = policy_loss(
            self.method, plan, logp, normalizer, reference_logp=self._frozen_logp(self.reference, rows),
            proximal_logp=self._frozen_logp(self.proximal, rows), pass_index=pass_index,
        )  # fmt: skip
        out.loss.backward()
        if record:
            coef = torch.zeros_like(logp) if logp.grad is None else logp.grad
            self._now.coef[local] = coef.detach().to("cpu", self._now.coef.dtype)
            self._now.write(local, plan.pass_mask(pass_index), out.clipped, out.kl)
            if scored.stats is not None:
                write_stats(self._tokens.stats, micro, scored.stats)
            self._write(index, micro, plan, out, coef, pass_index)
        return float(out.loss.detach())

    def _write(self, index: int, micro: Tensor, plan: Plan, out: LossOutput, coef: Tensor, pass_index: int) -> None:
        """Keep what the tokens of this pass did, unless an earlier update used them."""
        tokens = self._tokens
        first = plan.pass_mask(pass_index).cpu() & (tokens.update[micro] < 0)
        for target, value in (
            (tokens.weight, plan.weight), (tokens.advantage, plan.advantage), (tokens.loss_coef, coef),
            (tokens.ratio, out.ratio), (tokens.clipped, out.clipped),
        ):  # fmt: skip
            target[micro] = torch.where(first, value.detach().cpu().to(target.dtype), target[micro])
        tokens.update[micro] = torch.where(first, index, tokens.update[micro])

    def _move_proximal(self) -> None:
        """EWMA of the weights after each update: the proximal policy of the decoupled objective.

        After n updates it is Σ_i β^(n−i)·θ_i / Σ_i β^(n−i), i = 0…n: θ_n enters with (1 − β)/(1 − β^(n+1)).
        """
        if self.proximal is not None and isinstance(self.method.proximal, EwmaProximal):
            decay, done = self.method.proximal.decay, updates_done(self.optimizer)
            with torch.no_grad():
                for kept, new in zip(self.proximal.parameters(), self.model.parameters(), strict=True):
                    kept.lerp_(new.detach(), (1 - decay) / (1 - decay ** (done + 1)))

    # -- direct sharpness control ----------------------------------------------------------------------------------

    def _sharpen(self, spec: Sam | GradientNormPenalty, index: int, rows: Tensor, pass_index: int, norm: float) -> None:
        """Replace `.grad` by SAM's (gradient at θ + rho·g/‖g‖) or by the gradient-norm penalty's.

        The penalty λ‖∇L‖ has gradient λ·H·g/‖g‖, taken by a forward difference of length r (arXiv 2202.03599):
        g + λ·(g(θ + r·g/‖g‖) − g)/r.
        """
        radius = spec.rho if isinstance(spec, Sam) else spec.radius
        first = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        kept = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, first, strict=True):
                if gradient is not None:
                    parameter.add_(gradient, alpha=radius / norm)
        try:
            self._gradient(index, rows, pass_index, record=False)
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, kept, strict=True):
                    parameter.copy_(value)  # bitwise back
        if isinstance(spec, GradientNormPenalty):
            share = spec.penalty / radius
            for parameter, gradient in zip(self.parameters, first, strict=True):
                if gradient is not None and parameter.grad is not None:
                    parameter.grad.sub_(gradient).mul_(share).add_(gradient)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _tensors(self, rows: Tensor, stats: TokenStats, old_logp: Tensor) -> StepTensors:
        """π_old's statistics of some rows. The ratio's denominator is the trainer's own π_old: the sampler's log-probability
        differs from it by rounding (or by its kernels), which the tokens table shows and a health rule watches."""
        rollouts = self._rollouts
        return step_tensors(rollouts.rows(rows), self._advantage[rows], stats, old_logp, self._progress)

    def _mine(self, rollouts: Rollouts, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Those of `rows` that this process computes, whole groups of about the same work as the others', and microbatches."""
        part = rollouts.rows(rows)
        labels, member = part.group.cpu().unique(return_inverse=True)
        work = torch.zeros(len(labels), dtype=torch.long).scatter_add(
            0, member, (part.lengths + part.prompt_lengths).cpu()
        )
        own = torch.isin(member, torch.tensor(distributed.balance(work.tolist()), dtype=torch.long)).nonzero()[:, 0]
        if not len(own):
            return rows[own], []
        part, rows = part.rows(own), rows[own]
        group = part.group if self.share_prompt else None
        batches = microbatches(part.lengths, self.microbatch_tokens, prompt_lengths=part.prompt_lengths, group=group)
        return rows, [rows[batch] for batch in batches]

    def _idle(self, batches: list[Tensor]) -> int:
        """How many passes this process must run for the others' sake, who have more microbatches of a sharded model.

        Asked before the first pass: in between, the processes' messages about the layers would meet this one.
        """
        return max(distributed.gather(len(batches))) - len(batches) if self.sharded else 0

    def _least(self, rollouts: Rollouts) -> Rollouts:
        """The row that costs least."""
        return rollouts.rows((rollouts.lengths + rollouts.prompt_lengths).argmin()[None].cpu())

    def _idle_microbatch(self, rollouts: Rollouts) -> None:
        """All passes of a microbatch in their order, adding nothing to the gradient."""
        rows = self._least(rollouts)
        logp = self._score(self.model, rows, with_grad=True).logp
        self._frozen_logp(self.reference, rows)
        (logp.sum() * 0.0).backward()


def _problem(loss: float, norm: float) -> str:
    return "the loss is not finite" if not math.isfinite(loss) else "" if math.isfinite(norm) else NO_GRADIENT
