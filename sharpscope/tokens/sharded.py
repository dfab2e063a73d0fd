"""Score norms and shares of a model whose weights are in shards (FSDP2), without a copy of the whole weights.

The passes go through the sharded model itself: FSDP2 gathers a layer's weights while it computes that layer, where the recorder,
or a tangent gathered alike, meets them; the weights outside the layers are gathered for a pass. Each process gives its rows; all must
call together, since all run equally many passes, and all raise the errors. Mixed precision is that of the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.errors import CheckError
from sharpscope.policy import bare, output_head
from sharpscope.policy.directions import inner
from sharpscope.policy.guard import guarded
from sharpscope.policy.sharding import is_shard, recover, reshard, summation_factor, unsharded
from sharpscope.tokens.forward_mode import chunk_derivative
from sharpscope.tokens.norms import ScoreNorms, Squares, add_local
from sharpscope.tokens.rows import Rows, make_rows
from sharpscope.tokens.structure import Structure, examine

CHUNK = 2048
"""Positions of a pass, whose activations are kept; a longer row runs alone."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest relative error of the self-check, by dtype of the activations; 5e-2 for float16 and bfloat16."""


class ShardedProbes:
    """Norms and shares of tokens of a sharded model; the first call of each compares one with the model's own gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model  # after `fully_shard`
        # relative errors that the self-checks of `local` and `along` found
        self.checked: dict[str, float] = {}
        self._known: Structure | None = None
        self._dtype = torch.float32  # of the logits

    def local(
        self,
        input_ids: Tensor,
        mask: Tensor,
        attention_mask: Tensor,
        temperature: float,
        check: bool = True,
    ) -> ScoreNorms:
        """Local norms of this process's tokens; arguments and errors are those of `score_norms`."""
        with self._unchanged():
            rows, structure = self._prepared(input_ids, mask, attention_mask, temperature)
            structure.require_local()

            def add(chunk: Rows, sums: Squares) -> None:
                """Add the squared norms of a chunk's tokens."""
                with self._gathered(structure):
                    add_local(self.model, structure, chunk, temperature, sums)

            if check and "local" not in self.checked and (row := _first(rows)) is not None:
                add(row, found := Squares(row, structure.dtype))
                gradient = self._gradient(row.ids, temperature)
                reference = math.sqrt(inner(gradient, gradient))
                self._check("local", float(found.total.sum()) ** 0.5, reference, reference)
            sums = Squares(rows, structure.dtype)
            for chunk in _passes(rows):
                add(chunk, sums)
            return replace(sums.norms("local"), checked=self.checked.get("local"))

    def along(
        self,
        input_ids: Tensor,
        mask: Tensor,
        attention_mask: Tensor,
        direction: Sequence[Tensor | None],
        temperature: float,
        check: bool = True,
    ) -> Tensor:
        """Derivatives (N, S) of log π of this process's tokens along a direction, 0 where the mask is 0.

        Arguments and errors are those of `attribute`; a part of the direction that is None counts 0.
        """
        with self._unchanged():
            rows, structure = self._prepared(input_ids, mask, attention_mask, temperature)
            tangents = {
                n: part
                for n, part in zip(structure.named, direction, strict=True)
                if part is not None
            }

            def rates(chunk: Rows) -> Tensor:
                """Derivatives of log π of a chunk's tokens."""
                with self._gathered(structure):
                    return chunk_derivative(self.model, structure, chunk, tangents, temperature)

            if check and "along" not in self.checked and (row := _first(rows)) is not None:
                found = float(rates(row)[0])
                gradient = self._gradient(row.ids, temperature)
                scale = math.sqrt(inner(gradient, gradient) * inner(direction, direction))
                self._check("along", found, inner(gradient, direction), scale)
            out = torch.zeros(rows.shape, dtype=structure.dtype, device=rows.ids.device)
            for chunk in _passes(rows):
                out[chunk.place] = rates(chunk)
            return out

    def exact(
        self,
        input_ids: Tensor,
        mask: Tensor,
        attention_mask: Tensor,
        temperature: float,
    ) -> Tensor:
        """Norms (N, S) of a few tokens, a forward and a backward pass for each; all processes give the same rows."""
        with self._unchanged():
            rows = distributed.together(
                lambda: make_rows(self.model, input_ids, mask, attention_mask, temperature)
            )
            values = torch.zeros(rows.shape, dtype=torch.float64, device=rows.ids.device)
            for row, position in rows.chosen.nonzero().tolist():
                gradient = self._gradient(rows.ids[row : row + 1, : position + 1], temperature)
                values[rows.source[row], rows.columns[row, position]] = math.sqrt(
                    inner(gradient, gradient)
                )
            return values

    def _prepared(
        self,
        input_ids: Tensor,
        mask: Tensor,
        attention_mask: Tensor,
        temperature: float,
    ) -> tuple[Rows, Structure]:
        """The rows of a call and the structure of the model, found in the first call."""
        rows = distributed.together(
            lambda: make_rows(self.model, input_ids, mask, attention_mask, temperature)
        )
        if self._known is None:
            with torch.no_grad():  # the first pass through FSDP2 must be of the whole model
                self.model(
                    input_ids=torch.zeros_like(rows.ids[:1, :1]).expand(1, 2), use_cache=False
                )
            with unsharded(self.model, layers=False):
                self._known = examine(self.model)
        return rows, self._known

    @contextmanager
    def _gathered(self, structure: Structure) -> Iterator[None]:
        """Context of a pass; the weights outside the layers are gathered anew, since FSDP2 frees them after a backward pass."""
        with unsharded(self.model, layers=False):
            structure.head = output_head(self.model)
            yield

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Context that restores weights, gradients and mode; the weights are in shards, on which training has its gradients."""
        reshard(self.model)
        with guarded(self.model):
            try:
                yield
            except BaseException:
                recover(self.model)  # it may have left a pass in its middle
                raise
            finally:
                reshard(self.model)

    def _gradient(self, ids: Tensor, temperature: float) -> list[Tensor | None]:
        """∇log π of the last token of one row (1, L), the same in every process, by a backward pass; sharded."""
        given = (
            {"logits_to_keep": 2}
            if "logits_to_keep" in signature(bare(self.model).forward).parameters
            else {}
        )
        with torch.enable_grad():
            logits = self.model(input_ids=ids, use_cache=False, **given).logits
            wide = torch.promote_types(logits.dtype, torch.float32)
            self._dtype = logits.dtype
            (logits[0, -2].to(wide) / temperature).log_softmax(-1)[ids[0, -1]].backward()
        factor = summation_factor(self.model)
        found = list[Tensor | None]()
        for parameter in self.model.parameters():
            gradient, parameter.grad = parameter.grad, None
            if parameter.requires_grad:
                if gradient is not None and is_shard(gradient) and factor != 1.0:
                    gradient = gradient / factor
                found.append(gradient)
        return found

    def _check(
        self,
        name: str,
        found: float,
        expected: float,
        scale: float,
    ) -> None:
        """Compare a value with that by the model's own gradient, relative to `scale`, in every process."""
        error = abs(found - expected) / scale if scale else 0.0
        limit = TOLERANCE.get(self._dtype, 5e-2)
        errors = distributed.gather(error)
        # `max` would lose a NaN that is not the first
        worst = math.nan if any(map(math.isnan, errors)) else max(errors)
        if not worst <= limit:
            what = "score norms" if name == "local" else "shares"
            text = f"{what} of the sharded model differ from its own gradient's by {worst:.1e} (allowed {limit:.0e})"
            raise CheckError(text, name, worst, limit)
        self.checked[name] = worst


def _first(rows: Rows) -> Rows | None:
    """The first two tokens of the first process's first row, the second of interest; None if it has none."""
    pair = distributed.broadcast(
        rows.ids[:1, :2].cpu() if len(rows.ids) and rows.ids.shape[1] > 1 else None
    )
    return None if pair is None else _row(pair.to(rows.ids.device))


def _passes(rows: Rows) -> Iterator[Rows]:
    """Chunks of this process's rows, then, while other processes have more, one without a token of interest."""
    chunks = list(rows.chunks(CHUNK))
    idle = _row(torch.zeros((1, 2), dtype=torch.long, device=rows.ids.device))
    idle = replace(idle, chosen=torch.zeros_like(idle.chosen))
    yield from chunks + [idle] * (max(distributed.gather(len(chunks))) - len(chunks))


def _row(ids: Tensor) -> Rows:
    """A row (1, 2) with its second token of interest."""
    device = ids.device
    chosen = torch.tensor([[False, True]], device=device)
    columns = torch.arange(2, device=device)[None]
    length, source = torch.tensor([[2], [0]], device=device)
    return Rows(ids, length, chosen, columns, source, (1, 2))
