"""A step of a run made again with and without its leading tokens, from the same state.

The leading tokens are those with the largest |share| of ‖∇L‖², c·⟨∇ log π, ∇L⟩/‖∇L‖² of their update. Without them, their
coefficients c = ∂L/∂log π are 0 in every update of the step; a control leaves out as many other tokens, drawn at random.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sharpscope.config import ForkSpec, RunConfig, validate
from sharpscope.config.probes import ProbesSpec
from sharpscope.errors import UserError
from sharpscope.forks.outcomes import FixedRollouts, Reading, failure_objective, outcome_rows
from sharpscope.forks.start import Start, resolve
from sharpscope.policy import Policy, Rollouts
from sharpscope.policy.generation import draw_scored
from sharpscope.policy.scoring import Scorer
from sharpscope.probes import Drawn, Objective, Sharpness, attribute, limited_surface, rollout_batch, sharpness
from sharpscope.probes.perturbation import find_radius
from sharpscope.probes.surface import Surface
from sharpscope.recording.environment import set_threads
from sharpscope.recording.probe_sets import Drawer
from sharpscope.recording.step import PendingUpdate, UpdateResult
from sharpscope.seeds import generator
from sharpscope.tasks import Example, Task, make_task
from sharpscope.traces import MAX_SATURATION, Run, RunLock, TraceWriter, load_run, update_run_info
from sharpscope.training.checkpoint import checkpoints, damage, step_of

Tell = Callable[[str], None]
ALL = "all tokens"
GRADIENT, UPDATE = "layer_gradient:", "layer_update:"
"""Prefixes of outcomes: norms of gradient and update of one group of parameters, mean over the step's updates."""


@dataclass(frozen=True)
class Leading:
    """The leading tokens of a step: (row, position), the signed share of the step's update of each, and as many others."""

    tokens: list[tuple[int, int]]
    shares: list[float]
    others: list[tuple[int, int]]


@dataclass(frozen=True)
class StepAgain:
    """A step of a run that can be made again from its state.

    Attributes:
        step: of the run.
        scorer: of the policy.
        rollouts: of the step.
        outcomes: measures the present weights.
        temperature, seed: of the run.
        update: restores the state and makes the step without the tokens (N, T) marked; the model keeps its weights. The function
            given observes each update between its gradient and the optimizer's step.
        restore: puts the state back.
    """

    step: int
    scorer: Scorer
    rollouts: Rollouts
    outcomes: Outcomes
    temperature: float
    seed: int
    update: Callable[[Tensor | None, Callable[[PendingUpdate], None] | None], Sequence[UpdateResult]]
    restore: Callable[[], None]


