"""Record TRL's GRPOTrainer, and add token weights to its loss.

Completions are known as whole batches, before their updates. Rows keep their number through TRL's shuffle, and a hook on the
log-probabilities inside TRL's own loss gives each token's coefficient. A step is the fewest micro-steps that are whole batches
and whole updates. Supported: TRL 1.0.0 to 1.16.0 but for 1.15.0 (both ends tested), one process or several (DDP, FSDP2), float32
or bf16.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.config.method import PpoClip
from sharpscope.config.token_weights import UniformWeight
from sharpscope.errors import UserError
from sharpscope.integrations.price import Work
from sharpscope.integrations.steps import Batch, TokenLoss, prompt_texts, same_prompts, unused_tokens
from sharpscope.integrations.trainers import TrainerRecorder, check_setup, refuse, rows_of_update
from sharpscope.objective import Method, gradient_killed, k3, named_method
from sharpscope.policy import Completions, Rollouts, join_rollouts
from sharpscope.recording.observers import StepObserver
from sharpscope.recording.rows import evaluation_row
from sharpscope.recording.step import RolloutBatch
from sharpscope.tasks import Example, Reward

ROW = "sharpscope_row"  # (n, 2): serial number of the batch, row in it
OLDEST, NEWEST = (1, 0), (1, 16)
EXCLUDED = ("1.15.0",)
#: Losses in which a non-negative factor on a token's advantage multiplies that token's surrogate and nothing else.
WEIGHTABLE = ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo")
#: Losses with a factor of the ratio that has no gradient.
HELD_CONSTANT = ("cispo", "vespo")


def check_version() -> None:
    """Check the installed TRL; warn of one that is newer than those tested.

    Raises:
        UserError: it is missing or its version is not supported.
    """
    try:
        installed = version("trl")
    except PackageNotFoundError:
        raise UserError("record: TRL is not installed; pip install 'sharpscope[trl]'") from None
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if installed in EXCLUDED or numbers < OLDEST:
        raise UserError(f"record: TRL {installed} is not supported; pip install 'trl>=1.0,!=1.15.0'")
    if numbers > NEWEST:
        newest = ".".join(map(str, NEWEST))
        warnings.warn(
            f"TRL {installed} is newer than {newest}, the newest that sharpscope was tested with", stacklevel=3
        )


def check_grpo(trainer: Any) -> None:
    """Check that a GRPOTrainer can be recorded; warn of an overridden loss.

    Raises:
        UserError: an option or a setup is not supported; the message names it.
    """
    from trl import GRPOTrainer

    check_setup(trainer)
    args, name = trainer.args, type(trainer).__name__
    round_, update = generate_every(trainer), args.gradient_accumulation_steps
    numbers = f"steps_per_generation × num_iterations = {round_} and gradient_accumulation_steps = {update}"
    refuse((round_ % update and update % round_, f"{numbers}: one must divide the other"))
    if type(trainer).compute_loss is not GRPOTrainer.compute_loss:
        text = "if that does not call GRPOTrainer's, recording will stop at the first update"
        warnings.warn(f"{name} overrides compute_loss; {text}", stacklevel=3)


def generate_every(trainer: Any) -> int:
    """Micro-steps that use one batch of completions."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


