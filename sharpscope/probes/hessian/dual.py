"""Hessian-vector products of the body of a language model: reverse mode over a forward-mode pass.

Hv = ∇_θ [⟨δ̇, h(θ)⟩ + ⟨δ, ḣ(θ)⟩] with h the hidden states, ḣ = (∂h/∂θ) v their tangent, and the cotangents δ, δ̇ of the output
layer held constant. So a product takes one forward pass with tangents and one backward pass. With checkpointing each layer
keeps only its input (x, ẋ) and is recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from sharpscope.probes.hessian.dual_rules import DualRules


@contextmanager
def replaced_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    """Replace the forward method of `module` within the block."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


class DualBody:
    """Hidden states h and tangents ḣ of a backbone along a direction, and their backward pass.

    Args:
        backbone: module whose output has `last_hidden_state`.
        parameters: leaf tensors to differentiate; other parameters are constants.
        checkpoint: recompute each layer in the backward pass.
    """

    def __init__(self, backbone: nn.Module, parameters: Sequence[Tensor], *, checkpoint: bool) -> None:
        self._backbone = backbone
        wanted = {id(parameter) for parameter in parameters}
        self._layers = marked_layers(backbone) if checkpoint else []
        cut = {id(layer) for layer in self._layers}
        prefixes = tuple(
            f"{name}." for name, module in backbone.named_modules(remove_duplicate=False) if id(module) in cut
        )
        # Include all names of a tied parameter, so that every use of it gets a tangent.
        named = [(n, p) for n, p in backbone.named_parameters(remove_duplicate=False) if id(p) in wanted]
        self._embedding = _plain_embedding(backbone, wanted)
        if self._embedding is not None:
            shared = self._embedding.weight
            if sum(p is shared for _, p in named) > 1:
                self._embedding = None  # also used elsewhere in the body: leave it to autograd
            else:
                named = [(n, p) for n, p in named if p is not shared]
        # Checkpointed layers attach their own tangents.
        self._names = {n: p for n, p in named if not n.startswith(prefixes)}
        self._rest = list({id(p): p for p in self._names.values()}.values())

    def product(self, ids: Tensor, direction: dict[int, Tensor], out: dict[int, Tensor], back: Any) -> None:
        """Run the body on `ids` (n, S) along `direction` and add the product to `out`, both keyed by `id(parameter)`.

        `back` maps h and ḣ (n, S, d), detached, to their cotangents; None for ḣ skips its backward pass.
        """
        sink = _Sink(out)
        anchor = torch.zeros((), device=ids.device, requires_grad=True)
        looked_up: list[tuple[Tensor, Tensor]] = []
        with forward_ad.dual_level(), ExitStack() as stack:
            duals = _duals(self._names, direction)
            if self._embedding is not None:
                weight = self._embedding.weight
                lookup = _lookup(self._embedding, direction[id(weight)], looked_up)
                stack.enter_context(replaced_forward(self._embedding, lookup))
            for layer in self._layers:
                stack.enter_context(_checkpointed(layer, direction, sink, anchor))
            with torch.enable_grad(), DualRules():
                output = functional_call(
                    self._backbone, duals, (), {"input_ids": ids, "use_cache": False}, tie_weights=False
                )
            hidden, tangent = forward_ad.unpack_dual(output.last_hidden_state)
            tangent = torch.zeros_like(hidden) if tangent is None else tangent
            to_hidden, to_tangent = back(hidden.detach(), tangent.detach())
            pairs = [(hidden, to_hidden), (tangent, to_tangent)]
            pairs = [(value, cotangent) for value, cotangent in pairs if cotangent is not None and value.requires_grad]
            leaves = [anchor, *(rows for _, rows in looked_up), *self._rest]
            if pairs:
                values, cotangents = zip(*pairs, strict=True)
                products = _reverse(values, leaves, cotangents)
                for (tokens, _), rows in zip(looked_up, products[1:], strict=False):
                    if rows is not None:
                        assert self._embedding is not None
                        _add_rows(out[id(self._embedding.weight)], tokens, rows, self._embedding.padding_idx)
                sink.add(self._rest, products[1 + len(looked_up) :])


