"""Self-check: compare the token probes with autograd on the model at hand.

Two tokens are compared: prefixes of the first row of the call, each followed by the model's second most probable word, whose
log-probability has a gradient far above rounding. The reference is `torch.autograd.grad` through the model's own forward pass
with its own attention. Results are cached with the model's structure (see `fingerprint`), so each probe is checked once per
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sharpscope.config.probes import Check
from sharpscope.errors import CheckError, UserError
from sharpscope.policy import backbone, bare
from sharpscope.probes.token_gradients import attention as attn
from sharpscope.probes.token_gradients.forward_mode import NoForwardModeError, forward_attention
from sharpscope.probes.token_gradients.result import Tier
from sharpscope.probes.token_gradients.rows import Rows, make_rows
from sharpscope.probes.token_gradients.sketch import coupled_directions, draw_direction, random_signs, scaling_of
from sharpscope.probes.token_gradients.structure import Structure, hidden_states, recording, structure_of

LENGTH = 32  # tokens of the longer prefix
FEW = 16  # tokens of the call that are compared with forward mode
SKETCH_DIRECTIONS = 2
INSTEAD = {
    "head": "use tier='exact'",
    "local": "use tier='exact'",
    "sketch": "use tier='exact'",
    "exact": "loop over the tokens with torch.autograd.grad",
    "forward": "use method='central'",
    "central": "use method='forward'",
    "gradient": "take the gradient with torch.autograd.grad",
    "shares": "use method='forward', or method='central' where that was used",
    "surface": "use sharpscope.curvature on a loss of your own",
}


def check_norms(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
    tier: Tier,
    check: Check,
    measure: Callable[[Rows], Tensor],
) -> float | None:
    """The largest relative error of a tier of score norms on two tokens; None if not checked, NaN if not finite.

    Args:
        rows: of the call at hand; they give the beginning that is used.
        measure: squared norms (N, S) of rows by that tier.

    Raises:
        CheckError: the error exceeds what the model's precision allows.
    """

    def run(sample: _Sample) -> float:
        """Largest relative error of the norms of two tokens."""
        measured = measure(sample.rows)[sample.mask].double()  # raises first if the tier cannot handle the model
        if tier != "head":
            sample.compare_states(tier)
        if tier == "sketch":  # an estimate, which may be negative: compared as it is
            expected, sizes = zip(*(sample.sketched(i) for i in (0, 1)), strict=True)
            return _largest_error(measured.tolist(), expected, sizes, sample.floor)
        squares = {"head": sample.head_squared, "local": sample.local_squared, "exact": sample.exact_squared}[tier]
        norms = [squares(i) ** 0.5 for i in (0, 1)]
        return _largest_error(measured.clamp_min(0).sqrt().tolist(), norms, norms, sample.floor)

    return _once(model, structure, rows, temperature, tier, check, run)


def check_derivative(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
    way: str,
    check: Check,
    measure: Callable[[Rows, Sequence[Tensor]], Tensor],
) -> float | None:
    """The error of a directional derivative along one token's gradient, of two tokens, relative to the norms' product.

    Args:
        way: forward or central.
        measure: derivatives (N, S) of rows along a direction.
    """

    def run(sample: _Sample) -> float:
        """Largest relative error of the derivatives of two tokens along the first one's gradient."""
        along = sample.gradient(0)
        derivatives = measure(sample.rows, along)[sample.mask].tolist()
        if way == "forward":
            sample.compare_states(way)
        other = sample.gradient(1)
        expected = [_inner(along, along), _inner(along, other)]
        sizes = [expected[0], math.sqrt(expected[0] * _inner(other, other))]
        return _largest_error(derivatives, expected, sizes, sample.floor)

    return _once(model, structure, rows, temperature, way, check, run)


