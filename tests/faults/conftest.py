"""What the fault tests train, and the uninterrupted run that interrupted ones are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sharpscope.tasks import Example, Reward
from sharpscope.traces import TABLES, load_run, timing_columns

if TYPE_CHECKING:
    from sharpscope.config import RunConfig


import pytest

from sharpscope.training import train

SETTING: dict[str, Any] = {
    "method": "grpo-sg",
    "method.weight.preset": "calibrated",
    "method.kl.coef": 0.01,
    "task.kind": "custom",
    "task.factory": f"{__name__}:vowels",
    "threads": 1,
    "steps": 6,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 3,
    "rollout.max_new_tokens": 6,
    "update.mini_batches": 1,
    "evaluation.every": 2,
    "evaluation.prompts": 2,
    "optimizer.lr": 0.01,
    "checkpoint.every": 2,
    "checkpoint.keep_last": 2,
    "health.memory.action": "off",  # it speaks of the machine, not of the run
    "recording.token_gradients_every": 2,
    "recording.group_share": 1.0,
    "recording.rotation_every": 10,
    "recording.exact_tokens": 2,
    "recording.heldout_influence_every": 3,
    "probes.prompts": 2,
    "probes.heldout_prompts": 2,
}


def vowels(count: int = 10) -> tuple[dict[str, list[Example]], Any]:
    """A task on which an untrained policy scores: the number of vowels in the completion."""

    def examples(first: int, split: str) -> list[Example]:
        return [
            Example(
                f"say {'a' * (index % 5 + 1)} {index}:",
                str(index),
                {"id": f"{split}{index}", "level": index % 2},
            )
            for index in range(first, first + count)
        ]

    def score(example: Example, completion: str) -> Reward:
        found = sum(completion.count(letter) for letter in "aeiou")
        return Reward(float(found), {"vowels": float(found)}, found >= 2)

    return {"train": examples(0, "train"), "heldout": examples(100, "heldout")}, score


def byte_tokenizer(texts: list[str]) -> Any:
    """A tokenizer of 288 tokens like the embedded policies', with the same tags, but no phrases."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    from sharpscope.policy import embedded_policy

    shipped = PreTrainedTokenizerFast.from_pretrained(embedded_policy("math"))
    tokens = list(map(shipped.convert_ids_to_tokens, range(len(shipped))))
    tags = tokens[tokens.index("<think>") :][:10]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        shipped.backend_tokenizer.pre_tokenizer,
        shipped.backend_tokenizer.decoder,
    )
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=278, special_tokens=tokens[:2], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    names = {"pad_token": tokens[0], "eos_token": tokens[1], "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=2048, padding_side="left", **names
    )


def tiny_policy(folder: Path, layers: int = 1, width: int = 16, feed_forward: int = 24) -> Path:
    """Save an untrained Qwen2 policy of that size to `folder`."""
    import torch
    from transformers import Qwen2Config
    from transformers.utils.logging import disable_progress_bar

    from experiments.warm_start.pretraining import new_model

    disable_progress_bar()
    splits, _ = vowels()
    tokenizer = byte_tokenizer([example.prompt for example in splits["train"]])
    config = Qwen2Config(
        vocab_size=288,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = new_model(config, seed=0)
    with torch.no_grad():  # sharper than at initialisation, so that tokens differ in probability
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_config(policy: Path, run_dir: Path) -> RunConfig:
    """The configuration of a run in `run_dir`."""
    from sharpscope.config import build_config

    return build_config(values={**SETTING, "policy.model": str(policy), "out": str(run_dir)})


def tables(run_dir: Path) -> dict[str, pd.DataFrame]:
    """The tables of a run without their timing columns."""
    run = load_run(run_dir)
    frames = {name: run.tokens() if name == "tokens" else getattr(run, name) for name in TABLES}
    return {
        name: f.drop(columns=timing_columns(name)) for name, f in frames.items() if f is not None
    }


def assert_same(one: Path, two: Path) -> None:
    """The traces of two runs are whole and equal row by row."""
    assert not load_run(one).verify() and not load_run(two).verify()
    first, second = tables(one), tables(two)
    assert first.keys() == second.keys()
    for name, frame in first.items():
        pd.testing.assert_frame_equal(frame, second[name], check_exact=True, obj=name)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the initial policy's folder, an uninterrupted run)."""
    folder = tmp_path_factory.mktemp("whole")
    policy = tiny_policy(folder / "policy")
    assert train(tiny_config(policy, folder / "run")).status == "finished"
    return policy, folder / "run"
