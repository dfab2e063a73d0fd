"""States that arms start from."""

from __future__ import annotations

from sharpscope.config import ForkSpec
from sharpscope.config.methods import parse_method
from sharpscope.forks.start import Start
from sharpscope.tasks import make_task
from sharpscope.training.checkpoint import checkpoint_dir

SMALL = {"prompts": 3, "batches": 2}


def start_of(config, spec=None, step=0, **arms) -> Start:
    spec = spec or ForkSpec(**SMALL)
    folder = checkpoint_dir(config.run_dir, step) if step else None
    return Start(config, spec, arms or {"own": config.method}, folder, make_task(config.task))


def arm_method(text, config):
    """The method as an arm of a fork from a run."""
    return parse_method(text).with_preset(config.default_preset, "auto")
