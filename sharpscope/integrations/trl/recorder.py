"""The recorder of a GRPOTrainer, which changes nothing but the token weights, if asked for.

TRL shuffles a batch after scoring it, so each row carries its number (`ROW`) through shuffle and split, and what the loss
does with it is recorded under that number. With several processes the number is that of the row in the batch of all of them,
which every process holds; each records its own rows and gathers the others'. A step is the fewest micro-steps that are whole
batches and whole updates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Trainer

from sharpscope import distributed
from sharpscope.config import RunConfig
from sharpscope.config.token_weights import UniformWeight
from sharpscope.errors import UserError
from sharpscope.integrations import hf_trainer
from sharpscope.integrations.hf_trainer import Batch, Trace, TrainerRecorder, same_prompts, unused_tokens
from sharpscope.integrations.trl import arguments
from sharpscope.integrations.trl.asynchronous import AsyncRecorder, check_asynchronous
from sharpscope.integrations.trl.batches import RewardScores, examples_of, rewards_of, rollouts_of
from sharpscope.integrations.trl.loss import token_loss
from sharpscope.objective import Method, calibrate, prepare
from sharpscope.policy import join_rollouts
from sharpscope.policy.scoring import Scorer
from sharpscope.recording import RolloutBatch, step_tensors
from sharpscope.seeds import generator

ROW = "sharpscope_row"  # (n, 2): serial number of the batch, row in it


def positive(total: float) -> bool:
    """Whether a total reward counts as correct by default: it is above 0."""
    return total > 0


def record(
    trainer: Any,
    out: str | Path = "runs/trl",
    *,
    weights: str | Method | None = None,
    shaping: str | None = None,
    task: str | None = None,
    correct: Callable[[float], bool] = positive,
    recording: Mapping[str, Any] | None = None,
    critical_sharpness: bool = True,
) -> TrainerRecorder:
    """Record a TRL GRPOTrainer, AsyncGRPOTrainer, SFTTrainer or DPOTrainer; call it once, before `trainer.train()`.

    AsyncGRPOTrainer has no weights and no critical sharpness, SFTTrainer and DPOTrainer have no rewards and no weights; see
    `sharpscope.integrations.hf_trainer.record`.

    Every token's coefficient in the loss comes from a hook on the log-probabilities inside TRL's own loss, its statistics
    from a separate forward pass without dropout; score norms and attribution are measured by schedule. Without `weights` the
    training is bitwise the same. `sharpscope analyze`, `show` and `tokens` read the folder.

    Args:
        trainer: a trl.GRPOTrainer, SFTTrainer or DPOTrainer in one process or several (DDP, FSDP2), float32 or bf16. With several, every
            process calls this function.
        out: folder of the run; it must not exist or be empty.
        weights: a method, or the name of one, whose token weights multiply TRL's surrogate (`grpo-sg`, `ar`, a control …),
            through per-token advantages; None changes nothing.
        shaping: preset of a sigmoid weight, `paper` or `calibrated`; None: `paper`.
        task: the task's name in the trace; None: `trl`, `sft` or `dpo`.
        correct: which total rewards count as correct (default: above 0), for accuracy.
        recording: fields of the run configuration's part `recording`, such as {"token_gradients_every": 5}.
        critical_sharpness: whether to measure the critical sharpness of the trainer's updates about ten times over the training, by
            a few evaluations of its loss each (see `sharpscope.probes.critical_sharpness`).

    Returns:
        The recorder; `recorder.detach()` restores the trainer.

    Raises:
        UserError: the trainer, an option or the folder cannot be used; the message names it.
    """
    arguments.check_version()
    if isinstance(trainer, Trainer) and arguments.is_supervised(trainer):
        if weights is not None or shaping is not None:
            raise UserError(f"weights: {type(trainer).__name__} has no surrogate that they multiply; leave them out")
        return hf_trainer.record(trainer, out, task=task, recording=recording, critical_sharpness=critical_sharpness)
    asynchronous = arguments.is_asynchronous(trainer)
    (check_asynchronous if asynchronous else arguments.check_trainer)(trainer)
    if hasattr(trainer, "_sharpscope"):
        raise UserError("record: this trainer is recorded already; call detach() on that recorder first")
    if asynchronous:
        if weights is not None or shaping is not None:
            raise UserError("weights: not supported for AsyncGRPOTrainer; leave them out, or use GRPOTrainer")
        return AsyncRecorder(trainer, Path(out), task or "trl", correct, recording)
    method = None
    if weights is not None:
        arguments.check_weightable(trainer)
        method = arguments.token_weights_of(weights)
        method = method.with_preset("auto", shaping or "paper")
    elif shaping is not None:
        raise UserError(f"shaping = {shaping!r}: belongs to weights, which are not given; add weights='grpo-sg'")
    return Recorder(trainer, Path(out), method, task or "trl", correct, recording, critical_sharpness)


class Recorder(TrainerRecorder):
    """What `record` returns for a GRPOTrainer."""

    wrapped: ClassVar[Mapping[str, str]] = {
        **TrainerRecorder.wrapped,
        "_generate_and_score_completions": "_generate",
        "_calculate_rewards": "_rewards",
        "_compute_loss": "_loss",
        "_get_per_token_logps_and_entropies": "_logps",
    }

    def __init__(
        self,
        trainer: Any,
        out: Path,
        weights: Method | None,
        task: str,
        correct: Callable[[float], bool],
        recording: Mapping[str, Any] | None,
        critical_sharpness: bool,
    ) -> None:
        super().__init__(trainer, out)
        self.weights, self.correct, self.task, self.options = weights, correct, task, recording
        self.critical = critical_sharpness
        self.group_size = int(trainer.num_generations)
        self.method, notes = arguments.trl_method(trainer, weights)
        notes += arguments.sampler_notes(trainer)
        config = self.config_of(max(int(trainer.args.max_steps), 1))
        self.trace = Trace(config, self.method, notes, self.policy, trainer, correct)
        self.scorer = Scorer(
            self.model,
            config.rollout.temperature,
            config.update.microbatch_tokens,
            share_prompt=True,
            compute=self.compute,
        )
        self._current: dict[str, Any] | None = None
        self._kept: list[
            dict[str, Any]
        ] = []  # micro-batches of the step's first update, where its loss is evaluated again
        self._scored: RewardScores | None = None
        self.attach()

    def config_of(self, updates: int) -> RunConfig:
        """TRL's arguments as a run's configuration."""
        return arguments.run_config(
            self.trainer, self.run_dir, self.task, self.method, self.options, updates, self.critical
        )

    def whole_batches(self) -> bool:
        """Whether the micro-steps so far have used the batch of completions as often as TRL does."""
        return self._step.micro % arguments.generate_every(self.trainer) == 0

    # -- one batch of completions ------------------------------------------------------------------------------------

    def _rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = self._original["_calculate_rewards"](*args, **kwargs)
        ids = kwargs["completion_ids_list"] if "completion_ids_list" in kwargs else args[3]
        self._scored = RewardScores(rewards.detach().cpu(), [list(row) for row in ids])
        return rewards

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
        """Add the new batch of all processes: measure π_old on it, number its rows and, if asked for, weight their tokens."""
        advantage = output["advantages"]
        if advantage.dim() != 1:
            raise UserError(
                f"record: this trainer's advantages have shape {tuple(advantage.shape)}; recording needs one a completion"
            )
        self._serial += 1
        tokenizer, device = self.policy.tokenizer, advantage.device
        # TRL has gathered the rewards, in the order of processes; rows and advantages are each process's own.
        own = torch.arange(len(advantage), device=device) + distributed.rank() * len(advantage)
        part = rollouts_of(output, scored, total[own.to(total.device)], tokenizer, self.policy.eos_ids)
        parts = distributed.gather((part.to(torch.device("cpu")), advantage.detach().cpu()))
        rollouts = join_rollouts(*(each for each, _ in parts)).to(device)
        rollouts = replace(rollouts, group=torch.arange(len(rollouts), device=device) // self.group_size)
        rewards = rewards_of(scored, self.trainer.reward_func_names, total, self.correct)
        examples = examples_of(rollouts, self.group_size, tokenizer)
        every = torch.cat([each for _, each in parts]).to(device)
        batch = RolloutBatch(examples, rollouts, rewards, every, None)
        scorer = replace(self.scorer, share_prompt=same_prompts(rollouts, self.group_size))
        with self.whole():
            stats = scorer.statistics(rollouts)
        plan = None
        if self.weights is not None:
            plan = self._plan(batch, stats)
            factor = (plan.weight * plan.keep.to(plan.weight)).to(advantage)[own]
            output["advantages"] = advantage[:, None] * factor[:, : output["completion_ids"].shape[1]]  # (n, T)
        tokens = unused_tokens(stats, every, None if plan is None else plan.weight)
        self._step.batches.append(Batch(self._serial, batch, tokens, "sampling_per_token_logps" in output))
        output[ROW] = torch.stack([torch.full_like(own, self._serial), own], 1)

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

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if not self.recording or not self.model.training or ROW not in inputs:
            return self._original["_compute_loss"](model, inputs)
        if not self._step.updates and self.observers.surface.update_due(self.trace.step):
            self._kept.append(self._with_old_logp(inputs))
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

    def _gradient_done(self) -> None:
        """Run the probes that are due, on the rows of all processes."""
        self._step.collect()
        super()._gradient_done()

    # -- the loss of the first update as a function of the weights -----------------------------------------------------

    def _with_old_logp(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A micro-batch with π_old's log-probabilities; without them TRL takes the present ones, and its loss is constant."""
        if inputs.get("old_per_token_logps") is not None:
            return inputs
        numbers = inputs[ROW]
        batch = next(b for b in self._step.batches if b.serial == int(numbers[0, 0]))
        logp = batch.tokens.stats.logp[numbers[:, 1].to(batch.tokens.stats.logp.device)]
        logp = logp[:, : inputs["completion_ids"].shape[1]]
        return inputs | {"old_per_token_logps": logp.to(numbers.device)}

    def observe_update(self) -> None:
        """Measure the critical sharpness of a step's first update, if it is due."""
        kept, self._kept = self._kept, []
        _, norm, factor = self._step.gradient
        if kept and not self._step.updates and math.isfinite(norm):
            self._observer.critical(self.model, self.optimizer, lambda: self._loss_of(kept), clip_factor=factor)

    def _loss_of(self, kept: list[dict[str, Any]]) -> float:
        """TRL's loss of this process's micro-batches at the present weights, without dropout, averaged over the processes.

        The trainer is left as it was.
        """
        with self.evaluating():
            own = sum(float(self._original["_compute_loss"](self.model, inputs)) for inputs in kept)
        return distributed.sum_values(own) / distributed.world_size()

    def _logps(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._original["_get_per_token_logps_and_entropies"](*args, **kwargs)
        if self._current is not None and outputs[0].requires_grad:
            started = time.perf_counter()
            self._use(outputs[0], self._current)
            self._loss_seen = True
            self._step.seconds["recording_s"] += time.perf_counter() - started
        return outputs

    def _use(self, logp: Tensor, inputs: dict[str, Any]) -> None:
        """Record what TRL's micro-batch `inputs` does with its tokens; TRL's loss differentiates `logp` (n, T)."""
        numbers = inputs[ROW]
        serial, rows = int(numbers[0, 0]), numbers[:, 1].cpu()
        self._step.compare(serial, rows, logp)
        logp.register_hook(self._step.use(serial, rows, token_loss(self.trainer, inputs, logp)))
