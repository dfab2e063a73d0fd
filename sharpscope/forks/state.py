"""An exact copy of the state that arms start from, and moves of the weights relative to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Snapshot:
    """A copy of weights, buffers, optimizer state and random states; `restore` puts all of them back bit for bit.

    Trainable parameters, buffers and the state of the optimizer are copied; frozen parameters are not written by an update.

    Args:
        model: the policy.
        optimizer: over its trainable parameters.
        proximal: the averaged policy of a decoupled objective, or None.
        device: where the copies are kept; None for the device of each tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        proximal: nn.Module | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._device = device
        buffers = [*model.buffers()]
        averaged = [] if proximal is None else [*proximal.parameters()]
        written: list[Tensor] = [*self.parameters, *buffers, *averaged]
        self._tensors = [(tensor, self._copy(tensor)) for tensor in written]
        self._start = [copy for _, copy in self._tensors[: len(self.parameters)]]
        self._modes = [(module, module.training) for module in model.modules()]
        self._state = {
            parameter: {
                name: self._copy(value) if isinstance(value, Tensor) else value for name, value in state.items()
            }
            for parameter, state in optimizer.state.items()
        }
        self._groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        self._random = _random_states()

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device or tensor.device, copy=True)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; gradients are removed."""
        for tensor, copy in self._tensors:
            tensor.copy_(copy)
        for parameter in self.parameters:
            parameter.grad = None
        for module, training in self._modes:
            module.training = training
        present = self.optimizer.state
        for parameter in [p for p in present if p not in self._state]:
            del present[parameter]
        for parameter, state in self._state.items():
            target = present[parameter]
            for name in [name for name in target if name not in state]:
                del target[name]
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    target[name] = value
                elif isinstance(target.get(name), Tensor):
                    target[name].copy_(value)
                else:  # AdamW keeps its step count on the CPU
                    target[name] = value.to("cpu" if name == "step" else parameter.device, copy=True)
        for group, saved in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(saved)
        _set_random_states(self._random)

    @torch.no_grad()
    def displacement(self) -> list[Tensor]:
        """θ − θ₀ of each trainable parameter, on the device of the copies."""
        return [p.detach().to(start.device) - start for p, start in zip(self.parameters, self._start, strict=True)]

    @torch.no_grad()
    def place(self, displacement: Sequence[Tensor], scale: float) -> None:
        """Set the weights to θ₀ + scale·displacement; the optimizer's state is not touched."""
        for parameter, start, part in zip(self.parameters, self._start, displacement, strict=True):
            parameter.copy_(start + part * scale)

    def collect(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Copies of tensors like the trainable parameters on the device of the copies; None becomes zeros."""
        return [
            torch.zeros_like(start) if tensor is None else tensor.detach().to(start.device, copy=True)
            for tensor, start in zip(tensors, self._start, strict=True)
        ]


def inner(one: Sequence[Tensor], two: Sequence[Tensor]) -> float:
    """Inner product of two vectors given as lists of tensors, in float64."""
    return float(sum(float((a.double() * b.double()).sum()) for a, b in zip(one, two, strict=True)))


def _random_states() -> dict[str, Any]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state_all(states["cuda"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
