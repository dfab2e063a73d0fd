"""C2, C3 and C9: what recorded tokens say of the score norm, of its concentration, and of low-probability tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from sharpscope.analysis.claims import one_update
from sharpscope.analysis.claims.base import (
    ClaimData,
    Evidence,
    Statistic,
    declared,
    is_shown,
    mean_estimate,
)
from sharpscope.analysis.statistics import (
    ClusterSlope,
    Doubles,
    cluster_moments,
    weighted_ranks,
)
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import (
    INCLUSION,
    Columns,
    Found,
    Reduced,
    Reducer,
    complement,
    deciles,
    held_by_largest,
    inverse_inclusion,
)
from sharpscope.traces import Run

# C2: the full score norm grows as 1 − π.

LOWEST = 1e-6
"""1 − π below this is float32's rounding [1]."""
FEWEST_SLOPE = 8
FEWEST_CURVE = 50
FEWEST_INFLUENCE = 100
"""Tokens that a step must have for its slope, its Lorenz curve and its influence to be counted [tokens]."""


def _full(tokens: Columns, run: Run) -> Found:
    """Moments of one step: ln norm on ln(1 − π), controlling position, ln ‖h‖ and collision; and of their ranks."""
    norm = tokens["score_norm"]
    chance = tokens["draw_probability"]
    exact = np.isfinite(norm) & (tokens["score_norm_std_error"] == 0)
    # where no token was drawn at random, no probability is recorded: all that have a norm count alike
    weight = np.where(exact, 1.0 / np.where(chance > 0, chance, 1.0), 0.0)
    rest = complement(tokens["logp"])
    head = tokens["head_grad_norm"]
    logit = tokens["logit_grad_norm"]
    with np.errstate(divide="ignore", invalid="ignore"):
        hidden = np.log(head) - np.log(logit)  # ln(‖h‖/T), since ‖∂ℓ/∂W‖ = ‖∂ℓ/∂z‖·‖h‖/T
        y = np.log(np.where(exact, norm, np.nan))
        x = np.log(rest)
    position = tokens["position"]
    collision = tokens["collision"]
    table = np.array([x, position, hidden, collision, y])  # (5, n)
    good = (rest > LOWEST) & np.isfinite(table).all(axis=0) & (weight > 0)
    if good.sum() < FEWEST_SLOPE:
        return None
    w = weight[good]
    columns = list(table[:, good])
    ranks = [weighted_ranks(column, w) for column in columns]
    return {
        "moments": cluster_moments(columns[-1], columns[0], columns[1:-1], w),
        "ranks": cluster_moments(ranks[-1], ranks[0], ranks[1:-1], w),
        "tokens": int(good.sum()),
    }


_NEEDED = ("logp", "position", "collision", "logit_grad_norm", "head_grad_norm")
FULL = Reducer(
    "C2",
    (*_NEEDED, "score_norm", "score_norm_std_error", "draw_probability"),
    _full,
    needs="score_norm",
)


def _clustered(results: Sequence[Reduced], key: str) -> ClusterSlope:
    """Slope over clusters, the steps of each seed. Moments of one cluster are summed."""
    sums: dict[tuple[int, int], Doubles] = {}
    for result in results:
        cluster = (result.seed, result.step)
        sums[cluster] = sums.get(cluster, 0.0) + result.values[key]
    return ClusterSlope(np.array(list(sums.values())))


def score_norm(study: Study) -> ClaimData:
    """Slope of ln score_norm on ln(1 − π) with controls, and its equivalence to 1."""
    results = study.results(FULL.name, study.alike(study.baseline, study.treatment))
    if not results:
        return ClaimData(missing="no token has an exact score_norm")
    slope = _clustered(results, "moments")
    ranks = _clustered(results, "ranks")
    margin = C2.margin_in(study.terms)
    interval = slope.interval()
    clusters = len(slope.moments)
    low = 1 - margin
    high = 1 + margin
    inside = max(slope.p(low, "greater"), slope.p(high, "less"))
    outside = min(slope.p(low, "less"), slope.p(high, "greater"))
    p = ranks.p(0.0)
    note = "ranks in place of logarithms; p of slope 0"
    holds = interval is None or interval.low <= 1 <= interval.high
    counts = f"{sum(r.values['tokens'] for r in results)} tokens in {clusters} steps"
    return ClaimData(
        effect=Statistic("slope of ln ‖∇ log π‖ on ln(1 − π)", slope.value, "1", interval),
        n=clusters,
        evidence=(Evidence(inside, low < slope.value < high, outside, (clusters,)),),
        conditions=(
            (
                "the partial rank correlation is positive",
                ranks.value > 0 and p <= study.terms.level,
            ),
            ("the slope's interval holds 1, the slope that is claimed", holds),
        ),
        others=(
            Statistic("partial rank slope", ranks.value, "1", ranks.interval(), p, clusters, note),
        ),
        notes=(counts, *study.elsewhere(study.baseline, study.treatment)),
    )


C2 = declared("C2", score_norm, FULL)

# C3: few tokens dominate the gradient, more than if the norm were 1 − π.

