"""BM25 over a corpus, a corpus file, and a retrieval server of Search-R1's form."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sharpscope.errors import UserError
from sharpscope.tasks import ToolQaSpec, make_task
from sharpscope.tasks.retrieval import Bm25Retriever, HttpRetriever, Passage, passage_of, read_corpus

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
    assert retriever.search([]) == []
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
    from sharpscope.tasks import retrieval

    waits = []
    monkeypatch.setattr(retrieval.time, "sleep", waits.append)
    return waits


def client(server) -> HttpRetriever:
    return HttpRetriever(f"http://127.0.0.1:{server.server_port}/retrieve", top=2)


def test_a_server_is_asked_once_for_a_batch(server):
    found = client(server).search(["a b", "c"])
    assert found == [[Passage("a b", "about a b")] * 2, [Passage("c", "about c")] * 2]
    assert server.seen == [{"queries": ["a b", "c"], "topk": 2, "return_scores": True}]
    assert client(server).search([]) == []
    assert len(server.seen) == 1


@pytest.mark.parametrize("act", ["broken", "garbage", "short", "strange", "cut"])
def test_a_passing_failure_is_retried(server, quick, act):
    server.plan = [act, act]
    assert client(server).search(["a"])[0][0].title == "a"
    assert len(server.seen) == 3
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
