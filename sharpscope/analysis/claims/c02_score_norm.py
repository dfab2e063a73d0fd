"""C2: the full score norm ‖∇_θ log π‖ grows as 1 − π, other things being equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sharpscope.analysis.claims.base import Claim, Condition, Confounder, Estimate, Evidence, Finding, Rule, rows_of
from sharpscope.analysis.figures.style import Lines, Picture
from sharpscope.analysis.figures.tokens import score_norms
from sharpscope.analysis.statistics import ClusterSlope, cluster_moments, smallest_sign_flip_p, weighted_ranks
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import INCLUSION, Columns, Reduced, Reducer, inverse_inclusion
from sharpscope.traces import Run

NAME = "C2"
LOCAL = "C2 local"
SHARED = ("logp", "position", "collision", "logit_grad_norm", "head_grad_norm")
FULL_COLUMNS = (*SHARED, "score_norm", "score_norm_std_error", "draw_probability")
LOWEST = 1e-6
"""1 − π below this is float32's rounding [1]."""
MARGIN = 0.5
FEWEST = 8
"""Tokens a step must have for its slope to be counted [tokens]."""


def _design(tokens: Columns, norm: NDArray[Any], weight: NDArray[Any]) -> dict[str, Any] | None:
    """Moments of one step: ln norm on ln(1 − π), controlling position, ln ‖h‖ and collision; and the same of ranks."""
    rest = -np.expm1(tokens["logp"].astype(np.float64))
    head, logit = tokens["head_grad_norm"].astype(np.float64), tokens["logit_grad_norm"].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        hidden = np.log(head) - np.log(logit)  # ln(‖h‖/T), since ‖∂ℓ/∂W‖ = ‖∂ℓ/∂z‖·‖h‖/T
        y, x = np.log(norm), np.log(rest)
    controls = [tokens["position"].astype(np.float64), hidden, tokens["collision"].astype(np.float64)]
    good = (rest > LOWEST) & np.isfinite(y) & np.isfinite(hidden) & np.isfinite(controls[2]) & (weight > 0)
    if good.sum() < FEWEST:
        return None
    w = weight[good]
    columns = [x[good], *(c[good] for c in controls), y[good]]
    ranks = [weighted_ranks(column, w) for column in columns]
    return {
        "moments": cluster_moments(columns[-1], columns[0], columns[1:-1], w),
        "ranks": cluster_moments(ranks[-1], ranks[0], ranks[1:-1], w),
        "tokens": int(good.sum()),
        "sample": np.column_stack([rest[good], norm[good], w])[:64],
    }


def _full(tokens: Columns, run: Run) -> dict[str, Any] | None:
    norm, chance = tokens["score_norm"].astype(np.float64), tokens["draw_probability"].astype(np.float64)
    exact = np.isfinite(norm) & (tokens["score_norm_std_error"] == 0)
    # where no token was drawn at random, no probability is recorded: all that have a norm count alike
    weight = np.where(exact, 1.0 / np.where(chance > 0, chance, 1.0), 0.0)
    return _design(tokens, np.where(exact, norm, np.nan), weight)


def _local(tokens: Columns, run: Run) -> dict[str, Any] | None:
    norm = tokens["score_norm_local"].astype(np.float64)
    return _design(tokens, norm, np.where(np.isfinite(norm), inverse_inclusion(tokens), 0.0))


REDUCERS = (
    Reducer(NAME, FULL_COLUMNS, _full, needs="score_norm"),
    Reducer(LOCAL, (*SHARED, "score_norm_local", INCLUSION), _local, needs="score_norm_local"),
)


def _clustered(results: list[Reduced], key: str, by: str) -> ClusterSlope:
    """Slope over clusters: (seed, step), or with `by="seed"` seeds. Moments of one cluster are summed."""
    sums: dict[Any, NDArray[np.float64]] = {}
    for result in results:
        cluster = (result.seed, result.step) if by == "step" else result.seed
        sums[cluster] = sums.get(cluster, 0.0) + result.values[key]
    return ClusterSlope(np.array(list(sums.values())))


def _slope_estimate(name: str, slope: ClusterSlope, note: str) -> Estimate:
    return Estimate(name, slope.value, "1", slope.interval(), slope.p(0.0), slope.clusters, note)


