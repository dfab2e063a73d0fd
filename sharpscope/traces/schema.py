"""The schema of a trace: tables, columns with type, unit and definition, and the Arrow schemas made from them.

The writer, the reader, `sharpscope config columns` and the Parquet field metadata all use these definitions. "Mean over
tokens" is over all loss tokens of the step. Probabilities are softmax(z / T) at the sampling temperature T, before top-p
and top-k. "L2 norm" is over the trainable parameters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import pyarrow as pa

SCHEMA_VERSION = 3
"""Increases when tables or columns are added, renamed, removed or change their meaning.

- 2: sharpscope 0.2.
- 3: sharpscope 0.3. New columns (`probes.ceiling` and others) and the tables `uses` and `reductions`; null or empty in
  runs of version 2. Columns that nothing read are gone: those of version 2 are ignored.
"""

READABLE_VERSIONS = (2, 3)
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


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: column name.
        type: a key of `ARROW_TYPES`.
        unit: unit of the values; "1" if dimensionless.
        definition: what a value means.
        nullable: whether values may be null (not recorded, or undefined in that row); the writer fills an omitted column.
        probe: whether the column is recorded only if a probe or an option asks for it.
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
        return next(column for column in self.columns if column.name == name)


_COLUMN = re.compile(r"(\w+)([!?~]?) (\w+)(?: \[(.+?)\])?: (.+)")


def _table(name: str, row: str, key: str, columns: str) -> Table:
    """A table from its columns as text: `name type [unit]: definition`, continued on indented lines.

    After a name, `!` means never null, `?` only recorded by a probe or an option, `~` a duration.
    """
    made = []
    for line in columns.replace("\n    ", " ").strip().splitlines():
        match = _COLUMN.fullmatch(line)
        assert match is not None, line
        column, flag, type_, unit, definition = match.groups()
        made.append(Column(column, type_, unit or "1", definition, flag != "!", flag == "?", flag == "~"))
    return Table(name, row, tuple(key.split()), tuple(made))


STEPS = _table(
    "steps",
    "a step",
    "step",
    """
step! int32 [steps]: training step (one round of rollouts and its updates), from 1; 0 is before training
updates int32 [updates]: optimizer updates in this step
reward_mean float64 [reward]: mean reward over the step's completions; null without rewards
reward_std float64 [reward]: standard deviation (n - 1) of the rewards over the step's completions
accuracy float64: fraction of the step's completions that are correct
loss float64: mean over the updates of the minimized loss; null without an update
kl float64 [nats]: mean k3 estimate per token use of KL(policy || reference); null without a reference or an update
accuracy_completed? float64: accuracy among the completions that ended before the length limit
kl_step? float64 [nats]: mean over tokens of the k3 estimate of KL(pi_old || pi) over the whole step: pi after its
    last update, pi_old before its first, on a part of its completions
entropy_mean float64 [nats]: mean over tokens of the policy's entropy at the start of the step
grad_norm float64 [L2 norm]: mean over the updates of the gradient norm before clipping
grad_clipped? float64: fraction of the updates in which the gradient norm was clipped
update_norm float64 [L2 norm]: mean over the updates of the norm of the parameter change, including weight decay
clip_fraction_low float64: fraction of token uses, over all updates, clipped at the lower ratio bound; null without an
    update
clip_fraction_high float64: fraction of token uses, over all updates, clipped at the upper ratio bound; null without
    an update
weight_mean float64: mean token weight
weight_mean_gradient float64: mean token weight, tokens counted with m = |c| / w * ||p - e_y||
weight_saturation_low_gradient float64: fraction of the gradient at the weights' lower bound; null if unbounded,
    tokens counted with m = |c| / w * ||p - e_y||
weight_saturation_high_gradient float64: fraction of the gradient at the weights' upper bound; null if unbounded,
    tokens counted with m = |c| / w * ||p - e_y||
