"""Which keys each trainer writes for a quantity, read in its source, and by which keys its logs are recognized.

Keys are compared by `normal`: words and numbers joined by "/", so that "completions / mean_length" of a notebook's table and
"completions_mean_length" of a database are the key "completions/mean_length". "*" stands for any words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

Keys = Mapping[str, tuple[tuple[str, ...], ...]]
"""Quantity -> alternatives, of which the first that a log has counts; the values of its keys are added up."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What one trainer writes."""

    name: str
    source: str  # version and file in which the keys were read
    signature: tuple[tuple[str, ...], ...]  # of each group of keys its logs have at least one
    keys: Keys
    # quantity -> key of one minus it
    complements: Mapping[str, str] = field(default_factory=dict)


def normal(key: str) -> str:
    """A key as trainers' keys are compared: lower-case words and numbers joined by "/"."""
    return re.sub(r"[^a-z0-9*]+", "/", key.lower()).strip("/")


@cache
def _pattern(key: str) -> re.Pattern[str] | None:
    """The expression of a key with "*"; None for one without."""
    return re.compile(re.escape(normal(key)).replace(r"\*", ".+")) if "*" in key else None


def matching(key: str, logged: Mapping[str, str]) -> list[str]:
    """Keys of a log that a trainer's key means; `logged`: normal form -> key of the log."""
    pattern = _pattern(key)
    if pattern is not None:
        return [name for form, name in logged.items() if pattern.fullmatch(form)]
    found = logged.get(normal(key))
    return [] if found is None else [found]


def trainer_of(logged: Mapping[str, str]) -> Trainer | None:
    """The trainer that writes such keys (normal form -> key); None if none is known to."""
    for trainer in TRAINERS:
        if trainer.signature and all(
            any(matching(key, logged) for key in group) for group in trainer.signature
        ):
            return trainer
    return None


