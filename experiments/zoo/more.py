"""Ten further causes from public threads, written down before any rule that names them."""

from __future__ import annotations

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
    trl_sft,
)
from experiments.zoo.causes import padded
from experiments.zoo.registry import cause


@cause("prompts are repeated as p1 p2 p1 p2, groups cut as p1 p1", "R1-V 67", "mixed_groups")
def loop_interleaved(place: Place) -> None:
    class Interleaved(Loop):
        def arrange(self, chosen: list[Row]) -> list[Row]:
            return chosen * self.group

    Interleaved(place).run()


@cause("rewards belong to the next row", "VLM-R1 129, trl 3098", "rewards_of_other_rows")
def loop_shifted_rewards(place: Place) -> None:
    class Shifted(Loop):
        def score(self, texts: list[str], rows: list[Row]) -> Tensor:
            return super().score(texts, rows).roll(1)

    Shifted(place).run()


@cause("gradients are never cleared", "tt-blacksmith 711, torchforge 71", "gradient_not_cleared")
def loop_no_zero_grad(place: Place) -> None:
    class Kept(Loop):
        max_norm = 0.0

        def clear(self) -> None:
            return None

    Kept(place).run()


@cause("a cut completion gets an end token that counts in the loss", "Agent-R1 30", "inserted_end")
def loop_forced_end(place: Place) -> None:
    class Forced(Loop):
        length = 14

        def generate(self, ids: Tensor, attention: Tensor) -> Tensor:
            completions = super().generate(ids, attention)
            cut = ~(completions == END).any(1)
            completions[cut, -1] = END
            return completions

    Forced(place).run()


@cause(
    "sampled with top-k 2, loss over all tokens", "trl 6789, prime-rl 2601", "truncated_sampling"
)
def loop_topk(place: Place) -> None:
    class Few(Loop):
        tell_sampler = False

        def sampling(self) -> dict[str, Any]:
            return {"temperature": self.temperature, "top_k": 2}

    Few(place).run()


@cause(
    "ratio to the present policy, in three epochs", "torchforge 571, minimind 775", "ratio_detached"
)
def loop_detached_ratio(place: Place) -> None:
    class Detached(Loop):
        epochs = 3

        def ratio(self, logp: Tensor, old: Tensor) -> Tensor:
            return (logp - logp.detach()).exp()

        def tell(self, recorder: Any, logp: Tensor, batch: Batch, rows: Tensor) -> None:
            batch.old[rows] = logp.detach()
            super().tell(recorder, logp, batch, rows)

    Detached(place).run()


@cause("the reference is the policy itself", "theLMbook 8", "reference_moves")
def loop_same_reference(place: Place) -> None:
    class Same(Loop):
        beta = 0.05

        def prepare(self) -> None:
            super().prepare()
            self.reference = self.model

    Same(place).run()


@cause(
    "log-probability −inf at padding times mask 0",
    "NeMo-RL 4120, prime-rl 2084, ms-swift 9767",
    "masked_inf",
)
def loop_masked_inf(place: Place) -> None:
    class Masked(Loop):
        def old_logp(self, ids: Tensor, attention: Tensor) -> Tensor:
            old = super().old_logp(ids, attention)
            if self.reached(5):
                old = old.masked_fill(attention[:, 1:] == 0, -torch.inf)
            return old

        def reached(self, step: int) -> bool:
            self.made = getattr(self, "made", 0) + 1
            return self.made >= step

    Masked(place).run()


@cause("the end token is masked, since padding has its id", "trl 1623, unsloth 416", "no_end_token")
def sft_no_end(place: Place) -> None:
    tokenizer = policy()[1]

    def collate(rows: list[Row]) -> dict[str, Tensor]:
        texts = [row["prompt"] + row["completion"] for row in rows]
        ids = padded([[*tokenizer(text)["input_ids"], END] for text in texts])
        labels = ids.masked_fill((ids == PAD) | (ids == END), -100)
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}

    hf_sft(place, collate)


@cause("max_length cuts most completions", "trl 2400, trl 4698", "rows_cut")
def sft_cut(place: Place) -> None:
    trl_sft(place, max_length=28)


@cause("the reference is another checkpoint than the start", "trl 3500", "reference_differs")
def loop_other_reference(place: Place) -> None:
    class Other(Loop):
        beta = 0.05

        def prepare(self) -> None:
            super().prepare()
            with torch.no_grad():
                for weight in self.reference.parameters():
                    weight.add_(torch.randn_like(weight), alpha=0.05)

    Other(place).run()


@cause("one seed for all completions of a prompt", "", "equal_completions")
def loop_same_seed(place: Place) -> None:
    class Seeded(Loop):
        def generate(self, ids: Tensor, attention: Tensor) -> Tensor:
            each = ids[:: self.group], attention[:: self.group]
            return super().generate(*each).repeat_interleave(self.group, 0)

        def score(self, texts: list[str], rows: list[Row]) -> Tensor:
            # a reward with a little noise, as judges have
            return super().score(texts, rows) + 0.01 * torch.randn(len(rows))

    Seeded(place).run()


@cause("the learning rate stays 0", "pytorch_warmup 12", "zero_learning_rate")
def loop_zero_lr(place: Place) -> None:
    class Still(Loop):
        lr = 0.0

    Still(place).run()
