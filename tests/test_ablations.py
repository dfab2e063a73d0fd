"""Every file of experiments/ablations plans, covers what it should, and its smoke size trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from sharpscope.config import RunConfig, build_config, token_weight_kinds
from sharpscope.config.token_weights import SigmoidWeight
from sharpscope.objective import calibrate, policy_loss, prepare, token_normalizer
from sharpscope.sweeps import plan_sweep, read_sweep
from sharpscope.tasks import Example, make_task
from sharpscope.traces import load_run
from sharpscope.training import train
from tests.objective.data import LIMIT, make_case

FOLDER = Path(__file__).parents[1] / "experiments" / "ablations"
FILES = sorted(FOLDER.glob("*.yaml"))


def methods_of(file: Path, smoke: bool = False) -> dict:
    """Run name → method, of the first seed."""
    spec = read_sweep(file).model_copy(update={"seeds": (0,)})
    return {run.name: run.config.method for run in plan_sweep(spec, smoke)}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_plans_and_says_what_for(file: Path):
    spec = read_sweep(file)
    assert len(spec.purpose) > 60
    assert spec.smoke["steps"] == 1
    assert spec.out == f"runs/ablations/{file.stem}"
    runs = methods_of(file)
    parts = [method.model_dump_json(exclude={"name"}) for method in runs.values()]
    if file.stem != "learning_rate":
        assert len(set(parts)) == len(parts)  # no two runs of a seed are the same experiment


def test_the_files_cover_every_token_weight():
    used = {m.weight.kind for file in FILES for m in methods_of(file).values()}
    assert used | {"custom"} == set(token_weight_kinds())


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_method_of_a_file_gives_a_gradient(file: Path):
    for name, method in methods_of(file).items():
        case = make_case(method, 0)
        method = method.model_copy(update={"weight": calibrate(method.weight, case.step)})
        plan = prepare(method, case.step, torch.Generator().manual_seed(0))
        logp = case.now.clone().requires_grad_()
        out = policy_loss(
            method,
            plan,
            logp,
            token_normalizer(method, case.mask, LIMIT, keep=plan.keep, group=case.step.group),
            reference_logp=case.reference,
            proximal_logp=case.proximal,
        )
        out.loss.backward()
        assert bool(torch.isfinite(logp.grad).all()), name
        assert float(logp.grad.abs().sum()) > 0, name


LOOP = ("grpo", "grpo-sg", "lopti", "holder", "dapo", "ppo-ewma", "lp-reg", "grpo-sam", "otb", "gdpo", "maxrl")
"""Methods that ask something else of the training loop than plain GRPO."""


def trained() -> list:
    """`LOOP` of neighbours, and the last run of every other file."""
    params = []
    for file in FILES:
        runs = plan_sweep(read_sweep(file).model_copy(update={"seeds": (0,)}), smoke=True)
        chosen = [run for run in runs if run.config.method.name in LOOP] if file.stem == "neighbours" else runs[-1:]
        params += [pytest.param(run.config, id=f"{file.stem}:{run.name}") for run in chosen]
    return params


@pytest.mark.parametrize("config", trained())
def test_the_smoke_size_trains(config: RunConfig, tiny_policy: Path, tmp_path: Path):
    """One step of a random policy on a toy task, with everything else as the sweep has it."""
    data = config.model_dump(mode="json")
    data |= {"task": {"kind": "custom", "factory": "tests.toy_task:vowels"}, "out": str(tmp_path / "run"), "threads": 1}
    data["policy"]["model"] = str(tiny_policy)
    data["probes"]["check"] = "off"
    if data["method"]["advantage"]["kind"] == "decoupled":
        data["method"]["advantage"]["weights"] = {"vowels": 1.0}
    outcome = train(RunConfig.model_validate(data))
    assert outcome.status == "finished"
    run = load_run(outcome.run_dir)
    assert len(run.steps) == 1
    assert float(run.steps["grad_norm"].iloc[0]) > 0
    assert run.steps["updates"].iloc[0] == 2 * config.method.pass_count
    assert bool((run.tokens()["weight"] >= 0).all())


# -- The configurations under experiments/ are valid, and those named after the paper hold its constants

PAPER = sorted((Path(__file__).resolve().parents[1] / "experiments" / "paper").glob("*.yaml"))


def preset(name: str):
    return build_config(next(path for path in PAPER if path.name.startswith(name)))


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_a_preset_is_a_valid_configuration_that_says_what_is_ours(path):
    text = path.read_text()
    config = build_config(path)
    assert "Ours" in text and "From the paper" in text
    weight = config.method.weight.with_preset("auto", "paper")  # what any model but the embedded ones gets
    assert isinstance(weight, SigmoidWeight)
    assert weight.constants() == {"alpha": 2.0, "tau": 9.0, "mu": 0.25, "L": 1.0, "U": 1.4, "u0": 0.0}
    assert config.policy.dtype == "bfloat16" and config.update.gradient_checkpointing
    given = yaml.safe_load(text)
    assert given["method"]["name"] == "grpo-sg" and given["policy"]["model"] == config.policy.model


def test_the_logic_preset_has_the_published_setting():
    config = preset("knights_knaves")
    assert config.policy.model == "Qwen/Qwen2.5-3B"
    assert (config.task.sizes, config.task.train_size, config.task.heldout_size) == ((3, 4, 5, 6, 7), 900, 100)
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.rollout.temperature) == (64, 8, 0.7)
    assert config.rollout.prompts_per_step * config.rollout.group_size // config.update.mini_batches == 256
    assert (config.optimizer.lr, config.steps, config.method.kl.coef) == (1e-6, 350, 0.001)
    assert (config.method.clip.low, config.method.clip.high) == (0.2, 0.24)
    small = config.task.model_copy(update={"people": 3, "train_size": 1, "heldout_size": 1})
    task = make_task(small)
    example: Example = task.splits()["train"][0]
    roles = example.answer
    assert task.score(example, f"because </think> <answer>{roles}</answer>").total in (3.0, -0.5)
    assert task.score(example, "no answer").total == -3.0


def test_the_tool_preset_has_search_r1s_protocol():
    task = preset("search_r1").task
    assert (task.style, task.turns, task.top, task.reward) == ("search_r1", 4, 3, "exact_match")


def test_the_mathematics_preset_measures_avg_at_16():
    config = preset("deepscaler")
    assert config.evaluation.samples == 16 and config.task.scorer == "math"
    assert "{prompt}" in config.task.template and "\\boxed{}" in config.task.template
