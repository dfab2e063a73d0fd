"""The files that other trainers dump: where they lie, and how their records become rows with the columns COLUMNS.

A trainer has a mapping {our name: its name}, and a function that reads what a mapping cannot say. Values are checked by
`sharpscope.integrations.values`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sharpscope.errors import UserError, nearest
from sharpscope.integrations.completions import Options
from sharpscope.integrations.values import (
    Values,
    flags,
    integers,
    number,
    object_of,
    objects_of,
    whole,
)
from sharpscope.tasks.dataset import read_file
from sharpscope.untrusted import BOUNDS_VARIABLE, bound, check_regular

PRIME_RL_SCHEMA = 1
"""Schema version of prime-rl's export that is read."""
_PROBED = ("score_norm", "score_norm_local", "attribution")
_PERTOKEN_COLUMNS = (
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
TOKEN_COLUMNS = ("token_id", *_PERTOKEN_COLUMNS, "temperature", "policy_version", *_PROBED)
STEP_COLUMNS = ("loss", "grad_norm", "lr")
_ROW = (
    "step",
    "group",
    "env",
    "prompt",
    "completion",
    "reward",
    "reward_parts",
    "prompt_ids",
    "prompt_length",
    *STEP_COLUMNS,
)
COLUMNS = (*TOKEN_COLUMNS, "mask", *_ROW)
"""What a file of JSON lines can have. `mask`: tokens with 0 are not in the loss; `prompt_ids`: token IDs of the prompt;
`prompt_length`: how many of the token IDs are the prompt; `loss`, `grad_norm`, `lr`: of the step."""
SAMPLERS = "the files have no log-probabilities of the trainer: those of the sampler stand in their place (logp)"
Record = tuple[str, dict[str, object]]
"""Place in a file, as messages name it, and the object there."""


@dataclass
class Told:
    """What reading has to say: notes, in their order, and the names of columns that are left out."""

    notes: dict[str, None]
    dropped: set[str]


def renamed(
    given: Values, columns: Mapping[str, str], told: Told, others: Collection[str] = ()
) -> dict[str, object]:
    """The values of a record that are not null, under our names.

    Args:
        given: the trainer's record.
        columns: our name -> the trainer's.
        told: gets the names that are neither in `columns` nor in `others`.
        others: names that are read in another way.
    """
    told.dropped |= set(given) - set(columns.values()) - set(others)
    return {
        ours: given[theirs] for ours, theirs in columns.items() if given.get(theirs) is not None
    }


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

NEMO_RL = {
    "advantage": "advantages",
    "behavior_logp": "generation_logprobs",
    "logp": "prev_logprobs",
    "reward": "rewards",
}
_NEMO_RL_OTHERS = {
    "token_ids",
    "token_loss_mask",
    "sample_loss_mask",
    "input_lengths",
    "idx",
    "content",
    "filtered_rewards",
}


def nemo_rl(records: Iterator[Record], _: Options, told: Told) -> Iterator[Record]:
    """NeMo-RL's train_data_step{N}.jsonl (written by default): rows padded to one width, each value in a list of length 1."""
    for where, given in records:
        row = {k: v[0] if isinstance(v, list) and len(v) == 1 else v for k, v in given.items()}
        lists = dict[str, list[object]]()
        for name in ("token_ids", "token_loss_mask", "prev_logprobs"):
            column = row.get(name)
            if not isinstance(column, list):
                raise UserError(
                    f"{where}: no list {name}; give the training data that NeMo-RL's GRPO writes"
                )
            lists[name] = column
        length = whole(row.get("input_lengths", len(lists["token_ids"])), "input_lengths", where)
        ids = integers(lists["token_ids"][:length], "token_ids", where)
        mask = flags(lists["token_loss_mask"][:length], len(ids), "token_loss_mask", where)
        start = mask.index(1) if 1 in mask else len(ids)
        known = renamed(row, NEMO_RL, told, _NEMO_RL_OTHERS)
        values = {k: v[:length] if isinstance(v, list) else v for k, v in known.items()}
        if row.get("filtered_rewards") is not None:
            # Of the rows that dynamic sampling left; `rewards` are then those of all it drew.
            values["reward"] = row["filtered_rewards"]
        in_loss = number(row.get("sample_loss_mask", 1), "sample_loss_mask", where)
        yield (
            where,
            values
            | {
                "token_id": ids,
                "prompt_length": start,
                "group": ids[:start],
                "mask": mask if in_loss else [0] * len(ids),
            },
        )


SLIME = {
    "logp": "log_probs",
    "behavior_logp": "rollout_log_probs",
    "ref_logp": "ref_log_probs",
    "entropy": "entropy",
    "advantage": "advantages",
    "reward": "rewards",
    "token_id": "tokens",
}
_SLIME_OTHERS = {
    "response_lengths",
    "loss_masks",
    "total_lengths",
    "rollout_position",
    "data_parallel_rank",
    "sample_index",
}


def _torch_records(path: Path) -> Iterator[Record]:
    """The samples of a file of slime, with the raw reward of each where the file has it."""
    import torch

    try:
        check_regular(path)
        data = torch.load(path, map_location="cpu", weights_only=True)
        samples, raw = data["samples"], data.get("raw_reward")
    except Exception as problem:
        reason = " ".join(str(problem).split())[:100]
        raise UserError(
            f"{path}: is no training data of slime, format 2 ({reason}); use --dump-details"
        ) from None
    for index, sample in enumerate(objects_of(samples, "samples", str(path))):
        where = f"{path} sample {index}"
        row = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in sample.items()}
        if isinstance(raw, list) and len(raw) == len(samples):
            place = whole(row.get("rollout_position", index), "rollout_position", where)
            row["rewards"] = raw[place] if place < len(raw) else None
        yield where, row


