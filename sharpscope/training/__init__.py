"""Training: rollouts, updates, evaluation and checkpoints, recorded as traces."""

from sharpscope.recording import pass_at_k
from sharpscope.training.data_order import DataOrder
from sharpscope.training.display import Display, QuietDisplay, RichDisplay, minutes
from sharpscope.training.evaluate import evaluate
from sharpscope.training.evaluate_model import evaluate_model
from sharpscope.training.learner import AppliedUpdate, Learner
from sharpscope.training.loop import Outcome, train
from sharpscope.training.rotating import Rotations, rotate

__all__ = [
    "AppliedUpdate",
    "DataOrder",
    "Display",
    "Learner",
    "Outcome",
    "QuietDisplay",
    "RichDisplay",
    "Rotations",
    "evaluate",
    "evaluate_model",
    "minutes",
    "pass_at_k",
    "rotate",
    "train",
]
