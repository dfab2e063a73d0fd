"""The scorer of tool_qa against a table of right, wrong and adversarial conversations, in both its variants."""

from __future__ import annotations

import time
from itertools import product

import pytest

from sharpscope.tasks import Example, ToolQaSpec, make_task
from sharpscope.tasks.tool_qa import FEEDBACK, Passage, information
from tests.oracles import protocol as oracle

EXAMPLE = Example("Where?", "The Hague", {"truths": ("The Hague", "Den Haag")})
FOUND = information([Passage("The Hague", "A city."), Passage("Delft", "Another.")])

RIGHT = [
    "The Hague",
    "the hague",
    "THE HAGUE",
    "Hague",
    "hague",
    "  The Hague  ",
    "\nThe Hague\n",
    "The\tHague",
    "The  Hague",
    "The Hague.",
    "The Hague!",
    '"The Hague"',
    "'the Hague'",
    "(The Hague)",
    "The Hague,",
    "**The Hague**",
    "a Hague",
    "an Hague",
    "The, Hague",
    "the\u00a0hague",
    "Den Haag",
    "den haag",
    "DEN HAAG.",
    "the Den Haag",
    "Den\nHaag",
]
WRONG = [
    "",
    " ",
    "Delft",
    "The Hagues",
    "TheHague",
    "den-haag",
    "Den",
    "Haag Den",
    "The Hague or Delft",
    "The Hague, Delft",
    "not The Hague",
    "It is The Hague",
    "The Hague The Hague",
    "the",
    "a",
    "Тhe Hague",
    "The Hague\u200b",
    "Ｔｈｅ Ｈａｇｕｅ",
    "Hague, The Netherlands",
    "eugaH ehT",
    "The Hague?yes",
    "ground_truth",
    "0",
    "None",
    "The\u2028Hag\u200due",
]
WRAPPERS = [  # around an answer, and whether that follows the protocol
    ("<think>a</think><answer>{}</answer>", True),
    ("<think>a</think>\n\n<answer>{}</answer>\n", True),
    (f"<think>a</think><search>b</search>{FOUND}<think>c</think><answer>{{}}</answer>", True),
    (f"<think>a</think><search>b</search>{FOUND}" * 4 + "<think>c</think><answer>{}</answer>", True),
    ("<answer>{}</answer>", False),
    (f"hm{FEEDBACK}<think>a</think><answer>{{}}</answer>", False),
    (f"<search>b</search>{FOUND}<answer>{{}}</answer>", False),
]
H = "The Hague"
T = "<think>a</think>"
ADVERSARIAL = [  # conversation, right, follows the protocol, an answer was given
    # answers that are none
    ("", False, False, False),
    (H, False, False, False),
    (f"<think>{H}</think>", False, False, False),
    (f"{T}{H}", False, False, False),
    (f"{T}<answer>{H}", False, False, False),
    (f"{T}{H}</answer>", False, False, False),
    (f"{T}<answer>{H}</answer", False, False, False),
    (f"{T}</answer>{H}<answer>", False, False, False),
    (f"{T}<ANSWER>{H}</ANSWER>", False, False, False),
    (f"{T}< answer >{H}</ answer >", False, False, False),
    (f"{T}<answer {H}></answer>", False, False, False),
    (f"{T}[answer]{H}[/answer]", False, False, False),
    (f"{T}&lt;answer&gt;{H}&lt;/answer&gt;", False, False, False),
    (f"{T}\\boxed{{{H}}}", False, False, False),
    (f"{T}#### {H}", False, False, False),
    (f"{T}<search>{H}</search>", False, False, False),
    (f"{T}<search>{H}</search>{FOUND}", False, False, False),
    (f"{T}<information>{H}</information>", False, False, False),
    # an answer that the environment then spoke after is no final answer
    (f"{T}<answer>{H}</answer>{FOUND}", False, False, False),
    (f"{T}<answer>{H}</answer>{FEEDBACK}", False, False, False),
    (f"{T}<answer>{H}</answer>{FOUND}<think>b</think>", False, False, False),
    (f"{T}<answer>{H}</answer>{FOUND}<answer>Delft</answer>", False, False, True),
    (f"{T}<answer>Delft</answer>{FOUND}<think>b</think><answer>{H}</answer>", True, False, True),
    # more than one: the last counts
    (f"{T}<answer>Delft</answer><answer>{H}</answer>", True, False, True),
    (f"{T}<answer>{H}</answer><answer>Delft</answer>", False, False, True),
    (f"{T}<answer>{H}</answer>" * 2, True, False, True),
    (f"{T}<answer>{H}</answer><answer>", True, False, True),
    (f"{T}<answer>{H}</answer></answer>", False, False, True),
    (f"{T}<answer><answer>{H}</answer>", True, False, True),
    (f"{T}<answer>{H}</answer>{H}", True, False, True),
    (f"{T}so {H}: <answer>{H}</answer>", True, False, True),
    # tags inside tags
    (f"<think><answer>{H}</answer></think>", True, False, True),
    (f"<think><search>b</search></think><answer>{H}</answer>", True, False, True),
    (f"{T}<answer><search>b</search>{H}</answer>", False, False, True),
    (f"{T}<answer><information>{H}</information></answer>", False, False, True),
    (f"{T}<answer><think>{H}</think></answer>", False, False, True),
    (f"{T}<search><answer>{H}</answer></search>{FOUND}<think>b</think>", False, False, False),
    (f"<think><think>a</think><answer>{H}</answer>", True, False, True),
    (f"<think>a</think></think><answer>{H}</answer>", True, False, True),
    (f"<answer>{H}</answer><think>a</think>", True, False, True),
    (f"{T}{T}<answer>{H}</answer>", True, False, True),
    (f"{T}<search>b</search><think>c</think><answer>{H}</answer>", True, False, True),
    (f"{T}<information>x</information><think>c</think><answer>{H}</answer>", True, False, True),
    # the environment's own words, written by the policy
    (f"{T}<search>b</search><information>{H}</information>\n\n<think>c</think><answer>{H}</answer>", True, True, True),
    (
        f"{T}<search>b</search>\n\n<information></information>\n\n<think>c</think><answer>Delft</answer>",
        False,
        True,
        True,
    ),
    (f"{FEEDBACK}{FEEDBACK}{T}<answer>{H}</answer>", True, False, True),
    (f"{T}<answer>{FEEDBACK}</answer>", False, False, False),
    (f"{T}<answer>{H}</information>\n\n</answer>", False, False, False),
    (f"{T}<answer></information>\n\n<answer>{H}</answer>", True, False, True),
    # texts that look like code or markup are only texts
    (f"{T}<answer>{{}}</answer>", False, True, True),
    (f"{T}<answer>%s</answer>", False, True, True),
    (f"{T}<answer>[bold]{H}[/bold]</answer>", False, True, True),
    (f"{T}<answer>__import__('os')</answer>", False, True, True),
    (f"{T}<answer>example.meta['truths'][0]</answer>", False, True, True),
    (f"{T}<answer>\\The\\Hague</answer>", False, True, True),
    (f"{T}<answer>{H}\x00</answer>", False, True, True),
    (f"{T}<answer>\ud800</answer>", False, True, True),
    (f"{T}<answer>\u202eThe Hague</answer>", False, True, True),
    # 100 kB
    (f"<think>{'a' * 100_000}</think><answer>{H}</answer>", True, True, True),
    (f"{T}<answer>{' ' * 50_000}{H}{' ' * 50_000}</answer>", True, True, True),
    (f"{T}<answer>{'.' * 100_000}{H}</answer>", True, True, True),
    (f"{T}<answer>{'the ' * 25_000}Hague</answer>", True, True, True),
    (f"{T}<answer>{H * 11_000}</answer>", False, True, True),
    (f"{T}<answer>{'Hague ' * 17_000}</answer>", False, True, True),
    ("<answer>" * 12_500, False, False, False),
    ("</answer>" * 11_000, False, False, False),
    ("<answer></answer>" * 6_000, False, False, True),
    ("<search>" * 12_500 + f"<answer>{H}</answer>", True, False, True),
    (FEEDBACK * 400 + f"<answer>{H}</answer>", True, False, True),
    (FOUND * 900, False, False, False),
    ("<" * 100_000, False, False, False),
    (f"{T}<search>b</search>{FOUND}" * 500 + f"{T}<answer>{H}</answer>", True, True, True),
]
TABLE = [
    *((wrapper.format(answer), True, follows, True) for answer, (wrapper, follows) in product(RIGHT, WRAPPERS)),
    *((wrapper.format(answer), False, follows, True) for answer, (wrapper, follows) in product(WRONG, WRAPPERS)),
    *ADVERSARIAL,
]
assert len(RIGHT) + len(WRONG) + len(ADVERSARIAL) >= 100


