"""The published claims C1–C13, each tested by a rule stated beforehand.

`test_claims(load_runs("runs"))` gives a `Verdict` a claim; `write_claims` puts them into claims.json and claims.md.
"""

from sharpscope.analysis.claims.base import Claim, Confounder, Estimate, Rows, Rule, Verdict
from sharpscope.analysis.claims.registry import CLAIMS, PRIMARY, study_of, test_claims
from sharpscope.analysis.claims.study import GRID, Study
from sharpscope.analysis.claims.writers import claims_json, claims_markdown, verdict_text, write_claims

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
    "study_of",
    "test_claims",
    "verdict_text",
    "write_claims",
]
