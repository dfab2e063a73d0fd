"""The terms on which claims are tested: margins, level, order of the primary claims, and the least dose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LEVEL = 0.05
ORDER = ("C7", "C4", "C10")
LEAST_ROTATION = 5.0
"""Mean rotation of the optimizer's step that a method must cause before it is compared [degrees].

Half of what weights in [1, 1.4] can do to a gradient of orthogonal token gradients, arctan(0.4/(2·√1.4)) = 9.6°.
"""


@dataclass(frozen=True)
class Terms:
    """Terms that a study declares before its data.

    Attributes:
        level: error rate of each test.
        order: the primary claims, in the order in which they are tested.
        margins: claim → margin in the unit of its rule; claims not named keep their rule's margin.
        least_rotation: mean rotation of the update below which methods are not compared [degrees].
    """

    level: float = LEVEL
    order: tuple[str, ...] = ORDER
    margins: Mapping[str, float] = field(default_factory=dict)
    least_rotation: float = LEAST_ROTATION

    def margin(self, claim: str, default: float) -> float:
        """The declared margin of a claim, or `default`, that of its rule."""
        return self.margins.get(claim, default)


DEFAULT = Terms()
