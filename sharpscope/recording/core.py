"""The recorder of a training: what every recorder shares, whichever trainer makes the updates.

A recorder is told of batches of completions (`open_batch`), of the log-probabilities that the loss differentiates
(`StepCapture.use`), and of each update: `gradient_done` before clipping; hooks on the optimizer see the update itself. A step has
whole batches and whole updates. Its parts: `RecordedRun` is the folder, `StepCapture` the step in progress, `Observers` the
measurements, `StepHealth` the rules, and `StepWriter` makes the rows.
"""

from __future__ import annotations

import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Required, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedTokenizerBase

from sharpscope import distributed
from sharpscope.causes.recorded import Words
from sharpscope.config import RunConfig
from sharpscope.errors import UserError
from sharpscope.methods import Method, named_method
from sharpscope.policy import Rollouts, make_policy
from sharpscope.policy.forward import Scorer
from sharpscope.policy.guard import guarded
from sharpscope.policy.sharding import ModelView, is_sharded, unsharded
from sharpscope.recording.autopsy import MicroBatch, autopsy, broken_weights
from sharpscope.recording.capture import (
    LAYOUT,
    Batch,
    StepCapture,
    first_rows,
    odd_layout,
    prompt_texts,
    same_prompts,
    unused_tokens,
)
from sharpscope.recording.checks import (
    Circumstances,
    by_layer,
    check_shares,
    kl_of_step,
    measured_columns,
    written_rows,
)
from sharpscope.recording.guard import Guard, T, reason_of, say, warn_stopped
from sharpscope.recording.health import Quantities, StepHealth
from sharpscope.recording.live import (
    LiveCheck,
    OnFinding,
    TrainingStoppedError,
    WatchedTables,
    check_on_finding,
)
from sharpscope.recording.norms import (
    clip_factor,
    gradient_norm,
    gradient_norms,
    has_exact_steps,
    layer_groups,
    norms,
    update_norms,
)
from sharpscope.recording.observers import Observers, StepObserver
from sharpscope.recording.recorded_model import (
    check_language_model,
    dropout_of,
    first_forward,
    original_forward,
    statistics_of,
)
from sharpscope.recording.recorded_run import RecordedRun
from sharpscope.recording.rows import steps_row, written_groups
from sharpscope.recording.run_folder import note, peak_memory_bytes, run_info
from sharpscope.recording.schedule import RowSample, StepCost, measurement_plan
from sharpscope.recording.step import (
    PendingUpdate,
    RolloutBatch,
    StepResult,
    StepTokens,
    UpdateResult,
    UpdateRotation,
)
from sharpscope.recording.weighted import UNKNOWN, WeightedGradient
from sharpscope.recording.writer import EVERYTHING, OF_MODEL, FinishedStep, StepWriter
from sharpscope.rules.judging import Event
from sharpscope.settings import validate
from sharpscope.tasks import Example, Reward
from sharpscope.tokens import Clip
from sharpscope.tokens.optimizer_steps import batch_share, unwrapped
from sharpscope.traces.files import read_run_info

_CONFIG: dict[str, bool | set[str]] = {  # what readers use of a configuration
    **dict.fromkeys(("seed", "steps", "recording", "health"), True),
    "rollout": {"temperature"},
    "optimizer": {"lr"},
}


class Options(TypedDict, total=False):
    """What `Recorder` takes beyond model, tokenizer and folder."""

    task: Required[str]
    recording: Required[Mapping[str, object] | None]
    critical: Required[bool | int]
    temperature: float
    lr: float
    seed: int
    beta: float
    correct: Callable[[float], bool] | None
    max_grad_norm: float | None
    compute: torch.dtype | None
    rotate: Method | None
    on_finding: OnFinding | None


