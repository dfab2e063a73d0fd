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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from sharpscope.errors import UserError
from sharpscope.policy.loading import build_model, build_tokenizer, common_phrases, save_tokenizer
from sharpscope.warm_start import demonstrations as made
from sharpscope.warm_start.demonstrations import Demonstration

SUMMARY = "warm_start.json"


HEADS = 4
MATH_LEVELS = {1: 0.2, 2: 0.4, 3: 0.4}
"""Share of math demonstrations by level."""
MUON_LR, LR, BETA2 = 0.02, 6e-3, 0.98
"""Peak learning rates of Muon, for the layers' matrices, and of AdamW, for the other parameters, and AdamW's β₂."""
WEIGHT_DECAY = 0.01
"""Decoupled decay of the layers' matrices."""
WARMUP = 60
"""Updates of linear warm-up."""
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class WarmStartSpec:
    """Model, tokenizer, demonstrations and optimization; `WARM_STARTS` has those of the shipped policies.

    Attributes:
        policy: embedded policy whose demonstrations are used.
        weights: share of demonstrations by number of people (2 to 7), family of question or number of hops (1 to 3).
        questions: distinct puzzles of the most frequent size, questions per family and level, or per world and hops.
        worlds: tool_qa: generated worlds, distinct from those of the task's seeds.
        guess_share: share of demonstrations that guess instead of reasoning.
        chat_share: knights_knaves: share of demonstrations with a chat prompt.
        layers, width, feed_forward: sizes of the transformer; `width` is a multiple of 8.
        vocabulary: maximum vocabulary of the tokenizer [tokens].
        corpus: demonstrations used to train the tokenizer.
        steps, batch: optimizer updates, and demonstrations per update.
        micro_tokens: maximum size of a forward pass, including padding, at least one row [tokens].
        cooldown: share of the updates, at the end, in which the learning rates decay to zero.
        logit_scale: factor on the final norm's gain after training, which scales all logits.
        seed: seed of weights, demonstrations and their order.
    """

    policy: str = "knights_knaves"
    weights: dict[Any, float] = field(default_factory=lambda: {2: 0.15, 3: 0.65, 4: 0.15, 5: 0.03})
    questions: int = 8000
    worlds: int = 20
    guess_share: float = 0.5
    chat_share: float = 0.15
    layers: int = 4
    width: int = 128
    feed_forward: int = 384
    vocabulary: int = 768
    corpus: int = 4000
    steps: int = 1300
    batch: int = 48
    micro_tokens: int = 2048
    cooldown: float = 0.4
    logit_scale: float = 1.0
    seed: int = 0


_MATH: dict[str, Any] = {
    "questions": 5000,
    "vocabulary": 320,
    "layers": 3,
    "width": 64,
    "feed_forward": 192,
    "steps": 900,
}
_TOOL_QA: dict[str, Any] = {
    "questions": 300,
    "vocabulary": 576,
    "layers": 3,
    "width": 96,
    "feed_forward": 256,
    "steps": 1600,
}
_TOOL_QA |= {"guess_share": 0.3, "batch": 32, "cooldown": 0.5}
WARM_STARTS: dict[str, WarmStartSpec] = {
    "knights_knaves": WarmStartSpec(),
    "math": WarmStartSpec("math", {"arithmetic": 0.9, "linear": 0.05, "modular": 0.05}, micro_tokens=4096, **_MATH),
    "tool_qa": WarmStartSpec("tool_qa", {1: 1.0}, micro_tokens=4096, **_TOOL_QA),
}
"""The warm start of each embedded policy; it recreates the shipped one."""


class Row(NamedTuple):
    """Token ids of a demonstration's prompt and completion, and 1 for completion tokens in the loss, else 0."""

    prompt: list[int]
    completion: list[int]
    mask: list[int]


