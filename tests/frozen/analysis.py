"""Analysis frozen: verdicts, tables, figure data and report.md made of the runs in `data/`.

    python -m tests.frozen.analysis compare   # names what differs from what is stored; exit code 1 if anything does
    python -m tests.frozen.analysis record    # stores what the code gives now

Numbers are stored as they are, nothing is rounded. Of a figure every line, band, error bar and patch of each axis is kept
as a hash of its coordinates in float64, with labels, titles and scales as text.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).parent
FOLDERS = ("reference", "example")
LONG = 300  # longer strings are stored as hashes


def freeze(folder: str) -> dict[str, Any]:
    """Everything that the analysis makes of the runs below data/`folder`, as flat JSON: place → text, number or hash."""
    from sharpscope.analysis.markdown import report_markdown

    from sharpscope.analysis import build, load_several
    from sharpscope.analysis.claims import claims_json
    from sharpscope.analysis.text import csv_text

    runs = load_several(ROOT / "data" / folder)
    report = build(runs, Path("data") / folder)
    found: dict[str, Any] = {}
    for verdict in json.loads(claims_json([section.verdict for section in report.verdicts])):
        found |= _flat(verdict, f"claims.{verdict['claim']}")
    tables = {"runs": csv_text(runs.table)} | {
        f"summary of {s.study.name}": csv_text(s.summary) for s in report.studies
    }
    for table in report.tables:
        tables[table.name] = csv_text(table.frame())
        found |= {f"tables.{table.name}.md": _hash(table.markdown()), f"tables.{table.name}.tex": _hash(table.latex())}
    for name, text in tables.items():
        found |= {f"tables.{name}.csv:{number}": line for number, line in enumerate(text.splitlines(), 1)}
    for section in [*report.studies, *report.verdicts]:
        for name, picture in section.figures.items():
            found[f"figures.{name}.caption"] = picture.caption
            found |= dict(_artists(picture.figure, f"figures.{name}"))
    found = {place: _short(value) for place, value in found.items()}
    lines = report_markdown(report).replace(shlex.quote(str(ROOT)) + "/", "").splitlines()
    return found | {"report.md": [_short(line) for line in lines]}


def _flat(value: Any, place: str) -> dict[str, Any]:
    if place.endswith(".rows"):
        return {place: _hash(json.dumps(value))}
    if isinstance(value, dict):
        return {k: v for name, inner in value.items() for k, v in _flat(inner, f"{place}.{name}").items()}
    if isinstance(value, list):
        return {k: v for number, inner in enumerate(value) for k, v in _flat(inner, f"{place}[{number}]").items()}
    return {place: value}


def _artists(figure: Figure, name: str) -> Iterator[tuple[str, str]]:
    for number, axis in enumerate(figure.axes):
        place = f"{name}[{number}]"
        texts = [axis.get_title(), axis.get_xlabel(), axis.get_ylabel(), axis.get_xscale(), axis.get_yscale()]
        yield f"{place}.text", " | ".join(text.replace("\n", " ") for text in texts)
        yield f"{place}.legend", " | ".join(axis.get_legend_handles_labels()[1])
        for kind, arrays in _coordinates(axis).items():
            for count, array in enumerate(arrays):
                yield f"{place}.{kind}[{count}]", f"{array.shape} {_hash(array.astype(np.float64).tobytes())}"


def _coordinates(axis: Axes) -> dict[str, list[np.ndarray]]:
    """Lines as (n, 2) points; bands, segments and markers of collections as vertices and offsets; patches as vertices."""
    lines = [np.column_stack([line.get_xdata(), line.get_ydata()]) for line in axis.get_lines()]
    collections = [
        np.concatenate([*(path.vertices for path in c.get_paths()), np.ma.filled(c.get_offsets(), np.nan)])
        for c in axis.collections
    ]
    patches = [patch.get_transform().transform_path(patch.get_path()).vertices for patch in axis.patches]
    return {"line": lines, "collection": collections, "patch": patches}


def _hash(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def _short(value: Any) -> Any:
    return f"{value[:60]}… {_hash(value)}" if isinstance(value, str) and len(value) > LONG else value


def main(mode: str) -> int:
    """Record, or compare and print one line for each place that differs; returns the exit code."""
    differing = 0
    for folder in FOLDERS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            now = freeze(folder)
        file = STORED / f"analysis_{folder}.json"
        if mode == "record":
            file.write_text(json.dumps(now, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
            continue
        then = json.loads(file.read_text(encoding="utf-8"))
        for place in dict.fromkeys([*then, *now]):
            before, after = then.get(place, "(nothing)"), now.get(place, "(nothing)")
            if place == "report.md":
                texts = difflib.unified_diff(
                    list(before), list(after), "report.md then", "report.md now", n=0, lineterm=""
                )
                differing += len(lines := list(texts))
                print("\n".join(lines))
            elif before != after:
                differing += 1
                print(f"{folder}: {place}\n  was {before}\n  is  {after}")
    print(f"{differing} differences" if mode == "compare" else f"stored in {STORED}")
    return int(differing > 0)


if __name__ == "__main__":
    if sys.argv[1:] not in (["record"], ["compare"]):
        sys.exit("usage: python -m tests.frozen.analysis record|compare")
    sys.exit(main(sys.argv[1]))
