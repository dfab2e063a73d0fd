"""A TRL trainer's arguments as the configuration of a run, and checks for what cannot be recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sharpscope.config import RunConfig
from sharpscope.config.method import (
    AdaptiveEntropyBonus,
    Advantage,
    CispoClip,
    DecoupledAdvantage,
    DualClip,
    FixedEntropyBonus,
    GroupAdvantage,
    HighEntropyTokens,
    Kl,
    MaskedCorrection,
    OffPolicyMask,
    PpoClip,
    SapoClip,
    SequenceRatio,
    TokenRatio,
    TruncatedCorrection,
    VespoGate,
)
from sharpscope.config.token_weights import UniformWeight
from sharpscope.errors import UserError
from sharpscope.integrations.hf_trainer import check_setup, checked_config, common_settings, schedule_notes
from sharpscope.objective import Method, named_method

OLDEST = (1, 0)
EXCLUDED = ("1.15.0",)
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
#: Losses in which a non-negative factor on a token's advantage multiplies that token's surrogate and nothing else.
WEIGHTABLE = ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "vespo")


def check_version() -> None:
    """Check the installed TRL.

    Raises:
        UserError: it is missing or its version is not supported.
    """
    try:
        installed = version("trl")
    except PackageNotFoundError:
        raise UserError("record: TRL is not installed; pip install 'sharpscope[trl]'") from None
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if installed in EXCLUDED or numbers < OLDEST:
        raise UserError(f"record: TRL {installed} is not supported; pip install 'trl>=1.0,!=1.15.0'")


def is_supervised(trainer: Any) -> bool:
    """Whether it is a trainer of given completions."""
    from trl import DPOTrainer, SFTTrainer

    return isinstance(trainer, SFTTrainer | DPOTrainer)


def is_asynchronous(trainer: Any) -> bool:
    """Whether it is an AsyncGRPOTrainer."""
    return any(kind.__name__ == "AsyncGRPOTrainer" for kind in type(trainer).__mro__)


def check_trainer(trainer: Any) -> None:
    """Check that the trainer can be recorded, before anything is written.

    Raises:
        UserError: an option or a setup is not supported; the message names it.
    """
    from trl import GRPOTrainer

    if not isinstance(trainer, GRPOTrainer):
        raise UserError(f"record: {type(trainer).__name__} is no GRPOTrainer; give a trl.GRPOTrainer")
    check_setup(trainer)
    args = trainer.args
    round_, update = generate_every(trainer), args.gradient_accumulation_steps
    if round_ % update and update % round_:
        raise UserError(
            f"record: steps_per_generation × num_iterations = {round_} and gradient_accumulation_steps = {update}: one must "
            "divide the other, so that a step has whole updates"
        )


def generate_every(trainer: Any) -> int:
    """Micro-steps that use one batch of completions."""
    return int(trainer.args.steps_per_generation * trainer.num_iterations)


def step_length(trainer: Any) -> int:
    """Micro-steps of one step, which has whole batches of completions and whole updates."""
    return int(max(generate_every(trainer), trainer.args.gradient_accumulation_steps))


def token_weights_of(weights: str | Method) -> Method:
    """The method whose token weights are added to TRL's loss.

    Raises:
        UserError: it has none, they are not a factor on the surrogate, or it differs from GRPO in more than weights.
    """
    method = named_method(weights) if isinstance(weights, str) else weights
    plain = named_method("grpo")
    rest = method.model_copy(update={"name": plain.name, "weight": plain.weight, "tokens": plain.tokens})
    if method.tokens is None:  # ar: TRL's own options set its clip and aggregation
        rest = rest.model_copy(update={"clip": plain.clip, "aggregate": plain.aggregate})
    if method.weight_on != "surrogate":
        raise UserError(
            f"weights = '{method.name}': they act on the ratio inside the clip, which TRL's advantages cannot carry; use grpo-sg"
        )
    if rest != plain or (isinstance(method.weight, UniformWeight) and method.tokens is None):
        raise UserError(
            f"weights = '{method.name}': this method is more than token weights on GRPO, or has none; give one such as grpo-sg, "
            "ar, cov-grpo, papo, high-entropy or a control, and set the rest by TRL's own options"
        )
    return method


def check_weightable(trainer: Any) -> None:
    """Check that token weights would be a factor on each token's surrogate in TRL's loss.

    Raises:
        UserError: they would not; the message names the option.
    """
    loss_type = trainer.loss_type
    if loss_type not in WEIGHTABLE:
        raise UserError(
            f"weights: loss_type = '{loss_type}' does not keep token weights apart; use one of {', '.join(WEIGHTABLE)}"
        )


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
    adaptive = bool(getattr(args, "use_adaptive_entropy", False))
    if coef < 0:
        notes.append(f"the loss has an entropy bonus with the negative coefficient {coef:g}")
    elif adaptive or coef > 0:
        bonus = _adaptive_entropy(args, coef) if adaptive else FixedEntropyBonus(coef=coef)
        if float(trainer.top_entropy_quantile) < 1:
            notes.append("TRL's entropy bonus is over the tokens with the highest entropy only")
    threshold = getattr(args, "off_policy_mask_threshold", None)
    corrected = bool(trainer.beta) and bool(getattr(args, "use_bias_correction_kl", False))
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
        off_policy=None if threshold is None else OffPolicyMask(threshold=float(threshold)),
        kl=Kl(coef=float(trainer.beta), estimator="k3_corrected" if corrected else "k3"),
        entropy=bonus,
        tokens=tokens,
    )
    return method, notes


def _adaptive_entropy(args: Any, coef: float) -> AdaptiveEntropyBonus:
    return AdaptiveEntropyBonus(
        initial=coef,
        target=float(args.entropy_target),
        step=float(args.entropy_coef_delta),
        low=float(args.entropy_coef_min),
        high=float(args.entropy_coef_max),
    )


def _advantage(trainer: Any) -> Advantage:
    """TRL's advantages."""
    if getattr(trainer, "multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum":
        names, weights = trainer.reward_func_names, trainer.reward_weights.tolist()
        return DecoupledAdvantage(weights=dict(zip(names, weights, strict=True)))
    return GroupAdvantage(scale=str(trainer.scale_rewards))


def _clip(trainer: Any, notes: list[str]) -> Any:
    """The clip of TRL's loss; adds to `notes` what none of ours says."""
    args, loss_type, delta = trainer.args, trainer.loss_type, trainer.args.delta
    low, high = float(trainer.epsilon_low), float(trainer.epsilon_high)
    if loss_type == "sapo":
        return SapoClip(tau_positive=args.sapo_temperature_pos, tau_negative=args.sapo_temperature_neg)
    if loss_type == "vespo":
        return VespoGate(
            k_positive=args.vespo_k_pos,
            lambda_positive=args.vespo_lambda_pos,
            k_negative=args.vespo_k_neg,
            lambda_negative=args.vespo_lambda_neg,
        )
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


def run_config(
    trainer: Any,
    out: Path,
    task: str,
    method: Method,
    recording: Mapping[str, Any] | None,
    updates: int,
    critical_sharpness: bool = True,
) -> RunConfig:
    """The trainer's arguments as a run's configuration; `updates` is the number that the training will make, if known.

    There is no probe set, so of the probes only the critical sharpness can be on.

    Raises:
        UserError: an option of `recording` is wrong or not available for a TRL run.
    """
    args = trainer.args
    rows = args.per_device_train_batch_size * args.steps_per_generation * trainer.accelerator.num_processes
    per_round, per_step = generate_every(trainer), step_length(trainer)
    prompts = max(1, rows * (per_step // per_round) // trainer.num_generations)
    data: dict[str, Any] = {
        **common_settings(trainer, out, task, math.ceil(updates * args.gradient_accumulation_steps / per_step)),
        "rollout": {
            "temperature": float(trainer.temperature),
            "top_p": float(args.top_p),
            "top_k": max(0, int(args.top_k or 0)),
            "max_new_tokens": int(trainer.max_completion_length),
            "prompts_per_step": prompts,
            "group_size": int(trainer.num_generations),
        },
        "method": method.model_dump(mode="json"),
        "update": {
            "mini_batches": min(prompts, max(1, args.steps_per_generation // args.gradient_accumulation_steps)),
            "inner_epochs": int(trainer.num_iterations),
        },
        "probes": {"preset": "light", "functionals": []} if critical_sharpness else {"preset": "off"},
        "recording": {"heldout_influence_every": 0, "budget": None, **(recording or {})},
    }
    return checked_config(data)


def sampler_notes(trainer: Any) -> list[str]:
    """Notes on how completions were drawn that the configuration does not contain."""
    args, notes = trainer.args, []
    for name, off in (("min_p", None), ("repetition_penalty", 1.0)):
        value = getattr(args, name, off)
        if value not in (off, None):
            notes.append(f"completions were drawn with {name} = {value:g}, which log-probabilities do not show")
    return notes + schedule_notes(trainer)
