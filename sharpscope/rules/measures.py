"""What rules judge: a number for each step of a training, made of the values up to it.

A history has an array for each canonical quantity (`sharpscope.diagnose.quantities`) with one value a step: NaN where nothing was
logged, infinite where what was logged is not finite. A measure returns an array of the same length, NaN where it cannot judge. No
measure looks ahead, so that a run is judged after each step as its log is afterwards; those of a whole run say it of its last step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Values = NDArray[np.float64]
Flags = NDArray[np.bool_]
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
    """The quantity itself.

    Args:
        name: canonical quantity.

    Returns:
        A measure in the quantity's own unit.
    """
    return _of_last(name, 1, lambda x: x)


def mean(name: str) -> Measure:
    """Mean of the quantity over the last WINDOW steps that have it.

    Args:
        name: canonical quantity; steps that lack it do not count.

    Returns:
        A measure in the quantity's own unit.
    """
    return _of_last(name, WINDOW, lambda x: trailing(x, WINDOW))


def negative(name: str) -> Measure:
    """Share of the last WINDOW steps (of at least 5) whose value is negative beyond rounding and the noise of samples.

    Values above −1e-4 count as 0: a KL that is estimated from samples has such values by rounding.

    Args:
        name: canonical quantity that cannot be negative.

    Returns:
        A measure in [0, 1].
    """
    return _of_last(name, WINDOW, lambda x: trailing((x < -1e-4).astype(float), WINDOW, 5))


def zero(name: str) -> Measure:
    """Share of the last WINDOW steps (of at least 5) whose value is exactly 0.

    Args:
        name: canonical quantity.

    Returns:
        A measure in [0, 1].
    """
    return _of_last(name, WINDOW, _zeros)


def _zeros(x: Values) -> Values:
    return trailing((x == 0).astype(float), WINDOW, 5)


def _of_last(name: str, count: int, of: Callable[[Values], Values], first: int = 0) -> Measure:
    """`of` the known values of one quantity, which needs the `first` and the last `count` of them."""
    return lambda history: _on_known(
        history,
        (name,),
        of,
        first,
        count,
    )


def relative(name: str, window: int = WINDOW) -> Measure:
    """Median of the quantity over the last `window` steps, divided by its median in the first EARLY steps.

    1 where a step has few groups and the change is within 4 standard errors of medians.

    Args:
        name: canonical quantity, positive.
        window: steps of the later median.

    Returns:
        A measure without unit: 2 for a quantity that has doubled. NaN in the first EARLY steps, and where the
        quantity began at 0.
    """

    def _of(x: Values, last: bool = False) -> Values:
        start = float(np.median(x[:EARLY])) if len(x) > EARLY else 0.0
        if start <= np.finfo(np.float32).tiny:
            return np.full(len(x), np.nan)
        how = np.median if last else np.nanmedian  # which takes ten times as long
        ratio = trailing(x, window, how=how, last=last) / start
        ratio[:EARLY] = np.nan
        return ratio

    def _significant(x: Values) -> Values:
        ratio = _of(x)
        with np.errstate(divide="ignore", invalid="ignore"):
            noise = step_noise(np.log(np.maximum(x, 1e-12)))
            # a median's standard error is 1.25 times that of a mean
            small = np.abs(np.log(ratio)) < 5 * noise * np.sqrt(1 / EARLY + 1 / window)
        return np.where(small, 1.0, ratio)

    def _measure(history: History) -> Values:
        of = partial(_of, last=isinstance(history, OfLastStep))
        many = _on_known(history, (name,), of, EARLY, window)
        if not few_groups(history)[-1:].any():
            return many
        return _by_groups(history, lambda: many, lambda: _on_known(history, (name,), _significant))

    return _measure


def spike(name: str) -> Measure:
    """The quantity divided by its median in the 50 steps before; 0 where its logarithm is within 4 robust standard deviations.

    Steps without any advantage have a gradient of another size, and are compared with each other only.

    Args:
        name: canonical quantity, positive.

    Returns:
        A measure without unit: 10 for a step of ten times the median. NaN in the first 10 steps.
    """

    def _of(x: Values, last: bool = False) -> Values:
        ratio, logs = np.full(len(x), np.nan), np.log(x)
        if len(logs) > SPIKE_LEAST:
            judged, how = slice(SPIKE_LEAST, None), np.nanmedian
            windows = _windows(logs[:-1], SPIKE_WINDOW)[SPIKE_LEAST - 1 :]
            if last:
                judged, how = slice(-1, None), np.median
                windows = logs[None, :-1][:, -SPIKE_WINDOW:]
            median = how(windows, axis=1)
            scale = 1.4826 * how(np.abs(windows - median[:, None]), axis=1)
            rise = logs[judged] - median
            ratio[judged] = np.where(rise > 4 * scale, np.exp(rise), 0.0)
        return ratio

    def _alike(history: History, steps: Flags) -> Values:
        """Of some steps, compared with each other."""
        last = isinstance(history, OfLastStep)
        part = {name: np.where(steps & (history[name] > 0), history[name], np.nan)}
        return _on_known(
            OfLastStep(part) if last else part,
            (name,),
            partial(_of, last=last),
            depends_on=SPIKE_WINDOW + 1,
        )

    def _measure(history: History) -> Values:
        if name not in history:
            return _nothing(history)
        idle = _without_advantage(history)
        return _choose(history, idle, lambda: _alike(history, idle), lambda: _alike(history, ~idle))

    return _measure


def _without_advantage(history: History) -> Flags:
    """Steps whose groups all have equal rewards: their gradient is that of a KL only, and is compared with others of this kind."""
    if "dead_groups" in history:
        return np.asarray(history["dead_groups"] >= 1)
    return np.asarray(history.get("reward_std", np.ones(len(_nothing(history)))) == 0)


def reward_fall(history: History) -> Values:
    """How far the mean reward of the last 5 steps is below the best mean of 10 steps before them, in standard errors.

    0 unless the fall is 30 % of the rewards' range so far and 15 % of the best mean. The standard error is that of a step's reward
    around its trend, from the absolute differences of adjacent steps. Where a step has few groups, means are over 20 and 50 steps.
    """
    last = isinstance(history, OfLastStep)
    many, few = (
        partial(_on_known, history, ("reward",), partial(_fall, recent=now, window=best, last=last))
        for now, best in ((5, WINDOW), (20, SPIKE_WINDOW))
    )
    return _by_groups(history, many, few)


def _fall(y: Values, recent: int, window: int, last: bool) -> Values:
    """`reward_fall` for means over the last `recent` steps and the best of `window` steps; `last`: of the last step alone."""
    out = np.full(len(y), np.nan)
    if len(y) < recent + 1:
        return out
    best_so_far = np.fmax.accumulate(
        trailing(
            y,
            window,
            min(3, recent) if recent <= 5 else recent,
        )
    )
    now = trailing(y, recent, recent)[recent:]
    best = best_so_far[:-recent]
    known = np.minimum(np.arange(recent, len(y)) - recent + 1, window)  # steps of the mean before
    lowest = np.fmin.accumulate(np.where(np.isnan(now), best, now))
    drop = best - now
    large = (
        (drop >= 0.3 * np.fmax(best - lowest, 0.3 * np.abs(best)))
        & (drop >= 0.15 * np.abs(best))
        & (drop > 0)
    )
    out[recent:] = np.where(np.isnan(best), np.nan, 0.0)
    at = np.flatnonzero(large)[-1:] if last else np.flatnonzero(large)
    noise = step_noise(y, at + recent)
    if (
        recent > EARLY
    ):  # rewards of few groups are far from normal: the spread of the last steps, whatever its cause
        noise = np.fmax(noise, trailing_std(y, 2 * window)[at + recent])
    error = noise * np.sqrt(1 / recent + 1 / known[at])
    with np.errstate(divide="ignore"):
        out[at + recent] = np.minimum(drop[at] / error, 99)
    return out


def trailing_std(y: Values, window: int) -> Values:
    """Standard deviation of the last `window` values up to each (n,).

    Args:
        y: values (n,).
        window: how many of them count.

    Returns:
        (n,), from √(E[y²] − E[y]²); 0 for the first one.
    """
    mean_of_squares = trailing(y * y, window)
    square_of_mean = trailing(y, window) ** 2
    return np.sqrt(np.maximum(mean_of_squares - square_of_mean, 0))


def reward_gap(history: History) -> Values:
    """How far held-out accuracy is below its best, as a share of its scale, where the training reward is at least what it was then.

    0 otherwise. Both of the last two evaluations must be below, since one is noisy: the smaller distance counts. The mean reward of
    the last 10 steps and that of the last 5 both must be as high as then: a reward that fell with the accuracy is no gap. The scale is
    1 for values in [0, 1], else the reward's standard deviation, or the range of the training's rewards so far.

    Returns:
        (n,), a share of the scale at steps with an evaluation and NaN at others.
    """
    out = _nothing(history)
    if "accuracy" not in history or "reward" not in history:
        return out
    best = -np.inf
    then = np.nan
    gap_before = np.inf
    for at in np.flatnonzero(np.isfinite(history["accuracy"])).tolist():
        accuracy = history["accuracy"][at]
        rewards = history["reward"][: at + 1]
        rewards = rewards[np.isfinite(rewards)]
        level = float(rewards[-WINDOW:].mean()) if len(rewards) else np.nan
        if accuracy >= best:
            best = accuracy
            then = level
            gap_before = 0.0
            out[at] = 0.0
            continue
        high = level >= then and rewards[-5:].mean() >= then
        gap = (best - accuracy) / _scale(history, at, rewards) if high else 0.0
        out[at] = min(gap, gap_before)
        gap_before = gap
    return out


def _scale(history: History, at: int, rewards: Values) -> float:
    """The scale of held-out rewards at a step: 1 where they and the training's are in [0, 1]."""
    held_out = history["accuracy"][: at + 1]
    held_out = held_out[np.isfinite(held_out)]
    both = np.concatenate([held_out, rewards])
    if both.min() >= 0 and both.max() <= 1:
        return 1.0
    spread = history.get("reward_std", np.empty(0))[: at + 1]
    spread = spread[np.isfinite(spread)]
    return max(float(np.median(spread)) if len(spread) else 0.0, float(np.ptp(rewards)), 1e-12)


