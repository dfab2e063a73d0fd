"""Configuration: every mistake is one line with the place and the fix; what is saved is read back to the same value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from sharpscope.config import RunConfig, TokenWeight, build_config, explain_fields, merge, parse_override, to_yaml
from sharpscope.errors import UserError


def test_defaults_are_valid_and_survive_yaml(tmp_path: Path):
    config = build_config()
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert build_config(file) == config


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=grpo-sg", "method.weight.tau=4", "method.weight_on=ratio"],
        ["method=grpo-sg-shuffled"],
        ["method=holder", "method.ratio.p={kind: linear, start: 1.0, end: 0.0}"],
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
    file.write_text("method: {name: grpo-sg, weight: {tau: 3.0}}\nsteps: 7\noptimizer: {lr: 0.001}\n")
    config = build_config(file, ["optimizer.lr=1e-5", "method.weight.U=1.5"], {"steps": 9})
    assert (config.steps, config.optimizer.lr, config.method.weight.tau, config.method.weight.U) == (9, 1e-5, 3.0, 1.5)
    assert build_config(file, [], {"method": "grpo"}).method.weight.kind == "uniform"


def test_a_part_that_changes_its_kind_starts_afresh():
    config = build_config(None, ["method=grpo-sg", "method.weight.kind=power"])
    assert config.method.weight.kind == "power" and not hasattr(config.method.weight, "tau")
    assert merge({"a": {"kind": "x", "b": 1}}, {"a": {"kind": "x", "c": 2}}) == {"a": {"kind": "x", "b": 1, "c": 2}}


def test_settings_given_before_their_kind_or_name_are_kept(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("task: {people: [4]}\nmethod: {weight_on: ratio}\n")
    config = build_config(file, [], {"task": {"kind": "knights_knaves"}, "method": "grpo-sg"})
    assert config.task.people == (4,)
    assert (config.method.weight.kind, config.method.weight_on) == ("sigmoid", "ratio")
    first = build_config(None, ["method.kl.coef=0.1", "method.name=grpo"])
    assert first.method == build_config(None, ["method=grpo", "method.kl.coef=0.1"]).method
    assert first.method.kl.coef == 0.1
    # one name by another starts afresh
    assert (
        build_config(None, ["method=tr-grpo", "method.weight_on=ratio", "method=grpo"]).method.weight_on == "surrogate"
    )


@pytest.mark.parametrize(
    ("values", "overrides", "says"),
    [
        ({"task.people": [4], "task": {"kind": "math"}}, [], "task.people: unknown field"),
        ({}, ["method.weight.tau=4", "method.weight.kind=power"], "method.weight.tau: unknown field"),
        ({}, ["method.tokens.share=0.1", "method=grpo"], "method.tokens.share: unknown field"),
    ],
)
def test_kept_settings_that_do_not_fit_are_named(values, overrides, says):
    with pytest.raises(UserError, match=says):
        build_config(None, overrides, values)


def test_ablations_get_names_of_their_own():
    plain, changed = (
        build_config(None, ["method=grpo-sg"]),
        build_config(None, ["method=grpo-sg", "method.weight.tau=4"]),
    )
    assert plain.run_name == "grpo-sg-knights_knaves-s0"
    assert changed.run_name == "grpo-sg+weight.tau=4-knights_knaves-s0"
    # the default preset given by name is not an ablation
    named = build_config(None, ["method=grpo-sg", "method.weight.preset=calibrated"])
    assert named.run_name == plain.run_name
    other = build_config(None, ["method=grpo-sg", "method.weight.preset=paper"])
    assert other.run_name != plain.run_name


def test_weights_of_version_01_count_tokens_as_they_did(tmp_path):
    """It wrote every field of a weight; the named methods have counted tokens by their gradient since."""
    sigmoid = {
        "kind": "sigmoid",
        "preset": "auto",
        "input": "logit",
        **dict.fromkeys(["alpha", "tau", "mu", "L", "U", "u0"]),
    }
    file = tmp_path / "config.yaml"
    for name, weight in (
        ("grpo-sg", sigmoid),
        ("grpo-sg-shuffled", {"kind": "shuffled", "of": sigmoid}),
        ("grpo-sg-reverse", {"kind": "reverse", "of": sigmoid}),
        ("ar-constant", {"kind": "constant", "of": {"kind": "linear", "alpha": 0.2}}),
    ):
        file.write_text(json.dumps({"method": {"name": name, "weight": weight}}))
        old, new = build_config(file).method.weight, build_config(None, [f"method={name}"]).method.weight
        assert old == TypeAdapter(TokenWeight).validate_python(weight)  # the class's own defaults
        assert old != new
    file.write_text("method: {name: grpo-sg, weight: {kind: sigmoid, tau: 3.0}}")  # an ablation: only what it changes
    assert build_config(file).method.weight.percentiles == "gradient"
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(build_config(None, ["method=grpo-sg-shuffled"])))
    assert build_config(again).method == build_config(None, ["method=grpo-sg-shuffled"]).method


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout.temprature=1"], "rollout.temprature: unknown field; did you mean 'temperature'"),
        (["optimiser.lr=1"], "optimiser: unknown field; did you mean 'optimizer'"),
        (["rollout.temperature=-1"], "rollout.temperature = -1"),
        (["rollout.group_size=1"], "rollout.group_size = 1"),
        (["steps=many"], "steps = 'many'"),
        (["method=grpo_sg"], "did you mean 'grpo-sg'"),
        (["method.weight.kind=sigmod"], "method.weight.kind = 'sigmod': unknown; did you mean 'sigmoid'"),
        (["method.weight.tau=1"], "method.weight.tau: unknown field"),
        (["method=grpo-sg", "method.weight.tau=-1"], "tau"),
        (["name=../escape"], "name = '../escape'"),
        (["name=.hidden"], "name"),
        (["task.people=9"], "task.people"),
        (
            ["update.mini_batches=25"],
            "update.mini_batches = 25 must be at most rollout.prompts_per_step = 24, since groups are not split",
        ),
        (["rollout.prompts_per_step=1"], "set update.mini_batches to 1"),
        (["steps"], "--set steps: must have the form"),
        (["steps=[1"], "not valid YAML"),
        (["method=[1]"], "method = [1]"),
        (["evaluation.temperatures=[]"], "must be one or more temperatures"),
        (["optimizer.warmup_steps=5", "steps=5"], "optimizer.warmup_steps = 5 must be less than steps = 5"),
        (["method=grpo-sam", "recording.update_attribution=true"], "set recording.update_attribution to false"),
        (["method=grpo-gnp", "recording.update_attribution=true"], "recording.update_attribution = true"),
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
        ("&a [*a]", "file"),
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


def test_numbers_in_scientific_notation_are_numbers():
    assert parse_override("optimizer.lr=1e-4") == {"optimizer": {"lr": 1e-4}}
    assert parse_override("name=run-1") == {"name": "run-1"}


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
fields = st.sampled_from([*RunConfig.model_fields, "nonsense", ""])


@settings(max_examples=150, deadline=None)
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


def test_every_field_is_explained():
    def undocumented(model: type[BaseModel], place: str):
        for name, info in model.model_fields.items():
            if not info.description and name not in ("kind",):
                yield f"{place}{name}"
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                yield from undocumented(info.annotation, f"{place}{name}.")

    assert list(undocumented(RunConfig, "")) == []
    lines = explain_fields(build_config())
    assert any(line.startswith("optimizer.lr = 0.0001") for line in lines)
    unreadable = [line for line in lines if "Annotated" in line or "FieldInfo" in line or "<function" in line]
    assert unreadable == []
    assert any(
        line.startswith("task.people = 3  [int, >= 2, <= 7 | list of (int, >= 2, <= 7), length >= 1]") for line in lines
    )
    assert any(line.startswith("name = null  [str | null]") for line in lines)
    assert any(line.startswith("health.truncation: Applies above") for line in lines)
    (task,) = (line for line in lines if line.startswith("task.kind = "))
    assert '"math"' in task and '"knights_knaves"' in task


def test_a_bare_off_is_no_truth_value():
    """YAML reads `off` as false; who turns the probes off on the command line means the word."""
    assert build_config(None, ["probes.preset=off"]).probes == build_config(None, ['probes.preset="off"']).probes
    assert build_config(None, ["health.memory.action=off"]).health.memory.action == "off"
    with pytest.raises(UserError, match=r"probes\.preset"):
        build_config(None, ["probes.preset=true"])


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "../a", "/tmp", "a\\b", "a\nb", "\x1b[31m", "a b", ".a", "-a", "a" * 200]
)
def test_a_run_name_cannot_leave_its_folder(name):
    with pytest.raises(UserError, match="must be at most 128 letters, digits"):
        build_config(values={"name": name})


def test_a_plain_run_name_is_used(tmp_path: Path):
    assert (
        build_config(values={"out": str(tmp_path), "name": "grpo-sg_lr=1e-4.seed3"}).run_dir
        == tmp_path / "grpo-sg_lr=1e-4.seed3"
    )
