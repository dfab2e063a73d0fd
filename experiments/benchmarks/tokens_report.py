"""The token benchmark on the screen and as files: a table and the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TABLES = ("embedded policy", "Qwen2.5-0.5B", "Qwen2.5-3B")
HEADINGS = ("what", "setting", "ours [s]", "baseline [s]", "ratio", "required", "hoped", "note")


def show(found: dict[str, Any], console: Console | None = None) -> None:
    """Print the tables."""
    console = console or Console()
    for name in TABLES:
        if name not in found:
            continue
        table = Table(*HEADINGS, title=f"{name}, {found['threads']} threads")
        for row in found[name]:
            table.add_row(*_cells(row))
        console.print(table)
    console.print(f"GPU: {found['gpu']}", markup=False)


def _cells(row: dict[str, Any]) -> list[str]:
    sign = ">=" if row["unit"] == "x faster" else "<="
    return [
        row["what"],
        row["setting"],
        f"{row['seconds']:.3f}",
        f"{row['baseline']:.3f}",
        f"{row['ratio']:.2f} {row['unit']}",
        *("" if row[asked] is None else f"{sign} {row[asked]:g}" for asked in ("required", "hoped")),
        row["note"],
    ]


def write(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write tokens.json and tokens.md; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, text = folder / "tokens.json", folder / "tokens.md"
    numbers.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    lines = [f"# What a token's gradient costs ({found['threads']} threads, torch {found['torch']})", ""]
    if found["quick"]:
        lines += ["A smoke run: the sizes are too small for the numbers to mean anything.", ""]
    for name in TABLES:
        if name in found:
            lines += [f"## {name}", "", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
            lines += ["| " + " | ".join(_cells(row)) + " |" for row in found[name]] + [""]
    lines += [
        "Baseline: for norms, a loop of `autograd.grad` over a kept graph, timed on a sample of tokens in the same run; for",
        "attribution, a forward pass to the log-probabilities; for recording, the whole step; for TokenStats, log-softmax and",
        f"gather. Times are medians of {found['repeats']}.",
        "The default recording of tokens: tables at every step, norms and shares at their default schedule.",
        "",
        f"GPU: {found['gpu']}.",
        "",
    ]
    text.write_text("\n".join(lines), encoding="utf-8")
    return [numbers, text]
