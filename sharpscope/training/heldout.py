"""The held-out gradient that influence is measured along."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpscope.errors import UserError
from sharpscope.policy import Policy, microbatches, score_completions
from sharpscope.tasks import Example, Task
from sharpscope.training.rounds import draw_completions
from sharpscope.training.seeds import derive

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


class HeldoutGradient:
    """∇ of the expected failure on fixed held-out prompts, under the policy as it is now.

    L_heldout = mean_i [1 − R_i·exp(Σ_t ln r_t)] over rollouts that the present policy draws (seeded by step), R_i = 1 where
    the task calls the completion correct. At r = 1 its gradient is −mean_i R_i·Σ_t ∇ln π_t, an unbiased estimate of the
    gradient of the failure probability.
    """

    def __init__(self, config: RunConfig, policy: Policy, task: Task) -> None:
        self.config, self.policy, self.task = config, policy, task
        self._prompts: list[Example] | None = None

    @property
    def prompts(self) -> list[Example]:
        """The first `recording.heldout_prompts` examples of the held-out split: the same for every method and seed."""
        if self._prompts is None:
            self._prompts = heldout_prompts(self.config, self.task)
        return self._prompts

    def gradient(self, step: int) -> list[Tensor]:
        """One tensor a trainable parameter; `.grad` of the model is left as it is."""
        config, model = self.config, self.policy.model
        size = config.recording.heldout_samples
        drawn = draw_completions(self.policy, self.prompts, size, config.rollout, derive(config.seed, "heldout", step))
        correct = torch.tensor(
            [self.task.score(self.prompts[row // size], text).correct for row, text in enumerate(drawn.texts)]
        ).to(self.policy.device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        total = [torch.zeros_like(p) for p in parameters]
        share = config.update.share_prompt
        batches = microbatches(
            drawn.lengths, config.update.microbatch_tokens, prompt_lengths=drawn.prompt_lengths,
            group=drawn.group if share else None,
        )  # fmt: skip
        for rows in batches:
            right = rows[correct[rows].cpu()]
            if not len(right):
                continue  # a wrong completion's term is constant
            scored = score_completions(
                model, drawn.rows(right), config.rollout.temperature, share_prompt=share, with_grad=True
            )
            # exp(Σ ln π − Σ ln π as drawn) is 1 with the gradient Σ ∇ln π
            log_ratio = (scored.logp - scored.logp.detach()).sum(dim=1)
            loss = -log_ratio.exp().sum() / len(drawn)
            for kept, new in zip(total, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
                if new is not None:
                    kept.add_(new)
        return total


def heldout_prompts(config: RunConfig, task: Task) -> list[Example]:
    """The held-out probe prompts.

    Raises:
        UserError: influence is asked for and the task has no held-out split.
    """
    examples = task.splits().get("heldout", [])
    if not examples:
        raise UserError(
            "recording.heldout_influence_every: the task has no split 'heldout' to measure influence on; set it to 0"
        )
    return examples[: config.recording.heldout_prompts]
