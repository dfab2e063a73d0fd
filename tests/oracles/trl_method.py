"""TRL's objective as a Method, for comparisons of losses."""

from __future__ import annotations

from typing import Any

from sharpscope.config.method import (
    Advantage,
    CispoClip,
    DecoupledAdvantage,
    DualClip,
    FixedEntropyBonus,
    GroupAdvantage,
    Kl,
    MaskedCorrection,
    PpoClip,
    SapoClip,
    SequenceRatio,
    TokenRatio,
    TruncatedCorrection,
    VespoGate,
)
from sharpscope.config.selections import HighEntropyTokens
from sharpscope.config.token_weights import UniformWeight
from sharpscope.objective import Method

#: TRL's losses that equal one of our aggregations; a note names the others.
AGGREGATES = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "dr_grpo": "constant",
    "luspo": "sequence_sum",
    "sapo": "sequence_mean",
    "vespo": "token_mean",
}


def trl_method(trainer: Any, weights: Method | None) -> tuple[Method, list[str]]:
    """TRL's objective as a Method, and notes on what a Method cannot express."""
    args, loss_type = trainer.args, trainer.loss_type
    notes: list[str] = []
    clip = _clip(trainer, notes)
    name = loss_type if loss_type in ("cispo", "sapo", "vespo", "luspo") or loss_type not in AGGREGATES else "grpo"
    if loss_type not in AGGREGATES:
        notes.append(f"the loss is TRL's loss_type '{loss_type}', which config.method does not describe")
    bonus: Any = None
    coef = float(getattr(args, "entropy_coef", 0.0) or 0.0)
    if coef < 0:
        notes.append(f"the loss has an entropy bonus with the negative coefficient {coef:g}")
    elif coef > 0:
        bonus = FixedEntropyBonus(coef=coef)
        if float(trainer.top_entropy_quantile) < 1:
            notes.append("TRL's entropy bonus is over the tokens with the highest entropy only")
    if trainer.beta and getattr(args, "use_bias_correction_kl", False):
        notes.append("the KL term is multiplied by the ratio")
    # VESPO's product is of the tokens' ratios
    sequence = trainer.importance_sampling_level == "sequence" and loss_type != "vespo"
    share = float(trainer.top_entropy_quantile)
    tokens: Any = HighEntropyTokens(share=share) if share < 1 else None
    if weights is not None and weights.tokens is not None:
        tokens = weights.tokens
    method = Method(
        name=weights.name if weights is not None else "gspo" if sequence and name == "grpo" else name,
        advantage=_advantage(trainer),
        ratio=SequenceRatio() if sequence else TokenRatio(),
        weight=weights.weight if weights is not None else UniformWeight(),
        clip=clip,
        aggregate=AGGREGATES.get(loss_type, "sequence_mean"),
        truncated="mask" if getattr(args, "mask_truncated_completions", False) else "keep",
        correction=_correction(trainer, notes),
        kl=Kl(coef=float(trainer.beta)),
        entropy=bonus,
        tokens=tokens,
    )
    return method, notes


def _advantage(trainer: Any) -> Advantage:
    """TRL's advantages."""
    if getattr(trainer, "multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum":
        names, weights = trainer.reward_func_names, trainer.reward_weights.tolist()
        return DecoupledAdvantage(weights=dict(zip(names, weights, strict=True)))
    return GroupAdvantage(scale=str(trainer.scale_rewards))


def _clip(trainer: Any, notes: list[str]) -> Any:
    """The clip of TRL's loss; adds to `notes` what none of ours says."""
    loss_type, delta = trainer.loss_type, trainer.args.delta
    low, high = float(trainer.epsilon_low), float(trainer.epsilon_high)
    if loss_type == "sapo":
        return SapoClip()
    if loss_type == "vespo":
        return VespoGate()
    if loss_type == "cispo":
        if high > 1:
            return CispoClip(high=high - 1)
        notes.append(f"cispo: TRL bounds the ratio itself by epsilon_high = {high:g}")
        return None
    if loss_type not in AGGREGATES or not (0 < low <= 1 and high > 0):
        return None
    if delta is None:
        return PpoClip(low=low, high=high)
    if delta > 1 + high:
        return DualClip(low=low, high=high, bound=float(delta))
    notes.append(f"two-sided clipping with delta = {delta:g}")
    return PpoClip(low=low, high=high)


def _correction(trainer: Any, notes: list[str]) -> Any:
    """TRL's factor for the difference between the sampler's policy and the trainer's; only vLLM has one."""
    args = trainer.args
    if not (getattr(trainer, "use_vllm", False) and getattr(args, "vllm_importance_sampling_correction", False)):
        return None
    mode = str(getattr(args, "vllm_importance_sampling_mode", "")).partition("_")
    low, high = (getattr(args, f"vllm_importance_sampling_clip_{end}", None) for end in ("min", "max"))
    if mode[0] in ("token", "sequence") and high is not None:
        level: Any = mode[0]
        if mode[2] == "truncate" and low is None:
            return TruncatedCorrection(level=level, high=float(high))
        if mode[2] == "mask":
            return MaskedCorrection(level=level, low=float(low or 0.0), high=float(high))
    notes.append(
        "the sampler is corrected by TRL's vllm_importance_sampling_mode with bounds that config.method does not describe"
    )
    return None
