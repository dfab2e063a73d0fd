"""A policy around a tiny random model, and completions made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerFast

from sharpscope.config.run import LoraSpec, PolicySpec, SamplingSpec
from sharpscope.policy import Completions, Policy, completions_of, load_policy, score_completions
from sharpscope.policy.decoding import completion_uniforms
from sharpscope.policy.head import Head
from sharpscope.policy.loading import make_policy
from sharpscope.policy.token_stats import TokenStats, flat_stats, spread
from tests.models import tiny_model
from tests.oracles.generation import converse_one


def word_tokenizer(vocab: int = 37, **special: Any) -> PreTrainedTokenizerFast:
    """Words `<pad>`, `</s>`, `t2` … of one token each; padding 0, end of text 1."""
    words = {"<pad>": 0, "</s>": 1} | {f"t{i}": i for i in range(2, vocab)}
    backend = Tokenizer(WordLevel(words, unk_token="t2"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **({"pad_token": "<pad>", "eos_token": "</s>"} | special)
    )


def tiny_policy(architecture: str = "qwen2", *, vocab: int = 37, **model: Any) -> Policy:
    """A random tiny model with `word_tokenizer`."""
    return make_policy(
        tiny_model(architecture, vocab=vocab, **model), word_tokenizer(vocab), "tiny"
    )


def random_prompts(lengths: tuple[int, ...], vocab: int = 37, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab, (length,), generator=generator).tolist() for length in lengths]


def completions_by_hand(
    prompts: list[list[int]], completions: list[list[list[int]]], *, left: int = 0, right: int = 0
) -> Completions:
    """Rows of given prompts and their completions, with `left` and `right` more columns of padding than needed."""
    flat = [(prompt, c, g) for g, prompt in enumerate(prompts) for c in completions[g]]
    made = completions_of([prompt for prompt, _, _ in flat], [c for _, c, _ in flat])
    wider = {
        name: pad(getattr(made, name), (left, right)) for name in ("input_ids", "attention_mask")
    }
    wider |= {
        name: pad(getattr(made, name), (0, right)) for name in ("completion_ids", "completion_mask")
    }
    group = torch.tensor([g for _, _, g in flat])
    return replace(
        made, **wider, group=group, behavior_logp=torch.zeros(wider["completion_ids"].shape)
    )


# Prompts longer and shorter than the sliding window (8) of the one model that has it, completions of 1 to 9 tokens.
PROMPTS = random_prompts((11, 3, 6), seed=1)
COMPLETIONS = [
    random_prompts((4, 9), seed=2),
    random_prompts((1, 1, 7), seed=3),
    random_prompts((9, 2), seed=4),
]


def rows(**padding: int) -> Completions:
    return completions_by_hand(PROMPTS, COMPLETIONS, **padding)


def weighted(logp: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A scalar in which every token has another weight."""
    g = torch.Generator().manual_seed(seed)
    return (logp * torch.randn(logp.shape, generator=g, dtype=torch.float64)).sum()


def spec(model, **values) -> PolicySpec:
    return PolicySpec(model=str(model), **{"device": "cpu"} | values)


def score_gradients(model, **options) -> list[torch.Tensor]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    scored = score_completions(model, rows(), 0.8, with_grad=True, **options)
    factor = torch.linspace(-1, 1, scored.logp.numel(), dtype=scored.logp.dtype).view_as(
        scored.logp
    )
    return list(torch.autograd.grad((scored.logp * factor).sum(), trainable, allow_unused=True))


def adapted(saved, **values):
    return load_policy(spec(saved, lora=LoraSpec(r=2, alpha=4.0, **values)))


def stir(policy, seed: int = 0) -> None:
    """Give every adapter weight a value, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def logp(policy, model=None):
    return score_completions(
        model or policy.model, rows(), 1.0, share_prompt=True, with_grad=False
    ).logp


def token_stats(hidden, head: Head, targets, temperature: float, mask=None) -> TokenStats:
    """Statistics (N, T) of tokens of hidden states (N, T, d)."""
    keep = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.bool()
    flat = flat_stats(hidden[keep], head, targets[keep], temperature)
    return TokenStats(**{name: spread(value, keep) for name, value in flat.items()})


GROUP = 3


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_matches_oracle(
    policy: Policy, out: Completions, spec: SamplingSpec, task: Any = None, tolerance: float = 1e-6
) -> None:
    """Each of the GROUP completions of each of PROMPTS, drawn with `generator()`, equals the oracle's, replies of `task` included."""
    P, T = out.prompt_width, out.completion_ids.shape[1]
    base = int(torch.randint(2**62, (), generator=generator()))  # the number that `generate` draws
    examples = None if task is None else task.splits()["train"]
    assert out.group.tolist() == [n // GROUP for n in range(len(PROMPTS) * GROUP)]
    assert int(out.lengths.max()) == T
    assert (out.sampler_logp is not None) == (spec.temperature > 0 and spec.top_p < 1)
    for n in range(len(out)):
        g, prompt = n // GROUP, PROMPTS[n // GROUP]
        u = completion_uniforms(
            base, torch.tensor([g]), torch.tensor([n % GROUP]), spec.max_new_tokens
        )
        slow = converse_one(
            policy.model,
            prompt,
            u[0].tolist(),
            lambda text, g=g: None if task is None else task.respond(examples[g], text),
            lambda text: policy.tokenizer(text, add_special_tokens=False)["input_ids"],
            lambda ids: policy.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
            stop=() if task is None else task.stop,
            temperature=spec.temperature,
            top_p=spec.top_p,
            ends=policy.eos_ids,
        )
        L = len(slow["ids"])
        assert out.completion_ids[n, :L].tolist() == slow["ids"]
        assert out.completion_mask[n].tolist() == slow["mask"] + [0] * (T - L)
        assert out.input_ids[n, P - len(prompt) : P + L].tolist() == prompt + slow["ids"]
        assert out.attention_mask[n].nonzero()[:, 0].tolist() == list(range(P - len(prompt), P + L))
        assert bool(out.truncated[n]) == slow["truncated"]
        assert out.texts[n] == slow["text"]
        assert out.behavior_logp[n].tolist() == pytest.approx(
            slow["behavior_logp"] + [0.0] * (T - L), abs=tolerance
        )
        if out.sampler_logp is not None:
            assert out.sampler_logp[n, :L].tolist() == pytest.approx(
                slow["sampler_logp"], abs=tolerance
            )


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny float32 model with its tokenizer, to be read only."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model(dtype=torch.float32).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder
