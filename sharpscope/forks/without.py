"""A step of a run made again with and without its leading tokens, from the same state.

The leading tokens are those with the largest |share| of ‖∇L‖², c·⟨∇ log π, ∇L⟩/‖∇L‖² of their update. Without them, their
coefficients c = ∂L/∂log π are 0 in every update of the step; a control leaves out as many other tokens, drawn at random.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sharpscope.config import ForkSpec, RunConfig, validate
from sharpscope.config.probes import ProbesSpec
from sharpscope.errors import UserError
from sharpscope.forks.outcomes import FixedRollouts, Reading, greedy_success, heldout_order, outcome_rows, run_radius
from sharpscope.forks.start import Start, Tell, resolve
from sharpscope.policy import Policy, Rollouts
from sharpscope.policy.scoring import Scorer
from sharpscope.probes import Drawn, Objective, attribute, find_radius, limited_surface, rollout_batch, sharpness
from sharpscope.recording.environment import set_threads
from sharpscope.recording.probe_sets import Drawer
from sharpscope.recording.step import PendingUpdate, UpdateResult
from sharpscope.seeds import derive, generator
from sharpscope.tasks import Task
from sharpscope.traces import MAX_SATURATION, Run, RunLock, TraceWriter, load_run, update_run_info
from sharpscope.training.checkpoint import checkpoints, damage, step_of

ALL = "all tokens"
GRADIENT, UPDATE = "layer_gradient:", "layer_update:"
"""Prefixes of outcomes: norms of gradient and update of one group of parameters, mean over the step's updates."""
Observe = Callable[[PendingUpdate], None]
"""Sees an update between its gradient and the optimizer's step."""


Places = list[tuple[int, int]]
"""Tokens of a step: (row, position)."""


class StepAgain(ABC):
    """A step of a run that can be made again from its state, and what is measured of the present weights.

    Args:
        held_out: draws completions of held-out prompts: sampled ones, and the greedy answers' success; None: there are no prompts.
        fixed: completions on whose tokens entropy and KL are measured; None: those that `held_out` draws at the state.
        probes: settings of the sharpness.
        rho: its radius, replaced where its rise at the state is a large part of the ceiling; None: found at the state.
    """

    def __init__(
        self,
        step: int,
        scorer: Scorer,
        rollouts: Rollouts,
        temperature: float,
        seed: int,
        *,
        held_out: Callable[[], tuple[Drawn, Tensor]] | None,
        fixed: FixedRollouts | None,
        probes: ProbesSpec,
        rho: float | None,
    ) -> None:
        self.step, self.scorer, self.rollouts, self.temperature, self.seed = step, scorer, rollouts, temperature, seed
        self._held_out, self._fixed, self._probes = held_out, fixed, probes
        self._rho = math.nan if rho is None else rho
        self._before: dict[str, Tensor] | None = None  # accuracy of each prompt at the state, by outcome

    @abstractmethod
    def update(self, without: Tensor | None = None, observe: Observe | None = None) -> Sequence[UpdateResult]:
        """Restore the state and make the step without the tokens (N, T) marked; the model keeps its weights."""

    @abstractmethod
    def restore(self) -> None:
        """Put the state back."""

    def measure(self) -> dict[str, Reading]:
        """Accuracy on held-out prompts, entropy and KL at fixed completions, sharpness on the present policy's own completions.

        The first measurement is that of the state. Without held-out prompts there is no accuracy, and the sharpness is that of the
        nll of the fixed completions.
        """
        found, first = {}, self._before is None
        before = self._before = self._before or {}
        if self._held_out is not None:
            drawn, greedy = self._held_out()
            present = FixedRollouts.scored(drawn, self.scorer)
            self._fixed = self._fixed or present
            _, prompt = drawn.rollouts.group.cpu().unique(return_inverse=True)
            sums = torch.zeros(len(greedy), dtype=torch.float64).index_add_(0, prompt, drawn.correct.double().cpu())
            correct = {"accuracy_greedy": greedy, "accuracy": sums / torch.bincount(prompt)}  # (prompts,)
            for name, values in correct.items():
                change = values - before.setdefault(name, values)
                found[name] = Reading(float(values.mean()), float(change.std()) / math.sqrt(len(change)))
        fixed = self._fixed
        assert fixed is not None
        if self._held_out is None:
            objective = Objective("nll", rollout_batch(fixed.rollouts), self.temperature)
        else:
            objective = present.failure_objective(self.temperature)
        stats = self.scorer.statistics(fixed.rollouts)
        at_fixed = {"entropy": Reading(fixed.entropy(stats)), "kl": Reading(fixed.kl(stats.logp))}
        return at_fixed | found | self._sharpness(objective, first)

    def _sharpness(self, objective: Objective, first: bool) -> dict[str, Reading]:
        """SAM sharpness with its saturation; at the state the radius is replaced where the saturation is large."""
        with limited_surface(self.scorer.model, objective, self._probes) as surface:
            at = surface.gradient()
            norm = float(at[1].double().norm())

            def rise() -> tuple[float, float]:
                """Sharpness and ceiling; NaN without a radius or a gradient."""
                if not (math.isfinite(self._rho) and norm > 0):
                    return math.nan, math.nan
                found = sharpness(surface, None, self._rho, "sam", at=at)
                return found.value, found.ceiling

            value, ceiling = rise()
            if first and objective.name == "nll" and math.isnan(value):
                self._rho = 0.05 * at[0] / max(norm, 1e-12)  # a rise of about 5 % of the loss
                value, ceiling = rise()
            elif first and objective.name != "nll" and not value <= MAX_SATURATION * ceiling:
                self._rho = find_radius(surface).rho
                value, ceiling = rise()
        unbounded = math.isfinite(value) and math.isnan(ceiling)
        return {"sam_sharpness": Reading(value)} | ({} if unbounded else {"saturation": Reading(value / ceiling)})

    def leading(self, top: int) -> tuple[Places, list[float], Places, Sequence[UpdateResult]]:
        """The `top` tokens with the largest |share| of the step, their shares, as many others, and the updates, which are made."""
        rollouts, model, width = self.rollouts, self.scorer.model, self.rollouts.prompt_width
        shares = torch.full(rollouts.completion_mask.shape, math.nan, dtype=torch.float64)
        parameters, observed = [p for p in model.parameters() if p.requires_grad], []

        def observe(update: PendingUpdate) -> None:
            observed.append(update.index)
            if not update.grad_norm > 0:
                return
            part = rollouts.rows(update.rows)
            gradient = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]
            coef = F.pad(update.loss_coef.to(part.input_ids.device), (width, 0)).to(gradient[0].dtype)
            given = (part.input_ids, (coef != 0).long(), coef, gradient, part.attention_mask, self.temperature)
            found = attribute(model, *given)[:, width:].double().cpu() / update.grad_norm**2
            first = update.first_use & shares[update.rows].isnan()
            shares[update.rows] = torch.where(first, found, shares[update.rows])

        made = self.update(None, observe)
        size = shares.abs().nan_to_num(0.0).flatten()
        order = size.argsort(descending=True, stable=True)
        order = order[size[order] > 0]
        if len(order) < 2 * top:
            raise UserError(
                f"--without-tokens top:{top}: only {len(order)} tokens of step {self.step} have a part in its gradient; give at most "
                f"{len(order) // 2}"
            )
        rest = order[top:][torch.randperm(len(order) - top, generator=generator(self.seed, "without", self.step))[:top]]
        leading, others = ([divmod(int(one), shares.shape[1]) for one in chosen] for chosen in (order[:top], rest))
        return leading, [float(shares[place]) / max(len(observed), 1) for place in leading], others, made