gradient_rotation? float64 [degrees]: mean over the updates of their gradient_rotation
gradient_scale? float64: mean over the updates of their gradient_scale
update_rotation? float64 [degrees]: mean over the updates of their update_rotation
update_scale? float64: mean over the updates of their update_scale
noise_rotation? float64 [degrees]: mean over the updates of their noise_rotation
zero_std_groups int32 [groups]: number of groups whose rewards are all equal; advantages relative to the group are
    zero in them
completion_length_mean float64 [tokens]: mean completion length
truncated_fraction float64: fraction of completions truncated at the length limit
tokens int64 [tokens]: number of loss tokens in the step
redrawn_groups int32 [groups]: groups that dynamic sampling replaced because all answers were correct or all wrong,
    over all attempts; 0 without dynamic sampling; null where another trainer drew the completions
lr float64 [1 / update]: learning rate of the step's last update; null without an update
generation_s~ float64 [seconds]: time spent generating and scoring
training_s~ float64 [seconds]: time spent in forward passes, backward passes and the optimizer
recording_s~ float64 [seconds]: time spent on probes and traces
""",
)

UPDATES = _table(
    "updates",
    "an optimizer step",
    "step update",
    """
step! int32 [steps]: training step (one round of rollouts and its updates), from 1; 0 is before training
update! int32: index of the update in its step, from 0
skipped! bool [true / false]: whether the gradient was computed but not applied (a health rule, or a value that is not
    finite)
loss float64: the minimized loss before the update
grad_norm float64 [L2 norm]: norm of the gradient that the optimizer gets, before clipping
clip_factor float64: factor in (0, 1] by which gradient clipping scaled the gradient; 0 if skipped
update_norm float64 [L2 norm]: norm of the parameter change, including weight decay; 0 if skipped
lr float64 [1 / update]: learning rate
grad_norm_by_layer? json [L2 norm]: grad_norm by layer and kind of parameter: a JSON object such as {"0.attention": …,
    "0.mlp": …, "embedding": …} whose squares sum to grad_norm^2
update_norm_by_layer? json [L2 norm]: update_norm, in the same way
tokens int64 [tokens]: loss tokens that the update uses
kl_old_k3 float64 [nats]: estimate k3 of KL(pi_old || pi) before the update: mean over its tokens of r - 1 - ln r,
    r = pi / pi_old of the token, pi_old the policy at the start of the step
ratio_min float64: smallest importance ratio of its tokens, as defined by the method
ratio_max float64: largest importance ratio
clip_fraction_low float64: fraction of its tokens clipped at the lower ratio bound
clip_fraction_high float64: fraction of its tokens clipped at the upper ratio bound
entropy float64 [nats]: mean over its tokens of the policy's entropy before the update; null without an entropy bonus
gradient_rotation? float64 [degrees]: the angle between the gradient that the optimizer gets, before clipping, and
    that of the reference objective on the same rollouts and weights: all token weights 1 and no mask; plain GRPO for
    methods that differ from it by advantages, ratio, clip or aggregation
gradient_scale? float64: the ratio of these gradients' norms
update_rotation? float64 [degrees]: the angle between the optimizer's step and the step that it would make from the
    same state with the reference objective's gradient
update_scale? float64: the ratio of these steps' norms
noise_rotation? float64 [degrees]: the estimated angle between the reference gradient g and its expectation,
    arccos(sqrt(max(0, <g_A, g_B>) / (f (1 - f) ||g||^2))) with g = g_A + g_B over two parts of the prompts, shares f
    and 1 - f; 90 if <g_A, g_B> <= 0, null for one prompt
""",
)

ROLLOUTS = _table(
    "rollouts",
    "a completion",
    "step rollout",
    """
