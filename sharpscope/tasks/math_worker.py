"""Worker process of `math_scoring`, a script that compares answers with math-verify; its parent enforces the time limit.

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

    latex = [LatexExtractionConfig()]

    def parse_latex(text: str) -> list:
        """What math-verify reads in LaTeX; the parent process enforces the time limit."""
        return list(parse(f"${text}$", latex, fallback_mode="no_fallback", parsing_timeout=None))

    print("ready", flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        try:
            equal = bool(verify(parse_latex(gold), parse_latex(answer), timeout_seconds=None))
        except (Exception, RecursionError, MemoryError):
            equal = False
        print(json.dumps(equal), flush=True)


if __name__ == "__main__":
    main()
