"""The recorder of verl's actor: wraps `TrainingWorker.train_mini_batch` and `train_batch`, and changes nothing of the training.

`train_mini_batch` gets one batch of completions and makes a step of one or more updates (`train_batch`). Each row carries its
number through verl's mini- and micro-batches. A hook on the log-probabilities that the loss differentiates gives ∂L/∂log π;
FSDP averages gradients over the data-parallel processes, so this divided by their number is the token's coefficient in the
loss of the whole batch. After the step the processes' rows are gathered, and the first process writes them. At the first step and
every few steps each process measures the local score norms of its own tokens through the shards, before the first update, and
between the gradient of the first update and the optimizer's step the critical sharpness, by more evaluations of its loss.

The entropy bonus acts on all logits of a position and is not in `loss_coef`.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.integrations.completions import Completion, step_events, step_tables
from sharpscope.integrations.guard import Guard, reason_of, warn_stopped
from sharpscope.policy import completions_of
from sharpscope.probes import Estimate, columns, guarded
from sharpscope.probes.token_gradients import ShardedProbes
from sharpscope.recording import run_folder
from sharpscope.recording.health import refusal
from sharpscope.recording.norms import (
    clip_factor,
    gradient_norm,
    gradient_norms,
    layer_groups,
    update_norm,
    update_norms,
)
from sharpscope.recording.observers import critical_rows
from sharpscope.recording.rows import update_columns
from sharpscope.recording.step import UpdateResult, UpdateTokens
from sharpscope.rules.judging import Event
from sharpscope.traces import RunLock, TraceWriter, create_run_dir, create_run_info, update_run_info
from sharpscope.traces.files import now

ROW = "sharpscope_row"
STRATEGIES = ("fsdp", "fsdp2")
NORMS, CRITICAL = "SHARPSCOPE_VERL_NORMS_EVERY", "SHARPSCOPE_VERL_CRITICAL_EVERY"
"""Environment variables: intervals of score norms and of critical sharpness, both also measured at the first step and, where verl
gives their number, at the last; 0: never [steps]."""
NORMS_EVERY, CRITICAL_EVERY, ROUNDS = 10, 50, 10
"""Default intervals [steps]; that of critical sharpness is larger where it would be measured more than ROUNDS times."""
LOSSES = ("vanilla", "gspo", "sapo", "gpg", "geo_mean", "dro")
"""Values of `policy_loss.loss_mode` whose loss has the gradient that the update descends; others hold factors of it constant."""
NEEDED = ("prompts", "responses", "response_mask", "old_log_probs", "advantages")
_REWARDS = ("token_level_scores", "rm_scores", "token_level_rewards")


def install(folder: str) -> None:
    """Wrap verl's training worker, once per process; every actor's step is recorded to `folder`."""
    from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

    interval(NORMS, NORMS_EVERY)
    interval(CRITICAL, CRITICAL_EVERY)
    if getattr(TrainingWorker, "_sharpscope", False):
        return
    step, update = TrainingWorker.train_mini_batch, TrainingWorker.train_batch
    build = ActorRolloutRefWorker.init_model

    @functools.wraps(build)  # keeps what verl's dispatcher reads from the function
    def init_model(self: Any) -> Any:
        """As verl's; an actor that cannot be recorded is refused before it is built."""
        if "actor" in self.role:
            check_actor(self.config)
        return build(self)

    @functools.wraps(step)
    def train_mini_batch(self: Any, data: Any) -> Any:
        """As verl's; an actor's step is recorded."""
        if any(name not in data for name in NEEDED):  # another worker: a critic, or supervised fine-tuning
            return step(self, data)
        if not hasattr(self, "_sharpscope_recorder"):
            self._sharpscope_recorder = VerlRecorder(self, Path(folder))
        return self._sharpscope_recorder.step(data, lambda: step(self, data))

    @functools.wraps(update)
    def train_batch(self: Any, data: Any) -> Any:
        """As verl's; an update of a recorded step is recorded."""
        recorder = getattr(self, "_sharpscope_recorder", None)
        if recorder is None or recorder.rows is None or ROW not in data:
            return update(self, data)
        return recorder.update(data, lambda: update(self, data))

    TrainingWorker.train_mini_batch, TrainingWorker.train_batch = train_mini_batch, train_batch
    ActorRolloutRefWorker.init_model = init_model
    TrainingWorker._sharpscope = True


