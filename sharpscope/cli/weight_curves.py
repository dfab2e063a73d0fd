"""Token weights as functions, and as they would have been on the tokens that a run really saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from sharpscope.analysis.figures import finish, lines, panels, plain
from sharpscope.config.method import PpoClip
from sharpscope.errors import UserError
from sharpscope.objective import (
    Method,
    StepTensors,
    calibrate,
    choose_preset,
    gradient_killed,
    summarize_weights,
    token_weights,
)
from sharpscope.traces import Run

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

DEFAULT = ("grpo-sg", "tr-grpo", "ar", "grpo-sg-reverse", "grpo-sg-entropy")
LOGITS = np.linspace(-5.0, 35.0, 401)
PROBABILITIES = np.linspace(0.001, 0.999, 500)


def published(method: Method) -> Method:
    """The method with the preset `paper` where its weight leaves the choice open."""
    return method.model_copy(update={"weight": choose_preset(method.weight, "paper")})


def function_curves(methods: Sequence[Method]) -> pd.DataFrame:
    """Columns method, axis (logit | probability), x, weight: each weight over the axes that determine it alone.

    With the published constants where a method leaves them open; a weight that depends on anything else has no row.
    """
    import torch

    rows = []
    for method in methods:
        for axis, x in (("logit", LOGITS), ("probability", PROBABILITIES)):
            values = torch.from_numpy(x)
            probability = {} if axis == "logit" else {"logp": values.log()}
            known = {"logit": values} if axis == "logit" else probability
            step = StepTensors.from_columns(**known)  # type: ignore[arg-type]
            try:
                shaping = (
                    calibrate(published(method).weight, step) if method.weight.needs_calibration else method.weight
                )
                weight = token_weights(shaping, step, torch.Generator().manual_seed(0))[:, 0].numpy()
            except (UserError, ValueError):
                continue  # it needs more of a token than this axis
            rows += [(method.name, axis, a, b) for a, b in zip(x, weight, strict=True)]
    return pd.DataFrame(rows, columns=["method", "axis", "x", "weight"])


def step_of(run: Run, step: int) -> StepTensors:
    """The loss tokens of a recorded step as the objective saw them, (N, T).

    Raises:
        UserError: the step's tokens or rollouts were not recorded, or not kept because the run is a reduced one.
    """
    import torch

    if run.reduced is not None:
        raise UserError(
            f"--run {run.path}: is a reduced run, which keeps neither a step's rollouts nor all of its tokens; give the whole "
            "run that it was made from"
        )
    names = ["rollout", "position", "logp", "logit", "entropy", "collision", "polarity", "advantage"]
    tokens = run.tokens(steps=[step], columns=["step", *names])
    if tokens.empty:
        raise UserError(f"--step {step}: run '{run.path}' holds no tokens of it")
    rollouts, row = np.unique(tokens["rollout"], return_inverse=True)
    place = tokens.groupby("rollout").cumcount().to_numpy().copy()  # pandas hands out its own array, read-only
    shape = (len(rollouts), int(place.max()) + 1)

    def laid_out(values: np.ndarray) -> torch.Tensor:
        out = torch.zeros(shape, dtype=torch.float64)
        out[row, place] = torch.tensor(values.tolist(), dtype=torch.float64)
        return out

    filled = {name: laid_out(tokens[name].to_numpy()) for name in names[2:7]}
    mask = laid_out(np.ones(len(tokens))).bool()
    advantage = torch.tensor(
        tokens.groupby("rollout")["advantage"].first().fillna(0.0).to_numpy(dtype=np.float64).copy()
    )
    groups = run.rollouts.query("step == @step").set_index("rollout")["group"]
    if not set(rollouts) <= set(groups.index):
        raise UserError(
            f"--step {step}: run '{run.path}' holds tokens of it but not its rollouts (recording.rollouts_every), which say "
            "what belongs to one prompt; choose a step that has both"
        )
    group = torch.from_numpy(groups.loc[rollouts].to_numpy().copy())
    return StepTensors(mask=mask, group=group, advantage=advantage, behavior_logp=filled["logp"], **filled)  # type: ignore[arg-type]


def observed(
    methods: Sequence[Method], run: Run, step: int, preset: str = "calibrated"
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(tokens with their weight under each method, one row of shares for each method) on a recorded step.

    Open constants are filled in from this step (`preset`). `killed` is the share of tokens whose gradient the clip removes at
    ratio 1, for methods whose weight multiplies the ratio inside a PPO clip.
    """
    import torch

    data = step_of(run, step)
    tokens, shares = [], []
    for method in methods:
        shaping = calibrate(choose_preset(method.weight, preset), data)
        weight = token_weights(shaping, data, torch.Generator().manual_seed(0))
        summary = summarize_weights(shaping, weight, data.mask)
        killed = None
        if method.weight_on == "ratio" and isinstance(method.clip, PpoClip):
            gone = gradient_killed(method.clip, weight, data.advantage[:, None].expand_as(weight))
            killed = float((gone[data.mask] != 0).double().mean())
        shares.append(
            {
                "method": method.name, "mean": summary.mean, "min": summary.minimum, "max": summary.maximum,
                "at L": summary.saturation_low, "at U": summary.saturation_high, "killed": killed,
            }
        )  # fmt: skip
        tokens.append(
            pd.DataFrame(
                {
                    "method": method.name, "probability": data.logp[data.mask].exp().numpy(),
                    "logit": data.logit[data.mask].numpy(), "weight": weight[data.mask].numpy(),
                }
            )
        )  # fmt: skip
    return pd.concat(tokens, ignore_index=True), pd.DataFrame(shares)


def shaping_figure(curves: pd.DataFrame, seen: pd.DataFrame | None = None) -> Figure:
    """Weights over logit and probability; below, where a run is given, the median weight of its tokens with 10–90 % bands."""
    axes_names = [("logit", "raw logit of the token"), ("probability", "probability π of the token")]
    figure, axes = panels(4 if seen is not None else 2)
    styles = lines(dict.fromkeys([*curves["method"], *(seen["method"] if seen is not None else [])]))
    for axis, (name, label) in zip(axes, axes_names, strict=False):
        for method, part in curves[curves["axis"] == name].groupby("method", sort=False):
            axis.plot(part["x"], part["weight"], label=plain(method), **styles[str(method)].plot)
        axis.set(xlabel=label, ylabel="token weight w", title=plain("function, published constants"))
    if seen is not None:
        for axis, (name, label) in zip(axes[2:], axes_names, strict=True):
            for method, part in seen.groupby("method", sort=False):
                # equal counts along the logit; equal widths along the probability, which crowds at 1
                bins = pd.qcut(part[name], 20, duplicates="drop") if name == "logit" else pd.cut(part[name], 20)
                grouped = part.groupby(bins, observed=True)
                x, weight = grouped[name].median(), grouped["weight"]
                keywords = styles[str(method)].plot
                axis.plot(x, weight.median(), label=plain(method), **keywords)
                axis.fill_between(
                    x, weight.quantile(0.1), weight.quantile(0.9), alpha=0.2, color=keywords["color"], lw=0
                )
            axis.set(xlabel=label, ylabel="token weight w", title=plain("on the run's tokens, calibrated there"))
    finish(figure, axes)
    return figure
