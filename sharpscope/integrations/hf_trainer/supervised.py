"""The recorder of transformers' Trainer and of TRL's SFTTrainer and DPOTrainer. It changes nothing of the training.

A row of the traces is a sequence: its prompt is what stands before the first token that the loss counts, its completion
the rest. A step is one update.

Where the trainer computes log-probabilities (DPO, and SFT since TRL 1.16), a hook on them gives each token's coefficient
∂L/∂log π. Elsewhere the model's own loss is −Σ log π / N, so that the coefficient is −1/N times the derivative of the
trainer's loss by the model's, which a hook gives (it holds the division by the accumulation steps).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Trainer

from sharpscope import distributed
from sharpscope.config import RunConfig
from sharpscope.errors import UserError
from sharpscope.integrations.hf_trainer.arguments import check_setup, checked_config, common_settings, schedule_notes
from sharpscope.integrations.hf_trainer.base import TrainerRecorder
from sharpscope.integrations.hf_trainer.batches import Batch, same_prompts, unused_tokens
from sharpscope.integrations.hf_trainer.step import Step
from sharpscope.integrations.hf_trainer.trace import Trace
from sharpscope.objective import Method
from sharpscope.policy import Rollouts, TokenStats, completions_of, microbatches
from sharpscope.policy.scoring import Scorer, write_stats
from sharpscope.recording import RolloutBatch, StepTokens
from sharpscope.tasks import Example, Reward

IGNORED = -100
#: Classes of TRL whose loss is a function of log-probabilities that the recorder knows.
_OF_TRL = ("SFTTrainer", "DPOTrainer", "_BaseTrainer", "BaseTrainer")
_KNOWN_INPUTS = {"input_ids", "attention_mask", "labels", "completion_mask", "use_cache", "num_items_in_batch"} | {
    "ref_chosen_logps",
    "ref_rejected_logps",
}


def record(
    trainer: Any,
    out: str | Path = "runs/hf",
    *,
    task: str | None = None,
    recording: Mapping[str, Any] | None = None,
    critical_sharpness: bool = True,
) -> SupervisedRecorder:
    """Record a transformers Trainer, TRL SFTTrainer or TRL DPOTrainer; call it once, before `trainer.train()`.

    Records every token's coefficient in the loss, its statistics from a separate forward pass without dropout, and by
    schedule score norms and attribution. The training is bitwise the same. `sharpscope show`, `tokens`, `spikes`, `analyze`
    and `report` read the folder.

    Args:
        trainer: of a causal language model with labels, in one process or several (DDP, FSDP2), float32 or bf16.
        out: folder of the run; it must not exist or be empty.
        task: the task's name in the trace; None: `sft` or `dpo`.
        recording: fields of the run configuration's part `recording`, such as {"token_gradients_every": 5}. Score norms and
            attribution are measured every 50 steps by default, and at spikes of the gradient norm.
        critical_sharpness: whether to measure the critical sharpness of the optimizer's updates about ten times over the training,
            by a few evaluations of the trainer's `compute_loss` each (see `sharpscope.probes.critical_sharpness`). Metrics and
            counters that the trainer keeps in its attributes are restored.

    Returns:
        The recorder; `recorder.detach()` restores the trainer.

    Raises:
        UserError: the trainer, an option or the folder cannot be used; the message names it.
    """
    kind = check_trainer(trainer)
    if hasattr(trainer, "_sharpscope"):
        raise UserError("record: this trainer is recorded already; call detach() on that recorder first")
    return SupervisedRecorder(trainer, Path(out), kind, task or kind, recording, critical_sharpness)


def check_trainer(trainer: Any) -> str:
    """Check that the trainer can be recorded, before anything is written; return `sft` or `dpo`.

    Raises:
        UserError: the trainer, an option or a setup is not supported; the message names it.
    """
    name = type(trainer).__name__
    if not isinstance(trainer, Trainer):
        raise UserError(f"record: {name} is no transformers.Trainer; give a Trainer, trl.SFTTrainer or trl.DPOTrainer")
    of_trl = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")]
    for kind in of_trl:
        if kind not in _OF_TRL:
            advice = "use sharpscope.integrations.trl.record" if kind == "GRPOTrainer" else "its loss is not known"
            raise UserError(f"record: TRL's {kind} is not recorded here; {advice}")
    check_setup(trainer)
    args = trainer.args
    if getattr(args, "label_smoothing_factor", 0.0) > 0:
        raise UserError(
            f"record: label_smoothing_factor = {args.label_smoothing_factor:g} adds a term over the whole vocabulary, which no "
            "token's log-probability carries; set it to 0"
        )
    if trainer.compute_loss_func is not None:
        raise UserError(
            "record: compute_loss_func replaces the model's loss by one whose coefficients are not known; leave it out"
        )
    for option in ("packing", "padding_free"):
        if getattr(args, option, False):
            raise UserError(f"record: {option} = True puts several sequences into one row; set it to False")
    return "dpo" if "DPOTrainer" in of_trl else "sft"


@dataclass(frozen=True)
class Sequences:
    """A micro-batch of n sequences as rollouts. `columns` (n, T) is the column of each completion token in the trainer's rows."""

    rollouts: Rollouts
    columns: Tensor
    order: Tensor  # (n,) the trainer's row of each row

    def gather(self, values: Tensor) -> Tensor:
        """(n, T) from `values` (B, L−1) of the trainer, in which column j belongs to the token in column j + 1."""
        return values[self.order.to(values.device)].gather(1, (self.columns - 1).clamp(min=0).to(values.device))