class RunStep(StepAgain):
    """Step `step` of one of our runs, from the nearest checkpoint before it; the steps between are made again."""

    def __init__(self, config: RunConfig, run: Path, step: int, spec: ForkSpec, tell: Tell) -> None:
        found = {step_of(folder): folder for folder in checkpoints(run) if damage(folder) is None}
        nearest = max((at for at in found if at < step), default=0)
        start = self.start = Start(config, {"own": config.method}, found.get(nearest))
        if nearest + 1 < step:
            tell(f"the nearest checkpoint is of step {nearest}: steps {nearest + 1} to {step - 1} are made again")
        start.advance(step - 1 - nearest, tell)
        rollouts = start.rollouts(start.methods["own"], 0).rollouts
        draw = drawn_by(config, start.policy, start.task, spec, derive(config.seed, "fork heldout", start.step, 0))
        options: dict[str, Any] = {"held_out": draw, "fixed": None, "probes": config.probes}
        options["rho"] = run_radius(config, run if nearest else None)
        super().__init__(step, start.scorer, rollouts, config.rollout.temperature, config.seed, **options)
        rows = load_run(run).rollouts
        texts = list(rows[rows["step"] == step].sort_values("rollout")["completion"])
        if texts and texts != list(rollouts.texts):
            tell(
                f"the completions of step {step} are not those that the run recorded: it ran on another machine or version"
            )

    def update(self, without: Tensor | None = None, observe: Observe | None = None) -> Sequence[UpdateResult]:
        """See `StepAgain`."""
        return self.start.update("own", 0, without=without, before_step=observe).updates

    def restore(self) -> None:
        """See `StepAgain`."""
        self.start.snapshot.restore()


def drawn_by(
    config: RunConfig, policy: Policy, task: Task, spec: ForkSpec, seed: int
) -> Callable[[], tuple[Drawn, Tensor]]:
    """Draws of the present policy for `StepAgain`, with the same prompts and random numbers each time."""
    drawer, examples = Drawer(config, policy, task), heldout_order(config, task).take(spec.prompts)

    def draw() -> tuple[Drawn, Tensor]:
        greedy = greedy_success(policy, task, examples, config.rollout)
        return drawer(examples, spec.samples, seed), greedy

    return draw


