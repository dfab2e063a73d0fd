"""A training run: steps of rollouts, updates, evaluation and checkpoints, recorded in the run's folder, and the display of its progress."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from sharpscope import distributed
from sharpscope.distributed import Launch
from sharpscope.errors import UserError
from sharpscope.methods import Method, is_reference, method_label
from sharpscope.methods.token_weights import UniformWeight
from sharpscope.policy import Policy, check_lengths, render_prompts
from sharpscope.policy.sharding import shard
from sharpscope.progress import Remaining
from sharpscope.recording import run_folder
from sharpscope.recording.health import Quantities, StepHealth, not_finite, temperature_gap
from sharpscope.recording.measurements import ClippedUpdate
from sharpscope.recording.observers import Observers, StepObserver
from sharpscope.recording.probe_sets import Drawer, check_probe_set
from sharpscope.recording.rows import steps_row
from sharpscope.recording.step import RolloutBatch, StepResult
from sharpscope.recording.writer import FinishedStep, StepWriter
from sharpscope.rules.judging import Event, judge
from sharpscope.settings import known_settings
from sharpscope.tasks import Example, Task, make_task
from sharpscope.traces import RunLock, create_run_dir, read_run_info
from sharpscope.traces.files import RUN_FILE
from sharpscope.training.checkpoint import Progress, fingerprint, newest, restore, save, step_of
from sharpscope.training.evaluate import evaluate, present_splits
from sharpscope.training.learner import (
    build_optimizer,
    calibrated,
    learning_rate,
    load_start,
    make_learner,
    reference_policy,
    set_learning_rate,
)
from sharpscope.training.rollouts import DataOrder, draw_rollouts, split_examples, timed_out_events
from sharpscope.untrusted import visible

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


LINE_EVERY = 60.0
"""Every tenth step is printed, and a step that ends this long after the last line [s]."""
_SHOWN = {
    "reward_mean": "reward {:+.3f}",
    "accuracy": "accuracy {:.1%}",
    "grad_norm": "grad norm {:.3g}",
    "entropy_mean": "entropy {:.3f} nats",
    "completion_length_mean": "length {:.1f} tokens",
}


class Display:
    """Shows the progress of a run on a console; without one, nothing."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(quiet=True)
        columns = (
            *bars.Progress.get_default_columns(),
            bars.TextColumn("[dim]{task.fields[status]}"),
        )
        hidden = self.console.quiet or not self.console.is_terminal
        self._progress = bars.Progress(*columns, console=self.console, disable=hidden)
        self._fired: set[str] = set()

    def start(self, title: str, steps: int, done: int) -> None:
        """The run starts, or continues after `done` steps."""
        self._steps, self._printed = steps, time.monotonic()
        self._remaining = Remaining(steps, done)
        self._task = self._progress.add_task(escape(title), total=steps, completed=done, status="")
        self._progress.start()

    def status(self, text: str) -> None:
        """The run starts another activity."""
        self._progress.update(self._task, status=escape(text))

    def step(self, row: Mapping[str, Any]) -> None:
        """A step is done; `row` is its row of the steps table. Every tenth step and slow ones are printed."""
        step = int(row["step"])
        self._progress.update(self._task, completed=step)
        if step % 10 == 0 or step == 1 or time.monotonic() - self._printed >= LINE_EVERY:
            shown = [
                form.format(row[name]) for name, form in _SHOWN.items() if row.get(name) is not None
            ]
            left = self._remaining.after(step)
            self._print(f"step {step} of {self._steps}: {'  '.join(shown)}{left}")

    def evaluation(self, rows: Sequence[Mapping[str, object]]) -> None:
        """An evaluation is done."""
        each = [
            f"{row['split']} level {row['level']}, T={row['temperature']:g}: {row['accuracy']:.1%}"
            for row in rows
        ]
        self._print(f"step {rows[0]['step']}, accuracy: {'; '.join(each)}")

    def event(self, event: Event) -> None:
        """A health rule applied; only its first event is printed (all are in the events table)."""
        if event.rule not in self._fired:
            self._fired.add(event.rule)
            color = {"error": "red", "warning": "yellow"}.get(event.severity, "cyan")
            said = f"{event.value:.3g}: {escape(visible(event.message))}"
            self.console.print(f"[{color}]step {event.step}: {escape(event.rule)}[/] {said}")

    def stop(self) -> None:
        """The run ended, for whatever reason."""
        self._progress.stop()

    def _print(self, line: str) -> None:
        self.console.print(visible(line), highlight=False, markup=False, soft_wrap=True)
        self._printed = time.monotonic()


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run_dir: Path
    status: str  # finished | interrupted | failed
    steps_done: int
    reason: str
    notes: tuple[str, ...] = ()  # what a user should know about a resume; kept in run.json


