"""Probes of an update, between its gradient and the optimizer's step. They change nothing that training sees.

`MeasurementSchedule` says which steps are measured. At such a step the tokens of a random sample of each update's groups get the local
score norm and their attribution; at a step whose gradient norm is a spike, those of all groups. The tokens with the largest
local norm and random ones also get the exact norm, so that the error of the local norm is known in each run. A probe that
refuses the policy, or differs from plain autograd on it, is left out for the rest of the run, and an event reports it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.config.probes import Check
from sharpscope.errors import UserError
from sharpscope.policy import Policy, Rollouts, completions_of
from sharpscope.policy.scoring import Scorer
from sharpscope.policy.sharding import ModelView, is_sharded
from sharpscope.probes import (
    CriticalSharpness,
    Estimate,
    ProbeSet,
    UpdateSplit,
    attribute,
    columns,
    coming_update,
    critical_sharpness,
    directional_derivative,
    failure_coefficients,
    labeled,
    logp_gradient,
    score_norms,
    update_attribution,
    update_direction,
    update_slope,
)
from sharpscope.recording.health import refusal
from sharpscope.recording.probe_sets import Drawer, needs_probe_set, run_probe_set
from sharpscope.recording.schedule import CRITICAL, MeasurementSchedule
from sharpscope.recording.step import PendingUpdate
from sharpscope.recording.surface import SurfaceProbes
from sharpscope.rules import Event
from sharpscope.seeds import derive, generator
from sharpscope.tasks import Task
from sharpscope.traces import robust_z

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


HELD_CONSTANT = ("cispo", "dppo", "vespo", "delight")  # surrogates with a factor of the ratio that has no gradient
GUESS = 16.0  # first step size of a run's first line search for the critical sharpness, in learning rates
TOLERANCE = 0.25  # relative width of the bracket in which the critical learning rate is interpolated
EVALUATIONS = 12  # largest number of losses of a line search
LEADING = 8  # tokens of an update whose local norms are kept by layer
HELDOUT_SAMPLES = 8  # completions per prompt for held-out influence


@dataclass(frozen=True)
class Observations:
    """Results of the observers of a step."""

    columns: dict[str, Tensor]  # of the tokens table, (N, T) each, NaN where nothing was measured
    by_layer: dict[tuple[int, int], dict[str, float]]  # rollout and position of leading tokens -> local norms by layer
    rows: dict[str, Any]  # of the probes table: the parts of ‖Δθ‖² that are not the tokens'; empty if not measured
    events: list[Event]  # one for each column that its probe refused
    seconds: float


class Observers:
    """The probes of a run: `for_step` observes the updates of a step, `surface` the weights between steps.

    Args:
        config: of the run.
        policy: in training.
        view: gives the present model, gradients and optimizer; every process must call it, in the same order.
        drawer: draws completions for probes; None where no schedule needs any.
    """

    def __init__(
        self, config: RunConfig, policy: Policy, view: Callable[[], ModelView], drawer: Drawer | None = None
    ) -> None:
        self.config, self.policy, self.view, self.drawer = config, policy, view, drawer
        self.schedule = MeasurementSchedule(config)
        self.surface = SurfaceProbes(config, view, drawer, self.schedule)
        self.probe_set: ProbeSet | None = None
        self.fixed: Rollouts | None = None  # solutions of the probe set, for the entropy at fixed tokens
        self.refused: set[str] = set()  # columns that are left out for the rest of the run
        self.checked: set[str] = set()  # columns that have passed their self-check
        self.critical_lr: float | None = None  # η_c found last, from which the next line search starts

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON."""
        return self.schedule.state() | {"critical_lr": self.critical_lr}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.critical_lr = state["critical_lr"]
        self.schedule.restore(state)

    def start(self, task: Task, info: dict[str, Any]) -> list[Event]:
        """Load or build the probe set, where a schedule needs one; `info` is run.json."""
        if not needs_probe_set(self.config):
            return []
        self.probe_set = run_probe_set(self.config, task)
        if self.config.recording.probe_entropy_every:
            self.probe_set.solutions("train")
            solved = [item for item in self.probe_set.split("train") if item.solution]
            prompts, solutions = [item.prompt_ids for item in solved], [item.solution for item in solved]
            fixed = completions_of(prompts, solutions, device=self.policy.device)
            self.fixed = fixed.with_reward(torch.zeros(len(solved)))
        return self.surface.start(self.probe_set, info)

    def entropy_row(self, step: int, scorer: Scorer) -> dict[str, Any] | None:
        """The row of the probes table with the mean entropy after `step` at the fixed tokens [nats]; None where it is not due."""
        every = self.config.recording.probe_entropy_every
        if self.fixed is None or self.probe_set is None or step % every:
            return None
        began = time.perf_counter()
        entropy = scorer.statistics(self.fixed).entropy.double()[self.fixed.completion_mask.bool()]
        row = Estimate(
            "entropy",
            "entropy",
            float(entropy.mean()),
            functional="nll",
            probe_set=self.probe_set.name("train"),
            prompts=len(self.fixed),
            seconds=time.perf_counter() - began,
        )
        self.schedule.spend("entropy", row.seconds)
        return {"step": step, **columns([row])}

    def for_step(self, step: int, rollouts: Rollouts, recent: Sequence[float]) -> StepObserver:
        """An observer of the updates of one step; `recent` are the log gradient norms of the last steps."""
        return StepObserver(self, step, rollouts, recent)


