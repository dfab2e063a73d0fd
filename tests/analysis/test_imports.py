"""The analysis reads traces: importing it, or the traces, never imports torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = (
    "sharpscope.traces",
    "sharpscope.analysis",
    "sharpscope.analysis.output",  # imports every other module of the package
    "sharpscope.analysis.reduction",
)


@pytest.mark.parametrize("module", MODULES)
def test_it_imports_without_torch(module):
    code = f"import sys, {module}; sys.exit(sum(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
