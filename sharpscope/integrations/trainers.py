"""The recorders of transformers' Trainer and of TRL's SFTTrainer and DPOTrainer, and what those of TRL's GRPO share with them.

A row of SFT or DPO is a sequence: its prompt is what stands before the first token that the loss counts, its completion the
rest. A step is one update. Where the trainer computes log-probabilities (DPO, and SFT since TRL 1.16), a hook on them gives
each token's coefficient ∂L/∂log π. Elsewhere the model's own loss is −Σ log π / N, so that the coefficient is −1/N times the
derivative of the trainer's loss by the model's, which a hook gives (it holds the division by the accumulation steps).
"""

from __future__ import annotations

import copy
import json
import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.integrations.core import Recorder, own_forward
from sharpscope.integrations.price import Work
from sharpscope.integrations.steps import Step, prompt_texts, same_prompts
from sharpscope.policy import Rollouts, completions_of
from sharpscope.policy.adapters import has_adapters
from sharpscope.policy.sharding import reshard
from sharpscope.probes import guarded
from sharpscope.recording.observers import StepObserver
from sharpscope.recording.step import RolloutBatch
from sharpscope.rules import OF_ROLLOUTS
from sharpscope.tasks import Example, Reward

IGNORED = -100
#: Classes of TRL whose loss is a function of log-probabilities that the recorder knows.
_OF_TRL = ("SFTTrainer", "DPOTrainer", "_BaseTrainer", "BaseTrainer")
_KNOWN_INPUTS = {"input_ids", "attention_mask", "labels", "completion_mask", "use_cache", "num_items_in_batch"} | {
    "ref_chosen_logps",
    "ref_rejected_logps",
}


class TrainerRecorder(Recorder):
    """Records a transformers Trainer by wrapping some of its methods and following its events.

    Attributes:
        wrapped: method of the trainer -> method of the recorder that replaces it.
    """

    wrapped: ClassVar[Mapping[str, str]] = {"train": "_train", "training_step": "_training_step"}
    fields = "trl"

    def __init__(self, trainer: Any, out: str | Path, **options: Any) -> None:
        self.trainer, args = trainer, trainer.args
        super().__init__(
            trainer.accelerator.unwrap_model(trainer.model),
            getattr(trainer.processing_class, "tokenizer", trainer.processing_class),
            out,
            lr=float(args.learning_rate),
            seed=int(args.seed),
            max_grad_norm=float(args.max_grad_norm) or math.inf,
            compute=torch.bfloat16 if trainer.accelerator.mixed_precision == "bf16" else None,
            **options,
        )
        self._instance = {name: vars(trainer)[name] for name in self.wrapped if name in vars(trainer)}
        self._original = {name: getattr(trainer, name) for name in self.wrapped}
        for name, own in self.wrapped.items():
            setattr(trainer, name, getattr(self, own))
        self._callback = _Callback(self)
        trainer.add_callback(self._callback)
        trainer._sharpscope = self

    def steps_of(self, updates: int) -> int:
        """Number of steps in so many updates."""
        return updates

    @abstractmethod
    def label(self) -> str:
        """The method's name in the trace."""

    def notes(self) -> list[str]:
        """Notes for run.json."""
        return []

    def describe(self) -> dict[str, Any]:
        """Entries of run.json: method, notes, and the trainer with its arguments as they are."""
        trainer, name = self.trainer, type(self.trainer).__name__
        arguments = json.loads(json.dumps(trainer.args.to_dict(), default=str))
        return {
            "method": self.label(),
            "notes": [f"recorded from {name}", *self.notes()],
            "trainer": {"name": name, "loss_type": arguments.get("loss_type"), "arguments": arguments},
        }

    def detach(self) -> None:
        """Restore the trainer and keep what was recorded. During training, the run ends as interrupted."""
        self.stop("interrupted", "the recorder was detached")
        self.unhook()

    def unhook(self) -> None:
        """Restore the trainer."""
        trainer = self.trainer
        for hook in self._hooks:
            hook.remove()
        if getattr(trainer, "_sharpscope", None) is self:
            for name in self.wrapped:
                delattr(trainer, name)
                if name in self._instance:
                    setattr(trainer, name, self._instance[name])
            trainer.remove_callback(self._callback)
            del trainer._sharpscope

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        status, reason = "failed", ""
        self._training = True
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
            self.end(partial(self.stop, status, reason))

    def start(self) -> None:
        """Begin the recording: the trainer knows the length of the training and has its optimizer."""
        trainer = self.trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self.begin(optimizer, self.steps_of(int(trainer.state.max_steps)), int(trainer.state.global_step))

    def _training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        started = time.perf_counter()
        before = self._step.other_seconds
        loss: Tensor = self._original["training_step"](*args, **kwargs)
        self.safely(lambda: self._micro_step_done(loss, started, before))
        if self.trainer.accelerator.sync_gradients:
            self.together(self.gradient_done)
        return loss

    def _micro_step_done(self, loss: Tensor, started: float, before: float) -> None:
        done = time.perf_counter()
        step = self._step
        step.seconds["training_s"] += done - started - (step.other_seconds - before)
        step.micro += 1
        step.losses.append(loss.detach())

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context that computes the trainer's loss again, without dropout and gradients; restores its metrics and counters."""
        trainer, model = self.trainer, self.model
        distributed.gather(None)  # the trainer's loss may exchange values
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

    def evaluated(self) -> None:
        """Hook after an evaluation of the trainer."""


