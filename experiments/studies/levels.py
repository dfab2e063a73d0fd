"""Simulated studies with a known truth: how often C4, C7 and C10 are called supported and refuted.

    python -m experiments.studies.levels [--studies 200]

Pairs differ by normal noise with the standard deviations of the second study (1.4 points of accuracy, 0.1 in ln sharpness); the
whole way from a run's tables to the verdict is used. docs/explanations/claims.md has the table.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from sharpscope.analysis.claims import CLAIMS, study_of
from sharpscope.analysis.claims.base import decide
from sharpscope.config import ClaimsSpec
from tests.analysis.claims.frames import frame_run, study

RIVALS = ("grpo", "grpo-sg-reverse", "grpo-sg-shuffled")
POINTS, LOG = 0.014 / math.sqrt(2), 0.1 / math.sqrt(2)
Rng = np.random.Generator


def accuracy(effect: float, sampled: float = 0.0, arms: tuple[str, ...] = ("grpo",)) -> Callable[[Rng, int], Any]:
    """The treatment's greedy accuracy is higher by `effect`, at temperature 1 by `sampled` more."""

    def make(rng: Rng, seeds: int) -> Any:
        runs = []
        for seed in range(seeds):
            level = 0.5 + 0.05 * rng.normal()
            for arm in ("grpo-sg", *arms):
                ours = arm == "grpo-sg"
                value = level + effect * ours + POINTS * rng.normal()
                runs.append(frame_run(arm, seed, heldout=value, shift=sampled * ours + 0.005 * rng.normal()))
        return study(*runs)

    return make


def collapse(rng: Rng, seeds: int) -> Any:
    """Mean effect 0: a tenth of the treatment's runs loses 27 points, the others gain 3."""
    effects = {seed: -0.27 if rng.random() < 0.1 else 0.03 for seed in range(seeds)}
    return study(
        *(
            frame_run(arm, seed, heldout=0.5 + (effects[seed] if arm == "grpo-sg" else 0.0) + 0.002 * rng.normal())
            for seed in range(seeds)
            for arm in ("grpo", "grpo-sg")
        )
    )


def sharpness(effect: float, fewer: float = 0.0) -> Callable[[Rng, int], Any]:
    """The rise per correct completion is lower by `effect` [ln], and the share of correct completions by the share `fewer`."""

    def make(rng: Rng, seeds: int) -> Any:
        runs = []
        for seed in range(seeds):
            for arm in ("grpo", "grpo-sg"):
                ours = arm == "grpo-sg"
                ceiling = 0.4 * (1 - fewer * ours)
                rise = ceiling * 0.15 * math.exp(LOG * rng.normal() - effect * ours)
                probes = [
                    {"step": step, "quantity": quantity, "rho": 0.05, "value": rise, "ceiling": ceiling}
                    for quantity in ("sam", "asam")
                    for step in (0, 40)
                ]
                runs.append(frame_run(arm, seed, probes=probes))
        return study(*runs)

    return make


DESIGNS: dict[str, tuple[str, Callable[[Rng, int], Any]]] = {
    "C7, no effect": ("C7", accuracy(0.0)),
    "C7, effect at the margin": ("C7", accuracy(0.02)),
    "C7, arms differ at temperature 1 alone, by 4 points": ("C7", accuracy(0.0, -0.04)),
    "C7, mean 0 with a rare collapse": ("C7", collapse),
    "C4, no effect": ("C4", sharpness(0.0)),
    "C4, no effect, 10 % fewer correct completions": ("C4", sharpness(0.0, 0.1)),
    "C4, effect at the margin": ("C4", sharpness(-math.log(0.9))),
    "C10, no effect": ("C10", accuracy(0.0, 0.0, RIVALS)),
    "C10, effect at the margin": ("C10", accuracy(0.02, 0.0, RIVALS)),
}


def outcomes(design: str, studies: int, seeds: int) -> Counter[str]:
    """Verdicts of simulated studies."""
    claim, make = DESIGNS[design]
    found: Counter[str] = Counter()
    for index in range(studies):
        laid_out = study_of(make(np.random.default_rng([index, seeds, *design.encode()]), seeds), "grpo", "grpo-sg")
        found[decide(CLAIMS[claim], CLAIMS[claim].measure(laid_out), ClaimsSpec()).verdict] += 1
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=200)
    studies = parser.parse_args().studies
    sizes = (8, 12)
    print("| supported / refuted | " + " | ".join(f"{n} pairs" for n in sizes) + " |\n|---" + "|---" * len(sizes) + "|")
    for design in DESIGNS:
        cells = []
        for n in sizes:
            found = outcomes(design, studies, n)
            cells.append(f"{found['supported'] / studies:.1%} / {found['refuted'] / studies:.1%}")
        print(f"| {design} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