@dataclass
class Outcomes:
    """What is measured of the present weights; the first measurement is that of the state.

    Attributes:
        scorer: of the policy.
        fixed: completions of the state, on whose tokens entropy and KL are measured.
        probes: settings of the sharpness.
        temperature: of the policy.
        held_out: draws completions of held-out prompts: sampled ones, and the greedy answers' success; None: there are no prompts.
        rho: radius of the sharpness; replaced where its rise at the state is a large part of the ceiling.
    """

    scorer: Scorer
    fixed: FixedRollouts
    probes: ProbesSpec
    temperature: float
    held_out: Callable[[], tuple[Drawn, Tensor]] | None
    rho: float | None = None
    before: dict[str, Tensor] = field(default_factory=dict)  # accuracy of each prompt at the state, by outcome

    def measure(self) -> dict[str, Reading]:
        """Accuracy on held-out prompts, entropy and KL at fixed completions, sharpness on the present policy's own completions.

        Without held-out prompts there is no accuracy, and the sharpness is that of the nll of the fixed completions.
        """
        stats, first = self.scorer.statistics(self.fixed.rollouts), not self.before
        found = {"entropy": Reading(self.fixed.entropy(stats)), "kl": Reading(self.fixed.kl(stats.logp))}
        objective = Objective("nll", rollout_batch(self.fixed.rollouts), self.temperature)
        if self.held_out is not None:
            drawn, greedy = self.held_out()
            _, prompt = drawn.rollouts.group.cpu().unique(return_inverse=True)
            sums = torch.zeros(len(greedy), dtype=torch.float64).index_add_(0, prompt, drawn.correct.double().cpu())
            correct = {"accuracy_greedy": greedy.double(), "accuracy": sums / torch.bincount(prompt)}  # (prompts,)
            for name, values in correct.items():
                change = values - self.before.setdefault(name, values)
                found[name] = Reading(float(values.mean()), float(change.std()) / math.sqrt(len(change)))
            own = FixedRollouts(drawn.rollouts, drawn.correct, self.scorer.statistics(drawn.rollouts))
            objective = failure_objective(own, self.temperature)
        self.before.setdefault("measured", torch.ones(1))
        return found | self._sharpness(objective, first)

    def _sharpness(self, objective: Objective, first: bool) -> dict[str, Reading]:
        """SAM sharpness at a radius whose rise is no large part of its ceiling at the state, with that part."""
        with limited_surface(self.scorer.model, objective, self.probes) as surface:
            at = surface.gradient()
            found = self._sam(surface, at)
            if first and objective.name == "nll" and found is None:
                self.rho = 0.05 * at[0] / max(float(at[1].double().norm()), 1e-12)  # a rise of about 5 % of the loss
                found = self._sam(surface, at)
            elif first and not (found and found.value <= MAX_SATURATION * found.ceiling):
                self.rho = find_radius(surface).rho
                found = self._sam(surface, at)
        if found is None:
            return {"sam_sharpness": Reading(math.nan), "saturation": Reading(math.nan)}
        share = {} if math.isnan(found.ceiling) else {"saturation": Reading(found.value / found.ceiling)}
        return {"sam_sharpness": Reading(found.value)} | share

    def _sam(self, surface: Surface, at: tuple[float, Tensor]) -> Sharpness | None:
        """SAM sharpness at the radius; None without a radius or a gradient."""
        if self.rho is None or not math.isfinite(self.rho) or not bool(at[1].any()):
            return None
        return sharpness(surface, None, self.rho, "sam", at=at)


def drawn_by(
    config: RunConfig, policy: Policy, task: Task, examples: Sequence[Example], samples: int, seed: int
) -> Callable[[], tuple[Drawn, Tensor]]:
    """Draws of the present policy for `Outcomes.held_out`, with the same random numbers each time."""
    drawer = Drawer(config, policy, task)
    greedy = config.rollout.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0})

    def draw() -> tuple[Drawn, Tensor]:
        _, rewards = draw_scored(policy, task, examples, 1, greedy, 0)
        return drawer(examples, samples, seed), torch.tensor([float(reward.correct) for reward in rewards])

    return draw


def recorded_step(config: RunConfig, run: Path, step: int, spec: ForkSpec, tell: Tell) -> StepAgain:
    """Step `step` of one of our runs, from the nearest checkpoint before it; the steps between are made again."""
    found = {step_of(folder): folder for folder in checkpoints(run) if damage(folder) is None}
    nearest = max((at for at in found if at < step), default=0)
    start = Start(config, spec, {"own": config.method}, found.get(nearest), make_task(config.task))
    if nearest + 1 < step:
        tell(f"the nearest checkpoint is of step {nearest}: steps {nearest + 1} to {step - 1} are made again")
    start.advance(step - 1 - nearest, tell)
    rollouts = start.rollouts(start.methods["own"], 0).rollouts
    seed, examples = start.draw_seed("heldout", 0), start.heldout_examples(0)
    draw = drawn_by(config, start.policy, start.task, examples, spec.samples, seed)
    fixed, temperature = start.fixed("heldout", 0), config.rollout.temperature
    outcomes = Outcomes(start.scorer, fixed, config.probes, temperature, draw, start.run_radius)
    rows = load_run(run).rollouts
    texts = list(rows[rows["step"] == step].sort_values("rollout")["completion"])
    if texts and texts != list(rollouts.texts):
        tell(
            f"the completions of step {step} are not those that the run recorded: it ran on another machine or version"
        )

    def update(without: Tensor | None, observe: Callable[[PendingUpdate], None] | None) -> Sequence[UpdateResult]:
        """Make the step."""
        return start.update("own", 0, without=without, before_step=observe).result.updates

    restore = start.snapshot.restore
    return StepAgain(step, start.scorer, rollouts, outcomes, temperature, config.seed, update, restore)


