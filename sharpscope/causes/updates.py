"""Identities of coefficients, shares and updates."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from sharpscope.causes.identity import Measured, first_step, identity
from sharpscope.causes.recorded import Recorded, as_dict

FEWEST = 50
"""Tokens below which the signs of coefficients are not judged."""


@identity
def advantage_sign(recorded: Recorded) -> Measured | None:
    """Share of tokens whose coefficient c = ∂L/∂ln π has the advantage's sign: the update pushes against the advantage.

    Where a KL term has an unknown part of c, only tokens with |A| ≥ 0.5 at which π is near the reference count.
    """
    tokens = recorded.drawn
    if tokens.empty or tokens["advantage"].isna().all():
        return None
    known = tokens["kl_coef"].fillna(0.0)
    policy = tokens["loss_coef"] - known
    counted = (tokens["advantage"] != 0) & (policy != 0) & tokens["advantage"].notna()
    near = (tokens["ref_logp"] - tokens["logp"]).abs() < 0.02
    unclear = tokens["ref_logp"].notna() & tokens["kl_coef"].isna()
    counted &= ~unclear | (near & (tokens["advantage"].abs() >= 0.5))
    chosen = tokens[counted]
    if len(chosen) < FEWEST:
        return None
    wrong = (policy[counted] * chosen["advantage"]) > 0
    by_row = wrong.groupby(chosen["rollout"]).mean()
    rows = [int(row) for row in by_row.index[by_row > 0.5]]
    inside = chosen["rollout"].isin(rows)
    facts = {
        "rows": rows,
        "inside": float(wrong[inside].mean()),
        "outside": float(wrong[~inside].mean()),
        "all": len(rows) == len(by_row),
        "step": first_step(chosen[wrong]),
    }
    return Measured(value=float(wrong.mean()), facts=facts)


@identity
def kl_coefficient(recorded: Recorded) -> Measured | None:
    """Share of tokens without an advantage that the loss pushes away from the reference: c·(ln π − ln π_ref) < 0."""
    tokens = recorded.drawn
    if tokens.empty:
        return None
    gap = tokens["logp"] - tokens["ref_logp"]
    chosen = (tokens["advantage"] == 0) & (gap.abs() > 1e-3) & (tokens["loss_coef"] != 0)
    chosen &= tokens["update"] == 0
    if chosen.sum() < FEWEST:
        return None
    force = tokens["loss_coef"][chosen]
    counts = recorded.updates[recorded.updates["update"] == 0].set_index("step")["tokens"]
    size = tokens["step"][chosen].map(counts)
    beta = (force * size).to_numpy(float) / -np.expm1(-gap[chosen].to_numpy(float))
    facts = {"beta": float(np.median(beta)), "tokens": int(chosen.sum()), "step": 1}
    return Measured(value=float((force * gap[chosen] < 0).mean()), facts=facts)


@identity
def shares(recorded: Recorded) -> Measured | None:
    """Median |Σ shares − 1| of the measured updates: the tokens' log-probabilities give the whole gradient."""
    norms = recorded.updates.groupby("step")["grad_norm"].first()
    sums = _share_sums(recorded)
    sums = sums[norms.reindex(sums.index) > 1e-5]  # of a smaller gradient they are rounding
    if sums.empty:
        return None
    off = (sums - 1).abs()
    entropy = recorded.steps.set_index("step")["entropy_mean"].dropna()
    few = min(3, len(entropy) // 2)
    facts = {
        "first": float(sums.iloc[0]),
        "first_step": int(sums.index[0]),
        "last": float(sums.iloc[-1]),
        "steps": len(sums),
        # of several steps, since prompts differ
        "entropy": [float(entropy.iloc[:few].mean()), float(entropy.iloc[-few:].mean())]
        if few
        else [],
        "step": int(sums.index[int((off > 0.02).to_numpy().argmax())]),
    }
    return Measured(value=float(off.median()), facts=facts)


def _share_sums(recorded: Recorded) -> pd.Series:
    """Step -> sum of the shares of its first measured update, where all of its tokens were measured."""
    tokens, events = recorded.tokens, recorded.events
    sums = pd.Series(dtype=float)
    if len(tokens) and tokens["attribution"].notna().any():
        whole = tokens.groupby(["step", "update"]).filter(
            lambda part: bool((part["inclusion_probability"] == 1).all())
        )
        summed = whole.groupby("step")["attribution"].sum(min_count=1).dropna()
        sums = summed / whole[whole["attribution"].notna()].groupby("step")["update"].nunique()
    told = events[events["rule"] == "attribution_sum"] if len(events) else events
    if len(told):
        sums = told.groupby("step")["value"].first().combine_first(sums)
    return sums.dropna().sort_index()


def layers_of(updates: pd.DataFrame, column: str) -> pd.Series:
    """Layer -> its share of the squared norm over the updates."""
    rows = [as_dict(cell) for cell in updates[column].dropna()]
    squares = pd.DataFrame(rows).pow(2).mean()
    total = float(squares.sum())
    return (squares / total if total else squares).sort_values(ascending=False)


@identity
def update_bound(recorded: Recorded) -> Measured | None:
    """Median over updates of ‖Δθ‖/(lr·√N): Adam moves each of N weights by at most about its learning rate."""
    updates, count = recorded.updates, recorded.info.get("trainable_parameters")
    if not recorded.adam or not count or updates.empty:
        return None
    made = updates[(updates["lr"] > 0) & (updates["update_norm"] > 0)]
    if made.empty:
        return None
    ratio = made["update_norm"] / (made["lr"] * math.sqrt(count))
    moved = layers_of(made, "update_norm_by_layer")
    pulled = layers_of(made, "grad_norm_by_layer")
    quiet = made[made["grad_norm"] <= 1e-6]
    facts = {
        "layer": str(moved.index[0]) if len(moved) else "",
        "share": float(moved.iloc[0]) if len(moved) else 0.0,
        "gradient_share": float(pulled.get(moved.index[0], 0.0)) if len(moved) else 0.0,
        "quiet": float(ratio[quiet.index].median()) if len(quiet) else math.nan,
        "weight_decay": recorded.weight_decay,
        "lr": float(made["lr"].iloc[0]),
        "step": first_step(made[ratio > 1.2]),
    }
    return Measured(value=float(ratio.median()), facts=facts)


@identity
def update_follows_gradient(recorded: Recorded) -> Measured | None:
    """Share of updates with a gradient after which no weight has changed."""
    updates = recorded.updates
    made = updates[(updates["grad_norm"] > 0) & ~updates["skipped"].astype(bool)]
    if len(made) < 2:
        return None
    still, steps = made["update_norm"] == 0, recorded.info.get("steps_done")
    stopped = still & (made["lr"] == 0)
    facts = {
        "lr": float(made["lr"].max()),
        "updates": len(made),
        "stopped": float(stopped.sum() / max(still.sum(), 1)),
        "last": bool(still.iloc[-1]),
        "steps": steps or int(made["step"].max()),
        "step": first_step(made[still]),
    }
    return Measured(value=float(still.mean()), facts=facts)


def _weighted(recorded: Recorded) -> pd.DataFrame:
    """First uses of tokens with `weight` = |c/(A·ratio)|, NaN without an advantage; none where a KL term has a part of c."""
    tokens = recorded.drawn
    first = tokens[tokens["update"] == 0] if tokens["ref_logp"].isna().all() else tokens.iloc[:0]
    weight = (first["loss_coef"] / first["advantage"] / first["ratio"]).abs()
    return first.assign(weight=weight.where(first["advantage"].abs() > 0))


@identity
def loss_scale(recorded: Recorded) -> Measured | None:
    """1 − 1/m where the loss is the sum of the means of m ≥ 2 blocks of rows; else 0.

    |c/A| is one over the number of tokens for a mean over tokens, and its sum over a row one over the number of rows for a
    mean over rows: of the update, or of a block of rows where the losses of micro-batches are summed.
    """
    first = _weighted(recorded)
    if first["weight"].notna().sum() < FEWEST:
        return None
    pieces = {_pieces(part) for _, part in first.groupby("step") if part["weight"].notna().any()}
    m = pieces.pop() if len(pieces) == 1 else 1
    return Measured(value=1 - 1 / m, facts={"pieces": m})


def _pieces(tokens: pd.DataFrame) -> int:
    """The number of blocks whose means are summed in one step's loss; 1 where the weights do not tell it."""
    row = np.unique(tokens["rollout"], return_inverse=True)[1]
    counted = tokens["weight"].notna().to_numpy()
    weight = tokens["weight"].to_numpy(float)[counted]
    rows = row.max() + 1
    by_row = np.bincount(row[counted], weight, minlength=rows)
    for blocks in (1, 2, 4, 8, 16, 32):
        if rows % blocks:
            break
        of_block = np.bincount(row * blocks // rows)
        by_token = weight * of_block[row[counted] * blocks // rows]
        for values in (by_token, by_row[by_row > 0] * rows / blocks):
            if len(values) and np.abs(values - 1).max() < 0.01:
                return blocks
    return 1


@identity
def loss_length(recorded: Recorded) -> Measured | None:
    """The power p − 1 where a token's weight |c/A| is length^−p of its row with p > 1; else 0. A mean over tokens has p = 0, one over rows 1."""
    first = _weighted(recorded)
    rows = first.groupby(["step", "rollout"])["weight"].agg(["size", "median"])
    logs = rows[rows["median"] > 0].transform(np.log)
    logs = logs - logs.groupby("step").transform("mean")
    x, y = logs["size"].to_numpy(float), logs["median"].to_numpy(float)
    if len(rows) < FEWEST or x @ x < 1:
        return None
    power = -float(x @ y / (x @ x))
    exact = float(np.abs(y + power * x).max()) < 0.01
    facts = {"power": power, "step": first_step(first)}
    return Measured(value=max(0.0, power - 1) if exact else 0.0, facts=facts)


@identity
def first_divergence(recorded: Recorded) -> Measured | None:
    """KL(π_old‖π) over the first step: how far one step moves the policy [nats per token]."""
    steps = recorded.steps
    known = steps[steps["kl_step"].notna() & (steps["step"] <= 2)]
    if known.empty:
        return None
    rate = known["lr"].iloc[0]
    clipped = float(recorded.updates["clip_factor"].lt(1).mean())
    facts = {"step": int(known["step"].iloc[0]), "lr": float(rate), "clipped": clipped}
    return Measured(value=float(known["kl_step"].max()), facts=facts)


@identity
def finite(recorded: Recorded) -> Measured | None:
    """Updates whose loss or gradient norm is not finite."""
    updates = recorded.updates
    if updates.empty:
        return None
    loss, norm = updates["loss"], updates["grad_norm"]
    given = loss.notna().any()  # a loop need not give its loss
    bad = updates[(given & ~np.isfinite(loss)) | ~np.isfinite(norm)]
    found = recorded.events[recorded.events["rule"] == "not_finite"]
    if len(bad):  # an update that a loss scaler left out long before has nothing to do with it
        found = found[found["step"] <= first_step(bad)]
    told = str(found["message"].iloc[-1]) if len(found) else ""
    step = first_step(
        found.tail(1) if len(found) else bad
    )  # an update can break weights before a loss
    facts = {"step": step, "message": told, "updates": len(updates)}
    return Measured(value=float(len(bad)), facts=facts)
