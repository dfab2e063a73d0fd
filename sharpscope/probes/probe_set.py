"""Fixed prompts for probes, stored in a Parquet file that the runs of a study share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpscope.errors import UserError, nearest
from sharpscope.probes.language_model import TokenBatch, completion_batch
from sharpscope.tasks import Example, Task
from sharpscope.traces.files import publish

if TYPE_CHECKING:
    from sharpscope.policy import Rollouts

SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class ProbeItem:
    """A prompt of a probe set."""

    split: str  # `train` or `heldout`
    example: Example
    prompt_ids: tuple[int, ...]  # as the initial policy's tokenizer renders it, any prefill included
    solution: tuple[int, ...] = ()  # a completion that the task scored correct, end token included; empty: none found


@dataclass(frozen=True)
class Drawn:
    """Completions of the probed policy with their success; rows of a prompt are adjacent."""

    rollouts: Rollouts  # N rows
    correct: Tensor  # (N,) 0 or 1 (or a success between)


# (examples, samples, seed) -> `samples` completions per example, drawn from the probed policy.
Draw = Callable[[Sequence[Example], int, int], Drawn]


@dataclass(frozen=True)
class ProbeSet:
    """Fixed prompts with the key that they were built from. Equal keys and contents have equal hashes."""

    task: str  # name, with the settings of its data
    policy: str  # the initial policy that all methods of the study start from
    seed: int  # of the choice of prompts and of the solutions
    items: tuple[ProbeItem, ...]  # those of one split adjacent

    @property
    def content_hash(self) -> str:
        """First 16 hex digits of the SHA-256 of key and items."""
        canonical = [self.task, self.policy, self.seed, [_row(item) for item in self.items]]
        text = json.dumps(canonical, sort_keys=True, ensure_ascii=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def name(self, split: str) -> str:
        """Value of the `probe_set` column: `<task>/<split>@<hash>`."""
        return f"{self.task}/{split}@{self.content_hash}"

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that have items."""
        return tuple(split for split in SPLITS if any(item.split == split for item in self.items))

    def split(self, split: str) -> tuple[ProbeItem, ...]:
        """The items of one split, which must exist."""
        chosen = tuple(item for item in self.items if item.split == split)
        if not chosen:
            raise UserError(f"probe set, split '{split}'{nearest(split, {item.split for item in self.items})}")
        return chosen

    def solutions(self, split: str) -> TokenBatch:
        """The stored solutions of a split, of which there must be one, as rows for `nll`; only solution tokens are scored."""
        solved = [item for item in self.split(split) if item.solution]
        if not solved:
            raise UserError(
                f"probe set, split '{split}': no prompt has a verified solution; draw more, or take a better policy"
            )
        return completion_batch([(item.prompt_ids, item.solution) for item in solved])

    def draw(self, split: str, samples: int, draw: Draw, seed: int) -> Drawn:
        """New completions of the probed policy on the prompts of a split."""
        return draw([item.example for item in self.split(split)], samples, seed)

    def save(self, path: Path | str) -> Path:
        """Write the Parquet file atomically and return its path."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = Path(path)
        rows = [_row(item) for item in self.items]
        key = {"task": self.task, "policy": self.policy, "seed": self.seed, "hash": self.content_hash}
        ids = pa.list_(pa.int64())
        fields = [(name, pa.string()) for name in ("split", "prompt", "answer", "meta")]
        schema = pa.schema([*fields, ("prompt_ids", ids), ("solution", ids)])
        table = pa.Table.from_pylist(rows, schema).replace_schema_metadata({"sharpscope.probe_set": json.dumps(key)})
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".tmp")
        pq.write_table(table, aside)
        publish(aside, path)
        return path

    @staticmethod
    def load(path: Path | str) -> ProbeSet:
        """Read a probe set.

        Raises:
            UserError: not a probe set, of another format, or changed since it was written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
            key = json.loads((table.schema.metadata or {})[b"sharpscope.probe_set"])
        except (OSError, pa.ArrowException, KeyError, ValueError) as problem:
            raise UserError(
                f"probe_set, {path}: cannot be read as one ({type(problem).__name__}: {problem})"
            ) from problem
        items = []
        for row in table.to_pylist():
            example = Example.from_row(row["prompt"], row["answer"], json.loads(row["meta"]))
            items.append(ProbeItem(row["split"], example, tuple(row["prompt_ids"]), tuple(row["solution"])))
        loaded = ProbeSet(key["task"], key["policy"], int(key["seed"]), tuple(items))
        if loaded.content_hash != key["hash"]:
            raise UserError(
                f"probe_set, {path}: its contents do not match its hash {key['hash']}; it was changed or damaged"
            )
        return loaded


def build_probe_set(
    task: Task,
    draw: Draw,
    encode: Callable[[Sequence[Example]], Sequence[Sequence[int]]],
    *,
    name: str,
    policy: str,
    seed: int,
    train: int,
    heldout: int,
    tries: int = 8,
) -> ProbeSet:
    """Choose prompts and, for each, the first of `tries` completions of the initial policy that the task scores as correct.

    `encode` gives prompts as token ids, as the policy sees them. A split with fewer than `train` or `heldout` prompts is taken whole.
    """
    splits = task.splits()
    if not splits.get("train"):
        raise UserError(f"task, {task.name}: has no training prompts to probe")
    items: list[ProbeItem] = []
    for split, count in zip(SPLITS, (train, heldout), strict=True):
        given = splits.get(split, [])
        order = torch.randperm(len(given), generator=torch.Generator().manual_seed(seed))
        examples = [given[i] for i in order[:count].tolist()]
        if examples:
            solutions = _solutions(draw(examples, tries, seed), len(examples))
            found = zip(examples, encode(examples), solutions, strict=True)
            items += [ProbeItem(split, example, tuple(ids), solution) for example, ids, solution in found]
    return ProbeSet(name, policy, seed, tuple(items))


def _solutions(drawn: Drawn, prompts: int) -> list[tuple[int, ...]]:
    """The first correct completion of each prompt without inserted tokens, one that was not cut if there is one; () if none."""
    rollouts = drawn.rollouts
    solutions: list[tuple[int, ...]] = [()] * prompts
    for cut in (False, True):
        for row in range(len(rollouts.input_ids)):
            prompt, length = int(rollouts.group[row]), int(rollouts.completion_mask[row].sum())
            complete = length > 0 and bool(rollouts.completion_mask[row, :length].all())
            right = float(drawn.correct[row]) == 1.0 and bool(rollouts.truncated[row]) == cut
            if complete and right and not solutions[prompt]:
                solutions[prompt] = tuple(rollouts.completion_ids[row, :length].tolist())
    return solutions


def _row(item: ProbeItem) -> dict[str, Any]:
    example = item.example
    chat = {"messages": list(example.messages), "prefill": example.prefill, "templated": example.templated}
    meta: Mapping[str, Any] = {**example.meta, **{name: value for name, value in chat.items() if value}}
    texts = {"split": item.split, "prompt": example.prompt, "answer": example.answer}
    texts["meta"] = json.dumps(dict(meta), sort_keys=True, default=str)
    return texts | {"prompt_ids": list(item.prompt_ids), "solution": list(item.solution)}
