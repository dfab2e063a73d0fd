"""The figure of counterfactual updates: each arm's difference to the reference with its interval."""

from __future__ import annotations

from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sharpscope.analysis.figures.style import COLORS, GRAY, MARKERS, plain, styled
from sharpscope.analysis.forks import COMPARISONS, NAMES, UNITS

MOST_OUTCOMES = 5
TITLES = {"step": "optimizer's step", "norm": "matched norm", "kl": "matched KL"}


def fork_effects(differences: pd.DataFrame) -> Figure | None:
    """A row of panels for each state, a panel for each outcome, a line in it for each arm; None if nothing was measured.

    Args:
        differences: of one fork, from `sharpscope.analysis.fork_differences`.
    """
    shown = differences[(differences["arm"] != differences["reference"]) & differences["difference"].notna()]
    outcomes = [name for name in NAMES if name in set(shown["outcome"])][:MOST_OUTCOMES]
    states = list(dict.fromkeys(shown["state"]))
    arms = list(dict.fromkeys(shown["arm"]))[::-1]
    if not arms or not outcomes:
        return None
    with styled():
        return _drawn(shown, states, outcomes, arms)


def _drawn(shown: pd.DataFrame, states: list[str], outcomes: list[str], arms: list[str]) -> Figure:
    figure = Figure(
        figsize=(1.7 * len(outcomes) + 1.4, len(states) * (0.22 * len(arms) + 0.7) + 0.6), layout="constrained"
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(states), len(outcomes), squeeze=False, sharey=True, sharex="col")
    comparisons = [name for name in COMPARISONS if name in set(shown["comparison"])]
    for row, state in enumerate(states):
        for column, outcome in enumerate(outcomes):
            axis = grid[row, column]
            axis.axvline(0, color=GRAY, linewidth=0.8)
            unit, factor = UNITS.get(outcome, ("", 1.0))
            here = shown[(shown["state"] == state) & (shown["outcome"] == outcome)]
            for index, comparison in enumerate(comparisons):
                own = here[here["comparison"] == comparison].set_index("arm").reindex(arms)
                height = np.arange(len(arms)) + 0.22 * ((len(comparisons) - 1) / 2 - index)
                middle = factor * own["difference"].to_numpy(dtype=float)
                ends = factor * own[["low", "high"]].to_numpy(dtype=float)
                axis.hlines(height, ends[:, 0], ends[:, 1], color=COLORS[index], linewidth=1.2)
                axis.plot(middle, height, MARKERS[index], color=COLORS[index], markersize=3.2, label=TITLES[comparison])
            axis.set_yticks(range(len(arms)), [plain(arm, 32) for arm in arms])
            axis.set_ylim(-0.6, len(arms) - 0.4)
            if row == 0:
                axis.set_title(fill(NAMES[outcome], 20))
            if row == len(states) - 1:
                axis.set_xlabel(f"[{unit}]" if unit else "")
        grid[row, 0].set_ylabel(plain(state))
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure
