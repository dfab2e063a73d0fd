"""Properties of a model that token gradients need, and the uses of its trainable parameters in a forward pass.

Gradients of weights are not formed. That of a linear map is Σ_s b_s ⊗ a_s (inputs a, cotangents b of the outputs, positions s),
that of a gain Σ_s b_s ∘ x̂_s, that of an embedding the sum of b_s for each word. Uses are met by hooks on linear maps, embeddings
and norms; a parameter that is used in any other way, or twice, is `unhandled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from sharpscope.errors import UserError
from sharpscope.policy import Head, backbone, bare, check_head, output_head
from sharpscope.policy.cache import cache_keyword, change_states, check_cacheable
from sharpscope.policy.guard import attention_implementation, group_names, remembered, tolerance
from sharpscope.policy.sharding import is_sharded
from sharpscope.tokens.rows import safe_width

CUT, FORWARD = "sharpscope_cut", "sharpscope_forward"
"""Names of `attend` in transformers' `AttentionInterface`, where gradients reach a position only through itself, and plain."""
QUERY_BLOCK = 128  # rows of probabilities made at once: small enough for a cache, large enough for efficient products


class AttentionError(UserError):
    """An attention call that `attend` cannot replace."""


@dataclass
class Structure:
    """Properties of a model."""

    named: dict[str, nn.Parameter]  # the trainable ones, in the model's order
    head: Head
    tied: str | None  # name of the trainable parameter shared by input embedding and output layer
    # names of the output layer's trainable parameters; None if tied, frozen or absent
    head_weight: str | None
    head_bias: str | None
    # -> attribute -> name of its parameters, without `unhandled`
    modules: Mapping[nn.Module, Mapping[str, str]]
    groups: Mapping[str, tuple[str, ...]]  # of each parameter
    # not used exactly once, by a linear map, an embedding or a norm
    unhandled: frozenset[str] = frozenset()
    # why the attention of `attention` cannot replace the model's own
    own_attention: str | None = None
    shares: bool = False  # whether rows can continue from cached keys and values of a common prefix
    # largest relative error that each self-check found
    checked: dict[str, float] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the results: that of the output layer, at least float32."""
        return torch.promote_types(self.head.weight.dtype, torch.float32)

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
        if self.own_attention:
            raise UserError(f"method, local: {self.own_attention}; use method='exact'")


def structure_of(model: nn.Module) -> Structure:
    """The structure of a model, cached until something other than the values of its weights changes."""
    known = remembered(model)
    structure = known.get("structure")
    if not isinstance(structure, Structure):
        known["structure"] = structure = examine(model)
    return structure


def examine(model: nn.Module) -> Structure:
    """The structure of a model, by passes over a few tokens; of one in shards, the weights outside its layers are gathered."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UserError(
            "model: prompt-learning adapters add positions of their own; merge or remove the adapter"
        )
    head = output_head(model)
    causal = bare(model)
    check_head(model, head)
    embedding: Any = causal.get_input_embeddings()
    named = {
        name: parameter for name, parameter in causal.named_parameters() if parameter.requires_grad
    }
    names = {id(parameter): name for name, parameter in named.items()}
    tied = head.weight is embedding.weight
    head_name = names.get(id(head.weight))
    structure = Structure(
        named,
        head,
        tied=head_name if tied else None,
        head_weight=None if tied else head_name,
        head_bias=names.get(id(head.bias)),
        modules=_holders(causal, named),
        groups=group_names(causal, named),
    )
    size = (2, safe_width(model, 7))  # (B, L)
    ids = torch.arange(size[0] * size[1], device=head.weight.device).view(size) * 5 + 1
    ids %= embedding.weight.shape[0]
    with recording(model, structure, size, "math") as recorder:
        hidden = hidden_states(model, ids)
    outside = (structure.head_weight, structure.head_bias)
    within = {name: p for name, p in named.items() if name not in outside}
    unhandled = recorder.unhandled(within, hidden)
    structure.own_attention = _own_attention(model, structure, ids)
    structure.unhandled = unhandled
    handled = {name: p for name, p in named.items() if name not in unhandled}
    structure.modules = _holders(causal, handled)
    if not structure.own_attention and not is_sharded(model):
        structure.shares = _can_share(model, structure, ids)
    return structure


