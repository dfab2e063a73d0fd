"""Figures of the loss surface: spectrum, slices and a plane."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator
from scipy.stats import norm

from sharpscope.analysis.frames import stacked
from sharpscope.analysis.measures import split_of
from sharpscope.analysis.plots.registry import not_from_runs, plot
from sharpscope.analysis.plots.style import GRAY, Picture, band, color_of, colored, legend, plain
from sharpscope.traces import Runs

SMOOTH = 0.012
"""Width of the Gaussian that stands for a node of a spectral density, as a share of the spectrum's range."""


def probe_frame(runs: Runs, quantities: str) -> pd.DataFrame:
    """Rows of `probes` of the first run whose quantity fits a pattern, of one functional: `nll`, if it was measured.

    Those of training prompts, and of all parameters together.
    """
    table = runs[0].probes.dropna(subset="value")
    table = table[table["quantity"].str.fullmatch(quantities) & table["parameters"].eq("all")]
    table = table[table["probe_set"].fillna("").map(split_of) != "heldout"]
    names = table["functional"].unique().tolist()
    functional = "nll" if "nll" in names else next(iter(names), "")
    return table[table["functional"] == functional]


def spectrum_frame(runs: Runs) -> pd.DataFrame:
    """A spectral density of the Hessian (`probes.preset` full)."""
    rows = probe_frame(runs, "density")
    edges = probe_frame(runs, "largest|smallest")
    parts = []
    for step, nodes in rows.groupby("step"):
        values, weights = nodes[["rho", "value"]].to_numpy(float).T
        spread = 0.08 * np.ptp(values)
        grid = np.linspace(values.min() - spread, values.max() + spread, 600)
        density = smooth_density(values, weights, grid)
        line = pd.DataFrame({"eigenvalue": grid, "density": density, "kind": "density"})
        ends = edges.loc[edges["step"] == step, "value"].astype(float)
        extremes = pd.DataFrame({"eigenvalue": ends, "kind": "extreme"})
        both = pd.concat([line, extremes])
        parts.append(both.assign(step=step, functional=nodes["functional"].iloc[0]))
    return stacked(parts, ["functional", "step", "kind", "eigenvalue", "density"])


