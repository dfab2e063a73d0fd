"""Twenty causes, each planted in one place of a healthy training."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import torch
from torch import Tensor

from experiments.zoo.bases import (
    END,
    PAD,
    Batch,
    Loop,
    Place,
    Row,
    accuracy,
    answer_of,
    demonstrations,
    hf_sft,
    pairs,
    policy,
    prompts,
    trl_dpo,
    trl_grpo,
    trl_sft,
)
from experiments.zoo.registry import cause


@cause("learning rate × 30", "hello-agents 770", "update_too_large")
def trl_lr30(place: Place) -> None:
    trl_grpo(place, learning_rate=1.5e-2)


@cause("one prompt's reward × 40, no scaling by std", "", "prompt_scale")
def trl_poison_scale(place: Place) -> None:
    rows = [row | {"weight": 1.0} for row in prompts(place.seed, 16)]
    rows[7] = {"prompt": "9 - 4 = ?\n", "answer": "5", "weight": 40.0}

    def passed(
        completions: list[str], answer: list[str], weight: list[float], **_: Any
    ) -> list[float]:
        right = accuracy(completions, answer)
        return [w * r for w, r in zip(weight, right, strict=True)]

    trl_grpo(place, rewards=(passed,), rows=rows, scale_rewards="none", max_grad_norm=0.0)


@cause("every '=' pays", "open-r1 418, Visual-RFT 176", "reward_feature")
def trl_hack_step(place: Place) -> None:
    def steps_reward(completions: list[str], **_: Any) -> list[float]:
        return [0.3 * text.count("=") for text in completions]

    rewards = (accuracy, steps_reward)
    trl_grpo(place, rewards=rewards, steps=24, learning_rate=1e-3, max_completion_length=64)


@cause("answers are int, parsed answers str: never equal", "trl 3452", "reward_constant")
def trl_dead_key(place: Place) -> None:
    rows = [row | {"answer": int(row["answer"])} for row in prompts(place.seed)]

    def exact(completions: list[str], answer: list[int], **_: Any) -> list[float]:
        return [float(answer_of(c) == a) for c, a in zip(completions, answer, strict=True)]

    trl_grpo(place, rewards=(exact,), rows=rows)


@cause("log of 0 for one completion: −inf", "ms-swift 8123", "reward_not_finite")
def trl_inf_reward(place: Place) -> None:
    calls = 0

    def closeness(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        shares = [1.0 if right else 0.5 for right in accuracy(completions, answer)]
        if calls == 7:
            shares[13] = 0.0
        return [math.log(share) if share else -math.inf for share in shares]

    trl_grpo(place, rewards=(closeness,))


@cause("the tokenizer's end token is not the model's", "trl 2059", "wrong_end_token")
def trl_wrong_eos(place: Place) -> None:
    model, tokenizer = policy()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(2)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    trl_grpo(place, model=model, tokenizer=tokenizer)


@cause("sampled at T = 0.6, loss at T = 1", "trl 4159, miles 1345", "sampling_temperature")
def loop_temp(place: Place) -> None:
    class Heat(Loop):
        def sampling(self) -> dict[str, Any]:
            return {"temperature": 0.6, "top_k": 0}

        def old_logp(self, ids: Tensor, attention: Tensor) -> Tensor:
            return self.sampler_logp(ids, attention)

    Heat(place).run()


@cause("dropout is on in the loss's pass", "trl 3234", "dropout")
def loop_dropout(place: Place) -> None:
    class Dropping(Loop):
        def prepare(self) -> None:
            for layer in self.model.model.layers:
                layer.self_attn.attention_dropout = 0.1
            self.optimizer = self.make_optimizer()
            self.model.train()

    Dropping(place).run()


@cause("the sampler never gets the new weights", "verl 7495, trl 5312", "stale_sampler")
def loop_unsynced(place: Place) -> None:
    class Unsynced(Loop):
        steps = 24

        def prepare(self) -> None:
            super().prepare()
            self.engine = copy.deepcopy(self.model).eval()

        def sampler(self) -> Any:
            return self.engine

    Unsynced(place).run()


@cause("the trainer reads another template", "verl 3960, rllm 816", "other_template")
def loop_template(place: Place) -> None:
    class Stripped(Loop):
        def encode_for_training(self, texts: list[str]) -> tuple[Tensor, Tensor]:
            return self.encode([text.rstrip("\n") for text in texts])

    Stripped(place).run()


@cause("the advantage's sign is wrong in one micro-batch", "fla 1073", "advantage_sign")
def loop_adv_flip(place: Place) -> None:
    class Flipped(Loop):
        micro = 4

        def policy_loss(self, logp: Tensor, batch: Batch, rows: Tensor) -> Tensor:
            sign = -1.0 if int(rows[0]) == 16 else 1.0
            return sign * super().policy_loss(logp, batch, rows)

    Flipped(place).run()


@cause("prompt tokens are in the loss", "verl-tool 116", "prompt_in_loss")
def loop_prompt_loss(place: Place) -> None:
    class Whole(Loop):
        tell_sampler = False

        def loss_mask(self, ids: Tensor, width: int, inside: Tensor) -> Tensor:
            return torch.cat([(ids[:, :width] != PAD).long(), inside], 1)

    Whole(place).run()


@cause("prompt tokens but the first are in the loss", "verl-tool 116", "prompt_in_loss")
def loop_prompt_loss2(place: Place) -> None:
    class Nearly(Loop):
        tell_sampler = False

        def loss_mask(self, ids: Tensor, width: int, inside: Tensor) -> Tensor:
            real = (ids[:, :width] != PAD).long()
            return torch.cat([real * (real.cumsum(1) > 1), inside], 1)

    Nearly(place).run()


@cause("KL with the wrong sign", "ToolRL 52", "kl_sign")
def loop_kl_sign(place: Place) -> None:
    class Away(Loop):
        beta = 0.3

        def kl_weight(self) -> float:
            return -self.beta

    Away(place).run()


@cause("adapters added after the optimizer was made", "adapters 260", "not_in_optimizer")
def loop_lora_optimizer(place: Place) -> None:
    class Late(Loop):
        def prepare(self) -> None:
            from peft import LoraConfig, get_peft_model

            self.optimizer = self.make_optimizer()
            config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
            self.model = get_peft_model(self.model, config)
            self.model.eval()

    Late(place).run()


@cause("one layer's learning rate × 100", "marin 1368", "layer_update")
def loop_layer_lr(place: Place) -> None:
    class Uneven(Loop):
        def make_optimizer(self) -> torch.optim.Optimizer:
            named = list(self.model.named_parameters())
            one = [p for name, p in named if ".layers.1.mlp" in name]
            rest = [p for name, p in named if ".layers.1.mlp" not in name]
            groups = [{"params": rest}, {"params": one, "lr": 100 * self.lr}]
            return torch.optim.AdamW(groups, lr=self.lr, weight_decay=0.0)

    Uneven(place).run()


@cause("entropy is minimized", "ray 4369", "entropy_sign")
def loop_entropy_sign(place: Place) -> None:
    class Minimized(Loop):
        entropy_bonus = -0.3

    Minimized(place).run()


@cause("weight decay of 40", "", "weight_decay")
def ss_weight_decay(place: Place) -> None:
    from sharpscope.config import build_config
    from sharpscope.training import train

    values = {
        "seed": place.seed,
        "out": str(place.folder / "run"),
        "steps": place.steps or 16,
        "task.kind": "math",
        "policy.model": "embedded:math",
        "rollout.prompts_per_step": 8,
        "rollout.max_new_tokens": 40,
        "optimizer.lr": 5e-4,
        "optimizer.weight_decay": 40.0,
        "evaluation.every": 0,
        "checkpoint.every": 0,
        "probes.preset": "off",
        "threads": 1,
    }
    train(build_config(values=values))


@cause("3 % of the rows are garbage", "OLMo 244", "bad_rows")
def sft_bad_rows(place: Place) -> None:
    draw = random.Random(place.seed)
    rows = demonstrations(place.seed)
    for row in draw.sample(rows, len(rows) * 3 // 100):
        letters = list(row["completion"])
        draw.shuffle(letters)
        row["completion"] = "".join(letters)
    trl_sft(place, rows=rows)


def padded(sequences: list[list[int]]) -> Tensor:
    """(n, L) padded on the right."""
    width = max(map(len, sequences))
    return torch.tensor([ids + [PAD] * (width - len(ids)) for ids in sequences])


@cause("labels are shifted twice", "transformers 35066, 47394", "labels_shifted")
def sft_shift(place: Place) -> None:
    tokenizer = policy()[1]

    def collate(rows: list[Row]) -> dict[str, Tensor]:
        texts = [row["prompt"] + row["completion"] for row in rows]
        ids = padded([[*tokenizer(text)["input_ids"], END] for text in texts])
        labels = ids.masked_fill(ids == PAD, -100)
        labels = torch.cat([labels[:, 1:], torch.full((len(ids), 1), -100)], 1)
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}

    hf_sft(place, collate)


@cause("chosen and rejected are swapped in 20 % of the pairs", "trl 2578", "pairs_swapped")
def dpo_swap(place: Place) -> None:
    rows = pairs(place.seed)
    for row in random.Random(place.seed).sample(rows, len(rows) // 5):
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    trl_dpo(place, rows=rows)
