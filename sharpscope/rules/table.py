"""The table of rules: what each symptom is, from which value on it is reported, what it means and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sharpscope.rules.measures import Measure

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
Severities = tuple[Severity, Severity, Severity]
"""When the reward falls afterwards, when it does neither, and when it has risen."""

FATAL: Severities = ("critical", "critical", "critical")
HARMFUL: Severities = ("critical", "warning", "warning")
MIXED: Severities = ("critical", "warning", "info")
NOTICE: Severities = ("warning", "warning", "warning")
SLIGHT: Severities = ("warning", "info", "info")
REMARK: Severities = ("info", "info", "info")

FAILING = ("reward_collapse", "reward_constant", "zero_gradient", "drift", "dead_groups")
OUTCOMES = (
    *("entropy_rise", "near_uniform", "entropy_collapse", "kl_drift"),
    *("length_growth", "length_shrink"),
)
"""Rules on a policy that fails, and on what becomes of its completions: their findings may follow from another's."""

REWARDS = ("rewards",)
POLICIES = ("rewards", "distillation")
PREFERENCE = ("preference", "reward model")
SUPERVISED = ("supervised", "preference", "reward model")
GENERATING = ("rewards", "distillation", "supervised")
ALL = ("rewards", "distillation", "supervised", "preference", "reward model")
"""Kinds of training whose logs a rule judges."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table."""

    name: str  # its setting is `health.<name>`, its section in the documentation has it as anchor
    title: str  # the finding in a few words
    quantities: tuple[str, ...]  # canonical ones that it judges; the first one shows it best
    # name of a function of `rules.measures`, then its arguments
    measured_by: tuple[str | int, ...]
    threshold: float  # it applies at or above this (`below`: at or below)
    statistic: str  # what the measure is, in words and units
    meaning: str  # what it usually means
    advice: str  # what to change; names in braces are settings as the trainer calls them (FIELDS), or `restart`
    source: str  # where the threshold comes from
    severity: Severities
    # a value from which on the symptom is at least so bad
    worse: tuple[float, Severity] | None = None
    below: bool = False  # whether small values are the problem
    window: int = 1  # steps that the measure averages; 0: it is of the whole run
    # When it can be judged: before a step's updates, after them, at an evaluation, or from a log only.
    known: Literal["before", "after", "evaluation", "log"] = "before"
    command: str = "show {run}"  # shows more in a recorded run
    explains: tuple[str, ...] = ()  # rules whose findings may follow from it
    # Where it begins: at a change, where a quantity becomes exactly constant, after the best evaluation, or at the first step.
    begins: Literal["change", "exact", "best", "first"] = "change"
    trainings: tuple[str, ...] = REWARDS  # whose logs it judges

    @cached_property
    def measure(self) -> Measure:
        """Number that is compared with the threshold, of each step from the values up to it."""
        from sharpscope.rules import measures  # imports NumPy, which the table does not need

        name, *arguments = self.measured_by
        found = getattr(measures, str(name))
        measure: Measure = found(*arguments) if name in measures.PARAMETRIC else found
        return measure

    def level(self, value: float, outcome: int = 1) -> Severity:
        """How bad a value beyond the threshold is; `outcome`: position in `severity`."""
        level = self.severity[outcome]
        if self.worse is not None and value >= self.worse[0]:
            level = min(level, self.worse[1], key=SEVERITIES.index)
        return level


FIELDS: Mapping[str, Mapping[str, str]] = {
    "sharpscope": {
        "lr": "optimizer.lr",
        "max_new_tokens": "rollout.max_new_tokens",
        "temperature": "rollout.temperature",
        "group_size": "rollout.group_size",
        "max_grad_norm": "optimizer.max_grad_norm",
        "microbatch": "update.microbatch_tokens",
        "correction": "method.correction",
        "kl": "method.kl.coef",
    },
    "trl": {
        "lr": "learning_rate",
        "max_new_tokens": "max_completion_length",
        "temperature": "temperature",
        "group_size": "num_generations",
        "max_grad_norm": "max_grad_norm",
        "microbatch": "per_device_train_batch_size",
        "correction": "vllm_importance_sampling_correction",
        "kl": "beta",
    },
    "verl": {
        "lr": "actor_rollout_ref.actor.optim.lr",
        "max_new_tokens": "data.max_response_length",
        "temperature": "actor_rollout_ref.rollout.temperature",
        "group_size": "actor_rollout_ref.rollout.n",
        "max_grad_norm": "actor_rollout_ref.actor.grad_clip",
        "microbatch": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "correction": "algorithm.rollout_correction",
        "kl": "actor_rollout_ref.actor.kl_loss_coef",
    },
    "": {
        "lr": "the learning rate",
        "max_new_tokens": "the length limit",
        "temperature": "the temperature",
        "group_size": "the group size",
        "max_grad_norm": "the bound of the gradient norm",
        "microbatch": "the batch of a forward pass",
        "correction": "truncated importance sampling",
        "kl": "the KL coefficient",
    },
}
"""What trainers call the settings that advice names; "": in words."""

