"""Completions from the files of other trainers, without their code: one reader for each format.

A reader yields each step with its completions. What the files do not say is null, and what they say beyond the trace's columns
is named in a note.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sharpscope.errors import UserError, nearest
from sharpscope.integrations.completions import Completion, Labels, write
from sharpscope.traces.rules import POSITIVE

PRIME_RL_SCHEMA = 1
"""Schema version of prime-rl's export that is read."""
_PROBED = ("score_norm", "score_norm_local", "attribution")
_PER_TOKEN = ("logp", "behavior_logp", "ref_logp", "entropy", "advantage", "ratio", "weight", "loss_coef", "clipped")
_TOKEN = ("token_id", *_PER_TOKEN, "temperature", *_PROBED)
_STEP = ("loss", "grad_norm", "lr")
_ROW = ("step", "rollout", "group", "env", "prompt", "completion", "reward", "prompt_ids", "prompt_length", *_STEP)
COLUMNS = (*_TOKEN, "mask", "position", *_ROW)
"""What a file of JSON lines can have. `mask`: tokens with 0 are not in the loss; `prompt_ids`: token IDs of the prompt;
`prompt_length`: how many of the token IDs are the prompt; `loss`, `grad_norm`, `lr`: of the step."""
SAMPLERS = "the files have no log-probabilities of the trainer: those of the sampler stand in their place (logp)"
FROM_ZERO = "step numbers are one higher than the files', which begin at 0"


