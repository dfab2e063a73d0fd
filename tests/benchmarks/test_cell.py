"""The bench at the shape of a real model, at a tiny shape."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from experiments.benchmarks.__main__ import app
from experiments.benchmarks.cell import CELL, SHAPES, Cell, report, write_model
from sharpscope.errors import UserError

TINY = ["rollout.prompts_per_step=4", "rollout.group_size=2", "rollout.max_new_tokens=6", "policy.device=cpu"]


def test_shapes_are_the_published_ones():
    def parameters(
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, vocab_size
    ):
        kv = hidden_size // num_attention_heads * num_key_value_heads
        attention = 2 * hidden_size**2 + hidden_size + 2 * (hidden_size * kv + kv)
        layer = attention + 3 * hidden_size * intermediate_size + 2 * hidden_size
        return vocab_size * hidden_size + num_hidden_layers * layer + hidden_size

    assert parameters(**SHAPES["qwen2.5-0.5b"]) == 494_032_768  # as the model card's checkpoint has
    assert parameters(**SHAPES["qwen2.5-3b"]) == 3_085_938_688


def test_a_cell_runs_by_the_command_and_says_what_it_cost(tmp_path):
    settings = [part for value in TINY for part in ("--set", value)]
    out = tmp_path / "cells.md"
    arguments = [
        "cell",
        "--shape",
        "tiny",
        "--steps",
        "2",
        "--prompt-tokens",
        "8",
        "--out",
        str(out),
        *settings,
    ]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    row = out.read_text().splitlines()[-1]
    assert row.startswith("| tiny | ") and "8 × 6" in row
    assert (
        row.split("|")[3].strip() == f"{512 * 32 + 2 * (2 * 32**2 + 32 + 2 * (32 * 16 + 16) + 3 * 32 * 48 + 64) + 32:,}"
    )


def test_the_share_of_recording_is_that_of_ten_steps():
    cell = Cell(
        "x", "d", 1, 8, 80, generation_s=2.0, training_s=7.0, recording_s=0.5, gradients_s=5.5, memory_bytes=2**31
    )
    ten = [9 + 0.5] * 9 + [9 + 5.5]
    assert cell.step_s == pytest.approx(sum(ten) / 10)
    assert cell.recording_share == pytest.approx(1 - 90 / sum(ten))
    assert "| 2.00 |" in report([cell]) and report([cell]).count("\n") == 3


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UserError, match=r"--shape qwen2\.5-3"):
        write_model(tmp_path, "qwen2.5-3")
    assert CELL["policy.dtype"] == "bfloat16"
