"""AdamW with the state that a trainer saved in its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from sharpscope.errors import UserError, first_line
from sharpscope.untrusted import check_regular

FILE = "optimizer.pt"
"""In which transformers' trainers save the optimizer's state."""


def load_adamw(folder: Path, model: nn.Module) -> torch.optim.AdamW:
    """AdamW over a model's trainable parameters with the state that a trainer saved.

    Raises:
        UserError: the folder has no state, or not that of AdamW for this model.
    """
    path = folder / FILE
    if not path.exists():
        raise UserError(
            f"--model {folder}: has no {FILE}; give a checkpoint with the optimizer's state"
        )
    check_regular(path)
    try:
        return _adamw(path, model)
    except UserError:
        raise
    except Exception as error:  # of torch: of a damaged file, or of other values than AdamW's
        raise UserError(
            f"--model {path}: is not the state of AdamW ({first_line(error)}); restore it"
        ) from error


def _adamw(path: Path, model: nn.Module) -> torch.optim.AdamW:
    state = torch.load(path, map_location="cpu", weights_only=True)
    groups = state["param_groups"]
    chosen = _parameters(path, model, [group["params"] for group in groups], state["state"])
    made = [
        {"params": some, "weight_decay": one["weight_decay"]}
        for some, one in zip(chosen, groups, strict=True)
    ]
    first = groups[0]
    optimizer = torch.optim.AdamW(
        made, lr=first["lr"], betas=tuple(first["betas"]), eps=first["eps"]
    )
    kept = [{**group, "fused": None} for group in groups]
    optimizer.load_state_dict({"state": state["state"], "param_groups": kept})
    return optimizer


def _parameters(
    path: Path,
    model: nn.Module,
    groups: Sequence[Sequence[int]],
    moments: Mapping[int, Mapping[str, Tensor]],
) -> list[list[Tensor]]:
    """The parameters of each group.

    Trainers order parameters by groups (with and without weight decay); each parameter, in the model's order, is the next of the
    one group whose next moment has its shape.
    """
    waiting = [list(group) for group in groups]
    chosen: list[list[Tensor]] = [[] for _ in groups]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        shapes = [moments.get(left[0], {}).get("exp_avg") if left else None for left in waiting]
        fits = [
            at
            for at, moment in enumerate(shapes)
            if getattr(moment, "shape", None) == parameter.shape
        ]
        if len(fits) != 1:
            raise UserError(
                f"--model {path}: is not AdamW's state of this model; its moments do not fit {name}"
            )
        waiting[fits[0]].pop(0)
        chosen[fits[0]].append(parameter)
    if any(waiting):
        raise UserError(f"--model {path}: has moments of more parameters than the model trains")
    return chosen
