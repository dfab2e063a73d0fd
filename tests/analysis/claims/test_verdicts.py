"""Every claim on studies whose truth is known: the right verdict each time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sharpscope.analysis import claims
from sharpscope.analysis.claims.c11_oscillator import prediction_errors
from sharpscope.errors import UserError
from tests.analysis.claims.frames import frame_run, paired_study, study, tokens_frame
from tests.analysis.claims.planted import MAKERS, SEEDS, alignment, entropy, grid

NOT_SUPPORTED = ("refuted", "inconclusive")


def verdict(runs, claim, **options):
    (found,) = claims.test_claims(runs, [claim], **options)
    return found


def made(claim, truth, tails="normal", seeds=None, stream=0, **options):
    rng = np.random.default_rng([stream, *claim.encode()])
    return MAKERS[claim](truth, rng, seeds or SEEDS.get(claim, 8), tails, **options)


@pytest.mark.parametrize("claim", MAKERS)
def test_an_effect_is_supported(claim):
    found = verdict(made(claim, "effect"), claim)
    assert found.verdict == "supported", found.line()
    assert found.rows and found.confounders and found.rule.text and not found.settles


@pytest.mark.parametrize("claim", MAKERS)
def test_no_effect_is_not_supported(claim):
    assert verdict(made(claim, "none"), claim).verdict in NOT_SUPPORTED


@pytest.mark.parametrize("claim", MAKERS)
def test_the_wrong_direction_is_refuted(claim):
    assert verdict(made(claim, "wrong"), claim).verdict == "refuted"


@pytest.mark.parametrize("claim", [claim for claim in MAKERS if claim != "C1"])  # C1 has no noise: it counts
def test_heavy_tails_hide_nothing_and_make_nothing(claim):
    assert verdict(made(claim, "effect", "heavy"), claim).verdict in ("supported", "inconclusive")
    assert verdict(made(claim, "none", "heavy"), claim).verdict in NOT_SUPPORTED


@pytest.mark.parametrize(
    ("claim", "truth"),
    [
        ("C2", {"slope": 1.0}), ("C2", {"slope": 0.0}), ("C3", {"concentration": 1.5}), ("C3", {"concentration": 0.0}),
        ("C9", {"low_influence": -2.0}), ("C9", {}),
    ],
)  # fmt: skip
def test_tokens_that_share_a_shift_in_each_step_mislead_nobody(claim, truth):
    """Tokens of a step are not independent: what they share must neither make an effect nor hide one."""
    rng = np.random.default_rng(3)
    runs = study(*(frame_run(seed=s, tokens=tokens_frame(rng, 8, 200, correlated=0.5, **truth)) for s in range(3)))
    there = truth in ({"slope": 1.0}, {"concentration": 1.5}, {"low_influence": -2.0})
    assert (verdict(runs, claim).verdict == "supported") is there


@pytest.mark.parametrize("claim", ["C4", "C5", "C7", "C8", "C10", "C11", "C12", "C13"])
def test_two_seeds_are_untestable_however_large_the_effect(claim):
    found = verdict(made(claim, "effect", seeds=2), claim)
    assert found.verdict == "untestable", found.line()
    assert found.settles


@pytest.mark.parametrize("claim", ["C4", "C7", "C8"])
def test_a_learning_rate_that_differs_between_the_methods_is_refused_by_name(claim):
    measure = "sharpness" if claim == "C4" else "heldout"
    runs = paired_study(10, 0.3, measure=measure, treatment_config={"optimizer": {"lr": 3e-4}})
    found = verdict(runs, claim)
    assert found.verdict == "untestable"
    assert "optimizer.lr (0.0001 and 0.0003)" in found.reason
    # asked to ignore it (each method tuned), the same runs make pairs, and the verdict says so
    tuned = verdict(runs, claim, ignore=["optimizer.lr"])
    assert tuned.verdict != "untestable" and any("optimizer.lr" in note for note in tuned.notes)


def test_learning_rate_as_hidden_cause_of_sharpness_and_gap():
    rng = np.random.default_rng(5)
    found = verdict(grid("none", rng, 2, "normal"), "C6")
    assert found.verdict in NOT_SUPPORTED
    plain = next(e for e in found.others if e.name == "plain Kendall τ over all runs")
    assert plain.value > 0.3  # what a test that does not hold the learning rate would report
    assert abs(found.effect.value) < 0.4


def test_a_grid_of_learning_rates_alone_is_untestable():
    runs = [
        frame_run(seed=s, config={"optimizer": {"lr": lr}}, sharpness=lr, train=0.7, tag=f"-{lr}")
        for s in range(6)
        for lr in (1e-4, 2e-4)
    ]
    assert "learning rate" in verdict(study(*runs), "C6").reason


def test_runs_that_have_nothing_to_be_compared_with_are_none_of_the_grid():
    """More seeds of one setting, other learning rates, and a second run of a setting change neither n nor any number."""
    rng = np.random.default_rng(5)
    runs = grid("effect", rng, 2, "normal")
    before = verdict(runs, "C6")
    assert before.n == 24
    sizes = {"rollout": {"group_size": 8, "prompts_per_step": 24}}
    more = [
        frame_run(
            m, s, config={**sizes, "optimizer": {"lr": lr}}, heldout=0.3, train=0.7, sharpness=9.0, tag=f"-x{lr:g}"
        )
        for m in ("grpo", "grpo-sg")
        for s in (5, 6)
        for lr in (1e-4, 8e-4)
    ]
    first = next(iter(runs.by_name.values()))
    again = replace(first, name=f"{first.name}-again")
    after = verdict(study(*runs.by_name.values(), *more, again), "C6")
    assert (after.n, after.effect, after.others, after.p_value) == (24, before.effect, before.others, before.p_value)


def test_larger_norm_of_the_hidden_state_is_no_effect_of_probability():
    rng = np.random.default_rng(0)
    runs = [frame_run(seed=s, tokens=tokens_frame(rng, 6, 200, slope=0.0, hidden_slope=1.0)) for s in range(2)]
    assert verdict(study(*runs), "C2").verdict == "refuted"


def test_alignment_needs_every_rival():
    def rng():
        return np.random.default_rng(1)

    same = verdict(alignment("effect", rng(), 7, "normal", as_good="grpo-sg-constant"), "C10")
    assert same.verdict in NOT_SUPPORTED and "constant" in same.effect.name
    hot = verdict(alignment("effect", rng(), 7, "normal", as_good="grpo at 0.0003"), "C10")
    assert hot.verdict in NOT_SUPPORTED and "lr 0.0003" in hot.effect.name
    lacking = verdict(alignment("effect", rng(), 7, "normal", missing="grpo-sg-entropy"), "C10")
    assert lacking.verdict == "untestable" and "grpo-sg-entropy" in lacking.reason
    unswept = verdict(alignment("effect", rng(), 7, "normal", sweep=False), "C10")
    assert unswept.verdict == "inconclusive" and "learning rates" in unswept.reason


@pytest.mark.parametrize("tried", [False, True])
def test_a_learning_rate_of_few_seeds_is_shown_beside_and_decides_nothing(tried):
    """A grid made for another claim holds two seeds of plain GRPO at one more rate: C10 must not become untestable."""
    runs = list(alignment("effect", np.random.default_rng(1), 8, "normal").by_name.values())
    few = [frame_run("grpo", s, config={"optimizer": {"lr": 9e-4}}, heldout=0.9, tag="-few") for s in (0, 1)]
    found = verdict(study(*runs, *(few if tried else ())), "C10")
    assert found.verdict == "supported" and found.n == 8
    assert any("lr 0.0009 has 2 seeds" in note for note in found.notes) is tried
    assert any(other.name == "against grpo at lr 0.0009" for other in found.others) is tried
    # no other rate has enough: the few decide, and they are too few
    alone = [run for run in runs if "-hot" not in run.name]
    assert verdict(study(*alone, *few), "C10").verdict == "untestable"


def test_half_of_the_entropy_claim_is_not_the_whole():
    runs = entropy("effect", np.random.default_rng(2), 7, "normal", stable=False)
    found = verdict(runs, "C12")
    assert found.verdict == "inconclusive" and "cov-grpo" in found.reason


def test_better_held_out_accuracy_without_repeats_is_no_generalisation_gap():
    runs = paired_study(12, 0.1)
    for run in runs.by_name.values():
        run.config["task"]["train_size"] = 100_000
    found = verdict(runs, "C7")
    assert found.verdict == "untestable" and "repeats" in found.reason


def test_another_pair_of_methods():
    runs = paired_study(12, 0.1, treatment="gspo")
    found = verdict(runs, "C7", treatment="gspo")
    assert found.verdict == "supported" and found.methods == ("grpo", "gspo")
    with pytest.raises(UserError, match="treatment, grpo"):
        claims.test_claims(runs, treatment="grpo")
    with pytest.raises(UserError, match="no such claim; did you mean 'C"):
        claims.test_claims(runs, ["C14"])


def test_unfinished_runs_are_left_out_and_named():
    runs = paired_study(12, 0.1)
    broken = runs.by_name["grpo-sg-3"]
    broken.status, broken.eval = "interrupted", broken.eval.assign(accuracy=0.0)
    found = verdict(runs, "C7")
    assert found.n == 11 and any("grpo-sg-3" in note for note in found.notes)


def test_a_verdict_on_a_primary_claim_does_not_depend_on_what_else_was_asked():
    runs = made("C7", "effect")
    alone, among = verdict(runs, "C7"), {v.claim: v for v in claims.test_claims(runs)}["C7"]
    assert alone.to_dict() == among.to_dict()
    # three primary claims, two of them untestable: Holm multiplies by 3 all the same
    assert alone.p_adjusted == pytest.approx(3 * alone.p_value)


def test_paired_effect_equals_the_mean_of_the_differences():
    runs = made("C7", "effect")
    by_seed = {}
    for run in runs.by_name.values():
        rows = run.eval[(run.eval["split"] == "heldout") & (run.eval["temperature"] == 1.0) & (run.eval["step"] == 40)]
        by_seed.setdefault(run.seed, {})[run.method] = rows["accuracy"].iloc[0]
    expected = np.mean([values["grpo-sg"] - values["grpo"] for values in by_seed.values()])
    assert verdict(runs, "C7").effect.value == pytest.approx(expected)


def test_no_runs_at_all_is_untestable_everywhere():
    assert {v.verdict for v in claims.test_claims(study())} == {"untestable"}


@pytest.mark.parametrize("claim", ["C2", "C3", "C5", "C9", "C11", "C12", "C13"])
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
    assert alone.p_value == among.p_value


def test_a_curve_whose_start_is_fast_is_not_judged_by_its_extrapolation():
    """The drop lies in the first steps: without them any drop fits, and a prediction of the first step can be off by thousands."""
    rng = np.random.default_rng(0)
    t = np.arange(1, 151.0)
    for _ in range(5):
        reward = 2 - 3 * np.exp(-1.5 * (t - 1)) + rng.normal(0, 0.4, 150)
        ours, rival = prediction_errors(t, reward)
        assert 0.1 < ours < 0.4 and 0.1 < rival < 0.4


def test_dominance_says_where_its_margin_cannot_be_reached():
    """Nearly all tokens certain: the null's top tenth holds everything, and no norm could hold more."""
    rng = np.random.default_rng(0)
    runs = []
    for seed in range(2):
        tokens = tokens_frame(rng, 8, 200, concentration=1.5)
        rare = np.arange(len(tokens)) % 20 == 0
        tokens["logp"] = np.where(rare, np.log(0.5), np.log1p(-1e-6))
        runs.append(frame_run(seed=seed, tokens=tokens))
    found = verdict(study(*runs), "C3")
    assert found.verdict == "untestable" and "no room for 0.05 more" in found.reason
    assert any(other.name == "share of the top tenth beyond the null's" for other in found.others)


