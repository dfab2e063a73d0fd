"""Record TRL's GRPOTrainer: one line before `train`."""

from __future__ import annotations

from common import SENTENCES, SETTINGS, tiny_model, tiny_tokenizer
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import sharpscope


def brevity(completions: list[str], **_: object) -> list[float]:
    """Fewer words are better."""
    return [-float(len(completion.split())) for completion in completions]


trainer = GRPOTrainer(
    model=tiny_model(),
    reward_funcs=brevity,
    args=GRPOConfig(**SETTINGS, num_generations=4, max_completion_length=6),
    processing_class=tiny_tokenizer(),
    train_dataset=Dataset.from_dict({"prompt": [prompt for prompt, _ in SENTENCES] * 4}),
)
sharpscope.record(trainer, out="runs/trl-grpo", recording={"token_gradients_every": 1})
trainer.train()
