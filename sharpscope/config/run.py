"""The configuration of a run, of a fork and of a study's claims, and how a run's is built from YAML, options and `--set a.b=c`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from sharpscope.config.tasks import KnightsKnavesSpec, TaskSpec
from sharpscope.errors import UserError
from sharpscope.methods.method import Method
from sharpscope.methods.named import expand_method, method_label, named_method
from sharpscope.rules.table import RULES
from sharpscope.settings.base import Spec, known_settings, validate
from sharpscope.settings.reading import merge, merge_all, nested, parse_override, read_yaml

EMBEDDED_PREFIX = "embedded:"
"""Prefix of the policies that ship with the package."""
EMBEDDED_NAMES = ("knights_knaves", "math", "tool_qa")
"""Their names, which are also those of their tasks."""


class LoraSpec(Spec):
    """Low-rank adapters (arXiv 2106.09685) from peft, of all linear layers but the output layer: only they are trained and saved."""

    r: int = Field(16, ge=1, le=4096, description="rank of each adapter")
    alpha: float = Field(32.0, gt=0, description="scale of the adapters' output: alpha/r")


class PolicySpec(Spec):
    """The model to train, its precision, device and prompt format."""

    model: str = Field("embedded:knights_knaves", min_length=1)
    """`embedded:NAME` (shipped with the package), a local folder, a GGUF file, or a Hugging Face hub id"""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """compute type. bfloat16: matrix products use autocast, while weights, gradients, optimizer state, norms and
    logits stay float32; with `lora`, the frozen weights are bfloat16 too"""
    lora: LoraSpec | None = Field(
        None, description="train low-rank adapters only; null = all weights"
    )
    device: str = Field(
        "auto", description="`auto` (CUDA if available, else CPU), `cpu`, `cuda`, `cuda:1`, …"
    )
    prompt_format: Literal["auto", "plain", "chat"] = "auto"
    """`chat` applies the tokenizer's chat template, `plain` does not; `auto` = chat if there is a template"""


