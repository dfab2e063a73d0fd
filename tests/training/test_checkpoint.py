"""Checkpoints: which are kept, what a damaged one costs, and that the run which goes on is the same run."""

from __future__ import annotations

import shutil

import pytest
import torch

import sharpscope
from sharpscope.config import build_config
from sharpscope.errors import NonFiniteError, UserError
from sharpscope.policy import load_policy
from sharpscope.traces import update_run_info
from sharpscope.training import train
from sharpscope.training.checkpoint import Progress, checkpoints, damage, save, step_of
from sharpscope.training.learner import build_optimizer
from tests.faults.setting import assert_same, tables
from tests.training.test_loop import StopAfter


@pytest.fixture(scope="module")
def cut_off(tiny_policy, tmp_path_factory):
    """(an uninterrupted run, the same run cut off after step 5 with checkpoints at 2, 4 and 5)."""
    from tests.conftest import TOY

    out = tmp_path_factory.mktemp("cut_off")
    base = {
        **TOY,
        "policy.model": str(tiny_policy),
        "steps": 7,
        "evaluation.every": 0,
        "checkpoint.every": 2,
        "checkpoint.keep_last": 3,
        "method": "clip-cov",
        "method.entropy": 0.01,
        "method.weight": {"kind": "stare", "step": 0.05, "target": 100.0},
        "method.module_clip": 1.01,
    }
    whole, broken = (build_config(values=base | {"out": str(out / name)}) for name in ("whole", "broken"))
    train(whole)
    train(broken, StopAfter(5))
    saved = [[step_of(path) for path in checkpoints(config.run_dir)] for config in (whole, broken)]
    assert saved == [[4, 6, 7], [2, 4, 5]]
    run = sharpscope.load_run(whole.run_dir)
    largest = run.tokens(columns=["step", "weight"]).groupby("step")["weight"].max()
    assert largest.tolist() == pytest.approx([1.15, 1.2, 1.25, 1.3, 1.35, 1.4, 1.45])  # W moves
    assert (run.updates["clip_factor"] < 1).any()
    return whole, broken


def copy_of(config, tmp_path):
    shutil.copytree(config.run_dir, tmp_path / "copy")
    return config.model_copy(update={"out": str(tmp_path / "copy")})


