"""Mathematical questions at the embedded scale: four families, each with levels 1 to 4.

A generator takes a level and a random stream and gives a question and its answer; both are plain text.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction
from random import Random

LEVELS = (1, 2, 3, 4)
LARGEST = 12
"""Of the numbers in an arithmetic question."""
LEGS = {
    "snake": 0, "sea slug": 0, "jellyfish": 0, "flatworm": 0, "leech": 0,
    "chicken": 2, "bird": 2, "human": 2, "duck": 2,
    "dog": 4, "cat": 4, "cow": 4, "horse": 4, "lion": 4, "elephant": 4, "giraffe": 4, "tiger": 4, "deer": 4, "sheep": 4,
    "starfish": 5,
    "insect": 6, "ant": 6, "butterfly": 6, "beetle": 6, "bee": 6, "wasp": 6, "grasshopper": 6, "cricket": 6,
    "cockroach": 6, "praying mantis": 6, "firefly": 6,
    "spider": 8, "scorpion": 8,
    "crab": 10, "lobster": 10, "shrimp": 10,
    "woodlouse": 14,
}  # fmt: skip
"""Legs by animal, in the order of reasoning-gym's leg_counting, so that a seed draws the same animals."""


def arithmetic(level: int, rng: Random) -> tuple[str, str]:
    """`level` + 1 numbers from 0 to 12 with +, − and * and, from level 2 on, brackets; the answer is a whole number."""
    text, value, _ = _expression(level, rng)
    return f"{text} = ?", str(value)


def _expression(operators: int, rng: Random) -> tuple[str, int, int]:
    """Text, value and binding strength (1 sum, 2 product, 3 number) of a random expression with so many operators."""
    if operators == 0:
        number = rng.randint(0, LARGEST)
        return str(number), number, 3
    left_operators = rng.randint(0, operators - 1)
    left, left_value, left_strength = _expression(left_operators, rng)
    right, right_value, right_strength = _expression(operators - 1 - left_operators, rng)
    sign = rng.choice("+-*")
    strength = 2 if sign == "*" else 1
    # brackets exactly where the tree needs them: a − (b + c), but not (a + b) − c
    left = f"({left})" if left_strength < strength else left
    right = f"({right})" if right_strength < strength or (right_strength == strength and sign == "-") else right
    value = {"+": left_value + right_value, "-": left_value - right_value, "*": left_value * right_value}[sign]
    return f"{left} {sign} {right}", value, strength


def linear(level: int, rng: Random) -> tuple[str, str]:
    """Solve for x. 1: x + a = b; 2: ax + b = c; 3: ax + b = cx + d; 4: a(x + b) = cx + d, solved by a fraction."""
    if level == 4:
        while True:
            a, b, c, d = rng.randint(2, 9), _nonzero(rng), rng.randint(1, 9), _nonzero(rng)
            if a != c:
                break
        return f"Solve for x: {a}(x {_signed(b)}) = {_times(c)} {_signed(d)}", str(Fraction(d - a * b, a - c))
    x, b = rng.randint(-12, 12), _nonzero(rng)
    a = 1 if level == 1 else rng.randint(2, 9)
    c = rng.choice([number for number in range(1, 10) if number != a]) if level == 3 else 0
    right = a * x + b - c * x
    side = f"{_times(c)} {_signed(right)}" if c else str(right)
    return f"Solve for x: {_times(a)} {_signed(b)} = {side}", str(x)


def _nonzero(rng: Random) -> int:
    return rng.choice((-1, 1)) * rng.randint(1, 20)


def _signed(number: int) -> str:
    return f"{'-' if number < 0 else '+'} {abs(number)}"


def _times(number: int) -> str:
    return "x" if number == 1 else f"{number}x"


def modular(level: int, rng: Random) -> tuple[str, str]:
    """Remainders. 1: a + b mod m; 2: a * b mod m; 3: a * b + c mod m; 4: a^k mod m. 0 ≤ answer < m."""
    m, a, b, c = rng.randint(2, 13), rng.randint(2, 30), rng.randint(2, 30), rng.randint(1, 30)
    if level == 4:
        k = rng.randint(2, 9)
        return f"{a}^{k} mod {m} = ?", str(pow(a, k, m))
    text, value = {1: (f"({a} + {b})", a + b), 2: (f"({a} * {b})", a * b), 3: (f"({a} * {b} + {c})", a * b + c)}[level]
    return f"{text} mod {m} = ?", str(value % m)


def word(level: int, rng: Random) -> tuple[str, str]:
    """Legs of several kinds of animals; level 1 has 1 or 2 kinds, level 4 has 9 to 16. Wording of reasoning-gym's leg_counting."""
    least, most, largest = {1: (1, 2, 5), 2: (2, 3, 9), 3: (4, 8, 15), 4: (9, 16, 15)}[level]
    rng = Random(rng.getrandbits(31))
    animals = rng.sample(list(LEGS), rng.randint(least, most))
    counts = [rng.randint(1, largest) for _ in animals]
    listed = ", ".join(
        f"{count} {animal}{'s' if count > 1 else ''}" for count, animal in zip(counts, animals, strict=True)
    )
    question = (
        "Your task is to count how many legs there are in total when given a list of animals.\n\n"
        f"Now, how many legs are there in total if you have {listed}?"
    )
    return question, str(sum(count * LEGS[animal] for count, animal in zip(counts, animals, strict=True)))


FAMILIES: dict[str, Callable[[int, Random], tuple[str, str]]] = {
    "arithmetic": arithmetic,
    "linear": linear,
    "modular": modular,
    "word": word,
}
ORDERLESS = ("arithmetic", "modular")
"""Families whose questions may stand in several orders: 3 + 4 and 4 + 3."""


def unordered(family: str, question: str) -> str:
    """One text for all orders of the terms and factors of a question, so that 3 + 4 and 4 + 3 count as one."""
    if family not in ORDERLESS:
        return question
    text = question.removesuffix(" = ?").replace(" mod ", " % ")
    return _sorted_form(ast.parse(text, mode="eval").body)  # read, never evaluated


def _sorted_form(node: ast.expr) -> str:
    if not isinstance(node, ast.BinOp):
        return ast.unparse(node)
    if isinstance(node.op, ast.Add | ast.Sub):
        return f"({' '.join(sorted(_terms(node, '+')))})"
    if isinstance(node.op, ast.Mult):
        return f"({' * '.join(sorted(_factors(node)))})"
    return f"({_sorted_form(node.left)} {type(node.op).__name__} {_sorted_form(node.right)})"


def _terms(node: ast.expr, sign: str) -> list[str]:
    """Signed terms of a sum, through its brackets: of 1 - (2 - 3) +1, -2, +3."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)):
        return [sign + _sorted_form(node)]
    turned = {"+": "-", "-": "+"}[sign] if isinstance(node.op, ast.Sub) else sign
    return [*_terms(node.left, sign), *_terms(node.right, turned)]


def _factors(node: ast.expr) -> list[str]:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return [_sorted_form(node)]
    return [*_factors(node.left), *_factors(node.right)]
