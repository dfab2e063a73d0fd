"""Entry point `verl.plugins`: records where the environment variable SHARPSCOPE_VERL names a folder, else does nothing.

verl logs a plugin that fails to load at its debug level only, so this one prints it; the actor says that it records.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "SHARPSCOPE_VERL"


def load() -> None:
    """Install the recorder, or print why it could not be."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    try:
        from sharpscope.integrations.verl import install

        install(folder)
    except Exception as problem:
        sys.stderr.write(
            f"sharpscope: {VARIABLE}={folder}: not recording ({type(problem).__name__}: {problem})\n"
        )
        raise


load()
