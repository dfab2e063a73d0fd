"""Low-rank adapters from peft: add, load, check and disable them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from sharpscope.config.policy import LoraSpec
from sharpscope.errors import UserError
from sharpscope.quiet import silenced

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def has_adapters(model: nn.Module) -> bool:
    """Whether the model is a peft model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def add_adapters(model: nn.Module, spec: LoraSpec, base: str) -> nn.Module:
    """Add new adapters to a model; they are its only trainable parameters.

    The adapters are float32, or float64 in a float64 model. B is zero, so the outputs do not change. A has peft's
    distribution, uniform with variance 1/(3·inputs), seeded with `spec.seed`.

    Args:
        model: A causal LM; its linear layers are replaced in place.
        spec: Rank, scale and target modules.
        base: Folder or hub id of the base model, stored with the adapters.

    Raises:
        UserError: peft is not installed, or no layer matches the target modules.
    """
    peft = _peft()
    names = spec.target_modules if isinstance(spec.target_modules, str) else list(spec.target_modules)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=spec.r, lora_alpha=spec.alpha, target_modules=names, lora_dropout=0.0, bias="none"
    )
    try:
        with torch.random.fork_rng(devices=[]), silenced():  # peft initializes A from the global generator
            adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"policy.lora.target_modules {names!r}: {str(error).splitlines()[0]}") from None
    config.base_model_name_or_path = base
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name:
                bound = 1 / math.sqrt(parameter[0].numel())
                uniform = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_((2 * uniform - 1) * bound)
    return adapted.eval()


def load_adapters(model: nn.Module, folder: Path) -> nn.Module:
    """Add the trainable adapters saved in `folder` to a model, from safetensors only.

    Raises:
        UserError: peft or the weights are missing, or the adapters do not match the model.
    """
    if not (folder / ADAPTER_WEIGHTS).is_file():  # peft would load a pickle, which can run code
        raise UserError(
            f"policy.model '{folder}': no {ADAPTER_WEIGHTS} in that folder; save the adapters with save_pretrained (safetensors)"
        )
    peft = _peft()
    try:
        with silenced():
            adapted = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"policy.model '{folder}': cannot load the adapters: {str(error).splitlines()[0]}") from error
    return adapted.eval()


def check_agrees(model: nn.Module, spec: LoraSpec, folder: Path) -> None:
    """Check that the adapters loaded from `folder` match `spec`, except for the seed.

    Raises:
        UserError: They differ, so the stored configuration would not describe the trained model.
    """
    saved = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    targets, present = _layers(model, spec.target_modules)
    values: dict[str, tuple[Any, Any]] = {"r": (spec.r, saved.get("r")), "alpha": (spec.alpha, saved.get("lora_alpha"))}
    if targets != present:
        values["target_modules"] = (spec.target_modules, sorted({name.rpartition(".")[2] for name in present}))
    for name, (configured, actual) in values.items():
        if configured != actual:
            raise UserError(
                f"policy.lora.{name} = {configured}: the adapters in '{folder}' have {actual}; remove policy.lora to use "
                "them, or set policy.model to their base model for new ones"
            )


def _layers(model: nn.Module, names: str | tuple[str, ...]) -> tuple[set[str], set[str]]:
    """Linear layers that match `names` by peft's rules, and layers with an adapter."""
    adapted: Any = model
    modules: dict[str, nn.Module] = dict(adapted.named_modules())
    present = {name for name in modules if f"{name}.base_layer" in modules}
    linear = {
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in name and not name.endswith(".base_layer")
    } | present
    if names == "all-linear":
        output = adapted.get_output_embeddings()
        return {name for name in linear if modules[name] is not output}, present
    return {name for name in linear if name.endswith(tuple(f".{suffix}" for suffix in names))}, present


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
