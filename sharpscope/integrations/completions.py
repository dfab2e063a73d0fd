"""Completions of a step as rows of the tables, and a run of them: what importers and verl's recorder share."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sharpscope.config.training import HealthSpec
from sharpscope.errors import UserError
from sharpscope.rules import Event, judge
from sharpscope.traces import TABLES, RunLock, TraceWriter, create_run_dir, create_run_info, update_run_info
from sharpscope.traces.files import now
from sharpscope.traces.rules import sampler_values


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
        again: column of the table uses -> values, without rollout: uses of tokens by later updates of the step.
        group: what the completions of one prompt share; None: not known.
        env: name of the environment or data set; None: not known.
        reward: NaN where the file says so.
        parts: components of the reward.
        of_step: column of the steps table -> value.
    """

    ids: Sequence[int] | None = None
    prompt_length: int = 0
    tokens: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    again: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    group: str | None = None
    env: str | None = None
    prompt: str | None = None
    completion: str | None = None
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None
    length: int | None = None
    of_step: Mapping[str, float | None] = field(default_factory=dict)


def write(
    out: Path,
    kind: str,
    source: Path,
    steps: Iterable[tuple[int, list[Completion]]],
    labels: Labels,
    notes: Sequence[str],
) -> dict[str, int]:
    """Write a trace of the completions of each step; returns the number of steps, rollouts and tokens.

    `notes` are written at the end, so that reading the steps may add to them.

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
                    if columns and table in counts:
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
    done = {"status": "finished", "steps_done": counts["steps"], "finished": now(), "imported": imported}
    update_run_info(made, **done, notes=[f"imported from {source.name} ({kind})", *notes])
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
    """Columns of the tables rollouts, tokens and uses (empty without any) and steps of one step; groups become adjacent."""
    rows = _grouped(given)
    groups = {name: index for index, name in enumerate(dict.fromkeys(one.group for one in rows))}
    grouped = None not in groups
    rollouts: dict[str, list[Any]] = {column.name: [] for column in TABLES["rollouts"].columns}
    tokens, uses = (
        dict[str, list[Any]]({column.name: [] for column in TABLES[table].columns}) for table in ("tokens", "uses")
    )
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
            "env": one.env,
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
        later = len(one.again.get("position", ()))
        for name, into in uses.items():
            into.extend([index] * later if name == "rollout" else one.again.get(name, [None] * later))
    row = _step_row(rows, rollouts, tokens, grouped)
    return {
        "rollouts": {name: _column(v) for name, v in rollouts.items()} | {"step": step},
        "tokens": {name: _column(v) for name, v in tokens.items()} | {"step": step} if tokens["position"] else {},
        "uses": {name: _column(v) for name, v in uses.items()} | {"step": step} if uses["position"] else {},
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
