"""Figures: from frames of values to matplotlib figures, all in one style. `figures.study` draws those of a whole study."""

from sharpscope.analysis.figures.rotation import rotation_figure
from sharpscope.analysis.figures.style import (
    COLORS,
    MARKERS,
    Line,
    Picture,
    finish,
    lines,
    panels,
    plain,
    save,
    styled,
    svg_text,
)
from sharpscope.analysis.figures.surface import CURVATURE, rho_curves, sharpness, slices, spectrum, split_of
from sharpscope.analysis.figures.tokens import score_norms, weight_functions

__all__ = [
    "COLORS",
    "CURVATURE",
    "MARKERS",
    "Line",
    "Picture",
    "finish",
    "lines",
    "panels",
    "plain",
    "rho_curves",
    "rotation_figure",
    "save",
    "score_norms",
    "sharpness",
    "slices",
    "spectrum",
    "split_of",
    "styled",
    "svg_text",
    "weight_functions",
]
