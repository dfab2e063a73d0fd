"""Crashes, full disks, damaged files, two writers: what was flushed is read, damage is named and never merged."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import sharpscope
from sharpscope.cli import app
from sharpscope.errors import UserError
from sharpscope.traces import (
    TABLES,
    DamagedPartWarning,
    Reduction,
    RunLock,
    TraceWriter,
    create_run_dir,
    free_name,
    has_writer,
    load_run,
    load_runs,
    pack_runs,
    rewind,
    update_run_info,
    write_reductions,
)
from sharpscope.traces.rules import impossible, mismatch
from tests.pair import pair
from tests.traces.rows import damage_part, new_run, rows, two_parts

ROOT = Path(__file__).parents[2]


def test_a_full_disk_loses_nothing_that_was_flushed_and_the_rest_can_be_flushed_later(tmp_path, monkeypatch):
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
    create_run_dir(tmp_path / "a")  # a run killed before its run.json left nothing that could be lost
    (tmp_path / "a" / "notes.txt").touch()
    new_run(tmp_path / "b")
    (tmp_path / "file").touch()
    for name, words in (
        ("a", "is not empty"),
        ("b", r"contains a run and is not overwritten; use --out .*b-2"),
        ("b/below", "is inside the run"),
        ("file", "is a file"),
        ("file/below", "cannot be written"),
    ):
        with pytest.raises(UserError, match=words):
            create_run_dir(tmp_path / name)
    new_run(tmp_path / "b-2")
    assert free_name(tmp_path / "b") == tmp_path / "b-3" and free_name(tmp_path / "c") == tmp_path / "c"
    (tmp_path / "free").mkdir()
    assert create_run_dir(tmp_path / "free") == tmp_path / "free"


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer/vocab.json", "draft.tmp", "traces/note"])
def test_a_folder_of_ones_own_is_no_start_that_was_killed(tmp_path, name):
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text("# my own")
    with pytest.raises(UserError, match="is not empty"):
        create_run_dir(tmp_path / "mine")
    assert [p for p in (tmp_path / "mine").rglob("*") if p.is_file()] == [path] and path.read_text() == "# my own"


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


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
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
    assert set(loaded.tokens(columns=["step"])["step"]) == {1, 2}  # its page is sound, and nobody has looked further
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
        assert list(rewound) == [name] and "its pages cannot be read" in rewound[name] and not loaded.verify()
    else:
        assert counts == dict.fromkeys(range(1, 8), 3) and not loaded.verify() and not rewound


# -- Packed data: many runs in few files, nothing lost, readable like folders


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """The example's two runs, one of them below a folder and with reductions."""
    folder = tmp_path_factory.mktemp("packs")
    shutil.copytree(pair() / "grpo-s0", folder / "runs" / "grpo-s0")
    shutil.copytree(pair() / "grpo-sg-s0", folder / "runs" / "deep" / "grpo-sg-s0")
    write_reductions(folder / "runs" / "grpo-s0", [Reduction("a", 3, 7, {"x": [1.5, float("nan")]})])
    result = CliRunner().invoke(app, ["export", str(folder / "runs"), "--to", "packed", "--out", str(folder / "pack")])
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
    assert {path.name for path in (packed / "pack").iterdir()} == {"runs.parquet", "reductions.parquet", *tables}
    assert list(pack.by_name) == list(whole.by_name) == ["deep/grpo-sg-s0", "grpo-s0"]
    for name, run in whole.by_name.items():
        assert same(run, pack[name])
        assert same(run, load_run(packed / "pack" / name))
        assert pack[name].status == "finished"
        assert pack[name].token_steps == run.token_steps
        step = run.token_steps[1]
        ours, theirs = pack[name].tokens([step], ["logp", "entropy"]), run.tokens([step], ["logp", "entropy"])
        assert len(ours) and ours.equals(theirs)
    assert pack["grpo-s0"].reductions is not None and pack["deep/grpo-sg-s0"].reductions is None
    assert list(load_runs(packed).by_name)[:2] == ["pack/deep/grpo-sg-s0", "pack/grpo-s0"]


def test_mistakes_are_named(packed, tmp_path):
    with pytest.raises(UserError, match=r"has no run 'grpo-s1'; did you mean 'grpo-s0'"):
        sharpscope.load_run(packed / "pack" / "grpo-s1")
    runs = load_runs(packed / "runs").by_name
    with pytest.raises(UserError, match="is not empty"):
        pack_runs(runs, packed / "pack")
    shutil.copytree(pair() / "grpo-s0", tmp_path / "run")
    update_run_info(tmp_path / "run", status="failed")
    with pytest.raises(UserError, match="it is failed; give folders of finished runs"):
        pack_runs({"it": load_run(tmp_path / "run")}, tmp_path / "pack")


def test_damage_is_told(packed, tmp_path):
    shutil.copytree(packed / "pack", tmp_path / "pack")
    file = tmp_path / "pack" / "steps.parquet"
    content = bytearray(file.read_bytes())
    content[200:240] = bytes(40)
    file.write_bytes(content)
    run = load_run(tmp_path / "pack" / "deep" / "grpo-sg-s0")
    with pytest.warns(sharpscope.traces.DamagedPartWarning, match=r"steps.parquet is set aside"):
        assert run.steps.empty
    (tmp_path / "pack" / "runs.parquet").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"runs.parquet: cannot be read .*; restore it"):
        load_runs(tmp_path / "pack")


# -- Rules on the sampler's log-probabilities by value


def test_the_estimates_are_of_the_divergence_from_sampler_to_trainer():
    """Weighted by the sampler's probabilities, k1 and k3 sum to KL(μ‖π) exactly."""
    mu, pi = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    found = mismatch(np.log(pi), np.log(mu))
    kl = float((mu * np.log(mu / pi)).sum())
    assert (mu * found["k1"]).sum() == pytest.approx(kl) and (mu * found["k3"]).sum() == pytest.approx(kl)


TRAINER = -np.linspace(0.2, 2, 20)


@pytest.mark.parametrize(
    ("sampler", "share", "why"),
    [
        (TRAINER, 0.0, ""),
        (np.zeros(20), 1.0, "all are 0"),
        (np.full(20, -1.5), 1.0, "all are -1.5"),
        (np.where(np.arange(20) < 5, 0.0, TRAINER), 0.25, "exactly 0"),
        (np.where(np.arange(20) < 2, 0.5, TRAINER), 0.1, "above 0"),
        (np.where(np.arange(20) < 2, 1e-5, TRAINER), 0.0, ""),  # rounding
        (np.select([np.arange(20) < 1, np.arange(20) < 2], [0.5, 0.0], TRAINER), 0.1, "above 0, exactly 0"),
    ],
)
def test_what_cannot_be(sampler, share, why):
    assert impossible(TRAINER, sampler) == (share, why)
