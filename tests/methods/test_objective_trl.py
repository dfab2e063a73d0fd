"""Losses and parameter gradients against TRL's GRPOTrainer on the same model and batch, float32, to 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpscope.methods import Method, named_method
from sharpscope.methods.advantages import estimate_advantages
from sharpscope.methods.clips import DualClip
from sharpscope.methods.loss import entropy_bonus, policy_loss, token_normalizer
from sharpscope.methods.method import (
    Advantage,
    BaselineAdvantage,
    DecoupledAdvantage,
    GroupAdvantage,
    Kl,
    MaskedCorrection,
    TruncatedCorrection,
)
from sharpscope.methods.plan import prepare
from tests.integrations.trainers import PROMPTS, evens, shortness, small_model, tokenizer
from tests.integrations.trainers import settings as trainer_settings
from tests.integrations.trainers import trainer as grpo_trainer
from tests.methods.data import plain_step
from tests.models import tiny_model

trl = pytest.importorskip("trl", reason="TRL is not installed (test extra)")

Inputs = dict[str, Any]
PROMPT, COMPLETION, ROWS = 4, 7, 8
#: TRL's arguments for each of our methods.
SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.2},
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "dr-grpo": {"loss_type": "dr_grpo", "epsilon": 0.2, "scale_rewards": "none"},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},  # TRL's bound is on the ratio itself
    "bnpo": {"loss_type": "bnpo", "epsilon": 0.2},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "gmpo": {"epsilon": 0.4},  # of TRL's GMPOTrainer
    "luspo": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon": 2e-3,
        "epsilon_high": 2.5e-3,
    },
    "vespo": {
        "loss_type": "vespo",
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    },
}
#: Parts of a method and the same in TRL's arguments; "+sampler": TRL's loss gets the sampler's log-probabilities.
PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "delta": (
        "dual-clip",
        {"clip": DualClip(bound=1.3)},
        {"loss_type": "grpo", "epsilon": 0.2, "delta": 1.3},
    ),
    "entropy": (
        "dr-grpo",
        {"entropy": 0.1},
        SETTINGS["dr-grpo"] | {"entropy_coef": 0.1},
    ),
    "token_truncate+sampler": (
        "grpo",
        {"correction": TruncatedCorrection(high=1.2)},
        {"loss_type": "grpo"},
    ),
    "sequence_mask+sampler": (
        "luspo",
        {"correction": MaskedCorrection(level="sequence", low=0.7, high=1.2)},
        SETTINGS["luspo"],
    ),
    "token_truncate+sampler-vespo": (
        "vespo",
        {"correction": TruncatedCorrection(high=1.2)},
        SETTINGS["vespo"],
    ),
}


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
        "noise": torch.randn(ROWS, COMPLETION, generator=g)
        * torch.tensor([0.4, 1e-4, 0.4, 1e-4, 0.4, 0.4, 0.4, 0.4])[:, None],
        "sampler": -0.3 * torch.randn(ROWS, COMPLETION, generator=torch.Generator().manual_seed(4)),
        "drift": 0.3 * torch.randn(ROWS, COMPLETION, generator=g),
    }


def logps(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(N, T) ln π of the completion tokens and the entropy, our own forward pass."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, PROMPT - 1 : -1]
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, batch["completion_ids"][..., None])[..., 0], -(log_p.exp() * log_p).sum(
        -1
    )


@pytest.mark.parametrize("name", sorted(SETTINGS))
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_loss_and_parameter_gradients_equal_trl(
    name: str, beta: float, batch: dict[str, Tensor], tmp_path: Path
):
    method = named_method(name)
    agrees(method.model_copy(update={"kl": Kl(coef=beta)}), SETTINGS[name], batch, tmp_path)


@pytest.mark.parametrize("name", sorted(PARTS))
def test_parts_equal_trls(name: str, batch: dict[str, Tensor], tmp_path: Path):
    base, parts, arguments = PARTS[name]
    method, sampler = (
        named_method(base).model_copy(update=parts | {"kl": Kl(coef=0.04)}),
        "+sampler" in name,
    )
    agrees(method, arguments, batch, tmp_path, sampler=sampler)
    model, gradients = tiny_model("qwen2", dtype=torch.float32), []
    for one in (method, named_method(base).model_copy(update={"kl": Kl(coef=0.04)})):
        loss, _ = our_loss(one, model, batch, sampler)
        gradients.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        )
    # the part does something to this batch
    assert (gradients[0] - gradients[1]).norm() > 1e-3 * gradients[1].norm()


def trls_ratio(method: Method, old: Tensor, sampler: Tensor, mask: Tensor) -> Tensor | None:
    """The factor that TRL computes while it generates (`vllm_importance_sampling_mode`), after its code."""
    spec = method.correction
    if spec is None:
        return None
    assert isinstance(spec, TruncatedCorrection | MaskedCorrection)
    difference = (old - sampler) * mask
    ratio = torch.exp(difference.sum(-1, keepdim=True) if spec.level == "sequence" else difference)
    if isinstance(spec, TruncatedCorrection):
        return ratio.clamp(max=spec.high)
    return ratio.masked_fill((ratio < spec.low) | (ratio > spec.high), 0.0)


def our_loss(
    method: Method, model: torch.nn.Module, batch: dict[str, Tensor], sampler: bool
) -> tuple[Tensor, Inputs]:
    """Our loss with its graph, and what TRL's loss gets for the same batch."""
    (now, entropy), mask = logps(model, batch), batch["completion_mask"]
    behavior, reference = (now + batch["noise"]).detach(), (now + batch["drift"]).detach()
    advantage = estimate_advantages(method.advantage, batch["reward"], batch["group"], mask)
    drawn = behavior + batch["sampler"] if sampler else None
    step = plain_step(mask, batch["group"], advantage, behavior, sampler_logp=drawn)
    normalizer = token_normalizer(method, mask, COMPLETION)
    plan = prepare(method, step)
    loss = policy_loss(method, plan, now, normalizer, reference_logp=reference).loss
    if method.entropy is not None:
        loss = loss - entropy_bonus(method.entropy, plan, entropy, int(mask.sum()))
    inputs = {
        k: batch[k] for k in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    } | {
        "advantages": advantage,
        "old_per_token_logps": behavior,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    if sampler:
        inputs["sampling_per_token_logps"] = behavior + batch["sampler"]
    return loss, inputs


def agrees(
    method: Method,
    settings: dict[str, Any],
    batch: dict[str, Tensor],
    tmp_path: Path,
    *,
    sampler: bool = False,
) -> None:
    """Compare loss and parameter gradients with those of TRL's trainer with `settings`."""
    model = tiny_model("qwen2", dtype=torch.float32)
    ours, inputs = our_loss(method, model, batch, sampler)
    ours.backward()
    mine = {n: p.grad.clone() for n, p in model.named_parameters()}

    # TRL's default multiplies k3 by the ratio, GRPO (arXiv 2402.03300) does not
    options = {"use_bias_correction_kl": False} | settings
    trainer = loss_trainer(model, tmp_path, gmpo=method.name == "gmpo", **options)
    # the reference's log-probabilities are given: no reference model is needed
    trainer.beta = method.kl.coef
    model.train()
    model.zero_grad()
    if sampler:
        factor = trls_ratio(
            method,
            inputs["old_per_token_logps"],
            inputs["sampling_per_token_logps"],
            batch["completion_mask"],
        )
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = factor is not None
        inputs |= {} if factor is None else {"importance_sampling_ratio": factor}
    theirs = trainer._compute_loss(model, inputs)
    theirs.backward()

    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-5)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(
            mine[key], parameter.grad, rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
        )
    assert max(float(g.abs().max()) for g in mine.values()) > 1e-2


