"""Measurements of an update between its gradient and the optimizer's step. They change nothing that training sees.

Each `Measurement` says when it is due and fills in columns of the tokens table. A measurement that refuses the policy, or
differs from autograd on it, is left out from then on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.config.run import Check
from sharpscope.errors import UserError
from sharpscope.policy import Policy, Rollouts
from sharpscope.policy.sharding import ModelView, reshard
from sharpscope.recording.health import refusal
from sharpscope.recording.probe_sets import Drawer, SurfaceProbes
from sharpscope.recording.rows import written_groups
from sharpscope.recording.schedule import MeasurementSchedule, Timetable
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
from sharpscope.tokens import attribute, failure_coefficients, logp_gradient, score_norms
from sharpscope.tokens.sharded import ShardedProbes
from sharpscope.traces import Row

if TYPE_CHECKING:
    from sharpscope.config import RunConfig

GUESS = 2.0
"""First step size of a run's first line search for the critical sharpness, in learning rates."""
TOLERANCE = 0.25
"""Relative width of the bracket in which the critical learning rate is interpolated."""
EVALUATIONS = 12
"""Largest number of losses of a line search."""
LEADING = 8
"""Tokens of an update whose local norms are kept by layer."""
HELDOUT_SAMPLES = 8
"""Completions per prompt for held-out influence."""


@dataclass(kw_only=True)
class MeasuredRun:
    """What the measurements of a run share."""

    config: RunConfig
    policy: Policy
    view: Callable[[], ModelView]
    """The present model, gradients and optimizer; every process must call it, in the same order."""
    drawer: Drawer | None
    schedule: MeasurementSchedule
    sharded: ShardedProbes | None
    probe_set: ProbeSet | None = None
    refused: set[str] = field(default_factory=set)  # columns left out for the rest of the run
    checked: set[str] = field(default_factory=set)  # columns that have passed their self-check
    critical_lr: float | None = None
    """η_c found last, from which the next line search starts."""


class StepValues:
    """What the measurements of a step have found."""

    def __init__(self, run: MeasuredRun, step: int, rollouts: Rollouts) -> None:
        self.run = run
        self.step = step
        self.rollouts = rollouts
        self.columns: dict[str, Tensor] = {}
        """Of the tokens table, (N, T) each, NaN where nothing was measured."""
        self.by_layer: dict[tuple[int, int], dict[str, float]] = {}
        """Local norms of leading tokens (rollout, position)."""
        self.events: list[Event] = []  # one for each column that its measurement refused
        self.estimates: list[Estimate] = []
        self.coefficients = math.nan  # Σ_t |∂L/∂log π_t| of the first update
        spec = run.config.recording
        self.written = written_groups(rollouts, spec.token_rows, run.config.seed, step)
        """(N,) the rollouts whose tokens are written and may be measured, and the share of groups that are."""

    @property
    def rows(self) -> Row:
        """Columns of the probes table; empty without an estimate."""
        return {"step": self.step, **columns(self.estimates)} if self.estimates else {}

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

    def forget(self, prefix: str) -> bool:
        """Leave out the columns with a prefix, and tell whether there was one."""
        names = [name for name in self.columns if name.startswith(prefix)]
        for name in names:
            del self.columns[name]
        return bool(names)

    def put(self, name: str, update: PendingUpdate, rows: Tensor, values: Tensor) -> None:
        """Keep `values` (m, P+T) of the update's rows `rows` (m,) for the tokens whose first update it is."""
        if name not in self.columns:
            self.columns[name] = torch.full(self.rollouts.completion_mask.shape, math.nan)
        rows = rows.cpu()
        target = self.columns[name]
        taken = update.rows[rows]
        new = values[:, self.rollouts.prompt_width :].detach().float().cpu()
        target[taken] = torch.where(update.first_use[rows], new, target[taken])


