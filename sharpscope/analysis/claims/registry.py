"""All claims by name, and the functions that test them together and draw their figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sharpscope.analysis.claims import (
    c01_logit_bounds,
    c02_score_norm,
    c03_dominance,
    c04_sharpness,
    c05_bound,
    c06_gap,
    c07_generalization,
    c08_smoothness,
    c09_influence,
    c10_alignment,
    c11_oscillator,
    c12_entropy,
    c13_lucky,
    c14_learning_rate,
)
from sharpscope.analysis.claims.base import Claim, Verdict, decide
from sharpscope.analysis.figures.style import Picture
from sharpscope.analysis.study import Study
from sharpscope.analysis.terms import DEFAULT, Terms
from sharpscope.analysis.tokens import DECILE_SUMS
from sharpscope.errors import UserError, nearest

if TYPE_CHECKING:
    from sharpscope.traces import Runs

_ALL = (
    c01_logit_bounds.CLAIM,
    c02_score_norm.CLAIM,
    c03_dominance.CLAIM,
    c04_sharpness.CLAIM,
    c05_bound.CLAIM,
    c06_gap.CLAIM,
    c07_generalization.CLAIM,
    c08_smoothness.CLAIM,
    c09_influence.CLAIM,
    c10_alignment.CLAIM,
    c11_oscillator.CLAIM,
    c12_entropy.CLAIM,
    c13_lucky.CLAIM,
    c14_learning_rate.CLAIM,
)
CLAIMS: dict[str, Claim] = {claim.name: claim for claim in _ALL}
REDUCERS = (*(reducer for claim in _ALL for reducer in claim.reducers), *DECILE_SUMS)
"""Everything that claims and figures need of whole token tables, and that `reduce` keeps in their place."""


def test_claims(
    runs: Runs,
    claims: Sequence[str] | None = None,
    *,
    baseline: str = "grpo",
    treatment: str = "grpo-sg",
    ignore: Sequence[str] = (),
    terms: Terms | None = None,
) -> list[Verdict]:
    """A verdict for each claim.

    The primary claims (C7, C4, C10) have a fixed order, and all of them are tested whichever are asked for, so that a verdict
    does not depend on what else was asked.

    Args:
        runs: from `load_runs`; unfinished ones are left out and named.
        claims: names, e.g. ["C7"]; None: all.
        baseline, treatment: names of the two methods compared, as in run.json. Where a claim says GRPO-SG it is tested on
            `treatment`. If no run has one of them, the claims that need it are untestable and say so.
        ignore: settings in which the two runs of a pair may differ, e.g. optimizer.lr if it was tuned for each method.
        terms: margins, level, order and least dose; None: those of the rules.

    Raises:
        UserError: an unknown claim, or a method compared with itself.
    """
    names = claim_names(claims)
    study = study_of(runs, baseline, treatment, ignore, terms)
    study.read_tokens([reducer for name in _tested(names, study.terms) for reducer in CLAIMS[name].reducers])
    return verdicts_of(study, names)


test_claims.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever its name looks like


def verdicts_of(study: Study, names: Sequence[str] = tuple(CLAIMS)) -> list[Verdict]:
    """The verdicts on the claims `names`; the study has read the tokens that they need.

    A primary verdict is confirmatory if every claim before it in the order has the same verdict: testing in a fixed order and
    stopping at the first claim that is not rejected keeps the chance of any wrong rejection at the level (Maurer, Hothorn and
    Lehmacher 1995), for `supported` and for `refuted` separately.
    """
    methods = (study.baseline, study.treatment)
    result: dict[str, Verdict] = {}
    for name in _tested(names, study.terms):
        claim = CLAIMS[name]
        verdict = decide(claim, claim.test(study), methods, study.terms)
        if claim.beside is not None:
            beside = decide(claim.beside, claim.beside.test(study), methods, study.terms)
            verdict = replace(verdict, beside=beside)
        result[name] = verdict
    largest, before = 0.0, set[str]()
    for name in study.terms.order:
        if name not in result:
            continue
        verdict = result[name]
        before.add(verdict.verdict)
        largest = max(largest, 1.0 if verdict.p_value is None else verdict.p_value)
        adjusted = None if verdict.p_value is None else largest
        confirmatory = before in ({"supported"}, {"refuted"})
        result[name] = replace(verdict, p_adjusted=adjusted, confirmatory=confirmatory)
    return [result[name] for name in names]


def claim_pictures(verdicts: Sequence[Verdict], study: Study) -> Iterator[Picture]:
    """The figures of the claims that compare methods or arms, in the claims' order; of a claim's version beside it after its own."""
    for verdict in verdicts:
        claim = CLAIMS[verdict.claim]
        if claim.draw is not None:
            yield from claim.draw(verdict, study)
        if claim.beside is not None and claim.beside.draw is not None and verdict.beside is not None:
            yield from claim.beside.draw(verdict.beside, study)


def study_of(
    runs: Runs,
    baseline: str = "grpo",
    treatment: str = "grpo-sg",
    ignore: Sequence[str] = (),
    terms: Terms | None = None,
) -> Study:
    """The runs laid out for comparing two methods.

    Raises:
        UserError: a method compared with itself.
    """
    if baseline == treatment:
        raise UserError(f"treatment {treatment}: the same as the baseline; give another method")
    return Study(runs.by_name, baseline, treatment, tuple(ignore), terms=terms or DEFAULT)


def claim_names(claims: Sequence[str] | None) -> list[str]:
    """The claims asked for, in order and upper case; None: all.

    Raises:
        UserError: an unknown claim.
    """
    if claims is None:
        return list(CLAIMS)
    asked = [claims] if isinstance(claims, str) else list(claims)
    for name in asked:
        if name.upper() not in CLAIMS:
            raise UserError(f"claim {name}: no such claim{nearest(name.upper(), CLAIMS)}")
    wanted = {name.upper() for name in asked}
    return [name for name in CLAIMS if name in wanted]


def _tested(names: Sequence[str], terms: Terms) -> list[str]:
    """The claims asked for, and with any primary one all primary ones."""
    return [name for name in CLAIMS if name in names or (name in terms.order and set(names) & set(terms.order))]
