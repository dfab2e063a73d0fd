"""What `fork` and `rotate` start from: a run's checkpoint or a model, restored exactly before every method's update."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.config import (
    ForkSpec,
    Method,
    RunConfig,
    TokenWeight,
    build_config,
    known_settings,
    parse_methods,
    read_recorded,
)
from sharpscope.config.policy import EMBEDDED_PREFIX
from sharpscope.config.token_weights import UniformWeight
from sharpscope.errors import UserError
from sharpscope.forks.outcomes import FixedRollouts, fork_radius
from sharpscope.objective import MethodState, calibrate
from sharpscope.policy import Policy, Rollouts, RolloutSpec, TokenStats, embedded_policy
from sharpscope.policy.scoring import Scorer
from sharpscope.recording.health import StepHealth
from sharpscope.recording.probe_sets import Drawer
from sharpscope.recording.step import PendingUpdate, RolloutBatch, StepResult, step_tensors
from sharpscope.seeds import derive
from sharpscope.tasks import Example, Reward, Task, task_choice
from sharpscope.traces import read_run_info
from sharpscope.traces.files import RUN_FILE
from sharpscope.training import DataOrder, Learner
from sharpscope.training.checkpoint import PROXIMAL, checkpoints, damage, restore, step_of
from sharpscope.training.rollouts import draw_group, draw_rollouts
from sharpscope.training.setup import (
    build_optimizer,
    learning_rate,
    load_start,
    make_learner,
    positive_learning_rate,
    reference_policy,
    set_learning_rate,
)

# -- what was asked for ------------------------------------------------------------------------------------------------


def resolve(
    command: str,
    run: Path | str | None,
    model: str | None,
    task: str | None,
    seed: int | None,
    overrides: Sequence[str],
) -> RunConfig:
    """The configuration of a run, or of a model with a task, for `command` (fork or rotate).

    Raises:
        UserError: the input is wrong, or the run was recorded in another trainer.
    """
    if distributed.start().processes > 1:
        raise UserError(f"{command}: runs in one process; start it without accelerate launch or torchrun")
    if run is None:
        if task is None and model is not None and model.startswith(EMBEDDED_PREFIX):
            task = embedded_policy(model.removeprefix(EMBEDDED_PREFIX)).name
        values: dict[str, Any] = {"policy.model": model, "seed": seed}
        values = {name: value for name, value in values.items() if value is not None}
        if task is not None:
            values["task"] = dict(task_choice(task))
        config = build_config(None, overrides, values)
    else:
        given = {"--model": model, "--task": task, "--seed": seed}
        extra = next((name for name, value in given.items() if value is not None), None)
        if extra is not None:
            raise UserError(f"{extra}: goes without the folder of a run, which has its own; remove one of the two")
        folder = Path(run)
        if not (folder / "config.yaml").is_file():
            if not (folder / RUN_FILE).exists():
                raise UserError(f"run {folder}: is not the folder of a run")
            raise UserError(
                f"run {folder}: was recorded in another trainer, so that its next step cannot be made again; "
                f"sharpscope {command} --model CHECKPOINT --task TASK takes a checkpoint of it"
            )
        config = read_recorded(folder, overrides=overrides)
    return config


def saved_states(run: Path | str | None, wanted: Sequence[str | int]) -> list[Path | None]:
    """The checkpoints that `wanted` names by step or name (none: the last one); None is the initial policy, or a model.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    if run is None:
        if any(str(one) != "0" for one in wanted):
            raise UserError(
                f"--checkpoint {wanted[0]}: goes with the folder of a run; --model names the weights itself"
            )
        return [None]
    saved = {step_of(folder): folder for folder in checkpoints(Path(run))}
    if not wanted and not saved:
        raise UserError(f"run {run}: has no checkpoint; --checkpoint 0 is its initial policy")
    steps: list[int] = []
    for one in wanted or [max(saved)]:
        text = str(one).removeprefix("step-")
        step = int(text) if text.isdecimal() else -1
        if step != 0 and step not in saved:
            known = ", ".join(map(str, [0, *saved]))
            raise UserError(f"--checkpoint {one}: run {run} has none of this step; choose from {known}")
        problem = damage(saved[step]) if step else None
        if problem is not None:
            raise UserError(f"--checkpoint {one}: is damaged ({problem}); choose another")
        if step not in steps:
            steps.append(step)
    return [saved.get(step) for step in steps]


