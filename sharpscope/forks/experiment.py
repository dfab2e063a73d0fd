"""Counterfactual updates: every arm's update from the same state on the same rollouts, measured on the same completions."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sharpscope import distributed
from sharpscope.config import (
    ForkSpec,
    Method,
    RunConfig,
    method_label,
    validate,
)
from sharpscope.config.policy import EMBEDDED_PREFIX
from sharpscope.errors import UserError, nearest
from sharpscope.forks.outcomes import Reading, inner, matching_scale, outcome_rows, sam_reading
from sharpscope.forks.start import ArmUpdate, SharedDraws, Start, arms_of, resolve, saved_states
from sharpscope.policy import TokenStats
from sharpscope.probes import rotation
from sharpscope.recording import run_folder
from sharpscope.recording.environment import set_threads
from sharpscope.tasks import make_task
from sharpscope.traces import Run, RunLock, TraceWriter, create_run_dir, load_run, read_run_info, update_run_info
from sharpscope.traces.files import RUN_FILE
from sharpscope.training.checkpoint import step_of

Tell = Callable[[str], None]
SPLITS = ("heldout", "train")
EFFECTIVE_SHARE = 0.5
"""Smallest valid effective sample size of importance weights, as a share of the samples."""
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
    folder = _folder(run, model, out)
    used_threads = set_threads(config.threads if threads is None else threads, config.policy.model)
    made = make_task(config.task)
    name = _identity(config, spec, arms)
    first: Start | None = None
    if not (folder / RUN_FILE).exists():
        first = Start(config, spec, arms, states[0], made)
        _begin(folder, config, first, used_threads)
    with RunLock(folder):
        _describe(folder, name, config, spec, run, model)
        done = _done(folder, name)
        with TraceWriter(folder) as writer:
            for checkpoint_folder in states:
                step = 0 if checkpoint_folder is None else step_of(checkpoint_folder)
                missing = [batch for batch in range(spec.batches) if (step, batch) not in done]
                if not missing:
                    tell(f"step {step}: all {spec.batches} batches are there")
                    continue
                _state_rows(
                    first or Start(config, spec, arms, checkpoint_folder, made), folder, name, missing, writer, tell
                )
                first = None
    return load_run(folder)


def _state_rows(start: Start, folder: Path, name: str, missing: Sequence[int], writer: TraceWriter, tell: Tell) -> None:
    """Write the rows of the `missing` batches of one state, batch by batch."""
    if start.warmed:
        tell(
            f"step {start.step}: no optimizer state is stored; AdamW's moments are those of {start.warmed} steps of "
            f"{next(iter(start.methods))} at these weights (fork.warm_up=0: empty)"
        )
    _note_methods(folder, name, start)
    began = time.perf_counter()
    for count, batch in enumerate(missing, 1):
        # One append, so that an interruption never leaves a part of a batch.
        rows = list(_batch_rows(start, name, batch))
        writer.append("forks", {column: [row[column] for row in rows] for column in rows[0]})
        writer.flush()
        left = (time.perf_counter() - began) / count * (len(missing) - count) / 60
        arms = len(start.methods)
        tell(f"step {start.step}: batch {batch + 1} of {start.spec.batches}, {arms} arms; {left:.1f} min left")
    start.snapshot.restore()


def _spec(settings: Mapping[str, Any]) -> ForkSpec:
    """The settings of a fork, checked; lists may stand for tuples."""
    unknown = next((name for name in settings if name not in ForkSpec.model_fields), None)
    if unknown is not None:
        raise UserError(f"fork, {unknown}: no such setting{nearest(unknown, ForkSpec.model_fields)}")
    spec: ForkSpec = validate(
        ForkSpec, {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    )
    return spec


# -- one batch -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Point:
    """Outcomes by name at the arm's change of the weights times `scale`; `matched`: whether the scale was found."""

    readings: dict[str, Reading]
    scale: float
    matched: bool = True


def _batch_rows(start: Start, name: str, batch: int) -> Iterator[dict[str, Any]]:
    """Rows of the table `forks` of all arms on one batch."""
    measured = _Measured(start, batch)
    arms = list(start.methods)
    common = {"step": start.step, "fork": name, "batch": batch, "reference": arms[0]}
    reference: tuple[ArmUpdate, float] | None = None  # update and its KL
    for arm in arms:
        began = time.perf_counter()
        update = start.update(arm, batch, measured.shared)
        at_step = measured.read(1.0)
        norm = math.sqrt(inner(update.displacement, update.displacement))
        if reference is None:
            reference = (update, at_step.readings["kl"].value)
        turned = rotation(update.displacement, reference[0].displacement)
        effects = {"update_norm": norm, "update_rotation": turned.angle, "update_scale": turned.scale}
        for comparison in ("step", "kl"):
            point = at_step if comparison == "step" else measured.matched(update, at_step, reference[1])
            same = {"arm": arm, **common, "comparison": comparison, "scale": point.scale}
            same["seconds"] = time.perf_counter() - began
            began = time.perf_counter()
            sound = point.matched and update.sound

            def valid(_: str, reading: Reading, sound: bool = sound) -> bool:
                """NaN of the share: no importance weights."""
                return sound and not reading.effective_share < EFFECTIVE_SHARE

            yield from outcome_rows(same, point.readings, measured.start, valid)
            if comparison == "step":
                yield from outcome_rows(same, {name: Reading(value) for name, value in effects.items()}, {}, valid)


