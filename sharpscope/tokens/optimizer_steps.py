"""The coming step Δ(g) of an optimizer as a function of the gradient g, and its transposed Jacobian.

Δ is the optimizer's rule after clipping. Clipping by the norm of some parameters has rank one, and the rules of SGD, Adam and AdamW
act on each number of the gradient alone, so that Jᵀq needs no pass through the model. With the clipped gradient h, its moments m, v
after update n, m̂ = m/(1 − β₁ⁿ), v̂ = v/(1 − β₂ⁿ) and s = √v̂ + ε, the rule of AdamW is

    Δ = −lr·m̂/s − lr·λ·θ,    ∂Δ/∂h = −lr·[(1 − β₁)/((1 − β₁ⁿ)·s) − m̂/s²·(1 − β₂)·h/((1 − β₂ⁿ)·√v̂)].

Other elementwise optimizers of `torch.optim`, and the matrices of Muon and Pion, are differentiated by autograd, any further one is refused.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sharpscope.errors import UserError, first_line
from sharpscope.policy.directions import dot, inner
from sharpscope.policy.sharding import local_part, sum_over_parts
from sharpscope.tokens.muon import Muon, matrix_step

Part = Tensor | None
"""A tensor like a parameter; None: the parameter has no gradient, and the optimizer leaves it alone."""
Settings = dict[str, Any]
"""A parameter group of an optimizer, or its state for a parameter."""
Rule = tuple[Tensor, Tensor | Callable[[Tensor], Tensor] | None]
"""Δ of a parameter, and ∂Δ/∂h if it is asked for: elementwise, or as a function from a tensor to its product with the transposed matrix."""


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Multiplies the gradients of some parameters by κ = min(1, limit/(‖g‖ + slack)), ‖g‖ the norm over all of them.

    Attributes:
        limit: largest norm.
        parameters: places in the list of parameters; None for all of them.
        slack: as in `torch.nn.utils.clip_grad_norm_`.

    Examples:
        >>> from sharpscope import Clip
        >>> clips = [Clip(limit=1.0, parameters=(0, 1)), Clip(limit=0.1, parameters=(2,))]
        >>> [clip.limit for clip in clips]  # max_grad_norm=clips in `sharpscope.effects`
        [1.0, 0.1]
    """

    limit: float
    parameters: tuple[int, ...] | None = None
    slack: float = 1e-6

    def chosen(self, parts: Sequence[Part]) -> list[Part]:
        """The parts of its parameters, None for the others."""
        if self.parameters is None:
            return list(parts)
        return [part if place in self.parameters else None for place, part in enumerate(parts)]


