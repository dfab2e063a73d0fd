"""What happened at which step, as charts name it: causes, spikes, other events of the training, and events of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sharpscope.analysis.cause_sections import MOST_RUNS, checked
from sharpscope.analysis.spikes import spike_scores
from sharpscope.analysis.study import Study
from sharpscope.analysis.text import method_label, shown
from sharpscope.rules.table import RULES
from sharpscope.traces import Run

KINDS = ("cause", "spike", "training", "machine")
"""Kinds of events, what says most of a training first."""
MACHINE = ("memory", "timed_out", "probe", "self_check")
"""Rules about the machine or a measurement on it: they say nothing of the training."""
SUDDEN = ("non_finite", "policy_destroyed", "update_spike", "loss_spike", "kl_drift", "kl_sign")
"""Rules that are named beside the spikes of the gradient."""
MARKED = 12
"""Spikes of the gradient that a chart marks, at most."""
TEXTS = 4
"""Events of one step that are named, at most."""


class Event(NamedTuple):
    """What a chart says of a step: the texts of its events, and the foremost of their kinds."""

    step: int
    text: str
    kind: str


def events_of(study: Study) -> list[Event]:
    """One event for each step of a study at which something happened, by step."""
    found: dict[int, list[Event]] = {}
    for event in (*_causes(study), *_spikes(study), *_judged(study)):
        found.setdefault(event.step, []).append(event)
    return [_joined(found[step]) for step in sorted(found)]


def _joined(events: list[Event]) -> Event:
    """The events of one step as one, the foremost kind first."""
    ordered = sorted(events, key=lambda event: KINDS.index(event.kind))
    texts = list(dict.fromkeys(event.text for event in ordered))
    first = ordered[0]
    return Event(first.step, shown(" · ".join(texts[:TEXTS]))[:300], first.kind)


def _causes(study: Study) -> Iterator[Event]:
    """The first cause of each of the first runs, at the first step that shows it."""
    runs = study.each()
    for label, seed, run in runs[:MOST_RUNS]:
        for cause in checked(run).causes[:1]:
            name = cause.name.replace("_", " ")
            yield Event(cause.step, f"cause: {name}{_whose(study, label, seed)}", "cause")


def _spikes(study: Study) -> list[Event]:
    """The MARKED largest spikes of the gradient norm."""
    found: list[tuple[float, Event]] = []
    for label, seed, run in study.each():
        for step, times in spike_scores(run)[["step", "times"]].to_numpy():
            text = f"gradient spike, {times:.1f} × typical{_whose(study, label, seed)}"
            found.append((times, Event(int(step), text, "spike")))
    largest = sorted(found, reverse=True)[:MARKED]
    return [event for _, event in largest]


def _judged(study: Study) -> Iterator[Event]:
    """The first time of each warning or worse; the spikes of the gradient are named with their size instead."""
    times: dict[str, list[int]] = {}
    for _, _, run in study.each():
        for rule, step in _warnings(run):
            times.setdefault(rule, []).append(step)
    for rule, steps in times.items():
        text = RULES[rule].title if rule in RULES else rule.replace("_", " ").capitalize()
        again = f", first of {len(steps)} times" if len(steps) > 1 else ""
        kind = "spike" if rule in SUDDEN else "machine" if rule in MACHINE else "training"
        yield Event(min(steps), f"{text}{again}", kind)


def _warnings(run: Run) -> Iterator[tuple[str, int]]:
    """Rule and step of the warnings and errors of a run."""
    spikes = set(spike_scores(run)["step"])
    rows = run.events[run.events["severity"] != "info"]
    for rule, step in zip(rows["rule"].astype(str), rows["step"].astype(int), strict=True):
        if rule != "gradient_spike" or step not in spikes:
            yield rule, step


def _whose(study: Study, label: str, seed: int) -> str:
    """Which run of several an event belongs to."""
    return f" ({method_label(label)}, seed {seed})" if len(study.each()) > 1 else ""
