"""No item is shared by train and held-out, in any task, under any seed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpscope.errors import UserError
from sharpscope.tasks import DatasetSpec, KnightsKnavesSpec, MathSpec, ToolQaSpec, make_task

pytest.importorskip("bm25s", reason="needs the optional library bm25s")
SIZES = {"train_size": 15, "heldout_size": 8}
UNSEEN = SIZES | {"unseen_size": 5}

SPECS = {
    "knights_knaves": lambda seed: KnightsKnavesSpec(people=2, unseen_people=(3,), **UNSEEN, seed=seed),
    "math": lambda seed: MathSpec(
        families=("arithmetic", "linear", "modular"), levels=(1, 2), unseen_levels=(3,), **UNSEEN, seed=seed
    ),
    "tool_qa": lambda seed: ToolQaSpec(hops=(1, 2), **SIZES, seed=seed),
}


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=3, deadline=None)
@given(seeds=st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)))
def test_generated_splits_share_nothing_and_no_other_seed_trains_on_what_is_held_out(name, seeds):
    first, second = (make_task(SPECS[name](seed)).splits() for seed in seeds)
    for splits in (first, second):
        prompts = {split: [example.prompt for example in examples] for split, examples in splits.items()}
        everything = [prompt for asked in prompts.values() for prompt in asked]
        assert len(everything) == len(set(everything))
        ids = [{example.meta["id"] for example in examples} for examples in splits.values()]
        assert len(set.union(*ids)) == sum(map(len, ids))
        for examples in splits.values():
            assert len({example.meta["id"] for example in examples}) == len(examples)
    train = {example.prompt for example in first["train"]}
    assert not train & {example.prompt for example in second["heldout"]}


@settings(max_examples=8, deadline=None)
@given(
    questions=st.lists(st.text("abc", min_size=1, max_size=3), min_size=6, max_size=60),
    share=st.sampled_from([0.2, 0.5, 0.8]),
)
def test_a_data_sets_repeated_rows_stay_on_one_side(questions, share, tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"question": q, "answer": q}) for q in questions))
    columns = {"prompt": "question", "answer": "answer"}
    spec = DatasetSpec(path=str(file), columns=columns, scorer="exact", heldout_fraction=share)
    try:
        splits = make_task(spec).splits()
    except UserError as error:
        assert "held" in str(error) or "train" in str(error)  # all on one side: it says so
        return
    train, heldout = ({example.prompt for example in splits.get(name, [])} for name in ("train", "heldout"))
    assert not train & heldout
    assert train | heldout == set(questions)
