"""Task `dataset`: questions from a file or the Hugging Face Hub, in the row format of the verl trainers.

A row has `prompt` (text or chat messages), `reward_model.ground_truth`, and `data_source`, which selects the scorer;
`task.columns` sets other column names. Rows are held out by a hash of their content, so equal questions are always on the
same side of the split, in every file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sharpscope.config.tasks import DatasetSpec
from sharpscope.errors import UserError, nearest
from sharpscope.tasks.answers import number_of, score_exact, score_exact_match, score_numeric
from sharpscope.tasks.base import Example, Reward, content_id, held_out_share
from sharpscope.tasks.dataset_files import Location, Row, cell, files_of, read_file, read_hub
from sharpscope.tasks.logic_rl import roles_of, score_logic_rl
from sharpscope.tasks.math_scoring import score_math
from sharpscope.tasks.statements import content_key, parse_statements, solve

DATA_SOURCES = {
    "kk_logic": "logic_rl",
    "exact": "exact",
    "exact_match": "exact_match",
    "numeric": "numeric",
    "logic_rl": "logic_rl",
    "math": "math",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math",
    "aime": "math",
    "aime24": "math",
    "aime25": "math",
    "aime_2024": "math",
    "amc": "math",
    "amc23": "math",
    "minerva": "math",
    "olympiad": "math",
    "olympiad_bench": "math",
    "deepscaler": "math",
    "openai/gsm8k": "numeric",
    "gsm8k": "numeric",
    **{
        f"{prefix}{name}": "exact_match"
        for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
        for prefix in ("", "searchR1_")
    },
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


class DatasetTask:
    """Splits `train` and, unless nothing is held out, `heldout`; `meta["scorer"]` is the scorer of a row."""

    def __init__(self, spec: DatasetSpec) -> None:
        if not spec.path:
            raise UserError(
                "task.path: not set; give a .parquet or .jsonl file, a folder of them or a Hugging Face dataset id"
            )
        self.spec = spec
        self.name = "dataset"
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
            spec = self.spec
            rows = self.rows()
            if spec.heldout_path:
                heldout = self._examples(spec.heldout_path, "task.heldout_path")
                held_out = {example.meta["content"] for example in heldout}
                train = [example for example in rows if example.meta["content"] not in held_out]
            else:
                share = spec.heldout_fraction
                heldout = [example for example in rows if held_out_share(example.meta["content"]) < share]
                train = [example for example in rows if held_out_share(example.meta["content"]) >= share]
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
        examples = []
        for location, row in self._rows(path, field):
            examples.append(self._example(row, location))
            if len(examples) == self.spec.limit:
                break
        return examples

    def _rows(self, path: str, field: str) -> Iterator[tuple[Location, Row]]:
        spec, columns = self.spec, self.spec.columns
        hub = spec.source == "huggingface" or (
            spec.source == "auto"
            and not Path(path).expanduser().exists()
            and path.count("/") == 1
            and not Path(path).suffix
        )
        if hub:
            yield from read_hub(path, spec.subset, spec.hub_split)
            return
        used = [columns.prompt, columns.answer, columns.data_source, columns.level, "statements"]
        names = [name for column in used for name in (column, column.partition(".")[0]) if name]
        for file in files_of(path, field):
            yield from read_file(file, names)

    def _example(self, row: Row, location: Location) -> Example:
        spec = self.spec
        prompt, messages = read_prompt(cell(row, spec.columns.prompt, location, "prompt"), location)
        scorer = self._scorer(row, location)
        truth = cell(row, spec.columns.answer, location, "answer")
        if scorer == "logic_rl":
            answer, meta = _puzzle(truth, row, location)
        else:
            truths = read_truths(truth, scorer, location)
            answer, meta = (
                truths[0],
                {"truths": truths, "level": "all", "content": content_id(" ".join(prompt.split()))},
            )
        if spec.columns.level:
            meta["level"] = _level(cell(row, spec.columns.level, location, "level"), location)
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

    def _scorer(self, row: Row, location: Location) -> str:
        """Scorer in the configuration, or that of the row's data_source."""
        if self.spec.scorer != "auto":
            return self.spec.scorer
        source = cell(row, self.spec.columns.data_source, location, "data_source")
        if not isinstance(source, str) or source not in DATA_SOURCES:
            raise UserError(
                f"{location}: data_source {source!r:.60} has no scorer{nearest(str(source), DATA_SOURCES)}"
                f" or set task.scorer to one of: {', '.join(sorted({*SCORERS, 'logic_rl'}))}"
            )
        return DATA_SOURCES[source]


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
    values = value if isinstance(value, list) else [value]
    truths = []
    for item in values:
        if (
            isinstance(item, bool)
            or not isinstance(item, (str, int, float))
            or (isinstance(item, float) and not math.isfinite(item))
        ):
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
    meta = {
        "level": len(roles),
        "names": tuple(roles),
        "solution": solution,
        "statements": puzzle,
        "content": content_key(puzzle),
    }
    return answer, meta


def _level(value: object, location: Location) -> int | str:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    raise UserError(f"{location}: the level must be an integer or text, got {value!r:.60}")