def check_gradient(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    temperature: float,
    check: Check,
    measure: Callable[[Rows, Tensor], list[Tensor]],
) -> float | None:
    """The relative error of a weighted sum of two tokens' gradients.

    Args:
        measure: the sum over rows with coefficients (N, S).
    """

    def run(sample: _Sample) -> float:
        """Relative error of the gradient of a sum of two tokens' log-probabilities."""
        coef = sample.mask * torch.tensor([[1.0], [0.5]], device=sample.mask.device)
        shares = measure(sample.rows, coef)
        expected = [a.add_(b, alpha=0.5) for a, b in zip(sample.gradient(0), sample.gradient(1), strict=True)]
        length = math.sqrt(_inner(expected, expected))
        apart = [a.to(b).sub(b) for a, b in zip(shares, expected, strict=True)]
        return _largest_error([length + math.sqrt(_inner(apart, apart))], [length], [length], sample.floor)

    return _once(model, structure, rows, temperature, "gradient", check, run)


def check_shares(model: nn.Module, shares: Tensor, way: str, check: Check) -> None:
    """Raise if shares of ‖∇L‖² do not sum to 1, because the gradient or the derivatives are wrong."""
    if check == "off":
        return
    total, size = float(shares.sum(dtype=torch.float64)), float(shares.abs().sum(dtype=torch.float64))
    if math.isfinite(total):
        # Shares of both signs may be far larger than their sum, and so is its rounding.
        error = abs(total - 1) / max(1.0, size)
        _judge(model, structure_of(model), "shares", error, way, f"attribution shares sum to {total:.4g} instead of 1")


def check_difference(
    model: nn.Module,
    structure: Structure,
    rows: Rows,
    values: Tensor,
    check: Check,
    forward: Callable[[Rows], Tensor],
) -> float | None:
    """The error of central differences against forward mode on a few of the call's own tokens and along its direction.

    Args:
        values: (N, S) as found by central difference; errors are relative to the largest.
        forward: (N, S) of rows in forward mode. A model without one is not compared: two tokens were, with plain autograd.
    """
    if check == "off" or not bool(rows.chosen.any()):
        return None
    if check == "first" and "difference" in structure.checked:
        return structure.checked["difference"]
    few = _few(rows)
    try:
        expected = forward(few)
    except NoForwardModeError:
        return None
    largest = float(values.abs().max())
    if not math.isfinite(largest):
        return math.nan
    apart = few.gathered(values - expected).abs().max()
    error = float(apart) / max(largest, torch.finfo(torch.float32).tiny)
    _judge(model, structure, "central", error, "central", "differs from forward mode on the call's own tokens")
    structure.checked["difference"] = error
    return error


def _few(rows: Rows) -> Rows:
    """The first row with a chosen token, truncated after its first `FEW` chosen tokens."""
    row = rows.take(rows.chosen.any(1).nonzero()[0])
    end = int(row.chosen[0].nonzero()[:, 0][:FEW][-1]) + 1
    return replace(
        row,
        ids=row.ids[:, :end],
        lengths=row.lengths.clamp_max(end),
        chosen=row.chosen[:, :end],
        place=row.place[:, :end],
    )


def tolerance(model: nn.Module, structure: Structure, probe: str) -> float:
    """The relative error that rounding may explain, from ε of the coarsest type that the model computes in.

    Two ways to one gradient differ by rounding in another order, a small multiple of √layers·ε, while a wrong derivative is
    seldom right to 10⁻³. 2√ε lies between: 7e-4 in float32, 0.06 in float16 and 0.18 in bfloat16, where plain autograd is no
    better itself (seen on tiny models: at most 3e-6, 8e-3 and 8e-2). Models in float64 count as float32: transformers takes
    softmax, norms and routers in float32 within them. A central difference is wrong by the order of ε^(2/3) by the choice of
    its step, times how far log π bends, and gets ε^(1/3), 5e-3 (seen: 4e-4).
    """
    types = {
        structure.computes_in,
        torch.float32,
        *(p.dtype for p in bare(model).parameters() if p.is_floating_point()),
    }
    eps = max(torch.finfo(dtype).eps for dtype in types)
    return float(eps ** (1 / 3) if probe == "central" else 2 * eps**0.5)


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
    if sample is None:
        return math.nan
    error = run(sample)
    if math.isnan(error):
        return error
    _judge(model, structure, probe, error, probe, "differs from plain autograd on two tokens")
    structure.checked[probe] = error
    return error


