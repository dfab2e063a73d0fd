"""C13: the treatment damps lucky spikes (unlikely tokens with A > 0) while keeping confident tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.claims.base import (
    DOSED,
    FINISHED_ONLY,
    PAIRED_BY_SEED,
    SAME_SETTINGS,
    Claim,
    Condition,
    Confounder,
    Evidence,
    Finding,
    Rule,
    Verdict,
    difference_estimate,
    directional,
    log_margin,
    pairing_notes,
    picture,
    present,
    rows_of,
    sample_of,
)
from sharpscope.analysis.claims.measures import dose_of, log_ratios
from sharpscope.analysis.figures.draw import draw_curves, draw_medians, regular_steps
from sharpscope.analysis.figures.style import Lines, Picture, finish, lines, panels, plain, styled
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import Pairing, Study
from sharpscope.analysis.tokens import INCLUSION, Columns, Reduced, Reducer, inverse_inclusion
from sharpscope.traces import Run

NAME = "C13"
COLUMNS = ("logp", "advantage", "weight", "loss_coef", "score_norm_local")
LOW, HIGH = 0.25, 0.9
"""Probabilities below which a token is unlikely, above which it is confident."""
MARGIN = 0.05


def _shares(tokens: Columns, run: Run) -> dict[str, Any] | None:
    pull = np.abs(tokens["loss_coef"].astype(np.float64)) * tokens["score_norm_local"].astype(np.float64)
    pull = pull * inverse_inclusion(tokens)
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


REDUCER = Reducer(NAME, (*COLUMNS, INCLUSION), _shares, needs="score_norm_local")


def share_frame(results: list[Reduced]) -> pd.DataFrame:
    """run, method, seed, step and the shares."""
    columns = ["run", "method", "seed", "step", "lucky", "confident", "lucky_unweighted", "confident_unweighted"]
    rows = [{"run": r.run, "method": r.method, "seed": r.seed, "step": r.step, **r.values} for r in results]
    return pd.DataFrame(rows, columns=columns)


def compared(shares: pd.DataFrame, pairing: Pairing, column: str) -> pd.DataFrame:
    """seed, mean share of both runs over the steps recorded in both, ln(treatment/baseline) as `difference`."""
    by_run = {run: rows.set_index("step")[column] for run, rows in shares.groupby("run")}
    rows = []
    for pair in pairing.pairs:
        a, b = by_run.get(pair.baseline), by_run.get(pair.treatment)
        both = a.index.intersection(b.index) if a is not None and b is not None else pd.Index([])
        if a is not None and b is not None and len(both):
            rows.append((pair.seed, float(a[both].mean()), float(b[both].mean())))
    return log_ratios(pd.DataFrame(rows, columns=["seed", "baseline", "treatment"]))


def direct(shares: pd.DataFrame, column: str) -> pd.DataFrame:
    """seed, share without the weights (`baseline`) and with them (`treatment`) on the same tokens, ln ratio as `difference`."""
    own = shares.groupby("seed", as_index=False)[[f"{column}_unweighted", column]].mean()
    return log_ratios(own.rename(columns={f"{column}_unweighted": "baseline", column: "treatment"}))


def test(study: Study) -> Finding:
    """Log ratio of the lucky tokens' gradient share with and without the weights, on the same tokens."""
    runs = study.alike(study.treatment)
    if not runs:
        return Finding(missing=f"no finished run of {study.treatment}")
    shares = share_frame(study.results(NAME, runs))
    lucky, sure = direct(shares, "lucky"), direct(shares, "confident")
    if not len(lucky):
        return Finding(missing=f"no run of {study.treatment} has score_norm_local at a step")
    return Finding(
        effect=difference_estimate(
            "change of the lucky tokens' gradient share by the weights", lucky, WITHIN, "", "log"
        ),
        n=len(lucky),
        evidence=_evidence(study, lucky, NAME),
        conditions=(_kept(study, sure, NAME),),
        confounders=(
            Confounder("another policy after training", "the same tokens with and without their weights"),
            Confounder("scale of the weights", "shares of the whole do not see a common factor"),
            Confounder("clipping", "clipped tokens have no gradient on either side"),
            FINISHED_ONLY,
        ),
        others=present(difference_estimate("change of the confident tokens' share", sure, WITHIN, "", "log")),
        rows=rows_of(runs, "tokens", COLUMNS, "score_norm_local recorded"),
        notes=(DEFINED, f"{shares['step'].nunique()} recorded steps"),
        frames={
            "shares": share_frame(study.results(NAME, study.alike(study.baseline, study.treatment))),
            "direct": lucky,
        },
        samples=(sample_of("lucky tokens' share", lucky, "lower", _margin(study, NAME), runs=1),),
    )


