"""Configuration of a sweep, and its runs: all combinations, validated before the first run starts."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from sharpscope.config import ClaimsSpec, RunConfig, Spec, build_config, check_keys, merge, read_yaml, to_yaml, validate
from sharpscope.errors import UserError, nearest
from sharpscope.traces import has_writer, read_run_info

NOT_COMPARED = ("name", "out", "threads", "device")
"""Fields that may differ between a planned run and the one in its folder."""

_RESERVED = {
    "seed": "list seeds under `seeds`",
    "out": "set `out` of the sweep",
    "name": "remove it; the name consists of method, settings and seed",
}
"""Field that the sweep sets -> what to do instead."""


def _reject_reserved(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that the sweep would overwrite."""
    for path, value in fields.items():
        if path in _RESERVED:
            raise ValueError(f"{path} = {value!r} does not belong here; {_RESERVED[path]}")


class SweepPart(Spec):
    """Runs of all combinations methods × settings × grid × seeds."""

    purpose: str = Field("", description="Purpose in one sentence.")
    base: dict[str, Any] = Field(default_factory=dict, description="Configuration fields, nested, common to all runs.")
    methods: tuple[str, ...] = Field(("grpo", "grpo-sg"), description="Names of methods.", min_length=1)
    settings: tuple[dict[str, Any], ...] = Field(
        ({},), min_length=1, description="Alternative settings: mappings from a field path (optimizer.lr) to a value."
    )
    grid: dict[str, tuple[Any, ...]] = Field(
        default_factory=dict, description="Field path to its values; every combination is run with every setting."
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="Training seeds.")

    @field_validator("methods", "seeds")
    @classmethod
    def _distinct(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(value)) != len(value):
            raise ValueError("has duplicate values; remove them")
        return value

    @field_validator("base", "grid", "settings")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        for fields in value if isinstance(value, tuple) else (value,):
            _reject_reserved(fields)
        return value

    @model_validator(mode="after")
    def _grid_has_values(self) -> SweepPart:
        empty = [path for path, values in self.grid.items() if not values]
        if empty:
            raise ValueError(f"grid.{empty[0]} has no values; add some or remove it")
        return self


class SweepSpec(SweepPart):
    """Configuration of a sweep: one product of runs, or several named parts."""

    out: str = Field("runs", description="Folder for the run folders.")
    claims: ClaimsSpec = Field(
        default_factory=ClaimsSpec, description="The rules of the claims; see `sharpscope study declare`."
    )
    smoke: dict[str, Any] = Field(
        default_factory=dict,
        description="Field paths to values that make every run small, for --smoke.",
    )
    parts: dict[str, SweepPart] = Field(
        default_factory=dict,
        description="Named parts, run in order. Each has its own methods, settings, grid and seeds, and a base that extends the "
        "sweep's. The sweep itself must not set these.",
    )

    @field_validator("smoke")
    @classmethod
    def _check_smoke(cls, value: dict[str, Any]) -> dict[str, Any]:
        _reject_reserved(value)
        return value

    @model_validator(mode="after")
    def _check_parts(self) -> SweepSpec:
        own = {"methods", "settings", "grid", "seeds"} & self.model_fields_set
        if self.parts and own:
            raise ValueError(f"{sorted(own)[0]} cannot be combined with parts; set it in each part")
        return self


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """One run of a sweep and its status."""

    config: RunConfig
    settings: Mapping[str, Any]

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.config.run_dir

    @property
    def status(self) -> str:
        """Planned | running | finished | interrupted | failed, from run.json.

        A run with status `running` whose process has ended counts as interrupted.
        """
        if not (self.run_dir / "run.json").exists():
            return "planned"
        status = str(read_run_info(self.run_dir)["status"])
        if status == "running":
            return "running" if has_writer(self.run_dir) else "interrupted"
        return status

    @property
    def steps_done(self) -> int:
        """Number of recorded steps."""
        return int(read_run_info(self.run_dir)["steps_done"]) if (self.run_dir / "run.json").exists() else 0


