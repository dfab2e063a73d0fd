"""Record a loop of your own: supervised fine-tuning in plain PyTorch."""

from __future__ import annotations

import torch
from common import SENTENCES, tiny_model, tiny_tokenizer

import sharpscope

model, tokenizer = tiny_model(), tiny_tokenizer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
texts = tokenizer(
    [prompt + completion for prompt, completion in SENTENCES], padding=True, return_tensors="pt"
)
ids, there = texts["input_ids"], texts["attention_mask"]
lengths = torch.tensor([len(tokenizer(prompt)["input_ids"]) for prompt, _ in SENTENCES])
counted = there * (torch.arange(ids.shape[1]) >= lengths[:, None])  # the completions' tokens

recording = {"token_gradients_every": 1}
with sharpscope.record(
    model, optimizer, tokenizer=tokenizer, out="runs/plain-loop", steps=4, recording=recording
) as recorder:
    for _ in range(4):
        logits = model(ids, attention_mask=there).logits[:, :-1]
        logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        recorder.tokens(logp, ids, counted, attention_mask=there)
        loss = -(logp * counted[:, 1:]).sum() / counted[:, 1:].sum()
        loss.backward()
        recorder.step(loss)
        optimizer.step()
        optimizer.zero_grad()
