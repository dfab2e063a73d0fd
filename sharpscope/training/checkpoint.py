"""Checkpoints: everything that a run needs to continue exactly, in safetensors and JSON.

A checkpoint is written under a temporary name and then renamed. It lists the checksums of its files: a damaged one is
renamed, never loaded. Random draws are functions of (seed, purpose, step) and need no state; see `sharpscope.seeds`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from sharpscope.config.training import CheckpointSpec
from sharpscope.errors import NonFiniteError, UserError
from sharpscope.traces.files import sync_folder, sync_tree

STATE = "trainer_state.json"
CHECKSUMS = "checksums.json"
OPTIMIZER = "optimizer.safetensors"
PROXIMAL = "proximal.safetensors"
VECTORS = "eigenvectors.safetensors"


@dataclass(frozen=True)
class Progress:
    """State of a run after `step` steps and `cursor` prompts. The names of the fields are those in the file."""

    step: int
    cursor: int
    recent_log_grad_norms: list[float]
    method: dict[str, Any]  # the method with calibrated constants filled in
    said: Sequence[str] = ()  # warnings of the method that were reported, which a resumed run does not repeat
    score: float | None = None  # held-out accuracy at this step; None if it was not evaluated
    entropy_control: Mapping[str, float | None] = field(default_factory=dict)  # of an adaptive entropy bonus
    measuring: Mapping[str, Any] = field(default_factory=dict)  # time spent on recording and training


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """`checkpoints/step-000050` of a run."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    folders = [p for p in (run_dir / "checkpoints").glob("step-*") if (p / STATE).exists()]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """The step after which a checkpoint was saved."""
    return int(folder.name.removeprefix("step-"))


def damage(folder: Path) -> str | None:
    """Defects of a checkpoint's files by its list of checksums; None if they are intact."""
    try:
        listed = json.loads((folder / CHECKSUMS).read_bytes())
        for name, expected in listed.items():
            if _checksum(folder / name) != expected:
                return f"{name} does not have its checksum"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{CHECKSUMS} cannot be read ({error})"
    return None


def newest_valid(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose files are intact, or None, and a note on each newer one that is damaged.

    A damaged checkpoint is renamed to `damaged-step-…`, so that nothing loads it again. The caller holds the run's lock.
    """
    problems: list[str] = []
    _clear(run_dir)
    for folder in reversed(checkpoints(run_dir)):
        problem = damage(folder)
        if problem is None:
            return folder, problems
        renamed = _free(folder.with_name(f"damaged-{folder.name}"))
        folder.rename(renamed)
        sync_folder(renamed.parent)
        problems.append(f"checkpoint {folder.name} is damaged ({problem}); it is set aside as {renamed.name}")
    return None, problems


def _free(path: Path) -> Path:
    """`path` if it does not exist, else with the first free number appended."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def save_checkpoint(
    run_dir: Path,
    model: nn.Module,
    tokenizer: Any,
    optimizer: torch.optim.AdamW,
    progress: Progress,
    proximal: nn.Module | None = None,
    vectors: torch.Tensor | None = None,
) -> Path:
    """Write a checkpoint, complete or not at all; `AutoModelForCausalLM.from_pretrained` loads it too.

    Args:
        run_dir: folder of the run.
        model: unsharded, with its tokenizer and optimizer.
        tokenizer: saved beside the model.
        optimizer: over the model's trainable parameters.
        progress: state of the run.
        proximal: the averaged policy of the decoupled objective, if the method has one.
        vectors: (k, P), the newest top Hessian eigenvectors, on which later token gradients are projected.

    Raises:
        NonFiniteError: a parameter is not finite, so a run could not continue from it.
        OSError: the disk is full or cannot be written.
    """
    bad = next((name for name, p in _unique(model) if not bool(torch.isfinite(p).all())), None)
    if bad is not None:
        raise NonFiniteError(
            f"checkpoint of step {progress.step}: the weights '{bad}' are not finite, so it is not saved; resume from an earlier one"
        )
    final = checkpoint_dir(run_dir, progress.step)
    temporary = final.with_name(f".{final.name}.tmp")
    _clear(run_dir)
    try:
        temporary.mkdir(parents=True)
        sync_folder(run_dir)
        _write(temporary, model, tokenizer, optimizer, progress, proximal, vectors)
        sync_tree(temporary)
    except Exception as error:  # a full disk raises OSError, SafetensorError or a tokenizer's plain Exception
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise
        raise OSError(f"checkpoint '{final}' cannot be written: {error}") from error
    if final.exists():
        final.rename(_free(final.with_name(f".{final.name}.old")))
    temporary.rename(final)
    sync_folder(final.parent)
    _clear(run_dir)
    return final