def keys_of(trainer: Trainer, quantity: str, logged: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of a log that hold a quantity of a trainer, whose values are added up; empty if there are none."""
    for alternative in trainer.keys.get(quantity, ()):
        found = [key for written in alternative for key in matching(written, logged)]
        if found:
            return tuple(found)
    complement = trainer.complements.get(quantity)
    return tuple(matching(complement, logged)) if complement else ()


def forms(keys: Iterable[str]) -> dict[str, str]:
    """Normal form -> key; of keys with one form the first."""
    found: dict[str, str] = {}
    for key in keys:
        found.setdefault(normal(key), key)
    return found


def _keys(**written: str | tuple[str, ...]) -> Keys:
    """Quantities whose alternatives are single keys."""
    return {
        quantity: ((keys,),) if isinstance(keys, str) else tuple((key,) for key in keys)
        for quantity, keys in written.items()
    }


SHARPSCOPE = Trainer(
    name="sharpscope",
    source="sharpscope.traces",
    signature=(),
    keys={
        **_keys(
            reward="reward_mean",
            reward_std="reward_std",
            accuracy="eval_accuracy_greedy",
            grad_norm="grad_norm",
            update_norm="update_norm",
            entropy="entropy_mean",
            kl="kl",
            kl_step="kl_step",
            length="completion_length_mean",
            truncated="truncated_fraction",
            dead_groups="dead_groups",
            grad_clipped="grad_clipped",
            mismatch="mismatch",
            sampler_outside="sampler_outside",
            ratio_max="ratio_max",
            sampler_impossible="sampler_impossible",
            near_uniform="near_uniform",
            saturation="saturation",
            clipped_weights="clipped_weights",
            temperature_gap="temperature_gap",
            memory="memory",
            lr="lr",
            loss="loss",
        ),
        "clipped": (("clip_fraction_low", "clip_fraction_high"),),
    },
)

_TRANSFORMERS = _keys(grad_norm="grad_norm", lr="learning_rate", loss="loss")

TRAINERS: tuple[Trainer, ...] = (
    Trainer(
        name="ROLL",
        source="alibaba/ROLL@f3c7f80c, roll/pipeline/rlvr/rlvr_pipeline.py, roll/utils/metrics",
        signature=(
            ("critic/score/mean", "critic/rewards/mean"),
            ("critic/entropy/mean", "tokens/response_length/mean", "actor_train/grad_norm"),
        ),
        keys=_keys(
            reward=("critic/score/mean", "critic/rewards/mean"),
            grad_norm=("actor_train/grad_norm", "actor/grad_norm"),
            entropy="critic/entropy/mean",
            kl=("actor/kl_loss", "actor/kl_loss@sum", "critic/ref_log_prob/kl"),
            length=("tokens/response_length/mean", "token/response_length/mean"),
            clipped=("actor/ppo_ratio_clipfrac", "actor/clipfrac", "actor/clipfrac@sum"),
            lr=("actor/lr", "actor_train/lr"),
            loss=("actor/pg_loss", "actor/pg_loss@sum", "actor/total_loss"),
            accuracy=("val_correct/all/mean", "val_score/all/mean"),
        ),
    ),
    Trainer(
        name="verl",
        source="verl 0.9, verl/trainer/ppo/metric_utils.py, verl/workers/actor/dp_actor.py",
        signature=(
            ("actor/*",),
            ("critic/score/*", "critic/rewards/*", "critic/advantages/*", "response_length/*"),
        ),
        keys=_keys(
            reward=("critic/score/mean", "critic/rewards/mean"),
            accuracy=("val-core/*/acc/mean@*", "val-core/*/reward/mean@*"),
            grad_norm="actor/grad_norm",
            entropy=("actor/entropy", "actor/entropy_loss"),
            kl=("actor/kl_loss", "actor/reward_kl_penalty"),
            length="response_length/mean",
            truncated="response_length/clip_ratio",
            clipped="actor/pg_clipfrac",
            mismatch_kl=("rollout_corr/k3_kl", "rollout_corr/kl"),
            ratio_max="rollout_corr/rollout_is_max",
            ratio_min="rollout_corr/rollout_is_min",
            lr="actor/lr",
            loss="actor/pg_loss",
        ),
    ),
    Trainer(
        name="prime-rl",
        source="PrimeIntellect-ai/prime-rl@d5106a44, src/prime_rl/trainer/rl/train.py",
        signature=(("optim/*",), ("mismatch_kl/*", "entropy/all/*")),
        keys={
            **_keys(
                reward=(
                    "train/agg/all/*/reward/mean",
                    "train/*/all/*/reward/mean",
                    "reward/all/mean",
                ),
                accuracy="eval/*/avg@*",
                grad_norm="optim/grad_norm",
                entropy="entropy/all/mean",
                kl="ref_kl/*/mean",
                length=(
                    "train/agg/all/*/num_output_tokens/mean",
                    "train/*/all/*/num_output_tokens/mean",
                ),
                truncated=(
                    "train/agg/all/*/is_truncated/mean",
                    "train/*/all/*/is_truncated/mean",
                ),
                all_wrong=("solved_none", "solved_none/mean"),
                all_right=("solved_all", "solved_all/mean"),
                mismatch_kl="mismatch_kl/all/mean",
                lr="optim/lr",
                loss="loss/mean",
            ),
            "dead_groups": (("solved_none", "solved_all"), ("solved_none/mean", "solved_all/mean")),
            "clipped": (("is_masked_low/mean", "is_masked_high/mean"),),
        },
    ),
    Trainer(
        name="OpenRLHF",
        source="OpenRLHF/OpenRLHF@c51caa25, openrlhf/trainer/ppo_trainer.py",
        signature=(("train/actor_grad_norm", "train/actor_lr"),),
        keys=_keys(
            reward=("rollout/reward_mean", "train/reward"),
            reward_std="rollout/reward_std",
            grad_norm="train/actor_grad_norm",
            entropy="train/entropy_loss",
            kl="train/kl",
            length=("rollout/response_length", "train/response_length"),
            truncated="rollout/truncated_rate",
            clipped="train/ppo_clip_ratio",
            mismatch="train/logprobs_diff",
            mismatch_kl="train/vllm_kl",
            lr="train/actor_lr",
            loss="train/policy_loss",
        ),
    ),
    Trainer(
        name="slime",
        source="THUDM/slime@a51f0714, slime/ray/rollout.py, slime/backends/megatron_utils/model.py",
        signature=(("train/pg_loss",), ("train/*",)),
        keys=_keys(
            reward="rollout/raw_reward",
            grad_norm="train/grad_norm",
            entropy="train/entropy_loss",
            kl="train/kl_loss",
            length="rollout/response_len/mean",
            truncated="rollout/truncated_ratio",
            clipped="train/pg_clipfrac",
            mismatch="train/train_rollout_logprob_abs_diff",
            lr="train/lr-pg_0",
            loss="train/pg_loss",
        ),
    ),
    Trainer(
        name="NeMo-RL",
        source="NVIDIA-NeMo/RL@ddbdb1e5, nemo_rl/algorithms/grpo.py",
        signature=(("train/token_mult_prob_error", "train/gen_kl_error"),),
        keys=_keys(
            reward="train/reward",
            accuracy="validation/accuracy",
            grad_norm="train/grad_norm",
            entropy="train/approx_entropy",
            kl="train/kl_penalty",
            length="train/mean_gen_tokens_per_sample",
            truncated="train/truncation_rate",
            mismatch_kl="train/gen_kl_error",
            lr="train/lr",
            loss="train/loss",
        ),
    ),
    Trainer(
        name="SkyRL",
        source="NovaSky-AI/SkyRL@5594f7d5, skyrl-train/skyrl_train/trainer.py",
        signature=(("policy/policy_lr", "policy/policy_loss", "policy/policy_entropy"),),
        keys=_keys(
            reward=("reward/avg_raw_reward", "loss/avg_final_rewards"),
            accuracy="eval/all/avg_score",
            grad_norm=("policy/grad_norm", "policy/raw_grad_norm"),
            entropy="policy/policy_entropy",
            kl=("policy/policy_kl", "loss/avg_kl"),
            length="generate/avg_num_tokens",
            clipped=("policy/loss_metrics/clip_ratio", "policy/ppo_clip_ratio"),
            mismatch="policy/rollout_train_logprobs_abs_diff_mean",
            lr="policy/policy_lr",
            loss="policy/policy_loss",
        ),
    ),
    Trainer(
        name="Tinker",
        source="thinking-machines-lab/tinker-cookbook@be3d97d5, tinker_cookbook/rl/metrics.py",
        signature=(("env/all/*",),),
        keys={
            **_keys(
                reward="env/all/reward/total",
                accuracy=("test/env/all/correct", "test/env/all/reward/total"),
                grad_norm=("unclipped_grad_l2:mean", "optim/grad_norm"),
                entropy="optim/entropy",
                kl="kl_policy_base",
                length="env/all/ac_tokens_per_turn",
                all_right="env/all/by_group/frac_all_good",
                all_wrong="env/all/by_group/frac_all_bad",
                mismatch_kl="optim/kl_sample_train_v2",
                lr="optim/lr",
                teacher_kl="teacher_kl",
            ),
            "dead_groups": (("env/all/by_group/frac_all_good", "env/all/by_group/frac_all_bad"),),
        },
    ),
    Trainer(
        name="open-instruct",
        source="allenai/open-instruct@d526c5d1, open_instruct/grpo_fast.py",
        signature=(("objective/*",), ("val/*", "policy/*")),
        keys=_keys(
            reward=("scores", "objective/scores"),
            grad_norm="optim/grad_norm",
            entropy="policy/entropy_avg",
            kl=("objective/kl_avg", "objective/kl3_avg", "loss/kl_avg"),
            length="val/sequence_lengths",
            clipped="policy/clipfrac_avg",
            mismatch="debug/vllm_vs_local_logprob_diff_mean",
            lr="lr",
            loss="loss/total_avg",
        ),
        complements={"truncated": "val/stop_rate"},
    ),
    Trainer(
        name="AReaL",
        source="inclusionAI/AReaL@5ac9adfd, areal/engine/ppo/actor.py",
        signature=(("ppo_actor/*", "grpo_actor/*"),),
        keys=_keys(
            reward=("ppo_actor/task_reward/avg", "grpo_actor/task_reward/avg"),
            grad_norm=("ppo_actor/update/grad_norm", "grpo_actor/update/grad_norm"),
            entropy=("ppo_actor/update/entropy/avg", "grpo_actor/update/entropy/avg"),
            kl=("ppo_actor/kl_rewards/avg", "grpo_actor/kl_rewards/avg"),
            truncated=("ppo_actor/no_eos_ratios/avg", "grpo_actor/no_eos_ratios/avg"),
            clipped=("ppo_actor/update/clip_ratio/avg", "grpo_actor/update/clip_ratio/avg"),
            mismatch_kl="ppo_actor/update/behave_approx_kl/avg",
            ratio_max="ppo_actor/update/importance_weight/max",
            lr=("ppo_actor/update/lr", "grpo_actor/update/lr"),
        ),
    ),
    Trainer(
        name="TRL",
        source="trl 1.16.0, trl/trainer/{grpo,dpo,kto}_trainer.py; unsloth and ms-swift log the same keys",
        signature=(
            (
                *("frac_reward_zero_std", "completions/mean_length", "completion_length"),
                *("rewards/*", "clip_ratio/*"),
            ),
        ),
        keys={
            **_TRANSFORMERS,
            **_keys(
                reward="reward",
                reward_std="reward_std",
                accuracy="eval_reward",
                entropy=("entropy", "entropy/mean"),
                kl="kl",
                length=("completions/mean_length", "completion_length"),
                truncated="completions/clipped_ratio",
                dead_groups="frac_reward_zero_std",
                # The logged importance ratios are of sequences and already cut by default: these are of tokens.
                mismatch="sampling/sampling_logp_difference/mean",
                mismatch_max="sampling/sampling_logp_difference/max",
                eval_loss="eval_loss",
                chosen="rewards/chosen",
                rejected="rewards/rejected",
                margin="rewards/margins",
                preference_accuracy="rewards/accuracies",
                chosen_logp="logps/chosen",
            ),
            "clipped": (
                ("clip_ratio/low_mean", "clip_ratio/high_mean"),
                ("clip_ratio/region_mean",),
                ("cispo_clip_ratio",),
                ("clip_ratio",),
            ),
        },
    ),
    Trainer(
        name="TRL reward",
        source="trl 1.16.0, trl/trainer/reward_trainer.py",
        signature=(("min_reward",), ("margin",), ("accuracy",)),
        keys={
            **_TRANSFORMERS,
            **_keys(margin="margin", preference_accuracy="accuracy", eval_loss="eval_loss"),
        },
    ),
    Trainer(
        name="LLaMA-Factory",
        source="hiyouga/LLaMA-Factory@b230bbb0, src/llamafactory/train/callbacks.py",
        signature=(("current_steps",), ("total_steps",)),
        keys=_keys(
            loss="loss",
            lr=("lr", "learning_rate"),
            eval_loss="eval_loss",
            reward="reward",
            preference_accuracy="accuracy",
        ),
    ),
    Trainer(
        name="HF Trainer",
        source="transformers 5.24.0, transformers/trainer.py; trl 1.16.0, trl/trainer/sft_trainer.py",
        signature=(("learning_rate",), ("loss", "grad_norm", "eval_loss")),
        keys={
            **_TRANSFORMERS,
            **_keys(
                eval_loss="eval_loss",
                entropy="entropy",
                token_accuracy=("mean_token_accuracy", "token_acc"),
            ),
        },
    ),
)
"""Trainers in the order in which their signatures are tried."""

BY_TRAINER: Mapping[str, Trainer] = {trainer.name: trainer for trainer in (SHARPSCOPE, *TRAINERS)}
