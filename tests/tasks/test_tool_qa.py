"""Questions that need a search: the world, the protocol, the replies, the rewards; BM25 and a retrieval server."""

from __future__ import annotations

import contextlib
import json
import random
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sharpscope.errors import UserError
from sharpscope.tasks import Example, ToolQaSpec, make_task
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
    passage_of,
    read_corpus,
)
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
    by_word, none, lower, empty = retriever.search(["Torvi", "unheard of", "LENA's birthplace?", ""])
    assert by_word == [CORPUS[0]]
    assert none == empty == []
    assert lower[0] == CORPUS[1]
    assert set(lower) == {CORPUS[0], CORPUS[1]}
    assert len(Bm25Retriever(CORPUS, top=50).search(["person city"])[0]) == 4
    assert len(Bm25Retriever(CORPUS, top=1).search(["city"])[0]) == 1


def test_a_corpus_file_is_read_in_both_forms(tmp_path):
    rows = [{"title": "A", "text": "one"}, {"id": "7", "contents": '"B C"\ntwo\nthree'}, {"text": "no title"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    expected = [Passage("A", "one"), Passage("B C", "two\nthree"), Passage("", "no title")]
    assert read_corpus(str(tmp_path / "a.jsonl")) == expected
    (tmp_path / "b.jsonl").write_text('{"title": "A", "text": "one"}\n{"title": "B"}\n')
    with pytest.raises(UserError, match=r"b\.jsonl line 2: a passage needs"):
        read_corpus(str(tmp_path / "b.jsonl"))
    with pytest.raises(UserError, match=r"task\.corpus = .*no such file"):
        read_corpus(str(tmp_path / "c.jsonl"))
    for row in ({"text": 3}, {"title": 3, "text": "x"}, [], None):
        with pytest.raises(ValueError, match="a passage needs"):
            passage_of(row)


def test_real_questions_come_with_a_corpus(tmp_path):
    pytest.importorskip("bm25s", reason="needs the optional library bm25s")
    rows = [{"prompt": f"Who is mayor {i}?", "reward_model": {"ground_truth": {"target": ["Lena"]}}} for i in range(4)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"title": p.title, "text": p.text}) for p in CORPUS))
    questions = {"path": str(tmp_path / "q.jsonl"), "heldout_fraction": 0}
    task = make_task(ToolQaSpec(questions=questions, corpus=str(tmp_path / "corpus.jsonl"), style="search_r1"))
    example = task.splits()["train"][0]
    assert example.prompt.endswith("Question: Who is mayor 0?\n")
    assert "Torvi" in task.respond(example, "<search>mayor of Torvi</search>")
    assert task.score(example, "<answer>lena</answer>").correct
    with pytest.raises(UserError, match=r"set task\.corpus or task\.retriever_url"):
        make_task(ToolQaSpec(questions=questions))


