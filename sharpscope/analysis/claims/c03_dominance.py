"""C3: few tokens dominate the gradient, more than if the norm were 1 − π."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sharpscope.analysis.claims.base import (
    Claim,
    Condition,
    Confounder,
    Estimate,
    Finding,
    Rule,
    Sample,
    directional,
    margin_text,
    mean_estimate,
    present,
    rows_of,
)
from sharpscope.analysis.figures.style import GRAY, Lines, Picture, finish, panels, plain, styled
from sharpscope.analysis.statistics import gini, lorenz, sign_flip_p, top_share
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import INCLUSION, Columns, Reduced, Reducer, inverse_inclusion
from sharpscope.traces import Run

NAME = "C3"
COLUMNS = ("logp", "loss_coef", "score_norm_local")
TOP = 0.01
"""Share of the tokens called few. The top tenth holds 99 % of the gradient already where the norm is 1 − π."""
REDUCED_TOP = 0.1
"""Share of the tokens whose part of the total is kept beside the Lorenz curve."""
HALF = 0.5
MARGIN = 0.05
FEWEST = 50
"""Tokens with a gradient that a step must have [tokens]."""


def _concentration(tokens: Columns, run: Run) -> dict[str, Any] | None:
    coef = np.abs(tokens["loss_coef"].astype(np.float64))
    norm = tokens["score_norm_local"].astype(np.float64)
    # tokens of groups without variance have no gradient whatever their norm, and would make any rest look dominant
    used = np.isfinite(norm) & (coef > 0)
    if used.sum() < FEWEST:
        return None
    pull = coef[used] * norm[used]
    null = coef[used] * -np.expm1(tokens["logp"][used].astype(np.float64))
    if not (pull.sum() > 0 and null.sum() > 0):
        return None
    inverse = inverse_inclusion(tokens)[used]
    count = None if (inverse == inverse[0]).all() else inverse
    return {
        "top": top_share(pull, REDUCED_TOP, count),
        "top_null": top_share(null, REDUCED_TOP, count),
        "gini": gini(pull, count),
        "gini_null": gini(null, count),
        "lorenz": lorenz(pull, weights=count),
        "lorenz_null": lorenz(null, weights=count),
    }


REDUCER = Reducer(NAME, (*COLUMNS, INCLUSION), _concentration, needs="score_norm_local")


def _of_largest(curve: Sequence[float], share: float) -> float:
    """Part of the total held by the largest `share` of the members, from a Lorenz curve of evenly spaced points."""
    return float(1 - np.interp(1 - share, np.linspace(0, 1, len(curve)), curve))


def test(study: Study) -> Finding:
    """Share of Σ|c|·‖∇ log π‖ held by the top hundredth of the tokens, beyond the null's."""
    results = study.results(NAME, study.alike(study.baseline))
    if not results:
        return Finding(missing=f"no step of {study.baseline} has score_norm_local on enough tokens")
    # runs of other settings with the same seed share their puzzles: one cluster
    rows = [
        {
            "seed": r.seed,
            "step": r.step,
            "top": _of_largest(r.values["lorenz"], TOP),
            "null": _of_largest(r.values["lorenz_null"], TOP),
            "tenth": r.values["top"] - r.values["top_null"],
            "gini": r.values["gini"] - r.values["gini_null"],
        }
        for r in results
    ]
    frame = pd.DataFrame(rows)
    means = frame.groupby(["seed", "step"], as_index=False).mean()
    excess = (means["top"] - means["null"]).to_numpy()
    margin = study.terms.margin(NAME, MARGIN)
    room = 1 - float(means["null"].mean())
    if room < margin:
        return Finding(
            missing=f"the null's top hundredth holds {1 - room:.1%}, which leaves no room for {margin_text(margin, 'points')} more: whatever "
            "the norms are, the margin cannot be reached",
            others=_shares(means, excess),
            notes=study.elsewhere(study.baseline),
            frames={"lorenz": mean_curves(results)},
        )
    top = means["top"].to_numpy()
    clusters = tuple(means[["seed", "step"]].itertuples(index=False, name=None))
    return Finding(
        effect=mean_estimate("share of the top hundredth beyond the null's", excess, UNIT, scale="points"),
        n=len(means),
        evidence=directional(excess, "higher", margin),
        conditions=(
            Condition(
                "the top hundredth of the tokens is shown to hold more than half",
                sign_flip_p(top, "greater", shift=HALF) <= study.terms.level,
            ),
        ),
        confounders=(
            Confounder("1 − π itself is unequal", "the null has the same coefficients and tokens, with norm = 1 − π"),
            Confounder("groups without variance", "tokens without a loss coefficient are left out on both sides"),
            Confounder(
                "the local norm leaves out credit", "it ranks tokens as the full norm does; said beside the number"
            ),
            Confounder("correlated tokens", "clusters are steps × seeds"),
        ),
        others=_shares(means, excess)[1:],
        rows=rows_of({r.run: None for r in results}, "tokens", COLUMNS, "score_norm_local recorded, loss_coef not 0"),
        notes=(
            f"{frame['seed'].nunique()} seeds, {frame['step'].nunique()} recorded steps",
            *study.elsewhere(study.baseline),
        ),
        frames={"lorenz": mean_curves(results)},
        samples=(Sample("share of the top hundredth beyond the null's", excess, clusters, "higher", margin, runs=1),),
    )


