"""The loss of one microbatch: ratio, weight, clip, divergence terms, aggregation. Pure functions of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sharpscope.methods import method as parts
from sharpscope.methods.clips import RatioTerms, mean_log_ratio
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
    at = RatioTerms(
        ratio=weight * ratio if method.weight_on == "ratio" else ratio,
        log_ratio=log_ratio,
        logp=logp,
        advantage=plan.advantage,
        mask=mask,
        correction=plan.correction,
    )
    if method.clip is None:
        objective = at.ratio * plan.advantage
        clipped = torch.zeros_like(mask, dtype=torch.int32)
    else:
        objective, clipped = method.clip.surrogate(at, torch)
    if method.weight_on == "surrogate":
        objective = weight * objective
    if method.proximal is not None:
        moved = plan.proximal_logp - plan.behavior_logp
        objective = moved.clamp(max=LARGEST_LOG_RATIO).exp() * objective
    inside = method.clip is not None and method.clip.has_correction
    if method.correction is not None and not inside:
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
        loss,
        torch.where(mask, ratio, 1.0).detach(),
        clipped,
        kl.detach(),
        divergence,
    )


@dataclass
class MethodState:
    """What a method keeps between updates."""

    # settings of a weight that moves, as of the last step
    weight: dict[str, object] = field(default_factory=dict)
    # moving averages of norms by module type (`module_clip`)
    norms: dict[str, float] = field(default_factory=dict)
    # weights of the averaged policy (`AveragedProximal`), in the model's order, and the sum of their factors
    average: list[Tensor] = field(default_factory=list)
    average_sum: float = 0.0

    @torch.no_grad()
    def averaged(self, decay: float, weights: Sequence[Tensor]) -> list[Tensor]:
        """The averaged weights of a step that starts at `weights`; remembered."""
        self.average_sum = decay * self.average_sum + 1.0
        if not self.average:
            self.average = [w.detach().clone() for w in weights]
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
    coef: float,
    plan: Plan,
    entropy: Tensor,
    tokens: int,
    *,
    pass_index: int = 0,
) -> Tensor:
    """This microbatch's share of coef·(mean entropy of an update's loss tokens), to be subtracted from the loss.

    The mean is over the `tokens` of all passes and completions of the update whatever `aggregate` is, as in TRL. `entropy` is
    (n, T) [nats] of the current policy.
    """
    return coef * torch.where(plan.pass_mask(pass_index), entropy, 0.0).sum() / max(tokens, 1)


def k3(logp: Tensor, reference_logp: Tensor) -> Tensor:
    """k3 = π_ref/π − ln(π_ref/π) − 1 ≥ 0 [nats], an unbiased estimate of KL(π‖π_ref) on tokens drawn from π."""
    difference = reference_logp - logp
    return torch.expm1(difference) - difference


def importance_ratio(spec: parts.Ratio, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """r_t, GSPO's s_i or HölderPO's power mean (equations: the ratios' classes); with gradient through `log_ratio`.

    `log_ratio` (n, T) is x_t = ln π − ln π_old [nats], 0 outside the mask. Ratios of sequences repeat along T.
    """
    if isinstance(spec, parts.TokenRatio):
        return log_ratio.exp()
    if not isinstance(spec, parts.HolderRatio) or spec.p == 0.0:
        log_mean = mean_log_ratio(log_ratio, mask, torch)
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
    method: Method,
    mask: Tensor,
    advantage: Tensor,
    logit_grad_norm: Tensor,
) -> Tensor:
    """|A_t|·coefficient_t·‖p_t − e_y‖₂, what each token gives to the gradient by its logits at weight 1 and ratio 1.

    It equals |c_t|·‖p_t − e_y‖ for c_t = ∂L/∂ln π_t of an update over all rows, up to a factor common to all tokens. (N, T),
    0 outside the mask; `advantage` is (N,) or (N, T).
    """
    # all groups have one size, up to the common factor
    together = torch.zeros(len(mask), dtype=torch.long)
    coefficient = token_normalizer(
        method,
        mask,
        1,
        keep=mask.bool(),
        group=together,
        dtype=logit_grad_norm.dtype,
    )
    size = per_token(advantage, logit_grad_norm).to(logit_grad_norm).abs() * logit_grad_norm
    return torch.where(mask.bool(), coefficient * size, 0.0)
