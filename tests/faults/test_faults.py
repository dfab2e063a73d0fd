"""A sample of `python -m tests.faults.running`; all of it has the marker `slow`."""

from __future__ import annotations

import random

import pytest

from sharpscope.errors import UserError
from tests.faults import damage, disks, killing, malformed, racing
from tests.faults.child import Death, journal_entry, run_child
from tests.faults.running import FAULTS, WHOLE, run_faults, write_table
from tests.faults.setting import Tried, difference, holes


def survived(tried: Tried, least: int = 1) -> None:
    assert tried.failures == []
    assert tried.tried >= least


def test_a_run_killed_at_a_random_time_goes_on_as_if_it_had_not_been(uninterrupted, tmp_path):
    survived(killing.kill_at_times(*uninterrupted, tmp_path, 1, seed=5))


@pytest.mark.parametrize("moment", ["before", "inside", "after"])
def test_a_run_killed_inside_its_last_checkpoint(uninterrupted, tmp_path, moment):
    """Operations near the end of the run belong to the last checkpoint."""
    policy, whole = uninterrupted
    one = whole[0]
    chooser = random.Random(moment)
    death = Death(operation=one.operations - chooser.randint(5, 35), moment=moment)
    assert killing._one(policy, one, death, _made(tmp_path / "one"), chooser, power=False) == ""


def test_a_loss_of_power(uninterrupted, tmp_path):
    survived(killing.lose_power_at_operations(*uninterrupted, tmp_path, 1, seed=7))


def test_writes_that_the_disk_refuses(uninterrupted, tmp_path):
    survived(disks.refuse_operations(*uninterrupted, tmp_path, 1, seed=3))


def test_a_full_disk(uninterrupted, tmp_path):
    tried = disks.fill_disk(*uninterrupted, tmp_path, 1, seed=2)
    if tried.note:
        tried = disks.limit_file_size(*uninterrupted, tmp_path, 1, seed=2)
    survived(tried)


def test_a_read_only_disk(uninterrupted, tmp_path):
    tried = disks.read_only(*uninterrupted, tmp_path)
    if tried.note:
        pytest.skip(tried.note)
    survived(tried, 3)


def test_damaged_parts_are_named_and_set_aside(uninterrupted, tmp_path):
    _, whole = uninterrupted
    survived(damage.flip_bytes(whole, tmp_path, 30), 150)
    survived(damage.cut_parts(whole, tmp_path, 4), 20)


def test_a_damaged_checkpoint_is_set_aside(uninterrupted, tmp_path):
    survived(damage.damage_checkpoints(*uninterrupted, tmp_path, 1, seed=1))


def test_two_processes_and_a_reader(uninterrupted, tmp_path):
    survived(racing.race(*uninterrupted, tmp_path, 1))
    survived(racing.read_while_writing(*uninterrupted, tmp_path, 1), 5)


def test_malformed_input(uninterrupted, tmp_path):
    policy, whole = uninterrupted
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    survived(malformed.try_configs(policy, whole[0].run_dir, tmp_path / "a", 40, seed=2), 40)
    survived(malformed.try_files(policy, whole[0].run_dir, tmp_path / "b", 20, seed=2), 20)


# -- the instruments themselves: what they must be able to see ----------------------------------------------------------


def test_a_difference_and_a_hole_are_seen(uninterrupted, tmp_path):
    policy, whole = uninterrupted
    ended = run_child(policy, tmp_path / "other", whole[0].setting, seed=1, steps=2)
    assert ended.told == 2 and ended.outcome.startswith("finished")
    assert difference(whole[0].run_dir, tmp_path / "other") != ""
    assert holes(tmp_path / "other", 2) == "" and "3 steps were flushed, 2 are there" in holes(tmp_path / "other", 3)
    parts = sorted((tmp_path / "other/traces/tokens").iterdir())
    parts[0].unlink()
    assert "step 1 has 0 token rows" in holes(tmp_path / "other", 2)


def test_a_loss_of_power_takes_what_was_not_flushed(tmp_path):
    place = _made(tmp_path / "disk")
    for name in ("kept", "lost"):
        (place / name).write_text("content")
    journal = place / "journal"
    lines = [journal_entry(place / "kept"), journal_entry(place) | {"names": ["kept", "lost"]}]
    import json

    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = set()
    for seed in range(12):
        (place / "lost").write_text("content")
        (place / "new").write_text("x")
        killing.lose_power(place, journal, random.Random(seed))
        assert (place / "kept").read_text() == "content"
        found.add((place / "lost").read_text())
        journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert found == {"", "con", "content"}


def test_a_mistake_that_is_accepted_or_unforeseen_is_seen(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    assert malformed.verdict(["run", "config.yaml"], tmp_path, "steps").startswith("exit code None")
    assert malformed.verdict(["run", "none.yaml"], tmp_path, "some.yaml").startswith("it does not name")
    assert malformed.verdict(["run", "none.yaml"], tmp_path, "none.yaml") == ""
    monkeypatch.setattr("sharpscope.config.build_config", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in malformed.verdict(["run", "config.yaml"], tmp_path, "steps")


def test_the_table_keeps_what_was_tried_before(tmp_path):
    write_table({"race": Tried("two at once", "one writes", tried=3)}, tmp_path)
    write_table({"reader": Tried("a reader", "whole parts", tried=4, failures=["x"], note="slow")}, tmp_path)
    lines = (tmp_path / "faults.md").read_text().splitlines()
    assert lines[2:] == ["| two at once | 3 | 3 | one writes |", "| a reader (slow) | 4 | 3 | whole parts |"]
    with pytest.raises(UserError, match="did you mean 'race'"):
        run_faults(["rac"], True, 0, lambda text: None)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_whole(fault):
    (tried,) = run_faults([fault], False, 0, print).values()
    if tried.note:
        pytest.skip(tried.note)
    survived(tried, min(WHOLE[fault], 1))


def _made(folder):
    folder.mkdir()
    return folder