def _write(
    folder: Path,
    model: nn.Module,
    tokenizer: Any,
    optimizer: torch.optim.AdamW,
    progress: Progress,
    proximal: nn.Module | None,
    vectors: torch.Tensor | None,
) -> None:
    """All files of a checkpoint, their checksums last."""
    model.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    save_file(_optimizer_tensors(model, optimizer), folder / OPTIMIZER)
    if proximal is not None:
        save_file({name: p.detach().contiguous() for name, p in _unique(proximal)}, folder / PROXIMAL)
    if vectors is not None:
        save_file({"vectors": vectors.detach().cpu().contiguous()}, folder / VECTORS)
    (folder / STATE).write_text(json.dumps(vars(progress), indent=1), encoding="utf-8")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {path.relative_to(folder).as_posix(): _checksum(path) for path in files}
    (folder / CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")


def _clear(run_dir: Path) -> None:
    """Remove what a crash left of checkpoints that were being written, replaced or removed.

    A checkpoint that was renamed for its successor gets its name back if the successor is missing.
    """
    for folder in (run_dir / "checkpoints").glob(".step-*"):
        name = folder.name.removeprefix(".").partition(".")[0]
        if ".old" in folder.name and not folder.with_name(name).exists():
            folder.rename(folder.with_name(name))
        else:
            shutil.rmtree(folder)


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.AdamW, proximal: nn.Module | None
) -> Progress:
    """Restore the optimizer's state and the proximal policy's weights; `model` was loaded from `folder` before."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        tensors = load_file(folder / OPTIMIZER)
    except (OSError, ValueError, SafetensorError) as error:
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
    """Remove the checkpoints that `spec` does not keep; returns them.

    Kept are the newest `keep_last`, those whose step is a multiple of `keep_every`, and the `keep_best` with the highest
    held-out accuracy (`Progress.score`; the earlier of equals).
    """
    saved = checkpoints(run_dir)
    kept = set(saved[-spec.keep_last :])
    if spec.keep_every:
        kept |= {p for p in saved if step_of(p) % spec.keep_every == 0}
    if spec.keep_best:
        scores = {p: _score(p) for p in saved}
        rated = [p for p in saved if scores[p] is not None]
        kept |= set(sorted(rated, key=lambda p: -(scores[p] or 0.0))[: spec.keep_best])
    removed = [p for p in saved if p not in kept]
    for path in removed:
        # renamed first: a folder that a crash left half removed must not look like a checkpoint
        hidden = _free(path.with_name(f".{path.name}.gone"))
        path.rename(hidden)
        shutil.rmtree(hidden)
    return removed


def _score(folder: Path) -> float | None:
    try:
        return json.loads((folder / STATE).read_bytes()).get("score")
    except (OSError, ValueError):
        return None


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of a model's parameters (names, shapes, bytes) without adapters, which a reference does not have."""
    digest = hashlib.sha256()
    for name, parameter in _unique(model):
        if ".lora_" in name:
            continue
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _checksum(path: Path) -> list[int]:
    """Size [bytes] and CRC-32 of a file."""
    total = crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total, crc = total + len(block), zlib.crc32(block, crc)
    return [total, crc]


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
