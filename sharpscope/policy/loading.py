"""Load models, tokenizers and adapters from the package, a folder or the Hugging Face Hub."""

from __future__ import annotations

import importlib.util
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.logging import disable_progress_bar

from sharpscope.config.run import EMBEDDED_NAMES, EMBEDDED_PREFIX, LoraSpec, PolicySpec
from sharpscope.errors import UserError, first_line, nearest
from sharpscope.memory import require_memory, stored_numbers
from sharpscope.packaged import data_path
from sharpscope.policy.cache import check_cacheable
from sharpscope.policy.head import Head, bare, check_head, output_head
from sharpscope.untrusted import read_json

GGUF = ".gguf"


@dataclass(frozen=True)
class Policy:
    """A causal language model, in eval mode, with its tokenizer."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    source: str  # its name in the configuration
    eos_ids: tuple[int, ...]  # tokens that end a completion
    pad_id: int  # always masked
    context: int | None  # maximum sequence length [tokens]; None: no limit
    chat: bool  # whether prompts use the tokenizer's chat template
    # type of matrix products (autocast); None: that of the weights
    compute: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """Device of the model's parameters."""
        return next(self.model.parameters()).device

    @property
    def head(self) -> Head:
        """The output layer, with the model's parameters."""
        return output_head(self.model)


LARGEST_SETTINGS = 16_000_000
"""Largest file of adapters' settings [bytes]."""


def load_policy(spec: PolicySpec, base: str | None = None) -> Policy:
    """Load a policy from `embedded:NAME`, a local folder, a GGUF file or a hub id; weights from safetensors or GGUF only.

    Args:
        spec: The policy's configuration. A folder of adapters names its base model, and takes no `spec.lora` unless it is a
            checkpoint of a run.
        base: For a checkpoint of a run, the model with which the run started; replaces the base model of the adapters.

    Raises:
        UserError: The model, its weights or its tokenizer are missing, incomplete or not supported, or `spec.lora` is given
            for a folder of adapters.
    """
    disable_progress_bar()  # transformers' bar for loading weights
    adapters = adapter_folder(spec.model)
    if adapters is not None:
        if spec.lora is not None and base in (None, spec.model):
            raise UserError(
                f"policy.lora: '{spec.model}' is a folder of adapters and is trained; remove policy.lora"
            )
        named = base or base_of(adapters)  # itself a folder of adapters if a run started with one
        inner = adapter_folder(named)
        spec = spec.model_copy(update={"model": named if inner is None else base_of(inner)})
    model, tokenizer, location = _load(spec, frozen=adapters is not None or spec.lora is not None)
    if adapters is not None:
        model = load_adapters(model, adapters)
    elif spec.lora is not None:
        model = add_adapters(model, spec.lora, location)
    compute = torch.bfloat16 if spec.dtype == "bfloat16" else None
    return make_policy(model, tokenizer, spec.model, spec.prompt_format, compute)


def _load(spec: PolicySpec, frozen: bool) -> tuple[nn.Module, PreTrainedTokenizerBase, str]:
    """Load the model on its device and its tokenizer; also return their folder, file or hub id."""
    location = _locate(spec.model)
    source = location
    options: dict[str, Any] = {"trust_remote_code": False}
    if location.endswith(GGUF):
        if importlib.util.find_spec("gguf") is None:
            raise UserError(
                f"policy.model {spec.model!r}: GGUF files need gguf; pip install 'sharpscope[gguf]'"
            )
        source = str(Path(location).parent)
        options["gguf_file"] = Path(location).name
    try:
        config = AutoConfig.from_pretrained(source, **options)
        device = _device(spec.device)
        dtype = torch.float64 if spec.dtype == "float64" else torch.float32  # of trained weights
        if frozen and spec.dtype == "bfloat16":
            dtype = torch.bfloat16
        weights = stored_numbers(Path(location)) * dtype.itemsize
        require_memory(
            weights,
            device,
            f"loading {spec.model} in {spec.dtype}",
            "take a smaller model",
        )
        tokenizer = _tokenizer(source, options)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # made of no files by transformers
            raise UserError(
                f"policy.model {spec.model!r}: has no tokenizer; tokenizer.save_pretrained writes it"
            )
        # which sdpa does not support
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        experts = ("num_experts", "num_local_experts", "n_routed_experts")
        if any(getattr(config, name, None) for name in experts):
            # The only implementation with forward-mode derivatives, which runs them one by one.
            options["experts_implementation"] = "eager"
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation="eager" if capped else "sdpa",
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except UserError:
        raise
    except Exception as error:  # broken files can raise any exception in transformers
        problem = "" if Path(location).exists() else "no such folder, and as a hub id it "
        raise UserError(
            f"policy.model {spec.model!r}: {problem}cannot be loaded: {first_line(error)}"
        ) from error
    model, info = loaded
    missing = sorted(map(str, [*info["missing_keys"], *info.get("mismatched_keys", ())]))
    if missing:
        lacks = f"the checkpoint has no weights for {missing[0]} ({len(missing)} in all)"
        raise UserError(
            f"policy.model {spec.model!r}: {lacks}; save the full model with save_pretrained"
        )
    if location.endswith(GGUF):
        del model.config.quantization_config  # the weights are dequantized, and can be saved
        model.hf_quantizer = None
    return model.to(device).eval(), tokenizer, location


