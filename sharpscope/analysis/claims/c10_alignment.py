"""C10: alignment with probability is what matters: the treatment against reversed and against shuffled weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.claims import local
from sharpscope.analysis.claims.base import (
    DOSED,
    FINISHED_ONLY,
    PAIRED_BY_SEED,
    SAME_SETTINGS,
    Claim,
    Confounder,
    Dose,
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
from sharpscope.analysis.claims.measures import dose_of, last_step, paired_noise
from sharpscope.analysis.figures.draw import t_interval
from sharpscope.analysis.figures.style import BLUE, GRAY, Picture, finish, panels, plain, styled
from sharpscope.analysis.study import Study
from sharpscope.config import control_label
from sharpscope.config.token_weights import PAPER_SIGMOID

NAME = "C10"
_CONSTANT = re.compile(r"weight\.(?:of\.)?(\w+)=(-?[0-9.]+(?:e-?[0-9]+)?)")
MARGIN = 0.02
RIVALS = ("reverse", "shuffled")
"""Controls that the rule names."""
MATCHED = 1.5
"""Factor by which the rotations of the update may differ for the dose to count as matched."""
CONTROLS = {
    "shuffled": "the same weights, without their alignment with probability",
    "constant": "the same mean weight on every token",
    "reverse": "the weights reversed",
    "entropy": "weights that follow the position's entropy instead",
}


def control(study: Study, suffix: str) -> str:
    """Name of the method that stands for a control: of the variants that were run, the one whose dose is closest.

    A variant is the control with changed constants, such as `grpo-sg-shuffled+weight.U=4`, which match its dose.
    """
    plain_name = f"{study.treatment.split('+')[0]}-{suffix}"
    result = [name for name in study.methods if name == plain_name or name.startswith(f"{plain_name}+")]
    own = _rotation(study, study.treatment)
    doses = {name: _rotation(study, name) for name in result}
    known = {name: abs(np.log(dose / own)) for name, dose in doses.items() if dose and own}
    return min(known, key=lambda name: known[name]) if known else control_label(study.treatment, suffix)


def _rotation(study: Study, method: str) -> float | None:
    return dose_of(list(study.alike(method).values()), method).rotation


def comparisons(study: Study) -> dict[str, pd.DataFrame]:
    """Rival → seed, baseline (the rival's held-out accuracy), treatment, difference."""
    names = [control(study, suffix) for suffix in CONTROLS]
    return {name: at_last_step(study, study.pairing(baseline=name), held_out) for name in names}


def test(study: Study) -> Finding:
    """Held-out accuracy of the treatment minus that of each rival; it must beat both."""
    frames = comparisons(study)
    names = [control(study, suffix) for suffix in RIVALS]
    compared = {name: frame for name, frame in frames.items() if len(frame)}
    others = present(
        *(difference_estimate(f"against {name}", frame, UNIT, "", "points") for name, frame in compared.items())
    )
    lacking = [name for name in names if name not in compared]
    if lacking:
        return Finding(
            missing=f"no run of {', '.join(lacking)} that pairs with one of {study.treatment}", others=others
        )
    margin = study.terms.margin(NAME, MARGIN)
    dose = dose_of(list(study.alike(study.treatment).values()), study.treatment)
    doses = {name: _rotation(study, name) for name in names}
    if unmatched := _unmatched(dose, doses):
        return Finding(missing=unmatched, others=others, dose=dose)
    finding = beats_every(
        {name: compared[name] for name in names}, UNIT, margin, [_noise(study, name) for name in names]
    )
    pairings = {name: study.pairing(baseline=name) for name in names}
    runs = sorted({run for pairing in pairings.values() for run in pairing.names})
    return replace(
        finding,
        confounders=(
            Confounder("size of the dose", f"rotations of the update within a factor of {MATCHED:g}, where recorded"),
            Confounder("spread of the weights", "the same weights shuffled over the tokens of each completion"),
            Confounder("any change of the weights", "the same weights reversed"),
            Confounder("learning rate", "a claim of its own, C14"),
            Confounder(
                "best of several rivals", "both must be beaten: the larger p counts, so none is selected by chance"
            ),
            PAIRED_BY_SEED,
            SAME_SETTINGS,
            DOSED,
            FINISHED_ONLY,
        ),
        others=others,
        rows=rows_of(runs, "eval", ("step", "accuracy", "n"), "split heldout, temperature 1, last shared step"),
        notes=(
            f"{study.treatment} at {pairings[names[0]].setting or 'one setting'} against {' and '.join(names)}",
            *(f"{name}: update turned by {value:.3g}°" for name, value in doses.items() if value is not None),
            *unfinished(study),
        ),
        frames={"comparisons": pd.concat([f.assign(rival=name) for name, f in compared.items()], ignore_index=True)},
        dose=dose,
    )


def _noise(study: Study, rival: str) -> Source | str:
    pairs = study.pairing(baseline=rival).pairs
    return paired_noise([(study.finished[p.baseline], study.finished[p.treatment]) for p in pairs], "heldout")


def _unmatched(dose: Dose, rivals: Mapping[str, float | None]) -> str:
    """Why the doses are not matched; empty if they are, or were not recorded."""
    known = {name: value for name, value in rivals.items() if value is not None}
    if not dose.rotation or len(known) < len(rivals):  # a rotation of 0 fails the least dose
        return ""
    if all(1 / MATCHED <= value / dose.rotation <= MATCHED for value in known.values()):
        return ""
    result = ", ".join(f"{name} by {value:.3g}°" for name, value in known.items())
    return (
        f"the dose is not matched: {dose.method} turned the update by {dose.rotation:.3g}°, {result}; the rule allows a factor "
        f"of {MATCHED:g} (change the control's weight bounds)"
    )


UNIT = "share of completions, treatment − rival"


def shaping_ablation(comparisons: pd.DataFrame) -> Figure:
    """Held-out accuracy of the treatment minus that of each control and rival, with 95 % intervals over seeds (C10).

    `comparisons`: rival, seed, difference.
    """
    label = "held-out accuracy, treatment − rival [share of completions]"
    return difference_figure(comparisons.rename(columns={"rival": "name"}), label)


def constants_sensitivity(values: pd.DataFrame) -> Figure:
    """Held-out accuracy against each constant of the shaping, all others as they are; bands over seeds.

    `values`: constant, setting (a number), seed, accuracy; the method's own setting is marked by `default` = True.
    """
    import seaborn as sns

    names = sorted(values["constant"].unique())
    with styled():
        figure, axes = panels(len(names), columns=3)
        for axis, name in zip(axes, names, strict=True):
            rows = values[values["constant"] == name]
            look = {"color": BLUE, "markersize": 4, "capsize": 0.1, "native_scale": True}
            sns.pointplot(rows, x="setting", y="accuracy", ax=axis, errorbar=t_interval, **look)
            for own in rows.loc[rows["default"], "setting"].unique():
                axis.axvline(own, color=GRAY, linewidth=0.8, linestyle="--")
            axis.set(xlabel=plain(name), ylabel="held-out accuracy [share]")
        finish(figure, axes)
    return figure


def constants_frame(study: Study) -> pd.DataFrame:
    """constant, setting, seed, accuracy (held-out, last evaluation), default; from labels such as grpo-sg+weight.tau=4.

    Runs that change one constant alone, and the method's own runs at each constant's default, where it has one.
    """
    rows = []
    for run in study.alike(*study.methods).values():
        step = last_step(run)
        accuracy = None if step is None else held_out(run, step)
        if accuracy is None:
            continue
        if run.method == study.treatment:
            rows += [(name, value, run.seed, accuracy, True) for name, value in PAPER_SIGMOID.items()]
        else:
            match = _CONSTANT.fullmatch(run.method.removeprefix(f"{study.treatment}+"))
            if match is not None and run.method.startswith(f"{study.treatment}+"):
                rows.append((match[1], float(match[2]), run.seed, accuracy, False))
    frame = pd.DataFrame(rows, columns=["constant", "setting", "seed", "accuracy", "default"])
    varied = frame.loc[~frame["default"].astype(bool), "constant"].unique()
    return frame[frame["constant"].isin(varied)].astype({"default": bool})


def draw(verdict: Verdict, study: Study) -> Iterator[Picture]:
    """Differences from every rival, and accuracy against each constant of the token weight."""
    caption = "Held-out accuracy against each control and rival, paired by seed"
    yield picture(verdict, "comparisons", "shaping_ablation", caption, shaping_ablation)
    frame, name = constants_frame(study), "constants_sensitivity"
    if len(frame):
        caption = "Held-out accuracy against each constant of the token weight; dashed: the published one."
        yield Picture(name, caption, constants_sensitivity(frame), claim=NAME)
    else:
        missing = f"constants: no run such as {study.treatment}+weight.tau=4 was evaluated"
        yield Picture(name, "", missing=missing, claim=NAME)


CLAIM = Claim(
    NAME,
    "alignment with probability is what matters",
    "arXiv 2511.00066 (its reversed weights do worse); the other controls are this project's",
    Rule(
        "supported: held-out accuracy is higher than with the same weights reversed and than with the same weights shuffled, at "
        "matched dose (the larger of the sign-flip p-values over seeds); refuted: it is shown to be higher than one of them by "
        "less than {margin} (Bonferroni over both)",
        "pairs of runs with one seed, fewest over the rivals",
        6,
        MARGIN,
        scale="points",
        compares=True,
    ),
    "more seeds of the treatment and of both controls, with weights that turn the update equally far",
    test,
    draw=draw,
    version="between runs",
    beside=local.C10,
)
