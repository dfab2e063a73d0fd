"""The page without a browser: its numbers are the trace's, text of a model is only text, and nothing in it can run."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import numpy as np
import pandas as pd
import pytest

from sharpscope.analysis import analyze
from sharpscope.analysis.headline import moved_tokens
from sharpscope.analysis.output import script_json
from sharpscope.analysis.text import csv_text, shown
from sharpscope.analysis.token_view import DIGITS, token_view
from sharpscope.traces import TraceWriter, load_run, load_runs
from sharpscope.traces.reader import pieces
from tests.analysis.conftest import HOSTILE, LONG, SPIKE, WORDS, ids_of, in_file, write_report_run
from tests.faults.test_untrusted import Elements
from tests.loops import some
from tests.traces.synthetic import new_run, rows


def elements(text: str) -> list[tuple[str, dict[str, str | None]]]:
    """(tag, attributes) of every element."""
    parser = Elements()
    parser.feed(text)
    return parser.found


def test_the_policy_allows_exactly_what_is_in_the_page_and_no_text_became_markup(made):
    seen = elements(made.html)
    (policy,) = [
        a["content"]
        for t, a in seen
        if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert (
        rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
        and rules["img-src"] == "data:"
    )
    assert "unsafe" not in policy and "nonce" not in policy and "http" not in policy
    for rule, tag in (("script-src", "script"), ("style-src", "style")):
        # data have a type, and are not run
        texts = re.findall(f"<{tag}>(.*?)</{tag}>", made.html, re.DOTALL)
        digests = (
            base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts
        )
        assert rules[rule].split() == [f"'sha256-{digest}'" for digest in digests]
    for tag, attributes in some(seen):
        assert not any(name.startswith("on") or name == "style" for name in attributes), (
            tag,
            attributes,
        )
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/svg+xml;base64,"))
    tags = {tag for tag, _ in seen}
    assert not tags & {"iframe", "object", "embed", "link", "base", "b"}


def test_the_largest_tokens_link_to_their_completions(made):
    """Those of the spike stand under its heading, with their shares, and lead into the token view."""
    (part,) = re.findall(
        r"<h3>grpo-s0, step 12: gradient norm 20(.*?)</table>", made.html, re.DOTALL
    )
    links = re.findall(r'href="#token-(\d+)-(\d+)-(\d+)-(\d+)"', part)
    run, data = load_run(made.runs / "grpo-s0"), made.data("tokens")
    wanted = [
        (t.run, t.step, t.rollout, t.position)
        for t in (one.sentence for one in moved_tokens(run, SPIKE, top=5))
    ]
    assert [(data["runs"][int(r)], int(s), int(n), int(i)) for r, s, n, i in links] == wanted
    there = {(c["r"], c["s"], c["n"]) for c in data["completions"]}
    assert {(int(r), int(s), int(n)) for r, s, n, _ in links} <= there


def test_one_run_stays_below_3_MB_and_many_below_6(tmp_path):
    """Every piece of the file has a bound; here 12 runs with a token of 1 MB each, and one run with long completions."""
    write_report_run(tmp_path / "one/a", steps=14)
    assert analyze(tmp_path / "one", tmp_path / "a").page.stat().st_size < 3e6
    for seed in range(12):
        write_report_run(tmp_path / f"many/{seed}", seed=seed, steps=3, spike=False)
    assert analyze(tmp_path / "many", tmp_path / "b").page.stat().st_size < 6e6


def test_runs_without_tokens_or_tokenizer_make_an_honest_page(tmp_path, quick):
    write_report_run(tmp_path / "a/plain", tokens=False, spike=False)
    write_report_run(tmp_path / "a/numbers", seed=1, tokenizer=False, status="failed", steps=3)
    page = analyze([tmp_path / "a"], tmp_path / "out").page.read_text(encoding="utf-8")
    assert (
        "plain: no token rows were recorded" in page
        and "numbers: the run saved no readable tokenizer" in page
    )
    assert "⟨3⟩" in page and "failed" in page


def test_a_single_run_and_long_completions(tmp_path):
    folder = write_report_run(tmp_path / "one", tokens=False, steps=2)
    count = 5_000
    with TraceWriter(folder) as writer:
        writer.append("steps", rows("steps", 3, 1) | {"grad_norm": 1.0})
        place = {"rollout": 0, "group": 0, "completion": LONG, "prompt": "p", "reward": 1.0}
        writer.append("rollouts", rows("rollouts", 3, 1) | place)
        place = {"rollout": 0, "position": np.arange(count), "token_id": np.arange(count) % 5}
        writer.append("tokens", rows("tokens", 3, count) | place)
    view = token_view(load_runs(folder).by_name)
    (long,) = [c for c in view["completions"] if c["s"] == 3]
    assert (
        len(long["t"]) == 4_000
        and long["more"] == 1_000
        and long["rest"].startswith("yes no\n perhaps knight")
    )
    assert all(len(values) == 4_000 for values in long["c"].values())


@pytest.mark.parametrize("text", [*HOSTILE.values(), "</SCRIPT ", "<!--<script>", "\u2028"])
def test_json_in_a_script_element_can_only_be_data(text):
    made = script_json({"a": [text, None], text: 1})
    assert not set(made) & set("<>&\u2028\u2029") and json.loads(made) == {
        "a": [text, None],
        text: 1,
    }


def test_shown_names_what_reorders_or_hides():
    assert (
        shown("a\u202eb\x00\n\t\ud800\u2028")
        == "a⟦RIGHT-TO-LEFT OVERRIDE⟧b⟦U+0000⟧\n\t⟦U+D800⟧⟦LINE SEPARATOR⟧"
    )
    assert shown("żółw 東京 עברית 👍 é") == "żółw 東京 עברית 👍 é"


def test_characters_over_several_tokens_stand_with_the_last():
    text = "a👍ż!".encode()
    ids = list(text)
    result = pieces(ids, lambda part: bytes(part).decode("utf-8", "replace"))
    assert result == ["a", "", "", "", "👍", "", "ż", "!"] and len(result) == len(ids)
    assert pieces(ids[:3], lambda part: bytes(part).decode("utf-8", "replace"))[0] == "a"
    assert (
        "".join(pieces([255] * 20, lambda part: bytes(part).decode("utf-8", "replace")))
        == "\ufffd" * 20
    )


def test_tokens_carry_the_traces_numbers(made):
    data = made.data("tokens")
    run = load_run(made.runs / "grpo-s0")
    number = data["runs"].index("grpo-s0")
    held = [c for c in data["completions"] if c["r"] == number and c["s"] == SPIKE]
    assert len(held) == 4 and {c["why"] for c in held} == {"spike"}
    for completion in some(held):
        words = [in_file(WORDS[i]) for i in ids_of(SPIKE, completion["n"])]
        assert [data["pieces"][i] for i in completion["t"]] == words
        rows_ = (
            run.tokens(steps=SPIKE).query(f"rollout == {completion['n']}").sort_values("position")
        )
        columns = {
            "share": "attribution",
            "mismatch": None,
            "score": "score_norm_local",
            "weight": "weight",
        }
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


def test_of_many_runs_the_largest_spikes_of_each_method_are_shown(tmp_path, monkeypatch):
    spikes = {"a": ("grpo", 2.0), "b": ("grpo", 9.0), "c": ("grpo", 5.0), "d": ("gspo", 1.0)}
    for name, (method, times) in spikes.items():
        run = new_run(tmp_path / name, method=method, name=name)
        with TraceWriter(run) as writer:
            for step in range(1, 14):
                norm = times if step == 13 else 1.0 + 0.01 * (step % 3)
                writer.append("steps", rows("steps", step, 1) | {"grad_norm": norm})
                writer.append("rollouts", rows("rollouts", step, 2) | {"rollout": [0, 1]})
    runs = load_runs(tmp_path).by_name
    monkeypatch.setattr("sharpscope.analysis.token_view.MOST_RUNS", 3)
    view = token_view(runs)
    assert view["runs"] == ["b", "c", "d"]  # b, then d of the other method, then c
    assert view["notes"][-1] == "1 more runs are not shown here, see the rule."
    monkeypatch.setattr("sharpscope.analysis.token_view.MOST_RUNS", 4)
    assert token_view(runs)["runs"] == ["a", "b", "c", "d"]


def test_a_table_as_csv_escapes_texts_and_keeps_numbers():
    table = pd.DataFrame({"text": ["=1+1", None], 3: [0.5, float("nan")], "mixed": ["-x", 2]})
    assert csv_text(table) == "text,3,mixed\n'=1+1,0.5,'-x\n,,2\n"
