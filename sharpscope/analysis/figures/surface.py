"""Figures of the loss surface: from frames of probe estimates to a Figure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.figures.steps import draw_bands
from sharpscope.analysis.figures.style import GRAY, Lines, finish, panels, plain, styled
from sharpscope.analysis.statistics import band

PLACE = ["quantity", "functional", "probe_set"]

CURVATURE = {
    "largest": "largest Hessian eigenvalue",
    "smallest": "smallest Hessian eigenvalue",
    "trace": "trace of the Hessian",
    "gradient_norm": "gradient norm of the functional [L2, parameters]",
    "squared_gradient_norm": "squared gradient norm, two independent batches",
    "sam": "SAM sharpness, middle radius",
    "asam": "adaptive SAM sharpness, middle radius",
}

DIRECTIONS = {
    "gradient": "along the gradient",
    "eigenvector": "along the top eigenvector",
    "random": "random, filter-normalized",
}


def places(values: pd.DataFrame) -> list[tuple[str, str, str]]:
    """(quantity, functional, probe set) of a frame, in order: one panel each."""
    return sorted(set(map(tuple, values[PLACE].to_numpy().tolist())))


def split_of(probe_set: str) -> str:
    """`train` of `task-hash/train@policy`; the whole name if it names no split."""
    return probe_set.rpartition("@")[0].rpartition("/")[2] or probe_set


def title(functional: str, probe_set: str) -> str:
    """What a panel is about: the functional and the probe set's split."""
    return plain(f"{functional}, {split_of(probe_set)}")


def _at(values: pd.DataFrame, place: tuple[str, str, str]) -> pd.DataFrame:
    return values[(values[PLACE] == list(place)).all(axis=1)]


def sharpness(values: pd.DataFrame, lines: Lines) -> Figure:
    """Curvature along training: a panel for each quantity, functional and probe set."""
    content = places(values)
    with styled():
        figure, axes = panels(len(content))
        for axis, place in zip(axes, content, strict=True):
            quantity, functional, probe_set = place
            draw_bands(axis, _at(values, place), lines)
            label = CURVATURE.get(quantity, plain(quantity))
            axis.set(xlabel="step", ylabel=label, title=title(functional, probe_set))
        finish(figure, axes)
    return figure


def rho_curves(values: pd.DataFrame, first_order: pd.DataFrame, lines: Lines) -> Figure:
    """Rise of the functional within a radius rho at the last probed step, and beside it rho·‖∇L‖ (dotted).

    Both frames: setting, seed, quantity, functional, probe_set, rho, value; the first-order term stands under
    the name of the quantity that it belongs to. A panel for each quantity, functional and probe set.
    """
    content = places(values)
    with styled():
        figure, axes = panels(len(content))
        for axis, place in zip(axes, content, strict=True):
            quantity, functional, probe_set = place
            chosen, beside = _at(values, place), _at(first_order, place)
            draw_bands(axis, chosen, lines, x="rho")
            for label in sorted(set(chosen["setting"]) & set(beside["setting"])):
                rows = band(beside[beside["setting"] == label], ["rho"])
                # Bars wider than the values' markers: a line of one point, or one under the values, would not be seen.
                thin: dict[str, Any] = {"color": lines[label].color, "linewidth": 0.9, "linestyle": ":"}
                thin |= {"marker": "_", "markersize": 14}
                axis.plot(rows["rho"], rows["mean"], label="first order, rho·‖∇L‖", **thin)
            scale = "log" if (chosen["value"] > 0).all() else "linear"
            axis.set(
                xscale="log",
                yscale=scale,
                xlabel="rho [L2, parameters]",
                ylabel=f"{plain(quantity)}: rise of the loss",
                title=title(functional, probe_set),
            )
        finish(figure, axes)
    return figure


def density_curve(nodes: np.ndarray, weights: np.ndarray, grid: np.ndarray, width: float) -> np.ndarray:
    """Σ_i w_i N(grid; node_i, width²): the spectral measure smoothed, per unit of eigenvalue."""
    kernel = np.exp(-0.5 * ((grid[:, None] - nodes) / width) ** 2) / (width * np.sqrt(2 * np.pi))
    return np.asarray(kernel @ weights)


