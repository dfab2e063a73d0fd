"""Quantities fixed once per step: token weights, selections and passes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sharpscope.config.method import (
    AdvantageTokens,
    ClipCovTokens,
    Correction,
    GeometricCorrection,
    HighEntropyTokens,
    KlCovPenalty,
    LoptiPasses,
    LpRegPenalty,
    Method,
    NoCorrection,
    ProbabilityTokens,
    SpuriousTokens,
    TruncatedCorrection,
)
from sharpscope.objective.statistics import percentile, token_covariance
from sharpscope.objective.token_weights import token_weights
from sharpscope.objective.values import Plan, StepTensors


@torch.no_grad()
def prepare(method: Method, step: StepTensors, generator: torch.Generator | None = None) -> Plan:
    """Weights, token selection and passes of a step from the statistics of π_old; they stay fixed over its updates.

    Means, covariances and quantiles run over all loss tokens of the step, never a microbatch. If `method.pointwise`, a
    subset of rows gives the same rows of the plan.

    Args:
        method: the objective, with calibrated weights.
        step: (N, T) statistics at the start of the step.
        generator: needed by `shuffled` weights and by Clip-Cov's draw.

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
        chosen = top_tokens(
            token_covariance(step), mask, count=_share_count("kl_cov", method.penalty.share, mask, warnings)
        )
        penalty = torch.where(chosen, float(method.penalty.coef), penalty)  # type: ignore[arg-type]
    proxy = torch.zeros_like(penalty)
    if isinstance(method.penalty, LpRegPenalty):
        chosen = _protected(method.penalty, step, mask, warnings)
        penalty = torch.where(chosen, float(method.penalty.coef), penalty)  # type: ignore[arg-type]
        proxy = torch.where(chosen, step.proxy_logp, 0.0).to(dtype)  # type: ignore[arg-type]
    if step.sampler_logp is None and not isinstance(method.correction, NoCorrection):
        raise ValueError("method.correction needs the sampler's log-probabilities")
    sampler = step.behavior_logp if step.sampler_logp is None else step.sampler_logp
    return Plan(
        mask=mask,
        advantage=torch.where(mask, step.token_advantage.to(dtype), 0.0),
        weight=token_weights(method.weight, step, generator),
        keep=_kept(method, step, mask, generator, warnings),
        pass_index=_passes(method, step, mask),
        penalty=penalty,
        proxy_logp=proxy,
        behavior_logp=torch.where(mask, step.behavior_logp, 0.0).to(dtype),
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


def _correction(spec: Correction, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """(N, T) factor of the surrogate from ln ρ (N, T), ρ = π_old/μ; 1 outside the mask where the factor is per token."""
    if isinstance(spec, NoCorrection):
        return torch.ones_like(log_ratio)
    total = log_ratio.sum(-1, keepdim=True)  # (N, 1)
    if isinstance(spec, GeometricCorrection):
        mean = (total / mask.sum(-1, keepdim=True).clamp(min=1)).exp()
        return ((mean >= spec.low) & (mean <= spec.high)).to(log_ratio.dtype).expand_as(log_ratio)
    ratio = (log_ratio if spec.level == "token" else total.expand_as(log_ratio)).exp()
    if isinstance(spec, TruncatedCorrection):
        return ratio.clamp(max=spec.high)
    return torch.where((ratio >= spec.low) & (ratio <= spec.high), ratio, 0.0)


def _kept(
    method: Method, step: StepTensors, mask: Tensor, generator: torch.Generator | None, warnings: list[str]
) -> Tensor:
    """(N, T) bool: loss tokens that take part in the surrogate."""
    tokens = method.tokens
    if isinstance(tokens, ProbabilityTokens):
        low = step.logp.exp() < tokens.threshold
        return mask & (low if tokens.side == "low" else ~low)
    if isinstance(tokens, AdvantageTokens):
        return mask & (step.token_advantage > 0 if tokens.sign == "positive" else step.token_advantage < 0)
    if isinstance(tokens, HighEntropyTokens):
        return top_tokens(step.entropy, mask, count=math.ceil(tokens.share * int(mask.sum()) - 1e-9))
    if isinstance(tokens, ClipCovTokens):
        if generator is None:
            raise ValueError("Clip-Cov's draw needs a generator")
        count = _share_count("clip_cov", tokens.share, mask, warnings)
        covariance = token_covariance(step)
        band = mask & (covariance > tokens.low) & (covariance < tokens.high)
        places = band.nonzero()  # (candidates, 2)
        order = torch.randperm(len(places), generator=generator, device=generator.device)[:count].to(mask.device)
        keep = mask.clone()
        keep[tuple(places[order].T)] = False
        return keep
    if isinstance(tokens, SpuriousTokens):
        rare = mask & (step.token_advantage > 0) & (step.logp < math.log(tokens.probability))
        if not bool(rare.any()):
            return mask
        pool = rare if tokens.over == "rare" else mask
        return mask & ~(rare & (step.entropy < percentile(step.entropy, pool, 100 * tokens.quantile)))
    return mask


def _passes(method: Method, step: StepTensors, mask: Tensor) -> Tensor:
    """(N, T) int8: the pass of each loss token, −1 outside the mask. Lopti: π_old < |eta| first, reversed for eta < 0."""
    index = torch.zeros(mask.shape, dtype=torch.int8, device=mask.device)
    if isinstance(method.passes, LoptiPasses):
        rare = step.logp.exp() < abs(method.passes.eta)
        index = (rare if method.passes.eta < 0 else ~rare).to(torch.int8)
    return torch.where(mask, index, -1)


def top_tokens(value: Tensor, mask: Tensor, *, count: int) -> Tensor:
    """(N, T) bool: the `count` loss tokens with the largest value, and all that tie with the last of them."""
    inside = value[mask]
    if inside.numel() == 0:
        return mask
    count = min(max(count, 1), inside.numel())
    return mask & (value >= inside.topk(count).values.min())


def _share_count(name: str, share: float, mask: Tensor, warnings: list[str]) -> int:
    """floor(share × loss tokens), at least 1, as the authors do; less than one token is worth a warning."""
    tokens = share * int(mask.sum())
    if tokens < 1:
        warnings.append(
            f"{name}: share {share:g} of a step's tokens is less than one token; one is taken; raise the share"
        )
    return max(int(tokens + 1e-9), 1)
