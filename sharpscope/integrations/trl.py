"""Record TRL's GRPOTrainer.

Completions are known as whole batches, before their updates. Rows keep their number through TRL's shuffle, and a hook on the
log-probabilities inside TRL's own loss gives each token's coefficient. A step is the fewest micro-steps that are whole batches
and whole updates. Supported: TRL 1.0.0 to 1.16.0 but for 1.15.0 (both ends tested), one process or several (DDP, FSDP2), float32
or bf16.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.integrations.trainer import GrpoTrainer
from sharpscope.integrations.trainers import (
    TrainerOptions,
    TrainerRecorder,
    check_setup,
    refuse,
    rows_of_update,
)
from sharpscope.methods.clips import CispoClip, PpoClip, RatioClip, VespoClip
from sharpscope.methods.loss import k3
from sharpscope.policy import Completions, Rollouts
from sharpscope.policy.head import backbone
from sharpscope.policy.token_stats import flat_stats, spread
from sharpscope.recording.recorded_model import dropout_of
from sharpscope.recording.schedule import StepCost

Batch = dict[str, Tensor]
"""TRL's n rows: columns by name, (n, …) each."""
ROW = "sharpscope_row"  # (n, 2): serial number of the batch, row in it
OLDEST = (1, 0)
OLDEST_OF_DPO = (1, 16)
NEWEST = (1, 16)
EXCLUDED = ("1.15.0",)
SAME = 1e-4
"""Mean gap between TRL's log-probabilities and the recorder's [nats] below which TRL's own forward pass gives the statistics."""
CLIPS: Mapping[str, type[RatioClip]] = {"cispo": CispoClip, "vespo": VespoClip}
"""The clips of losses whose gradient is not the derivative of their value."""


def check_version(dpo: bool) -> None:
    """Check the installed TRL, for DPO or not; warn of one that is newer than those tested."""
    try:
        installed = version("trl")
    except PackageNotFoundError:
        raise UserError("record: TRL is not installed; pip install 'sharpscope[trl]'") from None
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    old = installed in EXCLUDED or numbers < OLDEST
    refuse((old, f"TRL {installed} is not supported; pip install 'trl>=1.0,!=1.15.0'"))
    refuse(
        (
            dpo and numbers < OLDEST_OF_DPO,
            f"DPO with TRL {installed} is not supported; pip install 'trl>=1.16'",
        )
    )
    if numbers > NEWEST:
        newest = "{}.{}".format(*NEWEST)
        warnings.warn(
            f"TRL {installed} is newer than {newest}, the newest that was tested", stacklevel=3
        )


def check_grpo(trainer: GrpoTrainer) -> None:
    """Check that a GRPOTrainer can be recorded; warn of an overridden loss."""
    from trl import GRPOTrainer

    check_setup(trainer)
    round_ = generate_every(trainer)
    update = trainer.args.gradient_accumulation_steps
    numbers = f"steps_per_generation × num_iterations = {round_} and gradient_accumulation_steps = {update}"
    refuse((round_ % update and update % round_, f"{numbers}: one must divide the other"))
    if type(trainer).compute_loss is not GRPOTrainer.compute_loss:
        text = "if that does not call GRPOTrainer's, recording will stop at the first update"
        warnings.warn(f"{type(trainer).__name__} overrides compute_loss; {text}", stacklevel=3)


def own_loss(trainer: GrpoTrainer) -> bool:
    """Whether a subclass has replaced the loss of GRPOTrainer, as GMPOTrainer does."""
    from trl import GRPOTrainer

    return type(trainer)._compute_loss is not GRPOTrainer._compute_loss


