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
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.integrations.completions import Completion, step_events, step_tables
from sharpscope.recording import run_folder
from sharpscope.recording.guard import Guard, reason_of, warn_stopped
from sharpscope.recording.norms import gradient_norms, layer_groups, update_norms
from sharpscope.recording.rows import update_columns
from sharpscope.recording.step import UpdateResult, UpdateTokens
from sharpscope.rules.judging import Event
from sharpscope.traces import RunLock, TraceWriter, create_run_dir, create_run_info, update_run_info
from sharpscope.traces.files import now

ROW = "sharpscope_row"
NEEDED = ("prompts", "responses", "response_mask", "old_log_probs", "advantages")
_REWARDS = ("token_level_scores", "rm_scores", "token_level_rewards")


def install(folder: str) -> None:
    """Wrap verl's training worker, once per process; every actor's step is recorded to `folder`."""
    from verl.workers.engine_workers import TrainingWorker

    if getattr(TrainingWorker, "_sharpscope", False):
        return
    step, update = TrainingWorker.train_mini_batch, TrainingWorker.train_batch

    @functools.wraps(step)  # keeps what verl's dispatcher reads from the function
    def train_mini_batch(self: Any, data: Any) -> Any:
        """As verl's; an actor's step is recorded."""
        # another worker: a critic, or supervised fine-tuning
        if any(name not in data for name in NEEDED):
            return step(self, data)
        if not hasattr(self, "_sharpscope_recorder"):
            self._sharpscope_recorder = VerlRecorder(self, Path(folder))
        return self._sharpscope_recorder.step(data, lambda: step(self, data))

    @functools.wraps(update)
    def train_batch(self: Any, data: Any) -> Any:
        """As verl's; an update of a recorded step is recorded."""
        rows = self._sharpscope_recorder.rows if ROW in data else None
        if rows is None:
            return update(self, data)
        return self._sharpscope_recorder.update(rows, lambda: update(self, data))

    TrainingWorker.train_mini_batch, TrainingWorker.train_batch = train_mini_batch, train_batch
    TrainingWorker._sharpscope = True


def check_engine(config: Any) -> None:
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


@dataclass
class _Use:
    """What an update does with the tokens of some rows (n,) of the step; coefficients are known after the backward pass."""

    rows: Tensor
    update: int
    used: Tensor  # (n, T) bool
    change: Tensor  # (n, T) ln π − ln π_old [nats]
    coef: Tensor  # (n, T)


@dataclass
class _Rows:
    """This process's rows of the step in progress: response tokens (N, T), and what the updates did with them."""

    data: Any
    mask: Tensor  # (N, T) bool
    old: Tensor  # (N, T) ln π at the start of the step [nats]
    entropy: Tensor  # NaN where it is not known
    updates: list[UpdateResult] = field(default_factory=list)
    uses: list[_Use] = field(default_factory=list)

    def changes(self) -> list[np.ndarray]:
        """Of each update, ln r of the tokens that it used."""
        return [
            torch.cat([use.change[use.used] for use in self.uses if use.update == index]).numpy()
            for index in range(len(self.updates))
        ]


