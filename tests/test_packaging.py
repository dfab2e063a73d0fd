"""What can be imported without torch; .ci/run tries the wheel in an empty folder."""

from __future__ import annotations

import subprocess
import sys


def test_imports_without_torch():
    """One process imports them in turn and names the first after which torch is there."""
    modules = ("config", "traces", "cli", "sweeps", "analysis.output", "analysis.reduction")
    code = (
        "import importlib, sys\n"
        f"for module in {modules}:\n"
        "    importlib.import_module('sharpscope.' + module)\n"
        "    if {'torch', 'transformers'} & set(sys.modules): sys.exit(module)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
