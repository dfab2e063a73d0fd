"""The one row that every surface probe ends in: a number with its error, its cost and whether to believe it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Estimate:
    """One estimate of the surface; a row of the `probes` table and its reason.

    Attributes:
        probe: which probe made it (`curvature`, `perturbation`, `rollouts`).
        quantity: what was estimated, e.g. `largest`, `trace`, `sam`.
        value: the estimate in the quantity's unit; NaN if it could not be had (`why` then says the reason).
        std_error: standard error over `samples` independent draws; NaN where the method has none.
        samples: random vectors, perturbations, iterations or rollouts used.
        rho: radius of a perturbation [parameters' L2 norm] or node of a spectral density; NaN if neither.
        converged: False: not to be believed, `why` says the reason. None: a direct evaluation, nothing to converge.
        residual: ‖Hv − λv‖ of an eigenpair, or the iteration's own residual; NaN if it has none.
        seed: seed of the estimate's own generator; None if nothing random enters.
        seconds: time spent.
        functional, probe_set, parameters: the scalar, the fixed prompts, and the group of parameters it is about.
        why: the reason when `converged` is False or the value is NaN; empty otherwise.
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
    why: str = ""


ESTIMATE_COLUMNS = tuple(field.name for field in fields(Estimate))


def labelled(estimates: Iterable[Estimate], **labels: str) -> list[Estimate]:
    """The estimates with `functional`, `probe_set` or `parameters` filled in."""
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


def frame(estimates: Iterable[Estimate], step: int = 0) -> pd.DataFrame:
    """The `probes` table of one step as a data frame, with the reasons in the column `why`."""
    import pandas as pd

    table = pd.DataFrame(columns(estimates, why=True))
    table.insert(0, "step", step)
    return table.astype(dict.fromkeys(("value", "std_error", "rho", "residual", "seconds"), "float64"))
