"""A training step against TRL's GRPOTrainer: same policy, prompts, group size, limit of tokens, optimizer and threads."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sharpscope.config import RunConfig, build_config
from sharpscope.errors import UserError
from sharpscope.policy import load_policy, render_prompts
from sharpscope.recording import environment
from sharpscope.tasks import Example, make_task
from sharpscope.training import train
from sharpscope.training.display import Display

REQUIRED = 4.0
"""Least ratio of TRL's time of a step to ours."""
RUN_STEPS = 100
"""Steps of the run whose first steps are measured: its schedule of recording, and what the first step's measures are spread over."""
NEVER = ("rollouts", "tokens", "token_gradients", "rotation", "heldout_influence")
"""What is not recorded in the training without recording."""


@dataclass
class Side:
    """Seconds of a side's steps.

    Attributes:
        wall: Wall seconds of each step; the first loads the policy too.
        cpu: Processor seconds, which other programs on the machine hardly change.
        mean_length: Mean completion length [tokens].
        parts: Wall seconds of generation, training and recording of each step but the first; empty for TRL.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    mean_length: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def mean(self, clock: str) -> float:
        """Mean seconds of a step but the first; `clock` is wall or cpu."""
        return statistics.mean(getattr(self, clock)[1:])


class _EnoughError(UserError):
    """The training has made all its steps."""


class Turns:
    """A training in a thread of its own, which makes one step whenever it is asked to: so that trainings can alternate.

    Args:
        work: The training; it calls its argument after every step.
    """

    def __init__(self, work: Callable[[Callable[[], None]], None]) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Callable[[], None]], None]) -> None:
        self._go.acquire()
        try:
            work(self._pause)
        except _EnoughError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def _pause(self) -> None:
        self._done.release()
        self._go.acquire()
        if self._stop:
            raise _EnoughError("all steps are made")

    def step(self, side: Side) -> None:
        """Make a step and add its times to `side`."""
        wall, cpu = time.perf_counter(), time.process_time()
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        side.wall.append(time.perf_counter() - wall)
        side.cpu.append(time.process_time() - cpu)

    def end(self) -> None:
        """End the training."""
        self._stop = True
        self._go.release()
        self._thread.join()


def compare_with_trl(steps: int = 18, threads: int | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Seconds of GRPO steps here, recorded as by default and not recorded at all, and in TRL, on the same prompts.

    The three trainings alternate in one process: two of ours each, then after every third pair one step of TRL. All draw
    their own completions from the same policy at temperature 1, so that lengths agree in distribution only.

    Args:
        steps: Measured steps of ours; TRL makes a third. One more of each warms up.
        threads: Threads of torch; None: all physical cores.
        overrides: Any field of the run.

    Raises:
        UserError: TRL is not installed, or is the version 1.15.0, which does not run this comparison.
    """
    try:
        found = version("trl")
    except ModuleNotFoundError:
        raise UserError("step: TRL is not installed; pip install 'sharpscope[trl]'") from None
    if found == "1.15.0":
        raise UserError("step: TRL 1.15.0 is not supported; pip install 'trl!=1.15.0'")
    values = ["evaluation.every=0", "checkpoint.every=0", f"steps={RUN_STEPS}", "update.mini_batches=1"]  # as in TRL
    bare = ["probes.preset=off", *(f"recording.{name}_every=0" for name in NEVER)]
    used = environment.set_threads(threads)
    sides = {name: Side() for name in ("recorded", "bare", "trl")}
    with tempfile.TemporaryDirectory(prefix="sharpscope-bench-") as folder:
        configs = {
            name: build_config(None, [*values, *extra, *overrides, f"out={folder}/{name}"]).model_copy(
                update={"threads": used}
            )
            for name, extra in (("recorded", ()), ("bare", bare))
        }
        lengths: list[float] = []
        turns = {name: Turns(_ours(config)) for name, config in configs.items()}
        turns["trl"] = Turns(_theirs(configs["bare"], Path(folder), used, lengths))
        for index in range(steps + 1):
            for name in ("recorded", "bare", "trl") if index % 3 == 0 else ("recorded", "bare"):
                turns[name].step(sides[name])
        for training in turns.values():
            training.end()
        for name, config in configs.items():
            _describe(sides[name], config)
        sides["trl"].mean_length = statistics.mean(lengths[1:])
    return {
        "threads": used,
        "completions": configs["bare"].rollout.prompts_per_step * configs["bare"].rollout.group_size,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "steps": steps,
        **sides,
    }


