"""How work is divided, what a launch may ask for, and that one process is the identity everywhere."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import accelerate
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharpscope import distributed
from sharpscope.distributed import Launch
from sharpscope.errors import CheckError, UserError
from sharpscope.training import train


def as_process(monkeypatch, rank: int, count: int) -> None:
    monkeypatch.setattr(distributed, "rank", lambda: rank)
    monkeypatch.setattr(distributed, "world_size", lambda: count)


@given(st.integers(0, 40), st.integers(1, 7))
def test_shares_in_order_of_rank_are_everything_and_differ_by_one_at_most(size, count):
    with pytest.MonkeyPatch.context() as patch:
        parts = []
        for rank in range(count):
            as_process(patch, rank, count)
            parts.append(list(range(size))[distributed.local_slice(size)])
    assert [i for part in parts for i in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 5))
def test_deals_hold_everything_once_and_are_balanced(work, count):
    with pytest.MonkeyPatch.context() as patch:
        parts = []
        for rank in range(count):
            as_process(patch, rank, count)
            parts.append(distributed.balance(work))
    assert sorted(i for part in parts for i in part) == list(range(len(work)))
    loads = [sum(work[i] for i in part) for part in parts]
    # Largest first: nobody has more than the mean and one thing beyond it.
    assert max(loads) <= sum(work) / count + max(work, default=0)
    assert all(part == sorted(part) for part in parts)


def test_a_refusal_in_one_process_is_one_in_all(monkeypatch):
    """The process that refuses still takes part in the exchange, for which the others wait; all raise the first one's reason."""
    as_process(monkeypatch, 0, 2)
    seen = []

    def gathered(value):
        seen.append(value)
        return [value, UserError("another process's reason")]

    def refuse(_):
        raise CheckError("no", "local", 0.5, 0.01)

    monkeypatch.setattr(distributed, "gather", gathered)
    with pytest.raises(CheckError, match="no"):
        distributed.map_rows(torch.arange(4), refuse)
    with pytest.raises(UserError, match="another process's reason"):
        distributed.map_rows(torch.arange(4), lambda rows: rows)
    assert isinstance(seen[0], CheckError) and seen[1:] == [None]
    copy = pickle.loads(pickle.dumps(seen[0]))  # how it gets to the others
    assert (str(copy), copy.probe, copy.error, copy.tolerance) == ("no", "local", 0.5, 0.01)


def launched(monkeypatch, kind="MULTI_CPU", precision="no", **environ):
    state = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), mixed_precision=precision)
    monkeypatch.setattr(accelerate, "Accelerator", lambda cpu: SimpleNamespace(state=state))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    for name, value in ({"WORLD_SIZE": "2"} | environ).items():
        monkeypatch.setenv(name, value)


def test_a_launch_says_whether_weights_are_sharded(monkeypatch):
    launched(monkeypatch)
    assert distributed.start() == Launch(2)
    launched(
        monkeypatch,
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_RESHARD_AFTER_FORWARD="false",
    )
    assert distributed.start() == Launch(2, sharded=True, reshard=False)


@pytest.mark.parametrize(
    ("changes", "device", "said"),
    [
        ({"kind": "DEEPSPEED"}, "auto", "DEEPSPEED is not supported"),
        ({"precision": "bf16"}, "auto", r"policy\.dtype=bfloat16"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "auto", "--fsdp_version 2"),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
            "auto",
            "offload",
        ),
        ({}, "cuda:1", "policy.device 'cuda:1'"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_fix(monkeypatch, changes, device, said):
    launched(monkeypatch, **changes)
    with pytest.raises(UserError, match=said):
        distributed.start(device)


def test_adapters_are_not_sharded_and_refused_before_the_folder_is_made(monkeypatch, toy_config):
    monkeypatch.setattr(distributed, "start", lambda device: Launch(2, sharded=True))
    config = toy_config(policy__lora={"r": 2})
    with pytest.raises(UserError, match="adapters are not sharded"):
        train(config)
    assert not config.run_dir.exists()
