"""The step in progress of a training, whoever makes it: its batches of completions, its uses of tokens and its updates.

A client adds batches, says of each micro-batch which rows it uses and what its loss does with their tokens (`StepCapture.use`),
and hands over ∂L/∂log π of them, which a hook on the log-probabilities gives. A token's row is of the first update that uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.policy import Rollouts, TokenStats, completions_of, join_rollouts
from sharpscope.recording.autopsy import Place, first_not_finite
from sharpscope.recording.step import (
    PendingUpdate,
    RolloutBatch,
    StepTokens,
    UpdateResult,
    UpdateRotation,
    UpdateTokens,
)
from sharpscope.tasks import Example
from sharpscope.tokens import Clip

_PARTS = ("generation_s", "training_s", "recording_s")
FIRST_USE = frozenset(
    [
        *("ratio", "clipped", "weight", "advantage", "correction", "ref_logp"),
        *("kl_coef", "entropy_coef"),
    ]
)
"""Columns of a use that its token keeps if it is the first; besides them `coef`, as `loss_coef`."""


@dataclass
class Batch:
    """One batch of completions: N rows, T completion positions."""

    serial: int
    rollout_batch: RolloutBatch
    tokens: StepTokens
    labels: list[Hashable]  # (N,) names of the rows' groups

    @property
    def device(self) -> torch.device:
        """Device of the completions and their statistics."""
        return self.rollout_batch.rollouts.completion_mask.device

    def to(self, device: torch.device) -> Batch:
        """The batch with its completions on a device."""
        rollouts = self.rollout_batch.rollouts.to(device)
        return replace(self, rollout_batch=replace(self.rollout_batch, rollouts=rollouts))


@dataclass(frozen=True)
class TokenUse:
    """What a micro-batch of the present update does with n rows of a batch.

    `columns` (n, T) are those of UpdateTokens, kl_coef and, where known, correction and ref_logp; on the CPU.
    """

    serial: int  # of the batch
    rows: Tensor  # (n,) in the batch, on the CPU
    columns: dict[str, Tensor]

    @property
    def tokens(self) -> UpdateTokens:
        """The columns of UpdateTokens."""
        return UpdateTokens(**{part.name: self.columns[part.name] for part in fields(UpdateTokens)})


@dataclass
class StepCapture:
    """Whole batches and whole updates; `micro` counts the micro-steps so far, `seconds` is the time by part [s]."""

    batches: list[Batch] = field(default_factory=list)
    updates: list[UpdateResult] = field(default_factory=list)
    collected: int = 0  # batches that every process has
    averaged: bool = True  # whether gradients are means over the processes; else they are sums
    micro: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    complete: bool = False  # whether the present update's gradient is
    # of the present update: loss, norm of its gradient and what clipping multiplies it by
    loss: float = math.nan
    norm: float = math.nan
    clip_factor: float = 1.0
    layers: dict[str, float] = field(default_factory=dict)  # that norm by layer and kind
    rotation: UpdateRotation | None = None  # of the present update's gradient
    # whether the loss is multiplied by a factor for the sampler's policy
    corrected: bool = False
    losses: list[Tensor] = field(default_factory=list)  # of the present update's micro-batches
    # |ln π of the trainer − ln π of our forward pass| [nats]
    gaps: list[Tensor] = field(default_factory=list)
    unpadded_gaps: list[Tensor] = field(default_factory=list)  # those of rows without padding
    pending: list[TokenUse] = field(default_factory=list)  # of the present update
    # update, use, (n, T): tokens used before
    again: list[tuple[int, TokenUse, Tensor]] = field(default_factory=list)
    # values of the loss that are not finite, in the order in which they were seen
    not_finite: list[Place] = field(default_factory=list)

    @classmethod
    def of_known(cls, batch: RolloutBatch, stats: TokenStats) -> StepCapture:
        """A step of one batch that every process has, with the statistics of its tokens; gradients are sums over processes."""
        labels: list[Hashable] = batch.rollouts.group.tolist()
        only = Batch(0, batch, StepTokens.unused(stats), labels)
        return cls(batches=[only], collected=1, averaged=False)

    def batch(self, serial: int) -> Batch:
        """The batch with this serial number."""
        return next(batch for batch in self.batches if batch.serial == serial)

    def use(
        self,
        serial: int,
        rows: Tensor,
        known: Mapping[str, Tensor] = MappingProxyType({}),
        used: Tensor | None = None,
    ) -> Callable[..., None]:
        """Record that a micro-batch of the present update uses the rows (n,) of a batch; returns what takes ∂L/∂log π (n, T) of them.

        `used` (n, T) marks the tokens that take part; None: all in the loss. `known` is what the loss does with them, (n, T) each
        or (n, 1); without it the ratio is 1 and nothing is clipped.
        `ratio`: π/π_old, of tokens or sequences. `log_ratio`: ln π − ln π_old of the token [nats]. `clipped`: −1 the lower
        bound acts, 1 the upper, 0 none; else it acts where the advantage is not 0 and the coefficient is. `kl`: k3 [nats].
        `kl_share`: part of the coefficient that a KL term has; else 0 without a reference and not known with one. Further columns
        (`FIRST_USE`) are kept as they are, such as `correction`, the loss's factor for the sampler's policy. What takes the
        gradient also takes the KL term's part of it, (n, T), where that is known only then.
        """
        batch = self.batch(serial)
        derived = "clipped" not in known
        mask = batch.rollout_batch.rollouts.completion_mask[rows.to(batch.device)].bool().cpu()
        if used is not None:
            mask = used.cpu()
        elif "ratio" in known:
            # a micro-batch can be narrower than the whole batch
            mask = mask[:, : known["ratio"].shape[1]]
        width = mask.shape[1]
        shape = mask.shape
        values = {name: torch.zeros(shape) for name in ("log_ratio", "clipped", "kl")}
        values["ratio"] = torch.ones(shape)
        values["kl_share"] = torch.full(shape, math.nan if "ref_logp" in known else 0.0)
        for name, value in known.items():
            values[name] = value.detach().cpu()[:, :width].expand(shape)
        micro = len(self.pending)
        self.not_finite += first_not_finite({name: values[name] for name in known}, mask, micro)
        tokens = UpdateTokens.zeros(shape, batch.tokens.loss_coef.dtype)
        written = {name: values.pop(name) for name in ("ratio", "log_ratio", "clipped", "kl")}
        tokens.write(torch.arange(len(rows)), mask, **written)
        share = values.pop("kl_share")

        def keep(gradient: Tensor, of_kl: Tensor | None = None) -> None:
            """Record the coefficients and what follows from them."""
            coef = gradient.detach()[:, :width].to("cpu", tokens.coef.dtype)
            self.not_finite += first_not_finite({"coefficient": coef}, mask, micro)
            tokens.coef = torch.where(mask, coef, 0.0)
            if derived:
                stopped = mask & (tokens.coef == 0) & (batch.tokens.advantage[rows][:, :width] != 0)
                tokens.clipped = torch.where(stopped, tokens.log_ratio.sign(), 0).to(torch.int8)
            if "kl_coef" not in values:
                part = tokens.coef * share if of_kl is None else of_kl[:, :width].to(tokens.coef)
                values["kl_coef"] = torch.where(mask, part, 0.0)
            self.pending.append(TokenUse(serial, rows, {**vars(tokens), **values}))

        return keep

    def collect(self, device: torch.device) -> None:
        """Exchange the new batches and uses of all processes, with the coefficients of the whole update's loss."""
        count = distributed.world_size()
        if count == 1:
            return
        share = count if self.averaged else 1
        new = [batch.to(torch.device("cpu")) for batch in self.batches[self.collected :]]
        pending = []
        for use in self.pending:
            scaled = {name: use.columns[name] / share for name in ("coef", "kl_coef")}
            pending.append(replace(use, columns=use.columns | scaled))
        losses = [float(loss) / share for loss in self.losses]
        parts = distributed.gather((new, pending, self.gaps, losses))
        self.batches[self.collected :] = [
            batch.to(device) for theirs, *_ in parts for batch in theirs
        ]
        self.collected = len(self.batches)
        self.pending = [use for _, uses, _, _ in parts for use in uses]
        if not self.updates:  # later there are no new ones
            self.gaps = [gap for _, _, gaps, _ in parts for gap in gaps]
        self.losses = [torch.tensor(loss) for *_, losses in parts for loss in losses]

    def merge_uses(self) -> None:
        """Make one use of those of the present update, which are of one batch, with its rows in order."""
        rows = torch.cat([use.rows for use in self.pending])
        order = rows.argsort(stable=True)
        columns = {
            name: torch.cat([use.columns[name] for use in self.pending])[order]
            for name in self.pending[0].columns
        }
        self.pending = [TokenUse(self.pending[0].serial, rows[order], columns)]

    def keep_first_use(self) -> None:
        """Give each token of the present update, whose gradient is complete, the columns of its first use."""
        index = len(self.updates)
        widest: list[TokenUse] = []
        for use in self.pending:
            tokens = self.batch(use.serial).tokens
            rows = use.rows
            width = tokens.update.shape[1]
            each = {name: widened(value, width) for name, value in use.columns.items()}
            first = each["used"] & (tokens.update[rows] < 0)  # (n, T)
            self.corrected |= "correction" in each
            for name, value in each.items():
                if name == "coef" or name in FIRST_USE:
                    target = tokens.loss_coef if name == "coef" else getattr(tokens, name)
                    target[rows] = torch.where(first, value.to(target.dtype), target[rows])
            tokens.update[rows] = torch.where(first, index, tokens.update[rows])
            widest.append(replace(use, columns=each))
            if bool((each["used"] & ~first).any()):
                self.again.append((index, widest[-1], each["used"] & ~first))
        self.pending = widest

    def compare(
        self, serial: int, rows: Tensor, logp: Tensor, unpadded: Tensor | None = None
    ) -> None:
        """Keep the gaps between the trainer's log-probabilities (n, T) and our forward pass's, before the first update.

        `unpadded` (n,) says which rows have no padding before them; None: it is not known.
        """
        if not self.updates:
            batch = self.batch(serial)
            mask = (
                batch.rollout_batch.rollouts.completion_mask[rows.to(batch.device), : logp.shape[1]]
                .bool()
                .cpu()
            )
            ours = batch.tokens.stats.logp[rows.to(batch.device), : logp.shape[1]].cpu()
            gap = (logp.detach()[:, : mask.shape[1]].cpu() - ours).abs()
            self.gaps.append(gap[mask])
            if unpadded is not None:
                self.unpadded_gaps.append(gap[mask & unpadded[:, None].cpu()])

    def joined(self) -> tuple[RolloutBatch, StepTokens, dict[int, int]]:
        """All batches so far as one, their tokens as one, and each batch's first row by its serial number."""
        batches = self.batches
        labels = {
            label: number
            for number, label in enumerate(dict.fromkeys(x for b in batches for x in b.labels))
        }
        examples: dict[Hashable, Example] = {}
        first, row = {}, 0
        for batch in batches:
            first[batch.serial], row = row, row + len(batch.labels)
            for label, group in zip(
                batch.labels, batch.rollout_batch.rollouts.group.tolist(), strict=True
            ):
                examples.setdefault(label, batch.rollout_batch.examples[group])
        rollouts = join_rollouts(*(batch.rollout_batch.rollouts for batch in batches))
        group = torch.tensor(
            [labels[x] for b in batches for x in b.labels], device=rollouts.group.device
        )
        whole = RolloutBatch(
            list(examples.values()),
            Rollouts(**{**vars(rollouts), "group": group}),
            [reward for batch in batches for reward in batch.rollout_batch.rewards],
            torch.cat([batch.rollout_batch.advantage for batch in batches]),
            None,
        )
        return whole, _joined_tokens([batch.tokens for batch in batches]), first

    def pending_update(
        self, clips: tuple[Clip, ...] = ()
    ) -> tuple[RolloutBatch, StepTokens, PendingUpdate]:
        """All batches so far as one, their tokens, and the present update between its gradient and the optimizer's step."""
        joined, tokens, offset = self.joined()
        width, index = joined.rollouts.completion_ids.shape[1], len(self.updates)
        rows = torch.cat([use.rows + offset[use.serial] for use in self.pending])
        coef = self.pending_values(width)
        return (
            joined,
            tokens,
            PendingUpdate(index, rows, tokens.update[rows] == index, coef, self.norm, clips),
        )

    def pending_values(self, width: int, name: str = "coef") -> Tensor:
        """(n, width) of a column of the present update."""
        return stacked([use.columns[name] for use in self.pending], width)

    def pending_tokens(self) -> UpdateTokens:
        """The columns of the tokens of the present update, a use below the other."""
        width = max(use.columns["used"].shape[1] for use in self.pending)
        return UpdateTokens(
            **{part.name: self.pending_values(width, part.name) for part in fields(UpdateTokens)}
        )

    def record_update(self, result: UpdateResult) -> None:
        """Record that the present update was made, or left out; what its tokens did counts if it was made."""
        self.updates.append(result)
        if not result.skipped:
            for use in self.pending:
                self.batch(use.serial).tokens.count(use.rows, use.tokens)
        self._end_update()

    def unscaled(self, factor: float) -> float:
        """`factor`, by which the gradient was multiplied before the optimizer's step; 1 where it takes a scale of the loss away.

        A GradScaler divides by a power of 2, of which norms and coefficients are then freed; clipping never hits one.
        """
        power = math.log2(factor) if factor > 0 else 0.0
        if power > -1.5 or abs(power - round(power)) > 1e-6:
            return factor
        index = len(self.updates)
        self.norm *= factor
        self.layers = {name: norm * factor for name, norm in self.layers.items()}
        for use in self.pending:
            for name in ("coef", "kl_coef"):
                use.columns[name] = use.columns[name] * factor
            tokens = self.batch(use.serial).tokens
            mine = tokens.update[use.rows] == index
            for column in (tokens.loss_coef, tokens.kl_coef):
                column[use.rows] = torch.where(mine, column[use.rows] * factor, column[use.rows])
        return 1.0

    def drop_pending(self) -> None:
        """Forget the present update, which was not made."""
        index = len(self.updates)
        for use in self.pending:
            tokens = self.batch(use.serial).tokens
            here = tokens.update[use.rows]
            tokens.update[use.rows] = torch.where(here == index, -1, here)
        self.again = [each for each in self.again if each[0] != index]
        self._end_update()

    def _end_update(self) -> None:
        self.pending = []
        self.losses = []
        self.not_finite = []
        self.rotation = None
        self.complete = False

    def later_uses(self, first: dict[int, int]) -> dict[str, np.ndarray] | None:
        """Columns of the table `uses` without `step`; None if no token was used twice."""
        parts = []
        for index, use, again in self.again:
            row, position = again.nonzero(as_tuple=True)
            values = (use.columns[name][again] for name in ("ratio", "clipped", "coef"))
            parts.append(
                (use.rows[row] + first[use.serial], position, torch.full_like(row, index), *values)
            )
        if not parts:
            return None
        names = ("rollout", "position", "update", "ratio", "clipped", "loss_coef")
        columns = zip(
            names, (torch.cat(column) for column in zip(*parts, strict=True)), strict=True
        )
        return {
            name: (value.float() if value.is_floating_point() else value).numpy()
            for name, value in columns
        }


