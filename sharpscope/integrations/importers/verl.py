"""verl's rollout files (`trainer.rollout_data_dir`): N.jsonl for step N, a completion on each line, no tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sharpscope.errors import UserError
from sharpscope.integrations.importers.writing import Completion, Labels, finite, json_lines, number, write

_OWN = ("input", "output", "gts", "score", "step", "uid", "request_id")


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
        if name not in _OWN and isinstance(value, int | float) and finite(value)
    }
    uid, correct = record.get("uid"), record.get("acc")
    # verl's keys are {sample}_{rollout}_{output}
    group = uid.rsplit("_", 2)[0] if isinstance(uid, str) else record["input"]
    return Completion(
        group=group,
        prompt=record["input"],
        completion=record["output"],
        reward=number(record.get("score"), "score", where),
        parts=parts,
        correct=bool(correct) if isinstance(correct, bool) or correct in (0, 1) else None,
    )
