"""The objective: rewards to advantages, tokens to weights, log-probabilities to a loss.

Order of use, once a step: `estimate_advantages`, `prepare`; once an update: `token_normalizer`; once a microbatch:
`policy_loss`.
"""

from __future__ import annotations

from sharpscope.config import Method, TokenWeight, method_label, method_names, named_method, reference_method
from sharpscope.objective.advantages import estimate_advantages, informative_groups, overlong_penalty
from sharpscope.objective.loss import (
    MethodState,
    clipped_norm,
    entropy_bonus,
    gradient_killed,
    gradient_mass,
    k3,
    policy_loss,
    token_normalizer,
)
from sharpscope.objective.plan import (
    LossOutput,
    Plan,
    StepTensors,
    calibrate,
    per_token,
    prepare,
    summarize_weights,
    token_bins,
    token_weights,
)
