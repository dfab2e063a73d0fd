"""Sampling, and batched decoding of completions with a key-value cache.

Rows of a group with the same tokens so far are one text of the batch: they have the same hidden states, from which each row
samples its next token. A text is copied when its rows sample different tokens, and removed when all of them have finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from sharpscope.config.run import SamplingSpec
from sharpscope.policy.cache import PromptCache, cache_keyword, read_prompts
from sharpscope.policy.head import backbone, bare
from sharpscope.policy.loading import Policy
from sharpscope.policy.rollouts import padded

DIRECT = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""Architectures whose layers `DirectDecoder` calls itself."""
SMALL_BYTES = 2**22  # weights of linear layers with the same input are concatenated up to this size
# rotary embeddings whose angles depend on the position alone
ROPE_TYPES = (
    "default",
    "linear",
    "llama3",
)
# A softmax on a CPU takes ten times as long for numbers that do not fill a vector register.
VECTOR = 16
# Prompts of at most so many positions are copied to each text: that costs less than a separate product in every step.
SHORT = 16
# Finished texts are removed when they are this share of the batch, since removal copies the cache of the others.
REMOVE_SHARE = 0.125
# Positions of the cache after the prompt; doubles when exceeded. Few, since a page of memory costs more than to copy it later.
INITIAL_CAPACITY = 16
_MASK = (1 << 64) - 1


def completion_uniforms(seed: int, prompts: Tensor, completions: Tensor, count: int) -> Tensor:
    """Uniform random numbers (n, count) in [0, 1), float64; row i depends only on (seed, prompts[i], completions[i]).

    A completion is therefore independent of the other rows of its batch.
    """
    generator = torch.Generator()
    uniforms = torch.empty(len(prompts), count, dtype=torch.float64)
    for row, prompt, completion in zip(
        uniforms,
        prompts.tolist(),
        completions.tolist(),
        strict=True,
    ):
        generator.manual_seed(_mix(_mix(_mix(seed) ^ prompt) ^ completion) >> 1)
        torch.rand(count, generator=generator, out=row)
    return uniforms


def _mix(x: int) -> int:
    """Splitmix64's finalizer, which maps consecutive integers to unrelated seeds."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def draw(
    z: Tensor,
    u: Tensor,
    spec: SamplingSpec,
    row: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample n tokens from logits `z` (m, V) by inverting the cumulative distribution at `u` (n,), float64 in [0, 1).

    Top-p keeps the smallest set of most likely tokens whose probability reaches top_p. Temperature 0 selects the most likely
    token. `row` (n,) is the row of `z` from which each token is sampled; None: m = n, one token from each.

    Returns tokens (n,) long; their log-probabilities (n,) [nats] under softmax(z/T) (T = 1 for temperature 0); and those
    under the truncated distribution, (n,), or None without truncation.
    """
    row = torch.arange(len(z), device=z.device) if row is None else row
    if spec.temperature not in (0, 1):
        z = z / spec.temperature
    logp = torch.log_softmax(z, -1)  # (m, V)
    if spec.temperature == 0:
        token = z.argmax(-1)[row]
        return token, logp[row, token], None
    if spec.top_p == 1:
        token = _invert(logp.exp(), u, row)
        return token, logp[row, token], None
    kept_logp, tokens = logp.sort(descending=True, stable=True)  # (m, V)
    p = kept_logp.exp()
    total = p.sum(-1, keepdim=True, dtype=torch.float64)
    before = p.cumsum(-1, dtype=torch.float64) - p  # probability of more likely tokens
    p = p.masked_fill(before >= spec.top_p * total, 0.0)
    index = _invert(p, u, row)
    behavior = kept_logp[row, index]
    return tokens[row, index], behavior, behavior - p.sum(-1).log()[row]


