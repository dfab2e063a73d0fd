"""`analyze` and notebooks on whatever they may find: always a clear word, never a crash or a wrong comparison."""

from __future__ import annotations

import html
import json
import re
from html import unescape
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sharpscope.analysis import analyze
from sharpscope.analysis.card import write_card
from sharpscope.analysis.effects import leading_effects
from sharpscope.analysis.text import escape_markdown, percent
from sharpscope.errors import UserError
from sharpscope.traces import SCHEMA_VERSION, update_run_info
from sharpscope.views import load_run, load_runs
from tests.analysis.conftest import SPIKE, STEPS, WORDS, ids_of, write_report_run
from tests.loops import some
from tests.traces.synthetic import Shape, new_run, write_run

TINY = Shape(steps=3, prompts=2, group_size=2, length=4, eval_every=3, eval_prompts=10)


def write_tiny(path: Path, **options):
    return write_run(path, **({"shape": TINY, "tokens": False, "probes": False} | options))


def text_of(result) -> str:
    return result.page.read_text(encoding="utf-8")


def test_a_study_gives_a_page_figures_and_tables_beside_the_runs(study_folder: Path, quick):
    heard = []
    result = analyze(study_folder, figures=True, on_progress=heard.append)
    assert (
        result.out.resolve() == study_folder / "report"
        and result.page == result.out / "report.html"
    )
    assert {"trajectories", "forest"} <= set(result.figures)
    assert [text.removesuffix(".png") for text in heard if text.endswith(".png")] == list(
        result.figures
    )
    for name, paths in some(result.figures.items()):
        assert paths == [result.out / "figures" / f"{name}.{ending}" for ending in ("png", "svg")]
    table = pd.read_csv(result.tables["comparison"])
    (row,) = table[table["quantity"] == "held-out accuracy, greedy"].to_dict("records")
    assert row["n"] == 6 and row["low"] < row["difference"] < row["high"]
    assert "6 pairs" in text_of(result)
    again = analyze(study_folder, on_progress=heard.append)  # refreshed, and not taken for a run
    assert again.page.read_bytes() == result.page.read_bytes() and not again.figures


def test_no_run_says_what_to_do_and_writes_nothing(tmp_path: Path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match=r"no run below .*; make one with `sharpscope run"):
        analyze(tmp_path / "runs", tmp_path / "out")
    with pytest.raises(UserError, match="is not a folder"):
        analyze(tmp_path / "nowhere", tmp_path / "out")
    new_run(tmp_path / "runs/empty")
    with pytest.raises(UserError, match="has a finished step yet"):
        analyze(tmp_path / "runs", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "runs/report").exists()


def test_runs_that_cannot_be_read_are_named_and_left_out(tmp_path: Path, quick):
    write_tiny(tmp_path / "runs/good")
    update_run_info(write_tiny(tmp_path / "runs/old", seed=1), schema_version=SCHEMA_VERSION + 1)
    damaged = write_tiny(tmp_path / "runs/damaged", seed=2)
    (other,) = (damaged / "traces/eval").glob("*.parquet")
    other.write_bytes(other.read_bytes()[:-100])
    text = text_of(analyze(tmp_path / "runs", tmp_path / "out"))
    assert "old is left out" in text and f"schema version {SCHEMA_VERSION + 1}" in text
    assert f"damaged: traces/eval/{other.name} is set aside" in text


# -- Text from models in Markdown: shown as it is

RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["strikethrough", "table"])


@settings(deadline=None)
@given(st.text(alphabet="ab1 _*`[]()<>|#!~$&\\:\"'-/{}^.;"))
@example("[a](b) ![a][b] <b> a_b_ _c_")
def test_escaped_text_renders_as_it_is(text):
    assert html.unescape(RENDERER.renderInline(escape_markdown(text))) == " ".join(text.split())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(write_report_run(tmp_path_factory.mktemp("notebook") / "a"))


def test_tokens_have_their_text(run, tmp_path):
    frame = run.tokens(steps=SPIKE)
    for rollout, rows in some(frame.groupby("rollout")):
        assert rows.sort_values("position")["text"].tolist() == [
            WORDS[i] for i in ids_of(SPIKE, rollout)
        ]
    assert list(run.tokens(steps=SPIKE, columns=["text", "logp"])) == ["text", "logp"]
    assert "text" not in run.tokens(steps=SPIKE, columns=["logp"])
    (data,) = re.findall(
        'id="data-tokens">(.*?)</script>', run.show_tokens(step=STEPS).page, re.DOTALL
    )
    assert {completion["s"] for completion in json.loads(data)["completions"]} == {STEPS}
    plain = load_run(write_report_run(tmp_path / "b", tokenizer=False, steps=1))
    assert plain.tokens()["text"].isna().all()


def test_frames_stay_themselves_and_their_links_and_curves_work(chromium, run):
    page = chromium.new_context(viewport={"width": 1200, "height": 900}).new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for made in (run.show_tokens(step=STEPS), load_runs(run.path).show()):
        page.set_content(
            f"<!doctype html><title>notebook</title><h1>notebook</h1>{made._repr_html_()}"
        )
        frame = page.frame_locator("iframe")
        frame.locator("#completions .token").first.wait_for()
        titles = frame.locator("#completions h4").all_text_contents()
        frame.locator("[data-key=n]").click()
        assert titles and frame.locator("#count").text_content().startswith("Prompt 2 of ")
        inner = next(one for one in page.frames if one != page.main_frame)
        assert inner.evaluate("window.hacked") is None and page.evaluate("window.hacked") is None
        reached = (
            "(() => { try { return window.parent.document.title; } catch { return 'apart'; } })()"
        )
        assert inner.evaluate(reached) == "apart"
    frame.locator('nav a:has-text("Tokens")').click()
    frame.locator("a.spot").first.click()
    frame.locator(".token:focus").wait_for()
    assert page.locator("h1").text_content() == "notebook"
    assert not [url for url in asked if not url.startswith(("about:", "data:"))]
    page.context.close()


def test_the_card_has_the_headlines_numbers_and_hostile_text_is_text(run, tmp_path):
    from matplotlib.image import imread

    assert imread(write_card(run, tmp_path / "card.png")).shape[:2] == (630, 1200)
    text = unescape(write_card(run, tmp_path / "card.svg").read_text(encoding="utf-8"))
    effects = leading_effects(run, top=3)
    for _, effect in some(effects):
        assert effect in text
    first = effects[0][0]
    tokens = run.tokens(steps=[first.step], columns=["rollout", "position", "effect_kl"])
    tokens = tokens.set_index(["rollout", "position"])["effect_kl"].dropna().astype(float)
    share = tokens[first.rollout, first.position] / tokens.abs().sum()
    assert effects[0][1] == percent(share, 1, sign=True)
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00\x1b]", text)
    assert "<script>window" not in (tmp_path / "card.svg").read_text(encoding="utf-8")
