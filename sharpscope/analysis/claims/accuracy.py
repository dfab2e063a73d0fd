"""C7, C10 and C14: held-out accuracy of the treatment against the baseline, against controls, and at other learning rates.

Greedy accuracy decides; accuracy at temperature 1 and pass@k are given with it, since a method that changes entropy changes
accuracy at temperature 1 trivially.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from sharpscope.analysis.claims import one_update
from sharpscope.analysis.claims.base import ClaimData, Statistic, declared, is_shown, mean_estimate, paired
from sharpscope.analysis.measures import GREEDY, SAMPLED, dose_of, evaluations, gap, last_evaluation, train_accuracy
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import GRID, Pair, Pairing, PairMeasure, Study, grid_settings, most_common
from sharpscope.config import control_label
from sharpscope.traces import Run

NOT_GREEDY = "no pair was evaluated greedily on held-out prompts at one step; set evaluation.temperatures to [0, 1]"
RIVALS = ("reverse", "shuffled")
"""Controls that C10 names."""
MATCHED = 1.5
"""Factor by which the rotations of the update may differ for the dose to count as matched."""
RATE_SEEDS = 6
"""Seeds of a learning rate; one with fewer is shown, not tested."""


def evaluated(temperature: float, split: str = "heldout", column: str = "accuracy") -> PairMeasure:
    """Both runs' share of correct completions at the last step at which both were evaluated so."""
    place: Any = {"split": split, "temperature": temperature, "column": column}
    return _at_last_step(lambda run, step: evaluations(run, **place)[step][0], **place)


def _at_last_step(value: Callable[[Run, int], Any], **evaluation: Any) -> PairMeasure:
    """`value` of both runs at the last step at which both have the `evaluation` (held out, at temperature 1)."""

    def _measure(*pair: Run) -> tuple[float | None, float | None] | None:
        step = last_evaluation(*pair, **evaluation)
        return None if step is None else (value(pair[0], step), value(pair[1], step))

    return _measure


def compare_accuracy(study: Study, pairings: Mapping[str, Pairing], required: Collection[str]) -> ClaimData:
    """Greedy held-out accuracy of each pairing as parts; those that are not `required`, T = 1 and pass@k are further numbers."""
    measures = {
        "accuracy, greedy": evaluated(GREEDY),
        "accuracy, T = 1": evaluated(SAMPLED),
        "pass@k, T = 1": evaluated(SAMPLED, column="pass_at_k"),
    }
    found = {what: {n: study.differences(p, one) for n, p in pairings.items()} for what, one in measures.items()}
    greedy, sampled, _ = found.values()
    others = tuple(
        _points(f"held-out {what}{f' against {name}' * bool(name)}", each[name])
        for name in pairings
        for what, each in found.items()
        if each is not greedy or name not in required
    )
    lacking = [name for name in required if not len(greedy[name])]
    if lacking:
        rest = [name for name in lacking if not len(sampled[name]) and name]
        missing = f"no run of {', '.join(rest)} that pairs with one of {study.treatment}" if rest else NOT_GREEDY
        return ClaimData(missing=missing, others=others)
    cold, hot = ({name: each[name] for name in required} for each in (greedy, sampled))
    return replace(greedy_finding(cold, hot, study.terms.level), others=others)


def _points(name: str, differences: pd.DataFrame) -> Statistic | None:
    return mean_estimate(name, differences, "share of completions", "points")


def greedy_finding(greedy: Mapping[str, pd.DataFrame], sampled: Mapping[str, pd.DataFrame], level: float) -> ClaimData:
    """Differences of greedy accuracy as parts; undecided where an effect is shown at temperature 1 alone."""
    found = [temperature_effect(greedy[name], sampled[name], level, name) for name in greedy]
    undecided, notes = ("; ".join(text for kind, text in filter(None, found) if kind == w) for w in (True, False))
    return ClaimData(parts=greedy, undecided=undecided, notes=(notes,) if notes else ())


def temperature_effect(greedy: pd.DataFrame, sampled: pd.DataFrame, level: float, name: str) -> tuple[bool, str] | None:
    """Whether the effect depends on the temperature, so that neither verdict may be given; and the sentence that says so."""
    both = greedy.merge(sampled, on="seed", suffixes=("", "_sampled"))
    if not len(both):
        return None
    a, b = (both[column].to_numpy(dtype=float) for column in ("difference", "difference_sampled"))
    same_sign = a.mean() * b.mean() >= 0
    cold, hot = (sign_flip_p(values) <= level for values in (a, b))
    against = f" against {name}" if name else ""
    numbers = f"greedy {100 * a.mean():+.2g} points, T = 1 {100 * b.mean():+.2g} points{against}"
    if hot and not (cold and same_sign):
        return True, f"the effect depends on the temperature: {numbers}, shown at T = 1 only"
    return None if same_sign else (False, f"the effect depends on the temperature, its signs differ: {numbers}")


def repeats(run: Run) -> float | None:
    """Number of passes through the finite training set; None if the configuration does not tell."""
    per_step = (run.config.get("rollout") or {}).get("prompts_per_step")
    task = run.config.get("task") or {}
    size, people = task.get("train_size"), task.get("people", 1)
    if per_step is None or size is None or not len(run.steps):
        return None
    return float(len(run.steps) * per_step / (size * (len(people) if isinstance(people, list | tuple) else 1)))


