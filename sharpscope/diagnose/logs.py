"""Read a training log into one frame of canonical quantities by step.

Trainers use one word for different things: "kl" is to the reference in TRL and between sampler and trainer in AsyncGRPO;
"entropy" is that of the full distribution in TRL and verl and a sampled estimate in Tinker. A key stands in quantities.yaml only
where its meaning was read in the trainer's source.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sharpscope.errors import UserError, nearest
from sharpscope.packaged import package_yaml
from sharpscope.rules.table import RULES

STEP_KEYS = (
    *("step", "_step", "global_step", "Step"),
    *("train/global_step", "training/global_step", "trainer/global_step", "global_step/max_steps"),
)
"""Keys of the step, in the order in which they are looked for."""

SWIFT_STEP = STEP_KEYS[-1]
NOT_FINITE = math.inf
"""What stands in a frame for a logged value that is not finite; NaN means that nothing was logged."""

READS = "a run of sharpscope, trainer_state.json, JSON lines, CSV, TensorBoard events, or a folder of these"


@dataclass(frozen=True)
class Log:
    """A training log."""

    path: Path  # file or folder that was read
    framework: str | None  # the trainer that wrote it, if known
    frame: pd.DataFrame  # index: the steps; columns: the quantities that were found
    # canonical quantity -> keys of the log
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unmapped: tuple[str, ...] = ()  # numeric keys that no quantity uses

    def finite(self, name: str) -> pd.Series:
        """Recorded values of a quantity that are finite, by step; empty if there are none."""
        values = self.frame[name] if name in self.frame else pd.Series(dtype=float)
        return values[np.isfinite(values)]


def read_log(path: str | Path, mapping: Mapping[str, str] | None = None) -> Log:
    """Read a log (`READS`) and name its quantities; `mapping`: quantity -> key, for keys that are not recognized.

    Raises:
        UserError: the path cannot be read, has no step, or a mapped key is missing.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: does not exist; give {READS}")
    file = _find(path)
    framework: str | None
    if file.is_dir() and (file / "run.json").is_file():
        table, framework = _own_run(file), "sharpscope"
    else:
        table = _read_table(file)
        # TensorBoard and W&B show the keys of transformers' trainers with "train/" in front of them.
        framework = framework_of(table.columns)
        plain = [key.removeprefix("train/") for key in table.columns]
        if framework in (None, "HF Trainer") and framework_of(plain) in ("TRL", "HF Trainer"):
            table.columns, framework = pd.Index(plain), framework_of(plain)
            table = table.loc[:, ~table.columns.duplicated()]
    table = _by_step(table, file)
    frame, sources = _canonical(table, framework, mapping or {})
    if frame.empty or not len(frame.columns):
        keys = ", ".join(list(table.columns)[:12])
        unknown = f"none of its keys is known: {keys}; name them, for example --map reward=KEY"
        raise UserError(f"{path}: {unknown if keys else 'has no numbers'}")
    used = {key for keys in sources.values() for key in keys}
    return Log(
        path, framework, frame, sources, tuple(key for key in table.columns if key not in used)
    )


def _find(path: Path) -> Path:
    """The file, run or folder of TensorBoard events that a path stands for."""
    if path.is_file() or (path / "run.json").is_file():
        return path
    states = sorted(path.rglob("trainer_state.json"), key=lambda file: file.stat().st_mtime)
    if states:
        return states[-1]
    if any(path.rglob("*.tfevents.*")):
        return path
    logs = [file for ending in ("jsonl", "csv") for file in sorted(path.glob(f"*.{ending}"))]
    metrics = [file for file in logs if len(logs) == 1 or file.stem == "metrics"]
    if len(metrics) == 1:
        return metrics[0]
    what = (
        f"holds {len(logs)} logs ({', '.join(file.name for file in logs[:5])}): give one"
        if logs
        else "holds no log"
    )
    raise UserError(f"{path}: {what}; diagnose reads {READS}")