class VerlRecorder(Guard):
    """Records the steps of one worker."""

    def __init__(self, worker: Any, folder: Path) -> None:
        self.worker, self.folder, self.recording = worker, folder, True
        self.rows: _Rows | None = None
        self.count, self.seconds = 0, 0.0
        self.writer: TraceWriter | None = None

    def give_up(self, error: Exception) -> None:
        """End the recording because of an error of its own; the training goes on."""
        self.recording, self.rows = False, None
        warn_stopped(self.count + 1, error)
        if self.writer is not None:
            event = Event(
                self.count + 1,
                "recorder",
                "error",
                math.nan,
                math.nan,
                "stop",
                reason_of(error)[:300],
            )
            with suppress(Exception):
                self.writer.append("events", event.row())
            with suppress(Exception):
                self._close("interrupted", f"the recorder stopped: {reason_of(error)}")

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, data: Any, train: Callable[[], Any]) -> Any:
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
            self.rows = None
            del data[ROW]
        return output

    def _begin(self, data: Any) -> None:
        """Take the step's batch."""
        worker = self.worker
        if self.count == 0:
            check_engine(worker.engine_config)
            total = getattr(worker.optimizer_config, "total_training_steps", None)
            self.steps = int(total or -1)  # of the training, if known
            whole = worker.engine_config.strategy == "fsdp2"
            self.groups = layer_groups(worker.engine.module) if whole else None
        mask, old = _dense(data["response_mask"]).bool(), _dense(data["old_log_probs"]).double()
        if old.shape[1] < mask.shape[1]:
            raise UserError(
                "verl: old_log_probs is shorter than response_mask, so tokens cannot be matched"
            )
        entropy = torch.full(mask.shape, torch.nan, dtype=torch.float64)
        if "entropy" in data:
            entropy = _dense(data["entropy"]).double()[:, : mask.shape[1]]
        self.rows = _Rows(data, mask, old[:, : mask.shape[1]], entropy)

    def update(self, rows: _Rows, train: Callable[[], Any]) -> Any:
        """Run one `train_batch` with a loss that is watched."""
        worker, engine, inner = self.worker, self.worker.engine, self.worker.loss_fn
        make_update, replaced = engine.optimizer_step, vars(engine).get("optimizer_step")

        def watched(**given: Any) -> Any:  # in distillation verl also calls it with the logits
            """The loss of verl; hooks the log-probabilities that it differentiates."""
            if (
                torch.is_grad_enabled()
                and given.get("model_output", {}).get("log_probs") is not None
            ):
                self._timed(
                    lambda: self.safely(
                        lambda: self._watch(rows, given["model_output"], given["data"])
                    )
                )
            return inner(**given)

        def measured() -> float:
            """The optimizer step of verl, and the norms of its gradient and update."""
            norm = float(make_update())
            self._timed(lambda: self.together(lambda: self._updated(rows, norm)))
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
            self.safely(lambda: self._made(rows, dict(output["metrics"])))
        return output

    def _timed(self, work: Callable[[], Any]) -> None:
        """Do some work and count its time."""
        started = time.perf_counter()
        work()
        self.seconds += time.perf_counter() - started

    def _updated(self, rows: _Rows, norm: float) -> None:
        """Take the norms of the update that verl has made, if it has (`norm` is finite), and of its gradient before clipping."""
        engine, config, size, layers = self.worker.engine, self.worker.engine_config, math.nan, None
        optimizer, parameters = (
            engine.optimizer,
            [p for p in engine.module.parameters() if p.requires_grad],
        )
        adam = isinstance(optimizer, torch.optim.AdamW) and not any(
            g["amsgrad"] for g in optimizer.param_groups
        )
        if adam and math.isfinite(norm) and self.groups is not None:
            gradient, moved = (
                gradient_norms(parameters, self.groups),
                update_norms(optimizer, self.groups),
            )
            clipped = gradient.total / norm if norm else 1.0
            size, layers = (
                moved.total,
                ({name: v / clipped for name, v in gradient.layers.items()}, moved.layers),
            )
        elif adam and math.isfinite(norm):
            # FSDP 1: each process's parameters are its part, which several hold if fsdp_size divides the processes.
            processes = distributed.world_size()
            copies = processes // config.fsdp_size if 0 < config.fsdp_size < processes else 1
            size = math.sqrt(
                distributed.sum_values(update_norms(optimizer, {}).total ** 2) / copies
            )
        lr, skipped = float(optimizer.param_groups[0]["lr"]), not math.isfinite(norm)
        rows.updates.append(
            UpdateResult(
                grad_norm=norm,
                plain_norm=norm,
                update_norm=size,
                clip_factor=1.0,
                skipped=skipped,
                lr=lr,
                layers=layers,
            )
        )

    def _made(self, rows: _Rows, metrics: dict[str, Any]) -> None:
        """Take the loss that verl reports of the update."""
        rows.updates[-1] = replace(
            rows.updates[-1], loss=float(np.mean(metrics.get("loss", math.nan)))
        )

    def _watch(self, rows: _Rows, output: Mapping[str, Any], data: Any) -> None:
        """Take what the loss is about to do with a micro-batch's tokens, and hook the log-probabilities."""
        logp, index = output["log_probs"], len(rows.updates)
        mine = torch.as_tensor(data[ROW]).cpu().long()
        prompts, replies = _parts(data)
        lengths = [len(reply) for reply in replies]
        ends = np.cumsum(
            [len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)]
        )
        width = rows.mask.shape[1]

        def responses(values: Tensor) -> Tensor:
            """(n, T) of a nested (n, prompt + response), in which a value stands one place before its token."""
            flat = values.values() if values.is_nested else values.flatten()
            out = torch.zeros(len(mine), width, dtype=torch.float64)
            for row, (length, end) in enumerate(zip(lengths, ends, strict=True)):
                out[row, :length] = flat[end - length - 1 : end - 1].detach().double().cpu()
            return out

        used, change = rows.mask[mine], responses(logp) - rows.old[mine]
        use = _Use(mine, index, used, change, torch.full_like(change, torch.nan))
        rows.uses.append(use)
        if output.get("entropy") is not None and index == 0:
            rows.entropy[mine] = torch.where(used, responses(output["entropy"]), rows.entropy[mine])
        processes = self.worker.engine.get_data_parallel_size()

        def keep(gradient: Tensor) -> None:
            """Take the coefficients from the gradient that reaches the log-probabilities."""
            use.coef = responses(gradient) / processes

        logp.register_hook(lambda gradient: self.safely(lambda: keep(gradient)))

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write(self, training: float, recording: float) -> None:
        """Gather the step's rows from all processes; the first writes them."""
        started, rows = time.perf_counter(), self.rows
        assert rows is not None
        parts = distributed.gather((_completions(rows), rows.changes()))
        self.count += 1
        if not distributed.is_rank_zero():
            return
        writer, step = self.writer or self._open(rows.data), self.count
        given = [one for completions, _ in parts for one in completions]
        tables = step_tables(step, given, self.worker.model_config.tokenizer)
        for event in step_events(step, tables, "verl"):
            writer.append("events", event.row())
        ratios = [
            np.concatenate([one[index] for _, one in parts]) for index in range(len(rows.updates))
        ]
        results = [
            replace(one, summary=_summary(ratio))
            for one, ratio in zip(rows.updates, ratios, strict=True)
        ]
        unclipped = dict.fromkeys(("clip_fraction_low", "clip_fraction_high", "clip_factor"))
        for name in ("loss", "grad_norm", "update_norm"):
            mean = float(np.mean([getattr(one, name) for one in results]))
            tables["steps"][name] = None if np.isnan(mean) else mean
        done = recording + time.perf_counter() - started
        tables["steps"] |= {"updates": len(results), "lr": results[-1].lr, "generation_s": None}
        tables["steps"] |= {"training_s": training, "recording_s": done}
        tables["updates"] = update_columns(step, results) | unclipped
        for table, values in tables.items():
            if values:
                writer.append(table, values)
        writer.flush()
        update_run_info(self.folder, steps_done=step)

    def _open(self, data: Any) -> TraceWriter:
        worker = self.worker
        next_ = f"sharpscope show {self.folder}; sharpscope tokens {self.folder} --by loss_coef"
        sys.stderr.write(
            f"sharpscope: recording the actor's updates to {self.folder} (try: {next_})\n"
        )
        temperature = _temperature(data)
        # probes of a checkpoint need it
        rollout = {} if temperature is None else {"temperature": temperature}
        made = create_run_dir(self.folder)
        worker.model_config.tokenizer.save_pretrained(made / "tokenizer")
        config = getattr(worker.loss_fn, "keywords", {}).get("config")
        names = (
            "loss_agg_mode",
            "clip_ratio_low",
            "clip_ratio_high",
            "use_kl_loss",
            "kl_loss_coef",
            "entropy_coeff",
        )
        loss = {name: getattr(config, name, None) for name in names}
        loss["loss_mode"] = (getattr(config, "policy_loss", None) or {}).get("loss_mode", "vanilla")
        info = {
            "method": f"verl {loss['loss_mode']}",
            "task": "verl",
            "seed": None,
            "config": {"policy": {"model": str(worker.model_config.path)}, "rollout": rollout}
            | ({"steps": self.steps} if self.steps > 0 else {}),
            "versions": run_folder.versions() | {"verl": version("verl")},
            "processes": torch.distributed.get_world_size(),
            "notes": ["recorded from verl's TrainingWorker"],
            "trainer": {"name": "verl", **loss},
        }
        create_run_info(made, json.loads(json.dumps(info, default=str)))
        self.stack = ExitStack()
        self.stack.enter_context(RunLock(made))
        self.writer = self.stack.enter_context(TraceWriter(made))
        atexit.register(self._close, "finished", "the process ended")
        return self.writer

    def _close(self, status: str, reason: str) -> None:
        """End the run and free its folder."""
        atexit.unregister(self._close)
        with self.stack:  # flushes and unlocks
            update_run_info(self.folder, status=status, finished=now(), end=reason)


