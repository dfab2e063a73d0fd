"""What is measured beside training, between an update's gradient and its step. Observers change nothing that training sees.

Token gradients: at every k-th step, and at any step whose gradient norm is a spike, all tokens get the local score norm and
their attribution; the tokens with the largest local norm and some drawn at random also get the exact norm, so that each run
states the local tier's error beside its numbers. Held-out influence and the loss surface have schedules of their own. A
probe that refuses the policy, or differs from plain autograd on it, is left out of the run, which goes on; an event says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.config.probes import Check
from sharpscope.errors import UserError
from sharpscope.policy import Policy, Rollouts
from sharpscope.probes import (
    ProbeSet,
    attribute,
    coming_update,
    directional_derivative,
    failure_coefficients,
    logp_gradient,
    nll_coefficients,
    score_norms,
    update_attribution,
)
from sharpscope.recording.health import Event, refusal
from sharpscope.recording.probe_sets import Drawer, needs_probe_set, run_probe_set
from sharpscope.recording.step import Round, UpdateBatch
from sharpscope.recording.surface import SurfaceProbes
from sharpscope.seeds import derive, generator
from sharpscope.tasks import Task
from sharpscope.traces.spike_rule import robust_z

if TYPE_CHECKING:
    from sharpscope.config import RunConfig
    from sharpscope.training.learning import Learner


class Observers:
    """Runs the probes that are due at a step; `columns` and `rows` are what they found."""

    def __init__(self, config: RunConfig, policy: Policy, task: Task, learner: Learner) -> None:
        self.config, self.policy, self.task, self.learner = config, policy, task, learner
        self.spec = config.recording
        self.seconds = 0.0
        self.drawer = Drawer(config, policy, task)
        self.surface = SurfaceProbes(config, learner, self.drawer)
        self.probe_set: ProbeSet | None = None
        self._columns: dict[str, Tensor] = {}
        self._parts: list[tuple[str, float]] = []
        self._events: list[Event] = []
        self._refused: set[str] = set()  # columns that are left out for the rest of the run
        self._checked: set[str] = set()  # columns that have passed their self-check
        learner.before_step = self._before_step

    def start(self, info: dict[str, Any]) -> list[Event]:
        """Load or build the probe set, where a schedule needs one; `info` is run.json."""
        if not needs_probe_set(self.config):
            return []
        self.probe_set = run_probe_set(self.config, self.task)
        if self.spec.heldout_influence_every and self.spec.heldout_functional == "nll":
            self.probe_set.solutions("heldout")  # says now, not in the middle of the run, if there are none
        return self.surface.start(self.probe_set, info)

    def begin(self, step: int, drawn: Round, recent: list[float]) -> None:
        """Learn what this step's updates will be about; `recent` are the last steps' log gradient norms."""
        self.seconds = 0.0
        self._columns = {}
        self._parts, self._events = [], []
        self._step, self._rollouts, self._recent = step, drawn.rollouts, recent

    def columns(self) -> dict[str, Tensor]:
        """Probe columns of the tokens table, (N, T) each, NaN where nothing was measured."""
        return self._columns

    def rows(self) -> dict[str, Any]:
        """Rows of the probes table about this step's updates: what of ‖Δθ‖² is not the tokens'."""
        if not self._parts:
            return {}
        blank = [None] * len(self._parts)
        return {
            "step": self._step, "probe": "update", "probe_set": "", "functional": "surrogate", "parameters": "all",
            "quantity": [name for name, _ in self._parts], "value": [value for _, value in self._parts],
            "std_error": blank, "samples": blank, "rho": blank, "converged": blank, "residual": blank, "seed": blank,
            "seconds": self.seconds,
        }  # fmt: skip

    def events(self) -> list[Event]:
        """One for each column that this step's probes left out."""
        return self._events

    def _fill(self, column: str, measure: Callable[[Check], None]) -> None:
        """Measure `column`; where its probe refuses the policy, leave the column out of the rest of the run."""
        if column in self._refused:
            return
        check = self.config.probes.check
        if self.learner.sharded and column in self._checked and check == "first":
            check = "off"  # the copy that probes see is a new model each time
        try:
            measure(check)
            self._checked.add(column)
        except UserError as problem:
            self._refused.add(column)
            self._events.append(refusal(self._step, column, problem))

    # -- between gradient and step ----------------------------------------------------------------------------------

    def _before_step(self, batch: UpdateBatch) -> None:
        if not bool(batch.first.any()):
            return  # a row of the tokens table belongs to the first update that used its token
        started = time.perf_counter()
        spec, step = self.spec, self._step
        due = bool(spec.token_gradients_every) and step % spec.token_gradients_every == 0
        if not due and spec.spike_z is not None and batch.grad_norm > 0:
            due = robust_z(self._recent, math.log(batch.grad_norm)) >= spec.spike_z
        if due:
            self._token_gradients(batch)
        if spec.heldout_influence_every and step % spec.heldout_influence_every == 0:
            self._fill("heldout_influence", lambda check: self._influence(batch, check))
        self.seconds += time.perf_counter() - started

    def _token_gradients(self, batch: UpdateBatch) -> None:
        """Local norms and attribution of all tokens of the update, exact norms of a few."""
        part = self._rollouts.rows(batch.rows)
        mask = _mask(part)
        # Forward and backward passes cost by token, so tokens without a part in the gradient are still run: they have norms.
        local: list[Tensor] = []

        def measure_local(check: Check) -> None:
            local.append(self._norms(part, torch.arange(len(mask), device=mask.device), mask, "local", check))
            self._put("score_norm_local", batch, local[0])

        self._fill("score_norm_local", measure_local)
        if batch.grad_norm > 0:
            gradient = [
                torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in self.learner.seen.parameters
            ]
            coef = _wide(part, batch.loss_coef.to(mask.device))

            def measure_shares(check: Check) -> None:
                along = self._along(part, mask, coef, gradient, check)
                self._put("attribution", batch, along / batch.grad_norm**2)

            self._fill("attribution", measure_shares)
            if self.spec.update_attribution:
                self._fill("update_attribution", lambda check: self._update_attribution(batch, part, mask, coef, check))
        self._fill("score_norm", lambda check: self._exact(batch, part, local[0] if local else None, check))

    def _norms(
        self, part: Rollouts, rows: Tensor, mask: Tensor, tier: Literal["local", "exact"], check: Check
    ) -> Tensor:
        """Score norms (m, P+T) of the `rows` (m,) of `part`; processes compute a part of them each."""
        model, temperature = self.learner.seen.model, self.config.rollout.temperature

        def norms(some: Tensor) -> Tensor:
            attention = part.attention_mask[some]
            return score_norms(
                model, part.input_ids[some], mask[some], tier=tier, attention_mask=attention, temperature=temperature,
                check=check,
            ).values  # fmt: skip

        return _map_rows(rows, norms, mask)

    def _along(self, part: Rollouts, mask: Tensor, coef: Tensor, direction: list[Tensor], check: Check) -> Tensor:
        """c_t⟨∇log π_t, direction⟩ (n, P+T). Rows of groups whose rewards are all equal have c = 0 and are not run."""
        live = ((coef != 0) & mask.bool()).any(dim=1).nonzero()[:, 0]
        out, model = torch.zeros_like(coef), self.learner.seen.model

        def along(some: Tensor) -> Tensor:
            return attribute(
                model, part.input_ids[some], mask[some], coef[some], direction, part.attention_mask[some],
                self.config.rollout.temperature, self.spec.derivative, check=check,
            )  # fmt: skip

        if len(live):
            out[live] = _map_rows(live, along, mask).to(out)
        return out

    def _update_attribution(self, batch: UpdateBatch, part: Rollouts, mask: Tensor, coef: Tensor, check: Check) -> None:
        """Shares of ‖Δθ‖² of the step that the optimizer is about to take; what is not the tokens' goes to the probes table."""
        seen, temperature = self.learner.seen, self.config.rollout.temperature
        split = coming_update(seen.optimizer, seen.parameters, batch.clip_factor)

        def shares_of(some: Tensor) -> Tensor:
            # D⁻¹ stretches the direction over many orders of magnitude, where a difference of float32 values is too coarse.
            return update_attribution(
                seen.model, part.input_ids[some], mask[some], coef[some], split, method="forward",
                attention_mask=part.attention_mask[some], temperature=temperature, check=check,
            )  # fmt: skip

        shares = _map_rows(torch.arange(len(mask), device=mask.device), shares_of, mask)
        self._put("update_attribution", batch, shares)
        if batch.index == 0:
            self._parts += [
                ("update_share_gradient", split.gradient), ("update_share_momentum", split.momentum),
                ("update_share_weight_decay", split.weight_decay),
            ]  # fmt: skip

    def _exact(self, batch: UpdateBatch, part: Rollouts, local: Tensor | None, check: Check) -> None:
        """The exact tier on the largest tokens by local norm and on random others, with the probability of being drawn.

        Where there are no local norms: on random ones alone.
        """
        first = batch.first.to(part.input_ids.device)
        places = first.nonzero()  # (M, 2)
        norms = torch.zeros(len(places), device=first.device) if local is None else local[:, part.prompt_width :][first]
        top = norms.argsort(descending=True, stable=True)[: 0 if local is None else self.spec.exact_top]
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
        values = torch.full(part.input_ids.shape, math.nan, device=norms.device)
        exact = self._norms(part, keep, mask, "exact", check)
        values[keep] = torch.where(mask[keep].bool(), exact.float(), math.nan)
        self._put("score_norm", batch, values)
        self._put("score_norm_std_error", batch, torch.where(values.isnan(), math.nan, 0.0))
        chances = torch.full(part.input_ids.shape, math.nan, device=norms.device)
        chances[rows, columns + part.prompt_width] = probability[chosen]
        self._put("draw_probability", batch, chances)
        self._fill("sharp_alignment", lambda check: self._alignment(batch, part, keep, mask, exact, check))

    def _alignment(
        self, batch: UpdateBatch, part: Rollouts, keep: Tensor, mask: Tensor, exact: Tensor, check: Check
    ) -> None:
        """Share of ∇log π_t in the span of the newest top eigenvectors, for the tokens whose exact norm is known."""
        vectors = self.surface.vectors
        if vectors is None:
            return
        seen, temperature = self.learner.seen, self.config.rollout.temperature
        sizes = [p.numel() for p in seen.parameters]

        def squares(some: Tensor) -> Tensor:
            total = torch.zeros(len(some), mask.shape[1], dtype=exact.dtype, device=exact.device)
            for vector in vectors:
                direction = [v.view_as(p) for v, p in zip(vector.split(sizes), seen.parameters, strict=True)]
                found = directional_derivative(
                    seen.model, part.input_ids[some], mask[some], direction, method=self.spec.derivative,
                    attention_mask=part.attention_mask[some], temperature=temperature, check=check,
                )  # fmt: skip
                total += found.values.to(total) ** 2
            return total

        total = _map_rows(keep, squares, mask)
        values = torch.full(part.input_ids.shape, math.nan, device=exact.device)
        share = torch.where(exact > 0, total / exact.clamp_min(torch.finfo(exact.dtype).tiny) ** 2, math.nan)
        values[keep] = torch.where(mask[keep].bool(), share, math.nan).float()
        self._put("sharp_alignment", batch, values)

    def _influence(self, batch: UpdateBatch, check: Check) -> None:
        """c_t⟨∇log π_t, ∇L_heldout⟩ of all tokens of the update; positive lowers the held-out loss."""
        part = self._rollouts.rows(batch.rows)
        coef = _wide(part, batch.loss_coef.to(part.input_ids.device))
        found = self._along(part, _mask(part), coef, self._heldout_gradient(check), check)
        self._put("heldout_influence", batch, found)

    def _heldout_gradient(self, check: Check) -> list[Tensor]:
        """∇L_heldout: of the expected failure on rollouts that the present policy draws, or of stored solutions' nll."""
        assert self.probe_set is not None
        model, temperature = self.learner.seen.model, self.config.rollout.temperature
        if self.spec.heldout_functional == "nll":
            batch = self.probe_set.solutions("heldout")
            batch = batch.to(self.policy.device)
            mask = batch.scored.long()  # right-padded: attention to padding behind a token never happens
            attention = (torch.arange(mask.shape[1], device=mask.device) < batch.lengths[:, None]).long()
            coef = nll_coefficients(mask)
            return logp_gradient(model, batch.input_ids, mask, coef, attention, temperature, check=check)
        seed = derive(self.config.seed, "heldout", self._step) % 2**31
        drawn = self.probe_set.draw("heldout", self.spec.heldout_samples, self.drawer, seed)
        mask = _mask(drawn.rollouts)
        coef = failure_coefficients(mask, drawn.correct)
        rows = drawn.rollouts.rows(torch.arange(len(mask))[distributed.local_slice(len(mask))])
        own = [torch.zeros_like(p) for p in self.learner.seen.parameters]
        problem: UserError | None = None
        if len(rows):
            coef = coef[distributed.local_slice(len(mask))]
            try:
                own = logp_gradient(
                    model, rows.input_ids, _mask(rows), coef, rows.attention_mask, temperature, check=check
                )
            except UserError as error:
                problem = error
        _raise_together(problem)
        return distributed.sum_tensors(own)

    def _put(self, name: str, batch: UpdateBatch, values: Tensor) -> None:
        """Keep `values` (n, P+T) of the update's rows for the tokens whose first update it is."""
        if name not in self._columns:
            self._columns[name] = torch.full(self._rollouts.completion_mask.shape, math.nan)
        target = self._columns[name]
        new = values[:, self._rollouts.prompt_width :].detach().float().cpu()
        target[batch.rows] = torch.where(batch.first, new, target[batch.rows])


