"""A tiny GRPOTrainer on a random model and a word tokenizer, for tests."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from tests.models import tiny_model

PROMPTS = ["w2 w3", "w4", "w5 w6 w7", "w8 w9"]
VOCABULARY = 37


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def evens(completions: list[str], **_: Any) -> list[float]:
    """Share of even words, minus a half."""
    return [sum(int(w[1:]) % 2 == 0 for w in c.split()) / max(len(c.split()), 1) - 0.5 for c in completions]


def shortness(completions: list[str], **_: Any) -> list[float]:
    return [-0.01 * len(c.split()) for c in completions]


def trainer(
    folder: Path, *, architecture: str = "qwen2", model: dict[str, Any] | None = None, beta: float = 0.0, peft_config: Any = None,
    **arguments: Any
) -> Any:  # fmt: skip
    """16 completions a step of 4 prompts, 2 micro-batches an update, unless `arguments` say otherwise."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings: dict[str, Any] = dict(
        output_dir=str(folder), report_to=[], use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=4,
        gradient_accumulation_steps=2, max_completion_length=7, max_steps=3, learning_rate=0.01, loss_type="grpo",
        save_strategy="no", logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False, gradient_checkpointing=False,
        lr_scheduler_type="constant", seed=3,
    ) | arguments  # fmt: skip
    torch.manual_seed(0)  # of the adapters, which peft draws from the global generator; training seeds it anew
    made = GRPOTrainer(
        model=tiny_model(architecture, vocab=VOCABULARY, dtype=torch.float32, scale=0.3, **(model or {})),
        reward_funcs=[evens, shortness], peft_config=peft_config, args=GRPOConfig(**settings), processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}), eval_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )  # fmt: skip
    if beta:  # TRL would load the reference by the model's name, and this model has none
        made.beta, made.ref_model = beta, copy.deepcopy(made.model).eval().requires_grad_(False)
    return made
