"""Probes of an update, between its gradient and the optimizer's step. They change nothing that training sees.

At the steps of `MeasurementSchedule` the tokens of a random sample of each update's groups get the local score norm and
their attribution, at a spike of the gradient norm those of all groups. A few also get the exact norm, so that the error
of the local one is known. A probe that refuses the policy, or differs from autograd on it, is left out from then on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.config.run import Check
from sharpscope.errors import UserError
from sharpscope.memory import require_memory
from sharpscope.policy import Policy, Rollouts, completions_of
from sharpscope.policy.forward import Scorer
from sharpscope.policy.sharding import ModelView, copy_bytes, is_sharded, reshard
from sharpscope.recording.health import refusal
from sharpscope.recording.probe_sets import Drawer, SurfaceProbes, needs_probe_set, run_probe_set
from sharpscope.recording.rows import written_groups
from sharpscope.recording.step import PendingUpdate
from sharpscope.rules.judging import Event
from sharpscope.seeds import derive, generator
from sharpscope.surface import (
    Estimate,
    ProbeSet,
    columns,
    critical_sharpness,
    labeled,
    update_direction,
    update_slope,
)
from sharpscope.tasks import Task
from sharpscope.tokens import attribute, failure_coefficients, logp_gradient, score_norms
from sharpscope.tokens.sharded import ShardedProbes
from sharpscope.traces import robust_z

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


# surrogates with a factor of the ratio that has no gradient
HELD_CONSTANT = (
    "cispo",
    "dppo",
    "vespo",
    "delight",
)
GUESS = 2.0  # first step size of a run's first line search for the critical sharpness, in learning rates
# relative width of the bracket in which the critical learning rate is interpolated
TOLERANCE = 0.25
EVALUATIONS = 12  # largest number of losses of a line search
LEADING = 8  # tokens of an update whose local norms are kept by layer
CRITICAL = "critical sharpness"  # name under which its time is counted
MOST_SPIKES = 8  # steps of a run at which a spike is measured
HELDOUT_SAMPLES = 8  # completions per prompt for held-out influence


class MeasurementSchedule:
    """Which steps measure what, by the configuration alone, and the time that measuring takes."""

    def __init__(self, config: RunConfig) -> None:
        spec = config.recording
        self.last = config.steps
        self.every = {  # interval of each measure [steps]; 0: never
            "shares": spec.token_gradients_every,
            "norms": spec.token_gradients_every,
            "rotation": spec.rotation_every,
            "influence": spec.heldout_influence_every,
            "surface": config.probes.interval(config.steps),
        }
        self.seconds: dict[str, float] = {}  # spent so far by measure
        self.training = 0.0  # time of generation and training so far [s]
        self.spikes: list[int] = []  # steps so far at which a spike was measured
        # measure -> the steps of it, in place of its interval
        self.at: dict[str, frozenset[int]] = {}
        self.most_spikes = MOST_SPIKES

    def due(self, measure: str, step: int) -> bool:
        """Whether a measure is made in `step` (0: before training); spikes are not part of the schedule."""
        if measure in self.at:
            return step in self.at[measure]
        every = self.every[measure]
        ends = {"influence": (), "surface": (0, self.last)}.get(measure, (1,))
        return bool(every) and (step % every == 0 or step in ends)

    def spike_allowed(self, step: int) -> bool:
        """Whether a spike in `step` is measured; counts it."""
        if step not in self.spikes and len(self.spikes) < self.most_spikes:
            self.spikes.append(step)
        return step in self.spikes

    def spend(self, measure: str, seconds: float) -> None:
        """Count time spent on a measure [s]."""
        self.seconds[measure] = self.seconds.get(measure, 0.0) + seconds

    def end_step(self, training: float, tables: float) -> None:
        """Count a step's time of generation and training, and that of its tables [s]."""
        self.training += training
        self.spend("tables", tables)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores, as JSON."""
        return {"seconds": self.seconds, "training": self.training, "spikes": self.spikes}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.seconds, self.training = dict(state["seconds"]), float(state["training"])
        self.spikes = list(state["spikes"])

    def summary(self) -> dict[str, Any]:
        """Share of the run's time spent on measuring (without evaluation), and seconds by measure, for run.json."""
        total = sum(self.seconds.values())
        share = total / (total + self.training) if total else 0.0
        return {
            "share": round(share, 4),
            "seconds": {name: round(s, 3) for name, s in self.seconds.items()},
        }


