"""The numbers of a trace that have one value a step: their names, and which of them are new."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from sharpscope.traces import TABLES, Run, load_run

NUMBERS = ("int8", "int32", "int64", "float32", "float64")
SCALARS = {
    table: tuple(c.name for c in TABLES[table].columns if c.type in NUMBERS and c.name not in TABLES[table].key)
    for table in ("steps", "eval")
} | {"probes": ("value", "std_error")}  # fmt: skip
"""Exported columns by table. A name is steps/<column>, eval/<split>/<level>/T<temperature>@<k>/<column>, or
probes/<probe>/<probe set>/<functional>/<parameters>/<quantity>[/rho<rho>][/std_error]."""

Scalars = dict[int, dict[str, float]]


class ScalarReader:
    """Reads a run's folder again and again and gives each number once."""

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self._seen: set[tuple[int, str]] = set()

    def read(self) -> tuple[Scalars, Run]:
        """What was not there before: step -> name -> value, steps ascending; and the run as it is now."""
        run = load_run(self.run_dir)
        found = scalars(run)
        fresh = {
            step: {name: value for name, value in values.items() if (step, name) not in self._seen}
            for step, values in found.items()
        }
        self._seen |= {(step, name) for step, values in fresh.items() for name in values}
        return {step: values for step, values in fresh.items() if values}, run


def scalars(run: Run) -> Scalars:
    """step -> name -> value of the tables steps, eval and probes.

    Numbers that were not recorded or are not finite are left out, and so are the nodes of a spectral density, which are no
    one number. Of estimates that differ by their seed alone, the last one is kept.
    """
    found: Scalars = {}
    for table, names in SCALARS.items():
        frame: pd.DataFrame = getattr(run, table)
        for record in frame.to_dict("records"):
            row = {str(column): value for column, value in record.items()}
            prefix = _PREFIX[table](row)
            if prefix is None:
                continue
            for name in names:
                value = row.get(name)
                if value is None or pd.isna(value) or not math.isfinite(value):
                    continue
                label = prefix if name == "value" else f"{prefix}/{name}"
                found.setdefault(int(row["step"]), {})[label] = float(value)
    return dict(sorted(found.items()))


def _eval_prefix(row: Mapping[str, Any]) -> str:
    return f"eval/{row['split']}/{row['level']}/T{row['temperature']:g}@{row['k']}"


def _probe_prefix(row: Mapping[str, Any]) -> str | None:
    if row["quantity"] == "density":
        return None
    parts = ["probes", *(str(row[n]) for n in ("probe", "probe_set", "functional", "parameters", "quantity") if row[n])]
    if not pd.isna(row["rho"]):
        parts.append(f"rho{row['rho']:g}")
    return "/".join(parts)


_PREFIX = {"steps": lambda row: "steps", "eval": _eval_prefix, "probes": _probe_prefix}
