"""One log in every format gives the same numbers, and broken input ends in a value that is left out and counted."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sharpscope.diagnose import diagnose, read_log
from sharpscope.diagnose.compare import compare
from sharpscope.diagnose.page import write_page
from sharpscope.errors import UserError

ROWS = [
    {"step": 5 * n, "loss": 0.1, "grad_norm": 0.3 + n / 1000, "reward": n / 40, "kl": 0.01}
    for n in range(1, 21)
]


def _table(delimiter: str, rows: list[dict[str, float]], comma: bool = False) -> str:
    lines = [delimiter.join(rows[0])]
    for row in rows:
        cells = [f"{value:.6g}" for value in row.values()]
        lines.append(delimiter.join(c.replace(".", ",") if comma else c for c in cells))
    return "\n".join(lines) + "\n"


def _markdown(rows: list[dict[str, float]]) -> str:
    header = "| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]) + "\n"
    return header + "".join(
        "| " + " | ".join(f"{v:.6g}" for v in row.values()) + " |\n" for row in rows
    )


def _console(rows: list[dict[str, float]], quote: bool) -> str:
    """transformers' dicts between progress bars, those of an evaluation among them; version 5 prints values as text."""
    lines = ["Loading checkpoint shards: 100%|###| 2/2 [00:01<00:00, 1.2it/s]"]
    for row in rows:
        shown = {k: str(v) if quote else v for k, v in row.items() if k != "step"}
        step = int(row["step"])
        lines.append(f"\r {step}%|##  | {step}/200 [00:10<00:30, 2.0s/it]\x1b[A{shown}")
        lines.append(f"\r {step}%|##  | {step}/200 [00:10<00:30, 2.0s/it]")
        lines.append("\r 50%|##  | 1/2 [00:10<00:30, 2.0s/it]")
    return "\n".join(lines)


def _verl(rows: list[dict[str, float]]) -> str:
    names = {"loss": "actor/pg_loss", "grad_norm": "actor/grad_norm", "kl": "actor/kl_loss"}
    names["reward"] = "critic/score/mean"
    return "".join(
        f"\x1b[36m(TaskRunner pid=7, ip=10.0.0.1)\x1b[0m step:{row['step']} - "
        + " - ".join(f"{names[k]}:np.float64({v})" for k, v in row.items() if k != "step")
        + "\n"
        for row in rows
    )


def _torchtune(rows: list[dict[str, float]]) -> str:
    return "".join(
        f"Step {row['step']} | "
        + " ".join(f"{k}:{v}" for k, v in row.items() if k != "step")
        + "\n"
        for row in rows
    )


def _blocks(rows: list[dict[str, float]]) -> str:
    return "".join(
        f"==== Step {row['step']}/100 ====\nsome message\n"
        + "".join(f"  • {k}: {v}\n" for k, v in row.items() if k != "step")
        for row in rows
    )


def _notebook(rows: list[dict[str, float]]) -> str:
    cells = "".join(
        "<tr>" + "".join(f"<td>{v}</td>" for v in row.values()) + "</tr>" for row in rows
    )
    head = "".join(f"<th>{key}</th>" for key in rows[0])
    page = f"<table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>"
    output = {"output_type": "display_data", "data": {"text/html": [page]}}
    return json.dumps({"cells": [{"cell_type": "code", "outputs": [output]}], "nbformat": 4})


FORMATS: dict[str, Callable[[list[dict[str, float]]], str]] = {
    "trainer_state": lambda rows: json.dumps({"log_history": rows}),
    "list": lambda rows: json.dumps(rows, indent=1),
    "columns": lambda rows: json.dumps({key: [row[key] for row in rows] for key in rows[0]}),
    "by step": lambda rows: json.dumps(
        {k: {str(row["step"]): row[k] for row in rows} for k in rows[0] if k != "step"}
    ),
    "JSON lines": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "CSV": lambda rows: _table(",", rows),
    "TSV": lambda rows: _table("\t", rows),
    "semicolons": lambda rows: _table(";", rows, comma=True),
    "pasted": lambda rows: "My run:\n\n" + _table("   ", rows),
    "Markdown": _markdown,
    "transformers 4": lambda rows: _console(rows, quote=False),
    "transformers 5": lambda rows: _console(rows, quote=True),
    "verl": _verl,
    "torchtune": _torchtune,
    "blocks": _blocks,
    "notebook": _notebook,
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_numbers_under_any_name(name, zipped, tmp_path):
    content = FORMATS[name](ROWS).encode()
    file = tmp_path / "what.ever"
    file.write_bytes(gzip.compress(content) if zipped else content)
    log = read_log(file)
    assert list(log.frame.index) == [row["step"] for row in ROWS]
    for quantity in ("loss", "grad_norm", "reward", "kl"):
        wanted = [row[quantity] for row in ROWS]
        np.testing.assert_allclose(log.frame[quantity], wanted, rtol=1e-5, err_msg=quantity)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "latin-1"])
def test_encodings(encoding, tmp_path):
    text = FORMATS["CSV"](ROWS).replace("loss", "naïve loss")
    (tmp_path / "log").write_bytes(text.encode(encoding))
    log = read_log(tmp_path / "log")
    assert len(log.frame) == 20 and "reward" in log.frame


def test_lines_end_at_newlines_only(tmp_path):
    rows = "".join(
        json.dumps({"note": "a\u2028b\u0085c", **row}, ensure_ascii=False) + "\n" for row in ROWS
    )
    (tmp_path / "log.jsonl").write_text(rows, encoding="utf-8")
    log = read_log(tmp_path / "log.jsonl")
    assert len(log.frame) == 20 and log.notes == ()


