"""C9: low-probability tokens hurt held-out performance: influence by probability decile and sign of the advantage."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sharpscope.analysis.claims import local
from sharpscope.analysis.claims.base import (
    Claim,
    Condition,
    Confounder,
    Finding,
    Rule,
    Sample,
    directional,
    mean_estimate,
    present,
    rows_of,
)
from sharpscope.analysis.figures.style import Lines, Picture
from sharpscope.analysis.figures.tokens import draw_deciles
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import DECILES, INCLUSION, Columns, Reduced, Reducer, deciles, inverse_inclusion
from sharpscope.traces import Run

NAME = "C9"
COLUMNS = ("logp", "advantage", "heldout_influence")
MARGIN = 0.1
FEWEST = 100
"""Tokens with a known influence that a step must have [tokens]."""


def _mean_where(values: NDArray[np.float64], weights: NDArray[np.float64], chosen: NDArray[np.bool_]) -> float:
    return float(np.average(values[chosen], weights=weights[chosen])) if chosen.any() else np.nan


def _by_decile(tokens: Columns, run: Run) -> dict[str, Any] | None:
    influence = tokens["heldout_influence"].astype(np.float64)
    advantage = tokens["advantage"].astype(np.float64)
    used = np.isfinite(influence) & np.isfinite(advantage) & (advantage != 0)
    weight = inverse_inclusion(tokens)[used]
    scale = np.average(np.abs(influence[used]), weights=weight) if used.sum() >= FEWEST else 0.0
    if not scale > 0:
        return None
    influence, positive, logp = influence[used] / scale, advantage[used] > 0, tokens["logp"][used]
    decile = deciles(logp) - 1
    low = decile == 0

    mean = functools.partial(_mean_where, influence, weight)
    cells = []
    for sign, chosen in (("positive", positive), ("negative", ~positive)):
        for d in range(DECILES):
            probability = float(np.exp(logp[decile == d].astype(np.float64)).mean())
            cells.append(
                {"advantage": sign, "decile": d + 1, "influence": mean(chosen & (decile == d)), "pi": probability}
            )
    return {
        "low": mean(low),
        "rest": mean(~low),
        "low_positive": mean(low & positive),
        "low_negative": mean(low & ~positive),
        "cells": cells,
    }


REDUCER = Reducer(NAME, (*COLUMNS, INCLUSION), _by_decile, needs="heldout_influence")


_SCALARS = ("low", "rest", "low_positive", "low_negative")


def cells_frame(results: Sequence[Reduced]) -> pd.DataFrame:
    """Advantage (positive | negative), decile (1 = least likely), influence [step's mean |influence|], pi, seed, step."""
    parts = [pd.DataFrame(r.values["cells"]).assign(seed=r.seed, step=r.step) for r in results]
    return pd.concat(parts, ignore_index=True)


def test(study: Study) -> Finding:
    """Mean influence of the lowest tenth by probability, in units of the step's mean |influence|."""
    results = study.results(NAME, study.alike(study.baseline))
    if not results:
        return Finding(missing=f"no step of {study.baseline} has heldout_influence on enough tokens")
    frame = pd.DataFrame([{"seed": r.seed, "step": r.step, **{k: r.values[k] for k in _SCALARS}} for r in results])
    means = frame.groupby(["seed", "step"], as_index=False).mean()
    low, rest = means["low"].to_numpy(), means["rest"].to_numpy()
    margin = study.terms.margin(CORRELATION.key, MARGIN)
    evidence = directional(low, "lower", margin)
    cells = cells_frame(results)
    return Finding(
        effect=mean_estimate("mean influence of the lowest tenth by probability", low, UNIT),
        n=len(means),
        evidence=evidence,
        conditions=(
            Condition(
                "the lowest tenth is shown to do worse than the other tokens",
                sign_flip_p(low - rest, "less") <= study.terms.level,
            ),
        ),
        confounders=(
            Confounder("the advantage's sign", "shown for each sign; unlikely tokens are more often punished"),
            Confounder("correlated tokens", "clusters are steps × seeds"),
            Confounder("scale of the step", "influence is divided by the step's mean |influence|"),
            Confounder("first order only", "influence is of one gradient step; AdamW's preconditioning is not in it"),
        ),
        others=present(
            mean_estimate("lowest tenth, positive advantage", means["low_positive"].dropna().to_numpy(), UNIT),
            mean_estimate("lowest tenth, negative advantage", means["low_negative"].dropna().to_numpy(), UNIT),
            mean_estimate("all other tokens", rest, UNIT),
        ),
        rows=rows_of({r.run: None for r in results}, "tokens", COLUMNS, "heldout_influence recorded, advantage not 0"),
        notes=(
            f"{frame['seed'].nunique()} seeds, {frame['step'].nunique()} recorded steps",
            *study.elsewhere(study.baseline),
        ),
        frames={"influence": cells},
        samples=(
            Sample(
                "influence of the lowest tenth",
                low,
                tuple(means[["seed", "step"]].itertuples(index=False, name=None)),
                "lower",
                margin,
                runs=1,
            ),
        ),
    )


UNIT = "step's mean |influence|; negative hurts"

CORRELATION = Claim(
    NAME,
    "low-probability tokens hurt held-out performance",
    "arXiv 2505.12929 and 2511.00066",
    Rule(
        "supported: the mean first-order influence of the lowest tenth by probability is below 0 and below that of the "
        "other tokens; refuted: it is shown to be above −{margin} mean |influence|",
        "clusters (steps × seeds)",
        6,
        MARGIN,
    ),
    "more steps with recording.heldout_influence_every, on more seeds",
    test,
    version="influence of recorded tokens",
)
CLAIM = Claim(
    NAME,
    CORRELATION.title,
    CORRELATION.source,
    Rule(local.C9_TEXT, local.UNIT, 6, local.MARGIN, scale="percent"),
    "counterfactual updates with the arms low and high (`sharpscope fork`), on more batches or states",
    local.unlikely,
    (REDUCER,),
    local.draw,
    version="one update",
    beside=CORRELATION,
)


def figure(study: Study, lines: Lines) -> Picture:
    """Mean influence by decile of probability, a panel for each sign of the advantage; every setting of a study."""
    parts = []
    for setting in study.settings:
        results = study.results_of(NAME, setting)
        if results:
            means = cells_frame(results).groupby(["advantage", "decile", "seed"])[["influence"]].mean().reset_index()
            parts.append(means.rename(columns={"influence": "value"}).assign(setting=setting.label).dropna())
    if not parts:
        why = "held-out influence: not recorded (set recording.heldout_influence_every)"
        return Picture("influence", "", missing=why)
    frame = pd.concat(parts, ignore_index=True)
    rows = {
        f"advantage {sign} 0": frame[frame["advantage"] == name]
        for sign, name in ((">", "positive"), ("<", "negative"))
    }
    caption = (
        "First-order effect on the held-out loss by decile of the token's probability and sign of its advantage, in units of "
        "the step's mean |influence|, mean over steps; below 0 hurts. Bars: 95 % t-interval over seeds."
    )
    return Picture("influence", caption, draw_deciles(rows, lines, "influence [step's mean |influence|]"), claim=NAME)
