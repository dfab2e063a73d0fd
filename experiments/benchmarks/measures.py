"""Measures of a model in passes over it: local and exact norms, shares, SAM sharpness, Hessian products; how they grow."""

from __future__ import annotations

import io
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path

import numpy as np
import torch

from experiments.benchmarks.common import (
    SHAPES,
    Cost,
    Row,
    cost,
    costs,
    described,
    model_of,
    peak,
    plain_forward,
    plain_gradient,
    random_model,
    random_rows,
)
from sharpscope.surface import Objective, lm_surface, sharpness
from sharpscope.surface.language_model import token_batch
from sharpscope.tokens import attribute, logp_gradient, score_norms


def norms(model_name: str, repeats: int, length: int) -> list[Row]:
    """Local norms of all tokens of a row in forward and backward passes, and memory above weights and gradient."""
    model = model_of(model_name)
    ids, mask = random_rows(model, 1, length)
    gradient = plain_gradient(model, ids)
    gradient()  # allocates the gradient, which then counts as held
    score_norms(model, ids[:, :16], mask[:, :16])  # the self-check
    found = costs({"pass": gradient, "norms": lambda: score_norms(model, ids, mask)}, repeats)
    extra, plain = (
        peak(work) / 2**30 for work in (lambda: score_norms(model, ids, mask), gradient)
    )
    ratio, note = found["norms"].over(found["pass"]), f"{length} tokens; {described(model)}"
    return [
        Row(
            "local norms of all tokens, forward and backward passes",
            ratio,
            "passes",
            "≤ 0.9",
            "≤ 0.6",
            note,
        ),
        Row(
            "their memory above weights and gradient",
            extra,
            "GiB",
            "≤ 0.7",
            "",
            f"{note}; the pass {plain:.2f} GiB",
        ),
    ]


def exact(model_name: str, repeats: int, rows: int, length: int, tokens: int = 8) -> list[Row]:
    """Exact norms of all tokens against a loop of `autograd.grad` over a kept graph, which is timed on some tokens of a row."""
    model = model_of(model_name)
    ids, mask = random_rows(model, rows, length)
    places = torch.linspace(1, length - 1, tokens).long()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loop() -> None:
        logp = model(input_ids=ids[:1], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        for place in places.tolist():
            one = logp[place - 1, ids[0, place]]
            gradients = torch.autograd.grad(one, parameters, retain_graph=True)
            float(torch.stack([g.square().sum() for g in gradients]).sum())

    found = costs({"loop": loop, "exact": lambda: score_norms(model, ids, mask, "exact")}, repeats)
    ratio = found["loop"].over(found["exact"]) * int(mask.sum()) / tokens
    note = f"{rows} × {length} tokens, the loop timed on {tokens}; {described(model)}"
    return [Row("exact norms of all tokens, speed of a loop", ratio, "×", "≥ 2.5", "", note)]


def shares(model_name: str, repeats: int, rows: int, length: int) -> list[Row]:
    """Shares of one update beyond its gradient, in forward passes."""
    model = model_of(model_name)
    ids, mask = random_rows(model, rows, length)
    coef = mask.float()
    works: dict[str, Callable[[], object]] = {
        "forward": plain_forward(model, ids),
        "gradient": lambda: logp_gradient(model, ids, mask, coef),
        "shares": lambda: attribute(model, ids, mask, coef),
    }
    found = costs(works, repeats)
    beyond = Cost(
        found["shares"].cpu - found["gradient"].cpu,
        found["shares"].wall - found["gradient"].wall,
        0,
    )
    note = f"{rows} × {length} tokens; {described(model)}"
    ratio = beyond.over(found["forward"])
    return [
        Row(
            "shares of one update beyond the gradient, forward passes",
            ratio,
            "passes",
            "≤ 2.5",
            "≤ 2.1",
            note,
        )
    ]


def surface(model_name: str, repeats: int, prompts: int, length: int) -> list[Row]:
    """SAM with a standard error over prompts, and a Hessian product of nll, in gradients of the same rows."""
    model = model_of(model_name)
    ids, mask = random_rows(model, prompts, length)
    gradient = plain_gradient(model, ids)
    objective = Objective("nll", token_batch(ids, torch.ones_like(ids), mask))
    note = f"{prompts} prompts × {length} tokens; {described(model)}"
    rows = []
    with lm_surface(model, objective, check="off") as measured:

        def sam() -> None:
            loss, slope, base = measured.gradient_by_prompt()
            found = sharpness(measured, None, 0.05, "sam", at=(loss, slope), base=base)
            assert found.by_prompt is not None

        with torch.enable_grad():
            found = costs({"gradient": gradient, "sam": sam}, repeats)
        passes = found["sam"].over(found["gradient"])
        rows.append(
            Row(
                "SAM with a standard error, forward and backward passes",
                passes,
                "passes",
                "≤ 4",
                "≤ 3",
                note,
            )
        )
        few = objective.rows(torch.arange(min(8, prompts)))
    with lm_surface(model, few, check="off") as measured:
        vector = torch.randn(sum(p.numel() for p in measured.parameters))
        hessian = measured.hessian()
        works = {
            "gradient": plain_gradient(model, ids[: len(few.batch)]),
            "product": lambda: hessian @ vector,
        }
        found = costs(works, repeats)
    note = f"{len(few.batch)} prompts; {found['product'].extra / 2**30:.2f} GiB above what is held"
    passes = found["product"].over(found["gradient"])
    return [
        *rows,
        Row("a Hessian product of nll, in gradients", passes, "gradients", "≤ 3.5", "≤ 2.5", note),
    ]


LIMITS = {"length": 2.0, "batch": 1.1, "width": 2.0, "vocabulary": 1.1, "layers": 1.1, "runs": 1.1}
"""Axis -> the greatest allowed slope of log(seconds) over log(size)."""
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "0.9m": {
        "length": (64, 128, 256, 512, 1024),
        "batch": (2, 4, 8, 16, 32),
        "width": (64, 128, 256, 512),
        "vocabulary": (624, 2_496, 9_984, 39_936),
        "layers": (2, 4, 8, 16),
        "runs": (4, 8, 16),
    },
    "135m": {
        "length": (32, 64, 128, 256),
        "batch": (1, 2, 4),
        "width": (144, 288, 576),
        "vocabulary": (3_072, 12_288, 49_152),
        "layers": (8, 15, 30),
    },
    "0.5b": {
        "length": (32, 64, 128),
        "batch": (1, 2, 4),
        "width": (224, 448, 896),
        "vocabulary": (9_496, 37_984, 151_936),
        "layers": (6, 12, 24),
    },
}
"""Shape -> the sizes of each axis; the others are those of the shape, with two rows of 128 tokens, or one of 64."""