class _Callback(TrainerCallback):
    """Passes the trainer's events on to the recorder."""

    def __init__(self, recorder: TrainerRecorder) -> None:
        self.recorder = recorder

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin the trace."""
        self.recorder.recording = True
        self.recorder.together(self.recorder.start)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """After an evaluation, which is written."""
        self.recorder.safely(self.recorder.evaluated)


def rows_of_update(args: Any) -> int:
    """Rows of the data set in an update, over all processes."""
    return int(args.train_batch_size * args.gradient_accumulation_steps * distributed.world_size())


def refuse(*cases: tuple[Any, str]) -> None:
    """Raise UserError with the message of the first case that is true."""
    for wrong, message in cases:
        if wrong:
            raise UserError(f"record: {message}")


def check_setup(trainer: Any) -> None:
    """Check the trainer's class and launch, and that its loss does not hide the log-probabilities.

    Raises:
        UserError: an option or a setup is not supported; the message names it.
    """
    args, accelerator, name = trainer.args, trainer.accelerator, type(trainer).__name__
    kind = str(accelerator.distributed_type.value)
    unsloth = name.startswith("Unsloth") or any("unsloth" in each.__module__ for each in type(trainer).__mro__)
    liger = getattr(trainer, "use_liger_kernel", False) or getattr(args, "use_liger_kernel", False)
    hidden = "computes the loss without per-token log-probabilities"
    refuse(
        (hasattr(trainer, "_sharpscope"), "this trainer is recorded already; call detach() on that recorder first"),
        (unsloth, f"{name} computes its loss without per-token log-probabilities; use TRL's own class"),
        (liger, f"use_liger_kernel = True {hidden}; set it to False"),
        (kind == "DEEPSPEED", "DeepSpeed is not supported; start the trainer without it (DDP and FSDP2 are recorded)"),
    )
    if kind == "FSDP":
        _check_fsdp(trainer)
    refuse(
        (args.n_gpu > 1, f"{args.n_gpu} GPUs in one process (DataParallel); set CUDA_VISIBLE_DEVICES to one of them"),
        (
            kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"),
            f"distributed_type {kind} is not supported; start one process, or several with DDP or FSDP2",
        ),
        (args.fp16, "fp16 = True scales the loss by a changing factor; use bf16 or float32"),
    )


def _check_fsdp(trainer: Any) -> None:
    """Check the options of FSDP.

    Raises:
        UserError: one of them is not supported; the message names it.
    """
    state, optim = trainer.accelerator.state, str(getattr(trainer.args.optim, "value", trainer.args.optim))
    plugin = state.fsdp_plugin
    offloaded = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    version, other = plugin.fsdp_version, "set gradient_checkpointing = True in its place"
    refuse(
        (not trainer.accelerator.is_fsdp2, f"fsdp_version = {version} is not supported; set it to 2, or use DDP"),
        (offloaded, "FSDP with weights offloaded to the CPU is not supported; set offload_params to False"),
        (plugin.activation_checkpointing, f"FSDP's activation_checkpointing renames layers; {other}"),
        (getattr(state, "parallelism_config", None) is not None, "FSDP with a parallelism_config; leave it out"),
        (has_adapters(trainer.accelerator.unwrap_model(trainer.model)), "FSDP with adapters (peft); use DDP"),
        (
            not optim.startswith("adamw"),
            f"optim = {optim} with FSDP is not supported; use an AdamW, such as adamw_torch",
        ),
    )


def check_supervised(trainer: Any) -> str:
    """Check that a trainer of given completions can be recorded; return `sft` or `dpo`.

    Raises:
        UserError: the trainer, an option or a setup is not supported; the message names it.
    """
    of_trl = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    for kind in of_trl:
        refuse((kind not in _OF_TRL, f"TRL's {kind} is not recorded; its loss is not known"))
    check_setup(trainer)
    args, smoothing = trainer.args, float(getattr(trainer.args, "label_smoothing_factor", 0.0))
    several = "True puts several sequences into one row; set it to False"
    refuse(
        (
            smoothing > 0,
            f"label_smoothing_factor = {smoothing:g} adds a term that no token's log-probability carries; set it to 0",
        ),
        (
            trainer.compute_loss_func is not None,
            "compute_loss_func replaces the model's loss by one whose coefficients are not known; leave it out",
        ),
        *((getattr(args, name, False), f"{name} = {several}") for name in ("packing", "padding_free")),
    )
    return "dpo" if "DPOTrainer" in of_trl else "sft"


@dataclass(frozen=True)
class Sequences:
    """A micro-batch of n sequences as rollouts. `columns` (n, T) is the column of each completion token in the trainer's rows."""

    rollouts: Rollouts
    columns: Tensor
    order: Tensor  # (n,) the trainer's row of each row

    def gather(self, values: Tensor, shift: int = 1) -> Tensor:
        """(n, T) from `values` (B, L−shift), in which column j belongs to the token in column j + shift."""
        return values[self.order.to(values.device)].gather(1, (self.columns - shift).clamp(min=0).to(values.device))


