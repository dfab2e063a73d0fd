"""Figures: from small frames to matplotlib figures, all in one style."""

from sharpscope.analysis.figures.plots import fork_effects, rotation_figure, save, styled, weight_functions
