"""What a run, a fork and a rotation share: policy, optimizer with its learning rate, and the learner, which makes the updates of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sharpscope.config.run import OptimizerSpec
from sharpscope.errors import NonFiniteError, UserError
from sharpscope.memory import require_memory
from sharpscope.methods import Method
from sharpscope.methods.loss import MethodState, clipped_norm
from sharpscope.methods.method import AveragedProximal, CurvatureTokens
from sharpscope.methods.plan import Plan, calibrate, per_token, prepare
from sharpscope.methods.token_weights import EffectWeight, number
from sharpscope.policy import Policy, Rollouts, TokenStats, load_policy
from sharpscope.policy.forward import Scorer
from sharpscope.policy.guard import placed
from sharpscope.policy.head import output_head
from sharpscope.policy.loading import has_adapters
from sharpscope.policy.sharding import ModelView, gathered_copy, is_shard
from sharpscope.policy.token_stats import Moments, flat_curvature, flat_proxy
from sharpscope.recording.capture import StepCapture
from sharpscope.recording.checks import kl_of_step
from sharpscope.recording.norms import clip_factor, layer_groups, norms
from sharpscope.recording.step import (
    PendingUpdate,
    RolloutBatch,
    StepResult,
    UpdateResult,
    UpdateRotation,
    step_tensors,
)
from sharpscope.seeds import generator
from sharpscope.tokens import Clip
from sharpscope.tokens.muon import Muon
from sharpscope.training.token_effects import step_effects
from sharpscope.training.updates import BeforeOptimizer, Gradient, Updates

if TYPE_CHECKING:
    from sharpscope.config import RunConfig

BeforeFirstUpdate = Callable[[TokenStats, Tensor], bool]
"""Gets π_old's statistics and the token weights (N, T); False leaves the updates of the step out."""
BeforeStep = Callable[[PendingUpdate], None]
"""Sees an update between its gradient and the optimizer's step; changes nothing."""


@dataclass(frozen=True)
class Clipping:
    """What clipping does to a gradient."""

    factors: list[float]  # what each parameter's gradient is multiplied by
    share: float  # norm after clipping divided by the norm before; 1 for a gradient of 0
    averages: dict[str, float]  # moving average of each module type's norm after this gradient


