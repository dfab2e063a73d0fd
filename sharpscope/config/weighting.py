"""Base of the token weights: what a weighting declares and computes, and bounds of the user's own functions.

Importing this module does not import torch: formulas get it as `xp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from sharpscope.config.base import Part
from sharpscope.errors import NonFiniteError, UserError

if TYPE_CHECKING:
    from torch import Generator, Tensor

#: Constants published for GRPO-SG (arXiv 2511.00066): w = clip(alpha·[sigmoid(u/tau) − mu], L, U).
PAPER_SIGMOID: dict[str, float] = {"alpha": 2.0, "tau": 9.0, "mu": 0.25, "L": 1.0, "U": 1.4, "u0": 0.0}
SMALLEST_COMPLEMENT = 2.0**-24
"""Smallest 1 − π that log-odds resolve: the resolution of float32 log-probabilities."""


# -- functions of the user's own ---------------------------------------------------------------------------------------

WeightFunction = Callable[..., "Tensor"]


def weight_bounds(low: float, high: float) -> Callable[[WeightFunction], WeightFunction]:
    """Decorator of a function of token weights (`module:function`) that declares low ≤ w ≤ high; checked.

    The control `reverse` and the saturation need the bounds.

    Raises:
        UserError: the bounds are not 0 ≤ low < high.

    Examples:
        >>> import torch
        >>> import sharpscope
        >>> @sharpscope.weight_bounds(0.0, 1.0)
        ... def one_minus_p(step):
        ...     return 1 - step.logp.exp()
        >>> from types import SimpleNamespace
        >>> one_minus_p(SimpleNamespace(logp=torch.tensor([[0.5, 0.25]]).log()))
        tensor([[0.5000, 0.7500]])
    """
    if not 0 <= low < high:
        raise UserError(f"weight_bounds({low}, {high}): must satisfy 0 <= low < high")

    def decorate(function: WeightFunction) -> WeightFunction:
        """The function with its bounds."""
        function.weight_bounds = (low, high)  # type: ignore[attr-defined]  # read by `CustomWeight.bounds`
        return function

    return decorate


# -- base --------------------------------------------------------------------------------------------------------------


class Weighting(Part):
    """Base of the token weights. A subclass has a `kind`, and `at_statistic` or `weights`."""

    statistic: ClassVar[str | None] = None
    """The one statistic that the weight is a function of: logit, log_odds, logp, prob or entropy; else None."""

    @property
    def bounds(self) -> tuple[float, float] | None:
        """[L, U] that contains every weight, or None. Schedules must be resolved (`at`)."""
        if "L" not in type(self).model_fields:
            return None
        return number(self._published("L")), number(self._published("U"))

    @property
    def bounded(self) -> bool:
        """Whether the weight has `bounds`."""
        return self.at(0.0).bounds is not None

    @property
    def needs_calibration(self) -> bool:
        """Whether a constant is empty that a preset or the first step fills in."""
        return False

    @property
    def needs_gradient(self) -> bool:
        """Whether the calibration needs a step in which some token carries a gradient."""
        return False

    def with_preset(self, old: str, new: str) -> Self:
        """The same weighting, also inside controls, with preset `new` where it has preset `old`."""
        return self

    def moved(self, entropy: float) -> Self:
        """The weighting of a step with this mean entropy [nats], after that of the step before; itself if it stays the same."""
        return self

    def at_statistic(self, u: Any, xp: Any) -> Any:
        """Weights at values `u` of the statistic, in its shape.

        Raises:
            ValueError: the weight is not a function of one statistic, or a constant is not a number yet.
        """
        raise ValueError(f"{type(self).__name__} is not a function of one statistic of a token")

    def calibrated(self, step: Any, xp: Any) -> Self:
        """The weighting with every constant filled in from a step (`StepTensors`); given constants are kept."""
        return self

    def weights(self, step: Any, xp: Any, generator: Generator | None) -> Tensor:
        """Weights (N, T) of a step (`StepTensors`), anything outside the loss tokens; schedules must be resolved."""
        return self.at_statistic(statistic_values(self, step, xp), xp)

    def evaluate(self, step: Any, xp: Any, generator: Generator | None = None) -> Tensor:
        """`weights`, checked, in the dtype of `step.logp`; 0 outside the loss tokens.

        Raises:
            UserError: a weight is negative, or a custom function fails.
            NonFiniteError: a weight is not finite.
        """
        mask = step.mask.bool()
        weight = self.weights(step, xp, generator) if bool(mask.any()) else xp.zeros_like(step.logp)
        inside = weight[mask]
        if not bool(xp.isfinite(inside).all()):
            raise NonFiniteError(f"method.weight: {self.title} gives weights that are not finite; check its constants")
        if bool((inside < 0).any()):
            least = float(inside.min())
            raise UserError(f"method.weight: {self.title} gives negative weights ({least:.4g}); weights must be ≥ 0")
        return xp.where(mask, weight, 0.0).to(step.logp.dtype)

    @property
    def title(self) -> str:
        """Name in messages."""
        return f"weighting {getattr(self, 'kind', type(self).__name__)!r}"

    def _published(self, name: str) -> Any:
        value = getattr(self, name)
        return PAPER_SIGMOID[name] if value is None else value

    @model_validator(mode="after")
    def _bounds_ordered(self) -> Self:
        if "L" in type(self).model_fields:
            low, high = self._published("L"), self._published("U")
            if isinstance(low, float) and isinstance(high, float) and low >= high:
                raise ValueError(f"L = {low} must be below U = {high}")
        return self


def statistic_values(weight: Weighting, tokens: Any, xp: Any) -> Any:
    """The statistic that `weight` is a function of, in the shape of `tokens.logp`, `.logit` and `.entropy`.

    Raises:
        ValueError: it is not a function of one statistic.
    """
    match weight.statistic:
        case None:
            raise ValueError(f"{type(weight).__name__} is not a function of one statistic of a token")
        case "log_odds":
            return tokens.logp - xp.log((-xp.expm1(tokens.logp)).clip(min=SMALLEST_COMPLEMENT))
        case "prob":
            return xp.exp(tokens.logp)
        case name:
            return getattr(tokens, name)


def percentile(value: Tensor, mask: Tensor, q: float, mass: Tensor | None = None) -> float:
    """The `q`-th percentile (0..100) of `value` (N, T) over the mask, computed in float64.

    Without `mass` values are interpolated linearly. With `mass` (N, T) ≥ 0 it is the smallest value whose tokens, with
    those below it, have at least q % of the mass.
    """
    if mass is None:
        import numpy as np

        return float(np.percentile(value[mask].detach().double().cpu().numpy(), q))
    values, order = value[mask].detach().double().sort()
    below = mass[mask].detach().double()[order].cumsum(0)
    index = int((below < below[-1] * (q / 100)).sum())
    return float(values[min(index, len(values) - 1)])


def number(value: object) -> float:
    """A constant that is filled in and no schedule, as a float."""
    if not isinstance(value, int | float):
        raise ValueError(f"a constant is still {value!r}: call calibrate() and .at(progress) first")
    return float(value)


def top_tokens(value: Tensor, mask: Tensor, *, count: int) -> Tensor:
    """(N, T) bool: the `count` loss tokens with the largest value, and all that tie with the last of them."""
    inside = value[mask]
    if inside.numel() == 0:
        return mask
    count = min(max(count, 1), inside.numel())
    return mask & (value >= inside.topk(count).values.min())