def arms_of(texts: Sequence[str], token_weights: str | None, config: RunConfig) -> dict[str, Method]:
    """Methods by label, see `parse_methods`; a preset equal to the run's default is `auto`."""
    found = parse_methods(texts, token_weights)
    return {name: method.with_preset(config.default_preset, "auto") for name, method in found.items()}


# -- the state ---------------------------------------------------------------------------------------------------------


class State:
    """Policy, optimizer, data order and methods at one step of a run.

    Attributes:
        config, task, policy, optimizer: of the run.
        step: of the state; 0 is before training.
        lr: learning rate of the next step.
        methods: by name, presets filled in; the run's own method has the constants that the run has calibrated.
        warm: whether the optimizer has moments.

    Args:
        config: of the run.
        methods: by name, as configured.
        checkpoint: folder of a checkpoint of the run; None for its initial policy.
        task: of the run.
        stored_average: whether an average of past weights (`ppo-ewma`) is that of the checkpoint; else it starts as the weights.
    """

    def __init__(
        self,
        config: RunConfig,
        methods: Mapping[str, Method],
        checkpoint: Path | None,
        task: Task,
        *,
        stored_average: bool,
    ) -> None:
        self.config, self.task = config, task
        examples = task.splits().get("train", [])
        if not examples:
            raise UserError(f"task.kind = '{config.task.kind}': has no split 'train' to draw prompts from")
        self.policy = load_start(config, checkpoint)
        self.methods = {name: method.with_preset("auto", config.default_preset) for name, method in methods.items()}
        needs_reference = any(method.needs_reference for method in methods.values())
        self.reference = reference_policy(config, self.policy) if needs_reference else None
        averaged = [name for name, method in methods.items() if method.proximal is not None]
        self.proximal = copy.deepcopy(self.policy.model).eval() if averaged else None
        self.optimizer = build_optimizer(self.policy.model, config.optimizer)
        self.step, self._cursor = 0, 0
        self._state: dict[str, Any] = {}  # of the run's method
        if checkpoint is not None:
            kept = (checkpoint / PROXIMAL).exists()
            if averaged and stored_average and not kept:
                raise UserError(
                    f"--methods {averaged[0]}: its average of past weights is not in the checkpoint {checkpoint.name}, whose "
                    "run used another method; start from --checkpoint 0 or from a run of this method"
                )
            average = self.proximal if stored_average and kept else None
            progress = restore(checkpoint, self.policy, self.optimizer, average)
            self.step, self._cursor = progress.step, progress.cursor
            self._state = dict(progress.entropy_control)
            method = config.resolved_method.unlabeled
            calibrated = Method.model_validate(known_settings(Method, progress.method))
            self.methods = {name: calibrated if one.unlabeled == method else one for name, one in self.methods.items()}
        self.warm = bool(self.optimizer.state)
        self.lr = positive_learning_rate(config, min(self.step + 1, config.steps))
        set_learning_rate(self.optimizer, self.lr)
        self._order = DataOrder(examples, config.seed)
        self._learner = make_learner(config, self.policy, self.optimizer)
        self.scorer: Scorer = self._learner.scorer

    def progress(self, number: int = 0) -> float:
        """Share of the run done `number` steps after the next one; a run's last value after its end."""
        return (min(self.step + 1 + number, self.config.steps) - 1) / max(self.config.steps - 1, 1)

    def learner(self, method: Method) -> Learner:
        """A learner with what this method needs."""
        return replace(
            self._learner,
            reference=self.reference if method.needs_reference else None,
            proximal=self.proximal if method.proximal is not None else None,
            state=MethodState.stored(copy.deepcopy(self._state)),
        )

    def drawn(
        self, method: Method, order: DataOrder, seed: int, step: int, shared: SharedDraws | None = None
    ) -> RolloutBatch:
        """Rollouts of the next prompts of `order` with the seeds of `step`."""
        shared = SharedDraws() if shared is None else shared
        statistics, spec = partial(shared.statistics, self.scorer), self.config.rollout
        return draw_rollouts(self.policy, self.task, order, method, spec, seed, step, statistics, shared.draw)

    def warm_up(self, steps: int, method: Method) -> None:
        """If no optimizer state is stored, fill AdamW's moments with gradients of `method` at the starting weights."""
        self.warmed = 0 if self.warm else steps
        if not self.warmed:
            return
        learner, seed = self.learner(method), derive(self.config.seed, "fork warm-up")
        order = replace(self._order, cursor=0, seed=seed)
        set_learning_rate(self.optimizer, 0.0)
        for number in range(1, self.warmed + 1):
            drawn = self.drawn(method, order, seed, number)
            learner.learn(drawn.rollouts, drawn.advantage, number, self.progress(), method=method, stats=drawn.stats)
        set_learning_rate(self.optimizer, self.lr)


