"""Figures of the loss surface: spectrum, slices and a plane."""

from __future__ import annotations

import pandas as pd
from matplotlib.ticker import MaxNLocator
from scipy.stats import t

from sharpscope.analysis.plots.registry import not_from_runs, plot
from sharpscope.analysis.plots.style import GRAY, Picture, band, color_of, colored, legend, plain
from sharpscope.traces import Runs


def spectrum_frame(runs: Runs) -> pd.DataFrame:
    """Spectral densities of the Hessian of nll (`probes.density_probes`), with their 95 % band over random starts."""
    table = runs[0].probes
    named = table["quantity"].eq("density") & table["functional"].eq("nll")
    rows = table[named & table["std_error"].notna()]  # traces of version 0.1 hold weights of nodes
    half = t.ppf(0.975, rows["samples"].astype(float) - 1) * rows["std_error"]
    columns = {
        "eigenvalue": rows["rho"],
        "density": rows["value"],
        "low": (rows["value"] - half).clip(lower=0),
        "high": rows["value"] + half,
        "functional": "nll",
        "prompts": rows["prompts"],
        "checkpoint": "step " + rows["step"].astype(str),
    }
    return pd.DataFrame(columns)


def by_checkpoint(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a column `checkpoint`, by which lines are told apart."""
    return frame if "checkpoint" in frame else frame.assign(checkpoint="measured")


@plot(spectrum_frame, "eigenvalue", "density")
def spectrum(figure: Picture, frame: pd.DataFrame) -> None:
    """Spectral density of the Hessian at each step or checkpoint measured, with its band over random starts."""
    (axis,) = figure.panels(1, 2.3)
    whole = by_checkpoint(frame)
    for name, color, line in colored(whole, "checkpoint", color_of(whole["checkpoint"])):
        axis.plot(
            line["eigenvalue"],
            line["density"],
            color=color,
            label=plain(name),
        )
        if "low" in line:
            band(axis, line["eigenvalue"], line["low"], line["high"], color)
    axis.set(yscale="log", ylim=(1e-7 * frame["density"].max(), None))
    named = plain(frame["functional"].iloc[0]) if "functional" in frame else "the loss"
    axis.set(xlabel=f"eigenvalue of the Hessian of {named}", ylabel="spectral density")
    legend(figure)


@plot(not_from_runs, "direction", "distance", "loss")
def slices(figure: Picture, frame: pd.DataFrame) -> None:
    """Slices of the loss along the step, the gradient, the top eigenvector and random directions, at each step measured.

    A frame may have `checkpoint` or `step`, `std_error` (a band of ± 1.96) and `trained` (where training has been, a thick line).
    """
    whole = by_checkpoint(frame)
    palette = color_of(whole["checkpoint"])
    for axis, direction, here in figure.panels_by(whole, "direction", 1.9, across=4, sharey=True):
        for name, color, rows in colored(here, "checkpoint", palette):
            line = rows.sort_values("distance")
            axis.plot(
                line["distance"],
                line["loss"],
                color=color,
                marker=".",
                label=plain(name),
            )
            if "std_error" in line:
                half = 1.96 * line["std_error"]
                band(axis, line["distance"], line["loss"] - half, line["loss"] + half, color)
            if "trained" in line:
                been = line[line["trained"].astype(bool)]
                axis.plot(
                    been["distance"],
                    been["loss"],
                    color=color,
                    linewidth=3,
                )
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
    axis.contour(
        x,
        y,
        loss,
        levels=16,
        colors="white",
        linewidths=0.3,
        alpha=0.6,
    )
    path = frame[kind == "path"]
    axis.plot(
        path["first"],
        path["second"],
        color="white",
        marker=".",
        linewidth=1,
    )
    axis.plot(
        0,
        0,
        "o",
        color="white",
        markeredgecolor="black",
        markersize=5,
    )
    figure.colorbar(filled, ax=axis, label="loss", pad=0.02)
    names = frame["axes"].iloc[0] if "axes" in frame else "first direction and second direction"
    first, second = str(names).split(" and ")
    axis.set(xlabel=f"distance along {first} [L2 norm]", ylabel=f"along {second} [L2 norm]")
    axis.grid(visible=False)
