"""Record TRL's DPOTrainer: one line before `train`. In the trace a group is a pair, first the chosen completion."""

from __future__ import annotations

from common import SENTENCES, SETTINGS, tiny_model, tiny_tokenizer
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import sharpscope

pairs = [
    {"prompt": prompt, "chosen": completion, "rejected": " likes two and"}
    for prompt, completion in SENTENCES * 8
]
trainer = DPOTrainer(
    model=tiny_model(),
    ref_model=tiny_model(),
    args=DPOConfig(**SETTINGS),
    processing_class=tiny_tokenizer(),
    train_dataset=Dataset.from_list(pairs),
)
sharpscope.record(trainer, out="runs/trl-dpo", recording={"token_gradients_every": 1})
trainer.train()
