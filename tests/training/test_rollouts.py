"""The advantages of a drawn step, which groups dynamic sampling keeps, evaluation, and conversations with an environment."""

from __future__ import annotations

import importlib
import itertools
import string

import numpy as np
import pytest
import torch

import sharpscope
from sharpscope import load_run
from sharpscope.config.run import EvaluationSpec
from sharpscope.objective import named_method
from sharpscope.policy import SamplingSpec, draw_scored, load_policy
from sharpscope.policy.forward import Scorer
from sharpscope.recording.rows import clipped_weight_share, completion_advantage
from sharpscope.seeds import derive
from sharpscope.tasks import Example, Reward, make_task
from sharpscope.training import train
from sharpscope.training.evaluate import evaluate
from sharpscope.training.rollouts import MAX_REDRAWS, DataOrder, draw_rollouts
from tests.oracles import objective as oracle
from tests.oracles.generation import completion_logp
from tests.training.test_learner import gradient


def drawn(config, **changes):
    task = make_task(config.task)
    order = DataOrder(task.splits()["train"], 0)
    return draw_rollouts(
        load_policy(config.policy), task, order, config.method, config.rollout, seed=0, step=1, **changes
    )


def as_oracle(batch, keep=None) -> oracle.Batch:
    """The completions `keep` of a step, with what advantages depend on."""
    rollouts = batch.rollouts
    keep = range(len(rollouts)) if keep is None else keep
    parts = {name: [batch.rewards[i].parts.get(name, 0.0) for i in keep] for name in ("answer", "format")}
    masks = rollouts.completion_mask.bool().tolist()
    return oracle.Batch(
        [float(rollouts.reward[i]) for i in keep],
        [int(rollouts.group[i]) for i in keep],
        [masks[i] for i in keep],
        parts=parts,
    )


def test_dynamic_sampling_goes_by_accuracy_not_by_reward(toy_config):
    """DAPO: 0 < correct < G."""
    wrong = drawn(toy_config(method="dapo", task__factory="tests.toy_task:wrong_but_rewarded"))
    assert wrong.redrawn_groups == MAX_REDRAWS * 4 and wrong.zero_variance_share < 1
    equal = drawn(toy_config(method="dapo", task__factory="tests.toy_task:equally_rewarded", rollout__group_size=8))
    correct = np.array([reward.correct for reward in equal.rewards]).reshape(4, 8).sum(1)
    assert equal.redrawn_groups == 0 and ((correct > 0) & (correct < 8)).all()


def test_dynamic_sampling_replaces_groups_with_a_reward_that_is_not_finite(toy_config):
    config = toy_config(method="dapo", task__factory="tests.toy_task:always_nan")
    assert drawn(config).redrawn_groups == MAX_REDRAWS * 4


@pytest.mark.parametrize("name", ["reinforce-pp", "lite-ppo"])
def test_groups_with_a_reward_that_is_not_finite_are_left_out_of_the_steps_statistics(toy_config, name: str):
    batch = drawn(toy_config(method=name, task__factory="tests.toy_task:sometimes_nan", rollout__prompts_per_step=6))
    group = batch.rollouts.group
    broken = torch.isin(group, group[~torch.isfinite(batch.rollouts.reward)])
    keep = torch.nonzero(~broken).flatten().tolist()
    assert 0 < len(keep) < len(group)
    assert not batch.advantage[broken].any()
    found = batch.advantage[~broken]
    if name == "lite-ppo":
        wanted = oracle.batch_scaled(as_oracle(batch, keep))
    else:
        rows = oracle.whitened(as_oracle(batch, keep), baseline=False)
        found, wanted = torch.stack([found[k] for k in rows]), list(rows.values())
    assert found.tolist() == pytest.approx(wanted, abs=1e-9) and np.std(wanted) > 0.1