def _own_attention(model: nn.Module, structure: Structure, ids: Tensor) -> str | None:
    """Why `attend` cannot replace the model's attention, tried on ids (B, L); None if it can."""
    _callers.clear()
    try:
        with recording(model, structure, (ids.shape[0], ids.shape[1]), CUT):
            hidden_states(model, ids)
    except AttentionError as problem:
        return str(problem)
    if not _callers:
        return "its attention does not go through transformers' AttentionInterface"
    return None


def _holders(
    causal: PreTrainedModel, named: Mapping[str, nn.Parameter]
) -> dict[nn.Module, dict[str, str]]:
    """Module -> attribute -> name of its parameters, without the output layer, whose part is known in closed form."""
    names = {id(parameter): name for name, parameter in named.items()}
    layer = causal.get_output_embeddings()
    found = {}
    for module in causal.modules():
        parameters = {} if module is layer else module._parameters
        keys = {key: names[id(p)] for key, p in parameters.items() if id(p) in names}
        if keys:
            found[module] = keys
    return found


def _can_share(model: nn.Module, structure: Structure, ids: Tensor) -> bool:
    """Whether the hidden states are equal if the last tokens continue from cached keys and values."""
    try:
        check_cacheable(model)
        cache_keyword(backbone(model))
    except UserError:
        return False
    with torch.no_grad(), attention_implementation(model, FORWARD):
        whole = hidden_states(model, ids[:1])[:, -3:]
        part = hidden_states(model, ids[:1, -3:], read_before(model, ids[0, :-3], 1))
    limit = tolerance((structure.head.weight, *structure.named.values()))
    if whole.is_cuda:  # products of matrices may be rounded to TF32
        limit = max(limit, 2**-5)
    return torch.allclose(whole, part, rtol=0, atol=limit * float(whole.abs().amax()))


# -- Passes


def hidden_states(model: nn.Module, ids: Tensor, cache: DynamicCache | None = None) -> Tensor:
    """Hidden states (B, L, d) after the final norm, for rows (B, L) without left padding, which continue a `cache` of B rows."""
    body = backbone(model)
    start = 0 if cache is None else cache.get_seq_length()
    given: dict[str, object] = {}
    if "position_ids" in signature(body.forward).parameters:
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        # Learned positions are looked up once per row, so that each row has a gradient of its own.
        given["position_ids"] = positions.repeat(ids.shape[0], 1)  # (B, L)
    # FSDP2 may have sharded the final norm with the output layer, and waits for both
    if is_sharded(model):
        if "logits_to_keep" in signature(bare(model).forward).parameters:
            given["logits_to_keep"] = 1
        seen: list[Tensor] = []
        hook = body.register_forward_hook(lambda *passed: seen.append(passed[2].last_hidden_state))
        try:
            model(input_ids=ids, use_cache=False, **given)
        finally:
            hook.remove()
        return seen[0]
    if cache is not None:
        given[cache_keyword(body)] = cache
    return body(input_ids=ids, use_cache=cache is not None, **given).last_hidden_state


def read_before(model: nn.Module, before: Tensor | None, rows: int) -> DynamicCache | None:
    """Keys and values of a common prefix (P,) of this number of rows."""
    if before is None:
        return None
    cache = DynamicCache()
    body = backbone(model)
    body(input_ids=before[None], use_cache=True, **{cache_keyword(body): cache})
    change_states(cache, lambda x: x.expand(rows, -1, -1, -1))
    return cache


@contextmanager
def recording(
    model: nn.Module,
    structure: Structure,
    size: tuple[int, int],
    attention: str,
) -> Iterator[UseRecorder]:
    """Record the uses of a forward pass over (B, L) = `size` within the block, see `UseRecorder`."""
    recorder = UseRecorder(structure.modules, size)
    with torch.enable_grad(), attention_implementation(model, attention), recorder.attached(model):
        yield recorder


