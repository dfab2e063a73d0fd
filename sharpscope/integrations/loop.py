"""The recorder of a training loop of one's own: it is told of tokens before the backward pass, and of the gradient after it."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.integrations.core import Recorder
from sharpscope.integrations.price import Work
from sharpscope.integrations.steps import Step, TokenLoss, prompt_texts
from sharpscope.integrations.trainers import Sequences, sequences_of
from sharpscope.objective import k3
from sharpscope.policy import Rollouts
from sharpscope.probes import guarded
from sharpscope.recording.observers import StepObserver
from sharpscope.recording.step import RolloutBatch
from sharpscope.tasks import Example, Reward


class LoopRecorder(Recorder):
    """Records a loop: `tokens` before each backward pass, `step` before each optimizer step, `close` at the end."""

    given = frozenset({"generation"})

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        tokenizer: Any,
        out: str | Path,
        *,
        steps: int,
        updates: int,
        **options: Any,
    ) -> None:
        lr = float(optimizer.param_groups[0]["lr"])
        super().__init__(
            getattr(model, "module", model), tokenizer, out, lr=lr, seed=torch.initial_seed() % 2**31, **options
        )
        self._updates, self.work = updates, Work(epochs=updates)
        self._loss_fn: Callable[[], Tensor | float] | None = None
        self._of_step: Step | None = None
        self._rows: dict[Hashable, list[tuple[int, int]]] = {}  # name of a row -> batch and row in it, of this step
        self._seen: dict[Hashable, int] = {}  # how often the present update has used a name
        self.optimizer = optimizer
        self.begin(optimizer, steps)
        self._closed = time.perf_counter()
        atexit.register(self.close)

    def describe(self) -> dict[str, Any]:
        """Entries of run.json: method, notes and trainer."""
        name = type(self.optimizer).__name__
        return {"method": "loop", "notes": ["recorded from a training loop"], "trainer": {"name": f"loop with {name}"}}

    def whole_batches(self) -> bool:
        """Whether the step has all its updates."""
        return len(self._step.updates) >= self._updates

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
        rewards: Tensor | Sequence[float] | None = None,
        groups: Tensor | Sequence[Hashable] | None = None,
        rows: Sequence[int] | None = None,
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
            rewards: (n,) total rewards.
            groups: (n,) names of the prompts' groups; None: each row is a group.
            rows: (n,) names by which a row is known again in a later update of the step; None: by its tokens.
        """
        values = {"old_logp": old_logp, "sampler_logp": sampler_logp, "ref_logp": ref_logp}
        own = {"advantages": advantages, "rewards": rewards, "groups": groups, "rows": rows}
        given = {name: value for name, value in (values | own).items() if value is not None}
        self.in_step(partial(self._tokens, logp, input_ids, completion_mask, attention_mask, given))

    def step(self, loss: Tensor | float | None = None, *, loss_fn: Callable[[], Tensor | float] | None = None) -> None:
        """The gradient of an update is complete and not clipped; `optimizer.step()` follows.

        Args:
            loss: its value, for the curve.
            loss_fn: gives this process's loss at the present weights, for the critical sharpness; called about ten times, without
                gradient and dropout, where that is due.
        """
        self._loss_fn = loss_fn
        self.together(partial(self._gradient, loss))

    def close(self) -> None:
        """End the run. It is also ended when the process ends."""
        atexit.unregister(self.close)
        self.end(partial(self.stop, "finished", "the loop has ended"))
        self.unhook()

    def __enter__(self) -> LoopRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.end(partial(self.stop, "failed", f"{type(error).__name__}: {error}"))
        self.close()

    def unhook(self) -> None:
        """Remove the hooks on the optimizer."""
        for hook in self._hooks:
            hook.remove()

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def _tokens(self, logp: Tensor, ids: Tensor, mask: Tensor, present: Tensor | None, given: dict[str, Any]) -> None:
        started = time.perf_counter()
        (n, length), width = ids.shape, mask.shape[1]
        if len(logp) != n or len(mask) != n or logp.shape[1] not in (width, width - 1) or width > length:
            raise UserError(
                f"record: logp {tuple(logp.shape)}, input_ids {tuple(ids.shape)} and completion_mask {tuple(mask.shape)} do not "
                "fit; give (n, W), (n, L) and (n, W) or (n, W + 1)"
            )
        if not logp.requires_grad:
            raise UserError("record: logp does not require a gradient; give what the loss is made of, before backward")
        self.given |= frozenset(given)
        if "rewards" not in given and not self.rules:
            self.rules = {
                rule: {"action": "off"} for rule in ("dead_groups", "truncation", "reward_constant", "reward_collapse")
            }
            self.config = self.settings(self.total)
        counted = torch.zeros_like(ids, dtype=torch.bool)
        counted[:, length - width :] = mask.bool()
        there = _present(ids, counted, self.policy.pad_id) if present is None else present
        sequences = sequences_of(ids, there, counted, self.policy.tokenizer)
        own = sequences.rollouts.completion_mask.bool()
        taken = partial(sequences.gather, shift=length - logp.shape[1])  # (n, W) -> (n, T)

        def known(name: str, like: Tensor) -> Tensor:
            """(n, T) of a value of tokens, `like` outside the loss and where it is not given."""
            return torch.where(own, taken(given[name].detach().to(like)), like) if name in given else like

        theirs = torch.where(own, taken(logp.detach()), 0.0)
        change = theirs - known("old_logp", theirs)
        loss = TokenLoss(
            change.exp(),
            change,
            None if "old_logp" in given and "ref_logp" not in given else torch.zeros_like(change),
            k3(theirs, known("ref_logp", theirs)),
            ref_logp=known("ref_logp", theirs) if "ref_logp" in given else None,
        )
        for serial, rows, mine in self._pieces(sequences, known, taken, given):
            self._step.compare(serial, rows, theirs[mine])
            clipped = None if loss.clipped is None else loss.clipped[mine]
            ref = None if loss.ref_logp is None else loss.ref_logp[mine]
            part = TokenLoss(loss.ratio[mine], loss.log_ratio[mine], clipped, loss.kl[mine], ref_logp=ref)
            logp.register_hook(partial(self._keep, self._step.use(serial, rows, part), taken, mine))
        self._step.seconds["recording_s"] += time.perf_counter() - started

    def _keep(
        self, keep: Callable[[Tensor], None], taken: Callable[[Tensor], Tensor], mine: Tensor, gradient: Tensor
    ) -> None:
        self.safely(lambda: keep(taken(gradient)[mine]))

    def _pieces(
        self,
        sequences: Sequences,
        known: Callable[[str, Tensor], Tensor],
        taken: Callable[[Tensor], Tensor],
        given: dict[str, Any],
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Batches that the micro-batch's rows belong to, with the rows in each and here; rows that are new become a batch."""
        rollouts, n = sequences.rollouts, len(sequences.rollouts)
        if self._of_step is not self._step:
            self._of_step, self._rows, self._seen = self._step, {}, {}
        texts = given.get("rows") or list(
            zip(prompt_texts(rollouts, self.policy.tokenizer), rollouts.texts, strict=True)
        )
        places: list[tuple[int, int] | None] = []
        for name in texts:
            used = self._seen[name] = self._seen.get(name, -1) + 1
            places.append(self._rows[name][used] if used < len(self._rows.get(name, ())) else None)
        new = [row for row in range(n) if places[row] is None]
        if new:
            serial = self._open(rollouts, new, known, taken, given)
            for row_there, row in enumerate(new):
                places[row] = serial, row_there
                self._rows.setdefault(texts[row], []).append((serial, row_there))
        pieces = []
        for serial in dict.fromkeys(place[0] for place in places if place):
            mine = [row for row, place in enumerate(places) if place and place[0] == serial]
            rows = torch.tensor([place[1] for place in places if place and place[0] == serial])
            pieces.append((serial, rows, torch.tensor(mine)))
        return pieces

    def _open(
        self,
        rollouts: Rollouts,
        new: list[int],
        known: Callable[[str, Tensor], Tensor],
        taken: Callable[[Tensor], Tensor],
        given: dict[str, Any],
    ) -> int:
        """Add the rows `new` of a micro-batch as a batch to the step; returns its number."""
        n, device = len(rollouts), rollouts.group.device
        own = rollouts.completion_mask.bool()
        total = torch.as_tensor(given.get("rewards", [0.0] * n), dtype=torch.float32).detach().cpu()
        lasts = [row[at][-1:].tolist() for row, at in zip(rollouts.completion_ids, own, strict=True)]
        whole = replace(
            rollouts.with_reward(total.to(device)),
            truncated=torch.tensor([not (x and x[0] in self.policy.eos_ids) for x in lasts], device=device),
            behavior_logp=known("sampler_logp", rollouts.behavior_logp),
        )
        advantage = torch.as_tensor(given.get("advantages", [0.0] * n), dtype=torch.float64).detach()
        if advantage.dim() == 2:
            advantage = taken(advantage) if advantage.shape[1] > 1 else advantage[:, 0]
        groups = given.get("groups", [(self._serial, row) for row in range(n)])
        labels = groups.tolist() if isinstance(groups, Tensor) else list(groups)
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels[row] for row in new))}
        texts = prompt_texts(rollouts, self.policy.tokenizer)
        first = {labels[row]: row for row in reversed(new)}
        rows = torch.tensor(new, device=device)
        part = replace(whole.rows(rows), group=torch.tensor([numbers[labels[row]] for row in new], device=device))
        judged = [bool(self.correct(float(total[row]))) if self.correct else False for row in new]
        batch = RolloutBatch(
            [Example(texts[first[label]], "", {}) for label in numbers],
            part,
            [Reward(float(total[row]), {}, good) for row, good in zip(new, judged, strict=True)],
            advantage[rows.to(advantage.device)].to(device),
            None,
        )
        made = self.open_batch(batch, [labels[row] for row in new])
        if "old_logp" in given and self._step.updates:  # the present policy is not that of the step's start
            stats = made.tokens.stats
            old = known("old_logp", torch.zeros_like(own, dtype=stats.logp.dtype))[rows][:, : stats.logp.shape[1]]
            made.tokens.stats = replace(stats, logp=old.to(stats.logp))
        return made.serial

    # -- one update -----------------------------------------------------------------------------------------------------

    def _gradient(self, loss: Tensor | float | None) -> None:
        self._seen = {}
        if loss is not None:
            self.given |= {"loss"}
            self._step.losses.append(torch.as_tensor(loss).detach().float().cpu())
        self.gradient_done()

    def after_update(self) -> None:
        """The optimizer has made its step; what was not recording is training and generation."""
        step = self._step
        super().after_update()
        if self._step is not step:
            self._closed = time.perf_counter()

    def _close_step(self) -> None:
        step = self._step
        step.seconds["training_s"] = time.perf_counter() - self._closed - step.seconds["recording_s"]
        super()._close_step()

    def observe_update(self, observer: StepObserver) -> None:
        """Measure the critical sharpness of a step's first update."""
        function, factor = self._loss_fn, self._step.gradient[2]
        if function is None:
            self._warn("probe", "info", "critical sharpness is not measured: step() was not given loss_fn")
            return

        def value() -> float:
            """The loss at the present weights, averaged over the processes."""
            distributed.gather(None)
            with guarded(self.model, weights=False), torch.no_grad():
                return distributed.sum_values(float(function())) / distributed.world_size()

        observer.critical(self.model, self.optimizer, value, clip_factor=factor)


def _present(ids: Tensor, counted: Tensor, pad: int) -> Tensor:
    """(n, L) attention mask: without leading padding tokens and what follows the last token in the loss."""
    columns = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(counted, columns, -1).amax(1)
    leading = (ids == pad).long().cumprod(1).bool()
    return (~leading & (columns <= torch.where(last < 0, ids.shape[1] - 1, last)[:, None])).long()
