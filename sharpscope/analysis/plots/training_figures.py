"""Figures of trainings: trajectories, comparisons of settings, accuracy by size, sharpness over training, layers, logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sharpscope.analysis.curves import study_values
from sharpscope.analysis.frames import stacked
from sharpscope.analysis.headline import layer_norms
from sharpscope.analysis.measures import STEPS, sharpness_rows
from sharpscope.analysis.pairs import compare_runs
from sharpscope.analysis.plots.registry import plot
from sharpscope.analysis.plots.style import (
    GRAY,
    Picture,
    color_of,
    colored,
    colors,
    inches,
    legend,
    log_axis,
    plain,
    setting_text,
    titled,
)
from sharpscope.analysis.plots.token_figures import heat_map
from sharpscope.analysis.statistics import FEWEST, mean_interval
from sharpscope.analysis.study import Setting, Study, studies
from sharpscope.analysis.text import method_label
from sharpscope.diagnose import diagnose
from sharpscope.diagnose.quantities import BY_NAME
from sharpscope.traces import MAX_SATURATION, Runs

TRAJECTORIES = (
    STEPS["reward_mean"].name,
    STEPS["grad_norm"].name,
    "held-out accuracy, greedy [%]",
    "held-out accuracy, T = 1 [%]",
)
"""What `trajectories` shows; of the accuracies the first that was measured."""
LOGGED = 12
"""Quantities of a log that are shown: those with a finding first; what never varies is left out."""
SIDES = ["baseline", "treatment"]
ENDS = ["difference", "low", "high"]
"""Columns of `compare_runs`."""
PAIRED = ("reward_mean", "grad_norm", "entropy_mean", "completion_length_mean", "kl_step")


def largest_study(runs: Runs) -> Study:
    """The study with the most runs that have steps."""
    return max(studies(runs), key=lambda study: len(study.each()))


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean over seeds; the mean itself of fewer than FEWEST."""
    data = np.asarray(values, float)
    interval = mean_interval(data) if len(data) >= FEWEST else None
    mean = data.mean()
    return (mean, mean) if interval is None else (interval.low, interval.high)


def mean_lines(axis: Axes, frame: pd.DataFrame, by: str, palette: dict[str, str]) -> None:
    """For each value of `by` the mean over seeds by step with its interval; of fewer than FEWEST seeds each as a thin line."""
    for label, color, rows in colored(frame, by, palette):
        seeds = rows["seed"].nunique()
        if 1 < seeds < FEWEST:
            for _, one in rows.groupby("seed"):
                axis.plot(
                    one["step"],
                    one["value"],
                    color=color,
                    linewidth=0.5,
                    alpha=0.5,
                )
        sns.lineplot(
            rows,
            x="step",
            y="value",
            color=color,
            errorbar=ends if seeds >= FEWEST else None,
            err_kws={"alpha": 0.18, "linewidth": 0},
            marker="o" if rows["step"].nunique() <= 12 else None,
            markeredgewidth=0,
            label=setting_text(method_label(label)),
            ax=axis,
        )
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.set(xlabel="step", ylabel="")


def trajectory_frame(runs: Runs) -> pd.DataFrame:
    """Runs of at least two steps."""
    study = largest_study(runs)
    values = study_values(study.only(two_settings(study))).dropna(subset=["value"])
    there = set(values["quantity"])
    accuracies = [name for name in TRAJECTORIES[2:] if name in there]
    shown = values["quantity"].isin([*TRAJECTORIES[:2], *accuracies[:1]])
    # the frame is public, as CSV: only what the figure shows
    columns = ["setting", "seed", "step", "quantity", "value"]
    return values.loc[shown, columns].reset_index(drop=True)


