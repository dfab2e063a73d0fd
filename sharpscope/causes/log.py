"""Causes that the log of a training shows by itself, without recorded tokens.

Only what a log can tell is named. A log has means over a step, so most causes need a recording; what it would add is said.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from sharpscope.causes.named import Cause
from sharpscope.packaged import package_yaml

Facts = Mapping[str, object]
Frame = pd.DataFrame
"""A log by step: columns are quantities (`sharpscope.diagnose`), and `rewards/NAME` the means of a reward's components."""
FEW = 5
"""Steps below which a log shows no cause that needs a course."""

_TEXTS = package_yaml("sharpscope.causes", "log.yaml")


def causes_of_log(frame: Frame) -> list[Cause]:
    """The causes that a log shows."""
    found = []
    for rule in _RULES:
        facts = rule(frame)
        if facts is not None:
            found.append(_cause(rule.__name__.removeprefix("_"), facts))
    return found


def _cause(name: str, facts: Facts) -> Cause:
    """A cause with its words; a fact of the whole log has no step, and counts as of the first."""
    step = facts.get("step", 1)
    assert isinstance(step, int)
    said = {part: text.format_map(facts) for part, text in _TEXTS[name].items()}
    return Cause(name=name, step=step, **said)


def _column(frame: Frame, name: str) -> pd.Series:
    """The values of a quantity by step; none where the log does not have it."""
    return frame[name].dropna().astype(float) if name in frame else pd.Series(dtype=float)


def _parts(frame: Frame) -> list[str]:
    """Columns of the reward's components."""
    return [str(name) for name in frame if str(name).startswith("rewards/")]


def _reward_not_finite(frame: Frame) -> Facts | None:
    reward = _column(frame, "reward")
    bad = reward[~np.isfinite(reward)]
    if bad.empty:
        return None
    step = int(bad.index[0])
    names = [
        part.removeprefix("rewards/")
        for part in _parts(frame)
        if not np.isfinite(frame[part].get(step, 0.0))
    ]
    return {
        "step": step,
        "value": float(bad.iloc[0]),
        "part": f" ({', '.join(names)})" if names else "",
    }


def _zero_learning_rate(frame: Frame) -> Facts | None:
    rate = _column(frame, "lr")
    norm = _column(frame, "grad_norm")
    if len(rate) < FEW or (rate != 0).any() or not (norm > 0).any():
        return None
    return {"steps": len(rate)}


def _reward_constant(frame: Frame) -> Facts | None:
    reward = _column(frame, "reward")
    if len(reward) < FEW or reward.nunique() > 1 or reward.iloc[0] > 0:
        return None
    dead = _column(frame, "dead_groups")
    entropy = _column(frame, "entropy")
    if dead.empty or (dead != 1).any() or not (entropy > 0.05).any():
        return None
    return {"reward": float(reward.iloc[0]), "steps": len(reward)}


def _wrong_end_token(frame: Frame) -> Facts | None:
    cut = _column(frame, "truncated")
    reward = _column(frame, "reward")
    if len(cut) < FEW or (cut < 1).any() or not (reward.head(FEW) > 0).all():
        return None
    return {"steps": len(cut), "reward": float(reward.head(FEW).mean())}


def _stale_sampler(frame: Frame) -> Facts | None:
    gap = _column(frame, "mismatch")
    if len(gap) < FEW or gap.iloc[0] > 0.01 or gap.iloc[-3:].mean() < 0.1:
        return None
    trend = _correlation(np.arange(len(gap)), gap.to_numpy())
    if not trend > 0.6:
        return None
    return {
        "first": float(gap.iloc[0]),
        "last": float(gap.iloc[-1]),
        "trend": trend,
    }


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's."""
    return float(np.corrcoef(x, y)[0, 1])


def _reference_differs(frame: Frame) -> Facts | None:
    kl = _column(frame, "kl")
    if len(kl) < FEW or kl.index[0] > 1 or kl.iloc[0] < 0.02:
        return None
    return {"kl": float(kl.iloc[0])}


def _reference_moves(frame: Frame) -> Facts | None:
    size = _column(frame, "kl").abs()
    rate = _column(frame, "lr")
    norm = _column(frame, "grad_norm")
    moves = (rate > 0).any() and (norm > 0).any()
    if len(size) < FEW or size.max() > 1e-7 or not moves:
        return None
    return {"steps": len(size), "largest": float(size.max())}


def _kl_sign(frame: Frame) -> Facts | None:
    both = pd.concat([_column(frame, "kl"), _column(frame, "loss")], axis=1).dropna()
    if len(both) < 2 * FEW or both["kl"].max() < 0.3:
        return None
    kl, loss = both["kl"], both["loss"]
    slope = float(np.polyfit(kl, loss, 1)[0])
    r2 = _correlation(kl.to_numpy(), loss.to_numpy()) ** 2
    if slope >= 0 or not r2 > 0.8:
        return None
    return {"slope": slope, "r2": r2, "largest": float(kl.max())}


def _update_too_large(frame: Frame) -> Facts | None:
    entropy = _column(frame, "entropy")
    rate = _column(frame, "lr")
    start = entropy[entropy.index <= 4]
    if len(start) < 2 or not len(rate) or rate.iloc[:4].max() < 1e-3:
        return None
    before = float(start.iloc[0])
    after = float(start.max())
    if not after - before > max(0.3, before):
        return None
    return {
        "before": before,
        "after": after,
        "step": int(start.index[int(start.to_numpy().argmax())]),
        "lr": float(rate.iloc[0]),
    }


def _prompt_scale(frame: Frame) -> Facts | None:
    spread = _column(frame, "reward_std")
    ordered = np.sort(spread[np.isfinite(spread) & (spread > 0)])
    quarter = len(ordered) // 4
    if quarter < 2:
        return None
    above = ordered[quarter:]  # gaps between the smallest values say nothing
    jumps = above[1:] / above[:-1]
    if jumps.max() < 5:
        return None
    large = spread[spread >= above[1:][jumps.argmax()]]  # the values above the largest gap
    times = float(large.max() / np.median(ordered))
    return {
        "step": int(large.index.min()),
        "steps": ", ".join(map(str, large.index[:6])),
        "times": max(times, jumps.max()),
    }


def _reward_feature(frame: Frame) -> Facts | None:
    parts = _parts(frame)
    if len(parts) < 2 or len(frame) < 3 * FEW:
        return None
    third = len(frame) // 3
    first = frame[parts].iloc[:third].mean()
    last = frame[parts].iloc[-third:].mean()
    rises = (last > 2 * first) & (first > 0)
    falls = (last < first / 2) & (first > 0)
    if not rises.any() or not falls.any():
        return None
    up, down = str(rises.idxmax()), str(falls.idxmax())
    return {
        "up": up.removeprefix("rewards/"),
        "rise": f"{first[up]:.2g} → {last[up]:.2g}",
        "down": down.removeprefix("rewards/"),
        "fall": f"{first[down]:.2g} → {last[down]:.2g}",
    }


_RULES = (
    _reward_not_finite,
    _zero_learning_rate,
    _reward_constant,
    _wrong_end_token,
    _stale_sampler,
    _reference_differs,
    _reference_moves,
    _kl_sign,
    _update_too_large,
    _prompt_scale,
    _reward_feature,
)
"""In the order of naming."""
