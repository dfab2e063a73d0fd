"""Whatever lies in a folder of runs: a reader returns a value or one named reason, and the other runs are read."""

from __future__ import annotations

import io
import json
import os
import shutil
import tracemalloc
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from sharpscope.analysis import path_sections, watch
from sharpscope.analysis.measures import evaluations
from sharpscope.analysis.reduction import reduce_run
from sharpscope.analysis.sections import to_records
from sharpscope.analysis.update_parts import component_sections
from sharpscope.errors import UserError
from sharpscope.traces import (
    TABLES,
    RunLock,
    TraceWriter,
    load_run,
    load_runs,
    pack_runs,
    rewind,
    update_run_info,
)
from sharpscope.traces.info import parse_run_info
from sharpscope.traces.parts import SchemaError, packed_runs
from sharpscope.traces.schema import VERSION_KEY, arrow_schema
from sharpscope.untrusted import UnreadableError, read_bytes, read_json, read_lines
from tests.traces.synthetic import Shape, new_run, rows, write_run

QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LEAF = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8)
)
ANY = st.recursive(
    LEAF, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part)
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A small whole run."""
    shape = Shape(steps=2, prompts=2, group_size=2, length=3, probe_every=1)
    return write_run(tmp_path_factory.mktemp("sound") / "run", shape=shape)


def seen(folder: Path, shown: bool = True) -> None:
    """Read everything and make what `show` prints; a UserError is a reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            loaded = load_run(folder)
            loaded.verify()
            _ = loaded.reductions, loaded.status, loaded.config_text, loaded.tokens()
        except UserError as error:
            assert "\n" not in str(error)
            return
        if shown:
            with suppress(UserError):
                to_records(path_sections([folder]))


# -- run.json


@QUICK
@given(st.binary(max_size=200) | ANY.map(lambda v: json.dumps(v).encode("utf-8", "replace")))
def test_any_content_of_run_json_is_a_value_or_a_reason(content):
    try:
        assert isinstance(parse_run_info(content, Path("a/run.json")), dict)
    except UserError as error:
        assert "a/run.json is damaged" in str(error) or "schema version" in str(error)


WRONG = [None, True, -1, 2**70, 1e308, "x", "\ud800", [], [[1]], {}, {"a": {"b": 1}}, float("nan")]


def paths(value, prefix=()):
    """Places in a JSON value, outermost first."""
    yield from [prefix] if prefix else []
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from paths(inner, (*prefix, key))


def test_a_wrong_value_anywhere_in_run_json_is_shown_or_named(sound, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    info = json.loads((run / "run.json").read_text())
    info |= {"measuring": {"share": 0.1, "seconds": {"norms": 1.0}}, "end": "done", "forks": {}}
    info |= {"imported": {"from": "x", "source": "y", "not_recorded": {"tokens": ["logit"]}}}
    info |= {"peak_memory_bytes": {"process": 1}, "not_measured": {"probes": "why"}}
    info |= {"probe_radius": {"rho": 0.1}}
    places = list(paths(info))
    assert len(places) > 30
    rng = np.random.default_rng(0)
    for place in places:
        for wrong in rng.choice(np.array(WRONG, dtype=object), 1):
            changed = json.loads(json.dumps(info))
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = wrong
            (run / "run.json").write_text(json.dumps(changed))
            seen(run)


# -- Parquet


def arrow_values(draw, of: pa.DataType, count: int):
    return pa.array(
        draw(st.lists(st.none() | st.integers(-3, 100), min_size=count, max_size=count))
    ).cast(of)


TYPES = [pa.int8(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.bool_()]


@st.composite
def tables(draw):
    """A table's name and Parquet content with some of its columns, most of the right type."""
    name = draw(st.sampled_from(["steps", "tokens", "rollouts", "probes", "eval", "events"]))
    count = draw(st.integers(0, 3))
    fields, arrays = [], []
    for column in arrow_schema(name):
        if draw(st.integers(0, 29)) == 0:
            continue
        of = draw(st.sampled_from(TYPES)) if draw(st.integers(0, 19)) == 0 else column.type
        fields.append(pa.field(column.name, of))
        arrays.append(arrow_values(draw, of, count))
    version = draw(st.sampled_from([b"3", b"3", b"2", b"9", b"\xff"]))
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields, {VERSION_KEY: version}))
    return name, table, draw(st.booleans())


