"""The figures: from small frames to matplotlib figures, all in one style, with their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.special import stdtrit

from sharpscope.analysis.figures.style import (
    BLACK,
    BLUE,
    COLORS,
    GRAY,
    MARKERS,
    Line,
    Lines,
    Picture,
    finish,
    lines,
    panels,
    plain,
    setting_text,
    styled,
)
from sharpscope.analysis.forks import COMPARISONS, NAMES, UNITS, fork_differences
from sharpscope.analysis.frames import (
    SHARPNESS,
    STEPS,
    Quantity,
    eval_values,
    sharpness_values,
    split_of,
    step_values,
    token_samples,
)
from sharpscope.analysis.report import COVERED, laid_out, main_differences
from sharpscope.analysis.statistics import FEWEST
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import INCLUSION, complement, inverse_inclusion
from sharpscope.traces import Runs

POINTS = 60
"""Points of a curve over steps, at most; of longer runs each point is a mean over several steps."""
INTERVALS = (
    f"Line: mean over seeds; band: 95 % t-interval from {FEWEST} seeds on, below that a thin line for each seed."
)
FIGURES = {
    "reward": ("Reward and accuracy on the training prompts.", ("reward_mean", "accuracy")),
    "policy": (
        "Entropy and length of completions, and how far a step moves the policy.",
        ("entropy_mean", "completion_length_mean", "truncated_fraction", "kl_step"),
    ),
    "gradient_norm": (
        "Gradient norm, size of the update, and how often clipping binds.",
        ("grad_norm", "update_norm", "grad_clipped"),
    ),
    "rotation": (
        "Angle between the method's gradient (and optimizer's step) and those of the reference objective on the same "
        "completions, beside the angle by which the luck of one batch turns the gradient.",
        ("gradient_rotation", "update_rotation", "noise_rotation"),
    ),
}
"""Name of a figure of curves → caption and quantities."""
PULL = ["logp", "weight", "loss_coef", "score_norm_local", INCLUSION]
REST = "1 − π of the token"
SMALLEST = 1e-8  # where 1 − π is 0 in float32, it is drawn here


def curves(values: pd.DataFrame, styles: Lines, xlabel: str = "step") -> Figure:
    """A panel for each quantity, a curve for each setting: the mean over seeds with its interval, see INTERVALS.

    Args:
        values: setting, seed, step, quantity, value; with `low` and `high`, the interval of a run alone; with `saturated`, points that
            are drawn hollow.
        styles: of the settings.
        xlabel: label of the abscissa.
    """
    quantities = list(dict.fromkeys(values["quantity"]))
    with styled():
        figure, axes = panels(len(quantities), height=1.9)
        for axis, quantity in zip(axes, quantities, strict=True):
            shown = STEPS.get(quantity, Quantity(plain(quantity, 100)))
            own = values[values["quantity"] == quantity]
            own = own.assign(value=shown.factor * own["value"]).dropna(subset=["value"])
            for setting, rows in own.groupby("setting", sort=True):
                _curve(axis, rows, styles[str(setting)], setting_text(setting))
            if shown.log and (own["value"] > 0).all() and own["value"].max() > 5 * own["value"].min():
                axis.set_yscale("log")
            axis.set(xlabel=xlabel, ylabel=shown.name)
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            if quantity.endswith("_rotation"):
                axis.set_ylim(bottom=0)
        finish(figure, axes)
    return figure


def _curve(axis: Axes, rows: pd.DataFrame, line: Line, label: str) -> None:
    table = _in_blocks(rows.pivot_table(index="step", columns="seed", values="value"))
    mean, count = table.mean(axis=1), table.count(axis=1)
    marker = line.marker if len(table) <= 12 else ""
    axis.plot(table.index, mean, label=label, marker=marker, **line.plot)
    if table.shape[1] >= FEWEST:
        half = stdtrit(np.maximum(count - 1, 1), 0.975) * table.std(axis=1, ddof=1) / np.sqrt(count)
        axis.fill_between(table.index, mean - half, mean + half, color=line.color, linewidth=0, alpha=0.16)
    elif table.shape[1] > 1:
        axis.plot(table.index, table, color=line.color, linewidth=0.5, alpha=0.5)
    elif "low" in rows and rows["low"].notna().any():
        arms = [rows["value"] - rows["low"], rows["high"] - rows["value"]]
        axis.errorbar(
            rows["step"], rows["value"], yerr=arms, color=line.color, linestyle="none", linewidth=1, capsize=2
        )
    if "saturated" in rows and rows["saturated"].any():
        bad = rows[rows["saturated"]]
        axis.plot(
            bad["step"],
            bad["value"],
            "o",
            markerfacecolor="w",
            markeredgecolor=line.color,
            markersize=6,
            label="saturated",
        )


def _in_blocks(table: pd.DataFrame) -> pd.DataFrame:
    """The rows (by step) with several in a row averaged, so that POINTS are left."""
    size = -(-len(table) // POINTS)
    if size <= 1:
        return table
    block = np.arange(len(table)) // size
    made = table.groupby(block).mean()
    made.index = pd.Index(table.index.to_series().groupby(block).mean())
    return made


def differences(table: pd.DataFrame) -> Figure:
    """One row for each difference between two settings, with its 95 % interval: a panel for each quantity.

    `table`: quantity, unit, contrast, difference, low, high.
    """
    quantities = list(dict.fromkeys(table["quantity"]))
    contrasts = list(dict.fromkeys(table["contrast"]))[::-1]
    with styled():
        figure, axes = panels(len(quantities), height=0.7 + 0.18 * len(contrasts), sharey=True)
        for axis, quantity in zip(axes, quantities, strict=True):
            own = table[table["quantity"] == quantity].set_index("contrast").reindex(contrasts)
            factor = 100 if (own["unit"] == "share").any() else 1
            middle, low, high = (factor * own[name].to_numpy(dtype=float) for name in ("difference", "low", "high"))
            height = np.arange(len(contrasts))
            axis.axvline(0, color=GRAY, linewidth=0.8)
            axis.hlines(height, low, high, color=BLUE, linewidth=1.2)
            axis.plot(middle, height, "o", color=BLUE)
            axis.set_yticks(height, [setting_text(name) for name in contrasts])
            label = f"{plain(quantity, 80)}{' [points]' if factor > 1 else ''}"
            axis.set(xlabel=fill(label, 26), ylim=(-0.6, len(contrasts) - 0.4))
        finish(figure, axes)
    return figure


def rotation_figure(table: pd.DataFrame, noise: float) -> Figure:
    """The angle by which each method turns the gradient and the optimizer's step, as dots on a line of degrees.

    Args:
        table: columns `method`, `gradient_rotation` and `update_rotation` [degrees]; an angle that is NaN is left out.
        noise: angle between the batch's gradient and the expected gradient [degrees], a dashed line; NaN: none.
    """
    shown = table[table[["gradient_rotation", "update_rotation"]].notna().any(axis=1)]
    shown = shown.sort_values("gradient_rotation", ascending=False, na_position="first", kind="stable")
    with styled():
        figure, (axis,) = panels(1, height=0.9 + 0.2 * len(shown))
        figure.set_figwidth(5.5)
        height = np.arange(len(shown))
        axis.plot(shown["gradient_rotation"], height, "o", color=BLUE, label="gradient")
        axis.plot(shown["update_rotation"], height, "s", color=COLORS[1], label="optimizer's step")
        if math.isfinite(noise):
            axis.axvline(noise, color=GRAY, linestyle="--", linewidth=1, label=f"noise of the batch, {noise:.0f}°")
        axis.set_yticks(height, [plain(name, 48) for name in shown["method"]])
        axis.set(xlabel="angle to the reference [°]", ylim=(-0.6, len(shown) - 0.4))
        axis.set_xlim(left=0)
        finish(figure, [axis])
    return figure


def weights(samples: Mapping[str, pd.DataFrame], carried: Sequence[pd.DataFrame], styles: Lines) -> Figure:
    """Token weights as observed against 1 − π, and where along it the gradient is that they multiply.

    Args:
        samples: setting → tokens with logp and weight.
        carried: tokens of all settings with logp, weight, loss_coef, score_norm_local and inclusion_probability; may be empty.
        styles: of the settings.
    """
    pulled = pd.concat(carried, ignore_index=True) if carried else pd.DataFrame({"loss_coef": [], "weight": []})
    pulled = pulled[(pulled["loss_coef"] != 0) & (pulled["weight"] > 0)]
    with styled():
        figure, axes = panels(1 + (len(pulled) > 0), height=2.1)
        for label, tokens in samples.items():
            rest = np.maximum(complement(tokens["logp"].to_numpy()), SMALLEST)
            draw_quantiles(axes[0], rest, tokens["weight"].to_numpy(dtype=float), styles[label], label)
        axes[0].set(xscale="log", xlabel=REST, ylabel="token weight", title="median and 10 to 90 % of the tokens")
        axes[0].invert_xaxis()
        if len(pulled):
            rest = np.maximum(complement(pulled["logp"].to_numpy()), SMALLEST)
            count, order = inverse_inclusion(pulled), np.argsort(-rest, kind="stable")
            pull = count * pulled["loss_coef"].abs() * pulled["score_norm_local"] / pulled["weight"]
            for amount, label, dash in ((pull, "gradient without weights", "-"), (count, "tokens", "--")):
                share = np.cumsum(np.asarray(amount, dtype=float)[order])
                axes[1].plot(rest[order], 100 * share / share[-1], color=BLACK, linestyle=dash, label=label)
            axes[1].set(
                xscale="log", xlabel=REST, ylabel="share at this 1 − π or above [%]", title="where the gradient is"
            )
            axes[1].invert_xaxis()
        finish(figure, axes)
    return figure


def draw_quantiles(axis: Axes, x: np.ndarray, y: np.ndarray, line: Line, label: str, bins: int = 24) -> None:
    """Median and 10 to 90 % band of y in `bins` equal bins of ln x; bins of fewer than 5 points are left out."""
    points = pd.DataFrame({"log": np.log(x), "y": y})
    grouped = points.groupby(pd.cut(points["log"], bins, labels=False) if len(points) else [])
    enough = grouped.size() >= 5
    at = np.exp(grouped["log"].mean()[enough])
    low, middle, high = (grouped["y"].quantile(q)[enough] for q in (0.1, 0.5, 0.9))
    axis.plot(at, middle, label=setting_text(label), marker=line.marker if len(at) <= 12 else "", **line.plot)
    axis.fill_between(at, low, high, color=line.color, linewidth=0, alpha=0.16)


def weight_functions(functions: pd.DataFrame, on_tokens: pd.DataFrame | None = None) -> Figure:
    """Weights over logit and probability; below, the median weight of a run's tokens with 10 to 90 % bands.

    `functions`: method, axis (logit | probability), x, weight. `on_tokens`: method, logit, probability, weight of each token.
    """
    labels = {"logit": "logit of the token", "probability": "probability π of the token"}
    styles = lines(dict.fromkeys([*functions["method"], *(on_tokens["method"] if on_tokens is not None else [])]))
    with styled():
        figure, axes = panels(4 if on_tokens is not None else 2)
        for axis, name in zip(axes, labels, strict=False):
            for method, part in functions[functions["axis"] == name].groupby("method", sort=False):
                axis.plot(part["x"], part["weight"], label=setting_text(method), **styles[str(method)].plot)
            axis.set(xlabel=labels[name], ylabel="token weight", title="function, published constants")
        for axis, name in zip(axes[2:], labels, strict=False):
            for method, part in on_tokens.groupby("method", sort=False) if on_tokens is not None else ():
                bins = pd.qcut(part[name], 20, duplicates="drop") if name == "logit" else pd.cut(part[name], 20)
                grouped = part.groupby(bins, observed=True)
                at, line = grouped[name].median(), styles[str(method)]
                axis.plot(at, grouped["weight"].median(), label=setting_text(method), **line.plot)
                low, high = (grouped["weight"].quantile(q) for q in (0.1, 0.9))
                axis.fill_between(at, low, high, color=line.color, linewidth=0, alpha=0.16)
            axis.set(xlabel=labels[name], ylabel="token weight", title="on the run's tokens, calibrated there")
        finish(figure, axes)
    return figure


def score_norms(tokens: pd.DataFrame) -> Figure:
    """Norm of ∇ ln π over all parameters against 1 − π: median and 10 to 90 %, with the law ∝ (1 − π) through the median ratio.

    `tokens`: logp and score_norm_local.
    """
    rest = np.maximum(complement(tokens["logp"].to_numpy()), SMALLEST)
    norm = tokens["score_norm_local"].to_numpy(dtype=float)
    rest, norm = rest[norm > 0], norm[norm > 0]
    with styled():
        figure, (axis,) = panels(1, height=2.4)
        draw_quantiles(axis, rest, norm, Line(BLUE, "-", "o"), "tokens")
        if len(rest):
            ends = np.array([rest.min(), rest.max()])
            axis.plot(ends, np.median(norm / rest) * ends, ":", color=GRAY, label="∝ (1 − π)")
        axis.set(xscale="log", yscale="log", xlabel=REST, ylabel="norm of the gradient of ln π")
        finish(figure, [axis])
    return figure


def probe_pictures(estimates: pd.DataFrame) -> Iterator[Picture]:
    """Figures of one model's probes table: sharpness by step."""
    whole = estimates[(estimates["parameters"] == "all") & ~estimates["converged"].isin([False])]
    along = whole[whole["quantity"].isin(list(SHARPNESS)) & whole["value"].notna()]
    if along["step"].nunique() > 1:
        names = (
            along["quantity"].map(SHARPNESS) + " of " + along["functional"] + ", " + along["probe_set"].map(split_of)
        )
        frame = along.assign(quantity=names, setting="model", seed=0)
        yield Picture("sharpness", "Sharpness by step.", curves(frame, lines(["model"])))


