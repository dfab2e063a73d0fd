"""Which rules apply at a step, what they say, and what they judge: a number for each step, made of the values up to it.

A history has an array for each canonical quantity (`sharpscope.diagnose.logs`) with one value a step: NaN where nothing was
logged, infinite where what was logged is not finite. A measure returns an array of the same length, NaN where it cannot judge. No
measure looks ahead, so that a run is judged after each step as its log is afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from sharpscope.rules.table import FIELDS, RULES, Rule


@dataclass(frozen=True)
class Event:
    """A row of the events table: something that a user should know."""

    step: int
    rule: str
    severity: str  # info | warning | error
    value: float
    threshold: float
    action: str
    message: str

    def row(self) -> dict[str, Any]:
        """The event as one row of the events table."""
        return dict(vars(self))


def applies(rule: Rule, measured: np.ndarray, threshold: float | None = None) -> np.ndarray:
    """Whether a rule applies at each step (n,), from its measure (n,); where that is NaN it does not."""
    limit = rule.threshold if threshold is None else threshold
    return measured <= limit if rule.below else measured >= limit


def advise(
    rule: Rule, trainer: str = "", lr: float | None = None, checkpoint: str | None = None
) -> tuple[str, str]:
    """A rule's meaning and advice, with the trainer's names of the settings (FIELDS)."""
    names = {
        **FIELDS.get(trainer, FIELDS[""]),
        "lr_value": "" if lr is None else f" = {lr:g}",
        "restart": f"go back to {checkpoint}"
        if checkpoint
        else "start again, since there is no checkpoint before",
    }
    return rule.meaning.format_map(names), rule.advice.format_map(names)


def judge(
    step: int,
    history: Mapping[str, float | None] | History,
    limits: Mapping[str, Any],
    trainer: str = "sharpscope",
    lr: float | None = None,
    checkpoint: str | None = None,
    known: str | None = None,
) -> list[Event]:
    """Events of the rules that apply at the last step of a history, number `step`.

    `history` has values by canonical quantity, of the steps so far or of this step alone: a rule whose quantities are
    missing, None or NaN does not apply. `limits` has, by rule, `threshold` and `action` of `health.<rule>`. With `known`
    only such rules are judged (`Rule.known`). `trainer`, `lr` and `checkpoint` are for the text.
    """
    arrays = OfLastStep(
        (name, np.atleast_1d(np.asarray(values, dtype=np.float64)))
        for name, values in history.items()
    )
    events = []
    for name, limit in limits.items():
        rule = RULES[name]
        if (
            limit.action == "off"
            or known not in (None, rule.known)
            or not set(rule.quantities) & set(arrays)
        ):
            continue
        measured = rule.measure(arrays)[-1:]
        if applies(rule, measured, limit.threshold).any():
            meaning, advice = advise(rule, trainer, lr, checkpoint)
            value = float(measured[-1])
            mild = limit.action == "warn" and rule.level(value) == "info"
            severity = "error" if limit.action == "stop" else "info" if mild else "warning"
            text = f"{rule.statistic}: {meaning}; {advice}"
            events.append(Event(step, name, severity, value, limit.threshold, limit.action, text))
    return events


Values = NDArray[np.float64]
History = Mapping[str, Values]
Measure = Callable[[History], Values]

WINDOW = 10
"""Steps of a trailing mean."""
EARLY = 5
"""First steps of a run, whose median is that to which later steps are compared."""
SPIKE_WINDOW, SPIKE_LEAST = 50, 10
"""Steps before a step to which its gradient norm is compared, and the fewest that are needed."""
FEW = 30
"""Steps from which on a run may be said to go nowhere."""


class OfLastStep(dict[str, Values]):
    """A history of which only the last step is judged: what a measure says of the others may be wrong."""


def value(name: str) -> Measure:
    """The quantity itself."""
    return _of_last(name, 1, lambda x: x)


def mean(name: str) -> Measure:
    """Mean of the quantity over the last WINDOW steps that have it."""
    return _of_last(name, WINDOW, lambda x: trailing(x, WINDOW))


def negative(name: str) -> Measure:
    """Share of the last WINDOW steps (of at least 5) whose value is negative beyond rounding."""
    return _of_last(name, WINDOW, lambda x: trailing((x < -1e-6).astype(float), WINDOW, 5))


def zero(name: str) -> Measure:
    """Share of the last WINDOW steps (of at least 5) whose value is exactly 0."""
    return _of_last(name, WINDOW, lambda x: trailing((x == 0).astype(float), WINDOW, 5))


def _of_last(name: str, count: int, of: Callable[[Values], Values], first: int = 0) -> Measure:
    """`of` the known values of one quantity, which needs the `first` and the last `count` of them."""
    return lambda history: _on_known(history, (name,), of, first, count)


def relative(name: str, window: int = WINDOW) -> Measure:
    """Median of the quantity over the last `window` steps, divided by its median in the first EARLY steps."""

    def _of(x: Values) -> Values:
        start = float(np.median(x[:EARLY])) if len(x) > EARLY else 0.0
        if start <= np.finfo(np.float32).tiny:
            return np.full(len(x), np.nan)
        ratio = trailing(x, window, how=np.nanmedian) / start
        ratio[:EARLY] = np.nan
        return ratio

    return _of_last(name, window, _of, EARLY)


def spike(name: str) -> Measure:
    """The quantity divided by its median in the 50 steps before; 0 where its logarithm is within 4 robust standard deviations."""

    def _of(x: Values) -> Values:
        ratio, logs = np.full(len(x), np.nan), np.log(x)
        if len(logs) > SPIKE_LEAST:
            windows = _windows(logs[:-1], SPIKE_WINDOW)[SPIKE_LEAST - 1 :]
            median = np.nanmedian(windows, axis=1)
            scale = 1.4826 * np.nanmedian(np.abs(windows - median[:, None]), axis=1)
            rise = logs[SPIKE_LEAST:] - median
            ratio[SPIKE_LEAST:] = np.where(rise > 4 * scale, np.exp(rise), 0.0)
        return ratio

    def _measure(history: History) -> Values:
        kind = OfLastStep if isinstance(history, OfLastStep) else dict
        positive = kind(
            {key: np.where(x > 0, x, np.nan) for key, x in history.items() if key == name}
        )
        return (
            _on_known(positive, (name,), _of, depends_on=SPIKE_WINDOW + 1)
            if positive
            else _nothing(history)
        )

    return _measure


def reward_fall(history: History) -> Values:
    """How far the mean reward of the last 5 steps is below the best mean of 10 steps before them, in standard errors.

    0 unless the fall is 30 % of the rewards' range so far and 15 % of the best mean. The standard error is that of a step's reward
    around its trend, from the absolute differences of adjacent steps.
    """

    def _of(y: Values) -> Values:
        out = np.full(len(y), np.nan)
        if len(y) < 6:
            return out
        best_so_far = np.fmax.accumulate(trailing(y, WINDOW, 3))
        now, best = trailing(y, 5, 5)[5:], best_so_far[:-5]
        known = np.minimum(np.arange(5, len(y)) - 4, WINDOW)  # steps of the mean before
        lowest = np.fmin.accumulate(np.where(np.isnan(now), best, now))
        drop = best - now
        large = (
            (drop >= 0.3 * np.fmax(best - lowest, 0.3 * np.abs(best)))
            & (drop >= 0.15 * np.abs(best))
            & (drop > 0)
        )
        out[5:] = np.where(np.isnan(best), np.nan, 0.0)
        at = (
            np.flatnonzero(large)[-1:] if isinstance(history, OfLastStep) else np.flatnonzero(large)
        )
        error = step_noise(y, at + 5) * np.sqrt(1 / 5 + 1 / known[at])
        with np.errstate(divide="ignore"):
            out[at + 5] = np.minimum(drop[at] / error, 99)
        return out

    return _on_known(history, ("reward",), _of)


def reward_gap(history: History) -> Values:
    """How far held-out accuracy is below its best, where the training reward is at least what it was then; else 0.

    The mean reward of the last 10 steps and that of the last 5 both: a reward that fell with the accuracy is no gap.
    """
    out = _nothing(history)
    if "accuracy" not in history or "reward" not in history:
        return out
    best, then = -np.inf, np.nan
    for at in np.flatnonzero(np.isfinite(history["accuracy"])):
        accuracy, rewards = history["accuracy"][at], history["reward"][: at + 1]
        rewards = rewards[np.isfinite(rewards)][-WINDOW:]
        level = float(rewards.mean()) if len(rewards) else np.nan
        if accuracy >= best:
            best, then = accuracy, level
        out[at] = best - accuracy if level >= then and rewards[-5:].mean() >= then else 0.0
    return out


def step_noise(y: Values, at: Any = slice(None)) -> Values:
    """Standard deviation of one step's value around its trend, from the steps up to each of the steps `at`."""
    windows = _windows(np.abs(np.diff(y, prepend=y[:1])), SPIKE_WINDOW)[at]
    if not len(windows):
        return np.empty(0)
    robust = 1.4826 * np.nanmedian(windows, axis=1)
    return np.where(robust > 0, robust, np.sqrt(np.nanmean(windows**2, axis=1))) / np.sqrt(2)


