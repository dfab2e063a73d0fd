"""Demonstrations of knights and knaves are right, and come from the training side."""

from __future__ import annotations

import random
from itertools import islice, product

import pytest

from sharpscope.tasks import KnightsKnavesSpec, make_task
from sharpscope.tasks.logic_rl import roles_of, score_logic_rl
from sharpscope.tasks.statements import solve
from sharpscope.warm_start.knights_knaves import (
    OPENING,
    chat,
    demonstrations,
    evaluated,
    holds,
    puzzles,
    renamed,
    trials,
)


@pytest.fixture(scope="module")
def pools():
    """Puzzles by number of people."""
    return {people: puzzles(people, 15, seed=4) for people in (2, 3, 4)}


def test_trials_by_hand():
    # Ava: Leo is a knave. Leo: Ava is a knave or Leo is not a knave.
    statements = (("lying", 1), ("or", ("lying", 0), ("not", ("lying", 1))))
    assert trials(("Ava", "Leo"), statements) == (
        "Ava knight, Leo knight: Ava says Leo knave no, no. "
        "Ava knight, Leo knave: Ava says Leo knave yes, Leo says Ava knave no or Leo knight no, yes."
    )


@pytest.mark.parametrize(
    ("statement", "text", "value"),
    [
        (("telling-truth", 0), "Ava knight yes", True),
        (("not", ("telling-truth", 0)), "Ava knave no", False),
        (("->", ("telling-truth", 0), ("lying", 1)), "Ava knight yes then Leo knave yes", True),
        (("->", ("lying", 0), ("telling-truth", 1)), "Ava knave no then Leo knight no", True),
        (("<=>", ("lying", 0), ("telling-truth", 1)), "Ava knave no iff Leo knight no", True),
        (("or", ("lying", 0), ("telling-truth", 1)), "Ava knave no or Leo knight no", False),
        (("not", ("or", ("lying", 0), ("telling-truth", 1))), "not (Ava knave no or Leo knight no)", True),
        (
            ("and", ("not", ("not", ("lying", 1))), ("telling-truth", 0)),
            "Leo knave yes and Ava knight yes",
            True,
        ),
    ],
)
def test_a_statement_is_judged_claim_by_claim(statement, text, value):
    assert holds(statement, (True, False)) is value
    assert evaluated(statement, ("Ava", "Leo"), (True, False)) == text


def test_holds_agrees_with_the_solver_on_what_solves_a_puzzle(pools):
    for pool in pools.values():
        for example in pool:
            statements = example.meta["statements"]
            fitting = [
                roles
                for roles in product((True, False), repeat=len(statements))
                if all(holds(statement, roles) == role for statement, role in zip(statements, roles, strict=True))
            ]
            assert fitting == solve(statements)


def test_an_unknown_operator_and_a_puzzle_without_solution_are_errors():
    with pytest.raises(ValueError, match="unknown operator 'xor'"):
        holds(("xor", ("lying", 0), ("lying", 1)), (True, True))
    with pytest.raises(ValueError, match="no solution"):
        trials(("Ava",), (("lying", 0),))


@pytest.mark.parametrize("chat_share", [0.0, 1.0])
def test_every_demonstration_earns_the_full_reward_and_its_reasoning_ends_at_the_solution(pools, chat_share):
    stream = demonstrations(pools, {2: 1, 3: 1, 4: 1}, guess_share=0.5, chat_share=chat_share, seed=0)
    styles = set()
    for demonstration in islice(stream, 60):
        prefill = OPENING if chat_share else ""
        assert demonstration.prompt.endswith(prefill or "\n")
        whole = prefill + demonstration.completion
        thought, _, rest = whole.removeprefix(OPENING).partition("</think><answer>")
        truth = roles_of(rest)
        assert len(truth) == demonstration.level
        assert score_logic_rl(whole, truth).total == 3
        for name in truth:
            assert f" {name}" in demonstration.prompt or f'"{name}' in demonstration.prompt
        styles.add(demonstration.style)
        if demonstration.style == "reason":
            last = thought.rpartition("no. ")[2].partition(":")[0]
            assert last == ", ".join(f"{name} {role}" for name, role in truth.items())
            assert thought.endswith(", yes.")
        else:
            assert thought == "a guess."
    assert styles == {"reason", "guess"}


def test_demonstrations_come_from_the_training_side_and_probes_from_the_held_out_side():
    spec = KnightsKnavesSpec(people=3, train_size=1, heldout_size=60, seed=9)
    held_out = {example.meta["content"] for example in make_task(spec).splits()["heldout"]}
    assert not held_out & {example.meta["content"] for example in puzzles(3, 150, seed=1)}
    probe = {example.meta["content"] for example in puzzles(3, 60, seed=1, split="heldout")}
    assert not probe & {example.meta["content"] for example in puzzles(3, 150, seed=2)}


def test_names_are_exchanged_as_whole_words_all_at_once():
    assert renamed("Jack, Ella: Jackson is Jack.", ("Jack", "Ella"), ("Ella", "Jack")) == "Ella, Jack: Jackson is Ella."


def test_chat_prompts_end_in_an_opened_think_and_keep_the_puzzle():
    for seed in range(30):
        text = chat("THE PUZZLE", "Ava", random.Random(seed))
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith("<|im_start|>user\nTHE PUZZLE\n<|im_end|>\n<|im_start|>assistant\n<think>")
