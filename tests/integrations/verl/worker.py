"""One of two processes that train a tiny model with verl's TrainingWorker on CPU (FSDP2, gloo): python -m … MODEL OUT [PLAN].

PLAN is a file of torch that replaces defaults: `engine`, `optimizer`, `actor`, `data` (options), `packed`, and the number of `steps` or
`batches`, for each process its batches.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
os.environ["VERL_USE_EXTERNAL_MODULES"] = (
    "tests.integrations.verl.cpu_platform,sharpscope.integrations.verl_plugin"
)

import torch
import torch.distributed as dist
import torch.distributed.fsdp._init_utils

from tests.integrations.trainers import whole_weights

STEPS, ROWS, EPSILON, KL = 2, 8, 0.2, 0.05  # rows of each process
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def rows(rank: int, step: int) -> dict[str, list]:
    """Random prompts, responses, advantages and log-probabilities; the last row of the second process is padding."""
    draw = torch.Generator().manual_seed(100 * step + rank)

    def ids(low: int, high: int) -> torch.Tensor:
        return torch.randint(
            2, 37, (int(torch.randint(low, high, (1,), generator=draw)),), generator=draw
        )

    names = ("prompts", "responses", "response_mask", "advantages", "noise", "uid", "reward")
    found: dict[str, list] = {name: [] for name in names}
    for row in range(ROWS):
        prompt, response = ids(2, 5), ids(2, 7)
        mask = torch.ones(len(response), dtype=torch.long)
        mask[1] = row % 3 != 0  # a token from the environment
        reward = float(torch.randn((), generator=draw))
        pad = rank == 1 and row == ROWS - 1
        found["prompts"].append(prompt[:1] if pad else prompt)
        found["responses"].append(response[:1] if pad else response)
        length = 1 if pad else len(response)
        found["response_mask"].append(torch.zeros(1, dtype=torch.long) if pad else mask)
        found["advantages"].append(torch.full((length,), reward))
        found["noise"].append(0.2 * torch.randn(length, 2, generator=draw))
        found["uid"].append("pad_0" if pad else f"prompt{(row + 3 * rank) % 5}")
        found["reward"].append(0.0 if pad else reward)
    return found


def nested(given: dict[str, list], plain: Any) -> dict[str, list]:
    """What verl's actor gets of a batch: log-probabilities of `plain`, moved by the batch's noise, and rewards on the last token."""
    pairs = list(zip(given["prompts"], given["responses"], strict=True))
    with torch.no_grad():
        logp = [
            plain(input_ids=torch.cat(pair)[None])
            .logits[0, len(pair[0]) - 1 : -1]
            .log_softmax(-1)
            .gather(1, pair[1][:, None])[:, 0]
            for pair in pairs
        ]
    return {
        "prompts": given["prompts"],
        "responses": given["responses"],
        "input_ids": [torch.cat(pair) for pair in pairs],
        "position_ids": [torch.arange(len(a) + len(b)) for a, b in pairs],
        "response_mask": given["response_mask"],
        "loss_mask": given["response_mask"],
        "advantages": given["advantages"],
        "old_log_probs": [
            one + noise[:, 0] for one, noise in zip(logp, given["noise"], strict=True)
        ],
        "ref_log_prob": [
            one + noise[:, 1] for one, noise in zip(logp, given["noise"], strict=True)
        ],
        "rollout_log_probs": [
            one + noise.sum(1) for one, noise in zip(logp, given["noise"], strict=True)
        ],
        "rm_scores": [
            torch.cat([torch.zeros(len(b) - 1), torch.tensor([r])])
            for (_, b), r in zip(pairs, given["reward"], strict=True)
        ],
    }


def worker_of(model: str, plan: dict[str, Any]) -> Any:
    """verl's TrainingWorker with FSDP2 in float32 and the loss of PPO."""
    import verl.workers.config as of
    from verl.trainer.config import CheckpointConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    given = {
        "path": model,
        "use_remove_padding": bool(plan.get("packed")),
        "enable_gradient_checkpointing": False,
    }
    settings = of.HFModelConfig(**given, override_config={"attn_implementation": "sdpa"})
    given = {
        "strategy": "fsdp2",
        "use_torch_compile": False,
        "use_dynamic_bsz": False,
        "mixed_precision": FP32,
    }
    given |= {"micro_batch_size_per_gpu": 2, "infer_micro_batch_size_per_gpu": 2}
    given |= {"max_token_len_per_gpu": 1024, "infer_max_token_len_per_gpu": 1024}
    engine = of.FSDPEngineConfig(**(given | plan.get("engine", {})))
    given = {
        "lr": 0.01,
        "clip_grad": 1.0,
        "total_training_steps": 10,
        "lr_warmup_steps": 0,
        "weight_decay": 0.01,
    }
    optimizer = of.FSDPOptimizerConfig(**(given | plan.get("optimizer", {})))
    given = {
        "model_type": "language_model",
        "model_config": settings,
        "engine_config": engine,
        "profiler_config": None,
    }
    given |= {"optimizer_config": optimizer, "checkpoint_config": CheckpointConfig()}
    worker = TrainingWorker(of.TrainingWorkerConfig(**given))
    worker.reset()
    given = {
        "strategy": engine.strategy,
        "rollout_n": 1,
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size_per_gpu": 2,
    }
    given |= dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), EPSILON)
    given |= {
        "use_kl_loss": True,
        "kl_loss_coef": KL,
        "kl_loss_type": "low_var_kl",
        "optim": optimizer,
    }
    worker.set_loss_fn(
        partial(ppo_loss, config=of.FSDPActorConfig(**(given | plan.get("actor", {}))))
    )
    return worker


