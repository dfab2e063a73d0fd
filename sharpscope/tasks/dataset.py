"""Task `dataset`: questions and answers from Parquet or JSON Lines files, or from the Hugging Face Hub.

Columns with common names are used as they are, as is the row format of the verl trainers (`prompt`, `data_source` and
`reward_model.ground_truth`); `task.columns` sets other names. Rows are held out by a hash of their content, so equal
questions are always on the same side of the split, in every file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sharpscope.config.tasks import ColumnsSpec, DatasetSpec
from sharpscope.errors import UserError, nearest
from sharpscope.tasks.answers import final_answer, number_of, score_exact, score_exact_match, score_numeric
from sharpscope.tasks.base import Example, Reward, content_id, held_out_share
from sharpscope.tasks.logic_rl import roles_of, score_logic_rl
from sharpscope.tasks.math_scoring import score_math
from sharpscope.tasks.statements import content_key, parse_statements, solve

Row = dict[str, Any]
Location = str
"""Location of a row, for error messages: `file.jsonl line 3` or `file.parquet row 3`, counted from 1."""
Pick = Callable[[Sequence[str], Location], Sequence[str]]
"""Function from the columns of a file to those to read; it raises UserError if one is missing."""

SUFFIXES = (".parquet", ".jsonl", ".ndjson")
PROMPT_COLUMNS = ("prompt", "question", "problem", "messages")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "label")
VERL_ANSWER = "reward_model.ground_truth"

DATA_SOURCES = {
    source: scorer
    for scorer, sources in {
        "logic_rl": "kk_logic logic_rl",
        "exact": "exact",
        "numeric": "numeric openai/gsm8k gsm8k",
        "math": "math lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 math_dapo aime aime24 aime25 "
        "aime_2024 amc amc23 minerva olympiad olympiad_bench deepscaler",
        "exact_match": "exact_match "
        + " ".join(
            f"{name} searchR1_{name}"
            for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
        ),
    }.items()
    for source in sources.split()
}
"""Known `data_source` -> name of its scorer."""

SCORERS: dict[str, Callable[[str, Sequence[str]], Reward]] = {
    "exact": score_exact,
    "exact_match": score_exact_match,
    "numeric": score_numeric,
    "math": score_math,
}
"""Name -> scorer that compares the final answer of a text with the accepted answers."""
CHAT_MARKS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|user|>", "<｜User｜>")
"""Markup that identifies a prompt with an applied chat template."""
_NUMBER = re.compile(r"[-+−]?\$?[\d,]*\.?\d+(?:\s?/\s?\d+)?%?")


class DatasetTask:
    """Splits `train` and, unless nothing is held out, `heldout`; `meta["scorer"]` is the scorer of a row."""

    def __init__(self, spec: DatasetSpec) -> None:
        if not spec.path:
            raise UserError(
                "task.path: not set; give a .parquet or .jsonl file, a folder of them or a Hugging Face dataset id"
            )
        self.spec = spec
        self.name = "dataset"
        self._columns = spec.columns
        self._rows_of_path: list[Example] | None = None
        self._splits: dict[str, list[Example]] | None = None

    def rows(self) -> list[Example]:
        """All rows of `task.path` in file order, from every split; cached.

        Raises:
            UserError: a file or row is invalid.
        """
        if self._rows_of_path is None:
            self._rows_of_path = self._examples(self.spec.path, "task.path")
        return self._rows_of_path

    def splits(self) -> dict[str, list[Example]]:
        """Rows by split, in file order; cached.

        Raises:
            UserError: a file or row is invalid, or a split is empty.
        """
        if self._splits is None:
            spec, rows = self.spec, self.rows()
            if spec.heldout_path:
                heldout = self._examples(spec.heldout_path, "task.heldout_path")
                contents = {example.meta["content"] for example in heldout}
            else:
                share = spec.heldout_fraction
                contents = {e.meta["content"] for e in rows if held_out_share(e.meta["content"]) < share}
                heldout = [example for example in rows if example.meta["content"] in contents]
            train = [example for example in rows if example.meta["content"] not in contents]
            for side, name in ((train, "training"), (heldout, "held-out")):
                if not side and (name == "training" or spec.heldout_fraction or spec.heldout_path):
                    raise UserError(
                        f"task.heldout_fraction = {spec.heldout_fraction}: the {name} set has none of the {len(rows)} rows;"
                        " change the fraction (0: no held-out set), set task.heldout_path, or evaluate with --split all"
                    )
            self._splits = {"train": train} | ({"heldout": heldout} if heldout else {})
        return self._splits

    def score(self, example: Example, completion: str) -> Reward:
        """Reward of prefill and completion by the row's scorer."""
        text = example.whole(completion)
        if example.meta["scorer"] == "logic_rl":
            return score_logic_rl(text, roles_of(example.answer))
        return SCORERS[example.meta["scorer"]](text, example.meta["truths"])

    def _examples(self, path: str, field: str) -> list[Example]:
        examples: list[Example] = []
        for location, row in self._read(path, field):
            examples.append(self._example(row, location))
            if len(examples) == self.spec.limit:
                break
        return examples

    def _read(self, path: str, field: str) -> Iterator[tuple[Location, Row]]:
        spec = self.spec
        hub_id = path.count("/") == 1 and not Path(path).suffix and not Path(path).expanduser().exists()
        if spec.source == "huggingface" or (spec.source == "auto" and hub_id):
            yield from read_hub(path, spec.subset, spec.hub_split, self._pick)
            return
        for file in files_of(path, field):
            yield from read_file(file, self._pick)

    def _pick(self, present: Sequence[str], location: Location) -> Sequence[str]:
        """Set the columns of a file, and return those to read."""
        columns = self._columns = find_columns(self.spec.columns, present, location)
        used = [columns.prompt, columns.answer, columns.data_source, columns.level, "statements"]
        return [name for column in used for name in (column, column.partition(".")[0]) if name]

    def _example(self, row: Row, location: Location) -> Example:
        spec, columns = self.spec, self._columns
        prompt, messages = read_prompt(cell(row, columns.prompt, location, "prompt"), location)
        truth = cell(row, columns.answer, location, "answer")
        scorer = self._scorer(row, truth, location)
        if scorer == "logic_rl":
            answer, meta = _puzzle(truth, row, location)
        else:
            truths = read_truths(truth, scorer, location)
            content = content_id(" ".join(prompt.split()))
            answer, meta = truths[0], {"truths": truths, "level": "all", "content": content}
        if columns.level:
            meta["level"] = _level(cell(row, columns.level, location, "level"), location)
        if spec.template:
            prompt = spec.template.replace("{prompt}", prompt)
        templated = any(mark in prompt for mark in CHAT_MARKS)
        return Example(
            prompt,
            answer,
            {"id": content_id(prompt, answer), "scorer": scorer} | meta,
            messages=messages if len(messages) > 1 and not (templated or spec.template) else (),
            prefill=prompt[prompt.rfind("<think>") :] if prompt.rstrip().endswith("<think>") else "",
            templated=templated,
        )

    def _scorer(self, row: Row, truth: object, location: Location) -> str:
        """The configured scorer, that of the row's data_source, or one that suits the answer."""
        if self.spec.scorer != "auto":
            return self.spec.scorer
        if not self._columns.data_source:
            if isinstance(truth, dict) and "solution_text_format" in truth:
                return "logic_rl"
            truths = [final_answer(text) for text in read_truths(truth, "auto", location)]
            if any("\\" in text for text in truths):
                return "math"
            return "numeric" if all(_NUMBER.fullmatch(text) for text in truths) else "exact_match"
        source = cell(row, self._columns.data_source, location, "data_source")
        if not isinstance(source, str) or source not in DATA_SOURCES:
            raise UserError(
                f"{location}: data_source {source!r:.60} has no scorer{nearest(str(source), DATA_SOURCES)}"
                f" or set task.scorer to one of: {', '.join(sorted({*SCORERS, 'logic_rl'}))}"
            )
        return DATA_SOURCES[source]


