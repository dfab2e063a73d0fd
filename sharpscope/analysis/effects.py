"""Recorded effects of tokens: the largest, and their sums over prompts, completions, outcomes, probabilities and kinds of token."""

from __future__ import annotations

import unicodedata
from dataclasses import asdict
from typing import TypedDict

import numpy as np
import pandas as pd

from sharpscope.analysis.headline import merged_tokens, momentum_text, token_rows
from sharpscope.analysis.sections import Marked, Section
from sharpscope.analysis.spikes import PROBABILITY_EDGES
from sharpscope.analysis.study import recorded_steps
from sharpscope.analysis.text import percent, told_apart
from sharpscope.analysis.tokens import (
    INCLUSION,
    check_recorded,
    inverse_inclusion,
    sample_text,
    sampled_by,
    sampling_error,
)
from sharpscope.errors import UserError, nearest
from sharpscope.packaged import package_yaml
from sharpscope.traces import Row, Run
from sharpscope.traces.reader import piece_maker

OUTCOMES = {
    "kl": "the update's KL [nats / token]",
    "entropy": "entropy [nats / token]",
    "heldout": "the nll of held-out solutions [nats / token]",
    "sharpness": "SAM sharpness",
}
"""Outcome of the columns `effect_…` → its name."""


class Removal(TypedDict):
    """How well effects predicted, on one policy, what happens without tokens (experiments/attribution).

    By outcome: the rank correlation with the change (`rank`), with the change on other completions (`fresh`), and of two such
    measurements with each other (`ceiling`).
    """

    updates: int  # that were measured
    outcomes: dict[str, dict[str, float]]


REMOVAL: dict[str, Removal] = package_yaml("sharpscope.analysis", "removal.json")
"""By policy."""
FEW = 4
"""Prompts and completions that are listed."""


def effect_tokens(run: Run, step: int, on: str) -> pd.DataFrame:
    """The tokens of a step that have an effect on an outcome, with `effect`, `probability`, and their completion's group and outcome."""
    column = f"effect_{on}"
    names = ["rollout", "position", "token_id", "logp", "advantage", "loss_coef", column, INCLUSION]
    tokens = run.tokens(steps=[step], columns=names).dropna(subset=[column])
    of = run.frame("rollouts", step, ["rollout", "group", "correct", "prompt"])
    tokens = tokens.merge(of, on="rollout", how="left")
    return tokens.assign(effect=tokens[column].astype(float), probability=np.exp(tokens["logp"]))


def removal_text(run: Run, on: str) -> str:
    """How well effects on an outcome (a key of OUTCOMES, or `failure`) predict what happens without the tokens on a run's policy."""
    model = str((run.config.get("policy") or {}).get("model"))
    # of another policy the first that was measured stands for it, and the text says so
    policy = model if model in REMOVAL else next(iter(REMOVAL))
    first = "Measured" if policy == model else "Not measured on this model"
    found = REMOVAL[policy]["outcomes"][on]
    updates = REMOVAL[policy]["updates"]
    said = f"{first}: rank correlation with the change when tokens are left out {found['rank']:.2f} on {policy} ({updates} updates)"
    if "fresh" in found:
        said += f", {found['fresh']:.2f} on other completions, where two measurements agree to {found['ceiling']:.2f}"
    return f"{said}."


def effect_sections(run: Run, step: int | None, on: str = "kl", top: int = 20) -> list[Section]:
    """The tokens of a step with the largest effects on an outcome, and sums of effects.

    Args:
        run: whose tokens are read.
        step: of the run; None: the last one with effects.
        on: a key of OUTCOMES.
        top: tokens.

    Raises:
        UserError: no such outcome, or nothing recorded.
    """
    if on not in OUTCOMES:
        raise UserError(f"--on {on}: no such outcome{nearest(on, OUTCOMES)}")
    recorded = recorded_steps(run, f"effect_{on}")
    if not recorded:
        others = [name for name in OUTCOMES if recorded_steps(run, f"effect_{name}")]
        advice = f"use --on {' or '.join(others)}" if others else "use --by share"
        if "trainer" in run.info:  # of other trainers there are no prompts to measure a loss on
            advice += "" if others else "; record(…, every=1) measures effects on kl and entropy"
        else:
            advice += f", or `sharpscope fork RUN --step N --without top:12 --on {on}` computes it"
        raise UserError(f"--by effect --on {on}: never recorded in this run; {advice}")
    step = recorded[-1] if step is None else step
    check_recorded("effect", step, recorded)
    tokens = effect_tokens(run, step, on)
    tokens["sum"] = tokens["effect"] * inverse_inclusion(tokens)
    total = float(tokens["sum"].abs().sum())
    name, _, unit = OUTCOMES[on].rstrip("]").partition(" [")
    note = (
        f"Effect > 0: with the token {name} is higher after the update, to first order. "
        f"In percent of the sum of all |effects|, {total:.2g} {unit}".rstrip()
        + "; (×3): three equal tokens. "
        + removal_text(run, on)
    )
    factor = run.updates[run.updates["step"] == step]["clip_factor"].astype(float)
    if (factor < 1).any():
        note += " The gradient was clipped, so that effects are against the update's other tokens, and sum to about 0."
    if on == "heldout":
        note += " It is measured on the probe set's held-out prompts, and says less of others."
    title = f"{run.name}, step {step}: effects of tokens on {name}"
    table, records = _largest(run, step, tokens, top)
    parts = [Section(title, table, f"{note} {momentum_text(run, step)}".strip(), records=records)]
    tokens["unit"] = tokens[sampled_by(run)]
    of = sample_text(run, tokens)
    sampled = f" Estimated from {of}." if of else ""
    for heading, sums in _sums(run, tokens).items():
        parts.append(Section(f"Effects by {heading}", sums, sampled.strip()))
    return parts


