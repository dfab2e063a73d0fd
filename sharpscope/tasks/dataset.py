"""Task `dataset`: questions and answers from Parquet or JSON Lines files.

Columns with common names are used as they are, as is the row format of the verl trainers (`prompt`, `data_source` and
`reward_model.ground_truth`); `task.columns` sets other names. Rows are held out by a hash of their content, so equal
questions are always on the same side of the split, in every file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sharpscope.config.tasks import ColumnsSpec, DatasetSpec
from sharpscope.errors import UserError, first_line, nearest
from sharpscope.tasks.answers import (
    final_answer,
    number_of,
    score_exact,
    score_exact_match,
    score_numeric,
)
from sharpscope.tasks.base import Example, Reward, content_id, held_out_share, once
from sharpscope.tasks.knights_knaves import roles_of, score_logic_rl
from sharpscope.tasks.math import score_math
from sharpscope.untrusted import check_regular, parse_json, read_lines

Row = dict[str, object]
Location = str
"""Location of a row, for error messages: `file.jsonl line 3` or `file.parquet row 3`, counted from 1."""

SUFFIXES = (".parquet", ".jsonl", ".ndjson")
PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "label")
VERL_ANSWER = "reward_model.ground_truth"

_SOURCES = {
    "logic_rl": "kk_logic logic_rl",
    "exact": "exact",
    "numeric": "numeric openai/gsm8k gsm8k",
    "math": "math lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 math_dapo aime aime24 aime25 "
    "aime_2024 amc amc23 minerva olympiad olympiad_bench deepscaler",
    "exact_match": "exact_match nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle",
}
DATA_SOURCES = {
    source: scorer for scorer, sources in _SOURCES.items() for source in sources.split()
}
DATA_SOURCES |= {
    f"searchR1_{source}": "exact_match" for source in _SOURCES["exact_match"].split()[1:]
}
"""Known `data_source` -> name of its scorer."""

SCORERS: dict[str, Callable[[str, Sequence[str]], Reward]] = {
    "exact": score_exact,
    "exact_match": score_exact_match,
    "numeric": score_numeric,
    "math": score_math,
}
"""Name -> scorer that compares the final answer of a text with the accepted answers."""
CHAT_MARKS = (
    "<|im_start|>",
    "<|start_header_id|>",
    "<start_of_turn>",
    "[INST]",
    "<|user|>",
    "<｜User｜>",
)
"""Markup that identifies a prompt with an applied chat template."""
_NUMBER = re.compile(r"[-+−]?\$?[\d,]*\.?\d+(?:\s?/\s?\d+)?%?")


class DatasetTask:
    """Splits `train` and, unless nothing is held out, `heldout`; `meta["scorer"]` is the scorer of a row."""

    name = "dataset"

    def __init__(self, spec: DatasetSpec) -> None:
        if not spec.path:
            raise UserError(
                "task.path: not set; give a .parquet or .jsonl file, or a folder of them"
            )
        self.spec = spec

    @once
    def rows(self) -> list[Example]:
        """All rows of `task.path` in file order, from every split."""
        return self._examples(self.spec.path, "task.path")

    @once
    def splits(self) -> dict[str, list[Example]]:
        """Rows by split, in file order.

        Raises:
            UserError: a file or row is invalid, or a split is empty.
        """
        spec = self.spec
        rows = self.rows()
        if spec.heldout_path:
            heldout = self._examples(spec.heldout_path, "task.heldout_path")
            contents = {example.meta["content"] for example in heldout}
        else:
            share = spec.heldout_fraction
            contents = {
                e.meta["content"] for e in rows if held_out_share(e.meta["content"]) < share
            }
            heldout = [example for example in rows if example.meta["content"] in contents]
        train = [example for example in rows if example.meta["content"] not in contents]
        for side, name in ((train, "training"), (heldout, "held-out")):
            if not side and (name == "training" or spec.heldout_fraction or spec.heldout_path):
                none = f"the {name} set has none of the {len(rows)} rows"
                given = f"task.heldout_fraction = {spec.heldout_fraction}: {none}"
                raise UserError(
                    f"{given}; change it, set task.heldout_path, or evaluate with --split all"
                )
        return {"train": train} | ({"heldout": heldout} if heldout else {})

    def score(self, example: Example, completion: str) -> Reward:
        """Reward of prefill and completion by the row's scorer."""
        text = example.whole(completion)
        if example.meta["scorer"] == "logic_rl":
            return score_logic_rl(text, roles_of(example.answer))
        return SCORERS[example.meta["scorer"]](text, example.meta["truths"])

    def _examples(self, path: str, field: str) -> list[Example]:
        examples: list[Example] = []
        for file in files_of(path, field):
            columns = None
            for where, row in read_file(file):
                columns = columns or _find_columns(self.spec.columns, list(row), where)
                examples.append(self._example(row, columns, where))
            if columns is None:
                raise UserError(f"{file}: the dataset has no rows")
        return examples

    def _example(self, row: Row, columns: ColumnsSpec, where: Location) -> Example:
        spec = self.spec
        prompt, messages = _read_prompt(_cell(row, columns.prompt, where, "prompt"), where)
        truth = _cell(row, columns.answer, where, "answer")
        meta: dict[str, Any] = {"scorer": self._scorer(row, truth, where), "level": "all"}
        meta["content"] = content_id(" ".join(prompt.split()))
        if meta["scorer"] == "logic_rl":
            given = truth.get("solution_text_format") if isinstance(truth, dict) else truth
            roles = roles_of(given) if isinstance(given, str) else {}
            if not roles:
                raise UserError(
                    f"{where}: the answer must be like '(1) Ava is a knight', got {given!r:.60}"
                )
            answer = str(given)
            meta |= {"level": len(roles), "names": tuple(roles)}
        else:
            meta["truths"] = _read_truths(truth, meta["scorer"], where)
            answer = meta["truths"][0]
        templated = any(mark in prompt for mark in CHAT_MARKS)
        if spec.template and not templated:
            prompt = spec.template.replace("{prompt}", prompt)
            messages = []
        return Example(
            prompt,
            answer,
            {"id": content_id(prompt, answer)} | meta,
            messages=messages if len(messages) > 1 and not templated else (),
            prefill=prompt[prompt.rfind("<think>") :]
            if prompt.rstrip().endswith("<think>")
            else "",
            templated=templated,
        )

    def _scorer(self, row: Row, truth: object, where: Location) -> str:
        """The configured scorer, that of the row's data_source, or one that suits the answer."""
        if self.spec.scorer != "auto":
            return self.spec.scorer
        if "data_source" not in row:
            if isinstance(truth, dict) and "solution_text_format" in truth:
                return "logic_rl"
            truths = [final_answer(text) for text in _read_truths(truth, "auto", where)]
            if any("\\" in text for text in truths):
                return "math"
            return "numeric" if all(_NUMBER.fullmatch(text) for text in truths) else "exact_match"
        source = row["data_source"]
        if not isinstance(source, str) or source not in DATA_SOURCES:
            hint = nearest(str(source), DATA_SOURCES)
            raise UserError(
                f"{where}: data_source {source!r:.60} has no scorer{hint}; or set task.scorer"
            )
        return DATA_SOURCES[source]


