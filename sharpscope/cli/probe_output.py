"""What `sharpscope probe` prints and writes: sentences, values side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sharpscope.cli.console import print_json, print_sections, printable

if TYPE_CHECKING:
    import pandas as pd

    from sharpscope.probes import Measured

Found = Iterator[tuple[str, int, "Measured"]]
"""Label of the checkpoint, its step (0 for a model), and what was measured."""


def report(found: Found, out: Path, recorded: pd.DataFrame | None, json: bool = False) -> None:
    """Write rows as they are found; then say what they mean, and print them side by side, or both as JSON."""
    import pandas as pd

    from sharpscope.analysis.sections import Section
    from sharpscope.probes import frame, problems

    tables: list[pd.DataFrame] = []
    for label, step, measured in found:
        new = frame(measured.estimates, step)
        new.insert(1, "checkpoint", label)
        tables.append(new)
        out.mkdir(parents=True, exist_ok=True)
        aside = out / "probes.parquet.tmp"
        pd.concat(tables, ignore_index=True).to_parquet(aside, index=False)
        aside.replace(out / "probes.parquet")
        for problem in problems(measured.estimates):
            typer.echo(f"  not reliable: {printable(f'{label}: {problem}')}", err=True)
    if tables:
        estimates = pd.concat(tables, ignore_index=True)
        said = sentences(estimates, recorded)
        if json:
            rows = estimates.replace({pd.NA: None}).to_dict("records")
            print_json({"sentences": said, "rows": rows, "written": str(out)})
        else:
            typer.echo("\n".join(map(printable, said)))
            print_sections([Section("", _table(estimates))])
    typer.echo(f"written to {out}/: {', '.join(sorted(path.name for path in out.iterdir()))}", err=json)


def sentences(estimates: pd.DataFrame, recorded: pd.DataFrame | None = None) -> list[str]:
    """What the estimates say, a sentence or two for each checkpoint and loss, on training prompts where there are some.

    Args:
        estimates: rows of the `probes` table with a column `checkpoint`.
        recorded: the `probes` table of the run, for its critical sharpness; None without one.
    """
    from sharpscope.analysis.frames import critical_text

    lines = []
    sets = estimates["probe_set"].unique()
    chosen = next((name for name in sets if "/train@" in name), sets[0])
    first = estimates[estimates["probe_set"] == chosen]
    lines += [line for name, rows in first.groupby("functional", sort=False) for line in _compared(str(name), rows)]
    for (label, name), rows in first.groupby(["checkpoint", "functional"], sort=False):
        values = {row["quantity"]: row for row in rows.to_dict("records")}
        texts = [_sharpest(values), _stability(values), *_rises(values), _radius(values)]
        lines += [f"{label}, {name}: {text}" for text in texts if text]
    if recorded is not None and len(recorded):
        for step in dict.fromkeys(estimates["step"]):
            if said := critical_text(recorded[recorded["step"] <= step]):
                lines.append(f"step {step}, last update measured: {said}")
    return lines


def _known(row: dict[Any, Any] | None) -> bool:
    return row is not None and row["value"] is not None and math.isfinite(row["value"])


def _compared(name: str, rows: pd.DataFrame) -> Iterator[str]:
    """How many times as sharp as the first checkpoint each other one is, on the same prompts and at the same radius."""
    from sharpscope.traces import MAX_SATURATION

    for quantity, title in (("sam", "SAM sharpness"), ("largest", "sharpest direction")):
        same = [row for row in rows[rows["quantity"] == quantity].to_dict("records") if _known(row)]
        same = [row for row in same if not row["saturation"] > MAX_SATURATION]
        for row in same[1:] if same and same[0]["value"] > 0 else ():
            one, other = (f"{r['checkpoint']} {r['value']:.3g}{_error(r)}" for r in (row, same[0]))
            yield f"{name}, {title}: {one}, {row['value'] / same[0]['value']:.3g} times that of {other}"


def _error(row: dict[Any, Any]) -> str:
    return f" ± {row['prompt_std_error']:.2g}" if math.isfinite(row["prompt_std_error"]) else ""


def _sharpest(values: dict[str, dict[str, Any]]) -> str:
    """The largest eigenvalue, with how sure it is."""
    row = values.get("largest")
    if row is None:
        return ""
    if not _known(row):
        return f"no curvature ({row['why']})"
    sure = f"{_error(row)} over {row['prompts']:.0f} prompts" if _error(row) else ""
    doubt = "" if row["converged"] else "; NOT converged"
    smallest = values.get("smallest")
    negative = f"; smallest {smallest['value']:.3g}" if smallest is not None and _known(smallest) else ""
    limit = f"; plain gradient descent is stable along it below lr = {2 / row['value']:.2g}" if row["value"] > 0 else ""
    return f"sharpest direction: eigenvalue {row['value']:.4g}{sure} (residual {row['residual']:.1g}{doubt}){negative}{limit}"


def _stability(values: dict[str, dict[str, Any]]) -> str:
    """Whether AdamW's step is beyond what the sharpest direction allows."""
    row, limit = values.get("preconditioned_largest"), values.get("preconditioned_threshold")
    if row is None or limit is None or not _known(row) or row["value"] <= 0:
        return ""
    factor = limit["value"] / row["value"]
    sure = "" if row["converged"] else " (not converged)"
    if factor >= 1:
        return f"AdamW's step is within its stable range by a factor of {factor:.3g} along the sharpest direction{sure}"
    return f"AdamW's step is BEYOND its stable range by a factor of {1 / factor:.3g} along the sharpest direction{sure}"