@plot(trajectory_frame, "setting", "seed", "step", "quantity", "value")
def trajectories(figure: Picture, frame: pd.DataFrame) -> None:
    """Gradient norm, reward and held-out accuracy over training for each setting, with 95 % intervals over seeds."""
    palette = color_of(frame["setting"])
    for axis, quantity, rows in figure.panels_by(frame, "quantity", 1.9, across=3):
        mean_lines(axis, rows, "setting", palette)
        if quantity == STEPS["grad_norm"].name:
            # a few steps with a tiny gradient would leave the rest of a logarithmic axis empty
            positive = rows.loc[rows["value"] > 0, "value"]
            axis.set_ylim(bottom=0.8 * float(positive.quantile(0.005)))
            log_axis(axis)
        titled(axis, quantity)
    legend(figure)


# -- Settings against a baseline


def compared(runs: Runs, labels: Sequence[str] | None = None) -> pd.DataFrame:
    """`compare_runs` of the largest study, or of these settings of it, the first as the baseline."""
    study = largest_study(runs)
    chosen = study if labels is None else study.only(labels)
    return compare_runs([run for _, _, run in chosen.each()], labels[0] if labels else None)


def intervals(axis: Axes, names: Sequence[str], frame: pd.DataFrame) -> None:
    """difference, low and high of a row each, from above, filled where the interval leaves 0 out, on a line at 0."""
    at = np.arange(len(frame))[::-1]
    arms = [frame["difference"] - frame["low"], frame["high"] - frame["difference"]]
    axis.axvline(0, color=GRAY, linewidth=0.9)
    axis.errorbar(
        frame["difference"],
        at,
        xerr=arms,
        fmt="none",
        ecolor=colors()[0],
        capsize=2,
    )
    sure = ((frame["low"] > 0) | (frame["high"] < 0)).to_numpy()
    for clear, face in ((True, colors()[0]), (False, str(mpl.rcParams["axes.facecolor"]))):
        text = "interval without 0" if clear else "interval with 0"
        values = frame["difference"][sure == clear]
        axis.plot(
            values,
            at[sure == clear],
            "o",
            ms=5,
            mfc=face,
            mec=colors()[0],
            label=text,
        )
    letters = 36 if inches(axis) > 5 else 24
    axis.set_yticks(at, [fill(plain(name, 90), letters) for name in names])
    axis.set_ylim(-0.6, len(frame) - 0.4)


def ablation_frame(runs: Runs) -> pd.DataFrame:
    """Runs of two methods that share a seed, with a held-out accuracy."""
    rows = compared(runs)
    rows = rows[rows["quantity"].str.match(r"held-out accuracy, (greedy|T)")]
    first = min(rows["quantity"], key=lambda name: "greedy" not in name, default="")
    rows = rows[rows["quantity"] == first]
    baseline, treatment = (rows[name].str.split(" (", regex=False) for name in SIDES)
    # methods rather than settings of one method, where there are both
    another = treatment.str[0] != baseline.str[0]
    rows = rows[another] if another.any() else rows
    points = 100 * rows[ENDS].astype(float)
    return rows[[*SIDES, "quantity", "n"]].join(points).reset_index(drop=True)


@plot(ablation_frame, *SIDES, "quantity", "n", *ENDS)
def ablation(figure: Picture, frame: pd.DataFrame) -> None:
    """Held-out accuracy of each weighting less that of plain GRPO, paired by seed, with 95 % intervals over seeds."""
    shown = frame.sort_values("difference", ascending=False)
    (axis,) = figure.panels(1, 0.6 + 0.22 * len(shown))
    labels = shown["treatment"].map(lambda name: setting_text(method_label(str(name))))
    intervals(axis, list(labels + " (" + shown["n"].astype(str) + " seeds)"), shown)
    quantity, baseline = shown.iloc[0][["quantity", "baseline"]]
    axis.set_xlabel(f"{plain(quantity)}, less {plain(baseline)} [points]", loc="right")
    legend(figure)


PEOPLE = ["setting", "seed", "when", "level", "temperature", "accuracy"]