class StepObserver:
    """Called with each update of a step between its gradient and the optimizer's step; `result` is what it found."""

    def __init__(self, run: Observers, step: int, rollouts: Rollouts, recent: Sequence[float]) -> None:
        self.run, self.step, self.rollouts, self.recent = run, step, rollouts, recent
        self._columns: dict[str, Tensor] = {}
        self.by_layer: dict[tuple[int, int], dict[str, float]] = {}
        self._found: list[Estimate] = []
        self._scale = math.nan  # Σ_t |∂L/∂log π_t| of the first update
        self._events: list[Event] = []
        self._seconds = 0.0

    def result(self) -> Observations:
        """Results from the updates so far."""
        return Observations(self._columns, self.by_layer, self._rows(), self._events, self._seconds)

    def _rows(self) -> dict[str, Any]:
        return {"step": self.step, **columns(self._found)} if self._found else {}

    def __call__(self, update: PendingUpdate) -> None:
        """Run the probes that are due."""
        if update.index == 0:
            self._scale = float(update.loss_coef.abs().sum())
        if not bool(update.first_use.any()):
            return  # a row of the tokens table belongs to the first update that used its token
        started = time.perf_counter()
        spec, schedule = self.run.config.recording, self.run.schedule
        due, spike = schedule.due, False
        if spec.spike_z is not None and update.grad_norm > 0:
            spike = robust_z(self.recent, math.log(update.grad_norm)) >= spec.spike_z and schedule.spike_allowed(
                self.step
            )
        measures = [name for name in ("norms", "shares") if spike or due(name, self.step)]
        measures += ["influence"] if due("influence", self.step) else []
        if measures:
            probes = _UpdateProbes(self, update, self.run.view(), sampled=not spike)
            self._seconds += time.perf_counter() - started
            for name in measures:
                with self._timed(name):
                    getattr(probes, name)()

    @contextmanager
    def _timed(self, measure: str) -> Iterator[None]:
        """Count the time of a measure."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.run.schedule.spend(measure, seconds)
        self._seconds += seconds

    def fill(self, column: str, measure: Callable[[Check], None]) -> None:
        """Measure `column`; where its probe refuses the policy, leave the column out of the rest of the run."""
        run = self.run
        if column in run.refused:
            return
        check = run.config.probes.check
        if column in run.checked and check == "first" and is_sharded(run.policy.model):
            check = "off"  # the copy that probes see is a new model each time
        try:
            measure(check)
            run.checked.add(column)
        except UserError as problem:
            run.refused.add(column)
            self._events.append(refusal(self.step, column, problem))

    def put(self, name: str, update: PendingUpdate, rows: Tensor, values: Tensor) -> None:
        """Keep `values` (m, P+T) of the update's rows `rows` (m,) for the tokens whose first update it is."""
        if name not in self._columns:
            self._columns[name] = torch.full(self.rollouts.completion_mask.shape, math.nan)
        rows = rows.cpu()
        target, taken = self._columns[name], update.rows[rows]
        new = values[:, self.rollouts.prompt_width :].detach().float().cpu()
        target[taken] = torch.where(update.first_use[rows], new, target[taken])

    def add_parts(self, split: UpdateSplit) -> None:
        """Keep the parts of ‖Δθ‖² of an update."""
        parts = {
            "update_share_gradient": split.gradient,
            "update_share_momentum": split.momentum,
            "update_share_weight_decay": split.weight_decay,
        }
        self._found += [Estimate("update", name, value, functional="surrogate") for name, value in parts.items()]

    @property
    def critical_due(self) -> bool:
        """Whether `critical` measures this step's first update."""
        return self.run.surface.update_due(self.step) and "critical_sharpness" not in self.run.refused

    def critical(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[], Tensor | float],
        *,
        start: Tensor | float | None = None,
        clip_factor: float | None,
    ) -> None:
        """Measure the critical sharpness of the first update, if it is due.

        Call it between clipping and the optimizer's step. Every process must call it.

        Args:
            model: in training, as the optimizer has it; its `.grad` is what the optimizer gets.
            optimizer: about to make the step.
            loss_fn: the update's loss at the present weights, or one value for each prompt, (k,), with this mean; everything else
                as it was at the start of the step.
            start: its value, by prompt if `loss_fn` is, if already computed.
            clip_factor: what clipping has multiplied the gradient by; None if `.grad` is not the gradient of the loss (SAM).
        """
        if self.critical_due:
            with self._timed(CRITICAL):
                self.fill("critical_sharpness", lambda _: self._critical(model, optimizer, loss_fn, start, clip_factor))

    def _critical(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[], Tensor | float],
        start: Tensor | float | None,
        clip_factor: float | None,
    ) -> None:
        clip = getattr(self.run.config.method.clip, "kind", None)
        if clip in HELD_CONSTANT:
            raise UserError(
                f"method.clip.kind = {clip}: the loss has a factor that its gradient treats as constant, so its values along the "
                "update are not those of what the update descends"
            )
        critical, rows = critical_rows(
            model,
            optimizer,
            loss_fn,
            start=start,
            clip_factor=clip_factor,
            compute=self.run.policy.compute or next(model.parameters()).dtype,
            scale=self._scale,
            last=self.run.critical_lr,
            usual_lr=self.run.config.optimizer.lr,
        )
        if critical.outcome == "found":
            self.run.critical_lr = critical.lr
        self._found += rows
        if not critical.converged:
            text = f"critical sharpness: {critical.why}"
            self._events.append(Event(self.step, "probe", "info", math.nan, math.nan, "none", text))