UNIT = "share of Σ|c|·‖∇ log π‖"


def _shares(means: pd.DataFrame, excess: NDArray[np.float64]) -> tuple[Estimate, ...]:
    return present(
        mean_estimate("share of the top hundredth beyond the null's", excess, UNIT, "p of 0", "points"),
        _share("share of the top hundredth", means["top"].to_numpy()),
        _share("the null's share of the top hundredth", means["null"].to_numpy()),
        mean_estimate("share of the top tenth beyond the null's", means["tenth"].to_numpy(), UNIT, "p of 0", "points"),
        mean_estimate("Gini beyond the null's", means["gini"].to_numpy(), "1", "p of 0"),
    )


def _share(name: str, values: NDArray[np.float64]) -> Estimate | None:
    """Mean share; without the p-value of 0, which no share is."""
    estimate = mean_estimate(name, values, UNIT, scale="percent")
    return None if estimate is None else replace(estimate, p_value=None)


def mean_curves(results: Sequence[Reduced]) -> pd.DataFrame:
    """Tokens (share, smallest first), lorenz, lorenz_null: means of the steps' Lorenz curves (101 points)."""
    curves = {name: np.mean([r.values[name] for r in results], axis=0) for name in ("lorenz", "lorenz_null")}
    return pd.DataFrame({"tokens": np.linspace(0, 1, 101), **curves})


CLAIM = Claim(
    NAME,
    "few tokens dominate the gradient",
    "arXiv 2505.12929 and 2511.00066: low-probability tokens dominate the update",
    Rule(
        "supported: the top hundredth of the tokens holds more of Σ|c|·norm than where norm = 1 − π, and more than half; "
        "refuted: it is shown to hold less than {margin} more than that null's; untestable where the null leaves less "
        "room than that",
        "clusters (steps × seeds)",
        6,
        MARGIN,
        scale="points",
    ),
    "more steps with recording.token_gradients_every, on more seeds; a policy that is less sure of its tokens",
    test,
    (REDUCER,),
)


def figure(study: Study, lines: Lines) -> Picture:
    """Share of Σ|c|·‖∇ ln π‖ that the largest tokens of a step hold, by setting, beside the null in which the norm is 1 − π.

    The steps' Lorenz curves, turned so that the largest come first, averaged over steps and seeds; linear and logarithmic.
    """
    result = {s.label: study.results_of(NAME, s) for s in study.settings}
    result = {label: results for label, results in result.items() if results}
    if not result:
        why = "no score norms were recorded (set recording.token_gradients_every)"
        return Picture("lorenz", "", missing=f"Lorenz curve: {why}")
    with styled():
        figure, axes = panels(2)
        for label, results in result.items():
            curves, line = mean_curves(results), lines[label]
            largest = {name: 1 - curves[name].to_numpy()[::-1] for name in ("tokens", "lorenz", "lorenz_null")}
            for axis in axes:
                axis.plot(largest["tokens"], largest["lorenz"], label=plain(label), **line.plot)
                null: dict[str, Any] = {"color": line.color, "linewidth": 0.9, "linestyle": ":"}
                axis.plot(largest["tokens"], largest["lorenz_null"], label="if norm = 1 − π", **null)
        for axis, scale in zip(axes, ("linear", "log"), strict=True):
            axis.plot([0.01, 1], [0.01, 1], color=GRAY, linewidth=0.8, label="all tokens equal")
            label = "share of a step's tokens, largest first"
            axis.set(xscale=scale, ylim=(0, 1.02), xlabel=label, ylabel="share of Σ |c|·‖∇ ln π‖")
        axes[0].plot([0, 0.01], [0, 0.01], color=GRAY, linewidth=0.8)
        axes[1].set_xlim(0.01, 1)
        finish(figure, axes)
    caption = (
        "How few tokens make the gradient of a step: Lorenz curves, mean over steps and seeds; dotted: what they would be if "
        "the norm were 1 − π. Credit through other positions is left out (the local tier)."
    )
    return Picture("lorenz", caption, figure, claim=NAME)