@dataclass
class Dump:
    """What a reader finds.

    Attributes:
        kind: name of the format.
        steps: (step, completions) in order of steps; to be read once.
        notes: for run.json, complete once `steps` has been read.
    """

    kind: str
    steps: Iterable[tuple[int, list[Completion]]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """What some readers take beside the path.

    Attributes:
        columns: jsonl: one of COLUMNS -> its name in the file.
        adv_tau, kl_tau: prime-rl: constants of its default loss, which its export leaves out:
            −adv_tau·A·r·M + kl_tau·(ln π − ln μ)². None: loss_coef is null.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    adv_tau: float | None = None
    kl_tau: float | None = None


def read(source: Path, kind: str | None = None, options: Options | None = None) -> Dump:
    """The completions in a trainer's files.

    Args:
        source: the file, or the folder.
        kind: one of READERS; None: recognized from the files.
        options: of the format.

    Raises:
        UserError: the format is unknown, or (here or while reading) a file has none of its values or wrong ones.
    """
    kind = kind or recognize(source)
    if kind not in READERS:
        raise UserError(f"{kind}: unknown format{nearest(kind, tuple(READERS))}; one of {', '.join(READERS)}")
    dump = Dump(kind, ())
    dump.steps = READERS[kind](Path(source), dump.notes, options or Options())
    return dump


def import_files(
    kind: str | None, source: Path, out: Path, labels: Labels, options: Options | None = None
) -> dict[str, int]:
    """Write a trainer's files as a run; returns the number of steps, rollouts and tokens.

    Raises:
        UserError: as `read`, or the folder `out` or a label cannot be used.
    """
    dump = read(source, kind, options)
    return write(out, dump.kind, source, dump.steps, labels, dump.notes)


def recognize(source: Path) -> str:
    """The format of a trainer's files, by their names and first line.

    Raises:
        UserError: there is no such file.
    """
    names = [path.name for path in [*_files(source, "*"), *_files(source / "train_data", "*")]]
    if (source / "token_exports").is_dir() or any(source.glob("step_*/rank_*.jsonl")):
        return "prime-rl"
    for kind, pattern in (
        ("nemo-rl", r"train_data_step\d+\.jsonl"),
        ("slime", r".*\.pt"),
        ("verifiers", r"traces\.jsonl"),
        ("open-instruct", r".*_rollouts_\d+\.jsonl"),
    ):
        if any(re.fullmatch(pattern, name) for name in names):
            return kind
    lines = _files(source, "*.jsonl")
    if source.is_dir() and not lines and sorted(source.rglob("traces.jsonl")):
        return "verifiers"
    if not lines:
        raise UserError(f"{source}: no file of a known format; give a file or folder of {', '.join(READERS)}")
    first = next((record for _, record in json_lines(lines[0])), {})
    return "verl" if {"input", "output"} <= set(first) else "jsonl"


def _files(source: Path, pattern: str) -> list[Path]:
    return sorted(p for p in source.glob(pattern) if p.is_file()) if source.is_dir() else [source] * source.is_file()


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place as text, object) of a file with a JSON object on each line.

    Raises:
        UserError: a line is something else, or the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as lines:  # str.splitlines would also split at U+2028
            for place, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path} line {place}", _object(line, f"{path} line {place}")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{path}: cannot be read ({problem}); give a text file in UTF-8") from problem


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise UserError(f"{where}: not JSON ({problem}); remove the line") from problem
    if not isinstance(value, dict):
        raise UserError(f"{where}: a {type(value).__name__}, not a JSON object; write one object a line")
    return value


# -- one completion ---------------------------------------------------------------------------------------------------------


def completion_of(values: Mapping[str, Any], where: str) -> Completion:
    """A completion from columns that have the names of COLUMNS; `where` names the place in messages.

    `token_id` is the completion, or prompt and completion; a column of tokens has one value for each, or for the completion's.

    Raises:
        UserError: a value is wrong.
    """
    ids = _integers(values.get("token_id"), "token_id", where)
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
        if values.get(name) is not None:
            columns[name] = _of_tokens(values[name], name, count, start, kept, where)
    if any(value is None for value in columns.get("logp", [None])):
        raise UserError(f"{where}: logp is null on a token in the loss; give its log-probability, or mask it")
    largest = max(columns.get("logp", ()), default=0.0)
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
        tokens=columns if kept else {},
        group=None if group is None else str(group),
        env=_text(values.get("env"), "env", where),
        prompt=_text(values.get("prompt"), "prompt", where),
        completion=_text(values.get("completion"), "completion", where),
        reward=_reward(values.get("reward"), where),
        parts=values.get("reward_parts", {}),
        length=len(kept),
        of_step={name: number(values[name], name, where) for name in _STEP if name in values},
    )


def _of_tokens(given: Any, name: str, count: int, start: int, kept: list[int], where: str) -> list[Any]:
    """Values of the tokens `kept`, from one for each token, for each of the completion, or (advantage, temperature) for all."""
    if name in ("advantage", "temperature") and not isinstance(given, list):
        given = [given] * count
    if start and isinstance(given, list) and len(given) == count - start:
        given = [None] * start + given
    if not isinstance(given, list) or len(given) != count:
        received = len(given) if isinstance(given, list) else "no list of"
        raise UserError(f"{where}: {name} has {received} values, token_id {count}; both need one for each token")
    values = [number(given[i], name, where) for i in kept]
    return [None if v is None else int(np.sign(v)) for v in values] if name == "clipped" else values


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


def _step_number(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f"{where}: step = {str(value)[:40]!r} is not a whole number from 0; number the steps from 1")
    return value


def _from_one(found: list[tuple[int, Path]], notes: list[str]) -> list[tuple[int, Path]]:
    """Paths by step, numbered from 1: a first step 0 would stand for "before training"."""
    found = sorted(found)
    if found and found[0][0] == 0:
        notes.append(FROM_ZERO)
        return [(step + 1, path) for step, path in found]
    return found


def _numbered(source: Path, pattern: str, missing: str, notes: list[str]) -> list[tuple[int, Path]]:
    """The files whose names match `pattern` by the number in them; `missing` says what to do where there is none."""
    paths = source.iterdir() if source.is_dir() else [source]
    found = [(int(match[1]), path) for path in paths if (match := re.fullmatch(pattern, path.name))]
    if not found:
        raise UserError(f"{source}: {missing}")
    return _from_one(found, notes)


def _steps_of(rows: Iterable[tuple[int, Completion]], notes: list[str]) -> Iterator[tuple[int, list[Completion]]]:
    """Rows of any order as steps from 1."""
    by_step: dict[int, list[Completion]] = {}
    for step, one in rows:
        by_step.setdefault(step, []).append(one)
    shift = int(0 in by_step)
    if shift:
        notes.append(FROM_ZERO)
    yield from ((step + shift, by_step[step]) for step in sorted(by_step))


def _left_out(names: Iterable[str], notes: list[str]) -> None:
    if names:
        notes.append(f"columns that a trace has no place for, or that are not named: {', '.join(sorted(names))}")


# -- any table of tokens ------------------------------------------------------------------------------------------------------


def jsonl(source: Path, notes: list[str], options: Options) -> Iterator[tuple[int, list[Completion]]]:
    """A table of tokens as JSON lines: a file, or a folder of files.

    Needed: `token_id` and `logp` (ln π under the policy at the start of the step). A line is a sequence (its columns are lists)
    or a token (its columns are numbers, `rollout` says which completion it belongs to, and lines stand in the order of
    positions). A value of a token may be one number for the sequence. Without `step`, the last number in a file's name is
    the step where there are several files, and 1 where there is one. The prompt is `prompt_ids`, or the first
    `prompt_length` token IDs, or those before the first with a mask of 1.
    """
    for ours in options.columns:
        if ours not in COLUMNS:
            raise UserError(f"--columns {ours}: unknown{nearest(ours, COLUMNS)}")
    theirs = {name: name for name in COLUMNS} | dict(options.columns)
    files = _files(source, "*.jsonl")
    if not files:
        raise UserError(f"{source}: no file of JSON lines; give a file, or a folder of files *.jsonl")
    dropped: set[str] = set()

    def rows() -> Iterator[tuple[int, Completion]]:
        for file in files:
            numbers = re.findall(r"\d+", file.stem) if len(files) > 1 else []
            yield from _lines(file, theirs, set(options.columns), int(numbers[-1]) if numbers else 1, dropped)

    yield from _steps_of(rows(), notes)
    _left_out(dropped, notes)


def _lines(
    source: Path, theirs: Mapping[str, str], named: set[str], usual: int, dropped: set[str]
) -> Iterator[tuple[int, Completion]]:
    tokens: dict[tuple[int, Any], list[dict[str, Any]]] = {}
    for where, record in json_lines(source):
        values = {ours: record[name] for ours, name in theirs.items() if name in record}
        dropped |= set(record) - set(theirs.values())
        for ours in ("token_id", "logp", *sorted(named)):
            if ours not in values:
                raise UserError(f"{where}: no column '{theirs[ours]}'; name the file's column: --columns {ours}=NAME")
        step = _step_number(values.get("step", usual), where)
        if isinstance(values["logp"], list):
            yield step, completion_of(values, where)
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
        yield step, completion_of(joined, f"{source}, step {step}, rollout {rollout}")


# -- dumps of trainers --------------------------------------------------------------------------------------------------------


def nemo_rl(source: Path, notes: list[str], _: Options) -> Iterator[tuple[int, list[Completion]]]:
    """NeMo-RL's train_data_step{N}.jsonl (written by default): rows padded to one width, each value in a list of length 1."""
    used = {"token_ids", "token_loss_mask", "sample_loss_mask", "input_lengths", "advantages", "prev_logprobs", "idx"}
    used |= {"generation_logprobs", "rewards", "filtered_rewards", "content"}
    dropped: set[str] = set()
    missing = "has no file train_data_stepN.jsonl; give NeMo-RL's log_dir (logger.log_dir)"
    for step, path in _numbered(source, r"train_data_step(\d+)\.jsonl", missing, notes):
        made = []
        for where, record in json_lines(path):
            row = {k: v[0] if isinstance(v, list) and len(v) == 1 else v for k, v in record.items()}
            for name in ("token_ids", "token_loss_mask", "prev_logprobs"):
                if not isinstance(row.get(name), list):
                    raise UserError(f"{where}: no list {name}; give the training data that NeMo-RL's GRPO writes")
            dropped |= set(row) - used
            length = int(row.get("input_lengths", len(row["token_ids"])))
            mask = [int(keep) for keep in row["token_loss_mask"][:length]]
            start = mask.index(1) if 1 in mask else length
            ids = row["token_ids"][:length]
            own = {"advantage": "advantages", "behavior_logp": "generation_logprobs", "logp": "prev_logprobs"}
            values = {ours: row[name] for ours, name in own.items() if row.get(name) is not None}
            values = {ours: v[:length] if isinstance(v, list) else v for ours, v in values.items()}
            reward = row.get("filtered_rewards", row.get("rewards"))  # of the rows that are left by dynamic sampling
            values |= {"token_id": ids, "prompt_length": start, "reward": reward, "group": ids[:start]}
            values["mask"] = [keep if row.get("sample_loss_mask", 1) else 0 for keep in mask]
            made.append(completion_of(values, where))
        yield step, made
    _left_out(dropped, notes)


def slime(source: Path, notes: list[str], _: Options) -> Iterator[tuple[int, list[Completion]]]:
    """Slime's training data (--dump-details or --save-debug-train-data): a dict of torch in {rollout_id}.pt, format 2."""
    import torch

    folder = source / "train_data" if (source / "train_data").is_dir() else source
    own = {"log_probs": "logp", "rollout_log_probs": "behavior_logp", "ref_log_probs": "ref_logp", "entropy": "entropy"}
    own |= {"advantages": "advantage"}
    used = {"tokens", "response_lengths", "loss_masks", "rewards", "total_lengths", "rollout_position", *own}
    dropped: set[str] = set()
    for step, path in _numbered(
        folder, r"(?:.*\D)?(\d+)\.pt", "has no file N.pt; run slime with --dump-details", notes
    ):
        try:
            data = torch.load(path, map_location="cpu", weights_only=True)
            samples, raw = data["samples"], data.get("raw_reward")
        except Exception as problem:
            text = " ".join(str(problem).split())[:100]
            raise UserError(
                f"{path}: is no training data of slime, format 2 ({text}); run it with --dump-details"
            ) from None
        made = []
        for index, sample in enumerate(samples):
            row = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in sample.items()}
            dropped |= set(row) - used - {"data_parallel_rank", "sample_index"}
            ids, length = row["tokens"], int(row["response_lengths"])
            start = len(ids) - length
            values = {ours: row[name] for name, ours in own.items() if row.get(name) is not None}
            place = row.get("rollout_position", index)
            reward = raw[place] if raw is not None and len(raw) == len(samples) else row.get("rewards")
            values |= {"token_id": ids, "prompt_length": start, "reward": reward, "group": ids[:start]}
            values["mask"] = [0] * start + [int(keep) for keep in row.get("loss_masks") or [1] * length]
            if "logp" not in values and "behavior_logp" in values:  # trained on the sampler's
                values["logp"] = values.pop("behavior_logp")
                notes.append(SAMPLERS) if SAMPLERS not in notes else None
            made.append(completion_of(values, f"{path} sample {index}"))
        yield step, made
    _left_out(dropped, notes)


