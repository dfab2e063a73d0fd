"""Configuration: every mistake is one line with the place and the fix; what is saved is read back to the same value."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpscope.config import RunConfig, build_config, read_recorded
from sharpscope.config.run import OptimizerSpec
from sharpscope.errors import UserError
from sharpscope.methods import named_method
from sharpscope.methods.token_weights import SigmoidWeight
from sharpscope.settings import known_settings, settings_of, to_yaml


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["method=grpo-sg", "method.weight.tau=4", "method.weight_on=ratio"],
        ["method=holder", "method.ratio.p={start: 1.0, end: 0.0}"],
        ["method.weight.kind=shuffled", "method.weight.of.kind=sigmoid"],
        ["task.people=[2,3]", "task.unseen_people=[4]"],
        ["task.kind=dataset", "task.path=x.parquet"],
    ],
)
def test_any_resolved_config_is_read_back_the_same(tmp_path: Path, overrides):
    config = build_config(None, overrides)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert build_config(file) == config


def test_file_values_and_overrides_are_laid_over_each_other(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "method: {name: grpo-sg, weight: {tau: 3.0}}\nsteps: 7\noptimizer: {lr: 0.001}\n"
    )
    config = build_config(file, ["optimizer.lr=1e-5", "method.weight.U=1.5"], {"steps": 9})
    assert (
        config.steps,
        config.optimizer.lr,
        config.method.weight.tau,
        config.method.weight.U,
    ) == (9, 1e-5, 3.0, 1.5)
    assert build_config(file, [], {"method": "grpo"}).method.weight.kind == "uniform"


def test_settings_given_before_their_kind_or_name_are_kept(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("task: {people: [4]}\nmethod: {weight_on: ratio}\n")
    config = build_config(file, [], {"task": {"kind": "knights_knaves"}, "method": "grpo-sg"})
    assert config.task.people == (4,)
    assert (config.method.weight.kind, config.method.weight_on) == ("sigmoid", "ratio")
    first = build_config(None, ["method.kl.coef=0.1", "method.name=grpo"])
    assert first.method == build_config(None, ["method=grpo", "method.kl.coef=0.1"]).method
    # another name or kind starts afresh
    fresh = build_config(None, ["method=tr-grpo", "method.weight_on=ratio", "method=grpo"])
    assert fresh.method.weight_on == "surrogate"
    assert build_config(
        None, ["method=grpo-sg", "method.weight.kind=linear"]
    ).method.weight.model_dump() == {
        "kind": "linear",
        "alpha": 0.2,
    }


def test_ablations_get_names_of_their_own():
    plain, changed = (
        build_config(None, ["method=grpo-sg"]),
        build_config(None, ["method=grpo-sg", "method.weight.tau=4"]),
    )
    assert plain.run_dir == Path("runs/grpo-sg-knights_knaves-s0")
    assert changed.run_dir == Path("runs/grpo-sg+weight.tau=4-knights_knaves-s0")
    assert build_config(values={"out": "elsewhere/x"}).run_dir == Path("elsewhere/x")
    # the default preset given by name is not an ablation
    named = build_config(None, ["method=grpo-sg", "method.weight.preset=calibrated"])
    assert named.run_dir == plain.run_dir
    other = build_config(None, ["method=grpo-sg", "method.weight.preset=paper"])
    assert other.run_dir != plain.run_dir


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["task={people: [4], kind: math}"], "task.people: unknown field"),
        (["method.weight.tau=4", "method.weight.kind=linear"], "method.weight.tau: unknown field"),
        (["optimiser.lr=1"], "optimiser: unknown field; did you mean 'optimizer'"),
        (["rollout.temperature=-1"], "rollout.temperature = -1"),
        (
            ["method.weight.kind=sigmod"],
            "method.weight.kind = 'sigmod': unknown; did you mean 'sigmoid'",
        ),
        (
            ["method=grpo-sg", "method.weight.tau=-1"],
            "method.weight.tau = -1: input should be greater than 0",
        ),
        (
            ["method.sharpness.rho=0.1"],
            "method.sharpness.kind: missing; valid: gradient_norm_penalty, sam, squared_gradient_norm",
        ),
        (
            ["update.mini_batches=25"],
            "update.mini_batches = 25 must be at most rollout.prompts_per_step = 24, since groups are not split",
        ),
        (["steps"], "--set steps: must have the form"),
        (["steps=[1"], "not valid YAML"),
        (["method=[1]"], "method = [1]"),
        (
            ["optimizer.warmup_steps=5", "steps=5"],
            "optimizer.warmup_steps = 5 must be less than steps = 5",
        ),
        (["method=capo", "policy.lora={r: 4}"], "method.tokens.kind = curvature"),
        (["optimizer.lr=true"], "lr = True: must be a number, not true or false"),
        (["method=grpo-sg", "method.weight.u0=true"], "u0 = True: must be a number"),
        (["probes.preset=off", "probes.every=75"], "preset off probes nothing"),
        (["method=grpo", "method.tokens.kind=bins"], "method.tokens.include: field required"),
        (
            ["method=wapo", "method.correction.kind=truncate"],
            "ratio.to=sampler needs correction=null",
        ),
        (["health.memry.action=off"], "health.memry: unknown field; did you mean 'memory'"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(overrides, says):
    with pytest.raises(UserError) as caught:
        build_config(None, overrides)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("steps: [", "line"),
        ("- a\n- b\n", "must be a mapping"),
        ("steps: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("steps: 3\nsteps: 4\n", "duplicate key 'steps'"),
        ("&a {steps: *a}", "not valid YAML"),
        (
            "a: &a [x]\n"
            + "".join(f"{y}: &{y} [{', '.join(['*' + x] * 10)}]\n" for x, y in pairwise("abcdefg")),
            "more than 200,000 values",
        ),
        ("#" * 4_000_001, "if you trust it, set SHARPSCOPE_BOUNDS=2"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content, says):
    file = tmp_path / "broken.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=r"broken\.yaml") as caught:
        build_config(file)
    assert says in str(caught.value)
    with pytest.raises(UserError, match="does not exist"):
        build_config(tmp_path / "absent.yaml")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
)
fields = st.sampled_from([*RunConfig.model_fields, "nonsense", ""])


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(fields, values, max_size=4))
def test_any_mapping_is_a_config_or_a_user_error(tmp_path_factory: pytest.TempPathFactory, data):
    file = tmp_path_factory.mktemp("any") / "any.yaml"
    file.write_text(yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    try:
        config = build_config(file)
    except UserError as error:
        assert str(error)
    else:
        assert isinstance(config, RunConfig)


def test_every_setting_is_listed_once_for_each_kind_and_described():
    rows = list(settings_of(RunConfig))
    assert [row.path for row in rows if not row.description] == []
    assert len({(row.path, row.kind) for row in rows}) == len(rows)
    assert not [
        row
        for row in rows
        if any(text in row.values for text in ("Annotated", "FieldInfo", "<function"))
    ]
    found = {(row.path, row.kind): row for row in rows}
    assert (
        found["task.people", "knights_knaves"].values
        == "int, >= 2, <= 7 | list of (int, >= 2, <= 7), length >= 1"
    )
    assert found["method.weight.function", "custom"].default == "required"
    assert len({row.path for row in rows}) <= 166
    assert "a schedule {start, end, until}" in found["method.ratio.p", "holder"].values
    assert found["method.clip", ""].values.startswith("ppo | cispo") and found[
        "method.clip", ""
    ].values.endswith("null")


def test_yaml_words_and_exponents_are_read_as_in_yaml_1_2(tmp_path: Path):
    """YAML 1.1 reads `off` as false and 1e-4 as text."""
    (tmp_path / "a.yaml").write_text(
        "probes: {preset: off}\nhealth: {memory: {action: off}}\noptimizer: {lr: 1e-3}\n"
    )
    config = build_config(
        tmp_path / "a.yaml", ["update.gradient_checkpointing=yes", "method.kl.coef=1e-2"]
    )
    assert (
        config.probes.preset == config.health.memory.action == "off"
        and config.update.gradient_checkpointing
    )
    assert (config.optimizer.lr, config.method.kl.coef) == (1e-3, 0.01)
    (tmp_path / "b.yaml").write_text(to_yaml(labeled := build_config(None, ["method.label='1e5'"])))
    assert build_config(tmp_path / "b.yaml") == labeled
    with pytest.raises(UserError, match=r"probes\.preset"):
        build_config(None, ["probes.preset=true"])


def test_the_learning_rate_depends_on_the_policy_unless_it_is_given():
    assert build_config().optimizer.lr == 1e-4
    # its embedded policy
    assert build_config(values={"task": {"kind": "math"}}).optimizer.lr == 1e-4
    assert build_config(values={"policy.model": "Qwen/Qwen2.5-0.5B"}).optimizer.lr == 1e-6
    assert build_config(values={"policy.model": "x", "optimizer.lr": 0.01}).optimizer.lr == 0.01


def test_the_configuration_of_a_recorded_run_is_read(tmp_path: Path):
    """Settings that are gone are left out; those that changed the training must have their constant."""
    old = {"out": "elsewhere", "policy": {"attention": "auto"}}
    method = {"name": "dapo", "gone": {"kind": "x"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old | {"method": method}))
    found = read_recorded(tmp_path, {"steps": 3}, ["seed=4"])
    assert found.run_dir == tmp_path and (found.steps, found.seed) == (3, 4)
    assert found.method == named_method("dapo")
    for changes, says in (
        (
            {
                "method": method
                | {"tokens": {"kind": "bins", "include": ["pos_peak"], "exclude": ["neg_peak"]}}
            },
            r"exclude = .*: recorded by an earlier version; now it is \[\] always",
        ),
        ({"name": "x"}, "a run of version 0.2 can only be shown and analyzed"),
    ):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(old | changes))
        with pytest.raises(UserError, match=says):
            read_recorded(tmp_path)
    with pytest.raises(UserError, match="give the folder of a run"):
        read_recorded(tmp_path.parent)
    (tmp_path / "config.yaml").rename(tmp_path / "run.json")
    with pytest.raises(UserError, match="recorded from another trainer"):
        read_recorded(tmp_path)


# -- configurations under experiments/paper ----------------------------------------------------------------------------

PAPER = sorted((Path(__file__).resolve().parents[2] / "experiments" / "paper").glob("*.yaml"))


def preset(name: str):
    return build_config(next(path for path in PAPER if path.name.startswith(name)))


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_a_preset_is_a_valid_configuration_that_says_what_is_ours(path):
    text = path.read_text()
    config = build_config(path)
    assert "Ours" in text and "From the paper" in text
    # what any model but the embedded ones gets
    weight = config.method.weight.with_preset("auto", "paper")
    assert isinstance(weight, SigmoidWeight)
    assert weight.constants() == {
        "alpha": 2.0,
        "tau": 9.0,
        "mu": 0.25,
        "L": 1.0,
        "U": 1.4,
        "u0": 0.0,
    }
    assert config.policy.dtype == "bfloat16" and config.update.gradient_checkpointing
    given = yaml.safe_load(text)
    assert given["method"]["name"] == "grpo-sg" and given["policy"]["model"] == config.policy.model


def test_the_presets_have_the_published_settings():
    config = preset("knights_knaves")
    assert (config.task.sizes, config.task.train_size, config.task.heldout_size) == (
        (3, 4, 5, 6, 7),
        900,
        100,
    )
    assert (
        config.rollout.prompts_per_step,
        config.rollout.group_size,
        config.rollout.temperature,
    ) == (64, 8, 0.7)
    assert (config.optimizer.lr, config.steps, config.method.kl.coef) == (1e-6, 350, 0.001)
    assert (config.method.clip.low, config.method.clip.high) == (0.2, 0.24)
    task, config = preset("search_r1").task, preset("deepscaler")
    assert (task.style, task.turns, task.top) == ("search_r1", 4, 3)
    assert config.evaluation.samples == 16 and config.task.scorer == "math"


@pytest.mark.parametrize(
    ("field", "value"),
    [("rollout.group_size", 1e50), ("rollout.group_size", 10**6), ("evaluation.prompts", 10**30)],
)
def test_a_number_without_bound_is_refused(field, value):
    with pytest.raises(UserError, match=field.rpartition(".")[2]):
        build_config(values={field: value})


def test_a_message_quotes_the_start_and_the_end_of_a_long_value():
    with pytest.raises(UserError) as refused:
        build_config(values={"method": "x" * 5000})
    message = str(refused.value)
    assert len(message) < 1600 and message.startswith("method = 'xxx") and "x … x" in message
    assert str(UserError("short")) == "short"


def test_a_setting_that_is_gone_is_dropped_only_where_it_had_its_constant():
    recorded = {"lr": 1e-3, "beta1": 0.9}
    assert known_settings(OptimizerSpec, recorded) == {"lr": 1e-3}
    with pytest.raises(UserError, match=r"beta1 = 0.8: .* now it is 0.9 always"):
        known_settings(OptimizerSpec, recorded | {"beta1": 0.8})
    # also within a part
    assert known_settings(RunConfig, {"optimizer": recorded}) == {"optimizer": {"lr": 1e-3}}
    with pytest.raises(UserError, match=r"beta1 = 0.8"):
        known_settings(RunConfig, {"optimizer": recorded | {"beta1": 0.8}})
