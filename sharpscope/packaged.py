"""Where the files are that commands need: in the installed package, or in the checkout's `data/`."""

from __future__ import annotations

from pathlib import Path

from sharpscope.errors import UserError

PACKAGE = Path(__file__).resolve().parent


def data_roots() -> tuple[Path, ...]:
    """Folders that may hold the data, the first that has a file wins: an installed wheel's, a checkout's."""
    return (PACKAGE / "_data", PACKAGE.parent / "data")


def data_path(*parts: str) -> Path:
    """Path of a shipped file or folder, such as `data_path("policies", "knights_knaves")`.

    A wheel packs it under `sharpscope/_data`; an editable install reads the checkout's `data`.

    Raises:
        UserError: neither has it, or a part leads out of the data folder.
    """
    wanted = Path(*parts)
    if not parts or wanted.is_absolute() or ".." in wanted.parts:
        raise UserError(f"data path '{wanted}': must lie inside the shipped data; give its parts without '..'")
    for root in data_roots():
        if (root / wanted).exists():
            return root / wanted
    places = " or ".join(map(str, data_roots()))
    raise UserError(
        f"data '{wanted.as_posix()}' is not part of this installation (no such file in {places});"
        " install the package again, or run from a full checkout"
    )
