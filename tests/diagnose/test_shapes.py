"""One run in the shapes that trackers and own scripts write: the same numbers at the same steps, and no run merged with another."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sharpscope.diagnose import diagnose, read_log, read_logs
from sharpscope.diagnose.tables import number_of
from sharpscope.errors import UserError
from tests.loops import some

Row = dict[str, float]
KEYS = ("reward", "grad_norm", "kl", "response_length")


def rows(count: int = 50) -> list[Row]:
    rng = np.random.default_rng(3)
    return [
        {
            "step": n,
            "reward": round(0.5 + rng.normal(0, 0.02), 4),
            "grad_norm": round(float(np.exp(rng.normal(0, 0.2))), 4),
            "kl": round(n / 10_000, 5),
            "response_length": round(1500 + rng.normal(0, 20), 1),
        }
        for n in range(1, count + 1)
    ]


ROWS = rows()
Cell = Callable[[float], str]


def table(delimiter: str, cell: Cell = str, found: list[Row] = ROWS, header: bool = True) -> str:
    names = [delimiter.join(found[0])] if header else []
    lines = [delimiter.join(cell(value) for value in row.values()) for row in found]
    return "\n".join([*names, *lines]) + "\n"


def german(value: float) -> str:
    """1234.5 as 1.234,5; steps as they are."""
    if isinstance(value, int):
        return str(value)
    return f"{value:,}".translate(str.maketrans(",.", ".,"))


def with_units(row: Row) -> dict[str, str]:
    shown = {"reward": f"{100 * row['reward']:.2f}%", "kl": f"{row['kl']:.5f}"}
    shown |= {"response_length": f"{row['response_length'] / 1000:.4f}k"}
    return {key: shown.get(key, str(value)) for key, value in row.items()}


def lines(make: Callable[[Row], str]) -> str:
    return "".join(make(row) + "\n" for row in ROWS)


def pairs(row: Row, between: str, equal: str) -> str:
    return between.join(f"{key}{equal}{row[key]}" for key in KEYS)


def box() -> str:
    cells = [
        f"│ {' │ '.join(map(str, row))} │" for row in [ROWS[0].keys(), *map(dict.values, ROWS)]
    ]
    return "\n".join(
        ["╭" + "─" * 40 + "╮", cells[0], "├" + "─" * 40 + "┤", *cells[1:], "╰" + "─" * 40 + "╯"]
    )


def page() -> str:
    body = "".join(
        "<tr>" + "".join(f"<td>{v}</td>" for v in row.values()) + "</tr>" for row in ROWS
    )
    head = "".join(f"<th>{key}</th>" for key in ROWS[0])
    return f"<!doctype html><table><tr>{head}</tr>{body}</table>"


def series(x: str, y: str) -> dict[str, object]:
    return {
        key: {"name": key, x: [row["step"] for row in ROWS], y: [row[key] for row in ROWS]}
        for key in KEYS
    }


def long(name: str, value: str) -> list[dict[str, object]]:
    return [{"step": row["step"], name: key, value: row[key]} for key in KEYS for row in ROWS]


def reordered() -> str:
    later = [dict(reversed(row.items())) for row in ROWS[20:]]
    return table(",", found=ROWS[:20]) + table(",", found=later)


SHAPES: dict[str, Callable[[], str]] = {
    # numbers as people and spreadsheets write them
    "decimal commas": lambda: table(";", lambda v: str(v).replace(".", ",")),
    "decimal commas between tabs": lambda: table("\t", lambda v: str(v).replace(".", ",")),
    "decimal commas and points for thousands": lambda: table(";", german),
    "quoted decimal commas": lambda: table(",", lambda v: f'"{v}"'.replace(".", ",")),
    "quoted thousands": lambda: table(",", lambda v: f'"{v:,}"'),
    "percent and k in a table": lambda: table("|", str, [with_units(row) for row in ROWS]),  # type: ignore[misc]
    "percent and k in lines": lambda: lines(
        lambda row: f"step {row['step']}: " + pairs(with_units(row), ", ", ": ")  # type: ignore[arg-type]
    ),
    # tables
    "a header again after a resume": lambda: (
        table(",", found=ROWS[:30]) + table(",", found=ROWS[25:])
    ),
    "a header in another order": reordered,
    "a header with a further key": lambda: (
        table(",", found=ROWS[:30]) + table(",", found=[{**row, "speed": 7.5} for row in ROWS[30:]])
    ),
    "comments before the header": lambda: "# run 7\n# seed 3\n" + table(","),
    "lines that end at CR alone": lambda: table(",").replace("\n", "\r"),
    "single spaces": lambda: table(" "),
    "a box": box,
    "a web page": page,
    # JSON
    "an array that breaks off": lambda: json.dumps(ROWS, indent=1)[:-1],
    "objects one after another": lambda: "\n".join(json.dumps(row, indent=2) for row in ROWS),
    "objects without a newline": lambda: "".join(json.dumps(row) for row in ROWS),
    "comments and a last comma": lambda: (
        "[\n// mine\n" + lines(lambda row: f"{json.dumps(row)},") + "]"
    ),
    "columns and data": lambda: json.dumps(
        {"columns": list(ROWS[0]), "data": [list(row.values()) for row in ROWS]}
    ),
    "a list of lists": lambda: json.dumps([list(ROWS[0]), *(list(row.values()) for row in ROWS)]),
    "rows deep within": lambda: json.dumps({"config": {"lr": 1}, "history": {"train": ROWS}}),
    "steps as keys": lambda: json.dumps(
        {str(row["step"]): {k: row[k] for k in KEYS} for row in ROWS}
    ),
    "series of x and y (ClearML)": lambda: json.dumps({"train": series("x", "y")}),
    "series of points": lambda: json.dumps(
        {key: [{"step": row["step"], "value": row[key]} for row in ROWS] for key in KEYS}
    ),
    "series of [time, step, value]": lambda: json.dumps(
        {key: [[1.7e9, row["step"], row[key]] for row in ROWS] for key in KEYS}
    ),
    "a list of metrics (MLflow)": lambda: json.dumps({"metrics": long("key", "value")}),
    "a list of metrics (Comet)": lambda: json.dumps(long("metricName", "metricValue")),
    "lines of one metric": lambda: "".join(json.dumps(row) + "\n" for row in long("name", "value")),
    "a table of one metric a row": lambda: (
        "step,metric,value\n"
        + "".join(f"{r['step']},{r['metric']},{r['value']}\n" for r in long("metric", "value"))
    ),
    "lists of one value": lambda: lines(
        lambda row: json.dumps({**{k: [row[k]] for k in KEYS}, "step": row["step"]})
    ),
    "dicts of Python, nested": lambda: lines(
        lambda row: str({"step": row["step"], "train": {k: row[k] for k in KEYS}})
    ),
    # terminals
    "a padded step": lambda: lines(
        lambda row: f"[t] iteration {row['step']:8d}/  50 | " + pairs(row, " | ", ": ")
    ),
    "ranks between messages": lambda: lines(
        lambda row: (
            f"[rank1]: waiting\n[rank0]: 2025-03-04 12:00:01,123 - INFO - step: {row['step']}, "
            + pairs(row, ", ", ": ")
        )
    ),
    "messages of a logging library": lambda: lines(
        lambda row: json.dumps(
            {
                "time": "t",
                "level": "INFO",
                "message": f"Step {row['step']} | " + pairs(row, " | ", ": "),
            }
        )
    ),
    "what a container printed": lambda: lines(
        lambda row: json.dumps(
            {
                "log": f"{ {'global_step': row['step'], **{k: row[k] for k in KEYS}} }\n",
                "stream": "stdout",
            }
        )
    ),
    "axolotl, values as text": lambda: lines(
        lambda row: (
            "{"
            + ", ".join(f"'{k}': '{row[k]}'" for k in KEYS)
            + f", 'tokens/total': 512}}\n {row['step']}%|#| {row['step']}/50 [00:01<00:10, 1.0it/s]"
        )
    ),
    "logfmt": lambda: lines(
        lambda row: f"time=2025-03-04T12:00:00Z step={row['step']} " + pairs(row, " ", "=")
    ),
    "YAML": lambda: lines(lambda row: f"- step: {row['step']}\n  " + pairs(row, "\n  ", ": ")),
    "values within a progress bar": lambda: "".join(
        f"\rTraining: 5%|## | {row['step']}/50 [00:10<00:30, 2.0s/it, {pairs(row, ', ', '=')}]"
        for row in ROWS
    ),
    "values within the bars of each step": lambda: lines(
        lambda row: (
            f"Train: 100%|#| 16/16 [00:10<00:00, 1.5it/s, {pairs(row, ', ', '=')}]\n"
            f"Episode: 5%|#  | {row['step']}/50 [10:00<10:00, 60s/it]"
        )
    ),
    "a table of pandas": lambda: pd.DataFrame(ROWS).to_string(),
    "a header of NumPy": lambda: "# " + table(" "),
    "tables of names and values": lambda: lines(
        lambda row: (
            "-" * 30
            + "\n| rollout/ |  |\n"
            + "".join(f"|    {key} | {row[key]} |\n" for key in KEYS)
            + f"| time/ |  |\n|    iterations | {row['step']} |\n"
            + "-" * 30
        )
    ),
    **{
        f"lines counted by {count.split(' ')[0].strip('[{')}": lambda count=count: lines(
            lambda row: f"12:00 INFO {count.format(row['step'])} {pairs(row, ', ', ': ')}"
        )
        for count in (
            *("Episode {}/50 |", "update={}", "Batch {}:", "rollout {} -", "steps: {},"),
            *("num_updates={},", "[{}/50]"),
        )
    },
    "arrows": lambda: lines(lambda row: f"[iter {row['step']}] " + pairs(row, " | ", " → ")),
    "blocks with pictures": lambda: lines(
        lambda row: f"🚀 Step {row['step']}\n   🏆 " + pairs(row, "\n   📏 ", ": ")
    ),
    "quoted values of logfmt": lambda: lines(
        lambda row: f'step="{row["step"]}" ' + " ".join(f'{k}="{row[k]}"' for k in KEYS)
    ),
    "numbers after names": lambda: lines(
        lambda row: f"step {row['step']} | " + pairs(row, " | ", ": ").replace("reward:", "reward")
    ),
}


def check(log) -> None:
    """The log has the numbers of ROWS."""
    wanted = {"reward": "reward", "grad_norm": "grad_norm", "kl": "kl", "length": "response_length"}
    assert list(log.frame.index) == [row["step"] for row in ROWS]
    for name, key in some(wanted.items()):
        np.testing.assert_allclose(
            log.frame[name], [row[key] for row in ROWS], rtol=1e-9, err_msg=name
        )


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_the_same_numbers(name, tmp_path):
    (tmp_path / "log").write_text(SHAPES[name](), newline="")
    check(read_log(tmp_path / "log"))


@pytest.mark.parametrize("encoding", ["utf-16-be", "utf-32", "utf-16"])
@pytest.mark.parametrize("shape", [json.dumps(ROWS), table(",")])
def test_wide_encodings(encoding, shape, tmp_path):
    (tmp_path / "log").write_bytes(shape.encode(encoding))
    check(read_log(tmp_path / "log"))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_files_are_read_as_far_as_they_go(pack, tmp_path):
    content = table(",").encode() + b"".join(b"%d,0.5,1,0,1500\n" % n for n in range(51, 9000))
    (tmp_path / "log").write_bytes(pack(content))
    assert len(read_log(tmp_path / "log").frame) == 8999
    (tmp_path / "log").write_bytes(pack(content)[:-9])
    log = read_log(tmp_path / "log")
    assert 50 < len(log.frame) < 9000 and any("breaks off" in note for note in log.notes)
    assert log.frame["reward"].iloc[3] == ROWS[3]["reward"]


def test_numbers_in_text():
    shown = {"1,234.5": 1234.5, "1,234": 1234.0, "0,123": 0.123, "12,3456": 12.3456, "12 %": 0.12}
    shown |= {"1.2k": 1200.0, "3M": 3e6, "−0.5": -0.5, "5.": 5.0, "-inf": -np.inf, "1e-3": 1e-3}
    assert {text: number_of(text) for text in shown} == shown
    for text in ("", "-", "N/A", "1.2.3", "12/30", "k", "%", "9.1s", "1 2", "7B-chat", "None"):
        assert number_of(text) is None, text


def _one_each(folder: Path, make: Callable[[str], tuple[str, str]], prefix: str = "") -> None:
    for key in KEYS:
        name, content = make(key)
        file = folder / f"{prefix}{name}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)


def _tensorboard(key: str) -> tuple[str, str]:
    body = "".join(f"1.7e9,{row['step']},{row[key]}\n" for row in ROWS)
    return f"tag-train_{key}.csv", "Wall time,Step,Value\n" + body


def _mlflow(key: str) -> tuple[str, str]:
    body = "".join(f"1741000000{n:03d} {row[key]} {row['step']}\n" for n, row in enumerate(ROWS))
    return f"metrics/train/{key}", body


def _scalars(key: str) -> tuple[str, str]:
    return f"{key}.csv", "step,value\n" + "".join(f"{row['step']},{row[key]}\n" for row in ROWS)


@pytest.mark.parametrize("make", [_tensorboard, _mlflow, _scalars])
def test_a_folder_of_one_quantity_a_file_is_one_run(make, tmp_path):
    _one_each(tmp_path, make)
    log = read_log(tmp_path)
    check(log)
    assert any("4 files with one quantity each are one run" in note for note in log.notes)


def test_exports_of_two_runs_are_not_joined(tmp_path):
    _one_each(tmp_path, _tensorboard, "run-a-")
    _one_each(tmp_path, _tensorboard, "run-b-")
    found = read_logs(tmp_path)
    assert [log.run for log in found] == ["run-a-", "run-b-"]
    for log in some(found, 2):
        check(log)
    (tmp_path / "two").mkdir()
    for name in ("x", "y"):  # the same quantity in both
        (tmp_path / "two" / f"{name}.csv").write_text(
            table(",", found=[{"step": n, "reward": 0.1} for n in range(9)])
        )
    assert len(read_logs(tmp_path / "two")) == 2


def test_a_log_below_a_folder_is_found(tmp_path):
    """As in the folder of a run of W&B, or Hydra's outputs."""
    (tmp_path / "run" / "files").mkdir(parents=True)
    (tmp_path / "run" / "files" / "output.log").write_text(SHAPES["a padded step"]())
    check(read_log(tmp_path))