def read_sweep(file: Path) -> SweepSpec:
    """Read and validate the file of a sweep.

    Raises:
        UserError: the file or a field is invalid.
    """
    data = read_yaml(file)
    check_keys(SweepSpec, data)
    spec: SweepSpec = validate(SweepSpec, data)
    return spec


def plan_sweep(spec: SweepSpec, smoke: bool = False, only: Sequence[str] = ()) -> list[PlannedRun]:
    """Plan every run of a sweep, in the order parts, seeds, settings, methods, so that early runs can be compared.

    Args:
        spec: configuration of the sweep.
        smoke: apply `spec.smoke` and append `-smoke` to the output folder.
        only: names of the parts to return; empty returns all. All parts are validated.

    Raises:
        UserError: a combination is not a valid configuration, two runs have the same folder, a part does not exist, or the
            folder of a run contains a run with other settings.
    """
    for name in only:
        if name not in spec.parts:
            raise UserError(f"part {name!r}: the sweep has no such part{nearest(name, spec.parts)}")
    parts = spec.parts or {"": spec}
    planned = {name: _plan_part(spec, part, smoke) for name, part in parts.items()}
    folders: set[Path] = set()
    for run in itertools.chain.from_iterable(planned.values()):
        if run.run_dir in folders:
            raise UserError(f"sweep: two runs would share the folder {run.run_dir}; remove the duplicate setting")
        folders.add(run.run_dir)
    selected = [run for name, runs in planned.items() for run in runs if not only or name in only]
    for run in selected:
        _check_existing(run)
    return selected


def _plan_part(spec: SweepSpec, part: SweepPart, smoke: bool) -> list[PlannedRun]:
    combinations = [dict(zip(part.grid, values, strict=True)) for values in itertools.product(*part.grid.values())]
    runs = []
    for seed in part.seeds:
        for setting in part.settings:
            for point in combinations:
                runs += [_plan(spec, part, method, {**setting, **point}, seed, smoke) for method in part.methods]
    return runs


def _check_existing(run: PlannedRun) -> None:
    """Check that an existing run has the planned settings; settings that exist in only one version are not compared."""
    if not (run.run_dir / "run.json").exists():
        return
    existing = read_run_info(run.run_dir)["config"]
    differences = list(_differences(existing, run.config.model_dump(mode="json")))
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UserError(
            f"sweep: {run.run_dir} contains a run with other settings ({'; '.join(differences[:3])}{more}); change `out` or "
            "move the folder"
        )


def _differences(existing: Mapping[str, Any], planned: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in planned:
        path = f"{prefix}{key}"
        if key not in existing or path in NOT_COMPARED:
            continue
        old, new = existing[key], planned[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping) and old.get("kind") == new.get("kind"):
            yield from _differences(old, new, f"{path}.")
        elif old != new:
            yield f"{path} = {_kind(old)}, planned {_kind(new)}"


def _kind(value: Any) -> str:
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
    out = f"{Path(spec.out)}-smoke" if smoke else spec.out  # Path removes a trailing slash
    data = merge(data, {"seed": seed, "out": out, "name": run_name(method, settings, seed)})
    return PlannedRun(build_config(values=data), settings)


def run_name(method: str, settings: Mapping[str, Any], seed: int) -> str:
    """Name of a run, such as `grpo-sg+lr=0.0001-s3`; long names are shortened with a hash."""
    parts = [f"{path.split('.')[-1]}={value}" for path, value in settings.items()]
    text = re.sub(r"[^A-Za-z0-9._+=-]+", "-", "+".join([method, *parts]))
    if len(text) > 80:
        text = text[:70] + "-" + hashlib.sha256("+".join([method, *parts]).encode()).hexdigest()[:8]
    return f"{text}-s{seed}"


def write_config(run: PlannedRun, folder: Path, threads: int) -> Path:
    """Write the configuration of a run for a worker with `threads` threads; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.config.run_name}.yaml"
    path.write_text(to_yaml(run.config.model_copy(update={"threads": threads})), encoding="utf-8")
    return path
