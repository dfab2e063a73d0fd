"""What single tokens do: score norms ‖∇_θ log π_t‖₂, shares of an update's ‖∇L‖², effects on what the update does.

Modules: `rows` (batches of tokens), `structure` (properties of a model, uses of parameters in a forward pass, attention),
`norms` (the methods), `forward_mode` (directional derivatives), `attribution`, `optimizer_steps` (a step and its Jacobian), `outcomes`,
`update_effects`, `self_check`, `sharded` (FSDP2).
"""

from __future__ import annotations

from sharpscope.tokens.attribution import attribute, failure_coefficients, logp_gradient
from sharpscope.tokens.norms import ScoreNorms
from sharpscope.tokens.optimizer_steps import Clip, coming_step
from sharpscope.tokens.outcomes import Outcome
from sharpscope.tokens.scores import score_norms
from sharpscope.tokens.update_effects import Effects, effects
