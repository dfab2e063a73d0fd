"""Record the training of LoRA adapters: gradients, norms and shares are of the adapters' weights, which alone are trained."""

from __future__ import annotations

from common import SENTENCES, SETTINGS, tiny_model, tiny_tokenizer
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import sharpscope

rows = [{"prompt": prompt, "completion": completion} for prompt, completion in SENTENCES * 8]
trainer = SFTTrainer(
    model=tiny_model(),
    args=SFTConfig(**SETTINGS),
    peft_config=LoraConfig(r=4, target_modules="all-linear"),
    processing_class=tiny_tokenizer(),
    train_dataset=Dataset.from_list(rows),
)
sharpscope.record(trainer, out="runs/lora", recording={"token_gradients_every": 1})
trainer.train()
