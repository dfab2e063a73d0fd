"""The loss surface of a causal language model: losses over fixed rows of tokens, computed in microbatches within a memory limit.

Each loss is a sum over rows whose coefficients are fixed for the whole batch, so that values, gradients and Hessians do not
depend on the microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from sharpscope.config.run import Check, ObjectiveName, OperatorName
from sharpscope.errors import CheckError, UserError, nearest
from sharpscope.policy import (
    Rollouts,
    backbone,
    bare,
    check_head,
    completions_of,
    length_buckets,
    output_head,
)
from sharpscope.policy.guard import Facts, group_names, guarded, remembered, tolerance
from sharpscope.policy.token_stats import flat_logp
from sharpscope.surface.operators import (
    Operator,
    common_dtype,
    empirical_fisher_product,
    fisher_product,
    flatten,
    gauss_newton_product,
    graph_product,
)
from sharpscope.surface.surface import (
    Surface,
    check_derivatives,
    checked_parameters,
    working_precision,
)
from sharpscope.tokens.rows import left_aligned

CHECKED_TOKENS = 32  # tokens of the first row whose logits are compared with the model's own
FEW_TOKENS = 24  # tokens of each of the two rows on which Hessian products are checked


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens with padding on the right, which a causal model does not see."""

    input_ids: Tensor  # (N, S) long
    lengths: Tensor  # (N,) tokens without padding
    scored: Tensor  # (N, S) bool, tokens whose log-probability enters the loss; never the first token of a row
    anchor_logp: Tensor  # (N, S) [nats], log-probability of the scored tokens under the policy that drew them
    reward: Tensor  # (N,); a success in [0, 1] for `expected_failure`

    def __len__(self) -> int:
        return len(self.input_ids)

    def rows(self, index: Tensor) -> TokenBatch:
        """The rows `index`, truncated to the longest of them."""
        width = int(self.lengths[index].max())
        ids, scored, anchors = (
            grid[index, :width] for grid in (self.input_ids, self.scored, self.anchor_logp)
        )
        return TokenBatch(ids, self.lengths[index], scored, anchors, self.reward[index])

    @cached_property
    def prompts(self) -> list[int]:
        """Prompt index of each row, from 0; rows with equal tokens before the first scored token share a prompt."""
        known: dict[tuple[int, ...], int] = {}
        width = self.scored.shape[1]
        ends = torch.where(self.scored.any(1), self.scored.long().argmax(1), width).tolist()
        texts = [tuple(ids[:end]) for ids, end in zip(self.input_ids.tolist(), ends, strict=True)]
        return [known.setdefault(text, len(known)) for text in texts]

    def to(self, device: torch.device | str) -> TokenBatch:
        """The batch on another device."""
        return TokenBatch(
            **{part.name: getattr(self, part.name).to(device) for part in fields(self)}
        )


def token_batch(
    input_ids: Tensor,
    attention_mask: Tensor,
    scored: Tensor,
    *,
    anchor_logp: Tensor | None = None,
    reward: Tensor | None = None,
) -> TokenBatch:
    """A `TokenBatch` from rows (N, S) with padding anywhere: `attention_mask` 0 there, `scored` 1 on the tokens of the loss.

    Raises:
        UserError: no token is scored, or a scored token has no prefix.
    """
    order, lengths, keep = left_aligned(attention_mask.bool())
    marked = scored.bool().gather(1, order) & keep
    if not bool(marked.any()):
        raise UserError("probe data: no token is scored; completions must not be empty")
    if bool(marked[:, 0].any()):
        raise UserError(
            "probe data: a scored token has no prefix; every row needs a prompt of at least one token"
        )
    anchors = (
        torch.zeros(marked.shape, device=marked.device)
        if anchor_logp is None
        else anchor_logp.gather(1, order)
    )
    worth = torch.ones(len(marked), device=marked.device) if reward is None else reward
    ids = input_ids.gather(1, order).long()
    # A token of the row itself in place of padding: libraries warn about padding tokens.
    return TokenBatch(
        torch.where(keep, ids, ids[:, :1]),
        lengths,
        marked,
        anchors.masked_fill(~marked, 0.0),
        worth,
    )


