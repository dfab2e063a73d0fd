"""Low-rank adapters by peft: added to a model, saved without it, switched off to be the reference policy."""

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
    """Whether peft wraps the model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def add_adapters(model: nn.Module, spec: LoraSpec, base: str) -> nn.Module:
    """`model` with fresh float32 (float64 in a float64 model) adapters, the only trainable parameters.

    The adapted model starts as the model itself: B is zero. A is drawn from `spec.seed` as peft draws it, uniform with
    variance 1/(3·inputs).

    Args:
        model: a causal LM; its linear layers are changed in place.
        spec: rank, scale and place.
        base: the folder or hub id that the saved adapters will name as what they belong to.

    Raises:
        UserError: peft is missing, or no layer has one of the names.
    """
    peft = _peft()
    names = spec.target_modules if isinstance(spec.target_modules, str) else list(spec.target_modules)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=spec.r, lora_alpha=spec.alpha, target_modules=names, lora_dropout=0.0, bias="none"
    )
    try:
        with torch.random.fork_rng(devices=[]), silenced():  # peft draws A from the global generator; we draw it anew
            adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"policy.lora.target_modules {names!r}: {str(error).splitlines()[0]}") from None
    config.base_model_name_or_path = base
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name:
                bound = 1 / math.sqrt(parameter[0].numel())
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_((2 * drawn - 1) * bound)
    return adapted.eval()


def load_adapters(model: nn.Module, folder: Path) -> nn.Module:
    """`model` with the adapters that `folder` holds, trainable; weights from safetensors only.

    Raises:
        UserError: peft or the adapters' weights are missing, or they do not fit the model.
    """
    if not (folder / ADAPTER_WEIGHTS).is_file():  # peft would take a pickle, which can run code when it is read
        raise UserError(
            f"policy.model '{folder}': no {ADAPTER_WEIGHTS} in that folder; save the adapters with save_pretrained (safetensors)"
        )
    peft = _peft()
    try:
        with silenced():
            adapted = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"policy.model '{folder}': its adapters do not load: {str(error).splitlines()[0]}") from error
    return adapted.eval()


def check_agrees(model: nn.Module, spec: LoraSpec, folder: Path) -> None:
    """Whether the adapters that `model` got from `folder` are those that `spec` asks for (but for the seed of new ones).

    Raises:
        UserError: they are not, so that a run's stored configuration would not say what was trained.
    """
    saved = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    wanted, there = _layers(model, spec.target_modules)
    asked: dict[str, tuple[Any, Any]] = {"r": (spec.r, saved.get("r")), "alpha": (spec.alpha, saved.get("lora_alpha"))}
    if wanted != there:
        asked["target_modules"] = (spec.target_modules, sorted({name.rpartition(".")[2] for name in there}))
    for name, (given, found) in asked.items():
        if given != found:
            raise UserError(
                f"policy.lora.{name} = {given}: the adapters in '{folder}' have {found}; leave policy.lora out to go on with "
                "them, or name their base model as policy.model to begin new ones"
            )


def _layers(model: nn.Module, names: str | tuple[str, ...]) -> tuple[set[str], set[str]]:
    """Linear layers that adapters of `names` would be on by peft's rules, and those that have one."""
    adapted: Any = model
    modules: dict[str, nn.Module] = dict(adapted.named_modules())
    present = {name for name in modules if f"{name}.base_layer" in modules}
    own = {
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in name and not name.endswith(".base_layer")
    } | present
    if names == "all-linear":
        output = adapted.get_output_embeddings()
        return {name for name in own if modules[name] is not output}, present
    return {name for name in own if name.endswith(tuple(f".{ending}" for ending in names))}, present


def adapter_folder(model: str) -> Path | None:
    """The folder that `policy.model` names, if it holds adapters and not a whole model."""
    folder = Path(model).expanduser()
    return folder if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file() else None


def base_of(folder: Path) -> str:
    """The model that saved adapters belong to."""
    base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"policy.model '{folder}': {ADAPTER_CONFIG} names no base model; set base_model_name_or_path")
    return base


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[nn.Module]:
    """The base model, with `model`'s adapters switched off."""
    adapted: Any = model
    with adapted.disable_adapter():
        yield model


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError("policy.lora: peft is not installed; pip install 'sharpscope[peft]'") from None
    return peft
