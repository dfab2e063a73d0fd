"""How far one gradient points from another: rotation, scale, and the rotation that the batch's noise alone makes.

Gradients are lists of tensors like the trainable parameters; None counts as zeros. Parts of sharded tensors (FSDP2) are
summed over the processes, so every process must call these functions; other tensors are the same in every process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sharpscope.policy.sharding import local_part, sum_over_parts

BLOCK = 2**17
"""Numbers that are read as float64 at once on a CPU: a whole copy takes ten times as long."""
NOISE_BOUND = 90.0
"""The largest noise rotation that can be estimated [degrees]; at it the estimate says "at least", not "equal"."""

Gradient = Iterable[Tensor | None]
Terms = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""Tensors like the trainable parameters, in their order."""


@dataclass(frozen=True)
class Rotation:
    """A vector compared with a reference."""

    angle: float  # between the two, in [0, 180] [degrees]; NaN if one is zero or not finite
    scale: float  # norm of the vector over that of the reference; NaN if the reference is zero


@torch.no_grad()
def rotation(vector: Gradient, reference: Gradient) -> Rotation:
    """Angle and norm ratio between two gradients or two updates, over all parameters in float64.

    The angle is 2·atan2(‖â − b̂‖, ‖â + b̂‖) of the unit vectors, which is exact for equal vectors, where arccos has errors
    of 1e-6 degrees. The arguments may be generators: one tensor of each is read at a time.
    """

    def terms(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """Squared lengths of both, of their difference and of their sum."""
        difference = a - b
        total = a + b
        return a @ a, b @ b, difference @ difference, total @ total

    aa, bb, minus, plus = _sums(vector, reference, terms, count=4)
    a, b = math.sqrt(aa), math.sqrt(bb)
    if not (0 < a < math.inf and 0 < b < math.inf):
        return Rotation(math.nan, a / b if b > 0 else math.nan)
    gap = (a - b) ** 2  # ‖â ∓ b̂‖²·‖a‖‖b‖ = ‖a ∓ b‖² − (‖a‖ − ‖b‖)²
    angle = 2 * math.atan2(math.sqrt(max(minus - gap, 0.0)), math.sqrt(max(plus - gap, 0.0)))
    return Rotation(math.degrees(angle), a / b)


@torch.no_grad()
def noise_rotation(first: Gradient, second: Gradient, share: float = 0.5) -> float:
    """Estimated angle between a batch's gradient and the expected gradient, from the gradients of two halves [degrees].

    g = g_A + g_B is the gradient of the whole batch, g_A and g_B are the sums over two parts with independent prompts that
    hold the shares f and 1 − f of the prompts. Then E⟨g_A, g_B⟩ = f·(1 − f)·‖E g‖², free of the noise's bias, and

        noise_rotation = arccos √( max(0, ⟨g_A, g_B⟩) / (f·(1 − f)·‖g_A + g_B‖²) ),

    the angle whose squared cosine is ‖E g‖²/E‖g‖². `NOISE_BOUND` if ⟨g_A, g_B⟩ ≤ 0, which says that no common direction can be
    seen, not that the noise turns the gradient by 90°; NaN if g is zero or not finite.
    """
    product, whole = _sums(first, second, lambda a, b: (a @ b, (a + b) @ (a + b)), count=2)
    if not (0 < whole < math.inf):
        return math.nan
    return math.degrees(
        math.acos(math.sqrt(min(max(product, 0.0) / (share * (1 - share) * whole), 1.0)))
    )


@torch.no_grad()
def inner(first: Gradient, second: Gradient) -> float:
    """Inner product of two gradients over all parameters, in float64."""
    return _sums(first, second, lambda a, b: (a @ b,), count=1)[0]


def _sums(first: Gradient, second: Gradient, terms: Terms, *, count: int) -> list[float]:
    """Sums over all parameters of `terms` of two flat float64 tensors."""

    def each() -> Iterator[tuple[Tensor, list[float]]]:
        """A part of each pair, which has its place, and the terms of the pair."""
        for a, b in zip(first, second, strict=True):
            like = b if a is None else a
            if like is not None:
                pair = (
                    local_part(torch.zeros_like(like) if x is None else x).flatten().double()
                    for x in (a, b)
                )
                yield like, [float(value) for value in terms(*pair)]

    return sum_over_parts(each(), count)


def dot(first: Tensor, second: Tensor) -> float:
    """⟨a, b⟩ of two tensors, accumulated in float64; on a CPU in blocks, as in `length`."""
    size = BLOCK if first.device.type == "cpu" else max(1, first.numel())
    blocks = zip(first.reshape(-1).split(size), second.reshape(-1).split(size), strict=True)
    return sum((float(a.double() @ b.double()) for a, b in blocks), 0.0)


def length(vector: Tensor) -> float:
    """‖v‖ accumulated in float64: a float32 sum of 1e8 squares on a CPU is 3 % too small."""
    if vector.device.type != "cpu":
        return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    blocks = vector.detach().reshape(-1).split(BLOCK)
    return math.sqrt(sum(float(block @ block) for block in map(Tensor.double, blocks)))
