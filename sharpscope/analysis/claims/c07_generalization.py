"""C7: the treatment generalizes better: held-out accuracy, paired by seed, on a training set that repeats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import pandas as pd

from sharpscope.analysis.claims import local
from sharpscope.analysis.claims.base import (
    DOSED,
    FINISHED_ONLY,
    PAIRED_BY_SEED,
    SAME_SETTINGS,
    Claim,
    Condition,
    Confounder,
    Finding,
    Rule,
    Source,
    Verdict,
    against_every,
    difference_estimate,
    directional,
    paired_pictures,
    pairing_notes,
    present,
    rows_of,
    sample_of,
)
from sharpscope.analysis.claims.measures import accuracy, dose_of, gap, last_step, paired_noise, repeats, train_accuracy
from sharpscope.analysis.figures.style import Picture
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import Pairing, Study
from sharpscope.traces import Run

NAME = "C7"
MARGIN = 0.02
Measure = Callable[[Run, int], float | None]


def held_out(run: Run, step: int) -> float | None:
    """Accuracy on held-out puzzles of the sizes trained on."""
    result = accuracy(run, "heldout", step)
    return None if result is None else result[0]


def unseen(run: Run, step: int) -> float | None:
    """Accuracy on sizes never trained on."""
    result = accuracy(run, "unseen", step)
    return None if result is None else result[0]


def training(run: Run, step: int) -> float | None:
    """Accuracy on training puzzles."""
    result = train_accuracy(run, step)
    return None if result is None else result[0]


def at_last_step(study: Study, pairing: Pairing, measure: Measure) -> pd.DataFrame:
    """seed, baseline, treatment, difference of `measure` at the last step at which both runs were evaluated."""
    return study.differences(pairing, functools.partial(_both_at_last_step, measure))


def _both_at_last_step(measure: Measure, first: Run, second: Run) -> tuple[float | None, float | None] | None:
    step = last_step(first, second)
    return None if step is None else (measure(first, step), measure(second, step))


def beats_every(frames: Mapping[str, pd.DataFrame], unit: str, margin: float, noise: Sequence[Source | str]) -> Finding:
    """Held-out accuracy of the treatment minus that of each rival, from the paired frame and noise of each; it must beat all."""
    least, evidence = against_every([f["difference"].to_numpy() for f in frames.values()], "higher", margin)
    strongest = list(frames)[least]
    return Finding(
        effect=difference_estimate(
            f"difference of held-out accuracy against {strongest}", frames[strongest], unit, "", "points"
        ),
        n=min(map(len, frames.values())),
        evidence=evidence,
        samples=tuple(
            sample_of(f"held-out accuracy against {name}", frame, "higher", margin, source)
            for (name, frame), source in zip(frames.items(), noise, strict=True)
        ),
    )


def test(study: Study) -> Finding:
    """Difference of held-out accuracy at the last shared evaluation."""
    pairing = study.pairing()
    if pairing.missing:
        return Finding(missing=pairing.missing)
    frame = at_last_step(study, pairing, held_out)
    if not len(frame):
        return Finding(missing="no pair was evaluated on held-out prompts at one step")
    rounds = [r for r in (repeats(study.finished[name]) for name in pairing.names) if r is not None]
    if rounds and min(rounds) < 1:
        return Finding(
            missing=f"training went {min(rounds):.2g} times through its set: without repeats there can be no gap"
        )
    away, gaps = at_last_step(study, pairing, unseen), at_last_step(study, pairing, gap)
    margin = study.terms.margin(NAME, MARGIN)
    conditions = []
    if len(away):
        worse = (
            away["difference"].mean() < 0 and sign_flip_p(away["difference"].to_numpy(), "less") <= study.terms.level
        )
        conditions.append(Condition("unseen sizes are not shown to be worse", not worse))
    pairs = [(study.finished[pair.baseline], study.finished[pair.treatment]) for pair in pairing.pairs]
    noise = paired_noise(pairs, "heldout")
    return Finding(
        effect=difference_estimate("difference of held-out accuracy", frame, UNIT, "", "points"),
        n=len(frame),
        evidence=directional(frame["difference"].to_numpy(), "higher", margin),
        conditions=tuple(conditions),
        confounders=(
            PAIRED_BY_SEED,
            SAME_SETTINGS,
            DOSED,
            Confounder(
                "no generalization gap", "the training set is finite and repeats; otherwise the claim is untestable"
            ),
            Confounder(
                "one set of puzzles",
                "not handled where all seeds share training and held-out puzzles: the interval is over runs, not over puzzles",
            ),
            Confounder("faster learning", "training accuracy and the gap are reported beside held-out accuracy"),
            Confounder("sampling noise", "all runs are evaluated on the same prompts with the same draws"),
            FINISHED_ONLY,
        ),
        others=present(
            difference_estimate("difference of accuracy on unseen sizes", away, UNIT, "", "points"),
            difference_estimate(
                "difference of training accuracy", at_last_step(study, pairing, training), UNIT, "", "points"
            ),
            difference_estimate("difference of the gap, training − held-out", gaps, UNIT, "lower is better", "points"),
        ),
        rows=rows_of(pairing.names, "eval", ("step", "accuracy", "n"), "split heldout, unseen or train, temperature 1")
        + rows_of(pairing.names, "steps", ("step", "accuracy"), "last 10 steps, where train was not evaluated"),
        notes=pairing_notes(study, pairing)
        + ((f"training went {min(rounds):.2g} times through its set",) if rounds else ("repeats are not known",))
        + _spread(frame, noise),
        frames={"heldout": frame, "unseen": away, "gap": gaps},
        dose=dose_of([second for _, second in pairs], study.treatment),
        samples=(sample_of("held-out accuracy", frame, "higher", margin, noise),),
    )


def _spread(frame: pd.DataFrame, source: Source | str) -> tuple[str, ...]:
    """How much of the spread of the differences over pairs is the sampling of answers."""
    spread = float(frame["difference"].std())
    if isinstance(source, str):
        return (source,)
    if not spread > 0:
        return ()
    text = f"standard deviation over pairs {100 * spread:.2g} points; from sampling answers {100 * source.variance**0.5:.2g} points"
    return (f"{text}{f' ({source.note})' if source.note else ''}",)


UNIT = "share of completions, treatment − baseline"


def draw(verdict: Verdict, study: Study) -> Iterator[Picture]:
    """Baseline and treatment, paired by seed."""
    return paired_pictures(
        verdict, {"heldout": "held-out", "unseen": "unseen sizes"}, "accuracy at the last evaluation [share]"
    )


CLAIM = Claim(
    NAME,
    "GRPO-SG generalizes better",
    "arXiv 2511.00066 (K&K, Qwen2.5-3B: 0.39 → 0.63)",
    Rule(
        "supported: held-out accuracy at temperature 1 at the last shared evaluation is higher (sign-flip test over seeds), "
        "unseen sizes not shown to be worse; refuted: it is shown to be higher by less than {margin}",
        "pairs of runs with one seed",
        6,
        MARGIN,
        scale="points",
        compares=True,
    ),
    "more paired seeds or more answers per evaluation, on a finite training set that training goes through more than once",
    test,
    draw=draw,
    version="between runs",
    beside=local.C7,
)
