"""What each of two processes does (gloo): train SFT, DPO and GRPO with DDP and FSDP2, with and without the recorder."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from sharpscope import distributed
from sharpscope.integrations.record import record
from tests.integrations.test_loop import drawn, logps, surrogate
from tests.integrations.trainers import (
    Weights,
    dpo_trainer,
    search_finely,
    sft_trainer,
    small_model,
    tokenizer,
    trainer,
    whole_weights,
)

#: 6 rows of each process, so that the second of three groups of 4 is in both; used for two updates.
OFF_POLICY = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "num_iterations": 2,
    "max_steps": 4,
}
OFF_POLICY |= {"loss_type": "dapo", "learning_rate": 0.005, "beta": 0.1, "epsilon": 0.05}
#: Trainer and its arguments.
MAKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sft": (sft_trainer, {"max_steps": 2}),
    "grpo": (trainer, OFF_POLICY),
    "dpo_fsdp2": (dpo_trainer, {"max_steps": 2}),
    "grpo_fsdp2": (trainer, OFF_POLICY),
    "dpo": (dpo_trainer, {"max_steps": 2}),
    "sft_fsdp2": (sft_trainer, {"max_steps": 2}),
}
SLOW = ("dpo", "sft_fsdp2")
"""Makers that the ordinary run leaves out."""


@contextmanager
def fsdp2() -> Iterator[None]:
    """Within it accelerate shards weights (FSDP2), which without a GPU it does not do: its state has no such branch."""
    original = AcceleratorState.__init__

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.distributed_type = PartialState._shared_state["distributed_type"] = (
            DistributedType.FSDP
        )
        self.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
        if self._mixed_precision != "no":
            self.fsdp_plugin.set_mixed_precision(self._mixed_precision)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcceleratorState, "__init__", start)
        yield


def train_all(folder: Path, *names: str) -> None:
    """Train with each of the makers that are named, and keep the weights before each update and at the end of every process in kept.pt."""
    patch = pytest.MonkeyPatch()
    search_finely(patch)
    kept = {}
    for name in names:
        make, arguments = MAKERS[name]
        sharded = name.endswith("fsdp2")
        for recorded in (False, True):
            with fsdp2() if sharded else nullcontext():
                one = make(
                    folder / "t",
                    max_grad_norm=0.0,
                    ddp_backend="gloo",
                    model={"tie": False},
                    **arguments,
                )
            keep = Weights()
            one.add_callback(keep)
            if recorded:
                recording = {"token_gradients_every": 1, "exact_tokens": 100, "group_share": 1.0}
                record(one, out=folder / name, recording=recording, critical_sharpness=1)
            one.train()
            model = one.accelerator.unwrap_model(one.model)
            assert sharded == any(
                hasattr(value, "full_tensor") for value in model.state_dict().values()
            )
            kept[name, recorded] = [*keep.before, whole_weights(model)]
    every = distributed.gather(kept)
    if distributed.is_rank_zero():
        torch.save(every, folder / "kept.pt")
    torch.distributed.barrier()


FAILING = ("start", "_generated", "_open", "_tokens", "_use", "_micro_step_done", "gradient_done")
FAILING += ("before_update", "observe_update", "after_update", "close_step", "loss")
"""Methods of recorders that fail in one process only; `loss`: the trainer's own, when it is computed again."""


def fail_in_one(folder: Path) -> None:
    """Train SFT with FSDP2 and GRPO with DDP, with a recorder that fails in the second process at each of its methods in turn."""
    kept = {}
    settings: dict[str, tuple[Any, dict[str, Any]]] = {
        "sft_fsdp2": (sft_trainer, {"max_steps": 2}),
        "grpo": (trainer, OFF_POLICY),
    }
    for kind, (make, arguments) in settings.items():
        for name in (None, *FAILING):
            with (
                fsdp2() if kind.endswith("fsdp2") else nullcontext(),
                warnings.catch_warnings(record=True) as told,
            ):
                one = make(folder / "t", ddp_backend="gloo", model={"tie": False}, **arguments)
                if name is not None:
                    options: dict[str, Any] = {
                        "recording": {"token_gradients_every": 1},
                        "critical_sharpness": 1,
                    }
                    rec = record(one, out=folder / f"{kind}-{name}", **options)
                    if not hasattr(rec, name) and (name, kind) != ("loss", "grpo"):
                        continue
                    if distributed.rank() == 1 and name == "loss":
                        rec._original["_compute_loss"] = _refusing(rec._original["_compute_loss"])
                    elif distributed.rank() == 1:
                        setattr(
                            rec, name, _failing(getattr(rec, name), 1 if name == "start" else 2)
                        )
                one.train()
            stopped = sum("sharpscope stopped recording" in str(each.message) for each in told)
            kept[kind, str(name)] = whole_weights(one.accelerator.unwrap_model(one.model)), stopped
    every = distributed.gather(kept)
    if distributed.is_rank_zero():
        torch.save(every, folder / "failed.pt")
    torch.distributed.barrier()


def _failing(work: Any, at: int) -> Any:
    """`work`, which fails at its call number `at`."""
    calls: list[None] = []

    def fail(*args: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == at:
            raise RuntimeError("a bug")
        return work(*args, **named)

    return fail


def _refusing(compute: Any) -> Any:
    """A trainer's loss that cannot be computed again without a gradient."""

    def loss(*args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            raise RuntimeError("a bug")
        return compute(*args, **named)

    return loss


def loop_of_two(folder: Path) -> None:
    """A loop of one's own with DDP and with FSDP2, with and without the recorder; each process has its own 16 completions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo")
    kept = {}
    for kind in ("ddp", "fsdp2"):
        for recorded in (False, True):
            model = small_model(model={"tie": False})
            if kind == "ddp":
                wrapped: Any = DistributedDataParallel(model)
            else:
                for part in (*model.model.layers, model):
                    fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
                wrapped = model
            optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
            rec: Any = None
            if recorded:
                options: dict[str, Any] = {
                    "recording": {"token_gradients_every": 1},
                    "critical_sharpness": 1,
                }
                rec = record(
                    wrapped, optimizer, tokenizer=tokenizer(), out=folder / kind, steps=2, **options
                )
            for step in range(2):
                b = drawn(wrapped, 2 * step + distributed.rank())
                total = float(b["mask"].sum())
                logp = logps(wrapped, b["ids"], b["attention"])
                loss = surrogate(logp, b, slice(0, 16), total)
                if rec is not None:
                    given = {name: b[name] for name in ("advantages", "rewards")} | {
                        "old_logp": b["old"]
                    }
                    groups = [(distributed.rank(), int(group)) for group in b["groups"]]
                    rec.tokens(
                        logp,
                        b["ids"],
                        b["mask"],
                        attention_mask=b["attention"],
                        groups=groups,
                        **given,
                    )
                loss.backward()
                if rec is not None:

                    def again(b: Any = b, total: float = total, model: Any = model) -> torch.Tensor:
                        return surrogate(
                            logps(model, b["ids"], b["attention"]), b, slice(0, 16), total
                        )

                    rec.step(loss, loss_fn=again)
                optimizer.step()
                optimizer.zero_grad()
            if rec is not None:
                rec.close()
            kept[kind, recorded] = whole_weights(model)
    every = distributed.gather(kept)
    if distributed.is_rank_zero():
        torch.save(every, folder / "loop.pt")
    torch.distributed.barrier()
