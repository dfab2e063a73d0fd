"""A training step against TRL's GRPOTrainer: same policy, prompts, group size, limit of tokens, optimizer and threads."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sharpscope.config import RunConfig, build_config
from sharpscope.errors import UserError
from sharpscope.policy import load_policy, render_prompts
from sharpscope.recording import environment
from sharpscope.tasks import Example, make_task
from sharpscope.training import train


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each measured step (the first, a warm-up, left out) and the mean completion length [tokens]."""

    seconds: list[float]
    mean_length: float

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)


def compare_with_trl(steps: int = 6, threads: int | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Times of one GRPO step here (everything recorded) and in TRL, on the same prompts; the ratio is TRL / ours.

    Both draw their own completions from the same policy at temperature 1, so that lengths agree in distribution only; both
    mean lengths are in the result.

    Raises:
        UserError: TRL is not installed, or is the version 1.15.0, which does not run this comparison.
    """
    try:
        found = version("trl")
    except ModuleNotFoundError:
        raise UserError("step: TRL is not installed; pip install 'sharpscope[trl]'") from None
    if found == "1.15.0":
        raise UserError("step: TRL 1.15.0 is not supported; pip install 'trl!=1.15.0'")
    values = {"evaluation.every": 0, "checkpoint.every": 0, "recording.token_gradients_every": 0, "steps": steps + 1}
    values["update.mini_batches"] = 1  # as in TRL's setting
    config = build_config(None, [f"{path}={value}" for path, value in values.items()] + list(overrides))
    used = environment.set_threads(threads)
    with tempfile.TemporaryDirectory(prefix="sharpscope-bench-") as folder:
        ours = _ours(config.model_copy(update={"out": folder, "name": "ours", "threads": used}))
        theirs = _theirs(config, Path(folder), used)
    return {
        "threads": used,
        "trl": found,
        "completions": config.rollout.prompts_per_step * config.rollout.group_size,
        "ours_s": ours.median,
        "trl_s": theirs.median,
        "ratio": theirs.median / ours.median,
        "ours_length": ours.mean_length,
        "trl_length": theirs.mean_length,
        "steps": steps,
    }


def _ours(config: RunConfig) -> StepTimes:
    from sharpscope.traces import load_run

    table = load_run(train(config).run_dir).steps.iloc[1:]
    seconds = table[["generation_s", "training_s", "recording_s"]].sum(axis=1)
    return StepTimes(seconds.tolist(), float(table["completion_length_mean"].mean()))


def _theirs(config: RunConfig, folder: Path, threads: int) -> StepTimes:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    clock = Clock()
    trainer = trl_trainer(config, folder, threads, [clock])
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    return StepTimes(clock.seconds[1:], statistics.mean(lengths[1:]))


def trl_trainer(config: RunConfig, folder: Path, threads: int, callbacks: list[Any]) -> Any:
    """TRL's GRPOTrainer with the policy, task, rollouts and optimizer of `config`, one update a step, writing into `folder`."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    policy, task = load_policy(config.policy), make_task(config.task)
    examples = task.splits()["train"]
    render_prompts(examples[:1], policy)  # fails early where a prompt cannot be rendered
    by_prompt: dict[str, Example] = {example.prompt: example for example in examples}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [task.score(by_prompt[p], c).total for p, c in zip(prompts, completions, strict=True)]

    rollout, optimizer = config.rollout, config.optimizer
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=rollout.prompts_per_step * rollout.group_size,
        num_generations=rollout.group_size,
        max_completion_length=rollout.max_new_tokens,
        temperature=rollout.temperature,
        beta=0.0,
        loss_type="grpo",
        learning_rate=optimizer.lr,
        max_grad_norm=optimizer.max_grad_norm or 0.0,
        lr_scheduler_type="constant",
        max_steps=config.steps,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        use_cpu=policy.device.type == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        seed=config.seed,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    make: Any = GRPOTrainer  # its annotations are narrower than what it takes
    return make(
        model=policy.model,
        processing_class=policy.tokenizer,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [example.prompt for example in examples]}),
        callbacks=callbacks,
    )
