"""Declarations, and what is written: JSON, Markdown, sections."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from matplotlib.figure import Figure

from sharpscope.analysis import claims
from sharpscope.analysis.claims.declaration import check_terms, declare, declared_rules, quote
from sharpscope.analysis.claims.writers import claim_sections, write_claims
from sharpscope.analysis.text import escape_markdown
from sharpscope.config import ClaimsSpec
from sharpscope.errors import UserError
from sharpscope.traces import load_runs
from tests.analysis.claims.frames import frame_run
from tests.traces.synthetic import Effects, Shape, write_study


def rules(**terms):
    return declared_rules(ClaimsSpec(**terms))


def started(at):
    run = frame_run(seed=0)
    run.info = {"started": at}
    return run


def frozen(file, found, date, why=""):
    return declare(file, found, "0.2", why, f"{date}T00:00:00+00:00")


def test_an_unchanged_declaration_is_quoted_with_its_date(tmp_path):
    file = tmp_path / "study.yaml"
    assert "Not declared" in quote(file, rules(), [])
    assert frozen(file, rules(), "2026-01-02")[0].startswith("declared; SHA-256")
    assert "unchanged" in frozen(file, rules(), "2026-01-03")[0]
    assert len(json.loads((tmp_path / "study.declared.json").read_text())) == 1
    text = quote(file, rules(), [started("2026-01-05T00:00:00+00:00"), started("2026-01-01T00:00:00+00:00")])
    assert "Declared on 2026-01-02T00:00:00+00:00; unchanged" in text and "1 of 2 runs started before" in text


def test_a_change_needs_a_reason_and_is_quoted(tmp_path):
    file = tmp_path / "study.yaml"
    frozen(file, rules(), "2026-01-02")
    other = rules(margins={"C7": 0.03}, level=0.01)
    assert "NOT the rules used here" in quote(file, other, []) and "level: 0.05 → 0.01" in quote(file, other, [])
    with pytest.raises(UserError, match="give --why"):
        frozen(file, other, "2026-01-03")
    assert any("C7.margin: 0.02 → 0.03" in line for line in frozen(file, other, "2026-01-03", "a noisy pilot")[1])
    text = quote(file, other, [])
    assert "changed on 2026-01-03" in text and "why: a noisy pilot" in text and "NOT" not in text
    assert "radius: absent → 0.05" in quote(file, other | {"radius": 0.05}, [])


def test_an_edited_declaration_is_refused(tmp_path):
    study_file = tmp_path / "study.yaml"
    frozen(study_file, rules(), "2026-01-02")
    file = study_file.with_suffix(".declared.json")
    file.write_text(file.read_text().replace('"level": 0.05', '"level": 0.5'))
    with pytest.raises(UserError, match="do not fit their hash"):
        quote(study_file, rules(), [])
    file.write_text("[]")
    with pytest.raises(UserError):
        quote(study_file, rules(), [])


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
    assert "refutes nothing about large models" in text
    assert all(escape_markdown(v.title) in text and escape_markdown(v.reason) in text for v in verdicts)
    assert checks[0].holds and f"{sum(run.rows('tokens') for run in load_runs(folder)):,} tokens" in checks[0].text
    sections = claim_sections(load_runs(folder))
    assert {section.part for section in sections} == {"Claims"}
    assert len(sections[0].content) == sum(len(v.versions) for v in verdicts)
    kinds = (pd.DataFrame, str, Figure)
    assert {next(k for k in kinds if isinstance(s.content, k)) for s in sections} == set(kinds)
