"""Curvature against PyHessian and curvlinops: products, seconds and memory, each as a ratio from one run."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sharpscope.errors import UserError
from sharpscope.policy import PolicySpec, SamplingSpec, generate, load_policy, render_prompts
from sharpscope.probes.functionals import Functional, rollout_batch
from sharpscope.probes.hessian import Operator, eigenpairs, hutchpp
from sharpscope.probes.hessian.causal_lm import LmSurface, lm_surface
from sharpscope.probes.hessian.krylov import Krylov, noisy
from sharpscope.probes.hessian.pyhessian import pyhessian_estimate
from sharpscope.tasks import KnightsKnavesSpec, make_task

PYHESSIAN = {"maxIter": 100, "tol": 1e-3}  # its defaults
PARTS = ("eigenvalue", "trace", "product")


def compare_curvature(
    *,
    rows: int = 8,
    seeds: int = 6,
    repeats: int = 15,
    threads: int | None = None,
    model: str = "embedded:knights_knaves",
    parts: Sequence[str] = PARTS,
) -> dict[str, Any]:
    """The first three rows of the table, on a policy's own completions of Knights-and-Knaves prompts.

    Args:
        rows: completions in the batch (one functional: `nll`).
        seeds: random starts of each side; errors are root mean squares over them.
        repeats: timed products of each side, alternating; medians count, of wall-clock and of processor seconds (which other
            work on the machine disturbs less).
        threads: torch's threads; None: as they are.
        model: policy.
        parts: which of the three comparisons.

    Raises:
        UserError: curvlinops is not installed.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    policy = load_policy(PolicySpec(model=model))
    heldout = make_task(KnightsKnavesSpec()).splits()["heldout"]  # in order of size
    examples = heldout[:: max(1, len(heldout) // rows)][:rows]
    drawn = generate(policy, render_prompts(examples, policy), 1, SamplingSpec(), torch.Generator().manual_seed(0))
    batch = rollout_batch(drawn.with_reward(torch.ones(len(drawn))))
    functional = Functional("nll", batch)
    with lm_surface(policy.model, functional, mode="graph", microbatch_tokens=10**9) as surface:
        hessian = surface.hessian()
        found = {
            "rows": rows,
            "tokens": int(batch.lengths.sum()),
            "scored": int(batch.scored.sum()),
            "parameters": hessian.size,
            "threads": torch.get_num_threads(),
            "seeds": seeds,
            "torch": torch.__version__,
            "model": model,
        }
        compared: dict[str, Callable[[], dict[str, Any]]] = {
            "eigenvalue": lambda: _eigenvalue(surface, hessian, seeds),
            "trace": lambda: _trace(surface, hessian, seeds),
            "product": lambda: _product(surface, hessian, repeats),
        }
        return found | {part: compared[part]() for part in parts}


def _eigenvalue(surface: LmSurface, hessian: Operator, seeds: int) -> dict[str, Any]:
    """Products until the error of the top eigenvalue is at most PyHessian's, on the same seeds."""
    reference = eigenpairs(
        hessian,
        upper=1,
        lower=1,
        tolerance=1e-4,
        max_products=150,
        capacity=150,
        generator=torch.Generator().manual_seed(10_000),
    )
    exact = float(reference.values[np.abs(reference.values).argmax()])
    theirs, ours = [], []
    for seed in range(seeds):
        result = pyhessian_estimate(
            surface, top=1, max_iterations=int(PYHESSIAN["maxIter"]), tolerance=PYHESSIAN["tol"], trace=False, seed=seed
        )
        error = abs(float(result.values[0]) - exact) / abs(exact)
        theirs.append((result.eigenvalue_products, error))
        ours.append(_lanczos_until(surface, hessian, exact, error, seed))
    products = statistics.mean(n for n, _ in theirs), statistics.mean(n for n, _ in ours)
    return {
        "reference": exact,
        "reference_converged": reference.converged,
        "pyhessian": theirs,
        "ours": ours,
        "ratio": products[1] / products[0],
        "products": products,
    }


def _lanczos_until(surface: LmSurface, hessian: Operator, exact: float, error: float, seed: int) -> tuple[int, float]:
    """Products and relative error of our Lanczos at the first step where its error is at most `error`.

    Its start costs one gradient more, about half a product, which is not counted.
    """
    generator = torch.Generator().manual_seed(seed)
    space = Krylov(hessian, 200, generator)
    space.start(noisy(surface.start(generator), hessian, generator))
    while True:
        space.extend()
        values, _, _ = space.ritz()
        reached = abs(float(values[-1] if exact > 0 else values[0]) - exact) / abs(exact)
        if reached <= max(error, 1e-6) or space.size == space.capacity:
            return space.size, reached


def _trace(surface: LmSurface, hessian: Operator, seeds: int) -> dict[str, Any]:
    """Products until the root-mean-square error of the trace is at most PyHessian's, at its default stopping rule."""
    exact = hutchpp(hessian, probes=60, sketch=60, generator=torch.Generator().manual_seed(10_000))
    theirs = []
    for seed in range(seeds):
        result = pyhessian_estimate(
            surface,
            top=1,
            max_iterations=int(PYHESSIAN["maxIter"]),
            tolerance=PYHESSIAN["tol"],
            trace=True,
            seed=1000 + seed,
        )
        theirs.append((len(result.trace_samples), result.trace))
    error = _rms([value - exact.value for _, value in theirs])
    curve = []
    for products in (4, 6, 8, 12, 16, 24, 32, 48, 64):
        sketch = products // 2
        values = [
            hutchpp(
                hessian, probes=products - sketch, sketch=sketch, generator=torch.Generator().manual_seed(seed)
            ).value
            for seed in range(seeds)
        ]
        curve.append((products, _rms([value - exact.value for value in values])))
        if curve[-1][1] <= error:
            break
    mean = statistics.mean(n for n, _ in theirs)
    reached = curve[-1][1] <= error
    return {
        "reference": exact.value,
        "reference_std_error": exact.std_error,
        "pyhessian_products": mean,
        "pyhessian_rms": error,
        "ours": curve,
        "ratio": curve[-1][0] / mean if reached else math.inf,
    }


def _product(surface: LmSurface, hessian: Operator, repeats: int) -> dict[str, Any]:
    """Seconds of a product: ours with the graph kept, ours streamed, curvlinops."""
    try:
        import curvlinops
    except ModuleNotFoundError:
        raise UserError("bench curvature: curvlinops is not installed; pip install curvlinops-for-pytorch") from None
    batch = surface.functional.batch
    vector = torch.randn(hessian.size, generator=torch.Generator().manual_seed(0))
    streamed = LmSurface(surface.model, surface.functional, mode="stream", microbatch_tokens=4096).hessian()
    with _composed_silu(surface.model):
        # curvlinops differentiates SiLU's backward kernel in forward mode, which PyTorch cannot.
        wrapped = _Logits(surface.model, batch.scored)
        target = batch.input_ids[:, 1:][batch.scored[:, 1:]]
        peer = curvlinops.HessianLinearOperator(
            wrapped,
            nn.CrossEntropyLoss(reduction="sum"),
            list(surface.parameters),
            [(batch.input_ids, target)],
            check_deterministic=False,
        )
        expected = peer @ vector / int(batch.scored.sum())
    difference = float((hessian @ vector - expected).norm() / expected.norm())

    def theirs() -> Tensor:
        with _composed_silu(surface.model):
            return peer @ vector

    sides: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: hessian @ vector,
        "streamed": lambda: streamed @ vector,
        "curvlinops": theirs,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, call in sides.items():
            began = time.perf_counter(), time.process_time()
            call()
            times[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    wall, processor = (
        {name: statistics.median(value[clock] for value in values[1:]) for name, values in times.items()}
        for clock in (0, 1)
    )
    return {
        "seconds": wall,
        "processor_seconds": processor,
        "ratio": wall["ours"] / wall["curvlinops"],
        "processor_ratio": processor["ours"] / processor["curvlinops"],
        "streamed_ratio": wall["streamed"] / wall["curvlinops"],
        "difference": difference,
        "curvlinops": version("curvlinops-for-pytorch"),
    }


class _Logits(nn.Module):
    """Logits (M, V) of the scored tokens, as curvlinops wants them."""

    def __init__(self, model: nn.Module, scored: Tensor) -> None:
        super().__init__()
        self.model, self._place = model, scored[:, 1:]

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
        # A boolean index has no rule under vmap; the places are constants.
        rows, columns = self._place.nonzero(as_tuple=True)
        return logits[rows, columns]


@contextmanager
def _composed_silu(model: nn.Module) -> Iterator[None]:
    replaced = [(m, m.act_fn) for m in model.modules() if "silu" in type(getattr(m, "act_fn", None)).__name__.lower()]
    try:
        for module, _ in replaced:
            module.act_fn = _ComposedSiLU()
        yield
    finally:
        for module, before in replaced:
            module.act_fn = before


class _ComposedSiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


def peak_memory(
    *, vocabulary: int = 151_936, width: int = 896, tokens: int = 512, layers: int = 2, head_mb: float = 16.0
) -> dict[str, Any]:
    """Peak memory of one streamed product beyond parameters and vectors, in a process of its own (Linux).

    The shape is Qwen2.5-0.5B's with `layers` layers: random weights, tied embeddings, float32, batch 1.
    """
    arguments = json.dumps(
        {"vocabulary": vocabulary, "width": width, "tokens": tokens, "layers": layers, "head_mb": head_mb}
    )
    command = [
        sys.executable,
        "-c",
        f"from sharpscope.bench.curvature import _measure_peak; _measure_peak({arguments!r})",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"bench curvature: the memory measurement failed: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _measure_peak(arguments: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from sharpscope.probes.functionals import token_batch

    given = json.loads(arguments)
    config = Qwen2Config(
        vocab_size=given["vocabulary"],
        hidden_size=given["width"],
        intermediate_size=4864,
        num_hidden_layers=given["layers"],
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    ids = torch.randint(0, given["vocabulary"], (1, given["tokens"]), generator=torch.Generator().manual_seed(0))
    scored = torch.ones_like(ids)
    scored[0, 0] = 0
    functional = Functional("nll", token_batch(ids, torch.ones_like(ids), scored))
    with lm_surface(model, functional, mode="stream", head_mb=given["head_mb"]) as surface:
        operator = surface.hessian()
        vector = torch.randn(operator.size)
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        began = time.perf_counter()
        product = operator @ vector
        seconds, peak = time.perf_counter() - began, _status("VmHWM")
    logits = given["tokens"] * given["vocabulary"] * 4
    extra = peak - before - product.numel() * 4  # the product is a vector too
    report = {
        **given,
        "parameters": operator.size,
        "seconds": seconds,
        "extra_mb": extra / 2**20,
        "logits_mb": logits / 2**20,
    }
    print(json.dumps({**report, "ratio": extra / logits}))


def _status(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _rms(values: list[float]) -> float:
    return math.sqrt(statistics.mean(value * value for value in values))


def report(found: dict[str, Any], memory: list[dict[str, Any]], others: Sequence[dict[str, Any]] = ()) -> str:
    """The table as Markdown, with every setting; `others`: the eigenvalue alone on further batches."""
    eigen, trace, product = found["eigenvalue"], found["trace"], found["product"]
    times = product["seconds"]
    lines = [
        "# Curvature: cost against PyHessian and curvlinops",
        "",
        f"Policy {found['model']} ({found['parameters']:,} parameters), `nll` of {found['rows']} of its own completions",
        f"({found['tokens']:,} tokens, {found['scored']:,} scored), float32, {found['threads']} threads, torch {found['torch']}.",
        f"PyHessian 0.1 at its defaults (maxIter = 100, tol = 1e-3), {found['seeds']} seeds, errors against converged",
        f"references: top eigenvalue {eigen['reference']:.6g} (converged: {eigen['reference_converged']}), trace",
        f"{trace['reference']:.5g} ± {trace['reference_std_error']:.2g}. curvlinops {product['curvlinops']} with SiLU composed",
        f"(it needs that); its products and ours differ by {product['difference']:.1e} relative. GPU numbers are missing.",
        "",
        "| | ours | peer | ratio | required | hope |",
        "|---|---|---|---|---|---|",
        *(_eigenvalue_row(one) for one in (found, *others)),
        _row("seconds of a product, graph kept", times["ours"], times["curvlinops"], product["ratio"], "≤ 1.1 | ≤ 0.8"),
        _row(
            "the same in processor seconds",
            product["processor_seconds"]["ours"],
            product["processor_seconds"]["curvlinops"],
            product["processor_ratio"],
            " | ",
        ),
        _row(
            "the same, nothing kept between products, layers recomputed",
            times["streamed"],
            times["curvlinops"],
            product["streamed_ratio"],
            " | ",
        ),
        _row(
            f"products of the trace at PyHessian's RMS error ({trace['ours'][-1][1]:.3g} and {trace['pyhessian_rms']:.3g}); "
            "half of ours for the Krylov subspace",
            trace["ours"][-1][0],
            trace["pyhessian_products"],
            trace["ratio"],
            "≤ 0.5 | ≤ 0.25",
        ),
    ]
    lines += [
        _row(
            f"peak memory of a product beyond parameters and vectors against the logits [MiB], {m['vocabulary']:,} words, "
            f"width {m['width']}, T = {m['tokens']}, batch 1, {m['layers']} layers, blocks of {m['head_mb']:g} MiB",
            m["extra_mb"],
            m["logits_mb"],
            m["ratio"],
            "≤ 3 | ≤ 0.5",
        )
        for m in memory
    ]
    return "\n".join(lines) + "\n"


def _eigenvalue_row(found: dict[str, Any]) -> str:
    eigen = found["eigenvalue"]
    theirs, ours = (statistics.median(error for _, error in eigen[side]) for side in ("pyhessian", "ours"))
    what = (
        "Hessian products (ours: and one gradient) for the top eigenvalue at PyHessian's error, "
        f"{found['rows']} completions, {found['tokens']:,} tokens (means; median relative errors {ours:.1e} and {theirs:.1e})"
    )
    return _row(what, eigen["products"][1], eigen["products"][0], eigen["ratio"], "≤ 0.5 | ≤ 0.25")


def _row(what: str, ours: float, peer: float, ratio: float, targets: str) -> str:
    return f"| {what} | {ours:.3g} | {peer:.3g} | {ratio:.2f} | {targets} |"
