"""Groups of runs: studies (one task and initial policy), settings (equal but for the seed), pairs (but for the method)."""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from sharpscope.analysis.text import listed
from sharpscope.analysis.tokens import Reduced, Reducer, scan
from sharpscope.config import ClaimsSpec
from sharpscope.traces import DamagedPartWarning, Run, Runs

NOT_A_SETTING = (
    "seed",
    "name",
    "out",
    "threads",
    "device",
    "recording",
    "checkpoint",
    "health",
    "probes",
    "evaluation",
    "method.name",
)
"""Configuration in which two runs of one setting may differ: the seed, and what changes nothing of what is learned."""

Paths = str | Path | Iterable[str | Path]
PairMeasure = Callable[["Run", "Run"], tuple[float | None, float | None] | None]
"""(baseline's run, treatment's run) → a number of each; None where there is none."""

GRID = {
    "learning rate": "optimizer.lr",
    "group size": "rollout.group_size",
    "weight decay": "optimizer.weight_decay",
}
"""The declared grid of settings: axis → key of the flat configuration."""


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seed alone. `runs` maps seed to run.

    `label`: the method, followed in brackets by what tells the setting from the one of this method with the most seeds, which has no
    brackets; where several have the most, all have.
    """

    label: str
    method: str
    runs: Mapping[int, Run]


@dataclass(frozen=True)
class Pair:
    """Names of two runs of one seed that differ in the method alone."""

    seed: int
    baseline: str
    treatment: str


@dataclass(frozen=True)
class Pairing:
    """The pairs of one setting with its grid's settings as text, or why there are none; `left_out`: number of other settings' pairs."""

    pairs: tuple[Pair, ...] = ()
    setting: str = ""
    missing: str = ""
    left_out: int = 0

    @property
    def names(self) -> list[str]:
        """All runs of the pairs."""
        return [name for pair in self.pairs for name in (pair.baseline, pair.treatment)]


@dataclass(eq=False)
class Study:
    """Runs by name, and two methods to compare.

    Attributes:
        baseline, treatment: names of the methods, as in run.json.
        name: of the task and policy; empty for a study of several.
        slug: prefix of the names of its files.
        reduced: name of a reducer → its results for every run; filled by `read_tokens`.
        terms: margins, level and order of the claims.
    """

    runs: Mapping[str, Run]
    baseline: str = "grpo"
    treatment: str = "grpo-sg"
    name: str = ""
    slug: str = ""
    reduced: dict[str, list[Reduced]] = field(default_factory=dict, repr=False)
    terms: ClaimsSpec = field(default_factory=ClaimsSpec)

    # Settings: what figures and summaries show.

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Settings with at least one step, sorted by label."""
        return _settings(self)[0]

    @property
    def notes(self) -> tuple[str, ...]:
        """Which runs the settings leave out and why."""
        return _settings(self)[1]

    @property
    def labels(self) -> list[str]:
        """Labels of the settings."""
        return [setting.label for setting in self.settings]

    def each(self) -> list[tuple[str, int, Run]]:
        """(setting's label, seed, run) of every run of the settings."""
        return [
            (setting.label, seed, run)
            for setting in self.settings
            for seed, run in setting.runs.items()
        ]

    def only(self, labels: Collection[str]) -> Study:
        """The study with only the settings of these labels."""
        part = replace(self)
        part.settings = tuple(setting for setting in self.settings if setting.label in labels)
        return part

    # Finished runs and pairs: what claims test.

    @cached_property
    def finished(self) -> dict[str, Run]:
        """Runs that reached their end; the others would compare unequal amounts of training."""
        return {name: run for name, run in self.runs.items() if run.status == "finished"}

    @property
    def methods(self) -> list[str]:
        """Names of the methods with a finished run."""
        return sorted({run.method for run in self.finished.values()})

    def of(self, *methods: str) -> dict[str, Run]:
        """Finished runs of some methods."""
        return {name: run for name, run in self.finished.items() if run.method in methods}

    def setting_key(self, run: Run, extra: Sequence[str] = ()) -> str:
        """Task and configuration of a run as text, without the method, `extra` and NOT_A_SETTING."""
        return _text({"task": run.task} | setting_of(run, "method", *extra))

    @cached_property
    def reference(self) -> Run | None:
        """A run of the setting that claims about tokens and single runs use: that of the pairs, or else the most common."""
        if pairs := self.pairing().pairs:
            return self.finished[pairs[0].baseline]
        runs = [run for _, run in sorted(self.of(self.baseline, self.treatment).items())]
        keys = [self.setting_key(run) for run in runs]
        return runs[keys.index(most_common(keys))] if runs else None

    def alike(self, *methods: str) -> dict[str, Run]:
        """Finished runs of some methods with the task and settings of `reference`."""
        if self.reference is None:
            return {}
        wanted = self.setting_key(self.reference)
        return {
            name: run for name, run in self.of(*methods).items() if self.setting_key(run) == wanted
        }

    def elsewhere(self, *methods: str) -> tuple[str, ...]:
        """A note on the runs of these methods that `alike` leaves out."""
        # claims about tokens pool runs: another task or setting would be mixed in unseen
        inside = self.alike(*methods)
        names = [name for name in self.of(*methods) if name not in inside]
        if not names:
            return ()
        first = listed(names, 3)
        return (f"{len(names)} runs of other settings or tasks are not used: {first}",)

    def pairing(self, treatment: str | None = None, baseline: str | None = None) -> Pairing:
        """Pairs by seed in the setting that has the most of them; ties go to the first by key.

        If a setting and seed was run twice, the run whose name sorts first is used.
        """
        first = baseline or self.baseline
        second = treatment or self.treatment
        # method → setting → seed → name
        by_key: dict[str, dict[str, dict[int, str]]] = {
            first: {},
            second: {},
        }
        for method, found in by_key.items():
            for name, run in sorted(self.of(method).items()):
                found.setdefault(self.setting_key(run), {}).setdefault(run.seed, name)
            if not found:
                there = ", ".join(self.methods) or "none"
                return Pairing(missing=f"no finished run of {method}; there are runs of {there}")
        pairs: dict[str, list[Pair]] = {}
        for key, ours in by_key[first].items():
            theirs = by_key[second].get(key, {})
            if shared := sorted(
                set(ours) & set(theirs), key=lambda seed: (isinstance(seed, str), seed)
            ):
                pairs[key] = [Pair(seed, ours[seed], theirs[seed]) for seed in shared]
        if not pairs:
            return Pairing(missing=_mismatch(first, second, by_key))
        # sorted, so that of settings with equally many pairs it is the same one each time
        chosen = max(sorted(pairs), key=lambda key: len(pairs[key]))
        settings = grid_settings(self.finished[pairs[chosen][0].baseline])
        text = ", ".join(f"{axis} {value:g}" for axis, value in settings.items())
        return Pairing(
            tuple(pairs[chosen]), text, left_out=sum(map(len, pairs.values())) - len(pairs[chosen])
        )

    def differences(self, pairing: Pairing, measure: PairMeasure) -> pd.DataFrame:
        """seed, baseline, treatment (measured values) and difference: one row per pair whose values are both finite.

        `measure` takes both runs of a pair, so that it can choose what they share (a step, a reward).
        """
        rows = []
        for pair in pairing.pairs:
            first, second = measure(
                self.finished[pair.baseline], self.finished[pair.treatment]
            ) or (None, None)
            if first is not None and second is not None and np.isfinite([first, second]).all():
                rows.append({"seed": pair.seed, "baseline": first, "treatment": second})
        frame = pd.DataFrame(rows, columns=["seed", "baseline", "treatment"])
        return frame.assign(difference=frame["treatment"] - frame["baseline"])

    # Tokens.

    def read_tokens(self, reducers: Sequence[Reducer]) -> None:
        """Stream the token tables once, keeping what `reducers` make of each step of every run."""
        self.reduced.update(scan(self.runs, reducers))

    def results(self, name: str, runs: Collection[str]) -> list[Reduced]:
        """Results of the reducer `name` for the runs named."""
        return [result for result in self.reduced.get(name, []) if result.run in runs]


