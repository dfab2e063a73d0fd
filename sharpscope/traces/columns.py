"""Every table and column of a trace, with type, unit and definition: the one place where a name gets its meaning.

Writer, reader, `sharpscope schema` and the Parquet field metadata all take them from here. "Mean over tokens" is over
all loss tokens of the step. Probabilities belong to softmax(z / T) at the sampling temperature T, before top-p and
top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

ONE = "1"  # a pure number
NATS = "nats"
NORM = "L2 norm over the trainable parameters"
LOGIT_NORM = "L2 norm over logits"


@dataclass(frozen=True)
class Column:
    """One column: `type` is one of schema.ARROW_TYPES, `unit` is "1" for a pure number.

    `nullable`: values may be null (not recorded, or undefined in that row). `probe`: filled only when a probe or an
    option asks for it, so that a writer may leave the column out; it is in the file all the same, as nulls. `timing`:
    differs between two runs of one config.
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
    """A table: what one row is, its columns in order, and the columns that together name a row."""

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


def _always(name: str, type_: str, unit: str, definition: str) -> Column:
    return Column(name, type_, unit, definition)


def _maybe(name: str, type_: str, unit: str, definition: str) -> Column:
    return Column(name, type_, unit, definition, nullable=True)


def _probe(name: str, type_: str, unit: str, definition: str) -> Column:
    return Column(name, type_, unit, definition, nullable=True, probe=True)


def _timing(name: str, definition: str) -> Column:
    return Column(name, "float64", "seconds", definition, timing=True)


_STEP = _always("step", "int32", "steps", "round of rollouts and what is learnt from it, from 1; 0 is before training")

STEPS = Table(
    "steps",
    "a step",
    ("step",),
    (
        _STEP,
        _always("updates", "int32", "updates", "optimizer updates made in this step"),
        _always("reward_mean", "float64", "reward", "mean reward over the step's completions"),
        _maybe("reward_std", "float64", "reward", "standard deviation (n - 1) of the completions' rewards"),
        _always("accuracy", "float64", ONE, "share of the step's completions that are correct"),
        _maybe("loss", "float64", ONE, "mean over the updates of the loss that was minimised; null without an update"),
        _maybe(
            "kl",
            "float64",
            NATS,
            "mean k3 estimate per token use of KL(policy || reference); null without a reference or an update",
        ),
        _maybe("entropy_mean", "float64", NATS, "mean over tokens of the policy's entropy at the start of the step"),
        _maybe("grad_norm", "float64", NORM, "mean over the updates of the gradient's norm before clipping"),
        _maybe(
            "update_norm",
            "float64",
            NORM,
            "mean over the updates of the norm of the change of the parameters, decay included",
        ),
        _maybe(
            "clip_fraction_low",
            "float64",
            ONE,
            "share of token uses, over all updates, whose gradient the lower ratio bound cut; null without an update",
        ),
        _maybe(
            "clip_fraction_high",
            "float64",
            ONE,
            "share of token uses, over all updates, whose gradient the upper ratio bound cut; null without an update",
        ),
        _maybe("weight_mean", "float64", ONE, "mean token weight"),
        _maybe("weight_std", "float64", ONE, "standard deviation (n) of the token weights"),
        _maybe("weight_min", "float64", ONE, "smallest token weight"),
        _maybe("weight_max", "float64", ONE, "largest token weight"),
        _maybe(
            "weight_saturation_low", "float64", ONE, "share of weights on the shaping's lower bound; null if unbounded"
        ),
        _maybe(
            "weight_saturation_high", "float64", ONE, "share of weights on the shaping's upper bound; null if unbounded"
        ),
        _maybe(
            "weight_ess", "float64", ONE, "effective sample size of the weights, (sum w)^2 / (n * sum w^2), in (0, 1]"
        ),
        _always(
            "zero_std_groups",
            "int32",
            "groups",
            "number of groups whose rewards are all equal, so that no token learns",
        ),
        _always("completion_length_mean", "float64", "tokens", "mean number of tokens in a completion"),
        _always("truncated_fraction", "float64", ONE, "share of completions cut at the length limit"),
        _always("tokens", "int64", "tokens", "loss tokens of the step"),
        _maybe("lr", "float64", "1 / update", "learning rate of the step's last update; null without an update"),
        _timing("generation_s", "time spent generating and scoring"),
        _timing("training_s", "time spent in forward, backward and optimizer"),
        _timing("recording_s", "time spent on probes and traces"),
    ),
)

