"""Task `dataset`: questions that stand in a file or on the Hugging Face hub, in the row format of the verl trainers.

A row has `prompt` (text or chat messages), `reward_model.ground_truth`, and `data_source`, which chooses the scorer;
other names by `task.columns`. Contents are held out by hash, so that equal questions never stand on both sides,
whatever file they are in.
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
from sharpscope.tasks.dataset_files import Place, Row, cell, files_of, read_file, read_hub
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
"""Scorer of each `data_source` that is known; a scorer's own name is known too."""

SCORERS: dict[str, Callable[[str, Sequence[str]], Reward]] = {
    "exact": score_exact,
    "exact_match": score_exact_match,
    "numeric": score_numeric,
    "math": score_math,
}
"""What compares the final answer of a text with the accepted ones, by name."""
CHAT_MARKS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|user|>", "<｜User｜>")
"""Texts that only a prompt which was templated already holds."""


class DatasetTask:
    """Splits `train` and, unless nothing is held out, `heldout`; the scorer of a row stands in its `meta["scorer"]`."""

    def __init__(self, spec: DatasetSpec) -> None:
        if not spec.path:
            raise UserError(
                "task.path: which data set? give a .parquet or .jsonl file, a folder of them or a Hugging Face id"
            )
        self.spec = spec
        self.name = "dataset"
        self._rows_of_path: list[Example] | None = None
        self._splits: dict[str, list[Example]] | None = None

    def rows(self) -> list[Example]:
        """Every row of `task.path` in its order, whichever split it is in; read once.

        Raises:
            UserError: a file or row that cannot be used, with its place and the fix.
        """
        if self._rows_of_path is None:
            self._rows_of_path = self._examples(self.spec.path, "task.path")
        return self._rows_of_path

    def splits(self) -> dict[str, list[Example]]:
        """Read once; rows keep their order.

        Raises:
            UserError: a file or row that cannot be used, with its place and the fix; or a side of the split that is
            empty.
        """
        if self._splits is None:
            spec = self.spec
            rows = self.rows()
            if spec.heldout_path:
                heldout = self._examples(spec.heldout_path, "task.heldout_path")
                known = {example.meta["content"] for example in heldout}
                train = [example for example in rows if example.meta["content"] not in known]
            else:
                share = spec.heldout_fraction
                heldout = [example for example in rows if held_out_share(example.meta["content"]) < share]
                train = [example for example in rows if held_out_share(example.meta["content"]) >= share]
            for side, name in ((train, "training"), (heldout, "held-out")):
                if not side and (name == "training" or spec.heldout_fraction or spec.heldout_path):
                    raise UserError(
                        f"task.heldout_fraction = {spec.heldout_fraction}: no row of {len(rows)} is in the {name} set;"
                        " change the fraction (0 holds nothing out) or give task.heldout_path; to evaluate every row: --split all"
                    )
            self._splits = {"train": train} | ({"heldout": heldout} if heldout else {})
        return self._splits

    def score(self, example: Example, completion: str) -> Reward:
        """Reward of prefill + completion by the row's scorer."""
        text = example.whole(completion)
        if example.meta["scorer"] == "logic_rl":
            return score_logic_rl(text, roles_of(example.answer))
        return SCORERS[example.meta["scorer"]](text, example.meta["truths"])

    def _examples(self, path: str, field: str) -> list[Example]:
        examples = []
        for place, row in self._rows(path, field):
            examples.append(self._example(row, place))
            if len(examples) == self.spec.limit:
                break
        return examples

    def _rows(self, path: str, field: str) -> Iterator[tuple[Place, Row]]:
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
        mapped = [columns.prompt, columns.answer, columns.data_source, columns.level, "statements"]
        wanted = [name for column in mapped for name in (column, column.partition(".")[0]) if name]
        for file in files_of(path, field):
            yield from read_file(file, wanted)

    def _example(self, row: Row, place: Place) -> Example:
        """One row as an example."""
        spec = self.spec
        prompt, messages = read_prompt(cell(row, spec.columns.prompt, place, "prompt"), place)
        scorer = self._scorer(row, place)
        truth = cell(row, spec.columns.answer, place, "answer")
        if scorer == "logic_rl":
            answer, meta = _puzzle(truth, row, place)
        else:
            truths = read_truths(truth, scorer, place)
            answer, meta = (
                truths[0],
                {"truths": truths, "level": "all", "content": content_id(" ".join(prompt.split()))},
            )
        if spec.columns.level:
            meta["level"] = _level(cell(row, spec.columns.level, place, "level"), place)
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

    def _scorer(self, row: Row, place: Place) -> str:
        """The scorer set in the configuration, or the one that the row's data_source stands for."""
        if self.spec.scorer != "auto":
            return self.spec.scorer
        source = cell(row, self.spec.columns.data_source, place, "data_source")
        if not isinstance(source, str) or source not in DATA_SOURCES:
            raise UserError(
                f"{place}: data_source {source!r:.60} has no scorer{nearest(str(source), DATA_SOURCES)}"
                f" or set task.scorer to one of: {', '.join(sorted({*SCORERS, 'logic_rl'}))}"
            )
        return DATA_SOURCES[source]


