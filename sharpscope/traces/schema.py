"""The schema of a trace: tables, columns with type, unit and definition, and the Arrow schemas made from them.

The writer, the reader, `sharpscope schema` and the Parquet field metadata all use these definitions. "Mean over tokens"
is over all loss tokens of the step. Probabilities are softmax(z / T) at the sampling temperature T, before top-p and
top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pyarrow as pa

SCHEMA_VERSION = 3
"""Increases when tables or columns are added, renamed, removed or change their meaning.

- 2: sharpscope 0.2.
- 3: sharpscope 0.3. New columns (`probes.ceiling` and others) and the table `uses`; null or empty in runs of version 2.
"""

READABLE_VERSIONS = (1, 2, 3)
"""Versions that readers accept."""

MAX_SATURATION = 0.3
"""Largest `probes.saturation` at which a perturbation estimate still measures sharpness; larger ones enter no verdict."""

VERSION_KEY = b"sharpscope.schema_version"

ARROW_TYPES: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "json": pa.string(),
}
"""Storage type of each `Column.type`. "json" is a string that holds one JSON object."""

ONE = "1"  # dimensionless
NATS = "nats"
NORM = "L2 norm over the trainable parameters"
LOGIT_NORM = "L2 norm over logits"
DEGREES = "degrees"


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: column name.
        type: a key of `ARROW_TYPES`.
        unit: unit of the values; "1" if dimensionless.
        definition: what a value means.
        nullable: whether values may be null (not recorded, or undefined in that row).
        probe: whether the column is recorded only if a probe or an option asks for it. The writer fills an omitted
            column with nulls.
        timing: whether values differ between two runs of one config.
    """

    name: str
    type: str
    unit: str
    definition: str
    nullable: bool = False
    probe: bool = False
    timing: bool = False


@dataclass(frozen=True)
class Table:
    """A table: what one row is, the columns that identify a row (`key`), and all columns in file order."""

    name: str
    row: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        """Column names in file order."""
        return [column.name for column in self.columns]

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)


def _required(name: str, type_: str, unit: str, definition: str) -> Column:
    return Column(name, type_, unit, definition)


def _nullable(name: str, type_: str, unit: str, definition: str) -> Column:
    return Column(name, type_, unit, definition, nullable=True)


def _probe(name: str, type_: str, unit: str, definition: str) -> Column:
    return Column(name, type_, unit, definition, nullable=True, probe=True)


def _timing(name: str, definition: str) -> Column:
    return Column(name, "float64", "seconds", definition, nullable=True, timing=True)


def _carried(suffix: str, mass: str, kind: Callable[[str, str, str, str], Column]) -> tuple[Column, ...]:
    """Weight statistics in which a token counts with the gradient that it carries before its weight, `mass`."""
    return tuple(
        kind(f"weight_{name}_{suffix}", "float64", ONE, f"{meaning}, tokens counted with m = {mass}")
        for name, meaning in (
            ("mean", "mean token weight"),
            ("std", "standard deviation of the token weights"),
            ("saturation_low", "fraction of the gradient at the weights' lower bound; null if unbounded"),
            ("saturation_high", "fraction of the gradient at the weights' upper bound; null if unbounded"),
            ("ess", "(sum m w)^2 / (sum m * sum m w^2), in (0, 1]"),
        )
    )


def _rotations(prefix: str = "") -> tuple[Column, ...]:
    """An update compared with that of the reference objective."""
    return tuple(
        _probe(name, "float64", unit, prefix + meaning)
        for name, unit, meaning in (
            (
                "gradient_rotation",
                DEGREES,
                "the angle between the gradient that the optimizer gets, before clipping, and that of the reference objective "
                "on the same rollouts and weights: all token weights 1 and no mask; plain GRPO for methods that differ from "
                "it by advantages, ratio, clip or aggregation",
            ),
            ("gradient_scale", ONE, "the ratio of these gradients' norms"),
            (
                "update_rotation",
                DEGREES,
                "the angle between the optimizer's step and the step that it would make from the same state with the "
                "reference objective's gradient",
            ),
            ("update_scale", ONE, "the ratio of these steps' norms"),
            (
                "noise_rotation",
                DEGREES,
                "the estimated angle between the reference gradient g and its expectation, "
                "arccos(sqrt(max(0, <g_A, g_B>) / (f (1 - f) ||g||^2))) with g = g_A + g_B over two parts of the prompts, "
                "shares f and 1 - f; 90 if <g_A, g_B> <= 0, null for one prompt",
            ),
        )
    )


