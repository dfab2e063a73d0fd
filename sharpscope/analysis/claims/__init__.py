"""The published claims C1–C13, each tested by a rule stated beforehand.

`test_claims(load_runs("runs"))` gives a `Verdict` a claim; `write_claims` puts them into claims.json and claims.md.

How often 200 studies in which nothing is true were called `supported` (nominal 5 % two-sided, before Holm): C2 10, C3 0,
C4 0, C5 3, C6 4, C7 1, C8 4, C9 4, C10 0, C11 0, C12 0, C13 0. C2's studies had the slope at the edge of the margin. C4,
C10 and C12 need several tests to agree and C13 a further condition, so they stay far below their level; C3's and C11's
truths lie on the side of refutation. `tests/analysis/claims/test_null_studies.py` repeats it.
"""

from sharpscope.analysis.claims.base import Claim, Confounder, Estimate, Rows, Rule, Verdict
from sharpscope.analysis.claims.registry import CLAIMS, PRIMARY, reducers_of_all, study_of, test_claims
from sharpscope.analysis.claims.writers import claims_json, claims_markdown, verdict_text, write_claims
from sharpscope.analysis.study import GRID, Study

__all__ = [
    "CLAIMS",
    "GRID",
    "PRIMARY",
    "Claim",
    "Confounder",
    "Estimate",
    "Rows",
    "Rule",
    "Study",
    "Verdict",
    "claims_json",
    "claims_markdown",
    "reducers_of_all",
    "study_of",
    "test_claims",
    "verdict_text",
    "write_claims",
]