class Observers:
    """The probes of a run: a `StepObserver` observes the updates of a step, `surface` the weights between steps.

    `view` gives the present model, gradients and optimizer; every process must call it, in the same order.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        view: Callable[[], ModelView],
        drawer: Drawer | None = None,
    ) -> None:
        self.config, self.policy, self.view, self.drawer = config, policy, view, drawer
        self.schedule = MeasurementSchedule(config)
        self.surface = SurfaceProbes(config, view, drawer, self.schedule)
        self.probe_set: ProbeSet | None = None
        # solutions of the probe set, for the entropy at fixed tokens
        self.fixed: Rollouts | None = None
        self.refused: set[str] = set()  # columns that are left out for the rest of the run
        self.checked: set[str] = set()  # columns that have passed their self-check
        # η_c found last, from which the next line search starts
        self.critical_lr: float | None = None
        self.sharded = ShardedProbes(policy.model) if is_sharded(policy.model) else None
        gathering = {
            "recording.heldout_influence_every=0": self.schedule.every["influence"],
            "probes.preset=off": self.schedule.every["surface"] and config.probes.functionals,
            "recording.rotation_every=0": self.schedule.every["rotation"],
        }
        for setting in (
            name for name, due in gathering.items() if due and self.sharded is not None
        ):
            text = "a copy of all weights and gradients on each process"
            require_memory(copy_bytes(policy.model, 2), policy.device, text, f"set {setting}")

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
            prompts, solutions = (
                [item.prompt_ids for item in solved],
                [item.solution for item in solved],
            )
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
            "entropy", "entropy", float(entropy.mean()), functional="nll", prompts=len(self.fixed)
        )
        row = replace(
            row, probe_set=self.probe_set.name("train"), seconds=time.perf_counter() - began
        )
        self.schedule.spend("entropy", row.seconds)
        return {"step": step, **columns([row])}

    def critical_due(self, step: int) -> bool:
        """Whether `StepObserver.critical` measures the first update of a step."""
        return self.surface.update_due(step) and "critical_sharpness" not in self.refused


class StepObserver:
    """Called with each update of a step between its gradient and the optimizer's step."""

    def __init__(
        self, run: Observers, step: int, rollouts: Rollouts, recent: Sequence[float]
    ) -> None:
        self.run, self.step, self.rollouts = run, step, rollouts
        self.recent = recent  # log gradient norms of the last steps
        # of the tokens table, (N, T) each, NaN where nothing was measured
        self.columns: dict[str, Tensor] = {}
        # local norms of leading tokens (rollout, position)
        self.by_layer: dict[tuple[int, int], dict[str, float]] = {}
        self.events: list[Event] = []  # one for each column that its probe refused
        self.seconds = 0.0
        self._found: list[Estimate] = []
        self._scale = math.nan  # Σ_t |∂L/∂log π_t| of the first update
        # whether an update's gradient norm was one, at which all is measured and written
        self.spike = False
        # (N,) the rollouts whose tokens are written and may be measured, and the share of groups that are.
        self.written = written_groups(
            rollouts, run.config.recording.token_rows, run.config.seed, step
        )

    @property
    def rows(self) -> dict[str, Any]:
        """Columns of the probes table; empty without an estimate."""
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
            spike = robust_z(
                self.recent, math.log(update.grad_norm)
            ) >= spec.spike_z and schedule.spike_allowed(self.step)
        measures = [name for name in ("norms", "shares") if spike or due(name, self.step)]
        measures += ["influence"] if due("influence", self.step) else []
        if spike:
            self.spike, self.written = True, (torch.ones_like(self.written[0]), 1.0)
        if measures:
            probes = _UpdateProbes(self, update, sampled=not spike)
            self.seconds += time.perf_counter() - started
            for name in measures if len(probes.rows) else ():
                with self._timed(name):
                    getattr(probes, name)()

    @contextmanager
    def _timed(self, measure: str) -> Iterator[None]:
        """Count the time of a measure."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.run.schedule.spend(measure, seconds)
        self.seconds += seconds

    def fill(self, column: str, measure: Callable[[Check], None]) -> None:
        """Measure `column`; where its probe refuses the policy, leave the column out of the rest of the run."""
        run = self.run
        if column in run.refused:
            return
        check = run.config.probes.check
        if column in run.checked and check == "first" and run.sharded is not None:
            check = "off"  # the copy that probes see is a new model each time
        try:
            measure(check)
            run.checked.add(column)
        except UserError as problem:
            run.refused.add(column)
            self.events.append(refusal(self.step, column, problem))

    def put(self, name: str, update: PendingUpdate, rows: Tensor, values: Tensor) -> None:
        """Keep `values` (m, P+T) of the update's rows `rows` (m,) for the tokens whose first update it is."""
        if name not in self.columns:
            self.columns[name] = torch.full(self.rollouts.completion_mask.shape, math.nan)
        rows = rows.cpu()
        target, taken = self.columns[name], update.rows[rows]
        new = values[:, self.rollouts.prompt_width :].detach().float().cpu()
        target[taken] = torch.where(update.first_use[rows], new, target[taken])

    def critical(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[], Tensor | float],
        *,
        start: Tensor | float | None = None,
        clip_factor: float | None,
    ) -> None:
        """Measure the critical sharpness of a step's first update and its threshold 2/lr, after clipping, if it is due.

        Every process must call it.

        Args:
            model: as the optimizer has it; its `.grad` is what the optimizer gets.
            optimizer: about to make the step.
            loss_fn: the update's loss at the present weights, or one value for each prompt, (k,), with this mean.
            start: its value, by prompt if `loss_fn` is, if already computed.
            clip_factor: what clipping has multiplied the gradient by; None if `.grad` is not the gradient of the loss (SAM).
        """

        def measure(_: Check) -> None:
            config = self.run.config
            clip = getattr(config.method.clip, "kind", None)
            if clip in HELD_CONSTANT:
                raise UserError(
                    f"method.clip.kind = {clip}: the loss has a factor that its gradient treats as constant, so its values along "
                    "the update are not those of what the update descends"
                )
            compute = self.run.policy.compute or next(model.parameters()).dtype
            # The loss is near 0 and its terms are not; low precision averages out over tokens.
            rounding = torch.finfo(compute).eps * (
                1 / 8 if compute in (torch.bfloat16, torch.float16) else 4
            )
            lr = max(float(group["lr"]) for group in optimizer.param_groups)
            direction = update_direction(optimizer, model)
            found = critical_sharpness(
                loss_fn,
                model,
                direction,
                guess=self.run.critical_lr or GUESS * (lr or config.optimizer.lr),
                slope=None if clip_factor is None else update_slope(model, direction, clip_factor),
                noise=self._scale * rounding,
                start=start,
                tolerance=TOLERANCE,
                max_evaluations=EVALUATIONS,
            )
            if found.outcome == "found":
                self.run.critical_lr = found.lr
            threshold = [Estimate("critical", "critical_threshold", 2 / lr)] if lr > 0 else []
            self._found += labeled([*found.estimates(), *threshold], functional="surrogate")
            if self.run.sharded is None:
                self._found += self.run.surface.along_update(
                    model, direction, self.run.critical_lr or GUESS * (lr or config.optimizer.lr)
                )
            if not found.converged:
                text = f"critical sharpness: {found.why}"
                self.events.append(
                    Event(self.step, "probe", "info", math.nan, math.nan, "none", text)
                )

        if self.run.critical_due(self.step):
            with self._timed(CRITICAL):
                self.fill("critical_sharpness", measure)


