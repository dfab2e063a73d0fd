"""Tiny trainers on a random model and a word tokenizer, and one batch of completions for several trainers.

Each of CASES maps one objective to the options of each trainer:

| | sharpscope | TRL | verl |
|---|---|---|---|
| mean over all tokens | aggregate = token_mean | loss_type = dapo | loss_agg_mode = token-mean |
| mean over completions of token means | sequence_mean | grpo | seq-mean-token-mean |
| advantages divided by the group's std | advantage.scale = group | scale_rewards = group | norm_adv_by_std_in_grpo = True |
| not divided | none | none | False |
| epsilon added to the std | advantage.epsilon | 1e-4, not an option | an argument, published 1e-6 |
| divergence from the reference | kl.coef (k3) | beta | kl_loss_coef, kl_loss_type = low_var_kl |
| updates on one batch | update.inner_epochs | num_iterations | epochs |
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

import sharpscope
from sharpscope.config import build_config
from sharpscope.policy import completions_of
from sharpscope.policy.sharding import full_tensor
from sharpscope.recording import measurements
from sharpscope.tasks import Reward
from sharpscope.training import rollouts as drawing
from sharpscope.training import train
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
    return [
        sum(int(w[1:]) % 2 == 0 for w in c.split()) / max(len(c.split()), 1) - 0.5
        for c in completions
    ]


def shortness(completions: list[str], **_: Any) -> list[float]:
    return [-0.01 * len(c.split()) for c in completions]


def trainer(
    folder: Path,
    *,
    kind: Any = None,
    architecture: str = "qwen2",
    model: dict[str, Any] | None = None,
    beta: float = 0.0,
    peft_config: Any = None,
    prompts: Sequence[str] = PROMPTS * 4,
    rewards: Sequence[Any] | None = None,
    rollout_func: Any = None,
    **arguments: Any,
) -> Any:
    """16 completions a step of 4 prompts, 2 micro-batches an update, unless `arguments` say otherwise."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    own = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 7,
        "loss_type": "grpo",
    }
    # of the adapters, which peft draws from the global generator; training seeds it anew
    torch.manual_seed(0)
    made = (kind or GRPOTrainer)(
        model=small_model(architecture, model),
        reward_funcs=list(rewards or (evens, shortness)),
        rollout_func=rollout_func,
        peft_config=peft_config,
        args=GRPOConfig(**settings(folder, **(own | arguments))),
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    if beta:  # TRL would load the reference by the model's name, and this model has none
        made.beta, made.ref_model = beta, copy.deepcopy(made.model).eval().requires_grad_(False)
    return made


PAIRS = [
    ("w2 w3", "w4 w6 w8", "w5 w7"),
    ("w4", "w6 w6", "w9 w3 w5 w7"),
    ("w5 w6 w7", "w8", "w11"),
    ("w8 w9", "w2 w4 w10 w12 w6", "w13"),
]
"""Prompt, chosen and rejected completion."""


def settings(folder: Path, **arguments: Any) -> dict[str, Any]:
    """Arguments of a trainer: 3 updates of 2 micro-batches with 2 rows each, unless `arguments` say otherwise."""
    own = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
    }
    own |= {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        "lr_scheduler_type": "constant",
    }
    own |= {"report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    return own | {"dataloader_pin_memory": False, "gradient_checkpointing": False} | arguments


def small_model(architecture: str = "qwen2", model: Any = None) -> Any:
    return tiny_model(
        architecture, vocab=VOCABULARY, dtype=torch.float32, scale=0.3, **(model or {})
    )


def sft_trainer(
    folder: Path, *, architecture: str = "qwen2", model: Any = None, **arguments: Any
) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = {
        "prompt": [p for p, _, _ in PAIRS] * 4,
        "completion": [f" {c}" for _, c, _ in PAIRS] * 4,
    }
    return SFTTrainer(
        model=small_model(architecture, model),
        args=SFTConfig(**settings(folder, **arguments)),
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict(rows),
    )


def dpo_trainer(
    folder: Path,
    *,
    architecture: str = "qwen2",
    model: Any = None,
    without_reference: bool = False,
    **arguments: Any,
) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    rows = {"prompt": [p for p, _, _ in PAIRS] * 4}
    rows |= {
        name: [f" {pair[i]}" for pair in PAIRS] * 4
        for i, name in enumerate(("chosen", "rejected"), 1)
    }
    first = model if without_reference else small_model(architecture, model)
    return DPOTrainer(
        model=first,
        ref_model=None if without_reference else copy.deepcopy(first),
        args=DPOConfig(**settings(folder, **arguments)),
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict(rows),
    )


def plain_trainer(folder: Path, *, kind: Any = None, **arguments: Any) -> Any:
    """A transformers Trainer whose labels leave out prompts, on the right-padded rows of `PAIRS`."""
    from transformers import Trainer, TrainingArguments

    words = tokenizer()

    def collate(rows: list[tuple[str, str, str]]) -> dict[str, torch.Tensor]:
        prompts = [words(p)["input_ids"] for p, _, _ in rows]
        ids = [[*p, *words(c)["input_ids"], 1] for p, (_, c, _) in zip(prompts, rows, strict=True)]
        width = max(map(len, ids))
        there = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
        padded = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        counted = there * torch.tensor([[0] * len(p) + [1] * (width - len(p)) for p in prompts])
        return {
            "input_ids": padded,
            "attention_mask": there,
            "labels": padded.masked_fill(counted == 0, -100),
        }

    return (kind or Trainer)(
        model=small_model(),
        processing_class=words,
        train_dataset=PAIRS * 4,
        data_collator=collate,
        args=TrainingArguments(**settings(folder, remove_unused_columns=False, **arguments)),
    )


def search_finely(patch: pytest.MonkeyPatch) -> None:
    """Let a run's line search for the critical sharpness end at 1/16, for comparison with a dense one."""
    patch.setattr(measurements, "TOLERANCE", 1 / 16)
    patch.setattr(measurements, "EVALUATIONS", 40)


class Weights(TrainerCallback):
    """Keeps the weights before each update."""

    def __init__(self) -> None:
        self.before: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self.before.append(whole_weights(getattr(model, "module", model)))


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """A copy of the weights; all processes of a sharded model must call it."""
    return {name: full_tensor(value.detach()).clone() for name, value in model.state_dict().items()}


GROUP, EPOCHS, KL, LR, EPS = 4, 2, 0.05, 0.01, 1e-2
"""EPS is AdamW's: a large one, so that an update does not turn rounding errors of tiny gradients into steps of size LR."""


@dataclass(frozen=True)
class Case:
    """An objective in the terms of each trainer."""

    aggregate: str
    scale: str
    trl_loss: str
    verl_loss: str
    verl_std: bool


CASES = {
    "tokens": Case("token_mean", "group", "dapo", "token-mean", True),
    "sequences": Case("sequence_mean", "none", "grpo", "seq-mean-token-mean", False),
}


@dataclass(frozen=True)
class Given:
    """The batch: 4 prompts, GROUP completions of each, rewards."""

    prompts: list[list[int]]  # 16 rows, completions of a prompt adjacent
    completions: list[list[int]]
    rewards: list[float]


def batch() -> Given:
    """Of random lengths, all ended by <eos> (1)."""
    draw = np.random.default_rng(5)
    prompts = [draw.integers(2, 37, size).tolist() for size in (2, 1, 3, 2)]
    rows = [prompt for prompt in prompts for _ in range(GROUP)]
    completions = [[*draw.integers(2, 37, draw.integers(1, 7)).tolist(), 1] for _ in rows]
    return Given(rows, completions, np.round(draw.normal(size=len(rows)), 2).tolist())


def our_run(folder: Path, case: Case) -> Any:
    """One step of `sharpscope run` on the batch: EPOCHS updates."""
    given = batch()
    small_model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    values = {
        "policy.model": str(folder / "model"),
        "out": str(folder / "ours"),
        "threads": 1,
        "steps": 1,
    }
    values |= {
        "task.kind": "custom",
        "task.factory": "tests.toy_task:vowels",
        "rollout.max_new_tokens": 8,
    }
    values |= {"rollout.prompts_per_step": len(given.prompts) // GROUP, "rollout.group_size": GROUP}
    values |= {
        "update.mini_batches": 1,
        "update.inner_epochs": EPOCHS,
        "optimizer.lr": LR,
        "optimizer.eps": EPS,
    }
    values |= {
        "evaluation.every": 0,
        "checkpoint.every": 0,
        "probes.preset": "off",
        "method.kl.coef": KL,
    }
    values |= {"method.advantage.kind": "group", "method.advantage.scale": case.scale}
    values |= {"method.aggregate": case.aggregate, "recording.heldout_influence_every": 0}
    values |= {
        "recording.token_gradients_every": 1,
        "recording.exact_tokens": 100,
        "recording.group_share": 1.0,
    }
    config = build_config(values=values)

    def drawn(*_: Any) -> Any:
        made = completions_of(given.prompts, given.completions)
        rewards = [Reward(value, {"given": value}, value > 0) for value in given.rewards]
        scored = made.with_reward(torch.tensor(given.rewards))
        return type(scored)(**{**vars(scored), "group": scored.group // GROUP}), rewards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "draw_group", drawn)
        train(config)
    return sharpscope.load_run(config.run_dir)


def tokens_by_row(run: Any) -> Any:
    """The tokens in an order that does not depend on the trainer: by completion, each of which is different, and position."""
    tokens = run.tokens().sort_values(["rollout", "position"])
    names = {rollout: str(mine["token_id"].tolist()) for rollout, mine in tokens.groupby("rollout")}
    return (
        tokens.assign(row=tokens["rollout"].map(names))
        .sort_values(["row", "position"])
        .reset_index(drop=True)
    )


def check_equal(ours: Any, theirs: Any, columns: list[str]) -> None:
    """Compare the tokens' `columns` and the updates of two runs on the batch, to 1e-5."""
    one, two = tokens_by_row(ours), tokens_by_row(theirs)
    assert one["row"].nunique() == len(batch().completions)
    assert (
        one["row"].tolist() == two["row"].tolist()
        and one["token_id"].tolist() == two["token_id"].tolist()
    )
    assert (
        len(one) == sum(map(len, batch().completions))
        and (one["loss_coef"].abs() > 1e-3).mean() > 0.5
    )
    for column in columns:
        size = float(one[column].abs().max())
        assert size > 0
        np.testing.assert_allclose(
            two[column], one[column], rtol=1e-5, atol=1e-6 * size, err_msg=column
        )
    assert len(ours.updates) == len(theirs.updates) == EPOCHS
    for column in ("grad_norm", "update_norm", "loss", "kl_old_k3", "ratio_max", "lr", "tokens"):
        one, two = (run.updates[column].astype(float) for run in (ours, theirs))
        np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6, err_msg=column)
    assert ours.updates["ratio_max"].iloc[1] > 1.01  # the second update is off policy