_STEP = _required(
    "step", "int32", "steps", "training step (one round of rollouts and its updates), from 1; 0 is before training"
)

STEPS = Table(
    "steps",
    "a step",
    ("step",),
    (
        _STEP,
        _nullable("updates", "int32", "updates", "optimizer updates in this step"),
        _nullable("reward_mean", "float64", "reward", "mean reward over the step's completions; null without rewards"),
        _nullable(
            "reward_std", "float64", "reward", "standard deviation (n - 1) of the rewards over the step's completions"
        ),
        _nullable("accuracy", "float64", ONE, "fraction of the step's completions that are correct"),
        _nullable("loss", "float64", ONE, "mean over the updates of the minimized loss; null without an update"),
        _nullable(
            "kl",
            "float64",
            NATS,
            "mean k3 estimate per token use of KL(policy || reference); null without a reference or an update",
        ),
        _probe(
            "accuracy_completed", "float64", ONE, "accuracy among the completions that ended before the length limit"
        ),
        _probe(
            "kl_step",
            "float64",
            NATS,
            "mean over tokens of the k3 estimate of KL(pi_old || pi) over the whole step: pi after its last update, pi_old before "
            "its first, on a part of its completions",
        ),
        _nullable("entropy_mean", "float64", NATS, "mean over tokens of the policy's entropy at the start of the step"),
        _nullable("grad_norm", "float64", NORM, "mean over the updates of the gradient norm before clipping"),
        _probe("grad_clipped", "float64", ONE, "fraction of the updates in which the gradient norm was clipped"),
        _nullable(
            "update_norm",
            "float64",
            NORM,
            "mean over the updates of the norm of the parameter change, including weight decay",
        ),
        _nullable(
            "clip_fraction_low",
            "float64",
            ONE,
            "fraction of token uses, over all updates, clipped at the lower ratio bound; null without an update",
        ),
        _nullable(
            "clip_fraction_high",
            "float64",
            ONE,
            "fraction of token uses, over all updates, clipped at the upper ratio bound; null without an update",
        ),
        _nullable("weight_mean", "float64", ONE, "mean token weight"),
        _nullable("weight_std", "float64", ONE, "standard deviation (n) of the token weights"),
        _nullable("weight_min", "float64", ONE, "smallest token weight"),
        _nullable("weight_max", "float64", ONE, "largest token weight"),
        _nullable(
            "weight_saturation_low", "float64", ONE, "fraction of token weights at their lower bound; null if unbounded"
        ),
        _nullable(
            "weight_saturation_high",
            "float64",
            ONE,
            "fraction of token weights at their upper bound; null if unbounded",
        ),
        _nullable(
            "weight_ess",
            "float64",
            ONE,
            "relative effective sample size of the token weights, (sum w)^2 / (n * sum w^2), in (0, 1]",
        ),
        *_carried("gradient", "|c| / w * ||p - e_y||", _nullable),
        *_carried("local", "|c| / w * score_norm_local", _probe),
        *_rotations("mean over the updates of "),
        _nullable(
            "zero_std_groups",
            "int32",
            "groups",
            "number of groups whose rewards are all equal; advantages relative to the group are zero in them",
        ),
        _nullable("completion_length_mean", "float64", "tokens", "mean completion length"),
        _nullable("truncated_fraction", "float64", ONE, "fraction of completions truncated at the length limit"),
        _nullable("tokens", "int64", "tokens", "number of loss tokens in the step"),
        _nullable(
            "generated_tokens",
            "int64",
            "tokens",
            "tokens that the policy generated for the step, those of redrawn groups included; null in version 1",
        ),
        _nullable(
            "redrawn_groups",
            "int32",
            "groups",
            "groups that dynamic sampling replaced because all answers were correct or all wrong, over all attempts; 0 "
            "without dynamic sampling; null in version 1 and where another trainer drew the completions",
        ),
        _nullable("lr", "float64", "1 / update", "learning rate of the step's last update; null without an update"),
        _probe(
            "scheduled",
            "string",
            "name",
            "what recording.budget chose to measure in the step, separated by spaces: shares, norms, rotation, influence, surface; "
            "null without a budget or if all intervals are set",
        ),
        _timing("generation_s", "time spent generating and scoring"),
        _timing("training_s", "time spent in forward passes, backward passes and the optimizer"),
        _timing("recording_s", "time spent on probes and traces"),
    ),
)

