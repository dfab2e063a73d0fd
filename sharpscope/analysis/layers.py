"""Norms of gradients and updates by layer: which layer grew with a spike, and which tokens act on it. Reads traces only."""

from __future__ import annotations

import json
import math
from typing import NamedTuple

import pandas as pd

from sharpscope.analysis.headline import sentences
from sharpscope.analysis.sections import Section
from sharpscope.analysis.text import number, percent
from sharpscope.traces import Run

WINDOW = 50
"""Updates before a step that its norms are compared with."""
APART = 2.0
"""How much more than the typical group a group must have grown to be named."""


def layer_norms(run: Run) -> pd.DataFrame:
    """step, update, group, layer, kind, grad_norm, update_norm: a row for each update and group of parameters [L2 norm].

    `group` is `12.attention` in a decoder layer, elsewhere the kind alone (embedding, norm, head, other); `layer` is −1 there.
    Empty where nothing was recorded.
    """
    names = ["grad_norm_by_layer", "update_norm_by_layer"]
    rows = []
    known = run.updates.dropna(subset=names[:1])[["step", "update", *names]]
    for step, update, *texts in known.itertuples(index=False):
        gradient, moved = (json.loads(text) if isinstance(text, str) else {} for text in texts)
        for group, value in gradient.items():
            layer, _, kind = group.rpartition(".")
            rows.append((step, update, group, int(layer) if layer.isdecimal() else -1, kind, value, moved.get(group)))
    frame = pd.DataFrame(rows, columns=["step", "update", "group", "layer", "kind", "grad_norm", "update_norm"])
    return frame.astype({"grad_norm": float, "update_norm": float})


class Growth(NamedTuple):
    """How the gradient of a step's largest update grew by group of parameters.

    Attributes:
        groups: by group: `grad_norm`, `typical` (median of the updates before), `growth` (their ratio), `share` of the update's ‖∇L‖²;
            the largest growth first.
        named: the group that grew by more than APART times the middle group's growth; None if all grew alike, or nothing is
            known of the time before.
        text: what happened, in a sentence.
    """

    groups: pd.DataFrame
    named: str | None
    text: str


def layer_growth(run: Run, step: int) -> Growth | None:
    """How each layer's gradient in a step's largest update compares with the WINDOW updates before the step; None if not recorded."""
    table = layer_norms(run)
    here = table[table["step"] == step].pivot(index="group", columns="update", values="grad_norm")
    if here.empty:
        return None
    present = here[(here**2).sum().idxmax()].dropna()
    earlier = table[table["step"] < step].pivot_table(index=["step", "update"], columns="group", values="grad_norm")
    typical = earlier.tail(WINDOW).median().reindex(present.index)
    growth = (present / typical.where(typical > 0)).astype(float)
    share = present**2 / float((present**2).sum())
    columns = {"grad_norm": present, "typical": typical, "growth": growth, "share": share}
    groups = pd.DataFrame(columns).sort_values(["growth", "share"], ascending=False)
    first, middle = groups.iloc[0], float(groups["growth"].median())
    named = str(first.name) if first["growth"] > APART * middle else None
    if not math.isfinite(first["growth"]):
        most = f"{groups['share'].idxmax()} has {percent(groups['share'].max())} of ‖∇L‖², the most of all"
        text = f"{most}; no step before has norms by layer."
    elif named is None:
        low, high = groups["growth"].min(), first["growth"]
        text = f"All layers grew alike: their gradients are {low:.2g} to {high:.2g} × their typical norms."
    else:
        norm = f"its gradient is {first['growth']:.3g} × its typical norm and has {percent(first['share'])} of ‖∇L‖²"
        text = f"{named} grew most: {norm}; the middle group's is {middle:.2g} ×."
    return Growth(groups, named, text)


def layer_tokens(run: Run, step: int) -> pd.DataFrame:
    """The leading tokens of a step with |c|·‖∇ ln π‖ by layer: rollout, position, loss_coef, advantage, then a column for each layer.

    The largest in all first. Empty where nothing was recorded.
    """
    columns = ["rollout", "position", "loss_coef", "advantage", "score_norm_by_layer"]
    tokens = run.tokens(steps=[step], columns=columns).dropna(subset=["score_norm_by_layer"]).reset_index(drop=True)
    by_layer = pd.DataFrame([json.loads(text) for text in tokens.pop("score_norm_by_layer")], dtype=float)
    by_layer = by_layer.mul(tokens["loss_coef"].abs().astype(float), axis=0)
    order = (by_layer**2).sum(axis=1).sort_values(ascending=False, kind="stable").index
    return pd.concat([tokens, by_layer], axis=1).loc[order].reset_index(drop=True)


def layer_sections(run: Run, step: int, top: int = 6) -> list[Section]:
    """Which layer grew at a step, and its leading tokens in that layer; empty where norms by layer were not recorded."""
    found = layer_growth(run, step)
    if found is None:
        return []
    shown = found.groups.head(top)
    cells = {"parameters": shown.index, "gradient norm": shown["grad_norm"].map(number)}
    cells |= {"× typical": shown["growth"].map(number), "of ‖∇L‖²": shown["share"].map(percent)}
    parts = [Section(f"Layers at step {step}", pd.DataFrame(cells), found.text)]
    tokens = layer_tokens(run, step)
    if len(tokens):
        layers = list(tokens.columns[4:])
        layer = (found.named or str(found.groups["share"].idxmax())).partition(".")[0]
        layer = layer if layer in layers else layers[0]
        tokens = tokens.sort_values(layer, ascending=False, kind="stable").head(top)
        where = f"layer {layer}" if layer.isdecimal() else f"the {layer}"
        norms = {f"|c|·‖∇ ln π‖ in {where}": tokens[layer], "in all": (tokens[layers] ** 2).sum(axis=1) ** 0.5}
        shown_norms = {name: [*map(number, values)] for name, values in norms.items()}
        table = pd.DataFrame({"token": sentences(run, step, tokens)} | shown_norms)
        parts.append(Section(f"Leading tokens by {where}", table))
    return parts
