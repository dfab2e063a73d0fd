"""A synthetic study for the tests of figures and tables, and small runs with a spike and texts that try to break a page."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from sharpscope.analysis import analyze
from sharpscope.analysis.claims import REDUCERS
from sharpscope.analysis.output import AnalysisResult
from sharpscope.analysis.study import studies
from sharpscope.analysis.text import shown
from sharpscope.traces import (
    TraceWriter,
    create_run_dir,
    create_run_info,
    load_runs,
    update_run_info,
)
from tests.traces.synthetic import INFO, Effects, Shape, rows, write_study

SPIKE, STEPS = 12, 14
"""The spike's step, after enough others for it to stand out, and the last step."""
LONG = "a" * 1_000_000
HOSTILE = {
    "script": "<script>window.hacked = 1</script>",
    "handler": "<img src=x onerror='window.hacked = 1'>",
    "comment": "--> <!-- <![CDATA[",
    "end": "</script><script>window.hacked = 1</script>",
    "bidi": "safe \u202eevil\u202c \u2067hidden\u2069",
    "separators": "\u2028 \u2029 \x00 \x1b[31m \ud800".encode("utf-8", "replace").decode(),
    "markup": "[a](javascript:alert(1)) **b** | ` {{ 7 * 7 }} ${x}",
}
WORDS = ["yes", " no", "\n", " perhaps", " knight", " knave", *HOSTILE.values(), LONG]
PROMPTS = ["who is a knight?", "who is <b>a</b> knave? \u202e"]
N, TOKENS = 4, 8  # completions of a step (two a prompt), tokens of a completion