def test_sharpness_is_compared_at_a_radius_and_on_a_probe_set_that_both_runs_have():
    """The treatment was probed at smaller radii alone, where any run is less sharp: that is no effect of the method."""
    runs = []
    for seed in range(8):
        for method, radii in (("grpo", (0.01, 0.05, 0.5)), ("grpo-sg", (0.01, 0.05))):
            rows = [
                {"step": 40, "quantity": q, "rho": rho, "value": 10 * rho * (1 + 0.1 * seed)}
                for q in ("sam", "asam")
                for rho in radii
            ]
            runs.append(frame_run(method, seed, probes=rows))
    found = verdict(study(*runs), "C4")
    assert found.verdict != "supported" and found.effect.value == 0 and found.n == 8
    for run in runs:
        if run.method == "grpo-sg":
            run.probes["probe_set"] = "train-1"
    elsewhere = verdict(study(*(replace(run) for run in runs)), "C4")
    assert elsewhere.verdict == "untestable" and "sharpness" in elsewhere.reason


def test_the_noise_share_is_of_one_gradient():
    """1 − unbiased/naive of the same draws: the training step's own norm, of other prompts and with weights, is not in it."""
    runs = []
    for seed in range(6):
        for method, unbiased in (("grpo", 1.0), ("grpo-sg", 1.5)):
            values = {"squared_gradient_norm": unbiased, "squared_gradient_norm_naive": 2.0}
            rows = [{"step": 40, "functional": "surrogate", "quantity": q, "value": v} for q, v in values.items()]
            runs.append(frame_run(method, seed, probes=rows, columns={"grad_norm": 77.0 + np.arange(40) % 7}))
    (noise,) = [other for other in verdict(study(*runs), "C8").others if "noise share" in other.name]
    assert noise.value == pytest.approx(0.25 - 0.5)
