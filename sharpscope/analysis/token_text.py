"""Token ids as text, with the run's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sharpscope.traces import Run

BROKEN = "\ufffd"
LONGEST = 8
"""A character, or a cluster of them, spreads over at most so many tokens."""
Pieces = Callable[[Sequence[int]], list[str]]


def piece_maker(run: Run) -> Pieces | None:
    """A function from the token ids of a completion to their texts, as many as ids; None if the run saved no readable tokenizer.

    A character whose bytes are spread over several tokens is the text of the last of them; the others are empty.
    """
    folder = run.path / "tokenizer"
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            # AutoTokenizer gives some model types (Qwen2 among them) a class that cuts text in another way than the file says
            from tokenizers import Tokenizer

            tokenizer: Any = Tokenizer.from_file(str(file))
            return lambda ids: pieces(ids, lambda part: str(tokenizer.decode(part, skip_special_tokens=False)))
        if folder.is_dir():
            from transformers import AutoTokenizer

            loaded: Any = AutoTokenizer.from_pretrained(folder)
            return lambda ids: pieces(ids, lambda part: str(loaded.decode(part, clean_up_tokenization_spaces=False)))
    except Exception:  # the libraries raise bare exceptions for a damaged file; tokens then stand as their numbers
        return None
    return None


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
