"""Conversations of several turns against one at a time with a full forward pass for every token."""

from __future__ import annotations

import pytest
import torch

from sharpscope.config.run import PolicySpec
from sharpscope.policy import Environment, SamplingSpec, decoding, load_policy
from sharpscope.policy.decoding import _StopStrings, as_text
from sharpscope.policy.forward import score_completions
from sharpscope.policy.generation import generate
from sharpscope.policy.loading import make_policy
from sharpscope.tasks import Example, Reward
from tests.models import ARCHITECTURES, tiny_model
from tests.oracles.generation import completion_logp
from tests.policy.helpers import GROUP, PROMPTS, assert_matches_oracle, generator, tiny_policy


class Parrot:
    """Replies by how much was said: some words, a long text that rarely fits, nothing at all, or the end."""

    name = "parrot"
    stop = ("t7", "t11", "t3", "t20 t5", "t30", "t31")

    def __init__(self, turns: int = 4) -> None:
        self.turns, self.batches = turns, []

    def splits(self):
        return {"train": [Example(f"p{i}", str(i), {"id": str(i)}) for i in range(len(PROMPTS))]}

    def score(self, example, completion):
        return Reward(0.0, {}, False)

    def respond(self, example, completion):
        words = completion.split()
        if completion.count("t12") >= self.turns:
            return None
        kind = (len(words) + int(example.answer)) % 5
        return ("", " t12", " t12 t13 t14 t15", f" t12 {' '.join(words[-3:])} t16", None)[kind]

    def respond_many(self, examples, completions):
        self.batches.append(len(completions))
        return [self.respond(*row) for row in zip(examples, completions, strict=True)]


def played(policy, task, spec):
    return generate(policy, PROMPTS, GROUP, spec, generator(), Environment(task, task.splits()["train"]))


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_one_conversation_at_a_time(architecture, layers, monkeypatch):
    monkeypatch.setattr(decoding, "INITIAL_CAPACITY", 2)
    monkeypatch.setattr(decoding, "SHORT", 0)
    if layers:
        monkeypatch.setattr(decoding, "can_decode_directly", lambda model: False)
    policy, task = tiny_policy(architecture), Parrot()
    spec = SamplingSpec(temperature=1.6, max_new_tokens=24)
    out = played(policy, task, spec)
    assert_matches_oracle(policy, out, spec, task, 1e-5)
    heard = (out.completion_mask == 0) & (out.attention_mask[:, out.prompt_width :] == 1)
    assert int(heard.any(1).sum()) >= 4  # otherwise nothing was tested


@pytest.mark.parametrize("remove_share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("decode_batch", [1, 4, 100])
def test_what_is_played_together_changes_no_conversation(decode_batch, remove_share, monkeypatch):
    monkeypatch.setattr(decoding, "REMOVE_SHARE", remove_share)
    policy, task = tiny_policy("llama", scale=0.2), Parrot()
    object.__setattr__(policy, "eos_ids", (1, 8, 9))
    spec = SamplingSpec(temperature=1.4, max_new_tokens=30, decode_batch=decode_batch)
    out = played(policy, task, spec)
    assert_matches_oracle(policy, out, spec, task)
    assert len({int(n) for n in out.lengths}) > 3
    assert set(out.truncated.tolist()) == {True, False}
    if decode_batch == 100:  # one call a turn for all rows
        assert task.batches[0] > 1
        assert len(task.batches) <= 30


def test_training_gives_every_own_token_the_log_probability_that_it_was_drawn_with():
    policy, task = tiny_policy("qwen2"), Parrot()
    out = played(policy, task, SamplingSpec(temperature=1.6, max_new_tokens=24))
    for share in (False, True):
        scored = score_completions(policy.model, out, 1.6, share_prompt=share, with_grad=False, stats=True)
        torch.testing.assert_close(scored.logp, out.behavior_logp.to(scored.logp), rtol=0, atol=1e-5)
        silent = out.completion_mask == 0
        assert not scored.logp[silent].any()
        assert not scored.stats.entropy[silent].any()
    row = int((out.completion_mask.sum(1) < out.lengths).nonzero()[0])
    ids = out.completion_ids[row, : int(out.lengths[row])].tolist()
    slow = completion_logp(policy.model, PROMPTS[row // GROUP], ids, 1.6)
    own = out.completion_mask[row, : len(ids)].bool()
    torch.testing.assert_close(out.behavior_logp[row, : len(ids)][own].double(), slow[own], rtol=0, atol=1e-5)


class Echo(Parrot):
    """Ends a turn at "g" or "a" and replies with what a tokenizer would join with its neighbours."""

    name, stop = "echo", ("g", "a")

    def respond(self, example, completion):
        return None if completion.count("<information>") > 2 else "<information> knight</information>"


def test_sampled_ids_stay_as_they_were_sampled():
    """A random model writes pieces that the tokenizer would join: decoding and encoding anew would give other tokens."""
    shipped = load_policy(PolicySpec())
    policy = make_policy(tiny_model("qwen2", vocab=len(shipped.tokenizer)), shipped.tokenizer, "tiny")
    task, spec = Echo(), SamplingSpec(temperature=4.0, max_new_tokens=60)
    out = played(policy, task, spec)
    assert_matches_oracle(policy, out, spec, task)
    encode = lambda text: policy.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    drifted = 0
    for n in range(len(out)):
        L = int(out.lengths[n])
        drifted += encode(out.texts[n]) != out.completion_ids[n, :L].tolist()
        silent = (out.completion_mask[n, :L] == 0).nonzero()[:, 0].tolist()
        reply = encode("<information> knight</information>")
        assert out.completion_ids[n, silent].tolist() == reply * (len(silent) // len(reply))
    assert drifted > len(out) // 2


def test_a_reply_that_leaves_no_room_ends_the_row_as_truncated():
    class Long(Parrot):
        stop = ("<pad>", "</s>", *(f"t{i}" for i in range(2, 37)))

        def respond(self, example, completion):
            return " t5" * (3 - int(example.answer))

    policy = tiny_policy()
    object.__setattr__(policy, "eos_ids", ())
    out = played(policy, Long(), SamplingSpec(max_new_tokens=4))
    # one token, a reply of 3, 2 or 1, and where it left room, again
    assert [out.completion_mask[i].tolist() for i in (0, 3, 6)] == [[1, 0, 0, 0], [1, 0, 0, 1], [1, 0, 1, 0]]
    assert out.lengths.tolist() == [1] * 3 + [4] * 3 + [3] * 3
    assert out.truncated.all()


def test_stop_strings_of_several_bytes_are_found():
    tokenizer = load_policy(PolicySpec()).tokenizer
    policy = make_policy(tiny_model("qwen2", vocab=len(tokenizer)), tokenizer, "tiny")
    for stop, text in (("</stop>", "so</stop>!"), ("é", "naïve café"), ("。", "好。"), ("🙂", "a🙂b")):
        ids = tokenizer(text)["input_ids"]
        rows = _StopStrings(policy, (stop,), 1)
        found = [rows.add([0], [token])[0] for token in ids]
        first = next(i for i in range(1, len(ids) + 1) if stop in as_text(policy, ids[:i]))
        assert found.index(True) == first - 1
