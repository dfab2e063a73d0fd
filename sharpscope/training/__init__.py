"""Training: rollouts, updates, evaluation and checkpoints, recorded as traces."""

from sharpscope.training.evaluate import evaluate, evaluate_model
from sharpscope.training.learner import Learner
from sharpscope.training.loop import Display, Outcome, train
from sharpscope.training.rollouts import DataOrder