class Snapshot:
    """A copy of weights, buffers, optimizer state and torch's random state; `restore` puts all of them back bit for bit.

    Args:
        model: the policy; its frozen parameters are not copied, since no update writes them.
        optimizer: over its trainable parameters.
        proximal: the averaged policy of a decoupled objective, or None.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, proximal: nn.Module | None = None) -> None:
        self.model, self.optimizer = model, optimizer
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        written = [*self.parameters, *model.buffers(), *([] if proximal is None else proximal.parameters())]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in written]
        self._start = [kept for _, kept in self._tensors[: len(self.parameters)]]
        self._state = copy.deepcopy(optimizer.state_dict())
        self._random = torch.get_rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; gradients are removed."""
        for tensor, kept in self._tensors:
            tensor.copy_(kept)
        for parameter in self.parameters:
            parameter.grad = None
        self.model.eval()
        self.optimizer.load_state_dict(copy.deepcopy(self._state))
        torch.set_rng_state(self._random)

    @torch.no_grad()
    def displacement(self) -> list[Tensor]:
        """θ − θ₀ of each trainable parameter."""
        return [p.detach() - start for p, start in zip(self.parameters, self._start, strict=True)]

    @torch.no_grad()
    def place(self, displacement: Sequence[Tensor], scale: float) -> None:
        """Set the weights to θ₀ + scale·displacement; the optimizer's state is not touched."""
        for parameter, start, part in zip(self.parameters, self._start, displacement, strict=True):
            parameter.copy_(start + part * scale)


def _radius_of(config: RunConfig, checkpoint: Path | None) -> float | None:
    """The radius of a run's perturbations, if it is fixed or has been found."""
    if config.probes.rho != "auto":
        return float(config.probes.rho)
    found = {} if checkpoint is None else read_run_info(checkpoint.parents[1]).get("probe_radius") or {}
    rho = found.get("rho")
    return None if rho is None or math.isnan(rho) else float(rho)


# -- arms of a fork ----------------------------------------------------------------------------------------------------


