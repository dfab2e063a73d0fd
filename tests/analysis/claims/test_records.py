"""Declarations, what is written of verdicts, and power in closed form against counting and simulation."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from sharpscope.analysis import claims
from sharpscope.analysis.claims import registry
from sharpscope.analysis.claims.registry import check_terms, declare, declared_rules, quote
from sharpscope.analysis.claims.writers import (
    RECOMMENDED,
    answers_of_pair,
    claim_sections,
    deviation_interval,
    pairs_needed,
    powers_of,
    powers_of_answers,
    student_power,
    write_claims,
)
from sharpscope.analysis.statistics import sign_flip_p
from sharpscope.analysis.text import escape_markdown
from sharpscope.config import ClaimsSpec
from sharpscope.errors import UserError
from sharpscope.traces import load_runs
from tests.analysis.claims.planted import frame_run, paired_study
from tests.traces.synthetic import Effects, Shape, write_study


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
    assert len(json.loads((tmp_path / "study.declared.json").read_text())) == 1
    text = quote(file, rules(), [started("2026-01-05T00:00:00+00:00"), started("2026-01-01T00:00:00+00:00")])
    assert "Declared on 2026-01-02T00:00:00+00:00; unchanged" in text and "1 of 2 runs started before" in text
    assert "NOT the rules used here" in quote(file, other, []) and "level: 0.05 → 0.01" in quote(file, other, [])
    with pytest.raises(UserError, match="give --why"):
        frozen(other, "2026-01-03")
    assert any("C7.margin: 0.02 → 0.03" in line for line in frozen(other, "2026-01-03", "a noisy pilot")[1])
    text = quote(file, other, [])
    assert "changed on 2026-01-03" in text and "why: a noisy pilot" in text and "NOT" not in text
    assert "radius: absent → 0.05" in quote(file, other | {"radius": 0.05}, [])
    stored = file.with_suffix(".declared.json")
    stored.write_text(stored.read_text().replace('"level": 0.05', '"level": 0.5'))
    with pytest.raises(UserError, match="do not fit their hash"):
        quote(file, rules(), [])
    stored.write_text("[]")
    with pytest.raises(UserError):
        quote(file, rules(), [])


def test_margins_reach_the_rule_and_the_test():
    assert "less than 3 points" in rules(margins={"C7": 0.03})["claims"]["C7"]["rule"]
    assert rules(margins={"C7": 0.03})["claims"]["C7 (one update)"]["margin"] == 0.1
    for terms in (ClaimsSpec(order=("C99",)), ClaimsSpec(margins={"c7": 0.1}), ClaimsSpec(margins={"C7": 2.0})):
        with pytest.raises(UserError, match=r"claims\."):
            check_terms(terms)
    check_terms(ClaimsSpec(margins={"C2": 1.5}))  # a slope, not a share


def test_verdicts_of_recorded_runs_as_json_markdown_and_sections(tmp_path):
    shape = Shape(steps=6, prompts=3, length=12, probe_every=3, eval_every=3)
    folder = write_study(tmp_path / "runs", {"grpo": Effects(), "grpo-sg": Effects()}, seeds=2, shape=shape)
    laid_out = claims.study_of(load_runs(folder))
    verdicts, checks = claims.judge(laid_out)
    paths = write_claims(verdicts, tmp_path / "out", checks)
    read = json.loads(paths[0].read_text(), parse_constant=lambda text: pytest.fail(f"{text} in JSON"))
    assert [entry["claim"] for entry in read] == list(claims.CLAIMS)
    text = paths[1].read_text()
    assert all(escape_markdown(v.title) in text and escape_markdown(v.reason) in text for v in verdicts)
    assert checks[0].holds and f"{sum(run.rows('tokens') for run in load_runs(folder)):,} tokens" in checks[0].text
    sections = claim_sections(load_runs(folder))
    assert {section.part for section in sections} == {"Claims"}
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
        supported += sign_flip_p(there) <= level and there.mean() > 0 and sign_flip_p(there, "less", margin) > level
        refuted += sign_flip_p(noise, "less", margin) <= level
    found = student_power(1.0, margin, n, level)
    assert supported / 300 == pytest.approx(found[0], abs=0.08) and refuted / 300 == pytest.approx(found[1], abs=0.06)


def test_pairs_needed_is_the_smallest_that_reaches_the_target_and_never_below_what_is_advised():
    n = pairs_needed(1.0, 0.5, 0.05)
    assert min(student_power(1.0, 0.5, n, 0.05)) >= 0.8 > min(student_power(1.0, 0.5, n - 1, 0.05))
    assert pairs_needed(1.0, 50.0, 0.05) == RECOMMENDED
    assert pairs_needed(1.0, 0.5, 0.05, parts=3) > n and pairs_needed(1.0, 1e-4, 0.05) is None
    rng = np.random.default_rng(0)
    drawn = [deviation_interval(float(rng.normal(size=4).std(ddof=1)), 4) for _ in range(2000)]
    assert np.mean([low <= 1 <= high for low, high in drawn]) == pytest.approx(0.9, abs=0.02)


def test_answers_alone_one_pair_and_two_pairs_give_a_standard_deviation():
    rows = powers_of_answers(0.25, 2000, ClaimsSpec())
    assert [row["claim"] for row in rows] == ["C7", "C10", "C14"]
    assert (rows[0]["SD of a value"], rows[0]["margin"]) == ("at least 1.37 points", "2 points")  # √(2·0.25·0.75/2000)
    one, two = (claims.study_of(paired_study(seeds, 0.0, rng=np.random.default_rng(0))) for seeds in (1, 2))
    assert powers_of(claims.judge(one, ["C7"])[0]) == []
    deviation, where = answers_of_pair(one)
    accuracy = [run.eval.query("step == 40 and temperature == 0")["accuracy"].iloc[0] for run in one.runs.values()]
    assert where == "T = 0" and deviation == pytest.approx(math.sqrt(sum(p * (1 - p) / 400 for p in accuracy)))
    (found,) = claims.judge(two, ["C7"])[0]
    (row,) = powers_of([found])
    low, high = deviation_interval(sd := float(found.finding.parts[""]["difference"].std(ddof=1)), 2)
    assert row["n"] == "2" and row["n for 80 %"] == "8 to 18"
    assert row["SD of a value"] == f"{100 * sd:.3g} [{100 * low:.3g}, {100 * high:.3g}] points" and high > 10 * sd
