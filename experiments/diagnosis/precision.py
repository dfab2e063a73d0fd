"""How far log-probabilities of one model differ between batch sizes in bfloat16, without any sampler: the third row of trl 6789.

    python -m experiments.diagnosis.precision --model smollm2

Completions are drawn at temperature 1 in float32; their log-probabilities are computed in bfloat16 one by one and in batches of 8,
with logits in float32. No health rule may apply to the differences.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sharpscope.config.run import HealthSpec
from sharpscope.rules.judging import judge, mismatch, sampler_values

PROMPTS = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse.",
    "What is 17 times 24? Think step by step.",
    "List five uses of copper.",
    "How does a bicycle stay upright?",
    "Describe the city of Lisbon.",
    "Why do leaves change color in autumn?",
    "Write a Python function that reverses a list.",
)


@torch.no_grad()
def log_probabilities(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, prompt: int, batch: int
) -> torch.Tensor:
    """ln π of each completion token (N, T), in batches of `batch` completions without columns that all of them leave empty."""
    found = ids.new_zeros(ids[:, prompt:].shape, dtype=torch.float32)
    for start in range(0, len(ids), batch):
        rows, kept = ids[start : start + batch], mask[start : start + batch]
        used = kept.any(0).nonzero()[:, 0]
        first, end = int(used[0]), int(used[-1]) + 1
        rows, kept = rows[:, first:end], kept[:, first:end]
        positions = (kept.cumsum(1) - 1).clamp(min=0)
        count = end - prompt
        logits = model(
            rows, attention_mask=kept, position_ids=positions, logits_to_keep=count + 1
        ).logits
        logp = logits[:, :-1].float().log_softmax(-1).gather(-1, rows[:, -count:, None])[..., 0]
        found[start : start + batch, :count] = logp
    return found


def main() -> None:
    """Print the differences and the events that follow from them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--each", type=int, default=4, help="completions of each prompt")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True
        )
        for p in PROMPTS
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(0)
    ids = model.generate(
        **inputs,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=given.tokens,
        num_return_sequences=given.each,
    )
    prompt = inputs["input_ids"].shape[1]
    completion = ids[:, prompt:]
    ended = (completion == tokenizer.eos_token_id).cumsum(1) - (
        completion == tokenizer.eos_token_id
    ).int() > 0
    mask = torch.cat(
        [inputs["attention_mask"].repeat_interleave(given.each, 0), (~ended).long()], 1
    )
    exact = log_probabilities(model, ids, mask, prompt, 8)[~ended].numpy()
    model = model.to(torch.bfloat16)
    one, eight = (
        log_probabilities(model, ids, mask, prompt, batch)[~ended].numpy() for batch in (1, 8)
    )
    for name, a, b in (
        ("bfloat16, 1 against 8", one, eight),
        ("bfloat16 against float32, 8", eight, exact),
    ):
        x, events = a - b, judge(1, sampler_values(a, b), HealthSpec().limits)
        outside = mismatch(a, b)["outside"].mean()
        print(
            f"{name}: {len(x)} tokens, mean {x.mean():+.4f}, sd {x.std():.4f}, mean |x| {np.abs(x).mean():.4f}, 95 % |x| "
            f"{np.quantile(np.abs(x), 0.95):.3f}, max {np.abs(x).max():.3f}, outside [0.9, 1.1] {outside:.1%}; rules: "
            f"{[event.rule for event in events] or 'none'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