_TABLE: tuple[Rule, ...] = (
    Rule(
        name="non_finite",
        title="A number stopped being finite",
        quantities=("grad_norm", "loss", "reward", "kl", "entropy"),
        measured_by=("not_finite",),
        threshold=1,
        statistic="values of the step that are not finite",
        meaning=(
            "a low-precision format overflowed, a ratio of probabilities exploded, or a loss was "
            "over no token; single gradients between finite ones are updates that a loss scaler "
            "leaves out, which does no harm"
        ),
        advice=(
            "lower {lr}{lr_value}, clip the gradient norm, compute log-probabilities in float32, "
            "and look for groups without tokens in the loss; {restart}"
        ),
        source="a definition",
        severity=FATAL,
        known="log",
        explains=(*FAILING, "loss_zero", "loss_growth"),
        trainings=ALL,
    ),
    Rule(
        name="policy_destroyed",
        title="An update destroyed the policy",
        quantities=("kl_step", "reward", "entropy"),
        measured_by=("policy_change",),
        threshold=1.5,
        statistic=(
            "KL(π_old‖π) of the step in nats / token; where it is not logged, three times the "
            "relative change of entropy in the step from which on reward is below 5 % of its mean "
            "before"
        ),
        meaning=(
            "the step was far too long for this model: the learning rate suits smaller models or "
            "adapters (AdamW's first steps have the length of the learning rate in every parameter,"
            " whatever the gradient is)"
        ),
        advice=(
            "lower {lr}{lr_value} tenfold (1e-6 is usual for full fine-tuning, 1e-5 to 1e-4 for "
            "LoRA) and warm up; {restart}"
        ),
        source=(
            "the embedded policy: 1e-4 to 5e-4 nats a step; SmolLM2-135M, first step: 0.31 at 1e-5 "
            "(it learns), 0.99 at 3e-5 (it is harmed), 2.4 at 1e-4 (reward is 0 from step 2 on)"
        ),
        severity=FATAL,
        known="after",
        command="tokens {run} --step {step}",
        explains=(*FAILING, *OUTCOMES, "truncation", "gradient_growth"),
    ),
    Rule(
        name="update_spike",
        title="The update spiked",
        quantities=("update_norm",),
        measured_by=("spike", "update_norm"),
        threshold=3,
        statistic=(
            "times the median update norm of the 50 steps before, where its logarithm is above 4 "
            "robust standard deviations"
        ),
        meaning=(
            "the optimizer's step itself was long: its second moments were too small for this "
            "gradient"
        ),
        advice="raise AdamW's epsilon or lower its beta2, warm up longer, lower {lr}{lr_value}",
        source="as for gradient_spike",
        severity=MIXED,
        known="after",
        command=(
            "tokens {run} --step {step} && sharpscope fork {run} --step {step} --without top:12"
        ),
        explains=(*FAILING, *OUTCOMES, "truncation", "policy_destroyed", "non_finite"),
        trainings=ALL,
    ),
    Rule(
        name="gradient_spike",
        title="The gradient spiked",
        quantities=("grad_norm",),
        measured_by=("spike", "grad_norm"),
        threshold=3,
        statistic=(
            "times the median gradient norm of the 50 steps before, where its logarithm is above 4 "
            "robust standard deviations"
        ),
        meaning=(
            "a few tokens hold most of the squared gradient; what they do is another question, "
            "which effects answer"
        ),
        advice=(
            "name the tokens of that step; lower {lr}{lr_value}, clip the gradient norm "
            "({max_grad_norm}), or give such tokens less weight"
        ),
        source=(
            "rldoctor asks for 3 spikes of 3 times the median at z > 8, rlprobe for 3 of 10 times; "
            "one, which clipping tames, is enough to look at its tokens"
        ),
        severity=("critical", "info", "info"),
        known="after",
        command=(
            "tokens {run} --step {step} && sharpscope fork {run} --step {step} --without top:12"
        ),
        explains=(*FAILING, *OUTCOMES, "truncation", "policy_destroyed", "non_finite"),
        trainings=ALL,
    ),
    Rule(
        name="gradient_growth",
        title="The gradient norm keeps growing",
        quantities=("grad_norm",),
        measured_by=("relative", "grad_norm"),
        threshold=4,
        statistic="median gradient norm of 10 steps relative to its median in the first 5 steps",
        meaning=(
            "the loss gets sharper where the policy goes, or the ratios' tails grow: updates act on"
            " a policy that is no longer the sampler's"
        ),
        advice=(
            "lower {lr}{lr_value}, do fewer updates per batch, check the sampler's "
            "log-probabilities"
        ),
        source="121 healthy runs: at most 1.5",
        severity=HARMFUL,
        window=10,
        known="after",
        command="tokens {run} --step {step}",
        explains=(*FAILING, *OUTCOMES, "truncation", "non_finite", "gradient_spike"),
        trainings=ALL,
    ),
    Rule(
        name="gradient_clipping",
        title="Most gradients are clipped",
        quantities=("grad_clipped",),
        measured_by=("mean", "grad_clipped"),
        threshold=0.5,
        statistic="share of updates whose gradient norm is clipped, mean of 10 steps",
        meaning=(
            "the gradient norm is above {max_grad_norm} at most updates, so that a large batch "
            "gradient moves the weights no further than a small one; common, and no fault where the"
            " reward rises"
        ),
        advice=(
            "nothing, if the training learns; to compare methods set {max_grad_norm} above the "
            "usual norm in all of them, or compare them at equal update norms"
        ),
        source=(
            "178 runs: it binds in at most 8 % of 40 updates of plain GRPO, in 70 to 90 % of those "
            "of the second study's treatment"
        ),
        severity=SLIGHT,
        window=10,
        known="after",
        trainings=ALL,
    ),
    Rule(
        name="sampler_logp",
        title="The sampler's log-probabilities cannot be right",
        quantities=("sampler_impossible",),
        measured_by=("value", "sampler_impossible"),
        threshold=1e-06,
        statistic=(
            "share of loss tokens whose sampler log-probability is above 0, exactly 0, or the same "
            "as all others"
        ),
        meaning="these log-probabilities cannot be right, and ratios made of them are not",
        advice=(
            "check what the server returns: log-probabilities of the drawn tokens, not 0 or a "
            "placeholder"
        ),
        source="a definition",
        severity=HARMFUL,
        worse=(0.1, "critical"),
        command="tokens {run} --step {step} --by mismatch",
        explains=(*FAILING, *OUTCOMES, "mismatch_kl", "logp_mismatch", "ratio_tail"),
        trainings=POLICIES,
    ),
    Rule(
        name="logp_mismatch",
        title="Sampler and trainer disagree",
        quantities=("mismatch",),
        measured_by=("mean", "mismatch"),
        threshold=0.1,
        statistic="mean |ln π of the trainer − ln π of the sampler| in nats, mean of 10 steps",
        meaning=(
            "the sampler's log-probabilities are not those of the policy that is trained: other "
            "weights, precision, temperature or kernels"
        ),
        advice=(
            "check that weights are synchronized and the temperature is applied on both sides; "
            "correct the ratio ({correction})"
        ),
        source=(
            "trl 6789: a standard deviation of 0.05 nats between vLLM and a healthy bfloat16 "
            "trainer, and of 0.055 between two batch sizes of one trainer"
        ),
        severity=HARMFUL,
        worse=(0.5, "critical"),
        window=10,
        command="tokens {run} --step {step} --by mismatch",
        explains=(*FAILING, *OUTCOMES, "gradient_growth", "gradient_spike", "ratio_tail"),
        trainings=POLICIES,
    ),
    Rule(
        name="mismatch_kl",
        title="Sampler and trainer differ by KL",
        quantities=("mismatch_kl",),
        measured_by=("mean", "mismatch_kl"),
        threshold=0.02,
        statistic="KL between sampler and trainer in nats / token, mean of 10 steps",
        meaning=(
            "the sampler's log-probabilities are not those of the policy that is trained: other "
            "weights, precision, temperature or kernels"
        ),
        advice=(
            "check that weights are synchronized and the temperature is applied on both sides; "
            "correct the ratio ({correction})"
        ),
        source="half the square of a standard deviation of 0.05 nats (trl 6789) is 0.00125",
        severity=HARMFUL,
        worse=(0.2, "critical"),
        window=10,
        command="tokens {run} --step {step} --by mismatch",
        explains=(*FAILING, *OUTCOMES, "gradient_growth", "gradient_spike", "ratio_tail"),
        trainings=POLICIES,
    ),
    Rule(
        name="sampler_ratio",
        title="Many ratios of trainer to sampler are far from 1",
        quantities=("sampler_outside",),
        measured_by=("mean", "sampler_outside"),
        threshold=0.15,
        statistic="share of ratios π/μ of trainer to sampler outside [0.9, 1.1], mean of 10 steps",
        meaning="sampler and trainer disagree on many tokens; bfloat16 alone makes 0.08",
        advice="check dtypes, the sampler and its temperature, or correct the ratio ({correction})",
        source=(
            "trl 6789: 0.075 in a healthy bfloat16 run, 0.08 between batches of 1 and of 8 without "
            "any sampler"
        ),
        severity=HARMFUL,
        window=10,
        command="tokens {run} --step {step} --by mismatch",
        trainings=POLICIES,
    ),
    Rule(
        name="ratio_tail",
        title="A few ratios of trainer to sampler are very large",
        quantities=("ratio_max", "ratio_min", "mismatch_max"),
        measured_by=("ratio_tail",),
        threshold=8,
        statistic="factor between trainer and sampler at one token of the step",
        meaning=(
            "single tokens are much more likely for one of them; as an importance weight such a "
            "ratio multiplies the token's gradient"
        ),
        advice="cap or mask the ratio ({correction})",
        source=(
            "trl 6789: at most 1.9 (0.66 nats) in healthy bfloat16; prime-rl masks tokens beyond 8 "
            "by default"
        ),
        severity=HARMFUL,
        command="tokens {run} --step {step} --by mismatch",
        trainings=POLICIES,
    ),
    Rule(
        name="ratio_clipping",
        title="Many tokens are at the ratio's bounds",
        quantities=("clipped",),
        measured_by=("mean", "clipped"),
        threshold=0.2,
        statistic="share of tokens, mean of 10 steps",
        meaning="updates of a batch go so far that the clip stops a large part of its tokens",
        advice="do fewer updates per batch, lower {lr}{lr_value}, or widen the bounds",
        source="rldoctor: 0.2 of 0.1, 0.2 and 0.4; rlprobe: 0.3",
        severity=HARMFUL,
        window=10,
        known="after",
        command="tokens {run} --step {step} --by ratio",
        trainings=POLICIES,
    ),
    Rule(
        name="truncation",
        title="Completions are cut",
        quantities=("truncated",),
        measured_by=("mean", "truncated"),
        threshold=0.3,
        statistic="share of completions, mean of 10 steps",
        meaning=(
            "completions are cut at {max_new_tokens} and scored as wrong whatever they were about "
            "to say, which can push the policy to be short or to give up"
        ),
        advice="raise {max_new_tokens}, or leave cut completions out of the loss",
        source="121 healthy runs: at most 0.22; rldoctor warns from 0.15",
        severity=HARMFUL,
        window=10,
        command="tokens {run} --step {step}",
        explains=(*FAILING, "reward_flat"),
        trainings=POLICIES,
    ),
    Rule(
        name="length_growth",
        title="Completions grow",
        quantities=("length",),
        measured_by=("relative", "length"),
        threshold=2,
        statistic="median length of 10 steps relative to its median in the first 5 steps",
        meaning=(
            "the loss or the reward pays for length (a mean over each completion's tokens punishes "
            "long wrong answers less)"
        ),
        advice="average the loss over all tokens, or penalize overlong completions",
        source=(
            "121 healthy runs: at most 1.91 while they learn to use what they have; rldoctor's 1.5 "
            "and rlprobe's 1.4 apply in 60 % of them"
        ),
        severity=MIXED,
        window=10,
        known="after",
        command="tokens {run} --step {step}",
        explains=(*FAILING, "truncation"),
        trainings=POLICIES,
    ),
    Rule(
        name="entropy_collapse",
        title="Entropy collapsed",
        quantities=("entropy",),
        measured_by=("relative", "entropy", 1),
        threshold=0.1,
        statistic="entropy relative to its median in the first 5 steps",
        meaning=(
            "the policy is nearly deterministic, so that completions of a group no longer differ "
            "and groups give no gradient"
        ),
        advice=(
            "raise the upper clip bound, add an entropy bonus or KL, lower {lr}{lr_value}, or use "
            "harder prompts"
        ),
        source=(
            "rldoctor has the same floor; in 178 runs it never fell below 0.17 of its early value. "
            "An absolute floor misfires: 0.03 to 0.2 nats are healthy in mathematics (rlwatch warns"
            " below 1.0)"
        ),
        severity=HARMFUL,
        below=True,
        command="tokens {run} --step {step} --by entropy_change",
        explains=(*FAILING, "reward_flat", "truncation", "length_growth", "length_shrink"),
        trainings=GENERATING,
    ),
    Rule(
        name="entropy_rise",
        title="Entropy rises",
        quantities=("entropy",),
        measured_by=("entropy_rise",),
        threshold=0.3,
        statistic=(
            "nats of entropy (mean of 10 steps) above its lowest mean before, from 1.5 times that "
            "on"
        ),
        meaning=(
            "unlikely tokens are pushed up or likely ones down: too large a learning rate, negative"
            " advantages on likely tokens, a k1 KL term as a loss with top-p sampling, or an "
            "entropy bonus that is too large"
        ),
        advice="lower {lr}{lr_value}; use the k3 estimator for KL",
        source="121 healthy runs: at most 0.06 nats",
        severity=HARMFUL,
        window=10,
        command="tokens {run} --step {step} --by entropy_change",
        explains=(
            *FAILING,
            "near_uniform",
            "entropy_collapse",
            "kl_drift",
            "length_growth",
            "length_shrink",
            "truncation",
        ),
        trainings=POLICIES,
    ),
    Rule(
        name="near_uniform",
        title="Tokens are drawn from almost the whole vocabulary",
        quantities=("near_uniform",),
        measured_by=("value", "near_uniform"),
        threshold=0.2,
        statistic="share of tokens with entropy above 0.9·ln V",
        meaning="the policy produces noise at the sampling temperature",
        advice="compare greedy accuracy; lower {lr}{lr_value} or {temperature}",
        source=(
            "178 runs: 14 % of plain GRPO's sampled tokens in the worst step, 36 % on average under"
            " the second study's treatment"
        ),
        severity=HARMFUL,
        command="tokens {run} --step {step} --by entropy",
        explains=(*FAILING, "kl_drift", "length_growth", "truncation", "temperature_gap"),
        trainings=POLICIES,
    ),
    Rule(
        name="kl_drift",
        title="The policy drifts away from the reference",
        quantities=("kl",),
        measured_by=("kl_drift",),
        threshold=0.5,
        statistic="KL to the reference in nats / token, mean of 10 steps without the largest",
        meaning=(
            "each step goes further than the KL term pulls back; where reward still rises it need "
            "not be a problem"
        ),
        advice="raise {kl} or lower {lr}{lr_value}",
        source="rldoctor: 0.5 is worth a remark, 2 a warning",
        severity=MIXED,
        window=10,
        known="after",
        command="tokens {run} --step {step} --by kl",
        explains=(*FAILING, "length_growth", "length_shrink", "truncation"),
    ),
    Rule(
        name="kl_sign",
        title="The KL estimate changes sign",
        quantities=("kl",),
        measured_by=("negative", "kl"),
        threshold=0.2,
        statistic="share of 10 steps whose estimate is negative, which a KL cannot be",
        meaning=(
            "the k1 estimate (the mean log ratio) is logged or used as a loss; as a loss its "
            "gradient does not pull to the reference"
        ),
        advice="use the k3 estimator in the loss",
        source="k3 is never negative; rounding is below 1e-6",
        severity=MIXED,
        window=10,
        known="after",
        command="tokens {run} --step {step} --by kl",
        explains=(*FAILING, *OUTCOMES, "gradient_growth"),
    ),
    Rule(
        name="reward_gap",
        title="Held-out accuracy falls while the reward does not",
        quantities=("accuracy", "reward"),
        measured_by=("reward_gap",),
        threshold=0.15,
        statistic=(
            "held-out accuracy (or reward) below its best, while the mean training reward of the "
            "last 10 steps and that of the last 5 are at least what it was then"
        ),
        meaning=(
            "the reward pays for something else than the task: a loophole of the scorer, a part of "
            "the reward that outgrew the others, or prompts that are learned by heart"
        ),
        advice=(
            "read completions with a high reward that the evaluation calls wrong; repair the "
            "reward; {restart}"
        ),
        source=(
            "rldoctor: a gap of 0.15 is a warning, 0.3 critical; the standard error of an accuracy "
            "over 100 prompts is 0.05"
        ),
        severity=HARMFUL,
        worse=(0.3, "critical"),
        known="log",
        command="tokens {run} --step {step}",
        begins="best",
    ),
    Rule(
        name="reward_collapse",
        title="Reward collapsed",
        quantities=("reward",),
        measured_by=("reward_fall",),
        threshold=8,
        statistic=(
            "standard errors by which the mean reward of the last 5 steps is below the best mean of"
            " 10 steps; 0 where that is less than 30 % of the range"
        ),
        meaning=(
            "the policy left the region where it was good: usually after a few very large updates, "
            "a drift of entropy, or a reward that pays for something else; the order of events says"
            " which came first"
        ),
        advice=(
            "look at the tokens of the steps just before the fall; lower {lr}{lr_value} or repair "
            "what came first; {restart}"
        ),
        source="121 healthy runs: at most 6.1; the best of many means lies above the typical one",
        severity=FATAL,
        window=5,
        command="tokens {run} --step {step}",
        explains=("reward_constant", "zero_gradient", "drift", "dead_groups"),
    ),
    Rule(
        name="reward_constant",
        title="Reward does not vary",
        quantities=("reward",),
        measured_by=("constant_reward",),
        threshold=0.8,
        statistic="share of 10 steps with exactly the same mean reward",
        meaning=(
            "nothing can be learned, since every completion gets the same reward: the reward "
            "function fails, no answer is parsed, the task is far too hard or already solved, or "
            "the policy is dead"
        ),
        advice="score a few completions by hand; check the answer's format and {max_new_tokens}",
        source="a definition; two steps in ten may differ",
        severity=("critical", "critical", "info"),
        window=10,
        command="tokens {run} --step {step}",
        explains=("zero_gradient", "drift", "dead_groups", "no_motion"),
        begins="exact",
    ),
    Rule(
        name="dead_groups",
        title="Most groups give no gradient",
        quantities=("dead_groups", "reward"),
        measured_by=("dead_share",),
        threshold=0.5,
        statistic="share of groups without an advantage, mean of 10 steps",
        meaning=(
            "the completions of these groups got equal rewards, so they carry no gradient: the "
            "prompts are too easy or too hard"
        ),
        advice=(
            "filter prompts by pass rate, draw again (dynamic sampling), raise {temperature} or "
            "{group_size}"
        ),
        source=(
            "rldoctor: a warning from 0.5, critical from 0.75; rlprobe: 0.4. In 141 healthy runs of"
            " puzzles the largest mean of ten steps is 0.58 in the median and 0.76 at most, in "
            "short ones of 8 groups a step 0.85: it is worth a remark from 0.5 and a warning from "
            "0.9"
        ),
        severity=SLIGHT,
        worse=(0.9, "warning"),
        window=10,
        explains=("zero_gradient", "reward_constant", "reward_flat"),
        begins="first",
    ),
    Rule(
        name="zero_gradient",
        title="The gradient is zero",
        quantities=("grad_norm",),
        measured_by=("zero_gradient",),
        threshold=0.5,
        statistic="share of 10 steps whose gradient is exactly zero",
        meaning=(
            "all groups have equal rewards, or the loss has no token; AdamW goes on moving the "
            "weights by its momentum"
        ),
        advice="stop: nothing is learned; look at the rewards of single completions; {restart}",
        source="rldoctor: 0.4 of the steps is a warning, 0.7 critical",
        severity=("critical", "critical", "warning"),
        window=10,
        known="after",
        explains=("drift", "reward_flat", "no_motion", "loss_flat"),
        begins="exact",
        trainings=ALL,
    ),
    Rule(
        name="drift",
        title="The policy moves without a gradient",
        quantities=("entropy", "grad_norm"),
        measured_by=("drift",),
        threshold=0.2,
        statistic="change of entropy in nats since the last step with a gradient",
        meaning="the policy moves by the optimizer's momentum alone: no completion earns a reward",
        advice="lower {lr}{lr_value}; {restart}",
        source="121 healthy runs: at most 0.11, from other prompts alone",
        severity=HARMFUL,
    ),
    Rule(
        name="no_motion",
        title="The learning rate moves nothing",
        quantities=("entropy", "reward", "length", "kl", "lr"),
        measured_by=("standing_still",),
        threshold=30,
        statistic=(
            "steps after which reward, entropy and length are where they began, with KL to the "
            "reference below 0.001 nats"
        ),
        meaning=(
            "the updates are too small to see, or the optimizer does not train the weights that are"
            " sampled"
        ),
        advice="raise {lr}{lr_value} by 3 to 10 times; check that the sampler gets the new weights",
        source="no trend at the 1 % level in any of them",
        severity=NOTICE,
        window=0,
        known="log",
        explains=("reward_flat",),
    ),
    Rule(
        name="temperature_gap",
        title="Accuracy depends on the temperature",
        quantities=("temperature_gap",),
        measured_by=("value", "temperature_gap"),
        threshold=0.2,
        statistic="|accuracy at T = 0 − at T = 1|",
        meaning="accuracy depends on the temperature more than a method can change it",
        advice="compare methods by greedy accuracy",
        source="differences between methods in the studies are below 0.1",
        severity=NOTICE,
        known="evaluation",
    ),
    Rule(
        name="weight_saturation",
        title="Token weights are on one bound",
        quantities=("saturation",),
        measured_by=("value", "saturation"),
        threshold=0.95,
        statistic="share of the gradient |c|/w·‖p − e_y‖",
        meaning=(
            "this share of the gradient has token weights on one bound: the method is plain GRPO up"
            " to the gradient's scale"
        ),
        advice=(
            "calibrate over the gradient (method.weight.percentiles=gradient) or set other "
            "constants"
        ),
        source="a definition up to 5 %",
        severity=NOTICE,
    ),
    Rule(
        name="clipped_weights",
        title="Token weights alone are beyond the clip",
        quantities=("clipped_weights",),
        measured_by=("value", "clipped_weights"),
        threshold=0.1,
        statistic="share of loss tokens",
        meaning=(
            "these tokens have no gradient even at ratio 1: A > 0 and weight > 1 + "
            "method.clip.high, or A < 0 and weight < 1 − method.clip.low"
        ),
        advice="set method.weight_on=surrogate, or widen the clip",
        source="a tenth of the tokens",
        severity=NOTICE,
    ),
    Rule(
        name="memory",
        title="Memory is nearly full",
        quantities=("memory",),
        measured_by=("value", "memory"),
        threshold=0.92,
        statistic="share of the memory in use",
        meaning=(
            "a longer completion or a larger batch may not fit; it does not change what is learned"
        ),
        advice="lower {microbatch}",
        source="a margin of 8 %",
        severity=REMARK,
        trainings=ALL,
    ),
    Rule(
        name="lost_gradient",
        title="The gradient is zero although rewards differ",
        quantities=("grad_norm", "reward_std"),
        measured_by=("lost_gradient",),
        threshold=0.8,
        statistic="share of 10 steps with a gradient of exactly zero and rewards that differ",
        meaning=(
            "no gradient reaches the weights that are trained: they are frozen or not the "
            "optimizer's, the loss is masked, or its scale underflows"
        ),
        advice=(
            "check which parameters require a gradient (an adapter's after merging or quantizing), "
            "the loss mask, and the precision; {restart}"
        ),
        source="a definition; without the share of equal groups all ten steps must be such",
        severity=FATAL,
        window=10,
        known="log",
        explains=("zero_gradient", "no_motion", "reward_flat", "reward_constant"),
        begins="exact",
    ),
    Rule(
        name="lr_zero",
        title="The learning rate is zero",
        quantities=("lr",),
        measured_by=("zero", "lr"),
        threshold=1.0,
        statistic="share of 10 steps whose learning rate is exactly zero",
        meaning=(
            "nothing is trained: the schedule has ended, its length is wrong, or it never began"
        ),
        advice="check the schedule's number of steps and its warm-up; {restart}",
        source="a definition",
        severity=HARMFUL,
        window=10,
        known="log",
        explains=("no_motion", "reward_flat", "loss_flat"),
        begins="exact",
        trainings=ALL,
    ),
    Rule(
        name="length_shrink",
        title="Completions shrink",
        quantities=("length",),
        measured_by=("relative", "length"),
        threshold=0.5,
        statistic="median length of 10 steps relative to its median in the first 5 steps",
        meaning=(
            "short completions pay: a penalty of length outweighs the answer, cut completions are "
            "punished, or the policy has learned to give up; where reward rises it need not be a "
            "problem"
        ),
        advice=(
            "read completions; weaken the penalty of length or pay it for right answers only; lower"
            " {lr}{lr_value}"
        ),
        source="a half, as a double is reported as growth",
        severity=MIXED,
        below=True,
        window=10,
        known="log",
        command="tokens {run} --step {step}",
        explains=(*FAILING,),
        trainings=POLICIES,
    ),
    Rule(
        name="kl_start",
        title="KL to the reference is large at the start",
        quantities=("kl",),
        measured_by=("kl_at_start",),
        threshold=0.1,
        statistic="smallest of the first three KLs to the reference in nats / token",
        meaning=(
            "the policy starts away from its reference: the reference is another model, or is "
            "computed otherwise (an adapter left on, another precision, dropout, another "
            "temperature or chat template)"
        ),
        advice=(
            "check that the reference has the weights that the training starts from, and the same "
            "forward pass"
        ),
        source=(
            "a policy that starts at its reference has a KL of 0 at its first step; bfloat16 alone "
            "makes 0.001"
        ),
        severity=NOTICE,
        known="log",
        begins="first",
    ),
    Rule(
        name="reward_flat",
        title="Reward has not moved",
        quantities=("reward",),
        measured_by=("flat", "reward"),
        threshold=60,
        statistic=(
            "steps after which reward is where it began, although a change of a tenth of it could "
            "be seen"
        ),
        meaning=(
            "nothing has been learned: updates are too small, the reward does not depend on what "
            "the policy can change, or the task is at its limit from the start"
        ),
        advice=(
            "raise {lr}{lr_value} by 3 to 10 times; check that completions of a group differ in "
            "reward"
        ),
        source=(
            "no trend at the 1 % level, and no tenth of the run 3 standard errors from the first"
        ),
        severity=REMARK,
        worse=(150, "warning"),
        window=0,
        known="log",
    ),
    Rule(
        name="solved",
        title="The task is solved",
        quantities=("reward", "dead_groups", "grad_norm"),
        measured_by=("exactly_solved",),
        threshold=0.3,
        statistic=(
            "share of 10 steps without a gradient, or of groups with equal rewards, at a reward "
            "near its largest value"
        ),
        meaning=(
            "most completions are right, so that groups have equal rewards and give no gradient"
        ),
        advice="use harder prompts, or stop",
        source="rewards within a tenth of 1, or of the largest so far",
        severity=REMARK,
        window=10,
        known="log",
    ),
    Rule(
        name="loss_zero",
        title="The loss is exactly zero",
        quantities=("loss",),
        measured_by=("zero", "loss"),
        threshold=0.5,
        statistic="share of 10 steps whose loss is exactly zero",
        meaning=(
            "the loss is over no token or its computation broke (labels all masked, an overflow in "
            "a low-precision format that is shown as 0): the model learns nothing from here on"
        ),
        advice=(
            "look at the labels of one batch and at the loss in float32; check the checkpoint's "
            "weights for values that are not finite; {restart}"
        ),
        source=(
            "a definition; a gradient norm of exactly 1 with it is the clip of a norm that "
            "overflowed"
        ),
        severity=FATAL,
        window=10,
        known="log",
        explains=("loss_flat", "zero_gradient", "gradient_growth"),
        begins="exact",
        trainings=SUPERVISED,
    ),
    Rule(
        name="loss_spike",
        title="The loss spiked",
        quantities=("loss",),
        measured_by=("spike", "loss"),
        threshold=3,
        statistic=(
            "times the median loss of the 50 steps before, where its logarithm is above 4 robust "
            "standard deviations"
        ),
        meaning=(
            "a batch is unlike the others (broken or foreign text), or the step before was too long"
        ),
        advice=(
            "look at the texts of that step; lower {lr}{lr_value} or clip the gradient norm "
            "({max_grad_norm})"
        ),
        source="as for gradient_spike",
        severity=NOTICE,
        known="log",
        explains=("loss_growth", "overfitting"),
        trainings=SUPERVISED,
    ),
    Rule(
        name="loss_growth",
        title="The loss keeps growing",
        quantities=("loss",),
        measured_by=("relative", "loss"),
        threshold=1.5,
        statistic="median loss of 10 steps relative to its median in the first 5 steps",
        meaning="the training diverges",
        advice="lower {lr}{lr_value}, warm up longer, clip the gradient norm; {restart}",
        source="a loss that falls at all stays below 1",
        severity=FATAL,
        window=10,
        known="log",
        explains=("overfitting",),
        trainings=SUPERVISED,
    ),
    Rule(
        name="loss_flat",
        title="The loss has not moved",
        quantities=("loss",),
        measured_by=("flat", "loss"),
        threshold=60,
        statistic=(
            "steps after which the loss is where it began, although a change of a tenth of it could"
            " be seen"
        ),
        meaning=(
            "the model learns nothing: the adapter is not trained, the learning rate is too small, "
            "or the model knows these texts already"
        ),
        advice=(
            "check which parameters require a gradient, and raise {lr}{lr_value} by 3 to 10 times"
        ),
        source=(
            "no trend at the 1 % level, and no tenth of the run 3 standard errors from the first"
        ),
        severity=NOTICE,
        window=0,
        known="log",
        trainings=SUPERVISED,
    ),
    Rule(
        name="overfitting",
        title="Held-out loss rises",
        quantities=("eval_loss", "loss"),
        measured_by=("rises_again",),
        threshold=1.05,
        statistic=(
            "held-out loss of the last two evaluations relative to its lowest, the smaller one"
        ),
        meaning="the model learns its texts by heart",
        advice=(
            "stop at the lowest held-out loss, train fewer epochs, lower {lr}{lr_value}, or add "
            "data; {restart}"
        ),
        source="two evaluations that are 5 % above the lowest one",
        severity=NOTICE,
        window=2,
        known="log",
        begins="best",
        trainings=SUPERVISED,
    ),
    Rule(
        name="margin_runaway",
        title="Margins grow with a loss of zero",
        quantities=("margin", "loss"),
        measured_by=("saturated",),
        threshold=10,
        statistic="margin between chosen and rejected answers where the loss is below 0.01",
        meaning=(
            "the pairs are told apart perfectly and the policy still moves away: by the "
            "log-probability of the rejected answers, with which fluency goes, too; the pairs may "
            "differ in something trivial"
        ),
        advice=(
            "lower {lr}{lr_value} by 10 times or more, raise beta, train fewer steps, and look at "
            "the pairs"
        ),
        source="at a margin of 10 the loss −ln σ(margin) is 0.00005",
        severity=FATAL,
        known="log",
        explains=("chosen_falls", "gradient_growth", "zero_gradient"),
        trainings=PREFERENCE,
    ),
    Rule(
        name="chosen_falls",
        title="Chosen answers become less likely, too",
        quantities=("chosen", "rejected"),
        measured_by=("chosen_falls",),
        threshold=0.3,
        statistic=(
            "fall of the implicit reward of the chosen answers since the first step, mean of 10 "
            "steps"
        ),
        meaning=(
            "the margin grows because rejected answers fall faster, and the probability goes to "
            "texts that are neither"
        ),
        advice="add a loss on the chosen answers (rpo_alpha), raise beta, lower {lr}{lr_value}",
        source="0.3 is 3 nats of a text at beta = 0.1",
        severity=NOTICE,
        window=10,
        known="log",
        trainings=PREFERENCE,
    ),
    Rule(
        name="reference_start",
        title="Implicit rewards are large at the start",
        quantities=("chosen", "rejected"),
        measured_by=("implicit_at_start",),
        threshold=2,
        statistic=(
            "mean implicit reward of chosen and rejected answers in the first row, where the next "
            "four are close to it"
        ),
        meaning=(
            "the policy starts away from its reference: the reference is another model, or an "
            "adapter is left on in one of the two; the loss orders pairs by where they differ, "
            "which was not learned from them"
        ),
        advice=(
            "check that the reference has the weights that the training starts from, adapters "
            "included"
        ),
        source=(
            "a policy that starts at its reference has implicit rewards of 0; 2 is 20 nats of a "
            "text at beta = 0.1"
        ),
        severity=NOTICE,
        known="log",
        explains=("pairs_not_learned", "margin_runaway", "chosen_falls", "loss_zero"),
        begins="first",
        trainings=PREFERENCE,
    ),
    Rule(
        name="pairs_not_learned",
        title="Pairs are not told apart",
        quantities=("preference_accuracy",),
        measured_by=("by_chance_ordered",),
        threshold=0.55,
        statistic="share of pairs that are ordered right, mean of 10 steps, from step 30 on",
        meaning="the order of the pairs is not learned: chance orders half of them",
        advice=(
            "check which answer is the chosen one, and the length at which texts are cut; raise "
            "{lr}{lr_value}"
        ),
        source="chance is 0.5",
        severity=NOTICE,
        below=True,
        window=10,
        known="log",
        trainings=PREFERENCE,
    ),
)

RULES: Mapping[str, Rule] = {rule.name: rule for rule in _TABLE}
"""Rules by name."""

OF_ROLLOUTS = (
    *("reward_collapse", "reward_constant", "entropy_collapse", "entropy_rise", "near_uniform"),
    *("drift", "dead_groups", "truncation", "length_growth"),
)
"""Rules that judge completions a policy drew and their rewards, which supervised training has not."""
