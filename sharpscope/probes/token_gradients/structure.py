"""Properties of a model that the tiers need, found once by recording a forward pass of a few tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import Cache

from sharpscope.errors import UserError
from sharpscope.policy import Head, backbone, bare, check_head, output_head
from sharpscope.policy.cache import ContinuationLayer, PromptCache, check_cacheable
from sharpscope.probes.fingerprint import remembered
from sharpscope.probes.guard import attention_implementation
from sharpscope.probes.parameter_groups import group_names
from sharpscope.probes.token_gradients import attention as attn
from sharpscope.probes.token_gradients.choices import chosen_by
from sharpscope.probes.token_gradients.experts import recorded_experts
from sharpscope.probes.token_gradients.rows import safe_width
from sharpscope.probes.token_gradients.uses import (
    DETACHMENTS,
    Recorder,
    Use,
    Wrap,
    exact_squares,
    local_squares,
    tensors_in,
)

ACCOUNT_BYTES = 2**30  # of whole gradients held at once while the uses are checked


@dataclass
class Structure:
    """Properties of a model.

    Attributes:
        named: trainable parameters by name, in the model's order.
        head: the output layer.
        tied: name of the trainable parameter shared by input embedding and output layer, or None.
        head_weight: name of the output layer's trainable weight; None if tied or frozen.
        head_bias: name of the output layer's trainable bias; None if there is none.
        unhandled: parameters whose per-token gradient does not follow from recorded uses, with the reason; `exact` forms their
            gradient.
        not_local: why positions interact outside attention, or None.
        attention_calls: calls of the attention interface per forward pass; 0 if the model does not use it.
        last_layer: decoder layer of the last attention call, at which `exact` may split the pass, or None.
        groups: groups of each parameter.
        unseen: a trainable parameter with a gradient only through the model's own attention, or None.
        in_place: whether the model writes to activations in place.
        computes_in: coarsest dtype of tensors that depend on a trainable parameter.
        shares: whether rows can continue from cached keys and values of a common prefix.
        severed: an operation that hides a dependence on a parameter from autograd, or None.
        chooses: whether the model makes discrete choices (experts, keys) that a finite step may change.
        whole: parameters whose local gradient is the whole one: those used after the last attention only, if `last_layer` is known.
        pushes: whether several directions can be pushed forward at once, see `forward_mode.pushed_each`; None if not known yet.
        checked: largest relative error found by the self-check of each probe.
    """

    named: dict[str, nn.Parameter]
    head: Head
    tied: str | None
    head_weight: str | None
    head_bias: str | None
    unhandled: dict[str, str] = field(default_factory=dict)
    not_local: str | None = None
    attention_calls: int = 0
    last_layer: nn.Module | None = None
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shares: bool = False
    unseen: str | None = None
    in_place: bool = False
    computes_in: torch.dtype = torch.float32
    severed: str | None = None
    chooses: bool = False
    whole: frozenset[str] = frozenset()
    pushes: bool | None = None
    checked: dict[str, float] = field(default_factory=dict)

    def recorder(self, size: tuple[int, int], *, whole: bool = False, wrap: Wrap | None = None) -> Recorder:
        """A recorder of one forward pass over (B, L) = `size`.

        Args:
            size: (B, L).
            whole: do not record the parameters in `unhandled`.
            wrap: replaces the output of a use.
        """
        native = frozenset(self.unhandled) if whole else frozenset()
        return Recorder(self.named, size, native=native, wrap=wrap, copy=self.in_place)

    def learn(self, recorder: Recorder) -> bool:
        """Add parameters that `recorder` could not handle to `unhandled`; return whether there are any.

        A branch of the model that was not recorded before (an expert) may use a parameter in another way.
        """
        new = {name: use for name, use in recorder.unhandled.items() if name not in self.unhandled}
        self.unhandled.update(new)
        if new:
            self.last_layer, self.whole = None, frozenset()
        return bool(new)

    def require_seen(self) -> None:
        """Raise if a parameter has a gradient only through the model's own attention.

        Raises:
            UserError: names the parameter.
        """
        if self.unseen is not None:
            raise UserError(
                f"model: '{self.unseen}' is used inside the model's own attention, other than in queries, keys, values, "
                "mask or sinks, which token gradients do not follow; freeze it"
            )

    def require_local(self) -> None:
        """Raise if the local tier would be wrong.

        Raises:
            UserError: names the module and the tier to use.
        """
        self.require_seen()
        reason = None
        if self.unhandled:
            name, operation = next(iter(self.unhandled.items()))
            reason = f"'{name.rpartition('.')[0] or name}' uses its parameter in `{operation}`"
        elif self.not_local:
            reason = self.not_local
        elif not self.attention_calls:
            reason = "its attention does not go through transformers' AttentionInterface"
        if reason:
            raise UserError(
                f"tier, local (and sketch, which leans on it): {reason}, which it does not know; use tier='exact'"
            )


def structure_of(model: nn.Module) -> Structure:
    """The structure of a model, cached until something other than the values of its weights changes.

    Raises:
        UserError: it is no causal language model with one linear output layer, or not causal.
    """
    known = remembered(model)
    if "structure" not in known:
        causal = bare(model)
        named = {name: parameter for name, parameter in causal.named_parameters() if parameter.requires_grad}
        known["structure"] = _examine(model, named)
    structure: Structure = known["structure"]
    return structure


@contextmanager
def recording(
    model: nn.Module,
    structure: Structure,
    recorder: Recorder,
    kind: str,
    split: int | None = None,
    *,
    stop: bool = False,
) -> Iterator[attn.Calls]:
    """Record the forward pass within the block, with attention of `kind` if the model allows a choice.

    Args:
        split, stop: see `attn.Calls`.
    """
    with (
        attn.counting(split, stop=stop) as calls,
        attention_implementation(model, kind if structure.attention_calls else "math"),
        recorded_experts(model, recorder),
        recorder,
    ):
        yield calls


def hidden_states(model: nn.Module, ids: Tensor, before: PromptCache | None = None) -> Tensor:
    """Hidden states (B, L, d) after the final norm, for rows (B, L) without left padding that continue `before`."""
    body = backbone(model)
    start = 0 if before is None else before.get_seq_length()
    # Learned positions are looked up once per row, so that each row has a gradient of its own.
    positions = torch.arange(start, start + ids.shape[1], device=ids.device).repeat(ids.shape[0], 1)  # (B, L)
    given: dict[str, Any] = {"position_ids": positions} if "position_ids" in signature(body.forward).parameters else {}
    if before is not None:
        given["past_key_values"] = Cache(layers=[_After(layer, positions) for layer in before.layers])  # type: ignore[arg-type]
    return body(input_ids=ids, use_cache=before is not None, **given).last_hidden_state


def read_before(model: nn.Module, before: Tensor | None) -> PromptCache | None:
    """Keys and values of a common prefix (P,)."""
    if before is None:
        return None
    cache = PromptCache()
    backbone(model)(input_ids=before[None], past_key_values=cache, use_cache=True)
    return cache


class _After(ContinuationLayer):
    """Prepends the keys and values of a prefix to those of each row, with differentiable operations."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See transformers: adds the new states (n, H, t, d_head) and returns all that is attended to."""
        keys, values = (x.expand(len(key_states), -1, -1, -1) for x in (self.prompt.keys, self.prompt.values))
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)  # (n, H, P+t, d)


