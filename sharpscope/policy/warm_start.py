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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import tokenizers
import torch
import transformers
from pydantic import Field, field_validator
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2ForCausalLM

from sharpscope.errors import UserError
from sharpscope.policy.demonstrations import OPENING, ROLE, Demonstration, demonstrations, phrases, puzzles
from sharpscope.policy.embedded import build_model, build_tokenizer, common_phrases, save_tokenizer
from sharpscope.policy.muon import Muon
from sharpscope.spec import Spec

SUMMARY = "warm_start.json"


class WarmStartSpec(Spec):
    """Warm start of the embedded policy `knights_knaves`; the defaults are those of the shipped one."""

    layers: int = Field(4, ge=1, le=16, description="transformer layers")
    width: int = Field(128, ge=8, le=1024, description="hidden size; a multiple of 2 × heads")
    feed_forward: int = Field(384, ge=8, le=4096, description="inner size of the feed-forward layers")
    heads: int = Field(4, ge=1, le=32, description="attention heads")
    vocabulary: int = Field(768, ge=268, le=8192, description="most tokens of the tokenizer")
    corpus: int = Field(4000, ge=1, description="demonstrations that the tokenizer is fitted to")
    weights: dict[int, float] = Field(
        {2: 0.15, 3: 0.65, 4: 0.15, 5: 0.03},
        description="share of demonstrations by number of people, 2 to 7; need not sum to 1",
    )
    puzzles: int = Field(
        8000, ge=1, description="different puzzles of the most frequent size; others in proportion to their share"
    )
    guess_share: float = Field(0.5, ge=0, le=1, description="share of demonstrations that guess instead of reasoning")
    chat_share: float = Field(
        0.15, ge=0, le=1, description="share of demonstrations with a chat prompt that ends in an opened <think>"
    )
    steps: int = Field(1300, ge=1, description="optimizer updates")
    batch: int = Field(48, ge=1, description="demonstrations per update")
    micro_tokens: int = Field(
        2048, ge=1, description="tokens in one forward pass, padding included, though at least one row"
    )
    muon_lr: float = Field(
        0.02, gt=0, le=1, description="peak learning rate of Muon, for the layers' matrices [per update]"
    )
    lr: float = Field(
        6e-3, gt=0, le=1, description="peak learning rate of AdamW, for embeddings, biases and gains [per update]"
    )
    beta2: float = Field(0.98, ge=0, lt=1, description="decay of AdamW's squared gradient average; beta1 is 0.9")
    weight_decay: float = Field(0.01, ge=0, description="decoupled decay of the layers' matrices")
    warmup: int = Field(60, ge=0, description="updates over which the learning rates rise")
    cooldown: float = Field(
        0.4, ge=0, le=1, description="share of the updates, the last ones, over which they fall to zero"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="global L2 norm to which gradients are clipped")
    probe_every: int = Field(200, ge=1, description="updates between two measurements on held-out demonstrations")
    probe_size: int = Field(100, ge=1, description="held-out demonstrations per measurement")
    seed: int = Field(0, ge=0, description="seed of weights, puzzles and order")

    @field_validator("weights")
    @classmethod
    def _sizes(cls, weights: dict[int, float]) -> dict[int, float]:
        if not all(2 <= people <= 7 and share >= 0 for people, share in weights.items()) or not any(weights.values()):
            raise ValueError(f"{weights}: numbers of people from 2 to 7, shares from 0, at least one of them above 0")
        return weights


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


Row = tuple[list[int], list[int]]
"""Token ids of a prompt and of its completion, which ends in the end-of-text token."""


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
    train, probe = _streams(spec)
    tokenizer = _tokenizer(list(islice(train, spec.corpus)), spec.vocabulary)
    model = build_model(
        tokenizer,
        layers=spec.layers,
        width=spec.width,
        feed_forward=spec.feed_forward,
        heads=spec.heads,
        seed=spec.seed,
    )
    last = _train(spec, model, tokenizer, train, list(islice(probe, spec.probe_size)), began, on_progress)
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