def find_columns(columns: ColumnsSpec, present: Sequence[str], location: Location) -> ColumnsSpec:
    """Fill in the columns that are not configured from the common names among `present`.

    Raises:
        UserError: none or several columns can be the prompt or the answer.
    """
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
            raise UserError(
                f"{location}: {problem}; set task.columns.{field} to one of: {', '.join(candidates or present)}"
            )
    source = columns.data_source or ("data_source" if "data_source" in present else "")
    return columns.model_copy(update=found | {"data_source": source})


def read_prompt(value: object, location: Location) -> tuple[str, list[dict[str, str]]]:
    """Convert a prompt to text and chat messages.

    Args:
        value: text, which becomes one user message, or a list of chat messages, whose contents are joined by empty lines.
        location: where the row is, for error messages.

    Raises:
        UserError: the prompt is neither, or is empty.
    """
    if isinstance(value, str):
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value:
        messages = []
        for message in value:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise UserError(f"{location}: prompt message {message!r:.60} needs 'role' and 'content' with text")
            messages.append({"role": message["role"], "content": message["content"]})
    else:
        raise UserError(f"{location}: prompt must be text or a list of chat messages, got {type(value).__name__}")
    text = "\n\n".join(message["content"] for message in messages)
    if not text.strip():
        raise UserError(f"{location}: the prompt is empty")
    return text, messages


