"""The embedded policies: causal language models that ship with the package and train on two CPU cores.

The tokenizer is byte-level BPE with added phrases: it encodes any text without loss, and each part of a puzzle (a name,
" is a knight", " if and only if ") is one token in any position. A puzzle for three people has about 45 tokens, and a
policy with less than a million parameters learns to reason within minutes.

The phrases are added tokens, because transformers' AutoTokenizer uses Qwen2's pre-tokenizer for all models of the type
qwen2, whatever tokenizer.json contains (and normalizes text to NFC, which `PreTrainedTokenizerFast` does not).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sharpscope.config.run import EMBEDDED_NAMES
from sharpscope.errors import UserError, nearest
from sharpscope.packaged import data_path

PAD, END = "<|pad|>", "<|endoftext|>"
TAGS = ("think", "answer", "search", "information")
MARKS = (*(f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")), "<|im_start|>", "<|im_end|>")
"""Tags with one token each. They are not special tokens, so that decoded text contains them for the scorers."""

CONTEXT = 2048
"""Context length of the policies [tokens]; they were trained on shorter sequences."""

PIECES = "|".join(
    (
        r"(?: is(?: not)? a)? (?:knight|knave)(?!\p{L})",
        r" if and only if ",
        r" (?:and|or|then) (?=\p{Lu})",
        r"[Ii]f (?=\p{Lu})",
        r"\p{Lu}\p{Ll}*",  # a name or other capitalized word
        r"(?:(?! is a kn| is not a kn|if \p{Lu})[^\p{Lu}\n\d])+",  # other text
    )
)
"""Pattern that splits a puzzle into candidate phrases."""

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pre-tokenizer, so that all loaders give the same tokens."""


def embedded_policy(name: str) -> Path:
    """Folder of an embedded policy: config.json, model.safetensors, tokenizer.json, tokenizer_config.json, warm_start.json.

    Raises:
        UserError: The name is unknown.
    """
    if name not in EMBEDDED_NAMES:
        raise UserError(f"embedded policy '{name}': unknown{nearest(name, EMBEDDED_NAMES)}")
    return data_path("policies", name)


def common_phrases(texts: Iterable[str], share: float = 0.002) -> list[str]:
    """Pieces of `texts` (`PIECES`) with at least 2 characters and at least `share` occurrences per text, sorted."""
    splitter = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    texts = list(texts)
    counts = Counter(piece for text in texts for piece, _ in splitter.pre_tokenize_str(text))
    return sorted(piece for piece, count in counts.items() if len(piece) > 1 and count >= share * len(texts))


def build_tokenizer(texts: Iterable[str], phrases: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with at most `vocabulary` tokens on `texts`; deterministic.

    Padding is token 0 and end of text is token 1; `MARKS` and `phrases` are the last tokens, matched longest first.
    """
    added = [*MARKS, *phrases]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(added),
        special_tokens=[PAD, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    separator = re.compile("|".join(re.escape(token) for token in sorted(added, key=len, reverse=True)))
    tokenizer.train_from_iterator((part for text in texts for part in separator.split(text) if part), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
        padding_side="left",
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with a class name that all versions of transformers support."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def build_model(
    tokenizer: PreTrainedTokenizerBase, *, layers: int, width: int, feed_forward: int, heads: int, seed: int
) -> Qwen2ForCausalLM:
    """A float32 Qwen2 model for `tokenizer` with tied embeddings: matrices N(0, 0.02²), biases 0, norm gains 1."""
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # construction uses the global generator
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim == 2:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model
