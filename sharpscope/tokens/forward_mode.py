"""Directional derivatives of hidden states and log-probabilities by PyTorch's forward mode through the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sharpscope.errors import UserError, first_line
from sharpscope.policy import backbone, bare
from sharpscope.policy.guard import attention_implementation
from sharpscope.policy.sharding import full_tensor
from sharpscope.tokens.norms import head_chunks
from sharpscope.tokens.rows import Rows
from sharpscope.tokens.structure import FORWARD, Structure, hidden_states, read_before

KEPT_BYTES = {"cpu": 512 * 2**20, "cuda": 2 * 2**30}
"""Most that is kept of a pass for the forward-mode pass over the same rows."""


@contextmanager
def dual_parameters(model: nn.Module, direction: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it the parameters of a pass through the backbone carry these tangents, by name, also tied ones.

    Those of a model sharded by FSDP2 are gathered while it has the weights of their layer gathered.
    """
    body = backbone(model)
    names = {id(p): name for name, p in bare(model).named_parameters()}
    # outer ones first
    owners = [module for module in body.modules() if module is body or hasattr(module, "unshard")]
    # whose call gathers its weights
    owner_of = {holder: owner for owner in owners for holder in owner.modules()}
    owned: dict[nn.Module, list[tuple[nn.Module, str, str]]] = {owner: [] for owner in owners}
    for holder, owner in owner_of.items():
        trained = {
            key: p for key, p in holder._parameters.items() if p is not None and p.requires_grad
        }
        owned[owner] += [(holder, key, names[id(p)]) for key, p in trained.items()]
    replaced: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter]]] = {}

    def enter(module: nn.Module, *_: object) -> None:
        """Put dual numbers in the place of a module's weights."""
        for holder, key, name in owned[module]:
            weight: Any = holder._parameters[key]
            dual, tangent = weight.detach(), full_tensor(direction.get(name))
            if tangent is not None:
                tangent = tangent.to(weight)
                if isinstance(holder, nn.Embedding) and holder.padding_idx is not None:
                    # without a gradient in reverse mode
                    row = torch.tensor([holder.padding_idx], device=weight.device)
                    tangent = tangent.index_fill(0, row, 0.0)
                dual = forward_ad.make_dual(dual, tangent)
            replaced.setdefault(module, []).append((holder, key, weight))
            holder._parameters[key] = dual

    def leave(module: nn.Module, *_: object) -> None:
        """Put the weights back, before FSDP2 frees them."""
        for holder, key, weight in replaced.pop(module, []):
            holder._parameters[key] = weight

    with ExitStack() as stack:
        for module in owners:
            # after FSDP2's hook, which was there before
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, prepend=True).remove)
        try:
            yield
        finally:
            for module in list(replaced):
                leave(module)


