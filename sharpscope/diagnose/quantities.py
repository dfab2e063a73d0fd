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


_TABLE = r"""
reward: reward
    sharpscope = reward_mean; TRL = reward; verl = critic/score/mean, critic/rewards/mean;
    prime-rl = train/agg/all/[^/]+/reward/mean, train/[^/]+/all/[^/]+/reward/mean, reward/all/mean;
    OpenRLHF = rollout/reward_mean, train/reward; slime = rollout/raw_reward; NeMo-RL = train/reward;
    SkyRL = reward/avg_raw_reward; Tinker = env/all/reward/total; open-instruct = scores;
    AReaL = ppo_actor/task_reward/avg
reward_std: standard deviation of the reward
    sharpscope = reward_std; TRL = reward_std; OpenRLHF = rollout/reward_std
accuracy: held-out accuracy or reward
    sharpscope = eval_accuracy_greedy; TRL = eval_reward;
    verl = val-core/[^/]+/acc/mean@\d+, val-core/[^/]+/reward/mean@\d+; prime-rl = eval/[^/]+/avg@\d+;
    Tinker = test/env/all/correct, test/env/all/reward/total
grad_norm*: gradient norm
    sharpscope = grad_norm; TRL = grad_norm; HF Trainer = grad_norm; verl = actor/grad_norm;
    prime-rl = optim/grad_norm; OpenRLHF = train/actor_grad_norm; slime = train/grad_norm;
    NeMo-RL = train/grad_norm; SkyRL = policy/grad_norm; Tinker = unclipped_grad_l2:mean, optim/grad_norm;
    open-instruct = optim/grad_norm; AReaL = ppo_actor/update/grad_norm
update_norm*: norm of the update
    sharpscope = update_norm
entropy [nats]: entropy
    sharpscope = entropy_mean; TRL = entropy; verl = actor/entropy, actor/entropy_loss; prime-rl = entropy/all/mean;
    OpenRLHF = train/entropy_loss; slime = train/entropy_loss; NeMo-RL = train/approx_entropy;
    SkyRL = policy/policy_entropy; Tinker = optim/entropy; open-instruct = policy/entropy_avg;
    AReaL = ppo_actor/update/entropy/avg
kl [nats]: KL to the reference
    sharpscope = kl; TRL = kl; verl = actor/kl_loss, actor/reward_kl_penalty; prime-rl = ref_kl/[^/]+/mean;
    OpenRLHF = train/kl; slime = train/kl_loss; NeMo-RL = train/kl_penalty; SkyRL = policy/policy_kl, loss/avg_kl;
    Tinker = kl_policy_base; open-instruct = objective/kl_avg, objective/kl3_avg, loss/kl_avg;
    AReaL = ppo_actor/kl_rewards/avg
kl_step* [nats]: KL between the policies before and after a step
    sharpscope = kl_step
length* [tokens]: completion length
    sharpscope = completion_length_mean; TRL = completions/mean_length, completion_length;
    verl = response_length/mean;
    prime-rl = train/agg/all/[^/]+/num_output_tokens/mean, train/[^/]+/all/[^/]+/num_output_tokens/mean;
    OpenRLHF = rollout/response_length, train/response_length; slime = rollout/response_len/mean;
    NeMo-RL = train/mean_gen_tokens_per_sample; SkyRL = generate/avg_num_tokens;
    Tinker = env/all/ac_tokens_per_turn; open-instruct = val/sequence_lengths
truncated: share of completions cut at the length limit
    sharpscope = truncated_fraction; TRL = completions/clipped_ratio; verl = response_length/clip_ratio;
    prime-rl = train/agg/all/[^/]+/is_truncated/mean, train/[^/]+/all/[^/]+/is_truncated/mean;
    OpenRLHF = rollout/truncated_rate; slime = rollout/truncated_ratio; NeMo-RL = train/truncation_rate;
    open-instruct = 1-val/stop_rate; AReaL = ppo_actor/no_eos_ratios/avg
dead_groups: share of groups whose rewards are all equal
    sharpscope = dead_groups; TRL = frac_reward_zero_std; prime-rl = solved_(?:none|all)(?:/mean)?;
    Tinker = env/all/by_group/frac_all_(?:good|bad)
clipped: share of tokens at the ratio's bounds
    sharpscope = clip_fraction_(?:low|high);
    TRL = clip_ratio/(?:low|high)_mean, clip_ratio/region_mean, cispo_clip_ratio; verl = actor/pg_clipfrac;
    prime-rl = is_masked_(?:low|high)/mean; OpenRLHF = train/ppo_clip_ratio; slime = train/pg_clipfrac;
    SkyRL = policy/loss_metrics/clip_ratio; open-instruct = policy/clipfrac_avg;
    AReaL = ppo_actor/update/clip_ratio/avg
grad_clipped: share of updates whose gradient is clipped
    sharpscope = grad_clipped
mismatch* [nats]: mean difference of the sampler's and the trainer's log-probabilities
    sharpscope = mismatch; TRL = sampling/sampling_logp_difference/mean; OpenRLHF = train/logprobs_diff;
    slime = train/train_rollout_logprob_abs_diff; SkyRL = policy/rollout_train_logprobs_abs_diff_mean;
    open-instruct = debug/vllm_vs_local_logprob_diff_mean
mismatch_kl* [nats]: KL between sampler and trainer
    verl = rollout_corr/k3_kl, rollout_corr/kl; prime-rl = mismatch_kl/all/mean; NeMo-RL = train/gen_kl_error;
    Tinker = optim/kl_sample_train_v2; AReaL = ppo_actor/update/behave_approx_kl/avg; OpenRLHF = train/vllm_kl
sampler_outside: share of ratios of trainer to sampler outside [0.9, 1.1]
    sharpscope = sampler_outside
ratio_max*: largest ratio of trainer to sampler
    sharpscope = ratio_max; TRL = sampling/importance_sampling_ratio/max;
    AReaL = ppo_actor/update/importance_weight/max; verl = rollout_corr/rollout_is_max
ratio_min*: smallest ratio of trainer to sampler
    TRL = sampling/importance_sampling_ratio/min; verl = rollout_corr/rollout_is_min
sampler_impossible: share of sampler log-probabilities that cannot be right
    sharpscope = sampler_impossible
near_uniform: share of tokens with entropy above 0.9·ln V
    sharpscope = near_uniform
saturation: share of the gradient at token weights on one bound
    sharpscope = saturation
clipped_weights: share of tokens whose weight alone is beyond the clip
    sharpscope = clipped_weights
temperature_gap: difference of greedy and sampled accuracy
    sharpscope = temperature_gap
memory: share of the memory in use
    sharpscope = memory
lr*: learning rate
    sharpscope = lr; TRL = learning_rate; HF Trainer = learning_rate; verl = actor/lr; prime-rl = optim/lr;
    OpenRLHF = train/actor_lr; slime = train/lr-pg_0; NeMo-RL = train/lr; SkyRL = policy/policy_lr;
    Tinker = optim/lr; open-instruct = lr; AReaL = ppo_actor/update/lr
loss: loss
    sharpscope = loss; TRL = loss; HF Trainer = loss; verl = actor/pg_loss; prime-rl = loss/mean;
    OpenRLHF = train/policy_loss; slime = train/pg_loss; NeMo-RL = train/loss; open-instruct = loss/total_avg
"""
"""Quantities as text: `name [unit]: title`, a star after the name for `log`; then `trainer = key, key; trainer = …` on indented lines."""


def _quantity(entry: str) -> Quantity:
    """A quantity from its lines of the table."""
    head, *lines = entry.splitlines()
    match = re.fullmatch(r"(\w+)(\*?)(?: \[(.+?)\])?: (.+)", head)
    assert match is not None, head
    name, log, unit, title = match.groups()
    trainers = (part.split(" = ") for part in " ".join(line.strip() for line in lines).split("; "))
    return Quantity(
        name, title, unit or "", bool(log), {trainer: tuple(keys.split(", ")) for trainer, keys in trainers}
    )


QUANTITIES: tuple[Quantity, ...] = tuple(_quantity(entry) for entry in re.split(r"\n(?=\w)", _TABLE.strip()))
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
