"""How far methods turn one batch's gradient, and the optimizer's step from one state, without training."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.config import (
    RunConfig,
    arm_method,
    arm_name,
    build_config,
    method_names,
    method_rotation_bound,
    read_recorded,
    reference_method,
    without_none_kinds,
)
from sharpscope.config.method import Kl, Method
from sharpscope.errors import UserError
from sharpscope.objective import EntropyControl, calibrate, policy_loss, token_normalizer
from sharpscope.policy import TokenStats
from sharpscope.recording import (
    RolloutBatch,
    StepTokens,
    UpdateRotation,
    gradient_weight_columns,
    loss_mask,
    step_tensors,
    weight_columns,
)
from sharpscope.recording.environment import set_threads
from sharpscope.tasks import Task, make_task, task_choice
from sharpscope.training.checkpoint import checkpoints, damage, restore, step_of
from sharpscope.training.learner import Gradient
from sharpscope.training.rollouts import DataOrder, draw_rollouts, step_advantages
from sharpscope.training.setup import (
    build_optimizer,
    load_start,
    make_learner,
    positive_learning_rate,
    reference_policy,
    set_learning_rate,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Tell = Callable[[str], None]

CONTROLS = ("grpo-sg-reverse", "grpo-sg-shuffled")
"""Controls among the default methods."""

_NUMBERS = (
    "gradient_rotation",
    "gradient_scale",
    "update_rotation",
    "update_scale",
    "rotation_bound",
    "weight_mean",
    "weight_mean_gradient",
    "weight_saturation_low_gradient",
    "weight_saturation_high_gradient",
)
COLUMNS = ("method", "reference", *_NUMBERS, "problem")


@dataclass(frozen=True)
class Rotations:
    """Result of `rotate`.

    Attributes:
        table: a row per method: `method`, `reference` (grpo, or unweighted: the method itself with weights 1), then as in the
            trace `gradient_rotation` and `update_rotation` [degrees], `gradient_scale`, `update_scale`, `weight_mean`,
            `weight_mean_gradient`, `weight_saturation_low_gradient`, `weight_saturation_high_gradient`; `rotation_bound`
            [degrees] of methods that differ by their weights alone; `problem`: why a method could not be computed, else empty.
        noise: estimated angle between plain GRPO's gradient on the batch and its expectation [degrees]; NaN for one prompt.
        batch: `model`, `task`, `seed`, `step`, numbers of `prompts`, `completions`, `tokens` and of `informative_prompts`, whose
            rewards differ, and `recorded`: whether the completions are those that the run has recorded (None: no record).
    """

    table: pd.DataFrame
    noise: float
    batch: Mapping[str, Any]

    def figure(self) -> Figure:
        """Rays at the angles of gradients and updates, with the angle of the batch's noise shaded."""
        from sharpscope.analysis.figures import rotation_figure

        return rotation_figure(self.table, self.noise)

    def save(self, folder: Path | str) -> list[Path]:
        """Write rotation.csv, rotation.json, rotation.png and rotation.svg to a folder, and return their paths."""
        from sharpscope.analysis.figures import save, styled

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        table, record = folder / "rotation.csv", folder / "rotation.json"
        self.table.to_csv(table, index=False)
        rows = [{name: _plain(value) for name, value in row.items()} for row in self.table.to_dict("records")]
        content = {"batch": dict(self.batch), "noise_rotation": _plain(self.noise), "methods": rows}
        record.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        with styled():
            return [table, record, *save(self.figure(), folder, "rotation")]


