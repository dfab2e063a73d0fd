"""Prompts as token ids and chat templates; conversations of several turns, against one at a time with a full pass for every token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sharpscope.config.run import PolicySpec
from sharpscope.errors import UserError
from sharpscope.policy import (
    Environment,
    Policy,
    SamplingSpec,
    decoding,
    draw_scored,
    load_policy,
    make_policy,
    render_prompts,
    with_openings,
)
from sharpscope.policy.decoding import _StopStrings, as_text
from sharpscope.policy.forward import score_completions
from sharpscope.policy.generation import generate
from sharpscope.tasks import Example, Reward
from tests.models import ARCHITECTURES, tiny_model
from tests.oracles.generation import completion_logp
from tests.policy.helpers import GROUP, PROMPTS, assert_matches_oracle, generator, tiny_policy, word_tokenizer


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


def test_stop_strings_of_several_bytes_are_found():
    tokenizer = load_policy(PolicySpec()).tokenizer
    policy = make_policy(tiny_model("qwen2", vocab=len(tokenizer)), tokenizer, "tiny")
    for stop, text in (("</stop>", "so</stop>!"), ("é", "naïve café"), ("。", "好。"), ("🙂", "a🙂b")):
        ids = tokenizer(text)["input_ids"]
        rows = _StopStrings(policy, (stop,), 1)
        found = [rows.add([0], [token])[0] for token in ids]
        first = next(i for i in range(1, len(ids) + 1) if stop in as_text(policy, ids[:i]))
        assert found.index(True) == first - 1


# -- Prompts, chat templates, and what a template opens of the completion

TEMPLATE = (
    "{% for m in messages %}t10 {{ m['role'] | length }} {{ m['content'] }} t11 {% endfor %}"
    "{% if add_generation_prompt %}t12 {% endif %}"
)
THINKING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"


def example(prompt: str, **fields: Any) -> Any:
    return Example(prompt, "", **fields)


def rendered(examples: list[Any], *, template: str | None = None, prompt_format: str = "auto") -> list[str]:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    policy = make_policy(tiny_model(), tokenizer, "x", prompt_format)
    return [tokenizer.decode(ids) for ids in render_prompts(examples, policy)]


def test_plain_prompts_and_prefills():
    examples = [example("t5 t6"), example("t5", prefill=" t7"), example("t5 t7", prefill=" t7")]
    assert rendered(examples) == ["t5 t6", "t5 t7", "t5 t7"]
    assert rendered(examples, template=TEMPLATE, prompt_format="plain") == ["t5 t6", "t5 t7", "t5 t7"]


def test_chat_prompts_are_wrapped_once():
    examples = [
        example("t5 t6"),
        example("t5 t7", prefill="t7"),
        example("t10 t4 t5 t11 t12 t7", templated=True, prefill="t7"),
        example(
            "t8\n\nt9 t7",
            prefill="t7",
            messages=[{"role": "system", "content": "t8"}, {"role": "user", "content": "t9 t7"}],
        ),
    ]
    # The lengths of the roles' names are not words of the vocabulary and become t2.
    assert rendered(examples, template=TEMPLATE) == [
        "t10 t2 t5 t6 t11 t12",
        "t10 t2 t5 t11 t12 t7",
        "t10 t4 t5 t11 t12 t7",
        "t10 t2 t8 t11 t10 t2 t9 t11 t12 t7",
    ]


def test_turns_that_a_template_refuses_are_named():
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}t5"
    turns = [{"role": "system", "content": "t8"}, {"role": "user", "content": "t9"}]
    says = r"template of 'x' rejects .* system, user \(System role not supported\); .* policy.prompt_format=plain"
    with pytest.raises(UserError, match=says):
        rendered([example("t8 t9", messages=turns)], template=refuses)
    assert rendered([example("t8 t9", messages=turns)], template=refuses, prompt_format="plain") == ["t8 t9"]
    assert rendered([example("t9")], template=refuses) == ["t5"]


@pytest.fixture
def thinker(toy_config) -> Policy:
    """The toy policy with a template that opens `<think>`, as those of reasoning models do."""
    policy = load_policy(toy_config().policy)
    policy.tokenizer.chat_template = THINKING
    return make_policy(policy.model, policy.tokenizer, "tiny")


TURNS = [{"role": "system", "content": "be good"}, {"role": "user", "content": "say a So"}]
OPENED = [
    # example, what the model sees, what of it opens the completion
    (Example("say a", ""), "[user]say a[assistant]<think>\n", "<think>\n"),
    (Example("say a So", "", prefill=" So"), "[user]say a[assistant]<think>\n So", "<think>\n So"),
    (
        Example("be good\n\nsay a So", "", prefill=" So", messages=TURNS),
        "[system]be good[user]say a[assistant]<think>\n So",
        "<think>\n So",
    ),
    (Example("say a <think>", "", prefill="<think>"), "[user]say a [assistant]<think>", "<think>"),
    (Example("[user]say a[assistant]", "", templated=True), "[user]say a[assistant]", ""),
    (Example("[user]a<think>", "", templated=True, prefill="<think>"), "[user]a<think>", "<think>"),
]


@pytest.mark.parametrize(("given", "seen", "prefill"), OPENED)
def test_what_the_template_opens_is_prefill_and_fed_once(thinker, given, seen, prefill):
    (opened,) = with_openings([given], thinker)
    assert opened.whole("then") == prefill + "then"
    for example in (given, opened):  # making prompts of them knows no difference
        assert thinker.tokenizer.decode(render_prompts([example], thinker)[0]) == seen
    assert with_openings([opened], thinker) == [opened]


class Hearer:
    """A task that keeps the texts it was given to score and to answer."""

    name = "hearer"

    def __init__(self) -> None:
        self.stop = tuple("aeiou")
        self.scored: list[str] = []
        self.heard: list[str] = []

    def splits(self) -> dict[str, list[Example]]:
        return {split: [Example(f"say {c}", c, {"level": 0}) for c in "abcd"] for split in ("train", "heldout")}

    def score(self, example: Example, completion: str) -> Reward:
        self.scored.append(example.whole(completion))
        return Reward(float(len(completion)), {}, False)

    def respond(self, example: Example, completion: str) -> str | None:
        self.heard.append(example.whole(completion))
        return None


@pytest.mark.parametrize("interactive", [True, False])
def test_scorers_and_replies_are_given_what_the_template_opened(thinker, interactive):
    task = Hearer()
    if not interactive:
        del task.stop
    draw_scored(thinker, task, task.splits()["train"], 4, SamplingSpec(max_new_tokens=12), 0)
    told = task.heard if interactive else task.scored
    assert told and all(text.startswith("<think>\n") for text in told)