BROKEN = {
    "NaN step": ({"step": float("nan")}, "rows without a step"),
    "infinite step": ({"step": float("inf")}, "rows without a step"),
    "no step": ({}, "rows without a step"),
    "large integer": ({"step": 200, "loss": int("9" * 400)}, "integers that are too large"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_value_is_left_out_and_counted(name, tmp_path):
    change, reason = BROKEN[name]
    row = {"loss": 0.1, "reward": 0.5} | change
    if name == "no step":
        row.pop("step", None)
    text = "".join(json.dumps(r) + "\n" for r in [*ROWS, row])
    (tmp_path / "log.jsonl").write_text(text)
    log = read_log(tmp_path / "log.jsonl")
    assert list(log.frame.index[:20]) == [r["step"] for r in ROWS]
    assert f"1 {reason} left out." in log.notes


def test_broken_lines_are_counted(tmp_path):
    bad = ["{", "[" * 100_000, '{"step": ' + "9" * 5000 + "}", "null", '"x"', "{'a': 1}"]
    text = "".join(json.dumps(row) + "\n" for row in ROWS) + "\n".join(bad) + '\n{"step": 1, "rew'
    (tmp_path / "log.jsonl").write_text(text)
    log = read_log(tmp_path / "log.jsonl")
    assert len(log.frame) == 20 and any("lines that are no JSON object" in n for n in log.notes)


def test_huge_values_count_as_not_finite(tmp_path):
    rows = [row | {"grad_norm": 1e308 if row["step"] == 50 else row["grad_norm"]} for row in ROWS]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = diagnose(tmp_path / "log.jsonl").findings[0]
    assert (first.rule.name, first.step) == ("non_finite", 50)


def test_any_bytes_end_in_a_diagnosis_or_one_line(tmp_path):
    """Files of every format with bytes changed, cut and repeated at random."""
    dice = random.Random(0)
    wholes = [make(ROWS).encode() for make in FORMATS.values()]
    ends = 0
    for _ in range(300):
        content = bytearray(dice.choice(wholes))
        for _ in range(dice.randint(1, 30)):
            at = dice.randrange(len(content))
            content[at] = dice.choice(b'0123456789{}[]",:\n\r\t;|-.eENaIf\\/\x00\xff\xc3')
        cut = content[: dice.randrange(1, len(content))] if dice.random() < 0.3 else content
        (tmp_path / "log").write_bytes(bytes(cut))
        try:
            diagnose(tmp_path / "log").text()
        except UserError as error:
            assert "\n" not in str(error)
        ends += 1
    assert ends == 300


def test_many_columns_and_many_rows_are_read_in_time(tmp_path):
    """A hundredth of what was measured: work grows with what is logged, not with rows times columns."""
    wide = {f"layer.{n}.norm": 0.1 for n in range(20_000)}
    rows = [row | (wide if row["step"] == 5 else {}) for row in ROWS]
    (tmp_path / "wide.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = diagnose(tmp_path / "wide.jsonl")
    assert len(found.log.unmapped) == 20_000 and len(found.as_dict()["unmapped"]) == 1000
    long = (
        f'{{"step": {n}, "loss": 0.1, "reward": {n / 60_000:.5f}, "grad_norm": 0.3}}\n'
        for n in range(30_000)
    )
    (tmp_path / "long.jsonl").write_text("".join(long))
    log = read_log(tmp_path / "long.jsonl")
    assert log.rows == 30_000 and len(log.frame) <= 20_000 and "blocks of 2" in log.notes[-1]
    np.testing.assert_allclose(log.frame["reward"].iloc[100], 200.5 / 60_000, atol=1e-5)


def test_where_two_logs_part(tmp_path):
    noise = np.random.default_rng(0)
    a = [row | {"reward": 0.5 + noise.normal(0, 0.01)} for row in ROWS]
    b = [dict(row) for row in a]
    for row in b[12:]:
        row["reward"] += 0.3
    for name, rows in (("a", a), ("b", b)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compare(read_log(tmp_path / "a"), read_log(tmp_path / "b"))
    first = found.partings[0]
    assert (first.quantity, first.step, first.equal_to) == ("reward", 65, 60)
    assert found.finding.startswith("The logs part from step 65 on, first in reward: ")
    assert {p.quantity: p.step for p in found.partings[1:]} == dict.fromkeys(
        ("grad_norm", "kl", "loss")
    )
    same = compare(read_log(tmp_path / "a"), read_log(tmp_path / "a"))
    assert same.finding.startswith("The logs do not part")
    assert {p.equal_to for p in same.partings} == {100}


def test_a_page_has_a_chart_of_each_quantity_and_runs_nothing(tmp_path):
    rows = [row | {"grad_norm": 9.0 if row["step"] == 90 else row["grad_norm"]} for row in ROWS]
    file = tmp_path / "<script>alert(1)<.jsonl"
    file.write_text("".join(json.dumps(row | {"<img src=x>": 1}) + "\n" for row in rows))
    found = diagnose(file)
    write_page([found], tmp_path / "page.html")
    page = Path(tmp_path / "page.html").read_text("utf-8")
    assert page.count("<polyline") == len(found.log.frame.columns)
    assert "The gradient spiked, from step 90</title>" in page
    assert "<script" not in page and "<img" not in page and "http" not in page