@settings(QUICK, max_examples=20)
@given(tables())
def test_any_parquet_of_a_table_is_read_or_set_aside(sound, tmp_path_factory, made):
    name, table, statistics = made
    run = tmp_path_factory.mktemp("parquet") / "run"
    shutil.copytree(sound, run)
    part = next((run / "traces" / name).iterdir())
    pq.write_table(table, part, write_statistics=statistics)
    seen(run)
    shutil.rmtree(run.parent)


@settings(QUICK, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_flipped_bytes_of_a_part_are_read_or_set_aside(sound, tmp_path_factory, seed, flips):
    rng = np.random.default_rng(seed)
    run = tmp_path_factory.mktemp("flips") / "run"
    shutil.copytree(sound, run)
    parts = sorted(run.rglob("*.parquet"))
    part = parts[rng.integers(len(parts))]
    content = bytearray(part.read_bytes())
    for at in rng.integers(len(content), size=flips):
        content[at] ^= 1 << rng.integers(8)
    part.write_bytes(content)
    seen(run, shown=False)
    shutil.rmtree(run.parent)


def part_with(run: Path, table: str, **changes) -> Path:
    """A run's new part of a table in which columns are replaced by Arrow arrays, or left out where None."""
    with TraceWriter(run) as writer:
        writer.append(table, rows(table, 1, 4))
    part = max((run / "traces" / table).iterdir())
    whole = pq.read_table(part)
    for name, values in changes.items():
        place = whole.schema.get_field_index(name)
        whole = whole.remove_column(place)
        if values is not None:
            whole = whole.add_column(place, name, [values])
    pq.write_table(whole, part)
    return part


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step": None}, "no column step"),
        ({"logp": pa.array(["x"] * 4)}, "logp is string, not float"),
        ({"step": pa.array([1, 2, None, 3], pa.int32())}, "step has 1 empty values"),
        ({"score_norm_by_layer": pa.array(["[1]"] * 4)}, "no JSON object of numbers"),
        ({"rollout": None}, "no column rollout"),
        ({"rollout": pa.array([0, 1, 2, -1], pa.int32())}, "rollout has -1, outside 0 to inf"),
        ({"token_id": pa.array([0, -7, 2, 3], pa.int32())}, "token_id has -7, outside"),
        ({"logp": pa.array([-1, 1.5, -1, -1], pa.float32())}, "logp has 1.5, outside -inf to 1"),
        ({"clipped": pa.array([0, 0, 2, 1], pa.int8())}, "clipped has 2, outside -1 to 1"),
        (
            {"draw_probability": pa.array([1, 0, 1, 1], pa.float32())},
            "draw_probability has 0, outside",
        ),
    ],
)
def test_what_a_part_lacks_is_named(tmp_path, change, reason):
    run = new_run(tmp_path / "run")
    part_with(run, "tokens", **change)
    loaded = load_run(run)
    with pytest.warns(UserWarning, match="set aside"):
        assert loaded.tokens(columns=[*TABLES["tokens"].names]).empty
    assert reason in next(iter(loaded.damaged.values()))


RANGED = [
    pytest.param(name, column, bound, id=f"{name} {column.name} {bound:g}")
    for name, table in TABLES.items()
    for column in table.columns
    for bound in (column.low, column.high)
    if np.isfinite(bound)
]


