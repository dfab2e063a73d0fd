"""A tiny model and tokenizer for the examples, in place of those of your own training."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sees",
    "hears",
    "likes",
    "one",
    "two",
    "three",
    "red",
    "blue",
    "and",
]
SENTENCES = [
    ("the cat", " sees a red bird"),
    ("the dog", " hears one blue bird"),
    ("a bird", " likes the cat and the dog"),
    ("two cat", " sees three red dog"),
]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {word: 2 + at for at, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def tiny_model() -> Qwen2ForCausalLM:
    """Two layers of width 32 with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2 + len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen2ForCausalLM(config)


SETTINGS = {
    "output_dir": "runs/trainer",
    "max_steps": 4,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-2,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "bf16": False,
    "use_cpu": True,
    "dataloader_pin_memory": False,
}
"""Arguments of the trainers."""
