"""Suppressed third-party warnings, which users cannot act on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

OTHERS = r"(?!sharpscope\b|__main__$)"
"""Pattern for modules other than sharpscope and the user's script."""

SILENCED: tuple[tuple[type[Warning], str, str, str], ...] = (
    # category, start of the message, module, reason
    (
        FutureWarning,
        "",
        OTHERS,
        "addressed to the authors of a library, not to its users (peft, torch.jit.script)",
    ),
    (DeprecationWarning, "", OTHERS, "the same"),
)
VARIABLES: tuple[tuple[str, str, str], ...] = (
    # environment variable, value unless set, reason
    ("TRANSFORMERS_VERBOSITY", "error", "sharpscope reports problems of a model itself"),
    ("TOKENIZERS_PARALLELISM", "false", "its threads compete with those of torch, and it warns after each fork"),
)


def silence() -> None:
    """Filter `SILENCED` and set `VARIABLES` for this process. The command line calls it before other imports."""
    for variable, value, _ in VARIABLES:
        os.environ.setdefault(variable, value)
    for category, message, module, _ in SILENCED:
        warnings.filterwarnings("ignore", message, category, module)


@contextmanager
def silenced() -> Iterator[None]:
    """Context manager that filters `SILENCED` and restores the warning filters at exit."""
    with warnings.catch_warnings():
        for category, message, module, _ in SILENCED:
            warnings.filterwarnings("ignore", message, category, module)
        yield