def make_policy(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    prompt_format: str = "auto",
    compute: torch.dtype | None = None,
) -> Policy:
    """Create a Policy from a model and a tokenizer.

    Raises:
        UserError: The architecture is not supported, or the tokenizer does not match the model.
    """
    config = bare(model).config
    check_cacheable(model)
    head = output_head(model)
    check_head(model, head)
    words = head.weight.shape[0]
    if len(tokenizer) > words:
        more = f"the tokenizer has {len(tokenizer)} tokens, the model {words}"
        raise UserError(f"policy.model {source!r}: {more}; use the model's tokenizer")
    eos_ids = _eos_ids(model, tokenizer)
    if not eos_ids:
        none = "neither the tokenizer nor the generation config has an end-of-text token"
        raise UserError(f"policy.model {source!r}: {none}; set eos_token in tokenizer_config.json")
    if prompt_format == "chat" and not tokenizer.chat_template:
        raise UserError(
            f"policy.prompt_format 'chat': the tokenizer of {source!r} has no chat template; use 'plain'"
        )
    return Policy(
        model=model,
        tokenizer=tokenizer,
        source=source,
        eos_ids=eos_ids,
        # Many tokenizers have no padding token; any token works, since padding is masked.
        pad_id=eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        context=getattr(config, "max_position_embeddings", None),
        chat=bool(tokenizer.chat_template) and prompt_format != "plain",
        compute=compute,
    )


def _locate(model: str) -> str:
    """Resolve `policy.model` to a folder, GGUF file or hub id."""
    if model.startswith(EMBEDDED_PREFIX):
        return str(embedded_policy(model.removeprefix(EMBEDDED_PREFIX)))
    path = Path(model).expanduser()
    problem = ""
    if path.is_dir():
        if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            problem = (
                "needs config.json and weights in *.safetensors, as save_pretrained writes them"
            )
        if any(path.glob(f"*{GGUF}")) and not any(path.glob("*.safetensors")):
            problem = f"has a GGUF file; give the file itself: {next(path.glob(f'*{GGUF}'))}"
    elif path.is_file():
        problem = "" if path.suffix == GGUF else "is neither a .gguf file nor a folder"
    elif model.count("/") > 1 or model[0] in "./~" or "\\" in model:
        problem = "no such folder; give an existing folder, a hub id or embedded:NAME"
    else:
        return model
    if problem:
        raise UserError(f"policy.model {model!r}: {problem}")
    return str(path)


def _tokenizer(location: str, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Load the tokenizer described by its files.

    For some model types, such as Qwen2, AutoTokenizer ignores a generic class in tokenizer_config.json and uses the original
    models' class with its pre-tokenizer, which can differ from the saved one.
    """
    declared = get_tokenizer_config(location, **options).get("tokenizer_class")
    generic = declared in ("PreTrainedTokenizerFast", "TokenizersBackend")
    return (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(
        location, **options
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        # accelerate launch --cpu
        no_gpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
        return torch.device("cuda" if torch.cuda.is_available() and not no_gpu else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"policy.device {name!r}: not available ({first_line(error)}); use 'auto' or 'cpu'"
        ) from error
    return device


def _eos_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """End-of-text tokens of the tokenizer and of the generation config, which can differ (chat models often have two)."""
    listed = getattr(getattr(bare(model), "generation_config", None), "eos_token_id", None)
    found = [tokenizer.eos_token_id, *(listed if isinstance(listed, list | tuple) else [listed])]
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))


# -- Low-rank adapters from peft

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def has_adapters(model: nn.Module) -> bool:
    """Whether the model is a peft model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def add_adapters(model: nn.Module, spec: LoraSpec, base: str) -> nn.Module:
    """Add new adapters to a model; they are its only trainable parameters, float32, or float64 in a float64 model.

    B is zero, so the outputs do not change; A is the same for every run. The model's linear layers are replaced in place; `base`, the
    folder or hub id of the base model, is stored with the adapters.

    Raises:
        UserError: peft is not installed.
    """
    peft = _peft()
    modules = {"target_modules": "all-linear", "lora_dropout": 0.0, "bias": "none"}
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=spec.r,
        lora_alpha=spec.alpha,
        **modules,
    )
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(action="ignore", category=FutureWarning),
    ):
        torch.default_generator.manual_seed(0)
        adapted = peft.get_peft_model(model, config)
    config.base_model_name_or_path = base
    return cast(nn.Module, adapted.eval())


def load_adapters(model: nn.Module, folder: Path) -> nn.Module:
    """Add the trainable adapters saved in `folder`, as safetensors, to a model; raises UserError where they do not match it."""
    if not (folder / ADAPTER_WEIGHTS).is_file():  # peft would load a pickle, which can run code
        raise UserError(
            f"policy.model '{folder}': no {ADAPTER_WEIGHTS}; save the adapters with save_pretrained"
        )
    peft = _peft()
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            adapted = peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(
            f"policy.model '{folder}': cannot load the adapters: {str(error).splitlines()[0]}"
        ) from error
    return adapted.eval()


def adapter_folder(model: str) -> Path | None:
    """The folder `model`, if it contains adapters without a full model, else None."""
    folder = Path(model).expanduser()
    return (
        folder
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()
        else None
    )


def base_of(folder: Path) -> str:
    """Folder or hub id of the base model of saved adapters.

    Raises:
        UserError: The adapters do not name a base model.
    """
    settings = read_json(folder / ADAPTER_CONFIG, LARGEST_SETTINGS)
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base, str) or not base:
        raise UserError(
            f"policy.model '{folder}': {ADAPTER_CONFIG} names no base model; set base_model_name_or_path"
        )
    return base


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError(
            "policy.lora: peft is not installed; pip install 'sharpscope[peft]'"
        ) from None
    return peft


# -- The embedded policies


def embedded_policy(name: str) -> Path:
    """Folder of an embedded policy: a small model, its tokenizer and `warm_start.json`, the settings that made it.

    Raises:
        UserError: The name is unknown.
    """
    if name not in EMBEDDED_NAMES:
        raise UserError(f"embedded policy '{name}': unknown{nearest(name, EMBEDDED_NAMES)}")
    return data_path("policies", name)
