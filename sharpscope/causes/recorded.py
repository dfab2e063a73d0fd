"""What the identities read: the tables of a run, or of the first steps of a training that goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sharpscope.traces import Run
from sharpscope.traces.reader import LARGEST_TOKENIZER
from sharpscope.untrusted import UnreadableError, read_json

MOST_STEPS = 40
"""Steps of a long run whose tokens are read: the first half of them at the run's start, the others spread over the rest."""
MOST_ROWS = {"tokens": 2_000_000, "uses": 2_000_000, "rollouts": 30_000}
"""Rows of a table that are read, of fewer steps where these have more; of two steps at least."""
SUPERVISED = ("sft", "dpo")
"""Methods of runs whose tokens no policy has drawn."""


@dataclass(frozen=True, kw_only=True)
class Words:
    """The special tokens of a run's tokenizer: ID -> text, and the IDs of its end and padding tokens.

    `unread`: why they are not known although the run saved a tokenizer.
    """

    special: Mapping[int, str] = field(default_factory=dict)
    end: int | None = None
    pad: int | None = None
    unread: str = ""

    @classmethod
    def read(cls, folder: Path) -> Words:
        """From tokenizer.json and tokenizer_config.json; nothing without their folder."""
        if not folder.is_dir():
            return cls()
        try:
            added, config = (
                read_json(folder / name, LARGEST_TOKENIZER, folder.parent)
                for name in ("tokenizer.json", "tokenizer_config.json")
            )
            tokens = [token for token in added.get("added_tokens", []) if token.get("special")]
            special = {int(token["id"]): str(token["content"]) for token in tokens}
            ends = [config.get(key) for key in ("eos_token", "pad_token")]
        except (
            UnreadableError,
            OSError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            why = str(error).replace(str(folder), folder.name)
            return cls(unread=f"{folder.name} cannot be read ({why})")
        vocabulary = {content: index for index, content in special.items()}
        end, pad = (
            vocabulary.get(str(name.get("content") if isinstance(name, dict) else name))
            for name in ends
        )
        return cls(special=special, end=end, pad=pad)


@dataclass(kw_only=True)
class Recorded:
    """Tables of a training, and what its run.json says."""

    steps: pd.DataFrame
    updates: pd.DataFrame
    rollouts: pd.DataFrame
    tokens: pd.DataFrame
    uses: pd.DataFrame
    events: pd.DataFrame
    info: Mapping[str, Any]
    words: Words = field(default_factory=Words)
    path: str = "RUN"

    @classmethod
    def of(cls, run: Run) -> Recorded:
        """The tables of a run; of a long one tokens of `MOST_STEPS` steps, of a large one fewer, see `MOST_ROWS`."""
        steps = chosen_steps(run, "tokens", MOST_STEPS)
        tokens = run.tokens(steps=steps, columns=TOKEN_COLUMNS) if steps else pd.DataFrame()
        return cls(
            steps=run.steps,
            updates=run.updates,
            rollouts=run.frame("rollouts", {*steps, *chosen_steps(run, "rollouts")}),
            tokens=tokens,
            uses=run.frame("uses", chosen_steps(run, "uses")),
            events=run.events,
            info=run.info,
            words=Words.read(run.path / "tokenizer"),
            path=str(run.path),
        )

    @property
    def supervised(self) -> bool:
        """Whether the completions are given, not drawn."""
        return self.info.get("method") in SUPERVISED

    @property
    def _name(self) -> str:
        """The trainer's name as run.json has it; empty for our own."""
        return str((self.info.get("trainer") or {}).get("name", ""))

    @property
    def trainer(self) -> str:
        """Whose words an advice uses: trl, loop, verl or sharpscope."""
        name = self._name
        if name.startswith("loop"):
            return "loop"
        if "verl" in name.lower():
            return "verl"
        return "trl" if name else "sharpscope"

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The settings of a recorded trainer; empty for a loop."""
        return (self.info.get("trainer") or {}).get("arguments") or {}

    @property
    def adam(self) -> bool:
        """Whether the optimizer moves each weight by at most about its learning rate."""
        named = self.arguments.get("optim", "" if self._name else "adam")
        return "Adam" in self._name or "adam" in str(named)

    @property
    def weight_decay(self) -> float | None:
        """The decoupled weight decay, where it is known."""
        ours = (self.info.get("config") or {}).get("optimizer") or {}
        value = self.arguments.get("weight_decay", ours.get("weight_decay"))
        return None if value is None else float(value)

    @cached_property
    def drawn(self) -> pd.DataFrame:
        """Tokens that a policy drew and an update used first, with `surprise` = −ln π − H [nats] and the row's group."""
        if self.supervised or self.tokens.empty:
            return pd.DataFrame(columns=[*TOKEN_COLUMNS, *_ROW_COLUMNS, "surprise"], dtype=float)
        tokens, rows = self.tokens, self.rollouts[["step", "rollout", *_ROW_COLUMNS]]
        joined = tokens.merge(rows, on=["step", "rollout"], how="left")
        joined["surprise"] = -joined["logp"] - joined["entropy"]
        finite = np.isfinite(joined["surprise"].to_numpy(float))
        return joined[finite].reset_index(drop=True)

    @cached_property
    def prefix(self) -> np.ndarray:
        """Of each token in `drawn` a number that two tokens share if their step, group and completion so far are equal."""
        tokens = self.drawn.sort_values("position", kind="stable")
        place = tokens["position"].to_numpy(np.int64)
        with np.errstate(over="ignore"):
            powers = np.multiply.accumulate(np.full(place.max() + 1, _BASE, dtype=np.uint64))
            mixed = (tokens["token_id"].to_numpy(np.uint64) + np.uint64(1)) * powers[place]
            sums = tokens.assign(mixed=mixed).groupby(["step", "rollout"])["mixed"].cumsum()
            group = tokens["step"].to_numpy(np.int64) * 1_000_003 + tokens["group"].fillna(-1)
            keys = (sums ^ group.to_numpy(np.int64).astype(np.uint64)) * _BASE
        return keys.sort_index().to_numpy()

    @cached_property
    def beginnings(self) -> pd.DataFrame:
        """Of each group of several rows: `tokens` that all G rows begin with, the `longest` row, and `evidence` [nats].

        The evidence is (G − 1)·Σ −ln π over these tokens: the probability of drawing them G times is at most e to the minus this.
        """
        drawn = self.drawn[self.drawn["group"].notna()]
        if drawn.empty:
            return pd.DataFrame(columns=["size", "longest", "tokens", "evidence"])
        group = drawn.groupby(["step", "group"]).ngroup().to_numpy()
        rows = ~drawn.duplicated(["step", "rollout"]).to_numpy()
        size = np.bincount(group[rows])
        longest = drawn.groupby(group)["length"].max().to_numpy()
        _, first, same, count = np.unique(
            self.prefix[drawn.index],
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        shared = count == size[group[first]]
        nats = np.bincount(same, -drawn["logp"].to_numpy(float)) / count
        total = np.bincount(group[first][shared], nats[shared], minlength=len(size))
        tokens = np.bincount(group[first][shared], minlength=len(size))
        found = {
            "size": size,
            "longest": longest,
            "tokens": tokens,
            "evidence": (size - 1) * total,
        }
        return pd.DataFrame(found)[size > 1]


def chosen_steps(run: Run, table: str, most: int | None = None) -> list[int]:
    """At most `most` steps of a table with at most `MOST_ROWS` rows: the first half of them at the start, the others spread."""
    rows = run.step_rows(table)
    steps, total = list(rows), max(1, sum(rows.values()))
    fitting = max(2, int(len(steps) * MOST_ROWS[table] / total))
    count = min(len(steps) if most is None else most, fitting)
    if len(steps) <= count:
        return steps
    half = count // 2
    later = np.linspace(half, len(steps) - 1, count - half).round().astype(int)
    return [*steps[:half], *(steps[index] for index in later)]


_BASE = np.uint64(0x9E3779B97F4A7C15)


def as_dict(value: object) -> dict[str, Any]:
    """A cell of a JSON column: text in a run that was read, a dict in one that goes on."""
    if isinstance(value, str):
        return dict(json.loads(value))
    return dict(value) if isinstance(value, Mapping) else {}


TOKEN_COLUMNS = (
    *("step", "rollout", "position", "update", "token_id", "logp", "behavior_logp", "entropy"),
    *("collision", "advantage", "ratio", "loss_coef", "kl_coef", "ref_logp", "attribution"),
    "inclusion_probability",
)
"""Columns of the tokens table that identities read."""
_ROW_COLUMNS = ("group", "length", "truncated")
