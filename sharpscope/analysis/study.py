"""The runs of a study, laid out for comparison: which are finished, which make a pair, what is held fixed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pandas as pd

from sharpscope.analysis.tokens import Reduced, Reducer, scan
from sharpscope.traces import Reduction

IGNORED = (
    "name",
    "out",
    "seed",
    "method",
    "threads",
    "device",
    "recording",
    "checkpoint",
    "health",
    "probes",
    "evaluation",
)
"""Settings that may differ between the runs of a pair: they change nothing of what is learnt, or are what is
compared.
"""

GRID = {
    "learning rate": ("optimizer", "lr"),
    "group size": ("rollout", "group_size"),
    "weight decay": ("optimizer", "weight_decay"),
}
"""The declared grid of settings: axis → place in the configuration."""


class RunLike(Protocol):
    """What the claims read of a run; `sharpscope.traces.Run` has it."""

    @property
    def method(self) -> str:
        """Label of the method."""
        ...

    @property
    def task(self) -> str:
        """Name of the task."""
        ...

    @property
    def seed(self) -> Any:
        """Seed of the run."""
        ...

    @property
    def status(self) -> str:
        """finished, or why not."""
        ...

    @property
    def info(self) -> Mapping[str, Any]:
        """run.json."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        ...

    @property
    def steps(self) -> pd.DataFrame:
        """Table `steps`."""
        ...

    @property
    def eval(self) -> pd.DataFrame:
        """Table `eval`."""
        ...

    @property
    def probes(self) -> pd.DataFrame:
        """Table `probes`."""
        ...

    @property
    def reductions(self) -> Sequence[Reduction] | None:
        """What was made of the token table, where that was not kept."""
        ...

    @property
    def token_steps(self) -> list[int]:
        """Steps with token rows."""
        ...

    def rows(self, table: str) -> int:
        """Number of rows of a table."""
        ...

    def tokens(self, steps: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Table `tokens` for some steps and columns."""
        ...


@dataclass(frozen=True)
class Pair:
    """Two runs that differ in the method alone; `seed` is what both were started with."""

    seed: Any
    baseline: str
    treatment: str


@dataclass(frozen=True)
class Pairing:
    """The pairs of one setting, or why there are none.

    Attributes:
        pairs: one a seed.
        setting: what the grid's settings are in them.
        missing: why there is no pair; empty if there is one.
        left_out: pairs of other settings, not used.
    """

    pairs: tuple[Pair, ...] = ()
    setting: str = ""
    missing: str = ""
    left_out: int = 0

    @property
    def names(self) -> list[str]:
        """All runs of the pairs."""
        return [name for pair in self.pairs for name in (pair.baseline, pair.treatment)]


@dataclass
class Study:
    """Finished runs by name, two methods to compare, and reductions of the tokens tables.

    Attributes:
        runs: name → run.
        baseline, treatment: labels of the methods, as in run.json.
        ignore: further settings that the runs of a pair may differ in, as dotted places, e.g. optimizer.lr where each
            method's learning rate was tuned on other seeds.
        reduced: name of a reducer → its results; filled by `read_tokens`.
    """

    runs: Mapping[str, RunLike]
    baseline: str = "grpo"
    treatment: str = "grpo-sg"
    ignore: tuple[str, ...] = ()
    reduced: dict[str, list[Reduced]] = field(default_factory=dict)

    @cached_property
    def finished(self) -> dict[str, RunLike]:
        """Runs that reached their end; the others would compare unequal amounts of training."""
        return {name: run for name, run in self.runs.items() if run.status == "finished"}

    @property
    def left_out(self) -> list[str]:
        """Names of runs that did not reach their end."""
        return [name for name in self.runs if name not in self.finished]

    def of(self, *methods: str) -> dict[str, RunLike]:
        """Finished runs of some methods."""
        return {name: run for name, run in self.finished.items() if run.method in methods}

    @property
    def methods(self) -> list[str]:
        """Labels of the methods with a finished run."""
        return sorted({run.method for run in self.finished.values()})

    def read_tokens(self, reducers: Sequence[Reducer]) -> None:
        """Stream the tokens tables once, keeping what `reducers` make of each step."""
        self.reduced.update(scan(self.finished, reducers))

    def cell(self, run: RunLike, extra: Sequence[str] = ()) -> str:
        """Everything that was set, but for method, seed and what changes nothing, as one text."""
        config = _without(run.config, [*IGNORED, *self.ignore, *extra])
        return json.dumps({"task": run.task, "config": config}, sort_keys=True, default=str)

    @cached_property
    def ground(self) -> RunLike | None:
        """A run of the setting that is looked at: that of the pairs, or where there is no pair the one with the most runs."""
        pairs = self.pairing().pairs
        if pairs:
            return self.finished[pairs[0].baseline]
        runs = self.of(self.baseline, self.treatment)
        if not runs:
            return None
        cells = {name: self.cell(run) for name, run in sorted(runs.items())}
        common = most_common(list(cells.values()))
        return next(runs[name] for name, cell in cells.items() if cell == common)

    def alike(self, *methods: str, but: Sequence[str] = ()) -> dict[str, RunLike]:
        """Finished runs of some methods with the task and settings of `ground`, apart from the dotted places `but`.

        What is said of single runs or tokens is said of these: other learning rates and other tasks would be mixed into it.
        """
        if self.ground is None:
            return {}
        wanted = self.cell(self.ground, but)
        return {name: run for name, run in self.of(*methods).items() if self.cell(run, but) == wanted}

    def elsewhere(self, *methods: str) -> tuple[str, ...]:
        """A note on runs of these methods with another task or other settings, which `alike` leaves out."""
        inside = self.alike(*methods)
        names = [name for name in self.of(*methods) if name not in inside]
        if not names:
            return ()
        listed = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
        return (f"{len(names)} runs of other settings or tasks are not used: {listed}",)

    def pairing(self, treatment: str | None = None, baseline: str | None = None) -> Pairing:
        """Pairs by seed in the setting that has most of them; ties go to the setting named first.

        Where a setting and seed was run twice, the run whose name sorts first is taken.
        """
        first, second = baseline or self.baseline, treatment or self.treatment
        cells = {method: self._by_cell(method) for method in (first, second)}
        for method in (first, second):
            if not cells[method]:
                return Pairing(missing=f"no finished run of {method}")
        pairs: dict[str, list[Pair]] = {}
        for cell, of_baseline in cells[first].items():
            of_treatment = cells[second].get(cell, {})
            shared = [seed for seed in of_baseline if seed in of_treatment]
            if shared:
                pairs[cell] = [Pair(seed, of_baseline[seed], of_treatment[seed]) for seed in sorted(shared, key=_order)]
        if not pairs:
            return Pairing(missing=self._mismatch(first, second, cells))
        chosen = max(sorted(pairs), key=lambda cell: len(pairs[cell]))
        settings = self.settings(self.finished[pairs[chosen][0].baseline])
        text = ", ".join(f"{axis} {value:g}" for axis, value in settings.items())
        return Pairing(tuple(pairs[chosen]), text, left_out=sum(map(len, pairs.values())) - len(pairs[chosen]))

    def differences(
        self, pairing: Pairing, measure: Callable[[RunLike, RunLike], tuple[float, float] | None]
    ) -> pd.DataFrame:
        """seed, baseline, treatment (measured values) and difference, one row a pair that could be measured.

        `measure` takes both runs of a pair, so that it can choose what they share (a step, a reward).
        """
        rows = []
        for pair in pairing.pairs:
            values = measure(self.finished[pair.baseline], self.finished[pair.treatment])
            if values is not None and np.isfinite(values).all():
                rows.append({"seed": pair.seed, "baseline": values[0], "treatment": values[1]})
        frame = pd.DataFrame(rows, columns=["seed", "baseline", "treatment"])
        return frame.assign(difference=frame["treatment"] - frame["baseline"])

    @staticmethod
    def settings(run: RunLike) -> dict[str, float]:
        """The grid's settings of a run; those that its configuration does not name are left out."""
        found = {}
        for axis, place in GRID.items():
            value: Any = run.config
            for key in place:
                value = value.get(key) if isinstance(value, Mapping) else None
            if isinstance(value, int | float):
                found[axis] = float(value)
        return found

    def _by_cell(self, method: str) -> dict[str, dict[Any, str]]:
        found: dict[str, dict[Any, str]] = {}
        for name, run in sorted(self.of(method).items()):
            found.setdefault(self.cell(run), {}).setdefault(run.seed, name)
        return found

    def _mismatch(self, first: str, second: str, cells: Mapping[str, Mapping[str, Mapping[Any, str]]]) -> str:
        configs = [
            json.loads(max(cells[method], key=lambda cell: len(cells[method][cell]))) for method in (first, second)
        ]
        differing = sorted(_differing(*configs))
        if differing:
            return (
                f"the runs of {first} and {second} differ in {', '.join(differing[:4])}; a difference between them "
                "could not be laid to the method"
            )
        return f"{first} and {second} share no seed"


def _without(config: Mapping[str, Any], places: Sequence[str]) -> dict[str, Any]:
    left = dict(config)
    for place in places:
        head, _, rest = place.partition(".")
        if head not in left:
            continue
        if rest and isinstance(left[head], Mapping):
            left[head] = _without(left[head], [rest])
        elif not rest:
            del left[head]
    return left


def _differing(first: Any, second: Any, place: str = "") -> Iterator[str]:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in {*first, *second}:
            inner = str(key) if place in ("", "config") else f"{place}.{key}"
            yield from _differing(first.get(key), second.get(key), inner)
    elif first != second:
        yield f"{place} ({first} and {second})"


def _order(seed: Any) -> tuple[bool, Any]:
    return (not isinstance(seed, int | float), seed if isinstance(seed, int | float) else str(seed))


def most_common(values: Sequence[Any]) -> Any:
    """The most frequent of `values`."""
    return Counter(values).most_common(1)[0][0]
