"""Counterfactual updates: every arm's update from the same state on the same rollouts, measured on the same completions."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sharpscope import distributed
from sharpscope.config import ForkSpec, Method, RunConfig, method_label, validate
from sharpscope.config.run import EMBEDDED_PREFIX
from sharpscope.errors import UserError, nearest
from sharpscope.forks.outcomes import (
    FixedRollouts,
    Reading,
    greedy_success,
    heldout_order,
    matching_scale,
    outcome_rows,
    run_radius,
)
from sharpscope.forks.start import Start, Tell, arms_of, resolve, saved_states
from sharpscope.policy import TokenStats
from sharpscope.probes import find_radius, limited_surface, rotation, sharpness
from sharpscope.probes.directions import inner
from sharpscope.probes.surface import Surface
from sharpscope.recording import run_folder
from sharpscope.recording.environment import set_threads
from sharpscope.recording.probe_sets import Drawer
from sharpscope.seeds import derive
from sharpscope.tasks import Example
from sharpscope.traces import Run, RunLock, TraceWriter, create_run_dir, load_run, read_run_info, update_run_info
from sharpscope.traces.files import RUN_FILE
from sharpscope.training.checkpoint import step_of

SPLITS = ("heldout", "train")
KL_TOLERANCE = 1e-3
"""Relative tolerance of the matched KL."""


def fork(
    run: Path | str | None = None,
    *,
    model: str | None = None,
    task: str | None = None,
    checkpoint: Sequence[str | int] = (),
    methods: Sequence[str] | None = None,
    token_weights: str | None = None,
    overrides: Sequence[str] = (),
    out: Path | str | None = None,
    threads: int | None = None,
    on_progress: Tell | None = None,
    **settings: Any,
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
        token_weights: in place of those of the arms that have some: `module:function`, or a preset, paper or calibrated.
        overrides: changes of the run's configuration, `field.subfield=value`.
        out: folder of a run for the rows; None: `run` itself, or `forks/<model>`.
        threads: CPU threads; None: as configured.
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
    tell = on_progress or (lambda text: None)
    spec = _spec(settings if methods is None else {**settings, "methods": tuple(methods)})
    if (run is None) == (model is None):
        raise UserError("fork: give a run's folder, or --model with --task")
    config = resolve("fork", run, model, task, None, overrides)
    arms = arms_of(spec.methods, token_weights, config)
    states = saved_states(run, checkpoint)
    source = str(model).removeprefix(EMBEDDED_PREFIX) if run is None else str(Path(run).resolve())
    folder = Path(out or run or Path("forks") / (Path(source).name or "model"))
    used_threads = set_threads(config.threads if threads is None else threads, config.policy.model)

    measure = partial(_measure, config, arms, spec, run)
    name = _identity(config, spec, arms)
    first = None if (folder / RUN_FILE).exists() else measure(states[0])
    if first is not None:
        _begin(folder, config, first.start, used_threads)
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
    return load_run(folder)


def _measure(
    config: RunConfig, arms: Mapping[str, Method], spec: ForkSpec, run: Path | str | None, state: Path | None
) -> Measure:
    start = Start(config, arms, state, warm_up=spec.warm_up, calibrating=spec.batches)
    return Measure(start, spec, spec.rho or run_radius(config, None if state is None else run))


def _spec(settings: Mapping[str, Any]) -> ForkSpec:
    """The settings of a fork, checked; lists may stand for tuples."""
    unknown = next((name for name in settings if name not in ForkSpec.model_fields), None)
    if unknown is not None:
        raise UserError(f"fork, {unknown}: no such setting{nearest(unknown, ForkSpec.model_fields)}")
    spec: ForkSpec = validate(
        ForkSpec, {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    )
    return spec


def _write_state(
    measure: Measure, folder: Path, name: str, missing: Sequence[int], writer: TraceWriter, tell: Tell
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
    began = time.perf_counter()
    for count, batch in enumerate(missing, 1):
        # One append, so that an interruption never leaves a part of a batch.
        rows = list(measure.batch_rows(name, batch))
        if count == 1:
            noted |= {} if measure.rho is None else {"rho": measure.rho}
            update_run_info(folder, forks=forks | {name: forks[name] | noted})
        writer.append("forks", {column: [row[column] for row in rows] for column in rows[0]})
        writer.flush()
        left = (time.perf_counter() - began) / count * (len(missing) - count) / 60
        tell(f"step {start.step}: batch {batch + 1} of {measure.spec.batches}, {len(arms)} arms; {left:.1f} min left")
    start.restore()


# -- one batch -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Point:
    """Outcomes by name at the arm's change of the weights times `scale`; `matched`: whether the scale was found."""

    readings: dict[str, Reading]
    scale: float
    matched: bool = True


