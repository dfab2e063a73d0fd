"""Completions from the files of other trainers, without their code, and a dumped batch measured at a checkpoint.

`sharpscope.integrations.dumps` says which files a trainer writes, and how their records become rows. What the files do not say
is null, and what they say beyond the trace's columns is named in a note.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sharpscope.errors import UserError, nearest
from sharpscope.integrations.completions import Completion, Options, write
from sharpscope.integrations.dumps import FORMATS, STEP_COLUMNS, TOKEN_COLUMNS, Format, Told
from sharpscope.integrations.values import (
    Values,
    flags,
    integers,
    is_whole,
    number,
    object_of,
    text,
    whole,
)
from sharpscope.rules.judging import POSITIVE
from sharpscope.traces import load_run

if TYPE_CHECKING:
    from sharpscope.methods.method import Method
    from sharpscope.policy import Policy
    from sharpscope.recording.from_checkpoint import Probed


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
                step_number = values.get("step", 1 if step is None else step)
                if not is_whole(step_number):
                    wrong = f"step = {str(step_number)[:40]!r} is not a whole number from 0; number the steps from 1"
                    raise UserError(f"{where}: {wrong}")
                by_step.setdefault(step_number, []).append(completion_of(values, where))
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
    paths = [source] if source.is_file() else []
    for pattern in form.patterns.split() if source.is_dir() else ():
        paths = paths or sorted(
            (path for path in source.glob(pattern) if path.is_file()),
            key=lambda path: (len(path.name), path),
        )
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


def completion_of(values: Values, where: str) -> Completion:
    """A completion from columns that have the names of COLUMNS; `where` names the place in messages.

    `token_id` is the completion, or prompt and completion; a column of tokens has one value for each, or for the completion's.

    Raises:
        UserError: a value is wrong.
    """
    ids = integers(values.get("token_id"), "token_id", where)
    count = len(ids)
    mask = flags(values.get("mask", [1] * count), count, "mask", where)
    prompt, start = _prompt_of(values, ids, mask, where)
    kept = [i for i, keep in enumerate(mask) if keep and i >= start]
    group, reward = values.get("group", values.get("prompt")), values.get("reward")
    return Completion(
        ids=None if prompt is None else [*prompt, *ids[start:]],
        prompt_length=len(prompt or ()),
        tokens=_token_columns(values, ids, start, kept, where) if kept else {},
        group=None if group is None else str(group),
        env=text(values.get("env"), "env", where),
        prompt=text(values.get("prompt"), "prompt", where),
        completion=text(values.get("completion"), "completion", where),
        reward=reward
        if isinstance(reward, float) and math.isnan(reward)
        else number(reward, "reward", where),
        parts=_parts_of(values, where),
        length=len(kept),
        of_step={
            name: number(values[name], name, where) for name in STEP_COLUMNS if name in values
        },
    )


def _parts_of(values: Values, where: str) -> dict[str, float | None]:
    """The components of a reward by name."""
    parts = object_of(values.get("reward_parts"), "reward_parts", where)
    return {name: number(value, "reward_parts", where) for name, value in parts.items()}


def _prompt_of(
    values: Values, ids: list[int], mask: list[int], where: str
) -> tuple[list[int] | None, int]:
    """Token IDs of the prompt, None if not known, and where the completion begins in `ids`."""
    if values.get("prompt_ids") is not None:
        return integers(values["prompt_ids"], "prompt_ids", where), 0
    start = values.get("prompt_length", mask.index(1) if 1 in mask else 0)
    if not is_whole(start) or start > len(ids):
        raise UserError(
            f"{where}: prompt_length = {str(start)[:40]} is no number of the {len(ids)} token IDs"
        )
    return (ids[:start] if start else None), start


def _token_columns(
    values: Values, ids: list[int], start: int, kept: list[int], where: str
) -> dict[str, list[Any]]:
    """Columns of the table tokens for the places `kept` of a sequence whose completion begins at `start`."""
    columns: dict[str, list[Any]] = {
        "token_id": [ids[i] for i in kept],
        "update": [0] * len(kept),
        "position": [i - start for i in kept],
    }
    for name in TOKEN_COLUMNS[1:]:
        if values.get(name) is not None:
            columns[name] = _of_tokens(values[name], name, len(ids), start, kept, where)
    logp = columns.get("logp", [])
    if None in logp:
        raise UserError(
            f"{where}: logp is null on a token in the loss; give its log-probability, or mask it"
        )
    largest = max(logp, default=0.0)
    if largest > POSITIVE:
        wrong = "above 0, so it is no log-probability; give natural logarithms, not probabilities"
        raise UserError(f"{where}: logp = {largest:g} is {wrong}")
    return columns


_EACH = "both need one for each token"


def _of_tokens(
    given: Any, name: str, count: int, start: int, kept: list[int], where: str
) -> list[Any]:
    """Values of the tokens `kept`, from one for each token, for each of the completion, or one for all."""
    if name in ("advantage", "temperature", "policy_version") and not isinstance(given, list):
        given = [given] * count
    if start and isinstance(given, list) and len(given) == count - start:
        given = [None] * start + given
    if not isinstance(given, list) or len(given) != count:
        received = len(given) if isinstance(given, list) else "no list of"
        raise UserError(f"{where}: {name} has {received} values, token_id {count}; {_EACH}")
    values = [number(given[i], name, where) for i in kept]
    if name == "policy_version":
        return [None if given[i] is None else whole(given[i], name, where) for i in kept]
    return [None if v is None else int(np.sign(v)) for v in values] if name == "clipped" else values
