"""C14: no learning rate of the baseline does as well as the treatment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.claims.base import (
    DOSED,
    FINISHED_ONLY,
    PAIRED_BY_SEED,
    Claim,
    Confounder,
    Finding,
    Rule,
    Source,
    Verdict,
    difference_estimate,
    difference_figure,
    picture,
    present,
    rows_of,
    unfinished,
)
from sharpscope.analysis.claims.c07_generalization import at_last_step, beats_every, held_out
from sharpscope.analysis.claims.measures import dose_of, paired_noise
from sharpscope.analysis.figures.style import Picture
from sharpscope.analysis.study import GRID, Pair, Pairing, Study, grid_settings, most_common

NAME = "C14"
MARGIN = 0.02
MINIMUM = 6
"""Seeds of a learning rate; one with fewer is shown, not tested."""


def rate_pairings(study: Study) -> dict[float, Pairing]:
    """Learning rate → pairs of the treatment, at its own rate, with the baseline at that rate, all else equal."""
    rate = (GRID["learning rate"],)
    treated = study.of(study.treatment)
    if not treated:
        return {}
    main = most_common(sorted(study.setting_key(run) for run in treated.values()))
    inside = {name: run for name, run in sorted(treated.items()) if study.setting_key(run) == main}
    ground = study.setting_key(next(iter(inside.values())), rate)
    by_seed = {run.seed: name for name, run in reversed(inside.items())}
    result: dict[float, list[Pair]] = {}
    seen: set[tuple[float, Any]] = set()
    for name, run in sorted(study.of(study.baseline).items()):
        other = grid_settings(run).get("learning rate")
        if other is None or study.setting_key(run, rate) != ground or run.seed not in by_seed:
            continue
        if (other, run.seed) not in seen:
            seen.add((other, run.seed))
            result.setdefault(other, []).append(Pair(run.seed, name, by_seed[run.seed]))
    return {value: Pairing(tuple(pairs)) for value, pairs in sorted(result.items())}


def test(study: Study) -> Finding:
    """Held-out accuracy of the treatment minus that of the baseline at each learning rate; it must beat every one."""
    pairings = rate_pairings(study)
    frames = {rate: at_last_step(study, pairing, held_out) for rate, pairing in pairings.items()}
    frames = {rate: frame for rate, frame in frames.items() if len(frame)}
    treated = study.of(study.treatment)
    if not frames or not treated:
        return Finding(missing=f"no run of {study.treatment if not treated else study.baseline} to compare")
    own = grid_settings(study.finished[next(iter(pairings.values())).pairs[0].treatment]).get("learning rate")
    if own is None:
        return Finding(missing=f"the learning rate of {study.treatment} is not recorded (optimizer.lr in config.yaml)")
    tested = {rate: frame for rate, frame in frames.items() if len(frame) >= MINIMUM}
    others = present(
        *(
            difference_estimate(f"against {study.baseline} at lr {rate:g}", frame, UNIT, "", "points")
            for rate, frame in frames.items()
        )
    )
    lacking = [
        side
        for side, there in (
            ("below", any(rate < own for rate in tested)),
            ("above", any(rate > own for rate in tested)),
            ("equal to", own in tested),
        )
        if not there
    ]
    if lacking:
        return Finding(
            missing=f"no learning rate of {study.baseline} {' and '.join(lacking)} that of {study.treatment} ({own:g}) has "
            f"{MINIMUM} seeds in common with it",
            others=others,
        )
    margin = study.terms.margin(NAME, MARGIN)
    finding = beats_every(
        {f"{study.baseline} at lr {rate:g}": frame for rate, frame in tested.items()},
        UNIT,
        margin,
        [_noise(study, pairings[rate]) for rate in tested],
    )
    names = sorted({name for rate in tested for name in pairings[rate].names})
    return replace(
        finding,
        confounders=(
            Confounder("best of several rates", "every rate must be beaten: the largest p counts, so none is selected"),
            Confounder("a rate between those tried", "not handled: the claim is about the rates of the sweep"),
            PAIRED_BY_SEED,
            DOSED,
            FINISHED_ONLY,
        ),
        others=others,
        rows=rows_of(names, "eval", ("step", "accuracy", "n"), "split heldout, temperature 1, last shared step"),
        notes=(
            f"{study.treatment} at lr {own:g} against {study.baseline} at {', '.join(f'{rate:g}' for rate in tested)}",
            *(
                f"lr {rate:g} has {len(frame)} seeds, too few for the rule: shown, not tested"
                for rate, frame in frames.items()
                if rate not in tested
            ),
            *unfinished(study),
        ),
        frames={"rates": pd.concat([f.assign(rate=rate) for rate, f in frames.items()], ignore_index=True)},
        dose=dose_of(list(study.alike(study.treatment).values()), study.treatment),
    )


def _noise(study: Study, pairing: Pairing) -> Source | str:
    return paired_noise([(study.finished[p.baseline], study.finished[p.treatment]) for p in pairing.pairs], "heldout")


UNIT = "share of completions, treatment − baseline at that rate"


def accuracy_by_rate(rates: pd.DataFrame) -> Figure:
    """Held-out accuracy of the treatment minus that of the baseline at each learning rate, with 95 % intervals over seeds (C14).

    `rates`: rate, seed, difference.
    """
    values = rates.assign(name=[f"lr {rate:g}" for rate in rates["rate"]])
    label = "held-out accuracy, treatment − baseline [share of completions]"
    return difference_figure(values.sort_values("rate", kind="stable"), label, "baseline at")


def draw(verdict: Verdict, study: Study) -> Iterator[Picture]:
    """Accuracy against the learning rate."""
    caption = "Held-out accuracy of the treatment against the baseline at each learning rate, paired by seed"
    yield picture(verdict, "rates", "accuracy_by_rate", caption, accuracy_by_rate)


CLAIM = Claim(
    NAME,
    "no learning rate of plain GRPO does as well",
    "this project: the rival explanation of weights whose mean is above 1",
    Rule(
        "supported: held-out accuracy is higher than that of the baseline at every learning rate of a sweep with rates below, "
        f"equal to and above the treatment's and at least {MINIMUM} seeds each (the largest of the sign-flip p-values); refuted: "
        "it is shown to be higher than at one rate by less than {margin} (Bonferroni over the rates)",
        "pairs of runs with one seed, fewest over the rates",
        MINIMUM,
        MARGIN,
        scale="points",
        compares=True,
    ),
    f"the baseline at a lower and at a higher learning rate, each with at least {MINIMUM} of the treatment's seeds",
    test,
    draw=draw,
)