def step_noise(y: Values, at: slice | NDArray[np.intp] = slice(None)) -> Values:
    """Standard deviation of one step's value around its trend, from the steps up to each of the steps `at`.

    From the median of absolute differences of adjacent steps, which can be small by luck where there are few: of fewer than 20
    their mean counts where it gives more.
    """
    windows = _windows(np.abs(np.diff(y, prepend=y[:1])), SPIKE_WINDOW)[at]
    if not len(windows):
        return np.empty(0)
    robust = 1.4826 * np.nanmedian(windows, axis=1)
    few = (robust == 0) | (np.isfinite(windows).sum(1) < 2 * WINDOW)
    by_mean = np.sqrt(np.pi / 2) * np.nanmean(windows, axis=1)
    return np.where(few, np.fmax(robust, by_mean), robust) / np.sqrt(2)


def zero_gradient(history: History) -> Values:
    """Share of the last WINDOW steps (of at least 5) whose gradient norm is exactly 0.

    0 where chance explains half of them or more: with one prompt a step, whose completions often get equal rewards, zeros in a row
    are common (`_chance`). 0 as well where the task is solved.

    Returns:
        (n,), in [0, 1].
    """
    share = _on_known(history, ("grad_norm",), _zeros)
    likely = _by_chance(history, "grad_norm", lambda x: x == 0)
    return np.where((share >= 0.5) & (likely | solved(history)), 0.0, share)


