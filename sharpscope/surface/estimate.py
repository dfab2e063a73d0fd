"""Rows of the `probes` table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from sharpscope.errors import UserError, first_line
from sharpscope.traces.schema import MAX_SATURATION

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """One estimate of a property of the loss surface: a row of the `probes` table, whose columns schema.yaml defines."""

    probe: str  # loss, curvature, perturbation, critical, update or gradient
    quantity: str  # such as `largest`, `trace` or `sam`
    value: float  # NaN if it is not available (see `why`)
    std_error: float = math.nan  # over `samples` independent draws
    samples: int | None = None  # random vectors, perturbations, iterations or completions
    rho: float = math.nan
    # False if the estimate is not reliable (see `why`); None for direct evaluations
    converged: bool | None = None
    residual: float = math.nan
    seed: int | None = None
    seconds: float = 0.0
    functional: str = ""
    probe_set: str = ""
    parameters: str = "all"
    prompts: int | None = None
    prompt_std_error: float = math.nan
    low: float = math.nan  # 95 % interval over prompts of what has no standard error
    high: float = math.nan
    ceiling: float = math.nan
    saturation: float = math.nan
    why: str = ""  # reason for `converged = False` or a NaN value
    prompt_values: tuple[float, ...] = ()  # with mean `value`; rows of the `probe_prompts` table


_LABELS = ("probe_set", "functional", "parameters", "quantity", "rho", "seed")


def attempted(probe: str, quantity: str, measure: Callable[[], list[Estimate]]) -> list[Estimate]:
    """What `measure` returns; where it fails, one row without value that says why, so that other measures go on."""
    try:
        return measure()
    except (
        UserError,
        ArithmeticError,
        RuntimeError,
    ) as problem:  # RuntimeError: PyTorch's, as for lack of memory
        return [
            Estimate(
                probe,
                quantity,
                math.nan,
                converged=False,
                why=f"left out: {first_line(problem)}",
            )
        ]


def with_prompts(estimate: Estimate, values: Tensor | None) -> Estimate:
    """The estimate with one value for each prompt, (k,), and their standard error; unchanged for None."""
    if values is None:
        return estimate
    count = len(values)
    error = float(values.std()) / math.sqrt(count) if count > 1 else math.nan
    return replace(
        estimate,
        prompts=count,
        prompt_std_error=error,
        prompt_values=tuple(values.tolist()),
    )


def labeled(estimates: Iterable[Estimate], **labels: str | int) -> list[Estimate]:
    """Copies of the estimates with `functional`, `probe_set`, `parameters` or `prompts` set."""
    return [replace(estimate, **labels) for estimate in estimates]  # type: ignore[arg-type]


def problems(estimates: Iterable[Estimate]) -> tuple[str, ...]:
    """One line for each estimate that did not converge, is NaN or is saturated."""
    lines = []
    for e in estimates:
        name = f"{e.functional} {e.quantity}{'' if math.isnan(e.rho) else f' at rho {e.rho:g}'}"
        if e.converged is False or math.isnan(e.value):
            lines.append(f"{name}: {e.why or 'not finite'}")
        elif e.saturation > MAX_SATURATION:
            lines.append(
                f"{name}: saturated, {e.saturation:.0%} of the largest possible rise (limit {MAX_SATURATION:.0%}): it measures "
                "the accuracy more than the sharpness; use a smaller rho"
            )
    return tuple(lines)


def columns(estimates: Iterable[Estimate]) -> dict[str, list[object]]:
    """Estimates as columns of the `probes` table, without `step`; NaN becomes None."""
    rows = list(estimates)
    names = [field.name for field in fields(Estimate) if field.name not in ("why", "prompt_values")]
    return {name: [_cell(getattr(row, name)) for row in rows] for name in names}


def prompt_columns(estimates: Iterable[Estimate]) -> dict[str, list[object]]:
    """The values by prompt as columns of the `probe_prompts` table, without `step`; empty lists if there are none."""
    columns: dict[str, list[object]] = {name: [] for name in (*_LABELS, "prompt", "value")}
    for estimate in estimates:
        count = len(estimate.prompt_values)
        for name in _LABELS:
            columns[name] += [_cell(getattr(estimate, name))] * count
        columns["prompt"] += range(count)
        columns["value"] += estimate.prompt_values
    return columns


def _cell(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else value