def critical_rows(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[], Tensor | float],
    *,
    start: Tensor | float | None,
    clip_factor: float | None,
    compute: torch.dtype,
    scale: float,
    last: float | None,
    usual_lr: float,
) -> tuple[CriticalSharpness, list[Estimate]]:
    """The critical sharpness of the update that `optimizer` is about to make, and its rows, with the threshold 2/lr.

    Args:
        model, optimizer, loss_fn, start, clip_factor: as for `StepObserver.critical`.
        compute: dtype of the forward pass.
        scale: Σ_t |∂L/∂log π_t|, the size of the loss's terms, which sets the size of its rounding.
        last: critical learning rate found last, to start from.
        usual_lr: learning rate to start from where there is none and the present one is 0.
    """
    direction = update_direction(optimizer, model)
    lr = max(float(group["lr"]) for group in optimizer.param_groups)
    resolution = torch.finfo(compute).eps
    critical = critical_sharpness(
        loss_fn,
        model,
        direction,
        guess=last or GUESS * (lr or usual_lr),
        slope=None if clip_factor is None else update_slope(model, direction, clip_factor),
        # The loss is near 0 and its terms are not; low precision averages out over tokens.
        noise=scale * (resolution / 8 if compute in (torch.bfloat16, torch.float16) else 4 * resolution),
        start=start,
        tolerance=TOLERANCE,
        max_evaluations=EVALUATIONS,
    )
    rows = critical.estimates()
    if lr > 0:
        rows.append(Estimate("critical", "critical_threshold", 2 / lr))
    return critical, labeled(rows, functional="surrogate")


