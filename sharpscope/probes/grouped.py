"""m-sharpness: every group of m examples has its own worst direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sharpscope.errors import UserError
from sharpscope.probes.estimate import Estimate
from sharpscope.probes.perturbation import Sharpness, SharpnessKind, sharpness, sharpness_of
from sharpscope.probes.surface import LossFn, Surface


@dataclass(frozen=True)
class MSharpness:
    """Mean over groups of m examples of each group's own sharpness (m-sharpness, arXiv 2010.01412 section 4.1).

    Attributes:
        value: mean over the groups.
        std_error: its standard error over the prompts that the groups lie in, NaN with one prompt; over the groups as if they
            were independent where no prompts are given.
        first_order: mean of the groups' own rho·‖T∘∇L_i‖.
        groups: one `Sharpness` each.
    """

    value: float
    std_error: float
    first_order: float
    groups: tuple[Sharpness, ...]

    def estimates(self, m: int, probe: str = "perturbation") -> list[Estimate]:
        """One row, quantity `m<m>_<kind>`."""
        one = self.groups[0]
        bad = [group.why for group in self.groups if group.converged is False]
        converged = False if bad else one.converged
        why = f"{len(bad)} of {len(self.groups)} groups: {bad[0]}" if bad else ""
        seconds = sum(group.seconds for group in self.groups)
        name = f"m{m}_{one.quantity}"
        return [
            Estimate(
                probe,
                name,
                self.value,
                self.std_error,
                len(self.groups),
                one.rho,
                converged,
                seed=one.seed,
                seconds=seconds,
                why=why,
            ),
            Estimate(
                probe,
                f"{name}_first_order",
                self.first_order,
                rho=one.rho,
                seed=one.seed,
                why=why if math.isnan(self.first_order) else "",
            ),
        ]


def m_sharpness(
    loss_fns: Sequence[LossFn],
    parameters: Sequence[Tensor],
    rho: float,
    kind: SharpnessKind = "sam",
    steps: int = 20,
    seed: int = 0,
    **options: bool | int | float | str,
) -> MSharpness:
    """Mean of `sharpness` over closures, one for each group of m examples; other arguments as for `sharpness`.

    Raises:
        UserError: fewer than 2 groups (no standard error), or as `sharpness` does.
    """
    return _mean(
        [sharpness(loss_fn, parameters, rho, kind, steps, seed, **options) for loss_fn in loss_fns]  # type: ignore[arg-type]
    )


def m_sharpness_of(
    surfaces: Sequence[Surface],
    rho: float,
    kind: SharpnessKind = "sam",
    *,
    steps: int = 20,
    seed: int = 0,
    prompts: Sequence[int] | None = None,
) -> MSharpness:
    """`m_sharpness` of guarded surfaces, one for each group.

    Args:
        surfaces, rho, kind, steps, seed: as for `m_sharpness`.
        prompts: the prompt that each group lies in: groups of one prompt are not independent. None: groups span prompts,
            and count as independent.
    """
    return _mean([sharpness_of(surface, rho, kind, steps=steps, seed=seed) for surface in surfaces], prompts)


def _mean(groups: list[Sharpness], prompts: Sequence[int] | None = None) -> MSharpness:
    if len(groups) < 2:
        raise UserError(f"m, {len(groups)} groups: at least 2 (fewer examples per group, or more examples)")
    values = torch.tensor([group.value for group in groups], dtype=torch.float64)
    value, first = values.mean(), sum(group.first_order for group in groups) / len(groups)
    _, cluster = torch.tensor(range(len(groups)) if prompts is None else prompts).unique(return_inverse=True)
    clusters = int(cluster.max()) + 1
    if clusters < 2:
        return MSharpness(float(value), math.nan, first, tuple(groups))
    # What each prompt gives the mean: its own groups' mean where all prompts have equally many groups.
    share = torch.bincount(cluster).double() * clusters / len(groups)
    total = torch.zeros(clusters, dtype=torch.float64).index_add_(0, cluster, values)
    means = total * (clusters / len(groups)) + value * (1 - share)
    return MSharpness(float(value), float(means.std()) / math.sqrt(clusters), first, tuple(groups))
