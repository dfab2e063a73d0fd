"""Prompts as token ids, chat templates, and what a template opens of the completion."""

from __future__ import annotations

from typing import Any

import pytest

from sharpscope.errors import UserError
from sharpscope.policy import Policy, SamplingSpec, draw_scored, load_policy, make_policy, render_prompts, with_openings
from sharpscope.tasks import Example, Reward
from tests.models import tiny_model
from tests.policy.conftest import word_tokenizer

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
    """Keeps the texts it was given to score and to answer."""

    name, stop = "hearer", tuple("aeiou")

    def __init__(self) -> None:
        self.given: list[str] = []

    def splits(self) -> dict[str, list[Example]]:
        return {"train": [Example(f"say {c}", c) for c in "abcd"]}

    def score(self, example: Example, completion: str) -> Reward:
        self.given.append(example.whole(completion))
        return Reward(0.0, {}, False)

    def respond(self, example: Example, completion: str) -> None:
        self.given.append(example.whole(completion))


def test_scorers_and_replies_are_given_what_the_template_opened(thinker):
    task = Hearer()
    draw_scored(thinker, task, task.splits()["train"], 4, SamplingSpec(max_new_tokens=12), 0)
    assert len(task.given) > 16 and all(text.startswith("<think>\n") for text in task.given)