class _UpdateProbes:
    """The probes of one update, on the rows of a sample of its groups or of all.

    `rows` are the n measured rows of the update, `part` their rollouts, P prompt and T completion positions wide.
    """

    def __init__(self, observer: StepObserver, update: PendingUpdate, view: ModelView, *, sampled: bool) -> None:
        self.observer, self.update, self.view = observer, update, view
        self.run, self.config, self.spec = observer.run, observer.run.config, observer.run.config.recording
        self.temperature = self.config.rollout.temperature
        group = observer.rollouts.group[update.rows.to(observer.rollouts.group.device)]
        seeded = generator(self.config.seed, "groups", observer.step, update.index)
        drawn, share = sample_groups(group, self.spec.group_share, seeded)
        everything = torch.arange(len(group), device=group.device)
        self.rows, self.probability = (drawn, share) if sampled else (everything, 1.0)
        part = self.part = observer.rollouts.rows(update.rows[self.rows.to(update.rows.device)])
        self.mask = _mask(part)
        self.coef = _wide(part, update.loss_coef[self.rows.to(update.loss_coef.device)].to(part.input_ids.device))

    def put(self, name: str, values: Tensor) -> None:
        """Keep a column (n, P+T), and the probability that its rows were drawn."""
        self.observer.put(name, self.update, self.rows, values)
        self.observer.put("inclusion_probability", self.update, self.rows, torch.full_like(values, self.probability))

    def norms(self) -> None:
        """Local norms of all tokens, exact norms of a few."""
        local: list[Tensor] = []

        def measure_local(check: Check) -> None:
            """Local score norms of all tokens."""
            # Also of tokens with a zero coefficient: their norms are defined, and the passes over a row cost the same.
            local.append(self._norms(torch.arange(len(self.mask), device=self.mask.device), self.mask, "local", check))
            self.put("score_norm_local", local[0])
            self._leading(local[0])

        self.observer.fill("score_norm_local", measure_local)
        self.observer.fill("score_norm", lambda check: self._exact(local[0] if local else None, check))

    def _leading(self, local: Tensor) -> None:
        """Local norms by layer of the tokens with the largest |c|·‖∇log π‖ among those that the update is the first to use."""
        part, width = self.part, self.part.prompt_width
        first = self.update.first_use[self.rows.cpu()].to(local.device)
        size = torch.where(first, (self.coef.abs().to(local) * local)[:, width:], 0.0)  # (n, T)
        row, position = leading(size)
        if not len(row):
            return
        mask = torch.zeros_like(part.input_ids)
        mask[row, position + width] = 1
        keep = mask.any(dim=1).nonzero()[:, 0]
        groups = score_norms(
            self.view.model,
            part.input_ids[keep],
            mask[keep],
            attention_mask=part.attention_mask[keep],
            temperature=self.temperature,
            check="off",
        ).groups
        rollout = self.update.rows[self.rows.to(self.update.rows.device)]
        for r, p in zip(row.tolist(), position.tolist(), strict=True):
            at = int((keep == r).nonzero()[0, 0]), p + width
            self.observer.by_layer[int(rollout[r]), p] = layer_values(groups, at)

    def shares(self) -> None:
        """Attribution of all tokens."""
        norm = self.update.grad_norm
        if norm > 0:
            gradient = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in self.view.parameters]
            self.observer.fill(
                "attribution", lambda check: self.put("attribution", self._along(gradient, check) / norm**2)
            )
            if self.spec.update_attribution:
                self.observer.fill("update_attribution", self._update_attribution)

    def influence(self) -> None:
        """c_t⟨∇log π_t, ∇L_heldout⟩ of all tokens; positive lowers the held-out loss."""
        self.observer.fill(
            "heldout_influence",
            lambda check: self.put("heldout_influence", self._along(self._heldout_gradient(check), check)),
        )

    def _norms(self, rows: Tensor, mask: Tensor, method: Literal["local", "exact"], check: Check) -> Tensor:
        """Score norms (m, P+T) of the rows `rows` (m,) of `part` at `mask`; each process computes a part of them."""
        part = self.part

        def norms(some: Tensor) -> Tensor:
            """Score norms of some rows."""
            return score_norms(
                self.view.model,
                part.input_ids[some],
                mask[some],
                method=method,
                attention_mask=part.attention_mask[some],
                temperature=self.temperature,
                check=check,
            ).values

        return _map_rows(rows, norms, mask)

    def _along(self, direction: list[Tensor], check: Check) -> Tensor:
        """c_t⟨∇log π_t, direction⟩ (n, P+T). Rows of groups whose rewards are all equal have c = 0 and are not run."""
        part, mask, coef = self.part, self.mask, self.coef
        live = ((coef != 0) & mask.bool()).any(dim=1).nonzero()[:, 0]
        out = torch.zeros_like(coef)

        def along(some: Tensor) -> Tensor:
            """Directional derivatives of some rows, times the coefficients."""
            return attribute(
                self.view.model,
                part.input_ids[some],
                mask[some],
                coef[some],
                direction,
                part.attention_mask[some],
                self.temperature,
                check=check,
            )

        if len(live):
            out[live] = _map_rows(live, along, mask).to(out)
        return out

    def _update_attribution(self, check: Check) -> None:
        """Shares of ‖Δθ‖² of the step that the optimizer is about to take; what is not the tokens' goes to the probes table."""
        part, mask, view = self.part, self.mask, self.view
        split = coming_update(view.optimizer, view.parameters, self.update.clip_factors)

        def shares_of(some: Tensor) -> Tensor:
            """Attribution of the optimizer's update to some rows."""
            return update_attribution(
                view.model,
                part.input_ids[some],
                mask[some],
                self.coef[some],
                split,
                attention_mask=part.attention_mask[some],
                temperature=self.temperature,
                check=check,
            )

        self.put("update_attribution", _map_rows(torch.arange(len(mask), device=mask.device), shares_of, mask))
        if self.update.index == 0:
            self.observer.add_parts(split)

    def _exact(self, local: Tensor | None, check: Check) -> None:
        """The exact norm of the largest tokens by local norm and on random others, with the probability of being drawn.

        Where there are no local norms: on random ones alone.
        """
        part = self.part
        first = self.update.first_use[self.rows.cpu()].to(part.input_ids.device)
        places = first.nonzero()  # (M, 2)
        norms = torch.zeros(len(places), device=first.device) if local is None else local[:, part.prompt_width :][first]
        top = norms.argsort(descending=True, stable=True)[: 0 if local is None else self.spec.exact_tokens]
        others = torch.ones(len(norms), dtype=torch.bool, device=norms.device)
        others[top] = False
        rest = others.nonzero()[:, 0]
        seeded = generator(self.config.seed, "exact", self.observer.step, self.update.index)
        draw = torch.randperm(len(rest), generator=seeded)
        drawn = rest[draw[: self.spec.exact_tokens].to(rest.device)]
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
        exact = self._norms(keep, mask, "exact", check)
        values[keep] = torch.where(mask[keep].bool(), exact.float(), math.nan)
        self.put("score_norm", values)
        self.put("score_norm_std_error", torch.where(values.isnan(), math.nan, 0.0))
        chances = torch.full(part.input_ids.shape, math.nan, device=norms.device)
        chances[rows, columns + part.prompt_width] = self.probability * probability[chosen]
        self.put("draw_probability", chances)
        self.observer.fill("sharp_alignment", lambda check: self._alignment(keep, mask, exact, check))

    def _alignment(self, keep: Tensor, mask: Tensor, exact: Tensor, check: Check) -> None:
        """Share of ∇log π_t in the span of the newest top eigenvectors, for the tokens whose exact norm is known."""
        vectors, part, view = self.run.surface.vectors, self.part, self.view
        if vectors is None:
            return
        sizes = [p.numel() for p in view.parameters]

        def squares(some: Tensor) -> Tensor:
            """Σ (∂ log π along v)² over the eigenvectors v, of some rows."""
            total = torch.zeros(len(some), mask.shape[1], dtype=exact.dtype, device=exact.device)
            for vector in vectors:
                direction = [v.view_as(p) for v, p in zip(vector.split(sizes), view.parameters, strict=True)]
                derivative = directional_derivative(
                    view.model,
                    part.input_ids[some],
                    mask[some],
                    direction,
                    attention_mask=part.attention_mask[some],
                    temperature=self.temperature,
                    check=check,
                )
                total += derivative.to(total) ** 2
            return total

        total = _map_rows(keep, squares, mask)
        values = torch.full(part.input_ids.shape, math.nan, device=exact.device)
        share = torch.where(exact > 0, total / exact.clamp_min(torch.finfo(exact.dtype).tiny) ** 2, math.nan)
        values[keep] = torch.where(mask[keep].bool(), share, math.nan).float()
        self.put("sharp_alignment", values)

    def _heldout_gradient(self, check: Check) -> list[Tensor]:
        """∇L of the expected failure on rollouts of held-out prompts that the present policy draws."""
        probe_set, drawer, model = self.run.probe_set, self.run.drawer, self.view.model
        assert probe_set is not None
        assert drawer is not None
        seed = derive(self.config.seed, "heldout", self.observer.step) % 2**31
        drawn = probe_set.draw("heldout", HELDOUT_SAMPLES, drawer, seed)
        mask = _mask(drawn.rollouts)
        coef = failure_coefficients(mask, drawn.correct)
        rows = drawn.rollouts.rows(torch.arange(len(mask))[distributed.local_slice(len(mask))])
        total = [torch.zeros_like(p) for p in self.view.parameters]
        problem: UserError | None = None
        if len(rows):
            coef = coef[distributed.local_slice(len(mask))]
            try:
                total = logp_gradient(
                    model, rows.input_ids, _mask(rows), coef, rows.attention_mask, self.temperature, check=check
                )
            except UserError as error:
                problem = error
        _raise_together(problem)
        return distributed.sum_tensors(total)


