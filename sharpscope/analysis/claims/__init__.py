"""The published claims, each tested by a rule stated beforehand, and checks of the recording.

`judge(study_of(load_runs("runs")))` gives a `Verdict` for each claim, and the checks; `write_claims` writes claims.json and claims.md.
`test_200_null_studies` in tests/analysis/claims/test_claims.py counts how often studies without any effect are called `supported`.
"""

from sharpscope.analysis.claims.base import ClaimData, Verdict
from sharpscope.analysis.claims.registry import (
    CLAIMS,
    REDUCERS,
    claim_names,
    claim_sections,
    judge,
    study_of,
    write_claims,
)
