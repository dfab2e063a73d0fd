"""Data files: their paths, in the installed package or in `data/` of a checkout, and the YAML files of packages."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from sharpscope.errors import UserError

PACKAGE = Path(__file__).resolve().parent


def package_yaml(package: str, file: str) -> Any:
    """The content of a YAML file in one of our packages, such as `package_yaml("sharpscope.rules", "table.yaml")`."""
    text = resources.files(package).joinpath(file).read_text("utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def data_path(*parts: str) -> Path:
    """Path of a packaged file or folder, such as `data_path("policies", "knights_knaves")`.

    A wheel contains the data in `sharpscope/_data`; an editable install uses `data` of the checkout.

    Raises:
        UserError: the path does not exist, or is outside the data folder.
    """
    path = Path(*parts)
    if not parts or path.is_absolute() or ".." in path.parts:
        raise UserError(
            f"data path '{path}': outside the packaged data; use a relative path without '..'"
        )
    roots = (PACKAGE / "_data", PACKAGE.parent / "data")
    for root in roots:
        if (root / path).exists():
            return root / path
    places = " or ".join(map(str, roots))
    raise UserError(
        f"data '{path.as_posix()}': not found in {places}; install the package again or use a checkout"
    )
