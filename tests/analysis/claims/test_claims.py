"""Claims on studies of known truth, the rule that turns tests into a verdict, what misled version 0.2; declarations, files and power."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from matplotlib.figure import Figure

from experiments.studies.levels import DESIGNS, outcomes
from sharpscope.analysis import claims
from sharpscope.analysis.claims import registry
from sharpscope.analysis.claims.base import ClaimData, decide
from sharpscope.analysis.claims.registry import (
    RECOMMENDED,
    check_terms,
    declare,
    declared_rules,
    deviation_interval,
    pairs_needed,
    powers_of,
    quote,
    student_power,
)
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.text import escape_markdown
from sharpscope.config import ClaimsSpec
from sharpscope.errors import UserError
from sharpscope.traces import load_runs
from tests.analysis.claims.planted import (
    MAKERS,
    NOT_SUPPORTED,
    SEEDS,
    frame_run,
    made,
    paired_study,
    study,
    tokens_frame,
    verdict,
    verdicts,
)
from tests.traces.synthetic import Effects, Shape, write_study


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
    [
        ("C2", "slope", 1.0, 0.0),
        ("C3", "concentration", 3.5, 0.0),
        ("C9", "low_influence", -2.0, 0.0),
    ],
)
def test_tokens_that_share_a_shift_in_each_step_mislead_nobody(claim, name, size, none):
    """Tokens of a step are not independent: what they share must neither make an effect nor hide one."""
    for value in (size, none):
        rng = np.random.default_rng(3)
        frames = [tokens_frame(rng, 8, 200, correlated=0.5, **{name: value}) for _ in range(3)]
        found = verdict(
            study(*(frame_run(seed=s, tokens=frame) for s, frame in enumerate(frames))), claim
        )
        found = found.other if claim == "C9" else found  # the version of recorded tokens
        assert (found.verdict == "supported") is (value == size)


def test_methods_are_named_found_and_refused():
    runs = paired_study(12, 0.1, treatment="gspo")
    result = verdict(runs, "C7", treatment="gspo")
    assert (
        result.verdict == "supported"
        and result.terms.treatment == "gspo"
        and "gspo generalizes" in result.title
    )
    # there is no grpo-sg: the method that was run
    assert verdict(runs, "C7").terms.treatment == "gspo"
    with pytest.raises(
        UserError,
        match=r"treatment grpo-sg: no finished run .* there are runs of grpo \(12\), gspo",
    ):
        verdicts(runs, treatment="grpo-sg")
    with pytest.raises(UserError, match="treatment grpo"):
        verdicts(runs, treatment="grpo")
    with pytest.raises(UserError, match="no such claim; did you mean 'C"):
        verdicts(runs, ["C15"])
    hot = paired_study(10, 0.3, treatment_config={"optimizer": {"lr": 3e-4}}, relative=True)
    result = verdict(hot, "C7")
    assert result.verdict == "untestable" and "optimizer.lr (0.0001 and 0.0003)" in result.reason


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


def test_a_method_that_hardly_turns_the_update_is_not_compared():
    runs = made("C8", "effect")
    for angle, expected in ((2.0, "untestable"), (20.0, "supported")):
        for run in runs.by_name.values():
            run.steps["update_rotation"], run.steps["noise_rotation"] = angle, 60.0
        found = verdict(runs, "C8")
        assert found.verdict == expected
        if angle == 2:
            text = "the weights of grpo-sg turned the update by 2°, the batch's noise by 60°; the rule needs 5°"
            assert found.reason == text


def test_a_sample_that_can_give_only_one_verdict_gives_none():
    """Seven pairs and eight rivals: supported was possible, refuted was not, whatever the data."""

    def decided(n):
        parts = {str(k): pd.DataFrame({"seed": range(n), "difference": -1.0}) for k in range(8)}
        return decide(claims.CLAIMS["C10"], ClaimData(parts=parts), ClaimsSpec())

    assert decided(7).verdict == "untestable"
    assert "no p below 0.0625 for refuted" in decided(7).reason and "1 more" in decided(7).reason
    assert decided(8).verdict == "refuted"


def test_the_fixed_order_marks_what_is_confirmatory_whatever_else_was_asked():
    """C7 and C10 are refuted, C4 between them is not: only C7 is confirmatory."""
    runs = made("C10", "wrong")
    c4, c7, c10 = verdicts(runs, ["C4", "C7", "C10"])
    assert [v.verdict for v in (c7, c4, c10)] == ["refuted", "untestable", "refuted"]
    assert [v.confirmatory for v in (c7, c4, c10)] == [True, False, False]
    assert c10.p_adjusted == 1.0 and c7.p_adjusted == c7.p_value
    assert verdict(runs, "C10").to_dict() == c10.to_dict()


# -- Sharpness: saturation, radius and probe set


def probed(method, seed, rises, ceiling, probe_set="train-0"):
    probes = [
        {
            "step": step,
            "quantity": q,
            "rho": rho,
            "value": rise,
            "ceiling": ceiling,
            "probe_set": probe_set,
        }
        for q in ("sam", "asam")
        for rho, rise in rises.items()
        for step in (0, 40)
    ]
    return frame_run(method, seed, probes=probes)


def sharpness_verdict(seeds, **methods):
    """C4 of runs whose rises (by radius), ceiling and probe set are a function of the seed."""
    runs = [
        probed(name.replace("_", "-"), seed, *of(seed))
        for seed in range(seeds)
        for name, of in methods.items()
    ]
    return verdict(study(*runs), "C4")


def test_equal_curvature_and_lower_accuracy_do_not_support_lower_sharpness():
    """The rise is a fixed share of the correct completions in both arms; the treatment has 10 % fewer of them."""
    rng = np.random.default_rng(0)

    def arm(accuracy):
        return lambda seed: ({0.05: 0.15 * np.exp(0.03 * rng.normal()) * accuracy}, accuracy)

    found = sharpness_verdict(12, grpo=arm(0.5), grpo_sg=arm(0.45))
    assert found.verdict in ("refuted", "inconclusive")
    raw = next(
        other
        for other in found.others
        if "SAM sharpness at matched step, the rise itself" in other.name
    )
    assert raw.value < -0.05 and raw.p_value < 0.05  # what version 0.2 called support


@pytest.mark.parametrize(("ceiling", "estimated"), [(0.3, False), (None, True)])
def test_a_saturated_radius_is_marked_and_enters_no_verdict(ceiling, estimated):
    """Where the ceiling is not recorded, the training accuracy, 0.6, stands for it."""
    found = sharpness_verdict(
        8, grpo=lambda _: ({0.5: 0.295}, ceiling), grpo_sg=lambda _: ({0.5: 0.25}, ceiling)
    )
    assert found.verdict == "untestable" and "radius 0.5 is saturated" in found.reason
    assert (
        "probes.rho" in found.reason and ("ceiling: training accuracy" in found.reason) is estimated
    )


def test_the_radius_is_the_one_that_all_runs_share_and_is_named():
    """The treatment was probed at smaller radii alone, where any run is less sharp: that is no effect of the method."""

    def arm(*radii):
        return lambda seed: ({rho: 2 * rho * (1 + 0.1 * seed) for rho in radii}, 0.9)

    found = sharpness_verdict(8, grpo=arm(0.01, 0.05, 0.5), grpo_sg=arm(0.01, 0.05))
    assert found.verdict != "supported" and found.effect.value == 0 and found.n == 8
    assert any("radius 0.05, shared by all runs" in note for note in found.finding.notes)


def test_sharpness_is_compared_on_one_probe_set_for_each_pair():
    """Seeds may have questions of their own; the two runs of a pair must not."""

    def judged(differing):
        def arm(method, rise):
            return lambda s: (
                {0.05: rise * (1 + 0.1 * s)},
                0.9,
                f"train-{method if s < differing else s}",
            )

        return sharpness_verdict(8, grpo=arm("grpo", 0.1), grpo_sg=arm("sg", 0.05))

    assert judged(0).n == 8 and judged(0).effect.value == pytest.approx(math.log(0.5))
    found = judged(2)
    assert found.n == 6 and any(
        "2 pairs were not probed, or not on one probe set" in n for n in found.finding.notes
    )
    assert judged(8).verdict == "untestable"


# -- Accuracy: temperature and collapse


def accuracies(greedy, sampled, seeds=12, noise=0.005):
    """Pairs whose difference is `greedy` at temperature 0 and `sampled` at temperature 1."""
    rng = np.random.default_rng(0)
    runs = []
    for seed in range(seeds):
        for method, (cold, hot) in (("grpo", (0.0, 0.0)), ("grpo-sg", (greedy, sampled))):
            value = 0.5 + cold + noise * rng.normal()
            runs.append(
                frame_run(method, seed, heldout=value, shift=hot - cold + noise * rng.normal())
            )
    return study(*runs)


def test_arms_that_differ_in_temperature_alone_neither_support_nor_refute():
    for effect in (-0.04, 0.04):
        found = verdict(accuracies(0.0, effect), "C7")
        assert found.verdict == "inconclusive" and "depends on the temperature" in found.reason
    assert verdict(accuracies(0.0, 0.0), "C7").verdict == "refuted"
    opposite = verdict(accuracies(0.05, -0.005), "C7")
    assert opposite.verdict == "supported" and "signs differ" in "".join(opposite.finding.notes)


@pytest.mark.parametrize("claim", ["C7", "C10", "C14"])
def test_runs_without_greedy_evaluation_are_untestable_and_name_the_setting(claim):
    runs = made(claim, "effect")
    for run in runs.by_name.values():
        run.eval = run.eval[run.eval["temperature"] == 1.0]
    found = verdict(runs, claim)
    assert found.verdict == "untestable" and "evaluation.temperatures" in found.reason
    assert any("T = 1" in other.name and other.p_value < 0.05 for other in found.others)


def test_rare_collapse_is_not_reported_without_its_worst_pair():
    rng = np.random.default_rng(0)
    runs = []
    for seed in range(20):
        for method, effect in (("grpo", 0.0), ("grpo-sg", -0.27 if seed in (3, 11) else 0.03)):
            runs.append(frame_run(method, seed, heldout=0.5 + effect + 0.002 * rng.normal()))
    found = verdict(study(*runs), "C7")
    assert found.verdict != "supported"
    assert (
        found.effect.worst[0] < -0.26
        and "worst -27" in found.line()
        and "median +3" in found.line()
    )


def test_a_slope_whose_interval_excludes_the_claimed_one_is_not_supported():
    rng = np.random.default_rng(0)
    runs = study(
        *(frame_run(seed=s, tokens=tokens_frame(rng, 8, 300, slope=1.3)) for s in range(3))
    )
    found = verdict(runs, "C2")
    assert found.effect.interval.low > 1 and found.verdict == "inconclusive"
    assert "interval holds 1" in found.reason


# -- Levels: how often studies in which nothing is true are called supported


def not_above(hits: int, studies: int, level: float = 0.05) -> bool:
    """One-sided binomial test of "the rate is at most `level`"."""
    return bool(scipy.stats.binomtest(hits, studies, level, alternative="greater").pvalue > 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("claim", MAKERS)
def test_200_null_studies(claim):
    """A study in which the claim's test has nothing to find, so that its p should be uniform."""
    hits, seeds = 0, SEEDS.get(claim, 8)
    for index in range(200):
        rng = np.random.default_rng([index, *claim.encode()])
        runs = None if claim == "C2" else MAKERS[claim]("none", rng, seeds, "normal")
        if runs is None:  # the slope at the edge of what would still be called equal to 1
            frames = [tokens_frame(rng, 6, 120, slope=0.5, correlated=0.3) for _ in range(seeds)]
            runs = study(*(frame_run(seed=s, tokens=t) for s, t in enumerate(frames)))
        hits += verdict(runs, claim).verdict == "supported"
    assert not_above(hits, 200), f"{hits} of 200 null studies supported"


