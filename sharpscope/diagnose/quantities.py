"""Canonical quantities of a training log, and the keys under which each trainer writes them.

Trainers use one word for different things: "kl" is to the reference in TRL and between sampler and trainer in AsyncGRPO;
"entropy" is that of the full distribution in TRL and verl and a sampled estimate in Tinker. A key stands here only where its
meaning was read in the trainer's source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Quantity:
    """One canonical quantity.

    Attributes:
        name: its name here, in `--map` and in the JSON output.
        title: what a reader calls it.
        unit: unit of its values; empty if dimensionless.
        log: whether it is positive and varies by factors, so that it is judged on a logarithmic scale.
        keys: trainer -> regular expressions of keys, all of whose values are added up (accuracies: averaged). The first expression
            that fits counts; "1-" in front of one means one minus the value.
    """

    name: str
    title: str
    unit: str = ""
    log: bool = False
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        "reward",
        "reward",
        keys={
            "sharpscope": ("reward_mean",),
            "TRL": ("reward",),
            "verl": ("critic/score/mean", "critic/rewards/mean"),
            "prime-rl": (r"train/agg/all/[^/]+/reward/mean", r"train/[^/]+/all/[^/]+/reward/mean", "reward/all/mean"),
            "OpenRLHF": ("rollout/reward_mean", "train/reward"),
            "slime": ("rollout/raw_reward",),
            "NeMo-RL": ("train/reward",),
            "SkyRL": ("reward/avg_raw_reward",),
            "Tinker": ("env/all/reward/total",),
            "open-instruct": ("scores",),
            "AReaL": ("ppo_actor/task_reward/avg",),
        },
    ),
    Quantity(
        "reward_std",
        "standard deviation of the reward",
        keys={"sharpscope": ("reward_std",), "TRL": ("reward_std",), "OpenRLHF": ("rollout/reward_std",)},
    ),
    Quantity(
        "accuracy",
        "held-out accuracy or reward",
        keys={
            "sharpscope": ("eval_accuracy_greedy",),
            "TRL": ("eval_reward",),
            "verl": (r"val-core/[^/]+/acc/mean@\d+", r"val-core/[^/]+/reward/mean@\d+"),
            "prime-rl": (r"eval/[^/]+/avg@\d+",),
            "Tinker": ("test/env/all/correct", "test/env/all/reward/total"),
        },
    ),
    Quantity(
        "grad_norm",
        "gradient norm",
        log=True,
        keys={
            "sharpscope": ("grad_norm",),
            "TRL": ("grad_norm",),
            "HF Trainer": ("grad_norm",),
            "verl": ("actor/grad_norm",),
            "prime-rl": ("optim/grad_norm",),
            "OpenRLHF": ("train/actor_grad_norm",),
            "slime": ("train/grad_norm",),
            "NeMo-RL": ("train/grad_norm",),
            "SkyRL": ("policy/grad_norm",),
            "Tinker": ("unclipped_grad_l2:mean", "optim/grad_norm"),
            "open-instruct": ("optim/grad_norm",),
            "AReaL": ("ppo_actor/update/grad_norm",),
        },
    ),
    Quantity("update_norm", "norm of the update", log=True, keys={"sharpscope": ("update_norm",)}),
    Quantity(
        "entropy",
        "entropy",
        "nats",
        keys={
            "sharpscope": ("entropy_mean",),
            "TRL": ("entropy",),
            "verl": ("actor/entropy", "actor/entropy_loss"),
            "prime-rl": ("entropy/all/mean",),
            "OpenRLHF": ("train/entropy_loss",),
            "slime": ("train/entropy_loss",),
            "NeMo-RL": ("train/approx_entropy",),
            "SkyRL": ("policy/policy_entropy",),
            "Tinker": ("optim/entropy",),
            "open-instruct": ("policy/entropy_avg",),
            "AReaL": ("ppo_actor/update/entropy/avg",),
        },
    ),
    Quantity(
        "kl",
        "KL to the reference",
        "nats",
        keys={
            "sharpscope": ("kl",),
            "TRL": ("kl",),
            "verl": ("actor/kl_loss", "actor/reward_kl_penalty"),
            "prime-rl": (r"ref_kl/[^/]+/mean",),
            "OpenRLHF": ("train/kl",),
            "slime": ("train/kl_loss",),
            "NeMo-RL": ("train/kl_penalty",),
            "SkyRL": ("policy/policy_kl", "loss/avg_kl"),
            "Tinker": ("kl_policy_base",),
            "open-instruct": ("objective/kl_avg", "objective/kl3_avg", "loss/kl_avg"),
            "AReaL": ("ppo_actor/kl_rewards/avg",),
        },
    ),
    Quantity(
        "kl_step",
        "KL between the policies before and after a step",
        "nats",
        log=True,
        keys={"sharpscope": ("kl_step",)},
    ),
    Quantity(
        "length",
        "completion length",
        "tokens",
        log=True,
        keys={
            "sharpscope": ("completion_length_mean",),
            "TRL": ("completions/mean_length", "completion_length"),
            "verl": ("response_length/mean",),
            "prime-rl": (
                r"train/agg/all/[^/]+/num_output_tokens/mean",
                r"train/[^/]+/all/[^/]+/num_output_tokens/mean",
            ),
            "OpenRLHF": ("rollout/response_length", "train/response_length"),
            "slime": ("rollout/response_len/mean",),
            "NeMo-RL": ("train/mean_gen_tokens_per_sample",),
            "SkyRL": ("generate/avg_num_tokens",),
            "Tinker": ("env/all/ac_tokens_per_turn",),
            "open-instruct": ("val/sequence_lengths",),
        },
    ),
    Quantity(
        "truncated",
        "share of completions cut at the length limit",
        keys={
            "sharpscope": ("truncated_fraction",),
            "TRL": ("completions/clipped_ratio",),
            "verl": ("response_length/clip_ratio",),
            "prime-rl": (r"train/agg/all/[^/]+/is_truncated/mean", r"train/[^/]+/all/[^/]+/is_truncated/mean"),
            "OpenRLHF": ("rollout/truncated_rate",),
            "slime": ("rollout/truncated_ratio",),
            "NeMo-RL": ("train/truncation_rate",),
            "open-instruct": ("1-val/stop_rate",),
            "AReaL": ("ppo_actor/no_eos_ratios/avg",),
        },
    ),
    Quantity(
        "dead_groups",
        "share of groups whose rewards are all equal",
        keys={
            "sharpscope": ("dead_groups",),
            "TRL": ("frac_reward_zero_std",),
            "prime-rl": (r"solved_(?:none|all)(?:/mean)?",),
            "Tinker": (r"env/all/by_group/frac_all_(?:good|bad)",),
        },
    ),
    Quantity(
        "clipped",
        "share of tokens at the ratio's bounds",
        keys={
            "sharpscope": (r"clip_fraction_(?:low|high)",),
            "TRL": (r"clip_ratio/(?:low|high)_mean", "clip_ratio/region_mean", "cispo_clip_ratio"),
            "verl": ("actor/pg_clipfrac",),
            "prime-rl": (r"is_masked_(?:low|high)/mean",),
            "OpenRLHF": ("train/ppo_clip_ratio",),
            "slime": ("train/pg_clipfrac",),
            "SkyRL": ("policy/loss_metrics/clip_ratio",),
            "open-instruct": ("policy/clipfrac_avg",),
            "AReaL": ("ppo_actor/update/clip_ratio/avg",),
        },
    ),
    Quantity("grad_clipped", "share of updates whose gradient is clipped", keys={"sharpscope": ("grad_clipped",)}),
    Quantity(
        "mismatch",
        "mean difference of the sampler's and the trainer's log-probabilities",
        "nats",
        log=True,
        keys={
            "sharpscope": ("mismatch",),
            "TRL": ("sampling/sampling_logp_difference/mean",),
            "OpenRLHF": ("train/logprobs_diff",),
            "slime": ("train/train_rollout_logprob_abs_diff",),
            "SkyRL": ("policy/rollout_train_logprobs_abs_diff_mean",),
            "open-instruct": ("debug/vllm_vs_local_logprob_diff_mean",),
        },
    ),
    Quantity(
        "mismatch_kl",
        "KL between sampler and trainer",
        "nats",
        log=True,
        keys={
            "verl": ("rollout_corr/k3_kl", "rollout_corr/kl"),
            "prime-rl": ("mismatch_kl/all/mean",),
            "NeMo-RL": ("train/gen_kl_error",),
            "Tinker": ("optim/kl_sample_train_v2",),
            "AReaL": ("ppo_actor/update/behave_approx_kl/avg",),
            "OpenRLHF": ("train/vllm_kl",),
        },
    ),
    Quantity(
        "sampler_outside",
        "share of ratios of trainer to sampler outside [0.9, 1.1]",
        keys={"sharpscope": ("sampler_outside",)},
    ),
    Quantity(
        "ratio_max",
        "largest ratio of trainer to sampler",
        log=True,
        keys={
            "sharpscope": ("ratio_max",),
            "TRL": ("sampling/importance_sampling_ratio/max",),
            "AReaL": ("ppo_actor/update/importance_weight/max",),
            "verl": ("rollout_corr/rollout_is_max",),
        },
    ),
    Quantity(
        "ratio_min",
        "smallest ratio of trainer to sampler",
        log=True,
        keys={"TRL": ("sampling/importance_sampling_ratio/min",), "verl": ("rollout_corr/rollout_is_min",)},
    ),
    *(
        Quantity(name, title, keys={"sharpscope": (name,)})
        for name, title in (
            ("sampler_impossible", "share of sampler log-probabilities that cannot be right"),
            ("near_uniform", "share of tokens with entropy above 0.9·ln V"),
            ("saturation", "share of the gradient at token weights on one bound"),
            ("clipped_weights", "share of tokens whose weight alone is beyond the clip"),
            ("temperature_gap", "difference of greedy and sampled accuracy"),
            ("memory", "share of the memory in use"),
        )
    ),
    Quantity(
        "lr",
        "learning rate",
        log=True,
        keys={
            "sharpscope": ("lr",),
            "TRL": ("learning_rate",),
            "HF Trainer": ("learning_rate",),
            "verl": ("actor/lr",),
            "prime-rl": ("optim/lr",),
            "OpenRLHF": ("train/actor_lr",),
            "slime": (r"train/lr-pg_0",),
            "NeMo-RL": ("train/lr",),
            "SkyRL": ("policy/policy_lr",),
            "Tinker": ("optim/lr",),
            "open-instruct": ("lr",),
            "AReaL": ("ppo_actor/update/lr",),
        },
    ),
    Quantity(
        "loss",
        "loss",
        keys={
            "sharpscope": ("loss",),
            "TRL": ("loss",),
            "HF Trainer": ("loss",),
            "verl": ("actor/pg_loss",),
            "prime-rl": ("loss/mean",),
            "OpenRLHF": ("train/policy_loss",),
            "slime": ("train/pg_loss",),
            "NeMo-RL": ("train/loss",),
            "open-instruct": ("loss/total_avg",),
        },
    ),
)

BY_NAME: dict[str, Quantity] = {quantity.name: quantity for quantity in QUANTITIES}

_SIGNATURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("verl", (r"actor/.*", r"(critic|response_length)/.*")),
    ("prime-rl", (r"optim/.*", r"(mismatch_kl|entropy/all)/.*")),
    ("OpenRLHF", (r"train/actor_grad_norm",)),
    ("slime", (r"train/pg_loss",)),
    ("NeMo-RL", (r"train/token_mult_prob_error",)),
    ("SkyRL", (r"policy/policy_lr",)),
    ("Tinker", (r"env/all/.*",)),
    ("open-instruct", (r"objective/.*", r"val/.*")),
    ("AReaL", (r"ppo_actor/.*",)),
    ("unsloth", (r"completion_length", r"completions/mean_length")),
    ("TRL", (r"(frac_reward_zero_std|completions/mean_length|completion_length|rewards/.*|clip_ratio/.*)",)),
    ("HF Trainer", (r"learning_rate",)),
)
"""Trainer -> expressions, each of which fits at least one of its keys. The first trainer that fits counts."""

LIKE = {"unsloth": "TRL"}
"""Trainers that write the keys of another: unsloth adds completion_length to TRL's, without its entropy."""