UPDATES = Table(
    "updates",
    "an optimizer step",
    ("step", "update"),
    (
        _STEP,
        _required("update", "int32", ONE, "index of the update in its step, from 0"),
        _required(
            "skipped",
            "bool",
            "true / false",
            "whether the gradient was computed but not applied (a health rule, or a value that is not finite)",
        ),
        _nullable("loss", "float64", ONE, "the minimized loss before the update"),
        _nullable("grad_norm", "float64", NORM, "norm of the gradient that the optimizer gets, before clipping"),
        _nullable(
            "clip_factor",
            "float64",
            ONE,
            "factor in (0, 1] by which gradient clipping scaled the gradient; 0 if skipped",
        ),
        _nullable("update_norm", "float64", NORM, "norm of the parameter change, including weight decay; 0 if skipped"),
        _nullable("lr", "float64", "1 / update", "learning rate"),
        _nullable("tokens", "int64", "tokens", "loss tokens that the update uses"),
        _nullable(
            "kl_old_k1",
            "float64",
            NATS,
            "estimate k1 of KL(pi_old || pi) before the update: mean over its tokens of -ln r, r = pi / pi_old of the token, "
            "pi_old the policy at the start of the step",
        ),
        _nullable(
            "kl_old_k3", "float64", NATS, "estimate k3 of the same: mean over its tokens of r - 1 - ln r, not negative"
        ),
        _nullable(
            "ratio_mean", "float64", ONE, "mean over its tokens of the importance ratio, as defined by the method"
        ),
        _nullable("ratio_min", "float64", ONE, "smallest importance ratio"),
        _nullable("ratio_p01", "float64", ONE, "1st percentile of the importance ratio, linearly interpolated"),
        _nullable("ratio_p99", "float64", ONE, "99th percentile of the importance ratio, linearly interpolated"),
        _nullable("ratio_max", "float64", ONE, "largest importance ratio"),
        _nullable("clip_fraction_low", "float64", ONE, "fraction of its tokens clipped at the lower ratio bound"),
        _nullable("clip_fraction_high", "float64", ONE, "fraction of its tokens clipped at the upper ratio bound"),
        _nullable(
            "entropy",
            "float64",
            NATS,
            "mean over its tokens of the policy's entropy before the update; null without an entropy bonus",
        ),
        _nullable(
            "entropy_coef",
            "float64",
            ONE,
            "coefficient of the entropy bonus in this update, 0 while an adaptive one is off; null without a bonus",
        ),
        *_rotations(),
    ),
)

_ROLLOUT = _required(
    "rollout", "int32", ONE, "index of the completion in its step, from 0; rows of a group are adjacent"
)

