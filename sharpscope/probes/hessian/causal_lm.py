"""The loss surface of a causal language model, computed in microbatches within a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sharpscope.config.probes import Check
from sharpscope.errors import CheckError, UserError
from sharpscope.policy import backbone, bare, check_head, length_buckets, output_head
from sharpscope.probes.fingerprint import remembered
from sharpscope.probes.guard import guarded
from sharpscope.probes.hessian.dual import marked_layers
from sharpscope.probes.hessian.head import SelectedLogp, squash
from sharpscope.probes.hessian.operators import GraphHessian, Operator
from sharpscope.probes.hessian.streamed import StreamedHessian, scatter
from sharpscope.probes.objectives import Objective
from sharpscope.probes.surface import checked_parameters, common_dtype, flatten, size_of, working_precision

ProductMode = Literal["auto", "graph", "stream"]
CHECKED_TOKENS = 32  # tokens of the first row whose logits are compared with the model's own
START_TOKENS = 6  # tokens whose gradients span Lanczos's starting vector


class LmSurface:
    """L(θ) of an objective of a causal language model; create it with `lm_surface`.

    Rows of similar length share a microbatch to reduce padding. Results do not depend on the microbatches beyond rounding.

    Attributes:
        parameters: the tensors of θ.
        objective: the loss, with its anchors (see `Objective.anchored`).
        microbatches: row indices, shortest rows first.
        backbone: the model without its output layer.
        head: the output layer.
        head_mb: memory for blocks of the logits [MiB].
        checked: results of `check_products`, by whether streamed products were checked; shared with derived surfaces.
        start_tokens: row and position of the tokens that the last `start` used.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        *,
        parameters: Sequence[Tensor] | None = None,
        microbatch_tokens: int = 4096,
        graph_mb: float = 1024.0,
        head_mb: float = 64.0,
        mode: ProductMode = "auto",
    ) -> None:
        self.model = model
        self.parameters = checked_parameters(list(model.parameters()) if parameters is None else parameters)
        self.objective = objective
        self.backbone, self.head = backbone(model), output_head(model)
        self._graph_mb, self.head_mb, self._mode, self._tokens = graph_mb, head_mb, mode, microbatch_tokens
        self.microbatches = _microbatches(objective.batch.lengths, microbatch_tokens)
        self.start_tokens: list[tuple[int, int]] = []
        self.checked: dict[bool, float] = {}

    def restricted(self, parameters: Sequence[Tensor]) -> LmSurface:
        """The surface over some of the parameters; its Hessian is a diagonal block."""
        return self._like(self.objective, parameters)

    def over(self, objective: Objective) -> LmSurface:
        """The surface of another objective of the same model."""
        return self._like(objective, self.parameters)

    def _like(self, objective: Objective, parameters: Sequence[Tensor]) -> LmSurface:
        like = LmSurface(
            self.model,
            objective,
            parameters=parameters,
            microbatch_tokens=self._tokens,
            graph_mb=self._graph_mb,
            head_mb=self.head_mb,
            mode=self._mode,
        )
        like.checked = self.checked
        return like

    def logp(self) -> Tensor:
        """Log-probabilities of the scored tokens, (N, S) float64 [nats], 0 elsewhere; without graph."""
        batch = self.objective.batch
        values = torch.zeros(batch.scored.shape, dtype=torch.float64, device=batch.scored.device)
        with torch.no_grad():
            for index in self.microbatches:
                logp = self._logp(index)
                values[index, : logp.shape[1]] = logp
        return values

    def value(self) -> float:
        """L(θ), summed in float64."""
        with torch.no_grad():
            return sum(float(self._share(index)) for index in self.microbatches)

    def by_prompt(self, prompts: Tensor | None = None) -> Tensor:
        """One value for each prompt, (k,) float64, with mean L(θ), or the part of `prompts`; see `Surface.by_prompt`."""
        batch = self.objective.batch
        shares = torch.zeros(len(batch), dtype=torch.float64)
        microbatches = self.microbatches
        if prompts is not None:
            rows = torch.isin(torch.tensor(batch.prompts), prompts).nonzero()[:, 0].to(batch.lengths.device)
            microbatches = [rows[part] for part in _microbatches(batch.lengths[rows], self._tokens)]
        with torch.no_grad():
            for index in microbatches:
                logp = self._logp(index)
                own = self.objective.row_shares(index, logp, width=logp.shape[1])
                shares[index.cpu()] = own.double().cpu()
        return self.objective.by_prompt(shares)

    def loss(self) -> Tensor:
        """L(θ) with one graph over all rows, for PyHessian; memory is not bounded."""
        return torch.stack([self._share(index, plain=True) for index in self.microbatches]).sum()

    def gradient(self) -> tuple[float, Tensor]:
        """L(θ) and ∇L(θ) (P,)."""
        value, total, _ = self.gradient_by_prompt()
        return value, total

    def gradient_by_prompt(self) -> tuple[float, Tensor, Tensor]:
        """L(θ), ∇L(θ) (P,) and `by_prompt` (k,), from one pass."""
        total, value = (
            torch.zeros(
                size_of(self.parameters), dtype=common_dtype(self.parameters), device=self.parameters[0].device
            ),
            0.0,
        )
        shares = torch.zeros(len(self.objective.batch), dtype=torch.float64)
        for index in self.microbatches:
            logp = self._logp(index)
            own = self.objective.row_shares(index, logp, width=logp.shape[1])
            shares[index.cpu()] = own.detach().double().cpu()
            share = own.sum()
            value += float(share.detach())
            if share.requires_grad:
                total += flatten(torch.autograd.grad(share, self.parameters, allow_unused=True), self.parameters)
        return value, total, self.objective.by_prompt(shares)

    def start(self) -> Tensor:
        """A starting vector for Lanczos with large components along sharp directions, which saves products.

        With c = ∂L/∂log π and w_t² = |c_t| π_t/(1 − π_t), Σ_t w_t² ∇log π_t ∇log π_tᵀ is the Gauss-Newton matrix of `nll` if two
        words share the probability. A few tokens with large w_t ‖∇log π_t‖ dominate it. START_TOKENS of them are selected, and the
        start is the first eigenvector of their part, Σ_t a_t w_t ∇log π_t with a the first eigenvector of the Gram matrix. (The
        plain gradient would mislead: an unlikely token has a large gradient and little curvature. For other objectives the second
        derivative in log π is neglected.)

        They are selected by the norm of ∂(Σ_s w_s log π_s)/∂x_t, with x_t the last layer's input where token t is predicted, which
        takes a forward pass and the backward pass of one layer. The start is 0 if the model does not mark its layers or a gradient
        is not finite; Lanczos then starts at random.
        """
        weight, score = self._sharp()
        best = score.flatten().topk(min(START_TOKENS, score.numel())).indices.tolist()
        tokens = [divmod(place, score.shape[1]) for place in best]
        self.start_tokens = sorted((row, t) for row, t in tokens if float(score[row, t]) > 0)
        gradients = []
        for row in sorted({row for row, _ in self.start_tokens}):
            places = [t for own, t in self.start_tokens if own == row]
            batch = self.objective.batch.rows(torch.tensor([row], device=score.device))
            # Later tokens of the row have no effect.
            batch = replace(batch, lengths=torch.full_like(batch.lengths, places[-1] + 1))
            each = torch.zeros(len(places), 1, places[-1] + 1, dtype=weight.dtype, device=weight.device)
            for number, t in enumerate(places):
                each[number, 0, t] = weight[row, t]
            few = self.over(replace(self.objective, batch=batch))
            gradients += few.pull_back(torch.zeros_like(batch.lengths), list(each))
        start = flatten([None] * len(self.parameters), self.parameters)
        if not gradients:
            return start
        # Not as one matrix, which would be a second copy of all gradients.
        gram = torch.stack([torch.stack([one @ other for other in gradients]) for one in gradients]).double()  # (n, n)
        if not bool(gram.isfinite().all()):
            return start
        for share, gradient in zip(torch.linalg.eigh(gram).eigenvectors[:, -1].tolist(), gradients, strict=True):
            start.add_(gradient, alpha=share)
        return start

    def _sharp(self) -> tuple[Tensor, Tensor]:
        """w_t and the norm that selects tokens, see `start`; (N, S) both, 0 outside the scored tokens."""
        scored = self.objective.batch.scored
        weight = torch.zeros(scored.shape, dtype=torch.float64, device=scored.device)
        score = torch.zeros_like(weight)
        # Logits are of the order of ten, so a smaller 1 − π is rounding.
        rounding = 16 * torch.finfo(common_dtype(self.parameters)).eps
        layers = marked_layers(self.backbone)
        for index in self.microbatches if layers else []:
            with _entering(layers[-1]) as entered:
                logp = self._logp(index)
            given = logp.detach().requires_grad_()
            share = self.objective.share(index, given, width=given.shape[1])
            (pull,) = torch.autograd.grad(share, given)
            odds = 1 / torch.expm1(-given.detach()).clamp_min(rounding)  # π/(1 − π)
            own = (pull.abs() * odds).sqrt() * scored[index, : given.shape[1]]
            (arriving,) = torch.autograd.grad(logp, entered[-1], own)  # (n, width, d)
            weight[index, : given.shape[1]] = own
            score[index, 1 : given.shape[1]] = arriving[:, :-1].double().norm(dim=-1)
        return weight, score.nan_to_num(0.0, 0.0, 0.0) * (weight > 0)

    def pull_back(self, rows: Tensor, coefficients: Sequence[Tensor]) -> list[Tensor]:
        """Σ c_it ∇log π_it over the scored tokens of some rows, (P,) for each c (N, S), with one forward pass."""
        cut = _microbatches(self.objective.batch.lengths[rows], self._tokens)
        return self._pulled(
            [rows[part] for part in cut],
            lambda index, logp: [c[index, : logp.shape[1]].to(logp) for c in coefficients],
            len(coefficients),
        )

    def _pulled(
        self, parts: Sequence[Tensor], cotangents: Callable[[Tensor, Tensor], Sequence[Tensor]], count: int
    ) -> list[Tensor]:
        """Vector-Jacobian products of the log-probabilities, summed over `parts`, for each of `count` cotangents (n, width)."""
        dtype, device = common_dtype(self.parameters), self.parameters[0].device
        totals = [torch.zeros(size_of(self.parameters), dtype=dtype, device=device) for _ in range(count)]
        for index in parts:
            logp = self._logp(index)
            if not logp.requires_grad:
                continue
            for number, cotangent in enumerate(cotangents(index, logp)):
                gradients = torch.autograd.grad(
                    logp, self.parameters, cotangent, allow_unused=True, retain_graph=number + 1 < count
                )
                totals[number] += flatten(gradients, self.parameters)
        return totals

    def hessian(self) -> Operator:
        """∇²L(θ).

        Mode `graph` keeps the gradient's graph of all microbatches, which makes products fastest. `stream` keeps nothing between
        products, computes the output layer in blocks of the vocabulary and, if one microbatch exceeds `graph_mb`, recomputes
        each layer in the backward pass. `auto` uses `graph` if it fits `graph_mb`.
        """
        per_token = self._graph_bytes_per_token() if self._mode == "auto" else 0.0
        tokens = int(sum(len(index) * self.objective.batch.lengths[index].max() for index in self.microbatches))
        if self._mode == "graph" or (self._mode == "auto" and per_token * tokens <= self._graph_mb * 2**20):
            return GraphHessian([self._share(index, plain=True) for index in self.microbatches], self.parameters)
        return self._streamed(per_token, gauss_newton=False)

    def gauss_newton(self) -> Operator:
        """Gauss-Newton matrix Jᵀ H_z J with J the Jacobian of the logits and H_z the Hessian in them (positive for `nll`)."""
        return self._streamed(self._graph_bytes_per_token() if self._mode == "auto" else 0.0, gauss_newton=True)

    def _streamed(self, bytes_per_token: float, *, gauss_newton: bool) -> Operator:
        largest = max(len(index) * int(self.objective.batch.lengths[index].max()) for index in self.microbatches)
        # The forward-mode graph of a microbatch is about as large as that of two reverse passes.
        checkpoint = self._mode == "stream" or bytes_per_token * largest > self._graph_mb * 2**20
        return StreamedHessian(self, checkpoint=checkpoint, gauss_newton=gauss_newton)

    def _share(self, index: Tensor, *, plain: bool = False) -> Tensor:
        logp = self._logp(index, plain=plain)
        return self.objective.share(index, logp, width=logp.shape[1])

    def _logp(self, index: Tensor, *, plain: bool = False) -> Tensor:
        """Log-probabilities (n, width) float64 with graph, 0 outside the scored tokens."""
        ids, scored, target = self.inputs(index)
        hidden = self.backbone(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][scored]  # (M, d)
        head = self.head
        if plain or len(target) * len(head.weight) * hidden.element_size() <= self.head_mb * 2**20:
            z = head.logits(hidden) / self.objective.temperature
            picked = z.gather(1, target[:, None])[:, 0] - z.logsumexp(1)
        else:
            form = squash(head, self.objective.temperature)
            picked = SelectedLogp.apply(hidden, head.weight, head.bias, target, form, self.head_mb)
        return scatter(picked.double(), scored)

    def inputs(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids (n, width), the positions (n, width − 1) that predict scored tokens, and these tokens (M,)."""
        batch = self.objective.batch
        width = int(batch.lengths[index].max())
        ids, scored = batch.input_ids[index, :width], batch.scored[index, :width]
        mask = scored[:, 1:]
        return ids, mask, ids[:, 1:][mask]

    def _graph_bytes_per_token(self) -> float:
        """Bytes per token held by the graph of two reverse passes, measured on the longest row."""
        index = self.microbatches[-1][-1:]
        held: dict[int, int] = {p.untyped_storage().data_ptr(): 0 for p in self.model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            """Count the storage of a tensor that autograd keeps, once."""
            storage = tensor.untyped_storage()
            held.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            share = self._share(index, plain=True)
            if not share.requires_grad:
                return 0.0
            gradients = torch.autograd.grad(share, self.parameters, create_graph=True, allow_unused=True)
        del gradients
        return sum(held.values()) / float(self.objective.batch.lengths[index].max())


@contextmanager
def _entering(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Context that cuts the graph at a layer's input, and a list that receives the input, a leaf."""
    entered: list[Tensor] = []

    def cut(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The layer's arguments with a leaf for the hidden states, the first of them."""
        hidden = (args[0] if args else named["hidden_states"]).detach().requires_grad_()
        entered.append(hidden)
        return ((hidden, *args[1:]), named) if args else (args, named | {"hidden_states": hidden})

    handle = layer.register_forward_pre_hook(cut, with_kwargs=True)
    try:
        yield entered
    finally:
        handle.remove()


@contextmanager
def lm_surface(
    model: nn.Module,
    objective: Objective,
    *,
    parameters: Sequence[Tensor] | None = None,
    microbatch_tokens: int = 4096,
    graph_mb: float = 1024.0,
    head_mb: float = 64.0,
    mode: ProductMode = "auto",
    check: Check = "first",
) -> Iterator[LmSurface]:
    """Context manager for the loss surface of a model, in eval mode, at least float32, with MATH attention.

    The model is restored afterwards, see `guarded`. Unless the objective is stale, its anchors are replaced by the model's
    log-probabilities, so that all ratios are 1.

    Args:
        model: Hugging Face causal language model, with or without adapters.
        objective: the loss and its rows.
        parameters: tensors of θ; None for all that require grad.
        microbatch_tokens: tokens of one forward pass, padding included.
        graph_mb: memory for graphs kept between products [MiB].
        head_mb: memory for blocks of the logits [MiB].
        mode: see `LmSurface.hessian`.
        check: when to compare logits with those of the model's own attention and precision, and Hessian products as in
            `check_products`: the `first` time for a model, `always` or `off`.

    Raises:
        UserError: the output layer is not a linear map.
        CheckError: the logits differ from the model's own.
    """
    tensors = [*model.parameters(), *model.buffers()]
    known = remembered(model) if check == "first" else {}
    ids = objective.batch.input_ids[:1, : min(CHECKED_TOKENS, int(objective.batch.lengths[0]))]
    own = None
    if check != "off" and "surface" not in known:
        with guarded(model, weights=False), torch.no_grad():
            own = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            coarsest = max((torch.float32, *(t.dtype for t in tensors if t.is_floating_point())), key=_epsilon)
    with (
        guarded(model, weights=False, attention="math", training=False),
        working_precision(tensors),
        torch.enable_grad(),
    ):
        check_head(model, output_head(model))
        surface = LmSurface(
            model,
            objective,
            parameters=parameters,
            microbatch_tokens=microbatch_tokens,
            graph_mb=graph_mb,
            head_mb=head_mb,
            mode=mode,
        )
        surface.checked = known.setdefault("hessian", {})
        if own is not None and bool(own.isfinite().all()):  # nothing to compare for diverged weights
            known["surface"] = _check_logits(surface, ids, own, 2 * _epsilon(coarsest) ** 0.5)
        if objective.name != "nll" and not objective.stale:
            surface.objective = objective.anchored(surface.logp())
        yield surface


def _epsilon(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _check_logits(surface: LmSurface, ids: Tensor, own: Tensor, tolerance: float) -> float:
    """Relative error of the logits of `ids` (1, L) against the model's `own`."""
    with torch.no_grad():
        logits = surface.head.logits(surface.backbone(input_ids=ids, use_cache=False).last_hidden_state)
    error = float((logits.double() - own.double()).norm() / own.double().norm().clamp_min(1e-30))
    if not error <= tolerance:  # also where it is not finite
        raise CheckError(
            f"{type(bare(surface.model)).__name__}, loss surface: logits under MATH attention differ from the model's own: "
            f"relative error {error:.2g}, where the precision of the model allows {tolerance:.2g}; use sharpscope.curvature "
            "on a loss of your own, or take the numbers unchecked with check='off'",
            "surface",
            error,
            tolerance,
        )
    return error


def _microbatches(lengths: Tensor, tokens: int) -> list[Tensor]:
    """Microbatches of rows of similar length with rows × longest ≤ tokens (at least one row), shortest rows first."""
    if tokens < 1:
        raise UserError(f"microbatch_tokens, {tokens}: at least 1")
    batches: list[Tensor] = []
    for bucket in reversed(length_buckets(lengths.cpu().numpy(), lengths.device)):
        batches += reversed(bucket.split(max(1, tokens // int(lengths[bucket].max()))))
    return batches
