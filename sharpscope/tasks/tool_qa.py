"""Task `tool_qa`: questions that need a search, asked and scored by Search-R1's protocol.

Generated worlds give the embedded scale; `task.questions` and `task.corpus` (or a retrieval server) give the real one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

from sharpscope.config.tasks import ToolQaSpec
from sharpscope.errors import UserError
from sharpscope.tasks.base import Example, Reward, content_id, stream_seed
from sharpscope.tasks.dataset import SCORERS, DatasetTask
from sharpscope.tasks.generated import take
from sharpscope.tasks.retrieval import Bm25Retriever, HttpRetriever, Retriever, read_corpus
from sharpscope.tasks.tool_protocol import (
    FEEDBACK,
    INSTRUCTION,
    STOP,
    answered,
    follows_protocol,
    information,
    last_turn,
    query_of,
    replies,
    searches,
)
from sharpscope.tasks.tool_world import World, ask, make_world

FORMAT_SHARE = 0.2
"""Search-R1's format variant: worth of the protocol being followed, and what a right answer loses where it is not."""
ANSWER_SHARE = 0.1
"""The same: worth of a wrong answer that was at least given, outside the protocol."""


class ToolQa:
    """Splits `train`, `heldout` and `unseen` (`spec.unseen_hops`); level = hops, and meta["chain"] the hops of made
    questions.
    """

    name = "tool_qa"

    def __init__(self, spec: ToolQaSpec) -> None:
        if spec.questions is not None and not (spec.corpus or spec.retriever_url):
            raise UserError("task.questions: needs passages to search; give task.corpus or task.retriever_url")
        self.spec = spec
        self.stop = STOP
        self._world: World | None = None
        self._retriever: Retriever | None = None
        self._splits: dict[str, list[Example]] | None = None

    @property
    def world(self) -> World:
        """The generated world; made at first use."""
        if self._world is None:
            self._world = make_world(self.spec.things, stream_seed("world", self.spec.seed))
        return self._world

    @property
    def retriever(self) -> Retriever:
        """BM25 over the corpus file or the world, or the server; made at first use."""
        if self._retriever is None:
            spec = self.spec
            if spec.retriever_url:
                self._retriever = HttpRetriever(spec.retriever_url, spec.top, spec.time_limit, spec.retries)
            else:
                self._retriever = Bm25Retriever(
                    read_corpus(spec.corpus) if spec.corpus else self.world.corpus(), spec.top
                )
        return self._retriever

    def splits(self) -> dict[str, list[Example]]:
        """Questions by split; a split asked for with size 0 is left out."""
        if self._splits is None:
            self._splits = self._generated() if self.spec.questions is None else self._read()
        return self._splits

    def _generated(self) -> dict[str, list[Example]]:
        spec = self.spec
        wanted = {
            "train": (spec.hops, spec.train_size),
            "heldout": (spec.hops, spec.heldout_size),
            "unseen": (spec.unseen_hops, spec.unseen_size),
        }
        return {
            split: [
                example
                for hops in sizes
                for example in take(
                    self._stream(split, hops), count, training=split == "train", field=f"task.{split}_size"
                )
            ]
            for split, (sizes, count) in wanted.items()
            if sizes and count
        }

    def _stream(self, split: str, hops: int) -> Iterator[Example]:
        rng = Random(stream_seed("tool_qa", self.spec.seed, split, hops))
        while True:
            question = ask(self.world, hops, rng)
            meta = {
                "id": content_id(question.text, question.answer),
                "level": hops,
                "question": question.text,
                "chain": question.chain,
                "truths": (question.answer,),
            }
            yield Example(self._prompt(question.text), question.answer, meta)

    def _read(self) -> dict[str, list[Example]]:
        assert self.spec.questions is not None
        questions = self.spec.questions
        # the protocol's own scorer needs no column that names one
        scorer = "exact_match" if questions.scorer == "auto" else questions.scorer
        made = DatasetTask(questions.model_copy(update={"scorer": scorer})).splits()
        return {split: [self._asked(example) for example in examples] for split, examples in made.items()}

    def _asked(self, example: Example) -> Example:
        """A question of the data set as the policy hears it: text that holds chat markup already stays as it is."""
        meta = dict(example.meta) | {"question": example.prompt}
        if example.templated:
            return replace(example, meta=meta)
        question = example.prompt.removesuffix(example.prefill)  # the prefill follows the instruction
        messages = example.messages  # a chat model gets these instead of the prompt
        if self.spec.style == "search_r1" and messages:
            messages = self._instructed(messages, example.prefill)
        return replace(example, prompt=self._prompt(question), meta=meta, messages=messages)

    def _instructed(self, turns: Sequence[Mapping[str, str]], prefill: str) -> list[Mapping[str, str]]:
        """Chat turns with the last one of the user within the instruction.

        Raises:
            UserError: the user says nothing in them.
        """
        places = [i for i, turn in enumerate(turns) if turn["role"] == "user"]
        if not places:
            raise UserError(
                "task.style = 'search_r1': a question of task.questions has chat messages but none with role 'user' to "
                "put the instruction into; give it one, or use task.style=compact"
            )
        last = places[-1]
        content = self._prompt(turns[last]["content"].removesuffix(prefill))
        return [*turns[:last], {**turns[last], "content": content}, *turns[last + 1 :]]

    def _prompt(self, question: str) -> str:
        template = INSTRUCTION if self.spec.style == "search_r1" else "{prompt}\n"
        return template.replace("{prompt}", question)

    def respond(self, example: Example, completion: str) -> str | None:
        """The reply to the last turn: see `respond_many`."""
        return self.respond_many([example], [completion])[0]

    def respond_many(self, examples: Sequence[Example], completions: Sequence[str]) -> list[str | None]:
        """Replies to the last turns of conversations: passages for a search, feedback for a malformed turn, or None.

        None ends a conversation: it has answered, or `spec.turns` replies were already given. All searches go to the
        retriever together.
        """
        answers: list[str | None] = []
        queries: dict[int, str] = {}
        for row, (example, completion) in enumerate(zip(examples, completions, strict=True)):
            text = example.whole(completion)
            turn = last_turn(text)
            query = query_of(turn)
            if answered(turn) or replies(text) >= self.spec.turns:
                answers.append(None)
            elif query is None:
                answers.append(FEEDBACK)
            else:
                queries[row] = query
                answers.append("")
        if queries:
            found = self.retriever.search(list(queries.values()))
            for row, passages in zip(queries, found, strict=True):
                answers[row] = information(passages)
        return answers

    def score(self, example: Example, completion: str) -> Reward:
        """Exact match of the last turn's answer (1 or 0), or Search-R1's format variant of it; `task.questions.scorer` may
        name another comparison.

        With `reward: format`: right and following the protocol 1, right 0.8, following it 0.2, wrong but answered 0.1,
        else 0. `parts`: answer (1 if right), format (1 if the protocol was followed), searches (number of replies
        asked for).
        """
        text = example.whole(completion)
        turn = last_turn(text)
        given = answered(turn)
        right = given and SCORERS[example.meta.get("scorer", "exact_match")](turn, example.meta["truths"]).correct
        followed = follows_protocol(text)
        total = float(right)
        if self.spec.reward == "format":
            if right:
                total = 1.0 if followed else 1.0 - FORMAT_SHARE
            else:
                total = FORMAT_SHARE if followed else ANSWER_SHARE if given else 0.0
        parts = {"answer": float(right), "format": float(followed), "searches": float(searches(text))}
        return Reward(total, parts, correct=right)
