"""Checkpoints: everything that a run needs to go on exactly, written aside and renamed, safetensors and JSON only.

Random draws are functions of (seed, purpose, step) and need no state; see `sharpscope.training.seeds`.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sharpscope.errors import UserError
from sharpscope.training.spec import CheckpointSpec

STATE = "trainer_state.json"
OPTIMIZER = "optimizer.safetensors"
PROXIMAL = "proximal.safetensors"
VECTORS = "eigenvectors.safetensors"


@dataclass(frozen=True)
class Progress:
    """Where a run stands: `step` steps are done, `cursor` prompts were handed out."""

    step: int
    cursor: int
    recent_log_grad_norms: list[float]
    method: dict[str, Any]  # the method with calibrated constants filled in
    extra: dict[str, Any]


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """`checkpoints/step-000050` of a run."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def checkpoints(run_dir: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted(p for p in (run_dir / "checkpoints").glob("step-*") if (p / STATE).exists())


def save_checkpoint(
    run_dir: Path,
    model: nn.Module,
    tokenizer: Any,
    optimizer: torch.optim.AdamW,
    progress: Progress,
    proximal: nn.Module | None = None,
    vectors: torch.Tensor | None = None,
) -> Path:
    """Write a checkpoint that `AutoModelForCausalLM.from_pretrained` loads too. It appears whole or not at all.

    `vectors` (k, P): the newest top Hessian eigenvectors, on which later tokens are projected.
    """
    final = checkpoint_dir(run_dir, progress.step)
    aside = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    model.save_pretrained(aside, safe_serialization=True)  # type: ignore[operator]
    tokenizer.save_pretrained(aside)
    save_file(_optimizer_tensors(model, optimizer), aside / OPTIMIZER)
    if proximal is not None:
        save_file({name: p.detach().contiguous() for name, p in _unique(proximal)}, aside / PROXIMAL)
    if vectors is not None:
        save_file({"vectors": vectors.detach().cpu().contiguous()}, aside / VECTORS)
    (aside / STATE).write_text(json.dumps(vars(progress), indent=1), encoding="utf-8")
    for path in [*aside.iterdir(), aside]:
        _fsync(path)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    _fsync(final.parent)
    return final


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.AdamW, proximal: nn.Module | None
) -> Progress:
    """Put optimizer state (and the proximal policy's weights) back; the model itself was loaded from `folder` before."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        tensors = load_file(folder / OPTIMIZER)
    except (OSError, ValueError) as error:
        raise UserError(
            f"checkpoint '{folder}' cannot be read ({error}); resume from an earlier one by removing it"
        ) from None
    _restore_optimizer(model, optimizer, tensors)
    if proximal is not None:
        weights = load_file(folder / PROXIMAL)
        with torch.no_grad():
            for name, parameter in _unique(proximal):
                parameter.copy_(weights[name])
    return Progress(**state)


def load_vectors(folder: Path) -> torch.Tensor | None:
    """The eigenvectors (k, P) that a checkpoint holds, or None."""
    path = folder / VECTORS
    return load_file(path)["vectors"] if path.exists() else None


def prune(run_dir: Path, spec: CheckpointSpec) -> list[Path]:
    """Remove checkpoints that the policy does not keep; returns them."""
    found = checkpoints(run_dir)
    kept = set(found[-spec.keep_last :])
    if spec.keep_every:
        kept |= {p for p in found if int(p.name.removeprefix("step-")) % spec.keep_every == 0}
    removed = [p for p in found if p not in kept]
    for path in removed:
        shutil.rmtree(path)
    return removed


def _unique(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Named parameters; a tied one appears once."""
    return list(model.named_parameters())


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in _unique(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}::{key}"] = torch.as_tensor(value).detach().contiguous()
    return tensors


def _restore_optimizer(model: nn.Module, optimizer: torch.optim.AdamW, tensors: dict[str, torch.Tensor]) -> None:
    parameters = dict(_unique(model))
    for key, value in tensors.items():
        name, entry = key.rsplit("::", 1)
        if name not in parameters:
            raise UserError(f"checkpoint: the optimizer's state names '{name}', which the model does not have")
        parameter = parameters[name]
        # AdamW keeps its step count on the CPU
        optimizer.state[parameter][entry] = value if entry == "step" else value.to(parameter.device)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