@dataclass(frozen=True)
class Learner:
    """Makes the updates of a step. It holds settings; everything about a step is passed to `learn`."""

    scorer: Scorer  # of the policy in training
    optimizer: torch.optim.Optimizer
    max_new_tokens: int
    mini_batches: int
    inner_epochs: int
    max_grad_norm: float | None
    seed: int
    reference: nn.Module | None = None  # the policy itself, if its adapters can be switched off
    state: MethodState = field(default_factory=MethodState)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [p for p in self.scorer.model.parameters() if p.requires_grad]

    @cached_property
    def groups(self) -> dict[int, str]:
        """Layer and kind of each trainable parameter by its identity."""
        return layer_groups(self.scorer.model)

    @cached_property
    def _module_types(self) -> dict[int, str]:
        """The last part of the name of each trainable parameter's module, such as `down_proj`, without an adapter's parts."""
        made = {}
        for name, parameter in self.scorer.model.named_parameters():
            parts = name.split(".lora_")[0].split(".")
            if len(parts) > 1 and parts[-1] in ("weight", "bias"):
                parts.pop()
            if parameter.requires_grad:
                made[id(parameter)] = parts[-1]
        return made

    def clipping(
        self,
        method: Method,
        gradients: Gradient,
        norm: float,
        progress: float,
    ) -> Clipping:
        """The clip of a gradient with this global norm: by module type, if the method does so, then to `max_grad_norm`.

        The history of norms stays as it is. Of a sharded model every process calls this.
        """
        limit = self.max_grad_norm
        averages = self.state.norms
        if method.module_clip is None or not (norm > 0 and math.isfinite(norm)):
            factor = clip_factor(norm, limit)
            return Clipping([factor] * len(self.parameters), factor, dict(averages))
        high = number(method.at(progress).module_clip)
        types = self._module_types
        found = norms(zip(self.parameters, gradients, strict=True), types).layers
        by_type = {
            kind: clipped_norm(high, size, averages.get(kind)) for kind, size in found.items()
        }
        scaled = math.sqrt(sum((by_type[kind][0] * size) ** 2 for kind, size in found.items()))
        if all(scale == 1.0 for scale, _ in by_type.values()):
            scaled = norm  # without the rounding of the sum
        factor = clip_factor(scaled, limit)
        factors = [factor * by_type[types[id(parameter)]][0] for parameter in self.parameters]
        return Clipping(
            factors,
            factor * scaled / norm,
            {kind: average for kind, (_, average) in by_type.items()},
        )

    def clips(self, method: Method, progress: float) -> tuple[Clip, ...] | None:
        """The clips of the gradient in `.grad`, in their order; None if the method replaces the gradient (SAM)."""
        if method.sharpness is not None:
            return None
        clips: list[Clip] = []
        if method.module_clip is not None:
            high = number(method.at(progress).module_clip)
            for kind, average in self.state.norms.items():
                places = (
                    i for i, p in enumerate(self.parameters) if self._module_types[id(p)] == kind
                )
                clips.append(Clip(limit=high * average, parameters=tuple(places), slack=0.0))
        if self.max_grad_norm is not None:
            clips.append(Clip(limit=self.max_grad_norm))
        return tuple(clips)

    def view(self) -> ModelView:
        """The present model, gradients and optimizer for probes; of a sharded model a gathered copy, made by every process."""
        model = self.scorer.model
        if not self.scorer.sharded:
            return ModelView(model, self.parameters, self.optimizer)
        return gathered_copy(model, self.optimizer, next(model.parameters()).device)

    def learn(
        self,
        rollouts: Rollouts,
        advantage: Tensor,
        step: int,
        progress: float,
        *,
        method: Method,
        stats: TokenStats | None = None,
        before_first_update: BeforeFirstUpdate | None = None,
        before_step: BeforeStep | None = None,
        before_optimizer: BeforeOptimizer | None = None,
        rotations: bool = False,
        without: Tensor | None = None,
    ) -> StepResult:
        """Make all updates of one step on N rollouts with advantages (N,) or (N, T).

        The number of the step seeds its random choices; `progress`, the share of the run done, resolves schedules; the
        method's constants are calibrated. `stats` are of the present policy, where they are known. If `before_first_update`
        returns False, the tokens of the first gradient are recorded, and weights and optimizer stay as they are. `rotations`
        compares each update with the reference objective's. Coefficients ∂L/∂log π of the tokens `without` (N, T) are set to 0.
        """
        stats = self.scorer.statistics(rollouts) if stats is None else stats
        batch = RolloutBatch([], rollouts, [], advantage, None)
        capture = StepCapture.of_known(batch, stats)
        updates = capture.updates
        warnings: tuple[str, ...] = ()
        mask = rollouts.completion_mask.bool().cpu()
        if bool(mask.any()):
            method = method.model_copy(
                update={"weight": self.state.moved(method.weight, stats.entropy.cpu()[mask])}
            )
        try:
            center = method.proximal
            if center is not None and center.decay == 0 and center.every == "step":
                center = None  # it is π_old
            proximal = None if center is None else self._proximal(center, rollouts)
            plan = self.plan(rollouts, advantage, step, progress, method, stats, proximal)
            warnings = plan.warnings
            work = Updates(
                self,
                rollouts,
                advantage,
                progress,
                method,
                plan,
                capture,
                rotations,
                before_optimizer,
                without=without,
            )
            for index, (rows, pass_index) in enumerate(self._schedule(rollouts, step, method)):
                if index > 0 and center is not None and center.every == "update":
                    moved = self._proximal(center, rollouts.rows(rows))
                    plan.proximal_logp[rows] = torch.where(plan.mask[rows], moved, 0.0)
                gradient = work.gradient(index, rows, pass_index)
                if (
                    index == 0
                    and before_first_update is not None
                    and not before_first_update(stats, plan.weight)
                ):
                    work.skip(gradient, gradient.norm)
                    break
                if before_step is not None and gradient.finite:
                    # Before the gradient is reshaped: the tokens' coefficients are those of the loss's own gradient.
                    first_use = capture.batches[0].tokens.update[rows] == index
                    clips = self.clips(method, progress)
                    before_step(
                        PendingUpdate(index, rows, first_use, gradient.coef, gradient.norm, clips)
                    )
                work.apply(gradient)
        except NonFiniteError as error:  # a token weight
            self.optimizer.zero_grad(set_to_none=True)
            updates.append(
                UpdateResult(
                    grad_norm=math.nan,
                    plain_norm=math.nan,
                    update_norm=0.0,
                    clip_factor=0.0,
                    skipped=True,
                    problem=str(error),
                )
            )
        made = any(not update.skipped for update in updates) and not any(
            update.broken for update in updates
        )
        kl = kl_of_step(rollouts, stats.logp, self.scorer.log_probabilities) if made else None
        return StepResult(
            updates,
            capture.batches[0].tokens,
            warnings,
            method.correction is not None,
            kl,
            capture.later_uses({0: 0}),
        )

    def _proximal(self, proximal: AveragedProximal, rollouts: Rollouts) -> Tensor:
        """Log-probabilities (N, T) [nats] under the averaged policy, which moves to the present weights first."""
        average = self.state.averaged(proximal.decay, self.parameters)
        with torch.no_grad(), placed(self.parameters, average):
            return self.scorer.log_probabilities(rollouts)

    def compare(
        self,
        rollouts: Rollouts,
        advantage: Tensor,
        step: int,
        progress: float,
        *,
        method: Method,
        stats: TokenStats,
        references: dict[str, list[Gradient]] | None = None,
        halves: list[float] | None = None,
        at_update: Callable[[], None] | None = None,
    ) -> UpdateRotation:
        """Compare the first update on all rows with the reference objective's, see `learn`. Neither stays.

        `references` keeps the last reference gradient, so that calls with the same rollouts, state and reference share it.
        `halves` gets the gradient's angles on every other prompt and on the rest [degrees], unless the method reshapes its gradient.
        `at_update` is called with the weights moved by the update, which are put back; the optimizer's state does not move.
        """
        batch = RolloutBatch([], rollouts, [], advantage, None)
        capture = StepCapture.of_known(batch, stats)
        plan = self.plan(rollouts, advantage, step, progress, method, stats)
        work = Updates(
            self,
            rollouts,
            advantage,
            progress,
            method,
            plan,
            capture,
            references=references,
        )
        try:
            gradient = work.gradient(0, torch.arange(len(rollouts)), 0)
            norm = work.reshape(gradient).total
            found = work.rotation(gradient.rows, norm)
            if at_update is not None:
                work.visit(norm, at_update)
            if halves is not None and method.sharpness is None:
                halves += work.rotations_by_half(gradient.rows)
            return found
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def plan(
        self,
        rollouts: Rollouts,
        advantage: Tensor,
        step: int,
        progress: float,
        method: Method,
        stats: TokenStats,
        proximal: Tensor | None = None,
    ) -> Plan:
        """What is fixed for a step; `stats` are of the present policy, `proximal` (N, T) [nats] of the averaged one."""
        tensors = step_tensors(rollouts, advantage, stats, stats.logp, progress, method)
        tensors = replace(tensors, proximal_logp=proximal)
        weight = method.weight.inner
        if isinstance(weight, EffectWeight):
            tensors = replace(tensors, effect=step_effects(self, rollouts, tensors, method, weight))
        if method.needs_proxy:
            proxy = self.scorer.per_token(rollouts, flat_proxy)
            tensors = replace(tensors, proxy_logp=proxy)
        if isinstance(method.tokens, CurvatureTokens):
            tensors = replace(tensors, curvature=self.curvature(rollouts, advantage, method.tokens))
        return prepare(method, tensors, generator(self.seed, "plan", step))

    def curvature(self, rollouts: Rollouts, advantage: Tensor, spec: CurvatureTokens) -> Tensor:
        """(N, T, 2) m_H and m_F (`flat_curvature`) at the present weights, learning rate and moments.

        Raises:
            UserError: The output layer is not trained, or sharded.
        """
        weight = output_head(self.scorer.model).weight
        trained = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        group = trained.get(id(weight))
        if not isinstance(self.optimizer, torch.optim.AdamW):
            raise UserError(
                "method.tokens.kind = curvature: is computed from AdamW's moments; set optimizer.kind=adamw"
            )
        if group is None or self.scorer.sharded:
            why = "is sharded" if self.scorer.sharded else "is not trained"
            raise UserError(
                f"method.tokens.kind = curvature: the output layer {why}; choose another method"
            )
        moments = None
        if state := self.optimizer.state.get(weight):
            known = int(state["step"]), group["betas"], group["eps"]
            moments = Moments(state["exp_avg"], state["exp_avg_sq"], *known)
        function = partial(flat_curvature, lr=float(group["lr"]), moments=moments)
        each = per_token(advantage.to(rollouts.completion_ids.device), rollouts.completion_mask)
        return self.scorer.per_token(rollouts, function, 2, advantage=each)

    def _schedule(
        self,
        rollouts: Rollouts,
        step: int,
        method: Method,
    ) -> Iterator[tuple[Tensor, int]]:
        """Rows and pass of each update: groups stay whole and are assigned to mini-batches in a seeded order."""
        groups = torch.unique(rollouts.group.cpu())
        for epoch in range(self.inner_epochs):
            order = groups
            if self.mini_batches > 1:
                order = groups[
                    torch.randperm(
                        len(groups), generator=generator(self.seed, "mini_batches", step, epoch)
                    )
                ]
            # Passes are the outer loop (Lopti): all mini-batches with the first pass's tokens, then all with the rest.
            for pass_index in range(method.pass_count):
                for chosen in torch.tensor_split(order, self.mini_batches):
                    yield (
                        torch.nonzero(torch.isin(rollouts.group.cpu(), chosen)).flatten(),
                        pass_index,
                    )


