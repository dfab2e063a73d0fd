"""Configuration of warm starts, one model per embedded policy; the defaults recreate the shipped policies."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from sharpscope.config.base import Spec


class WarmStartSpec(Spec):
    """Model, tokenizer and optimization; the subclass of an embedded policy adds its demonstrations."""

    policy: ClassVar[str]

    layers: int = Field(4, ge=1, le=16, description="transformer layers")
    width: int = Field(128, ge=8, le=1024, description="hidden size; a multiple of 2 × heads")
    feed_forward: int = Field(384, ge=8, le=4096, description="inner size of the feed-forward layers")
    heads: int = Field(4, ge=1, le=32, description="attention heads")
    vocabulary: int = Field(768, ge=268, le=8192, description="maximum vocabulary of the tokenizer [tokens]")
    corpus: int = Field(4000, ge=1, description="demonstrations used to train the tokenizer")
    guess_share: float = Field(0.5, ge=0, le=1, description="share of demonstrations that guess instead of reasoning")
    steps: int = Field(1300, ge=1, description="optimizer updates")
    batch: int = Field(48, ge=1, description="demonstrations per update")
    micro_tokens: int = Field(
        2048, ge=1, description="maximum size of a forward pass, including padding, at least one row [tokens]"
    )
    muon_lr: float = Field(
        0.02, gt=0, le=1, description="peak learning rate of Muon, for the layers' matrices [per update]"
    )
    lr: float = Field(
        6e-3, gt=0, le=1, description="peak learning rate of AdamW, for embeddings, biases and gains [per update]"
    )
    beta2: float = Field(0.98, ge=0, lt=1, description="decay of AdamW's squared gradient average; beta1 is 0.9")
    weight_decay: float = Field(0.01, ge=0, description="decoupled decay of the layers' matrices")
    warmup: int = Field(60, ge=0, description="updates of linear warm-up of the learning rates")
    cooldown: float = Field(
        0.4, ge=0, le=1, description="share of the updates, at the end, in which the learning rates decay to zero"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="maximum global L2 norm of the gradient")
    logit_scale: float = Field(
        1.0,
        gt=0,
        le=10,
        description="factor on the final norm's gain after training, which scales all logits",
    )
    probe_every: int = Field(200, ge=1, description="updates between measurements on held-out demonstrations")
    probe_size: int = Field(100, ge=1, description="held-out demonstrations per measurement")
    seed: int = Field(0, ge=0, description="seed of weights, demonstrations and their order")


class KnightsKnavesWarmStart(WarmStartSpec):
    """Warm start of the embedded policy `knights_knaves`: puzzles solved by reasoning or guessed."""

    policy: ClassVar[str] = "knights_knaves"

    weights: dict[int, float] = Field(
        {2: 0.15, 3: 0.65, 4: 0.15, 5: 0.03},
        description="share of demonstrations by number of people, 2 to 7; need not sum to 1",
    )
    puzzles: int = Field(
        8000, ge=1, description="distinct puzzles of the most frequent size; other sizes in proportion to their share"
    )
    chat_share: float = Field(
        0.15, ge=0, le=1, description="share of demonstrations with a chat prompt ending with <think>"
    )

    @field_validator("weights")
    @classmethod
    def _sizes(cls, weights: dict[int, float]) -> dict[int, float]:
        return _shares(weights, range(2, 8), "numbers of people from 2 to 7")


class MathWarmStart(WarmStartSpec):
    """Warm start of the embedded policy `math`: questions answered step by step or directly."""

    policy: ClassVar[str] = "math"

    weights: dict[Literal["arithmetic", "linear", "modular"], float] = Field(
        {"arithmetic": 0.9, "linear": 0.05, "modular": 0.05},
        description="share of demonstrations by family of question; need not sum to 1",
    )
    levels: dict[int, float] = Field(
        {1: 0.2, 2: 0.4, 3: 0.4}, description="share of demonstrations by level, 1 to 3; need not sum to 1"
    )
    questions: int = Field(5000, ge=1, description="distinct questions per family and level; at most 300 at level 1")
    vocabulary: int = Field(320, ge=268, le=8192, description="maximum vocabulary of the tokenizer [tokens]")
    layers: int = Field(3, ge=1, le=16, description="transformer layers")
    width: int = Field(64, ge=8, le=1024, description="hidden size; a multiple of 2 × heads")
    feed_forward: int = Field(192, ge=8, le=4096, description="inner size of the feed-forward layers")
    steps: int = Field(900, ge=1, description="optimizer updates")
    batch: int = Field(48, ge=1, description="demonstrations per update")
    micro_tokens: int = Field(
        4096, ge=1, description="maximum size of a forward pass, including padding, at least one row [tokens]"
    )
    probe_every: int = Field(300, ge=1, description="updates between measurements on held-out demonstrations")
    probe_size: int = Field(60, ge=1, description="held-out demonstrations per measurement")

    @field_validator("levels")
    @classmethod
    def _levels(cls, weights: dict[int, float]) -> dict[int, float]:
        return _shares(weights, range(1, 4), "levels from 1 to 3")


class ToolQaWarmStart(WarmStartSpec):
    """Warm start of the embedded policy `tool_qa`: one search per hop, or an answer before all searches are done."""

    policy: ClassVar[str] = "tool_qa"

    weights: dict[int, float] = Field(
        {1: 1.0}, description="share of demonstrations by number of hops, 1 to 3; need not sum to 1"
    )
    worlds: int = Field(20, ge=1, description="generated worlds, distinct from those of the task's seeds")
    questions: int = Field(300, ge=1, description="maximum number of distinct questions per world and number of hops")
    vocabulary: int = Field(576, ge=268, le=8192, description="maximum vocabulary of the tokenizer [tokens]")
    layers: int = Field(3, ge=1, le=16, description="transformer layers")
    width: int = Field(96, ge=8, le=1024, description="hidden size; a multiple of 2 × heads")
    feed_forward: int = Field(256, ge=8, le=4096, description="inner size of the feed-forward layers")
    guess_share: float = Field(
        0.3, ge=0, le=1, description="share of demonstrations that guess instead of searching further"
    )
    steps: int = Field(1600, ge=1, description="optimizer updates")
    batch: int = Field(32, ge=1, description="demonstrations per update")
    cooldown: float = Field(
        0.5, ge=0, le=1, description="share of the updates, at the end, in which the learning rates decay to zero"
    )
    micro_tokens: int = Field(
        4096, ge=1, description="maximum size of a forward pass, including padding, at least one row [tokens]"
    )
    probe_every: int = Field(100, ge=1, description="updates between measurements on held-out demonstrations")

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
        raise ValueError(f"must map {what} to shares of at least 0, with at least one above 0")
    return weights