@dataclass
class SharedDraws:
    """Completions and statistics of the starting policy, computed once and shared by all arms of a batch."""

    rollouts: dict[tuple[int, ...], tuple[Rollouts, list[Reward]]] = field(default_factory=dict)
    stats: dict[int, tuple[Tensor, TokenStats]] = field(default_factory=dict)  # by the identity of the tensor

    def draw(
        self, policy: Policy, task: Task, examples: list[Example], spec: RolloutSpec, seed: int
    ) -> tuple[Rollouts, list[Reward]]:
        """As `draw_group`; the same examples and seed are drawn once."""
        key = (seed, *map(id, examples))
        if key not in self.rollouts:
            self.rollouts[key] = draw_group(policy, task, examples, spec, seed)
        return self.rollouts[key]

    def statistics(self, scorer: Scorer, rollouts: Rollouts) -> TokenStats:
        """As `Scorer.statistics`; the same rollouts are scored once."""
        ids = rollouts.input_ids
        if id(ids) not in self.stats:
            self.stats[id(ids)] = (ids, scorer.statistics(rollouts))
        return self.stats[id(ids)][1]


@dataclass(frozen=True)
class ArmUpdate:
    """What an arm did: the change of the weights θ − θ₀, and the result of its step."""

    displacement: list[Tensor]
    result: StepResult

    @property
    def sound(self) -> bool:
        """Whether every gradient and all weights were finite."""
        return not any(update.problem for update in self.result.updates)