class Measure:
    """Measures the arms of a fork from one state; without a radius `rho` it is found on training completions of the first batch."""

    def __init__(self, start: Start, spec: ForkSpec, rho: float | None) -> None:
        self.start, self.spec, self.rho = start, spec, rho
        self._draw = Drawer(start.config, start.policy, start.task)
        self._heldout = heldout_order(start.config, start.task)

    def fixed(self, split: str, batch: int) -> FixedRollouts:
        """New completions of the starting policy, the same for all arms of a batch. The state must be restored.

        Held-out prompts are the next of a seeded order. Training prompts are those that the batch learns from, with as many
        completions in total.
        """
        start, spec, samples = self.start, self.spec, self.spec.samples
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

    def batch_rows(self, name: str, batch: int) -> Iterator[dict[str, Any]]:
        """Rows of the table `forks` of all arms on one batch."""
        start = self.start
        start.restore()
        if self.rho is None and "sharpness" in self.spec.outcomes:
            with self._surface(self.fixed("train", 0)) as surface:
                self.rho = find_radius(surface).rho
        sets = {split: self.fixed(split, batch) for split in SPLITS}
        before = self._readings(batch, sets, {split: fixed.start for split, fixed in sets.items()})
        arms = list(start.methods)
        common = {"step": start.step, "fork": name, "batch": batch, "reference": arms[0]}
        reference: tuple[list[Tensor], float] | None = None  # displacement and its KL
        for arm in arms:
            began = time.perf_counter()
            made = start.update(arm, batch)
            moved = start.snapshot.displacement()
            sound = not any(update.problem for update in made.updates)
            stats = {split: start.scorer.statistics(fixed.rollouts) for split, fixed in sets.items()}
            point = _Point(self._readings(batch, sets, stats), 1.0)
            reference = reference or (moved, point.readings["kl"].value)
            turned, norm = rotation(moved, reference[0]), math.sqrt(inner(moved, moved))
            effects = {"update_norm": norm, "update_rotation": turned.angle, "update_scale": turned.scale}
            for comparison in ("step", "kl"):
                if comparison == "kl":
                    point = self._matched(batch, sets, moved, point, reference[1])
                same = {"arm": arm, **common, "comparison": comparison, "scale": point.scale}
                same["seconds"] = time.perf_counter() - began
                began = time.perf_counter()
                yield from outcome_rows(same, point.readings, before, sound and point.matched)
                if comparison == "step":
                    yield from outcome_rows(same, {key: Reading(value) for key, value in effects.items()}, {}, sound)

    def _matched(
        self, batch: int, sets: Mapping[str, FixedRollouts], moved: Sequence[Tensor], step: _Point, wanted: float
    ) -> _Point:
        """Outcomes at the scale at which the update has the KL `wanted`, the reference's; `step` are those of the update as it is."""
        present, heldout = step.readings["kl"].value, sets["heldout"]
        if present == wanted and present > 0:
            return step
        if not (wanted > 0 and present > 0):
            return replace(step, matched=False)

        scorer, last = self.start.scorer, {}

        def divergence(scale: float) -> float:
            """KL to the policy before the update with the update times `scale` [nats]."""
            self.start.snapshot.place(moved, scale)
            last["heldout"] = scorer.statistics(heldout.rollouts)
            return heldout.kl(last["heldout"].logp)

        scale, reached = matching_scale(divergence, wanted, math.sqrt(wanted / present), KL_TOLERANCE)
        stats = last | {"train": scorer.statistics(sets["train"].rollouts)}
        return _Point(self._readings(batch, sets, stats), scale, reached)

    def _readings(
        self, batch: int, sets: Mapping[str, FixedRollouts], stats: Mapping[str, TokenStats]
    ) -> dict[str, Reading]:
        """Outcomes by name at the present weights; `stats`: present statistics of the fixed completions."""
        wanted, heldout = self.spec.outcomes, sets["heldout"]
        readings = {"kl": Reading(heldout.kl(stats["heldout"].logp))}
        if "failure" in wanted:
            readings |= {f"{split}_failure": fixed.failure(stats[split].logp) for split, fixed in sets.items()}
        if "entropy" in wanted:
            readings["entropy"] = Reading(heldout.entropy(stats["heldout"]))
        if "greedy" in wanted:
            start = self.start
            right = greedy_success(start.policy, start.task, self.asked(batch), start.config.rollout)
            readings["accuracy_greedy"] = Reading(float(right.mean()))
        if "sharpness" in wanted:
            readings |= self.sharpness(sets["train"], stats["train"])
        return readings

    def sharpness(self, fixed: FixedRollouts, present: TokenStats) -> dict[str, Reading]:
        """SAM sharpness of the expected failure, importance-weighted from `fixed`, and its share of the largest possible rise."""
        assert self.rho is not None
        with self._surface(fixed) as surface:
            found = sharpness(surface, None, self.rho, "sam", at=surface.gradient())
        share = fixed.weights(present.logp)[1]
        value = Reading(found.value, effective_share=share)
        return {"sam_sharpness": value, "saturation": Reading(found.saturation)}

    def _surface(self, fixed: FixedRollouts) -> AbstractContextManager[Surface]:
        config = self.start.config
        return limited_surface(
            self.start.policy.model, fixed.failure_objective(config.rollout.temperature), config.probes
        )


