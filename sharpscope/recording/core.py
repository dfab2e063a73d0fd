"""The recorder of a training loop: what every recorder shares, whichever trainer makes the updates.

A recorder is told of batches of completions (`Step.batches`), of the log-probabilities that the loss differentiates
(`Step.use`), and of each update: `gradient_done` before clipping; hooks on the optimizer see the update itself. A step has whole
batches and whole updates.
"""

from __future__ import annotations

import math
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.config import RunConfig
from sharpscope.errors import UserError
from sharpscope.methods import Method, named_method
from sharpscope.methods.plan import calibrate, prepare
from sharpscope.methods.token_weights import UniformWeight
from sharpscope.policy import Rollouts, make_policy
from sharpscope.policy.directions import Rotation, rotation
from sharpscope.policy.forward import Scorer
from sharpscope.policy.guard import guarded
from sharpscope.policy.sharding import ModelView, is_sharded, reshard, unsharded
from sharpscope.recording import run_folder
from sharpscope.recording.guard import Guard, T, reason_of, warn_stopped
from sharpscope.recording.health import Quantities, StepHealth
from sharpscope.recording.norms import (
    clip_factor,
    gradient_norm,
    gradient_norms,
    layer_groups,
    norms,
    update_norms,
)
from sharpscope.recording.observers import Observers, StepObserver
from sharpscope.recording.rows import (
    id_columns,
    rollout_columns,
    steps_row,
    token_columns,
    update_columns,
    written_groups,
)
from sharpscope.recording.run_folder import NoWriter, note, run_info, trace_writer
from sharpscope.recording.step import (
    PendingUpdate,
    RolloutBatch,
    StepResult,
    StepTokens,
    UpdateRotation,
    step_tensors,
)
from sharpscope.recording.steps import (
    Batch,
    Step,
    Work,
    first_rows,
    places,
    prompt_texts,
    same_prompts,
    unused_tokens,
    widened,
)
from sharpscope.rules.judging import Event
from sharpscope.seeds import generator
from sharpscope.settings import validate
from sharpscope.tasks import Example, Reward
from sharpscope.tokens import logp_gradient
from sharpscope.traces import (
    RunLock,
    TraceWriter,
    create_run_dir,
    create_run_info,
    free_name,
    load_run,
    rewind,
)
from sharpscope.traces.files import RUN_FILE, now

SHARES_GAP, SHARES_WITHHELD = 0.02, 0.1
"""How far the tokens' shares of an update may sum from 1 before an event says so, and before they are left out."""
FLUSH_S = 2.0
"""Rows are written to the folder after a step when this long has passed since the last time [s], and before the trainer saves."""
KL_ROWS = 4
"""Completions on which the divergence over a whole step is measured."""
_CONFIG: Any = dict.fromkeys(("seed", "steps", "recording", "health"), True)
_CONFIG |= {"rollout": {"temperature"}, "optimizer": {"lr"}}  # what readers use of a configuration
_CLIPS = ("clip_fraction_low", "clip_fraction_high")
_ABSENT: dict[str, dict[str, tuple[str, ...]]] = {
    "rewards": {"steps": ("reward_mean", "reward_std", "zero_std_groups"), "rollouts": ("reward",)},
    "advantages": {"rollouts": ("advantage",), "tokens": ("advantage",)},
    "old_logp": {
        "steps": _CLIPS,
        "updates": (*_CLIPS, "kl_old_k3", "ratio_min", "ratio_max"),
        "tokens": ("ratio", "clipped"),
    },
    "ref_logp": {"steps": ("kl",)},
    "loss": {"steps": ("loss",), "updates": ("loss",)},
    "weights": {"steps": ("weight_mean",), "tokens": ("weight",)},
    "generation": {"steps": ("truncated_fraction", "kl_step"), "rollouts": ("truncated",)},
    "timing": {"steps": ("generation_s",)},
}
"""What a training does not give -> table -> columns that are then null."""


