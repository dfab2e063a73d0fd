"""A policy around a tiny random model, and completions made by hand."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from sharpscope.policy import Completions, Policy
from sharpscope.policy.loading import make_policy
from tests.models import tiny_model


def word_tokenizer(vocab: int = 37, **special: Any) -> PreTrainedTokenizerFast:
    """Words `<pad>`, `</s>`, `t2` … of one token each; padding 0, end of text 1."""
    words = {"<pad>": 0, "</s>": 1} | {f"t{i}": i for i in range(2, vocab)}
    backend = Tokenizer(WordLevel(words, unk_token="t2"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **({"pad_token": "<pad>", "eos_token": "</s>"} | special))


def tiny_policy(architecture: str = "qwen2", *, vocab: int = 37, **model: Any) -> Policy:
    """A random tiny model with `word_tokenizer`."""
    return make_policy(tiny_model(architecture, vocab=vocab, **model), word_tokenizer(vocab), "tiny")


def random_prompts(lengths: tuple[int, ...], vocab: int = 37, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (length,), generator=generator).tolist() for length in lengths]


def completions_by_hand(
    prompts: list[list[int]], completions: list[list[list[int]]], *, left: int = 0, right: int = 0
) -> Completions:
    """Rows of given prompts and their completions, with `left` and `right` more columns of padding than needed."""
    P = max(map(len, prompts)) + left
    T = max(len(c) for group in completions for c in group) + right
    ids, attention, group = [], [], []
    for g, (prompt, group_completions) in enumerate(zip(prompts, completions, strict=True)):
        for c in group_completions:
            ids.append([0] * (P - len(prompt)) + prompt + c + [0] * (T - len(c)))
            attention.append([0] * (P - len(prompt)) + [1] * (len(prompt) + len(c)) + [0] * (T - len(c)))
            group.append(g)
    input_ids, attention_mask = torch.tensor(ids), torch.tensor(attention)
    return Completions(
        input_ids=input_ids,
        attention_mask=attention_mask,
        completion_ids=input_ids[:, P:],
        completion_mask=attention_mask[:, P:],
        behavior_logp=torch.zeros(len(ids), T),
        sampler_logp=None,
        group=torch.tensor(group),
        truncated=torch.zeros(len(ids), dtype=torch.bool),
        texts=[""] * len(ids),
    )
