"""Worker process of `sharpscope.tasks.math`, a script that compares answers with math-verify; its parent enforces the time limit.

It prints "ready" and answers each line `[gold, answer]` (JSON) with `true` or `false`. Only LaTeX is parsed, because
math-verify's extractor of plain expressions uses Python's eval. Memory is limited because of answers such as 9^9^9^9.
"""

import json
import logging
import sys

MEMORY = 4 << 30
"""Limit of the address space [bytes], on systems that support one."""


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
    print("ready", flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        try:
            equal = bool(
                verify(*(parse(f"${text}$", **options) for text in texts), timeout_seconds=None)
            )
        except (Exception, RecursionError, MemoryError):
            equal = False
        print(json.dumps(equal), flush=True)


if __name__ == "__main__":
    main()