_ROLLOUT = _always(
    "rollout", "int32", ONE, "number of the completion in its step, from 0; rows of a group are adjacent"
)

ROLLOUTS = Table(
    "rollouts",
    "a completion",
    ("step", "rollout"),
    (
        _STEP,
        _ROLLOUT,
        _always(
            "group", "int32", ONE, "number of the prompt in its step, from 0: completions of one prompt are one group"
        ),
        _always("prompt", "string", "text", "the task's prompt, before a chat template"),
        _always("completion", "string", "text", "what it answered, special tokens left out"),
        _always("reward", "float64", "reward", "total reward"),
        _always(
            "reward_parts", "json", "reward", "the total's parts: a JSON object name -> number (null if not finite)"
        ),
        _always("correct", "bool", "true / false", "whether the task calls the answer correct"),
        _always("advantage", "float64", ONE, "group-normalised advantage, before any per-token factor"),
        _always("length", "int32", "tokens", "completion tokens that count in the loss"),
        _always("truncated", "bool", "true / false", "whether the completion was cut at the length limit"),
    ),
)

TOKENS = Table(
    "tokens",
    "a generated token",
    ("step", "rollout", "position"),
    (
        _STEP,
        _ROLLOUT,
        _always("position", "int32", "tokens", "index of the token in its completion, from 0"),
        _maybe(
            "update",
            "int32",
            ONE,
            "first update of the step that used the token, from 0, to which ratio, "
            "clipped, loss_coef and what derives from them belong; the update that would have used it where the step's "
            "updates were left out (see steps.updates); null if none did or would have",
        ),
        _always("token_id", "int32", ONE, "the tokenizer's number of the token"),
        _always("logp", "float32", NATS, "log-probability ln pi under the policy at the start of the step"),
        _maybe("behavior_logp", "float32", NATS, "log-probability under the policy that drew it, before top-p, top-k"),
        _maybe("logit", "float32", ONE, "raw logit z of the token, not divided by the temperature"),
        _maybe("entropy", "float32", NATS, "entropy of the next-token distribution"),
        _maybe("collision", "float32", ONE, "sum of squared probabilities of the next-token distribution"),
        _maybe(
            "polarity",
            "float32",
            NATS,
            "entropy polarity p(ln p + H) - sum_j p_j^2 (ln p_j + H): a step eta on "
            "this token's logits with advantage A changes its entropy by -eta * A * polarity",
        ),
        _maybe(
            "advantage",
            "float32",
            ONE,
            "group advantage of the token's completion; per-token factors of a method (AR, PAPO, covariance) are in "
            "weight",
        ),
        _maybe("ratio", "float32", ONE, "importance ratio pi / pi_old in that update, as the method defines it"),
        _maybe("weight", "float32", ONE, "the method's token weight w, without gradient"),
        _maybe(
            "clipped",
            "int8",
            ONE,
            "the ratio's bound that acts, -1 lower, 1 upper, 0 none: there a PPO clip leaves no gradient, CISPO a "
            "bounded one",
        ),
        _maybe(
            "loss_coef",
            "float32",
            ONE,
            "c = dLoss / dln pi in that update: holds advantage, weight, clip, KL and normaliser",
        ),
        _maybe("logit_grad_norm", "float32", LOGIT_NORM, "norm of the gradient of -ln pi by the logits, ||p - e_y||"),
        _maybe(
            "head_grad_norm",
            "float32",
            "L2 norm over the output layer",
            "norm of the gradient of ln pi by the output layer",
        ),
        _probe("score_norm_local", "float32", NORM, "norm of grad ln pi, credit through other positions left out"),
        _probe(
            "score_norm",
            "float32",
            NORM,
            "norm of grad ln pi over all trainable parameters; NaN where an "
            "unbiased estimate of its square is negative",
        ),
        _probe("score_norm_std_error", "float32", NORM, "standard error of score_norm (first order); 0 if exact"),
        _probe(
            "draw_probability",
            "float32",
            ONE,
            "probability with which the token was chosen for the exact tier: 1 for the largest local norms, less for "
            "those drawn at random; weights a mean of score_norm over all tokens by its inverse",
        ),
        _probe("score_norm_method", "string", "name", "how score_norm was found: exact | sketch"),
        _probe(
            "attribution",
            "float32",
            ONE,
            "c <grad ln pi, grad L> / ||grad L||^2: signed share of the squared gradient norm, before a sharpness method "
            "changes the gradient",
        ),
        _probe(
            "update_attribution",
            "float32",
            ONE,
            "the same along D^-1 dtheta: signed share of the optimizer's squared update",
        ),
        _probe(
            "heldout_influence",
            "float32",
            NATS,
            "c <grad ln pi, grad L_heldout>: first-order fall of the held-out "
            "loss per unit of learning rate; positive lowers it",
        ),
        _probe(
            "sharp_alignment", "float32", ONE, "share of ||c grad ln pi||^2 in the span of the top Hessian eigenvectors"
        ),
    ),
)