# -- Uses of parameters


@dataclass
class Use:
    """One use of a weight and/or bias in a forward pass over B rows of L positions."""

    kind: Literal["linear", "gain", "embedding"]
    weight: str | None  # names of the trainable parameters, None where absent or frozen
    bias: str | None
    x: Tensor  # linear: its inputs (B, L, d_in); gain: x̂ (B, L, heads, d); embedding: the ids (B, L)
    size: tuple[int, int]  # (B, L)
    ignored: int | None = None  # embedding: the word whose gradient is defined as 0

    def by_position(self, g: Tensor) -> Tensor:
        """(*shape) -> (B, L, heads, d), in at least float32."""
        return wide(_by_position(g, self.size))

    @property
    def gram(self) -> Tensor:
        """Inner products of the inputs of positions of a row, (B, L, L)."""
        if self.kind == "embedding":
            same = self.x[:, :, None] == self.x[:, None, :]
            if self.ignored is not None:
                same &= (self.x != self.ignored)[:, None]
            return same.float()
        x = wide(self.x)
        return x @ x.mT


def wide(x: Tensor) -> Tensor:
    """`x` in at least float32, since squares above 256² overflow float16."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _by_position(g: Tensor, size: tuple[int, int]) -> Tensor:
    if g.ndim == 4 and tuple(g.shape[:2]) != size:  # (B, heads, L, d)
        g = g.transpose(1, 2)
    return g.reshape(*size, -1, g.shape[-1])


def _squares(x: Tensor) -> Tensor:
    return x.square().sum(-1)


def local_squares(use: Use, g: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, squared norms (B, L)) from the output's cotangent `g`, where that at position t is of the token that t predicts."""
    g = use.by_position(g)
    if use.kind == "gain":
        weight = _squares((g * use.x).sum(-2))
        bias = _squares(g.sum(-2))
    else:
        bias = _squares(g[..., 0, :])
        weight = bias * _squares(wide(use.x)) if use.kind == "linear" else bias
        if use.ignored is not None:
            weight = weight.masked_fill(use.x == use.ignored, 0.0)
    for name, squares in ((use.weight, weight), (use.bias, bias)):
        if name is not None:
            yield name, squares


def exact_squares(use: Use, g: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, squared norms (B,)) of the sum over the positions of each row, for a cotangent of the use's output."""
    g = use.by_position(g)
    if use.kind == "gain":
        if use.weight is not None:
            yield use.weight, _squares((g * use.x).sum((1, 2)))
        if use.bias is not None:
            yield use.bias, _squares(g.sum((1, 2)))
    else:
        g = g[:, :, 0]  # (B, L, d)
        few = g.shape[1] < 1.4 * use.x.shape[-1]  # then (L, L) products cost less than the gradient
        if use.weight is not None and (use.kind == "embedding" or few):
            outer = g @ g.mT  # (B, L, L)
            yield use.weight, (use.gram.to(outer) * outer).sum((1, 2))
        elif use.weight is not None:
            gradient = wide(use.x).mT.to(g) @ g  # (B, d_in, d)
            yield use.weight, gradient.square().sum((1, 2))
        if use.bias is not None:
            yield use.bias, _squares(g.sum(1))


Measure = Callable[[Use, Tensor], None]


