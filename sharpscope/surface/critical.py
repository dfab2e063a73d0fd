"""Critical sharpness: the learning rate at which a step along the optimizer's update stops lowering the loss.

For an update θ ← θ − η·Δ, the critical learning rate η_c is the smallest η > 0 with L(θ − η·Δ) > L(θ), and the critical
sharpness is λ_c = 2/η_c (Kalra et al., arXiv 2601.16979). On a quadratic loss λ_c = ΔᵀHΔ/Δᵀg, at most the largest eigenvalue
of the (preconditioned) Hessian. It needs forward passes only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.policy.directions import inner
from sharpscope.policy.guard import random_state
from sharpscope.policy.sharding import is_shard, local_part, reshard, sum_over_parts
from sharpscope.surface.estimate import Estimate
from sharpscope.surface.intervals import crossing_interval
from sharpscope.tokens.optimizer_steps import coming_step

Outcome = Literal["found", "not descent", "no crossing", "flat", "not finite", "unresolved"]
EXPAND = 4.0  # largest factor between two step sizes while no crossing is bracketed
RANGE = 2.0**20  # largest and smallest step size tried, relative to the guess
NEAR = 1.5  # factor within which a step size replaces another one for an interval
BLOCK = 2**18  # weights whose rounding is summed at once: larger copies in float64 are slow
ROUNDING = 0.05
"""Relative error of the step, from rounding to the parameters' dtype, above which a result is not reliable."""


@dataclass(frozen=True, kw_only=True)
class CriticalSharpness:
    """What `critical_sharpness` found.

    The outcome is `found`; `not descent`: the loss rises before it falls by more than rounding; `no crossing`: no η up to `lower`
    raises the loss; `flat`: the loss changes by rounding only, as where a clipped surrogate has no gradient; `not finite`: L(θ) is
    not finite; or `unresolved`: the evaluations were used up before the bracket was narrow enough.
    """

    value: float  # λ_c = 2/η_c; NaN unless `outcome` is `found`
    lr: float  # η_c, interpolated within the bracket [learning rate]
    # largest η seen whose loss is not above L(θ), below the crossing; 0 if there is none
    lower: float
    upper: float  # smallest η seen whose loss is above L(θ); infinite if there is none
    outcome: Outcome
    slope: float  # Δᵀg, the decrease of the loss per unit of η at θ; as given, else of the smallest η seen
    loss: float  # L(θ)
    depth: float  # largest decrease of the loss seen along the direction
    evaluations: int  # number of losses computed
    rounding: float  # relative error of the step θ − η_c·Δ from rounding to the parameters' dtype; NaN if not found
    why: str  # reason why `value` is not reliable; empty if it is
    seconds: float
    prompts: int | None = None  # number of prompts, if the loss was given by prompt
    # 95 % interval of `lr` over prompts with Δ fixed (see `crossing_interval`); NaN if not known
    interval: tuple[float, float] = (math.nan, math.nan)

    @property
    def converged(self) -> bool:
        """Whether `value` is reliable."""
        return not self.why

    def estimates(self) -> list[Estimate]:
        """Rows `critical_sharpness` (residual: half the width of its bracket) and `update_slope`."""
        found = self.outcome == "found"
        # 2/η, which falls with η
        sharpest = [2 / end if end else math.inf for end in reversed(self.interval)]
        undefined = (
            "" if math.isfinite(self.slope) else self.why or "no loss below the smallest step"
        )
        value = Estimate(
            "critical",
            "critical_sharpness",
            self.value,
            residual=1 / self.lower - 1 / self.upper if found else math.nan,
            converged=self.converged,
            why=self.why,
            prompts=self.prompts,
            samples=self.evaluations,
            low=sharpest[0],
            high=sharpest[1],
            seconds=self.seconds,
        )
        return [value, Estimate("critical", "update_slope", self.slope, why=undefined)]