def generate_every(trainer: GrpoTrainer) -> int:
    """Micro-steps that use one batch of completions."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


class GrpoRecorder(TrainerRecorder):
    """What `record` returns for a GRPOTrainer."""

    trainer: GrpoTrainer
    wrapped: ClassVar[Mapping[str, str]] = {
        **TrainerRecorder.wrapped,
        "_generate_and_score_completions": "_generate",
        "_calculate_rewards": "_rewards",
        "_compute_loss": "_loss",
        "_get_per_token_logps_and_entropies": "_logps",
    }

    def __init__(
        self, trainer: GrpoTrainer, out: str | Path, **options: Unpack[TrainerOptions]
    ) -> None:
        args = trainer.args
        loss = str(trainer.loss_type)
        held = loss in CLIPS and not CLIPS[loss].gradient_flows
        notes = (
            [f"critical sharpness is not measured: loss_type '{loss}' holds factors constant"]
            if held
            else []
        )
        for name, off in (("min_p", None), ("repetition_penalty", 1.0)):
            if (value := getattr(args, name, off)) not in (off, None):
                notes.append(
                    f"completions were drawn with {name} = {value:g}, which log-probabilities do not show"
                )
        self.group_size, self.period = int(trainer.num_generations), generate_every(trainer)
        self._current: Batch | None = None
        self._scored: tuple[Tensor, list[list[int]]] | None = None
        parts = max(1, int(args.steps_per_generation) // args.gradient_accumulation_steps)
        self.cost = StepCost(
            int(trainer.num_iterations), parts, rows_of_update(args), generated=True
        )
        # Whether the first update of a step uses all its completions, so that their statistics can come from its loss.
        # `parts` rounds down
        whole = int(args.steps_per_generation) <= args.gradient_accumulation_steps
        whole &= distributed.world_size() == 1
        self._can_read_loss = whole and not args.torch_compile and not dropout_of(trainer.model)
        self._reads_loss = False
        if own_loss(trainer):
            # what clips, and where, is its own matter
            self.given = self.given - {"old_logp"}
            notes.append(
                f"{type(trainer).__name__} has a loss of its own: ratio and clipped are unknown"
            )
        options["temperature"], options["beta"] = float(trainer.temperature), float(trainer.beta)
        if held:
            options["critical"] = 0
        super().__init__(trainer, out, loss, notes, **options)

    # -- one batch of completions ------------------------------------------------------------------------------------

    def _rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = self._original["_calculate_rewards"](*args, **kwargs)
        ids = kwargs["completion_ids_list"] if "completion_ids_list" in kwargs else args[3]
        self._scored = rewards.detach().cpu(), [list(row) for row in ids]
        return rewards

    def _generate(self, inputs: list[dict[str, object]]) -> Batch:
        training = self.model.training
        started = time.perf_counter()
        output: Batch = self._original["_generate_and_score_completions"](inputs)
        if training:
            self.together(lambda: self._generated(output, started))
        return output

    def _generated(self, output: Batch, started: float) -> None:
        if self._scored is None:
            return
        rewards, ids = self._scored
        total = (rewards * self.trainer.reward_weights.cpu()[None]).nansum(1)
        total[rewards.isnan().all(1)] = math.nan  # TRL counts it as 0
        done = time.perf_counter()
        self.capture.seconds["generation_s"] += done - started
        self._open(output, rewards, ids, total)
        self.capture.seconds["recording_s"] += time.perf_counter() - done

    def _open(self, output: Batch, rewards: Tensor, ids: list[list[int]], total: Tensor) -> None:
        """Add the new batch: measure π_old on it, and number its rows."""
        advantage = output["advantages"]
        if advantage.dim() != 1:
            raise UserError(
                f"advantages have shape {tuple(advantage.shape)}; recording needs one a completion"
            )
        # TRL has gathered the rewards, in the order of processes; rows and advantages are each process's own.
        n = len(advantage)
        device = advantage.device
        mine = torch.arange(n) + distributed.rank() * n
        prompt = mine // self.group_size  # a group may be in two processes
        rollouts = rollouts_of(
            output, ids, total[mine].to(device), self.policy.tokenizer, self.policy.eos_ids
        )
        rollouts = replace(rollouts, group=(prompt - prompt[0]).to(device))
        number = self._serial // distributed.world_size()  # of the batch, the same in all processes
        names = self.trainer.reward_func_names
        parts = [dict(zip(names, row, strict=True)) for row in rewards[mine].tolist()]
        if missing := int(total.isnan().sum()):
            text = f"{missing} of {len(total)} completions got no reward from any reward function (NaN; TRL counts 0)"
            self.event("nan_reward", "warning", text, missing / len(total), 0.0)
        measured = self.observers.schedule.norms.due(self.step_number)
        self._reads_loss = self._can_read_loss and self.gap < SAME and not measured
        labels = [(number, group) for group in prompt.tolist()]
        self.open_batch(rollouts, advantage.detach(), labels, parts, measure=not self._reads_loss)
        output[ROW] = torch.stack([torch.full((n,), self._serial), torch.arange(n)], 1).to(device)

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def _loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        original = self._original["_compute_loss"]
        if not self.recording or not self.model.training or ROW not in inputs:
            return original(model, inputs)
        self.safely(lambda: self._keep(inputs))
        self._current = inputs
        try:
            return cast(Tensor, original(model, inputs))
        finally:
            self._current = None

    def _logps(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        compute = self._original["_get_per_token_logps_and_entropies"]
        hidden = list[Tensor]()
        if self._current is None:
            return compute(*args, **kwargs)
        hook: AbstractContextManager[object] = nullcontext()
        if self._reads_loss:
            hook = backbone(self.model).register_forward_hook(
                lambda _, __, out: hidden.append(out.last_hidden_state)
            )
        with hook:
            outputs = compute(*args, **kwargs)
        if outputs[0].requires_grad:
            self.safely(partial(self._use, outputs[0], self._current, hidden))
        return outputs

    def _use(self, logp: Tensor, inputs: Batch, hidden: list[Tensor]) -> None:
        """Record what TRL's micro-batch `inputs` does with its tokens; TRL's loss differentiates `logp` (n, T).

        `hidden` (n, P+T, d) is what the output layer got, where the tokens' statistics come from it.
        """
        started = time.perf_counter()
        numbers = inputs[ROW]
        serial = int(numbers[0, 0])
        rows = numbers[:, 1].cpu()
        if self._reads_loss and not self.capture.updates:
            batch = self.capture.batch(serial)
            width = logp.shape[1]
            head = self.policy.head
            mask = batch.rollout_batch.rollouts.completion_mask[
                rows.to(batch.device), :width
            ].bool()
            states = torch.cat(hidden).detach()[:, -width - 1 : -1][mask]
            states = states.to(torch.promote_types(head.weight.dtype, torch.float32))
            found = flat_stats(states, head, inputs["completion_ids"][mask], self.temperature)
            for name, values in found.items():
                getattr(batch.tokens.stats, name)[rows.to(batch.device), :width] = spread(
                    values, mask
                )
        self.capture.compare(serial, rows, logp)
        keep = self.capture.use(serial, rows, token_loss(self.trainer, inputs, logp))
        logp.register_hook(lambda gradient: self.safely(lambda: keep(gradient)))
        self.capture.seconds["recording_s"] += time.perf_counter() - started

    def _keep(self, inputs: Batch) -> None:
        """Keep a micro-batch with π_old's log-probabilities; without them TRL takes the present ones, and its loss is constant."""
        if self.capture.updates or not self.observers.critical_due(self.step_number):
            return

        def again() -> Tensor:
            """TRL's loss of the micro-batch at the present weights."""
            known = inputs.get("old_per_token_logps")
            numbers = inputs[ROW]
            if known is None:
                logp = self.capture.batch(int(numbers[0, 0])).tokens.stats.logp
                known = logp[numbers[:, 1].to(logp.device)][
                    :, : inputs["completion_ids"].shape[1]
                ].to(numbers.device)
            return self._original["_compute_loss"](
                self.model, inputs | {"old_per_token_logps": known}
            )

        self._kept.append(again)


