"""Configuration of the policy and of its sampling."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sharpscope.config.base import Spec

EMBEDDED_PREFIX = "embedded:"
"""Prefix of the policies that ship with the package."""
EMBEDDED_NAMES = ("knights_knaves", "math", "tool_qa")
"""Their names, which are also those of their tasks."""


class LoraSpec(Spec):
    """Low-rank adapters (arXiv 2106.09685) from peft: only the adapters are trained and saved."""

    r: int = Field(16, ge=1, le=4096, description="rank of each adapter")
    alpha: float = Field(32.0, gt=0, description="scale of the adapters' output: alpha/r")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear",
        description="names of the linear layers to adapt, such as [q_proj, v_proj]; all-linear = all except the "
        "output layer",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seed of the A matrices; the B matrices start at zero")

    @field_validator("target_modules")
    @classmethod
    def _some(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError("name at least one layer, or all-linear")
        return value


class PolicySpec(Spec):
    """The model to train, its precision, device and prompt format."""

    model: str = Field(
        "embedded:knights_knaves",
        min_length=1,
        description="`embedded:NAME` (shipped with the package), a local folder, a GGUF file, or a Hugging Face hub id",
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub id; null = its default branch")
    dtype: Literal["float32", "float64", "bfloat16"] = Field(
        "float32",
        description="compute type. bfloat16: matrix products use autocast, while weights, gradients, optimizer state, "
        "norms and logits stay float32; with `lora`, the frozen weights are bfloat16 too",
    )
    lora: LoraSpec | None = Field(None, description="train low-rank adapters only; null = all weights")
    device: str = Field("auto", description="`auto` (CUDA if available, else CPU), `cpu`, `cuda`, `cuda:1`, …")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="attention kernel; `auto` = sdpa, or eager if the model caps its attention logits"
    )
    prompt_format: Literal["auto", "plain", "chat"] = Field(
        "auto",
        description="`chat` applies the tokenizer's chat template, `plain` does not; `auto` = chat if there is a template",
    )
    trust_remote_code: bool = Field(False, description="whether to run Python code from the model's repository")


class ServerBackend(Spec):
    """Generate with a server that has OpenAI's completions API and accepts and returns token ids, such as `vllm serve`."""

    kind: Literal["server"] = "server"
    url: str = Field("http://127.0.0.1:8000/v1", pattern=r"^https?://\S+$", description="base URL, including /v1")
    model: str = Field("", description="name of the model on the server; empty: the only model served")
    api_key_variable: str = Field(
        "",
        description="environment variable with the API key, if the server needs one; the key is never stored",
    )
    logprobs: Literal["raw", "processed"] = Field(
        "raw",
        description="distribution of the returned log-probabilities (vLLM's --logprobs-mode): raw = before temperature, top-p and "
        "top-k (vLLM's default), processed = after them",
    )
    sync: Literal["none", "vllm", "sglang"] = Field(
        "none",
        description="how the server gets the policy's weights: none = it keeps its own (evaluation, or off-policy training with a "
        "recorded mismatch); otherwise they are saved to `folder` and loaded with vLLM's /collective_rpc "
        "(VLLM_SERVER_DEV_MODE=1) or SGLang's /update_weights_from_disk",
    )
    folder: str = Field("", description="folder that both this process and the server can access, for `sync`")
    timeout_s: float = Field(600.0, gt=0, le=86_400, description="timeout of a request [s]")
    retries: int = Field(
        3, ge=0, le=20, description="retries after a timeout, a connection error or a temporary server error"
    )
    concurrency: int = Field(32, ge=1, le=1024, description="concurrent requests; a request is one prompt's group")

    @model_validator(mode="after")
    def _shared_folder(self) -> ServerBackend:
        if (self.sync == "none") == bool(self.folder):
            need = "takes no folder" if self.folder else "needs a folder that the server can read"
            raise ValueError(f"sync = {self.sync} {need}; set sync and folder together")
        return self


class SamplingSpec(Spec):
    """How completions are sampled."""

    temperature: float = Field(1.0, ge=0, le=10, description="divisor of the logits; 0 = greedy")
    top_p: float = Field(
        1.0, gt=0, le=1, description="nucleus sampling: keep the most likely tokens up to this probability; 1 = off"
    )
    top_k: int = Field(0, ge=0, description="number of most likely tokens to keep; 0 = off")
    max_new_tokens: int = Field(
        192, ge=1, description="maximum length of a completion, including the end-of-text token [tokens]"
    )
    decode_batch: int = Field(
        512, ge=1, description="completions decoded at once; limits memory, changes samples at most by rounding"
    )
    backend: ServerBackend | None = Field(None, description="server that generates the completions; null: this process")

    @field_validator("backend", mode="before")
    @classmethod
    def _local(cls, value: Any) -> Any:
        """Version 0.2 wrote `kind: local` for this process."""
        return None if value == {"kind": "local"} else value


class RolloutSpec(SamplingSpec):
    """The rollouts of a step: prompts × completions."""

    temperature: float = Field(1.0, gt=0, le=10, description="divisor of the logits")
    prompts_per_step: int = Field(24, ge=1, description="distinct prompts per step")
    group_size: int = Field(8, ge=2, description="completions per prompt, G; advantages are relative to the group")

    @model_validator(mode="after")
    def _known_logp(self) -> RolloutSpec:
        """The sampler's log-probabilities must be those of softmax(z/T) before top-p and top-k."""
        backend = self.backend
        if backend is None:
            return self
        if backend.logprobs == "raw" and self.temperature != 1:
            raise ValueError(
                f"temperature = {self.temperature:g}: the server returns raw log-probabilities, at temperature 1; "
                "set backend.logprobs=processed (start a server with --logprobs-mode processed_logprobs)"
            )
        if backend.logprobs == "processed" and (self.top_p < 1 or self.top_k > 0):
            raise ValueError(
                "top_p, top_k: processed log-probabilities of a server include them; turn them off, or use "
                "temperature 1 with backend.logprobs=raw"
            )
        return self
