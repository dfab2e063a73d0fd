"""C9: low-probability tokens hurt held-out performance: first-order influence by probability decile and advantage
sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from sharpscope.analysis.claims.base import Claim, Condition, Confounder, Finding, Rule, rows_of
from sharpscope.analysis.claims.paired import directional, mean_estimate, present
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import RunLike, Study
from sharpscope.analysis.tokens import Columns, Reducer

NAME = "C9"
COLUMNS = ("logp", "advantage", "heldout_influence")
MARGIN = 0.1
DECILES = 10
FEWEST = 100
"""Tokens with a known influence that a step must have [tokens]."""


def _by_decile(tokens: Columns, run: RunLike) -> dict[str, Any] | None:
    influence = tokens["heldout_influence"].astype(np.float64)
    advantage = tokens["advantage"].astype(np.float64)
    used = np.isfinite(influence) & np.isfinite(advantage) & (advantage != 0)
    scale = np.abs(influence[used]).mean() if used.sum() >= FEWEST else 0.0
    if not scale > 0:
        return None
    influence, positive, logp = influence[used] / scale, advantage[used] > 0, tokens["logp"][used]
    rank = np.argsort(np.argsort(logp, kind="stable"), kind="stable")
    decile = rank * DECILES // len(rank)
    low = decile == 0
    cells = []
    for sign, chosen in (("positive", positive), ("negative", ~positive)):
        for d in range(DECILES):
            inside = influence[chosen & (decile == d)]
            probability = float(np.exp(logp[decile == d].astype(np.float64)).mean())
            mean = float(inside.mean()) if len(inside) else np.nan
            cells.append({"advantage": sign, "decile": d + 1, "influence": mean, "pi": probability})
    return {
        "low": float(influence[low].mean()),
        "rest": float(influence[~low].mean()),
        "low_positive": float(influence[low & positive].mean()) if (low & positive).any() else np.nan,
        "low_negative": float(influence[low & ~positive].mean()) if (low & ~positive).any() else np.nan,
        "cells": cells,
    }


def reducers(study: Study) -> list[Reducer]:
    """Mean influence by decile and sign in each step of the baseline."""
    inside = {id(run) for run in study.alike(study.baseline).values()}
    return [Reducer(NAME, COLUMNS, lambda run: id(run) in inside, _by_decile, needs="heldout_influence")]


_SCALARS = ("low", "rest", "low_positive", "low_negative")


def test(study: Study) -> Finding:
    """Mean influence of the lowest tenth by probability, in units of the step's mean |influence|."""
    results = study.reduced.get(NAME, [])
    if not results:
        return Finding(missing=f"no step of {study.baseline} has heldout_influence on enough tokens")
    frame = pd.DataFrame([{"seed": r.seed, "step": r.step, **{k: r.values[k] for k in _SCALARS}} for r in results])
    means = frame.groupby(["seed", "step"], as_index=False).mean()
    low, rest = means["low"].to_numpy(), means["rest"].to_numpy()
    p, as_claimed, refuted, smallest = directional(low, "lower", MARGIN)
    cells = pd.concat(
        [pd.DataFrame(r.values["cells"]).assign(seed=r.seed, step=r.step) for r in results], ignore_index=True
    )
    return Finding(
        effect=mean_estimate("mean influence of the lowest tenth by probability", low, UNIT),
        n=len(means),
        p_supported=p,
        as_claimed=as_claimed,
        p_refuted=refuted,
        smallest_p=smallest,
        conditions=(
            Condition(
                "the lowest tenth is shown to do worse than the other tokens", sign_flip_p(low - rest, "less") <= 0.05
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
    )


UNIT = "step's mean |influence|; negative hurts"

CLAIM = Claim(
    NAME,
    "low-probability tokens hurt held-out performance",
    "arXiv 2505.12929 and 2511.00066",
    "exploratory",
    Rule(
        "supported: the mean first-order influence of the lowest tenth by probability is below 0 and below that of the "
        f"other tokens; refuted: it is shown to be above −{MARGIN:g} mean |influence|",
        "clusters (steps × seeds)",
        6,
        MARGIN,
    ),
    "more steps with recording.heldout_influence_every, on more seeds",
    test,
    reducers,
)