class ComingStep:
    """The step that `optimizer.step()` would make with some gradients; neither weights nor the optimizer's state change.

    Args:
        optimizer: of the parameters.
        parameters: trainable parameters in the model's order.
        gradients: one for each parameter, not clipped.
        clips: applied to the gradients in their order.

    Raises:
        UserError: the optimizer's step cannot be differentiated.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        gradients: Sequence[Part],
        clips: Sequence[Clip] = (),
    ) -> None:
        self.optimizer = unwrapped(optimizer)
        self.parameters = parameters
        self.clips = clips
        self.stages: list[list[Part]] = [
            list(gradients)
        ]  # the gradient before each clip and after the last
        for clip in clips:
            before = self.stages[-1]
            factor = self._factor(clip, before)
            chosen = clip.chosen(before)
            self.stages.append(
                [p if c is None else c * factor for p, c in zip(before, chosen, strict=True)]
            )
        self._groups = {
            id(p): group for group in self.optimizer.param_groups for p in group["params"]
        }
        # Trainers set defaults of their own on optimizers, so that the class is asked.
        accepted = inspect.signature(type(self.optimizer).__init__).parameters
        if "differentiable" not in accepted and not isinstance(self.optimizer, Muon):
            raise UserError(
                f"optimizer, {type(self.optimizer).__name__}: effects go through the elementwise optimizers of torch.optim, not this one"
            )

    @staticmethod
    def _factor(clip: Clip, gradients: Sequence[Part]) -> float:
        chosen = clip.chosen(gradients)
        return min(1.0, clip.limit / (math.sqrt(inner(chosen, chosen)) + clip.slack))

    @torch.no_grad()
    def steps(self) -> list[Part]:
        """Δθ of each parameter; None where it does not move."""
        return [None if rule is None else rule[0] for rule in self._rules(slopes=False)]

    @torch.no_grad()
    def pull(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """Jᵀq for a vector q like the parameters: ⟨Jᵀq, d⟩ is the first-order change of ⟨q, Δ⟩ if d is added to the gradient."""
        pulled = [
            torch.zeros_like(part) if rule is None or rule[1] is None else _times(part, rule[1])
            for part, rule in zip(vector, self._rules(slopes=True), strict=True)
        ]
        for clip, before in reversed(list(zip(self.clips, self.stages, strict=False))):
            factor = self._factor(clip, before)
            if factor == 1.0:
                continue
            gradient = clip.chosen(before)
            norm = math.sqrt(inner(gradient, gradient))
            along = inner(
                [None if g is None else p for p, g in zip(pulled, gradient, strict=True)], gradient
            )
            back = along / (norm * (norm + clip.slack))
            pulled = [
                part if part_of is None else factor * (part - back * part_of)
                for part, part_of in zip(pulled, gradient, strict=True)
            ]
        return pulled

    @property
    def is_first(self) -> bool:
        """Whether it is the first step of an optimizer that divides by a root of squared gradients.

        Then each number of the step is nearly the sign of the gradient's, whatever its size.
        """
        adaptive = "eps" in self.optimizer.defaults
        return adaptive and not any(self.optimizer.state.get(p) for p in self.parameters)

    def _rules(self, *, slopes: bool) -> Iterator[Rule | None]:
        """Δ and ∂Δ/∂h of each parameter, elementwise."""
        for parameter, h in zip(self.parameters, self.stages[-1], strict=True):
            group = self._groups.get(id(parameter))
            if group is None or h is None:
                yield None
            else:
                yield rule_of(self.optimizer, group, parameter, h, slopes=slopes)


def rule_of(
    optimizer: torch.optim.Optimizer,
    group: Settings,
    theta: Tensor,
    h: Tensor,
    *,
    slopes: bool,
) -> Rule:
    """Δ and, with `slopes`, ∂Δ/∂h of a parameter of a group with the clipped gradient h."""
    given = (group, optimizer.state.get(theta, {}), theta, h)
    if group.get("matrices"):
        return muon(*given, slopes=slopes)
    if isinstance(optimizer, torch.optim.SGD):
        return sgd(*given, slopes=slopes)
    if isinstance(optimizer, torch.optim.Adam | Muon):
        return adam(*given, slopes=slopes)
    return by_autograd(optimizer, group, theta, h, slopes=slopes)


def _times(part: Tensor, slope: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
    """The product of a part of q with ∂Δ/∂h transposed."""
    return part * slope if isinstance(slope, Tensor) else slope(part)


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside of a wrapper such as accelerate's."""
    inside = getattr(optimizer, "optimizer", None)
    return unwrapped(inside) if isinstance(inside, torch.optim.Optimizer) else optimizer


# -- rules


