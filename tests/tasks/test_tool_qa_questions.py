"""tool_qa with questions of one's own: chat messages, scorers, and options that would do nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sharpscope.config import RunConfig, build_config, to_yaml, validate
from sharpscope.tasks import ToolQaSpec, make_task
from sharpscope.tasks.tool_qa import INSTRUCTION, ToolQa


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
    [
        ("auto", "about 42", False),
        ("auto", "the 42", True),
        ("numeric", "about 42.0", True),
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