ROLLOUTS = Table(
    "rollouts",
    "a completion",
    ("step", "rollout"),
    (
        _STEP,
        _ROLLOUT,
        _nullable(
            "group", "int32", ONE, "index of the prompt in its step, from 0; the completions of one prompt are a group"
        ),
        _nullable("prompt", "string", "text", "the task's prompt, before the chat template"),
        _nullable("completion", "string", "text", "generated text without special tokens"),
        _nullable("reward", "float64", "reward", "total reward"),
        _nullable(
            "reward_parts",
            "json",
            "reward",
            "components of the reward: a JSON object name -> number (null if not finite)",
        ),
        _nullable("correct", "bool", "true / false", "whether the task scores the answer as correct"),
        _nullable(
            "advantage",
            "float64",
            ONE,
            "advantage before per-token factors; the mean over the tokens if each has its own",
        ),
        _nullable("length", "int32", "tokens", "number of completion tokens in the loss"),
        _nullable("truncated", "bool", "true / false", "whether the completion was truncated at the length limit"),
        _probe(
            "token_ids",
            "string",
            ONE,
            "token IDs of prompt and completion, those outside the loss included, as a JSON list; recorded by importers",
        ),
        _probe("prompt_tokens", "int32", "tokens", "how many of token_ids are the prompt"),
    ),
)

TOKENS = Table(
    "tokens",
    "a generated token",
    ("step", "rollout", "position"),
    (
        _STEP,
        _ROLLOUT,
        _required("position", "int32", "tokens", "index of the token in its completion, from 0"),
        _nullable(
            "update",
            "int32",
            ONE,
            "index of the first update in the step that uses the token, from 0; ratio, clipped, loss_coef and values "
            "derived from them refer to it. If the updates were skipped (see steps.updates), the update that would "
            "have used it. Null if there is none",
        ),
        _required("token_id", "int32", ONE, "token ID of the tokenizer"),
        _required("logp", "float32", NATS, "log-probability ln pi under the policy at the start of the step"),
        _nullable(
            "behavior_logp", "float32", NATS, "log-probability under the sampling policy, before top-p and top-k"
        ),
        _probe(
            "sampler_logp",
            "float32",
            NATS,
            "log-probability under the sampling policy, after top-p and top-k; null if neither is used",
        ),
        _nullable("logit", "float32", ONE, "logit z of the token, not divided by the temperature"),
        _nullable("entropy", "float32", NATS, "entropy of the next-token distribution"),
        _nullable("collision", "float32", ONE, "sum of squared probabilities of the next-token distribution"),
        _nullable(
            "polarity",
            "float32",
            NATS,
            "entropy polarity p(ln p + H) - sum_j p_j^2 (ln p_j + H); a gradient step of size eta on "
            "this token's logits with advantage A changes its entropy by -eta * A * polarity",
        ),
        _nullable(
            "advantage",
            "float32",
            ONE,
            "advantage of the token or of its completion; per-token factors (AR, PAPO, covariance) are part of weight",
        ),
        _nullable("ratio", "float32", ONE, "importance ratio pi / pi_old in that update, as defined by the method"),
        _nullable("weight", "float32", ONE, "token weight w of the method, detached"),
        _probe(
            "correction",
            "float32",
            ONE,
            "factor of the surrogate for the difference between the sampler's policy and pi_old; null without a correction",
        ),
        _nullable(
            "clipped",
            "int8",
            ONE,
            "ratio bound that is active: -1 lower, 1 upper, 0 none. A PPO clip gives such a token no gradient, CISPO a "
            "bounded one",
        ),
        _nullable(
            "loss_coef",
            "float32",
            ONE,
            "c = dLoss / dln pi in that update; includes advantage, weight, clipping, KL and normalizer",
        ),
        _nullable(
            "logit_grad_norm",
            "float32",
            LOGIT_NORM,
            "norm of the gradient of -ln pi with respect to the logits, ||p - e_y||",
        ),
        _nullable(
            "head_grad_norm",
            "float32",
            "L2 norm over the output layer",
            "norm of the gradient of ln pi with respect to the output layer",
        ),
        _probe(
            "inclusion_probability",
            "float32",
            ONE,
            "probability that the token's group is in the random sample of its update's groups whose tokens are measured, 1 if "
            "all are; its inverse weights sums of score_norm_local, attribution, update_attribution and heldout_influence over "
            "tokens; null where they were not measured and in version 1, which measured all groups",
        ),
        _probe("score_norm_local", "float32", NORM, "norm of grad ln pi without the terms through other positions"),
        _probe(
            "score_norm",
            "float32",
            NORM,
            "norm of grad ln pi over all trainable parameters; NaN if an unbiased estimate of its square is negative",
        ),
        _probe("score_norm_std_error", "float32", NORM, "standard error of score_norm (first order); 0 if exact"),
        _probe(
            "draw_probability",
            "float32",
            ONE,
            "probability of selecting the token for the exact tier: inclusion_probability for the largest local norms of the sample, "
            "less for tokens drawn at random from it; its inverse weights a mean of score_norm over all tokens",
        ),
        _probe("score_norm_method", "string", "name", "how score_norm was computed: exact | sketch"),
        _probe(
            "attribution",
            "float32",
            ONE,
            "c <grad ln pi, grad L> / ||grad L||^2: signed fraction of the squared gradient norm, before a sharpness "
            "method changes the gradient",
        ),
        _probe(
            "update_attribution",
            "float32",
            ONE,
            "the same along D^-1 dtheta: signed fraction of the optimizer's squared update",
        ),
        _probe(
            "heldout_influence",
            "float32",
            NATS,
            "c <grad ln pi, grad L_heldout>: first-order decrease of the held-out loss per unit of learning rate",
        ),
        _probe(
            "sharp_alignment",
            "float32",
            ONE,
            "fraction of ||c grad ln pi||^2 in the span of the top Hessian eigenvectors",
        ),
    ),
)