def interval(variable: str, default: int) -> int:
    """The interval that an environment variable sets [steps].

    Raises:
        UserError: it is not a whole number of at least 0.
    """
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise UserError(f"{variable} = {text!r}: must be a whole number of at least 0 [steps]; 0 leaves it out")
    return int(text)


def check_actor(config: Any) -> None:
    """Check that an actor with verl's configuration (actor_rollout_ref) can be recorded, before it is built.

    Raises:
        UserError: an engine or option is not supported; the message names it.
    """
    from verl.utils.config import omega_conf_to_dataclass

    if config.actor.strategy in STRATEGIES:  # else there may be no `engine`
        check_engine(omega_conf_to_dataclass(config.actor).engine, bool(config.model.get("use_fused_kernels", False)))
    else:
        check_engine(config.actor, False)


def check_engine(config: Any, fused: bool) -> None:
    """Check an engine's configuration, and whether the model uses fused kernels.

    Raises:
        UserError: an engine or option is not supported; the message names it.
    """
    if config.strategy not in STRATEGIES:
        raise UserError(f"verl: strategy = {config.strategy} is not recorded; use fsdp2, or unset SHARPSCOPE_VERL")
    parts, dtype = config.ulysses_sequence_parallel_size, str((config.mixed_precision or {}).get("param_dtype", ""))
    half = "mixed_precision.param_dtype = fp16 scales the loss by a changing factor; use bf16 or fp32"
    for wrong, message in (
        (fused, "use_fused_kernels = True gives no log-probabilities to hook; set it to False"),
        (parts > 1, f"ulysses_sequence_parallel_size = {parts} divides sequences; set it to 1"),
        (dtype in ("fp16", "float16", "16", "16-mixed"), half),
    ):
        if wrong:
            raise UserError(f"verl: {message}")