step! int32 [steps]: training step (one round of rollouts and its updates), from 1; 0 is before training
rollout! int32: index of the completion in its step, from 0; rows of a group are adjacent
group int32: index of the prompt in its step, from 0; the completions of one prompt are a group
prompt string [text]: the task's prompt, before the chat template
completion string [text]: generated text without special tokens
reward float64 [reward]: total reward
reward_parts json [reward]: components of the reward: a JSON object name -> number (null if not finite)
correct bool [true / false]: whether the task scores the answer as correct
advantage float64: advantage before per-token factors; the mean over the tokens if each has its own
length int32 [tokens]: number of completion tokens in the loss
truncated bool [true / false]: whether the completion was truncated at the length limit
token_ids? string: token IDs of prompt and completion, those outside the loss included, as a JSON list; recorded by
    importers
prompt_tokens? int32 [tokens]: how many of token_ids are the prompt
env? string [name]: environment or data set that the prompt is from; recorded by importers
""",
)

TOKENS = _table(
    "tokens",
    "a generated token",
    "step rollout position",
    """
step! int32 [steps]: training step (one round of rollouts and its updates), from 1; 0 is before training
rollout! int32: index of the completion in its step, from 0; rows of a group are adjacent
position! int32 [tokens]: index of the token in its completion, from 0
update int32: index of the first update in the step that uses the token, from 0; ratio, clipped, loss_coef and values
    derived from them refer to it. If the updates were skipped (see steps.updates), the update that would have used
    it. Null if there is none
token_id! int32: token ID of the tokenizer
logp! float32 [nats]: log-probability ln pi under the policy at the start of the step
behavior_logp float32 [nats]: log-probability under the sampling policy, before top-p and top-k
sampler_logp? float32 [nats]: log-probability under the sampling policy, after top-p and top-k; null if neither is
    used
temperature? float32: softmax temperature of logp, where tokens differ in it
logit float32: logit z of the token, not divided by the temperature
entropy float32 [nats]: entropy of the next-token distribution
collision float32: sum of squared probabilities of the next-token distribution
polarity float32 [nats]: entropy polarity p(ln p + H) - sum_j p_j^2 (ln p_j + H); a gradient step of size eta on this
    token's logits with advantage A changes its entropy by -eta * A * polarity
advantage float32: advantage of the token or of its completion; per-token factors (AR, PAPO, covariance) are part of
    weight
ratio float32: importance ratio pi / pi_old in that update, as defined by the method
weight float32: token weight w of the method, detached
correction? float32: factor of the surrogate for the difference between the sampler's policy and pi_old; null without
    a correction
clipped int8: ratio bound that is active: -1 lower, 1 upper, 0 none. A PPO clip gives such a token no gradient, CISPO
    a bounded one
loss_coef float32: c = dLoss / dln pi in that update; includes advantage, weight, clipping, KL and normalizer
kl_coef? float32: the part of loss_coef that the KL term of the loss has, 0 without one; the rest is the policy term
entropy_coef? float32 [1 / nats]: dLoss / dH in that update, H the entropy of the token's distribution: the entropy
    bonus, 0 without one; not a part of loss_coef
ref_logp? float32 [nats]: log-probability under the reference policy; null without one
logit_grad_norm float32 [L2 norm over logits]: norm of the gradient of -ln pi with respect to the logits, ||p - e_y||
head_grad_norm float32 [L2 norm over the output layer]: norm of the gradient of ln pi with respect to the output layer
row_probability? float32: probability that the rows of the token's group are written, where a step has more tokens
    than recording.token_rows; its inverse weights sums over tokens of several steps; null where all rows are written
inclusion_probability? float32: probability that the token's group is in the random sample of its update's groups
    with a gradient whose tokens are measured, 1 if all are, and where attribution is known to be 0 since the group has
    no gradient, that of being written; its inverse weights sums of attribution over all tokens, and of score_norm_local and heldout_influence
    over the tokens of groups with a gradient; null where nothing was measured
score_norm_local? float32 [L2 norm]: norm of grad ln pi without the terms through other positions
score_norm_by_layer? json [L2 norm]: score_norm_local by layer, and of the embedding and the output layer: a JSON object
    such as {"0": …, "1": …, "embedding": …}; of the 8 tokens with the largest |c| score_norm_local of a measured update
