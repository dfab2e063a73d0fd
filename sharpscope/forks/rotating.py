"""How far methods turn one batch's gradient, and the optimizer's step from one state, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sharpscope.config import RunConfig
from sharpscope.errors import UserError
from sharpscope.forks.start import Start, Tell, arms_of, as_recorded, resolve, saved_states
from sharpscope.methods import (
    method_names,
    method_rotation_bound,
    named_method,
    reference_method,
    same_at_one_update,
)
from sharpscope.methods.clips import DualClip, PpoClip
from sharpscope.methods.first_update import first_update
from sharpscope.methods.method import CurvatureTokens, Kl, Method, Sampling
from sharpscope.methods.plan import (
    TOKEN_COLUMNS,
    StepTensors,
    calibrate,
    token_bins,
    token_weights,
)
from sharpscope.methods.token_weights import Weighting
from sharpscope.policy import TokenStats
from sharpscope.progress import Remaining
from sharpscope.recording.rows import weight_columns
from sharpscope.recording.run_folder import set_threads
from sharpscope.recording.step import RolloutBatch, StepTokens, UpdateRotation, step_tensors
from sharpscope.training.rollouts import step_advantages
from sharpscope.training.updates import Gradient

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

CONTROLS = ("grpo-sg-reverse", "grpo-sg-shuffled")
"""Controls among the default methods."""

BINS = ("pos_peak", "pos_valley", "neg_peak", "neg_valley")
"""Tokens by the sign of A and by π against Σ π², see `BinTokens`."""
_NUMBERS = [
    "gradient_rotation",
    "gradient_scale",
    "gradient_used",
    "update_rotation",
    "update_scale",
    "update_difference",
    "rotation_bound",
    "weight_mean",
    "weight_mean_gradient",
    "weight_saturation_low_gradient",
    "weight_saturation_high_gradient",
    *(f"entropy_{kind}_{name}" for kind in ("predicted", "measured") for name in BINS),
    "entropy_rank",
    "kl_rank",
    "kl_rank_norm",
    "noise",
]
RANGED = ("gradient_rotation", "update_rotation", "noise")
"""Columns whose smallest and largest value over the batches the table has too, as `NAME_low` and `NAME_high`."""
BATCHES, LARGE_MODEL = 4, 20_000_000
"""Batches by default, and the number of trained parameters from which on it is one, whose halves give the range."""


@dataclass(frozen=True)
class Rotations:
    """Result of `rotate`.

    Attributes:
        table: a row per method: `method`, `reference` (grpo, or unweighted: the method itself with weights 1), then means over the
            batches, named as in the trace: `gradient_rotation` and `update_rotation` [degrees], `gradient_scale`, `update_scale`,
            `weight_mean`, `weight_mean_gradient`, `weight_saturation_low_gradient`, `weight_saturation_high_gradient`;
            `rotation_bound` [degrees] of methods that differ by their weights alone; `gradient_used`: share of the reference's
            gradient, tokens counted by |c|·‖p − e_y‖, on tokens that have a gradient in the method too; `update_difference`:
            ‖Δ − Δ_ref‖/‖Δ_ref‖ of the steps; `noise`: estimated angle between the reference's gradient on a batch and its
            expectation [degrees]. The ranges over the batches are `gradient_rotation_low`, `gradient_rotation_high` and those of
            `update_rotation` and `noise`. `steps_to_pass`: steps after which a turn by the mean angle, which adds up, passes the
            noise, which averages out, (tan noise/tan angle)²; `verdict`: what the row says, in words; `problem`: why a method
            could not be computed, else empty. With `measure`: by bin of tokens (`token_bins`) the predicted share of the entropy
            change, Σ c·polarity over Σ |c·polarity| of all tokens, and the measured mean change after the update [nats / token];
            `entropy_rank`, Spearman's correlation of the two over tokens; `kl_rank`, that of CAPO's m_F (`flat_curvature`) and the
            measured k3 estimate of KL(π_old‖π) of the token, and `kl_rank_norm`, that of ‖p − e_y‖ and the same.
        each: a row per method and batch (`batch`, from 1), with the columns of `table` that are no ranges and verdicts.
        noise: mean of `noise` for plain GRPO's gradient [degrees]; NaN for one prompt.
        batch: `model`, `task`, `seed`, number of `batches`, `range_of` (batches, or halves of the prompts of the only one), and of the
            first batch: `step`, numbers of `prompts`, `completions`, `tokens` and of `informative_prompts`, whose rewards differ, and
            `recorded`: whether the completions are those that the run has recorded (None: no record).
        methods: by name, as compared, their constants calibrated on the first batch.
    """

    table: pd.DataFrame
    each: pd.DataFrame
    noise: float
    batch: Mapping[str, object]
    methods: Mapping[str, Method]

    def figure(self) -> Figure:
        """The angle of each method's gradient and update with its range, and the angle of the batch's noise."""
        from sharpscope.analysis.plots import rotation

        return rotation(self.table.assign(noise=self.noise), style="paper").figure

    def save(self, folder: Path | str, plot: bool = False) -> list[Path]:
        """Write rotation.csv, .json, .png and .svg, batches.csv, with `plot` also weights.csv, .png, .svg, to a folder; returns their paths."""
        from sharpscope.analysis.plots import save, weight_functions
        from sharpscope.analysis.text import csv_text
        from sharpscope.traces import write_atomic

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / "rotation.csv"
        record = folder / "rotation.json"
        write_atomic(table, csv_text(self.table))
        each = folder / "batches.csv"
        write_atomic(each, csv_text(self.each))
        noise = None if math.isnan(self.noise) else self.noise
        content = {"batch": dict(self.batch), "noise_rotation": noise}
        record.write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        paths = [table, record, each, *save(self.figure(), folder, "rotation")]
        curves = weight_curves(self.methods) if plot else None
        if curves is None or curves.empty:
            return paths
        drawn = weight_functions(curves, style="paper")
        return paths + drawn.save(folder / "weights.png") + drawn.save(folder / "weights.svg")[:1]


def rotate(
    methods: Sequence[str] | None = None,
    *,
    run: Path | str | None = None,
    checkpoint: int | str | None = None,
    model: str | None = None,
    task: str | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    batches: int | None = None,
    warm_up: int = 0,
    measure: bool = False,
    on_progress: Tell | None = None,
) -> Rotations:
    """Compare the first update of methods with that of plain GRPO, or of the method with weights 1, on several batches.

    Every method gets the same completions and rewards, and starts from the same weights and optimizer state; nothing is
    trained. A whole batch is one update. Weights with constants to calibrate are calibrated on the first batch; the run's own
    method has the run's constants. A method of two passes (Lopti) is compared by its first pass. Methods that change the ratio
    or the clip only are plain GRPO in the first update.

    Args:
        methods: `[name=]method[+field=value…]`, such as `grpo-sg+weight.U=4`; None: all methods and two controls.
        run: folder of a run: its weights, optimizer state and next batches at a checkpoint.
        checkpoint: the step of the checkpoint, or its name; 0 is the run's initial policy. None: the last one.
        model: in place of `run`: `embedded:NAME`, a model folder or a hub id, with new optimizer state. None: as in `run`.
        task: kind of a task, with `model`.
        seed: of the batch, with `model`; None: 0.
        overrides: changes of the configuration, `field.subfield=value`, such as `rollout.prompts_per_step=64`.
        batches: batches of other prompts and completions from the same state; None: 4, or 1 where more than 20 million parameters are
            trained. Of one batch the range of the gradient's angle is that of the two halves of its prompts.
        warm_up: with `model`: batches of the first method's reference whose gradients fill AdamW's moments first; the weights stay.
        measure: whether to make every update, measure what it does to entropy and policy on the batch, and take it back.
        on_progress: called with a line of text on what is done.

    Returns:
        The table, the noise angle, and what the batch is.

    Raises:
        UserError: the input is wrong, or no prompt's completions have different rewards.

    Example:
        >>> few = ["rollout.prompts_per_step=4", "rollout.max_new_tokens=32"]
        >>> found = rotate(["gspo", "dapo"], model="embedded:math", task="math", overrides=few, batches=1)
        >>> (found.table["gradient_rotation"] > 1).tolist()  # [degrees]; ratios are 1 in the first update
        [False, True]
    """
    import pandas as pd

    tell = on_progress or (lambda text: None)
    if batches is not None and batches < 1:
        raise UserError(f"--batches {batches}: must be at least 1")
    config = resolve("rotate", run, model, task, seed, overrides)
    (state,) = saved_states(run, () if checkpoint is None else (checkpoint,))
    chosen = arms_of((*method_names(), *CONTROLS) if methods is None else methods, config)
    set_threads(config.threads, config.policy.model)
    if warm_up:
        tell("warming up the optimizer")
    start = _Start(config, chosen, state, measure=measure, warm_up=warm_up)
    if batches is None:
        batches = BATCHES if start.trained <= LARGE_MODEL else 1
    start.halves = batches == 1
    tell("drawing completions")
    first = start.draw()
    if first.zero_variance_share == 1:
        raise UserError(
            "rotate: the rewards of each prompt's completions are all equal, so plain GRPO has no gradient; choose another seed, "
            "more prompts (--set rollout.prompts_per_step=64) or a task of another difficulty"
        )
    by_name = methods is not None
    left = map(Remaining(batches * len(chosen)).after, count())
    rows = _measured(start, first, chosen, by_name, tell, left)
    frames = [_frame(rows, chosen, 1)]
    described = _described(start, first, run, batches)
    for number in range(2, batches + 1):
        tell(f"batch {number}/{batches}: drawing completions")
        batch = start.draw(number - 1)
        if batch.zero_variance_share < 1:
            of_batch = _measured(start, batch, chosen, by_name, tell, left)
            frames.append(_frame(of_batch, chosen, number))
        else:
            for _ in chosen:  # counts as done
                next(left)
    each = pd.concat(frames, ignore_index=True)
    table = _summary(each, chosen, {name: row.get("halves", ()) for name, row in rows.items()})
    table = table.assign(verdict=_verdicts(table, start.methods))
    noise = float(table[table["reference"] == "grpo"]["noise"].mean())
    return Rotations(table, each, noise, described, start.methods)


def _described(
    start: _Start,
    first: RolloutBatch,
    run: Path | str | None,
    batches: int,
) -> dict[str, object]:
    """What the batches are; numbers of the first one."""
    config = start.config
    texts = first.rollouts.texts
    return {
        "model": config.policy.model,
        "task": config.task.kind,
        "run": None if run is None else str(run),
        "seed": config.seed,
        "batches": batches,
        "range_of": "halves" if start.halves else "batches",
        "step": start.seed_step,
        "prompts": len(first.examples),
        "completions": len(first.rollouts),
        "tokens": int(first.rollouts.completion_mask.sum()),
        "informative_prompts": round((1 - first.zero_variance_share) * len(first.examples)),
        "recorded": None if run is None else as_recorded(run, start.seed_step, texts),
    }


def _measured(
    start: _Start,
    batch: RolloutBatch,
    chosen: Mapping[str, Method],
    by_name: bool,
    tell: Tell,
    left: Iterator[str],
) -> dict[str, dict[str, Any]]:
    """The row of each method on a batch; a problem of a method that was asked for by name is raised."""
    stats = start.scorer.statistics(batch.rollouts)
    rows: dict[str, dict[str, Any]] = {}
    # One after the other where they share a reference, of which the last gradient is kept.
    against = {
        name: reference_method(method).model_dump_json(exclude={"name"})
        for name, method in chosen.items()
    }
    order = sorted(chosen, key=lambda name: list(against.values()).index(against[name]))
    for number, name in enumerate(order, 1):
        tell(f"{number}/{len(chosen)} {name}{next(left)}")
        try:
            rows[name] = start.measured(name, batch, stats)
        except UserError as problem:
            if by_name:
                raise UserError(f"--methods {name}: {problem}") from None
            rows[name] = {"problem": str(problem)}
    return rows


def _frame(
    rows: Mapping[str, Mapping[str, Any]],
    chosen: Mapping[str, Method],
    batch: int,
) -> pd.DataFrame:
    """Rows of a batch in the order of the methods."""
    import pandas as pd

    found = [{"method": name, "batch": batch, **rows[name]} for name in chosen]
    frame = pd.DataFrame(found, columns=["method", "batch", "reference", *_NUMBERS, "problem"])
    return frame.astype(dict.fromkeys(_NUMBERS, float)).assign(problem=frame["problem"].fillna(""))


def _summary(
    each: pd.DataFrame,
    chosen: Mapping[str, Method],
    halves: Mapping[str, Sequence[float]],
) -> pd.DataFrame:
    """Means over the batches with ranges, a row for each method; of one batch the range is that of its `halves`."""
    by_method = each.groupby("method", sort=False)
    table = by_method[["reference", "problem"]].first().join(by_method[_NUMBERS].mean())
    for name in RANGED:
        table[f"{name}_low"] = by_method[name].min()
        table[f"{name}_high"] = by_method[name].max()
    for method, angles in halves.items():
        if len(angles) == 2:
            table.loc[method, ["gradient_rotation_low", "gradient_rotation_high"]] = sorted(angles)
    turn, noise = (
        np.tan(np.radians(table[name].clip(upper=89.0).to_numpy(dtype=float)))
        for name in ("gradient_rotation", "noise")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        table["steps_to_pass"] = (noise / turn) ** 2
    table = table.loc[list(chosen)].reset_index()
    head = ["method", "reference", *_NUMBERS]
    return table[[*head, *(name for name in table if name not in (*head, "problem")), "problem"]]


AGGREGATIONS = {
    "sequence_mean": "mean over a completion's tokens",
    "token_mean": "token-mean aggregation",
    "constant": "division by a constant",
    "sequence_sum": "sum over a completion's tokens",
}
STILL = 0.1
"""Angle below which a gradient is said not to turn [degrees]."""


def _verdicts(table: pd.DataFrame, methods: Mapping[str, Method]) -> list[str]:
    """What each row of the table says, in words."""
    first = {name: in_a_first_update(method) for name, method in methods.items()}
    found = []
    for record in table.to_dict("records"):
        row = {str(column): value for column, value in record.items()}
        name = str(row["method"])
        alike = [other for other in first if first[other] == first[name]]
        reason = _reason(row, first[name], alike)
        steps = _after(row["steps_to_pass"]) if row["gradient_rotation"] >= STILL else ""
        found.append("; ".join(text for text in (reason, steps) if text))
    return found


def in_a_first_update(method: Method) -> Method:
    """The method without what cannot act in a first update on given completions: names, resampling, and a clip at ratio 1."""
    simple = _simplest(method)
    removed: dict[str, object] = {"name": "", "sampling": Sampling()}
    if isinstance(simple.clip, PpoClip | DualClip) and simple.weight_on == "surrogate":
        removed["clip"] = PpoClip()
    return simple.model_copy(update=removed)


def _simplest(method: Method) -> Method:
    """The simplest method that has its gradient where a step makes one update, without a label."""
    same = same_at_one_update(method)
    simple = named_method(same) if same else method.unlabeled
    return simple.model_copy(update={"kl": method.kl})


def _reason(row: Mapping[str, Any], method: Method, alike: Sequence[str]) -> str:
    """Why a method, which has the gradient of those `alike`, itself included, turns it or does not; empty for no simple reason."""
    angle = row["gradient_rotation"]
    scale = row["gradient_scale"]
    if angle < STILL and abs(scale - 1) < 0.02:
        plain = row["reference"] == "grpo"
        return "the same gradient" + (": every ratio is 1 in a first update" if plain else "")
    if angle < STILL:
        return f"turns by 0° and makes the gradient {scale:.2g} times as long: in a run AdamW ignores that"
    grpo = in_a_first_update(named_method("grpo"))
    if method != grpo.model_copy(update={"aggregate": method.aggregate, "kl": method.kl}):
        return ""
    alone = f"{AGGREGATIONS[method.aggregate]} alone"
    if len(alike) == 1:
        return alone
    return f"{alone}: {', '.join(alike[:-1])} and {alike[-1]} are the same at ratio 1"


def _after(steps: float) -> str:
    """After how many steps a turn passes the noise, in words."""
    if not math.isfinite(steps):
        return "the noise is not known"
    if steps <= 1:
        return "larger than the noise of a batch"
    return f"passes the noise after about {steps:,.0f} steps"


# -- measuring -----------------------------------------------------------------------------------------------------------


class _Start(Start):
    """One step of a run, from which every method is compared: the whole batch is one update."""

    def __init__(
        self,
        config: RunConfig,
        methods: Mapping[str, Method],
        checkpoint: Path | None,
        measure: bool,
        warm_up: int,
    ) -> None:
        warming = reference_method(next(iter(methods.values())))  # its weights need no calibration
        super().__init__(
            config,
            methods,
            checkpoint,
            warm_up=warm_up,
            warming=warming,
            mini_batches=1,
            inner_epochs=1,
        )
        self.seed_step = self.step + 1
        self.measure = measure
        self.halves = False  # whether the angles of the halves of a batch are measured too
        self.references: dict[str, list[Gradient]] = {}  # the last reference gradient

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return sum(p.numel() for p in self._learner.parameters)

    def draw(self, number: int = 0) -> RolloutBatch:
        """The batch that the run draws `number` steps after its next one; a divergence in the reward is left out."""
        self.seed_step = self.step + 1 + number
        self.references.clear()
        self._made.clear()
        return self.rollouts(self.config.method.model_copy(update={"kl": Kl()}), number)

    def measured(self, name: str, batch: RolloutBatch, stats: TokenStats) -> dict[str, Any]:
        """The row of a method; `halves` has the gradient's angles on the two halves of the prompts, if they are measured."""
        method = self.methods[name]
        progress = self.progress()
        advantage = step_advantages(method, batch.rollouts, batch.rewards, stats)
        tensors = step_tensors(batch.rollouts, advantage, stats, stats.logp, progress, method)
        method = method.model_copy(update={"weight": calibrate(method.weight, tensors)})
        self.methods[name] = method
        reference = reference_method(method)
        grpo = reference_method(Method(name="grpo", kl=reference.kl))
        plain = grpo == reference.model_copy(update={"name": grpo.name})
        tokens = self.tokens(method, batch, advantage, stats)
        against = self.tokens(
            reference,
            batch,
            step_advantages(reference, batch.rollouts, batch.rewards, stats),
            stats,
        )
        compare = partial(self._compared, method, batch, advantage, stats)
        # methods with one gradient are compared once
        rotation, halves, after = self._once(_simplest(method).model_dump_json(), compare)
        used = batch.rollouts.completion_mask.bool().cpu() & (tokens.update >= 0)
        mass = (against.loss_coef.abs() * stats.logit_grad_norm.cpu()).double()
        scale, cosine = rotation.update.scale, math.cos(math.radians(rotation.update.angle))
        row = {
            "reference": "grpo" if plain else "unweighted",
            "gradient_rotation": rotation.gradient.angle,
            "gradient_scale": rotation.gradient.scale,
            "gradient_used": float(mass[tokens.loss_coef != 0].sum() / mass.sum()),
            "update_rotation": rotation.update.angle,
            "update_scale": scale,
            "noise": rotation.noise,
            "halves": halves,
            "update_difference": math.sqrt(max(1 + scale**2 - 2 * scale * cosine, 0.0)),
            **weight_columns(method, tokens, used, progress),
            "rotation_bound": method_rotation_bound(method.at(progress)),
        }
        if after is not None:
            # CAPO's m_F, once for each choice of advantages
            key = "curvature", advantage.cpu().numpy().tobytes()
            given = batch.rollouts, advantage, CurvatureTokens()
            curvature = self._once(key, lambda: self._learner.curvature(*given)[..., 1])
            row |= self._changes(tensors, tokens, used, stats, after, curvature.cpu().double())
        return row

    def _compared(
        self,
        method: Method,
        batch: RolloutBatch,
        advantage: Tensor,
        stats: TokenStats,
    ) -> tuple[UpdateRotation, list[float], TokenStats | None]:
        """The rotation of a method's update, of the gradient on both halves, and with `measure` the batch's statistics after it."""
        moved: list[TokenStats] = []
        halves: list[float] = []
        rotation = self.learner(method).compare(
            batch.rollouts,
            advantage,
            self.seed_step,
            self.progress(),
            method=method,
            stats=stats,
            references=self.references,
            halves=halves if self.halves else None,
            at_update=(lambda: moved.append(self.scorer.statistics(batch.rollouts)))
            if self.measure
            else None,
        )
        return rotation, halves, moved[0] if moved else None

    def _changes(
        self,
        tensors: StepTensors,
        tokens: StepTokens,
        used: Tensor,
        before: TokenStats,
        after: TokenStats,
        curvature: Tensor,
    ) -> dict[str, float]:
        """Predicted and measured change of entropy by bin, and the rank correlations over tokens."""
        from scipy.stats import spearmanr

        predicted = (tokens.loss_coef * before.polarity.cpu()).double()
        change = (after.entropy - before.entropy).cpu().double()
        moved = (after.logp - before.logp).cpu().double()
        divergence = torch.expm1(moved) - moved
        row, total = {}, predicted[used].abs().sum()
        for name, chosen in token_bins(tensors).items():
            inside = chosen.cpu() & used
            # NaN without tokens
            row[f"entropy_predicted_{name}"] = float(predicted[inside].sum() / total)
            row[f"entropy_measured_{name}"] = float(change[inside].mean())
        curved = used & (curvature > 0)
        norm = before.logit_grad_norm.cpu().double()
        for name, one, other, places in (
            ("entropy_rank", predicted, change, used & (predicted != 0)),
            ("kl_rank", curvature, divergence, curved),
            ("kl_rank_norm", norm, divergence, curved),
        ):
            row[name] = (
                float(spearmanr(one[places], other[places]).statistic)
                if int(places.sum()) > 2
                else math.nan
            )
        return row

    def tokens(
        self,
        method: Method,
        batch: RolloutBatch,
        advantage: Tensor,
        stats: TokenStats,
    ) -> StepTokens:
        """What each token does in a method's first update, without a pass of the model: every ratio is 1."""
        rollouts = batch.rollouts
        learner = self.learner(method)
        plan = learner.plan(rollouts, advantage, self.seed_step, self.progress(), method, stats)
        model, other = learner.reference, None
        if model is not None:
            other = learner.scorer.log_probabilities(rollouts, model=model)
        limit = self.config.rollout.max_new_tokens
        coef = first_update(method, plan, rollouts.group, limit, stats.logp, other).coef
        tokens = StepTokens.unused(stats)
        tokens.loss_coef, tokens.weight, tokens.advantage = (
            coef.cpu(),
            plan.weight.cpu(),
            plan.advantage.cpu(),
        )
        tokens.ratio = torch.ones_like(tokens.ratio)
        tokens.update = torch.where(plan.pass_mask(0).cpu(), 0, tokens.update)
        return tokens