def rotate(
    methods: Sequence[str] | None = None,
    *,
    run: Path | str | None = None,
    checkpoint: int | str | None = None,
    model: str | None = None,
    task: str | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    threads: int | None = None,
    on_progress: Tell | None = None,
) -> Rotations:
    """Compare the first update of methods with that of plain GRPO, or of the method with weights 1, on one batch.

    Every method gets the same completions and rewards, and starts from the same weights and optimizer state; nothing is
    trained. The whole batch is one update. Weights with constants to calibrate are calibrated on the batch; the run's own
    method has the run's constants. A method of two passes (Lopti) is compared by its first pass. Methods that change the ratio
    or the clip only are plain GRPO in the first update. An average of past weights (`ppo-ewma`) starts as the weights, also from a
    checkpoint.

    Args:
        methods: `[name=]method[+field=value…]`, such as `grpo-sg+weight.U=4`; None: all methods and two controls.
        run: folder of a run: its weights, optimizer state and next batch at a checkpoint.
        checkpoint: the step of the checkpoint, or its name; 0 is the run's initial policy. None: the last one.
        model: in place of `run`: `embedded:NAME`, a model folder or a hub id, with new optimizer state. None: as in `run`.
        task: kind of a task, with `model`.
        seed: of the batch, with `model`; None: 0.
        overrides: changes of the configuration, `field.subfield=value`, such as `rollout.prompts_per_step=64`.
        threads: CPU threads; None: as configured.
        on_progress: called with a line of text on what is done.

    Returns:
        The table, the noise angle, and what the batch is.

    Raises:
        UserError: the input is wrong, or no prompt's completions have different rewards.

    Example:
        >>> few = ["rollout.prompts_per_step=4", "rollout.max_new_tokens=32"]
        >>> found = rotate(["gspo", "dapo"], model="embedded:math", task="math", overrides=few)
        >>> (found.table["gradient_rotation"] > 1).tolist()  # [degrees]; ratios are 1 in the first update
        [False, True]
    """
    tell = on_progress or (lambda text: None)
    if distributed.start().processes > 1:
        raise UserError("rotate: runs in one process; start it without accelerate launch or torchrun")
    config, state = _configured(run, checkpoint, model, task, seed, overrides)
    chosen = _methods(methods, config)
    set_threads(config.threads if threads is None else threads, config.policy.model)
    start = _Start(config, state, any(method.needs_reference for method in chosen.values()))
    tell("drawing completions")
    batch = start.draw()
    _check_signal(batch)
    stats = start.learner.scorer.statistics(batch.rollouts)
    rows: list[dict[str, Any]] = []
    references: dict[str, list[Gradient]] = {}
    noise = math.nan
    for number, (name, method) in enumerate(chosen.items(), 1):
        tell(f"{number}/{len(chosen)} {name}")
        try:
            row, angle = start.measured(method, batch, stats, references)
        except UserError as problem:
            if methods is not None:
                raise UserError(f"--methods {name}: {problem}") from None
            row, angle = {"problem": str(problem)}, math.nan
        rows.append({"method": name, **row})
        noise = angle if math.isnan(noise) else noise
    return Rotations(_table(rows), noise, start.described(batch, None if run is None else Path(run)))


# -- input ---------------------------------------------------------------------------------------------------------------


def _methods(texts: Sequence[str] | None, config: RunConfig) -> dict[str, Method]:
    """The methods by name, presets of their weights filled in."""
    methods: dict[str, Method] = {}
    for text in [*method_names(), *CONTROLS] if texts is None else texts:
        name = arm_name(text)
        if name in methods:
            raise UserError(f"--methods {name}: is given twice; give one another name: name=method")
        methods[name] = arm_method(text, config).with_preset("auto", config.default_preset)
    if not methods:
        raise UserError("--methods: names nothing; `sharpscope methods` lists the methods")
    return methods


def _configured(
    run: Path | str | None,
    checkpoint: int | str | None,
    model: str | None,
    task: str | None,
    seed: int | None,
    overrides: Sequence[str],
) -> tuple[RunConfig, Path | None]:
    """The configuration, and the checkpoint to start from, if any."""
    if run is None:
        if checkpoint is not None:
            raise UserError("--checkpoint: goes with the folder of a run")
        values: dict[str, Any] = {}
        if task is not None:
            values["task"] = dict(task_choice(task))
        if model is not None:
            values["policy.model"] = model
        if seed is not None:
            values["seed"] = seed
        return build_config(None, overrides, values), None
    given = {"--model": model, "--task": task, "--seed": seed}
    extra = next((name for name, value in given.items() if value is not None), None)
    if extra is not None:
        raise UserError(f"{extra}: goes without the folder of a run, which has its own; remove one of the two")
    run = Path(run)
    return read_recorded(run, overrides=overrides), _checkpoint(run, checkpoint)


