"""All claims by name, and the functions that test them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sharpscope.analysis.claims import accuracy, entropy, gradients, sharpness, tokens
from sharpscope.analysis.claims.base import Claim, Verdict, decide
from sharpscope.analysis.claims.gradients import CHECKS, Check
from sharpscope.analysis.measures import dose_of
from sharpscope.analysis.study import Study
from sharpscope.config import ClaimsSpec
from sharpscope.errors import UserError, nearest
from sharpscope.traces import Runs

_CLAIMS = (
    *(tokens.C2, tokens.C3, sharpness.C4, sharpness.C6, accuracy.C7, gradients.C8),
    *(tokens.C9, accuracy.C10, entropy.C12, gradients.C13, accuracy.C14),
)
CLAIMS: dict[str, Claim] = {claim.name: claim for claim in _CLAIMS}
_READ = [reducer for _, reducer in CHECKS.values()] + [r for claim in CLAIMS.values() for r in claim.reducers]
REDUCERS = tuple(dict.fromkeys(_READ))
"""Everything that claims need of whole token tables, and that a reduced copy of a run keeps in their place."""


def judge(study: Study, names: Sequence[str] | None = None) -> tuple[list[Verdict], list[Check]]:
    """The verdicts on the claims `names` (None: all) and the checks of these names; the token tables are read once.

    The primary claims (C7, C4, C10) have a fixed order, and all of them are tested whichever are asked for, so that a verdict does
    not depend on what else was asked.
    A primary verdict is confirmatory if every claim before it in the order has the same verdict: testing in a fixed order and
    stopping at the first claim that is not rejected keeps the chance of any wrong rejection at the level (Maurer, Hothorn and
    Lehmacher 1995), for `supported` and for `refuted` separately.
    """
    names, order = claim_names(names), study.terms.order
    claims = {n: c for n, c in CLAIMS.items() if n in names or (n in order and set(names) & set(order))}
    checks = {name: check for name, check in CHECKS.items() if name in names}
    reducers = [reducer for claim in claims.values() for reducer in claim.reducers] + [r for _, r in checks.values()]
    study.read_tokens(list(dict.fromkeys(reducers)))
    left, listed = len(study.unfinished), ", ".join(study.unfinished[:5]) + " …" * (len(study.unfinished) > 5)
    unfinished = (f"{left} unfinished runs are left out: {listed}",) * bool(left)

    def verdict(claim: Claim) -> Verdict:
        """The verdict on one version of a claim."""
        found = claim.measure(study)
        if claim.compares and found.dose is None:
            found = replace(found, dose=dose_of(study.alike(study.treatment).values(), study.treatment))
        return decide(claim, replace(found, notes=(*found.notes, *unfinished)), study.terms)

    result = {
        name: replace(verdict(claim), other=None if claim.other is None else verdict(claim.other))
        for name, claim in claims.items()
    }
    largest, before = 0.0, set[str]()
    for name in order:
        if name in result:
            found = result[name]
            before.add(found.verdict)
            largest = max(largest, 1.0 if found.p_value is None else found.p_value)
            adjusted, alike = None if found.p_value is None else largest, before in ({"supported"}, {"refuted"})
            result[name] = replace(found, p_adjusted=adjusted, confirmatory=alike)
    return [result[name] for name in names if name in result], [check(study) for check, _ in checks.values()]


def study_of(
    runs: Runs, baseline: str = "grpo", treatment: str | None = None, terms: ClaimsSpec | None = None
) -> Study:
    """The runs laid out for comparing two methods.

    Args:
        runs: from `load_runs`; unfinished ones are left out and named.
        baseline, treatment: names of the two methods compared, as in run.json. Treatment None: grpo-sg where it was run, or else the
            other method with the most finished runs.
        terms: margins, level, order and least dose; None: those of the rules.

    Raises:
        UserError: a method compared with itself, or one that no finished run has; it lists those that are there.
    """
    study = Study(runs.by_name, baseline, treatment or "grpo-sg")
    there = {method: len(study.of(method)) for method in study.methods}
    others = [method for method in there if method != baseline]
    if treatment is None and others and study.treatment not in there:
        study.treatment = max(others, key=lambda method: there[method])
    methods = {"baseline": baseline, "treatment": study.treatment}
    study.terms = (terms or ClaimsSpec()).model_copy(update=methods)
    if baseline == treatment:
        raise UserError(f"treatment {treatment}: the same as the baseline; give another method")
    arms = {arm for run in runs.by_name.values() for arm in run.forks.get("arm", ())} | set(there)
    for field, method in methods.items() if treatment is not None and there else ():
        if method not in arms:
            listed = ", ".join(f"{name} ({count})" for name, count in there.items())
            raise UserError(f"{field} {method}: no finished run of it; there are runs of {listed}")
    return study


def claim_names(claims: Sequence[str] | None) -> list[str]:
    """The claims asked for, in order and upper case; None: all. C1 is a check of the recording and among them.

    Raises:
        UserError: an unknown claim.
    """
    known = ["C1", *CLAIMS]
    wanted = known if claims is None else [name.upper() for name in ([claims] if isinstance(claims, str) else claims)]
    for name in wanted:
        if name not in known:
            raise UserError(f"claim {name}: no such claim{nearest(name, known)}")
    return [name for name in known if name in wanted]
