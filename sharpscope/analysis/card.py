"""The picture of one run to share: `show RUN --card card.png`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from rich.cells import cell_len
from rich.console import Console

from sharpscope.analysis.headline import largest_update
from sharpscope.analysis.plots.style import styled
from sharpscope.analysis.report import curve_table, found_sections
from sharpscope.analysis.sections import Section, to_terminal
from sharpscope.analysis.spikes import recorded_by
from sharpscope.analysis.study import Study
from sharpscope.errors import UserError
from sharpscope.traces import Run

LETTER, LINE = 13 / 150, 0.19
"""Width of a letter, whole pixels at 150 to an inch, and height of a line [inches], in DejaVu Sans Mono of 10 points."""
FONTS = ("DejaVu Sans Mono", "Noto Sans Mono CJK JP", "Noto Sans CJK JP", "DejaVu Sans")
"""Those that are installed are used, the first that has a letter."""


def write_card(run: Run, file: Path) -> Path:
    """Write a picture of what the terminal shows of a run, its headline and its first curve, to a .png or .svg.

    Raises:
        UserError: another ending, no shares of tokens, or `file` cannot be written.
    """
    if file.suffix not in (".png", ".svg"):
        raise UserError(f"--card {file}: the picture is a .png or an .svg")
    if largest_update(run) is None:
        why = recorded_by(run, "recording.token_gradients_every")
        raise UserError(f"--card: no token's share of the gradient was recorded in {run.name}{why}")
    study = Study({run.name: run}, name=run.task)
    sections = [
        *found_sections(study, study.settings, top=3),
        Section("", curve_table(run).head(1)),
    ]
    with styled(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        try:
            terminal_picture(sections).savefig(file, dpi=150)
        except OSError as error:
            raise UserError(f"--card {file}: cannot be written ({error.strerror})") from error
    return file


def terminal_picture(sections: Sequence[Section], width: int = 96) -> Figure:
    """Sections as a terminal of `width` letters shows them."""
    console = Console(file=StringIO(), force_terminal=True, color_system="truecolor")
    shown = console.render_lines(
        to_terminal(sections), console.options.update(width=width), pad=False
    )
    across, down = LETTER * (width + 4), LINE * (len(shown) + 2)
    figure = Figure(figsize=(across, down), facecolor="white")
    FigureCanvasAgg(figure)
    look: dict[str, Any] = {
        "family": [name for name in FONTS if name in get_font_names()],
        "size": 10,
    }
    for n, line in enumerate(shown):
        x = 2 * LETTER
        for text, style, _ in line:
            color = style.color.get_truecolor().hex if style and style.color else None
            look |= {
                "weight": "bold" if style and style.bold else "normal",
                "color": "white" if color else "black",
            }
            box = {"facecolor": color, "edgecolor": "none", "pad": 1.5} if color else None
            figure.text(
                x / across, 1 - (n + 2) * LINE / down, text, parse_math=False, bbox=box, **look
            )
            x += LETTER * cell_len(text)
    return figure
