"""The first value that is not finite: what gave it, at which row, position and layer.

Looked for before the optimizer's step, so that it is written down before the training goes on or dies: in the weights, in what
the loop gave, in a second forward pass with hooks, and in the coefficients of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sharpscope.policy.guard import guarded
from sharpscope.policy.head import computing


@dataclass(frozen=True, kw_only=True)
class Place:
    """The first value of a micro-batch's tensor that is not finite, and how many there are."""

    micro: int  # index of the micro-batch in its update, from 0
    name: str
    row: int
    position: int  # column of the tensor; −1 if it has one value a row
    value: float
    masked: bool  # whether the mask leaves the position out of the loss
    count: int

    @property
    def text(self) -> str:
        """The place in words."""
        column = f", position {self.position}" if self.position >= 0 else ""
        return f"micro-batch {self.micro}, row {self.row}{column}"


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Token ids (n, L) of a micro-batch and the mask (n, L) of what is no padding."""

    micro: int
    input_ids: Tensor
    attention_mask: Tensor


def first_not_finite(
    values: Mapping[str, Tensor], mask: Tensor | None = None, micro: int = 0
) -> list[Place]:
    """The first value that is not finite of each tensor, (n,) or (n, W); places in the loss come before masked ones.

    Args:
        values: by name.
        mask: (n, L) of the tokens in the loss; its last W columns belong to a tensor.
        micro: index of the micro-batch.
    """
    places = []
    for name, given in values.items():
        value = given.detach().float().reshape(len(given), -1)
        bad = inside = ~torch.isfinite(value)
        if mask is not None and given.dim() > 1:
            inside = bad & mask[:, -bad.shape[1] :].bool().to(bad.device)
        masked = not bool(inside.any())
        for row, position in torch.nonzero(bad if masked else inside)[:1].tolist():
            place = Place(
                micro=micro,
                name=name,
                row=row,
                position=position if given.dim() > 1 else -1,
                value=float(value[row, position]),
                masked=masked,
                count=int(bad.sum()),
            )
            places.append(place)
    return places


def broken_weights(model: nn.Module) -> str:
    """Which parameters are not finite, in words; empty if all are."""
    counts = {
        name: count
        for name, parameter in model.named_parameters()
        if (count := int((~torch.isfinite(parameter.detach())).sum()))
    }
    if not counts:
        return ""
    name = next(iter(counts))
    dtype = str(dict(model.named_parameters())[name].dtype).removeprefix("torch.")
    return f"{sum(counts.values()):,} weights ({dtype}) are not finite, first in {name}"


def _first_bad(values: object, present: Tensor) -> list[int] | None:
    """Row and position, or index, of a tensor's first value that is not finite; None if it has none.

    Positions of padding count only where `present` (n, L) has no other.
    """
    if not isinstance(values, Tensor) or not values.is_floating_point():
        return None
    bad = ~torch.isfinite(values)
    if bad.shape[:2] == present.shape:
        flat = bad.flatten(2).any(-1) if bad.dim() > 2 else bad
        bad = flat & present if bool((flat & present).any()) else flat
    return torch.nonzero(bad)[0][:2].tolist() if bool(bad.any()) else None


@contextmanager
def watched(model: nn.Module, present: Tensor, found: list[str]) -> Iterator[None]:
    """Context in which `found` gets the first module that gives a value that is not finite from finite input.

    A module that is the first to get such a value tells of an operation between modules, such as the product in attention.
    `present` (n, L) says what is no padding.
    """

    def hook(name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        """Note the first value that is not finite, and what it was made of."""
        if found:
            return
        entered = next((x for x in inputs if _first_bad(x, present)), None)
        made = output if entered is None else entered
        at = _first_bad(made, present)
        if at is None:
            return
        what = f"{name} ({type(module).__name__})"
        if entered is None:
            sizes = [
                float(x.abs().max())
                for x in inputs
                if isinstance(x, Tensor) and x.is_floating_point()
            ]
            what = f"{what} gives a value that is not finite from finite input of size up to {max(sizes, default=0.0):.3g}"
        else:
            what = f"what enters {what} is not finite, though no module before it was seen to give such a value"
        if getattr(made, "dtype", None) == torch.float16:
            what = f"float16 overflow (the largest is 65504): {what}"
        place = f", row {at[0]}, position {at[1]}" if len(at) == 2 else ""
        found.append(what + place)

    leaves = [(name, m) for name, m in model.named_modules() if not list(m.children())]
    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: hook(name, m, i, o))
        for name, module in leaves
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_operation(
    model: nn.Module, batches: Sequence[MicroBatch], compute: torch.dtype | None = None
) -> str:
    """The first module of a second pass over the micro-batches that gives a value that is not finite; empty if none does.

    `compute` is the type of matrix products (autocast); None: that of the weights.
    """
    for batch in batches:
        found: list[str] = []
        ids, present = batch.input_ids, batch.attention_mask
        positions = (present.long().cumsum(1) - 1).clamp(min=0)
        given = {"input_ids": ids, "attention_mask": present, "position_ids": positions}
        with (
            guarded(model),
            torch.no_grad(),
            computing(model, compute),
            watched(model, present.bool(), found),
        ):
            model(**given, use_cache=False)
        if found:
            return f"micro-batch {batch.micro}: {found[0]}"
    return ""


def broken_gradient(model: nn.Module) -> str:
    """The parameter nearest to the output whose gradient is not finite, in words; empty if all are."""
    bad = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]
    return f"the backward pass, nearest to the output in {bad[-1]}" if bad else ""


def autopsy(model: nn.Module, batches: Sequence[MicroBatch], places: Sequence[Place]) -> str:
    """What gave the first value that is not finite, in one sentence.

    Args:
        model: at the weights of the update.
        batches: the micro-batches of the update.
        places: values of the loop and coefficients that are not finite, in the order in which they were seen.
    """
    if weights := broken_weights(model):
        return f"{weights}: an earlier update made them so"
    if operation := first_operation(model, batches):  # what the loop gave may follow from it
        return operation
    inside = [place for place in places if not place.masked and place.name != "coefficient"]
    own = any(place.name == "logp" for place in inside)
    if own and (operation := first_operation(model, batches, torch.float16)):
        return f"{operation}, if the loss ran under float16 autocast; in the weights' own type the pass is finite"
    if inside:
        first = inside[0]
        return f"{first.name} is {first.value:g} at {first.text} ({first.count} values)"
    masked = [place for place in places if place.masked]
    if masked:
        first = masked[0]
        what = f"{first.name} is {first.value:g} at {first.count} masked positions"
        return f"{what} (first: {first.text}), and 0·inf is NaN"
    if places:
        first = places[0]
        return (
            f"∂L/∂ln π is {first.value:g} at {first.text} ({first.count} tokens): the loss itself"
        )
    return broken_gradient(model) or "the loss, after finite log-probabilities"
