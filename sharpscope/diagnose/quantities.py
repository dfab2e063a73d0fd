"""The quantities that `diagnose` knows: what each is, which values it can have, and what people call it.

Trainers use one word for different things: "kl" is to the reference in TRL and between sampler and trainer in AsyncGRPO;
"entropy" is that of the full distribution in TRL and verl and a sampled estimate in Tinker. Keys whose meaning was read in a
trainer's source stand in `trainers`; the spellings here are for keys of no known trainer, and every use of one is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Gather = Literal["mean", "last", "max", "min"]
"""How several values of one step become one."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One canonical quantity."""

    name: str  # here, in `--map` and in the JSON output
    title: str  # what a reader calls it
    unit: str = ""  # empty if dimensionless
    log: bool = False  # whether it is judged on a logarithmic scale
    lowest: float = -math.inf  # values that it can have
    highest: float = math.inf
    gather: Gather = "mean"
    # words of keys that name it, in any order; words of `names.NOISE` may stand beside them
    spellings: tuple[str, ...] = ()
    held_out: bool = False  # whether it is of an evaluation


def listed(*parts: str) -> tuple[str, ...]:
    """The parts of texts with commas between them."""
    return tuple(word for part in parts for word in part.split(", "))


def _share(name: str, title: str, *spellings: str) -> Quantity:
    return Quantity(name=name, title=title, lowest=0, highest=1, spellings=listed(*spellings))


def _nats(name: str, title: str, *spellings: str, log: bool = False) -> Quantity:
    return Quantity(name=name, title=title, unit="nats", log=log, spellings=listed(*spellings))


def _positive(name: str, title: str, *spellings: str, unit: str = "") -> Quantity:
    return Quantity(
        name=name, title=title, unit=unit, log=True, lowest=0, spellings=listed(*spellings)
    )


