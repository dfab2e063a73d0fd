"""C13: the treatment damps lucky spikes (unlikely tokens with A > 0) while keeping confident tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.claims.base import (
    FINISHED_ONLY,
    PAIRED_BY_SEED,
    SAME_SETTINGS,
    Claim,
    Condition,
    Confounder,
    Finding,
    Rule,
    Verdict,
    difference_estimate,
    directional,
    mean_estimate,
    pairing_notes,
    picture,
    present,
    rows_of,
)
from sharpscope.analysis.claims.measures import relative_difference
from sharpscope.analysis.figures.draw import draw_curves, draw_medians, regular_steps
from sharpscope.analysis.figures.style import Lines, Picture, finish, lines, panels, plain, styled
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import Pairing, Study
from sharpscope.analysis.tokens import Columns, Reduced, Reducer
from sharpscope.traces import Run

NAME = "C13"
COLUMNS = ("logp", "advantage", "weight", "loss_coef", "score_norm_local")
LOW, HIGH = 0.25, 0.9
"""Probabilities below which a token is unlikely, above which it is confident."""
MARGIN = 0.05


def _shares(tokens: Columns, run: Run) -> dict[str, Any] | None:
    pull = np.abs(tokens["loss_coef"].astype(np.float64)) * tokens["score_norm_local"].astype(np.float64)
    weight, logp = tokens["weight"].astype(np.float64), tokens["logp"]
    good = np.isfinite(pull) & np.isfinite(weight) & (weight > 0) & (pull > 0)
    if not good.any():
        return None
    pull, plain, logp = pull[good], (pull / np.where(good, weight, 1.0))[good], logp[good]
    lucky = (logp < np.log(LOW)) & (tokens["advantage"][good] > 0)
    sure = logp > np.log(HIGH)
    return {
        "lucky": float(pull[lucky].sum() / pull.sum()),
        "confident": float(pull[sure].sum() / pull.sum()),
        "lucky_unweighted": float(plain[lucky].sum() / plain.sum()),
        "confident_unweighted": float(plain[sure].sum() / plain.sum()),
    }


REDUCER = Reducer(NAME, COLUMNS, _shares, needs="score_norm_local")


def share_frame(results: list[Reduced]) -> pd.DataFrame:
    """run, method, seed, step and the shares."""
    columns = ["run", "method", "seed", "step", "lucky", "confident", "lucky_unweighted", "confident_unweighted"]
    rows = [{"run": r.run, "method": r.method, "seed": r.seed, "step": r.step, **r.values} for r in results]
    return pd.DataFrame(rows, columns=columns)


def compared(shares: pd.DataFrame, pairing: Pairing, column: str) -> pd.DataFrame:
    """seed, mean share of both runs over the steps recorded in both, relative difference as `difference`."""
    by_run = {run: rows.set_index("step")[column] for run, rows in shares.groupby("run")}
    rows = []
    for pair in pairing.pairs:
        a, b = by_run.get(pair.baseline), by_run.get(pair.treatment)
        both = a.index.intersection(b.index) if a is not None and b is not None else pd.Index([])
        if a is not None and b is not None and len(both):
            first, second = float(a[both].mean()), float(b[both].mean())
            rows.append((pair.seed, first, second, relative_difference(first, second)))
    return pd.DataFrame(rows, columns=["seed", "baseline", "treatment", "difference"])


def _direct(shares: pd.DataFrame, method: str, column: str) -> np.ndarray:
    """Per seed, the relative change that the weights make within the treatment's own steps."""
    own = shares[shares["method"] == method].groupby("seed")[[column, f"{column}_unweighted"]].mean()
    return np.array([relative_difference(float(b), float(a)) for a, b in own.to_numpy()])