@paired
def generalization(study: Study, pairing: Pairing) -> ClaimData:
    """Difference of held-out accuracy at the last shared evaluation."""
    finding = compare_accuracy(study, {"": pairing}, [""])
    passes = [r for r in (repeats(study.finished[name]) for name in pairing.names) if r is not None]
    through = f"training went {min(passes):.2g} times through its set" if passes else "repeats are not known"
    if passes and min(passes) < 1:
        return replace(finding, missing=f"{through}: without repeats there can be no gap")
    away = study.differences(pairing, evaluated(GREEDY, "unseen"))
    not_worse = ("unseen sizes are not shown to be worse", not is_shown(study, away, "less"))
    trained = _at_last_step(lambda run, step: (train_accuracy(run, step) or (None,))[0])
    others = (
        _points("accuracy on unseen sizes, greedy", away),
        _points("training accuracy, T = 1", study.differences(pairing, trained)),
        _points("gap, training − held-out, T = 1", study.differences(pairing, _at_last_step(gap))),
    )
    return replace(
        finding,
        conditions=(not_worse,) if len(away) else (),
        others=finding.others + others,
        notes=(*finding.notes, through),
    )


def control(study: Study, suffix: str) -> str:
    """Name of the method that stands for a control: of the variants that were run, the one whose dose is closest.

    A variant is the control with changed constants, such as `grpo-sg-shuffled+weight.U=4`, which match its dose.
    """
    plain_name = f"{study.treatment.split('+')[0]}-{suffix}"
    found = [name for name in study.methods if name == plain_name or name.startswith(f"{plain_name}+")]
    target, doses = _rotation(study, study.treatment), {name: _rotation(study, name) for name in found}
    known = {name: abs(math.log(dose / target)) for name, dose in doses.items() if dose and target}
    return min(known, key=lambda name: known[name]) if known else control_label(study.treatment, suffix)


def _rotation(study: Study, method: str) -> float | None:
    return dose_of(study.alike(method).values(), method).rotation


def alignment(study: Study) -> ClaimData:
    """Held-out accuracy of the treatment minus that with its weights reversed, and with its weights shuffled."""
    required = [control(study, suffix) for suffix in RIVALS]
    pairings = {name: study.pairing(baseline=name) for name in required}
    finding = compare_accuracy(study, pairings, required)
    target, doses = _rotation(study, study.treatment), {name: _rotation(study, name) for name in required}
    known = {name: value for name, value in doses.items() if value is not None}
    setting = f"{study.treatment} at {pairings[required[0]].setting or 'one setting'} against {' and '.join(required)}"
    turned = (f"{name}: update turned by {value:.3g}°" for name, value in known.items())
    finding = replace(finding, notes=(*finding.notes, setting, *turned))
    if finding.missing or not target or len(known) < len(doses):
        return finding
    if all(1 / MATCHED <= value / target <= MATCHED for value in known.values()):
        return finding
    why = (
        f"the dose is not matched: {study.treatment} turned the update by {target:.3g}°, "
        f"{', '.join(f'{name} by {value:.3g}°' for name, value in known.items())}; the rule allows a factor of {MATCHED:g} "
        "(change the control's weight bounds)"
    )
    return replace(finding, missing=why)


def rate_pairings(study: Study) -> dict[float, Pairing]:
    """Learning rate → pairs of the treatment, at its own rate, with the baseline at that rate, all else equal."""
    rate = (GRID["learning rate"],)
    treated = dict(sorted(study.of(study.treatment).items()))
    if not treated:
        return {}
    main = most_common(sorted(study.setting_key(run) for run in treated.values()))
    inside = {name: run for name, run in treated.items() if study.setting_key(run) == main}
    ground = study.setting_key(next(iter(inside.values())), rate)
    by_seed = {run.seed: name for name, run in reversed(inside.items())}
    result: dict[float, dict[Any, Pair]] = {}
    for name, run in sorted(study.of(study.baseline).items()):
        other = grid_settings(run).get("learning rate")
        if other is not None and study.setting_key(run, rate) == ground and run.seed in by_seed:
            result.setdefault(other, {}).setdefault(run.seed, Pair(run.seed, name, by_seed[run.seed]))
    return {value: Pairing(tuple(pairs.values())) for value, pairs in sorted(result.items())}


def rates(study: Study) -> ClaimData:
    """Held-out accuracy of the treatment minus that of the baseline at each learning rate; it must beat every one."""
    pairings, method = rate_pairings(study), study.treatment
    if not pairings:
        return ClaimData(missing=f"no run of {study.baseline if study.of(method) else method} to compare")
    own = grid_settings(study.finished[next(iter(pairings.values())).pairs[0].treatment]).get("learning rate")
    if own is None:
        return ClaimData(missing=f"the learning rate of {method} is not recorded (optimizer.lr in config.yaml)")
    named = {rate: f"{study.baseline} at lr {rate:g}" for rate in pairings}
    seeds = {rate: len(pairing.pairs) for rate, pairing in pairings.items()}
    tested = [rate for rate in pairings if seeds[rate] >= RATE_SEEDS]
    finding = compare_accuracy(study, {named[r]: p for r, p in pairings.items()}, [named[r] for r in tested])
    sides = {
        "below": min(tested, default=own) < own,
        "above": max(tested, default=own) > own,
        "equal to": own in tested,
    }
    if lacking := [side for side, there in sides.items() if not there]:
        why = f"no learning rate of {study.baseline} {' and '.join(lacking)} that of {method} ({own:g}) has"
        return replace(finding, missing=f"{why} {RATE_SEEDS} seeds in common with it")
    at = f"{method} at lr {own:g} against {study.baseline} at {', '.join(f'{rate:g}' for rate in tested)}"
    few = [r for r in pairings if r not in tested]
    notes = [f"lr {rate:g} has {seeds[rate]} seeds, too few for the rule: shown, not tested" for rate in few]
    return replace(finding, notes=(*finding.notes, at, *notes))


C7 = declared("C7", generalization, other=one_update.C7)
C10 = declared("C10", alignment, other=one_update.C10)
C14 = declared("C14", rates)
