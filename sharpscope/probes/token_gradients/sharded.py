"""Local score norms of a model whose weights are in shards (FSDP2), without a copy of the whole weights.

The pass is that of the tier `local`, through the sharded model itself: FSDP2 gathers a layer's weights while it computes that layer,
and hooks on the modules show the recorder the parameters that are whole at that time. Only the inputs and cotangents of the layers
enter a norm, and these belong to the process that holds the row. Each process gives its own rows; all must call together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from sharpscope.probes.token_gradients.head import head_gradients
from sharpscope.probes.token_gradients.local import LocalPass, tally
from sharpscope.probes.token_gradients.result import Collector, Ledger, ScoreNorms
from sharpscope.probes.token_gradients.rows import Rows, make_rows, safe_width, widen
from sharpscope.probes.token_gradients.structure import Structure, recording
from sharpscope.probes.token_gradients.uses import Recorder

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
            UserError: in every process, a part of the model that the tier does not support.
            CheckError: in every process, a norm differs from that of the model's own gradient.
        """
        model = self.model
        with guarded(model, weights=False):
            rows = _together(lambda: make_rows(model, input_ids, mask, attention_mask, temperature))
            if self.checked is None:
                self._check(rows, temperature)
            dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
            collector = Collector(rows.shape, dtype, rows.ids.device)
            chunks = list(rows.chunks(CHUNK))
            idle = _row(rows.ids[:1, :1].expand(1, 2))
            idle = replace(idle, chosen=torch.zeros_like(idle.chosen))
            for index in range(max(distributed.gather(len(chunks)))):
                ledger = _local_squares(model, chunks[index] if index < len(chunks) else idle, temperature)
                if index < len(chunks):
                    collector.write(chunks[index], ledger)
            return replace(collector.result("local", None), checked=self.checked)

    def _check(self, rows: Rows, temperature: float) -> None:
        """Compare the local norm of a row's second token, at which the tier is exact, with that of its gradient."""
        pair = distributed.broadcast(rows.ids[:1, :2].cpu() if rows.ids.shape[1] > 1 else None)
        if pair is None:
            return
        row = _row(pair.to(rows.ids.device))
        norm = float(_local_squares(self.model, row, temperature).total[0]) ** 0.5
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
        own = math.fsum(squares) ** 0.5
        error, limit = abs(norm - own) / own, TOLERANCE.get(logits.dtype, 5e-2)
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


def _local_squares(model: nn.Module, rows: Rows, temperature: float) -> Ledger:
    """Squared local norms (M,) of a chunk's tokens, by a forward and a backward pass through the sharded model."""
    causal: Any = bare(model)
    names = {id(parameter): name for name, parameter in causal.named_parameters() if parameter.requires_grad}
    layer, embedding = causal.get_output_embeddings(), causal.get_input_embeddings()
    shared = layer.weight is embedding.weight
    tied = names.get(id(layer.weight)) if shared else None
    structure = Structure(
        {}, Head(layer.weight), tied, None if shared else names.get(id(layer.weight)), names.get(id(layer.bias))
    )
    structure.groups = dict.fromkeys(names.values(), ())
    structure.attention_calls = 1  # lets `recording` choose the attention
    ids = widen(rows.ids, safe_width(model, rows.ids.shape[1]))  # (B, L)
    predicts = nn.functional.pad(rows.predicts, (0, ids.shape[1] - rows.ids.shape[1]))
    recorder = Recorder({}, (ids.shape[0], ids.shape[1]))
    seen: dict[str, Any] = {}

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        seen["hidden"] = output.last_hidden_state

    def take(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Compute the output layer's part while its weights are whole."""
        recorder.stop()  # the output layer's part is known in closed form
        with torch.no_grad():
            head, states = output_head(model), seen["hidden"].detach()[predicts]  # its weights are whole here
            words = ids[predicts][:, None] if shared else None
            seen["output"], seen["coupled"] = head_gradients(states, head, rows.targets, temperature, words=words)
            seen["states"], seen["logits"] = states, head.logits(args[0][:1, -1].detach())

    given: dict[str, Any] = {"position_ids": torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)}
    if "logits_to_keep" in signature(causal.forward).parameters:
        given["logits_to_keep"] = 1  # logits are used in the check alone
    with ExitStack() as stack:
        stack.enter_context(_followed(causal, names, recorder))
        stack.callback(backbone(model).register_forward_hook(keep).remove)
        stack.callback(layer.register_forward_pre_hook(take).remove)  # after the hook that follows this layer
        stack.enter_context(torch.enable_grad())
        calls = stack.enter_context(recording(model, structure, recorder, attn.CUT))
        logits = model(input_ids=ids, use_cache=False, **given).logits
    _together(lambda: _require(causal, structure, recorder, calls.made, logits[:1, -1], seen))
    hidden, output = seen["hidden"], seen["output"]
    start = torch.zeros_like(hidden)
    start[predicts] = output.to_hidden.to(start.dtype)
    # Also from the logits, where FSDP2 begins a backward pass; their cotangents are 0.
    outs = [use.out for use in recorder.uses]
    gradients = torch.autograd.grad([hidden, logits], outs, [start, torch.zeros_like(logits)], allow_unused=True)
    kept = [(i, use, g) for i, (use, g) in enumerate(zip(recorder.uses, gradients, strict=True)) if g is not None]
    coupled = None if seen["coupled"] is None else seen["coupled"][:, 0]
    uses, cotangents, order = [use for _, use, _ in kept], [g for _, _, g in kept], [i for i, _, _ in kept]
    return tally(
        structure, LocalPass(rows, seen["states"], predicts.nonzero(), output, coupled, uses, cotangents, order)
    )


def _require(
    causal: nn.Module, structure: Structure, recorder: Recorder, calls: int, logits: Tensor, seen: dict[str, Any]
) -> None:
    """Raise `UserError` for parts of the model that the tier does not support."""
    structure.unhandled, structure.attention_calls = dict(recorder.unhandled), calls
    missing = set(structure.groups) - {name for use in recorder.uses for name in use.names}
    missing -= {structure.tied, structure.head_weight, structure.head_bias, *structure.unhandled}
    structure.unhandled |= dict.fromkeys(sorted(filter(None, missing)), "no operation of this pass")
    structure.require_local()
    expected = seen["logits"].float()
    scale = 1 + float(expected.abs().max())
    exact = logits.dtype in (torch.float32, torch.float64)
    if (
        bool(expected.isfinite().all())
        and float((expected - logits.detach().float()).abs().max()) > (1e-3 if exact else 5e-2) * scale
    ):
        raise UserError(
            f"model, {type(causal).__name__}: its logits are not a linear function of its last hidden state; norms are not measured"
        )


@contextmanager
def _followed(causal: nn.Module, names: Mapping[int, str], recorder: Recorder) -> Iterator[None]:
    """Context in which the recorder follows each module's trainable parameters as they are during its forward pass."""

    def follow(own: list[tuple[str, str]]) -> Callable[[nn.Module, Any], None]:
        return lambda module, _: recorder.follow({name: module.get_parameter(key) for key, name in own})

    with ExitStack() as stack:
        for module in causal.modules():
            own = [(key, names[id(p)]) for key, p in module._parameters.items() if p is not None and id(p) in names]
            if own:
                stack.callback(module.register_forward_pre_hook(follow(own)).remove)
        yield
