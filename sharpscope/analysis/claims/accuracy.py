"""C7, C10 and C14: held-out accuracy of the treatment against the baseline, against controls, and at other learning rates.

Greedy accuracy decides; accuracy at temperature 1 and pass@k are given with it, since a method that changes entropy changes
accuracy at temperature 1 trivially.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

import pandas as pd

from sharpscope.analysis.claims import one_update
from sharpscope.analysis.claims.base import (
    FEWEST,
    ClaimData,
    Statistic,
    declared,
    is_shown,
    mean_estimate,
    paired,
)
from sharpscope.analysis.measures import GREEDY, SAMPLED, dose_of, evaluations, gap, last_evaluation
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import (
    GRID,
    Pair,
    Pairing,
    PairMeasure,
    Study,
    grid_settings,
    most_common,
)
from sharpscope.methods import control_label
from sharpscope.traces import Run

NOT_GREEDY = "no pair was evaluated greedily on held-out prompts at one step; set evaluation.temperatures to [0, 1]"
RIVALS = ("reverse", "shuffled")
"""Controls that C10 names."""
MATCHED = 1.5
"""Factor by which the rotations of the update may differ for the dose to count as matched."""


def evaluated(temperature: float, **place: str) -> PairMeasure:
    """Both runs' share of correct held-out completions at the last step at which both were evaluated so."""
    return _at_last_step(
        lambda run, step: evaluations(run, temperature=temperature, **place)[step][0],
        temperature,
        **place,
    )


def _at_last_step(
    value: Callable[[Run, int], float | None], temperature: float = SAMPLED, **place: str
) -> PairMeasure:
    """`value` of both runs at the last step at which both have the evaluation."""

    def _measure(*pair: Run) -> tuple[float | None, float | None] | None:
        step = last_evaluation(*pair, temperature=temperature, **place)
        return None if step is None else (value(pair[0], step), value(pair[1], step))

    return _measure


def compare_accuracy(study: Study, pairings: Mapping[str, Pairing]) -> ClaimData:
    """Greedy held-out accuracy of each pairing as parts; T = 1 and pass@k are further numbers."""
    measures = {
        "accuracy, greedy": evaluated(GREEDY),
        "accuracy, T = 1": evaluated(SAMPLED),
        "pass@k, T = 1": evaluated(SAMPLED, column="pass_at_k"),
    }
    # what is measured → against whom → a row for each pair
    found = {
        what: {n: study.differences(p, one) for n, p in pairings.items()}
        for what, one in measures.items()
    }
    greedy, sampled, _ = found.values()
    others = tuple(
        _points(f"held-out {what}{f' against {name}' if name else ''}", each[name])
        for name in pairings
        for what, each in found.items()
        if each is not greedy
    )
    if not all(map(len, greedy.values())):
        # whom no run pairs with at any temperature: what is missing is the run, not an evaluation of it
        rest = [
            name for name in pairings if not len(greedy[name]) and not len(sampled[name]) and name
        ]
        missing = (
            f"no run of {', '.join(rest)} that pairs with one of {study.treatment}"
            if rest
            else NOT_GREEDY
        )
        return ClaimData(missing=missing, others=others)
    return replace(greedy_finding(greedy, sampled, study.terms.level), others=others)


def _points(name: str, differences: pd.DataFrame) -> Statistic | None:
    return mean_estimate(name, differences, "share of completions", "points")


def greedy_finding(
    greedy: Mapping[str, pd.DataFrame], sampled: Mapping[str, pd.DataFrame], level: float
) -> ClaimData:
    """Differences of greedy accuracy as parts; undecided where an effect is shown at temperature 1 alone."""
    undecided = list[str]()
    notes = list[str]()
    text = "the effect depends on the temperature"
    for name, frame in greedy.items():
        both = frame.merge(sampled[name], on="seed", suffixes=("", "_sampled"))
        if not len(both):
            continue
        a, b = (
            both[column].to_numpy(dtype=float) for column in ("difference", "difference_sampled")
        )
        same_sign = a.mean() * b.mean() >= 0
        cold, hot = (sign_flip_p(values) <= level for values in (a, b))
        numbers = f"greedy {100 * a.mean():+.2g} points, T = 1 {100 * b.mean():+.2g} points"
        if name:
            numbers += f" against {name}"
        # an effect of sampling alone is one on the sharpness of the distribution, not on the answers
        if hot and not (cold and same_sign):
            undecided.append(f"{text}: {numbers}, shown at T = 1 only")
        elif not same_sign:
            notes.append(f"{text}, its signs differ: {numbers}")
    return ClaimData(parts=greedy, undecided="; ".join(undecided), notes=tuple(notes))


def repeats(run: Run) -> float | None:
    """Number of passes through the finite training set; None if the configuration does not tell."""
    task = run.config.get("task") or {}
    per_step = (run.config.get("rollout") or {}).get("prompts_per_step")
    size = task.get("train_size")
    if not per_step or not size or not len(run.steps):
        return None
    people = task.get("people")
    return float(
        len(run.steps)
        * per_step
        / (size * (len(people) if isinstance(people, list | tuple) else 1))
    )


