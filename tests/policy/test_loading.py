"""Loading of models, adapters and tokenizers, and rendering of prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from sharpscope import memory
from sharpscope.config.run import EMBEDDED_NAMES, LoraSpec
from sharpscope.errors import UserError
from sharpscope.packaged import data_path
from sharpscope.policy import (
    Policy,
    SamplingSpec,
    draw_scored,
    generate,
    load_policy,
    make_policy,
    render_prompts,
    with_openings,
)
from sharpscope.policy.head import check_head, output_head
from sharpscope.policy.loading import embedded_policy, has_adapters
from sharpscope.tasks import Example, KnightsKnavesSpec, Reward, make_task
from tests.loops import some
from tests.models import tiny_model
from tests.policy.conftest import adapted, logp, spec, stir, word_tokenizer

TEMPLATE = (
    "{% for m in messages %}t10 {{ m['role'] | length }} {{ m['content'] }} t11 {% endfor %}"
    "{% if add_generation_prompt %}t12 {% endif %}"
)
THINKING = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"


def example(prompt: str, **fields: Any) -> Any:
    return Example(prompt, "", **fields)


def rendered(
    examples: list[Any], *, template: str | None = None, prompt_format: str = "auto"
) -> list[str]:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    policy = make_policy(tiny_model(), tokenizer, "x", prompt_format)
    return [tokenizer.decode(ids) for ids in render_prompts(examples, policy)]


def test_plain_prompts_and_prefills():
    examples = [example("t5 t6"), example("t5", prefill=" t7"), example("t5 t7", prefill=" t7")]
    assert rendered(examples) == ["t5 t6", "t5 t7", "t5 t7"]
    assert rendered(examples, template=TEMPLATE, prompt_format="plain") == [
        "t5 t6",
        "t5 t7",
        "t5 t7",
    ]


def test_chat_prompts_are_wrapped_once():
    examples = [
        example("t5 t6"),
        example("t5 t7", prefill="t7"),
        example("t10 t4 t5 t11 t12 t7", templated=True, prefill="t7"),
        example(
            "t8\n\nt9 t7",
            prefill="t7",
            messages=[{"role": "system", "content": "t8"}, {"role": "user", "content": "t9 t7"}],
        ),
    ]
    # The lengths of the roles' names are not words of the vocabulary and become t2.
    assert rendered(examples, template=TEMPLATE) == [
        "t10 t2 t5 t6 t11 t12",
        "t10 t2 t5 t11 t12 t7",
        "t10 t4 t5 t11 t12 t7",
        "t10 t2 t8 t11 t10 t2 t9 t11 t12 t7",
    ]


def test_turns_that_a_template_refuses_are_named():
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}t5"
    turns = [{"role": "system", "content": "t8"}, {"role": "user", "content": "t9"}]
    says = r"template of 'x' rejects .* system, user \(System role not supported\); .* policy.prompt_format=plain"
    with pytest.raises(UserError, match=says):
        rendered([example("t8 t9", messages=turns)], template=refuses)
    assert rendered(
        [example("t8 t9", messages=turns)], template=refuses, prompt_format="plain"
    ) == ["t8 t9"]
    assert rendered([example("t9")], template=refuses) == ["t5"]


@pytest.fixture
def thinker(toy_config) -> Policy:
    """The toy policy with a template that opens `<think>`, as those of reasoning models do."""
    policy = load_policy(toy_config().policy)
    policy.tokenizer.chat_template = THINKING
    return make_policy(policy.model, policy.tokenizer, "tiny")


TURNS = [{"role": "system", "content": "be good"}, {"role": "user", "content": "say a So"}]
OPENED = [
    # example, what the model sees, what of it opens the completion
    (Example("say a", ""), "[user]say a[assistant]<think>\n", "<think>\n"),
    (Example("say a So", "", prefill=" So"), "[user]say a[assistant]<think>\n So", "<think>\n So"),
    (
        Example("be good\n\nsay a So", "", prefill=" So", messages=TURNS),
        "[system]be good[user]say a[assistant]<think>\n So",
        "<think>\n So",
    ),
    (Example("say a <think>", "", prefill="<think>"), "[user]say a [assistant]<think>", "<think>"),
    (Example("[user]say a[assistant]", "", templated=True), "[user]say a[assistant]", ""),
    (Example("[user]a<think>", "", templated=True, prefill="<think>"), "[user]a<think>", "<think>"),
]


@pytest.mark.parametrize(("given", "seen", "prefill"), OPENED)
def test_what_the_template_opens_is_prefill_and_fed_once(thinker, given, seen, prefill):
    (opened,) = with_openings([given], thinker)
    assert opened.whole("then") == prefill + "then"
    for example in (given, opened):  # making prompts of them knows no difference
        assert thinker.tokenizer.decode(render_prompts([example], thinker)[0]) == seen
    assert with_openings([opened], thinker) == [opened]


class Hearer:
    """Keeps the texts it was given to score and to answer."""

    name, stop = "hearer", tuple("aeiou")

    def __init__(self) -> None:
        self.given: list[str] = []

    def splits(self) -> dict[str, list[Example]]:
        return {"train": [Example(f"say {c}", c) for c in "abcd"]}

    def score(self, example: Example, completion: str) -> Reward:
        self.given.append(example.whole(completion))
        return Reward(0.0, {}, False)

    def respond(self, example: Example, completion: str) -> None:
        self.given.append(example.whole(completion))


def test_scorers_and_replies_are_given_what_the_template_opened(thinker):
    task = Hearer()
    draw_scored(thinker, task, task.splits()["train"], 4, SamplingSpec(max_new_tokens=12), 0)
    assert len(task.given) > 16 and all(text.startswith("<think>\n") for text in task.given)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the saved model to break."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def refusal(folder: Path | str, **values: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_policy(spec(folder, **values))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_saved_model_speaks_like_the_original(saved):
    policy, original = load_policy(spec(saved)), tiny_model(dtype=torch.float32)
    assert policy.source == str(saved)
    # not cut as Qwen2's own tokenizer would
    assert policy.tokenizer("t5 </s> t36")["input_ids"] == [
        5,
        1,
        36,
    ]
    assert (policy.eos_ids, policy.pad_id, policy.context) == ((1,), 0, 128)
    assert (policy.chat, policy.model.config._attn_implementation) == (False, "sdpa")
    assert not policy.model.training
    for (name, a), b in zip(policy.model.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(a, b), name
    prompts, sampling = [[5, 6, 7]], SamplingSpec(max_new_tokens=5)
    other = make_policy(original, word_tokenizer(), "x")
    ours, theirs = (
        generate(p, prompts, 2, sampling, torch.Generator().manual_seed(0)) for p in (policy, other)
    )
    assert torch.equal(ours.completion_ids, theirs.completion_ids)


def test_a_folder_that_is_not_there_or_not_a_model(tmp_path):
    assert "no such folder" in refusal(tmp_path / "nowhere")
    assert "no such folder" in refusal("./nowhere")
    assert "policy.device 'abacus'" in refusal("embedded:math", device="abacus")
    assert "needs config.json and weights in *.safetensors" in refusal(tmp_path)
    (tmp_path / "file").write_text("x")
    assert "is neither a .gguf file nor a folder" in refusal(tmp_path / "file")
    assert "did you mean 'knights_knaves'" in refusal("embedded:knights_knave")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("x")  # pickled
    assert "needs config.json and weights in *.safetensors" in refusal(tmp_path)


def test_a_hub_model_that_cannot_be_reached_is_one_line(monkeypatch):
    monkeypatch.setattr(
        AutoConfig,
        "from_pretrained",
        Mock(side_effect=OSError("We couldn't connect\nand much more\n")),
    )
    says = "no such folder, and as a hub id it cannot be loaded: We couldn't connect"
    assert refusal("someone/model") == f"policy.model 'someone/model': {says}"


def test_a_folder_without_a_tokenizer_is_named_as_such(tmp_path):
    """transformers makes an empty tokenizer for it, by which every prompt would be empty."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(embedded_policy("math") / name, tmp_path / name)
    with pytest.raises(UserError, match=r"has no tokenizer; tokenizer\.save_pretrained"):
        load_policy(spec(str(tmp_path)))