def studies(whole: Runs | Study) -> list[Study]:
    """Runs split by task and initial policy, in the order of their first run; the `slug` of a single study is empty."""
    base = whole if isinstance(whole, Study) else Study(whole.by_name)
    groups: dict[str, dict[str, Run]] = defaultdict(dict)
    for name, run in base.runs.items():
        groups[ground_of(run)][name] = run
    examples = [next(iter(members.values())) for members in groups.values()]
    found = []
    for number, (run, members) in enumerate(zip(examples, groups.values(), strict=True), 1):
        title = _title(
            run, [other for other in examples if other.task == run.task and other is not run]
        )
        words = re.sub(r"[^A-Za-z0-9]+", "-", title).strip("-").lower()[:40]
        slug = "" if len(groups) == 1 else f"{number}-{words}_"
        found.append(replace(base, runs=members, name=title, slug=slug))
    return found


def nothing_found(paths: Paths, runs: Runs) -> str:
    """The message for `paths` below which there is nothing to analyze."""
    where = runs.root if isinstance(paths, str | Path) else ", ".join(map(str, paths))
    if runs.skipped:
        name, why = next(iter(runs.skipped.items()))
        return f"runs: none of the {len(runs.skipped)} below {where} can be read; {name}: {why}"
    if len(runs):
        return f"runs: none below {where} has a finished step yet; wait for one, or look at run.json of {runs[0].name}"
    return f"runs: no run below {where}; make one with `sharpscope run --steps 20`, or give the folder that holds yours"


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings about damaged parts and runs left out: a report names them itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedPartWarning)
        warnings.filterwarnings("ignore", message=".* is left out: ")
        yield