def critical_sharpness(
    loss_fn: Callable[[], Tensor | float],
    parameters: nn.Module | Sequence[Tensor],
    direction: Sequence[Tensor | None],
    *,
    guess: float,
    slope: float | None = None,
    start: Tensor | float | None = None,
    noise: float | None = None,
    tolerance: float = 1 / 16,
    max_evaluations: int = 40,
    interval: bool = True,
) -> CriticalSharpness:
    """The critical sharpness of a loss along an update, by a line search of about six forward passes (two more for an interval).

    L(θ − η·Δ) is computed at the guess, then at growing or shrinking η until L(θ) is bracketed, then inside the bracket until
    1 − lower/upper ≤ `tolerance`, by secants of (L(θ − η·Δ) − L(θ))/η, which is linear in η for a quadratic loss, and bisection.
    A loss that crosses L(θ) several times can have an earlier crossing between two steps tried.

    Weights (moved in place) and random state are restored bitwise, also if this raises. Choose eval mode, and keep what the loss
    treats as constants (old log-probabilities, advantages, masks, the batch) fixed in the closure: a loss that takes the present
    log-probabilities as the old ones is constant, and the result is `flat`.

    With several processes each must call this, with a `loss_fn` that returns the loss over all of them; the value of rank 0 is
    used. For parameters sharded by FSDP2 pass the model, whose gathered weights must be freed after each move.

    Args:
        loss_fn: zero-argument closure that returns the scalar loss, or one value for each prompt, (k,), whose mean is the loss, for
            an interval over prompts; called without gradients.
        parameters: a model, for all of its trainable parameters, or the tensors to move.
        direction: Δ, one tensor (or None: not moved) for each parameter, local shards or whole DTensors for sharded ones; see
            `update_direction`. The update is θ ← θ − η·Δ.
        guess: first η to try, such as the learning rate or the last `lr` found.
        slope: Δᵀg if the gradient is known, which saves about one evaluation and detects Δᵀg ≤ 0 without any.
        start: L(θ) if already computed in the same way, by prompt if `loss_fn` is, which saves an evaluation.
        noise: differences of the loss up to this are treated as rounding; None: relative to L(θ), 4 times the resolution of the
            loss's dtype, or an eighth of that of the parameters' if this is larger. Give it for losses near 0 and for autocast.
        tolerance: relative width of the bracket.
        max_evaluations: largest number of losses computed, at least 4.
        interval: whether to compute an interval over prompts, by two more losses. It means something where Δ does not depend on
            the prompts; the loss of the batch that an update was made from rises later than that of other prompts.

    Raises:
        UserError: a wrong argument, or a loss that is neither one number nor a vector.

    Examples:
        >>> import torch
        >>> import sharpscope
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> found = sharpscope.critical_sharpness(lambda: 1.5 * (w**2).sum(), [w], [3 * w.detach()], guess=0.1)
        >>> round(found.value, 3), round(found.lr, 3)  # of 3·w²/2 along its gradient: the curvature, and 2 / 3
        (3.0, 0.667)
    """
    _check_arguments(guess, tolerance, max_evaluations)
    began = time.perf_counter()
    line = _Line(loss_fn, parameters, direction)
    try:
        loss = line.loss(0.0) if start is None else line.noted(0.0, start)
        if noise is None:
            noise = max(4 * line.loss_resolution, line.resolution / 8) * abs(loss)
        left = max_evaluations - line.evaluations
        search = _Search(lambda eta: line.loss(eta) - loss, noise, slope, tolerance, left)
        outcome: Outcome = "not descent" if math.isfinite(loss) else "not finite"
        if math.isfinite(loss) and not (slope is not None and slope <= 0):
            outcome = search.run(guess)
        root = search.root
        rounding = math.nan
        ends = (math.nan, math.nan)
        if outcome == "found":
            rounding = line.rounding(root)
        if outcome == "found" and interval:
            line.widen(root, max_evaluations)
            ends = crossing_interval(line.by_prompt, root)
    finally:
        line.place(0.0)
    return CriticalSharpness(
        value=2 / root,
        lr=root,
        lower=search.lower,
        upper=search.upper,
        outcome=outcome,
        slope=search.first_slope if slope is None else slope,
        loss=loss,
        depth=search.depth,
        evaluations=line.evaluations,
        rounding=rounding,
        why=_reason(outcome, loss, search, noise, rounding),
        seconds=time.perf_counter() - began,
        prompts=next(map(len, line.by_prompt.values()), None),
        interval=ends,
    )