def open_instruct(source: Path, notes: list[str], _: Options) -> Iterator[tuple[int, list[Completion]]]:
    """open-instruct's {run}_rollouts_{shard}.jsonl (--save_traces)."""
    notes.append(SAMPLERS)
    used = {"step", "prompt_tokens", "response_tokens", "logprobs", "advantage", "reward", "prompt_idx", "dataset"}
    dropped: set[str] = set()

    def rows() -> Iterator[tuple[int, Completion]]:
        for path in _files(source, "*_rollouts_*.jsonl"):
            for where, record in json_lines(path):
                dropped.update(set(record) - used)
                prompt, response = (_integers(record.get(n), n, where) for n in ("prompt_tokens", "response_tokens"))
                if record.get("logprobs") is None:
                    raise UserError(f"{where}: no logprobs; run open-instruct with log-probabilities of the sampler")
                values = {"token_id": prompt + response, "prompt_length": len(prompt), "logp": record["logprobs"]}
                values |= {name: record.get(name) for name in ("advantage", "reward")}
                values |= {"group": record.get("prompt_idx"), "env": record.get("dataset")}
                yield _step_number(record.get("step"), where), completion_of(values, where)

    yield from _steps_of(rows(), notes)
    _left_out(dropped, notes)


def verifiers(source: Path, notes: list[str], _: Options) -> Iterator[tuple[int, list[Completion]]]:
    """Verifiers' traces.jsonl (prime-rl: rollouts/step_N/…/traces.jsonl): episodes whose messages form a tree.

    Each path from the root to a leaf is a completion; a message in several of them counts in the first.
    """
    files = [source] if source.is_file() else sorted(source.rglob("traces.jsonl"))
    if not files:
        raise UserError(f"{source}: has no file traces.jsonl; give the output folder of verifiers or prime-rl")

    def rows() -> Iterator[tuple[int, Completion]]:
        for path in files:
            steps = re.findall(r"step_(\d+)", str(path.parent))
            for where, episode in json_lines(path):
                for trace in episode.get("traces") or ():
                    yield from (
                        (int(steps[-1]) if steps else 1, one) for one in _branches(trace, episode, where, notes)
                    )

    yield from _steps_of(rows(), notes)


