"""The headline, the same in the demo, `show` and the page: which tokens moved the model, how few carry the gradient, which layer grew."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from sharpscope.analysis.measures import evaluations, temperatures
from sharpscope.analysis.sections import Marked, Section
from sharpscope.analysis.spikes import (
    SPIKE_Z,
    SURE,
    Spike,
    concentration,
    explain_largest,
    notable_steps,
    recorded_by,
    step_shares,
)
from sharpscope.analysis.study import Setting, Study, last_step
from sharpscope.analysis.text import method_label, number, percent, sampling, told_apart, visible
from sharpscope.traces import Run
from sharpscope.traces.reader import piece_maker

CANDIDATES = 40
"""Tokens with the largest shares among which equal ones are merged."""
AROUND = 7
"""Tokens on either side of a token in its sentence."""
WIDTH = 60
"""Characters on either side of it, and of the token."""


@dataclass(frozen=True)
class Moved:
    """A token that a step pushed, with equal ones merged.

    Attributes:
        share: of the step's update; summed over `count` equal tokens.
        probability: π before the step.
        sentence: where it stands; its direction is that in which its own loss pushes it.
        correct: whether its completion was right; None if that is not known.
        count: how many equal tokens (same text, direction and outcome, same prompt) are merged.
    """

    share: float
    probability: float
    sentence: Marked
    correct: bool | None
    count: int


def largest_update(run: Run) -> Spike | None:
    """The step whose tokens are shown: of the spikes with shares the one that is the most times the typical norm.

    Not that with the largest z, which also says how alike the steps before were. Without such a spike, the largest gradient with shares.
    """
    notable = [spike for spike in notable_steps(run) if spike.tokens is not None]
    found = notable or [one for one in explain_largest(run) if one.tokens is not None]
    return max(found, key=lambda spike: spike.times if spike.z >= SPIKE_Z else -math.inf, default=None)


def moved_tokens(run: Run, step: int, top: int = 4) -> list[Moved]:
    """The tokens of a step with the largest |share|, equal ones merged; those that point against the others come last."""
    tokens = step_shares(run, step)
    if tokens.empty:
        return []
    outcomes = run.rollouts[run.rollouts["step"] == step].set_index("rollout")[["correct", "group"]]
    order = tokens["share"].abs().sort_values(ascending=False, kind="stable").index[:CANDIDATES]
    chosen = tokens.loc[order].join(outcomes, on="rollout")
    merged: dict[tuple[object, ...], Moved] = {}
    for row, sentence in zip(chosen.to_dict("records"), sentences(run, step, chosen), strict=True):
        correct = None if pd.isna(row["correct"]) else bool(row["correct"])
        group = ("alone", row["rollout"]) if pd.isna(row["group"]) else row["group"]
        key = (sentence.token, sentence.direction, correct, group)
        one = merged.get(key, Moved(0.0, row["probability"], sentence, correct, 0))
        merged[key] = replace(one, share=one.share + row["share"], count=one.count + 1)
    largest = sorted(merged.values(), key=lambda one: -abs(one.share))[:top]
    return sorted(largest, key=lambda one: (one.share < 0, -abs(one.share)))


def sentences(run: Run, step: int, chosen: pd.DataFrame) -> list[Marked]:
    """Each of the `chosen` tokens (rollout, position, loss_coef, advantage) in its sentence; ids without a readable tokenizer."""
    maker = piece_maker(run)
    everything = run.tokens(steps=[step], columns=["rollout", "position", "token_id"]).sort_values("position")
    texts: dict[int, tuple[list[int], list[str]]] = {}
    for rollout, rows in everything[everything["rollout"].isin(chosen["rollout"])].groupby("rollout"):
        ids = list(map(int, rows["token_id"]))
        texts[int(str(rollout))] = list(rows["position"]), [f"⟨{i}⟩" for i in ids] if maker is None else maker(ids)
    result = []
    for row in chosen.to_dict("records"):
        place = (run.name, step, int(row["rollout"]), int(row["position"]))
        positions, words = texts[place[2]]
        at = positions.index(place[3])
        before, after = "".join(words[max(0, at - AROUND) : at]), "".join(words[at + 1 : at + 1 + AROUND])
        result.append(Marked(before[-WIDTH:], words[at][:WIDTH], after[:WIDTH], _direction(row), *place))
    return result


def _direction(row: dict[object, object]) -> int:
    """1 if the loss makes the token more likely, -1 if less likely: the sign of -dL/d ln π, or else of the advantage."""
    coefficient, advantage = (float(row.get(name, math.nan) or 0.0) for name in ("loss_coef", "advantage"))  # type: ignore[arg-type]
    value = -coefficient if coefficient and math.isfinite(coefficient) else advantage
    return int(np.sign(value)) if math.isfinite(value) else 0


def moved_section(run: Run, step: int, top: int, title: str, note: str) -> Section:
    """The tokens that a step moved most: arrow, token in its sentence, answer, share of the update, π."""
    rows, records = [], []
    for one in moved_tokens(run, step, top):
        share = percent(one.share, 1, sign=True) + (f" (×{one.count})" if one.count > 1 else "")
        share += " against the rest" if one.share < 0 else ""
        answer = "" if one.correct is None else "right" if one.correct else "wrong"
        arrow = {1: "↑", -1: "↓"}.get(one.sentence.direction, "·")
        rows.append((arrow, one.sentence, answer, share, number(one.probability)))
        records.append(asdict(one.sentence) | {k: v for k, v in vars(one).items() if k != "sentence"})
    frame = pd.DataFrame(rows, columns=["", "token", "answer", "share of the update", "π"])
    return Section(title, frame if frame["answer"].any() else frame.drop(columns="answer"), note, records=records)


def concentration_text(run: Run, step: int) -> str:
    """How few tokens carry the gradient of a step; empty if it has no shares."""
    tokens = step_shares(run, step)
    if len(tokens) < 100:  # the largest hundredth would be less than one token
        return ""
    largest, sure, carried = concentration(tokens)
    said = f"1 % of the tokens carry {percent(largest)} of the gradient."
    if sure >= 0.01:
        what = "none" if carried < 0.005 else percent(carried)
        said += f" The {percent(sure)} that the model was sure of (π > {SURE}) carry {what}."
    return said


def moved_sections(runs: Sequence[Run], top: int = 4, why: str = "") -> list[Section]:
    """A section for each run that has shares: what it made more and less likely at its most informative step.

    Args:
        runs: the first runs of the settings that are shown.
        top: tokens of each.
        why: why no token can be shown, if that is not because none was recorded.
    """
    result = []
    for run in runs:
        spike = None if run.reduced is not None else largest_update(run)  # a sample of tokens lacks the largest ones
        if spike is None or spike.prompts is None:
            continue
        named = f"{run.name}, " if len(runs) > 1 else ""
        where = ", ".join(filter(None, (f"{named}step {spike.step}", spike.update, spike.sample)))
        title = f"Which tokens moved the model ({where})"
        if spike.missing:
            result.append(Section(title, f"{spike.missing[0].upper()}{spike.missing[1:]}."))
            continue
        many = f", {spike.times:.1f} × the typical one" * (spike.times > 1.5)
        texts = told_apart([str(text) for text in spike.prompts["prompt"]], 90)
        note = (
            f"{concentration_text(run, spike.step)} Gradient norm {number(spike.grad_norm)}{many}. ↑ made more likely, ↓ less likely; "
            f"shares are of its square. Largest prompt: {percent(spike.prompts['share'].iloc[0], sign=True)}, “{visible(texts[0])}”"
        )
        result.append(moved_section(run, spike.step, top, title, note.strip()))
    if not result and runs:
        reason = recorded_by(runs[0], "recording.token_gradients_every")
        none = f"No token's share of the gradient was recorded{reason}."
        result.append(Section("Which tokens moved the model", why or none))
    return result


def step_sections(run: Run, spike: Spike, top: int = 8) -> list[Section]:
    """The tokens, prompts and ranges of probability behind one update's gradient; all shares are of its square."""
    many = f", {spike.times:.1f} × the typical {number(spike.typical)}" if spike.typical > 0 else ""
    z = f", z = {spike.z:.1f}" if math.isfinite(spike.z) else ""
    title = f"{run.name}, step {spike.step}{', ' * bool(spike.update)}{spike.update}: gradient norm {number(spike.grad_norm)}{many}{z}"
    if spike.missing or spike.prompts is None or spike.probabilities is None:
        return [Section(title, f"{spike.missing[0].upper()}{spike.missing[1:]}.")]
    of, first = (f" of {spike.sample}" if spike.sample else ""), spike.prompts.head(4)
    note = "↑ made more likely, ↓ less likely. All shares are of its square; those of all tokens sum to 100 %."
    texts = told_apart([str(text) for text in first["prompt"]])
    prompts = pd.DataFrame({"share": [percent(one, 1, sign=True) for one in first["share"]], "prompt": texts})
    result = [
        moved_section(run, spike.step, top, title, note),
        Section(f"Prompts{of}", prompts, records=first.to_dict("records")),  # type: ignore[arg-type]
    ]
    if spike.probabilities["share"].isna().all():  # a sample may hold too little of the gradient
        return result
    records = [
        {"low": max(one.left, 0.0), "high": one.right, **row}
        for one, row in zip(spike.probabilities.index, spike.probabilities.to_dict("records"), strict=True)
    ]
    cells = {"π": [f"{row['low']:g} to {row['high']:g}" for row in records]}
    cells["share of the update"] = [percent(row["share"], 1, sign=True) for row in records]
    ranges = pd.DataFrame(cells | {"share of the tokens": [percent(row["tokens"], 1) for row in records]})
    scaled = f"Estimated from {spike.sample} and scaled to sum to 100 %." if spike.sample else ""
    return [*result, Section("Ranges of probability", ranges, scaled, records=records)]  # type: ignore[arg-type]


