"""Mixtures of experts: transformers' sum over experts, told to the recorder position by position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharpscope.policy import bare
from sharpscope.probes.token_gradients.uses import Recorder

NAME = "sharpscope"

_active: list[Recorder] = []


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Each expert on the positions routed to it: hidden_states (B·L, d), top_k_index and top_k_weights (B·L, K)."""
    out = torch.zeros_like(hidden_states)
    for expert in range(self.num_experts):
        position, slot = torch.where(top_k_index == expert)
        if not len(position):
            continue
        with _active[-1].gathered(position):
            x = hidden_states[position]
            if self.has_gate:
                inner = self._apply_gate(_mapped(self, "gate_up_proj", expert, x))
            else:
                inner = self.act_fn(_mapped(self, "up_proj", expert, x))
            made = _mapped(self, "down_proj", expert, inner)
        out = out.index_add(0, position, (made * top_k_weights[position, slot, None]).to(out.dtype))
    return out


def _mapped(self: Any, name: str, expert: int, x: Tensor) -> Tensor:
    """The linear map `name` of one expert on its rows x (m, d_in)."""
    weight = getattr(self, name)[expert]
    bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
    if not self.is_transposed:
        return F.linear(x, weight, bias)
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _plain(module: nn.Module) -> bool:
    """Whether `module` holds experts that `transformers` itself can compute in several ways, so that `_forward` can too."""
    if not (hasattr(module, "is_transposed") and hasattr(module, "down_proj")):
        return False
    return not getattr(module, "has_post_expert_norm", False)  # older transformers have no such experts


@contextmanager
def recorded_experts(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Run the model's experts so that `recorder` knows which position each row of their inputs is.

    Models without experts, and experts of a layout not known here, are left alone; the recorder then reports the
    latter's parameters as unhandled.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # transformers before 5: experts are ordinary modules
        yield
        return
    modules = [module for module in bare(model).modules() if _plain(module)]
    configs: dict[int, Any] = {id(module.config): module.config for module in modules}
    if not modules:
        yield
        return
    if NAME not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    before = [(config, config._experts_implementation) for config in configs.values()]
    _active.append(recorder)
    try:
        for config, _ in before:
            config._experts_implementation_internal = NAME
        yield
    finally:
        _active.pop()
        for config, implementation in before:
            config._experts_implementation_internal = implementation
