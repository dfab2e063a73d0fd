"""Self-check: compare the token probes with autograd on the model at hand.

Two tokens are compared: prefixes of the first row of the call, each followed by the model's second most probable word, whose
log-probability has a gradient far above rounding. The reference is `torch.autograd.grad` through the model's own forward pass
with its own attention. Results are cached with the model's structure (see `fingerprint`), so each probe is checked once per
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sharpscope.config.probes import Check
from sharpscope.errors import CheckError, UserError
from sharpscope.policy import bare
from sharpscope.probes.token_gradients.exact import exact_norms
from sharpscope.probes.token_gradients.forward_mode import logp_derivative
from sharpscope.probes.token_gradients.local import head_norms, local_norms
from sharpscope.probes.token_gradients.result import NormMethod
from sharpscope.probes.token_gradients.rows import Rows, make_rows
from sharpscope.probes.token_gradients.structure import Structure

LENGTH = 32  # tokens of the longer prefix
NORMS = {"head": head_norms, "local": local_norms, "exact": exact_norms}


def check_norms(
    model: nn.Module, structure: Structure, rows: Rows, temperature: float, method: NormMethod, check: Check
) -> float | None:
    """The largest relative error of a method of score norms on two tokens; None if not checked, NaN if not finite.

    The sketch is made of local norms and directional derivatives, which are checked; `head` is a closed form of the logits.

    Raises:
        CheckError: the error exceeds what the model's precision allows.
    """
    if method == "head":
        return None
    if method == "sketch":
        structure.require_local()
        errors = [check_norms(model, structure, rows, temperature, "local", check)]
        errors.append(check_derivative(model, structure, rows, temperature, check))
        return max((error for error in errors if error is not None), default=None)

    def run(sample: _Sample) -> float:
        """Largest relative error of the norms of two tokens."""
        measured = NORMS[method](model, structure, sample.rows, temperature).values[sample.mask].tolist()
        norms = [sample.norm(method, i) for i in (0, 1)]
        return _largest_error(measured, norms, norms, sample.floor)

    return _once(model, structure, rows, temperature, method, check, run)


def check_derivative(
    model: nn.Module, structure: Structure, rows: Rows, temperature: float, check: Check
) -> float | None:
    """The error of directional derivatives along one token's gradient, of two tokens, relative to the norms' product."""

    def run(sample: _Sample) -> float:
        """Largest relative error of the derivatives of two tokens along the first one's gradient."""
        along, other = sample.gradient(0), sample.gradient(1)
        derivatives = logp_derivative(model, structure, sample.rows, along, temperature)[sample.mask].tolist()
        expected = [_inner(along, along), _inner(along, other)]
        sizes = [expected[0], math.sqrt(expected[0] * _inner(other, other))]
        return _largest_error(derivatives, expected, sizes, sample.floor)

    return _once(model, structure, rows, temperature, "derivative", check, run)


def check_shares(model: nn.Module, structure: Structure, shares: Tensor, check: Check) -> None:
    """Raise if shares of ‖∇L‖² do not sum to 1, because the gradient or the derivatives are wrong."""
    total, size = float(shares.sum(dtype=torch.float64)), float(shares.abs().sum(dtype=torch.float64))
    if check != "off" and math.isfinite(total):
        # Shares of both signs may be far larger than their sum, and so is its rounding.
        error = abs(total - 1) / max(1.0, size)
        _judge(model, structure, "shares", error, f"shares of the gradient sum to {total:.4g} instead of 1")


def tolerance(model: nn.Module) -> float:
    """The relative error that rounding may explain, from ε of the coarsest type among the model's weights.

    Two ways to one gradient differ by rounding in another order, a small multiple of √layers·ε, while a wrong derivative is
    seldom right to 10⁻³. 2√ε lies between: 7e-4 in float32, 0.06 in float16 and 0.18 in bfloat16, where plain autograd is no
    better itself (seen on tiny models: at most 3e-6, 8e-3 and 8e-2). Models in float64 count as float32: transformers takes
    softmax, norms and routers in float32 within them.
    """
    types = {torch.float32, *(p.dtype for p in bare(model).parameters() if p.is_floating_point())}
    return float(2 * max(torch.finfo(dtype).eps for dtype in types) ** 0.5)


def _once(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
    probe: str,
    check: Check,
    run: Callable[[_Sample], float],
) -> float | None:
    if check not in ("off", "first", "always"):
        raise UserError(f"check, '{check}': use off, first or always")
    if check == "off":
        return None
    if (check == "first" and probe in structure.checked) or not bool(rows.chosen.any()):
        return structure.checked.get(probe)
    sample = _sample(model, structure, rows, temperature)
    error = math.nan if sample is None else run(sample)
    if not math.isnan(error):
        _judge(model, structure, probe, error, "differs from plain autograd on two tokens")
        structure.checked[probe] = error
    return error


