"""The token weight that a run used, as a function of one statistic of a token, for drawing."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
from pydantic import TypeAdapter, ValidationError
from scipy.special import expit

from sharpscope.config import TokenWeight
from sharpscope.config.token_weights import statistic_values

INPUTS = {
    "logit": "raw logit of the token",
    "log_odds": "log-odds ln π/(1 − π) [nats]",
    "logp": "ln π [nats]",
    "prob": "probability π",
    "entropy": "entropy of the position [nats]",
}
NUMPY: Any = SimpleNamespace(exp=np.exp, expm1=np.expm1, log=np.log, sigmoid=expit)
"""NumPy as the array namespace of `Weighting.at_statistic`."""


def weight_config(info: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the weight that a run used: the calibrated one if there is one."""
    configured = ((info.get("config") or {}).get("method") or {}).get("weight") or {}
    return dict(info.get("calibration") or configured)


def weight_input(config: Mapping[str, Any]) -> str | None:
    """Name of the statistic that the weight is a function of (a key of INPUTS); None for other weights."""
    weight = _parsed(config)
    return None if weight is None else weight.statistic


def weight_at(config: Mapping[str, Any], u: np.ndarray) -> np.ndarray | None:
    """W at the values `u` of its input; None if a constant is annealed or was never calibrated."""
    weight = _parsed(config)
    if weight is None:
        return None
    try:
        return np.asarray(weight.at_statistic(u, NUMPY))
    except ValueError:
        return None


def weight_inputs(config: Mapping[str, Any], tokens: pd.DataFrame) -> np.ndarray:
    """The weight's input of tokens with columns logp, logit, entropy, in float64."""
    columns = {name: tokens[name].to_numpy(dtype=np.float64) for name in ("logp", "logit", "entropy")}
    return np.asarray(statistic_values(_parsed(config), SimpleNamespace(**columns), NUMPY))


def _parsed(config: Mapping[str, Any]) -> Any:
    """The weight's own type; None for one of a kind that has no such function, or of the user's own."""
    inner = config
    while inner.get("kind") == "reverse":
        inner = inner.get("of") or {}
    if inner.get("kind") not in ("sigmoid", "entropy", "linear", "power"):
        return None
    try:
        return TypeAdapter(TokenWeight).validate_python(dict(config))
    except ValidationError:
        return None
