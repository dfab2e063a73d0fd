"""Health rules by value: when each fires, what it prevents, and that a person sees it."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM

import sharpscope
from sharpscope.analysis import show
from sharpscope.config.run import HealthSpec
from sharpscope.errors import UserError
from sharpscope.memory import container_memory
from sharpscope.policy import load_policy
from sharpscope.rules.judging import judge, robust_z, sampler_values
from sharpscope.rules.measures import EARLY, OfLastStep, drift
from sharpscope.rules.table import RULES
from sharpscope.training import loop, train
from sharpscope.training import updates as updates_module
from sharpscope.training.checkpoint import checkpoints

QUIET = {"evaluation__every": 0, "recording__token_gradients_every": 0, "steps": 2}


def weights(folder):
    return [p.detach() for p in AutoModelForCausalLM.from_pretrained(folder).parameters()]


def unmoved(config) -> bool:
    """Whether the run's last checkpoint has the weights that it began with."""
    before, after = weights(config.policy.model), weights(checkpoints(config.run_dir)[-1])
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


SURE = {  # rule -> settings with which it fires at every step of the toy run
    "dead_groups": {"health__dead_groups__threshold": 0.0},
    "truncation": {"rollout__max_new_tokens": 2, "task__factory": "tests.toy_task:always_wrong"},
    "weight_saturation": {"health__weight_saturation__threshold": 0.0, "method": "grpo-sg"},
    "memory": {"health__memory__threshold": 0.0},
}


@pytest.mark.parametrize("rule", SURE)
def test_skip_step_leaves_the_weights_as_they_are_and_records_the_tokens(toy_config, rule):
    config = toy_config(**(QUIET | SURE[rule] | {f"health__{rule}__action": "skip_step"}))
    assert train(config).status == "finished" and unmoved(config)
    run = sharpscope.load_run(config.run_dir)
    assert (
        (run.steps["updates"] == 0).all()
        and run.steps["grad_norm"].isna().all()
        and run.steps["lr"].isna().all()
    )
    assert run.tokens()["logp"].notna().all() and len(run.tokens()) == run.steps["tokens"].sum()
    events = run.events[run.events["rule"] == rule]
    assert events["step"].tolist() == [1, 2] and set(events["action"]) == {"skip_step"}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(show(run))
    assert re.search(rf"{rule} +2 +2 ", console.export_text())  # rule, times, last step


def test_stop_ends_the_run_before_the_update_with_a_checkpoint(toy_config):
    config = toy_config(
        **(
            QUIET
            | SURE["truncation"]
            | {"health__truncation__action": "stop", "checkpoint__every": 0}
        )
    )
    outcome = train(config)
    assert (outcome.status, outcome.steps_done) == ("failed", 1) and outcome.reason.startswith(
        "truncation"
    )
    assert unmoved(config)
    run = sharpscope.load_run(config.run_dir)
    assert run.status == "failed" and run.info["end"] == outcome.reason and len(run.steps) == 1


@pytest.mark.parametrize(("value", "action"), [(-math.inf, "skip_step"), (math.nan, "stop")])
def test_a_gradient_that_is_not_finite_is_left_out(toy_config, monkeypatch, value, action):
    """One entry of the second gradient is spoilt."""
    calls, plain = [], updates_module.gradient_norms

    def spoilt(parameters, groups):
        calls.append(True)
        if len(calls) == 2:
            parameters[0].grad.view(-1)[0] = value
        return plain(parameters, groups)

    monkeypatch.setattr(updates_module, "gradient_norms", spoilt)
    outcome = train(toy_config(steps=3, evaluation__every=0, health__non_finite=action))
    run = sharpscope.load_run(outcome.run_dir)
    (event,) = run.events[run.events["rule"] == "non_finite"].to_dict("records")
    assert (
        event["step"] == 2
        and "the gradient is not finite" in event["message"]
        and event["action"] == action
    )
    assert not math.isfinite(event["value"])
    assert run.steps["updates"].tolist() == ([1, 0, 1] if action == "skip_step" else [1, 0])
    assert (outcome.status, outcome.steps_done) == (
        ("finished", 3) if action == "skip_step" else ("failed", 2)
    )
    assert all(torch.isfinite(w).all() for w in weights(checkpoints(outcome.run_dir)[-1]))


def test_a_sampler_that_disagrees_with_the_trainer_is_noticed(toy_config, monkeypatch):
    plain = loop.draw_rollouts

    def off(*arguments, **options):
        drawn = plain(*arguments, **options)
        return replace(
            drawn,
            rollouts=replace(drawn.rollouts, behavior_logp=drawn.rollouts.behavior_logp - 0.2),
        )

    monkeypatch.setattr(loop, "draw_rollouts", off)
    run = sharpscope.load_run(train(toy_config(**QUIET)).run_dir)
    events = run.events[run.events["rule"] == "logp_mismatch"]
    np.testing.assert_allclose(events["value"], 0.2, atol=1e-4)
    tokens = run.tokens()
    gap = (tokens["logp"] - tokens["behavior_logp"]).abs().groupby(tokens["step"]).mean()
    np.testing.assert_allclose(events["value"], gap, rtol=1e-4)


