"""Every causal architecture of the installed transformers, tiny, through every probe, against plain autograd.

Each architecture is built with two or a few layers of width 32 and random float64 weights. The per-token norms (all
methods), the shares of the gradient and one Hessian-vector product are compared with
plain `torch.autograd.grad` through the model's own forward pass with eager attention, one token after the other. Each
architecture runs in a process of its own, so that a crash or a hang of one leaves the others alone.

    python -m experiments.benchmarks.architectures --only qwen2 --only gemma2
    python -m experiments.benchmarks.architectures --out docs/architectures.md
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sharpscope.errors import CheckError, UserError
from sharpscope.probes import ScoreNorms, attribute, score_norms
from sharpscope.probes.language_model import lm_surface
from sharpscope.probes.objectives import Objective, token_batch

VOCAB = 64

# Fields that many configurations share: a value, and the fields that get it.
_SIZES = """
    # vocabulary
    64 vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size padded_vocab_size
    # widths
    32 hidden_size d_model n_embd embedding_size word_embed_proj_dim emb_dim embedding_dim
    48 intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dim_ff dff d_inner
    48 feed_forward_size dense_intermediate_size intermediate_size_mlp
    16 moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size
    16 expert_ffn_hidden_size moe_shared_expert_intermediate_size shared_intermediate_size
    # depths and heads
    2 num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers
    2 num_decoder_layers num_layers_per_stack
    4 num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads
    4 decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads
    4 linear_num_value_heads mamba_n_heads linear_num_heads
    2 num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_global_key_value_heads
    8 head_dim d_head dim_head kv_channels swa_head_dim v_head_dim qk_nope_head_dim linear_key_head_dim
    8 linear_value_head_dim linear_head_dim global_head_dim attention_head_size index_head_dim
    4 qk_rope_head_dim
    12 qk_head_dim
    4 rotary_dim
    8 kv_lora_rank q_lora_rank
    # experts
    4 num_experts num_local_experts n_routed_experts moe_num_experts
    2 num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts
    1 n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers n_group
    1 topk_group num_expert_group
    2 zero_expert_num
    # selection of keys: few rectified heads would often score all positions 0, and which of equals are selected is arbitrary
    16 index_n_heads indexer_n_heads
    # lengths; windows are shorter than the rows that are compared
    64 max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length
    64 max_target_positions original_max_position_embeddings
    4 sliding_window sliding_window_size window_size local_attention attention_chunk_size attention_window_size
    4 index_topk keep_window_size
    # state-space layers
    8 mamba_d_state state_size ssm_state_size
    4 mamba_dt_rank time_step_rank chunk_size mamba_chunk_size
    16 mamba_d_head
    # Gemma 3n and 4
    8 hidden_size_per_layer_input
    4 laurel_rank
    0 num_kv_shared_layers
    # special tokens; those of images and sound are never drawn
    0 pad_token_id
    1 bos_token_id
    2 eos_token_id
    3 sep_token_id
    1 decoder_start_token_id
    2 type_vocab_size
