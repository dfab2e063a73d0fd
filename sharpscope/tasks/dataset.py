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
from sharpscope.tasks.base import Example, Reward, content_id, held_out_share, once
from sharpscope.tasks.logic_rl import roles_of, score_logic_rl
from sharpscope.tasks.math_scoring import score_math
from sharpscope.tasks.statements import content_key, parse_statements, solve

Row = dict[str, Any]
Location = str
"""Location of a row, for error messages: `file.jsonl line 3` or `file.parquet row 3`, counted from 1."""

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

    name = "dataset"

    def __init__(self, spec: DatasetSpec) -> None:
        if not spec.path:
            raise UserError(
                "task.path: not set; give a .parquet or .jsonl file, a folder of them or a Hugging Face dataset id"
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
        return {"train": train} | ({"heldout": heldout} if heldout else {})

    def score(self, example: Example, completion: str) -> Reward:
        """Reward of prefill and completion by the row's scorer."""
        text = example.whole(completion)
        if example.meta["scorer"] == "logic_rl":
            return score_logic_rl(text, roles_of(example.answer))
        return SCORERS[example.meta["scorer"]](text, example.meta["truths"])

    def _examples(self, path: str, field: str) -> list[Example]:
        spec, examples = self.spec, []
        hub_id = path.count("/") == 1 and not Path(path).suffix and not Path(path).expanduser().exists()
        saved = any(Path(path, name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))
        for file in [path] if hub_id or saved else files_of(path, field):
            rows = read_file(file) if isinstance(file, Path) else _read_hub(path, spec.subset, spec.hub_split)
            columns = None
            for where, row in rows:
                columns = columns or _find_columns(spec.columns, list(row), where)
                examples.append(self._example(row, columns, where))
                if len(examples) == spec.limit:
                    return examples
            if columns is None:
                raise UserError(f"{file}: the dataset has no rows")
        return examples

    def _example(self, row: Row, columns: ColumnsSpec, where: Location) -> Example:
        spec = self.spec
        prompt, messages = _read_prompt(_cell(row, columns.prompt, where, "prompt"), where)
        truth = _cell(row, columns.answer, where, "answer")
        scorer = self._scorer(row, columns, truth, where)
        if scorer == "logic_rl":
            answer, meta = _puzzle(truth, row, where)
        else:
            truths = _read_truths(truth, scorer, where)
            content = content_id(" ".join(prompt.split()))
            answer, meta = truths[0], {"truths": truths, "level": "all", "content": content}
        if columns.level:
            level = _cell(row, columns.level, where, "level")
            if not isinstance(level, str | int | float):
                raise UserError(f"{where}: the level must be a number or text, got {level!r:.60}")
            meta["level"] = int(level) if isinstance(level, float) and level.is_integer() else level
        templated = any(mark in prompt for mark in CHAT_MARKS)
        if spec.template and not templated:
            prompt, messages = spec.template.replace("{prompt}", prompt), []
        return Example(
            prompt,
            answer,
            {"id": content_id(prompt, answer), "scorer": scorer} | meta,
            messages=messages if len(messages) > 1 and not templated else (),
            prefill=prompt[prompt.rfind("<think>") :] if prompt.rstrip().endswith("<think>") else "",
            templated=templated,
        )

    def _scorer(self, row: Row, columns: ColumnsSpec, truth: object, where: Location) -> str:
        """The configured scorer, that of the row's data_source, or one that suits the answer."""
        if self.spec.scorer != "auto":
            return self.spec.scorer
        if not columns.data_source:
            if isinstance(truth, dict) and "solution_text_format" in truth:
                return "logic_rl"
            truths = [final_answer(text) for text in _read_truths(truth, "auto", where)]
            if any("\\" in text for text in truths):
                return "math"
            return "numeric" if all(_NUMBER.fullmatch(text) for text in truths) else "exact_match"
        source = _cell(row, columns.data_source, where, "data_source")
        if not isinstance(source, str) or source not in DATA_SOURCES:
            raise UserError(
                f"{where}: data_source {source!r:.60} has no scorer{nearest(str(source), DATA_SOURCES)}"
                f" or set task.scorer to one of: {', '.join(sorted({*SCORERS, 'logic_rl'}))}"
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
            raise UserError(
                f"{where}: {problem}; set task.columns.{field} to one of: {', '.join(candidates or present)}"
            )
    source = columns.data_source or ("data_source" if "data_source" in present else "")
    return columns.model_copy(update=found | {"data_source": source})


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
            f"{where}: the prompt must be text or a list of chat messages with 'role' and 'content', got {value!r:.60}"
        )
    return text, messages


def _read_truths(value: object, scorer: str, where: Location) -> tuple[str, ...]:
    """Convert text, a number, a list of them or `{"target": …}` to accepted answers; `numeric` needs a number in each."""
    if isinstance(value, dict) and "target" in value:
        value = value["target"]
    truths = []
    for item in value if isinstance(value, list) else [value]:
        number = isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item)
        text = repr(item) if isinstance(item, float) else str(item)
        if not (number or isinstance(item, str)) or not text.strip():
            raise UserError(f"{where}: the answer must be text, a number or a list of them, got {item!r:.60}")
        if scorer == "numeric" and number_of(text) is None:
            raise UserError(f"{where}: the answer {text!r:.60} has no number, but the scorer is numeric")
        truths.append(text)
    if not truths:
        raise UserError(f"{where}: the list of answers is empty")
    return tuple(truths)


