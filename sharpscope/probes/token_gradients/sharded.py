"""Score norms and shares of a model whose weights are in shards (FSDP2), without a copy of the whole weights.

The passes go through the sharded model itself: FSDP2 gathers a layer's weights while it computes that layer, where the recorder,
or a tangent gathered alike, meets them. Each process gives its rows; all must call together, since all run equally many passes.
With mixed precision the passes are in the precision of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from sharpscope import distributed
from sharpscope.errors import CheckError, UserError
from sharpscope.policy import Head, backbone, bare, output_head
from sharpscope.policy.sharding import is_shard, recover, reshard, summation_factor
from sharpscope.probes.directions import inner
from sharpscope.probes.guard import attention_implementation, guarded
from sharpscope.probes.token_gradients import attention as attn
from sharpscope.probes.token_gradients.forward_mode import Pushing, dual_parameters, explained, head_rates
from sharpscope.probes.token_gradients.local import start_of
from sharpscope.probes.token_gradients.result import Collector, ScoreNorms, Sums
from sharpscope.probes.token_gradients.rows import Rows, make_rows, safe_width, widen
from sharpscope.probes.token_gradients.structure import Structure, outline, recording

CHUNK = 2048
"""Positions of a pass, whose activations are kept; a longer row runs alone."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest relative error of the self-check, by dtype of the activations; 5e-2 for float16 and bfloat16."""


class ShardedProbes:
    """Norms and shares of tokens of a sharded model; the first call of each compares one with the model's own gradient.

    The processes share the rows, or each has its own; all must call together. Gradients of the training stay as they are.
    Errors are raised in every process.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model  # after `fully_shard`
        self.checked: dict[str, float] = {}  # relative errors that the self-checks of `local` and `along` found
        self._dtype = torch.float32  # of the logits

    def local(
        self, input_ids: Tensor, mask: Tensor, attention_mask: Tensor, temperature: float, check: bool = True
    ) -> ScoreNorms:
        """Local norms of this process's tokens.

        Args are those of `score_norms`; `check`: whether the first call compares a norm with that of the model's own gradient.

        Raises:
            UserError: a part of the model that the method does not support.
            CheckError: a norm differs from that of the model's own gradient.
        """
        model = self.model
        with self._unchanged():
            rows = distributed.together(lambda: make_rows(model, input_ids, mask, attention_mask, temperature))
            if check and "local" not in self.checked and (row := _first(rows)) is not None:
                found = float(_local_sums(model, row, temperature).total[0]) ** 0.5
                gradient = self._gradient(row.ids, temperature)
                reference = math.sqrt(inner(gradient, gradient))
                self._check("local", found, reference, reference)
            collector = Collector(rows, torch.promote_types(next(model.parameters()).dtype, torch.float32))
            for chunk, mine in _passes(rows):
                sums = _local_sums(model, chunk, temperature)
                if mine:
                    collector.write(chunk, sums)
            return replace(collector.result("local"), checked=self.checked.get("local"))

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

        Args are those of `local`; `direction`: tensors like the trainable parameters in the model's order; None counts 0.

        Raises:
            UserError: a part of the model without a forward-mode derivative.
            CheckError: a derivative differs from that by the model's own gradient.
        """
        model = self.model
        with self._unchanged():
            named = {name: p for name, p in bare(model).named_parameters() if p.requires_grad}
            tangents = {n: part for n, part in zip(named, direction, strict=True) if part is not None}
            rows = distributed.together(lambda: make_rows(model, input_ids, mask, attention_mask, temperature))
            if check and "along" not in self.checked and (row := _first(rows)) is not None:
                found = float(_rates(model, row, tangents, temperature)[0])
                gradient = self._gradient(row.ids, temperature)
                scale = math.sqrt(inner(gradient, gradient) * inner(direction, direction))
                self._check("along", found, inner(gradient, direction), scale)
            out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.ids.device)
            for chunk, mine in _passes(rows):
                rates = _rates(model, chunk, tangents, temperature)
                out = out.to(torch.promote_types(out.dtype, rates.dtype))
                if mine:
                    chunk.write(out, rates)
            return out

    def exact(self, input_ids: Tensor, mask: Tensor, attention_mask: Tensor, temperature: float) -> Tensor:
        """Norms (N, S) of the whole gradients of a few tokens, a forward and a backward pass for each.

        All processes give the same rows, and compute each token together. Arguments and errors are those of `local`.
        """
        with self._unchanged():
            rows = distributed.together(lambda: make_rows(self.model, input_ids, mask, attention_mask, temperature))
            values = torch.zeros(rows.shape, dtype=torch.float64, device=rows.ids.device)
            for row, position in rows.chosen.nonzero().tolist():
                gradient = self._gradient(rows.ids[row : row + 1, : position + 1], temperature)
                values[rows.source[row], rows.place[row, position]] = math.sqrt(inner(gradient, gradient))
            return values

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
        given = {"logits_to_keep": 2} if "logits_to_keep" in signature(bare(self.model).forward).parameters else {}
        with torch.enable_grad():
            logits = self.model(input_ids=ids, use_cache=False, **given).logits
            wide = torch.promote_types(logits.dtype, torch.float32)
            self._dtype = logits.dtype
            (logits[0, -2].to(wide) / temperature).log_softmax(-1)[ids[0, -1]].backward()
        factor, found = summation_factor(self.model), list[Tensor | None]()
        for parameter in self.model.parameters():
            gradient, parameter.grad = parameter.grad, None
            if parameter.requires_grad:
                if gradient is not None and is_shard(gradient) and factor != 1.0:
                    gradient = gradient / factor
                found.append(gradient)
        return found

    def _check(self, name: str, found: float, expected: float, scale: float) -> None:
        """Compare a value with that by the model's own gradient, relative to `scale`, in every process."""
        error, limit = abs(found - expected) / scale if scale else 0.0, TOLERANCE.get(self._dtype, 5e-2)
        self.checked[name] = max(distributed.gather(error))
        if not self.checked[name] <= limit:
            raise CheckError(
                f"{'score norms' if name == 'local' else 'shares'} of the sharded model differ from its own gradient's by "
                f"{self.checked[name]:.1e} (allowed {limit:.0e})",
                name,
                self.checked[name],
                limit,
            )


