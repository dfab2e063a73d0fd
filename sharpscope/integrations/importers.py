"""Traces from the files of other trainers: prime-rl's token export, verl's rollout files, any table of tokens as JSON lines.

Each reader gives the completions of each step; `write` makes the tables. What the files do not say is null, and what they say
beyond the trace's columns is named in a note.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sharpscope.config.training import HealthSpec
from sharpscope.errors import UserError, nearest
from sharpscope.rules import Event, judge
from sharpscope.traces import TABLES, RunLock, TraceWriter, create_run_dir, create_run_info, update_run_info
from sharpscope.traces.files import now
from sharpscope.traces.rules import POSITIVE, sampler_values

VERSION = 1
"""Schema version of prime-rl's export that is read."""
_FOLDER = re.compile(r"step_(\d+)")
_ARRAYS = ("position_ids", "loss_mask", "inference_logprobs", "trainer_logprobs")
_VERL = ("input", "output", "gts", "score", "step", "uid", "request_id")
_PROBED = ("score_norm", "score_norm_local", "attribution")
_TOKEN = (
    "token_id",
    "logp",
    "behavior_logp",
    "entropy",
    "advantage",
    "ratio",
    "weight",
    "loss_coef",
    "clipped",
    *_PROBED,
)
_STEP = ("loss", "grad_norm", "lr")
_SEQUENCE = ("step", "rollout", "group", "prompt", "completion", "reward", "prompt_ids", "prompt_length", *_STEP)
COLUMNS = (*_TOKEN, "mask", "position", *_SEQUENCE)
"""What a file of JSON lines can have. `mask`: tokens with 0 are not in the loss; `prompt_ids`: token IDs of the prompt;
`prompt_length`: how many of the token IDs are the prompt; `loss`, `grad_norm`, `lr`: of the step."""


@dataclass(frozen=True)
class Labels:
    """What a user says of an imported run.

    Attributes:
        method: name of the training method.
        task: name of the task; None: the importer's name.
        seed: of the run, if known.
        tokenizer: folder or hub id of the tokenizer, for texts; None: tokens are shown as their numbers.
        temperature: softmax temperature T > 0 of the log-probabilities, which probes of a checkpoint use; None: not known, 1 is
            assumed.
    """

    method: str = "unknown"
    task: str | None = None
    seed: int | None = None
    tokenizer: str | None = None
    temperature: float | None = None


@dataclass
class Completion:
    """One completion.

    Attributes:
        ids: token IDs of prompt and completion; None: not known.
        prompt_length: how many of `ids` are the prompt.
        tokens: column of the tokens table -> (n,) values of its n loss tokens, `position` and `logp` among them; empty: not
            known. None in a float column is null.
        group: what the completions of one prompt share; None: not known.
        reward: NaN where the file says so.
        parts: components of the reward.
        of_step: column of the steps table -> value.
    """

    ids: Sequence[int] | None = None
    prompt_length: int = 0
    tokens: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    group: str | None = None
    prompt: str | None = None
    completion: str | None = None
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None
    length: int | None = None
    of_step: Mapping[str, float | None] = field(default_factory=dict)


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a file with a JSON object on each line.

    Raises:
        UserError: a line is something else, or the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as lines:  # str.splitlines would also split at U+2028
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _object(line, path, number)
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{path}: cannot be read ({problem}); give a text file in UTF-8") from problem


