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
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from sharpscope import distributed
from sharpscope.causes import verdict
from sharpscope.errors import UserError
from sharpscope.integrations.trainer import Arguments, Trainer
from sharpscope.policy.guard import guarded
from sharpscope.policy.loading import has_adapters
from sharpscope.policy.sharding import reshard
from sharpscope.recording.capture import sequences_of
from sharpscope.recording.core import Options, Recorder
from sharpscope.recording.guard import ended_by
from sharpscope.recording.measurements import ClippedUpdate
from sharpscope.recording.observers import StepObserver
from sharpscope.recording.recorded_model import dropout_of, original_forward
from sharpscope.recording.schedule import StepCost
from sharpscope.rules.table import OF_ROLLOUTS
from sharpscope.traces import load_run

IGNORED = -100
LABELS_DIFFER = "labels differ from the input's own tokens"
_LAUNCHES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
_EXCHANGES = ("gather", "gather_for_metrics", "reduce")
#: Modules whose losses `SupervisedRecorder` knows.
_KNOWN_LOSSES = ("transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer")
_KNOWN_INPUTS = {
    "input_ids",
    "attention_mask",
    "labels",
    "completion_mask",
    "use_cache",
    "num_items_in_batch",
} | {
    "ref_chosen_logps",
    "ref_rejected_logps",
}

Loss = Tensor | tuple[Tensor, object]
"""What `compute_loss` gives: the loss, or also the model's outputs."""


class TrainerOptions(Options, total=False):
    """What the recorder of a trainer takes beyond the trainer and the folder."""

    verdict_after: int  # steps after which the training ends with a verdict; 0: it does not