def sequences_of(ids: Tensor, present: Tensor, counted: Tensor, tokenizer: Any, *, pairs: bool = False) -> Sequences:
    """Rows (B, L) as rollouts; the rows of a pair (DPO: chosen, rejected) become adjacent.

    Args:
        ids: (B, L) token IDs.
        present: (B, L) 1 on tokens, 0 on padding.
        counted: (B, L) bool, tokens in the loss.
        tokenizer: for texts.
        pairs: whether row i and row i + B/2 are a pair.

    Raises:
        UserError: a row's first token is in the loss, predicted from padding.
    """
    n = len(ids)
    order = torch.arange(n).view(2, -1).T.flatten() if pairs else torch.arange(n)
    prompts, completions, flags, columns = [], [], [], []
    for row in order.tolist():
        kept = present[row].nonzero()[:, 0].tolist()
        loss = counted[row, kept].tolist()
        if loss[0] and kept[0] > 0:
            raise UserError(
                "record: the first token of a left-padded row is in the loss, predicted from padding; set "
                "tokenizer.padding_side = 'right'"
            )
        loss[0] = False  # nothing predicts it
        first = loss.index(True) if any(loss) else len(kept) - 1
        last = max((i for i, flag in enumerate(loss) if flag), default=first)
        tokens = ids[row].tolist()
        prompts.append([tokens[i] for i in kept[:first]])
        completions.append([tokens[i] for i in kept[first : last + 1]])
        columns.append(torch.tensor(kept[first : last + 1]))
        flags.append(loss[first : last + 1])
    made = completions_of(prompts, completions, flags, ids.device)
    rollouts = replace(
        made,
        group=made.group // (2 if pairs else 1),
        texts=tokenizer.batch_decode(completions, clean_up_tokenization_spaces=False),
    ).with_reward(torch.zeros(n))
    return Sequences(rollouts, torch.nn.utils.rnn.pad_sequence(columns, batch_first=True), order)


