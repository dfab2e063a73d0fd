"""Supervised pretraining of an embedded policy: a small model, trained anew on demonstrations.

Sizes and tokenizer are those of the shipped policy, and the settings those in its `warm_start.json`. Training is deterministic: it gives
bitwise equal weights on the same machine with the same library versions and number of threads. Otherwise rounding differs and the
difference grows with every update; the accuracy is then similar but not equal.

The policies train on two CPU cores. Their tokenizer is byte-level BPE with added phrases, trained on the first demonstrations: it
encodes any text without loss, and each part of a puzzle (a name, " is a knight", " if and only if ") is one token in any position, so
that a policy with less than a million parameters learns to reason within minutes.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from experiments.warm_start.demonstrations import Demonstration, demonstrations
from sharpscope.errors import UserError
from sharpscope.policy import embedded_policy

SUMMARY = "warm_start.json"


def settings_of(policy: str) -> dict[str, Any]:
    """Settings with which an embedded policy was made.

    weights: share of demonstrations by number of people, family of question or number of hops; levels: by level of question;
    questions: distinct puzzles of the most frequent size, questions of each family and level, or of each world; corpus:
    demonstrations of which the tokenizer was trained; steps and batch: updates, and demonstrations in each; micro_tokens: maximum
    size of a forward pass [tokens]; warmup: updates of linear warm-up; cooldown: share of the updates, at the end, in which the
    learning rates decay to zero; logit_scale: factor on the final norm's gain after training, which scales all logits.
    """
    settings = json.loads((embedded_policy(policy) / SUMMARY).read_text(encoding="utf-8"))["spec"]
    for name in settings.keys() & {"weights", "levels"}:  # JSON has no numbers as keys
        settings[name] = {
            int(key) if key.isdigit() else key: share for key, share in settings[name].items()
        }
    return dict(settings)


def warm_start(policy: str, out_dir: Path | str, **changes: Any) -> dict[str, Any]:
    """Train an embedded policy anew and save it in the Hugging Face format to a new or empty folder; prints the loss.

    `changes` replace settings of the shipped policy (see `settings_of`). Returns the content of the new `warm_start.json`.

    Raises:
        UserError: `out_dir` is not empty, or a setting is unknown.
    """
    out, spec = Path(out_dir), settings_of(policy) | changes
    if unknown := spec.keys() - settings_of(policy).keys() - {"logit_scale"}:
        raise UserError(
            f"{', '.join(sorted(unknown))}: no setting of {policy}; it has {', '.join(settings_of(policy))}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out = '{out}': exists and is not an empty folder; choose another")
    disable_progress_bar()  # transformers' own bars
    start = time.monotonic()
    folder = embedded_policy(policy)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = new_model(Qwen2Config.from_pretrained(folder), spec["seed"])
    examples = islice(demonstrations(policy, spec), spec["corpus"], None)
    loss = _train(spec, model, tokenizer, examples)
    summary: dict[str, Any] = {
        "loss": loss,
        "parameters": model.num_parameters(),
        "seconds": round(time.monotonic() - start, 1),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")}
        | {"python": platform.python_version()},
        "spec": spec,
    }
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    for file in folder.glob("tokenizer*.json"):
        shutil.copy(file, out)
    (out / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def new_model(config: Qwen2Config, seed: int) -> Qwen2ForCausalLM:
    """A float32 model: matrices N(0, 0.02²), biases 0, norm gains 1."""
    with torch.random.fork_rng(devices=[]):  # construction uses the global generator
        model = Qwen2ForCausalLM._from_config(
            config, attn_implementation="sdpa", dtype=torch.float32
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim == 2:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd polynomial that maps singular values to about 1 in five iterations."""