def test(study: Study) -> Finding:
    """Slope of ln score_norm on ln(1 − π) with controls; its equivalence to 1."""
    alike = study.alike(study.baseline, study.treatment)
    results, local = study.results(NAME, alike), study.results(LOCAL, alike)
    others = []
    if local:
        note = "all tokens, credit through other positions left out; p of slope 0"
        others = [_slope_estimate("slope with the local norm", _clustered(local, "moments", "step"), note)]
    if not results:
        return Finding(missing="no token has an exact score_norm", others=tuple(others))
    slope, ranks = _clustered(results, "moments", "step"), _clustered(results, "ranks", "step")
    seeds = _clustered(results, "moments", "seed")
    margin = study.terms.margin(NAME, MARGIN)
    low, high = 1 - margin, 1 + margin
    rank_p = ranks.p(0.0)
    sample = np.concatenate([r.values["sample"] for r in results])
    return Finding(
        effect=Estimate("slope of ln ‖∇ log π‖ on ln(1 − π)", slope.value, "1", slope.interval()),
        n=slope.clusters,
        evidence=Evidence(
            max(slope.p(low, "greater"), slope.p(high, "less")),
            low < slope.value < high,
            min(slope.p(low, "less"), slope.p(high, "greater")),
            smallest_sign_flip_p(slope.clusters, "greater"),
            smallest_sign_flip_p(slope.clusters, "greater"),
        ),
        conditions=(
            Condition("the partial rank correlation is positive", ranks.value > 0 and rank_p <= study.terms.level),
        ),
        confounders=(
            Confounder("position, hidden norm, collision", "controlled, with a free mean for each step of each run"),
            Confounder(
                "selection of tokens",
                "exact norms of the largest tokens by local norm and of random ones are weighted by their inverse "
                "drawing probability",
            ),
            Confounder("correlated tokens", "clusters are steps × seeds, both methods' runs of a seed in one"),
            Confounder("rounding", f"tokens with 1 − π below {LOWEST:g} are left out"),
        ),
        others=(
            _slope_estimate("partial rank slope", ranks, "ranks in place of logarithms; p of slope 0"),
            _slope_estimate("slope, seeds as clusters", seeds, "wider question: other seeds; p of slope 0"),
            *others,
        ),
        rows=rows_of({r.run: None for r in results}, "tokens", FULL_COLUMNS, "score_norm recorded and exact"),
        notes=(
            f"{sum(r.values['tokens'] for r in results)} tokens in {slope.clusters} steps of {seeds.clusters} seeds",
            *study.elsewhere(study.baseline, study.treatment),
        ),
        frames={"sample": pd.DataFrame(sample, columns=["one_minus_pi", "score_norm", "sampling_weight"])},
    )


CLAIM = Claim(
    NAME,
    "the full score norm grows as 1 − π",
    "arXiv 2511.00066: a token's gradient norm lies between constants times (1 − π)",
    Rule(
        "supported: the slope of ln norm on ln(1 − π) is shown to lie within 1 ± {margin} (two one-sided "
        "tests) and the "
        "partial rank correlation is positive; refuted: the slope is shown to lie outside",
        "clusters (steps × seeds)",
        6,
        MARGIN,
    ),
    "more steps with recording.token_gradients_every and recording.exact_random, on more seeds",
    test,
    REDUCERS,
)


def figure(study: Study, lines: Lines) -> Picture:
    """Local norm against 1 − π by setting, and exact norms of some tokens of each step; dotted: the law ∝ (1 − π)."""
    samples = study.samples(["logp", "score_norm_local"])
    exact = [r.values["sample"] for s in study.settings for r in study.results_of(NAME, s)]
    if not samples and not exact:
        why = "no score norms were recorded (set recording.token_gradients_every)"
        return Picture("score_norm", "", missing=f"score norm against probability: {why}")
    norms = np.concatenate(exact)[:, :2] if exact else None
    drawn = score_norms(samples, lines, norms)
    caption = (
        "Norm of ∇ ln π over all parameters against the token's probability: the local tier, which leaves out credit through "
        "other positions, and the exact norms of some tokens of each step; dotted: the law ∝ (1 − π)."
    )
    return Picture("score_norm", caption, drawn, claim=NAME)
