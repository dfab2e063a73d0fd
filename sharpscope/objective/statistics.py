"""Statistics over all loss tokens of a step, in float64: means, covariances, percentiles, and a summary of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sharpscope.config.token_weights import Weighting
from sharpscope.objective.values import StepTensors

#: Share of the weights on one bound above which the weighting has no effect.
SATURATION_LIMIT = 0.95


def masked_mean(value: Tensor, mask: Tensor) -> float:
    """Mean of `value` over the mask; NaN without a token."""
    return float(value[mask].double().mean())


def token_covariance(step: StepTensors) -> Tensor:
    """c_t = (ln π_t − mean ln π)·(A_t − mean A) over the step's loss tokens, (N, T) float64, 0 outside the mask.

    Its mean is the covariance that drives the entropy (arXiv 2505.22617). [nats × advantage]
    """
    mask = step.mask.bool()
    advantage = step.token_advantage.double()
    logp = step.logp.double()
    product = (logp - logp[mask].mean()) * (advantage - advantage[mask].mean())
    return torch.where(mask, product, 0.0)


def percentile(value: Tensor, mask: Tensor, q: float) -> float:
    """The `q`-th percentile (0..100, linear interpolation) of `value` over the mask."""
    return float(np.percentile(value[mask].detach().double().cpu().numpy(), q))


def weighted_percentile(value: Tensor, mask: Tensor, mass: Tensor, q: float) -> float:
    """The `q`-th percentile (0..100) of `value` over the mask where a token counts `mass` ≥ 0.

    It is the smallest value whose tokens, with those below it, have at least q % of the mass.
    """
    values, order = value[mask].detach().double().sort()
    below = mass[mask].detach().double()[order].cumsum(0)
    index = int(torch.searchsorted(below, below[-1] * (q / 100)))
    return float(values[min(index, len(values) - 1)])


@dataclass(frozen=True)
class WeightSummary:
    """Token weights of one step over its loss tokens, all dimensionless.

    `saturation_low` and `saturation_high` are the shares of the weights at L and at U, None for a weighting without
    bounds. `ess` = (Σw)²/(n·Σw²) in (0, 1] is the effective sample size as a share of the tokens, 0 if every weight is
    0.
    """

    mean: float
    std: float
    minimum: float
    maximum: float
    saturation_low: float | None
    saturation_high: float | None
    ess: float

    @property
    def warning(self) -> str | None:
        """One line if more than 95 % of the weights sit on one bound, else None."""
        for share, bound in ((self.saturation_low, "lower"), (self.saturation_high, "upper")):
            if share is not None and share > SATURATION_LIMIT:
                return (
                    f"{share:.1%} of the token weights sit on the {bound} bound: the method is plain GRPO up to the "
                    "gradient's scale; use preset=calibrated or set tau and u0"
                )
        return None


def summarize_weights(
    weighting: Weighting, weight: Tensor, mask: Tensor, *, progress: float = 0.0, mass: Tensor | None = None
) -> WeightSummary:
    """Mean, population std, extremes, saturation and effective sample size of `weight` over the loss tokens.

    Args:
        weighting: gives the bounds. A weight within 1e-6 of a bound counts as on it.
        weight: (N, T).
        mask: (N, T) loss tokens, bool or 0/1.
        progress: in [0, 1], at which schedules are evaluated.
        mass: (N, T) how much each token counts, ≥ 0; None: all the same. With masses m the mean is Σmw/Σm, and so on; `ess`
            is (Σmw)²/(Σm·Σmw²).

    Returns:
        The summary; NaN everywhere (None for the saturation) without a loss token or without mass.
    """
    inside = mask.bool()
    w = weight[inside].detach().double()
    share = torch.ones_like(w) if mass is None else mass[inside].detach().double()
    if not float(share.sum()) > 0:
        return WeightSummary(math.nan, math.nan, math.nan, math.nan, None, None, math.nan)
    share = share / share.sum()
    mean, square = float((share * w).sum()), float((share * w**2).sum())
    bounds = weighting.at(progress).bounds
    return WeightSummary(
        mean=mean,
        std=math.sqrt(float((share * (w - mean) ** 2).sum())),
        minimum=float(w.min()),
        maximum=float(w.max()),
        saturation_low=None if bounds is None else float(share[w <= bounds[0] + 1e-6].sum()),
        saturation_high=None if bounds is None else float(share[w >= bounds[1] - 1e-6].sum()),
        ess=mean**2 / square if square > 0 else 0.0,
    )
