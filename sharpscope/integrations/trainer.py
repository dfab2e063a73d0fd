"""What the recorders use of the trainers of transformers and TRL, whose versions differ in the rest."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback


class Arguments(Protocol):
    """`TrainingArguments`, and what TRL's have beyond them."""

    output_dir: str | None
    learning_rate: float
    seed: int
    max_grad_norm: float
    train_batch_size: int
    gradient_accumulation_steps: int
    n_gpu: int
    fp16: bool
    torch_compile: bool
    optim: object
    steps_per_generation: int  # of GRPO
    delta: float | None  # of GRPO

    def to_dict(self) -> dict[str, object]:
        """All of them by name."""


class ShardingPlugin(Protocol):
    """Accelerate's settings of FSDP."""

    fsdp_version: int
    cpu_offload: object
    activation_checkpointing: bool


class AcceleratorState(Protocol):
    """What Accelerate knows of a launch."""

    fsdp_plugin: ShardingPlugin


class Accelerator(Protocol):
    """Accelerate's, which knows the launch."""

    state: AcceleratorState
    distributed_type: Enum
    mixed_precision: str
    is_fsdp2: bool
    sync_gradients: bool

    def unwrap_model(self, model: nn.Module) -> PreTrainedModel:
        """The model without what a launch puts around it."""


class State(Protocol):
    """Progress of a training."""

    max_steps: int
    global_step: int


class Control(Protocol):
    """What callbacks ask of a training."""

    should_training_stop: bool


class Trainer(Protocol):
    """A trainer of transformers or TRL."""

    args: Arguments
    accelerator: Accelerator
    model: nn.Module
    processing_class: PreTrainedTokenizerBase
    optimizer: torch.optim.Optimizer
    state: State
    control: Control
    compute_loss_func: object
    beta: float  # of DPO and GRPO
    _metrics: object  # of TRL
    _sharpscope: object  # its recorder

    def add_callback(self, callback: TrainerCallback) -> None:
        """Tell it of the training's events."""

    def remove_callback(self, callback: TrainerCallback) -> None:
        """Tell it nothing more."""


class GrpoTrainer(Trainer, Protocol):
    """TRL's GRPOTrainer."""

    loss_type: str
    importance_sampling_level: str
    num_generations: int
    num_iterations: int
    temperature: float
    epsilon_low: float
    epsilon_high: float
    reward_weights: Tensor
    reward_func_names: Sequence[str]

    def compute_loss(self, *args: object, **kwargs: object) -> object:
        """The loss of a micro-batch."""

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """GRPO's own."""
