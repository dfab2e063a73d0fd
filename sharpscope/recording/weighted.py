"""How far the token weights of a method would turn the gradient of a training that does not use them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.methods import Method
from sharpscope.methods.plan import calibrate, prepare
from sharpscope.methods.token_weights import UniformWeight
from sharpscope.policy import Rollouts
from sharpscope.policy.directions import Rotation, rotation
from sharpscope.recording.recorded_model import original_forward
from sharpscope.recording.step import PendingUpdate, RolloutBatch, StepTokens, step_tensors
from sharpscope.seeds import generator
from sharpscope.tokens import logp_gradient


@dataclass(frozen=True)
class WeightedGradient:
    """Compares g + Σ (w − 1)·c·∇log π with the update's gradient g, for the weights w of `method`.

    c is a token's coefficient without its KL term: that and terms of the loss that no token has stay as they are.
    """

    method: Method
    temperature: float
    seed: int

    def calibrated(
        self, batch: RolloutBatch, tokens: StepTokens, progress: float
    ) -> WeightedGradient:
        """With the constants of the weights fixed by a batch; as it is if they need none, or a gradient that it does not have."""
        tensors = step_tensors(
            batch.rollouts, batch.advantage, tokens.stats, tokens.stats.logp, progress, self.method
        )
        weight = self.method.weight
        if not weight.needs_calibration or (weight.needs_gradient and not bool(tensors.mass.any())):
            return self
        fixed = self.method.model_copy(update={"weight": calibrate(weight, tensors)})
        return replace(self, method=fixed)

    def rotation(
        self,
        model: nn.Module,
        batch: RolloutBatch,
        tokens: StepTokens,
        update: PendingUpdate,
        kl: Tensor,
        *,
        progress: float,
        step: int,
    ) -> Rotation:
        """The rotation of the gradient in `.grad`; `kl` (n, T) is the KL term's part of the update's coefficients."""
        method = self.method
        stats = tokens.stats
        width = update.loss_coef.shape[1]
        tensors = step_tensors(batch.rollouts, batch.advantage, stats, stats.logp, progress, method)
        if method.weight.needs_gradient and not bool(tensors.mass.any()):
            # they would multiply 0
            method = method.model_copy(update={"weight": UniformWeight()})
        plan = prepare(method, tensors, generator(self.seed, "plan", step))
        factor = (plan.weight * plan.keep.to(plan.weight)).cpu()[update.rows, :width]
        change = self._gradient(
            model,
            batch.rollouts.rows(update.rows.to(batch.rollouts.group.device)),
            (factor - 1) * (update.loss_coef - kl),
        )
        parameters = [p for p in model.parameters() if p.requires_grad]
        plain = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in parameters]
        turned = [more.add_(gradient) for more, gradient in zip(change, plain, strict=True)]
        return rotation(turned, plain)

    def _gradient(self, model: nn.Module, rollouts: Rollouts, coef: Tensor) -> list[Tensor]:
        """Σ c·∇log π of the rows of all processes; `coef` is (n, T)."""
        prompt = torch.zeros_like(rollouts.input_ids[:, : rollouts.prompt_width])
        mask = torch.cat([prompt, rollouts.completion_mask], 1)  # (n, P+T)
        wide = torch.cat([prompt.to(coef.dtype), coef.to(prompt.device)], 1)
        rows = distributed.local_slice(len(mask))
        with original_forward(model):
            change = logp_gradient(
                model,
                rollouts.input_ids[rows],
                mask[rows],
                wide[rows],
                rollouts.attention_mask[rows],
                self.temperature,
            )
        distributed.gather(None)  # before the sum, in which a process that has failed takes no part
        return distributed.sum_tensors(change)


UNKNOWN = Rotation(math.nan, math.nan)
"""Of the optimizer's step, which is not made with the weights."""
