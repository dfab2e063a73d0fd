"""Client for OpenAI's completions API with token ids, as in `vllm serve`."""

from __future__ import annotations

import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sharpscope.config.policy import SamplingSpec, ServerBackend
from sharpscope.errors import UserError

FIELD = "rollout.backend"
PAUSE_S = (0.25, 8.0)  # before the first retry, and maximum
TOKEN_ID = "token_id:"  # prefix of vLLM's token strings with return_tokens_as_token_ids


@dataclass(frozen=True)
class Answer:
    """A completion.

    Attributes:
        ids: Token ids.
        logp: The sampler's log-probabilities [nats], NaN if unknown.
        stopped: True if an end-of-text token ended it, False if the limit did.
    """

    ids: list[int]
    logp: list[float]
    stopped: bool


class Server:
    """A server that generates completions. Thread-safe."""

    def __init__(self, spec: ServerBackend) -> None:
        self.spec = spec
        self._url = spec.url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if spec.api_key_variable:
            key = os.environ.get(spec.api_key_variable)
            if not key:
                raise UserError(
                    f"{FIELD}.api_key_variable = {spec.api_key_variable}: this environment variable is not set"
                )
            self._headers["Authorization"] = f"Bearer {key}"
        # Do not use the environment's proxy for this machine.
        local = urlsplit(self._url).hostname in ("localhost", "127.0.0.1", "::1")
        handlers = [urllib.request.ProxyHandler({})] if local else []
        self._opener = urllib.request.build_opener(*handlers)
        self._model = spec.model

    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        spec: SamplingSpec,
        seeds: Sequence[int],
        eos_ids: Sequence[int],
    ) -> list[list[Answer]]:
        """Generate `group_size` completions per prompt, with one seeded request per prompt.

        Raises:
            UserError: No answer after all retries, or an invalid answer.
        """
        model = self._model = self._model or self._only_model()
        with ThreadPoolExecutor(min(self.spec.concurrency, max(len(prompts), 1))) as pool:
            futures = [
                pool.submit(
                    self._complete, _request(model, prompt, group_size, spec, seed, eos_ids), group_size, spec, eos_ids
                )
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # the first failure cancels the others
                raise

    def read_weights(self, folder: Path) -> None:
        """Load the safetensors checkpoint in `folder` on the server, and clear its prefix cache.

        Raises:
            UserError: The server does not confirm that the checkpoint is loaded.
        """
        root = self._url.removesuffix("/v1")
        if self.spec.sync == "sglang":
            answer = self._post(f"{root}/update_weights_from_disk", {"model_path": str(folder)})
            if not (isinstance(answer, dict) and answer.get("success")):
                raise UserError(
                    f"{FIELD}.sync = sglang: the server did not load {folder}: {_short(answer)}; check that it can read the folder"
                )
            return
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._post(f"{root}/collective_rpc", body, empty=True)
        self._post(f"{root}/reset_prefix_cache", {}, empty=True)

    def _complete(
        self, body: dict[str, Any], group_size: int, spec: SamplingSpec, eos_ids: Sequence[int]
    ) -> list[Answer]:
        answer = self._post(f"{self._url}/completions", body)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if [choice["index"] for choice in choices] != list(range(group_size)):
                raise ValueError(f"{len(choices)} choices instead of {group_size}")
            return [_answer(choice, spec.max_new_tokens, eos_ids) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            problem = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{FIELD}.url = {self.spec.url}: invalid answer ({problem}); use a server with token ids, such as a recent vllm serve"
            ) from error

    def _only_model(self) -> str:
        answer = self._send(f"{self._url}/models", None)
        try:
            names = [str(model["id"]) for model in answer["data"]]
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{FIELD}.url = {self.spec.url}: returns no list of models; include /v1 in the URL"
            ) from error
        if len(names) != 1:
            raise UserError(f"{FIELD}.model: the server has {', '.join(names[:5]) or 'no models'}; set one of them")
        return names[0]

    def _post(self, url: str, body: dict[str, Any], empty: bool = False) -> Any:
        return self._send(url, json.dumps(body).encode(), empty)

    def _send(self, url: str, data: bytes | None, empty: bool = False) -> Any:
        """Return the JSON answer, or None for an empty one if `empty`. Temporary errors are retried."""
        problem = ""
        for attempt in range(self.spec.retries + 1):
            if attempt:
                time.sleep(min(PAUSE_S[0] * 2 ** (attempt - 1), PAUSE_S[1]))
            request = urllib.request.Request(url, data=data, headers=self._headers)
            try:
                with self._opener.open(request, timeout=self.spec.timeout_s) as response:
                    content = response.read()
                return None if empty and not content.strip() else json.loads(content)
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}: {_short(error.read(2000).decode('utf-8', 'replace'))}"
                if error.code < 500 and error.code not in (408, 425, 429):  # invalid requests are not retried
                    raise UserError(f"{FIELD}.url = {url}: {problem}; {_advice(url, error.code)}") from error
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{FIELD}.url = {url}: the answer is not JSON; check that the URL is that of the server"
                ) from error
            except TimeoutError:
                problem = f"no answer within {self.spec.timeout_s:g} s"
            except OSError as error:
                reason = getattr(error, "reason", error)
                timeout = isinstance(reason, TimeoutError)
                problem = f"no answer within {self.spec.timeout_s:g} s" if timeout else _short(reason)
            except HTTPException as error:  # the connection closed during an answer
                problem = _short(error)
        tries = self.spec.retries + 1
        raise UserError(
            f"{FIELD}.url = {url}: {problem} ({tries} {'try' if tries == 1 else 'tries'}); check that the server is running, or "
            "raise timeout_s"
        )


