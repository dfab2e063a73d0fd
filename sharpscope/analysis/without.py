"""What a step does with and without its leading tokens: the result of `sharpscope fork RUN --step N --without-tokens top:K`."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from sharpscope.analysis.headline import sentences
from sharpscope.analysis.sections import Section
from sharpscope.analysis.text import number, percent
from sharpscope.traces import Run

NAMES = {
    "accuracy_greedy": "held-out accuracy, greedy",
    "accuracy": "held-out accuracy, sampled",
    "entropy": "entropy at fixed tokens [nats]",
    "kl": "KL from the state [nats / token]",
    "sam_sharpness": "SAM sharpness",
    "saturation": "its saturation",
    "grad_norm": "gradient norm",
    "update_norm": "update norm",
}
"""Outcome -> its name in the table, in its order."""
LAYERS = ("layer_gradient:", "layer_update:")
DID = 0.5
"""Share of the gradient's norm, or of the KL of the step, from which the tokens are said to have made it."""


def without_sections(run: Run, name: str, layers: int = 4) -> list[Section]:
    """What the step did, arm by arm, its layers and its leading tokens.

    Args:
        run: with the rows.
        name: of the fork.
        layers: groups of parameters that are shown, those whose gradient the leading tokens changed most first.
    """
    rows = run.forks[run.forks["fork"] == name]
    settings = run.info["forks"][name]
    arms = list(dict.fromkeys(rows["arm"]))
    values = rows.pivot(index="outcome", columns="arm", values="value").reindex(columns=arms).astype(float)
    errors = rows.pivot(index="outcome", columns="arm", values="std_error").reindex(columns=arms).astype(float)
    invalid = rows[~rows["valid"].astype(bool)].groupby("outcome")["arm"].agg(set)
    before = rows.drop_duplicates("outcome").set_index("outcome")["start"].astype(float)

    def cell(outcome: str, arm: str) -> str:
        """A value with its standard error; `saturated` where it measures its ceiling."""
        value, error = float(values.at[outcome, arm]), float(errors.at[outcome, arm])  # type: ignore[arg-type]
        if not math.isfinite(value):
            return "–"
        text = percent(value, 1) if outcome.startswith(("accuracy", "saturation")) else number(value)
        if math.isfinite(error):
            text += f" ± {100 * error:.1f}"
        return text + (" (saturated)" if outcome == "sam_sharpness" and arm in invalid.get(outcome, ()) else "")

    shown = [outcome for outcome in NAMES if outcome in values.index]
    start = [
        "–" if pd.isna(before[o]) else percent(before[o], 1) if o.startswith(("acc", "sat")) else number(before[o])
        for o in shown
    ]
    table = pd.DataFrame({"outcome": [NAMES[o] for o in shown], "before": start})
    for arm in arms:
        table[arm] = [cell(outcome, arm) for outcome in shown]
    note = "± is the standard error of the change over the prompts, for these completions."
    top, step = int(settings["top"]), int(settings["step"])
    parts = [
        Section(f"{run.name}, step {step}: with and without its {top} leading tokens", verdict(values, arms, top)),
        Section("", table, note),
    ]
    for prefix, title in zip(LAYERS, ("Gradient norm by layer", "Update norm by layer"), strict=True):
        own = values[values.index.str.startswith(prefix)]
        own = own.set_axis(own.index.str.removeprefix(prefix))
        if len(own):
            order = (own[arms[0]] - own[arms[1]]).abs().sort_values(ascending=False, kind="stable").index[:layers]
            cells = own.loc[order].map(number).reset_index(names="parameters")
            parts.append(Section(title, cells))
    tokens = pd.DataFrame(settings["tokens"])
    known = run.tokens(steps=[step], columns=["rollout", "position", "loss_coef", "advantage", "logp"])
    joined = tokens.merge(known, on=["rollout", "position"], how="left")
    cells = {"share of the update": [percent(value, 1, sign=True) for value in joined["share"]]}
    if len(known) and joined["logp"].notna().all():
        cells = {"token": sentences(run, step, joined)} | cells | {"π": [number(v) for v in np.exp(joined["logp"])]}
    places = {"completion": joined["rollout"].astype(str), "position": joined["position"].astype(str)}
    parts.append(Section("The leading tokens", pd.DataFrame(places | cells)))
    return parts


def verdict(values: pd.DataFrame, arms: list[str], top: int) -> str:
    """Whether the leading tokens made the gradient and the move of the policy what they are. `values`: outcome by arm."""

    def removed(outcome: str) -> tuple[float, float]:
        """Share of an outcome that is gone without the leading tokens, and without the others."""
        whole, *rest = (float(values[arm].loc[outcome]) for arm in arms)
        without, others = (1 - value / whole if whole > 0 else math.nan for value in rest)
        return without, others

    effects = {name: removed(name) for name in ("grad_norm", "kl")}
    gradient, move = (own >= DID and own > 2 * max(other, 0.0) for own, other in effects.values())
    if move:
        head = "These tokens did it."
    elif gradient:
        head = (
            "These tokens made the gradient what it is, but not the move of the policy: clipping and the optimizer's moments bound "
            "the step whatever the gradient's size."
        )
    else:
        head = "These tokens alone did not do it."
    parts = []
    for name, what in (("grad_norm", "the gradient's norm is"), ("kl", "the KL of the step is")):
        (without, others), unit = effects[name], " nats a token" if name == "kl" else ""
        after, before = (number(values.loc[name, arm]) for arm in (arms[1], arms[0]))
        change = f"{percent(-without, sign=True)}; without {top} random others {percent(-others, sign=True)}"
        parts.append(f"{what} {after}{unit} in place of {before} ({change})")
    if "accuracy_greedy" in values.index:
        after, before = (percent(values.loc["accuracy_greedy", arm], 1) for arm in (arms[1], arms[0]))
        parts.append(f"greedy held-out accuracy after it is {after} in place of {before}")
    return f"{head} Without them {', '.join(parts[:-1])} and {parts[-1]}."
