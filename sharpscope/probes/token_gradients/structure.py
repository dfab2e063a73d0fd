"""Properties of a model that token gradients need, found once by passes over a few tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from sharpscope.errors import UserError
from sharpscope.policy import Head, backbone, bare, check_head, output_head
from sharpscope.policy.cache import check_cacheable
from sharpscope.probes.fingerprint import remembered
from sharpscope.probes.guard import attention_implementation
from sharpscope.probes.parameter_groups import group_names
from sharpscope.probes.token_gradients import attention as attn
from sharpscope.probes.token_gradients.rows import safe_width
from sharpscope.probes.token_gradients.uses import Use, UseRecorder, exact_squares, local_squares

ACCOUNT_BYTES = 2**30  # of whole gradients held at once while the uses are compared with autograd


@dataclass
class Structure:
    """Properties of a model.

    Attributes:
        named: trainable parameters by name, in the model's order.
        head: the output layer.
        tied: name of the trainable parameter shared by input embedding and output layer, or None.
        head_weight, head_bias: names of the output layer's trainable parameters; None if tied, frozen or absent.
        modules: module -> attribute -> name of its trainable parameters, without those in `unhandled`.
        groups: groups of each parameter.
        unhandled: parameters of the backbone whose gradient does not follow from recorded uses.
        not_local: why `local` is not possible, or None.
        replaced: whether the attention of `attention` can replace the model's own.
        whole: parameters whose local gradient is the whole one: those used after the last attention only.
        shares: whether rows can continue from cached keys and values of a common prefix.
        checked: largest relative error found by the self-check of each probe.
    """

    named: dict[str, nn.Parameter]
    head: Head
    tied: str | None
    head_weight: str | None
    head_bias: str | None
    modules: Mapping[nn.Module, Mapping[str, str]] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unhandled: frozenset[str] = frozenset()
    not_local: str | None = None
    replaced: bool = True
    whole: frozenset[str] = frozenset()
    shares: bool = False
    checked: dict[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the results: that of the output layer, at least float32."""
        return torch.promote_types(self.head.weight.dtype, torch.float32)

    @property
    def forward_attention(self) -> str:
        """Implementation of attention that has a forward mode."""
        return attn.FORWARD if self.replaced else "math"

    def require_local(self) -> None:
        """Raise if local norms would be wrong.

        Raises:
            UserError: names the module and the method to use.
        """
        reason = self.not_local
        if self.unhandled:
            module = min(self.unhandled).rpartition(".")[0] or min(self.unhandled)
            reason = f"'{module}' uses a parameter in another way than a linear map, an embedding or a norm once"
        if reason:
            raise UserError(f"method, local (and sketch, which uses it): {reason}; use method='exact'")


def structure_of(model: nn.Module) -> Structure:
    """The structure of a model, cached until something other than the values of its weights changes.

    Raises:
        UserError: it is no causal language model with one linear output layer, or not causal.
    """
    known = remembered(model)
    if "structure" not in known:
        known["structure"] = _examine(model)
    structure: Structure = known["structure"]
    return structure


@contextmanager
def recording(model: nn.Module, structure: Structure, size: tuple[int, int], attention: str) -> Iterator[UseRecorder]:
    """Record the uses of a forward pass over (B, L) = `size` within the block, see `UseRecorder`."""
    recorder = UseRecorder(structure.modules, size)
    with torch.enable_grad(), attention_implementation(model, attention), recorder.attached(model):
        yield recorder


def hidden_states(
    model: nn.Module, ids: Tensor, before: DynamicCache | None = None, after: list[DynamicCache] | None = None
) -> Tensor:
    """Hidden states (B, L, d) after the final norm, for rows (B, L) without left padding that continue `before`.

    With `before`, `after` gets the keys and values of what was read so far.
    """
    body = backbone(model)
    start = 0 if before is None else before.get_seq_length()
    # Learned positions are looked up once per row, so that each row has a gradient of its own.
    positions = torch.arange(start, start + ids.shape[1], device=ids.device).repeat(ids.shape[0], 1)  # (B, L)
    given: dict[str, Any] = {"position_ids": positions} if "position_ids" in signature(body.forward).parameters else {}
    if before is not None:
        given["past_key_values"] = cache = DynamicCache()
        for number, layer in enumerate(before.layers):
            keys, values = (x.expand(len(ids), -1, -1, -1) for x in (layer.keys, layer.values))  # type: ignore[union-attr]
            cache.update(keys, values, number)
        if after is not None:
            after.append(cache)
    return body(input_ids=ids, use_cache=before is not None, **given).last_hidden_state


def read_before(model: nn.Module, before: Tensor | None) -> DynamicCache | None:
    """Keys and values of a common prefix (P,)."""
    if before is None:
        return None
    cache = DynamicCache()
    backbone(model)(input_ids=before[None], past_key_values=cache, use_cache=True)
    return cache


def holders(causal: nn.Module, names: Mapping[int, str]) -> dict[nn.Module, dict[str, str]]:
    """Module -> attribute -> name of its parameters, for the ids in `names`."""
    found = {
        module: {key: names[id(p)] for key, p in module._parameters.items() if id(p) in names}
        for module in causal.modules()
    }
    return {module: keys for module, keys in found.items() if keys}


