"""The policy: loading, prompts, generation, log-probabilities and token statistics."""

from __future__ import annotations

from sharpscope.config.run import PolicySpec, RolloutSpec, SamplingSpec
from sharpscope.policy.forward import length_buckets, microbatches, score_completions
from sharpscope.policy.generation import (
    check_lengths,
    draw_scored,
    generate,
    render_prompts,
    with_openings,
)
from sharpscope.policy.head import Head, backbone, bare, check_head, output_head
from sharpscope.policy.loading import Policy, embedded_policy, load_policy, make_policy
from sharpscope.policy.rollouts import Completions, Rollouts, completions_of, join_rollouts
from sharpscope.policy.token_stats import TokenStats
