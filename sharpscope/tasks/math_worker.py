"""The process in which math-verify reads answers: a script of its own, killed by its parent when an answer takes too
long.

It prints "ready", then answers each line `[gold, answer]` (JSON) with `true` or `false`. Only the LaTeX grammar is
used: the plain-expression extractor of math-verify goes through Python's eval. Memory is limited, so that 9^9^9^9
cannot take the machine.
"""

import json
import logging
import sys

MEMORY = 4 << 30
"""Most address space the process may take [bytes]; where the system has no such limit, the time limit alone holds."""


def main() -> None:
    """Serve until the input ends."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass
    sys.set_int_max_str_digits(10_000)
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig()]

    def read(text: str) -> list:
        # math-verify's own time limit needs the main thread's signals; ours is the parent's kill
        return list(parse(f"${text}$", latex, fallback_mode="no_fallback", parsing_timeout=None))

    print("ready", flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            equal = bool(verify(read(gold), read(answer), timeout_seconds=None))
        except (Exception, RecursionError, MemoryError):
            equal = False
        print(json.dumps(equal), flush=True)


if __name__ == "__main__":
    main()