def _check_arguments(guess: float, tolerance: float, max_evaluations: int) -> None:
    if not (guess > 0 and math.isfinite(guess)):
        raise UserError(f"guess, {guess}: must be positive and finite; use the learning rate")
    if not 0 < tolerance < 1 or max_evaluations < 4:
        raise UserError(
            f"tolerance {tolerance}, max_evaluations {max_evaluations}: must be in (0, 1), and at least 4"
        )


def _reason(
    outcome: Outcome,
    loss: float,
    search: _Search,
    noise: float,
    rounding: float,
) -> str:
    """Why there is no reliable value; empty if there is one."""
    slope = search.slope if search.slope is not None else search.first_slope
    return {
        "found": f"rounding to the parameters' dtype changes the step by {rounding:.0%}; measure in float32"
        if rounding > ROUNDING
        else "",
        "not finite": f"the loss is {loss}",
        "not descent": f"the update raises the loss at once: slope Δᵀg = {slope:.2g} is not positive"
        if not slope > 0
        else f"the loss rises before it falls by more than {noise:.1g} (rounding), although its slope Δᵀg = {slope:.2g} is positive",
        "no crossing": f"no bracket: the loss is not above its start for learning rates up to {search.lower:.2g}",
        "flat": f"flat: the loss changes by at most {noise:.1g} along the update (rounding), as a clipped surrogate does",
        "unresolved": f"the bracket {search.lower:.3g} to {search.upper:.3g} needs more evaluations than were allowed",
    }[outcome]


@dataclass
class _Search:
    """Root of f(η)/η for f(η) = L(θ − η·Δ) − L(θ), from f alone."""

    f: Callable[[float], float]
    noise: float
    slope: float | None
    tolerance: float
    left: int  # evaluations
    lower: float = 0.0
    upper: float = math.inf
    depth: float = 0.0
    root: float = math.nan
    quotient: dict[float, float] = field(default_factory=dict)  # f(η)/η of each η tried

    @property
    def first_slope(self) -> float:
        """−f(η)/η at the smallest η tried; NaN without one."""
        return -self.quotient[min(self.quotient)] if self.quotient else math.nan

    def run(self, guess: float) -> Outcome:
        """Bracket the crossing, narrow the bracket, and set `root`."""
        eta = guess
        while not (self.lower > 0 and math.isfinite(self.upper)):
            if not self.left or not guess / RANGE <= eta <= guess * RANGE:
                return self._without_bracket()
            self._try(eta)
            eta = self._outside()
        width = math.inf
        while 1 - self.lower / self.upper > self.tolerance:
            if not self.left:
                return "unresolved"
            stalled = (narrow := math.log(self.upper / self.lower)) > width / 2
            width = narrow
            self._try(math.sqrt(self.lower * self.upper) if stalled else self._inside())
        if self.depth <= self.noise:  # a bracket that starts at the crossing shows no decrease
            if not self.left:
                return "unresolved"
            self._try(self.lower / 2)
            if self.depth <= self.noise:
                return self._without_bracket()
        root = self._secant()
        self.root = (
            (self.lower + self.upper) / 2
            if root is None
            else min(max(root, self.lower), self.upper)
        )
        return "found"

    def _try(self, eta: float) -> None:
        self.left -= 1
        rise = self.f(eta)
        if not math.isfinite(rise):
            rise = math.inf  # above the start
        self.quotient[eta] = rise / eta
        self.depth = max(self.depth, -rise)
        if rise > self.noise:
            self.upper = min(self.upper, eta)
            self.lower = self.lower if self.lower < self.upper else 0.0
        elif eta < self.upper:
            self.lower = max(self.lower, eta)

    def _without_bracket(self) -> Outcome:
        """Why no crossing was found among the η tried."""
        values = [abs(quotient * eta) for eta, quotient in self.quotient.items()]
        if self.depth > self.noise:
            return "no crossing" if math.isinf(self.upper) else "unresolved"
        return "flat" if all(value <= self.noise for value in values) else "not descent"

    def _secant(self) -> float | None:
        """Zero of the line through the quotients next to the crossing, or through the two nearest to it; None if undefined."""
        known = sorted(
            ([] if self.slope is None else [(0.0, -self.slope)]) + list(self.quotient.items())
        )
        known = [(eta, value) for eta, value in known if math.isfinite(value)]
        below = [point for point in known if point[0] <= self.lower]
        above = [point for point in known if point[0] >= self.upper]
        pair = (below[-1:] + above[:1]) if below and above else (below[-2:] or above[:2])
        if len(pair) < 2:
            return None
        (a, at_a), (b, at_b) = pair
        if at_b <= at_a:
            return None
        return a - at_a * (b - a) / (at_b - at_a)

    def _outside(self) -> float:
        """The next η while all losses are on one side of L(θ)."""
        margin = self.tolerance / 3
        root = self._secant()
        # Where the quotient is far from a line, secants creep: after one of them, step by at least a factor of 2. Not where the
        # loss has risen again by half of its fall: the first crossing is near, and the loss may fall again behind it.
        least = 1 + self.tolerance if len(self.quotient) < 2 else 2.0
        if math.isinf(self.upper):
            if self.depth > self.noise and -self.quotient[self.lower] * self.lower < self.depth / 2:
                return 1.25 * self.lower
            if root is None:
                return 2 * self.lower
            return min(max(root * (1 + margin), self.lower * least), EXPAND * self.lower)
        if root is None or root <= 0:
            return self.upper / 2
        return max(min(root * (1 - margin), self.upper / least), self.upper / EXPAND**2)

    def _inside(self) -> float:
        """The next η in the bracket: next to the secant's zero, on the side of the farther end."""
        margin = self.tolerance / 3
        root = self._secant()
        middle = math.sqrt(self.lower * self.upper)
        if root is None or not self.lower < root < self.upper:
            return middle
        eta = root * (1 + margin) if self.upper / root > root / self.lower else root * (1 - margin)
        return eta if self.lower < eta < self.upper else middle


