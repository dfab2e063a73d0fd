"""The figures: from small frames to matplotlib figures, all in one style, with their uncertainty."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sharpscope.analysis.curves import chart_of, study_charts
from sharpscope.analysis.figures.style import (
    BLACK,
    BLUE,
    COLORS,
    GRAY,
    Lines,
    finish,
    lines,
    panels,
    plain,
    setting_text,
    styled,
)
from sharpscope.analysis.forks import COMPARISONS, NAMES, UNITS, fork_differences
from sharpscope.analysis.frames import SHARPNESS, split_of
from sharpscope.analysis.report import laid_out, main_differences
from sharpscope.analysis.study import Study
from sharpscope.analysis.tokens import INCLUSION, SAMPLE, complement, inverse_inclusion, sample_tokens
from sharpscope.traces import Runs

PULL = ["logp", "weight", "loss_coef", "score_norm_local", INCLUSION]
REST = "1 − π of the token"
SMALLEST = 1e-8  # where 1 − π is 0 in float32, it is drawn here
FEW = 30
"""Points up to which intervals are bars and not a band."""


def curves(charts: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> Figure:
    """A panel for each chart of `study_charts`: a curve for each setting with its interval, and thin lines of few seeds."""
    styles = lines(labels)
    with styled():
        figure, axes = panels(len(charts), height=1.9)
        for axis, chart in zip(axes, charts, strict=True):
            x = np.array(chart["x"], dtype=float)
            for label, series in zip(labels, chart["series"], strict=True):
                _curve(axis, x, {name: np.array(values, dtype=float) for name, values in series.items()}, styles[label])
                axis.lines[-1].set_label(setting_text(label))
            axis.set(xlabel="step", ylabel=plain(chart["title"], 100), yscale="log" if chart["log"] else "linear")
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        finish(figure, axes)
    return figure


def _curve(axis: Axes, x: np.ndarray, series: Mapping[str, np.ndarray], line: Mapping[str, Any]) -> None:
    """One setting's curve; the mean is the last line that is added."""
    y, color = series["y"], line["color"]
    for each in series.get("seeds", ()):
        axis.plot(x, each, color=color, linewidth=0.5, alpha=0.5)
    if "low" in series and len(x) <= FEW:
        arms = [y - series["low"], series["high"] - y]
        axis.errorbar(x, y, yerr=arms, color=color, linestyle="none", linewidth=1, capsize=2)
    elif "low" in series:
        axis.fill_between(x, series["low"], series["high"], color=color, linewidth=0, alpha=0.16)
    if "hollow" in series:
        at = series["hollow"].astype(int)
        axis.plot(x[at], y[at], "o", markerfacecolor="w", markeredgecolor=color, markersize=6, label="saturated")
    axis.plot(x, y, marker="o" if len(x) <= 12 else "", **line)


def differences(table: pd.DataFrame) -> Figure:
    """One row for each contrast with its 95 % interval: a panel for each quantity.

    `table`: quantity (with its unit), contrast, difference, low, high.
    """
    quantities = list(dict.fromkeys(table["quantity"]))
    contrasts = list(dict.fromkeys(table["contrast"]))[::-1]
    height = np.arange(len(contrasts))
    with styled():
        figure, axes = panels(len(quantities), height=0.7 + 0.18 * len(contrasts), sharey=True)
        for axis, quantity in zip(axes, quantities, strict=True):
            own = table[table["quantity"] == quantity].set_index("contrast").reindex(contrasts).astype({"low": float})
            axis.axvline(0, color=GRAY, linewidth=0.8)
            axis.hlines(height, own["low"], own["high"], color=BLUE, linewidth=1.2)
            axis.plot(own["difference"], height, "o", color=BLUE)
            axis.set_yticks(height, [setting_text(name) for name in contrasts])
            axis.set(xlabel=fill(plain(quantity, 80), 26), ylim=(-0.6, len(contrasts) - 0.4))
        finish(figure, axes)
    return figure


