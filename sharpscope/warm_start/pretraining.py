"""Supervised pretraining of an embedded policy: a tokenizer and a small model trained on demonstrations.

Training is deterministic: the same spec gives bitwise equal weights on the same machine with the same library versions and
number of threads. Otherwise rounding differs and the difference grows with every update; the accuracy is then similar but
not equal.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import tokenizers
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from sharpscope.config.warm_start import KnightsKnavesWarmStart, MathWarmStart, ToolQaWarmStart, WarmStartSpec
from sharpscope.errors import UserError
from sharpscope.policy.embedded import build_model, build_tokenizer, common_phrases, save_tokenizer
from sharpscope.warm_start import math as demonstrations_math
from sharpscope.warm_start import tool_qa as demonstrations_tool
from sharpscope.warm_start.knights_knaves import OPENING, ROLE, Demonstration, demonstrations, phrases, puzzles
from sharpscope.warm_start.muon import Muon

SUMMARY = "warm_start.json"


@dataclass(frozen=True)
class Progress:
    """Progress report.

    Attributes:
        step: number of completed updates.
        steps: total number of updates.
        loss: mean loss since the last report [nats per completion token].
        seconds: time since the start [s].
        exact: result of `exactness` on held-out demonstrations, or None if not evaluated.
    """

    step: int
    steps: int
    loss: float
    seconds: float
    exact: dict[str, float] | None = None


@dataclass(frozen=True)
class WarmStartSummary:
    """Summary of a warm start.

    Attributes:
        loss: mean loss of the last report [nats per completion token].
        exact: result of the last `exactness`.
        parameters: number of parameters.
        seconds: wall time [s].
        threads: number of threads of torch.
        versions: library -> version.
        spec: configuration.
    """

    loss: float
    exact: dict[str, float]
    parameters: int
    seconds: float
    threads: int
    versions: dict[str, str]
    spec: dict[str, object]


@dataclass(frozen=True)
class Row:
    """Tokens of a demonstration.

    Attributes:
        prompt: token ids of the prompt.
        completion: token ids of the completion, including the end-of-text token.
        mask: 1 for completion tokens in the loss, else 0.
    """

    prompt: list[int]
    completion: list[int]
    mask: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True)
class Dataset:
    """Demonstrations of a task.

    Attributes:
        train: training demonstrations.
        probe: held-out demonstrations.
        phrases: function from demonstrations to the texts that become one token each.
    """

    train: Iterator[Demonstration]
    probe: Iterator[Demonstration]
    phrases: Callable[[Sequence[Demonstration]], list[str]]


def warm_start(
    spec: WarmStartSpec, out_dir: Path | str, on_progress: Callable[[Progress], None] | None = None
) -> WarmStartSummary:
    """Train a policy and save it in the Hugging Face format, with `warm_start.json`.

    Args:
        spec: configuration.
        out_dir: empty or new folder.
        on_progress: called every 10 updates and at every evaluation.

    Raises:
        UserError: `out_dir` is not empty, or width, heads and vocabulary of the spec are incompatible.
    """
    out = Path(out_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out = '{out}': exists and is not an empty folder; choose another")
    disable_progress_bar()  # transformers' own bars; `on_progress` reports progress
    start = time.monotonic()
    dataset = _dataset(spec)
    corpus = list(islice(dataset.train, spec.corpus))
    tokenizer = build_tokenizer((d.text for d in corpus), dataset.phrases(corpus), spec.vocabulary)
    model = build_model(
        tokenizer,
        layers=spec.layers,
        width=spec.width,
        feed_forward=spec.feed_forward,
        heads=spec.heads,
        seed=spec.seed,
    )
    probe = list(islice(dataset.probe, spec.probe_size))
    last = _train(spec, model, tokenizer, dataset.train, probe, start, on_progress)
    summary = WarmStartSummary(
        loss=last.loss,
        exact=last.exact or {},
        parameters=model.num_parameters(),
        seconds=round(time.monotonic() - start, 1),
        threads=torch.get_num_threads(),
        versions={
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "python": platform.python_version(),
        },
        spec=spec.model_dump(mode="json"),
    )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    save_tokenizer(tokenizer, out)
    (out / SUMMARY).write_text(json.dumps(asdict(summary), indent=1) + "\n", encoding="utf-8")
    return summary


def _dataset(spec: WarmStartSpec) -> Dataset:
    """Demonstrations for a spec; `train` and `probe` share no content."""
    if isinstance(spec, KnightsKnavesWarmStart):
        return _puzzle_dataset(spec)
    if isinstance(spec, MathWarmStart):
        return _math_dataset(spec)
    if isinstance(spec, ToolQaWarmStart):
        return _tool_dataset(spec)
    raise TypeError(f"no demonstrations for {type(spec).__name__}")


def _puzzle_dataset(spec: KnightsKnavesWarmStart) -> Dataset:
    largest = max(spec.weights.values())
    sizes = _nonzero(spec.weights)
    shares = {"guess_share": spec.guess_share, "chat_share": spec.chat_share}
    pools = {
        people: puzzles(people, max(1, round(spec.puzzles * share / largest)), spec.seed)
        for people, share in sizes.items()
    }
    held_out = {people: puzzles(people, spec.probe_size, spec.seed, split="heldout") for people in sizes}
    return Dataset(
        demonstrations(pools, sizes, **shares, seed=spec.seed),
        demonstrations(held_out, sizes, **shares, seed=spec.seed + 1),
        _puzzle_phrases,
    )


def _puzzle_phrases(corpus: Sequence[Demonstration]) -> list[str]:
    """Phrases of compact prompts and of completions; chat prompts contribute none."""
    common = common_phrases(d.prompt for d in corpus if not d.prompt.endswith(OPENING))
    roles = [f" is {negation}a {role}" for negation in ("", "not ") for role in ROLE.values()]
    return sorted({*common, *phrases(), *roles, "If "})


def _math_dataset(spec: MathWarmStart) -> Dataset:
    families = _nonzero({str(family): share for family, share in spec.weights.items()})
    levels = _nonzero(spec.levels)
    kinds = (sorted(families), sorted(levels))
    pool = demonstrations_math.questions(*kinds, spec.questions, spec.seed)
    held_out = demonstrations_math.questions(*kinds, spec.probe_size, spec.seed, "heldout")
    shares = (families, levels)
    return Dataset(
        demonstrations_math.math_demonstrations(pool, *shares, guess_share=spec.guess_share, seed=spec.seed),
        demonstrations_math.math_demonstrations(held_out, *shares, guess_share=spec.guess_share, seed=spec.seed + 1),
        lambda _: demonstrations_math.phrases(),
    )


def _tool_dataset(spec: ToolQaWarmStart) -> Dataset:
    hops = _nonzero(spec.weights)
    pool = demonstrations_tool.search_questions(sorted(hops), spec.worlds, spec.questions, spec.seed)
    held_out = demonstrations_tool.search_questions(sorted(hops), 1, max(1, spec.probe_size // 4), spec.seed, "heldout")
    vocabulary = [question for questions in pool.values() for question in questions[: spec.questions]]
    return Dataset(
        demonstrations_tool.tool_demonstrations(pool, hops, guess_share=spec.guess_share, seed=spec.seed),
        demonstrations_tool.tool_demonstrations(held_out, hops, guess_share=spec.guess_share, seed=spec.seed + 1),
        lambda _: demonstrations_tool.phrases(vocabulary),
    )


Key = TypeVar("Key")


def _nonzero(weights: Mapping[Key, float]) -> dict[Key, float]:
    """Weights greater than 0."""
    return {key: weight for key, weight in weights.items() if weight > 0}


def _train(
    spec: WarmStartSpec,
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    train: Iterator[Demonstration],
    probe: Sequence[Demonstration],
    start: float,
    on_progress: Callable[[Progress], None] | None,
) -> Progress:
    """Training loop; returns the last report, which includes `exact`."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = (
        Muon(matrices, lr=spec.muon_lr, weight_decay=spec.weight_decay),
        torch.optim.AdamW(others, lr=spec.lr, betas=(0.9, spec.beta2), weight_decay=0.0),
    )
    model.train()
    losses: list[float] = []
    report = Progress(0, spec.steps, math.nan, 0.0)
    for step in range(1, spec.steps + 1):
        for optimizer, peak in zip(optimizers, (spec.muon_lr, spec.lr), strict=True):
            optimizer.param_groups[0]["lr"] = peak * schedule(step, spec)
        rows = [_row(tokenizer, demonstration) for demonstration in islice(train, spec.batch)]
        losses.append(_accumulate(model, rows, spec.micro_tokens))
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        evaluate = step % spec.probe_every == 0 or step == spec.steps
        if evaluate or step % 10 == 0:
            report = Progress(step, spec.steps, sum(losses) / len(losses), time.monotonic() - start)
            losses = []
            if evaluate:
                report = replace(report, exact=exactness(model, tokenizer, probe, spec.micro_tokens))
            if on_progress is not None:
                on_progress(report)
    with torch.no_grad():
        model.model.norm.weight.mul_(spec.logit_scale)
    model.eval()
    return report