def without_tokens(
    run: Path | str,
    step: int,
    top: int = 12,
    *,
    model: str | None = None,
    task: str | None = None,
    overrides: Sequence[str] = (),
    threads: int | None = None,
    on_progress: Tell | None = None,
    **settings: Any,
) -> tuple[Run, str]:
    """Make a step of a run again with all tokens, without its leading ones, and without as many others.

    All start from the same weights, optimizer state and rollouts: those of the checkpoint after the step before, or of the nearest
    earlier one, from which the steps between are made again. Rows go to the run's table `forks`.

    Args:
        run: folder of a run.
        step: to make again, from 1.
        top: number of leading tokens.
        model: of a run that was recorded in another trainer: its checkpoint before the step, with AdamW's state (`optimizer.pt`).
        task: kind of a task whose held-out prompts measure the accuracy, with `model`; None: no accuracy.
        overrides: changes of the run's configuration that leave its training alone, such as `probes.check=off`.
        threads: CPU threads; None: as configured.
        on_progress: called with a line of text on what is done.
        **settings: `prompts` and `samples` of `ForkSpec`.

    Returns:
        The run with the rows, and the name of the fork.

    Raises:
        UserError: the input is wrong, the checkpoint is not that before the step, or the step has too few tokens with a gradient.
    """
    from sharpscope.forks.recorded import TrainerStep

    tell = on_progress or (lambda text: None)
    loaded = load_run(run)
    if step not in set(loaded.steps["step"]):
        last = int(loaded.steps["step"].max()) if len(loaded.steps) else 0
        raise UserError(f"--step {step}: the run has steps 1 to {last}")
    spec: ForkSpec = validate(ForkSpec, {**settings, "warm_up": 0, "batches": 1})
    kept = {"step": step, "top": top, "model": model, "task": task}
    kept |= spec.model_dump(mode="json", include={"prompts", "samples"})
    name = hashlib.sha256(json.dumps(["without", kept, list(overrides)]).encode()).hexdigest()[:8]
    if name in (loaded.info.get("forks") or {}):
        tell(f"step {step}: measured before")
        return loaded, name
    if model is None and not (Path(run) / "config.yaml").is_file():
        raise UserError(
            f"run {run}: was recorded in another trainer; give its checkpoint before step {step} with --model"
        )
    if model is not None:
        config = None if task is None else resolve("fork", None, model, task, None, overrides)
        set_threads(threads, model)
        again: StepAgain = TrainerStep(loaded, step, model, config, spec, tell)
    else:
        config = resolve("fork", run, None, task, None, overrides)
        set_threads(config.threads if threads is None else threads, config.policy.model)
        again = RunStep(config, Path(run), step, spec, tell)
    _write(loaded, again, name, kept, tell)
    return load_run(run), name


def _write(run: Run, again: StepAgain, name: str, settings: Mapping[str, Any], tell: Tell) -> None:
    """Make the arms of the fork `name` and write their rows, and the settings and leading tokens into run.json."""
    top = settings["top"]
    again.restore()
    start = again.measure()
    tell("leading tokens")
    leading, shares, others, made = again.leading(top)
    rows: list[dict[str, Any]] = []
    for arm, places in {ALL: [], f"without top {top}": leading, f"without {top} others": others}.items():
        if places:
            left_out = torch.zeros(again.rollouts.completion_mask.shape, dtype=torch.bool)
            left_out[tuple(torch.tensor(places).T)] = True
            made = again.update(left_out)
        readings = again.measure() | update_readings(made)
        common = {"step": again.step - 1, "fork": name, "batch": 0, "arm": arm, "reference": ALL}
        common |= {"comparison": "step", "scale": 1.0}
        rows += outcome_rows(common, readings, start, not any(update.problem for update in made))
        tell(f"{arm}: measured")
    again.restore()
    tokens = [{"rollout": r, "position": p, "share": share} for (r, p), share in zip(leading, shares, strict=True)]
    with RunLock(run.path):
        with TraceWriter(run.path) as writer:
            writer.append("forks", {key: [row[key] for row in rows] for key in rows[0]})
        forks = dict(load_run(run.path).info.get("forks") or {})
        update_run_info(run.path, forks=forks | {name: {**settings, "tokens": tokens}})


def update_readings(updates: Sequence[UpdateResult]) -> dict[str, Reading]:
    """Norms of gradients before clipping and of updates, in all and by layer: means over the updates."""
    sums: dict[str, list[float]] = {}
    for update in updates:
        values: dict[str, float] = {"grad_norm": update.grad_norm, "update_norm": update.update_norm}
        for prefix, of in zip((GRADIENT, UPDATE), update.layers or ({}, {}), strict=True):
            values |= {f"{prefix}{group}": value for group, value in of.items()}
        for name, value in values.items():
            sums.setdefault(name, []).append(value)
    return {name: Reading(math.fsum(values) / len(values)) for name, values in sums.items()}
