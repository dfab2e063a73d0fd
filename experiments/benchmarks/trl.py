"""What recording a TRL trainer costs: the same training with and without the recorder, step beside step.

The recorder changes nothing of the training, so both draw the same completions, and what differs is the recorder's time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.step import trl_trainer
from sharpscope.config import RunConfig, build_config
from sharpscope.errors import UserError
from sharpscope.recording import environment

LIMIT = 0.15
"""Recording by default should cost at most this share of TRL's own step."""


@dataclass(frozen=True)
class RecorderCost:
    """Seconds of each step, the first (a warm-up) left out, without and with the recorder."""

    plain: list[float]
    recorded: list[float]
    recording: list[float]  # what the trace itself says
    probed: list[bool]  # steps at which score norms and attribution were measured
    cpu_plain: float  # processor time of the same steps, which other programs on the machine hardly change
    cpu_recorded: float
    tokens: float  # mean loss tokens of a step
    completions: int
    threads: int
    device: str
    versions: dict[str, str]

    @property
    def share(self) -> float:
        """The recorder's time over TRL's, both over all measured steps."""
        return sum(self.recorded) / sum(self.plain) - 1

    @property
    def share_cpu(self) -> float:
        """The recorder's processor time over TRL's."""
        return self.cpu_recorded / self.cpu_plain - 1

    @property
    def share_recorded(self) -> float:
        """From the recorded training alone: the recorder's own clock (`recording_s`) over the rest of the same steps."""
        return sum(self.recording) / (sum(self.recorded) - sum(self.recording))

    def markdown(self) -> str:
        """The table that is committed."""
        ordinary = [r for r, probed in zip(self.recording, self.probed, strict=True) if not probed]
        probed = [r for r, probed in zip(self.recording, self.probed, strict=True) if probed]
        lines = [
            "# Recording a TRL trainer: what it costs",
            "",
            f"`python -m experiments.benchmarks trl`: GRPOTrainer on the embedded policy, {self.completions} completions and "
            f"{self.tokens:.0f} loss tokens a step, {self.threads} threads, {self.device}, "
            + ", ".join(f"{name} {number}" for name, number in self.versions.items())
            + f". The same {len(self.plain)} steps with and without the recorder (defaults: every token; score norms and "
            f"attribution at {len(probed)} of them).",
            "",
            "| | seconds |",
            "|---|---|",
            f"| TRL alone, median step | {statistics.median(self.plain):.3f} |",
            f"| with the recorder, median step | {statistics.median(self.recorded):.3f} |",
            f"| recorder, median of ordinary steps (its own clock) | {_median(ordinary)} |",
            f"| recorder, median of steps with token gradients (its own clock) | {_median(probed)} |",
            f"| TRL alone, all {len(self.plain)} steps | {sum(self.plain):.2f} |",
            f"| with the recorder, all {len(self.recorded)} steps | {sum(self.recorded):.2f} |",
            f"| TRL alone, processor time of all steps | {self.cpu_plain:.2f} |",
            f"| with the recorder, processor time of all steps | {self.cpu_recorded:.2f} |",
            "",
            f"Cost of recording: {self.share:.1%} of TRL's time by the wall clock, {self.share_cpu:.1%} by processor time, "
            f"{self.share_recorded:.1%} by the recorder's own clock; the limit is {LIMIT:.0%}.",
        ]
        return "\n".join(lines) + "\n"


def measure(steps: int = 10, threads: int | None = None, overrides: Sequence[str] = ()) -> RecorderCost:
    """Train twice from the same seed for `steps` measured steps, without and with the recorder at its defaults.

    Raises:
        UserError: TRL is not installed or not supported, or the two trainings were not the same.
    """
    values = {"evaluation.every": 0, "checkpoint.every": 0, "rollout.prompts_per_step": 12, "steps": steps + 1}
    values["update.mini_batches"] = 1  # as in TRL's setting
    config = build_config(None, [f"{path}={value}" for path, value in values.items()] + list(overrides))
    used = environment.set_threads(threads)
    with tempfile.TemporaryDirectory(prefix="sharpscope-bench-") as folder:
        plain, cpu_plain, weights, _ = _train(config, Path(folder) / "plain", used, record=False)
        recorded, cpu_recorded, same, table = _train(config, Path(folder) / "recorded", used, record=True)
    if not all(torch.equal(a, b) for a, b in zip(weights, same, strict=True)):
        raise UserError("bench trl: the recorded training came out different, so the two cannot be compared")
    return RecorderCost(
        plain=plain,
        recorded=recorded,
        cpu_plain=cpu_plain,
        cpu_recorded=cpu_recorded,
        recording=table["recording_s"].tolist()[1:],
        probed=table["probed"].tolist()[1:],
        tokens=float(table["tokens"].iloc[1:].mean()),
        completions=config.rollout.prompts_per_step * config.rollout.group_size,
        threads=used,
        device=environment.describe_device(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        versions={name: version(name) for name in ("trl", "transformers", "torch")},
    )


def _train(
    config: RunConfig, folder: Path, threads: int, record: bool
) -> tuple[list[float], float, list[torch.Tensor], Any]:
    """Seconds from each step's beginning to the next's (the first left out), their processor time, the final weights, and the
    trace's steps.
    """
    from transformers import TrainerCallback

    from sharpscope import record as record_trainer
    from sharpscope.traces import load_run

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[tuple[float, float]] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.times.append((time.perf_counter(), time.process_time()))

    clock = Clock()
    trainer = trl_trainer(config, folder, threads, [clock])
    if record:
        record_trainer(trainer, folder / "run")
    trainer.train()
    clock.on_step_begin()
    wall, cpu = zip(*clock.times, strict=True)
    seconds = [after - before for before, after in pairwise(wall)]
    weights = [parameter.detach().cpu() for parameter in trainer.model.parameters()]
    table = None
    if record:
        run = load_run(folder / "run")
        probed = set(run.tokens(columns=["step", "score_norm_local"]).dropna()["step"])
        table = run.steps.assign(probed=run.steps["step"].isin(probed))
    return seconds[1:], cpu[-1] - cpu[1], weights, table


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.3f}" if values else "none"
