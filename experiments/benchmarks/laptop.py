"""Diagnostics at the shape of Qwen2.5-0.5B on a CPU: local score norms and SAM sharpness, minutes and memory (Linux).

Weights are random and nothing is downloaded. Each part runs in a process of its own, so that peaks do not mix.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.cell import SHAPES
from sharpscope.errors import UserError

RATIO, MEMORY_GIB = 1.5, 1.6
"""Limits of the local norms of 512 tokens: in forward and backward passes over them, and above weights and gradient [GiB]."""

PARTS = ("norms", "sam")

GIVEN_BACK = 128 * 1024  # freed blocks of more bytes than this return to the system


def measure(part: str, shape: str, layers: int | None, threads: int, repeats: int) -> dict[str, Any]:
    """Measure one part in a process of its own.

    Args:
        part: `norms` (a row of 512 tokens) or `sam` (8 rows of 256 tokens).
        shape: Name in `cell.SHAPES`.
        layers: Number of layers; None for the shape's.
        threads: Threads of torch.
        repeats: Measurements of norms and of forward and backward, alternating.

    Raises:
        UserError: The process fails.
    """
    given = json.dumps({"part": part, "shape": shape, "layers": layers, "threads": threads, "repeats": repeats})
    code = f"from experiments.benchmarks.laptop import _measure; _measure({given!r})"
    environment = os.environ | {f"MALLOC_{name}_THRESHOLD_": str(GIVEN_BACK) for name in ("MMAP", "TRIM")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise UserError(f"laptop: the part {part} failed: {done.stderr.strip().splitlines()[-1:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _measure(arguments: str) -> None:
    """Entry point of the process: print the numbers as JSON."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    given = json.loads(arguments)
    torch.set_num_threads(given["threads"])
    sizes = SHAPES[given["shape"]]
    if given["layers"] is not None:
        sizes = sizes | {"num_hidden_layers": given["layers"]}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)).eval()
    found = {
        **given,
        "layers": sizes["num_hidden_layers"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
    }
    measured = _norms(model, given["repeats"]) if given["part"] == "norms" else _sam(model)
    print(json.dumps(found | measured))


def _norms(model: Any, repeats: int) -> dict[str, Any]:
    """Local norms of a row of 512 tokens against a forward and backward pass over it."""
    from sharpscope.probes.token_gradients import score_norms

    ids = torch.randint(0, model.config.vocab_size, (1, 512), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 0] = 0

    def passes() -> None:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()

    passes()  # allocates the gradient, which then counts as held
    score_norms(model, ids[:, :16], mask[:, :16])  # checks the tier on this model once
    both, norms = [], []
    for _ in range(repeats):
        both.append(_timed(passes))
        norms.append(_timed(lambda: score_norms(model, ids, mask)))
    best_both, best_norms = min(both), min(norms)
    return {
        "seconds": best_norms[0],
        "cpu_seconds": best_norms[1],
        "extra_gib": max(extra for *_, extra in norms) / 2**30,
        "passes_seconds": best_both[0],
        "passes_cpu_seconds": best_both[1],
        "passes_extra_gib": max(extra for *_, extra in both) / 2**30,
        "ratios": [b[0] / a[0] for a, b in zip(both, norms, strict=True)],
        "cpu_ratios": [b[1] / a[1] for a, b in zip(both, norms, strict=True)],
    }


def _sam(model: Any) -> dict[str, Any]:
    """SAM sharpness of the mean NLL of 8 rows of 256 tokens."""
    from sharpscope.probes.language_model import lm_surface
    from sharpscope.probes.objectives import Objective, token_batch
    from sharpscope.probes.perturbation import sharpness

    ids = torch.randint(0, model.config.vocab_size, (8, 256), generator=torch.Generator().manual_seed(0))
    scored = torch.ones_like(ids)
    scored[:, 0] = 0
    objective = Objective("nll", token_batch(ids, torch.ones_like(ids), scored))
    result: dict[str, Any] = {}

    def probe() -> None:
        with lm_surface(model, objective, microbatch_tokens=512) as surface:
            sharp = sharpness(surface, None, 0.05, "sam")
        result.update(value=sharp.value, first_order=sharp.first_order, loss=sharp.loss)

    wall, cpu, extra = _timed(probe)
    return result | {"seconds": wall, "cpu_seconds": cpu, "extra_gib": extra / 2**30}


def _timed(work: Callable[[], Any]) -> tuple[float, float, int]:
    """Wall seconds, processor seconds and peak bytes above what is held before."""
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu, _status("VmHWM") - before


def _status(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def report(found: Sequence[dict[str, Any]]) -> str:
    """The result as a page of Markdown."""
    first = found[0]
    lines = [
        "# A 0.5B model on a CPU",
        "",
        f"`python -m experiments.benchmarks laptop`: random weights at the shape `{first['shape']}` ({first['layers']} layers, "
        f"{first['parameters']:,} parameters, tied embeddings, vocabulary {SHAPES[first['shape']]['vocab_size']:,}), float32 "
        f"({first['parameters'] * 4 / 2**30:.2f} GiB of weights), threads: {first['threads']}, torch {first['torch']}. Memory is the "
        "peak of the process above the weights (and, for norms and passes, the gradient).",
        "",
        "| | minutes (wall) | minutes (processor) | GiB above |",
        "|---|---|---|---|",
    ]
    notes = []
    for one in found:
        if one["part"] == "norms":
            lines.append(_row("forward and backward, 512 tokens", one, "passes_"))
            lines.append(_row("local norms of 512 tokens", one))
            ratio, cpu = min(one["ratios"]), min(one["cpu_ratios"])
            notes.append(
                f"Local norms in forward and backward passes: **{ratio:.2f}** by the wall clock ({_range(one['ratios'])}), "
                f"{cpu:.2f} by processor time ({_range(one['cpu_ratios'])}); limit {RATIO:g}. Memory: "
                f"**{one['extra_gib']:.2f} GiB** above weights and gradient; limit {MEMORY_GIB:g}."
            )
        else:
            lines.append(_row("SAM sharpness, 8 rows of 256 tokens", one))
            notes.append(
                f"SAM sharpness at radius 0.05: {one['value']:.4g} nats; first order {one['first_order']:.4g}."
            )
    return "\n".join([*lines, "", *notes]) + "\n"


def _row(name: str, one: dict[str, Any], prefix: str = "") -> str:
    wall, cpu = one[f"{prefix}seconds"] / 60, one[f"{prefix}cpu_seconds"] / 60
    return f"| {name} | {wall:.2f} | {cpu:.2f} | {one[f'{prefix}extra_gib']:.2f} |"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f}–{max(values):.2f}"
