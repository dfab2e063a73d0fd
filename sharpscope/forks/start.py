"""The state that `fork` and `rotate` start from: a run's checkpoint or a model, restored exactly before every update."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.config import RunConfig, build_config, read_recorded
from sharpscope.errors import UserError
from sharpscope.methods import Method, parse_methods
from sharpscope.methods.loss import MethodState
from sharpscope.methods.token_weights import UniformWeight
from sharpscope.policy import Rollouts, TokenStats
from sharpscope.recording.health import StepHealth
from sharpscope.recording.step import PendingUpdate, RolloutBatch, StepResult
from sharpscope.seeds import derive
from sharpscope.settings import known_settings
from sharpscope.tasks import Example, make_task, task_choice
from sharpscope.traces.files import RUN_FILE
from sharpscope.training import DataOrder, Learner
from sharpscope.training.checkpoint import checkpoints, damage, restore, step_of
from sharpscope.training.learner import (
    build_optimizer,
    calibrated,
    learning_rate,
    load_start,
    make_learner,
    positive_learning_rate,
    reference_policy,
    set_learning_rate,
)
from sharpscope.training.rollouts import draw_group, draw_rollouts, split_examples
from sharpscope.views import load_run

T = TypeVar("T")
Tell = Callable[[str], None]
"""Called with a line of text on what is done."""


def resolve(
    command: str,
    run: Path | str | None,
    model: str | None,
    task: str | None,
    seed: int | None,
    overrides: Sequence[str],
) -> RunConfig:
    """The configuration of a run, or of a model with a task, for `command` (fork or rotate); a UserError if they do not fit."""
    if distributed.start().processes > 1:
        raise UserError(
            f"{command}: runs in one process; start it without accelerate launch or torchrun"
        )
    if run is None:
        values: dict[str, object] = {"policy.model": model, "seed": seed}
        values["task"] = None if task is None else dict(task_choice(task))
        return build_config(
            None,
            overrides,
            {name: value for name, value in values.items() if value is not None},
        )
    given = {"--model": model, "--task": task, "--seed": seed}
    extra = next((name for name, value in given.items() if value is not None), None)
    if extra is not None:
        raise UserError(
            f"{extra}: goes without the folder of a run, which has its own; remove one of the two"
        )
    folder = Path(run)
    if not (folder / RUN_FILE).exists():
        raise UserError(f"run {folder}: is not the folder of a run")
    if not (folder / "config.yaml").is_file():
        raise UserError(
            f"run {folder}: was recorded in another trainer, so that its next step cannot be made again; "
            f"sharpscope {command} --model CHECKPOINT --task TASK takes a checkpoint of it"
        )
    return read_recorded(folder, overrides=overrides)


def saved_states(
    run: Path | str | None, wanted: Sequence[str | int] | str | int
) -> list[Path | None]:
    """The checkpoints that `wanted` names by step or name (none: the last one); None is the initial policy, or a model."""
    wanted = [wanted] if isinstance(wanted, str | int) else wanted
    saved: dict[int, Path | None] = {0: None}
    if run is not None:
        saved |= {step_of(folder): folder for folder in checkpoints(Path(run))}
        if not wanted and len(saved) == 1:
            raise UserError(f"run {run}: has no checkpoint; --checkpoint 0 is its initial policy")
    found: dict[int, Path | None] = {}
    for one in wanted or [max(saved)]:
        text = str(one).removeprefix("step-")
        step = int(text) if text.isdecimal() else -1
        if step not in saved:
            where = (
                "goes with the folder of a run"
                if run is None
                else f"run {run} has none of this step"
            )
            raise UserError(
                f"--checkpoint {one}: {where}; choose from {', '.join(map(str, saved))}"
            )
        folder = saved[step]
        problem = None if folder is None else damage(folder)
        if problem is not None:
            raise UserError(f"--checkpoint {one}: is damaged ({problem}); choose another")
        found[step] = folder
    return list(found.values())


def arms_of(texts: Sequence[str], config: RunConfig) -> dict[str, Method]:
    """Methods by label, see `parse_methods`; a preset equal to the run's default is `auto`."""
    return {
        name: method.with_preset(config.default_preset, "auto")
        for name, method in parse_methods(texts).items()
    }


def as_recorded(run: Path | str, step: int, texts: Sequence[str]) -> bool | None:
    """Whether completions are those that the run recorded at this step; None if it recorded none."""
    rows = load_run(run).rollouts
    rows = rows[rows["step"] == step].sort_values("rollout")
    return None if rows.empty else list(rows["completion"]) == list(texts)