@pytest.mark.parametrize("design", DESIGNS)
def test_simulated_studies_of_the_primary_claims(design):
    """A small version of `experiments/studies/levels.py`, whose table is on the page of the claims."""
    found = outcomes(design, 60, 12)
    if "margin" in design:
        assert found["supported"] >= 48 and not_above(found["refuted"], 60)
    elif (
        "collapse" not in design and "as in 0.2" not in design
    ):  # without a collapse among the pairs nothing can tell
        # two-sided at 5 %: half of it on the claimed side
        assert not_above(found["supported"], 60, 0.025)
    if "as in 0.2" in design:
        assert found["supported"] > 30


# -- Declarations, and what is written


def rules(**terms):
    return declared_rules(ClaimsSpec(**terms))


def started(at):
    run = frame_run(seed=0)
    run.info = {"started": at}
    return run


def test_a_declaration_is_quoted_with_its_date_and_a_change_with_its_reason(tmp_path, monkeypatch):
    file, other = tmp_path / "study.yaml", rules(margins={"C7": 0.03}, level=0.01)

    def frozen(found, date, why=""):
        monkeypatch.setattr(registry, "now", lambda: f"{date}T00:00:00+00:00")
        return declare(file, found, why)

    assert "Not declared" in quote(file, rules(), [])
    assert frozen(rules(), "2026-01-02")[0].startswith("declared; SHA-256")
    assert "unchanged" in frozen(rules(), "2026-01-03")[0]
    text = quote(
        file, rules(), [started("2026-01-05T00:00:00+00:00"), started("2026-01-01T00:00:00+00:00")]
    )
    assert (
        "Declared on 2026-01-02T00:00:00+00:00; unchanged" in text
        and "1 of 2 runs started before" in text
    )
    assert "NOT the rules used here" in quote(file, other, []) and "level: 0.05 → 0.01" in quote(
        file, other, []
    )
    with pytest.raises(UserError, match="give --why"):
        frozen(other, "2026-01-03")
    assert any(
        "C7.margin: 0.02 → 0.03" in line for line in frozen(other, "2026-01-03", "a noisy pilot")[1]
    )
    text = quote(file, other, [])
    assert "changed on 2026-01-03" in text and "why: a noisy pilot" in text and "NOT" not in text
    assert "radius: absent → 0.05" in quote(file, other | {"radius": 0.05}, [])
    stored = file.with_suffix(".declared.json")
    stored.write_text(stored.read_text().replace('"level": 0.05', '"level": 0.5'))
    with pytest.raises(UserError, match="do not fit their hash"):
        quote(file, rules(), [])