"""
SIZES: dict[str, int] = {
    field: int(value)
    for value, *fields in map(str.split, _SIZES.strip().splitlines())
    for field in fields
    if value != "#"
}
NESTED = ("text_config", "decoder", "vision_config", "audio_config")

# Some layers use the keys and values of an earlier one.
SHARED_KEYS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
# Latent attention keeps one key head per query head, and rotates a part of each head only.
LATENT = {"num_key_value_heads": 4, "head_dim": 4}
_LATENT_NAMES = """
axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear minicpm3 longcat_flash youtu
"""
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_LATENT_NAMES.split(), LATENT),
    "dots3_note_text": LATENT
    | {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 8,
        "swa_kv_lora_rank": 8,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
        "head_dim": 12,
    },
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2},
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 4, "hc_mult": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {
        "shape_embed_dim": 8,
        "shape_vocab_size": 64,
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": 64,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    **dict.fromkeys(("gemma3n_text", "gemma4_text"), SHARED_KEYS),
    "dots3_note.vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note.audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    },
}
SPECIAL["dots3_note.text_config"] = SPECIAL["dots3_note_text"]
SPECIAL["qwen4_exp.text_config"] = SPECIAL["qwen4_exp_text"]
"""What the shared sizes do not fit, by name of architecture."""


def tiny_config(name: str) -> PreTrainedConfig:
    """The configuration of the architecture `name` at a width of about 32 with one layer of each kind, two at least."""
    return _tiny(type(CONFIG_MAPPING[name]()), name)


def _tiny(kind: type[PreTrainedConfig], name: str) -> PreTrainedConfig:
    default = kind()
    known = default.to_dict()
    chosen = {
        key: value
        for key, value in SIZES.items()
        if key in known and key not in default.attribute_map and not (known[key] is None and key in OPTIONAL)
    }
    patterns = {key: list(dict.fromkeys(known[key])) for key in PATTERNS if isinstance(known.get(key), list)}
    depth = max([2, *map(len, patterns.values())])
    for key, distinct in patterns.items():
        chosen[key] = [distinct[i % len(distinct)] for i in range(depth)]
    chosen |= {key: depth for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if key in chosen}
    for key in NESTED:
        if isinstance(inner := getattr(default, key, None), PreTrainedConfig):
            chosen[key] = _tiny(type(inner), f"{name}.{key}").to_dict()
    for place, key in enumerate(("image_token_id", "image_token_index", "video_token_id", "audio_token_id")):
        if isinstance(known.get(key), int):
            chosen[key] = 4 + place
    if "is_decoder" in known:
        chosen["is_decoder"] = True
    return kind(**chosen | SPECIAL.get(name, {}))


# Parts that these fields switch on stay off where a configuration leaves them out.
OPTIONAL = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "q_lora_rank",
    "rotary_dim",
    "n_inner",
    "swa_head_dim",
    "global_head_dim",
    "index_head_dim",
    "embedding_size",
)
PATTERNS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attn_layers")


# What is compared.

TEMPERATURE = 1.3  # other than 1, so that its place in every formula counts
CHECKS = ("head", "local", "sketch", "exact", "shares", "hessian")
FLOAT32_CHECKS = ("local", "exact", "shares")
DIRECTIONS = 96  # fewer give low estimates with low standard errors now and then
# Largest relative error that counts as right. Many models cast norms, routers or an eager softmax to float32 even when their
# weights are float64, which leaves about 1e-6.
TOLERANCE = dict.fromkeys(CHECKS, 1e-4) | {"sketch": 5.0}
FLOAT32_TOLERANCE = dict.fromkeys(CHECKS, 2e-3) | {"sketch": 5.0}
MOST_PARAMETERS = 8_000_000
RIGHT, REFUSED, CAUGHT, WRONG, CRASH, SKIPPED = (
    "right",
    "refused",
    "stopped by the self-check",
    "wrong",
    "crash",
    "not compared",
)


@dataclass(frozen=True)
class Outcome:
    """How one check ended.

    Attributes:
        kind: right, refused (by `UserError`), stopped by the self-check (`CheckError`), wrong (an error above the
            tolerance), crash or not compared.
        error: largest relative error over the tokens; of the sketch, in standard errors; None where nothing was compared.
        text: the message of a refusal or a crash, or why nothing was compared.
    """

    kind: str
    error: float | None = None
    text: str = ""


@dataclass
class Report:
    """One architecture.

    Attributes:
        name: model type; `cls`: the class.
        dtype: of the weights, with the reason where it is not float64.
        reason: why it could not be built or has no oracle; then `checks` is empty.
        checks: by name of the check, those of the float32 model as `float32 exact` and so on.
    """

    name: str
    cls: str
    dtype: str = "float64"
    reason: str = ""
    seconds: float = 0.0
    checks: dict[str, Outcome] = field(default_factory=dict)

    @property
    def failed(self) -> dict[str, Outcome]:
        """Checks that ended in a crash or in a wrong number."""
        return {name: outcome for name, outcome in self.checks.items() if outcome.kind in (WRONG, CRASH)}


# The models.


def build(config: PreTrainedConfig, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """A model in eval mode, its weights random in float32."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), **options).to(dtype).eval()


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> None:
    """Redraw matrices with standard deviation 1/√fan-in, and move everything else, so that no part is zero or constant."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        finite = bool(parameter.isfinite().all())
        scale = float(parameter.std()) if finite and parameter.numel() > 1 else 0.0
        if not finite or (parameter.ndim >= 2 and float(parameter.mean().abs()) < max(scale, 1e-12)):
            fan_in = min(max(parameter.shape[-1], 1), 64)
            parameter.copy_(noise / math.sqrt(fan_in))
        else:  # gains, biases, decay rates: near what they were
            parameter.add_(0.1 * noise * max(1.0, float(parameter.abs().mean()) if finite else 1.0))


def rows() -> dict[str, Tensor]:
    """Two rows of nine and seven tokens, the second padded on the left; seven tokens are marked.

    Windows are four positions long, so the later tokens look beyond them.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(10, VOCAB, (2, 9), generator=generator)
    attention = torch.ones_like(ids)
    attention[1, :2] = 0
    mask = torch.zeros_like(ids)
    mask[0, [1, 4, 7, 8]] = 1
    mask[1, [3, 6, 8]] = 1
    return {"input_ids": ids * attention, "attention_mask": attention, "mask": mask}


