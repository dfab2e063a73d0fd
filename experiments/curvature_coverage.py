"""How often the printed intervals of λ_max, λ_c, average sharpness, trace and spectral density cover the truth.

    python -m experiments.curvature_coverage [SECONDS] [NAME ...]

The pool is the `nll` of the solutions that `embedded:math` finds to 960 prompts, less 48 that give the direction of `fixed`. Prompts are
drawn without replacement for SECONDS of processor time a row, few enough of the pool to need no correction. NAME is one of

- `largest`: λ_max ± 1.96 standard errors over prompts; the truth is the pool's.
- `fixed`: λ_c with its interval over prompts along the sign of the gradient of the other prompts, as AdamW's first step is.
- `own`: the same along the sign of the gradient of the very prompts, as that of an update on its batch; the truth is the pool's λ_c
  along the same direction.
- `average`: average sharpness with its interval over prompts and pairs of noise; the truth is the pool's, from 64 pairs.
- `trace`, `density`: Student's t intervals over random vectors; the truth is that of the same 12 prompts from many more vectors,
  for the trace also the pool's. A density is compared at its nodes, where it is above a millionth of its largest value, near 0 (10 widths: the
  bulk) and farther out (peaks of single eigenvalues).

Prints a Markdown table for each name.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import t
from torch import Tensor

from sharpscope.config import build_config
from sharpscope.policy import load_policy
from sharpscope.recording.probe_sets import run_probe_set
from sharpscope.surface import Estimate, critical_sharpness, curvature
from sharpscope.surface.algorithms import Density, Krylov, hutchpp, spectral_density
from sharpscope.surface.language_model import LmSurface, Objective, lm_surface
from sharpscope.surface.operators import unflatten
from sharpscope.surface.perturbation import PAIRS, average_sharpness
from sharpscope.tasks import make_task

PROMPTS, OTHERS, GUESS = 960, 48, 1e-4
SIZES = (12, 24, 48)
FEW = 12  # prompts of traces and densities
TRACE, DENSITY = (16, 4), 4
"""Products of the subspace and random vectors of a trace; runs of Lanczos of a density."""
MANY = 12  # times as many for the truth


@dataclass(frozen=True)
class Pool:
    """The surface of all prompts but `OTHERS`, and the direction of these."""

    surface: LmSurface
    prompts: Tensor  # of each row
    step: list[Tensor]

    def draws(self, size: int, seconds: float) -> Iterator[LmSurface]:
        """Surfaces of `size` random prompts for so much processor time, five at least."""
        generator, start, made = torch.Generator().manual_seed(size), time.process_time(), 0
        names = self.prompts.unique()
        while made < 5 or time.process_time() < start + seconds:
            chosen = names[torch.randperm(len(names), generator=generator)[:size]]
            yield self.surface.prompts(torch.isin(self.prompts, chosen))
            made += 1


def shaped(flat: Tensor, surface: LmSurface) -> list[Tensor]:
    """A direction (P,) in the shapes of the parameters."""
    parts = zip(unflatten(flat, surface.parameters), surface.parameters, strict=True)
    return [part.view_as(parameter) for part, parameter in parts]


def largest(surface: LmSurface) -> Estimate:
    """λ_max with its error over prompts."""
    found = curvature(
        surface, None, 0, top=1, smallest=False, tolerance=1e-2, max_products=60, trace_probes=0,
        check="off", by_prompt=True,
    )  # fmt: skip
    return next(row for row in found.estimates() if row.quantity == "largest")


def critical(surface: LmSurface, direction: list[Tensor]) -> Estimate:
    """λ_c along a direction with its interval over prompts."""
    found = critical_sharpness(
        surface.by_prompt, surface.parameters, direction, guess=GUESS, tolerance=1 / 16
    )
    return found.estimates()[0]


def of_largest(pool: Pool, seconds: float) -> None:
    """Table of `largest`."""
    truth = largest(pool.surface).value
    print("| prompts | draws | λ_max / pool | covers |\n|---|---|---|---|")
    for size in SIZES:
        rows = [largest(part) for part in pool.draws(size, seconds)]
        inside = [abs(row.value - truth) <= 1.96 * row.prompt_std_error for row in rows]
        middle = np.median([row.value / truth for row in rows])
        print(f"| {size} | {len(rows)} | {middle:.2f} | {np.mean(inside):.0%} |", flush=True)


def of_critical(pool: Pool, seconds: float, own: bool) -> None:
    """Table of `fixed` or `own`."""
    title = "| prompts | draws | λ_c / pool | covers | below | above | no upper end | no λ_c |"
    print(f"{title}\n|---|---|---|---|---|---|---|---|")
    fixed, step = critical(pool.surface, pool.step).value, pool.step
    for size in SIZES:
        found, missing = [], 0
        for part in pool.draws(size, seconds):
            truth = fixed
            if own:
                step = shaped(part.gradient()[1].sign(), part)
                truth = critical(pool.surface, step).value
            row = critical(part, step)
            if not math.isfinite(row.value):
                missing += 1
                continue
            # a pool whose loss the step raises at once is sharper than any number
            truth = math.inf if math.isnan(truth) else truth
            inside = row.low <= truth <= row.high
            sides = (inside, row.high < truth, row.low > truth, math.isinf(row.high))
            found.append((row.value / truth, *sides))
        middle = np.median([row[0] for row in found])
        shares = " | ".join(f"{share:.0%}" for share in np.mean([r[1:] for r in found], axis=0))
        lost = missing / (missing + len(found))
        print(
            f"| {size} | {len(found) + missing} | {middle:.2f} | {shares} | {lost:.0%} |",
            flush=True,
        )


def of_average(pool: Pool, seconds: float) -> None:
    """Table of `average`."""
    truth = average_sharpness(pool.surface, 10**6, pool.surface.by_prompt(), samples=64)
    print(f"pool {truth.value:.5f} ± {truth.std_error:.5f} (standard error over noise)\n")
    print("| prompts | draws | average sharpness / pool | covers |\n|---|---|---|---|")
    for size in SIZES:
        rows = [
            average_sharpness(part, seed, part.by_prompt())
            for seed, part in enumerate(pool.draws(size, seconds))
        ]
        student = float(t.ppf(0.975, PAIRS - 1))
        halves = [math.hypot(1.96 * r.prompt_std_error, student * r.std_error) for r in rows]
        found = [row.value for row in rows]
        inside = np.mean(np.abs(np.subtract(found, truth.value)) <= halves)
        middle = np.median(found) / truth.value
        print(f"| {size} | {len(rows)} | {middle:.2f} | {inside:.0%} |", flush=True)


def trace(surface: LmSurface, seed: int, more: int = 1) -> tuple[float, float]:
    """The trace with half of its printed interval."""
    operator, draws = surface.hessian(), torch.Generator().manual_seed(seed)
    space = Krylov(operator, TRACE[0], draws)
    for _ in range(space.capacity):
        space.extend()
    count = TRACE[1] * more
    value, error = hutchpp(operator, space, count, draws)
    return value, error * float(t.ppf(0.975, count - 1))


def of_trace(pool: Pool, seconds: float) -> None:
    """Table of `trace`."""
    whole = trace(pool.surface, 0, MANY)[0]
    print("| prompts | draws | covers their trace | covers the pool's |\n|---|---|---|---|")
    inside = []
    for number, part in enumerate(pool.draws(FEW, seconds)):
        truth = trace(part, 10**6 + number, 4 * MANY)[0]
        for redraw in range(10):
            value, half = trace(part, 100 * number + redraw)
            inside.append([abs(value - one) <= half for one in (truth, whole)])
    own, other = np.mean(inside, axis=0)
    print(f"| {FEW} | {len(inside)} | {own:.0%} | {other:.0%} |", flush=True)


def of_density(pool: Pool, seconds: float) -> None:
    """Table of `density`."""
    surface = next(pool.draws(FEW, 0))
    operator = surface.hessian()

    def measured(seed: int, probes: int = DENSITY) -> Density:
        draws = torch.Generator().manual_seed(seed)
        return spectral_density(operator, probes=probes, generator=draws)

    truth, start, draws = measured(0, DENSITY * MANY), time.process_time(), 0
    print("| prompts | draws | covers, bulk | covers, outlying peaks |\n|---|---|---|---|")
    inside: list[tuple[bool, bool]] = []
    while time.process_time() < start + seconds or not inside:
        draws += 1
        found = measured(draws)
        bumps = np.exp(-(((found.nodes - truth.ritz[..., None]) / found.width) ** 2) / 2)
        exact = (truth.weights[..., None] * bumps).sum(1).mean(0)
        exact /= found.width * math.sqrt(2 * math.pi)
        half = float(t.ppf(0.975, DENSITY - 1)) * found.std_error
        near = np.abs(found.nodes) < 10 * found.width
        for at in np.nonzero(exact > 1e-6 * exact.max())[0]:
            inside.append((bool(near[at]), bool(abs(found.values[at] - exact[at]) <= half[at])))
    shares = [np.mean([hit for bulk, hit in inside if bulk is side]) for side in (True, False)]
    print(f"| {FEW} | {draws} | {shares[0]:.0%} | {shares[1]:.0%} |", flush=True)


TABLES: dict[str, Callable[[Pool, float], None]] = {
    "largest": of_largest,
    "fixed": lambda pool, seconds: of_critical(pool, seconds, own=False),
    "own": lambda pool, seconds: of_critical(pool, seconds, own=True),
    "average": of_average,
    "trace": of_trace,
    "density": of_density,
}


def main(seconds: float, names: list[str]) -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    settings = {"policy.model": "embedded:math", "task.kind": "math", "probes.prompts": PROMPTS}
    with tempfile.TemporaryDirectory() as folder:
        config = build_config(values=settings | {"out": folder})
        solutions = run_probe_set(config, make_task(config.task)).solutions("train")
    model = load_policy(config.policy).model
    with lm_surface(model, Objective("nll", solutions), check="off") as whole:
        prompts = torch.tensor(whole.objective.batch.prompts)
        pooled = prompts <= int(prompts.max()) - OTHERS
        step = shaped(whole.prompts(~pooled).gradient()[1].sign(), whole)
        pool = Pool(whole.prompts(pooled), prompts[pooled], step)
        print(f"{len(pool.prompts.unique())} prompts")
        for name in names:
            print(f"\n{name}\n")
            TABLES[name](pool, seconds)


if __name__ == "__main__":
    main(float((sys.argv[1:] or ["60"])[0]), sys.argv[2:] or list(TABLES))
