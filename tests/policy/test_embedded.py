"""The shipped policies: they load with plain transformers, any text comes back, and what must be one token is."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from sharpscope import packaged
from sharpscope.errors import UserError
from sharpscope.packaged import data_path
from sharpscope.policy.embedded import (
    EMBEDDED,
    END,
    MARKS,
    PAD,
    build_model,
    build_tokenizer,
    common_phrases,
    embedded_policy,
    load_tokenizer,
    save_tokenizer,
)
from sharpscope.tasks import KnightsKnavesSpec, make_task

NAMES = sorted(EMBEDDED)


@cache
def shipped(name="knights_knaves"):
    return load_tokenizer(embedded_policy(name).path)


@cache
def quizzes(style="compact", people=3):
    spec = KnightsKnavesSpec(people=people, train_size=1, heldout_size=25, seed=3, style=style)
    return [example.prompt for example in make_task(spec).splits()["heldout"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_policy_is_a_small_qwen2_in_safetensors(name):
    folder = embedded_policy(name).path
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    assert model.num_parameters() <= 1_500_000
    assert model.config.max_position_embeddings >= 1024
    assert all(parameter.dtype == torch.float32 and parameter.isfinite().all() for parameter in model.parameters())
    assert (folder / "model.safetensors").stat().st_size <= 8 * 2**20
    tokenizer = load_tokenizer(folder)
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
    "text",
    [
        "",
        " ",
        "  \n\t ",
        "👩‍👩‍👧 naïve e\u0301 \u212b ﷽ 漢字",
        "<think>a</think><answer>b</answer>",
        "\x00\x7f",
        "Is Zoey a knave?\r\n",
        "<search>x</search><information> y</information>",
        "x" * 100_000,
        "Ava is a knight. " * 6_000,
        "🙂é" * 20_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_awkward_and_long_texts_come_back(text):
    assert shipped().decode(shipped()(text)["input_ids"]) == text


def test_marks_are_one_token_each_and_stay_when_special_tokens_are_dropped():
    tokenizer = shipped()
    for mark in MARKS:
        ids = tokenizer(mark)["input_ids"]
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == mark
    assert set(tokenizer.all_special_tokens) == {PAD, END}
    assert tokenizer.decode([0, 1], skip_special_tokens=True) == ""


@pytest.mark.parametrize("style", ["compact", "logic_rl"])
def test_every_loader_gives_the_same_tokens_for_puzzles(style):
    auto = AutoTokenizer.from_pretrained(embedded_policy("knights_knaves").path)
    for prompt in quizzes(style):
        ids = shipped()(prompt)["input_ids"]
        assert auto(prompt)["input_ids"] == ids
        assert auto.decode(ids) == prompt


def test_puzzles_are_short():
    lengths = [len(shipped()(prompt)["input_ids"]) for prompt in quizzes()]
    assert sum(lengths) / len(lengths) < 60
    assert max(len(shipped()(prompt)["input_ids"]) for prompt in quizzes("logic_rl", people=7)) < 512


def test_phrases_win_over_bpe_the_longest_first(tmp_path):
    texts = ["Ava is a knight and Leo is not a knave."] * 3 + ["something else entirely"]
    phrases = common_phrases(texts, share=0.5)
    assert phrases == [" and ", " is a knight", " is not a knave", "Ava", "Leo"]
    tokenizer = build_tokenizer(texts, [*phrases, "Leonora"], 300)
    pieces = [tokenizer.decode([i]) for i in tokenizer("Leonora is a knight and Leo")["input_ids"]]
    assert pieces == ["Leonora", " is a knight", " and ", "Leo"]
    save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.padding_side == "left"


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(UserError, match="vocabulary = 200: must be at least 269"):
        build_tokenizer(["a"], ["Ava"], 200)


def test_initial_weights_come_from_the_seed_alone_and_leave_the_global_generator_alone():
    tokenizer = build_tokenizer(["Ava"], [], 270)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model(tokenizer, layers=1, width=16, feed_forward=16, heads=2, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = build_model(tokenizer, layers=1, width=16, feed_forward=16, heads=2, seed=5)
    other = build_model(tokenizer, layers=1, width=16, feed_forward=16, heads=2, seed=6)
    weights, same, different = (dict(model.named_parameters()) for model in (first, second, other))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not torch.equal(weights["model.embed_tokens.weight"], different["model.embed_tokens.weight"])
    assert first.lm_head.weight is first.model.embed_tokens.weight


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(UserError, match="width = 18: must be a multiple of 2 × heads = 4"):
        build_model(build_tokenizer(["Ava"], [], 270), layers=1, width=18, feed_forward=16, heads=2, seed=0)


def test_an_unknown_policy_names_the_nearest():
    with pytest.raises(UserError, match="embedded policy 'knights_knave': unknown; did you mean 'knights_knaves'"):
        embedded_policy("knights_knave")


def test_data_is_found_in_the_package_before_the_checkout(tmp_path, monkeypatch):
    package, checkout = tmp_path / "package", tmp_path / "checkout"
    for root, text in ((package, "wheel"), (checkout, "checkout")):
        (root / "a").mkdir(parents=True)
        (root / "a" / "file").write_text(text)
    (checkout / "only").write_text("here")
    monkeypatch.setattr(packaged, "data_roots", lambda: (package, checkout))
    assert data_path("a", "file").read_text() == "wheel"
    assert data_path("only").read_text() == "here"
    with pytest.raises(UserError, match="data 'b/c': not found"):
        data_path("b", "c")


@pytest.mark.parametrize("parts", [(), ("..", "x"), ("/etc/passwd",), ("a", "../..")])
def test_data_outside_the_data_folder_is_refused(parts):
    with pytest.raises(UserError, match="outside the packaged data"):
        data_path(*parts)