class Start(State):
    """A state from which the arms of a fork make their updates; it is restored before every arm.

    If no optimizer state is stored, AdamW's moments are warmed up: `spec.warm_up` steps of the reference method at a learning
    rate of 0, so that the weights stay exactly where they are.

    Args:
        config: of the run.
        spec: of the fork.
        arms: method of each arm, as configured; the first is the reference.
        checkpoint: folder of a checkpoint of the run; None for its initial policy.
        task: of the run.
    """

    def __init__(
        self, config: RunConfig, spec: ForkSpec, arms: Mapping[str, Method], checkpoint: Path | None, task: Task
    ) -> None:
        super().__init__(config, arms, checkpoint, task, stored_average=True)
        self.spec = spec
        heldout = task.splits().get("heldout", [])
        if not heldout:
            raise UserError(f"task.kind = '{config.task.kind}': has no split 'heldout' to measure outcomes on")
        self._heldout = DataOrder(heldout, derive(config.seed, "fork held-out"))
        self.drawer = Drawer(config, self.policy, task)
        self.run_radius = _radius_of(config, checkpoint)
        self._calibrate()
        self.warm_up(spec.warm_up, next(iter(self.methods.values())))
        self.snapshot = Snapshot(self.policy.model, self.optimizer, self.proximal)
        self.rho = fork_radius(self) if "sharpness" in spec.outcomes else None

    def _calibrate(self) -> None:
        """Fill the constants of token weights that are to be calibrated, on the first batch of this state.

        As in a run, percentiles over the gradient wait for a batch that has one. If none has, the weights are 1.
        """
        shared = SharedDraws()
        for name, method in self.methods.items():
            if not method.weight.needs_calibration:
                continue
            weight: TokenWeight = UniformWeight()
            for batch in range(self.spec.batches):
                drawn = self.rollouts(method, batch, shared=shared)
                stats = shared.statistics(self.scorer, drawn.rollouts)
                tensors = step_tensors(drawn.rollouts, drawn.advantage, stats, stats.logp, self.progress(), method)
                if not method.weight.needs_gradient or bool(tensors.mass.any()):
                    weight = calibrate(method.weight, tensors)
                    break
            self.methods[name] = method.model_copy(update={"weight": weight})

    # -- updates -----------------------------------------------------------------------------------------------------

    def _seed_step(self, batch: int, number: int) -> int:
        """The step whose seeds are used; those of batch 0 are the run's own."""
        return self.step + 1 + batch + number

    def order(self, batch: int) -> DataOrder:
        """The data order at the first prompt of a batch; that of batch 0 is the run's own."""
        return replace(self._order, cursor=self._cursor + batch * self.config.rollout.prompts_per_step)

    def rollouts(
        self,
        method: Method,
        batch: int,
        number: int = 0,
        *,
        order: DataOrder | None = None,
        shared: SharedDraws | None = None,
    ) -> RolloutBatch:
        """The rollouts of step `number` of an arm."""
        order = self.order(batch) if order is None else order
        return self.drawn(method, order, self.config.seed, self._seed_step(batch, number), shared)

    def make_step(
        self,
        learner: Learner,
        method: Method,
        order: DataOrder,
        number: int,
        *,
        batch: int = 0,
        shared: SharedDraws | None = None,
        without: Tensor | None = None,
        before_step: Callable[[PendingUpdate], None] | None = None,
    ) -> StepResult:
        """Make step `number` after the state from the present weights, on the next rollouts of `order`."""
        steps, shared = self.config.steps, SharedDraws() if shared is None else shared
        set_learning_rate(
            self.optimizer, learning_rate(self.config.optimizer, min(self.step + 1 + number, steps), steps)
        )
        drawn = self.rollouts(method, batch, number, order=order, shared=shared)
        stats = shared.statistics(self.scorer, drawn.rollouts)
        seed_step, progress = self._seed_step(batch, number), self.progress(number)
        health = StepHealth(self.config.health, seed_step, drawn, method, progress, self.policy.device)
        return learner.learn(
            drawn.rollouts,
            drawn.advantage,
            seed_step,
            progress,
            method=method,
            stats=stats,
            before_first_update=health.allows_updates,
            before_step=before_step,
            without=without,
        )

    def advance(self, steps: int, tell: Callable[[str], None]) -> None:
        """Make so many steps of the first arm, as its run made them; the state is then the one after them."""
        method, order = next(iter(self.methods.values())), self.order(0)
        learner = self.learner(method)
        for number in range(steps):
            self.make_step(learner, method, order, number)
            tell(f"step {self.step + 1 + number} made again, {steps - 1 - number} to go")
        self.step, self._cursor = self.step + steps, order.cursor
        self._state = dict(vars(learner.state))
        self.snapshot = Snapshot(self.policy.model, self.optimizer, self.proximal)

    def update(
        self,
        name: str,
        batch: int,
        shared: SharedDraws | None = None,
        *,
        without: Tensor | None = None,
        before_step: Callable[[PendingUpdate], None] | None = None,
    ) -> ArmUpdate:
        """Restore the state, and make the step of an arm on a batch; the model keeps the arm's weights. See `Learner.learn`."""
        self.snapshot.restore()
        method, order = self.methods[name], self.order(batch)
        options: dict[str, Any] = {"without": without, "before_step": before_step}
        result = self.make_step(self.learner(method), method, order, 0, batch=batch, shared=shared, **options)
        return ArmUpdate(self.snapshot.displacement(), result)

    # -- fixed completions -------------------------------------------------------------------------------------------

    def fixed(self, split: str, batch: int) -> FixedRollouts:
        """New completions of the starting policy, the same for all arms of a batch. The state must be restored.

        Held-out prompts are the next of a seeded order. Training prompts are those that the batch learns from, with as many
        completions in total.
        """
        spec = self.spec
        if split == "heldout":
            examples, samples = self.heldout_examples(batch), spec.samples
        else:
            examples = self.order(batch).take(self.config.rollout.prompts_per_step)
            samples = max(1, math.ceil(spec.prompts * spec.samples / len(examples)))
        drawn = self.drawer(examples, samples, self.draw_seed(split, batch))
        return FixedRollouts(drawn.rollouts, drawn.correct, self.scorer.statistics(drawn.rollouts))

    def heldout_examples(self, batch: int) -> list[Example]:
        """The held-out prompts of a batch."""
        return replace(self._heldout, cursor=batch * self.spec.prompts).take(self.spec.prompts)

    def draw_seed(self, split: str, batch: int) -> int:
        """Seed of the completions of `fixed`."""
        return derive(self.config.seed, f"fork {split}", self.step, batch)
