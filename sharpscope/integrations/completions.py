"""Completions of a step as rows of the tables, and a run of them: what importers share."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sharpscope.config.run import HealthSpec
from sharpscope.errors import UserError
from sharpscope.rules.judging import Event, judge, sampler_values
from sharpscope.traces import (
    TABLES,
    RunLock,
    SchemaError,
    TraceWriter,
    create_run_dir,
    create_run_info,
    update_run_info,
)
from sharpscope.traces.files import now

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Options:
    """What a user says of an import."""

    method: str = "unknown"
    task: str | None = None  # None: the importer's name
    seed: int | None = None
    # folder or hub id, for texts; None: tokens are shown as their numbers
    tokenizer: str | None = None
    # of the log-probabilities, which probes of a checkpoint use; None: 1 is assumed
    temperature: float | None = None
    # jsonl: column of a trace -> its name in the file
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Completion:
    """One completion with its n tokens in the loss; None in a float column is null."""

    ids: Sequence[int] | None = None  # of prompt and completion; None: not known
    prompt_length: int = 0  # how many of `ids` are the prompt
    # column of the tokens table -> (n,) values
    tokens: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    group: str | None = None  # what the completions of one prompt share; None: not known
    env: str | None = None
    prompt: str | None = None
    completion: str | None = None
    reward: float | None = None  # NaN where the file says so
    parts: Mapping[str, float | None] = field(default_factory=dict)  # components of the reward
    length: int | None = None
    # column of the steps table -> value
    of_step: Mapping[str, float | None] = field(default_factory=dict)


def write(
    out: Path,
    kind: str,
    source: Path,
    steps: Iterable[tuple[int, list[Completion]]],
    options: Options,
    notes: Iterable[str],
) -> dict[str, int]:
    """Write a trace of the completions of each step; returns the number of steps, rollouts and tokens.

    `notes` are written at the end, so that reading the steps may add to them.

    Raises:
        UserError: `out` is not empty, the temperature is not positive, the tokenizer cannot be loaded, or there is no sequence in a
            step or at all.
    """
    temperature = options.temperature
    if temperature is not None and not 0 < temperature < math.inf:
        raise UserError(
            f"--temperature {temperature:g}: must be above 0; give that of the log-probabilities"
        )
    tokenizer = None if options.tokenizer is None else _tokenizer(options.tokenizer)
    made = create_run_dir(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(made / "tokenizer")
    info: dict[str, object] = {
        "method": options.method,
        "task": options.task or kind,
        "seed": options.seed,
    }
    create_run_info(
        made,
        info | {"config": {} if temperature is None else {"rollout": {"temperature": temperature}}},
    )
    counts = {"steps": 0, "rollouts": 0, "tokens": 0}
    known: dict[str, set[str]] = {table: set() for table in counts}
    try:
        with RunLock(made), TraceWriter(made) as writer:
            for step, given in steps:
                if not given:
                    wrong = f"step {step} has no completion; wait until it is written, or remove its file"
                    raise UserError(f"{source}: {wrong}")
                tables = step_tables(step, given, tokenizer)
                for table, columns in tables.items():
                    if columns and table in counts:
                        known[table] |= {
                            name for name, values in columns.items() if np.any(pd.notna(values))
                        }
                        counts[table] += writer.append(table, columns)
                for event in _events(step, tables):
                    writer.append("events", event.row())
                writer.flush()
        if not counts["rollouts"]:
            raise UserError(f"{source}: holds no sequence with a token in the loss")
    except SchemaError as error:
        shutil.rmtree(made)
        raise UserError(f"{source}: {error}; correct the file") from error
    except BaseException:
        shutil.rmtree(made)  # it was new or empty
        raise
    missing = {
        table: [
            c.name
            for c in TABLES[table].columns
            if c.name not in known[table] and not c.probe and not c.timing
        ]
        for table in counts
    }
    imported = {"from": kind, "source": source.name, "not_recorded": missing}
    done = {
        "status": "finished",
        "steps_done": counts["steps"],
        "finished": now(),
        "imported": imported,
    }
    update_run_info(made, **done, notes=[f"imported from {source.name} ({kind})", *notes])
    return counts


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        raise UserError(
            f"--tokenizer {name}: cannot be loaded; give the model's folder or hub id"
        ) from problem


def _stacked(step: int, parts: Sequence[Mapping[str, Sequence[float | None]]]) -> dict[str, Any]:
    """Columns of the tokens of all completions; empty without any."""
    lengths = [len(part.get("position", ())) for part in parts]
    names = dict.fromkeys(name for part in parts for name in part) if sum(lengths) else ()
    pairs = list(zip(parts, lengths, strict=True))
    columns = {name: [v for part, n in pairs for v in part.get(name, [None] * n)] for name in names}
    return columns and columns | {
        "rollout": np.repeat(np.arange(len(parts)), lengths),
        "step": step,
    }


def step_tables(
    step: int, given: Sequence[Completion], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, dict[str, Any]]:
    """Columns of the tables rollouts, tokens (empty without any) and steps of one step; groups become adjacent.

    A `tokenizer` that is not None gives the texts that are not known.
    """
    groups: dict[str | None, int] = {}
    for one in given:
        groups.setdefault(one.group, len(groups))
    rows = sorted(given, key=lambda one: groups[one.group])
    tokens = _stacked(step, [one.tokens for one in rows])
    rollouts = []
    for index, one in enumerate(rows):
        values = [value for value in one.tokens.get("advantage", ()) if value is not None]
        texts = [one.prompt, one.completion]
        if one.ids is not None and tokenizer is not None:
            parts = (one.ids[: one.prompt_length], one.ids[one.prompt_length :])
            made = (
                str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
                for ids in parts
            )
            texts = [new if text is None else text for text, new in zip(texts, made, strict=True)]
        rollouts.append(
            {
                "step": step,
                "rollout": index,
                "group": None if None in groups else groups[one.group],
                "env": one.env,
                "prompt": texts[0],
                "completion": texts[1],
                "reward": one.reward,
                "reward_parts": dict(one.parts),
                "advantage": float(np.mean(values)) if values else None,
                "length": len(one.tokens["position"]) if one.tokens else one.length,
                "token_ids": None if one.ids is None else json.dumps(list(one.ids)),
                "prompt_tokens": None if one.ids is None else one.prompt_length,
            }
        )
    columns = {name: [row[name] for row in rollouts] for name in rollouts[0]}
    steps: dict[str, object] = {"step": step}
    if None not in columns["reward"]:
        rewards = pd.Series(columns["reward"], dtype=float)
        steps |= {
            "reward_mean": rewards.mean(),
            "reward_std": rewards.std() if rewards.count() > 1 else None,
        }
        if None not in groups:
            steps["zero_std_groups"] = int(
                (rewards.groupby(columns["group"]).nunique(dropna=False) == 1).sum()
            )
    for one in rows:
        steps |= one.of_step
    steps["completion_length_mean"] = _mean(columns["length"])
    if tokens:
        steps |= {
            "entropy_mean": _mean(tokens.get("entropy")),
            "weight_mean": _mean(tokens.get("weight")),
        }
        steps |= {"tokens": len(tokens["position"]), "updates": 1}
        if None not in (clipped := tokens.get("clipped", [None])):
            steps["clip_fraction_low"] = _mean([value < 0 for value in clipped])
            steps["clip_fraction_high"] = _mean([value > 0 for value in clipped])
    return {
        "rollouts": columns,
        "tokens": tokens,
        "steps": steps,
    }


def reward_events(step: int, rewards: Sequence[float | None]) -> list[Event]:
    """An event where rewards are NaN; None is not known."""
    missing = sum(reward is not None and math.isnan(reward) for reward in rewards)
    if not missing:
        return []
    text = f"{missing} of {len(rewards)} rewards are NaN; they are left out of the mean"
    return [Event(step, "nan_reward", "warning", missing / len(rewards), 0.0, "none", text)]


def sampler_events(
    step: int, logp: NDArray[np.floating], sampler: NDArray[np.floating], trainer: str
) -> list[Event]:
    """Events on the sampler's log-probabilities (n,), NaN where not known, by the health rules at their defaults."""
    return judge(step, sampler_values(logp, sampler), HealthSpec().limits, trainer)


def _events(step: int, tables: Mapping[str, Mapping[str, Any]]) -> list[Event]:
    """Events of a step by its tables."""
    found, tokens = reward_events(step, tables["rollouts"]["reward"]), tables["tokens"]
    if {"logp", "behavior_logp"} <= tokens.keys():
        # None is NaN
        logp, sampler = (
            np.array(tokens[name], dtype=np.float64) for name in ("logp", "behavior_logp")
        )
        found += sampler_events(step, logp, sampler, "sharpscope")
    return found


def _mean(values: Sequence[Any] | None) -> float | None:
    """Mean of values that are all known; None otherwise."""
    return None if not values or None in values else float(np.mean(values))
