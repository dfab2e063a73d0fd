"""Loggers: one class per logger with `write(step, values)` and `close()`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from sharpscope.errors import UserError


class Sink(Protocol):
    """Interface of a logger for one run."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values of a step. Steps ascend; a step may be repeated with other names."""
        ...

    def close(self) -> None:
        """Flush and close the logger."""
        ...


def need(module: str, extra: str) -> None:
    """Raise UserError if `module` of the extra `extra` is not installed."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"--to {extra}: {module} is not installed; pip install 'sharpscope[{extra}]'")


class TensorBoardSink:
    """TensorBoard event file in `out`/<run name>. TensorBoard stores values as float32."""

    def __init__(self, out: Path, name: str, config: Mapping[str, Any], **_: Any) -> None:
        need("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(out / name))
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2, default=str)}\n```")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See Sink."""
        self._writer.close()


class WandbSink:
    """Run of Weights & Biases in `out`/wandb, offline unless `online`, regardless of the environment."""

    def __init__(self, out: Path, name: str, config: Mapping[str, Any], *, project: str, online: bool) -> None:
        need("wandb", "wandb")
        import wandb

        out.mkdir(parents=True, exist_ok=True)
        quiet: dict[str, Any] = {
            "x_disable_stats": True,
            "x_disable_meta": True,
            "disable_code": True,
            "disable_git": True,
            "console": "off",
            "silent": not online,
        }
        self._run = wandb.init(
            project=project,
            name=name,
            config=dict(config),
            dir=str(out),
            mode="online" if online else "offline",
            reinit="create_new",
            settings=wandb.Settings(**quiet),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See Sink."""
        import wandb

        self._run.finish()
        if wandb.run is None:  # not used elsewhere in this process; teardown ensures that the file is written
            wandb.teardown()


class TrackioSink:
    """Run of trackio in the SQLite database in `out`, written by a child process.

    trackio reads its folder from the environment at import, and another variable can make it upload to a server. The child
    process has an environment with the folder and without the server.
    """

    def __init__(self, out: Path, name: str, config: Mapping[str, Any], *, project: str, **_: Any) -> None:
        need("trackio", "trackio")
        out.mkdir(parents=True, exist_ok=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TRACKIO_")}
        environment |= {"TRACKIO_DIR": str(out.resolve()), "HF_HUB_OFFLINE": "1"}
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, "-m", "sharpscope.integrations.loggers.trackio_child"],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self._send({"project": project, "name": name, "config": dict(config)})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        self._send({"step": step, "values": dict(values)})

    def close(self) -> None:
        """See Sink.

        Raises:
            UserError: trackio failed.
        """
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        if self._child.wait() != 0:
            raise UserError(f"--to trackio: failed: {self._last_line()}")
        self._output.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message, default=str) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self._child.wait()
            raise UserError(f"--to trackio: failed: {self._last_line()}") from None

    def _last_line(self) -> str:
        self._output.seek(0)
        lines = [line.strip() for line in self._output.read().splitlines() if line.strip()]
        return lines[-1] if lines else "no output"