class Recorder(Guard):
    """Records a training. It changes nothing of it, and an error of its own ends the recording, not the training.

    `run_dir` is the run's folder once the training has begun, `method` what the rows say of the objective.
    """

    given: frozenset[str] = frozenset(_ABSENT)  # what the training gives
    fields = "sharpscope"  # the trainer's names of settings, as messages use them
    rules: Mapping[str, Any] = {}  # changes of the health rules
    info: dict[str, Any]  # entries of run.json: method, notes and trainer
    work = Work()  # what a step does, for the price of measuring
    period = 1  # micro-steps (of a loop: updates) that use one batch of completions

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        out: str | Path,
        *,
        task: str,
        recording: Mapping[str, Any] | None,
        critical: bool | int,
        temperature: float = 1.0,
        lr: float = 1e-6,
        seed: int = 0,
        beta: float = 0.0,
        correct: Callable[[float], bool] | None = None,
        max_grad_norm: float | None = None,
        compute: torch.dtype | None = None,
        rotate: Method | None = None,
    ) -> None:
        if tokenizer is None:
            raise UserError(
                "record: there is no tokenizer; pass it (to a trainer as processing_class=tokenizer)"
            )
        self.model, self.out, self.task, self.correct = model, Path(out), task, correct
        self.max_grad_norm, self._lr, self.rotate = max_grad_norm, lr, rotate
        self.temperature, self._seed, self._options, self._every = (
            temperature,
            seed,
            dict(recording or {}),
            critical,
        )
        with guarded(model), original_forward(model):
            source = str(
                getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
            )
            first_forward(model)
            with unsharded(model, layers=False):
                self.policy = make_policy(model, tokenizer, source, compute=compute)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        kl = {"kl": {"coef": beta}} if beta else {}
        self.method = Method.model_validate(named_method("grpo").model_dump() | kl)
        self.config = self.settings(1)
        self.scorer = Scorer(
            model, temperature, self.config.update.microbatch_tokens, False, compute=compute
        )
        self.run_dir = self.out
        self._serial = distributed.rank()
        self._step, self.step_number, self.total = Step(), 1, 0
        self._stack, self._hooks = ExitStack(), list[Any]()
        self.optimizer: Any = None
        self.writer: TraceWriter | NoWriter = NoWriter()
        parent = next(p for p in [self.out, *self.out.absolute().parents] if p.exists())
        if not os.access(parent, os.W_OK) or (parent != self.out and not parent.is_dir()):
            raise UserError(f"record: out = {out} cannot be written; choose another folder")

    # -- what a trainer says --------------------------------------------------------------------------------------------

    def settings(self, steps: int) -> RunConfig:
        """The part of a run's configuration that recording uses, for so many steps."""
        every = int(self._every)  # True: 1, at the places that the price allows
        data = {
            "seed": self._seed,
            "steps": max(1, steps),
            "task": {"kind": "custom", "factory": self.task},
            "rollout": {"temperature": self.temperature, "top_p": 1.0},
            "optimizer": {"lr": self._lr or 1e-12},
            "evaluation": {"every": 0},
            "checkpoint": {"every": 0},
            "health": self.rules,
            "probes": {"preset": "light", "functionals": [], "every": every}
            if every
            else {"preset": "off"},
            "recording": {
                "rotation_every": int(self.rotate is not None),
                "group_share": 1.0,
                **self._options,
            },
        }
        config: RunConfig = validate(RunConfig, data)
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
        for hook in self._hooks:
            hook.remove()

    def give_up(self, error: Exception) -> None:
        """End the recording because of an error of its own, with a warning; the training goes on."""
        with suppress(Exception):
            self.stop("interrupted", f"the recorder stopped: {reason_of(error)}", error)
        self.recording = False
        self.unhook()
        warn_stopped(self.step_number, error)

    # -- beginning and end ----------------------------------------------------------------------------------------------

    def begin(self, optimizer: Any, steps: int, done_updates: int = 0) -> None:
        """Create the run's folder, or go on in it after `done_updates` updates, and follow the optimizer."""
        self.optimizer = optimizer
        # FSDP2 has replaced them
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._groups = layer_groups(self.model)
        self._adam = isinstance(optimizer, torch.optim.AdamW) and not any(
            g["amsgrad"] for g in optimizer.param_groups
        )
        self.config, self.total = self.settings(steps), steps
        first_forward(self.model)
        opened = distributed.rank_zero_call(lambda: self._open_folder(done_updates))
        self.run_dir, self.step_number, resumed = opened
        self._started, self._flushed, self._step = time.perf_counter(), -math.inf, Step()
        self.recent: list[float] = []
        # mean |ln π of the trainer − ln π of the recorder| of the last step [nats]
        self.gap = math.inf
        self._reported: set[str] = set()
        self._quantities = Quantities()
        if distributed.is_rank_zero():
            self._stack.enter_context(RunLock(self.run_dir))
        _say(f"recording to {self.run_dir} (see it with: sharpscope show {self.run_dir})")
        self.writer = trace_writer(self.run_dir)
        self._stack.enter_context(self.writer)
        if resumed:
            last, text = (
                self.step_number - 1,
                f"the training went on from its update {done_updates}",
            )
            text = f"{text}, after step {last} of this trace"
            self._report(Event(last, "resumed", "info", done_updates, math.nan, "none", text))
        dtype = str(self.model.dtype).removeprefix("torch.")
        config = self.config.model_dump(mode="json", include=_CONFIG)
        note(
            self.run_dir,
            status="running",
            config=config | {"policy": {"model": self.policy.source, "dtype": dtype}},
        )
        view = ModelView(self.model, self.parameters, optimizer)
        self.observers = Observers(self.config, self.policy, lambda: view)
        self._choose_places(steps)
        self._observed: list[StepObserver] = []
        if active := dropout_of(self.model):
            text = f"{active} is active: statistics, norms and shares are those of the model without dropout"
            self._warn("dropout", "info", text)
        Recorder.unhook(self)
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self.together(self.before_update)),
            optimizer.register_step_post_hook(lambda *_: self.together(self.after_update)),
        ]
        self.recording = True

    def _choose_places(self, steps: int) -> None:
        """Choose the places of what is measured by default."""
        schedule, options = self.observers.schedule, self._options
        exact = self.config.recording.exact_tokens
        plan = places(
            steps,
            self.work,
            critical=self._every is True,
            rotation=self.rotate is not None,
            exact=exact,
        )
        every = "recording={'token_gradients_every': 1}, critical_sharpness=1"
        why = f"{plan.reason}; to measure every step: {every}"
        if "token_gradients_every" not in options:
            schedule.at |= {"norms": plan.norms, "shares": plan.norms}
            schedule.most_spikes = plan.spikes
        if "rotation_every" not in options:
            schedule.at["rotation"] = plan.norms
        if self._every is True:
            schedule.at["surface"] = plan.critical
        settings = {"recording.token_gradients_every": "norms", "probes.preset": "surface"}
        reasons = {
            name: why
            for name, measure in settings.items()
            if schedule.at.get(measure, {1}) == set()
        }
        note(self.run_dir, places=sorted(schedule.at.get("norms", ())), not_measured=reasons)
        if reasons:
            what = (
                "norms, shares and critical sharpness" if len(reasons) > 1 else "critical sharpness"
            )
            _say(f"not measured: {what}, since {why}")

    def _open_folder(self, done_updates: int) -> tuple[Path, int, bool]:
        """The run's folder, its next step and whether it goes on; rows of updates that a resumed training makes again are removed."""
        # of this trainer's last training, if it had one
        if done_updates and (self.run_dir / RUN_FILE).exists():
            with RunLock(self.run_dir):
                counts = load_run(self.run_dir).updates.groupby("step").size().cumsum()
                step = (
                    int(counts.index[counts <= done_updates].max())
                    if (counts <= done_updates).any()
                    else 0
                )
                rewind(self.run_dir, step)
            return self.run_dir, step + 1, True
        folder = create_run_dir(free_name(self.out))
        self.policy.tokenizer.save_pretrained(folder / "tokenizer")
        launch = distributed.Launch(distributed.world_size(), is_sharded(self.model))
        info = run_info(self.config, self.policy, torch.get_num_threads(), launch)
        named: dict[str, Any] = {
            "task": self.task,
            "rotation": self.rotate.name if self.rotate else None,
            "config": {},
        }
        create_run_info(folder, info | named | self.info)
        return folder, 1, False

    def stop(self, status: str, reason: str, problem: Exception | None = None) -> None:
        """End the recording, because of a `problem` of the recorder, or with the updates made so far of a step in progress."""
        if not self.recording:
            return
        try:
            if problem is None and status != "failed" and self._step.updates:
                self._close_step()
        except Exception as error:
            self.give_up(error)
            return
        self.recording = False
        if problem is not None:
            with suppress(Exception):  # the writer may be what has failed
                self._event("recorder", "error", reason_of(problem)[:300], action="stop")
        try:
            self._stack.close()  # flushes and unlocks
        finally:
            steps, seconds = self.step_number - 1, round(time.perf_counter() - self._started, 3)
            cost = {"seconds": seconds, "measuring": self.observers.schedule.summary()}
            cost["peak_memory_bytes"] = run_folder.peak_memory_bytes(self.policy.device)
            note(self.run_dir, status=status, steps_done=steps, finished=now(), end=reason, **cost)
        _say(
            f"{self.step_number - 1} steps recorded to {self.run_dir} (try: sharpscope show {self.run_dir})"
        )

    def in_step(self, work: Callable[[], T]) -> T | None:
        """Do the work of one micro-batch, which exchanges values where weights are sharded."""
        return (self.together if is_sharded(self.model) else self.safely)(work)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context for statistics of tokens: weights outside the layers are gathered, the model's state is restored afterwards."""
        if is_sharded(self.model):
            distributed.gather(None)
        with unsharded(self.model, layers=False), guarded(self.model), torch.no_grad():
            yield

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
        texts, first = prompt_texts(rollouts, self.policy.tokenizer), first_rows(rollouts)
        examples = [Example(texts[row], "", {}) for row in first]
        each = zip(rollouts.reward.tolist(), parts or [{}] * len(rollouts), strict=True)
        rewards = [
            Reward(v, dict(of), bool(self.correct(v)) if self.correct else False) for v, of in each
        ]
        with self.whole():
            scorer = replace(
                self.scorer, share_prompt=len(first) < len(texts) and same_prompts(rollouts)
            )
            stats = (
                scorer.statistics(rollouts, divided=False) if measure else scorer.zeros(rollouts)
            )
        batch = RolloutBatch(examples, rollouts, rewards, advantage, None)
        labels = labels or [(self._serial, group) for group in rollouts.group.tolist()]
        made = Batch(self._serial, batch, unused_tokens(stats, advantage), list(labels))
        self._step.batches.append(made)
        return made

    def gradient_done(self) -> None:
        """Run the probes that are due; the gradient of an update is complete and not clipped."""
        started, step = time.perf_counter(), self._step
        step.collect(self.policy.device)
        if not step.pending:
            text = "the update's loss is made of none of the log-probabilities that are hooked: its class computes it in another way"
            raise UserError(
                f"{text}, which cannot be recorded; a loop gives tokens() the tensor of its loss"
            )
        step.settle()
        loss = math.fsum(float(loss) for loss in step.losses) if step.losses else math.nan
        found = gradient_norms(self.parameters, self._groups)
        norm, step.layers = found.total, found.layers
        kept = any(p.grad is not None for p in self.parameters)
        if not kept:
            norm, step.layers = math.nan, {}
            text = "no parameter has a gradient in .grad (DeepSpeed keeps it elsewhere): no norm, no shares"
            self._warn("no_gradient", "info", text)
        factor = clip_factor(norm, self.max_grad_norm)
        step.gradient = (loss, norm, factor)
        joined, tokens, update = step.pending_update()
        self._observed.append(
            StepObserver(self.observers, self.step_number, joined.rollouts, self.recent)
        )
        if norm == 0:
            text = "the gradient of an update is 0, so it has no shares and no critical sharpness"
            self._warn(
                "zero_gradient", "info", f"{text} (were all rewards of each group equal?)", 0.0
            )
        if kept and math.isfinite(norm) and (math.isfinite(loss) or not step.losses):
            with original_forward(self.model):
                self._observed[-1](update)
            if (
                self.rotate is not None
                and norm > 0
                and self.observers.schedule.due("rotation", self.step_number)
            ):
                step.rotation = self._rotation(joined, tokens, update)
            self.recent = [*self.recent[-49:], *([math.log(norm)] if norm else [])]
        elif kept:
            text = "the loss or gradient of an update is not finite; lower the learning rate, or look at this step's tokens"
            self._warn("non_finite", "error", text, norm if math.isfinite(loss) else loss)
        step.seconds["recording_s"] += time.perf_counter() - started

    def _rotation(
        self, batch: RolloutBatch, tokens: StepTokens, update: PendingUpdate
    ) -> UpdateRotation | None:
        """How far a method's token weights w would turn the update's gradient g: g + Σ (w − 1)·c·∇log π against g.

        c is a token's coefficient without its KL term: that and terms of the loss that no token has stay as they are.
        """
        started, width = time.perf_counter(), update.loss_coef.shape[1]
        kl = self._step.pending_values(width, "kl_coef")
        sharded = is_sharded(self.model)
        if sharded or bool(kl.isnan().any()):
            why = (
                "FSDP2 has no whole gradient"
                if sharded
                else "the KL term's part of the coefficients is not known"
            )
            self._warn("rotation", "info", f"rotation is not measured: {why}")
            return None
        assert self.rotate is not None
        method, stats = self.rotate, tokens.stats
        tensors = step_tensors(
            batch.rollouts, batch.advantage, stats, stats.logp, self.progress, method
        )
        weighted = method
        if method.weight.needs_gradient and not bool(tensors.mass.any()):
            # they would multiply 0
            weighted = method.model_copy(update={"weight": UniformWeight()})
        elif method.weight.needs_calibration:  # by the first batch
            weighted = self.rotate = method.model_copy(
                update={"weight": calibrate(method.weight, tensors)}
            )
            note(self.run_dir, calibration=weighted.weight.model_dump(mode="json"))
        plan = prepare(weighted, tensors, generator(self._seed, "plan", self.step_number))
        factor = (plan.weight * plan.keep.to(plan.weight)).cpu()[update.rows, :width]
        coef = (factor - 1) * (update.loss_coef - kl)  # (n, T)
        rollouts = batch.rollouts.rows(update.rows.to(batch.rollouts.group.device))
        prompt = torch.zeros_like(rollouts.input_ids[:, : rollouts.prompt_width])
        mask = torch.cat([prompt, rollouts.completion_mask], 1)  # (n, P+T)
        wide = torch.cat([prompt.to(coef.dtype), coef.to(prompt.device)], 1)
        rows = distributed.local_slice(len(mask))
        with original_forward(self.model):
            ids, there = rollouts.input_ids[rows], rollouts.attention_mask[rows]
            change = logp_gradient(self.model, ids, mask[rows], wide[rows], there, self.temperature)
        distributed.gather(None)  # before the sum, in which a process that has failed takes no part
        change = distributed.sum_tensors(change)
        plain = [
            torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in self.parameters
        ]
        turned = [more.add_(gradient) for more, gradient in zip(change, plain, strict=True)]
        seconds = time.perf_counter() - started
        self.observers.schedule.spend("rotation", seconds)
        return UpdateRotation(
            rotation(turned, plain), Rotation(math.nan, math.nan), math.nan, seconds
        )

    def before_update(self) -> None:
        """The optimizer is about to make its step, with the gradient clipped."""
        if not self._step.pending:
            return
        started = time.perf_counter()
        loss, norm, factor = self._step.gradient
        # the loop's clipping is not known
        if self.max_grad_norm is None and norm > 0 and math.isfinite(norm):
            now_ = gradient_norm(self.parameters) / norm
            factor = now_ if now_ < 1 - 1e-6 else 1.0
            self._step.gradient = (loss, norm, factor)
        if (
            not self._step.updates
            and math.isfinite(norm)
            and self.observers.critical_due(self.step_number)
        ):
            self.observe_update(self._observed[-1])
        self._step.seconds["recording_s"] += time.perf_counter() - started
        self._update_started = time.perf_counter()
        self._lr = float(self.optimizer.param_groups[0]["lr"])
        self._weights_before = None if self._adam else [p.detach().clone() for p in self.parameters]

    def after_update(self) -> None:
        """The optimizer has made its step; gradients are not cleared."""
        if not self._step.pending:
            return
        done = time.perf_counter()
        self._step.seconds["training_s"] += done - self._update_started
        if self._weights_before is None:
            moved = update_norms(self.optimizer, self._groups)
        else:
            pairs = zip(self.parameters, self._weights_before, strict=True)
            moved = norms(((p, p.detach() - kept) for p, kept in pairs), self._groups)
        self._step.record_update(moved, self._lr)
        self._step.seconds["recording_s"] += time.perf_counter() - done
        if self._step.micro % self.period == 0:
            self._close_step()

    # -- writing a step ------------------------------------------------------------------------------------------------

    def _close_step(self) -> None:
        started, step, number = time.perf_counter(), self._step, self.step_number
        batch, tokens, first = step.joined()
        if step.gaps:
            self.gap = float(torch.cat(step.gaps).mean())
            limit = self.config.health.limits["logp_mismatch"].threshold
            text = "the trainer's log-probabilities are not those of the recorder's forward pass (dropout, positions of padded "
            text += "prompts, kernels, another loss): loss_coef and ratio are the trainer's, statistics, weights and attribution "
            if self.gap > limit:
                self._event("trl_statistics", "warning", text + "the recorder's", self.gap, limit)
        probed = self._probed(tokens.update)
        self._check_shares(probed, tokens.update, {index for index, _, _ in step.again})
        method = self.method
        progress = self.progress
        kl = self._kl_step(batch, tokens.stats.logp) if "generation" in self.given else None
        result = StepResult(step.updates, tokens, corrected=step.corrected, kl_step=kl)
        row = steps_row(number, batch, result, method, progress, self._lr)
        # 0 where the trainer leaves a completion out of the loss
        counted = batch.rollouts.completion_mask.sum(1)
        lengths = torch.where(counted > 0, counted, batch.rollouts.lengths)
        row |= {"completion_length_mean": float(lengths.double().mean())}
        if self.correct is None:
            row |= {"accuracy": None, "accuracy_completed": None}
        said: dict[str, Any] = {
            "trainer": self.fields,
            "lr": self._lr,
            "quantities": self._quantities,
        }
        size, device = self.policy.head.weight.shape[0], self.policy.device
        health = StepHealth(
            self.config.health, number, batch, method, progress, device, vocabulary=size, **said
        )
        health.before_updates(tokens.stats, tokens.weight)
        health.after_updates(row)
        # the rules only report here: a recorded training is never stopped
        self._report(*health.events)
        self._quantities.rows.append(health.values)
        spec = self.config.recording
        if spec.rollouts_every and number % spec.rollouts_every == 0:
            columns = rollout_columns(number, batch) | id_columns(batch.rollouts)
            self._append("rollouts", columns if self.correct else columns | {"correct": None})
        if probed or (spec.tokens_every and number % spec.tokens_every == 0):
            layers = {at: values for one in self._observed for at, values in one.by_layer.items()}
            written = self._written(batch.rollouts)
            columns = token_columns(
                number, batch, result, probed, self.policy.head, self.temperature, layers, written
            )
            unknown = any(
                bool(one.rollout_batch.rollouts.behavior_logp.isnan().all()) for one in step.batches
            )
            self._append("tokens", columns | ({"behavior_logp": None} if unknown else {}))
            if (later := step.later_uses(first)) is not None:
                kept = slice(None) if written is None else written[0].numpy()[later["rollout"]]
                self._append(
                    "uses",
                    {"step": number} | {name: values[kept] for name, values in later.items()},
                )
        for observer in self._observed:
            self._report(*observer.events)
            if observer.rows:
                self.writer.append("probes", observer.rows)
        step.seconds["recording_s"] += time.perf_counter() - started
        self._append("updates", update_columns(number, step.updates))
        self._append("steps", row | step.seconds)
        probing = sum(observer.seconds for observer in self._observed)
        training = step.seconds["generation_s"] + step.seconds["training_s"]
        self.observers.schedule.end_step(training, step.seconds["recording_s"] - probing)
        self.step_number, self._step, self._observed = number + 1, Step(), []
        if time.perf_counter() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write the rows of the finished steps to the run's folder."""
        self.writer.flush()
        note(self.run_dir, steps_done=self.step_number - 1)
        self._flushed = time.perf_counter()

    def _written(self, rollouts: Rollouts) -> tuple[Tensor, float] | None:
        """Which rollouts' tokens are written, and the share of groups that are; None: all, as at a spike.

        All too where an update was measured before the step's last completions came: its sample was one of the others.
        """
        if any(
            one.spike or (one.columns and len(one.rollouts) < len(rollouts))
            for one in self._observed
        ):
            return None
        return written_groups(
            rollouts, self.config.recording.token_rows, self._seed, self.step_number
        )

    def _probed(self, like: Tensor) -> dict[str, Tensor]:
        """The columns (N, T) that the observers of the step's updates have measured."""
        columns: dict[str, Tensor] = {}
        for observer in self._observed:
            for name, values in observer.columns.items():
                whole = torch.full(like.shape, math.nan)
                whole[: len(values)] = widened(values, like.shape[1], math.nan)
                columns[name] = torch.where(whole.isnan(), columns.get(name, whole), whole)
        return columns

    def _check_shares(self, columns: dict[str, Tensor], update: Tensor, again: set[int]) -> None:
        """Check that the tokens' shares of each update's squared gradient norm sum to 1; where they are far off, leave them out.

        Not checked where only some groups were measured, or the update also used tokens of an earlier one.
        """
        if "attribution" not in columns or bool((columns["inclusion_probability"] < 1).any()):
            return
        for index in range(len(self._step.updates)):
            used = update == index
            shares = columns["attribution"][used]
            total = float(shares.double().nansum())
            if index in again or bool(shares.isnan().all()) or abs(total - 1) <= SHARES_GAP:
                continue
            terms = "terms that no token's log-probability has (a penalty, an auxiliary loss, noise on embeddings)"
            cause = dropout_of(self.model) or f"the loss has {terms}"
            text, action = (
                f"the tokens' shares of update {index} sum to {total:.3g}, not 1: {cause}",
                "warn",
            )
            if abs(total - 1) > SHARES_WITHHELD:
                columns["attribution"][used] = math.nan
                text, action = f"{text}; they are left out", "left out"
            self._event("attribution_sum", "warning", text, total, SHARES_GAP, action)
        if bool(columns["attribution"].isnan().all()):
            del columns["attribution"]

    def _kl_step(self, batch: RolloutBatch, before: Tensor) -> float | None:
        """Mean k3 of KL(π_old‖π) over the tokens of KL_ROWS of the step's completions, after its last update [nats]; not with FSDP2."""
        if is_sharded(self.model):  # a forward pass before zero_grad would change the training
            return None
        # Of different prompts, where there are several.
        rows = torch.linspace(0, len(before) - 1, min(KL_ROWS, len(before))).long()
        rollouts = batch.rollouts.rows(rows.to(batch.rollouts.group.device))
        mask = rollouts.completion_mask.bool().cpu()
        with self.whole():  # a group may have several prompts
            after = self.scorer.statistics(rollouts, divided=False).logp.cpu()
        x = (after - before.cpu()[rows])[mask].double()
        return float((torch.expm1(x) - x).mean()) if len(x) else None

    def _append(self, table: str, columns: dict[str, Any]) -> None:
        absent = [
            name
            for what, of in _ABSENT.items()
            if what not in self.given
            for name in of.get(table, ())
        ]
        self.writer.append(table, columns | dict.fromkeys(absent))

    def _event(
        self,
        rule: str,
        severity: str,
        text: str,
        value: float = math.nan,
        limit: float = math.nan,
        action: str = "warn",
    ) -> None:
        self._report(Event(self.step_number, rule, severity, value, limit, action, text))

    def _report(self, *events: Event) -> None:
        for event in events:
            self.writer.append("events", event.row())

    def _warn(self, rule: str, severity: str, text: str, value: float = math.nan) -> None:
        """Report something once."""
        if text not in self._reported:
            self._reported.add(text)
            self._event(rule, severity, text, value)


