"""Configuration of the policy and of its sampling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from sharpscope.spec import Spec


class LoraSpec(Spec):
    """Low-rank adapters (arXiv 2106.09685) by peft: only they are trained and saved, the model's own weights stay as they are."""

    r: int = Field(16, ge=1, le=4096, description="rank of each adapter")
    alpha: float = Field(32.0, gt=0, description="the adapter's output is scaled by alpha/r")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="names of the linear layers that get an adapter, such as [q_proj, v_proj]; all-linear = every one but the "
        "output layer",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the adapters' random half; the other half starts at zero")

    @field_validator("target_modules")
    @classmethod
    def _some(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError("name at least one layer, or all-linear")
        return value


class PolicySpec(Spec):
    """Which model is trained and how it is held in memory."""

    model: str = Field(
        "embedded:knights_knaves",
        min_length=1,
        description="`embedded:NAME` (shipped with the package), a local folder, or a Hugging Face hub id",
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub id; null = its default branch")
    dtype: Literal["float32", "float64", "bfloat16"] = Field(
        "float32",
        description="what is computed with. bfloat16: matrix products in it (autocast), while weights, gradients, the optimizer's "
        "state, norms and logits stay float32; with `lora`, the frozen weights are held in bfloat16 too",
    )
    lora: LoraSpec | None = Field(None, description="train low-rank adapters only; null = all weights")
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
