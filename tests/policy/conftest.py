"""A tiny model in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import tiny_model
from tests.policy.helpers import word_tokenizer


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny float32 model with its tokenizer, to be read only."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model(dtype=torch.float32).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder
