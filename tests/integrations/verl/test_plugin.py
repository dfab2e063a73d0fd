"""The plugin that verl loads: it does nothing without its variable, and says why it cannot record."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from sharpscope.errors import UserError
from sharpscope.integrations.verl.recorder import check_worker

PLUGIN = "sharpscope.integrations.verl.plugin"


def test_the_entry_point_names_a_module_that_loads():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    assert (
        project["entry-points"]["verl.plugins"] == {"sharpscope": PLUGIN} and "verl" in project["optional-dependencies"]
    )


def test_without_the_variable_nothing_happens(monkeypatch, capsys):
    monkeypatch.delenv("SHARPSCOPE_VERL", raising=False)
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    importlib.import_module(PLUGIN)
    assert capsys.readouterr() == ("", "") and "verl" not in sys.modules


def test_a_plugin_that_cannot_record_says_so(monkeypatch, capsys):
    """verl would hide the error."""
    monkeypatch.setenv("SHARPSCOPE_VERL", "runs/x")
    monkeypatch.setitem(sys.modules, "verl", None)  # not installed
    monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
    with pytest.raises(ImportError):
        importlib.import_module(PLUGIN)
    assert "sharpscope: SHARPSCOPE_VERL=runs/x: not recording" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "megatron"}, "strategy = megatron"),
        ({"use_fused_kernels": True}, "use_fused_kernels = True"),
        ({"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size = 2"),
        ({"scaler": object()}, "fp16"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(change, message):
    fine = {"strategy": "fsdp2", "use_fused_kernels": False, "ulysses_sequence_parallel_size": 1, "scaler": None}
    given = fine | change
    worker = SimpleNamespace(engine_config=SimpleNamespace(**given), engine=SimpleNamespace(scaler=given["scaler"]))
    with pytest.raises(UserError, match=message):
        check_worker(worker)
    check_worker(SimpleNamespace(engine_config=SimpleNamespace(**fine), engine=SimpleNamespace(scaler=None)))
