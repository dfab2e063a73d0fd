"""The values of a training step: its rollouts, its updates, and what every token did in them.

A step is one batch of rollouts and what is learned from it; an update is one optimizer step in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sharpscope.methods import Method
from sharpscope.methods.advantages import informative_groups
from sharpscope.methods.loss import gradient_mass
from sharpscope.methods.plan import StepTensors
from sharpscope.policy import Rollouts, TokenStats
from sharpscope.policy.directions import Rotation
from sharpscope.tasks import Example, Reward
from sharpscope.tokens import Clip


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of one step; `examples` has one entry a group, everything else one a completion."""

    examples: list[Example]
    rollouts: Rollouts
    rewards: list[Reward]
    advantage: Tensor  # (N,), or (N, T) where each token has its own; float64
    redrawn_groups: int | None  # by dynamic sampling; None: not known
    # of the policy at the start of the step, where the advantages needed them
    stats: TokenStats | None = None

    def rows(self, index: Tensor) -> RolloutBatch:
        """The completions `index` (n,), with all examples."""
        return replace(
            self,
            rollouts=self.rollouts.rows(index),
            rewards=[self.rewards[row] for row in index.tolist()],
            advantage=self.advantage[index.to(self.advantage.device)],
        )

    @property
    def idle_share(self) -> float:
        """Share of groups whose advantages are all 0, so that they have no gradient."""
        active = (self.advantage != 0).reshape(len(self.advantage), -1).any(1)
        return 1 - len(torch.unique(self.rollouts.group.to(active.device)[active])) / len(
            self.examples
        )

    @property
    def zero_variance_share(self) -> float:
        """Share of groups in which all rewards are equal."""
        return 1 - float(
            informative_groups(self.rollouts.reward, self.rollouts.group).double().mean()
        )


SUMMARY = (
    "tokens",
    "kl_old_k3",
    "ratio_min",
    "ratio_max",
    "clip_fraction_low",
    "clip_fraction_high",
)
"""Columns of the table `updates` that say what its tokens did."""


@dataclass
class UpdateTokens:
    """Per-token values of one update, also of tokens that an earlier update has used; (n, T), on the CPU."""

    coef: Tensor  # ∂L/∂log π_t, in the dtype of the statistics
    used: Tensor  # bool: loss tokens that take part
    clipped: Tensor  # int8: −1 clipped low, 0 not, 1 clipped high
    kl: Tensor  # float64, k3 [nats]
    ratio: Tensor  # float64, as defined by the method
    log_ratio: Tensor  # float64, ln π − ln π_old of the token [nats]

    @classmethod
    def zeros(cls, shape: torch.Size, dtype: torch.dtype) -> UpdateTokens:
        """No token of `shape` (n, T) takes part; `dtype` is that of the coefficients."""
        kinds = {"coef": dtype, "used": torch.bool, "clipped": torch.int8, "kl": torch.float64}
        kinds |= {"ratio": torch.float64, "log_ratio": torch.float64}
        return cls(**{name: torch.zeros(shape, dtype=kind) for name, kind in kinds.items()})

    def write(
        self,
        rows: Tensor,
        used: Tensor,
        *,
        clipped: Tensor,
        kl: Tensor,
        ratio: Tensor,
        log_ratio: Tensor,
    ) -> None:
        """Fill in the rows `rows` (m,), all but the coefficients, which the backward pass gives."""
        used = used.cpu()
        self.used[rows] = used
        for target, value in (
            (self.clipped, clipped),
            (self.kl, kl),
            (self.ratio, ratio),
            (self.log_ratio, log_ratio),
        ):
            target[rows] = torch.where(used, value.detach().cpu().to(target.dtype), 0)

    def summary(self) -> dict[str, float]:
        """`SUMMARY` over the tokens that take part; NaN without a token."""
        count = int(self.used.sum())
        if count == 0:
            return dict.fromkeys(SUMMARY, math.nan) | {"tokens": 0}
        ratio = self.ratio[self.used]
        x = self.log_ratio[self.used]  # (tokens,)
        low, high = (int((sign * self.clipped > 0).sum()) / count for sign in (-1, 1))
        kl = float((torch.expm1(x) - x).mean())
        return dict(
            zip(
                SUMMARY, (count, kl, float(ratio.min()), float(ratio.max()), low, high), strict=True
            )
        )


OPTIONAL = ("kl_coef", "entropy_coef", "ref_logp", "policy_version")
"""Fields of `StepTokens` that are NaN where they are not known."""


