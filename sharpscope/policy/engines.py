"""vLLM in this process. It reads weights from disk, as a server would, so that nothing depends on its insides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharpscope.config.policy import SamplingSpec, VllmBackend
from sharpscope.errors import UserError
from sharpscope.policy.servers import FIELD, Answer


class VllmEngine:
    """A vllm.LLM that starts with the first weights it is given."""

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
        """Start on the safetensors checkpoint in `folder`, or load it in place."""
        if self._llm is None:
            self._llm = self._vllm.LLM(
                model=str(folder), dtype=self.spec.dtype, gpu_memory_utilization=self.spec.memory,
                enforce_eager=self.spec.enforce_eager, logprobs_mode=f"{self.spec.logprobs}_logprobs",
            )  # fmt: skip
            return
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self._llm.reset_prefix_cache()

    def draw(
        self, prompts: Sequence[Sequence[int]], group_size: int, spec: SamplingSpec, seeds: Sequence[int],
        eos_ids: Sequence[int],
    ) -> list[list[Answer]]:  # fmt: skip
        """`group_size` completions of each prompt, in one call of the engine.

        Raises:
            UserError: the engine gives no log-probability of a token it has chosen.
        """
        settings = [
            self._vllm.SamplingParams(
                n=group_size, temperature=spec.temperature, top_p=spec.top_p, top_k=spec.top_k or -1, seed=seed,
                max_tokens=spec.max_new_tokens, stop_token_ids=list(eos_ids), logprobs=1, detokenize=False,
            )
            for seed in seeds
        ]  # fmt: skip
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        results = self._llm.generate(asked, settings, use_tqdm=False)
        return [[_answer(output, eos_ids) for output in result.outputs] for result in results]


def _answer(output: Any, eos_ids: Sequence[int]) -> Answer:
    ids = [int(token) for token in output.token_ids]
    if not ids or output.logprobs is None or len(output.logprobs) != len(ids):
        raise UserError(f"{FIELD}.kind = vllm: the engine gave {len(ids)} tokens without their log-probabilities")
    found = [scores.get(token) for token, scores in zip(ids, output.logprobs, strict=True)]
    logp = [math.nan if score is None or score.logprob is None else float(score.logprob) for score in found]
    return Answer(ids, logp, ids[-1] in eos_ids)
