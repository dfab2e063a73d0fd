"""‖∇_θ log π_t‖₂ of every token of anyone's causal language model, in four tiers of price and exactness.

Guides: `rows` (what a caller gives, padding at the end), `structure` (what a model is made of), `uses` (where a
forward pass uses each parameter, and norms from inputs and cotangents), `attention` (its derivatives), `head` (the
output layer in closed form), then one module a tier.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from sharpscope.config.probes import Check
from sharpscope.errors import UserError, nearest
from sharpscope.probes.guard import guarded
from sharpscope.probes.token_gradients.exact import exact_norms
from sharpscope.probes.token_gradients.head_tier import head_norms
from sharpscope.probes.token_gradients.local import local_norms
from sharpscope.probes.token_gradients.result import TIERS, ScoreNorms, Tier
from sharpscope.probes.token_gradients.rows import Rows, make_rows
from sharpscope.probes.token_gradients.self_check import SKETCH_DIRECTIONS, check_norms
from sharpscope.probes.token_gradients.sketch import sketch_norms
from sharpscope.probes.token_gradients.structure import structure_of

__all__ = ["TIERS", "ScoreNorms", "Tier", "score_norms"]


def score_norms(
    model: nn.Module,
    input_ids: Tensor,
    mask: Tensor,
    tier: Tier = "local",
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    *,
    directions: int = 24,
    seed: int = 0,
    cotangent_bytes: int | None = None,
    check: Check = "first",
) -> ScoreNorms:
    """‖∇_θ log π_θ(token | its prefix)‖₂ over all trainable parameters, for every token that `mask` marks.

    Tiers (with T tokens): `head` is the output layer alone, in its use as output layer; `local` costs one forward
    and one backward pass and leaves out credit that flows through other positions' keys and values, so it is a
    lower-cost approximation that ranks tokens well and understates those that lean on other positions; `sketch` is
    unbiased for the squared norm, at K forward-mode passes; `exact` makes every token's own backward pass, batched.

    Args:
        model: a causal LM of transformers, a PEFT adapter around one included; parameters without `requires_grad` do
            not count. It is left bit for bit as it was, its mode, gradients, random state and attention kernel too.
        input_ids: (N, S) long.
        mask: (N, S) 0/1 of any dtype: the tokens whose log-probability given their prefix is meant.
        tier: head, local, sketch or exact.
        attention_mask: (N, S), 0 on padding; None = no padding. Positions are counted over real tokens only.
        temperature: T > 0; log π belongs to softmax(z/T).
        directions: sketch: K ≥ 2 random directions.
        seed: sketch: of the directions.
        cotangent_bytes: exact: memory for one activation's batch of cotangents; the peak is a small multiple of it
            beyond a forward pass's activations. None = what suits the device.
        check: compare the tier with plain autograd on two tokens of the first row: when the tier is first used with this
            model (first), at every call (always) or never (off).

    Returns:
        Norms, squared norms and their standard errors, (N, S), 0 where the mask is 0.

    Raises:
        UserError: the input does not fit together, or the model has a part that the tier cannot handle (named).
        CheckError: the tier's norms differ from plain autograd's on this model.
    """
    if tier not in TIERS:
        raise UserError(f"tier, '{tier}': unknown{nearest(str(tier), TIERS)}")
    with guarded(model, weights=False):
        rows = make_rows(model, input_ids, mask, attention_mask, temperature)
        structure = structure_of(model)

        def measure(some: Rows, directions: int, seed: int) -> ScoreNorms:
            if tier == "head":
                return head_norms(model, structure, some, temperature)
            if tier == "local":
                return local_norms(model, structure, some, temperature)
            if tier == "sketch":
                return sketch_norms(model, structure, some, temperature, directions, seed)
            return exact_norms(model, structure, some, temperature, cotangent_bytes)

        checked = check_norms(
            model, structure, rows, temperature, tier, check,
            lambda some: measure(some, SKETCH_DIRECTIONS, 0).squared,
        )  # fmt: skip
        return replace(measure(rows, directions, seed), checked=checked)