def constant_reward(history: History) -> Values:
    """Share of the last WINDOW steps whose mean reward is exactly that of the present one."""

    def _of(y: Values) -> Values:
        out = (_windows(y, WINDOW) == y[:, None]).mean(axis=1)
        out[: WINDOW // 2 - 1] = np.nan
        return out

    return _on_known(history, ("reward",), _of, depends_on=WINDOW)


def entropy_rise(history: History) -> Values:
    """Mean entropy of the last WINDOW steps less its lowest such mean before [nats]; 0 while it is below 1.5 times that."""

    def _of(x: Values) -> Values:
        now = trailing(x, WINDOW, EARLY)
        low = np.fmin.accumulate(now)
        return np.where(
            now >= 1.5 * np.maximum(low, 0), now - low, np.where(np.isnan(now), np.nan, 0.0)
        )

    return _on_known(history, ("entropy",), _of)


def drift(history: History) -> Values:
    """Change of the entropy since the last step with a gradient, while the gradient is zero [nats]; NaN at other steps."""
    out = _nothing(history)
    if "grad_norm" not in history or "entropy" not in history:
        return out
    known = np.flatnonzero(np.isfinite(history["entropy"]))
    entropy, still = history["entropy"][known], history["grad_norm"][known] == 0
    # of the steps without a gradient
    start = np.maximum.accumulate(np.where(still, 0, np.arange(len(known)) + 1))
    if len(known) > 1:  # a step's gradient is known after its entropy
        out[known[1:]] = np.where(
            still[:-1], np.abs(entropy[1:] - entropy[np.where(still, start, 0)[:-1]]), np.nan
        )
    return out


def policy_change(history: History) -> Values:
    """KL(π_old‖π) of the step [nats/token].

    Where no step has it, three steps later: three times the relative change of entropy in a step from which on the
    mean reward of three steps is at most 5 % of the mean before.
    """

    def _of(reward: Values, entropy: Values) -> Values:
        out = np.zeros(len(reward))
        if len(reward) < 4:
            return out
        before = (np.cumsum(reward) / np.arange(1, len(reward) + 1))[:-3]
        now = sliding_window_view(reward, 3)[1:].mean(axis=1)
        fell = np.flatnonzero((before > 0) & (now <= 0.05 * before) & (entropy[:-3] > 0))
        out[fell] = 3 * np.abs(entropy[fell + 1] / entropy[fell] - 1)  # those steps' updates did it
        return out

    kl = history.get("kl_step")
    if kl is not None and np.isfinite(kl).any():
        return value("kl_step")(history)
    return _on_known(history, ("reward", "entropy"), _of)


def ratio_tail(history: History) -> Values:
    """Largest factor by which trainer and sampler differ in the probability of one token, in either direction."""
    high, low = (history.get(name, _nothing(history)) for name in ("ratio_max", "ratio_min"))
    high, low = (np.where(np.isfinite(x) & (x > 1e-30), x, np.nan) for x in (high, low))
    return np.fmax(high, 1 / low)


def not_finite(history: History) -> Values:
    """Number of the rule's quantities whose logged value is not finite."""
    known = [
        np.isinf(history[name]).astype(float)
        for name in RULES["non_finite"].quantities
        if name in history
    ]
    return np.sum(known, axis=0) if known else _nothing(history)


def standing_still(history: History) -> Values:
    """Of the last step: the steps, if reward, entropy and length are where they began; 0 otherwise."""

    def _of(reward: Values, entropy: Values) -> Values:
        out = np.full(len(reward), np.nan)
        if len(reward) < FEW or np.ptp(reward) == 0:
            return out
        series = [reward, entropy, *([x] if len(x := finite(history, "length")) >= FEW else [])]
        kl = finite(history, "kl")
        still = not len(kl) or float(np.abs(kl).max()) < 1e-3
        still &= all(moved(y) < 3 and not trend_p(y) < 0.01 for y in series)
        out[-1] = len(reward) if still else 0.0
        return out

    return _on_known(history, ("reward", "entropy"), _of)


def trend_p(y: Values) -> float:
    """p-value of Kendall's test for a trend of a series."""
    from scipy.stats import kendalltau  # slow to import

    return float(kendalltau(np.arange(len(y)), y, method="asymptotic").pvalue)


def moved(y: Values) -> float:
    """Largest distance of the mean of a tenth of a series from that of the first, in standard errors."""
    n = max(1, min(len(y) // 2, max(5, round(len(y) / 10))))
    means = np.array([part.mean() for part in np.array_split(y, len(y) // n)])
    gap, noise = float(np.abs(means - means[0]).max()), float(step_noise(y)[-1])
    return gap / (noise * np.sqrt(2 / n)) if noise > 0 else (np.inf if gap > 0 else 0.0)


def finite(history: History, name: str) -> Values:
    """The known and finite values of a quantity (m,); empty if there are none."""
    found = history.get(name, np.empty(0))
    return found[np.isfinite(found)]


def trailing(
    x: Values, window: int, least: int = 1, how: Callable[..., Values] = np.nanmean
) -> Values:
    """A statistic of the last `window` values up to each (n,); NaN for the first `least` − 1."""
    if not len(x):
        return x.copy()
    out = how(_windows(x, window), axis=1)
    out[: least - 1] = np.nan
    return out


def _windows(x: Values, window: int) -> Values:
    """The last `window` values up to each, NaN before the first (n, window)."""
    return sliding_window_view(np.concatenate([np.full(window - 1, np.nan), x]), window)


def _nothing(history: History) -> Values:
    return np.full(len(next(iter(history.values()))) if history else 0, np.nan)


def _on_known(
    history: History,
    names: tuple[str, ...],
    of: Callable[..., Values],
    first: int = 0,
    depends_on: int | None = None,
) -> Values:
    """`of` the steps at which all of `names` are known and finite, NaN at the others.

    `depends_on`: how many of these the value at a step depends on, besides the `first` ones; None: on all up to it.
    """
    out = _nothing(history)
    if all(name in history for name in names):
        known = np.flatnonzero(np.all([np.isfinite(history[name]) for name in names], axis=0))
        if (
            depends_on is not None
            and isinstance(history, OfLastStep)
            and len(known) > first + depends_on
        ):
            known = np.concatenate([known[:first], known[-depends_on:]])
        if len(known):
            out[known] = of(*(history[name][known] for name in names))
    return out


# -- spikes in a running training, and the sampler's log-probabilities: with r = π/μ, of the trainer's to the sampler's
# -- probability, KL(μ‖π) is estimated by k1 = −ln r, k2 = (ln r)²/2 and k3 = r − 1 − ln r

BAND = (0.9, 1.1)
"""Ratios π/μ outside are counted."""
QUANTITIES = ("outside", "k1", "k2", "k3")
POSITIVE = 1e-4
"""Rounding that a log-probability of 0 may have [nats]."""
CERTAIN = -0.1
"""Where the trainer's log-probability is below this, a sampler's of exactly 0 is wrong [nats]."""
FEWEST = 16
"""Tokens from which on equal log-probabilities are no coincidence."""


def robust_z(history: Sequence[float], value: float) -> float:
    """Robust z-score (value − median)/(1.4826·MAD) against the last `SPIKE_WINDOW` values of `history`.

    NaN with fewer than `SPIKE_LEAST` finite values. If the MAD is zero, 0 at the median and ±inf otherwise.
    """
    recent = [v for v in history[-SPIKE_WINDOW:] if math.isfinite(v)]
    if len(recent) < SPIKE_LEAST or not math.isfinite(value):
        return math.nan
    median = float(np.median(recent))
    scale = 1.4826 * float(np.median(np.abs(np.array(recent) - median)))
    if scale == 0:
        return 0.0 if value == median else math.copysign(math.inf, value - median)
    return (value - median) / scale


def mismatch(
    logp: NDArray[np.floating], sampler: NDArray[np.floating]
) -> dict[str, NDArray[np.float64]]:
    """QUANTITIES of each token (n,): `outside` (0 or 1), k1, k2, k3 [nats]."""
    x = np.asarray(logp, dtype=np.float64) - np.asarray(sampler, dtype=np.float64)
    ratio = np.exp(x)
    outside = (ratio < BAND[0]) | (ratio > BAND[1])
    return {"outside": outside.astype(float), "k1": -x, "k2": x * x / 2, "k3": np.expm1(x) - x}


def sampler_values(logp: NDArray[np.floating], sampler: NDArray[np.floating]) -> dict[str, float]:
    """What the health rules judge of a step's log-probabilities (n,) [nats], where both are known; empty without any.

    Impossible are a sampler's above 0, of 0 where the trainer's is below CERTAIN, and equal ones where the trainer's differ.
    """
    known = np.isfinite(logp) & ~np.isnan(sampler)
    if not known.any():
        return {}
    logp, sampler = logp[known], sampler[known]
    gap, outside = np.abs(logp - sampler), mismatch(logp, sampler)["outside"].mean()
    impossible = (sampler > POSITIVE) | ((sampler == 0) & (logp < CERTAIN))
    if len(sampler) >= FEWEST and np.ptp(sampler) == 0 and np.ptp(logp) > 0:
        impossible[:] = True
    return {
        "sampler_impossible": float(impossible.mean()),
        "sampler_outside": float(outside),
        "mismatch": float(gap.mean()),
        "ratio_max": float(np.exp(np.minimum(gap.max(), 700))),
    }
