"""Every measure on a real model against plain autograd: error, time and memory beside one forward and backward pass.

    python -m experiments.smollm2.check smollm2 [--dtype bfloat16] [--only tokens,surface]

Prints a Markdown table. "Plain" is `torch.autograd.grad` through the model's own forward pass, token by token where a measure is of
tokens. With bfloat16 the model's weights are in it, and plain autograd has the same weights in float32. Needs Linux: the peak of
memory is that of the process (VmHWM).
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.smollm2.sums import sums
from sharpscope.config import RolloutSpec
from sharpscope.errors import UserError
from sharpscope.policy import Policy, PolicySpec, draw_scored, load_policy
from sharpscope.policy.cache import cache_keyword
from sharpscope.surface import (
    Objective,
    critical_sharpness,
    curvature,
    find_radius,
    lm_surface,
    rollout_batch,
    sharpness,
)
from sharpscope.surface.language_model import TokenBatch
from sharpscope.tokens import attribute, score_norms

GIB = 2**30
PROMPTS, SAMPLES = 2, 4
CURVED, PROBES = 2, 4  # rows of which the curvature is taken, and random probes of the trace


def peak(reset: bool = False) -> float:
    """Largest resident memory of this process since the last reset [GiB]."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024 / GIB


class Table:
    """Rows of the table; the first, one forward and backward pass, is what the others' times are divided by."""

    def __init__(self) -> None:
        self.unit = math.nan
        print(
            "| measure | error against plain autograd | processor s | × forward and backward | peak GiB |",
            flush=True,
        )
        print("|---|---|---|---|---|", flush=True)

    def measured(self, work: Callable[[], Any]) -> tuple[Any, float, float]:
        """What `work` returns, its processor seconds, and the peak of memory meanwhile."""
        peak(reset=True)
        began = time.process_time()
        result = work()
        return result, time.process_time() - began, peak()

    def add(self, name: str, error: str, seconds: float, memory: float) -> None:
        """Print a row."""
        self.unit = seconds if math.isnan(self.unit) else self.unit
        print(
            f"| {name} | {error} | {seconds:.1f} | {seconds / self.unit:.1f} | {memory:.1f} |",
            flush=True,
        )


def relative(found: Tensor | float, expected: Tensor | float) -> str:
    """Largest relative error; entries below a hundredth of the median, which are rounding, are relative to that."""
    a, b = (
        torch.as_tensor(found).double().reshape(-1),
        torch.as_tensor(expected).double().reshape(-1),
    )
    size = b.abs().clamp_min(float(b.abs().median()) / 100)
    return f"{float(((a - b).abs() / size).max()):.1e}"


def product(one: Tensor, other: Tensor) -> float:
    """Inner product in float64: in float32 that of 1e8 numbers is off by a percent."""
    return float(one.double() @ other.double())


# -- plain autograd ----------------------------------------------------------------------------------------------------


def log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    """(N, S) ln π of each token given those before it; 0 for the first."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()  # (N, S - 1, V)
    chosen = logits.gather(2, ids[:, 1:, None])[..., 0] - logits.logsumexp(-1)
    return nn.functional.pad(chosen, (1, 0))


def plain_loss(model: nn.Module, batch: TokenBatch, name: str, anchor: Tensor) -> Tensor:
    """Mean −ln π of the scored tokens, or 1 − the mean of reward·π/π_old of whole completions."""
    logp = log_probabilities(model, batch.input_ids) * batch.scored
    if name == "nll":
        return -logp.sum() / batch.scored.sum()
    return (1 - batch.reward * (logp - anchor).sum(1).exp()).mean()


def flat_gradient(value: Tensor, model: nn.Module, **options: Any) -> Tensor:
    """Gradient of a number with respect to all weights, (P,)."""
    return torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(value, list(model.parameters()), **options)]
    )


def plain_product(
    model: nn.Module, batch: TokenBatch, name: str, anchor: Tensor, vector: Tensor
) -> Tensor:
    """A Hessian product by differentiating the gradient's projection, row by row."""
    total = torch.zeros_like(vector)
    weight = batch.scored.sum() if name == "nll" else len(batch)
    for row in range(len(batch)):
        one = batch.rows(torch.tensor([row]))
        share = plain_loss(model, one, name, anchor[row : row + 1, : one.input_ids.shape[1]])
        share = share * (one.scored.sum() if name == "nll" else 1) / weight
        total += flat_gradient(flat_gradient(share, model, create_graph=True) @ vector, model)
    return total


def local_norm(model: nn.Module, ids: Tensor, at: int) -> float:
    """‖∇ ln π‖ of token `at` of ids (1, S) with earlier positions' keys and values constant: one step from a cache."""
    with torch.no_grad():
        cache = model(input_ids=ids[:, : at - 1], use_cache=True)[cache_keyword(model)]
    logits = (
        model(input_ids=ids[:, at - 1 : at], use_cache=True, **{cache_keyword(model): cache})
        .logits[0, -1]
        .float()
    )
    return float(flat_gradient(torch.log_softmax(logits, -1)[ids[0, at]], model).double().norm())