@dataclass(frozen=True)
class Sequences:
    """A micro-batch of n sequences as rollouts. `columns` (n, T) is the column of each completion token in the trainer's rows."""

    rollouts: Rollouts
    columns: Tensor
    order: Tensor  # (n,) the trainer's row of each row

    def gather(self, values: Tensor, shift: int = 1) -> Tensor:
        """(n, T) from `values` (B, L−shift), in which column j belongs to the token in column j + shift."""
        return values[self.order.to(values.device)].gather(
            1, (self.columns - shift).clamp(min=0).to(values.device)
        )


def sequences_of(
    ids: Tensor,
    present: Tensor,
    counted: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    *,
    pairs: bool = False,
) -> Sequences:
    """Rows (B, L) of tokens, `present` 1 on tokens and 0 on padding, `counted` on those in the loss, as rollouts.

    With `pairs` (DPO), row i and row i + B/2 are a pair and become adjacent.

    Raises:
        UserError: a row's first token is in the loss, predicted from padding.
    """
    n = len(ids)
    order = torch.arange(n).view(2, -1).T.flatten() if pairs else torch.arange(n)
    prompts = []
    completions = []
    flags = []
    columns = []
    for row in order.tolist():
        kept = present[row].nonzero()[:, 0]
        if len(kept) < 2:  # an empty text: two places of which none is in the loss
            kept = torch.zeros(2, dtype=torch.long, device=ids.device)
        loss = counted[row, kept].tolist()
        if loss[0] and int(kept[0]) > 0:
            wrong = "the first token of a left-padded row is in the loss, predicted from padding"
            raise UserError(f"record: {wrong}; set tokenizer.padding_side = 'right'")
        loss[0] = False  # nothing predicts it
        first = loss.index(True) if any(loss) else len(loss) - 1
        last = max((i for i, flag in enumerate(loss) if flag), default=first)
        tokens = ids[row, kept].tolist()
        prompts.append(tokens[:first])
        completions.append(tokens[first : last + 1])
        columns.append(kept[first : last + 1].cpu())
        flags.append(loss[first : last + 1])
    made = completions_of(prompts, completions, flags, ids.device)
    texts = tokenizer.batch_decode(completions, clean_up_tokenization_spaces=False)
    rollouts = replace(made, group=made.group // (2 if pairs else 1), texts=texts).with_reward(
        torch.zeros(n)
    )
    return Sequences(rollouts, torch.nn.utils.rnn.pad_sequence(columns, batch_first=True), order)


