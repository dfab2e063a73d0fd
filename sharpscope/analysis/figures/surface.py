"""Figures of the loss surface: from frames of probe estimates to a Figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.figures.draw import Row, draw_curves, facets, symlog
from sharpscope.analysis.figures.style import GRAY, Lines, finish, panels, plain, setting_text, styled

CURVATURE = {
    "sam": "SAM sharpness [rise of the loss]",
    "asam": "adaptive SAM sharpness [rise of the loss]",
    "largest": "largest Hessian eigenvalue [loss / L2²]",
    "smallest": "smallest Hessian eigenvalue [loss / L2²]",
    "trace": "trace of the Hessian [loss / L2²]",
    "gradient_norm": "gradient norm [loss / L2]",
    "squared_gradient_norm": "squared gradient norm, two batches [loss² / L2²]",
}
"""Quantity → label of its axis. L2 is the norm of the parameters; sharpness is at the middle radius of the grid."""

STABILITY = {
    "critical_sharpness": "critical sharpness [1 / learning rate]",
    "preconditioned_largest": "preconditioned λ_max [1 / learning rate]",
}
DIRECTIONS = {
    "gradient": "along the gradient",
    "eigenvector": "along the top eigenvector",
    "random": "random, filter-normalized",
}
OUTLIER = 10.0
"""A Ritz value is an outlier if its size is more than this times the root mean square of the spectrum."""


def split_of(probe_set: str) -> str:
    """`train` of `task-hash/train@policy`; the whole name if it names no split."""
    return probe_set.rpartition("@")[0].rpartition("/")[2] or probe_set


def title(functional: str, probe_set: str) -> str:
    """Title of a panel: the functional and the probe set's split."""
    return plain(", ".join(part for part in (functional, split_of(probe_set)) if part))


def sharpness(values: pd.DataFrame, lines: Lines, reference: str = "") -> Figure:
    """Curvature along training: a row of panels for each quantity, functional and probe set.

    `values`: see `frames.probe_values`. Positive quantities are on a logarithmic axis, signed ones on a symmetric one.
    """
    rows = [
        Row(CURVATURE.get(quantity, plain(quantity)), own, "auto", title=title(functional, probe_set))
        for (quantity, functional, probe_set), own in _in_order(values, list(CURVATURE))
    ]
    return facets(rows, lines, reference=reference)


def rho_curves(values: pd.DataFrame, first_order: pd.DataFrame, lines: Lines) -> Figure:
    """Rise of the functional within a radius rho at the last probed step, and beside it rho·‖∇L‖ (dotted).

    Both frames: setting, seed, quantity, functional, probe_set, rho, value; the first-order term stands under
    the name of the quantity that it belongs to. A row of panels for each quantity, functional and probe set.
    """
    rows = []
    for (quantity, functional, probe_set), own in _in_order(values):
        same = first_order[["quantity", "functional", "probe_set"]] == [quantity, functional, probe_set]
        beside = first_order[same.all(axis=1) & first_order["setting"].isin(own["setting"])]
        label = f"{plain(quantity)}: rise of the loss [loss]"
        rows.append(Row(label, own, "auto", beside, "first order, rho·‖∇L‖", title(functional, probe_set)))
    return facets(rows, lines, x="rho", xlabel="rho [L2, parameters]", xscale="log")


def outliers(nodes: pd.DataFrame) -> pd.DataFrame:
    """Ritz values that lie far outside the bulk of a spectrum: setting, seed, negative, positive (numbers of them), ritz.

    An outlier is more than OUTLIER times √Σ w λ² away from 0, the root mean square of all eigenvalues by the estimated
    density. `ritz` is the number of Ritz values.
    """
    rms = np.sqrt((nodes["weight"] * nodes["node"] ** 2).groupby([nodes["setting"], nodes["seed"]]).transform("sum"))
    marked = nodes.assign(negative=nodes["node"] < -OUTLIER * rms, positive=nodes["node"] > OUTLIER * rms, ritz=1)
    return marked.groupby(["setting", "seed"], as_index=False)[["negative", "positive", "ritz"]].sum()


