"""The paper's tables at laptop scale: their numbers are those of a plain loop over the recorded runs."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.paper.figures import TABLES, ablation, knights, markdown, only
from sharpscope.traces import load_runs


@pytest.fixture(scope="module")
def data():
    return {"kk": load_runs("data/reference")}


def test_the_tables_hold_means_and_differences_of_the_recorded_runs(data):
    kk = only(data["kk"], "knights_knaves", "grpo", "grpo-sg")
    assert {run.method for run in kk} == {"grpo", "grpo-sg"} and len(kk) >= 24
    ends = {}
    for run in kk:
        last = run.eval[
            (run.eval["step"] == run.eval["step"].max()) & (run.eval["split"] == "heldout")
        ]
        ends[run.method, run.seed] = 100 * float(last["accuracy"].iloc[0])
    table = knights(data).set_index("setting")
    mean = np.mean([value for (method, _), value in ends.items() if method == "grpo-sg"])
    assert table.loc["grpo-sg, after training", "3 people [%]"].startswith(f"{mean:.1f}")
    pairs = [
        ends["grpo-sg", seed] - value
        for (m, seed), value in ends.items()
        if m == "grpo" and ("grpo-sg", seed) in ends
    ]
    row = ablation(data).set_index("method").loc["grpo-sg"]
    assert row["seeds"] == len(pairs) == 12
    assert float(row["difference"].split(" ")[0].replace("−", "-")) == pytest.approx(
        np.mean(pairs), abs=0.06
    )


def test_every_table_says_what_the_paper_reports_and_what_is_the_same():
    assert len(TABLES) == 8 and all(paper and same for _, paper, same in TABLES.values())
    text = markdown(ablation({"kk": load_runs("data/reference")}).head(2))
    assert len(text.splitlines()) == 4 and all(line.startswith("| ") for line in text.splitlines())