def test_steps_that_are_times_count_nothing(tmp_path):
    late = [{**row, "step": 1_741_000_000 + 60 * row["step"]} for row in ROWS]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in late))
    log = read_log(tmp_path / "log.jsonl")
    check(log)
    assert "No key is the step: rows are counted." in log.notes


def test_a_name_that_stands_twice_in_a_header_counts_once(tmp_path):
    text = "step,reward,reward\n" + "".join(f"{n},0.{n:02d},9\n" for n in range(1, 60))
    (tmp_path / "log.csv").write_text(text)
    log = read_log(tmp_path / "log.csv")
    assert log.frame["reward"].iloc[10] == 0.11 and log.unmapped == ("reward (2)",)
    (tmp_path / "log.csv").write_text(
        text.replace(",reward\n", "\n").replace(",9\n", "\n").replace("7,0.07", "7,1,234")
    )
    log = read_log(tmp_path / "log.csv")  # which cell is which is not known
    assert 7 not in log.frame.index and len(log.frame) == 58
    assert any("1 lines with more cells" in note for note in log.notes)


def test_a_bar_that_is_drawn_before_each_row_has_its_step(tmp_path):
    text = "".join(
        f"\r\x1b[32m {n}%|██  | {n}/50 [00:10<00:30, 2.01s/it]\x1b[0m\n\x1b[1m{{{pairs_of_dict(row)}}}\x1b[0m\n"
        for n, row in enumerate(ROWS, 1)
    )
    (tmp_path / "log").write_text(text)
    check(read_log(tmp_path / "log"))