def _summary(log_ratio: np.ndarray) -> dict[str, float]:
    """Statistics of the ratios of an update's tokens over all processes."""
    change = torch.from_numpy(log_ratio)
    tokens = UpdateTokens.zeros(change.shape, torch.float64)
    tokens.used[:], tokens.ratio[:], tokens.log_ratio[:] = True, change.exp(), change
    return tokens.summary()


def _completions(rows: _Rows) -> list[Completion]:
    """This process's rows, without those that verl added to fill the batch."""
    data = rows.data
    uids = [str(uid) for uid in data["uid"]] if "uid" in data else None
    prompts, replies = _parts(data)
    update = torch.full(rows.mask.shape, -1)
    coef, ratio = (torch.full_like(rows.old, torch.nan) for _ in range(2))
    again = [
        {name: list[Any]() for name in ("position", "update", "ratio", "loss_coef")}
        for _ in prompts
    ]
    for use in rows.uses:
        first = use.used & (update[use.rows] < 0)
        for target, value in ((coef, use.coef), (ratio, use.change.exp())):
            target[use.rows] = torch.where(first, value, target[use.rows])
        update[use.rows] = torch.where(first, use.update, update[use.rows])
        for place, row in enumerate(use.rows.tolist()):
            later = (use.used & ~first)[place]
            again[row]["position"] += later.nonzero()[:, 0].tolist()
            again[row]["update"] += [use.update] * int(later.sum())
            again[row]["ratio"] += use.change[place, later].exp().tolist()
            again[row]["loss_coef"] += use.coef[place, later].tolist()
    columns = {
        "logp": rows.old,
        "entropy": rows.entropy,
        "advantage": _dense(data["advantages"]).double(),
    }
    columns |= {"ratio": ratio, "loss_coef": coef}
    if "rollout_log_probs" in data:
        columns["behavior_logp"] = _dense(data["rollout_log_probs"]).double()
    name = next((name for name in _REWARDS if name in data), None)
    rewards = None if name is None else _dense(data[name]).double().sum(1).tolist()
    completions = []
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        if uids is not None and uids[row].startswith("pad"):
            continue
        at = rows.mask[row].nonzero()[:, 0]
        masked = {
            name: np.ma.masked_invalid(values[row, at].numpy()) for name, values in columns.items()
        }
        tokens = {name: values.tolist() for name, values in masked.items()}  # NaN: None
        tokens |= {
            "position": at.tolist(),
            "token_id": [reply[position] for position in at.tolist()],
        }
        tokens["update"] = np.ma.masked_less(update[row, at].numpy(), 0).tolist()
        made = Completion(prompt + reply, len(prompt), tokens, again[row], length=len(reply))
        if rewards is not None:
            made = replace(made, reward=rewards[row], parts={"total": rewards[row]})
        completions.append(made if uids is None else replace(made, group=uids[row]))
    return completions


def _temperature(data: Any) -> float | None:
    """The softmax temperature, which verl gives as a number or for each row; None if rows differ."""
    temperatures = torch.as_tensor(data["temperature"], dtype=torch.float64).unique().tolist()
    return float(temperatures[0]) if len(temperatures) == 1 else None


def _dense(values: Any) -> Tensor:
    """A nested or padded (n, T) tensor as a padded one on the CPU."""
    tensor: Tensor = (
        values.to_padded_tensor(0.0 if values.is_floating_point() else 0)
        if values.is_nested
        else values
    )
    return tensor.detach().cpu()


def _parts(data: Any) -> tuple[list[list[int]], list[list[int]]]:
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