def _largest(run: Run, step: int, tokens: pd.DataFrame, top: int) -> tuple[pd.DataFrame, list[Row]]:
    """The tokens with the largest |effect|, as shown and as numbers.

    Equal ones (text, direction, outcome and prompt) are one row with the sum of their effects.
    """
    found = merged_tokens(run, step, tokens, "effect")[:top]
    total = float(tokens["sum"].abs().sum()) or 1.0
    records: list[Row] = [
        asdict(one.sentence)
        | {"effect": one.share, "count": one.count}
        | {"probability": one.probability, "correct": one.correct}
        for one in found
    ]
    return token_rows(found, "effect", total), records


def effect_headline(run: Run, top: int) -> list[Section]:
    """The first table of `effect_sections` on KL at the last step with effects; empty where none were recorded."""
    # a sample of tokens lacks the largest ones
    if run.reduced is not None or not recorded_steps(run, "effect_kl"):
        return []
    return effect_sections(run, None, "kl", top)[:1]


def leading_effects(run: Run, top: int) -> list[tuple[Marked, str]]:
    """The tokens of `effect_headline` with their effects as text; empty where none were recorded."""
    found = []
    for section in effect_headline(run, top):
        assert isinstance(section.content, pd.DataFrame)
        for token, effect in section.content[["token", "effect"]].to_numpy():
            found.append((token, effect.partition(" (×")[0]))
    return found


def _sums(run: Run, tokens: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Tables of sums by heading, those with the largest |sum| first where there are many."""
    total = float(tokens["sum"].abs().sum()) or 1.0
    chance = 1 / inverse_inclusion(tokens)
    sampled = bool((chance < 1).any())

    def error(inside: pd.Series) -> float:
        """Standard error of the sum of effects of some tokens."""
        return sampling_error(np.where(inside, tokens["effect"], 0.0), tokens["unit"], chance)

    def table(by: pd.Series, name: str, most: int | None = None) -> pd.DataFrame:
        """Sums over tokens with the same value of `by`; `most`: the rows with the largest ones."""
        groups = tokens.groupby(by, observed=True)["sum"]
        found = pd.DataFrame({"sum": groups.sum(), "tokens": groups.size()})
        if most is not None:
            found = found.loc[found["sum"].abs().sort_values(ascending=False).index[:most]]
        errors = {"± SE": [error(by == label) for label in found.index]} if sampled else {}
        return pd.DataFrame(
            {
                name: [str(label) for label in found.index],
                "sum of effects": [f"{value:+.3g}" for value in found["sum"]],
                **errors,
                "of Σ|effect|": [percent(value / total, 1, sign=True) for value in found["sum"]],
                "tokens": found["tokens"].to_numpy(),
            }
        )

    prompts = tokens["prompt"].fillna("").astype(str)
    labels = dict(zip(prompts.unique(), told_apart(list(prompts.unique()), 60), strict=True))
    bins = pd.cut(tokens["probability"], list(PROBABILITY_EDGES), include_lowest=True)
    ranges = bins.map(lambda one: f"{max(one.left, 0):g} to {one.right:g}")
    made = {
        "prompt": table(prompts.map(labels), "prompt", FEW),
        "completion": table(tokens["rollout"], "completion", FEW),
        "probability": table(ranges, "π"),
    }
    answers = tokens["correct"].map({True: "right", False: "wrong"}).fillna("")
    if answers.any():
        made["answer"] = table(answers, "answer")
    maker = piece_maker(run)
    if maker is not None:
        # each token of the vocabulary that occurs is read once
        ids = tokens["token_id"].astype(int)
        kinds = {one: kind_of(maker([one])[0]) for one in ids.unique()}
        made["kind of token"] = table(ids.map(kinds), "kind")
    return made


def kind_of(text: str) -> str:
    """digits, letters, spaces, special (in angle brackets), or else punctuation and other signs."""
    word = text.strip()
    if not word:
        return "spaces"
    if len(word) > 2 and word[0] + word[-1] in ("<>", "⟨⟩", "[]"):
        return "special"
    kinds = {unicodedata.category(letter)[0] for letter in word}
    if kinds == {"N"}:
        return "digits"
    return "letters" if "L" in kinds else "punctuation and signs"