def train(config: RunConfig, display: Display | None = None, resume: bool = False) -> Outcome:
    """Train as `config` says and record it in `config.run_dir`.

    The input is checked before the folder is created. Ctrl-C ends the run after the current step, with a checkpoint; a
    second one ends it at once. A disk that is full ends it as `failed`. With `resume`, continue from the folder's last
    checkpoint, and remove what was recorded after it; without a checkpoint, start again, and keep the old records under another
    name. `display` shows progress.

    Raises:
        UserError: the input is wrong, the folder exists or another process writes to it, or the run to resume is finished
            or reduced, or its last checkpoint is damaged.
    """
    launch = distributed.start(config.policy.device)
    threads = run_folder.set_threads(config.threads, config.policy.model)
    display = display if display is not None and distributed.is_rank_zero() else Display()
    folder = config.run_dir
    with ExitStack() as stack:

        def lock() -> None:
            """Keep other processes out of the folder."""
            stack.enter_context(RunLock(folder))

        saved: Path | None = None
        if resume:
            distributed.rank_zero_call(lock)
            distributed.rank_zero_call(lambda: run_folder.check_resume(config))
            saved = distributed.rank_zero_call(lambda: newest(folder))
        task = make_task(config.task)
        examples = split_examples(task, "train")
        if config.evaluation.every:
            present_splits(task, config.evaluation.splits)
        policy = load_start(config, saved)
        longest = [
            e
            for split in ("train", *config.evaluation.splits)
            for e in task.splits().get(split, [])
        ]
        check_lengths(policy, render_prompts(longest, policy), config.rollout.max_new_tokens)
        check_probe_set(config, task)
        info = run_folder.run_info(config, policy, threads, launch)
        run = _Run(config, policy, task, examples, display, launch)
        if not resume:
            distributed.rank_zero_call(lambda: create_run_dir(folder) and None)
            distributed.rank_zero_call(lock)
        begun = distributed.broadcast((folder / RUN_FILE).exists())
        if begun and not resume:
            raise UserError(
                f"out: {folder} contains a run and is not overwritten; choose another --out"
            )
        if not begun:
            distributed.rank_zero_call(lambda: run_folder.begin_run_dir(config, policy, info))
        try:
            return run.run(saved)
        except UserError:
            if not resume and distributed.is_rank_zero():
                run_folder.discard_unused(folder)
            raise


