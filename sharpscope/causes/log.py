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
    step = facts.get("step", 1)
    said = {part: text.format_map(facts) for part, text in _TEXTS[name].items()}
    return Cause(name=name, step=step if isinstance(step, int) else 1, **said)


def _column(frame: Frame, name: str) -> pd.Series:
    return frame[name].dropna().astype(float) if name in frame else pd.Series(dtype=float)


def _parts(frame: Frame) -> list[str]:
    return [str(name) for name in frame if str(name).startswith("rewards/")]


def _reward_not_finite(frame: Frame) -> Facts | None:
    reward = _column(frame, "reward")
    bad = reward[~np.isfinite(reward)]
    if bad.empty:
        return None
    step = int(bad.index[0])
    parts = [p for p in _parts(frame) if not np.isfinite(frame[p].get(step, 0.0))]
    names = ", ".join(part.removeprefix("rewards/") for part in parts)
    return {"step": step, "value": float(bad.iloc[0]), "part": f" ({names})" if names else ""}


def _zero_learning_rate(frame: Frame) -> Facts | None:
    rate = _column(frame, "lr")
    norm = _column(frame, "grad_norm")
    if len(rate) < FEW or (rate != 0).any() or not (norm > 0).any():
        return None
    return {"steps": len(rate)}


def _reward_constant(frame: Frame) -> Facts | None:
    reward = _column(frame, "reward")
    dead = _column(frame, "dead_groups")
    entropy = _column(frame, "entropy")
    same = len(reward) >= FEW and reward.nunique() == 1 and len(dead) and (dead == 1).all()
    if not same or reward.iloc[0] > 0 or not (entropy > 0.05).any():
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
    trend = float(np.corrcoef(np.arange(len(gap)), gap)[0, 1])
    facts = {"first": float(gap.iloc[0]), "last": float(gap.iloc[-1]), "trend": trend}
    return facts if trend > 0.6 else None


def _reference_differs(frame: Frame) -> Facts | None:
    kl = _column(frame, "kl")
    if len(kl) < FEW or kl.index[0] > 1 or kl.iloc[0] < 0.02:
        return None
    return {"kl": float(kl.iloc[0])}


def _reference_moves(frame: Frame) -> Facts | None:
    kl = _column(frame, "kl")
    rate = _column(frame, "lr")
    norm = _column(frame, "grad_norm")
    moves = (rate > 0).any() and (norm > 0).any()
    if len(kl) < FEW or kl.abs().max() > 1e-7 or not moves:
        return None
    return {"steps": len(kl), "largest": float(kl.abs().max())}


def _kl_sign(frame: Frame) -> Facts | None:
    kl = _column(frame, "kl")
    loss = _column(frame, "loss")
    both = pd.concat([kl, loss], axis=1).dropna()
    if len(both) < 2 * FEW or both["kl"].max() < 0.3:
        return None
    slope, _ = np.polyfit(both["kl"], both["loss"], 1)
    r2 = float(np.corrcoef(both["kl"], both["loss"])[0, 1]) ** 2
    facts = {"slope": float(slope), "r2": r2, "largest": float(both["kl"].max())}
    return facts if slope < 0 and r2 > 0.8 else None


def _update_too_large(frame: Frame) -> Facts | None:
    entropy = _column(frame, "entropy")
    rate = _column(frame, "lr")
    start = entropy[entropy.index <= 4]
    if len(start) < 2 or not len(rate) or rate.iloc[:4].max() < 1e-3:
        return None
    rise = float(start.max() - start.iloc[0])
    facts = {
        "before": float(start.iloc[0]),
        "after": float(start.max()),
        "step": int(start.index[int(start.to_numpy().argmax())]),
    }
    return facts | {"lr": float(rate.iloc[0])} if rise > max(0.3, start.iloc[0]) else None


def _prompt_scale(frame: Frame) -> Facts | None:
    spread = _column(frame, "reward_std")
    ordered = np.sort(spread[np.isfinite(spread) & (spread > 0)])
    quarter = len(ordered) // 4
    if quarter < 2:
        return None
    jumps = ordered[quarter + 1 :] / ordered[quarter:-1]
    limit = ordered[quarter + 1 + int(jumps.argmax())]  # the first value above the largest gap
    large = spread[spread >= limit]
    if jumps.max() < 5:
        return None
    steps = ", ".join(map(str, large.index[:6]))
    times = float(large.max() / np.median(ordered))
    return {"step": int(large.index.min()), "steps": steps, "times": max(times, jumps.max())}


def _reward_feature(frame: Frame) -> Facts | None:
    parts = _parts(frame)
    if len(parts) < 2 or len(frame) < 3 * FEW:
        return None
    third = len(frame) // 3
    first = frame[parts].iloc[:third].mean()
    last = frame[parts].iloc[-third:].mean()
    facts = {}
    for name, course, changed in (
        ("up", "rise", last > 2 * first),
        ("down", "fall", last < first / 2),
    ):
        if not (changed & (first > 0)).any():
            return None
        part = str((changed & (first > 0)).idxmax())
        facts[name] = part.removeprefix("rewards/")
        facts[course] = f"{first[part]:.2g} → {last[part]:.2g}"
    return facts


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