def slime(records: Iterator[Record], _: Options, told: Told) -> Iterator[Record]:
    """Slime's training data (--dump-details or --save-debug-train-data): a dict of torch in {rollout_id}.pt, format 2."""
    for where, row in records:
        values = renamed(row, SLIME, told, _SLIME_OTHERS)
        ids = integers(row.get("tokens"), "tokens", where)
        length = whole(row.get("response_lengths"), "response_lengths", where)
        start = len(ids) - length
        if start < 0:
            raise UserError(
                f"{where}: response_lengths = {length}, above the {len(ids)} tokens; dump it again"
            )
        mask = flags(row.get("loss_masks") or [1] * length, length, "loss_masks", where)
        values |= {"prompt_length": start, "group": ids[:start], "mask": [0] * start + mask}
        _take_sampler(values, told)
        yield where, values


def _take_sampler(values: dict[str, object], told: Told) -> None:
    """Where the trainer's log-probabilities are missing, take those of the sampler, on which it trained."""
    if "logp" not in values and "behavior_logp" in values:
        values["logp"] = values.pop("behavior_logp")
        told.notes[SAMPLERS] = None


OPEN_INSTRUCT = {
    "step": "step",
    "logp": "logprobs",
    "advantage": "advantage",
    "reward": "reward",
    "group": "prompt_idx",
    "env": "dataset",
}


def open_instruct(records: Iterator[Record], _: Options, told: Told) -> Iterator[Record]:
    """open-instruct's {run}_rollouts_{shard}.jsonl (--save_traces)."""
    told.notes[SAMPLERS] = None
    for where, row in records:
        prompt, response = (
            integers(row.get(name), name, where) for name in ("prompt_tokens", "response_tokens")
        )
        if row.get("logprobs") is None:
            raise UserError(
                f"{where}: no logprobs; run open-instruct with log-probabilities of the sampler"
            )
        values = {"step": None, "token_id": prompt + response, "prompt_length": len(prompt)}
        others = ("prompt_tokens", "response_tokens")
        yield where, values | renamed(row, OPEN_INSTRUCT, told, others)


