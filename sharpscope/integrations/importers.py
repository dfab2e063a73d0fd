"""Completions from the files of other trainers, without their code, and a dumped batch measured at a checkpoint.

A format says which files it reads, and how their records become rows with the columns COLUMNS. What the files do not say is
null, and what they say beyond the trace's columns is named in a note.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sharpscope.errors import UserError, nearest
from sharpscope.integrations.completions import Completion, Options, write
from sharpscope.rules.judging import POSITIVE
from sharpscope.tasks.dataset import read_file
from sharpscope.traces import load_run

if TYPE_CHECKING:
    from sharpscope.methods.method import Method
    from sharpscope.policy import Policy
    from sharpscope.recording.from_checkpoint import Probed

PRIME_RL_SCHEMA = 1
"""Schema version of prime-rl's export that is read."""
_PROBED = ("score_norm", "score_norm_local", "attribution")
_PER_TOKEN = (
    "logp",
    "behavior_logp",
    "ref_logp",
    "entropy",
    "advantage",
    "ratio",
    "weight",
    "loss_coef",
    "clipped",
)
_TOKEN = ("token_id", *_PER_TOKEN, "temperature", *_PROBED)
_STEP = ("loss", "grad_norm", "lr")
_ROW = (
    "step",
    "group",
    "env",
    "prompt",
    "completion",
    "reward",
    "prompt_ids",
    "prompt_length",
    *_STEP,
)
COLUMNS = (*_TOKEN, "mask", *_ROW)
"""What a file of JSON lines can have. `mask`: tokens with 0 are not in the loss; `prompt_ids`: token IDs of the prompt;
`prompt_length`: how many of the token IDs are the prompt; `loss`, `grad_norm`, `lr`: of the step."""
SAMPLERS = "the files have no log-probabilities of the trainer: those of the sampler stand in their place (logp)"
Record = tuple[str, dict[str, Any]]
"""Place in a file, as messages name it, and the object there."""


@dataclass
class Told:
    """What reading has to say: notes, in their order, and the names of columns that are left out."""

    notes: dict[str, None]
    dropped: set[str]


def import_files(kind: str | None, source: Path, out: Path, options: Options) -> dict[str, int]:
    """Write a trainer's files as a run; returns the number of steps, rollouts and tokens.

    Args:
        kind: one of FORMATS; None: recognized from the files.
        source: the file, or the folder.
        out: folder of the new run.
        options: of the run and the format.

    Raises:
        UserError: the format is unknown, a file has none of its values or wrong ones, or the folder or an option cannot be used.
    """
    kind, notes = kind or recognize(source), dict[str, None]()
    return write(out, kind, source, read(source, kind, options, notes), options, notes)


def read(
    source: Path, kind: str, options: Options, notes: dict[str, None]
) -> Iterator[tuple[int, list[Completion]]]:
    """Yield each step with the completions in a trainer's files, and add to `notes`; see `import_files`."""
    if kind not in FORMATS:
        raise UserError(
            f"{kind}: unknown format{nearest(kind, tuple(FORMATS))}; one of {', '.join(FORMATS)}"
        )
    form, told, shift = FORMATS[kind], Told(notes, set()), 0
    files = _files(source, form)
    if not files:
        raise UserError(f"{source}: has no files of {kind}; {form.written}")
    if kind == "prime-rl":
        partly = dict.fromkeys(
            step for step, path in files if not (path.parent / "STABLE").exists()
        )
        notes |= dict.fromkeys(
            f"step {step} is not complete (no file STABLE) and is left out" for step in partly
        )
        files = [file for file in files if file[0] not in partly]
    for part, some in groupby(files, lambda file: file[0] if form.a_step else None):
        by_step: dict[int, list[Completion]] = {} if part is None else {part: []}
        for step, named in groupby(some, itemgetter(0)):
            records = chain.from_iterable(form.records(path) for _, path in named)
            for where, values in form.rows(records, options, told):
                number = values.get("step", 1 if step is None else step)
                if not _whole(number):
                    wrong = f"step = {str(number)[:40]!r} is not a whole number from 0; number the steps from 1"
                    raise UserError(f"{where}: {wrong}")
                by_step.setdefault(number, []).append(completion_of(values, where))
        if 0 in by_step:  # it would stand for "before training"
            notes["step numbers are one higher than the files', which begin at 0"] = None
            shift = 1
        yield from ((step + shift, by_step[step]) for step in sorted(by_step))
    if told.dropped:
        names = ", ".join(sorted(told.dropped))
        notes[f"columns that a trace has no place for, or that are not named: {names}"] = None


