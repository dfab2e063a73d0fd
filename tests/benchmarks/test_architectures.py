"""Every causal architecture of the installed transformers at a tiny size: each probe is right or refuses in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.benchmarks import architectures as sweep

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("olmo2", set()),
        ("granitemoe", set()),  # a mixture of experts, so also as plain transformers loads it
        ("dbrx", {"local", "sketch", "stream"}),
        ("mamba", {"local", "sketch"}),
        ("minicpm3", {"local", "sketch"}),  # divides its hidden states before the output layer
        ("roberta", {"head", "local", "sketch", "exact", "forward", "central", "stream", "graph"}),
    ],
)
def test_probes_are_right_or_refuse(name, refused):
    report = sweep.examine(name)
    assert not report.reason and not report.failed, report
    assert {check for check, outcome in report.checks.items() if outcome.kind == "refused"} == refused
    assert all(outcome.kind in ("right", "refused") for outcome in report.checks.values())
    assert report.checks["unchanged"].kind == "right"
    assert ("float32 exact" in report.checks) == (name == "granitemoe")
    assert f"| {name} |" in sweep.table([report])


def test_an_error_of_a_thousandth_is_seen():
    model, batch = sweep.build(sweep.tiny_config("gpt2"), torch.float64, attn_implementation="eager"), sweep.rows()
    sweep.randomize(model)
    vector = torch.randn(sum(p.numel() for p in sweep.trainable(model)), dtype=torch.float64)
    truth = sweep.oracle(model, batch, vector)
    scale = torch.ones(len(truth.full), 1, dtype=torch.float64)
    scale[3] = 1.001
    changed = replace(
        truth,
        full=truth.full * scale,
        head=truth.head * scale,
        local=truth.local * scale,
        product=truth.product * 1.001,
    )
    checks = ("head", "local", "exact", "forward", "stream", "graph")
    found = sweep.Checks(model, changed, batch, vector).run(checks, sweep.TOLERANCE)
    assert {check: outcome.kind for check, outcome in found.items()} == dict.fromkeys(checks, "wrong")


@pytest.mark.slow
def test_all_architectures(tmp_path):
    out = tmp_path / "architectures.md"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "experiments.benchmarks.architectures",
            "--json",
            str(tmp_path / "all.json"),
            "--out",
            str(out),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    reports = json.loads((tmp_path / "all.json").read_text())
    assert len(reports) == len(sweep.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    bad = [
        f"{report['name']} {check}: {outcome}"
        for report in reports
        for check, outcome in report["checks"].items()
        if outcome["kind"] not in ("right", "refused", "stopped by the self-check", "not compared")
    ]
    assert not bad, "\n".join(bad)
    assert done.returncode == 0, done.stderr[-2000:]
    # A sweep in which little is compared shows nothing.
    exact = [report["checks"]["exact"]["kind"] for report in reports if not report["reason"]]
    assert len(exact) >= 150 and exact.count("right") >= 120
    assert out.read_text().count("\n| ") > len(reports)