class MeasuredUpdate:
    """The rows of an update that are measured: n `rows` of it, P prompt and T completion positions wide."""

    def __init__(self, values: StepValues, update: PendingUpdate, *, sampled: bool) -> None:
        self.values, self.update = values, update
        self.run = values.run
        self.config = values.run.config
        self.sharded = self.run.sharded
        share = self.config.recording.group_share
        least = math.ceil(2 / self.config.update.mini_batches)  # two groups a step
        group = values.rollouts.group[update.rows.to(values.rollouts.group.device)]
        if (of_rows := self.run.schedule.sample) is not None:
            sampled = sampled and values.step not in of_rows.whole
            share = of_rows.share
            least = 1
            group = torch.arange(len(group))
        self.rows = torch.arange(len(group))
        self.probability = 1.0
        # rows of groups without a gradient that are not measured but written
        self.inactive = torch.arange(0)
        self.inactive_probability = 1.0
        written = values.written[0][update.rows.cpu()]
        if not sampled or share < 1 or not bool(written.all()):
            group = group.cpu()
            moved = (update.loss_coef != 0).any(dim=1).cpu()
            self.rows, self.probability = sample_groups(
                group, moved, share if sampled else 1.0, self.generator("groups"), written, least
            )
            inactive = ~torch.isin(group, group[moved])
            self.inactive = (inactive & written).nonzero()[:, 0]
            groups = len(group[inactive].unique())
            self.inactive_probability = len(group[self.inactive].unique()) / max(groups, 1)
        part = self.part = values.rollouts.rows(update.rows[self.rows.to(update.rows.device)])
        self.mask = _mask(part)
        coef = update.loss_coef[self.rows.to(update.loss_coef.device)].to(part.input_ids.device)
        self.coef = nn.functional.pad(coef, (part.prompt_width, 0))  # (n, P+T)

    def generator(self, purpose: str) -> torch.Generator:
        """Random numbers of this update for a purpose."""
        return generator(self.config.seed, purpose, self.values.step, self.update.index)

    @cached_property
    def view(self) -> ModelView:
        """The present model, of a sharded one a gathered copy."""
        return self.run.view()

    def each(
        self, probe: Callable[..., Tensor], mask: Tensor, rows: Tensor, *, together: bool = False
    ) -> Tensor:
        """Values (m, P+T) of `rows` (m,), a part by each process; `together`: also a process without rows calls the probe."""
        part = self.part
        temperature = self.config.rollout.temperature

        def of_rows(some: Tensor) -> Tensor:
            """The probe's values of some rows."""
            return probe(
                some,
                input_ids=part.input_ids[some],
                mask=mask[some],
                attention_mask=part.attention_mask[some],
                temperature=temperature,
            )

        if together:
            found = of_rows(rows[distributed.local_slice(len(rows))])
            return torch.cat(distributed.gather(found.cpu())).to(found.device)
        return distributed.map_rows(rows, of_rows)

    def put(self, name: str, values: Tensor) -> None:
        """Keep a column (n, P+T), and the probability that its rows were drawn."""
        self.values.put(name, self.update, self.rows, values)
        chance = torch.full_like(values, self.probability)
        self.values.put("inclusion_probability", self.update, self.rows, chance)

    def along(
        self, direction: list[Tensor], check: Check, sharded: ShardedProbes | None = None
    ) -> Tensor:
        """c_t⟨∇log π_t, direction⟩ (n, P+T); rows whose c are all 0 are not run."""
        live = ((self.coef != 0) & self.mask.bool()).any(dim=1).nonzero()[:, 0]
        out = torch.zeros_like(self.coef)

        def measured(some: Tensor, **given: Any) -> Tensor:
            """The products of some rows."""
            if sharded is None:
                return attribute(
                    self.view.model, coef=self.coef[some], direction=direction, check=check, **given
                )
            rates = sharded.along(direction=direction, check=check != "off", **given)
            return self.coef[some].to(rates) * rates

        if len(live):
            out[live] = self.each(measured, self.mask, live, together=sharded is not None).to(out)
        return out


# -- the measurements --------------------------------------------------------------------------------------------------


class Measurement(ABC):
    """Something that is measured of an update. `times` has its steps and counts its cost."""

    at_spikes = True  # whether it is also measured where the gradient norm is a spike

    def __init__(self, times: Timetable) -> None:
        self.times = times

    def due(self, step: int, spike: bool) -> bool:
        """Whether it is measured in `step`."""
        return (spike and self.at_spikes and self.times.at_spikes) or self.times.due(step)

    @abstractmethod
    def run(self, update: MeasuredUpdate) -> None:
        """Measure the update and put what is found into its `values`."""