class SamplingSpec(Spec):
    """How completions are sampled."""

    temperature: float = Field(1.0, ge=0, le=10, description="divisor of the logits; 0 = greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus sampling: keep the most likely tokens up to this probability; 1 = off"""
    max_new_tokens: int = Field(192, ge=1)
    """maximum length of a completion, including the end-of-text token [tokens]"""
    decode_batch: int = Field(512, ge=1)
    """completions decoded at once; limits memory, changes samples at most by rounding"""


class RolloutSpec(SamplingSpec):
    """The rollouts of a step: prompts × completions."""

    temperature: float = Field(1.0, gt=0, le=10, description="divisor of the logits")
    prompts_per_step: int = Field(24, ge=1, le=1_000_000, description="distinct prompts per step")
    group_size: int = Field(
        8,
        ge=2,
        le=65_536,
        description="completions per prompt, G; advantages are relative to the group",
    )


class OptimizerSpec(Spec):
    """The optimizer with warm-up, a schedule and global-norm clipping."""

    kind: Literal["adamw", "sgd", "muon", "pion"] = "adamw"
    """adamw: decoupled weight decay, beta1 0.9 (arXiv 1711.05101). sgd: θ ← θ − lr·(g + decay·θ), which keeps the gradient's length.
    muon: the averaged gradient of each matrix is orthogonalized, and its step has the size of AdamW's. pion: its large singular values
    are kept and small ones removed (arXiv 2605.19282). Embeddings, the output layer and vectors have AdamW's step in both."""
    momentum: float | None = Field(None, ge=0, lt=1)
    """Of sgd (null: 0) and of muon's and pion's average (null: 0.95); adamw has beta1 0.9."""
    filter_steps: int = Field(5, ge=0, le=5)
    """Of pion's five iterations those that remove small singular values, after the ones that bring all towards 1; the authors
    advise all five for RL. With 0 pion is muon."""
    lr: float = Field(1e-4, gt=0, le=1)
    """Peak learning rate [per update]; not given: 1e-4 for embedded policies, else 1e-6."""
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second-moment average.")
    eps: float = Field(1e-8, gt=0, description="Added to the square root of the second moment.")
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices (not of norm gains and biases)."""
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Steps of linear warm-up, from lr/warmup_steps; fewer than steps.",
    )
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or linear or cosine decay to zero at the last step."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Maximum global L2 norm of an update's gradient; null: no clipping."""


class UpdateSpec(Spec):
    """How the rollouts of a step are divided into optimizer updates."""

    mini_batches: int = Field(2, ge=1)
    """Updates per inner epoch; groups are assigned to them in a seeded order. With 1 (and one inner epoch) every
    ratio is 1, so that clips do nothing and several methods equal GRPO."""
    inner_epochs: int = Field(1, ge=1, description="Passes over the completions of a step.")
    microbatch_tokens: int = Field(16384, ge=64)
    """Maximum size of a forward and backward pass, with each prompt counted once; larger groups are split, a longer
    completion runs alone; lowered where the model's activations would exceed about 4 GB (16 GB on a GPU) [tokens]."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more time, the same gradient."""


class EvaluationSpec(Spec):
    """When and on which prompts the policy is evaluated."""

    every: int = Field(25, ge=0)
    """Interval between evaluations, also before the first and after the last step; 0: never [steps]."""
    prompts: int = Field(
        100,
        ge=1,
        description="Prompts per level, from the start of the split's fixed order.",
    )
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field((0.0, 1.0), min_length=1)
    """Sampling temperatures; 0 is greedy."""
    samples: int = Field(
        4,
        ge=1,
        description="Completions per prompt at temperatures above 0 (k of pass@k and avg@k).",
    )
    splits: tuple[str, ...] = ("heldout", "unseen")
    """Splits to evaluate; splits that the task does not have are skipped."""


class RecordingSpec(Spec):
    """What is written to the traces and at which interval; measurements change nothing that training sees."""

    rollouts_every: int = Field(
        1,
        ge=0,
        description="Interval of the rollouts table; 0: never [steps].",
    )
    tokens_every: int = Field(
        1,
        ge=0,
        description="Interval of the tokens table; 0: never [steps].",
    )
    token_rows: int = Field(200_000, ge=1)
    """Rows of the tokens table in a step from which only a random sample of its groups with about as many tokens is
    written and measured; a step with a spike is written whole. Column row_probability has the probability."""
    token_gradients_every: int | None = Field(None, ge=0)
    """Interval of score norms (local method) and attribution, also at the first step [steps]; 0: never; null: 50, and in a shorter run
    of ten steps or more a fifth of it."""
    effects: Literal["auto", "always", "never"] = "auto"
    """Effects of tokens, at step 2, every 50 steps (or at each interval that is given) and at spikes. auto: a model of over 5 million
    parameters has them at as many updates as cost at most 12 % of the run's passes."""
    group_share: float = Field(0.25, gt=0, le=1)
    """Share of an update's groups with a gradient, drawn at random, whose tokens get score norms, attribution and
    influence, except at spikes; 1: all groups. Column inclusion_probability has the probability."""
    spike_z: float | None = Field(4.0, gt=0)
    """Also record score norms and attribution of all groups with a gradient if the log gradient norm exceeds its median by this many
    robust standard deviations (1.4826·MAD over the last 50 steps), at up to 8 steps of a run; null: never. Only the
    first inner epoch is recorded."""
    exact_tokens: int = Field(1, ge=0)
    """Number of tokens with the largest local norm, and of random others, whose exact norm is computed as well."""
    rotation_every: int = Field(50, ge=0)
    """Interval of the rotation of gradients and updates against the reference objective, also at step 1; every update
    of such a step costs another forward and backward pass; 0: never [steps]."""
    probe_entropy_every: int = Field(0, ge=0)
    """Interval of the policy's entropy at fixed tokens, the stored solutions of the probe set's training prompts,
    also before training (a forward pass each); 0: never [steps]."""
    heldout_influence_every: int = Field(0, ge=0)
    """Interval of held-out influence, along the gradient of the expected failure on rollouts of the probe set's
    held-out prompts; 0: never [steps]."""

    def interval(self, steps: int) -> int:
        """Interval of the tokens' measurements in a run of `steps` steps [steps]; 0: never."""
        if self.token_gradients_every is not None:
            return self.token_gradients_every
        return 50 if steps < 10 else min(50, steps // 5)


ObjectiveName = Literal["nll", "expected_failure"]
SharpnessKind = Literal["sam", "asam", "average"]
Backend = Literal["lanczos", "pyhessian", "curvlinops"]
OperatorName = Literal["hessian", "finite_difference", "gauss_newton", "fisher", "empirical_fisher"]
ProbedOperator = OperatorName | Literal["adamw"]
Split = Literal["train", "heldout"]
Check = Literal["off", "first", "always"]
"""When probes are compared with autograd on the model: never, at first use, or at every call."""

PRESETS: dict[str, dict[str, object]] = {
    "off": {"every": 0},
    "standard": {
        "every": 25,
        "kinds": ("sam", "asam"),
        "samples": 8,
        "heldout_prompts": 200,
        "splits": ("train", "heldout"),
        "curvature_prompts": 12,
    },
}
"""What a preset changes of the defaults, which are those of `light`; fields set by the user take precedence."""


class ProbesSpec(Spec):
    """Sharpness and curvature on fixed prompts, shared by all methods of a study."""

    preset: Literal["off", "light", "standard"] = "light"
    """Defaults of the fields below: off; light: sharpness by perturbation and critical sharpness; standard: also
    curvature and the expected failure, on more prompts."""
    check: Check = "first"
    """When to compare score norms, attribution and curvature with autograd on the policy: at first use (first), at
    every use (always), never (off). Numbers that differ are not recorded, with an event."""
    every: int | None = Field(None, ge=0)
    """Interval between probes, also before the first and after the last step; null: a quarter of the run, so that there
    are five, on as many prompts as cost an eighth of the training; 0: never [steps]."""
    probe_set_seed: int = Field(0, ge=0)
    """Seed of the probe set's prompts; use the same for all runs of a study."""
    prompts: int = Field(200, ge=1)
    """Training prompts in the probe set. SAM sharpness is too high with few, 2.3 times with 6: use at least 200 where
    numbers count."""
    heldout_prompts: int = Field(32, ge=0, description="Held-out prompts in the probe set.")
    splits: tuple[Split, ...] = Field(("train",), min_length=1)
    """Parts of the probe set whose loss surface is probed."""
    functionals: tuple[ObjectiveName, ...] = ("nll", "expected_failure")
    """Objectives to probe: nll of stored solutions; expected_failure on new rollouts."""
    samples: int = Field(2, ge=1)
    """Completions per probe prompt for expected_failure; of equally many completions, more prompts tell more."""
    rho: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Radius of perturbations [parameters' L2 norm]; auto: chosen at the first probe of a run such that SAM sharpness
    of the expected failure is between 5 and 30 % of the largest possible rise. Give the same number to all runs of a
    study."""
    kinds: tuple[SharpnessKind, ...] = Field(
        ("sam",),
        description="Sharpness measures: sam, asam, average (under noise of 2 % of the weights); standard: also asam.",
    )
    critical_sharpness: bool = True
    """Whether to compute the critical sharpness of the first update of a probed step, by a few forward passes over
    the update's completions."""
    curvature_prompts: int = Field(0, ge=0)
    """Prompts of each split on which eigenvalues and trace of the Hessian are computed, the first ones; 0: no
    curvature."""
    operators: tuple[ProbedOperator, ...] = Field(("hessian",), min_length=1)
    """Curvature operators: hessian, finite_difference (the Hessian from differences of gradients), gauss_newton, fisher,
    empirical_fisher, adamw (the Hessian preconditioned by AdamW's second moments, of a run's checkpoints)."""
    parameters: tuple[str, ...] = Field(("all",), min_length=1)
    """Parameters whose curvature is computed: all, a layer (12), a kind (attention, mlp, norm, embedding, head), a kind in a
    layer (12.mlp), or several joined by +."""
    density_probes: int = Field(0, ge=0)
    """Random starts of the spectral density, of 40 products each; 0: no density."""
    memory_mb: float = Field(2048.0, gt=0)
    """Maximum memory for graphs of Hessian products, and for Lanczos vectors [MiB]."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: object) -> object:
        return (
            PRESETS.get(str(data.get("preset")), {}) | dict(data)
            if isinstance(data, Mapping)
            else data
        )

    @model_validator(mode="after")
    def _off_is_off(self) -> ProbesSpec:
        # such as preset off in a sweep whose base has an interval
        if self.preset == "off" and self.every != 0:
            raise ValueError(
                f"every = {self.every}: preset off probes nothing; set another preset, or every to 0"
            )
        return self

    def interval(self, steps: int) -> int:
        """Interval between probes in a run of `steps` steps [steps]; 0: never."""
        return math.ceil(steps / 4) if self.every is None else self.every


class CheckpointSpec(Spec):
    """When checkpoints are saved and which are kept."""

    every: int = Field(50, ge=0)
    """Interval between checkpoints, also at the end of the run; 0: only at the end [steps]."""
    keep_last: int = Field(1, ge=1, description="Number of newest checkpoints to keep.")


JUDGED = {name: rule for name, rule in RULES.items() if rule.known != "log"}
"""Rules that are judged during a run."""


class Limit(Spec):
    """Threshold of a health rule and what follows when it applies."""

    threshold: float = Field(
        description="Value from which the rule applies; default: "
        + ", ".join(
            f"{name} {'≤' if rule.below else '≥'} {rule.threshold:g}"
            for name, rule in JUDGED.items()
        )
        + ".",
    )
    action: Literal["off", "warn", "skip_step", "stop"] = "warn"
    """warn: report it; skip_step: also leave this step's updates out (its tokens are recorded); stop: also end the
    run, with a checkpoint."""


class HealthSpec(Spec):
    """Rules that detect failing runs (`sharpscope.rules`); each time a rule applies, it adds a row to the events table."""

    model_config = ConfigDict(extra="allow")
    similar_fields = dict.fromkeys(JUDGED, Limit)
    __pydantic_extra__: dict[str, Limit]

    non_finite: Literal["skip_step", "stop"] = "stop"
    """Action on a non-finite loss, gradient, reward or token weight: skip the update (for a reward: its group), or
    also stop the run. Non-finite model weights always stop the run."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: object) -> object:
        """Add the rules and thresholds that are not given."""
        defaults = {name: {"threshold": rule.threshold} for name, rule in JUDGED.items()}
        return merge(defaults, data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _skips_in_time(self) -> HealthSpec:
        for name, limit in self.limits.items():
            if limit.action == "skip_step" and RULES[name].known != "before":
                raise ValueError(
                    f"{name}.action = skip_step: is known after the updates only; set it to warn or stop"
                )
        return self

    @property
    def limits(self) -> dict[str, Limit]:
        """Threshold and action by rule."""
        return self.__pydantic_extra__


CONFIG_FILE = "config.yaml"
"""Name of the configuration in a run's folder."""


class RunConfig(Spec):
    """Configuration of a run. Every field has a default; the default policy is an embedded one."""

    out: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")] | None = None
    """Folder of the run; null: runs/<label>-<task>-s<seed>."""
    seed: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="Seed of training; the task's data has a separate seed.",
    )
    steps: int = Field(100, ge=1, le=1_000_000)
    """Number of steps; each samples rollouts and updates the policy."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of torch; null: 1 for up to 20 MiB of weights, else OMP_NUM_THREADS or all physical cores."""
    task: TaskSpec = Field(
        default_factory=KnightsKnavesSpec, description="Prompts and their scoring."
    )
    policy: PolicySpec = Field(default_factory=PolicySpec, description="The model to train.")
    rollout: RolloutSpec = Field(
        default_factory=RolloutSpec, description="How completions are sampled."
    )
    method: Method = Field(
        default_factory=lambda: named_method("grpo"), description="The objective."
    )
    optimizer: OptimizerSpec = Field(
        default_factory=OptimizerSpec, description="The optimizer and its schedule."
    )
    update: UpdateSpec = Field(
        default_factory=UpdateSpec, description="Mini-batches, inner epochs, microbatches."
    )
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec)
    """When and on which prompts to evaluate."""
    recording: RecordingSpec = Field(
        default_factory=RecordingSpec, description="What is written to the traces."
    )
    probes: ProbesSpec = Field(default_factory=ProbesSpec)
    """Curvature and perturbation probes during training."""
    checkpoint: CheckpointSpec = Field(
        default_factory=CheckpointSpec, description="When checkpoints are saved."
    )
    health: HealthSpec = Field(
        default_factory=HealthSpec, description="Rules that detect failing runs."
    )

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        batches = self.update.mini_batches
        prompts = self.rollout.prompts_per_step
        if batches > prompts:
            why = (
                f"must be at most rollout.prompts_per_step = {prompts}, since groups are not split"
            )
            raise ValueError(
                f"update.mini_batches = {batches} {why}; set update.mini_batches to 1 or more prompts"
            )
        warmup = self.optimizer.warmup_steps
        if warmup >= self.steps:
            raise ValueError(
                f"optimizer.warmup_steps = {warmup} must be less than steps = {self.steps}"
            )
        if self.policy.lora is not None and getattr(self.method.tokens, "kind", "") == "curvature":
            raise ValueError(
                "method.tokens.kind = curvature: needs gradients of the output layer; set policy.lora to null"
            )
        return self

    @property
    def run_dir(self) -> Path:
        """Path of the run's folder."""
        if self.out is not None:
            return Path(self.out)
        label, task = (
            re.sub(r"[^A-Za-z0-9._+=-]+", "-", text)
            for text in (method_label(self.method), self.task.kind)
        )
        return Path("runs", f"{label[:80].strip('-')}-{task}-s{self.seed}")

    @property
    def default_preset(self) -> Literal["paper", "calibrated"]:
        """The preset that `auto` selects: calibrated for the embedded policies, paper for any other model."""
        return "calibrated" if self.policy.model.startswith(EMBEDDED_PREFIX) else "paper"

    @property
    def resolved_method(self) -> Method:
        """The method, with preset `auto` of its token weights replaced."""
        return self.method.with_preset("auto", self.default_preset)


class ForkSpec(Spec):
    """Counterfactual updates: what each arm does from one state, and what is measured."""

    methods: tuple[str, ...] = Field(
        ("grpo", "grpo-sg", "grpo-sg-reverse", "grpo-sg-shuffled"), min_length=1
    )
    """Arms: [name=]method[+field=value…], such as grpo or strong=grpo-sg+weight.U=4. The first is the reference."""
    batches: int = Field(
        30,
        ge=1,
        le=100_000,
        description="Batches of rollouts per state; every arm learns from each.",
    )
    outcomes: tuple[Literal["failure", "entropy", "greedy", "sharpness"], ...] = Field(
        ("failure", "entropy"), min_length=1
    )
    """failure: expected failure on held-out and training prompts; entropy: on the held-out tokens; greedy: accuracy
    of new greedy answers to the held-out prompts; sharpness: SAM sharpness on training prompts."""
    prompts: int = Field(
        64,
        ge=2,
        le=100_000,
        description="Held-out prompts per batch for the outcomes.",
    )
    samples: int = Field(2, ge=1, le=10_000)
    """Completions per held-out prompt; the training prompts get as many in total."""
    rho: float | None = Field(None, gt=0)
    """Radius of SAM sharpness [parameters' L2 norm]; null: that of the run's probes, else one whose saturation on the
    first batch is moderate."""
    warm_up: int = Field(4, ge=0)
    """Where no optimizer state is stored: steps of the reference method, at a learning rate of 0, whose gradients
    fill AdamW's moments; 0: start from an empty state, whose first step is the gradient's sign."""


class ClaimsSpec(Spec):
    """What a study claims, and by which rules; `sharpscope study declare` freezes it."""

    baseline: str = Field("grpo", description="Baseline method.")
    treatment: str = Field("grpo-sg", description="Method that the claims are tested for.")
    order: tuple[str, ...] = ("C7", "C4", "C10")
    """Primary claims, in the order in which they are tested."""
    level: float = Field(0.05, gt=0, lt=0.5, description="Error rate of each test.")
    margins: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Claim to the smallest effect that matters, in the unit of its rule: 0.02 is two points."""
    least_rotation: float = Field(5.0, ge=0)
    """Mean rotation of the update that a method must cause to be compared [degrees]; by default half of what weights in
    [1, 1.4] can do to orthogonal token gradients, arctan(0.4/(2·√1.4)) = 9.6°."""


def default_lr(model: str) -> float:
    """The learning rate where none is given: 1e-4 for embedded policies, 1e-6 (as in TRL and verl) for other models."""
    return 1e-4 if model.startswith(EMBEDDED_PREFIX) else 1e-6


def build_config(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    values: Mapping[str, object] | None = None,
) -> RunConfig:
    """Build and validate a configuration from the defaults, a YAML file, values and overrides, in this order.

    Values are by field path, such as `{"optimizer.lr": 1e-4}`, overrides of the form `field.subfield=value`.

    Raises:
        UserError: A field is unknown or invalid; the message names the field, the value and the fix.
    """
    return make_config(config_data(file, overrides, values))


def read_recorded(
    folder: Path,
    values: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """The configuration of a recorded run, with `out` set to its folder."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        if (folder / "run.json").is_file():
            raise UserError(
                f"{folder}: was recorded from another trainer, so there is no configuration to go on from"
            )
        problem = f"has no {CONFIG_FILE}" if folder.is_dir() else "does not exist"
        raise UserError(f"{folder}: {problem}; give the folder of a run")
    return make_config(
        config_data(recorded_settings(read_yaml(file)) | {"out": str(folder)}, overrides, values)
    )


def recorded_settings(data: Mapping[str, object]) -> dict[str, object]:
    """The settings of a recorded run that this version has."""
    if "name" in data:
        raise UserError(
            "a run of version 0.2 can only be shown and analyzed; use that version, or --model CHECKPOINT"
        )
    return known_settings(RunConfig, data)


def config_data(
    base: Path | Mapping[str, object] | None,
    overrides: Sequence[str] = (),
    values: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The settings of `build_config` as nested values, not validated; `base`: a YAML file or its content."""
    layers = [read_yaml(base) if isinstance(base, Path) else base or {}]
    layers += [nested(path, value) for path, value in (values or {}).items()]
    return merge_all([*layers, *map(parse_override, overrides)])


def embedded_name(model: str) -> str:
    """Name of an embedded policy, which is also that of its task; empty for another model."""
    name = model.removeprefix(EMBEDDED_PREFIX)
    return name if name != model and name in EMBEDDED_NAMES else ""


def make_config(data: Mapping[str, object]) -> RunConfig:
    """Validate nested values as a configuration."""
    if data.get("method") is not None:
        data = {**data, "method": expand_method(data["method"])}
    task, policy = (
        value if isinstance(value, Mapping) else {} for value in map(data.get, ("task", "policy"))
    )
    kind = "knights_knaves"
    if "model" in policy:  # an embedded policy has been taught a task, which is then the default
        model = policy["model"]
        kind = embedded_name(str(model)) or kind
    else:
        model = PolicySpec().model
        if task.get("kind") in EMBEDDED_NAMES:
            model = f"{EMBEDDED_PREFIX}{task['kind']}"
    defaults = {"task": {"kind": kind}, "policy": {"model": model}}
    config = validate(
        RunConfig, merge(defaults | {"optimizer": {"lr": default_lr(str(model))}}, data)
    )
    # A preset equal to the default becomes `auto`, so that equal methods have the same label.
    return config.model_copy(
        update={"method": config.method.with_preset(config.default_preset, "auto")}
    )