def spectrum(nodes: pd.DataFrame, lines: Lines) -> Figure:
    """Ritz values of the Hessian and their weights at the last probed step: a panel for each functional and probe set.

    `nodes`: setting, seed, functional, probe_set, node, weight; each seed's weights sum to 1. All seeds are drawn. Text:
    median number of outliers of a seed below and above the bulk, see `outliers`.
    """
    import seaborn as sns

    groups = _groups(nodes, "functional", "probe_set")
    with styled():
        figure, axes = panels(len(groups), height=2.3)
        for axis, ((functional, probe_set), own) in zip(axes, groups, strict=True):
            labels = sorted(own["setting"].unique())
            look = {"palette": {name: lines[name].color for name in labels}, "hue_order": labels, "style_order": labels}
            marks = {name: lines[name].marker for name in labels}
            shared = {"hue": "setting", "style": "setting", "markers": marks, "legend": False, "rasterized": True}
            sns.scatterplot(own, x="node", y="weight", ax=axis, s=9, alpha=0.5, linewidth=0, **look, **shared)
            counts = outliers(own).groupby("setting")[["negative", "positive", "ritz"]].median()
            for name in labels:
                axis.plot(
                    [], [], linestyle="none", marker=marks[name], color=lines[name].color, label=setting_text(name)
                )
            text = "\n".join(
                f"{setting_text(name)}: {count['negative']:g} / {count['positive']:g}"
                for name, count in counts.iterrows()
            )
            axis.text(0.02, 0.98, "outliers < 0 / > 0\n" + text, transform=axis.transAxes, va="top", fontsize=6)
            symlog(axis.xaxis, own["node"])
            axis.axvline(0, color=GRAY, linewidth=0.8)
            axis.set(yscale="log", ylim=(own["weight"].min() / 3, 300), xlabel="Ritz value [loss / L2²]")
            axis.set(ylabel="weight [share of the spectrum]", title=title(functional, probe_set))
        finish(figure, axes)
    return figure


def slices(values: pd.DataFrame, lines: Lines) -> Figure:
    """Loss along a direction through the parameters, as its difference from L(θ): a panel for each direction and probe set.

    `values`: see `frames.slice_values`; random directions share a panel. The abscissa is the mean distance over seeds.
    """
    values = values.assign(kind=values["direction"].str.replace(r"_\d+$", "", regex=True))
    order = [*DIRECTIONS, *sorted(set(values["kind"]) - set(DIRECTIONS))]
    groups = sorted(_groups(values, "functional", "probe_set", "kind"), key=lambda g: (*g[0][:2], order.index(g[0][2])))
    kinds = values["kind"].nunique()
    with styled():
        figure, axes = panels(len(groups), columns=kinds, height=1.8)
        for number, (axis, ((functional, probe_set, kind), own)) in enumerate(zip(axes, groups, strict=True)):
            distance = own.groupby(["setting", "point"])["distance"].transform("mean")
            seed = own["seed"].astype(str) + " " + own["direction"]
            draw_curves(axis, own.assign(distance=distance, seed=seed), lines, x="distance")
            axis.axvline(0, color=GRAY, linewidth=0.8)
            if functional == "expected_failure" and own["value"].abs().max() > 1:
                axis.set_ylim(-1.05, 1.05)  # a failure rate moves by 1 at most; beyond, a few importance weights speak
            label = "loss − loss at 0 [loss]" if number % kinds == 0 else ""
            axis.set(xlabel="distance [L2 norm]", ylabel=label)
            axis.set_title(f"{DIRECTIONS.get(kind, kind)}\n{title(functional, probe_set)}")
        finish(figure, axes)
    return figure


def stability(values: pd.DataFrame, lines: Lines, reference: str = "") -> Figure:
    """Sharpness by step against the optimizer's stability threshold (dotted): a row for each quantity, functional and set.

    `values`: see `frames.stability_values`.
    """
    rows = []
    for (quantity, functional, probe_set), own in _in_order(values, list(STABILITY)):
        threshold = own.drop(columns="value").rename(columns={"threshold": "value"}).dropna(subset=["value"])
        label = STABILITY.get(quantity, plain(quantity))
        rows.append(Row(label, own, "auto", threshold, "stability threshold", title(functional, probe_set)))
    return facets(rows, lines, reference=reference, height=1.5)


def _groups(values: pd.DataFrame, *columns: str) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """(values of the columns, rows with them); of a functional, the training set comes before others."""
    groups = [(tuple(map(str, key)), own) for key, own in values.groupby(list(columns), observed=True)]
    functional, probe_set = columns.index("functional"), columns.index("probe_set")
    return sorted(groups, key=lambda item: (item[0][functional], split_of(item[0][probe_set]) != "train"))


def _in_order(values: pd.DataFrame, quantities: Sequence[str] = ()) -> list[tuple[tuple[str, str, str], pd.DataFrame]]:
    """(quantity, functional, probe set) and its rows; of a functional and set, the quantities in their order."""
    rank = {name: number for number, name in enumerate(quantities)}
    groups = _groups(
        values.assign(rank=values["quantity"].map(rank).fillna(99)), "functional", "probe_set", "rank", "quantity"
    )
    return [((quantity, functional, probe_set), own) for (functional, probe_set, _, quantity), own in groups]
