"""The recorder of verl's actor: wraps `TrainingWorker.train_mini_batch` and `train_batch`, and changes nothing of the training.

`train_mini_batch` gets one batch of completions and makes a step of one or more updates (`train_batch`). Each row carries its
number through verl's mini- and micro-batches. A hook on the log-probabilities that the loss differentiates gives ∂L/∂log π;
FSDP averages gradients over the data-parallel processes, so this divided by their number is the token's coefficient in the
loss of the whole batch. After the step the processes' rows are gathered, and the first process writes them.

The entropy bonus acts on all logits of a position and is not in `loss_coef`.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.config.run import RecordingSpec
from sharpscope.errors import UserError
from sharpscope.integrations.completions import reward_events, sampler_events
from sharpscope.methods import named_method
from sharpscope.policy import Rollouts, TokenStats, completions_of
from sharpscope.policy.token_stats import STAT_NAMES
from sharpscope.recording import run_folder
from sharpscope.recording.capture import Batch, StepCapture, unused_tokens
from sharpscope.recording.guard import Guard, reason_of, warn_stopped
from sharpscope.recording.norms import gradient_norms, layer_groups, update_norms
from sharpscope.recording.recorded_run import RecordedRun
from sharpscope.recording.rows import steps_row
from sharpscope.recording.step import RolloutBatch, StepResult, StepTokens, UpdateResult
from sharpscope.recording.writer import FinishedStep, StepWriter
from sharpscope.rules.judging import Event
from sharpscope.tasks import Example, Reward

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PreTrainedTokenizerBase
    from verl.workers.config import FSDPEngineConfig
    from verl.workers.engine_workers import TrainingWorker

CPU = torch.device("cpu")
GIVEN = frozenset({"advantages", "old_logp", "loss"})
"""What verl always gives; entropies, rewards, groups and the sampler's log-probabilities depend on its settings."""
ROW = "sharpscope_row"
NEEDED = ("prompts", "responses", "response_mask", "old_log_probs", "advantages")
_REWARDS = ("token_level_scores", "rm_scores", "token_level_rewards")
_LOSS = (
    "loss_agg_mode",
    "clip_ratio_low",
    "clip_ratio_high",
    "use_kl_loss",
    "kl_loss_coef",
    "entropy_coeff",
)
"""Settings of verl's loss that run.json keeps."""


T = TypeVar("T")
Metrics = Mapping[str, float | Sequence[float]]
Output = Mapping[str, Metrics] | None
"""What an update gives."""


def install(folder: str) -> None:
    """Wrap verl's training worker, once per process; every actor's step is recorded to `folder`."""
    from verl.workers.engine_workers import TrainingWorker

    if getattr(TrainingWorker, "_sharpscope", False):
        return
    step, update = TrainingWorker.train_mini_batch, TrainingWorker.train_batch

    @functools.wraps(step)  # keeps what verl's dispatcher reads from the function
    def train_mini_batch(self: TrainingWorker, data: TensorDict) -> object:
        """As verl's; an actor's step is recorded."""
        # another worker: a critic, or supervised fine-tuning
        if any(name not in data for name in NEEDED):
            return step(self, data)
        if not hasattr(self, "_sharpscope_recorder"):
            self._sharpscope_recorder = VerlRecorder(self, Path(folder))
        return self._sharpscope_recorder.step(data, lambda: step(self, data))

    @functools.wraps(update)
    def train_batch(self: TrainingWorker, data: TensorDict) -> Output:
        """As verl's; an update of a recorded step is recorded."""
        present = self._sharpscope_recorder.present if ROW in data else None
        if present is None:
            return update(self, data)
        return self._sharpscope_recorder.update(present, lambda: update(self, data))

    TrainingWorker.train_mini_batch, TrainingWorker.train_batch = train_mini_batch, train_batch
    TrainingWorker._sharpscope = True