@pytest.mark.parametrize("weight_on", ["ratio", "surrogate"])
def test_clipped_weights_are_the_tokens_with_an_advantage_and_no_gradient(toy_config, weight_on):
    """One update a step: the ratio is 1, so a token of a group that teaches has no gradient only where its weight is clipped."""
    method = {
        "method": "tr-grpo",
        "method__weight_on": weight_on,
        "method__weight__preset": "calibrated",
    }
    config = toy_config(**method, health__clipped_weights__threshold=0.0, **QUIET)
    run = sharpscope.load_run(train(config).run_dir)
    events = run.events[run.events["rule"] == "clipped_weights"].set_index("step")["value"]
    tokens = run.tokens()
    dead = ((tokens["advantage"] != 0) & (tokens["loss_coef"] == 0)).groupby(tokens["step"]).mean()
    np.testing.assert_allclose(events, dead[dead > 0])
    assert bool(len(events)) is (weight_on == "ratio")


def test_broken_weights_are_neither_measured_nor_saved_over_good_ones(toy_config, monkeypatch):
    settings = {
        "steps": 4,
        "checkpoint__every": 1,
        "checkpoint__keep_last": 1,
        "evaluation__every": 1,
    }
    whole, broken = toy_config(name="whole", **settings), toy_config(name="broken", **settings)
    train(whole)
    plain, calls = torch.optim.AdamW.step, []

    def spoilt(self, *arguments, **options):
        plain(self, *arguments, **options)
        calls.append(True)
        if len(calls) == 3:
            parameter = self.param_groups[0]["params"][0]
            self.state[parameter]["exp_avg"].fill_(math.inf)
            parameter.data.fill_(math.nan)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", spoilt)
        outcome = train(broken)
    assert (outcome.status, outcome.steps_done) == (
        "failed",
        3,
    ) and "model weights" in outcome.reason
    assert [folder.name for folder in checkpoints(broken.run_dir)] == ["step-000002"]
    run = sharpscope.load_run(broken.run_dir)
    assert run.eval["step"].max() == 2 and run.steps["step"].tolist() == [1, 2, 3]
    assert train(broken, resume=True).status == "finished"
    one, two = (weights(checkpoints(config.run_dir)[-1]) for config in (whole, broken))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_an_update_that_destroys_the_policy_is_noticed_after_one_step_and_can_stop_the_run(
    toy_config,
):
    """KL(π_old‖π) is that of the step's completions under the policy before and after it."""
    config = toy_config(
        **(QUIET | {"steps": 6, "optimizer__lr": 1.0, "health__policy_destroyed__action": "stop"})
    )
    outcome = train(config)
    assert outcome.status == "failed" and outcome.reason.startswith("policy_destroyed")
    run = sharpscope.load_run(config.run_dir)
    (event,) = run.events[run.events["rule"] == "policy_destroyed"].to_dict("records")
    assert (
        event["step"] == outcome.steps_done == run.steps["step"].max()
        and "optimizer.lr (now 1)" in event["message"]
    )
    assert event["value"] == run.steps["kl_step"].iloc[-1] > 0.5
    gentle = sharpscope.load_run(
        train(toy_config(name="gentle", **QUIET, optimizer__lr=1e-4)).run_dir
    )
    made = gentle.steps["updates"] > 0
    assert (
        made.any()
        and (gentle.steps["kl_step"][made] < 0.01).all()
        and (gentle.steps["kl_step"][made] >= 0).all()
    )