def _puzzle(truth: object, row: Row, where: Location) -> tuple[str, dict[str, Any]]:
    """Answer and meta of a Knights-and-Knaves row, whose ground truth must be the only solution of its statements."""
    fields = _nested(truth)
    fields = fields if isinstance(fields, dict) else {"solution_text_format": fields}
    answer = fields.get("solution_text_format")
    roles = roles_of(answer) if isinstance(answer, str) else {}
    puzzle = parse_statements(fields.get("statements", row.get("statements")), f"{where}: statements")
    solution = tuple(role == "knight" for role in roles.values())
    if not isinstance(answer, str) or solve(puzzle) != [solution]:
        raise UserError(
            f"{where}: solution_text_format {answer!r:.60} must be the only solution of the statements, such as "
            f"'(1) Ava is a knight'; they have {len(solve(puzzle))}"
        )
    meta = {"level": len(roles), "names": tuple(roles), "solution": solution, "statements": puzzle}
    return answer, meta | {"content": content_key(puzzle)}


def files_of(path: str, field: str) -> list[Path]:
    """The data file at `path`, or the sorted data files of a folder; `field` of the configuration has the path.

    Raises:
        UserError: the path does not exist or has no file of a known format.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise UserError(f"{field} = '{path}': no such file or folder (looked in {Path.cwd()})")
    files = [file for file in (sorted(root.iterdir()) if root.is_dir() else [root]) if file.suffix in SUFFIXES]
    if not files:
        raise UserError(f"{field} = '{path}': not a file or folder of a known format; valid: {', '.join(SUFFIXES)}")
    return files


def read_file(file: Path) -> Iterator[tuple[Location, Row]]:
    """Rows of one Parquet or JSON Lines file, with their locations.

    Raises:
        UserError: the file is damaged.
    """
    where = str(file)
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            batches = pq.ParquetFile(file).iter_batches(batch_size=1024)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from ((f"{file} row {number}", row) for number, row in enumerate(rows, 1))
            return
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{file} line {number}"
                row = json.loads(line) if line.strip() else {}
                if not isinstance(row, dict):
                    raise ValueError(f"a {type(row).__name__} instead of an object")
                if row:
                    yield where, row
    except (
        OSError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:  # pyarrow's exceptions are ValueErrors or OSErrors
        raise UserError(f"{where}: not readable as {file.suffix[1:]} ({_first_line(error)})") from error


def _read_hub(path: str, subset: str, split: str) -> Iterator[tuple[Location, Row]]:
    """Rows of a Hugging Face dataset, an id or a folder written by `save_to_disk`, through the optional library `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"task.path = '{path}': not a local file; Hugging Face datasets need pip install 'sharpscope[hub]'"
        ) from error
    try:
        loaded = datasets.load_from_disk(path) if Path(path).exists() else datasets.load_dataset(path, subset or None)
    except Exception as error:  # the library raises many types: network, format, name
        raise UserError(
            f"task.path = '{path}': not a local file, and not a loadable Hugging Face dataset ({_first_line(error)})"
        ) from error
    if isinstance(loaded, dict):
        if split not in loaded:
            raise UserError(f"task.hub_split = '{split}': '{path}' has no such split{nearest(split, loaded)}")
        loaded = loaded[split]
    for number, row in enumerate(loaded, 1):
        yield f"{path} row {number}", dict(row)


def _cell(row: Row, column: str, where: Location, field: str) -> Any:
    """Value of a column, set in `task.columns.field`; a dot selects a nested column unless a column has the full name."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = _nested(value)
        if not isinstance(value, dict) or part not in value:
            hint = nearest(part, map(str, value)) if isinstance(value, dict) else f"; it is a {type(value).__name__}"
            raise UserError(f"{where}: no column '{part}' (task.columns.{field} = '{column}'){hint}")
        value = value[part]
    return value


def _nested(value: Any) -> Any:
    """A nested column; some files store it as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return None
    return value


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
