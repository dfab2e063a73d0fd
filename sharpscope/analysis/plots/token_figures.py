"""Figures of single tokens: gradient norms, concentration, weights, distributions over training, and a heat map."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from sharpscope.analysis.frames import stacked
from sharpscope.analysis.plots.registry import not_from_runs, plot
from sharpscope.analysis.plots.style import (
    GRAY,
    Picture,
    band,
    color_of,
    colored,
    colors,
    diverging,
    inches,
    legend,
    plain,
)
from sharpscope.analysis.study import recorded_steps
from sharpscope.analysis.text import method_label, visible
from sharpscope.analysis.tokens import (
    complement,
    held_by_largest,
    inverse_inclusion,
    passed_steps,
)
from sharpscope.errors import UserError, nearest
from sharpscope.traces import Runs

POINTS = 4_000
"""Tokens that a scatter plot or a violin shows, at most: a random sample, the same each time."""
VIOLINS = 8
"""Steps that have a violin, at most."""
BINS = 24
ENOUGH = 50
"""Exact norms from which on they are shown in place of those of the local method."""
SHOWN_TOKENS = 20

DISTRIBUTIONS = {
    "weight": ("token weight", False),
    "logit_grad_norm": ("gradient norm of a token over the logits", True),
    "score_norm": ("gradient norm of a token over all parameters", True),
    "score_norm_local": ("gradient norm of a token over all parameters, local method", True),
    "attribution": ("size of a token's share of the squared gradient norm", True),
    "effect_kl": ("size of a token's effect on the KL divergence [nats]", True),
    "effect_entropy": ("size of a token's effect on the entropy [nats]", True),
    "effect_heldout": ("size of a token's effect on the held-out loss [nats]", True),
    "effect_sharpness": ("size of a token's effect on the sharpness", True),
}
"""Column of `tokens` -> its name on an axis, and whether the size is shown on a logarithmic axis."""


def sampled(frame: pd.DataFrame, count: int = POINTS) -> pd.DataFrame:
    """At most `count` rows, chosen at random but the same each time, in their order."""
    if len(frame) <= count:
        return frame
    # in the order of the table, which files of the figure's numbers keep
    return frame.sample(count, random_state=0).sort_index()


def token_columns(runs: Runs, columns: Sequence[str], required: Sequence[str]) -> pd.DataFrame:
    """`setting` and columns of all tokens that have the required ones, of a large run of `passed_steps`."""
    pieces = [
        part.assign(setting=method_label(run.method))
        for run in runs
        for part in run.iter_tokens(passed_steps(run), columns, required)
    ]
    return stacked(pieces, ["setting", *columns])


# -- Gradient norm against probability


def norm_frame(runs: Runs) -> pd.DataFrame:
    """Token rows with the norm of their gradient (`logit_grad_norm`, `score_norm`)."""
    names = {
        "logit_grad_norm": "over the logits",
        "score_norm": "over all parameters",
        "score_norm_local": "over all parameters, local method",
    }
    parts = []
    for column, over in names.items():
        tokens = sampled(token_columns(runs, ["step", "logp", column], [column]))
        rest = complement(tokens["logp"].to_numpy(float))
        norm = tokens[column].to_numpy(float)
        low = rest
        high = np.sqrt(2) * rest  # exact, for the logits
        if column != "logit_grad_norm" and len(tokens):
            ratios = norm[rest > 1e-4] / rest[rest > 1e-4]
            ends = np.quantile(ratios, [0.05, 0.95]) if len(ratios) else (np.nan, np.nan)
            low = ends[0] * rest
            high = ends[1] * rest
        made = {
            "probability": 1 - rest,
            "norm": norm,
            "low": low,
            "high": high,
        }
        parts.append(tokens[["setting", "step"]].assign(over=over, **made))
    whole = pd.concat([part for part in parts if len(part)] or parts[:1])
    exact = (whole["over"] == "over all parameters").sum()  # shown, where there are enough
    hidden = "over all parameters" + (", local method" if exact >= ENOUGH else "")
    return whole[(whole["over"] != hidden) | (len(parts[2]) == 0)]


@plot(norm_frame, "probability", "norm", "low", "high", "over")
def gradient_norm(figure: Picture, frame: pd.DataFrame) -> None:
    """Gradient norm of each token against its probability π, with the band of 1 − π.

    Over the logits the band is the exact bound, 1 − π to √2·(1 − π); over all parameters it is 1 − π times the 5 % and the 95 %
    quantile of the tokens' ratios.
    """
    one = frame["setting"].nunique() < 2 if "setting" in frame else True
    for axis, kind, tokens in figure.panels_by(frame, "over", 2.3):
        rows = tokens.sort_values("probability")
        ends = rows["probability"], rows["low"], rows["high"]
        bound = "bound: 1 − π to √2·(1 − π)" if "logits" in kind else "1 − π, times 5 % to 95 %"
        axis.fill_between(
            *ends,
            color=GRAY,
            alpha=0.35,
            linewidth=0,
            label=bound,
        )
        sns.scatterplot(
            rows.assign(token="token") if one else rows,
            x="probability",
            y="norm",
            hue="token" if one else "setting",
            palette={"token": colors()[0]} if one else color_of(frame["setting"]),
            s=5,
            alpha=0.5,
            linewidth=0,
            ax=axis,
            rasterized=len(rows) > 500,
        )
        axis.set(xlabel="probability π of the token", ylabel=f"gradient norm {kind} [L2]")
        axis.set(xlim=(-0.02, 1.02), ylim=(0, None))
    legend(figure)


# -- Concentration


GRID = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, 161)])
"""Shares of the tokens at which a Lorenz curve is given."""


def lorenz_frame(runs: Runs) -> pd.DataFrame:
    """Tokens' shares of the gradient (`attribution`), or their |c|·‖p − e_y‖ where no share is recorded."""
    whole = ["step", "loss_coef", "logit_grad_norm"]
    parts = []
    for name, run in runs.by_name.items():
        one = Runs(run.path, {name: run}, {})
        columns = ["step", "attribution", "inclusion_probability"]
        tokens = token_columns(one, columns, ["attribution"])
        measure = "share of the squared gradient norm, in size"
        tokens = tokens.assign(size=tokens["attribution"].abs().astype(float))
        if tokens.empty:
            tokens = token_columns(one, [*whole, "inclusion_probability"], whole[1:])
            sizes = tokens["loss_coef"].abs() * tokens["logit_grad_norm"]
            measure = "|c|·‖p − e_y‖"
            tokens = tokens.assign(size=sizes.astype(float), inclusion_probability=np.nan)
        for step, rows in tokens.groupby("step"):
            if len(rows) >= 100 and rows["size"].sum() > 0:
                curve = held_by_largest(rows["size"].to_numpy(), inverse_inclusion(rows), GRID)
                values = {"tokens": GRID, "gradient": curve}
                parts.append(pd.DataFrame(values).assign(run=name, step=step, measure=measure))
    return stacked(parts, ["run", "step", "measure", "tokens", "gradient"])