def test_margins_reach_the_rule_and_the_test():
    assert "less than 3 points" in rules(margins={"C7": 0.03})["claims"]["C7"]["rule"]
    assert rules(margins={"C7": 0.03})["claims"]["C7 (one update)"]["margin"] == 0.1
    for terms in (
        ClaimsSpec(order=("C99",)),
        ClaimsSpec(margins={"c7": 0.1}),
        ClaimsSpec(margins={"C7": 2.0}),
    ):
        with pytest.raises(UserError, match=r"claims\."):
            check_terms(terms)
    check_terms(ClaimsSpec(margins={"C2": 1.5}))  # a slope, not a share


def test_verdicts_of_recorded_runs_as_json_markdown_and_sections(tmp_path):
    shape = Shape(steps=6, prompts=3, length=12, probe_every=3, eval_every=3)
    folder = write_study(
        tmp_path / "runs", {"grpo": Effects(), "grpo-sg": Effects()}, seeds=2, shape=shape
    )
    laid_out = claims.study_of(load_runs(folder))
    verdicts, checks = claims.judge(laid_out)
    paths = claims.write_claims(verdicts, tmp_path / "out", checks)
    read = json.loads(
        paths[0].read_text(), parse_constant=lambda text: pytest.fail(f"{text} in JSON")
    )
    assert [entry["claim"] for entry in read] == list(claims.CLAIMS)
    text = paths[1].read_text()
    assert all(
        escape_markdown(v.title) in text and escape_markdown(v.reason) in text for v in verdicts
    )
    assert (
        checks[0].holds
        and f"{sum(run.rows('tokens') for run in load_runs(folder)):,} tokens" in checks[0].text
    )
    sections = claims.claim_sections(load_runs(folder))
    assert len(sections[0].content) == sum(len(v.versions) for v in verdicts)
    kinds = (pd.DataFrame, str, Figure)
    assert {next(k for k in kinds if isinstance(s.content, k)) for s in sections} == set(kinds)


