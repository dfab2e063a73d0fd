"""The training with a planted bug that `sharpscope demo` ends with: a GRPO loop as people write it, recorded in six lines.

The bug is one that nothing shows while it trains: completions are drawn at one temperature, and the loss takes their
log-probabilities at another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2ForCausalLM

from sharpscope.config.tasks import MathSpec
from sharpscope.integrations.record import record
from sharpscope.policy import embedded_policy
from sharpscope.tasks import Example, make_task

STEPS = 6
PROMPTS = 8
GROUP = 8
LENGTH = 40
SAMPLED_AT = 0.6  # the bug: the loss below takes temperature 1


def train_with_a_bug(out: Path, seed: int, on_step: Callable[[int], None]) -> None:
    """Train the embedded policy `math` with GRPO, sampled at a temperature that the loss does not know.

    Args:
        out: folder of the recorded run.
        seed: of prompts and completions.
        on_step: called with the number of each finished step.
    """
    folder = embedded_policy("math")
    model = Qwen2ForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = make_task(MathSpec())
    examples = task.splits()["train"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    recorder = record(
        model,
        optimizer,
        tokenizer=tokenizer,
        out=out,
        steps=STEPS,
        critical_sharpness=False,
    )
    torch.manual_seed(seed)
    for step in range(STEPS):
        chosen = [examples[i] for i in torch.randint(len(examples), (PROMPTS,)).tolist()]
        rows = [example for example in chosen for _ in range(GROUP)]
        ids, attention, mask = draw(model, tokenizer, rows)
        texts = tokenizer.batch_decode(ids[:, -LENGTH:], skip_special_tokens=True)
        scores = [task.score(row, text).total for row, text in zip(rows, texts, strict=True)]
        rewards = torch.tensor(scores)
        grouped = rewards.view(PROMPTS, GROUP)
        centered = grouped - grouped.mean(1, keepdim=True)
        advantages = (centered / (grouped.std(1, keepdim=True) + 1e-4)).flatten()  # (N,)
        with torch.no_grad():  # what the sampler would return with its tokens
            sampled = log_probabilities(model, ids, attention, SAMPLED_AT)
        logp = log_probabilities(model, ids, attention)  # (N, L - 1)
        recorder.tokens(
            logp,
            ids,
            mask,
            attention_mask=attention,
            sampler_logp=sampled,
            advantages=advantages,
            rewards=rewards,
            groups=torch.arange(PROMPTS).repeat_interleave(GROUP),
        )
        ratio = (logp - logp.detach()).exp()
        loss = -(ratio * advantages[:, None] * mask[:, 1:]).sum() / mask.sum()
        loss.backward()
        recorder.step(loss)
        optimizer.step()
        optimizer.zero_grad()
        on_step(step + 1)
    recorder.close()


@torch.no_grad()
def draw(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Example],
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a completion of each row; returns ids, attention mask and mask of the completions, each (N, L)."""
    prompts = [row.prompt + row.prefill for row in rows]
    read = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    ids = read["input_ids"]
    attention = read["attention_mask"]
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    whole = model.generate(
        input_ids=ids,
        attention_mask=attention,
        do_sample=True,
        temperature=SAMPLED_AT,
        top_k=0,
        max_new_tokens=LENGTH,
        eos_token_id=end,
        pad_token_id=pad,
    )
    completions = torch.nn.functional.pad(whole, (0, ids.shape[1] + LENGTH - whole.shape[1]))
    completions = completions[:, ids.shape[1] :]
    ended = (completions == end).long()
    inside = ((ended.cumsum(1) - ended) == 0).long()  # up to and with the end token
    return (
        torch.cat([ids, completions], 1),
        torch.cat([attention, inside], 1),
        torch.cat([torch.zeros_like(ids), inside], 1),
    )


def log_probabilities(
    model: Qwen2ForCausalLM,
    ids: Tensor,
    attention: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """(N, L - 1) ln π of each token after the first, at a temperature."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=attention, position_ids=positions)
    logits: Tensor = output.logits[:, :-1] / temperature  # (N, L - 1, V)
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
