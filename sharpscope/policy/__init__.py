"""The policy: loading a model, prompts as tokens, completions, and what is known of every token.

Names load on first use, so that reading a configuration needs no torch. Two functions share their module's name and so
are not here: `sharpscope.policy.token_stats.token_stats` and `sharpscope.policy.warm_start.warm_start`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharpscope.policy.conversation import Environment
    from sharpscope.policy.embedded import EMBEDDED, EmbeddedPolicy, embedded_policy
    from sharpscope.policy.forward import Scored, microbatches, score_completions
    from sharpscope.policy.generation import check_lengths, generate
    from sharpscope.policy.head import Head, backbone, output_head
    from sharpscope.policy.loading import Policy, load_policy, make_policy
    from sharpscope.policy.prompts import render_prompts, with_openings
    from sharpscope.policy.rollouts import Completions, Rollouts
    from sharpscope.policy.spec import PolicySpec, RolloutSpec, SamplingSpec
    from sharpscope.policy.token_stats import TokenStats
    from sharpscope.policy.warm_spec import WARM_STARTS, WarmStartSpec
    from sharpscope.policy.warm_start import WarmStartSummary

_HOME = {
    "conversation": ("Environment",),
    "embedded": ("EMBEDDED", "EmbeddedPolicy", "embedded_policy"),
    "forward": ("Scored", "microbatches", "score_completions"),
    "generation": ("check_lengths", "generate"),
    "head": ("Head", "backbone", "output_head"),
    "loading": ("Policy", "load_policy", "make_policy"),
    "prompts": ("render_prompts", "with_openings"),
    "rollouts": ("Completions", "Rollouts"),
    "spec": ("PolicySpec", "RolloutSpec", "SamplingSpec"),
    "token_stats": ("TokenStats",),
    "warm_spec": ("WARM_STARTS", "WarmStartSpec"),
    "warm_start": ("WarmStartSummary",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "EMBEDDED",
    "WARM_STARTS",
    "Completions",
    "EmbeddedPolicy",
    "Environment",
    "Head",
    "Policy",
    "PolicySpec",
    "RolloutSpec",
    "Rollouts",
    "SamplingSpec",
    "Scored",
    "TokenStats",
    "WarmStartSpec",
    "WarmStartSummary",
    "backbone",
    "check_lengths",
    "embedded_policy",
    "generate",
    "load_policy",
    "make_policy",
    "microbatches",
    "output_head",
    "render_prompts",
    "score_completions",
    "with_openings",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'sharpscope.policy' has no attribute '{name}'")
    module = importlib.import_module(f"sharpscope.policy.{_MODULE_OF[name]}")
    globals()[name] = getattr(module, name)
    return globals()[name]
