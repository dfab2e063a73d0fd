"""One cell of the logic task at the shape of a real model, with random weights: time and memory of a step, share of recording.

Nothing is downloaded: weights are random, words stand for tokens, and a completion's reward is drawn from its text. So every
completion has the full length and every group teaches something, as far as the machine is concerned.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from sharpscope.config import RunConfig, build_config
from sharpscope.errors import UserError, nearest
from sharpscope.tasks import Example, Reward
from sharpscope.traces import load_run
from sharpscope.training import train

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "qwen2.5-0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen2.5-3b": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
}
"""Sizes of the published Qwen2.5 models (input and output embeddings tied), and one for a test."""

# The logic preset's step (experiments/paper/), with probes of tokens in the last step only; lengths are ours.
CELL: dict[str, Any] = {
    "method": "grpo-sg",
    "method.weight.preset": "calibrated",
    "method.kl.coef": 0.001,
    "policy.dtype": "bfloat16",
    "rollout.prompts_per_step": 64,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 512,
    "update.mini_batches": 2,
    "update.microbatch_tokens": 32768,
    "update.gradient_checkpointing": True,
    "optimizer.lr": 1e-6,
    "evaluation.every": 0,
    "checkpoint.every": 0,
    "recording.heldout_influence_every": 0,
    "recording.spike_z": None,
    "health.truncation.action": "off",
}
GRADIENTS_EVERY = 10  # the default interval without a budget


@dataclass(frozen=True)
class Cell:
    """What a cell cost.

    Attributes:
        shape, device: which model, on what.
        parameters: of the model.
        completions, tokens: of a step.
        generation_s, training_s, recording_s: medians of the measured steps without token gradients [s].
        gradients_s: recording of one step with token gradients: local norms and attribution of all tokens, exact norms of some.
        memory_bytes: peak, of the GPU's allocator or of the process.
    """

    shape: str
    device: str
    parameters: int
    completions: int
    tokens: int
    generation_s: float
    training_s: float
    recording_s: float
    gradients_s: float
    memory_bytes: int

    @property
    def step_s(self) -> float:
        """A step with token gradients every tenth time, on average."""
        recording = ((GRADIENTS_EVERY - 1) * self.recording_s + self.gradients_s) / GRADIENTS_EVERY
        return self.generation_s + self.training_s + recording

    @property
    def recording_share(self) -> float:
        """Share of `step_s` that is recording."""
        return 1 - (self.generation_s + self.training_s) / self.step_s


def drawn_words(prompt_tokens: int, vocabulary: int, count: int) -> tuple[dict[str, list[Example]], Any]:
    """A task whose prompts are `count` rows of random words, and whose reward is a number drawn from the completion's text."""
    draw = Random(0)

    def example(index: int) -> Example:
        words = " ".join(f"w{draw.randrange(4, vocabulary)}" for _ in range(prompt_tokens))
        return Example(words, "", {"id": str(index)})

    def score(_: Example, completion: str) -> Reward:
        right = hashlib.sha256(completion.encode()).digest()[0] < 128
        return Reward(float(right), {"drawn": float(right)}, right)

    return {"train": [example(index) for index in range(count)], "heldout": []}, score


def write_model(folder: Path, shape: str) -> None:
    """A model of `shape` with random weights, in bfloat16, and a tokenizer with as many words as it has tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    if shape not in SHAPES:
        raise UserError(f"--shape {shape}: unknown{nearest(shape, SHAPES)}")
    sizes = SHAPES[shape]
    words = {"</s>": 0, "<pad>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, sizes["vocab_size"])}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    config = Qwen2Config(
        **sizes,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure_cell(shape: str, steps: int = 3, prompt_tokens: int = 256, overrides: Sequence[str] = ()) -> Cell:
    """Train `steps` measured steps after one to warm up, the last with token gradients, and say what they cost."""
    if steps < 2:
        raise UserError(f"--steps {steps}: at least 2, one of them with token gradients")
    with tempfile.TemporaryDirectory(prefix="sharpscope-bench-") as folder:
        write_model(Path(folder) / "model", shape)
        values = CELL | {
            "policy.model": f"{folder}/model",
            "out": f"{folder}/cell",
            "steps": steps + 1,
            "recording.token_gradients_every": steps + 1,
            "task.kind": "custom",
            "task.factory": "experiments.benchmarks.cell:drawn_words",
        }
        config = build_config(None, overrides, values)
        count = config.rollout.prompts_per_step
        options = {"prompt_tokens": prompt_tokens, "vocabulary": SHAPES[shape]["vocab_size"], "count": count}
        task = config.task.model_copy(update={"options": options})
        return _read(shape, config.model_copy(update={"task": task}))


def _read(shape: str, config: RunConfig) -> Cell:
    run = load_run(train(config).run_dir)
    table = run.steps.iloc[1:]
    plain, last = table.iloc[:-1], table.iloc[-1]
    memory = run.info["peak_memory_bytes"]
    return Cell(
        shape=shape,
        device=run.info["device"],
        parameters=run.info["parameters"],
        completions=config.rollout.prompts_per_step * config.rollout.group_size,
        tokens=int(statistics.median(table["tokens"])),
        generation_s=float(table["generation_s"].median()),
        training_s=float(table["training_s"].median()),
        recording_s=float(plain["recording_s"].median()),
        gradients_s=float(last["recording_s"]),
        memory_bytes=int(memory.get("device", memory["process"])),
    )


def report(cells: Sequence[Cell]) -> str:
    """A Markdown table of cells."""
    lines = [
        "| shape | device | parameters | completions × tokens | step [s] | generation [s] | training [s] | recording | with token "
        "gradients [s] | completion tokens / s | peak memory [GiB] |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        lines.append(
            f"| {cell.shape} | {cell.device} | {cell.parameters:,} | {cell.completions} × "
            f"{cell.tokens / cell.completions:.0f} | {cell.step_s:.2f} | {cell.generation_s:.2f} | {cell.training_s:.2f} | "
            f"{cell.recording_share:.1%} | {cell.gradients_s:.2f} | {cell.tokens / cell.step_s:,.0f} | "
            f"{cell.memory_bytes / 2**30:.2f} |"
        )
    return "\n".join(lines) + "\n"