def sequences_of(inputs: Mapping[str, Any], pairs: bool, tokenizer: Any) -> Sequences:
    """The trainer's micro-batch as rollouts; the rows of a pair (DPO: chosen, rejected) become adjacent.

    Raises:
        UserError: the batch has inputs or labels that cannot be recorded.
    """
    unknown = sorted(key for key in inputs if key not in _KNOWN_INPUTS)
    if unknown:
        raise UserError(
            f"record: the batch has the input '{unknown[0]}', which probes of the model do not get; leave it out of the dataset"
        )
    ids: Tensor = inputs["input_ids"]
    present = torch.ones_like(ids) if inputs.get("attention_mask") is None else inputs["attention_mask"]
    counted = inputs["completion_mask"].bool() if pairs else inputs["labels"] != IGNORED
    if not pairs and bool((inputs["labels"][counted] != ids[counted]).any()):
        raise UserError(
            "record: labels differ from the input's own tokens; use labels = input_ids, or -100 where not counted"
        )
    n = len(ids)
    order = torch.arange(n).view(2, -1).T.flatten() if pairs else torch.arange(n)
    prompts, completions, flags = [], [], []
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
        prompts.append(kept[:first])
        completions.append(kept[first : last + 1])
        flags.append(loss[first : last + 1])
    own = [ids[row].tolist() for row in order.tolist()]
    before, after = (
        [[tokens[i] for i in row] for row, tokens in zip(part, own, strict=True)] for part in (prompts, completions)
    )
    made = completions_of(before, after, flags, ids.device)
    rollouts = replace(
        made,
        group=made.group // (2 if pairs else 1),
        texts=tokenizer.batch_decode(after, clean_up_tokenization_spaces=False),
    ).with_reward(torch.zeros(n))
    columns = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in completions], batch_first=True)
    return Sequences(rollouts, columns, order)


def own_statistics(scorer: Scorer, rollouts: Rollouts) -> TokenStats:
    """TokenStats (N, T) of this process's rows; `Scorer.statistics` divides rows that all processes have."""
    result = scorer.zeros(rollouts)
    group, prompts = rollouts.group if scorer.share_prompt else None, rollouts.prompt_lengths
    for rows in microbatches(rollouts.lengths, scorer.microbatch_tokens, prompt_lengths=prompts, group=group):
        write_stats(result, rows, scorer.score(rollouts.rows(rows), stats=True).stats)
    return result


