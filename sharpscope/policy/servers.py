"""A client of OpenAI's completions protocol as `vllm serve` speaks it: prompts and answers as token ids."""

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
PAUSE_S = (0.25, 8.0)  # before the first repetition, and at most
TOKEN_ID = "token_id:"  # how vLLM writes a token's number where it stands for its text


@dataclass(frozen=True)
class Answer:
    """One completion: token ids, the sampler's log-probability of each [nats, NaN where unknown], and how it ended."""

    ids: list[int]
    logp: list[float]
    stopped: bool  # by an end-of-text token, not by the limit


class Server:
    """Draws completions from a server. Safe to call from several threads."""

    def __init__(self, spec: ServerBackend) -> None:
        self.spec = spec
        self._url = spec.url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if spec.api_key_variable:
            key = os.environ.get(spec.api_key_variable)
            if not key:
                raise UserError(
                    f"{FIELD}.api_key_variable = {spec.api_key_variable}: that environment variable is not set"
                )
            self._headers["Authorization"] = f"Bearer {key}"
        # A proxy of the environment is for other machines.
        local = urlsplit(self._url).hostname in ("localhost", "127.0.0.1", "::1")
        handlers = [urllib.request.ProxyHandler({})] if local else []
        self._opener = urllib.request.build_opener(*handlers)
        self._model = spec.model

    def draw(
        self, prompts: Sequence[Sequence[int]], group_size: int, spec: SamplingSpec, seeds: Sequence[int],
        eos_ids: Sequence[int],
    ) -> list[list[Answer]]:  # fmt: skip
        """`group_size` completions of each prompt, one request a prompt, each with its seed.

        Raises:
            UserError: no answer after all repetitions, or an answer that is not what was asked for.
        """
        model = self._model = self._model or self._only_model()
        with ThreadPoolExecutor(min(self.spec.concurrency, max(len(prompts), 1))) as pool:
            asked = [
                pool.submit(self._one, _request(model, prompt, group_size, spec, seed, eos_ids), group_size, spec, eos_ids)
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]  # fmt: skip
            try:
                return [one.result() for one in asked]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # the first failure ends the round
                raise

    def read_weights(self, folder: Path) -> None:
        """Tell the server to load the safetensors checkpoint in `folder`, and to forget what it computed with the old one.

        Raises:
            UserError: it cannot, or does not say that it has.
        """
        root = self._url.removesuffix("/v1")
        if self.spec.sync == "sglang":
            answer = self._post(f"{root}/update_weights_from_disk", {"model_path": str(folder)})
            if not (isinstance(answer, dict) and answer.get("success")):
                raise UserError(
                    f"{FIELD}.sync = sglang: the server did not load {folder}: {_short(answer)}; is the folder visible to it?"
                )
            return
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._post(f"{root}/collective_rpc", body, empty=True)
        self._post(f"{root}/reset_prefix_cache", {}, empty=True)

    # -- one request -------------------------------------------------------------------------------------------------

    def _one(self, body: dict[str, Any], group_size: int, spec: SamplingSpec, eos_ids: Sequence[int]) -> list[Answer]:
        answer = self._post(f"{self._url}/completions", body)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if [choice["index"] for choice in choices] != list(range(group_size)):
                raise ValueError(f"{len(choices)} choices instead of {group_size}")
            return [_answer(choice, spec.max_new_tokens, eos_ids) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{FIELD}.url = {self.spec.url}: an answer that is not of the completions protocol with token ids ({what}); "
                "use a recent vllm serve"
            ) from error

    def _only_model(self) -> str:
        answer = self._send(f"{self._url}/models", None)
        try:
            names = [str(model["id"]) for model in answer["data"]]
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{FIELD}.url = {self.spec.url}: no list of models there; is it the address with /v1?"
            ) from error
        if len(names) != 1:
            raise UserError(f"{FIELD}.model: the server has {', '.join(names[:5]) or 'none'}; name one")
        return names[0]

    def _post(self, url: str, body: dict[str, Any], empty: bool = False) -> Any:
        return self._send(url, json.dumps(body).encode(), empty)

    def _send(self, url: str, data: bytes | None, empty: bool = False) -> Any:
        """The JSON answer; `empty` answers count as None. What may pass by itself is tried again."""
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
                if error.code < 500 and error.code not in (408, 425, 429):  # a request that is wrong stays wrong
                    raise UserError(
                        f"{FIELD}.url = {url}: refused with {problem}; {_advice(url, error.code)}"
                    ) from error
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{FIELD}.url = {url}: the answer is not JSON; is there another service at this address?"
                ) from error
            except TimeoutError:
                problem = f"no answer within {self.spec.timeout_s:g} s"
            except OSError as error:
                reason = getattr(error, "reason", error)
                late = isinstance(reason, TimeoutError)
                problem = f"no answer within {self.spec.timeout_s:g} s" if late else _short(reason)
            except HTTPException as error:  # the connection ended in the middle of an answer
                problem = _short(error)
        tries = self.spec.retries + 1
        raise UserError(
            f"{FIELD}.url = {url}: {problem} ({tries} {'try' if tries == 1 else 'tries'}); is the server running, and "
            "timeout_s long enough?"
        )


def _request(
    model: str, prompt: Sequence[int], group_size: int, spec: SamplingSpec, seed: int, eos_ids: Sequence[int]
) -> dict[str, Any]:
    """Everything that bears on sampling is said: a server's defaults may come from the model's generation config."""
    return {
        "model": model, "prompt": list(prompt), "n": group_size, "max_tokens": spec.max_new_tokens, "seed": seed,
        "temperature": spec.temperature, "top_p": spec.top_p, "top_k": spec.top_k or -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": list(eos_ids),
        "logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False,
        "stream": False,
    }  # fmt: skip


def _answer(choice: dict[str, Any], limit: int, eos_ids: Sequence[int]) -> Answer:
    """One choice as ids and log-probabilities.

    Raises:
        KeyError, TypeError, ValueError: it has not both, or they do not fit together.
    """
    scores = choice["logprobs"]
    if scores is None:
        raise ValueError("logprobs is null")
    logp = [math.nan if value is None else float(value) for value in scores["token_logprobs"]]
    ids = choice.get("token_ids")
    if ids is None:  # older servers, and others than vLLM: numbers stand in the tokens' texts
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