def _examine(model: nn.Module, named: dict[str, nn.Parameter]) -> Structure:
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UserError("model: prompt-learning adapters add positions of their own; merge or remove the adapter")
    head = output_head(model)
    check_head(model, head)
    names = {id(parameter): name for name, parameter in named.items()}
    embedding: Any = bare(model).get_input_embeddings().weight
    own = None if head.weight is embedding else names.get(id(head.weight))
    structure = Structure(
        named, head, names.get(id(embedding)) if head.weight is embedding else None, own, names.get(id(head.bias))
    )
    structure.groups = group_names(bare(model), named)
    B, L = 2, safe_width(model, 7)
    ids = (torch.arange(B * L, device=embedding.device).view(B, L) * 5 + 1) % embedding.shape[0]
    structure.attention_calls = 1  # until counted: lets `recording` choose the attention
    try:
        hidden, recorder, counted, watch = _watched(model, structure, ids)
    except attn.LearnedMaskError as reason:  # the model's own attention differentiates its mask
        structure.attention_calls, structure.not_local = 0, str(reason)
        hidden, recorder, counted, watch = _watched(model, structure, ids)
    structure.attention_calls = counted.made
    structure.computes_in, structure.severed, structure.in_place = watch.coarsest, watch.severed, watch.in_place
    structure.chooses = watch.chooses
    start = torch.zeros_like(hidden)
    start[-1] = torch.randn(hidden.shape[1:], generator=torch.Generator().manual_seed(0)).to(hidden)
    plain = _plain_squares(named, hidden, start)
    structure.unhandled = _unhandled(structure, recorder, hidden, start, plain)
    structure.not_local = structure.not_local or _leak(recorder.uses, hidden)
    structure.unseen = _unseen(model, structure, ids, start, plain)
    _find_split(model, structure, counted.module, ids)
    _check_causal(model, ids, watch.anywhere)
    structure.shares = _can_share(model, structure, ids, watch.anywhere)
    return structure