def _streams(spec: WarmStartSpec) -> tuple[Iterator[Demonstration], Iterator[Demonstration]]:
    """Demonstrations to train on, and held-out ones to measure with; no content stands in both."""
    top = max(spec.weights.values())
    sizes = {people: share for people, share in spec.weights.items() if share > 0}
    shares = {"guess_share": spec.guess_share, "chat_share": spec.chat_share}
    pools = {
        people: puzzles(people, max(1, round(spec.puzzles * share / top)), spec.seed) for people, share in sizes.items()
    }
    held_out = {people: puzzles(people, spec.probe_size, spec.seed, split="heldout") for people in sizes}
    return (
        demonstrations(pools, sizes, **shares, seed=spec.seed),
        demonstrations(held_out, sizes, **shares, seed=spec.seed + 1),
    )


def _tokenizer(corpus: Sequence[Demonstration], vocabulary: int) -> PreTrainedTokenizerFast:
    """Phrases from the compact prompts and the completions, the rest from all texts: chat text stays ordinary text."""
    common = common_phrases(d.prompt for d in corpus if not d.prompt.endswith(OPENING))
    roles = [f" is {negation}a {role}" for negation in ("", "not ") for role in ROLE.values()]
    found = sorted({*common, *phrases(), *roles, "If "})
    return build_tokenizer((d.prompt + d.completion for d in corpus), found, vocabulary)


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
    model.eval()
    return report


def schedule(step: int, spec: WarmStartSpec) -> float:
    """Learning rates of update `step` (from 1) as a share of their peaks: a linear rise, the peak, a linear fall."""
    rise = min(1.0, step / spec.warmup) if spec.warmup else 1.0
    fall = min(1.0, (spec.steps + 1 - step) / (spec.cooldown * spec.steps)) if spec.cooldown else 1.0
    return rise * fall


def _row(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> Row:
    prompt, completion = tokenizer([demonstration.prompt, demonstration.completion])["input_ids"]
    return prompt, [*completion, tokenizer.eos_token_id]


def _batches(rows: Sequence[Row], most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Rows by length, cut so that none holds more than `most` tokens with its padding, though at least one row.

    Yields input_ids (n, L), labels (n, L) that are −100 but on completions, and the rows' indices (n). Lengths differ
    tenfold: with a fixed number of rows padding would be half the work.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + len(rows[i][1]))
    while order:
        lengths = [len(rows[i][0]) + len(rows[i][1]) for i in order]
        number = max([1, *(n for n, length in enumerate(lengths, 1) if n * length <= most)])
        chosen, order = order[:number], order[number:]
        input_ids = torch.zeros(number, lengths[number - 1], dtype=torch.long)
        labels = torch.full(input_ids.shape, -100)
        for line, i in enumerate(chosen):
            prompt, completion = rows[i]
            end = len(prompt) + len(completion)
            input_ids[line, :end] = torch.tensor(prompt + completion)
            labels[line, len(prompt) : end] = torch.tensor(completion)
        yield input_ids, labels, chosen


def _predictions(
    model: Qwen2ForCausalLM, input_ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (M, V) and labels (M,) of the M completion tokens, and which of them are which, (n, L − 1) bool.

    Padding stands on the right, where causal attention never looks, so no attention mask is needed.
    """
    hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]  # (n, L − 1, width)
    here = labels[:, 1:] >= 0
    return model.lm_head(hidden[here]), labels[:, 1:][here], here


def _accumulate(model: Qwen2ForCausalLM, rows: Sequence[Row], most: int) -> float:
    """Add the gradient of the batch's mean loss over completion tokens; returns that loss [nats]."""
    tokens = sum(len(completion) for _, completion in rows)
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
            skipped = len(rows[i][0]) + probe[i].completion.startswith(OPENING)
            right.setdefault(probe[i].style, []).append(bool(hit[line, skipped:].all()))
    return {style: sum(values) / len(values) for style, values in sorted(right.items())}
