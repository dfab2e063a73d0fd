"""One run at a glance, for a terminal."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sharpscope.analysis.frames import natural, with_pooled
from sharpscope.analysis.statistics import accuracy_interval
from sharpscope.analysis.studies import last_step
from sharpscope.analysis.text import printable
from sharpscope.analysis.weight_curve import shaping_of
from sharpscope.traces import Run

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40
SATURATED = 0.95
CURVES = {
    "reward_mean": "reward",
    "accuracy": "accuracy",
    "grad_norm": "gradient norm",
    "entropy_mean": "entropy [nats]",
    "completion_length_mean": "length [tokens]",
    "truncated_fraction": "truncated [share]",
}


def sparkline(values: np.ndarray, width: int = WIDTH) -> str:
    """Values as at most `width` block characters from the smallest to the largest; a dot where it is not a number."""
    array = np.asarray(values, dtype=float)
    parts = np.array_split(array, min(width, len(array))) if len(array) else []
    means = np.array([part[np.isfinite(part)].mean() if np.isfinite(part).any() else np.nan for part in parts])
    finite = means[np.isfinite(means)]
    if finite.size == 0:
        return "·" * len(means)
    low, high = finite.min(), finite.max()
    height = np.full(len(means), 3.0) if high == low else (means - low) / (high - low) * (len(BLOCKS) - 1)
    return "".join("·" if math.isnan(h) else BLOCKS[round(h)] for h in height)


def show(run: Run) -> RenderableType:
    """Setting, curves, last evaluation, weights, events and cost of a run, to be printed by rich.

    Text from files is printed as it is: markup in it has no effect, control characters are replaced.
    """
    parts: list[RenderableType] = [_head(run)]
    if run.steps.empty:
        parts.append(Text("No step is recorded yet."))
    else:
        parts += [_curves(run.steps.sort_values("step")), *_weights(run), _cost(run)]
    if len(run.eval):
        parts.append(_evaluation(run))
    parts += _events(run)
    parts += [Text(f"set aside: {printable(part)}: {printable(why)}", "red") for part, why in run.damaged.items()]
    return Group(*parts)


def _head(run: Run) -> RenderableType:
    config = run.config
    policy, optimizer, rollout = (config.get(key) or {} for key in ("policy", "optimizer", "rollout"))
    facts = {
        "method": run.method,
        "task": run.task,
        "model": policy.get("model"),
        "parameters": run.info.get("parameters"),
        "seed": run.seed,
        "steps": f"{last_step(run)} of {config.get('steps', '?')}",
        "learning rate": optimizer.get("lr"),
        "group size": rollout.get("group_size"),
        "device": run.info.get("device"),
        "started": run.info.get("started"),
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    for key, value in facts.items():
        if value is not None:
            shown = f"{value:,}" if isinstance(value, int) and key == "parameters" else printable(value)
            grid.add_row(key, Text(shown))
    return Panel(grid, title=Text(f"{printable(run.name)} · {run.status}"), expand=False)


def _curves(steps: pd.DataFrame) -> Table:
    table = Table("by step", "first third", "", "last third", box=None, pad_edge=False)
    third = max(1, len(steps) // 3)
    for column, name in CURVES.items():
        values = pd.to_numeric(steps[column], errors="coerce").to_numpy(dtype=float)
        if np.isfinite(values).any():
            table.add_row(
                Text(name), _number(values[:third].mean()), sparkline(values), _number(values[-third:].mean())
            )
    return table


def _weights(run: Run) -> list[RenderableType]:
    """How the weights lie in their bounds at the last step, and a warning where the method is GRPO in disguise."""
    last = run.steps.sort_values("step").iloc[-1]
    kind = shaping_of(run.info).get("kind", "uniform")
    if kind == "uniform" or pd.isna(last["weight_mean"]):
        return []
    line = f"weights ({printable(kind)}): mean {last['weight_mean']:.3f}, "
    line += f"{last['weight_min']:.3f} to {last['weight_max']:.3f}"
    low, high = last["weight_saturation_low"], last["weight_saturation_high"]
    if pd.notna(low) and pd.notna(high):
        line += f"; on the lower bound {low:.0%}, on the upper {high:.0%}"
        if max(low, high) > SATURATED:
            return [
                Text(line),
                Text("almost every weight sits on one bound: this is GRPO up to the gradient's scale", "yellow"),
            ]
    return [Text(line)]


def _cost(run: Run) -> RenderableType:
    parts = {name: float(run.steps[f"{name}_s"].sum()) for name in ("generation", "training", "recording")}
    total = sum(parts.values())
    text = f"cost: {total / len(run.steps):.2f} s a step, {total / 60:.1f} min in all"
    if total > 0:
        text += " (" + ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items()) + ")"
    memory = peak_memory(run)
    if memory:
        text += f"; peak memory {memory}"
    return Text(text)


def peak_memory(run: Run) -> str:
    """The most memory that a run held, by kind: `process 547 MiB`; empty where it was not recorded."""
    found = run.info.get("peak_memory_bytes")
    kinds = found if isinstance(found, dict) else {"process": found}
    return ", ".join(f"{kind} {size / 2**20:,.0f} MiB" for kind, size in kinds.items() if isinstance(size, int | float))


def _evaluation(run: Run) -> RenderableType:
    """Accuracy of the last evaluation by split and level, with 95 % intervals over prompts."""
    rows = run.eval[run.eval["step"] == run.eval["step"].max()]
    pooled = with_pooled(rows, "accuracy")
    intervals = {
        (row.split, row.level, row.temperature): accuracy_interval(row.accuracy, row.std_error, row.n, row.k).percent()
        for row in rows.itertuples()
    }
    title = Text(f"evaluation at step {int(rows['step'].max())}: accuracy [95 % interval over prompts, %]")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("split")
    table.add_column("temperature")
    levels = natural(pooled["level"])
    for level in levels:
        table.add_column(Text(printable(level)), justify="right")
    for (split, temperature), group in pooled.groupby(["split", "temperature"]):
        values = dict(zip(group["level"], group["value"], strict=True))
        cells = []
        for level in levels:
            interval = intervals.get((split, level, temperature), "")
            cells.append(Text(f"{values[level]:.1%} {interval}".rstrip() if level in values else "–"))
        table.add_row(Text(printable(split)), "greedy" if temperature == 0 else f"{temperature:g}", *cells)
    return table


def _events(run: Run, most: int = 6) -> list[RenderableType]:
    loud = run.events[run.events["severity"] != "info"]
    lines: list[RenderableType] = []
    for rule, events in loud.groupby("rule"):
        last = events.sort_values("step").iloc[-1]
        text = f"{printable(rule)} × {len(events)}, last at step {last['step']}: {printable(last['message'])}"
        lines.append(Text(text, "red" if last["severity"] == "error" else "yellow"))
    hidden = len(lines) - most
    return [*lines[:most], Text(f"and {hidden} rules more")] if hidden > 0 else lines


def _number(value: float) -> str:
    return "not a number" if math.isnan(value) else f"{value:.3g}"