def people_frame(runs: Runs) -> pd.DataFrame:
    """Evaluations at several levels, such as numbers of people."""
    study = largest_study(runs)
    parts = []
    for label, seed, run in study.only(two_settings(study)).each():
        rows = run.eval[run.eval["level"].str.fullmatch(r"\d+") & (run.eval["split"] != "train")]
        rows = rows[rows["temperature"] == rows["temperature"].min()]
        for when, step in (("before", rows["step"].min()), ("after", rows["step"].max())):
            chosen = rows[rows["step"] == step]
            parts.append(chosen.assign(setting=label, seed=seed, when=when))
    frame = stacked(parts, PEOPLE).astype({"level": int, "accuracy": float})
    return frame if frame["level"].nunique() > 1 else frame[:0]


@plot(people_frame, *PEOPLE)
def people(figure: Picture, frame: pd.DataFrame) -> None:
    """Accuracy by the number of people of a puzzle (the level of a task): before training, and after it for each setting."""
    (axis,) = figure.panels(1, 2.4)
    text = frame["setting"].map(lambda name: setting_text(method_label(str(name))))
    shown = frame.assign(setting=text.where(frame["when"] == "after", "before training"))
    shown = shown.assign(percent=100 * shown["accuracy"]).sort_values("when", ascending=False)
    sns.pointplot(
        shown,
        x="level",
        y="percent",
        hue="setting",
        palette=color_of(text) | {"before training": GRAY},
        errorbar=ends,
        dodge=0.4,
        markersize=4,
        linestyle="none",
        err_kws={"linewidth": 1.2},
        ax=axis,
    )
    axis.set(xlabel="people in a puzzle (level of the task)", ylabel="accuracy [%]", ylim=(0, None))
    legend(figure)


# -- Two settings against each other


def paired_frame(
    runs: Runs, baseline: str | None = None, treatment: str | None = None
) -> pd.DataFrame:
    """Runs of two settings that share a seed (choices: `baseline`, `treatment`)."""
    study = largest_study(runs)
    first, second = two_settings(study, baseline, treatment)
    if first == second:  # there is one setting only
        return pd.DataFrame()
    values = study_values(study.only([first, second]))
    values = values[values["quantity"].isin([STEPS[name].name for name in PAIRED])]
    keys = ["quantity", "seed", "step"]
    table = values.pivot_table(
        index=keys,
        columns="setting",
        values="value",
        sort=False,
    )
    both = table.reindex(columns=[first, second]).dropna()
    frame = (both[second] - both[first]).rename("value").reset_index()
    # a quantity that is equal in both runs at every step would be an empty panel
    varied = frame.groupby("quantity")["value"].transform(lambda v: v.abs().max()) > 0
    return frame[varied].assign(baseline=first, treatment=second).reset_index(drop=True)


def two_settings(
    study: Study, baseline: str | None = None, treatment: str | None = None
) -> tuple[str, str]:
    """Labels of the settings to compare: those asked for, or plain GRPO and GRPO-SG, or others with the most seeds in common."""
    ranked = sorted(study.settings, key=lambda one: (one.method != "grpo", -len(one.runs)))
    first = baseline or ranked[0].label
    base = next((one for one in ranked if one.label == first), ranked[0])

    def rank(one: Setting) -> tuple[bool, bool, int]:
        """GRPO-SG first, then other methods, then the most seeds in common with the baseline."""
        common = len(set(one.runs) & set(base.runs))
        return one.method != "grpo-sg", one.method == base.method, -common

    rest = [one for one in ranked if one.label != first and set(one.runs) & set(base.runs)]
    chosen = min(rest, key=rank).label if rest else first
    return first, treatment or chosen


@plot(paired_frame, "quantity", "seed", "step", "value", "baseline", "treatment")
def paired(figure: Picture, frame: pd.DataFrame) -> None:
    """Differences of two settings over training, paired by seed: thin a pair, thick the mean, the band its 95 % interval."""
    label = difference_text(frame)
    for axis, quantity, rows in figure.panels_by(frame, "quantity", 1.6):
        axis.axhline(0, color=GRAY, linewidth=0.9)
        mean_lines(axis, rows.assign(setting=label), "setting", {label: colors()[0]})
        titled(axis, quantity)
    legend(figure)