class _Line:
    """Evaluates the loss at θ − η·Δ."""

    def __init__(
        self,
        loss_fn: Callable[[], Tensor | float],
        parameters: nn.Module | Sequence[Tensor],
        direction: Sequence[Tensor | None],
    ) -> None:
        self.loss_fn, self.evaluations = loss_fn, 0
        # (k,) float64 for each η, if the loss is given by prompt
        self.by_prompt: dict[float, Tensor] = {}
        self.model = parameters if isinstance(parameters, nn.Module) else None
        tensors = trainable(parameters)
        if self.model is None and any(is_shard(tensor) for tensor in tensors):
            raise UserError(
                "parameters: some are sharded (FSDP2); pass the model in place of its parameters"
            )
        if len(tensors) != len(direction):
            raise UserError(
                f"direction, {len(direction)} tensors: one for each of the {len(tensors)} parameters"
            )
        # parameter, its weights here, their copy, Δ
        self.moves: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for tensor, part in zip(tensors, direction, strict=True):
            if part is None:
                continue
            weights = local_part(tensor)
            along = local_part(part)
            if weights.shape != along.shape:
                given = f"direction, a tensor of shape {tuple(part.shape)}"
                raise UserError(f"{given}: its parameter's is {tuple(tensor.shape)}")
            self.moves.append((tensor, weights, weights.clone(), along))
        self.resolution = max((torch.finfo(w.dtype).eps for _, w, _, _ in self.moves), default=0.0)
        self.loss_resolution = torch.finfo(torch.float64).eps

    def loss(self, eta: float) -> float:
        """L(θ − η·Δ), the same in every process."""
        self.place(eta)
        self.evaluations += 1
        with torch.no_grad(), random_state():
            return self.noted(eta, self.loss_fn())

    def noted(self, eta: float, value: Tensor | float) -> float:
        """A loss as one number, the same in every process; values by prompt are kept."""
        if isinstance(value, Tensor):
            if value.numel() < 1 or value.dim() > 1 or not value.is_floating_point():
                given = f"loss_fn, a tensor of shape {tuple(value.shape)}"
                raise UserError(
                    f"{given}: must return one floating-point number, or a vector of one for each prompt"
                )
            self.loss_resolution = torch.finfo(value.dtype).eps
            if value.dim() == 1:
                each = self.by_prompt[eta] = distributed.broadcast(value.detach().double().cpu())
                return float(each.mean())
        return distributed.broadcast(float(value))

    def widen(self, crossing: float, most: int) -> None:
        """Losses at half and twice the crossing for its interval, where they are given by prompt and nothing near was tried."""
        several = len(self.by_prompt.get(0.0, ())) > 1
        for eta in (crossing / 2, crossing * 2) if several else ():
            near = any(eta / NEAR <= tried <= eta * NEAR for tried in self.by_prompt)
            if not near and self.evaluations < most:
                self.loss(eta)

    def rounding(self, eta: float) -> float:
        """‖round(θ − η·Δ) − (θ − η·Δ)‖ / ‖η·Δ‖ over all processes."""

        def squares() -> Iterator[tuple[Tensor, tuple[float, float]]]:
            """A parameter, and squared norms of rounding and step in a block of its weights."""
            for parameter, _, start, along in self.moves:
                for begin, part in zip(
                    start.flatten().split(BLOCK),
                    along.flatten().split(BLOCK),
                    strict=True,
                ):
                    step = eta * part.double()
                    exact = begin.double() - step
                    lost = (exact.to(start.dtype).double() - exact).square().sum()
                    yield parameter, (float(lost), float(step.square().sum()))

        lost, length = sum_over_parts(squares(), 2)
        return math.sqrt(lost / length) if length > 0 else 0.0

    @torch.no_grad()
    def place(self, eta: float) -> None:
        """Set the weights to θ − η·Δ."""
        if self.model is not None:
            # a forward pass without a backward pass leaves gathered weights, which would be stale
            reshard(self.model)
        for _, weights, start, along in self.moves:
            wide = torch.promote_types(start.dtype, torch.float32)
            weights.data.copy_(start if eta == 0 else start.to(wide) - eta * along.to(wide))


