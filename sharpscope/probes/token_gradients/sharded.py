"""Local score norms of a model whose weights are in shards (FSDP2), without a copy of the whole weights.

The pass is that of the method `local`, through the sharded model itself: FSDP2 gathers a layer's weights while it computes that
layer, where the recorder meets them. Only the inputs and cotangents of the layers enter a norm, and these belong to the process
that holds the row. Each process gives its rows; all must call together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sharpscope import distributed
from sharpscope.errors import CheckError, UserError
from sharpscope.policy import Head, backbone, bare, output_head
from sharpscope.probes.guard import guarded
from sharpscope.probes.token_gradients import attention as attn
from sharpscope.probes.token_gradients.local import start_of
from sharpscope.probes.token_gradients.result import Collector, ScoreNorms, Sums
from sharpscope.probes.token_gradients.rows import Rows, make_rows, safe_width, widen
from sharpscope.probes.token_gradients.structure import Structure, holders, recording
from sharpscope.probes.token_gradients.uses import Use

T = TypeVar("T")
CHUNK = 2048
"""Positions of a pass, whose activations are kept; a longer row runs alone."""
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest relative error of the self-check, by dtype of the activations; 5e-2 for float16 and bfloat16."""


class ShardedNorms:
    """Measures local score norms of a sharded model; the first call compares one with the model's own gradient.

    Attributes:
        model: causal language model of transformers after `fully_shard`.
        checked: relative error that the self-check found; None before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.checked: float | None = None

    def measure(self, input_ids: Tensor, mask: Tensor, attention_mask: Tensor, temperature: float) -> ScoreNorms:
        """Local norms of this process's tokens. All processes must call it, each with its own rows; no `.grad` may be set.

        Args:
            input_ids: (N, S) tokens.
            mask: (N, S), 1 on the tokens of interest.
            attention_mask: (N, S), 0 on padding.
            temperature: softmax temperature T > 0 of log π.

        Raises:
            UserError: in every process, a part of the model that the method does not support.
            CheckError: in every process, a norm differs from that of the model's own gradient.
        """
        model = self.model
        with guarded(model, weights=False):
            rows = _together(lambda: make_rows(model, input_ids, mask, attention_mask, temperature))
            if self.checked is None:
                self._check(rows, temperature)
            collector = Collector(rows, torch.promote_types(next(model.parameters()).dtype, torch.float32))
            chunks = list(rows.chunks(CHUNK))
            idle = _row(rows.ids[:1, :1].expand(1, 2))
            idle = replace(idle, chosen=torch.zeros_like(idle.chosen))
            for index in range(max(distributed.gather(len(chunks)))):
                sums = _local_sums(model, chunks[index] if index < len(chunks) else idle, temperature)
                if index < len(chunks):
                    collector.write(chunks[index], sums)
            return replace(collector.result("local", None), checked=self.checked)

    def _check(self, rows: Rows, temperature: float) -> None:
        """Compare the local norm of a row's second token, at which the method is exact, with that of its gradient."""
        pair = distributed.broadcast(rows.ids[:1, :2].cpu() if rows.ids.shape[1] > 1 else None)
        if pair is None:
            return
        row = _row(pair.to(rows.ids.device))
        norm = float(_local_sums(self.model, row, temperature).total[0]) ** 0.5
        with torch.enable_grad():
            logits = self.model(input_ids=row.ids, use_cache=False).logits
            wide = torch.promote_types(logits.dtype, torch.float32)
            (logits[0, 0].to(wide) / temperature).log_softmax(-1)[row.ids[0, 1]].backward()
        squares = []
        for parameter in self.model.parameters():
            if parameter.grad is not None:  # FSDP2 has averaged the processes' gradients, which are equal
                size = torch.linalg.vector_norm(parameter.grad.to(wide))
                squares.append(float(size.full_tensor() if isinstance(size, DTensor) else size) ** 2)
                parameter.grad = None
        reference = math.fsum(squares) ** 0.5
        error, limit = abs(norm - reference) / reference, TOLERANCE.get(logits.dtype, 5e-2)
        self.checked = max(distributed.gather(error))
        if not self.checked <= limit:
            raise CheckError(
                f"score norms of the sharded model differ from its own gradient's by {self.checked:.1e} (allowed {limit:.0e})",
                "local",
                self.checked,
                limit,
            )


