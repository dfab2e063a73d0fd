"""Rows of the `probes` table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from torch import Tensor


def html_table(caption: str, rows: Mapping[str, str]) -> str:
    """A table of two columns for Jupyter."""
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table><caption>{escape(caption)}</caption>{body}</table>"


@dataclass(frozen=True)
class Estimate:
    """One estimate of a property of the loss surface: a row of the `probes` table.

    Attributes:
        probe: the probe: `loss`, `curvature`, `perturbation`, `slice`, `gradient` or `rollouts`.
        quantity: the estimated quantity, such as `largest`, `trace` or `sam`.
        value: the estimate in the quantity's unit; NaN if it is not available (see `why`).
        std_error: standard error over `samples` independent draws; NaN if the method has none.
        samples: number of random vectors, perturbations, iterations or completions.
        rho: radius of a perturbation or distance of a slice [parameters' L2 norm], or node of a spectral density; NaN if none.
        converged: False if the estimate is not reliable (see `why`); None for direct evaluations.
        residual: ‖Hv − λv‖ of an eigenpair, or the residual of the iteration; NaN if none.
        seed: seed of the random numbers; None if there are none.
        seconds: wall-clock time.
        functional: name of the probed loss.
        probe_set: name of the prompts.
        parameters: group of parameters, or `all`.
        prompts: number of prompts in the probed loss; None if not known.
        prompt_std_error: standard error over prompts, as if the prompts were a random sample and all else fixed; NaN if not known.
        prompt_values: one value for each prompt, with mean `value` and standard error of the mean `prompt_std_error`; rows of the
            `probe_prompts` table.
        why: reason for `converged = False` or a NaN value; empty otherwise.
    """

    probe: str
    quantity: str
    value: float
    std_error: float = math.nan
    samples: int | None = None
    rho: float = math.nan
    converged: bool | None = None
    residual: float = math.nan
    seed: int | None = None
    seconds: float = 0.0
    functional: str = ""
    probe_set: str = ""
    parameters: str = "all"
    prompts: int | None = None
    prompt_std_error: float = math.nan
    why: str = ""
    prompt_values: tuple[float, ...] = ()


ESTIMATE_COLUMNS = tuple(field.name for field in fields(Estimate) if field.name != "prompt_values")
_LABELS = ("probe_set", "functional", "parameters", "quantity", "rho", "seed")


def with_prompts(estimate: Estimate, values: Tensor | None) -> Estimate:
    """The estimate with one value for each prompt, (k,), and their standard error; unchanged for None."""
    if values is None:
        return estimate
    count = len(values)
    error = float(values.std()) / math.sqrt(count) if count > 1 else math.nan
    return replace(estimate, prompts=count, prompt_std_error=error, prompt_values=tuple(values.tolist()))


def labeled(estimates: Iterable[Estimate], **labels: str | int) -> list[Estimate]:
    """Copies of the estimates with `functional`, `probe_set`, `parameters` or `prompts` set."""
    return [replace(estimate, **labels) for estimate in estimates]  # type: ignore[arg-type]


def problems(estimates: Iterable[Estimate]) -> tuple[str, ...]:
    """One line for each estimate that did not converge or is NaN; ratios are left out, since their value is listed."""
    return tuple(
        f"{e.functional} {e.quantity}{'' if math.isnan(e.rho) else f' at rho {e.rho:g}'} ({e.parameters}): "
        f"{e.why or 'not finite'}"
        for e in estimates
        if not e.quantity.endswith("_ratio") and (e.converged is False or math.isnan(e.value))
    )


def columns(estimates: Iterable[Estimate], *, why: bool = False) -> dict[str, list[Any]]:
    """Estimates as columns of the `probes` table, without `step`; NaN becomes None, which the table stores as null.

    Args:
        estimates: one row each.
        why: also give the reasons, which are not a column of that table.
    """
    rows = list(estimates)

    def cell(value: Any) -> Any:
        return None if isinstance(value, float) and math.isnan(value) else value

    names = [name for name in ESTIMATE_COLUMNS if why or name != "why"]
    return {name: [cell(getattr(row, name)) for row in rows] for name in names}


def prompt_columns(estimates: Iterable[Estimate]) -> dict[str, list[Any]]:
    """The values by prompt as columns of the `probe_prompts` table, without `step`; empty lists if there are none."""
    columns: dict[str, list[Any]] = {name: [] for name in (*_LABELS, "prompt", "value")}
    for estimate in estimates:
        count = len(estimate.prompt_values)
        for name in _LABELS:
            cell = getattr(estimate, name)
            columns[name] += [None if isinstance(cell, float) and math.isnan(cell) else cell] * count
        columns["prompt"] += range(count)
        columns["value"] += estimate.prompt_values
    return columns


def frame(estimates: Iterable[Estimate], step: int = 0) -> pd.DataFrame:
    """The `probes` table of one step as a data frame, with the reasons in the column `why`."""
    import pandas as pd

    table = pd.DataFrame(columns(estimates, why=True))
    table.insert(0, "step", step)
    return table.astype(
        dict.fromkeys(("value", "std_error", "rho", "residual", "seconds", "prompt_std_error"), "float64")
    )
