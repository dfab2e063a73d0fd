"""Score norms ‖∇_θ log π_t‖₂ of the tokens of a causal language model, by three methods of different cost and accuracy."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from sharpscope.config.run import Check
from sharpscope.errors import UserError, nearest
from sharpscope.policy.guard import guarded
from sharpscope.tokens.norms import NormMethod, ScoreNorms
from sharpscope.tokens.rows import make_rows
from sharpscope.tokens.self_check import NORMS, check_norms
from sharpscope.tokens.structure import structure_of


def score_norms(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    method: NormMethod = "local",
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    *,
    check: Check = "first",
) -> ScoreNorms:
    """Score norms ‖∇_θ log π_θ(token | prefix)‖₂ over all trainable parameters, for the tokens of a mask.

    - `head`: only the output layer, in its use as output layer.
    - `local`: one forward and one backward pass that neglects gradients through other positions' keys and values. It ranks
      tokens well and understates those that depend on other positions.
    - `exact`: batched backward passes of single tokens.

    Args:
        model: causal language model of transformers, with or without PEFT adapters. Parameters without `requires_grad` do not
            count. Its state is restored bit for bit.
        input_ids: (N, S) tokens.
        mask: (N, S), 1 on the tokens of interest.
        method: `head`, `local` or `exact`.
        attention_mask: (N, S), 0 on padding; None for no padding. Positions count real tokens only.
        temperature: softmax temperature T > 0 of log π.
        check: when to compare the method with autograd on two tokens of the first row: the `first` time for this model,
            `always` or `off`.

    Returns:
        Norms and squared norms, (N, S), 0 where the mask is 0.

    Raises:
        UserError: shapes or options that do not fit together, or a part of the model that the method does not support.
        CheckError: the norms differ from autograd's on this model.

    Examples:
        >>> import torch
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> import sharpscope
        >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=16, num_key_value_heads=2, **sizes)).eval()
        >>> input_ids = torch.tensor([[3, 1, 4, 1, 5]])
        >>> mask = torch.tensor([[0, 0, 1, 1, 1]])  # the completion
        >>> norms = sharpscope.score_norms(model, input_ids, mask, method="exact")
        >>> norms.values.shape, (norms.values > 0).int().tolist()
        (torch.Size([1, 5]), [[0, 0, 1, 1, 1]])
    """
    if method not in NORMS:
        raise UserError(f"method, '{method}': unknown{nearest(str(method), NORMS)}")
    with guarded(model):
        rows = make_rows(model, input_ids, mask, attention_mask, temperature)
        structure = structure_of(model)
        checked = check_norms(model, structure, rows, temperature, method, check)
        return replace(NORMS[method](model, structure, rows, temperature), checked=checked)