def check_engine(config: FSDPEngineConfig) -> None:
    """Check the configuration of a worker's engine.

    Raises:
        UserError: the engine or an option is not supported; the message names it.
    """
    if config.strategy not in ("fsdp", "fsdp2"):
        raise UserError(f"verl: strategy = {config.strategy} is not recorded; use fsdp2")
    parts, dtype = (
        config.ulysses_sequence_parallel_size,
        str((config.mixed_precision or {}).get("param_dtype", "")),
    )
    half = (
        "mixed_precision.param_dtype = fp16 scales the loss by a changing factor; use bf16 or fp32"
    )
    for wrong, message in (
        (
            config.use_fused_kernels,
            "use_fused_kernels = True gives no log-probabilities to hook; set it to False",
        ),
        (parts > 1, f"ulysses_sequence_parallel_size = {parts} divides sequences; set it to 1"),
        (dtype in ("fp16", "float16", "16", "16-mixed"), half),
    ):
        if wrong:
            raise UserError(f"verl: {message}")


@dataclass(kw_only=True)
class _Step:
    """The step in progress, of which this process has n rows of verl: N completions, and those that fill the batch."""

    capture: StepCapture
    serial: int  # of this process's batch
    row_of: Tensor  # (n,) the completion of each row; −1 where it fills the batch
    mask: Tensor  # (N, T) bool
    old: Tensor  # (N, T) ln π at the start of the step [nats]
    given: frozenset[str]  # what verl gives, of `recording.writer.EVERYTHING`
    temperature: float | None


