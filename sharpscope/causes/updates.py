"""Identities of coefficients, shares and updates."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from sharpscope.causes.identity import Measured, first_step, identity, measured
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
    advantage = tokens["advantage"]
    policy = tokens["loss_coef"] - tokens["kl_coef"].fillna(0.0)
    counted = (advantage != 0) & (policy != 0) & advantage.notna()

    # where the KL term's part is unknown, it must be small beside the advantage's
    near = (tokens["ref_logp"] - tokens["logp"]).abs() < 0.02
    unclear = tokens["ref_logp"].notna() & tokens["kl_coef"].isna()
    counted &= ~unclear | (near & (advantage.abs() >= 0.5))
    chosen = tokens[counted]
    if len(chosen) < FEWEST:
        return None

    wrong = policy[counted] * advantage[counted] > 0
    by_row = wrong.groupby(chosen["rollout"]).mean()
    rows = by_row.index[by_row > 0.5].tolist()
    inside = chosen["rollout"].isin(rows)
    return measured(
        wrong.mean(),
        rows=rows,
        inside=wrong[inside].mean(),
        outside=wrong[~inside].mean(),
        all=len(rows) == len(by_row),
        step=first_step(chosen[wrong]),
    )


@identity
def kl_coefficient(recorded: Recorded) -> Measured | None:
    """Share of tokens without an advantage that the loss pushes away from the reference: c·(ln π − ln π_ref) < 0."""
    tokens = recorded.drawn
    if tokens.empty:
        return None
    tokens = tokens[(tokens["update"] == 0) & (tokens["advantage"] == 0)]
    gap = tokens["logp"] - tokens["ref_logp"]
    chosen = (gap.abs() > 1e-3) & (tokens["loss_coef"] != 0)
    if chosen.sum() < FEWEST:
        return None
    gap = gap[chosen]
    force = tokens["loss_coef"][chosen]
    first = recorded.updates[recorded.updates["update"] == 0]
    size = tokens["step"][chosen].map(first.set_index("step")["tokens"])  # tokens of the update
    # a token's share of β times the mean of k3 has the coefficient β·(1 − e^(ln π_ref − ln π))/size
    beta = (force * size).to_numpy(float) / -np.expm1(-gap.to_numpy(float))
    return measured(
        (force * gap < 0).mean(),
        beta=np.median(beta),
        tokens=chosen.sum(),
        step=1,
    )


@identity
def shares(recorded: Recorded) -> Measured | None:
    """Median |Σ shares − 1| of the measured updates: the tokens' log-probabilities give the whole gradient."""
    norms = recorded.updates.groupby("step")["grad_norm"].first()
    sums = _share_sums(recorded)
    sums = sums[norms.reindex(sums.index) > 1e-5]  # of a smaller gradient they are rounding
    if sums.empty:
        return None
    off = (sums - 1).abs()
    return measured(
        off.median(),
        first=sums.iloc[0],
        first_step=sums.index[0],
        last=sums.iloc[-1],
        steps=len(sums),
        entropy=_ends(recorded.steps["entropy_mean"].dropna()),
        step=(off > 0.02).idxmax(),
    )