# The oracle: nothing of it comes from the package.


class NoOracleError(Exception):
    """Plain autograd gives no number to compare with; the message says why."""


@dataclass
class Oracle:
    """Gradients by plain autograd: full, local and head (M, P) of the M marked tokens, local None without a cache."""

    full: Tensor
    head: Tensor | None
    local: Tensor | None
    why_not_local: str
    product: Tensor | None
    why_no_product: str


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Some models fix tables of positions and the like."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def token_logp(model: nn.Module, ids: Tensor) -> Tensor:
    """(L − 1,) log π of the tokens of one row (1, L) after its first, with graph."""
    logits = model(input_ids=ids, use_cache=False).logits
    if logits.shape != (1, ids.shape[1], VOCAB):
        raise NoOracleError(
            f"its logits have the shape {tuple(logits.shape)}, not one distribution over words per position"
        )
    logp = torch.log_softmax(logits[0, :-1] / TEMPERATURE, -1)
    return logp.gather(1, ids[0, 1:, None])[:, 0]


def flat(gradients: tuple[Tensor | None, ...], parameters: list[Tensor]) -> Tensor:
    """(P,) float64, zeros for parameters that were not used."""
    pairs = zip(gradients, parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g.detach()).reshape(-1).double() for g, p in pairs])


def marked(batch: dict[str, Tensor]) -> Iterator[tuple[Tensor, list[int]]]:
    """Each row's real tokens (1, L), and the indices of the marked ones among them."""
    for row in range(len(batch["input_ids"])):
        columns = batch["attention_mask"][row].nonzero()[:, 0]
        yield batch["input_ids"][row, columns][None], batch["mask"][row, columns].nonzero()[:, 0].tolist()


def full_gradients(model: nn.Module, batch: dict[str, Tensor], parameters: list[Tensor]) -> Tensor:
    found = []
    for ids, places in marked(batch):
        logp = token_logp(model, ids)
        for place in places:
            grads = torch.autograd.grad(logp[place - 1], parameters, retain_graph=True, allow_unused=True)
            found.append(flat(grads, parameters))
    return torch.stack(found)


def local_gradients(model: nn.Module, batch: dict[str, Tensor], parameters: list[Tensor], tolerance: float) -> Tensor:
    """The same through one step from a cache, whose keys and values are constants.

    Raises:
        NoOracleError: the model keeps no cache, or its step gives another log-probability than the whole row.
    """
    found = []
    for ids, places in marked(batch):
        with torch.no_grad():
            whole = token_logp(model, ids)
        for place in places:
            cache = None
            if place > 1:
                with torch.no_grad():
                    cache = getattr(model(input_ids=ids[:, : place - 1], use_cache=True), "past_key_values", None)
                if cache is None:
                    raise NoOracleError("the model returns no cache of keys and values")
            step = model(input_ids=ids[:, place - 1 : place], past_key_values=cache, use_cache=True).logits[0, -1]
            logp = torch.log_softmax(step / TEMPERATURE, -1)[ids[0, place]]
            if not abs(float(logp.detach()) - float(whole[place - 1])) < tolerance:
                raise NoOracleError(
                    f"a step from the model's own cache gives {float(logp.detach()):.4f} for the whole row's {float(whole[place - 1]):.4f}"
                )
            found.append(flat(torch.autograd.grad(logp, parameters, allow_unused=True), parameters))
    return torch.stack(found)