def ratios(found: dict[str, Any], clock: str) -> dict[str, float]:
    """TRL's mean seconds of a step over ours; `clock` is wall or cpu.

    `run` spreads what the first step measures over RUN_STEPS: what it takes beyond the first step of a training that is not
    recorded.
    """
    recorded, bare, trl = (found[name] for name in ("recorded", "bare", "trl"))
    first = getattr(recorded, clock)[0] - getattr(bare, clock)[0]
    return {
        "bare": trl.mean(clock) / bare.mean(clock),
        "recorded": trl.mean(clock) / recorded.mean(clock),
        "run": trl.mean(clock) / (recorded.mean(clock) + first / RUN_STEPS),
    }


def _ours(config: RunConfig) -> Callable[[Callable[[], None]], None]:
    """Train as `config` says, with a pause after every step."""

    def work(pause: Callable[[], None]) -> None:
        class Clock(Display):
            def step(self, row: Any) -> None:
                pause()

        train(config, display=Clock())

    return work


def _describe(side: Side, config: RunConfig) -> None:
    """Add lengths and parts from the run's trace."""
    from sharpscope.traces import load_run

    table = load_run(config.run_dir).steps.iloc[1:]
    side.mean_length = float(table["completion_length_mean"].mean())
    side.parts = {name: float(table[f"{name}_s"].sum()) for name in ("generation", "training", "recording")}


def _theirs(
    config: RunConfig, folder: Path, threads: int, lengths: list[float]
) -> Callable[[Callable[[], None]], None]:
    """Train with TRL, with a pause after every step; the mean completion length of each step is added to `lengths`."""

    def work(pause: Callable[[], None]) -> None:
        from transformers import TrainerCallback

        class Clock(TrainerCallback):
            def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
                if "completions/mean_length" in logs:  # after every step
                    lengths.append(float(logs["completions/mean_length"]))
                    pause()

        trl_trainer(config, folder, threads, [Clock()]).train()

    return work


def report(found: dict[str, Any]) -> str:
    """The result as a page of Markdown."""

    def row(name: str, side: Side) -> str:
        cells = (
            f"{side.mean(clock):.2f} ({min(getattr(side, clock)[1:]):.2f}–{max(getattr(side, clock)[1:]):.2f})"
            for clock in ("wall", "cpu")
        )
        return f"| {name} | {len(side.cpu) - 1} | {' | '.join(cells)} | {side.mean_length:.1f} |"

    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    recorded, wall, cpu = found["recorded"], ratios(found, "wall"), ratios(found, "cpu")
    total = sum(recorded.parts.values())
    parts = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in recorded.parts.items())
    return "\n".join(
        [
            "# A training step against TRL's GRPOTrainer",
            "",
            f"`python -m experiments.benchmarks step`: {found['completions']} completions a step, one update, the same embedded "
            f"policy, prompts and limits, {found['threads']} threads; {versions}. The three trainings alternate in one process. "
            f'"Recorded": the first {found["steps"] + 1} steps of a run of {RUN_STEPS} with the default recording. Means of all '
            "steps but the first (range).",
            "",
            "| | steps | wall seconds | processor seconds | mean completion [tokens] |",
            "|---|---|---|---|---|",
            row("sharpscope, recorded", recorded),
            row("sharpscope, not recorded", found["bare"]),
            row("TRL, not recorded", found["trl"]),
            "",
            "| ratio TRL / sharpscope | processor time | wall clock |",
            "|---|---|---|",
            f"| not recorded | {cpu['bare']:.2f} | {wall['bare']:.2f} |",
            f"| recorded | **{cpu['recorded']:.2f}** | {wall['recorded']:.2f} |",
            f"| recorded, the first step's measures spread over {RUN_STEPS} steps | {cpu['run']:.2f} | {wall['run']:.2f} |",
            "",
            f"Required: at least {REQUIRED:g}. The first step took {recorded.cpu[0]:.1f} processor seconds recorded and "
            f"{found['bare'].cpu[0]:.1f} not recorded. Our wall time when recorded: {parts}.",
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
