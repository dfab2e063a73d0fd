"""Which runs may be pooled or compared."""

from __future__ import annotations

from sharpscope.analysis.study import studies
from sharpscope.traces import load_runs
from tests.traces.synthetic import Shape, write_run

TINY = Shape(steps=3, prompts=1, group_size=2, length=2, eval_every=3, eval_prompts=10)


def _write(path, **options):
    return write_run(path, **({"shape": TINY, "tokens": False, "probes": False} | options))


def test_seeds_are_one_setting_and_other_settings_are_told_apart(tmp_path):
    for seed in (0, 1):
        _write(tmp_path / f"a{seed}", seed=seed)
        _write(tmp_path / f"b{seed}", seed=seed, config={"optimizer": {"lr": 3e-4}})
        _write(tmp_path / f"c{seed}", seed=seed, method="grpo-sg")
    (study,) = studies(load_runs(tmp_path))
    assert study.labels == ["grpo (optimizer.lr=0.0001)", "grpo (optimizer.lr=0.0003)", "grpo-sg"]
    assert [list(s.runs) for s in study.settings] == [[0, 1]] * 3
    assert study.slug == "" and study.notes == ()


def test_the_setting_with_the_most_seeds_has_the_methods_name_and_the_others_are_told_from_it(tmp_path):
    for seed in (0, 1, 2):
        _write(tmp_path / f"a{seed}", seed=seed)
    for seed in (0, 1):
        _write(tmp_path / f"b{seed}", seed=seed, config={"optimizer": {"lr": 3e-4}})
        _write(tmp_path / f"c{seed}", seed=seed, config={"rollout": {"group_size": 4, "temperature": 1.0}})
    (study,) = studies(load_runs(tmp_path))
    assert study.labels == ["grpo", "grpo (optimizer.lr=0.0003)", "grpo (rollout.group_size=4)"]
    (note,) = study.notes
    assert note.startswith("grpo alone stands for") and "optimizer.lr=0.0001, rollout.group_size=" in note


def test_tasks_task_settings_and_policies_are_never_one_study(tmp_path):
    _write(tmp_path / "a")
    _write(tmp_path / "b", task="math")
    _write(tmp_path / "c", config={"task": {"kind": "knights_knaves", "people": 5}})
    _write(tmp_path / "d", config={"policy": {"model": "other"}})
    result = studies(load_runs(tmp_path))
    assert len(result) == 4 and len({s.slug for s in result}) == 4
    names = [s.name for s in result]
    assert names[1] == "math" and "task.people=5" in names[2] and "policy.model=other" in names[3]


def test_finished_runs_come_before_others_and_a_seed_counts_once(tmp_path):
    _write(tmp_path / "done")
    _write(tmp_path / "stopped", seed=1, status="interrupted")
    _write(tmp_path / "again", seed=0)
    (study,) = studies(load_runs(tmp_path))
    assert list(study.settings[0].runs) == [0]
    assert any("stopped (interrupted, 3 steps) is left out" in note for note in study.notes)
    assert any("done repeats seed 0 of again" in note for note in study.notes)