def completion_batch(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, reward: Tensor | None = None
) -> TokenBatch:
    """A `TokenBatch` from token ids of prompts and completions, neither of them empty, with the completion tokens scored."""
    rows = completions_of([prompt for prompt, _ in pairs], [completion for _, completion in pairs])
    scored = torch.nn.functional.pad(rows.completion_mask, (rows.prompt_width, 0))
    return token_batch(rows.input_ids, rows.attention_mask, scored, reward=reward)


def rollout_batch(rollouts: Rollouts, *, reward: Tensor | None = None) -> TokenBatch:
    """A `TokenBatch` with the loss tokens scored and `behavior_logp` as anchors; `reward` (N,) replaces the rollouts' own."""
    left = (rollouts.input_ids.shape[1] - rollouts.completion_mask.shape[1], 0)
    return token_batch(
        rollouts.input_ids,
        rollouts.attention_mask,
        torch.nn.functional.pad(rollouts.completion_mask, left),
        anchor_logp=torch.nn.functional.pad(rollouts.behavior_logp, left),
        reward=rollouts.reward if reward is None else reward,
    )


@dataclass(frozen=True)
class Objective:
    """A scalar loss over one batch.

    With ℓ_it = log π_θ(token t of row i | prefix) and r_it = exp(ℓ_it − anchor_it):

    - `nll`: −Σ_it ℓ_it / number of scored tokens.
    - `expected_failure`: mean_i [1 − R_i exp(Σ_t log r_it)]. If the rows were drawn from the policy at the anchors, its value,
      gradient and Hessian are unbiased estimates of those of 1 − E_y R(y). (The Hessian of −mean R·Σ log π is biased.)

    Probes replace the anchors by the probed policy's log-probabilities, so that r = 1, unless the objective is stale.
    """

    name: ObjectiveName
    batch: TokenBatch
    temperature: float = 1.0  # softmax temperature of the log-probabilities
    # whether the rows were drawn by another policy and keep their recorded anchors
    stale: bool = False

    def __post_init__(self) -> None:
        worth = self.batch.reward
        if self.name == "expected_failure" and not bool(((worth >= 0) & (worth <= 1)).all()):
            raise UserError(
                f"reward, {float(worth.min()):g} to {float(worth.max()):g}: expected_failure needs a success in [0, 1]"
            )

    @cached_property
    def prompt_weight(self) -> Tensor:
        """(k,) share of each prompt in the mean over the batch, of scored tokens for `nll`, of rows for the others; sums to 1."""
        batch = self.batch
        each = (
            batch.scored.sum(1).double() if self.name == "nll" else torch.ones(len(batch)).double()
        )
        prompt = torch.tensor(batch.prompts)
        total = torch.zeros(int(prompt.max()) + 1, dtype=torch.float64).index_add_(
            0,
            prompt,
            each.cpu(),
        )
        return total / total.sum()

    def by_prompt(self, shares: Tensor) -> Tensor:
        """One value for each prompt, whose mean is L and whose standard error of the mean is that of L over prompts, (k,).

        The values are L + k·(s_i − w_i·L), s_i the prompt's part of L and w_i its `prompt_weight`: those of the linearized
        ratio estimator Σ s_i/Σ w_i. `shares` (N,) are the rows' parts of L (see `row_shares`) or of a derivative of L.
        """
        weight = self.prompt_weight
        prompt = torch.tensor(self.batch.prompts)
        parts = torch.zeros_like(weight).index_add_(0, prompt, shares.detach().double().cpu())
        return parts.sum() + len(weight) * (parts - weight * parts.sum())

    def row_shares(self, index: Tensor, logp: Tensor) -> Tensor:
        """The part of L that each of the rows `index` (n,) contributes, (n,), from their log-probabilities (n, width)."""
        batch, width = self.batch, logp.shape[1]
        scored = batch.scored[index, :width]
        logp = torch.where(scored, logp, 0.0)
        if self.name == "nll":
            return -logp.sum(1) / float(batch.scored.sum())
        # both 0 off the scored tokens
        log_ratio = logp - batch.anchor_logp[index, :width].to(logp.dtype)
        success = batch.reward[index].to(logp.dtype) * log_ratio.sum(1).exp()  # (n,)
        return (1 - success) / len(batch)

    def rows(self, index: Tensor) -> Objective:
        """The objective over some of the rows, normalized over these."""
        return replace(self, batch=self.batch.rows(index))


