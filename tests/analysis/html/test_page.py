"""The page's text and data, without a browser: what it says, that nothing in it can run, and that its numbers are the claims'."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt

from sharpscope.analysis import write_page
from sharpscope.analysis.claims import claim_pictures, study_of
from sharpscope.analysis.claims import test_claims as verdicts_of
from sharpscope.analysis.figures.style import compact_svg
from sharpscope.analysis.html.tokens import token_view
from sharpscope.analysis.text import shown
from sharpscope.errors import UserError
from sharpscope.traces import TraceWriter, create_run_dir, create_run_info, load_run, load_runs
from tests.analysis.html.runs import LONG, SPIKE, STEPS, WORDS, write_report_run
from tests.traces.rows import INFO, rows


class Elements(HTMLParser):
    """(tag, attributes) of every element, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, str]] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside in ("script", "style"):
            self.raw.append((self._inside, data))


def test_the_policy_allows_exactly_what_is_in_the_page(made):
    seen = Elements(made.html)
    (policy,) = [
        a["content"] for t, a in seen.found if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'" and rules["img-src"] == "data:"
    assert "unsafe" not in policy and "nonce" not in policy and "http" not in policy
    attributes = [a for t, a in seen.found if t == "script"]
    runnable = [
        text
        for (tag, text), a in zip([r for r in seen.raw if r[0] == "script"], attributes, strict=True)
        if "type" not in a
    ]
    styles = [text for tag, text in seen.raw if tag == "style"]
    for rule, texts in (("script-src", runnable), ("style-src", styles)):
        hashes = [
            "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'" for text in texts
        ]
        assert rules[rule].split() == hashes


def test_nothing_is_loaded_and_no_text_became_markup(made):
    seen = Elements(made.html)
    for tag, attributes in seen.found:
        assert not any(name.startswith("on") or name == "style" for name in attributes), (tag, attributes)
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/svg+xml,"))
    tags = {tag for tag, _ in seen.found}
    assert not tags & {"iframe", "object", "embed", "link", "base", "b"}
    assert made.files.html.stat().st_size < 15e6


def test_hostile_texts_are_there_as_text(made):
    data = made.data("tokens")
    assert set(map(shown, WORDS)) == set(data["pieces"])
    for text in made.html.split("</script>"):
        assert "window.hacked" not in text.split("<script")[-1].replace(
            "\\u003cscript\\u003ewindow.hacked", ""
        ).replace("onerror='window.hacked", "")
    page = re.sub(r"<script.*?</script>", "", made.html, flags=re.DOTALL)
    assert "&lt;img src=x onerror=&#39;window.hacked = 1&#39;&gt;" in page and "<img src=x" not in page
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u2028\u2029\x00\x1b]", made.html)
    markdown = made.files.report.read_text()
    rendered = MarkdownIt("commonmark").enable("table").render(markdown)
    assert not {"script", "b"} & {tag for tag, _ in Elements(rendered).found} and "onerror='" in rendered
    assert all((a["src"] or "").endswith(".png") for tag, a in Elements(rendered).found if tag == "img")
    assert "\u202e" not in markdown and len(markdown) < 60_000


def test_a_spike_leads_to_its_largest_tokens_and_prompts(made):
    (spike, quiet) = made.data("tokens")["spikes"]
    run = load_run(made.runs / "grpo-s0")
    tokens = run.tokens(steps=SPIKE)
    largest = tokens.loc[tokens["attribution"].abs().nlargest(8).index]
    assert spike["s"] == SPIKE and spike["z"] > 4 and spike["norm"] == pytest.approx(run.steps["grad_norm"].max())
    assert [(s["n"], s["i"]) for s in spike["spots"]] == list(zip(largest["rollout"], largest["position"], strict=True))
    assert [s["share"] for s in spike["spots"]] == pytest.approx(list(largest["attribution"]), rel=1e-3)
    assert sum(p["share"] for p in spike["prompts"]) == pytest.approx(1, abs=1e-3)
    assert sum(r["share"] for r in spike["ranges"]) == pytest.approx(1, abs=2e-2)
    assert quiet["z"] is None  # the other run has none: its largest gradient with attribution stands in


def test_prompts_of_a_spike_come_from_the_other_run_too(made):
    data = made.data("tokens")
    runs = {c["r"] for c in data["completions"] if c["s"] == SPIKE}
    assert runs == {0, 1} and {c["p"] for c in data["completions"] if c["r"] == 0} == {
        c["p"] for c in data["completions"] if c["r"] == 1
    }


def test_figures_of_claims_stand_with_their_verdict_and_are_the_files_beside_the_page(made):
    (body,) = re.findall(r'<details class="verdict" id="claim-C1">(.*?)<p class="small">Again:', made.html, re.DOTALL)
    assert '<figure id="figure-logit_gradient">' in body and '<figure id="figure-reward">' not in body
    images = dict(
        re.findall(r'<figure id="figure-(\w+)">\n<img class="still" src="data:image/svg\+xml,([^"]+)"', made.html)
    )
    assert set(images) == set(made.files.figures)
    for name, (_, svg) in made.files.figures.items():
        assert unquote(images[name]) == compact_svg(svg.read_text())


