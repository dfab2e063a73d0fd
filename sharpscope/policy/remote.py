"""Generate completions with an external engine, and keep its weights in sync with the policy.

The engine's log-probabilities are stored as `behavior_logp`. The denominator of the ratio is the trainer's own
log-probability, and the difference of the two is recorded for every token.
"""

from __future__ import annotations

import math
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from sharpscope.config.policy import LocalBackend, SamplingSpec, ServerBackend, VllmBackend
from sharpscope.errors import UserError
from sharpscope.policy.conversation import as_text
from sharpscope.policy.decoding import Output
from sharpscope.policy.loading import Policy
from sharpscope.policy.servers import FIELD, Answer, Server


class Engine(Protocol):
    """An engine that generates completions."""

    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        spec: SamplingSpec,
        seeds: Sequence[int],
        eos_ids: Sequence[int],
    ) -> list[list[Answer]]:
        """Generate `group_size` completions per prompt."""
        ...

    def read_weights(self, folder: Path) -> None:
        """Load the safetensors checkpoint in `folder`."""
        ...


class VllmEngine:
    """vLLM in this process. It starts with the first weights, and reads weights from disk, as a server does."""

    def __init__(self, spec: VllmBackend) -> None:
        self.spec = spec
        self._llm: Any = None
        try:
            import vllm
        except ImportError:
            raise UserError(
                f"{FIELD}.kind = vllm: vLLM is not installed; pip install 'sharpscope[vllm]', or use backend server"
            ) from None
        self._vllm = vllm

    def read_weights(self, folder: Path) -> None:
        """Start with the safetensors checkpoint in `folder`, or load it in place."""
        if self._llm is None:
            self._llm = self._vllm.LLM(
                model=str(folder),
                dtype=self.spec.dtype,
                gpu_memory_utilization=self.spec.memory,
                enforce_eager=self.spec.enforce_eager,
                logprobs_mode=f"{self.spec.logprobs}_logprobs",
            )
            return
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self._llm.reset_prefix_cache()

    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        spec: SamplingSpec,
        seeds: Sequence[int],
        eos_ids: Sequence[int],
    ) -> list[list[Answer]]:
        """Generate `group_size` completions per prompt in one call of the engine.

        Raises:
            UserError: The engine returns no log-probabilities.
        """
        parameters = [
            self._vllm.SamplingParams(
                n=group_size,
                temperature=spec.temperature,
                top_p=spec.top_p,
                top_k=spec.top_k or -1,
                seed=seed,
                max_tokens=spec.max_new_tokens,
                stop_token_ids=list(eos_ids),
                logprobs=1,
                detokenize=False,
            )
            for seed in seeds
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        results = self._llm.generate(inputs, parameters, use_tqdm=False)
        return [[_vllm_answer(output, eos_ids) for output in result.outputs] for result in results]


def _vllm_answer(output: Any, eos_ids: Sequence[int]) -> Answer:
    ids = [int(token) for token in output.token_ids]
    if not ids or output.logprobs is None or len(output.logprobs) != len(ids):
        raise UserError(f"{FIELD}.kind = vllm: the engine returned {len(ids)} tokens without their log-probabilities")
    entries = [logprobs.get(token) for token, logprobs in zip(ids, output.logprobs, strict=True)]
    logp = [math.nan if entry is None or entry.logprob is None else float(entry.logprob) for entry in entries]
    return Answer(ids, logp, ids[-1] in eos_ids)


class Remote:
    """The engine of a policy; its weights are updated after the policy's weights change."""

    def __init__(self, policy: Policy, spec: SamplingSpec) -> None:
        backend = spec.backend
        self._version = -1  # version of the engine's weights
        self._count = 0
        self._label = f"weights-{secrets.token_hex(4)}"  # several runs can share a folder
        self._folder: Path | None = None
        self._engine: Engine
        if isinstance(backend, ServerBackend):
            if backend.sync != "none":
                self._folder = Path(backend.folder)
            self._engine = Server(backend)
        else:
            assert not isinstance(backend, LocalBackend)
            if not backend.folder:
                self._temporary = tempfile.TemporaryDirectory(prefix="sharpscope-vllm-")  # deleted with this object
            self._folder = Path(backend.folder or self._temporary.name)
            self._engine = VllmEngine(backend)
        if self._folder is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UserError(
                f"{FIELD}.kind = {backend.kind}: weight sync supports one process, and this run has {dist.get_world_size()}; launch "
                "one, or use backend local"
            )
        if self._folder is not None and hasattr(policy.model, "peft_config"):
            raise UserError(
                f"{FIELD}.kind = {backend.kind}: weight sync does not support adapters (policy.lora); train all weights, or use "
                "backend local"
            )

    def draw(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        spec: SamplingSpec,
        seed: int,
        first: int,
    ) -> list[Answer]:
        """Return N = prompts × `group_size` answers, those of a prompt adjacent. See `sharpscope.policy.generate`."""
        self._sync(policy)
        seeds = [
            int(torch.randint(2**31 - 1, (), generator=torch.Generator().manual_seed((seed + first + index) % 2**63)))
            for index in range(len(prompts))
        ]
        answers = self._engine.draw(prompts, group_size, spec, seeds, policy.eos_ids)
        return [answer for group in answers for answer in group]

    def _sync(self, policy: Policy) -> None:
        """Load the policy's weights into the engine if they have changed."""
        if self._folder is None:
            return
        version = weight_version(policy.model)
        if version == self._version:
            return
        old = self._folder / f"{self._label}-{self._count}"
        self._count += 1
        new = self._folder / f"{self._label}-{self._count}"  # a new name, so that the engine cannot use a cached model
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
    """A number that increases with every in-place change of a parameter, as by optimizers and load_state_dict."""
    return sum(parameter._version for parameter in model.parameters())


def draw_remotely(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    group_size: int,
    spec: SamplingSpec,
    seed: int,
    first: int,
    out: Output,
) -> list[str]:
    """Fill `out` with completions from the engine of `spec.backend`, and return the N texts.

    `out.logp` is NaN if the engine's log-probabilities are not those of softmax(z/T). This occurs in evaluations only; the
    configuration of a run excludes it. See `sharpscope.policy.generate` for the arguments.

    Raises:
        UserError: The engine is not available, rejects a request, or returns an invalid answer.
    """
    engines = _remotes.setdefault(policy.model, {})
    key = spec.backend.model_dump_json()
    if key not in engines:
        engines[key] = Remote(policy, spec)
    answers = engines[key].draw(policy, prompts, group_size, spec, seed, first)
    has_logp = _reports_logp(spec)
    vocabulary = policy.head.weight.shape[0]
    for row, answer in enumerate(answers):
        n = len(answer.ids)
        if max(answer.ids) >= vocabulary:
            raise UserError(
                f"{FIELD}: the engine returned token {max(answer.ids)}, and the policy has {vocabulary} tokens; serve the same model"
            )
        out.ids[row, :n] = torch.tensor(answer.ids)
        out.own[row, :n] = True
        out.logp[row, :n] = torch.tensor(answer.logp) if has_logp else math.nan
        out.sampler_logp[row, :n] = math.nan  # engines report one of the two
        out.length[row] = n
        out.truncated[row] = not answer.stopped
    return [as_text(policy.tokenizer, answer.ids[: len(answer.ids) - answer.stopped]) for answer in answers]


def _reports_logp(spec: SamplingSpec) -> bool:
    """Whether the engine returns ln softmax(z/T) (T = 1 for greedy completions) before top-p and top-k."""
    assert not isinstance(spec.backend, LocalBackend)
    if spec.backend.logprobs == "raw":
        return spec.temperature in (0, 1)
    return spec.temperature > 0 and spec.top_p == 1 and spec.top_k == 0