def rollouts_of(
    output: Batch,
    ids: list[list[int]],
    reward: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Collection[int],
) -> Rollouts:
    """This process's part of TRL's batch as Rollouts of n rows, each a group of its own; `reward` is (n,).

    `behavior_logp` is NaN where TRL does not know the sampler's log-probabilities.
    """
    mask = output["completion_mask"]
    # Not from the mask: it is 0 throughout a completion that TRL excludes from the loss (mask_truncated_completions).
    lengths = torch.tensor([len(row) for row in ids], device=mask.device)
    present = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    tools = output.get("tool_mask")
    sampler = output.get("sampling_per_token_logps")
    ends = [bool(row) and row[-1] in eos_ids for row in ids]
    contents = [row[:-1] if end else row for row, end in zip(ids, ends, strict=True)]
    completions = Completions(
        input_ids=torch.cat([output["prompt_ids"], output["completion_ids"]], 1),
        attention_mask=torch.cat([output["prompt_mask"], present], 1).long(),
        completion_ids=output["completion_ids"],
        completion_mask=(mask if tools is None else mask * tools).long(),
        behavior_logp=torch.full(mask.shape, torch.nan, device=mask.device)
        if sampler is None
        else sampler.float(),
        sampler_logp=None,
        group=torch.arange(len(mask), device=mask.device),
        truncated=~torch.tensor(ends, device=mask.device),
        texts=tokenizer.batch_decode(
            contents, skip_special_tokens=False, clean_up_tokenization_spaces=False
        ),
    )
    return completions.with_reward(reward)