TOP, HALF = 0.01, 0.5
"""Share of the tokens called few, and the share of the gradient that they must hold. The top tenth holds 99 % of the gradient
already where the norm is 1 − π."""


def _concentration(tokens: Columns, run: Run) -> Found:
    coef = np.abs(tokens["loss_coef"])
    norm = tokens["score_norm_local"]
    # tokens of groups without variance have no gradient whatever their norm, and would make any rest look dominant
    used = np.isfinite(norm) & (coef > 0)
    if used.sum() < FEWEST_CURVE:
        return None
    pull = coef[used] * norm[used]
    null = coef[used] * complement(tokens["logp"][used])
    if not (pull.sum() > 0 and null.sum() > 0):
        return None
    count = inverse_inclusion(tokens)[used]
    return {
        "top": float(held_by_largest(pull, count, TOP)),
        "top_null": float(held_by_largest(null, count, TOP)),
    }


CURVES = Reducer(
    "C3",
    ("logp", "loss_coef", "score_norm_local", INCLUSION),
    _concentration,
    needs="score_norm_local",
)


def _seeds_and_steps(
    study: Study, results: Sequence[Reduced], *names: str
) -> tuple[pd.DataFrame, list[str]]:
    """The mean of each value by seed and step, and notes. Runs of other settings with the same seed share their puzzles."""
    rows = [(one.seed, one.step, *(one.values[name] for name in names)) for one in results]
    frame = pd.DataFrame(rows, columns=["seed", "step", *names])
    counts = f"{frame['seed'].nunique()} seeds, {frame['step'].nunique()} recorded steps"
    means = frame.groupby(["seed", "step"], as_index=False).mean()
    return means, [counts, *study.elsewhere(study.baseline)]


def dominance(study: Study) -> ClaimData:
    """Share of Σ|c|·‖∇ log π‖ held by the top hundredth of the tokens, beyond that of a null with norm = 1 − π."""
    results = study.results(CURVES.name, study.alike(study.baseline))
    if not results:
        return ClaimData(
            missing=f"no step of {study.baseline} has score_norm_local on enough tokens"
        )
    means, notes = _seeds_and_steps(study, results, "top_null", "top")
    means = means.rename(columns={"top_null": "baseline", "top": "treatment"})
    means["difference"] = means["treatment"] - means["baseline"]
    margin = C3.margin_in(study.terms)
    room = 1 - means["baseline"].mean()
    shares = [
        mean_estimate(name, means[column].to_numpy(), C3.effect_unit, "percent")
        for name, column in (
            ("share of the top hundredth", "treatment"),
            ("the null's share", "baseline"),
        )
    ]
    why = f"the null's top hundredth holds {1 - room:.1%}, which leaves no room for {100 * margin:g} points more"
    half = is_shown(study, means["treatment"], "greater", HALF)
    return ClaimData(
        parts={} if room < margin else {"": means},
        missing=why if room < margin else "",
        conditions=(("the top hundredth of the tokens is shown to hold more than half", half),),
        others=tuple(replace(share, p_value=None) for share in shares if share is not None),
        notes=(*notes, "local norms, without credit through other positions"),
    )


C3 = declared("C3", dominance, CURVES)

# C9: low-probability tokens hurt held-out performance.


def _by_decile(tokens: Columns, run: Run) -> Found:
    influence = tokens["heldout_influence"]
    advantage = tokens["advantage"]
    used = np.isfinite(influence) & np.isfinite(advantage) & (advantage != 0)
    if used.sum() < FEWEST_INFLUENCE:
        return None
    weight = inverse_inclusion(tokens)[used]
    scale = np.average(np.abs(influence[used]), weights=weight)
    if not scale > 0:
        return None
    low = deciles(tokens["logp"][used]) == 1
    values = influence[used] / scale
    return {
        "low": float(np.average(values[low], weights=weight[low])),
        "rest": float(np.average(values[~low], weights=weight[~low])),
    }


INFLUENCE = Reducer(
    "C9",
    ("logp", "advantage", "heldout_influence", INCLUSION),
    _by_decile,
    needs="heldout_influence",
)


def influence(study: Study) -> ClaimData:
    """Mean first-order influence of the lowest tenth by probability, in units of the step's mean |influence|."""
    results = study.results(INFLUENCE.name, study.alike(study.baseline))
    if not results:
        return ClaimData(
            missing=f"no step of {study.baseline} has heldout_influence on enough tokens"
        )
    means, notes = _seeds_and_steps(study, results, "low", "rest")
    worse = is_shown(study, means["low"] - means["rest"], "less")
    return ClaimData(
        parts={"": means.assign(difference=means["low"])},
        conditions=(("the lowest tenth is shown to do worse than the other tokens", worse),),
        others=(mean_estimate("all other tokens", means["rest"], _RECORDED.effect_unit),),
        notes=tuple(notes),
    )


_RECORDED = declared("C9 (influence of recorded tokens)", influence)
C9 = declared("C9", one_update.unlikely, INFLUENCE, other=_RECORDED)
