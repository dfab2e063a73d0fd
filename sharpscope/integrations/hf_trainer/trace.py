"""The folder of a recorded training: run.json, the tokenizer and the tables."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.config import RunConfig
from sharpscope.distributed import Launch
from sharpscope.integrations.hf_trainer.batches import generated_lengths
from sharpscope.objective import Method, method_label
from sharpscope.policy import Policy
from sharpscope.recording import (
    Event,
    Observations,
    RolloutBatch,
    StepHealth,
    StepResult,
    environment,
    evaluation_row,
    kept_rows,
    rollout_columns,
    steps_row,
    token_columns,
    update_columns,
)
from sharpscope.recording.run_folder import NoWriter, note, run_info, trace_writer
from sharpscope.traces import RunLock, TraceWriter, create_run_dir, create_run_info
from sharpscope.traces.files import now

ATTRIBUTION_GAP = 0.05
"""How far the sum of the tokens' shares may be from 1 before an event reports it."""
_WEIGHTS = ("mean", "std", "min", "max", "saturation_low", "saturation_high", "ess")
UNREWARDED = {
    "steps": (
        *("reward_mean", "reward_std", "accuracy", "accuracy_completed", "zero_std_groups", "truncated_fraction"),
        *(
            "generated_tokens",
            "kl",
            "clip_fraction_low",
            "clip_fraction_high",
            *(f"weight_{name}" for name in _WEIGHTS),
        ),
    ),
    "updates": (
        *("kl_old_k3", "ratio_min", "ratio_max"),
        *("clip_fraction_low", "clip_fraction_high"),
    ),
    "rollouts": ("reward", "correct", "advantage", "truncated"),
    "tokens": ("advantage", "ratio", "weight", "clipped"),
}
"""Columns that a training without rewards leaves null."""
#: Sections of the configuration that say how completions are drawn, rewarded and learned from.
_REINFORCEMENT = ("task", "rollout", "method", "update", "evaluation", "checkpoint", "probes", "health")


