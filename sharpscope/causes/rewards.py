"""Identities of rewards and groups."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pandas as pd

from sharpscope.causes.identity import Measured, first_step, identity
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
    facts: dict[str, object] = {"step": first_step(bad)}
    if len(bad):
        first = bad.iloc[0]
        parts = _parts(bad.iloc[:1]).iloc[0]
        names = [str(name) for name, value in parts.items() if not np.isfinite(value)]
        facts |= {
            "rollout": int(first["rollout"]),
            "reward": float(first["reward"]),
            "prompt": str(first["prompt"]),
            "parts": names,
        }
    return Measured(value=float(len(bad)), facts=facts)


@identity
def reward_varies(recorded: Recorded) -> Measured | None:
    """1 where every completion of several steps has the same reward, though the completions differ."""
    rows = _scored(recorded)
    if len(rows) < FEWEST_ROWS or rows["step"].nunique() < 2:
        return None
    distinct = rows["completion"].nunique()
    constant = rows["reward"].nunique(dropna=False) == 1 and distinct > 10
    facts = {
        "reward": float(rows["reward"].iloc[0]),
        "distinct": distinct,
        "count": len(rows),
        "parts": [str(name) for name in _parts(rows).columns],
    }
    return Measured(value=float(constant), facts=facts)


@identity
def prompt_scale(recorded: Recorded) -> Measured | None:
    """The largest |A| of one prompt as a multiple of the median prompt's."""
    rows = _scored(recorded)
    known = rows[rows["advantage"].abs() > 0] if len(rows) else rows
    largest = known.assign(size=known["advantage"].abs()).groupby("prompt")["size"].max()
    if len(largest) < 6:
        return None
    worst = str(largest.idxmax())
    carried = known[known["prompt"] == worst]
    facts = {
        "prompt": worst,
        "steps": [int(step) for step in carried["step"].unique()],
        "step": first_step(carried),
        "reward": float(carried["reward"].abs().max()),
        "usual": float(known.loc[known["prompt"] != worst, "reward"].abs().max()),
    }
    return Measured(value=float(largest.max() / largest.drop(worst).median()), facts=facts)


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
    scored = _scored(recorded)
    scored = scored[np.isfinite(scored["reward"].astype(float))] if len(scored) else scored
    third = scored["step"].max() / 3 if len(scored) else 0
    rows = scored[scored["step"] > 2 * third].tail(MOST_ROWS)
    if len(rows) < FEWEST_ROWS:
        return None
    every = _parts(scored)
    if every.shape[1] < 2:
        return None
    parts = every.loc[rows.index].fillna(0.0)
    total = _within(rows[["reward"]].astype(float), rows)["reward"]
    by_part = _correlations(_within(parts, rows), total)
    by_feature = _correlations(_within(_features(rows), rows), total)
    feature = str(by_feature.abs().idxmax())
    before, after = every[scored["step"] <= third].mean(), parts.mean()
    fallen = (after < before / 2) & (before > 0)
    unheard = (by_part.abs() < 0.3) & (every.std() > 0)
    names = [str(name) for name in parts]
    dropped = [name for name in names if fallen[name] or unheard[name]]
    facts = {
        "feature": feature,
        "correlation": float(by_feature[feature]),
        "part": str(by_part.idxmax()),
        "dropped": dropped,
        "means": {name: (float(before[name]), float(after[name])) for name in names},
        "step": first_step(rows),
    }
    return Measured(value=abs(float(by_feature[feature])) if dropped else 0.0, facts=facts)


def _features(rows: pd.DataFrame) -> pd.DataFrame:
    """How often the most frequent words, tags and signs occur in each completion, and its number of tokens."""
    counts = pd.DataFrame([Counter(WORD.findall(text)) for text in rows["completion"]])
    frequent = counts.notna().sum().nlargest(MOST_FEATURES).index
    features = counts[list(frequent)].fillna(0.0).set_index(rows.index)
    return features.assign(length=rows["length"].astype(float))


@identity
def reward_of_completion(recorded: Recorded) -> Measured | None:
    """Share of pairs of equal completions of one prompt whose rewards differ."""
    rows = _scored(recorded)
    if len(rows) < FEWEST_ROWS:
        return None
    text = rows["prompt"] if rows["token_ids"].isna().all() else rows["token_ids"].astype(str)
    key = text.astype(str) + "\0" + rows["completion"].astype(str)
    pairs, differing = _differing(rows, rows["reward"], key)
    if pairs < 30:
        return None
    facts: dict[str, object] = {"pairs": pairs, "step": first_step(rows)}
    if differing:
        moved = {}
        for offset in OFFSETS:
            shifted = rows.groupby("step")["reward"].transform(np.roll, shift=offset)
            moved[offset] = _differing(rows, shifted, key)[1] / pairs
        best = min(moved, key=lambda offset: moved[offset])
        facts |= {"offset": best, "moved": moved[best]}
    return Measured(value=differing / pairs, facts=facts)


