"""Counterfactual updates: every arm's update from the same state on the same rollouts, measured on the same completions.

Fixed completions y_i of the starting policy π₀ serve every arm. With w_i = Π_t π(y_it)/π₀(y_it), the expected failure of π is
estimated by Σ_i w_i·F_i / Σ_i w_i (self-normalized importance weighting), F_i = 1 − success of y_i.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sharpscope import distributed
from sharpscope.config import ForkSpec, RolloutSpec, RunConfig
from sharpscope.config.run import EMBEDDED_PREFIX
from sharpscope.errors import UserError
from sharpscope.forks.start import Start, Tell, arms_of, resolve, saved_states
from sharpscope.methods import Method, method_label
from sharpscope.methods.loss import k3
from sharpscope.policy import Policy, Rollouts, TokenStats
from sharpscope.policy.directions import inner, rotation
from sharpscope.policy.forward import Scorer
from sharpscope.policy.generation import draw_scored
from sharpscope.progress import Remaining
from sharpscope.recording import run_folder
from sharpscope.recording.probe_sets import Drawer
from sharpscope.recording.run_folder import set_threads
from sharpscope.seeds import derive
from sharpscope.settings import validate
from sharpscope.surface import (
    Drawn,
    Objective,
    find_radius,
    limited_surface,
    rollout_batch,
    sharpness,
)
from sharpscope.surface.surface import Surface
from sharpscope.tasks import Example, Task
from sharpscope.traces import (
    MAX_SATURATION,
    Row,
    Run,
    RunLock,
    TraceWriter,
    create_run_dir,
    load_run,
    read_run_info,
    update_run_info,
)
from sharpscope.traces.files import RUN_FILE
from sharpscope.training import DataOrder
from sharpscope.training.checkpoint import step_of
from sharpscope.training.rollouts import split_examples

EFFECTIVE_SHARE = 0.5
"""Smallest valid effective sample size of importance weights, as a share of the samples."""
KL_TOLERANCE = 1e-3
"""Relative tolerance of the matched KL."""


def fork(
    run: Path | str | None = None,
    *,
    model: str | None = None,
    task: str | None = None,
    checkpoint: Sequence[str | int] | str | int = (),
    methods: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    out: Path | str | None = None,
    on_progress: Tell | None = None,
    **settings: object,
) -> Run:
    """Make one update per method from the same state and measure what each changes.

    For every state and batch, rollouts are drawn once; every arm restores weights, optimizer state and random state exactly,
    makes its update, and is measured on completions that the starting policy drew. Rows are written to the table `forks`
    batch by batch, and a repeated call adds only the batches that are missing.

    Args:
        run: folder of a run, whose checkpoints are the states.
        model: in place of `run`: `embedded:NAME`, a model folder or a hub id. Without a stored optimizer state, AdamW's moments are
            those of a few steps of the reference method at these weights (`warm_up`).
        task: task of `model`; None: that of an embedded policy, else knights_knaves.
        checkpoint: `step-000050` or 50; 0 is the initial policy. None given: the run's last checkpoint.
        methods: arms, see `ForkSpec.methods`; the first is the reference.
        overrides: changes of the run's configuration, `field.subfield=value`.
        out: folder of a run for the rows; None: `run` itself, or `forks/<model>`.
        on_progress: called with a line of text on what is done.
        **settings: fields of `ForkSpec`: batches, outcomes, prompts, samples, …

    Returns:
        The run with the rows, see `Run.forks`. `sharpscope.analysis.fork_differences` compares the arms.

    Raises:
        UserError: the input is wrong, or another process writes to the folder.

    Examples:
        >>> import tempfile
        >>> import sharpscope
        >>> small = {"overrides": ["rollout.prompts_per_step=6"], "batches": 1, "prompts": 4}
        >>> methods = ["grpo", "grpo-sg"]
        >>> out = tempfile.mkdtemp() + "/forks"
        >>> run = sharpscope.fork(model="embedded:math", methods=methods, out=out, outcomes=["entropy"], **small)
        >>> run.forks["arm"].unique().tolist()
        ['grpo', 'grpo-sg']
    """
    asked = {"methods": methods} if methods is not None else {}
    return measure_fork(
        run,
        model,
        task,
        checkpoint,
        overrides,
        out,
        on_progress,
        {**settings, **asked},
    )[0]


def measure_fork(
    run: Path | str | None,
    model: str | None,
    task: str | None,
    checkpoint: Sequence[str | int] | str | int,
    overrides: Sequence[str],
    out: Path | str | None,
    on_progress: Tell | None,
    settings: Mapping[str, object],
) -> tuple[Run, str]:
    """As `fork`; returns the run and the name of the fork in its table."""
    tell = on_progress or (lambda text: None)
    spec = validate(ForkSpec, settings)
    if (run is None) == (model is None):
        raise UserError("fork: give a run's folder, or --model with --task")
    config = resolve("fork", run, model, task, None, overrides)
    arms = arms_of(spec.methods, config)
    states = saved_states(run, checkpoint)
    source = str(model).removeprefix(EMBEDDED_PREFIX) if run is None else str(Path(run).resolve())
    folder = Path(out or run or Path("forks") / (Path(source).name or "model"))
    threads = set_threads(config.threads, config.policy.model)

    def measure(state: Path | None) -> Measure:
        """What measures the arms from a checkpoint."""
        start = Start(config, arms, state, warm_up=spec.warm_up, calibrating=spec.batches)
        return Measure(start, spec, spec.rho or run_radius(config, None if state is None else run))

    name = _identity(config, spec, arms)
    first = None if (folder / RUN_FILE).exists() else measure(states[0])
    if first is not None:
        _begin(folder, config, first.start.policy, threads)
    with RunLock(folder):
        _describe(folder, name, config, spec, str(model) if run is None else Path(source).name)
        rows = load_run(folder).forks
        done = set(rows[rows["fork"] == name][["step", "batch"]].itertuples(index=False, name=None))
        with TraceWriter(folder) as writer:
            for state in states:
                step = 0 if state is None else step_of(state)
                missing = [batch for batch in range(spec.batches) if (step, batch) not in done]
                if not missing:
                    tell(f"step {step}: all {spec.batches} batches are there")
                    continue
                _write_state(first or measure(state), folder, name, missing, writer, tell)
                first = None
    return load_run(folder), name


def _write_state(
    measure: Measure,
    folder: Path,
    name: str,
    missing: Sequence[int],
    writer: TraceWriter,
    tell: Tell,
) -> None:
    """Write the rows of the `missing` batches of one state, batch by batch, and the calibrated methods into run.json."""
    start = measure.start
    if start.warmed:
        tell(
            f"step {start.step}: no optimizer state is stored; AdamW's moments are those of {start.warmed} steps of "
            f"{next(iter(start.methods))} at these weights (fork.warm_up=0: empty)"
        )
    forks = dict(read_run_info(folder)["forks"])
    arms = {arm: method.model_dump(mode="json") for arm, method in start.methods.items()}
    noted = {"arms": forks[name].get("arms", {}) | {str(start.step): arms}}
    remaining = Remaining(len(missing))
    for done, batch in enumerate(missing, 1):
        # One append, so that an interruption never leaves a part of a batch.
        rows = list(measure.batch_rows(name, batch))
        if measure.rho is not None:
            noted |= {"rho": measure.rho}
        update_run_info(folder, forks=forks | {name: forks[name] | noted})
        writer.append("forks", {column: [row[column] for row in rows] for column in rows[0]})
        writer.flush()
        made = f"batch {batch + 1} of {measure.spec.batches}, {len(arms)} arms"
        tell(f"step {start.step}: {made}{remaining.after(done)}")
    start.restore()


def _begin(folder: Path, config: RunConfig, policy: Policy, threads: int) -> None:
    """Create the folder of a run without steps, for the rows."""
    made = config.model_copy(update={"out": str(folder)})
    create_run_dir(folder)
    run_folder.begin_run_dir(
        made,
        policy,
        run_folder.run_info(made, policy, threads, distributed.Launch()),
    )
    update_run_info(folder, status="finished", end="a fork: counterfactual updates, no training")


def _identity(config: RunConfig, spec: ForkSpec, arms: Mapping[str, Method]) -> str:
    """First 8 hex digits of a hash of the settings, equal for runs that differ in seed, method and number of batches only."""
    parts = config.model_dump(
        mode="json", include={"task", "policy", "rollout", "optimizer", "update", "steps"}
    )
    chosen = spec.model_dump(mode="json", exclude={"batches"})
    text = json.dumps(
        [parts, chosen, [method.model_dump(mode="json") for method in arms.values()]],
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _describe(
    folder: Path,
    name: str,
    config: RunConfig,
    spec: ForkSpec,
    source: str,
) -> None:
    """List the fork's settings in run.json; a UserError where the folder has this fork from another run or seed."""
    forks = dict(read_run_info(folder).get("forks") or {})
    known = forks.get(name, {})
    made_from = {"source": source, "seed": config.seed, "method": method_label(config.method)}
    other = next(
        (
            f"{key} {known[key]}"
            for key in made_from
            if known.get(key, made_from[key]) != made_from[key]
        ),
        None,
    )
    if other is not None:
        raise UserError(
            f"--out {folder}: holds a fork with these settings from {other}; choose another --out"
        )
    batches = max(spec.batches, known.get("batches", 0))
    forks[name] = {
        **known,
        **spec.model_dump(mode="json"),
        **made_from,
        "batches": batches,
    }
    update_run_info(folder, forks=forks)