class TrainerRecorder(Recorder):
    """Records a transformers Trainer by wrapping some of its methods and following its events."""

    # Method of the trainer -> method of the recorder that replaces it.
    wrapped: ClassVar[Mapping[str, str]] = {"train": "_train", "training_step": "_training_step"}
    fields = "trl"

    def __init__(
        self,
        trainer: Trainer,
        out: str | Path,
        label: str,
        notes: Sequence[str],
        *,
        verdict_after: int = 0,
        **options: Unpack[Options],
    ) -> None:
        self.trainer, args, name = trainer, trainer.args, type(trainer).__name__
        arguments = json.loads(json.dumps(args.to_dict(), default=str))
        about = {"name": name, "loss_type": arguments.get("loss_type"), "arguments": arguments}
        self.info = {"method": label, "notes": [f"recorded from {name}", *notes], "trainer": about}
        options["lr"], options["seed"] = float(args.learning_rate), int(args.seed)
        options["max_grad_norm"] = float(args.max_grad_norm) or math.inf
        if trainer.accelerator.mixed_precision == "bf16":
            options["compute"] = torch.bfloat16
        super().__init__(
            trainer.accelerator.unwrap_model(trainer.model),
            getattr(trainer.processing_class, "tokenizer", trainer.processing_class),
            out,
            **options,
        )
        self.verdict_after, self._why = verdict_after, "all steps done"
        # losses of the micro-batches of the update that is measured
        self._kept: list[Callable[[], Tensor | float]] = []
        self._instance = {
            name: vars(trainer)[name] for name in self.wrapped if name in vars(trainer)
        }
        self._original = {name: getattr(trainer, name) for name in self.wrapped}
        for name, original in self.wrapped.items():
            setattr(trainer, name, getattr(self, original))
        self.callback = TrainerCallback()
        vars(self.callback)["on_train_begin"] = lambda *_, **__: self._train_begins()
        # From a checkpoint a resumed training goes on.
        vars(self.callback)["on_save"] = lambda *_, **__: self.safely(self.flush)
        trainer.add_callback(self.callback)
        trainer._sharpscope = self

    def identity(self) -> dict[str, object]:
        """A resumed training has the same output_dir, in which its checkpoints are."""
        folder = Path(str(self.trainer.args.output_dir)).resolve()
        return {**super().identity(), "output_dir": str(folder)}

    def detach(self) -> None:
        """Restore the trainer and keep what was recorded. During training, the run ends as interrupted."""
        self.stop("interrupted", "the recorder was detached")
        self.unhook()

    def unhook(self) -> None:
        """Restore the trainer."""
        trainer = self.trainer
        if getattr(trainer, "_sharpscope", None) is self:
            for name in self.wrapped:
                delattr(trainer, name)
            vars(trainer).update(self._instance)
            trainer.remove_callback(self.callback)
            del trainer._sharpscope
        super().unhook()

    def _train(self, *args: object, **kwargs: object) -> object:
        try:
            result = self._original["train"](*args, **kwargs)
        except BaseException as error:
            self.end(partial(self.stop, *ended_by(error)))
            raise
        self.end(partial(self.stop, "finished", self._why))
        if self.verdict_after and distributed.is_rank_zero():
            sys.stdout.write("\n".join(verdict(load_run(self.run_dir)).lines()) + "\n")
        return result

    def halt(self, why: str) -> None:
        """End the training after the present step."""
        self._why = why
        self.trainer.control.should_training_stop = True

    def close_step(self) -> None:
        """Write the step's rows; the last step before a verdict ends the training."""
        super().close_step()
        if self.verdict_after and self.step_number > self.verdict_after:
            self.halt(f"steps={self.verdict_after} are done")

    def _train_begins(self) -> None:
        self.recording = True
        self.together(self.start)

    def start(self) -> None:
        """Begin the recording: the trainer knows the length of the training and has its optimizer."""
        trainer, accumulation = self.trainer, self.trainer.args.gradient_accumulation_steps
        optimizer = trainer.optimizer
        steps = math.ceil(
            int(trainer.state.max_steps) * accumulation / max(self.period, accumulation)
        )
        self.begin(optimizer, steps=steps, done_updates=int(trainer.state.global_step))

    def _training_step(self, *args: object, **kwargs: object) -> Tensor:
        started = time.perf_counter()
        before = sum(self.capture.seconds.values())
        loss: Tensor = self._original["training_step"](*args, **kwargs)
        self.safely(lambda: self._micro_step_done(loss, started, before))
        if self.trainer.accelerator.sync_gradients:
            self.together(self.gradient_done)
        return loss

    def _micro_step_done(self, loss: Tensor, started: float, before: float) -> None:
        step = self.capture  # what was generated and recorded meanwhile is no training
        step.seconds["training_s"] += (
            time.perf_counter() - started - (sum(step.seconds.values()) - before)
        )
        step.micro += 1
        step.losses.append(loss.detach())

    def loss_again(self) -> float:
        """The trainer's loss of the kept micro-batches at the present weights, without dropout, averaged over the processes.

        The trainer's metrics and counters are restored. It exchanges nothing in it but, for top_entropy_quantile, entropies, so
        that no process waits for one whose loss raises an error; with FSDP2 forward passes exchange weights.
        """
        trainer, model, accelerator = self.trainer, self.model, vars(self.trainer.accelerator)
        distributed.gather(None)
        before, kept = dict(vars(trainer)), dict(accelerator)
        metrics = copy.deepcopy(before.get("_metrics"))
        # otherwise it is for metrics alone
        if getattr(trainer, "top_entropy_quantile", 1.0) == 1.0:
            accelerator |= dict.fromkeys(_EXCHANGES, lambda values, *_, **__: values)
        try:
            with guarded(model), original_forward(model), torch.no_grad():
                # of the model alone: TRL's normalizers of training, dropout off
                model.training = True
                total = sum(float(loss()) for loss in self._kept)
        finally:
            # else the next update's forward pass would find weights from before this one
            reshard(model)
            for name in set(accelerator) - set(kept):
                del accelerator[name]
            accelerator.update(kept)
            vars(trainer).update(before)
            if metrics is not None:
                trainer._metrics = metrics
        return distributed.sum_values(total) / distributed.world_size()

    def _keep_loss(self, loss: Loss, compute: Callable[[], Loss]) -> None:
        """Keep a micro-batch whose loss `compute` gives again, where the critical sharpness of its update is due."""
        if not (self.recording and self.observers.critical_due(self.step_number)):
            return

        def again(factor: float) -> float:
            """The loss at the present weights; the gradient that reaches it, `factor`, holds the division by the micro-steps."""
            value = compute()
            return factor * float(value[0] if isinstance(value, tuple) else value)

        value = loss[0] if isinstance(loss, tuple) else loss
        value.register_hook(lambda factor: self._kept.append(partial(again, float(factor))))

    def observe_update(self, observer: StepObserver) -> None:
        """Measure the critical sharpness of a step's first update."""
        if self._kept:
            start, loss = self.loss_again(), self.capture.loss
            # With dropout the gradient is of another loss, so its slope is not that of the loss computed again.
            same = (
                not dropout_of(self.model)
                if self.cost.generated
                else math.isclose(start, loss, rel_tol=1e-2)
            )
            observer.critical(
                ClippedUpdate(
                    model=self.model,
                    optimizer=self.optimizers[0],
                    loss_fn=self.loss_again,
                    start=start,
                    clip_factor=self.capture.clip_factor if same else None,
                )
            )
        self._kept = []


