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
    for (label, name), rows in estimates[estimates["probe_set"] == chosen].groupby(
        ["checkpoint", "functional"], sort=False
    ):
        values = {row["quantity"]: row for row in rows.to_dict("records")}
        texts = [_sharpest(values), _stability(values), *_rises(values)]
        lines += [f"{label}, {name}: {text}" for text in texts if text]
    if recorded is not None and len(recorded):
        for step in dict.fromkeys(estimates["step"]):
            if said := critical_text(recorded[recorded["step"] <= step]):
                lines.append(f"step {step}, last update measured: {said}")
    return lines


def _known(row: dict[str, Any] | None) -> bool:
    return row is not None and row["value"] is not None and math.isfinite(row["value"])


def _sharpest(values: dict[str, dict[str, Any]]) -> str:
    """The largest eigenvalue, with how sure it is."""
    row = values.get("largest")
    if row is None:
        return ""
    if not _known(row):
        return f"no curvature ({row['why']})"
    error = row["prompt_std_error"]
    sure = f" ± {error:.2g} over {row['prompts']:.0f} prompts" if math.isfinite(error) else ""
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


def _rises(values: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Sharpness with its saturation."""
    from sharpscope.traces import MAX_SATURATION

    radius = values.get("radius")
    if radius is not None:
        found = (
            f"radius {radius['value']:.3g}, chosen in {radius['samples']:.0f} losses"
            if _known(radius)
            else radius["why"]
        )
        yield found
    for kind in ("sam", "asam"):
        row = values.get(kind)
        if row is None or not _known(row):
            continue
        error = row["prompt_std_error"]
        sure = f" ± {error:.2g}" if math.isfinite(error) else ""
        share = row["saturation"]
        if math.isnan(share):
            first = values.get(f"{kind}_first_order")
            bound = f", {row['value'] / first['value']:.2f} of its first-order term" if first and first["value"] else ""
        elif share > MAX_SATURATION:
            bound = f", SATURATED: {share:.0%} of the largest possible rise, so it measures accuracy; use a smaller rho"
        else:
            bound = f", {share:.1%} of the largest possible rise (its value per unit of 1 − loss)"
        yield f"{kind.upper()} sharpness at radius {row['rho']:.3g}: {row['value']:.3g}{sure}{bound}"


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
