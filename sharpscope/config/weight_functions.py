"""Token weights that depend on one statistic of a token alone, once for NumPy arrays and torch tensors.

`xp` is `torch`, or any namespace with exp, expm1, log and sigmoid for the arrays given.
"""

from __future__ import annotations

from typing import Any, Protocol

from sharpscope.config.token_weights import (
    EntropyShaping,
    LinearShaping,
    Part,
    PowerShaping,
    ReverseShaping,
    SigmoidShaping,
    weight_bounds,
)

SMALLEST_COMPLEMENT = 2.0**-24
"""Smallest 1 − π that log-odds tell apart; float32 log-probabilities end there."""


class Statistics(Protocol):
    """What pointwise weights read of tokens; arrays of one shape."""

    @property
    def logp(self) -> Any:
        """ln π of the sampled token [nats]."""

    @property
    def logit(self) -> Any:
        """Its undivided logit z."""

    @property
    def entropy(self) -> Any:
        """Entropy of the position [nats]."""


def input_name(shaping: Part) -> str | None:
    """The statistic that the weight is a function of: logit, log_odds, logp, prob or entropy; None for other weights."""
    if isinstance(shaping, ReverseShaping):
        return input_name(shaping.of)
    if isinstance(shaping, SigmoidShaping):
        return shaping.input
    if isinstance(shaping, EntropyShaping):
        return "entropy"
    return {LinearShaping: "prob", PowerShaping: "logp"}.get(type(shaping))


def input_values(shaping: Part, tokens: Statistics, xp: Any) -> Any:
    """The statistic that the weight is a function of, in the tokens' shape.

    Raises:
        ValueError: the weight depends on anything else.
    """
    name = input_name(shaping)
    if name is None:
        raise ValueError(f"{type(shaping).__name__} is not a function of one statistic of a token")
    if name == "log_odds":
        return tokens.logp - xp.log((-xp.expm1(tokens.logp)).clip(min=SMALLEST_COMPLEMENT))
    return xp.exp(tokens.logp) if name == "prob" else getattr(tokens, name)


def weight_function(shaping: Part, u: Any, xp: Any) -> Any:
    """Weights at the values `u` of their input (see `input_values`), in its shape.

    sigmoid, entropy (high): clip(alpha·[sigmoid((u − u0)/tau) − mu], L, U); entropy (low): the same of −u; linear (u = π):
    alpha·u + 1 − alpha; power (u = ln π): clip(e^(gamma·u), L, U); reverse: L + U − w.

    Raises:
        ValueError: a constant is a schedule or not calibrated, or the weight depends on more than one statistic.
    """
    if isinstance(shaping, SigmoidShaping | EntropyShaping):
        known = shaping.constants()
        alpha, tau, mu, low, high, u0 = (_number(known.get(name)) for name in ("alpha", "tau", "mu", "L", "U", "u0"))
        return (alpha * (xp.sigmoid((signed(shaping, u) - u0) / tau) - mu)).clip(low, high)
    if isinstance(shaping, LinearShaping):
        alpha = _number(shaping.alpha)
        return alpha * u + (1 - alpha)
    if isinstance(shaping, PowerShaping):
        return xp.exp(_number(shaping.gamma) * u).clip(_number(shaping.L), _number(shaping.U))
    if isinstance(shaping, ReverseShaping) and (bounds := weight_bounds(shaping.of)) is not None:
        return bounds[0] + bounds[1] - weight_function(shaping.of, u, xp)
    raise ValueError(f"{type(shaping).__name__} is not a function of one statistic of a token")


def signed(shaping: SigmoidShaping | EntropyShaping, u: Any) -> Any:
    """u with its sign changed where low entropy is weighted most."""
    return -u if isinstance(shaping, EntropyShaping) and shaping.direction == "low" else u


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"a constant is still {value!r}: call calibrate() and .at(progress) first")
    return float(value)