def dead_share(history: History) -> Values:
    """Mean share of groups with equal rewards over the last WINDOW steps, of single groups over the last 50; 0 for a solved task.

    Returns:
        (n,), in [0, 1].
    """
    many, single = (
        partial(_on_known, history, ("dead_groups",), partial(trailing, window=window, least=least))
        for window, least in ((WINDOW, 1), (SPIKE_WINDOW, 20))
    )
    share = _by_groups(history, many, single)
    return np.where((share > 0) & solved(history), 0.0, share)


def lost_gradient(history: History) -> Values:
    """Share of the last WINDOW steps (of at least 5) whose gradient is exactly 0 although rewards of a group differ.

    Where the share of groups with equal rewards is logged, it must be below 0.99; where it is not, all
    of the steps must be such ones, since the rewards of a batch differ even if those of each group do not.

    Returns:
        (n,), in [0, 1].
    """

    def _of(norm: Values, spread: Values) -> Values:
        return trailing(((norm == 0) & (spread > 0)).astype(float), WINDOW, 5)

    lost = _on_known(
        history,
        ("grad_norm", "reward_std"),
        _of,
        depends_on=WINDOW,
    )
    if "dead_groups" not in history:
        # The standard deviation over a batch is positive even if the rewards of each group are equal.
        return np.where(lost >= 1, lost, np.where(np.isnan(lost), np.nan, 0.0))
    dead = _on_known(
        history,
        ("dead_groups",),
        lambda x: trailing(x, WINDOW),
        depends_on=WINDOW,
    )
    return np.where(dead < 0.99, lost, np.where(np.isnan(lost), np.nan, 0.0))