def token_weights_of(trainer: Any, method: Method) -> Method:
    """The method whose token weights are added to TRL's loss, after its checks.

    Raises:
        UserError: it has none, they are not a factor on the surrogate, or it differs from GRPO in more than weights; or TRL's
            loss does not keep them apart.
    """
    usable = ", ".join(WEIGHTABLE)
    if trainer.loss_type not in WEIGHTABLE:
        raise UserError(
            f"weights: loss_type = '{trainer.loss_type}' does not keep token weights apart; use one of {usable}"
        )
    plain = named_method("grpo")
    rest = method.model_copy(update={"name": plain.name, "weight": plain.weight, "tokens": plain.tokens})
    if method.tokens is None:  # ar: TRL's own options set its clip and aggregation
        rest = rest.model_copy(update={"clip": plain.clip, "aggregate": plain.aggregate})
    if method.weight_on != "surrogate":
        wrong = "they act on the ratio inside the clip, which TRL's advantages cannot carry; use grpo-sg"
        raise UserError(f"weights = '{method.name}': {wrong}")
    if rest != plain or (isinstance(method.weight, UniformWeight) and method.tokens is None):
        wrong = "this method is more than token weights on GRPO, or has none; give one such as grpo-sg or ar"
        raise UserError(f"weights = '{method.name}': {wrong}, and set the rest by TRL's own options")
    return method.with_preset("auto", "paper")


