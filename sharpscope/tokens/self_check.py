"""Self-check: compare the token probes with autograd on the model at hand, each once per model.

Two consecutive tokens are compared: the beginning of the first row of the call, continued twice by the model's second most probable
word, whose log-probability has a gradient far above rounding. The reference is `torch.autograd.grad` through the model's own forward
pass with its own attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sharpscope.config.run import Check
from sharpscope.errors import CheckError, UserError
from sharpscope.policy import bare
from sharpscope.policy.cache import cache_keyword
from sharpscope.policy.directions import inner
from sharpscope.policy.guard import tolerance
from sharpscope.tokens.forward_mode import logp_derivative
from sharpscope.tokens.norms import NormMethod, exact_norms, head_norms, local_norms
from sharpscope.tokens.rows import Rows, make_rows
from sharpscope.tokens.structure import Structure

LENGTH = 32  # tokens before the two that are compared
NORMS = {"head": head_norms, "local": local_norms, "exact": exact_norms}


def check_norms(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
    method: NormMethod,
    check: Check,
) -> float | None:
    """The largest relative error of a method of score norms on two tokens; None if not checked, NaN if not finite."""
    if method == "head":  # a closed form of the logits
        return None

    def run(sample: _Sample) -> float:
        """Largest relative difference of two norms of a sample."""
        measured = (
            NORMS[method](model, structure, sample.rows, temperature).values[sample.mask].tolist()
        )
        gradients = [sample.gradient(i, local=method == "local") for i in (0, 1)]
        norms = [math.sqrt(inner(gradient, gradient)) for gradient in gradients]
        return sample.largest_error(measured, norms, norms)

    return _once(model, structure, rows, temperature, method, check, run)


def check_derivative(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
    check: Check,
) -> float | None:
    """The error of directional derivatives along one token's gradient, of two tokens, relative to the norms' product."""

    def run(sample: _Sample) -> float:
        """Largest relative difference of two derivatives of a sample."""
        along, other = sample.gradient(0), sample.gradient(1)
        derivatives = logp_derivative(model, structure, sample.rows, along, temperature)[
            sample.mask
        ].tolist()
        expected = [inner(along, along), inner(along, other)]
        sizes = [expected[0], math.sqrt(expected[0] * inner(other, other))]
        return sample.largest_error(derivatives, expected, sizes)

    return _once(model, structure, rows, temperature, "derivative", check, run)


def check_shares(model: nn.Module, shares: Tensor, check: Check) -> None:
    """Raise if shares of ‖∇L‖² do not sum to 1, because the gradient or the derivatives are wrong."""
    total = float(shares.sum(dtype=torch.float64))
    size = float(shares.abs().sum(dtype=torch.float64))
    if check != "off" and math.isfinite(total):
        # Shares of both signs may be far larger than their sum, and so is its rounding.
        error = abs(total - 1) / max(1.0, size)
        _judge(model, "shares", error, f"shares of the gradient sum to {total:.4g} instead of 1")


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
    sample = _Sample(model, structure, rows, temperature)
    error = run(sample) if sample.finite else math.nan
    if not math.isnan(error):
        _judge(model, probe, error, "differs from plain autograd on two tokens")
        structure.checked[probe] = error
    return error


def _judge(model: nn.Module, probe: str, error: float, what: str) -> None:
    limit = tolerance(bare(model).parameters())
    if error > limit:
        instead = "use method='exact'" if probe == "local" else "use torch.autograd.grad"
        text = (
            f"{type(bare(model)).__name__}, {probe}: {what}: relative error {error:.2g}, where the precision of the model "
            f"allows {limit:.2g}; {instead}, or take the numbers unchecked with check='off'"
        )
        raise CheckError(text, probe, error, limit)


class _Sample:
    """Two words after the beginning of the first row that has a chosen token, and plain autograd on them."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        rows: Rows,
        temperature: float,
    ) -> None:
        self.model, self.temperature = model, temperature
        self.parameters = list(structure.named.values())
        # norms below it are rounding
        self.floor = 10 * torch.finfo(structure.head.weight.dtype).eps
        self.finite = True  # whether the weights have not diverged
        row = int(rows.chosen.any(1).nonzero()[0])
        # (1, n)
        self.ids = rows.ids[row : row + 1, : max(1, min(LENGTH, int(rows.lengths[row]) - 2))]
        vocabulary = bare(model).get_input_embeddings().weight.shape[0]  # type: ignore[index]
        for _ in range(2):
            with torch.no_grad():
                ones = torch.ones_like(self.ids)
                logits = model(input_ids=self.ids, attention_mask=ones, use_cache=False).logits[
                    0, -1
                ]
            self.finite = self.finite and bool(logits.isfinite().all())
            self.ids = torch.cat([self.ids, logits[:vocabulary].topk(2).indices[-1].view(1, 1)], 1)
        self.mask = torch.zeros_like(self.ids, dtype=torch.bool)
        self.mask[0, -2:] = True
        self.rows = make_rows(model, self.ids, self.mask, None, temperature)

    def gradient(self, i: int, *, local: bool = False) -> list[Tensor]:
        """∇ log π of the compared word i by autograd; local: with other positions' keys and values constant, from the key-value cache."""
        read = self.ids[:, : i - 2]
        word = self.ids[0, i - 2]  # before the word, and the word
        ones = torch.ones_like(read)
        if not local:
            with torch.enable_grad():
                return self._pulled(
                    self.model(input_ids=read, attention_mask=ones, use_cache=False).logits, word
                )
        try:
            cache = None
            keyword = cache_keyword(self.model)
            if read.shape[1] > 1:
                with torch.no_grad():
                    given = {
                        "input_ids": read[:, :-1],
                        "attention_mask": ones[:, :-1],
                        "use_cache": True,
                    }
                    cache = self.model(**given)[keyword]
            with torch.enable_grad():
                given = {"attention_mask": ones, keyword: cache, "use_cache": True}
                return self._pulled(self.model(input_ids=read[:, -1:], **given).logits, word)
        except (
            UserError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            NotImplementedError,
        ) as problem:
            text = (
                f"{type(bare(self.model)).__name__}, local: cannot be compared with a step from the model's key-value cache "
                f"({problem}); use method='exact', or take the numbers unchecked with check='off'"
            )
            raise CheckError(text, "local", math.nan, math.nan) from problem

    def _pulled(self, logits: Tensor, word: Tensor) -> list[Tensor]:
        wide = logits[0, -1].to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        logp = torch.log_softmax(wide, -1)[word]
        if not logp.requires_grad:
            return [torch.zeros_like(p) for p in self.parameters]
        return list(
            torch.autograd.grad(logp, self.parameters, allow_unused=True, materialize_grads=True)
        )

    def largest_error(
        self,
        values: Sequence[float],
        expected: Sequence[float],
        sizes: Sequence[float],
    ) -> float:
        """Max |found − expected|/size; NaN if autograd itself overflows (float16)."""
        if not all(map(math.isfinite, expected)):
            return math.nan
        errors = [
            abs(f - e) / max(size, self.floor)
            for f, e, size in zip(values, expected, sizes, strict=True)
        ]
        return math.inf if any(map(math.isnan, errors)) else max(errors)