QUANTITIES: tuple[Quantity, ...] = (
    Quantity(
        name="reward",
        title="reward",
        spellings=listed("reward, rewards, score, scores, return, returns, outcome reward"),
    ),
    Quantity(
        name="reward_std",
        title="standard deviation of the reward",
        lowest=0,
        spellings=listed("reward std, rewards std, score std, reward stdev"),
    ),
    Quantity(
        name="accuracy",
        title="held-out accuracy or reward",
        spellings=listed(
            "reward, rewards, score, scores, accuracy, acc, correct, pass 1, success rate",
            "pass rate, solve rate, exact match",
        ),
        held_out=True,
    ),
    _positive(
        "grad_norm",
        "gradient norm",
        "grad norm, gradient norm, gnorm, grad norms, grad l 2, grad norm l 2",
        "grad norm unclipped, grad norm before clip",
    ),
    _positive(
        "update_norm",
        "norm of the update",
        "update norm",
    ),
    Quantity(
        name="entropy",
        title="entropy",
        unit="nats",
        lowest=-0.001,
        highest=20,
        spellings=listed("entropy, entropies, entropy loss, token entropy, entropy token"),
    ),
    _nats(
        "kl",
        "KL to the reference",
        "kl, kl div, kl divergence, kl ref, kl loss, kl penalty, kl reference, kl to ref",
        "kl base, kl k 3, kl sft",
    ),
    _nats(
        "kl_step",
        "KL between the policies before and after a step",
        log=True,
    ),
    _positive(
        "length",
        "completion length",
        "response length, completion length, completions length, response len",
        "completion len, output length, output len, gen len, gen length, generation length",
        "generated length, generate length, num output tokens, completion tokens",
        "response tokens, output tokens, length, tokens per completion, tokens per response",
        "length tokens, len, tokens response length, token response length",
        "response length tokens, completion length tokens, gen tokens per sample",
        "generate num tokens, responses length, answer length, solution length",
        unit="tokens",
    ),
    _share(
        "truncated",
        "share of completions cut at the length limit",
        "truncated, truncation, truncated ratio, truncated rate, truncation rate",
        "truncated fraction, clipped ratio, completions clipped ratio",
        "response length clip ratio, response clip ratio, overlong, overlong ratio",
        "frac truncated, is truncated, truncated frac, completions truncated",
        "truncation ratio, length clip ratio, response clipped ratio",
        "response length clipped ratio",
    ),
    _share(
        "dead_groups",
        "share of groups whose rewards are all equal",
        "frac reward zero std, zero std, zero std frac, zero std ratio",
        "zero variance groups, dead groups, zero std groups, zero advantage ratio",
        "frac zero std, zero std fraction, dead groups frac, degenerate groups",
        "dead group fraction, zero variance frac, zero adv ratio, frac groups zero std",
        "dead group ratio, dead groups ratio, zero std group ratio, zero std group fraction",
        "zero advantage fraction",
    ),
    _share(
        "all_right",
        "share of groups that are all right",
    ),
    _share(
        "all_wrong",
        "share of groups that are all wrong",
    ),
    _share(
        "clipped",
        "share of tokens at the ratio's bounds",
        "clip ratio, clip frac, clip fraction, clipfrac, pg clipfrac, ratio clipped",
        "ppo clipfrac, pg clip frac, ppo clip ratio, ppo clip frac, clip ratio region",
    ),
    _share(
        "grad_clipped",
        "share of updates whose gradient is clipped",
    ),
    _positive(
        "mismatch",
        "mean difference of the sampler's and the trainer's log-probabilities",
        unit="nats",
    ),
    _positive(
        "mismatch_max",
        "largest difference of the sampler's and the trainer's log-probabilities",
        unit="nats",
    ),
    _nats(
        "mismatch_kl",
        "KL between sampler and trainer",
        "mismatch kl, rollout train kl, rollout actor kl, rollout policy kl, vllm kl",
        "sampler kl, sampler trainer kl",
        log=True,
    ),
    _share(
        "sampler_outside",
        "share of ratios of trainer to sampler outside [0.9, 1.1]",
    ),
    Quantity(
        name="ratio_max",
        title="largest ratio of trainer to sampler",
        log=True,
        lowest=0,
        gather="max",
    ),
    Quantity(
        name="ratio_min",
        title="smallest ratio of trainer to sampler",
        log=True,
        lowest=0,
        gather="min",
    ),
    _share(
        "sampler_impossible",
        "share of sampler log-probabilities that cannot be right",
    ),
    _share(
        "near_uniform",
        "share of tokens with entropy above 0.9·ln V",
    ),
    _share(
        "saturation",
        "share of the gradient at token weights on one bound",
    ),
    _share(
        "clipped_weights",
        "share of tokens whose weight alone is beyond the clip",
    ),
    Quantity(
        name="temperature_gap",
        title="difference of greedy and sampled accuracy",
    ),
    _share(
        "memory",
        "share of the memory in use",
    ),
    Quantity(
        name="lr",
        title="learning rate",
        log=True,
        lowest=0,
        highest=10,
        gather="last",
        spellings=listed("lr, learning rate, lr group 0, lr pg 0, lr 0"),
    ),
    Quantity(
        name="loss",
        title="loss",
        spellings=listed(
            "loss, losses, pg loss, policy loss, loss pg, loss policy, grpo loss, ppo loss",
            "sft loss, ce loss, lm loss, loss lm, nll loss, dpo loss",
        ),
    ),
    Quantity(
        name="eval_loss",
        title="held-out loss",
        spellings=listed("loss, nll loss, lm loss"),
        held_out=True,
    ),
    _share(
        "token_accuracy",
        "share of tokens that are predicted right",
        "token accuracy, token acc, tokens accuracy",
    ),
    Quantity(
        name="chosen",
        title="implicit reward of the chosen answers",
        spellings=listed("rewards chosen, reward chosen, chosen reward, chosen rewards"),
    ),
    Quantity(
        name="rejected",
        title="implicit reward of the rejected answers",
        spellings=listed("rewards rejected, reward rejected, rejected reward, rejected rewards"),
    ),
    Quantity(
        name="margin",
        title="margin between chosen and rejected answers",
        spellings=listed("rewards margins, reward margin, margin, margins, rewards margin"),
    ),
    _share(
        "preference_accuracy",
        "share of pairs that are ordered right",
        "rewards accuracies, reward accuracy, preference accuracy, rewards accuracy",
        "reward accuracies",
    ),
    Quantity(
        name="chosen_logp",
        title="log-probability of the chosen answers",
        unit="nats",
        highest=1,
        spellings=listed("logps chosen, logp chosen, chosen logps, chosen logp"),
    ),
    _nats(
        "teacher_kl",
        "KL to the teacher",
        "teacher kl, kl teacher, reverse kl",
        log=True,
    ),
)
"""All quantities; the first spellings that fit count."""

BY_NAME: Mapping[str, Quantity] = {quantity.name: quantity for quantity in QUANTITIES}
