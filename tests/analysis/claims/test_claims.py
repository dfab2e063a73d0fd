"""Every claim on studies whose truth is known, and the rule that turns tests into a verdict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis import claims
from sharpscope.analysis.claims.base import ClaimData, decide
from sharpscope.config import ClaimsSpec
from sharpscope.errors import UserError
from tests.analysis.claims.frames import frame_run, paired_study, study, tokens_frame
from tests.analysis.claims.planted import MAKERS, NOT_SUPPORTED, made, verdict, verdicts


@pytest.mark.parametrize("claim", MAKERS)
def test_planted_truths_are_found_and_heavy_tails_hide_nothing_and_make_nothing(claim):
    found = verdict(made(claim, "effect"), claim)
    assert found.verdict == "supported", found.line()
    assert verdict(made(claim, "none"), claim).verdict in NOT_SUPPORTED
    assert verdict(made(claim, "wrong"), claim).verdict == "refuted"
    assert verdict(made(claim, "effect", "heavy"), claim).verdict in ("supported", "inconclusive")
    assert verdict(made(claim, "none", "heavy"), claim).verdict in NOT_SUPPORTED


@pytest.mark.parametrize(
    ("claim", "name", "size", "none"),
    [("C2", "slope", 1.0, 0.0), ("C3", "concentration", 3.5, 0.0), ("C9", "low_influence", -2.0, 0.0)],
)
def test_tokens_that_share_a_shift_in_each_step_mislead_nobody(claim, name, size, none):
    """Tokens of a step are not independent: what they share must neither make an effect nor hide one."""
    for value in (size, none):
        rng = np.random.default_rng(3)
        frames = [tokens_frame(rng, 8, 200, correlated=0.5, **{name: value}) for _ in range(3)]
        found = verdict(study(*(frame_run(seed=s, tokens=frame) for s, frame in enumerate(frames))), claim)
        found = found.other if claim == "C9" else found  # the version of recorded tokens
        assert (found.verdict == "supported") is (value == size)


@pytest.mark.parametrize("claim", ["C4", "C7", "C8"])
def test_a_learning_rate_that_differs_between_the_methods_is_refused_by_name(claim):
    measure = {"C4": {"measure": "sharpness", "base": 0.1, "noise": 0.005}}.get(claim, {})
    runs = paired_study(10, 0.3, treatment_config={"optimizer": {"lr": 3e-4}}, relative=True, **measure)
    result = verdict(runs, claim)
    assert result.verdict == "untestable" and "optimizer.lr (0.0001 and 0.0003)" in result.reason


def test_methods_are_named_found_and_refused():
    runs = paired_study(12, 0.1, treatment="gspo")
    result = verdict(runs, "C7", treatment="gspo")
    assert result.verdict == "supported" and result.terms.treatment == "gspo" and "gspo generalizes" in result.title
    assert verdict(runs, "C7").terms.treatment == "gspo"  # there is no grpo-sg: the method that was run
    with pytest.raises(UserError, match=r"treatment grpo-sg: no finished run .* there are runs of grpo \(12\), gspo"):
        verdicts(runs, treatment="grpo-sg")
    with pytest.raises(UserError, match="treatment grpo"):
        verdicts(runs, treatment="grpo")
    with pytest.raises(UserError, match="no such claim; did you mean 'C"):
        verdicts(runs, ["C15"])


def test_a_verdict_on_a_primary_claim_does_not_depend_on_what_else_was_asked():
    runs = made("C7", "effect")
    alone, among = verdict(runs, "C7"), {v.claim.name: v for v in verdicts(runs)}["C7"]
    assert alone.to_dict() == among.to_dict()
    assert alone.p_adjusted == alone.p_value  # C7 is the first in the order


@pytest.mark.parametrize("claim", ["C2", "C3", "C9", "C12", "C13"])
def test_other_settings_and_other_tasks_are_mixed_into_no_claim(claim):
    """Runs at another learning rate and of another task, with the opposite truth and other seeds, change nothing but a note."""
    runs = list(made(claim, "effect").by_name.values())
    seeds = sorted({run.seed for run in runs})[: max(1, len({run.seed for run in runs}) - 1)]
    others = []
    for run in made(claim, "wrong", stream=1).by_name.values():
        if run.seed in seeds:
            hot = {**run.config, "optimizer": {**run.config["optimizer"], "lr": 9e-4}}
            others.append(replace(run, name=f"hot-{run.name}", seed=run.seed + 50, config=hot))
            others.append(replace(run, name=f"math-{run.name}", seed=run.seed + 70, task="math"))
    alone, among = verdict(study(*runs), claim), verdict(study(*others, *runs), claim)
    assert (alone.verdict, alone.n, alone.effect) == (among.verdict, among.n, among.effect)
    assert alone.evidence == among.evidence


@pytest.mark.parametrize("claim", ["C4", "C7", "C8"])
def test_a_method_that_hardly_turns_the_update_is_not_compared(claim):
    runs = made(claim, "effect")
    for run in runs.by_name.values():
        run.steps["update_rotation"], run.steps["noise_rotation"] = 2.0, 60.0
    found = verdict(runs, claim)
    text = "the weights of grpo-sg turned the update by 2°, the batch's noise by 60°; the rule needs 5°"
    assert found.verdict == "untestable" and found.reason == text
    for run in runs.by_name.values():
        run.steps["update_rotation"] = 20.0
    assert verdict(runs, claim).verdict == "supported"


def test_a_sample_that_can_give_only_one_verdict_gives_none():
    """Seven pairs and eight rivals: supported was possible, refuted was not, whatever the data."""

    def decided(n):
        parts = {str(k): pd.DataFrame({"seed": range(n), "difference": -1.0}) for k in range(8)}
        return decide(claims.CLAIMS["C10"], ClaimData(parts=parts), ClaimsSpec())

    assert decided(7).verdict == "untestable"
    assert "no p below 0.0625 for refuted" in decided(7).reason and "1 more" in decided(7).reason
    assert decided(8).verdict == "refuted"


def test_the_fixed_order_marks_what_is_confirmatory():
    """C7 and C10 are refuted, C4 between them is not: only C7 is confirmatory."""
    runs = made("C10", "wrong")
    found = {v.claim.name: v for v in verdicts(runs, ["C4", "C7", "C10"])}
    assert [found[name].verdict for name in ("C7", "C4", "C10")] == ["refuted", "untestable", "refuted"]
    assert [found[name].confirmatory for name in ("C7", "C4", "C10")] == [True, False, False]
    assert found["C10"].p_adjusted == 1.0 and found["C7"].p_adjusted == found["C7"].p_value
