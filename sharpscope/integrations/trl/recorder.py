"""The recorder: wrappers around methods of a GRPOTrainer that change nothing but the token weights, if asked for.

TRL shuffles a batch after scoring it, so each row carries its number (`ROW`) through shuffle and split, and what the loss
does with it is recorded under that number. A step is the fewest micro-steps that are whole batches and whole updates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from sharpscope.config.token_weights import UniformWeight
from sharpscope.errors import UserError
from sharpscope.integrations.trl import arguments
from sharpscope.integrations.trl.batches import (
    Batch,
    RewardScores,
    examples_of,
    rewards_of,
    rollouts_of,
    same_prompts,
    unused_tokens,
)
from sharpscope.integrations.trl.step import Step
from sharpscope.integrations.trl.trace import Trace
from sharpscope.objective import (
    Method,
    calibrate,
    prepare,
)
from sharpscope.policy import make_policy
from sharpscope.policy.scoring import Scorer
from sharpscope.policy.sharding import ModelView
from sharpscope.probes.guard import guarded
from sharpscope.recording import (
    Observers,
    RolloutBatch,
    StepResult,
    clip_factor,
    gradient_norm,
    step_tensors,
    update_norm,
)
from sharpscope.seeds import generator

ROW = "sharpscope_row"  # (n, 2): serial number of the batch, row in it
_WRAPPED = (
    "train",
    "training_step",
    "_generate_and_score_completions",
    "_calculate_rewards",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
)


def positive(total: float) -> bool:
    """Whether a total reward counts as correct by default: it is above 0."""
    return total > 0


def record(
    trainer: Any,
    out: str | Path = "runs/trl",
    *,
    weights: str | Method | None = None,
    shaping: str | None = None,
    task: str = "trl",
    correct: Callable[[float], bool] = positive,
    recording: Mapping[str, Any] | None = None,
) -> Recorder:
    """Record a TRL GRPOTrainer; call it once, before `trainer.train()`.

    Every token's coefficient in the loss comes from a hook on the log-probabilities inside TRL's own loss, its statistics
    from a separate forward pass without dropout; score norms and attribution are measured by schedule. Without `weights` the
    training is bitwise the same. `sharpscope analyze`, `show`, `tokens`, `spikes`, `claims` read the folder.

    Args:
        trainer: a trl.GRPOTrainer in one process, float32 or bf16.
        out: folder of the run; it must not exist or be empty.
        weights: a method, or the name of one, whose token weights multiply TRL's surrogate (`grpo-sg`, `ar`, a control …),
            through per-token advantages; None changes nothing.
        shaping: preset of a sigmoid weight, `paper` or `calibrated`; None: `paper`.
        task: the task's name in the trace.
        correct: which total rewards count as correct (default: above 0), for accuracy.
        recording: fields of the run configuration's part `recording`, such as {"token_gradients_every": 5}.

    Returns:
        The recorder; `recorder.detach()` restores the trainer.

    Raises:
        UserError: the trainer, an option or the folder cannot be used; the message names it.
    """
    arguments.check_trainer(trainer)
    if hasattr(trainer, "_sharpscope"):
        raise UserError("record: this trainer is recorded already; call detach() on that recorder first")
    method = None
    if weights is not None:
        arguments.check_weightable(trainer)
        method = arguments.token_weights_of(weights)
        method = method.with_preset("auto", shaping or "paper")
    elif shaping is not None:
        raise UserError(f"shaping = {shaping!r}: belongs to weights, which are not given; add weights='grpo-sg'")
    return Recorder(trainer, Path(out), method, task, correct, recording)


@contextmanager
def own_forward(model: Any) -> Iterator[None]:
    """Within it, `model.forward` is the model's own; accelerate replaces it by one that computes in bf16 (autocast)."""
    replaced = vars(model).get("forward")
    if replaced is not None and hasattr(model, "_original_forward"):
        model.forward = model._original_forward
    try:
        yield
    finally:
        if replaced is not None:
            model.forward = replaced