score_norm? float32 [L2 norm]: norm of grad ln pi over all trainable parameters
score_norm_std_error? float32 [L2 norm]: standard error of score_norm (first order); 0 if exact
draw_probability? float32: probability of computing the exact norm of the token: inclusion_probability for the
    largest local norms of the sample, less for tokens drawn at random from it; its inverse weights a mean of
    score_norm over all tokens
attribution? float32: c <grad ln pi, grad L> / ||grad L||^2: signed fraction of the squared gradient norm, before a
    sharpness method changes the gradient
heldout_influence? float32 [nats]: c <grad ln pi, grad L_heldout>: first-order decrease of the held-out loss per unit
    of learning rate
""",
)

USES = _table(
    "uses",
    "a further use of a token, by an update after the one in `tokens`",
    "step rollout position update",
    """
step! int32 [steps]: training step (one round of rollouts and its updates), from 1; 0 is before training
rollout! int32: index of the completion in its step, from 0; rows of a group are adjacent
position! int32 [tokens]: index of the token in its completion, from 0
update! int32: index in the step of the update that used the token again (PPO epochs)
ratio float32: importance ratio pi / pi_old in that update, as defined by the method
clipped int8: ratio bound that is active in that update: -1 lower, 1 upper, 0 none
loss_coef float32: c = dLoss / dln pi in that update
""",
)

PROBES = _table(
    "probes",
    "one estimate",
    "step probe probe_set functional parameters quantity rho seed",
    """