USES = Table(
    "uses",
    "a further use of a token, by an update after the one in `tokens`",
    ("step", "rollout", "position", "update"),
    (
        _STEP,
        _ROLLOUT,
        _required("position", "int32", "tokens", "index of the token in its completion, from 0"),
        _required("update", "int32", ONE, "index in the step of the update that used the token again (PPO epochs)"),
        _nullable("ratio", "float32", ONE, "importance ratio pi / pi_old in that update, as defined by the method"),
        _nullable("clipped", "int8", ONE, "ratio bound that is active in that update: -1 lower, 1 upper, 0 none"),
        _nullable("loss_coef", "float32", ONE, "c = dLoss / dln pi in that update"),
    ),
)

PROBES = Table(
    "probes",
    "one estimate",
    ("step", "probe", "probe_set", "functional", "parameters", "quantity", "rho", "seed"),
    (
        _STEP,
        _required("probe", "string", "name", "probe that made the estimate"),
        _required("probe_set", "string", "name", "fixed set of prompts the probe evaluates"),
        _required("functional", "string", "name", "differentiated scalar: nll | surrogate | expected_failure | ..."),
        _required("parameters", "string", "name", "parameter group"),
        _required("quantity", "string", "name", "estimated quantity"),
        _nullable("value", "float64", "the quantity's", "estimate; null if it could not be computed"),
        _nullable(
            "std_error", "float64", "the quantity's", "standard error of the estimate; null if the method has none"
        ),
        _nullable(
            "samples",
            "int64",
            ONE,
            "number of random vectors, perturbations or iterations; a trace's interval is Student's t with samples - 1 "
            "degrees of freedom",
        ),
        _nullable("rho", "float64", NORM, "perturbation radius, or node of a spectral density; null otherwise"),
        _nullable(
            "converged", "bool", "true / false", "whether the iteration met its tolerance; null if not iterative"
        ),
        _nullable("residual", "float64", "the quantity's", "residual of the iteration; null if not iterative"),
        _nullable("seed", "int64", ONE, "seed of the estimate's random generator"),
        _probe(
            "ceiling",
            "float64",
            "the quantity's",
            "largest rise that the functional allows on these prompts, 1 - loss for expected_failure; null if unbounded (nll)",
        ),
        _probe(
            "saturation", "float64", ONE, f"rise / ceiling; above {MAX_SATURATION} an estimate measures the ceiling"
        ),
        _timing("seconds", "time spent"),
        _probe("prompts", "int32", "prompts", "number of prompts in the probed loss"),
        _probe(
            "prompt_std_error",
            "float64",
            "the quantity's",
            "standard error over prompts, as if they were a random sample and perturbations, eigenvectors, the update and completions "
            "were fixed (first order); that of the values in probe_prompts, which loss slices and an update's critical sharpness do not "
            "have. Null where it is not defined (densities, ratios, first-order terms, Gauss-Newton) or the loss is not known by prompt",
        ),
    ),
)

