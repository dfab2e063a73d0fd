"""Identities of rewards and groups."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pandas as pd

from sharpscope.causes.identity import Measured, first_step, identity, measured
from sharpscope.causes.recorded import Recorded, as_dict

FEWEST_ROWS = 48
"""Completions below which rewards are not compared."""
MOST_FEATURES, MOST_ROWS = 150, 2000
"""Words whose counts are compared with the reward, the most frequent, and completions in which they are counted."""
OFFSETS = sorted((*range(-8, 0), *range(1, 9)), key=abs)
"""Rows by which rewards and advantages are moved, in search of those that they belong to; small ones first."""
WORD = re.compile(r"</?\w+>|\w+|[^\w\s]")
"""A tag, a word or a sign."""


def _scored(recorded: Recorded) -> pd.DataFrame:
    """The rows with a reward column, drawn by a policy; none where no reward was recorded."""
    rollouts = recorded.rollouts
    if recorded.supervised or rollouts.empty or rollouts["reward"].isna().all():
        return rollouts.iloc[:0]
    return rollouts


def _finite(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose reward is finite."""
    return rows[np.isfinite(rows["reward"].astype(float))] if len(rows) else rows


def _parts(rollouts: pd.DataFrame) -> pd.DataFrame:
    """The rewards' components, a column each, by the rows' index."""
    rows = [as_dict(cell) for cell in rollouts["reward_parts"]]
    return pd.DataFrame(rows, index=rollouts.index).astype(float)


@identity
def reward_finite(recorded: Recorded) -> Measured | None:
    """Completions whose reward is not finite."""
    rows = _scored(recorded)
    if rows.empty:
        return None
    bad = rows[~np.isfinite(rows["reward"].astype(float))]
    if bad.empty:
        return measured(0, step=0)
    first = bad.iloc[0]
    parts = _parts(bad.iloc[:1]).iloc[0]
    return measured(
        len(bad),
        step=first_step(bad),
        rollout=int(first["rollout"]),
        reward=float(first["reward"]),
        prompt=str(first["prompt"]),
        parts=[str(name) for name, value in parts.items() if not np.isfinite(value)],
    )


@identity
def reward_varies(recorded: Recorded) -> Measured | None:
    """1 where every completion of several steps has the same reward, though the completions differ."""
    rows = _scored(recorded)
    if len(rows) < FEWEST_ROWS or rows["step"].nunique() < 2:
        return None
    distinct = rows["completion"].nunique()
    constant = rows["reward"].nunique(dropna=False) == 1 and distinct > 10
    return measured(
        constant,
        reward=float(rows["reward"].iloc[0]),
        distinct=distinct,
        count=len(rows),
        parts=[str(name) for name in _parts(rows).columns],
    )


@identity
def prompt_scale(recorded: Recorded) -> Measured | None:
    """The largest |A| of one prompt as a multiple of the median prompt's."""
    rows = _scored(recorded)
    known = rows[rows["advantage"].abs() > 0] if len(rows) else rows
    size = known["advantage"].abs()
    largest = size.groupby(known["prompt"]).max()  # prompt -> its largest |A|
    if len(largest) < 6:
        return None
    worst = str(largest.idxmax())
    carried = known[known["prompt"] == worst]
    others = known[known["prompt"] != worst]
    return measured(
        largest.max() / largest.drop(worst).median(),
        prompt=worst,
        steps=carried["step"].unique().tolist(),
        step=first_step(carried),
        reward=carried["reward"].abs().max(),
        usual=others["reward"].abs().max(),
    )