def moved_by(labels: Tensor, ids: Tensor) -> int:
    """By how many positions labels (n, L) are the input's tokens moved to the left (−: right); 0 if they are not."""
    counted = labels != IGNORED
    for shift in (1, -1, 2, -2):
        inside = counted[:, max(0, -shift) : labels.shape[1] - max(0, shift)]
        theirs = labels[:, max(0, -shift) : labels.shape[1] - max(0, shift)]
        ours = ids[:, max(0, shift) : ids.shape[1] - max(0, -shift)]
        if bool(inside.any()) and bool((theirs == ours)[inside].all()):
            return shift
    return 0


def rows_of_update(args: Arguments) -> int:
    """Rows of the data set in an update, over all processes."""
    return int(args.train_batch_size * args.gradient_accumulation_steps * distributed.world_size())


def refuse(*cases: tuple[object, str]) -> None:
    """Raise UserError with the message of the first case that is true."""
    for wrong, message in cases:
        if wrong:
            raise UserError(f"record: {message}")


def check_setup(trainer: Trainer) -> None:
    """Check the trainer's class and launch, and that its loss does not hide the log-probabilities."""
    args, accelerator, name = trainer.args, trainer.accelerator, type(trainer).__name__
    kind = str(accelerator.distributed_type.value)
    unsloth = name.startswith("Unsloth") or any(
        "unsloth" in each.__module__ for each in type(trainer).__mro__
    )
    liger = getattr(trainer, "use_liger_kernel", False) or getattr(args, "use_liger_kernel", False)
    hidden = "computes the loss without per-token log-probabilities"
    refuse(
        (
            hasattr(trainer, "_sharpscope"),
            "this trainer is recorded already; call detach() on that recorder first",
        ),
        (
            unsloth,
            f"{name} computes its loss without per-token log-probabilities; use TRL's own class",
        ),
        (liger, f"use_liger_kernel = True {hidden}; set it to False"),
        (
            kind == "DEEPSPEED",
            "DeepSpeed is not supported; start the trainer without it (DDP and FSDP2 are recorded)",
        ),
    )
    if kind == "FSDP":
        plugin, optim = accelerator.state.fsdp_plugin, str(getattr(args.optim, "value", args.optim))
        offloaded = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
        version, other = plugin.fsdp_version, "set gradient_checkpointing = True in its place"
        parallel = getattr(accelerator.state, "parallelism_config", None) is not None
        refuse(
            (
                not accelerator.is_fsdp2,
                f"fsdp_version = {version} is not supported; set it to 2, or use DDP",
            ),
            (
                offloaded,
                "FSDP with weights offloaded to the CPU is not supported; set offload_params to False",
            ),
            (
                plugin.activation_checkpointing,
                f"FSDP's activation_checkpointing renames layers; {other}",
            ),
            (parallel, "FSDP with a parallelism_config; leave it out"),
            (
                has_adapters(accelerator.unwrap_model(trainer.model)),
                "FSDP with adapters (peft); use DDP",
            ),
            (
                not optim.startswith("adamw"),
                f"optim = {optim} with FSDP is not supported; use adamw_torch",
            ),
        )
    refuse(
        (
            args.n_gpu > 1,
            f"{args.n_gpu} GPUs in one process (DataParallel); set CUDA_VISIBLE_DEVICES to one of them",
        ),
        (
            kind not in _LAUNCHES,
            f"distributed_type {kind} is not supported; start one process, or use DDP or FSDP2",
        ),
        (args.fp16, "fp16 = True scales the loss by a changing factor; use bf16 or float32"),
    )