def warm_start(
    spec: WarmStartSpec, out_dir: Path | str, on_progress: Callable[[int, float], None] | None = None
) -> dict[str, Any]:
    """Train a policy and save it in the Hugging Face format to a new or empty folder; returns the content of `warm_start.json`.

    `on_progress` is called every 100 updates and at the end with the number of updates and the mean loss since the last call
    [nats per completion token].

    Raises:
        UserError: `out_dir` is not empty.
    """
    out = Path(out_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out = '{out}': exists and is not an empty folder; choose another")
    disable_progress_bar()  # transformers' own bars; `on_progress` reports progress
    start = time.monotonic()
    examples, phrases_of = _dataset(spec)
    corpus = list(islice(examples, spec.corpus))
    tokenizer = build_tokenizer((d.text for d in corpus), phrases_of(corpus), spec.vocabulary)
    sizes = {name: getattr(spec, name) for name in ("layers", "width", "feed_forward", "seed")}
    model = build_model(tokenizer, heads=HEADS, **sizes)
    loss = _train(spec, model, tokenizer, examples, on_progress or (lambda step, loss: None))
    summary: dict[str, Any] = {
        "loss": loss,
        "parameters": model.num_parameters(),
        "seconds": round(time.monotonic() - start, 1),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")}
        | {"python": platform.python_version()},
        "spec": asdict(spec),
    }
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    save_tokenizer(tokenizer, out)
    (out / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def _dataset(spec: WarmStartSpec) -> tuple[Iterator[Demonstration], Callable[[Sequence[Demonstration]], list[str]]]:
    """Endless demonstrations, and a function from a corpus of them to the texts that become one token each."""
    seed, shares = spec.seed, spec.weights
    common: dict[str, Any] = {"guess_share": spec.guess_share, "seed": seed}
    if spec.policy == "math":
        pool = made.questions(sorted(shares), sorted(MATH_LEVELS), spec.questions, seed)
        return made.math_demonstrations(pool, shares, MATH_LEVELS, **common), lambda _: made.math_phrases()
    if spec.policy == "tool_qa":
        asked = made.search_questions(sorted(shares), spec.worlds, spec.questions, seed)
        seen = [question for questions in asked.values() for question in questions[: spec.questions]]
        return made.tool_demonstrations(asked, shares, **common), lambda _: made.tool_phrases(seen)
    numbers = {people: max(1, round(spec.questions * share / max(shares.values()))) for people, share in shares.items()}
    pools = {people: made.puzzles(people, number, seed) for people, number in numbers.items()}
    return made.puzzle_demonstrations(pools, shares, chat_share=spec.chat_share, **common), _puzzle_phrases


def _puzzle_phrases(corpus: Sequence[Demonstration]) -> list[str]:
    """Phrases of compact prompts and of completions; chat prompts contribute none."""
    common = common_phrases(d.prompt for d in corpus if not d.prompt.endswith(made.OPENING))
    roles = [f" is {negation}a {role}" for negation in ("", "not ") for role in made.ROLE.values()]
    return sorted({*common, *made.puzzle_phrases(), *roles, "If "})


def _train(
    spec: WarmStartSpec,
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    examples: Iterator[Demonstration],
    on_progress: Callable[[int, float], None],
) -> float:
    """Training loop; returns the mean loss since the last report."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = (
        Muon(matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, lr=LR, betas=(0.9, BETA2), weight_decay=0.0),
    )
    model.train()
    losses: list[float] = []
    loss = math.nan
    for step in range(1, spec.steps + 1):
        for optimizer, peak in zip(optimizers, (MUON_LR, LR), strict=True):
            optimizer.param_groups[0]["lr"] = peak * schedule(step, spec)
        rows = [_row(tokenizer, demonstration) for demonstration in islice(examples, spec.batch)]
        losses.append(_accumulate(model, rows, spec.micro_tokens))
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == spec.steps:
            loss, losses = sum(losses) / len(losses), []
            on_progress(step, loss)
    with torch.no_grad():
        model.model.norm.weight.mul_(spec.logit_scale)
    model.eval()
    return loss


def schedule(step: int, spec: WarmStartSpec) -> float:
    """Learning rate of update `step` (from 1) relative to its peak: linear warmup, constant, linear cooldown."""
    return min(1.0, step / WARMUP) * min(1.0, (spec.steps + 1 - step) / (spec.cooldown * spec.steps))


def _row(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> Row:
    """Tokenize a demonstration. Turns and responses are tokenized separately, as in a rollout; responses have mask 0."""
    turns = [(demonstration.completion, 1)]
    for reply, turn in demonstration.later:
        turns += [(reply, 0), (turn, 1)]
    prompt, *parts = tokenizer([demonstration.prompt, *(text for text, _ in turns)])["input_ids"]
    parts[-1] = [*parts[-1], tokenizer.eos_token_id]
    mask = [value for part, (_, value) in zip(parts, turns, strict=True) for _ in part]
    return Row(prompt, [token for part in parts for token in part], mask)


def _batches(rows: Sequence[Row], max_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of rows sorted by length (L), with at most `max_tokens` tokens including padding, or one row.

    Lengths differ tenfold; with a fixed number of rows, half of the tokens would be padding.

    Yields:
        input_ids (n, L) and labels (n, L), which are −100 outside the loss.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].prompt + rows[i].completion))
    while order:
        lengths = [len(rows[i].prompt + rows[i].completion) for i in order]
        number = max([1, *(n for n, length in enumerate(lengths, 1) if n * length <= max_tokens)])
        batch, order = [rows[i] for i in order[:number]], order[number:]
        input_ids = torch.zeros(number, lengths[number - 1], dtype=torch.long)
        labels = torch.full(input_ids.shape, -100)
        for line, row in enumerate(batch):
            stop = len(row.prompt + row.completion)
            input_ids[line, :stop] = torch.tensor(row.prompt + row.completion)
            labels[line, len(row.prompt) : stop] = torch.tensor(row.completion).where(
                torch.tensor(row.mask).bool(), -100
            )
        yield input_ids, labels


def _accumulate(model: Qwen2ForCausalLM, rows: Sequence[Row], max_tokens: int) -> float:
    """Accumulate the gradient of the mean loss over completion tokens; returns the loss [nats]."""
    tokens = sum(sum(row.mask) for row in rows)
    total = 0.0
    for input_ids, labels in _batches(rows, max_tokens):
        # Padding is on the right, so causal attention needs no attention mask.
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]  # (n, L − 1, width)
        mask = labels[:, 1:] >= 0
        loss = cross_entropy(model.lm_head(hidden[mask]), labels[:, 1:][mask], reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    return total


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd polynomial that maps singular values to about 1 in five iterations."""


def orthogonal(matrices: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Orthogonalize matrices (n, a, b) with a ≤ b: map singular values to about [0.7, 1.2], keep singular vectors."""
    a, b, c = NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        square = x @ x.mT  # (n, a, a)
        x = a * x + (b * square + c * square @ square) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay (K. Jordan et al., 2024); torch has it only since 2.9.

    An update of a parameter (out, in) has spectral norm about lr·sqrt(max(1, out/in)).
    """

    def __init__(
        self, matrices: Iterable[torch.Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices that have a `.grad`."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                direction = matrix.grad.lerp(average, group["momentum"])
                tall = direction.shape[0] > direction.shape[1]
                update = orthogonal((direction.T if tall else direction).contiguous()[None])[0]
                update = update.T if tall else update
                scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)
