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

KINDS = ("cause", "spike", "training", "machine")
"""Kinds of events, what says most of a training first."""
MACHINE = ("memory", "timed_out", "probe", "self_check")
"""Rules about the machine or a measurement on it: they say nothing of the training."""
SUDDEN = ("non_finite", "policy_destroyed", "update_spike", "loss_spike", "kl_drift", "kl_sign")
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
        first, *others = events
        text = " · ".join([first.text, *(other.text for other in others[:3])])
        made.append(Event(step, shown(text)[:300], first.kind))
    return made


def _of_runs(study: Study) -> Iterator[Event]:
    """The first cause of each of the first runs, and the largest spikes of the gradient norm."""
    runs, spikes = study.each(), list[tuple[float, int, str]]()
    for at, (label, seed, run) in enumerate(runs):
        whose = f" ({method_label(label)}, seed {seed})" if len(runs) > 1 else ""
        for cause in checked(run).causes[:1] if at < MOST_RUNS else ():
            yield Event(cause.step, f"cause: {cause.name.replace('_', ' ')}{whose}", "cause")
        scores = spike_scores(run)[["times", "step"]].to_numpy()
        spikes += [(float(times), int(step), whose) for times, step in scores]
    for times, step, whose in sorted(spikes, reverse=True)[:MARKED]:
        yield Event(step, f"gradient spike, {times:.1f} × typical{whose}", "spike")


def _judged(study: Study) -> Iterator[Event]:
    """The first time of each warning or worse; spikes of the gradient are named with their size instead."""
    events = pd.concat([run.events for _, _, run in study.each()])
    loud = events[(events["severity"] != "info") & (events["rule"] != "gradient_spike")]
    for rule, rows in loud.groupby("rule", sort=False):
        name = str(rule)
        text = RULES[name].title if name in RULES else name.replace("_", " ")
        again = f", first of {len(rows)} times" if len(rows) > 1 else ""
        kind = "spike" if name in SUDDEN else "machine" if name in MACHINE else "training"
        yield Event(int(rows["step"].min()), f"{text}{again}", kind)
