"""The loss of one microbatch: ratio, weight, clip, divergence terms, aggregation. Pure functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sharpscope.methods import method as parts
from sharpscope.methods.method import Method
from sharpscope.methods.plan import LossOutput, Plan, per_token
from sharpscope.methods.token_weights import TokenWeight

LARGEST_LOG_RATIO = 80.0
"""e^80 still fits in float32; an infinite ratio would turn the zero gradient of a clipped token into NaN [nats]."""


def policy_loss(
    method: Method,
    plan: Plan,
    logp: Tensor,
    normalizer: Tensor,
    *,
    reference_logp: Tensor | None = None,
    pass_index: int = 0,
) -> LossOutput:
    """This microbatch's share of an update's loss; ∂loss/∂logp is the token's `loss_coef`.

    With x_t = w_t·r_t (`weight_on=ratio`) or r_t, S(x, A) the clipped objective, c_t the normalizer and P the tokens of
    this pass: loss = Σ_{t ∈ P} c_t·{ −keep_t·[w_t]·b_t·S(x_t, A_t) + penalty_t·D_t + β·[w_t]·k_t }, where [w_t] is the
    weight where it belongs and 1 elsewhere, D_t the divergence of KL-Cov or Lp-Reg, k_t the estimator `kl.estimator`
    and b_t the sampler correction. With a `proximal` policy r_t is π/π_prox and S is multiplied by π_prox/π_old. No gradient
    flows through w, b, π_prox, the masks or the bounds.

    `plan` and `normalizer` have the microbatch's rows of those of the whole update; `logp` and `reference_logp` (needed for
    a KL term) are (n, T) [nats]; `pass_index` is which of the `pass_count` optimizer passes this update is.

    Raises:
        ValueError: shapes differ, or log-probabilities that the method needs are missing.
    """
    method = method.at(plan.progress)
    mask = plan.mask
    if logp.shape != mask.shape or normalizer.shape != mask.shape:
        raise ValueError(
            f"logp {tuple(logp.shape)}, normalizer {tuple(normalizer.shape)} and plan {tuple(mask.shape)} must agree"
        )
    if method.kl.coef > 0 and reference_logp is None:
        raise ValueError("this method needs reference_logp: kl.coef is not 0")
    # (n, T); masked-out tokens are in no pass
    active = torch.where(plan.pass_index == pass_index, normalizer, 0.0)
    logp = torch.where(mask, logp, 0.0)  # values outside the mask may be anything, also not finite
    center = plan.behavior_logp if method.proximal is None else plan.proximal_logp
    log_ratio = torch.where(mask, logp - center, 0.0).clamp(max=LARGEST_LOG_RATIO)
    ratio = importance_ratio(method.ratio, log_ratio, mask)

    weight = plan.weight
    vespo = method.clip is not None and method.clip.kind == "vespo"
    if isinstance(method.clip, parts.GmpoClip):
        objective, clipped = gmpo_objective(method.clip, log_ratio, plan.advantage, mask)
    elif isinstance(method.clip, parts.FiberClip):
        objective, clipped = fiber_objective(method.clip, log_ratio, plan.advantage, mask)
    elif vespo:
        factor = vespo_factor(log_ratio.detach(), plan.advantage, mask, plan.correction)
        objective = factor * plan.advantage * logp
        clipped = torch.zeros_like(mask, dtype=torch.int32)
    else:
        coordinate = weight * ratio if method.weight_on == "ratio" else ratio
        objective, clipped = clipped_objective(method.clip, coordinate, plan.advantage, logp)
    if method.weight_on == "surrogate":
        objective = weight * objective
    if method.proximal is not None:
        moved = plan.proximal_logp - plan.behavior_logp
        objective = moved.clamp(max=LARGEST_LOG_RATIO).exp() * objective
    if method.correction is not None and not vespo:
        objective = plan.correction * objective
    keep = plan.keep
    loss = -(torch.where(keep, objective, 0.0) * active).sum()
    if isinstance(method.penalty, parts.KlCovPenalty):
        loss = loss + (plan.penalty * log_ratio.abs() * active).sum()
    elif isinstance(method.penalty, parts.LpRegPenalty):
        below = logp.detach() < plan.proxy_logp  # only raises π
        loss = (
            loss
            + (torch.where(below, plan.penalty * k3(logp, plan.proxy_logp), 0.0) * active).sum()
        )
    kl = torch.zeros_like(logp)
    divergence = None
    if reference_logp is not None:
        reference_logp = torch.where(mask, reference_logp.detach(), 0.0)
        kl = k3(logp, reference_logp)
        if method.kl.coef > 0:
            term = kl if method.kl.estimator == "k3" else logp - reference_logp
            if method.kl.weighted:
                term = weight * term
            divergence = method.kl.coef * (term * active).sum()
            loss = loss + divergence
    clipped = torch.where(keep, clipped, 0).to(torch.int8)
    return LossOutput(
        loss, torch.where(mask, ratio, 1.0).detach(), clipped, kl.detach(), divergence
    )


@dataclass
class MethodState:
    """What a method keeps between updates."""

    # settings of a weight that moves, as of the last step
    weight: dict[str, Any] = field(default_factory=dict)
    # moving averages of norms by module type (`module_clip`)
    norms: dict[str, float] = field(default_factory=dict)
    # weights of the averaged policy (`AveragedProximal`), in the model's order, and the sum of their factors
    average: list[Tensor] = field(default_factory=list)
    average_sum: float = 0.0

    @torch.no_grad()
    def averaged(self, decay: float, weights: Sequence[Tensor]) -> list[Tensor]:
        """The averaged weights of a step that starts at `weights`; remembered."""
        self.average_sum = decay * self.average_sum + 1.0
        if len(self.average) != len(weights):
            self.average = [w.detach().clone() for w in weights]
            self.average_sum = 1.0
        for mean, now in zip(self.average, weights, strict=True):
            mean.lerp_(now.detach(), 1.0 / self.average_sum)
        return self.average

    def moved(self, weight: TokenWeight, entropy: Tensor) -> TokenWeight:
        """The token weight of a step whose loss tokens have this entropy (M,) [nats]; remembered if it moves."""
        last = (
            type(weight).model_validate(self.weight)
            if self.weight.get("kind") == weight.kind
            else weight
        )
        mean = float(entropy.double().mean())
        now: TokenWeight = last.changed(lambda one: one.moved(mean))
        self.weight = {} if now is weight else now.model_dump()
        return now


def clipped_norm(high: float, norm: float, average: float | None) -> tuple[float, float]:
    """AGGC's factor for a module type's gradient of this norm n, and the average S after it; `average` is None before the first.

    n > high·S is scaled to high·S; then S ← 0.95·S + 0.05·(scaled norm). S starts at the first norm, which is not clipped.
    """
    if average is None:
        return 1.0, norm
    limit = high * average
    factor = limit / norm if norm > limit else 1.0
    return factor, 0.95 * average + 0.05 * factor * norm


def entropy_bonus(
    coef: float, plan: Plan, entropy: Tensor, tokens: int, *, pass_index: int = 0
) -> Tensor:
    """This microbatch's share of coef·(mean entropy of an update's loss tokens), to be subtracted from the loss.

    The mean is over the `tokens` of all passes and completions of the update whatever `aggregate` is, as in TRL. `entropy` is
    (n, T) [nats] of the current policy.
    """
    return coef * torch.where(plan.pass_mask(pass_index), entropy, 0.0).sum() / max(tokens, 1)


def clipped_objective(
    clip: parts.Clip | None, ratio: Tensor, advantage: Tensor, logp: Tensor
) -> tuple[Tensor, Tensor]:
    """S(x, A) per token (equations: the clips' classes; None: x·A), and where a bound acts (−1 low, 1 high, else 0).

    A bound of ppo acts where it takes the gradient away: above for A > 0, below for A < 0; of cispo where it binds and A ≠ 0; of
    dual also where x > bound and A < 0; of dppo on the tokens that it masks. `ratio` is x, the ratio or weight × ratio; all are
    (n, T).
    """
    nowhere = torch.zeros_like(ratio, dtype=torch.int32)
    match clip:
        case parts.SmoothClip():
            tau = _choose(advantage > 0, 1.0, 1.05, ratio)
            return torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantage, nowhere
        case parts.DppoMask():
            flags = dppo_masked(clip, ratio.detach(), advantage, logp.detach())
            objective = ratio.detach().clamp(max=clip.bound) * advantage * logp
            return torch.where(flags == 0, objective, 0.0), flags
        case parts.DualClip():
            inner = parts.PpoClip(low=clip.low, high=clip.high)
            objective, flags = clipped_objective(inner, ratio, advantage, logp)
            beyond = (ratio.detach() > clip.bound) & (advantage < 0)
            bounded = torch.where(beyond, clip.bound * advantage, objective)
            return bounded, torch.where(beyond, 1, flags)
        case parts.DelightGate():
            gate = torch.sigmoid(-advantage * logp.detach() / clip.eta)
            return gate * advantage * logp, nowhere
        case parts.CispoClip():
            low = ratio.detach() < 1 - clip.low
            high = ratio.detach() > 1 + clip.high
            objective = ratio.detach().clamp(1 - clip.low, 1 + clip.high) * advantage * logp
            return objective, torch.where(advantage == 0, 0, high.int() - low.int())
        case parts.PpoClip():
            clipped = ratio.clamp(1 - clip.low, 1 + clip.high)
            bounded = torch.minimum(ratio * advantage, clipped * advantage)
            return bounded, gradient_killed(clip, ratio.detach(), advantage)
    return ratio * advantage, nowhere


def gmpo_objective(
    clip: parts.GmpoClip, log_ratio: Tensor, advantage: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """exp(mean_t x_t)·A (n, T) with x_t = ln r_t bounded on one side by A's sign, and where a bound acts (−1, 1, else 0).

    A bounded token has no gradient of its own and still counts in the mean of its completion.
    """
    positive = advantage > 0
    bounded = torch.where(positive, log_ratio.clamp(max=clip.high), log_ratio.clamp(min=-clip.low))
    above = positive & (log_ratio > clip.high)
    below = (advantage < 0) & (log_ratio < -clip.low)
    return importance_ratio(
        parts.SequenceRatio(), bounded, mask
    ) * advantage, above.int() - below.int()


def fiber_objective(
    clip: parts.FiberClip, log_ratio: Tensor, advantage: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """FiberPO's exp(b_i + f_t)·A (n, T), and where the token's own gate is shut (−1, 1, else 0)."""
    count = mask.sum(-1, keepdim=True).clamp(min=1)  # (n, 1)
    x = torch.where(mask, log_ratio, 0.0)
    up = x.clamp(min=0).sum(-1, keepdim=True) / count  # a⁺ (n, 1)
    down = (-x).clamp(min=0).sum(-1, keepdim=True) / count  # a⁻
    base = _rolled_back(up, clip.high, count) - _rolled_back(down, clip.low, count)
    rising = x.detach() >= 0
    residual = torch.where(rising, x - up, x + down)
    other = torch.where(rising, down, -up)
    gated = residual.clamp(-clip.token, clip.token) + other.clamp(-clip.token, clip.token)
    far = residual.detach().abs() > clip.token
    flags = torch.where(far & (advantage != 0), residual.detach().sign(), 0.0)
    return (base + gated).exp() * advantage, flags.int()


def _rolled_back(value: Tensor, budget: float, count: Tensor) -> Tensor:
    """g(a, C) (n, 1): a up to C, back to 0 with slope −n, then 0."""
    back = (count + 1) * budget - count * value
    return torch.where(value <= budget, value, back.clamp(min=0.0))


def vespo_factor(log_ratio: Tensor, advantage: Tensor, mask: Tensor, correction: Tensor) -> Tensor:
    """φ(W) = exp(λ + k·ln W − λ·W) (n, T), k and λ by the sign of A.

    W is the product of a completion's ratios, each multiplied by its sampler correction. As in TRL, ln r_t is bounded by
    ±20, the logarithms of the corrections and of W by [ln 1e-8, 20].
    """
    least = math.log(1e-8)
    terms = log_ratio.clamp(-20.0, 20.0) + correction.log().clamp(least, 20.0)
    log_product = torch.where(mask, terms, 0.0).sum(-1, keepdim=True).clamp(least, 20.0)  # (n, 1)
    k = _choose(advantage >= 0, 2.0, 3.0, log_ratio)  # (n, T)
    rate = _choose(advantage >= 0, 3.0, 2.0, log_ratio)
    return (rate + k * log_product - rate * log_product.exp()).exp()


def dppo_masked(clip: parts.DppoMask, ratio: Tensor, advantage: Tensor, logp: Tensor) -> Tensor:
    """Tokens that DPPO masks, int32: 1 where the probability rose too far (A > 0), −1 where it fell too far (A < 0)."""
    now = logp.exp()
    old = now / ratio
    if clip.divergence == "tv":
        divergence = (now - old).abs()
    else:
        tiny = torch.finfo(logp.dtype).tiny
        log_ratio = ratio.log()
        rest_now = -torch.expm1(logp)  # 1 − p
        rest_old = (-torch.expm1(logp - log_ratio)).clamp(min=0)
        log_rest = rest_old.clamp(min=tiny).log() - rest_now.clamp(min=tiny).log()
        divergence = rest_old * log_rest - old * log_ratio
    above = (advantage > 0) & (ratio > 1) & (divergence > clip.high)
    below = (advantage < 0) & (ratio < 1) & (divergence > clip.low)
    return above.int() - below.int()


def gradient_killed(clip: parts.PpoClip, ratio: Tensor, advantage: Tensor) -> Tensor:
    """Tokens whose surrogate is constant, int32: 1 where x > 1 + high and A > 0, −1 where x < 1 − low and A < 0.

    `ratio` is weight × ratio for `weight_on=ratio`: at ratio 1 every weight above 1 + high kills a positive token
    (TR-GRPO's trap).
    """
    above = (ratio > 1 + clip.high) & (advantage > 0)
    below = (ratio < 1 - clip.low) & (advantage < 0)
    return above.int() - below.int()


def k3(logp: Tensor, reference_logp: Tensor) -> Tensor:
    """k3 = π_ref/π − ln(π_ref/π) − 1 ≥ 0 [nats], an unbiased estimate of KL(π‖π_ref) on tokens drawn from π."""
    difference = reference_logp - logp
    return torch.expm1(difference) - difference


def _choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """`yes` where the condition holds, else `no`, in the dtype of `like`; `where` with two numbers gives float32."""
    return torch.where(condition, torch.full_like(like, yes), torch.full_like(like, no))


def importance_ratio(spec: parts.Ratio, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """r_t, GSPO's s_i or HölderPO's power mean (equations: the ratios' classes); with gradient through `log_ratio`.

    `log_ratio` (n, T) is x_t = ln π − ln π_old [nats], 0 outside the mask. Ratios of sequences repeat along T.
    """
    if isinstance(spec, parts.TokenRatio):
        return log_ratio.exp()
    if not isinstance(spec, parts.HolderRatio) or spec.p == 0.0:
        count = mask.sum(-1, keepdim=True).clamp(min=1)  # (n, 1)
        log_mean = torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True) / count
    else:
        log_mean = _log_power_mean(log_ratio, mask, float(spec.p))  # type: ignore[arg-type]  # a schedule is resolved
    return log_mean.exp().expand_as(log_ratio)  # (n, 1) -> (n, T)


def _log_power_mean(log_ratio: Tensor, mask: Tensor, p: float) -> Tensor:
    """(n, 1) ln (mean_t exp(p·x_t))^(1/p) = x* + ln(1 + mean_t(exp(p·(x_t − x*)) − 1))/p, p ≠ 0; 0 without tokens.

    x* is the token with the largest p·x_t, so no exponential overflows. The form with exp(·) − 1 keeps its precision
    for p → 0, where ln(mean exp(p·x_t))/p loses it. float64, because that mean comes close to −1 in long rows.
    """
    x = torch.where(mask, log_ratio, 0.0).double()
    sign = 1.0 if p > 0 else -1.0
    top = sign * torch.where(mask, sign * x.detach(), -torch.inf).amax(-1, keepdim=True)  # (n, 1)
    # the value does not depend on x*, so it needs no gradient
    top = torch.where(mask.any(-1, keepdim=True), top, 0.0)
    excess = torch.where(mask, torch.expm1(p * torch.where(mask, x - top, 0.0)), 0.0)  # in (−1, 0]
    mean = excess.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (top + torch.log1p(mean) / p).to(log_ratio.dtype)


def token_normalizer(
    method: Method,
    mask: Tensor,
    max_completion_length: int,
    *,
    keep: Tensor | None = None,
    group: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Coefficient of each token's loss, over all completions of ONE update; loss = Σ coefficient·token loss (`Method.aggregate`).

    Only `kept_…` depends on the token selection, and none on the passes: every pass of Lopti divides by the full token count. A
    row without tokens still counts as a completion.

    Args:
        method: its `aggregate` decides.
        mask: (n, T) loss tokens of all completions of the update.
        max_completion_length: the completion limit [tokens].
        keep: (n, T) bool, rows of the plan's `keep`; needed by `kept_…` unless the method keeps all tokens.
        group: (n,) integer labels; needed by `kept_groups`.
        dtype: of the result, (n, T) and 0 outside the mask.
    """
    mask = counted = mask.bool()
    how = method.aggregate
    rows = mask.shape[0]
    counts = mask.to(dtype)
    if how.startswith("kept"):
        if keep is None and method.tokens is not None:
            raise ValueError(f"aggregate={how} needs keep")
        counted = mask if keep is None else mask & keep
    match how.removeprefix("kept_"):
        case "sequence_mean":
            return counts / (rows * counted.to(dtype).sum(-1, keepdim=True).clamp(min=1))
        case "token_mean" | "mean":
            return counts / counted.sum(dtype=torch.float64).clamp(min=1).to(dtype)
        case "sequence_sum":
            return counts / rows
        case "constant":
            return counts / (rows * max_completion_length)
    if group is None:
        raise ValueError("aggregate=kept_groups needs group")
    labels, member = group.to(mask.device).unique(return_inverse=True)
    active = member[counted.any(-1)].unique().numel()
    size = member.bincount(minlength=len(labels))[member].to(dtype)[:, None]  # (n, 1)
    return counts / (size * max_completion_length * max(active, 1))


def gradient_mass(
    method: Method, mask: Tensor, advantage: Tensor, logit_grad_norm: Tensor
) -> Tensor:
    """|A_t|·coefficient_t·‖p_t − e_y‖₂, what each token gives to the gradient by its logits at weight 1 and ratio 1.

    It equals |c_t|·‖p_t − e_y‖ for c_t = ∂L/∂ln π_t of an update over all rows, up to a factor common to all tokens. (N, T),
    0 outside the mask; `advantage` is (N,) or (N, T).
    """
    # all groups have one size, up to the common factor
    together = torch.zeros(len(mask), dtype=torch.long)
    coefficient = token_normalizer(
        method, mask, 1, keep=mask.bool(), group=together, dtype=logit_grad_norm.dtype
    )
    size = per_token(advantage, logit_grad_norm).to(logit_grad_norm).abs() * logit_grad_norm
    return torch.where(mask.bool(), coefficient * size, 0.0)