class Recorder(Guard):
    """Records a training. It changes nothing of it, and an error of its own ends the recording, not the training.

    `run_dir` is the run's folder once the training has begun, `method` what the rows say of the objective.
    """

    given: frozenset[str] = EVERYTHING - {"correct"}  # what the training gives
    fields = "sharpscope"  # the trainer's names of settings, as messages use them
    rules: Mapping[str, object] = {}  # changes of the health rules
    info: dict[str, object]  # entries of run.json: method, notes and trainer
    cost = StepCost()  # what a step does, for the price of measuring
    period = 1  # micro-steps (of a loop: updates) that use one batch of completions

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None,
        out: str | Path,
        *,
        task: str,
        recording: Mapping[str, object] | None,
        critical: bool | int,
        temperature: float = 1.0,
        lr: float = 1e-6,
        seed: int = 0,
        beta: float = 0.0,
        correct: Callable[[float], bool] | None = None,
        max_grad_norm: float | None = None,
        compute: torch.dtype | None = None,
        rotate: Method | None = None,
        on_finding: OnFinding | None = None,
    ) -> None:
        if tokenizer is None:
            raise UserError(
                "record: there is no tokenizer; pass it (to a trainer as processing_class=tokenizer)"
            )
        check_language_model(model)
        self.model = model
        self.task = task
        self.correct = correct
        self.max_grad_norm = max_grad_norm
        self.rotate = rotate
        self.temperature = temperature
        self._seen_limit: float | None = None
        self._lr = lr
        self._seed = seed
        self._every = critical
        self._options = dict(recording or {})
        with guarded(model), original_forward(model):
            source = getattr(getattr(model, "config", None), "_name_or_path", "")
            first_forward(model)
            with unsharded(model, layers=False):
                self.policy = make_policy(
                    model, tokenizer, str(source or type(model).__name__), compute=compute
                )
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        kl = {"kl": {"coef": beta}} if beta else {}
        self.method = Method.model_validate(named_method("grpo").model_dump() | kl)
        self.config = self.settings(1)
        self.scorer = Scorer(
            model, temperature, self.config.update.microbatch_tokens, False, compute=compute
        )
        self._serial = distributed.rank()
        self.capture = StepCapture()
        self.step_number = 1
        self.total = 0
        self._hooks = list[RemovableHandle]()
        check_on_finding(on_finding)
        self.on_finding, self.live = on_finding, cast(LiveCheck | None, None)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.run = RecordedRun(Path(out), self.identity())
        check_writable(self.run.out)

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.run.folder

    def identity(self) -> dict[str, object]:
        """What tells this training from others, so that a resumed one finds its run."""
        return {"model": self.policy.source, "seed": self._seed}

    # -- what a trainer says --------------------------------------------------------------------------------------------

    def settings(self, steps: int) -> RunConfig:
        """The part of a run's configuration that recording uses, for so many steps."""
        every = int(self._every)  # True: 1, at the places that the price allows
        probes: dict[str, object] = {"preset": "off"}
        if every:
            probes = {"preset": "light", "functionals": [], "every": every}
        recording: dict[str, object] = {
            "rotation_every": int(self.rotate is not None),
            "group_share": 1.0,
            "effects": "always",  # where the plan has them
        }
        data = {
            "seed": self._seed,
            "steps": max(1, steps),
            "task": {"kind": "custom", "factory": self.task},
            "rollout": {"temperature": self.temperature, "top_p": 1.0},
            # a first guess of the line search; a training's own rate may be any number
            "optimizer": {"lr": min(self._lr or 1e-12, 1.0)},
            "evaluation": {"every": 0},
            "checkpoint": {"every": 0},
            "health": self.rules,
            "probes": probes,
            "recording": {**recording, **self._options},
        }
        config = validate(RunConfig, data)
        for name in ("heldout_influence_every", "probe_entropy_every"):
            if getattr(config.recording, name, 0):
                raise UserError(
                    f"recording.{name}: a recorded trainer has no probe set; set it to 0"
                )
        if config.recording.rotation_every and self.rotate is None:
            raise UserError(
                "recording.rotation_every: say by which token weights, as record(..., rotation='grpo-sg')"
            )
        return config

    @abstractmethod
    def observe_update(self, observer: StepObserver) -> None:
        """Measure what needs the update's loss, before the optimizer's step and with the gradient clipped."""

    def unhook(self) -> None:
        """Remove what the recorder has put into the trainer: hooks on the optimizer."""
        with ExitStack() as each:  # the others too where one cannot be removed
            for hook in self._hooks:
                each.callback(hook.remove)

    def release(self) -> None:
        """Remove the hooks at the end; where that fails, say so and let the training go on."""
        try:
            self.unhook()
        except Exception as error:
            say(f"hooks of the recorder were not removed ({reason_of(error)})")

    def give_up(self, error: Exception) -> None:
        """End the recording because of an error of its own, with a warning; the training goes on."""
        with suppress(Exception):
            self.stop("interrupted", f"the recorder stopped: {reason_of(error)}", error)
        self.recording = False
        self.release()
        warn_stopped(self.step_number, error)

    # -- beginning and end ----------------------------------------------------------------------------------------------

    def begin(self, *optimizers: torch.optim.Optimizer, steps: int, done_updates: int = 0) -> None:
        """Create the run's folder, or go on in it after `done_updates` updates, and follow the optimizers."""
        self.optimizers = [unwrapped(optimizer) for optimizer in optimizers]
        self._find_parameters()  # FSDP2 has replaced them
        self._stepped = 0  # optimizers that have made their step of the present update
        self._update_started: float | None = None
        self.config = self.settings(steps)
        self.total = steps
        first_forward(self.model)
        opened = self.run.open(self._run_info(), self.policy.tokenizer, done_updates)
        self.step_number, self.capture = opened.step, StepCapture()
        self.recent: list[float] = []
        # mean |ln π of the trainer − ln π of the recorder| of the last step [nats]
        self.gap = math.inf
        self._reported: set[str] = set()
        self._quantities = Quantities()
        self.writer = StepWriter(
            self.run.tables, self.config.recording, self.policy.head, self.temperature, ids=True
        )
        if opened.resumed:
            last = self.step_number - 1
            text = f"the training went on from its update {done_updates}, after step {last} of this trace"
            event = Event(last, "resumed", "info", done_updates, math.nan, "none", text)
            self.writer.events([event])
        dtype = str(self.model.dtype).removeprefix("torch.")
        config = self.config.model_dump(mode="json", include=_CONFIG)
        config["optimizer"]["lr"] = self._lr or config["optimizer"]["lr"]
        model = {"policy": {"model": self.policy.source, "dtype": dtype}}
        note(self.run_dir, status="running", config=config | model)
        view = ModelView(self.model, self.parameters, self.optimizers[0])
        self.observers = Observers(self.config, self.policy, lambda: view)
        self._choose_places(steps)
        self._observed: list[StepObserver] = []
        if active := dropout_of(self.model):
            text = f"{active} is active: statistics, norms and shares are those of the model without dropout"
            self.warn_once("dropout", "info", text)
        self._name_unheld()
        Recorder.unhook(self)
        for optimizer in self.optimizers:
            before = optimizer.register_step_pre_hook(lambda *_: self._before_step())
            self._hooks += [
                before,
                optimizer.register_step_post_hook(lambda *_: self._after_step()),
            ]
        self._watch()
        self.recording = True

    def _find_parameters(self) -> None:
        """Take the model's trainable parameters, which a training may unfreeze on the way."""
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._groups = layer_groups(self.model)

    def _name_unheld(self) -> None:
        """Report trainable parameters that no optimizer holds, whose gradients make no update."""
        held = {id(p) for each in self.optimizers for g in each.param_groups for p in g["params"]}
        names = [
            n for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in held
        ]
        self._unheld = bool(names)
        if names:
            text = f"{len(names)} trainable parameters are in no optimizer that was given ({names[0]}, …)"
            self.warn_once(
                "unheld", "warning", f"{text}; their gradients count in norms and shares"
            )

    def _before_step(self) -> None:
        """An optimizer is about to make its step."""
        if self._stepped == 0:
            self.together(self.before_update)

    def _watch(self) -> None:
        """Check identities while the training goes on, where `on_finding` asks for it."""
        if self.on_finding is None or not distributed.is_rank_zero():
            return
        info = read_run_info(self.run_dir)
        folder = self.run_dir
        words = Words.read(folder / "tokenizer")
        self.live = LiveCheck(self.on_finding, info, words, str(folder))
        self.writer.tables = WatchedTables(self.writer.tables, self.live)
        self.writer.listeners.append(lambda number, _: self._check_live(number))

    def _check_live(self, number: int) -> None:
        """Check the identities after a step; a check that fails ends the checks, not the recording."""
        if self.live is None:
            return
        try:
            causes = self.live.step_done(number)
        except Exception as error:
            self.live = None
            self.warn_once("live_check", "warning", f"checks have ended: {reason_of(error)}")
            return
        for cause in causes:
            self.event("cause", "warning", cause.sentence)
        self.live.speak(causes)

    def _after_step(self) -> None:
        """An optimizer has made its step; the update is made by all of them. Where a finding ends the training, this does."""
        self._stepped = (self._stepped + 1) % len(self.optimizers)
        if self._stepped == 0:
            self.together(self.after_update)
        if self.live is not None and self.live.stopping and self.recording:
            self.halt(next(iter(self.live.found.values())).sentence)

    def halt(self, why: str) -> None:
        """End the training because of a finding.

        Raises:
            TrainingStoppedError: always, in a loop; a trainer ends by itself.
        """
        self.end(partial(self.stop, "interrupted", f"stopped at a finding: {why}"))
        raise TrainingStoppedError(why)

    def _run_info(self) -> dict[str, object]:
        """Contents of run.json."""
        launch = distributed.Launch(distributed.world_size(), is_sharded(self.model))
        return {
            **run_info(self.config, self.policy, torch.get_num_threads(), launch),
            "task": self.task,
            "rotation": self.rotate.name if self.rotate else None,
            "config": {},
            **self.info,
        }

    def _choose_places(self, steps: int) -> None:
        """Choose the places of what is measured by default."""
        schedule = self.observers.schedule
        options = self._options
        plan = measurement_plan(
            steps,
            self.cost,
            critical=self._every is True,
            rotation=self.rotate is not None,
            exact=self.config.recording.exact_tokens,
        )
        said = f"recording to {self.run_dir}"
        drawn = "groups"
        if "token_gradients_every" not in options:
            schedule.sample = RowSample(share=plan.sample, whole=plan.whole)
            schedule.shares.places, schedule.norms.places = plan.shares, plan.whole
            schedule.effects.places = plan.effects
            schedule.norms.at_spikes = "norms" in plan.spikes_with
            schedule.effects.at_spikes = "effects" in plan.spikes_with
            schedule.spikes.most = plan.spikes
            said = f"{said}: {plan.sentence}"
            drawn = "rows"
        if "rotation_every" not in options:
            schedule.rotation.places = plan.shares
        if self._every is True:
            schedule.critical.places = plan.critical
        say(f"{said} (see it with: sharpscope show {self.run_dir})")
        missing = {}
        for setting, what, times in (
            ("norms", "exact norms", schedule.norms),
            ("effects", "effects", schedule.effects),
            ("probes.preset", "critical sharpness", schedule.critical),
        ):
            if times.places is not None and not times.places:
                missing[setting] = f"{what}: {steps} steps do not pay for it; record(…, every=1)"
        places = sorted(schedule.shares.places or ())
        note(self.run_dir, places=places, sampled=drawn, not_measured=missing)

    def stop(self, status: str, reason: str, problem: Exception | None = None) -> None:
        """End the recording, because of a `problem` of the recorder, or with the updates made so far of a step in progress."""
        if not self.recording:
            return
        try:
            if problem is None and status != "failed" and self.capture.updates:
                self.close_step()
        except Exception as error:
            self.give_up(error)
            return
        self.recording = False
        if problem is not None:
            with suppress(Exception):  # the writer may be what has failed
                self.event("recorder", "error", reason_of(problem)[:300], action="stop")
        steps = self.step_number - 1
        self.run.end(
            status=status,
            steps_done=steps,
            end=reason,
            measuring=self.observers.schedule.summary(),
            peak_memory_bytes=peak_memory_bytes(self.policy.device),
        )
        say(f"{steps} steps recorded to {self.run_dir} (try: sharpscope show {self.run_dir})")

    def in_step(self, work: Callable[[], T]) -> T | None:
        """Do the work of one micro-batch, which exchanges values where weights are sharded."""
        return (self.together if is_sharded(self.model) else self.safely)(work)

    @property
    def progress(self) -> float:
        """Share of the training done."""
        return min((self.step_number - 1) / max(self.config.steps - 1, 1), 1.0)

    # -- batches and updates ------------------------------------------------------------------------------------------

    def open_batch(
        self,
        rollouts: Rollouts,
        advantage: Tensor,
        labels: Sequence[Hashable] | None = None,
        parts: Sequence[Mapping[str, float]] = (),
        measure: bool = True,
    ) -> Batch:
        """Add N completions with their rewards to the step, and measure their tokens' statistics before the update.

        `advantage` is (N,) or (N, T), `labels` (N,) names the rows' groups (None: those of the rollouts), `parts` (N,) are the rewards'.
        Without `measure` the caller fills the statistics in before the update.
        """
        self._serial += distributed.world_size()
        texts = prompt_texts(rollouts, self.policy.tokenizer)
        first = first_rows(rollouts)
        examples = [Example(texts[row], "", {}) for row in first]
        rewards = []
        for value, of in zip(rollouts.reward.tolist(), parts or [{}] * len(rollouts), strict=True):
            rewards.append(Reward(value, dict(of), bool(self.correct and self.correct(value))))
        share_prompt = len(first) < len(texts) and same_prompts(rollouts)
        scorer = replace(self.scorer, share_prompt=share_prompt)
        with statistics_of(self.model):
            if measure:
                stats = scorer.statistics(rollouts, divided=False)
            else:
                stats = scorer.zeros(rollouts)
        batch = RolloutBatch(examples, rollouts, rewards, advantage, None)
        labels = labels or [(self._serial, group) for group in rollouts.group.tolist()]
        made = Batch(self._serial, batch, unused_tokens(stats, advantage), list(labels))
        self.capture.batches.append(made)
        return made

    def gradient_done(self) -> None:
        """Run the measurements that are due; the gradient of an update is complete and not clipped."""
        started = time.perf_counter()
        step = self.capture
        if sum(p.requires_grad for p in self.model.parameters()) != len(self.parameters):
            self._find_parameters()
        step.collect(self.policy.device)
        if not step.pending:
            text = "the update's loss is made of none of the log-probabilities that are hooked: its class computes it in another way"
            raise UserError(
                f"{text}, which cannot be recorded; a loop gives tokens() the tensor of its loss"
            )
        step.keep_first_use()
        step.complete = True
        step.loss = math.fsum(map(float, step.losses)) if step.losses else math.nan
        found = gradient_norms(self.parameters, self._groups)
        step.norm, step.layers = found.total, found.layers
        kept = any(p.grad is not None for p in self.parameters)
        if not kept:
            step.norm, step.layers = math.nan, {}
            text = "no parameter has a gradient in .grad (DeepSpeed keeps it elsewhere): no norm, no shares"
            self.warn_once("no_gradient", "info", text)
        step.clip_factor = clip_factor(step.norm, self._limit)
        joined, tokens, update = step.pending_update(self._clips)
        observer = StepObserver(self.observers, self.step_number, joined.rollouts, self.recent)
        self._observed.append(observer)
        if step.norm == 0:
            text = "the gradient of an update is 0, so it has no shares and no critical sharpness"
            text = f"{text} (were all rewards of each group equal?)"
            self.warn_once("zero_gradient", "info", text, 0.0)
        if kept and math.isfinite(step.norm) and (math.isfinite(step.loss) or not step.losses):
            with original_forward(self.model):
                observer(update)
            if step.norm > 0:
                self._measure_rotation(joined, tokens, update)
                self.recent = [*self.recent[-49:], math.log(step.norm)]
        elif kept:
            text = "the loss or gradient of an update is not finite; lower the learning rate, or look at this step's tokens"
            value = step.norm if math.isfinite(step.loss) else step.loss
            self.warn_once("non_finite", "error", text, value)
            self._autopsy(value)
        step.seconds["recording_s"] += time.perf_counter() - started

    def _autopsy(self, value: float) -> None:
        """Write down what gave the first value that is not finite, once, before the training goes on or dies."""
        if "not_finite" in self._reported or is_sharded(self.model):
            return
        self._reported.add("not_finite")
        step = self.capture
        batches = []
        for micro, use in enumerate(step.pending):
            rows = use.rows.to(self.policy.device)
            rollouts = step.batch(use.serial).rollout_batch.rollouts.rows(rows)
            ids, present = rollouts.input_ids, rollouts.attention_mask
            batches.append(MicroBatch(micro=micro, input_ids=ids, attention_mask=present))
        text = autopsy(self.model, batches, step.not_finite)  # accelerate's autocast included
        self.event("not_finite", "error", text, value)
        self.flush()

    def _measure_rotation(
        self, batch: RolloutBatch, tokens: StepTokens, update: PendingUpdate
    ) -> None:
        """Measure how far a method's token weights would turn the update's gradient, where it is due."""
        times = self.observers.schedule.rotation
        if self.rotate is None or not times.due(self.step_number):
            return
        kl = self.capture.pending_values(update.loss_coef.shape[1], "kl_coef")
        why = ""
        if is_sharded(self.model):
            why = "FSDP2 has no whole gradient"
        elif bool(kl.isnan().any()):
            why = "the KL term's part of the coefficients is not known"
        if why:
            self.warn_once("rotation", "info", f"rotation is not measured: {why}")
            return
        started = time.perf_counter()
        weighted = WeightedGradient(self.rotate, self.temperature, self._seed)
        fixed = weighted.calibrated(batch, tokens, self.progress)
        if fixed is not weighted:
            self.rotate = fixed.method
            note(self.run_dir, calibration=fixed.method.weight.model_dump(mode="json"))
        turned = fixed.rotation(
            self.model,
            batch,
            tokens,
            update,
            kl,
            progress=self.progress,
            step=self.step_number,
        )
        seconds = time.perf_counter() - started
        times.seconds += seconds
        self.capture.rotation = UpdateRotation(turned, UNKNOWN, math.nan, seconds)

    @property
    def _clips(self) -> tuple[Clip, ...]:
        """How the gradient will be clipped, as far as it is known."""
        limit = self._limit
        return () if limit is None or math.isinf(limit) else (Clip(limit=limit),)

    @property
    def _limit(self) -> float | None:
        """What the gradient's norm is clipped to: as the trainer says, or as the updates of a loop have shown."""
        return self._seen_limit if self.max_grad_norm is None else self.max_grad_norm

    def _see_clipping(self, step: StepCapture) -> None:
        """Remember how a loop clips; effects that were measured on another assumption are left out."""
        factor = step.unscaled(gradient_norm(self.parameters) / step.norm)
        step.clip_factor = factor if factor < 1 - 1e-6 else 1.0
        assumed = clip_factor(step.norm, self._seen_limit)
        if abs(step.clip_factor - assumed) < 1e-3 * assumed:
            return
        clips = step.clip_factor < 1.0
        self._seen_limit = step.clip_factor * (step.norm + Clip.slack) if clips else None
        if self._observed[-1].forget("effect_"):
            text = "effects are left out of an update that the loop clips in another way than those before it"
            self.warn_once("effects", "info", f"{text}; later updates have them")

    def before_update(self) -> None:
        """The optimizer is about to make its step, with the gradient clipped."""
        step = self.capture
        if not step.pending:
            return
        if not step.complete:
            raise UserError(
                "optimizer.step() came without recorder.step(loss) between it and backward()"
            )
        started = time.perf_counter()
        if self.max_grad_norm is None and step.norm > 0 and math.isfinite(step.norm):
            self._see_clipping(step)
        due = not step.updates and self.observers.critical_due(self.step_number)
        if due and math.isfinite(step.norm) and len(self.optimizers) == 1:
            self.observe_update(self._observed[-1])
        step.seconds["recording_s"] += time.perf_counter() - started
        self._update_started = time.perf_counter()
        self._lr = float(self.optimizers[0].param_groups[0]["lr"])
        exact = len(self.optimizers) == 1 and has_exact_steps(self.optimizers[0])
        self._weights_before = None if exact else [p.detach().clone() for p in self.parameters]

    def after_update(self) -> None:
        """The optimizer has made its step; gradients are not cleared."""
        step = self.capture
        if not step.pending:
            return
        done = time.perf_counter()
        if self._update_started is None:
            raise UserError(
                "optimizer.step(closure) computes the gradient within the step; compute it before, and call step()"
            )
        step.seconds["training_s"] += done - self._update_started
        self._update_started = None
        if self._weights_before is None:
            moved = update_norms(self.optimizers[0], self._groups)
        else:
            pairs = zip(self.parameters, self._weights_before, strict=True)
            moved = norms(((p, p.detach() - kept) for p, kept in pairs), self._groups)
        if not math.isfinite(moved.total):
            text = "an update made model weights that are not finite; lower the learning rate"
            self.warn_once("non_finite", "error", text, moved.total)
        step.record_update(
            UpdateResult(
                loss=step.loss,
                grad_norm=step.norm,
                plain_norm=step.norm,
                update_norm=moved.total,
                clip_factor=step.clip_factor,
                skipped=False,
                lr=self._lr,
                summary=step.pending_tokens().summary(),
                rotation=step.rotation,
                layers=(step.layers, moved.layers),
                batch_share=batch_share(self.optimizers[0])
                if len(self.optimizers) == 1
                else math.nan,
            )
        )
        half = self.model.dtype == torch.float16 and "not_finite" not in self._reported
        if half and (text := broken_weights(self.model)):
            self._reported.add("not_finite")
            self.event("not_finite", "error", f"{text}: float16 overflow in the update")
        step.seconds["recording_s"] += time.perf_counter() - done
        if step.micro % self.period == 0:
            self.close_step()

    def drop_update(self) -> None:
        """Forget the tokens of an update whose gradient was complete and that the optimizer did not make."""
        step = self.capture
        if not (step.pending and step.complete):
            return
        step.drop_pending()
        self._observed.pop()
        self._reported -= {"not_finite"}  # a GradScaler leaves such updates out
        text = (
            "an update was not made: its gradient was complete, and optimizer.step() did not come"
        )
        self.event("skipped_update", "warning", f"{text} (a guard, or an overflow of a GradScaler)")
        if step.micro % self.period == 0:
            if step.updates:
                self.close_step()
            else:
                self.capture = StepCapture()
                self._observed = []

    # -- writing a step ------------------------------------------------------------------------------------------------

    def close_step(self) -> None:
        """Write the step's rows; another one begins."""
        started = time.perf_counter()
        step = self.capture
        finished = self._finished_step()

        def seconds() -> dict[str, float]:
            """The step's time by part, but for the rows of its last tables."""
            step.seconds["recording_s"] += time.perf_counter() - started
            return step.seconds

        for observer in self._observed:
            self.writer.events(observer.events)
        self.writer.write(finished, seconds)
        probing = sum(observer.seconds for observer in self._observed)
        training = step.seconds["generation_s"] + step.seconds["training_s"]
        tables = step.seconds["recording_s"] - probing
        self.observers.schedule.end_step(training=training, tables=tables)
        self.step_number, self.capture, self._observed = self.step_number + 1, StepCapture(), []
        self.run.flush_in_time(self.step_number - 1)

    def _finished_step(self) -> FinishedStep:
        """The step in progress with what was measured of it, checked; events say what the checks found."""
        step, number = self.capture, self.step_number
        batch, tokens, first = step.joined()
        self._check_gap()
        measured = measured_columns(self._observed, tokens.update)
        again = {index for index, _, _ in step.again}
        earlier = self.recent[: max(0, len(self.recent) - len(step.updates))]
        known = Circumstances(
            model=self.model,
            norms=[update.grad_norm for update in step.updates],
            before=math.exp(earlier[-1]) if earlier else math.nan,
            unheld=self._unheld,
            first=number == 1,
        )
        self.writer.events(check_shares(number, measured, tokens.update, again, known))
        kl = None
        # with FSDP2 a forward pass before zero_grad would change the training
        if "generation" in self.given and not is_sharded(self.model):
            with statistics_of(self.model):  # a group may have several prompts
                kl = kl_of_step(batch.rollouts, tokens.stats.logp, self._logp)
        result = StepResult(step.updates, tokens, corrected=step.corrected, kl_step=kl)
        row = steps_row(number, batch, result, self.method, self.progress, self._lr)
        # 0 where the trainer leaves a completion out of the loss
        counted = batch.rollouts.completion_mask.sum(1)
        lengths = torch.where(counted > 0, counted, batch.rollouts.lengths)
        row["completion_length_mean"] = float(lengths.double().mean())
        self._judge(batch, tokens, row)
        spec = self.config.recording
        sample = written_groups(batch.rollouts, spec.token_rows, self._seed, number)
        spiked = any(observer.spike for observer in self._observed)
        return FinishedStep(
            number=number,
            batch=batch,
            result=result,
            row=row,
            measured=measured,
            by_layer=by_layer(self._observed),
            written=written_rows(self._observed, len(batch.rollouts), spiked, sample),
            probes=[observer.rows for observer in self._observed if observer.rows],
            later_uses=step.later_uses(first),
            given=self._given(),
        )

    def _given(self) -> frozenset[str]:
        """What the training has given in this step."""
        given = self.given | OF_MODEL
        if self.correct is not None:
            given |= {"correct"}
        for batch in self.capture.batches:
            if bool(batch.rollout_batch.rollouts.behavior_logp.isnan().all()):
                return given - {"behavior_logp"}
        return given | {"behavior_logp"}

    def _logp(self, rollouts: Rollouts) -> Tensor:
        """Ln π (n, T) at the present weights."""
        return self.scorer.statistics(rollouts, divided=False).logp

    def check_layout(self, ids: Tensor, present: Tensor, counted: Tensor) -> None:
        """Report once where end tokens and padding of a micro-batch (n, L) are oddly in the loss, or out of it."""
        tokens = self.policy.eos_ids, self.policy.pad_id
        for name, share in odd_layout(ids, present, counted, *tokens).items():
            if share > 0.1:
                self.warn_once(name, "warning", LAYOUT[name], share)

    def _check_gap(self) -> None:
        """Report where the trainer's log-probabilities are not those of the recorder."""
        if not self.capture.gaps:
            return
        self.gap = float(torch.cat(self.capture.gaps).mean())
        limit = self.config.health.limits["logp_mismatch"].threshold
        text = (
            "the trainer's log-probabilities are not those of the recorder's forward pass (dropout, positions of padded "
            "prompts, kernels, another loss): loss_coef and ratio are the trainer's, statistics, weights and attribution "
            "the recorder's"
        )
        unpadded = self.capture.unpadded_gaps
        if unpadded and float(torch.cat(unpadded).mean()) < limit / 10:
            text += "; in rows without padding they agree"
        if self.gap > limit:
            self.event("trl_statistics", "warning", text, self.gap, limit)

    def _judge(self, batch: RolloutBatch, tokens: StepTokens, row: Mapping[str, object]) -> None:
        """Apply the health rules. They only report here: a recorded training is never stopped."""
        health = StepHealth(
            self.config.health,
            self.step_number,
            batch,
            self.method,
            self.progress,
            self.policy.device,
            vocabulary=self.policy.head.weight.shape[0],
            trainer=self.fields,
            lr=self._lr,
            quantities=self._quantities,
        )
        health.before_updates(tokens.stats, tokens.weight)
        health.after_updates(row)
        self.writer.events(health.events)
        self._quantities.rows.append(health.values)

    def flush(self) -> None:
        """Write the rows of the finished steps to the run's folder."""
        self.run.flush(self.step_number - 1)

    def event(
        self,
        rule: str,
        severity: str,
        text: str,
        value: float = math.nan,
        limit: float = math.nan,
        action: str = "warn",
    ) -> None:
        """Report something at the present step."""
        self.writer.events([Event(self.step_number, rule, severity, value, limit, action, text)])

    def warn_once(self, rule: str, severity: str, text: str, value: float = math.nan) -> None:
        """Report something once."""
        if text not in self._reported:
            self._reported.add(text)
            self.event(rule, severity, text, value)


def check_writable(out: Path) -> None:
    """Refuse a folder that cannot be made before anything is changed."""
    parent = next(p for p in [out, *out.absolute().parents] if p.exists())
    if not os.access(parent, os.W_OK) or (parent != out and not parent.is_dir()):
        raise UserError(f"record: out = {out} cannot be written; choose another folder")
