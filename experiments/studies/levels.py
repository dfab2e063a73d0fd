"""Simulated studies with a known truth: how often C4, C7 and C10 are called supported and refuted.

    python experiments/studies/levels.py [--studies 400]

Paired differences are drawn (normal, with the standard deviations of the second study: 1.4 points of accuracy, 0.1 in ln sharpness)
and go through the claims' own rules. docs/explanations/claims.md has the table.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pandas as pd

from sharpscope.analysis.claims import CLAIMS, ClaimData
from sharpscope.analysis.claims.accuracy import greedy_finding
from sharpscope.analysis.claims.base import decide
from sharpscope.analysis.claims.sharpness import ratios
from sharpscope.config import ClaimsSpec

POINTS, LOG = 0.014, 0.1
Rng = np.random.Generator
Make = Callable[[Rng, int], ClaimData]


def frame(differences: np.ndarray) -> pd.DataFrame:
    """A number for each seed."""
    return pd.DataFrame({"seed": range(len(differences)), "difference": differences})


def accuracy(effect: float, hotter: float = 0.0, rivals: int = 1) -> Make:
    """Greedy accuracy is higher by `effect` than each rival's, at temperature 1 by `hotter` more."""

    def make(rng: Rng, seeds: int) -> ClaimData:
        # a rival's differences share the treatment's luck
        own, rest = (
            rng.normal(size=seeds),
            rng.normal(size=(rivals, seeds)),
        )
        greedy = {str(k): effect + POINTS / math.sqrt(2) * (own - rest[k]) for k in range(rivals)}
        sampled = {k: frame(v + hotter + 0.007 * rng.normal(size=seeds)) for k, v in greedy.items()}
        return greedy_finding({k: frame(v) for k, v in greedy.items()}, sampled, 0.05)

    return make


def collapse(rng: Rng, seeds: int) -> ClaimData:
    """Mean effect 0: a tenth of the treatment's runs loses 27 points, the others gain 3."""
    differences = frame(
        np.where(rng.random(seeds) < 0.1, -0.27, 0.03) + 0.002 * rng.normal(size=seeds)
    )
    return greedy_finding({"": differences}, {"": differences}, 0.05)


def sharpness(effect: float, fewer: float = 0.0, unit: str = "unit") -> Make:
    """The rise per correct completion is lower by `effect` [ln], and the share of correct completions by the share `fewer`.

    `unit="rise"` tests the rise itself, as version 0.2 did.
    """

    def make(rng: Rng, seeds: int) -> ClaimData:
        units = 0.15 * np.exp(
            LOG / math.sqrt(2) * rng.normal(size=(2, seeds)) - np.array([[0.0], [effect]])
        )
        rises = units * np.array([[0.4], [0.4 * (1 - fewer)]])
        columns = {"rise_baseline": rises[0], "rise_treatment": rises[1]}
        columns |= {"unit_baseline": units[0], "unit_treatment": units[1]}
        return ClaimData(parts={"": ratios(pd.DataFrame({"seed": range(seeds)} | columns), unit)})

    return make


DESIGNS: dict[str, tuple[str, Make]] = {
    "C7, no effect": ("C7", accuracy(0.0)),
    "C7, effect at the margin": ("C7", accuracy(0.02)),
    "C7, arms differ at temperature 1 alone, by 4 points": ("C7", accuracy(0.0, -0.04)),
    "C7, mean 0 with a rare collapse": ("C7", collapse),
    "C4, no effect": ("C4", sharpness(0.0)),
    "C4, no effect, 10 % fewer correct completions": ("C4", sharpness(0.0, 0.1)),
    "C4, the same, tested by the rise itself as in 0.2": ("C4", sharpness(0.0, 0.1, "rise")),
    "C4, effect at the margin": ("C4", sharpness(-math.log(0.9))),
    "C10, no effect": ("C10", accuracy(0.0, rivals=2)),
    "C10, effect at the margin": ("C10", accuracy(0.02, rivals=2)),
}


def outcomes(design: str, studies: int, seeds: int) -> Counter[str]:
    """Verdicts of simulated studies."""
    claim, make = DESIGNS[design]
    rng = np.random.default_rng([seeds, *design.encode()])
    return Counter(
        decide(CLAIMS[claim], make(rng, seeds), ClaimsSpec()).verdict for _ in range(studies)
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=400)
    studies, sizes = parser.parse_args().studies, (6, 8, 12)
    print(
        "| supported / refuted | "
        + " | ".join(f"{n} pairs" for n in sizes)
        + " |\n|---"
        + "|---" * len(sizes)
        + "|"
    )
    for design in DESIGNS:
        cells = []
        for n in sizes:
            found = outcomes(design, studies, n)
            cells.append(f"{found['supported'] / studies:.1%} / {found['refuted'] / studies:.1%}")
        print(f"| {design} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