def recognize(source: Path) -> str:
    """The format of a trainer's files, by their names.

    Raises:
        UserError: there is no such file.
    """
    for kind, form in FORMATS.items():
        if _files(source, form):
            return kind
    raise UserError(
        f"{source}: no file of a known format; give a file or folder of {', '.join(FORMATS)}"
    )


def _files(source: Path, form: Format) -> list[tuple[int | None, Path]]:
    """The files of a format with the step in their names, by step."""
    paths = [source] * source.is_file()
    for pattern in form.patterns.split() if source.is_dir() else ():
        paths = paths or sorted(source.glob(pattern), key=lambda path: (len(path.name), path))
    found = [(match, path) for path in paths if (match := re.match(form.name, path.as_posix()))]
    numbered = len(found) > 1 or form.a_step
    steps = [
        int(match[1]) if numbered and match.re.groups and match[1] else None for match, _ in found
    ]
    return sorted(
        zip(steps, (path for _, path in found), strict=True), key=lambda file: file[0] or 0
    )


def probe_rollouts(
    source: Path,
    policy: Policy,
    out: Path,
    *,
    method: Method | None = None,
    temperature: float | None = None,
    **options: Any,
) -> list[Probed]:
    """Read a dump of another trainer and write it as a run with shares, norms, layers and rotation at a checkpoint.

    Args:
        source: file or folder; see `import_files`.
        policy: the checkpoint that drew the batch, or the one that the first update of the step changed.
        out: folder of the new run.
        method: whose loss gives the tokens' coefficients; None: those in the files.
        temperature: of the log-probabilities; None: 1, or what the files say.
        options: further ones of `probe_trace`.

    Raises:
        UserError: IDs, log-probabilities or advantages are missing (the message says what makes the trainer write them), or the
            checkpoint does not fit.
    """
    from sharpscope.recording.from_checkpoint import probe_trace

    kind, name = recognize(source), getattr(method, "name", None) or "unknown"
    with tempfile.TemporaryDirectory() as folder:
        import_files(
            kind, source, Path(folder) / "imported", Options(name, temperature=temperature)
        )
        run = load_run(Path(folder) / "imported")
        rollouts, written, missing = run.rollouts, FORMATS[kind].written, ""
        if without := int(rollouts["token_ids"].isna().sum()):
            wrong = f"{without} of {len(rollouts)} completions have no token IDs of the prompt; {written}"
            raise UserError(f"--rollouts {source}: {wrong}")
        tokens = run.tokens(columns=["loss_coef", "advantage"])
        rewarded = rollouts["reward"].notna().all() and rollouts["group"].notna().all()
        if method is None and tokens["loss_coef"].isna().any():
            missing = "has no coefficients (loss_coef); give the method that trained on it, such as --method grpo"
        elif method is not None and tokens["advantage"].isna().any() and not rewarded:
            missing = f"has neither advantages nor rewards with groups, from which {name} makes them; {written}"
        if missing:
            raise UserError(f"--rollouts {source}: {missing}")
        return probe_trace(run, policy, out, method=method, **options)


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
        raise UserError(
            f"{where}: mask has not one value for each of the {count} token IDs; write 0 or 1 for each"
        )
    prompt = (
        None
        if values.get("prompt_ids") is None
        else _integers(values["prompt_ids"], "prompt_ids", where)
    )
    start = 0  # of the completion
    if prompt is None:
        start = values.get("prompt_length", next((i for i, keep in enumerate(mask) if keep), 0))
        if not isinstance(start, int) or isinstance(start, bool) or not 0 <= start <= count:
            raise UserError(
                f"{where}: prompt_length = {start!r} is no number of the {count} token IDs"
            )
        prompt = ids[:start] if start else None
    kept = [i for i, keep in enumerate(mask) if keep and i >= start]
    columns: dict[str, list[Any]] = {"token_id": [ids[i] for i in kept], "update": [0] * len(kept)}
    columns["position"] = [i - start for i in kept]
    for name in _TOKEN[1:]:
        if values.get(name) is not None:
            columns[name] = _of_tokens(values[name], name, count, start, kept, where)
    if any(value is None for value in columns.get("logp", [None])):
        raise UserError(
            f"{where}: logp is null on a token in the loss; give its log-probability, or mask it"
        )
    largest = max(columns.get("logp", ()), default=0.0)
    if largest > POSITIVE:
        wrong = "above 0, so it is no log-probability; give natural logarithms, not probabilities"
        raise UserError(f"{where}: logp = {largest:g} is {wrong}")
    group = values.get("group", values.get("prompt"))
    for name in ("env", "prompt", "completion"):
        if not isinstance(values.get(name), str | None):
            raise UserError(f"{where}: {name} is a {type(values[name]).__name__}; write a text")
    reward = values.get("reward")
    return Completion(
        ids=None if prompt is None else [*prompt, *ids[start:]],
        prompt_length=len(prompt or ()),
        tokens=columns if kept else {},
        group=None if group is None else str(group),
        env=values.get("env"),
        prompt=values.get("prompt"),
        completion=values.get("completion"),
        reward=reward
        if isinstance(reward, float) and math.isnan(reward)
        else number(reward, "reward", where),
        parts=values.get("reward_parts", {}),
        length=len(kept),
        of_step={name: number(values[name], name, where) for name in _STEP if name in values},
    )


