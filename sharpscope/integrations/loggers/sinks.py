"""Where scalars go: one class a logger, all with `write(step, values)` and `close()`."""

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
    """Takes the scalars of one run, steps ascending."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Note the values of a step; a step may come again with further names."""
        ...

    def close(self) -> None:
        """Make everything durable."""
        ...


def need(module: str, extra: str) -> None:
    """Raise a UserError if `module`, which the extra `extra` brings, cannot be imported."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"--to {extra}: {module} is not installed; pip install 'sharpscope[{extra}]'")


class TensorBoardSink:
    """An event file in `out`/<run name>; values are float32 there, as TensorBoard keeps them."""

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
    """A run of Weights & Biases in `out`/wandb: offline whatever the environment says, unless `online`."""

    def __init__(self, out: Path, name: str, config: Mapping[str, Any], *, project: str, online: bool) -> None:
        need("wandb", "wandb")
        import wandb

        out.mkdir(parents=True, exist_ok=True)
        quiet: dict[str, Any] = {
            "x_disable_stats": True, "x_disable_meta": True, "disable_code": True, "disable_git": True, "console": "off",
            "silent": not online,
        }  # fmt: skip
        self._run = wandb.init(
            project=project, name=name, config=dict(config), dir=str(out), mode="online" if online else "offline",
            reinit="create_new", settings=wandb.Settings(**quiet),
        )  # fmt: skip

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See Sink."""
        import wandb

        self._run.finish()
        if wandb.run is None:  # nobody else in this process uses it: only its end makes sure that the file is written
            wandb.teardown()


class TrackioSink:
    """A run of trackio in the SQLite database of `out`, written by a process of its own.

    trackio takes its folder from the environment when it is imported, and may send what it gets to a server that another
    variable names; the process has neither.
    """

    def __init__(self, out: Path, name: str, config: Mapping[str, Any], *, project: str, **_: Any) -> None:
        need("trackio", "trackio")
        out.mkdir(parents=True, exist_ok=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TRACKIO_")}
        environment |= {"TRACKIO_DIR": str(out.resolve()), "HF_HUB_OFFLINE": "1"}
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, "-m", "sharpscope.integrations.loggers.trackio_child"], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=self._said, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._send({"project": project, "name": name, "config": dict(config)})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """See Sink."""
        self._send({"step": step, "values": dict(values)})

    def close(self) -> None:
        """See Sink.

        Raises:
            UserError: trackio did not take it.
        """
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        if self._child.wait() != 0:
            raise UserError(f"--to trackio: it failed: {self._last_words()}")
        self._said.close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message, default=str) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self._child.wait()
            raise UserError(f"--to trackio: it failed: {self._last_words()}") from None

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"