class SupervisedRecorder(TrainerRecorder):
    """What `record` returns for a transformers Trainer, an SFTTrainer or a DPOTrainer."""

    wrapped: ClassVar[Mapping[str, str]] = {**TrainerRecorder.wrapped, "compute_loss": "_loss"}
    given = frozenset({"loss", "timing"})
    rules: Mapping[str, Any] = {rule: {"action": "off"} for rule in OF_ROLLOUTS}

    def __init__(
        self, trainer: Any, out: str | Path, kind: str, *, critical: bool | int, task: str, **options: Any
    ) -> None:
        self.pairs, self._kind = kind == "dpo", kind
        self._held = _held_constant(trainer) if critical else ""
        self._kept: list[_Again] = []  # micro-batches of an update whose loss is computed again
        rows = rows_of_update(trainer.args) * (2 if self.pairs else 1)
        self.work = Work(rows=rows)
        super().__init__(trainer, out, critical=0 if self._held else critical, task=task, **options)

    def label(self) -> str:
        """The method's name in the trace."""
        return self._kind

    def notes(self) -> list[str]:
        """Notes for run.json."""
        notes = [f"DPO with beta = {self.trainer.beta:g}; group: pair, first the chosen"] if self.pairs else []
        if self._held:
            notes.append(
                f"critical sharpness is not measured: {self._held} multiplies the loss by factors that its gradient treats as constants"
            )
        return notes

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def _loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        original = partial(self._original["compute_loss"], model, inputs, *args, **kwargs)
        if not self.recording or not self.model.training or not torch.is_grad_enabled():
            return original()
        started = time.perf_counter()
        watched = self.in_step(lambda: self._open(inputs))
        again = dict(inputs) if self.recording and self._critical_due() else None
        self._step.seconds["recording_s"] += time.perf_counter() - started
        if watched is None:
            return original()
        with self._watched(watched) as seen:
            loss = original()
        if not seen:
            text = f"the loss of {type(self.trainer).__name__} uses neither the model's loss nor its log-probabilities"
            self.safely(lambda: refuse((True, text)))
        elif again is not None:
            # The gradient that reaches the loss holds the division by the accumulation steps.
            value = loss[0] if isinstance(loss, tuple) else loss
            value.register_hook(lambda factor: self._kept.append(_Again(again, args, kwargs, float(factor))))
        return loss

    def _critical_due(self) -> bool:
        return self.observers.surface.update_due(self.step_number)

    def observe_update(self, observer: StepObserver) -> None:
        """Measure the critical sharpness of the update."""
        kept, self._kept = self._kept, []
        loss, _, factor = self._step.gradient
        if kept:
            start = self._loss_of(kept)
            # With dropout the gradient is of another loss, so its slope is not that of the loss computed again.
            same = math.isclose(start, loss, rel_tol=1e-2)
            observer.critical(
                self.model,
                self.optimizer,
                lambda: self._loss_of(kept),
                start=start,
                clip_factor=factor if same else None,
            )

    def _loss_of(self, kept: list[_Again]) -> float:
        """The trainer's loss of some micro-batches at the present weights, over all processes, without dropout."""
        compute, total = self._original["compute_loss"], 0.0
        with self.evaluating():
            for one in kept:
                loss = compute(self.model, dict(one.inputs), *one.args, **one.kwargs)
                total += one.factor * float(loss[0] if isinstance(loss, tuple) else loss)
        return distributed.sum_values(total) / distributed.world_size()

    def _open(self, inputs: Mapping[str, Any]) -> _Tokens:
        """Add the micro-batch to the step.

        Raises:
            UserError: the batch has inputs or labels that cannot be recorded.
        """
        unknown = sorted(key for key in inputs if key not in _KNOWN_INPUTS)
        if unknown:
            raise UserError(f"the batch has the input '{unknown[0]}', which probes of the model do not get")
        ids: Tensor = inputs["input_ids"]
        present = torch.ones_like(ids) if inputs.get("attention_mask") is None else inputs["attention_mask"]
        counted = inputs["completion_mask"].bool() if self.pairs else inputs["labels"] != IGNORED
        if not self.pairs and bool((inputs["labels"][counted] != ids[counted]).any()):
            raise UserError("labels differ from the input's own tokens")
        sequences = sequences_of(ids, present, counted, self.policy.tokenizer, pairs=self.pairs)
        rollouts, n, size = sequences.rollouts, len(sequences.rollouts), 2 if self.pairs else 1
        examples = [Example(text, "", {}) for text in prompt_texts(rollouts, self.policy.tokenizer)[::size]]
        rewards = [Reward(0.0, {"chosen": 1.0 - row % 2} if self.pairs else {}, False) for row in range(n)]
        batch = RolloutBatch(examples, rollouts, rewards, torch.zeros(n, dtype=torch.float64), None)
        scorer = replace(self.scorer, share_prompt=self.pairs and same_prompts(rollouts, 2))
        labels = [(self._serial, group) for group in rollouts.group.tolist()]
        made = self.open_batch(batch, labels, scorer)
        return _Tokens(sequences, self, self._step, made.serial)

    @contextmanager
    def _watched(self, tokens: _Tokens) -> Iterator[list[str]]:
        """Context that hooks the model's first log-probabilities or loss with a gradient; yields which."""
        seen: list[str] = []

        def hook(module: Any, args: Any, given: dict[str, Any], output: Any) -> None:
            """Hook the first log-probabilities or loss of the model that requires a gradient."""
            if seen or not torch.is_grad_enabled():
                return
            logp, loss = getattr(output, "log_probs", None), getattr(output, "loss", None)
            if isinstance(logp, Tensor) and logp.requires_grad:
                seen.append("log_probs")
                self.safely(lambda: tokens.of_logp(logp))
            elif isinstance(loss, Tensor) and loss.requires_grad and given.get("labels") is not None:
                seen.append("loss")
                self.safely(lambda: tokens.of_loss(loss, given.get("num_items_in_batch"), given["labels"]))

        handle = self.model.register_forward_hook(hook, with_kwargs=True)
        try:
            with _softmax_hooked(self.pairs, seen, tokens):
                yield seen
        finally:
            handle.remove()


