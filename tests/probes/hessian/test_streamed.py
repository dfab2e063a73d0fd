"""Streamed products of a language model against reverse mode, on every architecture."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sharpscope.probes.hessian import check_products
from sharpscope.probes.hessian.causal_lm import lm_surface
from tests.models import COMMON, random_batch, tiny_model
from tests.probes.small_lm import VOCAB, all_scored, objective, small_model


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "gpt_neox", "gemma2", "qwen2_moe"])
@pytest.mark.parametrize("tie", [True, False])
def test_streamed_products_agree_with_reverse_mode_on_every_architecture(architecture, tie):
    model, batch = tiny_model(architecture, vocab=19, tie=tie), random_batch(vocab=19)
    products = []
    for mode in ("graph", "stream"):
        with lm_surface(model, objective("expected_failure", batch), mode=mode, head_mb=0.001) as surface:
            size = sum(p.numel() for p in surface.parameters)
            vector = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            products.append(surface.hessian() @ vector)
    # Eager softmax and routers of transformers work in float32 even here.
    torch.testing.assert_close(products[1], products[0], rtol=1e-5, atol=1e-6 * float(products[0].abs().max()))


SIDE_INPUTS = dict(
    COMMON,
    vocab_size=40,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    pad_token_id=0,
)


PER_LAYER = dict(
    SIDE_INPUTS,
    vocab_size_per_layer_input=40,
    hidden_size_per_layer_input=8,
    num_kv_shared_layers=2,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
)


SIDE_ARCHITECTURES = {
    "gemma4_text": dict(PER_LAYER, num_global_key_value_heads=1, global_head_dim=8),
    "gemma3n_text": dict(PER_LAYER, laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=None),
    "zamba2": dict(
        SIDE_INPUTS | {"head_dim": 16, "num_key_value_heads": 2},
        attention_head_dim=16,
        num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid"] * 2,
        mamba_d_state=4,
        mamba_d_conv=2,
        n_mamba_heads=2,
        mamba_ngroups=1,
        mamba_headdim=16,
        chunk_size=4,
        use_mem_rope=False,
        adapter_rank=4,
        use_shared_attention_adapter=True,
    ),
    "ctrl": dict(vocab_size=40, n_embd=16, dff=24, n_layer=2, n_head=2, n_positions=32),
    "bart": dict(
        vocab_size=40,
        d_model=16,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=24,
        pad_token_id=0,
        max_position_embeddings=32,
        is_decoder=True,
        is_encoder_decoder=False,
    ),
}


def plain_product(model, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """v and ∇²(mean nll) v by double autograd through the model's own call."""
    parameters = list(model.parameters())
    vector = torch.randn(sum(p.numel() for p in parameters), generator=torch.Generator().manual_seed(2)).double()
    parts = [
        part.view(p.shape) for part, p in zip(vector.split([p.numel() for p in parameters]), parameters, strict=True)
    ]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    used = [i for i, gradient in enumerate(first) if gradient is not None]
    second = torch.autograd.grad(
        [first[i] for i in used], parameters, [parts[i] for i in used], allow_unused=True, materialize_grads=True
    )
    return vector, torch.cat([part.flatten() for part in second])


@pytest.mark.parametrize("architecture", SIDE_ARCHITECTURES)
def test_streamed_products_follow_what_layers_get_besides_the_hidden_states(architecture):
    """Inputs for each layer, keys and values shared between layers, embeddings that every layer sees, shared modules.

    CTRL scales its embeddings in place, and BART's decoder does not say which module they are.
    """
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if architecture not in CONFIG_MAPPING or (architecture == "zamba2" and transformers.__version__.startswith("5.3.")):
        pytest.skip(f"transformers {transformers.__version__} has no {architecture} that runs")
    torch.manual_seed(0)
    config = CONFIG_MAPPING[architecture](**SIDE_ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ids = torch.randint(2, 40, (2, 9))
    vector, expected = plain_product(model, ids)
    with lm_surface(model, all_scored(ids), mode="stream", head_mb=0.001) as surface:
        hessian = surface.hessian()
        assert check_products(surface, hessian) < 0.01
        found = hessian @ vector
    # Norms and rotary embeddings of transformers work in float32 even here.
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_streamed_products_of_a_layer_called_twice_and_a_parameter_also_used_outside_of_it():
    model = small_model(num_hidden_layers=2)
    model.model.layers[1] = model.model.layers[0]
    model.model.norm.weight = model.model.layers[0].input_layernorm.weight
    ids = torch.randint(2, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    vector, expected = plain_product(model, ids)
    with lm_surface(model, all_scored(ids), mode="stream", head_mb=0.001) as surface:
        torch.testing.assert_close(surface.hessian() @ vector, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        # Its embedding's rows are scaled in place.
        ("ctrl", dict(n_embd=8, dff=8, n_layer=1, n_head=2, n_positions=32)),
        # Its body is a wrapper that names no input embedding.
        ("bart", dict(d_model=8, decoder_ffn_dim=8, decoder_layers=1, decoder_attention_heads=2, is_decoder=True)),
    ],
)
def test_streamed_products_of_decoders_with_their_own_ways(architecture, settings):
    config = AutoConfig.for_model(
        architecture, vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=1, **settings
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    batch, products = random_batch(vocab=VOCAB), []
    for mode in ("graph", "stream"):
        with lm_surface(model, objective("nll", batch), mode=mode) as surface:
            size = sum(p.numel() for p in surface.parameters)
            vector = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            products.append(surface.hessian() @ vector)
    torch.testing.assert_close(products[1], products[0], rtol=1e-9, atol=1e-11)
