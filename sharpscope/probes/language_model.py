"""The loss surface of a causal language model, computed in microbatches within a memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sharpscope.config.probes import Check
from sharpscope.errors import CheckError, UserError
from sharpscope.policy import backbone, bare, check_head, length_buckets, output_head
from sharpscope.policy.token_stats import flat_logp
from sharpscope.probes.check import check_products
from sharpscope.probes.fingerprint import remembered
from sharpscope.probes.guard import guarded
from sharpscope.probes.lanczos import Operator, graph_product
from sharpscope.probes.objectives import Objective, token_batch
from sharpscope.probes.surface import Surface, checked_parameters, common_dtype, flatten, size_of, working_precision

CHECKED_TOKENS = 32  # tokens of the first row whose logits are compared with the model's own
FEW_TOKENS = 24  # tokens of each of the two rows on which Hessian products are checked


class LmSurface(Surface):
    """L(θ) of an objective of a causal language model; create it with `lm_surface`.

    Rows of similar length share a microbatch to reduce padding. Results do not depend on the microbatches beyond rounding.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, microbatch_tokens: int, memory_mb: float, known: dict[str, Any]
    ) -> None:
        self.model, self.objective, self.known = model, objective, known
        self.parameters = checked_parameters(list(model.parameters()))
        self._backbone, self._head = backbone(model), output_head(model)
        self._tokens, self._memory_mb = microbatch_tokens, memory_mb
        self._microbatches = self._cut()

    def over(self, objective: Objective) -> LmSurface:
        """The surface of another objective of the same model and parameters."""
        return LmSurface(self.model, objective, self._tokens, self._memory_mb, self.known)

    def logp(self) -> Tensor:
        """Log-probabilities of the scored tokens, (N, S) float64 [nats], 0 elsewhere; without graph."""
        batch = self.objective.batch
        values = torch.zeros(batch.scored.shape, dtype=torch.float64, device=batch.scored.device)
        with torch.no_grad():
            for index in self._microbatches:
                logp = self._logp(index)
                values[index, : logp.shape[1]] = logp
        return values

    def value(self) -> float:
        """L(θ), summed in float64."""
        with torch.no_grad():
            return sum(float(self._share(index)) for index in self._microbatches)

    def by_prompt(self) -> Tensor:
        """One value for each prompt, (k,) float64, with mean L(θ); see `Objective.by_prompt`."""
        shares = torch.zeros(len(self.objective.batch), dtype=torch.float64)
        with torch.no_grad():
            for index in self._microbatches:
                shares[index.cpu()] = self._shares(index).double().cpu()
        return self.objective.by_prompt(shares)

    def loss(self) -> Tensor:
        """L(θ) with one graph over all rows, for PyHessian; memory is not bounded."""
        return torch.stack([self._share(index, twice=True) for index in self._microbatches]).sum()

    def gradient(self) -> tuple[float, Tensor]:
        """L(θ) and ∇L(θ) (P,)."""
        value, total, _ = self.gradient_by_prompt()
        return value, total

    def gradient_by_prompt(self) -> tuple[float, Tensor, Tensor]:
        """L(θ), ∇L(θ) (P,) and `by_prompt` (k,), from one pass."""
        total, value = self._zeros(), 0.0
        shares = torch.zeros(len(self.objective.batch), dtype=torch.float64)
        for index in self._microbatches:
            rows = self._shares(index)
            shares[index.cpu()] = rows.detach().double().cpu()
            share = rows.sum()
            value += float(share.detach())
            if share.requires_grad:
                total += flatten(torch.autograd.grad(share, self.parameters, allow_unused=True), self.parameters)
        return value, total, self.objective.by_prompt(shares)

    def hessian(self) -> Operator:
        """∇²L(θ): a second reverse pass through the graph of the gradient.

        Graphs of microbatches are kept while they fit into the memory limit; the others are built again in every product, which
        takes about twice as long. A row whose graph alone exceeds the limit is a microbatch of its own.
        """
        budget, per_token = self._memory_mb * 2**20, self._graph_bytes_per_token()
        tokens = self._tokens if per_token == 0 else max(1, min(self._tokens, int(budget / per_token)))
        gradient = size_of(self.parameters) * self.parameters[0].element_size()  # each graph holds its gradient
        kept, rebuilt, used = [], [], 0.0
        for index in self._cut(tokens=tokens):
            used += gradient + per_token * len(index) * int(self.objective.batch.lengths[index].max())
            if used <= budget:
                kept.append(graph_product(self._share(index, twice=True), self.parameters))
            else:
                rebuilt.append(index)

        def product(vector: Tensor) -> Tensor:
            total = self._zeros()
            for graph in kept:
                total += graph(vector)
            for index in rebuilt:
                total += graph_product(self._share(index, twice=True), self.parameters)(vector)
            return total

        return Operator.on(self.parameters, product)

    def curvature_by_prompt(self, vector: Tensor) -> Tensor:
        """vᵀH_i v of each prompt's Hessian H_i, (k,) float64 with mean vᵀHv, by Hessian products of single prompts."""
        shares = torch.zeros(len(self.objective.batch), dtype=torch.float64)
        prompts = torch.tensor(self.objective.batch.prompts, device=self.objective.batch.lengths.device)
        for prompt in range(int(prompts.max()) + 1):
            rows = (prompts == prompt).nonzero()[:, 0]
            for index in self._cut(rows):
                image = graph_product(self._share(index, twice=True), self.parameters)(vector)
                shares[int(rows[0])] += float(vector.double() @ image.double())
        return self.objective.by_prompt(shares)

    def ceiling(self, loss: float) -> float:
        """See `Objective.ceiling`."""
        return self.objective.ceiling(loss)

    def check(self, operator: Operator) -> float:
        """`check_products` of `nll` on the first tokens of two rows, once for a model."""
        if "hessian" not in self.known:
            batch = self.objective.batch
            rows = torch.stack([batch.lengths.argmin(), batch.lengths.argmax()]).unique()
            rows = rows[batch.lengths[rows] > 1]
            lengths = batch.lengths[rows].clamp(max=FEW_TOKENS)
            present = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
            scored = present.clone()
            scored[:, 0] = False
            few = token_batch(batch.input_ids[rows, : present.shape[1]], present, scored)
            surface = self.over(Objective("nll", few, self.objective.temperature))
            self.known["hessian"] = check_products(surface, name=f"model, {type(bare(self.model)).__name__}")
        return float(self.known["hessian"])

    def _zeros(self) -> Tensor:
        like = self.parameters
        return torch.zeros(size_of(like), dtype=common_dtype(like), device=like[0].device)

    def _share(self, index: Tensor, *, twice: bool = False) -> Tensor:
        return self._shares(index, twice=twice).sum()

    def _shares(self, index: Tensor, *, twice: bool = False) -> Tensor:
        """The rows' parts of L, (n,)."""
        return self.objective.row_shares(index, self._logp(index, twice=twice))

    def _logp(self, index: Tensor, *, twice: bool = False) -> Tensor:
        """Log-probabilities (n, width) float64 with graph, 0 outside the scored tokens; `twice` differentiable or once."""
        batch = self.objective.batch
        width = int(batch.lengths[index].max())
        ids, scored = batch.input_ids[index, :width], batch.scored[index, 1:width]  # position j predicts token j + 1
        states: Tensor = self._backbone(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][scored]  # (M, d)
        given = (states, self._head, ids[:, 1:][scored], self.objective.temperature)
        picked, _ = flat_logp(*given, stats=False, keep_logits=True if twice else None)  # (M,)
        grid = torch.zeros(scored.shape, dtype=torch.float64, device=picked.device)
        return torch.nn.functional.pad(grid.masked_scatter(scored, picked.double()), (1, 0))

    def _cut(self, rows: Tensor | None = None, tokens: int | None = None) -> list[Tensor]:
        """Microbatches of rows of similar length with rows × longest ≤ tokens (at least one row), shortest rows first."""
        lengths, tokens = self.objective.batch.lengths, tokens or self._tokens
        if tokens < 1:
            raise UserError(f"microbatch_tokens, {tokens}: at least 1")
        rows = torch.arange(len(lengths), device=lengths.device) if rows is None else rows
        batches: list[Tensor] = []
        for bucket in reversed(length_buckets(lengths[rows].cpu().numpy(), lengths.device)):
            size = max(1, tokens // int(lengths[rows[bucket]].max()))
            batches += [rows[part] for part in reversed(bucket.split(size))]
        return batches

    def _graph_bytes_per_token(self) -> float:
        """Bytes per token held by the graph of two reverse passes, measured on the longest row."""
        index = self._microbatches[-1][-1:]
        held: dict[int, int] = {p.untyped_storage().data_ptr(): 0 for p in self.model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            held.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            share = self._share(index, twice=True)
            if not share.requires_grad:
                return 0.0
            gradients = torch.autograd.grad(share, self.parameters, create_graph=True, allow_unused=True)
        del gradients
        return sum(held.values()) / float(self.objective.batch.lengths[index].max())


@contextmanager
def lm_surface(
    model: nn.Module,
    objective: Objective,
    *,
    microbatch_tokens: int = 4096,
    memory_mb: float = 1024.0,
    check: Check = "first",
) -> Iterator[LmSurface]:
    """Context manager for the loss surface of a model, in eval mode, at least float32, with MATH attention.

    The model is restored afterwards, see `guarded`. Unless the objective is stale, its anchors are replaced by the model's
    log-probabilities, so that all ratios are 1.

    Args:
        model: Hugging Face causal language model, with or without adapters.
        objective: the loss.
        microbatch_tokens: tokens of one forward pass, padding included.
        memory_mb: memory for graphs of Hessian products [MiB].
        check: when to compare logits with those of the model's own attention and precision, and Hessian products as in
            `check_products`: the `first` time for a model, `always` or `off`.

    Raises:
        UserError: the output layer is not a linear map.
        CheckError: the logits differ from the model's own.
    """
    tensors = [*model.parameters(), *model.buffers()]
    known = remembered(model) if check == "first" else {}
    ids = objective.batch.input_ids[:1, : min(CHECKED_TOKENS, int(objective.batch.lengths[0]))]
    expected = None
    if check != "off" and "surface" not in known:
        with guarded(model), torch.no_grad():
            expected = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            coarsest = max((torch.float32, *(t.dtype for t in tensors if t.is_floating_point())), key=_epsilon)
    with guarded(model, attention="math"), working_precision(tensors), torch.enable_grad():
        check_head(model, output_head(model))
        surface = LmSurface(model, objective, microbatch_tokens, memory_mb, known)
        if expected is not None and bool(expected.isfinite().all()):  # nothing to compare for diverged weights
            known["surface"] = _check_logits(model, ids, expected, 2 * _epsilon(coarsest) ** 0.5)
        if objective.name != "nll" and not objective.stale:
            surface.objective = objective.anchored(surface.logp())
        yield surface


def _epsilon(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _check_logits(model: nn.Module, ids: Tensor, expected: Tensor, tolerance: float) -> float:
    """Relative error of the surface's logits of `ids` (1, L) against the model's own."""
    with torch.no_grad():
        hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        logits = output_head(model).logits(hidden)
    error = float((logits.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    if not error <= tolerance:  # also where it is not finite
        raise CheckError(
            f"{type(bare(model)).__name__}, loss surface: logits under MATH attention differ from the model's own: "
            f"relative error {error:.2g}, where the precision of the model allows {tolerance:.2g}; use sharpscope.curvature "
            "on a closure, or take the numbers unchecked with check='off'",
            "surface",
            error,
            tolerance,
        )
    return error