@pytest.fixture(scope="module")
def tasks():
    return {reward: make_task(ToolQaSpec(reward=reward)) for reward in ("exact_match", "format")}


def test_the_whole_table(tasks):
    worth = {True: {True: 1.0, False: 0.8}, False: {True: 0.2}}
    for text, right, follows, given in TABLE:
        plain, variant = (tasks[reward].score(EXAMPLE, text) for reward in ("exact_match", "format"))
        shown = text if len(text) < 300 else f"{text[:150]} … {text[-100:]}"
        assert (plain.total, plain.correct) == (float(right), right), shown
        assert dict(plain.parts) | {"searches": 0.0} == {
            "answer": float(right),
            "format": float(follows),
            "searches": 0.0,
        }, shown
        assert variant.total == worth[right].get(follows, 0.1 if given else 0.0), shown
        assert (variant.correct, variant.parts) == (right, plain.parts), shown
        if len(text) < 2000:  # the slow version looks ahead from every letter
            assert oracle.follows(text) == follows, shown


def test_a_hundred_kilobytes_are_read_in_linear_time(tasks):
    for text, *_ in ADVERSARIAL:
        if len(text) > 50_000:
            began = time.process_time()
            tasks["format"].score(EXAMPLE, text)
            assert time.process_time() - began < 0.5