def trainable(parameters: nn.Module | Sequence[Tensor]) -> list[Tensor]:
    """The trainable parameters of a model in its order, of a sharded one the shards; or the tensors as given."""
    if isinstance(parameters, nn.Module):
        # a forward pass without a backward pass leaves gathered weights, which have no gradient
        reshard(parameters)
        return [parameter for parameter in parameters.parameters() if parameter.requires_grad]
    return list(parameters)


def update_direction(
    optimizer: torch.optim.Optimizer,
    parameters: nn.Module | Sequence[nn.Parameter],
    clip_factor: float = 1.0,
) -> list[Tensor | None]:
    """Δ of the step θ ← θ − lr·Δ that `optimizer.step()` will take, from `.grad` and the optimizer's state.

    Call it after the backward pass and before the step, whose state is not changed. Momentum, bias correction and decoupled
    weight decay are part of Δ; where groups have different learning rates, lr is the largest of them. For another optimizer
    take Δ = (θ_before − θ_after)/lr from a copy of the weights.

    Args:
        optimizer: AdamW, Adam or SGD of `torch.optim`.
        parameters: a model, for all of its trainable parameters, or parameters of the optimizer.
        clip_factor: factor by which clipping will multiply the gradients; 1 if `.grad` is clipped already.

    Returns:
        A tensor for each parameter, sharded for sharded ones; None where `.grad` is None, which the optimizer does not move.

    Raises:
        UserError: another optimizer, or an option that changes the step.

    Examples:
        >>> import torch
        >>> import sharpscope
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> optimizer = torch.optim.AdamW([w], lr=0.01, weight_decay=0.0)
        >>> (w**2).sum().backward()
        >>> [d.round(decimals=3) for d in sharpscope.update_direction(optimizer, [w])]  # at first the gradient's sign
        [tensor([ 1., -1.])]
    """
    tensors = trainable(parameters)
    steps = coming_step(optimizer, tensors, [p.grad for p in tensors], clip_factor, per_lr=True)
    return [None if step is None else -step for step in steps]


def update_slope(
    parameters: nn.Module | Sequence[Tensor],
    direction: Sequence[Tensor | None],
    factor: float = 1.0,
) -> float:
    """Δᵀg with g = `.grad`/factor, summed in float64 over all processes that hold shards; positive for a descent direction."""
    return inner([parameter.grad for parameter in trainable(parameters)], direction) / factor
