"""Figures of the loss surface: spectrum, slices and a plane."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from sharpscope.analysis.measures import split_of
from sharpscope.analysis.plots.registry import plot
from sharpscope.analysis.plots.style import GRAY, Picture, color_of, legend, plain
from sharpscope.traces import Runs

SMOOTH = 0.012
"""Width of the Gaussian that stands for a node of a spectral density, as a share of the spectrum's range."""
EXTREMES = ("largest", "smallest")


def probe_frame(runs: Runs, chosen: pd.Series) -> pd.DataFrame:
    """The `chosen` rows of `probes` of the first run, of one functional and set of prompts: training's and `nll` if measured."""
    table = runs[0].probes[chosen & runs[0].probes["value"].notna()]
    table = table[~table["probe_set"].fillna("").map(split_of).eq("heldout")]
    names = list(dict.fromkeys(table["functional"]))
    functional = "nll" if "nll" in names else (names or [""])[0]
    return table[(table["functional"] == functional) & table["parameters"].eq("all")]


def spectrum_frame(runs: Runs) -> pd.DataFrame:
    """A spectral density of the Hessian (`probes.preset` full)."""
    rows = probe_frame(runs, runs[0].probes["quantity"].eq("density"))
    steps = rows["step"].unique()
    edges = probe_frame(runs, runs[0].probes["quantity"].isin(EXTREMES))
    nodes = rows.assign(eigenvalue=rows["rho"], kind="node", weight=rows["value"])
    ends = edges.assign(eigenvalue=edges["value"], kind="extreme", weight=np.nan)
    whole = pd.concat([nodes, ends[ends["step"].isin(steps)]])
    return whole[["functional", "step", "kind", "eigenvalue", "weight"]].reset_index(drop=True)


def smooth_density(nodes: np.ndarray, weights: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Density at `grid` of `weights` at `nodes`, each a Gaussian; it integrates to their sum over a grid that holds them."""
    width = SMOOTH * (grid[-1] - grid[0])
    away = (grid[:, None] - nodes[None]) / width
    return np.asarray(np.exp(-0.5 * away**2) @ weights / (width * np.sqrt(2 * np.pi)))


@plot(spectrum_frame, "functional", "step", "kind", "eigenvalue", "weight")
def spectrum(figure: Picture, frame: pd.DataFrame) -> None:
    """Spectral density of the Hessian at each step measured; ticks mark the largest and the smallest eigenvalue.

    The density is of stochastic Lanczos quadrature, each node a Gaussian of 1.2 % of the range.
    """
    (axis,) = figure.panels(1, 2.3)
    palette = color_of(frame["step"])
    values = frame["eigenvalue"].astype(float)
    spread = values.max() - values.min()
    grid = np.linspace(values.min() - 0.08 * spread, values.max() + 0.08 * spread, 600)
    for step, rows in frame.groupby("step"):
        color, nodes = palette[str(step)], rows[rows["kind"] == "node"]
        columns = nodes["eigenvalue"].to_numpy(float), nodes["weight"].to_numpy(float)
        density = smooth_density(*columns, grid)
        axis.plot(grid, density, color=color, label=f"step {step}")
        for value in rows.loc[rows["kind"] == "extreme", "eigenvalue"]:
            axis.plot([value, value], [0, 0.08], color=color, transform=axis.get_xaxis_transform())
    axis.set(yscale="log", ylim=(1e-7, None))
    functional = plain(frame["functional"].iloc[0])
    axis.set(xlabel=f"eigenvalue of the Hessian of {functional}", ylabel="spectral density")
    legend(figure, [axis])


DIRECTIONS = {
    "slice_update": "the optimizer's step",
    "slice_gradient": "the gradient",
    "slice_eigenvector": "the top eigenvector",
}


def slice_frame(runs: Runs) -> pd.DataFrame:
    """Slices of the loss (`probes.preset` full)."""
    rows = probe_frame(runs, runs[0].probes["quantity"].str.startswith("slice_"))
    named = rows["quantity"].map(DIRECTIONS)
    number = rows["quantity"].str.extract(r"(\d+)$")[0].astype(float) + 1
    random = number.map("random direction {:.0f}".format)
    made = {"direction": named.fillna(random), "distance": rows["rho"], "loss": rows["value"]}
    return rows[["functional", "step"]].assign(**made).reset_index(drop=True)


@plot(slice_frame, "functional", "step", "direction", "distance", "loss")
def slices(figure: Picture, frame: pd.DataFrame) -> None:
    """Slices of the loss along the step, the gradient, the top eigenvector and random directions, at each step measured."""
    directions = list(dict.fromkeys(frame["direction"]))
    axes = figure.panels(len(directions), 1.9, across=4, sharey=True)
    palette = color_of(frame["step"])
    for axis, direction in zip(axes, directions, strict=True):
        for step, rows in frame[frame["direction"] == direction].groupby("step"):
            line = rows.sort_values("distance")
            points, color = (line["distance"], line["loss"]), palette[str(step)]
            axis.plot(*points, color=color, marker=".", label=f"step {step}")
        axis.axvline(0, color=GRAY, linewidth=0.7, linestyle=":")
        axis.set_title(plain(direction), loc="left")
        axis.xaxis.set_major_locator(MaxNLocator(3))
        axis.set_xlabel("distance [L2 norm]")
    axes[0].set_ylabel(f"loss ({plain(frame['functional'].iloc[0])})")
    legend(figure, axes)


def plane_frame(runs: Runs) -> pd.DataFrame:
    """A plane of the loss: rows of `probes` whose quantity is `plane`, at two distances."""
    rows = probe_frame(runs, runs[0].probes["quantity"].str.startswith("plane_"))
    second = rows["quantity"].str.extract(r"^plane_(-?[\d.e-]+)$")[0].astype(float)
    made = {"x": rows["rho"], "y": second, "loss": rows["value"]}
    return rows[["step"]].assign(**made).dropna().reset_index(drop=True)


@plot(plane_frame, "x", "y", "loss")
def plane(figure: Picture, frame: pd.DataFrame) -> None:
    """The loss on the plane of two directions through the weights, with lines of equal loss; a dot marks the weights."""
    (axis,) = figure.panels(1, 2.8)
    table = frame.pivot_table(index="y", columns="x", values="loss")
    x, y, loss = table.columns.to_numpy(float), table.index.to_numpy(float), table.to_numpy()
    filled = axis.contourf(x, y, loss, levels=16, cmap="cividis")
    axis.contour(x, y, loss, levels=16, colors="white", linewidths=0.3, alpha=0.6)
    axis.plot(0, 0, "o", color="white", markeredgecolor="black", markersize=5)
    figure.colorbar(filled, ax=axis, label="loss", pad=0.02)
    names = [str(frame[n].iloc[0]) if n in frame else n for n in ("x_name", "y_name")]
    labels = [f"distance along {plain(name)} [L2 norm]" for name in names]
    axis.set(xlabel=labels[0], ylabel=labels[1])
    axis.grid(visible=False)
