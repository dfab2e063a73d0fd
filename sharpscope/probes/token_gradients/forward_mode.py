"""Directional derivatives of log-probabilities by forward mode through the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from sharpscope.errors import UserError
from sharpscope.policy import bare
from sharpscope.probes.guard import attention_implementation
from sharpscope.probes.token_gradients import attention as attn
from sharpscope.probes.token_gradients.head import HeadChunk
from sharpscope.probes.token_gradients.rows import safe_width, widen
from sharpscope.probes.token_gradients.structure import Structure, coarser, hidden_states, read_before
from sharpscope.probes.token_gradients.tangents import NotPushedError, Own, Pushing, Tangents, carried, carry

Watch = Callable[[dict[str, Tensor]], AbstractContextManager]


@contextmanager
def substituted(model: nn.Module, named: dict[str, nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """Call a module with other tensors in place of its trainable parameters, including tied ones."""
    replacement = {id(parameter): value for parameter, value in zip(named.values(), values, strict=True)}
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in bare(model).modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and id(parameter) in replacement:
                    swapped.append((module, name, parameter))
                    # A plain attribute of the dictionary: `register_parameter` would refuse what is not a Parameter.
                    module._parameters[name] = replacement[id(parameter)]  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter


def input_direction(model: nn.Module, named: dict[str, nn.Parameter], direction: Sequence[Tensor]) -> list[Tensor]:
    """`direction` with 0 in the padding row of an embedding, which has no gradient in reverse mode."""
    padding = _padding_rows(model)
    return [_without_row(u, padding.get(id(p))) for u, p in zip(direction, named.values(), strict=True)]


def _padding_rows(model: nn.Module) -> dict[int, int]:
    """Id of an embedding's weight -> its padding row."""
    return {
        id(module.weight): module.padding_idx
        for module in bare(model).modules()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None
    }


def _without_row(tangent: Tensor, row: int | None) -> Tensor:
    if row is not None:
        tangent = tangent.clone()
        tangent[row] = 0
    return tangent


@contextmanager
def forward_attention(model: nn.Module, structure: Structure) -> Iterator[None]:
    """Use attention with forward-mode derivatives within the block."""
    with attn.counting(), attention_implementation(model, attn.FORWARD if structure.attention_calls else "math"):
        yield


class NoForwardModeError(UserError):
    """A part of the model has no forward-mode derivative."""


