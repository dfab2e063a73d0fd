"""Questions that need a search: the world, the protocol, the replies, the rewards."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sharpscope.config import RunConfig, build_config, to_yaml, validate
from sharpscope.tasks import Example, ToolQaSpec, make_task
from sharpscope.tasks.tool_qa import FEEDBACK, INSTRUCTION, Passage, ToolQa, follows_protocol, information
from sharpscope.tasks.tool_world import RELATIONS, make_world
from tests.oracles import puzzles as oracle

pytest.importorskip("bm25s", reason="needs the optional library bm25s")

SMALL = {"hops": (1, 2, 3), "train_size": 40, "heldout_size": 10}


@pytest.fixture(scope="module")
def task() -> ToolQa:
    return make_task(ToolQaSpec(**SMALL))


def test_the_world_is_consistent_and_repeatable(task):
    world = task.world
    assert world == make_task(ToolQaSpec(**SMALL)).world
    assert len(world.facts) == 300
    for name, facts in world.facts.items():
        assert set(facts) == set(RELATIONS[world.kinds[name]])
        assert all(world.kinds[value] == RELATIONS[world.kinds[name]][relation] for relation, value in facts.items())
        assert name not in facts.values()
    passages = {passage.title: passage.text for passage in world.corpus()}
    for name, facts in world.facts.items():
        assert all(f"{relation}: {value}." in passages[name] for relation, value in facts.items())
    assert make_world(20, 0) != make_world(20, 1)


def test_questions_follow_their_chain_and_never_name_their_answer(task):
    splits = task.splits()
    assert {name: len(examples) for name, examples in splits.items()} == {"train": 120, "heldout": 30}
    for example in (example for examples in splits.values() for example in examples):
        chain = example.meta["chain"]
        assert example.meta["level"] == len(chain)
        for thing, relation, value in chain:
            assert task.world.facts[thing][relation] == value
        assert [thing for thing, _, _ in chain[1:]] == [value for _, _, value in chain[:-1]]
        assert chain[-1][2] == example.answer
        words = re.findall(r"\w+", example.prompt)
        assert not {value for _, _, value in chain} & set(words)
        # read the question as a person would: innermost thing last, relations outwards
        asked = re.fullmatch(r"What is the (.+) of (\w+)\?\n", example.prompt)
        thing = asked.group(2)
        for relation in reversed(asked.group(1).split(" of the ")):
            thing = task.world.facts[thing][relation]
        assert thing == example.answer


def test_a_perfect_player_answers_every_question(task):
    for example in task.splits()["train"][::4]:
        text = ""
        for thing, relation, value in example.meta["chain"]:
            text += f"<think>what is the {relation} of {thing}?</think><search>{thing}</search>"
            reply = task.respond(example, text)
            assert reply.startswith("\n\n<information>Doc 1(Title: ")
            assert reply.endswith("</information>\n\n")
            first = reply.partition("\nDoc 2")[0]
            assert f"(Title: {thing})" in first  # the passage that is needed is the best one
            assert f"{relation}: {value}." in first
            text += reply
        text += f"<think>so</think><answer>{example.answer}</answer>"
        assert task.respond(example, text) is None
        reward = task.score(example, text)
        assert (reward.total, reward.correct) == (1.0, True)
        assert reward.parts == {"answer": 1.0, "format": 1.0, "searches": float(len(example.meta["chain"]))}


EXAMPLE = Example("Where?", "The Hague", {"truths": ("The Hague", "Den Haag")})
FOUND = information([Passage("The Hague", "A city.")])


@pytest.mark.parametrize(
    "turn", ["", "<think>hm</think>", "<search></search>", "<search> \n</search>", "Torvi</search>", "<answer>"]
)
def test_a_malformed_turn_gets_the_feedback_of_the_protocol(task, turn):
    assert task.respond(EXAMPLE, turn) == FEEDBACK
    assert task.respond(EXAMPLE, f"<think>a</think><search>b</search>{FOUND}{turn}") == FEEDBACK
    assert FEEDBACK.startswith(
        "\nMy previous action is invalid. If I want to search, I should put the query between <search>"
    )


def test_turns_end(task):
    text = ""
    for _ in range(4):
        text += "<search>a city</search>"
        reply = task.respond(EXAMPLE, text)
        assert "<information>" in reply
        text += reply
    assert task.respond(EXAMPLE, text + "<search>again</search>") is None
    text = "hm"
    for _ in range(4):
        assert task.respond(EXAMPLE, text) == FEEDBACK
        text += FEEDBACK + "hm <search></search>"
    assert task.respond(EXAMPLE, text) is None
    assert task.score(EXAMPLE, text).total == 0.0


CONVERSATIONS = [
    ("<think>a</think><answer>the hague.</answer>", True, True),
    (f"<think>a</think><search>b</search>{FOUND}<think>c</think><answer>Den Haag</answer>\n", True, True),
    ("<think>a</think>\n\n<answer>The  Hague!</answer>", True, True),
    ("<answer>Hague</answer>", True, False),
    (f"<search>b</search>{FOUND}<answer>The Hague</answer>", True, False),
    (f"<think>a</think><search>b</search>{FOUND}<answer>The Hague</answer>", True, False),
    ("<think>a</think> so <answer>The Hague</answer>", True, False),
    ("<think>a</think><answer>The Hague</answer> bye", True, False),
    ("hm" + FEEDBACK + "<think>a</think><answer>The Hague</answer>", True, False),
    ("<think>a</think><answer>Delft</answer>", False, True),
    ("<think>a</think><answer></answer>", False, True),
    ("<think>The Hague</think><answer>The Hague or Delft</answer>", False, True),
    ("<think>a</think><search>The Hague</search>", False, False),
    (f"<think>a</think><search>The Hague</search>{FOUND}", False, False),
    (f"<think>a</think><search><answer>The Hague</answer></search>{FOUND}<think>hm</think>", False, False),
    ("The Hague", False, False),
    ("<answer>The Hague", False, False),
]


@pytest.mark.parametrize(("text", "right", "followed"), CONVERSATIONS)
def test_rewards(task, text, right, followed):
    reward = task.score(EXAMPLE, text)
    assert (reward.total, reward.correct) == (float(right), right)
    assert (reward.parts["answer"], reward.parts["format"]) == (float(right), float(followed))
    assert oracle.follows(text) == followed


def test_the_protocol_is_judged_as_the_slow_version_does():
    rng = random.Random(0)
    blocks = [f"<{tag}>x</{tag}>" for tag in ("think", "search", "information", "answer")]
    tags = [f"<{slash}{tag}>" for tag in ("think", "search", "answer") for slash in ("", "/")]
    seen = {True: 0, False: 0}
    for _ in range(5000):
        turns = rng.randint(0, 2)
        parts = [*(blocks[:3] * turns), blocks[0], blocks[3]]
        if rng.random() < 0.6:
            parts[rng.randrange(len(parts))] = rng.choice([*blocks, *tags, "", " ", "y"])
        text = rng.choice(["", " ", "\n"]).join(parts)
        assert follows_protocol(text) == oracle.follows(text), text
        seen[follows_protocol(text)] += 1
    assert min(seen.values()) > 1000


@pytest.mark.parametrize(
    "text", ["<answer>" * 12_500, "<search>" * 12_500, "</search>" * 11_000, "<" * 100_000, FEEDBACK * 400]
)
def test_a_hundred_kilobytes_break_nothing(task, text):
    assert task.score(EXAMPLE, text).total == 0.0
    assert task.respond(EXAMPLE, text) in (FEEDBACK, None)


# -- tool_qa with questions of one's own: chat messages, scorers, and options that would do nothing.


def row(prompt: Any, truth: Any = "Lena") -> dict[str, Any]:
    return {"prompt": prompt, "reward_model": {"ground_truth": {"target": [truth]}}}


@pytest.fixture
def ask(tmp_path: Path):
    """A function from rows and fields to tool_qa over these questions."""

    def make(*rows: dict[str, Any], questions: dict[str, Any] | None = None, **fields: Any) -> ToolQa:
        (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = {"path": str(tmp_path / "q.jsonl"), "heldout_fraction": 0, **(questions or {})}
        return make_task(ToolQaSpec(questions=data, retriever_url="http://127.0.0.1:9/x", **fields))

    return make


def test_the_instruction_is_the_template_of_the_questions(ask):
    given = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is mayor?"}]
    (example,) = ask(row(given), style="search_r1").splits()["train"]
    assert example.prompt == INSTRUCTION.replace("{prompt}", "Be brief.\n\nWho is mayor?") and not example.messages
    (plain,) = ask(row(given), style="compact").splits()["train"]
    assert plain.messages == given
    (mine,) = ask(row(given), style="search_r1", questions={"template": "Q: {prompt}"}).splits()["train"]
    assert mine.prompt == "Q: Be brief.\n\nWho is mayor?"


@pytest.mark.parametrize(
    ("scorer", "answer", "right"),
    [("auto", "about 42", False), ("auto", "the 42", True), ("numeric", "about 42.0", True)],
)
def test_the_scorer_of_the_questions_is_the_one_that_is_named(ask, scorer, answer, right):
    task = ask(row("How many?", 42), questions={"scorer": scorer})
    (example,) = task.splits()["train"]
    reward = task.score(example, f"<think>a</think><answer>{answer}</answer>")
    assert (reward.total, reward.correct, reward.parts["answer"]) == (float(right), right, float(right))
    assert task.score(example, "42").total == 0.0  # an answer has its tags, whatever compares it


GIVEN = {"questions": {"path": "q.jsonl"}, "corpus": "c.jsonl"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"corpus": "c.jsonl"}, r"corpus = 'c.jsonl': .* set questions, or remove it"),
        ({**GIVEN, "retriever_url": "http://x/y"}, r"corpus = 'c.jsonl': has no effect with retriever_url"),
    ],
)
def test_an_option_without_effect_is_refused(fields, says):
    with pytest.raises(ValidationError, match=says):
        ToolQaSpec(**fields)


@pytest.mark.parametrize("fields", [{}, {"hops": [1, 2], "seed": 3}, GIVEN, {**GIVEN, "top": 5, "style": "search_r1"}])
def test_what_is_stored_of_a_run_can_be_read_back(fields):
    config = build_config(values={"task": {"kind": "tool_qa", **fields}})
    assert validate(RunConfig, yaml.safe_load(to_yaml(config))) == config
