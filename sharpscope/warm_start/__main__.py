"""Train an embedded policy from scratch on generated demonstrations; the defaults recreate the shipped one.

Examples:
    python -m sharpscope.warm_start knights_knaves --out policies/mine --set steps=2500
    python -m sharpscope.warm_start tool_qa --threads 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from sharpscope.errors import UserError
from sharpscope.warm_start import WARM_STARTS, warm_start


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        UserError: a field or its value is not valid, or the folder is not empty.
    """
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m sharpscope.warm_start", description=__doc__, formatter_class=style)
    parser.add_argument("policy", nargs="?", default="knights_knaves", choices=tuple(WARM_STARTS))
    parser.add_argument("--out", type=Path, help="folder to write (default: policies/NAME)")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of WarmStartSpec")
    parser.add_argument("--threads", type=int, help="CPU threads, on which the weights depend (default: all cores)")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    spec = WARM_STARTS[options.policy]
    for setting in options.set:
        name, _, text = setting.partition("=")
        default: Any = getattr(spec, name, None)
        value: Any = yaml.safe_load(text)
        value = float(value) if isinstance(default, float) and type(value) is int else value
        if type(value) is not type(default):
            raise UserError(f"--set {setting}: no such field, or not of the type of its default, {default!r}")
        spec = replace(spec, **{name: value})
    out = options.out or Path("policies") / options.policy
    tell = "update {} of {}: loss {:.3f} nats/token".format
    summary = warm_start(spec, out, lambda step, loss: print(tell(step, spec.steps, loss)))
    print(f"{summary['parameters']:,} parameters, {summary['seconds']:.0f} s\nWritten: {out}/")
    print(f"use:    sharpscope eval {out} --task {options.policy}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