def _row(ids: Tensor) -> Rows:
    """One row of two tokens, the second of interest."""
    device = ids.device
    chosen = torch.tensor([[False, True]], device=device)
    place = torch.arange(2, device=device)[None]
    return Rows(
        ids, torch.tensor([2], device=device), chosen, place, torch.zeros(1, dtype=torch.long, device=device), (1, 2)
    )


def _together(call: Callable[[], T]) -> T:
    """Call `call` in every process; a `UserError` in one is raised in all, so that none waits for it in the next pass."""
    result, problem = None, None
    try:
        result = call()
    except UserError as error:
        problem = error
    first = distributed.first_not_none([problem])
    if first is not None:
        raise first
    return result  # type: ignore[return-value]


def _local_sums(model: nn.Module, rows: Rows, temperature: float) -> Sums:
    """Squared local norms (M,) of a chunk's tokens, by a forward and a backward pass through the sharded model."""
    causal: Any = bare(model)
    names = {id(parameter): name for name, parameter in causal.named_parameters() if parameter.requires_grad}
    layer = causal.get_output_embeddings()
    shared, head_name = layer.weight is causal.get_input_embeddings().weight, names.get(id(layer.weight))
    structure = Structure(
        {}, Head(layer.weight), head_name if shared else None, None if shared else head_name, names.get(id(layer.bias))
    )
    structure.groups = dict.fromkeys(names.values(), ())
    # The output layer's part is known in closed form.
    structure.modules = {module: keys for module, keys in holders(causal, names).items() if module is not layer}
    ids = widen(rows.ids, safe_width(model, rows.ids.shape[1]))  # (B, L)
    predicts = nn.functional.pad(rows.predicts, (0, ids.shape[1] - rows.ids.shape[1]))
    seen: dict[str, Any] = {}
    used = {structure.tied, structure.head_weight, structure.head_bias}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        seen["hidden"] = output.last_hidden_state

    def take(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Compute the output layer's part while its weights are whole."""
        with torch.no_grad():
            structure.head = output_head(model)
            seen["local"] = start_of(structure, rows, ids, predicts, seen["hidden"].detach()[predicts], temperature)
            seen["logits"] = structure.head.logits(args[0][:1, -1].detach())

    given: dict[str, Any] = {"position_ids": torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)}
    if "logits_to_keep" in signature(causal.forward).parameters:
        given["logits_to_keep"] = 1  # logits are used in the check alone
    with ExitStack() as stack:
        stack.callback(backbone(model).register_forward_hook(keep).remove)
        calls = stack.enter_context(attn.counting())
        recorder = stack.enter_context(recording(model, structure, (ids.shape[0], ids.shape[1]), attn.CUT))
        stack.callback(layer.register_forward_pre_hook(take).remove)  # after the hook that follows this layer
        logits = model(input_ids=ids, use_cache=False, **given).logits

    hidden, local = seen["hidden"], seen["local"]
    start = torch.zeros_like(hidden)
    start[predicts] = local.output.to_hidden.to(start.dtype)

    def measure(use: Use, g: Tensor) -> None:
        used.update((use.weight, use.bias))
        local.squares(structure, use, g)

    # Also from the logits, where FSDP2 begins a backward pass; their cotangents are 0.
    recorder.pull([hidden, logits], [start, torch.zeros_like(logits)], measure)
    _together(lambda: _require(causal, structure, set(names.values()) - used | recorder.repeated, bool(calls)))
    _together(lambda: _require_linear(causal, seen["logits"].float(), logits[:1, -1].detach().float()))
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