def _map_rows(rows: Tensor, compute: Callable[[Tensor], Tensor], mask: Tensor) -> Tensor:
    """`distributed.map_rows` of a probe, results (m, P+T) like rows of `mask`; a refusal in one process is raised in all."""
    problem: UserError | None = None

    def measured(some: Tensor) -> Tensor:
        nonlocal problem
        try:
            return compute(some)
        except UserError as error:  # the other processes wait for this one's rows
            problem = error
            return torch.full((len(some), mask.shape[1]), math.nan, device=mask.device)

    found = distributed.map_rows(rows, measured)
    _raise_together(problem)
    return found


def _raise_together(problem: UserError | None) -> None:
    """Raise the first process's problem in every process."""
    first = distributed.first_not_none([problem])
    if first is not None:
        raise first


def _mask(part: Rollouts) -> Tensor:
    """(n, P+T): 1 on the completion tokens that count."""
    return torch.cat([torch.zeros_like(part.input_ids[:, : part.prompt_width]), part.completion_mask], dim=1)


def _wide(part: Rollouts, values: Tensor) -> Tensor:
    """Completion values (n, T) in the shape of `input_ids` (n, P+T), 0 on the prompt."""
    return torch.cat([values.new_zeros(len(values), part.prompt_width), values], dim=1)
