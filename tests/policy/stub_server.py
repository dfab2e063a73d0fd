"""A completions server on this machine that speaks `vllm serve`'s protocol with a model of its own, and can misbehave."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

Fault = Callable[["_Handler", dict[str, Any]], None]


class StubServer:
    """Serves `model` (its own copy) under the name `tiny`; `requests` are the bodies it got, by path.

    `faults` are used up one a request to /v1/completions, before it behaves. `processed`: log-probabilities after
    temperature, top-p and top-k, as with --logprobs-mode processed_logprobs. `token_ids`: whether answers have that field.
    """

    def __init__(
        self, model: nn.Module, *, processed: bool = False, token_ids: bool = True, dev_mode: bool = True
    ) -> None:
        self.model, self.processed, self.token_ids, self.dev_mode = model.eval(), processed, token_ids, dev_mode
        self.faults: list[Fault] = []
        self.requests: dict[str, list[Any]] = {}
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()

    def __enter__(self) -> StubServer:
        stub = self

        class Handler(_Handler):
            server_stub = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """All choices of a request, one after the other."""
        choices = []
        for index in range(body["n"]):
            generator = torch.Generator().manual_seed(body["seed"] + index)
            ids, scores = list(body["prompt"]), []
            reason = "length"
            for _ in range(body["max_tokens"]):
                logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1].double()
                raw = logits.log_softmax(-1)
                if body["temperature"] == 0:
                    token, shown = int(logits.argmax()), raw
                else:
                    shown = (logits / body["temperature"]).log_softmax(-1)
                    if body["top_k"] > 0:
                        kept = shown >= shown.topk(body["top_k"]).values.min()
                        shown = torch.where(kept, shown, -torch.inf).log_softmax(-1)
                    token = int(torch.multinomial(shown.exp(), 1, generator=generator))
                scores.append(float((shown if self.processed else raw)[token]))
                ids.append(token)
                if token in body["stop_token_ids"]:
                    reason = "stop"
                    break
            written = ids[len(body["prompt"]) :]
            choice = {
                "index": index,
                "text": "",
                "finish_reason": reason,
                "logprobs": {"token_logprobs": scores, "tokens": [f"token_id:{i}" for i in written]},
            }
            choices.append(choice | ({"token_ids": written} if self.token_ids else {}))
        return {"id": "cmpl-1", "object": "text_completion", "model": "tiny", "choices": choices[::-1]}


class _Handler(BaseHTTPRequestHandler):
    server_stub: StubServer

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, content: Any, status: int = 200) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "tiny"}]} if self.path == "/v1/models" else {}, 200)

    def do_POST(self) -> None:
        stub = self.server_stub
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stub.lock:
            stub.requests.setdefault(self.path, []).append(body)
            stub.headers.append(dict(self.headers))
            fault = stub.faults.pop(0) if stub.faults and self.path == "/v1/completions" else None
        if fault is not None:
            fault(self, body)
        elif self.path == "/v1/completions":
            with stub.lock:
                found = stub.complete(body)
            self.answer(found)
        elif self.path == "/collective_rpc" and stub.dev_mode and body["method"] == "reload_weights":
            self._load(body["kwargs"]["weights_path"])
            self.answer(b"")
        elif self.path == "/reset_prefix_cache" and stub.dev_mode:
            self.answer(b"")
        elif self.path == "/update_weights_from_disk":
            try:
                self._load(body["model_path"])
                self.answer({"success": True, "message": "Succeeded"})
            except OSError:
                self.answer({"success": False, "message": "no such folder"})
        else:
            self.answer({"detail": "Not Found"}, 404)

    def _load(self, folder: str) -> None:
        with self.server_stub.lock:
            self.server_stub.model.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=False)


def status(code: int, text: str = "overloaded") -> Fault:
    """An error status with a message."""
    return lambda handler, _: handler.answer({"error": {"message": text}}, code)


def slow(seconds: float) -> Fault:
    """An answer that comes too late."""

    def wait(handler: _Handler, _: dict[str, Any]) -> None:
        time.sleep(seconds)
        with contextlib.suppress(OSError):  # the client has hung up
            handler.answer({"choices": []})

    return wait


def text(content: bytes) -> Fault:
    """Some bytes instead of an answer."""
    return lambda handler, _: handler.answer(content)


def hang_up(handler: _Handler, _: dict[str, Any]) -> None:
    """The connection ends in the middle of the answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.close_connection = True


def changed(change: Callable[[dict[str, Any]], None]) -> Fault:
    """The right answer with its first choice changed in place."""

    def send(handler: _Handler, body: dict[str, Any]) -> None:
        found = handler.server_stub.complete(body)
        change(found["choices"][-1])
        handler.answer(found)

    return send