class ScoreNorms(Measurement):
    """Local norms ‖∇log π_t‖ of all tokens, and exact norms of a few, so that the error of the local ones is known."""

    def run(self, update: MeasuredUpdate) -> None:
        """Columns score_norm_local, score_norm, score_norm_std_error, draw_probability and norms by layer."""
        local: list[Tensor] = []

        def measure_local(check: Check) -> None:
            """Local norms of all tokens."""
            # first row that this process measures -> norms by layer
            by_layer: dict[int, Mapping[str, Tensor]] = {}

            def measured(some: Tensor, **given: Any) -> Tensor:
                """Local norms of some rows, whose layers are kept."""
                if update.sharded is not None:
                    found = update.sharded.local(check=check != "off", **given)
                else:
                    found = score_norms(update.view.model, method="local", check=check, **given)
                if len(some):
                    by_layer[int(some[0])] = found.groups
                return found.values

            # Also of tokens with a zero coefficient: their norms are defined, and the passes over a row cost the same.
            every = torch.arange(len(update.mask), device=update.mask.device)
            together = update.sharded is not None
            local.append(update.each(measured, update.mask, every, together=together))
            update.put("score_norm_local", local[0])
            self._leading(update, local[0], by_layer)

        def measure_exact(check: Check) -> None:
            """Exact norms of a few tokens."""
            self._exact(update, local[0] if local else None, check)

        update.values.fill("score_norm_local", measure_local)
        update.values.fill("score_norm", measure_exact)

    def _leading(
        self, update: MeasuredUpdate, local: Tensor, by_layer: Mapping[int, Mapping[str, Tensor]]
    ) -> None:
        """Local norms by layer of the tokens with the largest |c|·‖∇log π‖ among those that the update is the first to use."""
        width = update.part.prompt_width
        first_use = update.update.first_use[update.rows].to(local.device)
        size = (update.coef.abs().to(local) * local)[:, width:]
        size = torch.where(first_use, size, 0.0)  # (n, T)
        rollout = update.update.rows.cpu()[update.rows].tolist()
        mine = {}
        for row, position in zip(*(index.tolist() for index in leading(size)), strict=True):
            for first, groups in by_layer.items():
                if 0 <= row - first < len(next(iter(groups.values()))):
                    at = (row - first, position + width)
                    mine[rollout[row], position] = layer_values(groups, at)
        for measured in distributed.gather(mine):
            update.values.by_layer |= measured

    def _exact(self, update: MeasuredUpdate, local: Tensor | None, check: Check) -> None:
        """The exact norm of the largest tokens by local norm and of random others, with the probability of being drawn."""
        part = update.part
        count = update.config.recording.exact_tokens
        first = update.update.first_use[update.rows].to(part.input_ids.device)
        places = first.nonzero()  # (M, 2)
        if local is None:
            size = torch.zeros(len(places), device=first.device)
        else:
            size = local[:, part.prompt_width :][first]
        order = size.argsort(descending=True, stable=True)
        top = order[: 0 if local is None else count]
        rest = order[len(top) :].sort().values
        shuffled = torch.randperm(len(rest), generator=update.generator("exact"))
        drawn = rest[shuffled[:count].to(rest.device)]
        chosen = torch.cat([top, drawn])
        if not len(chosen):
            return
        probability = torch.ones(len(chosen), device=size.device)
        probability[len(top) :] = len(drawn) / max(len(rest), 1)
        rows, positions = places[chosen].T
        positions = positions + part.prompt_width
        mask = torch.zeros_like(part.input_ids)
        mask[rows, positions] = 1
        keep = mask.any(dim=1).nonzero()[:, 0]  # only completions that hold a chosen token are run
        values = torch.full(part.input_ids.shape, math.nan, device=size.device)
        if update.sharded is None:
            exact = partial(score_norms, update.view.model, method="exact", check=check)
            found = update.each(lambda _, **given: exact(**given).values, mask, keep)
        else:
            temperature = update.config.rollout.temperature
            found = update.sharded.exact(
                part.input_ids[keep], mask[keep], part.attention_mask[keep], temperature
            )
        values[keep] = torch.where(mask[keep].bool(), found.float(), math.nan)
        chances = torch.full_like(values, math.nan)
        chances[rows, positions] = update.probability * probability
        update.put("score_norm", values)
        update.put("score_norm_std_error", torch.where(values.isnan(), math.nan, 0.0))
        update.put("draw_probability", chances)


class Shares(Measurement):
    """Attribution: c_t⟨∇log π_t, ∇L⟩/‖∇L‖² of all tokens, which sums to 1 over an update."""

    def run(self, update: MeasuredUpdate) -> None:
        """Column attribution; that of groups without a gradient is known to be 0."""
        norm = update.update.grad_norm
        if not norm > 0:
            return
        model = update.run.policy.model if update.sharded is not None else update.view.model
        reshard(model)  # a forward pass can leave gathered weights, which have no gradient
        trained = [p for p in model.parameters() if p.requires_grad]
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in trained]

        def measure(check: Check) -> None:
            """The shares of an update's tokens."""
            update.put("attribution", update.along(gradient, check, update.sharded) / norm**2)
            known = torch.zeros(len(update.inactive), update.mask.shape[1])
            chance = known + update.inactive_probability
            for name, values in (("attribution", known), ("inclusion_probability", chance)):
                update.values.put(name, update.update, update.inactive, values)

        update.values.fill("attribution", measure)