def in_file(word: str) -> str:
    """A word as the page holds it: marks by name, and cut."""
    return shown(
        word if word != LONG else f"{LONG[:20_000]} … (980,000 characters more in the traces)"
    )


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose token i is WORDS[i]."""
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="yes")
    )
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def ids_of(step: int, rollout: int) -> list[int]:
    """The tokens of a completion: every word appears in the first step and in the spike."""
    return [(rollout * TOKENS + i) % len(WORDS) for i in range(TOKENS)]


def write_report_run(
    path: Path,
    method: str = "grpo",
    *,
    seed: int = 0,
    spike: bool = True,
    tokens: bool = True,
    tokenizer: bool = True,
    status: str = "finished",
    steps: int = STEPS,
) -> Path:
    """STEPS steps with the texts above; attribution at SPIKE and at the last step."""
    folder = create_run_dir(path)
    config = {"seed": seed, "steps": STEPS, "method": {"name": method}, "optimizer": {"lr": 1e-4}}
    config |= {"note": HOSTILE["script"] + method}
    info = {
        "method": method,
        "seed": seed,
        "config": config,
        "peak_memory_bytes": {"process": 2**30},
    }
    create_run_info(folder, INFO | info)
    if tokenizer:
        write_tokenizer(folder / "tokenizer")
    seconds = {"generation_s": 0.5, "training_s": 0.25, "recording_s": 0.125}
    event = {
        "rule": "saturation",
        "severity": "warning",
        "value": 0.97,
        "threshold": 0.95,
        "action": "warn",
    }
    with TraceWriter(folder) as writer:
        for step in range(1, steps + 1):
            norm = (20.0 if spike and step == SPIKE else 1.0) + 0.01 * (step % 3)
            writer.append("steps", rows("steps", step, 1, seed) | {"grad_norm": norm} | seconds)
            _completions(writer, step, tokens, seed)
        writer.append("events", event | {"step": steps, "message": HOSTILE["handler"]})
    update_run_info(folder, status=status, steps_done=steps)
    return folder


def _completions(writer: TraceWriter, step: int, tokens: bool, seed: int) -> None:
    texts = ["".join(WORDS[i] for i in ids_of(step, n)) for n in range(N)]
    advantage = [1.0, -1.0, 0.5, -0.5]
    answers = {
        "prompt": np.repeat(PROMPTS, 2),
        "completion": texts,
        "reward": [1.0, -1.0, 3.0, 0.0],
    }
    answers |= {
        "reward_parts": [{"answer": 1.0}] * N,
        "correct": [True, False] * 2,
        "advantage": advantage,
    }
    place = {
        "step": step,
        "rollout": np.arange(N),
        "group": [0, 0, 1, 1],
        "length": TOKENS,
        "truncated": False,
    }
    writer.append("rollouts", place | answers)
    if not tokens:
        return
    rng = np.random.default_rng([seed, step])
    count = N * TOKENS
    values = rows("tokens", step, count, seed)
    probed = step in (SPIKE, STEPS)
    share = rng.normal(size=count)
    values |= {
        "rollout": np.repeat(np.arange(N), TOKENS),
        "position": np.tile(np.arange(TOKENS), N),
        "update": 0,
        "token_id": np.concatenate([ids_of(step, n) for n in range(N)]),
        "logp": -np.abs(rng.normal(size=count)).astype(np.float32),
        "weight": (1 + 0.4 * rng.random(count)).astype(np.float32),
        "entropy": rng.random(count).astype(np.float32),
        "advantage": np.repeat(advantage, TOKENS).astype(np.float32),
        "score_norm_local": np.abs(values["score_norm_local"]) if probed else None,
        "attribution": (share / share.sum()).astype(np.float32) if probed else None,
        "heldout_influence": rng.normal(size=count).astype(np.float32) if probed else None,
    }
    absent = (
        "score_norm",
        "score_norm_std_error",
        "score_norm_method",
        "draw_probability",
        "sharp_alignment",
    )
    absent += ("update_attribution", "ref_logp")
    writer.append("tokens", values | {name: None for name in absent if name in values})


SMALL_STEPS, SMALL_PROMPTS = 6, 5
ROTATION = {1: 10.0, 3: 20.0, 6: 33.0}


def values_of(method: str, step: int) -> np.ndarray:
    """SAM sharpness of each prompt: falls by 0.1 a step with grpo-sg, with noise that both methods share."""
    base = np.random.default_rng(step).normal(1.0, 0.3, SMALL_PROMPTS)
    return base - (0.1 * step if method == "grpo-sg" else 0.0)


def write_small(path: Path, method: str, **probe: object) -> Path:
    """A run of SMALL_STEPS steps with rotations, probes and evaluations; `probe`: columns of its SAM estimates."""
    folder = create_run_dir(path)
    config = {
        "seed": 0,
        "steps": SMALL_STEPS,
        "method": {"name": method},
        "optimizer": {"lr": 1e-4},
    }
    create_run_info(
        folder, INFO | {"method": method, "config": config | {"recording": {}, "probes": {}}}
    )
    blank = {
        "parameters": "all",
        "rho": 0.5,
        "seed": 0,
        "functional": "nll",
        "probe_set": "set/train@1",
    }
    with TraceWriter(folder) as writer:
        for step in range(1, SMALL_STEPS + 1):
            turned = ROTATION.get(step)
            turned = turned * 1e-5 if turned and method == "grpo" else turned  # rounding
            angles = {"gradient_rotation": turned, "update_rotation": turned and 2 * turned}
            angles["noise_rotation"] = turned and 45.0
            writer.append("steps", rows("steps", step, 1) | {"reward_mean": 0.1 * step} | angles)
        for step in (0, SMALL_STEPS):
            values = values_of(method, step)
            place = blank | {"step": step, "quantity": "sam"}
            writer.append(
                "probe_prompts", place | {"prompt": np.arange(SMALL_PROMPTS), "value": values}
            )
            row = (
                rows("probes", step, 1)
                | place
                | {"converged": None, "ceiling": None, "saturation": None}
                | {"prompts": SMALL_PROMPTS}
                | probe
            )
            error = values.std(ddof=1) / math.sqrt(SMALL_PROMPTS)
            writer.append("probes", row | {"value": values.mean(), "prompt_std_error": error})
        for step in (1, SMALL_STEPS):
            row = (
                rows("probes", step, 1)
                | blank
                | {"quantity": "critical_sharpness", "converged": True}
            )
            # of an update, on its prompts
            place = {
                "probe_set": "",
                "functional": "surrogate",
                "rho": None,
                "seed": None,
            }
            writer.append("probes", row | place | {"value": 100.0 * step, "prompt_std_error": 10.0})
            row = {
                "step": step,
                "task": INFO["task"],
                "split": "heldout",
                "n": 40,
                "k": 1,
                "std_error": 0.07,
            }
            for heat, level in itertools.product((0.0, 1.0), (2, 3)):
                value = 0.2 * (level - 1) + 0.05 * step + 0.1 * (heat == 0)
                place = {"level": str(level), "accuracy": value, "temperature": heat}
                writer.append("eval", row | place | {"pass_at_k": 0.5, "reward_mean": 0.0})
    update_run_info(folder, status="finished", steps_done=SMALL_STEPS)
    return folder


SHAPE = Shape(steps=6, prompts=3, length=8, probe_every=3, eval_every=3)
METHODS = {
    "grpo": Effects(),
    "grpo-sg": Effects(accuracy_gain=0.4, sharpness=14.0, low_probability_harm=2.0),
}


@pytest.fixture(scope="session")
def study_folder(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study") / "runs", METHODS, seeds=6, shape=SHAPE)


@pytest.fixture(scope="session")
def study(study_folder):
    (result,) = studies(load_runs(study_folder))
    result.read_tokens(REDUCERS)
    return result


@pytest.fixture(scope="session")
def chromium():
    """A headless browser. Where chromium is there its tests run: without playwright they fail, and are not skipped."""
    if (path := shutil.which("chromium")) is None:
        pytest.skip("no `chromium` on the PATH (Debian's package chromium)")
    from playwright import sync_api

    with sync_api.sync_playwright() as driver:
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        browser = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox"] if root else []
        )
        yield browser
        browser.close()


@dataclass(frozen=True)
class Made:
    """A report, the folder of its runs, and the page's text."""

    files: AnalysisResult
    runs: Path

    @property
    def html(self) -> str:
        return self.files.page.read_text(encoding="utf-8")

    def data(self, name: str):
        """A block of JSON data of the page."""
        (text,) = re.findall(
            rf'<script type="application/json" id="data-{name}">(.*?)</script>',
            self.html,
            re.DOTALL,
        )
        return json.loads(text)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("report")
    for method in ("grpo", "grpo-sg"):
        write_report_run(folder / "runs" / f"{method}-s0", method, spike=method == "grpo")
    return Made(analyze(folder / "runs", folder / "out"), folder / "runs")


@pytest.fixture
def page(chromium, made):
    """The report in a fresh tab; the test fails if the page ever said an error or asked for anything outside."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    tab = context.new_page()
    said, asked = [], []
    tab.on("console", lambda message: said.append((message.type, message.text)))
    tab.on("pageerror", lambda error: said.append(("error", str(error))))
    tab.on("request", lambda request: asked.append(request.url))
    tab.set_default_timeout(10_000)
    tab.goto(made.files.page.as_uri())
    yield tab
    context.close()
    assert not [text for kind, text in said if kind in ("error", "warning")]
    assert not [url for url in asked if not url.startswith(("file:", "data:"))]
