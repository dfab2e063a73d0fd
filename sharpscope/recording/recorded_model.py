"""The model of a recorded training: its own forward pass, its first one where it is sharded, and what drops at random in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from sharpscope import distributed
from sharpscope.errors import UserError
from sharpscope.policy.guard import guarded
from sharpscope.policy.sharding import is_sharded, reshard, unsharded


def check_language_model(model: nn.Module) -> None:
    """Raise UserError where a model has no log-probabilities of next tokens: classifiers, reward models, encoder-decoders."""
    find = getattr(model, "get_output_embeddings", None)
    value_head = hasattr(model, "v_head")
    if value_head or find is None or find() is None:
        text = "has a value head: give the language model in it" if value_head else "is none"
        text = f"only causal language models are recorded, and {type(model).__name__} {text}"
        raise UserError(f"record: {text}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(
            f"record: only causal language models are recorded, and {type(model).__name__} is an encoder with a decoder"
        )


@contextmanager
def original_forward(model: nn.Module) -> Iterator[None]:
    """Context in which `model.forward` is the model's own; accelerate replaces it by one that computes in bf16 (autocast)."""
    replaced = vars(model).get("forward")
    if replaced is not None and hasattr(model, "_original_forward"):
        vars(model)["forward"] = model._original_forward
    try:
        yield
    finally:
        if replaced is not None:
            vars(model)["forward"] = replaced


@contextmanager
def statistics_of(model: nn.Module) -> Iterator[None]:
    """Context for statistics of tokens: weights outside the layers are gathered, the model's state is restored afterwards."""
    if is_sharded(model):
        distributed.gather(None)
    with unsharded(model, layers=False), guarded(model), torch.no_grad():
        yield


def first_forward(model: nn.Module) -> None:
    """Run a sharded model once: FSDP2 requires that its first forward pass is of the whole model."""
    if is_sharded(model):
        # a process that has failed takes no part in the exchanges of weights that follow one
        distributed.gather(None)
        ids = torch.zeros((1, 2), dtype=torch.long, device=next(model.parameters()).device)
        with guarded(model), torch.no_grad():
            model(input_ids=ids, use_cache=False)
        reshard(model)


def dropout_of(model: nn.Module) -> str:
    """What drops at random in training, from the modules' settings; empty if nothing does."""
    for name, module in model.named_modules():
        for field in ("p", "attention_dropout"):
            if field == "p" and not isinstance(module, nn.Dropout):
                continue
            share = getattr(module, field, 0.0)
            if isinstance(share, float) and share > 0:
                return f"dropout of {share:g} ({name})"
    return ""