def _first(rows: Rows) -> Rows | None:
    """The first two tokens of the first process's first row, the second of interest; None if it has none."""
    pair = distributed.broadcast(rows.ids[:1, :2].cpu() if len(rows.ids) and rows.ids.shape[1] > 1 else None)
    return None if pair is None else _row(pair.to(rows.ids.device))


def _passes(rows: Rows) -> Iterator[tuple[Rows, bool]]:
    """Chunks of this process's rows, then, while other processes have more, one without a token of interest.

    Yields:
        A chunk, and whether it is one of the rows.
    """
    chunks = list(rows.chunks(CHUNK))
    idle = _row(torch.zeros((1, 2), dtype=torch.long, device=rows.ids.device))
    idle = replace(idle, chosen=torch.zeros_like(idle.chosen))
    for index in range(max(distributed.gather(len(chunks)))):
        yield (chunks[index], True) if index < len(chunks) else (idle, False)


def _row(ids: Tensor) -> Rows:
    """One row of two tokens, the second of interest."""
    device = ids.device
    chosen = torch.tensor([[False, True]], device=device)
    place = torch.arange(2, device=device)[None]
    length, source = torch.tensor([[2], [0]], device=device)
    return Rows(ids, length, chosen, place, source, (1, 2))


def _pass(model: nn.Module, ids: Tensor, take: Callable[[Tensor, Tensor], None]) -> tuple[Tensor, bool]:
    """The last logits of a pass over (B, L), and whether its attention can be replaced.

    `take` is called with the hidden states and the output layer's input while that layer's weights are whole.
    """
    causal: Any = bare(model)
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(output.last_hidden_state)

    def at_head(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        take(seen[-1], args[0])

    given: dict[str, Any] = {"position_ids": torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)}
    if "logits_to_keep" in signature(causal.forward).parameters:
        given["logits_to_keep"] = 1
    with ExitStack() as stack, attn.counting() as calls:
        stack.callback(backbone(model).register_forward_hook(keep).remove)
        stack.callback(causal.get_output_embeddings().register_forward_pre_hook(at_head).remove)  # after FSDP2's hooks
        return model(input_ids=ids, use_cache=False, **given).logits, bool(calls)


