"""Parsing, solving and comparing puzzles, against the slow versions."""

from __future__ import annotations

import random

import pytest

from sharpscope.errors import UserError
from sharpscope.tasks.statements import MAX_TEXT, content_key, parse_statements, solve
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


def test_solver_knows_the_old_examples():
    assert solve((("lying", 1), ("lying", 0))) == [(True, False), (False, True)]
    assert solve((("lying", 0),)) == []  # "I am a knave"
    assert solve((("and", ("lying", 0), ("lying", 1)), ("telling-truth", 1))) == [(False, True)]


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


def test_literals_and_lists_are_read_alike():
    puzzle = (("and", ("telling-truth", 1), ("lying", 0)), ("not", ("lying", 0)))
    assert parse_statements(repr(puzzle)) == puzzle
    assert parse_statements([["and", ["telling-truth", 1], ["lying", 0]], ["not", ["lying", 0]]]) == puzzle


@pytest.mark.parametrize(
    ("literal", "says"),
    [
        ("", "not a Python literal"),
        ("__import__('os').system('true')", "not a Python literal"),
        ("(('lying', 0),", "not a Python literal"),
        ("(" * 5000 + ")" * 5000, "not a Python literal"),
        ("x" * (MAX_TEXT + 1), "a puzzle has at most"),
        ("()", "1 to"),
        ("{'a': 1}", "1 to"),
        ("(('lying', 2), ('lying', 0))", "from 0 to 1"),
        ("(('lying', True), ('lying', 0))", "from 0 to 1"),
        ("(('lying', -1), ('lying', 0))", "from 0 to 1"),
        ("(('lying', 0, 1), ('lying', 0))", "one person"),
        ("(('xor', ('lying', 0), ('lying', 1)), ('lying', 0))", "unknown operator 'xor'"),
        ("(([], 1), ('lying', 0))", "unknown operator"),
        ("(('not', ('lying', 0), ('lying', 1)), ('lying', 0))", "2 operands"),
        ("(('->', ('lying', 0)), ('lying', 0))", "1 operands"),
        ("(('and', ('lying', 0)), ('lying', 0))", "1 operands"),
        ("(('and', 'a', 'b'), ('lying', 0))", "not a statement"),
        ("('lying', 'lying')", "not a statement"),
        ("(" + "('not'," * 40 + "('lying', 0)" + ")" * 40 + ",)", "nested deeper"),
    ],
)
def test_what_is_no_puzzle_is_refused_with_its_place(literal, says):
    with pytest.raises(UserError, match=r"^row 3: ") as caught:
        parse_statements(literal, "row 3")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
