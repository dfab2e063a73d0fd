"""Traces: what goes in comes out; full disks, damaged files and two writers; packed runs; older schemas."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import sharpscope
from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.rules.judging import mismatch
from sharpscope.traces import (
    SCHEMA_VERSION,
    TABLES,
    DamagedPartWarning,
    Reduction,
    RunLock,
    SchemaError,
    TraceWriter,
    create_run_dir,
    free_name,
    has_writer,
    load_run,
    load_runs,
    pack_runs,
    parts,
    rewind,
    update_run_info,
    write_reductions,
)
from sharpscope.traces.parts import write_part
from sharpscope.traces.schema import VERSION_KEY
from tests.loops import some
from tests.traces.synthetic import (
    Shape,
    damage_part,
    new_run,
    rows,
    token_rows,
    two_parts,
    write_run,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("table", TABLES)
def test_every_table_comes_back_value_by_value(tmp_path, table):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2):
            writer.append(table, rows(table, step))
    frame = load_run(run).arrow(table).to_pandas()
    assert list(frame) == TABLES[table].names
    for step in (1, 2):
        part = frame[frame.step == step]
        for name, given in some(rows(table, step).items()):
            if TABLES[table][name].type == "json":
                assert [json.loads(text) for text in part[name]] == given
            elif name != "step":
                assert part[name].tolist() == list(given), name


def test_null_is_not_recorded_and_nan_is_recorded(tmp_path):
    run = new_run(tmp_path / "a")
    masked = np.ma.MaskedArray([1.0, 2.0, 3.0, 4.0], mask=[True, False, False, False])
    values = {
        "entropy": None,
        "ratio": masked,
        "weight": [None, np.nan, 1.0, 2.0],
        "update": [None, 1, 1, 2],
    }
    with TraceWriter(run) as writer:
        writer.append("tokens", token_rows(**values))
    (path,) = (run / "traces" / "tokens").glob("part-*.parquet")
    table = pq.read_table(path)
    assert table["entropy"].null_count == 4
    assert table["ratio"].to_pylist() == [None, 2.0, 3.0, 4.0]
    assert table["weight"].null_count == 1 and np.isnan(table["weight"][1].as_py())
    assert table["update"].to_pylist() == [None, 1, 1, 2]


@pytest.mark.parametrize(
    ("table", "changes", "words"),
    [
        (
            "tokens",
            {"entropie": [0.0] * 4},
            "tokens.entropie is not a column; did you mean 'entropy'?",
        ),
        ("tokens", {"logp": [0.0] * 3}, "differ in length"),
        ("tokens", {"logp": [0.0, None, 0.0, 0.0]}, "tokens.logp has 1 empty values"),
        ("tokens", {"token_id": [0.5] * 4}, "tokens.token_id is int32"),
        ("tokens", {"token_id": [2**40] * 4}, "tokens.token_id is int32"),
        ("tokens", {"logp": np.zeros((4, 1))}, "tokens.logp is float32"),
        ("rollouts", {"prompt": [1, 2, 3, 4]}, "rollouts.prompt is string: got int64"),
        ("rollouts", {"reward": ["1", "2", "3", "4"]}, "rollouts.reward is float64: got string"),
        ("rollouts", {"reward": [True] * 4}, "rollouts.reward is float64: got bool"),
        ("rollouts", {"correct": [0, 1, 2, 0]}, "rollouts.correct is bool: got int64"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(tmp_path, table, changes, words):
    run = new_run(tmp_path / "a")
    writer = TraceWriter(run)
    with pytest.raises(SchemaError) as error:
        writer.append(table, rows(table, 1) | changes)
    assert words in str(error.value)
    assert writer.flush() == []


def test_integers_too_long_for_a_float_are_rounded(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        writer.append("rollouts", rows("rollouts", 1) | {"reward": [2**60 + 1, None, 0, 1]})
        writer.append("tokens", token_rows(1) | {"entropy": [2**24 + 1, 0, 0, 0]})
    assert load_run(run).rollouts["reward"].tolist()[0] == 2.0**60
    assert load_run(run).tokens()["entropy"].tolist() == [2.0**24, 0, 0, 0]


def test_text_without_utf8_and_parts_that_are_not_finite_survive(tmp_path):
    run = new_run(tmp_path / "a")
    changes = {
        "completion": ["\ud800x", "[bold]", "\x1b[31m", "ok"],
        "reward_parts": [{"a": float("nan")}] * 4,
    }
    with TraceWriter(run) as writer:
        writer.append("rollouts", rows("rollouts", 1) | changes)
    frame = load_run(run).rollouts
    assert frame["completion"].tolist() == ["\ufffdx", "[bold]", "\x1b[31m", "ok"]
    assert json.loads(frame["reward_parts"][0]) == {"a": None}


def test_steps_and_columns_are_chosen_without_reading_others(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2):
            writer.append("tokens", token_rows(step))
        writer.flush()
        for step in (3, 4):
            writer.append("tokens", token_rows(step))
    for part in (run / "traces" / "tokens").iterdir():
        damage_part(part, "logp")  # of its last step
        damage_part(part, "entropy", group=0)
    loaded = load_run(run)
    assert loaded.token_steps == [1, 2, 3, 4] and loaded.rows("tokens") == 16
    frame = loaded.tokens(steps=[1], columns=["logp", "weight"])
    np.testing.assert_array_equal(frame["logp"], token_rows(1)["logp"])
    assert list(frame) == ["logp", "weight"] and not loaded.damaged
    assert [len(part) for part in loaded.iter_tokens(columns=["ratio"])] == [8, 8]
    assert len(loaded.tokens(steps=7)) == 0
    with pytest.raises(UserError, match="did you mean 'logp'"):
        loaded.tokens(columns=["lgp"])


def test_a_run_that_is_rewound_while_it_is_read_keeps_its_rows(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2, 3, 4):
            writer.append("tokens", token_rows(step))
            if step != 2:
                writer.flush()  # parts of steps 1, 2 and 3, 4
    live = load_run(run)
    frames = live.iter_tokens()
    seen = next(frames)["step"].tolist()
    rewind(run, 2)  # the part of steps 2 and 3 is written anew, that of step 4 goes
    assert seen + [step for frame in frames for step in frame["step"]] == [1] * 4 + [2] * 4
    assert live.tokens()["step"].tolist() == [1] * 4 + [2] * 4 and not live.damaged


def test_runs_are_found_below_a_folder_and_joined(tmp_path):
    for name, method, seed in (("a", "grpo", 0), ("sweep/b", "grpo-sg", 1)):
        run = new_run(tmp_path / name, method=method, seed=seed)
        with TraceWriter(run) as writer:
            writer.append("steps", rows("steps", 1, 1))
            writer.append("tokens", token_rows(1))
    new_run(tmp_path / "empty", seed=2)
    runs = load_runs(tmp_path)
    assert (
        list(runs.by_name) == ["a", "empty", "sweep/b"]
        and runs[2].method == "grpo-sg"
        and runs["a"].seed == 0
    )
    assert list(runs.steps)[:4] == ["run", "method", "seed", "step"]
    assert runs.steps[["run", "method", "seed"]].values.tolist() == [
        ["a", "grpo", 0],
        ["sweep/b", "grpo-sg", 1],
    ]
    assert len(runs.tokens(columns=["logp"])) == 8
    assert runs.table["status"].tolist() == ["died"] * 3
    assert list(load_runs([tmp_path / "a"]).by_name) == ["a"]
    assert list(load_runs(tmp_path / "a").by_name) == ["a"]


@pytest.mark.parametrize("version", [2, 3, 4])
def test_a_column_that_an_older_schema_lacks_is_null(tmp_path, version):
    run = new_run(tmp_path / "a")
    old = pa.Table.from_pydict(
        {"step": [1, 1, 2], "index": [0, 1, 0], "logp": [-1.0, -2.0, -3.0]},
        pa.schema(
            [("step", pa.int32()), ("index", pa.int32()), ("logp", pa.float32())],
            {VERSION_KEY: str(version).encode()},
        ),
    )
    (run / "traces" / "tokens").mkdir(parents=True, exist_ok=True)
    write_part(old, run / "traces" / "tokens" / "part-000001-0a1b2c3d.parquet")
    update_run_info(run, schema_version=version)
    with TraceWriter(run) as writer:  # a run that another version began and this one resumed
        writer.append("tokens", token_rows(step=3))
    read = load_run(run)
    assert read.tokens(columns=["logp"])["logp"].tolist()[:3] == [-1.0, -2.0, -3.0]
    versions = read.tokens(columns=["policy_version"])["policy_version"]
    assert versions.isna().tolist() == [True] * 3 + [False] * 4
    mixed = read.tokens(columns=["entropy", "logp"], steps=[2, 3])
    assert (
        mixed["entropy"].isna().tolist() == [True] + [False] * 4 and mixed["logp"].iloc[0] == -3.0
    )
    assert [
        len(part) for part in read.iter_tokens(columns=["logp", "entropy"], required=["entropy"])
    ] == [4]
    assert read.damaged == {} and read.uses.empty


def test_other_schema_versions_and_broken_run_files_are_left_out_with_a_word(tmp_path):
    new_run(tmp_path / "good")
    update_run_info(new_run(tmp_path / "old"), schema_version=SCHEMA_VERSION + 1)
    (new_run(tmp_path / "broken") / "run.json").write_text('{"a": ')
    with pytest.warns(UserWarning, match="left out"):
        runs = load_runs(tmp_path)
    assert list(runs.by_name) == ["good"]
    assert (
        f"schema version {SCHEMA_VERSION + 1}" in runs.skipped["old"]
        and "damaged" in runs.skipped["broken"]
    )
    with pytest.raises(UserError, match="schema version"):
        load_run(tmp_path / "old")
    with pytest.raises(UserError, match=r"has no run\.json"):
        load_run(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        load_runs(tmp_path / "nowhere")


# -- Full disks, damaged files, two writers: what was flushed is read, damage is named and never merged


def test_a_full_disk_loses_nothing_that_was_flushed_and_the_rest_can_be_flushed_later(
    tmp_path, monkeypatch
):
    run, _ = two_parts(tmp_path / "a")
    writer = TraceWriter(run)
    writer.append("tokens", rows("tokens", 3, 20))
    writer.append("steps", rows("steps", 3, 1))

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            writer.flush()
        with pytest.raises(OSError, match="No space left"):
            update_run_info(run, steps_done=7)
    assert set(load_run(run).tokens()["step"]) == {1, 2} and len(load_run(run).steps) == 0
    assert load_run(run).info["steps_done"] == 0
    assert not [p for p in run.rglob("*") if p.name.endswith(".tmp")]
    assert [p.parent.name for p in writer.flush()] == ["tokens", "steps"]
    assert set(load_run(run).tokens()["step"]) == {1, 2, 3} and not load_run(run).verify()


def _start(code, run):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code, str(run)], cwd=ROOT, text=True, **pipes)


def test_a_run_folder_is_never_overwritten(tmp_path):
    create_run_dir(tmp_path / "a")
    (tmp_path / "a" / "config.yaml").touch()
    # a run killed before its run.json left nothing that could be lost
    create_run_dir(tmp_path / "a")
    (tmp_path / "a" / "notes.txt").touch()
    # as a run's, without its mark
    for name in (
        "config.yaml",
        "tokenizer/vocab.json",
        "draft.tmp",
        "traces/note",
    ):
        (tmp_path / name.replace("/", "-") / name).parent.mkdir(parents=True)
        (tmp_path / name.replace("/", "-") / name).touch()
        with pytest.raises(UserError, match="is not empty"):
            create_run_dir(tmp_path / name.replace("/", "-"))
    new_run(tmp_path / "b")
    (tmp_path / "file").touch()
    for name, words in (
        ("a", "is not empty"),
        ("b", r"contains a run and is not overwritten; use --out .*b-2"),
        ("b/below", "is inside the run"),
        ("file", "File exists"),
        ("file/below", "cannot be created"),
    ):
        with pytest.raises(UserError, match=words):
            create_run_dir(tmp_path / name)
    new_run(tmp_path / "b-2")
    assert (
        free_name(tmp_path / "b") == tmp_path / "b-3"
        and free_name(tmp_path / "c") == tmp_path / "c"
    )
    (tmp_path / "free").mkdir()
    assert create_run_dir(tmp_path / "free") == tmp_path / "free"


HELD = """
import sys
from sharpscope.traces import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_writer_hears_who_the_first_is(tmp_path):
    run = new_run(tmp_path / "a")
    process = _start(HELD, run)
    try:
        assert process.stdout.readline() == "held\n"
        assert has_writer(run)
        with pytest.raises(UserError, match=rf"being written by process {process.pid} on "):
            RunLock(run).__enter__()
    finally:
        process.communicate("")
    assert not has_writer(run)
    with RunLock(run):
        assert has_writer(run)
        with pytest.raises(UserError, match="being written"):
            RunLock(run).__enter__()
    (run / "lock.json").write_text("left by a process of version 2 that was killed")
    assert load_run(run).status == "died"
    with RunLock(run):
        pass


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_cut_part_is_named_and_set_aside(tmp_path, share):
    run, (first, _) = two_parts(tmp_path / "a")
    content = first.read_bytes()
    first.write_bytes(content[: int(share * len(content))])
    loaded = load_run(run)
    with pytest.warns(DamagedPartWarning, match=first.name) as warned:
        assert set(loaded.tokens()["step"]) == {2}
    (one,) = warned
    text = warnings.formatwarning(one.message, one.category, one.filename, one.lineno)
    assert text.count("\n") == 1  # no line of source code
    assert "truncated" in loaded.damaged[first.relative_to(run).as_posix()]


