"""What is measured beside training: token gradients, influence, curvature. They observe and change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from sharpscope.policy import Policy
from sharpscope.tasks import Task
from sharpscope.training.learning import Learner
from sharpscope.training.rounds import Round

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


class Observers:
    """Runs the probes that are due at a step; `columns` and `rows` are what they found."""

    def __init__(self, config: RunConfig, policy: Policy, task: Task, learner: Learner) -> None:
        self.seconds = 0.0

    def begin(self, step: int, drawn: Round, recent: list[float]) -> None:
        """Learn what this step's updates will be about."""
        self.seconds = 0.0

    def columns(self) -> dict[str, Tensor]:
        """Probe columns of the tokens table, (N, T) each, NaN where nothing was measured."""
        return {}

    def rows(self) -> dict[str, dict[str, Any]]:
        """Rows of other tables, by table."""
        return {}
