"""Means over seeds beside the published numbers."""

from __future__ import annotations

import numpy as np
import pytest

from sharpscope.analysis import claims
from sharpscope.analysis.tables.paper import paper_tables, write_tables
from tests.analysis.claims.frames import frame_run, paired_study, study


def test_tables_hold_means_over_seeds_beside_the_published_numbers(tmp_path):
    runs = paired_study(6, 0.1)
    (table,) = paper_tables(claims.study_of(runs))
    expected = [
        run.eval.query("step == 40 and temperature == 1 and split == 'heldout'")["accuracy"].iloc[0]
        for run in runs.by_name.values()
        if run.method == "grpo-sg"
    ]
    cell = table.rows["grpo-sg"]["3"]
    assert cell.mean == pytest.approx(np.mean(expected)) and cell.n == 6
    assert cell.interval.kind == "percentile-t" and cell.interval.low < cell.mean < cell.interval.high
    assert table.rows["grpo-sg"]["paper (Qwen2.5-3B)"] == "0.63" and "not comparable in scale" in table.caption
    paths = write_tables([table], tmp_path)
    assert [path.suffix for path in paths] == [".csv", ".md", ".tex"]
    assert r"\toprule" in paths[2].read_text() and f"{cell.mean:.3f}" in paths[1].read_text()
    other = paper_tables(
        claims.study_of(study(*runs.by_name.values(), *(frame_run("grpo-sg-shuffled", s) for s in range(3))))
    )
    assert [t.name for t in other] == ["accuracy", "controls"]
    assert str(other[1].rows["grpo-sg-shuffled"]["3"]) == "0.500 (n = 3)"
    assert paper_tables(claims.study_of(study())) == []