def _invert(p: Tensor, u: Tensor, row: Tensor) -> Tensor:
    """First index at which the cumulative sum of unnormalized probabilities `p` (m, V) of `row` (n,) exceeds u times their sum."""
    cumulative = p.cumsum(-1, dtype=torch.float64).index_select(0, row)  # (n, V)
    threshold = u[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return index.clamp_max(p.shape[1] - 1)


class Output:
    """N empty completions of up to T = max_new_tokens tokens on the CPU, marked as truncated, which decoding fills in place."""

    def __init__(self, count: int, width: int, pad_id: int) -> None:
        self.ids = torch.full((count, width), pad_id)
        # by the policy, not text of an environment
        self.sampled = torch.zeros(count, width, dtype=torch.bool)
        self.logp = torch.zeros(count, width)  # [nats], before top-p
        self.sampler_logp = torch.zeros(count, width)  # [nats], after it
        self.length = torch.zeros(count, dtype=torch.long)  # positions in use
        self.truncated = torch.ones(count, dtype=torch.bool)  # reached the limit

    def put(
        self,
        row: Tensor,
        column: Tensor,
        stops: Tensor,
        token: Tensor,
        logp: Tensor,
        sampler_logp: Tensor,
    ) -> None:
        """Enter tokens, all (tokens,); `stops` marks those that end their completion."""
        index = (row, column)
        self.ids[index] = token
        self.sampled[index] = True
        self.logp[index] = logp.float()
        self.sampler_logp[index] = sampler_logp.float()
        self.length.scatter_reduce_(0, row, column + 1, "amax")
        self.truncated[row] = True
        self.truncated[row[stops]] = False


def decode(
    policy: Policy,
    texts: Sequence[Sequence[int]],
    row_text: Tensor,
    rows: Tensor,
    uniforms: Tensor,
    spec: SamplingSpec,
    out: Output,
    stop: tuple[str, ...] = (),
) -> None:
    """Continue n rows until an end-of-text token, one of the `stop` strings or the limit, and append the tokens to `out`.

    `texts` are the token IDs of B prompts, or of prompts with the completions so far, `row_text` (n,) the text of each row,
    ascending, `rows` (n,) its index in `out` and `uniforms` (n, max_new_tokens) random numbers by position. `out.truncated`
    becomes False where a row ended before the limit.
    """
    device = policy.device
    head = policy.head
    model = policy.model
    ends = torch.tensor(policy.eos_ids, device=device)
    uniforms = uniforms.to(device)
    ids = padded(texts, policy.pad_id).to(device)
    lengths = torch.tensor([len(text) for text in texts], device=device)
    hidden, prompts = read_prompts(backbone(model), ids, lengths)  # (B, P) -> (B, d)
    direct = can_decode_directly(model)
    kind = DirectDecoder if direct else LayerDecoder
    longest = ids.shape[1] + spec.max_new_tokens
    decoder = kind(model, prompts, lengths, len(rows), longest)
    stopped = _StopStrings(policy, stop, len(rows))
    # Of each row that has not finished: its index in `rows`, next position in its completion, and text in the cache.
    member = torch.arange(len(rows), device=device)
    column = out.length[rows].to(device)
    text = row_text.to(device)
    position = lengths
    record: list[tuple[Tensor, ...]] = []
    with torch.inference_mode() if direct else nullcontext():
        while True:
            z = head.logits(hidden)  # (texts, V)
            token, logp, sampler_logp = draw(z, uniforms[member, column], spec, text)
            if sampler_logp is None:
                sampler_logp = logp
            stops = torch.isin(token, ends)
            if stop:
                stops |= torch.tensor(stopped.add(member.tolist(), token.tolist()), device=device)
            record.append((member, column, stops, token, logp, sampler_logp))
            column = column + 1
            running = (~stops & (column < spec.max_new_tokens)).nonzero()[:, 0]
            if not len(running):
                break
            if len(running) < len(member):
                member = member[running]
                column = column[running]
                text = text[running]
                token = token[running]
            text, token, source = _branch(decoder, text, token, len(hidden), head.weight.shape[0])
            position = position[source]  # (m,)
            hidden = decoder.step(token, position)  # (m, d)
            position = position + 1
    member, *parts = (torch.cat(steps).cpu() for steps in zip(*record, strict=True))
    out.put(rows[member], *parts)


def _branch(
    decoder: DirectDecoder | LayerDecoder,
    text: Tensor,
    token: Tensor,
    count: int,
    words: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make a place in the cache, of `count` places, for each different text that rows (n,) continue with their tokens (n,).

    Returns the place (n,) of each row's new text, and for each place (m,) its next token (0: unused) and the text's former place.
    """
    key, row_key = torch.unique(text * words + token, return_inverse=True)  # (k,) ascending, (n,)
    source = key // words
    token = key % words
    if count - len(key) > REMOVE_SHARE * count:
        decoder.keep(source, room=len(text))
        return row_key, token, source
    # One continuation of a text stays in its place, and copies for the others go to unused places.
    branches = (source[1:] == source[:-1]).nonzero()[:, 0] + 1
    place = source
    count = max(count, len(key))
    if len(branches):
        free = torch.ones(count, dtype=torch.bool, device=source.device)
        free[source] = False
        unused = free.nonzero()[:, 0]
        place = source.index_copy(0, branches, unused[: len(branches)])
        decoder.copy(source[branches], place[branches], count)
    tokens = token.new_zeros(count).index_copy(0, place, token)
    sources = torch.arange(count, device=source.device).index_copy(0, place, source)
    return place[row_key], tokens, sources


class _StopStrings:
    """Says of each sampled token whether its row's text now contains a stop string."""

    def __init__(self, policy: Policy, stop: tuple[str, ...], count: int) -> None:
        self._policy = policy
        self._stop = stop
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._closing = closing_tokens(policy.tokenizer, stop) if stop else frozenset()

    def add(self, members: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Append a token to each of the rows `members`; text is decoded only after tokens that can complete a stop string."""
        found = []
        for member, token in zip(members, tokens, strict=True):
            so_far = self._tokens[member]
            so_far.append(token)
            found.append(token in self._closing and self._has_stop(so_far))
        return found

    def _has_stop(self, tokens: Sequence[int]) -> bool:
        """Whether the text of tokens contains a stop string."""
        text = as_text(self._policy, tokens)
        return any(stop in text for stop in self._stop)


def as_text(policy: Policy, tokens: Sequence[int]) -> str:
    """Decode tokens, including special tokens but without a final end-of-text token."""
    if tokens and tokens[-1] in policy.eos_ids:
        tokens = tokens[:-1]
    return str(policy.tokenizer.decode(list(tokens), **_AS_IS))


_AS_IS = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
"""Options with which a tokenizer gives the text as it is."""


@lru_cache(maxsize=8)
def closing_tokens(tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> frozenset[int]:
    """Tokens that can complete one of the strings: they contain its last character, or a part of a character."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], **_AS_IS)
    last = {"\ufffd", *(text[-1] for text in stop)}
    return frozenset(i for i, text in enumerate(texts) if last & set(text))


class LayerDecoder:
    """`DirectDecoder` for any architecture, through transformers' layers; each text has a copy of its prompt's cache."""

    def __init__(
        self,
        model: nn.Module,
        prompts: PromptCache,
        lengths: Tensor,
        room: int,
        positions: int,
    ) -> None:
        self.body = backbone(model)
        self.cache = DynamicCache()
        self.keyword = cache_keyword(self.body)
        for index, states in enumerate(prompts.states):
            self.cache.update(*states, index)
        self.padding = prompts.states[0][0].shape[2] - lengths  # (m,) padding on the left

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Append tokens (m,) at positions (m,) and return the hidden states (m, d) that predict the next ones."""
        width = self.cache.get_seq_length() + 1
        seen = torch.arange(width, device=token.device) >= self.padding[:, None]  # (m, L+1)
        states: Tensor = self.body(
            input_ids=token[:, None],
            attention_mask=seen.long(),
            position_ids=position[:, None],
            use_cache=True,
            **{self.keyword: self.cache},
        ).last_hidden_state
        return states[:, 0]

    def copy(self, texts: Tensor, to: Tensor, count: int) -> None:
        """Copy `texts` (k,) to the places `to` (k,); there are `count` places afterwards."""
        index = torch.arange(count, device=texts.device).clamp_max(len(self.padding) - 1)
        self.keep(index.index_copy(0, to, texts), count)

    def keep(self, texts: Tensor, room: int) -> None:
        """Keep only `texts` (k,), which may repeat."""
        self.padding = self.padding[texts]
        self.cache.batch_select_indices(texts)


def can_decode_directly(model: nn.Module) -> bool:
    """Whether `DirectDecoder` supports `model`: a Llama, Qwen2 or Qwen3 model with full attention and no hooks."""
    causal: Any = bare(model)
    if type(causal) not in DIRECT or causal.model.rotary_emb.rope_type not in ROPE_TYPES:
        return False
    kinds = getattr(causal.config, "layer_types", None) or ()
    if any(kind != "full_attention" for kind in kinds):
        return False
    parts = [causal.model]
    for layer in causal.model.layers:
        parts += (layer, layer.self_attn, layer.mlp)
    return not any(_hooked(part) for part in parts)


class DirectDecoder:
    """Decoding steps that call the linear layers and norms of a Llama, Qwen2 or Qwen3 model directly.

    A decoding step of a small model takes less time in its matrix products than in Python, and is limited by memory
    bandwidth. The texts of a group therefore share their prompt's keys and values: the attention scores of the prompt are
    one matrix product per group and those of a text's later tokens one per text, followed by a joint softmax. Adapters and
    quantized layers are called as usual.

    The first texts are the B prompts of a left-padded cache, of `lengths` (B,). Memory is reserved for `room` texts of at most
    `positions` tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: PromptCache,
        lengths: Tensor,
        room: int,
        positions: int,
    ) -> None:
        body: Any = cast(Any, bare(model)).model
        self.embed = body.embed_tokens
        self.norm = _norm(body.norm)
        every = torch.arange(positions, device=lengths.device)
        cos, sin = body.rotary_emb(self.embed.weight[:1, None], every[None])  # (1, L, d_head)
        self.half = cos.shape[-1] // 2
        self.cos = cos[0, :, None]  # (L, 1, d_head)
        # The first half is negated here instead of the states in every layer: x·cos + (−x₂, x₁)·sin.
        first, second = sin[0].split(self.half, 1)
        self.sin = torch.cat([-first, second], 1)[:, None]
        self.layers: list[tuple[Any, ...]] = [
            (
                _norm(layer.input_layernorm),
                _linear(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                layer.self_attn.config.num_key_value_heads,
                getattr(layer.self_attn, "q_norm", None),
                getattr(layer.self_attn, "k_norm", None),
                layer.self_attn.scaling,
                _linear(layer.self_attn.o_proj),
                _norm(layer.post_attention_layernorm),
                _linear(layer.mlp.gate_proj, layer.mlp.up_proj),
                layer.mlp.act_fn,
                _linear(layer.mlp.down_proj),
            )
            for layer in body.layers
        ]
        width = prompts.states[0][0].shape[2]  # P
        self.shared = width if width > SHORT else 0  # positions that the texts of a prompt share
        self.used = width - self.shared  # later positions in use
        at = self.shared
        # keys and values (B, H, P, d_head) of each layer, shared and of later positions
        self.prompts: list[tuple[Tensor, Tensor]] = []
        self.row_states: list[tuple[Tensor, Tensor]] = []
        for keys, values in prompts.states:
            self.prompts.append((keys[:, :, :at], values[:, :, :at]))
            self.row_states.append((keys[:, :, at:], values[:, :, at:]))
        self.count = len(lengths)
        self._resize(None, room, INITIAL_CAPACITY)
        place = torch.arange(width, device=lengths.device)
        padding = place < width - lengths[:, None]  # (B, P)
        self._padding = padding if bool(padding.any()) else None
        self._assign_slots(torch.arange(len(lengths), device=lengths.device))

    def step(self, token: Tensor, position: Tensor) -> Tensor:
        """Append tokens (m,) at positions (m,) and return the hidden states (m, d) that predict the next ones."""
        m = len(token)
        width = self.cos.shape[-1]
        if self.used == self.row_states[0][0].shape[2]:
            self._resize(None, len(self.row_states[0][0]), self.used)
        self.used += 1
        cos = self.cos[position]
        sin = self.sin[position]  # (m, 1, d_head)
        hidden = self.embed(token)  # (m, d)
        for index, layer in enumerate(self.layers):
            norm, qkv, heads, q_norm, k_norm, scaling, out, mlp_norm, gate_up, activation, down = (
                layer
            )
            states = qkv(norm(hidden)).view(m, -1, width)  # (m, H·R + 2·H, d_head)
            both = states[:, :-heads]
            v = states[:, -heads:]
            if q_norm is not None:
                both = torch.cat([q_norm(both[:, :-heads]), k_norm(both[:, -heads:])], 1)
            both = torch.addcmul(both * cos, both.roll(self.half, -1), sin)
            keys, values = self.row_states[index]
            keys[:m, :, self.used - 1] = both[:, -heads:]
            values[:m, :, self.used - 1] = v
            q = (both[:, :-heads] * scaling).view(m, heads, -1, width)
            hidden = hidden + out(self._attend(index, q).reshape(m, -1))
            gate, up = gate_up(mlp_norm(hidden)).chunk(2, -1)
            hidden = hidden + down(activation(gate) * up)
        return self.norm(hidden)

    def copy(self, texts: Tensor, to: Tensor, count: int) -> None:
        """Copy `texts` (k,) to the places `to` (k,); there are `count` places afterwards. A copy shares its text's prompt."""
        self.count = count
        for pair in self.row_states:
            for states in pair:
                used = states[:, :, : self.used]
                used.index_copy_(0, to, used.index_select(0, texts))
        prompt = self._text_prompt.new_zeros(count)
        prompt[: len(self._text_prompt)] = self._text_prompt
        prompt[to] = prompt[texts]
        self._assign_slots(prompt)

    def keep(self, texts: Tensor, room: int) -> None:
        """Keep only `texts` (k,), which may repeat, and their prompts, with memory for `room` texts."""
        self.count = len(texts)
        self._resize(texts, room, self.row_states[0][0].shape[2] - self.used)
        used, prompt = self._text_prompt[texts].unique(return_inverse=True)
        if len(used) < self._prompt_count:
            self.prompts = [(keys[used], values[used]) for keys, values in self.prompts]
            self._padding = None if self._padding is None else self._padding[used]
        self._assign_slots(prompt)

    def _resize(self, texts: Tensor | None, room: int, more: int) -> None:
        """Copy the cache, or its `texts`, to memory for `room` texts with `more` positions after those in use."""

        def resized(states: Tensor) -> Tensor:
            """States with room for more rows and positions."""
            _, heads, _, width = states.shape
            grown = states.new_empty(max(self.count, room), heads, self.used + more, width)
            used = states[:, :, : self.used]
            kept = used[: self.count] if texts is None else used.index_select(0, texts)
            grown[: self.count, :, : self.used] = kept
            return grown

        for index, (keys, values) in enumerate(self.row_states):
            self.row_states[index] = (resized(keys), resized(values))

    def _assign_slots(self, text_prompt: Tensor) -> None:
        """Assign a slot (prompt, index in the group) to each text, so that groups of any size use one batched product."""
        self._text_prompt = text_prompt
        self._prompt_count = len(self.prompts[0][0])
        self._text_padding = None
        if self._padding is not None:
            self._text_padding = self._padding[text_prompt][:, None, None]  # (m, 1, 1, P)
        if not self.shared:  # each text has a copy of its prompt
            return
        sizes = torch.bincount(text_prompt, minlength=self._prompt_count)
        self._group = int(sizes.max())  # G: slots per prompt
        place = torch.arange(len(text_prompt), device=text_prompt.device)
        order = text_prompt.argsort(stable=True)
        before = sizes.cumsum(0) - sizes  # texts of earlier prompts
        index = torch.empty_like(place)  # of each text in its group
        index[order] = place - before[text_prompt[order]]
        slot = text_prompt * self._group + index  # (m,)
        full = self._prompt_count * self._group == len(slot) and torch.equal(slot, place)
        self._slot = None if full else slot  # None: slot i is text i

    def _by_prompt(self, x: Tensor) -> Tensor:
        """Reshape texts (m, H, R, e) to prompts (B, H, G·R, e); slots without a text are zero."""
        if self._group == 1 and self._slot is None:  # one text per prompt
            return x
        _, heads, repeat, width = x.shape
        prompts, group = self._prompt_count, self._group
        if self._slot is not None:
            slots = x.new_zeros(prompts * group, heads, repeat, width)
            x = slots.index_copy_(0, self._slot, x)
        x = x.view(prompts, group, heads, repeat, width).transpose(1, 2)  # (B, H, G, R, e)
        return x.reshape(prompts, heads, group * repeat, width)

    def _by_text(self, x: Tensor, repeat: int) -> Tensor:
        """Inverse of `_by_prompt`: (B, H, G·R, e) -> (m, H, R, e)."""
        if self._group == 1 and self._slot is None:
            return x
        prompts, heads, _, width = x.shape
        group = self._group
        x = x.view(prompts, heads, group, repeat, width).transpose(1, 2)  # (B, G, H, R, e)
        x = x.reshape(prompts * group, heads, repeat, width)
        return x if self._slot is None else x.index_select(0, self._slot)

    def _attend(self, index: int, q: Tensor) -> Tensor:
        """Attention (m, H, R, d) in layer `index` of scaled queries (m, H, R, d), one position per text, R per key head."""
        # (m, H, t, d)
        keys, values = (states[: len(q), :, : self.used] for states in self.row_states[index])
        scores = q @ keys.transpose(2, 3)  # (m, H, R, t)
        if self.shared:
            prompt_keys, prompt_values = self.prompts[index]
            of_prompt = self._by_prompt(q) @ prompt_keys.transpose(2, 3)  # (B, H, G·R, P)
            scores = torch.cat([self._by_text(of_prompt, q.shape[2]), scores], 3)  # (m, H, R, P+t)
        if self._text_padding is not None:
            scores[..., : self._text_padding.shape[3]].masked_fill_(self._text_padding, -torch.inf)
        positions = scores.shape[3]
        if scores.device.type == "cpu" and positions % VECTOR:
            scores = F.pad(scores, (0, -positions % VECTOR), value=-torch.inf)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = torch.softmax(scores, 3, dtype=wide)[..., :positions].to(values.dtype)
        if not self.shared:
            return weights @ values
        to_prompt, to_text = weights.split([self.shared, self.used], 3)
        from_prompt = self._by_prompt(to_prompt) @ prompt_values  # (B, H, G·R, d)
        return to_text @ values + self._by_text(from_prompt, q.shape[2])


def _linear(*layers: nn.Module) -> Callable[[Tensor], Tensor]:
    """The concatenated outputs of linear layers of the same input; small plain layers are one product."""
    if all(type(layer) is nn.Linear and not _hooked(layer) for layer in layers):
        weights: list[Tensor] = [layer.weight for layer in layers]  # type: ignore[misc]
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]  # type: ignore[misc]
        if len(layers) == 1:
            return partial(F.linear, weight=weights[0], bias=biases[0] if biases else None)
        small = sum(weight.nbytes for weight in weights) <= SMALL_BYTES
        alike = len(biases) in (0, len(layers))
        # Autocast casts parameters once, other tensors at every call.
        if small and alike and not torch.is_autocast_enabled(weights[0].device.type):
            bias = torch.cat(biases) if biases else None
            return partial(F.linear, weight=torch.cat(weights), bias=bias)
    if len(layers) == 1:
        return layers[0]
    return lambda x: torch.cat([layer(x) for layer in layers], -1)


def _norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """An RMSNorm; in single and double precision torch's, which gives the same numbers faster."""
    if norm.weight.dtype not in (torch.float32, torch.float64) or _hooked(norm):
        return cast(Callable[[Tensor], Tensor], norm)
    return partial(
        F.rms_norm,
        normalized_shape=norm.weight.shape,
        weight=norm.weight,
        eps=norm.variance_epsilon,
    )


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