class Recorder:
    """What `record` returns. `run_dir` is the run's folder."""

    def __init__(
        self,
        trainer: Any,
        out: Path,
        weights: Method | None,
        task: str,
        correct: Callable[[float], bool],
        recording: Mapping[str, Any] | None,
    ) -> None:
        self.trainer, self.run_dir, self.weights, self.correct = trainer, out, weights, correct
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        compute = torch.bfloat16 if trainer.accelerator.mixed_precision == "bf16" else None
        with guarded(self.model, weights=False), own_forward(self.model):
            source = str(getattr(self.model.config, "_name_or_path", ""))
            self.policy = make_policy(self.model, tokenizer, source, compute=compute)
        self.group_size = int(trainer.num_generations)
        method, notes = arguments.trl_method(trainer, weights)
        notes += arguments.sampler_notes(trainer)
        self._config = lambda updates: arguments.run_config(trainer, out, task, method, recording, updates)
        config = self._config(max(int(trainer.args.max_steps), 1))
        self.trace = Trace(config, method, notes, self.policy, trainer, correct)
        self.scorer = Scorer(
            self.model, config.rollout.temperature, config.update.microbatch_tokens, share_prompt=True, compute=compute
        )
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.max_grad_norm = config.optimizer.max_grad_norm
        self.recording = False
        self._serial = 0
        self._attach()

    # -- attaching to the trainer ------------------------------------------------------------------------------------

    def _attach(self) -> None:
        trainer = self.trainer
        self._instance = {name: vars(trainer)[name] for name in _WRAPPED if name in vars(trainer)}
        self._original = {name: getattr(trainer, name) for name in _WRAPPED}
        trainer.train, trainer.training_step = self._train, self._training_step
        trainer._generate_and_score_completions = self._generate
        trainer._calculate_rewards, trainer._compute_loss = self._rewards, self._loss
        trainer._get_per_token_logps_and_entropies = self._logps
        self._callback = _Callback(self)
        trainer.add_callback(self._callback)
        trainer._sharpscope = self

    def detach(self) -> None:
        """Restore the trainer and keep what was recorded. During training, the run ends as interrupted."""
        trainer = self.trainer
        if getattr(trainer, "_sharpscope", None) is not self:
            return
        if self.recording:
            self._stop("interrupted", "the recorder was detached")
        for name in _WRAPPED:
            delattr(trainer, name)
            if name in self._instance:
                setattr(trainer, name, self._instance[name])
        trainer.remove_callback(self._callback)
        del trainer._sharpscope

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        self.trace.open()
        self._step = Step()
        self._current: dict[str, Any] | None = None
        self._scored: RewardScores | None = None
        self.recording = True
        status, reason = "failed", ""
        try:
            result = self._original["train"](*args, **kwargs)
            status, reason = "finished", "all steps done"
            return result
        except KeyboardInterrupt:
            status, reason = "interrupted", "stopped by the user"
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            if self.recording:
                self._stop(status, reason)

    def _stop(self, status: str, reason: str) -> None:
        """End the recording; of a step in progress, the updates made so far are written."""
        self.recording = False
        try:
            if status != "failed" and self._step.updates:
                self._close_step()
        finally:
            self.trace.close(status, reason)

    def begin(self) -> None:
        """Called when TRL knows the length of the training and has its optimizer."""
        trainer = self.trainer
        config = self._config(int(trainer.state.max_steps))
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self.optimizer = optimizer
        self._adam = isinstance(optimizer, torch.optim.AdamW) and not any(g["amsgrad"] for g in optimizer.param_groups)
        if config.recording.update_attribution and not self._adam:
            raise UserError(
                f"recording.update_attribution: the optimizer is {type(optimizer).__name__}; it works for AdamW without amsgrad"
            )
        self.trace.begin(config)
        self.observers = Observers(config, self.policy, lambda: ModelView(self.model, self.parameters, optimizer))

    # -- one batch of completions ------------------------------------------------------------------------------------

    def _rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        found = self._original["_calculate_rewards"](*args, **kwargs)
        ids = kwargs["completion_ids_list"] if "completion_ids_list" in kwargs else args[3]
        self._scored = RewardScores(found.detach().cpu(), [list(row) for row in ids])
        return found

    def _generate(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        training = self.model.training
        started = time.perf_counter()
        output: dict[str, Any] = self._original["_generate_and_score_completions"](inputs)
        if not self.recording or self._scored is None:
            return output
        scored, self._scored = self._scored, None
        total = (scored.rewards * self.trainer.reward_weights.cpu()[None]).nansum(1)
        if not training:
            self.trace.add_evaluation(total)
            return output
        done = time.perf_counter()
        self._step.seconds["generation_s"] += done - started
        self._open_batch(output, scored, total)
        self._step.seconds["recording_s"] += time.perf_counter() - done
        return output

    def _open_batch(self, output: dict[str, Any], scored: RewardScores, total: Tensor) -> None:
        """Add a new batch: measure π_old on it, number its rows and, if asked for, weight their tokens."""
        advantage = output["advantages"]
        if advantage.dim() != 1:
            raise UserError(
                f"record: this trainer's advantages have shape {tuple(advantage.shape)}; recording needs one a completion"
            )
        self._serial += 1
        tokenizer, eos_ids = self.policy.tokenizer, self.policy.eos_ids
        rollouts = rollouts_of(output, scored, total, self.group_size, tokenizer, eos_ids)
        rewards = rewards_of(scored, self.trainer.reward_func_names, total, self.correct)
        examples = examples_of(rollouts, self.group_size, tokenizer)
        batch = RolloutBatch(examples, rollouts, rewards, advantage.detach().clone(), None)
        scorer = replace(self.scorer, share_prompt=same_prompts(rollouts, self.group_size))
        with guarded(self.model, weights=False):
            stats = scorer.statistics(rollouts)
        plan = None
        if self.weights is not None:
            plan = self._plan(batch, stats)
            factor = plan.weight * plan.keep.to(plan.weight)
            output["advantages"] = advantage[:, None] * factor.to(advantage)  # (N, T)
        tokens = unused_tokens(stats, advantage, None if plan is None else plan.weight)
        self._step.batches.append(Batch(self._serial, batch, tokens, plan, "sampling_per_token_logps" in output))
        rows = torch.arange(len(advantage), device=advantage.device)
        output[ROW] = torch.stack([torch.full_like(rows, self._serial), rows], 1)

    def _plan(self, batch: RolloutBatch, stats: Any) -> Any:
        """The weights of this batch, fixed for all its updates; the first batch calibrates their constants."""
        assert self.weights is not None
        tensors = step_tensors(batch.rollouts, batch.advantage, stats, stats.logp, self.trace.progress, self.weights)
        method = self.weights
        if method.weight.needs_gradient and not bool(tensors.mass.any()):
            method = method.model_copy(update={"weight": UniformWeight()})  # they would multiply 0
        elif method.weight.needs_calibration:
            method = self.weights = method.model_copy(update={"weight": calibrate(method.weight, tensors)})
            self.trace.write_calibration(method)
        seed = generator(self.trace.config.seed, "plan", self._serial)
        plan = prepare(method, tensors, seed)
        self.trace.warn(plan.warnings)
        return plan

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def _training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        started = time.perf_counter()
        before = self._step.other_seconds
        loss: Tensor = self._original["training_step"](*args, **kwargs)
        if not self.recording:
            return loss
        inside = self._step.other_seconds - before
        done = time.perf_counter()
        self._step.seconds["training_s"] += done - started - inside
        self._step.micro += 1
        self._step.losses.append(loss.detach())
        if self.trainer.accelerator.sync_gradients:
            self._gradient_done()
        self._step.seconds["recording_s"] += time.perf_counter() - done
        return loss

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if not self.recording or not self.model.training or ROW not in inputs:
            return self._original["_compute_loss"](model, inputs)
        self._current, self._loss_seen = inputs, False
        try:
            loss: Tensor = self._original["_compute_loss"](model, inputs)
        finally:
            self._current = None
        if not self._loss_seen:
            raise UserError(
                f"record: the loss of {type(self.trainer).__name__} takes no log-probabilities from "
                "_get_per_token_logps_and_entropies, so it cannot be recorded"
            )
        return loss

    def _logps(self, *args: Any, **kwargs: Any) -> Any:
        found = self._original["_get_per_token_logps_and_entropies"](*args, **kwargs)
        if self._current is not None and found[0].requires_grad:
            started = time.perf_counter()
            self._step.hook(self.trainer, found[0], self._current, self._current[ROW])
            self._loss_seen = True
            self._step.seconds["recording_s"] += time.perf_counter() - started
        return found

    # -- one update --------------------------------------------------------------------------------------------------

    def _gradient_done(self) -> None:
        """Run the probes that are due; the gradient of an update is complete and not clipped."""
        step = self._step
        loss, norm = math.fsum(float(loss) for loss in step.losses), gradient_norm(self.parameters)
        step.gradient = (loss, norm, clip_factor(norm, self.max_grad_norm))
        if not step.updates:
            self._observer = self.observers.for_step(self.trace.step, step.joined()[0].rollouts, self.trace.recent)
        if math.isfinite(norm) and math.isfinite(loss):
            with own_forward(self.model):
                self._observer(step.pending_update())
        else:
            self.trace.warn_not_finite(norm if math.isfinite(loss) else loss)

    def before_update(self) -> None:
        """Called before the optimizer's step."""
        self._update_started = time.perf_counter()
        self._lr = float(self.optimizer.param_groups[0]["lr"])
        self._weights_before = None if self._adam else [p.detach().clone() for p in self.parameters]

    def after_update(self) -> None:
        """Called after the optimizer's step, before gradients are cleared."""
        done = time.perf_counter()
        self._step.seconds["training_s"] += done - self._update_started
        if self._weights_before is None:
            size = update_norm(self.optimizer)
        else:
            moved = [p.detach() - kept for p, kept in zip(self.parameters, self._weights_before, strict=True)]
            size = math.sqrt(sum(float(torch.linalg.vector_norm(m, dtype=torch.float64)) ** 2 for m in moved))
        self._step.record_update(size, bool(self.trainer.accelerator.optimizer_step_was_skipped), self._lr)
        self._step.seconds["recording_s"] += time.perf_counter() - done

    def step_done(self) -> None:
        """Called after an update: a step ends with the batch of completions."""
        if self._step.micro % arguments.generate_every(self.trainer) == 0:
            self._close_step()

    def _close_step(self) -> None:
        started, step = time.perf_counter(), self._step
        batch, tokens = step.joined()
        self.trace.warn_mismatch(float(torch.cat(step.gaps).mean()))
        self.trace.write(
            batch,
            StepResult(step.updates, tokens, corrected=step.corrected),
            self._observer.result(),
            self._lr,
            self.weights,
            all(batch.sampled for batch in step.batches),
            step.seconds,
            started,
        )
        self._step = Step()


class _Callback(TrainerCallback):
    """Passes the trainer's events on to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.recorder.recording:
            self.recorder.begin()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.recorder.recording:
            self.recorder.before_update()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.recorder.recording:
            self.recorder.after_update()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.recorder.recording:
            self.recorder.step_done()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        if self.recorder.recording:
            self.recorder.trace.write_evaluation()