def difference_text(frame: pd.DataFrame) -> str:
    """`treatment − baseline` of a frame of one pair of settings."""
    names = [method_label(str(frame[side].iloc[0])) for side in reversed(SIDES)]
    return setting_text(" − ".join(names))


def forest_frame(
    runs: Runs, baseline: str | None = None, treatment: str | None = None
) -> pd.DataFrame:
    """Runs of two settings that share a seed (choices: `baseline`, `treatment`)."""
    rows = compared(runs, two_settings(largest_study(runs), baseline, treatment))
    share = rows["unit"] == "share"
    # quantities of different units share an axis only as parts of the baseline's value
    scale = rows["baseline_value"].abs().replace(0.0, np.nan).where(~share, 1.0)
    kept = rows[[*SIDES, "quantity", "n"]].join(100 * rows[ENDS].astype(float).div(scale, axis=0))
    kept["unit"] = share.map({True: "points", False: "% of the baseline"})
    return kept.dropna(subset=["difference"]).reset_index(drop=True)


@plot(forest_frame, "quantity", *ENDS, "unit", "n", *SIDES)
def forest(figure: Picture, frame: pd.DataFrame) -> None:
    """All quantities that two settings differ in, with 95 % intervals: shares in points, others in percent of the baseline."""
    ordered = frame.sort_values("unit", ascending=False, kind="stable")
    height = 0.7 + 0.2 * int(frame["unit"].value_counts().max())
    for axis, unit, rows in figure.panels_by(ordered, "unit", height, across=1):
        intervals(axis, list(rows["quantity"]), rows)
        axis.set_xlabel(f"difference [{unit}]", loc="right")
    title = f"{difference_text(frame)}, pairs: {frame['n'].max()}"
    figure.axes[0].set_title(title, loc="right")
    legend(figure)


# -- Sharpness over training


SHARPNESS = ("setting", "seed", "measure", "step", "value", "half", "saturated")


def sharpness_frame(runs: Runs) -> pd.DataFrame:
    """Measures of sharpness at two steps or more (`probes.preset`)."""
    parts = []
    for label, seed, run in largest_study(runs).each():
        rows = sharpness_rows(run)
        saturated = rows["saturation"].astype(float) > MAX_SATURATION
        parts.append(rows.assign(setting=label, seed=seed, saturated=saturated))
    frame = stacked(parts, SHARPNESS)
    steps = frame.groupby("measure")["step"].transform("nunique")
    return frame[steps > 1].reset_index(drop=True)


@plot(sharpness_frame, *SHARPNESS)
def sharpness(figure: Picture, frame: pd.DataFrame) -> None:
    """Sharpness over training with 95 % intervals: over seeds from four on, else over prompts; hollow points are saturated."""
    shown = frame[frame["measure"].isin(frame["measure"].unique()[:6])]
    palette = color_of(frame["setting"])
    for axis, measure, rows in figure.panels_by(shown, "measure", 1.9):
        mean_lines(axis, rows, "setting", palette)
        for _, color, part in colored(rows, "setting", palette):
            if part["seed"].nunique() == 1:
                bars = part["half"].fillna(0.0)
                axis.errorbar(
                    part["step"],
                    part["value"],
                    bars,
                    color=color,
                    capsize=2,
                )
        full = rows[rows["saturated"]].groupby(["setting", "step"])["value"].mean().reset_index()
        if len(full):
            page = str(mpl.rcParams["axes.facecolor"])
            points = full["step"], full["value"]
            axis.plot(
                *points,
                "o",
                mfc=page,
                mec=GRAY,
                ms=6,
                label="saturated",
            )
        titled(axis, measure)
    legend(figure)


# -- Layers


