"""The objective: rewards to advantages, tokens to weights, log-probabilities to a loss.

Order of use, once a step: `estimate_advantages`, `prepare`; once an update: `token_normalizer`; once a microbatch:
`policy_loss`.
"""

from __future__ import annotations

from sharpscope.config import Method as Method
from sharpscope.config import TokenWeight as TokenWeight
from sharpscope.config import method_label as method_label
from sharpscope.config import method_names as method_names
from sharpscope.config import named_method as named_method
from sharpscope.config import reference_method as reference_method
from sharpscope.objective.advantages import estimate_advantages as estimate_advantages
from sharpscope.objective.advantages import group_advantages as group_advantages
from sharpscope.objective.advantages import informative_groups as informative_groups
from sharpscope.objective.advantages import overlong_penalty as overlong_penalty
from sharpscope.objective.loss import MethodState as MethodState
from sharpscope.objective.loss import entropy_bonus as entropy_bonus
from sharpscope.objective.loss import gradient_killed as gradient_killed
from sharpscope.objective.loss import gradient_mass as gradient_mass
from sharpscope.objective.loss import k3 as k3
from sharpscope.objective.loss import kl_reward as kl_reward
from sharpscope.objective.loss import policy_loss as policy_loss
from sharpscope.objective.loss import token_normalizer as token_normalizer
from sharpscope.objective.plan import WeightSummary as WeightSummary
from sharpscope.objective.plan import calibrate as calibrate
from sharpscope.objective.plan import prepare as prepare
from sharpscope.objective.plan import summarize_weights as summarize_weights
from sharpscope.objective.plan import token_weights as token_weights
from sharpscope.objective.values import LossOutput as LossOutput
from sharpscope.objective.values import Plan as Plan
from sharpscope.objective.values import StepTensors as StepTensors
from sharpscope.objective.values import per_token as per_token
