"""What runs of two versions of the code record, of tokens, updates and probes, compared to the last bit.

A change that should not move a number is checked against the commit before it:

    git worktree add /tmp/before COMMIT
    (cd /tmp/before && python -m tests.frozen.runs record before.json)
    python -m tests.frozen.runs record after.json
    python -m tests.frozen.runs compare /tmp/before/before.json after.json

If COMMIT does not contain this file, copy it there. Only public names are used. Hashes depend on the machine's arithmetic, so
both sides must be recorded on one machine.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

METHODS = ("grpo", "grpo-sg", "tr-grpo", "ar-lopti", "gspo", "grpo-sam", "dapo", "cov-grpo")
SMALL = {
    "steps": 3,
    "threads": 1,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 24,
    "update.mini_batches": 2,
    "method.kl.coef": 0.01,
    "evaluation.every": 3,
    "evaluation.prompts": 4,
    "recording.token_gradients_every": 1,
    "recording.group_share": 1.0,
    "recording.rotation_every": 10,
    "recording.exact_tokens": 4,
    "recording.heldout_influence_every": 2,
    "checkpoint.every": 0,
    "probes.every": 3,
    "probes.curvature_prompts": 4,
    "probes.prompts": 4,
    "probes.heldout_prompts": 4,
    "probes.samples": 2,
    "health.memory.action": "off",
}


def record() -> dict[str, str]:
    """A hash for each column of each trace."""
    return dict(_runs())


def _runs() -> Iterator[tuple[str, str]]:
    from sharpscope.config import build_config
    from sharpscope.traces import TABLES, load_run, timing_columns
    from sharpscope.training import train

    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            values = SMALL | {"method": method, "out": f"{folder}/{method}"}
            if method == "dapo":
                values["method.kl.coef"] = 0.0
            run = load_run(train(build_config(values=values)).run_dir)
            for table in TABLES.keys() - {"reductions"}:
                frame = run.tokens() if table == "tokens" else getattr(run, table)
                for column in frame.columns.drop(timing_columns(table), errors="ignore"):
                    data = frame[column].to_json(orient="values", double_precision=15)
                    if frame[column].dtype.kind in "fiub":
                        data = frame[column].to_numpy().tobytes().hex()
                    yield f"run {method} {table}.{column}", _hash(data)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """One line for each value that differs, is missing or is new."""
    lines = [f"differs: {name}" for name in before if name in after and before[name] != after[name]]
    lines += [f"missing: {name}" for name in before if name not in after]
    return lines + [f"new: {name}" for name in after if name not in before]


def main(arguments: list[str]) -> int:
    """`record FILE` or `compare BEFORE AFTER`."""
    match arguments:
        case ["record", file]:
            Path(file).write_text(json.dumps(record(), indent=0), encoding="utf-8")
            return 0
        case ["compare", before, after]:
            found = compare(*(json.loads(Path(file).read_text(encoding="utf-8")) for file in (before, after)))
            print("\n".join(found) or "equal")
            return int(any(not line.startswith("new") for line in found))
    print(__doc__)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
