"""Inputs and outputs of an objective: `StepTensors`, `Plan`, `LossOutput`. N completions of up to T tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

#: Columns of the `tokens` table that a weighting may read.
TOKEN_COLUMNS = ("behavior_logp", "logp", "logit", "entropy", "collision", "polarity")


@dataclass(frozen=True)
class StepTensors:
    """One step's completions and their statistics under the policy at the START of the step.

    That policy is π_old: it stays fixed over the step's updates, and so does everything derived from it (weights,
    covariances, masks). This is our choice; on the first update it is the current policy.

    Attributes:
        mask: (N, T) bool or 0/1, true where the policy chose the token and it counts in the loss.
        group: (N,) integer, the prompt that a completion answers.
        advantage: from `estimate_advantages`: (N,) one for each completion, or (N, T) one for each token.
        behavior_logp: (N, T) [nats] the denominator of the ratio: under π_old, or as sampled where nothing else is known.
        logp: (N, T) [nats] under π_old.
        logit: (N, T) undivided logit of the sampled token under π_old.
        entropy: (N, T) [nats].
        collision: (N, T) Σ_j p_j².
        polarity: (N, T) the bracket of the entropy-change formula, ΔH = −η·A·polarity.
        progress: share of the training done, in [0, 1], for schedules.
        sampler_logp: (N, T) [nats] as the sampler drew the tokens, before top-p and top-k; None: not known.
        gradient_mass: (N, T) from `gradient_mass`: the size of each token's gradient by its logits at weight 1, up to a
            common factor; None: not known.
        proxy_logp: (N, T) [nats] under π_old without tokens below `PROXY_MIN_P`, renormalized; −inf for a token that
            is left out; None: not computed.
        curvature: (N, T, 2) m_H and m_F of `CurvatureTokens`; None: not computed.

    Values at masked-out places are never read, so they may be anything.
    """

    mask: Tensor
    group: Tensor
    advantage: Tensor
    behavior_logp: Tensor
    logp: Tensor
    logit: Tensor
    entropy: Tensor
    collision: Tensor
    polarity: Tensor
    progress: float = 0.0
    sampler_logp: Tensor | None = None
    gradient_mass: Tensor | None = None
    proxy_logp: Tensor | None = None
    curvature: Tensor | None = None

    def __post_init__(self) -> None:
        if self.mask.dim() != 2:
            raise ValueError(f"mask must be (N, T), is {tuple(self.mask.shape)}")
        rows = self.mask.shape[0]
        for field in fields(self):
            value = getattr(self, field.name)
            each = field.name == "group" or (field.name == "advantage" and self.advantage.dim() == 1)
            wanted = (rows,) if each else tuple(self.mask.shape)
            wanted += (2,) if field.name == "curvature" else ()
            if isinstance(value, Tensor) and tuple(value.shape) != wanted:
                raise ValueError(f"{field.name} must be {wanted}, is {tuple(value.shape)}")
        if not 0.0 <= self.progress <= 1.0:
            raise ValueError(f"progress must be in [0, 1], is {self.progress}")

    @property
    def token_advantage(self) -> Tensor:
        """(N, T) advantage of each token; outside the mask it may be anything."""
        return per_token(self.advantage, self.mask)

    @property
    def covariance(self) -> Tensor:
        """c_t = (ln π_t − mean ln π)·(A_t − mean A) over the step's loss tokens, (N, T) float64, 0 outside the mask.

        Its mean is the covariance that drives the entropy (arXiv 2505.22617). [nats × advantage]
        """
        mask, advantage, logp = self.mask.bool(), self.token_advantage.double(), self.logp.double()
        product = (logp - logp[mask].mean()) * (advantage - advantage[mask].mean())
        return torch.where(mask, product, 0.0)

    @property
    def mass(self) -> Tensor:
        """`gradient_mass` (N, T).

        Raises:
            ValueError: it is not known.
        """
        if self.gradient_mass is None:
            raise ValueError("a weighting counts tokens by their gradient: StepTensors needs gradient_mass")
        return self.gradient_mass

    def rows(self, index: Tensor | slice) -> StepTensors:
        """The same for the completions `index` (any index of a tensor's first dimension)."""
        return StepTensors(**{f.name: _rows(getattr(self, f.name), index) for f in fields(self)})

    @classmethod
    def from_columns(cls, *, advantage: Tensor | None = None, progress: float = 0.0, **columns: Tensor) -> StepTensors:
        """One token per row, from 1-D columns of equal length such as those of the `tokens` table.

        A column that is missing is NaN, so that a weighting that needs it raises; a missing advantage is 1.
        """
        unknown = set(columns) - set(TOKEN_COLUMNS)
        if unknown or not columns:
            raise ValueError(f"columns must be some of {', '.join(TOKEN_COLUMNS)}; unknown: {sorted(unknown)}")
        like = next(iter(columns.values()))
        missing = torch.full_like(like, torch.nan)
        n = like.shape[0]
        return cls(
            mask=torch.ones(n, 1, dtype=torch.bool, device=like.device),
            group=torch.arange(n, device=like.device),
            advantage=torch.ones_like(like) if advantage is None else advantage,
            progress=progress,
            **{name: columns.get(name, missing)[:, None] for name in TOKEN_COLUMNS},  # (n,) -> (n, 1)
        )


@dataclass(frozen=True)
class Plan:
    """Tensors computed once per step and fixed over its updates; each is (N, T) and without gradient.

    Attributes:
        mask: bool, loss tokens.
        advantage: of each token, before weights; 0 outside the mask.
        weight: token weight w ≥ 0; 0 outside the mask.
        keep: bool, tokens that take part in the surrogate (all loss tokens, or those that a token selection leaves).
        pass_index: int8, the optimizer pass a token belongs to; −1 outside the mask.
        penalty: coefficient of the extra divergence of a token (KL-Cov, Lp-Reg), else 0.
        proxy_logp: log-probability under the filtered policy that Lp-Reg compares with [nats]; 0 where it has no penalty.
        behavior_logp: denominator of the ratio [nats].
        sampler_logp: log-probability under the policy that drew the token [nats]; `behavior_logp` where it is not known.
        correction: factor of the surrogate for the difference between those two; 1 without a correction.
        progress: share of the training done, at which the method's schedules are read.
        warnings: what a person should know about this step; each text is the same at every step, so it can be shown
            once.
    """

    mask: Tensor
    advantage: Tensor
    weight: Tensor
    keep: Tensor
    pass_index: Tensor
    penalty: Tensor
    proxy_logp: Tensor
    behavior_logp: Tensor
    sampler_logp: Tensor
    correction: Tensor
    progress: float = 0.0
    warnings: tuple[str, ...] = ()

    def rows(self, index: Tensor | slice) -> Plan:
        """The same for the completions `index` (any index of a tensor's first dimension)."""
        return Plan(**{f.name: _rows(getattr(self, f.name), index) for f in fields(self)})

    def pass_mask(self, pass_index: int) -> Tensor:
        """(N, T) bool: the loss tokens of one optimizer pass."""
        return self.pass_index == pass_index


@dataclass(frozen=True)
class LossOutput:
    """This microbatch's share of one update's loss, and what happened to each token (all but `loss` are detached).

    Attributes:
        loss: scalar with gradient; the loss of an update is the sum over its microbatches.
        ratio: (n, T) the ratio that is clipped, before any weight: token's, sequence's or power mean; 1 outside the
            mask.
        clipped: (n, T) int8: −1 where the lower bound acts, 1 where the upper bound does, else 0. For `ppo` these are
            the tokens whose surrogate has no gradient; for `cispo` those whose coefficient is bounded.
        kl: (n, T) [nats] k3 against the reference policy, unweighted; 0 without a reference and outside the mask.
        divergence: scalar with gradient, the KL term of `loss`; None without one.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor
    divergence: Tensor | None = None


def per_token(advantage: Tensor, like: Tensor) -> Tensor:
    """Advantages (N,) or (N, T) in the shape (N, T) of `like`, without a copy."""
    return (advantage[:, None] if advantage.dim() == 1 else advantage).expand(like.shape)  # (N,) -> (N, 1) -> (N, T)


def _rows(value: Any, index: Tensor | slice) -> Any:
    return value[index] if isinstance(value, Tensor) else value
