"""The table of rules: what each symptom is, from which value on it is reported, what it means and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sharpscope.rules import measures
from sharpscope.rules.measures import EARLY, WINDOW, Measure, mean, relative, share, spike, value

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
Severities = tuple[Severity, Severity, Severity]

FATAL: Severities = ("critical", "critical", "critical")
HARMFUL: Severities = ("critical", "warning", "warning")
MIXED: Severities = ("critical", "warning", "info")
NOTICE: Severities = ("warning", "warning", "warning")
REMARK: Severities = ("info", "info", "info")


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        name: of the rule, its setting `health.<name>`, its events and its section in the documentation.
        title: the finding in a few words.
        quantities: canonical quantities that it judges; the first one shows it best.
        measure: number that it compares with the threshold, of each step from the values up to it.
        threshold: it applies at or above this (`below`: at or below).
        statistic: what the measure is, in words and units; the value is shown before it or after it.
        meaning: what it usually means.
        advice: what to change; names in braces are settings as the trainer calls them (FIELDS), or `restart`.
        source: where the threshold comes from.
        severity: when the reward falls afterwards, when it does neither, and when it has risen.
        worse: a value beyond the threshold, and how bad the symptom is at least from there on.
        below: whether small values are the problem.
        window: steps that the measure averages.
        known: when it can be judged: before a step's updates, after them, at an evaluation, or from a log only.
        look: command that looks closer in a recorded run.
    """

    name: str
    title: str
    quantities: tuple[str, ...]
    measure: Measure
    threshold: float
    statistic: str
    meaning: str
    advice: str
    source: str
    severity: Severities = HARMFUL
    worse: tuple[float, Severity] | None = None
    below: bool = False
    window: int = 1
    known: Literal["before", "after", "evaluation", "log"] = "before"
    look: str = "show {run}"

    def level(self, value: float, outcome: int = 1) -> Severity:
        """How bad a value beyond the threshold is; `outcome`: position in `severity`."""
        level = self.severity[outcome]
        if self.worse is not None and value >= self.worse[0]:
            level = min(level, self.worse[1], key=SEVERITIES.index)
        return level


_MEAN = f"mean of {WINDOW} steps"
_PROOF = "tokens {run} --step {step} && sharpscope fork {run} --step {step} --without-tokens top:12"
_OF_EARLY = f"relative to its median in the first {EARLY} steps"

RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "non_finite",
            "A number stopped being finite",
            measures.JUDGED_FINITE,
            measures.not_finite,
            1,
            "values of the step that are not finite",
            "a low-precision format overflowed, a ratio of probabilities exploded, or a loss was over no token",
            "lower {lr}{lr_value}, clip the gradient norm, compute log-probabilities in float32, and look for groups without tokens in "
            "the loss; {restart}",
            "a definition",
            FATAL,
            known="log",
        ),
        Rule(
            "policy_destroyed",
            "An update destroyed the policy",
            ("kl_step", "reward", "entropy"),
            measures.policy_change,
            1.5,
            "KL(π_old‖π) of the step in nats / token; where it is not logged, three times the relative change of entropy in the step from which "
            "on reward is below 5 % of its mean before",
            "the step was far too long for this model: the learning rate suits smaller models or adapters (AdamW's first steps have the "
            "length of the learning rate in every parameter, whatever the gradient is)",
            "lower {lr}{lr_value} tenfold (1e-6 is usual for full fine-tuning, 1e-5 to 1e-4 for LoRA) and warm up; {restart}",
            "the embedded policy: 1e-4 to 5e-4 nats a step; SmolLM2-135M, first step: 0.31 at 1e-5 (it learns), 0.99 at 3e-5 (it is harmed), "
            "2.4 at 1e-4 (reward is 0 from step 2 on)",
            FATAL,
            known="after",
            look="tokens {run} --step {step}",
        ),
        Rule(
            "update_spike",
            "The update spiked",
            ("update_norm",),
            spike("update_norm"),
            3,
            "times the median update norm of the 50 steps before, where its logarithm is above 4 robust standard deviations",
            "the optimizer's step itself was long: its second moments were too small for this gradient",
            "raise AdamW's epsilon or lower its beta2, warm up longer, lower {lr}{lr_value}",
            "as for gradient_spike",
            MIXED,
            known="after",
            look=_PROOF,
        ),
        Rule(
            "gradient_spike",
            "The gradient spiked",
            ("grad_norm",),
            spike("grad_norm"),
            3,
            "times the median gradient norm of the 50 steps before, where its logarithm is above 4 robust standard deviations",
            "a few tokens, often unlikely ones in wrong completions, carry most of an update",
            "name the tokens of that step; lower {lr}{lr_value}, clip the gradient norm ({max_grad_norm}), or give such tokens less weight",
            "rldoctor asks for 3 spikes of 3 times the median at z > 8, rlprobe for 3 of 10 times; one is enough to look at its tokens",
            MIXED,
            known="after",
            look=_PROOF,
        ),
        Rule(
            "gradient_growth",
            "The gradient norm keeps growing",
            ("grad_norm",),
            relative("grad_norm"),
            4,
            f"median gradient norm of {WINDOW} steps {_OF_EARLY}",
            "the loss gets sharper where the policy goes, or the ratios' tails grow: updates act on a policy that is no longer the sampler's",
            "lower {lr}{lr_value}, do fewer updates per batch, check the sampler's log-probabilities",
            "121 healthy runs: at most 1.5",
            HARMFUL,
            window=WINDOW,
            known="after",
            look="tokens {run} --step {step}",
        ),
        Rule(
            "gradient_clipping",
            "Gradient clipping sets the step size",
            ("grad_clipped",),
            mean("grad_clipped"),
            0.5,
            f"share of updates whose gradient norm is clipped, {_MEAN}",
            "{max_grad_norm} sets the size of these updates, not the method; runs that are clipped in different shares are not comparable",
            "compare methods at equal update norms; raise {max_grad_norm} with a lower {lr}",
            "178 runs: it binds in at most 8 % of 40 updates of plain GRPO, in 70 to 90 % of those of the second study's treatment",
            NOTICE,
            window=WINDOW,
            known="after",
        ),
        Rule(
            "sampler_logp",
            "The sampler's log-probabilities cannot be right",
            ("sampler_impossible",),
            value("sampler_impossible"),
            1e-6,
            "share of loss tokens whose sampler log-probability is above 0, exactly 0, or the same as all others",
            "these log-probabilities cannot be right, and ratios made of them are not",
            "check what the server returns: log-probabilities of the drawn tokens, not 0 or a placeholder",
            "a definition",
            worse=(0.1, "critical"),
            look="tokens {run} --step {step} --by mismatch",
        ),
        Rule(
            "logp_mismatch",
            "Sampler and trainer disagree",
            ("mismatch",),
            mean("mismatch"),
            0.1,
            f"mean |ln π of the trainer − ln π of the sampler| in nats, {_MEAN}",
            "the sampler's log-probabilities are not those of the policy that is trained: other weights, precision, temperature or kernels",
            "check that weights are synchronized and the temperature is applied on both sides; correct the ratio ({correction})",
            "trl 6789: a standard deviation of 0.05 nats between vLLM and a healthy bfloat16 trainer, and of 0.055 between two batch sizes "
            "of one trainer",
            HARMFUL,
            window=WINDOW,
            worse=(0.5, "critical"),
            look="tokens {run} --step {step} --by mismatch",
        ),
        Rule(
            "mismatch_kl",
            "Sampler and trainer differ by KL",
            ("mismatch_kl",),
            mean("mismatch_kl"),
            0.02,
            f"KL between sampler and trainer in nats / token, {_MEAN}",
            "the sampler's log-probabilities are not those of the policy that is trained: other weights, precision, temperature or kernels",
            "check that weights are synchronized and the temperature is applied on both sides; correct the ratio ({correction})",
            "half the square of a standard deviation of 0.05 nats (trl 6789) is 0.00125",
            HARMFUL,
            window=WINDOW,
            worse=(0.2, "critical"),
            look="tokens {run} --step {step} --by mismatch",
        ),
        Rule(
            "sampler_ratio",
            "Many ratios of trainer to sampler are far from 1",
            ("sampler_outside",),
            mean("sampler_outside"),
            0.15,
            f"share of ratios π/μ of trainer to sampler outside [0.9, 1.1], {_MEAN}",
            "sampler and trainer disagree on many tokens; bfloat16 alone makes 0.08",
            "check dtypes, the sampler and its temperature, or correct the ratio ({correction})",
            "trl 6789: 0.075 in a healthy bfloat16 run, 0.08 between batches of 1 and of 8 without any sampler",
            HARMFUL,
            window=WINDOW,
            look="tokens {run} --step {step} --by mismatch",
        ),
        Rule(
            "ratio_tail",
            "A few ratios of trainer to sampler are very large",
            ("ratio_max", "ratio_min"),
            measures.ratio_tail,
            8,
            "factor between trainer and sampler at one token of the step",
            "single tokens are much more likely for one of them; as an importance weight such a ratio multiplies the token's gradient",
            "cap or mask the ratio ({correction})",
            "trl 6789: at most 1.9 (0.66 nats) in healthy bfloat16; prime-rl masks tokens beyond 8 by default",
            HARMFUL,
            look="tokens {run} --step {step} --by mismatch",
        ),
        Rule(
            "ratio_clipping",
            "Many tokens are at the ratio's bounds",
            ("clipped",),
            mean("clipped"),
            0.2,
            f"share of tokens, {_MEAN}",
            "updates of a batch go so far that the clip stops a large part of its tokens",
            "do fewer updates per batch, lower {lr}{lr_value}, or widen the bounds",
            "rldoctor: 0.2 of 0.1, 0.2 and 0.4; rlprobe: 0.3",
            HARMFUL,
            window=WINDOW,
            known="after",
            look="tokens {run} --step {step} --by ratio",
        ),
        Rule(
            "truncation",
            "Completions are cut",
            ("truncated",),
            mean("truncated"),
            0.3,
            f"share of completions, {_MEAN}",
            "completions are cut at {max_new_tokens} and scored as wrong whatever they were about to say, which can push the policy to be "
            "short or to give up",
            "raise {max_new_tokens}, or leave cut completions out of the loss",
            "121 healthy runs: at most 0.22; rldoctor warns from 0.15",
            HARMFUL,
            window=WINDOW,
            look="tokens {run} --step {step}",
        ),
        Rule(
            "length_growth",
            "Completions grow",
            ("length",),
            relative("length"),
            2,
            f"median length of {WINDOW} steps {_OF_EARLY}",
            "the loss or the reward pays for length (a mean over each completion's tokens punishes long wrong answers less)",
            "average the loss over all tokens, or penalize overlong completions",
            "121 healthy runs: at most 1.91 while they learn to use what they have; rldoctor's 1.5 and rlprobe's 1.4 apply in 60 % of them",
            MIXED,
            window=WINDOW,
            known="after",
            look="tokens {run} --step {step}",
        ),
        Rule(
            "entropy_collapse",
            "Entropy collapsed",
            ("entropy",),
            relative("entropy", 1),
            0.1,
            f"entropy {_OF_EARLY}",
            "the policy is nearly deterministic, so that completions of a group no longer differ and groups give no gradient",
            "raise the upper clip bound, add an entropy bonus or KL, lower {lr}{lr_value}, or use harder prompts",
            "rldoctor has the same floor; in 178 runs it never fell below 0.17 of its early value. An absolute floor misfires: 0.03 to "
            "0.2 nats are healthy in mathematics (rlwatch warns below 1.0)",
            HARMFUL,
            below=True,
            look="tokens {run} --step {step} --by entropy_change",
        ),
        Rule(
            "entropy_rise",
            "Entropy rises",
            ("entropy",),
            measures.entropy_rise,
            0.3,
            f"nats of entropy ({_MEAN}) above its lowest mean before, from 1.5 times that on",
            "unlikely tokens are pushed up or likely ones down: too large a learning rate, negative advantages on likely tokens, a k1 KL "
            "term as a loss with top-p sampling, or an entropy bonus that is too large",
            "lower {lr}{lr_value}; use the k3 estimator for KL",
            "121 healthy runs: at most 0.06 nats",
            HARMFUL,
            window=WINDOW,
            look="tokens {run} --step {step} --by entropy_change",
        ),
        Rule(
            "near_uniform",
            "Tokens are drawn from almost the whole vocabulary",
            ("near_uniform",),
            value("near_uniform"),
            0.2,
            "share of tokens with entropy above 0.9·ln V",
            "the policy produces noise at the sampling temperature",
            "compare greedy accuracy; lower {lr}{lr_value} or {temperature}",
            "178 runs: 14 % of plain GRPO's sampled tokens in the worst step, 36 % on average under the second study's treatment",
            NOTICE,
            look="tokens {run} --step {step} --by entropy",
        ),
        Rule(
            "kl_drift",
            "The policy drifts away from the reference",
            ("kl",),
            mean("kl"),
            0.5,
            f"KL to the reference in nats / token, {_MEAN}",
            "each step goes further than the KL term pulls back; where reward still rises it need not be a problem",
            "raise {kl} or lower {lr}{lr_value}",
            "rldoctor: 0.5 is worth a remark, 2 a warning",
            MIXED,
            window=WINDOW,
            known="after",
            look="tokens {run} --step {step} --by kl",
        ),
        Rule(
            "kl_sign",
            "The KL estimate changes sign",
            ("kl",),
            share("kl", lambda kl: kl < -1e-6),
            0.2,
            f"share of {WINDOW} steps whose estimate is negative, which a KL cannot be",
            "the k1 estimate (the mean log ratio) is logged or used as a loss; as a loss its gradient does not pull to the reference",
            "use the k3 estimator in the loss",
            "k3 is never negative; rounding is below 1e-6",
            MIXED,
            window=WINDOW,
            known="after",
            look="tokens {run} --step {step} --by kl",
        ),
        Rule(
            "reward_gap",
            "Reward rises while held-out accuracy falls",
            ("accuracy", "reward"),
            measures.reward_gap,
            0.15,
            "held-out accuracy (or reward) below its best, while the training reward is at least what it was then",
            "the reward pays for something else than the task: a loophole of the scorer, a part of the reward that outgrew the others, or "
            "prompts that are learned by heart",
            "read completions with a high reward that the evaluation calls wrong; repair the reward; {restart}",
            "rldoctor: a gap of 0.15 is a warning, 0.3 critical; the standard error of an accuracy over 100 prompts is 0.05",
            HARMFUL,
            worse=(0.3, "critical"),
            known="log",
            look="tokens {run} --step {step}",
        ),
        Rule(
            "reward_collapse",
            "Reward collapsed",
            ("reward",),
            measures.reward_fall,
            8,
            "standard errors by which the mean reward of the last 5 steps is below the best mean of 10 steps; 0 where that is "
            "less than 30 % of the range",
            "the policy left the region where it was good: usually after a few very large updates, a drift of entropy, or a reward that "
            "pays for something else; the order of events says which came first",
            "look at the tokens of the steps just before the fall; lower {lr}{lr_value} or repair what came first; {restart}",
            "121 healthy runs: at most 6.1; the best of many means lies above the typical one",
            FATAL,
            window=5,
            look="tokens {run} --step {step}",
        ),
        Rule(
            "reward_constant",
            "Reward does not vary",
            ("reward",),
            measures.constant_reward,
            0.8,
            f"share of {WINDOW} steps with exactly the same mean reward",
            "nothing can be learned, since every completion gets the same reward: the reward function fails, no answer is parsed, the "
            "task is far too hard or already solved, or the policy is dead",
            "score a few completions by hand; check the answer's format and {max_new_tokens}",
            "a definition; two steps in ten may differ",
            ("critical", "critical", "info"),
            window=WINDOW,
            look="tokens {run} --step {step}",
        ),
        Rule(
            "dead_groups",
            "Most groups give no gradient",
            ("dead_groups", "reward"),
            mean("dead_groups"),
            0.5,
            f"share of groups without an advantage, {_MEAN}",
            "the completions of these groups got equal rewards, so they carry no gradient: the prompts are too easy or too hard",
            "filter prompts by pass rate, draw again (dynamic sampling), raise {temperature} or {group_size}",
            "rldoctor: a warning from 0.5, critical from 0.75; rlprobe: 0.4. In 141 healthy runs of puzzles the largest mean of ten "
            "steps is 0.58 in the median and 0.76 at most: it is worth a remark from 0.5 and a warning from 0.8",
            ("warning", "info", "info"),
            worse=(0.8, "warning"),
            window=WINDOW,
        ),
        Rule(
            "zero_gradient",
            "The gradient is zero",
            ("grad_norm",),
            share("grad_norm", lambda norm: norm == 0),
            0.5,
            f"share of {WINDOW} steps whose gradient is exactly zero",
            "all groups have equal rewards, or the loss has no token; AdamW goes on moving the weights by its momentum",
            "stop: nothing is learned; look at the rewards of single completions; {restart}",
            "rldoctor: 0.4 of the steps is a warning, 0.7 critical",
            ("critical", "critical", "warning"),
            window=WINDOW,
            known="after",
        ),
        Rule(
            "drift",
            "The policy moves without a gradient",
            ("entropy", "grad_norm"),
            measures.drift,
            0.2,
            "change of entropy in nats since the last step with a gradient",
            "the policy moves by the optimizer's momentum alone: no completion earns a reward",
            "lower {lr}{lr_value}; {restart}",
            "121 healthy runs: at most 0.11, from other prompts alone",
        ),
        Rule(
            "no_motion",
            "The learning rate moves nothing",
            ("entropy", "reward", "length", "kl", "lr"),
            measures.standing_still,
            measures.FEW,
            "steps after which reward, entropy and length are where they began, with KL to the reference below 0.001 nats",
            "the updates are too small to see, or the optimizer does not train the weights that are sampled",
            "raise {lr}{lr_value} by 3 to 10 times; check that the sampler gets the new weights",
            "no trend at the 1 % level in any of them",
            NOTICE,
            window=0,
            known="log",
        ),
        Rule(
            "reward_plateau",
            "Reward did not move",
            ("reward",),
            measures.no_trend,
            0.05,
            "p-value of Kendall's test for a trend of the reward",
            "nothing was learned yet: too few steps, too small a learning rate, or groups without an advantage",
            "look at dead groups and at the update's size first",
            f"{measures.FEW} steps or more, and ends within three standard errors",
            REMARK,
            window=0,
            known="log",
        ),
        Rule(
            "temperature_gap",
            "Accuracy depends on the temperature",
            ("temperature_gap",),
            value("temperature_gap"),
            0.2,
            "|accuracy at T = 0 − at T = 1|",
            "accuracy depends on the temperature more than a method can change it",
            "compare methods by greedy accuracy",
            "differences between methods in the studies are below 0.1",
            NOTICE,
            known="evaluation",
        ),
        Rule(
            "weight_saturation",
            "Token weights are on one bound",
            ("saturation",),
            value("saturation"),
            0.95,
            "share of the gradient |c|/w·‖p − e_y‖",
            "this share of the gradient has token weights on one bound: the method is plain GRPO up to the gradient's scale",
            "calibrate over the gradient (method.weight.percentiles=gradient) or set other constants",
            "a definition up to 5 %",
            NOTICE,
        ),
        Rule(
            "clipped_weights",
            "Token weights alone are beyond the clip",
            ("clipped_weights",),
            value("clipped_weights"),
            0.1,
            "share of loss tokens",
            "these tokens have no gradient even at ratio 1: A > 0 and weight > 1 + method.clip.high, or A < 0 and weight < 1 − "
            "method.clip.low",
            "set method.weight_on=surrogate, or widen the clip",
            "a tenth of the tokens",
            NOTICE,
        ),
        Rule(
            "memory",
            "Memory is nearly full",
            ("memory",),
            value("memory"),
            0.92,
            "share of the memory in use",
            "memory is nearly full",
            "lower {microbatch}",
            "a margin of 8 %",
            NOTICE,
        ),
    )
}