def last_step(run: Run) -> int:
    """Last step in the `steps` table, 0 if there is none."""
    return 0 if run.steps.empty else int(run.steps["step"].max())


def flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    result: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


Value = TypeVar("Value")


def per_run(function: Callable[..., Value]) -> Callable[..., Value]:
    """Cache the results of a function of (run or study, …) for the lifetime of its first argument."""

    @functools.wraps(function)
    def _remembering(run: object, *arguments: object) -> Value:
        # on the object itself: it goes with the run, and no run is kept alive by a cache
        known = vars(run).setdefault("_remembered", {})
        key = (function, *arguments)
        if key not in known:
            known[key] = function(run, *arguments)
        result: Value = known[key]
        return result

    return _remembering


@per_run
def recorded_steps(run: Run, *columns: str) -> list[int]:
    """Steps at which some token has a value, not null and not NaN, in each of these columns of the tokens table."""
    found: set[int] = set()
    # in Arrow and piece by piece: the tokens table is the largest of all
    for piece in run.iter_arrow("tokens", columns=["step", *columns]):
        absent = [pc.is_null(piece[name], nan_is_null=True) for name in columns]
        known = pc.invert(functools.reduce(pc.or_, absent))
        found.update(piece["step"].filter(known).unique().to_pylist())
    return sorted(found)


@per_run
def _flat_config(run: Run) -> dict[str, object]:
    return flat(run.config)


def setting_of(run: Run, *without: str) -> dict[str, object]:
    """The run's flat configuration without NOT_A_SETTING and `without` (keys, or what is below them)."""
    left_out = {*NOT_A_SETTING, *without}
    below = tuple(f"{name}." for name in left_out)
    return {
        key: value
        for key, value in _flat_config(run).items()
        if key not in left_out and not key.startswith(below)
    }


def grid_settings(run: Run) -> dict[str, float]:
    """The grid's settings of a run; those that its configuration does not have are left out."""
    values = {axis: _flat_config(run).get(key) for axis, key in GRID.items()}
    return {axis: float(value) for axis, value in values.items() if isinstance(value, int | float)}


def ground_of(run: Run) -> str:
    """Task, its configuration and the initial policy as text; only runs with equal ones are compared."""
    return _text(
        {
            "task": run.task,
            "task_config": run.config.get("task"),
            "policy": run.config.get("policy"),
        }
    )


