"""A folder of saved adapters as the model: what is asked of it, how it is held; and a revision of what has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sharpscope.config.policy import LoraSpec
from sharpscope.errors import UserError
from sharpscope.policy import PolicySpec, load_policy
from sharpscope.policy.adapters import has_adapters
from sharpscope.policy.loading import check_revision
from sharpscope.training import evaluate_model, train
from tests.models import tiny_model
from tests.policy.helpers import word_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model(dtype=torch.float32).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def spec(model: Path | str, **values: Any) -> PolicySpec:
    return PolicySpec(model=str(model), device="cpu", **values)


def adapters(base: Path, folder: Path, **lora: Any) -> Path:
    policy = load_policy(spec(base, lora=LoraSpec(**{"r": 2, "alpha": 4.0} | lora)))
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


SOME = ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("held", "asked", "says"),
    [
        ({}, {"r": 8}, r"policy.lora.r = 8: the adapters in '.*' have 2; remove policy.lora"),
        ({}, {"alpha": 8.0}, r"policy.lora.alpha = 8.0: .* have 4.0"),
        (
            {},
            {"target_modules": SOME},
            r"policy.lora.target_modules = \('q_proj', 'v_proj'\): .* have \['down_proj', 'gate_proj', ",
        ),
        ({"target_modules": SOME}, {}, r"policy.lora.target_modules = all-linear: .* have \['q_proj', 'v_proj'\]"),
        ({}, {"seed": 5}, None),
        ({"target_modules": SOME}, {"target_modules": SOME[::-1]}, None),
        ({}, {"target_modules": [f"{x}_proj" for x in ("q", "k", "v", "o", "up", "gate", "down")]}, None),
    ],
)
def test_adapters_that_are_asked_for_must_be_those_of_the_folder(base, tmp_path, held, asked, says):
    folder = adapters(base, tmp_path / "adapters", **held)
    wanted = spec(folder, lora=LoraSpec(**{"r": 2, "alpha": 4.0} | asked))
    for beneath in (None, str(folder)):  # as a script loads it, and as a run begins with it
        if says is None:
            assert has_adapters(load_policy(wanted, base=beneath).model)
        else:
            with pytest.raises(UserError, match=says):
                load_policy(wanted, base=beneath)
    assert has_adapters(load_policy(wanted, base=str(base)).model)  # a run that goes on, whatever was stored of it


def test_a_run_that_began_with_adapters_goes_on_with_their_base(base, tmp_path):
    first, second = (adapters(base, tmp_path / name) for name in ("first", "second"))
    assert has_adapters(load_policy(spec(second), base=str(first)).model)


@pytest.mark.parametrize("lora", [None, LoraSpec(r=2, alpha=4.0)])
def test_the_weights_beneath_saved_adapters_are_held_in_bfloat16(base, tmp_path, lora):
    policy = load_policy(spec(adapters(base, tmp_path / "adapters"), dtype="bfloat16", lora=lora))
    kinds = {(p.requires_grad, p.dtype) for p in policy.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


def test_a_revision_of_a_folder_is_refused(base, tmp_path, toy_config):
    with pytest.raises(UserError, match=r"policy.revision = 'main': policy.model '.*' is local .* hub id"):
        check_revision(spec(base, revision="main"))
    with pytest.raises(UserError, match=r"policy.revision = 'main'"):
        check_revision(spec("embedded:math", revision="main"))
    check_revision(spec("owner/name", revision="main"))
    check_revision(spec(adapters(base, tmp_path / "adapters"), revision="main"))  # that of their base model
    check_revision(spec(base))
    with pytest.raises(UserError, match=r"policy.revision = 'main'"):
        train(toy_config(policy__revision="main"))
    with pytest.raises(UserError, match=r"policy.revision = 'main'"):
        evaluate_model(str(base), task="math", overrides=["policy.revision=main"])