def _examine(model: nn.Module) -> Structure:
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UserError("model: prompt-learning adapters add positions of their own; merge or remove the adapter")
    head, causal = output_head(model), bare(model)
    check_head(model, head)
    named = {name: parameter for name, parameter in causal.named_parameters() if parameter.requires_grad}
    names = {id(parameter): name for name, parameter in named.items()}
    embedding: Any = causal.get_input_embeddings().weight
    shared, head_name = head.weight is embedding, names.get(id(head.weight))
    structure = Structure(
        named, head, head_name if shared else None, None if shared else head_name, names.get(id(head.bias))
    )
    structure.groups = group_names(causal, named)
    structure.modules = holders(causal, names)
    B, L = 2, safe_width(model, 7)
    ids = (torch.arange(B * L, device=embedding.device).view(B, L) * 5 + 1) % embedding.shape[0]
    plain, wrong, _ = _account(model, structure, ids, "math")
    local: dict[str, float] = {}
    try:
        with attn.counting() as calls:
            local, _, structure.not_local = _account(model, structure, ids, attn.CUT)
        if not calls:
            raise attn.AttentionError("its attention does not go through transformers' AttentionInterface")
        lost = [name for name, square in plain.items() if square > 0 and not local[name]]
        if lost:
            raise attn.AttentionError(f"its attention uses '{lost[0]}' other than in queries, keys and values")
    except attn.AttentionError as problem:
        structure.replaced, structure.not_local, local = False, str(problem), {}
    structure.unhandled = frozenset(wrong)
    structure.modules = holders(causal, {key: name for key, name in names.items() if name not in wrong})
    tolerance = _rounding(structure)
    structure.whole = frozenset(
        name for name, square in local.items() if name not in wrong and abs(square - plain[name]) < tolerance * square
    )
    structure.shares = _can_share(model, structure, ids)
    return structure


def _rounding(structure: Structure) -> float:
    """Relative difference of two squared norms that rounding may explain."""
    eps = max(torch.finfo(p.dtype).eps for p in (structure.head.weight, *structure.named.values()))
    if eps < 1e-6 and structure.head.weight.is_cuda:  # products of matrices may be rounded to TF32 or bfloat16
        eps = max(eps, {"highest": 0.0, "high": 2**-10}.get(torch.get_float32_matmul_precision(), 2**-7))
    return max(eps, torch.finfo(torch.float32).eps) ** (2 / 3)


def _account(
    model: nn.Module, structure: Structure, ids: Tensor, attention: str
) -> tuple[dict[str, float], set[str], str | None]:
    """Squared gradient norms of the last row by parameter, by autograd and from the uses.

    Returns:
        Those of autograd, the parameters whose uses give another number, and, for attention that cuts positions off from each
        other, the first module through which they interact all the same, or None.
    """
    ours, scale = dict.fromkeys(structure.named, 0.0), dict.fromkeys(structure.named, 0.0)
    leaks: list[str] = []

    def measure(use: Use, g: Tensor) -> None:
        for name, squares in exact_squares(use, g):
            ours[name] += float(squares[-1])
        for name, squares in local_squares(use, g):
            scale[name] += float(squares.sum())

    def watch(use: Use, g: Tensor) -> None:
        if bool((use.by_position(g)[:, :-1] != 0).any()):
            leaks.append((use.weight or use.bias or "").rpartition(".")[0])

    with recording(model, structure, (ids.shape[0], ids.shape[1]), attention) as recorder:
        hidden = hidden_states(model, ids)
    start, last = torch.zeros_like(hidden), torch.zeros_like(hidden)
    start[-1] = torch.randn(hidden.shape[1:], generator=torch.Generator().manual_seed(0)).to(hidden)
    last[:, -1] = torch.linspace(1, 2, hidden.shape[-1], device=hidden.device)
    recorder.pull(hidden, start, measure)
    if attention == attn.CUT:
        recorder.pull(hidden, last, watch)
    plain = _plain_squares(structure.named, hidden, start)
    tolerance = _rounding(structure)
    wrong = {
        name
        for name, square in plain.items()
        # Not finite: weights that have diverged say nothing about the model.
        if math.isfinite(square) and abs(square - ours[name]) > tolerance * max(square, scale[name])
    }
    leak = f"'{leaks[0]}' reaches other positions otherwise than through attention" if leaks else None
    return plain, wrong | recorder.repeated, leak


def _plain_squares(named: Mapping[str, nn.Parameter], hidden: Tensor, start: Tensor) -> dict[str, float]:
    """Squared norm of the gradient of ⟨hidden, start⟩ for each parameter, by autograd, a few parameters at a time."""
    squares, pieces, size = dict.fromkeys(named, 0.0), [[]], 0  # type: ignore[var-annotated]
    for name, parameter in named.items():
        if pieces[-1] and size + parameter.nbytes > ACCOUNT_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(name)
        size += parameter.nbytes
    for names in filter(None, pieces if hidden.requires_grad else []):
        inputs = [named[name] for name in names]
        gradients = torch.autograd.grad(hidden, inputs, start, retain_graph=True, allow_unused=True)
        for name, g in zip(names, gradients, strict=True):
            if g is not None:
                squares[name] = float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2
    return squares


def _can_share(model: nn.Module, structure: Structure, ids: Tensor) -> bool:
    """Whether the hidden states are equal if the last tokens continue from cached keys and values."""
    if not structure.replaced or "past_key_values" not in signature(backbone(model).forward).parameters:
        return False
    try:
        check_cacheable(model)
    except UserError:
        return False
    with torch.no_grad(), attention_implementation(model, attn.FORWARD):
        ids = ids[:1]
        whole = hidden_states(model, ids)[:, -3:]
        part = hidden_states(model, ids[:, -3:], read_before(model, ids[0, :-3]))
    return torch.allclose(whole, part, rtol=0, atol=float(whole.abs().amax()) * _rounding(structure) ** 0.75)