PROBE_PROMPTS = Table(
    "probe_prompts",
    "one prompt's part of an estimate in probes",
    ("step", "probe_set", "functional", "parameters", "quantity", "rho", "seed", "prompt"),
    (
        _STEP,
        _required("probe_set", "string", "name", "fixed set of prompts the probe evaluates"),
        _required("functional", "string", "name", "differentiated scalar: nll | surrogate | expected_failure | ..."),
        _required("parameters", "string", "name", "parameter group"),
        _required("quantity", "string", "name", "estimated quantity"),
        _nullable("rho", "float64", NORM, "perturbation radius; null otherwise"),
        _nullable("seed", "int64", ONE, "seed of the estimate's random generator"),
        _required(
            "prompt",
            "int32",
            ONE,
            "index of the prompt in the probed loss, from 0; the same prompt in every step and run",
        ),
        _required(
            "value",
            "float64",
            "the quantity's",
            "value whose mean over the prompts is the estimate; prompts with more tokens or completions weigh more: "
            "V + k (s_i - w_i V) for the estimate V, the prompt's part s_i of it and its weight w_i",
        ),
    ),
)

EVAL = Table(
    "eval",
    "an evaluation",
    ("step", "task", "split", "level", "temperature", "k"),
    (
        _STEP,
        _required("task", "string", "name", "task name"),
        _required("split", "string", "name", "train | heldout | unseen | ..."),
        _required(
            "level",
            "string",
            "name",
            "number of people, difficulty or number of hops, as text; 'all' pools the split's levels",
        ),
        _required("n", "int32", "prompts", "prompts evaluated"),
        _required("k", "int32", "completions", "completions sampled per prompt"),
        _required("accuracy", "float64", ONE, "fraction of correct completions"),
        _nullable("std_error", "float64", ONE, "standard error of the accuracy, clustered by prompt"),
        _nullable("pass_at_k", "float64", ONE, "fraction of prompts with at least one correct completion among k"),
        _probe("pass_std_error", "float64", ONE, "standard error of pass_at_k over the prompts"),
        _probe("truncated", "float64", ONE, "fraction of completions truncated at the length limit"),
        _probe(
            "accuracy_completed", "float64", ONE, "accuracy among the completions that ended before the length limit"
        ),
        _nullable("reward_mean", "float64", "reward", "mean reward over the completions"),
        _nullable(
            "heldout_loss",
            "float64",
            "nats / token",
            "mean -ln pi at the training temperature of the correct answers for this split and level in the run's "
            "probe set; null if there are none",
        ),
        _required("temperature", "float64", ONE, "sampling temperature; 0 is greedy decoding"),
    ),
)

EVENTS = Table(
    "events",
    "a warning or a change in the run",
    ("step", "rule"),
    (
        _STEP,
        _required("rule", "string", "name", "rule that raised the event"),
        _required("severity", "string", "name", "info | warning | error"),
        _nullable("value", "float64", "the rule's", "measured value"),
        _nullable("threshold", "float64", "the rule's", "threshold of the rule"),
        _required("action", "string", "name", "action taken: none | warn | left out | skip_step | stop | ..."),
        _required("message", "string", "text", "one-line explanation"),
    ),
)

