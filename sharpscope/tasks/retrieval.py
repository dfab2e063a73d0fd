"""Retrieval of passages: BM25 over a corpus in memory, or a server with the interface of Search-R1."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from sharpscope.errors import UserError, first_line
from sharpscope.tasks.dataset import files_of, read_file

RETRIES, TIMEOUT = 3, 10.0
"""Retries of a failed request to a retrieval server, and time limit of a request [s]."""
TITLE_WEIGHT = 3
"""Number of repetitions of a title in the indexed text, so that the passage about an entity ranks above mentions of it."""


@dataclass(frozen=True)
class Passage:
    """A passage of the corpus."""

    title: str
    text: str


class Bm25Retriever:
    """BM25 with the library bm25s. Passages without a word of the query are not returned."""

    def __init__(self, corpus: Sequence[Passage], top: int) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise UserError("task.retriever: BM25 needs bm25s; pip install 'sharpscope[tools]'") from error
        self._corpus = corpus
        self._top = min(top, len(corpus))
        self._tokenize = lambda texts: bm25s.tokenize(
            texts, stopwords=None, token_pattern=r"(?u)\b\w+\b", show_progress=False, return_ids=False
        )
        self._index = bm25s.BM25(backend="numpy")
        self._index.index(
            self._tokenize([f"{f'{p.title} ' * TITLE_WEIGHT}{p.text}" for p in corpus]), show_progress=False
        )

    def search(self, queries: Sequence[str]) -> list[list[Passage]]:
        """The best passages for each query. Ties keep the order of the index, so results are deterministic."""
        if not queries:
            return []
        tokens = self._tokenize(list(queries))
        indices, scores = self._index.retrieve(tokens, k=self._top, show_progress=False, backend_selection="numpy")
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
            raise UserError(f"task.retriever_url = '{url}': not a valid address; use http://host:port/path")
        self._url, self._top = url, top
        local = re.match(
            r"https?://(localhost|127\.0\.0\.1|\[::1\])(:|/|$)", url
        )  # bypasses a proxy set in the environment
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))

    def search(self, queries: Sequence[str]) -> list[list[Passage]]:
        """The best passages for each query, from one request.

        Raises:
            UserError: no valid response after all retries.
        """
        if not queries:
            return []
        body = json.dumps({"queries": list(queries), "topk": self._top, "return_scores": True}).encode()
        request = urllib.request.Request(self._url, data=body, headers={"Content-Type": "application/json"})
        problem = ""
        for attempt in range(RETRIES + 1):
            if attempt:
                time.sleep(min(0.1 * 2**attempt, 5.0))
            try:
                with self._opener.open(request, timeout=TIMEOUT) as response:
                    results = json.load(response)["result"]
                if len(results) != len(queries):
                    raise ValueError(f"{len(results)} results for {len(queries)} queries")
                return [[passage_of(hit) for hit in hits][: self._top] for hits in results]
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}"
                if error.code < 500:  # repeating an invalid request is useless
                    break
            except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
                problem = first_line(error)
        why = f"no valid response ({problem}); check that the retrieval server is running"
        raise UserError(f"task.retriever_url = '{self._url}': {why}")


def passage_of(row: Any) -> Passage:
    """Convert `{"title", "text"}`, Search-R1's `{"contents": "\\"title\\"\\ntext"}`, or `{"document": …}` with one of them.

    Raises:
        ValueError: the row has neither format.
    """
    row = row.get("document", row) if isinstance(row, dict) else row
    if isinstance(row, dict) and isinstance(row.get("contents"), str):
        title, _, text = row["contents"].partition("\n")
        return Passage(title.strip().strip('"'), text.strip())
    if isinstance(row, dict) and isinstance(row.get("text"), str) and isinstance(row.get("title", ""), str):
        return Passage(row.get("title", ""), row["text"])
    raise ValueError("a passage needs the text columns 'title' and 'text', or 'contents'")


def read_corpus(path: str) -> list[Passage]:
    """Read the passages of a .jsonl or .parquet file, or of a folder of them.

    Raises:
        UserError: the file does not exist, or a row is not a passage.
    """
    passages = []
    for file in files_of(path, "task.corpus"):
        for where, row in read_file(file):
            try:
                passages.append(passage_of(row))
            except ValueError as error:
                raise UserError(f"{where}: {error}") from error
    return passages
