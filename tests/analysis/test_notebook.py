"""Runs in a notebook: text of tokens, the page and one step's tokens in a frame that reaches nothing outside; the card."""

from __future__ import annotations

import re
from html import unescape

import pytest

from sharpscope.analysis.figures import write_card
from sharpscope.analysis.headline import moved_tokens
from sharpscope.analysis.text import percent
from sharpscope.traces import load_run, load_runs
from tests.analysis.html.runs import SPIKE, STEPS, WORDS, ids_of, write_report_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(write_report_run(tmp_path_factory.mktemp("notebook") / "a"))


def test_tokens_have_their_text(run, tmp_path):
    frame = run.tokens(steps=SPIKE)
    for rollout, rows in frame.groupby("rollout"):
        assert rows.sort_values("position")["text"].tolist() == [WORDS[i] for i in ids_of(SPIKE, rollout)]
    assert list(run.tokens(steps=SPIKE, columns=["text", "logp"])) == ["text", "logp"]
    assert "text" not in run.tokens(steps=SPIKE, columns=["logp"])
    plain = load_run(write_report_run(tmp_path / "b", tokenizer=False, steps=1))
    assert plain.tokens()["text"].isna().all()


def _frame(chromium, html):
    page = chromium.new_context(viewport={"width": 1200, "height": 900}).new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.set_content(f"<!doctype html><title>notebook</title><h1>notebook</h1>{html._repr_html_()}")
    frame = page.frame_locator("iframe")
    frame.locator("#completions .token").first.wait_for()
    return page, frame, asked


def test_the_frame_shows_a_steps_tokens_and_stays_itself(chromium, run):
    page, frame, asked = _frame(chromium, run.show_tokens(step=STEPS))
    titles = frame.locator("#completions h4").all_text_contents()
    assert titles and all(title.startswith(f"step {STEPS} ·") for title in titles)
    frame.locator("[data-key=n]").click()
    assert frame.locator("#count").text_content() == "Prompt 2 of 2"
    assert not [url for url in asked if not url.startswith(("about:", "data:"))]
    page.context.close()


def test_links_and_curves_work_within_the_frame_and_hostile_text_is_inert(chromium, run):
    page, frame, asked = _frame(chromium, load_runs(run.path).show())
    frame.locator('nav a:has-text("Tokens")').click()
    frame.locator("a.spot").first.click()
    frame.locator(".token:focus").wait_for()
    assert page.locator("h1").text_content() == "notebook"
    inner = next(one for one in page.frames if one != page.main_frame)
    assert inner.evaluate("window.hacked") is None and page.evaluate("window.hacked") is None
    reached = "(() => { try { return window.parent.document.title; } catch { return 'apart'; } })()"
    assert inner.evaluate(reached) == "apart"
    assert not [url for url in asked if not url.startswith(("about:", "data:"))]
    page.context.close()


def test_the_card_has_the_headlines_numbers_and_hostile_text_is_text(run, tmp_path):
    from matplotlib.image import imread

    assert imread(write_card(run, tmp_path / "card.png")).shape[:2] == (630, 1200)
    text = unescape(write_card(run, tmp_path / "card.svg").read_text(encoding="utf-8"))
    for one in moved_tokens(run, SPIKE, top=3):
        assert percent(one.share, 1, sign=True) in text
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00\x1b]", text)
    assert "<script>window" not in (tmp_path / "card.svg").read_text(encoding="utf-8")
