"""One look for all figures: lines that are told apart, labels that fit, files that are equal where figures are."""

from __future__ import annotations

import io
import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import seaborn
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

from sharpscope.analysis.figures import steps as figures_steps
from sharpscope.analysis.figures import tokens as figures_tokens
from sharpscope.analysis.figures.style import (
    COLORS,
    DASHES,
    compact_svg,
    finish,
    lines,
    panels,
    plain,
    save,
    setting_text,
    styled,
    svg_text,
)
from sharpscope.objective import method_names


def test_labels_of_a_narrow_logarithmic_axis_stand_apart():
    rest = np.linspace(0.97, 0.999, 400)
    sample = pd.DataFrame({"logp": np.log1p(-rest), "score_norm_local": 40 * rest})
    figure = figures_tokens.score_norms({"model": sample}, lines(["model"]))
    figure.canvas.draw()
    (axis,) = figure.axes
    ticks = [*axis.xaxis.get_major_ticks(), *axis.xaxis.get_minor_ticks()]
    boxes = sorted(
        (tick.label1.get_window_extent() for tick in ticks if tick.label1.get_text()), key=lambda box: box.x0
    )
    assert len(boxes) >= 2 and all(b.x0 - a.x1 > 10 for a, b in itertools.pairwise(boxes))  # pixels; five are no gap


def test_an_inverted_logarithmic_axis_keeps_its_decades():
    with styled():
        figure, (axis,) = panels(1)
        axis.set(xscale="log", xlim=(1.0, 1e-8))
        finish(figure, [axis])
    figure.canvas.draw()
    assert isinstance(axis.xaxis.get_major_locator(), LogLocator)


def test_every_method_has_its_own_line_in_every_company():
    names = [*method_names(), "grpo-sg-shuffled", "grpo-sg-reverse", "grpo (optimizer.lr=0.001)", "mine"]
    all_lines = lines(names)
    assert len({(line.color, line.dash) for line in all_lines.values()}) == len(names)
    for name in method_names():
        assert lines([name])[name] == all_lines[name] == lines([name, "grpo", "other"])[name]
    compared = [
        "grpo",
        "grpo-sg",
        *(f"grpo-sg-{control}" for control in ("shuffled", "reverse", "constant", "entropy")),
    ]
    assert (
        len({line.color for line in lines(compared).values()}) == 6
    )  # curves that cross: dashes alone do not tell them
    assert set(COLORS[:6]) < set(seaborn.color_palette("colorblind").as_hex())
    variants = lines(["grpo", *(f"grpo (lr={i})" for i in range(16))])
    assert len({(line.color, line.dash) for line in variants.values()}) == 17
    assert len({line.color for line in variants.values()}) == 3  # the method's own and two shades
    assert len({str(dash) for dash in DASHES}) == len(DASHES)


def test_hostile_labels_are_text_and_equal_figures_give_equal_files(tmp_path):
    assert plain("_hidden") == "\u200b_hidden" and plain("a\x1b[31m\n") == "a?[31m?" and plain("$x$") == r"\$x\$"
    assert setting_text("grpo (optimizer.lr=1e-4, rollout.group_size=4)") == "grpo (lr=1e-4, group_size=4)"
    name = "$\\frac{ <script> \x1b_a"
    values = pd.DataFrame({"setting": name, "seed": 0, "step": [1, 2], "quantity": "reward_mean", "value": [1.0, 2.0]})
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths = save(figures_steps.trajectories(values, lines([name]), ["reward_mean"]), tmp_path / folder, "figure")
    assert [p.name for p in paths] == ["figure.png", "figure.svg"]
    for path in paths:
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()
    assert b"<script>" not in paths[1].read_bytes()


def test_panels_are_filled_row_by_row():
    figure, axes = panels(3)
    assert len(axes) == 3 == len(figure.axes)


def test_a_compact_svg_shows_the_same():
    with styled():
        figure, axis = plt.subplots(figsize=(3, 2))
        axis.plot([0, 1, 2], [0.1234567, 0.5, 10.75], marker="o", label="a 12.3456 \"b\" 'c' <d>")
        axis.set_yscale("log")
        axis.legend()
        whole = svg_text(figure)
        plt.close(figure)
    small = compact_svg(whole)
    assert len(small) < 0.7 * len(whole)
    one, two = ElementTree.fromstring(whole), ElementTree.fromstring(small)
    name = "{http://www.w3.org/2000/svg}"
    for tag in ("path", "use", "text", "clipPath"):
        assert len(one.findall(f".//{name}{tag}")) == len(two.findall(f".//{name}{tag}"))
    texts = [
        [re.sub(r"\s*\n\s*", "", "".join(e.itertext())) for e in tree.findall(f".//{name}text")] for tree in (one, two)
    ]
    assert texts[0] == texts[1] and "a 12.3456 \"b\" 'c' <d>" in texts[0]
    places = [[(float(e.get("x")), float(e.get("y"))) for e in tree.findall(f".//{name}use")] for tree in (one, two)]
    np.testing.assert_allclose(places[0], places[1], atol=0.051)
    styles = {e.get("style") for e in one.iter() if e.get("style")}
    rules = dict(re.findall(r"\.(s\d+)\{([^}]*)\}", small))
    assert set(rules.values()) == styles
    drawn = [e.get("style") for e in one.findall(f".//{name}path")]
    assert [rules.get(e.get("class", "")) for e in two.findall(f".//{name}path")] == drawn


@pytest.mark.parametrize(
    ("scale", "ends", "shown"),
    [
        ("log", (1e-5, 1e4), ["10⁻⁴", "10⁻²", "10⁰", "10²", "10⁴"]),
        ("symlog", (-1e3, 10.0), ["−10³", "−10²", "−10¹", "−10⁰", "0", "10⁰", "10¹"]),
    ],
)
def test_powers_are_plain_text(scale, ends, shown):
    figure, (axis,) = panels(1)
    axis.plot([0, 1], ends)
    axis.set_yscale(scale)
    finish(figure, [axis])
    assert [text for text in re.findall(r">([^<>\n]+)</text>", svg_text(figure)) if text in shown] == shown


def test_svg_text_is_what_savefig_writes():
    def drawn():
        with styled():
            figure, axes = panels(2)
            for axis in axes:
                axis.plot([0, 1], [1e6, 3e7], label="a")
                axis.set_title("above an offset", loc="left")
            finish(figure, axes)
        return figure

    with styled(), io.StringIO() as sink:
        drawn().savefig(sink, format="svg", metadata={"Date": None})
        saved = sink.getvalue()
    one, two = (
        [
            (element.tag, element.get("x"), element.get("y"), element.text)
            for element in ElementTree.fromstring(text).iter()
        ]
        for text in (saved, svg_text(drawn()))
    )
    assert one == two
