"""What an environment says takes part in nothing that is learnt or recorded: losses, statistics, tables, probes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sharpscope import load_run
from sharpscope.objective import named_method
from sharpscope.policy import load_policy
from sharpscope.tasks import Example, Reward, make_task
from sharpscope.training import train
from sharpscope.training.rollouts import DataOrder, draw_rollouts
from tests.oracles.generation import completion_logp
from tests.training.test_learner import gradient

LETTERS = "abcdefghijklmnopqrstuvwxyz"
REPLY = "(heard)"


class Talk:
    """The environment says "(heard)" after every vowel, twice; the reward is the number of vowels."""

    name, stop = "talk", tuple("aeiou")

    def splits(self):
        made = [Example(f"say {letter}:", letter, {"level": 0}) for letter in LETTERS]
        return {"train": made[:12], "heldout": made[12:]}

    def score(self, example, completion):
        found = sum(completion.replace(REPLY, "").count(vowel) for vowel in self.stop)
        return Reward(float(found), {}, found > 1)

    def respond(self, example, completion):
        return REPLY if completion.count(REPLY) < 2 else None


def talk():
    return Talk()


TALK = {"task__factory": "tests.training.test_learner_conversations:talk", "rollout__max_new_tokens": 24}


@pytest.fixture
def world(toy_config):
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
def test_the_gradient_is_that_of_the_own_tokens_alone(world, aggregate):
    policy, drawn = world
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