def _branches(
    trace: Mapping[str, Any], episode: Mapping[str, Any], where: str, notes: list[str]
) -> Iterator[Completion]:
    """The completions of one trace of verifiers."""
    nodes = trace.get("nodes") or []
    parents = {node.get("parent") for node in nodes}
    counted: set[int] = set()
    for leaf in (index for index in range(len(nodes)) if index not in parents):
        path = [leaf]
        while (parent := nodes[path[0]].get("parent")) is not None:
            path.insert(0, parent)
        ids: list[int] = []
        mask: list[int] = []
        streams: dict[str, list[Any]] = {
            name: [] for name in ("logprobs", "trainer_logprobs", "entropies", "advantages")
        }
        streams["reference_logprobs"] = []
        for index in path:
            node = nodes[index]
            own, flags = node.get("token_ids") or [], node.get("mask") or []
            if not own:
                raise UserError(
                    f"{where}: a message has no token_ids; run with verifiers' TrainClient, which stores them"
                )
            ids += own
            mask += [int(keep and index not in counted) for keep in flags]
            for name, values in streams.items():
                given = iter(node.get(name) or ())  # one for each True of the mask
                values += [next(given, None) if keep else None for keep in flags]
        counted |= set(path)
        start = next((i for i, keep in enumerate(mask) if keep), len(ids))
        theta = any(value is not None for value in streams["trainer_logprobs"])
        if not theta and SAMPLERS not in notes:
            notes.append(SAMPLERS)
        rewards = {name: float(value) for name, value in (trace.get("rewards") or {}).items()}
        entries: dict[str, Any] = {"token_id": ids, "mask": mask, "prompt_length": start, "reward_parts": rewards}
        entries |= {"logp": streams["trainer_logprobs" if theta else "logprobs"], "advantage": streams["advantages"]}
        entries |= {"behavior_logp": streams["logprobs"]} if theta else {}
        entries |= {"entropy": streams["entropies"], "ref_logp": streams["reference_logprobs"]}
        entries = {name: v for name, v in entries.items() if name in ("mask", "token_id") or v != [None] * len(ids)}
        task, env = episode.get("group") or episode.get("task"), episode.get("env")
        group = json.dumps(task, sort_keys=True) if isinstance(task, dict) else task
        entries |= {"group": group, "env": env.get("id") if isinstance(env, dict) else env}
        yield completion_of(entries | {"reward": sum(rewards.values()) if rewards else None}, where)


