"""Functions of the user's own, given by an import path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sharpscope.errors import UserError, nearest


def import_function(path: str, field: str) -> Callable[..., Any]:
    """The function at `package.module:function`. The module is looked for as Python does, then in the working directory.

    Raises:
        UserError: the module cannot be imported or has no such function; the message begins with `field`.
    """
    name, _, attribute = path.partition(":")
    before = list(sys.path)
    sys.path.append(str(Path.cwd()))  # an installed console script does not look where it is started
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever a user's module raises while it is imported
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{field} = {path!r}: importing {name!r} failed with {problem}") from error
    finally:
        sys.path[:] = before
    function = getattr(module, attribute, None)
    if not callable(function):
        hint = nearest(attribute, vars(module))
        raise UserError(f"{field} = {path!r}: module {name!r} has no function {attribute!r}{hint}")
    return function
