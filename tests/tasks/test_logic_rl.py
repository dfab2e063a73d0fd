"""The four totals, on answers written by hand and generated."""

from __future__ import annotations

import random
import time

import pytest

from sharpscope.tasks.logic_rl import read_answer, roles_of, score_logic_rl, solution_text, well_formed
from tests.oracles import puzzles as oracle

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
    (3.0, answered("Ella is a knave, Liam is a knave, and Zoey is a knight.")),
    (3.0, answered("ZOEY IS A KNIGHT; liam is a Knave; Ella  is\na knave")),
    (3.0, answered(GOOD, thought="Liam is a knight. knave knave knave")),
    (3.0, answered(GOOD, thought="")),
    (3.0, "chatter first " + answered(GOOD) + " and after: Liam is a knight"),
    (3.0, answered("**Zoey** " + GOOD)),
    (3.0, "<think></think><answer>" + GOOD + "</answer>"),
    (3.0, answered("é 好 \x00 " + GOOD)),
    # well formed, parsed, wrong
    (-0.5, answered(GOOD.replace("Liam is a knave", "Liam is a knight"))),
    (-0.5, answered("Zoey is a knave, Liam is a knight, Ella is a knight")),
    # well formed, but not one role for every name
    (-1.0, answered("")),
    (-1.0, answered("   \n")),
    (-1.0, answered("I do not know")),
    (-1.0, answered("Zoey is a knight, Liam is a knave")),
    (-1.0, answered(GOOD + "\n(4) Noah is a knight")),
    (-1.0, answered(GOOD + ". Zoey is a knight")),
    (-1.0, answered("Zoey is a knight, Liam is a knave, Noah is a knave")),
    (-1.0, answered("Zoey is a knight, Zoey is a knave, Ella is a knave")),
    (-1.0, answered("Zoey: knight, Liam: knave, Ella: knave")),
    (-1.0, answered("Zoey is not a knave, Liam is a knave, Ella is a knave")),
    (-1.0, answered("Zoey is a knight, Liam is a knave, and so is Ella")),
    (-1.0, answered("Zoey is a knight and Liam and Ella are knaves, both knaves")),
    (-1.0, answered("knight knave knave")),
    (-1.0, answered("Zoeys is a knight, Liam is a knave, Ella is a knave")),
    (-1.0, answered("Zoey is a knightly one, Liam is a knave, Ella is a knave")),
    # not well formed
    (-3.0, ""),
    (-3.0, GOOD),
    (-3.0, f"<answer>{GOOD}</answer>"),
    (-3.0, f"<think>hm</think>{GOOD}"),
    (-3.0, f"<think>hm<answer>{GOOD}</answer>"),
    (-3.0, f"hm</think><answer>{GOOD}</answer>"),
    (-3.0, f"<think>hm</think><answer>{GOOD}"),
    (-3.0, f"<think>hm</think>{GOOD}</answer>"),
    (-3.0, f"<think><think>hm</think><answer>{GOOD}</answer>"),
    (-3.0, f"<think><think>hm</think></think><answer>{GOOD}</answer>"),
    (-3.0, f"<think>hm</think><answer><answer>{GOOD}</answer>"),
    (-3.0, f"<think>hm</think><answer>{GOOD}</answer></answer>"),
    (-3.0, answered(GOOD) + answered(GOOD)),
    (-3.0, f"<answer>{GOOD}</answer><think>hm</think>"),
    (-3.0, f"<think>hm<answer>{GOOD}</answer></think>"),
    (-3.0, f"<think>hm<answer>{GOOD}</think></answer>"),
    (-3.0, f"</think>hm<think><answer>{GOOD}</answer>"),
    (-3.0, f"<think>hm</think></answer>{GOOD}<answer>"),
    (-3.0, answered(GOOD).upper()),
    (-3.0, answered(GOOD).replace("<think>", "<Think>")),
    (-3.0, answered(GOOD).replace("<answer>", "< answer>")),
    (-3.0, answered(GOOD, thought="the tag <answer> comes next")),
    (-3.0, answered(GOOD, thought="</think>")),
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
    "<answer>" * 12_500,
    "<think>" * 14_000,
    "<" * 100_000,
    "Zoey " * 20_000,
    answered("Zoey" + " " * 100_000),
    answered("Zoey " * 20_000),
    answered("Zoey is " * 12_500),
    answered("Zoey is a " * 10_000 + "knight knave knave"),
    answered(("Zoey" + " " * 1000 + "is" + " " * 1000) * 50 + "knight knave knave"),
    answered("knight" * 16_000),
    answered("\n" * 100_000 + GOOD),
    answered(GOOD, thought="a" * 100_000),
    answered("İ" * 100_000 + GOOD),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hundred_kilobytes_are_read_in_linear_time(text):
    started = time.perf_counter()
    total = score_logic_rl(text, TRUTH).total
    assert time.perf_counter() - started < 0.5
    assert total == oracle.logic_rl(text, TRUTH)


def test_solutions_are_written_as_the_training_sets_write_them_and_read_back():
    text = solution_text(["Zoey", "Liam", "Ella"], [True, False, False])
    assert text == GOOD
    assert roles_of(text) == TRUTH == read_answer(text, list(TRUTH))
    assert well_formed(answered(text))
    assert not well_formed(text)


def test_names_that_contain_each_other_are_kept_apart():
    truth = {"Jack": "knave", "Jackson": "knight"}
    assert score_logic_rl(answered("Jackson is a knight, Jack is a knave"), truth).total == 3.0
    assert score_logic_rl(answered("Jackson is a knave, Jack is a knight"), truth).total == -0.5