@plot(lorenz_frame, "run", "step", "tokens", "gradient", "measure")
def lorenz(figure: Picture, frame: pd.DataFrame) -> None:
    """How few tokens carry the gradient: share of it that the largest tokens hold, with 1 % of the tokens marked.

    A line is the mean over the steps of a run, its band the range over them; a straight diagonal would be equal tokens.
    """
    (axis,) = figure.panels(1, 2.5)
    for at, (run, color, rows) in enumerate(colored(frame, "run", color_of(frame["run"]))):
        table = rows.pivot(index="tokens", columns="step", values="gradient")
        table = table[table.index > 0]
        mean = table.mean(axis=1)
        axis.plot(table.index, mean, color=color, label=plain(run))
        band(axis, table.index, table.min(axis=1), table.max(axis=1), color)
        held = np.interp(0.01, mean.index, mean)
        axis.plot(0.01, held, "o", color=color, markersize=5)
        if at < 3:
            place = (8, -11 * (at + 1))
            text = f"1 % of the tokens: {100 * held:.0f} %"
            axis.annotate(
                text,
                (0.01, held),
                place,
                textcoords="offset points",
                color=color,
            )
    axis.plot(
        GRID[1:],
        GRID[1:],
        color=GRAY,
        linestyle="--",
        linewidth=0.9,
        label="equal tokens",
    )
    axis.axvline(0.01, color=GRAY, linewidth=0.7, linestyle=":")
    axis.set(xscale="log", xlim=(1e-4, 1), ylim=(0, 1.02))
    axis.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    axis.yaxis.set_major_formatter(PercentFormatter(1, 0, " %"))
    axis.set(xlabel="share of the tokens, the largest first", ylabel="share of the gradient")
    legend(figure)


# -- Weights


WEIGHTS = ("setting", "axis", "x", "width", "weight", "low", "high", "tokens", "gradient")