class _AsAutograd(TorchFunctionMode):
    """Switch forward mode off where a model switches autograd off."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        with forward_ad._set_fwd_grad_enabled(False):
            return func(*args, **(kwargs or {}))


def pushed_hidden(
    model: nn.Module,
    structure: Structure,
    ids: Tensor,
    direction: Sequence[Tensor],
    *,
    before: Tensor | None = None,
    watch: Watch | None = None,
) -> tuple[Tensor, Tensor]:
    """Hidden states (B, L, d) of rows `ids` (B, L) and their derivative along `direction`.

    Args:
        before: (P,) a beginning that the rows share and `ids` does not hold.
        watch: given the dual tensors by parameter name, makes a context manager to run the forward pass in.

    Raises:
        NoForwardModeError: an operation of the model has no forward-mode derivative.
    """
    # Nothing that requires a gradient takes part: autograd is on only to show where the model turns it off.
    with torch.enable_grad(), forward_ad.dual_level():
        tangents = input_direction(model, structure.named, direction)
        duals = [
            forward_ad.make_dual(parameter.detach(), tangent.to(parameter))
            for parameter, tangent in zip(structure.named.values(), tangents, strict=True)
        ]
        watching = nullcontext() if watch is None else watch(dict(zip(structure.named, duals, strict=True)))
        with (
            _AsAutograd() if structure.severed else nullcontext(),
            substituted(model, structure.named, duals),
            forward_attention(model, structure),
            watching,
        ):
            try:
                out = hidden_states(model, ids, read_before(model, before))
            except NotImplementedError as problem:
                raise NoForwardModeError(
                    f"model, {type(bare(model)).__name__}: a part of it has no forward-mode derivative "
                    f"({str(problem).splitlines()[0]}); use method='central', or tier='exact' for norms"
                ) from problem
        value, tangent = forward_ad.unpack_dual(out)
        return value, torch.zeros_like(value) if tangent is None else tangent


def pushed_each(
    model: nn.Module,
    structure: Structure,
    ids: Tensor,
    directions: Sequence[Mapping[str, Tensor]],
    *,
    before: Tensor | None = None,
    own: Own | None = None,
    kept: Sequence[Tensor] = (),
) -> tuple[Tensor, list[Tensor]] | None:
    """`pushed_hidden` for several directions at once, and faster; None where this model needs PyTorch's forward mode.

    Args:
        directions: parameter name -> tangent; parameters that are not named stay.
        before: (P,) a beginning that the rows share and `ids` does not hold.
        own: gets what the directions move at each use of a parameter.
        kept: `Keeping.values` of a pass over these rows, which are not computed again.
    """
    if structure.pushes is None:
        structure.pushes = _pushes(model, structure)
    if not structure.pushes:
        return None
    padding = _padding_rows(model)
    values = []
    for name, parameter in structure.named.items():
        value = parameter.detach()
        tangents: Tangents = []
        for direction in directions:
            tangent = direction.get(name)
            if tangent is not None:
                tangent = _without_row(tangent.to(value), padding.get(id(parameter)))
            tangents.append(tangent)
        values.append(carry(value, tangents) if any(t is not None for t in tangents) else value)
    names = {id(value): name for name, value in zip(structure.named, values, strict=True)}
    # As in `pushed_hidden`: autograd is on only to show where the model turns it off.
    with (
        torch.enable_grad(),
        substituted(model, structure.named, values),
        forward_attention(model, structure),
        Pushing(len(directions), names, own, kept),
    ):
        try:
            out = hidden_states(model, ids, read_before(model, before))
        except (NotPushedError, NotImplementedError):
            return None
    if own is not None and not own.complete():
        return None
    found = carried(out) or [None] * len(directions)
    return out, [torch.zeros_like(out) if tangent is None else tangent for tangent in found]


@torch.no_grad()
def _pushes(model: nn.Module, structure: Structure) -> bool:
    """Whether `pushed_each` agrees with PyTorch's forward mode on two short rows of this model."""
    if structure.in_place or structure.severed or structure.chooses or not structure.attention_calls:
        return False
    weight = structure.head.weight
    ids = (torch.arange(14, device=weight.device).view(2, 7) * 5 + 1) % weight.shape[0]
    ids = widen(ids, safe_width(model, 7))
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(p.shape, generator=generator).to(p) for p in structure.named.values()]
    found = pushed_each(model, replace(structure, pushes=True), ids, [dict(zip(structure.named, drawn, strict=True))])
    if found is None:
        return False
    value, moved = pushed_hidden(model, structure, ids, drawn)
    tolerance = torch.finfo(coarser(structure.computes_in, value.dtype)).eps ** 0.5
    return all(
        bool(torch.linalg.vector_norm(a - b) <= tolerance * torch.linalg.vector_norm(b))
        for a, b in ((found[0], value), (found[1][0], moved))
    )


@torch.no_grad()
def pushed_logp(
    hidden: Tensor, moved: Tensor, parts: Iterable[HeadChunk], weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Derivative (M,) of log π of M tokens.

    Args:
        hidden, moved: (M, d) hidden states and their derivative.
        parts: `head_chunks` of these hidden states.
        weight, bias: (V, d) and (V,) direction of the output layer's parameters, None where they are frozen.
    """
    out = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for part in parts:
        h, pull = hidden[part.rows], part.pull
        rate = torch.linalg.vecdot(moved[part.rows].to(out), part.to_hidden.to(out))
        if weight is not None:
            rate += torch.linalg.vecdot(h.to(out), (pull.to(h) @ weight.to(h)).to(out))
        if bias is not None:
            rate += (pull @ bias.to(pull)).to(out)
        out[part.rows] = rate
    return out
