"""Sampling and decoding, also of several turns, against one completion, one token at a time, and against transformers' `generate`."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.smollm2.sums import sums
from sharpscope.config.run import LoraSpec, PolicySpec, SamplingSpec
from sharpscope.errors import UserError
from sharpscope.policy import (
    decoding,
    generate,
    load_policy,
    render_prompts,
    score_completions,
)
from sharpscope.policy.decoding import (
    _StopStrings,
    as_text,
    can_decode_directly,
    completion_uniforms,
    draw,
)
from sharpscope.policy.generation import left_pad
from sharpscope.policy.loading import add_adapters, make_policy
from sharpscope.tasks import Example, Reward
from tests.loops import some
from tests.models import ARCHITECTURES, tiny_model
from tests.oracles.generation import choose, log_softmax
from tests.policy.conftest import (
    GROUP,
    PROMPTS,
    assert_matches_oracle,
    generator,
    random_prompts,
    stir,
    tiny_policy,
    word_tokenizer,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": ("llama", {}),
    "llama, biases, untied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie": False}),
    "llama, scaled frequencies": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", {}),
    "qwen2, one key head": ("qwen2", {"num_key_value_heads": 1}),
    "qwen2, as many key heads": ("qwen2", {"num_key_value_heads": 4, "tie": False}),
    "qwen3": ("qwen3", {}),
    "qwen3, untied": ("qwen3", {"num_key_value_heads": 1, "tie": False, "attention_bias": True}),
}


class Parrot:
    """Replies by how much was said: some words, a long text that rarely fits, nothing at all, or the end."""

    name = "parrot"
    stop = ("t7", "t11", "t3", "t20 t5", "t30", "t31")

    def __init__(self, turns: int = 4) -> None:
        self.turns, self.batches = turns, []

    def splits(self):
        return {"train": [Example(f"p{i}", str(i), {"id": str(i)}) for i in range(len(PROMPTS))]}

    def score(self, example, completion):
        return Reward(0.0, {}, False)

    def respond(self, example, completion):
        words = completion.split()
        if completion.count("t12") >= self.turns:
            return None
        kind = (len(words) + int(example.answer)) % 5
        return ("", " t12", " t12 t13 t14 t15", f" t12 {' '.join(words[-3:])} t16", None)[kind]

    def respond_many(self, examples, completions):
        self.batches.append(len(completions))
        return [self.respond(*row) for row in zip(examples, completions, strict=True)]


def played(policy, task, spec):
    return generate(
        policy,
        PROMPTS,
        GROUP,
        spec,
        generator(),
        task,
        [] if task is None else task.splits()["train"],
    )


@pytest.mark.parametrize("task", [None, Parrot()])
@pytest.mark.parametrize("prompts", ["shared", "short", "layers"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_slow_generation(architecture, prompts, task, monkeypatch):
    # A capacity of 2 makes the caches grow; the one sliding window, of 8, moves over prompt and completion.
    monkeypatch.setattr(decoding, "INITIAL_CAPACITY", 2)
    if prompts == "shared":
        monkeypatch.setattr(decoding, "SHORT", 0)
    if prompts == "layers":
        monkeypatch.setattr(decoding, "can_decode_directly", lambda model: False)
    policy, spec = (
        tiny_policy(architecture),
        SamplingSpec(temperature=1.5, max_new_tokens=24 if task else 12),
    )
    out = played(policy, task, spec)
    assert_matches_oracle(policy, out, spec, task, 1e-5)
    heard = (out.completion_mask == 0) & (out.attention_mask[:, out.prompt_width :] == 1)
    assert int(heard.any(1).sum()) >= 4 * (task is not None)  # otherwise nothing was tested


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "top_p": 0.7}])
def test_truncated_and_greedy_sampling_equal_slow_generation(sampling):
    policy = tiny_policy("qwen2", scale=0.2)
    spec = SamplingSpec(max_new_tokens=9, **sampling)
    assert_matches_oracle(policy, generate(policy, PROMPTS, GROUP, spec, generator()), spec)


@pytest.mark.parametrize("turns", [0, 4])
@pytest.mark.parametrize("remove_share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("decode_batch", [1, 4, 100])
def test_what_is_decoded_together_changes_no_sample(decode_batch, remove_share, turns, monkeypatch):
    monkeypatch.setattr(decoding, "REMOVE_SHARE", remove_share)
    monkeypatch.setattr(decoding, "SHORT", 0)
    policy, task = tiny_policy("llama", scale=0.2), Parrot(turns) if turns else None
    # many ends: rows leave at every step
    object.__setattr__(policy, "eos_ids", (1, 8, 9) if turns else (1, 7, 8, 9, 10))
    spec = SamplingSpec(
        temperature=1.4, max_new_tokens=30 if turns else 14, decode_batch=decode_batch
    )
    out = played(policy, task, spec)
    assert len(set(out.lengths.tolist())) > 3
    assert set(out.truncated.tolist()) == {True, False}
    assert_matches_oracle(policy, out, spec, task)
    if turns and decode_batch == 100:  # one call a turn for all rows
        assert task.batches[0] > 1 and len(task.batches) <= 30


def test_one_seed_one_result_and_no_other_randomness():
    policy, spec = tiny_policy(), SamplingSpec(max_new_tokens=8, temperature=2.0)
    state = torch.random.get_rng_state()
    first, again, other = (
        generate(policy, PROMPTS, GROUP, spec, generator(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first.completion_ids, again.completion_ids)
    assert torch.equal(first.behavior_logp, again.behavior_logp)
    assert first.completion_ids.tolist() != other.completion_ids.tolist()
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("small_bytes", [0, 2**22])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_generate_and_logp_that_of_the_full_pass(
    name, small_bytes, monkeypatch
):
    monkeypatch.setattr(decoding, "SMALL_BYTES", small_bytes)  # larger layers are not concatenated
    architecture, overrides = MODELS[name]
    policy = tiny_policy(architecture, **overrides)
    assert can_decode_directly(policy.model)
    ours = generate(
        policy, PROMPTS, 1, SamplingSpec(temperature=0, max_new_tokens=12), torch.Generator()
    )
    ids, attention = left_pad(PROMPTS, policy.pad_id)
    theirs = policy.model.generate(  # type: ignore[operator]
        ids,
        attention_mask=attention,
        do_sample=False,
        max_new_tokens=12,
        pad_token_id=0,
        eos_token_id=1,
    )
    width, mask = ours.input_ids.shape[1], ours.completion_mask
    assert theirs.shape[1] == width
    assert torch.equal(ours.input_ids, theirs)
    position = (ours.attention_mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        out = policy.model(
            input_ids=theirs, attention_mask=ours.attention_mask, position_ids=position
        )
    logp = (
        out.logits[:, ours.prompt_width - 1 : -1]
        .log_softmax(-1)
        .gather(2, ours.completion_ids[..., None])[..., 0]
    )
    assert torch.allclose(ours.behavior_logp.double(), logp * mask, rtol=0, atol=1e-6)


@pytest.mark.parametrize("change", ["adapters", "bfloat16"])
def test_adapters_and_autocast_are_applied(change, monkeypatch):
    plain = tiny_policy("qwen2", dtype=torch.float32)
    spec = SamplingSpec(temperature=0, max_new_tokens=12)
    if change == "adapters":
        changed = make_policy(
            add_adapters(plain.model, LoraSpec(r=2), "tiny"), word_tokenizer(), "tiny"
        )
        stir(changed)
    else:
        changed = make_policy(plain.model, word_tokenizer(), "tiny", compute=torch.bfloat16)
    assert can_decode_directly(changed.model)
    direct = generate(changed, PROMPTS, GROUP, spec, generator())
    monkeypatch.setattr(decoding, "can_decode_directly", lambda model: False)
    layers = generate(changed, PROMPTS, GROUP, spec, generator())
    assert torch.equal(direct.completion_ids, layers.completion_ids)
    atol = 1e-5 if change == "adapters" else 0.05  # sdpa rounds its softmax to bfloat16
    assert torch.allclose(direct.behavior_logp, layers.behavior_logp, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("gemma2", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"hook": True}),
    ],
)
def test_other_models_are_decoded_through_their_layers(architecture, overrides, monkeypatch):
    hook = overrides.pop("hook", False)
    policy = tiny_policy(architecture, **overrides)
    if hook:
        policy.model.model.layers[1].register_forward_hook(lambda module, args, output: output)
    assert not can_decode_directly(policy.model)
    monkeypatch.setattr(decoding, "DirectDecoder", None)  # calling it would fail
    generate(policy, PROMPTS, GROUP, SamplingSpec(max_new_tokens=2), generator())


def test_prompts_that_cannot_be_continued_are_named():
    policy = tiny_policy()  # context 128
    long = random_prompts((120,))[0]
    with pytest.raises(
        UserError, match=r"prompt 1 \('.*'…\): 120 tokens and max_new_tokens 9 exceed .* 128 tokens"
    ):
        generate(policy, [PROMPTS[0], long], 2, SamplingSpec(max_new_tokens=9), generator())
    generate(policy, [long], 1, SamplingSpec(max_new_tokens=8), generator())
    with pytest.raises(UserError, match="prompt 0: has no tokens"):
        generate(policy, [[]], 2, SamplingSpec(max_new_tokens=9), generator())


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.integers(-80, 80), min_size=2, max_size=20, unique=True
    ),  # tenths: no ties, whose order is free
    st.floats(0, 1, exclude_max=True),
    st.floats(0.05, 1),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_draw_equals_its_definition(tenths, u, top_p, temperature):
    z = [value / 10 for value in tenths]
    spec = SamplingSpec(temperature=temperature, top_p=top_p)
    row = torch.tensor([z], dtype=torch.float64)
    token, behavior, sampler = draw(row, torch.tensor([u], dtype=torch.float64), spec)
    logp = log_softmax([value / temperature for value in z])
    # Where rounding decides (u or top_p within rounding of a cumulative sum) either neighbour is right.
    near = {
        choose(logp, min(max(u + d, 0), 1), greedy=False, top_p=p)
        for d in (-1e-9, 0, 1e-9)
        for p in (top_p, min(1.0, top_p * (1 + 1e-9)), top_p * (1 - 1e-9))
    }
    assert int(token) in {j for j, _ in near}
    assert float(behavior) == pytest.approx(logp[int(token)], abs=1e-9)
    if top_p < 1:
        assert any(
            j == int(token) and float(sampler) == pytest.approx(value, abs=1e-6)
            for j, value in near
        )
    else:
        assert sampler is None


def test_streams_of_completions_are_unlike_and_uniform():
    prompts, completions = torch.arange(40).repeat_interleave(10), torch.arange(10).repeat(40)
    u = completion_uniforms(3, prompts, completions, 50)
    assert abs(float(u.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / u.numel())
    # also of (prompt 1, completion 2) and (prompt 2, completion 1)
    assert float((torch.corrcoef(u) - torch.eye(400, dtype=u.dtype)).abs().max()) < 0.75


# -- Conversations


def test_training_gives_every_own_token_the_log_probability_that_it_was_drawn_with():
    policy, task = tiny_policy("qwen2"), Parrot()
    out = played(policy, task, SamplingSpec(temperature=1.6, max_new_tokens=24))
    for share in (False, True):
        scored = score_completions(
            policy.model, out, 1.6, share_prompt=share, with_grad=False, stats=True
        )
        torch.testing.assert_close(
            scored.logp, out.behavior_logp.to(scored.logp), rtol=0, atol=1e-5
        )
        silent = out.completion_mask == 0
        assert not scored.logp[silent].any()
        assert not scored.stats.entropy[silent].any()


class Echo(Parrot):
    """Ends a turn at "g" or "a" and replies with what a tokenizer would join with its neighbours."""

    name, stop = "echo", ("g", "a")

    def respond(self, example, completion):
        return (
            None if completion.count("<information>") > 2 else "<information> knight</information>"
        )


def test_sampled_ids_stay_as_they_were_sampled():
    """A random model writes pieces that the tokenizer would join: decoding and encoding anew would give other tokens."""
    shipped = load_policy(PolicySpec())
    policy = make_policy(
        tiny_model("qwen2", vocab=len(shipped.tokenizer)), shipped.tokenizer, "tiny"
    )
    task, spec = Echo(), SamplingSpec(temperature=4.0, max_new_tokens=60)
    out = played(policy, task, spec)
    assert_matches_oracle(policy, out, spec, task)
    anew = policy.tokenizer(out.texts, add_special_tokens=False)["input_ids"]
    same = [
        ids == row[: len(ids)].tolist() for ids, row in zip(anew, out.completion_ids, strict=True)
    ]
    assert sum(same) < len(out) // 2


def test_stop_strings_of_several_bytes_are_found():
    tokenizer = load_policy(PolicySpec()).tokenizer
    policy = make_policy(tiny_model("qwen2", vocab=len(tokenizer)), tokenizer, "tiny")
    for stop, text in (
        ("</stop>", "so</stop>!"),
        ("é", "naïve café"),
        ("。", "好。"),
        ("🙂", "a🙂b"),
    ):
        ids = tokenizer(text)["input_ids"]
        rows = _StopStrings(policy, (stop,), 1)
        found = [rows.add([0], [token])[0] for token in ids]
        first = next(i for i in range(1, len(ids) + 1) if stop in as_text(policy, ids[:i]))
        assert found.index(True) == first - 1


FOLDER = os.environ.get("SHARPSCOPE_SMOLLM2", "")


def test_sums_are_right_and_held_out_in_both_orders():
    splits = sums().splits()
    pairs = {
        name: {e.prompt.splitlines()[-1] for e in examples} for name, examples in splits.items()
    }
    assert {name: len(lines) for name, lines in pairs.items()} == {
        name: len(splits[name]) for name in splits
    }
    assert len(pairs["train"] | pairs["heldout"]) == 8100
    for line in some(pairs["heldout"]):
        a, _, b, _ = line.split()
        assert f"{b} + {a} =" not in pairs["train"]
    for example in some(splits["train"][:50]):
        a, _, b, _ = example.prompt.splitlines()[-1].split()
        assert int(a) + int(b) == int(example.answer)


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="SHARPSCOPE_SMOLLM2 names no folder with SmolLM2")
def test_generation_is_that_of_transformers_and_scored_alike():
    smollm2 = load_policy(PolicySpec(model=FOLDER, device="cpu"))
    prompts = render_prompts(
        [
            Example("What is 10 + 28? Answer with the number only.", ""),
            Example("Name a color.", ""),
        ],
        smollm2,
    )
    ours = generate(
        smollm2, prompts, 2, SamplingSpec(temperature=0, max_new_tokens=12), torch.Generator()
    )
    ids, attention = left_pad(prompts, smollm2.pad_id)
    theirs = smollm2.model.generate(
        ids, attention_mask=attention, do_sample=False, max_new_tokens=12
    )[:, ids.shape[1] :]
    for row in range(4):
        n = int(ours.lengths[row])
        assert ours.completion_ids[row, :n].tolist() == theirs[row // 2, :n].tolist()
    again = score_completions(smollm2.model, ours, 1.0, share_prompt=True, with_grad=False).logp
    torch.testing.assert_close(again, ours.behavior_logp, atol=2e-4, rtol=1e-4)
