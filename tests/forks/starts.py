"""States that arms start from."""

from __future__ import annotations

from sharpscope.config import ForkSpec
from sharpscope.config.methods import parse_method
from sharpscope.forks.experiment import Measure
from sharpscope.forks.start import Start
from sharpscope.training.checkpoint import checkpoint_dir

SMALL = {"prompts": 3, "batches": 2}


def start_of(config, step=0, *, warm_up=4, **arms) -> Start:
    folder = checkpoint_dir(config.run_dir, step) if step else None
    return Start(config, arms or {"own": config.method}, folder, warm_up=warm_up, calibrating=2)


def rows_of(start, spec=None, batch=0):
    """Rows of all arms on a batch."""
    spec = spec or ForkSpec(**SMALL)
    return list(Measure(start, spec, spec.rho).batch_rows("x", batch))


def arm_method(text, config):
    """The method as an arm of a fork from a run."""
    return parse_method(text).with_preset(config.default_preset, "auto")