def head_gradients(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor | None:
    """Of the output layer alone, which gets a weight of its own for it; None where the model names no output layer."""
    layer: Any = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        return None
    weight = layer.weight
    layer.weight = nn.Parameter(weight.detach().clone())
    try:
        return full_gradients(model, batch, [p for p in (layer.weight, layer.bias) if p is not None])
    finally:
        layer.weight = weight


def hessian_product(model: nn.Module, batch: dict[str, Tensor], parameters: list[Tensor], vector: Tensor) -> Tensor:
    """(P,) ∇²L v by double backward, L the mean negative log-likelihood of the marked tokens."""
    loss, count = torch.zeros((), dtype=torch.float64), int(batch["mask"].sum())
    for ids, places in marked(batch):
        with sdpa_kernel(
            SDPBackend.MATH
        ):  # some call SDPA whatever the configuration says; the others' kernels lack this
            logp = token_logp(model, ids)
        loss = loss - logp[[place - 1 for place in places]].double().sum() / count
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    parts = vector.split([p.numel() for p in parameters])
    slope = sum(
        (g * part.view(p.shape).to(p)).sum().double()
        for g, p, part in zip(gradients, parameters, parts, strict=True)
        if g is not None
    )
    return flat(torch.autograd.grad(slope, parameters, allow_unused=True), parameters)


def oracle(model: PreTrainedModel, batch: dict[str, Tensor], vector: Tensor) -> Oracle:
    """Everything that plain autograd can say about the model.

    Raises:
        NoOracleError: not even a gradient.
    """
    parameters = trainable(model)
    try:
        full = full_gradients(model, batch, parameters)
    except NoOracleError:
        raise
    except Exception as problem:
        raise NoOracleError(f"its own forward or backward pass fails: {one_line(problem)}") from problem
    if not bool(full.isfinite().all()) or bool((full.norm(dim=1) == 0).any()):
        raise NoOracleError("its gradients are zero or not finite at this size")
    found = Oracle(full, None, None, "", None, "")
    try:
        found.head = head_gradients(model, batch)
    except Exception as problem:
        raise NoOracleError(f"its output layer cannot be told apart: {one_line(problem)}") from problem
    try:
        found.local = local_gradients(model, batch, parameters, 1e-4 if model.dtype == torch.float64 else 1e-3)
    except Exception as problem:
        found.why_not_local = str(problem) if isinstance(problem, NoOracleError) else f"cache step: {one_line(problem)}"
    try:
        found.product = hessian_product(model, batch, parameters, vector)
    except Exception as problem:
        found.why_no_product = f"double backward: {one_line(problem)}"
    return found


# The comparison.


def one_line(problem: BaseException) -> str:
    """Type and message, and where in the package it was raised."""
    message = " ".join(str(problem).split())
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if f"{os.sep}sharpscope{os.sep}" in f.filename]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(problem).__name__}: {message[:240]}{place}"