FORKS = Table(
    "forks",
    "one outcome of one arm of a counterfactual update",
    ("fork", "step", "batch", "arm", "comparison", "outcome"),
    (
        _required("step", "int32", "steps", "step of the state that all arms start from; 0 is before training"),
        _required("fork", "string", "name", "hash of the settings, which run.json lists under this name"),
        _required("batch", "int32", ONE, "index of the batch of rollouts, from 0; all arms learn from the same batch"),
        _required("arm", "string", "name", "method that made the update, with its changed fields"),
        _required("reference", "string", "name", "arm that differences and matched comparisons refer to"),
        _required("updates", "int32", "steps", "steps that the arm made from the state, each with its own rollouts"),
        _required(
            "comparison",
            "string",
            "name",
            "step: the optimizer's step as it is; norm: scaled to the reference's norm; kl: scaled to the reference's KL",
        ),
        _required("outcome", "string", "name", "measured quantity"),
        _nullable("value", "float64", "the outcome's", "value after the update; null if it could not be measured"),
        _nullable("start", "float64", "the outcome's", "value before the update; null for quantities of the update"),
        _nullable(
            "predicted",
            "float64",
            "the outcome's",
            "first-order prediction of value - start: the outcome's gradient times the change of the weights",
        ),
        _nullable(
            "std_error",
            "float64",
            "the outcome's",
            "standard error of value - start over the prompts of this batch's fixed rollouts; null if not estimated",
        ),
        _nullable(
            "effective_share",
            "float64",
            ONE,
            "effective sample size of the importance weights, (sum w)^2 / sum w^2, as a share of the samples; null if "
            "the outcome uses none",
        ),
        _nullable(
            "valid",
            "bool",
            "true / false",
            "whether the effective share reaches its threshold and a matched comparison found its scale; an analysis "
            "leaves out other rows",
        ),
        _required("scale", "float64", ONE, "factor by which the arm's change of the weights was multiplied"),
        _timing("seconds", "time spent on this arm, batch and comparison; the same in all of their outcomes"),
    ),
)

TABLES: dict[str, Table] = {
    table.name: table for table in (STEPS, UPDATES, ROLLOUTS, TOKENS, USES, PROBES, PROBE_PROMPTS, EVAL, EVENTS, FORKS)
}


@cache
def arrow_schema(table: str) -> pa.Schema:
    """Arrow schema of a table, with unit and definition in each field's metadata and the version in the schema's."""
    fields = [
        pa.field(c.name, ARROW_TYPES[c.type], c.nullable, metadata={"unit": c.unit, "definition": c.definition})
        for c in TABLES[table].columns
    ]
    return pa.schema(fields, metadata={VERSION_KEY: str(SCHEMA_VERSION)})


def timing_columns(table: str) -> list[str]:
    """Columns that differ between two runs of one config on one machine."""
    return [column.name for column in TABLES[table].columns if column.timing]


def schema_rows(table: str) -> list[tuple[str, str, str, str, str]]:
    """(name, type, unit, when recorded, definition) of every column of `table`."""
    return [
        (c.name, c.type, c.unit, "with a probe" if c.probe else "or null" if c.nullable else "", c.definition)
        for c in TABLES[table].columns
    ]


def schema_markdown(tables: list[str] | None = None) -> str:
    """The schema as Markdown, one section per table.

    Args:
        tables: names of the tables to include; None includes all.

    Raises:
        KeyError: if a table does not exist.
    """
    lines = [
        f"# Trace schema, version {SCHEMA_VERSION}",
        "",
        "`runs/<name>/traces/<table>/part-*.parquet`. 'or null': the value may be missing. 'with a probe': null",
        "unless a probe or an option records it. Columns in seconds differ between two runs of one config.",
    ]
    for name in tables or TABLES:
        table = TABLES[name]
        lines += ["", f"## {name}", "", f"A row is {table.row}, identified by {', '.join(table.key)}.", ""]
        lines += ["| column | type | unit | recorded | definition |", "|---|---|---|---|---|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in schema_rows(name)]
    return "\n".join(lines) + "\n"