def _radius(values: dict[str, dict[str, Any]]) -> str:
    """The radius that was chosen for the model, or why none was."""
    row = values.get("radius")
    if row is None:
        return ""
    return f"radius {row['value']:.3g}, chosen from losses at {row['samples']:.0f} radii" if _known(row) else row["why"]


def _rises(values: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Sharpness with its saturation."""
    from sharpscope.traces import MAX_SATURATION

    for kind in ("sam", "asam"):
        row = values.get(kind)
        if row is None or not _known(row):
            continue
        share = row["saturation"]
        if math.isnan(share):
            first = values.get(f"{kind}_first_order")
            bound = f", {row['value'] / first['value']:.2f} of its first-order term" if first and first["value"] else ""
        elif share > MAX_SATURATION:
            bound = f", SATURATED: {share:.0%} of the largest possible rise, so it measures accuracy; use a smaller rho"
        else:
            bound = f", {share:.1%} of the largest possible rise (its value per unit of 1 − loss)"
        yield f"{kind.upper()} sharpness at radius {row['rho']:.3g}: {row['value']:.3g}{_error(row)}{bound}"


def _table(estimates: pd.DataFrame) -> pd.DataFrame:
    """The values, a column for each checkpoint; of one checkpoint with their errors."""
    import pandas as pd

    from sharpscope.analysis.frames import split_of

    several = estimates["checkpoint"].nunique() > 1
    rows = []
    for (name, functional, quantity), same in estimates.groupby(["probe_set", "functional", "quantity"], sort=False):
        first = same.iloc[0]
        row = {"loss": functional or "gradient", "prompts": split_of(str(name)), "quantity": quantity}
        row |= {"rho": first["rho"]}
        if several:
            row |= {label: _number(value) for label, value in zip(same["checkpoint"], same["value"], strict=True)}
        else:
            errors = {"± s.e.": "std_error", "± prompts": "prompt_std_error", "saturation": "saturation"}
            row |= {"value": _number(first["value"])} | {title: first[column] for title, column in errors.items()}
        good = "yes" if same["converged"].ne(False).all() else "NO"
        rows.append(row | {"conv.": "–" if same["converged"].isna().all() else good})
    return pd.DataFrame(rows)


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.4g}"
