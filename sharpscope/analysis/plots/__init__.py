"""Figures for papers, notebooks and pages: `run.plot.NAME()`, `sharpscope plot RUN NAME`, or a function called with runs or a frame.

    axes, frame = sharpscope.load_run("runs/first").plot.gradient_norm()

Every figure returns its axes and the tidy frame that it shows, so that its numbers can be checked or drawn in another way.
"""

from sharpscope.analysis.plots.registry import PLOTS, Drawn, Plot, PlotsOf, all_figures, plot_named
from sharpscope.analysis.plots.style import STYLES, WIDTHS, Picture, save, styled
from sharpscope.analysis.plots.token_figures import (
    distribution,
    gradient_norm,
    lorenz,
    token_steps,
    weight_functions,
    weights,
)
from sharpscope.analysis.plots.training_figures import (
    ablation,
    forest,
    layer_steps,
    log,
    paired,
    people,
    sharpness,
    trajectories,
)

# isort: split
# Figures are listed in the order of these imports.
from sharpscope.analysis.plots.surface_figures import plane, slices, spectrum

# isort: split
from sharpscope.analysis.plots.method_figures import paired_dots, removal, rotation, rotation_map