def read_truths(value: object, scorer: str, location: Location) -> tuple[str, ...]:
    """Convert the ground truth to accepted answers.

    Args:
        value: text or a number, a list of them, or `{"target": …}` as in question-answering datasets.
        scorer: name of the scorer; `numeric` needs a number in every answer.
        location: where the row is, for error messages.

    Raises:
        UserError: the value is none of these, or an answer is empty.
    """
    if isinstance(value, dict) and "target" in value:
        value = value["target"]
    truths = []
    for item in value if isinstance(value, list) else [value]:
        number = isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item)
        if not (number or isinstance(item, str)):
            raise UserError(f"{location}: the answer must be text, a number or a list of them, got {item!r:.60}")
        text = repr(item) if isinstance(item, float) else str(item)
        if not text.strip():
            raise UserError(f"{location}: the answer is empty")
        if scorer == "numeric" and number_of(text) is None:
            raise UserError(f"{location}: the answer {text!r:.60} has no number, but the scorer is numeric")
        truths.append(text)
    if not truths:
        raise UserError(f"{location}: the list of answers is empty")
    return tuple(truths)


def _puzzle(truth: object, row: Row, location: Location) -> tuple[str, dict[str, Any]]:
    """Answer and meta of a Knights-and-Knaves row, whose ground truth must be the only solution of its statements."""
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise UserError(f"{location}: the ground truth is not valid JSON ({error})") from error
    fields = truth if isinstance(truth, dict) else {"solution_text_format": truth}
    answer = fields.get("solution_text_format")
    roles = roles_of(answer) if isinstance(answer, str) else {}
    if not isinstance(answer, str) or not roles:
        raise UserError(
            f"{location}: the ground truth needs solution_text_format, such as '(1) Ava is a knight', got {answer!r:.60}"
        )
    statements = fields.get("statements", row.get("statements"))
    if statements is None:
        raise UserError(f"{location}: no 'statements' in the ground truth or the row")
    puzzle = parse_statements(statements, f"{location}: statements")
    solution = tuple(role == "knight" for role in roles.values())
    if len(puzzle) != len(roles) or solve(puzzle) != [solution]:
        raise UserError(
            f"{location}: the solution {answer!r:.60} is not the only one; the statements have {len(solve(puzzle))}"
        )
    names, content = tuple(roles), content_key(puzzle)
    return answer, {
        "level": len(roles), "names": names, "solution": solution, "statements": puzzle, "content": content,
    }  # fmt: skip


def _level(value: object, location: Location) -> int | str:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    raise UserError(f"{location}: the level must be an integer or text, got {value!r:.60}")