class VerlRecorder(Guard):
    """Records the steps of one worker."""

    def __init__(self, worker: TrainingWorker, folder: Path) -> None:
        self.worker, self.recording = worker, True
        self.run = RecordedRun(folder, {"model": str(worker.model_config.path)})
        self.present: _Step | None = None
        self.count, self.seconds = 0, 0.0
        self.writer: StepWriter | None = None

    def give_up(self, error: Exception) -> None:
        """End the recording because of an error of its own; the training goes on."""
        self.recording, self.present = False, None
        warn_stopped(self.count + 1, error)
        if self.writer is not None:
            reason = reason_of(error)
            event = Event(
                self.count + 1, "recorder", "error", math.nan, math.nan, "stop", reason[:300]
            )
            with suppress(Exception):
                self.writer.events([event])
            with suppress(Exception):
                self._close("interrupted", f"the recorder stopped: {reason}")

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, data: TensorDict, train: Callable[[], T]) -> T:
        """Run one `train_mini_batch` and record it."""
        if not self.recording:
            return train()
        data[ROW] = torch.arange(data.shape[0])
        started = time.perf_counter()
        try:
            self.together(lambda: self._begin(data))
            before, started, self.seconds = time.perf_counter() - started, time.perf_counter(), 0.0
            output = train()
            training = time.perf_counter() - started - self.seconds
            self.together(lambda: self._write(training, before + self.seconds))
        finally:
            self.present = None
            del data[ROW]
        return output

    def _begin(self, data: TensorDict) -> None:
        """Take the step's batch."""
        worker = self.worker
        if self.count == 0:
            check_engine(worker.engine_config)
            total = getattr(worker.optimizer_config, "total_training_steps", None)
            self.steps = int(total or -1)  # of the training, if known
            whole = worker.engine_config.strategy == "fsdp2"
            self.groups = layer_groups(worker.engine.module) if whole else None
        self.present = _opened(data, worker.model_config.tokenizer)

    def update(self, step: _Step, train: Callable[[], Output]) -> Output:
        """Run one `train_batch` with a loss that is watched."""
        worker, engine, inner = self.worker, self.worker.engine, self.worker.loss_fn
        make_update, replaced = engine.optimizer_step, vars(engine).get("optimizer_step")

        def watched(**given: Any) -> object:  # in distillation verl also calls it with the logits
            """The loss of verl; hooks the log-probabilities that it differentiates."""
            if (
                torch.is_grad_enabled()
                and given.get("model_output", {}).get("log_probs") is not None
            ):
                self._timed(
                    lambda: self.safely(
                        lambda: self._watch(step, given["model_output"], given["data"])
                    )
                )
            return inner(**given)

        def measured() -> float:
            """The optimizer step of verl, and the norms of its gradient and update."""
            norm = float(make_update())
            self._timed(lambda: self.together(lambda: self._updated(step, norm)))
            return norm

        worker.loss_fn, engine.optimizer_step = watched, measured
        try:
            output = train()
        finally:
            worker.loss_fn = inner
            if replaced is None:
                del engine.optimizer_step
            else:
                engine.optimizer_step = replaced
        if output is not None:
            self.safely(lambda: self._made(step, dict(output["metrics"])))
        return output

    def _timed(self, work: Callable[[], object]) -> None:
        """Do some work and count its time."""
        started = time.perf_counter()
        work()
        self.seconds += time.perf_counter() - started

    def _updated(self, step: _Step, norm: float) -> None:
        """Take what all processes' tokens did in an update, and its norms; it was made if `norm`, before clipping, is finite."""
        engine, capture = self.worker.engine, step.capture
        capture.collect(CPU)
        summary = None
        if capture.pending:
            capture.keep_first_use()
            summary = capture.pending_tokens().summary()
        size, layers = self._update_norms(norm)
        capture.record_update(
            UpdateResult(
                grad_norm=norm,
                plain_norm=norm,
                update_norm=size,
                clip_factor=1.0,
                skipped=not math.isfinite(norm),
                lr=float(engine.optimizer.param_groups[0]["lr"]),
                summary=summary,
                layers=layers,
            )
        )

    def _update_norms(
        self, norm: float
    ) -> tuple[float, tuple[dict[str, float], dict[str, float]] | None]:
        """Norm of the update that verl has made, and by layer those of its gradient before clipping and of the update."""
        engine, optimizer = self.worker.engine, self.worker.engine.optimizer
        adam = isinstance(optimizer, torch.optim.AdamW) and not any(
            group["amsgrad"] for group in optimizer.param_groups
        )
        if not adam or not math.isfinite(norm):
            return math.nan, None
        if self.groups is None:
            # FSDP 1: each process's parameters are its part, which several hold if fsdp_size divides the processes.
            processes, size = distributed.world_size(), self.worker.engine_config.fsdp_size
            copies = processes // size if 0 < size < processes else 1
            square = distributed.sum_values(update_norms(optimizer, {}).total ** 2)
            return math.sqrt(square / copies), None
        parameters = [p for p in engine.module.parameters() if p.requires_grad]
        gradient = gradient_norms(parameters, self.groups)
        moved = update_norms(optimizer, self.groups)
        clipped = gradient.total / norm if norm else 1.0
        unclipped = {name: value / clipped for name, value in gradient.layers.items()}
        return moved.total, (unclipped, moved.layers)

    def _made(self, step: _Step, metrics: Metrics) -> None:
        """Take the loss that verl reports of the update."""
        updates = step.capture.updates
        updates[-1] = replace(updates[-1], loss=float(np.mean(metrics.get("loss", math.nan))))

    def _watch(self, step: _Step, output: Mapping[str, Tensor], data: TensorDict) -> None:
        """Take what the loss is about to do with a micro-batch's tokens, and hook the log-probabilities."""
        logp, row = output["log_probs"], step.row_of[torch.as_tensor(data[ROW]).cpu().long()]
        inside = row >= 0
        if not bool(inside.any()):
            return
        rows, width = row[inside], step.mask.shape[1]
        prompts, replies = _parts(data)
        lengths = [len(reply) for reply in replies]
        ends = np.cumsum(
            [len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)]
        )

        def responses(values: Tensor) -> Tensor:
            """(n, T) of a nested (n, prompt + response), in which a value stands one place before its token."""
            flat = values.values() if values.is_nested else values.flatten()
            out = torch.zeros(len(row), width, dtype=torch.float64)
            for place in inside.nonzero()[:, 0].tolist():
                length, end = lengths[place], ends[place]
                out[place, :length] = flat[end - length - 1 : end - 1].detach().double().cpu()
            return out[inside]

        used, change = step.mask[rows], responses(logp) - step.old[rows]
        if output.get("entropy") is not None and not step.capture.updates:
            entropy = step.capture.batch(step.serial).tokens.stats.entropy
            entropy[rows] = torch.where(used, responses(output["entropy"]), entropy[rows])
        known = {"ratio": change.exp(), "log_ratio": change}
        # neither what clips a token nor its part of a KL term is known
        known |= {"clipped": torch.zeros(used.shape), "kl_share": torch.full(used.shape, torch.nan)}
        keep = step.capture.use(step.serial, rows, known, used)
        logp.register_hook(lambda gradient: self.safely(lambda: keep(responses(gradient))))

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, training: float, recording: float) -> None:
        """Write the step's rows, those of a prompt one below the other."""
        started, step = time.perf_counter(), self.present
        assert step is not None
        if not step.capture.collected:
            step.capture.collect(CPU)
        self.count += 1
        writer = self.writer = self.writer or self._open(step)
        batch, tokens, first = step.capture.joined()
        order = batch.rollouts.group.argsort(stable=True)
        batch, tokens = batch.rows(order), tokens.rows(order)
        later = step.capture.later_uses(first)
        if later is not None:
            later["rollout"] = order.argsort().numpy()[later["rollout"]]
        writer.events(_events(self.count, batch, tokens))
        updates = step.capture.updates
        result = StepResult(updates, tokens)
        lr = updates[-1].lr if updates else math.nan
        row = steps_row(self.count, batch, result, named_method("grpo"), 0.0, lr)
        if math.isnan(row["entropy_mean"] or 0.0):
            row["entropy_mean"] = None
        finished = FinishedStep(
            number=self.count,
            batch=batch,
            result=result,
            row=row,
            measured={"entropy": tokens.stats.entropy},
            later_uses=later,
            given=step.given,
        )
        writer.write(
            finished,
            lambda: {
                "training_s": training,
                "recording_s": recording + time.perf_counter() - started,
            },
        )
        self.run.flush(self.count)

    def _open(self, step: _Step) -> StepWriter:
        """Take the run's folder."""
        worker, model = self.worker, self.worker.model_config
        # probes of a checkpoint need it
        rollout = {} if step.temperature is None else {"temperature": step.temperature}
        config: dict[str, object] = {"policy": {"model": str(model.path)}, "rollout": rollout}
        if self.steps > 0:
            config["steps"] = self.steps
        said = getattr(worker.loss_fn, "keywords", {}).get("config")
        loss = {name: getattr(said, name, None) for name in _LOSS}
        loss["loss_mode"] = (getattr(said, "policy_loss", None) or {}).get("loss_mode", "vanilla")
        info = {
            "method": f"verl {loss['loss_mode']}",
            "task": "verl",
            "seed": None,
            "config": config,
            "versions": run_folder.versions() | {"verl": version("verl")},
            "processes": distributed.world_size(),
            "notes": ["recorded from verl's TrainingWorker"],
            "trainer": {"name": "verl", **loss},
        }
        folder = self.run.open(json.loads(json.dumps(info, default=str)), model.tokenizer, 0).folder
        if distributed.is_rank_zero():
            hint = f"sharpscope show {folder}; sharpscope tokens {folder} --by loss_coef"
            sys.stderr.write(
                f"sharpscope: recording the actor's updates to {folder} (try: {hint})\n"
            )
        atexit.register(self._close, "finished", "the process ended")
        return StepWriter(self.run.tables, RecordingSpec(), None, 1.0, ids=True)

    def _close(self, status: str, reason: str) -> None:
        """End the run and free its folder."""
        atexit.unregister(self._close)
        self.run.end(status=status, end=reason)


