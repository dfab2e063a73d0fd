"""The token viewer's data are the trace's numbers, and text of a model is only text."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sharpscope.analysis.html.page import script_json
from sharpscope.analysis.html.tokens import DIGITS, token_view
from sharpscope.analysis.text import shown
from sharpscope.traces import load_run, load_runs
from sharpscope.traces.token_text import pieces
from tests.analysis.html.runs import HOSTILE, SPIKE, WORDS, ids_of, in_file


@pytest.mark.parametrize("text", [*HOSTILE.values(), "</SCRIPT ", "<!--<script>", "\u2028"])
def test_json_in_a_script_element_can_only_be_data(text):
    made = script_json({"a": [text, None], text: 1})
    assert not set(made) & set("<>&\u2028\u2029") and json.loads(made) == {"a": [text, None], text: 1}


def test_shown_names_what_reorders_or_hides():
    assert shown("a\u202eb\x00\n\t\ud800\u2028") == "a⟦RIGHT-TO-LEFT OVERRIDE⟧b⟦U+0000⟧\n\t⟦U+D800⟧⟦LINE SEPARATOR⟧"
    assert shown("żółw 東京 עברית 👍 é") == "żółw 東京 עברית 👍 é"


def test_characters_over_several_tokens_stand_with_the_last():
    text = "a👍ż!".encode()
    ids = list(text)
    result = pieces(ids, lambda part: bytes(part).decode("utf-8", "replace"))
    assert result == ["a", "", "", "", "👍", "", "ż", "!"] and len(result) == len(ids)
    assert pieces(ids[:3], lambda part: bytes(part).decode("utf-8", "replace"))[0] == "a"
    assert "".join(pieces([255] * 20, lambda part: bytes(part).decode("utf-8", "replace"))) == "\ufffd" * 20


def test_tokens_carry_the_traces_numbers(made):
    data = made.data("tokens")
    run = load_run(made.runs / "grpo-s0")
    number = data["runs"].index("grpo-s0")
    held = [c for c in data["completions"] if c["r"] == number and c["s"] == SPIKE]
    assert len(held) == 4 and {c["why"] for c in held} == {"spike"}
    for completion in held:
        words = [in_file(WORDS[i]) for i in ids_of(SPIKE, completion["n"])]
        assert [data["pieces"][i] for i in completion["t"]] == words
        rows_ = run.tokens(steps=SPIKE).query(f"rollout == {completion['n']}").sort_values("position")
        columns = {"share": "attribution", "mismatch": None, "score": "score_norm_local", "weight": "weight"}
        for name, column in (
            columns | {"logp": "logp", "influence": "heldout_influence", "entropy": "entropy"}
        ).items():
            wanted = rows_["logp"] - rows_["behavior_logp"] if column is None else rows_[column]
            np.testing.assert_allclose(completion["c"][name], wanted, rtol=10.0 ** (1 - DIGITS))
        assert "exact" not in completion["c"]


def test_the_budget_cuts_and_says_so(made):
    runs = load_runs(made.runs).by_name
    whole, small = token_view(runs), token_view(runs, budget=8_000)
    assert 2 <= len(small["completions"]) < len(whole["completions"])
    assert any("chosen completions fit into the file" in note for note in small["notes"])
    assert len(json.dumps({k: small[k] for k in ("completions", "pieces", "prompts")})) < 60_000
    used = {i for c in small["completions"] for i in c["t"]}
    assert used == set(range(len(small["pieces"])))