def attempt(measure: Callable[[], float], tolerance: float) -> Outcome:
    """Run one check, whatever happens in it."""
    try:
        error = measure()
        error = error if math.isfinite(error) else math.inf
    except CheckError as problem:
        return Outcome(CAUGHT, problem.error, " ".join(str(problem).split()))
    except UserError as problem:
        return Outcome(REFUSED, text=" ".join(str(problem).split()))
    except Exception as problem:
        return Outcome(CRASH, text=one_line(problem))
    return Outcome(RIGHT if error <= tolerance else WRONG, error)


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest relative error of positive numbers."""
    return float(((found.double() - expected).abs() / expected).max())


class Checks:
    """Every probe on one model against what the oracle found."""

    def __init__(
        self, model: PreTrainedModel, truth: Oracle, batch: dict[str, Tensor], vector: Tensor, check: Any = "first"
    ) -> None:
        self.model, self.truth, self.batch, self.vector, self.check = model, truth, batch, vector, check
        self.picked = batch["mask"].bool()

    def scores(self, method: Any) -> ScoreNorms:
        """Norms of the marked tokens; `directions` counts for the sketch alone."""
        return score_norms(
            self.model,
            self.batch["input_ids"],
            self.batch["mask"],
            method,
            self.batch["attention_mask"],
            TEMPERATURE,
            directions=DIRECTIONS,
            check=self.check,
        )

    def norms(self, method: Any, expected: Tensor) -> float:
        """Relative error of the norms."""
        return relative(self.scores(method).values[self.picked], expected.norm(dim=1))

    def sketch(self) -> float:
        """Distance of the sketch from the squared norm, in standard errors."""
        found = self.scores("sketch")
        expected = self.truth.full.square().sum(1)
        assert found.std_error is not None
        slack = found.std_error[self.picked].double() + 1e-5 * expected
        return float(((found.squared[self.picked].double() - expected).abs() / slack).max())

    def shares(self) -> float:
        """Largest error of a token's share of ‖∇L‖², and of their sum, relative to the largest share."""
        coef = torch.randn(int(self.picked.sum()), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        given = torch.zeros(self.picked.shape, dtype=torch.float64)
        given[self.picked] = coef
        total = coef @ self.truth.full
        expected = coef * (self.truth.full @ total) / total.square().sum()
        found = attribute(
            self.model,
            self.batch["input_ids"],
            self.batch["mask"],
            given.to(self.model.dtype),
            None,
            self.batch["attention_mask"],
            TEMPERATURE,
            check=self.check,
        )[self.picked].double()
        return max(float((found - expected).abs().max()), abs(float(found.sum()) - 1)) / float(expected.abs().max())

    def product(self) -> float:
        """Relative error of one Hessian-vector product."""
        assert self.truth.product is not None
        batch = token_batch(self.batch["input_ids"], self.batch["attention_mask"], self.batch["mask"])
        with lm_surface(self.model, Objective("nll", batch, TEMPERATURE)) as surface:
            hessian = surface.hessian()
            if self.check != "off":
                surface.check(hessian)
            found = hessian @ self.vector.to(self.model.dtype)
        return float((found.double() - self.truth.product).norm() / self.truth.product.norm())

    def run(self, names: tuple[str, ...], tolerance: dict[str, float]) -> dict[str, Outcome]:
        """The outcome of each check; what has no oracle counts as not compared, unless the probe refuses or crashes."""
        measures: dict[str, Callable[[], float]] = {
            "head": lambda: self.norms("head", self.truth.head if self.truth.head is not None else self.truth.full),
            "local": lambda: self.norms("local", self.truth.local if self.truth.local is not None else self.truth.full),
            "sketch": self.sketch,
            "exact": lambda: self.norms("exact", self.truth.full),
            "shares": self.shares,
            "hessian": self.product,
        }
        why_not = {
            "head": "" if self.truth.head is not None else "the model names no linear output layer",
            "local": self.truth.why_not_local,
            "hessian": self.truth.why_no_product,
        }
        found = {}
        for name in names:
            why = why_not.get(name, "")
            if why and name == "hessian":
                found[name] = Outcome(SKIPPED, text=why)
                continue
            outcome = attempt(measures[name], tolerance[name])
            if why and outcome.kind in (RIGHT, WRONG):
                outcome = Outcome(SKIPPED, text=why)
            found[name] = outcome
        return found


def unchanged(model: PreTrainedModel, before: dict[str, tuple[Tensor, bool]], logits: Tensor, ids: Tensor) -> Outcome:
    """Whether weights, buffers, gradients and logits are bit for bit what they were before the probes."""
    now = state(model)
    if now.keys() != before.keys():
        return Outcome(WRONG, text=f"the probes left other tensors: {sorted(now.keys() ^ before.keys())[:3]}")
    changed = [
        name
        for name, (tensor, requires_grad) in before.items()
        if not torch.equal(tensor, now[name][0]) or requires_grad != now[name][1]
    ]
    if changed:
        return Outcome(WRONG, text=f"the probes changed {', '.join(changed[:3])}")
    if model.training or any(p.grad is not None for p in model.parameters()):
        return Outcome(WRONG, text="the probes left a gradient or another mode")
    with torch.no_grad():
        if not torch.equal(model(input_ids=ids, use_cache=False).logits, logits):
            return Outcome(WRONG, text="the probes changed the logits")
    return Outcome(RIGHT, 0.0)


def state(model: nn.Module) -> dict[str, tuple[Tensor, bool]]:
    """Copies of all parameters and buffers by name, and whether they require a gradient."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: (tensor.detach().clone(), tensor.requires_grad) for name, tensor in tensors}


def examine(name: str, check: str = "first") -> Report:
    """Build one architecture and run every probe on it; `check` is that of the probes."""
    report = Report(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    began = time.perf_counter()
    batch = rows()
    try:
        config = tiny_config(name)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
        if size > MOST_PARAMETERS:
            report.reason = f"no tiny configuration: {size:,} parameters at least"
            return report
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        slow, dtype = build(config, torch.float64, **plain), torch.float64
        try:
            slow(input_ids=batch["input_ids"][:1], use_cache=False)
        except RuntimeError as problem:
            slow, dtype = build(config, torch.float32, **plain), torch.float32
            report.dtype = f"float32 (in float64: {one_line(problem)})"
    except Exception as problem:
        report.reason = f"cannot be built at a tiny size: {one_line(problem)}"
        return report
    randomize(slow)
    generator = torch.Generator().manual_seed(3)
    vector = torch.randn(sum(p.numel() for p in trainable(slow)), generator=generator, dtype=torch.float64)
    try:
        truth = oracle(slow, batch, vector)
    except NoOracleError as problem:
        report.reason = str(problem)
        return report
    weights = slow.state_dict()
    model = build(config, dtype, experts_implementation="eager")
    model.load_state_dict(weights)
    ids = batch["input_ids"][:1]
    with torch.no_grad():
        logits, before = model(input_ids=ids, use_cache=False).logits, state(model)
    tolerance = TOLERANCE if dtype == torch.float64 else FLOAT32_TOLERANCE
    report.checks |= Checks(model, truth, batch, vector, check).run(CHECKS, tolerance)
    report.checks["unchanged"] = unchanged(model, before, logits, ids)
    # As plain transformers loads a mixture of experts: float32 and grouped matrix products.
    loaded = build(config, torch.float32)
    if (getattr(loaded.config.get_text_config(), "_experts_implementation", None) or "eager") != "eager":
        loaded.load_state_dict(weights)
        found = Checks(loaded, truth, batch, vector, check).run(FLOAT32_CHECKS, FLOAT32_TOLERANCE)
        report.checks |= {f"float32 {check}": outcome for check, outcome in found.items()}
    report.seconds = time.perf_counter() - began
    return report


# Running all of them.


def _child(name: str, check: str, end: Any) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        end.send(asdict(examine(name, check)))
    end.close()


def apart(name: str, check: str = "first", limit: float = 300.0) -> Report:
    """`examine` in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(name, check, there))
    child.start()
    there.close()
    report = Report(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    try:
        if here.poll(limit):
            found = here.recv()
            checks = {check: Outcome(**outcome) for check, outcome in found.pop("checks").items()}
            return Report(**found, checks=checks)
        report.checks["process"] = Outcome(CRASH, text=f"no result within {limit:g} s")
    except EOFError:
        child.join()
        report.checks["process"] = Outcome(CRASH, text=f"the process ended with code {child.exitcode}")
    finally:
        child.kill()
        child.join()
    return report


# The table.

INTRO = """# Architectures

Which probes work on which of the {count} causal architectures of transformers {version}, as `experiments/benchmarks/architectures.py`
found it with torch {torch}; the script writes this page. Each architecture was built at a tiny size (width 32, two layers or one of
each kind, {vocab} words, windows of four positions) with random float64 weights, none of them zero. On two rows of nine and seven
tokens every probe was compared with plain `torch.autograd.grad` through the model's own forward pass with eager attention, one
token after the other:

- `head`, `local`, `sketch`, `exact`: the norms of `score_norms`. The oracle of `head` is the gradient of the output layer alone;
  that of `local` is a single step from the model's own cache, whose keys and values are constants. The sketch is given in standard
  errors from the squared norm ({directions} directions); up to 5 counts as right.
- `shares`: those of `attribute` and their sum, relative to the largest share.
- `hessian`: one Hessian-vector product of the negative log-likelihood against double backward.
- `float32`: a mixture of experts as plain transformers loads it, with grouped matrix products: the largest error of `local`,
  `exact` and `shares`.

A number is the largest relative error over the tokens. Many models cast norms, routers or a softmax to float32 whatever their
weights are, which leaves about 1e-7. After the probes, weights, buffers and logits were
bit for bit what they were before. *refused* means a `UserError` of one line, its reason on the right; *self-check* means a
`CheckError`: the probe found that its numbers differ from autograd's and did not report them. A dash means that the oracle does
not exist, for the reason given. Tiny random models show whether the mathematics is right; they say nothing about memory or speed.
"""


def table(reports: list[Report]) -> str:
    """The page in Markdown."""
    compared = [report for report in reports if not report.reason]
    lines = [
        INTRO.format(
            count=len(reports),
            version=transformers.__version__,
            torch=torch.__version__.partition("+")[0],
            vocab=VOCAB,
            directions=DIRECTIONS,
        ),
        "| | " + " | ".join(CHECKS) + " |",
        "|---|" + "---|" * len(CHECKS),
    ]
    for kind in (RIGHT, REFUSED, CAUGHT, WRONG, CRASH, SKIPPED):
        counts = [sum(report.checks.get(check, Outcome("")).kind == kind for report in compared) for check in CHECKS]
        if any(counts):
            lines.append(f"| {kind} | " + " | ".join(map(str, counts)) + " |")
    lines += [
        "",
        "## Results",
        "",
        "| architecture | " + " | ".join(CHECKS) + " | float32 | remarks |",
        "|---|" + "---|" * (len(CHECKS) + 2),
    ]
    for report in compared:
        outcomes = [report.checks.get(check, Outcome(CRASH)) for check in CHECKS]
        loaded = [outcome for check, outcome in report.checks.items() if check.startswith("float32")]
        cells = [*map(cell, outcomes), worst(loaded)]
        lines.append(f"| {report.name} | " + " | ".join(cells) + f" | {remarks(report)} |")
    if left := [report for report in reports if report.reason]:
        lines += ["", "## Not compared", "", "| architecture | reason |", "|---|---|"]
        lines += [f"| {report.name} | {escaped(report.reason)} |" for report in left]
    return "\n".join(lines) + "\n"


def cell(outcome: Outcome) -> str:
    """One outcome in a few characters."""
    if outcome.kind == RIGHT and outcome.error is not None:
        return f"{outcome.error:.1f}" if outcome.error > 0.1 else f"{outcome.error:.0e}"
    if outcome.kind == WRONG and outcome.error is not None:
        return f"**wrong {outcome.error:.1e}**"
    return {REFUSED: "refused", CAUGHT: "self-check", SKIPPED: "–"}.get(outcome.kind, f"**{outcome.kind}**")


def worst(outcomes: list[Outcome]) -> str:
    """The float32 column: the largest error of what was right, or how the worst of the checks ended."""
    if not outcomes:
        return ""
    for kind in (CRASH, WRONG, CAUGHT):
        if found := [outcome for outcome in outcomes if outcome.kind == kind]:
            return cell(found[0])
    right = [outcome for outcome in outcomes if outcome.kind == RIGHT]
    return cell(max(right, key=lambda outcome: outcome.error or 0.0)) if right else "refused"


def remarks(report: Report) -> str:
    """Reasons, each once with the checks that it is about; of a message of the package what is wrong, not how to go on."""
    grouped: dict[str, list[str]] = {}
    for check, outcome in report.checks.items():
        if not outcome.text or (outcome.kind == REFUSED and check.startswith("float32")):
            continue
        text = outcome.text
        if outcome.kind in (REFUSED, CAUGHT):
            text = text.partition(": ")[2].partition("; ")[0]
        grouped.setdefault(text, []).append(check)
    notes = [
        f"{'all' if set(checks) >= set(CHECKS) else ', '.join(checks)}: {text}" for text, checks in grouped.items()
    ]
    return escaped("; ".join(([report.dtype] if report.dtype != "float64" else []) + notes))


def escaped(text: str) -> str:
    """Text that cannot end a table's cell or become markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")


def main() -> int:
    """Run the architectures that are asked for; the exit status is 1 if any crashed or gave a wrong number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="an architecture's model type; may be repeated")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--check", choices=("first", "off"), default="first", help="the probes' self-check")
    options = parser.parse_args()
    names = options.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if unknown := set(names) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        parser.error(f"--only {sorted(unknown)[0]}: unknown; use a model type such as {', '.join(sorted(SPECIAL)[:3])}")
    torch.set_num_threads(1)  # before the first fork
    reports = []
    for count, name in enumerate(names, 1):
        reports.append(apart(name, options.check))
        print(f"{count}/{len(names)} {summary(reports[-1])}", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    if options.out:
        options.out.write_text(table(reports), encoding="utf-8")
    counts = Counter(outcome.kind for report in reports for outcome in report.checks.values())
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), file=sys.stderr)
    return int(any(report.failed for report in reports))


def summary(report: Report) -> str:
    """One line for the terminal."""
    if report.reason:
        return f"{report.name}: not compared: {report.reason}"
    parts = [
        f"{name} {o.error:.0e}"
        if o.kind == RIGHT and o.error is not None
        else f"{name} {o.kind.upper()} {o.error or ''}"
        for name, o in report.checks.items()
    ]
    return f"{report.name} ({report.seconds:.0f} s): {', '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
