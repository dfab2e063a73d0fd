"""A diagnosis as one HTML file to attach to an issue: a small chart of each quantity with the onsets marked. Works offline."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from sharpscope.diagnose.changes import thinned
from sharpscope.diagnose.quantities import BY_NAME, Quantity
from sharpscope.diagnose.report import Diagnosis
from sharpscope.errors import UserError, first_line
from sharpscope.rules.measures import Values

WIDTH, HEIGHT = 320, 150
"""Size of a chart [pixels]."""
LEFT = 48
RIGHT = 8
TOP = 22
BOTTOM = 18
"""Margins of its plane."""
POINTS = 400
"""Most points of a line; more are averaged."""
COLORS = {"critical": "#c62828", "warning": "#e08600", "info": "#607d8b"}

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --panel: #f6f6f6; --edge: #ddd; --line: #1f5fa8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --paper: #16181b; --panel: #202327; --edge: #3a3f45; --line: #7db4f0 }
}
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1040px; margin: 2em auto; padding: 0 1em; color: var(--ink); background: var(--paper) }
h1 { font-size: 1.25em } h2 { font-size: 1.05em; margin-top: 2em }
.charts { display: flex; flex-wrap: wrap; gap: 10px }
svg { border: 1px solid var(--edge); border-radius: 4px; max-width: 100% }
text { fill: var(--ink) }
polyline { fill: none; stroke: var(--line); stroke-width: 1.4 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); padding: 1em; border-radius: 4px; font-size: 13px }
.key span { margin-right: 1.5em }
"""


def write_page(diagnoses: Sequence[Diagnosis], file: Path) -> None:
    """Write diagnoses as one page.

    Raises:
        UserError: the file cannot be written.
    """
    sections = "".join(_section(diagnosis) for diagnosis in diagnoses)
    title = escape(f"Diagnosis of {diagnoses[0].log.path.name}")
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{sections}</body></html>\n"
    )
    try:
        file.write_text(page, "utf-8")
    except OSError as error:
        raise UserError(f"--html {file}: cannot be written ({first_line(error)})") from error


def _section(diagnosis: Diagnosis) -> str:
    log = diagnosis.log
    charts = "".join(chart(diagnosis, str(name)) for name in log.frame)
    key = "".join(
        f'<span><svg width="12" height="12" style="border:0"><rect width="12" height="12" fill="{color}"/></svg> {name}</span>'
        for name, color in COLORS.items()
    )
    run = f" ({log.run})" if log.run else ""
    return (
        f"<h1>{escape(diagnosis.finding)}</h1><p>{escape(str(log.path.name) + run)}</p>"
        f'<p class="key">Vertical lines are the first steps of findings: {key}</p>'
        f'<div class="charts">{charts}</div><h2>In words</h2><pre>{escape(diagnosis.text())}</pre>'
    )


def chart(diagnosis: Diagnosis, name: str) -> str:
    """The chart of one quantity as SVG, with a vertical line where each finding about it begins.

    Args:
        diagnosis: of the log.
        name: canonical quantity.

    Returns:
        An SVG element; empty if fewer than two values are finite.
    """
    quantity = BY_NAME[name]
    series = diagnosis.log.finite(name)
    if len(series) < 2:
        return ""
    values, steps = thinned(
        series.to_numpy(float),
        series.index.to_numpy(float),
        POINTS,
    )
    logarithmic = quantity.log and bool((values > 0).all()) and values.max() > 20 * values.min()
    heights = np.log10(values) if logarithmic else values
    span = (float(series.index[0]), float(series.index[-1]))
    range_ = (float(heights.min()), float(heights.max()))
    x = _scaled(steps, span, LEFT, WIDTH - RIGHT)
    y = _scaled(heights, range_, HEIGHT - BOTTOM, TOP)
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    top = float(values.max())
    bottom = float(values.min())
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(quantity.title)}">'
        f"{_text(8, 15, _title(quantity), 12, weight='bold')}"
        f"{_text(LEFT - 4, TOP + 4, f'{top:.3g}', 10, 'end')}"
        f"{_text(LEFT - 4, HEIGHT - BOTTOM, f'{bottom:.3g}', 10, 'end')}"
        f"{_text(LEFT, HEIGHT - 4, f'step {span[0]:g}', 10)}"
        f"{_text(WIDTH - RIGHT, HEIGHT - 4, f'{span[1]:g}', 10, 'end')}"
        f"{_marks(diagnosis, name, span)}"
        f'<polyline points="{line}"/></svg>'
    )


def _title(quantity: Quantity) -> str:
    title = quantity.title if len(quantity.title) <= 44 else f"{quantity.title[:43]}…"
    return f"{title} [{quantity.unit}]" if quantity.unit else title


def _marks(diagnosis: Diagnosis, name: str, span: tuple[float, float]) -> str:
    """Vertical lines at the first steps of the findings that this quantity shows best."""
    lines = []
    for finding in diagnosis.findings:
        if finding.began.quantity == name and finding.rule.window != 0:
            (x,) = _scaled(
                np.array([float(finding.step)]),
                span,
                LEFT,
                WIDTH - RIGHT,
            )
            color = COLORS[finding.severity]
            title = escape(f"{finding.rule.title}, from step {finding.step}")
            lines.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{color}" '
                f'stroke-width="2"><title>{title}</title></line>'
            )
    return "".join(lines)


def _text(
    x: float,
    y: float,
    text: str,
    size: int,
    anchor: str = "start",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _scaled(values: Values, span: tuple[float, float], start: float, end: float) -> Values:
    """Values as pixels; the middle if all are the same."""
    low, high = span
    share = (values - low) / (high - low) if high > low else np.full(len(values), 0.5)
    return start + np.clip(share, 0, 1) * (end - start)