def leading(size: Tensor, count: int = LEADING) -> tuple[Tensor, Tensor]:
    """(row, position) of the `count` largest of `size` (n, T), the largest first; zeros are left out."""
    order = size.flatten().argsort(descending=True, stable=True)[:count]
    order = order[size.flatten()[order] > 0]
    return order // size.shape[1], order % size.shape[1]


def layer_values(groups: Mapping[str, Tensor], at: tuple[int, int]) -> dict[str, float]:
    """Norms of one token, at `at` in (N, S), by layer (`0`, `1`, …) and of the embedding and the output layer."""
    of = {name.removeprefix("layers."): norm for name, norm in groups.items() if name.startswith("layers.")}
    of = dict(sorted(of.items(), key=lambda item: int(item[0])))
    of |= {name: groups[name] for name in ("embedding", "head") if name in groups}
    return {name: float(norm[at]) for name, norm in of.items()}


def sample_groups(group: Tensor, share: float, seeded: torch.Generator) -> tuple[Tensor, float]:
    """Rows of a simple random sample of groups, in order, and the probability that a group is in it.

    Args:
        group: (n,) group of each row.
        share: of the groups that are drawn, in (0, 1]; at least two groups are drawn.
        seeded: draws them.
    """
    groups = torch.unique(group)
    size = min(len(groups), max(2, round(share * len(groups))))
    drawn = groups[torch.randperm(len(groups), generator=seeded)[:size].to(groups.device)]
    return torch.isin(group, drawn).nonzero()[:, 0], size / len(groups)


