"""Causes that were tried as if somebody else had planted them: written down and recorded before any rule for them."""

from __future__ import annotations

import copy
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
    hf_sft,
    policy,
)
from experiments.zoo.causes import padded
from experiments.zoo.controls import lora
from experiments.zoo.registry import cause


@cause("the baseline is a mean over prompts (dim 0)", "grpo-flat 2", "baseline_of_other_rows")
def loop_slot_baseline(place: Place) -> None:
    class Slots(Loop):
        def advantages(self, rewards: Tensor) -> Tensor:
            grouped = rewards.view(-1, self.group)
            return ((grouped - grouped.mean(0)) / (grouped.std(0) + 1e-4)).flatten()

    Slots(place).run()


@cause("groups of two prompts share a baseline", "prime-rl 600", "baseline_of_other_rows")
def loop_wide_groups(place: Place) -> None:
    class Wide(Loop):
        def advantages(self, rewards: Tensor) -> Tensor:
            grouped = rewards.view(-1, 2 * self.group)
            return (grouped - grouped.mean(1, keepdim=True)).flatten()

    Wide(place).run()


@cause("advantages belong to the next row", "VLM-R1 129", "advantages_of_other_rows")
def loop_shifted_advantages(place: Place) -> None:
    class Shifted(Loop):
        def advantages(self, rewards: Tensor) -> Tensor:
            return super().advantages(rewards).roll(1)

    Shifted(place).run()


@cause("dropout is on where π_old is computed", "trl 3234, unsloth 4502", "dropout")
def loop_old_dropout(place: Place) -> None:
    class Dropping(Loop):
        def prepare(self) -> None:
            super().prepare()
            for layer in self.model.model.layers:
                layer.self_attn.attention_dropout = 0.1

        def old_logp(self, ids: Tensor, attention: Tensor) -> Tensor:
            self.model.train()
            old = super().old_logp(ids, attention)
            self.model.eval()
            return old

    Dropping(place).run()


@cause("π_old is shifted by one token", "prime-rl 1525", "old_logp_differs")
def loop_old_shifted(place: Place) -> None:
    class Shifted(Loop):
        def old_logp(self, ids: Tensor, attention: Tensor) -> Tensor:
            return super().old_logp(ids, attention).roll(1, dims=1)

    Shifted(place).run()


@cause("π_old is without the temperature of the loss", "verl 2088", "old_logp_differs")
def loop_old_temperature(place: Place) -> None:
    class Cool(Loop):
        temperature = 0.7

        def old_logp(self, ids: Tensor, attention: Tensor) -> Tensor:
            with torch.no_grad():
                logp = self.logits(self.model, ids, attention).log_softmax(-1)
            return logp.gather(2, ids[:, 1:, None])[..., 0]

    Cool(place).run()


@cause("padding behind the end token is in the loss", "verl 3805, MemGen 33", "padding_in_loss")
def loop_padding(place: Place) -> None:
    class Whole(Loop):
        tell_sampler = False

        def completion_mask(self, completions: Tensor) -> Tensor:
            return torch.ones_like(completions)

    Whole(place).run()


@cause("the end token is left out of the loss", "Automodel 1336", "end_not_in_loss")
def loop_no_end(place: Place) -> None:
    class Open(Loop):
        def loss_mask(self, ids: Tensor, width: int, inside: Tensor) -> Tensor:
            last = inside.cumsum(1) == inside.sum(1, keepdim=True)
            ended = self.ended[:, None]
            return super().loss_mask(ids, width, inside * (1 - (last & ended).long()))

        def generate(self, ids: Tensor, attention: Tensor) -> Tensor:
            completions = super().generate(ids, attention)
            self.ended = (completions == END).any(1)
            return completions

    Open(place).run()


@cause("the loss mask is one token early", "prime-rl 1525", "mask_shifted")
def loop_mask_early(place: Place) -> None:
    class Early(Loop):
        tell_sampler = False

        def loss_mask(self, ids: Tensor, width: int, inside: Tensor) -> Tensor:
            return super().loss_mask(ids, width, inside).roll(-1, dims=1)

    Early(place).run()


@cause("the loss mask is one token late", "prime-rl 1525", "padding_in_loss")
def loop_mask_late(place: Place) -> None:
    class Late(Loop):
        tell_sampler = False

        def loss_mask(self, ids: Tensor, width: int, inside: Tensor) -> Tensor:
            moved = super().loss_mask(ids, width, inside).roll(1, dims=1)
            moved[:, 0] = 0
            return moved

    Late(place).run()


@cause("the trainer attends to padding", "OpenRLHF 217, trl 6800", "loss_pass_differs")
def loop_no_attention_mask(place: Place) -> None:
    class Attending(Loop):
        def logits(self, model: Any, ids: Tensor, attention: Tensor) -> Tensor:
            return model(input_ids=ids).logits[:, :-1]

        def sampler_logp(self, ids: Tensor, attention: Tensor) -> Tensor:
            with torch.no_grad():
                logp = super().logits(self.sampler(), ids, attention).log_softmax(-1)
            return logp.gather(2, ids[:, 1:, None])[..., 0]

    Attending(place).run()


@cause("sampled at T = 1.5, loss at T = 1", "trl 4159", "flatter_sampling")
def loop_hot(place: Place) -> None:
    class Hot(Loop):
        tell_sampler = False

        def sampling(self) -> dict[str, Any]:
            return {"temperature": 1.5, "top_k": 0}

    Hot(place).run()