def files_of(path: str, field: str) -> list[Path]:
    """The data file at `path`, or the sorted data files of a folder.

    Args:
        path: file or folder.
        field: configuration field of `path`, for the error message.

    Raises:
        UserError: the path does not exist or has no file of a known format.
    """
    root = Path(path).expanduser()
    if root.is_dir():
        files = sorted(file for file in root.iterdir() if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise UserError(f"{field} = '{path}': the folder has no {', '.join(SUFFIXES)} file")
        return files
    if not root.is_file():
        raise UserError(f"{field} = '{path}': no such file or folder (looked in {Path.cwd()})")
    if root.suffix not in SUFFIXES:
        raise UserError(
            f"{field} = '{path}': '{root.suffix or 'no suffix'}' is not a known format; valid: {', '.join(SUFFIXES)}"
        )
    return [root]


def read_file(file: Path, pick: Pick) -> Iterator[tuple[Location, Row]]:
    """Rows of one file; of a Parquet file, only the columns that `pick` returns.

    Raises:
        UserError: the file is damaged, or has no rows.
    """
    empty = True
    for item in _parquet(file, pick) if file.suffix == ".parquet" else _json_lines(file, pick):
        empty = False
        yield item
    if empty:
        raise UserError(f"{file}: the dataset has no rows")


def _parquet(file: Path, pick: Pick) -> Iterator[tuple[Location, Row]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = pq.ParquetFile(file)
        present = source.schema_arrow.names
        wanted = set(pick(present, str(file)))
        number = 0
        for batch in source.iter_batches(batch_size=1024, columns=[name for name in present if name in wanted]):
            for row in batch.to_pylist():
                number += 1
                yield f"{file} row {number}", row
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise UserError(f"{file}: not a readable Parquet file ({_first_line(error)})") from error


def _json_lines(file: Path, pick: Pick) -> Iterator[tuple[Location, Row]]:
    try:
        with file.open(encoding="utf-8") as lines:
            first = True
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                location = f"{file} line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"{location}: not JSON ({_first_line(error)}); write one object per line"
                    ) from error
                if not isinstance(row, dict):
                    raise UserError(f"{location}: a {type(row).__name__}; write one object per line")
                if first:
                    pick(list(row), location)
                first = False
                yield location, row
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({_first_line(error)})") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({_first_line(error)})") from error


def read_hub(path: str, subset: str, split: str, pick: Pick) -> Iterator[tuple[Location, Row]]:
    """Rows of a Hugging Face dataset, through the optional library `datasets`.

    Args:
        path: id of the dataset, or a local folder.
        subset: name of its configuration, or empty.
        split: name of the split.
        pick: called with the columns.

    Raises:
        UserError: the library, the dataset or the split is missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "task.source = huggingface: needs the library 'datasets'; pip install 'sharpscope[hub]'"
        ) from error
    saved = Path(path, "dataset_info.json").is_file() or Path(path, "dataset_dict.json").is_file()
    try:
        loaded = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, subset or None)
    except Exception as error:  # the library raises many types: network, format, name
        raise UserError(
            f"task.path = '{path}': not a local file, and not a loadable Hugging Face dataset ({_first_line(error)})"
        ) from error
    if isinstance(loaded, dict):
        if split not in loaded:
            raise UserError(f"task.hub_split = '{split}': '{path}' has no such split{nearest(split, loaded)}")
        loaded = loaded[split]
    if len(loaded) == 0:
        raise UserError(f"{path}: the dataset has no rows")
    pick(loaded.column_names, path)
    for number, row in enumerate(loaded, 1):
        yield f"{path} row {number}", dict(row)


def cell(row: Row, column: str, location: Location, field: str) -> Any:
    """Value of a column of a row.

    Args:
        row: the row.
        column: name of the column; a dot selects a nested column unless a column has the full name.
        location: where the row is, for the error message.
        field: field of `task.columns`, for the error message.

    Raises:
        UserError: the column does not exist.
    """
    if column in row:
        return row[column]
    value: Any = row
    path: list[str] = []
    for part in column.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):  # some files store nested columns as JSON text
            try:
                value = json.loads(value)
            except ValueError:
                value = None
        if not isinstance(value, dict) or part not in value:
            parent = f" in '{'.'.join(path)}'" if path else ""
            hint = nearest(part, map(str, value)) if isinstance(value, dict) else f"; it is a {type(value).__name__}"
            raise UserError(f"{location}: no column '{part}'{parent} (task.columns.{field} = '{column}'){hint}")
        value = value[part]
        path.append(part)
    return value


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return text[:200] or type(error).__name__
