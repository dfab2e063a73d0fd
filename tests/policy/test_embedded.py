"""The shipped policies: they load with plain transformers, any text comes back, and what must be one token is."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from sharpscope.config.run import EMBEDDED_NAMES
from sharpscope.errors import UserError
from sharpscope.packaged import data_path
from sharpscope.policy.embedded import END, PAD, embedded_policy
from sharpscope.tasks import KnightsKnavesSpec, make_task

NAMES = sorted(EMBEDDED_NAMES)


@cache
def shipped(name="knights_knaves"):
    return PreTrainedTokenizerFast.from_pretrained(embedded_policy(name))


@cache
def quizzes(style="compact", people=3):
    spec = KnightsKnavesSpec(people=people, train_size=1, heldout_size=25, seed=3, style=style)
    return [example.prompt for example in make_task(spec).splits()["heldout"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_policy_is_a_small_qwen2_in_safetensors(name):
    folder = embedded_policy(name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    assert model.num_parameters() <= 1_500_000
    assert model.config.max_position_embeddings >= 1024
    assert all(parameter.dtype == torch.float32 and parameter.isfinite().all() for parameter in model.parameters())
    assert (folder / "model.safetensors").stat().st_size <= 8 * 2**20
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert (
        (model.config.pad_token_id, model.config.eos_token_id)
        == (tokenizer.pad_token_id, tokenizer.eos_token_id)
        == (0, 1)
    )
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)
    assert len(tokenizer) <= model.config.vocab_size
    assert json.loads((folder / "warm_start.json").read_text())["parameters"] == model.num_parameters()


@given(st.text(max_size=300))
@settings(max_examples=150, deadline=None)
def test_any_text_comes_back(text):
    ids = shipped()(text)["input_ids"]
    assert shipped().decode(ids) == text
    assert not ids or max(ids) < len(shipped())


@pytest.mark.parametrize(
    "text", ["👩‍👩‍👧 naïve e\u0301 \u212b ﷽ 漢字", "<search>x</search>\x00\r\n", "x" * 100_000, "🙂é" * 20_000], ids=len
)
def test_awkward_and_long_texts_come_back(text):
    assert shipped().decode(shipped()(text)["input_ids"]) == text


@pytest.mark.parametrize("style", ["compact", "logic_rl"])
def test_every_loader_gives_the_same_tokens_for_puzzles(style):
    auto = AutoTokenizer.from_pretrained(embedded_policy("knights_knaves"))
    for prompt in quizzes(style):
        ids = shipped()(prompt)["input_ids"]
        assert auto(prompt)["input_ids"] == ids
        assert auto.decode(ids) == prompt


@pytest.mark.parametrize("parts", [(), ("..", "x"), ("/etc/passwd",), ("a", "../..")])
def test_data_outside_the_data_folder_is_refused(parts):
    with pytest.raises(UserError, match="outside the packaged data"):
        data_path(*parts)