class HeldoutInfluence(Measurement):
    """c_t⟨∇log π_t, ∇L_heldout⟩ of all tokens; positive lowers the held-out loss."""

    at_spikes = False

    def run(self, update: MeasuredUpdate) -> None:
        """Column heldout_influence."""

        def measure(check: Check) -> None:
            """The influence of an update's tokens."""
            found = update.along(self._heldout_gradient(update), check)
            update.put("heldout_influence", found)

        update.values.fill("heldout_influence", measure)

    def _heldout_gradient(self, update: MeasuredUpdate) -> list[Tensor]:
        """∇L of the expected failure on rollouts of held-out prompts that the present policy draws."""
        config = update.config
        run = update.run
        model = update.view.model
        assert run.probe_set is not None and run.drawer is not None
        seed = derive(config.seed, "heldout", update.values.step) % 2**31
        drawn = run.probe_set.draw("heldout", HELDOUT_SAMPLES, run.drawer, seed)
        mask = _mask(drawn.rollouts)
        mine = distributed.local_slice(len(mask))
        coef = failure_coefficients(mask, drawn.correct)[mine]
        rows = drawn.rollouts.rows(torch.arange(len(mask))[mine])

        def gradient() -> list[Tensor]:
            """The gradient of the rows of this process."""
            if not len(rows):
                return [torch.zeros_like(p) for p in update.view.parameters]
            temperature = config.rollout.temperature
            return logp_gradient(
                model, rows.input_ids, _mask(rows), coef, rows.attention_mask, temperature
            )

        return distributed.sum_tensors(distributed.together(gradient))


@dataclass(kw_only=True)
class ClippedUpdate:
    """A step's first update between clipping and the optimizer's step, whose loss can be computed again."""

    model: nn.Module  # as the optimizer has it; its `.grad` is what the optimizer gets
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[[], Tensor | float]
    """The update's loss at the present weights, or one value for each prompt, (k,), with this mean."""
    start: Tensor | float | None = None  # its value, if already computed
    clip_factor: float | None
    """What clipping has multiplied the gradient by; None if `.grad` is not the gradient of the loss (SAM)."""


class CriticalSharpness:
    """The critical sharpness of a step's first update and its threshold 2/lr. Every process must call it."""

    column = "critical_sharpness"

    def __init__(self, times: Timetable, surface: SurfaceProbes) -> None:
        self.times, self.surface = times, surface

    def due(self, run: MeasuredRun, step: int) -> bool:
        """Whether it is measured in `step`."""
        return self.times.due(step) and self.column not in run.refused

    def run(self, values: StepValues, update: ClippedUpdate) -> None:
        """Add the estimates to those of the step."""
        values.fill(self.column, lambda _: self._measure(values, update))

    def _measure(self, values: StepValues, update: ClippedUpdate) -> None:
        run = values.run
        optimizer = update.optimizer
        model = update.model
        config = run.config
        clip = config.method.clip
        if clip is not None and not clip.gradient_flows:
            raise UserError(
                f"method.clip.kind = {clip.kind}: the loss has a factor that its gradient treats as constant, so its values along "
                "the update are not those of what the update descends"
            )
        compute = run.policy.compute or next(model.parameters()).dtype
        # The loss is near 0 and its terms are not; low precision averages out over tokens.
        half = compute in (torch.bfloat16, torch.float16)
        rounding = torch.finfo(compute).eps * (1 / 8 if half else 4)
        lr = max(float(group["lr"]) for group in optimizer.param_groups)
        direction = update_direction(optimizer, model)
        slope = None
        if update.clip_factor is not None:
            slope = update_slope(model, direction, update.clip_factor)
        guess = GUESS * (lr or config.optimizer.lr)
        found = critical_sharpness(
            update.loss_fn,
            model,
            direction,
            guess=run.critical_lr or guess,
            slope=slope,
            noise=values.coefficients * rounding,
            start=update.start,
            tolerance=TOLERANCE,
            max_evaluations=EVALUATIONS,
            interval=False,  # the update was made from these prompts
        )
        if found.outcome == "found":
            run.critical_lr = found.lr
        threshold = [Estimate("critical", "critical_threshold", 2 / lr)] if lr > 0 else []
        values.estimates += labeled([*found.estimates(), *threshold], functional="surrogate")
        missing = {"critical sharpness": found.why}
        if run.sharded is None:
            along = self.surface.along_update(model, direction, run.critical_lr or guess)
            values.estimates += along
            missing |= {row.quantity.replace("_", " "): row.why for row in along}
        for name, why in missing.items():
            if why:
                text = f"{name}: {why}"
                event = Event(values.step, "probe", "info", math.nan, math.nan, "none", text)
                values.events.append(event)


# -- which tokens and rows ---------------------------------------------------------------------------------------------


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