def _judge(model: nn.Module, structure: Structure, probe: str, error: float, way: str, what: str) -> None:
    limit = tolerance(model, structure, way)
    if error <= limit:
        return
    kind = (
        "method"
        if way in ("forward", "central")
        else "tier"
        if way in ("head", "local", "sketch", "exact")
        else "probe"
    )
    raise CheckError(
        f"{type(bare(model)).__name__}, {kind} {way}: {what}: relative error {error:.2g}, where the precision of the model "
        f"allows {limit:.2g}; {INSTEAD[probe]}, or take the numbers unchecked with check='off'",
        probe,
        error,
        limit,
    )


@dataclass
class _Sample:
    """Two beginnings with a word each, and what the model itself makes of them.

    Attributes:
        ids: the beginnings, (1, n) each; words: the word after each.
        rows, mask: the same as rows of a call, with the words chosen.
        hidden: (1, n, d) of the longer beginning, as the model's own output layer reads them; logits: (1, n, V).
        floor: norms below it are rounding.
    """

    model: nn.Module
    structure: Structure
    ids: list[Tensor]
    words: list[int]
    rows: Rows
    mask: Tensor
    hidden: Tensor
    logits: Tensor
    temperature: float
    floor: float

    def gradient(self, i: int) -> list[Tensor]:
        """∇ log π of word i by autograd, over the trainable parameters."""
        with torch.enable_grad():
            logits = _own_logits(self.model, self.ids[i])
            return self._pulled(logits, i)

    def exact_squared(self, i: int) -> float:
        """‖∇ log π‖² of word i."""
        g = self.gradient(i)
        return _inner(g, g)

    def local_squared(self, i: int) -> float:
        """The same with other positions' keys and values constant."""
        g = self.local_gradient(i)
        return _inner(g, g)

    def sketched(self, i: int) -> tuple[float, float]:
        """The sketch computed from autograd gradients, and the size of its terms; see `sketch`."""
        structure, device = self.structure, self.mask.device
        whole, local = self.gradient(i), self.local_gradient(i)
        value = size = _inner(local, local)
        scaling = scaling_of(self.model, structure, self.rows)
        rest = {name: g - cut for name, g, cut in zip(structure.named, whole, local, strict=True)}
        inner = dict(zip(structure.named, local, strict=True))
        pull, hidden = self._at_head(i)
        if structure.tied is not None:  # the output layer's part is taken out of the local gradient
            rows = len(inner[structure.tied])
            inner[structure.tied] = inner[structure.tied].double() - torch.outer(pull[:rows], hidden)
        generator = torch.Generator(device=device).manual_seed(0)
        for _ in range(SKETCH_DIRECTIONS):
            v = draw_direction(structure, generator)
            along, cut = (_inner([each[name] for name in v], list(v.values())) for each in (rest, inner))
            value += (along**2 + 2 * along * cut) / SKETCH_DIRECTIONS
            size += (along**2 + 2 * abs(along * cut)) / SKETCH_DIRECTIONS
        if scaling is not None and structure.tied is not None:
            words = self.ids[i].unique()
            words = words[words != getattr(bare(self.model).get_input_embeddings(), "padding_idx", None)]
            count = coupled_directions(SKETCH_DIRECTIONS)
            for _ in range(count):
                signs = random_signs(structure.named[structure.tied], generator)
                along = _inner([rest[structure.tied]], [scaling.times(signs, 1)])
                term = 2 * along * float(pull[words] @ scaling.times(signs, -1)[words].double() @ hidden)
                value, size = value + term / count, size + abs(term) / count
        return value, size

    def local_gradient(self, i: int) -> list[Tensor]:
        """The same with other positions' keys and values constant: one step from the model's key-value cache."""
        ids = self.ids[i]
        try:
            cache = None
            if ids.shape[1] > 1:
                with torch.no_grad():
                    begun = self.model(
                        input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1]), use_cache=True
                    )
                cache = begun.past_key_values
            with torch.enable_grad():
                logits = self.model(
                    input_ids=ids[:, -1:], attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True
                ).logits
                return self._pulled(logits, i)
        except (TypeError, ValueError, AttributeError, NotImplementedError) as problem:
            raise CheckError(
                f"{type(bare(self.model)).__name__}, tier local: cannot be compared with a step from the model's key-value "
                f"cache ({problem}); use tier='exact', or take the numbers unchecked with check='off'",
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

    def head_squared(self, i: int) -> float:
        """‖∂ log π/∂(W, b)‖² of the output layer."""
        pull, inputs = self._at_head(i)
        return float(pull @ pull) * (float(inputs @ inputs) + (self.structure.head.bias is not None))

    def _at_head(self, i: int) -> tuple[Tensor, Tensor]:
        """∂ log π/∂a (V,) of the output layer's output and its input (d,), in float64."""
        kept: list[Tensor] = []

        def cut(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            kept[:] = [args[0].detach()[0, -1], out.detach().requires_grad_()]
            return kept[1]

        layer = bare(self.model).get_output_embeddings()
        handle = layer.register_forward_hook(cut)
        try:
            with torch.enable_grad():
                logits = _own_logits(self.model, self.ids[i])
                logp = _log_softmax(logits[0, -1], self.temperature)[self.words[i]]
                pull = torch.autograd.grad(logp, kept[1])[0][0, -1].double()
        finally:
            handle.remove()
        return pull, kept[0].double()

    def compare_states(self, probe: str) -> None:
        """Hidden states and logits under the probe's attention against the model's own."""
        ids = self.ids[0]
        recorder = self.structure.recorder((1, ids.shape[1]), whole=True)
        kind = attn.FULL if probe == "exact" else attn.CUT
        watched: AbstractContextManager[Any] = recording(self.model, self.structure, recorder, kind)
        if probe in ("forward", "sketch"):
            watched = forward_attention(self.model, self.structure)
        with torch.no_grad(), watched:
            hidden = hidden_states(self.model, ids)
            logits = self.structure.head.logits(hidden)
        for what, states, own in (("hidden states", hidden, self.hidden), ("logits", logits, self.logits)):
            error = float((states.double() - own.double()).norm() / own.double().norm().clamp_min(self.floor))
            _judge(
                self.model,
                self.structure,
                probe,
                error,
                probe,
                f"{what} under its attention differ from the model's own",
            )


def _sample(model: nn.Module, structure: Structure, rows: Rows, temperature: float) -> _Sample | None:
    """Two tokens of the first row that has a chosen token; None if the weights have diverged."""
    row = int(rows.chosen.any(1).nonzero()[0])
    before = rows.ids.new_empty(0) if rows.before is None else rows.before
    whole = torch.cat([before, rows.ids[row, : int(rows.lengths[row])]])
    n = min(LENGTH, len(whole) - 1)
    lengths = [n, (n + 1) // 2]
    ids = [whole[None, :length] for length in lengths]
    with torch.no_grad():
        logits = _own_logits(model, ids[0])
        # Not what enters the output layer, which some models divide first (MiniCPM3).
        present = torch.ones_like(ids[0])
        hidden: Tensor = backbone(model)(input_ids=ids[0], attention_mask=present, use_cache=False).last_hidden_state
    if not bool(logits.isfinite().all()):
        return None
    embedding: Any = bare(model).get_input_embeddings()
    vocabulary = embedding.weight.shape[0]
    words = [int(logits[0, length - 1, :vocabulary].topk(2).indices[-1]) for length in lengths]
    table, mask = whole[: n + 1].repeat(2, 1), torch.zeros(2, n + 1, dtype=torch.bool, device=whole.device)
    for i, length in enumerate(lengths):
        table[i, length], mask[i, length] = words[i], True
    present = torch.arange(n + 1, device=whole.device) <= torch.tensor(lengths, device=whole.device)[:, None]
    return _Sample(
        model,
        structure,
        ids,
        words,
        make_rows(model, table, mask, present, temperature),
        mask,
        hidden,
        logits,
        temperature,
        10 * torch.finfo(structure.head.weight.dtype).eps,
    )


def _own_logits(model: nn.Module, ids: Tensor) -> Tensor:
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
