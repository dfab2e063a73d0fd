"""Text of models and data, and names of runs, as an attacker would write them: shown as they are, obeyed nowhere."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from contextlib import chdir, redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import torch

from sharpscope.analysis.text import csv_text
from sharpscope.cli import main
from sharpscope.cli.console import print_json
from sharpscope.config import build_config
from sharpscope.diagnose import read_log
from sharpscope.errors import UserError
from sharpscope.integrations.loggers import scalars
from sharpscope.recording.saved_optimizer import load_adamw
from sharpscope.sweeps import run_name
from sharpscope.traces import TraceWriter, load_run, update_run_info
from tests.loops import some

MARK = "[bold red]M[/bold red] [link=file:///etc/passwd]L[/link]"
FORMAT = "{0.__class__} %s %(a)n ${HOME} $(touch pwned) `touch pwned`"
HTML = "<script>alert(1)</script><img src=x onerror=alert(2)></td></table>"
TERMINAL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\x00\r\x08"
MARKDOWN = "| a | b |\n# head\n![x](http://evil.example/x.png) [y](javascript:alert(3))"
HOSTILE = f"{MARK} {FORMAT} {HTML} {TERMINAL} {MARKDOWN} ../../etc/passwd"


@pytest.fixture(scope="module")
def hostile_run(uninterrupted, tmp_path_factory):
    """A run in which every text that a model, a task or a file could choose is hostile."""
    _, whole = uninterrupted
    run_dir = tmp_path_factory.mktemp("hostile") / "run"
    shutil.copytree(whole, run_dir)
    run = load_run(run_dir)
    kept = {name: getattr(run, name) for name in ("rollouts", "events", "eval")}
    for name in kept:
        shutil.rmtree(run_dir / "traces" / name)
    rollouts = kept["rollouts"].assign(
        prompt=[f"{HOSTILE} {n}" for n in kept["rollouts"]["group"]],
        completion=HOSTILE,
        reward_parts=json.dumps({HTML: 1.0}),
    )
    with TraceWriter(run_dir) as writer:
        writer.append("rollouts", columns(rollouts))
        writer.append("eval", columns(kept["eval"].assign(split=HTML + TERMINAL, level=MARK)))
        event = {
            "step": 1,
            "rule": MARK,
            "severity": "warning",
            "value": 1.0,
            "threshold": 0.0,
            "action": "warn",
        }
        writer.append(
            "events", {name: [value] for name, value in event.items()} | {"message": [HOSTILE]}
        )
    config = run.info["config"] | {"policy": run.info["config"]["policy"] | {"model": HOSTILE}}
    update_run_info(
        run_dir,
        name=HOSTILE,
        method=HOSTILE,
        task=HOSTILE,
        device=HOSTILE,
        end=HOSTILE,
        config=config,
    )
    return run_dir


def columns(frame: pd.DataFrame) -> dict[str, list]:
    return {
        name: [
            json.loads(v) if name == "reward_parts" else None if pd.isna(v) else v
            for v in frame[name]
        ]
        for name in frame
    }


def call(arguments: list[str], folder: Path) -> tuple[str, str]:
    """What a command that succeeds in `folder` writes, to stdout and to stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (
        chdir(folder),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main(arguments)
    assert ended.value.code in (None, 0), err.getvalue()
    return out.getvalue(), err.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder and what it holds; folders as empty."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def harmless(text: str) -> None:
    odd = {c for c in text if not c.isprintable() and c != "\n"}
    assert not odd, odd


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["show", "run"], ["[bold red]M[/bold red]", "${HOME}"]),
        (["show", "run", "run"], []),
        (["tokens", "run", "--step", "2"], ["[bold red]M[/bold red]"]),
        (["tokens", "run", "--spikes"], ["[bold red]M[/bold red]"]),
        (["show", "run", "--json"], ["[bold red]M[/bold red]"]),
        (["tokens", "run", "--step", "2", "--json"], ["[bold red]M[/bold red]"]),
        (["export", "run", "--to", "reduced", "--out", "../reduced"], []),
    ],
)
def test_a_terminal_shows_it_and_obeys_nothing(hostile_run, monkeypatch, arguments, shown):
    monkeypatch.setattr(
        "sharpscope.analysis.headline.piece_maker", lambda run: lambda ids: [HOSTILE] * len(ids)
    )
    monkeypatch.setenv("COLUMNS", "4000")
    before = contents(hostile_run.parent)
    called = call(arguments, hostile_run.parent)
    for text in some(called):
        harmless(text)
    for text in shown:
        assert text in called[0]
    assert contents(hostile_run.parent) == before