def _opened(data: TensorDict, tokenizer: PreTrainedTokenizerBase) -> _Step:
    """The step of verl's batch on this process, without the rows that verl added to fill it."""
    prompts, replies = _parts(data)
    uids = [str(uid) for uid in data["uid"]] if "uid" in data else None
    filling = [uids is not None and uids[row].startswith("pad") for row in range(len(prompts))]
    kept = torch.tensor([row for row, fills in enumerate(filling) if not fills], dtype=torch.long)
    row_of = torch.full((len(prompts),), -1)
    row_of[kept] = torch.arange(len(kept))
    width = max((len(replies[row]) for row in kept.tolist()), default=0)

    def of_tokens(name: str) -> Tensor:
        """(N, T) of a column of responses."""
        values = _dense(data[name])
        if values.shape[1] < width:
            raise UserError(
                f"verl: {name} is shorter than the responses, so tokens cannot be matched"
            )
        return values[kept, :width]

    mask, old = of_tokens("response_mask").bool(), of_tokens("old_log_probs").double()
    serial = distributed.rank()
    present = _Step(
        capture=StepCapture(),
        serial=serial,
        row_of=row_of,
        mask=mask,
        old=old,
        given=GIVEN,
        temperature=_temperature(data),
    )
    name = next((name for name in _REWARDS if name in data), None)
    for what, is_given in (
        ("groups", uids is not None),
        ("rewards", name is not None),
        ("behavior_logp", "rollout_log_probs" in data),
    ):
        if is_given:
            present.given |= {what}
    if not len(kept):
        return present
    chosen = kept.tolist()
    made = completions_of(
        [prompts[row] for row in chosen],
        [replies[row] for row in chosen],
        [counts[: len(replies[row])] for row, counts in zip(chosen, mask.tolist(), strict=True)],
    )
    values = torch.full((len(kept),), math.nan, dtype=torch.float64)
    if name is not None:
        values = _dense(data[name]).double()[kept].sum(1)
    known: dict[str, Any] = vars(made) | {"reward": values}
    if "rollout_log_probs" in data:
        known["behavior_logp"] = torch.where(
            mask, of_tokens("rollout_log_probs").double(), torch.nan
        )
    texts = [
        tokenizer.batch_decode([rows[row] for row in chosen], clean_up_tokenization_spaces=False)
        for rows in (prompts, replies)
    ]
    rollouts = Rollouts(**known | {"texts": texts[1]})
    unknown = torch.full_like(old, torch.nan)
    stats = TokenStats(
        **dict.fromkeys(STAT_NAMES, unknown) | {"logp": old, "entropy": unknown.clone()}
    )
    if "entropy" in data:
        stats.entropy[:] = of_tokens("entropy").double()
    advantage = of_tokens("advantages").double()
    batch = RolloutBatch(
        [Example(text, "", {}) for text in texts[0]],
        rollouts,
        [
            Reward(value, {} if name is None else {"total": value}, False)
            for value in values.tolist()
        ],
        advantage,
        None,
    )
    labels: list[Hashable] = [(serial, row) if uids is None else uids[row] for row in chosen]
    tokens = unused_tokens(stats, advantage)
    if "min_global_steps" in data:  # None where the sampler says no version
        versions = [math.nan if one is None else float(one) for one in data["min_global_steps"]]
        tokens.policy_version[:] = torch.tensor(versions, dtype=torch.float64)[kept][:, None]
    present.capture.batches.append(Batch(serial, batch, tokens, labels))
    return present


