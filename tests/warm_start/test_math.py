"""Mathematical demonstrations are right."""

from __future__ import annotations

import re

import pytest

from sharpscope.warm_start import math as demonstrations_math


@pytest.mark.parametrize(
    ("family", "question", "wanted"),
    [
        ("arithmetic", "3 + 4 = ?", "3 + 4 = 7"),
        ("arithmetic", "(3 + 4) * 17 = ?", "3 + 4 = 7; 7 * 17 = 119"),
        ("arithmetic", "2 - (3 - 9) * 2 = ?", "3 - 9 = -6; -6 * 2 = -12; 2 - -12 = 14"),
        ("linear", "Solve for x: x - 20 = -13", "-13 + 20 = 7; x = 7"),
        ("linear", "Solve for x: 2x - 9 = 3x - 11", "-11 + 9 = -2; 2 - 3 = -1; -1x = -2; x = 2"),
        ("linear", "Solve for x: 4x + 1 = x + 13", "13 - 1 = 12; 4 - 1 = 3; 3x = 12; x = 4"),
        ("modular", "(10 + 16) mod 11 = ?", "10 + 16 = 26; 11 * 2 = 22; 26 - 22 = 4"),
        ("modular", "(5 * 6 + 3) mod 7 = ?", "5 * 6 = 30; 30 + 3 = 33; 7 * 4 = 28; 33 - 28 = 5"),
    ],
)
def test_work_by_hand(family, question, wanted):
    assert demonstrations_math.work(family, question) == wanted


def test_every_line_of_work_is_true_and_ends_at_the_answer():
    pool = demonstrations_math.questions(("arithmetic", "linear", "modular"), (1, 2, 3), 60, seed=3)
    assert {key: len(examples) for key, examples in pool.items()} == {
        (family, level): 60 for family in ("arithmetic", "linear", "modular") for level in (1, 2, 3)
    }
    for (family, _), examples in pool.items():
        for example in examples:
            lines = demonstrations_math.work(family, example.meta["question"]).split("; ")
            for line in lines:
                sides = re.fullmatch(r"(-?\d+) ([+*-]) (-?\d+) = (-?\d+)", line)
                if sides:
                    a, sign, b, c = int(sides[1]), sides[2], int(sides[3]), int(sides[4])
                    assert {"+": a + b, "-": a - b, "*": a * b}[sign] == c
            assert lines[-1].rpartition("= ")[2] == example.answer
