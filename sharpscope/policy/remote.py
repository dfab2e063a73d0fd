"""Completions that another engine writes: which one, whether it has the policy's weights, and its answers as our own.

What an engine says of its tokens is kept as `behavior_logp`; the trainer's own log-probabilities stay the denominator of
the ratio, and the difference of the two is recorded for every token.
"""

from __future__ import annotations

import math
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from sharpscope.config.policy import LocalBackend, SamplingSpec, ServerBackend
from sharpscope.errors import UserError
from sharpscope.policy.conversation import as_text
from sharpscope.policy.decoding import Output
from sharpscope.policy.loading import Policy
from sharpscope.policy.servers import FIELD, Answer, Server


class Engine(Protocol):
    """Something that writes completions."""

    def draw(
        self, prompts: Sequence[Sequence[int]], group_size: int, spec: SamplingSpec, seeds: Sequence[int],
        eos_ids: Sequence[int],
    ) -> list[list[Answer]]:  # fmt: skip
        """`group_size` completions of each prompt."""
        ...

    def read_weights(self, folder: Path) -> None:
        """Load the safetensors checkpoint in `folder`."""
        ...


class Remote:
    """One engine on behalf of one policy. Its weights are refreshed when the policy's have changed since."""

    def __init__(self, policy: Policy, spec: SamplingSpec) -> None:
        backend = spec.backend
        self._version = -1  # of the weights that the engine has
        self._count = 0
        self._label = f"weights-{secrets.token_hex(4)}"  # several runs may share a folder
        self._folder: Path | None = None
        self._engine: Engine
        if isinstance(backend, ServerBackend):
            if backend.sync != "none":
                self._folder = Path(backend.folder)
            self._engine = Server(backend)
        else:
            from sharpscope.policy.engines import VllmEngine

            assert not isinstance(backend, LocalBackend)
            if not backend.folder:
                self._temporary = tempfile.TemporaryDirectory(prefix="sharpscope-vllm-")  # goes when this object goes
            self._folder = Path(backend.folder or self._temporary.name)
            self._engine = VllmEngine(backend)
        if self._folder is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UserError(
                f"{FIELD}.kind = {backend.kind}: weights are handed over by one process, and this run has {dist.get_world_size()}; "
                "launch one, or use backend local"
            )
        if self._folder is not None and hasattr(policy.model, "peft_config"):
            raise UserError(
                f"{FIELD}.kind = {backend.kind}: the weights of adapters (policy.lora) cannot be handed over; train all weights, or "
                "use backend local"
            )

    def draw(
        self, policy: Policy, prompts: Sequence[Sequence[int]], group_size: int, spec: SamplingSpec, seed: int, first: int
    ) -> list[Answer]:  # fmt: skip
        """N = prompts × `group_size` answers, those of a prompt adjacent. See `sharpscope.policy.generate`."""
        self._refresh(policy)
        seeds = [
            int(torch.randint(2**31 - 1, (), generator=torch.Generator().manual_seed((seed + first + index) % 2**63)))
            for index in range(len(prompts))
        ]
        answers = self._engine.draw(prompts, group_size, spec, seeds, policy.eos_ids)
        return [answer for group in answers for answer in group]

    def _refresh(self, policy: Policy) -> None:
        """Hand the policy's weights over if they are not those that the engine has."""
        if self._folder is None:
            return
        version = weight_version(policy.model)
        if version == self._version:
            return
        old = self._folder / f"{self._label}-{self._count}"
        self._count += 1
        new = (
            self._folder / f"{self._label}-{self._count}"
        )  # a fresh name each time: no cache of the engine's can be meant
        try:
            new.mkdir(parents=True)
            policy.model.save_pretrained(new, safe_serialization=True)  # type: ignore[operator]
            policy.tokenizer.save_pretrained(new)
        except OSError as error:
            raise UserError(f"{FIELD}.folder = {self._folder}: cannot be written ({error.strerror})") from error
        self._engine.read_weights(new.resolve())
        self._version = version
        shutil.rmtree(old, ignore_errors=True)


_remotes: WeakKeyDictionary[nn.Module, dict[str, Remote]] = WeakKeyDictionary()


def weight_version(model: nn.Module) -> int:
    """A number that grows whenever a parameter is written in place, as optimizers and load_state_dict do."""
    return sum(parameter._version for parameter in model.parameters())


def draw_remotely(
    policy: Policy, prompts: Sequence[Sequence[int]], group_size: int, spec: SamplingSpec, seed: int, first: int, out: Output
) -> list[str]:  # fmt: skip
    """Fill `out` with completions of `spec.backend`'s engine; returns the N texts. See `sharpscope.policy.generate`.

    Log-probabilities that the engine reports of another distribution than softmax(z/T) are NaN in `out`; that can only be
    so in an evaluation, since a run's own rollouts are checked when it is configured.

    Raises:
        UserError: the engine cannot be reached, refuses, or answers with something else than was asked for.
    """
    engines = _remotes.setdefault(policy.model, {})
    key = spec.backend.model_dump_json()
    if key not in engines:
        engines[key] = Remote(policy, spec)
    answers = engines[key].draw(policy, prompts, group_size, spec, seed, first)
    known = _known(spec)
    vocabulary = policy.head.weight.shape[0]
    for row, answer in enumerate(answers):
        n = len(answer.ids)
        if max(answer.ids) >= vocabulary:
            raise UserError(
                f"{FIELD}: the engine wrote token {max(answer.ids)}, and the policy has {vocabulary}; it runs another model"
            )
        out.ids[row, :n] = torch.tensor(answer.ids)
        out.own[row, :n] = True
        out.logp[row, :n] = torch.tensor(answer.logp) if known else math.nan
        out.sampler_logp[row, :n] = math.nan  # an engine reports one of the two
        out.length[row] = n
        out.truncated[row] = not answer.stopped
    return [as_text(policy.tokenizer, answer.ids[: len(answer.ids) - answer.stopped]) for answer in answers]


def _known(spec: SamplingSpec) -> bool:
    """Whether the engine's log-probabilities are ln softmax(z/T) (T = 1 for greedy completions), before top-p and top-k."""
    assert not isinstance(spec.backend, LocalBackend)
    if spec.backend.logprobs == "raw":
        return spec.temperature in (0, 1)
    return spec.temperature > 0 and spec.top_p == 1 and spec.top_k == 0