def framework_of(keys: Iterable[str]) -> str | None:
    """Name of the trainer that writes such keys; None if none is known to."""
    known = list(keys)
    for name, expressions in _SIGNATURES:
        if all(any(re.fullmatch(expression, key) for key in known) for expression in expressions):
            return name
    return None


def keys_of(quantity: Quantity, framework: str | None, keys: Iterable[str]) -> tuple[bool, tuple[str, ...]]:
    """The keys of a log that hold a quantity, whose values are added up, and whether one minus their sum is meant.

    Without a known trainer a key counts if it, or its part after the last "/", is the name of the quantity.
    """
    known = list(keys)
    for expression in quantity.keys.get(LIKE.get(framework or "", framework or ""), ()):
        complement, pattern = expression.startswith("1-"), expression.removeprefix("1-")
        found = tuple(key for key in known if re.fullmatch(pattern, key))
        if found:
            return complement, found
    if framework is None:
        for key in known:
            if quantity.name in (key, key.rsplit("/", 1)[-1]):
                return False, (key,)
    return False, ()


def own_values(row: Mapping[str, Any]) -> dict[str, float]:
    """Canonical quantities of a row of our steps table, without those that it lacks."""
    found = {}
    for quantity in QUANTITIES:
        _, keys = keys_of(quantity, "sharpscope", row)
        values = [float(row[key]) for key in keys if row[key] is not None]
        if values:
            found[quantity.name] = sum(values)
    return found