def test_a_damaged_page_sets_the_whole_part_aside_for_all_columns(tmp_path):
    run, (first, _) = two_parts(tmp_path / "a")
    damage_part(first, "token_id")
    loaded = load_run(run)
    # its page is sound, and nobody has looked further
    assert set(loaded.tokens(columns=["step"])["step"]) == {
        1,
        2,
    }
    with pytest.warns(DamagedPartWarning):
        assert list(loaded.verify()) == [first.relative_to(run).as_posix()]
    assert set(loaded.tokens(columns=["step"])["step"]) == {2}


@pytest.mark.parametrize("together", [False, True], ids=["a part a step", "a part on both sides"])
def test_a_damaged_part_does_not_give_rows_twice_after_a_rewind(tmp_path, together):
    run = new_run(tmp_path / "a")
    columns = ["step", "rollout", "position", "logp"]

    def write(steps):
        with TraceWriter(run) as writer:
            for step in steps:
                writer.append("tokens", rows("tokens", step, 3))
                if not together or step == 3:
                    writer.flush()

    write(range(1, 8))
    last = max((run / "traces/tokens").iterdir())
    damage_part(last, "logit")
    rewound = rewind(run, 5)
    write((6, 7))
    loaded = load_run(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedPartWarning)
        counts = loaded.tokens(columns=columns).groupby("step").size().to_dict()
    if together:  # what it held of steps 4 and 5 is lost, and said to be
        name = f"traces/tokens/.damaged-{last.name}"
        assert counts == dict.fromkeys((1, 2, 3, 6, 7), 3)
        assert (
            list(rewound) == [name]
            and "its pages cannot be read" in rewound[name]
            and not loaded.verify()
        )
    else:
        assert counts == dict.fromkeys(range(1, 8), 3) and not loaded.verify() and not rewound