def _differing(rows: pd.DataFrame, reward: pd.Series, key: pd.Series) -> tuple[int, int]:
    """Number of pairs of rows of a step with one key, and of those whose rewards differ."""
    frame = pd.DataFrame({"step": rows["step"], "key": key, "reward": reward.round(6)})
    size = frame.groupby(["step", "key"]).size()
    same = frame.groupby(["step", "key", "reward"]).size()
    pairs = int((size * (size - 1) // 2).sum())
    return pairs, pairs - int((same * (same - 1) // 2).sum())


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
    facts = {"sets": best, "offset": offset, "left": left, "share": off, "step": first_step(rows)}
    return Measured(value=off if left < off / 10 else 0.0, facts=facts)


def _uncentered(advantages: np.ndarray) -> float:
    """Root mean square of the means along the last axis, over that of all values."""
    size = float(np.square(advantages).mean()) or 1.0
    return float(np.sqrt(np.square(advantages.mean(-1)).mean() / size))


def _other_sets(advantages: np.ndarray) -> dict[str, tuple[int, float]]:
    """What other sets of rows are -> by how many rows advantages (step, group, row) are moved, and what is not centered."""
    steps, groups, size = advantages.shape
    flat = advantages.reshape(steps, -1)
    found = {"the rows of one place in every group": (0, _uncentered(advantages.swapaxes(1, 2)))}
    for several in (2, 4, 8):
        if groups % several == 0 and several < groups:
            joined = _uncentered(flat.reshape(steps, -1, several * size))
            found[f"the completions of {several} prompts"] = 0, joined
    for offset in OFFSETS:
        moved = np.roll(flat, offset, axis=1).reshape(advantages.shape)
        found[f"rows moved by {offset}"] = offset, _uncentered(moved)
    return found


@identity
def cut_reward(recorded: Recorded) -> Measured | None:
    """Correlation within groups of the reward with being cut at the length limit; 0 where few are cut."""
    rows = _scored(recorded)
    rows = rows[np.isfinite(rows["reward"].astype(float))] if len(rows) else rows
    if len(rows) < FEWEST_ROWS or rows["truncated"].isna().any():
        return None
    cut = rows["truncated"].astype(float)
    both = _within(pd.DataFrame({"cut": cut, "reward": rows["reward"].astype(float)}), rows)
    correlation = float(_correlations(both[["cut"]], both["reward"])["cut"])
    facts = {
        "cut": float(rows.loc[cut > 0, "reward"].mean()),
        "ended": float(rows.loc[cut == 0, "reward"].mean()),
        "step": first_step(rows[cut > 0]),
    }
    enough = cut.mean() > 0.02 and cut.sum() >= 8
    return Measured(value=correlation if enough else 0.0, facts=facts)


@identity
def reward_of_distance(recorded: Recorded) -> Measured | None:
    """Reward per nat of Σ ln π/π_ref: the median over pairs of a group, where a third or more are within 1 % of it and it is positive; else 0.

    Pairs of neighbors in a group: where the rest of their rewards is equal, the quotient of the differences is the coefficient.
    """
    rows, tokens = _scored(recorded), recorded.drawn
    if len(rows) < FEWEST_ROWS:
        return None
    gap = (tokens["logp"] - tokens["ref_logp"]).groupby([tokens["step"], tokens["rollout"]])
    found = rows.join(gap.sum(min_count=1).rename("gap"), on=["step", "rollout"])
    apart = found.groupby(["step", "group"])[["reward", "gap"]].diff()
    apart = apart[apart["gap"].abs() > 0.1]
    if len(apart) < FEWEST_ROWS:
        return None
    slope = apart["reward"] / apart["gap"]
    middle = float(slope.median())
    alike = float(((slope - middle).abs() < 0.01 * middle).mean())
    facts = {"alike": alike, "pairs": len(apart), "step": first_step(rows)}
    return Measured(value=middle if alike > 1 / 3 else 0.0, facts=facts)


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
    frame = known[["step", "group"]].assign(prompt=pd.Series(prompts, index=known.index))
    distinct = frame.groupby(["step", "group"])["prompt"].nunique()
    facts = {
        "distinct": int(distinct.max()),
        "groups": len(distinct),
        "step": int(distinct.index[0][0]),
    }
    return Measured(value=float((distinct > 1).mean()), facts=facts)
