"""Any table of tokens as JSON lines: a line is a sequence (its columns are lists) or a token (its columns are numbers)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sharpscope.errors import UserError, nearest
from sharpscope.integrations.importers.writing import Completion, Labels, json_lines, number, write
from sharpscope.traces.rules import POSITIVE

_TOKEN = ("token_id", "logp", "behavior_logp", "entropy", "advantage", "ratio", "weight", "loss_coef", "mask")
_SEQUENCE = ("step", "rollout", "group", "prompt", "completion", "reward", "prompt_ids")
COLUMNS = (*_TOKEN, "position", *_SEQUENCE)
"""What a file's columns can be. `mask`: tokens with 0 are not in the loss; `prompt_ids`: token IDs of the prompt."""


def import_jsonl(source: Path, out: Path, labels: Labels, columns: Mapping[str, str] | None = None) -> dict[str, int]:
    """Write a trace from a table of tokens; returns the number of steps, rollouts and tokens.

    Needed: `token_id` and `logp` (ln π under the policy at the start of the step). Without `step`, all is step 1. In a file
    with a token on each line, `rollout` says which completion it belongs to, and its lines stand in the order of positions.
    An advantage may be one number for the sequence.

    Args:
        source: the file.
        out: folder of the new run.
        labels: what the file does not say.
        columns: one of COLUMNS -> its name in the file; a column not named has its own name.

    Raises:
        UserError: a column is unknown or missing, or a value is wrong; the message names file, line and column.
    """
    for ours in columns or {}:
        if ours not in COLUMNS:
            raise UserError(f"--columns {ours}: unknown{nearest(ours, COLUMNS)}")
    theirs = {name: name for name in COLUMNS} | dict(columns or {})
    if not source.is_file():
        raise UserError(f"{source}: no such file; give a file of JSON lines")
    by_step: dict[int, list[Completion]] = {}
    for step, one in _sequences(source, theirs, set(columns or {})):
        by_step.setdefault(step, []).append(one)
    return write(out, "jsonl", source, sorted(by_step.items()), labels, [f"imported from {source.name}"])


def _sequences(source: Path, theirs: Mapping[str, str], named: set[str]) -> Iterator[tuple[int, Completion]]:
    tokens: dict[tuple[int, Any], list[dict[str, Any]]] = {}
    for line, record in json_lines(source):
        where = f"{source} line {line}"
        values = {ours: record[name] for ours, name in theirs.items() if name in record}
        for ours in ("token_id", "logp", *sorted(named)):
            if ours not in values:
                raise UserError(f"{where}: no column '{theirs[ours]}'; name the file's column: --columns {ours}=NAME")
        step = _step(values.get("step", 1), where)
        if isinstance(values["logp"], list):
            yield step, _sequence(values, where)
        elif not isinstance(values.get("rollout"), int | str):
            raise UserError(
                f"{where}: a line is a token, so '{theirs['rollout']}' must say of which completion; write a number or a text"
            )
        else:
            tokens.setdefault((step, values["rollout"]), []).append(values)
    for (step, rollout), rows in tokens.items():
        joined: dict[str, Any] = {}
        for row in reversed(rows):  # a column of the sequence has the value of the first line with it
            joined |= row
        joined |= {name: [row.get(name) for row in rows] for name in (*_TOKEN, "position") if name in joined}
        yield step, _sequence(joined, f"{source}, step {step}, rollout {rollout}")


def _step(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where}: step = {str(value)[:40]!r} is not a whole number from 1; number the steps from 1")
    return value


def _sequence(values: Mapping[str, Any], where: str) -> Completion:
    ids = _integers(values["token_id"], "token_id", where)
    count = len(ids)
    mask = values.get("mask", [1] * count)
    if not isinstance(mask, list) or len(mask) != count or None in mask:
        raise UserError(f"{where}: mask has not one value for each of the {count} token IDs; write 0 or 1 for each")
    kept = [i for i, keep in enumerate(mask) if keep]
    columns: dict[str, list[Any]] = {"token_id": [ids[i] for i in kept], "update": [0] * len(kept)}
    for name in _TOKEN[1:-1]:
        given = values.get(name)
        if given is None:
            continue
        if name == "advantage" and not isinstance(given, list):
            given = [given] * count  # of the sequence
        if not isinstance(given, list) or len(given) != count:
            received = len(given) if isinstance(given, list) else "no list of"
            raise UserError(f"{where}: {name} has {received} values, token_id {count}; both need one for each token")
        columns[name] = [number(given[i], name, where) for i in kept]
    if any(value is None for value in columns["logp"]):
        raise UserError(f"{where}: logp is null on a token in the loss; give its log-probability, or mask it")
    largest = max(columns["logp"], default=0.0)
    if largest > POSITIVE:
        raise UserError(
            f"{where}: logp = {largest:g} is above 0, so it is no log-probability; give natural logarithms, not probabilities"
        )
    positions = _integers(values.get("position", list(range(count))), "position", where)
    if len(positions) != count:
        raise UserError(
            f"{where}: position has {len(positions)} values, token_id {count}; both need one for each token"
        )
    columns["position"] = [positions[i] for i in kept]
    prompt = None if values.get("prompt_ids") is None else _integers(values["prompt_ids"], "prompt_ids", where)
    group = values.get("group", values.get("prompt"))
    whole = prompt is not None and positions == list(range(count))
    return Completion(
        ids=[*(prompt or ()), *ids] if whole else None,
        prompt_length=len(prompt or ()),
        tokens=columns,
        group=None if group is None else str(group),
        prompt=_text(values.get("prompt"), "prompt", where),
        completion=_text(values.get("completion"), "completion", where),
        reward=number(values.get("reward"), "reward", where),
    )


def _integers(value: Any, name: str, where: str) -> list[int]:
    if not isinstance(value, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in value
    ):
        raise UserError(f"{where}: {name} is not made of whole numbers from 0; write a list of them")
    return value


def _text(value: Any, name: str, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise UserError(f"{where}: {name} is a {type(value).__name__}; write a text")
