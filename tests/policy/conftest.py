"""A tiny model in a folder."""

from __future__ import annotations

import pytest
import torch

from tests.models import tiny_model
from tests.policy.helpers import word_tokenizer


@pytest.fixture
def saved(tmp_path):
    """Folder of a tiny float32 model with its tokenizer."""
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"
