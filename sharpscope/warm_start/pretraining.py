"""Making an embedded policy: a tokenizer and a tiny model, trained to imitate demonstrations.

Seeded throughout: the same spec on the same machine, with the same library versions and number of threads, gives the
same weights bit for bit. Elsewhere sums are taken in another order and the difference grows with every update: another
policy comes out, of similar but not equal accuracy.
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
    """One report: after `step` of `steps` updates, mean loss since the last report [nats per completion token].

    `exact` is None, or how often the greedy next token was right all along: shares of the held-out demonstrations by
    style (`exactness`).
    """

    step: int
    steps: int
    loss: float
    seconds: float
    exact: dict[str, float] | None = None


@dataclass(frozen=True)
class WarmStartSummary:
    """What a warm start did: last mean loss [nats per completion token], last probe, parameters, wall time [s]."""

    loss: float
    exact: dict[str, float]
    parameters: int
    seconds: float
    threads: int
    versions: dict[str, str]
    spec: dict[str, object]


@dataclass(frozen=True)
class Row:
    """Token ids of a prompt and of its completion, which ends in the end-of-text token; `mask` 1 is to be imitated."""

    prompt: list[int]
    completion: list[int]
    mask: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True)
class Material:
    """Demonstrations to train on, held-out ones to measure with, and the phrases that are one token each."""

    train: Iterator[Demonstration]
    probe: Iterator[Demonstration]
    phrases: Callable[[Sequence[Demonstration]], list[str]]


def warm_start(
    spec: WarmStartSpec, out_dir: Path | str, on_progress: Callable[[Progress], None] | None = None
) -> WarmStartSummary:
    """Make a policy and write it to `out_dir` in the Hugging Face layout, with `warm_start.json` beside it.

    `on_progress` is called every 10 updates and at every probe.

    Raises:
        UserError: `out_dir` exists and is not empty, or the width, heads and vocabulary of the spec do not go together.
    """
    out = Path(out_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out = '{out}': exists and is not an empty folder; choose another")
    began = time.monotonic()
    material = _material(spec)
    corpus = list(islice(material.train, spec.corpus))
    tokenizer = build_tokenizer((d.text for d in corpus), material.phrases(corpus), spec.vocabulary)
    model = build_model(
        tokenizer,
        layers=spec.layers,
        width=spec.width,
        feed_forward=spec.feed_forward,
        heads=spec.heads,
        seed=spec.seed,
    )
    last = _train(
        spec, model, tokenizer, material.train, list(islice(material.probe, spec.probe_size)), began, on_progress
    )
    summary = WarmStartSummary(
        loss=last.loss,
        exact=last.exact or {},
        parameters=model.num_parameters(),
        seconds=round(time.monotonic() - began, 1),
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


def _material(spec: WarmStartSpec) -> Material:
    """What the policy of that kind imitates; no content stands both in `train` and in `probe`."""
    if isinstance(spec, KnightsKnavesWarmStart):
        return _puzzle_material(spec)
    if isinstance(spec, MathWarmStart):
        return _math_material(spec)
    if isinstance(spec, ToolQaWarmStart):
        return _tool_material(spec)
    raise TypeError(f"no material for {type(spec).__name__}")


def _puzzle_material(spec: KnightsKnavesWarmStart) -> Material:
    top = max(spec.weights.values())
    sizes = _used(spec.weights)
    shares = {"guess_share": spec.guess_share, "chat_share": spec.chat_share}
    pools = {
        people: puzzles(people, max(1, round(spec.puzzles * share / top)), spec.seed) for people, share in sizes.items()
    }
    held_out = {people: puzzles(people, spec.probe_size, spec.seed, split="heldout") for people in sizes}
    return Material(
        demonstrations(pools, sizes, **shares, seed=spec.seed),
        demonstrations(held_out, sizes, **shares, seed=spec.seed + 1),
        _puzzle_phrases,
    )


def _puzzle_phrases(corpus: Sequence[Demonstration]) -> list[str]:
    """Phrases from the compact prompts and the completions, the rest from all texts: chat text stays ordinary text."""
    common = common_phrases(d.prompt for d in corpus if not d.prompt.endswith(OPENING))
    roles = [f" is {negation}a {role}" for negation in ("", "not ") for role in ROLE.values()]
    return sorted({*common, *phrases(), *roles, "If "})


def _math_material(spec: MathWarmStart) -> Material:
    families = _used({str(family): share for family, share in spec.weights.items()})
    levels = _used(spec.levels)
    kinds = (sorted(families), sorted(levels))
    pool = demonstrations_math.questions(*kinds, spec.questions, spec.seed)
    held_out = demonstrations_math.questions(*kinds, spec.probe_size, spec.seed, "heldout")
    shares = (families, levels)
    return Material(
        demonstrations_math.math_demonstrations(pool, *shares, guess_share=spec.guess_share, seed=spec.seed),
        demonstrations_math.math_demonstrations(held_out, *shares, guess_share=spec.guess_share, seed=spec.seed + 1),
        lambda _: demonstrations_math.phrases(),
    )


def _tool_material(spec: ToolQaWarmStart) -> Material:
    hops = _used(spec.weights)
    pool = demonstrations_tool.asked(sorted(hops), spec.worlds, spec.questions, spec.seed)
    held_out = demonstrations_tool.asked(sorted(hops), 1, max(1, spec.probe_size // 4), spec.seed, "heldout")
    seen = [question for questions in pool.values() for question in questions[: spec.questions]]
    return Material(
        demonstrations_tool.tool_demonstrations(pool, hops, guess_share=spec.guess_share, seed=spec.seed),
        demonstrations_tool.tool_demonstrations(held_out, hops, guess_share=spec.guess_share, seed=spec.seed + 1),
        lambda _: demonstrations_tool.phrases(seen),
    )


Key = TypeVar("Key")


def _used(weights: Mapping[Key, float]) -> dict[Key, float]:
    """The shares that are not 0."""
    return {key: share for key, share in weights.items() if share > 0}


def _train(
    spec: WarmStartSpec,
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    train: Iterator[Demonstration],
    probe: Sequence[Demonstration],
    began: float,
    on_progress: Callable[[Progress], None] | None,
) -> Progress:
    """The loop; returns the last report, which holds a probe."""
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
        probing = step % spec.probe_every == 0 or step == spec.steps
        if probing or step % 10 == 0:
            report = Progress(step, spec.steps, sum(losses) / len(losses), time.monotonic() - began)
            losses = []
            if probing:
                report = replace(report, exact=exactness(model, tokenizer, probe, spec.micro_tokens))
            if on_progress is not None:
                on_progress(report)
    with torch.no_grad():
        model.model.norm.weight.mul_(spec.logit_scale)
    model.eval()
    return report


def schedule(step: int, spec: WarmStartSpec) -> float:
    """Learning rates of update `step` (from 1) as a share of their peaks: a linear rise, the peak, a linear fall."""
    rise = min(1.0, step / spec.warmup) if spec.warmup else 1.0
    fall = min(1.0, (spec.steps + 1 - step) / (spec.cooldown * spec.steps)) if spec.cooldown else 1.0
    return rise * fall


def _row(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> Row:
    """Every turn and reply is tokenized for itself, as in a rollout; the replies' mask is 0."""
    turns = [(demonstration.completion, 1)]
    for reply, turn in demonstration.later:
        turns += [(reply, 0), (turn, 1)]
    prompt, *parts = tokenizer([demonstration.prompt, *(text for text, _ in turns)])["input_ids"]
    parts[-1] = [*parts[-1], tokenizer.eos_token_id]
    mask = [own for part, (_, own) in zip(parts, turns, strict=True) for _ in part]
    return Row(prompt, [token for part in parts for token in part], mask)


