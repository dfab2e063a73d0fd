"""GRPO (arXiv 2402.03300) in one file of plain PyTorch and transformers, recorded with six lines.

A tiny model with random weights learns to answer a digit with many copies of it. The six lines that record it are marked with
`# record`; without them it is the same training. Run it, then look at what it has learned from:

    python examples/grpo_in_one_file.py
    sharpscope show runs/one-file
    sharpscope tokens runs/one-file --by attribution

`tests/test_example_scripts.py` checks that its losses, gradients and weights are those of the package.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import sharpscope  # record

STEPS = 12
PROMPTS = 4  # of a step
GROUP = 8  # completions of a prompt
UPDATES = 2  # of a step, each on all of its completions
NEW_TOKENS = 12
CLIP = 0.2  # ε of the ratio
LR = 3e-3
MAX_GRAD_NORM = 1.0


# -- the model, the tokenizer and the task -----------------------------------------------------------------------------


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character: digits, a colon, the end and padding."""
    vocabulary = {"<pad>": 0, "<eos>": 1, ":": 2} | {str(d): 3 + d for d in range(10)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def make_model(seed: int = 0) -> Qwen2ForCausalLM:
    """Two layers of width 32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=13,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen2ForCausalLM(config)


def reward(prompt: str, completion: str) -> float:
    """The share of the answer's places that hold the prompt's digit."""
    return completion.count(prompt[0]) / NEW_TOKENS


# -- rollouts ----------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """The completions of a step: N rows, P prompt and T completion positions."""

    ids: Tensor  # (N, P+T)
    mask: Tensor  # (N, T) 1 on the tokens up to the end token, which counts
    rewards: Tensor  # (N,)
    group: Tensor  # (N,) number of each row's prompt
    old_logp: Tensor  # (N, T) ln π of the policy that drew them [nats]


@torch.no_grad()
def draw(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, step: int) -> Batch:
    """Draw `GROUP` completions of each of the step's prompts at temperature 1, and score them."""
    generator = torch.Generator().manual_seed(step)
    digits = torch.randperm(10, generator=generator)[:PROMPTS].tolist()
    prompts = [f"{digit}:" for digit in digits for _ in range(GROUP)]
    ids = torch.tensor(tokenizer(prompts)["input_ids"])  # all have two tokens, so none is padded
    ended = torch.zeros(len(ids), dtype=torch.bool)
    mask = []
    for _ in range(NEW_TOKENS):
        probabilities = model(ids).logits[:, -1].softmax(-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        drawn = torch.where(ended, tokenizer.pad_token_id, drawn)
        mask.append(~ended)
        ended |= drawn == tokenizer.eos_token_id
        ids = torch.cat([ids, drawn[:, None]], 1)
    whole = torch.stack(mask, 1).long()
    texts = tokenizer.batch_decode(ids[:, -NEW_TOKENS:], skip_special_tokens=True)
    rewards = [reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    return Batch(
        ids=ids,
        mask=whole,
        rewards=torch.tensor(rewards),
        group=torch.arange(len(ids)) // GROUP,
        old_logp=log_probabilities(model, ids),
    )


def log_probabilities(model: Qwen2ForCausalLM, ids: Tensor) -> Tensor:
    """(N, T) ln π of the completions' tokens: the logits at a position are of the next token."""
    logits = model(ids).logits[:, -NEW_TOKENS - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, -NEW_TOKENS:, None])[..., 0]


# -- the objective -----------------------------------------------------------------------------------------------------


def advantages(rewards: Tensor) -> Tensor:
    """(N,) (R − mean R)/(std R + 1e-4) within each group; 0 where all rewards of a group are equal."""
    groups = rewards.double().view(-1, GROUP)
    centered = groups - groups.mean(1, keepdim=True)
    return (centered / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def grpo_loss(logp: Tensor, batch: Batch, advantage: Tensor) -> Tensor:
    """−(1/N) Σ_i (1/|o_i|) Σ_t min(r·A, clip(r, 1 − ε, 1 + ε)·A) with r = π/π_old."""
    ratio = (logp - batch.old_logp).exp()
    weight = advantage[:, None].to(logp)
    objective = torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight)
    of_completion = (objective * batch.mask).sum(1) / batch.mask.sum(1)
    return -of_completion.mean()


# -- the training ------------------------------------------------------------------------------------------------------


@dataclass
class Update:
    """What an update did."""

    loss: float
    grad_norm: float  # before clipping


def train(
    steps: int = STEPS, out: str = "runs/one-file", record: bool = True
) -> tuple[Qwen2ForCausalLM, list[Update]]:
    """Train and record; returns the model and its updates."""
    model, tokenizer = make_model(), make_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    recorder = None
    if record:
        recorder = sharpscope.record(  # record
            model, optimizer, tokenizer=tokenizer, out=out, steps=steps, updates_per_step=UPDATES
        )
    made = []
    for step in range(steps):
        batch = draw(model, tokenizer, step)
        advantage = advantages(batch.rewards)
        for _ in range(UPDATES):
            logp = log_probabilities(model, batch.ids)
            if recorder is not None:
                recorder.tokens(  # record
                    logp,
                    batch.ids,
                    batch.mask,
                    old_logp=batch.old_logp,
                    advantages=advantage,
                    rewards=batch.rewards,
                    groups=batch.group,
                )
            loss = grpo_loss(logp, batch, advantage)
            loss.backward()
            if recorder is not None:
                recorder.step(loss)  # record
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            made.append(Update(loss=float(loss), grad_norm=float(norm)))
        print(f"step {step + 1}: reward {float(batch.rewards.mean()):.3f}")
    if recorder is not None:
        recorder.close()  # record
    return model, made


if __name__ == "__main__":
    train()
