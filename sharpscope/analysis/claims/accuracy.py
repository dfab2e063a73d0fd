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
from sharpscope.analysis.claims.base import ClaimData, declared, mean_estimate, pairing_notes
from sharpscope.analysis.measures import GREEDY, SAMPLED, dose_of, evaluations, gap, last_evaluation, train_accuracy
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.study import GRID, Pair, Pairing, PairMeasure, Study, grid_settings, most_common
from sharpscope.config import control_label
from sharpscope.traces import Run

UNIT = "share of completions"
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

    def _measure(first: Run, second: Run) -> tuple[float | None, float | None] | None:
        step = last_evaluation(first, second, **evaluation)
        return None if step is None else (value(first, step), value(second, step))

    return _measure


def compare_accuracy(study: Study, pairings: Mapping[str, Pairing], required: Collection[str]) -> ClaimData:
    """Greedy held-out accuracy of each pairing as parts; those that are not `required`, T = 1 and pass@k are further numbers."""
    greedy = {name: study.differences(pairing, evaluated(GREEDY)) for name, pairing in pairings.items()}
    sampled = {name: study.differences(pairing, evaluated(SAMPLED)) for name, pairing in pairings.items()}
    others = []
    for name, pairing in pairings.items():
        numbers = {} if name in required else {"accuracy, greedy": greedy[name]}
        numbers |= {"accuracy, T = 1": sampled[name]}
        numbers |= {"pass@k, T = 1": study.differences(pairing, evaluated(SAMPLED, column="pass_at_k"))}
        against = f" against {name}" * bool(name)
        others += [mean_estimate(f"held-out {n}{against}", data, UNIT, "", "points") for n, data in numbers.items()]
    lacking = [name for name in required if not len(greedy[name])]
    if lacking:
        rest = [name for name in lacking if not len(sampled[name]) and name]
        missing = f"no run of {', '.join(rest)} that pairs with one of {study.treatment}" if rest else NOT_GREEDY
        return ClaimData(missing=missing, others=tuple(others))
    found = greedy_finding({n: greedy[n] for n in required}, {n: sampled[n] for n in required}, study.terms.level)
    return replace(found, others=tuple(others))


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
    found = [sign_flip_p(values) <= level for values in (a, b)]
    against = f" against {name}" if name else ""
    numbers = f"greedy {100 * a.mean():+.2g} points, T = 1 {100 * b.mean():+.2g} points{against}"
    if found[1] and not (found[0] and same_sign):
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


def generalization(study: Study) -> ClaimData:
    """Difference of held-out accuracy at the last shared evaluation."""
    pairing = study.pairing()
    if pairing.missing:
        return ClaimData(missing=pairing.missing)
    finding = compare_accuracy(study, {"": pairing}, [""])
    passes = [r for r in (repeats(study.finished[name]) for name in pairing.names) if r is not None]
    if passes and min(passes) < 1:
        why = f"training went {min(passes):.2g} times through its set: without repeats there can be no gap"
        return replace(finding, missing=why)
    away = study.differences(pairing, evaluated(GREEDY, "unseen"))
    worse = len(away) and away["difference"].mean() < 0
    worse = worse and sign_flip_p(away["difference"].to_numpy(), "less") <= study.terms.level
    gaps = study.differences(pairing, _at_last_step(gap))
    trained = study.differences(pairing, _at_last_step(lambda run, step: (train_accuracy(run, step) or (None,))[0]))
    others = (
        mean_estimate("accuracy on unseen sizes, greedy", away, UNIT, "", "points"),
        mean_estimate("training accuracy, T = 1", trained, UNIT, "", "points"),
        mean_estimate("gap, training − held-out, T = 1", gaps, UNIT, "lower is better", "points"),
    )
    through = f"training went {min(passes):.2g} times through its set" if passes else "repeats are not known"
    return replace(
        finding,
        conditions=(("unseen sizes are not shown to be worse", not worse),) if len(away) else (),
        others=finding.others + others,
        notes=(*finding.notes, *pairing_notes(study, pairing), through),
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
    treated = study.of(study.treatment)
    if not treated:
        return {}
    main = most_common(sorted(study.setting_key(run) for run in treated.values()))
    inside = {name: run for name, run in sorted(treated.items()) if study.setting_key(run) == main}
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
    pairings = rate_pairings(study)
    treated = study.of(study.treatment)
    if not pairings:
        return ClaimData(missing=f"no run of {study.baseline if treated else study.treatment} to compare")
    treated_rate = grid_settings(study.finished[next(iter(pairings.values())).pairs[0].treatment]).get("learning rate")
    if treated_rate is None:
        return ClaimData(
            missing=f"the learning rate of {study.treatment} is not recorded (optimizer.lr in config.yaml)"
        )
    named = {rate: f"{study.baseline} at lr {rate:g}" for rate in pairings}
    tested = [rate for rate, pairing in pairings.items() if len(pairing.pairs) >= RATE_SEEDS]
    finding = compare_accuracy(study, {named[r]: p for r, p in pairings.items()}, [named[r] for r in tested])
    below, above = (any(sign * r > sign * treated_rate for r in tested) for sign in (-1, 1))
    sides = {"below": below, "above": above, "equal to": treated_rate in tested}
    if lacking := [side for side, there in sides.items() if not there]:
        why = (
            f"no learning rate of {study.baseline} {' and '.join(lacking)} that of {study.treatment} ({treated_rate:g}) has "
            f"{RATE_SEEDS} seeds in common with it"
        )
        return replace(finding, missing=why)
    few = [
        f"lr {rate:g} has {len(pairing.pairs)} seeds, too few for the rule: shown, not tested"
        for rate, pairing in pairings.items()
        if rate not in tested
    ]
    at = f"{study.treatment} at lr {treated_rate:g} against {study.baseline} at {', '.join(f'{rate:g}' for rate in tested)}"
    return replace(finding, notes=(*finding.notes, at, *few))


C7 = declared("C7", generalization, other=one_update.C7)
C10 = declared("C10", alignment, other=one_update.C10)
C14 = declared("C14", rates)