def _fail(name: str) -> None:
    """Let a method of the recorder fail in this process, in the second step if it is called there."""
    from sharpscope.integrations.verl import VerlRecorder

    work = getattr(VerlRecorder, name)

    def fail(self: Any, *args: Any, **named: Any) -> Any:
        if self.count == int(name == "_write"):
            raise RuntimeError("a bug")
        return work(self, *args, **named)

    setattr(VerlRecorder, name, fail)


def main(model: str, out: Path, plan: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    import verl  # noqa: F401 - loads the platform and the plugin
    from transformers import AutoModelForCausalLM
    from verl.utils import tensordict_utils as tu

    # FSDP 1 refuses to send a module's weights from the CPU, which gloo can do.
    torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states = lambda *_: None
    if rank == 1 and "SHARPSCOPE_TEST_FAIL" in os.environ:
        _fail(os.environ["SHARPSCOPE_TEST_FAIL"])
    worker = worker_of(model, plan)
    weights: list[dict[str, torch.Tensor]] = []

    def keep() -> None:
        weights.append(whole_weights(worker.engine.module))

    update = worker.engine.optimizer_step

    def watched() -> float:
        keep()
        return update()

    worker.engine.optimizer_step = watched
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    options = {
        "mini_batch_size": 8,
        "global_batch_size": 8,
        "epochs": 2,
        "seed": 7,
        "temperature": 1.0,
    }
    options |= {"dataloader_kwargs": {"shuffle": True}, "calculate_entropy": False}
    batches = []
    drawn = [rows(rank, step) for step in range(1, plan.get("steps", STEPS) + 1)]
    for given in plan["batches"][rank] if "batches" in plan else drawn:
        columns = nested(given, plain)
        tensors = {
            name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
            for name, values in columns.items()
        }
        batches.append(columns | {"uid": given["uid"]})
        worker.train_mini_batch(
            tu.get_tensordict(tensors | {"uid": given["uid"]}, options | plan.get("data", {}))
        )
    keep()
    every: list = [None, None]
    dist.all_gather_object(every, batches)
    if rank == 0:
        torch.save({"weights": weights, "batches": every}, out)
    dist.barrier()


if __name__ == "__main__":
    main(
        sys.argv[1],
        Path(sys.argv[2]),
        torch.load(sys.argv[3], weights_only=True) if len(sys.argv) > 3 else {},
    )