def test(study: Study) -> Finding:
    """Relative difference of the gradient share of lucky tokens; confident tokens must keep theirs."""
    shares = share_frame(study.results(NAME, study.alike(study.baseline, study.treatment)))
    pairing = study.pairing()
    if pairing.missing:
        return Finding(missing=pairing.missing)
    lucky, sure = compared(shares, pairing, "lucky"), compared(shares, pairing, "confident")
    if not len(lucky):
        return Finding(missing="no pair has score_norm_local at one step")
    evidence = directional(lucky["difference"].to_numpy(), "lower", MARGIN)
    kept = sign_flip_p(sure["difference"].to_numpy(), "greater", shift=-MARGIN) <= 0.05
    return Finding(
        effect=difference_estimate("difference of the lucky tokens' gradient share", lucky, UNIT),
        n=len(lucky),
        evidence=evidence,
        conditions=(Condition(f"confident tokens are shown to lose less than {MARGIN:.0%} of their share", kept),),
        confounders=(
            Confounder(
                "another policy after training", "the weights' direct effect within the same tokens is beside it"
            ),
            Confounder("scale of the weights", "shares of the whole do not see a common factor"),
            PAIRED_BY_SEED,
            SAME_SETTINGS,
            FINISHED_ONLY,
        ),
        others=present(
            difference_estimate("difference of the confident tokens' share", sure, UNIT),
            mean_estimate(
                "direct effect of the weights on lucky tokens", _direct(shares, study.treatment, "lucky"), WITHIN
            ),
            mean_estimate(
                "direct effect of the weights on confident tokens",
                _direct(shares, study.treatment, "confident"),
                WITHIN,
            ),
        ),
        rows=rows_of(
            pairing.names, "tokens", COLUMNS, "score_norm_local recorded, steps recorded in both runs of a pair"
        ),
        notes=(f"lucky: π < {LOW:g} and A > 0; confident: π > {HIGH:g}", *pairing_notes(study, pairing)),
        frames={"shares": shares, "lucky": lucky, "confident": sure},
    )


UNIT = "relative difference, treatment − baseline"
WITHIN = "relative difference, with − without weights"


def lucky_spikes(shares: pd.DataFrame, lines: Lines) -> Figure:
    """Gradient share of lucky and of confident tokens by step and method, with the weights and without (C13).

    Steps that most seeds recorded, see `regular_steps`; the claim itself compares the steps that both runs of a pair have.

    `shares`: method, seed, step, lucky, confident, lucky_unweighted, confident_unweighted.
    """
    with styled():
        figure, axes = panels(2)
        for axis, column, title in zip(axes, ("lucky", "confident"), ("unlikely, A > 0", "confident"), strict=True):
            for method, rows in shares.groupby("method"):
                draw_curves(axis, regular_steps(rows, column, str(method)), lines)
                without = f"{column}_unweighted"
                if not np.allclose(rows[column], rows[without]):
                    label, color = plain(f"{method}, weights taken out"), lines[str(method)].color
                    draw_medians(axis, regular_steps(rows, without, label), color=color, linestyle=":", label=label)
            axis.set(xlabel="step", ylabel="share of Σ|c|·‖∇ log π‖", title=title)
        finish(figure, axes)
    return figure


def draw(verdict: Verdict, study: Study) -> Iterator[Picture]:
    """Gradient shares by step."""
    caption = "Gradient share of lucky and of confident tokens"
    styles = lines(study.methods)
    yield picture(verdict, "shares", "lucky_spikes", caption, lambda frame: lucky_spikes(frame, styles))


CLAIM = Claim(
    NAME,
    "GRPO-SG damps lucky spikes while keeping confident tokens",
    "arXiv 2511.00066",
    "exploratory",
    Rule(
        f"supported: the share of Σ|c|·norm held by tokens with π < {LOW:g} and A > 0 is lower (sign-flip test "
        "over seeds) "
        f"and that of tokens with π > {HIGH:g} is shown to fall by less than {MARGIN:.0%}; refuted: it is shown "
        "to be lower "
        f"by less than {MARGIN:.0%}",
        "pairs of runs with one seed",
        6,
        MARGIN,
    ),
    "more paired seeds with recording.token_gradients_every",
    test,
    (REDUCER,),
    draw,
)
