"""The token view's data: chosen completions with their tokens' numbers, as JSON values within a stated size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from sharpscope.analysis.completions import Choice, choose, completions_dropped
from sharpscope.analysis.spikes import NOT_RECORDED
from sharpscope.analysis.text import shown
from sharpscope.analysis.token_values import needed_columns, with_values
from sharpscope.traces import Run
from sharpscope.traces.token_text import Pieces, piece_maker

BUDGET = 4_000_000
"""Bytes of token data in a report, divided evenly among its runs."""
RUN_BUDGET = 1_800_000
"""Most bytes of one run, however few there are."""
MOST_TOKENS = 4_000
"""Tokens of a completion that are shown with numbers; what follows is shown as text."""
MOST_TEXT = 100_000
"""Characters of a completion or prompt beyond which it is cut in the file."""
MOST_PIECE = 20_000
"""Characters of a token beyond which it is cut."""
DIGITS = 3
ROUNDING = 1e-5
"""A mismatch or a distance to the reference of which no token has more is rounding, and is left out [nats]."""

COLUMNS = {
    "share": "attribution",
    "coef": "loss_coef",
    "mismatch": "mismatch",
    "kl": "kl",
    "logp": "logp",
    "entropy": "entropy",
    "weight": "weight",
    "score": "score_norm_local",
    "exact": "score_norm",
    "influence": "heldout_influence",
    "update": "update_attribution",
    "ratio": "ratio",
    "clipped": "clipped",
    "polarity": "polarity",
    "adv": "advantage",
}
"""Name in the page → column of the tokens table, or value of `token_values`."""
ROUNDED = ("mismatch", "kl")
CONSTANT = {"weight": 1.0, "ratio": 1.0, "clipped": 0.0}
"""Values of columns that are left out where every token has them."""


@dataclass
class Pool:
    """Values that repeat over the whole report, by number: token texts and prompts."""

    numbers: dict[str, int] = field(default_factory=dict)

    def __call__(self, text: str) -> int:
        """The number of a text."""
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def texts(self) -> list[str]:
        """The texts in the order of their numbers."""
        return list(self.numbers)


def token_view(
    runs: Mapping[str, Run], choices: Mapping[str, Choice] | None = None, budget: int = BUDGET
) -> dict[str, Any]:
    """Everything the token view shows: runs, prompts, token texts (`pieces`), completions, notes.

    A completion's `c` maps a name of COLUMNS to one number a token; a column without any number is left out. Every text is
    made visible by `shown`. At most `budget` bytes of completions, every run its equal part.
    """
    choices = choose(runs) if choices is None else choices
    share = min(RUN_BUDGET, budget // max(1, len(choices)))
    pieces, prompts = Pool(), Pool()
    completions: list[dict[str, Any]] = []
    notes: list[str] = []
    for number, (name, choice) in enumerate(choices.items()):
        maker = piece_maker(choice.run)
        if not choice.run.rows("tokens"):
            notes.append(
                f"{name}: no token rows were recorded (recording.tokens_every); its completions are plain text."
            )
        elif maker is None:
            notes.append(f"{name}: the run saved no readable tokenizer, so tokens stand as their numbers.")
        taken = _completions(choice, number, share, maker, pieces, prompts)
        if len(taken) < len(choice.wanted):
            notes.append(f"{name}: {len(taken)} of {len(choice.wanted)} chosen completions fit into the file.")
        completions += taken
    for name in (name for name in runs if name not in choices):
        if completions_dropped(runs[name]):
            notes.append(f"{name}: its completions were not kept when it was reduced.")
        else:
            notes.append(f"{name}: no completions were recorded (recording.rollouts_every).")
    return {
        "runs": [shown(name) for name in choices],
        "methods": [shown(c.run.method) for c in choices.values()],
        "prompts": [shown(text) for text in prompts.texts],
        "pieces": pieces.texts,
        "completions": completions,
        "notes": [shown(note) for note in notes],
    }


def _completions(
    choice: Choice, number: int, budget: int, maker: Pieces | None, pieces: Pool, prompts: Pool
) -> list[dict[str, Any]]:
    rollouts = choice.run.rollouts.set_index(["step", "rollout"])
    result: list[dict[str, Any]] = []
    used = 0
    steps: dict[int, pd.DataFrame] = {}
    for (step, rollout), why in choice.wanted.items():
        if step not in steps:
            wanted = ["rollout", "position", "token_id", "update", *needed_columns(COLUMNS.values())]
            steps[step] = with_values(choice.run.tokens(steps=[step], columns=wanted))
        row = rollouts.loc[(step, rollout)]
        tokens = steps[step]
        chosen = tokens[tokens["rollout"] == rollout].sort_values("position")
        known = (len(pieces.numbers), len(prompts.numbers))
        completion = _head(row, number, step, rollout, why, prompts) | _body(row, chosen, maker, pieces)
        size = len(json.dumps(completion)) + sum(
            len(json.dumps(t)) for t in [*pieces.texts[known[0] :], *prompts.texts[known[1] :]]
        )
        if used + size > budget and result:
            for pool, length in zip((pieces, prompts), known, strict=True):
                pool.numbers = dict(list(pool.numbers.items())[:length])
            break
        used += size
        result.append(completion)
    return result


def _head(row: Any, number: int, step: int, rollout: int, why: str, prompts: Pool) -> dict[str, Any]:
    return {
        "r": number,
        "s": step,
        "n": rollout,
        "g": _short(row["group"]),
        "p": prompts(_cut(NOT_RECORDED if row["prompt"] is None else str(row["prompt"]))),
        "reward": _short(row["reward"]),
        "parts": shown(row["reward_parts"])[:300],
        "ok": None if pd.isna(row["correct"]) else bool(row["correct"]),
        "adv": _short(row["advantage"]),
        "len": _short(row["length"]),
        "cut": not pd.isna(row["truncated"]) and bool(row["truncated"]),
        "why": shown(why),
    }


def _body(row: Any, tokens: pd.DataFrame, maker: Pieces | None, pieces: Pool) -> dict[str, Any]:
    if tokens.empty:
        return {"text": shown(_cut(NOT_RECORDED if row["completion"] is None else str(row["completion"])))}
    ids = [int(token) for token in tokens["token_id"]]
    texts = [f"⟨{token}⟩" for token in ids] if maker is None else maker(ids)
    kept = tokens.head(MOST_TOKENS)
    columns = {
        name: [_short(value) for value in kept[column]] for name, column in COLUMNS.items() if _tells(name, kept)
    }
    body: dict[str, Any] = {"t": [pieces(shown(_cut(text, MOST_PIECE))) for text in texts[:MOST_TOKENS]], "c": columns}
    positions = [int(position) for position in kept["position"]]
    if positions != list(range(len(positions))):
        body["at"] = positions
    if len(texts) > MOST_TOKENS:
        body["rest"] = shown(_cut("".join(texts[MOST_TOKENS:])))
        body["more"] = len(texts) - MOST_TOKENS
    return body


def _tells(name: str, tokens: pd.DataFrame) -> bool:
    """Whether a column of the page says something of these tokens: recorded, no rounding, and not as good as not there."""
    values = (
        pd.to_numeric(tokens[COLUMNS[name]], errors="coerce").dropna()
        if COLUMNS[name] in tokens
        else pd.Series(dtype=float)
    )
    if not len(values) or (name in ROUNDED and not (values.abs() > ROUNDING).any()):
        return False
    if name == "adv":  # one number of the completion, if it is not each token's own
        return bool(values.nunique() > 1)
    return name not in CONSTANT or bool(((values - CONSTANT[name]).abs() > ROUNDING).any())


def _cut(text: str, most: int = MOST_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} characters more in the traces)"


def _short(value: Any) -> float | int | str | None:
    """A number with DIGITS significant digits; infinities as text, what is not recorded as None."""
    if value is None or pd.isna(value):
        return None
    number = float(value)
    if np.isinf(number):
        return "∞" if number > 0 else "−∞"
    short = float(f"{number:.{DIGITS}g}")
    return int(short) if short == int(short) and abs(short) < 1e9 else short
