"""Runs in a notebook: small HTML tables, every value escaped (names and messages come from files)."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharpscope.traces.reader import Run, Runs


def run_html(run: Run) -> str:
    """One run: setting, status, rows of each table, last reward and accuracy, damaged parts."""
    from sharpscope.traces.schema import TABLES

    rows = {
        "method": run.method,
        "task": run.task,
        "seed": run.seed,
        "status": run.status,
        "folder": run.path,
        "steps": len(run.steps),
        "rows": ", ".join(f"{name} {run.rows(name):,}" for name in TABLES),
    }
    if len(run.steps):
        tail = run.steps.tail(max(1, len(run.steps) // 3))
        rows["reward, last third"] = f"{tail['reward_mean'].mean():.3f}"
        rows["accuracy, last third"] = f"{tail['accuracy'].mean():.1%}"
    rows |= {f"set aside: {part}": why for part, why in run.damaged.items()}
    body = "".join(f"<tr><th>{escape(str(key))}</th><td>{escape(str(value))}</td></tr>" for key, value in rows.items())
    return f"<table><caption>{escape(run.name)}</caption>{body}</table>"


def runs_html(runs: Runs) -> str:
    """One row a run, then the runs left out."""
    left_out = "".join(f"<p>left out: {escape(name)}: {escape(why)}</p>" for name, why in runs.skipped.items())
    return runs.table.to_html(index=False, escape=True) + left_out
