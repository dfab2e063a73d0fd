"""Several processes that train one policy: who does which rows, what is summed, what the first one decides for all.

Every process holds the same rollouts, statistics, plan and records of the whole step; only work on the model is divided. So
everything that looks at a batch (advantages, quantiles, covariances, shuffles, normalisers) is what one process computes.
Without `accelerate launch` (or torchrun) there is one process, and every function here is the identity.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sharpscope.errors import UserError

T = TypeVar("T")

SUM_BYTES = 64 * 2**20  # gradients summed at once


@dataclass(frozen=True)
class Launch:
    """How this run was launched.

    Attributes:
        processes: how many there are.
        sharded: whether weights, gradients and optimizer state are divided over them (FSDP2).
        reshard: whether weights are dropped again after each layer's forward pass (else after its backward pass).
    """

    processes: int = 1
    sharded: bool = False
    reshard: bool = True


def start(device: str = "auto") -> Launch:
    """Join the other processes, if `accelerate launch` or torchrun has started any; once in a program's life.

    Args:
        device: policy.device; with several GPUs `auto` or `cuda` is each process's own one.

    Raises:
        UserError: accelerate is missing, or the launch asks for what is not supported.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return Launch()
    try:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
    except ImportError:
        raise UserError(
            "several processes: accelerate is not installed; pip install 'sharpscope[accelerate]'"
        ) from None
    if device not in ("auto", "cuda", "cpu"):
        raise UserError(f"policy.device {device!r}: several processes take a GPU each; use 'auto', or 'cpu' for none")
    cpu = device == "cpu" or not torch.cuda.is_available()
    state = Accelerator(cpu=cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true").state
    atexit.register(_leave)
    kind = state.distributed_type.value
    if kind not in ("MULTI_CPU", "MULTI_GPU", "FSDP"):
        raise UserError(f"accelerate launch: {kind} is not supported; use data-parallel processes or --use_fsdp")
    if state.mixed_precision != "no":
        raise UserError(
            f"accelerate launch --mixed_precision {state.mixed_precision}: the run's own setting decides; leave it out and set "
            "policy.dtype=bfloat16"
        )
    # Read here, not from the state: accelerate forgets the plugin where there is no GPU, and FSDP2 works without.
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return Launch(count())
    plugin: Any = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version != 2:
        raise UserError("accelerate launch --use_fsdp: only the second version is supported; add --fsdp_version 2")
    if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise UserError("accelerate launch --fsdp_offload_params: not supported; leave it out")
    return Launch(count(), sharded=True, reshard=bool(plugin.reshard_after_forward))


def _leave() -> None:
    """Say goodbye at the program's end; a second time is no mistake."""
    if dist.is_initialized():
        dist.destroy_process_group()


def count() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if count() > 1 else 0


def is_first() -> bool:
    """Whether this process speaks and writes for all."""
    return rank() == 0


def share(size: int) -> slice:
    """This process's consecutive part of `size` things; parts in order of rank are all of them."""
    each, more = divmod(size, count())
    first = rank() * each + min(rank(), more)
    return slice(first, first + each + (rank() < more))


def deal(work: Sequence[int]) -> list[int]:
    """This process's indices into `work` (costs ≥ 0), so that all processes have about the same to do.

    Largest first to whoever has least; every process computes the same deal.
    """
    loads, own = [0] * count(), []
    for index in sorted(range(len(work)), key=lambda i: -work[i]):
        to = loads.index(min(loads))
        loads[to] += work[index]
        if to == rank():
            own.append(index)
    return sorted(own)


def gather(value: T) -> list[T]:
    """Every process's `value`, by rank; tensors in it should be on the CPU."""
    if count() == 1:
        return [value]
    found: list[Any] = [None] * count()
    dist.all_gather_object(found, value)
    return found


def agreed(value: T) -> T:
    """The first process's `value`."""
    if count() == 1:
        return value
    told: list[Any] = [value if is_first() else None]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def decided(decide: Callable[[], T]) -> T:
    """What `decide` returns in the first process, in which alone it runs; its exception is raised in all."""
    if count() == 1:
        return decide()
    found: Any = None
    if is_first():
        try:
            found = (True, decide())
        except Exception as error:
            agreed((False, error))
            raise
    worked, value = agreed(found)
    if not worked:
        raise value
    return value


def total(value: float) -> float:
    """The sum of every process's `value`, in float64 and order of rank."""
    return sum(gather(value)) if count() > 1 else value


def first_of(values: Iterable[T | None]) -> T | None:
    """The first that is not None, by rank and then in order."""
    own = next((value for value in values if value is not None), None)
    return next((value for value in gather(own) if value is not None), None)


def share_rows(index: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write into every process's `tensors` the rows that the others have computed; this one has computed rows `index`."""
    if count() == 1:
        return
    own = (index.cpu(), [tensor[index.to(tensor.device)].detach().cpu() for tensor in tensors])
    for origin, (rows, parts) in enumerate(gather(own)):
        if origin != rank():
            for tensor, part in zip(tensors, parts, strict=True):
                tensor[rows.to(tensor.device)] = part.to(tensor)


def by_rows(rows: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """`compute(rows)`, for a function whose results (n, …) belong to the `rows` (n,) one by one; each process computes a part.

    All processes get all results, on the device of their own ones.
    """
    if count() == 1:
        return compute(rows)
    part = rows[share(len(rows))]
    own = compute(part) if len(part) else None
    found = [piece for piece in gather(None if own is None else own.detach().cpu()) if piece is not None]
    return torch.cat(found).to(rows.device if own is None else own.device)


@torch.no_grad()
def summed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums of every process's `tensors`, which are of one type."""
    found = list(tensors)
    if count() > 1 and found:
        found = [tensor.clone() for tensor in found]
        _sum(found)
    return found


@torch.no_grad()
def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace every `.grad` by its sum over the processes. Sharded parameters' are summed already and stay.

    A parameter without a gradient here that has one elsewhere gets it; without any anywhere it keeps none.
    """
    if count() == 1:
        return
    whole = [p for p in parameters if not hasattr(p, "to_local")]
    if not whole:
        return
    used = torch.tensor([p.grad is not None for p in whole], dtype=torch.int32, device=whole[0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    waiting: list[Tensor] = []
    for parameter, anywhere in zip(whole, used.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            waiting.append(parameter.grad)
    for kind in dict.fromkeys(gradient.dtype for gradient in waiting):
        _sum([gradient for gradient in waiting if gradient.dtype == kind])


def _sum(tensors: list[Tensor]) -> None:
    """Sum tensors of one type in place, a bucket at a time."""
    bucket: list[Tensor] = []
    size = 0
    for position, tensor in enumerate(tensors):
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= SUM_BYTES or position + 1 == len(tensors):
            flat = torch.cat([t.flatten() for t in bucket])
            dist.all_reduce(flat)
            for t, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                t.copy_(part.view_as(t))
            bucket, size = [], 0