class Elements(HTMLParser):
    """Every start tag and its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_json_escapes_what_a_terminal_would_obey_and_reads_back_equal(capsys):
    value = {f"a{HOSTILE}": [HOSTILE, "\x9b31m\u202e\u2028\ud800\U000e0001 é 漢"]}
    print_json(value)
    text = capsys.readouterr().out
    harmless(text)
    assert json.loads(text) == value and "é 漢" in text


def test_names_of_scalars_that_loggers_get_show_no_control_character(hostile_run):
    names = {name for row in scalars(load_run(hostile_run)).values() for name in row}
    assert any("<script>" in name for name in some(names))
    for name in names:
        harmless(name)


def test_a_warning_and_an_error_show_no_control_character(tmp_path, capsys):
    (tmp_path / TERMINAL.replace("/", "").replace("\0", "")).mkdir()
    (run,) = tmp_path.iterdir()
    (run / "run.json").write_text("{")
    for arguments in (["show", str(run)], ["analyze", str(tmp_path), "--out", str(tmp_path)]):
        with pytest.raises(SystemExit):
            main(arguments)
        told = capsys.readouterr()
        assert "damaged" in told.err
        harmless(told.err + told.out)


def test_a_spreadsheet_runs_no_cell_and_numbers_stay_numbers():
    formulas = ["=1+1", "+cmd|' /C calc'!A0", "-1+cmd|' /C calc'!A0", "@SUM(A1)", "-x", " =1"]
    harmless_cells = ["-0.5", "+3.2e-5", "-0.5 ± 0.1", "−1.5 %", "a=1", "-1,234.5"]
    table = pd.DataFrame({"=name": formulas + harmless_cells, "n": range(12)})
    read = pd.read_csv(io.StringIO(csv_text(table)), dtype=str)
    assert list(read) == ["'=name", "n"]
    assert all(cell.startswith("'") for cell in read["'=name"][:6])
    assert read["'=name"][6:].tolist() == harmless_cells


def test_reports_hold_it_escaped_and_files_have_plain_names(hostile_run, tmp_path):
    shutil.copytree(hostile_run, tmp_path / "run")
    called = call(["analyze", "run", "--out", "report"], tmp_path)
    harmless(called[0])
    assert {path.name for path in tmp_path.iterdir()} == {"run", "report"}
    written = [path for path in (tmp_path / "report").rglob("*") if path.is_file()]
    assert {"report.html", "runs.csv"} <= {path.name for path in written}
    for path in some(written):
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,200}", path.name), path.name
        if path.suffix in (".html", ".csv", ".svg"):
            text = path.read_text(encoding="utf-8")
            assert "\x1b" not in text and "\x00" not in text, path.name
        if path.suffix in (".html", ".svg"):
            elements = Elements()
            elements.feed(text)
            assert not [
                tag for tag, attrs in elements.found if any(name.startswith("on") for name in attrs)
            ], path.name
            assert "<script>alert(1)" not in text and "<img src=x" not in text, path.name


@pytest.mark.parametrize("out", ["", "a\0b"])
def test_a_folder_that_cannot_be_one_is_named(tmp_path, out):
    with pytest.raises(UserError, match="out"):
        build_config(values={"out": out})


def test_labels_become_plain_folder_names():
    for hostile in (HOSTILE, "../../x", "a\0b", "x" * 500):
        assert re.fullmatch(r"[A-Za-z0-9._+=-]{1,127}", run_name("grpo", {"a.b": hostile}, 0))
        assert "/" not in run_name("grpo", {f"task.{hostile}": 1}, 0)


class Payload:
    """An object whose unpickling writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("kind", ["pickle", "bytes", "other values", "wrong shapes", "pipe"])
def test_a_saved_optimizer_runs_no_code_and_has_one_reason(tmp_path, kind):
    model, file = torch.nn.Linear(2, 1), tmp_path / "optimizer.pt"
    state = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "step": torch.tensor(1.0)}
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    made = {"pickle": Payload(tmp_path / "ran"), "other values": {"param_groups": [7], "state": {}}}
    made["wrong shapes"] = {"state": {0: state}, "param_groups": [group]}
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "bytes":
        file.write_bytes(b"\x80\x04no pickle")
    else:
        torch.save(made[kind], file)
    with pytest.raises(UserError) as refused:
        load_adamw(tmp_path, model)
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"log_history": 7}', '{"log_history": [1]}', "[]", "\xff"]
)
def test_the_log_of_a_trainer_has_components_or_one_reason(tmp_path, content):
    file = tmp_path / "trainer_state.json"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(UserError) as refused:
        read_log(tmp_path)
    assert "\n" not in str(refused.value)
    row = {"step": 1, "reward": 0.5, "rewards/\u2028/mean": 0.5}
    (tmp_path / "log.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", "utf-8")
    found = read_log(tmp_path / "log.jsonl").components
    assert found.to_dict("list") == {"rewards/\u2028": [0.5]} and list(found.index) == [1]
