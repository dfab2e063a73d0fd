"""Sweeps: runs from one file or from lists of methods and seeds, validated first, then executed in worker processes."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from sharpscope.config import ClaimsSpec, RunConfig, make_config, recorded_settings
from sharpscope.errors import UserError, nearest
from sharpscope.methods import parse_methods
from sharpscope.settings import Spec, merge, read_yaml, to_yaml, validate
from sharpscope.settings.reading import merge_all, nested
from sharpscope.traces import has_writer, held_text, read_run_info

NOT_COMPARED = ("out", "threads", "policy.device", "method.label")
"""Fields that may differ between a planned run and the one in its folder."""

_RESERVED = {"seed": "list seeds under `seeds`", "out": "set `out` of the sweep"}
"""Field that the sweep sets -> what to do instead."""

Settings = dict[str, object]
"""Configuration fields with their values."""


class SweepPart(Spec):
    """Runs of all combinations methods × settings × grid × seeds."""

    purpose: str = Field("", description="Purpose in one sentence.")
    base: Settings = Field(
        default_factory=dict, description="Configuration fields, nested, common to all runs."
    )
    methods: tuple[str, ...] = Field(
        ("grpo", "grpo-sg"),
        min_length=1,
        description="Methods, as [label=]name[+field=value…].",
    )
    settings: tuple[Settings, ...] = Field(
        ({},),
        min_length=1,
        description="Alternative settings: mappings from a field path (optimizer.lr) to a value.",
    )
    grid: dict[str, tuple[object, ...]] = Field(
        default_factory=dict,
        description="Field path to its values; every combination is run with every setting.",
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="Training seeds.")

    @field_validator("methods", "seeds")
    @classmethod
    def _distinct(cls, value: tuple[object, ...]) -> tuple[object, ...]:
        if len(set(value)) != len(value):
            raise ValueError("has duplicate values; remove them")
        return value

    @field_validator("base", "grid", "settings")
    @classmethod
    def _check_fields(
        cls, value: Settings | tuple[Settings, ...]
    ) -> Settings | tuple[Settings, ...]:
        layers = [value] if isinstance(value, dict) else value
        for path, given in itertools.chain.from_iterable(layer.items() for layer in layers):
            if path in _RESERVED:
                raise ValueError(f"{path} = {given!r} does not belong here; {_RESERVED[path]}")
            if given == ():
                raise ValueError(f"{path} has no values; add some or remove it")
        return value


class SweepSpec(SweepPart):
    """Configuration of a sweep: one product of runs, or several named parts."""

    out: str = Field("runs", description="Folder for the run folders.")
    claims: ClaimsSpec = Field(
        default_factory=ClaimsSpec,
        description="The rules of the claims; see `sharpscope study declare`.",
    )
    parts: dict[str, SweepPart] = Field(
        default_factory=dict,
        description="Named parts, run in order. Each has its own methods, settings, grid and seeds, and a base that extends the "
        "sweep's. The sweep itself must not set these.",
    )

    @model_validator(mode="after")
    def _check_parts(self) -> SweepSpec:
        given = {"methods", "settings", "grid", "seeds"} & self.model_fields_set
        if self.parts and given:
            raise ValueError(
                f"{sorted(given)[0]} cannot be combined with parts; set it in each part"
            )
        return self


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """One run of a sweep and its status."""

    config: RunConfig

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.config.run_dir

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.run_dir.name

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


def read_sweep(source: Path | Mapping[str, object]) -> SweepSpec:
    """Validate the configuration of a sweep, read from a file if `source` is one."""
    spec = validate(SweepSpec, read_yaml(source) if isinstance(source, Path) else source)
    return spec


def plan_sweep(
    spec: SweepSpec,
    only: Sequence[str] = (),
    changes: Mapping[str, object] | None = None,
) -> list[PlannedRun]:
    """Plan every run of a sweep, in the order parts, seeds, settings, methods, so that early runs can be compared.

    `only` names the parts to return, without names all; all are validated. `changes` are nested fields that override those of
    the file.

    Raises:
        UserError: a combination is not a valid configuration, two runs have the same folder, a part does not exist, or the
            folder of a run contains a run with other settings.
    """
    for name in only:
        if name not in spec.parts:
            raise UserError(f"part {name!r}: the sweep has no such part{nearest(name, spec.parts)}")
    parts = spec.parts or {"": spec}
    planned = {name: list(_plan_part(spec, part, changes or {})) for name, part in parts.items()}
    folders: set[Path] = set()
    for run in itertools.chain.from_iterable(planned.values()):
        if run.run_dir in folders:
            raise UserError(
                f"sweep: two runs would share the folder {run.run_dir}; remove the duplicate setting"
            )
        folders.add(run.run_dir)
    selected = [run for name, runs in planned.items() for run in runs if not only or name in only]
    for run in selected:
        _check_existing(run)
    return selected


def _plan_part(
    spec: SweepSpec,
    part: SweepPart,
    changes: Mapping[str, object],
) -> Iterator[PlannedRun]:
    base = merge(spec.base, part.base) if part is not spec else dict(spec.base)
    # Validated here, so that a wrong method is one error and not one for each run.
    methods = list(zip(part.methods, parse_methods(part.methods).values(), strict=True))
    points = [
        dict(zip(part.grid, values, strict=True))
        for values in itertools.product(*part.grid.values())
    ]
    for seed, setting, point in itertools.product(part.seeds, part.settings, points):
        settings = {**setting, **point}
        for text, method in methods:
            name = run_name(method.label or text, settings, seed)
            places = {"seed": seed, "out": str(Path(spec.out) / name)}
            layers: list[Mapping[str, object]] = [
                base,
                {"method": text},
                *(nested(path, value) for path, value in settings.items()),
                changes,
                places,
            ]
            yield PlannedRun(make_config(merge_all(layers)))


def _check_existing(run: PlannedRun) -> None:
    """Check that an existing run has the planned settings; settings that exist in only one version are not compared."""
    if not (run.run_dir / "run.json").exists():
        return
    existing = _flat(recorded_settings(read_run_info(run.run_dir)["config"]))
    planned = _flat(run.config.model_dump(mode="json"))
    common = [path for path in planned if path in existing and path not in NOT_COMPARED]
    changed = [
        f"{path} = {existing[path]}, planned {planned[path]}"
        for path in common
        if existing[path] != planned[path]
    ]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        other = f"other settings ({'; '.join(changed[:3])}{more})"
        raise UserError(f"sweep: {run.run_dir} contains a run with {other}; choose another --out")


def _flat(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Settings by path; a part that is set is an ellipsis, beside its own settings."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat[f"{prefix}{key}"] = "…"
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def run_name(method: str, settings: Mapping[str, object], seed: int) -> str:
    """Name of a run, such as `grpo-sg+lr=0.0001-s3`; long names are shortened with a hash."""
    whole = "+".join(
        [method, *(f"{path.rpartition('.')[2]}={value}" for path, value in settings.items())]
    )
    text = re.sub(r"[^A-Za-z0-9._+=-]+", "-", whole)
    if len(text) > 80:
        text = f"{text[:70]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
    return f"{text}-s{seed}"


# -- execution ---------------------------------------------------------------------------------------------------------

Ending = Literal["finished", "already finished", "run by others", "failed", "interrupted"]
"""How a run of a sweep ended: `failed`: with an error or by a health rule; `interrupted`: the next call resumes it."""


def execute(
    runs: Sequence[PlannedRun],
    *,
    workers: int,
    threads: int,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[PlannedRun, tuple[Ending, str]]:
    """Execute the runs of a sweep that are planned or interrupted in processes of `threads` threads.

    After Ctrl-C every active run completes its step and saves a checkpoint, and the next call resumes it; a second one stops
    them. `tell` is called with a line on each run that has ended.

    Returns:
        How each run ended, and why it failed, was interrupted other than by the user, or is held.
    """
    pending = [run for run in runs if run.status in ("planned", "interrupted")]
    active: dict[PlannedRun, subprocess.Popen[bytes]] = {}
    stopped = threading.Event()
    limits = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)
    )
    environment = {**os.environ, **limits, "TOKENIZERS_PARALLELISM": "false"}

    def interrupt(*_: object) -> None:
        """Start no further run, and interrupt the active ones."""
        stopped.set()
        for process in list(active.values()):
            process.send_signal(signal.SIGINT)

    def work(run: PlannedRun) -> tuple[Ending, str]:
        """Execute a run unless the user has stopped the sweep; how it ended."""
        code, output = 0, b""
        if not stopped.is_set():
            command = _command(run, Path(folder), threads)
            active[run] = process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            if stopped.is_set():
                process.send_signal(signal.SIGINT)
            output = process.communicate()[0]
            del active[run]
            code = 0 if stopped.is_set() else process.returncode
        ended = ending(run, True, code, output.decode("utf-8", "replace"))
        tell(f"{run.name}: {ended[0]}")
        return ended

    previous = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with (
            tempfile.TemporaryDirectory(prefix="sharpscope-sweep-") as folder,
            ThreadPoolExecutor(workers) as pool,
        ):
            jobs = {run: pool.submit(work, run) for run in pending}
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return {run: jobs[run].result() if run in jobs else ending(run, False, 0, "") for run in runs}


def ending(run: PlannedRun, executed: bool, code: int, text: str) -> tuple[Ending, str]:
    """How a run ended and why, given the exit code and the output of its worker (0 and empty without one)."""
    status = run.status
    if status == "finished":
        return ("finished" if executed else "already finished"), ""
    if status == "running":
        return "run by others", held_text(run.run_dir)
    if code in (0, INTERRUPTED) and status != "failed":
        return "interrupted", ""
    errors = [
        line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")
    ]
    end = read_run_info(run.run_dir).get("end") if status == "failed" else None
    reason = (
        errors[-1]
        if errors
        else str(end or f"exit code {code} {text.strip().rpartition(chr(10))[2]}")
    )
    # A negative code is a signal; a positive one is an error of the program, which would repeat.
    return ("interrupted" if code < 0 and status == "interrupted" else "failed"), reason


INTERRUPTED = 130
"""Exit code of a run that Ctrl-C ended."""


def _command(run: PlannedRun, configs: Path, threads: int) -> list[str]:
    """Command line that starts a run, or resumes it from its last checkpoint."""
    base = [sys.executable, "-m", "sharpscope", "run", "--quiet"]
    if run.status == "interrupted":
        return [*base, "--resume", str(run.run_dir)]
    path = configs / f"{run.name}.yaml"
    path.write_text(to_yaml(run.config.model_copy(update={"threads": threads})), encoding="utf-8")
    return [*base, str(path)]