def _find_columns(columns: ColumnsSpec, present: Sequence[str], where: Location) -> ColumnsSpec:
    """Fill in the columns that are not configured from the common names among `present`, if these are unambiguous."""
    verl = "reward_model" in present
    found = {}
    for field, names in (("prompt", PROMPT_COLUMNS), ("answer", ANSWER_COLUMNS)):
        candidates = [name for name in names if name in present]
        if verl:  # its rows have other columns with such names
            candidates = [VERL_ANSWER] if field == "answer" else candidates[:1]
        found[field] = getattr(columns, field) or (candidates[0] if len(candidates) == 1 else "")
        if not found[field]:
            none = f"no column for the {field} (usual names: {', '.join(names)})"
            problem = f"{' and '.join(candidates)} can each be the {field}" if candidates else none
            valid = ", ".join(candidates or present)
            raise UserError(f"{where}: {problem}; set task.columns.{field} to one of: {valid}")
    return ColumnsSpec(**found)


def _read_prompt(value: object, where: Location) -> tuple[str, list[dict[str, str]]]:
    """Convert text, which becomes one user message, or a list of chat messages to text and chat messages."""
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
    try:
        messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns]  # type: ignore[attr-defined]
        text = "\n\n".join(message["content"] for message in messages)
    except (TypeError, KeyError, IndexError):
        text = ""
    if not text.strip():
        raise UserError(
            f"{where}: the prompt must be text or messages with 'role' and 'content', got {value!r:.60}"
        )
    return text, messages


