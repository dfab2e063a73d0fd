"""All token statistics against log-softmax and gather alone, at a large vocabulary: the price of more than logp."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sharpscope.policy.head import Head
from sharpscope.policy.token_stats import STAT_NAMES, cache_budget, chunks, flat_stats, logit_stats


@dataclass(frozen=True)
class StatsCost:
    """Median seconds for the same tokens.

    Attributes:
        log_softmax_s: log-softmax of all logits at once, then gather.
        log_softmax_blocked_s: the same in blocks that fit the processor's cache, the hardest rival.
        statistics_s: all of `TokenStats` from the same logits.
        head_s: the output layer and log-softmax and gather.
        head_statistics_s: the output layer and all of `TokenStats`, as training runs it.
    """

    log_softmax_s: float
    log_softmax_blocked_s: float
    statistics_s: float
    head_s: float
    head_statistics_s: float

    @property
    def ratio(self) -> float:
        """Statistics / log-softmax and gather, logits given."""
        return self.statistics_s / self.log_softmax_s

    @property
    def ratio_blocked(self) -> float:
        """Statistics / blocked log-softmax and gather, logits given."""
        return self.statistics_s / self.log_softmax_blocked_s

    @property
    def ratio_with_head(self) -> float:
        """The same with the output layer on both sides."""
        return self.head_statistics_s / self.head_s


def measure(
    tokens: int = 96, vocabulary: int = 151_936, width: int = 896, repeats: int = 7, device: str = "cpu"
) -> StatsCost:
    """Times of both ways, taken in turns in one run.

    Args:
        tokens: tokens M.
        vocabulary: V; the default is Qwen2.5's.
        width: d of the hidden states; the default is that of its 0.5 B model.
        repeats: measurements of each, of which the median counts.
        device: where.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(device)
    head = Head((torch.randn(vocabulary, width, generator=generator) / width**0.5 * 3).to(device))
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator).to(device)
    logits = head.logits(hidden)
    blocks = chunks(tokens, vocabulary * 4, logits.device, cache_budget())

    def whole(z: Tensor) -> None:
        torch.log_softmax(z, 1).gather(1, targets[:, None])

    def blocked(z: Tensor) -> None:
        for start, stop in blocks:
            torch.log_softmax(z[start:stop], 1).gather(1, targets[start:stop, None])

    def everything(z: Tensor) -> None:
        logit_stats(z, targets, 1.0, {name: torch.empty(tokens, device=device) for name in STAT_NAMES})

    ways: list[Callable[[Tensor], object]] = [
        whole,
        blocked,
        everything,
        lambda _: whole(head.logits(hidden)),
        lambda _: flat_stats(hidden, head, targets, 1.0),
    ]
    seconds: list[list[float]] = [[] for _ in ways]
    with torch.no_grad():
        for _ in range(repeats + 1):
            for way, times in zip(ways, seconds, strict=True):
                z = logits.clone()  # the statistics overwrite their logits
                _wait(device)
                start = time.perf_counter()
                way(z)
                _wait(device)
                times.append(time.perf_counter() - start)
    return StatsCost(*(statistics.median(times[1:]) for times in seconds))  # the first round warms up


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