LAYOUT = {
    "end_outside_loss": "the end token stands right behind the last token in the loss",
    "padding_in_loss": "the loss counts tokens behind a row's end, or where the attention mask is 0",
    "padding_inside": "padding stands between the tokens of a row",
}
"""Event -> what may be odd about where a micro-batch has its tokens, its padding and its loss."""


def odd_layout(
    ids: Tensor, present: Tensor, counted: Tensor, ends: Sequence[int], pad: int
) -> dict[str, float]:
    """Event of `LAYOUT` -> share of the rows (n, L) that have it; `ends` are the IDs of end tokens, `pad` that of padding."""
    there, end = present.bool(), torch.isin(ids, torch.tensor(ends, device=ids.device))
    columns = torch.arange(ids.shape[1], device=ids.device)
    last = torch.where(counted, columns, -1).amax(1, keepdim=True)  # (n, 1)
    behind = end & ~counted & there & (columns == last + 1)
    ended = (end & (columns == last)).any(1)
    closed = (end & counted)[:, :-1] & (end | (ids == pad))[:, 1:] & counted[:, 1:]
    later = there.flip(1).long().cumsum(1).flip(1) > 0
    earlier = there.long().cumsum(1) > 0
    rows = {
        "end_outside_loss": behind.any(1) & ~ended & (last >= 0)[:, 0],
        "padding_in_loss": (counted & ~there).any(1) | closed.any(1),
        "padding_inside": (~there & later & earlier).any(1),
    }
    return {name: float(found.float().mean()) for name, found in rows.items()}


