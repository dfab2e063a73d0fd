"""Tables in the paper's layout, ours beside the published numbers, as CSV, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from sharpscope.analysis.claims.c10_alignment import CONTROLS
from sharpscope.analysis.claims.measures import TEMPERATURE, last_step
from sharpscope.analysis.figures.style import plain
from sharpscope.analysis.frames import natural
from sharpscope.analysis.statistics import Interval, mean_interval
from sharpscope.analysis.study import Study, most_common
from sharpscope.analysis.text import csv_text, escape_markdown
from sharpscope.config import control_label, method_names
from sharpscope.traces import Run, output_folder, write_atomic

PAPER_SCALE = "Qwen2.5-3B"
PUBLISHED: dict[str, dict[str, float]] = {"knights_knaves": {"grpo": 0.39, "grpo-sg": 0.63}}
"""Task → method → average accuracy as arXiv 2511.00066 gives it (K&K, 3 to 7 people, PAPER_SCALE)."""
NEIGHBORS = tuple(name for name in method_names() if name not in ("grpo", "grpo-sg"))


@dataclass(frozen=True)
class Cell:
    """Mean over seeds with its 95 % interval (None where the seeds are too few for one).

    Attributes:
        digits: printed after the point.
        signed: print a plus, too: a difference.
    """

    mean: float
    interval: Interval | None
    n: int
    digits: int = 3
    signed: bool = False

    def __str__(self) -> str:
        """`0.431 [0.402, 0.458]`, or `0.431 (n = 3)` where there is no interval."""
        if self.interval is None:
            return f"{self._text(self.mean)} (n = {self.n})"
        return f"{self._text(self.mean)} [{self._text(self.interval.low)}, {self._text(self.interval.high)}]"

    def _text(self, value: float) -> str:
        rounded = round(value, self.digits) + 0.0  # no −0.000
        return f"{rounded:{'+' if self.signed else ''}.{self.digits}f}"


@dataclass(frozen=True)
class Table:
    """A table: methods, or whatever `stub` names, down; columns across.

    Attributes:
        name: of its files.
        caption: what it shows, at which scale.
        rows: method → column → cell (or text).
        columns: in order.
        stub: what the rows are.
    """

    name: str
    caption: str
    rows: Mapping[str, Mapping[str, Cell | str]]
    columns: tuple[str, ...]
    stub: str = "method"

    def frame(self) -> pd.DataFrame:
        """Rows' name (`stub`), column, mean, low, high, kind of interval, n; text cells as `text`."""
        rows = []
        for method, cells in self.rows.items():
            for column in self.columns:
                cell = cells.get(column)
                if isinstance(cell, Cell):
                    ends = (None, None, None) if cell.interval is None else _ends(cell.interval)
                    rows.append((method, column, cell.mean, *ends, cell.n, ""))
                elif cell:
                    rows.append((method, column, None, None, None, None, None, cell))
        return pd.DataFrame(rows, columns=[self.stub, "column", "mean", "low", "high", "interval", "n", "text"])

    def markdown(self) -> str:
        """The table for people, its caption above."""
        head = [f"| {self.stub} | " + " | ".join(self.columns) + " |", "|---" * (len(self.columns) + 1) + "|"]
        body = [
            "| " + " | ".join([escape_markdown(m), *(escape_markdown(c.get(k, "–")) for k in self.columns)]) + " |"
            for m, c in self.rows.items()
        ]
        return "\n".join([self.caption, "", *head, *body]) + "\n"

    def latex(self) -> str:
        """A table environment with booktabs rules."""
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{_latex(self.caption)}}}"]
        lines += [r"\begin{tabular}{l" + "r" * len(self.columns) + "}", r"\toprule"]
        lines += [" & ".join([self.stub, *map(_latex, self.columns)]) + r" \\", r"\midrule"]
        for method, cells in self.rows.items():
            lines.append(" & ".join([_latex(method), *(_latex(str(cells.get(c, "–"))) for c in self.columns)]) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def paper_tables(study: Study) -> list[Table]:
    """Accuracy by number of people and method; controls; neighbors. Tables without a run are left out.

    All rows are of one setting (task, model, learning rate …), the one with the most runs: accuracy at TEMPERATURE at each
    run's last evaluation, held-out and unseen sizes, bootstrap intervals over seeds.
    """
    baseline, treatment = study.baseline, study.treatment
    keys = {n: study.setting_key(run) for n, run in sorted(study.finished.items()) if last_step(run) is not None}
    if not keys:
        return []
    common = most_common(list(keys.values()))
    chosen: dict[str, dict[Any, Run]] = {}
    for name, key in keys.items():
        run = study.finished[name]
        if key == common:
            chosen.setdefault(run.method, {}).setdefault(run.seed, run)
    first = next(run for by_seed in chosen.values() for run in by_seed.values())
    scale = _scale(first)
    controls = tuple(control_label(treatment, suffix) for suffix in (*CONTROLS, "mean-one"))
    wanted = {
        "accuracy": ("Accuracy by size and method", ()),
        "controls": ("Controls: the same weights without their alignment", controls),
        "neighbours": ("Neighbors", NEIGHBORS),
    }
    made = []
    for name, (title, methods) in wanted.items():
        there = [method for method in (baseline, treatment, *methods) if method in chosen]
        if there and (name == "accuracy" or set(there) - {baseline, treatment}):
            made.append(_table(name, title, {m: chosen[m] for m in there}, first.task, scale))
    return made


def write_tables(tables: Sequence[Table], out: str | Path) -> list[Path]:
    """Each table as table_<name>.csv, .md and .tex in `out`; returns the files.

    Raises:
        UserError: if the folder cannot be made.
    """
    folder = output_folder(out)
    paths = []
    for table in tables:
        texts = {"csv": csv_text(table.frame()), "md": table.markdown(), "tex": table.latex()}
        for ending, text in texts.items():
            paths.append(folder / f"table_{table.name}.{ending}")
            write_atomic(paths[-1], text)
    return paths


def by_level(run: Run) -> dict[str, tuple[float, int]]:
    """Level → (accuracy, prompts) of the last evaluation on held-out and unseen rows, at TEMPERATURE or else the highest."""
    rows = run.eval[run.eval["split"].isin(["heldout", "unseen"]) & (run.eval["level"] != "all")]
    rows = rows[rows["step"] == last_step(run)]
    if not len(rows):
        return {}
    heats = rows["temperature"]
    rows = (
        rows[(heats - TEMPERATURE).abs() < 1e-6]
        if ((heats - TEMPERATURE).abs() < 1e-6).any()
        else rows[heats == heats.max()]
    )
    result = {}
    for level, group in rows.groupby("level"):
        n = group["n"].to_numpy(dtype=float)
        result[str(level)] = (float(group["accuracy"].to_numpy(dtype=float) @ n / n.sum()), int(n.sum()))
    return result


def _table(name: str, title: str, methods: Mapping[str, Mapping[Any, Run]], task: str, scale: str) -> Table:
    measured = {m: [by_level(run) for run in runs.values()] for m, runs in methods.items()}
    levels = natural(level for runs in measured.values() for run in runs for level in run)
    published = PUBLISHED.get(task, {})
    paper = f"paper ({PAPER_SCALE})"
    rows: dict[str, dict[str, Cell | str]] = {}
    for method, runs in measured.items():
        cells: dict[str, Cell | str] = {"seeds": str(len(runs))}
        for level in levels:
            cells[level] = _cell([run[level][0] for run in runs if level in run])
        # as the paper averages: every size counts alike
        cells["average"] = _cell([sum(a for a, _ in run.values()) / len(run) for run in runs if run])
        if published:
            cells[paper] = f"{published[method]:.2f}" if method in published else "–"
        rows[method] = cells
    columns = ("seeds", *levels, "average", *((paper,) if published else ()))
    caption = (
        f"{title}. Task {task}, ours: {scale}; accuracy at temperature {TEMPERATURE:g} at the last evaluation, mean and 95 % "
        "bootstrap interval over seeds (percentile-t; BCa from 15 seeds)"
        + (f". Published: {PAPER_SCALE}, average over 3 to 7 people; not comparable in scale." if published else ".")
    )
    return Table(name, caption, rows, columns)


def _cell(values: list[float]) -> Cell | str:
    if not values:
        return "–"
    frame = pd.Series(values, dtype=float).to_numpy()
    return Cell(float(frame.mean()), mean_interval(frame), len(frame))


def _scale(run: Run) -> str:
    model = str((run.config.get("policy") or {}).get("model", "unknown model"))
    parameters = run.info.get("parameters")
    steps = len(run.steps)
    size = f", {parameters / 1e6:.3g} M parameters" if isinstance(parameters, int | float) else ""
    return f"{plain(model)}{size}, {steps} steps"


def _ends(interval: Interval) -> tuple[float, float, str]:
    return interval.low, interval.high, interval.kind


def _latex(text: str) -> str:
    marks = {char: f"\\{char}" for char in "%_&#${}"}
    marks |= {"\\": r"\textbackslash{}", "–": "--", "^": r"\^{}", "~": r"\~{}"}
    return "".join(marks.get(char, char) for char in text)