def _local_sums(model: nn.Module, rows: Rows, temperature: float) -> Sums:
    """Squared local norms (M,) of a chunk's tokens, by a forward and a backward pass through the sharded model."""
    causal: Any = bare(model)
    layer = causal.get_output_embeddings()
    structure = outline(causal, Head(layer.weight, layer.bias))
    ids = widen(rows.ids, safe_width(model, rows.ids.shape[1]))  # (B, L)
    predicts = nn.functional.pad(rows.predicts, (0, ids.shape[1] - rows.ids.shape[1]))
    seen: dict[str, Any] = {}
    outside = (structure.tied, structure.head_weight, structure.head_bias)

    @torch.no_grad()
    def take(hidden: Tensor, last: Tensor) -> None:
        structure.head = output_head(model)
        local = start_of(structure, rows, ids, predicts, hidden.detach()[predicts], temperature)
        seen.update(hidden=hidden, local=local, logits=structure.head.logits(last[:1, -1].detach()))

    with recording(model, structure, (ids.shape[0], ids.shape[1]), attn.CUT) as recorder:
        logits, replaced = _pass(model, ids, take)
    hidden, local = seen["hidden"], seen["local"]
    start = torch.zeros_like(hidden)
    start[predicts] = local.output.to_hidden.to(start.dtype)
    # Also from the logits, where FSDP2 begins a backward pass; their cotangents are 0.
    recorder.pull([hidden, logits], [start, torch.zeros_like(logits)], lambda use, g: local.squares(structure, use, g))
    unhandled = {name for name in structure.named if recorder.used.get(name, int(name in outside)) != 1}
    distributed.together(lambda: _require(causal, structure, unhandled, replaced))
    distributed.together(lambda: _require_linear(causal, seen["logits"].float(), logits[:1, -1].detach().float()))
    return local.sums


def _require(causal: nn.Module, structure: Structure, unused: set[str], replaced: bool) -> None:
    """Raise `UserError` for parts of the model that the method does not support."""
    structure.unhandled = frozenset(unused)
    if not replaced:
        structure.not_local = "its attention does not go through transformers' AttentionInterface"
    structure.require_local()


def _require_linear(causal: nn.Module, expected: Tensor, logits: Tensor) -> None:
    """Raise `UserError` if the output layer is not what its closed form says."""
    exact = next(causal.parameters()).dtype in (torch.float32, torch.float64)
    limit = (1e-3 if exact else 5e-2) * (1 + float(expected.abs().max()))
    if bool(expected.isfinite().all()) and float((expected - logits).abs().max()) > limit:
        raise UserError(
            f"model, {type(causal).__name__}: its logits are not a linear function of its last hidden state; norms are not "
            "measured"
        )


@torch.no_grad()
def _rates(model: nn.Module, rows: Rows, direction: Mapping[str, Tensor], temperature: float) -> Tensor:
    """Derivatives (M,) of log π of a chunk's tokens, by a pass in forward mode through the sharded model."""
    causal: Any = bare(model)
    layer, rates = causal.get_output_embeddings(), list[Tensor]()

    def take(hidden: Tensor, _: Tensor) -> None:
        value, moved = forward_ad.unpack_dual(hidden)
        pairs = [None if p is None else forward_ad.unpack_dual(p) for p in (layer.weight, layer.bias)]
        tangents = [None if pair is None else pair.tangent for pair in pairs]
        whole = replace(output_head(model), weight=pairs[0].primal, bias=pairs[1] and pairs[1].primal)  # type: ignore[union-attr]
        moved = torch.zeros_like(value) if moved is None else moved
        states = value[rows.predicts], moved[rows.predicts]
        rates.append(head_rates(*states, whole, (tangents[0], tangents[1]), rows.targets, temperature))

    with (
        explained(model),
        forward_ad.dual_level(),
        torch.enable_grad(),
        dual_parameters(model, direction),
        attention_implementation(model, attn.FORWARD),
        Pushing(()),
    ):
        _, replaced = _pass(model, rows.ids, take)
    if not replaced:
        raise UserError(
            f"model, {type(causal).__name__}: its attention does not go through transformers' AttentionInterface"
        )
    return rates[-1]