def trained_text(study: Study, settings: Sequence[Setting]) -> str:
    """What was trained and what it did to the accuracy, in words."""
    lengths = {last_step(run) for setting in settings for run in setting.runs.values()}
    steps = f"{min(lengths)}" if len(lengths) == 1 else f"{min(lengths)} to {max(lengths)}"
    seeds = max(len(setting.runs) for setting in settings)
    names = " and ".join(method_label(setting.label) for setting in settings)
    text = f"{names}: {steps} steps of {study.name}" + (f", up to {seeds} seeds each." if seeds > 1 else ".")
    return " ".join([text, *accuracy_texts(settings), *rotation_texts(settings)])


def rotation_texts(settings: Sequence[Setting]) -> list[str]:
    """How far token weights would turn the gradient of trainings that were recorded with `rotation=`."""
    said = []
    for run in (run for setting in settings for run in setting.runs.values() if run.info.get("rotation")):
        angles = run.updates["gradient_rotation"].dropna()
        if len(angles):
            each = f"{angles.mean():.1f}° on average over {len(angles)} updates (at most {angles.max():.1f}°)"
            said.append(f"The weights of {run.info['rotation']} would turn the gradient of {run.name} by {each}.")
    return said


def accuracy_texts(settings: Sequence[Setting]) -> list[str]:
    """Accuracy before and after of each split that training did not use; greedy where that was evaluated."""
    said = []
    for split, what in (("heldout", "held-out prompts"), ("unseen", "prompts of sizes that training never saw")):
        rows = []
        for setting in settings:
            coldest = [(run, min(temperatures(run, split), default=math.nan)) for run in setting.runs.values()]
            each = [(heat, list(evaluations(run, split, heat).values())) for run, heat in coldest]
            known = [(heat, ends) for heat, ends in each if len(ends) > 1]
            if known:
                first, last = (float(np.mean([ends[k][0] for _, ends in known])) for k in (0, -1))
                rows.append((setting.label, first, last, known[0][1][-1][1], known[0][0]))
        if rows:
            how = f"{sampling(rows[0][4])}, {rows[0][3]} prompts"
            before = percent(np.mean([first for _, first, *_ in rows]))
            named = [f"{percent(last)}{f' ({method_label(label)})' * (len(rows) > 1)}" for label, _, last, *_ in rows]
            said.append(f"Accuracy on {what} ({how}): {before} before, {', '.join(named)} after.")
    return said


WINDOW = 50
"""Updates before a step that its norms are compared with."""
APART = 2.0
"""How much more than the typical group a group must have grown to be named."""


def layer_norms(run: Run) -> pd.DataFrame:
    """step, update, group, grad_norm, update_norm: a row for each update and group of parameters [L2 norm]; empty if not recorded.

    `group` is `12.attention` in a decoder layer, elsewhere the kind alone (embedding, norm, head, other).
    """
    names = ["grad_norm_by_layer", "update_norm_by_layer"]
    rows = []
    known = run.updates.dropna(subset=names[:1])[["step", "update", *names]]
    for step, update, *texts in known.itertuples(index=False):
        gradient, moved = (json.loads(text) if isinstance(text, str) else {} for text in texts)
        rows += [(step, update, group, value, moved.get(group)) for group, value in gradient.items()]
    frame = pd.DataFrame(rows, columns=["step", "update", "group", "grad_norm", "update_norm"])
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
