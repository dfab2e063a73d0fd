"""The price of recording at the default intervals, without a budget, from training steps of the embedded policy."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import pandas as pd

from sharpscope.config import build_config
from sharpscope.config.training import DEFAULT_INTERVALS
from sharpscope.training import train


@dataclass(frozen=True)
class RecordingCost:
    """Median seconds of a step.

    Attributes:
        step: generation and training, without any recording.
        plain: recording of a step on which nothing is due but the tables.
        gradients: of one with score norms, attribution and exact norms.
        influence: of one with held-out influence.
    """

    step: float
    plain: float
    gradients: float
    influence: float

    @property
    def recording(self) -> float:
        """Seconds a step of tables, score norms and shares, at the default schedule (spikes, which come rarely, left out)."""
        return self.plain + (self.gradients - self.plain) / DEFAULT_INTERVALS["token_gradients_every"]

    @property
    def with_influence(self) -> float:
        """`recording` and held-out influence, which is no part of every token's record but has a default schedule too."""
        return self.recording + (self.influence - self.plain) / DEFAULT_INTERVALS["heldout_influence_every"]

    def share(self, recording: float) -> float:
        """The part of a run's time that `recording` seconds a step are, evaluation left out."""
        return recording / (self.step + recording)


def recording_cost(repeats: int = 3, threads: int = 1, overrides: tuple[str, ...] = ()) -> RecordingCost:
    """Train twice for a few steps: every second step records score norms and shares in the one, influence in the other.

    A step's time without recording comes from the same steps. The first step of a run warms up.
    """
    gradients = _steps(repeats, threads, ("recording.heldout_influence_every=0", *overrides), "token_gradients_every")
    influence = _steps(repeats, threads, ("recording.token_gradients_every=0", *overrides), "heldout_influence_every")
    both = pd.concat([gradients, influence])
    on, off = _every_second(gradients), both[both["step"] % 2 == 1]
    return RecordingCost(
        float((both["generation_s"] + both["training_s"]).median()),
        float(off["recording_s"].median()),
        float(on["recording_s"].median()),
        float(_every_second(influence)["recording_s"].median()),
    )


def _every_second(steps: pd.DataFrame) -> pd.DataFrame:
    return steps[steps["step"] % 2 == 0]


def _steps(repeats: int, threads: int, overrides: tuple[str, ...], schedule: str) -> pd.DataFrame:
    from sharpscope.traces import load_run

    with tempfile.TemporaryDirectory(prefix="sharpscope-bench-") as folder:
        own = (
            "evaluation.every=0",
            "checkpoint.every=0",
            "recording.spike_z=null",
            "recording.rotation_every=0",
            f"recording.{schedule}=2",
            "recording.group_share=1",
            f"steps={2 * repeats + 1}",
            "update.mini_batches=1",
            f"threads={threads}",
            f"out={folder}/bench",
        )
        return load_run(train(build_config(None, [*own, *overrides])).run_dir).steps.iloc[1:]
