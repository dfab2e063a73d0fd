"""Worker process of `sharpscope.tasks.math`, a script that compares answers with math-verify, each for a limited time.

It prints "ready" and answers each line `[gold, answer, seconds]` (JSON) with `true`, `false`, or `null` after that time. A
forked process compares; where it takes too long it is killed, and the next one needs no import. Only LaTeX is parsed, because
math-verify's extractor of plain expressions uses Python's eval. Memory is limited because of answers such as 9^9^9^9.
"""

import json
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence

MEMORY = 2 << 30
"""Limit of the address space [bytes], on systems that support one."""

Compare = Callable[[Sequence[str]], bool]


class Comparer:
    """A forked process that compares answers, one line after the other."""

    def __init__(self, compare: Compare) -> None:
        requests, self.requests = os.pipe()
        self.answers, answers = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(self.requests)
            os.close(self.answers)
            with os.fdopen(requests, encoding="utf-8") as lines:
                for line in lines:
                    os.write(answers, b"1" if compare(json.loads(line)) else b"0")
            os._exit(0)
        os.close(requests)
        os.close(answers)

    def ask(self, texts: Sequence[str], seconds: float) -> bool | None:
        """Whether the texts are equal; None after `seconds`, or if the process died. It is of no more use then."""
        os.write(self.requests, f"{json.dumps(texts)}\n".encode())
        ready, _, _ = select.select([self.answers], [], [], seconds)
        answer = os.read(self.answers, 1) if ready else b""
        return answer == b"1" if answer else None

    def close(self) -> None:
        """End the process."""
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.requests)
        os.close(self.answers)


def main() -> None:
    """Answer requests until the input ends."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass
    sys.set_int_max_str_digits(10_000)
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    options = {
        "extraction_config": [LatexExtractionConfig()],
        "fallback_mode": "no_fallback",
        "parsing_timeout": None,
    }

    def compare(texts: Sequence[str]) -> bool:
        """Whether two mathematical expressions are equal; False where one cannot be read."""
        try:
            parsed = (parse(f"${text}$", **options) for text in texts)
            return bool(verify(*parsed, timeout_seconds=None))
        except (Exception, RecursionError, MemoryError):
            return False

    compare(["\\frac{1}{2}", "0.5"])  # what is loaded at the first use is loaded once
    print("ready", flush=True)
    comparer = None
    for line in sys.stdin:
        *texts, seconds = json.loads(line)
        equal: bool | None
        if hasattr(os, "fork"):
            comparer = comparer or Comparer(compare)
            equal = comparer.ask(texts, seconds)
            if equal is None:
                comparer.close()
                comparer = None
        else:
            equal = compare(texts)
        print(json.dumps(equal), flush=True)
    if comparer is not None:
        comparer.close()


if __name__ == "__main__":
    main()
