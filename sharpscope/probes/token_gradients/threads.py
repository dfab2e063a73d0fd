"""Work on a CPU in as many threads as PyTorch was given, each on a job of its own.

Many small operations gain little from two threads at each of them; whole backward passes side by side use both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def in_threads(jobs: Iterable[Callable[[], T]], threads: int) -> Iterator[T]:
    """Results of the jobs, in their order. The iterable is advanced in this thread, a few jobs ahead of the results.

    Meanwhile every operation runs in one thread; afterwards, also after an error, in `threads` of them again.
    """
    if threads == 1:
        for job in jobs:
            yield job()
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            waiting: deque[Future[T]] = deque()
            for job in jobs:
                waiting.append(pool.submit(job))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    finally:
        torch.set_num_threads(threads)