@dataclass
class StepTokens:
    """Values of each token in the first update that used it, and counts over all updates; (N, T), on the CPU."""

    stats: TokenStats  # of the policy at the start of the step
    weight: Tensor
    # factor for the difference between the sampler's policy and π_old; 1 without one
    correction: Tensor
    advantage: Tensor
    loss_coef: Tensor  # ∂L/∂log π_t of that update
    ratio: Tensor
    clipped: Tensor  # int8: −1 clipped low, 0 not, 1 clipped high
    update: Tensor  # int32: index of that update; −1 where no update used the token
    uses: Tensor  # int32: updates that used the token
    uses_low: Tensor  # int32: those of them in which it was clipped low
    uses_high: Tensor  # int32: those of them in which it was clipped high
    kl: Tensor  # float64: sum of k3 over the updates that used the token [nats]
    kl_coef: Tensor  # the part of loss_coef of the loss's KL term; NaN: not known
    entropy_coef: Tensor  # ∂L/∂H_t of that update; NaN: not known
    ref_logp: Tensor  # ln π of the reference policy [nats]; NaN without one
    policy_version: Tensor  # of the policy that drew the token; NaN: not known

    @classmethod
    def unused(cls, stats: TokenStats) -> StepTokens:
        """Tokens with these statistics (N, T) that no update has used yet."""
        shape = stats.logp.shape
        real = stats.logp.dtype
        kinds = dict.fromkeys(("weight", "advantage", "loss_coef", "ratio"), real) | {
            "clipped": torch.int8
        }
        kinds |= dict.fromkeys(("uses", "uses_low", "uses_high"), torch.int32) | {
            "kl": torch.float64
        }
        return cls(
            stats=stats,
            correction=torch.ones(shape, dtype=real),
            update=torch.full(shape, -1, dtype=torch.int32),
            **{name: torch.zeros(shape, dtype=kind) for name, kind in kinds.items()},
            **{name: torch.full(shape, math.nan, dtype=real) for name in OPTIONAL},
        )

    def rows(self, index: Tensor) -> StepTokens:
        """The tokens of the completions `index` (n,)."""
        stats = TokenStats(**{name: values[index] for name, values in vars(self.stats).items()})
        own = {name: values[index] for name, values in vars(self).items() if name != "stats"}
        return StepTokens(stats=stats, **own)

    def count(self, rows: Tensor, tokens: UpdateTokens) -> None:
        """Count an update of the rows `rows` (n,) that was made."""
        self.uses[rows] += tokens.used.int()
        self.uses_low[rows] += (tokens.clipped < 0).int()
        self.uses_high[rows] += (tokens.clipped > 0).int()
        self.kl[rows] += tokens.kl


@dataclass(frozen=True)
class UpdateRotation:
    """An update compared with the update of the reference objective (`reference_method`) from the same state."""

    gradient: Rotation  # of the gradient that the optimizer gets, before clipping
    update: Rotation  # of the optimizer's step, momentum, clipping and weight decay included
    noise: float  # `noise_rotation` of the reference gradient, from two halves of the prompts; NaN for one prompt
    seconds: float


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """One optimizer step; norms are L2 over all trainable parameters, before clipping."""

    loss: float = math.nan
    grad_norm: float  # of the gradient that the optimizer gets
    plain_norm: float  # of the loss's own gradient, which probes see; they differ where a method reshapes it (SAM)
    update_norm: float
    clip_factor: float
    skipped: bool = False
    problem: str = ""  # what is not finite; empty if all is
    broken: bool = False  # the model's weights are not finite
    lr: float = math.nan
    batch_share: float = (
        math.nan
    )  # of the step, not the momentum's (`tokens.optimizer_steps.batch_share`)
    # of its tokens; None if its gradient could not be computed
    summary: dict[str, float] | None = None
    entropy: float | None = None  # mean over its tokens [nats]; None without an entropy bonus
    rotation: UpdateRotation | None = None  # where it was measured
    # norms of gradient and update by layer and kind
    layers: tuple[dict[str, float], dict[str, float]] | None = None


@dataclass(frozen=True)
class StepResult:
    """The updates of a step and what its tokens did in them."""

    updates: list[UpdateResult]
    tokens: StepTokens
    warnings: tuple[str, ...] = ()  # of the method
    corrected: bool = False  # whether the tokens have a factor for the sampler's policy
    # KL(π_old‖π) of the whole step [nats / token]; None if not measured
    kl_step: float | None = None
    later_uses: Mapping[str, np.ndarray] | None = None
    """Columns of the table uses without `step`: tokens in updates after their first; None without any."""


@dataclass(frozen=True)
class PendingUpdate:
    """An update between its gradient and the optimizer's step; n rows."""

    index: int  # within the step, from 0
    rows: Tensor  # (n,) indices into the step's rollouts
    first_use: Tensor  # (n, T) bool, on the CPU: loss tokens that this update is the first of the step to use
    loss_coef: Tensor  # (n, T), ∂L/∂log π_t
    grad_norm: float
    # how the gradient will be clipped; None: the optimizer gets another gradient, or it is not known
    clips: tuple[Clip, ...] | None = None


def step_tensors(
    rollouts: Rollouts,
    advantage: Tensor,
    stats: TokenStats,
    old_logp: Tensor,
    progress: float,
    method: Method,
) -> StepTensors:
    """What the objective needs of a step: rollouts (N, T), `advantage` (N,) or (N, T), the statistics at its start."""
    mask = rollouts.completion_mask
    return StepTensors(
        mask=mask,
        group=rollouts.group,
        advantage=advantage.to(stats.logp),
        behavior_logp=old_logp,
        logp=stats.logp,
        logit=stats.logit,
        entropy=stats.entropy,
        collision=stats.collision,
        polarity=stats.polarity,
        progress=progress,
        sampler_logp=rollouts.behavior_logp,
        gradient_mass=gradient_mass(method, mask, advantage, stats.logit_grad_norm),
    )
