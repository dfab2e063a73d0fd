"""Task `tool_qa`: questions that need retrieval, with the protocol and rewards of Search-R1.

Questions come from a generated world, or from `task.questions` with `task.corpus` or a retrieval server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from random import Random

from sharpscope.config.tasks import DatasetSpec, ToolQaSpec
from sharpscope.errors import UserError
from sharpscope.tasks.answers import last_tagged
from sharpscope.tasks.base import Example, Reward, content_id, once, splits_by_level, stream_seed, take
from sharpscope.tasks.dataset import SCORERS, DatasetTask
from sharpscope.tasks.retrieval import Bm25Retriever, HttpRetriever, Passage, read_corpus
from sharpscope.tasks.tool_world import World, ask, make_world

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


def information(passages: Sequence[Passage]) -> str:
    """Response to a search: numbered passages, in which a space replaces each protocol tag."""
    # A space, so that parts of a tag cannot join to a new one.
    plain = [[" ".join(_TAG.sub(" ", text).split()) for text in (p.title, p.text)] for p in passages]
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
    expected = {
        "start": {"<think>": "think"},
        "think": {"</think>": "thought"},
        "thought": {"<search>": "search", "<answer>": "answer"},
        "search": {"</search>": "searched"},
        "searched": {"<information>": "information"},
        "information": {"</information>": "start"},
        "answer": {"</answer>": "end"},
        "end": {},
    }
    state, position = "start", 0
    for match in _TAG.finditer(text):
        between = text[position : match.start()]
        if match.group() not in expected[state] or (between.strip() and state in ("start", "thought", "searched")):
            return False
        state, position = expected[state][match.group()], match.end()
    return state == "end" and not text[position:].strip()


class ToolQa:
    """Splits `train` and `heldout`; the level is the number of hops.

    `meta["chain"]` of a generated question lists its hops.
    """

    name = "tool_qa"

    def __init__(self, spec: ToolQaSpec) -> None:
        if spec.questions is not None and not (spec.corpus or spec.retriever_url):
            raise UserError("task.questions: needs passages to search; set task.corpus or task.retriever_url")
        self.spec = spec
        self.stop = STOP

    @cached_property
    def world(self) -> World:
        """The generated world."""
        return make_world(THINGS, stream_seed("world", self.spec.seed))

    @cached_property
    def retriever(self) -> HttpRetriever | Bm25Retriever:
        """The server, or BM25 over the corpus file or the world."""
        spec = self.spec
        if spec.retriever_url:
            return HttpRetriever(spec.retriever_url, spec.top)
        return Bm25Retriever(read_corpus(spec.corpus) if spec.corpus else self.world.corpus(), spec.top)

    @once
    def splits(self) -> dict[str, list[Example]]:
        """Questions by split, without splits of size 0."""
        if self.spec.questions is not None:
            return self._read(self.spec.questions)
        return splits_by_level(self.spec, self.spec.hops, (), self._generated)

    def _generated(self, split: str, hops: int, count: int) -> list[Example]:
        """`count` different questions of a split."""
        return take(self._stream(split, hops), count, training=split == "train", field=f"task.{split}_size")

    def _stream(self, split: str, hops: int) -> Iterator[Example]:
        rng = Random(stream_seed("tool_qa", self.spec.seed, split, hops))
        template = INSTRUCTION if self.spec.style == "search_r1" else "{prompt}\n"
        while True:
            question = ask(self.world, hops, rng)
            meta = {
                "id": content_id(question.text, question.answer),
                "level": hops,
                "question": question.text,
                "chain": question.chain,
                "truths": (question.answer,),
            }
            yield Example(template.replace("{prompt}", question.text), question.answer, meta)

    def _read(self, questions: DatasetSpec) -> dict[str, list[Example]]:
        changes = {}
        if questions.scorer == "auto":  # that of the protocol, which needs no data_source column
            changes["scorer"] = "exact_match"
        if not questions.template and self.spec.style == "search_r1":
            changes["template"] = INSTRUCTION
        return DatasetTask(questions.model_copy(update=changes)).splits()

    def respond(self, example: Example, completion: str) -> str | None:
        """Response to the last turn; see `respond_many`."""
        return self.respond_many([example], [completion])[0]

    def respond_many(self, examples: Sequence[Example], completions: Sequence[str]) -> list[str | None]:
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
        turn, scorer = last_turn(text), SCORERS[example.meta.get("scorer", "exact_match")]
        correct = answered(turn) and scorer(turn, example.meta["truths"]).correct
        parts = {"answer": float(correct), "format": float(follows_protocol(text)), "searches": float(searches(text))}
        return Reward(float(correct), parts, correct=correct)
