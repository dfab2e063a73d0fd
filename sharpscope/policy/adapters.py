"""Low-rank adapters from peft: add, load and disable them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sharpscope.config.run import LoraSpec
from sharpscope.errors import UserError
from sharpscope.quiet import silenced

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def has_adapters(model: nn.Module) -> bool:
    """Whether the model is a peft model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def add_adapters(model: nn.Module, spec: LoraSpec, base: str) -> nn.Module:
    """Add new adapters to a model; they are its only trainable parameters, float32, or float64 in a float64 model.

    B is zero, so the outputs do not change. A has peft's distribution, uniform with variance 1/(3·inputs), the same for every run.
    The model's linear layers are replaced in place; `base`, the folder or hub id of the base model, is stored with the adapters.

    Raises:
        UserError: peft is not installed.
    """
    peft = _peft()
    modules = {"target_modules": "all-linear", "lora_dropout": 0.0, "bias": "none"}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=spec.r, lora_alpha=spec.alpha, **modules)
    with torch.random.fork_rng(devices=[]), silenced():  # peft initializes A from the global generator
        adapted = peft.get_peft_model(model, config)
    config.base_model_name_or_path = base
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name:
                bound = 1 / math.sqrt(parameter[0].numel())
                uniform = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_((2 * uniform - 1) * bound)
    return adapted.eval()


def load_adapters(model: nn.Module, folder: Path) -> nn.Module:
    """Add the trainable adapters saved in `folder`, as safetensors, to a model; raises UserError where they do not match it."""
    if not (folder / ADAPTER_WEIGHTS).is_file():  # peft would load a pickle, which can run code
        raise UserError(f"policy.model '{folder}': no {ADAPTER_WEIGHTS}; save the adapters with save_pretrained")
    peft = _peft()
    try:
        with silenced():
            adapted = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"policy.model '{folder}': cannot load the adapters: {str(error).splitlines()[0]}") from error
    return adapted.eval()


def adapter_folder(model: str) -> Path | None:
    """The folder `model`, if it contains adapters without a full model, else None."""
    folder = Path(model).expanduser()
    return folder if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file() else None


def base_of(folder: Path) -> str:
    """Folder or hub id of the base model of saved adapters.

    Raises:
        UserError: The adapters do not name a base model.
    """
    base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"policy.model '{folder}': {ADAPTER_CONFIG} names no base model; set base_model_name_or_path")
    return base


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[nn.Module]:
    """Disable the adapters of `model` in this context."""
    adapted: Any = model
    with adapted.disable_adapter():
        yield model


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError("policy.lora: peft is not installed; pip install 'sharpscope[peft]'") from None
    return peft