class UseRecorder:
    """Records uses of trainable parameters in a forward pass, whose cotangents `pull` hands to a function.

    A parameter is known by the module that holds it, so that weights which exist only while it runs (FSDP2) are known too.
    """

    def __init__(
        self,
        modules: Mapping[nn.Module, Mapping[str, str]],
        size: tuple[int, int],
    ) -> None:
        self.used: dict[str, int] = {}  # how often each parameter was used
        self._modules = modules
        self._size = size
        self._anchor: Tensor | None = None
        self._measure: Measure | None = None

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Record the forward passes within the block."""
        embedding = bare(model).get_input_embeddings()
        with ExitStack() as stack:
            for module in dict.fromkeys([embedding, *self._modules]):
                if isinstance(module, nn.Linear | Conv1D):
                    hook: Callable[..., Tensor | None] = self._linear
                elif isinstance(module, nn.Embedding) or module is embedding:
                    hook = self._embedding
                elif not any(module.children()) and all(p.ndim == 1 for p in module.parameters()):
                    hook = self._norm
                else:
                    continue
                handle = module.register_forward_hook(hook, with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
            yield

    def unhandled(self, named: Mapping[str, nn.Parameter], output: Tensor) -> frozenset[str]:
        """The parameters that `output` depends on in another way than through one recorded use."""
        rest = [name for name in named if self.used.get(name) != 1]
        if not rest or not output.requires_grad:
            return frozenset()
        parameters = [named[name] for name in rest]
        gradients = torch.autograd.grad(output.sum(), parameters, allow_unused=True)
        pairs = zip(rest, gradients, strict=True)
        return frozenset(name for name, gradient in pairs if gradient is not None)

    def pull(self, outputs: Tensor, cotangents: Tensor, measure: Measure) -> None:
        """Backward pass that calls `measure` with each use and its cotangent."""
        if self._anchor is None:
            return
        self._measure = measure
        try:
            torch.autograd.grad(
                outputs,
                self._anchor,
                cotangents,
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            self._measure = None

    def _linear(
        self,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        out: Tensor,
    ) -> None:
        x = args[0] if args else kwargs["input"]
        # A module with another output, such as a router's, is found to be unhandled.
        if isinstance(out, Tensor) and x.numel() == self._size[0] * self._size[1] * x.shape[-1]:
            self._add("linear", module, x.detach().reshape(*self._size, -1), out)

    def _embedding(
        self,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        out: Tensor,
    ) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        # a backward pass to this zero reaches what depends on an embedding
        if self._anchor is None:
            self._anchor = torch.zeros((), dtype=out.dtype, device=out.device, requires_grad=True)
        out = out + self._anchor
        ids = args[0] if args else kwargs["input"]
        # Learned positions are often subclasses that are called with the words.
        plain = type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale")
        if isinstance(module, nn.Embedding) and plain and ids.shape == self._size:
            factor = getattr(module, "embed_scale", 1.0)  # as Gemma's
            self._add("embedding", module, ids, out, ignored=module.padding_idx, factor=factor)
        return out

    def _norm(
        self,
        module: nn.Module,
        args: tuple,
        kwargs: dict,
        out: object,
    ) -> None:
        """Record a module y = x̂∘w + b or x̂∘(1 + w): x̂ is the change from w = 0 to w = 1."""
        weight, bias = (module._parameters.get(key) for key in ("weight", "bias"))
        if not isinstance(out, Tensor) or weight is None or out.shape[-1:] != weight.shape:
            return
        values = []
        with torch.no_grad():
            for value in (1.0, 0.0):
                replaced = {
                    "weight": torch.full_like(weight, value),
                    "bias": None if bias is None else bias * 0,
                }
                try:
                    module._parameters.update(replaced)  # type: ignore[arg-type]
                    values.append(module.forward(*args, **kwargs))
                finally:
                    module._parameters.update({"weight": weight, "bias": bias})
        if out.numel() % (self._size[0] * self._size[1] * out.shape[-1]) == 0:
            normed = wide(values[0]) - wide(values[1])
            self._add("gain", module, _by_position(normed, self._size), out)

    def _add(
        self,
        kind: Literal["linear", "gain", "embedding"],
        module: nn.Module,
        x: Tensor,
        out: Tensor,
        *,
        factor: float | Tensor = 1.0,
        ignored: int | None = None,
    ) -> None:
        """Record a use, whose cotangent is that of `out` times `factor`."""
        names = self._modules.get(module, {})
        if not names or not out.requires_grad:
            return
        use = Use(kind, names.get("weight"), names.get("bias"), x, self._size, ignored)
        for name in filter(None, (use.weight, use.bias)):
            self.used[name] = self.used.get(name, 0) + 1

        def hook(g: Tensor) -> None:
            """Hand the cotangent to the measure in progress."""
            if self._measure is not None:
                self._measure(use, g * factor)

        out.register_hook(hook)


# -- Causal attention


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    cut: bool,
) -> Tensor:
    """softmax(cap·tanh(scale·q·kᵀ/cap) + mask)·v, (B, H, L, d); with `cut` a position's cotangent reaches its own q, k and v only.

    q is (B, H, L, d), k and v (B, Hkv, before + L, d) with H a multiple of Hkv, of which the last L keys are those of the queries'
    positions; mask (B or 1, H or 1, L, keys), None for a causal one. Probabilities are made in blocks of query rows, so that masked
    parts are not computed. PyTorch has no attention with this cut, and its fused kernels have no forward-mode derivative.
    """
    B, H, L, _ = q.shape
    kv, keys = k.shape[1:3]
    before = keys - L
    groups = H // kv
    q = q.reshape(B * kv, groups, L, -1) * scale
    k = k.reshape(B * kv, keys, -1)
    v = v.reshape(B * kv, keys, -1)
    # 0, with the own gradient
    own_k, own_v = (x[:, None, before:] - x[:, None, before:].detach() for x in (k, v))
    if cut:
        k = k.detach()
        v = v.detach()
    parts = []
    for start in range(0, L, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, L)
        # `end`: of the keys that the block sees
        rows = q[:, :, start:stop]
        end = before + stop
        at = before + start
        # (B·kv, groups, b, end)
        S = torch.bmm(rows.flatten(1, 2), k[:, :end].mT).unflatten(1, (groups, -1))
        if cut:
            own = torch.linalg.vecdot(rows.detach(), own_k[:, :, start:stop])
            S = torch.diagonal_scatter(S, S.diagonal(at, -2, -1) + own, at, -2, -1)
        if cap is not None:
            S = cap * torch.tanh(S / cap)
        if mask is None:
            hidden = torch.ones(stop - start, end, dtype=torch.bool, device=q.device).triu_(at + 1)
            S = S.masked_fill(hidden, torch.finfo(S.dtype).min)
        else:
            part = mask[:, :, start:stop, :end]
            # (B, kv, groups, b, end)
            part = part[:, :, None] if part.shape[1] == 1 else part.unflatten(1, (kv, -1))
            S = (S.unflatten(0, (B, kv)) + part).flatten(0, 1)
        P = torch.softmax(S, -1)
        # (B·kv, groups, b, d)
        out = torch.bmm(P.flatten(1, 2), v[:, :end]).unflatten(1, (groups, -1))
        if cut:
            own_p = P.diagonal(at, -2, -1).detach()  # (B·kv, groups, b)
            out = out + own_p[..., None] * own_v[:, :, start:stop]
        parts.append(out)
    return torch.cat(parts, 2).view(B, H, L, -1)


_callers: set[str] = set()  # classes that have called `attend` since `examine` looked last


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    *,
    cut: bool,
    **rest: object,
) -> tuple[Tensor, None]:
    """`attend` for the interface of transformers."""
    unknown = [name for name in ("s_aux", "position_bias", "indices") if rest.get(name) is not None]
    if unknown:
        raise AttentionError(f"{type(module).__name__} has attention with `{unknown[0]}`")
    if attention_mask is not None and attention_mask.requires_grad:
        raise AttentionError(f"{type(module).__name__} has a trainable attention mask")
    if attention_mask is not None and attention_mask.dtype == torch.bool:  # True: seen
        least = torch.finfo(query.dtype).min
        attention_mask = torch.where(attention_mask, 0.0, least).to(query.dtype)
    _callers.add(type(module).__name__)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = attend(query, key, value, attention_mask, scale, softcap, cut)
    return out.transpose(1, 2).contiguous(), None


for _name in (CUT, FORWARD):
    ALL_ATTENTION_FUNCTIONS.register(_name, partial(_attention, cut=_name == CUT))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, eager_mask)
