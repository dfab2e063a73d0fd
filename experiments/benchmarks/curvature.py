"""Curvature against PyHessian and curvlinops: products, errors and seconds, each as a ratio from one run."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sharpscope.errors import UserError
from sharpscope.policy import Policy, PolicySpec, SamplingSpec, generate, load_policy, render_prompts
from sharpscope.probes.hessian import Operator, eigenpairs, hutchpp
from sharpscope.probes.hessian.causal_lm import LmSurface, lm_surface
from sharpscope.probes.hessian.dual import marked_layers, replaced_forward
from sharpscope.probes.hessian.krylov import Krylov, noisy
from sharpscope.probes.hessian.pyhessian import pyhessian_estimate
from sharpscope.probes.objectives import Objective, rollout_batch
from sharpscope.tasks import KnightsKnavesSpec, make_task

PYHESSIAN: dict[str, Any] = {"max_iterations": 100, "tolerance": 1e-3}  # its defaults, maxIter and tol
MODEL = "embedded:knights_knaves"


@dataclass(frozen=True)
class Batch:
    """Which completions of Knights and Knaves prompts are probed (objective `nll`).

    Attributes:
        prompts: evenly over the split, which is in order of size.
        samples: completions of each, drawn from the policy.
        split: of the task.
        draw: seed of the completions.
    """

    prompts: int
    samples: int
    split: str
    draw: int = 0


PROBED = Batch(12, 2, "train")  # of products and traces
# What the `standard` preset probes with fresh completions, 12 training prompts and 2 completions each, drawn four times: how soon
# either side is there depends on which unlikely tokens were drawn. Draws 0 to 3 were looked at while the start was chosen, these
# were not.
STANDARD = tuple(Batch(12, 2, "train", draw) for draw in range(4, 8))
BATCHES = (*STANDARD, Batch(8, 1, "heldout", 4), Batch(16, 1, "heldout", 4), Batch(32, 1, "heldout", 4))


def probed(policy: Policy, batch: Batch) -> Objective:
    """`nll` of the policy's own completions."""
    examples = make_task(KnightsKnavesSpec()).splits()[batch.split]
    examples = examples[:: max(1, len(examples) // batch.prompts)][: batch.prompts]
    prompts = render_prompts(examples, policy)
    drawn = generate(policy, prompts, batch.samples, SamplingSpec(), torch.Generator().manual_seed(batch.draw))
    return Objective("nll", rollout_batch(drawn.with_reward(torch.ones(len(drawn)))))


@contextmanager
def surface_of(batch: Batch, model: str = MODEL) -> Iterator[tuple[LmSurface, dict[str, Any]]]:
    """The surface of a batch, one microbatch with its graph kept, and what describes it in the record."""
    policy = load_policy(PolicySpec(model=model))
    objective = probed(policy, batch)
    with lm_surface(policy.model, objective, mode="graph", microbatch_tokens=10**9) as surface:
        rows = objective.batch
        yield (
            surface,
            asdict(batch)
            | {"rows": len(rows), "tokens": int(rows.lengths.sum()), "scored": int(rows.scored.sum())}
            | {"parameters": sum(p.numel() for p in surface.parameters), "model": model},
        )


def eigenvalue(batch: Batch, seeds: int = 6, model: str = MODEL) -> dict[str, Any]:
    """Cost until the error of the top eigenvalue is at most that at which PyHessian stops, seed by seed.

    Counted alike on both sides: Hessian products, and gradients apart from them. Each side takes the gradient whose graph its
    products go through; ours adds the passes of its start. Neither side measures a residual.
    """
    with surface_of(batch, model) as (surface, described):
        hessian = surface.hessian()
        exact, converged = _reference(surface, hessian)
        theirs, ours = [], []
        for seed in range(seeds):
            result = pyhessian_estimate(surface, top=1, trace=False, seed=seed, **PYHESSIAN)
            error = abs(float(result.values[0]) - exact) / abs(exact)
            theirs.append({"products": result.eigenvalue_products, "gradients": 1.0, "error": error})
            ours.append(_lanczos_until(surface, hessian, exact, error, seed))
    sides = {"pyhessian": theirs, "ours": ours}
    mean = {
        side: {what: statistics.mean(run[what] for run in runs) for what in ("products", "gradients")}
        for side, runs in sides.items()
    }
    # A gradient is 3 passes' worth of work, a product through its graph 6.
    whole = {side: value["products"] + value["gradients"] / 2 for side, value in mean.items()}
    return (
        described
        | sides
        | {
            "seeds": seeds,
            "reference": exact,
            "reference_converged": converged,
            "mean": mean,
            "ratio": mean["ours"]["products"] / mean["pyhessian"]["products"],
            "ratio_with_gradients": whole["ours"] / whole["pyhessian"],
        }
    )


def _reference(surface: LmSurface, hessian: Operator) -> tuple[float, bool]:
    """The eigenvalue of largest magnitude, to 1e-4 of a residual and so far closer itself."""
    found = eigenpairs(
        hessian,
        upper=1,
        lower=1,
        tolerance=1e-4,
        max_products=150,
        capacity=150,
        start=surface.start(),
        generator=torch.Generator().manual_seed(10_000),
    )
    return float(found.values[np.abs(found.values).argmax()]), found.converged


def _lanczos_until(surface: LmSurface, hessian: Operator, exact: float, error: float, seed: int) -> dict[str, float]:
    """Cost and relative error of our Lanczos at the first step where its error is at most `error`."""
    generator = torch.Generator().manual_seed(seed)
    space = Krylov(hessian, 200, generator)
    space.start(noisy(surface.start(), hessian, generator))
    while True:
        space.extend()
        values, _, _ = space.ritz()
        reached = abs(float(values[-1] if exact > 0 else values[0]) - exact) / abs(exact)
        if reached <= max(error, 1e-6) or space.size == space.capacity:
            return {"products": space.size, "gradients": 1 + start_gradients(surface), "error": reached}


def start_gradients(surface: LmSurface) -> float:
    """Cost of the last `surface.start` in gradients of all rows, which are 3 passes of the model each.

    A forward pass of all rows; the derivatives in the activations of the last layer and the output layer, half a backward pass
    of their share of the parameters; for each row of the tokens used, a forward pass up to the last of them and a backward
    pass, 2 passes, for each.
    """
    layer = marked_layers(surface.backbone)[-1]
    last = sum(p.numel() for p in layer.parameters()) + surface.head.weight.numel()
    passes = 1 + last / sum(p.numel() for p in surface.model.parameters())
    total = float(surface.objective.batch.lengths.sum())
    for row in {row for row, _ in surface.start_tokens}:
        places = [t for own, t in surface.start_tokens if own == row]
        passes += (max(places) + 1) / total * (1 + 2 * len(places))
    return passes / 3


def trace(batch: Batch = PROBED, seeds: int = 6, model: str = MODEL) -> dict[str, Any]:
    """Products until the root-mean-square error of the trace is at most PyHessian's, at its default stopping rule."""
    with surface_of(batch, model) as (surface, described):
        hessian = surface.hessian()
        exact = hutchpp(hessian, probes=36, sketch=36, generator=torch.Generator().manual_seed(10_000))
        theirs = []
        for seed in range(seeds):
            result = pyhessian_estimate(surface, top=1, eigenvalues=False, seed=1000 + seed, **PYHESSIAN)
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
    return described | {
        "seeds": seeds,
        "reference": exact.value,
        "reference_std_error": exact.std_error,
        "pyhessian": theirs,
        "pyhessian_products": mean,
        "pyhessian_rms": error,
        "ours": curve,
        "ratio": curve[-1][0] / mean if reached else math.inf,
    }


def product(batch: Batch = PROBED, repeats: int = 5, model: str = MODEL) -> dict[str, Any]:
    """Seconds of a product: ours with the graph kept, ours streamed, curvlinops; and who is how far from float64.

    The sides alternate; medians count, of wall-clock and of processor seconds (which other work on the machine disturbs
    less). The first product of each is not counted.

    Raises:
        UserError: curvlinops is not installed.
    """
    with surface_of(batch, model) as (surface, described):
        hessian = surface.hessian()
        vector = torch.randn(hessian.size, generator=torch.Generator().manual_seed(0))
        streamed = LmSurface(surface.model, surface.objective, mode="stream", microbatch_tokens=4096).hessian()
        peer = _curvlinops(surface)
        sides: dict[str, Callable[[], Tensor]] = {
            "ours": lambda: hessian @ vector,
            "streamed": lambda: streamed @ vector,
            "curvlinops": lambda: peer(vector),
            "gradient": lambda: surface.gradient()[1],
        }
        products = {name: sides[name]() for name in ("ours", "streamed", "curvlinops")}
        exact = _in_float64(surface, vector)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, call in sides.items():
                began = time.perf_counter(), time.process_time()
                call()
                times[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    wall, processor = (
        {name: statistics.median(value[clock] for value in values) for name, values in times.items()}
        for clock in (0, 1)
    )
    return described | {
        "repeats": repeats,
        "seconds": wall,
        "processor_seconds": processor,
        "ratio": wall["ours"] / wall["curvlinops"],
        "processor_ratio": processor["ours"] / processor["curvlinops"],
        "streamed_ratio": wall["streamed"] / wall["curvlinops"],
        "difference": _distance(products["ours"], products["curvlinops"]),
        "float64": {
            "difference": _distance(exact["ours"], exact["curvlinops"]),
            "streamed_difference": _distance(exact["streamed"], exact["curvlinops"]),
            "float32_error": {name: _distance(value, exact["ours"]) for name, value in products.items()},
        },
        "curvlinops": version("curvlinops-for-pytorch"),
    }


def _distance(one: Tensor, other: Tensor) -> float:
    """‖one − other‖ / ‖other‖."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def _curvlinops(surface: LmSurface) -> Callable[[Tensor], Tensor]:
    """curvlinops' product with the Hessian of `nll`."""
    try:
        import curvlinops
    except ModuleNotFoundError:
        raise UserError("bench curvature: curvlinops is not installed; pip install curvlinops-for-pytorch") from None
    batch = surface.objective.batch
    target = batch.input_ids[:, 1:][batch.scored[:, 1:]]
    # curvlinops differentiates SiLU's backward kernel in forward mode, which PyTorch cannot.
    with _composed_silu(surface.model):
        operator = curvlinops.HessianLinearOperator(
            _Logits(surface.model, batch.scored),
            nn.CrossEntropyLoss(reduction="sum"),
            list(surface.parameters),
            [(batch.input_ids, target)],
            check_deterministic=False,
        )

    def call(vector: Tensor) -> Tensor:
        with _composed_silu(surface.model):
            found: Tensor = operator @ vector
        return found / int(batch.scored.sum())

    return call


def _in_float64(surface: LmSurface, vector: Tensor) -> dict[str, Tensor]:
    """The same three products of a float64 copy of the model, whose norms compute in float64 too."""
    model = copy.deepcopy(surface.model).double()
    with (
        lm_surface(model, surface.objective, mode="graph", microbatch_tokens=10**9) as exact,
        ExitStack() as stack,  # inside: the guard puts back what it found in the modules
    ):
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                stack.enter_context(replaced_forward(module, _double_norm(module)))
        streamed = LmSurface(model, exact.objective, mode="stream").hessian()
        wide = vector.double()
        return {"ours": exact.hessian() @ wide, "streamed": streamed @ wide, "curvlinops": _curvlinops(exact)(wide)}


def _double_norm(module: Any) -> Callable[[Tensor], Tensor]:
    """An RMS norm in its input's dtype; transformers casts to float32."""

    def forward(x: Tensor) -> Tensor:
        normed: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return normed * module.weight

    return forward


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


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.mean(value * value for value in values))
