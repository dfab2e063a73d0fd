"""Properties of a model that token gradients need, found once by passes over a few tokens."""

from __future__ import annotations

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
from sharpscope.policy.cache import cache_keyword, check_cacheable
from sharpscope.probes.guard import attention_implementation, group_names, remembered
from sharpscope.probes.token_gradients import attention as attn
from sharpscope.probes.token_gradients.rows import safe_width
from sharpscope.probes.token_gradients.uses import UseRecorder


@dataclass
class Structure:
    """Properties of a model."""

    named: dict[str, nn.Parameter]  # the trainable ones, in the model's order
    head: Head
    tied: str | None  # name of the trainable parameter shared by input embedding and output layer
    head_weight: str | None  # names of the output layer's trainable parameters; None if tied, frozen or absent
    head_bias: str | None
    modules: Mapping[nn.Module, Mapping[str, str]]  # -> attribute -> name of its parameters, without `unhandled`
    groups: Mapping[str, tuple[str, ...]]  # of each parameter
    unhandled: frozenset[str] = frozenset()  # not used exactly once, by a linear map, an embedding or a norm
    not_local: str | None = None  # why `local` is not possible
    replaced: bool = True  # whether the attention of `attention` can replace the model's own
    shares: bool = False  # whether rows can continue from cached keys and values of a common prefix
    checked: dict[str, float] = field(default_factory=dict)  # largest relative error that each self-check found

    @property
    def dtype(self) -> torch.dtype:
        """Type of the results: that of the output layer, at least float32."""
        return torch.promote_types(self.head.weight.dtype, torch.float32)

    @property
    def forward_attention(self) -> str:
        """Implementation of attention that has a forward mode."""
        return attn.FORWARD if self.replaced else "math"

    def require_uses(self, method: str) -> None:
        """Raise `UserError` if norms would be wrong because a parameter is not used as the hooks expect."""
        if self.unhandled:
            module = min(self.unhandled).rpartition(".")[0] or min(self.unhandled)
            raise UserError(
                f"method, {method}: '{module}' uses a parameter in another way than a linear map, an embedding or a norm once; freeze "
                "it, or take torch.autograd.grad of each token's log-probability"
            )

    def require_local(self) -> None:
        """Raise `UserError` if local norms would be wrong."""
        self.require_uses("local")
        if self.not_local:
            raise UserError(f"method, local: {self.not_local}; use method='exact'")


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
        given[cache_keyword(body)] = cache = DynamicCache()
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
    cache, body = DynamicCache(), backbone(model)
    body(input_ids=before[None], use_cache=True, **{cache_keyword(body): cache})
    return cache


def outline(causal: Any, head: Head) -> Structure:
    """Names, groups and modules of the trainable parameters of a model with this output layer, before a pass through it."""
    named = {name: parameter for name, parameter in causal.named_parameters() if parameter.requires_grad}
    names = {id(parameter): name for name, parameter in named.items()}
    tied, head_name = head.weight is causal.get_input_embeddings().weight, names.get(id(head.weight))
    return Structure(
        named,
        head,
        tied=head_name if tied else None,
        head_weight=None if tied else head_name,
        head_bias=names.get(id(head.bias)),
        modules=_holders(causal, named),
        groups=group_names(causal, named),
    )


def _holders(causal: Any, named: Mapping[str, nn.Parameter]) -> dict[nn.Module, dict[str, str]]:
    """Module -> attribute -> name of its parameters, without the output layer, whose part is known in closed form."""
    names, layer = {id(parameter): name for name, parameter in named.items()}, causal.get_output_embeddings()
    found = {
        module: {key: names[id(p)] for key, p in module._parameters.items() if id(p) in names}
        for module in causal.modules()
        if module is not layer
    }
    return {module: keys for module, keys in found.items() if keys}


def _examine(model: nn.Module) -> Structure:
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UserError("model: prompt-learning adapters add positions of their own; merge or remove the adapter")
    head, causal = output_head(model), bare(model)
    check_head(model, head)
    structure = outline(causal, head)
    size = (2, safe_width(model, 7))  # (B, L)
    ids = torch.arange(size[0] * size[1], device=head.weight.device).view(size) * 5 + 1
    ids %= causal.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    with recording(model, structure, size, "math") as recorder:
        hidden = hidden_states(model, ids)
    outside = (structure.head_weight, structure.head_bias)
    body = {name: parameter for name, parameter in structure.named.items() if name not in outside}
    unhandled = structure.unhandled = recorder.unhandled(body, hidden)
    try:
        with attn.counting() as calls, recording(model, structure, size, attn.CUT):
            hidden_states(model, ids)
        if not calls:
            raise attn.AttentionError("its attention does not go through transformers' AttentionInterface")
    except attn.AttentionError as problem:
        structure.replaced, structure.not_local = False, str(problem)
    structure.modules = _holders(causal, {name: p for name, p in structure.named.items() if name not in unhandled})
    structure.shares = _can_share(model, structure, ids)
    return structure


def _can_share(model: nn.Module, structure: Structure, ids: Tensor) -> bool:
    """Whether the hidden states are equal if the last tokens continue from cached keys and values."""
    if not structure.replaced:
        return False
    try:
        check_cacheable(model)
        cache_keyword(backbone(model))
    except UserError:
        return False
    with torch.no_grad(), attention_implementation(model, attn.FORWARD):
        ids = ids[:1]
        whole = hidden_states(model, ids)[:, -3:]
        part = hidden_states(model, ids[:, -3:], read_before(model, ids[0, :-3]))
    eps = max(torch.finfo(p.dtype).eps for p in (structure.head.weight, *structure.named.values()))
    if eps < 1e-6 and whole.is_cuda:  # products of matrices may be rounded to TF32 or bfloat16
        eps = max(eps, {"highest": 0.0, "high": 2**-10}.get(torch.get_float32_matmul_precision(), 2**-7))
    limit = max(eps, torch.finfo(torch.float32).eps) ** 0.5 * float(whole.abs().amax())
    return torch.allclose(whole, part, rtol=0, atol=limit)
