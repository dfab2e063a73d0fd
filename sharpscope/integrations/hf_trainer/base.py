"""What the recorders of transformers' Trainer and of TRL's trainers share: attaching, updates, steps and their end."""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import TrainerCallback

from sharpscope.config import RunConfig
from sharpscope.errors import UserError
from sharpscope.integrations.hf_trainer.step import Step
from sharpscope.integrations.hf_trainer.trace import Trace
from sharpscope.objective import Method
from sharpscope.policy import make_policy
from sharpscope.policy.scoring import Scorer
from sharpscope.policy.sharding import ModelView, gathered_copy, is_sharded, reshard, unsharded
from sharpscope.probes import guarded
from sharpscope.recording import Observers, StepResult, StepTokens, clip_factor, gradient_norm, total_norm, update_norm


@contextmanager
def own_forward(model: Any) -> Iterator[None]:
    """Context in which `model.forward` is the model's own; accelerate replaces it by one that computes in bf16 (autocast)."""
    replaced = vars(model).get("forward")
    if replaced is not None and hasattr(model, "_original_forward"):
        model.forward = model._original_forward
    try:
        yield
    finally:
        if replaced is not None:
            model.forward = replaced


class TrainerRecorder(ABC):
    """Records a transformers Trainer. It wraps methods of the trainer and changes nothing of the training.

    A subclass sets `trace` and `scorer`, then calls `attach`; it adds batches to the step in progress (`self._step`) and
    says what the loss does with their tokens (`Step.use`).

    Attributes:
        run_dir: folder of the run.
        wrapped: method of the trainer -> method of the recorder that replaces it.
    """

    wrapped: ClassVar[Mapping[str, str]] = {"train": "_train", "training_step": "_training_step"}
    trace: Trace
    scorer: Scorer
    weights: Method | None = None

    def __init__(self, trainer: Any, out: Path) -> None:
        self.trainer, self.run_dir = trainer, out
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        if tokenizer is None:
            raise UserError("record: the trainer has no tokenizer; pass processing_class=tokenizer to it")
        self.compute = torch.bfloat16 if trainer.accelerator.mixed_precision == "bf16" else None
        with guarded(self.model, weights=False), own_forward(self.model):
            source = str(getattr(self.model.config, "_name_or_path", ""))
            self.policy = make_policy(self.model, tokenizer, source, compute=self.compute)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.recording = False
        self._serial = 0

    @abstractmethod
    def config_of(self, updates: int) -> RunConfig:
        """The run's configuration for a training of so many updates."""

    @abstractmethod
    def whole_batches(self) -> bool:
        """Whether the updates made so far have used whole batches, so that the step is complete."""

    def check_observed(self, columns: Mapping[str, Tensor], tokens: StepTokens) -> None:  # noqa: B027 - most have nothing
        """Hook for recorders that check what was measured of a step's tokens, (N, T) each; does nothing by default."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context that computes the trainer's loss again, without dropout and gradients; restores its metrics and counters."""
        trainer, model = self.trainer, self.model
        before = dict(vars(trainer))
        metrics = copy.deepcopy(before.get("_metrics"))
        try:
            with guarded(model, weights=False), own_forward(model), torch.no_grad():
                model.training = True  # of the model alone: TRL's normalizers of training, dropout off
                yield
        finally:
            reshard(model)  # else the next update's forward pass would find weights from before this one
            vars(trainer).update(before)
            if metrics is not None:
                trainer._metrics = metrics

    # -- attaching to the trainer ------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Replace the wrapped methods and follow the trainer's events."""
        trainer = self.trainer
        self._instance = {name: vars(trainer)[name] for name in self.wrapped if name in vars(trainer)}
        self._original = {name: getattr(trainer, name) for name in self.wrapped}
        for name, own in self.wrapped.items():
            setattr(trainer, name, getattr(self, own))
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
        for name in self.wrapped:
            delattr(trainer, name)
            if name in self._instance:
                setattr(trainer, name, self._instance[name])
        trainer.remove_callback(self._callback)
        del trainer._sharpscope

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        self.trace.open()
        self._step = Step()
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
        """Called when the trainer knows the length of the training and has its optimizer."""
        trainer = self.trainer
        config = self.config_of(int(trainer.state.max_steps))
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self.optimizer = optimizer
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]  # FSDP2 has replaced them
        if is_sharded(self.model):
            self._first_pass()
        self._adam = isinstance(optimizer, torch.optim.AdamW) and not any(g["amsgrad"] for g in optimizer.param_groups)
        if config.recording.update_attribution and not self._adam:
            raise UserError(
                f"recording.update_attribution: the optimizer is {type(optimizer).__name__}; it works for AdamW without amsgrad"
            )
        self.max_grad_norm = config.optimizer.max_grad_norm
        self.trace.begin(config)
        self._copies_moments = config.recording.update_attribution
        self.observers = Observers(config, self.policy, self._view)

    def _first_pass(self) -> None:
        """Run the sharded model once: FSDP2 requires that its first forward pass is of the whole model."""
        with guarded(self.model, weights=False), torch.no_grad():
            self.model(input_ids=torch.full((1, 2), self.policy.pad_id, device=self.policy.device), use_cache=False)
        reshard(self.model)

    def _view(self) -> ModelView:
        """The present model, gradients and optimizer for probes; of a sharded model a gathered copy."""
        if not is_sharded(self.model):
            return ModelView(self.model, self.parameters, self.optimizer)
        return gathered_copy(self.model, self.optimizer, self.policy.device, moments=self._copies_moments)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context for statistics of tokens: the model's weights are gathered, its state is restored afterwards."""
        with unsharded(self.model), guarded(self.model, weights=False), torch.no_grad():
            yield

    # -- one micro-batch and one update ----------------------------------------------------------------------------

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

    def _gradient_done(self) -> None:
        """Run the probes that are due; the gradient of an update is complete and not clipped."""
        step = self._step
        step.settle()
        loss, norm = math.fsum(float(loss) for loss in step.losses), gradient_norm(self.parameters)
        step.gradient = (loss, norm, clip_factor(norm, self.max_grad_norm))
        if not step.updates:
            self._observer = self.observers.for_step(self.trace.step, step.joined()[0].rollouts, self.trace.recent)
        if math.isfinite(norm) and math.isfinite(loss):
            with own_forward(self.model):
                self._observer(step.pending_update())
        else:
            self.trace.warn_not_finite(norm if math.isfinite(loss) else loss)

    def observe_update(self) -> None:  # noqa: B027 - most have nothing
        """Hook before the optimizer's step, with the gradient clipped, for what needs the update's loss; does nothing by default."""

    def before_update(self) -> None:
        """Called before the optimizer's step."""
        started = time.perf_counter()
        self.observe_update()
        self._step.seconds["recording_s"] += time.perf_counter() - started
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
            size = total_norm(moved)
        self._step.record_update(size, bool(self.trainer.accelerator.optimizer_step_was_skipped), self._lr)
        self._step.seconds["recording_s"] += time.perf_counter() - done

    def step_done(self) -> None:
        """Called after an update: a step ends with whole batches."""
        if self.whole_batches():
            self._close_step()

    def _close_step(self) -> None:
        started, step = time.perf_counter(), self._step
        batch, tokens = step.joined()
        if step.gaps:
            gaps = torch.cat(step.gaps)
            self.trace.warn_mismatch(float(gaps.mean()))
        observed = self._observer.result()
        self.check_observed(observed.columns, tokens)
        self.trace.write(
            batch,
            StepResult(step.updates, tokens, corrected=step.corrected),
            observed,
            self._lr,
            self.weights,
            all(batch.sampled for batch in step.batches),
            step.seconds,
            started,
        )
        seconds = step.seconds
        training = seconds["generation_s"] + seconds["training_s"]
        self.observers.schedule.end_step(training, seconds["recording_s"] - observed.seconds)
        self._step = Step()


class _Callback(TrainerCallback):
    """Passes the trainer's events on to the recorder."""

    def __init__(self, recorder: TrainerRecorder) -> None:
        self.recorder = recorder

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin the trace."""
        if self.recorder.recording:
            self.recorder.begin()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Before an update, with the gradient clipped."""
        if self.recorder.recording:
            self.recorder.before_update()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """After an update."""
        if self.recorder.recording:
            self.recorder.after_update()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """After a step of the trainer."""
        if self.recorder.recording:
            self.recorder.step_done()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """After an evaluation, which is written."""
        if self.recorder.recording:
            self.recorder.trace.write_evaluation()