def _own_run(folder: Path) -> pd.DataFrame:
    """The table of a run of sharpscope, or of a trainer that it recorded."""
    from sharpscope.traces import load_run

    run = load_run(folder)
    steps = run.steps.copy()
    if not len(steps):
        raise UserError(f"{folder}: the run has no recorded step")
    if "zero_std_groups" in steps:
        rollouts = run.rollouts
        if len(rollouts) and rollouts["group"].notna().any():
            groups = (
                rollouts.groupby("step")["group"].nunique().reindex(steps["step"]).to_numpy(float)
            )
            groups = np.where(np.isnan(groups), np.nanmedian(groups), groups)
            steps["dead_groups"] = steps["zero_std_groups"].astype(float) / groups
    evals = run.eval
    if len(evals):
        greedy = evals[(evals["temperature"] == 0) & (evals["split"] == "heldout")]
        found = greedy.groupby("step")["accuracy"].mean()
        steps["eval_accuracy_greedy"] = found.reindex(steps["step"]).to_numpy()
    events = run.events
    if len(events):
        broken = events.loc[events["rule"] == "non_finite", "step"]
        steps.loc[steps["step"].isin(broken), "grad_norm"] = NOT_FINITE
        # values that only the rules saw
        for name, rows in events[events["rule"].isin(RULES)].groupby("rule"):
            quantity = RULES[str(name)].quantities[0]
            if not keys_of(BY_NAME[quantity], "sharpscope", steps.columns)[1]:
                steps[quantity] = (
                    rows.groupby("step")["value"].last().reindex(steps["step"]).to_numpy()
                )
    return steps.select_dtypes("number").astype(float)


def _read_table(file: Path) -> pd.DataFrame:
    if file.is_dir():
        return _events(file)
    if file.suffix == ".csv":
        # as text, since a value "nan" was logged and an empty one was not
        text = _parsed(file, lambda: pd.read_csv(file, dtype=str, keep_default_na=False))
        table = pd.DataFrame([_flat(row) for row in text.to_dict("records")])
        # the columns of a W&B chart are "run - key", with __MIN and __MAX of the same
        table = table[[key for key in table.columns if not str(key).endswith(("__MIN", "__MAX"))]]
        table.columns = pd.Index([str(key).split(" - ", 1)[-1] for key in table.columns])
        return table.loc[:, ~table.columns.duplicated()]
    text = _parsed(file, lambda: file.read_text("utf-8"))
    if file.suffix == ".jsonl":
        rows = [
            _parsed(f"{file} line {n}", lambda line=line: json.loads(line))
            for n, line in _lines(text)
        ]
    else:
        content = _parsed(file, lambda: json.loads(text))
        listed = content.get("log_history") if isinstance(content, dict) else content
        if not isinstance(listed, list):
            raise UserError(
                f"{file}: neither a list of rows nor an object with log_history; diagnose reads {READS}"
            )
        rows = listed
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file}: holds no rows; diagnose reads {READS}")
    return pd.DataFrame([_flat(row) for row in rows])


def _lines(text: str) -> list[tuple[int, str]]:
    """Numbered lines that are not empty. A last line without an end is left out: its writer was interrupted."""
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if lines and not text.endswith("\n"):
        try:
            json.loads(lines[-1][1])
        except ValueError:
            lines.pop()
    return lines


def _parsed(place: object, read: Any) -> Any:
    try:
        return read()
    except (ValueError, OSError) as error:
        raise UserError(
            f"{place}: cannot be read ({str(error).splitlines()[0][:120]}); give {READS}"
        ) from error


