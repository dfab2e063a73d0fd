"""What must hold before a price is measured: the numbers of the device at hand against float64 on the CPU, on a small model."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import sharpscope
from experiments.benchmarks.common import SHAPES, Row, random_model, random_rows
from sharpscope.errors import UserError

ROWS, LENGTH = 4, 32
OUTCOMES = ["kl", "entropy", "sharpness"]
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Type of the model's weights -> largest relative error of a column of numbers, |x - y| over |y| as vectors."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What is compared, each (N, S): norms, shares and effects of the tokens of one update."""

    columns: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> Numbers:
        """Measure them on a model."""
        ids, mask = random_rows(model, ROWS, LENGTH)
        coef = -torch.linspace(-1, 1, ROWS)[:, None].to(ids.device) * mask / mask.sum()
        coef = coef.to(next(model.parameters()).dtype)
        optimizer = _running_adamw(model)
        columns = {
            "local norms": sharpscope.score_norms(model, ids, mask, check="off").values,
            "exact norms": sharpscope.score_norms(model, ids, mask, "exact", check="off").values,
            "shares": sharpscope.attribute(model, ids, mask, coef, check="off"),
        }
        found = sharpscope.effects(model, ids, mask, coef, optimizer, OUTCOMES, check="off")
        columns |= {f"effects on {name}": found[name] for name in OUTCOMES}
        return cls(columns={name: x.detach().double().cpu() for name, x in columns.items()})

    def errors(self, truth: Numbers) -> dict[str, float]:
        """Relative error of each column."""
        return {
            name: float((x - truth.columns[name]).norm() / truth.columns[name].norm())
            for name, x in self.columns.items()
        }


def _running_adamw(model: nn.Module) -> torch.optim.AdamW:
    """AdamW after ten steps: at its first step a gradient's sign decides, which is rounding where the gradient is nearly 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(10.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.full_like(parameter, 1e-6),
        }
    return optimizer


def checks(device: str, shape: str = "0.9m") -> list[Row]:
    """Errors against float64 on the CPU, by type of the weights, attention kernel and compilation; what is not there is said."""
    model = random_model(SHAPES[shape])
    found = []
    for name, dtype, prepare in _variants(device):
        one = copy.deepcopy(model).to(device=device, dtype=dtype)
        # the weights as the device holds them: their rounding is not an error of a measurement
        truth = Numbers.of(copy.deepcopy(one).double().cpu())
        try:
            measured = Numbers.of(prepare(one))
        except (ImportError, UserError, RuntimeError) as problem:
            note = " ".join(str(problem).split())[:160]
            found.append(Row(f"{shape}, {name}: not measured", float("nan"), "", note=note))
            continue
        for column, error in measured.errors(truth).items():
            limit = f"≤ {LIMITS[dtype]:g}"
            found.append(Row(f"{shape}, {name}: error of {column}", error, "", limit))
    return found


def _variants(
    device: str,
) -> Iterator[tuple[str, torch.dtype, Callable[[nn.Module], nn.Module]]]:
    """Name, type of the weights, and what makes the variant of a model."""
    yield "float32", torch.float32, lambda model: model
    yield "float32, torch.compile", torch.float32, _compiled
    yield "bfloat16", torch.bfloat16, lambda model: model
    if device == "cuda":
        yield "bfloat16, flash attention", torch.bfloat16, _flash


def _compiled(model: nn.Module) -> nn.Module:
    """The same module, compiled in place: what a training that calls `model.compile()` holds."""
    model.compile()
    return model


def _flash(model: nn.Module) -> nn.Module:
    """The model with the kernels of the package flash_attn."""
    if importlib.util.find_spec("flash_attn") is None:
        raise ImportError("flash_attn is not installed")
    model.set_attn_implementation("flash_attention_2")  # type: ignore[operator]
    return model
