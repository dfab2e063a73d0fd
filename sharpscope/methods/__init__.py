"""Methods: their parts and names (no torch), and their equations in `advantages`, `plan` and `loss`.

Order of use, once a step: `advantages.estimate_advantages`, `plan.prepare`; once an update: `loss.token_normalizer`; once a
microbatch: `loss.policy_loss`. This package imports no torch; the modules with equations do.
"""

from __future__ import annotations

from sharpscope.methods.method import Method
from sharpscope.methods.named import (
    constants,
    control_label,
    control_names,
    describe,
    is_reference,
    method_label,
    method_names,
    method_rotation_bound,
    named_method,
    parse_methods,
    reference_method,
    rotation_bound,
    same_at_one_update,
)
from sharpscope.methods.token_weights import TokenWeight, weight_bounds
