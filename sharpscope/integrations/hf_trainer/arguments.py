"""A trainer's arguments as the configuration of a run, and checks for what cannot be recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharpscope.config import RunConfig, check_keys, validate
from sharpscope.errors import UserError
from sharpscope.policy.adapters import has_adapters

_SCHEDULES = ("constant", "linear", "cosine")


def check_setup(trainer: Any) -> None:
    """Check the trainer's launch, and that its loss does not hide the log-probabilities.

    Raises:
        UserError: an option or a setup is not supported; the message names it.
    """
    args, accelerator = trainer.args, trainer.accelerator
    if getattr(trainer, "use_liger_kernel", False) or getattr(args, "use_liger_kernel", False):
        raise UserError(
            "record: use_liger_kernel = True computes the loss without per-token log-probabilities; set it to False"
        )
    kind = str(accelerator.distributed_type.value)
    if kind == "DEEPSPEED":
        raise UserError("record: DeepSpeed is not supported; start the trainer without it (DDP and FSDP2 are recorded)")
    if kind == "FSDP":
        _check_fsdp(trainer)
    if args.n_gpu > 1:
        raise UserError(
            f"record: {args.n_gpu} GPUs in one process (DataParallel); set CUDA_VISIBLE_DEVICES to one of them"
        )
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        raise UserError(
            f"record: distributed_type {kind} is not supported; start one process, or several with DDP or FSDP2"
        )
    if args.fp16:
        raise UserError("record: fp16 = True scales the loss by a changing factor; use bf16 or float32")


def _check_fsdp(trainer: Any) -> None:
    """Check the options of FSDP.

    Raises:
        UserError: one of them is not supported; the message names it.
    """
    state, args = trainer.accelerator.state, trainer.args
    plugin = state.fsdp_plugin
    if not trainer.accelerator.is_fsdp2:
        raise UserError(f"record: fsdp_version = {plugin.fsdp_version} is not supported; set it to 2, or use DDP")
    if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise UserError("record: FSDP with weights offloaded to the CPU is not supported; set offload_params to False")
    if plugin.activation_checkpointing:
        raise UserError(
            "record: FSDP's activation_checkpointing wraps layers under other names; set gradient_checkpointing = True in its place"
        )
    if getattr(state, "parallelism_config", None) is not None:
        raise UserError("record: FSDP with a parallelism_config is not supported; leave it out")
    if has_adapters(trainer.accelerator.unwrap_model(trainer.model)):
        raise UserError("record: FSDP with adapters (peft) is not supported; use DDP")
    if not str(getattr(args.optim, "value", args.optim)).startswith("adamw"):
        raise UserError(f"record: optim = {args.optim} with FSDP is not supported; use an AdamW, such as adamw_torch")


def common_settings(trainer: Any, out: Path, task: str, steps: int) -> dict[str, Any]:
    """The parts of a run's configuration that every trainer has."""
    args = trainer.args
    model = trainer.accelerator.unwrap_model(trainer.model)
    schedule = _schedule(trainer)
    return {
        "out": str(out),
        "seed": int(args.seed),
        "steps": max(1, steps),
        "task": {"kind": "custom", "factory": task},
        "policy": {
            "model": str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
        },
        "optimizer": {
            "lr": float(args.learning_rate),
            "beta1": float(args.adam_beta1),
            "beta2": float(args.adam_beta2),
            "eps": float(args.adam_epsilon),
            "weight_decay": float(args.weight_decay),
            "max_grad_norm": float(args.max_grad_norm) or None,
            "schedule": schedule if schedule in _SCHEDULES else "constant",
        },
        "evaluation": {"every": 0},
        "checkpoint": {"every": 0},
        "probes": {"preset": "off"},
    }


def checked_config(data: Mapping[str, Any]) -> RunConfig:
    """The configuration.

    Raises:
        UserError: an option is wrong or not available for the run of another trainer.
    """
    check_keys(RunConfig, data)
    config: RunConfig = validate(RunConfig, data)
    if config.recording.heldout_influence_every != 0:
        raise UserError(
            "recording.heldout_influence_every: a recorded trainer has no probe set of held-out prompts; set it to 0"
        )
    if config.recording.probe_entropy_every:
        raise UserError("recording.probe_entropy_every: a recorded trainer has no probe set; set it to 0")
    return config


def schedule_notes(trainer: Any) -> list[str]:
    """A note on a learning-rate schedule that the configuration cannot express."""
    schedule = _schedule(trainer)
    return [] if schedule in _SCHEDULES else [f"the learning rate follows the trainer's schedule '{schedule}'"]


def _schedule(trainer: Any) -> str:
    kind = trainer.args.lr_scheduler_type
    return str(getattr(kind, "value", kind))
