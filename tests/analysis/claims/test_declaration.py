"""Declarations: frozen, checked, quoted, and changed with a reason."""

from __future__ import annotations

import json

import pytest

from sharpscope.analysis.claims import check_terms, declare, declared_rules, quote
from sharpscope.analysis.terms import Terms
from sharpscope.errors import UserError
from tests.analysis.claims.frames import frame_run


def rules(**terms):
    return declared_rules(Terms(**terms), "grpo", "grpo-sg")


def started(at):
    run = frame_run(seed=0)
    run.info = {"started": at}
    return run


def test_an_unchanged_declaration_is_quoted_with_its_date(tmp_path):
    study = tmp_path / "study.yaml"
    assert "Not declared" in quote(study, rules(), [])
    found = declare(study, rules(), "2026-01-02T00:00:00+00:00", "0.2")
    assert found.new and found.file.name == "study.declared.json"
    again = declare(study, rules(), "2026-01-03T00:00:00+00:00", "0.2")
    assert not again.new and again.hash == found.hash and len(json.loads(found.file.read_text())) == 1
    text = quote(study, rules(), [started("2026-01-05T00:00:00+00:00"), started("2026-01-01T00:00:00+00:00")])
    assert "Declared on 2026-01-02T00:00:00+00:00; unchanged" in text and "1 of 2 runs started before" in text


def test_a_change_needs_a_reason_and_is_quoted(tmp_path):
    study = tmp_path / "study.yaml"
    declare(study, rules(), "2026-01-02T00:00:00+00:00", "0.2")
    other = rules(margins={"C7": 0.03}, level=0.01)
    assert "NOT the rules used here" in quote(study, other, []) and "level: 0.05 → 0.01" in quote(study, other, [])
    with pytest.raises(UserError, match="give --why"):
        declare(study, other, "2026-01-03T00:00:00+00:00", "0.2")
    found = declare(study, other, "2026-01-03T00:00:00+00:00", "0.2", "the pilot was noisier")
    assert any("C7.margin: 0.02 → 0.03" in line for line in found.changed)
    text = quote(study, other, [])
    assert "changed on 2026-01-03" in text and "why: the pilot was noisier" in text and "NOT" not in text


def test_an_edited_declaration_is_refused(tmp_path):
    study = tmp_path / "study.yaml"
    file = declare(study, rules(), "2026-01-02T00:00:00+00:00", "0.2").file
    file.write_text(file.read_text().replace('"level": 0.05', '"level": 0.5'))
    with pytest.raises(UserError, match="do not fit their hash"):
        quote(study, rules(), [])
    file.write_text("[]")
    with pytest.raises(UserError):
        quote(study, rules(), [])


def test_margins_reach_the_rule_and_the_test():
    assert "less than 3 points" in rules(margins={"C7": 0.03})["claims"]["C7"]["rule"]
    assert rules(margins={"C7": 0.03})["claims"]["C7 (one update)"]["margin"] == 0.1
    with pytest.raises(UserError, match="order: C99"):
        check_terms(Terms(order=("C99",)))
    with pytest.raises(UserError, match="margins: c7"):
        check_terms(Terms(margins={"c7": 0.1}))
    with pytest.raises(UserError, match="margins: C7 is 2; give a share below 1"):
        check_terms(Terms(margins={"C7": 2.0}))
    check_terms(Terms(margins={"C2": 1.5}))  # a slope, not a share