def head_norm(model: nn.Module, ids: Tensor, at: int) -> float:
    """‖∇ ln π‖ of the output layer alone: the input's norm times ‖p − e_y‖."""
    with torch.no_grad():
        found = model(input_ids=ids[:, :at], output_hidden_states=True, use_cache=False)
        pull = found.logits[0, -1].float().softmax(-1)
        pull[ids[0, at]] -= 1
        return float(found.hidden_states[-1][0, -1].norm() * pull.norm())


# -- the measures ------------------------------------------------------------------------------------------------------


def tokens(table: Table, model: nn.Module, plain: nn.Module, batch: TokenBatch) -> None:
    """Score norms by all methods, and shares, on the tokens of the completions."""
    ids, mask = batch.input_ids, batch.scored
    present = (torch.arange(ids.shape[1]) < batch.lengths[:, None]).long()
    places = mask.nonzero().tolist()
    reward = batch.reward.view(-1, SAMPLES)
    advantage = (reward - reward.mean(1, keepdim=True)).reshape(-1, 1).float()
    coef = torch.where(mask, -advantage / mask.sum(1, keepdim=True) / len(ids), 0.0)

    def loop() -> tuple[Tensor, Tensor]:
        """Exact norms, and the gradient's product with each token's gradient, by a backward pass for each token."""
        whole = flat_gradient((coef * log_probabilities(plain, ids)).sum(), plain)
        norms, shares = [], []
        for row, at in places:
            gradient = flat_gradient(
                log_probabilities(plain, ids[row : row + 1, : at + 1])[0, at], plain
            )
            norms.append(float(gradient.double().norm()))
            shares.append(float(coef[row, at]) * product(gradient, whole) / product(whole, whole))
        return torch.tensor(norms), torch.tensor(shares)

    (exact, shares), seconds, memory = table.measured(loop)
    table.add(f"plain loop over {len(places)} tokens: norms and shares", "–", seconds, memory)
    expected = {
        "head": torch.tensor([head_norm(plain, ids[r : r + 1], c) for r, c in places]),
        "local": torch.tensor([local_norm(plain, ids[r : r + 1], c) for r, c in places]),
        "exact": exact,
    }
    for method in ("head", "local", "exact"):
        found, seconds, memory = table.measured(
            lambda method=method: score_norms(model, ids, mask, method, present, check="off")
        )
        error = relative(found.values[mask], expected[method])
        table.add(f"score norms, {method}", error, seconds, memory)
    ratio = expected["local"] / exact
    print(
        f"|  local / exact | {ratio.min():.2f} to {ratio.max():.2f}, median {ratio.median():.2f} | | | |",
        flush=True,
    )
    found, seconds, memory = table.measured(
        lambda: score_norms(model, ids, mask, "local", present, check="always")
    )
    table.add(
        "local norms with their self-check", f"{found.checked:.1e} (its own)", seconds, memory
    )
    found, seconds, memory = table.measured(
        lambda: attribute(model, ids, mask, coef, None, present, check="off")
    )
    error = float((found[mask].double() - shares.double()).abs().max())
    total = float(found.sum())
    table.add("shares of ‖∇L‖²", f"{error:.1e} (absolute), sum {total:.6f}", seconds, memory)


def surface(table: Table, model: nn.Module, plain: nn.Module, batch: TokenBatch) -> None:
    """SAM sharpness, critical sharpness, eigenvalues and trace."""
    with torch.no_grad():
        anchor = log_probabilities(plain, batch.input_ids) * batch.scored
    theta = [p.data.clone() for p in plain.parameters()]

    def value(name: str, step: Tensor | None = None) -> float:
        """Plain loss at θ + step."""
        for p, start, part in zip(plain.parameters(), theta, _parts(step, theta), strict=True):
            p.data = start if part is None else start + part
        with torch.no_grad():
            result = float(plain_loss(plain, batch, name, anchor))
        for p, start in zip(plain.parameters(), theta, strict=True):
            p.data = start
        return result

    failure = Objective("expected_failure", batch)
    with lm_surface(model, failure, check="off") as one:
        radius, seconds, memory = table.measured(lambda: find_radius(one))
    table.add(
        f"radius for SAM ({radius.rho:.2g}, saturation {radius.saturation:.2f})",
        "–",
        seconds,
        memory,
    )
    for name in ("expected_failure", "nll"):
        gradient = flat_gradient(plain_loss(plain, batch, name, anchor), plain)
        with lm_surface(model, Objective(name, batch), check="off") as one:  # type: ignore[arg-type]
            rise, seconds, memory = table.measured(
                lambda one=one: sharpness(one, None, radius.rho, "sam")
            )
        expected = value(name, radius.rho * gradient / gradient.double().norm().float()) - value(
            name
        )
        table.add(f"SAM, {name}: {rise.value:.3g}", relative(rise.value, expected), seconds, memory)
    gradient = flat_gradient(plain_loss(plain, batch, "expected_failure", anchor), plain)
    step = gradient.sign()  # AdamW's first step
    guess = 1e-6

    def along() -> float:
        return float(plain_loss(model, batch, "expected_failure", anchor))

    direction = [part for part in _parts(step, theta) if part is not None]
    with torch.no_grad():
        found, seconds, memory = table.measured(
            lambda: critical_sharpness(along, model, direction, guess=guess, tolerance=1 / 64)
        )
    start, low, high = value("expected_failure"), 0.0, guess
    while value("expected_failure", -high * step) <= start and high < 1:
        # a dense line search: no crossing is stepped over by more than a fifth
        low, high = (
            high,
            1.2 * high,
        )
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if value("expected_failure", -middle * step) <= start else (low, middle)
        )
    text = f"critical sharpness along AdamW's first step: {found.value:.3g}, η_c {found.lr:.2g}"
    table.add(text, found.why or relative(found.lr, high), seconds, memory)
    for name in ("nll", "expected_failure"):
        try:
            _curvature(table, model, plain, batch, name, anchor)
        except UserError as problem:  # too little memory is free
            print(f"| curvature, {name} | not measured: {problem} | | | |", flush=True)