PROBES = Table(
    "probes",
    "one estimate",
    ("step", "probe", "probe_set", "functional", "parameters", "quantity", "rho", "seed"),
    (
        _STEP,
        _always("probe", "string", "name", "which probe made the estimate"),
        _always("probe_set", "string", "name", "the fixed prompts it looked at"),
        _always("functional", "string", "name", "the scalar it is about: nll | surrogate | expected_failure | ..."),
        _always("parameters", "string", "name", "group of parameters it is over"),
        _always("quantity", "string", "name", "what was estimated"),
        _maybe("value", "float64", "the quantity's", "the estimate; null if it could not be had"),
        _maybe("std_error", "float64", "the quantity's", "its standard error; null if the method has none"),
        _maybe(
            "samples",
            "int64",
            ONE,
            "random vectors, perturbations or iterations used; the trace's interval is Student's t with one fewer",
        ),
        _maybe(
            "rho", "float64", NORM, "radius of the perturbation, or the node of a spectral density; null if neither"
        ),
        _maybe("converged", "bool", "true / false", "whether the iteration met its tolerance; null if it has none"),
        _maybe("residual", "float64", "the quantity's", "residual of the iteration; null if it has none"),
        _maybe("seed", "int64", ONE, "seed of the estimate's own generator"),
        _timing("seconds", "time spent"),
    ),
)

EVAL = Table(
    "eval",
    "an evaluation",
    ("step", "task", "split", "level", "temperature", "k"),
    (
        _STEP,
        _always("task", "string", "name", "task"),
        _always("split", "string", "name", "train | heldout | unseen | ..."),
        _always(
            "level", "string", "name", "number of people, difficulty, hops, as text; 'all' pools the split's levels"
        ),
        _always("n", "int32", "prompts", "prompts evaluated"),
        _always("k", "int32", "completions", "completions drawn for each prompt"),
        _always("accuracy", "float64", ONE, "share of correct completions"),
        _maybe("std_error", "float64", ONE, "standard error of the accuracy, with the prompts as clusters"),
        _maybe("pass_at_k", "float64", ONE, "share of prompts with at least one correct completion among k"),
        _maybe("reward_mean", "float64", "reward", "mean reward over the completions"),
        _maybe(
            "heldout_loss",
            "float64",
            "nats / token",
            "mean -ln pi, at the sampling temperature of the training, of the split's and level's right answers that the "
            "run's probe set stores; null if there are none",
        ),
        _always("temperature", "float64", ONE, "sampling temperature; 0 is greedy decoding"),
    ),
)

EVENTS = Table(
    "events",
    "something a person should know",
    ("step", "rule"),
    (
        _STEP,
        _always("rule", "string", "name", "the rule that spoke"),
        _always("severity", "string", "name", "info | warning | error"),
        _maybe("value", "float64", "the rule's", "what was measured"),
        _maybe("threshold", "float64", "the rule's", "the bound it crossed"),
        _always("action", "string", "name", "what was done: none | warn | left out | skip_step | stop | ..."),
        _always("message", "string", "text", "one line for a person"),
    ),
)