def known_loss(trainer: Trainer) -> str:
    """`sft` or `dpo` where the trainer's loss is one that `SupervisedRecorder` knows, else empty.

    Raises:
        UserError: it cannot be recorded.
    """
    check_setup(trainer)
    args, kinds = trainer.args, [kind.__name__ for kind in type(trainer).__mro__]
    smoothing = float(getattr(args, "label_smoothing_factor", 0.0))
    refuse(
        (
            smoothing > 0,
            f"label_smoothing_factor = {smoothing:g} adds a term that no token has; set it to 0",
        ),
    )
    losses = [getattr(type(trainer), name, None) for name in ("compute_loss", "_compute_loss")]
    own = any(loss and loss.__module__ not in _KNOWN_LOSSES for loss in losses)
    several = any(getattr(args, name, False) for name in ("packing", "padding_free"))
    if own or several or trainer.compute_loss_func is not None:
        return ""
    return "dpo" if "DPOTrainer" in kinds else "sft"


@dataclass
class _Found:
    """What the gradient of a loss reaches first."""

    kind: str = ""  # log_probs, loss; empty: neither was found
    values: Tensor | None = None
    labels: float = 0.0  # the number N that the model's loss is divided by
    reference: Tensor | None = None  # log-probabilities of the reference's pass
    keep: Callable[[Tensor], object] = lambda _: None  # is called with the gradient