def calibrated(
    method: Method,
    drawn: RolloutBatch,
    stats: TokenStats,
    progress: float,
) -> Method | None:
    """The method with the constants of its token weight fixed on a batch; None where they need a gradient and it has none."""
    tensors = step_tensors(drawn.rollouts, drawn.advantage, stats, stats.logp, progress, method)
    if method.weight.needs_gradient and not bool(tensors.mass.any()):
        return None
    return method.model_copy(update={"weight": calibrate(method.weight, tensors)})


# -- what a run, a fork and a rotation start from


def load_start(config: RunConfig, checkpoint: Path | None) -> Policy:
    """The policy of a run's checkpoint, or with None the one that the run starts from, if its training fits into memory."""
    source = (
        config.policy
        if checkpoint is None
        else config.policy.model_copy(update={"model": str(checkpoint)})
    )
    policy = load_policy(source, base=config.policy.model)
    trained = sum(
        p.numel() * p.element_size() for p in policy.model.parameters() if p.requires_grad
    )
    what = "a gradient with AdamW's two moments"
    require_memory(3 * trained, policy.device, what, "train adapters (--set policy.lora.r=16)")
    return policy


def reference_policy(config: RunConfig, policy: Policy) -> nn.Module:
    """The reference of the KL term: the initial policy, or the policy itself if its adapters can be switched off."""
    if has_adapters(policy.model):
        return policy.model
    return load_policy(config.policy).model.eval().requires_grad_(False)