def fork_effects(table: pd.DataFrame) -> Figure | None:
    """Each arm's difference to the reference by state and comparison, a panel for each outcome; None if nothing was measured.

    `table`: of one fork, from `sharpscope.analysis.fork_differences`.
    """
    shown = table[
        (table["arm"] != table["reference"]) & table["difference"].notna() & table["outcome"].isin(list(NAMES))
    ]
    if shown.empty:
        return None
    several = shown["state"].nunique() > 1
    matched = shown["comparison"].map({name: ", matched KL" * (name == "kl") for name in COMPARISONS})
    contrast = shown["arm"] + (", " + shown["state"] if several else "") + matched
    units = [UNITS.get(outcome, ("", 1.0)) for outcome in shown["outcome"]]
    names = [
        NAMES[outcome] + f" [{unit}]" * bool(unit) for outcome, (unit, _) in zip(shown["outcome"], units, strict=True)
    ]
    ends = shown[["difference", "low", "high"]].astype(float).mul([factor for _, factor in units], axis=0)
    rank = shown["outcome"].map(list(NAMES).index).to_numpy().argsort(kind="stable")
    return differences(ends.assign(quantity=names, contrast=contrast).iloc[rank])


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


def quantiles(axis: Axes, x: pd.Series, y: pd.Series, bins: pd.Series, label: str, line: Mapping[str, Any]) -> None:
    """Median of y and its 10 to 90 % band over the median x of each of the `bins`; of fewer than 5 points none is drawn."""
    grouped = pd.DataFrame({"x": x, "y": y}).groupby(bins, observed=True)
    enough = grouped.size() >= 5
    at, middle, low, high = (
        part[enough] for part in (grouped["x"].median(), *(grouped["y"].quantile(q) for q in (0.5, 0.1, 0.9)))
    )
    axis.plot(at, middle, label=setting_text(label), marker="o" if len(at) <= 12 else "", **line)
    axis.fill_between(at, low, high, color=line["color"], linewidth=0, alpha=0.16)


def _over_rest(axis: Axes, logp: pd.Series, y: pd.Series, label: str, line: Mapping[str, Any]) -> None:
    """Quantiles of y in 24 equal bins of ln(1 − π)."""
    rest = pd.Series(np.maximum(complement(logp.to_numpy()), SMALLEST))
    bins = pd.cut(np.log(rest), 24, labels=False) if len(rest) else rest
    quantiles(axis, rest, y.astype(float).reset_index(drop=True), bins, label, line)  # type: ignore[arg-type]


def weights(samples: Mapping[str, pd.DataFrame], pulled: pd.DataFrame, styles: Lines) -> Figure:
    """Token weights as observed against 1 − π, and where along it the gradient is that they multiply.

    Args:
        samples: setting → tokens with logp and weight.
        pulled: tokens of all settings with logp, weight, loss_coef, score_norm_local and inclusion_probability; may be empty.
        styles: of the settings.
    """
    pulled = pulled[(pulled["loss_coef"] != 0) & (pulled["weight"] > 0)]
    with styled():
        figure, axes = panels(1 + (len(pulled) > 0), height=2.1)
        for label, tokens in samples.items():
            _over_rest(axes[0], tokens["logp"], tokens["weight"], label, styles[label])
        axes[0].set(ylabel="token weight", title="median and 10 to 90 % of the tokens")
        for axis in axes[1:]:
            rest = np.maximum(complement(pulled["logp"].to_numpy()), SMALLEST)
            count, order = inverse_inclusion(pulled), np.argsort(-rest, kind="stable")
            pull = count * pulled["loss_coef"].abs() * pulled["score_norm_local"] / pulled["weight"]
            for amount, label, dash in ((pull, "gradient without weights", "-"), (count, "tokens", "--")):
                share = np.cumsum(np.asarray(amount, dtype=float)[order])
                axis.plot(rest[order], 100 * share / share[-1], color=BLACK, linestyle=dash, label=label)
            axis.set(ylabel="share at this 1 − π or above [%]", title="where the gradient is")
        for axis in axes:
            axis.set(xscale="log", xlabel=REST)
            axis.invert_xaxis()
        finish(figure, axes)
    return figure


def weight_functions(functions: pd.DataFrame, on_tokens: pd.DataFrame | None = None) -> Figure:
    """Weights over logit and probability; below, the median weight of a run's tokens with 10 to 90 % bands.

    `functions`: method, axis (logit | probability), x, weight. `on_tokens`: method, logit, probability, weight of each token.
    """
    labels = {"logit": "logit of the token", "probability": "probability π of the token"}
    tokens = functions[[]].assign(method="").head(0) if on_tokens is None else on_tokens
    styles = lines([*functions["method"], *tokens["method"]])
    with styled():
        figure, axes = panels(2 if on_tokens is None else 4)
        for axis, name in zip(axes, labels, strict=False):
            for method, part in functions[functions["axis"] == name].groupby("method", sort=False):
                axis.plot(part["x"], part["weight"], label=setting_text(method), **styles[str(method)])
            axis.set(xlabel=labels[name], ylabel="token weight", title="function, published constants")
        for axis, name in zip(axes[2:], labels, strict=False):
            for method, part in tokens.groupby("method", sort=False):
                bins = pd.qcut(part[name], 20, duplicates="drop") if name == "logit" else pd.cut(part[name], 20)
                quantiles(axis, part[name], part["weight"], bins, str(method), styles[str(method)])
            axis.set(xlabel=labels[name], ylabel="token weight", title="on the run's tokens, calibrated there")
        finish(figure, axes)
    return figure


