"""Losses and parameter gradients against TRL's GRPOTrainer on the same model and batch, float32, to 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpscope.objective import StepTensors, group_advantages, named_method, policy_loss, prepare, token_normalizer
from tests.models import tiny_model

trl = pytest.importorskip("trl", reason="TRL is not installed (test extra)")

PROMPT, COMPLETION, ROWS = 4, 7, 8
#: TRL's arguments for each of our methods.
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "dr-grpo": {"loss_type": "dr_grpo", "epsilon": 0.2, "scale_rewards": "none"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},  # TRL's bound is on the ratio itself
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 37)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    lengths = torch.tensor([7, 3, 1, 5, 7, 2, 6, 4])
    lefts = torch.randint(0, PROMPT, (ROWS,), generator=g)
    return {
        "prompt_ids": torch.randint(2, 37, (ROWS, PROMPT), generator=g),
        "prompt_mask": (torch.arange(PROMPT) >= lefts[:, None]).long(),
        "completion_ids": torch.randint(2, 37, (ROWS, COMPLETION), generator=g),
        "completion_mask": (torch.arange(COMPLETION) < lengths[:, None]).long(),
        "reward": torch.tensor([3.0, -1.0, -0.5, 3.0, 0.1, 0.1, 0.1, 0.1]),
        "group": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        "noise": torch.randn(ROWS, COMPLETION, generator=g) * torch.tensor([0.4, 1e-4, 0.4, 1e-4, 0.4, 0.4, 0.4,
        0.4])[:, None], "drift": 0.3 * torch.randn(ROWS, COMPLETION, generator=g),
    }  # fmt: skip


def logps(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(N, T) ln π of the completion tokens, our own forward pass."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]


@pytest.mark.parametrize("name", sorted(SETTINGS))
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_loss_and_parameter_gradients_equal_trl(name: str, beta: float, batch: dict[str, Tensor], tmp_path: Path):
    model = tiny_model("qwen2", dtype=torch.float32)
    method = named_method(name)
    method = method.model_copy(update={"kl": method.kl.model_copy(update={"coef": beta})})
    now = logps(model, batch)
    behavior, reference = (now + batch["noise"]).detach(), (now + batch["drift"]).detach()
    advantage = group_advantages(batch["reward"], batch["group"], method.advantage)

    mask = batch["completion_mask"]
    unused = torch.full(mask.shape, torch.nan)
    step = StepTensors(
        mask=mask, group=batch["group"], advantage=advantage, behavior_logp=behavior, logp=behavior, logit=unused,
        entropy=unused, collision=unused, polarity=unused,
    )  # fmt: skip
    normalizer = token_normalizer(method, mask, COMPLETION)
    ours = policy_loss(method, prepare(method, step), now, normalizer, reference_logp=reference).loss
    ours.backward()
    mine = {n: p.grad.clone() for n, p in model.named_parameters()}

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, per_device_train_batch_size=ROWS,
        num_generations=4, max_completion_length=COMPLETION, beta=0.0, disable_dropout=True,
        use_bias_correction_kl=False,  # TRL's default multiplies k3 by the ratio, GRPO (arXiv 2402.03300) does not
        **SETTINGS[name],
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["w2 w3"] * ROWS}), processing_class=tokenizer(),
    )  # fmt: skip
    trainer.beta = beta  # the reference's log-probabilities are given: no reference model is needed
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    model.zero_grad()
    inputs = {k: batch[k] for k in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")} | {
        "advantages": advantage, "old_per_token_logps": behavior, "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    theirs = trainer._compute_loss(model, inputs)
    theirs.backward()

    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-5)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            mine[key], parameter.grad, rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
        )
    assert max(float(g.abs().max()) for g in mine.values()) > 1e-2


def test_advantages_equal_trl(batch: dict[str, Tensor]):
    """TRL: (r − group mean)/(group std with n − 1 + 1e-4), here on groups of 4."""
    grouped = batch["reward"].view(2, 4)
    theirs = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(
        group_advantages(batch["reward"], batch["group"]), theirs.flatten(), rtol=1e-6, atol=1e-6
    )
