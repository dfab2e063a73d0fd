"""Task `tool_qa`: questions that need retrieval, with the protocol and rewards of Search-R1.

Questions come from a generated world, whose passages are found by BM25, or from `task.questions` with a retrieval server that has the
interface of Search-R1.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException, HTTPResponse
from random import Random
from typing import Any

from sharpscope.config.tasks import DatasetSpec, ToolQaSpec
from sharpscope.errors import UserError, first_line
from sharpscope.tasks.answers import last_tagged
from sharpscope.tasks.base import (
    Example,
    Reward,
    content_id,
    once,
    splits_by_level,
    stream_seed,
    take,
)
from sharpscope.tasks.dataset import SCORERS, DatasetTask
from sharpscope.untrusted import bound, parse_json, too_large

# -- retrieval

RETRIES, TIMEOUT = 3, 10.0
"""Retries of a failed request to a retrieval server, and time limit of a request [s]."""
LARGEST_RESPONSE, SLOWEST_RESPONSE = 64_000_000, 60.0
"""Largest response of a retrieval server [bytes], and the longest time that it may take to arrive [s]."""
TITLE_WEIGHT = 3
"""Number of repetitions of a title in the indexed text, so that the passage about an entity ranks above mentions of it."""


@dataclass(frozen=True)
class Passage:
    """A text that a search finds."""

    title: str
    text: str


class Bm25Retriever:
    """BM25 with the library bm25s. Passages without a word of the query are not returned."""

    def __init__(self, corpus: Sequence[Passage], top: int) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise UserError(
                "task.retriever: BM25 needs bm25s; pip install 'sharpscope[tools]'"
            ) from error
        self._corpus, self._top = corpus, min(top, len(corpus))
        self._tokenize = lambda texts: bm25s.tokenize(
            texts,
            stopwords=None,
            token_pattern=r"(?u)\b\w+\b",
            show_progress=False,
            return_ids=False,
        )
        texts = [f"{p.title} " * TITLE_WEIGHT + p.text for p in corpus]
        self._index = bm25s.BM25(backend="numpy")
        self._index.index(self._tokenize(texts), show_progress=False)

    def search(self, queries: Sequence[str]) -> list[list[Passage]]:
        """The best passages for each query. Ties keep the order of the index, so results are deterministic."""
        tokens = self._tokenize(list(queries))
        indices, scores = self._index.retrieve(
            tokens,
            k=self._top,
            show_progress=False,
            backend_selection="numpy",
        )
        return [
            [self._corpus[int(i)] for i, score in zip(row, row_scores, strict=True) if score > 0]
            for row, row_scores in zip(indices, scores, strict=True)
        ]


class HttpRetriever:
    """Client of a retrieval server.

    A request is `{"queries": […], "topk": k, "return_scores": true}`, a response `{"result": [[{"document": …}]]}`.
    """

    def __init__(self, url: str, top: int) -> None:
        if not re.match(r"https?://[^/:]", url):
            raise UserError(
                f"task.retriever_url = '{url}': not a valid address; use http://host:port/path"
            )
        self._url, self._top = url, top
        local = re.match(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:|/|$)", url)
        # A proxy set in the environment is not for this machine.
        self._opener = urllib.request.build_opener(
            *([urllib.request.ProxyHandler({})] if local else [])
        )

    def search(self, queries: Sequence[str]) -> list[list[Passage]]:
        """The best passages for each query, from one request.

        Raises:
            UserError: no valid response after all retries.
        """
        body = json.dumps(
            {"queries": list(queries), "topk": self._top, "return_scores": True}
        ).encode()
        request = urllib.request.Request(
            self._url,
            data=body,
            headers={"Content-Type": "application/json"},
        )
        problem = ""
        for attempt in range(RETRIES + 1):
            if attempt:
                time.sleep(min(0.1 * 2**attempt, 5.0))
            try:
                with self._opener.open(request, timeout=TIMEOUT) as response:
                    results = parse_json(_content(response))["result"]
                if len(results) != len(queries):
                    raise ValueError(f"{len(results)} results for {len(queries)} queries")
                return [[_passage(hit) for hit in hits][: self._top] for hits in results]
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}"
                if error.code < 500:  # an invalid request stays one
                    break
            except (
                OSError,
                HTTPException,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
            ) as error:
                problem = first_line(error)
        why = f"no valid response ({problem}); check that the retrieval server is running"
        raise UserError(f"task.retriever_url = '{self._url}': {why}")


def _content(response: HTTPResponse) -> bytes:
    """Content of a response; ValueError if it is larger than LARGEST_RESPONSE or takes longer than SLOWEST_RESPONSE."""
    content = bytearray()
    began = time.monotonic()
    while chunk := response.read1(1 << 16):
        content += chunk
        if len(content) > bound(LARGEST_RESPONSE):
            raise ValueError(too_large("the response", len(content), LARGEST_RESPONSE))
        if time.monotonic() - began > SLOWEST_RESPONSE:
            raise ValueError(f"the response was not complete after {SLOWEST_RESPONSE:g} s")
    return bytes(content)


def _passage(hit: Any) -> Passage:
    """The passage of `{"document": {"contents": "\"title\"\ntext"}}`, or with `title` and `text` in place of `contents`."""
    row = hit["document"]
    if "contents" not in row:
        return Passage(str(row.get("title", "")), str(row["text"]))
    title, _, text = row["contents"].partition("\n")
    return Passage(title.strip().strip('"'), text.strip())


# -- the generated world

RELATIONS: dict[str, dict[str, str]] = {
    "person": {"birthplace": "city", "employer": "company", "teacher": "person"},
    "company": {"seat": "city", "founder": "person"},
    "city": {"country": "country", "mayor": "person"},
    "country": {"capital": "city"},
}
"""Kind of entity -> relation -> kind of its value."""
SHARES = {"person": 0.5, "company": 0.2, "city": 0.2, "country": 0.1}
"""Fraction of the entities of each kind."""

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "st", "tr")
_VOWELS = ("a", "e", "i", "o", "u")


@dataclass(frozen=True)
class World:
    """Entities and facts."""

    kinds: dict[str, str]  # name, one invented word -> kind, a key of `RELATIONS`
    facts: dict[str, dict[str, str]]  # name -> relation -> name

    def corpus(self) -> list[Passage]:
        """One passage per entity, titled with its name: "Torvi. kind: city. country: Basto. mayor: Lena."."""
        return [
            Passage(
                name,
                " ".join(
                    f"{key}: {value}."
                    for key, value in [("kind", self.kinds[name]), *facts.items()]
                ),
            )
            for name, facts in self.facts.items()
        ]


def make_world(things: int, seed: int) -> World:
    """Generate a world of `things` entities (at least 20) with random names and facts, determined by `seed`."""
    rng = Random(seed)
    names: dict[str, None] = {}
    while len(names) < things:
        syllables = rng.randint(2, 3)
        names[
            "".join(
                rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)
            ).capitalize()
        ] = None
    remaining = list(names)
    by_kind: dict[str, list[str]] = {}
    for kind, share in SHARES.items():
        count = max(2, round(share * things))
        by_kind[kind] = remaining[:count]
        remaining = remaining[count:]
    by_kind["person"] += remaining
    kinds = {name: kind for kind, members in by_kind.items() for name in members}
    facts = {
        name: {
            relation: rng.choice([other for other in by_kind[target] if other != name])
            for relation, target in RELATIONS[kind].items()
        }
        for name, kind in kinds.items()
    }
    return World(kinds, facts)


def ask(world: World, hops: int, rng: Random) -> tuple[str, tuple[tuple[str, str, str], ...]]:
    """Random question such as "What is the mayor of the birthplace of Lena?", and (entity, relation, value) of each hop.

    Entities are distinct. The text contains none of the values; the last one is the answer.
    """
    while True:
        thing = rng.choice(list(world.facts))
        path = [thing]
        chain = []
        for _ in range(hops):
            relation = rng.choice(list(world.facts[path[-1]]))
            value = world.facts[path[-1]][relation]
            chain.append((path[-1], relation, value))
            path.append(value)
        if len(set(path)) == len(path):
            relations = " of the ".join(relation for _, relation, _ in reversed(chain))
            return f"What is the {relations} of {thing}?", tuple(chain)


# -- protocol

STOP = ("</search>", "</answer>")
"""Texts that end a turn of the policy."""
FEEDBACK = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
"""Response to a turn without a search or an answer, verbatim from Search-R1."""
INSTRUCTION = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you "
    "get new information. After reasoning, if you find you lack some knowledge, you can call a search engine "
    "by <search> query </search> and it will return the top searched results between <information> and "
    "</information>. You can search as many times as your want. If you find no further external knowledge "
    "needed, you can directly provide the answer inside <answer> and </answer>, without detailed "
    "illustrations. For example, <answer> Beijing </answer>. Question: {prompt}\n"
)
"""Prompt of Search-R1, verbatim."""
THINGS = 300
"""People, companies, cities and countries of the generated world."""
LONGEST_QUERY = 500
"""Maximum length of a query [characters]; longer ones are truncated."""

_INFORMATION_END = "</information>\n\n"
_TAG = re.compile(r"</?(?:think|search|information|answer)>")
_PROTOCOL = re.compile(
    "(?:<think></think><search></search><information></information>)*<think></think><answer></answer>"
)


def information(passages: Sequence[Passage]) -> str:
    """Response to a search: numbered passages, in which a space replaces each protocol tag."""
    # A space, so that parts of a tag cannot join to a new one.
    plain = [
        [" ".join(_TAG.sub(" ", text).split()) for text in (p.title, p.text)] for p in passages
    ]
    lines = [f"Doc {i}(Title: {title}) {text}" for i, (title, text) in enumerate(plain, 1)]
    return f"\n\n<information>{chr(10).join(lines) or 'No passage found.'}{_INFORMATION_END}"


def last_turn(text: str) -> str:
    """Text of the policy since the last response of the environment."""
    ends = [text.rfind(end) + len(end) for end in (_INFORMATION_END, FEEDBACK) if end in text]
    return text[max(ends, default=0) :]


def searches(text: str) -> int:
    """Number of responses with passages so far. The end of such a response counts even if the policy wrote it."""
    return text.count(_INFORMATION_END)


def answered(turn: str) -> bool:
    """Whether the turn contains `<answer>…</answer>`."""
    opening = turn.find("<answer>")
    return opening >= 0 and turn.find("</answer>", opening) >= 0


def follows_protocol(text: str) -> bool:
    """Whether a conversation is think (search information think)* answer, separated by white space only.

    No `think` may be missing, as in the format reward of Search-R1. Feedback for a malformed turn violates the format.
    """
    outside = _TAG.split(text)[::2]  # tags open and close in turn
    return (
        _PROTOCOL.fullmatch("".join(_TAG.findall(text))) is not None
        and not "".join(outside).strip()
    )


class ToolQa:
    """Splits `train` and `heldout`; the level is the number of hops.

    `meta["chain"]` of a generated question lists its hops.
    """

    name = "tool_qa"

    def __init__(self, spec: ToolQaSpec) -> None:
        self.spec = spec
        self.stop = STOP

    @cached_property
    def world(self) -> World:
        """The generated world."""
        return make_world(THINGS, stream_seed("world", self.spec.seed))

    @cached_property
    def retriever(self) -> HttpRetriever | Bm25Retriever:
        """The server, or BM25 over the world."""
        spec = self.spec
        if spec.retriever_url:
            return HttpRetriever(spec.retriever_url, spec.top)
        return Bm25Retriever(self.world.corpus(), spec.top)

    @once
    def splits(self) -> dict[str, list[Example]]:
        """Questions by split, without splits of size 0."""
        if self.spec.questions is not None:
            return self._read(self.spec.questions)
        return splits_by_level(
            self.spec,
            self.spec.hops,
            (),
            lambda *which: take(self._stream(*which[:2]), *which),
        )

    def _stream(self, split: str, hops: int) -> Iterator[Example]:
        rng = Random(stream_seed("tool_qa", self.spec.seed, split, hops))
        template = INSTRUCTION if self.spec.style == "search_r1" else "{prompt}\n"
        while True:
            question, chain = ask(self.world, hops, rng)
            answer = chain[-1][2]
            meta = {"id": content_id(question, answer), "level": hops, "question": question}
            meta |= {"chain": chain, "truths": (answer,)}
            yield Example(template.replace("{prompt}", question), answer, meta)

    def _read(self, questions: DatasetSpec) -> dict[str, list[Example]]:
        # that of the protocol
        scorer = "exact_match" if questions.scorer == "auto" else questions.scorer
        template = questions.template or (INSTRUCTION if self.spec.style == "search_r1" else "")
        return DatasetTask(
            questions.model_copy(update={"scorer": scorer, "template": template})
        ).splits()

    def respond(self, example: Example, completion: str) -> str | None:
        """Response to the last turn; see `respond_many`."""
        return self.respond_many([example], [completion])[0]

    def respond_many(
        self,
        examples: Sequence[Example],
        completions: Sequence[str],
    ) -> list[str | None]:
        """Responses to the last turns: passages for a search, feedback for a malformed turn, None at the end.

        A conversation ends with an answer or after `spec.turns` responses. All searches are sent to the retriever together.
        """
        responses: list[str | None] = []
        queries: dict[int, str] = {}
        for row, (example, completion) in enumerate(zip(examples, completions, strict=True)):
            text = example.whole(completion)
            turn = last_turn(text)
            query = " ".join((last_tagged(turn, "search") or "").split())[:LONGEST_QUERY]
            if answered(turn) or searches(text) + text.count(FEEDBACK) >= self.spec.turns:
                responses.append(None)
            elif not query:
                responses.append(FEEDBACK)
            else:
                queries[row] = query
                responses.append("")
        if queries:
            results = self.retriever.search(list(queries.values()))
            for row, passages in zip(queries, results, strict=True):
                responses[row] = information(passages)
        return responses

    def score(self, example: Example, completion: str) -> Reward:
        """Exact match of the last turn's answer (1 or 0); `task.questions.scorer` may set another scorer.

        `parts`: answer (1 if correct), format (1 if the protocol is followed), searches (number of responses with passages).
        """
        text = example.whole(completion)
        turn = last_turn(text)
        scorer = SCORERS[example.meta.get("scorer", "exact_match")]
        correct = answered(turn) and scorer(turn, example.meta["truths"]).correct
        parts = {
            "answer": float(correct),
            "format": float(follows_protocol(text)),
            "searches": float(searches(text)),
        }
        return Reward(float(correct), parts, correct=correct)
