"""A training step against TRL's GRPOTrainer: same policy, prompts, group size, limit of tokens, optimizer and threads."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from sharpscope.config import RunConfig, build_config
from sharpscope.errors import UserError
from sharpscope.policy import load_policy, render_prompts
from sharpscope.recording import environment
from sharpscope.tasks import Example, make_task
from sharpscope.training import train
from sharpscope.training.display import QuietDisplay

REQUIRED = 4.0
"""Least ratio of TRL's time of a step to ours."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each measured step (the first, a warm-up, left out), by the wall clock and of the processor.

    Attributes:
        seconds: Wall seconds.
        cpu: Processor seconds, which other programs on the machine hardly change.
        mean_length: Mean completion length [tokens].
        parts: Shares of our wall seconds: generation, training, recording; empty for TRL.
    """

    seconds: list[float]
    cpu: list[float]
    mean_length: float
    parts: dict[str, float]

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def median_cpu(self) -> float:
        """Median processor seconds of a step."""
        return statistics.median(self.cpu)


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
        "ours_cpu_s": ours.median_cpu,
        "trl_cpu_s": theirs.median_cpu,
        "ratio_cpu": theirs.median_cpu / ours.median_cpu,
        "spread": {
            "ours_s": (min(ours.seconds), max(ours.seconds)),
            "trl_s": (min(theirs.seconds), max(theirs.seconds)),
            "ours_cpu_s": (min(ours.cpu), max(ours.cpu)),
            "trl_cpu_s": (min(theirs.cpu), max(theirs.cpu)),
        },
        "parts": ours.parts,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "ours_length": ours.mean_length,
        "trl_length": theirs.mean_length,
        "steps": steps,
    }


def _ours(config: RunConfig) -> StepTimes:
    from sharpscope.traces import load_run

    class Clock(QuietDisplay):
        def __init__(self) -> None:
            self.cpu: list[float] = []

        def step(self, row: Any) -> None:
            self.cpu.append(time.process_time())

    clock = Clock()
    table = load_run(train(config, display=clock).run_dir).steps.iloc[1:]
    laps = table[["generation_s", "training_s", "recording_s"]]
    parts = {str(name).removesuffix("_s"): float(value) for name, value in (laps.sum() / laps.to_numpy().sum()).items()}
    cpu = [b - a for a, b in pairwise(clock.cpu)]
    return StepTimes(laps.sum(axis=1).tolist(), cpu, float(table["completion_length_mean"].mean()), parts)


def _theirs(config: RunConfig, folder: Path, threads: int) -> StepTimes:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.cpu: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start, self.start_cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)
            self.cpu.append(time.process_time() - self.start_cpu)

    clock = Clock()
    trainer = trl_trainer(config, folder, threads, [clock])
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    return StepTimes(clock.seconds[1:], clock.cpu[1:], statistics.mean(lengths[1:]), {})


def report(found: dict[str, Any]) -> str:
    """The result as a page of Markdown."""

    def row(name: str, side: str) -> str:
        (low, high), (low_cpu, high_cpu) = found["spread"][f"{side}_s"], found["spread"][f"{side}_cpu_s"]
        return (
            f"| {name} | {found[f'{side}_s']:.2f} ({low:.2f}–{high:.2f}) | {found[f'{side}_cpu_s']:.2f} "
            f"({low_cpu:.2f}–{high_cpu:.2f}) | {found[f'{side}_length']:.1f} |"
        )

    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    parts = ", ".join(f"{name} {share:.0%}" for name, share in found["parts"].items())
    return "\n".join(
        [
            "# A training step against TRL's GRPOTrainer",
            "",
            f"`python -m experiments.benchmarks step`: {found['completions']} completions a step, one update, the same embedded "
            f"policy, prompts and limits, {found['threads']} threads; {versions}. Medians of {found['steps']} steps (range). Our "
            "steps record every token, without the periodic gradient norms.",
            "",
            "| | wall seconds | processor seconds | mean completion [tokens] |",
            "|---|---|---|---|",
            row("sharpscope", "ours"),
            row("TRL", "trl"),
            "",
            f"Ratio TRL / sharpscope: **{found['ratio']:.1f}** by the wall clock, **{found['ratio_cpu']:.1f}** by processor "
            f"time; required: at least {REQUIRED:g}. Our wall time: {parts}.",
            "",
        ]
    )


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
