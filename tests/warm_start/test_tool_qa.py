"""Demonstrations of mathematics and of searches: true, in the tasks' own words, and never about what is held out."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import pytest

from sharpscope.policy.embedded import build_tokenizer, load_tokenizer
from sharpscope.tasks import MathSpec, ToolQaSpec, make_task
from sharpscope.warm_start import tool_qa as demonstrations_tool
from sharpscope.warm_start.pretraining import WARM_STARTS, _dataset, _row, warm_start

pytest.importorskip("bm25s", reason="needs the optional library bm25s")


SMALL = {"layers": 1, "width": 16, "feed_forward": 16, "heads": 2, "corpus": 40, "batch": 4, "warmup": 1}


TINY_MATH = replace(WARM_STARTS["math"], **SMALL, steps=3, questions=20, micro_tokens=400)


TINY_TOOL = replace(WARM_STARTS["tool_qa"], **SMALL, steps=3, worlds=1, questions=6, micro_tokens=400)


@pytest.fixture(scope="module")
def asked():
    return demonstrations_tool.search_questions((1, 2, 3), 2, 8, seed=0)


def test_conversations_are_what_the_task_would_have_said(asked):
    task = make_task(ToolQaSpec(hops=(1, 2, 3), train_size=8, heldout_size=0, seed=demonstrations_tool.FIRST_WORLD))
    assert {hops: len(questions) for hops, questions in asked.items()} == {1: 16, 2: 16, 3: 16}
    for hops, questions in asked.items():
        for question in questions[:8]:  # those of the first world
            for searches in range(hops + 1):
                first, later = demonstrations_tool.conversation(question, searches)
                text = first
                for reply, turn in later:
                    assert task.respond(question.example, text) == reply
                    text += reply + turn
                assert len(later) == searches
                assert task.respond(question.example, text) is None
                reward = task.score(question.example, text)
                assert reward.total == (searches == hops) and reward.parts["format"] == 1.0
                assert reward.parts["searches"] == searches


def test_rows_are_tokenized_turn_by_turn_and_replies_are_not_imitated(asked):
    stream = demonstrations_tool.tool_demonstrations(asked, {2: 1}, guess_share=0.0, seed=0)
    seen = [question for questions in asked.values() for question in questions]
    examples = list(islice(stream, 20))
    tokenizer = build_tokenizer([d.text for d in examples], demonstrations_tool.phrases(seen), 600)
    for demonstration in examples:
        row = _row(tokenizer, demonstration)
        assert row.prompt == tokenizer(demonstration.prompt)["input_ids"]
        assert tokenizer.decode(row.prompt + row.completion[:-1]) == demonstration.text
        assert row.completion[-1] == tokenizer.eos_token_id
        own = [token for token, kept in zip(row.completion, row.mask, strict=True) if kept]
        heard = [token for token, kept in zip(row.completion, row.mask, strict=True) if not kept]
        assert tokenizer.decode(heard) == "".join(reply for reply, _ in demonstration.later)
        turns = [demonstration.completion, *(turn for _, turn in demonstration.later)]
        assert tokenizer.decode(own[:-1]) == "".join(turns)


@pytest.mark.parametrize("spec", [TINY_MATH, TINY_TOOL])
def test_what_is_held_out_is_never_shown(spec):
    train = {d.prompt for d in islice(_dataset(spec)[0], 300)}
    families = ("arithmetic", "linear", "modular")
    asked = MathSpec(families=families, seed=7) if spec.policy == "math" else ToolQaSpec()
    assert not train & {example.prompt for example in make_task(asked).splits()["heldout"]}


def test_a_policy_of_another_task_is_written(tmp_path):
    warm_start(TINY_TOOL, tmp_path / "policy")
    assert json.loads((tmp_path / "policy" / "warm_start.json").read_text())["spec"]["policy"] == "tool_qa"
    assert load_tokenizer(tmp_path / "policy")("<search>x</search>")["input_ids"]
