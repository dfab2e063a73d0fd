"""What single tokens do: score norms ‖∇_θ log π_t‖₂ and shares of an update's gradient.

Modules: `rows` (batches of tokens), `structure` (properties of a model, uses of parameters in a forward pass, attention),
`norms` (the methods), `forward_mode` (directional derivatives), `attribution`, `self_check`, `sharded` (FSDP2).
"""

from __future__ import annotations

from sharpscope.tokens.attribution import (
    attribute,
    coming_step,
    failure_coefficients,
    logp_gradient,
)
from sharpscope.tokens.norms import ScoreNorms
from sharpscope.tokens.scores import score_norms
