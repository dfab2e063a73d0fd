"""What happened at which step, as charts name it: causes, spikes, other events of the training, and events of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import pandas as pd

from sharpscope.analysis.cause_sections import MOST_RUNS, checked
from sharpscope.analysis.spikes import spike_scores
from sharpscope.analysis.study import Study
from sharpscope.analysis.text import method_label, shown
from sharpscope.rules.table import RULES

KINDS = (
    "cause",
    "spike",
    "training",
    "machine",
)
"""Kinds of events, what says most of a training first."""
MACHINE = (
    "memory",
    "timed_out",
    "probe",
    "self_check",
)
"""Rules about the machine or a measurement on it: they say nothing of the training."""
SUDDEN = (
    "non_finite",
    "policy_destroyed",
    "update_spike",
    "loss_spike",
    "kl_drift",
    "kl_sign",
)
"""Rules that are named beside the spikes of the gradient."""
MARKED = 12
"""Spikes of the gradient that a chart marks, at most."""


class Event(NamedTuple):
    """What a chart says of a step: the texts of its events, and the foremost of their kinds."""

    step: int
    text: str
    kind: str


def events_of(study: Study) -> list[Event]:
    """One event for each step of a study at which something happened, by step."""
    found = [*_of_runs(study), *_judged(study)]
    found.sort(key=lambda event: (event.step, KINDS.index(event.kind)))
    made = []
    for step, events in groupby(found, lambda event: event.step):
        foremost = list(events)[:4]
        text = " · ".join(event.text for event in foremost)
        made.append(Event(step, shown(text)[:300], foremost[0].kind))
    return made


def _of_runs(study: Study) -> Iterator[Event]:
    """The first cause of each of the first runs, and the largest spikes of the gradient norm."""
    runs = study.each()
    spikes = []
    for at, (label, seed, run) in enumerate(runs):
        whose = f" ({method_label(label)}, seed {seed})" if len(runs) > 1 else ""
        # each check reads a run's tables: of many runs only the first are checked
        causes = checked(run).causes if at < MOST_RUNS else ()
        for cause in causes[:1]:
            name = cause.name.replace("_", " ")
            yield Event(cause.step, f"cause: {name}{whose}", "cause")
        for times, step in spike_scores(run)[["times", "step"]].to_numpy():
            spikes.append((times, int(step), whose))
    spikes.sort(reverse=True)
    for times, step, whose in spikes[:MARKED]:
        yield Event(step, f"gradient spike, {times:.1f} × typical{whose}", "spike")


def _judged(study: Study) -> Iterator[Event]:
    """The first time of each warning or worse; spikes of the gradient are named with their size instead."""
    events = pd.concat([run.events for _, _, run in study.each()])
    loud = events["severity"] != "info"
    counted = loud & (events["rule"] != "gradient_spike")
    for rule, rows in events[counted].groupby("rule", sort=False):
        name = str(rule)
        text = RULES[name].title if name in RULES else name.replace("_", " ")
        if len(rows) > 1:
            text += f", first of {len(rows)} times"
        kind = "training"
        if name in SUDDEN:
            kind = "spike"
        elif name in MACHINE:
            kind = "machine"
        yield Event(int(rows["step"].min()), text, kind)
