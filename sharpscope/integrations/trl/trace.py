"""The folder of a recorded TRL run: run.json, the tokenizer and the tables."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpscope.config import RunConfig
from sharpscope.distributed import Launch
from sharpscope.integrations.trl.batches import generated_lengths
from sharpscope.objective import Method, method_label
from sharpscope.policy import Policy
from sharpscope.recording import (
    Event,
    Observations,
    RolloutBatch,
    StepResult,
    check_policy,
    check_rollouts,
    environment,
    evaluation_row,
    memory_share,
    rollout_columns,
    steps_row,
    token_columns,
    update_columns,
)
from sharpscope.recording.run_folder import run_info
from sharpscope.traces import (
    RunLock,
    TraceWriter,
    create_run_dir,
    create_run_info,
    update_run_info,
)
from sharpscope.traces.files import now


class Trace:
    """Writes the tables of one recorded training, step by step. `step` is the one in progress, from 1."""

    def __init__(
        self,
        config: RunConfig,
        method: Method,
        notes: Sequence[str],
        policy: Policy,
        trainer: Any,
        correct: Callable[[float], bool],
    ) -> None:
        self.config, self.method, self.policy, self.trainer, self.correct = config, method, policy, trainer, correct
        self.run_dir = config.run_dir
        self.step, self.recent = 1, list[float]()
        self._shown: set[str] = set()
        self._events: list[Event] = []
        self._evaluated: list[Tensor] = []
        self._stack = contextlib.ExitStack()
        create_run_dir(self.run_dir)
        policy.tokenizer.save_pretrained(self.run_dir / "tokenizer")
        info = run_info(config, policy, torch.get_num_threads(), Launch())
        info["versions"] |= {name: version(name) for name in ("trl", "accelerate")}
        info |= {
            "method": method_label(method),
            "task": config.task.factory,  # type: ignore[union-attr]
            "notes": [f"recorded from {type(trainer).__name__} of TRL {version('trl')}", *notes],
            "trainer": {"name": type(trainer).__name__, "loss_type": trainer.loss_type},
        }
        create_run_info(self.run_dir, info)

    @property
    def progress(self) -> float:
        """Share of the training done, in [0, 1], for schedules."""
        return min((self.step - 1) / max(self.config.steps - 1, 1), 1.0)

    # -- start and end --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Lock the folder and open the writer."""
        self._started = time.perf_counter()
        self._stack.enter_context(RunLock(self.run_dir))
        self.writer = self._stack.enter_context(TraceWriter(self.run_dir))
        update_run_info(self.run_dir, status="running")

    def begin(self, config: RunConfig) -> None:
        """Save the configuration once the length of the training is known; no config.yaml, which nothing could run."""
        self.config = config
        update_run_info(self.run_dir, config=config.model_dump(mode="json"))

    def close(self, status: str, reason: str) -> None:
        """Write the remaining rows and how the training ended."""
        try:
            self._write_events()
            self._stack.close()  # flushes and unlocks
        finally:
            update_run_info(
                self.run_dir,
                status=status,
                steps_done=self.step - 1,
                finished=now(),
                end=reason,
                seconds=round(time.perf_counter() - self._started, 3),
                peak_memory_bytes=environment.peak_memory_bytes(self.policy.device),
            )

    # -- events ------------------------------------------------------------------------------------------------------

    def write_calibration(self, weights: Method) -> None:
        """Save the constants that were calibrated on the first batch."""
        update_run_info(self.run_dir, calibration=weights.weight.model_dump(mode="json"))

    def warn(self, texts: Sequence[str]) -> None:
        """Report a method's warnings, each once."""
        for text in texts:
            if text not in self._shown:
                self._shown.add(text)
                self._events.append(Event(self.step, "method", "warning", math.nan, math.nan, "warn", text))

    def warn_not_finite(self, value: float) -> None:
        """Report a loss or gradient that is not finite; the trainer decides what to do."""
        text = "the loss or gradient of an update is not finite; lower learning_rate, or look at this step's tokens"
        self._events.append(Event(self.step, "non_finite", "error", value, math.nan, "none", text))

    def warn_mismatch(self, gap: float) -> None:
        """Report `gap`, the mean |ln π of TRL − ln π of the recorder| before the first update [nats], if it is large."""
        limit = self.config.health.logp_mismatch.threshold
        if gap > limit:
            text = (
                "TRL's log-probabilities are not those of the recorder's forward pass (dropout, positions of padded prompts, kernels): "
                "loss_coef and ratio are TRL's, statistics, weights and attribution the recorder's"
            )
            self._events.append(Event(self.step, "trl_statistics", "warning", gap, limit, "warn", text))

    def _write_events(self) -> None:
        for event in self._events:
            self.writer.append("events", {name: [value] for name, value in event.row().items()})
        self._events = []

    # -- a step ------------------------------------------------------------------------------------------------------

    def write(
        self,
        batch: RolloutBatch,
        result: StepResult,
        observed: Observations,
        lr: float,
        weights: Method | None,
        sampled: bool,
        seconds: dict[str, float],
        started: float,
    ) -> None:
        """Write one step to the tables; the last part of its recording began at `started` [s, perf_counter]."""
        step, spec = self.step, self.config.recording
        method = self.method if weights is None else self.method.model_copy(update={"weight": weights.weight})
        row = steps_row(step, batch, result, method, self.progress, lr)
        lengths = generated_lengths(batch.rollouts)
        row |= {"completion_length_mean": float(lengths.double().mean()), "generated_tokens": int(lengths.sum())}
        self._events += observed.events
        self._judge(batch, result, row, sampled)
        if row["grad_norm"]:
            self.recent = [*self.recent[-49:], math.log(row["grad_norm"])]
        if spec.rollouts_every and step % spec.rollouts_every == 0:
            self.writer.append("rollouts", rollout_columns(step, batch))
        if observed.columns or (spec.tokens_every and step % spec.tokens_every == 0):
            temperature = self.config.rollout.temperature
            columns = token_columns(step, batch, result, observed.columns, self.policy.head, temperature)
            if not sampled:
                columns["behavior_logp"] = None
            self.writer.append("tokens", columns)
        if observed.rows:
            self.writer.append("probes", observed.rows)
        self._write_events()
        seconds["recording_s"] += time.perf_counter() - started
        self.writer.append("updates", update_columns(step, result))
        self.writer.append("steps", row | seconds)
        if step % spec.flush_every == 0:
            self.writer.flush()
            update_run_info(self.run_dir, steps_done=step)
        self.step += 1

    def _judge(self, batch: RolloutBatch, result: StepResult, row: dict[str, Any], sampled: bool) -> None:
        """Check the health rules, which only report here: a recorded training is never stopped."""
        spec, rollouts = self.config.health, batch.rollouts
        mask = rollouts.completion_mask.bool().cpu()
        gap = (result.tokens.stats.logp.cpu() - rollouts.behavior_logp.cpu())[mask].abs()
        saturation = max(row["weight_saturation_low"] or 0.0, row["weight_saturation_high"] or 0.0)
        entropy = row["entropy_mean"]
        self._events += check_rollouts(
            spec, self.step, zero_variance_share=batch.zero_variance_share, truncated_share=row["truncated_fraction"]
        )
        self._events += check_policy(
            spec,
            self.step,
            entropy_mean=math.nan if entropy is None else entropy,
            saturation=saturation,
            clipped_weights=math.nan,  # TRL's clip acts on the ratio without the weight
            logp_mismatch=float(gap.nanmean()) if sampled else math.nan,
            memory=memory_share(self.policy.device),
        )

    # -- TRL's own evaluations ---------------------------------------------------------------------------------------

    def add_evaluation(self, total: Tensor) -> None:
        """Keep the rewards (n,) of one batch of an evaluation, completions of a prompt adjacent."""
        self._evaluated.append(total)

    def write_evaluation(self) -> None:
        """Write the evaluation that has just ended as one row over all its prompts."""
        if not self._evaluated:
            return
        total = torch.cat(self._evaluated)
        self._evaluated = []
        k = int(getattr(self.trainer, "num_generations_eval", self.trainer.num_generations))
        total = total[: len(total) // k * k]
        if not len(total):
            return
        correct = np.array([self.correct(value) for value in total.tolist()], dtype=bool).reshape(-1, k)
        row = evaluation_row(
            self.step - 1,
            str(self.config.task.factory),  # type: ignore[union-attr]
            "heldout",
            "all",
            correct,
            total.tolist(),
            self.config.rollout.temperature,
        )
        self.writer.append("eval", {name: [value] for name, value in row.items()})