@pytest.mark.parametrize(("claim", "key"), [("C4", "sharpness_asam"), ("C7", "heldout"), ("C8", "roughness")])
def test_pairs_are_drawn_as_they_stand_in_the_verdict(made, claim, key):
    frame = pd.DataFrame({"seed": range(4), "baseline": [0.1, 0.25, 0.4, 0.3], "treatment": [0.3, 0.2, 0.7, 0.4]})
    runs = load_runs(made.runs)
    (verdict,) = verdicts_of(runs, [claim])
    verdict = dataclasses.replace(verdict, frames={key: frame})
    (picture,) = claim_pictures([verdict], study_of(runs))
    (axis,) = picture.figure.axes
    assert axis.get_yscale() == ("linear" if claim == "C7" else "log")
    joined, (points,) = axis.lines[:4], [each for each in axis.lines if each.get_marker() == "o"]
    ends = frame[["baseline", "treatment"]].to_numpy()
    np.testing.assert_allclose([each.get_ydata() for each in joined], ends)
    into, back = (np.array, np.array) if claim == "C7" else (np.log, np.exp)
    mean, half = (
        into(ends).mean(axis=0),
        3.18244630528 * into(ends).std(axis=0, ddof=1) / 2,
    )  # t, three degrees of freedom
    np.testing.assert_allclose(points.get_ydata(), back(mean))
    for at in (0, 1):
        bar = next(each for each in axis.lines[4:] if each is not points and np.isclose(each.get_xdata(), at).any())
        heights = np.asarray(bar.get_ydata())
        wanted = back([mean[at] - half[at], mean[at] + half[at]])
        np.testing.assert_allclose([np.nanmin(heights), np.nanmax(heights)], wanted, rtol=1e-6)
    assert [label.get_text() for label in axis.get_xticklabels()] == ["grpo", "grpo-sg"]


def test_every_verdict_has_its_parts(made):
    page = made.html
    for number in range(1, 14):
        (body,) = re.findall(
            rf'<details class="verdict" id="claim-C{number}">(.*?)<p class="small">Again:', page, re.DOTALL
        )
        assert "<h3>Rule</h3>" in body and ("<figure" in body or "No figure:" in body)
    for title in (
        "Runs side by side",
        "Settings that differ",
        "Events",
        "Costs",
        "Make it again",
        "What to know of these runs",
    ):
        assert title in page
    assert re.search(r"<td>grpo-s0</td><td>7.0</td><td>3.5</td><td>1.8</td>", page) and "process 1,024 MiB" in page
    assert f"sharpscope claims {made.runs} --claim C7 --details" in page


def test_the_markdown_says_the_same(made):
    text = made.files.report.read_text()
    for heading in (
        "Verdicts",
        "Runs side by side",
        "Figures",
        "Spikes and what made them",
        "Events",
        "Costs",
        "Make it again",
    ):
        assert f"# {heading}\n" in text
    assert all(f"]({name}.png)" in text for name in made.files.figures)
    assert "▸" in text and text.count("<details>") == text.count("</details>") == 15


def test_runs_without_tokens_or_tokenizer_or_end_make_an_honest_page(tmp_path, quick):
    write_report_run(tmp_path / "a/plain", tokens=False, spike=False)
    write_report_run(tmp_path / "a/numbers", seed=1, tokenizer=False, status="failed", steps=3)
    bare = create_run_dir(tmp_path / "b/bare")
    create_run_info(bare, INFO | {"seed": 2, "end": "out of memory"})
    page = write_page([tmp_path / "a"], tmp_path / "a.html").read_text(encoding="utf-8")
    assert "plain: no token rows were recorded" in page and "numbers: the run saved no readable tokenizer" in page
    assert "⟨3⟩" in page and "failed" in page
    only = write_page([bare], tmp_path / "b.html").read_text(encoding="utf-8")
    assert "No run has a finished step yet" in only and "No completion was recorded" in only and "out of memory" in only
    assert len(only) < 200_000
    with pytest.raises(UserError, match=r"out: .* does not end in .html"):
        write_page([bare], tmp_path / "folder")
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="no run below"):
        write_page([tmp_path / "none"], tmp_path / "c.html")


def test_a_single_run_and_long_completions(tmp_path, quick):
    folder = write_report_run(tmp_path / "one", tokens=False, steps=2)
    with TraceWriter(folder) as writer:
        writer.append("steps", rows("steps", 3, 1) | {"grad_norm": 1.0})
        writer.append(
            "rollouts",
            rows("rollouts", 3, 1) | {"rollout": 0, "group": 0, "completion": LONG, "prompt": "p", "reward": 1.0},
        )
        count = 5_000
        writer.append(
            "tokens",
            rows("tokens", 3, count) | {"rollout": 0, "position": np.arange(count), "token_id": np.arange(count) % 5},
        )
    view = token_view(load_runs(folder).by_name)
    (long,) = [c for c in view["completions"] if c["s"] == 3]
    assert len(long["t"]) == 4_000 and long["more"] == 1_000 and long["rest"].startswith("yes no\n perhaps knight")
    assert all(len(values) == 4_000 for values in long["c"].values())


def test_a_page_is_the_same_when_made_again(made, tmp_path):
    first, second = (write_page([made.runs], tmp_path / f"{name}.html").read_bytes() for name in "ab")
    assert first.replace(b"a.html", b"") == second.replace(b"b.html", b"")


def test_settings_and_differences_are_those_of_the_runs(made):
    page = made.html
    (table,) = re.findall(r"<h4>Settings that differ</h4>.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
    keys = re.findall(r"<tr><td>(.*?)</td>", table)
    assert keys == ["method", "method.name", "note"]
    (table,) = re.findall(r"<h4>Differences within a seed</h4>.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>")[1:]]
    steps = {name: load_run(made.runs / name).steps for name in ("grpo-s0", "grpo-sg-s0")}
    late = {name: frame[frame["step"] > 2 * STEPS / 3]["reward_mean"].mean() for name, frame in steps.items()}
    row = next(row for row in cells if row[3].startswith("reward"))
    assert float(row[7].split(" ± ")[0]) == pytest.approx(late["grpo-sg-s0"] - late["grpo-s0"], abs=1e-3)
