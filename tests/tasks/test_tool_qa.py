"""Questions that need a search: the world, the protocol, the replies, the rewards; BM25 and a retrieval server."""

from __future__ import annotations

import json
import random
import re
from email.message import Message
from http.client import IncompleteRead
from io import BytesIO
from urllib.error import HTTPError

import pytest
from pydantic import ValidationError

from sharpscope.errors import UserError
from sharpscope.tasks import Example, MathSpec, ToolQaSpec, make_task
from sharpscope.tasks.tool_qa import (
    FEEDBACK,
    INSTRUCTION,
    RELATIONS,
    Bm25Retriever,
    HttpRetriever,
    Passage,
    ToolQa,
    follows_protocol,
    information,
    make_world,
)
from tests.loops import some
from tests.oracles import puzzles as oracle

CORPUS = [
    Passage("Torvi", "A city. mayor: Lena."),
    Passage("Lena", "A person. birthplace: Basto."),
    Passage("Basto", "A city. mayor: Ruk."),
    Passage("Ruk", "A person."),
]


def test_bm25_finds_the_passages_that_share_words():
    pytest.importorskip("bm25s", reason="needs the optional library bm25s")
    retriever = Bm25Retriever(CORPUS, top=3)
    by_word, none, lower, empty = retriever.search(
        ["Torvi", "unheard of", "LENA's birthplace?", ""]
    )
    assert by_word == [CORPUS[0]]
    assert none == empty == []
    assert lower[0] == CORPUS[1]
    assert set(lower) == {CORPUS[0], CORPUS[1]}
    assert len(Bm25Retriever(CORPUS, top=50).search(["person city"])[0]) == 4
    assert len(Bm25Retriever(CORPUS, top=1).search(["city"])[0]) == 1


class Server:
    """In place of the opener of addresses: a retrieval server that fails as it is told."""

    def __init__(self, *plan: str) -> None:
        self.plan, self.seen = list(plan), []

    def open(self, request, timeout):
        body = json.loads(request.data)
        self.seen.append(body)
        act = self.plan.pop(0) if self.plan else "good"
        if act in ("503", "404"):
            raise HTTPError(request.full_url, int(act), "", Message(), None)
        if act == "cut":
            raise IncompleteRead(b"{")
        forms = {"contents": '"{0}"\nabout {0}'}, {"title": "{0}", "text": "about {0}"}
        result = [
            [
                {
                    "document": {name: text.format(query) for name, text in form.items()},
                    "score": 1.0,
                }
                for form in forms * 4
            ]
            for query in body["queries"]
        ]
        answers = {
            "short": {"result": result[1:]},
            "odd": {"results": []},
            "strange": {"result": [[{"document": 3}]] * 2},
        }
        return BytesIO(
            b"{" if act == "garbage" else json.dumps(answers.get(act, {"result": result})).encode()
        )


