"""The `sharpscope` command line, with one module per group of commands."""

from __future__ import annotations

from sharpscope.cli.app import app, main
