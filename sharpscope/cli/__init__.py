"""The `sharpscope` command line: one module per group of commands."""

from __future__ import annotations

from sharpscope.cli.app import app, in_one_line, main, printable

__all__ = ["app", "in_one_line", "main", "printable"]
