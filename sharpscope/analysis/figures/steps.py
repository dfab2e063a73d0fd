"""Figures over training steps: from a frame of values (a row for each setting, seed and step) to a Figure."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from sharpscope.analysis.figures.draw import Row, draw_points, facets, in_blocks
from sharpscope.analysis.figures.style import GRAY, WIDTH, Lines, finish, panels, plain, setting_text, styled
from sharpscope.analysis.frames import natural
from sharpscope.analysis.text import sampling

AXES = {
    "reward_mean": ("mean reward of a completion [reward]", "linear"),
    "accuracy": ("accuracy on the step's completions [share]", "linear"),
    "grad_norm": ("gradient norm before clipping [L2, parameters]", "log"),
    "update_norm": ("norm of the parameters' change [L2, parameters]", "log"),
    "gradient_rotation": ("rotation of the gradient by the method [degrees]", "log"),
    "noise_rotation": ("angle between gradients of half batches [degrees]", "linear"),
    "entropy_mean": ("mean entropy of a token [nats]", "log"),
    "clip_fraction_low": ("clipped at the lower bound [share of tokens]", "symlog"),
    "clip_fraction_high": ("clipped at the upper bound [share of tokens]", "symlog"),
    "truncated_fraction": ("truncated completions [share]", "linear"),
    "zero_std_groups": ("groups of equal rewards [groups]", "linear"),
    "weight_mean": ("mean token weight [1]", "linear"),
    "weight_ess": ("effective sample size of the weights [share]", "linear"),
    "weight_saturation_low": ("weights on the lower bound [share]", "linear"),
    "weight_saturation_high": ("weights on the upper bound [share]", "linear"),
}
"""Column of `steps` → label and scale of its axis."""

FIGURES = {
    "reward": ("Reward and accuracy on the training prompts", ["reward_mean", "accuracy"]),
    "gradient_norm": ("Gradient norm before clipping and size of the update", ["grad_norm", "update_norm"]),
    "rotation": (
        "Angle between the method's gradient and the reference objective's on the same rollouts, and between gradients of "
        "independent halves of a batch",
        ["gradient_rotation", "noise_rotation"],
    ),
    "entropy": ("Entropy of the policy", ["entropy_mean"]),
    "clipping": (
        "Clipped tokens, truncated completions, groups that teach nothing",
        ["clip_fraction_low", "clip_fraction_high", "truncated_fraction", "zero_std_groups"],
    ),
    "weight_statistics": (
        "Token weights by step: mean, effective sample size, share on a bound",
        ["weight_mean", "weight_ess", "weight_saturation_low", "weight_saturation_high"],
    ),
}
"""Name of a figure → caption and its quantities (columns of `steps`)."""


def trajectories(values: pd.DataFrame, lines: Lines, quantities: Sequence[str], reference: str = "") -> Figure:
    """A row of panels for each of `quantities` (columns of `steps`) that the frame has, by step; see `facets`."""
    present = [name for name in quantities if (values["quantity"] == name).any()]
    values, size = in_blocks(values[values["quantity"].isin(present)])
    rows = [Row(AXES[name][0], values[values["quantity"] == name], AXES[name][1]) for name in present]
    xlabel = "step" if size == 1 else f"step (a point: median of {size} steps)"
    return facets(rows, lines, xlabel=xlabel, reference=reference, height=1.5)


def evaluations(values: pd.DataFrame, lines: Lines, label: str = "accuracy [share]", reference: str = "") -> Figure:
    """An evaluation's quantity pooled over levels, by step: a row for each split and temperature."""
    pooled = values[values["level"] == "all"]
    rows = [
        Row(label, own, title=plain(f"{split}, {sampling(float(str(heat)), 'temperature ')}"))
        for (split, heat), own in pooled.groupby(["split", "temperature"])
    ]
    return facets(rows, lines, reference=reference, height=1.5)


def evaluations_by_level(
    values: pd.DataFrame, lines: Lines, label: str = "accuracy [share]", reference: str = ""
) -> Figure:
    """The same by size at one temperature: a row for each split and level."""
    rows = []
    for split, own in values[values["level"] != "all"].groupby("split"):
        for level in natural(own["level"]):
            rows.append(Row(label, own[own["level"] == level], title=plain(f"{split}, level {level}")))
    return facets(rows, lines, reference=reference)


def every_setting(values: pd.DataFrame, lines: Lines) -> Figure:
    """One row a setting: each seed's value as a dot, the mean, and from FEWEST seeds on its 95 % t-interval.

    `values`: setting, value, one row a seed. Dotted: the mean of `grpo`, or else of the setting with the most seeds.
    """
    sizes = values.groupby("setting").size()
    labels = list(sizes.index)
    against = "grpo" if "grpo" in labels else str(sizes.idxmax())
    with styled():
        figure, (axis,) = panels(1, height=0.7 + 0.25 * len(labels))
        figure.set_figwidth(WIDTH)
        palette = {label: lines[label].color for label in labels}
        draw_points(
            axis, values, palette, x="value", y="setting", order=labels, hue="setting", markers="D", markersize=4
        )
        middle = float(values.loc[values["setting"] == against, "value"].mean())
        axis.axvline(middle, color=GRAY, linestyle=":", linewidth=1, label=f"mean of {setting_text(against)}")
        axis.set_yticks(range(len(labels)), [f"{setting_text(name)}  n = {sizes[name]}" for name in labels])
        axis.set(xlabel="held-out accuracy at the last evaluation\n[share of completions]", ylabel="")
        axis.tick_params(axis="y", labelsize=6)
        finish(figure, [axis])
    return figure
