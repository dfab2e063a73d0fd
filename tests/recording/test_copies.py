"""Measures of sharded models that need a whole copy of the weights."""

from __future__ import annotations

import pytest

from sharpscope import memory
from sharpscope.errors import UserError
from sharpscope.policy import load_policy
from sharpscope.recording import observers


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"recording__heldout_influence_every": 2}, "recording.heldout_influence_every=0"),
        ({"probes__preset": "standard"}, "probes.preset=off"),
    ],
)
def test_a_copy_that_does_not_fit_is_refused_at_the_start(toy_config, monkeypatch, settings, named):
    config = toy_config(method="grpo", recording__rotation_every=0, **settings)
    policy = load_policy(config.policy)
    monkeypatch.setattr(observers, "is_sharded", lambda model: True)
    observers.Observers(config, policy, view=None)
    monkeypatch.setattr(memory, "free_memory", lambda device: 10.0)
    with pytest.raises(UserError, match=f"GiB are free; set {named}"):
        observers.Observers(config, policy, view=None)