# -- prime-rl's token export --------------------------------------------------------------------------------------------------


def prime_rl(source: Path, notes: list[str], options: Options) -> Iterator[tuple[int, list[Completion]]]:
    """prime-rl's token export (enable_token_export): its output folder, or token_exports in it.

    Log-probabilities, entropy, advantages, ratios r = π/μ, masks of the default loss and, where the export has them, rewards
    are known. With `adv_tau` and `kl_tau`, loss_coef is w(−adv_tau·A·r·M + 2·kl_tau·(ln π − ln μ)) / (RL tokens of the
    step), w the token's weight `rl_weights`; of tokens outside pure RL (weight 0, or in another part of the loss) it is null.
    """
    folder = source / "token_exports" if (source / "token_exports").is_dir() else source
    folders = sorted(
        (int(m[1]), path) for path in folder.glob("step_*") if (m := re.fullmatch(r"step_(\d+)", path.name))
    )
    steps = [(step, path) for step, path in folders if (path / "STABLE").exists()]
    if not steps:
        raise UserError(
            f"{source}: has no complete step (token_exports/step_N/STABLE); set enable_token_export in prime-rl"
        )
    notes += [
        f"step {step} is not complete (no file STABLE) and is left out"
        for step, path in folders
        if (step, path) not in steps
    ]
    if options.adv_tau is not None:
        notes.append(f"loss_coef: of the default loss with adv_tau = {options.adv_tau:g}, kl_tau = {options.kl_tau:g}")
    dropped: set[str] = set()
    for step, path in _from_one(steps, notes):
        records = [
            (record, where)
            for file in sorted(path.glob("rank_*.jsonl"), key=lambda file: (len(file.name), file.name))
            for where, record in json_lines(file)
        ]
        total = 0
        for record, where in records:
            _check_export(record, where)
            dropped |= set(record) - _EXPORTED
            total += sum(weight is not None for weight in _weights(record))
        yield step, [one for record, where in records for one in _samples(record, options, total, where)]
    _left_out(dropped, notes)


