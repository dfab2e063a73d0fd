"""Configuration of the policy and of its sampling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sharpscope.spec import Spec


class PolicySpec(Spec):
    """Which model is trained and how it is held in memory."""

    model: str = Field(
        "embedded:knights_knaves",
        min_length=1,
        description="`embedded:NAME` (shipped with the package), a local folder, or a Hugging Face hub id",
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub id; null = its default branch")
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        "float32", description="type of the weights and activations; log-probabilities are at least float32 in any case"
    )
    device: str = Field("auto", description="`auto` (CUDA where there is one, else CPU), `cpu`, `cuda`, `cuda:1`, …")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="attention kernel; `auto` = sdpa, or eager where the model caps its attention logits"
    )
    prompt_format: Literal["auto", "plain", "chat"] = Field(
        "auto",
        description="`chat` wraps prompts in the tokenizer's template, `plain` does not; `auto` = chat if it has one",
    )
    trust_remote_code: bool = Field(False, description="run Python code that a hub repository brings along")


class SamplingSpec(Spec):
    """How completions are drawn."""

    temperature: float = Field(1.0, ge=0, le=10, description="logits are divided by it; 0 = greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus: keep the likeliest tokens up to this mass; 1 = off")
    top_k: int = Field(0, ge=0, description="keep this many likeliest tokens; 0 = off")
    max_new_tokens: int = Field(192, ge=1, description="longest completion [tokens], the end-of-text token included")
    decode_batch: int = Field(
        512, ge=1, description="completions decoded at once; bounds memory, changes samples by float rounding at most"
    )


class RolloutSpec(SamplingSpec):
    """One step's rollouts: prompts × completions."""

    temperature: float = Field(1.0, gt=0, le=10, description="logits are divided by it")
    prompts_per_step: int = Field(24, ge=1, description="different prompts per step")
    group_size: int = Field(8, ge=2, description="completions per prompt, G; advantages compare them with each other")