def most_common(values: Sequence[Value]) -> Value:
    """The most frequent of `values`; of equally many, the first."""
    return Counter(values).most_common(1)[0][0]


def _text(value: Mapping[str, object]) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _title(run: Run, rivals: Sequence[Run]) -> str:
    """The task, and the fields in which it differs from other studies of the same task."""
    mine, *theirs = (
        flat({key: one.config.get(key) or {} for key in ("task", "policy")})
        for one in (run, *rivals)
    )
    differing = [key for key in mine if any(other.get(key) != mine[key] for other in theirs)]
    return " ".join([run.task, *(f"{key}={mine[key]}" for key in differing)])


@per_run
def _settings(study: Study) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    """Settings of the runs, and notes on which runs were left out."""
    notes: list[str] = []
    by_setting: dict[tuple[str, str], dict[str, Run]] = defaultdict(dict)
    for name, run in study.runs.items():
        by_setting[run.method, _text(setting_of(run))][name] = run
    used = {
        cell: kept
        for cell, members in by_setting.items()
        if (kept := _one_per_seed(members, notes))
    }
    settings = []
    for (method, key), kept in used.items():
        rivals = {
            other: len(its) for (m, other), its in used.items() if m == method and other != key
        }
        most = max(rivals.values(), default=0)
        # named by what differs from the setting that has the method's name, or else from all others
        largest = [other for other, count in rivals.items() if count == most > len(kept)]
        named = _differing(key, largest if len(largest) == 1 else rivals)
        if rivals and len(kept) > most:
            notes.append(
                f"{method} alone stands for the setting of it with the most seeds: {named}."
            )
        settings.append(
            Setting(method if len(kept) > most else f"{method} ({named})", method, kept)
        )
    return tuple(sorted(settings, key=lambda s: s.label)), tuple(notes)


def _differing(key: str, rivals: Iterable[str]) -> str:
    """Fields in which this setting differs from others of the same method: `optimizer.lr=0.0002`."""
    mine = json.loads(key)
    others = [json.loads(rival) for rival in rivals]
    fields = sorted(
        {name for other in others for name in {*mine, *other} if mine.get(name) != other.get(name)}
    )
    values = {name: mine.get(name) for name in fields}
    return ", ".join(
        f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()
    )


def _one_per_seed(members: Mapping[str, Run], notes: list[str]) -> dict[int, Run]:
    """One run per seed: finished ones if there are any, the longer of two with one seed; adds to `notes` what is left out."""
    # a run that was stopped has less training: it counts only where none of its setting has finished
    finished = any(run.status == "finished" and last_step(run) for run in members.values())
    chosen: dict[int, tuple[str, Run]] = {}
    for name, run in sorted(members.items(), key=lambda item: -last_step(item[1])):
        state = f"({run.status}, {last_step(run)} steps)"
        if not last_step(run):
            if not run.rows("forks"):
                notes.append(f"{name} has no steps yet and is left out.")
        elif finished and run.status != "finished":
            notes.append(f"{name} {state} is left out: other runs of its setting are finished.")
        elif run.seed in chosen:
            notes.append(
                f"{name} repeats seed {run.seed} of {chosen[run.seed][0]} and is left out: it is no new sample."
            )
        else:
            if not finished:
                notes.append(f"{name} is not finished {state}: what it has is used.")
            chosen[run.seed] = name, run
    return {seed: run for seed, (_, run) in sorted(chosen.items(), key=lambda item: str(item[0]))}


def _mismatch(
    first: str, second: str, by_key: Mapping[str, Mapping[str, Mapping[int, str]]]
) -> str:
    """Why two methods have no pair: in what their largest settings differ, or that they share no seed."""
    a, b = (
        json.loads(max(by_key[method], key=lambda key: len(by_key[method][key])))
        for method in (first, second)
    )
    differing = sorted(
        f"{key} ({a.get(key)} and {b.get(key)})" for key in {*a, *b} if a.get(key) != b.get(key)
    )
    if not differing:
        return f"{first} and {second} share no seed"
    why = "a difference between them could not be attributed to the method"
    return f"the runs of {first} and {second} differ in {', '.join(differing[:4])}; {why}"