_EACH = "both need one for each token"


def _of_tokens(
    given: Any, name: str, count: int, start: int, kept: list[int], where: str
) -> list[Any]:
    """Values of the tokens `kept`, from one for each token, for each of the completion, or (advantage, temperature) for all."""
    if name in ("advantage", "temperature") and not isinstance(given, list):
        given = [given] * count
    if start and isinstance(given, list) and len(given) == count - start:
        given = [None] * start + given
    if not isinstance(given, list) or len(given) != count:
        received = len(given) if isinstance(given, list) else "no list of"
        raise UserError(f"{where}: {name} has {received} values, token_id {count}; {_EACH}")
    values = [number(given[i], name, where) for i in kept]
    return [None if v is None else int(np.sign(v)) for v in values] if name == "clipped" else values


def number(value: Any, name: str, where: str) -> float | None:
    """A finite number or null; NaN is null.

    Raises:
        UserError: it is something else.
    """
    if value is None or value != value:  # noqa: PLR0124 - NaN
        return None
    if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        return float(value)
    raise UserError(
        f"{where}: {name} = {str(value)[:40]!r} is not a finite number; write a number or null"
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _integers(value: Any, name: str, where: str) -> list[int]:
    if not isinstance(value, list) or not all(map(_whole, value)):
        raise UserError(
            f"{where}: {name} is not made of whole numbers from 0; write a list of them"
        )
    return value


def _renamed(record: Mapping[str, Any], names: str, told: Told, more: str = "") -> dict[str, Any]:
    """The columns of a record that are not null under our names; `names` has pairs "ours=theirs", `more` what else is known."""
    pairs = [pair.split("=") for pair in names.split()]
    told.dropped |= set(record) - {theirs for _, theirs in pairs} - set(more.split())
    return {ours: record[theirs] for ours, theirs in pairs if record.get(theirs) is not None}


# -- any table of tokens ------------------------------------------------------------------------------------------------------


def jsonl(records: Iterator[Record], options: Options, told: Told) -> Iterator[Record]:
    """A table of tokens as JSON lines, a sequence on each: a file, or a folder of files.

    Needed: `token_id` and `logp` (ln π under the policy at the start of the step). A value of a token may be one number for the
    sequence. Without `step`, the last number in a file's name is the step where there are several files, and 1 where there is
    one. The prompt is `prompt_ids`, or the first `prompt_length` token IDs, or those before the first with a mask of 1.
    """
    for ours in options.columns:
        if ours not in COLUMNS:
            raise UserError(f"--columns {ours}: unknown{nearest(ours, COLUMNS)}")
    theirs = {name: name for name in COLUMNS} | dict(options.columns)
    for where, record in records:
        values = {ours: record[name] for ours, name in theirs.items() if name in record}
        told.dropped |= set(record) - set(theirs.values())
        place = record.get("position")
        if isinstance(place, list) and place != list(range(len(place))):
            raise UserError(
                f"{where}: position leaves out tokens; give all of the sequence, with mask 0 on those not in the loss"
            )
        for ours in ("token_id", "logp", *sorted(options.columns)):
            if ours not in values:
                raise UserError(
                    f"{where}: no column '{theirs[ours]}'; name the file's column: --columns {ours}=NAME"
                )
        yield where, values


# -- dumps of trainers --------------------------------------------------------------------------------------------------------


def nemo_rl(records: Iterator[Record], _: Options, told: Told) -> Iterator[Record]:
    """NeMo-RL's train_data_step{N}.jsonl (written by default): rows padded to one width, each value in a list of length 1."""
    columns = (
        "advantage=advantages behavior_logp=generation_logprobs logp=prev_logprobs reward=rewards"
    )
    columns += " reward=filtered_rewards"  # of the rows that dynamic sampling left; `rewards` are then those of all it drew
    for where, record in records:
        row = {k: v[0] if isinstance(v, list) and len(v) == 1 else v for k, v in record.items()}
        for name in ("token_ids", "token_loss_mask", "prev_logprobs"):
            if not isinstance(row.get(name), list):
                raise UserError(
                    f"{where}: no list {name}; give the training data that NeMo-RL's GRPO writes"
                )
        known = _renamed(
            row,
            columns,
            told,
            "token_ids token_loss_mask sample_loss_mask input_lengths idx content",
        )
        length = int(row.get("input_lengths", len(row["token_ids"])))
        mask, ids = (
            [int(keep) for keep in row["token_loss_mask"][:length]],
            row["token_ids"][:length],
        )
        start = mask.index(1) if 1 in mask else length
        values = {k: v[:length] if isinstance(v, list) else v for k, v in known.items()}
        values |= {"token_id": ids, "prompt_length": start, "group": ids[:start]}
        yield where, values | {"mask": mask if row.get("sample_loss_mask", 1) else [0] * length}


def _torch_records(path: Path) -> Iterator[Record]:
    """The samples of a file of slime, with the raw reward of each where the file has it."""
    import torch

    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
        samples, raw = data["samples"], data.get("raw_reward")
    except Exception as problem:
        text = " ".join(str(problem).split())[:100]
        raise UserError(
            f"{path}: is no training data of slime, format 2 ({text}); use --dump-details"
        ) from None
    for index, sample in enumerate(samples):
        row = {
            name: value.tolist() if hasattr(value, "tolist") else value
            for name, value in sample.items()
        }
        if raw is not None and len(raw) == len(samples):
            row["rewards"] = raw[row.get("rollout_position", index)]
        yield f"{path} sample {index}", row


def slime(records: Iterator[Record], _: Options, told: Told) -> Iterator[Record]:
    """Slime's training data (--dump-details or --save-debug-train-data): a dict of torch in {rollout_id}.pt, format 2."""
    columns = (
        "logp=log_probs behavior_logp=rollout_log_probs ref_logp=ref_log_probs entropy=entropy "
    )
    columns += "advantage=advantages reward=rewards token_id=tokens"
    used = (
        "response_lengths loss_masks total_lengths rollout_position data_parallel_rank sample_index"
    )
    for where, row in records:
        values, length = _renamed(row, columns, told, used), int(row["response_lengths"])
        start = len(row["tokens"]) - length
        values |= {"prompt_length": start, "group": row["tokens"][:start]}
        values["mask"] = [0] * start + [int(keep) for keep in row.get("loss_masks") or [1] * length]
        if "logp" not in values and "behavior_logp" in values:  # trained on the sampler's
            values["logp"] = values.pop("behavior_logp")
            told.notes[SAMPLERS] = None
        yield where, values


def open_instruct(records: Iterator[Record], _: Options, told: Told) -> Iterator[Record]:
    """open-instruct's {run}_rollouts_{shard}.jsonl (--save_traces)."""
    told.notes[SAMPLERS] = None
    columns = (
        "step=step logp=logprobs advantage=advantage reward=reward group=prompt_idx env=dataset"
    )
    for where, record in records:
        prompt, response = (
            _integers(record.get(n), n, where) for n in ("prompt_tokens", "response_tokens")
        )
        if record.get("logprobs") is None:
            raise UserError(
                f"{where}: no logprobs; run open-instruct with log-probabilities of the sampler"
            )
        values = {"step": None, "token_id": prompt + response, "prompt_length": len(prompt)}
        yield where, values | _renamed(record, columns, told, "prompt_tokens response_tokens")


def verifiers(records: Iterator[Record], _: Options, told: Told) -> Iterator[Record]:
    """Verifiers' traces.jsonl (prime-rl: rollouts/step_N/…/traces.jsonl): episodes whose messages form a tree.

    Each path from the root to a leaf is a completion; a message in several of them counts in the first.
    """
    streams = "behavior_logp=logprobs logp=trainer_logprobs entropy=entropies advantage=advantages ref_logp=reference_logprobs"
    for where, episode in records:
        task, env = episode.get("group") or episode.get("task"), episode.get("env")
        whole = {"group": json.dumps(task, sort_keys=True) if isinstance(task, dict) else task}
        whole["env"] = env.get("id") if isinstance(env, dict) else env
        for trace in episode.get("traces") or ():
            rewards = {name: float(value) for name, value in (trace.get("rewards") or {}).items()}
            whole |= {"reward_parts": rewards, "reward": sum(rewards.values()) if rewards else None}
            for path in _branches(trace.get("nodes") or [], where):
                ids = [i for node, _ in path for i in node["token_ids"]]
                mask = [int(keep and new) for node, new in path for keep in node["mask"]]
                values: dict[str, Any] = {}
                for ours, theirs in (pair.split("=") for pair in streams.split()):
                    stream = [v for node, _ in path for v in _stream(node, theirs)]
                    values |= {} if stream == [None] * len(ids) else {ours: stream}
                if "logp" not in values and "behavior_logp" in values:
                    told.notes[SAMPLERS] = None
                    values["logp"] = values.pop("behavior_logp")
                start = mask.index(1) if 1 in mask else len(ids)
                yield (
                    where,
                    {**whole, **values, "token_id": ids, "mask": mask, "prompt_length": start},
                )


def _branches(
    nodes: list[dict[str, Any]], where: str
) -> Iterator[list[tuple[dict[str, Any], bool]]]:
    """The paths from the root to each leaf of a tree of messages, and whether each message is new."""
    counted = set[int]()
    for leaf in sorted(set(range(len(nodes))) - {node.get("parent") for node in nodes}):
        path = [leaf]
        while (parent := nodes[path[0]].get("parent")) is not None:
            path.insert(0, parent)
        if any(not nodes[index].get("token_ids") for index in path):
            raise UserError(
                f"{where}: a message has no token_ids; run with verifiers' TrainClient, which stores them"
            )
        yield [
            (nodes[index] | {"mask": nodes[index].get("mask") or []}, index not in counted)
            for index in path
        ]
        counted |= set(path)


def _stream(node: Mapping[str, Any], name: str) -> list[Any]:
    """A message's values of a stream, which has one for each True of the mask."""
    given = iter(node.get(name) or ())
    return [next(given, None) if keep else None for keep in node["mask"]]


# -- prime-rl's token export --------------------------------------------------------------------------------------------------


PRIME_RL = (
    "token_id=token_ids position=position_ids mask=loss_mask logp=trainer_logprobs behavior_logp=inference_logprobs entropy=entropy "
    "advantage=advantages ratio=importance_ratio temperature=temperatures reward=rewards high=is_masked_high low=is_masked_low"
)
"""Ours=theirs: a record's values of its tokens; the first five are needed."""


def prime_rl(records: Iterator[Record], __: Options, told: Told) -> Iterator[Record]:
    """prime-rl's token export (enable_token_export): its output folder, or token_exports in it.

    Log-probabilities, entropy, advantages, ratios r = π/μ, masks of the default loss and, where the export has them, rewards
    are known. `loss_coef` is null: the export has neither the constants of the loss nor whether it is the default one.
    """
    known = "env_name schema_version step export_step rank micro_step micro_sequence_idx export_sequence_idx run_id"
    for where, record in records:
        version = record.get("schema_version")
        if version != PRIME_RL_SCHEMA:
            wrong = f"schema_version {version}, not {PRIME_RL_SCHEMA}; export with a prime-rl that writes it"
            raise UserError(f"{where}: {wrong}")
        count, given = len(_integers(record.get("token_ids"), "token_ids", where)), {}
        for place, (ours, theirs) in enumerate(pair.split("=") for pair in PRIME_RL.split()):
            values = record.get(theirs)
            if values is None and place >= 5:
                values = [None] * count
            if not isinstance(values, list) or len(values) != count:
                raise UserError(
                    f"{where}: {theirs} is no list of {count} values like token_ids; export the step again"
                )
            given[ours] = [number(value, theirs, where) for value in values]
        _renamed(record, PRIME_RL, told, known)
        tokens = pd.DataFrame(given, dtype=float)
        tokens["clipped"] = tokens["high"] - tokens["low"]
        # Packed samples, in which positions begin anew.
        for _, part in tokens.groupby((tokens["position"] == 0).cumsum()):
            mask = part["mask"] > 0
            if not mask.any():
                continue
            row: dict[str, Any] = {
                n: part[n].tolist() for n in _TOKEN if n in part and part[n].notna().any()
            }
            row |= {
                "token_id": part["token_id"].astype(int).tolist(),
                "env": record.get("env_name"),
            }
            # A log-probability that is not finite is null.
            row |= {
                "prompt_length": int(mask.argmax()),
                "mask": (mask & part["logp"].notna()).astype(int).tolist(),
            }
            for reward in part["reward"][mask].dropna().tolist()[:1]:
                row |= {"reward": reward, "reward_parts": {"total": reward}}
            yield where, row


@dataclass(frozen=True)
class Format:
    """How the files of a trainer are read."""

    patterns: str  # of its files in the folder, separated by spaces; the first that has any
    name: str  # regular expression of their paths; its group is the step
    # records of one step -> rows of COLUMNS
    rows: Callable[[Iterator[Record], Options, Told], Iterator[Record]]
    written: str  # how its trainer writes token IDs, log-probabilities and advantages
    a_step: bool = True  # whether a file has one step, so that steps are read one after the other
    records: Callable[[Path], Iterator[Record]] = read_file


FORMATS = {
    "prime-rl": Format(
        "token_exports/step_*/rank_*.jsonl step_*/rank_*.jsonl",
        r".*step_(\d+)/rank_\d+\.jsonl$",
        prime_rl,
        "set enable_token_export in prime-rl (token_exports/step_N/STABLE), or give its rollouts/step_N folder",
    ),
    "nemo-rl": Format(
        "train_data_step*.jsonl",
        r".*train_data_step(\d+)\.jsonl$",
        nemo_rl,
        "NeMo-RL writes train_data_stepN.jsonl to its logger.log_dir unless env.should_log_nemo_gym_responses is set",
    ),
    "slime": Format(
        "train_data/*.pt *.pt",
        r".*?(\d+)\.pt$",
        slime,
        "run slime with --dump-details or --save-debug-train-data (N.pt)",
        records=_torch_records,
    ),
    "verifiers": Format(
        "**/traces.jsonl",
        r"(?:.*step_(\d+)/)?.*traces\.jsonl$",
        verifiers,
        "verifiers writes token IDs to traces.jsonl with its TrainClient, not with vf-eval's EvalClient",
    ),
    "open-instruct": Format(
        "*_rollouts_*.jsonl",
        r".*_rollouts_\d+\.jsonl$",
        open_instruct,
        "run open-instruct with --save_traces (RUN_rollouts_N.jsonl)",
        a_step=False,
    ),
    "jsonl": Format(
        "*.jsonl",
        r"(?:.*?(\d+)[^\d/]*|.*)$",
        jsonl,
        "write `prompt_ids` (or `prompt_length`), `token_id`, `logp` and `advantage` on each line of a file *.jsonl",
        a_step=False,
    ),
}
"""Formats by name, in the order in which files are compared with them."""