@dataclass(frozen=True)
class _Again:
    """A call of `compute_loss`, and the factor of its loss in that of the update."""

    inputs: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    factor: float


def _held_constant(trainer: Any) -> str:
    """The option by which the loss has factors without a gradient; empty if it has none."""
    args = trainer.args
    if getattr(args, "loss_type", None) == "dft":
        return "loss_type = 'dft'"
    return "use_weighting = True" if getattr(args, "use_weighting", False) else ""


class _Tokens:
    """A micro-batch whose loss is about to be computed: hooks its log-probabilities, or the model's loss."""

    def __init__(self, sequences: Sequences, recorder: SupervisedRecorder, step: Step, serial: int) -> None:
        self.sequences, self.recorder, self.step = sequences, recorder, step
        batch = step.batch(serial)
        self.ours, self.mask = batch.tokens.stats.logp, sequences.rollouts.completion_mask.bool()
        keep = step.use(serial, torch.arange(len(self.mask)))
        self.keep = lambda gradient: recorder.safely(lambda: keep(gradient))

    def of_logp(self, logp: Tensor) -> None:
        """The loss differentiates log-probabilities (B, L−1)."""
        theirs = self.sequences.gather(logp.detach().to(self.ours))
        self.step.gaps.append((theirs - self.ours).abs()[self.mask].cpu())
        logp.register_hook(lambda gradient: self.keep(self.sequences.gather(gradient)))

    def of_loss(self, loss: Tensor, count: Any, labels: Tensor) -> None:
        """The trainer's loss is a function of the model's own, −Σ log π / N; N is `count`, or the number of labels."""
        number = float((labels[:, 1:] != IGNORED).sum() if count is None else torch.as_tensor(count))
        tokens = int(self.mask.sum())
        if not number or not tokens:
            loss.register_hook(lambda gradient: self.keep(torch.zeros_like(self.ours)))
            return
        gap = abs(float(loss.detach()) * number + float(self.ours[self.mask].double().sum())) / tokens
        self.step.gaps.append(torch.full((tokens,), gap))
        loss.register_hook(lambda gradient: self.keep(torch.full_like(self.ours, -float(gradient) / number)))


@contextmanager
def _softmax_hooked(pairs: bool, seen: list[str], tokens: _Tokens) -> Iterator[None]:
    """Context that hooks the log-probabilities of the function that TRL's DPO before 1.16 uses."""
    dpo_trainer: Any = import_module("trl.trainer.dpo_trainer") if pairs else None
    original = getattr(dpo_trainer, "selective_log_softmax", None)
    if original is None:
        yield
        return

    def hooked(*args: Any, **kwargs: Any) -> Tensor:
        """The original's log-probabilities; the first that require a gradient are hooked."""
        logp: Tensor = original(*args, **kwargs)
        if seen or not logp.requires_grad:
            return logp
        seen.append("log_probs")
        tokens.recorder.safely(lambda: tokens.of_logp(logp))
        return logp.clone()  # TRL sets prompts to 0 in place, and a view that is written to loses its hook

    dpo_trainer.selective_log_softmax = hooked
    try:
        yield
    finally:
        dpo_trainer.selective_log_softmax = original


def is_trainer(trainer: Any) -> bool:
    """Whether it is a transformers Trainer."""
    return isinstance(trainer, Trainer)


def is_supervised(trainer: Any) -> bool:
    """Whether a Trainer is none of TRL's reinforcement learning."""
    return not any("GRPO" in kind.__name__ for kind in type(trainer).__mro__)