def pairs_of_dict(row: Row) -> str:
    return ", ".join(f"'{key}': {row[key]}" for key in KEYS)


def test_a_reference_that_differs_does_not_hide_a_collapse(tmp_path):
    found = [
        {**row, "kl": 0.03, "reward": row["reward"] if row["step"] < 25 else 0.02} for row in ROWS
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    assert diagnose(tmp_path / "log.jsonl").finding.startswith("Reward collapsed from step 25: ")


@pytest.mark.parametrize("place", ["log.jsonl", "folder/log.jsonl", "folder/trainer_state.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_regular_files_are_read(place, kind, tmp_path):
    file = tmp_path / place
    file.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(UserError) as refused:
        diagnose(file if file.parent == tmp_path else file.parent)
    assert "\n" not in str(refused.value)


def test_what_is_read_is_bounded(tmp_path, monkeypatch):
    """A small compressed file may hold any amount of text."""
    for bound in ("LARGEST", "LONGEST_LINE", "LONGEST_TEXT"):
        monkeypatch.setattr(f"sharpscope.diagnose.text.{bound}", 10_000)
    contents = {"a line": " " * 20_000, "its text": "[\n" + " \n" * 20_000}
    contents["its text "] = table(",") * 20
    for what, content in some(contents.items(), 3):
        (tmp_path / "log").write_bytes(gzip.compress(content.encode()))
        with pytest.raises(UserError, match=f"{what.strip()} is .* set SHARPSCOPE_BOUNDS="):
            read_log(tmp_path / "log")


@pytest.mark.parametrize(("delimiter", "value"), [("\t", 1234.0), (";", 1.234)])
def test_a_comma_before_three_digits_parts_thousands_unless_semicolons_part_columns(
    tmp_path, delimiter, value
):
    """Spreadsheets of countries with a decimal comma part columns by semicolons."""
    lines = [("step", "reward", "grad_norm"), ("1", "1,234", "2"), ("2", "1,234", "3")]
    lines += [(str(step), "1,234", "2") for step in range(3, 20)]
    file = tmp_path / "log.csv"
    file.write_text("\n".join(delimiter.join(line) for line in lines))
    frame = read_log(file).frame
    assert frame["reward"].tolist() == [value] * 19


def test_a_step_of_thousands_is_one_number(tmp_path):
    text = "".join(
        f"Step {100 * n:,} | reward: {n / 40:.3f} | grad_norm: 0.3\n" for n in range(1, 31)
    )
    (tmp_path / "log").write_text(text)
    assert list(read_log(tmp_path / "log").frame.index) == [100 * n for n in range(1, 31)]


def test_what_slime_prints_of_a_rollout_and_of_its_step_are_one_row(tmp_path):
    rows = "".join(
        f"[2026-01-01] rollout.py:8 - perf {n}: {{'rollout/response_len/mean': 300.5, 'perf/rollout_time': 12.1}}\n"
        f"[2026-01-01] data.py:2 - rollout {n}: {{'rollout/raw_reward': {n / 100}, 'rollout/advantages': 0.0}}\n"
        f"[2026-01-01] model.py:7 - step {n}: {{'train/pg_loss': 0.01, 'train/grad_norm': 0.3, 'train/step': {n}}}\n"
        for n in range(20)
    )
    (tmp_path / "log").write_text(rows)
    log = read_log(tmp_path / "log")
    assert log.framework == "slime" and list(log.frame.index) == list(range(20))
    assert log.frame["reward"].tolist() == [n / 100 for n in range(20)]
    assert log.frame["length"].tolist() == 20 * [300.5]
    assert log.frame["grad_norm"].tolist() == 20 * [0.3]


def test_a_trainer_that_compares_with_its_sampler_is_one_by_rewards(tmp_path):
    text = "".join(
        f"Step {n} | Time: 12.3s | Loss: 0.01 | Entropy: 0.5 | Mismatch KL: 0.0011 | Grad. Norm: 0.31 | LR: 1.00e-06\n"
        for n in range(20)
    )
    (tmp_path / "log").write_text(text)
    log = read_log(tmp_path / "log")
    assert log.training == "rewards"
    assert set(log.frame) == {"loss", "entropy", "mismatch_kl", "grad_norm", "lr"}


def test_a_printed_timing_makes_no_dump_of_completions(tmp_path):
    text = "".join(
        f"==== Step {n}/30 ====\n  • Avg Reward: {n / 40}\n  • Generation KL Error: 0.001\n  • generation: 30.00s (50.0%)\n"
        for n in range(1, 21)
    )
    (tmp_path / "log").write_text(text)
    log = read_log(tmp_path / "log")
    assert log.notes == () and log.frame["mismatch_kl"].tolist() == 20 * [0.001]
