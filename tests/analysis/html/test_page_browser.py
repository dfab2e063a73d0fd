"""The page in headless Chromium: no error, every control, the keyboard, hostile texts, accessibility, dark and print."""

from __future__ import annotations

import math

import pytest

from sharpscope.analysis.text import shown
from tests.analysis.html.runs import HOSTILE, LONG, SPIKE, STEPS

OPEN_ALL = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"


def _titles(page):
    return page.locator("#completions .completion h3").all_text_contents()


def test_hostile_texts_stay_text(page):
    page.evaluate(OPEN_ALL)
    page.locator("#more").click()
    assert page.evaluate("window.hacked") is None
    assert page.locator("#completions script, #completions img, #completions b").count() == 0
    tokens = set(page.locator("#completions .token").all_text_contents())
    for text in HOSTILE.values():
        assert shown(text) in tokens
    assert not any(mark in "".join(tokens) for mark in "\u202e\u2067\u2028\x00")
    # 100 kB are cut behind a button, which shows them, and never widen the page
    assert not any(len(text) > 300 for text in tokens)
    page.locator("#completions button.all").first.click()
    assert max(map(len, page.locator("#completions .completion").first.locator(".token").all_text_contents())) >= len(
        LONG
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_each_control_works(page, made):
    data = made.data("tokens")
    total = len(data["completions"])
    assert page.locator("#count").text_content() == f"{total} of {total} completions, the first 12 shown"
    page.locator("#run").select_option(label="grpo-sg-s0")
    page.locator("#step").select_option(str(STEPS))
    assert _titles(page) and all("grpo-sg-s0 · step 14" in title for title in _titles(page))
    page.locator("#run").select_option(label="all")
    page.locator("#step").select_option(label="all")
    page.locator("#search").fill("ONERROR")
    with_it = [c for c in data["completions"] if any("onerror" in data["pieces"][i] for i in c["t"])]
    assert 0 < len(with_it) < total and page.locator("#count").text_content().startswith(f"{len(with_it)} of {total} ")
    page.locator("#search").fill("no such text")
    assert page.locator("#count").text_content().startswith("0 of ") and not _titles(page)
    page.locator("#search").fill("")
    page.locator("#sort").select_option("high")
    rewards = [c["reward"] for c in data["completions"]]
    assert f"reward {max(rewards)} ·" in page.locator("#completions .completion .small").first.text_content()
    page.locator("#sort").select_option("largest")
    top = max(data["completions"], key=lambda c: max(map(abs, c["c"]["attribution"])))
    assert _titles(page)[0] == f"{data['runs'][top['r']]} · step {top['s']} · completion {top['n']}"


def test_colors_follow_the_numbers(page, made):
    """The darkest token is the largest of its kind; a signed choice colors by sign; the legend names the choice."""
    columns = made.data("tokens")["completions"][0]["c"]
    tokens = page.locator("#completions .completion").first.locator(".token")
    for name in ("attribution", "score", "weight", "probability", "influence", "entropy"):
        page.locator("#color").select_option(name)
        classes = [
            each.removeprefix("token").strip() for each in tokens.evaluate_all("all => all.map((e) => e.className)")
        ]
        values = [1 - math.exp(v) for v in columns["logp"]] if name == "probability" else columns[name]
        shades = [int(each[-1]) if each else 0 for each in classes]
        order = sorted(range(len(values)), key=lambda i: abs(values[i]))
        assert [shades[i] for i in order] == sorted(shades) and max(shades) > min(shades), name
        signed = name in ("attribution", "influence")
        for value, each in zip(values, classes, strict=True):
            assert each[:-1] in ("", ("down" if value < 0 else "up") if signed else "size"), name
        assert page.locator("#legend").text_content().startswith("score norm" if name == "score" else name)


def test_keyboard_and_pointer_show_a_tokens_numbers(page, made):
    data = made.data("tokens")
    completion = data["completions"][0]
    tokens = page.locator("#completions .completion").first.locator(".token")
    page.locator("#search").focus()
    for _ in range(3):  # the prompt's summary, the list of tokens
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className").startswith("token"):
            break
    focused = "Number(document.activeElement.dataset.index)"
    assert page.evaluate(focused) == 0 and page.locator("#tip").is_visible()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(focused) == 1
    shares = completion["c"]["attribution"]
    said = dict(
        zip(page.locator("#tip dt").all_text_contents(), page.locator("#tip dd").all_text_contents(), strict=True)
    )
    assert float(said["attribution"].replace("−", "-")) == pytest.approx(shares[1], rel=1e-2)
    assert said["position"] == "1" and said["advantage"] == str(completion["adv"]).replace("-", "−")
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    page.keyboard.press("End")
    assert page.evaluate(focused) == len(completion["t"]) - 1
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) > 0
    assert page.locator("#completions .completion").first.locator('.token[tabindex="0"]').count() == 1
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()
    tokens.nth(3).hover()
    assert page.locator("#tip").is_visible() and page.locator("#tip dd").nth(1).text_content() == "3"


def test_a_token_of_the_spike_leads_to_its_completion_and_a_link_can_be_shared(page, made):
    link = page.locator(f'a.spot[href*="-{SPIKE}-"]').first
    run, step, number, place = link.get_attribute("href").removeprefix("#token-").split("-")
    link.click()
    page.wait_for_selector(".token:focus")
    assert page.evaluate("document.activeElement.dataset.index") == place
    assert f"step {step} · completion {number}" in page.evaluate(
        "document.activeElement.closest('.completion').querySelector('h3').textContent"
    )
    assert page.evaluate("location.hash") == f"#token-{run}-{SPIKE}-{number}-{place}"
    assert page.evaluate(
        "(() => { const r = document.activeElement.getBoundingClientRect(); return r.top >= 0 && r.bottom <= innerHeight; })()"
    )


def test_two_runs_answer_one_prompt_side_by_side(page, made):
    data = made.data("tokens")
    page.locator("#layout").select_option("sides")
    assert page.locator("#prompt option").count() == len(data["prompts"]) == 2
    page.locator("#prompt").select_option(index=1)
    columns = page.locator("#completions .side")
    assert columns.count() == 2 and not page.locator("#search").is_visible()
    for column, run in zip((columns.nth(0), columns.nth(1)), data["runs"], strict=True):
        own = column.locator(".completion h3").all_text_contents()
        assert own and all(title.startswith(run) for title in own)
        prompts = column.locator(".prompt pre").evaluate_all("all => all.map((e) => e.textContent)")
        assert set(prompts) == {data["prompts"][int(page.locator("#prompt").input_value())]}
    boxes = [columns.nth(i).bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]


def test_on_paper_everything_is_open_and_controls_are_gone(page):
    page.emulate_media(media="print")
    assert page.locator("#figure-reward img").is_visible()
    assert not page.locator("#controls").is_visible() and not page.locator("nav").is_visible()


def _violations(page, options):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python brings axe-core")
    result = axe.Axe().run(page, options=options).response["violations"]
    return [(v["id"], v["nodes"][0]["html"]) for v in result if v["impact"] in ("serious", "critical")]


def test_axe_finds_no_serious_violation_in_light_and_dark(page):
    page.evaluate("document.querySelectorAll('.completion details').forEach((each) => { each.open = true; })")
    assert _violations(page, {"resultTypes": ["violations"]}) == []
    for name in ("attribution", "entropy"):
        page.emulate_media(color_scheme="dark")
        page.locator("#color").select_option(name)
        assert _violations(page, {"runOnly": ["color-contrast"]}) == []
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
