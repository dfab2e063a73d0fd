"""The page in headless Chromium: no error, every control, the keyboard, hostile texts, accessibility, dark and print."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sharpscope.analysis.text import shown
from sharpscope.traces import load_run
from tests.analysis.conftest import HOSTILE, SPIKE, STEPS
from tests.loops import some

OPEN_ALL = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"


def _titles(page):
    return page.locator("#completions .completion h4").all_text_contents()


def test_hostile_texts_stay_text_in_every_view(page, made):
    """A token of 1 MB, scripts, control characters and marks that reorder: in cards, groups, the popup, sides and charts."""
    seen = set()
    for layout in ("group", "list", "sides"):
        page.locator("#layout").select_option(layout)
        for _ in range(6 if layout == "group" else 1):
            seen |= set(page.locator("#completions .token").all_text_contents())
            for token in page.locator("#completions .token").all()[:9]:
                token.hover()
            if layout == "group":
                page.locator("[data-key=n]").click()
        if layout == "list":
            page.locator("#more").click()
            seen |= set(page.locator("#completions .token").all_text_contents())
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    page.evaluate(OPEN_ALL)
    assert page.evaluate("window.hacked") is None
    assert (
        page.locator("#tokens script, #tokens img, #tokens b, #curves script, #curves img").count()
        == 0
    )
    for text in HOSTILE.values():
        assert shown(text) in seen
    assert not any(mark in page.content() for mark in "\u202e\u2067\u2028\x00")
    # 1 MB is cut in the file, and behind a button, which shows what the file has
    assert not any(len(text) > 300 for text in seen)
    page.locator("#layout").select_option("list")
    page.locator("#completions button.all").first.click()
    longest = max(map(len, page.locator("#completions .token").all_text_contents()))
    assert 20_000 < longest < 21_000


def test_each_control_works(page, made):
    page.locator("#layout").select_option("list")
    data = made.data("tokens")
    total = len(data["completions"])
    assert (
        page.locator("#count").text_content()
        == f"{total} of {total} completions, the first 12 shown"
    )
    page.locator("#run").select_option(label="grpo-sg-s0")
    page.locator("#step").select_option(str(STEPS))
    assert _titles(page) and all("grpo-sg-s0 · step 14" in title for title in _titles(page))
    page.locator("#run").select_option(label="all")
    page.locator("#step").select_option(label="all")
    page.locator("#search").fill("ONERROR")
    with_it = [
        c for c in data["completions"] if any("onerror" in data["pieces"][i] for i in c["t"])
    ]
    assert 0 < len(with_it) < total and page.locator("#count").text_content().startswith(
        f"{len(with_it)} of {total} "
    )
    page.locator("#search").fill("no such text")
    assert page.locator("#count").text_content().startswith("0 of ") and not _titles(page)
    page.locator("#search").fill("")
    page.locator("#sort").select_option("high")
    rewards = [c["reward"] for c in data["completions"]]
    assert (
        f"reward {max(rewards)} ·"
        in page.locator("#completions .completion .small").first.text_content()
    )
    page.locator("#sort").select_option("largest")
    page.locator("#color").select_option("share")
    held = [c for c in data["completions"] if "share" in c["c"]]
    top = max(held, key=lambda c: max(map(abs, c["c"]["share"])))
    assert _titles(page)[0] == f"{data['runs'][top['r']]} · step {top['s']} · completion {top['n']}"


def test_colors_follow_the_numbers(page, made):
    """The darkest token is the largest of its kind; a signed choice colors by sign; the legend names the choice."""
    completion = made.data("tokens")["completions"][0]
    columns = completion["c"]
    tokens = page.locator("#completions .completion").first.locator(".token")
    pi = [math.exp(v) for v in columns["logp"]]
    expected = {
        "direction": [-c * (1 - p) for c, p in zip(columns["coef"], pi, strict=True)],
        "share": columns["share"],
        "advantage": [completion["adv"]] * len(pi),
        "coef": columns["coef"],
        "mismatch": columns["mismatch"],
        "change": [c * p for c, p in zip(columns["coef"], columns["polarity"], strict=True)],
        "probability": [1 - p for p in pi],
        "entropy": columns["entropy"],
        "weight": columns["weight"],
        "score": columns["score"],
        "influence": columns["influence"],
    }
    for name, values in some(expected.items()):
        page.locator("#color").select_option(name)
        names = tokens.evaluate_all("all => all.map((e) => e.className)")
        classes = [each.removeprefix("token").strip() for each in names]
        shades = [int(each[-1]) if each else 0 for each in classes]
        order = sorted(range(len(values)), key=lambda i: abs(values[i]))
        assert [shades[i] for i in order] == sorted(shades), name
        assert max(shades) > min(shades) or name == "advantage", name
        signed = name not in ("probability", "entropy", "weight", "score")
        for value, each in zip(values, classes, strict=True):
            assert each[:-1] in ("", ("down" if value < 0 else "up") if signed else "size"), name
        label = page.locator("#color option:checked").text_content()
        assert page.locator("#legend").text_content().startswith(label)


def test_a_prompts_completions_stand_together_and_keys_move_among_them(page, made):
    data = made.data("tokens")
    focused = "Number(document.activeElement.closest('.completion').dataset.number)"

    def group(c):
        return (c["r"], c["s"], c["g"])

    first = data["completions"][0]
    wanted = [i for i, c in enumerate(data["completions"]) if group(c) == group(first)]
    cards = page.locator("#completions .completion")
    numbers = "all => all.map((e) => Number(e.dataset.number))"
    assert sorted(cards.evaluate_all(numbers)) == sorted(wanted) and len(wanted) == 2
    count = len(set(map(group, data["completions"])))
    assert page.locator("#count").text_content() == f"Prompt 1 of {count}"
    cards.first.focus()
    page.keyboard.press("j")
    assert page.evaluate(focused) == cards.evaluate_all(numbers)[1]
    page.keyboard.press("k")
    assert page.evaluate(focused) == cards.evaluate_all(numbers)[0]
    for key, best in (("b", max), ("w", min)):
        page.keyboard.press(key)
        assert page.evaluate(focused) == best(
            wanted, key=lambda i: data["completions"][i]["reward"]
        )
    page.keyboard.press("n")
    assert page.locator("#count").text_content() == f"Prompt 2 of {count}"
    assert group(data["completions"][page.evaluate(focused)]) != group(first)
    page.keyboard.press("N")
    page.keyboard.press("N")
    assert page.locator("#count").text_content() == f"Prompt {count} of {count}"
    page.locator("#search").focus()
    page.keyboard.type("nNjkbw")  # letters in a field are text
    assert page.locator("#search").input_value() == "nNjkbw"


def test_keyboard_and_pointer_show_a_tokens_numbers(page, made):
    data = made.data("tokens")
    completion = data["completions"][0]
    tokens = page.locator("#completions .completion").first.locator(".token")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")  # the second of the links for the keyboard leads to the tokens
    page.keyboard.press("Enter")
    for _ in range(15):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className").startswith("token"):
            break
    focused = "Number(document.activeElement.dataset.index)"
    assert page.evaluate(focused) == 0 and page.locator("#tip dl").is_visible()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(focused) == 1
    said = _said(page)
    share = float(said["share of the gradient"].replace("−", "-"))
    assert share == pytest.approx(completion["c"]["share"][1], rel=1e-2)
    assert said["position"] == "1" and said["advantage"] == str(completion["adv"]).replace("-", "−")
    assert (
        said["direction"]
        == f"made {'less likely ↓' if completion['c']['coef'][1] > 0 else 'more likely ↑'}"
    )
    assert page.locator("#tip .meaning").count() >= len(said) - 1  # every number is defined
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    page.keyboard.press("End")
    assert page.evaluate(focused) == len(completion["t"]) - 1
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) > 0
    assert (
        page.locator("#completions .completion").first.locator('.token[tabindex="0"]').count() == 1
    )
    page.keyboard.press("Escape")
    assert not page.locator("#tip dl").is_visible()
    tokens.nth(3).hover()
    assert _said(page)["position"] == "3"


def _said(page):
    names = page.locator("#tip dt").all_text_contents()
    return dict(zip(names, page.locator("#tip dd:not(.meaning)").all_text_contents(), strict=True))


COVERED = """() => [...document.querySelectorAll('#tokens button, #tokens select, #tokens input')].filter((each) => {
  const box = each.getBoundingClientRect(), tip = document.getElementById('tip').getBoundingClientRect();
  return !each.closest('#tip') && box.width && box.right > tip.left && box.left < tip.right && box.bottom > tip.top && box.top < tip.bottom;
}).length"""


SEEN = """() => {
  const token = document.activeElement.getBoundingClientRect(), tip = document.getElementById('tip').getBoundingClientRect();
  const apart = token.right <= tip.left || token.left >= tip.right || token.bottom <= tip.top + 1 || token.top >= tip.bottom;
  return apart && token.top >= 0 && token.top < innerHeight && tip.top < innerHeight;
}"""


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_the_popup_covers_no_control(page, size):
    page.set_viewport_size({"width": size[0], "height": size[1]})
    for card in some(page.locator("#completions .completion").all()):
        for token in some(card.locator(".token").all()[::3]):
            token.focus()
            assert page.locator("#tip dl").is_visible() and page.evaluate(COVERED) == 0
            assert page.evaluate(SEEN)
    page.locator("#color").select_option("entropy")  # drawn anew
    page.locator("#completions .token").first.focus()
    assert page.locator("#tip dl").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#tip dl").is_visible()


def test_a_token_of_the_spike_leads_to_its_completion_and_a_link_can_be_shared(page, made):
    link = page.locator(f'a.spot[href*="-{SPIKE}-"]').first
    run, step, number, place = link.get_attribute("href").removeprefix("#token-").split("-")
    link.click()
    page.wait_for_selector(".token:focus")
    assert page.evaluate("document.activeElement.dataset.index") == place
    title = page.evaluate(
        "document.activeElement.closest('.completion').querySelector('h4').textContent"
    )
    assert f"step {step} · completion {number}" in title
    assert page.evaluate("location.hash") == f"#token-{run}-{SPIKE}-{number}-{place}"
    box = "document.activeElement.getBoundingClientRect()"
    assert page.evaluate(f"{box}.top >= 0 && {box}.bottom <= innerHeight")


def _charts(page):
    page.wait_for_selector("html[data-curves=drawn]")
    return page.locator("#curves .chart")


def test_curves_are_the_tables_and_a_click_on_a_step_opens_its_tokens(page, made):
    (group,) = made.data("curves")
    charts = {chart["title"]: chart for chart in group["charts"]}
    drawn = _charts(page)
    assert drawn.count() == len(charts)
    steps = load_run(made.runs / "grpo-s0").steps.sort_values("step")
    norm = charts["gradient norm before clipping"]
    at = [setting["label"] for setting in group["settings"]].index("grpo")
    assert norm["x"] == steps["step"].tolist() and norm["log"]
    np.testing.assert_allclose(norm["series"][at]["y"], steps["grad_norm"], rtol=1e-4)
    plot = page.locator('.u-over[data-chart="gradient norm before clipping"]')
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    x = box["width"] * (SPIKE - 1) / (STEPS - 1)
    plot.hover(position={"x": x, "y": 40})
    said = page.locator(".chart", has=plot).locator(".readout").text_content()
    assert said.startswith(f"step {SPIKE}: ") and "grpo 20" in said and "gradient spike" in said
    plot.click(position={"x": x, "y": 40})
    assert page.evaluate("location.hash") == f"#step-{SPIKE}"
    assert page.locator("#step").input_value() == str(SPIKE)
    assert all(f"step {SPIKE} ·" in title for title in _titles(page)) and _titles(page)
    assert page.evaluate("document.activeElement.className") == "completion"


def test_curves_zoom_smooth_and_hide_and_obey_the_keyboard(page, made):
    _charts(page)
    span = "Curves.plots.map(({ u }) => [u.scales.x.min, u.scales.x.max])"
    values = "Curves.plots[0].u.data[1].map((v) => v)"
    raw = page.evaluate(values)
    page.locator("#smoothing").evaluate(
        "(s) => { s.value = 5; s.dispatchEvent(new Event('input')); }"
    )
    smooth = [float(np.mean(raw[max(0, i - 2) : i + 3])) for i in range(len(raw))]
    assert page.evaluate(values) == pytest.approx(smooth)
    plot = page.locator("#curves .u-over").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 30, steps=4)
    page.mouse.up()
    zoomed = page.evaluate(span)
    assert (
        all(low == pytest.approx(1 + 0.3 * (STEPS - 1), abs=0.2) for low, _ in zoomed)
        and len(zoomed) > 5
    )
    assert page.evaluate("location.hash") == ""  # a drag is no click
    page.locator("#unzoom").click()
    assert page.evaluate(span) == [[1, STEPS]] * len(zoomed)
    page.locator(".setting").first.click()
    assert page.evaluate("Curves.plots.every(({ u }) => !u.series[1].show && u.series[2].show)")
    page.locator("#curves .plot").first.focus()
    for _ in range(SPIKE):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == f"#step-{SPIKE}"


@pytest.mark.parametrize("size", [(1300, 1000), (390, 844)])
def test_axe_finds_no_violation_in_light_and_dark_on_both_screens(page, size):
    from axe_playwright_python import sync_playwright as axe

    page.set_viewport_size({"width": size[0], "height": size[1]})
    _charts(page)
    for layout in ("group", "list", "sides"):
        page.locator("#layout").select_option(layout)
        page.locator("#completions .token").first.focus()
        page.evaluate(OPEN_ALL)
        assert (
            axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
            == []
        ), layout
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    page.emulate_media(color_scheme="dark")
    for name in ("direction", "entropy"):
        page.locator("#color").select_option(name)
        assert (
            axe.Axe().run(page, options={"runOnly": ["color-contrast"]}).response["violations"]
            == []
        )
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


def test_the_first_screen_says_what_happened_and_a_click_moves_everything(page, made):
    _charts(page)
    head = page.locator("section.first")
    box = head.bounding_box()
    assert box["y"] + box["height"] < 900 and page.locator(".numbers li").count() == 4
    assert page.locator(".verdict").text_content().strip()
    over = page.locator("#hero .u-over")
    width = over.bounding_box()["width"]
    over.click(position={"x": width * (STEPS - 1) / (STEPS - 1) - 1, "y": 100})
    assert page.evaluate("location.hash") == f"#step-{STEPS}"
    over.click(position={"x": width * (SPIKE - 1) / (STEPS - 1), "y": 100})
    assert page.evaluate("location.hash") == f"#step-{SPIKE}"
    blocks = page.locator(".of-step")
    shown_steps = {each.get_attribute("data-step") for each in blocks.all() if each.is_visible()}
    assert shown_steps == {str(SPIKE)} and blocks.count() > 2
    groups = {(c["r"], c["g"]) for c in made.data("tokens")["completions"] if c["s"] == SPIKE}
    assert page.locator("#completions .head").count() == min(6, len(groups)) > 1
    assert all(
        f"step {SPIKE} " in text
        for text in page.locator("#completions .head .facts").all_text_contents()
    )


def test_axis_labels_are_whole_and_tables_have_no_shadow(page):
    _charts(page)
    labels = page.evaluate(
        """Curves.plots.filter(({ u }) => u.width).map(({ u }) => {
          const axis = u.axes[1];
          const widest = Math.max(...(axis._values || []).map((text) => u.ctx.measureText(text).width / devicePixelRatio));
          return [axis._size, widest];
        })"""
    )
    assert len(labels) > 3 and all(size > widest + 6 for size, widest in labels)
    assert (
        page.locator(".scroll").first.evaluate("e => getComputedStyle(e).backgroundImage") == "none"
    )


def test_a_phone_shows_a_short_page(chromium, made):
    context = chromium.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(made.files.page.as_uri())
    page.wait_for_selector("html[data-curves=drawn]")
    assert page.evaluate("document.documentElement.scrollHeight") <= 6_000
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("nav a", has_text="Tokens").click()
    page.locator("#completions .token").first.wait_for()
    context.close()
