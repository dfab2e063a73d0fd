"""Seeded steps for the objective's tests, as tensors for the code and as lists for the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sharpscope.methods import Method, TokenWeight
from sharpscope.methods.advantages import estimate_advantages
from sharpscope.methods.loss import gradient_mass
from sharpscope.methods.plan import StepTensors, token_weights
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
    garbage: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Three groups (both signs, one without variance), holes in the mask, padding, off-policy ratios on both sides."""
    g = torch.Generator().manual_seed(seed)
    size, random = (8, 6), {"generator": g, "dtype": torch.float64}
    group, reward = torch.tensor([0, 0, 0, 5, 5, 5, 2, 2]), torch.randn(8, **random)
    reward[group == 2] = 0.1  # no variance; 0.1 is not exact in binary
    lengths = torch.randint(1, 7, (8,), generator=g)
    lengths[0] = 6
    mask = torch.arange(6)[None] < lengths[:, None]
    mask[0, 2] = False  # text that a tool returned
    old = -3 * torch.rand(size, **random) - 1e-3
    behavior = old + 0.02 * torch.randn(size, **random)
    scale = torch.tensor([0.3, 1e-4, 0.6, 0.3, 1e-4, 0.3, 0.3, 0.3], dtype=torch.float64)[:, None]
    now = behavior + scale * torch.randn(size, **random)
    now[0, 0], now[3, 0] = behavior[0, 0] + 2.0, behavior[3, 0] - 2.0
    proxy = old + 0.3 * torch.rand(size, **random)  # renormalized: more than π_old
    proxy[torch.rand(size, generator=g) < 0.3] = -torch.inf  # or left out
    far = torch.tensor([0.15, 0.02], dtype=torch.float64).repeat(4)[:, None]
    tensors = {
        "behavior_logp": behavior,
        "logp": old,
        "logit": 14 + 6 * torch.randn(size, **random),
        "entropy": 2 * torch.rand(size, **random),
        # from π² (the rest spread thin) to π² + (1 − π)² (the rest on one token)
        "collision": old.exp() ** 2 + (1 - old.exp()) ** 2 * torch.rand(size, **random),
        "polarity": torch.randn(size, **random),
        "sampler_logp": behavior + far * torch.randn(size, **random),
        "proxy_logp": proxy,
        "effect": 1e-3 * torch.randn(size, **random),
        "proximal_logp": behavior + 3 * far * torch.randn(size, **random),
        "curvature": (torch.rand(*size, 2, **random) - torch.tensor([0.5, 0.0]))
        * torch.tensor([0.03, 2e-4]),
    }
    reference = old + 0.3 * torch.randn(size, **random)
    if garbage:  # values outside the mask must never matter
        wrong = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
        for value in (*tensors.values(), now, reference):
            value[~mask] = wrong[torch.randint(0, 3, value[~mask].shape, generator=g)]
    form = torch.randint(0, 2, (8,), generator=g).double() - 0.3
    parts = {"answer": reward - form, "format": form}
    given = {
        "parts": parts,
        "correct": reward > reward.median(),
        "logp": old,
        "collision": tensors["collision"],
    }
    advantage = estimate_advantages(method.advantage, reward, group, mask, **given)
    norm = ((1 - old.exp()) ** 2 + tensors["collision"] - old.exp() ** 2).sqrt()  # ‖p − e_y‖
    tensors |= {
        "advantage": advantage,
        "gradient_mass": gradient_mass(method, mask, advantage, norm),
    }
    step = StepTensors(
        mask, group, progress=progress, **{name: value.to(dtype) for name, value in tensors.items()}
    )
    return Case(reward, step, now.to(dtype), reference.to(dtype), parts)


def plain_step(
    mask: Tensor, group: Tensor, advantage: Tensor, logp: Tensor, **given: Tensor | None
) -> StepTensors:
    """A step under π_old with log-probabilities `logp`, and NaN for statistics that are not given."""
    names = ("logit", "entropy", "collision", "polarity")
    unused = torch.full(mask.shape, torch.nan, dtype=logp.dtype)
    return StepTensors(mask, group, advantage, logp, logp, **(dict.fromkeys(names, unused) | given))


NAMES = (
    {
        "behavior": "behavior_logp",
        "sampler": "sampler_logp",
        "old": "logp",
        "proxy": "proxy_logp",
    }
    | {
        name: name
        for name in ("group", "mask", "logit", "entropy", "polarity", "collision", "curvature")
    }
    | {"proximal": "proximal_logp", "effect": "effect"}
)
"""Fields of the oracle's batch and of the step."""


def as_batch(case: Case, *, beta: float = 0.0, choose=None) -> Batch:
    """The same as lists of Python floats; the current log-probabilities become tensors."""
    known = {name: getattr(case.step, of) for name, of in NAMES.items()}
    return Batch(
        reward=case.reward.tolist(),
        now=[list(row) for row in case.leaf],
        reference=case.reference.tolist(),
        parts={name: part.tolist() for name, part in case.parts.items()},
        limit=LIMIT,
        beta=beta,
        progress=case.step.progress,
        choose=choose,
        **{name: value.tolist() for name, value in known.items() if value is not None},
    )


def step_of(progress: float = 0.0, **columns: list[float]) -> StepTensors:
    return StepTensors.from_columns(
        progress=progress, **{k: torch.tensor(v, dtype=torch.float64) for k, v in columns.items()}
    )


def weights_of(shaping: TokenWeight, step: StepTensors) -> list[float]:
    return token_weights(shaping, step).flatten().tolist()
