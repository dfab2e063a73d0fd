"""Configuration of warm starts: what all have in common, and the material of each embedded policy.

The defaults of each are those of the shipped policy of that task.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from sharpscope.config.base import Spec


class WarmStartSpec(Spec):
    """Model, tokenizer and optimization; one subclass per embedded policy adds the material that it imitates."""

    policy: ClassVar[str]

    layers: int = Field(4, ge=1, le=16, description="transformer layers")
    width: int = Field(128, ge=8, le=1024, description="hidden size; a multiple of 2 × heads")
    feed_forward: int = Field(384, ge=8, le=4096, description="inner size of the feed-forward layers")
    heads: int = Field(4, ge=1, le=32, description="attention heads")
    vocabulary: int = Field(768, ge=268, le=8192, description="most tokens of the tokenizer")
    corpus: int = Field(4000, ge=1, description="demonstrations that the tokenizer is fitted to")
    guess_share: float = Field(0.5, ge=0, le=1, description="share of demonstrations that guess instead of reasoning")
    steps: int = Field(1300, ge=1, description="optimizer updates")
    batch: int = Field(48, ge=1, description="demonstrations per update")
    micro_tokens: int = Field(
        2048, ge=1, description="tokens in one forward pass, padding included, though at least one row"
    )
    muon_lr: float = Field(
        0.02, gt=0, le=1, description="peak learning rate of Muon, for the layers' matrices [per update]"
    )
    lr: float = Field(
        6e-3, gt=0, le=1, description="peak learning rate of AdamW, for embeddings, biases and gains [per update]"
    )
    beta2: float = Field(0.98, ge=0, lt=1, description="decay of AdamW's squared gradient average; beta1 is 0.9")
    weight_decay: float = Field(0.01, ge=0, description="decoupled decay of the layers' matrices")
    warmup: int = Field(60, ge=0, description="updates over which the learning rates rise")
    cooldown: float = Field(
        0.4, ge=0, le=1, description="share of the updates, the last ones, over which they fall to zero"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="global L2 norm to which gradients are clipped")
    logit_scale: float = Field(
        1.0,
        gt=0,
        le=10,
        description="factor on the last norm's gain after training, and so on all logits: how decidedly the policy speaks",
    )
    probe_every: int = Field(200, ge=1, description="updates between two measurements on held-out demonstrations")
    probe_size: int = Field(100, ge=1, description="held-out demonstrations per measurement")
    seed: int = Field(0, ge=0, description="seed of weights, material and order")


class KnightsKnavesWarmStart(WarmStartSpec):
    """Warm start of the embedded policy `knights_knaves`: puzzles, reasoned through or guessed."""

    policy: ClassVar[str] = "knights_knaves"

    weights: dict[int, float] = Field(
        {2: 0.15, 3: 0.65, 4: 0.15, 5: 0.03},
        description="share of demonstrations by number of people, 2 to 7; need not sum to 1",
    )
    puzzles: int = Field(
        8000, ge=1, description="different puzzles of the most frequent size; others in proportion to their share"
    )
    chat_share: float = Field(
        0.15, ge=0, le=1, description="share of demonstrations with a chat prompt that ends in an opened <think>"
    )

    @field_validator("weights")
    @classmethod
    def _sizes(cls, weights: dict[int, float]) -> dict[int, float]:
        return _shares(weights, range(2, 8), "numbers of people from 2 to 7")


class MathWarmStart(WarmStartSpec):
    """Warm start of the embedded policy `math`: questions worked step by step, or answered at once."""

    policy: ClassVar[str] = "math"

    weights: dict[Literal["arithmetic", "linear", "modular"], float] = Field(
        {"arithmetic": 0.9, "linear": 0.05, "modular": 0.05},
        description="share of demonstrations by family of question; need not sum to 1",
    )
    levels: dict[int, float] = Field(
        {1: 0.2, 2: 0.4, 3: 0.4}, description="share of demonstrations by level, 1 to 3; need not sum to 1"
    )
    questions: int = Field(5000, ge=1, description="different questions of a family and level; of level 1 at most 300")
    vocabulary: int = Field(320, ge=268, le=8192, description="most tokens of the tokenizer")
    layers: int = Field(3, ge=1, le=16, description="transformer layers")
    width: int = Field(64, ge=8, le=1024, description="hidden size; a multiple of 2 × heads")
    feed_forward: int = Field(192, ge=8, le=4096, description="inner size of the feed-forward layers")
    steps: int = Field(900, ge=1, description="optimizer updates")
    batch: int = Field(48, ge=1, description="demonstrations per update")
    micro_tokens: int = Field(
        4096, ge=1, description="tokens in one forward pass, padding included, though at least one row"
    )
    probe_every: int = Field(300, ge=1, description="updates between two measurements on held-out demonstrations")
    probe_size: int = Field(60, ge=1, description="held-out demonstrations per measurement")

    @field_validator("levels")
    @classmethod
    def _levels(cls, weights: dict[int, float]) -> dict[int, float]:
        return _shares(weights, range(1, 4), "levels from 1 to 3")


class ToolQaWarmStart(WarmStartSpec):
    """Warm start of the embedded policy `tool_qa`: searches hop by hop, or an answer before all hops were looked up."""

    policy: ClassVar[str] = "tool_qa"

    weights: dict[int, float] = Field(
        {1: 1.0}, description="share of demonstrations by number of hops, 1 to 3; need not sum to 1"
    )
    worlds: int = Field(20, ge=1, description="invented worlds to ask about, none of them that of the task's own seeds")
    questions: int = Field(300, ge=1, description="most different questions of each world and number of hops")
    vocabulary: int = Field(576, ge=268, le=8192, description="most tokens of the tokenizer")
    layers: int = Field(3, ge=1, le=16, description="transformer layers")
    width: int = Field(96, ge=8, le=1024, description="hidden size; a multiple of 2 × heads")
    feed_forward: int = Field(256, ge=8, le=4096, description="inner size of the feed-forward layers")
    guess_share: float = Field(
        0.3, ge=0, le=1, description="share of demonstrations that guess instead of searching on"
    )
    steps: int = Field(1600, ge=1, description="optimizer updates")
    batch: int = Field(32, ge=1, description="demonstrations per update")
    cooldown: float = Field(
        0.5, ge=0, le=1, description="share of the updates, the last ones, over which they fall to zero"
    )
    micro_tokens: int = Field(
        4096, ge=1, description="tokens in one forward pass, padding included, though at least one row"
    )
    probe_every: int = Field(100, ge=1, description="updates between two measurements on held-out demonstrations")

    @field_validator("weights")
    @classmethod
    def _hops(cls, weights: dict[int, float]) -> dict[int, float]:
        return _shares(weights, range(1, 4), "numbers of hops from 1 to 3")


WARM_STARTS: dict[str, type[WarmStartSpec]] = {
    spec.policy: spec for spec in (KnightsKnavesWarmStart, MathWarmStart, ToolQaWarmStart)
}
"""The warm start of each embedded policy."""


def _shares(weights: dict[int, float], allowed: range, what: str) -> dict[int, float]:
    if not all(key in allowed and share >= 0 for key, share in weights.items()) or not any(weights.values()):
        raise ValueError(f"{weights}: {what}, shares from 0, at least one of them above 0")
    return weights
