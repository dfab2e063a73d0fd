"""Generate completions with a server that has OpenAI's completions API with token IDs, as `vllm serve`, and update its weights.

The server's log-probabilities are stored as `behavior_logp`. The denominator of the ratio is the trainer's own
log-probability, and the difference of the two is recorded for every token.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
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
from weakref import WeakKeyDictionary

import torch
from torch import nn

from sharpscope import distributed
from sharpscope.config.policy import SamplingSpec, ServerBackend
from sharpscope.errors import UserError
from sharpscope.policy.adapters import has_adapters
from sharpscope.policy.decoding import Output
from sharpscope.policy.loading import Policy

FIELD = "rollout.backend"
PAUSE_S = (0.25, 8.0)  # before the first retry, and maximum
TOKEN_ID = "token_id:"  # prefix of vLLM's token strings with return_tokens_as_token_ids


@dataclass(frozen=True)
class Answer:
    """A completion.

    Attributes:
        ids: Token IDs.
        logp: The sampler's log-probabilities [nats], NaN if unknown.
        stopped: True if an end-of-text token ended it, False if the limit did.
    """

    ids: list[int]
    logp: list[float]
    stopped: bool


class Server:
    """A server that generates completions with the weights of one policy. Requests run in parallel threads."""

    def __init__(self, spec: ServerBackend, policy: Policy) -> None:
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
        self._version, self._count = -1, 0  # of the weights on the server
        self._label = f"weights-{secrets.token_hex(4)}"  # several runs can share a folder
        if spec.sync != "none" and (distributed.world_size() > 1 or has_adapters(policy.model)):
            raise UserError(
                f"{FIELD}.sync = {spec.sync}: supports one process and no adapters (policy.lora); launch one process that trains "
                "all weights, or set rollout.backend=null"
            )

    def draw(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        spec: SamplingSpec,
        seeds: Sequence[int],
    ) -> list[Answer]:
        """Generate `group_size` completions per prompt, those of a prompt adjacent, with one seeded request per prompt.

        Raises:
            UserError: No answer after all retries, or an invalid answer.
        """
        self._sync(policy)
        model = self._model = self._model or self._only_model()
        with ThreadPoolExecutor(min(self.spec.concurrency, max(len(prompts), 1))) as pool:
            futures = [
                pool.submit(
                    self._complete,
                    _request(model, prompt, group_size, spec, seed, policy.eos_ids),
                    spec,
                    policy.eos_ids,
                )
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
            try:
                return [answer for future in futures for answer in future.result()]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # the first failure cancels the others
                raise

    def _sync(self, policy: Policy) -> None:
        """Save the policy's weights and load them on the server, if they have changed."""
        version = weight_version(policy.model)
        if self.spec.sync == "none" or version == self._version:
            return
        folder = Path(self.spec.folder)
        old = folder / f"{self._label}-{self._count}"
        self._count += 1
        new = folder / f"{self._label}-{self._count}"  # a new name, so that the server cannot use a cached model
        try:
            new.mkdir(parents=True)
            policy.model.save_pretrained(new, safe_serialization=True)  # type: ignore[operator]
            policy.tokenizer.save_pretrained(new)
        except OSError as error:
            raise UserError(f"{FIELD}.folder = {folder}: cannot be written ({error.strerror})") from error
        self._read_weights(new.resolve())
        self._version = version
        shutil.rmtree(old, ignore_errors=True)

    def _read_weights(self, folder: Path) -> None:
        """Load the safetensors checkpoint in `folder` on the server, and clear its prefix cache."""
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

    def _complete(self, body: dict[str, Any], spec: SamplingSpec, eos_ids: Sequence[int]) -> list[Answer]:
        answer = self._post(f"{self._url}/completions", body)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if [choice["index"] for choice in choices] != list(range(body["n"])):
                raise ValueError(f"{len(choices)} choices instead of {body['n']}")
            return [_answer(choice, spec.max_new_tokens, eos_ids) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            problem = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{FIELD}.url = {self.spec.url}: invalid answer ({problem}); use a server with token IDs, such as a recent vllm serve"
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
            except (OSError, HTTPException) as error:  # includes connections that close during an answer
                reason = getattr(error, "reason", error)
                timeout = isinstance(reason, TimeoutError)
                problem = f"no answer within {self.spec.timeout_s:g} s" if timeout else _short(reason)
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
    """Parse a choice into IDs and log-probabilities.

    Raises:
        KeyError, TypeError, ValueError: One of them is missing, or they are inconsistent.
    """
    scores = choice["logprobs"]
    if scores is None:
        raise ValueError("logprobs is null")
    logp = [math.nan if value is None else float(value) for value in scores["token_logprobs"]]
    ids = choice.get("token_ids")
    if ids is None:  # older servers and other engines: IDs are in the token strings
        if not all(str(token).startswith(TOKEN_ID) for token in scores["tokens"]):
            raise ValueError("neither token_ids nor tokens of the form token_id:N")
        ids = [int(str(token).removeprefix(TOKEN_ID)) for token in scores["tokens"]]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ValueError("token_ids are not whole numbers")
    if not ids or len(ids) != len(logp) or len(ids) > limit:
        raise ValueError(f"{len(ids)} token IDs and {len(logp)} log-probabilities for at most {limit} tokens")
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


_servers: WeakKeyDictionary[nn.Module, dict[str, Server]] = WeakKeyDictionary()


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
) -> None:
    """Fill `out` with completions from the server of `spec.backend`; see `sharpscope.policy.generate` for the arguments.

    `out.logp` is NaN if the server's log-probabilities are not those of softmax(z/T). This occurs in evaluations only; the
    configuration of a run excludes it.

    Raises:
        UserError: The server is not available, rejects a request, or returns an invalid answer.
    """
    backend = spec.backend
    assert backend is not None
    servers, key = _servers.setdefault(policy.model, {}), backend.model_dump_json()
    if key not in servers:
        servers[key] = Server(backend, policy)
    seeds = [
        int(torch.randint(2**31 - 1, (), generator=torch.Generator().manual_seed((seed + first + index) % 2**63)))
        for index in range(len(prompts))
    ]
    # softmax(z/T) before top-p and top-k (T = 1 for greedy completions)
    raw = backend.logprobs == "raw"
    plain = spec.temperature > 0 and spec.top_p == 1 and spec.top_k == 0
    has_logp = spec.temperature in (0, 1) if raw else plain
    vocabulary = policy.head.weight.shape[0]
    for row, answer in enumerate(servers[key].draw(policy, prompts, group_size, spec, seeds)):
        n = len(answer.ids)
        if max(answer.ids) >= vocabulary:
            raise UserError(
                f"{FIELD}: the server returned token {max(answer.ids)}, and the policy has {vocabulary} tokens; serve the same model"
            )
        out.ids[row, :n] = torch.tensor(answer.ids)
        out.sampled[row, :n] = True
        out.logp[row, :n] = torch.tensor(answer.logp) if has_logp else math.nan
        out.sampler_logp[row, :n] = math.nan  # servers report one of the two
        out.length[row] = n
        out.truncated[row] = not answer.stopped