step! int32 [steps]: training step (one round of rollouts and its updates), from 1; 0 is before training
probe! string [name]: probe that made the estimate
probe_set! string [name]: fixed set of prompts the probe evaluates
functional! string [name]: differentiated scalar: nll | surrogate | expected_failure | ...
parameters! string [name]: parameter group
quantity! string [name]: estimated quantity
value float64 [the quantity's]: estimate; null if it could not be computed
std_error float64 [the quantity's]: standard error of the estimate; null if the method has none
samples int64: number of random vectors, perturbations or iterations; a trace's interval is Student's t with samples -
    1 degrees of freedom
rho float64 [L2 norm]: perturbation radius, or node of a spectral density; null otherwise
converged bool [true / false]: whether the iteration met its tolerance; null if not iterative
residual float64 [the quantity's]: residual of the iteration; null if not iterative
seed int64: seed of the estimate's random generator
ceiling? float64 [the quantity's]: largest rise that the functional allows on these prompts, 1 - loss for
    expected_failure; null if unbounded (nll)
saturation? float64: rise / ceiling; above 0.3 an estimate measures the ceiling
seconds~ float64 [seconds]: time spent
prompts? int32 [prompts]: number of prompts in the probed loss
prompt_std_error? float64 [the quantity's]: standard error over prompts, as if they were a random sample and
    perturbations, eigenvectors, the update and completions were fixed (first order); that of the values in
    probe_prompts, which loss slices and an update's critical sharpness do not have. Null where it is not defined
    (densities, ratios, first-order terms, Gauss-Newton) or the loss is not known by prompt
""",
)

PROBE_PROMPTS = _table(
    "probe_prompts",
    "one prompt's part of an estimate in probes",
    "step probe_set functional parameters quantity rho seed prompt",
    """
step! int32 [steps]: training step (one round of rollouts and its updates), from 1; 0 is before training
probe_set! string [name]: fixed set of prompts the probe evaluates
functional! string [name]: differentiated scalar: nll | surrogate | expected_failure | ...
parameters! string [name]: parameter group
quantity! string [name]: estimated quantity
rho float64 [L2 norm]: perturbation radius; null otherwise
seed int64: seed of the estimate's random generator
prompt! int32: index of the prompt in the probed loss, from 0; the same prompt in every step and run
value! float64 [the quantity's]: value whose mean over the prompts is the estimate; prompts with more tokens or
    completions weigh more: V + k (s_i - w_i V) for the estimate V, the prompt's part s_i of it and its weight w_i
""",
)

EVAL = _table(
    "eval",
    "an evaluation",
    "step task split level temperature k",
    """
step! int32 [steps]: training step (one round of rollouts and its updates), from 1; 0 is before training
task! string [name]: task name
split! string [name]: train | heldout | unseen | ...
level! string [name]: number of people, difficulty or number of hops, as text; 'all' pools the split's levels
n! int32 [prompts]: prompts evaluated
k! int32 [completions]: completions sampled per prompt
accuracy float64: fraction of correct completions; null where no threshold of the reward is known
std_error float64: standard error of the accuracy, clustered by prompt
pass_at_k float64: fraction of prompts with at least one correct completion among k
pass_std_error? float64: standard error of pass_at_k over the prompts
truncated? float64: fraction of completions truncated at the length limit
accuracy_completed? float64: accuracy among the completions that ended before the length limit
reward_mean float64 [reward]: mean reward over the completions
temperature! float64: sampling temperature; 0 is greedy decoding
""",
)

EVENTS = _table(
    "events",
    "a warning or a change in the run",
    "step rule",
    """
step! int32 [steps]: training step (one round of rollouts and its updates), from 1; 0 is before training
rule! string [name]: rule that raised the event
severity! string [name]: info | warning | error
value float64 [the rule's]: measured value
threshold float64 [the rule's]: threshold of the rule
action! string [name]: action taken: none | warn | left out | skip_step | stop | ...
message! string [text]: one-line explanation
""",
)

FORKS = _table(
    "forks",
    "one outcome of one arm of a counterfactual update",
    "fork step batch arm comparison outcome",
    """
step! int32 [steps]: step of the state that all arms start from; 0 is before training
fork! string [name]: hash of the settings, which run.json lists under this name
batch! int32: index of the batch of rollouts, from 0; all arms learn from the same batch
arm! string [name]: method that made the update, with its changed fields
reference! string [name]: arm that differences and matched comparisons refer to
comparison! string [name]: step: the optimizer's step as it is; kl: scaled to the reference's KL
outcome! string [name]: measured quantity
value float64 [the outcome's]: value after the update; null if it could not be measured
start float64 [the outcome's]: value before the update; null for quantities of the update
std_error float64 [the outcome's]: standard error of value - start over the prompts of this batch's fixed rollouts;
    null if not estimated
effective_share float64: effective sample size of the importance weights, (sum w)^2 / sum w^2, as a share of the
    samples; null if the outcome uses none
valid bool [true / false]: whether the effective share reaches its threshold and a matched comparison found its scale;
    an analysis leaves out other rows
scale! float64: factor by which the arm's change of the weights was multiplied
seconds~ float64 [seconds]: time spent on this arm, batch and comparison; the same in all of their outcomes
""",
)

REDUCTIONS = _table(
    "reductions",
    "a result computed from the full token table before `export --to reduced` sampled it",
    "name step",
    """
name! string [name]: name of the reduction
step! int32 [steps]: step that it covers; -1 for the whole run
tokens! int64 [tokens]: number of token rows it was computed from
values! string [text]: the result as JSON; {"array": [...]} is an array of float64
""",
)

TABLES: dict[str, Table] = {
    table.name: table
    for table in (STEPS, UPDATES, ROLLOUTS, TOKENS, USES, PROBES, PROBE_PROMPTS, EVAL, EVENTS, FORKS, REDUCTIONS)
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
    for table in (TABLES[name] for name in tables or TABLES):
        lines += ["", f"## {table.name}", "", f"A row is {table.row}, identified by {', '.join(table.key)}.", ""]
        lines += ["| column | type | unit | recorded | definition |", "|---|---|---|---|---|"]
        for column in table.columns:
            when = "with a probe" if column.probe else "or null" if column.nullable else ""
            cells = (column.name, column.type, column.unit, when, column.definition)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
