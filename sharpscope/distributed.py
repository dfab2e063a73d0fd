"""Data-parallel processes: which process computes which rows, and what is summed, gathered or broadcast.

Every process holds the rollouts, statistics, plan and records of the whole step; only work on the model is divided. Advantages,
quantiles, covariances, shuffles and normalizers are therefore the same as with one process. Without `accelerate launch` (or
torchrun) there is one process, and every function here is the identity.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sharpscope.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """How this run was launched."""

    processes: int = 1
    sharded: bool = False  # whether weights, gradients and optimizer state are sharded over the processes (FSDP2)
    reshard: bool = True  # whether each layer's weights are freed after its forward pass, not after its backward pass


def start(device: str = "auto") -> Launch:
    """Join the process group if `accelerate launch` or torchrun started one. Call it once per program.

    Raises:
        UserError: accelerate is not installed, or an option of the launch is not supported.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return Launch()
    try:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
    except ImportError:
        raise UserError(
            "accelerate launch: not installed; pip install 'sharpscope[accelerate]'"
        ) from None
    if device not in ("auto", "cuda", "cpu"):
        raise UserError(
            f"policy.device {device!r}: not supported with several processes; use 'auto' or 'cpu'"
        )
    cpu = device == "cpu" or not torch.cuda.is_available()
    state = Accelerator(cpu=cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true").state
    atexit.register(_leave)
    kind = state.distributed_type.value
    if kind not in ("MULTI_CPU", "MULTI_GPU", "FSDP"):
        raise UserError(
            f"accelerate launch: {kind} is not supported; use data-parallel processes or --use_fsdp"
        )
    if state.mixed_precision != "no":
        given = f"accelerate launch --mixed_precision {state.mixed_precision}"
        raise UserError(f"{given}: not supported; remove it and set policy.dtype=bfloat16")
    # Not from the state: without a GPU accelerate drops the plugin, although FSDP2 works.
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return Launch(world_size())
    plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise UserError(
            "accelerate launch --use_fsdp: only FSDP2 is supported; add --fsdp_version 2"
        )
    if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise UserError("accelerate launch --fsdp_offload_params: not supported; remove it")
    return Launch(world_size(), sharded=True, reshard=bool(plugin.reshard_after_forward))


def _leave() -> None:
    """Destroy the process group if it still exists."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Rank of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def is_rank_zero() -> bool:
    """Whether this is the process that prints and writes."""
    return rank() == 0


def local_slice(size: int) -> slice:
    """This process's contiguous slice of `size` items."""
    quotient, remainder = divmod(size, world_size())
    start = rank() * quotient + min(rank(), remainder)
    return slice(start, start + quotient + (rank() < remainder))


def balance(work: Sequence[int]) -> list[int]:
    """Indices into `work` (costs ≥ 0) assigned to this process: dealt from the largest down, so that totals are about equal."""
    return sorted(sorted(range(len(work)), key=lambda i: -work[i])[rank() :: world_size()])


@dataclass(frozen=True)
class Failure:
    """What a process that cannot go on gives to its last `gather`; that of the others then raises PeerError."""

    reason: str


class PeerError(RuntimeError):
    """Another process has failed."""


def gather(value: T) -> list[T]:
    """The `value` of every process, by rank. Tensors in it should be on the CPU.

    Every exchange of objects is one of these, so that a process can leave the others at any of them (`Failure`).

    Raises:
        PeerError: a process gives a Failure.
    """
    if world_size() == 1:
        return [value]
    values = [value] * world_size()
    dist.all_gather_object(values, value)
    failed = [
        f"process {rank}: {each.reason}"
        for rank, each in enumerate(values)
        if isinstance(each, Failure)
    ]
    if failed:
        raise PeerError("; ".join(failed))
    return values


def broadcast(value: T) -> T:
    """The `value` of rank 0, in every process."""
    return gather(value if is_rank_zero() else None)[0]  # type: ignore[return-value]


def rank_zero_call(function: Callable[[], T]) -> T:
    """Call `function` in rank 0 only. Every process returns its result or raises its exception."""
    result: list[T] = []
    problem: Exception | None = None
    if is_rank_zero():
        try:
            result = [function()]
        except Exception as error:
            problem = error
    result, problem = broadcast((result, problem))
    if problem is not None:
        raise problem
    return result[0]


def sum_values(value: float) -> float:
    """Sum of the `value` of every process, in float64 and order of rank."""
    return sum(gather(value)) if world_size() > 1 else value


def together(call: Callable[[], T]) -> T:
    """`call()` in every process; a `UserError` in one is raised in all, so that none waits for it in the next exchange."""
    result: list[T] = []
    problem: UserError | None = None
    try:
        result = [call()]
    except UserError as error:
        problem = error
    first = next((each for each in gather(problem) if each is not None), None)
    if first is not None:
        raise first
    return result[0]


def exchange_rows(index: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy rows between processes: this one has computed rows `index` of `tensors` and receives the rows of the others."""
    if world_size() == 1:
        return
    local = (index.cpu(), [tensor[index.to(tensor.device)].detach().cpu() for tensor in tensors])
    for origin, (rows, parts) in enumerate(gather(local)):
        if origin != rank():
            for tensor, part in zip(tensors, parts, strict=True):
                tensor[rows.to(tensor.device)] = part.to(tensor)


def map_rows(rows: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """`compute(rows)` (n, …) for independent `rows` (n,), of which each process computes a part; a UserError is one in all."""
    if world_size() == 1:
        return compute(rows)
    part = rows[local_slice(len(rows))]
    local = together(lambda: compute(part).detach() if len(part) else None)
    pieces = [
        piece for piece in gather(None if local is None else local.cpu()) if piece is not None
    ]
    return torch.cat(pieces).to(rows.device if local is None else local.device)


@torch.no_grad()
def sum_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sums of `tensors` over the processes."""
    return list(tensors) if world_size() == 1 else [_sum(tensor.clone()) for tensor in tensors]


@torch.no_grad()
def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace every `.grad` that some process has by its sum over the processes; FSDP2 has summed those of sharded parameters."""
    replicated = [p for p in parameters if not hasattr(p, "to_local")]
    if world_size() == 1 or not replicated:
        return
    used = torch.tensor(
        [p.grad is not None for p in replicated],
        dtype=torch.int32,
        device=replicated[0].device,
    )
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    for parameter, is_used in zip(replicated, used.tolist(), strict=True):
        if is_used:
            parameter.grad = _sum(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )


def _sum(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    dist.all_reduce(tensor)
    return tensor
