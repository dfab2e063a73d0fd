"""The embedded policies: causal language models small enough to ship, to train on two cores and to read in one sitting.

The tokenizer is byte-level BPE behind a list of phrases, so any text encodes and comes back unchanged, and what puzzles
are made of (a name, " is a knight", " if and only if ") is one token each, the same wherever it stands. A puzzle for
three people is then about 45 tokens long, and a policy of under a million parameters learns to reason within minutes.

The phrases are added tokens, not merges behind a cut of our own, because transformers' AutoTokenizer gives every model
of the type qwen2 the cut of Qwen2 whatever the file says (and normalises text to NFC, which `load_tokenizer` does not).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sharpscope.errors import UserError, nearest
from sharpscope.packaged import data_path

PAD, END = "<|pad|>", "<|endoftext|>"
MARKS = (
    "<think>", "</think>", "<answer>", "</answer>", "<search>", "</search>", "<information>", "</information>",
    "<|im_start|>", "<|im_end|>",
)  # fmt: skip
"""One token each, but not special: they stay in decoded text, where the scorers look for them."""

CONTEXT = 2048
"""Longest sequence that the policies declare [tokens]; they were trained on shorter ones."""

PIECES = "|".join(
    (
        r"(?: is(?: not)? a)? (?:knight|knave)(?!\p{L})",
        r" if and only if ",
        r" (?:and|or|then) (?=\p{Lu})",
        r"[Ii]f (?=\p{Lu})",
        r"\p{Lu}\p{Ll}*",  # a name, or any other capitalised word
        r"(?:(?! is a kn| is not a kn|if \p{Lu})[^\p{Lu}\n\d])+",  # what stands between
    )
)
"""Cuts a puzzle into the candidates for phrases."""

QWEN2_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Where Qwen2 cuts text before BPE; the same here, so that every loader gives the same tokens."""


@dataclass(frozen=True)
class EmbeddedPolicy:
    """A shipped policy: its name, the kind of task it was warm-started on, and one line about it."""

    name: str
    task: str
    about: str

    @property
    def path(self) -> Path:
        """Folder with config.json, model.safetensors, tokenizer.json, tokenizer_config.json and warm_start.json."""
        return data_path("policies", self.name)


EMBEDDED: dict[str, EmbeddedPolicy] = {
    policy.name: policy
    for policy in (
        EmbeddedPolicy(
            "knights_knaves",
            "knights_knaves",
            "Qwen2 architecture, 0.9 M parameters; tries assignments in order or guesses, half the time each",
        ),
        EmbeddedPolicy(
            "math",
            "math",
            "Qwen2 architecture, 0.18 M parameters; works operation by operation or answers at once, half the time each",
        ),
        EmbeddedPolicy(
            "tool_qa",
            "tool_qa",
            "Qwen2 architecture, 0.38 M parameters; searches and reads, or in three of ten cases answers without searching",
        ),
    )
}
"""Every policy that ships with the package, by name."""


def embedded_policy(name: str) -> EmbeddedPolicy:
    """The shipped policy of that name.

    Raises:
        UserError: there is none.
    """
    if name not in EMBEDDED:
        raise UserError(f"embedded policy '{name}': unknown{nearest(name, EMBEDDED)}")
    return EMBEDDED[name]


def common_phrases(texts: Iterable[str], share: float = 0.002) -> list[str]:
    """The pieces of `texts` (`PIECES`) of two characters or more that occur `share` times a text or oftener, sorted."""
    cut = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    texts = list(texts)
    counts = Counter(piece for text in texts for piece, _ in cut.pre_tokenize_str(text))
    return sorted(piece for piece, count in counts.items() if len(piece) > 1 and count >= share * len(texts))


def build_tokenizer(texts: Iterable[str], phrases: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with at most `vocabulary` tokens, fitted to `texts`; seedless: same in, same out.

    Padding is token 0, end of text token 1; `MARKS` and `phrases` come last, one token each, the longest match first.

    Raises:
        UserError: the vocabulary cannot hold the 256 bytes, the special tokens, the marks and the phrases.
    """
    added = [*MARKS, *phrases]
    smallest = 256 + 2 + len(added)
    if vocabulary < smallest:
        raise UserError(
            f"vocabulary = {vocabulary}: at least {smallest} tokens are needed here (bytes, special, marks, phrases)"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_CUT), behavior="isolated"),
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
    between = re.compile("|".join(re.escape(token) for token in sorted(added, key=len, reverse=True)))
    tokenizer.train_from_iterator((part for text in texts for part in between.split(text) if part), trainer)
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
    """Write tokenizer.json and tokenizer_config.json, naming the class as every version of transformers knows it."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """The tokenizer of a shipped policy, or of a folder written by `save_tokenizer`, exactly as its file says."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


def build_model(
    tokenizer: PreTrainedTokenizerBase, *, layers: int, width: int, feed_forward: int, heads: int, seed: int
) -> Qwen2ForCausalLM:
    """A randomly initialised Qwen2 model for `tokenizer`, float32, input and output embeddings tied.

    Matrices are N(0, 0.02²) drawn from a generator of `seed`, biases 0, norm gains 1.

    Raises:
        UserError: `heads` does not divide `width` into heads of even size, which rotary positions need.
    """
    if width % (2 * heads):
        raise UserError(f"width = {width}: must be a multiple of 2 × heads = {2 * heads}")
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
    with torch.random.fork_rng(devices=[]):  # construction draws from the global generator, whose state stays as it was
        model = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim == 2:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model