def _watched(model: nn.Module, structure: Structure, ids: Tensor) -> tuple[Tensor, Recorder, attn.Calls, _Watch]:
    """A forward pass with its graph and the recorder's findings."""
    recorder = Recorder(structure.named, (ids.shape[0], ids.shape[1]), copy=True)
    with torch.enable_grad(), recording(model, structure, recorder, attn.CUT) as counted, _Watch(counted) as watch:
        return hidden_states(model, ids), recorder, counted, watch


class _Watch(TorchFunctionMode):
    """Records casts to another dtype and computations that autograd does not see.

    Attributes:
        coarsest: dtype among results that depend on a trainable parameter.
        anywhere: dtype among all results that autograd may follow (tables of positions are made without it).
        severed: the first operation on something that depends on a trainable parameter whose result does not.
        in_place: whether something that depends on a trainable parameter is written to in place.
        chooses: whether there is a choice among numbers, by an operation known to `choices`.
    """

    def __init__(self, calls: attn.Calls) -> None:
        super().__init__()
        self.coarsest = self.anywhere = torch.float64
        self.severed: str | None = None
        self.in_place = self.chooses = False
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        versions = [(tensor, tensor._version) for tensor in tensors_in((args, kwargs))]
        out = func(*args, **(kwargs or {}))
        self.in_place |= any(tensor.requires_grad and tensor._version != before for tensor, before in versions)
        if isinstance(out, Tensor) and out.dtype.is_floating_point and torch.is_grad_enabled():
            self.anywhere = coarser(self.anywhere, out.dtype)
            if out.requires_grad:
                self.coarsest = coarser(self.coarsest, out.dtype)
        self.chooses |= chosen_by(func, args, out) is not None
        hides = not torch.is_grad_enabled() or func in DETACHMENTS
        if hides and self.severed is None and not self._calls.within:
            depends = any(value.requires_grad for value in tensors_in((args, kwargs)))
            if depends and isinstance(out, Tensor) and out.dtype.is_floating_point:
                self.severed = "detach" if torch.is_grad_enabled() else "torch.no_grad"
        return out


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The floating-point type with the larger rounding error."""
    return max(a, b, key=lambda dtype: torch.finfo(dtype).eps)


def _unhandled(
    structure: Structure, recorder: Recorder, hidden: Tensor, start: Tensor, plain: dict[str, float]
) -> dict[str, str]:
    """Parameters whose gradient does not follow from the recorded uses, with the reason."""
    unhandled = dict(recorder.unhandled)
    uses: dict[str, list[tuple[Use, tuple[int, ...]]]] = {}
    for use in recorder.uses:
        for name, part in zip(use.names, use.parts, strict=True):
            uses.setdefault(name, []).append((use, part))
    for name, several in uses.items():
        parts = [part for _, part in several]
        if len(set(parts)) < len(parts) or len({len(part) for part in parts}) > 1:
            unhandled[name] = "several places"
        if name in (structure.head_weight, structure.head_bias):
            unhandled[name] = "several places"
        if name == structure.tied and several[0][0].kind != "embedding":
            unhandled[name] = several[0][0].kind
    unhandled = _unaccounted(structure, recorder.uses, hidden, start, plain) | unhandled
    return {name: unhandled[name] for name in structure.named if name in unhandled}


def _unaccounted(
    structure: Structure, uses: list[Use], hidden: Tensor, start: Tensor, plain: dict[str, float]
) -> dict[str, str]:
    """Parameters whose autograd gradient differs from that of the recorded uses for the same cotangents.

    A recorder cannot see every use. Here autograd itself tells whether one was missed, or read wrongly: the cotangent
    `start` of the last row's hidden states is pulled back, and each parameter's squared gradient norm, `plain`, is
    compared with that of its uses in that row. Returns name -> the operations that autograd knows it to be used in.
    """
    outs = [use.out for use in uses] if hidden.requires_grad else []
    ours, scale = dict.fromkeys(plain, 0.0), dict.fromkeys(plain, 0.0)
    cotangents = torch.autograd.grad(hidden, outs, start, retain_graph=True, allow_unused=True) if outs else ()
    for use, g in zip(uses, cotangents, strict=bool(outs)):
        if g is None:
            continue
        squares = exact_squares(use, g[None])[0, -1].tolist()  # of the last row alone, per parameter
        for name, square, (_, positions) in zip(use.names, squares, local_squares(use, g), strict=True):
            ours[name] += square
            scale[name] += float(positions.sum())
    eps = torch.finfo(structure.computes_in).eps
    if structure.computes_in == torch.float32:  # products of matrices may be rounded to TF32 or bfloat16
        eps = {"highest": eps, "high": 2**-10}.get(torch.get_float32_matmul_precision(), 2**-7)
    tolerance = eps ** (2 / 3)
    wrong = {
        id(structure.named[name]): name
        for name, square in plain.items()
        # Not finite: weights that have diverged say nothing about the model.
        if math.isfinite(square) and abs(square - ours[name]) > tolerance * max(square, scale[name])
    }
    users: dict[str, dict[str, None]] = {name: {} for name in wrong.values()}
    for function, leaf in _reached(hidden) if wrong else ():
        if id(leaf) in wrong:
            users[wrong[id(leaf)]][re.sub(r"Backward\d*$", "", function.name())] = None
    return {name: "`, `".join(functions) for name, functions in users.items()}


def _plain_squares(named: dict[str, nn.Parameter], hidden: Tensor, start: Tensor) -> dict[str, float]:
    """Squared norm of the gradient of ⟨hidden, start⟩ for each parameter, by autograd."""
    squares = dict.fromkeys(named, 0.0)
    if hidden.requires_grad:
        for names in _pieces(named, ACCOUNT_BYTES):
            inputs = [named[name] for name in names]
            gradients = torch.autograd.grad(hidden, inputs, start, retain_graph=True, allow_unused=True)
            for name, g in zip(names, gradients, strict=True):
                if g is not None:
                    squares[name] = float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2
    return squares


def _pieces(named: dict[str, nn.Parameter], budget: int) -> Iterator[list[str]]:
    """Names in groups of at most `budget` bytes; larger parameters are alone."""
    names: list[str] = []
    total = 0
    for name, parameter in named.items():
        size = parameter.numel() * parameter.element_size()
        if names and total + size > budget:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names


def _reached(root: Tensor) -> Iterator[tuple[Any, Any]]:
    """(function, leaf) for each use of a leaf tensor in the autograd graph of `root`."""
    waiting, seen = [root.grad_fn], {root.grad_fn}
    while waiting:
        node = waiting.pop()
        for following, _ in () if node is None else node.next_functions:
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                yield node, leaf
            elif following not in seen:
                seen.add(following)
                waiting.append(following)


def _unseen(model: nn.Module, structure: Structure, ids: Tensor, start: Tensor, plain: dict[str, float]) -> str | None:
    """A parameter with a gradient through the model's own attention but not through ours; None if there is none."""
    without = {name: structure.named[name] for name, square in plain.items() if square == 0}
    if not structure.attention_calls or not without:
        return None
    with torch.enable_grad():
        hidden = hidden_states(model, ids)
    return next((name for name, square in _plain_squares(without, hidden, start).items() if square > 0), None)


