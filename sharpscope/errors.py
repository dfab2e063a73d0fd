"""Exceptions for user errors. The command line prints their message and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LISTED = 30
"""Valid names that a message lists."""
LONGEST = 1500
"""Longest message [characters]; of a longer one, which quotes a long value, the middle is left out."""


class UserError(Exception):
    """An error that the user can fix. The one-line message gives the field, the value and the fix."""

    def __init__(self, message: str = "") -> None:
        message = " ".join(message.splitlines())  # it may quote a name with a line break
        if len(message) > LONGEST:
            message = f"{message[: LONGEST - 500]} … {message[-500:]}"
        super().__init__(message)


class NonFiniteError(UserError):
    """A value needed in training is not finite. The health rule `non_finite` determines the action."""


class CheckError(UserError):
    """The results of a probe differ from autograd for this model, so they are not reported.

    `probe` names the check: a method of `score_norms`, `derivative`, `gradient`, `shares`, `surface` or `hessian`. `error` is the
    largest relative error, `tolerance` the largest that is allowed for the model's precision.
    """

    def __init__(
        self,
        message: str,
        probe: str,
        error: float,
        tolerance: float,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.probe = probe
        self.error = error
        self.tolerance = tolerance

    def __reduce__(self) -> tuple[type[CheckError], tuple[str, str, float, float]]:
        return CheckError, (self.message, self.probe, self.error, self.tolerance)


def first_line(error: BaseException) -> str:
    """First line of an error's message that has text, at most 200 characters; without one the name of its type."""
    lines = str(error).strip().splitlines()
    return lines[0].strip()[:200] if lines else type(error).__name__


def nearest(name: str, valid: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the element of `valid` closest to `name`, or up to LISTED of them if none is close."""
    names = sorted(valid)
    known = {one.lower(): one for one in names}
    close = difflib.get_close_matches(name.lower(), known, n=6, cutoff=0.5)
    if close:
        best = min(close, key=lambda one: edits(name.lower(), one))  # the first of equal ones
        return f"; did you mean '{known[best]}'?"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"; valid: {', '.join(names[:LISTED])}{more}"


def edits(one: str, other: str) -> int:
    """Fewest letters to insert, remove, replace, or swap with their neighbor, that make `other` of `one`."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            removed = last[j] + 1
            inserted = row[j - 1] + 1
            replaced = last[j - 1] + (letter != wanted)
            least = min(removed, inserted, replaced)
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                least = min(least, before[j - 2] + 1)  # swapped with its neighbor
            row.append(least)
        before, last = last, row
    return last[-1]