def _events(step: int, batch: RolloutBatch, tokens: StepTokens) -> list[Event]:
    """What the rules find in a step's rewards and the sampler's log-probabilities, at their defaults."""
    mask = batch.rollouts.completion_mask.bool()
    sampler = batch.rollouts.behavior_logp[mask].numpy()
    found = reward_events(step, batch.rollouts.reward.tolist())
    return found + sampler_events(step, tokens.stats.logp[mask].numpy(), sampler, "verl")


def _temperature(data: TensorDict) -> float | None:
    """The softmax temperature, which verl gives as a number or for each row; None if rows differ."""
    temperatures = torch.as_tensor(data["temperature"], dtype=torch.float64).unique().tolist()
    return float(temperatures[0]) if len(temperatures) == 1 else None


def _dense(values: Tensor) -> Tensor:
    """A nested or padded (n, T) tensor as a padded one on the CPU."""
    tensor = (
        values.to_padded_tensor(0.0 if values.is_floating_point() else 0)
        if values.is_nested
        else values
    )
    return tensor.detach().cpu()


def _parts(data: TensorDict) -> tuple[list[list[int]], list[list[int]]]:
    """Token IDs of prompts (padded on the left) and responses (on the right), nested or padded."""
    result = []
    for name, left in (("prompts", True), ("responses", False)):
        values = data[name]
        if values.is_nested:
            result.append([row.tolist() for row in values.unbind()])
            continue
        width = values.shape[1]
        kept = data["attention_mask"][:, :width] if left else data["attention_mask"][:, -width:]
        result.append([row[keep.bool()].tolist() for row, keep in zip(values, kept, strict=True)])
    return result[0], result[1]