def _within(values: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Values minus their group's mean."""
    return values - values.groupby([rows["step"], rows["group"]]).transform("mean")


def _correlations(features: pd.DataFrame, target: pd.Series) -> pd.Series:
    """Correlation of each centered column with a centered target; 0 for a constant."""
    square = np.sqrt(features.pow(2).sum() * float(target.pow(2).sum()))
    products = features.mul(target, axis=0).sum()
    return products.div(square.where(square > 0, np.inf))


@identity
def reward_feature(recorded: Recorded) -> Measured | None:
    """Largest correlation within groups of the reward with the count of a word or sign, or the length, in the last third.

    It counts where the total does not follow another component of the reward: the correlation with it is under 0.3 in the
    last third, or its mean has fallen by half since the first.
    """
    scored = _finite(_scored(recorded))
    if len(scored) < FEWEST_ROWS:
        return None
    third = scored["step"].max() / 3
    rows = scored[scored["step"] > 2 * third].tail(MOST_ROWS)
    every = _parts(scored)
    if len(rows) < FEWEST_ROWS or every.shape[1] < 2:
        return None
    parts = every.loc[rows.index].fillna(0.0)

    # what the reward follows now
    total = _within(rows[["reward"]].astype(float), rows)["reward"]
    by_part = _correlations(_within(parts, rows), total)
    by_feature = _correlations(_within(_features(rows), rows), total)
    feature = str(by_feature.abs().idxmax())
    correlation = by_feature[feature]

    # components that it no longer follows
    before, after = every[scored["step"] <= third].mean(), parts.mean()
    fallen = (after < before / 2) & (before > 0)
    unheard = (by_part.abs() < 0.3) & (every.std() > 0)
    names = [str(name) for name in parts]
    dropped = [name for name in names if fallen[name] or unheard[name]]
    return measured(
        abs(correlation) if dropped else 0.0,
        feature=feature,
        correlation=correlation,
        part=str(by_part.idxmax()),
        dropped=dropped,
        means={name: (float(before[name]), float(after[name])) for name in names},
        step=first_step(rows),
    )


def _features(rows: pd.DataFrame) -> pd.DataFrame:
    """How often the most frequent words, tags and signs occur in each completion, and its number of tokens."""
    words = [Counter(WORD.findall(text)) for text in rows["completion"]]
    counts = pd.DataFrame(words, index=rows.index)  # (rows, words), NaN where a row lacks a word
    frequent = counts.notna().sum().nlargest(MOST_FEATURES).index
    features = counts[list(frequent)].fillna(0.0)
    return features.assign(length=rows["length"].astype(float))


@identity
def reward_of_completion(recorded: Recorded) -> Measured | None:
    """Share of pairs of equal completions of one prompt whose rewards differ."""
    rows = _scored(recorded)
    if len(rows) < FEWEST_ROWS:
        return None
    text = rows["prompt"] if rows["token_ids"].isna().all() else rows["token_ids"]
    key = text.astype(str) + "\0" + rows["completion"].astype(str)
    pairs, differing = _differing(rows, rows["reward"], key)
    if pairs < 30:
        return None
    step = first_step(rows)
    if not differing:
        return measured(0, pairs=pairs, step=step)
    moved = {}  # rows by which the rewards are moved -> the share that differs then
    for offset in OFFSETS:
        shifted = rows.groupby("step")["reward"].transform(np.roll, shift=offset)
        moved[offset] = _differing(rows, shifted, key)[1] / pairs
    best = min(moved, key=lambda offset: moved[offset])
    return measured(
        differing / pairs,
        pairs=pairs,
        step=step,
        offset=best,
        moved=moved[best],
    )


def _differing(rows: pd.DataFrame, reward: pd.Series, key: pd.Series) -> tuple[int, int]:
    """Number of pairs of rows of a step with one key, and of those whose rewards differ."""
    frame = pd.DataFrame({"step": rows["step"], "key": key, "reward": reward.round(6)})
    pairs = _pairs(frame, ["step", "key"])
    return pairs, pairs - _pairs(frame, ["step", "key", "reward"])


def _pairs(frame: pd.DataFrame, columns: list[str]) -> int:
    """Number of pairs of rows with equal values in these columns."""
    size = frame.groupby(columns).size()
    return int((size * (size - 1) // 2).sum())


@identity
def group_mean(recorded: Recorded) -> Measured | None:
    """Root mean square of the groups' mean advantages over that of all, where other sets of rows have means of 0; else 0."""
    rows = _scored(recorded).sort_values(["step", "rollout"])
    if len(rows) < FEWEST_ROWS or rows["advantage"].isna().any():
        return None
    sizes = rows.groupby(["step", "group"], sort=False).size()
    groups = sizes.groupby("step").size()
    if sizes.nunique() > 1 or groups.nunique() > 1 or sizes.iloc[0] < 2:
        return None
    advantages = rows["advantage"].to_numpy(float).reshape(len(groups), groups.iloc[0], -1)
    off = _uncentered(advantages)
    sets = _other_sets(advantages) if off > 1e-3 else {}
    best = min(sets, key=lambda name: round(sets[name][1], 6), default="")
    offset, left = sets.get(best, (0, 1.0))
    return measured(
        off if left < off / 10 else 0.0,
        sets=best,
        offset=offset,
        left=left,
        share=off,
        step=first_step(rows),
    )


def _uncentered(advantages: np.ndarray) -> float:
    """Root mean square of the means along the last axis, over that of all values."""
    size = np.square(advantages).mean() or 1.0
    of_means = np.square(advantages.mean(-1)).mean()
    return float(np.sqrt(of_means / size))


def _other_sets(advantages: np.ndarray) -> dict[str, tuple[int, float]]:
    """What other sets of rows are -> by how many rows advantages (step, group, row) are moved, and what is not centered."""
    steps, groups, size = advantages.shape
    flat = advantages.reshape(steps, -1)
    by_place = _uncentered(advantages.swapaxes(1, 2))  # (step, row, group)
    found = {"the rows of one place in every group": (0, by_place)}
    for several in (2, 4, 8):
        if groups % several == 0 and several < groups:
            joined = flat.reshape(steps, -1, several * size)
            found[f"the completions of {several} prompts"] = 0, _uncentered(joined)
    for offset in OFFSETS:
        moved = np.roll(flat, offset, axis=1).reshape(advantages.shape)
        found[f"rows moved by {offset}"] = offset, _uncentered(moved)
    return found


@identity
def cut_reward(recorded: Recorded) -> Measured | None:
    """Correlation within groups of the reward with being cut at the length limit; 0 where few are cut."""
    rows = _finite(_scored(recorded))
    if len(rows) < FEWEST_ROWS or rows["truncated"].isna().any():
        return None
    cut = rows["truncated"].astype(float)
    reward = rows["reward"].astype(float)
    centered = _within(pd.DataFrame({"cut": cut, "reward": reward}), rows)
    correlation = _correlations(centered[["cut"]], centered["reward"])["cut"]
    enough = cut.mean() > 0.02 and cut.sum() >= 8
    return measured(
        correlation if enough else 0.0,
        cut=reward[cut > 0].mean(),
        ended=reward[cut == 0].mean(),
        step=first_step(rows[cut > 0]),
    )


@identity
def reward_of_distance(recorded: Recorded) -> Measured | None:
    """Reward per nat of Σ ln π/π_ref: the median over pairs of a group, where a third or more are within 1 % of it and it is positive; else 0.

    Pairs of neighbors in a group: where the rest of their rewards is equal, the quotient of the differences is the coefficient.
    """
    rows, tokens = _scored(recorded), recorded.drawn
    if len(rows) < FEWEST_ROWS:
        return None
    gap = tokens["logp"] - tokens["ref_logp"]
    by_row = gap.groupby([tokens["step"], tokens["rollout"]]).sum(min_count=1)
    found = rows.join(by_row.rename("gap"), on=["step", "rollout"])
    apart = found.groupby(["step", "group"])[["reward", "gap"]].diff()
    apart = apart[apart["gap"].abs() > 0.1]
    if len(apart) < FEWEST_ROWS:
        return None
    slope = apart["reward"] / apart["gap"]
    middle = slope.median()
    alike = ((slope - middle).abs() < 0.01 * middle).mean()
    return measured(
        middle if alike > 1 / 3 else 0.0,
        alike=alike,
        pairs=len(apart),
        step=first_step(rows),
    )


@identity
def one_prompt_a_group(recorded: Recorded) -> Measured | None:
    """Share of groups whose completions have different prompts."""
    rows = _scored(recorded)
    known = rows[rows["token_ids"].notna() & rows["prompt_tokens"].notna()] if len(rows) else rows
    if len(known) < FEWEST_ROWS:
        return None
    prompts = [
        tuple(json.loads(ids)[: int(count)])
        for ids, count in zip(known["token_ids"], known["prompt_tokens"], strict=True)
    ]
    by_row = pd.Series(prompts, index=known.index)
    distinct = by_row.groupby([known["step"], known["group"]]).nunique()
    return measured(
        (distinct > 1).mean(),
        distinct=distinct.max(),
        groups=len(distinct),
        step=first_step(known),
    )
