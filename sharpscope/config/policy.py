"""Configuration of the policy and of its sampling."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from sharpscope.config.base import Spec

EMBEDDED_PREFIX = "embedded:"
"""Before the name of a policy that ships with the package."""


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


class LocalBackend(Spec):
    """The policy itself writes, in this process."""

    kind: Literal["local"] = "local"


class ServerBackend(Spec):
    """A server with OpenAI's completions protocol that takes prompts as token ids and returns token ids: `vllm serve`."""

    kind: Literal["server"] = "server"
    url: str = Field("http://127.0.0.1:8000/v1", pattern=r"^https?://\S+$", description="address up to and with /v1")
    model: str = Field("", description="the model's name there; empty: the only one it serves")
    api_key_variable: str = Field(
        "",
        description="environment variable that holds the key, if the server wants one; the key itself is stored nowhere",
    )
    logprobs: Literal["raw", "processed"] = Field(
        "raw",
        description="what its log-probabilities belong to (vLLM's --logprobs-mode): raw_logprobs = before temperature, top-p and "
        "top-k (vLLM's default), processed_logprobs = after them",
    )
    sync: Literal["none", "vllm", "sglang"] = Field(
        "none",
        description="how it gets the policy's weights: none = it keeps its own (evaluation, or off-policy training whose mismatch is "
        "recorded); otherwise they are saved to `folder` and the server is told to read them, by vLLM's /collective_rpc "
        "(VLLM_SERVER_DEV_MODE=1) or SGLang's /update_weights_from_disk",
    )
    folder: str = Field("", description="folder that this process and the server both see, for `sync`")
    timeout_s: float = Field(600.0, gt=0, le=86_400, description="longest wait for one answer [s]")
    retries: int = Field(3, ge=0, le=20, description="requests repeated after one that failed without fault of ours")
    concurrency: int = Field(
        32, ge=1, le=1024, description="requests under way at once; a request is one prompt's group"
    )

    @model_validator(mode="after")
    def _shared_folder(self) -> ServerBackend:
        if (self.sync == "none") == bool(self.folder):
            need = "takes no folder" if self.folder else "needs a folder that the server can read"
            raise ValueError(f"sync = {self.sync} {need}; set sync and folder together")
        return self


class VllmBackend(Spec):
    """vLLM in this process (extra `vllm`, a GPU): it reads the policy's weights from disk whenever they have changed."""

    kind: Literal["vllm"] = "vllm"
    folder: str = Field("", description="folder for the weights that it reads; empty: a temporary one")
    memory: float = Field(0.3, gt=0, le=1, description="share of the GPU's memory that the engine may take")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="type the engine computes in")
    logprobs: Literal["raw", "processed"] = Field(
        "processed", description="what its log-probabilities belong to: before or after temperature, top-p and top-k"
    )
    enforce_eager: bool = Field(False, description="without CUDA graphs: starts sooner, decodes slower")


Backend = Annotated[LocalBackend | ServerBackend | VllmBackend, Field(discriminator="kind")]


class SamplingSpec(Spec):
    """How completions are drawn."""

    temperature: float = Field(1.0, ge=0, le=10, description="logits are divided by it; 0 = greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus: keep the likeliest tokens up to this mass; 1 = off")
    top_k: int = Field(0, ge=0, description="keep this many likeliest tokens; 0 = off")
    max_new_tokens: int = Field(192, ge=1, description="longest completion [tokens], the end-of-text token included")
    decode_batch: int = Field(
        512, ge=1, description="completions decoded at once; bounds memory, changes samples by float rounding at most"
    )
    backend: Backend = Field(default_factory=LocalBackend, description="who writes the completions")


class RolloutSpec(SamplingSpec):
    """One step's rollouts: prompts × completions."""

    temperature: float = Field(1.0, gt=0, le=10, description="logits are divided by it")
    prompts_per_step: int = Field(24, ge=1, description="different prompts per step")
    group_size: int = Field(8, ge=2, description="completions per prompt, G; advantages compare them with each other")

    @model_validator(mode="after")
    def _known_logp(self) -> RolloutSpec:
        """The sampler's log-probabilities must be those of softmax(z/T), before top-p and top-k."""
        backend = self.backend
        if isinstance(backend, LocalBackend):
            return self
        if backend.logprobs == "raw" and self.temperature != 1:
            raise ValueError(
                f"temperature = {self.temperature:g}: raw log-probabilities of backend.kind={backend.kind} belong to temperature 1; "
                "set backend.logprobs=processed (a server: started with --logprobs-mode processed_logprobs)"
            )
        if backend.logprobs == "processed" and (self.top_p < 1 or self.top_k > 0):
            raise ValueError(
                f"top_p, top_k: processed log-probabilities of backend.kind={backend.kind} are taken after them; turn them off, or "
                "use temperature 1 with backend.logprobs=raw"
            )
        return self