# -- Packed data: many runs in few files, nothing lost, readable like folders


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """Two runs, one of them below a folder and one with reductions."""
    folder, shape = tmp_path_factory.mktemp("packs"), Shape(steps=3, length=4)
    write_run(folder / "runs" / "grpo-s0", shape=shape)
    write_run(folder / "runs" / "deep" / "grpo-sg-s0", method="grpo-sg", shape=shape)
    write_reductions(
        folder / "runs" / "grpo-s0", [Reduction("a", 3, 7, {"x": [1.5, float("nan")]})]
    )
    result = CliRunner().invoke(
        app, ["export", str(folder / "runs"), "--to", "packed", "--out", str(folder / "pack")]
    )
    assert result.exit_code == 0, result.output
    return folder


def same(first: sharpscope.traces.Run, second: sharpscope.traces.Run) -> bool:
    """Whether two runs hold the same, where NaN equals NaN and differs from null."""
    assert first.info == second.info
    assert first.config_text == second.config_text
    for table in TABLES:
        assert first.arrow(table).schema == second.arrow(table).schema
    rows = ([run.arrow(table).to_pylist() for table in TABLES] for run in (first, second))
    return str(first.reductions) == str(second.reductions) and repr(next(rows)) == repr(next(rows))


def test_a_pack_gives_the_runs_that_went_in(packed):
    whole, pack = load_runs(packed / "runs"), load_runs(packed / "pack")
    # no rows, no file
    tables = {f"{table}.parquet" for table in TABLES if any(run.rows(table) for run in whole)}
    assert {"steps.parquet", "tokens.parquet"} <= tables and "forks.parquet" not in tables
    assert {path.name for path in (packed / "pack").iterdir()} == {
        "runs.parquet",
        "reductions.parquet",
        *tables,
    }
    assert list(pack.by_name) == list(whole.by_name) == ["deep/grpo-sg-s0", "grpo-s0"]
    for name, run in some(whole.by_name.items()):
        assert same(run, pack[name])
        assert same(run, load_run(packed / "pack" / name))
        assert pack[name].status == "finished"
        assert pack[name].token_steps == run.token_steps
        step = run.token_steps[1]
        ours, theirs = (
            pack[name].tokens([step], ["logp", "entropy"]),
            run.tokens([step], ["logp", "entropy"]),
        )
        assert len(ours) and ours.equals(theirs)
    assert pack["grpo-s0"].reductions is not None and pack["deep/grpo-sg-s0"].reductions is None
    assert list(load_runs(packed).by_name)[:2] == ["pack/deep/grpo-sg-s0", "pack/grpo-s0"]