def _read_truths(value: object, scorer: str, where: Location) -> tuple[str, ...]:
    """Convert text, a number, a list of them or `{"target": …}` to accepted answers; `numeric` needs a number in each."""
    if isinstance(value, dict) and "target" in value:
        value = value["target"]
    truths = []
    for item in value if isinstance(value, list) else [value]:
        number = (
            isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item)
        )
        text = repr(item) if isinstance(item, float) else str(item)
        if not (number or isinstance(item, str)) or not text.strip():
            raise UserError(
                f"{where}: the answer must be text, a number or a list of them, got {item!r:.60}"
            )
        if scorer == "numeric" and number_of(text) is None:
            raise UserError(
                f"{where}: the answer {text!r:.60} has no number, but the scorer is numeric"
            )
        truths.append(text)
    if not truths:
        raise UserError(f"{where}: the list of answers is empty")
    return tuple(truths)


def files_of(path: str, field: str) -> list[Path]:
    """The data file at `path`, or the sorted data files of a folder; `field` of the configuration has the path.

    Raises:
        UserError: the path does not exist or has no file of a known format.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise UserError(f"{field} = '{path}': no such file or folder (looked in {Path.cwd()})")
    files = [
        file
        for file in (sorted(root.iterdir()) if root.is_dir() else [root])
        if file.suffix in SUFFIXES
    ]
    if not files:
        raise UserError(
            f"{field} = '{path}': not a file or folder of a known format; valid: {', '.join(SUFFIXES)}"
        )
    return files


def read_file(file: Path) -> Iterator[tuple[Location, Row]]:
    """Rows of one Parquet or JSON Lines file, with their locations.

    Raises:
        UserError: the file is damaged.
    """
    where = str(file)
    try:
        check_regular(file)
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            batches = pq.ParquetFile(file).iter_batches(batch_size=1024)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from ((f"{file} row {number}", row) for number, row in enumerate(rows, 1))
            return
        for number, line in read_lines(file):
            where = f"{file} line {number}"
            row = parse_json(line) if line.strip() else {}
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__} instead of an object")
            if row:
                yield where, row
    except (OSError, ValueError, RecursionError, MemoryError) as error:  # also pyarrow's exceptions
        kind = "Parquet" if file.suffix == ".parquet" else "JSON lines in UTF-8"
        raise UserError(f"{where}: not readable as {kind} ({first_line(error)})") from error


def _cell(row: Row, column: str, where: Location, field: str) -> object:
    """Value of a column, set in `task.columns.field`; a dot selects a nested column unless a column has the full name."""
    if column in row:
        return row[column]
    value: object = row
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            hint = (
                nearest(part, map(str, value))
                if isinstance(value, dict)
                else f"; it is a {type(value).__name__}"
            )
            raise UserError(
                f"{where}: no column '{part}' (task.columns.{field} = '{column}'){hint}"
            )
        value = value[part]
    return value
