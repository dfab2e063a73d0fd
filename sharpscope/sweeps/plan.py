"""From a sweep's file to its runs: all combinations, each validated before anything starts."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpscope.config import RunConfig, build_config, check_keys, merge, read_yaml, to_yaml, validate
from sharpscope.errors import UserError, nearest
from sharpscope.sweeps.spec import SweepPart, SweepSpec
from sharpscope.traces import lock_owner, read_run_info

NOT_COMPARED = ("name", "out", "threads", "device")
"""What may differ between a planned run and the one in its folder: where and how it was computed."""


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """One run of a sweep and where it stands."""

    config: RunConfig
    settings: Mapping[str, Any]

    @property
    def run_dir(self) -> Path:
        """Its folder."""
        return self.config.run_dir

    @property
    def status(self) -> str:
        """planned | running | finished | interrupted | failed, from its run.json.

        A run that says `running` without a living owner was killed: it counts as interrupted.
        """
        if not (self.run_dir / "run.json").exists():
            return "planned"
        status = str(read_run_info(self.run_dir)["status"])
        if status == "running":
            owner = lock_owner(self.run_dir)
            return "running" if owner is not None and owner.alive is not False else "interrupted"
        return status

    @property
    def steps_done(self) -> int:
        """Steps that are recorded so far."""
        return int(read_run_info(self.run_dir)["steps_done"]) if (self.run_dir / "run.json").exists() else 0


def read_sweep(file: Path) -> SweepSpec:
    """A sweep's file, checked; UserError names the field, the value and the fix."""
    data = read_yaml(file)
    check_keys(SweepSpec, data)
    spec: SweepSpec = validate(SweepSpec, data)
    return spec


def plan_sweep(spec: SweepSpec, smoke: bool = False, only: Sequence[str] = ()) -> list[PlannedRun]:
    """Every run of the sweep, in the order parts → seeds → settings → methods, so that one cut short has whole comparisons.

    Args:
        only: names of the parts wanted; none: all.

    Raises:
        UserError: a combination that is no valid configuration, two runs that would share a folder, an unknown part, a folder
            that holds a run of other settings than planned: it would count as the planned one.
    """
    for name in only:
        if name not in spec.parts:
            raise UserError(f"part, {name}: the sweep has no such part{nearest(name, spec.parts)}")
    parts = spec.parts or {"": spec}
    planned = {
        name: _plan_part(spec, part, smoke) for name, part in parts.items()
    }  # all are checked, whatever is wanted
    runs = [run for name, several in planned.items() for run in several if not only or name in only]
    _check_folders([run for several in planned.values() for run in several])
    for run in runs:
        _check_kept(run)
    return runs


def _plan_part(spec: SweepSpec, part: SweepPart, smoke: bool) -> list[PlannedRun]:
    combinations = [dict(zip(part.grid, values, strict=True)) for values in itertools.product(*part.grid.values())]
    runs = []
    for seed in part.seeds:
        for setting in part.settings:
            for point in combinations:
                runs += [_plan(spec, part, method, {**setting, **point}, seed, smoke) for method in part.methods]
    return runs


def _check_folders(runs: Sequence[PlannedRun]) -> None:
    folders: dict[Path, PlannedRun] = {}
    for run in runs:
        if run.run_dir in folders:
            raise UserError(f"sweep: two runs would share the folder {run.run_dir}; name every setting once")
        folders[run.run_dir] = run


def _check_kept(run: PlannedRun) -> None:
    """A run that is there has the settings planned for it; a setting that only one of both versions knows is not compared."""
    if not (run.run_dir / "run.json").exists():
        return
    there = read_run_info(run.run_dir)["config"]
    found = list(_differing(there, run.config.model_dump(mode="json")))
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise UserError(
            f"sweep: {run.run_dir} holds a run of other settings: {'; '.join(found[:3])}{more}. Give the sweep another `out`, or "
            "move that folder away"
        )


def _differing(there: Mapping[str, Any], planned: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for key in planned:
        here = f"{place}{key}"
        if key not in there or here in NOT_COMPARED:
            continue
        old, new = there[key], planned[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping) and old.get("kind") == new.get("kind"):
            yield from _differing(old, new, f"{here}.")
        elif old != new:
            yield f"{here} = {_named(old)} there, {_named(new)} planned"


def _named(value: Any) -> str:
    return str(value["kind"]) if isinstance(value, Mapping) and "kind" in value else str(value)


def _plan(
    spec: SweepSpec, part: SweepPart, method: str, settings: Mapping[str, Any], seed: int, smoke: bool
) -> PlannedRun:
    data = merge(dict(spec.base), dict(part.base)) if part is not spec else dict(spec.base)
    data = merge(data, {"method": method})
    for path, value in {**settings, **(spec.smoke if smoke else {})}.items():
        nested: Any = value
        for key in reversed(path.split(".")):
            nested = {key: nested}
        data = merge(data, nested)
    out = f"{Path(spec.out)}-smoke" if smoke else spec.out  # a Path: `runs/` too has its smoke beside it, not in it
    data = merge(data, {"seed": seed, "out": out, "name": run_name(method, settings, seed)})
    return PlannedRun(build_config(values=data), settings)


def run_name(method: str, settings: Mapping[str, Any], seed: int) -> str:
    """`grpo-sg+lr=0.0001-s3`: readable, and short and unique for any settings."""
    parts = [f"{path.split('.')[-1]}={value}" for path, value in settings.items()]
    text = re.sub(r"[^A-Za-z0-9._+=-]+", "-", "+".join([method, *parts]))
    if len(text) > 80:
        text = text[:70] + "-" + hashlib.sha256("+".join([method, *parts]).encode()).hexdigest()[:8]
    return f"{text}-s{seed}"


def write_config(run: PlannedRun, folder: Path, threads: int) -> Path:
    """The run's configuration as a file for a worker, with its share of the threads."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.config.run_name}.yaml"
    path.write_text(to_yaml(run.config.model_copy(update={"threads": threads})), encoding="utf-8")
    return path
