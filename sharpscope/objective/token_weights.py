"""From a weighting (configuration) to the weights of a step (tensors)."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpscope.config import find_token_weight
from sharpscope.config import token_weights as kinds
from sharpscope.errors import NonFiniteError, UserError
from sharpscope.objective.statistics import masked_mean, token_covariance
from sharpscope.objective.values import StepTensors


@torch.no_grad()
def token_weights(spec: kinds.Weighting, step: StepTensors, generator: torch.Generator | None = None) -> Tensor:
    """Token weights of a step, without gradient. Schedules are resolved at `step.progress`.

    Args:
        spec: any member of `TokenWeight`, calibrated if it needs to be.
        step: statistics of the policy at the start of the step.
        generator: for the permutations of `shuffled`.

    Returns:
        (N, T) in the dtype of `step.logp`, ≥ 0 and finite on loss tokens, 0 elsewhere.

    Raises:
        UserError: a custom function returns a wrong type, shape, sign or value.
        NonFiniteError: a weight is not finite.
        ValueError: the weighting is not calibrated, or `shuffled` has no generator.
    """
    mask = step.mask.bool()
    spec = spec.at(step.progress)
    weight = _weights(spec, step, mask, generator) if bool(mask.any()) else torch.zeros_like(step.logp)
    inside = weight[mask]
    if not bool(torch.isfinite(inside).all()):
        raise NonFiniteError(f"method.weight: {_label(spec)} gives weights that are not finite; check its constants")
    if bool((inside < 0).any()):
        raise UserError(
            f"method.weight: {_label(spec)} gives negative weights (min {float(inside.min()):.4g}); weights must be ≥ 0"
        )
    return torch.where(mask, weight, 0.0).to(step.logp.dtype)


def _weights(spec: kinds.Weighting, step: StepTensors, mask: Tensor, generator: torch.Generator | None) -> Tensor:
    match spec:
        case kinds.UniformWeight():
            return torch.ones_like(step.logp)
        case kinds.CovarianceGaussianWeight():
            return covariance_gaussian_weights(spec, step)
        case kinds.PolarityWeight():
            return polarity_weights(spec, step)
        case kinds.CustomWeight():
            return _custom(spec, step, mask)
        case kinds.ReverseWeight():
            bounds = spec.of.bounds
            assert bounds is not None  # validated by the configuration
            weight = token_weights(spec.of, step, generator)
            reversed_ = bounds[0] + bounds[1] - weight
            return reversed_ if spec.matched == "none" else _matched(reversed_, weight, step)
        case kinds.ShuffledWeight():
            if generator is None:
                raise ValueError("shuffled weights need a generator")
            weight = token_weights(spec.of, step, generator)
            if spec.matched == "tokens":
                return shuffled(weight, mask, generator)
            return _matched(drawn(weight, mask, step.mass, generator), weight, step)
        case kinds.ConstantWeight():
            weight = token_weights(spec.of, step, generator)
            return _mean(weight, step, spec.matched).to(weight.dtype).expand_as(weight)
        case kinds.MeanOneWeight():
            weight = token_weights(spec.of, step, generator)
            mean = _mean(weight, step, spec.matched).to(weight.dtype)
            if not bool(mean > 0):
                raise UserError("method.weight: mean_one around weights that are all 0; choose another weighting")
            return weight / mean
    weight = spec.at_statistic(kinds.statistic_values(spec, step, torch), torch)
    assert isinstance(weight, Tensor)
    return weight


def covariance_gaussian_weights(spec: kinds.CovarianceGaussianWeight, step: StepTensors) -> Tensor:
    """exp(−(c − mean c)²/(2 std(c)²)) (N, T), mean and std over the step or over each completion; 1 where std(c) = 0.

    arXiv 2605.11538; both normalizations are our readings.
    """
    mask, covariance = step.mask.bool(), token_covariance(step)
    if spec.over == "completion":
        count = mask.sum(1, keepdim=True).clamp(min=1)  # (N, 1)
        mean = covariance.sum(1, keepdim=True) / count  # c is 0 outside the mask
        std = (torch.where(mask, covariance - mean, 0.0).square().sum(1, keepdim=True) / count).sqrt()
        varies = std > 1e-12 * covariance.abs().amax(1, keepdim=True)  # equal values differ from their mean by rounding
    else:
        inside = covariance[mask]
        mean, std = inside.mean(), inside.std(correction=0)
        varies = std > 0
    scaled = (covariance - mean) / torch.where(varies, std, 1.0)
    return torch.where(varies, torch.exp(-(scaled**2) / 2), 1.0).to(step.logp.dtype)


def polarity_weights(spec: kinds.PolarityWeight, step: StepTensors) -> Tensor:
    """1 + alpha·phase·sign(ΔH_t) (N, T) with ΔH_t = −A_t·polarity_t, phase = clip((target − mean H)/target, −1, 1)."""
    if spec.target is None:
        raise ValueError("the polarity target is still empty: call calibrate() first")
    alpha, target = float(spec.alpha), float(spec.target)  # type: ignore[arg-type]  # schedules are resolved
    phase = max(-1.0, min(1.0, (target - masked_mean(step.entropy, step.mask.bool())) / target))
    return 1 + alpha * phase * torch.sign(-step.token_advantage * step.polarity)


def shuffled(weight: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
    """Weights permuted over the loss tokens of each completion.

    Args:
        weight: (N, T).
        mask: (N, T) bool, the loss tokens.
        generator: of the permutations; used on its own device.

    Returns:
        (N, T), in each row the same multiset of weights on the mask.
    """
    key = torch.rand(mask.shape, generator=generator, device=generator.device, dtype=torch.float64).to(weight.device)
    random_order = torch.where(mask, key, 2.0).argsort(dim=-1, stable=True)  # (N, T) loss tokens first, shuffled
    in_order = (~mask).to(torch.int8).argsort(dim=-1, stable=True)  # (N, T) loss tokens first, in order
    return torch.empty_like(weight).scatter_(-1, in_order, weight.gather(-1, random_order))


def drawn(weight: Tensor, mask: Tensor, mass: Tensor, generator: torch.Generator) -> Tensor:
    """Each loss token's weight drawn, with replacement, from those of its completion with probability ∝ `mass`.

    The weights thus have, over the gradient, the distribution that the given ones have. A permutation does not: where few
    tokens carry most of the gradient, it gives them the weights of the many others.

    Args:
        weight: (N, T).
        mask: (N, T) bool, the loss tokens.
        mass: (N, T) ≥ 0 on the mask; a completion where it is 0 draws from all its loss tokens alike.
        generator: of the draws; used on its own device.

    Returns:
        (N, T), on the mask values of the same row's weights.
    """
    share = torch.where(mask, mass.double(), 0.0)
    share = torch.where((share.sum(-1, keepdim=True) > 0), share, mask.double())  # (N, T)
    below = share.cumsum(-1)
    key = torch.rand(mask.shape, generator=generator, device=generator.device, dtype=torch.float64).to(weight.device)
    # right: a token of mass 0 is never drawn. The product may round up to the total, hence the clamp to the last of mass.
    index = torch.searchsorted(below, key * below[:, -1:], right=True)
    last = torch.searchsorted(below, below[:, -1:].contiguous())  # (N, 1)
    return weight.gather(-1, torch.minimum(index, last))


def _matched(weight: Tensor, like: Tensor, step: StepTensors) -> Tensor:
    """Weights (N, T) multiplied so that their mean over the gradient is that of `like` (N, T)."""
    mean = _mean(weight, step, "gradient")
    if not bool(mean > 0):
        raise UserError("method.weight: matched = gradient around weights that are all 0; choose another weighting")
    return weight * (_mean(like, step, "gradient") / mean).to(weight.dtype)


def _mean(weight: Tensor, step: StepTensors, counted: kinds.Counted) -> Tensor:
    """Mean over the step's loss tokens, a float64 scalar; over the gradient each counts by `step.gradient_mass`.

    Where no token carries a gradient, weights change nothing but a weighted KL term, and the tokens count alike.
    """
    mask = step.mask.bool()
    inside = weight[mask].double()
    if counted == "gradient":
        mass = step.mass[mask].double()
        if bool((mass > 0).any()):
            return (mass * inside).sum() / mass.sum()
    return inside.mean()


def _custom(spec: kinds.CustomWeight, step: StepTensors, mask: Tensor) -> Tensor:
    registered = find_token_weight(spec.function)
    label = _label(spec)
    try:
        weight = registered.function(step, **spec.arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"method.weight: {label} raised {type(error).__name__}: {error}") from error
    if not isinstance(weight, Tensor):
        raise UserError(
            f"method.weight: {label} returned {type(weight).__name__}; return a tensor of shape {tuple(mask.shape)}"
        )
    if weight.shape != mask.shape:
        raise UserError(
            f"method.weight: {label} returned shape {tuple(weight.shape)}; it must be (N, T) = {tuple(mask.shape)}"
        )
    if not weight.is_floating_point():
        raise UserError(f"method.weight: {label} returned {weight.dtype}; return floating-point weights")
    inside = weight[mask]
    if registered.bounds is not None and bool(torch.isfinite(inside).all()):
        low, high = registered.bounds
        if bool((inside < low - 1e-6).any()) or bool((inside > high + 1e-6).any()):
            raise UserError(
                f"method.weight: {label} declares weights in [{low}, {high}] but returned [{float(inside.min()):.4g}, "
                f"{float(inside.max()):.4g}]"
            )
    return weight.to(device=step.logp.device, dtype=step.logp.dtype)


def _label(spec: kinds.Weighting) -> str:
    if isinstance(spec, kinds.CustomWeight):
        return f"custom weighting {spec.function!r}"
    return f"weighting {getattr(spec, 'kind', type(spec).__name__)!r}"
