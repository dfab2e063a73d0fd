"""Where two logs part: for each quantity that both have, the first step from which on they differ beyond their noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from sharpscope.diagnose.logs import Log
from sharpscope.diagnose.quantities import BY_NAME
from sharpscope.errors import UserError
from sharpscope.rules.measures import Values, step_noise, trailing

WINDOW = 5
"""Steps over which differences are averaged."""
ERRORS = 4.0
"""Standard errors from which a difference counts, if it stays so at most of the later steps."""


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Where one quantity of two logs parts."""

    quantity: str  # canonical name
    equal_to: int | None  # last step up to which both logs have exactly the same values
    step: int | None  # first step from which on they differ beyond the noise; None if they do not
    left: float  # mean values of both from there on; without a step over all steps
    right: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Where two logs part."""

    left: Log
    right: Log
    partings: list[Parting]  # first those that part, by step

    @property
    def finding(self) -> str:
        """The comparison in one sentence."""
        parted = [p for p in self.partings if p.step is not None]
        if not parted:
            names = ", ".join(BY_NAME[p.quantity].title for p in self.partings)
            return f"The logs do not part beyond their noise; compared: {names}."
        first = parted[0]
        title = BY_NAME[first.quantity].title
        return f"The logs part from step {first.step} on, first in {title}: {_values(first)}."

    def text(self) -> str:
        """The comparison for a terminal."""
        lines = [self.finding, f"  A: {self.left.path}", f"  B: {self.right.path}", ""]
        for parting in self.partings:
            title = BY_NAME[parting.quantity].title
            equal = (
                f"; exactly equal up to step {parting.equal_to}"
                if parting.equal_to is not None
                else ""
            )
            where = (
                "no difference beyond the noise"
                if parting.step is None
                else f"from step {parting.step}"
            )
            lines.append(f"  {title}: {where}, A and B {_values(parting)}{equal}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """The content of the JSON output."""
        return {
            "finding": self.finding,
            "paths": [str(self.left.path), str(self.right.path)],
            "partings": [vars(parting) for parting in self.partings],
        }


def _values(parting: Parting) -> str:
    return f"{parting.left:.3g} and {parting.right:.3g}"


def compare(left: Log, right: Log) -> Comparison:
    """Compare two logs at the steps that both have.

    Args:
        left: the log that is called A.
        right: the log that is called B.

    Raises:
        UserError: they share no quantity, or fewer than twice `WINDOW` steps.
    """
    names = [name for name in left.frame if name in right.frame and name != "lr"]
    partings = []
    for name in names:
        a, b = left.finite(str(name)).align(right.finite(str(name)), join="inner")
        if len(a) >= 2 * WINDOW:
            partings.append(_parting(str(name), a, b))
    if not partings:
        raise UserError(
            f"{left.path} and {right.path}: share no quantity at {2 * WINDOW} or more steps; nothing to compare"
        )
    order = sorted(partings, key=lambda p: (p.step is None, p.step or 0))
    return Comparison(left=left, right=right, partings=order)


def _parting(name: str, a: pd.Series, b: pd.Series) -> Parting:
    x = a.to_numpy(float)
    y = b.to_numpy(float)
    steps = a.index.to_numpy()
    unequal = np.flatnonzero(x != y)
    equal_to = (
        None
        if len(unequal) and unequal[0] == 0
        else int(steps[unequal[0] - 1 if len(unequal) else -1])
    )
    if BY_NAME[name].log and (x > 0).all() and (y > 0).all():
        first = np.log(x)
        second = np.log(y)
    else:
        first, second = x, y
    at = _first_difference(first, second)
    since = slice(at, None)
    return Parting(
        quantity=name,
        equal_to=equal_to,
        step=None if at is None else int(steps[at]),
        left=float(x[since].mean()),
        right=float(y[since].mean()),
    )


def _first_difference(x: Values, y: Values) -> int | None:
    """Position from which on two series (n,) differ by `ERRORS` standard errors at two of three later steps; None if nowhere.

    The noise is that around each series' trend. Where it is zero any difference counts.
    """
    gap = trailing(x - y, WINDOW, WINDOW)
    noise = np.hypot(step_noise(x)[-1], step_noise(y)[-1]) / np.sqrt(WINDOW)
    differs = np.abs(gap) > max(ERRORS * float(noise), 1e-9 * float(np.abs([x, y]).max()))
    differs &= ~np.isnan(gap)
    left = np.arange(len(x), 0, -1)
    share = np.cumsum(differs[::-1])[::-1] / left  # of the steps from each on
    lasting = np.flatnonzero(differs & (share >= 2 / 3) & (left >= min(3, len(x))))
    if not len(lasting):
        return None
    window = np.abs(x - y)[max(0, lasting[0] - WINDOW + 1) : lasting[0] + 1]
    large = np.flatnonzero(window > ERRORS * float(noise))
    return max(0, int(lasting[0]) - WINDOW + 1) + (int(large[0]) if len(large) else WINDOW - 1)