def _request(
    model: str, prompt: Sequence[int], group_size: int, spec: SamplingSpec, seed: int, eos_ids: Sequence[int]
) -> dict[str, Any]:
    """A request with all sampling parameters, since a server's defaults can come from the model's generation config."""
    return {
        "model": model,
        "prompt": list(prompt),
        "n": group_size,
        "max_tokens": spec.max_new_tokens,
        "seed": seed,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(eos_ids),
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
        "stream": False,
    }


def _answer(choice: dict[str, Any], limit: int, eos_ids: Sequence[int]) -> Answer:
    """Parse a choice into ids and log-probabilities.

    Raises:
        KeyError, TypeError, ValueError: One of them is missing, or they are inconsistent.
    """
    scores = choice["logprobs"]
    if scores is None:
        raise ValueError("logprobs is null")
    logp = [math.nan if value is None else float(value) for value in scores["token_logprobs"]]
    ids = choice.get("token_ids")
    if ids is None:  # older servers and other engines: ids are in the token strings
        if not all(str(token).startswith(TOKEN_ID) for token in scores["tokens"]):
            raise ValueError("neither token_ids nor tokens of the form token_id:N")
        ids = [int(str(token).removeprefix(TOKEN_ID)) for token in scores["tokens"]]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ValueError("token_ids are not whole numbers")
    if not ids or len(ids) != len(logp) or len(ids) > limit:
        raise ValueError(f"{len(ids)} token ids and {len(logp)} log-probabilities for at most {limit} tokens")
    if any(value > 1e-3 or value == -math.inf for value in logp):
        raise ValueError("a log-probability above 0 or minus infinity")
    stopped = ids[-1] in eos_ids
    if not stopped and len(ids) < limit:
        raise ValueError(
            f"a completion of {len(ids)} tokens ended ({choice.get('finish_reason')}) without the policy's end-of-text token"
        )
    return Answer(list(ids), logp, stopped)


def _advice(url: str, code: int) -> str:
    if code == 404 and url.endswith("/collective_rpc"):
        return "start vllm serve with VLLM_SERVER_DEV_MODE=1, or set sync=none"
    if code in (401, 403):
        return "set api_key_variable"
    return "check url, model and the server's --max-model-len"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 200 else text[:197] + "..."