def read_prompt(value: object, place: Place) -> tuple[str, list[dict[str, str]]]:
    """The prompt as text, and its chat messages: those of the row, or one from the user where the row has text.

    The text of several messages is their contents with empty lines between.
    """
    if isinstance(value, str):
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value:
        messages = []
        for message in value:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise UserError(f"{place}: prompt message {message!r:.60} needs text under 'role' and 'content'")
            messages.append({"role": message["role"], "content": message["content"]})
    else:
        raise UserError(f"{place}: prompt must be text or a list of chat messages, got {type(value).__name__}")
    text = "\n\n".join(message["content"] for message in messages)
    if not text.strip():
        raise UserError(f"{place}: the prompt is empty")
    return text, messages


def read_truths(value: object, scorer: str, place: Place) -> tuple[str, ...]:
    """Accepted answers: one text or number, a list of them, or `{"target": …}` as question-answering sets write it."""
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
            raise UserError(f"{place}: the answer must be text, a number or a list of them, got {item!r:.60}")
        text = repr(item) if isinstance(item, float) else str(item)
        if not text.strip():
            raise UserError(f"{place}: the answer is empty")
        if scorer == "numeric" and number_of(text) is None:
            raise UserError(f"{place}: the answer {text!r:.60} holds no number, which task.scorer = numeric needs")
        truths.append(text)
    if not truths:
        raise UserError(f"{place}: the list of answers is empty")
    return tuple(truths)


def _puzzle(truth: object, row: Row, place: Place) -> tuple[str, dict[str, Any]]:
    """Answer and meta of a Knights-and-Knaves row; its truth must be the statements' only solution."""
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        try:
            truth = json.loads(truth)
        except ValueError as error:
            raise UserError(f"{place}: the ground truth looks like JSON but is not ({error})") from error
    fields = truth if isinstance(truth, dict) else {"solution_text_format": truth}
    answer = fields.get("solution_text_format")
    roles = roles_of(answer) if isinstance(answer, str) else {}
    if not isinstance(answer, str) or not roles:
        raise UserError(
            f"{place}: the ground truth needs solution_text_format such as '(1) Ava is a knight', got {answer!r:.60}"
        )
    statements = fields.get("statements", row.get("statements"))
    if statements is None:
        raise UserError(f"{place}: no column 'statements', neither in the ground truth nor in the row")
    puzzle = parse_statements(statements, f"{place}: statements")
    solution = tuple(role == "knight" for role in roles.values())
    if len(puzzle) != len(roles) or solve(puzzle) != [solution]:
        raise UserError(
            f"{place}: the solution {answer!r:.60} is not the only one of its statements ({len(solve(puzzle))} found)"
        )
    meta = {
        "level": len(roles),
        "names": tuple(roles),
        "solution": solution,
        "statements": puzzle,
        "content": content_key(puzzle),
    }
    return answer, meta


def _level(value: object, place: Place) -> int | str:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        return value
    raise UserError(f"{place}: the level must be a whole number or a word, got {value!r:.60}")
