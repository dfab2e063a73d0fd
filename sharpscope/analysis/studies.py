"""Which runs may be compared: studies (one task, one initial policy); in them, settings (equal but for the seed)."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sharpscope.traces import Run, Runs

# what may differ between two runs of one setting
NOT_A_SETTING = (
    "seed",
    "name",
    "out",
    "threads",
    "recording",
    "checkpoint",
    "probes",
    "health",
    "evaluation",
    "method.name",
)


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seed alone. `runs` maps seed to run, all of them used.

    `label`: the method, and in brackets what tells the setting from that of the same method with the most seeds, which has no
    brackets (where several have the most: from all).
    """

    label: str
    method: str
    runs: Mapping[Any, Run]


@dataclass(frozen=True)
class Study:
    """Settings that may be compared. `slug` opens the names of its files, empty for the study with the most runs.

    Where several have the most, none is empty: a name never stands for another study than the reader thinks.

    `notes`: which runs were left out and why.
    """

    name: str
    slug: str
    settings: tuple[Setting, ...]
    notes: tuple[str, ...]

    @property
    def labels(self) -> list[str]:
        """Labels of the settings, sorted."""
        return [setting.label for setting in self.settings]

    def largest(self, count: int) -> Study:
        """The study with its `count` settings of the most seeds alone; of equally many, the first by label."""
        if len(self.settings) <= count:
            return self
        most = sorted(self.settings, key=lambda setting: (-len(setting.runs), setting.label))[:count]
        return replace(self, settings=tuple(setting for setting in self.settings if setting in most))

    @property
    def horizon(self) -> int:
        """The last step that every used run has: where tables compare."""
        return min((last_step(run) for setting in self.settings for run in setting.runs.values()), default=0)


def last_step(run: Run) -> int:
    """Last step in the `steps` table, 0 if there is none."""
    return 0 if run.steps.empty else int(run.steps["step"].max())


def studies(runs: Runs) -> list[Study]:
    """Split runs into studies by task and initial policy, and those into settings."""
    groups: dict[str, dict[str, Run]] = defaultdict(dict)
    for name, run in runs.by_name.items():
        groups[ground_of(run)][name] = run
    titles = _titles({ground: next(iter(members.values())) for ground, members in groups.items()})
    sizes = sorted((len(members) for members in groups.values()), reverse=True)
    plain = sizes[0] if sizes and sizes[1:2] != sizes[:1] else None
    return [
        _study(titles[ground], members, "" if len(members) == plain else f"{number}-")
        for number, (ground, members) in enumerate(groups.items(), 1)
    ]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def setting_of(run: Run) -> dict[str, Any]:
    """The run's flat configuration without what does not make a setting."""
    return {
        key: value
        for key, value in flat(run.config).items()
        if not any(key == name or key.startswith(f"{name}.") for name in NOT_A_SETTING)
    }


def ground_of(run: Run) -> str:
    """What two runs must share to be compared at all: task, its settings, initial policy; as one text."""
    parts = {"task": run.task, "task_config": run.config.get("task"), "policy": run.config.get("policy")}
    return json.dumps(parts, sort_keys=True, default=str)


def _titles(examples: Mapping[str, Run]) -> dict[str, str]:
    """A title for each ground: the task, and what tells it from another ground of the same task."""
    titles = {}
    for ground, run in examples.items():
        rivals = [other for other in examples.values() if other.task == run.task and other is not run]
        parts = {"task": run.config.get("task") or {}, "policy": run.config.get("policy") or {}}
        mine = flat(parts)
        theirs = [flat({key: other.config.get(key) or {} for key in parts}) for other in rivals]
        differing = [key for key in mine if any(other.get(key) != mine[key] for other in theirs)]
        titles[ground] = " ".join([run.task, *(f"{key}={mine[key]}" for key in differing)])
    return titles


def _study(name: str, members: Mapping[str, Run], number: str) -> Study:
    notes: list[str] = []
    by_setting: dict[tuple[str, str], dict[str, Run]] = defaultdict(dict)
    for run_name, run in members.items():
        by_setting[run.method, json.dumps(setting_of(run), sort_keys=True, default=str)][run_name] = run
    used = {place: kept for place, own in by_setting.items() if (kept := _used(own, notes))}
    settings = []
    for (method, key), kept in used.items():
        rivals = {other: len(its) for (m, other), its in used.items() if m == method and other != key}
        most = max(rivals.values(), default=0)
        if len(kept) > most:
            label = method
            if rivals:
                named = _brackets(json.loads(key), map(json.loads, rivals))
                notes.append(f"{method} alone stands for the setting of it with the most seeds: {named}.")
        else:
            largest = [other for other, count in rivals.items() if count == most > len(kept)]
            against = largest if len(largest) == 1 else rivals
            label = f"{method} ({_brackets(json.loads(key), map(json.loads, against))})"
        settings.append(Setting(label, method, kept))
    slug = number + re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:40] + "_" if number else ""
    return Study(name, slug, tuple(sorted(settings, key=lambda s: s.label)), tuple(notes))


def _brackets(mine: Mapping[str, Any], rivals: Iterable[Mapping[str, Any]]) -> str:
    """What tells this setting from others of the same method: `optimizer.lr=0.0002`."""
    keys = sorted({key for other in rivals for key in {*mine, *other} if mine.get(key) != other.get(key)})
    return ", ".join(f"{key}={_short(mine.get(key))}" for key in keys)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _used(own: Mapping[str, Run], notes: list[str]) -> dict[Any, Run]:
    """One run for each seed: finished ones if there is any, the longest of two with one seed; says what is left out."""
    with_steps = {name: run for name, run in own.items() if last_step(run)}
    notes += [f"{name} has no steps yet and is left out." for name in own if name not in with_steps]
    finished = {name: run for name, run in with_steps.items() if run.status == "finished"}
    if finished:
        notes += [
            f"{name} ({run.status}, {last_step(run)} steps) is left out: other runs of its setting are finished."
            for name, run in with_steps.items()
            if name not in finished
        ]
    else:
        notes += [
            f"{name} is not finished ({run.status}, {last_step(run)} steps): what it has is used."
            for name, run in with_steps.items()
        ]
    chosen: dict[Any, tuple[str, Run]] = {}
    for name, run in (finished or with_steps).items():
        if run.seed in chosen:
            first, second = sorted([chosen[run.seed], (name, run)], key=lambda pair: -last_step(pair[1]))
            notes.append(f"{second[0]} repeats seed {run.seed} of {first[0]} and is left out: it is no new sample.")
            chosen[run.seed] = first
        else:
            chosen[run.seed] = (name, run)
    return {seed: run for seed, (_, run) in sorted(chosen.items(), key=lambda item: str(item[0]))}
