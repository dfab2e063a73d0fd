"""How far the local tier's norm is from the exact one, per architecture, with random and with trained weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from experiments.benchmarks.tokens import embedded
from sharpscope.probes import score_norms

WORDS, HALF = 48, 24
_LLAMA_LIKE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": _LLAMA_LIKE,
    "qwen3": {**_LLAMA_LIKE, "head_dim": 16},
    "llama": _LLAMA_LIKE,
    "gpt2": {
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "gpt_neox": {**_LLAMA_LIKE, "num_key_value_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "gemma2": {**_LLAMA_LIKE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32},
    "qwen2_moe": {
        **_LLAMA_LIKE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
    },
}
"""Four layers of width 64, by transformers' name of the model type."""


@dataclass(frozen=True)
class Distance:
    """The ratio of the local norm to the exact one over a set of tokens.

    Attributes:
        model, weights: which; `loss`: mean −ln π of these tokens [nats].
        tokens: their number.
        median, low: median and 5 % quantile of the ratio.
        top: median over the quarter with the largest exact norm.
        rank: Spearman correlation of the two norms.
    """

    model: str
    weights: str
    loss: float
    tokens: int
    median: float
    low: float
    top: float
    rank: float


def small_model(kind: str) -> nn.Module:
    """A model of `SHAPES`, initialized as transformers does, float32, in eval mode."""
    make: Any = CONFIG_MAPPING[kind]  # its annotations are those of the base class
    config = make(
        vocab_size=WORDS, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=1, **SHAPES[kind]
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager" if kind == "gemma2" else "sdpa", dtype=torch.float32
        )
    return model.eval()


def text(rows: int, generator: torch.Generator) -> Tensor:
    """(rows, 2·HALF): a Markov chain in which each word has four successors, then the same words once more."""
    successors = torch.randint(2, WORDS, (WORDS, 4), generator=torch.Generator().manual_seed(1))
    words = [torch.randint(2, WORDS, (rows,), generator=generator)]
    while len(words) < HALF:
        words.append(successors[words[-1], torch.randint(0, 4, (rows,), generator=generator)])
    return torch.stack(words, 1).repeat(1, 2)


def fit(model: nn.Module, updates: int) -> None:
    """AdamW on the next token of the text, 32 rows an update."""
    draw = torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(updates):
        ids = text(32, draw)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def distance(
    name: str, weights: str, model: nn.Module, ids: Tensor, mask: Tensor, attention_mask: Tensor | None = None
) -> Distance:
    """Compare the two tiers on the tokens that `mask` (N, S) marks."""
    at = mask.bool()
    exact = score_norms(model, ids, mask, "exact", attention_mask).values[at].double()
    local = score_norms(model, ids, mask, "local", attention_mask).values[at].double()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
        logp = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0][at[:, 1:]]
    known = exact > 0
    exact, local = exact[known], local[known]
    ratio = local / exact
    top = exact >= exact.quantile(0.75)
    return Distance(
        name,
        weights,
        -float(logp.mean()),
        len(ratio),
        float(ratio.median()),
        float(ratio.quantile(0.05)),
        float(ratio[top].median()),
        float(spearmanr(local.numpy(), exact.numpy()).statistic),
    )


def policy_rows(prompts: int, group: int = 2) -> dict[str, Tensor]:
    """Completions that the embedded policy draws for the first puzzles: input_ids, mask, attention_mask (N, P+T)."""
    from sharpscope.config import build_config
    from sharpscope.policy import draw_completions, load_policy
    from sharpscope.tasks import make_task

    config = build_config(None, [])
    policy, task = load_policy(config.policy), make_task(config.task)
    found = draw_completions(policy, task, task.splits()["train"][:prompts], group, config.rollout, seed=0)
    blank = torch.zeros_like(found.input_ids[:, : found.prompt_width])
    mask = torch.cat([blank, found.completion_mask], 1)
    return {"ids": found.input_ids, "mask": mask, "attention_mask": found.attention_mask}


def distances(
    updates: int = 400, rows: int = 8, kinds: list[str] | None = None, tell: Callable[[str], None] = lambda text: None
) -> list[Distance]:
    """All architectures, random and trained, on fresh text; then the embedded policy on completions of its own."""
    found = []
    for kind in kinds or list(SHAPES):
        model, ids = small_model(kind), text(rows, torch.Generator().manual_seed(3))
        mask = torch.ones_like(ids)
        mask[:, 0] = 0
        found.append(distance(kind, "random", model, ids, mask))
        fit(model, updates)
        found.append(distance(kind, "trained", model, ids, mask))
        tell(f"{kind}: median local/exact {found[-2].median:.3f} random, {found[-1].median:.3f} trained")
    found.append(distance("embedded policy", "trained", embedded(), **policy_rows(rows // 2)))
    return found


HEADINGS = ("model", "weights", "loss [nats]", "tokens", "median", "5 % quantile", "top quarter", "rank correlation")


def report(found: list[Distance]) -> str:
    """The table in Markdown, with what it means."""
    lines = [
        "# The local tier's norm over the exact one",
        "",
        f"Four layers of width 64 on a text of {HALF} words of a Markov chain, which are then said once more, so that half of",
        "the tokens are copied from far back; the embedded policy on completions of its own. 1 would be no error: the",
        "local tier leaves out what flows through other positions' keys and values. `top quarter`: median over the quarter",
        "of the tokens with the largest exact norm. Remade by `python -m experiments.benchmarks tokens --accuracy`.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += [
        f"| {d.model} | {d.weights} | {d.loss:.2f} | {d.tokens} | {d.median:.3f} | {d.low:.3f} | {d.top:.3f} | {d.rank:.4f} |"
        for d in found
    ]
    return "\n".join([*lines, ""])


def write(found: list[Distance], folder: Path) -> Path:
    """Write tokens-accuracy.md; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokens-accuracy.md"
    path.write_text(report(found), encoding="utf-8")
    return path
