"""Draw the fourth study's picture from its result tables: python experiments/studies/4/picture.py, light and dark."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sharpscope.analysis.plots.style import colors, styled

HERE = Path(__file__).parent
IMAGES = HERE.parents[2] / "docs" / "images"
_SPEC = importlib.util.spec_from_file_location("verdicts", HERE / "verdicts.py")
assert _SPEC is not None and _SPEC.loader is not None
verdicts = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(verdicts)

SHOWN = {
    "published": "GRPO-SG, published",
    "likely": "1 + 3π",
    "reversed": "4 − 3π",
    "shuffled": "1 + 3π, shuffled",
}


def cells(text: str) -> list[str]:
    """The cells of a row of a Markdown table."""
    return [cell.strip() for cell in text.strip("| ").split("|")]


def slopes() -> pd.DataFrame:
    """H1's slope and its parts, by AdamW: mean and half of the 95 % interval."""
    lines = [text for text in verdicts.d3() if text.startswith("| adamw, ")]
    wanted = {
        "adamw, all of it": "all tokens",
        "adamw, between": "right against wrong\ncompletions",
        "adamw, within right": "within right\ncompletions",
        "adamw, within wrong": "within wrong\ncompletions",
    }
    rows = [cells(text) for text in lines]
    return pd.DataFrame(
        [
            {"part": wanted[row[0]], "mean": float(row[1]), "half": float(row[2].strip("± "))}
            for row in rows
            if row[0] in wanted
        ]
    )


def draw_slopes(axes: Axes) -> None:
    """H1: what weighting unlikely tokens more does to sharpness, and where it comes from."""
    frame = slopes()[::-1]
    places = np.arange(len(frame))
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.errorbar(frame["mean"], places, xerr=frame["half"], fmt="o", capsize=3, color=colors()[0])
    axes.set_yticks(places, frame["part"])
    axes.set_xlabel("change of SAM sharpness by one step\n[% of it, weights 1 + 0.3·z(1 − π)]")
    axes.grid(axis="y", visible=False)
    axes.set_title("Unlikely tokens weighted more", loc="left")


def draw_prediction(axes: Axes) -> None:
    """Predicted against measured changes of the weightings, AdamW."""
    rows = pd.read_parquet(HERE / "results" / "D3-weightings.parquet")
    chosen = (rows["outcome"] == "sharpness") & (rows["optimizer"] == "adamw")
    rows = rows[chosen & (rows["task"] == "math")]
    low, high = -12.0, 8.0
    axes.plot([low, high], [low, high], color="gray", linewidth=0.8)
    for (name, label), color in zip(reversed(SHOWN.items()), colors(), strict=False):
        some = rows[rows["weighting"] == name]
        x, y = (100 * some[part] / some["plain"] for part in ("predicted", "measured"))
        axes.plot(x, y, ".", color=color, markersize=3, alpha=0.7, label=label)
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.set_xlabel("predicted by the effects of its tokens\n[% of the sharpness]")
    axes.set_ylabel("measured, update made again [%]")
    axes.legend(markerscale=2.5, handletextpad=0.2)
    axes.set_title("Weightings of single steps", loc="left")


def draw(path: Path, style: str) -> None:
    """Save the picture in one style."""
    with styled(style):
        figure = Figure(figsize=(8.2, 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        draw_slopes(left)
        draw_prediction(right)
        figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw(IMAGES / "study4-light.png", "notebook")
    draw(IMAGES / "study4-dark.png", "dark")
