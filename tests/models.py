"""Tiny random models of every supported architecture, for tests. Weights are seeded; dropout is off."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

COMMON = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128
)
ARCHITECTURES: dict[str, dict] = {
    "qwen2": dict(COMMON, num_key_value_heads=2),
    "qwen3": dict(COMMON, num_key_value_heads=2, head_dim=8),
    "llama": dict(COMMON, num_key_value_heads=2),
    "gpt2": dict(n_embd=16, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt_neox": dict(COMMON, rotary_pct=0.5, hidden_dropout=0.0, attention_dropout=0.0),
    "gemma2": dict(COMMON, num_key_value_heads=2, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "qwen2_moe": dict(
        COMMON,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        decoder_sparse_step=1,
        experts_implementation="eager",
    ),
}


def tiny_model(
    architecture: str = "qwen2",
    *,
    vocab: int = 37,
    tie: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    scale: float = 0.3,
    **overrides: object,
) -> PreTrainedModel:
    """A randomly initialised tiny causal LM in eval mode; weights are N(0, scale²) so that gradients are far from zero.

    Token 0 is padding, token 1 end of text.
    """
    settings = dict(ARCHITECTURES[architecture]) | overrides
    config = CONFIG_MAPPING[architecture](
        vocab_size=vocab, tie_word_embeddings=tie, pad_token_id=0, eos_token_id=1, bos_token_id=1, **settings
    )
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if architecture == "gemma2" else "sdpa"
    ).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
            norm_gain = parameter.ndim == 1 and "bias" not in name
            parameter.copy_(1 + 0.1 * noise if norm_gain and architecture != "gemma2" else scale * noise)
    if dtype == torch.float64:
        keep_double_precision(model)
    return model.eval()


def keep_double_precision(model: torch.nn.Module) -> None:
    """Make RMS norms compute in their input's dtype: transformers casts them to float32, which hides errors below 1e-7."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            offset = 1.0 if type(module).__name__.startswith("Gemma") else 0.0

            def forward(
                x: torch.Tensor, module: torch.nn.Module = module, epsilon: float = epsilon, offset: float = offset
            ) -> torch.Tensor:
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * (module.weight + offset)

            module.forward = forward  # type: ignore[method-assign]


def random_batch(
    vocab: int = 37, rows: int = 3, prompt: int = 4, completion: int = 6, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Left-padded prompts and right-padded completions: input_ids, attention_mask, mask, all (rows, prompt+completion).

    `mask` is 1 on completion tokens whose log-probability given their prefix is meant.
    """
    generator = torch.Generator().manual_seed(seed)
    length = prompt + completion
    ids = torch.randint(2, vocab, (rows, length), generator=generator)
    attention = torch.ones(rows, length, dtype=torch.long)
    mask = torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows):
        left = int(torch.randint(0, prompt, (1,), generator=generator))
        right = int(torch.randint(0, completion, (1,), generator=generator)) if row else 0
        attention[row, :left] = 0
        attention[row, length - right :] = 0
        mask[row, prompt : length - right] = 1
    return {"input_ids": ids * attention, "attention_mask": attention, "mask": mask}


def without_experts(model: PreTrainedModel) -> PreTrainedModel:
    """The model with frozen experts and routers, as under LoRA."""
    for name, parameter in model.named_parameters():
        if ".experts." in name or ".gate." in name or "shared_expert_gate" in name:
            parameter.requires_grad_(False)
    return model