def _object(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{path} line {number}: not JSON ({problem}); remove the line") from problem
    if not isinstance(value, dict):
        raise UserError(f"{path} line {number}: a {type(value).__name__}, not a JSON object; write one object a line")
    return value


def finite(value: float) -> bool:
    """Whether a number of a JSON file, which may be an integer of any size, is finite as a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def number(value: Any, name: str, where: str) -> float | None:
    """A finite number or null; NaN is null.

    Raises:
        UserError: it is something else.
    """
    if value is None or value != value:  # noqa: PLR0124 - NaN
        return None
    if isinstance(value, int | float) and finite(value):
        return float(value)
    raise UserError(f"{where}: {name} = {str(value)[:40]!r} is not a finite number; write a number or null")


def write(
    out: Path,
    kind: str,
    source: Path,
    steps: Iterable[tuple[int, list[Completion]]],
    labels: Labels,
    notes: Sequence[str],
) -> dict[str, int]:
    """Write a trace of the sequences of each step; returns the number of steps, rollouts and tokens.

    Raises:
        UserError: `out` is not empty, the temperature is not positive, the tokenizer cannot be loaded, or there is no sequence in a
            step or at all.
    """
    if labels.temperature is not None and not 0 < labels.temperature < math.inf:
        raise UserError(f"--temperature {labels.temperature:g}: must be above 0; give that of the log-probabilities")
    tokenizer = None if labels.tokenizer is None else _tokenizer(labels.tokenizer)
    made = create_run_dir(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(made / "tokenizer")
    info: dict[str, Any] = {
        "method": labels.method,
        "task": labels.task or kind,
        "seed": labels.seed,
        "config": {} if labels.temperature is None else {"rollout": {"temperature": labels.temperature}},
        "notes": list(notes),
    }
    create_run_info(made, info)
    decode = None if tokenizer is None else lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    counts = {"steps": 0, "rollouts": 0, "tokens": 0}
    known: dict[str, set[str]] = {table: set() for table in counts}
    try:
        with RunLock(made), TraceWriter(made) as writer:
            for step, given in steps:
                if not given:
                    raise UserError(
                        f"{source}: step {step} has no completion; wait until it is written, or remove its file"
                    )
                for table, columns in step_tables(step, given, decode).items():
                    if columns:
                        known[table] |= {name for name, values in columns.items() if not _nothing(values)}
                        counts[table] += writer.append(table, columns)
                for event in step_events(step, given):
                    writer.append("events", {name: [value] for name, value in event.row().items()})
                writer.flush()
        if not counts["rollouts"]:
            raise UserError(f"{source}: holds no sequence with a token in the loss")
    except BaseException:
        shutil.rmtree(made)  # it was new or empty
        raise
    missing = {
        table: [c.name for c in TABLES[table].columns if c.name not in known[table] and not c.probe and not c.timing]
        for table in counts
    }
    imported = {"from": kind, "source": source.name, "not_recorded": missing}
    update_run_info(made, status="finished", steps_done=counts["steps"], finished=now(), imported=imported)
    return counts


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        text = " ".join(str(problem).split())[:200]
        raise UserError(
            f"--tokenizer {name}: cannot be loaded ({text}); give the model's folder or hub id"
        ) from problem


def _grouped(given: Sequence[Completion]) -> list[Completion]:
    """The sequences with those of a group adjacent, groups in the order of their first sequence."""
    first: dict[str | None, int] = {}
    for index, one in enumerate(given):
        first.setdefault(one.group, index)
    return sorted(given, key=lambda one: first[one.group])


def _nothing(values: Any) -> bool:
    if values is None:
        return True
    return not isinstance(values, int | float) and all(value is None for value in values)


def step_tables(
    step: int, given: Sequence[Completion], decode: Callable[[Sequence[int]], str] | None
) -> dict[str, dict[str, Any]]:
    """Columns of the tables rollouts, tokens (empty without tokens) and steps of one step; groups become adjacent."""
    rows = _grouped(given)
    groups = {name: index for index, name in enumerate(dict.fromkeys(one.group for one in rows))}
    grouped = None not in groups
    rollouts: dict[str, list[Any]] = {column.name: [] for column in TABLES["rollouts"].columns}
    tokens: dict[str, list[Any]] = {column.name: [] for column in TABLES["tokens"].columns}
    for index, one in enumerate(rows):
        count = len(one.tokens["position"]) if one.tokens else 0
        values = [value for value in one.tokens.get("advantage", ()) if value is not None]
        prompt, completion = one.prompt, one.completion
        if one.ids is not None and decode is not None:
            prompt = decode(one.ids[: one.prompt_length]) if prompt is None else prompt
            completion = decode(one.ids[one.prompt_length :]) if completion is None else completion
        rollout = {
            "rollout": index,
            "group": groups[one.group] if grouped else None,
            "prompt": prompt,
            "completion": completion,
            "reward": one.reward,
            "reward_parts": dict(one.parts),
            "correct": one.correct,
            "advantage": float(np.mean(values)) if values else None,
            "length": count if one.tokens else one.length,
            "token_ids": None if one.ids is None else json.dumps(list(one.ids)),
            "prompt_tokens": None if one.ids is None else one.prompt_length,
        }
        for name, column in rollouts.items():
            column.append(rollout.get(name))
        for name, into in tokens.items():
            into.extend([index] * count if name == "rollout" else one.tokens.get(name, [None] * count))
    row = _step_row(rows, rollouts, tokens, grouped)
    return {
        "rollouts": {name: _column(v) for name, v in rollouts.items()} | {"step": step},
        "tokens": {name: _column(v) for name, v in tokens.items()} | {"step": step} if tokens["position"] else {},
        "steps": row | {"step": step},
    }


def step_events(step: int, rows: Sequence[Completion], trainer: str = "sharpscope") -> list[Event]:
    """Events on a step's rewards, and by the health rules on its sampler log-probabilities, at their defaults."""
    events = []
    missing = sum(one.reward is not None and math.isnan(one.reward) for one in rows)
    if missing:
        text = f"{missing} of {len(rows)} rewards are NaN; they are left out of the mean"
        events.append(Event(step, "nan_reward", "warning", missing / len(rows), 0.0, "none", text))
    pairs = [
        (math.nan if logp is None else logp, math.nan if sampler is None else sampler)
        for one in rows
        for logp, sampler in zip(one.tokens.get("logp", ()), one.tokens.get("behavior_logp", ()), strict=False)
    ]
    if pairs:
        logp, sampler = np.array(pairs, dtype=np.float64).T
        events += judge(step, sampler_values(logp, sampler), HealthSpec().limits, trainer)
    return events


def _column(values: list[Any]) -> list[Any] | None:
    return None if all(value is None for value in values) else values


def _step_row(
    rows: list[Completion], rollouts: Mapping[str, list[Any]], tokens: Mapping[str, list[Any]], grouped: bool
) -> dict[str, Any]:
    """The row of the steps table, without `step`."""
    row: dict[str, Any] = {column.name: None for column in TABLES["steps"].columns}
    known = [(one.group, float(one.reward)) for one in rows if one.reward is not None]
    if len(known) == len(rows):
        rewards = [reward for _, reward in known if not math.isnan(reward)]
        row["reward_mean"] = float(np.mean(rewards)) if rewards else math.nan
        row["reward_std"] = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else None
        groups = {group: {reward for name, reward in known if name == group} for group, _ in known}
        row["zero_std_groups"] = sum(len(values) == 1 for values in groups.values()) if grouped else None
    for one in rows:
        row |= one.of_step
    row["accuracy"] = _mean(rollouts["correct"])
    row["completion_length_mean"] = _mean(rollouts["length"])
    clipped = [value for value in tokens["clipped"] if value is not None]
    if tokens["position"]:
        row |= {"entropy_mean": _mean(tokens["entropy"]), "tokens": len(tokens["position"]), "updates": 1}
        row["weight_mean"] = _mean(tokens["weight"])
    if clipped and len(clipped) == len(tokens["position"]):
        row["clip_fraction_low"] = sum(value < 0 for value in clipped) / len(clipped)
        row["clip_fraction_high"] = sum(value > 0 for value in clipped) / len(clipped)
    return row


def _mean(values: Sequence[Any]) -> float | None:
    """Mean of values that are all known; None otherwise."""
    return float(np.mean(values)) if values and all(value is not None for value in values) else None


def import_jsonl(source: Path, out: Path, labels: Labels, columns: Mapping[str, str] | None = None) -> dict[str, int]:
    """Write a trace from a table of tokens; returns the number of steps, rollouts and tokens.

    Needed: `token_id` and `logp` (ln π under the policy at the start of the step). A line is a sequence (its columns are lists)
    or a token (its columns are numbers, `rollout` says which completion it belongs to, and lines stand in the order of
    positions). A value of a token may be one number for the sequence. Without `step`, the last number in a file's name is
    the step where there are several files, and 1 where there is one. The prompt is `prompt_ids`, or the first
    `prompt_length` token IDs, or those before the first with a mask of 1.

    Args:
        source: the file, or a folder of files.
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
    files = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    if not files or not files[0].is_file():
        raise UserError(f"{source}: no file of JSON lines; give a file, or a folder of files *.jsonl")
    by_step: dict[int, list[Completion]] = {}
    dropped: set[str] = set()
    for file in files:
        numbers = re.findall(r"\d+", file.stem) if len(files) > 1 else []
        for step, one in _lines(file, theirs, set(columns or {}), int(numbers[-1]) if numbers else 1, dropped):
            by_step.setdefault(step, []).append(one)
    notes = [f"imported from {source.name}"]
    if by_step and min(by_step) == 0:
        by_step = {step + 1: given for step, given in by_step.items()}
        notes.append("step numbers are one higher than the file's, which begin at 0")
    if dropped:
        notes.append(
            f"columns that a trace has no place for, or that --columns does not name: {', '.join(sorted(dropped))}"
        )
    return write(out, "jsonl", source, sorted(by_step.items()), labels, notes)


def _lines(
    source: Path, theirs: Mapping[str, str], named: set[str], usual: int, dropped: set[str]
) -> Iterator[tuple[int, Completion]]:
    tokens: dict[tuple[int, Any], list[dict[str, Any]]] = {}
    for line, record in json_lines(source):
        where = f"{source} line {line}"
        values = {ours: record[name] for ours, name in theirs.items() if name in record}
        dropped |= set(record) - set(theirs.values())
        for ours in ("token_id", "logp", *sorted(named)):
            if ours not in values:
                raise UserError(f"{where}: no column '{theirs[ours]}'; name the file's column: --columns {ours}=NAME")
        step = _step_number(values.get("step", usual), where)
        if isinstance(values["logp"], list):
            yield step, _sequence_of(values, where)
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
        joined |= {name: [row.get(name) for row in rows] for name in (*_TOKEN, "mask", "position") if name in joined}
        yield step, _sequence_of(joined, f"{source}, step {step}, rollout {rollout}")


def _step_number(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f"{where}: step = {str(value)[:40]!r} is not a whole number from 0; number the steps from 1")
    return value


def _sequence_of(values: Mapping[str, Any], where: str) -> Completion:
    ids = _integers(values["token_id"], "token_id", where)
    count = len(ids)
    mask = values.get("mask", [1] * count)
    if not isinstance(mask, list) or len(mask) != count or None in mask:
        raise UserError(f"{where}: mask has not one value for each of the {count} token IDs; write 0 or 1 for each")
    prompt = None if values.get("prompt_ids") is None else _integers(values["prompt_ids"], "prompt_ids", where)
    start = 0  # of the completion
    if prompt is None and "position" not in values:
        start = values.get("prompt_length", next((i for i, keep in enumerate(mask) if keep), 0))
        if not isinstance(start, int) or isinstance(start, bool) or not 0 <= start <= count:
            raise UserError(f"{where}: prompt_length = {start!r} is no number of the {count} token IDs")
        prompt = ids[:start] if start else None
    kept = [i for i, keep in enumerate(mask) if keep and i >= start]
    columns: dict[str, list[Any]] = {"token_id": [ids[i] for i in kept], "update": [0] * len(kept)}
    for name in _TOKEN[1:]:
        given = values.get(name)
        if given is None:
            continue
        if name == "advantage" and not isinstance(given, list):
            given = [given] * count  # of the sequence
        if start and isinstance(given, list) and len(given) == count - start:
            given = [None] * start + given  # of the completion alone
        if not isinstance(given, list) or len(given) != count:
            received = len(given) if isinstance(given, list) else "no list of"
            raise UserError(f"{where}: {name} has {received} values, token_id {count}; both need one for each token")
        columns[name] = [number(given[i], name, where) for i in kept]
        if name == "clipped":
            columns[name] = [None if value is None else int(np.sign(value)) for value in columns[name]]
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
    columns["position"] = [positions[i] - start for i in kept]
    group = values.get("group", values.get("prompt"))
    whole = prompt is not None and positions == list(range(count))
    return Completion(
        ids=[*(prompt or ()), *ids[start:]] if whole else None,
        prompt_length=len(prompt or ()),
        tokens=columns,
        group=None if group is None else str(group),
        prompt=_text(values.get("prompt"), "prompt", where),
        completion=_text(values.get("completion"), "completion", where),
        reward=_reward(values.get("reward"), where),
        of_step={name: number(values[name], name, where) for name in _STEP if name in values},
    )


def _reward(value: Any, where: str) -> float | None:
    """As `number`, but NaN stays NaN."""
    return math.nan if isinstance(value, float) and math.isnan(value) else number(value, "reward", where)


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


@dataclass(frozen=True)
class Coefficients:
    """Constants of prime-rl's default loss, which its export leaves out: −adv_tau·A·r·M + kl_tau·(ln π − ln μ)²."""

    adv_tau: float
    kl_tau: float


def import_prime_rl(
    source: Path, out: Path, labels: Labels, coefficients: Coefficients | None = None
) -> dict[str, int]:
    """Write a trace from prime-rl's token export; returns the number of steps, rollouts and tokens.

    Log-probabilities, entropy, advantages, ratios r = π/μ, masks of the default loss and, where the export has them, rewards
    are known; prompts and completions as text with a tokenizer. With `coefficients`, loss_coef is
    w(−adv_tau·A·r·M + 2·kl_tau·(ln π − ln μ)) / (RL tokens of the step), w the token's weight `rl_weights`; of tokens outside
    pure RL (weight 0, or in another part of the loss) it is null.

    Args:
        source: output folder of prime-rl, or its token_exports.
        out: folder of the new run.
        labels: what the export does not say.
        coefficients: constants of the default loss; None: loss_coef is null.

    Raises:
        UserError: there is no complete step, or a file cannot be read.
    """
    folder = source / "token_exports" if (source / "token_exports").is_dir() else source
    folders = sorted((int(m[1]), path) for path in folder.glob("step_*") if (m := _FOLDER.fullmatch(path.name)))
    steps = [(step, path) for step, path in folders if (path / "STABLE").exists()]
    if not steps:
        raise UserError(
            f"{source}: has no complete step (token_exports/step_N/STABLE); set enable_token_export in prime-rl"
        )
    notes = [f"imported from prime-rl's token export, {len(steps)} steps", "env_name and temperatures are not imported"]
    notes += [
        f"step {step} is not complete (no file STABLE) and is left out"
        for step, path in folders
        if (step, path) not in steps
    ]
    if coefficients is not None:
        notes.append(
            f"loss_coef: of the default loss with adv_tau = {coefficients.adv_tau:g}, kl_tau = {coefficients.kl_tau:g}"
        )
    # A first step 0 would stand for "before training".
    shift = 1 if steps[0][0] == 0 else 0
    if shift:
        notes.append("step numbers are one higher than prime-rl's, which begin at 0")
    each = ((step + shift, _prime_rl_step(path, coefficients)) for step, path in steps)
    return write(out, "prime-rl", source, each, labels, notes)


def _prime_rl_step(folder: Path, coefficients: Coefficients | None) -> list[Completion]:
    records = [
        (record, f"{path} line {line}")
        for path in sorted(folder.glob("rank_*.jsonl"), key=lambda path: (len(path.name), path.name))
        for line, record in json_lines(path)
    ]
    total = 0
    for record, where in records:
        _check(record, where)
        total += sum(weight is not None for weight in _weights(record))
    return [one for record, _ in records for one in _sequences(record, coefficients, total)]


def _check(record: dict[str, Any], where: str) -> None:
    if record.get("schema_version") != VERSION:
        raise UserError(
            f"{where}: schema_version {record.get('schema_version')}; this version reads {VERSION}: update sharpscope, or "
            f"export with a prime-rl that writes {VERSION}"
        )
    ids = record.get("token_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise UserError(f"{where}: token_ids is no list of integers; export the step again")
    for name in _ARRAYS:
        values = record.get(name)
        if not isinstance(values, list) or len(values) != len(ids):
            raise UserError(f"{where}: {name} is no list of {len(ids)} values like token_ids; export the step again")


def _weights(record: dict[str, Any]) -> list[float | None]:
    """Each token's weight in the RL loss; None outside it. prime-rl leaves tokens of weight 0 out of the denominator."""
    mask, size = record["loss_mask"], len(record["token_ids"])
    if record.get("losses") is not None:  # since 2026-09, in place of the weights
        own = [(losses or {}).get("rl") for losses in record["losses"]]
        return [1.0 if one is not None and one.get("mask") else None for one in own]
    given = record.get("rl_weights") or [None] * size
    weights = [1.0 if weight is None else float(weight) for weight in given]
    return [weight if keep and weight else None for keep, weight in zip(mask, weights, strict=True)]


def _pure(record: dict[str, Any], place: int) -> bool:
    """Whether a token has no other part of the loss."""
    others = [
        (record.get(name) or [None])[place if record.get(name) else 0] for name in ("ce_weights", "ref_kl_weights")
    ]
    channels = (record.get("losses") or {place: None})[place] or {}
    return not any(others) and not any((channels.get(name) or {}).get("mask") for name in channels if name != "rl")


def _sequences(record: dict[str, Any], coefficients: Coefficients | None, total: int) -> Iterator[Completion]:
    """The samples of a packed sequence, in which positions begin anew."""
    starts = [i for i, position in enumerate(record["position_ids"]) if i == 0 or position == 0]
    for start, end in zip(starts, [*starts[1:], len(record["token_ids"])], strict=True):
        mask = record["loss_mask"][start:end]
        if any(mask):
            yield _sequence(record, start, end, coefficients, total)


def _sequence(
    record: dict[str, Any], start: int, end: int, coefficients: Coefficients | None, total: int
) -> Completion:
    places = [i for i in range(start, end) if record["loss_mask"][i]]
    first = places[0]

    def taken(name: str) -> list[Any]:
        values = record.get(name)
        return [None] * len(places) if values is None else [values[i] for i in places]

    high, low = taken("is_masked_high"), taken("is_masked_low")
    clipped = [
        None if h is None or lo is None else int(bool(h)) - int(bool(lo)) for h, lo in zip(high, low, strict=True)
    ]
    ratio = taken("importance_ratio")
    tokens = {
        "position": [i - first for i in places],
        "update": [0] * len(places),
        "token_id": taken("token_ids"),
        "logp": taken("trainer_logprobs"),
        "behavior_logp": taken("inference_logprobs"),
        "entropy": taken("entropy"),
        "advantage": taken("advantages"),
        "ratio": ratio,
        "clipped": clipped,
    }
    if coefficients is not None:
        weights = _weights(record)
        tokens["loss_coef"] = [
            _coefficient(weights[i] if _pure(record, i) else None, a, r, masked, lp, mu, coefficients, total)
            for i, a, r, masked, lp, mu in zip(
                places,
                tokens["advantage"],
                ratio,
                taken("is_masked"),
                tokens["logp"],
                tokens["behavior_logp"],
                strict=True,
            )
        ]
    keep = [i for i, logp in enumerate(tokens["logp"]) if logp is not None]  # a value that is not finite is null
    rewards = [value for value in taken("rewards") if value is not None]
    return Completion(
        ids=record["token_ids"][start:end],
        prompt_length=first - start,
        tokens={name: [values[i] for i in keep] for name, values in tokens.items()},
        reward=float(rewards[0]) if rewards else None,
        parts={"total": float(rewards[0])} if rewards else {},
    )


def _coefficient(
    weight: float | None,
    advantage: float | None,
    ratio: float | None,
    masked: bool | None,
    logp: float | None,
    sampler: float | None,
    constants: Coefficients,
    total: int,
) -> float | None:
    """∂L/∂ln π of one token; None outside pure RL and where the export lacks a value."""
    if weight is None or advantage is None or ratio is None or masked is None or logp is None or sampler is None:
        return None
    policy = 0.0 if masked else constants.adv_tau * advantage * ratio
    return weight * (2 * constants.kl_tau * (logp - sampler) - policy) / total


def import_verl(source: Path, out: Path, labels: Labels) -> dict[str, int]:
    """Write a trace from verl's rollout files; returns the number of steps, rollouts and tokens (0).

    Prompts, completions, rewards and their parts are known; accuracy where the reward function gives `acc`. Completions of a
    prompt are a group: by `uid` where the file has it, else by equal prompts.

    Args:
        source: folder that `trainer.rollout_data_dir` names.
        out: folder of the new run.
        labels: what the files do not say.

    Raises:
        UserError: there is no file N.jsonl, or a file cannot be read.
    """
    files = sorted((int(path.stem), path) for path in source.glob("*.jsonl") if path.stem.isdecimal())
    if not files:
        raise UserError(f"{source}: has no file N.jsonl; set trainer.rollout_data_dir in verl and give that folder")
    shift = 1 if files[0][0] == 0 else 0
    notes = [f"imported from verl's rollout files, {len(files)} steps", "the files have no tokens"]
    if shift:
        notes.append("step numbers are one higher than verl's, which begin at 0")
    each = (
        (step + shift, [_completion(r, f"{path} line {line}") for line, r in json_lines(path)]) for step, path in files
    )
    return write(out, "verl", source, each, labels, notes)


def _completion(record: dict[str, Any], where: str) -> Completion:
    for name in ("input", "output"):
        if not isinstance(record.get(name), str):
            raise UserError(f"{where}: {name} is no text; give a file that verl wrote")
    parts = {
        name: float(value)
        for name, value in record.items()
        if name not in _VERL and isinstance(value, int | float) and finite(value)
    }
    uid, correct = record.get("uid"), record.get("acc")
    # verl's keys are {sample}_{rollout}_{output}
    group = uid.rsplit("_", 2)[0] if isinstance(uid, str) else record["input"]
    return Completion(
        group=group,
        prompt=record["input"],
        completion=record["output"],
        reward=_reward(record.get("score"), where),
        parts=parts,
        correct=bool(correct) if isinstance(correct, bool) or correct in (0, 1) else None,
    )
