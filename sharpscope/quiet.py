"""Third-party warnings that users are not shown, each with the reason: none tells them what to do."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

OTHERS = r"(?!sharpscope\b|__main__$)"
"""Module names that are not ours, nor a user's script."""

SILENCED: tuple[tuple[type[Warning], str, str, str], ...] = (
    # category, start of the message, module, reason
    (
        FutureWarning,
        "",
        OTHERS,
        "tells a library's authors, not its users, what a dependency will change (peft, torch.jit.script)",
    ),
    (DeprecationWarning, "", OTHERS, "the same, where Python shows these"),
)
VARIABLES: tuple[tuple[str, str, str], ...] = (
    # environment variable, value unless set, reason
    ("TRANSFORMERS_VERBOSITY", "error", "we say in one line what is wrong with a model"),
    ("TOKENIZERS_PARALLELISM", "false", "its threads would fight torch's for the cores, and it warns after each fork"),
)


def silence() -> None:
    """Filter `SILENCED` and set `VARIABLES` for this process; for the command line, before anything heavy is imported."""
    for variable, value, _ in VARIABLES:
        os.environ.setdefault(variable, value)
    for category, message, module, _ in SILENCED:
        warnings.filterwarnings("ignore", message, category, module)


@contextmanager
def silenced() -> Iterator[None]:
    """Within it `SILENCED` is filtered; for library functions, which leave a program's filters as they were."""
    with warnings.catch_warnings():
        for category, message, module, _ in SILENCED:
            warnings.filterwarnings("ignore", message, category, module)
        yield
