"""Rows of tokens with padding at the end, which a causal model does not see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sharpscope.errors import UserError
from sharpscope.policy import bare

Place = tuple[Tensor, Tensor]
"""Rows and columns (M,) in a caller's arrays (N, S)."""

# Tokens that reading a common beginning once must save: it takes passes of its own, and each group's chunks are small.
WORTH = 1024
# Positions per chunk: on a CPU the activations of one layer should stay in its cache.
CHUNK_TOKENS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True)
class Rows:
    """Left-aligned rows of tokens; position j reads token j and predicts token j + 1."""

    ids: Tensor  # (R, L) tokens
    lengths: Tensor  # (R,) tokens without padding
    chosen: Tensor  # (R, L) bool, the tokens of interest; never the first of a row
    columns: Tensor  # (R, L) column of each token in the caller's arrays
    source: Tensor  # (R,) row in the caller's arrays
    shape: tuple[int, int]  # (N, S) of the caller's arrays
    before: Tensor | None = None  # (P,) a common prefix of the rows that `ids` does not contain

    @property
    def predicts(self) -> Tensor:
        """(R, L) bool, the positions that predict a chosen token: `chosen` shifted left by one."""
        return torch.nn.functional.pad(self.chosen[:, 1:], (0, 1))

    @property
    def targets(self) -> Tensor:
        """The chosen tokens (M,), row by row."""
        return self.ids[self.chosen]

    @property
    def place(self) -> Place:
        """Where the chosen tokens (M,) are in the caller's arrays."""
        row, position = self.chosen.nonzero(as_tuple=True)
        return self.source[row], self.columns[row, position]

    def take(self, index: Tensor, first: int = 0) -> Rows:
        """The rows `index` from column `first` on, truncated to the longest of them."""
        at = index, slice(first, int(self.lengths[index].max()))
        lengths = self.lengths[index] - first
        source = self.source[index]
        return Rows(self.ids[at], lengths, self.chosen[at], self.columns[at], source, self.shape)

    def segment(self, start: int, stop: int) -> Rows:
        """The columns from `start` to `stop`, of which the first is read and not chosen."""
        at = slice(start, stop)
        chosen = self.chosen[:, at].clone()
        chosen[:, 0] = False
        return Rows(
            self.ids[:, at],
            self.lengths - start,
            chosen,
            self.columns[:, at],
            self.source,
            self.shape,
        )

    def chunks(self, tokens: int | None = None, *, share: bool = False) -> Iterator[Rows]:
        """Chunks of the rows that have a chosen token, with rows of similar length together and at most `tokens` positions.

        With `share`, rows with equal tokens up to the position that predicts the first chosen one, such as completions of a
        prompt, are a group; their common prefix is in `before`.
        """
        if tokens is None:
            tokens = CHUNK_TOKENS.get(self.ids.device.type, CHUNK_TOKENS["cuda"])
        some = self.chosen.any(1)
        if share:
            groups: dict[tuple[int, ...], list[int]] = {}
            first = self.predicts.int().argmax(1).tolist()
            ids = self.ids.tolist()
            for row in some.nonzero()[:, 0].tolist():
                groups.setdefault(tuple(ids[row][: first[row]]), []).append(row)
            for prefix, group in groups.items():
                if len(prefix) * (len(group) - 1) >= WORTH:
                    some[group] = False
                    for chunk in self.take(
                        torch.tensor(group, device=some.device), len(prefix)
                    ).chunks(tokens):
                        yield replace(chunk, before=self.ids[group[0], : len(prefix)])
        order = self.lengths.argsort(descending=True, stable=True)
        order = order[some[order]]
        start = 0
        while start < len(order):
            size = max(1, tokens // int(self.lengths[order[start]]))
            yield self.take(order[start : start + size])
            start += size


def left_aligned(present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Real tokens first, in their order: columns (N, L) of `present` (N, S), lengths (N,), and whether a position has a token."""
    lengths = present.sum(1)
    width = max(int(lengths.max()) if lengths.numel() else 0, 1)
    order = torch.argsort(~present, dim=1, stable=True)[:, :width]
    return order, lengths, torch.arange(width, device=present.device) < lengths[:, None]


def make_rows(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    attention_mask: Tensor | None,
    temperature: float,
) -> Rows:
    """Check the arguments of a call, which are those of `score_norms`, and left-align its rows.

    Raises:
        UserError: shapes differ, a value is out of range, a token of the mask is padding or the first of its row, the model has
            no trainable parameter, or a row is so long that the model's rotary frequencies change.
    """
    if not temperature > 0:
        raise UserError(f"temperature, {temperature}: must be positive")
    if input_ids.ndim != 2 or mask.shape != input_ids.shape:
        raise UserError(
            f"mask, shape {tuple(mask.shape)}: must be that of input_ids, (N, S); here {tuple(input_ids.shape)}"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "model: no parameter has requires_grad; unfreeze those whose gradient is meant"
        )
    device = input_ids.device
    present = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(device)
    if present.shape != input_ids.shape:
        raise UserError(
            f"attention_mask, shape {tuple(present.shape)}: must be that of input_ids, {tuple(input_ids.shape)}"
        )
    meant = mask.to(device)
    present = present.bool()
    if not bool(((meant == 0) | (meant == 1)).all()):
        raise UserError("mask: must be 0 or 1 everywhere; give weights as `coef`")
    meant = meant.bool()
    if bool((meant & ~present).any()):
        raise UserError("mask: marks a token that attention_mask calls padding; clear it there")
    order, lengths, keep = left_aligned(present)
    _check_length(model, keep.shape[1])
    chosen = meant.gather(1, order) & keep
    if bool(chosen[:, 0].any()):
        raise UserError("mask: marks the first token of a row, which has no prefix; clear it there")
    ids = input_ids.gather(1, order).long()
    embedding: Any = bare(model).get_input_embeddings()
    vocabulary = embedding.weight.shape[0]
    if bool(((ids < 0) | (ids >= vocabulary))[keep].any()):
        raise UserError(
            f"input_ids: has a token outside 0..{vocabulary - 1}, the model's vocabulary"
        )
    # a token of the row itself: libraries warn about padding tokens
    ids = torch.where(keep, ids, ids[:, :1])
    home = next(model.parameters()).device
    source = torch.arange(len(ids), device=home)
    shape = (input_ids.shape[0], input_ids.shape[1])
    return Rows(ids.to(home), lengths.to(home), chosen.to(home), order.to(home), source, shape)


def _check_length(model: nn.Module, width: int) -> None:
    """Raise if rotary frequencies depend on the longest row of a pass, since log-probabilities would too."""
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer, rope_type in types.items() if isinstance(types, dict) else [(None, types)]:
            if rope_type == "longrope":
                settings: Any = module.config.rope_parameters  # type: ignore[union-attr]
                limit = (settings if layer is None else settings[layer])[
                    "original_max_position_embeddings"
                ]
            elif isinstance(rope_type, str) and "dynamic" in rope_type:
                limit = module.original_max_seq_len
            else:
                continue
            if safe_width(model, width) > limit:
                raise UserError(
                    f"input_ids, a row of {width} tokens: beyond {limit} the model's rotary frequencies (rope_type "
                    f"'{rope_type}') change with the longest row of a pass, and log-probabilities with them; shorten rows"
                )


def safe_width(model: nn.Module, width: int) -> int:
    """The least length of at least `width` that no count of attention heads equals.

    Activations are (rows, positions, heads, d) or (rows, heads, positions, d), which their sizes must tell apart.
    """
    config = bare(model).config
    counts = {
        getattr(config, name, None)
        for name in ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
    }
    while width in counts:
        width += 1
    return width


def widen(ids: Tensor, width: int) -> Tensor:
    """`ids` (R, L) padded to `width` columns with the first token of each row."""
    if ids.shape[1] >= width:
        return ids
    return torch.cat([ids, ids[:, :1].expand(-1, width - ids.shape[1])], 1)