def _curvature(
    table: Table, model: nn.Module, plain: nn.Module, batch: TokenBatch, name: str, anchor: Tensor
) -> None:
    """The top eigenvalue against the quotient of a plain product, and the trace against plain random probes."""
    few = batch.rows(torch.arange(CURVED))
    anchor = anchor[:CURVED, : few.input_ids.shape[1]]
    with lm_surface(model, Objective(name, few), memory_mb=2048, check="off") as one:  # type: ignore[arg-type]
        options: dict[str, Any] = {"check": "off", "tolerance": 0.03, "max_products": 24}
        found, seconds, memory = table.measured(
            lambda: curvature(one, None, 0, top=1, smallest=False, trace_probes=PROBES, **options)
        )
        with sdpa_kernel(SDPBackend.MATH):
            image = plain_product(plain, few, name, anchor, found.vectors[0])
        rest = float((image - found.largest * found.vectors[0]).double().norm()) / found.largest
        quotient = product(found.vectors[0], image)
        error = f"{relative(found.largest, quotient)}; ‖Hv − λv‖/λ {rest:.1e} by a plain product"
        name_of = (
            f"top eigenvalue and trace, {name} ({found.products} products): {found.largest:.4g}"
        )
        table.add(name_of, error, seconds, memory)
    generator = torch.Generator().manual_seed(1)
    each = []
    for _ in range(PROBES):
        probe = torch.randint(0, 2, (len(image),), generator=generator).float() * 2 - 1
        with sdpa_kernel(SDPBackend.MATH):
            each.append(product(probe, plain_product(plain, few, name, anchor, probe)))
    draws = torch.tensor(each)
    spread = math.hypot(found.trace_std_error, float(draws.std()) / math.sqrt(len(draws)))
    error = f"plain {float(draws.mean()):.4g}: {(found.trace - float(draws.mean())) / spread:+.1f} standard errors"
    print(
        f"|  trace, {name}: {found.trace:.4g} ± {found.trace_std_error:.2g} | {error} | | | |",
        flush=True,
    )


def _parts(step: Tensor | None, like: list[Tensor]) -> list[Tensor | None]:
    """A vector (P,) as tensors like the weights."""
    if step is None:
        return [None] * len(like)
    return [
        part.view(one.shape)
        for part, one in zip(step.split([t.numel() for t in like]), like, strict=True)
    ]


def drawn(policy: Policy) -> TokenBatch:
    """Completions of the first prompts whose completions differ in reward, four each."""
    spec = RolloutSpec(max_new_tokens=6, prompts_per_step=PROMPTS, group_size=SAMPLES)
    task = sums()
    examples = task.splits()["train"][:24]
    rollouts, rewards = draw_scored(policy, task, examples, SAMPLES, spec, 0)
    reward = torch.tensor([one.total for one in rewards])
    mean = reward.view(-1, SAMPLES).mean(1)
    mixed = ((mean > 0) & (mean < 1)).nonzero()[:PROMPTS, 0]
    rows = (mixed[:, None] * SAMPLES + torch.arange(SAMPLES)).reshape(-1)
    return rollout_batch(rollouts.rows(rows), reward=reward[rows].double())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--only", default="tokens,surface")
    given = parser.parse_args()
    policy = load_policy(PolicySpec(model=given.folder, device="cpu", prompt_format="plain"))
    torch.manual_seed(0)
    batch = drawn(policy)
    model = policy.model
    plain = model
    if given.dtype == "bfloat16":
        plain = copy.deepcopy(model.bfloat16()).float()
    table = Table()
    _, seconds, memory = table.measured(
        lambda: flat_gradient(plain_loss(model, batch, "nll", batch.anchor_logp), model)
    )
    counted = f"{len(batch)} rows, {int(batch.lengths.sum())} tokens, {int(batch.scored.sum())} of them of completions"
    table.add(f"one forward and backward pass ({counted})", "–", seconds, memory)
    parts = {"tokens": tokens, "surface": surface}
    for name in given.only.split(","):
        parts[name](table, model, plain, batch)


if __name__ == "__main__":
    main()
