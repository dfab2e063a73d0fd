"""The advantages of a drawn step, which groups dynamic sampling keeps, evaluation, and conversations with an environment."""

from __future__ import annotations

import importlib
import itertools
import math
import string

import numpy as np
import pytest
import torch

from sharpscope import load_run
from sharpscope.config.run import EvaluationSpec
from sharpscope.methods import named_method
from sharpscope.policy import SamplingSpec, draw_scored, load_policy
from sharpscope.policy.forward import Scorer
from sharpscope.seeds import derive
from sharpscope.tasks import Example, Reward, make_task
from sharpscope.training import train
from sharpscope.training.evaluate import evaluate
from sharpscope.training.rollouts import MAX_REDRAWS, DataOrder, draw_rollouts
from tests.loops import some
from tests.oracles import objective as oracle
from tests.oracles.generation import completion_logp
from tests.training.test_learner import gradient


def drawn(config, **changes):
    task = make_task(config.task)
    order = DataOrder(task.splits()["train"], 0)
    return draw_rollouts(
        load_policy(config.policy),
        task,
        order,
        config.method,
        config.rollout,
        seed=0,
        step=1,
        **changes,
    )


def as_oracle(batch, keep=None) -> oracle.Batch:
    """The completions `keep` of a step, with what advantages depend on."""
    rollouts = batch.rollouts
    keep = range(len(rollouts)) if keep is None else keep
    parts = {
        name: [batch.rewards[i].parts.get(name, 0.0) for i in keep] for name in ("answer", "format")
    }
    masks = rollouts.completion_mask.bool().tolist()
    return oracle.Batch(
        [float(rollouts.reward[i]) for i in keep],
        [int(rollouts.group[i]) for i in keep],
        [masks[i] for i in keep],
        parts=parts,
    )


@pytest.mark.parametrize("rank", ["variance", "uncertainty"])
def test_a_step_learns_from_the_prompts_of_the_pool_with_the_highest_rank(toy_config, rank):
    """Against a loop over all prompts of the pool, drawn by a step that learns from them all."""
    plain = toy_config(rollout__prompts_per_step=12)
    config = toy_config(
        rollout__prompts_per_step=4, method__sampling__pool=3, method__sampling__rank=rank
    )
    scorer = Scorer(load_policy(config.policy).model, 1.0, 10_000, True)
    found, whole = drawn(config, statistics=scorer.statistics), drawn(plain)
    entropy = scorer.statistics(whole.rollouts).entropy.tolist()
    masks = whole.rollouts.completion_mask.bool().tolist()
    ranks, size = [], config.rollout.group_size
    for group in range(12):
        rows = range(group * size, (group + 1) * size)
        totals = [whole.rewards[row].total for row in rows]
        ranks.append(sum((x - sum(totals) / size) ** 2 for x in totals) / size)
        if rank == "uncertainty":
            share = sum(whole.rewards[row].correct for row in rows) / size
            mean = 0.0
            for row in rows:
                values = sorted(h for h, on in zip(entropy[row], masks[row], strict=True) if on)
                highest = values[-math.ceil(len(values) / 5) :]
                mean += sum(highest) / len(highest) / size
            ranks[-1] = (1 - abs(2 * share - 1)) * mean
    best = sorted(sorted(range(12), key=lambda group: -ranks[group])[:4])
    assert [one.prompt for one in found.examples] == [whole.examples[g].prompt for g in best]
    texts = [whole.rollouts.texts[g * size + member] for g in best for member in range(size)]
    assert found.rollouts.texts == texts and best != [0, 1, 2, 3]
    assert found.rollouts.group.tolist() == [g for g in range(4) for _ in range(size)]


def test_dynamic_sampling_goes_by_accuracy_not_by_reward(toy_config):
    """DAPO: 0 < correct < G."""
    wrong = drawn(toy_config(method="dapo", task__factory="tests.toy_task:wrong_but_rewarded"))
    assert wrong.redrawn_groups == MAX_REDRAWS * 4 and wrong.zero_variance_share < 1
    equal = drawn(
        toy_config(
            method="dapo", task__factory="tests.toy_task:equally_rewarded", rollout__group_size=8
        )
    )
    correct = np.array([reward.correct for reward in equal.rewards]).reshape(4, 8).sum(1)
    assert equal.redrawn_groups == 0 and ((correct > 0) & (correct < 8)).all()
    broken = drawn(toy_config(method="dapo", task__factory="tests.toy_task:always_nan"))
    assert broken.redrawn_groups == MAX_REDRAWS * 4


@pytest.mark.parametrize("name", ["reinforce-pp", "lite-ppo"])
def test_groups_with_a_reward_that_is_not_finite_are_left_out_of_the_steps_statistics(
    toy_config, name: str
):
    batch = drawn(
        toy_config(
            method=name, task__factory="tests.toy_task:sometimes_nan", rollout__prompts_per_step=6
        )
    )
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


# the package has a function of that name
evaluation = importlib.import_module("sharpscope.training.evaluate")


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
        values = np.array(
            [np.mean([prompt[list(subset)].any() for subset in subsets]) for prompt in correct]
        )
        assert sampled[f"pass_at_{k}"] == pytest.approx(values.mean())
        assert sampled[f"pass_at_{k}_std_error"] == pytest.approx(values.std(ddof=1) / np.sqrt(5))


def test_batches_change_no_draw(world, monkeypatch):
    policy, task, spec = world
    asked = EvaluationSpec(splits=("heldout",), prompts=5, samples=4)
    whole = evaluate(policy, task, asked, spec, step=0, seed=1)
    monkeypatch.setattr(evaluation, "BATCH_COMPLETIONS", 8)
    assert evaluate(policy, task, asked, spec, step=0, seed=1) == whole


REPLY = "(heard)"


class Talk:
    """The environment says "(heard)" after every vowel, twice; the reward is the number of vowels."""

    name, stop = "talk", tuple("aeiou")

    def splits(self):
        made = [
            Example(f"say {letter}:", letter, {"level": 0}) for letter in string.ascii_lowercase
        ]
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
    # −A · Σ π/π_old over the own tokens, at π = π_old: −A · Σ ∇ ln π
    for row in range(len(rollouts)):
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
    recorded = {"recording__token_gradients_every": 1, "recording__heldout_influence_every": 2}
    config = toy_config(steps=2, probes__prompts=3, probes__heldout_prompts=3, **recorded, **TALK)
    run = load_run(train(config).run_dir)
    tokens, heard = run.tokens(), 0
    tokenizer = load_policy(config.policy).tokenizer
    rollouts = run.rollouts.set_index(["step", "rollout"])
    for place, part in some(tokens.groupby(["step", "rollout"])):
        part = part.sort_values("position")
        turns = np.split(
            part["token_id"].to_numpy(), np.flatnonzero(np.diff(part["position"]) > 1) + 1
        )
        spoken = [
            tokenizer.decode([i for i in turn.tolist() if i != tokenizer.eos_token_id])
            for turn in turns
        ]
        assert len(part) == rollouts.loc[place, "length"]
        assert REPLY.join(spoken) == rollouts.loc[place, "completion"]
        heard += len(turns) > 1
    assert heard > 3 and run.steps["tokens"].tolist() == tokens.groupby("step").size().tolist()
    assert np.allclose(tokens["logp"], tokens["behavior_logp"], atol=1e-4)
    assert tokens["score_norm_local"].notna().all()
    assert np.allclose(tokens.groupby(["step", "update"])["attribution"].sum(), 1, atol=1e-3)
    assert tokens[tokens["step"] == 2]["heldout_influence"].notna().all()