class LmSurface(Surface):
    """L(θ) of an objective of a causal language model; create it with `lm_surface`."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        microbatch_tokens: int,
        memory_mb: float,
        known: Facts,
        selection: str = "all",
    ) -> None:
        self.model, self.objective, self.known = model, objective, known
        self.selection = selection  # see `select_parameters`
        self.parameters = checked_parameters(select_parameters(model, selection))
        self._backbone, self._head = backbone(model), output_head(model)
        self._tokens, self._memory_mb = microbatch_tokens, memory_mb
        self._microbatches = self._cut()

    def over(self, objective: Objective, selection: str | None = None) -> LmSurface:
        """The surface of another objective of the same model, by default of the same parameters."""
        chosen = selection or self.selection
        return LmSurface(self.model, objective, self._tokens, self._memory_mb, self.known, chosen)

    def prompts(self, rows: Tensor) -> LmSurface:
        """The surface over the rows that are marked, (N,) bool, its loss the mean over these."""
        index = rows.nonzero()[:, 0].to(self.objective.batch.lengths.device)
        return self.over(self.objective.rows(index))

    def logp(self) -> Tensor:
        """Log-probabilities of the scored tokens, (N, S) float64 [nats], 0 elsewhere; without graph."""
        batch = self.objective.batch
        values = torch.zeros(batch.scored.shape, dtype=torch.float64, device=batch.scored.device)
        with torch.no_grad():
            for index in self._microbatches:
                logp = self.logp_of(index)
                values[index, : logp.shape[1]] = logp
        return values

    def value(self) -> float:
        """L(θ), summed in float64."""
        with torch.no_grad():
            return sum(float(self._shares(index).sum()) for index in self._microbatches)

    def by_prompt(self) -> Tensor:
        """One value for each prompt, (k,) float64, with mean L(θ); see `Objective.by_prompt`."""
        with torch.no_grad():
            return self._each_prompt(self._shares(index) for index in self._microbatches)

    def _each_prompt(self, shares: Iterable[Tensor]) -> Tensor:
        """`Objective.by_prompt` of the rows' parts, microbatch by microbatch."""
        rows = torch.zeros(len(self.objective.batch), dtype=torch.float64)
        for index, share in zip(self._microbatches, shares, strict=True):
            rows[index.cpu()] = share.detach().double().cpu()
        return self.objective.by_prompt(rows)

    def loss(self) -> Tensor:
        """L(θ) with one graph over all rows, for PyHessian; memory is not bounded."""
        return torch.stack(
            [self._shares(index, twice=True).sum() for index in self._microbatches]
        ).sum()

    def gradient(self) -> tuple[float, Tensor]:
        """L(θ) and ∇L(θ) (P,)."""
        return self.gradient_by_prompt()[:2]

    def gradient_by_prompt(self) -> tuple[float, Tensor, Tensor]:
        """L(θ), ∇L(θ) (P,) and `by_prompt` (k,), from one pass."""
        total, value, shares = self._zeros(), 0.0, []
        for index in self._microbatches:
            rows = self._shares(index)
            shares.append(rows.detach())
            value += float(rows.detach().sum())
            if rows.requires_grad:
                total += flatten(
                    torch.autograd.grad(rows.sum(), self.parameters, allow_unused=True),
                    self.parameters,
                )
        return value, total, self._each_prompt(shares)

    def operator(self, name: OperatorName = "hessian") -> Operator:
        """A curvature operator of L: a product goes twice through graphs that are kept while they fit into the memory limit.

        `gauss_newton` is over the logits; `fisher` and `empirical_fisher` weigh tokens and terms as the loss does: a scored token
        1/M for `nll` of M tokens, a completion 1/N for `expected_failure` of N, the terms being tokens and completions.
        """
        if name == "finite_difference":
            return self.finite_difference()
        budget, per_token = self._memory_mb * 2**20, self._graph_bytes_per_token(name)
        tokens = (
            self._tokens if per_token == 0 else max(1, min(self._tokens, int(budget / per_token)))
        )
        gradient = sum(p.nbytes for p in self.parameters)  # each graph holds one
        parts, used = list[Callable[[Tensor], Tensor]](), 0.0
        for index in self._cut(tokens=tokens):
            used += gradient + per_token * len(index) * int(
                self.objective.batch.lengths[index].max()
            )
            anew = partial(lambda index, vector: self._product(index, name)(vector), index)
            parts.append(self._product(index, name) if used <= budget else anew)

        def product(vector: Tensor) -> Tensor:
            """The sum of the products of all parts."""
            total = self._zeros()
            for part in parts:
                total += part(vector)
            return total

        return Operator(self.parameters, product)

    def _product(self, index: Tensor, name: OperatorName = "hessian") -> Callable[[Tensor], Tensor]:
        """Products with the part of an operator that belongs to some rows."""
        objective, by_token = self.objective, self.objective.name == "nll"
        if name in ("hessian", "finite_difference"):
            return graph_product(self._shares(index, twice=True).sum(), self.parameters)
        weight = 1 / float(objective.batch.scored.sum()) if by_token else 1 / len(objective.batch)
        if name == "empirical_fisher":
            logp = self.logp_of(index, twice=True)
            scored = objective.batch.scored[index, : logp.shape[1]]
            terms = logp[scored] if by_token else objective.row_shares(index, logp) / weight
            return empirical_fisher_product(terms, weight, self.parameters)
        states, targets, scored = self._states(index)
        logits = self._head.logits(states)  # (M, V)
        if name == "fisher":
            return fisher_product(logits, weight, objective.temperature, self.parameters)

        def loss_of(z: Tensor) -> Tensor:
            """The loss of these rows as a function of their logits (M, V)."""
            logp = torch.log_softmax(z / objective.temperature, -1).gather(1, targets[:, None])
            return objective.row_shares(index, _grid(scored, logp[:, 0])).sum()

        return gauss_newton_product(logits, loss_of, self.parameters)

    def curvature_by_prompt(self, vector: Tensor, operator: OperatorName = "hessian") -> Tensor:
        """vᵀA_i v of each prompt's operator A_i, (k,) float64 with mean vᵀAv, by products of single prompts."""
        shares = torch.zeros(len(self.objective.batch), dtype=torch.float64)
        prompts = torch.tensor(
            self.objective.batch.prompts, device=self.objective.batch.lengths.device
        )
        for prompt in range(int(prompts.max()) + 1):
            rows = (prompts == prompt).nonzero()[:, 0]
            for index in self._cut(rows):
                product = self._product(index, operator)
                shares[int(rows[0])] += float(vector.double() @ product(vector).double())
        return self.objective.by_prompt(shares)

    def ceiling(self, loss: float) -> float:
        """See `Surface.ceiling`; 1 − loss for `expected_failure`, at its anchors the share of correct completions."""
        return 1 - loss if self.objective.name == "expected_failure" else math.nan

    def check(self, operator: Operator) -> float:
        """`check_derivatives` of `nll` on the first tokens of two rows, once for a model."""
        error = self.known.get("hessian")
        if not isinstance(error, float):
            batch = self.objective.batch
            rows = batch.lengths.argsort()[[0, -1]]
            rows = rows[batch.lengths[rows] > 1].unique()
            lengths = batch.lengths[rows].clamp(max=FEW_TOKENS)
            present = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
            scored = present.clone()
            scored[:, 0] = False
            few = token_batch(batch.input_ids[rows, : present.shape[1]], present, scored)
            surface = self.over(Objective("nll", few, self.objective.temperature))
            name = f"model, {type(bare(self.model)).__name__}"
            self.known["hessian"] = error = check_derivatives(surface, surface.hessian(), name)
        return error

    def _zeros(self) -> Tensor:
        like = self.parameters
        return torch.zeros(
            sum(p.numel() for p in like),
            dtype=common_dtype(like),
            device=like[0].device,
        )

    def _shares(self, index: Tensor, *, twice: bool = False) -> Tensor:
        """The rows' parts of L, (n,)."""
        return self.objective.row_shares(index, self.logp_of(index, twice=twice))

    def log_softmax(self, index: Tensor) -> Tensor:
        """The log-probabilities of the whole vocabulary before each scored token of some rows, (M, V) [nats]."""
        states, _, _ = self._states(index)
        return torch.log_softmax(self._head.logits(states) / self.objective.temperature, -1)

    def logp_of(self, index: Tensor, *, twice: bool = False) -> Tensor:
        """Log-probabilities of some rows with graph, (n, width) float64 [nats], 0 outside the scored tokens; `twice` differentiable or once."""
        states, targets, scored = self._states(index)
        given = (states, self._head, targets, self.objective.temperature)
        picked, _ = flat_logp(*given, stats=False, keep_logits=True if twice else None)  # (M,)
        return _grid(scored, picked)

    def _states(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Last hidden states before the M scored tokens, (M, d), these tokens (M,), and which of (n, width − 1) they are."""
        batch = self.objective.batch
        width = int(batch.lengths[index].max())
        # position j predicts token j + 1
        ids, scored = batch.input_ids[index, :width], batch.scored[index, 1:width]
        hidden: Tensor = self._backbone(input_ids=ids, use_cache=False).last_hidden_state
        return hidden[:, :-1][scored], ids[:, 1:][scored], scored

    def _cut(self, rows: Tensor | None = None, tokens: int | None = None) -> list[Tensor]:
        """Microbatches of rows of similar length with rows × longest ≤ tokens (at least one row), shortest rows first."""
        lengths, tokens = self.objective.batch.lengths, tokens or self._tokens
        rows = torch.arange(len(lengths), device=lengths.device) if rows is None else rows
        batches: list[Tensor] = []
        for bucket in reversed(length_buckets(lengths[rows].cpu().numpy(), lengths.device)):
            size = max(1, tokens // int(lengths[rows[bucket]].max()))
            batches += [rows[part] for part in reversed(bucket.split(size))]
        return batches

    def _graph_bytes_per_token(self, name: OperatorName = "hessian") -> float:
        """Bytes per token held by the graphs of an operator's products, measured on the longest row."""
        index = self._microbatches[-1][-1:]
        if not self._shares(index).requires_grad:
            return 0.0
        held: dict[int, int] = {p.untyped_storage().data_ptr(): 0 for p in self.model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            """Count the storage that the graph keeps for this tensor."""
            storage = tensor.untyped_storage()
            held.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            product = self._product(index, name)
        del product
        return sum(held.values()) / float(self.objective.batch.lengths[index].max())


def _grid(scored: Tensor, values: Tensor) -> Tensor:
    """Values (M,) at the places `scored` (n, width − 1), as (n, width) float64 with 0 elsewhere and for each row's first token."""
    grid = torch.zeros(scored.shape, dtype=torch.float64, device=values.device)
    return torch.nn.functional.pad(grid.masked_scatter(scored, values.double()), (1, 0))


def select_parameters(model: nn.Module, selection: str) -> list[nn.Parameter]:
    """The trainable parameters of a model that are named: `all`, a kind, a layer, or a kind in a layer, joined by `+`.

    Kinds are those of `grad_norm_by_layer`: embedding, attention, mlp, norm, head, other. `12` is a layer, `12.attention` the
    attention in it, `attention+mlp` both kinds.

    Raises:
        UserError: a name that no trainable parameter has.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if selection == "all":
        return list(trained.values())
    groups = {}
    for name, (kind, *layers) in group_names(model, trained).items():
        layer = [part.removeprefix("layers.") for part in layers]
        groups[name] = {kind, *layer, *(f"{one}.{kind}" for one in layer)}
    known = sorted(set().union(*groups.values()))
    for word in selection.split("+"):
        if word not in known:
            raise UserError(f"parameters, '{word}'{nearest(word, ['all', *known])}")
    words = set(selection.split("+"))
    return [trained[name] for name, named in groups.items() if named & words]


@contextmanager
def lm_surface(
    model: nn.Module,
    objective: Objective,
    *,
    microbatch_tokens: int = 4096,
    memory_mb: float = 1024.0,
    check: Check = "first",
    parameters: str = "all",
    fused: bool = False,
) -> Iterator[LmSurface]:
    """Context manager for the loss surface of a model, in eval mode, at least float32, with MATH attention; see `guarded`.

    Unless the objective is stale, its anchors are replaced by the model's log-probabilities, so that all ratios are 1.

    Args:
        model: Hugging Face causal language model, with or without adapters.
        objective: the loss.
        microbatch_tokens: tokens of one forward pass, padding included.
        memory_mb: memory for graphs of Hessian products [MiB].
        check: when to compare logits with the model's own, and Hessian products as in `check_derivatives`.
        parameters: the parameters that vary; see `select_parameters`.
        fused: keep the model's own attention, for `finite_difference` and perturbations, which need first derivatives only.

    Raises:
        UserError: the output layer is not a linear map, or parameters that the model does not have.
        CheckError: the logits differ from the model's own.
    """
    tensors = [*model.parameters(), *model.buffers()]
    known = remembered(model) if check == "first" else {}
    ids = objective.batch.input_ids[:1, : min(CHECKED_TOKENS, int(objective.batch.lengths[0]))]
    expected, limit = None, tolerance(tensors)
    if check != "off" and "surface" not in known:
        with guarded(model), torch.no_grad():
            expected = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                use_cache=False,
            ).logits
    attention = None if fused else "math"
    with guarded(model, attention=attention), working_precision(tensors), torch.enable_grad():
        check_head(model, output_head(model))
        surface = LmSurface(model, objective, microbatch_tokens, memory_mb, known, parameters)
        # nothing to compare for diverged weights
        if expected is not None and bool(expected.isfinite().all()):
            with torch.no_grad():
                hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
                logits = output_head(model).logits(hidden)
            error = float(
                (logits.double() - expected.double()).norm()
                / expected.double().norm().clamp_min(1e-30)
            )
            if not error <= limit:  # also where it is not finite
                text = (
                    f"{type(bare(model)).__name__}, loss surface: logits under MATH attention differ from the model's own: "
                    f"relative error {error:.2g}, where the precision of the model allows {limit:.2g}; use "
                    "sharpscope.curvature on a closure, or take the numbers unchecked with check='off'"
                )
                raise CheckError(text, "surface", error, limit)
            known["surface"] = error
        if objective.name != "nll" and not objective.stale:
            surface.objective = replace(
                objective, batch=replace(objective.batch, anchor_logp=surface.logp())
            )
        yield surface
