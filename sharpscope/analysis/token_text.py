"""Token ids as pieces of text, with the run's own tokenizer; characters split over tokens are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sharpscope.analysis.token_listing import token_decoder
from sharpscope.errors import UserError
from sharpscope.traces import Run

BROKEN = "\ufffd"
LONGEST = 8
"""A character, or a cluster of them, spreads over at most so many tokens."""
Pieces = Callable[[Sequence[int]], list[str]]


def piece_maker(run: Run) -> Pieces | None:
    """A function from the token ids of a completion to their texts, as many as ids; None if the run saved no tokenizer.

    A character whose bytes are spread over several tokens stands with the last of them; the others are empty.
    """
    join = _joiner(run)
    return None if join is None else lambda ids: pieces(ids, join)


def pieces(ids: Sequence[int], join: Callable[[list[int]], str]) -> list[str]:
    """Texts of `ids`, given a function that decodes several ids at once."""
    known: dict[int, str] = {}
    found: list[str] = []
    waiting: list[int] = []
    for token in ids:
        if token not in known:
            known[token] = join([token])
        waiting.append(token)
        text = known[token] if len(waiting) == 1 else join(waiting)
        if text.endswith(BROKEN) and len(waiting) < LONGEST:
            found.append("")
            continue
        found.append(text)
        waiting = []
    if waiting:  # ends in the middle of a character
        found[-1] = join(waiting)
    return found


def _joiner(run: Run) -> Callable[[list[int]], str] | None:
    file = Path(run.path) / "tokenizer" / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception:  # the library raises bare exceptions for a damaged file
            return None
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    try:
        decode = token_decoder(run)
    except UserError:
        return None
    return lambda ids: "".join(map(decode, ids))