# -- outcomes of an update ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """An outcome at some weights."""

    value: float
    # of the change since the starting weights, over prompts; NaN if not estimated
    std_error: float = math.nan
    # effective sample size / samples; NaN without importance weights
    effective_share: float = math.nan


def outcome_rows(
    common: Mapping[str, object],
    readings: Mapping[str, Reading],
    start: Mapping[str, Reading],
    sound: bool,
) -> list[Row]:
    """Rows of the table `forks`, one for each outcome of an update.

    An outcome is valid if the update is `sound`, the outcome finite, its effective sample size large enough, and, for a
    sharpness, its saturation small enough.
    """
    saturated = "saturation" in readings and readings["saturation"].value > MAX_SATURATION
    rows = []
    for name, reading in readings.items():
        numbers = vars(reading) | {"start": start[name].value if name in start else math.nan}
        few = reading.effective_share < EFFECTIVE_SHARE  # not where it is NaN
        valid = (
            sound
            and math.isfinite(reading.value)
            and not few
            and not (saturated and name == "sam_sharpness")
        )
        known = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        rows.append({**common, "outcome": name, **known, "valid": valid})
    return rows


@dataclass(frozen=True)
class FixedRollouts:
    """Completions of the starting policy with their success and its statistics of their tokens."""

    rollouts: Rollouts  # N rows; `group` is the prompt
    success: Tensor  # (N,) in [0, 1]
    start: TokenStats  # (N, T) under the starting policy

    @classmethod
    def scored(cls, drawn: Drawn, scorer: Scorer) -> FixedRollouts:
        """Completions that the present policy drew."""
        return cls(drawn.rollouts, drawn.correct, scorer.statistics(drawn.rollouts))

    @property
    def mask(self) -> Tensor:
        """(N, T) bool, tokens that the policy chose."""
        return self.rollouts.completion_mask.bool()

    def failure(self, logp: Tensor) -> Reading:
        """Expected failure of the policy with log-probabilities `logp` (N, T), and the standard error of its change."""
        failed = 1 - self.success.double().to(logp.device)
        weight, share = self.weights(logp)
        value = float((weight * failed).sum())
        before = float(failed.mean())
        # Linearization of both ratios: row i contributes w_i(F_i − F) − (F_i − mean F)/N.
        part = weight * (failed - value) - (failed - before) / len(failed)
        _, prompt = self.rollouts.group.to(part.device).unique(return_inverse=True)
        prompts = int(prompt.max()) + 1
        by_prompt = torch.zeros(prompts, dtype=torch.float64, device=part.device).index_add_(
            0,
            prompt,
            part,
        )
        error = (
            math.sqrt(float(by_prompt.square().sum()) * prompts / (prompts - 1))
            if prompts > 1
            else math.nan
        )
        return Reading(value, error, share)

    def weights(self, logp: Tensor) -> tuple[Tensor, float]:
        """Normalized importance weights (N,), which sum to 1, and their effective sample size as a share of N."""
        # (N,)
        change = torch.where(self.mask, logp.double() - self.start.logp.double(), 0.0).sum(1)
        weight = torch.softmax(change, 0)
        share = float(1 / (weight.square().sum() * len(weight)))
        return weight, share if math.isfinite(share) else 0.0

    def kl(self, logp: Tensor) -> float:
        """KL(π₀ ‖ π) [nats / token]: the mean over tokens drawn from π₀ of π/π₀ − 1 − ln(π/π₀), an unbiased estimate."""
        each = k3(self.start.logp.double(), logp.double())
        return float(each[self.mask].mean())

    def entropy(self, stats: TokenStats) -> float:
        """Mean entropy at the fixed tokens [nats]."""
        return float(stats.entropy.double()[self.mask].mean())

    def failure_objective(self, temperature: float) -> Objective:
        """The expected failure, importance-weighted from the policy that drew the completions."""
        given = replace(self.rollouts, behavior_logp=self.start.logp)
        rows = rollout_batch(given, reward=self.success.double())
        return Objective("expected_failure", rows, temperature, stale=True)