class _UpdateProbes:
    """The probes of one update, on n `rows` of it, P prompt and T completion positions wide."""

    def __init__(self, observer: StepObserver, update: PendingUpdate, *, sampled: bool) -> None:
        self.observer, self.update, self.sharded = observer, update, observer.run.sharded
        self.run, self.config = observer.run, observer.run.config
        group = observer.rollouts.group[update.rows.to(observer.rollouts.group.device)]
        self.rows, self.probability, share = (
            torch.arange(len(group)),
            1.0,
            self.config.recording.group_share,
        )
        # rows of groups without a gradient that are not measured but written
        self.inactive = torch.arange(0)
        self.inactive_probability = 1.0
        written = observer.written[0][update.rows.cpu()]
        if not sampled or share < 1 or not bool(written.all()):
            seeded, group = (
                generator(self.config.seed, "groups", observer.step, update.index),
                group.cpu(),
            )
            moved = (update.loss_coef != 0).any(dim=1).cpu()
            least = math.ceil(2 / self.config.update.mini_batches)  # two groups a step
            self.rows, self.probability = sample_groups(
                group, moved, share if sampled else 1.0, seeded, written, least
            )
            inactive = ~torch.isin(group, group[moved])
            self.inactive = (inactive & written).nonzero()[:, 0]
            self.inactive_probability = len(group[self.inactive].unique()) / max(
                len(group[inactive].unique()), 1
            )
        part = self.part = observer.rollouts.rows(update.rows[self.rows.to(update.rows.device)])
        self.mask = _mask(part)
        coef = update.loss_coef[self.rows.to(update.loss_coef.device)].to(part.input_ids.device)
        self.coef = nn.functional.pad(coef, (part.prompt_width, 0))  # (n, P+T)

    @cached_property
    def view(self) -> ModelView:
        """The present model, of a sharded one a gathered copy."""
        return self.run.view()

    def _each(
        self, probe: Callable[..., Tensor], mask: Tensor, rows: Tensor, *, together: bool = False
    ) -> Tensor:
        """Values (m, P+T) of `rows` (m,), a part by each process; `together`: also a process without rows calls the probe."""
        part, temperature = self.part, self.config.rollout.temperature

        def of_rows(some: Tensor) -> Tensor:
            given = {
                "input_ids": part.input_ids,
                "mask": mask,
                "attention_mask": part.attention_mask,
            }
            return probe(
                some,
                temperature=temperature,
                **{name: values[some] for name, values in given.items()},
            )

        if together:
            found = of_rows(rows[distributed.local_slice(len(rows))])
            return torch.cat(distributed.gather(found.cpu())).to(found.device)
        return distributed.map_rows(rows, of_rows)

    def put(self, name: str, values: Tensor) -> None:
        """Keep a column (n, P+T), and the probability that its rows were drawn."""
        self.observer.put(name, self.update, self.rows, values)
        self.observer.put(
            "inclusion_probability",
            self.update,
            self.rows,
            torch.full_like(values, self.probability),
        )

    def norms(self) -> None:
        """Local norms of all tokens, exact norms of a few."""
        local: list[Tensor] = []

        def measure_local(check: Check) -> None:
            # first row that this process measures -> norms by layer
            by_layer: dict[int, Mapping[str, Tensor]] = {}

            def measured(some: Tensor, **given: Any) -> Tensor:
                if self.sharded is not None:
                    found = self.sharded.local(check=check != "off", **given)
                else:
                    found = score_norms(self.view.model, method="local", check=check, **given)
                if len(some):
                    by_layer[int(some[0])] = found.groups
                return found.values

            # Also of tokens with a zero coefficient: their norms are defined, and the passes over a row cost the same.
            every = torch.arange(len(self.mask), device=self.mask.device)
            local.append(self._each(measured, self.mask, every, together=self.sharded is not None))
            self.put("score_norm_local", local[0])
            self._leading(local[0], by_layer)

        self.observer.fill("score_norm_local", measure_local)
        self.observer.fill(
            "score_norm", lambda check: self._exact(local[0] if local else None, check)
        )

    def _leading(self, local: Tensor, by_layer: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Local norms by layer of the tokens with the largest |c|·‖∇log π‖ among those that the update is the first to use."""
        width = self.part.prompt_width
        first_use = self.update.first_use[self.rows].to(local.device)
        size = torch.where(first_use, (self.coef.abs().to(local) * local)[:, width:], 0.0)  # (n, T)
        rollout = self.update.rows.cpu()[self.rows].tolist()
        mine = {}
        for row, position in zip(*(index.tolist() for index in leading(size)), strict=True):
            for first, groups in by_layer.items():
                if 0 <= row - first < len(next(iter(groups.values()))):
                    mine[rollout[row], position] = layer_values(
                        groups, (row - first, position + width)
                    )
        for measured in distributed.gather(mine):
            self.observer.by_layer |= measured

    def shares(self) -> None:
        """Attribution of all tokens."""
        norm = self.update.grad_norm
        if norm > 0:
            model = self.run.policy.model if self.sharded is not None else self.view.model
            reshard(model)  # a forward pass can leave gathered weights, which have no gradient
            trained = [p for p in model.parameters() if p.requires_grad]
            gradient = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in trained]
            self.observer.fill("attribution", lambda check: self._shares(gradient, norm, check))

    def _shares(self, gradient: list[Tensor], norm: float, check: Check) -> None:
        """Attribution of the measured rows, and that of groups without a gradient, which is known to be 0."""
        self.put("attribution", self._along(gradient, check, self.sharded) / norm**2)
        known = torch.zeros(len(self.inactive), self.mask.shape[1])
        for name, values in (
            ("attribution", known),
            ("inclusion_probability", known + self.inactive_probability),
        ):
            self.observer.put(name, self.update, self.inactive, values)

    def influence(self) -> None:
        """c_t⟨∇log π_t, ∇L_heldout⟩ of all tokens; positive lowers the held-out loss."""
        self.observer.fill(
            "heldout_influence",
            lambda check: self.put(
                "heldout_influence", self._along(self._heldout_gradient(), check)
            ),
        )

    def _along(
        self, direction: list[Tensor], check: Check, sharded: ShardedProbes | None = None
    ) -> Tensor:
        """c_t⟨∇log π_t, direction⟩ (n, P+T); rows whose c are all 0 are not run."""
        live = ((self.coef != 0) & self.mask.bool()).any(dim=1).nonzero()[:, 0]
        out = torch.zeros_like(self.coef)

        def measured(some: Tensor, **given: Any) -> Tensor:
            if sharded is None:
                return attribute(
                    self.view.model, coef=self.coef[some], direction=direction, check=check, **given
                )
            rates = sharded.along(direction=direction, check=check != "off", **given)
            return self.coef[some].to(rates) * rates

        if len(live):
            out[live] = self._each(measured, self.mask, live, together=sharded is not None).to(out)
        return out

    def _exact(self, local: Tensor | None, check: Check) -> None:
        """The exact norm of the largest tokens by local norm and of random others, with the probability of being drawn."""
        part, count = self.part, self.config.recording.exact_tokens
        first = self.update.first_use[self.rows].to(part.input_ids.device)
        places = first.nonzero()  # (M, 2)
        size = (
            torch.zeros(len(places), device=first.device)
            if local is None
            else local[:, part.prompt_width :][first]
        )
        order = size.argsort(descending=True, stable=True)
        top = order[: 0 if local is None else count]
        rest = order[len(top) :].sort().values
        seeded = generator(self.config.seed, "exact", self.observer.step, self.update.index)
        drawn = rest[torch.randperm(len(rest), generator=seeded)[:count].to(rest.device)]
        chosen = torch.cat([top, drawn])
        if not len(chosen):
            return
        probability = torch.ones(len(chosen), device=size.device)
        probability[len(top) :] = len(drawn) / max(len(rest), 1)
        rows, columns = places[chosen].T
        columns = columns + part.prompt_width
        mask = torch.zeros_like(part.input_ids)
        mask[rows, columns] = 1
        keep = mask.any(dim=1).nonzero()[:, 0]  # only completions that hold a chosen token are run
        values = torch.full(part.input_ids.shape, math.nan, device=size.device)
        if self.sharded is None:
            exact = partial(score_norms, self.view.model, method="exact", check=check)
            found = self._each(lambda _, **given: exact(**given).values, mask, keep)
        else:
            temperature = self.config.rollout.temperature
            found = self.sharded.exact(
                part.input_ids[keep], mask[keep], part.attention_mask[keep], temperature
            )
        values[keep] = torch.where(mask[keep].bool(), found.float(), math.nan)
        chances = torch.full_like(values, math.nan)
        chances[rows, columns] = self.probability * probability
        self.put("score_norm", values)
        self.put("score_norm_std_error", torch.where(values.isnan(), math.nan, 0.0))
        self.put("draw_probability", chances)

    def _heldout_gradient(self) -> list[Tensor]:
        """∇L of the expected failure on rollouts of held-out prompts that the present policy draws."""
        probe_set, drawer, model = self.run.probe_set, self.run.drawer, self.view.model
        assert probe_set is not None and drawer is not None
        seed = derive(self.config.seed, "heldout", self.observer.step) % 2**31
        drawn = probe_set.draw("heldout", HELDOUT_SAMPLES, drawer, seed)
        mask = _mask(drawn.rollouts)
        mine = distributed.local_slice(len(mask))
        coef, rows = (
            failure_coefficients(mask, drawn.correct)[mine],
            drawn.rollouts.rows(torch.arange(len(mask))[mine]),
        )

        def gradient() -> list[Tensor]:
            if not len(rows):
                return [torch.zeros_like(p) for p in self.view.parameters]
            given = (
                rows.input_ids,
                _mask(rows),
                coef,
                rows.attention_mask,
                self.config.rollout.temperature,
            )
            return logp_gradient(model, *given)

        return distributed.sum_tensors(distributed.together(gradient))


def leading(size: Tensor) -> tuple[Tensor, Tensor]:
    """(row, position) of the `LEADING` largest of `size` (n, T), the largest first; zeros are left out."""
    order = size.flatten().argsort(descending=True, stable=True)[:LEADING]
    order = order[size.flatten()[order] > 0]
    return order // size.shape[1], order % size.shape[1]


def layer_values(groups: Mapping[str, Tensor], at: tuple[int, int]) -> dict[str, float]:
    """Norms of one token, at `at` in (N, S), by layer (`0`, `1`, …) and of the embedding and the output layer."""
    of = {
        name.removeprefix("layers."): norm
        for name, norm in groups.items()
        if name.startswith("layers.")
    }
    of = dict(sorted(of.items(), key=lambda item: int(item[0])))
    of |= {name: groups[name] for name in ("embedding", "head") if name in groups}
    return {name: float(norm[at]) for name, norm in of.items()}


def sample_groups(
    group: Tensor,
    moved: Tensor,
    share: float,
    seeded: torch.Generator,
    written: Tensor,
    least: int = 2,
) -> tuple[Tensor, float]:
    """Rows of a simple random sample of the groups with a gradient, in order, and the probability that such a group is in it.

    Sums over the sample, divided by the probability, are unbiased for sums over all groups of what is 0 without a gradient.
    A `share` of the groups (n,) that `moved` (n,) is drawn, at `least` so many, from the `written` ones (n,), themselves a sample.
    """
    groups = torch.unique(group[moved] if bool(moved.any()) else group)
    among = groups[torch.isin(groups, group[written])]
    size = min(len(among), max(least, round(share * len(groups))))
    drawn = among[torch.randperm(len(among), generator=seeded)[:size]]
    return torch.isin(group, drawn).nonzero()[:, 0], size / len(groups)


def _mask(part: Rollouts) -> Tensor:
    """(n, P+T): 1 on the completion tokens that count."""
    return torch.cat(
        [torch.zeros_like(part.input_ids[:, : part.prompt_width]), part.completion_mask], dim=1
    )