_EXPORTED = frozenset(
    re.findall(
        r"\w+",
        "schema_version step export_step rank micro_step micro_sequence_idx export_sequence_idx run_id env_name position_ids "
        "token_ids loss_mask advantages losses rewards rl_weights ce_weights ref_kl_weights inference_logprobs "
        "trainer_logprobs entropy importance_ratio temperatures is_masked is_masked_high is_masked_low",
    )
)
"""What is read of a record, and what says where it comes from."""


def _check_export(record: dict[str, Any], where: str) -> None:
    version = record.get("schema_version")
    if version != PRIME_RL_SCHEMA:
        raise UserError(
            f"{where}: schema_version {version}; this version reads {PRIME_RL_SCHEMA}: update sharpscope, or export with a "
            f"prime-rl that writes {PRIME_RL_SCHEMA}"
        )
    ids = record.get("token_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise UserError(f"{where}: token_ids is no list of integers; export the step again")
    for name in ("position_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"):
        values = record.get(name)
        if not isinstance(values, list) or len(values) != len(ids):
            raise UserError(f"{where}: {name} is no list of {len(ids)} values like token_ids; export the step again")


def _weights(record: dict[str, Any]) -> list[float | None]:
    """Each token's weight in the RL loss; None outside it. prime-rl leaves tokens of weight 0 out of the denominator."""
    if record.get("losses") is not None:  # since 2026-09, in place of the weights
        own = [(losses or {}).get("rl") for losses in record["losses"]]
        return [1.0 if one is not None and one.get("mask") else None for one in own]
    given = record.get("rl_weights") or [None] * len(record["token_ids"])
    weights = [1.0 if weight is None else float(weight) for weight in given]
    return [weight if keep and weight else None for keep, weight in zip(record["loss_mask"], weights, strict=True)]


def _pure(record: dict[str, Any], place: int) -> bool:
    """Whether a token has no other part of the loss."""
    others = [(record.get(name) or {place: None})[place] for name in ("ce_weights", "ref_kl_weights")]
    channels = (record.get("losses") or {place: None})[place] or {}
    return not any(others) and not any((channels.get(name) or {}).get("mask") for name in channels if name != "rl")


def _samples(record: dict[str, Any], options: Options, total: int, where: str) -> Iterator[Completion]:
    """The samples of a packed sequence, in which positions begin anew."""
    starts = [i for i, position in enumerate(record["position_ids"]) if i == 0 or position == 0]
    weights = _weights(record)
    names = {"logp": "trainer_logprobs", "behavior_logp": "inference_logprobs", "entropy": "entropy"}
    names |= {"advantage": "advantages", "ratio": "importance_ratio", "temperature": "temperatures"}
    for start, end in zip(starts, [*starts[1:], len(record["token_ids"])], strict=True):
        mask = record["loss_mask"][start:end]
        if not any(mask):
            continue
        values: dict[str, Any] = {
            ours: record[theirs][start:end] for ours, theirs in names.items() if record.get(theirs) is not None
        }
        high, low = (record.get(f"is_masked_{side}") or [None] * len(record["loss_mask"]) for side in ("high", "low"))
        values["clipped"] = [
            None if h is None or lo is None else int(h) - int(lo)
            for h, lo in zip(high[start:end], low[start:end], strict=True)
        ]
        if options.adv_tau is not None:
            values["loss_coef"] = [
                _coefficient(record, i, weights[i] if _pure(record, i) else None, options, total)
                for i in range(start, end)
            ]
        rewards = [
            r for r, keep in zip((record.get("rewards") or [])[start:end], mask, strict=False) if keep and r is not None
        ]
        values |= {
            "token_id": record["token_ids"][start:end],
            "prompt_length": mask.index(True),
            "env": record.get("env_name"),
        }
        known = [lp is not None for lp in values["logp"]]  # a value that is not finite is null
        values["mask"] = [int(keep and there) for keep, there in zip(mask, known, strict=True)]
        values |= {"reward": rewards[0], "reward_parts": {"total": float(rewards[0])}} if rewards else {}
        yield completion_of(values, where)


def _coefficient(record: Mapping[str, Any], i: int, weight: float | None, options: Options, total: int) -> float | None:
    """∂L/∂ln π of token i; None outside pure RL and where the export lacks a value."""
    names = ("advantages", "importance_ratio", "is_masked", "trainer_logprobs", "inference_logprobs")
    values = [record[name][i] for name in names if record.get(name) is not None]
    known = [float(value) for value in values if value is not None]
    if weight is None or options.adv_tau is None or options.kl_tau is None or len(known) < len(names):
        return None
    advantage, ratio, masked, logp, sampler = known
    policy = 0.0 if masked else options.adv_tau * advantage * ratio
    return float(weight * (2 * options.kl_tau * (logp - sampler) - policy) / total)


# -- verl's rollout files -----------------------------------------------------------------------------------------------------


def verl(source: Path, notes: list[str], _: Options) -> Iterator[tuple[int, list[Completion]]]:
    """Verl's rollout files, N.jsonl in the folder that `trainer.rollout_data_dir` names: texts and rewards, no tokens.

    Accuracy where the reward function gives `acc`. Completions of a prompt are a group: by `uid` where the file has it, else
    by equal prompts.
    """
    missing = "has no file N.jsonl; set trainer.rollout_data_dir in verl and give that folder"
    notes.append("the files have no tokens")
    for step, path in _numbered(source, r"(\d+)\.jsonl", missing, notes):
        yield step, [_of_text(record, where) for where, record in json_lines(path)]


def _of_text(record: dict[str, Any], where: str) -> Completion:
    for name in ("input", "output"):
        if not isinstance(record.get(name), str):
            raise UserError(f"{where}: {name} is no text; give a file that verl wrote")
    known = ("input", "output", "gts", "score", "step", "uid", "request_id")
    parts = {
        name: float(value)
        for name, value in record.items()
        if name not in known and isinstance(value, int | float) and finite(value)
    }
    uid, correct = record.get("uid"), record.get("acc")
    return Completion(
        group=uid.rsplit("_", 2)[0] if isinstance(uid, str) else record["input"],  # {sample}_{rollout}_{output}
        prompt=record["input"],
        completion=record["output"],
        reward=_reward(record.get("score"), where),
        parts=parts,
        correct=bool(correct) if isinstance(correct, bool) or correct in (0, 1) else None,
    )


Reader = Callable[[Path, list[str], Options], Iterator[tuple[int, list[Completion]]]]
READERS: dict[str, Reader] = {
    "jsonl": jsonl,
    "nemo-rl": nemo_rl,
    "slime": slime,
    "verifiers": verifiers,
    "open-instruct": open_instruct,
    "prime-rl": prime_rl,
    "verl": verl,
}
"""Format -> its reader (path, notes to add to, options)."""