class Snapshot:
    """A copy of trainable weights, buffers, optimizer state and torch's random state; `restore` puts them back bit for bit."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._kept = [
            (tensor, tensor.detach().clone()) for tensor in (*self.parameters, *model.buffers())
        ]
        self._state = copy.deepcopy(optimizer.state_dict())
        self._random = torch.get_rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; gradients are removed."""
        for tensor, kept in self._kept:
            tensor.copy_(kept)
        self.optimizer.zero_grad(set_to_none=True)
        self.model.eval()
        self.optimizer.load_state_dict(copy.deepcopy(self._state))
        torch.set_rng_state(self._random)

    @torch.no_grad()
    def displacement(self) -> list[Tensor]:
        """θ − θ₀ of each trainable parameter."""
        return [tensor.detach() - start for tensor, start in self._kept[: len(self.parameters)]]

    @torch.no_grad()
    def place(self, displacement: Sequence[Tensor], scale: float) -> None:
        """Set the weights to θ₀ + scale·displacement; the optimizer's state is not touched."""
        for (tensor, start), part in zip(self._kept, displacement, strict=False):
            tensor.copy_(start + part * scale)


class Start:
    """Policy, optimizer, data order and methods at one step of a run, from which single updates are made.

    Presets in `methods` are filled in, and the run's own method has the constants that the run has calibrated; others are
    calibrated on the first of `calibrating` batches that can (0: they are not), or have weights of 1. Without a stored optimizer
    state, `warm_up` steps of the method `warming` (None: the first) at a learning rate of 0 fill AdamW's moments. `step` is that
    of the state, 0 before training; `lr` that of the next step; `settings` change the learner's.
    """

    def __init__(
        self,
        config: RunConfig,
        methods: Mapping[str, Method],
        checkpoint: Path | None,
        *,
        warm_up: int = 0,
        warming: Method | None = None,
        calibrating: int = 0,
        **settings: Any,
    ) -> None:
        self.config, self.task = config, make_task(config.task)
        self.policy = load_start(config, checkpoint)
        self.methods = {
            name: method.with_preset("auto", config.default_preset)
            for name, method in methods.items()
        }
        needs_reference = any(method.needs_reference for method in methods.values())
        reference = reference_policy(config, self.policy) if needs_reference else None
        self.optimizer = build_optimizer(self.policy.model, config.optimizer)
        self.step, self._cursor = 0, 0
        self._state = MethodState()  # of the run's method
        if checkpoint is not None:
            progress = restore(checkpoint, self.policy, self.optimizer)
            self.step, self._cursor = progress.step, progress.cursor
            self._state = MethodState(**progress.entropy_control)
            method = config.resolved_method.unlabeled
            recorded = known_settings(Method, progress.method)
            for name, one in self.methods.items():
                self.methods[name] = (
                    Method.model_validate(recorded) if one.unlabeled == method else one
                )
        self.lr = positive_learning_rate(config, min(self.step + 1, config.steps))
        set_learning_rate(self.optimizer, self.lr)
        self._order = DataOrder(split_examples(self.task, "train"), config.seed)
        learner = make_learner(config, self.policy, self.optimizer, reference=reference)
        self._learner = replace(learner, **settings)
        self.scorer = learner.scorer
        self._made: dict[Hashable, Any] = {}  # results of `_once`
        for name, method in self.methods.items() if calibrating else ():
            if method.weight.needs_calibration:
                self.methods[name] = self._calibrated(method, calibrating)
        self.warmed = 0 if self.optimizer.state else warm_up
        if self.warmed:
            self._warm_up(warming or next(iter(self.methods.values())))

    @cached_property
    def snapshot(self) -> Snapshot:
        """Of the state, taken at first use, which must be before the first update."""
        return Snapshot(self.policy.model, self.optimizer)

    def restore(self) -> None:
        """Put the state back before a batch."""
        self.snapshot.restore()
        self._made.clear()

    def _calibrated(self, method: Method, batches: int) -> Method:
        for batch in range(batches):
            drawn = self.rollouts(method, batch)
            found = calibrated(method, drawn, self.statistics(drawn.rollouts), self.progress())
            if found is not None:
                return found
        return method.model_copy(update={"weight": UniformWeight()})

    def _warm_up(self, method: Method) -> None:
        learner = self.learner(method)
        seed = derive(self.config.seed, "fork warm-up")
        order = replace(self._order, cursor=0, seed=seed)
        set_learning_rate(self.optimizer, 0.0)
        for number in range(1, self.warmed + 1):
            drawn = self._draw(method, order, seed, number)
            learner.learn(
                drawn.rollouts,
                drawn.advantage,
                number,
                self.progress(),
                method=method,
                stats=drawn.stats,
            )
        set_learning_rate(self.optimizer, self.lr)

    def progress(self, number: int = 0) -> float:
        """Share of the run done `number` steps after the next one; a run's last value after its end."""
        return (min(self.step + 1 + number, self.config.steps) - 1) / max(self.config.steps - 1, 1)

    def learner(self, method: Method) -> Learner:
        """A learner with what this method needs."""
        reference = self._learner.reference if method.needs_reference else None
        return replace(self._learner, reference=reference, state=copy.deepcopy(self._state))

    # -- rollouts, computed once for all methods that draw the same -------------------------------------------------------

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()`, called once for a key."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    def statistics(self, rollouts: Rollouts) -> TokenStats:
        """Statistics of the tokens under the policy of the state, at which the first call must be made."""
        return self._once(rollouts.input_ids, lambda: self.scorer.statistics(rollouts))

    def _draw(
        self,
        method: Method,
        order: DataOrder,
        seed: int,
        step: int,
    ) -> RolloutBatch:
        """Rollouts of the next prompts of `order` with the seeds of `step`."""

        def draw(
            policy: Any,
            task: Any,
            examples: list[Example],
            spec: Any,
            seed: int,
        ) -> Any:
            """`draw_group`, once for the same examples, which the order keeps, and seed."""
            return self._once(
                (seed, *map(id, examples)), lambda: draw_group(policy, task, examples, spec, seed)
            )

        given = (self.config.rollout, seed, step, self.statistics, draw)
        return draw_rollouts(self.policy, self.task, order, method, *given)

    def order(self, batch: int) -> DataOrder:
        """The data order at the first prompt of a batch; that of batch 0 is the run's own."""
        return replace(
            self._order, cursor=self._cursor + batch * self.config.rollout.prompts_per_step
        )

    def rollouts(self, method: Method, batch: int) -> RolloutBatch:
        """The rollouts of an update on a batch; those of batch 0 are those of the run's next step."""
        return self._draw(method, self.order(batch), self.config.seed, self.step + 1 + batch)

    # -- updates -----------------------------------------------------------------------------------------------------------

    def _make(
        self,
        learner: Learner,
        method: Method,
        drawn: RolloutBatch,
        seed_step: int,
        number: int,
        **options: Any,
    ) -> StepResult:
        """Make the step `number` steps after the next one from the present weights."""
        steps = self.config.steps
        progress = self.progress(number)
        lr = learning_rate(self.config.optimizer, min(self.step + 1 + number, steps), steps)
        set_learning_rate(self.optimizer, lr)
        health = StepHealth(
            self.config.health,
            seed_step,
            drawn,
            method,
            progress,
            self.policy.device,
        )
        options |= {
            "stats": self.statistics(drawn.rollouts),
            "before_first_update": health.allows_updates,
        }
        return learner.learn(
            drawn.rollouts,
            drawn.advantage,
            seed_step,
            progress,
            method=method,
            **options,
        )

    def advance(self, steps: int, tell: Tell) -> None:
        """Make so many steps of the first method, as its run made them; the state is then the one after them."""
        learner, order = self.make_steps(steps, tell)
        self.step = self.step + steps
        self._cursor = order.cursor
        self._state = copy.copy(learner.state)
        self.__dict__.pop("snapshot", None)

    def make_steps(
        self,
        steps: int,
        tell: Tell,
        without: Callable[[int, Rollouts], Tensor | None] | None = None,
    ) -> tuple[Learner, DataOrder]:
        """Make so many steps of the first method from the present weights, each `without` the tokens of a step and its rollouts."""
        method = next(iter(self.methods.values()))
        order = self.order(0)
        learner = self.learner(method)
        for number in range(steps):
            seed_step = self.step + 1 + number
            drawn = self._draw(method, order, self.config.seed, seed_step)
            left_out = None if without is None else without(seed_step, drawn.rollouts)
            self._make(learner, method, drawn, seed_step, number, without=left_out)
            self._made.clear()
            tell(f"step {seed_step} made again, {steps - 1 - number} to go")
        return learner, order

    def update(
        self,
        name: str,
        batch: int,
        *,
        without: Tensor | None = None,
        before_step: Callable[[PendingUpdate], None] | None = None,
    ) -> StepResult:
        """Restore the state, and make the step of a method on a batch; the model keeps its weights. See `Learner.learn`."""
        self.snapshot.restore()
        method = self.methods[name]
        given = (
            self.learner(method),
            method,
            self.rollouts(method, batch),
            self.step + 1 + batch,
            0,
        )
        return self._make(*given, without=without, before_step=before_step)