def adam(
    group: Settings,
    state: Settings,
    theta: Tensor,
    h: Tensor,
    *,
    slopes: bool,
) -> Rule:
    """Δ and, with `slopes`, ∂Δ/∂h of AdamW or Adam (whose weight decay is added to the gradient), also with amsgrad and maximize."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr = float(group["lr"])
    decay = float(group["weight_decay"])
    decoupled = bool(group.get("decoupled_weight_decay", False))
    sign = -1.0 if group.get("maximize") else 1.0
    g = h * sign
    if decay and not decoupled:
        g = g + decay * theta
    number = float(state.get("step", 0)) + 1
    first = 1 - beta1**number
    second = 1 - beta2**number
    m = g * (1 - beta1)
    if "exp_avg" in state:
        m += state["exp_avg"] * beta1
    v = g.square() * (1 - beta2)
    if "exp_avg_sq" in state:
        v += state["exp_avg_sq"] * beta2
    grows = None  # where v̂ depends on the gradient
    if group.get("amsgrad"):
        largest = state.get("max_exp_avg_sq")
        if largest is not None:
            grows = v >= largest
            v = torch.maximum(v, largest)
    root = (v / second).sqrt_()
    s = root + group["eps"]
    mean = m / first
    step = (mean / s).mul_(-lr)
    if decay and decoupled:
        step -= lr * decay * theta
    if not slopes:
        return step, None
    # 0 at a root of 0, where no gradient so far was another number
    slope_of_root = torch.where(root > 0, (1 - beta2) / second * g / root, 0.0)
    if grows is not None:
        slope_of_root = torch.where(grows, slope_of_root, 0.0)
    return step, ((1 - beta1) / first / s - mean / s.square() * slope_of_root).mul_(-lr * sign)


def sgd(
    group: Settings,
    state: Settings,
    theta: Tensor,
    h: Tensor,
    *,
    slopes: bool,
) -> Rule:
    """Δ and, with `slopes`, ∂Δ/∂h of SGD, with momentum, dampening and Nesterov's rule."""
    lr = float(group["lr"])
    momentum = float(group["momentum"])
    sign = -1.0 if group.get("maximize") else 1.0
    g = h * sign
    if group["weight_decay"]:
        g = g + group["weight_decay"] * theta
    rate = 1.0  # of the direction by the gradient
    buffer = state.get("momentum_buffer")
    if momentum:
        own = 1.0 if buffer is None else 1 - float(group["dampening"])
        average = g * own if buffer is None else buffer * momentum + g * own
        rate = 1 + momentum * own if group["nesterov"] else own
        g = g + momentum * average if group["nesterov"] else average
    return g * -lr, torch.full_like(h, -lr * sign * rate) if slopes else None


def muon(
    group: Settings,
    state: Settings,
    theta: Tensor,
    h: Tensor,
    *,
    slopes: bool,
) -> Rule:
    """Δ of a matrix by Muon or Pion and, with `slopes`, the product with ∂Δ/∂h transposed, by autograd through the iterations."""
    if not slopes:
        return matrix_step(group, state, theta, h), None
    with torch.enable_grad():
        given = h.detach().requires_grad_()
        step = matrix_step(group, state, theta.detach(), given)

    def back(part: Tensor) -> Tensor:
        """Jᵀq of the matrix."""
        return torch.autograd.grad(step, given, part.to(step), retain_graph=True)[0]

    return step.detach(), back


def by_autograd(
    optimizer: torch.optim.Optimizer,
    group: Settings,
    theta: Tensor,
    h: Tensor,
    *,
    slopes: bool,
) -> Rule:
    """Δ and, with `slopes`, ∂Δ/∂h of an elementwise optimizer of `torch.optim`, through its differentiable implementation."""
    options = {name: value for name, value in group.items() if name in optimizer.defaults}
    options |= {
        name: False for name in ("foreach", "fused", "capturable") if name in optimizer.defaults
    }
    options["differentiable"] = True
    with torch.enable_grad():
        gradient = h.detach().clone().requires_grad_(slopes)
        weights = theta.detach().clone()
        made = type(optimizer)([weights], **options)
        made.state[weights] = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in optimizer.state.get(theta, made.state.get(weights, {})).items()
        }
        weights.grad = gradient
        # not `made.step()`, which a learning-rate schedule or a profiler may have replaced
        type(optimizer).step(made)
        step = weights - theta.detach()
        if not slopes:
            return step.detach(), None
        (slope,) = torch.autograd.grad(step.sum(), gradient)
    # a root at 0 has no derivative; no token has a gradient where all gradients so far are 0
    return step.detach(), torch.where(h == 0, slope.nan_to_num(0.0), slope)


@torch.no_grad()
def step_of_copy(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    gradients: Sequence[Part],
) -> list[Part]:
    """Δθ that a copy of the optimizer makes with clipped gradients, by its own `step()`.

    Raises:
        UserError: the optimizer cannot be copied, or its step fails.
    """
    optimizer = unwrapped(optimizer)
    held = [p.grad for group in optimizer.param_groups for p in group["params"]]
    # gradients are not copied
    known: dict[int, Part] = {id(gradient): None for gradient in held}
    try:
        copied = copy.deepcopy(optimizer, known)
        twins = [known.get(id(p)) for p in parameters]
        for twin, gradient in zip(twins, gradients, strict=True):
            if twin is not None and gradient is not None:
                twin.grad = gradient.to(twin)
        with torch.enable_grad():
            type(optimizer).step(copied)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError) as problem:
        raise UserError(
            f"optimizer, {type(optimizer).__name__}: its step cannot be made on a copy ({first_line(problem)}), "
            "which effects need"
        ) from problem
    return [
        None if twin is None or gradient is None else twin.detach() - p.detach()
        for twin, p, gradient in zip(twins, parameters, gradients, strict=True)
    ]