VERIFIERS = {
    "behavior_logp": "logprobs",
    "logp": "trainer_logprobs",
    "entropy": "entropies",
    "advantage": "advantages",
    "ref_logp": "reference_logprobs",
}
MOST_MESSAGES = 1_000_000
"""Most messages of an episode's completions, each counted in every completion that it is in."""


def verifiers(records: Iterator[Record], _: Options, told: Told) -> Iterator[Record]:
    """Verifiers' traces.jsonl (prime-rl: rollouts/step_N/…/traces.jsonl): episodes whose messages form a tree.

    Each path from the root to a leaf is a completion; a message in several of them counts in the first.
    """
    for where, episode in records:
        task, env = episode.get("group") or episode.get("task"), episode.get("env")
        whole_episode = {
            "group": json.dumps(task, sort_keys=True) if isinstance(task, dict) else task,
            "env": env.get("id") if isinstance(env, dict) else env,
        }
        for trace in objects_of(episode.get("traces"), "traces", where):
            given = object_of(trace.get("rewards"), "rewards", where)
            parts = {name: number(value, "rewards", where) or 0.0 for name, value in given.items()}
            rewards = {"reward_parts": parts, "reward": sum(parts.values()) if parts else None}
            for path in _branches(objects_of(trace.get("nodes"), "nodes", where), where):
                yield where, whole_episode | rewards | _path_values(path, where, told)


@dataclass(frozen=True, kw_only=True)
class _Message:
    """A message of a conversation and its place before others; `new`: no completion before has it."""

    ids: list[int]
    mask: list[int]
    node: Values
    new: bool


def _path_values(path: list[_Message], where: str, told: Told) -> dict[str, object]:
    """The columns of a completion that is made of messages."""
    ids = [i for message in path for i in message.ids]
    mask = [int(keep and message.new) for message in path for keep in message.mask]
    values: dict[str, object] = {
        "token_id": ids,
        "mask": mask,
        "prompt_length": mask.index(1) if 1 in mask else len(ids),
    }
    for ours, theirs in VERIFIERS.items():
        stream = [value for message in path for value in _stream(message, theirs, where)]
        if any(value is not None for value in stream):
            values[ours] = stream
    _take_sampler(values, told)
    return values


def _branches(nodes: list[Values], where: str) -> Iterator[list[_Message]]:
    """The paths from the root to each leaf of a tree of messages."""
    parents = [_parent(node, index, len(nodes), where) for index, node in enumerate(nodes)]
    counted = set[int]()
    total = reached = 0
    for leaf in sorted(set(range(len(nodes))) - set(parents)):
        path, at = [leaf], parents[leaf]
        while at is not None:
            path.append(at)
            at = parents[at]
        total += len(path)
        if total > bound(MOST_MESSAGES):
            wrong = f"more than {bound(MOST_MESSAGES):,.0f} messages in its completions"
            raise UserError(f"{where}: {wrong}; to read them set {BOUNDS_VARIABLE} above 1")
        yield [_message(nodes[index], index not in counted, where) for index in reversed(path)]
        counted.update(path)
    reached = len(counted)
    if reached < len(nodes):
        raise UserError(
            f"{where}: the parents of {len(nodes) - reached} messages form a circle; write the episode again"
        )


def _parent(node: Values, index: int, count: int, where: str) -> int | None:
    parent = node.get("parent")
    if parent is None:
        return None
    place = whole(parent, f"nodes[{index}].parent", where)
    if place >= count:
        raise UserError(
            f"{where}: nodes[{index}].parent = {parent}, but there are {count} messages; write the episode again"
        )
    return place