def _leak(uses: list[Use], hidden: Tensor) -> str | None:
    """A module through which positions interact other than by attention, or None."""
    if not hidden.requires_grad or not uses:
        return None
    probe = torch.zeros_like(hidden)
    probe[:, -1] = torch.linspace(1, 2, hidden.shape[-1], device=hidden.device)
    gradients = torch.autograd.grad(hidden, [use.out for use in uses], probe, allow_unused=True)
    L = hidden.shape[1]
    for use, g in zip(reversed(uses), reversed(gradients), strict=True):
        if g is None:
            continue
        if use.layout == "gathered":
            assert use.index is not None
            others = g[use.index % L != L - 1]
        else:
            others = use.canonical(g)[:, :-1]
        if bool(others.abs().sum() > 0):
            name = use.names[0].rpartition(".")[0] if use.names else "a module"
            return f"what '{name}' computes at one position reaches another one otherwise than through attention"
    return None


def _same(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether two results agree to half the digits of `dtype`."""
    return torch.allclose(a, b, rtol=0, atol=float(a.abs().amax()) * torch.finfo(dtype).eps ** 0.5)


def _check_causal(model: nn.Module, ids: Tensor, dtype: torch.dtype) -> None:
    with torch.no_grad():
        whole, part = hidden_states(model, ids)[:, :-2], hidden_states(model, ids[:, :-2])
    if not _same(whole, part, coarser(dtype, whole.dtype)):
        raise UserError(
            f"model, {type(bare(model)).__name__}: a position sees later ones; token gradients need a causal model"
        )


def _can_share(model: nn.Module, structure: Structure, ids: Tensor, dtype: torch.dtype) -> bool:
    """Whether the hidden states are equal if the last tokens continue from cached keys and values."""
    if not structure.attention_calls or "past_key_values" not in signature(backbone(model).forward).parameters:
        return False
    try:
        check_cacheable(model)
    except UserError:
        return False
    with torch.no_grad(), attn.counting(), attention_implementation(model, attn.FORWARD):
        ids = ids[:1]
        whole, part = (
            hidden_states(model, ids)[:, -3:],
            hidden_states(model, ids[:, -3:], read_before(model, ids[0, :-3])),
        )
    return _same(whole, part, coarser(dtype, whole.dtype))


def _find_split(model: nn.Module, structure: Structure, module: nn.Module | None, ids: Tensor) -> None:
    """Set `last_layer` if the part after the last attention can be computed per position.

    That needs the parameters used before the layer's attention and those used after it to be different ones. In a layer
    whose attention and MLP read the same normalized input they are not, nor in one with another input that depends on
    parameters than the hidden states (Gemma 4's per-layer embeddings).
    """
    if module is None or structure.unhandled or structure.not_local:
        return
    layer = _decoder_layer(bare(model), module)
    if layer is None:
        return
    recorder = structure.recorder((ids.shape[0], ids.shape[1]))
    with (
        torch.enable_grad()
    ):  # what comes before the layer keeps its graph, which reaches the layer by side inputs only
        hidden, boundary, leaf = split_forward(model, structure, recorder, ids, layer)
        if leaf is None or boundary is None or not hidden.requires_grad:
            return
        roots = [tensor for tensor in leaf[0] if tensor.requires_grad]
        if not roots:
            return
        outs = [use.out for use in recorder.uses]
        before = torch.autograd.grad([root.sum() for root in roots], outs, retain_graph=True, allow_unused=True)
        after = torch.autograd.grad(hidden.sum(), outs, allow_unused=True)
    for i, (to_attention, to_end) in enumerate(zip(before, after, strict=True)):
        if to_end is not None and (to_attention is not None or i < boundary.uses):
            return  # a use that feeds the layer's attention and what follows, or one before the layer, by a side input
    structure.last_layer = layer
    ends = [i >= boundary.uses and to_attention is None for i, to_attention in enumerate(before)]
    named = [(name, end) for use, end in zip(recorder.uses, ends, strict=True) for name in use.names]
    structure.whole = frozenset(name for name, _ in named) - {name for name, end in named if not end}


def _decoder_layer(causal: nn.Module, module: nn.Module) -> nn.Module | None:
    """The member of a ModuleList that contains `module`."""
    for part in causal.modules():
        if isinstance(part, nn.ModuleList):
            for layer in part:
                if any(inner is module for inner in layer.modules()):
                    return layer
    return None


@dataclass(frozen=True)
class Boundary:
    """The input (B, L, d) of the last layer and the number of uses recorded before it."""

    x: Tensor
    uses: int


def split_forward(
    model: nn.Module,
    structure: Structure,
    recorder: Recorder,
    ids: Tensor,
    layer: nn.Module,
) -> tuple[Tensor, Boundary | None, tuple[tuple[Tensor, ...], Tensor] | None]:
    """Forward pass whose last layer's input and attention output are leaves: (hidden, input, attention's (inputs, output)).

    Called under no_grad, the graph begins at the last layer, so that nothing before it is kept.
    """
    entered: list[Boundary] = []

    def keep(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Begin the graph at the layer's input, a new leaf."""
        x = args[0] if args else kwargs["hidden_states"]
        torch.set_grad_enabled(True)  # until the caller's no_grad ends
        x = x.detach().requires_grad_()
        entered.append(Boundary(x, len(recorder.uses)))
        x = x.clone() if structure.in_place else x  # a leaf may not be written to
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with recording(model, structure, recorder, attn.CUT, structure.attention_calls) as counted:
            hidden = hidden_states(model, ids)
    finally:
        handle.remove()
    return hidden, entered[0] if len(entered) == 1 else None, counted.leaf
