"""Healthy trainings of many kinds, on which no cause may be named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.zoo.bases import (
    END,
    PAD,
    Loop,
    Place,
    Row,
    accuracy,
    hf_sft,
    policy,
    prompts,
    trl_dpo,
    trl_grpo,
    trl_sft,
)
from experiments.zoo.causes import padded
from experiments.zoo.registry import control

SMOLLM2 = Path("smollm2")
"""Where `python -m experiments.real_models.get` puts the model."""


def lora() -> Any:
    """Adapters on all linear layers."""
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")


@control("GRPO in TRL")
def healthy_trl(place: Place) -> None:
    trl_grpo(place)


@control("GRPO in TRL with KL, two uses of a batch and accumulation")
def healthy_trl_kl(place: Place) -> None:
    sizes = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 2}
    trl_grpo(place, beta=0.05, num_iterations=2, **sizes)


@control("GRPO in TRL with two rewards and DAPO's length penalty")
def healthy_trl_rewards(place: Place) -> None:
    def brevity(completions: list[str], **_: Any) -> list[float]:
        return [-0.005 * max(0, len(text) - 60) for text in completions]

    trl_grpo(place, rewards=(accuracy, brevity), loss_type="dr_grpo", scale_rewards="none")


@control("GRPO in a loop")
def healthy_loop(place: Place) -> None:
    Loop(place).run()


@control("GRPO in a loop with KL")
def healthy_kl(place: Place) -> None:
    class Kl(Loop):
        beta = 0.05

    Kl(place).run()


@control("GRPO in a loop at T = 0.7 on both sides")
def healthy_t07(place: Place) -> None:
    class Cool(Loop):
        temperature = 0.7

    Cool(place).run()


@control("GRPO in a loop with two PPO epochs and four micro-batches")
def healthy_epochs(place: Place) -> None:
    class Twice(Loop):
        epochs, micro = 2, 4

    Twice(place).run()


@control("GRPO in a loop with LoRA")
def healthy_lora(place: Place) -> None:
    class Adapters(Loop):
        lr = 2e-3

        def prepare(self) -> None:
            from peft import get_peft_model

            self.model = get_peft_model(self.model, lora())
            super().prepare()

        def make_optimizer(self) -> torch.optim.Optimizer:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            return torch.optim.AdamW(trained, lr=self.lr, weight_decay=0.0)

    Adapters(place).run()


@control("GRPO in a loop with an entropy bonus and weight decay of 0.01")
def healthy_entropy(place: Place) -> None:
    class Bonus(Loop):
        entropy_bonus = 0.01

        def make_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=self.lr, weight_decay=0.01)

    Bonus(place).run()


@control("GRPO with tool calls, sharpscope's own loop")
def healthy_tools(place: Place) -> None:
    from sharpscope.config import build_config
    from sharpscope.training import train

    values = {
        "seed": place.seed,
        "out": str(place.folder / "run"),
        "steps": min(place.steps or 6, 6),
        "task.kind": "tool_qa",
        "policy.model": "embedded:tool_qa",
        "rollout.prompts_per_step": 6,
        "rollout.group_size": 6,
        "optimizer.lr": 2e-4,
        "evaluation.every": 0,
        "checkpoint.every": 0,
        "probes.preset": "off",
        "threads": 1,
    }
    train(build_config(values=values))


@control("SFT in TRL")
def healthy_sft(place: Place) -> None:
    trl_sft(place)


@control("SFT in transformers' Trainer")
def healthy_hf(place: Place) -> None:
    tokenizer = policy()[1]

    def collate(rows: list[Row]) -> dict[str, Tensor]:
        texts = [row["prompt"] + row["completion"] for row in rows]
        ids = padded([[*tokenizer(text)["input_ids"], END] for text in texts])
        labels = ids.masked_fill(ids == PAD, -100)
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}

    hf_sft(place, collate)


@control("SFT in TRL with packing")
def healthy_packing(place: Place) -> None:
    trl_sft(place, packing=True, max_length=64, steps=20)


@control("DPO in TRL")
def healthy_dpo(place: Place) -> None:
    trl_dpo(place)


@control("GRPO in TRL on SmolLM2-135M-Instruct, 3 steps")
def healthy_smollm2(place: Place) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not SMOLLM2.is_dir():
        (place.folder / "refused.txt").write_text(f"no model in {SMOLLM2}\n")
        return

    def brevity(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
        return [-abs(len(text[0]["content"]) - 60) / 60 for text in completions]

    rows = [
        {"prompt": [{"role": "user", "content": "What is " + row["prompt"].strip()}]}
        for row in prompts(place.seed, 40)
    ]
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 24}
    trl_grpo(
        place,
        steps=3,
        rewards=(brevity,),
        rows=rows,
        model=AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(SMOLLM2),
        learning_rate=5e-6,
        **sizes,
    )
