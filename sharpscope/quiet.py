"""What users of the command line are not shown: warnings that they cannot act on, loading bars, lines of source."""

from __future__ import annotations

import os
import warnings
from typing import Any

OTHERS = r"(?!sharpscope\b|__main__$)"
"""Pattern for modules other than sharpscope and the user's script."""

SILENCED: tuple[tuple[type[Warning], str], ...] = (
    (FutureWarning, OTHERS),  # to the authors of a library, not to its users (peft, torch.jit.script)
    (DeprecationWarning, OTHERS),
    (RuntimeWarning, ""),  # of NumPy: a mean of nothing, a division by 0; the result is empty and shown so
)
"""Category and module of warnings that are not shown."""

VARIABLES: dict[str, str] = {
    "TRANSFORMERS_VERBOSITY": "error",  # sharpscope reports problems of a model itself
    "TOKENIZERS_PARALLELISM": "false",  # its threads compete with those of torch, and it warns after each fork
}
"""Environment variables that are set unless they are."""


def silence() -> None:
    """Filter `SILENCED`, set `VARIABLES` and print other warnings as one line. The command line calls it before imports."""
    for variable, value in VARIABLES.items():
        os.environ.setdefault(variable, value)
    for category, module in SILENCED:
        warnings.filterwarnings("ignore", category=category, module=module)
    warnings.formatwarning = _one_line


def _one_line(message: Any, *_: Any, **__: Any) -> str:
    """A warning without the file and the line of source that it comes from."""
    return f"warning: {' '.join(str(message).split())}\n"