class Trace:
    """Writes the tables of one recorded training, step by step. `step` is the one in progress, from 1.

    Args:
        config: of the run.
        method: what the trainer minimizes, as far as a Method says it.
        notes: for run.json.
        policy: in training.
        trainer: that is recorded.
        correct: which total rewards count as correct; None: the training has no rewards.
    """

    def __init__(
        self,
        config: RunConfig,
        method: Method,
        notes: Sequence[str],
        policy: Policy,
        trainer: Any,
        correct: Callable[[float], bool] | None,
    ) -> None:
        self.config, self.method, self.policy, self.trainer, self.correct = config, method, policy, trainer, correct
        self.run_dir = config.run_dir
        self.step, self.recent = 1, list[float]()
        self._shown: set[str] = set()
        self._rows: list[Mapping[str, Any]] = []  # of the steps table, for the health rules
        self._events: list[Event] = []
        self._evaluated: list[Tensor] = []
        self._stack = contextlib.ExitStack()
        sharded = trainer.accelerator.distributed_type.value == "FSDP"
        info = run_info(config, policy, torch.get_num_threads(), Launch(distributed.world_size(), sharded=sharded))
        versions = {name: version for name in ("transformers", "trl", "accelerate") if (version := _version(name))}
        info["versions"] |= versions
        package = type(trainer).__module__.partition(".")[0]
        of = f" of {package} {versions[package]}" if package in versions else ""
        loss_type = getattr(trainer, "loss_type", getattr(trainer.args, "loss_type", None))
        info |= {
            "method": method_label(method),
            "task": config.task.factory,  # type: ignore[union-attr]
            "config": self._settings(),
            "notes": [f"recorded from {type(trainer).__name__}{of}", *notes],
            "trainer": {"name": type(trainer).__name__, "loss_type": loss_type},
        }

        def create() -> None:
            """Make the run's folder with its tokenizer and run.json."""
            create_run_dir(self.run_dir)
            policy.tokenizer.save_pretrained(self.run_dir / "tokenizer")
            create_run_info(self.run_dir, info)

        distributed.rank_zero_call(create)

    def _settings(self) -> dict[str, Any]:
        """The configuration for run.json, without the sections that do not apply."""
        settings = self.config.model_dump(mode="json")
        return settings if self.correct is not None else {k: v for k, v in settings.items() if k not in _REINFORCEMENT}

    @property
    def progress(self) -> float:
        """Share of the training done, in [0, 1], for schedules."""
        return min((self.step - 1) / max(self.config.steps - 1, 1), 1.0)

    # -- start and end --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Lock the folder and open the writer, in the first process; the others keep the same counts and write nothing."""
        self._started = time.perf_counter()
        if distributed.is_rank_zero():
            self._stack.enter_context(RunLock(self.run_dir))
        self.writer: TraceWriter | NoWriter = trace_writer(self.run_dir)
        self._stack.enter_context(self.writer)
        note(self.run_dir, status="running")

    def begin(self, config: RunConfig) -> None:
        """Save the configuration once the length of the training is known; no config.yaml, which nothing could run."""
        self.config = config
        note(self.run_dir, config=self._settings())

    def close(self, status: str, reason: str) -> None:
        """Write the remaining rows and how the training ended."""
        try:
            self._write_events()
            self._stack.close()  # flushes and unlocks
        finally:
            note(
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
        note(self.run_dir, calibration=weights.weight.model_dump(mode="json"))

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
        """Report `gap`, the mean |ln π of the trainer − ln π of the recorder| before the first update [nats], if it is large."""
        limit = self.config.health.logp_mismatch.threshold
        if gap > limit:
            text = (
                "the trainer's log-probabilities are not those of the recorder's forward pass (dropout, positions of padded "
                "prompts, kernels, another loss): loss_coef and ratio are the trainer's, statistics, weights and attribution "
                "the recorder's"
            )
            self._events.append(Event(self.step, "trl_statistics", "warning", gap, limit, "warn", text))

    def warn_attribution(self, total: float) -> None:
        """Report `total`, the sum of the tokens' shares of ‖∇L‖² in an update, if it is not 1."""
        if abs(total - 1) > ATTRIBUTION_GAP:
            text = (
                f"the tokens' shares of the squared gradient norm sum to {total:.3g}, not 1: the loss has terms that no token's "
                "log-probability carries (an auxiliary loss, a penalty), or dropout is on"
            )
            self._events.append(Event(self.step, "attribution_sum", "warning", total, ATTRIBUTION_GAP, "warn", text))

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
        health = StepHealth(
            self.config.health,
            step,
            batch,
            method,
            self.progress,
            self.policy.device,
            vocabulary=self.policy.head.weight.shape[0],
            earlier=self._rows,
            trainer="trl",
            lr=lr,
        )
        health.allows_updates(result.tokens.stats, result.tokens.weight)
        health.after_updates(row)
        self._rows = kept_rows([*self._rows, row | {"idle_groups": batch.idle_share}])
        self._events += health.events  # the rules only report here: a recorded training is never stopped
        if row["grad_norm"]:
            self.recent = [*self.recent[-49:], math.log(row["grad_norm"])]
        if spec.rollouts_every and step % spec.rollouts_every == 0:
            self._append("rollouts", rollout_columns(step, batch))
        if observed.columns or (spec.tokens_every and step % spec.tokens_every == 0):
            temperature = self.config.rollout.temperature
            columns = token_columns(step, batch, result, observed.columns, self.policy.head, temperature)
            if not sampled:
                columns["behavior_logp"] = None
            self._append("tokens", columns)
        if observed.rows:
            self.writer.append("probes", observed.rows)
        self._write_events()
        seconds["recording_s"] += time.perf_counter() - started
        self._append("updates", update_columns(step, result.updates))
        self._append("steps", row | seconds)
        self.writer.flush()
        note(self.run_dir, steps_done=step)
        self.step += 1

    def _append(self, table: str, columns: dict[str, Any]) -> None:
        """Write rows; without rewards, what depends on them is null."""
        absent = UNREWARDED[table] if self.correct is None else ()
        self.writer.append(table, columns | dict.fromkeys(absent))

    # -- TRL's own evaluations ---------------------------------------------------------------------------------------

    def add_evaluation(self, total: Tensor) -> None:
        """Keep the rewards (n,) of one batch of an evaluation, completions of a prompt adjacent."""
        self._evaluated.append(total)

    def write_evaluation(self) -> None:
        """Write the evaluation that has just ended as one row over all its prompts."""
        if not self._evaluated or self.correct is None:
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


def _version(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