def test_mistakes_are_named(packed, tmp_path):
    with pytest.raises(UserError, match=r"has no run 'grpo-s1'; did you mean 'grpo-s0'"):
        sharpscope.load_run(packed / "pack" / "grpo-s1")
    runs = load_runs(packed / "runs").by_name
    with pytest.raises(UserError, match="is not empty"):
        pack_runs(runs, packed / "pack")
    shutil.copytree(packed / "runs" / "grpo-s0", tmp_path / "run")
    update_run_info(tmp_path / "run", status="failed")
    with pytest.raises(UserError, match="it is failed; give folders of finished runs"):
        pack_runs({"it": load_run(tmp_path / "run")}, tmp_path / "pack")


# -- Rules on the sampler's log-probabilities by value


def test_the_estimates_are_of_the_divergence_from_sampler_to_trainer():
    """Weighted by the sampler's probabilities, k1 and k3 sum to KL(μ‖π) exactly."""
    mu, pi = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    found = mismatch(np.log(pi), np.log(mu))
    kl = float((mu * np.log(mu / pi)).sum())
    assert (mu * found["k1"]).sum() == pytest.approx(kl) and (
        mu * found["k3"]
    ).sum() == pytest.approx(kl)


def test_half_characters_in_the_names_of_reward_parts_are_replaced(tmp_path):
    run = new_run(tmp_path / "run")
    with TraceWriter(run) as writer:
        writer.append("rollouts", rows("rollouts", 1, 1) | {"reward_parts": [{"a\ud800": 2.0}]})
    assert json.loads(load_run(run).rollouts["reward_parts"][0]) == {"a\ufffd": 2.0}


