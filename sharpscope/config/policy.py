"""Configuration of the policy and of its sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sharpscope.config.base import Spec

EMBEDDED_PREFIX = "embedded:"
"""Prefix of the policies that ship with the package."""
EMBEDDED_NAMES = ("knights_knaves", "math", "tool_qa")
"""Their names, which are also those of their tasks."""


class LoraSpec(Spec):
    """Low-rank adapters (arXiv 2106.09685) from peft: only the adapters are trained and saved."""

    r: int = Field(16, ge=1, le=4096, description="rank of each adapter")
    alpha: float = Field(32.0, gt=0, description="scale of the adapters' output: alpha/r")
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """names of the linear layers to adapt, such as [q_proj, v_proj]; all-linear = all except the output layer"""


class PolicySpec(Spec):
    """The model to train, its precision, device and prompt format."""

    model: str = Field("embedded:knights_knaves", min_length=1)
    """`embedded:NAME` (shipped with the package), a local folder, a GGUF file, or a Hugging Face hub id"""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """compute type. bfloat16: matrix products use autocast, while weights, gradients, optimizer state, norms and
    logits stay float32; with `lora`, the frozen weights are bfloat16 too"""
    lora: LoraSpec | None = Field(None, description="train low-rank adapters only; null = all weights")
    device: str = Field("auto", description="`auto` (CUDA if available, else CPU), `cpu`, `cuda`, `cuda:1`, …")
    attention: Literal["auto", "eager", "flash_attention_2"] = "auto"
    """attention kernel; `auto` = sdpa, or eager if the model caps its attention logits"""
    prompt_format: Literal["auto", "plain", "chat"] = "auto"
    """`chat` applies the tokenizer's chat template, `plain` does not; `auto` = chat if there is a template"""


class SamplingSpec(Spec):
    """How completions are sampled."""

    temperature: float = Field(1.0, ge=0, le=10, description="divisor of the logits; 0 = greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus sampling: keep the most likely tokens up to this probability; 1 = off"""
    top_k: int = Field(0, ge=0, description="number of most likely tokens to keep; 0 = off")
    max_new_tokens: int = Field(192, ge=1)
    """maximum length of a completion, including the end-of-text token [tokens]"""
    decode_batch: int = Field(512, ge=1)
    """completions decoded at once; limits memory, changes samples at most by rounding"""


class RolloutSpec(SamplingSpec):
    """The rollouts of a step: prompts × completions."""

    temperature: float = Field(1.0, gt=0, le=10, description="divisor of the logits")
    prompts_per_step: int = Field(24, ge=1, description="distinct prompts per step")
    group_size: int = Field(8, ge=2, description="completions per prompt, G; advantages are relative to the group")
