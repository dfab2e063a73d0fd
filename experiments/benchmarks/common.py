"""Models, clocks and the table of the benchmarks."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sharpscope.config import build_config
from sharpscope.policy import load_policy

ROOT = Path(__file__).resolve().parents[2]
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "layers": 2,
        "width": 32,
        "heads": 4,
        "key_heads": 2,
        "feed_forward": 48,
        "vocabulary": 512,
    },
    "0.9m": {
        "layers": 4,
        "width": 128,
        "heads": 4,
        "key_heads": 4,
        "feed_forward": 384,
        "vocabulary": 624,
    },
    "135m": {
        "layers": 30,
        "width": 576,
        "heads": 9,
        "key_heads": 3,
        "feed_forward": 1536,
        "vocabulary": 49_152,
    },
    "0.5b": {
        "layers": 24,
        "width": 896,
        "heads": 14,
        "key_heads": 2,
        "feed_forward": 4864,
        "vocabulary": 151_936,
    },
    "1.5b": {
        "layers": 28,
        "width": 1536,
        "heads": 12,
        "key_heads": 2,
        "feed_forward": 8960,
        "vocabulary": 151_936,
    },
    "3b": {
        "layers": 36,
        "width": 2048,
        "heads": 16,
        "key_heads": 2,
        "feed_forward": 11_008,
        "vocabulary": 151_936,
    },
    "7b": {
        "layers": 28,
        "width": 3584,
        "heads": 28,
        "key_heads": 4,
        "feed_forward": 18_944,
        "vocabulary": 152_064,
    },
}
"""Sizes of the embedded policy (0.9m), SmolLM2 (135m) and Qwen2.5 models, with tied embeddings; `tiny` is for tests."""
FIELDS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "feed_forward": "intermediate_size",
    "vocabulary": "vocab_size",
}


@dataclass(frozen=True)
class Row:
    """One line of the table: a measured number, what is required of it, and what would be better still."""

    measure: str
    value: float
    unit: str
    required: str = ""
    stretch: str = ""
    note: str = ""
    turns: tuple[float, ...] = ()

    @classmethod
    def of_turns(cls, measure: str, turns: Sequence[float], unit: str, *texts: str) -> Row:
        """A row of what several turns gave, whose median counts; `texts`: required, stretch, note."""
        required, stretch, note = (*texts, "", "", "")[:3]
        value = statistics.median(turns)
        return cls(measure, value, unit, required, stretch, note, tuple(turns))

    @property
    def measured(self) -> str:
        """The number with its unit; after it, of turns, the smallest and the largest one."""
        said = f"{self.value:.3g} {self.unit}".strip()
        if not self.turns:
            return said
        return f"{said} ({min(self.turns):.3g} to {max(self.turns):.3g}, {len(self.turns)} turns)"


@dataclass(frozen=True)
class Cost:
    """Processor seconds, wall seconds and peak bytes above what was held before."""

    cpu: float
    wall: float
    extra: int

    def over(self, other: Cost) -> float:
        """Ratio of processor times; of wall times on a GPU, whose processor time says little."""
        return self.wall / other.wall if torch.cuda.is_available() else self.cpu / other.cpu


def cost(work: Callable[[], object]) -> Cost:
    """The cost of one call."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        held = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.process_time() - cpu, time.perf_counter() - wall
    return Cost(*seconds, (torch.cuda.max_memory_allocated() if cuda else _status("VmHWM")) - held)


def peak(work: Callable[[], object]) -> int:
    """Peak bytes of a call above what was held, of tensors: as PyTorch's allocator reports them."""
    if torch.cuda.is_available():
        return cost(work).extra
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    return int(max(itertools.accumulate(size for _, size in changes), default=0))


def _status(field: str) -> int:
    """A line of /proc/self/status in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def child(
    arguments: Sequence[str], folder: str, allowed: Collection[int] = (0,)
) -> tuple[float, float, str]:
    """Wall and processor seconds and output of a Python process, as a new user would start it.

    Raises:
        RuntimeError: it ended with a status that is not `allowed`.
    """
    unset = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | {
        "PYTHONPATH": str(ROOT)
    }
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode not in allowed:
        raise RuntimeError(f"{' '.join(arguments[:3])}: {done.stderr[-300:]}")
    return time.perf_counter() - began, cpu, done.stdout


def costs(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[Cost]]:
    """Costs of each piece of work in turns, which alternate between them, after a first call of each."""
    found: dict[str, list[Cost]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            one = cost(work)
            if repeat:
                found[name].append(one)
    return found


def ratios(costs: Sequence[Cost], others: Sequence[Cost]) -> list[float]:
    """The ratio of each turn."""
    return [one.over(other) for one, other in zip(costs, others, strict=True)]


def seconds(costs: Sequence[Cost]) -> str:
    """Median processor seconds, in words."""
    return f"{statistics.median(one.cpu for one in costs):.3g} s"


def random_model(
    shape: Mapping[str, int], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> nn.Module:
    """A randomly initialized Qwen2 in eval mode, its embeddings tied; what `shape` leaves out is as in the embedded policy."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    fields = {name: (SHAPES["0.9m"] | dict(shape))[short] for short, name in FIELDS.items()}
    special = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    config = Qwen2Config(
        **fields, **special, tie_word_embeddings=True, max_position_embeddings=4096
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)
    return model.eval()


def model_of(name: str) -> nn.Module:
    """A model by name: a shape of `SHAPES` with random weights, `embedded:NAME`, or a folder; float32, in eval mode."""
    if name in SHAPES:
        return random_model(SHAPES[name])
    return load_policy(build_config(None, [f"policy.model={name}"]).policy).model.eval()


def random_rows(model: nn.Module, rows: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens (rows, length) and a mask that marks all but the first of each row."""
    device = next(model.parameters()).device
    size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    ids = torch.randint(2, size, (rows, length), generator=torch.Generator().manual_seed(seed)).to(
        device
    )
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    return ids, mask


def plain_gradient(
    model: nn.Module, ids: Tensor, microbatch: int | None = None
) -> Callable[[], None]:
    """A forward and backward pass of the mean negative log-likelihood, in plain PyTorch, in microbatches of about 1,024 tokens."""
    microbatch = microbatch or max(8, 1024 // ids.shape[1])

    def work() -> None:
        for rows in ids.split(microbatch):
            logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            (loss * len(rows) / len(ids)).backward()

    return work


def plain_forward(model: nn.Module, ids: Tensor, microbatch: int = 8) -> Callable[[], None]:
    """A forward pass to the log-probabilities, in plain PyTorch."""

    @torch.no_grad()
    def work() -> None:
        for rows in ids.split(microbatch):
            logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
            logits.log_softmax(-1).gather(-1, rows[:, 1:, None])

    return work


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, after a line on the machine."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    state = "quiet" if load < 0.5 * cores else "busy"
    lines = [
        f"{device}, {cores} cores, {torch.get_num_threads()} threads, load {load:.1f} ({state}), torch {torch.__version__}",
        "",
        "| measure | measured | required | stretch | |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.measure} | {row.measured} | {row.required} | {row.stretch} | {row.note} |"
        )
    return "\n".join(lines) + "\n"


def described(model: Any) -> str:
    """The number of parameters in words."""
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.3g} M parameters"