def token_picture(norms: pd.DataFrame) -> Picture:
    """Score norm against probability of one model's tokens."""
    return Picture("score_norm", "Norm of the gradient of ln π against the token's probability.", score_norms(norms))


def fork_effects(table: pd.DataFrame) -> Figure | None:
    """Each arm's difference to the reference with its interval: a row of panels for each state, a panel for each outcome.

    Args:
        table: of one fork, from `sharpscope.analysis.fork_differences`. None is returned if nothing was measured.
    """
    shown = table[(table["arm"] != table["reference"]) & table["difference"].notna()]
    outcomes = [name for name in NAMES if name in set(shown["outcome"])][:5]
    states, arms = list(dict.fromkeys(shown["state"])), list(dict.fromkeys(shown["arm"]))[::-1]
    if not arms or not outcomes:
        return None
    titles = {"step": "optimizer's step", "kl": "matched KL"}
    comparisons = [name for name in COMPARISONS if name in set(shown["comparison"])]
    with styled():
        size = (1.7 * len(outcomes) + 1.4, len(states) * (0.22 * len(arms) + 0.7) + 0.6)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(states), len(outcomes), squeeze=False, sharey=True, sharex="col")
        for (row, column), axis in np.ndenumerate(grid):
            outcome, state = outcomes[column], states[row]
            unit, factor = UNITS.get(outcome, ("", 1.0))
            axis.axvline(0, color=GRAY, linewidth=0.8)
            here = shown[(shown["state"] == state) & (shown["outcome"] == outcome)]
            for n, comparison in enumerate(comparisons):
                own = here[here["comparison"] == comparison].set_index("arm").reindex(arms)
                height = np.arange(len(arms)) + 0.22 * ((len(comparisons) - 1) / 2 - n)
                low, middle, high = (factor * own[name].to_numpy(dtype=float) for name in ("low", "difference", "high"))
                axis.hlines(height, low, high, color=COLORS[n], linewidth=1.2)
                axis.plot(middle, height, MARKERS[n], color=COLORS[n], markersize=3.2, label=titles[comparison])
            axis.set_yticks(range(len(arms)), [plain(arm, 32) for arm in arms])
            axis.set(ylim=(-0.6, len(arms) - 0.4), title=fill(NAMES[outcome], 20) if row == 0 else "")
            axis.set(
                xlabel=unit if row == len(states) - 1 else "",
                ylabel=plain(state) if column == 0 and len(states) > 1 else "",
            )
        finish(figure, list(grid.ravel()))
    return figure


