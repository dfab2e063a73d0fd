"""Finite, disjoint splits out of an endless stream of questions."""

from __future__ import annotations

from collections.abc import Container, Iterable

from sharpscope.errors import UserError
from sharpscope.tasks.base import Example, held_out_share

HELD_OUT = 0.25
"""Share of all contents that never enters a training set, whatever the seed."""
GIVE_UP = 5_000
"""Questions in a row without a new one after which a set is taken to be larger than what exists."""


def take(
    stream: Iterable[Example], count: int, *, training: bool, field: str, without: Container[str] = ()
) -> list[Example]:
    """The first `count` examples of different `meta["id"]` whose content may stand on that side.

    The id is a hash of the question; that hash alone says on which side it belongs, so no question that is held out
    anywhere is in a training set made anywhere. An example whose `meta["form"]` is in `without` is left out, too.

    Raises:
        UserError: the stream ends or repeats itself before there are enough; the message names `field`.
    """
    taken: dict[str, Example] = {}
    misses = 0
    if count == 0:
        return []
    for example in stream:
        identity = str(example.meta["id"])
        known = identity in taken or example.meta.get("form") in without
        if known or (held_out_share(identity) >= HELD_OUT) != training:
            misses += 1
            if misses >= GIVE_UP:
                break
            continue
        misses = 0
        taken[identity] = example
        if len(taken) == count:
            return list(taken.values())
    raise UserError(
        f"{field} = {count}: only {len(taken)} different questions found; ask for fewer or for higher levels"
    )
