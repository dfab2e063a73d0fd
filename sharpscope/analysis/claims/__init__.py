"""The published claims, each tested by a rule stated beforehand, and checks of the recording.

`test_claims(load_runs("runs"))` gives a `Verdict` for each claim; `write_claims` writes them to claims.json and claims.md.
`tests/analysis/claims/test_null.py` counts how often studies without any effect are called `supported`.
"""

from sharpscope.analysis.claims.base import ClaimData, Verdict
from sharpscope.analysis.claims.registry import CLAIMS, REDUCERS, claim_names, judge, study_of, test_claims
from sharpscope.analysis.claims.writers import claim_sections, write_claims
