"""`sharpscope.record`: record a trainer, or any training loop in PyTorch, and the recorder of a loop.

A loop tells its recorder of tokens before the backward pass, and of the gradient after it.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import lt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.methods import Method
from sharpscope.methods.loss import k3
from sharpscope.methods.named import parse_method
from sharpscope.methods.token_weights import UniformWeight
from sharpscope.policy import Rollouts
from sharpscope.policy.guard import guarded
from sharpscope.recording.autopsy import first_not_finite
from sharpscope.recording.capture import prompt_texts, sequences_of
from sharpscope.recording.core import Options, Recorder
from sharpscope.recording.guard import ended_by
from sharpscope.recording.live import OnFinding
from sharpscope.recording.measurements import ClippedUpdate
from sharpscope.recording.observers import StepObserver
from sharpscope.recording.recorded_model import dropout_of
from sharpscope.recording.schedule import StepCost
from sharpscope.tokens.optimizer_steps import unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sharpscope.integrations.trainers import TrainerRecorder

Rewards = Tensor | Sequence[float]
"""(n,) a reward of each completion."""


def record(
    model: object,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    out: str | Path = "runs/recorded",
    tokenizer: PreTrainedTokenizerBase | None = None,
    rotation: str | Method | None = None,
    task: str | None = None,
    correct: float | Callable[[float], bool] | None = None,
    recording: Mapping[str, object] | None = None,
    critical_sharpness: bool | int = True,
    every: int = 0,
    steps: int = 0,
    updates_per_step: int = 1,
    temperature: float = 1.0,
    on_finding: OnFinding | None = None,
) -> Any:
    """Record a trainer, or the updates of a model in a training loop of your own.

    A trainer of TRL or transformers whose loss is a function of tokens' log-probabilities (GRPO, RLOO, SFT, DPO, KTO, your own):
    call it once, before `trainer.train()`. A loop: give the model and its optimizer, call `tokens` before `backward` and `step` before
    `optimizer.step()` on what this function returns. The training is bitwise the same, and an error of the recorder ends
    the recording, not the training. `sharpscope show`, `tokens` and `analyze` read the folder, also while it trains.

    Args:
        model: the trainer; or a causal language model of transformers, also wrapped in DDP or sharded by FSDP2.
        optimizer: of the loop; or several, all of which make their step in each update.
        out: folder of the run; where there is something already, `out`-2, -3, …. A trainer that resumes from a
            checkpoint continues the trace in it.
        tokenizer: of the loop.
        rotation: token weights, as a method, the name of one (`grpo-sg`) or `module:function`: at the measured steps, how far they
            would turn the gradient of this training (columns gradient_rotation, gradient_scale), which does not use them. For
            GRPOTrainer and loops.
        task: the task's name in the trace.
        correct: which total rewards count as correct: those above a number, or a function. None: there is no accuracy, only the
            reward.
        recording: fields of the run configuration's part `recording`, such as {"token_gradients_every": 5}.
        critical_sharpness: whether to measure the critical sharpness of updates; or the interval [steps]. A loop gives `step` its
            loss as a function.
        every: measure norms, shares, effects and critical sharpness of all tokens at every so many steps. By default tokens are
            measured at five steps or more, spread over the training, and at spikes, and the more of them and of each the more
            steps there are, for at most 12 % of the training's passes (docs/trainers/index.md).
        steps: number of steps of the loop, if known: the last one is measured like the first. With a trainer: end the training
            after so many steps and print which identities hold (docs/causes.md).
        updates_per_step: optimizer updates of the loop that use one batch of completions.
        temperature: at which the loop's log-probabilities are taken.
        on_finding: what to do at the first step that shows a named cause, while the training goes on: "warn", "stop" (a trainer ends
            after the step, a loop gets a `TrainingStoppedError` from `optimizer.step()`), or a function that takes the cause.

    Returns:
        The recorder: of a trainer, `recorder.detach()` restores the trainer; of a loop, a `LoopRecorder`.

    Raises:
        UserError: the trainer, an option or the folder cannot be used; the message names it.
    """
    judge = correct if correct is None or callable(correct) else partial(lt, float(correct))
    options: Options = {
        "task": task or "",
        "recording": {"token_gradients_every": every, **(recording or {})} if every else recording,
        "correct": judge,
        "critical": every if every and critical_sharpness is True else critical_sharpness,
        "on_finding": on_finding,
    }
    if rotation is not None:
        if isinstance(rotation, str):
            rotation = (
                parse_method(rotation)
                .with_preset("auto", "paper")
                .model_copy(update={"name": rotation})
            )
        if rotation.tokens is None and isinstance(rotation.weight, UniformWeight):
            raise UserError(
                f"rotation = {rotation.name!r}: has no token weights; give one such as grpo-sg"
            )
        options["rotate"] = rotation
    optimizers: list[torch.optim.Optimizer] = []
    for each in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        if isinstance(each, torch.optim.Optimizer):
            optimizers.append(each)
        elif optimizer is not None:
            wrong = f"{each!r} is no optimizer; name the folder"
            raise UserError(f"record: {wrong}: record(trainer, out={str(each)!r})")
    if not isinstance(model, nn.Module):
        return _record_trainer(model, out, steps, options)
    if not optimizer or tokenizer is None:
        raise UserError(
            "record: a model needs its optimizer and tokenizer; record(model, optimizer, tokenizer=…)"
        )
    options["temperature"], options["task"] = temperature, task or "loop"
    return LoopRecorder(
        model, optimizers, tokenizer, out, steps=steps, updates=updates_per_step, **options
    )


def _record_trainer(
    trainer: Any, out: str | Path, verdict_after: int, options: Options
) -> TrainerRecorder:
    """The recorder of a trainer, after its checks."""
    from transformers import Trainer

    from sharpscope.integrations.hooked import HookRecorder
    from sharpscope.integrations.trainers import SupervisedRecorder, known_loss

    kinds, name = type(trainer).__mro__, type(trainer).__name__
    if Trainer not in kinds:
        raise UserError(f"record: {name} is no trainer and no torch module; give one of them")
    grpo = "GRPOTrainer" in (kind.__name__ for kind in kinds)
    if "rotate" in options and not grpo:
        raise UserError(
            f"rotation: {name} has no surrogate that token weights multiply; leave it out"
        )
    if any(kind.__module__.startswith("trl.") for kind in kinds):
        from sharpscope.integrations.trl import GrpoRecorder, check_grpo, check_version

        check_version("DPOTrainer" in (kind.__name__ for kind in kinds))
        if grpo:
            check_grpo(trainer)
            options["task"] = options["task"] or "trl"
            return GrpoRecorder(trainer, out, verdict_after=verdict_after, **options)
    if kind := known_loss(trainer):
        options["task"] = options["task"] or kind
        return SupervisedRecorder(trainer, out, kind, verdict_after=verdict_after, **options)
    options["task"] = options["task"] or "hooked"
    return HookRecorder(trainer, out, verdict_after=verdict_after, **options)


class LoopRecorder(Recorder):
    """Records a loop: `tokens` before each backward pass, `step` before each optimizer step, `close` at the end."""

    given = frozenset({"generation"})

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        tokenizer: PreTrainedTokenizerBase,
        out: str | Path,
        *,
        steps: int,
        updates: int,
        **options: Unpack[Options],
    ) -> None:
        self.period, self.cost = updates, StepCost(epochs=updates)
        kinds = " and ".join(type(unwrapped(optimizer)).__name__ for optimizer in optimizers)
        name, lr = f"loop with {kinds}", float(optimizers[0].param_groups[0]["lr"])
        self.info = {
            "method": "loop",
            "notes": ["recorded from a training loop"],
            "trainer": {"name": name},
        }
        options["lr"], options["seed"] = lr, torch.initial_seed() % 2**31
        super().__init__(getattr(model, "module", model), tokenizer, out, **options)
        self._loss_fn: Callable[[], Tensor | float] | None = None
        # of this step: texts of a row, and how many had them before -> batch and row in it
        self._rows: dict[tuple[tuple[str, str], int], tuple[int, int]] = {}
        self._told: list[Tensor] = []  # log-probabilities of the present update
        self._seen = Counter[tuple[str, str]]()  # how often the present update has used these texts
        self.begin(*optimizers, steps=steps)
        self._closed = time.perf_counter()
        atexit.register(self._at_exit)

    def tokens(
        self,
        logp: Tensor,
        input_ids: Tensor,
        completion_mask: Tensor,
        *,
        attention_mask: Tensor | None = None,
        old_logp: Tensor | None = None,
        sampler_logp: Tensor | None = None,
        ref_logp: Tensor | None = None,
        advantages: Tensor | Sequence[float] | None = None,
        rewards: Rewards | Mapping[str, Rewards] | None = None,
        groups: Tensor | Sequence[Hashable] | None = None,
        policy_versions: Tensor | Sequence[int] | None = None,
        truncated: Tensor | Sequence[bool] | None = None,
        kl: Tensor | None = None,
    ) -> None:
        """Say what the coming backward pass differentiates; a hook on `logp` gives each token's coefficient, whatever the loss.

        Call it once for each micro-batch, between the forward pass and `backward`. Values of tokens have the width of `logp`:
        its columns belong to those of `completion_mask`, or, where it has one less, column j to the token in column j + 1.

        Args:
            logp: (n, W) ln π of the tokens, from which the loss is made [nats].
            input_ids: (n, L) prompts and completions.
            completion_mask: (n, L), or (n, T) of the last T columns: 1 on the tokens in the loss.
            attention_mask: (n, L) 0 on padding; None: padding is what equals the padding token on the left, and what follows
                the last token in the loss.
            old_logp: ln π_old, for the ratio; None: the ratio is 1.
            sampler_logp: ln μ of the sampler.
            ref_logp: of the reference policy, for the divergence.
            advantages: (n,) or like `logp`.
            rewards: (n,) total rewards, or the components by name whose sum they are.
            groups: (n,) names of the prompts' groups; None: each row is a group.
            policy_versions: (n,) versions of the policy that drew the completions, by your count.
            truncated: (n,) whether a completion was cut at the length limit; None: one whose last token in the loss is no end
                token.
            kl: the loss's KL term, made from `logp`: like `logp`, each value from that of its own token, or a scalar. It gives the
                term's part of the coefficients (`kl_coef`), which is null without it where `ref_logp` is given.
        """
        values = {"old_logp": old_logp, "sampler_logp": sampler_logp, "ref_logp": ref_logp}
        per_row = {"advantages": advantages, "rewards": rewards, "groups": groups}
        per_row |= {"policy_versions": policy_versions, "truncated": truncated}
        given = {name: value for name, value in (values | per_row).items() if value is not None}
        about = (logp, input_ids, completion_mask, attention_mask, given, kl)
        self.in_step(partial(self._tokens, *about))

    def step(
        self,
        loss: Tensor | float | None = None,
        *,
        loss_fn: Callable[[], Tensor | float] | None = None,
    ) -> None:
        """The gradient of an update is complete and not clipped; `optimizer.step()` follows.

        Args:
            loss: its value, for the curve.
            loss_fn: gives this process's loss at the present weights, for the critical sharpness; called about ten times, without
                gradient and dropout, where that is due.
        """
        self._loss_fn = loss_fn
        self.together(partial(self._gradient, loss))

    def close(self, error: BaseException | None = None) -> None:
        """End the run, as failed where an error ended the loop. It is also ended when the process ends."""
        atexit.unregister(self._at_exit)
        status, reason = ended_by(error) if error else ("finished", "the loop has ended")
        self.end(partial(self.stop, status, reason))
        self.release()

    def __enter__(self) -> LoopRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self.close(error)

    def _at_exit(self) -> None:
        """End the run with the error that has ended the process, if one has; an interactive session goes on after errors."""
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        done = self.step_number - 1
        if error is None and done < self.total:
            # sys.exit leaves no error behind
            reason = f"the process ended after {done} of {self.total} steps"
            self.end(partial(self.stop, "interrupted", reason))
        self.close(error)

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def _tokens(
        self,
        logp: Tensor,
        ids: Tensor,
        mask: Tensor,
        present: Tensor | None,
        given: dict[str, Any],
        kl: Tensor | None,
    ) -> None:
        self.drop_update()
        if any(logp is one for one in self._told):
            text = "tokens() was called twice with one tensor of log-probabilities; the second call is left out"
            self.warn_once("second_call", "warning", text)
            return
        self._told.append(logp)
        started = time.perf_counter()
        (n, length), width = ids.shape, mask.shape[1]
        if (
            len(logp) != n
            or len(mask) != n
            or logp.shape[1] not in (width, width - 1)
            or width > length
        ):
            shapes = f"logp {tuple(logp.shape)}, input_ids {tuple(ids.shape)} and completion_mask {tuple(mask.shape)}"
            raise UserError(
                f"record: {shapes} do not fit; give (n, W), (n, L) and (n, W) or (n, W + 1)"
            )
        if not logp.requires_grad:
            raise UserError(
                "record: logp does not require a gradient; give what the loss is made of, before backward"
            )
        numbers = {"logp": logp.detach()}
        numbers |= {n: x for n, x in given.items() if isinstance(x, Tensor) and n != "groups"}
        self.capture.not_finite += first_not_finite(numbers, mask, len(self.capture.pending))
        self.given |= frozenset(given)
        if "rewards" not in given and not self.rules:
            rules = ("dead_groups", "truncation", "reward_constant", "reward_collapse")
            self.rules = {rule: {"action": "off"} for rule in rules}
            self.config = self.settings(self.total)
        counted = torch.zeros_like(ids, dtype=torch.bool)
        counted[:, length - width :] = mask.bool()
        there = _present(ids, counted, self.policy.pad_id) if present is None else present
        sequences = sequences_of(ids, there, counted, self.policy.tokenizer)
        inside, shift = sequences.rollouts.completion_mask.bool(), length - logp.shape[1]
        self.check_layout(ids, there, counted)

        def known(name: str, like: Tensor) -> Tensor:
            """(n, T) of a value of tokens, `like` outside the loss and where it is not given."""
            if name not in given:
                return like
            return torch.where(inside, sequences.gather(given[name].detach(), shift).to(like), like)

        theirs = torch.where(inside, sequences.gather(logp.detach(), shift), 0.0)
        change = theirs - known("old_logp", theirs)
        loss = {"ratio": change.exp(), "log_ratio": change}
        if "ref_logp" in given:
            ref = known("ref_logp", theirs)
            loss |= {"ref_logp": ref, "kl": k3(theirs, ref), "clipped": torch.zeros_like(change)}

        # before the hook on `logp`, which a derivative by it would call
        kl_part = None if kl is None else _kl_part(kl, logp)

        def hook(keep: Callable[..., None], rows: Tensor, gradient: Tensor) -> None:
            """Take the coefficients of a batch's rows."""
            parts = [gradient] if kl_part is None else [gradient, kl_part]
            self.safely(lambda: keep(*(sequences.gather(part, shift)[rows] for part in parts)))

        opened = partial(self._open, sequences.rollouts, known, given)
        for serial, rows, mine in self._pieces(sequences.rollouts, opened):
            self.capture.compare(serial, rows, theirs[mine], there[mine, 0].bool())
            keep = self.capture.use(
                serial, rows, {name: value[mine] for name, value in loss.items()}
            )
            logp.register_hook(partial(hook, keep, mine))
        self.capture.seconds["recording_s"] += time.perf_counter() - started

    def _pieces(
        self, rollouts: Rollouts, opened: Callable[[list[int]], int]
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Batches that the micro-batch's rows belong to, with the rows in each and here; rows that are new become a batch."""
        keys = []
        for texts in zip(
            prompt_texts(rollouts, self.policy.tokenizer), rollouts.texts, strict=True
        ):
            # of two rows with the same texts the second is another
            keys.append((texts, self._seen[texts]))
            self._seen[texts] += 1
        new = [row for row, key in enumerate(keys) if key not in self._rows]
        serial = opened(new) if new else 0
        self._rows |= {keys[row]: (serial, number) for number, row in enumerate(new)}
        pieces: dict[int, list[tuple[int, int]]] = {}
        for row, key in enumerate(keys):
            batch, number = self._rows[key]
            pieces.setdefault(batch, []).append((number, row))
        return [(batch, *torch.tensor(pairs).T) for batch, pairs in pieces.items()]

    def _open(
        self,
        rollouts: Rollouts,
        known: Callable[[str, Tensor], Tensor],
        given: dict[str, Any],
        new: list[int],
    ) -> int:
        """Add the rows `new` of a micro-batch as a batch to the step; returns its number."""
        n, device, inside = len(rollouts), rollouts.group.device, rollouts.completion_mask.bool()
        rewards = given.get("rewards", [0.0] * n)
        named = rewards if isinstance(rewards, Mapping) else {"": rewards}
        columns = [torch.as_tensor(one, dtype=torch.float32).detach() for one in named.values()]
        scored = torch.stack(columns, 1)  # (n, components)
        advantage = torch.as_tensor(
            given.get("advantages", [0.0] * n), dtype=torch.float64
        ).detach()
        if advantage.dim() == 2:
            alone = advantage.shape[1] == 1
            advantage = (
                advantage[:, 0]
                if alone
                else known("advantages", torch.zeros_like(inside, dtype=torch.float64))
            )
        cut = given.get("truncated")
        if cut is None:
            rows_inside = zip(rollouts.completion_ids, inside, strict=True)
            lasts = [row[at][-1:].tolist() for row, at in rows_inside]
            cut = [not (x and x[0] in self.policy.eos_ids) for x in lasts]
        whole = replace(
            rollouts.with_reward(scored.sum(1)),
            truncated=torch.as_tensor(cut, dtype=torch.bool, device=device),
            behavior_logp=known("sampler_logp", rollouts.behavior_logp),
        )
        rows = torch.tensor(new, device=device)
        part = replace(whole.rows(rows), group=torch.arange(len(new), device=device))
        groups = given.get("groups", [(self._serial, row) for row in range(n)])
        groups = groups.tolist() if isinstance(groups, Tensor) else groups
        parts = [dict(zip(named, row, strict=True)) for row in scored[new].tolist()]
        labels = [groups[row] for row in new]
        made = self.open_batch(
            part, advantage.to(device)[rows], labels, parts if named is rewards else ()
        )
        if "policy_versions" in given:
            versions = torch.as_tensor(given["policy_versions"], dtype=torch.float64)
            made.tokens.policy_version[:] = versions.cpu()[new][:, None]
        # the present policy is not that of the step's start
        if "old_logp" in given and self.capture.updates:
            stats = made.tokens.stats
            old = known("old_logp", torch.zeros_like(inside, dtype=stats.logp.dtype))[rows][
                :, : stats.logp.shape[1]
            ]
            made.tokens.stats = replace(stats, logp=old.to(stats.logp))
        return made.serial

    # -- one update -----------------------------------------------------------------------------------------------------

    def _gradient(self, loss: Tensor | float | None) -> None:
        self._seen.clear()
        self._told.clear()
        self.capture.micro += 1
        if loss is not None:
            self.given |= {"loss"}
            self.capture.losses.append(torch.as_tensor(loss).detach().float().cpu())
        self.gradient_done()

    def close_step(self) -> None:
        """Write the step's rows; what was not recording since the last step is training and generation."""
        seconds = self.capture.seconds
        seconds["training_s"] = time.perf_counter() - self._closed - seconds["recording_s"]
        super().close_step()
        self._closed, self._rows = time.perf_counter(), {}

    def observe_update(self, observer: StepObserver) -> None:
        """Measure the critical sharpness of a step's first update."""
        function = self._loss_fn
        # with dropout the gradient is of another loss
        factor = None if dropout_of(self.model) else self.capture.clip_factor
        if function is None:
            self.warn_once(
                "probe", "info", "critical sharpness is not measured: step() was not given loss_fn"
            )
            return

        def value() -> float:
            """The loss at the present weights, averaged over the processes."""
            distributed.gather(None)
            with guarded(self.model), torch.no_grad():
                return distributed.sum_values(float(function())) / distributed.world_size()

        observer.critical(
            ClippedUpdate(
                model=self.model, optimizer=self.optimizers[0], loss_fn=value, clip_factor=factor
            )
        )


def _kl_part(kl: Tensor, logp: Tensor) -> Tensor:
    """Zeros like `logp` that the backward pass fills with the KL term's part of the coefficients, ∂L/∂kl · ∂kl/∂ln π.

    Raises:
        UserError: `kl` has another shape, or is not made from `logp`.
    """
    if kl.dim() and kl.shape != logp.shape:
        shapes = f"kl {tuple(kl.shape)} does not fit logp {tuple(logp.shape)}"
        raise UserError(f"record: {shapes}; give a value for each token, or a scalar")
    slope = None
    if kl.requires_grad:
        (slope,) = torch.autograd.grad(kl.sum(), logp, retain_graph=True, allow_unused=True)
    if slope is None:
        raise UserError("record: kl is not made from logp; give the term as it enters the loss")
    part = torch.zeros_like(slope)

    def fill(gradient: Tensor) -> None:
        """Take ∂L/∂kl, which comes before the gradient of `logp`."""
        part.copy_(gradient.detach() * slope)

    kl.register_hook(fill)
    return part


def _present(ids: Tensor, counted: Tensor, pad: int) -> Tensor:
    """(n, L) attention mask: without leading padding tokens and what follows the last token in the loss."""
    columns = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(counted, columns, -1).amax(1)
    leading = (ids == pad).long().cumprod(1).bool()
    return (~leading & (columns <= torch.where(last < 0, ids.shape[1] - 1, last)[:, None])).long()