def growth(
    repeats: int, axes: list[str], shapes: list[str], out: Path | None, small: bool = False
) -> list[Row]:
    """Slopes of processor time over each axis, fitted at the three largest sizes; `out`: one figure of all."""
    curves: dict[tuple[str, str, str], list[float]] = {}
    for base, axis in ((base, axis) for base in shapes for axis in axes if axis in SIZES[base]):
        for size in SIZES[base][axis][: 3 if small else None]:
            for name, work in (
                _runs(size).items() if axis == "runs" else _works(base, axis, size).items()
            ):
                work()
                found = statistics.median(cost(work).cpu for _ in range(repeats))
                curves.setdefault((base, axis, name), []).append(found)
                print(f"{base} {axis} {size} {name}: {found:.3g} s", file=sys.stderr, flush=True)
    if out is not None:
        _picture(curves, out)
    rows = []
    for (base, axis, name), values in curves.items():
        sizes = SIZES[base][axis][: len(values)]
        slope = float(np.polyfit(np.log(sizes[-3:]), np.log(values[-3:]), 1)[0])
        note = f"{values[-1]:.3g} s at {sizes[-1]:,}"
        rows.append(
            Row(
                f"{base}: growth of {name} with {axis}",
                slope,
                "(slope)",
                f"≤ {LIMITS[axis]:g}",
                "",
                note,
            )
        )
    return rows


def _works(base: str, axis: str, size: int) -> dict[str, Callable[[], object]]:
    shape, tiny = dict(SHAPES[base]), base == "0.9m"
    if axis in shape:
        shape[axis] = size
    if axis == "width":
        shape["feed_forward"] = SHAPES[base]["feed_forward"] * size // SHAPES[base]["width"]
    model = random_model(shape)
    rows, length = (
        size if axis == "batch" else 1 + tiny,
        size if axis == "length" else 64 * (1 + tiny),
    )
    ids, mask = random_rows(model, rows, length)
    few = torch.zeros_like(ids)
    few[:, torch.linspace(1, length - 1, 8 if tiny else 2).long()] = 1
    return {
        "forward and backward": plain_gradient(model, ids, rows),
        "local norms": lambda: score_norms(model, ids, mask),
        "exact norms of some tokens": lambda: score_norms(model, ids, few, "exact"),
        "shares": lambda: attribute(model, ids, mask, mask.float()),
    }


def _runs(count: int) -> dict[str, Callable[[], object]]:
    """`analyze` of copies of the example's run, in this process."""
    from sharpscope.cli import main

    def work() -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            suppress(SystemExit),
            redirect_stdout(io.StringIO()),
        ):
            source = next(path.parent for path in Path("data/example").rglob("run.json"))
            for number in range(count):
                shutil.copytree(source, Path(folder) / f"run-{number}")
            main(["analyze", folder, "--out", f"{folder}/page"])
            raise RuntimeError("analyze did not end")

    return {"analyze": work}


def _picture(curves: dict[tuple[str, str, str], list[float]], out: Path) -> None:
    """A panel for each shape and axis: processor seconds over size."""
    from matplotlib.figure import Figure

    bases, axes = (list(dict.fromkeys(key[at] for key in curves)) for at in (0, 1))
    figure = Figure(figsize=(2.6 * len(axes), 2.4 * len(bases)), layout="constrained")
    panels = figure.subplots(len(bases), len(axes), squeeze=False)
    for panel in panels.flat:
        panel.set_axis_off()
    for (base, axis, name), values in curves.items():
        panel = panels[bases.index(base)][axes.index(axis)]
        panel.set_axis_on()
        panel.loglog(SIZES[base][axis][: len(values)], values, marker="o", label=name)
        panel.set(xlabel=axis, title=f"{base} parameters")
        shown = SIZES[base][axis]
        panel.set_xticks(
            shown,
            [f"{size:,}" if size < 10_000 else f"{size // 1000}k" for size in shown],
            fontsize=7,
        )
        panel.minorticks_off()
    for row in panels:
        row[0].set_ylabel("processor time [s]")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    figure.savefig(out, dpi=150)