@cause("sampled with a repetition penalty of 1.3", "prime-rl 886", "flatter_sampling")
def loop_repetition(place: Place) -> None:
    class Penalized(Loop):
        tell_sampler = False

        def sampling(self) -> dict[str, Any]:
            return super().sampling() | {"repetition_penalty": 1.3}

    Penalized(place).run()


@cause(
    "the scheduler steps once a micro-batch: lr is 0 after a quarter",
    "starVLA 210, SpecForge 364",
    "learning_rate_ends",
)
def loop_scheduler(place: Place) -> None:
    class Early(Loop):
        micro = 4

        def make_optimizer(self) -> torch.optim.Optimizer:
            optimizer = super().make_optimizer()
            total = self.place.steps or self.steps
            decay = {"start_factor": 1.0, "end_factor": 0.0, "total_iters": total}
            self.scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, **decay)
            return optimizer

        def between(self) -> None:
            self.scheduler.step()

    Early(place).run()


@cause("losses of micro-batches are summed", "NeMo-RL 84, DFT 27", "accumulation_not_divided")
def loop_summed(place: Place) -> None:
    class Summed(Loop):
        micro = 4

        def policy_loss(self, logp: Tensor, batch: Batch, rows: Tensor) -> Tensor:
            part = batch.inside[rows].sum() / batch.inside.sum()
            return super().policy_loss(logp, batch, rows) / part

    Summed(place).run()


@cause("completions that are cut get the reward", "UniRL 19", "cut_rewarded")
def loop_cut_rewarded(place: Place) -> None:
    class Cut(Loop):
        length, lr, steps = 20, 2e-3, 20

        def reward(self, text: str, row: Row) -> float:
            return float("</answer>" not in text)

    Cut(place).run()


@cause("adapters are off where completions are drawn", "verl 7495", "stale_sampler")
def loop_lora_off(place: Place) -> None:
    class Off(Loop):
        lr, steps = 5e-3, 20

        def prepare(self) -> None:
            from peft import get_peft_model

            self.model = get_peft_model(self.model, lora())
            super().prepare()

        def generate(self, ids: Tensor, attention: Tensor) -> Tensor:
            with self.model.disable_adapter():
                return super().generate(ids, attention)

        def sampler_logp(self, ids: Tensor, attention: Tensor) -> Tensor:
            with self.model.disable_adapter():
                return super().sampler_logp(ids, attention)

    Off(place).run()


@cause("prompts are padded on the right", "trl 5785", "loss_pass_differs")
def loop_right_padding(place: Place) -> None:
    class Right(Loop):
        def encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
            options = {"return_tensors": "pt", "padding": True, "padding_side": "right"}
            encoded = self.tokenizer(texts, return_token_type_ids=False, **options)
            return encoded["input_ids"], encoded["attention_mask"]

    Right(place).run()


@cause("the KL is added to the reward, not subtracted", "ToolRL 52", "kl_rewarded")
def loop_kl_rewarded(place: Place) -> None:
    class Rewarded(Loop):
        beta = 0.2

        def kl_weight(self) -> float:
            return 0.0

        def make_batch(self, step: int) -> Batch:
            batch = super().make_batch(step)
            assert batch.ref is not None
            gap = ((batch.old - batch.ref) * batch.inside).sum(1)
            batch.rewards = batch.rewards + self.beta * gap
            batch.advantages = self.advantages(batch.rewards)
            return batch

    Rewarded(place).run()


@cause("the policy's loss is a mean over the length twice", "trl 3187", "length_twice")
def loop_length_twice(place: Place) -> None:
    class Twice(Loop):
        def policy_loss(self, logp: Tensor, batch: Batch, rows: Tensor) -> Tensor:
            ratio = self.ratio(logp, batch.old[rows])
            inside = batch.inside[rows]
            each = -(ratio * batch.advantages[rows, None] * inside)
            return (each.sum(1) / inside.sum(1).pow(2)).mean()

    Twice(place).run()


@cause("the sampler lags two steps behind", "verl 7495", "lagging_sampler")
def loop_lagging(place: Place) -> None:
    class Lagging(Loop):
        lr, steps = 1e-3, 20

        def prepare(self) -> None:
            super().prepare()
            self.kept = [copy.deepcopy(self.model).eval() for _ in range(3)]

        def sampler(self) -> Any:
            return self.kept[0]

        def clear(self) -> None:
            super().clear()
            self.kept = [*self.kept[1:], copy.deepcopy(self.model).eval()]

    Lagging(place).run()


@cause("the sampler is bfloat16 with weights of another run", "verl 3960", "sampler_differs")
def loop_other_weights(place: Place) -> None:
    class Other(Loop):
        def prepare(self) -> None:
            super().prepare()
            self.engine = copy.deepcopy(self.model).eval()
            with torch.no_grad():
                for weight in self.engine.parameters():
                    weight.add_(torch.randn_like(weight), alpha=0.03)

        def sampler(self) -> Any:
            return self.engine

    Other(place).run()


@cause("labels of padding count in the loss", "transformers 25304", "padding_in_loss")
def sft_padding(place: Place) -> None:
    tokenizer = policy()[1]

    def collate(rows: list[Row]) -> dict[str, Tensor]:
        texts = [row["prompt"] + row["completion"] for row in rows]
        ids = padded([[*tokenizer(text)["input_ids"], END] for text in texts])
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": ids.clone()}

    hf_sft(place, collate)
