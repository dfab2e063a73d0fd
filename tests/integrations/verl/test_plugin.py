"""The plugin that verl loads: it does nothing without its variable, and says why it cannot record."""

from __future__ import annotations

import importlib
import sys
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sharpscope.errors import UserError
from sharpscope.integrations.verl import check_engine, check_loss, interval

PLUGIN = "sharpscope.integrations.verl_plugin"


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


ENGINE = {"strategy": "fsdp2", "ulysses_sequence_parallel_size": 1, "mixed_precision": None}


@pytest.mark.parametrize(
    ("change", "fused", "message"),
    [
        ({"strategy": "megatron"}, False, "strategy = megatron"),
        ({}, True, "use_fused_kernels = True"),
        ({"ulysses_sequence_parallel_size": 2}, False, "ulysses_sequence_parallel_size = 2"),
        ({"mixed_precision": {"param_dtype": "fp16"}}, False, "mixed_precision.param_dtype = fp16"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(change, fused, message):
    with pytest.raises(UserError, match=message):
        check_engine(SimpleNamespace(**(ENGINE | change)), fused)
    check_engine(SimpleNamespace(**ENGINE), False)
    check_engine(SimpleNamespace(**(ENGINE | {"mixed_precision": {"param_dtype": "bf16"}})), False)


def loss_function(mode: str = "vanilla", kl: str | None = None) -> Any:
    """As verl sets it."""

    def ppo_loss(config: Any, **_: Any) -> None:
        """Never called."""

    config = SimpleNamespace(policy_loss={"loss_mode": mode}, use_kl_loss=kl is not None, kl_loss_type=kl)
    return partial(ppo_loss, config=config)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (loss_function("cispo"), "policy_loss.loss_mode = cispo"),
        (loss_function(kl="low_var_kl+"), "kl_loss_type = low_var_kl\\+"),
        (len, "the loss len is not known"),
    ],
)
def test_losses_without_a_critical_sharpness_are_refused_by_name(loss, message):
    with pytest.raises(UserError, match=message):
        check_loss(loss)
    check_loss(loss_function())
    check_loss(loss_function("gspo", "k3"))


def test_intervals_are_whole_numbers(monkeypatch):
    monkeypatch.setenv("SHARPSCOPE_VERL_NORMS_EVERY", "often")
    with pytest.raises(UserError, match="SHARPSCOPE_VERL_NORMS_EVERY = 'often': must be a whole number"):
        interval("SHARPSCOPE_VERL_NORMS_EVERY", 10)
