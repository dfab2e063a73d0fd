"""Text from models in Markdown: shown as it is."""

from __future__ import annotations

import html

from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sharpscope.analysis.text import escape_markdown

RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["strikethrough", "table"])


@settings(deadline=None)
@given(st.text(alphabet="ab1 _*`[]()<>|#!~$&\\:\"'-/{}^.;"))
@example("[a](b) ![a][b] <b> a_b_ _c_")
def test_escaped_text_renders_as_it_is(text):
    assert html.unescape(RENDERER.renderInline(escape_markdown(text))) == " ".join(text.split())


def test_numbers_and_names_stay_readable_as_source():
    assert escape_markdown("score_norm +0.5 [0.1, 0.9]") == "score_norm +0.5 [0.1, 0.9]"


def test_prompts_are_shown_where_they_differ():
    from sharpscope.analysis.text import told_apart

    start = "An island of knights and knaves, where all are one or the other. "
    assert told_apart([start + "Ann says so.", start + "Amy says no."]) == ["… Ann says so.", "… Amy says no."]
    assert told_apart([start] * 2) == [start] * 2
    assert told_apart(["a" * 200, "b"]) == ["a" * 99 + "…", "b"]
    assert told_apart([]) == []
