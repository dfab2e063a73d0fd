"""The weight functions that depend on one number of a token alone, from a run's resolved shaping, for drawing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

INPUTS = {
    "logit": "raw logit of the token",
    "log_odds": "log-odds ln π/(1 − π) [nats]",
    "logp": "ln π [nats]",
    "prob": "probability π",
    "entropy": "entropy of the position [nats]",
}


def shaping_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """The shaping that a run used: the calibrated one if there is one, else the configured one."""
    configured = ((info.get("config") or {}).get("method") or {}).get("weight") or {}
    return dict(info.get("calibration") or configured)


def weight_input(shaping: Mapping[str, Any]) -> str | None:
    """Name of the number that the weight is a function of (a key of INPUTS); None for other shapings."""
    match shaping.get("kind"):
        case "sigmoid":
            return str(shaping.get("input", "logit"))
        case "entropy":
            return "entropy"
        case "linear" | "power":
            return "prob"
        case "reverse":
            return weight_input(shaping.get("of") or {})
    return None


def weight_at(shaping: Mapping[str, Any], u: np.ndarray) -> np.ndarray | None:
    """w at the values `u` of its input; None where a constant is annealed or was never calibrated.

    sigmoid, entropy: clip(alpha·[sigmoid((±u − u0)/tau) − mu], L, U); linear: alpha·π + 1 − alpha; power:
    clip(π^gamma, L, U); reverse: L + U − w.
    """
    if shaping.get("kind") == "reverse":
        inner = shaping.get("of") or {}
        weight, bounds = weight_at(inner, u), _bounds(inner)
        return None if weight is None or bounds is None else bounds[0] + bounds[1] - weight
    names = {
        "sigmoid": "alpha tau mu L U u0",
        "entropy": "alpha tau mu L U u0",
        "linear": "alpha",
        "power": "gamma L U",
    }
    needed = names.get(str(shaping.get("kind")), "").split()
    if not needed or not all(isinstance(shaping.get(name), int | float) for name in needed):
        return None
    c = {name: float(shaping[name]) for name in needed}
    if shaping["kind"] == "linear":
        return c["alpha"] * u + 1 - c["alpha"]
    if shaping["kind"] == "power":
        with np.errstate(divide="ignore"):
            return np.clip(np.power(u, c["gamma"]), c["L"], c["U"])
    signed = -u if shaping["kind"] == "entropy" and shaping.get("direction", "low") == "low" else u
    with np.errstate(over="ignore"):
        return np.clip(c["alpha"] * (1 / (1 + np.exp(-(signed - c["u0"]) / c["tau"])) - c["mu"]), c["L"], c["U"])


def _bounds(shaping: Mapping[str, Any]) -> tuple[float, float] | None:
    if shaping.get("kind") == "linear" and isinstance(shaping.get("alpha"), int | float):
        return 1 - float(shaping["alpha"]), 1.0
    low, high = shaping.get("L"), shaping.get("U")
    return (float(low), float(high)) if isinstance(low, int | float) and isinstance(high, int | float) else None


def input_values(name: str, tokens: pd.DataFrame) -> np.ndarray:
    """The input `name` of tokens with columns logp, logit, entropy."""
    logp = tokens["logp"].to_numpy(dtype=np.float64)
    if name == "log_odds":
        return np.asarray(logp - np.log(np.maximum(-np.expm1(logp), 2.0**-24)))
    if name == "prob":
        return np.asarray(np.exp(logp))
    return np.asarray(tokens[name], dtype=np.float64)
