"""Commands on the example traces."""

from __future__ import annotations

from typer.testing import CliRunner

from sharpscope.cli import app
from tests.pair import pair

EXAMPLE = pair()
GRPO, GRPO_SG = str(EXAMPLE / "grpo-s0"), str(EXAMPLE / "grpo-sg-s0")


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "220"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output