@torch.no_grad()
def coming_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    clip_factor: float | Sequence[float] = 1.0,
    *,
    per_lr: bool = False,
) -> Iterator[Tensor | None]:
    """Δθ that AdamW, Adam, SGD or Muon would make with these gradients, one parameter after the other; its state is not changed.

    Sharded parameters give sharded steps.

    Args:
        optimizer: AdamW, Adam, SGD or `Muon`.
        parameters: trainable parameters in the model's order.
        gradients: one for each parameter, unclipped; None: the parameter does not move, and None is yielded.
        clip_factor: κ, which clipping multiplies the gradients by, or one for each parameter.
        per_lr: give the step divided by the largest learning rate of the groups, also where that is 0.
    """
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.SGD | Muon):
        name = type(optimizer).__name__
        raise UserError(
            f"optimizer, {name}: its step can be computed for AdamW, Adam, SGD and Muon"
        )
    factors = (
        [clip_factor] * len(parameters) if isinstance(clip_factor, int | float) else clip_factor
    )
    settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    largest = max(float(group["lr"]) for group in optimizer.param_groups)
    for parameter, gradient, factor in zip(parameters, gradients, factors, strict=True):
        group = settings.get(id(parameter))
        if group is None or gradient is None:
            yield None
            continue
        if per_lr:
            rate = float(group["lr"]) / largest if largest > 0 else 1.0
            group = {**group, "lr": rate}
        h = gradient if factor == 1.0 else gradient * factor
        yield rule_of(optimizer, group, parameter, h, slopes=False)[0]


@torch.no_grad()
def batch_share(optimizer: torch.optim.Optimizer) -> float:
    """The part of ‖Δθ‖² of the step that AdamW, Adam or SGD has just made which is the present gradient's, not the momentum's.

    In the optimizer's own metric, Σ s·Δ² with s = √v̂ + ε (SGD: s = 1), the part is Σ s·Δ_own·Δ/Σ s·Δ² with the step Δ without weight
    decay and the present gradient's term Δ_own. Parts of sharded tensors are summed over the processes. NaN for another optimizer.
    """
    optimizer = unwrapped(optimizer)

    def each() -> Iterator[tuple[Tensor, list[float]]]:
        """Each gradient, by which `sum_over_parts` knows how it is sharded, with its terms of the two sums; one at a time."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                g = parameter.grad
                if g is not None:
                    yield g, _shared_terms(optimizer, group, parameter, g)

    own, whole = sum_over_parts(each(), 2)
    return own / whole if whole > 0 else math.nan


def _shared_terms(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    g: Tensor,
) -> list[float]:
    """s·Δ_own·Δ and s·Δ² of a parameter, see `batch_share`; NaN for an optimizer that has no such step."""
    state = optimizer.state.get(parameter, {})
    rate = float(group["lr"])
    if isinstance(optimizer, torch.optim.Adam):
        beta1, beta2 = (float(beta) for beta in group["betas"])
        correction = math.sqrt(1 - beta2 ** float(state["step"]))
        root = local_part(state["exp_avg_sq"]).sqrt().div_(correction).add_(group["eps"])
        rate /= 1 - beta1 ** float(state["step"])
        average, weight = local_part(state["exp_avg"]), 1 - beta1
        scaled = average / root
    elif isinstance(optimizer, torch.optim.SGD) and "momentum_buffer" in state:
        scaled = average = local_part(state["momentum_buffer"])
        weight = 1 - float(group["dampening"])
    else:
        return [math.nan, math.nan]
    sign = -1.0 if group.get("maximize") else 1.0
    return [rate**2 * weight * sign * dot(local_part(g), scaled), rate**2 * dot(average, scaled)]
