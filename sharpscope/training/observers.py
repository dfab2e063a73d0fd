"""What is measured beside training, between an update's gradient and its step. Observers change nothing that training sees.

Token gradients: at every k-th step, and at any step whose gradient norm is a spike, all tokens get the local score norm and
their attribution; the tokens with the largest local norm and some drawn at random also get the exact norm, so that each run
states the local tier's error beside its numbers. Held-out influence has a schedule of its own.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpscope.policy import Policy, Rollouts
from sharpscope.tasks import Task
from sharpscope.traces.spike_rule import robust_z
from sharpscope.training.heldout import HeldoutGradient
from sharpscope.training.learning import Learner, UpdateBatch
from sharpscope.training.rounds import Round
from sharpscope.training.seeds import generator

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


class Observers:
    """Runs the probes that are due at a step; `columns` and `rows` are what they found."""

    def __init__(self, config: RunConfig, policy: Policy, task: Task, learner: Learner) -> None:
        self.config, self.policy, self.learner = config, policy, learner
        self.spec = config.recording
        self.seconds = 0.0
        self._columns: dict[str, Tensor] = {}
        self._heldout = HeldoutGradient(config, policy, task)
        learner.before_step = self._before_step

    def begin(self, step: int, drawn: Round, recent: list[float]) -> None:
        """Learn what this step's updates will be about; `recent` are the last steps' log gradient norms."""
        self.seconds = 0.0
        self._columns = {}
        self._step, self._rollouts, self._recent = step, drawn.rollouts, recent

    def columns(self) -> dict[str, Tensor]:
        """Probe columns of the tokens table, (N, T) each, NaN where nothing was measured."""
        return self._columns

    def rows(self) -> dict[str, dict[str, Any]]:
        """Rows of other tables, by table."""
        return {}

    # -- between gradient and step ----------------------------------------------------------------------------------

    def _before_step(self, batch: UpdateBatch) -> None:
        started = time.perf_counter()
        spec, step = self.spec, self._step
        due = bool(spec.token_gradients_every) and step % spec.token_gradients_every == 0
        if not due and spec.spike_z is not None and batch.grad_norm > 0:
            due = robust_z(self._recent, math.log(batch.grad_norm)) >= spec.spike_z
        if due:
            self._token_gradients(batch)
        if spec.heldout_influence_every and step % spec.heldout_influence_every == 0:
            self._influence(batch)
        self.seconds += time.perf_counter() - started

    def _token_gradients(self, batch: UpdateBatch) -> None:
        """Local norms and attribution of all tokens of the update, exact norms of a few."""
        from sharpscope.probes import attribute, score_norms

        part = self._rollouts.rows(batch.rows)
        mask = _mask(part)
        common: dict[str, Any] = {"attention_mask": part.attention_mask, "temperature": self.config.rollout.temperature}
        local = score_norms(self.policy.model, part.input_ids, mask, tier="local", **common).values
        self._put("score_norm_local", batch, local)
        if batch.grad_norm > 0:
            gradient = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in self.learner.parameters]
            coef = _wide(part, batch.loss_coef.to(mask.device))
            along = attribute(self.policy.model, part.input_ids, mask, coef, direction=gradient, **common)
            self._put("attribution", batch, along / batch.grad_norm**2)
        self._exact(batch, part, local, common)

    def _exact(self, batch: UpdateBatch, part: Rollouts, local: Tensor, common: dict[str, Any]) -> None:
        """The exact tier on the largest tokens by local norm and on random others, with the probability of being drawn."""
        from sharpscope.probes import score_norms

        places = part.completion_mask.bool().nonzero()  # (M, 2)
        norms = local[:, part.prompt_width :][part.completion_mask.bool()]  # (M,)
        top = norms.argsort(descending=True, stable=True)[: self.spec.exact_top]
        others = torch.ones(len(norms), dtype=torch.bool, device=norms.device)
        others[top] = False
        rest = others.nonzero()[:, 0]
        draw = torch.randperm(len(rest), generator=generator(self.config.seed, "exact", self._step, batch.index))
        drawn = rest[draw[: self.spec.exact_random].to(rest.device)]
        probability = torch.ones(len(norms), device=norms.device)
        probability[drawn] = len(drawn) / max(len(rest), 1)
        chosen = torch.cat([top, drawn])
        if not len(chosen):
            return
        mask = torch.zeros_like(part.input_ids)
        rows, columns = places[chosen].T
        mask[rows, columns + part.prompt_width] = 1
        keep = mask.any(dim=1).nonzero()[:, 0]  # only completions that hold a chosen token are run
        some = {**common, "attention_mask": part.attention_mask[keep]}
        values = torch.full(part.input_ids.shape, math.nan, device=norms.device)
        exact = score_norms(self.policy.model, part.input_ids[keep], mask[keep], tier="exact", **some).values
        values[keep] = torch.where(mask[keep].bool(), exact.float(), math.nan)
        self._put("score_norm", batch, values)
        self._put("score_norm_std_error", batch, torch.where(values.isnan(), math.nan, 0.0))
        chances = torch.full(part.input_ids.shape, math.nan, device=norms.device)
        chances[rows, columns + part.prompt_width] = probability[chosen]
        self._put("draw_probability", batch, chances)

    def _influence(self, batch: UpdateBatch) -> None:
        """−c_t⟨∇log π_t, ∇L_heldout⟩ of all tokens of the update; positive lowers the held-out loss."""
        from sharpscope.probes import attribute

        part = self._rollouts.rows(batch.rows)
        direction = [-g for g in self._heldout.gradient(self._step)]
        along = attribute(
            self.policy.model, part.input_ids, _mask(part), _wide(part, batch.loss_coef.to(part.input_ids.device)),
            direction=direction, attention_mask=part.attention_mask, temperature=self.config.rollout.temperature,
        )  # fmt: skip
        self._put("heldout_influence", batch, along)

    def _put(self, name: str, batch: UpdateBatch, values: Tensor) -> None:
        """Keep `values` (n, P+T) of the update's rows where no earlier update of the step has put any."""
        mask = self._rollouts.completion_mask.bool().cpu()
        if name not in self._columns:
            self._columns[name] = torch.full(mask.shape, math.nan)
        target = self._columns[name]
        new = values[:, self._rollouts.prompt_width :].detach().float().cpu()
        free = target[batch.rows].isnan() & mask[batch.rows]
        target[batch.rows] = torch.where(free, new, target[batch.rows])


def _mask(part: Rollouts) -> Tensor:
    """(n, P+T): 1 on the completion tokens that count."""
    return torch.cat([torch.zeros_like(part.input_ids[:, : part.prompt_width]), part.completion_mask], dim=1)


def _wide(part: Rollouts, values: Tensor) -> Tensor:
    """Completion values (n, T) in the shape of `input_ids` (n, P+T), 0 on the prompt."""
    return torch.cat([values.new_zeros(len(values), part.prompt_width), values], dim=1)


