"""`watch` on runs that go on, end, die or are not there; and the commands."""

from __future__ import annotations

from typer.testing import CliRunner

from sharpscope.cli import app
from tests.analysis.html.runs import write_report_run


def test_report_writes_a_page_and_opens_it(tmp_path, quick, monkeypatch):
    write_report_run(tmp_path / "runs/a", steps=2)
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)) or True)
    page = tmp_path / "out/page.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--out", str(page), "--open"])
    assert done.exit_code == 0 and f"Written: {page}" in done.output.replace("\n", "")
    assert opened == [page.as_uri()] and page.read_text(encoding="utf-8").startswith("<!doctype html>")
    done = CliRunner().invoke(app, ["watch", str(tmp_path / "runs/a"), "--once"])
    assert done.exit_code == 0 and "grpo" in done.output
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--out", str(page), "--open"])
    assert done.exit_code == 0 and "cannot start a browser" in done.output