def score_norms(tokens: pd.DataFrame) -> Figure:
    """Norm of ∇ ln π over all parameters against 1 − π: median and 10 to 90 %, with the law ∝ (1 − π) through the median ratio.

    `tokens`: logp and score_norm_local.
    """
    tokens = tokens[tokens["score_norm_local"] > 0]
    with styled():
        figure, (axis,) = panels(1, height=2.4)
        _over_rest(axis, tokens["logp"], tokens["score_norm_local"], "tokens", {"color": BLUE})
        if len(tokens):
            rest = np.maximum(complement(tokens["logp"].to_numpy()), SMALLEST)
            ends = np.array([rest.min(), rest.max()])
            law = np.median(tokens["score_norm_local"].to_numpy(dtype=float) / rest) * ends
            axis.plot(ends, law, ":", color=GRAY, label="∝ (1 − π)")
        axis.set(xscale="log", yscale="log", xlabel=REST, ylabel="norm of the gradient of ln π")
        finish(figure, [axis])
    return figure


def probe_pictures(estimates: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Name and figure of one model's probes table: sharpness by step."""
    whole = estimates[(estimates["parameters"] == "all") & ~estimates["converged"].isin([False])]
    along = whole[whole["quantity"].isin(list(SHARPNESS)) & whole["value"].notna()]
    if along["step"].nunique() > 1:
        names = (
            along["quantity"].map(SHARPNESS) + " of " + along["functional"] + ", " + along["probe_set"].map(split_of)
        )
        frame = along.assign(quantity=names, setting="model", seed=0)
        charts = [chart_of(own, ["model"]) for _, own in frame.groupby("quantity", sort=False)]
        yield "sharpness", curves(charts, ["model"])


def run_pictures(runs: Runs) -> Iterator[tuple[str, Figure]]:
    """Names and figures of each study among `runs`: its charts, token weights and differences; and those of forks."""
    for study, settings in laid_out(runs):
        made = study_charts(study, settings, runs)
        labels = [setting["label"] for setting in made["settings"]]
        for chart in made["charts"]:
            name = re.sub(r"\W+", "_", chart["title"].partition(" [")[0]).strip("_").lower()
            yield f"{study.slug}{name}", curves([chart], labels)
        shown = study.only([setting.label for setting in settings])
        samples = {k: v for k, v in _samples(shown, ["logp", "weight"]).items() if v["weight"].nunique() > 1}
        if samples:
            pulled = pd.concat([pd.DataFrame(columns=PULL, dtype=float), *_samples(shown, PULL).values()])
            yield f"{study.slug}weights", weights(samples, pulled, lines(shown.labels))
        table = main_differences(study, shown.labels)
        if len(table) > 1:
            share = (table["unit"] == "share").to_numpy()
            ends = table[["difference", "low", "high"]].astype(float).mul(np.where(share, 100, 1), axis=0)
            named = table["quantity"] + np.where(share, " [points]", "")
            yield f"{study.slug}differences", differences(table.assign(**ends, quantity=named))
    forked = fork_differences(runs.forks) if any(run.rows("forks") for run in runs) else pd.DataFrame({"fork": []})
    for name, own in forked.groupby("fork", sort=False):  # type: ignore[assignment]
        if (figure := fork_effects(own)) is not None:
            yield f"fork_{name}" if forked["fork"].nunique() > 1 else "forks", figure


def _samples(study: Study, columns: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Setting's label → a sample of its runs' tokens that have all `columns`; settings without any are left out."""
    samples = {}
    for setting in study.settings:
        share = max(1, SAMPLE // max(1, len(setting.runs)))
        parts = [part for run in setting.runs.values() if len(part := sample_tokens(run, columns, share))]
        if parts:
            samples[setting.label] = pd.concat(parts, ignore_index=True)
    return samples
