"""The headline: its tokens and shares are those of a plain loop over the tables, and it says what is not known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sharpscope.analysis import show_headline
from sharpscope.analysis.headline import concentration_text, largest_update, moved_sections, moved_table, moved_tokens
from sharpscope.analysis.report import laid_out
from sharpscope.traces import load_run, load_runs
from tests.analysis.drawn import printed
from tests.analysis.html.runs import SPIKE, WORDS, ids_of, write_report_run
from tests.analysis.small import write_small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    return load_run(write_report_run(tmp_path_factory.mktemp("headline") / "a"))


def test_equal_tokens_are_merged_with_their_shares_summed(run):
    """Equal: the same text, direction and outcome, to the same prompt."""
    tokens = run.tokens(steps=[SPIKE]).merge(
        run.rollouts[run.rollouts["step"] == SPIKE], on="rollout", suffixes=("", "_r")
    )
    wanted: dict[tuple, list[float]] = {}
    for row in tokens.to_dict("records"):
        word = WORDS[ids_of(SPIKE, row["rollout"])[row["position"]]][:60]
        key = (word, -np.sign(row["loss_coef"]), row["correct"], row["group"])
        wanted.setdefault(key, []).append(row["attribution"])
    largest = sorted(wanted.items(), key=lambda item: -abs(sum(item[1])))[:5]
    found = moved_tokens(run, SPIKE, top=5)
    assert sorted(one.share for one in found) == pytest.approx(sorted(sum(shares) for _, shares in largest))
    assert {(one.sentence.token, one.sentence.direction, one.correct, one.count) for one in found} == {
        (word, direction, correct, len(shares)) for (word, direction, correct, _), shares in largest
    }
    signs = [one.share < 0 for one in found]
    assert signs == sorted(signs)  # those against the rest come last


def test_the_table_has_arrow_outcome_share_and_probability(run):
    table = moved_table(moved_tokens(run, SPIKE, top=5))
    for row, one in zip(table.to_dict("records"), moved_tokens(run, SPIKE, top=5), strict=True):
        assert row[""] == {1: "↑", -1: "↓"}[one.sentence.direction]
        assert row["answer"] == ("right" if one.correct else "wrong")
        assert float(row["share of the update"].split(" ")[0].replace("−", "-")) == pytest.approx(
            100 * one.share, abs=0.06
        )
        assert ("against the rest" in row["share of the update"]) == (one.share < 0)
        assert (f"(×{one.count})" in row["share of the update"]) == (one.count > 1)


def test_the_spike_is_shown_and_links_to_its_token(run):
    assert largest_update(run).step == SPIKE
    (section,) = moved_sections([run])
    assert f"step {SPIKE}" in section.title and "Gradient norm 20" in section.note
    name, step, rollout, position = section.content["token"].iloc[0].place
    assert (name, step) == ("a", SPIKE) and 0 <= rollout < 4 and 0 <= position < 8


def test_few_tokens_have_no_largest_hundredth(run):
    assert concentration_text(run, SPIKE) == ""


def test_without_shares_what_records_them_is_said(tmp_path: Path):
    loaded = load_run(write_small(tmp_path / "a", "grpo"))
    (section,) = moved_sections([loaded])
    assert section.content == "No token's share of the gradient was recorded (recording.token_gradients_every)."


def test_the_headline_of_two_methods_in_the_demos_ending(tmp_path: Path):
    """Accuracy before and after, the difference with its interval, and how far the method turns the gradient."""
    for method in ("grpo", "grpo-sg"):
        write_small(tmp_path / method, method)
    text = " ".join(printed(show_headline([tmp_path])).split())
    assert "Accuracy on held-out prompts (greedy, 80 prompts): 45 % before, 70 % (grpo), 70 % (grpo-sg) after." in text
    assert "Did grpo-sg change anything, compared with grpo?" in text and "It turns the gradient by 21°." in text
    assert "about 45°" in text and "no difference shown" in text and "One pair of runs" in text
    assert len(printed(show_headline([tmp_path])).splitlines()) <= 20


def test_settings_with_the_baseline_come_first(tmp_path: Path):
    for method in ("ar", "grpo", "grpo-sg"):
        write_small(tmp_path / method, method, recorded=False)
    ((_, settings),) = laid_out(load_runs(tmp_path))
    assert [setting.label for setting in settings] == ["grpo", "grpo-sg", "ar"]
