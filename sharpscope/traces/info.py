"""What run.json may hold: the fields that readers use, with their types. Other fields are kept as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from sharpscope.errors import UserError
from sharpscope.traces.schema import READABLE_VERSIONS
from sharpscope.untrusted import parse_json

LARGEST_INFO = 16_000_000
"""Largest run.json [bytes]."""
INTEGERS = 2**63
"""Bound on the size of whole numbers, which data frames store in 64 bits."""

Text = Annotated[str, StringConstraints(max_length=20_000)]
Whole = Annotated[int, Field(gt=-INTEGERS, lt=INTEGERS)]
Count = Annotated[int, Field(ge=0, lt=INTEGERS)]
Loose = dict[Text, object]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    """A part of run.json: types are not converted, and fields that are not named here may have any value."""

    model_config = ConfigDict(strict=True, extra="allow")


class Measuring(_Part):
    """What measuring cost."""

    share: Finite | None = None
    seconds: dict[Text, Finite] | None = None


class ProbeRadius(_Part):
    """The radius that perturbations had, and how it was found."""

    rho: Finite | None = None
    saturation: float | None = None
    evaluations: Count | None = None
    seconds: Finite | None = None
    why: Text | None = None


class Imported(_Part):
    """Where an imported run comes from, and the columns that its source lacks, by table."""

    source: Text | None = None
    not_recorded: dict[Text, list[Text]] = {}


class Rollout(_Part):
    """Settings of the rollouts that readers use."""

    temperature: Finite | None = None
    group_size: Whole | None = None
    prompts_per_step: Whole | None = None


class Settings(_Part):
    """The resolved configuration: its sections are mappings. Other trainers' settings stand beside them."""

    rollout: Rollout | None = None
    optimizer: Loose | None = None
    update: Loose | None = None
    task: Loose | None = None
    policy: Loose | None = None
    method: Loose | None = None


class RunInfo(_Part):
    """The content of run.json."""

    schema_version: Whole
    name: Text | None = None
    status: Text | None = None
    started: Text | None = None
    finished: Text | None = None
    end: Text | None = None
    method: Text | None = None
    task: Text | None = None
    seed: Whole | None = None
    steps_done: Count | None = None
    notes: list[Text] | None = None
    config: Settings | None = None
    calibration: Loose | None = None
    versions: Loose | None = None
    device: Text | None = None
    threads: Count | None = None
    processes: Count | None = None
    sharded: bool | None = None
    parameters: Count | None = None
    trainable_parameters: Count | None = None
    vocabulary: Count | None = None
    seconds: Finite | None = None
    peak_memory_bytes: dict[Text, Finite] | Finite | None = None
    measuring: Measuring | None = None
    probe_radius: ProbeRadius | None = None
    not_measured: dict[Text, Text] | None = None
    sampled: Text | None = None
    forks: dict[Text, Loose] | None = None
    imported: Imported | None = None
    rotation: Text | None = None
    reduced: Loose | None = None
    reference_sha256: Text | None = None


def parse_run_info(content: str | bytes, path: Path) -> dict[str, Any]:
    """Parse and check the content of run.json; `path` is for the error message.

    Raises:
        UserError: it is not JSON, a field has a wrong type, or it has a schema version that is not read.
    """
    try:
        info = parse_json(content)
        version = info.get("schema_version") if isinstance(info, dict) else None
        if isinstance(version, int) and version not in READABLE_VERSIONS:
            fix = f"this version reads {READABLE_VERSIONS}; use the sharpscope version in its run.json under versions"
            raise UserError(f"run: {path.parent} has schema version {str(version)[:20]}, {fix}")
        RunInfo.model_validate(info)
    except ValidationError as error:
        raise _damaged(path, _first_problem(error)) from None
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    return dict(info)


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"run: {path} is damaged ({reason}); restore it or exclude this run")


def _first_problem(error: ValidationError) -> str:
    """Field, value and expectation of the first wrong field."""
    first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"])) or "the content"
    if first["type"] == "missing":
        return f"{field} is missing"
    return f"{field} = {repr(first['input'])[:60]}: {first['msg']}"
