"""Decoding against one completion, one token at a time; its law; what it leaves behind."""

from __future__ import annotations

import pytest
import torch

from sharpscope.config.policy import SamplingSpec
from sharpscope.errors import UserError
from sharpscope.policy import Completions, Policy, decoding, shared_decoding
from sharpscope.policy.direct_decoding import DirectDecoder
from sharpscope.policy.generation import generate
from sharpscope.policy.sampling import completion_uniforms
from tests.models import ARCHITECTURES
from tests.oracles.generation import generate_one
from tests.policy.helpers import random_prompts, tiny_policy

PROMPTS = random_prompts((11, 3, 6), seed=1)


GROUP = 3


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def base_seed(seed: int = 5) -> int:
    """The number that `generate` draws from `generator(seed)`."""
    return int(torch.randint(2**62, (), generator=generator(seed)))


def assert_matches_oracle(policy: Policy, out: Completions, spec: SamplingSpec, tolerance: float = 1e-6) -> None:
    P = out.prompt_width
    truncates = spec.temperature > 0 and (spec.top_p < 1 or spec.top_k > 0)
    for n in range(len(PROMPTS) * GROUP):
        prompt = PROMPTS[n // GROUP]
        u = completion_uniforms(base_seed(), torch.tensor([n // GROUP]), torch.tensor([n % GROUP]), spec.max_new_tokens)
        slow = generate_one(
            policy.model,
            prompt,
            u[0].tolist(),
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            ends=policy.eos_ids,
        )
        L = len(slow["ids"])
        assert out.completion_ids[n, :L].tolist() == slow["ids"]
        assert out.completion_mask[n].tolist() == [1] * L + [0] * (out.completion_mask.shape[1] - L)
        assert out.input_ids[n, P - len(prompt) : P + L].tolist() == prompt + slow["ids"]
        assert out.attention_mask[n].nonzero()[:, 0].tolist() == list(range(P - len(prompt), P + L))
        assert bool(out.truncated[n]) == slow["truncated"]
        assert out.behavior_logp[n, :L].tolist() == pytest.approx(slow["behavior_logp"], abs=tolerance)
        assert float(out.behavior_logp[n, L:].abs().sum()) == 0
        if truncates:
            assert out.sampler_logp[n, :L].tolist() == pytest.approx(slow["sampler_logp"], abs=tolerance)
        spoken = slow["ids"] if slow["truncated"] else slow["ids"][:-1]
        assert out.texts[n] == policy.tokenizer.decode(spoken)
    assert out.group.tolist() == [n // GROUP for n in range(len(out))]
    assert out.completion_ids.shape[1] == int(out.lengths.max())
    assert (out.sampler_logp is not None) == truncates


@pytest.mark.parametrize("prompts", ["shared", "short", "copied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_slow_generation(architecture, prompts, monkeypatch):
    # A capacity of 2 makes the caches grow; the one sliding window, of 8, moves over prompt and completion.
    monkeypatch.setattr(decoding, "INITIAL_CAPACITY", 2)
    if prompts == "shared":
        monkeypatch.setattr(shared_decoding, "SHORT", 0)
    if prompts == "copied":
        monkeypatch.setattr(decoding, "can_share_decoding", lambda model: False)
    policy = tiny_policy(architecture)
    spec = SamplingSpec(temperature=1.4, max_new_tokens=12)
    out = generate(policy, PROMPTS, GROUP, spec, generator())
    assert_matches_oracle(policy, out, spec, 5e-6)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 2.0, "top_k": 4},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.8},
    ],
)
def test_truncated_and_greedy_sampling_equal_slow_generation(sampling):
    policy = tiny_policy("qwen2", scale=0.2)
    spec = SamplingSpec(max_new_tokens=9, **sampling)
    assert_matches_oracle(policy, generate(policy, PROMPTS, GROUP, spec, generator()), spec)


@pytest.mark.parametrize("remove_share", [0.0, 1.0])
@pytest.mark.parametrize("decode_batch", [1, 2, 4, 100])
def test_what_is_decoded_together_changes_no_sample(decode_batch, remove_share, monkeypatch):
    monkeypatch.setattr(decoding, "REMOVE_SHARE", remove_share)
    monkeypatch.setattr(shared_decoding, "SHORT", 0)
    policy = tiny_policy("llama", scale=0.2)
    object.__setattr__(policy, "eos_ids", (1, 7, 8, 9, 10))  # many ends: rows leave at every step
    spec = SamplingSpec(temperature=1.4, max_new_tokens=14, decode_batch=decode_batch)
    out = generate(policy, PROMPTS, GROUP, spec, generator())
    assert len(set(out.lengths.tolist())) > 3
    assert_matches_oracle(policy, out, spec)


@pytest.mark.parametrize("remove_share", [0.0, 0.5])
@pytest.mark.parametrize("short", [0, 16])
def test_equal_beginnings_of_a_groups_completions_are_decoded_once(short, remove_share, monkeypatch):
    monkeypatch.setattr(decoding, "REMOVE_SHARE", remove_share)
    monkeypatch.setattr(shared_decoding, "SHORT", short)
    sizes, step = [], DirectDecoder.__call__
    monkeypatch.setattr(
        DirectDecoder, "__call__", lambda self, token, *rest: (sizes.append(len(token)), step(self, token, *rest))[1]
    )
    policy = tiny_policy("llama", scale=0.2)
    object.__setattr__(policy, "eos_ids", (1, 7, 8))
    spec = SamplingSpec(temperature=0.25, max_new_tokens=14)
    out = generate(policy, PROMPTS, 6, spec, generator())
    rows = list(zip(out.group.tolist(), out.completion_ids.tolist(), out.lengths.tolist(), strict=True))
    different = [len({(group, *ids[:t]) for group, ids, length in rows if length > t}) for t in range(1, 14)]
    different = [count for count in different if count]
    # There are branches, and texts that end while others go on.
    assert different[0] < max(different) < len(rows)
    assert different[-1] < max(different)
    if remove_share == 0:
        assert sizes == different
    else:
        assert len(sizes) == len(different)
        assert all(count <= size <= max(2 * count, 3) for size, count in zip(sizes, different, strict=True))
    alone = generate(policy, PROMPTS, 6, spec.model_copy(update={"decode_batch": 1}), generator())
    assert torch.equal(out.completion_ids, alone.completion_ids)


def test_a_prompts_completions_do_not_depend_on_how_many_there_are_or_on_later_prompts():
    policy, spec = tiny_policy(), SamplingSpec(max_new_tokens=6)
    few = generate(policy, PROMPTS[:2], 2, spec, generator())
    many = generate(policy, PROMPTS, 4, spec, generator())
    for prompt in range(2):
        for completion in range(2):
            a, b = few.completion_ids[prompt * 2 + completion], many.completion_ids[prompt * 4 + completion]
            assert a[: min(len(a), len(b))].tolist() == b[: min(len(a), len(b))].tolist()


def test_one_seed_one_result_and_no_other_randomness():
    policy, spec = tiny_policy(), SamplingSpec(max_new_tokens=8, temperature=2.0)
    state = torch.random.get_rng_state()
    first = generate(policy, PROMPTS, GROUP, spec, generator(1))
    again = generate(policy, PROMPTS, GROUP, spec, generator(1))
    other = generate(policy, PROMPTS, GROUP, spec, generator(2))
    assert torch.equal(first.completion_ids, again.completion_ids)
    assert torch.equal(first.behavior_logp, again.behavior_logp)
    assert first.completion_ids.tolist() != other.completion_ids.tolist()
    assert torch.equal(state, torch.random.get_rng_state())
    source = generator(1)
    second = [generate(policy, PROMPTS, GROUP, spec, source).completion_ids.tolist() for _ in range(2)][1]
    assert second != first.completion_ids.tolist()


def test_every_row_may_end_at_once_and_every_end_counts():
    policy = tiny_policy()
    object.__setattr__(policy, "eos_ids", tuple(range(37)))
    out = generate(policy, PROMPTS, GROUP, SamplingSpec(max_new_tokens=5), generator())
    assert out.completion_mask.tolist() == [[1]] * 9
    assert out.truncated.tolist() == [False] * 9
    assert out.texts == [""] * 9


def test_the_attention_kernel_and_gradients_are_as_before_also_after_an_error(monkeypatch):
    policy = tiny_policy()
    out = generate(policy, PROMPTS, GROUP, SamplingSpec(max_new_tokens=3), generator())
    assert policy.model.config._attn_implementation == "sdpa"
    assert not out.behavior_logp.requires_grad
    assert torch.is_grad_enabled()

    def broken(*args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(decoding, "draw", broken)
    with pytest.raises(RuntimeError, match="broken"):
        generate(policy, PROMPTS, GROUP, SamplingSpec(max_new_tokens=3), generator())
    assert policy.model.config._attn_implementation == "sdpa"


def test_prompts_that_cannot_be_continued_are_named():
    policy = tiny_policy()  # context 128
    long = random_prompts((120,))[0]
    with pytest.raises(UserError, match=r"prompt 1 \('.*'…\): 120 tokens and max_new_tokens 9 exceed .* 128 tokens"):
        generate(policy, [PROMPTS[0], long], 2, SamplingSpec(max_new_tokens=9), generator())
    generate(policy, [long], 1, SamplingSpec(max_new_tokens=8), generator())
    with pytest.raises(UserError, match="prompt 0: has no tokens"):
        generate(policy, [[]], 2, SamplingSpec(max_new_tokens=9), generator())


def test_rewards_and_rows():
    out = generate(tiny_policy(), PROMPTS, GROUP, SamplingSpec(max_new_tokens=4), generator())
    rollouts = out.with_reward(torch.arange(9))
    assert rollouts.reward.dtype == torch.float32
    part = rollouts.rows(torch.tensor([4, 0]))
    assert part.reward.tolist() == [4.0, 0.0]
    assert part.texts == [out.texts[4], out.texts[0]]
    assert torch.equal(part.input_ids, out.input_ids[[4, 0]])
    chosen = torch.zeros(9, dtype=torch.bool)
    chosen[[2, 5]] = True
    assert rollouts.rows(chosen).reward.tolist() == [2.0, 5.0]
    assert rollouts.prompt_lengths.tolist() == [11] * 3 + [3] * 3 + [6] * 3