def test_the_kl_of_a_step_is_that_between_its_policies(toy_config):
    """Of one step on few completions, all of which are scored: equal to the value from the two checkpoints."""
    config = toy_config(
        **(QUIET | {"steps": 1, "rollout__prompts_per_step": 2, "rollout__group_size": 2})
    )
    train(config)
    run = sharpscope.load_run(config.run_dir)
    tokens = run.tokens()
    policy = load_policy(
        config.policy.model_copy(update={"model": str(checkpoints(config.run_dir)[-1])})
    )
    rows = run.rollouts.sort_values("rollout")
    total, count = 0.0, 0
    for row in rows.itertuples():
        own = tokens[tokens["rollout"] == row.rollout].sort_values("position")
        prompt = policy.tokenizer(row.prompt)["input_ids"]
        ids = torch.tensor([[*prompt, *own["token_id"]]])
        with torch.no_grad():
            logp = policy.model(ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        new = logp.gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
        change = new - own["logp"].to_numpy()
        total, count = total + float((np.expm1(change) - change).sum()), count + len(own)
    assert run.steps["kl_step"].iloc[0] == pytest.approx(total / count, rel=1e-3)


def test_cut_completions_are_reported_at_steps_where_none_of_them_is_right(toy_config):
    """Plain prompts are often continued beyond a right answer."""
    config = toy_config(
        **(QUIET | {"rollout__max_new_tokens": 2, "steps": 4, "rollout__group_size": 8})
    )
    train(config)
    run = sharpscope.load_run(config.run_dir)
    right = (
        (run.rollouts["truncated"] & run.rollouts["correct"]).groupby(run.rollouts["step"]).any()
    )
    cut = run.rollouts.groupby("step")["truncated"].mean() >= 0.5
    assert (right & cut).any()
    assert run.events.loc[run.events["rule"] == "truncation", "step"].tolist() == list(
        right.index[~right & cut]
    )


def test_a_containers_limit_counts_without_the_page_cache(tmp_path):
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert container_memory(tmp_path) == (600, 1000)
    (tmp_path / "memory.max").write_text("max\n")
    assert container_memory(tmp_path) == (0.0, math.inf) == container_memory(tmp_path / "none")


# -- The rules themselves: when each applies, relative to a run's own steps where it is, and what it says

LIVE = [name for name, rule in RULES.items() if rule.known != "log"]
OF_ONE_STEP = [  # whose measure of a single step is the quantity itself
    name
    for name in LIVE
    if len(RULES[name].quantities) == 1
    and RULES[name].measure({RULES[name].quantities[0]: np.full(1, 2.0)})[-1] == 2
]
assert len(OF_ONE_STEP) > 5


@pytest.mark.parametrize("name", OF_ONE_STEP)
@pytest.mark.parametrize("action", ["off", "warn", "stop"])
def test_a_rule_applies_from_its_threshold_on(name, action):
    rule, spec = RULES[name], HealthSpec.model_validate({name: {"action": action}})
    assert getattr(HealthSpec(), name).threshold == rule.threshold
    (quantity,) = rule.quantities
    for value in (rule.threshold * 0.9, math.nan, None):
        assert judge(7, {quantity: value}, spec.limits) == []
    for value in (rule.threshold, rule.threshold * 1.1):
        found = judge(7, {quantity: value}, spec.limits)
        if action == "off":
            assert found == []
            continue
        (event,) = found
        assert (event.step, event.rule, event.action) == (7, name, action)
        assert event.value == pytest.approx(value)
        assert event.severity == ("error" if action == "stop" else rule.level(value))
        assert event.message and not set("{}\n") & set(event.message)


def test_a_rule_known_after_the_updates_cannot_skip_them():
    from sharpscope.config import build_config

    with pytest.raises(UserError, match="policy_destroyed"):
        build_config(values={"health.policy_destroyed.action": "skip_step"})


def test_the_last_step_is_judged_by_the_groups_of_the_step_before():
    """What a step's gradient is likely to be by chance depends on its own groups, not on those of the step after."""
    steps = 14
    history = {
        "grad_norm": np.array([1.0] * 6 + [0.0] * 8),
        "entropy": np.linspace(1, 2, steps),
        "groups": np.array([1.0] * (steps - 1) + [8.0]),
    }
    assert drift(history)[-1] == 0
    assert drift(OfLastStep(history))[-1] == 0


@st.composite
def histories(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Values of each quantity, some of which are missing or not finite."""
    steps, seed = draw(st.integers(1, 150)), draw(st.integers(0, 2**31))
    odd, scale = draw(st.sampled_from([0.0, 0.1, 0.6])), draw(st.sampled_from([0.02, 1.0]))
    random = np.random.default_rng(seed)
    history = {}
    for name in sorted({name for rule in RULES.values() for name in rule.quantities}):
        values = np.abs(50 + scale * random.normal(0, 20, steps).cumsum()) * random.choice(
            [1.0, -1.0], p=[0.9, 0.1]
        )
        others = random.choice([math.nan, math.inf, 0.0], steps)
        history[name] = np.where(random.random(steps) < odd, others, values)
    return history


@given(histories(), st.integers(0, 149))
@settings(max_examples=100, deadline=None)
def test_no_measure_looks_ahead(history, at):
    """A rule says the same of a step in a running training and in its log. (One judges whole runs; one is three steps late.)"""
    at = min(at, len(history["reward"]) - 1)
    cut = {name: values[: at + 1] for name, values in history.items()}
    for name, rule in RULES.items():
        now = rule.measure(cut)
        np.testing.assert_array_equal(rule.measure(OfLastStep(cut))[-1], now[-1], err_msg=name)
        if rule.window and name != "policy_destroyed":
            np.testing.assert_allclose(now, rule.measure(history)[: at + 1], err_msg=name)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=120))
@settings(max_examples=50, deadline=None)
def test_spikes_are_those_of_the_robust_z_score(norms):
    """Against the score that the recorders compute step by step."""
    found = RULES["gradient_spike"].measure({"grad_norm": np.array(norms)})
    logs = [math.log(norm) for norm in norms]
    for at in range(len(norms)):
        z = robust_z(logs[:at], logs[at])
        if math.isnan(z):
            assert math.isnan(found[at])
        elif abs(z - 4) > 1e-9:
            assert found[at] == pytest.approx(
                math.exp(logs[at] - np.median(logs[max(0, at - 50) : at])) if z > 4 else 0
            )


def last(name: str, **values: list[float]) -> float:
    return float(
        RULES[name].measure(
            {quantity: np.array(of, dtype=float) for quantity, of in values.items()}
        )[-1]
    )


def test_measures_by_value():
    """Worked out by hand."""
    assert last("entropy_collapse", entropy=[2, 2, 4, 2, 2, 0.5]) == 0.25
    assert math.isnan(last("entropy_collapse", entropy=[2.0] * EARLY))  # the early steps themselves
    assert last("gradient_growth", grad_norm=[1.0] * 5 + [3.0] * 10) == 3
    # of the last ten
    assert last("dead_groups", dead_groups=[0.1] + [1] * 5 + [0.5] * 5) == pytest.approx(0.75)
    # Three steps without a gradient; two may be chance.
    assert last("drift", entropy=[2, 1, 1, 1.25, 1.5], grad_norm=[1, 0, 0, 0, math.nan]) == 0.5
    assert last("drift", entropy=[2, 1, 1.25, 1.5], grad_norm=[1, 0, 0, math.nan]) == 0
    assert math.isnan(last("drift", entropy=[2, 1], grad_norm=[1, 1]))
    assert last("entropy_rise", entropy=[1.0] * 10 + [0.5] * 10 + [1.0] * 10) == 0.5
    assert last("entropy_rise", entropy=[1.0] * 10 + [1.4] * 10) == 0  # less than 1.5 times
    assert last("zero_gradient", grad_norm=[1, 1, 1, 0, 0, 0, 0]) == pytest.approx(4 / 7)
    assert last("reward_constant", reward=[0.5] * 3 + [0.1] * 6 + [0.2]) == 0.1
    assert last("kl_sign", kl=[0.1] * 8 + [-0.1] * 2) == 0.2
    assert last("ratio_tail", ratio_max=[2.0], ratio_min=[0.05]) == 20
    assert last("non_finite", loss=[math.inf], reward=[math.nan]) == 1
    # noise of 0.1 a step; five steps at 0 after means of 1: 10 standard deviations over sqrt(1/5 + 1/10)
    reward = [1 + 0.1 / 1.4826 * np.sqrt(2) * (-1) ** k / 2 for k in range(20)] + [0.0] * 5
    best = 1 + 0.1 / 1.4826 / np.sqrt(2) / 3  # the mean of the first three
    assert last("reward_collapse", reward=reward) == pytest.approx(
        best * 10 / math.sqrt(0.3), rel=1e-6
    )
    # a tenth is no collapse
    assert last("reward_collapse", reward=[0.9, 1.1] * 10 + [0.9] * 5) == 0


def test_the_samplers_values():
    logp = -np.linspace(0.5, 3, 100)
    off = logp.copy()
    off[:3] += 0.2
    assert sampler_values(logp, np.full(100, np.nan)) == {}
    equal = {"sampler_impossible": 0.0, "sampler_outside": 0.0, "mismatch": 0.0, "ratio_max": 1.0}
    assert sampler_values(logp, logp) == equal
    assert sampler_values(logp, off)["sampler_outside"] == 0.03
    for wrong, share in (
        (np.zeros(100), 1.0),
        (np.full(100, -1.5), 1.0),  # the same for all
        (np.where(np.arange(100) < 25, 0.0, logp), 0.25),
        (np.where(np.arange(100) < 10, 0.5, logp), 0.1),
        (np.where(np.arange(100) < 10, 1e-5, logp), 0.0),  # rounding
    ):
        assert sampler_values(logp, wrong)["sampler_impossible"] == share
    half = np.where(np.arange(100) < 50, off, np.nan)  # the server gave half of them
    assert sampler_values(logp, half)["sampler_outside"] == 0.06
    # bfloat16 in chunks of 1 and of 8, without any sampler
    healthy = {
        "sampler_outside": 0.08,
        "mismatch": 0.04,
    }
    assert judge(1, healthy, HealthSpec().limits) == []
