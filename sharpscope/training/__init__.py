"""Training: rollouts, updates, evaluation and checkpoints, recorded as traces."""

from sharpscope.recording import pass_at_k
from sharpscope.training.display import Display, QuietDisplay, RichDisplay
from sharpscope.training.evaluate import evaluate
from sharpscope.training.evaluate_model import evaluate_model
from sharpscope.training.loop import Outcome, train
from sharpscope.training.rotating import Rotations, rotate

__all__ = [
    "Display",
    "Outcome",
    "QuietDisplay",
    "RichDisplay",
    "Rotations",
    "evaluate",
    "evaluate_model",
    "pass_at_k",
    "rotate",
    "train",
]