class GrpoRecorder(TrainerRecorder):
    """What `record` returns for a GRPOTrainer."""

    wrapped: ClassVar[Mapping[str, str]] = {
        **TrainerRecorder.wrapped,
        "_generate_and_score_completions": "_generate",
        "_calculate_rewards": "_rewards",
        "_compute_loss": "_loss",
        "_get_per_token_logps_and_entropies": "_logps",
    }

    def __init__(
        self, trainer: Any, out: str | Path, *, critical: bool | int, weights: Method | None = None, **options: Any
    ) -> None:
        self.weights, self._held = weights, trainer.loss_type in HELD_CONSTANT
        self.group_size = int(trainer.num_generations)
        self._current: dict[str, Any] | None = None
        self._kept: list[dict[str, Any]] = []  # micro-batches of the step's first update, whose loss is evaluated again
        self._scored: tuple[Tensor, list[list[int]]] | None = None
        self._evaluated: list[Tensor] = []
        temperature, beta = float(trainer.temperature), float(trainer.beta)
        critical = 0 if self._held else critical
        parts = max(1, int(trainer.args.steps_per_generation) // trainer.args.gradient_accumulation_steps)
        self.work = Work(int(trainer.num_iterations), parts, rows_of_update(trainer.args), generated=True)
        super().__init__(trainer, out, critical=critical, temperature=temperature, beta=beta, **options)
        self.scorer = replace(self.scorer, share_prompt=True)
        self._serial = 0  # the same in all processes, which have the same batches

    def label(self) -> str:
        """The method's name in the trace."""
        return self.weights.name if self.weights is not None else str(self.trainer.loss_type)

    def notes(self) -> list[str]:
        """Notes for run.json."""
        args, notes = self.trainer.args, []
        for name, off in (("min_p", None), ("repetition_penalty", 1.0)):
            value = getattr(args, name, off)
            if value not in (off, None):
                notes.append(f"completions were drawn with {name} = {value:g}, which log-probabilities do not show")
        if self._held:
            held = f"loss_type '{self.trainer.loss_type}' holds factors constant"
            notes.append(f"critical sharpness is not measured: {held}")
        if self.trainer.loss_type == "cispo":
            notes.append(f"cispo: TRL bounds the ratio itself by epsilon_high = {float(self.trainer.epsilon_high):g}")
        return notes

    def steps_of(self, updates: int) -> int:
        """Number of steps in so many updates."""
        accumulation = self.trainer.args.gradient_accumulation_steps
        return math.ceil(updates * accumulation / max(generate_every(self.trainer), accumulation))

    def whole_batches(self) -> bool:
        """Whether the micro-steps so far have used the batch of completions as often as TRL does."""
        return self._step.micro % generate_every(self.trainer) == 0

    # -- one batch of completions ------------------------------------------------------------------------------------

    def _rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = self._original["_calculate_rewards"](*args, **kwargs)
        ids = kwargs["completion_ids_list"] if "completion_ids_list" in kwargs else args[3]
        self._scored = rewards.detach().cpu(), [list(row) for row in ids]
        return rewards

    def _generate(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        training, started = self.model.training, time.perf_counter()
        output: dict[str, Any] = self._original["_generate_and_score_completions"](inputs)
        self.together(lambda: self._generated(output, training, started))
        return output

    def _generated(self, output: dict[str, Any], training: bool, started: float) -> None:
        if self._scored is None:
            return
        (rewards, ids), self._scored = self._scored, None
        total = (rewards * self.trainer.reward_weights.cpu()[None]).nansum(1)
        total[rewards.isnan().all(1)] = math.nan  # TRL counts it as 0
        if not training:
            self._evaluated.append(total)
            return
        done = time.perf_counter()
        self._step.seconds["generation_s"] += done - started
        self._open(output, rewards, ids, total)
        self._step.seconds["recording_s"] += time.perf_counter() - done

    def _open(self, output: dict[str, Any], rewards: Tensor, ids: list[list[int]], total: Tensor) -> None:
        """Add the new batch of all processes: measure π_old on it, number its rows and, if asked for, weight their tokens."""
        advantage = output["advantages"]
        if advantage.dim() != 1:
            raise UserError(f"advantages have shape {tuple(advantage.shape)}; recording needs one a completion")
        self._serial += 1
        tokenizer, device = self.policy.tokenizer, advantage.device
        # TRL has gathered the rewards, in the order of processes; rows and advantages are each process's own.
        own = torch.arange(len(advantage), device=device) + distributed.rank() * len(advantage)
        part = rollouts_of(output, ids, total[own.to(total.device)], tokenizer, self.policy.eos_ids)
        parts = distributed.gather((part.to(torch.device("cpu")), advantage.detach().cpu()))
        rollouts = join_rollouts(*(each for each, _ in parts)).to(device)
        rollouts = replace(rollouts, group=torch.arange(len(rollouts), device=device) // self.group_size)
        names = self.trainer.reward_func_names
        scores = [
            Reward(value, dict(zip(names, row, strict=True)), bool(self.correct(value)) if self.correct else False)
            for value, row in zip(total.tolist(), rewards.tolist(), strict=True)
        ]
        if missing := int(total.isnan().sum()):
            text = f"{missing} of {len(total)} completions got no reward from any reward function (NaN; TRL counts 0)"
            self._event("nan_reward", "warning", text, missing / len(total), 0.0)
        examples = [Example(text, "", {}) for text in prompt_texts(rollouts, tokenizer)[:: self.group_size]]
        every = torch.cat([each for _, each in parts]).to(device)
        batch = RolloutBatch(examples, rollouts, scores, every, None)
        with self.whole():
            shared = same_prompts(rollouts, self.group_size)
            stats = replace(self.scorer, share_prompt=shared).statistics(rollouts)
        plan = None
        if self.weights is not None:
            self.weights, plan = self.plan_of(self.weights, batch, stats)
            for text in plan.warnings:
                self._warn("method", "warning", text)
            factor = (plan.weight * plan.keep.to(plan.weight)).to(advantage)[own]
            output["advantages"] = advantage[:, None] * factor[:, : output["completion_ids"].shape[1]]  # (n, T)
        tokens = unused_tokens(stats, every, None if plan is None else plan.weight)
        labels: list[Hashable] = [(self._serial, group) for group in rollouts.group.tolist()]
        sampled = "sampling_per_token_logps" in output
        self._step.batches.append(Batch(self._serial, batch, tokens, sampled, labels, shared=True))
        output[ROW] = torch.stack([torch.full_like(own, self._serial), own], 1)

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        original = self._original["_compute_loss"]
        if not self.recording or not self.model.training or ROW not in inputs:
            return original(model, inputs)
        self.safely(lambda: self._keep(inputs))
        self._current = inputs
        try:
            return cast(Tensor, original(model, inputs))
        finally:
            self._current = None

    def _logps(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._original["_get_per_token_logps_and_entropies"](*args, **kwargs)
        if self._current is not None and outputs[0].requires_grad:
            self.safely(partial(self._use, outputs[0], self._current))
        return outputs

    def _use(self, logp: Tensor, inputs: dict[str, Any]) -> None:
        """Record what TRL's micro-batch `inputs` does with its tokens; TRL's loss differentiates `logp` (n, T)."""
        started, numbers = time.perf_counter(), inputs[ROW]
        serial, rows = int(numbers[0, 0]), numbers[:, 1].cpu()
        self._step.compare(serial, rows, logp)
        keep = self._step.use(serial, rows, token_loss(self.trainer, inputs, logp))
        logp.register_hook(lambda gradient: self.safely(lambda: keep(gradient)))
        self._step.seconds["recording_s"] += time.perf_counter() - started

    # -- the loss of the first update as a function of the weights -----------------------------------------------------

    def _keep(self, inputs: dict[str, Any]) -> None:
        """Keep a micro-batch with π_old's log-probabilities; without them TRL takes the present ones, and its loss is constant."""
        if self._step.updates or not self.observers.surface.update_due(self.step_number):
            return
        if inputs.get("old_per_token_logps") is None:
            numbers = inputs[ROW]
            logp = self._step.batch(int(numbers[0, 0])).tokens.stats.logp
            logp = logp[numbers[:, 1].to(logp.device)][:, : inputs["completion_ids"].shape[1]]
            inputs = inputs | {"old_per_token_logps": logp.to(numbers.device)}
        self._kept.append(inputs)

    def observe_update(self, observer: StepObserver) -> None:
        """Measure the critical sharpness of a step's first update."""
        kept, self._kept = self._kept, []
        if kept:
            factor = self._step.gradient[2]
            observer.critical(self.model, self.optimizer, lambda: self._loss_of(kept), clip_factor=factor)

    def _loss_of(self, kept: list[dict[str, Any]]) -> float:
        """TRL's loss of this process's micro-batches at the present weights, without dropout, averaged over the processes.

        The trainer is left as it was.
        """
        with self.evaluating():
            own = sum(float(self._original["_compute_loss"](self.model, inputs)) for inputs in kept)
        return distributed.sum_values(own) / distributed.world_size()

    def evaluated(self) -> None:
        """Write the evaluation that has just ended as one row over all its prompts."""
        total = torch.cat(self._evaluated) if self._evaluated else torch.zeros(0)
        self._evaluated = []
        k = int(getattr(self.trainer, "num_generations_eval", self.trainer.num_generations))
        total = total[: len(total) // k * k]
        if len(total):
            judge: Callable[[float], bool] = self.correct or (lambda _: False)
            correct = np.array([judge(value) for value in total.tolist()], dtype=bool).reshape(-1, k)
            of = (self.step_number - 1, self.task, "heldout", "all")
            row = evaluation_row(*of, correct, total.tolist(), self.temperature)
            if self.correct is None:
                row |= dict.fromkeys(("accuracy", "std_error", "pass_at_k"))
            self.writer.append("eval", {name: [value] for name, value in row.items()})


def rollouts_of(
    output: dict[str, Any], ids: Sequence[Sequence[int]], reward: Tensor, tokenizer: Any, eos_ids: Any
) -> Rollouts:
    """This process's part of TRL's batch as Rollouts of n rows, each a group of its own; `reward` is (n,).

    `behavior_logp` is NaN where TRL does not know the sampler's log-probabilities.
    """
    mask = output["completion_mask"]
    # Not from the mask: it is 0 throughout a completion that TRL excludes from the loss (mask_truncated_completions).
    lengths = torch.tensor([len(row) for row in ids], device=mask.device)
    present = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    tools, sampler = output.get("tool_mask"), output.get("sampling_per_token_logps")
    ends = [bool(row) and row[-1] in eos_ids for row in ids]
    contents = [row[:-1] if end else row for row, end in zip(ids, ends, strict=True)]
    completions = Completions(
        input_ids=torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
        attention_mask=torch.cat([output["prompt_mask"], present], 1).long(),
        completion_ids=output["completion_ids"],
        completion_mask=(mask if tools is None else mask * tools).long(),
        behavior_logp=torch.full(mask.shape, torch.nan, device=mask.device) if sampler is None else sampler.float(),
        sampler_logp=None,
        group=torch.arange(len(mask), device=mask.device),
        truncated=~torch.tensor(ends, device=mask.device),
        texts=tokenizer.batch_decode(contents, skip_special_tokens=False, clean_up_tokenization_spaces=False),
    )
    return completions.with_reward(reward)


@torch.no_grad()
def token_loss(trainer: Any, inputs: dict[str, Any], logp: Tensor) -> TokenLoss:
    """TRL's ratio (of tokens or sequences), where its clip removes the gradient, and k3 to its reference.

    Args:
        trainer: whose options apply.
        inputs: TRL's batch of n rows.
        logp: (n, T) [nats], what the trainer's loss differentiates.
    """
    mask = inputs["completion_mask"]
    if inputs.get("tool_mask") is not None:
        mask = mask * inputs["tool_mask"]
    logp = logp.detach()
    old = inputs.get("old_per_token_logps")
    change = own = torch.zeros_like(logp) if old is None else torch.where(mask.bool(), logp - old, 0.0)
    if trainer.importance_sampling_level == "sequence":
        change = (change.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand(logp.shape)
    ratio = change.exp()
    advantage = inputs["advantages"]
    advantage = (advantage if advantage.dim() == 2 else advantage[:, None]).expand(logp.shape)
    reference = inputs.get("ref_per_token_logps")
    kl, share = torch.zeros_like(logp), None
    if reference is not None:
        kl = torch.where(mask.bool(), k3(logp, reference), 0.0)
        share = _kl_share(trainer, ratio, advantage, logp, reference, _clipped(trainer, ratio, advantage))
    clipped = _clipped(trainer, ratio, advantage) * mask.int()
    correction = inputs.get("importance_sampling_ratio")
    return TokenLoss(torch.where(mask.bool(), ratio, 1.0), own, clipped, kl, correction, reference, share)


def _kl_share(
    trainer: Any, ratio: Tensor, advantage: Tensor, logp: Tensor, reference: Tensor, clipped: Tensor
) -> Tensor | None:
    """(n, T) which part of a token's coefficient β·KL has; None for losses with another surrogate than PPO's.

    With δ = ln π_ref − ln π the coefficient is proportional to −A·r (0 where clipped) + β·d, d = 1 − e^δ, or with TRL's corrected
    estimate r·(e^δ − δ − 1) + r·(1 − e^δ).
    """
    if trainer.loss_type not in ("grpo", "bnpo", "dapo", "dr_grpo") or trainer.importance_sampling_level == "sequence":
        return None
    delta = reference - logp
    slope = 1 - delta.exp()
    if getattr(trainer.args, "use_bias_correction_kl", False):
        slope = ratio * (delta.exp() - delta - 1 + slope)
    policy = torch.where(clipped == 0, -advantage * ratio, 0.0)
    whole = policy + trainer.beta * slope
    return torch.where(whole == 0, 0.0, trainer.beta * slope / whole)


def _clipped(trainer: Any, ratio: Tensor, advantage: Tensor) -> Tensor:
    if trainer.loss_type == "cispo":  # TRL bounds the ratio itself, from above only
        return ((ratio > trainer.epsilon_high) & (advantage != 0)).int()
    if trainer.loss_type in ("sapo", "vespo"):  # they have no clip
        return torch.zeros_like(ratio, dtype=torch.int32)
    low, high = float(trainer.epsilon_low), float(trainer.epsilon_high)
    killed = gradient_killed(PpoClip.model_construct(low=low, high=high), ratio, advantage)
    if trainer.args.delta is not None:  # two-sided: a negative token with a ratio above delta has no gradient either
        killed = torch.where((ratio > trainer.args.delta) & (advantage < 0), 1, killed)
    return killed
