"""Identities of drawn tokens: surprise, ratios, equal prefixes, the sampler's log-probabilities, ends of completions."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sharpscope.causes.identity import Measured, beyond_chance, first_step, identity, measured
from sharpscope.causes.recorded import Recorded
from sharpscope.causes.temperature import drawn_temperature, told_temperature

STARTS = 8
"""Positions at a completion's beginning that are looked at one by one."""
IMPROBABLE = 7.0
"""−ln π − H from which a drawn token is improbable [nats]."""
OFTEN = 8
"""Times from which on an improbable token comes again and again."""
FEWEST_TOKENS = 200
"""Tokens below which a mean over tokens is not judged."""
ROUNDING = 1e-3
"""Mean difference of log-probabilities that forward passes of one policy may have [nats]."""


@identity
def surprise(recorded: Recorded) -> Measured | None:
    """|mean of −ln π − H| over drawn tokens behind the beginning of their completion, beyond chance [nats].

    E[−ln π] = H where tokens are drawn from π. The mean is negative where the sampler is sharper than π. The facts `rare` and
    `usual` tell temperature from top-k: how often another token than the likeliest was drawn, as a share of what π expects,
    where π is sure and where it is not. A temperature removes the more the surer π is, top-k a part that does not depend on it.
    """
    tokens = recorded.drawn
    inner = tokens[tokens["position"] >= STARTS // 2]
    if len(inner) < FEWEST_TOKENS:
        return None
    values = inner["surprise"].to_numpy(float)
    by_step = inner.groupby("step")["surprise"].mean()
    off = beyond_chance(values)
    return measured(
        off,
        mean=values.mean(),
        temperature=drawn_temperature(inner) if off else 1.0,
        rare=_other_tokens(inner, 0.002, 0.03),
        usual=_other_tokens(inner, 0.05, 0.3),
        tokens=len(inner),
        first=by_step.iloc[0],
        step=first_step(inner),
    )


def _other_tokens(tokens: pd.DataFrame, low: float, high: float) -> float:
    """Tokens with π < ½ as a share of Σ(1 − p₁), p₁ ≈ √Σp², where 1 − p₁ is between `low` and `high`."""
    left = 1 - np.sqrt(tokens["collision"].to_numpy(float))
    there = (left > low) & (left < high)
    expected = float(left[there].sum())
    other = tokens["logp"].to_numpy(float)[there] < np.log(0.5)
    return float(other.sum()) / expected if expected >= 3 else np.nan


@identity
def surprise_at_start(recorded: Recorded) -> Measured | None:
    """The largest |mean of −ln π − H| at one of the first positions, over groups, beyond chance [nats]."""
    tokens = recorded.drawn
    starts = tokens[tokens["position"] < STARTS]
    starts = starts.dropna(subset=["step", "group"])
    if starts.empty:
        return None
    means = starts.groupby(["position", "step", "group"])["surprise"].mean()
    off = {
        position: beyond_chance(means.loc[position].to_numpy(float))
        for position in sorted(starts["position"].astype(int).unique())
    }
    worst = max(off, key=lambda position: off[position])
    return measured(
        off[worst],
        position=worst,
        mean=means.loc[worst].mean(),
        step=first_step(starts),
    )


@identity
def common_beginning(recorded: Recorded) -> Measured | None:
    """(G − 1)·Σ −ln π over the tokens that all G completions of a group begin with, the median over groups [nats].

    The probability of drawing such a beginning G times is at most e to the minus this.
    """
    groups = recorded.beginnings
    if len(groups) < 4:
        return None
    tokens = recorded.drawn
    first = tokens[tokens["position"] < 3].groupby(["step", "rollout"])["token_id"].agg(tuple)
    return measured(
        groups["evidence"].median(),
        tokens=groups["tokens"].median(),
        beginnings=first.nunique(),
        groups=len(groups),
        step=first_step(tokens),
    )


@identity
def equal_completions(recorded: Recorded) -> Measured | None:
    """(G − 1)·Σ −ln π of groups whose G completions are all equal, summed and divided by the number of groups [nats]."""
    groups = recorded.beginnings
    if len(groups) < 4:
        return None
    equal = groups["tokens"] >= groups["longest"]
    return measured(
        groups["evidence"].where(equal, 0.0).mean(),
        share=equal.mean(),
        groups=len(groups),
        step=first_step(recorded.drawn),
    )


@identity
def improbable_tokens(recorded: Recorded) -> Measured | None:
    """Share of one token, where it is improbable (−ln π − H > 7 nats), among drawn tokens behind the beginning.

    A large vocabulary has many improbable tokens, of which each is drawn once; one that somebody puts there comes again.
    """
    tokens = recorded.drawn
    inner = tokens[tokens["position"] >= STARTS]
    if len(inner) < FEWEST_TOKENS:
        return None
    odd = inner[inner["surprise"] > IMPROBABLE]
    if odd.empty:
        return measured(
            0,
            count=0,
            token=-1,
            same=0.0,
            last=0.0,
            rows=[],
            step=0,
        )
    ids = odd["token_id"].value_counts()  # the most frequent first
    most = ids.iloc[0]
    at_end = odd["position"] == odd["length"] - 1
    return measured(
        most / len(inner) if most >= OFTEN else 0.0,  # a few come by chance
        count=len(odd),
        token=int(ids.index[0]),
        same=most / len(odd),
        last=at_end.mean(),
        rows=_places(odd),
        step=first_step(odd),
    )


def _places(tokens: pd.DataFrame) -> list[list[int]]:
    """Step, completion and position of the first five tokens."""
    places: list[list[int]] = tokens[["step", "rollout", "position"]].head(5).to_numpy().tolist()
    return places


@identity
def sampler_mismatch(recorded: Recorded) -> Measured | None:
    """Mean |ln μ − ln π| of drawn tokens, μ the sampler and π the policy at the start of the step [nats]."""
    tokens = recorded.drawn
    known = tokens[tokens["behavior_logp"].notna()]
    if len(known) < FEWEST_TOKENS:
        return None
    gap = (known["behavior_logp"] - known["logp"]).to_numpy(float)
    size = np.abs(gap)
    start = known["position"].to_numpy() == 0
    by_step = pd.Series(size).groupby(known["step"].to_numpy()).mean()
    changes = by_step.std() > 0
    return measured(
        size.mean(),
        first=by_step.iloc[0],
        later=by_step.iloc[1:].mean(),
        last=by_step.iloc[-1],
        at_start=size[start].mean() if start.any() else 0.0,
        inside=size[~start].mean(),
        steps=len(by_step),
        trend=np.corrcoef(by_step.index, by_step)[0, 1] if changes else 0.0,
        onset=(by_step > 0.01).idxmax(),
    )


@identity
def sampler_follows(recorded: Recorded) -> Measured | None:
    """Mean |ln μ − ln π| after the first step, where both agree at it; else 0. Precision and kernels differ at every step [nats]."""
    found = sampler_mismatch(recorded)
    if found is None or found.facts["steps"] < 4:
        return None
    agree = found.facts["first"] < ROUNDING
    return measured(found.facts["later"] if agree else 0.0, **found.facts)


@identity
def sampler_temperature(recorded: Recorded) -> Measured | None:
    """|1/T − 1| of the sampler's temperature T relative to the recorded one, where T explains nine tenths of ln μ − ln π; else 0."""
    tokens = recorded.drawn
    known = tokens[tokens["behavior_logp"].notna()]
    if len(known) < FEWEST_TOKENS:
        return None
    gap = (known["behavior_logp"] - known["logp"]).to_numpy(float)
    if np.abs(gap).mean() < ROUNDING:
        return measured(0)
    heat = told_temperature(known, gap)
    return measured(
        abs(1 / heat.temperature - 1) if heat.explained > 0.9 else 0.0,
        temperature=heat.temperature,
        r2=heat.explained,
        step=first_step(known),
    )


@identity
def first_ratio(recorded: Recorded) -> Measured | None:
    """Mean |ln(π/π_old)| of tokens at their first use, before any update of the step [nats]."""
    tokens = recorded.drawn
    first = tokens[(tokens["update"] == 0) & (tokens["ratio"] > 0)]
    if len(first) < FEWEST_TOKENS:
        return None
    gap = -np.log(first["ratio"].to_numpy(float))  # ln π_old − ln π
    size = np.abs(gap)
    mean = size.mean()
    if mean < ROUNDING:
        return measured(mean)
    step = first_step(first)
    heat = told_temperature(first, gap)
    old = pd.Series(gap + first["logp"].to_numpy(float), index=first.index)
    from_sampler = (old - first["behavior_logp"]).abs().mean()
    return measured(
        mean,
        step=step,
        first=size[first["step"] == step].mean(),
        temperature=heat.temperature,
        r2=heat.explained,
        moved=_moved(first, old) / mean,
        of_sampler=from_sampler < ROUNDING,
    )


def _moved(tokens: pd.DataFrame, old: pd.Series) -> float:
    """Mean |ln π_old − ln π of the token beside it|, on the side where it is smaller [nats]."""
    by_row = tokens.groupby(["step", "rollout"])["logp"]
    return min(float((old - by_row.shift(side)).abs().mean()) for side in (-1, 1))


@identity
def equal_prefixes(recorded: Recorded) -> Measured | None:
    """Spread of ln(π/π_old) among tokens of one update whose group and completion so far are equal [nats]."""
    tokens = recorded.drawn
    if tokens.empty:
        return None
    keyed = tokens.assign(prefix=recorded.prefix)
    keyed = keyed[(keyed["update"] == 0) & (keyed["ratio"] > 0)]
    log_ratio = np.log(keyed["ratio"].to_numpy(float))
    groups = pd.Series(log_ratio).groupby(keyed["prefix"].to_numpy())
    repeated = groups.transform("size") > 1
    if repeated.sum() < FEWEST_TOKENS:
        return None
    gap = (log_ratio - groups.transform("mean"))[repeated]
    spread = np.sqrt(np.square(gap).mean())
    return measured(spread, tokens=repeated.sum(), step=first_step(keyed))


@identity
def later_ratio(recorded: Recorded) -> Measured | None:
    """Share of further uses of tokens (PPO epochs) with a ratio of exactly 1, though an update has moved the policy."""
    uses = recorded.uses
    if len(uses) < FEWEST_TOKENS:
        return None
    same = np.abs(uses["ratio"].to_numpy(float) - 1) < 1e-6
    return measured(
        same.mean(),
        uses=len(uses),
        updates=int(uses["update"].max()) + 1,
        step=first_step(uses),
    )


@identity
def reference_at_start(recorded: Recorded) -> Measured | None:
    """Mean |ln π_ref − ln π| at the first step, where the policy is its reference [nats]."""
    tokens = recorded.drawn
    first = tokens[tokens["step"] == 1]
    gap = (first["ref_logp"] - first["logp"]).dropna().abs()
    if len(gap) < FEWEST_TOKENS:
        return None
    return measured(gap.mean(), largest=gap.max())


@identity
def reference_stays(recorded: Recorded) -> Measured | None:
    """Share of later steps at which ln π_ref = ln π for every token, though the policy has moved."""
    tokens = recorded.drawn
    later = tokens[tokens["step"] >= 3]
    known = later[later["ref_logp"].notna()]
    if len(known) < FEWEST_TOKENS or not recorded.updates["update_norm"].gt(0).any():
        return None
    gap = (known["ref_logp"] - known["logp"]).abs()
    by_step = gap.groupby(known["step"]).max()
    return measured((by_step < 1e-4).mean(), steps=len(by_step), largest=by_step.max())


@identity
def special_tokens(recorded: Recorded) -> Measured | None:
    """Share of completions with special tokens other than the tokenizer's end and padding, where all completions are cut."""
    tokens, words = recorded.drawn, recorded.words
    if len(tokens) < FEWEST_TOKENS or not words.special:
        return None
    odd = words.special.keys() - {words.end, words.pad}
    inside = tokens[tokens["token_id"].isin(odd)]
    cut = recorded.rollouts["truncated"].astype(float).mean()
    counts = inside["token_id"].value_counts()
    row = ["step", "rollout"]
    share = len(inside.drop_duplicates(row)) / len(tokens.drop_duplicates(row))
    return measured(
        share if cut > 0.9 else 0.0,
        cut=cut,
        token=words.special[int(counts.index[0])] if len(counts) else "",
        rows=_places(inside),
        step=first_step(inside),
        share=len(inside) / len(tokens),
    )
