"""The surface of a causal language model: a functional over frozen rows, in microbatches, within a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from sharpscope.errors import UserError
from sharpscope.policy.head import Head, backbone, check_head, output_head
from sharpscope.probes.curvature.dual import DualBody
from sharpscope.probes.curvature.head import HeadPoint, HeadProduct, SelectedLogp, squash
from sharpscope.probes.curvature.operators import GraphHessian, Operator
from sharpscope.probes.functionals import Functional, token_batch
from sharpscope.probes.guard import guarded
from sharpscope.probes.surface import checked_parameters, common_dtype, flatten, unflatten, working_precision

ProductMode = Literal["auto", "graph", "stream"]


class LmSurface:
    """L(θ) of a functional under a causal LM; use `lm_surface`, which guards the model and puts it into float32 or better.

    Rows are sorted by length into microbatches; what is computed does not depend on them beyond rounding.

    Attributes:
        parameters: the tensors that vectors are about.
        functional: with its anchors; see `Functional.anchored`.
    """

    def __init__(
        self,
        model: nn.Module,
        functional: Functional,
        *,
        parameters: Sequence[Tensor] | None = None,
        microbatch_tokens: int = 4096,
        graph_mb: float = 1024.0,
        head_mb: float = 64.0,
        mode: ProductMode = "auto",
    ) -> None:
        self.model = model
        self.parameters = checked_parameters(list(model.parameters()) if parameters is None else parameters)
        self.functional = functional
        self._backbone, self._head = backbone(model), output_head(model)
        self._graph_mb, self._head_mb, self._mode = graph_mb, head_mb, mode
        self._microbatches = _microbatches(functional.batch.lengths, microbatch_tokens)

    def restricted(self, parameters: Sequence[Tensor]) -> LmSurface:
        """The same surface seen over some of the parameters: its Hessian is that diagonal block."""
        return self._like(self.functional, parameters)

    def over(self, functional: Functional) -> LmSurface:
        """The same model under another functional (or other rows)."""
        return self._like(functional, self.parameters)

    def _like(self, functional: Functional, parameters: Sequence[Tensor]) -> LmSurface:
        tokens = max(int(functional.batch.lengths[index].max()) * len(index) for index in self._microbatches) if functional is self.functional else 4096
        return LmSurface(
            self.model, functional, parameters=parameters, microbatch_tokens=tokens, graph_mb=self._graph_mb,
            head_mb=self._head_mb, mode=self._mode,
        )

    def logp(self) -> Tensor:
        """(N, S) float64 [nats] log-probability of the scored tokens, 0 elsewhere; no graph."""
        batch = self.functional.batch
        found = torch.zeros(batch.scored.shape, dtype=torch.float64, device=batch.scored.device)
        with torch.no_grad():
            for index in self._microbatches:
                logp = self._logp(index)
                found[index, : logp.shape[1]] = logp
        return found

    def value(self) -> float:
        """L(θ), summed in float64."""
        with torch.no_grad():
            return sum(float(self._share(index)) for index in self._microbatches)

    def loss(self) -> Tensor:
        """L(θ) with one graph over all rows (for PyHessian); its memory is not bounded."""
        return torch.stack([self._share(index, plain=True) for index in self._microbatches]).sum()

    def gradient(self) -> tuple[float, Tensor]:
        """L(θ) and ∇L(θ) (P,)."""
        total, value = torch.zeros(_size(self.parameters), dtype=common_dtype(self.parameters), device=self.parameters[0].device), 0.0
        for index in self._microbatches:
            share = self._share(index)
            value += float(share.detach())
            if share.requires_grad:
                total += flatten(torch.autograd.grad(share, self.parameters, allow_unused=True), self.parameters)
        return value, total

    def hessian(self) -> Operator:
        """∇²L(θ).

        Mode `graph` keeps the gradient's graph of every microbatch: the cheapest product. `stream` keeps nothing
        between products, runs the output layer in blocks of the vocabulary and, where one microbatch would not fit
        `graph_mb`, each layer again in the backward pass. `auto` takes the first where it fits.
        """
        per_token = self._graph_bytes_per_token() if self._mode == "auto" else 0.0
        tokens = int(sum(len(index) * self.functional.batch.lengths[index].max() for index in self._microbatches))
        if self._mode == "graph" or (self._mode == "auto" and per_token * tokens <= self._graph_mb * 2**20):
            return GraphHessian([self._share(index, plain=True) for index in self._microbatches], self.parameters)
        return self._streamed(per_token, gauss_newton=False)

    def gauss_newton(self) -> Operator:
        """Jᵀ H_z J with J the Jacobian of the logits and H_z the functional's Hessian in them (positive for `nll`)."""
        return self._streamed(self._graph_bytes_per_token() if self._mode == "auto" else 0.0, gauss_newton=True)

    def _streamed(self, bytes_per_token: float, *, gauss_newton: bool) -> Operator:
        largest = max(len(index) * int(self.functional.batch.lengths[index].max()) for index in self._microbatches)
        # The dual graph of a microbatch weighs about as much as its graph of first and second reverse pass.
        checkpoint = self._mode == "stream" or bytes_per_token * largest > self._graph_mb * 2**20
        _check_forward_mode(self)
        return StreamedHessian(self, checkpoint=checkpoint, gauss_newton=gauss_newton)

    def _share(self, index: Tensor, *, plain: bool = False) -> Tensor:
        logp = self._logp(index, plain=plain)
        return self.functional.share(index, logp, width=logp.shape[1])

    def _logp(self, index: Tensor, *, plain: bool = False) -> Tensor:
        """(n, width) float64 log-probabilities with graph, 0 off the scored tokens."""
        ids, place, target = self._inputs(index)
        hidden = self._backbone(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][place]  # (M, d)
        head = self._head
        if plain or len(target) * len(head.weight) * hidden.element_size() <= self._head_mb * 2**20:
            z = head.logits(hidden) / self.functional.temperature
            picked = z.gather(1, target[:, None])[:, 0] - z.logsumexp(1)
        else:
            form = squash(head, self.functional.temperature)
            picked = SelectedLogp.apply(hidden, head.weight, head.bias, target, form, self._head_mb)
        return _scatter(picked.double(), place)

    def _inputs(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids (n, width), the positions (n, width − 1) whose hidden states predict a scored token, those tokens (M,)."""
        batch = self.functional.batch
        width = int(batch.lengths[index].max())
        ids, scored = batch.input_ids[index, :width], batch.scored[index, :width]
        place = scored[:, 1:]
        return ids, place, ids[:, 1:][place]

    def _graph_bytes_per_token(self) -> float:
        """Memory that the graph of first and second reverse pass holds, from one row (the longest)."""
        index = self._microbatches[-1][-1:]
        held: dict[int, int] = {p.untyped_storage().data_ptr(): 0 for p in self.model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            held.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            share = self._share(index, plain=True)
            if not share.requires_grad:
                return 0.0
            gradients = torch.autograd.grad(share, self.parameters, create_graph=True, allow_unused=True)
        del gradients
        return sum(held.values()) / float(self.functional.batch.lengths[index].max())


class StreamedHessian(Operator):
    """Hessian (or Gauss-Newton) products that keep nothing between them: dual forward, closed-form head, one backward."""

    def __init__(self, surface: LmSurface, *, checkpoint: bool, gauss_newton: bool) -> None:
        parameters = surface.parameters
        super().__init__(_size(parameters), common_dtype(parameters), parameters[0].device)
        self._surface, self._gauss_newton = surface, gauss_newton
        self._body = DualBody(surface._backbone, parameters, checkpoint=checkpoint)

    def product(self, vector: Tensor) -> Tensor:
        """H v or G v for v (P,)."""
        surface = self._surface
        like = surface.parameters
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        direction = {id(p): part for p, part in zip(like, unflatten(vector, like), strict=True)}
        parts = unflatten(total, like)
        for index in surface._microbatches:
            ids, place, target = surface._inputs(index)
            back = _HeadBack(surface, index, place, target, direction, dict(zip(map(id, like), parts, strict=True)), self._gauss_newton)
            self._body.product(ids, direction, back.out, back)
        # With one dtype and device the parts are views of `total`; otherwise they are copies.
        return total if parts[0].data_ptr() == total.data_ptr() and _uniform(like) else flatten(parts, like)


class _HeadBack:
    """From h and ḣ to their cotangents, through the output layer and the functional."""

    def __init__(
        self, surface: LmSurface, index: Tensor, place: Tensor, target: Tensor, direction: dict[int, Tensor], out: dict[int, Tensor],
        gauss_newton: bool,
    ) -> None:  # fmt: skip
        self.surface, self.index, self.place, self.target = surface, index, place, target
        self.direction, self.out, self.gauss_newton = direction, out, gauss_newton

    def __call__(self, hidden: Tensor, hidden_dot: Tensor) -> tuple[Tensor, Tensor | None]:
        surface, head = self.surface, self.surface._head
        point = HeadPoint(
            hidden[:, :-1][self.place], hidden_dot[:, :-1][self.place], head.weight.detach(), self._of(self.direction, head.weight),
            None if head.bias is None else head.bias.detach(), self._of(self.direction, head.bias), self.target,
            squash(head, surface.functional.temperature),
        )  # fmt: skip
        with torch.no_grad():
            product = HeadProduct(point, surface._head_mb)
            logp, logp_dot = product.tangent()
        first, second = self._functional(logp.double(), logp_dot.double())
        with torch.no_grad():
            back, back_dot = product.cotangents(
                first.to(logp.dtype), second.to(logp.dtype), self._of(self.out, head.weight), self._of(self.out, head.bias),
                gauss_newton=self.gauss_newton,
            )
        return self._spread(hidden, back), None if back_dot is None else self._spread(hidden, back_dot)

    def _functional(self, logp: Tensor, logp_dot: Tensor) -> tuple[Tensor, Tensor]:
        """c = ∂φ/∂ℓ (M,) and its derivative along ℓ̇: the functional's own Hessian, which couples the tokens of a row."""
        given = logp.requires_grad_()
        spread = _scatter(given, self.place)
        share = self.surface.functional.share(self.index, spread, width=spread.shape[1])
        (first,) = torch.autograd.grad(share, given, create_graph=True)
        if not first.requires_grad:  # linear in ℓ, as nll is
            return first.detach(), torch.zeros_like(logp_dot)
        (second,) = torch.autograd.grad(first, given, logp_dot, allow_unused=True)
        return first.detach(), torch.zeros_like(logp_dot) if second is None else second

    def _spread(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """(n, width, d) with `rows` (M, d) at the positions that predict a scored token."""
        full = torch.zeros_like(hidden)
        full[:, :-1][self.place] = rows
        return full

    @staticmethod
    def _of(table: dict[int, Tensor], tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else table.get(id(tensor))


def _check_forward_mode(surface: LmSurface) -> None:
    """Forward mode against reverse mode on a few tokens: an architecture may use an operation with a wrong tangent.

    Raises:
        UserError: they differ, or forward mode does not exist for an operation of the model.
    """
    batch = surface.functional.batch
    index = batch.lengths.argmin()[None]
    width = min(16, int(batch.lengths[index]))
    few = token_batch(batch.input_ids[index, :width], torch.ones_like(batch.input_ids[index, :width]), torch.arange(width)[None] > 0)
    short = surface.over(Functional("nll", few.to(batch.input_ids.device)))
    vector = torch.randn(_size(surface.parameters), generator=torch.Generator().manual_seed(0), dtype=common_dtype(surface.parameters))
    vector = vector.to(surface.parameters[0].device)
    advice = "use mode='graph' with more memory (graph_mb), or another attention implementation"
    try:
        streamed = StreamedHessian(short, checkpoint=False, gauss_newton=False) @ vector
    except NotImplementedError as problem:
        raise UserError(f"model, {type(surface.model).__name__}: no forward-mode derivative ({problem}); {advice}") from problem
    direct = GraphHessian([short.loss()], surface.parameters) @ vector
    error = float((streamed - direct).norm()) / max(float(direct.norm()), 1e-30)
    if not error < 1e-2 and float(direct.norm()) > 1e-6 * float(vector.norm()):
        raise UserError(
            f"model, {type(surface.model).__name__}: forward-mode products differ from reverse-mode ones by {error:.0%} on {width} tokens; {advice}"
        )


@contextmanager
def lm_surface(
    model: nn.Module,
    functional: Functional,
    *,
    parameters: Sequence[Tensor] | None = None,
    microbatch_tokens: int = 4096,
    graph_mb: float = 1024.0,
    head_mb: float = 64.0,
    mode: ProductMode = "auto",
) -> Iterator[LmSurface]:
    """Within the block: the surface of a model, guarded, in eval mode, in float32 or better, with MATH attention.

    Unless the functional is stale its anchors become the model's own log-probabilities, so that all ratios are 1.

    Args:
        model: a Hugging Face causal LM, with or without adapters.
        functional: what is probed, over which rows.
        parameters: which tensors; None: all that require grad.
        microbatch_tokens: padded tokens in one forward pass.
        graph_mb: memory for graphs kept between products [MiB].
        head_mb: memory for blocks of the logits [MiB].
        mode: see `LmSurface.hessian`.

    Raises:
        UserError: an architecture whose output layer is not one linear map.
    """
    tensors = [*model.parameters(), *model.buffers()]
    with guarded(model, weights=False, attention="math", training=False), working_precision(tensors), torch.enable_grad():
        check_head(model, output_head(model))
        surface = LmSurface(
            model, functional, parameters=parameters, microbatch_tokens=microbatch_tokens, graph_mb=graph_mb, head_mb=head_mb, mode=mode
        )
        if functional.name != "nll" and not functional.stale:
            surface.functional = functional.anchored(surface.logp())
        yield surface


def parameter_groups(model: nn.Module, parameters: Sequence[Tensor] | None = None) -> dict[str, list[Tensor]]:
    """Trainable tensors by what they do: `embedding`, `attention`, `mlp`, `norm`, `head`, `other`; empty groups left out.

    A tied tensor belongs to its first use (the embedding).
    """
    wanted = {id(p) for p in (model.parameters() if parameters is None else parameters) if p.requires_grad}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    fixed: dict[int, str] = {id(p): "head" for p in (head.parameters() if head is not None else ())}
    fixed |= {id(p): "embedding" for p in embedding.parameters()}
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in wanted:
            groups.setdefault(fixed.get(id(parameter)) or _kind(name), []).append(parameter)
    return groups


def _kind(name: str) -> str:
    words = name.lower()
    rules: list[tuple[str, Callable[[str], bool]]] = [
        ("norm", lambda w: any(key in w for key in ("norm", "ln_", ".ln"))),
        ("attention", lambda w: "attn" in w or "attention" in w),
        ("mlp", lambda w: any(key in w for key in ("mlp", "expert", "feed_forward", "ffn"))),
        ("embedding", lambda w: any(key in w for key in ("embed", "wpe", "wte"))),
    ]
    return next((group for group, holds in rules if holds(words)), "other")


def _microbatches(lengths: Tensor, tokens: int) -> list[Tensor]:
    """Rows in order of length, cut so that rows × longest ≤ tokens (one row at least)."""
    if tokens < 1:
        raise UserError(f"microbatch_tokens, {tokens}: at least 1")
    order = torch.argsort(lengths, stable=True).tolist()
    found: list[list[int]] = [[]]
    for row in order:
        if found[-1] and (len(found[-1]) + 1) * int(lengths[row]) > tokens:
            found.append([])
        found[-1].append(row)
    return [torch.tensor(rows, device=lengths.device) for rows in found]


def _scatter(values: Tensor, place: Tensor) -> Tensor:
    """(n, width) with `values` (M,) at the scored tokens: `place` (n, width − 1) is shifted by one."""
    grid = torch.zeros(place.shape, dtype=values.dtype, device=values.device).masked_scatter(place, values)
    return torch.nn.functional.pad(grid, (1, 0))


def _size(parameters: Sequence[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _uniform(tensors: Sequence[Tensor]) -> bool:
    return len({(t.dtype, t.device) for t in tensors}) == 1