@pytest.mark.parametrize(("table", "column", "bound"), RANGED)
def test_a_value_outside_its_columns_range_is_neither_written_nor_read(
    tmp_path, table, column, bound
):
    run, kind = new_run(tmp_path / "run"), arrow_schema(table).field(column.name).type
    beyond = 1 if pa.types.is_integer(kind) else 0.001
    wrong = bound + (beyond if bound == column.high else -beyond)
    made = rows(table, 1, 4)
    with TraceWriter(run) as writer, pytest.raises(SchemaError, match=f"{column.name} has .*, "):
        writer.append(table, made | {column.name: np.array([max(0, column.low)] * 3 + [wrong])})
    with TraceWriter(new_run(tmp_path / "sound")) as writer:
        writer.append(table, made)
    sound = load_run(tmp_path / "sound").arrow(table)
    place, values = sound.schema.get_field_index(column.name), pa.array([bound] * 3 + [wrong])
    copied = sound.set_column(place, sound.schema.field(place), values.cast(kind))
    with TraceWriter(run) as writer, pytest.raises(SchemaError, match=f"{column.name} has .*, "):
        writer.append_table(table, copied)
    part = part_with(run, table, **{column.name: pa.array([bound] * 3 + [wrong]).cast(kind)})
    loaded = load_run(run)
    with pytest.warns(UserWarning, match=f"its column {column.name} has"):
        assert not len(loaded.arrow(table))
    assert list(loaded.damaged) == [f"traces/{table}/{part.name}"]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_what_is_not_a_number_is_in_every_range(tmp_path, count):
    """Also where nothing else is in the column."""
    run = new_run(tmp_path / "run")
    made = rows("updates", 1, 4)
    names = [column.name for column in TABLES["updates"].columns if column.type == "float64"]
    assert len(names) > 5
    made |= {name: np.where(np.arange(4) < count, np.nan, made[name]) for name in names}
    with TraceWriter(run) as writer:
        writer.append("updates", made)
    loaded = load_run(run)
    assert loaded.updates[names].isna().sum().tolist() == [count] * len(names)
    assert not loaded.verify()


def test_tokens_that_are_there_twice_count_once(sound, tmp_path):
    """In a part that was copied beside itself, and within one part."""
    run, right = tmp_path / "run", load_run(sound)
    shutil.copytree(sound, run)
    for number, part in enumerate(sorted((run / "traces/tokens").iterdir())):
        shutil.copy(part, part.with_name(f"part-00090{number}.parquet"))
    loaded = load_run(run)
    with pytest.warns(
        UserWarning, match=r"part-000900\.parquet is set aside: it has rows of step 1"
    ):
        pd.testing.assert_frame_equal(loaded.tokens(), right.tokens())
    assert loaded.step_rows("tokens") == right.step_rows("tokens")
    twice = min((run / "traces/tokens").iterdir())
    table = pq.read_table(twice)
    pq.write_table(pa.concat_tables([table, table.slice(0, 1)]), twice)
    with pytest.warns(UserWarning, match="it has a row twice"):
        assert 1 in load_run(run).step_rows("tokens")  # of the copy, which is whole


