"""The headline, the same in the demo, `show` and the page: which tokens moved the model, and how few carry the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from sharpscope.analysis.sections import Marked, Section
from sharpscope.analysis.spikes import (
    Spike,
    concentration,
    explain_spikes,
    explain_step,
    large_steps,
    recorded_by,
    share_steps,
    step_shares,
)
from sharpscope.analysis.study import Setting, Study, last_step
from sharpscope.analysis.text import method_label, number, percent, told_apart
from sharpscope.traces import Run
from sharpscope.traces.token_text import piece_maker

CANDIDATES = 40
"""Tokens with the largest shares among which equal ones are merged."""
AROUND = 7
"""Tokens on either side of a token in its sentence."""
WIDTH = 60
"""Characters on either side of it, and of the token."""
SURE = 0.99
"""Probability from which the model was sure of a token."""


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
    count: int = 1


def largest_update(run: Run, top: int = 8) -> Spike | None:
    """The step whose tokens are shown: the largest spike with shares, a large step with them, or the largest gradient with them."""
    recorded = set(share_steps(run))
    if not recorded:
        return None
    spikes = [spike for spike in explain_spikes(run, top=top) if spike.tokens is not None]
    if spikes:
        return max(spikes, key=lambda spike: spike.z)
    large = [int(step) for step in large_steps(run.steps)["step"] if step in recorded]
    if large:
        return replace(explain_step(run, large[0], top), typical=float(run.steps["grad_norm"].median()))
    return next(iter(explain_spikes(run, top=top, largest=1)), None)


def moved_tokens(run: Run, step: int, top: int = 4, by: str = "share") -> list[Moved]:
    """The tokens of a step with the largest |share|, equal ones merged; those that point against the others come last."""
    tokens = step_shares(run, step)
    if tokens.empty:
        return []
    rollouts = run.rollouts[run.rollouts["step"] == step].set_index("rollout")
    chosen = tokens.reindex(tokens[by].abs().sort_values(ascending=False, kind="stable").index).head(CANDIDATES)
    merged: dict[tuple[object, ...], Moved] = {}
    for row, sentence in zip(chosen.to_dict("records"), sentences(run, step, chosen), strict=True):
        rollout = int(row["rollout"])
        outcome = rollouts["correct"].get(rollout) if len(rollouts) else None
        correct = None if outcome is None or pd.isna(outcome) else bool(outcome)
        group = rollouts["group"].get(rollout) if len(rollouts) else rollout
        key = (sentence.token, sentence.direction, correct, group)
        one = Moved(float(row[by]), float(row["probability"]), sentence, correct)
        if key in merged:
            one = replace(merged[key], share=merged[key].share + one.share, count=merged[key].count + 1)
        merged[key] = one
    largest = sorted(merged.values(), key=lambda one: -abs(one.share))[:top]
    return sorted(largest, key=lambda one: (one.share < 0, -abs(one.share)))


def sentences(run: Run, step: int, chosen: pd.DataFrame) -> list[Marked]:
    """Each of the `chosen` tokens (rollout, position, loss_coef, advantage) in its sentence; ids without a readable tokenizer."""
    maker = piece_maker(run)
    everything = run.tokens(steps=[step], columns=["rollout", "position", "token_id"])
    by_rollout = {int(str(rollout)): rows.sort_values("position") for rollout, rows in everything.groupby("rollout")}
    known: dict[int, list[str]] = {}
    result = []
    for row in chosen.to_dict("records"):
        rollout, position = int(row["rollout"]), int(row["position"])
        completion = by_rollout[rollout]
        if rollout not in known:
            ids = [int(token) for token in completion["token_id"]]
            known[rollout] = [f"⟨{token}⟩" for token in ids] if maker is None else maker(ids)
        texts = known[rollout]
        at = int(np.flatnonzero(completion["position"].to_numpy() == position)[0])
        before, after = "".join(texts[max(0, at - AROUND) : at]), "".join(texts[at + 1 : at + 1 + AROUND])
        place = (run.name, step, rollout, position)
        result.append(Marked(before[-WIDTH:], texts[at][:WIDTH], after[:WIDTH], _direction(row), place))
    return result


def _direction(row: dict[object, object]) -> int:
    """1 if the loss makes the token more likely, -1 if less likely: the sign of -dL/d ln π, or else of the advantage."""
    coefficient, advantage = (float(row.get(name, math.nan) or 0.0) for name in ("loss_coef", "advantage"))  # type: ignore[arg-type]
    value = -coefficient if coefficient and math.isfinite(coefficient) else advantage
    return int(np.sign(value)) if math.isfinite(value) else 0


def moved_table(tokens: Sequence[Moved]) -> pd.DataFrame:
    """Columns: arrow, token in its sentence, answer, share of the update, π."""
    rows = []
    for one in tokens:
        share = percent(one.share, 1, sign=True) + (f" (×{one.count})" if one.count > 1 else "")
        share += " against the rest" if one.share < 0 else ""
        answer = "" if one.correct is None else "right" if one.correct else "wrong"
        arrow = {1: "↑", -1: "↓"}.get(one.sentence.direction, "·")
        rows.append((arrow, one.sentence, answer, share, number(one.probability)))
    frame = pd.DataFrame(rows, columns=["", "token", "answer", "share of the update", "π"])
    return frame if frame["answer"].any() else frame.drop(columns="answer")


def moved_records(tokens: Sequence[Moved]) -> list[dict[str, object]]:
    """The tokens of `moved_table` as numbers."""
    names = ("run", "step", "rollout", "position")
    return [
        {
            "before": one.sentence.before,
            "token": one.sentence.token,
            "after": one.sentence.after,
            "direction": one.sentence.direction,
            "correct": one.correct,
            "share": one.share,
            "count": one.count,
            "probability": one.probability,
            **dict(zip(names, one.sentence.place or (None,) * 4, strict=True)),
        }
        for one in tokens
    ]


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
    """A section for each run that has shares: what it pushed up and down at its most telling step.

    Args:
        runs: the first runs of the settings that are shown.
        top: tokens of each.
        why: why no token can be shown, if that is not because none was recorded.
    """
    result = []
    for run in runs:
        spike = None if run.reduced is not None else largest_update(run)  # a sample of tokens lacks the largest ones
        if spike is None or spike.tokens is None or spike.prompts is None:
            continue
        named = f"{run.name}, " if len(runs) > 1 else ""
        where = ", ".join(filter(None, (f"{named}step {spike.step}", spike.update, spike.sample)))
        many = (
            f", {spike.grad_norm / spike.typical:.1f} × the typical one"
            if spike.grad_norm > 1.5 * spike.typical
            else ""
        )
        texts = told_apart([str(text) for text in spike.prompts["prompt"]], 90)
        note = (
            f"{concentration_text(run, spike.step)} Gradient norm {number(spike.grad_norm)}{many}. ↑ made more likely, ↓ less likely; "
            f"shares are of its square. Largest prompt: {percent(spike.prompts['share'].iloc[0], sign=True)}, {texts[0]!r}."
        )
        moved = moved_tokens(run, spike.step, top)
        title = f"Which tokens moved the model ({where})"
        result.append(Section(title, moved_table(moved), note.strip(), records=moved_records(moved)))
    if not result and runs:
        why = (
            why
            or f"No token's share of the gradient was recorded{recorded_by(runs[0], 'recording.token_gradients_every')}."
        )
        result.append(Section("Which tokens moved the model", why))
    return result


def step_sections(run: Run, spike: Spike, top: int = 8) -> list[Section]:
    """The tokens, prompts and ranges of probability behind one update's gradient; all shares are of its square."""
    many = f", {spike.grad_norm / spike.typical:.1f} × the typical {number(spike.typical)}" if spike.typical > 0 else ""
    z = f", z = {spike.z:.1f}" if math.isfinite(spike.z) else ""
    title = f"{run.name}, step {spike.step}{', ' * bool(spike.update)}{spike.update}: gradient norm {number(spike.grad_norm)}{many}{z}"
    if spike.tokens is None or spike.prompts is None or spike.probabilities is None:
        return [Section(title, f"{spike.missing[0].upper()}{spike.missing[1:]}.")]
    of = f" of {spike.sample}" if spike.sample else ""
    note = "↑ made more likely, ↓ less likely. All shares are of its square; those of all tokens sum to 100 %."
    first = spike.prompts.head(4)
    texts = told_apart([str(text) for text in first["prompt"]])
    prompts = pd.DataFrame({"share": [percent(one, 1, sign=True) for one in first["share"]], "prompt": texts})
    ranges = pd.DataFrame(
        {
            "π": [f"{max(one.left, 0.0):g} to {one.right:g}" for one in spike.probabilities.index],
            "share of the update": [percent(one, 1, sign=True) for one in spike.probabilities["share"]],
            "share of the tokens": [percent(one, 1) for one in spike.probabilities["tokens"]],
        }
    )
    scaled = f"Estimated from {spike.sample} and scaled to sum to 100 %." if spike.sample else ""
    moved = moved_tokens(run, spike.step, top)
    result = [
        Section(title, moved_table(moved), note, records=moved_records(moved)),
        Section(f"Prompts{of}", prompts, records=first.to_dict("records")),  # type: ignore[arg-type]
    ]
    if spike.probabilities["share"].isna().all():  # a sample may hold too little of the gradient
        return result
    ends = pd.DataFrame({"low": [max(one.left, 0.0) for one in spike.probabilities.index]})
    ends = ends.assign(
        high=[one.right for one in spike.probabilities.index], **spike.probabilities.reset_index(drop=True)
    )
    return [*result, Section("Ranges of probability", ranges, scaled, records=ends.to_dict("records"))]  # type: ignore[arg-type]


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
    found: dict[tuple[str, float], list[tuple[str, float, float, int]]] = {}
    for setting in settings:
        for split in ("heldout", "unseen"):
            values = [ends for run in setting.runs.values() if (ends := accuracy_ends(run, split)) is not None]
            if values:
                first, last = (float(np.mean([one[k] for one in values])) for k in (1, 2))
                found.setdefault((split, values[0][0]), []).append((setting.label, first, last, values[0][3]))
    said = []
    for (split, temperature), rows in found.items():
        what = "held-out prompts" if split == "heldout" else "prompts of sizes that training never saw"
        how = "greedy" if temperature == 0 else f"T = {temperature:g}"
        before = f"{percent(np.mean([first for _, first, _, _ in rows]))}"
        after = ", ".join(
            f"{percent(last)}{f' ({method_label(label)})' if len(rows) > 1 else ''}" for label, _, last, _ in rows
        )
        said.append(f"Accuracy on {what} ({how}, {rows[0][3]} prompts): {before} before, {after} after.")
    return said


def accuracy_ends(run: Run, split: str) -> tuple[float, float, float, int] | None:
    """(temperature, accuracy at the first evaluation, at the last, prompts) over all levels; greedy if that was evaluated."""
    tasks = run.eval["task"]
    own = (
        run.task if (tasks == run.task).any() or tasks.empty else tasks.iloc[0]
    )  # a task of the user's has its own name
    rows = run.eval[(tasks == own) & (run.eval["split"] == split)]
    if rows.empty or rows["step"].nunique() < 2:
        return None
    temperature = float(rows["temperature"].min())
    rows = rows[rows["temperature"] == temperature]
    levels = rows[rows["level"] != "all"] if (rows["level"] != "all").any() else rows
    ends = [levels[levels["step"] == step] for step in (rows["step"].min(), rows["step"].max())]
    first, last = (float(np.average(end["accuracy"], weights=end["n"] * end["k"])) for end in ends)
    return temperature, first, last, int(ends[1]["n"].sum())