@pytest.fixture
def client(monkeypatch) -> HttpRetriever:
    """A client whose retries have no pauses."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return HttpRetriever("http://127.0.0.1:9/retrieve", top=2)


@pytest.mark.parametrize("act", ["503", "garbage", "short", "odd", "strange", "cut"])
def test_a_passing_failure_is_retried(client, act):
    client._opener = server = Server(act, act)
    assert client.search(["a b", "c"]) == [
        [Passage("a b", "about a b")] * 2,
        [Passage("c", "about c")] * 2,
    ]
    assert server.seen == [{"queries": ["a b", "c"], "topk": 2, "return_scores": True}] * 3


def test_a_response_is_bounded_in_size_and_time(client, monkeypatch):
    class Endless:
        """A response that never ends."""

        def read1(self, size):
            return b" " * size

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    client._opener = type("Opener", (), {"open": lambda *_, **__: Endless()})()
    monkeypatch.setenv("SHARPSCOPE_BOUNDS", "0.01")
    with pytest.raises(UserError, match=r"above the bound of 0\.6 MB.*SHARPSCOPE_BOUNDS"):
        client.search(["a"])
    monkeypatch.setattr("sharpscope.tasks.tool_qa.SLOWEST_RESPONSE", -1.0)
    with pytest.raises(UserError, match="not complete after"):
        client.search(["a"])


def test_a_lasting_failure_names_the_server(client):
    says = r"retriever_url = 'http://127.*no valid response \({}.*check that the retrieval server is running"
    for plan, problem in (["503"] * 4, "status 503"), (["404"], "status 404"):
        client._opener = server = Server(*plan, "good")
        with pytest.raises(UserError, match=says.format(problem)):
            client.search(["a"])
        assert server.plan == ["good"]  # what the server refuses is not asked again
    with pytest.raises(UserError, match=says.format(".*refused")):  # nothing listens there
        HttpRetriever("http://127.0.0.1:9/x", top=1).search(["a"])
    with pytest.raises(UserError, match=r"task.retriever_url = .*: not a valid address"):
        HttpRetriever("file:///etc/passwd", top=1)


SMALL = {"hops": (1, 2, 3), "train_size": 40, "heldout_size": 10}


@pytest.fixture(scope="module")
def task() -> ToolQa:
    pytest.importorskip("bm25s", reason="needs the optional library bm25s")
    return make_task(ToolQaSpec(**SMALL))


def test_the_world_is_consistent_and_questions_follow_its_facts(task):
    world, splits = task.world, task.splits()
    assert world == make_task(ToolQaSpec(**SMALL)).world != make_world(300, 1)
    for name, facts in some(world.facts.items()):
        assert {r: world.kinds[value] for r, value in facts.items()} == RELATIONS[world.kinds[name]]
        assert name not in facts.values()
    assert {name: len(examples) for name, examples in splits.items()} == {
        "train": 120,
        "heldout": 30,
    }
    for example in some(example for examples in splits.values() for example in examples):
        chain = example.meta["chain"]
        assert example.meta["level"] == len(chain)
        assert not {value for _, _, value in chain} & set(re.findall(r"\w+", example.prompt))
        # read the question as a person would: innermost thing last, relations outwards
        asked = re.fullmatch(r"What is the (.+) of (\w+)\?\n", example.prompt)
        thing = asked.group(2)
        for step, relation in zip(chain, reversed(asked.group(1).split(" of the ")), strict=True):
            assert step == (thing, relation, world.facts[thing][relation])
            thing = world.facts[thing][relation]
        assert thing == example.answer


def test_a_perfect_player_answers_every_question(task):
    for example in some(task.splits()["train"][::4]):
        text = ""
        for thing, relation, value in some(example.meta["chain"]):
            text += f"<think>what is the {relation} of {thing}?</think><search>{thing}</search>"
            reply = task.respond(example, text)
            assert reply.startswith("\n\n<information>Doc 1(Title: ")
            assert reply.endswith("</information>\n\n")
            first = reply.partition("\nDoc 2")[0]
            assert f"(Title: {thing})" in first  # the passage that is needed is the best one
            assert f"{relation}: {value}." in first
            text += reply
        text += f"<think>so</think><answer>{example.answer}</answer>"
        assert task.respond(example, text) is None
        reward = task.score(example, text)
        assert (reward.total, reward.correct) == (1.0, True)
        assert reward.parts == {
            "answer": 1.0,
            "format": 1.0,
            "searches": float(len(example.meta["chain"])),
        }


EXAMPLE = Example("Where?", "The Hague", {"truths": ("The Hague", "Den Haag")})
FOUND = information([Passage("The Hague", "A city.")])


def test_turns_end(task):
    text = ""
    for _ in range(4):
        text += "<search>a city</search>"
        reply = task.respond(EXAMPLE, text)
        assert "<information>" in reply
        text += reply
    assert task.respond(EXAMPLE, text + "<search>again</search>") is None
    text = "hm"
    for _ in range(4):
        assert task.respond(EXAMPLE, text) == FEEDBACK
        text += FEEDBACK + "hm <search></search>"
    assert task.respond(EXAMPLE, text) is None
    assert task.score(EXAMPLE, text).total == 0.0


CONVERSATIONS = [
    ("<think>a</think><answer>the hague.</answer>", True, True),
    (
        f"<think>a</think><search>b</search>{FOUND}<think>c</think><answer>Den Haag</answer>\n",
        True,
        True,
    ),
    (f"<search>b</search>{FOUND}<answer>The Hague</answer>", True, False),
    ("hm" + FEEDBACK + "<think>a</think><answer>The Hague</answer>", True, False),
    ("<think>The Hague</think><answer>The Hague or Delft</answer>", False, True),
    (
        f"<think>a</think><search><answer>The Hague</answer></search>{FOUND}<think>hm</think>",
        False,
        False,
    ),
    ("The Hague", False, False),
]


@pytest.mark.parametrize(("text", "right", "followed"), CONVERSATIONS)
def test_rewards(task, text, right, followed):
    reward = task.score(EXAMPLE, text)
    assert (reward.total, reward.correct) == (float(right), right)
    assert (reward.parts["answer"], reward.parts["format"]) == (float(right), float(followed))
    assert oracle.follows(text) == followed


def test_the_protocol_is_judged_as_the_slow_version_does():
    rng = random.Random(0)
    blocks = [f"<{tag}>x</{tag}>" for tag in ("think", "search", "information", "answer")]
    tags = [f"<{slash}{tag}>" for tag in ("think", "search", "answer") for slash in ("", "/")]
    seen = {True: 0, False: 0}
    for _ in range(5000):
        turns = rng.randint(0, 2)
        parts = [*(blocks[:3] * turns), blocks[0], blocks[3]]
        if rng.random() < 0.6:
            parts[rng.randrange(len(parts))] = rng.choice([*blocks, *tags, "", " ", "y"])
        text = rng.choice(["", " ", "\n"]).join(parts)
        assert follows_protocol(text) == oracle.follows(text), text
        seen[follows_protocol(text)] += 1
    assert min(seen.values()) > 1000


@pytest.mark.parametrize(
    "text",
    ["<answer>" * 12_500, "<search>" * 12_500, "</search>" * 11_000, "<" * 100_000, FEEDBACK * 400],
)
def test_a_hundred_kilobytes_break_nothing(task, text):
    assert task.score(EXAMPLE, text).total == 0.0
    assert task.respond(EXAMPLE, text) in (FEEDBACK, None)


@pytest.mark.parametrize(
    ("style", "template", "prompt"),
    [
        ("search_r1", "", INSTRUCTION.replace("{prompt}", "Be brief.\n\nHow many?")),
        ("search_r1", "Q: {prompt}", "Q: Be brief.\n\nHow many?"),
        ("compact", "", "Be brief.\n\nHow many?"),
    ],
)
@pytest.mark.parametrize(
    ("scorer", "answer", "right"),
    [("auto", "about 42", False), ("auto", "the 42", True), ("numeric", "about 42.0", True)],
)
def test_questions_of_a_file_have_their_own_template_and_scorer(
    tmp_path, style, template, prompt, scorer, answer, right
):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many?"},
    ]
    row = {"prompt": messages, "reward_model": {"ground_truth": {"target": [42]}}}
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    data = {
        "path": str(tmp_path / "q.jsonl"),
        "heldout_fraction": 0,
        "template": template,
        "scorer": scorer,
    }
    task = make_task(ToolQaSpec(questions=data, retriever_url="http://127.0.0.1:9/x", style=style))
    (example,) = task.splits()["train"]
    assert (example.prompt, bool(example.messages)) == (prompt, style == "compact")
    reward = task.score(example, f"<think>a</think><answer>{answer}</answer>")
    assert (reward.total, reward.correct, reward.parts["answer"]) == (
        float(right),
        right,
        float(right),
    )
    assert task.score(example, "42").total == 0.0  # an answer has its tags, whatever compares it


def test_a_level_that_is_given_twice_counts_once():
    sizes = {"train_size": 3, "heldout_size": 2}
    for once, twice in (
        (ToolQaSpec(**sizes), ToolQaSpec(hops=(1, 1), **sizes)),
        (
            MathSpec(levels=(1,), **sizes),
            MathSpec(levels=(1, 1), families=("arithmetic", "arithmetic"), **sizes),
        ),
    ):
        assert make_task(once).splits() == make_task(twice).splits()


def test_questions_need_passages():
    with pytest.raises(
        ValidationError, match="questions: needs passages to search; set retriever_url"
    ):
        ToolQaSpec(questions={"path": "q.jsonl"})