def _map_rows(rows: Tensor, compute: Callable[[Tensor], Tensor], mask: Tensor) -> Tensor:
    """`distributed.map_rows` of a probe, results (m, P+T) like rows of `mask`; a refusal in one process is raised in all."""
    problem: UserError | None = None

    def measured(some: Tensor) -> Tensor:
        """Values of some rows; NaN if they cannot be measured, which is raised after the exchange."""
        nonlocal problem
        try:
            return compute(some)
        except UserError as error:  # the other processes wait for this one's rows
            problem = error
            return torch.full((len(some), mask.shape[1]), math.nan, device=mask.device)

    values = distributed.map_rows(rows, measured)
    _raise_together(problem)
    return values


def _raise_together(problem: UserError | None) -> None:
    """Raise the problem of the first process that has one in every process."""
    first = distributed.first_not_none([problem])
    if first is not None:
        raise first


def _mask(part: Rollouts) -> Tensor:
    """(n, P+T): 1 on the completion tokens that count."""
    return torch.cat([torch.zeros_like(part.input_ids[:, : part.prompt_width]), part.completion_mask], dim=1)


def _wide(part: Rollouts, values: Tensor) -> Tensor:
    """Completion values (n, T) in the shape of `input_ids` (n, P+T), 0 on the prompt."""
    return torch.cat([values.new_zeros(len(values), part.prompt_width), values], dim=1)