OF_ROLLOUTS = (
    *("reward_collapse", "reward_constant", "entropy_collapse", "entropy_rise", "near_uniform", "drift"),
    *("dead_groups", "truncation", "length_growth"),
)
"""Rules that judge completions a policy drew and their rewards, which supervised training has not."""

_WORDS = ["lr", "max_new_tokens", "temperature", "group_size", "max_grad_norm", "microbatch", "correction", "kl"]
_VERL = "actor_rollout_ref.actor."


def _fields(*names: str) -> dict[str, str]:
    return dict(zip(_WORDS, names, strict=True))


FIELDS: Mapping[str, Mapping[str, str]] = {
    "sharpscope": _fields(
        "optimizer.lr", "rollout.max_new_tokens", "rollout.temperature", "rollout.group_size", "optimizer.max_grad_norm",
        "update.microbatch_tokens", "method.correction", "method.kl.coef",
    ),
    "trl": _fields(
        "learning_rate", "max_completion_length", "temperature", "num_generations", "max_grad_norm",
        "per_device_train_batch_size", "vllm_importance_sampling_correction", "beta",
    ),
    "verl": _fields(
        f"{_VERL}optim.lr", "data.max_response_length", "actor_rollout_ref.rollout.temperature", "actor_rollout_ref.rollout.n",
        f"{_VERL}grad_clip", f"{_VERL}ppo_max_token_len_per_gpu", "algorithm.rollout_correction", f"{_VERL}kl_loss_coef",
    ),
    "": _fields(
        "the learning rate", "the length limit", "the temperature", "the group size", "the bound of the gradient norm",
        "the batch of a forward pass", "truncated importance sampling", "the KL coefficient",
    ),
}  # fmt: skip
"""What trainers call the settings that advice names; "": in words."""
