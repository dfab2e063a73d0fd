"""The policy: loading a model, prompts as tokens, completions, and what is known of every token."""

from sharpscope.policy.forward import Scored, microbatches, score_completions
from sharpscope.policy.generation import check_lengths, generate
from sharpscope.policy.head import Head, backbone, output_head
from sharpscope.policy.loading import Policy, load_policy, make_policy, render_prompts
from sharpscope.policy.rollouts import Completions, Rollouts
from sharpscope.policy.spec import PolicySpec, RolloutSpec, SamplingSpec
from sharpscope.policy.token_stats import TokenStats, token_stats

__all__ = [
    "Completions",
    "Head",
    "Policy",
    "PolicySpec",
    "RolloutSpec",
    "Rollouts",
    "SamplingSpec",
    "Scored",
    "TokenStats",
    "backbone",
    "check_lengths",
    "generate",
    "load_policy",
    "make_policy",
    "microbatches",
    "output_head",
    "render_prompts",
    "score_completions",
    "token_stats",
]
