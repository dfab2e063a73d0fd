"""Peak memory of one Hessian product at the shape of a real model, beyond parameters and vectors."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sharpscope.errors import UserError
from sharpscope.probes.hessian.causal_lm import lm_surface
from sharpscope.probes.objectives import Objective, token_batch

GIVEN_BACK = 128 * 1024
"""Size from which freed blocks go back to the system: glibc's own first setting, held fixed [bytes]."""


def peak_memory(
    *, vocabulary: int = 151_936, width: int = 896, tokens: int = 512, layers: int = 2, head_mb: float = 16.0
) -> dict[str, Any]:
    """Peak memory of one streamed product beyond parameters and vectors, in a process of its own (Linux).

    The shape is Qwen2.5-0.5B's with `layers` layers: random weights, tied embeddings, float32, batch 1. Vectors are the one
    that is multiplied and the product.

    glibc keeps freed blocks below a threshold that it raises up to 32 MiB, some 20 MiB a layer here, which says nothing of
    what a product holds; the process gives every freed block of more than GIVEN_BACK bytes back.

    Args:
        head_mb: blocks of the output layer [MiB].

    Raises:
        UserError: the process fails.
    """
    arguments = json.dumps(
        {"vocabulary": vocabulary, "width": width, "tokens": tokens, "layers": layers, "head_mb": head_mb}
    )
    command = [
        sys.executable,
        "-c",
        f"from experiments.benchmarks.curvature_memory import _measure_peak; _measure_peak({arguments!r})",
    ]
    environment = os.environ | {f"MALLOC_{name}_THRESHOLD_": str(GIVEN_BACK) for name in ("MMAP", "TRIM")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise UserError(f"bench curvature: the memory measurement failed: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _measure_peak(arguments: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    given = json.loads(arguments)
    config = Qwen2Config(
        vocab_size=given["vocabulary"],
        hidden_size=given["width"],
        intermediate_size=4864,
        num_hidden_layers=given["layers"],
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    ids = torch.randint(0, given["vocabulary"], (1, given["tokens"]), generator=torch.Generator().manual_seed(0))
    scored = torch.ones_like(ids)
    scored[0, 0] = 0
    objective = Objective("nll", token_batch(ids, torch.ones_like(ids), scored))
    with lm_surface(model, objective, mode="stream", head_mb=given["head_mb"]) as surface:
        operator = surface.hessian()
        vector = torch.randn(operator.size)
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free but not given back would hide some of the peak
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        began = time.perf_counter()
        with _touched():
            product = operator @ vector
        seconds, peak = time.perf_counter() - began, _status("VmHWM")
    logits = given["tokens"] * given["vocabulary"] * 4
    extra = peak - before - product.numel() * 4  # the product is a vector too
    report = {
        **given,
        "parameters": operator.size,
        "seconds": seconds,
        "extra_mb": extra / 2**20,
        "logits_mb": logits / 2**20,
    }
    print(json.dumps({**report, "ratio": extra / logits}))


@contextmanager
def _touched() -> Iterator[None]:
    """Within the block new zeros take their memory at once.

    The kernel would give it page by page as the product is written, and what is held in between would hide in pages that
    are not written yet.
    """
    lazy = torch.zeros

    def zeros(*args: Any, **options: Any) -> torch.Tensor:
        made = lazy(*args, **options)
        made.detach().fill_(0)
        return made

    try:
        torch.zeros = zeros
        yield
    finally:
        torch.zeros = lazy


def _status(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
