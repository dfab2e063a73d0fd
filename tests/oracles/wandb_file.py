"""What an offline file of Weights & Biases holds, read from its bytes: a LevelDB log of protobuf records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 32768


def history(path: Path) -> list[dict[str, Any]]:
    """The logged rows, one a step, with `_step`."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            rows.append(values | {"_step": record.history.step.num})
    return rows


def _records(data: bytes) -> list[bytes]:
    """Records of one or several pieces: checksum (4 bytes), length (2), type (1 whole, 2 first, 3 middle, 4 last)."""
    found, place, whole = [], HEADER, b""
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            found.append(whole)
            whole = b""
    return found