def _checkpoint(run: Path, wanted: int | str | None) -> Path | None:
    """The checkpoint that `wanted` names; None for the initial policy."""
    saved = {step_of(folder): folder for folder in checkpoints(run)}
    if wanted is None:
        if not saved:
            raise UserError(f"run {run}: has no checkpoint; --checkpoint 0 is its initial policy")
        step = max(saved)
    else:
        text = str(wanted).removeprefix("step-")
        step = int(text) if text.isdecimal() else -1
        if step != 0 and step not in saved:
            steps = ", ".join(map(str, [0, *saved]))
            raise UserError(f"--checkpoint {wanted}: run {run} has none of this step; choose from {steps}")
    if step == 0:
        return None
    problem = damage(saved[step])
    if problem is not None:
        raise UserError(f"checkpoint {saved[step]}: is damaged ({problem}); choose another")
    return saved[step]


def _check_signal(batch: RolloutBatch) -> None:
    if batch.zero_variance_share == 1:
        raise UserError(
            "rotate: the rewards of each prompt's completions are all equal, so plain GRPO has no gradient; choose another seed, "
            "more prompts (--set rollout.prompts_per_step=64) or a task of another difficulty"
        )


# -- measuring -----------------------------------------------------------------------------------------------------------


class _Start:
    """Weights, optimizer and data order at one step of a run, from which every method is compared."""

    def __init__(self, config: RunConfig, checkpoint: Path | None, needs_reference: bool) -> None:
        self.config = config
        self.task: Task = make_task(config.task)
        examples = self.task.splits().get("train", [])
        if not examples:
            raise UserError(f"task.kind = '{config.task.kind}': has no split 'train' to draw prompts from")
        self.policy = load_start(config, checkpoint)
        self.optimizer = build_optimizer(self.policy.model, config.optimizer)
        self.order, done = DataOrder(examples, config.seed), 0
        entropy = EntropyControl()  # state of the run's entropy bonus
        self.calibrated: Method | None = None  # the run's method with the constants that the run has calibrated
        if checkpoint is not None:
            progress = restore(checkpoint, self.policy, self.optimizer, None)
            self.order.cursor, done = progress.cursor, progress.step
            entropy = EntropyControl(**progress.entropy_control)
            self.calibrated = Method.model_validate(without_none_kinds(progress.method))
        self.step = done + 1
        step = min(self.step, config.steps)
        set_learning_rate(self.optimizer, positive_learning_rate(config, step))
        self.progress = (step - 1) / max(config.steps - 1, 1)
        learner = make_learner(config, self.policy, self.optimizer)
        self.learner = replace(learner, mini_batches=1, inner_epochs=1, entropy_control=entropy)
        self.reference = reference_policy(config, self.policy) if needs_reference else None
        # Methods compared so far with their coefficients, the reference's, and the result.
        self.known: list[tuple[Method, Tensor, Tensor, UpdateRotation]] = []

    def draw(self) -> RolloutBatch:
        """The batch that the run's next step draws; a divergence in the reward is left out."""
        config, statistics = self.config, self.learner.scorer.statistics
        method = config.method.model_copy(update={"kl": Kl()})
        return draw_rollouts(
            self.policy, self.task, self.order, method, config.rollout, config.seed, self.step, statistics
        )

    def measured(
        self, method: Method, batch: RolloutBatch, stats: TokenStats, references: dict[str, list[Gradient]]
    ) -> tuple[dict[str, Any], float]:
        """The row of a method, and the noise angle of its reference if that is plain GRPO, else NaN."""
        if method.kl_in_reward:
            raise UserError("kl.place = reward: changes the rewards, which are the same for all methods here; use loss")
        advantage = step_advantages(method, batch.rollouts, batch.rewards, stats)
        if self.calibrated is not None and method.unlabeled == self.config.resolved_method.unlabeled:
            method = self.calibrated
        tensors = step_tensors(batch.rollouts, advantage, stats, stats.logp, self.progress, method)
        method = method.model_copy(update={"weight": calibrate(method.weight, tensors)})
        reference = reference_method(method)
        plain = _is_plain(reference)
        tokens = self.tokens(method, batch, advantage, stats)
        against = self.tokens(reference, batch, step_advantages(reference, batch.rollouts, batch.rewards, stats), stats)
        rotation = self._known(method, tokens.loss_coef, against.loss_coef)
        if rotation is None:
            # An average of past weights starts as the weights, also for the run's own method: every ratio is 1 then.
            learner = replace(
                self.learner,
                reference=self.reference if method.needs_reference else None,
                proximal=copy.deepcopy(self.policy.model).eval() if method.proximal is not None else None,
            )
            rotation = learner.compare(
                batch.rollouts,
                advantage,
                self.step,
                self.progress,
                method=method,
                stats=stats,
                references=references,
            )
            self.known.append((method, tokens.loss_coef, against.loss_coef, rotation))
        used = loss_mask(batch.rollouts, method).bool().cpu() & (tokens.update >= 0)
        row = {
            "reference": "grpo" if plain else "unweighted",
            "gradient_rotation": rotation.gradient.angle,
            "gradient_scale": rotation.gradient.scale,
            "update_rotation": rotation.update.angle,
            "update_scale": rotation.update.scale,
            "weight_mean": weight_columns(method, tokens.weight, used, self.progress)["weight_mean"],
            **gradient_weight_columns(method, tokens, used, self.progress),
            "rotation_bound": method_rotation_bound(method.at(self.progress)),
        }
        return row, rotation.noise if plain else math.nan

    def _known(self, method: Method, coef: Tensor, against: Tensor) -> UpdateRotation | None:
        """The result of an earlier method with the same coefficients (N, T) and reference coefficients, thus the same gradients.

        An entropy bonus and sharpness control are not in the coefficients.
        """
        for other, own, reference, rotation in self.known:
            if (
                _only_coefficients(method)
                and _only_coefficients(other)
                and _same(coef, own)
                and _same(against, reference)
            ):
                return rotation
        return None

    def tokens(self, method: Method, batch: RolloutBatch, advantage: Tensor, stats: TokenStats) -> StepTokens:
        """What each token does in a method's first update, without a pass of the model: every ratio is 1."""
        rollouts = batch.rollouts
        plan = self.learner.plan(rollouts, advantage, self.step, self.progress, method, stats)
        mask = loss_mask(rollouts, method)
        logp = stats.logp.detach().clone().requires_grad_()
        normalizer = token_normalizer(
            method, mask, self.config.rollout.max_new_tokens, keep=plan.keep, dtype=logp.dtype
        )
        other = None
        if method.needs_reference:
            other = replace(self.learner, reference=self.reference).reference_logp(rollouts)
        policy_loss(method, plan, logp, normalizer, reference_logp=other, proximal_logp=stats.logp).loss.backward()
        tokens = StepTokens.unused(stats)
        assert logp.grad is not None
        tokens.loss_coef = logp.grad.cpu()
        tokens.weight, tokens.advantage = plan.weight.cpu(), plan.advantage.cpu()
        tokens.ratio = torch.ones_like(tokens.ratio)
        tokens.update = torch.where(plan.pass_mask(0).cpu(), 0, tokens.update)
        return tokens

    def described(self, batch: RolloutBatch, run: Path | None) -> dict[str, Any]:
        """What the batch is."""
        rollouts = batch.rollouts
        return {
            "model": self.config.policy.model,
            "task": self.config.task.kind,
            "run": None if run is None else str(run),
            "seed": self.config.seed,
            "step": self.step,
            "prompts": len(batch.examples),
            "completions": len(rollouts),
            "tokens": int(rollouts.completion_mask.sum()),
            "informative_prompts": round((1 - batch.zero_variance_share) * len(batch.examples)),
            "recorded": None if run is None else _as_recorded(run, self.step, rollouts.texts),
        }


def _only_coefficients(method: Method) -> bool:
    """Whether the gradient that the optimizer gets is Σ c_t ∇log π_t, c_t the tokens' coefficients."""
    return method.entropy is None and method.sharpness is None


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether coefficients are equal up to rounding."""
    return bool(torch.allclose(one, other, rtol=1e-6, atol=1e-6 * float(other.abs().max())))


def _is_plain(reference: Method) -> bool:
    """Whether a reference objective is that of plain GRPO."""
    plain = reference_method(Method(name="grpo", kl=reference.kl))
    return plain == reference.model_copy(update={"name": plain.name})


def _as_recorded(run: Path, step: int, texts: Sequence[str]) -> bool | None:
    """Whether completions are those that the run recorded at this step; None if it recorded none."""
    from sharpscope.traces import load_run

    rows = load_run(run).rollouts
    rows = rows[rows["step"] == step].sort_values("rollout")
    return None if rows.empty else list(rows["completion"]) == list(texts)


def _table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype({name: float for name in COLUMNS if name in _NUMBERS})
    return table.assign(problem=table["problem"].fillna(""))


def _plain(value: Any) -> Any:
    """A value for JSON: null for NaN."""
    return None if isinstance(value, float) and math.isnan(value) else value