def test_missing_weights_are_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"], weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "no weights for model.layers.1.mlp.up_proj.weight (2 in all)" in refusal(folder)


def test_code_in_a_checkpoint_is_not_run(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "policy.model" in refusal(folder)
    assert not (tmp_path / "ran").exists()


def test_tokenizers_that_do_not_fit():
    with pytest.raises(UserError, match="has 50 tokens, the model 37"):
        make_policy(tiny_model(), word_tokenizer(50), "x")
    silent = tiny_model()
    silent.generation_config.eos_token_id = None
    with pytest.raises(
        UserError, match="neither the tokenizer nor the generation config has an end-of-text token"
    ):
        make_policy(silent, word_tokenizer(eos_token=None), "x")
    with pytest.raises(UserError, match="no chat template"):
        make_policy(tiny_model(), word_tokenizer(), "x", "chat")
    assert make_policy(tiny_model(), word_tokenizer(pad_token=None), "x").pad_id == 1
    ends = tiny_model()
    ends.generation_config.eos_token_id = [5, 1]
    # of tokenizer and generation config
    assert set(make_policy(ends, word_tokenizer(), "x").eos_ids) == {
        1,
        5,
    }


def test_a_model_that_sees_later_tokens_is_refused():
    config = AutoConfig.for_model(
        "xlm", vocab_size=37, emb_dim=16, n_layers=1, n_heads=2, causal=False
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    with pytest.raises(UserError, match="XLMWithLMHeadModel: its logits depend on later tokens"):
        check_head(model, output_head(model))


def write_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A llama of one layer with a tokenizer of 300 words, as llama.cpp stores it; returns transformers' weights by name."""
    gguf = pytest.importorskip("gguf", reason="needs the optional library gguf")
    words = [chr(256 + i) if i < 33 else chr(i) for i in range(256)] + [f"w{i}" for i in range(40)]
    words += ["ab", "<|endoftext|>", "<s>", "</s>"]
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 32,
        "head_count": 2,
    }
    for name, value in (sizes | {"head_count_kv": 2, "vocab_size": 300}).items():
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([1] * 297 + [3, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(298)
    writer.add_eos_token_id(299)
    shapes = {
        "token_embd": (300, 32),
        "output": (300, 32),
        "blk.0.ffn_gate": (32, 32),
        "blk.0.ffn_down": (32, 32),
    }
    shapes |= {f"blk.0.attn_{part}": (32, 32) for part in ("q", "k", "v", "output")} | {
        "blk.0.ffn_up": (32, 32)
    }
    shapes |= dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), (32,))
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_a_gguf_file_loads_as_float32_and_can_be_saved(tmp_path, monkeypatch):
    weights = write_gguf(tmp_path / "model.gguf")
    policy = load_policy(spec(tmp_path / "model.gguf"))
    assert (policy.eos_ids, policy.context, policy.model.dtype) == ((299,), 64, torch.float32)
    assert torch.equal(policy.model.get_input_embeddings().weight, weights["token_embd"])
    policy.model.save_pretrained(tmp_path / "saved")
    policy.tokenizer.save_pretrained(tmp_path / "saved")
    again = load_policy(spec(tmp_path / "saved"))
    assert all(map(torch.equal, policy.model.parameters(), again.model.parameters()))
    assert f"give the file itself: {tmp_path / 'model.gguf'}" in refusal(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'sharpscope[gguf]'" in refusal(tmp_path / "model.gguf")


def test_what_does_not_fit_into_memory_is_said_before_it_is_loaded(folder, monkeypatch):
    """Four bytes for each stored number, however it is stored."""
    numbers = load_policy(spec(folder)).model.num_parameters()
    weights = {
        name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(memory, "free_memory", lambda device: 4 * numbers)
    load_policy(spec(folder))
    monkeypatch.setattr(memory, "free_memory", lambda device: 4 * numbers - 1)
    assert refusal(folder).startswith("memory: loading ")


# -- Adapters


def saved_adapters(policy, folder: Path) -> Path:
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def test_new_adapters_for_a_folder_of_adapters_are_refused(saved, tmp_path):
    folder = saved_adapters(adapted(saved), tmp_path)
    wanted = spec(folder, lora=LoraSpec(r=2, alpha=4.0))
    for beneath in (None, str(folder)):  # as a script loads it, and as a run begins with it
        with pytest.raises(UserError, match=r"policy.lora: '.*' is a folder of adapters"):
            load_policy(wanted, base=beneath)
    assert has_adapters(load_policy(wanted, base=str(saved)).model)  # a run that continues
    assert has_adapters(load_policy(spec(folder)).model)


def test_only_the_adapters_train_and_they_start_at_the_model_itself(saved):
    policy, plain = adapted(saved), load_policy(spec(saved))
    again = adapted(saved)
    # the same for every run
    assert all(map(torch.equal, policy.model.parameters(), again.model.parameters()))
    trainable = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trainable and all(".lora_" in name for name in trainable)
    assert len(trainable) == 2 * 2 * 7  # A and B of two layers' q, k, v, o, gate, up, down
    assert torch.equal(logp(policy), logp(plain))
    assert output_head(policy.model).weight.requires_grad is False
    stir(policy)
    with policy.model.disable_adapter():  # the reference
        assert torch.equal(logp(policy), logp(plain))
    assert not torch.equal(logp(policy), logp(plain))


def test_saved_adapters_load_here_and_with_transformers(saved, tmp_path):
    policy = adapted(saved)
    stir(policy)
    assert not (saved_adapters(policy, tmp_path) / "model.safetensors").exists()
    again = load_policy(spec(tmp_path))
    assert has_adapters(again.model) and torch.equal(logp(again), logp(policy))
    assert [p.requires_grad for p in again.model.parameters()] == [
        p.requires_grad for p in policy.model.parameters()
    ]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[3, 5, 9, 4]])
    assert torch.allclose(theirs(ids).logits, policy.model(ids).logits, atol=1e-5)


def test_pickled_adapters_are_refused_unread(saved, tmp_path):
    weights = saved_adapters(adapted(saved), tmp_path / "adapters") / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(
        UserError, match=r"adapters': no adapter_model\.safetensors; .* save_pretrained"
    ) as refused:
        load_policy(spec(tmp_path / "adapters"))
    assert "\n" not in str(refused.value)


# -- The embedded policies


@pytest.mark.parametrize("name", sorted(EMBEDDED_NAMES))
def test_a_shipped_policy_is_a_small_qwen2_in_safetensors(name):
    folder = embedded_policy(name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    assert all(
        parameter.dtype == torch.float32 and parameter.isfinite().all()
        for parameter in model.parameters()
    )
    assert (folder / "model.safetensors").stat().st_size <= 8 * 2**20
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert len(tokenizer) <= model.config.vocab_size
    assert (
        json.loads((folder / "warm_start.json").read_text())["parameters"] == model.num_parameters()
    )


@pytest.mark.parametrize("style", ["compact", "logic_rl"])
def test_every_loader_gives_the_same_tokens_for_puzzles(style):
    loaders = (PreTrainedTokenizerFast, AutoTokenizer)
    shipped, auto = (
        loader.from_pretrained(embedded_policy("knights_knaves")) for loader in loaders
    )
    puzzles = make_task(
        KnightsKnavesSpec(train_size=1, heldout_size=25, seed=3, style=style)
    ).splits()["heldout"]
    for prompt in some(puzzle.prompt for puzzle in puzzles):
        ids = shipped(prompt)["input_ids"]
        assert auto(prompt)["input_ids"] == ids
        assert auto.decode(ids) == prompt
    text = "👩‍👩‍👧 naïve e\u0301 \u212b ﷽ 漢字 <search>x</search>\x00\r\n"  # any text comes back
    assert shipped.decode(shipped(text)["input_ids"]) == text


def test_data_outside_the_data_folder_is_refused():
    for parts in ((), ("..", "x"), ("/etc/passwd",), ("a", "../..")):
        with pytest.raises(UserError, match="outside the packaged data"):
            data_path(*parts)
