"""Seeded steps for the objective's tests, as tensors for the code and as lists for the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sharpscope.objective import Method, StepTensors, TokenWeight, estimate_advantages, gradient_mass, token_weights
from tests.oracles.objective import Batch

LIMIT = 9


@dataclass
class Case:
    """A step, the current policy's log-probabilities and everything a loss may ask for."""

    reward: Tensor
    step: StepTensors
    now: Tensor
    reference: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)  # of the reward

    @property
    def mask(self) -> Tensor:
        return self.step.mask.bool()

    @cached_property
    def leaf(self) -> Tensor:
        """`now` in float64, for derivatives."""
        return self.now.detach().double().requires_grad_()


def make_case(
    method: Method,
    seed: int = 0,
    *,
    progress: float = 0.25,
    rows: int = 8,
    places: int = 6,
    garbage: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Three groups (both signs, one without variance), holes in the mask, padding, off-policy ratios on both sides."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    group = torch.tensor([0, 0, 0, 5, 5, 5, 2, 2])[:rows]
    reward = normal(rows)
    reward[group == 2] = 0.1  # no variance; 0.1 is not exact in binary
    lengths = torch.randint(1, places + 1, (rows,), generator=g)
    lengths[0] = places
    mask = torch.arange(places)[None] < lengths[:, None]
    mask[0, 2] = False  # text that a tool returned
    old = -3 * torch.rand(rows, places, generator=g, dtype=torch.float64) - 1e-3
    behavior = old + 0.02 * normal(rows, places)
    scale = torch.tensor([0.3, 1e-4, 0.6, 0.3, 1e-4, 0.3, 0.3, 0.3], dtype=torch.float64)[:rows, None]
    now = behavior + scale * normal(rows, places)
    now[0, 0] = behavior[0, 0] + 2.0
    now[3, 0] = behavior[3, 0] - 2.0
    tensors = {
        "behavior_logp": behavior,
        "logp": old,
        "logit": 14 + 6 * normal(rows, places),
        "entropy": 2 * torch.rand(rows, places, generator=g, dtype=torch.float64),
        # from π² (the rest spread thin) to π² + (1 − π)² (the rest on one token)
        "collision": old.exp() ** 2 + (1 - old.exp()) ** 2 * torch.rand(rows, places, generator=g, dtype=torch.float64),
        "polarity": normal(rows, places),
    }
    reference = old + 0.3 * normal(rows, places)
    another = torch.Generator().manual_seed(seed + 1)  # of its own: the other values stay what they were
    far = torch.tensor([0.15, 0.02], dtype=torch.float64).repeat(4)[:rows, None]
    tensors["sampler_logp"] = behavior + far * torch.randn(rows, places, generator=another, dtype=torch.float64)
    other = torch.Generator().manual_seed(seed + 2)
    proxy = old + 0.3 * torch.rand(rows, places, generator=other, dtype=torch.float64)  # renormalized: more than π_old
    proxy[torch.rand(rows, places, generator=other) < 0.3] = -torch.inf  # or left out
    tensors["proxy_logp"] = proxy
    third = torch.Generator().manual_seed(seed + 3)
    tensors["curvature"] = torch.rand(rows, places, 2, generator=third, dtype=torch.float64) * torch.tensor(
        [0.03, 2e-4]
    )
    tensors["curvature"][..., 0] -= 0.015
    if garbage:  # values outside the mask must never matter
        for value in (*tensors.values(), now, reference):
            shape = (int((~mask).sum()), *value.shape[2:])
            value[~mask] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)[
                torch.randint(0, 3, shape, generator=g)
            ]
    form = torch.randint(0, 2, (rows,), generator=g).double() - 0.3
    parts = {"answer": reward - form, "format": form}
    advantage = estimate_advantages(
        method.advantage,
        reward,
        group,
        mask,
        parts=parts,
        correct=reward > reward.median(),
        logp=old,
        collision=tensors["collision"],
    )
    squared = (1 - old.exp()) ** 2 + tensors["collision"] - old.exp() ** 2  # ‖p − e_y‖²
    step = StepTensors(
        mask=mask,
        group=group,
        advantage=advantage.to(dtype),
        progress=progress,
        gradient_mass=gradient_mass(method, mask, advantage, squared.sqrt()).to(dtype),
        **{name: value.to(dtype) for name, value in tensors.items()},
    )
    return Case(reward, step, now.to(dtype), reference.to(dtype), parts)


def plain_step(mask: Tensor, group: Tensor, advantage: Tensor, logp: Tensor, **given: Tensor | None) -> StepTensors:
    """A step under π_old with log-probabilities `logp`, and NaN for statistics that are not given."""
    names = ("logit", "entropy", "collision", "polarity")
    unused = torch.full(mask.shape, torch.nan, dtype=logp.dtype)
    return StepTensors(mask, group, advantage, logp, logp, **(dict.fromkeys(names, unused) | given))


def as_batch(case: Case, *, beta: float = 0.0, choose=None) -> Batch:
    """The same as lists of Python floats; the current log-probabilities become tensors."""
    step = case.step
    return Batch(
        reward=case.reward.tolist(),
        group=step.group.tolist(),
        mask=step.mask.tolist(),
        behavior=step.behavior_logp.tolist(),
        sampler=(step.behavior_logp if step.sampler_logp is None else step.sampler_logp).tolist(),
        old=step.logp.tolist(),
        logit=step.logit.tolist(),
        entropy=step.entropy.tolist(),
        polarity=step.polarity.tolist(),
        now=[list(row) for row in case.leaf],
        reference=case.reference.tolist(),
        parts={name: part.tolist() for name, part in case.parts.items()},
        collision=step.collision.tolist(),
        proxy=step.proxy_logp.tolist(),
        curvature=step.curvature.tolist(),
        limit=LIMIT,
        beta=beta,
        progress=step.progress,
        choose=choose,
    )


def step_of(progress: float = 0.0, **columns: list[float]) -> StepTensors:
    return StepTensors.from_columns(
        progress=progress, **{k: torch.tensor(v, dtype=torch.float64) for k, v in columns.items()}
    )


def weights_of(shaping: TokenWeight, step: StepTensors) -> list[float]:
    return token_weights(shaping, step).flatten().tolist()