def by_checkpoint(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a column `checkpoint`, by which lines are told apart: its own, or the step."""
    if "checkpoint" in frame:
        return frame
    steps = "step " + frame["step"].astype(str) if "step" in frame else "measured"
    return frame.assign(checkpoint=steps)


def smooth_density(nodes: np.ndarray, weights: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Density at `grid` of `weights` at `nodes`, each a Gaussian; it integrates to their sum over a grid that holds them."""
    width = SMOOTH * (grid[-1] - grid[0])
    return np.asarray(norm.pdf(grid[:, None], nodes, width) @ weights)


@plot(spectrum_frame, "eigenvalue", "density")
def spectrum(figure: Picture, frame: pd.DataFrame) -> None:
    """Spectral density of the Hessian at each step measured; ticks mark the largest and the smallest eigenvalue.

    From a run: of stochastic Lanczos quadrature, each node a Gaussian of 1.2 % of the range. A frame may have `checkpoint` or `step`,
    `low` and `high` (a band), and rows of kind `extreme`.
    """
    (axis,) = figure.panels(1, 2.3)
    whole = by_checkpoint(frame)
    whole = whole if "kind" in whole else whole.assign(kind="density")
    for name, color, rows in colored(whole, "checkpoint", color_of(whole["checkpoint"])):
        line = rows[rows["kind"] == "density"]
        axis.plot(line["eigenvalue"], line["density"], color=color, label=plain(name))
        if "low" in line:
            band(axis, line["eigenvalue"], line["low"], line["high"], color)
        for value in rows.loc[rows["kind"] == "extreme", "eigenvalue"]:
            axis.plot([value, value], [0, 0.08], color=color, transform=axis.get_xaxis_transform())
    axis.set(yscale="log", ylim=(1e-7 * float(frame["density"].max()), None))
    named = plain(frame["functional"].iloc[0]) if "functional" in frame else "the loss"
    axis.set(xlabel=f"eigenvalue of the Hessian of {named}", ylabel="spectral density")
    legend(figure)


DIRECTIONS = {
    "slice_update": "the optimizer's step",
    "slice_gradient": "the gradient",
    "slice_eigenvector": "the top eigenvector",
}


def slice_frame(runs: Runs) -> pd.DataFrame:
    """Slices of the loss (`probes.preset` full)."""
    rows = probe_frame(runs, "slice_.*").rename(columns={"rho": "distance", "value": "loss"})
    number = rows["quantity"].str.extract(r"(\d+)$")[0].astype(float) + 1
    random = number.map("random direction {:.0f}".format)
    rows["direction"] = rows["quantity"].map(DIRECTIONS).fillna(random)
    columns = ["functional", "step", "direction", "distance", "loss"]
    return rows[columns].reset_index(drop=True)


@plot(slice_frame, "direction", "distance", "loss")
def slices(figure: Picture, frame: pd.DataFrame) -> None:
    """Slices of the loss along the step, the gradient, the top eigenvector and random directions, at each step measured.

    A frame may have `checkpoint` or `step`, `std_error` (a band of ± 1.96) and `trained` (where training has been, a thick line).
    """
    whole = by_checkpoint(frame)
    palette = color_of(whole["checkpoint"])
    for axis, direction, here in figure.panels_by(whole, "direction", 1.9, across=4, sharey=True):
        for name, color, rows in colored(here, "checkpoint", palette):
            line = rows.sort_values("distance")
            axis.plot(line["distance"], line["loss"], color=color, marker=".", label=plain(name))
            if "std_error" in line:
                half = 1.96 * line["std_error"]
                band(axis, line["distance"], line["loss"] - half, line["loss"] + half, color)
            if "trained" in line:
                been = line[line["trained"].astype(bool)]
                axis.plot(been["distance"], been["loss"], color=color, linewidth=3)
        axis.axvline(0, color=GRAY, linewidth=0.7, linestyle=":")
        axis.set_title(plain(direction), loc="left")
        axis.xaxis.set_major_locator(MaxNLocator(3))
        axis.set_xlabel("distance [L2 norm]")
    named = plain(frame["functional"].iloc[0]) if "functional" in frame else "nats"
    figure.axes[0].set_ylabel(f"loss ({named})")
    legend(figure)


@plot(not_from_runs, "first", "second", "loss")
def plane(figure: Picture, frame: pd.DataFrame) -> None:
    """The loss on the plane of two directions through the weights, with lines of equal loss and the path of training.

    The frame is of `sharpscope.surface.pictures.plane`. Rows of kind `path` are the weights of earlier steps, projected; the last of
    them, at (0, 0), are the weights themselves.
    """
    (axis,) = figure.panels(1, 2.8)
    kind = frame["kind"] if "kind" in frame else pd.Series("grid", frame.index)
    table = frame[kind == "grid"].pivot(index="second", columns="first", values="loss")
    x = table.columns.to_numpy(float)
    y = table.index.to_numpy(float)
    loss = table.to_numpy()
    filled = axis.contourf(x, y, loss, levels=16, cmap="cividis")
    axis.contour(x, y, loss, levels=16, colors="white", linewidths=0.3, alpha=0.6)
    path = frame[kind == "path"]
    axis.plot(path["first"], path["second"], color="white", marker=".", linewidth=1)
    axis.plot(0, 0, "o", color="white", markeredgecolor="black", markersize=5)
    figure.colorbar(filled, ax=axis, label="loss", pad=0.02)
    names = frame["axes"].iloc[0] if "axes" in frame else "first direction and second direction"
    first, second = str(names).split(" and ")
    axis.set(xlabel=f"distance along {first} [L2 norm]", ylabel=f"along {second} [L2 norm]")
    axis.grid(visible=False)
