"""Token ids as text, with the run's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sharpscope.errors import UserError
from sharpscope.traces import Run

BROKEN = "\ufffd"
LONGEST = 8
"""A character, or a cluster of them, spreads over at most so many tokens."""
Pieces = Callable[[Sequence[int]], list[str]]
Decode = Callable[[int], str]


def token_decoder(run: Run) -> Decode:
    """A function from token id to text, from the tokenizer that the run saved; of an imported run without one, the id itself.

    Raises:
        UserError: the run has no readable tokenizer.
    """
    if run.info.get("imported") is not None and not (Path(run.path) / "tokenizer").is_dir():
        return lambda token: f"⟨{token}⟩"
    join = _joiner(run)
    return lambda token: join([token])


def piece_maker(run: Run) -> Pieces | None:
    """A function from the token ids of a completion to their texts, as many as ids; None if the run saved no tokenizer.

    A character whose bytes are spread over several tokens is the text of the last of them; the others are empty.
    """
    try:
        join = _joiner(run)
    except UserError:
        return None
    return lambda ids: pieces(ids, join)


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


def _joiner(run: Run) -> Callable[[list[int]], str]:
    """A function from token ids to text; UserError if there is no readable tokenizer."""
    folder = Path(run.path) / "tokenizer"
    if not folder.is_dir():
        raise UserError(f"run '{run.path}' has no tokenizer/ folder, so its tokens cannot be shown as text")
    file = folder / "tokenizer.json"
    if file.is_file():
        # AutoTokenizer gives some model types (Qwen2 among them) a class that cuts text in another way than the file says.
        from tokenizers import Tokenizer

        try:
            tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare exceptions for a damaged file
            raise UserError(f"{file}: is no readable tokenizer ({error})") from error
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(folder)
    return lambda ids: str(loaded.decode(ids, clean_up_tokenization_spaces=False))