def matching_scale(
    divergence: Callable[[float], float],
    target: float,
    start: float,
    tolerance: float = 1e-3,
    evaluations: int = 12,
) -> tuple[float, bool]:
    """The scale s > 0 with divergence(s) = target up to a relative `tolerance`, and whether it was found.

    A divergence grows as s² near 0, so the first step from `start` assumes this power; later steps interpolate ln divergence
    linearly in ln s, within the bracket found so far. The last of at most `evaluations` calls is at the returned scale.
    """
    low = 0.0
    high = math.inf
    slope = 2.0
    # `last`: ln of the scale before and of its divergence
    scale = start
    last = (math.nan, math.nan)
    for _ in range(evaluations):
        tried = scale
        reached = divergence(scale)
        if abs(reached - target) <= tolerance * target:
            return tried, True
        # also where it is not finite
        low, high = (tried, high) if reached < target else (low, tried)
        if 0 < reached < math.inf:
            here = math.log(tried), math.log(reached)
            local = (here[1] - last[1]) / (here[0] - last[0])
            slope = local if 0.25 <= local <= 16 else slope
            scale = tried * (target / reached) ** (1 / slope)
            last = here
        if not low < scale < high:
            scale = math.sqrt(low * high) if 0 < low < high < math.inf else 4 * low or high / 2
    return tried, False