@pytest.mark.parametrize("victim", ["optimizer.safetensors", "checksums.json"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_goes_on(cut_off, tmp_path, victim):
    whole, broken = cut_off[0], copy_of(cut_off[1], tmp_path)
    newest = checkpoints(broken.run_dir)[-1]
    content = bytearray((newest / victim).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / victim).write_bytes(content)
    assert damage(newest) is not None and damage(checkpoints(broken.run_dir)[-2]) is None
    assert train(broken, resume=True).status == "finished"
    assert (newest.with_name("damaged-step-000005")).is_dir()
    note, resumed = sharpscope.load_run(broken.run_dir).info["notes"]
    assert resumed == "resumed after step 4, from step-000004"
    assert "step-000005 is damaged" in note and "set aside as damaged-step-000005" in note
    assert_same(whole.run_dir, broken.run_dir)


def test_without_any_sound_checkpoint_the_run_begins_again_in_its_folder(cut_off, tmp_path):
    whole, broken = cut_off[0], copy_of(cut_off[1], tmp_path)
    for folder in checkpoints(broken.run_dir):
        (folder / "model.safetensors").unlink()
    assert train(broken, resume=True).status == "finished"
    assert len(sharpscope.load_run(broken.run_dir).info["notes"]) == 4
    assert_same(whole.run_dir, broken.run_dir)


def test_what_was_recorded_is_kept_when_a_run_begins_again(cut_off, tmp_path):
    whole, broken = cut_off[0], copy_of(cut_off[1], tmp_path)
    shutil.rmtree(broken.run_dir / "checkpoints")
    traces = broken.run_dir / "traces"
    before = {path.relative_to(traces): path.read_bytes() for path in traces.rglob("part-*")}
    (traces / "tokens" / ".part-000009.tmp").write_bytes(b"half")
    outcome = train(broken, resume=True)
    kept = broken.run_dir / ".traces.aborted-1"
    assert before == {path.relative_to(kept): path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    (note,) = sharpscope.load_run(broken.run_dir).info["notes"]
    assert outcome.notes == (note,) and note.endswith(f"is kept in {kept}")
    assert_same(whole.run_dir, broken.run_dir)


@pytest.mark.parametrize("kind", ["finished", "without checkpoints", "reduced"])
def test_a_run_with_nothing_to_go_on_to_is_left_as_it_is(cut_off, tmp_path, kind):
    whole = copy_of(cut_off[0], tmp_path)
    if kind != "finished":
        shutil.rmtree(whole.run_dir / "checkpoints")
    if kind == "reduced":
        update_run_info(whole.run_dir, reduced={"tokens": 9, "sampled": 3, "rule": "a rule"})
    before = {path: path.read_bytes() for path in whole.run_dir.rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match="export --to reduced" if kind == "reduced" else r"all of its steps are done \(steps = 7\)"
    ):
        train(whole, resume=True)
    assert before == {path: path.read_bytes() for path in whole.run_dir.rglob("*") if path.is_file()}


def test_a_finished_run_goes_on_to_more_steps(cut_off, tmp_path):
    whole = copy_of(cut_off[0], tmp_path)
    before = tables(whole.run_dir)["steps"]
    assert train(whole.model_copy(update={"steps": 8}), resume=True).status == "finished"
    after = tables(whole.run_dir)["steps"]
    assert after["step"].tolist() == list(range(1, 9)) and after.iloc[:7].equals(before)


def test_what_was_said_once_is_not_said_again(cut_off):
    """Clip-Cov's share of so few tokens is less than one, which is told at the first step only."""
    events = sharpscope.load_run(cut_off[0].run_dir).events
    assert (events["rule"] == "method").sum() == 1


def test_another_reference_policy_is_noticed(toy_config, tiny_policy, tmp_path):
    policy = tmp_path / "policy"
    shutil.copytree(tiny_policy, policy)
    config = toy_config(policy__model=str(policy), method__kl__coef=0.01, steps=3, evaluation__every=0)
    train(config, StopAfter(2))
    from safetensors.torch import load_file, save_file

    tensors = load_file(policy / "model.safetensors")
    tensors[min(tensors)] += 1e-3
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="other weights than when this run began"):
        train(config, resume=True)


def test_weights_that_are_not_finite_are_not_saved(toy_config):
    config = toy_config()
    policy = load_policy(config.policy)
    name, parameter = list(policy.model.named_parameters())[-1]
    with torch.no_grad():
        parameter.view(-1)[0] = torch.nan
    with pytest.raises(NonFiniteError, match=f"step 7: the weights '{name}' are not finite"):
        save(config, policy, build_optimizer(policy.model, config.optimizer), Progress(7, 0, [], [], {}))
    assert not config.run_dir.exists()


def test_a_checkpoint_is_whole_or_absent_when_its_write_fails(toy_config, monkeypatch):
    from sharpscope.training import checkpoint

    config = toy_config(steps=2, evaluation__every=0, checkpoint__every=1)
    plain = checkpoint.save_file

    def full(tensors, path):
        if "step-000002" in str(path):
            raise OSError(28, "No space left on device")
        plain(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    outcome = train(config)
    assert outcome.status == "failed" and "No space left on device" in outcome.reason
    assert f"sharpscope run --resume {config.run_dir}" in outcome.reason and "\n" not in outcome.reason
    assert [path.name for path in (config.run_dir / "checkpoints").iterdir()] == ["step-000001"]
    assert len(sharpscope.load_run(config.run_dir).steps) == 2
    monkeypatch.undo()
    assert train(config, resume=True).status == "finished"
