"""The bench of a 0.5B model on a CPU, at a tiny shape."""

from __future__ import annotations

import sys

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from experiments.benchmarks import laptop
from experiments.benchmarks.cell import SHAPES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_the_page_has_time_and_memory_of_both_parts():
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPES["tiny"], tie_word_embeddings=True)).eval()
    common = {"shape": "tiny", "layers": 2, "threads": 1, "torch": "t", "parameters": model.num_parameters()}
    norms = {"part": "norms", **common, **laptop._norms(model, 1)}
    sam = {"part": "sam", **common, **laptop._sam(model)}
    assert norms["seconds"] > 0 and norms["ratios"] == [norms["seconds"] / norms["passes_seconds"]]
    assert sam["value"] == pytest.approx(sam["first_order"], rel=0.5) and sam["value"] > 0
    page = laptop.report([norms, sam])
    assert "local norms of 512 tokens" in page and "SAM sharpness, 8 rows of 256 tokens" in page
    assert f"**{norms['extra_gib']:.2f} GiB**" in page