def test_between(study: Study) -> Finding:
    """Log ratio of the lucky tokens' gradient share, treatment over baseline, paired by seed."""
    shares = share_frame(study.results(NAME, study.alike(study.baseline, study.treatment)))
    pairing = study.pairing()
    if pairing.missing:
        return Finding(missing=pairing.missing)
    lucky, sure = compared(shares, pairing, "lucky"), compared(shares, pairing, "confident")
    if not len(lucky):
        return Finding(missing="no pair has score_norm_local at one step")
    return Finding(
        effect=difference_estimate("change of the lucky tokens' gradient share", lucky, UNIT, "", "log"),
        n=len(lucky),
        evidence=_evidence(study, lucky, BETWEEN.key),
        conditions=(_kept(study, sure, BETWEEN.key),),
        confounders=(
            Confounder("another policy after training", "not handled: each run's tokens are its own policy's"),
            Confounder("scale of the weights", "shares of the whole do not see a common factor"),
            PAIRED_BY_SEED,
            SAME_SETTINGS,
            DOSED,
            FINISHED_ONLY,
        ),
        others=present(difference_estimate("change of the confident tokens' share", sure, UNIT, "", "log")),
        rows=rows_of(
            pairing.names, "tokens", COLUMNS, "score_norm_local recorded, steps recorded in both runs of a pair"
        ),
        notes=(DEFINED, *pairing_notes(study, pairing)),
        frames={"lucky": lucky, "confident": sure},
        dose=dose_of([study.finished[pair.treatment] for pair in pairing.pairs], study.treatment),
        samples=(sample_of("lucky tokens' share", lucky, "lower", _margin(study, BETWEEN.key)),),
    )


test_between.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever its name looks like


def _margin(study: Study, key: str) -> float:
    return log_margin(study.terms.margin(key, MARGIN), "lower")


def _evidence(study: Study, lucky: pd.DataFrame, key: str) -> Evidence:
    return directional(lucky["difference"].to_numpy(), "lower", _margin(study, key))


def _kept(study: Study, sure: pd.DataFrame, key: str) -> Condition:
    values = sure["difference"].to_numpy()
    kept = len(values) > 0 and sign_flip_p(values, "greater", shift=-_margin(study, key)) <= study.terms.level
    margin = study.terms.margin(key, MARGIN)
    return Condition(f"confident tokens are shown to lose less than {margin:.0%} of their share", bool(kept))


DEFINED = f"lucky: π < {LOW:g} and A > 0; confident: π > {HIGH:g}"
UNIT = "ln(treatment / baseline)"
WITHIN = "ln(with / without weights)"


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


TITLE = "GRPO-SG damps lucky spikes while keeping confident tokens"
SOURCE = "arXiv 2511.00066"
BETWEEN = Claim(
    NAME,
    TITLE,
    SOURCE,
    Rule(
        f"supported: the share of Σ|c|·norm held by tokens with π < {LOW:g} and A > 0 is lower than in the baseline's run of the same "
        f"seed (sign-flip test over seeds) and that of tokens with π > {HIGH:g} is shown to fall by less than {{margin}}; refuted: it "
        "is shown to be lower by less than {margin}",
        "pairs of runs with one seed",
        6,
        MARGIN,
        scale="log",
        compares=True,
    ),
    "more paired seeds with recording.token_gradients_every",
    test_between,
    version="between runs",
)
CLAIM = Claim(
    NAME,
    TITLE,
    SOURCE,
    Rule(
        f"supported: on the same tokens the weights lower the share of Σ|c|·norm held by tokens with π < {LOW:g} and A > 0 (sign-flip "
        f"test over seeds), and that of tokens with π > {HIGH:g} is shown to fall by less than {{margin}}; refuted: they are shown to "
        "lower it by less than {margin}",
        "seeds of the treatment",
        6,
        MARGIN,
        scale="log",
    ),
    "more seeds of the treatment with recording.token_gradients_every",
    test,
    (REDUCER,),
    draw,
    "same gradient",
    BETWEEN,
)