class SupervisedRecorder(TrainerRecorder):
    """What `record` returns."""

    wrapped: ClassVar[Mapping[str, str]] = {**TrainerRecorder.wrapped, "compute_loss": "_loss"}

    def __init__(
        self,
        trainer: Any,
        out: Path,
        kind: str,
        task: str,
        recording: Mapping[str, Any] | None,
        critical_sharpness: bool,
    ) -> None:
        super().__init__(trainer, out)
        self.pairs, self.task, self.options = kind == "dpo", task, recording
        held = _held_constant(trainer)
        self.critical = critical_sharpness and not held
        self._kept: list[_Again] = []  # micro-batches of an update whose loss is computed again
        config = self.config_of(max(int(trainer.args.max_steps), 1))
        method = Method(name=kind, clip=None)
        notes = schedule_notes(trainer)
        if critical_sharpness and held:
            notes.append(
                f"critical sharpness is not measured: {held} multiplies the loss by factors that its gradient treats as constants"
            )
        if self.pairs:
            notes.append(
                f"DPO with beta = {trainer.beta:g} and the loss {trainer.args.loss_type}; group: pair, first the chosen"
            )
        self.trace = Trace(config, method, notes, self.policy, trainer, None)
        self.scorer = Scorer(self.model, 1.0, config.update.microbatch_tokens, share_prompt=False, compute=self.compute)
        self.attach()

    def config_of(self, updates: int) -> RunConfig:
        """The trainer's arguments as a run's configuration."""
        off = {rule: {"action": "off"} for rule in ("no_variance", "truncation", "entropy_collapse")}
        settings = common_settings(self.trainer, self.run_dir, self.task, updates)
        settings["rollout"] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        # Nothing is generated here, so that a step takes less time than in GRPO and probes weigh more.
        recording = {"heldout_influence_every": 0, "budget": None, "token_gradients_every": 50, **(self.options or {})}
        probes = {"preset": "light", "functionals": []} if self.critical else {"preset": "off"}
        return checked_config({**settings, "health": off, "recording": recording, "probes": probes})

    def whole_batches(self) -> bool:
        """An update uses whole batches."""
        return True

    def check_observed(self, columns: Mapping[str, Tensor], tokens: StepTokens) -> None:
        """Report shares of the squared gradient norm that do not sum to 1, where all groups were measured."""
        if "attribution" in columns and not bool((columns["inclusion_probability"] < 1).any()):
            self.trace.warn_attribution(float(columns["attribution"].double().nansum()))

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def _loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not self.recording or not self.model.training or not torch.is_grad_enabled():
            return self._original["compute_loss"](model, inputs, *args, **kwargs)
        started = time.perf_counter()
        keep = self._open_batch(inputs)
        again = dict(inputs) if self.observers.surface.update_due(self.trace.step) else None
        self._step.seconds["recording_s"] += time.perf_counter() - started
        with self._watched(keep) as seen:
            loss = self._original["compute_loss"](model, inputs, *args, **kwargs)
        if not seen:
            raise UserError(
                f"record: the loss of {type(self.trainer).__name__} uses neither the model's loss nor its log-probabilities, so "
                "it cannot be recorded"
            )
        if again is not None:
            # The gradient that reaches the loss holds the division by the accumulation steps.
            value = loss[0] if isinstance(loss, tuple) else loss
            value.register_hook(lambda factor: self._kept.append(_Again(again, args, kwargs, float(factor))))
        return loss

    def observe_update(self) -> None:
        """Measure the critical sharpness of the update, if it is due."""
        kept, self._kept = self._kept, []
        loss, norm, factor = self._step.gradient
        if not kept or not math.isfinite(norm):
            return
        start = self._loss_of(kept)
        # With dropout the gradient is of another loss, so its slope is not that of the loss computed again.
        same = math.isclose(start, loss, rel_tol=1e-2)
        self._observer.critical(
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

    def _open_batch(self, inputs: dict[str, Any]) -> _Tokens:
        """Add the micro-batch to the step: measure its tokens' statistics before the update."""
        self._serial += 1
        sequences = sequences_of(inputs, self.pairs, self.policy.tokenizer)
        rollouts, n = sequences.rollouts, len(sequences.rollouts)
        prompts = self.policy.tokenizer.batch_decode(
            [ids[seen.bool()].tolist() for ids, seen in _prompts(rollouts)], clean_up_tokenization_spaces=False
        )
        parts = [{"chosen": 1.0 - row % 2} if self.pairs else {} for row in range(n)]
        examples = [Example(text, "", {}) for text in prompts[:: 2 if self.pairs else 1]]
        rewards = [Reward(0.0, part, False) for part in parts]
        batch = RolloutBatch(examples, rollouts, rewards, torch.zeros(n, dtype=torch.float64), None)
        scorer = replace(self.scorer, share_prompt=self.pairs and same_prompts(rollouts, 2))
        with self.whole():
            stats = own_statistics(scorer, rollouts)
        tokens = unused_tokens(stats, batch.advantage, None)
        self._step.batches.append(Batch(self._serial, batch, tokens, False))
        rows = torch.arange(n)
        return _Tokens(sequences, self._step.use(self._serial, rows), self._step.gaps, stats.logp)

    def _gradient_done(self) -> None:
        """Run the probes that are due, on the rows of all processes."""
        if distributed.world_size() > 1:
            self._step = self._gathered()
        super()._gradient_done()

    def _gathered(self) -> Step:
        """The step with the rows of all processes, the same in each; gradients are their average, so coefficients are divided."""
        own, device, count = self._step, self.policy.device, distributed.world_size()
        cpu = torch.device("cpu")
        batches = [
            replace(b, rollout_batch=replace(b.rollout_batch, rollouts=b.rollout_batch.rollouts.to(cpu)))
            for b in own.batches
        ]
        losses = [float(loss) / count for loss in own.losses]
        whole = Step(micro=own.micro, seconds=own.seconds)
        for origin, (theirs, pending, gaps, lost) in enumerate(
            distributed.gather((batches, own.pending, own.gaps, losses))
        ):
            for batch in theirs:
                rollouts = batch.rollout_batch.rollouts.to(device)
                part = replace(batch.rollout_batch, rollouts=rollouts)
                whole.batches.append(replace(batch, serial=batch.serial * count + origin, rollout_batch=part))
            whole.pending += [replace(use.divided(count), serial=use.serial * count + origin) for use in pending]
            whole.gaps += gaps
            whole.losses += [torch.tensor(loss) for loss in lost]
        return whole

    @contextmanager
    def _watched(self, tokens: _Tokens) -> Iterator[list[str]]:
        """Context that hooks the model's first log-probabilities or loss with a gradient; yields which."""
        seen: list[str] = []

        def look(module: Any, args: Any, given: dict[str, Any], output: Any) -> None:
            """Hook the first log-probabilities or loss of the model that requires a gradient."""
            if seen or not torch.is_grad_enabled():
                return
            logp, loss = getattr(output, "log_probs", None), getattr(output, "loss", None)
            if isinstance(logp, Tensor) and logp.requires_grad:
                seen.append("log_probs")
                tokens.of_logp(logp)
            elif isinstance(loss, Tensor) and loss.requires_grad and given.get("labels") is not None:
                seen.append("loss")
                tokens.of_loss(loss, given.get("num_items_in_batch"), given["labels"])

        handle = self.model.register_forward_hook(look, with_kwargs=True)
        try:
            with _softmax_seen(self.pairs, seen, tokens):
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
    """The option of TRL whose factors of the loss depend on the weights and have no gradient; empty if there is none."""
    if getattr(trainer.args, "loss_type", None) == "dft":
        return "loss_type = dft"
    return "use_weighting = True" if getattr(trainer.args, "use_weighting", False) else ""


@dataclass(frozen=True)
class _Tokens:
    """The tokens of one micro-batch: where their coefficients go, and the gaps to our log-probabilities `ours` (n, T)."""

    sequences: Sequences
    keep: Callable[[Tensor], None]
    gaps: list[Tensor]
    ours: Tensor

    @property
    def mask(self) -> Tensor:
        """(n, T) bool, tokens in the loss."""
        return self.sequences.rollouts.completion_mask.bool()

    def of_logp(self, logp: Tensor) -> None:
        """The trainer's loss differentiates these log-probabilities (B, L−1)."""
        theirs = self.sequences.gather(logp.detach().to(self.ours))
        self.gaps.append((theirs - self.ours).abs()[self.mask].cpu())
        logp.register_hook(lambda gradient: self.keep(self.sequences.gather(gradient)))

    def of_loss(self, loss: Tensor, count: Any, labels: Tensor) -> None:
        """The trainer's loss is a function of the model's own, −Σ log π / N; N is `count`, or the number of labels."""
        number = float((labels[:, 1:] != IGNORED).sum() if count is None else torch.as_tensor(count))
        tokens = int(self.mask.sum())
        if not number or not tokens:
            loss.register_hook(lambda gradient: self.keep(torch.zeros_like(self.ours)))
            return
        gap = abs(float(loss.detach()) * number + float(self.ours[self.mask].double().sum())) / tokens
        self.gaps.append(torch.full((tokens,), gap))
        loss.register_hook(lambda gradient: self.keep(torch.full_like(self.ours, -float(gradient) / number)))


@contextmanager
def _softmax_seen(pairs: bool, seen: list[str], tokens: _Tokens) -> Iterator[None]:
    """Context that hooks the log-probabilities of the function that TRL's DPO before 1.16 uses."""
    if not pairs:
        yield
        return
    dpo_trainer: Any = import_module("trl.trainer.dpo_trainer")
    original = getattr(dpo_trainer, "selective_log_softmax", None)
    if original is None:
        yield
        return

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        """The original's log-probabilities; the first that require a gradient are hooked."""
        logp: Tensor = original(*args, **kwargs)
        if seen or not logp.requires_grad:
            return logp
        seen.append("log_probs")
        tokens.of_logp(logp)
        return logp.clone()  # TRL sets prompts to 0 in place, and a view that is written to loses its hook

    dpo_trainer.selective_log_softmax = watched
    try:
        yield
    finally:
        dpo_trainer.selective_log_softmax = original


def _prompts(rollouts: Rollouts) -> Iterator[tuple[Tensor, Tensor]]:
    """Prompt columns of ids and attention mask, row by row."""
    width = rollouts.prompt_width
    return zip(rollouts.input_ids[:, :width], rollouts.attention_mask[:, :width], strict=True)
