"""Threads of a run."""

from __future__ import annotations

import torch

from sharpscope.recording import environment


def test_threads_follow_the_cores_the_processes_and_the_size_of_the_model(monkeypatch, tmp_path):
    before = torch.get_num_threads()
    try:
        monkeypatch.setattr(environment.psutil, "cpu_count", lambda logical: 8)
        monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: set(range(8)))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert environment.set_threads(None) == 2
        assert environment.set_threads(3) == 3
        assert environment.set_threads(None, "embedded:math") == 1
        assert environment.set_threads(3, "embedded:math") == 3
        (tmp_path / "model.safetensors").write_bytes(bytes(10))
        assert environment.set_threads(None, str(tmp_path)) == 1
        monkeypatch.setattr(environment, "TINY", 9)
        assert environment.set_threads(None, str(tmp_path)) == 2
        assert environment.set_threads(None, "hub/model") == 2
        monkeypatch.setattr(environment, "TINY", 10)
        (tmp_path / "adapter_config.json").touch()
        assert environment.set_threads(None, str(tmp_path)) == 2
    finally:
        torch.set_num_threads(before)