def weight_frame(runs: Runs) -> pd.DataFrame:
    """Token rows with their `weight`, `logp`, `logit` and coefficient in the loss."""
    needed = ["logp", "logit", "weight", "loss_coef", "logit_grad_norm"]
    tokens = token_columns(runs, ["step", *needed], needed)
    parts = []
    for setting, rows in tokens.groupby("setting"):
        weight = rows["weight"].to_numpy(float)
        pull = np.abs(rows["loss_coef"].to_numpy(float)) * rows["logit_grad_norm"].to_numpy(float)
        mass = pull / np.where(weight > 0, weight, 1.0)  # what the token would carry with weight 1
        for axis in ("probability", "logit"):
            x = rows["logit"].to_numpy(float)
            x = np.exp(rows["logp"].to_numpy(float)) if axis == "probability" else x
            parts.append(binned_weights(x, weight, mass).assign(axis=axis, setting=setting))
    return stacked(parts, WEIGHTS)


def binned_weights(x: np.ndarray, weight: np.ndarray, mass: np.ndarray) -> pd.DataFrame:
    """x, width, weight (median), low, high (10 % and 90 %), tokens and gradient (shares of both) in BINS equal bins of x."""
    edges = np.linspace(x.min(), x.max() + 1e-9, BINS + 1)
    bins = np.clip(np.digitize(x, edges) - 1, 0, BINS - 1)
    grouped = pd.DataFrame({"weight": weight, "mass": mass}).groupby(bins)
    ends = grouped["weight"].quantile(np.array([0.1, 0.5, 0.9])).unstack()
    total = mass.sum() if mass.sum() > 0 else 1.0
    return pd.DataFrame(
        {
            "x": (edges[:-1] + edges[1:])[ends.index] / 2,
            "width": edges[1] - edges[0],
            "weight": ends[0.5].to_numpy(),
            "low": ends[0.1].to_numpy(),
            "high": ends[0.9].to_numpy(),
            "tokens": (grouped.size() / len(x)).to_numpy(),
            "gradient": (grouped["mass"].sum() / total).to_numpy(),
        }
    )


@plot(weight_frame, *WEIGHTS)
def weights(figure: Picture, frame: pd.DataFrame) -> None:
    """Token weights against probability and logit, above where the tokens are and where the gradient is.

    Above: median, and the range that holds 80 % of the tokens. Below: solid the tokens, dashed |c|·‖p − e_y‖ without the weight.
    """
    figure.set_figheight(3.4)
    axes = figure.subplots(
        2,
        2,
        sharex="col",
        sharey="row",
        height_ratios=[3, 2],
    )
    palette = color_of(frame["setting"])
    for column, kind in enumerate(("probability", "logit")):
        above, below = axes[:, column]
        for setting, color, rows in colored(frame[frame["axis"] == kind], "setting", palette):
            above.plot(
                rows["x"],
                rows["weight"],
                label=plain(setting),
                color=color,
            )
            band(above, rows["x"], rows["low"], rows["high"], color)
            for share, line in (("tokens", "-"), ("gradient", "--")):
                below.step(
                    rows["x"],
                    rows[share],
                    where="mid",
                    linestyle=line,
                    color=color,
                )
        below.set_xlabel("probability π of the token" if column == 0 else "logit of the token")
        below.yaxis.set_major_formatter(PercentFormatter(1, 0, " %"))
    for line, text in (("-", "tokens"), ("--", "gradient")):
        axes[1, 0].plot(
            [],
            [],
            color=GRAY,
            linestyle=line,
            label=f"share of the {text}",
        )
    axes[0, 0].set_ylabel("token weight")
    axes[1, 0].set_ylabel("share")
    legend(figure)


@plot(not_from_runs, "method", "axis", "x", "weight")
def weight_functions(figure: Picture, frame: pd.DataFrame) -> None:
    """Weights as functions of the logit and of the probability, as `sharpscope rotate --plot` tabulates them."""
    axes = figure.panels(2, 2.2)
    palette = color_of(frame["method"])
    for axis, name in zip(axes, ("logit", "probability"), strict=True):
        for method, color, part in colored(frame[frame["axis"] == name], "method", palette):
            axis.plot(
                part["x"],
                part["weight"],
                color=color,
                label=plain(method),
            )
        axis.set(xlabel=f"{name} of the token", ylabel="token weight")
    legend(figure)


# -- Distributions over training


