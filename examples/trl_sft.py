"""Record TRL's SFTTrainer: one line before `train`."""

from __future__ import annotations

from common import SENTENCES, SETTINGS, tiny_model, tiny_tokenizer
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import sharpscope

rows = [{"prompt": prompt, "completion": completion} for prompt, completion in SENTENCES * 8]
trainer = SFTTrainer(
    model=tiny_model(),
    args=SFTConfig(**SETTINGS),
    processing_class=tiny_tokenizer(),
    train_dataset=Dataset.from_list(rows),
)
sharpscope.record(trainer, out="runs/trl-sft", recording={"token_gradients_every": 1})
trainer.train()
