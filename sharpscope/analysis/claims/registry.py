"""All claims by name, and the functions that test them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sharpscope.analysis.claims import accuracy, entropy, gap, gradients, sharpness, tokens
from sharpscope.analysis.claims.base import Claim, Verdict, decide
from sharpscope.analysis.claims.checks import CHECKS, Check
from sharpscope.analysis.study import DEFAULT, Study, Terms
from sharpscope.errors import UserError, nearest

if TYPE_CHECKING:
    from sharpscope.traces import Runs

CLAIMS: dict[str, Claim] = {
    claim.name: claim
    for claim in (
        tokens.C2,
        tokens.C3,
        sharpness.C4,
        gap.C6,
        accuracy.C7,
        gradients.C8,
        tokens.C9,
        accuracy.C10,
        entropy.C12,
        gradients.C13,
        accuracy.C14,
    )
}
_READ = [reducer for _, reducer in CHECKS.values()] + [r for claim in CLAIMS.values() for r in claim.reducers]
REDUCERS = tuple(dict.fromkeys(_READ))
"""Everything that claims need of whole token tables, and that a reduced copy of a run keeps in their place."""


def test_claims(
    runs: Runs,
    claims: Sequence[str] | None = None,
    *,
    baseline: str = "grpo",
    treatment: str | None = None,
    ignore: Sequence[str] = (),
    terms: Terms | None = None,
) -> list[Verdict]:
    """A verdict for each claim.

    The primary claims (C7, C4, C10) have a fixed order, and all of them are tested whichever are asked for, so that a verdict
    does not depend on what else was asked.

    Args:
        runs: from `load_runs`; unfinished ones are left out and named.
        claims: names, e.g. ["C7"]; None: all.
        baseline, treatment: names of the two methods compared, as in run.json; None: see `study_of`.
        ignore: settings in which the two runs of a pair may differ, e.g. optimizer.lr if it was tuned for each method.
        terms: margins, level, order and least dose; None: those of the rules.

    Raises:
        UserError: an unknown claim, an unknown treatment, or a method compared with itself.
    """
    names = [name for name in claim_names(claims) if name in CLAIMS]
    study = study_of(runs, baseline, treatment, ignore, terms)
    read(study, names)
    return verdicts_of(study, names)


test_claims.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever its name looks like


def read(study: Study, names: Sequence[str]) -> None:
    """Stream the token tables once for the claims `names`, and for the checks of these names."""
    reducers = [reducer for name in _tested(names, study.terms) for reducer in CLAIMS[name].reducers]
    study.read_tokens(list(dict.fromkeys([*reducers, *(CHECKS[name][1] for name in names if name in CHECKS)])))


def verdicts_of(study: Study, names: Sequence[str] = tuple(CLAIMS)) -> list[Verdict]:
    """The verdicts on the claims `names`; the study has read the tokens that they need.

    A primary verdict is confirmatory if every claim before it in the order has the same verdict: testing in a fixed order and
    stopping at the first claim that is not rejected keeps the chance of any wrong rejection at the level (Maurer, Hothorn and
    Lehmacher 1995), for `supported` and for `refuted` separately.
    """

    def verdict(claim: Claim) -> Verdict:
        return decide(claim, claim.measure(study), (study.baseline, study.treatment), study.terms)

    result: dict[str, Verdict] = {}
    for name in _tested(names, study.terms):
        claim = CLAIMS[name]
        result[name] = replace(verdict(claim), other=None if claim.other is None else verdict(claim.other))
    largest, before = 0.0, set[str]()
    for name in study.terms.order:
        if name in result:
            found = result[name]
            before.add(found.verdict)
            largest = max(largest, 1.0 if found.p_value is None else found.p_value)
            adjusted, alike = None if found.p_value is None else largest, before in ({"supported"}, {"refuted"})
            result[name] = replace(found, p_adjusted=adjusted, confirmatory=alike)
    return [result[name] for name in names if name in result]


def checks_of(study: Study, names: Sequence[str] = tuple(CHECKS)) -> list[Check]:
    """Checks of the recording; the study has read the tokens that they need."""
    return [CHECKS[name][0](study) for name in names if name in CHECKS]


def study_of(
    runs: Runs,
    baseline: str = "grpo",
    treatment: str | None = None,
    ignore: Sequence[str] = (),
    terms: Terms | None = None,
) -> Study:
    """The runs laid out for comparing two methods.

    Args:
        runs, baseline, ignore, terms: see `test_claims`.
        treatment: None: grpo-sg where it was run, or else the other method with the most finished runs.

    Raises:
        UserError: a method compared with itself, or one that no finished run has; it lists those that are there.
    """
    study = Study(runs.by_name, baseline, treatment or "grpo-sg", tuple(ignore), terms=terms or DEFAULT)
    there = {method: len(study.of(method)) for method in study.methods}
    if treatment is None:
        others = [method for method in there if method != baseline]
        if others and study.treatment not in there:
            study.treatment = max(others, key=lambda method: there[method])
        return study
    if baseline == treatment:
        raise UserError(f"treatment {treatment}: the same as the baseline; give another method")
    for field, method in (("baseline", baseline), ("treatment", treatment)):
        if (
            there
            and method not in there
            and not any(method in set(run.forks.get("arm", ())) for run in runs.by_name.values())
        ):
            listed = ", ".join(f"{name} ({count})" for name, count in there.items())
            raise UserError(f"{field} {method}: no finished run of it; there are runs of {listed}")
    return study


def claim_names(claims: Sequence[str] | None) -> list[str]:
    """The claims asked for, in order and upper case; None: all. C1 is a check of the recording and among them.

    Raises:
        UserError: an unknown claim.
    """
    known = ["C1", *CLAIMS]
    if claims is None:
        return known
    asked = [claims] if isinstance(claims, str) else list(claims)
    for name in asked:
        if name.upper() not in known:
            raise UserError(f"claim {name}: no such claim{nearest(name.upper(), known)}")
    wanted = {name.upper() for name in asked}
    return [name for name in known if name in wanted]


def _tested(names: Sequence[str], terms: Terms) -> list[str]:
    """The claims asked for, and with any primary one all primary ones."""
    return [name for name in CLAIMS if name in names or (name in terms.order and set(names) & set(terms.order))]
