"""Quantities fixed once per step: token weights and their summary, selections and passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sharpscope.config.method import (
    Correction,
    KlCovPenalty,
    LpRegPenalty,
    Method,
    TruncatedCorrection,
)
from sharpscope.config.selections import (
    AdvantageTokens,
    BinTokens,
    ClipCovTokens,
    CurvatureTokens,
    HighEntropyTokens,
    ProbabilityTokens,
    RelativeSurpriseTokens,
    SpuriousTokens,
    SuffixTokens,
)
from sharpscope.config.token_weights import TokenWeight
from sharpscope.config.weighting import Weighting, number, percentile, top_tokens
from sharpscope.objective.values import Plan, StepTensors


@torch.no_grad()
def token_weights(spec: Weighting, step: StepTensors, generator: torch.Generator | None = None) -> Tensor:
    """Token weights (N, T) of a step, ≥ 0 and finite, 0 outside the mask. Schedules are resolved at `step.progress`.

    Raises:
        UserError: a custom function returns a wrong type, shape, sign or value.
        NonFiniteError: a weight is not finite.
        ValueError: the weighting is not calibrated, or `shuffled` has no generator.
    """
    return spec.at(step.progress).evaluate(step, torch, generator)


def calibrate(weighting: TokenWeight, step: StepTensors) -> TokenWeight:
    """The weighting with every constant filled in, as run.json stores it; constants that are given are kept. Idempotent.

    Sigmoid and entropy: tau and u0 from the step's 10th and 90th percentiles (`_Sigmoid.calibrated`); polarity: the step's
    mean entropy. Other weightings have nothing to fill in. Schedules are read at `step.progress`.

    Raises:
        UserError: the step has nothing to calibrate on.
        ValueError: percentiles over the gradient are asked for, and `step.gradient_mass` is None.
    """
    return weighting.calibrated(step, torch)


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
    if isinstance(method.penalty, KlCovPenalty):
        chosen = top_tokens(step.covariance, mask, count=_share_count("kl_cov", method.penalty.share, mask, warnings))
        penalty = torch.where(chosen, float(method.penalty.coef), penalty)  # type: ignore[arg-type]
    proxy = torch.zeros_like(penalty)
    if isinstance(method.penalty, LpRegPenalty):
        chosen = _protected(method.penalty, step, mask, warnings)
        penalty = torch.where(chosen, float(method.penalty.coef), penalty)  # type: ignore[arg-type]
        proxy = torch.where(chosen, step.proxy_logp, 0.0).to(dtype)  # type: ignore[arg-type]
    if step.sampler_logp is None and method.correction is not None:
        raise ValueError("method.correction needs the sampler's log-probabilities")
    sampler = step.behavior_logp if step.sampler_logp is None else step.sampler_logp
    old = sampler if getattr(method.ratio, "to", "old") == "sampler" else step.behavior_logp
    return Plan(
        mask=mask,
        advantage=torch.where(mask, step.token_advantage.to(dtype), 0.0),
        weight=token_weights(method.weight, step, generator),
        keep=_kept(method, step, mask, generator, warnings),
        pass_index=_passes(method, step, mask),
        penalty=penalty,
        proxy_logp=proxy,
        behavior_logp=torch.where(mask, old, 0.0).to(dtype),
        sampler_logp=torch.where(mask, sampler, 0.0).to(dtype),
        correction=_correction(method.correction, torch.where(mask, step.behavior_logp - sampler, 0.0).to(dtype), mask),
        progress=step.progress,
        warnings=tuple(warnings),
    )


def _protected(spec: LpRegPenalty, step: StepTensors, mask: Tensor, warnings: list[str]) -> Tensor:
    """(N, T) bool: the least likely loss tokens with A < 0, without those that the filtered policy leaves out."""
    if step.proxy_logp is None:
        raise ValueError("method.penalty.kind=lp_reg needs proxy_logp")
    negative = mask & (step.token_advantage < 0)
    if not bool(negative.any()):
        return negative
    count = _share_count("lp_reg", spec.share, negative, warnings)
    return top_tokens(-step.logp, negative, count=count) & torch.isfinite(step.proxy_logp)


def _correction(spec: Correction | None, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """(N, T) factor of the surrogate from ln ρ (N, T), ρ = π_old/μ; 1 outside the mask where the factor is per token."""
    if spec is None:
        return torch.ones_like(log_ratio)
    total = log_ratio.sum(-1, keepdim=True)  # (N, 1)
    ratio = (log_ratio if spec.level == "token" else total.expand_as(log_ratio)).exp()
    if isinstance(spec, TruncatedCorrection):
        return ratio.clamp(max=spec.high)
    return torch.where((ratio >= spec.low) & (ratio <= spec.high), ratio, 0.0)


def _kept(
    method: Method, step: StepTensors, mask: Tensor, generator: torch.Generator | None, warnings: list[str]
) -> Tensor:
    """(N, T) bool: loss tokens that take part in the surrogate."""
    match tokens := method.tokens:
        case None:
            return mask
        case ProbabilityTokens():
            low = step.logp.exp() < tokens.threshold
            return mask & (low if tokens.side == "low" else ~low)
        case AdvantageTokens():
            return mask & (step.token_advantage > 0 if tokens.sign == "positive" else step.token_advantage < 0)
        case HighEntropyTokens():
            rows = [(step.entropy, mask)]
            if tokens.over == "completion":
                rows = list(zip(step.entropy, mask, strict=True))
            share = number(tokens.share)
            chosen = [top_tokens(h, m, count=math.ceil(share * int(m.sum()) - 1e-9)) for h, m in rows]
            return chosen[0] if tokens.over == "step" else torch.stack(chosen)
        case SuffixTokens():
            count = mask.sum(1, keepdim=True).double()  # (N, 1)
            left_out = (number(tokens.context) * count + 1e-9).floor().minimum(count - 1)
            return mask & (mask.cumsum(1) > left_out)
        case BinTokens():
            bins = token_bins(step)
            binned = torch.stack([bins[name] for name in tokens.include or tokens.exclude]).any(0)
            return binned if tokens.include else mask & ~binned
        case RelativeSurpriseTokens():
            ratio = -step.logp / (step.entropy + 1e-8)
            return mask & (ratio >= tokens.low) & (ratio <= tokens.high)
        case CurvatureTokens():
            if step.curvature is None:
                raise ValueError("method.tokens.kind=curvature needs curvature")
            objective, kl = step.curvature.unbind(-1)
            return mask & (objective.abs() < tokens.max_objective) & (kl < tokens.max_kl)
        case ClipCovTokens():
            if generator is None:
                raise ValueError("Clip-Cov's draw needs a generator")
            size = _share_count("clip_cov", tokens.share, mask, warnings)
            places = (
                mask & (step.covariance > tokens.low) & (step.covariance < tokens.high)
            ).nonzero()  # (candidates, 2)
            order = torch.randperm(len(places), generator=generator, device=generator.device)[:size].to(mask.device)
            keep = mask.clone()
            keep[tuple(places[order].T)] = False
            return keep
        case SpuriousTokens():
            rare = mask & (step.token_advantage > 0) & (step.logp < math.log(tokens.probability))
            if not bool(rare.any()):
                return mask
            return mask & ~(rare & (step.entropy < percentile(step.entropy, rare, 100 * tokens.quantile)))


def token_bins(step: StepTensors) -> dict[str, Tensor]:
    """Loss tokens (N, T) bool by bin: sign of A (pos, neg), and π at least Σ_v π_v² (peak) or below (valley). See `BinTokens`."""
    mask, advantage = step.mask.bool(), step.token_advantage
    peak = step.logp.exp() >= step.collision
    signs = {"pos": mask & (advantage > 0), "neg": mask & (advantage < 0)}
    kinds = {"peak": peak, "valley": ~peak}
    return {f"{sign}_{kind}": one & other for sign, one in signs.items() for kind, other in kinds.items()}


def _passes(method: Method, step: StepTensors, mask: Tensor) -> Tensor:
    """(N, T) int8: the pass of each loss token, −1 outside the mask. Lopti: π_old < |eta| first, reversed for eta < 0."""
    index = torch.zeros(mask.shape, dtype=torch.int8, device=mask.device)
    if method.passes is not None:
        rare = step.logp.exp() < abs(method.passes.eta)
        index = (rare if method.passes.eta < 0 else ~rare).to(torch.int8)
    return torch.where(mask, index, -1)


def _share_count(name: str, share: float, mask: Tensor, warnings: list[str]) -> int:
    """floor(share × loss tokens), at least 1, as the authors do; less than one token is worth a warning."""
    tokens = share * int(mask.sum())
    if tokens < 1:
        warnings.append(
            f"{name}: share {share:g} of a step's tokens is less than one token; one is taken; raise the share"
        )
    return max(int(tokens + 1e-9), 1)


@dataclass(frozen=True)
class WeightSummary:
    """Mean of the token weights over loss tokens, and the shares at L and at U (None for a weighting without bounds)."""

    mean: float
    saturation_low: float | None
    saturation_high: float | None


def summarize_weights(
    weighting: Weighting, weight: Tensor, mask: Tensor, *, progress: float = 0.0, mass: Tensor | None = None
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
    bounds = weighting.at(progress).bounds
    return WeightSummary(
        mean=float((share * w).sum()),
        saturation_low=None if bounds is None else float(share[w <= bounds[0] + 1e-6].sum()),
        saturation_high=None if bounds is None else float(share[w >= bounds[1] - 1e-6].sum()),
    )
