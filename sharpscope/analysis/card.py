"""The picture of one run to share, 1200 × 630 pixels: `show RUN --card card.png`."""

from __future__ import annotations

import warnings
from pathlib import Path
from textwrap import fill, wrap

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.patches import Circle

from sharpscope.analysis.curves import run_values
from sharpscope.analysis.effects import leading_effects
from sharpscope.analysis.events import events_of
from sharpscope.analysis.headline import largest_update, moved_tokens
from sharpscope.analysis.measures import STEPS
from sharpscope.analysis.plots.style import GRAY, colors, log_axis, plain, save_as, styled
from sharpscope.analysis.sections import Marked
from sharpscope.analysis.spikes import gradient_scores, spike_scores
from sharpscope.analysis.study import Study
from sharpscope.analysis.summary import facts_of, numbers, verdict_parts
from sharpscope.analysis.text import percent
from sharpscope.errors import UserError
from sharpscope.traces import Run

SIZE = (12.0, 6.3)
"""Inches; with 100 pixels to an inch the size that sites show of a link."""
FONTS = ("DejaVu Sans", "Noto Sans CJK JP")
"""Those that are installed are used, the first that has a letter."""
TOKENS = 6


def write_card(run: Run, file: Path) -> Path:
    """Write the card of a run to a .png or .svg.

    Raises:
        UserError: another ending, no step is recorded, or `file` cannot be written.
    """
    if file.suffix not in (".png", ".svg"):
        raise UserError(f"--card {file}: the picture is a .png or an .svg")
    if run.steps.empty:
        raise UserError(f"--card: no step is recorded yet in {run.name}")
    there = [name for name in FONTS if name in get_font_names()]
    with (
        styled("dark"),
        mpl.rc_context({"font.family": there, "savefig.dpi": 100}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        return save_as(card(run), file, dpi=100)


def card(run: Run) -> Figure:
    """Name and verdict, three numbers, reward and gradient norm by step, and the leading tokens in their colors."""
    figure = Figure(figsize=SIZE)
    draw_mark(figure.add_axes((0.035, 0.86, 0.0525, 0.1)))
    figure.text(
        0.1,
        0.905,
        plain(run.name, 40),
        size=25,
        weight="bold",
    )
    facts = facts_of(run).split("\n")[0].split(", started")[0]
    figure.text(
        0.1,
        0.868,
        plain(facts, 104),
        size=11.5,
        color=GRAY,
    )
    verdict, details = verdict_parts(run)
    lines = wrap(plain(verdict, 170), 92)
    figure.text(0.035, 0.83, "\n".join(lines), size=16, va="top")
    below = 0.81 - 0.043 * len(lines)
    figure.text(
        0.035,
        below,
        fill(plain(details, 280), 145),
        size=10.5,
        va="top",
    )
    for at, one in enumerate(numbers(run)[:3]):
        x = 0.035 + 0.24 * at
        figure.text(
            x,
            0.645,
            plain(one.title, 32),
            size=10.5,
            color=GRAY,
        )
        figure.text(
            x,
            0.575,
            one.last,
            size=26,
            weight="bold",
            color=colors()[0],
        )
        figure.text(x + 0.02 + 0.016 * len(one.last), 0.58, one.detail, size=11.5)
    draw_course(figure.add_axes((0.06, 0.19, 0.86, 0.34)), run)
    draw_tokens(figure, run)
    figure.text(
        0.965,
        0.035,
        "sharpscope",
        size=12,
        color=GRAY,
        ha="right",
    )
    return figure


def draw_mark(axis: Axes) -> None:
    """The project's mark: a sharp peak under a lens."""
    axis.set(xlim=(0, 40), ylim=(40, 0))
    axis.axis("off")
    axis.add_patch(Circle((20, 20), 17, fill=False, color=colors()[1], linewidth=3))
    axis.plot(
        [6, 13.5, 20, 26.5, 34],
        [28, 28, 7, 28, 28],
        color=colors()[0],
        linewidth=3,
    )


def draw_course(axis: Axes, run: Run) -> None:
    """Reward (left) and gradient norm (right) by step, with the largest spikes named."""
    values = run_values(run).dropna(subset=["value"])
    other = axis.twinx()
    for side, name, color in (
        (axis, STEPS["reward_mean"].name, colors()[0]),
        (other, STEPS["grad_norm"].name, colors()[1]),
    ):
        rows = values[values["quantity"] == name].sort_values("step")
        side.plot(
            rows["step"],
            rows["value"],
            color=color,
            linewidth=2 if side is axis else 1.3,
        )
        side.set_ylabel(name, color=color)
        side.tick_params(axis="y", colors=color)
    scores = gradient_scores(run)
    if len(scores):  # a gradient that is not 0
        log_axis(other)
    other.grid(visible=False)
    largest = set(spike_scores(run).nlargest(2, "times")["step"])
    told = [
        one
        for one in events_of(Study({run.name: run}))
        if one.kind == "cause" or one.step in largest
    ]
    for event in sorted(told, key=lambda one: one.kind)[:2]:
        axis.axvline(event.step, color=GRAY, linestyle=":")
        text = f"step {event.step}: {event.text.split(' · ')[0]}"
        # towards the middle, so that no text leaves the picture
        right = event.step > np.mean(axis.get_xlim())
        align = "right" if right else "left"
        place = axis.get_xaxis_transform()
        axis.text(
            event.step,
            1.02,
            plain(text, 48),
            size=9.5,
            ha=align,
            transform=place,
        )
    axis.set_xlabel("step")


def draw_tokens(figure: Figure, run: Run) -> None:
    """The tokens that did most, or else hold most of a gradient: blue where made more likely, orange where less."""
    title, tokens = leading_tokens(run)
    figure.text(0.035, 0.085, title, size=11.5, color=GRAY)
    x = 0.035
    for token, amount in tokens:
        color = {1: colors()[0], -1: colors()[3]}.get(token.direction, GRAY)
        arrow = {1: "↑", -1: "↓"}.get(token.direction, "·")
        text = f"{plain(token.token.strip() or token.token, 14)} {arrow} {amount}"
        box = {
            "facecolor": color,
            "edgecolor": "none",
            "boxstyle": "round,pad=0.3",
        }
        figure.text(
            x,
            0.035,
            text,
            size=12,
            color="#14171a",
            weight="bold",
            bbox=box,
        )
        x += 0.03 + 0.0105 * len(text)


def leading_tokens(run: Run) -> tuple[str, list[tuple[Marked, str]]]:
    """What the leading tokens are, and each with its effect or its share."""
    effects = leading_effects(run, TOKENS)
    if effects:
        return f"largest effects on the KL of step {effects[0][0].step}:", effects
    spike = largest_update(run)
    if spike is None:
        return "", []
    moved = moved_tokens(run, spike.step, TOKENS)
    shares = [(one.sentence, percent(one.share, 0, sign=True)) for one in moved]
    return f"most of ‖∇L‖² at step {spike.step}:", shares