def _batches(rows: Sequence[Row], most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Rows by length, cut so that none holds more than `most` tokens with its padding, though at least one row.

    Yields input_ids (n, L), labels (n, L) that are −100 where nothing is imitated, and the rows' indices (n). Lengths
    differ tenfold: with a fixed number of rows padding would be half the work.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    while order:
        lengths = [len(rows[i]) for i in order]
        number = max([1, *(n for n, length in enumerate(lengths, 1) if n * length <= most)])
        chosen, order = order[:number], order[number:]
        input_ids = torch.zeros(number, lengths[number - 1], dtype=torch.long)
        labels = torch.full(input_ids.shape, -100)
        for line, i in enumerate(chosen):
            row = rows[i]
            input_ids[line, : len(row)] = torch.tensor(row.prompt + row.completion)
            wanted = torch.tensor(row.completion).where(torch.tensor(row.mask).bool(), -100)
            labels[line, len(row.prompt) : len(row)] = wanted
        yield input_ids, labels, chosen


def _predictions(
    model: Qwen2ForCausalLM, input_ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (M, V) and labels (M,) of the M tokens to imitate, and which of them are which, (n, L − 1) bool.

    Padding stands on the right, where causal attention never looks, so no attention mask is needed.
    """
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]  # (n, L − 1, width)
    here = labels[:, 1:] >= 0
    return model.lm_head(hidden[here]), labels[:, 1:][here], here


def _accumulate(model: Qwen2ForCausalLM, rows: Sequence[Row], most: int) -> float:
    """Add the gradient of the batch's mean loss over completion tokens; returns that loss [nats]."""
    tokens = sum(sum(row.mask) for row in rows)
    total = 0.0
    for input_ids, labels, _ in _batches(rows, most):
        logits, wanted, _ = _predictions(model, input_ids, labels)
        loss = cross_entropy(logits, wanted, reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    return total


@torch.no_grad()
def exactness(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, probe: Sequence[Demonstration], most: int
) -> dict[str, float]:
    """By style, the share of demonstrations whose every completion token but the first is the model's most likely one.

    Each token is predicted from the demonstrated ones before it. The first token is left out: it chooses the style.
    """
    right: dict[str, list[bool]] = {}
    rows = [_row(tokenizer, demonstration) for demonstration in probe]
    for input_ids, labels, chosen in _batches(rows, most):
        logits, wanted, here = _predictions(model, input_ids, labels)
        hit = torch.ones_like(here)
        hit[here] = logits.argmax(-1) == wanted
        for line, i in enumerate(chosen):
            skipped = len(rows[i].prompt) + probe[i].completion.startswith(OPENING)
            right.setdefault(probe[i].style, []).append(bool(hit[line, skipped:].all()))
    return {style: sum(values) / len(values) for style, values in sorted(right.items())}
