"""The published claims C1–C14, each tested by a rule stated beforehand; one module per claim.

`test_claims(load_runs("runs"))` gives a `Verdict` for each claim; `write_claims` writes them to claims.json and claims.md.
`tests/analysis/claims/test_claims_null.py` counts how often studies without any effect are called `supported`.
"""

from sharpscope.analysis.claims.base import Claim, Confounder, Estimate, Rows, Rule, Verdict
from sharpscope.analysis.claims.declaration import check_terms, declare, declared_rules, quote
from sharpscope.analysis.claims.registry import (
    CLAIMS,
    REDUCERS,
    claim_names,
    claim_pictures,
    study_of,
    test_claims,
    verdicts_of,
)
from sharpscope.analysis.claims.writers import (
    LIMITS,
    UNDECLARED,
    claims_json,
    claims_markdown,
    verdict_text,
    versions,
    write_claims,
)

__all__ = [
    "CLAIMS",
    "LIMITS",
    "REDUCERS",
    "UNDECLARED",
    "Claim",
    "Confounder",
    "Estimate",
    "Rows",
    "Rule",
    "Verdict",
    "check_terms",
    "claim_names",
    "claim_pictures",
    "claims_json",
    "claims_markdown",
    "declare",
    "declared_rules",
    "quote",
    "study_of",
    "test_claims",
    "verdict_text",
    "verdicts_of",
    "versions",
    "write_claims",
]