@torch.no_grad()
def token_loss(trainer: GrpoTrainer, inputs: Batch, logp: Tensor) -> dict[str, Tensor]:
    """What a trainer's loss does with the tokens of TRL's batch of n rows, see `Step.use`; `logp` (n, T) is what it differentiates."""
    inside = inputs["completion_mask"].bool()
    logp = logp.detach()
    if inputs.get("tool_mask") is not None:
        inside = inside & inputs["tool_mask"].bool()
    sequences = trainer.importance_sampling_level == "sequence"
    old = inputs.get("old_per_token_logps")
    reference = inputs.get("ref_per_token_logps")
    change = deviation = (
        torch.zeros_like(logp) if old is None else torch.where(inside, logp - old, 0.0)
    )
    if sequences:
        change = (change.sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp(min=1)).expand(
            logp.shape
        )
    ratio = change.exp()
    advantage = inputs["advantages"][:, None].expand(logp.shape)
    clipped = _clipped(trainer, ratio, advantage)
    made = {
        "ratio": torch.where(inside, ratio, 1.0),
        "log_ratio": deviation,
        "clipped": clipped * inside,
    }
    if inputs.get("importance_sampling_ratio") is not None:
        made["correction"] = inputs["importance_sampling_ratio"]
    if reference is None:
        return made
    made |= {"ref_logp": reference, "kl": torch.where(inside, k3(logp, reference), 0.0)}
    if trainer.loss_type in ("grpo", "bnpo", "dapo", "dr_grpo") and not sequences:
        # With δ = ln π_ref − ln π the coefficient is proportional to −A·r (0 where clipped) + β·(1 − e^δ), or with TRL's
        # corrected estimate β·(r·(e^δ − δ − 1) + r·(1 − e^δ)).
        delta = reference - logp
        slope = 1 - delta.exp()
        if getattr(trainer.args, "use_bias_correction_kl", False):
            slope = ratio * (delta.exp() - delta - 1 + slope)
        whole = torch.where(clipped == 0, -advantage * ratio, 0.0) + trainer.beta * slope
        made["kl_share"] = torch.where(whole == 0, 0.0, trainer.beta * slope / whole)
    return made


def _clipped(trainer: GrpoTrainer, ratio: Tensor, advantage: Tensor) -> Tensor:
    if trainer.loss_type == "cispo":  # TRL bounds the ratio itself, from above only
        return ((ratio > trainer.epsilon_high) & (advantage != 0)).int()
    if trainer.loss_type in ("sapo", "vespo"):  # they have no clip
        return torch.zeros_like(ratio, dtype=torch.int32)
    low = float(trainer.epsilon_low)
    high = float(trainer.epsilon_high)
    killed = PpoClip.model_construct(low=low, high=high).without_gradient(ratio, advantage)
    # two-sided: a negative token with a ratio above delta has no gradient either
    if trainer.args.delta is not None:
        killed = torch.where((ratio > trainer.args.delta) & (advantage < 0), 1, killed)
    return killed
