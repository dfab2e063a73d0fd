"""Parsing, solving and comparing puzzles, against the slow versions."""

from __future__ import annotations

import random
import time

import pytest

from sharpscope.tasks.logic_rl import score_logic_rl
from sharpscope.tasks.statements import content_key, solve
from tests.oracles import puzzles as oracle

OPERATORS = ("and", "or", "->", "<=>", "not")


def random_statement(rng: random.Random, people: int, depth: int):
    if depth == 0 or rng.random() < 0.3:
        return (rng.choice(("telling-truth", "lying")), rng.randrange(people))
    operator = rng.choice(OPERATORS)
    count = {"not": 1, "->": 2, "<=>": 2}.get(operator, rng.randint(2, 3))
    return (operator, *(random_statement(rng, people, depth - 1) for _ in range(count)))


def random_puzzle(rng: random.Random, people: int, depth: int = 2):
    return tuple(random_statement(rng, people, depth) for _ in range(people))


def relabel(statement, labels):
    operator, *parts = statement
    if operator in ("telling-truth", "lying"):
        return (operator, labels[parts[0]])
    return (operator, *(relabel(part, labels) for part in parts))


def shuffle_operands(statement, rng: random.Random):
    operator, *parts = statement
    if operator in ("telling-truth", "lying"):
        return statement
    parts = [shuffle_operands(part, rng) for part in parts]
    if operator in ("and", "or", "<=>"):
        rng.shuffle(parts)
    if operator in ("and", "or") and rng.random() < 0.3:
        parts.append(parts[0])
    return (operator, *parts)


@pytest.mark.parametrize("people", range(1, 8))
def test_solver_finds_what_trying_every_assignment_finds(people):
    rng = random.Random(people)
    for _ in range(60):
        puzzle = random_puzzle(rng, people, 3)
        assert set(solve(puzzle)) == oracle.solutions(puzzle)
        assert len(solve(puzzle)) == len(set(solve(puzzle)))


@pytest.mark.parametrize("people", range(1, 5))
def test_content_key_is_equal_exactly_for_puzzles_that_are_the_same_up_to_people(people):
    rng = random.Random(10 + people)
    made = [random_puzzle(rng, people, 1) for _ in range(60)]
    keys = [content_key(puzzle) for puzzle in made]
    contents = [oracle.contents(puzzle) for puzzle in made]
    for i in range(len(made)):
        for j in range(i):
            assert (keys[i] == keys[j]) == (contents[i] == contents[j]), (made[i], made[j])
    if people <= 2:
        assert len(set(keys)) < len(made)  # equal pairs occurred


@pytest.mark.parametrize("people", [2, 5, 7])
def test_content_key_ignores_order_of_people_and_operands(people):
    rng = random.Random(people)
    for _ in range(30):
        puzzle = random_puzzle(rng, people)
        labels = rng.sample(range(people), people)
        other = [()] * people
        for person, statement in enumerate(puzzle):
            other[labels[person]] = shuffle_operands(relabel(statement, labels), rng)
        assert content_key(puzzle) == content_key(tuple(other))
        first = ("not", ("not", puzzle[0]))
        assert content_key((first, *puzzle[1:])) == content_key(puzzle)


# -- The four totals, on answers written by hand and generated

TRUTH = {"Zoey": "knight", "Liam": "knave", "Ella": "knave"}
GOOD = "(1) Zoey is a knight\n(2) Liam is a knave\n(3) Ella is a knave"
PARTS = {
    3.0: {"format": 1.0, "answer": 2.0},
    -0.5: {"format": 1.0, "answer": -1.5},
    -1.0: {"format": 1.0, "answer": -2.0},
    -3.0: {"format": -1.0, "answer": -2.0},
}


def answered(answer: str, thought: str = "Suppose Zoey lies.") -> str:
    return f"<think>{thought}</think>\n<answer>{answer}</answer>"


CASES = [
    # right
    (3.0, answered(GOOD)),
    (3.0, answered("ZOEY IS A KNIGHT; liam is a Knave; Ella  is\na knave")),
    (3.0, "chatter first " + answered(GOOD) + " and after: Liam is a knight"),
    # well formed, parsed, wrong
    (-0.5, answered(GOOD.replace("Liam is a knave", "Liam is a knight"))),
    # well formed, but not one role for every name
    (-1.0, answered("")),
    (-1.0, answered(GOOD + "\n(4) Noah is a knight")),
    (-1.0, answered("Zoey is a knight, Zoey is a knave, Ella is a knave")),
    (-1.0, answered("Zoeys is a knight, Liam is a knave, Ella is a knave")),
    # not well formed
    (-3.0, ""),
    (-3.0, f"<think>hm</think><answer>{GOOD}"),
    (-3.0, answered(GOOD) + answered(GOOD)),
    (-3.0, f"<think>hm<answer>{GOOD}</think></answer>"),
    (-3.0, answered(GOOD).upper()),
]


@pytest.mark.parametrize(("total", "text"), CASES)
def test_hand_written_answers(total, text):
    reward = score_logic_rl(text, TRUTH)
    assert reward.total == total == oracle.logic_rl(text, TRUTH)
    assert dict(reward.parts) == PARTS[total]
    assert reward.correct == (total == 3.0)


def test_generated_answers_agree_with_the_plain_version():
    rng = random.Random(0)
    pieces = [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        *GOOD.split("\n"),
        "Liam is a knight",
        "knight",
        "Zoey",
        " ",
    ]
    seen = set()
    for _ in range(4000):
        if rng.random() < 0.5:
            text = "".join(rng.choices(pieces, k=rng.randint(0, 9)))
        else:
            said = "\n".join(
                rng.choices(pieces[4:], k=rng.randint(1, 4)) if rng.random() < 0.5 else rng.sample(pieces[4:8], 3)
            )
            text = answered(said, thought="".join(rng.choices(pieces[4:], k=3)))
        total = score_logic_rl(text, TRUTH).total
        assert total == oracle.logic_rl(text, TRUTH), text
        seen.add(total)
    assert seen == {3.0, -0.5, -1.0, -3.0}


HOSTILE = [
    "Zoey " * 20_000,
    answered("Zoey" + " " * 100_000),
    answered("Zoey is a " * 10_000 + "knight knave knave"),
    answered(("Zoey" + " " * 1000 + "is" + " " * 1000) * 50 + "knight knave knave"),
    answered("İ" * 100_000 + GOOD),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hundred_kilobytes_are_read_in_linear_time(text):
    started = time.perf_counter()
    total = score_logic_rl(text, TRUTH).total
    assert time.perf_counter() - started < 0.5
    assert total == oracle.logic_rl(text, TRUTH)


def test_names_that_contain_each_other_are_kept_apart():
    truth = {"Jack": "knave", "Jackson": "knight"}
    assert score_logic_rl(answered("Jackson is a knight, Jack is a knave"), truth).total == 3.0
    assert score_logic_rl(answered("Jackson is a knave, Jack is a knight"), truth).total == -0.5
