"""The token view's data: chosen completions with their tokens' numbers, as JSON values within a stated size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from sharpscope.analysis.completions import Choice, choose, completions_dropped
from sharpscope.analysis.spikes import NOT_RECORDED
from sharpscope.analysis.text import short, shown
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
    "ratio": "ratio",
    "clipped": "clipped",
    "polarity": "polarity",
    "adv": "advantage",
}
"""Name in the page → column of the tokens table, or value of `token_values`."""
CONSTANT = {"mismatch": 0.0, "kl": 0.0, "weight": 1.0, "ratio": 1.0, "clipped": 0.0}
"""Values of columns that are left out where every token has them."""


def token_view(
    runs: Mapping[str, Run], choices: Mapping[str, Choice] | None = None, budget: int = BUDGET
) -> dict[str, Any]:
    """Everything the token view shows: runs, prompts, token texts (`pieces`), completions, notes.

    A completion's `c` maps a name of COLUMNS to one number a token; a column without any number is left out. Every text is
    made visible by `shown`. At most `budget` bytes of completions, every run its equal part.
    """
    choices = choose(runs) if choices is None else choices
    share = min(RUN_BUDGET, budget // max(1, len(choices)))
    pieces: dict[str, int] = {}  # texts that repeat over the whole page → their numbers
    prompts: dict[str, int] = {}
    completions: list[dict[str, Any]] = []
    notes: list[str] = []
    for number, (name, choice) in enumerate(choices.items()):
        maker = piece_maker(choice.run)
        if not choice.run.rows("tokens"):
            notes.append(
                f"{name}: no token rows were recorded (recording.tokens_every), so completions are plain text."
            )
        elif maker is None:
            notes.append(f"{name}: the run saved no readable tokenizer, so tokens stand as their numbers.")
        taken = _completions(choice, number, share, maker, pieces, prompts)
        if len(taken) < len(choice.wanted):
            notes.append(f"{name}: {len(taken)} of {len(choice.wanted)} chosen completions fit into the file.")
        completions += taken
    for name, run in ((name, run) for name, run in runs.items() if name not in choices):
        dropped, none = "its completions were not kept when it was reduced.", "no completions were recorded"
        notes.append(f"{name}: {dropped if completions_dropped(run) else f'{none} (recording.rollouts_every).'}")
    return {
        "runs": [shown(name) for name in choices],
        "methods": [shown(c.run.method) for c in choices.values()],
        "prompts": [shown(text) for text in prompts],
        "pieces": list(pieces),
        "completions": completions,
        "notes": [shown(note) for note in notes],
    }


def _completions(
    choice: Choice, number: int, budget: int, maker: Pieces | None, pieces: dict[str, int], prompts: dict[str, int]
) -> list[dict[str, Any]]:
    """The chosen completions of one run, the first ones that fit into `budget` bytes; the first always."""
    rollouts = choice.run.rollouts.set_index(["step", "rollout"])
    wanted = ["rollout", "position", "token_id", "update", *needed_columns(COLUMNS.values())]
    result: list[dict[str, Any]] = []
    steps: dict[int, pd.DataFrame] = {}
    used = 0
    for (step, rollout), why in choice.wanted.items():
        if step not in steps:
            steps[step] = with_values(choice.run.tokens(steps=[step], columns=wanted))
        row, tokens = rollouts.loc[(step, rollout)], steps[step]
        body, texts = _body(row, tokens[tokens["rollout"] == rollout].sort_values("position"), maker)
        prompt = _cut(row["prompt"])  # type: ignore[call-overload, index]
        new = [text for text in dict.fromkeys(texts) if text not in pieces] + [prompt] * (prompt not in prompts)
        completion = _head(row, number, step, rollout, why) | body
        used += len(json.dumps(completion)) + 6 * len(texts) + len(json.dumps(new))
        if used > budget and result:
            break
        completion["p"] = prompts.setdefault(prompt, len(prompts))
        if "c" in completion:
            completion["t"] = [pieces.setdefault(text, len(pieces)) for text in texts]
        result.append(completion)
    return result


def _head(row: Any, number: int, step: int, rollout: int, why: str) -> dict[str, Any]:
    """What the page says about a completion as a whole."""
    names = {"g": "group", "reward": "reward", "adv": "advantage", "len": "length"}
    return {
        **{"r": number, "s": step, "n": rollout, "why": shown(why), "parts": shown(row["reward_parts"])[:300]},
        **{name: short(row[column], DIGITS) for name, column in names.items()},
        "ok": None if pd.isna(row["correct"]) else bool(row["correct"]),
        "cut": not pd.isna(row["truncated"]) and bool(row["truncated"]),
    }


def _body(row: Any, tokens: pd.DataFrame, maker: Pieces | None) -> tuple[dict[str, Any], list[str]]:
    """The numbers of a completion's tokens with their texts; without tokens, its text."""
    if tokens.empty:
        return {"text": shown(_cut(row["completion"]))}, []
    ids = [int(token) for token in tokens["token_id"]]
    texts = [f"⟨{token}⟩" for token in ids] if maker is None else maker(ids)
    kept = tokens.head(MOST_TOKENS)
    told = {name: column for name, column in COLUMNS.items() if _tells(name, kept)}
    numbers = {name: [short(value, DIGITS) for value in kept[column]] for name, column in told.items()}
    body: dict[str, Any] = {"c": numbers}
    positions = [int(position) for position in kept["position"]]
    if positions != list(range(len(positions))):
        body["at"] = positions
    if len(texts) > MOST_TOKENS:
        body |= {"rest": shown(_cut("".join(texts[MOST_TOKENS:]))), "more": len(texts) - MOST_TOKENS}
    return body, [shown(_cut(text, MOST_PIECE)) for text in texts[:MOST_TOKENS]]


def _tells(name: str, tokens: pd.DataFrame) -> bool:
    """Whether a column of the page says something of these tokens: recorded, no rounding, and not as good as not there."""
    values = pd.to_numeric(tokens.get(COLUMNS[name], pd.Series(dtype=float)), errors="coerce").dropna()
    if name == "adv":  # one number of the completion, if it is not each token's own
        return bool(values.nunique() > 1)
    usual = CONSTANT.get(name)
    return len(values) > 0 and (usual is None or bool(((values - usual).abs() > ROUNDING).any()))


def _cut(text: object, most: int = MOST_TEXT) -> str:
    """A text of at most `most` characters; what is missing was not recorded."""
    text = NOT_RECORDED if text is None else str(text)
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} characters more in the traces)"
