"""Train an embedded policy from scratch on generated demonstrations, with the settings of the shipped one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.warm_start import warm_start
from sharpscope.config.run import EMBEDDED_NAMES
from sharpscope.errors import UserError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        UserError: the folder is not empty.
    """
    parser = argparse.ArgumentParser("python -m experiments.warm_start", description=__doc__)
    parser.add_argument(
        "policy", nargs="?", default="knights_knaves", choices=sorted(EMBEDDED_NAMES)
    )
    parser.add_argument("--out", type=Path, help="folder to write (default: policies/NAME)")
    parser.add_argument(
        "--threads", type=int, help="CPU threads, on which the weights depend (default: all cores)"
    )
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    out = options.out or Path("policies") / options.policy
    summary = warm_start(options.policy, out)
    print(f"{summary['parameters']:,} parameters, {summary['seconds']:.0f} s\nWritten: {out}/")
    print(f"use:    sharpscope eval {out} --task {options.policy}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
