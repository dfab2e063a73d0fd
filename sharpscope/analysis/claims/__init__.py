"""The published claims C1–C13, each tested by a rule stated beforehand; one module per claim.

`test_claims(load_runs("runs"))` gives a `Verdict` for each claim; `write_claims` writes them to claims.json and claims.md.

How often 200 studies without any effect were called `supported` (nominal 5 % two-sided, before Holm): C2 10, C3 0, C4 0,
C5 3, C6 4, C7 1, C8 4, C9 4, C10 0, C11 0, C12 0, C13 0. C2's studies had the slope at the edge of the margin. C4, C10 and
C12 need several tests to agree and C13 a further condition, so they stay far below their level; C3's and C11's truths lie on
the side of refutation. `tests/analysis/claims/test_null_studies.py` repeats it.
"""

from sharpscope.analysis.claims.base import Claim, Confounder, Estimate, Rows, Rule, Verdict
from sharpscope.analysis.claims.registry import (
    CLAIMS,
    PRIMARY,
    REDUCERS,
    claim_pictures,
    study_of,
    test_claims,
    verdicts_of,
)
from sharpscope.analysis.claims.writers import LIMITS, claims_json, claims_markdown, verdict_text, write_claims

__all__ = [
    "CLAIMS",
    "LIMITS",
    "PRIMARY",
    "REDUCERS",
    "Claim",
    "Confounder",
    "Estimate",
    "Rows",
    "Rule",
    "Verdict",
    "claim_pictures",
    "claims_json",
    "claims_markdown",
    "study_of",
    "test_claims",
    "verdict_text",
    "verdicts_of",
    "write_claims",
]