def spectrum(nodes: pd.DataFrame, lines: Lines) -> Figure:
    """Spectral density of the Hessian at the last probed step, mean over seeds: a panel for each functional and set.

    `nodes`: setting, seed, functional, probe_set, node, weight; each seed's weights sum to 1.
    """
    content = sorted(set(map(tuple, nodes[["functional", "probe_set"]].to_numpy().tolist())))
    with styled():
        figure, axes = panels(len(content), width=4.4)
        for axis, (functional, probe_set) in zip(axes, content, strict=True):
            chosen = nodes[(nodes["functional"] == functional) & (nodes["probe_set"] == probe_set)]
            low, high = float(chosen["node"].min()), float(chosen["node"].max())
            width = 0.01 * (high - low) or 1.0
            highest = 1e-4 / width
            grid = np.linspace(low - 4 * width, high + 4 * width, 600)
            for label in sorted(chosen["setting"].unique()):
                curves = [
                    density_curve(one["node"].to_numpy(), one["weight"].to_numpy(), grid, width)
                    for _, one in chosen[chosen["setting"] == label].groupby("seed")
                ]
                axis.plot(grid, np.mean(curves, axis=0), label=plain(label), **lines[label].plot)
                highest = max(highest, float(np.max(curves)))
            axis.axvline(0, color=GRAY, linewidth=0.8)
            axis.set(
                yscale="log",
                ylim=(1e-5 / width, 2 * highest),
                xlabel="Hessian eigenvalue",
                ylabel="density [1 / eigenvalue]",
                title=f"{title(functional, probe_set)}; smoothed by {width:.2g}",
            )
        finish(figure, axes)
    return figure


def slices(values: pd.DataFrame, lines: Lines) -> Figure:
    """Loss along a direction through the parameters, as its difference from L(θ): a panel for each direction and place.

    `values`: see `probe_frames.slice_values`; random directions share a panel.
    """
    kind = values["direction"].str.replace(r"_\d+$", "", regex=True)
    values = values.assign(kind=kind)
    content = sorted(
        set(map(tuple, values[["functional", "probe_set", "kind"]].to_numpy().tolist())),
        key=lambda place: (place[0], place[1], list(DIRECTIONS).index(place[2]) if place[2] in DIRECTIONS else 9),
    )
    with styled():
        figure, axes = panels(len(content), columns=3, width=4.2)
        for axis, (functional, probe_set, direction) in zip(axes, content, strict=True):
            here = values[
                (values[["functional", "probe_set", "kind"]] == [functional, probe_set, direction]).all(axis=1)
            ]
            for (label, _), one in here.groupby(["setting", "direction"]):
                rows = band(one, ["point"])
                distance = one.groupby("point")["distance"].mean()
                axis.plot(distance, rows["mean"], label=plain(label), **lines[str(label)].plot)
                if (rows["n"] > 1).any():
                    axis.fill_between(
                        distance, rows["low"], rows["high"], color=lines[str(label)].color, alpha=0.16, linewidth=0
                    )
            axis.axvline(0, color=GRAY, linewidth=0.8)
            if functional == "expected_failure" and here["value"].abs().max() > 1:
                axis.set_ylim(-1.05, 1.05)  # a failure rate moves by 1 at most; beyond, a few importance weights speak
            axis.set(
                xlabel="distance [L2, parameters]",
                ylabel="loss − loss at 0",
                title=f"{DIRECTIONS.get(direction, direction)}: {title(functional, probe_set)}",
            )
        finish(figure, axes)
    return figure


def stability(values: pd.DataFrame, lines: Lines) -> Figure:
    """Largest eigenvalue of the AdamW-preconditioned Hessian by step, and AdamW's stability threshold (dotted).

    `values`: see `probe_frames.stability_values`; a panel for each functional and probe set.
    """
    content = sorted(set(map(tuple, values[["functional", "probe_set"]].to_numpy().tolist())))
    with styled():
        figure, axes = panels(len(content))
        for axis, (functional, probe_set) in zip(axes, content, strict=True):
            here = values[(values["functional"] == functional) & (values["probe_set"] == probe_set)]
            draw_bands(axis, here, lines)
            for label in sorted(here["setting"].unique()):
                bound = here[here["setting"] == label].groupby("step")["threshold"].mean().dropna()
                thin: dict[str, Any] = {"color": lines[label].color, "linewidth": 1.0, "linestyle": ":"}
                thin["label"] = "AdamW's threshold, (2 + 2β₁)/((1 − β₁)·lr)"
                if len(bound) == 1:  # a line of one point would not be seen
                    axis.axhline(float(bound.iloc[0]), **thin)
                else:
                    axis.plot(bound.index.astype(float), bound, **thin)
            if (here["value"] > 0).all():
                axis.set_yscale("log")
            axis.set(
                xlabel="step",
                ylabel="largest eigenvalue, preconditioned Hessian",
                title=title(functional, probe_set),
            )
        finish(figure, axes)
    return figure