def test_advantages_of_tokens_in_summaries(toy_config):
    advantage = torch.tensor([[1.0, -2.0, torch.nan], [3.0, 5.0, -1.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    assert completion_advantage(advantage, mask).tolist() == [-0.5, 1.0, 0.0]
    method = toy_config(method="tr-grpo").method  # ε = 0.2
    weight = torch.full((3, 3), 1.3)
    assert clipped_weight_share(method, weight, advantage, mask.bool()) == 2 / 4


def test_a_run_with_a_baseline_for_each_token(toy_config, monkeypatch):
    calls, statistics = [], Scorer.statistics
    monkeypatch.setattr(Scorer, "statistics", lambda *a: calls.append(1) or statistics(*a))
    config = toy_config(method="otb", steps=2)
    assert train(config).status == "finished"
    assert len(calls) == 2  # once a step, for advantages and plan
    run = sharpscope.load_run(config.run_dir)
    tokens, rollouts = run.tokens(), run.rollouts
    places = tokens["position"].max() + 1
    for step, part in tokens.groupby("step"):
        rows = rollouts[rollouts["step"] == step].sort_values("rollout")
        grid = {name: np.zeros((len(rows), places)) for name in ("logp", "collision", "advantage")}
        mask = np.zeros((len(rows), places), dtype=bool)
        mask[part["rollout"], part["position"]] = True
        for name, values in grid.items():
            values[part["rollout"], part["position"]] = part[name]
        batch = oracle.Batch(
            rows["reward"].tolist(),
            rows["group"].tolist(),
            mask.tolist(),
            old=grid["logp"].tolist(),
            collision=grid["collision"].tolist(),
        )
        wanted = oracle.token_baseline(batch)
        found = {key: grid["advantage"][key] for key in wanted}
        np.testing.assert_allclose(list(found.values()), list(wanted.values()), atol=1e-5)
        assert any(grid["advantage"][row][mask[row]].std() > 1e-3 for row in range(len(rows)))
        means = [grid["advantage"][row][mask[row]].mean() for row in range(len(rows))]
        np.testing.assert_allclose(rows["advantage"], means, atol=1e-5)
        np.testing.assert_allclose(part["loss_coef"], -part["advantage"] / len(part), rtol=1e-5, atol=1e-9)


evaluation = importlib.import_module("sharpscope.training.evaluate")  # the package has a function of that name


@pytest.fixture
def world(toy_config):
    config = toy_config()
    return load_policy(config.policy), make_task(config.task), config.rollout


def test_rows_against_counting_by_hand(world):
    policy, task, rollout = world
    asked = EvaluationSpec(splits=("heldout", "absent"), prompts=5, samples=4)
    rows = evaluate(policy, task, asked, rollout, step=7, seed=1, pass_at=(1, 2, 4))
    assert [(r["split"], r["level"], r["temperature"], r["k"], r["n"]) for r in rows] == [
        ("heldout", "0", 0.0, 1, 5),
        ("heldout", "0", 1.0, 4, 5),
        ("heldout", "1", 0.0, 1, 5),
        ("heldout", "1", 1.0, 4, 5),
    ]
    sampled = rows[1]
    examples = [e for e in task.splits()["heldout"] if e.meta["level"] == 0]
    spec = SamplingSpec(max_new_tokens=rollout.max_new_tokens)
    drawn, _ = draw_scored(policy, task, examples, 4, spec, derive(1, "evaluation:heldout/0/1.0"))
    rewards = [task.score(examples[i // 4], text) for i, text in enumerate(drawn.texts)]
    correct = np.array([r.correct for r in rewards]).reshape(5, 4)
    assert 0 < sampled["accuracy"] < 1  # otherwise nothing was tested
    assert sampled["accuracy"] == sampled["pass_at_1"] == pytest.approx(correct.mean())
    assert sampled["std_error"] == pytest.approx(correct.mean(axis=1).std(ddof=1) / np.sqrt(5))
    assert sampled["pass_at_k"] == pytest.approx(correct.any(axis=1).mean())
    assert sampled["reward_mean"] == pytest.approx(np.mean([r.total for r in rewards]))
    assert sampled["step"] == 7
    cut = drawn.truncated.numpy().reshape(5, 4)
    assert sampled["truncated"] == cut.mean()
    assert sampled["accuracy_completed"] == (correct[~cut].mean() if (~cut).any() else None)
    assert sampled["pass_std_error"] == pytest.approx(correct.any(axis=1).std(ddof=1) / np.sqrt(5))
    for k in (1, 2, 4):
        subsets = list(itertools.combinations(range(4), k))
        values = np.array([np.mean([prompt[list(subset)].any() for subset in subsets]) for prompt in correct])
        assert sampled[f"pass_at_{k}"] == pytest.approx(values.mean())
        assert sampled[f"pass_at_{k}_std_error"] == pytest.approx(values.std(ddof=1) / np.sqrt(5))


@pytest.mark.parametrize("size", [1, 2, 4, 100])
def test_batches_change_no_draw(world, size, monkeypatch):
    policy, task, spec = world
    asked = EvaluationSpec(splits=("heldout",), prompts=5, samples=4)
    whole = evaluate(policy, task, asked, spec, step=0, seed=1)
    monkeypatch.setattr(evaluation, "BATCH_COMPLETIONS", size)
    assert evaluate(policy, task, asked, spec, step=0, seed=1) == whole


REPLY = "(heard)"


class Talk:
    """The environment says "(heard)" after every vowel, twice; the reward is the number of vowels."""

    name, stop = "talk", tuple("aeiou")

    def splits(self):
        made = [Example(f"say {letter}:", letter, {"level": 0}) for letter in string.ascii_lowercase]
        return {"train": made[:12], "heldout": made[12:]}

    def score(self, example, completion):
        found = sum(completion.replace(REPLY, "").count(vowel) for vowel in self.stop)
        return Reward(float(found), {}, found > 1)

    def respond(self, example, completion):
        return REPLY if completion.count(REPLY) < 2 else None


def talk():
    return Talk()


TALK = {"task__factory": "tests.training.test_rollouts:talk", "rollout__max_new_tokens": 24}


@pytest.fixture
def conversation(toy_config):
    config = toy_config(policy__dtype="float64", **TALK)
    policy, task = load_policy(config.policy), make_task(config.task)
    order = DataOrder(task.splits()["train"], 0)
    drawn = draw_rollouts(policy, task, order, config.method, config.rollout, seed=0, step=1)
    heard = (drawn.rollouts.attention_mask[:, drawn.rollouts.prompt_width :] == 1) & (
        drawn.rollouts.completion_mask == 0
    )
    assert int(heard.any(1).sum()) > 3  # otherwise nothing is tested
    assert float(drawn.advantage.abs().max()) > 0
    return policy, drawn


@pytest.mark.parametrize("aggregate", ["sequence_mean", "token_mean", "constant"])
def test_the_gradient_is_that_of_the_own_tokens_alone(conversation, aggregate):
    policy, drawn = conversation
    rollouts, method = drawn.rollouts, named_method("grpo")
    method = method.model_copy(update={"aggregate": aggregate})
    ours, learned = gradient(policy, drawn, method, max_new_tokens=24)
    mask = rollouts.completion_mask
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(rollouts)):  # −A · Σ π/π_old over the own tokens, at π = π_old: −A · Σ ∇ ln π
        L, P = int(rollouts.lengths[row]), rollouts.prompt_width
        prompt = rollouts.input_ids[row, :P][rollouts.attention_mask[row, :P] == 1].tolist()
        logp = completion_logp(policy.model, prompt, rollouts.completion_ids[row, :L].tolist(), 1.0)
        own = mask[row, :L].bool()
        scale = {
            "sequence_mean": 1 / (len(rollouts) * int(own.sum())),
            "token_mean": 1 / int(mask.sum()),
            "constant": 1 / (len(rollouts) * 24),
        }[aggregate]
        total = total - float(drawn.advantage[row]) * scale * logp[own].sum()
    policy.model.zero_grad()
    total.backward()
    slow = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    torch.testing.assert_close(ours[0], slow, rtol=1e-5, atol=1e-7 * float(slow.abs().max()))
    for name in ("loss_coef", "weight", "ratio", "kl"):
        assert not getattr(learned.tokens, name)[mask == 0].any()
    assert (learned.tokens.update[mask == 0] == -1).all()
    for name in ("logp", "entropy", "logit_grad_norm", "hidden_norm"):
        assert not getattr(learned.tokens.stats, name)[mask == 0].any()


def test_a_run_records_own_tokens_only(toy_config):
    config = toy_config(
        steps=2,
        recording__token_gradients_every=1,
        recording__heldout_influence_every=2,
        probes__prompts=3,
        probes__heldout_prompts=3,
        **TALK,
    )
    outcome = train(config)
    assert outcome.status == "finished", outcome.reason
    run = load_run(outcome.run_dir)
    tokens, rollouts, steps = run.tokens(), run.rollouts, run.steps
    heard = 0
    tokenizer = load_policy(config.policy).tokenizer
    for (step, row), part in tokens.groupby(["step", "rollout"]):
        drawn = rollouts.query(f"step == {step} and rollout == {row}").iloc[0]
        assert len(part) == drawn["length"]
        part = part.sort_values("position")
        turns = np.split(part["token_id"].to_numpy(), np.flatnonzero(np.diff(part["position"]) > 1) + 1)
        spoken = [tokenizer.decode([i for i in turn.tolist() if i != tokenizer.eos_token_id]) for turn in turns]
        assert REPLY.join(spoken) == drawn["completion"]
        heard += len(turns) > 1
    assert heard > 3
    assert steps["tokens"].tolist() == tokens.groupby("step").size().tolist()
    assert np.allclose(tokens["logp"], tokens["behavior_logp"], atol=1e-4)
    assert tokens["score_norm_local"].notna().all()
    shares = tokens.groupby(["step", "update"])["attribution"].sum()
    assert np.allclose(shares, 1, atol=1e-3)  # the gradient is the own tokens' alone
    assert tokens[tokens["step"] == 2]["heldout_influence"].notna().all()
