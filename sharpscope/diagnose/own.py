"""The table of a run that sharpscope recorded, with what only its events and rollouts say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from sharpscope.diagnose.tables import NOT_FINITE, Table
from sharpscope.diagnose.trainers import SHARPSCOPE, forms, keys_of
from sharpscope.errors import UserError
from sharpscope.rules.table import RULES


def own_run(folder: Path) -> Table:
    """The steps of a recorded run.

    Raises:
        UserError: the run has no recorded step.
    """
    from sharpscope.traces import load_run

    run = load_run(folder)
    steps = run.steps.copy()
    if not len(steps):
        raise UserError(f"{folder}: the run has no recorded step")
    _add_dead_groups(steps, run.frame("rollouts", columns=["step", "group"]))
    evaluations = run.eval
    if len(evaluations):
        heldout = evaluations[evaluations["split"] == "heldout"]
        greedy = heldout[heldout["temperature"] == 0]
        accuracy = greedy.groupby("step")["accuracy"].mean()
        steps["eval_accuracy_greedy"] = accuracy.reindex(steps["step"]).to_numpy()
    if len(run.events):
        _add_events(steps, run.events)
    numbers = steps.select_dtypes("number").astype(float)
    table = Table()
    for row in numbers.to_dict("records"):
        table.add({str(key): value for key, value in row.items() if not np.isnan(value)})
    if run.status in ("died", "failed", "interrupted"):
        table.error = f"status {run.status} (run.json)"
    return table


def _add_dead_groups(steps: pd.DataFrame, rollouts: pd.DataFrame) -> None:
    """The share of groups whose rewards are all equal, where the number of groups is known."""
    if "zero_std_groups" not in steps or not len(rollouts) or rollouts["group"].isna().all():
        return
    by_step = rollouts.groupby("step")["group"].nunique()
    groups = by_step.reindex(steps["step"]).to_numpy(float)
    groups = np.where(np.isnan(groups), np.nanmedian(groups), groups)  # as many as usual
    steps["dead_groups"] = steps["zero_std_groups"].astype(float) / groups


def _add_events(steps: pd.DataFrame, events: pd.DataFrame) -> None:
    """What only the health rules saw: gradients that are not finite, and the values at which rules applied."""
    broken = events.loc[events["rule"] == "non_finite", "step"]
    steps.loc[steps["step"].isin(broken), "grad_norm"] = NOT_FINITE
    judged = events[events["rule"].isin(RULES)]
    for name, rows in judged.groupby("rule"):
        quantity = RULES[str(name)].quantities[0]
        if not keys_of(SHARPSCOPE, quantity, forms(steps.columns)):
            values = rows.groupby("step")["value"].last()
            steps[quantity] = values.reindex(steps["step"]).to_numpy()