class SupervisedRecorder(TrainerRecorder):
    """What `record` returns for a transformers Trainer, an SFTTrainer or a DPOTrainer."""

    wrapped: ClassVar[Mapping[str, str]] = {**TrainerRecorder.wrapped, "compute_loss": "_loss"}
    given = frozenset({"loss", "timing"})
    rules: Mapping[str, object] = {rule: {"action": "off"} for rule in OF_ROLLOUTS}

    def __init__(
        self, trainer: Trainer, out: str | Path, kind: str, **options: Unpack[TrainerOptions]
    ) -> None:
        # Options by which the loss has factors without a gradient.
        factors = {"loss_type": "dft", "use_weighting": True}
        held = [
            f"{name} = {value!r}"
            for name, value in factors.items()
            if getattr(trainer.args, name, None) == value
        ]
        self.pairs = kind == "dpo"
        reference = self.pairs and not getattr(trainer.args, "precompute_ref_log_probs", False)
        self.cost = StepCost(
            rows=rows_of_update(trainer.args) * (2 if self.pairs else 1), reference=reference
        )
        notes = (
            [f"DPO with beta = {trainer.beta:g}; group: pair, first the chosen"]
            if self.pairs
            else []
        )
        if held and options["critical"]:
            options["critical"] = 0
            why = f"{held[0]} multiplies the loss by factors that its gradient treats as constants"
            notes.append(f"critical sharpness is not measured: {why}")
        super().__init__(trainer, out, kind, notes, **options)

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def _loss(
        self, model: nn.Module, inputs: dict[str, Tensor], *args: object, **kwargs: object
    ) -> Loss:
        compute = self._original["compute_loss"]
        if not self.recording or not self.model.training or not torch.is_grad_enabled():
            return compute(model, inputs, *args, **kwargs)
        given = dict(inputs)  # some trainers take entries out
        with self._watched() as found:
            loss = compute(model, inputs, *args, **kwargs)
        started = time.perf_counter()
        self.in_step(lambda: self._tokens(given, found))
        self.capture.seconds["recording_s"] += time.perf_counter() - started
        self._keep_loss(loss, lambda: compute(self.model, dict(given), *args, **kwargs))
        return loss

    def _tokens(self, inputs: Mapping[str, Tensor], found: _Found) -> None:
        """Add the micro-batch to the step, and take the coefficients of its tokens from what was found in its loss."""
        text = f"the loss of {type(self.trainer).__name__} uses neither the model's loss nor its log-probabilities"
        odd = ", ".join(f"'{key}'" for key in sorted(set(inputs) - _KNOWN_INPUTS))
        refuse(
            (not found.kind, text), (odd, f"the batch has the input {odd}, which probes do not get")
        )
        assert found.values is not None
        ids = inputs["input_ids"]
        present = (
            torch.ones_like(ids)
            if inputs.get("attention_mask") is None
            else inputs["attention_mask"]
        )
        counted = inputs["completion_mask"].bool() if self.pairs else inputs["labels"] != IGNORED
        if not self.pairs and bool((inputs["labels"][counted] != ids[counted]).any()):
            shift = moved_by(inputs["labels"], ids)
            text = f"labels are the input's tokens moved by {shift}" if shift else LABELS_DIFFER
            raise UserError(f"record: {text}")
        self.check_layout(ids, present, counted)
        sequences = sequences_of(ids, present, counted, self.policy.tokenizer, pairs=self.pairs)
        rollouts, n = sequences.rollouts, len(sequences.rollouts)
        parts = [{"chosen": 1.0 - row % 2} if self.pairs else {} for row in range(n)]
        made = self.open_batch(rollouts, torch.zeros(n, dtype=torch.float64), parts=parts)
        ours, mask = made.tokens.stats.logp, rollouts.completion_mask.bool()
        known = {}
        if found.reference is not None:  # the loss has no KL term of its own
            reference = torch.where(mask, sequences.gather(found.reference.to(ours)), 0.0)
            known = {"ref_logp": reference, "kl_share": torch.zeros_like(reference)}
        keep = self.capture.use(made.serial, torch.arange(n), known)
        tokens, number = int(mask.sum()), found.labels
        if found.kind == "log_probs":
            self.capture.gaps.append(
                (sequences.gather(found.values.to(ours)) - ours).abs()[mask].cpu()
            )
        elif number and tokens:  # the model's loss is −Σ log π / N
            gap = abs(float(found.values) * number + float(ours[mask].double().sum())) / tokens
            self.capture.gaps.append(torch.full((tokens,), gap))

        def coefficients(gradient: Tensor) -> Tensor:
            """(n, T) ∂L/∂log π from the gradient that reaches the log-probabilities or the model's loss."""
            if found.kind == "log_probs":
                return sequences.gather(gradient)
            return torch.full_like(ours, -float(gradient) / number if number else 0.0)

        found.keep = lambda gradient: self.safely(lambda: keep(coefficients(gradient)))

    @contextmanager
    def _watched(self) -> Iterator[_Found]:
        """Context that hooks what the gradient of the loss reaches first: the model's log-probabilities, or its own loss.

        Gives an object with `kind`, empty if neither was found; `values`; `labels`, the number N that the model's loss is divided by;
        `reference`, the log-probabilities of the reference's pass, None without one; and `keep`, which is called with the gradient.
        """
        found = _Found()

        def hook(_: object, __: object, given: Mapping[str, Tensor], output: object) -> None:
            """Hook the first output of the model that requires a gradient."""
            logp, labels, count = (
                getattr(output, "log_probs", None),
                given.get("labels"),
                given.get("num_items_in_batch"),
            )
            values = getattr(output, "loss", None) if logp is None and labels is not None else logp
            if found.kind or not isinstance(values, Tensor) or not values.requires_grad:
                return
            found.kind, found.values = "loss" if logp is None else "log_probs", values.detach()
            if labels is not None:
                found.labels = float((labels[:, 1:] != IGNORED).sum() if count is None else count)
            values.register_hook(lambda gradient: found.keep(gradient))  # noqa: PLW0108 - `keep` is set later

        def see(_: object, __: object, output: object) -> None:
            """Keep what the reference gives: a model of its own, or this one without its adapters."""
            logp = getattr(output, "log_probs", None)
            if isinstance(logp, Tensor) and not logp.requires_grad:
                found.reference = logp

        handles = [self.model.register_forward_hook(hook, with_kwargs=True)]
        if self.pairs:
            reference = getattr(self.trainer, "ref_model", None)
            asked = self.model if reference is None else reference
            handles.append(asked.register_forward_hook(see))
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()
