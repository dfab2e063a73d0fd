"""Rollouts by a server: the protocol, what its log-probabilities are, how it gets weights, and everything that can go wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from sharpscope.errors import UserError
from sharpscope.policy import Environment, Policy, RolloutSpec, generate, score_completions
from tests.policy.helpers import random_prompts, tiny_policy
from tests.policy.stub_server import StubServer, changed, hang_up, slow, status, text

PROMPTS = random_prompts((3, 5, 4))


@pytest.fixture
def policy() -> Policy:
    return tiny_policy(dtype=torch.float32)


def spec(stub: StubServer, backend: dict[str, Any] | None = None, **fields: Any) -> RolloutSpec:
    return RolloutSpec(
        max_new_tokens=6,
        **fields,
        backend={"kind": "server", "url": stub.url, "retries": 1, "timeout_s": 5} | (backend or {}),
    )


def draw(policy: Policy, settings: RolloutSpec, seed: int = 0, group_size: int = 4, **more: Any) -> Any:
    return generate(policy, PROMPTS, group_size, settings, torch.Generator().manual_seed(seed), **more)


@pytest.mark.parametrize("token_ids", [True, False])
def test_completions_and_their_log_probabilities(policy, token_ids):
    """Equal weights there and here: the server's log-probabilities are the trainer's; rows of a prompt are adjacent."""
    with StubServer(copy.deepcopy(policy.model), token_ids=token_ids) as stub:
        found = draw(policy, spec(stub))
    assert len(found) == 12 and found.group.tolist() == [i // 4 for i in range(12)]
    mine = score_completions(policy.model, found, 1.0, share_prompt=False, with_grad=False).logp
    torch.testing.assert_close(found.behavior_logp, mine, atol=2e-5, rtol=1e-5)
    assert (mine[found.completion_mask.bool()] < -0.1).any()
    for row in range(12):
        n = int(found.lengths[row])
        ids = found.completion_ids[row, :n].tolist()
        assert bool(found.truncated[row]) == (ids[-1] != 1) and (n == 6 or ids[-1] == 1) and 1 not in ids[:-1]
        spoken = ids[:-1] if ids[-1] == 1 else ids
        assert found.texts[row] == policy.tokenizer.decode(spoken)
        prompt = found.input_ids[row, : found.prompt_width][found.attention_mask[row, : found.prompt_width].bool()]
        assert prompt.tolist() == PROMPTS[row // 4]
    assert len(set(map(tuple, found.completion_ids[:4].tolist()))) > 1


def test_processed_log_probabilities_at_another_temperature(policy):
    with StubServer(copy.deepcopy(policy.model), processed=True) as stub:
        found = draw(policy, spec(stub, {"logprobs": "processed"}, temperature=0.7))
        mine = score_completions(policy.model, found, 0.7, share_prompt=False, with_grad=False).logp
        torch.testing.assert_close(found.behavior_logp, mine, atol=2e-5, rtol=1e-5)
        # In an evaluation other settings are drawn from; what is not known is not a number.
        greedy = spec(stub, {"logprobs": "processed"}).model_copy(update={"temperature": 0.0})
        assert draw(policy, greedy).behavior_logp[:, 0].isnan().all()


@pytest.mark.parametrize(
    ("fields", "backend", "message"),
    [
        ({"temperature": 0.7}, {}, "raw log-probabilities, at temperature 1"),
        ({"top_p": 0.9}, {"logprobs": "processed"}, "include them; turn them off"),
        ({}, {"sync": "vllm"}, "needs a folder"),
        ({}, {"folder": "x"}, "takes no folder"),
        ({}, {"url": "localhost:8000"}, "string should match"),
    ],
)
def test_settings_that_would_record_something_else_are_refused(fields, backend, message):
    kind = {"kind": "server"} | backend
    with pytest.raises(ValidationError, match=f"(?i){message}"):
        RolloutSpec(**fields, backend=kind)


# -- weights ---------------------------------------------------------------------------------------------------------


def test_stale_weights_show_as_mismatch_and_sync_removes_it(policy, tmp_path: Path):
    with StubServer(copy.deepcopy(policy.model)) as stub:
        stale = spec(stub)
        fresh = spec(stub, {"sync": "vllm", "folder": str(tmp_path / "w")})

        def gap(settings: RolloutSpec) -> float:
            found = draw(policy, settings)
            mine = score_completions(policy.model, found, 1.0, share_prompt=False, with_grad=False).logp
            return float((found.behavior_logp - mine).abs().max())

        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.2)
        assert gap(stale) > 0.1
        assert gap(fresh) < 1e-4
        draw(policy, fresh)
        calls = stub.requests["/collective_rpc"]
        assert len(calls) == 1 and calls[0]["method"] == "reload_weights"  # unchanged weights are not sent twice
        assert len(stub.requests["/reset_prefix_cache"]) == 1
        with torch.no_grad():
            next(policy.model.parameters()).add_(0.1)
        assert gap(fresh) < 1e-4
        paths = [call["kwargs"]["weights_path"] for call in calls]
        assert len(set(paths)) == len(paths) == 2
        assert [str(p) for p in (tmp_path / "w").iterdir()] == paths[-1:]  # the older ones are gone


def test_sync_by_sglang(policy, tmp_path: Path):
    with StubServer(copy.deepcopy(policy.model)) as stub:
        with torch.no_grad():
            next(policy.model.parameters()).mul_(2)
        found = draw(policy, spec(stub, {"sync": "sglang", "folder": str(tmp_path)}))
    mine = score_completions(policy.model, found, 1.0, share_prompt=False, with_grad=False).logp
    torch.testing.assert_close(found.behavior_logp, mine, atol=2e-5, rtol=1e-5)
    assert "/collective_rpc" not in stub.requests


def test_sync_that_fails_is_said(policy, tmp_path: Path):
    with StubServer(copy.deepcopy(policy.model), dev_mode=False) as stub:
        with pytest.raises(UserError, match="VLLM_SERVER_DEV_MODE=1"):
            draw(policy, spec(stub, {"sync": "vllm", "folder": str(tmp_path / "a")}))
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="cannot be written"):
            draw(policy, spec(stub, {"sync": "vllm", "folder": str(tmp_path / "file")}))


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [status(503), status(429), hang_up, slow(4.0)])
def test_what_passes_is_tried_again(policy, fault):
    with StubServer(copy.deepcopy(policy.model)) as stub:
        plain = draw(policy, spec(stub))
        stub.faults = [fault]
        again = draw(policy, spec(stub, {"timeout_s": 2.0, "concurrency": 1}))
    assert torch.equal(plain.completion_ids, again.completion_ids)


def drop(name: str) -> Any:
    return changed(lambda choice: choice.pop(name))


def replace(name: str, value: Any) -> Any:
    return changed(lambda choice: choice.update({name: value}))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (text(b"<html>hello</html>"), "not JSON"),
        (text(b"{}"), "no field 'choices'"),
        (text(b'{"choices": []}'), "0 choices instead of 4"),
        (text(b"[1, 2]"), "invalid answer"),
        (drop("logprobs"), "no field 'logprobs'"),
        (replace("logprobs", None), "logprobs is null"),
        (replace("token_ids", [3, 4]), "2 token IDs and"),
        (replace("token_ids", ["a"]), "not whole numbers"),
        (changed(lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, 0.5)), "above 0"),
        (changed(lambda c: c.update(token_ids=[999, *c["token_ids"][1:]])), "returned token 999"),
        (
            changed(lambda c: (c.update(token_ids=[5]), c["logprobs"].update(token_logprobs=[-1.0]))),
            "without the policy's end",
        ),
        (
            changed(lambda c: c.update(token_ids=[5] * 9) or c["logprobs"].update(token_logprobs=[-1.0] * 9)),
            "at most 6",
        ),
        (changed(lambda c: c.pop("token_ids") and c["logprobs"].update(tokens=["a"])), "neither token_ids"),
        (status(400, "max_tokens is too large"), "max_tokens is too large"),
        (status(401), "api_key_variable"),
    ],
)
def test_wrong_answers_are_named_and_not_tried_again(policy, fault, message):
    with StubServer(copy.deepcopy(policy.model)) as stub:
        stub.faults = [fault]
        with pytest.raises(UserError, match=message):
            draw(policy, spec(stub, {"concurrency": 1}))
        assert sum(body["prompt"] == PROMPTS[0] for body in stub.requests["/v1/completions"]) == 1


def test_no_answer_after_all_tries(policy, monkeypatch):
    monkeypatch.setattr("sharpscope.policy.servers.PAUSE_S", (0.01, 0.01))
    with StubServer(copy.deepcopy(policy.model)) as stub:
        stub.faults = [status(500, "out of memory")] * 50
        with pytest.raises(UserError, match=r"status 500: .*out of memory.* \(3 tries\)"):
            draw(policy, spec(stub, {"retries": 2}))
        stub.faults = [slow(0.6)] * 50
        with pytest.raises(UserError, match=r"no answer within 0.2 s \(1 try\)"):
            draw(policy, spec(stub, {"retries": 0, "timeout_s": 0.2, "concurrency": 1}))
        gone = spec(stub, {"retries": 0})
    with pytest.raises(UserError, match=r"refused.*check that the server is running"):
        draw(policy, gone)


def test_models_keys_and_environments(policy, monkeypatch):
    with StubServer(copy.deepcopy(policy.model)) as stub:
        with pytest.raises(UserError, match="MY_KEY: this environment variable is not set"):
            draw(policy, spec(stub, {"api_key_variable": "MY_KEY"}))
        monkeypatch.setenv("MY_KEY", "secret")
        draw(policy, spec(stub, {"api_key_variable": "MY_KEY", "model": "mine"}))
        assert stub.headers[-1]["Authorization"] == "Bearer secret"
        assert stub.requests["/v1/completions"][-1]["model"] == "mine"
        with pytest.raises(UserError, match="interactive tasks"):
            draw(policy, spec(stub), environment=Environment(None, []))  # type: ignore[arg-type]
        stub_models = {"data": [{"id": "a"}, {"id": "b"}]}
        monkeypatch.setattr("tests.policy.stub_server._Handler.do_GET", lambda handler: handler.answer(stub_models))
        with pytest.raises(UserError, match="the server has a, b; set one of them"):
            draw(tiny_policy(dtype=torch.float32), spec(stub))
        with monkeypatch.context() as several:
            several.setattr("sharpscope.distributed.world_size", lambda: 2)
            with pytest.raises(UserError, match="supports one process"):
                draw(tiny_policy(dtype=torch.float32), spec(stub, {"sync": "vllm", "folder": "x"}))
        monkeypatch.setattr("sharpscope.policy.servers.has_adapters", lambda model: True)
        with pytest.raises(UserError, match="no adapters"):
            draw(tiny_policy(dtype=torch.float32), spec(stub, {"sync": "vllm", "folder": "x"}))


def test_a_run_trains_on_a_servers_completions(toy_config, tiny_policy, tmp_path: Path):
    """With sync the mismatch recorded per token is rounding; without it the health rule speaks."""
    import sharpscope
    from sharpscope.config.policy import PolicySpec
    from sharpscope.policy import load_policy
    from sharpscope.training import train

    model = load_policy(PolicySpec(model=str(tiny_policy), device="cpu")).model
    with StubServer(model) as stub:
        backend = {"kind": "server", "url": stub.url}
        synced = backend | {"sync": "vllm", "folder": str(tmp_path / "weights")}
        for name, part in (("synced", synced), ("stale", backend)):
            train(toy_config(name=name, rollout__backend=part, evaluation__every=0, steps=3, optimizer__lr=0.05))
    for name in ("synced", "stale"):
        run = sharpscope.load_run(tmp_path / name)
        tokens = run.tokens()
        gap = (tokens["logp"] - tokens["behavior_logp"]).abs().groupby(tokens["step"]).mean()
        if name == "synced":
            assert (gap < 1e-4).all() and "logp_mismatch" not in set(run.events["rule"])
            assert len(run.steps) == 3 and (run.steps["grad_norm"] > 0).all()
        else:
            assert gap[3] > 0.05 and "logp_mismatch" in set(run.events["rule"])