class _Measured:
    """The fixed completions of one batch, the outcomes of the starting policy on them, and those of an arm.

    Attributes:
        shared: draws of the starting policy that the arms share.
        sets: fixed completions by split.
        start: outcomes before the update.
    """

    def __init__(self, origin: Start, batch: int) -> None:
        self.origin, self.spec, self.shared = origin, origin.spec, SharedDraws()
        origin.snapshot.restore()
        self.sets = {split: origin.fixed(split, batch) for split in SPLITS}
        self.start = self._readings({split: fixed.start for split, fixed in self.sets.items()})

    def read(self, scale: float) -> _Point:
        """Outcomes at the present weights, which are those of an arm's update times `scale`."""
        stats = {split: self.origin.scorer.statistics(fixed.rollouts) for split, fixed in self.sets.items()}
        return _Point(self._readings(stats), scale)

    def matched(self, update: ArmUpdate, step: _Point, wanted: float) -> _Point:
        """Outcomes at the scale at which the update has the KL `wanted`, the reference's; `step` are those of the update as it is."""
        origin, present = self.origin, step.readings["kl"].value
        if present == wanted and present > 0:
            return step
        if not (wanted > 0 and present > 0):
            return replace(step, matched=False)
        heldout = self.sets["heldout"]
        stats_by_scale: dict[float, TokenStats] = {}

        def divergence(scale: float) -> float:
            """KL to the policy before the update with the update times `scale` [nats]; keeps the statistics there."""
            origin.snapshot.place(update.displacement, scale)
            stats_by_scale.clear()
            stats_by_scale[scale] = origin.scorer.statistics(heldout.rollouts)
            return heldout.kl(stats_by_scale[scale].logp)

        scale, reached = matching_scale(divergence, wanted, math.sqrt(wanted / present), KL_TOLERANCE)
        stats = {"heldout": stats_by_scale[scale], "train": origin.scorer.statistics(self.sets["train"].rollouts)}
        return _Point(self._readings(stats), scale, reached)

    def _readings(self, stats: Mapping[str, TokenStats]) -> dict[str, Reading]:
        """Outcomes by name from the present statistics of the fixed completions."""
        wanted, heldout = self.spec.outcomes, self.sets["heldout"]
        readings = {"kl": Reading(heldout.kl(stats["heldout"].logp))}
        if "failure" in wanted:
            readings |= {f"{split}_failure": fixed.failure(stats[split].logp) for split, fixed in self.sets.items()}
        if "entropy" in wanted:
            readings["entropy"] = Reading(heldout.entropy(stats["heldout"]))
        if "sharpness" in wanted:
            readings["sam_sharpness"] = sam_reading(self.origin, self.sets["train"], stats["train"])
        return readings


# -- what is forked, and where its rows go ---------------------------------------------------------------------------


def _folder(run: Path | str | None, model: str | None, out: Path | str | None) -> Path:
    if out is not None:
        return Path(out)
    if run is not None:
        return Path(run)
    assert model is not None
    return Path("forks") / (Path(model.removeprefix(EMBEDDED_PREFIX)).name or "model")


def _begin(folder: Path, config: RunConfig, start: Start, threads: int) -> None:
    """Create the folder of a run without steps, for the rows."""
    own = config.model_copy(update={"out": str(folder)})
    create_run_dir(folder)
    info = run_folder.run_info(own, start.policy, threads, distributed.Launch())
    run_folder.begin_run_dir(own, start.policy, info)
    update_run_info(folder, status="finished", end="a fork: counterfactual updates, no training")


def _identity(config: RunConfig, spec: ForkSpec, arms: Mapping[str, Method]) -> str:
    """First 8 hex digits of a hash of the settings, equal for runs that differ in seed and method only.

    More batches continue the same fork.
    """
    parts = config.model_dump(mode="json", include={"task", "policy", "rollout", "optimizer", "update", "steps"})
    own = spec.model_dump(mode="json", exclude={"batches"})
    text = json.dumps([parts, own, [method.model_dump(mode="json") for method in arms.values()]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _describe(
    folder: Path, name: str, config: RunConfig, spec: ForkSpec, run: Path | str | None, model: str | None
) -> None:
    """List the fork's settings in run.json.

    Raises:
        UserError: the folder has this fork from another run or seed.
    """
    info = read_run_info(folder)
    forks = dict(info.get("forks") or {})
    known = forks.get(name, {})
    own = {
        "source": str(model) if run is None else Path(run).resolve().name,
        "seed": config.seed,
        "method": method_label(config.method),
    }
    other = next((f"{key} {known[key]}" for key in own if key in known and known[key] != own[key]), None)
    if other is not None:
        raise UserError(f"--out {folder}: holds a fork with these settings from {other}; choose another --out")
    settings = spec.model_dump(mode="json") | own
    forks[name] = {**known, **settings, "batches": max(spec.batches, known.get("batches", 0))}
    update_run_info(folder, forks=forks)


def _note_methods(folder: Path, name: str, start: Start) -> None:
    """Keep each arm's method with its calibrated constants at this state in run.json."""
    forks = dict(read_run_info(folder)["forks"])
    own = dict(forks[name].get("arms", {}))
    own[str(start.step)] = {arm: method.model_dump(mode="json") for arm, method in start.methods.items()}
    if start.rho is not None:
        forks[name] = {**forks[name], "rho": start.rho}
    forks[name] = {**forks[name], "arms": own}
    update_run_info(folder, forks=forks)


def _done(folder: Path, name: str) -> set[tuple[int, int]]:
    """(step, batch) of the fork that are recorded already."""
    rows = load_run(folder).forks
    rows = rows[rows["fork"] == name]
    return {
        (int(step), int(batch)) for step, batch in rows[["step", "batch"]].drop_duplicates().itertuples(index=False)
    }
