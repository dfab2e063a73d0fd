"""Directional derivatives of hidden states and log-probabilities by PyTorch's forward mode through the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sharpscope.errors import UserError
from sharpscope.policy import Head, bare
from sharpscope.probes.guard import attention_implementation
from sharpscope.probes.token_gradients.head import head_chunks
from sharpscope.probes.token_gradients.rows import Rows
from sharpscope.probes.token_gradients.structure import Structure, hidden_states, read_before

KEPT_BYTES = {"cpu": 512 * 2**20, "cuda": 2 * 2**30}
"""Most that is kept of a pass for forward-mode passes over the same rows."""


@contextmanager
def substituted(model: nn.Module, values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Call a module with other tensors in place of its parameters, including tied ones."""
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in bare(model).modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and parameter in values:
                    swapped.append((module, name, parameter))
                    # A plain attribute of the dictionary: `register_parameter` would refuse what is not a Parameter.
                    module._parameters[name] = values[parameter]  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter


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

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
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

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
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
            moved = moved.view(-1, moved.shape[-1]).addmm_(tx.reshape(-1, tx.shape[-1]), w.mT).view(out.shape)
        elif tx is not None:
            moved = F.linear(tx, w, tb)
        elif moved is None and tb is not None:
            moved = tb.expand_as(out)
        return out if moved is None else forward_ad.make_dual(out, moved)


@torch.no_grad()
def pushed_hidden(
    model: nn.Module, structure: Structure, rows: Rows, direction: Sequence[Tensor], kept: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Hidden states (B, L, d) of a chunk of rows and their derivative along tensors like the trainable parameters.

    Args:
        kept: `Keeping.values` of a pass over the chunk.

    Raises:
        UserError: an operation of the model has no forward-mode derivative.
    """
    padding = {
        module.weight: module.padding_idx
        for module in bare(model).modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
    }
    with forward_ad.dual_level():
        duals: dict[nn.Parameter, Tensor] = {}
        for parameter, part in zip(structure.named.values(), direction, strict=True):
            tangent = part.to(parameter)
            if parameter in padding:  # its row has no gradient in reverse mode
                tangent = tangent.clone()
                tangent[padding[parameter]] = 0
            duals[parameter] = forward_ad.make_dual(parameter.detach(), tangent)
        # Autograd is on only to show where the model switches it off.
        with (
            torch.enable_grad(),
            substituted(model, duals),
            attention_implementation(model, structure.forward_attention),
            Pushing(kept),
        ):
            try:
                out = hidden_states(model, rows.ids, read_before(model, rows.before))
            except (NotImplementedError, RuntimeError) as problem:
                if "forward mode" not in str(problem) and "jvp" not in str(problem):
                    raise
                raise UserError(
                    f"model, {type(bare(model)).__name__}: a part of it has no forward-mode derivative "
                    f"({str(problem).splitlines()[0]}), which token shares need"
                ) from problem
        value, tangent = forward_ad.unpack_dual(out)
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
    """Derivatives (N, S) of log π of the chosen tokens along tensors like the trainable parameters.

    Args:
        model: its structure is `structure`.
        structure: see above.
        rows: tokens.
        direction: in the model's order.
        temperature: softmax temperature.
        kept: `Keeping.values` of a pass over each chunk of the rows.
    """
    values = torch.zeros(rows.shape, dtype=structure.dtype, device=rows.ids.device)
    by_name = dict(zip(structure.named, direction, strict=True))
    weight = by_name.get(structure.tied or structure.head_weight or "")
    bias = by_name.get(structure.head_bias or "")
    for chunk, known in zip(rows.chunks(share=structure.shares), kept or repeat(()), strict=False):
        hidden, moved = pushed_hidden(model, structure, chunk, direction, known)
        states = hidden[chunk.predicts], moved[chunk.predicts]
        chunk.write(values, head_rates(*states, structure.head, (weight, bias), chunk.targets, temperature))
    return values


def head_rates(
    hidden: Tensor,
    moved: Tensor,
    head: Head,
    direction: tuple[Tensor | None, Tensor | None],
    targets: Tensor,
    temperature: float,
) -> Tensor:
    """Derivatives (M,) of the log-probabilities of `targets` (M,).

    Args:
        hidden: (M, d) that predict them.
        moved: derivatives of `hidden`.
        head: the output layer.
        direction: derivatives of its weight and bias; None: constant.
        targets: tokens.
        temperature: softmax temperature.
    """
    out = torch.empty(len(hidden), dtype=torch.promote_types(head.weight.dtype, torch.float32), device=hidden.device)
    weight, bias = direction
    for part in head_chunks(hidden, head, targets, temperature):
        h, pull = hidden[part.rows], part.pull
        rate = torch.linalg.vecdot(moved[part.rows].to(out), part.to_hidden.to(out))
        if weight is not None:
            rate += torch.linalg.vecdot(h.to(out), (pull.to(h) @ weight.to(h)).to(out))
        if bias is not None:
            rate += (pull @ bias.to(pull)).to(out)
        out[part.rows] = rate
    return out
