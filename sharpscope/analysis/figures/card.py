"""A picture of one run to share: the headline, three tokens in their sentences, one curve."""

from __future__ import annotations

import warnings
from pathlib import Path
from textwrap import fill

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names

from sharpscope.analysis.curves import COLORS
from sharpscope.analysis.figures.plots import styled
from sharpscope.analysis.frames import STEPS, step_values
from sharpscope.analysis.headline import Moved, accuracy_texts, concentration_text, largest_update, moved_tokens
from sharpscope.analysis.sections import Marked
from sharpscope.analysis.spikes import recorded_by
from sharpscope.analysis.study import Study
from sharpscope.analysis.text import method_label, model_label, number, percent, printable, visible
from sharpscope.errors import UserError
from sharpscope.traces import Run

SIZE = (12.0, 6.3)
"""Inches at 100 dots each: 1200 × 630, as links to pages show them."""
SENTENCE, LETTERS = 58, 13
"""Characters of a sentence, and their size [points]."""
LETTER = 0.602
"""Width of a letter of DejaVu Sans Mono over its size."""
KEY = "↑ made more likely, ↓ less likely"
TINT = {1: "#a9cdf0", -1: "#f7c297", 0: "#dddddd"}
"""Background of a token that is made more or less likely."""
FONTS = ("DejaVu Sans Mono", "Noto Sans Mono CJK JP", "Noto Sans CJK JP", "DejaVu Sans")
"""Those that are installed are used, the first that has a letter."""


def write_card(run: Run, file: Path) -> Path:
    """Write the picture of a run.

    Args:
        run: with recorded shares of tokens.
        file: ends in .png or .svg.

    Raises:
        UserError: another ending, no shares, or a file that cannot be written.
    """
    if file.suffix not in (".png", ".svg"):
        raise UserError(f"--card {file}: the picture is a .png or an .svg")
    if largest_update(run) is None:
        why = recorded_by(run, "recording.token_gradients_every")
        raise UserError(f"--card: no token's share of the gradient was recorded in {run.name}{why}")
    with styled(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = card(run)
        try:
            figure.savefig(file, dpi=100)
        except OSError as error:
            raise UserError(f"--card {file}: cannot be written ({error.strerror})") from error
    return file


def card(run: Run) -> Figure:
    """The picture of a run that has shares of tokens."""
    spike = largest_update(run)
    assert spike is not None
    figure = Figure(figsize=SIZE, facecolor="white")
    FigureCanvasAgg(figure)
    model = run.config.get("policy", {}).get("model") or run.info.get("model")
    facts = [printable(run.name, 40), method_label(run.method), *([model_label(str(model))] if model else [])]
    _write(figure, 0.04, 0.93, " · ".join(facts), size=14, color="#555555")
    said = concentration_text(run, spike.step) or "Which tokens moved the model"
    for n, line in enumerate(fill(said, 68).splitlines()[:2]):
        _write(figure, 0.04, 0.845 - 0.075 * n, line, size=21, weight="bold")
    which = f"Step {spike.step}: the tokens with the largest shares of the gradient. {KEY}"
    _write(figure, 0.04, 0.685, which, size=13)
    for n, one in enumerate(moved_tokens(run, spike.step, top=3)):
        _sentence(figure, 0.605 - 0.085 * n, one)
    study = Study({run.name: run}, name=run.task)
    values = step_values(study, list(STEPS))
    axis = figure.add_axes((0.08, 0.13, 0.88, 0.24))
    if len(values):  # the reward by step, or else the first quantity that varies
        name = next(name for name in STEPS if name in set(values["quantity"]))
        part = values[values["quantity"] == name]
        marker = "o" if len(part) <= 20 else ""
        axis.plot(part["step"], STEPS[name].factor * part["value"], color=COLORS[0], linewidth=2, marker=marker)
        axis.set_title(f"{STEPS[name].name}, by step", loc="left", fontsize=12)
        axis.tick_params(labelsize=11)
    _write(figure, 0.04, 0.035, printable(" ".join(accuracy_texts(study.settings)[:1]), 110), size=12, color="#333333")
    _write(figure, 0.96, 0.035, "sharpscope", size=12, color="#555555", ha="right")
    return figure


def _write(figure: Figure, x: float, y: float, text: str, **style: object) -> None:
    """Text at a place of the figure, without math mode."""
    figure.text(x, y, visible(text), parse_math=False, **style)  # type: ignore[arg-type]


def _sentence(figure: Figure, y: float, one: Moved) -> None:
    """One token in its sentence on a line, its background colored by its direction, and its numbers."""
    _write(figure, 0.04, y, {1: "↑", -1: "↓"}.get(one.sentence.direction, "·"), size=LETTERS + 3, weight="bold")
    x, fonts = 0.065, [name for name in FONTS if name in get_font_names()]
    for text, style in _parts(one.sentence):
        _write(figure, x, y, text, size=LETTERS, family=fonts, **style)
        x += LETTER * LETTERS / 72 / SIZE[0] * len(text)
    outcome = "" if one.correct is None else ("right · " if one.correct else "wrong · ")
    times = f" (×{one.count})" if one.count > 1 else ""
    numbers = f"{outcome}{percent(one.share, 1, sign=True)}{times} · π {number(one.probability)}"
    _write(figure, 0.96, y, numbers, size=LETTERS, ha="right")


def _parts(sentence: Marked) -> list[tuple[str, dict[str, object]]]:
    """(text, style) of what stands before the token, of it, and after it, together at most SENTENCE letters."""
    whole = visible(sentence.token)[:30]
    token = whole.strip() or "‸"
    lead, trail = whole[: len(whole) - len(whole.lstrip())], whole[len(whole.rstrip()) :]
    before, after, half = visible(sentence.before) + lead, trail + visible(sentence.after), (SENTENCE - len(token)) // 2
    before = before if len(before) <= half else f"…{before[1 - half :]}"
    room = SENTENCE - len(token) - len(before)
    after = after if len(after) <= room else f"{after[: room - 1]}…"
    box = {"facecolor": TINT[sentence.direction], "edgecolor": "none", "pad": 2.5}
    return [(before, {"color": "#555555"}), (token, {"bbox": box}), (after, {"color": "#555555"})]