def layer_step_frame(runs: Runs) -> pd.DataFrame:
    """Gradient norms by layer (`updates.grad_norm_by_layer`) at two steps or more."""
    table = layer_norms(runs[0])
    # groups of a decoder layer, such as `12.attention`, are one row
    layer = table["group"].astype(str).str.extract(r"^(\d+)\.")[0].fillna(table["group"])
    table = table.assign(layer=layer, square=table["grad_norm"] ** 2)
    updates = table.groupby(["layer", "step", "update"], sort=False)["square"].sum() ** 0.5
    norms = updates.groupby(["layer", "step"], sort=False).max().rename("grad_norm").reset_index()
    typical = norms.groupby("layer")["grad_norm"].transform("median")
    return norms.assign(times=norms["grad_norm"] / typical.where(typical > 0))


@plot(layer_step_frame, "layer", "step", "grad_norm", "times")
def layer_steps(figure: Picture, frame: pd.DataFrame) -> None:
    """Which layer's gradient grew at which step: its norm as a multiple of the layer's median, as a heat map of one run."""
    doublings = frame.assign(value=np.log2(frame["times"].astype(float)))
    table = doublings.pivot(index="layer", columns="step", values="value")
    # the embedding first, layers by number, then what follows them
    numbers = [int(name) if name.isdigit() else 10**6 for name in table.index]
    rank = [-1 if name == "embedding" else n for name, n in zip(table.index, numbers, strict=True)]
    order = list(table.index[np.argsort(rank, kind="stable")])
    (axis,) = figure.panels(1, 0.6 + 0.13 * len(table))
    names = {name: f"layer {name}" if name.isdigit() else plain(name) for name in order}
    heat_map(axis, table.loc[order].rename(index=names), "gradient norm, doublings of its median")
    axis.set(xlabel="step", ylabel="")


# -- A diagnosed log

LOG_COLUMNS = ("step", "value", "quantity", "log", "onset", "finding")


def log_frame(file: Path, run: str | None = None) -> pd.DataFrame:
    """A training log of five steps or more, as `sharpscope diagnose` reads it (choice: `run`, of a file with several)."""
    found = diagnose(file, run=run)
    # reversed, so that of several findings of a quantity the first remains
    begins = {f.began.quantity: (f.step, f.rule.title) for f in reversed(found.findings)}
    names = [name for name in found.log.frame if found.log.finite(str(name)).nunique() > 1]
    names = sorted(names, key=lambda name: begins.get(str(name), (np.inf, ""))[0])[:LOGGED]
    parts = []
    for name in map(str, names):
        series = found.log.finite(name)
        onset, title = begins.get(name, (np.nan, ""))
        values = {"step": series.index, "value": series.to_numpy(float)}
        part = pd.DataFrame(values).assign(quantity=BY_NAME[name].title, log=BY_NAME[name].log)
        parts.append(part.assign(onset=onset, finding=title))
    return stacked(parts, LOG_COLUMNS)


@plot(log_frame, *LOG_COLUMNS, log=True)
def log(figure: Picture, frame: pd.DataFrame) -> None:
    """A training log as small multiples, with the step at which each finding of `sharpscope diagnose` begins."""
    for axis, quantity, rows in figure.panels_by(frame, "quantity", 1.5, across=3):
        axis.plot(
            rows["step"],
            rows["value"],
            color=colors()[0],
            linewidth=1.1,
        )
        onset = rows["onset"].iloc[0]
        finding = rows["finding"].iloc[0]
        title, color = quantity, ""
        if np.isfinite(onset):
            color = colors()[3]
            axis.axvline(onset, color=color, linewidth=1.2)
            axis.axvspan(
                onset,
                rows["step"].max(),
                color=color,
                alpha=0.1,
                linewidth=0,
            )
            title = f"{quantity}. {finding}, step {onset:.0f}"
        titled(axis, title, color)
        positive = bool((rows["value"] > 0).all())
        wide = positive and rows["value"].max() > 20 * rows["value"].min()
        if wide and rows["log"].iloc[0]:
            log_axis(axis)
        axis.set_xlabel("step")