def run_pictures(runs: Runs) -> Iterator[Picture]:
    """The figures of each study among `runs`, and those of their forks."""
    for study, settings in laid_out(runs):
        shown = study.only([setting.label for setting in settings])
        for picture in study_pictures(shown):
            yield replace(picture, name=study.slug + picture.name)
        table = main_differences(study, shown.labels)
        if len(table) > 1:
            caption = f"Differences between settings. {COVERED}"
            yield Picture(f"{study.slug}differences", caption, differences(table))
    forked = fork_differences(runs.forks) if any(run.rows("forks") for run in runs) else pd.DataFrame({"fork": []})
    for name, own in forked.groupby("fork", sort=False):
        figure = fork_effects(own)
        if figure is not None:
            yield Picture(
                f"fork_{name}" if forked["fork"].nunique() > 1 else "forks", "Counterfactual updates.", figure
            )


def study_pictures(study: Study) -> Iterator[Picture]:
    """The figures of curves and of token weights of one study."""
    styles = lines(study.labels)
    steps, accuracy, sharp = step_values(study, list(STEPS)), eval_values(study), sharpness_values(study)
    for name, (caption, quantities) in FIGURES.items():
        rank = {quantity: n for n, quantity in enumerate(quantities)}
        own = steps[steps["quantity"].isin(quantities)] if len(steps) else steps
        if len(own) and not (name == "rotation" and set(own["quantity"]) == {"noise_rotation"}):
            own = own.assign(rank=own["quantity"].map(rank)).sort_values("rank", kind="stable").drop(columns="rank")
            yield Picture(name, f"{caption} {INTERVALS}", curves(own, styles))
    for name, own, what in (
        ("accuracy", accuracy, "Accuracy at each evaluation"),
        ("sharpness", sharp, "Sharpness on the training half of the probe set"),
    ):
        if len(own) and own["step"].nunique() > 1:
            caption = f"{what}; bars of a run alone: 95 % interval over prompts. {INTERVALS}"
            yield Picture(name, caption, curves(own, styles))
    samples = {k: v for k, v in token_samples(study, ["logp", "weight"]).items() if v["weight"].nunique() > 1}
    if samples:
        figure = weights(samples, list(token_samples(study, PULL).values()), styles)
        yield Picture("weights", "Token weights, and where the gradient is that they multiply.", figure)