def make_learner(
    config: RunConfig,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    *,
    reference: nn.Module | None = None,
) -> Learner:
    """A learner with the run's settings."""
    scorer = Scorer(
        policy.model,
        config.rollout.temperature,
        config.update.microbatch_tokens,
        True,
        policy.compute,
        config.update.gradient_checkpointing,
    )
    return Learner(
        scorer,
        optimizer,
        max_new_tokens=config.rollout.max_new_tokens,
        mini_batches=config.update.mini_batches,
        inner_epochs=config.update.inner_epochs,
        max_grad_norm=config.optimizer.max_grad_norm,
        seed=config.seed,
        reference=reference,
    )


def build_optimizer(model: nn.Module, spec: OptimizerSpec) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters; weight decay acts on tensors of two or more dimensions only.

    Sharded parameters have groups of their own: AdamW's fused operations take one kind of tensor at a time.

    Raises:
        UserError: Muon's or Pion's parameters are sharded.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if spec.kind in ("muon", "pion"):
        return _muon(model, trainable, spec)
    groups = [
        {
            "params": [
                p for p in trainable if (p.ndim >= 2) is matrices and is_shard(p) is divided
            ],
            "weight_decay": spec.weight_decay if matrices else 0.0,
        }
        for divided in (False, True)
        for matrices in (True, False)
    ]
    used = [group for group in groups if group["params"]]
    if spec.kind == "sgd":
        return torch.optim.SGD(used, lr=spec.lr, momentum=spec.momentum or 0.0)
    return torch.optim.AdamW(used, lr=spec.lr, betas=(0.9, spec.beta2), eps=spec.eps)


