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
LAYERS = {"layer_gradient:": "Gradient norm by layer", "layer_update:": "Update norm by layer"}
LARGEST = 4
"""Groups of parameters that are shown, those whose gradient the leading tokens changed most."""
MOST = 0.5
"""Share of the gradient's norm, or of the step's KL, from which most of it is said to be gone without the tokens."""


def without_sections(run: Run, name: str) -> list[Section]:
    """What the step of the fork `name` did, arm by arm, the LARGEST changes of its layers, and its leading tokens."""
    rows = run.forks[run.forks["fork"] == name]
    settings = run.info["forks"][name]
    arms = list(dict.fromkeys(rows["arm"]))
    values, errors, valid = (
        rows.pivot(index="outcome", columns="arm", values=column).reindex(columns=arms).astype(float)
        for column in ("value", "std_error", "valid")
    )
    values.insert(0, "before", rows.drop_duplicates("outcome").set_index("outcome")["start"].astype(float))

    def cell(outcome: str, arm: str) -> str:
        """A value with its standard error; `saturated` where it measures its ceiling."""
        value = values.at[outcome, arm]
        share = outcome.startswith(("accuracy", "saturation"))
        text = percent(value, 1) if share else number(value)
        if arm in errors and pd.notna(value) and pd.notna(error := errors.at[outcome, arm]):  # type: ignore[arg-type]
            text += f" ± {100 * error:.1f}"  # type: ignore[operator, str-bytes-safe]
        return text + " (saturated)" * (outcome == "sam_sharpness" and arm in valid and not valid.at[outcome, arm])

    shown = [outcome for outcome in NAMES if outcome in values.index]
    table = pd.DataFrame({"outcome": [NAMES[outcome] for outcome in shown]})
    for arm in values:
        table[arm] = [cell(outcome, arm) for outcome in shown]  # type: ignore[arg-type]
    note = "± is the standard error of the change over the prompts, for these completions."
    top, step = int(settings["top"]), int(settings["step"])
    parts = [
        Section(f"{run.name}, step {step}: with and without its {top} leading tokens", verdict(values, arms, top)),
        Section("", table, note),
    ]
    for prefix, title in LAYERS.items():
        part = values.loc[values.index.str.startswith(prefix), arms]
        part = part.set_axis(part.index.str.removeprefix(prefix))
        if len(part):
            order = (part[arms[0]] - part[arms[1]]).abs().sort_values(ascending=False, kind="stable").index[:LARGEST]
            parts.append(Section(title, part.loc[order].map(number).reset_index(names="parameters")))
    known = run.tokens(steps=[step], columns=["rollout", "position", "loss_coef", "advantage", "logp"])
    tokens = pd.DataFrame(settings["tokens"]).merge(known, on=["rollout", "position"], how="left")
    cells = {"completion": tokens["rollout"].astype(str), "position": tokens["position"].astype(str)}
    readable = len(known) > 0 and tokens["logp"].notna().all()
    cells |= {"token": sentences(run, step, tokens)} if readable else {}  # type: ignore[dict-item]
    cells |= {"share of the update": [percent(value, 1, sign=True) for value in tokens["share"]]}  # type: ignore[dict-item]
    cells |= {"π": np.exp(tokens["logp"]).map(number)} if readable else {}
    return [*parts, Section("The leading tokens", pd.DataFrame(cells))]


def verdict(values: pd.DataFrame, arms: list[str], top: int) -> str:
    """How much smaller the gradient's norm and the step's KL are without the leading tokens, and without random ones.

    `values`: outcome by arm; `arms`: the step as it was, without the leading tokens, and without random others.
    """
    gone, parts = {}, []
    for name, what, unit in (("kl", "the step's KL", " nats a token"), ("grad_norm", "the gradient's norm", "")):
        whole, without, others = (float(values.at[name, arm]) for arm in arms)  # type: ignore[arg-type]
        gone[name] = tuple(1 - value / whole if whole > 0 else math.nan for value in (without, others))
        less, random = (f"{percent(abs(part))} {'larger' if part < 0 else 'smaller'}" for part in gone[name])
        change = f"{number(without)}{unit} in place of {number(whole)}"
        parts.append(f"{what} is {less} ({change}), and {random} without {top} random ones")
    said = f"Without these {top} tokens {parts[0]}; {parts[1]}."
    most = {name: tokens >= MOST and tokens > 2 * max(random, 0.0) for name, (tokens, random) in gone.items()}
    if most["grad_norm"] and not most["kl"]:
        said += " The step is less changed than the gradient: clipping and the optimizer's moments bound it whatever the gradient's size."
    if "accuracy_greedy" in values.index:
        after, before = (percent(values.at["accuracy_greedy", arm], 1) for arm in (arms[1], arms[0]))
        said += f" Greedy held-out accuracy after the step: {after} without them, {before} with them."
    return said