def heldout_order(config: RunConfig, task: Task) -> DataOrder:
    """The order in which forks take held-out prompts; a UserError if the task has none."""
    return DataOrder(split_examples(task, "heldout"), derive(config.seed, "fork held-out"))


def greedy_success(
    policy: Policy,
    task: Task,
    examples: Sequence[Example],
    rollout: RolloutSpec,
) -> Tensor:
    """Whether the present policy's greedy answer to each prompt is right, (prompts,), as 0 and 1."""
    greedy = rollout.model_copy(update={"temperature": 0.0, "top_p": 1.0})
    _, rewards = draw_scored(policy, task, examples, 1, greedy, 0)
    return torch.tensor([float(reward.correct) for reward in rewards], dtype=torch.float64)


def run_radius(config: RunConfig, run: Path | str | None) -> float | None:
    """The radius of a run's perturbations, if it is fixed or has been found."""
    if config.probes.rho != "auto":
        return float(config.probes.rho)
    rho = None if run is None else (read_run_info(Path(run)).get("probe_radius") or {}).get("rho")
    return None if rho is None or math.isnan(rho) else float(rho)


class Measure:
    """Measures the arms of a fork from one state; without a radius `rho` it is found on training completions of the first batch."""

    def __init__(self, start: Start, spec: ForkSpec, rho: float | None) -> None:
        self.start = start
        self.spec = spec
        self.rho = rho
        self._draw = Drawer(start.config, start.policy, start.task)
        self._heldout = heldout_order(start.config, start.task)

    def fixed(self, split: str, batch: int) -> FixedRollouts:
        """New completions of the starting policy, the same for all arms of a batch. The state must be restored.

        Held-out prompts are the next of a seeded order. Training prompts are those that the batch learns from, with as many
        completions in total.
        """
        start = self.start
        spec = self.spec
        samples = self.spec.samples
        if split == "heldout":
            examples = self.asked(batch)
        else:
            examples = start.order(batch).take(start.config.rollout.prompts_per_step)
            samples = max(1, math.ceil(spec.prompts * samples / len(examples)))
        seed = derive(start.config.seed, f"fork {split}", start.step, batch)
        return FixedRollouts.scored(self._draw(examples, samples, seed), start.scorer)

    def asked(self, batch: int) -> list[Example]:
        """The held-out prompts of a batch."""
        return replace(self._heldout, cursor=batch * self.spec.prompts).take(self.spec.prompts)

    def batch_rows(self, name: str, batch: int) -> Iterator[Row]:
        """Rows of the table `forks` of all arms on one batch."""
        start = self.start
        start.restore()
        if self.rho is None and "sharpness" in self.spec.outcomes:
            with self._surface(self.fixed("train", 0)) as surface:
                self.rho = find_radius(surface).rho
        sets = {split: self.fixed(split, batch) for split in ("heldout", "train")}
        before = self._readings(batch, sets)
        common = {
            "step": start.step,
            "fork": name,
            "batch": batch,
            "reference": next(iter(start.methods)),
        }
        reference: tuple[list[Tensor], float] | None = None  # displacement and its KL
        for arm in start.methods:
            began = time.perf_counter()
            made = start.update(arm, batch)
            moved = start.snapshot.displacement()
            sound = not any(update.problem for update in made.updates)
            readings = self._readings(batch, sets)
            reference = reference or (moved, readings["kl"].value)
            turned = rotation(moved, reference[0])
            norm = math.sqrt(inner(moved, moved))
            effects = {
                "update_norm": norm,
                "update_rotation": turned.angle,
                "update_scale": turned.scale,
            }
            same = {
                "arm": arm,
                **common,
                "comparison": "step",
                "scale": 1.0,
                "seconds": time.perf_counter() - began,
            }
            began = time.perf_counter()
            measured = readings | {effect: Reading(value) for effect, value in effects.items()}
            yield from outcome_rows(same, measured, before, sound)
            readings, scale, matched = self._matched(batch, sets, moved, readings, reference[1])
            same |= {"comparison": "kl", "scale": scale, "seconds": time.perf_counter() - began}
            yield from outcome_rows(same, readings, before, sound and matched)

    def _matched(
        self,
        batch: int,
        sets: Mapping[str, FixedRollouts],
        moved: Sequence[Tensor],
        step: dict[str, Reading],
        wanted: float,
    ) -> tuple[dict[str, Reading], float, bool]:
        """Outcomes (`step`: as it is) at the scale at which the update has the KL `wanted`, the scale, and whether it was found."""
        present = step["kl"].value
        heldout = sets["heldout"]
        if not (wanted > 0 and present > 0) or present == wanted:
            return step, 1.0, wanted > 0 and present == wanted

        def divergence(scale: float) -> float:
            """KL to the policy before the update with the update times `scale` [nats]."""
            self.start.snapshot.place(moved, scale)
            return heldout.kl(self.start.scorer.statistics(heldout.rollouts).logp)

        scale, reached = matching_scale(
            divergence,
            wanted,
            math.sqrt(wanted / present),
            KL_TOLERANCE,
        )
        return self._readings(batch, sets), scale, reached

    def _readings(self, batch: int, sets: Mapping[str, FixedRollouts]) -> dict[str, Reading]:
        """Outcomes by name at the present weights."""
        start = self.start
        wanted = self.spec.outcomes
        heldout = sets["heldout"]
        stats = {split: start.scorer.statistics(fixed.rollouts) for split, fixed in sets.items()}
        readings = {"kl": Reading(heldout.kl(stats["heldout"].logp))}
        if "failure" in wanted:
            readings |= {
                f"{split}_failure": fixed.failure(stats[split].logp)
                for split, fixed in sets.items()
            }
        if "entropy" in wanted:
            readings["entropy"] = Reading(heldout.entropy(stats["heldout"]))
        if "greedy" in wanted:
            right = greedy_success(
                start.policy,
                start.task,
                self.asked(batch),
                start.config.rollout,
            )
            readings["accuracy_greedy"] = Reading(float(right.mean()))
        if "sharpness" in wanted:
            readings |= self.sharpness(sets["train"], stats["train"])
        return readings

    def sharpness(self, fixed: FixedRollouts, present: TokenStats) -> dict[str, Reading]:
        """SAM sharpness of the expected failure, importance-weighted from `fixed`, and its share of the largest possible rise."""
        assert self.rho is not None
        with self._surface(fixed) as surface:
            found = sharpness(surface, None, self.rho, "sam", at=surface.gradient())
        value = Reading(found.value, effective_share=fixed.weights(present.logp)[1])
        return {"sam_sharpness": value, "saturation": Reading(found.saturation)}

    def _surface(self, fixed: FixedRollouts) -> AbstractContextManager[Surface]:
        config = self.start.config
        model = self.start.policy.model
        return limited_surface(
            model,
            fixed.failure_objective(config.rollout.temperature),
            config.probes,
        )