@contextmanager
def original_forward(model: Any) -> Iterator[None]:
    """Context in which `model.forward` is the model's own; accelerate replaces it by one that computes in bf16 (autocast)."""
    replaced = vars(model).get("forward")
    if replaced is not None and hasattr(model, "_original_forward"):
        model.forward = model._original_forward
    try:
        yield
    finally:
        if replaced is not None:
            model.forward = replaced


def first_forward(model: Any) -> None:
    """Run a sharded model once: FSDP2 requires that its first forward pass is of the whole model."""
    if is_sharded(model):
        # a process that has failed takes no part in the exchanges of weights that follow one
        distributed.gather(None)
        ids = torch.zeros((1, 2), dtype=torch.long, device=next(model.parameters()).device)
        with guarded(model), torch.no_grad():
            model(input_ids=ids, use_cache=False)
        reshard(model)


def dropout_of(model: nn.Module) -> str:
    """What drops at random in training, from the modules' settings; empty if nothing does."""
    for name, module in model.named_modules():
        for field in ("p", "attention_dropout"):
            share = (
                getattr(module, field, 0.0)
                if isinstance(module, nn.Dropout) or field != "p"
                else 0.0
            )
            if isinstance(share, float) and share > 0:
                return f"dropout of {share:g} ({name})"
    return ""


def _say(text: str) -> None:
    """Print a line to standard error, in the first process."""
    if distributed.is_rank_zero():
        sys.stderr.write(f"sharpscope: {text}\n")
