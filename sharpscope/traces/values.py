"""From whatever a caller holds (arrays, tensors, lists, scalars) to Arrow arrays of a column's exact type, checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from sharpscope.errors import nearest
from sharpscope.traces.columns import Column, Table
from sharpscope.traces.schema import ARROW_TYPES, arrow_schema


class SchemaError(ValueError):
    """Rows that do not fit the schema: a mistake in the calling code."""


def to_table(table: Table, columns: Mapping[str, Any]) -> pa.Table:
    """`columns` (name -> 1-D values of one length, or a scalar for all rows; scalars alone make one row) as Arrow.

    None and masked entries become null (not recorded); NaN stays NaN (recorded, not a number). A nullable column may be
    given as None as a whole. Columns of probes may be left out.

    Raises:
        SchemaError: unknown or missing column, different lengths, more than one dimension, wrong type, forbidden null.
    """
    unknown = [name for name in columns if name not in table.names]
    if unknown:
        raise SchemaError(f"{table.name}.{unknown[0]} is no column{nearest(unknown[0], table.names)}")
    missing = [column.name for column in table.columns if column.name not in columns and not column.probe]
    if missing:
        raise SchemaError(f"{table.name}: missing {', '.join(missing)} (a nullable column may be given as None)")
    plain = {name: _plain(value) for name, value in columns.items()}
    lengths = {name: len(value) for name, value in plain.items() if _is_sequence(value)}
    if len(set(lengths.values())) > 1:
        raise SchemaError(f"{table.name}: columns differ in length: {lengths}")
    rows = next(iter(lengths.values()), 1)
    arrays = [_array(table.name, column, plain.get(column.name), rows) for column in table.columns]
    return pa.Table.from_arrays(arrays, schema=arrow_schema(table.name))


def _plain(value: Any) -> Any:
    """A torch tensor as NumPy (this room does not need torch), everything else as it is."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return value


def _is_sequence(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping)


def _array(table: str, column: Column, value: Any, rows: int) -> pa.Array:
    where = f"{table}.{column.name}"
    target = ARROW_TYPES[column.type]
    if value is None:
        if not column.nullable and rows:
            raise SchemaError(f"{where} may not be null")
        return pa.nulls(rows, target)
    if not _is_sequence(value):
        value = [value.item() if isinstance(value, np.generic | np.ndarray) else value] * rows
    if column.type in ("string", "json"):
        array = pa.array([_text(where, column.type, item) for item in value], target)
    else:
        array = _numbers(where, column, value, target)
    if array.null_count and not column.nullable:
        raise SchemaError(f"{where} may not be null, and is in {array.null_count} of {rows} rows")
    return array


def _numbers(where: str, column: Column, value: Any, target: pa.DataType) -> pa.Array:
    mask = np.ma.getmaskarray(value) if isinstance(value, np.ma.MaskedArray) else None
    data = value.data if isinstance(value, np.ma.MaskedArray) else value
    if not isinstance(data, np.ndarray):
        items = [item.item() if hasattr(item, "item") else item for item in data]
        mask = np.array([item is None for item in items], dtype=bool)
        # nulls get a neighbour's value under the mask, so that they do not decide the type
        filler = next((item for item in items if item is not None), np.dtype(target.to_pandas_dtype()).type(0))
        data = (
            np.array([filler if item is None else item for item in items])
            if items
            else np.empty(0, target.to_pandas_dtype())
        )
    if data.ndim != 1:
        raise SchemaError(f"{where} has shape {data.shape}; give one value a row")
    allowed = {"b": "b", "i": "iu", "f": "fiu"}[np.dtype(target.to_pandas_dtype()).kind]
    if data.dtype.kind not in allowed:
        raise SchemaError(f"{where} is {column.type}, got {data.dtype}")
    if column.type.startswith("int") and data.size:
        bounds = np.iinfo(target.to_pandas_dtype())
        if data.min() < bounds.min or data.max() > bounds.max:
            raise SchemaError(f"{where} is {column.type}, got values from {data.min()} to {data.max()}")
    with np.errstate(over="ignore"):  # beyond float32 is recorded as infinite
        return pa.array(data.astype(target.to_pandas_dtype()), target, mask=mask)


def _text(where: str, kind: str, item: Any) -> str | None:
    if item is None:
        return None
    if kind == "json" and isinstance(item, Mapping):
        item = json.dumps({str(key): _finite(number) for key, number in item.items()}, ensure_ascii=False)
    if not isinstance(item, str):
        raise SchemaError(f"{where} is {kind}, got {type(item).__name__}")
    # a lone surrogate (from a "\ud800" in a JSON file) has no UTF-8
    return item.encode("utf-8", "replace").decode("utf-8")


def _finite(number: Any) -> float | None:
    value = float(number)
    return value if math.isfinite(value) else None
