"""The one exception for a user's mistake: the command line prints its message and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can mend; the message names the field, the value and the fix in one line."""


class NonFiniteError(UserError):
    """A number that training needs is not finite; the health rule `non_finite` says what happens then."""


class CheckError(UserError):
    """A probe's numbers differ from plain autograd on the model at hand, so they are not reported.

    Attributes:
        probe: what was checked: a tier of `score_norms`, `forward`, `central`, `gradient`, `surface` or `hessian`.
        error: the largest relative error found.
        tolerance: what the precision of the model allows.
    """

    def __init__(self, message: str, probe: str, error: float, tolerance: float) -> None:
        super().__init__(message)
        self.message, self.probe, self.error, self.tolerance = message, probe, error, tolerance

    def __reduce__(self) -> tuple[type[CheckError], tuple[str, str, float, float]]:
        return CheckError, (self.message, self.probe, self.error, self.tolerance)


def nearest(name: str, valid: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the closest of `valid` to `name`, or the whole sorted list when none is close."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; valid: {', '.join(names)}"