def constant_reward(history: History) -> Values:
    """Share of the last WINDOW steps whose mean reward is exactly that of the present one.

    0 where chance explains it, or the task is solved.

    Returns:
        (n,), in [0, 1].
    """

    def _of(y: Values) -> Values:
        out = (_windows(y, WINDOW) == y[:, None]).mean(axis=1)
        out[: WINDOW // 2 - 1] = np.nan
        return out

    share = _on_known(
        history,
        ("reward",),
        _of,
        depends_on=WINDOW,
    )
    likely = _by_chance(history, "reward", lambda y: np.append(False, y[1:] == y[:-1]))
    return np.where((share >= 0.5) & (likely | solved(history)), 0.0, share)


CHANCE = 0.05
"""Chance of a row of equal steps, anywhere in the run so far, from which on it means something."""


def _by_chance(history: History, name: str, events: Callable[[Values], Flags]) -> Flags:
    """Whether the `events` in a row up to each step, of the known values of a quantity, are likely by chance."""
    many, few = (
        partial(_on_known, history, (name,), lambda x, prior=prior: _chance(events(x), *prior))
        for prior in ((0.5, 2.0), (9.5, 10.0))
    )
    likely: Flags = _by_groups(history, many, few) >= CHANCE
    return likely


def _chance(events: Flags, prior: float, weight: float) -> Values:
    """Bound on the chance of the events in a row up to each step (n,), from how often there was one before they began.

    The chance of s in a row anywhere in n steps is at most n·p^s. p is estimated with `prior` events in `weight` steps: half an event
    in two, or 9.5 in ten where a step has few groups.
    """
    n = np.arange(1, len(events) + 1)
    last_other = np.maximum.accumulate(np.where(events, 0, n))  # steps up to the last one without
    before = np.append(0, np.cumsum(events))[last_other]
    chance: Values = n * ((before + prior) / (last_other + weight)) ** (n - last_other)
    return chance


FEW_GROUPS = 2
"""Groups in a step up to which chance rules a single step."""


def few_groups(history: History) -> Flags:
    """Whether a step has at most FEW_GROUPS groups, by the steps up to each (n,).

    By the history's `groups`, where that is known. Else by the shares of groups with equal rewards, which are then only 0, 1/2 and 1,
    and at least two of them; without these, if a fifth of the steps and not all have rewards that do not differ.

    Args:
        history: values by quantity (n,).

    Returns:
        (n,); False everywhere where nothing tells it.
    """
    if "groups" in history:
        return np.asarray(history["groups"] <= FEW_GROUPS)
    if "dead_groups" in history:
        shares = history["dead_groups"]
        known = np.isfinite(shares)
        none, half, all_ = (
            np.logical_or.accumulate(known & (shares == value)) for value in (0.0, 0.5, 1.0)
        )
        other = np.logical_or.accumulate(known & ~np.isin(shares, (0.0, 0.5, 1.0)))
        seen = none.astype(int) + half + all_
        found: Flags = (seen >= 2) & all_ & ~other & (np.cumsum(known) >= 3)
        return found
    if "reward_std" in history:
        known = np.isfinite(history["reward_std"])
        count = np.maximum(np.cumsum(known), 1)
        share = np.cumsum(known & (history["reward_std"] == 0)) / count
        return (count >= 5) & (share >= 0.2) & (share < 1)
    return np.zeros(len(_nothing(history)), dtype=bool)


def _by_groups(history: History, many: Callable[[], Values], few: Callable[[], Values]) -> Values:
    """`few` at steps with few groups, else `many`."""
    return _choose(history, few_groups(history), few, many)


def _choose(
    history: History, where: Flags, first: Callable[[], Values], second: Callable[[], Values]
) -> Values:
    """`first` at the steps `where` (n,), else `second`; of the last step alone only the one that it needs."""
    if isinstance(history, OfLastStep) and len(where):
        return first() if where[-1] else second()
    found: Values = np.where(where, first(), second())
    return found


def solved(history: History) -> Flags:
    """Whether the mean reward of the last WINDOW steps is within 10 % of the largest so far, or groups are all right, and it rose.

    The largest is 1 for rewards of at most 1.

    Args:
        history: values by quantity (n,).

    Returns:
        (n,); False everywhere without a reward.
    """
    none = np.zeros(len(_nothing(history)), dtype=bool)
    if "reward" not in history:
        return none

    def _of(y: Values, window: int, least: int) -> Values:
        top = np.maximum(np.maximum.accumulate(y), 1.0)
        now, early = (
            trailing(y, window, least),
            np.cumsum(y[:EARLY]) / np.arange(1, len(y[:EARLY]) + 1),
        )
        start = np.append(early, np.full(len(y) - len(early), early[-1]))
        reached = (now >= 0.9 * top) & ((now > start) | (start >= 0.9 * top))
        return reached.astype(float)

    many, few = (
        partial(_on_known, history, ("reward",), partial(_of, window=window, least=least))
        for window, least in ((WINDOW, 3), (SPIKE_WINDOW, 20))
    )
    near_top = _by_groups(history, many, few) > 0
    if "all_right" in history and "all_wrong" in history:
        right = _on_known(
            history, ("all_right", "all_wrong"), lambda a, b: trailing(a - b, WINDOW, 3)
        )
        return near_top | (right >= 0.5)
    return near_top


def entropy_rise(history: History) -> Values:
    """Mean entropy of the last WINDOW steps less its lowest such mean before [nats]; 0 while it is below 1.5 times that.

    Returns:
        (n,), in nats per token.
    """

    def _of(x: Values) -> Values:
        now = trailing(x, WINDOW, EARLY)
        low = np.fmin.accumulate(now)
        return np.where(
            now >= 1.5 * np.maximum(low, 0), now - low, np.where(np.isnan(now), np.nan, 0.0)
        )

    return _on_known(history, ("entropy",), _of)


def drift(history: History) -> Values:
    """Change of the entropy since the last step with a gradient, while the gradient is zero [nats]; NaN at other steps.

    0 where so many steps without a gradient are likely by chance, as other prompts alone change the entropy.

    Returns:
        (n,), in nats per token; a step's gradient is known after its entropy, so that the next step's value counts.
    """
    out = _nothing(history)
    if "grad_norm" not in history or "entropy" not in history:
        return out
    known = np.flatnonzero(np.isfinite(history["entropy"]))
    entropy = history["entropy"][known]
    still = history["grad_norm"][known] == 0
    # of the steps without a gradient
    start = np.maximum.accumulate(np.where(still, 0, np.arange(len(known)) + 1))
    if len(known) > 1:  # a step's gradient is known after its entropy
        change = np.abs(entropy[1:] - entropy[np.where(still, start, 0)[:-1]])
        # not only of the last step: the one before it is asked for
        likely = _by_chance(dict(history), "grad_norm", lambda x: x == 0)[known[:-1]]
        out[known[1:]] = np.where(still[:-1], np.where(likely, 0.0, change), np.nan)
    return out


def policy_change(history: History) -> Values:
    """KL(π_old‖π) of the step [nats/token].

    Where no step has it, three steps later: three times the relative change of entropy in a step from which on the
    mean reward of three steps (15, if they have few groups) is at most 5 % of the mean before, if entropy leaves the range
    of its noise.
    """
    after = 15 if few_groups(history)[-1:].any() else 3

    def _of(reward: Values, entropy: Values) -> Values:
        out = np.zeros(len(reward))
        if len(reward) < after + 1:
            return out
        before = (np.cumsum(reward) / np.arange(1, len(reward) + 1))[:-after]
        now = sliding_window_view(reward, after)[1:].mean(axis=1)
        fell = np.flatnonzero((before > 0) & (now <= 0.05 * before) & (entropy[:-after] > 0))
        for at in fell:  # those steps' updates did it
            earlier = entropy[max(0, at - WINDOW) : at + 1]
            later = entropy[at + 1 : at + 4]
            spread = 1.4826 * float(np.median(np.abs(earlier - np.median(earlier))))
            spread = max(spread, float(np.std(later)) / 2)
            if abs(later.mean() - np.median(earlier)) > 4 * spread:
                out[at] = 3 * abs(entropy[at + 1] / entropy[at] - 1)
        return out

    kl = history.get("kl_step")
    if kl is not None and np.isfinite(kl).any():
        return value("kl_step")(history)
    return _on_known(history, ("reward", "entropy"), _of)


def ratio_tail(history: History) -> Values:
    """Largest factor by which trainer and sampler differ in the probability of one token, in either direction.

    From the largest and the smallest ratio π/μ, or from exp of the largest |ln π − ln μ|.

    Returns:
        (n,), at least 1.
    """
    high, low = (history.get(name, _nothing(history)) for name in ("ratio_max", "ratio_min"))
    high, low = (np.where(np.isfinite(x) & (x > 1e-30), x, np.nan) for x in (high, low))
    gap = history.get("mismatch_max", _nothing(history))
    gap = np.where(np.isfinite(gap), np.minimum(gap, 300), np.nan)
    return np.fmax(np.fmax(high, 1 / low), np.exp(gap))


def not_finite(history: History) -> Values:
    """Number of gradient norm, loss, reward, KL and entropy whose logged value is not finite.

    A KL or an entropy that was never finite before is not computed by the trainer, rather than lost.

    Returns:
        (n,), 0 to 5.
    """
    found = []
    for name in ("grad_norm", "loss", "reward", "kl", "entropy"):
        if name in history:
            lost = np.isinf(history[name])
            if name in ("kl", "entropy"):
                lost &= np.append(False, np.logical_or.accumulate(np.isfinite(history[name]))[:-1])
            found.append(lost.astype(float))
    return np.sum(found, axis=0) if found else _nothing(history)


def standing_still(history: History) -> Values:
    """Of the last step: the steps, if reward, entropy and length are where they began; 0 otherwise.

    Also the KL to the reference, if it is logged, is below 0.001 nats throughout, and a change of a tenth of the
    reward could be seen.

    Returns:
        (n,), in steps; NaN but for the last.
    """

    def _of(reward: Values, entropy: Values) -> Values:
        out = np.full(len(reward), np.nan)
        if len(reward) < FEW or np.ptp(reward) == 0:
            return out
        series = [reward, entropy, *([x] if len(x := finite(history, "length")) >= FEW else [])]
        kl = finite(history, "kl")
        still = not len(kl) or float(np.abs(kl).max()) < 1e-3
        still &= _told(reward) and all(unmoved(y) for y in series)
        out[-1] = len(reward) if still else 0.0
        return out

    return _on_known(history, ("reward", "entropy"), _of)


def unmoved(y: Values) -> bool:
    """Whether a series shows no trend at the 1 % level and no tenth of it lies 3 standard errors from the first."""
    return moved(y) < 3 and not trend_p(y) < 0.01


def _told(y: Values) -> bool:
    """Whether a change of a tenth of a series' mean size could be seen: the standard error between its first and last third is less."""
    error = float(step_noise(y)[-1]) * float(np.sqrt(2 / (len(y) // 3)))
    return error <= 0.1 * float(np.abs(y).mean())


LONG = 60
"""Steps from which on a quantity may be said not to move at all."""


def flat(name: str) -> Measure:
    """Of the last step: the steps, if the quantity is where it began and this can be told; 0 otherwise.

    A quantity that is exactly constant, or a reward near its largest value, is no such case.
    """

    def _of(y: Values) -> Values:
        out = np.full(len(y), np.nan)
        if len(y) < LONG or np.ptp(y) == 0:
            return out
        out[-1] = len(y) if _told(y) and unmoved(y) else 0.0
        return out

    def _measure(history: History) -> Values:
        measured = _on_known(history, (name,), _of)
        if name != "reward":
            return measured
        return np.where(solved(history) & (measured > 0), 0.0, measured)

    return _measure


def kl_at_start(history: History) -> Values:
    """Smallest of the first three KLs to the reference, at the third of them [nats/token].

    Returns:
        (n,), in nats per token; NaN but for the third step that has a KL.
    """

    def _of(x: Values) -> Values:
        out = np.full(len(x), np.nan)
        if len(x) >= 3:
            out[2] = x[:3].min()
        return out

    return _on_known(history, ("kl",), _of)


def kl_drift(history: History) -> Values:
    """Mean KL to the reference of the last WINDOW steps above its smallest value in the first three steps [nats/token].

    The mean is without the largest value: a single outlier is no drift.

    Returns:
        (n,), in nats per token. Nothing is taken off where the KL began below 0.1.
    """

    def _of(x: Values) -> Values:
        lowest = np.minimum.accumulate(x[:3])
        start = np.append(lowest, np.full(len(x) - len(lowest), lowest[-1]))
        return trailing(
            x,
            WINDOW,
            how=_mean_but_largest,
        ) - np.where(start >= 0.1, start, 0.0)

    return _on_known(history, ("kl",), _of)


def rises_again(history: History) -> Values:
    """Held-out loss relative to its lowest value: the smaller of the last two evaluations, both after the lowest one.

    Returns:
        (n,), without unit; 1 where fewer than two evaluations came after the lowest one.
    """

    def _of(x: Values) -> Values:
        out = np.full(len(x), np.nan)
        for at in range(2, len(x)):
            lowest = int(np.argmin(x[: at + 1]))
            after = x[lowest + 1 : at + 1]
            positive = x[lowest] > 0
            out[at] = after[-2:].min() / x[lowest] if len(after) >= 2 and positive else 1.0
        return out

    return _on_known(history, ("eval_loss",), _of)


def saturated(history: History) -> Values:
    """Margin between chosen and rejected answers where the loss is below 0.01, 0 elsewhere: more of it changes nothing.

    Returns:
        (n,), in units of the implicit reward.
    """

    def _of(margin: Values, loss: Values) -> Values:
        return np.where(loss < 0.01, margin, 0.0)

    return _on_known(
        history,
        ("margin", "loss"),
        _of,
        depends_on=1,
    )


def chosen_falls(history: History) -> Values:
    """How far the chosen answers' implicit reward is below its start, mean of WINDOW steps, while the rejected one's fell, too.

    Returns:
        (n,), in units of the implicit reward; 0 where the rejected one did not fall.
    """

    def _of(chosen: Values, rejected: Values) -> Values:
        down, other = (x[0] - trailing(x, WINDOW, 3) for x in (chosen, rejected))
        return np.where(other > 0, down, np.where(np.isnan(other), np.nan, 0.0))

    return _on_known(history, ("chosen", "rejected"), _of)


def implicit_at_start(history: History) -> Values:
    """Mean implicit reward of chosen and rejected answers in the first of EARLY rows, if none of them is far from it; else 0.

    Returns:
        (n,), in units of the implicit reward; NaN but for row EARLY.
    """

    def _of(chosen: Values, rejected: Values) -> Values:
        level, out = (chosen + rejected) / 2, np.full(len(chosen), np.nan)
        if len(level) >= EARLY:
            moved_by = np.abs(level[:EARLY] - level[0]).max()
            out[EARLY - 1] = level[0] if level[0] >= 4 * moved_by else 0.0
        return out

    return _on_known(history, ("chosen", "rejected"), _of)


def by_chance_ordered(history: History) -> Values:
    """Share of pairs that are ordered right, mean of WINDOW steps, from FEW steps on.

    Returns:
        (n,), in [0, 1]; NaN in the first FEW − 1 steps.
    """

    def _of(x: Values) -> Values:
        return trailing(x, WINDOW, FEW)

    return _on_known(history, ("preference_accuracy",), _of)


def exactly_solved(history: History) -> Values:
    """Share of the last WINDOW steps without a gradient or with groups of equal rewards, while the task is solved; 0 elsewhere.

    Returns:
        (n,), in [0, 1].
    """
    idle = _nothing(history)
    if "dead_groups" in history:
        idle = _on_known(history, ("dead_groups",), lambda x: trailing(x, WINDOW, 5))
    elif "grad_norm" in history:
        idle = _on_known(history, ("grad_norm",), _zeros)
    return np.where(np.isnan(idle), np.nan, np.where(solved(history), idle, 0.0))


def trend_p(y: Values) -> float:
    """p-value of Kendall's test for a trend of a series.

    Args:
        y: values (n,).

    Returns:
        In [0, 1], by the normal approximation.
    """
    from scipy.stats import kendalltau  # slow to import

    return float(kendalltau(np.arange(len(y)), y, method="asymptotic").pvalue)


def moved(y: Values) -> float:
    """Largest distance of the mean of a tenth of a series from that of the first, in standard errors.

    Args:
        y: values (n,) in their order.

    Returns:
        The distance in standard errors of a difference of two such means; infinite if there is no noise.
    """
    n = max(1, min(len(y) // 2, max(5, round(len(y) / 10))))
    means = np.array([part.mean() for part in np.array_split(y, len(y) // n)])
    gap = float(np.abs(means - means[0]).max())
    noise = float(step_noise(y)[-1])
    return gap / (noise * np.sqrt(2 / n)) if noise > 0 else (np.inf if gap > 0 else 0.0)


def finite(history: History, name: str) -> Values:
    """The known and finite values of a quantity (m,); empty if there are none.

    Args:
        history: values by quantity (n,).
        name: canonical quantity.
    """
    found = history.get(name, np.empty(0))
    return found[np.isfinite(found)]


def trailing(
    x: Values,
    window: int,
    least: int = 1,
    how: Callable[..., Values] = np.nanmean,
    last: bool = False,
) -> Values:
    """A statistic of the last `window` values up to each (n,); NaN for the first `least` − 1.

    Args:
        x: values (n,).
        window: how many of them count.
        least: fewest that are needed.
        how: a statistic of the windows (n, window) along an axis, which leaves out NaN.
        last: whether only the last value counts; the others are then NaN, and no window has others than `x`.
    """
    if not len(x):
        return x.copy()
    windows = x[None, -window:] if last else _windows(x, window)
    out = np.full(len(x), np.nan)
    out[-len(windows) :] = how(windows, axis=1)
    out[: least - 1] = np.nan
    return out


def _mean_but_largest(windows: Values, axis: int) -> Values:
    """Mean of the known values without the largest; of a single value, itself."""
    count = np.isfinite(windows).sum(axis=axis)
    largest = np.where(count > 1, np.nanmax(windows, axis=axis), 0.0)
    mean: Values = (np.nansum(windows, axis=axis) - largest) / np.maximum(count - 1, 1)
    return mean


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


PARAMETRIC = frozenset({"value", "mean", "negative", "zero", "relative", "spike", "flat"})
"""Names of functions that make a measure."""