def _train(
    spec: dict[str, Any],
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    examples: Iterator[Demonstration],
) -> float:
    """Training loop: Muon for the layers' matrices, AdamW for the rest; returns the last mean loss [nats per completion token]."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    averages = [torch.zeros_like(matrix) for matrix in matrices]
    adam = torch.optim.AdamW(others, lr=spec["lr"], betas=(0.9, spec["beta2"]), weight_decay=0.0)
    model.train()
    losses: list[float] = []
    for step in range(1, spec["steps"] + 1):
        left = (spec["steps"] + 1 - step) / (spec["cooldown"] * spec["steps"])
        factor = min(1.0, step / spec["warmup"]) * min(1.0, left)
        adam.param_groups[0]["lr"] = spec["lr"] * factor
        rows = [
            tokenized(tokenizer, demonstration) for demonstration in islice(examples, spec["batch"])
        ]
        losses.append(accumulate(model, rows, spec["micro_tokens"]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec["max_grad_norm"])
        for matrix, average in zip(matrices, averages, strict=True):
            muon_step(matrix, average, spec["muon_lr"] * factor, spec["weight_decay"])
        adam.step()
        model.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == spec["steps"]:
            loss = sum(losses) / len(losses)
            losses.clear()
            print(f"update {step} of {spec['steps']}: loss {loss:.3f} nats/token")
    with torch.no_grad():
        model.model.norm.weight.mul_(spec.get("logit_scale", 1.0))
    model.eval()
    return loss


def tokenized(
    tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration
) -> tuple[list[int], list[int]]:
    """Token IDs and labels, which are −100 for prompt and responses. Turns are tokenized separately, as in a rollout."""
    prompt, *parts = tokenizer([demonstration.prompt, *demonstration.turns])["input_ids"]
    parts[-1] = [*parts[-1], tokenizer.eos_token_id]
    ids, labels = [*prompt], [-100] * len(prompt)
    for index, part in enumerate(parts):
        ids += part
        labels += [-100] * len(part) if index % 2 else part
    return ids, labels


def accumulate(
    model: Qwen2ForCausalLM, rows: Sequence[tuple[list[int], list[int]]], max_tokens: int
) -> float:
    """Accumulate the gradient of the mean loss over labels; returns the loss [nats].

    A pass has rows of similar length and at most `max_tokens` tokens including padding, or one row.
    """
    rows = sorted(rows, key=lambda row: len(row[0]))
    tokens = sum(label >= 0 for _, labels in rows for label in labels)
    total = 0.0
    while rows:
        number = max([1, *(n for n, (ids, _) in enumerate(rows, 1) if n * len(ids) <= max_tokens)])
        input_ids, labels = (
            pad_sequence(
                [torch.tensor(row[part]) for row in rows[:number]],
                batch_first=True,
                padding_value=value,
            )
            for part, value in enumerate((0, -100))
        )
        rows = rows[number:]
        # Padding is on the right, so causal attention needs no attention mask.
        # (n, L − 1, width)
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
        mask = labels[:, 1:] >= 0
        loss = (
            cross_entropy(model.lm_head(hidden[mask]), labels[:, 1:][mask], reduction="sum")
            / tokens
        )
        loss.backward()
        total += loss.item()
    return total


@torch.no_grad()
def muon_step(matrix: torch.Tensor, average: torch.Tensor, lr: float, weight_decay: float) -> None:
    """Muon's update of a parameter (out, in) and its `average` of gradients; torch has it only since 2.9, in bfloat16.

    With Nesterov momentum and decoupled weight decay (K. Jordan et al., 2024); its spectral norm is about lr·sqrt(max(1, out/in)).
    """
    assert matrix.grad is not None
    average.lerp_(matrix.grad, 1 - MOMENTUM)
    direction = matrix.grad.lerp(average, MOMENTUM)
    tall = direction.shape[0] > direction.shape[1]
    update = orthogonal((direction.T if tall else direction).contiguous()[None])[0]
    scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
    matrix.mul_(1 - lr * weight_decay).add_(update.T if tall else update, alpha=-lr * scale)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Orthogonalize matrices (n, a, b) with a ≤ b: map singular values to about [0.7, 1.2], keep singular vectors."""
    a, b, c = NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT  # (n, a, a)
        x = a * x + (b * square + c * square @ square) @ x
    return x