# -- what is forked, and where its rows go ---------------------------------------------------------------------------


def _begin(folder: Path, config: RunConfig, start: Start, threads: int) -> None:
    """Create the folder of a run without steps, for the rows."""
    made = config.model_copy(update={"out": str(folder)})
    create_run_dir(folder)
    info = run_folder.run_info(made, start.policy, threads, distributed.Launch())
    run_folder.begin_run_dir(made, start.policy, info)
    update_run_info(folder, status="finished", end="a fork: counterfactual updates, no training")


def _identity(config: RunConfig, spec: ForkSpec, arms: Mapping[str, Method]) -> str:
    """First 8 hex digits of a hash of the settings, equal for runs that differ in seed and method only.

    More batches continue the same fork.
    """
    parts = config.model_dump(mode="json", include={"task", "policy", "rollout", "optimizer", "update", "steps"})
    chosen = spec.model_dump(mode="json", exclude={"batches"})
    text = json.dumps([parts, chosen, [method.model_dump(mode="json") for method in arms.values()]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _describe(folder: Path, name: str, config: RunConfig, spec: ForkSpec, source: str) -> None:
    """List the fork's settings in run.json.

    Raises:
        UserError: the folder has this fork from another run or seed.
    """
    forks = dict(read_run_info(folder).get("forks") or {})
    known = forks.get(name, {})
    made_from = {"source": source, "seed": config.seed, "method": method_label(config.method)}
    other = next((f"{key} {known[key]}" for key in made_from if known.get(key, made_from[key]) != made_from[key]), None)
    if other is not None:
        raise UserError(f"--out {folder}: holds a fork with these settings from {other}; choose another --out")
    batches = max(spec.batches, known.get("batches", 0))
    forks[name] = {**known, **spec.model_dump(mode="json"), **made_from, "batches": batches}
    update_run_info(folder, forks=forks)