def _flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a row, keys of nested objects joined by "/"; a NaN that was logged becomes infinite."""
    found: dict[str, float] = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, "" if name == "data" and "step" in row else f"{name}/")
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int | float):
            found[name] = NOT_FINITE if math.isnan(value) else float(value)
        elif isinstance(value, str):
            try:  # ms-swift's "global_step/max_steps": "240/960"
                number = float(value.split("/")[0] if name == SWIFT_STEP else value)
            except ValueError:
                continue
            found[name] = NOT_FINITE if math.isnan(number) else number
    return found


def _events(folder: Path) -> pd.DataFrame:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise UserError(
            f"{folder}: its events need `pip install tensorboard`; or export them as CSV"
        ) from error
    folders = sorted({file.parent for file in folder.rglob("*.tfevents.*")})
    columns: dict[str, pd.Series] = {}
    for place in folders:
        events = EventAccumulator(str(place), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            points = events.Scalars(tag)
            series = pd.Series({point.step: point.value for point in points}, dtype=float)
            columns[tag] = series.combine_first(columns[tag]) if tag in columns else series
    if not columns:
        raise UserError(f"{folder}: its TensorBoard events hold no scalars")
    return pd.DataFrame(columns).rename_axis("step").reset_index()


def _by_step(table: pd.DataFrame, file: Path) -> pd.DataFrame:
    """One row for each step, index: the step; of several values of one key at a step, the last."""
    key = next((key for key in STEP_KEYS if key in table.columns), None)
    numbers = table.select_dtypes("number").astype(float)
    if key is None or key not in numbers:
        raise UserError(f"{file}: no column is the step; looked for {', '.join(STEP_KEYS[:4])}")
    numbers = numbers[numbers[key].notna()]
    steps = numbers.pop(key)
    numbers = numbers.drop(columns=[other for other in STEP_KEYS if other in numbers])
    if not len(numbers):
        raise UserError(f"{file}: no row has a step")
    numbers = numbers.groupby(steps.round().astype("int64")).last()
    return numbers.rename_axis("step").sort_index()


def _canonical(
    table: pd.DataFrame, framework: str | None, mapping: Mapping[str, str]
) -> tuple[pd.DataFrame, dict[str, tuple[str, ...]]]:
    for name, key in mapping.items():
        if name not in BY_NAME:
            known = ", ".join(BY_NAME)
            raise UserError(
                f"--map {name}={key}: unknown quantity{nearest(name, BY_NAME)}; known: {known}"
            )
        if key not in table:
            raise UserError(
                f"--map {name}={key}: the log has no such key{nearest(key, list(table.columns))}"
            )
    frame, sources = {}, {}
    for quantity in QUANTITIES:
        complement, keys = keys_of(quantity, framework, table.columns)
        if quantity.name in mapping:
            complement, keys = False, (mapping[quantity.name],)
        if not keys or not table[list(keys)].notna().any(axis=None):
            continue
        # a step that lacks all of the keys lacks the quantity
        values = table[list(keys)].sum(axis=1, min_count=1, skipna=len(keys) > 1)
        values = table[list(keys)].mean(axis=1) if quantity.name == "accuracy" else values
        frame[quantity.name] = 1 - values if complement else values
        sources[quantity.name] = keys
    kept = pd.DataFrame(frame, index=table.index)
    return kept.dropna(how="all") if len(kept.columns) else kept, sources


@dataclass(frozen=True)
class LogQuantity:
    """One canonical quantity; an entry of quantities.yaml."""

    name: str  # here, in `--map` and in the JSON output
    title: str  # what a reader calls it
    keys: Mapping[str, list[str]]  # trainer -> regular expressions of its keys
    unit: str = ""  # empty if dimensionless
    log: bool = False  # whether it is judged on a logarithmic scale


_ENTRIES = package_yaml("sharpscope.diagnose", "quantities.yaml")
_SIGNATURES: dict[str, list[str]] = _ENTRIES.pop("trainers")
BY_NAME: dict[str, LogQuantity] = {
    name: LogQuantity(name, **entry) for name, entry in _ENTRIES.items()
}
QUANTITIES: tuple[LogQuantity, ...] = tuple(BY_NAME.values())


def framework_of(keys: Iterable[str]) -> str | None:
    """Name of the trainer that writes such keys; None if none is known to."""
    known = list(keys)
    fits = (
        name
        for name, every in _SIGNATURES.items()
        if all(any(re.fullmatch(e, key) for key in known) for e in every)
    )
    return next(fits, None)


def keys_of(
    quantity: LogQuantity, framework: str | None, keys: Iterable[str]
) -> tuple[bool, tuple[str, ...]]:
    """The keys of a log that hold a quantity, whose values are added up, and whether one minus their sum is meant.

    Without a known trainer a key counts if it, or its part after the last "/", is the name of the quantity.
    """
    known = list(keys)
    for expression in quantity.keys.get(framework or "", ()):
        complement, pattern = expression.startswith("1-"), expression.removeprefix("1-")
        found = tuple(key for key in known if re.fullmatch(pattern, key))
        if found:
            return complement, found
    named = [
        key for key in known if framework is None and quantity.name in (key, key.rsplit("/", 1)[-1])
    ]
    return False, tuple(named[:1])


def own_values(row: Mapping[str, Any]) -> dict[str, float]:
    """Canonical quantities of a row of our steps table, without those that it lacks."""
    columns = [column for column, value in row.items() if value is not None]
    keys = {quantity.name: keys_of(quantity, "sharpscope", columns)[1] for quantity in QUANTITIES}
    return {name: sum(float(row[key]) for key in found) for name, found in keys.items() if found}