def weight_curves(methods: Mapping[str, Method]) -> pd.DataFrame:
    """Weights of methods on grids of the logit and of the probability.

    Returns:
        Columns method, axis (logit | probability), x and weight. Methods whose weight is no function of that value alone have
        no rows on its axis.
    """
    import pandas as pd

    rows = []
    for name, method in methods.items():
        for axis, x in (
            ("logit", np.linspace(-5.0, 35.0, 401)),
            ("probability", np.linspace(0.001, 0.999, 500)),
        ):
            values = torch.from_numpy(x)
            column = {"logit": values} if axis == "logit" else {"logp": values.log()}
            weight = _function_of(method.weight, column)
            if weight is not None:
                rows += [(name, axis, a, b) for a, b in zip(x, weight.tolist(), strict=True)]
    return pd.DataFrame(rows, columns=["method", "axis", "x", "weight"])


_SPANS = {"logp": -5.0, "behavior_logp": -5.0, "logit": 30.0, "entropy": 3.0}
"""Range of the values, from 0, that a token's other columns get; of those not named here it is 1."""


def _function_of(weighting: Weighting, column: Mapping[str, Tensor]) -> Tensor | None:
    """Weights (n,) at the values of one column; None where they also depend on anything else of the token or its step.

    They are computed twice, of all tokens and of the last half, with other random values in the other columns. A
    weight that differs is no function of the column alone.
    """
    (values,) = column.values()
    generator = torch.Generator().manual_seed(0)

    def weights_of(count: int, scale: float) -> Tensor:
        """Weights of the last tokens as one completion, everything else at random, between 0 and `scale` times its span."""
        drawn = torch.rand(len(TOKEN_COLUMNS) + 1, count, generator=generator, dtype=values.dtype)
        names = zip(TOKEN_COLUMNS, drawn, strict=False)
        columns = {name: scale * _SPANS.get(name, 1.0) * one for name, one in names}
        columns.update({name: one[-count:] for name, one in column.items()})
        step = StepTensors.from_columns(advantage=2 * drawn[-1] - 1, **columns)
        row = {name: getattr(step, name).T for name in (*TOKEN_COLUMNS, "mask")}
        step = replace(step, group=torch.zeros(1), advantage=step.advantage[None], **row)
        return token_weights(weighting, step, torch.Generator().manual_seed(0))[0]

    try:
        first = weights_of(len(values), 1.0)
        second = weights_of(len(values) // 2, 0.02)
    except (UserError, ValueError):
        return None
    return first if torch.allclose(first[-len(second) :], second) else None
