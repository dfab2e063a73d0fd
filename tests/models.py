"""Tiny models and the batches that tests measure on them; loss surfaces with known derivatives."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sharpscope.surface.language_model import Objective, token_batch
from sharpscope.surface.operators import Operator
from tests.oracles.token_gradients import dense_hessian

COMMON = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
)
ARCHITECTURES: dict[str, dict] = {
    "qwen2": dict(COMMON, num_key_value_heads=2),
    "qwen3": dict(COMMON, num_key_value_heads=2, head_dim=8),
    "llama": dict(COMMON, num_key_value_heads=2),
    "gpt2": dict(
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "gpt_neox": dict(COMMON, rotary_pct=0.5, hidden_dropout=0.0, attention_dropout=0.0),
    "gemma2": dict(
        COMMON, num_key_value_heads=2, head_dim=8, sliding_window=8, query_pre_attn_scalar=8
    ),
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
        vocab_size=vocab,
        tie_word_embeddings=tie,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        **settings,
    )
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if architecture == "gemma2" else "sdpa"
    ).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
            norm_gain = parameter.ndim == 1 and "bias" not in name
            parameter.copy_(
                1 + 0.1 * noise if norm_gain and architecture != "gemma2" else scale * noise
            )
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
                x: torch.Tensor,
                module: torch.nn.Module = module,
                epsilon: float = epsilon,
                offset: float = offset,
            ) -> torch.Tensor:
                return (
                    x
                    * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
                    * (module.weight + offset)
                )

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


SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
VOCAB, TEMPERATURE = 13, 0.8
OBJECTIVES = ("nll", "expected_failure")


def small_model(**overrides):
    return tiny_model("qwen2", vocab=VOCAB, **{**SMALL, **overrides})


def rewards(rows: int = 3):
    return torch.rand(rows, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def objective(name: str, batch: dict, **rest) -> Objective:
    reward = rewards(len(batch["input_ids"]))
    tokens = token_batch(batch["input_ids"], batch["attention_mask"], batch["mask"], reward=reward)
    return Objective(name, tokens, TEMPERATURE, **rest)


def all_scored(ids: torch.Tensor) -> Objective:
    scored = torch.ones_like(ids)
    scored[:, 0] = 0
    return Objective("nll", token_batch(ids, torch.ones_like(ids), scored))


def operator(matrix: torch.Tensor) -> Operator:
    return Operator([matrix[0]], lambda v: matrix @ v)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_spectrum(values, seed: int = 0) -> torch.Tensor:
    values = torch.tensor(values, dtype=torch.float64)
    q = torch.linalg.qr(
        torch.randn(len(values), len(values), generator=generator(seed), dtype=torch.float64)
    ).Q
    return q @ torch.diag(values) @ q.T


def quadratic(matrix: torch.Tensor, at: torch.Tensor | None = None):
    theta = (
        torch.zeros(len(matrix), dtype=matrix.dtype) if at is None else at.clone()
    ).requires_grad_()
    return theta, lambda: 0.5 * theta @ matrix @ theta


def sloped(matrix: torch.Tensor, slope: torch.Tensor, start: torch.Tensor):
    """θ at `start`, and L(θ) = 2 + gᵀ(θ − start) + ½(θ − start)ᵀH(θ − start)."""
    theta = start.clone().requires_grad_()

    def loss():
        move = theta - start
        return 2 + slope @ move + 0.5 * move @ matrix @ move

    return theta, loss


class Net(nn.Module):
    """Smooth, with a tied matrix, a frozen one, an unused one and a parameter that enters linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(4, 5), nn.Linear(4, 5)
        self.tied.weight = self.first.weight
        self.frozen, self.unused = nn.Linear(5, 5), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.linear = nn.Parameter(torch.ones(2))
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator(p.numel()), dtype=torch.float64))

    def forward(self, x):
        return (
            self.frozen(torch.tanh(self.first(x))) * torch.sigmoid(self.tied(x))
        ).square().mean() + self.linear.sum()


def net_and_dense():
    net, x = Net(), torch.randn(7, 4, generator=generator(), dtype=torch.float64)
    used = [p for p in net.parameters() if p.requires_grad]
    theta = torch.cat([p.detach().reshape(-1) for p in used])
    names = {id(p): name for name, p in net.named_parameters()}

    def loss(at):
        parts = at.split([p.numel() for p in used])
        return torch.func.functional_call(
            net, {names[id(p)]: v.view(p.shape) for p, v in zip(used, parts, strict=True)}, (x,)
        )

    return net, (lambda: net(x)), dense_hessian(loss, theta)


class OpaqueCube(torch.autograd.Function):
    """x³ whose backward pass leaves the graph: its second derivative comes out as 0, or as a part of the truth."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * torch.from_numpy(3 * x.detach().numpy() ** 2)
