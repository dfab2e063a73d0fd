"""The one door from a shaping to the weights of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpscope.config import token_weights as kinds
from sharpscope.config.custom_weights import find_shaping
from sharpscope.config.weight_functions import input_values, weight_function
from sharpscope.errors import NonFiniteError, UserError
from sharpscope.objective.shaping import batch, controls
from sharpscope.objective.values import StepTensors


@torch.no_grad()
def token_weights(shaping: kinds.Part, step: StepTensors, generator: torch.Generator | None = None) -> Tensor:
    """Weights of the step's tokens under a shaping, resolved at `step.progress`; never with a gradient.

    Args:
        shaping: any member of `Shaping`, calibrated where it needs to be.
        step: statistics of the policy at the start of the step.
        generator: needed by `shuffled`.

    Returns:
        (N, T) in the dtype of `step.logp`, ≥ 0 and finite on loss tokens, 0 elsewhere.

    Raises:
        UserError: a user's own shaping gives a wrong shape, sign or value, or a weight is not finite.
        ValueError: a shaping is not calibrated, or `shuffled` got no generator.
    """
    mask = step.mask.bool()
    shaping = shaping.at(step.progress)
    weight = _weights(shaping, step, mask, generator) if bool(mask.any()) else torch.zeros_like(step.logp)
    inside = weight[mask]
    if not bool(torch.isfinite(inside).all()):
        raise NonFiniteError(
            f"method.weight: {_label(shaping)} gives weights that are not finite; check its inputs and constants"
        )
    if bool((inside < 0).any()):
        raise UserError(
            f"method.weight: {_label(shaping)} gives negative weights (min {float(inside.min()):.4g}); weights are ≥ 0"
        )
    return torch.where(mask, weight, 0.0).to(step.logp.dtype)


def _weights(shaping: kinds.Part, step: StepTensors, mask: Tensor, generator: torch.Generator | None) -> Tensor:
    match shaping:
        case kinds.UniformShaping():
            return torch.ones_like(step.logp)
        case kinds.SigmoidShaping() | kinds.EntropyShaping() | kinds.LinearShaping() | kinds.PowerShaping():
            return weight_function(shaping, input_values(shaping, step, torch), torch)
        case kinds.CovarianceGaussianShaping():
            return batch.covariance_gaussian_weights(step)
        case kinds.PolarityShaping():
            return batch.polarity_weights(shaping, step)
        case kinds.CustomShaping():
            return _custom(shaping, step, mask)
        case kinds.ReverseShaping():
            bounds = kinds.weight_bounds(shaping.of)
            if bounds is None:  # the spec refuses this
                raise ValueError(f"reverse needs bounds, {shaping.of.kind} has none")
            return controls.reverse(token_weights(shaping.of, step, generator), bounds)
        case kinds.ShuffledShaping():
            if generator is None:
                raise ValueError("shuffled weights need a generator")
            return controls.shuffled(token_weights(shaping.of, step, generator), mask, generator)
        case kinds.ConstantShaping():
            return controls.constant(token_weights(shaping.of, step, generator), mask)
        case kinds.MeanOneShaping():
            return controls.mean_one(token_weights(shaping.of, step, generator), mask)
    raise ValueError(f"unknown shaping {shaping!r}")


def _custom(shaping: kinds.CustomShaping, step: StepTensors, mask: Tensor) -> Tensor:
    registered = find_shaping(shaping.function)
    label = _label(shaping)
    try:
        weight = registered.function(step, **shaping.arguments)
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
                f"method.weight: {label} promised weights in [{low}, {high}] but gave [{float(inside.min()):.4g}, "
                f"{float(inside.max()):.4g}]"
            )
    return weight.to(device=step.logp.device, dtype=step.logp.dtype)


def _label(shaping: kinds.Part) -> str:
    if isinstance(shaping, kinds.CustomShaping):
        return f"custom shaping {shaping.function!r}"
    return f"shaping {getattr(shaping, 'kind', type(shaping).__name__)!r}"
