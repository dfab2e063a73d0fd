"""C7: the treatment generalizes better: held-out accuracy, paired by seed, on a training set that repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd

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
    paired_pictures,
    pairing_notes,
    present,
    rows_of,
)
from sharpscope.analysis.claims.measures import accuracy, gap, last_step, repeats, train_accuracy
from sharpscope.analysis.figures.style import Picture
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import Pairing, Study
from sharpscope.traces import Run

NAME = "C7"
MARGIN = 0.02
Measure = Callable[[Run, int], float | None]


def held_out(run: Run, step: int) -> float | None:
    """Accuracy on held-out puzzles of the sizes trained on."""
    found = accuracy(run, "heldout", step)
    return None if found is None else found[0]


def unseen(run: Run, step: int) -> float | None:
    """Accuracy on sizes never trained on."""
    found = accuracy(run, "unseen", step)
    return None if found is None else found[0]


def training(run: Run, step: int) -> float | None:
    """Accuracy on training puzzles."""
    found = train_accuracy(run, step)
    return None if found is None else found[0]


def at_last_step(study: Study, pairing: Pairing, measure: Measure) -> pd.DataFrame:
    """seed, baseline, treatment, difference of `measure` at the last step at which both runs were evaluated."""

    def of(first: Run, second: Run) -> tuple[float, float] | None:
        step = last_step(first, second)
        if step is None:
            return None
        a, b = measure(first, step), measure(second, step)
        return None if a is None or b is None else (a, b)

    return study.differences(pairing, of)


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
    evidence = directional(frame["difference"].to_numpy(), "higher", MARGIN)
    conditions = []
    if len(away):
        worse = away["difference"].mean() < 0 and sign_flip_p(away["difference"].to_numpy(), "less") <= 0.05
        conditions.append(Condition("unseen sizes are not shown to be worse", not worse))
    return Finding(
        effect=difference_estimate("difference of held-out accuracy", frame, UNIT),
        n=len(frame),
        evidence=evidence,
        conditions=tuple(conditions),
        confounders=(
            PAIRED_BY_SEED,
            SAME_SETTINGS,
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
            difference_estimate("difference of accuracy on unseen sizes", away, UNIT),
            difference_estimate("difference of training accuracy", at_last_step(study, pairing, training), UNIT),
            difference_estimate("difference of the gap, training − held-out", gaps, UNIT, "lower is better"),
        ),
        rows=rows_of(pairing.names, "eval", ("step", "accuracy", "n"), "split heldout, unseen or train, temperature 1")
        + rows_of(pairing.names, "steps", ("step", "accuracy"), "last 10 steps, where train was not evaluated"),
        notes=pairing_notes(study, pairing)
        + ((f"training went {min(rounds):.2g} times through its set",) if rounds else ("repeats are not known",)),
        frames={"heldout": frame, "unseen": away, "gap": gaps},
    )


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
    "primary",
    Rule(
        "supported: held-out accuracy at temperature 1 at the last shared evaluation is higher (sign-flip test "
        "over seeds), "
        f"unseen sizes not shown to be worse; refuted: it is shown to be higher by less than {MARGIN:g}",
        "pairs of runs with one seed",
        10,
        MARGIN,
    ),
    "more paired seeds, on a finite training set that training goes through more than once",
    test,
    draw=draw,
)
