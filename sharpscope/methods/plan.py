"""What an objective gets and returns, and what is fixed once per step: token weights, selections and passes.

N completions of up to T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from sharpscope.methods import method as parts
from sharpscope.methods.method import Method
from sharpscope.methods.token_weights import TokenWeight, Weighting, number, percentile, top_tokens

#: Columns of the `tokens` table that a weighting may read.
TOKEN_COLUMNS = ("behavior_logp", "logp", "logit", "entropy", "collision", "polarity")


@dataclass(frozen=True)
class ByRow:
    """Tensors with a row for each completion."""

    def rows(self, index: Tensor | slice) -> Self:
        """The same for the completions `index` (any index of a tensor's first dimension)."""
        return replace(
            self,
            **{
                name: value[index]
                for name, value in vars(self).items()
                if isinstance(value, Tensor)
            },
        )


@dataclass(frozen=True)
class StepTensors(ByRow):
    """One step's completions and their statistics under the policy at the START of the step.

    That policy is π_old: it stays fixed over the step's updates, and so does everything derived from it (weights,
    covariances, masks). This is our choice; on the first update it is the current policy. Values at masked-out places are never
    read, so they may be anything.
    """

    mask: Tensor  # (N, T) bool or 0/1, true where the policy chose the token and it counts in the loss
    group: Tensor  # (N,) integer, the prompt that a completion answers
    advantage: Tensor  # from `estimate_advantages`: (N,) one for each completion, or (N, T) one for each token
    behavior_logp: Tensor  # (N, T) [nats] denominator of the ratio: under π_old, or as sampled if nothing else is known
    logp: Tensor  # (N, T) [nats] under π_old
    logit: Tensor  # (N, T) undivided logit of the sampled token under π_old
    entropy: Tensor  # (N, T) [nats]
    collision: Tensor  # (N, T) Σ_j p_j²
    polarity: Tensor  # (N, T) the bracket of the entropy-change formula, ΔH = −η·A·polarity
    progress: float = 0.0  # share of the training done, in [0, 1], for schedules
    # (N, T) [nats] as the sampler drew the tokens, before top-p; None: not known
    sampler_logp: Tensor | None = None
    # (N, T) from `gradient_mass`, the size of each token's gradient
    gradient_mass: Tensor | None = None
    # (N, T) [nats] under the policy that Lp-Reg filters; −inf: left out
    proxy_logp: Tensor | None = None
    curvature: Tensor | None = None  # (N, T, 2) m_H and m_F of `CurvatureTokens`
    # (N, T) [nats] under the averaged policy of `AveragedProximal`; None: π_old
    proximal_logp: Tensor | None = None
    # (N, T) effect of each token on the outcome of `EffectWeight`, in its unit
    effect: Tensor | None = None

    def __post_init__(self) -> None:
        if self.mask.dim() != 2:
            raise ValueError(f"mask must be (N, T), is {tuple(self.mask.shape)}")
        rows = self.mask.shape[0]
        for field in fields(self):
            value = getattr(self, field.name)
            each = field.name == "group" or (
                field.name == "advantage" and self.advantage.dim() == 1
            )
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
        mask = self.mask.bool()
        product = _centered(self.logp, mask) * _centered(self.token_advantage, mask)
        return torch.where(mask, product, 0.0)

    @property
    def mass(self) -> Tensor:
        """`gradient_mass` (N, T)."""
        if self.gradient_mass is None:
            raise ValueError(
                "a weighting counts tokens by their gradient: StepTensors needs gradient_mass"
            )
        return self.gradient_mass

    @classmethod
    def from_columns(
        cls,
        *,
        advantage: Tensor | None = None,
        progress: float = 0.0,
        **columns: Tensor,
    ) -> StepTensors:
        """One token per row, from 1-D columns of equal length such as those of the `tokens` table.

        A column that is missing is NaN, so that a weighting that needs it raises; a missing advantage is 1.
        """
        if not columns or columns.keys() - set(TOKEN_COLUMNS):
            raise ValueError(
                f"columns must be some of {', '.join(TOKEN_COLUMNS)}, not {', '.join(columns) or 'none'}"
            )
        like = next(iter(columns.values()))
        missing = torch.full_like(like, torch.nan)
        n = like.shape[0]
        return cls(
            mask=torch.ones(n, 1, dtype=torch.bool, device=like.device),
            group=torch.arange(n, device=like.device),
            advantage=torch.ones_like(like) if advantage is None else advantage,
            progress=progress,
            **{
                name: columns.get(name, missing)[:, None] for name in TOKEN_COLUMNS
            },  # (n,) -> (n, 1)
        )


@dataclass(frozen=True)
class Plan(ByRow):
    """Tensors computed once per step, fixed over its updates but for a center that moves; each is (N, T) and without gradient."""

    mask: Tensor  # bool, loss tokens
    advantage: Tensor  # of each token, before weights; 0 outside the mask
    weight: Tensor  # token weight w ≥ 0; 0 outside the mask
    keep: Tensor  # bool, tokens that take part in the surrogate: loss tokens that the token selection leaves
    pass_index: Tensor  # int8, the optimizer pass a token belongs to; −1 outside the mask
    penalty: Tensor  # 1 where a token has an extra divergence (KL-Cov, Lp-Reg), else 0
    proxy_logp: Tensor  # under the filtered policy that Lp-Reg compares with [nats]; 0 where it has no penalty
    behavior_logp: (
        Tensor  # denominator of the ratio [nats], or of π_prox/π_old with a proximal policy
    )
    proximal_logp: Tensor  # under the policy that the clip is centered on [nats]
    # under the policy that drew the token [nats]; `behavior_logp` where it is not known
    sampler_logp: Tensor
    correction: Tensor  # factor of the surrogate for the difference between those two; 1 without a correction
    progress: float = 0.0  # share of the training done, at which the method's schedules are read
    # what a person should know; the same text at every step, so it can be shown once
    warnings: tuple[str, ...] = ()

    def pass_mask(self, pass_index: int) -> Tensor:
        """(N, T) bool: the loss tokens of one optimizer pass."""
        return self.pass_index == pass_index


@dataclass(frozen=True)
class LossOutput:
    """This microbatch's share of one update's loss, and what happened to each token (all but `loss` are detached)."""

    loss: Tensor  # scalar with gradient; the loss of an update is the sum over its microbatches
    # (n, T) the ratio that is clipped, to π_prox if there is one, before any weight; 1 outside the mask
    ratio: Tensor
    # (n, T) int8: −1 where the lower bound acts, 1 where the upper bound does, else 0
    clipped: Tensor
    kl: Tensor  # (n, T) [nats] k3 against the reference policy, unweighted; 0 without a reference and outside the mask
    # scalar with gradient, the KL term of `loss`; None without one
    divergence: Tensor | None = None


def _centered(value: Tensor, mask: Tensor) -> Tensor:
    """`value` (N, T) less its mean over the mask, float64; exactly 0 where they differ by rounding alone."""
    value = value.double()
    inside = value[mask]
    difference = value - inside.mean()
    rounding = 1e-12 * inside.abs().amax() if len(inside) else 0.0
    return torch.where(difference.abs() > rounding, difference, 0.0)


def per_token(advantage: Tensor, like: Tensor) -> Tensor:
    """Advantages (N,) or (N, T) in the shape (N, T) of `like`, without a copy."""
    # (N,) -> (N, 1) -> (N, T)
    return (advantage[:, None] if advantage.dim() == 1 else advantage).expand(like.shape)


@torch.no_grad()
def token_weights(
    spec: Weighting,
    step: StepTensors,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Token weights (N, T) of a step, ≥ 0 and finite, 0 outside the mask. Schedules are resolved at `step.progress`."""
    return spec.at(step.progress).evaluate(step, torch, generator)


def calibrate(weighting: TokenWeight, step: StepTensors) -> TokenWeight:
    """The weighting with every constant filled in from a step, as run.json stores it; constants that are given are kept."""
    return weighting.changed(lambda weight: weight.calibrated(step, torch))


@torch.no_grad()
def prepare(method: Method, step: StepTensors, generator: torch.Generator | None = None) -> Plan:
    """Weights, token selection and passes of a step from the statistics of π_old; they stay fixed over its updates.

    Means, covariances and quantiles run over all loss tokens of the step, never a microbatch. `shuffled` weights and
    Clip-Cov's draw need a generator.

    Raises:
        UserError: weights are negative, or a custom function returns something else than weights.
        NonFiniteError: a weight is not finite.
        ValueError: the weights are not calibrated, or a generator or the sampler's log-probabilities are needed and
            missing.
    """
    method = method.at(step.progress)
    mask = step.mask.bool()
    dtype = step.logp.dtype
    warnings: list[str] = []
    penalty = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    if isinstance(method.penalty, parts.KlCovPenalty):
        chosen = top_tokens(
            step.covariance,
            mask,
            count=_share_count("kl_cov", method.penalty.share, mask, warnings),
        )
        penalty = torch.where(chosen, 1.0, penalty)
    proxy = torch.zeros_like(penalty)
    if isinstance(method.penalty, parts.LpRegPenalty):
        chosen = _protected(method.penalty, step, mask, warnings)
        penalty = torch.where(chosen, 1.0, penalty)
        proxy = torch.where(chosen, step.proxy_logp, 0.0).to(dtype)  # type: ignore[arg-type]
    if step.sampler_logp is None and method.correction is not None:
        raise ValueError("method.correction needs the sampler's log-probabilities")
    sampler = step.behavior_logp if step.sampler_logp is None else step.sampler_logp
    second = step.logp.exp() >= (math.inf if method.passes is None else method.passes)
    old = sampler if getattr(method.ratio, "to", "old") == "sampler" else step.behavior_logp
    center = old if method.proximal is None or step.proximal_logp is None else step.proximal_logp
    return Plan(
        mask=mask,
        advantage=torch.where(mask, step.token_advantage.to(dtype), 0.0),
        weight=token_weights(method.weight, step, generator),
        keep=_kept(method, step, mask, generator, warnings),
        pass_index=torch.where(mask, second.to(torch.int8), -1),
        penalty=penalty,
        proxy_logp=proxy,
        behavior_logp=torch.where(mask, old, 0.0).to(dtype),
        proximal_logp=torch.where(mask, center, 0.0).to(dtype),
        sampler_logp=torch.where(mask, sampler, 0.0).to(dtype),
        correction=_correction(
            method.correction,
            torch.where(mask, step.behavior_logp - sampler, 0.0).to(dtype),
            mask,
        ),
        progress=step.progress,
        warnings=tuple(warnings),
    )


def _protected(
    spec: parts.LpRegPenalty,
    step: StepTensors,
    mask: Tensor,
    warnings: list[str],
) -> Tensor:
    """(N, T) bool: the least likely loss tokens with A < 0, without those that the filtered policy leaves out."""
    if step.proxy_logp is None:
        raise ValueError("method.penalty.kind=lp_reg needs proxy_logp")
    negative = mask & (step.token_advantage < 0)
    if not bool(negative.any()):
        return negative
    count = _share_count("lp_reg", spec.share, negative, warnings)
    return top_tokens(-step.logp, negative, count=count) & torch.isfinite(step.proxy_logp)


def _correction(spec: parts.Correction | None, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """(N, T) factor of the surrogate from ln ρ (N, T), ρ = π_old/μ; 1 outside the mask where the factor is per token."""
    if spec is None:
        return torch.ones_like(log_ratio)
    total = log_ratio.sum(-1, keepdim=True)  # (N, 1)
    ratio = (log_ratio if spec.level == "token" else total.expand_as(log_ratio)).exp()
    if isinstance(spec, parts.TruncatedCorrection):
        return ratio.clamp(max=spec.high)
    return torch.where((ratio >= spec.low) & (ratio <= spec.high), ratio, 0.0)


def _kept(
    method: Method,
    step: StepTensors,
    mask: Tensor,
    generator: torch.Generator | None,
    warnings: list[str],
) -> Tensor:
    """(N, T) bool: loss tokens that take part in the surrogate."""
    match tokens := method.tokens:
        case None:
            return mask
        case parts.ProbabilityTokens():
            low = step.logp.exp() < 0.5
            return mask & (low if tokens.side == "low" else ~low)
        case parts.AdvantageTokens():
            return mask & (step.token_advantage > 0)
        case parts.HighEntropyTokens():
            rows = [(step.entropy, mask)]
            if tokens.over == "completion":
                rows = list(zip(step.entropy, mask, strict=True))
            share = number(tokens.share)
            chosen = [
                top_tokens(h, m, count=math.ceil(share * int(m.sum()) - 1e-9)) for h, m in rows
            ]
            return chosen[0] if tokens.over == "step" else torch.stack(chosen)
        case parts.SuffixTokens():
            count = mask.sum(1, keepdim=True).double()  # (N, 1)
            left_out = (number(tokens.context) * count + 1e-9).floor().minimum(count - 1)
            return mask & (mask.cumsum(1) > left_out)
        case parts.BinTokens():
            bins = token_bins(step)
            return torch.stack([bins[name] for name in tokens.include]).any(0)
        case parts.RelativeSurpriseTokens():
            ratio = -step.logp / (step.entropy + 1e-8)
            return mask & (ratio >= tokens.low) & (ratio <= tokens.high)
        case parts.CurvatureTokens():
            if step.curvature is None:
                raise ValueError("method.tokens.kind=curvature needs curvature")
            objective, kl = step.curvature.unbind(-1)
            return mask & (objective.abs() < tokens.max_objective) & (kl < tokens.max_kl)
        case parts.ClipCovTokens():
            if generator is None:
                raise ValueError("Clip-Cov's draw needs a generator")
            size = _share_count("clip_cov", tokens.share, mask, warnings)
            inside = mask & (step.covariance > tokens.low) & (step.covariance < tokens.high)
            places = inside.nonzero()  # (candidates, 2)
            order = torch.randperm(len(places), generator=generator, device=generator.device)[
                :size
            ].to(mask.device)
            keep = mask.clone()
            keep[tuple(places[order].T)] = False
            return keep
        case parts.SpuriousTokens():
            rare = mask & (step.token_advantage > 0) & (step.logp < math.log(tokens.probability))
            if not bool(rare.any()):
                return mask
            return mask & ~(
                rare & (step.entropy < percentile(step.entropy, rare, 100 * tokens.quantile))
            )


def token_bins(step: StepTensors) -> dict[str, Tensor]:
    """Loss tokens (N, T) bool by bin: sign of A (pos, neg), and π at least Σ_v π_v² (peak) or below (valley). See `BinTokens`."""
    mask = step.mask.bool()
    advantage = step.token_advantage
    peak = step.logp.exp() >= step.collision
    signs = {"pos": mask & (advantage > 0), "neg": mask & (advantage < 0)}
    kinds = {"peak": peak, "valley": ~peak}
    return {
        f"{sign}_{kind}": one & other
        for sign, one in signs.items()
        for kind, other in kinds.items()
    }


def _share_count(name: str, share: float, mask: Tensor, warnings: list[str]) -> int:
    """floor(share × loss tokens), at least 1, as the authors do; less than one token is worth a warning."""
    tokens = share * int(mask.sum())
    if tokens < 1:
        text = f"{name}: share {share:g} of a step's tokens is less than one token; one is taken; raise the share"
        warnings.append(text)
    return max(int(tokens + 1e-9), 1)


@dataclass(frozen=True)
class WeightSummary:
    """Mean of the token weights over loss tokens, and the shares at L and at U (None for a weighting without bounds)."""

    mean: float
    saturation_low: float | None
    saturation_high: float | None


def summarize_weights(
    weighting: Weighting,
    weight: Tensor,
    mask: Tensor,
    *,
    progress: float = 0.0,
    mass: Tensor | None = None,
) -> WeightSummary:
    """Mean and saturation of `weight` (N, T) over the loss tokens; NaN (None for the saturation) without any.

    A weight within 1e-6 of a bound counts as on it. `mass` (N, T), ≥ 0: how much each token counts; None: all the same.
    """
    inside = mask.bool()
    w = weight[inside].detach().double()
    share = torch.ones_like(w) if mass is None else mass[inside].detach().double()
    if not float(share.sum()) > 0:
        return WeightSummary(math.nan, None, None)
    share = share / share.sum()
    bounds = weighting.at(progress).bounds or ()
    near = [float(share[(w - bound).abs() <= 1e-6].sum()) for bound in bounds]
    return WeightSummary(float((share * w).sum()), *(near or (None, None)))
