"""tool_qa with questions of one's own: chat messages, scorers, and options that would do nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sharpscope.config import RunConfig, build_config, to_yaml, validate
from sharpscope.errors import UserError
from sharpscope.tasks import ToolQaSpec, make_task
from sharpscope.tasks.tool_qa import INSTRUCTION, ToolQa


def row(prompt: Any, truth: Any = "Lena") -> dict[str, Any]:
    return {"prompt": prompt, "reward_model": {"ground_truth": {"target": [truth]}}}


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.fixture
def ask(tmp_path: Path):
    """A function from rows and fields to tool_qa over these questions."""

    def make(*rows: dict[str, Any], questions: dict[str, Any] | None = None, **fields: Any) -> ToolQa:
        (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = {"path": str(tmp_path / "q.jsonl"), "heldout_fraction": 0, **(questions or {})}
        return make_task(ToolQaSpec(questions=data, retriever_url="http://127.0.0.1:9/x", **fields))

    return make


def instructed(question: str) -> str:
    return INSTRUCTION.replace("{prompt}", question)


def test_the_instruction_stands_in_the_last_turn_of_the_user(ask):
    given = turns(("system", "Be brief."), ("user", "Hello"), ("assistant", "Yes?"), ("user", "Who is mayor?"))
    (example,) = ask(row(given), style="search_r1").splits()["train"]
    assert example.messages == [*given[:3], {"role": "user", "content": instructed("Who is mayor?")}]
    assert example.prompt == instructed("\n\n".join(turn["content"] for turn in given))
    (plain,) = ask(row(given), style="compact").splits()["train"]
    assert plain.messages == given


def test_turns_without_the_user_have_no_place_for_the_instruction(ask):
    given = turns(("system", "Be brief."), ("assistant", "Who is mayor?"))
    with pytest.raises(UserError, match=r"task.style = 'search_r1': .* without role 'user'"):
        ask(row(given), style="search_r1").splits()
    assert ask(row(given)).splits()["train"][0].messages == given


@pytest.mark.parametrize(
    ("scorer", "answer", "right"),
    [
        ("auto", "about 42", False),
        ("exact_match", "about 42", False),
        ("exact_match", "the 42", True),
        ("numeric", "about 42.0", True),
        ("numeric", "43", False),
        ("exact", "the 42", False),
    ],
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
        ({"corpus": "c.jsonl"}, r"corpus = 'c.jsonl': .* set questions, or remove corpus"),
        ({**GIVEN, "retriever_url": "http://x/y"}, r"corpus = 'c.jsonl': has no effect with retriever_url"),
        ({"questions": {"path": "q.jsonl", "scorer": "logic_rl"}, "corpus": "c.jsonl"}, r"questions.scorer = logic_rl"),
        ({**GIVEN, "hops": [1, 2]}, r"hops = .* applies to generated questions only"),
    ],
)
def test_an_option_without_effect_is_refused(fields, says):
    with pytest.raises(ValidationError, match=says):
        ToolQaSpec(**fields)


@pytest.mark.parametrize("fields", [{}, {"hops": [1, 2], "seed": 3}, GIVEN, {**GIVEN, "top": 5, "style": "search_r1"}])
def test_what_is_stored_of_a_run_can_be_read_back(fields):
    config = build_config(values={"task": {"kind": "tool_qa", **fields}})
    assert validate(RunConfig, yaml.safe_load(to_yaml(config))) == config