class Keeping(TorchFunctionMode):
    """Keeps the outputs of a pass's linear maps for forward-mode passes over the same rows.

    Attributes:
        room: bytes that are left.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self._values: list[Tensor] = []
        self._versions: list[int] = []

    @property
    def values(self) -> list[Tensor]:
        """The outputs, in order; none if there was not enough room for all, or the model has written to one."""
        same = self.room > 0 and self._versions == [value._version for value in self._values]
        return self._values if same else []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if func is F.linear and self.room > 0 and torch.is_grad_enabled():
            self.room -= out.nbytes
            self._values.append(out.detach())
            self._versions.append(out._version)
            if self.room <= 0:
                self._values.clear()
        return out


class Pushing(TorchFunctionMode):
    """Linear maps with one product less where their values are kept; no derivative where a model switches autograd off."""

    def __init__(self, kept: Sequence[Tensor]) -> None:
        super().__init__()
        self._kept = iter(kept) if kept else None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        if not torch.is_grad_enabled():
            with forward_ad._set_fwd_grad_enabled(False):
                return func(*args, **(kwargs or {}))
        if func is not F.linear or self._kept is None:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
        (x, tx), (w, tw) = (forward_ad.unpack_dual(given[name]) for name in ("input", "weight"))
        tb = None if given.get("bias") is None else forward_ad.unpack_dual(given["bias"]).tangent
        out = next(self._kept)
        if out.shape != (*x.shape[:-1], len(w)):
            raise RuntimeError("the pass differs from the one whose values were kept")
        moved = None if tw is None else F.linear(x, tw, tb)
        if tx is not None and moved is not None:
            moved = (
                moved.view(-1, moved.shape[-1])
                .addmm_(tx.reshape(-1, tx.shape[-1]), w.mT)
                .view(out.shape)
            )
        elif tx is not None:
            moved = F.linear(tx, w, tb)
        elif moved is None and tb is not None:
            moved = tb.expand_as(out)
        return out if moved is None else forward_ad.make_dual(out, moved)


@torch.no_grad()
def pushed_hidden(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    direction: Mapping[str, Tensor],
    kept: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Hidden states (B, L, d) of a chunk of rows and their derivative along tensors like the trainable parameters, by name.

    `kept`: `Keeping.values` of a pass over the chunk.
    """
    try:
        with (
            forward_ad.dual_level(),
            torch.enable_grad(),  # only to show where the model switches it off
            dual_parameters(model, direction),
            attention_implementation(model, "math" if structure.own_attention else FORWARD),
            Pushing(kept),
        ):
            out = hidden_states(model, rows.ids, read_before(model, rows.before, len(rows.ids)))
            value, tangent = forward_ad.unpack_dual(out)
    except (NotImplementedError, RuntimeError) as problem:
        if "forward mode" not in str(problem) and "jvp" not in str(problem):
            raise
        raise UserError(
            f"model, {type(bare(model)).__name__}: a part of it has no forward-mode derivative ({first_line(problem)}), "
            "which token shares need"
        ) from problem
    return value, torch.zeros_like(value) if tangent is None else tangent


@torch.no_grad()
def logp_derivative(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    direction: Sequence[Tensor],
    temperature: float,
    kept: Sequence[Sequence[Tensor]] = (),
) -> Tensor:
    """Derivatives (N, S) of log π of the chosen tokens along tensors like the trainable parameters, in the model's order.

    `kept`: `Keeping.values` of a pass over each chunk of the rows.
    """
    values = torch.zeros(rows.shape, dtype=structure.dtype, device=rows.ids.device)
    by_name = dict(zip(structure.named, direction, strict=True))
    for chunk, known in zip(rows.chunks(share=structure.shares), kept or repeat(()), strict=False):
        values[chunk.place] = chunk_derivative(model, structure, chunk, by_name, temperature, known)
    return values


@torch.no_grad()
def chunk_derivative(
    model: nn.Module,
    structure: Structure,
    chunk: Rows,
    direction: Mapping[str, Tensor],
    temperature: float,
    kept: Sequence[Tensor] = (),
) -> Tensor:
    """Derivatives (M,) of log π of the chosen tokens of a chunk; a parameter without a direction is constant."""
    # (M, d)
    states, moved = (
        x[chunk.predicts] for x in pushed_hidden(model, structure, chunk, direction, kept)
    )
    weight, bias = (
        full_tensor(direction.get(name or ""))
        for name in (structure.tied or structure.head_weight, structure.head_bias)
    )
    out = torch.empty(len(states), dtype=structure.dtype, device=states.device)
    for rows, pull, to_hidden in head_chunks(states, structure.head, chunk.targets, temperature):
        h = states[rows]
        out[rows] = torch.linalg.vecdot(moved[rows].to(out), to_hidden.to(out))
        if weight is not None:
            out[rows] += torch.linalg.vecdot(h.to(out), (pull.to(h) @ weight.to(h)).to(out))
        if bias is not None:
            out[rows] += (pull @ bias.to(pull)).to(out)
    return out