def check_loss(loss_fn: Any) -> None:
    """Check that the loss at other weights is that whose gradient the update descends.

    Raises:
        UserError: it holds factors constant, or is not known.
    """
    name = getattr(getattr(loss_fn, "func", loss_fn), "__name__", type(loss_fn).__name__)
    if name != "ppo_loss":
        raise UserError(f"the loss {name} is not known; critical sharpness needs verl's ppo_loss")
    config = loss_fn.keywords["config"]
    mode = config.policy_loss.get("loss_mode", "vanilla")
    if mode not in LOSSES:
        why = "the loss has factors that its gradient treats as constants, or is not known"
        raise UserError(f"policy_loss.loss_mode = {mode}: {why}; measured for {', '.join(LOSSES)}")
    if config.use_kl_loss and config.kl_loss_type.endswith("+"):
        raise UserError(f"kl_loss_type = {config.kl_loss_type}: its gradient is not that of its value")


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
    norm: Tensor  # local score norm at the start of the step, NaN where it was not measured
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
        self.first = distributed.is_rank_zero()
        self.writer: TraceWriter | None = None
        self.events: list[Event] = []
        self.probes: list[Estimate] = []
        self.critical_lr: float | None = None  # found last

    def give_up(self, error: Exception) -> None:
        """End the recording because of an error of its own; the training goes on."""
        self.recording, self.rows = False, None
        warn_stopped(self.count + 1, error)
        if self.writer is not None:
            event = Event(self.count + 1, "recorder", "error", math.nan, math.nan, "stop", reason_of(error)[:300])
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
        """Take the step's batch, and measure what is due before its first update."""
        worker = self.worker
        if self.count == 0:
            check_engine(worker.engine_config, bool(worker.engine_config.use_fused_kernels))
            total = getattr(worker.optimizer_config, "total_training_steps", None)
            self.steps = int(total or -1)  # of the training, if known
            self.every = {"score_norm_local": interval(NORMS, NORMS_EVERY)}
            self.every["critical_sharpness"] = interval(CRITICAL, max(CRITICAL_EVERY, -(-self.steps // ROUNDS)))
            self.norms = ShardedProbes(worker.engine.module)
            whole = worker.engine_config.strategy == "fsdp2"
            self.groups = layer_groups(worker.engine.module) if whole else None
            for name in () if whole else self.every:
                self._refuse(name, UserError(f"strategy = {worker.engine_config.strategy}: needs fsdp2"))
        mask, old = _dense(data["response_mask"]).bool(), _dense(data["old_log_probs"]).double()
        if old.shape[1] < mask.shape[1]:
            raise UserError("verl: old_log_probs is shorter than response_mask, so tokens cannot be matched")
        entropy, norm = (torch.full(mask.shape, torch.nan, dtype=torch.float64) for _ in range(2))
        if "entropy" in data:
            entropy = _dense(data["entropy"]).double()[:, : mask.shape[1]]
        if self._due("score_norm_local"):
            self._score_norms(data, mask, norm)
        self.rows = _Rows(data, mask, old[:, : mask.shape[1]], entropy, norm)

    def _due(self, name: str) -> bool:
        """Whether `name` is measured in the coming step."""
        step, every = self.count + 1, self.every[name]
        return every > 0 and (step == 1 or step % every == 0 or step == self.steps)

    def _score_norms(self, data: Any, mask: Tensor, into: Tensor) -> None:
        """Write the local score norms (n, T) of this process's response tokens; all processes call it."""
        prompts, responses = _parts(data)
        counted = [row[: len(ids)].tolist() for row, ids in zip(mask, responses, strict=True)]
        made = completions_of(prompts, responses, counted)
        whole = torch.cat([torch.zeros_like(made.input_ids[:, : made.prompt_width]), made.completion_mask], 1)
        offload = bool(data["disable_auto_offload"]) if "disable_auto_offload" in data else False
        try:
            temperature = _temperature(data)
            if any(value is None for value in distributed.gather(temperature)):
                raise UserError("temperature: differs between rows; norms are of one temperature")
            with self.worker.engine.eval_mode(disable_auto_offload=offload):
                measured = self.norms.local(made.input_ids, whole, made.attention_mask, float(temperature or 1.0))
        except UserError as problem:
            self._refuse("score_norm_local", problem)
            return
        values = measured.values[:, made.prompt_width :].double().cpu()
        into[:, : values.shape[1]] = torch.where(made.completion_mask.bool(), values, torch.nan)

    def _refuse(self, name: str, problem: UserError) -> None:
        """Report that `name` is not measured from here on."""
        if self.every[name]:
            self.events.append(refusal(self.count + 1, name, problem))
        self.every[name] = 0

    def update(self, data: Any, train: Callable[[], Any]) -> Any:
        """Run one `train_batch` with a loss that is watched."""
        worker, rows = self.worker, self.rows
        if rows is None:
            return train()
        inner, engine = worker.loss_fn, worker.engine
        make_update, replaced = engine.optimizer_step, vars(engine).get("optimizer_step")

        def watched(**given: Any) -> Any:  # in distillation verl also calls it with the logits
            """The loss of verl; hooks the log-probabilities that it differentiates."""
            if torch.is_grad_enabled() and given.get("model_output", {}).get("log_probs") is not None:
                self._timed(lambda: self.safely(lambda: self._watch(rows, given["model_output"], given["data"])))
            return inner(**given)

        def measured() -> float:
            """The optimizer step of verl, with critical sharpness before it and the update's size after it."""
            hooks: list[Any] = []
            self._timed(lambda: self.together(lambda: hooks.extend(self._before(rows, data, inner))))
            norm = float(make_update())
            for hook in hooks:
                hook.remove()
            # Here, as verl clears the gradients, which tell which parameters moved, before train_batch returns.
            self._timed(lambda: self.together(lambda: self._after(rows, norm)))
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

    def _before(self, rows: _Rows, data: Any, loss_fn: Any) -> list[Any]:
        """Take the gradient's norms, and return a hook that measures the critical sharpness where it is due."""
        engine = self.worker.engine
        self.lr = float(engine.optimizer.param_groups[0]["lr"])
        self.gradient = (
            None
            if self.groups is None
            else gradient_norms([p for p in engine.module.parameters() if p.requires_grad], self.groups)
        )
        if rows.updates or not self._due("critical_sharpness"):
            return []
        norm = gradient_norm(engine.module.parameters()) if self.gradient is None else self.gradient.total
        factor = clip_factor(norm, float(engine.optimizer_config.clip_grad))
        # verl clips the gradient and then calls the optimizer, unless the gradient is not finite.
        critical = partial(self._critical, rows, data, loss_fn, factor)
        return [engine.optimizer.register_step_pre_hook(lambda *_: self._timed(lambda: self.together(critical)))]

    def _after(self, rows: _Rows, norm: float) -> None:
        """Take the size of the update that verl has made, if it has (`norm` is finite)."""
        optimizer, groups = self.worker.engine.optimizer, self.groups
        size, layers = math.nan, None
        adam = isinstance(optimizer, torch.optim.AdamW) and not any(g["amsgrad"] for g in optimizer.param_groups)
        if adam and math.isfinite(norm):
            if groups is None or self.gradient is None:
                size = self._update_norm(optimizer)
            else:
                moved = update_norms(optimizer, groups)
                size, layers = moved.total, (self.gradient.layers, moved.layers)
        skipped = not math.isfinite(norm)
        rows.updates.append(UpdateResult(math.nan, norm, norm, size, 1.0, skipped, lr=self.lr, layers=layers))

    def _made(self, rows: _Rows, metrics: dict[str, Any]) -> None:
        """Take the loss and the gradient norm that verl reports of the update."""
        norm, loss = float(metrics.get("grad_norm", math.nan)), float(np.mean(metrics.get("loss", math.nan)))
        rows.updates[-1] = replace(rows.updates[-1], loss=loss, grad_norm=norm, plain_norm=norm)

    def _update_norm(self, optimizer: torch.optim.AdamW) -> float:
        """The size of the update just made with FSDP 1, over all processes."""
        norm, config = update_norm(optimizer), self.worker.engine_config
        # FSDP 1: each process's parameters are its part, as plain tensors, which several hold if fsdp_size divides the processes.
        processes, size = distributed.world_size(), config.fsdp_size
        copies = processes // size if 0 < size < processes else 1
        return math.sqrt(distributed.sum_values(norm**2) / copies)

    def _critical(self, rows: _Rows, data: Any, loss_fn: Any, factor: float) -> None:
        """Measure the critical sharpness of the update; all processes call it, when verl has multiplied the gradient by `factor`."""
        engine = self.worker.engine
        processes = engine.get_data_parallel_size()

        def loss() -> float:
            """The loss of the update's batch at the present weights, over all processes."""
            losses: list[float] = []

            def kept(**given: Any) -> Any:
                """The loss of verl, whose value is kept."""
                found = loss_fn(**given)
                losses.append(float(found[0]))  # a micro-batch's part of the loss
                return found

            distributed.gather(None)  # the forward passes exchange weights
            with guarded(engine.module), torch.no_grad():
                engine.forward_backward_batch(data, loss_function=kept, forward_only=True)
            return distributed.sum_values(math.fsum(losses)) / processes

        try:
            check_loss(loss_fn)
            compute = engine._autocast_dtype
            scale = distributed.sum_values(sum(float(use.coef[use.used].abs().sum()) for use in rows.uses))
            lr = float(self.worker.optimizer_config.lr)
            options: dict[str, Any] = {"scale": scale, "last": self.critical_lr, "usual_lr": lr, "compute": compute}
            model, optimizer = engine.module, engine.optimizer
            critical, found = critical_rows(model, optimizer, loss, start=None, clip_factor=factor, **options)
            if critical.outcome == "found":
                self.critical_lr = critical.lr
            self.probes += found
            if not critical.converged:
                text = f"critical sharpness: {critical.why}"
                self.events.append(Event(self.count + 1, "probe", "info", math.nan, math.nan, "none", text))
        except UserError as problem:
            self._refuse("critical_sharpness", problem)

    def _watch(self, rows: _Rows, output: Mapping[str, Any], data: Any) -> None:
        """Take what the loss is about to do with a micro-batch's tokens, and hook the log-probabilities."""
        logp, index = output["log_probs"], len(rows.updates)
        mine = torch.as_tensor(data[ROW]).cpu().long()
        prompts, replies = _parts(data)
        lengths = [len(reply) for reply in replies]
        ends = np.cumsum([len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)])
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
        if not self.first:
            return
        if self.writer is None:
            self._open(rows.data)
        assert self.writer is not None
        writer, step = self.writer, self.count
        given = [one for completions, _ in parts for one in completions]
        tables = step_tables(step, given, self.worker.model_config.tokenizer)
        for event in [*step_events(step, tables, "verl"), *self.events]:
            writer.append("events", event.row())
        if self.probes:
            writer.append("probes", {"step": step, **columns(self.probes)})
        self.events, self.probes = [], []
        ratios = [np.concatenate([one[index] for _, one in parts]) for index in range(len(rows.updates))]
        results = [replace(one, summary=_summary(ratio)) for one, ratio in zip(rows.updates, ratios, strict=True)]
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

    def _open(self, data: Any) -> None:
        worker = self.worker
        next_ = f"sharpscope show {self.folder}; sharpscope tokens {self.folder} --by loss_coef"
        sys.stderr.write(f"sharpscope: recording the actor's updates to {self.folder} (try: {next_})\n")
        temperature = _temperature(data)
        rollout = {} if temperature is None else {"temperature": temperature}  # probes of a checkpoint need it
        made = create_run_dir(self.folder)
        worker.model_config.tokenizer.save_pretrained(made / "tokenizer")
        config = getattr(worker.loss_fn, "keywords", {}).get("config")
        names = ("loss_agg_mode", "clip_ratio_low", "clip_ratio_high", "use_kl_loss", "kl_loss_coef", "entropy_coeff")
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
        self.lock = RunLock(made)
        self.lock.__enter__()
        self.writer = TraceWriter(made)
        atexit.register(self._close, "finished", "the process ended")

    def _close(self, status: str, reason: str) -> None:
        """End the run and free its folder."""
        atexit.unregister(self._close)
        assert self.writer is not None
        self.writer.flush()
        update_run_info(self.folder, status=status, finished=now(), end=reason)
        self.lock.__exit__(None, None, None)


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
    again = [{name: list[Any]() for name in ("position", "update", "ratio", "loss_coef")} for _ in prompts]
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
    columns = {"logp": rows.old, "entropy": rows.entropy, "advantage": _dense(data["advantages"]).double()}
    columns |= {"ratio": ratio, "loss_coef": coef, "score_norm_local": rows.norm}
    if "rollout_log_probs" in data:
        columns["behavior_logp"] = _dense(data["rollout_log_probs"]).double()
    name = next((name for name in _REWARDS if name in data), None)
    rewards = None if name is None else _dense(data[name]).double().sum(1).tolist()
    completions = []
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        if uids is not None and uids[row].startswith("pad"):
            continue
        at = rows.mask[row].nonzero()[:, 0]
        tokens = {
            n: np.ma.masked_invalid(values[row, at].numpy()).tolist() for n, values in columns.items()
        }  # NaN: None
        tokens |= {"position": at.tolist(), "token_id": [reply[position] for position in at.tolist()]}
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
    tensor: Tensor = values.to_padded_tensor(0.0 if values.is_floating_point() else 0) if values.is_nested else values
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
