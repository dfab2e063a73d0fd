"""The catalogue of methods."""

from __future__ import annotations

import pytest

from sharpscope.objective import (
    control_names,
    describe,
    method_names,
    named_method,
)

NAMES = [
    "grpo",
    "grpo-sg",
    "tr-grpo",
    "ar",
    "lopti",
    "ar-lopti",
    "cov-grpo",
    "cov-grpo-completion",
    "clip-cov",
    "kl-cov",
    "gspo",
    "holder",
    "dapo",
    "dr-grpo",
    "cispo",
    "bnpo",
    "dual-clip",
    "sapo",
    "gmpo",
    "dppo",
    "dppo-kl",
    "luspo",
    "vespo",
    "papo",
    "ppo-ewma",
    "high-entropy",
    "stapo",
    "lp-reg",
    "grpo-sam",
    "grpo-gnp",
    "lite-ppo",
    "rloo",
    "reinforce-pp",
    "reinforce-pp-baseline",
    "opo",
    "otb",
    "gdpo",
    "maxrl",
]


def test_all_methods_are_there():
    assert method_names() == NAMES
    assert all(named_method(name).name == name for name in [*NAMES, *control_names()])


@pytest.mark.parametrize("name", [*NAMES, "grpo-sg-shuffled", "ar-mean-one"])
def test_descriptions_are_complete(name: str):
    note = describe(name)
    assert note.method == named_method(name)
    for text in (note.title, note.equation, note.constants, note.source, note.differs, note.ours):
        assert text.strip() == text
        assert len(text) >= 4
    assert "arXiv" in note.source