def _muon(
    model: nn.Module,
    trainable: Sequence[nn.Parameter],
    spec: OptimizerSpec,
) -> torch.optim.Optimizer:
    """Muon or Pion: matrices but embeddings and the output layer by the polynomial, the rest by AdamW."""
    if any(is_shard(p) for p in trainable):
        raise UserError(
            f"optimizer.kind = {spec.kind}: its step of a matrix needs the whole matrix, which is sharded; choose adamw or sgd"
        )
    tables = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters()
    }
    tables.add(id(output_head(model).weight))
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for p in trainable:
        is_matrix = p.ndim >= 2
        kinds.setdefault((p.ndim == 2 and id(p) not in tables, is_matrix), []).append(p)
    groups = [
        {
            "params": chosen,
            "matrices": by_polynomial,
            "weight_decay": spec.weight_decay if decays else 0.0,
        }
        for (by_polynomial, decays), chosen in kinds.items()
    ]
    return Muon(
        groups,
        spec.lr,
        betas=(0.9, spec.beta2),
        eps=spec.eps,
        momentum=0.95 if spec.momentum is None else spec.momentum,
        filter_steps=spec.filter_steps if spec.kind == "pion" else 0,
    )


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Learning rate of `step` (counted from 1) in a run of `steps` steps.

    With w warm-up steps: lr·step/w up to step w, then constant, or a decay from lr at step max(w, 1) to 0 at step `steps`:
    linear lr·(1 − d), cosine lr·(1 + cos πd)/2 with d = (step − max(w, 1))/(steps − max(w, 1)). These are transformers'
    schedules after `step` calls of the scheduler. A run of one step has no decay.
    """
    if step <= spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    peak = max(spec.warmup_steps, 1)
    done = (step - peak) / max(steps - peak, 1)
    if spec.schedule == "linear":
        return spec.lr * (1 - done)
    if spec.schedule == "cosine":
        return spec.lr * 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr


def positive_learning_rate(config: RunConfig, step: int) -> float:
    """The learning rate of a run's step; a UserError if it is 0, so that an update changes nothing."""
    lr = learning_rate(config.optimizer, step, config.steps)
    if not lr > 0:
        given = f"optimizer.schedule = {config.optimizer.schedule}: the learning rate is 0 at step {step}"
        raise UserError(
            f"{given}; choose an earlier checkpoint, or --set optimizer.schedule=constant"
        )
    return lr


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
