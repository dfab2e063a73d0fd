"""A run that is killed, out of disk or damaged goes on as if it had not been; what is damaged is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from sharpscope.traces import load_run
from sharpscope.training import train
from tests.faults.conftest import assert_same, tiny_config

CHILD = """
import resource, sys
from pathlib import Path
import torch
from sharpscope.training import train
from tests.faults.conftest import tiny_config
torch.set_num_threads(1)
if int(sys.argv[3]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
outcome = train(tiny_config(Path(sys.argv[1]), Path(sys.argv[2])))
print(outcome.status, outcome.reason)
"""


def child(policy: Path, run: Path, limit: int = 0) -> subprocess.Popen:
    root = Path(__file__).resolve().parents[2]
    arguments = [sys.executable, "-c", CHILD, str(policy), str(run), str(limit)]
    return subprocess.Popen(
        arguments, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, stdout=subprocess.PIPE
    )


def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(uninterrupted, tmp_path):
    policy, whole = uninterrupted
    run = tmp_path / "run"
    process = child(policy, run)
    limit = time.monotonic() + 600
    while (
        not list((run / "traces" / "steps").glob("part-*"))
        and time.monotonic() < limit
        and process.poll() is None
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    told = load_run(run)
    assert not told.verify() and told.steps["step"].tolist() == list(range(1, len(told.steps) + 1))
    if told.status != "finished":
        assert train(tiny_config(policy, run), resume=True).status == "finished"
    assert_same(whole, run)


def test_a_disk_that_refuses_a_write_ends_the_run_with_a_line_that_says_how_to_go_on(
    uninterrupted, tmp_path
):
    policy, whole = uninterrupted
    run = tmp_path / "run"
    largest = max(path.stat().st_size for path in (whole / "checkpoints").rglob("*.safetensors"))
    process = child(policy, run, limit=largest - 1)  # the first checkpoint does not fit
    said = process.communicate(timeout=600)[0].decode()
    assert said.startswith("failed") and f"sharpscope run --resume {run}" in said, said
    assert not list((run / "checkpoints").iterdir()) and not load_run(run).verify()
    assert train(tiny_config(policy, run), resume=True).status == "finished"
    assert_same(whole, run)