# -- Power


def test_student_agrees_with_the_rule_itself_on_drawn_studies():
    """The verdicts' own sign flips on normal differences, with the mean at the margin and at 0."""
    rng, n, margin, level = np.random.default_rng(0), 12, 0.9, 0.05
    supported = refuted = 0
    for _ in range(300):
        noise = rng.normal(size=n)
        there = noise + margin
        supported += (
            sign_flip_p(there) <= level
            and there.mean() > 0
            and sign_flip_p(there, "less", margin) > level
        )
        refuted += sign_flip_p(noise, "less", margin) <= level
    found = student_power(1.0, margin, n, level)
    assert supported / 300 == pytest.approx(found[0], abs=0.08) and refuted / 300 == pytest.approx(
        found[1], abs=0.06
    )


def test_pairs_needed_is_the_smallest_that_reaches_the_target_and_never_below_what_is_advised():
    n = pairs_needed(1.0, 0.5, 0.05)
    assert min(student_power(1.0, 0.5, n, 0.05)) >= 0.8 > min(student_power(1.0, 0.5, n - 1, 0.05))
    assert pairs_needed(1.0, 50.0, 0.05) == RECOMMENDED
    assert pairs_needed(1.0, 0.5, 0.05, parts=3) > n and pairs_needed(1.0, 1e-4, 0.05) is None
    rng = np.random.default_rng(0)
    drawn = [deviation_interval(float(rng.normal(size=4).std(ddof=1)), 4) for _ in range(2000)]
    assert np.mean([low <= 1 <= high for low, high in drawn]) == pytest.approx(0.9, abs=0.02)


def test_two_pairs_give_a_standard_deviation():
    one, two = (
        verdicts(paired_study(seeds, 0.0, rng=np.random.default_rng(0)), ["C7"]) for seeds in (1, 2)
    )
    assert powers_of(one) == []
    (found,), (row,) = two, powers_of(two)
    low, high = deviation_interval(
        sd := float(found.finding.parts[""]["difference"].std(ddof=1)), 2
    )
    assert row["n"] == "2" and row["n for 80 %"] == "8 to 18"
    assert (
        row["SD of a value"] == f"{100 * sd:.3g} [{100 * low:.3g}, {100 * high:.3g}] points"
        and high > 10 * sd
    )