class Server(ThreadingHTTPServer):
    """A local retrieval server that fails as it is told."""

    plan: list[str]
    seen: list[dict]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        act = self.server.plan.pop(0) if self.server.plan else "good"
        if act == "slow":
            time.sleep(0.5)
        result = [
            [{"document": {"contents": f'"{query}"\nabout {query}'}, "score": 1.0}] * 9 for query in body["queries"]
        ]
        answer = {
            "short": {"result": result[1:]},
            "odd": {"results": []},
            "strange": {"result": [[{"document": 3}]] * len(result)},
        }.get(act, {"result": result})
        self.send_response({"broken": 503, "refused": 404}.get(act, 200))
        if act == "cut":
            self.send_header("Content-Length", "100000")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):  # the client of the slow answer has left
            self.wfile.write(b"{" if act == "garbage" else json.dumps(answer).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    made = Server(("127.0.0.1", 0), Handler)
    made.plan, made.seen = [], []
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def quick(monkeypatch):
    """Retries without their pauses."""
    from sharpscope.tasks import tool_qa

    waits = []
    monkeypatch.setattr(tool_qa.time, "sleep", waits.append)
    return waits


def client(server) -> HttpRetriever:
    return HttpRetriever(f"http://127.0.0.1:{server.server_port}/retrieve", top=2)


@pytest.mark.parametrize("act", ["broken", "garbage", "short", "strange", "cut"])
def test_a_passing_failure_is_retried(server, quick, act):
    server.plan = [act, act]
    assert client(server).search(["a b", "c"]) == [[Passage("a b", "about a b")] * 2, [Passage("c", "about c")] * 2]
    assert server.seen == [{"queries": ["a b", "c"], "topk": 2, "return_scores": True}] * 3
    assert quick == sorted(quick)
    assert len(quick) == 2


def test_a_lasting_failure_names_the_server(server, quick):
    server.plan = ["broken"] * 9
    with pytest.raises(
        UserError, match=r"retriever_url = 'http://127.*status 503.*check that the retrieval server is running"
    ):
        client(server).search(["a"])
    assert len(server.seen) == 4
    server.plan = ["refused"] * 9
    with pytest.raises(UserError, match="status 404"):
        client(server).search(["a"])
    assert len(server.seen) == 5  # what the server refuses is not asked again
    server.server_close()
    with pytest.raises(UserError, match="no valid response"):
        HttpRetriever("http://127.0.0.1:9/x", top=1).search(["a"])
    with pytest.raises(UserError, match=r"task.retriever_url = .*: not a valid address"):
        HttpRetriever("file:///etc/passwd", top=1)


SMALL = {"hops": (1, 2, 3), "train_size": 40, "heldout_size": 10}


@pytest.fixture(scope="module")
def task() -> ToolQa:
    pytest.importorskip("bm25s", reason="needs the optional library bm25s")
    return make_task(ToolQaSpec(**SMALL))


def test_the_world_is_consistent_and_repeatable(task):
    world = task.world
    assert world == make_task(ToolQaSpec(**SMALL)).world
    assert len(world.facts) == 300
    for name, facts in world.facts.items():
        assert set(facts) == set(RELATIONS[world.kinds[name]])
        assert all(world.kinds[value] == RELATIONS[world.kinds[name]][relation] for relation, value in facts.items())
        assert name not in facts.values()
    passages = {passage.title: passage.text for passage in world.corpus()}
    for name, facts in world.facts.items():
        assert all(f"{relation}: {value}." in passages[name] for relation, value in facts.items())
    assert make_world(20, 0) != make_world(20, 1)


def test_questions_follow_their_chain_and_never_name_their_answer(task):
    splits = task.splits()
    assert {name: len(examples) for name, examples in splits.items()} == {"train": 120, "heldout": 30}
    for example in (example for examples in splits.values() for example in examples):
        chain = example.meta["chain"]
        assert example.meta["level"] == len(chain)
        for thing, relation, value in chain:
            assert task.world.facts[thing][relation] == value
        assert [thing for thing, _, _ in chain[1:]] == [value for _, _, value in chain[:-1]]
        assert chain[-1][2] == example.answer
        words = re.findall(r"\w+", example.prompt)
        assert not {value for _, _, value in chain} & set(words)
        # read the question as a person would: innermost thing last, relations outwards
        asked = re.fullmatch(r"What is the (.+) of (\w+)\?\n", example.prompt)
        thing = asked.group(2)
        for relation in reversed(asked.group(1).split(" of the ")):
            thing = task.world.facts[thing][relation]
        assert thing == example.answer


def test_a_perfect_player_answers_every_question(task):
    for example in task.splits()["train"][::4]:
        text = ""
        for thing, relation, value in example.meta["chain"]:
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
        assert reward.parts == {"answer": 1.0, "format": 1.0, "searches": float(len(example.meta["chain"]))}


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
    (f"<think>a</think><search>b</search>{FOUND}<think>c</think><answer>Den Haag</answer>\n", True, True),
    (f"<search>b</search>{FOUND}<answer>The Hague</answer>", True, False),
    ("<think>a</think> so <answer>The Hague</answer>", True, False),
    ("hm" + FEEDBACK + "<think>a</think><answer>The Hague</answer>", True, False),
    ("<think>a</think><answer>Delft</answer>", False, True),
    ("<think>The Hague</think><answer>The Hague or Delft</answer>", False, True),
    ("<think>a</think><search>The Hague</search>", False, False),
    (f"<think>a</think><search><answer>The Hague</answer></search>{FOUND}<think>hm</think>", False, False),
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
    "text", ["<answer>" * 12_500, "<search>" * 12_500, "</search>" * 11_000, "<" * 100_000, FEEDBACK * 400]
)
def test_a_hundred_kilobytes_break_nothing(task, text):
    assert task.score(EXAMPLE, text).total == 0.0
    assert task.respond(EXAMPLE, text) in (FEEDBACK, None)


def row(prompt: Any, truth: Any = "Lena") -> dict[str, Any]:
    return {"prompt": prompt, "reward_model": {"ground_truth": {"target": [truth]}}}


@pytest.fixture
def ask(tmp_path: Path):
    """A function from rows and fields to tool_qa over these questions."""

    def make(*rows: dict[str, Any], questions: dict[str, Any] | None = None, **fields: Any) -> ToolQa:
        (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = {"path": str(tmp_path / "q.jsonl"), "heldout_fraction": 0, **(questions or {})}
        return make_task(ToolQaSpec(questions=data, retriever_url="http://127.0.0.1:9/x", **fields))

    return make


def test_the_instruction_is_the_template_of_the_questions(ask):
    given = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is mayor?"}]
    (example,) = ask(row(given), style="search_r1").splits()["train"]
    assert example.prompt == INSTRUCTION.replace("{prompt}", "Be brief.\n\nWho is mayor?") and not example.messages
    (plain,) = ask(row(given), style="compact").splits()["train"]
    assert plain.messages == given
    (mine,) = ask(row(given), style="search_r1", questions={"template": "Q: {prompt}"}).splits()["train"]
    assert mine.prompt == "Q: Be brief.\n\nWho is mayor?"


@pytest.mark.parametrize(
    ("scorer", "answer", "right"),
    [("auto", "about 42", False), ("auto", "the 42", True), ("numeric", "about 42.0", True)],
)
def test_the_scorer_of_the_questions_is_the_one_that_is_named(ask, scorer, answer, right):
    task = ask(row("How many?", 42), questions={"scorer": scorer})
    (example,) = task.splits()["train"]
    reward = task.score(example, f"<think>a</think><answer>{answer}</answer>")
    assert (reward.total, reward.correct, reward.parts["answer"]) == (float(right), right, float(right))
    assert task.score(example, "42").total == 0.0  # an answer has its tags, whatever compares it


GIVEN = {"questions": {"path": "q.jsonl"}, "corpus": "c.jsonl"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"corpus": "c.jsonl"}, r"corpus = 'c.jsonl': .* set questions, or remove it"),
        ({**GIVEN, "retriever_url": "http://x/y"}, r"corpus = 'c.jsonl': has no effect with retriever_url"),
    ],
)
def test_an_option_without_effect_is_refused(fields, says):
    with pytest.raises(ValidationError, match=says):
        ToolQaSpec(**fields)