def _message(node: Values, new: bool, where: str) -> _Message:
    if not node.get("token_ids"):
        raise UserError(
            f"{where}: a message has no token_ids; run with verifiers' TrainClient, which stores them"
        )
    ids = integers(node["token_ids"], "token_ids", where)
    mask = node.get("mask") or [0] * len(ids)
    return _Message(ids=ids, mask=flags(mask, len(ids), "mask", where), node=node, new=new)


def _stream(message: _Message, name: str, where: str) -> list[object]:
    """A message's values of a stream, which has one for each True of the mask."""
    values = message.node.get(name) or []
    if not isinstance(values, list):
        raise UserError(f"{where}: {name} is a {type(values).__name__}; write a list of numbers")
    given = iter(values)
    return [next(given, None) if keep else None for keep in message.mask]


# -- prime-rl's token export --------------------------------------------------------------------------------------------------


PRIME_RL = {
    "token_id": "token_ids",
    "position": "position_ids",
    "mask": "loss_mask",
    "logp": "trainer_logprobs",
    "behavior_logp": "inference_logprobs",
    "entropy": "entropy",
    "advantage": "advantages",
    "ratio": "importance_ratio",
    "temperature": "temperatures",
    "reward": "rewards",
    "high": "is_masked_high",
    "low": "is_masked_low",
}
_PRIME_RL_NEEDED = ("token_id", "position", "mask", "logp", "behavior_logp")
_PRIME_RL_OTHERS = {
    "env_name",
    "schema_version",
    "step",
    "export_step",
    "rank",
    "micro_step",
    "micro_sequence_idx",
    "export_sequence_idx",
    "run_id",
}


def prime_rl(records: Iterator[Record], __: Options, told: Told) -> Iterator[Record]:
    """prime-rl's token export (enable_token_export): its output folder, or token_exports in it.

    Log-probabilities, entropy, advantages, ratios r = π/μ, masks of the default loss and, where the export has them, rewards
    are known. `loss_coef` is null: the export has neither the constants of the loss nor whether it is the default one.
    """
    for where, row in records:
        version = row.get("schema_version")
        if version != PRIME_RL_SCHEMA:
            wrong = f"schema_version {str(version)[:20]}, not {PRIME_RL_SCHEMA}; export with a prime-rl that writes it"
            raise UserError(f"{where}: {wrong}")
        renamed(row, PRIME_RL, told, _PRIME_RL_OTHERS)
        tokens = _prime_rl_tokens(row, where)
        # Packed samples, in which positions begin anew.
        for _, part in tokens.groupby((tokens["position"] == 0).cumsum()):
            mask = part["mask"] > 0
            if not mask.any():
                continue
            values: dict[str, object] = {
                n: part[n].tolist() for n in TOKEN_COLUMNS if n in part and part[n].notna().any()
            }
            values |= {
                "token_id": part["token_id"].astype(int).tolist(),
                "env": row.get("env_name"),
                "prompt_length": int(mask.argmax()),
                # A log-probability that is not finite is null.
                "mask": (mask & part["logp"].notna()).astype(int).tolist(),
            }
            for reward in part["reward"][mask].dropna().tolist()[:1]:
                values |= {"reward": reward, "reward_parts": {"total": reward}}
            yield where, values


def _prime_rl_tokens(row: Values, where: str) -> pd.DataFrame:
    """The tokens of a record of prime-rl, a column for each of ours; what the record lacks is NaN."""
    count = len(integers(row.get("token_ids"), "token_ids", where))
    columns = {}
    for ours, theirs in PRIME_RL.items():
        values = row.get(theirs)
        if values is None and ours not in _PRIME_RL_NEEDED:
            values = [None] * count
        if not isinstance(values, list) or len(values) != count:
            raise UserError(
                f"{where}: {theirs} is no list of {count} values like token_ids; export the step again"
            )
        columns[ours] = [number(value, theirs, where) for value in values]
    tokens = pd.DataFrame(columns, dtype=float)
    return tokens.assign(clipped=tokens["high"] - tokens["low"])


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