def unused_tokens(stats: TokenStats, advantage: Tensor) -> StepTokens:
    """StepTokens (N, T) that no update has used yet, with advantages (N,) or (N, T)."""
    shape = stats.logp.shape
    dtype = stats.logp.dtype
    each = advantage.to("cpu", dtype)
    return replace(
        StepTokens.unused(stats),
        weight=torch.ones(shape, dtype=dtype),
        advantage=(each[:, None].expand(shape) if each.dim() == 1 else each).clone(),
    )


def first_rows(rollouts: Rollouts) -> list[int]:
    """The first row of each group."""
    groups = rollouts.group.tolist()
    return [groups.index(group) for group in dict.fromkeys(groups)]


def same_prompts(rollouts: Rollouts) -> bool:
    """Whether the rows of every group have one prompt, so that it can be run once for all of them."""
    ids = (
        rollouts.input_ids[:, : rollouts.prompt_width]
        * rollouts.attention_mask[:, : rollouts.prompt_width]
    )
    return torch.equal(ids, ids[torch.tensor(first_rows(rollouts))[rollouts.group.cpu()]])


def prompt_texts(rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """(N,) prompts as the model saw them."""
    width = rollouts.prompt_width
    pairs = zip(rollouts.input_ids[:, :width], rollouts.attention_mask[:, :width], strict=True)
    ids = [row[seen.bool()].tolist() for row, seen in pairs]
    return list(tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False))


def widened(values: Tensor, width: int, fill: float = 0) -> Tensor:
    """`values` (n, T) padded on the right with `fill` to `width` columns."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=fill)


def stacked(parts: Iterable[Tensor], width: int, fill: float = 0) -> Tensor:
    """(Σ n, width) of values (n, T) one below the other, padded on the right with `fill`."""
    return torch.cat([widened(part, width, fill) for part in parts])


def _joined_tokens(parts: Sequence[StepTokens]) -> StepTokens:
    width = max(part.update.shape[1] for part in parts)

    def cat(name: str, of: Sequence[object]) -> Tensor:
        """One field of all parts."""
        return stacked((getattr(part, name) for part in of), width, -1 if name == "update" else 0)

    stats = TokenStats(
        **{f.name: cat(f.name, [part.stats for part in parts]) for f in fields(TokenStats)}
    )
    return StepTokens(
        stats=stats, **{f.name: cat(f.name, parts) for f in fields(StepTokens) if f.name != "stats"}
    )