def leading_tokens(step: StepAgain, top: int) -> tuple[Leading, Sequence[UpdateResult]]:
    """The `top` tokens with the largest |share| of the step, and the updates that they are part of, which are made."""
    rollouts, scorer = step.rollouts, step.scorer
    shares = torch.full(rollouts.completion_mask.shape, math.nan, dtype=torch.float64)
    parameters = [p for p in scorer.model.parameters() if p.requires_grad]
    updates = 0

    def observe(update: PendingUpdate) -> None:
        """Each token's share of its first update."""
        nonlocal updates
        updates += 1
        if not update.grad_norm > 0:
            return
        part, width = rollouts.rows(update.rows), rollouts.prompt_width
        coef = torch.nn.functional.pad(update.loss_coef.to(part.input_ids.device), (width, 0))
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in parameters]
        mask, coef = (coef != 0).long(), coef.to(gradient[0].dtype)
        given = (part.input_ids, mask, coef, gradient, part.attention_mask, step.temperature)
        along = attribute(scorer.model, *given)
        own = along[:, width:].double().cpu() / update.grad_norm**2
        shares[update.rows] = torch.where(update.first_use & shares[update.rows].isnan(), own, shares[update.rows])

    made = step.update(None, observe)
    size = shares.abs().nan_to_num(0.0)
    order = size.flatten().argsort(descending=True, stable=True)
    order = order[size.flatten()[order] > 0]
    if len(order) < 2 * top:
        raise UserError(
            f"--without-tokens top:{top}: only {len(order)} tokens of step {step.step} have a part in its gradient; give at most "
            f"{len(order) // 2}"
        )
    rest = order[top:][torch.randperm(len(order) - top, generator=generator(step.seed, "without", step.step))[:top]]
    wide = size.shape[1]
    places = [[divmod(int(place), wide) for place in chosen] for chosen in (order[:top], rest)]
    return Leading(places[0], [float(shares[place]) / max(updates, 1) for place in places[0]], places[1]), made


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
    earlier one, from which the steps between are made again. Rows go to the run's table `forks`, arms `all tokens`, `without top K`
    and `without K others`; outcomes are accuracy on held-out prompts (greedy and at the sampling temperature), entropy and KL at
    fixed completions, SAM sharpness with its saturation, and norms of gradient and update, in all and by layer.

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
        again = TrainerStep(loaded, step, model, config, spec, tell).again
    else:
        config = resolve("fork", run, None, task, None, overrides)
        set_threads(config.threads if threads is None else threads, config.policy.model)
        again = recorded_step(config, Path(run), step, spec, tell)
    _write(loaded, again, name, kept, tell)
    return load_run(run), name


def _write(run: Run, again: StepAgain, name: str, settings: Mapping[str, Any], tell: Tell) -> None:
    """Make the arms of the fork `name` and write their rows, and the settings and leading tokens into run.json."""
    top = settings["top"]
    again.restore()
    start = again.outcomes.measure()
    tell("leading tokens")
    leading, made = leading_tokens(again, top)
    arms: dict[str, list[tuple[int, int]]] = {
        ALL: [],
        f"without top {top}": leading.tokens,
        f"without {top} others": leading.others,
    }
    rows: list[dict[str, Any]] = []
    for arm, places in arms.items():
        if places:
            left_out = torch.zeros(again.rollouts.completion_mask.shape, dtype=torch.bool)
            left_out[tuple(torch.tensor(places).T)] = True
            made = again.update(left_out, None)
        readings = again.outcomes.measure() | update_readings(made)
        sound = not any(update.problem for update in made)
        common = {"step": again.step - 1, "fork": name, "batch": 0, "arm": arm, "reference": ALL}
        common |= {"comparison": "step", "scale": 1.0}
        saturated = readings.get("saturation", Reading(0.0)).value > MAX_SATURATION
        wrong = "sam_sharpness" if saturated else ""

        def valid(outcome: str, _: Reading, sound: bool = sound, wrong: str = wrong) -> bool:
            """A saturated sharpness measures the accuracy."""
            return sound and outcome != wrong

        rows += outcome_rows(common, readings, start, valid)
        tell(f"{arm}: measured")
    again.restore()
    tokens = [
        {"rollout": row, "position": position, "share": share}
        for (row, position), share in zip(leading.tokens, leading.shares, strict=True)
    ]
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