def _reverse(
    values: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """A backward pass with forward mode off, which would otherwise process the tangents of saved tensors."""
    with forward_ad._set_fwd_grad_enabled(False):
        return torch.autograd.grad(values, leaves, cotangents, allow_unused=True)


def _duals(names: Mapping[str, Tensor], direction: dict[int, Tensor]) -> dict[str, Tensor]:
    """A dual tensor for each name; names of a tied parameter share one."""
    made = {id(p): forward_ad.make_dual(p, direction[id(p)]) for p in {id(p): p for p in names.values()}.values()}
    return {name: made[id(p)] for name, p in names.items()}


class _Sink:
    """Adds gradients to their totals at once, so that no second copy is held."""

    def __init__(self, out: dict[int, Tensor]) -> None:
        self._out = out

    def add(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Add gradients to those of the parameters; None adds nothing."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                self._out[id(parameter)].add_(gradient)


def marked_layers(backbone: nn.Module) -> list[nn.Module]:
    """The layers that the architecture marks for checkpointing, in order; none inside another."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    # Layers may share parameters; both add to the same total.
    return [layer for layer in layers if id(layer) not in inner]


def _plain_embedding(backbone: nn.Module, wanted: set[int]) -> nn.Embedding | None:
    """The input embedding if it is trainable and a plain lookup, so that its gradient can be added by rows."""
    find = getattr(backbone, "get_input_embeddings", None)
    try:
        module = None if find is None else find()
    except NotImplementedError:  # a wrapper around a decoder (BART)
        return None
    if type(module) is not nn.Embedding or module.max_norm is not None or module.scale_grad_by_freq:
        return None
    return module if id(module.weight) in wanted else None


def _lookup(embedding: nn.Embedding, direction: Tensor, looked_up: list[tuple[Tensor, Tensor]]) -> Any:
    """A forward method whose rows are leaves. The row `padding_idx` is a constant, as in autograd."""
    padding = embedding.padding_idx

    def forward(ids: Tensor) -> Tensor:
        """Dual rows of the embedding, whose value is a leaf with a gradient."""
        rows = F.embedding(ids, embedding.weight.detach()).requires_grad_()
        looked_up.append((ids, rows))
        dots = F.embedding(ids, direction)
        # Clone, since a model may scale the rows in place (CTRL).
        return forward_ad.make_dual(
            rows.clone(), dots if padding is None else dots.masked_fill((ids == padding)[..., None], 0.0)
        )

    return forward


def _add_rows(out: Tensor, ids: Tensor, rows: Tensor, padding: int | None) -> None:
    flat, values = ids.reshape(-1), rows.reshape(-1, rows.shape[-1])
    if padding is not None:
        values = values.masked_fill((flat == padding)[:, None], 0.0)
    out.index_add_(0, flat, values)


@contextmanager
def _checkpointed(layer: nn.Module, direction: dict[int, Tensor], sink: _Sink, anchor: Tensor) -> Iterator[None]:
    """Context in which `layer` keeps only the values and tangents of its inputs and is recomputed in the backward pass.

    Inputs are the floating-point tensors among the arguments (also in tuples, lists and mappings) that depend on the parameters;
    outputs are those among the results and those that the layer writes into a mapping among its arguments, as layers with
    shared keys and values do.
    """
    original = layer.forward
    owned = {name: p for name, p in layer.named_parameters(remove_duplicate=False) if id(p) in direction}
    distinct = list({id(p): p for p in owned.values()}.values())
    inside = False

    def forward(*args: Any, **kwargs: Any) -> Any:
        """The layer's result as dual tensors, through one graph node."""
        nonlocal inside
        if inside:
            return original(*args, **kwargs)
        given = [*args, *kwargs.values()]
        mappings = {i: value for i, value in enumerate(given) if isinstance(value, MutableMapping)}
        leaves, structure = tree_flatten([dict(v) if i in mappings else v for i, v in enumerate(given)])
        places = [i for i, leaf in enumerate(leaves) if _depends(leaf)]
        pairs = [_value_and_tangent(leaves[i]) for i in places]
        for i in places:
            leaves[i] = None  # kept by the layer's graph node
        results: list[Any] = []  # [leaves, structure] of the last run, without values

        def run(inputs: Sequence[Tensor]) -> list[Tensor]:
            """Value and tangent of each output, in turn, from those of each input; runs the layer itself."""
            nonlocal inside
            filled = list(leaves)
            for i, value, tangent in zip(places, inputs[::2], inputs[1::2], strict=True):
                filled[i] = forward_ad.make_dual(value, tangent)
            again = tree_unflatten(filled, structure)
            before = {i: again[i] for i in mappings}
            for i, mapping in mappings.items():
                again[i] = copy(mapping)  # of the same type, with its contents at the call
                again[i].clear()
                again[i].update(before[i])
            named = dict(zip(kwargs, again[len(args) :], strict=True))
            inside = True
            try:
                y = functional_call(
                    layer, _duals(owned, direction), tuple(again[: len(args)]), named, tie_weights=False
                )
            finally:
                inside = False
            written = {
                i: {key: value for key, value in again[i].items() if before[i].get(key) is not value} for i in mappings
            }
            outputs, shape = tree_flatten((y, written))
            floating = [i for i, leaf in enumerate(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            values = [part for i in floating for part in _value_and_tangent(outputs[i])]
            results[:] = [[None if i in floating else leaf for i, leaf in enumerate(outputs)], shape, floating]
            return values

        flat = _DualLayer.apply(anchor, run, distinct, sink, *(part for pair in pairs for part in pair))
        outputs, shape, floating = results
        for i, value, tangent in zip(floating, flat[::2], flat[1::2], strict=True):
            outputs[i] = forward_ad.make_dual(value, tangent)
        y, written = tree_unflatten(outputs, shape)
        for i, mapping in mappings.items():
            mapping.update(written[i])
        return y

    with replaced_forward(layer, forward):
        yield


def _depends(value: Any) -> bool:
    """Whether a value is a tensor that depends on the parameters."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.requires_grad or forward_ad.unpack_dual(value).tangent is not None


def _value_and_tangent(tensor: Tensor) -> tuple[Tensor, Tensor]:
    value, tangent = forward_ad.unpack_dual(tensor)
    return value, torch.zeros_like(value) if tangent is None else tangent


class _DualLayer(torch.autograd.Function):
    """Maps (x, ẋ) of each input to (y, ẏ) of each output of one layer.

    `anchor` makes the outputs require grad.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, run: Any, parameters: list[Tensor], sink: _Sink, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.run, ctx.parameters, ctx.sink = run, parameters, sink
        ctx.set_materialize_grads(False)
        # Custom functions switch forward mode off.
        with forward_ad._set_fwd_grad_enabled(True):
            outputs = run(inputs)
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        # Enter the modes again, since on a GPU the backward pass runs in another thread.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), DualRules():
            outputs = ctx.run(inputs)
        pairs = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if c is not None and y.requires_grad]
        if not pairs:
            return (None,) * (4 + len(inputs))
        values, given = zip(*pairs, strict=True)
        gradients = _reverse(values, [*inputs, *ctx.parameters], given)
        ctx.sink.add(ctx.parameters, gradients[len(inputs) :])
        # A gradient of the anchor makes autograd continue to the layers below.
        return torch.zeros((), device=given[0].device), None, None, None, *gradients[: len(inputs)]