def _ends(course: pd.Series) -> list[float]:
    """Means of the first and of the last three values, since prompts differ between steps; none of a short course."""
    few = min(3, len(course) // 2)
    return [float(part.mean()) for part in (course.head(few), course.tail(few))] if few else []


def _share_sums(recorded: Recorded) -> pd.Series:
    """Step -> sum of the shares of its first measured update, where all of its tokens were measured."""
    tokens, events = recorded.tokens, recorded.events
    sums = pd.Series(dtype=float)
    if len(tokens) and tokens["attribution"].notna().any():
        chances = tokens["inclusion_probability"].eq(1)
        whole = tokens[chances.groupby([tokens["step"], tokens["update"]]).transform("all")]
        known = whole[whole["attribution"].notna()].groupby("step")
        sums = known["attribution"].sum() / known["update"].nunique()
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
    updates = recorded.updates
    count = recorded.info.get("trainable_parameters")
    if not recorded.adam or not count or updates.empty:
        return None
    made = updates[(updates["lr"] > 0) & (updates["update_norm"] > 0)]
    if made.empty:
        return None
    ratio = made["update_norm"] / (made["lr"] * math.sqrt(count))
    moved = layers_of(made, "update_norm_by_layer")
    pulled = layers_of(made, "grad_norm_by_layer")
    layer = str(moved.index[0]) if len(moved) else ""  # the one that moves most
    return measured(
        ratio.median(),
        layer=layer,
        share=moved.get(layer, 0.0),
        gradient_share=pulled.get(layer, 0.0),
        quiet=ratio[made["grad_norm"] <= 1e-6].median(),
        weight_decay=recorded.weight_decay,
        lr=made["lr"].iloc[0],
        step=first_step(made[ratio > 1.2]),
    )


@identity
def update_follows_gradient(recorded: Recorded) -> Measured | None:
    """Share of updates with a gradient after which no weight has changed."""
    updates = recorded.updates
    made = updates[(updates["grad_norm"] > 0) & ~updates["skipped"].astype(bool)]
    if len(made) < 2:
        return None
    still = made["update_norm"] == 0
    stopped = still & (made["lr"] == 0)
    return measured(
        still.mean(),
        lr=made["lr"].max(),
        updates=len(made),
        stopped=stopped.sum() / max(still.sum(), 1),
        last=still.iloc[-1],
        steps=recorded.info.get("steps_done") or int(made["step"].max()),
        step=first_step(made[still]),
    )


def _weighted(recorded: Recorded) -> pd.DataFrame:
    """First uses of tokens with `weight` = |c/(A·ratio)|, NaN without an advantage; none where a KL term has a part of c."""
    tokens = recorded.drawn
    first = tokens[(tokens["update"] == 0) & bool(tokens["ref_logp"].isna().all())]
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
    pieces = set()  # numbers of blocks that the steps tell
    for _, part in first.groupby("step"):
        if part["weight"].notna().any():
            pieces.add(_pieces(part))
    m = pieces.pop() if len(pieces) == 1 else 1
    return measured(1 - 1 / m, pieces=m)


def _pieces(tokens: pd.DataFrame) -> int:
    """The number of blocks whose means are summed in one step's loss; 1 where the weights do not tell it."""
    row = np.unique(tokens["rollout"], return_inverse=True)[1]  # (tokens,)
    rows = row.max() + 1
    counted = tokens["weight"].notna().to_numpy()
    weight = tokens["weight"].to_numpy(float)[counted]
    by_row = np.bincount(row[counted], weight, minlength=rows)
    by_row = by_row[by_row > 0]
    for blocks in (1, 2, 4, 8, 16, 32):
        if rows % blocks:
            break
        block = row * blocks // rows  # of each token
        size = np.bincount(block)[block]  # tokens of its block
        mean_of_tokens = weight * size[counted]
        mean_of_rows = by_row * rows / blocks
        for values in (mean_of_tokens, mean_of_rows):
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
    x = logs["size"].to_numpy(float)
    y = logs["median"].to_numpy(float)
    if len(rows) < FEWEST or x @ x < 1:
        return None
    power = -float(x @ y / (x @ x))
    exact = np.abs(y + power * x).max() < 0.01
    return measured(
        max(0.0, power - 1) if exact else 0.0,
        power=power,
        step=first_step(first),
    )


@identity
def first_divergence(recorded: Recorded) -> Measured | None:
    """KL(π_old‖π) over the first step: how far one step moves the policy [nats per token]."""
    steps = recorded.steps
    known = steps[steps["kl_step"].notna() & (steps["step"] <= 2)]
    if known.empty:
        return None
    return measured(
        known["kl_step"].max(),
        step=int(known["step"].iloc[0]),
        lr=float(known["lr"].iloc[0]),
        clipped=recorded.updates["clip_factor"].lt(1).mean(),
    )


@identity
def finite(recorded: Recorded) -> Measured | None:
    """Updates whose loss or gradient norm is not finite."""
    updates = recorded.updates
    if updates.empty:
        return None
    given = updates["loss"].notna().any()  # a loop need not give its loss
    bad_loss = given & ~np.isfinite(updates["loss"])
    bad = updates[bad_loss | ~np.isfinite(updates["grad_norm"])]
    told = recorded.events[recorded.events["rule"] == "not_finite"]
    if len(bad):  # an update that a loss scaler left out long before has nothing to do with it
        told = told[told["step"] <= first_step(bad)]
    last = told.tail(1)
    return measured(
        len(bad),
        step=first_step(last if len(last) else bad),  # an update can break weights before a loss
        message="".join(last["message"].astype(str)),
        updates=len(updates),
    )
