"""Counterfactual updates: what one update of each method changes, from the same state and on the same rollouts."""

from sharpscope.forks.experiment import fork
from sharpscope.forks.rotating import Rotations, rotate