def distribution_frame(runs: Runs, column: str = "weight") -> pd.DataFrame:
    """Token rows with the column, such as `weight`, `score_norm`, `attribution` or `effect_kl`."""
    if column not in DISTRIBUTIONS:
        raise UserError(f"column {column}: unknown{nearest(column, DISTRIBUTIONS)}")
    tokens = token_columns(runs, ["step", column], [column])
    values = tokens[column].astype(float)
    if DISTRIBUTIONS[column][1]:
        values = values.abs()
        tokens = tokens[values > 0]
        values = values[values > 0]
    steps = np.sort(tokens["step"].unique())
    at = np.unique(np.linspace(0, len(steps) - 1, min(VIOLINS, len(steps))).round().astype(int))
    frame = tokens[["setting", "step"]].assign(quantity=column, value=values)
    frame = frame[frame["step"].isin(steps[at])]
    parts = [sampled(rows, POINTS // 4) for _, rows in frame.groupby(["setting", "step"])]
    return pd.concat([frame[:0], *parts]).reset_index(drop=True)


@plot(distribution_frame, "setting", "step", "quantity", "value")
def distribution(figure: Picture, frame: pd.DataFrame) -> None:
    """How a token quantity is distributed at steps of training, as violins with quartiles (choice: `column`)."""
    (axis,) = figure.panels(1, 2.5)
    quantity = str(frame["quantity"].iloc[0])
    name, log = DISTRIBUTIONS.get(quantity, (quantity, False))
    several = frame["setting"].nunique() > 1
    sns.violinplot(
        frame,
        x="step",
        y="value",
        hue="setting" if several else None,
        color=None if several else colors()[0],
        palette=color_of(frame["setting"]) if several else None,
        log_scale=(None, log),
        inner="quart",
        cut=0,
        density_norm="width",
        linewidth=0.7,
        ax=axis,
    )
    axis.set(xlabel="step", ylabel=name)
    legend(figure)


# -- Heat map of tokens and steps


def token_step_frame(runs: Runs) -> pd.DataFrame:
    """Tokens' shares of the gradient (`attribution`) in one run at two steps or more."""
    run = runs[0]
    columns = ["step", "token_id", "attribution", "text"]
    steps = recorded_steps(run, "attribution")
    tokens = run.tokens(steps, columns).dropna(subset=["attribution"])
    names = tokens["text"].fillna(tokens["token_id"].map(lambda i: f"⟨{i}⟩"))
    tokens = tokens.assign(token=names.map(visible), share=tokens["attribution"].astype(float))
    sums = tokens.groupby(["token", "step"])["share"].sum().reset_index()
    largest = sums.assign(size=sums["share"].abs()).groupby("token")["size"].sum()
    largest = largest[largest > 0.002 * largest.max()].nlargest(SHOWN_TOKENS)
    kept = sums[sums["token"].isin(largest.index)]
    return kept.astype({"step": int}).reset_index(drop=True)


@plot(token_step_frame, "token", "step", "share")
def token_steps(figure: Picture, frame: pd.DataFrame) -> None:
    """Which tokens hold the gradient at which step: the shares of equal tokens summed, as a heat map of one run."""
    table = 100 * frame.pivot(index="token", columns="step", values="share").fillna(0.0)
    table = table.loc[table.abs().sum(axis=1).sort_values(ascending=False).index]
    (axis,) = figure.panels(1, 0.6 + 0.16 * len(table))
    heat_map(axis, table.rename(index=lambda text: plain(f"“{text}”", 18)), "share of ‖∇L‖² [%]")
    axis.set(xlabel="step", ylabel="token")


def heat_map(axis: Axes, table: pd.DataFrame, label: str) -> None:
    """A table as a heat map around 0; full color at the 98 % quantile of the sizes."""
    end = np.nanquantile(np.abs(table.to_numpy(float)), 0.98) or 1.0
    axis.grid(visible=False)
    wide = inches(axis) > 5
    sns.heatmap(
        table,
        cmap=diverging(),
        center=0.0,
        vmin=-end,
        vmax=end,
        cbar_kws={"label": label, "pad": 0.02},
        linewidths=0.3 if table.size < 800 else 0.0,
        linecolor=mpl.rcParams["figure.facecolor"],
        xticklabels=max(1, -(-table.shape[1] // (14 if wide else 6))),
        yticklabels=1,
        ax=axis,
    )
    axis.tick_params(length=0)
    axis.tick_params(axis="both", rotation=0)