def loss_trainer(
    model: torch.nn.Module, folder: Path, *, gmpo: bool = False, **arguments: Any
) -> Any:
    """A GRPOTrainer (or GMPOTrainer) of the model, whose loss is computed on a batch that is given to it."""
    kinds = trl.GRPOTrainer, trl.GRPOConfig
    if gmpo:
        from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

        kinds = GMPOTrainer, GMPOConfig
    made = made_trainer(*kinds, folder, model, [shortness], ROWS, **arguments)
    made.current_gradient_accumulation_steps = 1
    return made


def made_trainer(
    kind: Any, config: Any, folder: Path, model: Any, rewards: list[Any], rows: int, **more: Any
) -> Any:
    """A trainer of `rows` completions in groups of 4."""
    from datasets import Dataset

    own = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
    }
    own |= {"max_completion_length": COMPLETION, "disable_dropout": True, "beta": 0.0}
    return kind(
        model=model,
        reward_funcs=rewards,
        args=config(**trainer_settings(folder, **own | more)),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}),
        processing_class=tokenizer(),
    )


@pytest.mark.parametrize(
    ("arguments", "spec"),
    [
        ({"scale_rewards": "group"}, GroupAdvantage()),
        ({"scale_rewards": "batch"}, GroupAdvantage(scale="batch")),
        ({"scale_rewards": "none"}, GroupAdvantage(scale="none")),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 3.0]},
            DecoupledAdvantage(weights={"evens": 1.0, "shortness": 3.0}),
        ),
        (None, BaselineAdvantage(kind="leave_one_out")),
    ],
    ids=["group", "batch", "none", "normalize_then_sum", "rloo"],
)
def test_advantages_equal_trl(arguments: dict[str, Any] | None, spec: Advantage, tmp_path: Path):
    """TRL's trainers draw and score 16 completions of 4 prompts; their rewards give our advantages."""
    if arguments is None:
        made = made_trainer(
            trl.RLOOTrainer, trl.RLOOConfig, tmp_path, small_model(), [evens, shortness], 16
        )
    else:
        made = grpo_trainer(tmp_path, **arguments)
    seen: list[Tensor] = []
    score = made._calculate_rewards

    def scored(*args: Any) -> Tensor:
        seen.append(score(*args))
        seen[0][8:12] = 0.1  # equal rewards, whose float32 mean is not 0.1
        return seen[0]

    made._calculate_rewards = scored
    made.model.train()
    theirs = made._generate_and_score_completions(
        [{"prompt": p} for p in PROMPTS for _ in range(4)]
    )["advantages"]
    parts = dict(zip(("evens", "shortness"), seen[0].double().T, strict=True))
    group = torch.arange(16) // 4
    reward = parts["evens"] + parts["shortness"]
    ours = estimate_advantages(spec, reward, group, torch.ones(16, 1), parts=parts)
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=1e-5)
    assert theirs.abs().max() > 0.05
