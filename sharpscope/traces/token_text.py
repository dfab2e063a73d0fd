"""Token ids as text, with the run's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from sharpscope.traces.reader import Run

BROKEN = "\ufffd"
LONGEST = 8
"""A character, or a cluster of them, spreads over at most so many tokens."""
Pieces = Callable[[Sequence[int]], list[str]]


def piece_maker(run: Run) -> Pieces | None:
    """A function from the token ids of a completion to their texts, as many as ids; None if the run saved no readable tokenizer.

    A character whose bytes are spread over several tokens is the text of the last of them; the others are empty.
    """
    folder = run.path / "tokenizer"
    return _load(folder) if folder.is_dir() else None


@lru_cache(maxsize=8)
def _load(folder: Path) -> Pieces | None:
    """`piece_maker` of the tokenizer in a folder."""
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            # AutoTokenizer gives some model types (Qwen2 among them) a class that cuts text in another way than the file says
            from tokenizers import Tokenizer

            tokenizer: Any = Tokenizer.from_file(str(file))
            return lambda ids: pieces(ids, lambda part: str(tokenizer.decode(part, skip_special_tokens=False)))
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(folder)
        return lambda ids: pieces(ids, lambda part: str(loaded.decode(part, clean_up_tokenization_spaces=False)))
    except Exception:  # the libraries raise bare exceptions for a damaged file; tokens then stand as their numbers
        return None


def token_texts(run: Run, tokens: pd.DataFrame) -> pd.Series:
    """The text of each row of `tokens` (step, rollout, position, token_id), by `piece_maker`; None without a tokenizer."""
    maker = piece_maker(run)
    if maker is None or tokens.empty:
        return pd.Series(None, index=tokens.index, dtype=object)
    known = {token: maker([int(token)])[0] for token in tokens["token_id"].unique()}
    texts = tokens["token_id"].map(known).astype(object)
    parts = tokens["token_id"].isin([token for token, text in known.items() if BROKEN in text])
    whole = tokens[["step", "rollout"]].apply(tuple, axis=1) if parts.any() else parts
    for _, rows in tokens[whole.isin(set(whole[parts]))].groupby(["step", "rollout"]) if parts.any() else ():
        ordered = rows.sort_values("position")
        texts.loc[ordered.index] = maker([int(token) for token in ordered["token_id"]])
    return texts


def pieces(ids: Sequence[int], join: Callable[[list[int]], str]) -> list[str]:
    """Texts of `ids`, given a function that decodes several ids at once."""
    known: dict[int, str] = {}
    result: list[str] = []
    waiting: list[int] = []
    for token in ids:
        if token not in known:
            known[token] = join([token])
        waiting.append(token)
        text = known[token] if len(waiting) == 1 else join(waiting)
        if text.endswith(BROKEN) and len(waiting) < LONGEST:
            result.append("")
            continue
        result.append(text)
        waiting = []
    if waiting:  # ends in the middle of a character
        result[-1] = join(waiting)
    return result