def test_only_tables_of_which_steps_are_read_have_a_row_group_for_each(tmp_path):
    """A row group of one row takes as long to read as one of thousands."""
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for table in TABLES:
            for step in (2, 1, 3):
                writer.append(table, rows(table, step))
    counts = {
        table: pq.read_metadata(next((run / "traces" / table).iterdir())).num_row_groups
        for table in TABLES
    }
    by_step = {"tokens", "uses", "rollouts"}
    assert counts == {table: 3 if table in by_step else 1 for table in TABLES}
    loaded = load_run(run)
    for table in some(by_step):
        assert loaded.frame(table, 1).step.unique().tolist() == [1]


def test_columns_are_those_of_the_table_whether_it_was_read_or_not(tmp_path):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        for step in (1, 2):
            writer.append("updates", rows("updates", step))
    names = ["grad_norm", "step"]
    loaded = load_run(run)
    alone = loaded.columns("updates", names)
    assert "updates" not in vars(loaded) and len(alone)
    pd.testing.assert_frame_equal(loaded.updates[names], alone)
    pd.testing.assert_frame_equal(loaded.columns("updates", names), alone)


@pytest.mark.parametrize("linked", ["part", "table", "traces"])
def test_a_link_out_of_the_run_is_refused_wherever_it_stands(tmp_path, linked):
    run = new_run(tmp_path / "a")
    with TraceWriter(run) as writer:
        writer.append("eval", rows("eval", 1))
    assert len(load_run(run).eval)
    part = next((run / "traces" / "eval").iterdir())
    moved = {"part": part, "table": part.parent, "traces": part.parent.parent}[linked]
    moved.rename(tmp_path / "elsewhere")
    moved.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(DamagedPartWarning, match="a link that leads out of"):
        assert load_run(run).eval.empty


def test_footers_are_kept_up_to_a_number_of_bytes(tmp_path, monkeypatch):
    run = new_run(tmp_path / "a")
    for step in (1, 2, 3):
        with TraceWriter(run) as writer:
            writer.append("eval", rows("eval", step))
    read, original = [], parts._read_footer
    monkeypatch.setattr(
        parts, "_read_footer", lambda path, table: read.append(path) or original(path, table)
    )
    keys = [parts._key(path, "") for path in sorted((run / "traces" / "eval").iterdir())]
    size = original(keys[0][0], "eval").metadata.serialized_size
    monkeypatch.setattr(parts, "KEPT_FOOTERS", 2 * size + size // 2)
    footers = parts._Footers()
    for place in (0, 1, 0, 2, 0, 1):
        footers.get(*keys[place], "eval")
    assert read == [keys[place][0] for place in (0, 1, 2, 1)]
