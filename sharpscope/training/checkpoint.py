"""Checkpoints: everything that a run needs to continue exactly, in safetensors and JSON.

A checkpoint is written under a temporary name and then renamed. It lists the checksums of its files: a damaged one is
never loaded. Random draws are functions of (seed, purpose, step) and need no state; see `sharpscope.seeds`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from sharpscope import distributed
from sharpscope.errors import NonFiniteError, UserError, first_line
from sharpscope.policy import Policy
from sharpscope.policy.sharding import gathered_copy, is_sharded, shard_state
from sharpscope.untrusted import UnreadableError, check_regular, read_json

if TYPE_CHECKING:
    from sharpscope.config import RunConfig

STATE = "trainer_state.json"
CHECKSUMS = "checksums.json"
LARGEST_STATE = 500_000_000
"""Largest file of a checkpoint's state or checksums [bytes]."""
OPTIMIZER = "optimizer.safetensors"
AVERAGE = "average"
"""Entry of a parameter in the optimizer's file: its value in the averaged policy (`AveragedProximal`)."""


@dataclass(frozen=True)
class Progress:
    """State of a run after `step` steps and `cursor` prompts. The names of the fields are those in the file."""

    step: int
    cursor: int
    recent_log_grad_norms: Sequence[float]
    rows: Sequence[Mapping[str, Any]]  # canonical quantities of the steps, for the health rules
    method: dict[str, Any]  # the method with calibrated constants filled in
    # warnings of the method that were reported, which a resumed run does not repeat
    said: Sequence[str] = ()
    # the method's state (`MethodState`)
    entropy_control: Mapping[str, Any] = field(default_factory=dict)
    # time spent on recording and training
    measuring: Mapping[str, Any] = field(default_factory=dict)


_PROGRESS = TypeAdapter(Progress)


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """`checkpoints/step-000050` of a run."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    found = (run_dir / "checkpoints").glob("step-*")
    folders = [p for p in found if p.name[5:].isdecimal() and (p / STATE).exists()]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """The step after which a checkpoint was saved."""
    return int(folder.name.removeprefix("step-"))


def damage(folder: Path) -> str | None:
    """Defects of a checkpoint's files by its list of checksums; None if they are intact."""
    try:
        listed = read_json(folder / CHECKSUMS, LARGEST_STATE, folder)
        for name, expected in listed.items():
            if _checksum(folder / name, folder) != expected:
                return f"{name} does not have its checksum"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except UnreadableError as error:
        return str(error)
    except (OSError, ValueError, AttributeError) as error:
        return f"{CHECKSUMS} cannot be read ({error})"
    return None


def newest(run_dir: Path) -> Path | None:
    """The newest checkpoint of a run, None without one; a UserError if its files are damaged."""
    saved = checkpoints(run_dir)
    problem = damage(saved[-1]) if saved else None
    if problem is not None:
        raise UserError(
            f"checkpoint {saved[-1]}: is damaged ({problem}); remove it to go on from the one before"
        )
    return saved[-1] if saved else None


def save(
    config: RunConfig,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> None:
    """Write a checkpoint with unsharded weights and optimizer state; remove those that are not kept. Every process calls it.

    Raises:
        NonFiniteError: a parameter is not finite, so a run could not continue from it.
        OSError: in every process, if the first one cannot write.
    """
    model = policy.model
    if is_sharded(model):
        gathered = gathered_copy(
            model,
            optimizer,
            torch.device("cpu"),
            keep=distributed.is_rank_zero(),
        )
        model, optimizer = gathered.model, gathered.optimizer
    distributed.rank_zero_call(lambda: _write(config, model, policy.tokenizer, optimizer, progress))


def restore(checkpoint: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> Progress:
    """Restore the optimizer from `checkpoint`, which every process reads and from which the policy was loaded before."""
    if not is_sharded(policy.model):
        return load_checkpoint(checkpoint, policy.model, optimizer)
    gathered = gathered_copy(policy.model, optimizer, torch.device("cpu"))
    progress = load_checkpoint(checkpoint, gathered.model, gathered.optimizer)
    shard_state(gathered, policy.model, optimizer)
    return progress


def _write(
    config: RunConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> None:
    """Write a checkpoint of unsharded weights, complete or not at all; `AutoModelForCausalLM.from_pretrained` loads it too."""
    bad = next(
        (name for name, p in model.named_parameters() if not bool(torch.isfinite(p).all())), None
    )
    if bad is not None:
        why = f"the weights '{bad}' are not finite, so it is not saved"
        raise NonFiniteError(
            f"checkpoint of step {progress.step}: {why}; resume from an earlier one"
        )
    final = checkpoint_dir(config.run_dir, progress.step)
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # what a crash left
    moments = {
        f"{name}::{key}": torch.as_tensor(value).detach().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    state = dict(progress.entropy_control)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    if average := state.pop("average", []):
        moments |= {
            f"{name}::{AVERAGE}": value.contiguous()
            for name, value in zip(trained, average, strict=True)
        }
    progress = replace(progress, entropy_control=state)
    try:
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary, safe_serialization=True)  # type: ignore[operator]
        tokenizer.save_pretrained(temporary)
        save_file(moments, temporary / OPTIMIZER)
        (temporary / STATE).write_text(json.dumps(vars(progress), indent=1), encoding="utf-8")
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        sums = {
            path.relative_to(temporary).as_posix(): _checksum(path, temporary) for path in files
        }
        (temporary / CHECKSUMS).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    except (
        Exception
    ) as error:  # a full disk raises OSError, SafetensorError or a tokenizer's plain Exception
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise
        raise OSError(f"checkpoint '{final}' cannot be written: {error}") from error
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    for path in checkpoints(config.run_dir)[: -config.checkpoint.keep_last]:
        # first: what a crash leaves of it must not look like a checkpoint
        (path / STATE).unlink(missing_ok=True)
        shutil.rmtree(path)


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Restore the optimizer's state; `model` was loaded from `folder` before."""
    try:
        state = read_json(folder / STATE, LARGEST_STATE, folder)
        if isinstance(state, dict):
            state.pop("score", None)  # of version 0.2
        progress = _PROGRESS.validate_python(state)
        tensors = load_file(folder / OPTIMIZER)
    except (OSError, ValueError, SafetensorError, UnreadableError) as error:
        raise UserError(
            f"checkpoint '{folder}' cannot be read ({first_line(error)}); choose an earlier one"
        ) from None
    parameters = dict(model.named_parameters())
    averages: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        name, _, entry = key.rpartition("::")
        if name not in parameters:
            raise UserError(
                f"checkpoint: the optimizer's state names '{name}', which the model does not have"
            )
        parameter = parameters[name]
        if entry != "step" and value.shape != parameter.shape:
            sizes = f"{tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
            raise UserError(
                f"checkpoint '{folder}': {key} has shape {sizes}; choose an earlier one"
            )
        if entry == AVERAGE:
            averages[name] = value.to(parameter.device)
            continue
        # AdamW keeps its step count on the CPU
        optimizer.state[parameter][entry] = value if entry == "step" else value.to(parameter.device)
    average = [averages[name] for name in parameters if name in averages]
    if average:
        return replace(progress, entropy_control={**progress.entropy_control, "average": average})
    return progress


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of a model's parameters (names, shapes, bytes) without adapters, which a reference does not have."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(
                parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()


def _checksum(path: Path, folder: Path) -> list[int]:
    """Size [bytes] and CRC-32 of a file in a folder."""
    check_regular(path, folder)
    total = crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total = total + len(block)
            crc = zlib.crc32(block, crc)
    return [total, crc]