class _Run:
    """The state of one run while it trains."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        task: Task,
        examples: list[Example],
        display: Display,
        launch: Launch,
    ) -> None:
        self.config = config
        self.policy = policy
        self.task = task
        self.display = display
        self.method = config.resolved_method
        reference = reference_policy(config, policy) if self.method.needs_reference else None
        self.reference_mark = None if reference is None else fingerprint(reference)
        for model in (policy.model, reference) if launch.sharded else ():
            if model is not None:
                shard(model, launch.reshard)
        if launch.sharded and self.method.proximal is not None:
            raise UserError(
                "method.proximal: the average of the weights is not sharded; train without FSDP"
            )
        self.optimizer = build_optimizer(policy.model, config.optimizer)
        self.order = DataOrder(examples, config.seed)
        # log of the largest gradient norm of each of the last steps, for spikes
        self.recent: list[float] = []
        self.quantities = Quantities()
        self.stop = ""  # why the run must stop after this step
        self.stop_requested = False  # by the user
        # Whether the weights are not finite: they are not measured then, and no checkpoint replaces a good one.
        self.broken = False
        self.shown: set[str] = set()  # warnings of the method that were reported
        self.learner = make_learner(config, policy, self.optimizer, reference=reference)
        self.observers = Observers(config, policy, self.learner.view, Drawer(config, policy, task))

    # -- the whole run -----------------------------------------------------------------------------------------------

    def run(self, checkpoint: Path | None) -> Outcome:
        """Make all steps after `checkpoint` (None: all)."""
        config = self.config
        run_dir = self.config.run_dir
        mark = self.reference_mark
        if mark is not None:
            distributed.rank_zero_call(lambda: run_folder.check_reference(run_dir, mark))
        done = restored = 0 if checkpoint is None else self._restore(checkpoint)
        kept = None if checkpoint is None else done
        notes = distributed.rank_zero_call(lambda: run_folder.wind_back(run_dir, kept))
        if checkpoint is not None:
            notes.append(f"resumed after step {done}, from {checkpoint.name}")
        info = distributed.rank_zero_call(lambda: read_run_info(run_dir))
        if checkpoint is None:
            # it is searched again, so that step 0 is recorded as it was
            info.pop("probe_radius", None)
        run_folder.note(
            run_dir,
            status="running",
            steps_done=done,
            notes=[*info.get("notes", []), *notes],
        )
        status, reason = "failed", ""
        title = f"{method_label(config.method)} · {config.task.kind} · seed {config.seed}"
        self.display.start(title, config.steps, done)
        started = time.perf_counter()
        try:
            with run_folder.trace_writer(run_dir) as writer, _stop_after_step(self._interrupt):
                self.writer = writer
                self.rows = StepWriter(
                    writer,
                    config.recording,
                    self.policy.head,
                    config.rollout.temperature,
                )
                self.display.status("choosing the probe set")
                events = self.observers.start(self.task, info)
                if checkpoint is None:
                    self._report(events)  # a resumed run has reported them
                    self._evaluate(0)
                    self._probe(0)
                for step in range(done + 1, config.steps + 1):
                    self._step(step)
                    done = step
                    stop = distributed.broadcast(self.stop)
                    if stop or any(distributed.gather(self.stop_requested)):
                        status, reason = (
                            ("failed", stop) if stop else ("interrupted", "stopped by the user")
                        )
                        break
                else:
                    status, reason = "finished", "all steps done"
                writer.flush()
            # the checkpoint before is worth more
            destroyed = self.broken or self.stop.startswith("policy_destroyed")
            if done > restored and not destroyed:
                self._save(done)
        except KeyboardInterrupt:
            status = "interrupted"
            reason = "stopped at once by the user; the step in progress is lost"
        except OSError as error:
            status = "failed"
            reason = run_folder.refused_write(error, run_dir)
            if not reason:
                reason = run_folder.keep_traceback(run_dir, error)
                raise
        except BaseException as error:
            reason = (
                str(error)
                if isinstance(error, UserError)
                else run_folder.keep_traceback(run_dir, error)
            )
            raise
        finally:
            self.display.stop()
            run_folder.end_run(
                run_dir,
                status=status,
                steps_done=done,
                end=reason,
                seconds=round(time.perf_counter() - started, 3),
                peak_memory_bytes=run_folder.peak_memory_bytes(self.policy.device),
                measuring=self.observers.schedule.summary(),
            )
        return Outcome(run_dir, status, done, reason, tuple(notes))

    def _interrupt(self) -> None:
        """Handle Ctrl-C: stop after this step, the second time at once."""
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True
        self.display.status("stopping after this step; press Ctrl-C again to stop at once")

    def _step(self, step: int) -> None:
        """Make one step."""
        config = self.config
        schedule = self.observers.schedule
        progress = (step - 1) / max(config.steps - 1, 1)
        lr = learning_rate(config.optimizer, step, config.steps)
        set_learning_rate(self.optimizer, lr)
        self.display.status(f"step {step}: drawing completions")
        started = time.perf_counter()
        draws = self.policy, self.task, self.order, self.method, config.rollout, config.seed, step
        batch = draw_rollouts(*draws, self.learner.scorer.statistics)
        drawn = time.perf_counter()
        method = self._calibrated(step, batch, progress)
        self.display.status(f"step {step}: learning")
        health = self._health(step, batch, method, progress, lr)
        observer = StepObserver(self.observers, step, batch.rollouts, self.recent)
        result = self._learn(step, batch, method, progress, health, observer)
        rotating = sum(u.rotation.seconds for u in result.updates if u.rotation is not None)
        schedule.rotation.seconds += rotating
        probing = observer.seconds + rotating
        learned = time.perf_counter()
        row = steps_row(step, batch, result, method, progress, lr)
        health.after_updates(row)
        self.quantities.rows.append(health.values)
        told = [*self._result_events(step, result), *timed_out_events(step, batch.rewards)]
        self._report([*health.events, *observer.events, *told])
        largest = max(
            (update.plain_norm for update in result.updates if not update.skipped), default=0.0
        )
        if largest:
            self.recent = [*self.recent[-49:], math.log(largest)]
        finished = FinishedStep(
            number=step,
            batch=batch,
            result=result,
            row=row,
            measured=observer.columns,
            by_layer=observer.by_layer,
            written=observer.written,
            probes=[observer.rows] if observer.rows else [],
            later_uses=result.later_uses,
        )

        def seconds() -> dict[str, float]:
            """The step's time by part, when its large tables are written."""
            tables = time.perf_counter() - learned
            schedule.end_step(training=learned - started - probing, tables=tables)
            return {
                "generation_s": drawn - started,
                "training_s": learned - drawn - probing,
                "recording_s": tables + probing,
            }

        self.rows.write(finished, seconds)
        self.writer.flush()
        run_folder.note(config.run_dir, steps_done=step)
        self.display.step(row)
        if not self.broken:
            self._after(step)

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _health(
        self,
        step: int,
        batch: RolloutBatch,
        method: Method,
        progress: float,
        lr: float,
    ) -> StepHealth:
        """The health rules of a step; they name the last checkpoint before it."""
        every = self.config.checkpoint.every
        saved = f"step-{(step - 1) // every * every:06d}" if every and step > every else None
        return StepHealth(
            self.config.health,
            step,
            batch,
            method,
            progress,
            self.policy.device,
            vocabulary=self.policy.head.weight.shape[0],
            quantities=self.quantities,
            lr=lr,
            checkpoint=saved,
        )

    def _learn(
        self,
        step: int,
        batch: RolloutBatch,
        method: Method,
        progress: float,
        health: StepHealth,
        observer: StepObserver,
    ) -> StepResult:
        """Make the updates of a step, which `health` may forbid and `observer` measures."""

        def critical(loss_fn: Callable[[], Tensor | float], factor: float | None) -> None:
            """Measure the critical sharpness of the first update."""
            clipped = ClippedUpdate(
                model=self.policy.model,
                optimizer=self.optimizer,
                loss_fn=loss_fn,
                clip_factor=factor,
            )
            observer.critical(clipped)

        rotates = self.observers.schedule.rotation.due(step) and not is_reference(method)
        return self.learner.learn(
            batch.rollouts,
            batch.advantage,
            step,
            progress,
            method=method,
            stats=batch.stats,
            before_first_update=health.allows_updates,
            before_step=observer,
            before_optimizer=critical,
            rotations=rotates,
        )

    def _after(self, step: int) -> None:
        """Evaluate, probe and save a checkpoint where these are due after a step."""
        config = self.config
        evaluated = config.evaluation.every
        saved = config.checkpoint.every
        if evaluated and (step % evaluated == 0 or step == config.steps):
            self._evaluate(step)
        self._probe(step)
        if saved and step % saved == 0 and step < config.steps:
            self.writer.flush()
            self._save(step)

    def _calibrated(self, step: int, batch: RolloutBatch, progress: float) -> Method:
        """The method of a step: constants of its token weight are fixed on the first rollouts, and run.json keeps them.

        Percentiles over the gradient wait for a step that has one. Until then the weights are 1: they would multiply 0.
        """
        if not self.method.weight.needs_calibration:
            return self.method
        found = calibrated(
            self.method,
            batch,
            self.learner.scorer.statistics(batch.rollouts),
            progress,
        )
        if found is None:
            text = "no token has a gradient yet: token weights are 1, and are calibrated at the first step with one"
            if text not in self.shown:
                self.shown.add(text)
                self._report([Event(step, "calibration", "info", math.nan, math.nan, "none", text)])
            return self.method.model_copy(update={"weight": UniformWeight()})
        self.method = found
        run_folder.note(self.config.run_dir, calibration=self.method.weight.model_dump(mode="json"))
        return self.method

    def _result_events(self, step: int, result: StepResult) -> Iterator[Event]:
        """Events of a step's updates: what is not finite, and warnings of the method."""
        for update in result.updates:
            if update.problem:
                value = update.loss if not math.isfinite(update.loss) else update.grad_norm
                self.broken = self.broken or update.broken
                value = update.update_norm if update.broken else value
                yield not_finite(self.config.health, step, update.problem, value, update.broken)
        for text in result.warnings:
            if text not in self.shown:
                self.shown.add(text)
                yield Event(step, "method", "warning", math.nan, math.nan, "warn", text)

    def _report(self, events: Sequence[Event]) -> None:
        """Write events to the trace and show them; one whose action is `stop` ends the run after this step."""
        self.rows.events(events)
        for event in events:
            self.display.event(event)
            if event.action == "stop" and not self.stop:
                self.stop = f"{event.rule}: {event.message}"

    def _probe(self, step: int) -> None:
        """Measure the loss surface and the entropy at fixed tokens at scheduled steps."""
        entropy = self.observers.entropy_row(step, self.learner.scorer)
        if entropy is not None:
            self.writer.append("probes", entropy)
        if self.observers.probe_set is not None and self.observers.surface.due(step):
            self.display.status(f"step {step}: probing the loss surface")
            with self.observers.schedule.surface.timed():
                tables, events = self.observers.surface.rows(step)
                for name, rows in tables.items():
                    self.writer.append(name, rows)
                self._report(events)

    def _evaluate(self, step: int) -> None:
        """Evaluate the policy and write the rows."""
        spec = self.config.evaluation
        if not spec.every:
            return
        rows = evaluate(
            self.policy,
            self.task,
            spec,
            self.config.rollout,
            step=step,
            seed=self.config.seed,
            on_progress=lambda text: self.display.status(f"step {step}: evaluating {text}"),
        )
        if rows:
            self.writer.append("eval", {name: [row[name] for row in rows] for name in rows[0]})
            self.display.evaluation(rows)
            self._report(
                judge(step, {"temperature_gap": temperature_gap(rows)}, self.config.health.limits)
            )
            self.writer.flush()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        self.display.status(f"step {step}: saving a checkpoint")
        progress = Progress(
            step,
            self.order.cursor,
            self.recent,
            self.quantities.rows,
            self.method.model_dump(mode="json"),
            sorted(self.shown),
            vars(self.learner.state),
            self.observers.state(),
        )
        save(self.config, self.policy, self.optimizer, progress)

    def _restore(self, checkpoint: Path) -> int:
        progress = restore(checkpoint, self.policy, self.optimizer)
        self.order.cursor = progress.cursor
        self.recent, self.quantities = (
            list(progress.recent_log_grad_norms),
            Quantities(progress.rows),
        )
        self.shown = set(progress.said)
        self.method = type(self.method).model_validate(known_settings(Method, progress.method))
        self.observers.restore(progress.measuring)
        vars(self.learner.state).update(progress.entropy_control)
        return step_of(checkpoint)


@contextmanager
def _stop_after_step(interrupt: Callable[[], None]) -> Iterator[None]:
    """Call `interrupt` at SIGINT and SIGTERM."""
    try:
        previous = {
            number: signal.signal(number, lambda *_: interrupt())
            for number in (signal.SIGINT, signal.SIGTERM)
        }
    except ValueError:  # not in the main thread, where the caller handles signals
        yield
        return
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