def schedule(step: int, spec: WarmStartSpec) -> float:
    """Learning rate of update `step` (from 1) relative to its peak: linear warmup, constant, linear cooldown."""
    warmup = min(1.0, step / spec.warmup) if spec.warmup else 1.0
    cooldown = min(1.0, (spec.steps + 1 - step) / (spec.cooldown * spec.steps)) if spec.cooldown else 1.0
    return warmup * cooldown


def _row(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> Row:
    """Tokenize a demonstration. Turns and responses are tokenized separately, as in a rollout; responses have mask 0."""
    turns = [(demonstration.completion, 1)]
    for reply, turn in demonstration.later:
        turns += [(reply, 0), (turn, 1)]
    prompt, *parts = tokenizer([demonstration.prompt, *(text for text, _ in turns)])["input_ids"]
    parts[-1] = [*parts[-1], tokenizer.eos_token_id]
    mask = [value for part, (_, value) in zip(parts, turns, strict=True) for _ in part]
    return Row(prompt, [token for part in parts for token in part], mask)


def _batches(rows: Sequence[Row], max_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Batches of rows sorted by length, with at most `max_tokens` tokens including padding, or one row.

    Lengths differ tenfold; with a fixed number of rows, half of the tokens would be padding.

    Yields:
        input_ids (n, L), labels (n, L), which are −100 outside the loss, and the indices of the n rows.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    while order:
        lengths = [len(rows[i]) for i in order]
        number = max([1, *(n for n, length in enumerate(lengths, 1) if n * length <= max_tokens)])
        indices, order = order[:number], order[number:]
        input_ids = torch.zeros(number, lengths[number - 1], dtype=torch.long)
        labels = torch.full(input_ids.shape, -100)
        for line, i in enumerate(indices):
            row = rows[i]
            input_ids[line, : len(row)] = torch.tensor(row.prompt + row.completion)
            targets = torch.tensor(row.completion).where(torch.tensor(row.mask).bool(), -100)
            labels[line, len(row.prompt) : len(row)] = targets
        yield input_ids, labels, indices


def _predictions(
    model: Qwen2ForCausalLM, input_ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (M, V) and labels (M,) of the M tokens in the loss, and their mask (n, L − 1).

    Padding is on the right, so causal attention needs no attention mask.
    """
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]  # (n, L − 1, width)
    mask = labels[:, 1:] >= 0
    return model.lm_head(hidden[mask]), labels[:, 1:][mask], mask


def _accumulate(model: Qwen2ForCausalLM, rows: Sequence[Row], max_tokens: int) -> float:
    """Accumulate the gradient of the mean loss over completion tokens; returns the loss [nats]."""
    tokens = sum(sum(row.mask) for row in rows)
    total = 0.0
    for input_ids, labels, _ in _batches(rows, max_tokens):
        logits, targets, _ = _predictions(model, input_ids, labels)
        loss = cross_entropy(logits, targets, reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    return total


@torch.no_grad()
def exactness(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, probe: Sequence[Demonstration], max_tokens: int
) -> dict[str, float]:
    """Fraction of demonstrations, by style, for which every token is the most likely one given the previous tokens.

    The first completion token is excluded, because it selects the style.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        probe: demonstrations.
        max_tokens: largest number of tokens per batch.
    """
    results: dict[str, list[bool]] = {}
    rows = [_row(tokenizer, demonstration) for demonstration in probe]
    for input_ids, labels, indices in _batches(rows, max_tokens):
        logits, targets, mask = _predictions(model, input_ids, labels)
        correct = torch.ones_like(mask)
        correct[mask] = logits.argmax(-1) == targets
        for line, i in enumerate(indices):
            skipped = len(rows[i].prompt) + probe[i].completion.startswith(OPENING)
            results.setdefault(probe[i].style, []).append(bool(correct[line, skipped:].all()))
    return {style: sum(values) / len(values) for style, values in sorted(results.items())}