def _judge(model: nn.Module, structure: Structure, probe: str, error: float, what: str) -> None:
    limit = tolerance(model)
    if error > limit:
        instead = "use method='exact'" if probe in ("head", "local") else "use torch.autograd.grad"
        raise CheckError(
            f"{type(bare(model)).__name__}, {probe}: {what}: relative error {error:.2g}, where the precision of the model "
            f"allows {limit:.2g}; {instead}, or take the numbers unchecked with check='off'",
            probe,
            error,
            limit,
        )


@dataclass
class _Sample:
    """Two prefixes with a word each, and plain autograd on them.

    Attributes:
        ids: the prefixes, (1, n) each; words: the word after each.
        rows, mask: the same as rows of a call, with the words chosen.
        floor: norms below it are rounding.
    """

    model: nn.Module
    structure: Structure
    ids: list[Tensor]
    words: list[int]
    rows: Rows
    mask: Tensor
    temperature: float
    floor: float

    def norm(self, method: NormMethod, i: int) -> float:
        """The norm of word i that a method computes."""
        gradient = self._local_gradient(i) if method == "local" else self.gradient(i)
        return math.sqrt(_inner(gradient, gradient))

    def gradient(self, i: int) -> list[Tensor]:
        """∇ log π of word i by autograd, over the trainable parameters."""
        with torch.enable_grad():
            return self._pulled(_logits(self.model, self.ids[i]), i)

    def _local_gradient(self, i: int) -> list[Tensor]:
        """The same with other positions' keys and values constant: one step from the model's key-value cache."""
        ids, cache = self.ids[i], None
        try:
            if ids.shape[1] > 1:
                with torch.no_grad():
                    begun = self.model(
                        input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1]), use_cache=True
                    )
                cache = begun.past_key_values
            with torch.enable_grad():
                given = {"attention_mask": torch.ones_like(ids), "past_key_values": cache, "use_cache": True}
                return self._pulled(self.model(input_ids=ids[:, -1:], **given).logits, i)
        except (TypeError, ValueError, AttributeError, NotImplementedError) as problem:
            raise CheckError(
                f"{type(bare(self.model)).__name__}, local: cannot be compared with a step from the model's key-value cache "
                f"({problem}); use method='exact', or take the numbers unchecked with check='off'",
                "local",
                math.nan,
                math.nan,
            ) from problem

    def _pulled(self, logits: Tensor, i: int) -> list[Tensor]:
        logp = _log_softmax(logits[0, -1], self.temperature)[self.words[i]]
        parameters = list(self.structure.named.values())
        if not logp.requires_grad:
            return [torch.zeros_like(p) for p in parameters]
        gradients = torch.autograd.grad(logp, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]


def _sample(model: nn.Module, structure: Structure, rows: Rows, temperature: float) -> _Sample | None:
    """Two tokens of the first row that has a chosen token; None if the weights have diverged."""
    row = int(rows.chosen.any(1).nonzero()[0])
    whole = rows.ids[row, : int(rows.lengths[row])]
    n = min(LENGTH, len(whole) - 1)
    lengths = [n, (n + 1) // 2]
    ids = [whole[None, :length] for length in lengths]
    with torch.no_grad():
        logits = _logits(model, ids[0])
    if not bool(logits.isfinite().all()):
        return None
    embedding: Any = bare(model).get_input_embeddings()
    vocabulary = len(embedding.weight)
    words = [int(logits[0, length - 1, :vocabulary].topk(2).indices[-1]) for length in lengths]
    table, mask = whole[: n + 1].repeat(2, 1), torch.zeros(2, n + 1, dtype=torch.bool, device=whole.device)
    for i, length in enumerate(lengths):
        table[i, length], mask[i, length] = words[i], True
    present = torch.arange(n + 1, device=whole.device) <= torch.tensor(lengths, device=whole.device)[:, None]
    made = make_rows(model, table, mask, present, temperature)
    floor = 10 * torch.finfo(structure.head.weight.dtype).eps
    return _Sample(model, structure, ids, words, made, mask, temperature, floor)


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)


def _largest_error(values: Sequence[float], expected: Sequence[float], sizes: Sequence[float], floor: float) -> float:
    """Max |found − expected|/size; NaN if autograd itself overflows (float16)."""
    if not all(map(math.isfinite, expected)):
        return math.nan
    errors = [abs(f - e) / max(size, floor) for f, e, size in zip(values, expected, sizes, strict=True)]
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def _inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """⟨a, b⟩ over lists of tensors, each product in at least float32, their sum in float64."""

    def each(x: Tensor, y: Tensor) -> float:
        dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
        return float(torch.dot(x.flatten().to(dtype), y.flatten().to(dtype)))

    return math.fsum(each(x, y) for x, y in zip(a, b, strict=True))
