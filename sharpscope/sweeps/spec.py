"""The file of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from sharpscope.config.base import Spec

_ELSEWHERE = {
    "seed": "list seeds under `seeds`, beside `methods`",
    "out": "give it to the sweep as its own `out`, beside `base`",
    "name": "leave it out: a run is named by its method, settings and seed",
}
"""Fields of a run that a sweep sets itself, and where they belong."""


def _refuse_elsewhere(fields: Mapping[str, Any]) -> None:
    """ValueError for a field path that the sweep would overwrite, so that nothing given is dropped in silence."""
    for path, value in fields.items():
        if path in _ELSEWHERE:
            raise ValueError(f"{path} = {value!r} does not belong here; {_ELSEWHERE[path]}")


class SweepPart(Spec):
    """methods × settings × grid × seeds; every combination is one run."""

    purpose: str = Field("", description="What it is for, in a sentence; kept with the sweep.")
    base: dict[str, Any] = Field(
        default_factory=dict, description="Fields of a run's configuration, nested, that all its runs share."
    )
    methods: tuple[str, ...] = Field(("grpo", "grpo-sg"), description="Names of methods.", min_length=1)
    settings: tuple[dict[str, Any], ...] = Field(
        ({},), min_length=1, description="Alternatives: each a mapping from a field's path (optimizer.lr) to its value."
    )
    grid: dict[str, tuple[Any, ...]] = Field(
        default_factory=dict, description="A field's path to its values; all combinations, times the settings."
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="Training seeds.")

    @field_validator("methods", "seeds")
    @classmethod
    def _distinct(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(value)) != len(value):
            raise ValueError("names something twice")
        return value

    @field_validator("base", "grid", "settings")
    @classmethod
    def _only_what_is_used(cls, value: Any) -> Any:
        for fields in value if isinstance(value, tuple) else (value,):
            _refuse_elsewhere(fields)
        return value

    @model_validator(mode="after")
    def _grid_has_values(self) -> SweepPart:
        empty = [path for path, values in self.grid.items() if not values]
        if empty:
            raise ValueError(f"grid.{empty[0]} has no values")
        return self


class SweepSpec(SweepPart):
    """One such product of runs, or several as named parts of a study."""

    out: str = Field("runs", description="Folder of the runs' folders.")
    smoke: dict[str, Any] = Field(
        default_factory=dict,
        description="Field paths to values that make every run tiny, for --smoke: a check that it runs.",
    )
    parts: dict[str, SweepPart] = Field(
        default_factory=dict,
        description="Parts of a study by name, run one after the other; each has its own methods, settings, grid and seeds, and "
        "its base is laid over the sweep's. With parts, the sweep's own are not used.",
    )

    @field_validator("smoke")
    @classmethod
    def _only_what_a_smoke_uses(cls, value: dict[str, Any]) -> dict[str, Any]:
        _refuse_elsewhere(value)
        return value

    @model_validator(mode="after")
    def _either_or(self) -> SweepSpec:
        own = {"methods", "settings", "grid", "seeds"} & self.model_fields_set
        if self.parts and own:
            raise ValueError(f"{sorted(own)[0]} stands beside parts; give it in each part")
        return self