def test_a_part_that_fails_only_where_a_column_is_read_is_not_reduced(sound, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    part = max((run / "traces/tokens").iterdir())
    table = pq.read_table(part)
    wrong = pa.array([5] * len(table), pa.int8())
    pq.write_table(
        table.set_column(
            table.schema.get_field_index("clipped"), table.schema.field("clipped"), wrong
        ),
        part,
    )
    with (
        pytest.warns(UserWarning, match="set aside"),
        pytest.raises(UserError, match="damaged parts"),
    ):
        reduce_run(load_run(run), tmp_path / "reduced")


@pytest.mark.parametrize(
    "ids", ["", "x", "{}", "[1, -2]", "[[1]]", "[2147483648]", '["1"]', "[" * 9999]
)
def test_token_ids_that_are_no_list_of_them_are_named(tmp_path, ids):
    run = new_run(tmp_path / "run")
    part_with(run, "rollouts", token_ids=pa.array(["[1]"] * 3 + [ids]))
    with pytest.warns(UserWarning, match="no JSON list of token IDs"):
        assert load_run(run).rollouts.empty


def test_a_part_without_statistics_or_rows_is_read(tmp_path):
    run = new_run(tmp_path / "run")
    part = part_with(run, "tokens")
    pq.write_table(pq.read_table(part), part, write_statistics=False)
    empty = part.with_name("part-000009.parquet")
    pq.write_table(pq.read_table(part).slice(0, 0), empty)
    loaded = load_run(run)
    assert len(loaded.tokens(steps=1, columns=["step"])) == 4 and not loaded.verify()


def test_a_small_file_that_expands_to_a_large_table_is_set_aside(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARPSCOPE_BOUNDS", "0.005")  # 20 MB
    run = new_run(tmp_path / "run")
    part = part_with(run, "rollouts")
    one = pq.read_table(part).slice(0, 1)
    long = one.set_column(
        one.schema.get_field_index("completion"), "completion", [pa.array(["x" * 1_000_000])]
    )
    whole = pa.concat_tables([long] * 100)
    place = whole.schema.get_field_index("rollout")
    whole = whole.set_column(place, whole.schema.field(place), pa.array(range(100), pa.int32()))
    pq.write_table(whole, part, compression="zstd")
    assert part.stat().st_size < 1_000_000
    tracemalloc.start()
    loaded = load_run(run)
    with pytest.warns(UserWarning, match=r"100\.\d MB, above the bound of 20\.0 MB"):
        assert loaded.rollouts.empty
    tracemalloc.stop()
    monkeypatch.setenv("SHARPSCOPE_BOUNDS", "1")
    assert len(load_run(run).rollouts) == 100


# -- files that are none


def test_pipes_devices_and_links_that_lead_out_are_named(sound, tmp_path):
    os.mkfifo(new_run(tmp_path / "pipe") / "pipe")
    (tmp_path / "pipe/run.json").unlink()
    (tmp_path / "pipe/pipe").rename(tmp_path / "pipe/run.json")
    (tmp_path / "secret").write_text("{}")
    for name, target in {"zero": "/dev/zero", "out": tmp_path / "secret"}.items():
        run = new_run(tmp_path / name)
        (run / "run.json").unlink()
        (run / "run.json").symlink_to(target)
    shutil.copytree(sound, tmp_path / "good")
    with pytest.warns(UserWarning, match="left out"):
        runs = load_runs(tmp_path)
    assert list(runs.by_name) == ["good"]
    assert "pipe, socket or device" in runs.skipped["pipe"]
    assert "pipe, socket or device" in runs.skipped["zero"]
    assert "leads out of" in runs.skipped["out"]


def test_parts_configs_locks_and_tokenizers_that_are_pipes_are_not_waited_for(sound, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    (run / "tokenizer").mkdir()
    os.mkfifo(run / "tokenizer/tokenizer.json")
    os.mkfifo(run / "lock.json")
    os.mkfifo(run / "traces/steps/part-000777.parquet")
    outside = tmp_path / "outside.parquet"
    shutil.copy(next((run / "traces/eval").iterdir()), outside)
    (run / "traces/eval/part-000777.parquet").symlink_to(outside)
    os.mkfifo(run / "config.yaml")
    loaded = load_run(run)
    assert loaded.status == "finished" and len(loaded.tokens()) > 0
    with pytest.warns(UserWarning, match="set aside"):
        assert len(loaded.verify()) == 2
    with pytest.raises(UserError, match="pipe"):
        _ = loaded.config_text


def test_a_link_to_anything_is_not_searched_and_one_to_a_run_is(sound, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/root").symlink_to("/")
    (tmp_path / "runs/linked").symlink_to(sound)
    assert list(load_runs(tmp_path / "runs").by_name) == ["linked"]


def test_sizes_are_bounded_and_the_message_says_how_to_raise_them(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    file.write_text('{"a": "' + "x" * 4000 + '"}')
    with pytest.raises(UnreadableError, match=r"bound of 0\.0 MB; .* set SHARPSCOPE_BOUNDS=5"):
        read_bytes(file, 1000)
    monkeypatch.setenv("SHARPSCOPE_BOUNDS", "5")
    assert read_json(file, 1000) == {"a": "x" * 4000}
    monkeypatch.setenv("SHARPSCOPE_BOUNDS", "none")
    with pytest.raises(UserError, match="not a positive number"):
        read_bytes(file, 1000)
    with pytest.raises(UnreadableError, match="not a file's name"):
        read_bytes(Path("a\0b"), 1000)


def test_lines_end_at_line_feeds_alone_and_are_bounded(tmp_path, monkeypatch):
    file = tmp_path / "lines"
    file.write_text('\ufeff{"a": "\u2028\x85"}\n\nb', encoding="utf-8")
    assert list(read_lines(file)) == [(1, '{"a": "\u2028\x85"}\n'), (2, "\n"), (3, "b")]
    monkeypatch.setenv("SHARPSCOPE_BOUNDS", "1e-8")
    with pytest.raises(UnreadableError, match="line 1 is"):
        list(read_lines(file))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 70 + "1" + "}" * 70, "9" * 5000, "{"])
def test_json_that_is_deep_or_huge_has_one_reason(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UnreadableError, match="is not valid JSON"):
        read_json(tmp_path / "a.json", 1e6)


# -- folders of runs


def test_of_five_hundred_runs_three_broken_ones_are_named(sound, tmp_path):
    for number in range(500):
        (tmp_path / f"run-{number:03d}").mkdir()
        shutil.copy(sound / "run.json", tmp_path / f"run-{number:03d}")
    (tmp_path / "run-007/run.json").write_text('{"a":' * 100_000)
    (tmp_path / "run-100/run.json").write_text('{"schema_version": 3, "seed": "zero"}')
    (tmp_path / "run-499/run.json").write_bytes(b"\xff\xfe")
    with pytest.warns(UserWarning, match="left out"):
        runs = load_runs(tmp_path)
    assert len(runs) == 497
    assert list(runs.skipped) == ["run-007", "run-100", "run-499"]
    assert "seed = 'zero': Input should be a valid integer" in runs.skipped["run-100"]


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a\0b", "", None, "a//b", "\u202e", "twin"]
)
def test_a_packed_set_shows_its_sound_runs_and_names_the_others(sound, tmp_path, name):
    run = load_run(sound)
    pack_runs({"good": run, "twin": run}, tmp_path / "pack")
    file = tmp_path / "pack/runs.parquet"
    listed = pq.read_table(file)
    extra = {"run": name, "info": listed["info"][0].as_py(), "config": None}
    pq.write_table(pa.concat_tables([listed, pa.Table.from_pylist([extra], listed.schema)]), file)
    packed_runs.cache_clear()
    with pytest.warns(UserWarning, match="left out"):
        runs = load_runs(tmp_path)
    assert list(runs.by_name) == ["pack/good", "pack/twin"]
    assert list(runs.skipped) == ["pack/pack row 3"]
    assert len(runs["pack/good"].steps) == 2
    file.write_bytes(b"PAR1")
    packed_runs.cache_clear()
    with pytest.warns(UserWarning, match="left out"):
        assert "cannot be read" in load_runs(tmp_path).skipped["pack"]


def test_of_very_many_runs_show_prints_a_summary_that_says_how_to_see_all(sound, tmp_path):
    for number in range(120):
        shutil.copytree(sound, tmp_path / f"runs/run-{number:03d}")
        update_run_info(tmp_path / f"runs/run-{number:03d}", seed=number)
    update_run_info(tmp_path / "runs/run-005", status="failed")
    (tmp_path / "runs/run-007/run.json").write_text("{")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table, problems = path_sections([tmp_path / "runs"])
    (row,) = table.content.to_dict("records")
    assert (row["runs"], row["finished"], row["seeds"], row["steps"]) == ("119", "118", "119", "2")
    rewards = load_run(sound).steps["reward_mean"]
    assert row["reward ± SD"] == f"{rewards.iloc[-1]:.3g} ± 0"
    assert f"sharpscope analyze {tmp_path / 'runs'}" in table.note
    assert "run-007: run:" in problems.content and "run-005 is failed" in problems.content


@pytest.mark.parametrize("change", ["grows", "is resumed", "vanishes"])
def test_a_run_that_is_watched_may_change_in_every_way(sound, tmp_path, change):
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    update_run_info(run, status="running")
    lock = RunLock(run)
    lock.__enter__()
    seen_rows = []

    def sleep(_):
        seen_rows.append(len(load_run(run).steps))
        if len(seen_rows) > 1:
            if change == "vanishes":
                shutil.rmtree(run)
            else:
                lock.__exit__()
                update_run_info(run, status="finished")
        elif change == "grows":
            with TraceWriter(run) as writer:
                writer.append("steps", rows("steps", 3, 1))
        elif change == "is resumed":
            rewind(run, 1)

    console = Console(file=io.StringIO())
    if change == "vanishes":
        with pytest.raises(UserError, match="was removed while it was watched"):
            watch(run, console, sleep=sleep)
    else:
        assert watch(run, console, sleep=sleep) == "finished"
        assert seen_rows == ([2, 3] if change == "grows" else [2, 1])


def test_a_run_that_is_watched_may_not_exist_yet(sound, tmp_path):
    run, console, waited = tmp_path / "runs/run", Console(file=io.StringIO()), []

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 2:
            shutil.copytree(sound, run)

    assert watch(run, console, sleep=sleep) == "finished"
    assert len(waited) == 2
    assert f"waiting for {run} to begin" in console.file.getvalue().replace("\n", "")


def test_a_reader_beside_a_writer_sees_whole_steps_only(tmp_path):
    run = new_run(tmp_path / "run")
    counts = []
    with RunLock(run), TraceWriter(run) as writer:
        for step in range(1, 6):
            writer.append("tokens", rows("tokens", step, 3))
            writer.append("steps", rows("steps", step, 1))
            counts.append((len(load_run(run).tokens()), len(load_run(run).steps)))
            writer.flush()
            assert load_run(run).status == "running"
    assert counts == [(3 * (step - 1), step - 1) for step in range(1, 6)]


def test_an_evaluation_of_no_prompts_counts_nothing(tmp_path):
    run = new_run(tmp_path / "run")
    made = rows("eval", 1, 3) | {"n": [0, 0, 4], "k": [1] * 3, "accuracy": [0.5, 0.25, 0.75]}
    made |= {"split": ["heldout", "gone", "heldout"], "level": ["1", "1", "2"]}
    with TraceWriter(run) as writer:
        writer.append("eval", made | {"temperature": [0.0] * 3})
    assert evaluations(load_run(run), "heldout", 0.0) == {1: (0.75, 4)}


@pytest.mark.parametrize("table", ["steps", "updates", "rollouts", "eval"])
def test_rows_that_are_there_twice_count_once(sound, tmp_path, table):
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    part = min((run / "traces" / table).iterdir())
    shutil.copy(part, part.with_name("part-000900.parquet"))
    with pytest.warns(UserWarning, match=f"rows of {table} are there twice"):
        found = getattr(load_run(run), table)
    pd.testing.assert_frame_equal(found, getattr(load_run(sound), table), check_like=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        to_records(path_sections([run]))


def test_components_of_a_step_whose_completions_are_damaged_are_not_known(sound, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(sound, run)
    for part in (run / "traces/rollouts").iterdir():
        table = pq.read_table(part)
        place = table.schema.get_field_index("reward_parts")
        wrong = pa.array(["x"] * len(table))
        pq.write_table(table.set_column(place, table.schema.field(place), wrong), part)
    with pytest.warns(UserWarning, match="no JSON object of numbers"):
        sections = component_sections(load_run(run), 1)
    assert "Not split" in str(sections[0].content)