@paired
def generalization(study: Study, pairing: Pairing) -> ClaimData:
    """Difference of held-out accuracy at the last shared evaluation."""
    finding = compare_accuracy(study, {"": pairing})
    passes = [r for r in (repeats(study.finished[name]) for name in pairing.names) if r is not None]
    through = (
        f"training went {min(passes):.2g} times through its set"
        if passes
        else "repeats are not known"
    )
    if passes and min(passes) < 1:
        return replace(finding, missing=f"{through}: without repeats there can be no gap")
    away = study.differences(pairing, evaluated(GREEDY, split="unseen"))
    not_worse = ("unseen sizes are not shown to be worse", not is_shown(study, away, "less"))
    others = (
        _points("accuracy on unseen sizes, greedy", away),
        _points("gap, training − held-out, T = 1", study.differences(pairing, _at_last_step(gap))),
    )
    return replace(
        finding,
        conditions=(not_worse,) if len(away) else (),
        others=finding.others + others,
        notes=(*finding.notes, through),
    )


def control(study: Study, suffix: str) -> str:
    """Name of a control: its only variant that was run, such as `grpo-sg-shuffled+weight.U=4`, or that of the treatment's label."""
    name = f"{study.treatment.split('+')[0]}-{suffix}"
    variants = [method for method in study.methods if method.split("+")[0] == name]
    return variants[0] if len(variants) == 1 else control_label(study.treatment, suffix)


def alignment(study: Study) -> ClaimData:
    """Held-out accuracy of the treatment minus that with its weights reversed, and with its weights shuffled."""
    required = [control(study, suffix) for suffix in RIVALS]
    pairings = {name: study.pairing(baseline=name) for name in required}
    finding = compare_accuracy(study, pairings)
    setting = f"{study.treatment} at {pairings[required[0]].setting or 'one setting'} against {' and '.join(required)}"
    doses = {
        name: dose_of(study.alike(name).values(), name).rotation
        for name in (study.treatment, *required)
    }
    known = {name: angle for name, angle in doses.items() if angle is not None}
    angles = "rotation of the update: " + ", ".join(
        f"{name} {angle:.3g}°" for name, angle in known.items()
    )
    finding = replace(finding, notes=(*finding.notes, setting, *([angles] if known else [])))
    if finding.missing or len(known) < len(doses):
        return finding
    target, *rest = known.values()
    # a control that turns the update less would lose for that reason alone
    if all(target / MATCHED <= angle <= target * MATCHED for angle in rest):
        return finding
    why = f"the dose is not matched ({angles}); the rule allows a factor of {MATCHED:g}"
    return replace(finding, missing=f"{why} (change the control's weight bounds)")


def rates(study: Study) -> ClaimData:
    """Held-out accuracy of the treatment minus that of the baseline at each learning rate, all else equal; it must beat every one."""
    axis, method = "learning rate", study.treatment
    treated = sorted(study.of(method).items())
    if not treated:
        return ClaimData(missing=f"no run of {method} to compare")
    main = most_common(sorted(study.setting_key(run) for _, run in treated))
    # reversed, so that of two runs with one seed the one whose name sorts first remains
    ours = {
        run.seed: (name, run) for name, run in reversed(treated) if study.setting_key(run) == main
    }
    _, example = next(iter(ours.values()))
    own = grid_settings(example).get(axis)
    ground = study.setting_key(example, [GRID[axis]])
    pairs: dict[float, dict[int, Pair]] = defaultdict(dict)
    for name, run in sorted(study.of(study.baseline).items()):
        rate = grid_settings(run).get(axis)
        if rate is not None and run.seed in ours and study.setting_key(run, [GRID[axis]]) == ground:
            pairs[rate].setdefault(run.seed, Pair(run.seed, name, ours[run.seed][0]))
    if not pairs or own is None:
        return ClaimData(missing=f"no run of {study.baseline} to compare")
    tested = sorted(rate for rate, found in pairs.items() if len(found) >= FEWEST)
    named = {
        f"{study.baseline} at lr {rate:g}": Pairing(tuple(pairs[rate].values())) for rate in tested
    }
    finding = compare_accuracy(study, named)
    # a baseline that was tried at larger rates only may be beaten because its own rate is too large
    sides = {
        "below": any(r < own for r in tested),
        "above": any(r > own for r in tested),
        "equal to": own in tested,
    }
    if lacking := [side for side, there in sides.items() if not there]:
        why = f"no learning rate of {study.baseline} {' and '.join(lacking)} that of {method} ({own:g}) has"
        return replace(finding, missing=f"{why} {FEWEST} seeds in common with it")
    return replace(
        finding, notes=(*finding.notes, f"{method} at lr {own:g} against {', '.join(named)}")
    )


C7 = declared("C7", generalization, other=one_update.C7)
C10 = declared("C10", alignment, other=one_update.C10)
C14 = declared("C14", rates)
