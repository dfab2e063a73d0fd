"""Record AsyncGRPOTrainer (trl.experimental). A step is one update.

The trainer packs the samples of a micro-batch into one tree of tokens, in which samples with a common beginning share positions,
and takes the ratio to the sampler's policy. The samples are read from its collator. A gradient belongs to a position, which several
samples can share; so a token's coefficient is computed from its ratio, as in TRL's loss, and the sums over positions are
compared with the gradient. Statistics and probes see each sample separately, with SDPA in place of TRL's kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.config.method import PpoClip
from sharpscope.errors import UserError
from sharpscope.integrations.steps import Batch, TokenLoss, prompt_texts
from sharpscope.integrations.trainers import TrainerRecorder, check_setup
from sharpscope.objective import gradient_killed
from sharpscope.policy import Rollouts, completions_of
from sharpscope.policy.adapters import has_adapters
from sharpscope.probes import attention_implementation
from sharpscope.recording.step import RolloutBatch
from sharpscope.tasks import Example, Reward

ROW = "sharpscope_batch"  # (1,): serial number of the micro-batch
_REWARD = "rewards/"  # prefix of the parts in a sample's metrics


def check_asynchronous(trainer: Any) -> None:
    """Check that the trainer can be recorded, before anything is written.

    Raises:
        UserError: an option or a setup is not supported; the message names it.
    """
    if find_spec("trl.experimental.async_grpo.packing") is None:
        raise UserError(
            "record: AsyncGRPOTrainer of this TRL packs completions in another way than 1.16's; pip install 'trl>=1.16'"
        )
    check_setup(trainer)
    if distributed.world_size() > 1:
        raise UserError("record: AsyncGRPOTrainer is recorded in one process; start one, or use GRPOTrainer")
    if has_adapters(trainer.accelerator.unwrap_model(trainer.model)):
        raise UserError("record: AsyncGRPOTrainer with adapters (peft) is not supported; leave peft_config out")
    if trainer.aux_loss_enabled:
        raise UserError("record: AsyncGRPOTrainer with router_aux_loss_coef is not supported; set it to 0")


class AsyncRecorder(TrainerRecorder):
    """What `record` returns for an AsyncGRPOTrainer."""

    wrapped: ClassVar[Mapping[str, str]] = {
        **TrainerRecorder.wrapped,
        "get_train_dataloader": "_loader",
        "compute_loss": "_loss",
    }

    def __init__(self, trainer: Any, out: str | Path, **options: Any) -> None:
        self.clip = PpoClip(low=float(trainer.epsilon_low), high=float(trainer.epsilon_high))
        self._samples: dict[int, Sequence[dict[str, Any]]] = {}  # of the micro-batches that are not used yet
        self._packed = 0
        with attention_implementation(trainer.accelerator.unwrap_model(trainer.model), "sdpa"):
            super().__init__(trainer, out, temperature=float(trainer.args.temperature), **options)

    def label(self) -> str:
        """The method's name in the trace."""
        return "grpo"

    def notes(self) -> list[str]:
        """Notes for run.json."""
        return [
            "the ratio is to the sampler's policy, of whatever version; advantages are those of the rollout worker",
            "each micro-batch is divided by its own number of tokens",
            "critical sharpness is not measured",
        ]

    def gradient_done(self) -> None:
        """Run the probes that are due."""
        with attention_implementation(self.model, "sdpa"):
            super().gradient_done()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """As in Recorder, with an attention that takes rows of samples; TRL's takes trees only."""
        with attention_implementation(self.model, "sdpa"), super().whole():
            yield

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def _loader(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's loader, which numbers its micro-batches and keeps their samples."""
        loader = self._original["get_train_dataloader"](*args, **kwargs)
        collator = loader.collate_fn
        pack = collator.torch_call

        def torch_call(examples: list[Any]) -> dict[str, Any]:
            """The collator's batch, with a number by which its samples are found again."""
            batch: dict[str, Any] = pack(examples)
            if self.recording:
                ((row,),) = examples  # one process, so one row
                self._packed += 1
                self._samples[self._packed] = row.samples
                batch[ROW] = torch.tensor([self._packed])
            return batch

        collator.torch_call = torch_call
        return loader

    def _loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not self.recording or ROW not in inputs or not torch.is_grad_enabled():
            return self._original["compute_loss"](model, inputs, *args, **kwargs)
        batch = self.safely(partial(self._open, self._samples.pop(int(inputs[ROW][0]))))
        seen: list[bool] = []

        def hook(module: Any, given: Any, output: Any) -> None:
            """Record the first forward pass of the loss."""
            if not seen and batch is not None:
                seen.append(True)
                self.safely(partial(self._use, batch, inputs, output.log_probs))

        handle = self.model.register_forward_hook(hook)
        try:
            return self._original["compute_loss"](model, inputs, *args, **kwargs)
        finally:
            handle.remove()

    def _open(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Add the micro-batch to the step: measure its tokens' statistics before the update."""
        started = time.perf_counter()
        rollouts = rollouts_of(samples, self.policy)
        advantage = torch.tensor([float(sample["advantage"]) for sample in samples], dtype=torch.float64)
        members = rollouts.group.tolist()
        texts = prompt_texts(rollouts, self.policy.tokenizer)
        examples = [Example(texts[members.index(group)], "", {}) for group in range(max(members) + 1)]
        rewards = [reward_of(sample["metrics"], self.correct) for sample in samples]
        labels = [(self._serial, group) for group in members]
        made = self.open_batch(RolloutBatch(examples, rollouts, rewards, advantage, None), labels)
        self._step.seconds["recording_s"] += time.perf_counter() - started
        return made

    def _use(self, batch: Batch, inputs: Mapping[str, Any], log_probs: Tensor) -> None:
        """Record what TRL's loss does with the samples' tokens; it differentiates `log_probs` (1, P) of the tree's positions."""
        rollouts = batch.rollout_batch.rollouts
        mask = rollouts.completion_mask.bool()
        index = inputs["token_index"][inputs["token_index"] >= 0]  # (M,) position of each token, sample by sample
        dense = torch.zeros(mask.shape, dtype=log_probs.dtype, device=log_probs.device)
        dense[mask] = log_probs.detach().flatten()[index]
        change = torch.where(mask, dense - rollouts.behavior_logp, 0.0)
        advantage = batch.rollout_batch.advantage.to(dense)[:, None].expand(dense.shape)
        clipped = gradient_killed(self.clip, change.exp(), advantage) * mask.int()
        used = TokenLoss(change.exp(), change, clipped, torch.zeros_like(dense))
        rows = torch.arange(len(mask))
        self._step.compare(batch.serial, rows, dense)
        keep = self._step.use(batch.serial, rows, used)
        count = inputs["global_n_tokens"][0].clamp(min=1.0) * self.trainer.current_gradient_accumulation_steps
        coef = torch.where(mask & (clipped == 0), -advantage * change.exp(), 0.0) / count

        def check(gradient: Tensor) -> None:
            """Keep the coefficients (n,) if the gradient of the log-probabilities is theirs."""
            found = gradient.flatten()
            expected = torch.zeros_like(found).index_add(0, index, coef[mask].to(found))
            limit = 1e-3 * float(expected.abs().max())
            if not bool((found - expected).abs().max() <= limit):
                raise UserError(
                    f"the loss of {type(self.trainer).__name__} is not the clipped surrogate of AsyncGRPOTrainer, so its "
                    "coefficients are not known; leave compute_loss as it is"
                )
            keep(coef)

        log_probs.register_hook(lambda gradient: self.safely(partial(check, gradient)))


def rollouts_of(samples: Sequence[Mapping[str, Any]], policy: Any) -> Rollouts:
    """Samples of the rollout worker as Rollouts; a row's prompt is what precedes its first token in the loss."""
    prompts, completions, flags, sampler = [], [], [], []
    for sample in samples:
        ids, counted = sample["input_ids"].tolist(), [bool(flag) for flag in sample["completion_mask"].tolist()]
        counted[0] = False  # nothing predicts it
        first = counted.index(True) if any(counted) else len(ids) - 1
        prompts.append(ids[:first])
        completions.append(ids[first:])
        flags.append(counted[first:])
        sampler.append(torch.as_tensor(sample["old_log_probs"][first:]))
    made = completions_of(prompts, completions, flags, policy.device)
    behavior = torch.nn.utils.rnn.pad_sequence(sampler, batch_first=True, padding_value=torch.nan).to(policy.device)
    labels = {group: number for number, group in enumerate(dict.fromkeys(sample["group_id"] for sample in samples))}
    ends = [row[-1] in policy.eos_ids for row in completions]
    reward = torch.tensor([float(sample["metrics"].get("reward", torch.nan)) for sample in samples])
    return replace(
        made,
        behavior_logp=torch.where(made.completion_mask.bool(), behavior.float(), 0.0),
        group=torch.tensor([labels[sample["group_id"]] for sample in samples], device=policy.device),
        truncated=~torch.tensor(ends, device=policy.device),
        texts=policy.tokenizer.batch_decode(completions, clean_up_tokenization_spaces=False),
    ).with_reward(reward)


def reward_of(metrics: Mapping[str, float], correct: Callable[[float], bool] | None) -> Reward:
    """A sample's reward and its parts, from the rollout worker's metrics."""
    total = float(metrics.get("reward", torch.nan))
    parts = {name.removeprefix(_REWARD): float(part) for name, part in metrics.items() if name.startswith(_REWARD)}
    return Reward(total, parts, bool(correct(total)) if correct else False)
